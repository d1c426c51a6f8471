"""Shards read in sequence: who reads what, what a resume repeats, and what must not go unseen."""

import pickle
import tarfile
import threading
from collections import Counter
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from made_data import StandIn, jpeg, keys_in_order, pairs, write_tar

from multimodal import config
from multimodal.config import Augment, Preprocess
from multimodal.config_io import check
from multimodal.data import remote
from multimodal.data.build import open_training
from multimodal.data.check import check_data
from multimodal.data.loader import train_loader
from multimodal.data.shards import ShardSource
from multimodal.data.source import WHOLE_SHARD, Skip
from multimodal.data.stream import Streamed, StreamSource
from multimodal.data.transforms import ImageTransform

SHARDS, EACH = 12, 7
SAMPLES = SHARDS * EACH


def names(shard: int, count: int = EACH) -> list[str]:
    return [f"{shard}-{i}" for i in range(count)]


@pytest.fixture
def folder(tmp_path):
    root = tmp_path / "shards"
    root.mkdir()
    for shard in range(SHARDS):
        write_tar(root / f"{shard:02d}.tar", pairs(names(shard)))
    return root


EVERY = Counter(name for shard in range(SHARDS) for name in names(shard))


def data_section(path, samples=SAMPLES, workers=0, shuffle_buffer=10, **options) -> config.Data:
    section = {"kind": "stream", "path": str(path), "samples": samples}
    section["shuffle_buffer"] = shuffle_buffer
    return config.Data.model_validate({"train": section, "workers": workers, **options})


def keys(path, steps, *, ranks=1, batch_size=6, **options) -> list[str]:
    data = data_section(path, **options)
    return keys_in_order(
        open_training(data.train), data, steps=range(*steps), batch_size=batch_size, ranks=ranks
    )


def batches(path, steps=(0, 14), *, rank=0, ranks=1, batch_size=6, transform=None, **options):
    stand_in: Any = StandIn()
    data = data_section(path, **options)
    return train_loader(
        open_training(data.train),
        data=data,
        transform=transform or stand_in,
        tokenizer=stand_in,
        batch_size=batch_size,
        start_step=steps[0],
        end_step=steps[1],
        rank=rank,
        world_size=ranks,
        seed=0,
    )


def skips(path, steps=(0, 14), **options) -> list[Skip]:
    return [skip for batch in batches(path, steps, **options) for skip in batch.skipped]


# --- epochs --------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1])
def test_every_epoch_of_one_reader_has_every_sample_once_in_another_order(folder, workers):
    seen = keys(folder, (0, 42), workers=workers)
    epochs = [seen[i * SAMPLES : (i + 1) * SAMPLES] for i in range(3)]
    assert [Counter(epoch) for epoch in epochs] == [EVERY] * 3
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    shards = [list(dict.fromkeys(key.split("-")[0] for key in epoch)) for epoch in epochs]
    assert shards[0] != shards[1] != shards[2]
    assert seen == keys(folder, (0, 42), workers=workers)


@pytest.mark.parametrize(("ranks", "workers"), [(2, 0), (2, 2), (1, 3), (3, 2)])
def test_readers_share_an_epoch_without_overlap(folder, ranks, workers):
    """12 even shards for 2, 3, 4 or 6 readers: all are through with an epoch at the same step."""
    size = EACH * ranks
    steps = SAMPLES // size
    seen = keys(folder, (0, 2 * steps), ranks=ranks, workers=workers, batch_size=size)
    assert Counter(seen[:SAMPLES]) == EVERY
    assert Counter(seen[SAMPLES:]) == EVERY
    of_rank = [
        {
            key
            for b in batches(
                folder, (0, steps), rank=r, ranks=ranks, workers=workers, batch_size=size
            )
            for key in b.keys
        }
        for r in range(ranks)
    ]
    assert sum(map(len, of_rank)) == len(set().union(*of_rank)) == SAMPLES


def test_readers_have_equally_many_shards_when_an_epoch_cannot_be_dealt_evenly(tmp_path):
    for shard in range(5):
        write_tar(tmp_path / f"{shard}.tar", pairs(names(shard)))
    source = StreamSource(str(tmp_path), 35, 5)
    dealt: Counter[tuple[int, int]] = Counter()
    for reader in range(4):
        items = source.endless(seed=0, position=0, reader=reader, readers=4)
        own = {(i.epoch, i.shard) for i in takewhile(lambda i: i.epoch < 4, items)}
        assert len(own) == 5
        dealt.update(own)
    assert dealt == Counter((epoch, shard) for epoch in range(4) for shard in range(5))


def test_the_buffer_mixes_shards(folder):
    runs = {}
    for buffer in (1, 40):
        shards = [key.split("-")[0] for key in keys(folder, (0, 14), shuffle_buffer=buffer)]
        runs[buffer] = sum(a != b for a, b in pairwise(shards))
    assert runs[1] == SHARDS - 1
    assert runs[40] > 4 * SHARDS


def test_positions_are_those_of_the_steps(folder):
    for rank in range(2):
        found = [
            b.positions.tolist() for b in batches(folder, (3, 9), rank=rank, ranks=2, workers=2)
        ]
        first = [step * 6 + 3 * rank for step in range(3, 9)]
        assert found == [[p, p + 1, p + 2] for p in first]


def test_uneven_shards_keep_all_ranks_at_work(tmp_path):
    for shard, count in enumerate((1, 30, 2, 9, 1)):
        write_tar(tmp_path / f"{shard}.tar", pairs(names(shard, count)))
    seen = keys(tmp_path, (0, 40), ranks=2, workers=2, samples=43)
    assert len(seen) == 240
    assert len(set(seen)) == 43


# --- workers and ranks ---------------------------------------------------------------------------


def test_fewer_shards_than_workers_use_fewer_workers(tmp_path):
    for shard in range(3):
        write_tar(tmp_path / f"{shard}.tar", pairs(names(shard)))
    assert batches(tmp_path, workers=8, samples=21).num_workers == 3
    assert batches(tmp_path, workers=8, ranks=2, samples=21).num_workers == 1
    seen = keys(tmp_path, (0, 21), workers=8, samples=21, batch_size=1)
    assert len(set(seen)) == len(seen) == 21


def test_fewer_shards_than_ranks_are_refused_with_the_numbers(tmp_path):
    write_tar(tmp_path / "0.tar", pairs(names(0)))
    with pytest.raises(ValueError, match=r"1 shard\(s\) cannot be shared by 2 processes"):
        batches(tmp_path, ranks=2, samples=7)


# --- resume --------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [1, 5, 7, 13, 14, 20])
def test_a_resume_starts_at_the_shard_that_the_position_says(folder, step):
    whole = keys(folder, (0, 28), shuffle_buffer=1)
    resumed = keys(folder, (step, 28), shuffle_buffer=1)
    at = step * 6 // EACH * EACH
    assert resumed == whole[at : at + len(resumed)]
    assert 0 <= step * 6 - at < EACH, "less than a shard is repeated, nothing is missed"


@pytest.mark.parametrize("step", [3, 6, 11])
@pytest.mark.parametrize(
    ("before", "after"), [((1, 0), (2, 0)), ((2, 2), (1, 0)), ((1, 2), (3, 1))]
)
def test_a_resume_with_other_readers_repeats_and_misses_at_most_a_shard_and_buffer_each(
    folder, step, before, after
):
    buffer = 4
    count = {"ranks": before[0], "workers": before[1], "shuffle_buffer": buffer}
    start = keys(folder, (0, step), **count)
    count = {"ranks": after[0], "workers": after[1], "shuffle_buffer": buffer}
    rest = keys(folder, (step, 14), **count)
    seen = Counter(start + rest)
    missed = len(EVERY.keys() - seen.keys())
    most = max(readers[0] * max(1, readers[1]) for readers in (before, after))
    assert missed <= most * (EACH + buffer)
    assert sum(seen.values()) - len(seen) <= most * (EACH + buffer)


# --- draws ---------------------------------------------------------------------------------------


def test_draws_belong_to_the_sample_and_the_epoch_whoever_reads_it(tmp_path):
    for shard in range(4):
        members = [(n, jpeg(3, 31, 23) if n.endswith("jpg") else d) for n, d in pairs(names(shard))]
        write_tar(tmp_path / f"{shard}.tar", members)
    augment = Augment(scale=[0.3, 1.0], color_jitter=0.5)
    transform = ImageTransform(13, Preprocess(), augment)

    def pixels(steps, **options) -> dict[str, bytes]:
        found = batches(tmp_path, steps, samples=28, batch_size=2, transform=transform, **options)
        return {k: b.images[i].numpy().tobytes() for b in found for i, k in enumerate(b.keys)}

    first = pixels((0, 14))
    assert len(set(first.values())) == 28, "one picture, 28 different crops"
    assert pixels((0, 14), workers=2) == first
    assert all(first[key] != again for key, again in pixels((14, 28)).items())


def test_all_captions_come_in_turn(tmp_path):
    text = b'{"captions": ["one", "two", "three"]}'
    members = [(f"{i}.{e}", text) for i in range(6) for e in ("jpg", "json")]
    write_tar(tmp_path / "0.tar", members)
    seen: dict[str, list[str]] = {}
    for batch in batches(tmp_path, (0, 3), samples=6, caption="all"):
        for key, caption in zip(batch.keys, batch.captions, strict=True):
            seen.setdefault(key, []).append(caption)
    assert all(sorted(captions) == ["one", "three", "two"] for captions in seen.values())
    assert len({captions[0] for captions in seen.values()}) > 1


# --- faults --------------------------------------------------------------------------------------


def cut_at(path, size, target):
    target.write_bytes(path.read_bytes()[:size])
    return target


def examples(path, samples=7) -> list[Streamed | Skip]:
    return list(StreamSource(str(path), samples, 1).examples())


def test_a_cut_shard_never_passes_in_silence_nor_pairs_wrongly(tmp_path):
    """Wherever a tar is cut, even between members or in its end marker's first block."""
    whole = write_tar(tmp_path / "whole.tar", pairs(names(0)))
    with tarfile.open(whole) as tar:
        end = max(member.offset_data + member.size for member in tar)
    end = -(-end // 512) * 512
    good = write_tar(tmp_path / "good.tar", pairs(["good"]))
    for size in range(256, end + 1, 256):
        cut = cut_at(whole, size, tmp_path / "cut.tar")
        source = StreamSource(f"{tmp_path}/{{good,cut}}.tar", 8, 1)
        found = [
            item for item in source.examples() if source.names[place(source, item)] == cut.name
        ]
        lost = [item for item in found if isinstance(item, Skip)]
        assert [s.reason for s in lost if s.index == WHOLE_SHARD] == ["truncated shard"], size
        assert {s.reason for s in lost} <= {"truncated shard", "cut sample"}
        for item in found:
            if isinstance(item, Streamed):
                assert item.sample.image == b"picture of " + item.sample.key.encode()
                assert item.sample.captions == (item.sample.key,)
    assert good.exists()


def place(source: StreamSource, item: Streamed | Skip) -> int:
    return source.names.index(item.place) if isinstance(item, Skip) else item.shard


def test_the_same_is_wrong_as_in_an_indexed_shard(tmp_path, monkeypatch):
    """The index is the second implementation: reasons and numbers agree member by member."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    members = [
        *pairs(["good"]),
        ("alone.jpg", b"x"),
        ("text.txt", b"x"),
        *pairs(["twice"]),
        ("twice.jpg", b"y"),
        ("two.jpg", b"x"),
        ("two.png", b"y"),
        ("two.txt", b"z"),
        ("../up.jpg", b"x"),
        (".hidden.txt", b"x"),
        ("virus.pyd", pickle.dumps(print)),
        ("CAT no. 2.JPG", b"picture"),
        ("CAT no. 2.TXT", b"a cat"),
    ]
    path = write_tar(tmp_path / "0.tar", members)
    indexed = ShardSource(str(path))
    streamed = StreamSource(str(path), 2, 1)
    before = Counter(streamed.problems)
    found = list(streamed.examples())
    left_out = Counter(streamed.problems) - before
    left_out += Counter(item.reason for item in found if isinstance(item, Skip))
    assert left_out == Counter(indexed.problems)
    samples = [item.sample for item in found if isinstance(item, Streamed)]
    assert samples == [indexed.read(i) for i in range(len(indexed))]


def test_parts_that_do_not_stand_side_by_side_are_told(tmp_path):
    a, b, c = pairs(["a"]), pairs(["b"]), pairs(["c"])
    write_tar(tmp_path / "0.tar", [a[0], b[0], a[1], b[1], *c])
    found = examples(tmp_path)
    assert [item.sample.key for item in found if isinstance(item, Streamed)] == ["c"]
    reasons = [(item.key, item.reason) for item in found if isinstance(item, Skip)]
    apart = "parts that do not stand side by side"
    expected = [("a", "no caption"), ("b", "no caption"), ("a", apart), ("b", apart)]
    assert reasons == expected


def test_long_names_and_pax_headers_are_followed(tmp_path):
    name = "deep/" * 40 + "\u00e9"
    for shard, kind in enumerate((tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)):
        write_tar(tmp_path / f"{shard}.tar", pairs([name]), format=kind)
    found = [item.sample for item in examples(tmp_path) if isinstance(item, Streamed)]
    assert [sample.key for sample in found] == [name, name]


def test_broken_shards_are_reported_once_an_epoch_and_training_goes_on(folder):
    cut_at(folder / "03.tar", 2 * 2048 + 700, folder / "03.tar")
    (folder / "05.tar").write_bytes(b"no tar at all" * 100)
    write_tar(folder / "07.tar", [])
    found = skips(folder, (0, 30), workers=2)
    lost = Counter((s.place, s.reason) for s in found if s.index == WHOLE_SHARD)
    kinds = {("03.tar", "truncated shard"), ("05.tar", "not a tar file")}
    assert set(lost) == kinds | {("07.tar", "shard without a sample")}
    assert min(lost.values()) >= 2
    assert {s.key for s in found if s.reason == "cut sample"} == {"3-2"}
    assert all(s.position >= 0 for s in found)


def test_a_bad_sample_is_left_out_and_named(folder):
    broken = [(n, b"\xff" if n == "4-3.txt" else d) for n, d in pairs(names(4))]
    write_tar(folder / "04.tar", broken)
    seen = keys(folder, (0, 14))
    assert set(seen) >= EVERY.keys() - {"4-3"}
    assert [(s.key, s.place, s.reason, s.index) for s in skips(folder, (0, 14))] == [
        ("4-3", "04.tar", "text is not UTF-8", 3)
    ]


def test_nothing_usable_stops_with_an_error_and_never_hangs(tmp_path):
    write_tar(tmp_path / "0.tar", pairs(names(0)))
    source = StreamSource(str(tmp_path), 7, 5)
    write_tar(tmp_path / "0.tar", [])
    stand_in: Any = StandIn()
    loader = train_loader(
        source,
        data=data_section(tmp_path),
        transform=stand_in,
        tokenizer=stand_in,
        batch_size=2,
        start_step=0,
        end_step=3,
        rank=0,
        world_size=1,
        seed=0,
    )
    with pytest.raises(ValueError, match=r"100 samples in a row .*shard without a sample"):
        list(loader)


def test_what_cannot_be_trained_on_is_refused_when_it_is_opened(tmp_path):
    with pytest.raises(ValueError, match="leads to no shard"):
        StreamSource(str(tmp_path / "no"), 7, 5)
    write_tar(tmp_path / "0.tar", [("a.jpg", b"x")])
    with pytest.raises(ValueError, match=r"no usable sample in 0.tar.* 1 x no caption"):
        StreamSource(str(tmp_path), 7, 5)
    with pytest.raises(ValueError, match="none of the 2 shards is there"):
        StreamSource(f"{tmp_path}/{{6..7}}.tar", 7, 5)


def test_missing_shards_of_a_pattern_are_problems(folder):
    source = StreamSource(f"{folder}/{{00..15}}.tar", 112, 5)
    assert source.problems == {"missing shard": 4}
    assert (len(source.groups()), sum(source.groups())) == (16, 112)


def test_no_shell_is_run_and_nothing_is_unpickled(tmp_path, folder):
    canary = tmp_path / "canary"

    class Bomb:
        def __reduce__(self):
            return Path.touch, (canary,)

    write_tar(folder / "00.tar", [*pairs(names(0)), ("0-0.pyd", pickle.dumps(Bomb()))])
    keys(folder, (0, 14))
    for path in (
        f"pipe:touch {canary}",
        f"pipe:touch {canary}; cat http://x/0.tar",
        f"{{pipe:touch {canary},{folder}/00.tar}}",
        f"http://x/0.tar::pipe:touch {canary}",
    ):
        try:
            keys(path, (0, 1))
        except ValueError:
            assert path[0] != "{"
    assert not canary.exists()


def test_a_member_too_large_to_keep_is_passed_over(folder, monkeypatch):
    from multimodal.data import tar_scan

    monkeypatch.setattr(tar_scan, "LARGEST_KEPT", 1000)
    monkeypatch.setattr(tar_scan, "_FLOW", 512)
    large = [("big.jpg", bytes(20_000)), ("big.txt", b"x"), *pairs(["after"])]
    write_tar(folder / "0.tar", large)
    found = examples(folder / "0.tar")
    assert [(item.key, item.reason) for item in found if isinstance(item, Skip)] == [
        ("big", "part too large")
    ]
    assert [item.sample.key for item in found if isinstance(item, Streamed)] == ["after"]


# --- stores --------------------------------------------------------------------------------------


class Server(BaseHTTPRequestHandler):
    """Gives whole files, knows no ranges and no HEAD, and breaks off when told to."""

    def __init__(self, *arguments, root: Path, breaks: list[int], asked: list[str]):
        self.root, self.breaks, self.asked = root, breaks, asked
        super().__init__(*arguments)

    def do_GET(self):
        path = self.root / self.path.lstrip("/")
        self.asked.append(path.name)
        if not path.exists():
            self.send_error(404)
            return
        content = path.read_bytes()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[: self.breaks.pop()] if self.breaks else content)

    def log_message(self, *_):
        pass


@pytest.fixture
def served(folder, monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(remote.time, "sleep", lambda seconds: None)
    breaks: list[int] = []
    asked: list[str] = []
    handler = partial(Server, root=folder, breaks=breaks, asked=asked)
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/", breaks, asked
    server.shutdown()
    server.server_close()


def test_a_web_server_without_ranges_gives_the_same(folder, served):
    url, _, asked = served
    assert keys(f"{url}{{00..11}}.tar", (0, 14), workers=2) == keys(folder, (0, 14), workers=2)
    assert max(Counter(asked).values()) <= 2, "once, and once more to see whether it is data"


def test_a_connection_that_breaks_goes_on_where_it_was(folder, served):
    url, breaks, asked = served
    source = StreamSource(f"{url}00.tar", 7, 5)
    breaks += [9000, 3000]
    asked.clear()
    found = [item.sample.key for item in source.examples() if isinstance(item, Streamed)]
    assert found == names(0)
    assert len(asked) == 3


def test_a_server_that_keeps_breaking_loses_a_shard_and_says_so(folder, served):
    url, breaks, _ = served
    source = StreamSource(f"{url}00.tar", 7, 5)
    breaks += [4000] * 3
    *given, cut, lost = source.examples()
    assert isinstance(cut, Skip) and isinstance(lost, Skip)
    assert (cut.reason, lost.reason) == ("cut sample", "unreadable shard")
    assert "bytes early" in lost.detail
    assert all(isinstance(item, Streamed) for item in given)


def test_a_missing_shard_on_a_server_is_told(folder, served):
    url, _, _ = served
    (folder / "04.tar").unlink()
    found = skips(f"{url}{{00..11}}.tar", (0, 14))
    assert [(s.place, s.reason, s.index) for s in found] == [
        ("04.tar", "missing shard", WHOLE_SHARD)
    ]


def test_any_store_of_fsspec_will_do(folder):
    filesystem = fsspec.filesystem("memory")
    filesystem.store.clear()
    for path in folder.iterdir():
        filesystem.pipe(f"/bucket/{path.name}", path.read_bytes())
    assert keys("memory://bucket", (0, 14)) == keys(folder, (0, 14))


# --- settings, checks ----------------------------------------------------------------------------


def test_a_copy_elsewhere_has_the_same_fingerprint_and_other_names_have_not(folder, tmp_path):
    own = StreamSource(str(folder), SAMPLES, 5).fingerprint()
    moved = folder.rename(tmp_path / "moved")
    assert StreamSource(str(moved), SAMPLES, 9).fingerprint() == own
    assert StreamSource(str(moved), SAMPLES + 1, 5).fingerprint() != own
    (moved / "00.tar").rename(moved / "99.tar")
    assert StreamSource(str(moved), SAMPLES, 5).fingerprint() != own


def test_shards_of_equal_names_are_told_apart(tmp_path):
    for part in "ab":
        (tmp_path / part).mkdir()
        write_tar(tmp_path / part / "0.tar", pairs([part]))
    assert StreamSource(f"{tmp_path}/{{a,b}}/0.tar", 2, 5).names == ["a/0.tar", "b/0.tar"]


STREAM = {"kind": "stream", "path": "x", "samples": 5}


@pytest.mark.parametrize(
    ("schema", "tree", "where"),
    [
        (
            config.Data,
            {"train": {"kind": "mixture", "sources": {"web": STREAM}}},
            "train.sources.web",
        ),
        (
            config.EvaluateConfig,
            {"evaluate": {"val": {"kind": "retrieval", "data": STREAM}}},
            "evaluate.val.data",
        ),
    ],
)
def test_a_stream_elsewhere_than_in_training_is_refused_in_one_sentence(schema, tree, where):
    with pytest.raises(ValueError, match=rf"{where}: kind=stream can only .* use kind=shards here"):
        check(tree, schema)


def test_a_wrong_number_of_samples_is_told(folder, caplog):
    keys(folder, (0, 15))
    assert "true number" not in caplog.text
    keys(folder, (0, 15), samples=SAMPLES * 2)
    assert "samples=168 is 14 a shard" in caplog.text
    assert "held 7 each" in caplog.text


def test_the_data_check_looks_at_a_stream(folder):
    for shard in range(SHARDS):
        members = [(n, jpeg(1) if n.endswith("jpg") else d) for n, d in pairs(names(shard))]
        write_tar(folder / f"{shard:02d}.tar", members)
    cut_at(folder / "03.tar", 3000, folder / "03.tar")
    report = check_data(StreamSource(str(folder), SAMPLES, 5))
    assert report.samples == SAMPLES
    assert report.broken == {"truncated shard": 1, "cut sample": 1}
    assert len(report.shown) == 24
    assert check_data(StreamSource(str(folder), SAMPLES, 5), most=10).looked_at == 10


def test_no_global_random_state_is_touched(folder):
    import random

    before, python = torch.get_rng_state(), random.getstate()
    keys(folder, (0, 3))
    assert torch.equal(torch.get_rng_state(), before)
    assert random.getstate() == python
