"""Bad samples, bad shards and bad loaders in whole runs, most of them of two processes. What must
be trained on follows from Python's own `tarfile` and from Pillow."""

import contextlib
import io
import json
import os
import signal
import sys
import tarfile
import time

import pytest
from made_data import encode, jpeg, photo, write_tar
from PIL import Image
from tools import make_shards, on_ranks, rows, tiny_config, tiny_tree, write_config

from multimodal import cli
from multimodal.config import BpeTokenizer, Data, Preprocess
from multimodal.config import ShardsSource as Shards
from multimodal.data import loader as loading
from multimodal.data.loader import eval_loader, train_loader
from multimodal.data.shards import ShardSource
from multimodal.data.text import build_tokenizer
from multimodal.data.transforms import ImageTransform
from multimodal.train import loop
from multimodal.train.loop import train


def pictures(folder) -> dict[str, bytes]:
    """Picture of each key in a folder of shards."""
    found = {}
    for shard in sorted(folder.glob("*.tar")):
        with tarfile.open(shard) as tar:
            for member in tar:
                key, _, ending = member.name.rpartition(".")
                if ending in ("png", "jpg"):
                    found[key] = tar.extractfile(member).read()
    return found


def is_sound(picture: bytes) -> bool:
    try:
        Image.open(io.BytesIO(picture)).load()
    except (OSError, SyntaxError):
        return False
    return True


def train_and_tell(config) -> list[list[str]]:
    """Train; the keys of this rank's part of each step."""
    real, steps = loop.train_step, []

    def train_step(model, loss, optimizer, batch, **kwargs):
        steps.append(batch.keys)
        return real(model, loss, optimizer, batch, **kwargs)

    loop.train_step = train_step
    try:
        train(config)
    finally:
        loop.train_step = real
    return steps


def command(config_file) -> tuple[int, str]:
    """Exit code and errors of `multimodal train` on this rank."""
    sys.argv = ["multimodal", "train", str(config_file)]
    told = io.StringIO()
    try:
        with contextlib.redirect_stderr(told):
            cli.main()
    except SystemExit as end:
        return int(end.code or 0), told.getvalue()
    return 0, told.getvalue()


# --- F28: fewer shards than readers --------------------------------------------------------------


def test_one_shard_is_shared_by_two_ranks_with_two_workers_each(tmp_path):
    shards = make_shards(tmp_path / "data", 32, per_shard=32)
    config = tiny_config(
        tmp_path / "run", shards, "data.workers=2", "train.duration=3 epochs", "log.every=1 steps"
    )
    parts = on_ranks(2, train_and_tell, config)
    assert [[len(keys) for keys in steps] for steps in parts] == [[4] * 12] * 2
    for epoch in range(3):
        seen = [key for steps in parts for keys in steps[4 * epoch : 4 * epoch + 4] for key in keys]
        assert sorted(seen) == sorted(pictures(shards))


# --- F27: lost shards ----------------------------------------------------------------------------


def test_lost_shards_count_against_the_budget_before_the_first_step(tmp_path):
    shards = make_shards(tmp_path / "data", 40, per_shard=10)
    (shards / "00002.tar").write_bytes(b"<html>not found</html>" * 30)
    whole = shards / "00003.tar"
    whole.write_bytes(whole.read_bytes()[:3000])
    path = write_config(tmp_path / "c.yaml", tiny_tree(tmp_path / "run", shards))
    for code, told in on_ranks(2, command, path):
        assert code == 2
        assert "2 of 4 shards are missing, cut or damaged, more than data.max_skipped=0.01" in told
    assert not (tmp_path / "run").exists()
    train(tiny_config(tmp_path / "run", shards, "data.max_skipped=0.5", "train.duration=2 steps"))
    assert (tmp_path / "run" / "model").exists()


# --- F34: many bad samples -----------------------------------------------------------------------


def test_one_percent_of_bad_samples_is_listed_and_summed_up_at_the_end(tmp_path):
    shards = make_shards(tmp_path / "data", 200, per_shard=50, broken=(17, 133))
    tree = tiny_tree(tmp_path / "run", shards, "train.duration=1 epochs", "log.every=5 steps")
    (code, told), (other, _) = on_ranks(2, command, write_config(tmp_path / "c.yaml", tree))
    assert (code, other) == (0, 0)
    listed = rows(tmp_path / "run", "skipped.jsonl")
    bad = {key for key, picture in pictures(shards).items() if not is_sound(picture)}
    assert {row["key"] for row in listed} == bad and len(listed) == len(bad) == 2
    summary = json.loads((tmp_path / "run" / "skipped_summary.json").read_text())
    places = {"00000.tar": 1, "00002.tar": 1}
    assert summary == {"skipped": 2, "reasons": {"not an image": places}}
    end = told[told.rindex("unreadable samples: 2") :]
    assert "2 x not an image: 1 in " in end and "00000.tar" in end and "00002.tar" in end


def test_a_third_of_bad_samples_stops_every_rank_with_a_reason_and_a_code(tmp_path):
    broken = tuple(range(0, 100, 3))
    shards = make_shards(tmp_path / "data", 100, per_shard=50, broken=broken)
    tree = tiny_tree(tmp_path / "run", shards)
    for code, told in on_ranks(2, command, write_config(tmp_path / "c.yaml", tree)):
        assert code == 1
        assert "samples were unreadable, more than data.max_skipped=0.01" in told
        assert "Traceback" not in told
    summary = json.loads((tmp_path / "run" / "skipped_summary.json").read_text())
    assert summary["skipped"] == len(rows(tmp_path / "run", "skipped.jsonl")) > 1
    assert not (tmp_path / "run" / "model").exists()


def test_a_wholly_bad_shard_keeps_all_ranks_in_step(tmp_path):
    shards = make_shards(tmp_path / "data", 52, per_shard=13, broken=tuple(range(13, 26)))
    settings = ("data.max_skipped=0.5", "train.duration=13 steps", "data.workers=1")
    two = on_ranks(2, train_and_tell, tiny_config(tmp_path / "two", shards, *settings))
    one = train_and_tell(tiny_config(tmp_path / "one", shards, *settings))
    assert [first + second for first, second in zip(*two, strict=True)] == one
    assert [len(keys) for keys in one] == [8] * 13
    good = {key for key, picture in pictures(shards).items() if is_sound(picture)}
    assert len(good) == 39 and {key for keys in one for key in keys} == good
    for run in ("one", "two"):
        summary = json.loads((tmp_path / run / "skipped_summary.json").read_text())
        assert summary == {"skipped": 26, "reasons": {"not an image": {"00001.tar": 26}}}


def test_a_resumed_run_sums_up_the_whole(tmp_path):
    shards = make_shards(tmp_path / "data", 40, broken=(3, 17))
    settings = ("data.max_skipped=0.1", "checkpoint.every=5 steps")
    for duration in ("1 epochs", "3 epochs"):
        train(tiny_config(tmp_path / "run", shards, *settings, f"train.duration={duration}"))
        summary = json.loads((tmp_path / "run" / "skipped_summary.json").read_text())
        assert summary["skipped"] == 2 * int(duration[0])


# --- F35: kinds of bad pictures ------------------------------------------------------------------


def test_bad_pictures_are_replaced_alike_on_one_rank_and_two(tmp_path):
    bad = {
        "empty": b"",
        "text": b"this is no picture at all",
        "cut jpeg": jpeg(1)[:-200],
        "cut png": encode(photo(seed=2), "PNG")[:-300],
        "html": b"<html><body>gone</body></html>",
    }
    assert not any(map(is_sound, bad.values()))
    members = []
    for number in range(40 - len(bad)):
        members += [(f"{number}.jpg", jpeg(number, 19, 17)), (f"{number}.txt", b"a text")]
    for name, picture in bad.items():
        members += [(f"{name}.jpg", picture), (f"{name}.txt", b"a text")]
    (tmp_path / "data").mkdir()
    write_tar(tmp_path / "data" / "0.tar", members)
    settings = ("data.max_skipped=0.2", "train.duration=1 epochs")
    one = train_and_tell(tiny_config(tmp_path / "one", tmp_path / "data", *settings))
    two = on_ranks(2, train_and_tell, tiny_config(tmp_path / "two", tmp_path / "data", *settings))
    assert [first + second for first, second in zip(*two, strict=True)] == one
    assert len(one) == 5 and not any(key in bad for keys in one for key in keys)
    reasons = {row["key"]: row["reason"] for row in rows(tmp_path / "two", "skipped.jsonl")}
    assert reasons == {
        "empty": "empty image",
        "text": "not an image",
        "html": "not an image",
        "cut jpeg": "image cut short",
        "cut png": "image cut short",
    }


# --- F32: several captions -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer(
        BpeTokenizer(kind="bpe"),
        context_length=16,
        fixed_length=False,
        vocab_size=300,
        captions=["one two three"],
    )


def captioned(tmp_path):
    record = json.dumps({"captions": ["one", "two", "three"]}).encode()
    members = [("k.jpg", jpeg()), ("k.json", record), ("l.jpg", jpeg(1)), ("l.txt", b"a\nb")]
    write_tar(tmp_path / "0.tar", members)
    return ShardSource(str(tmp_path))


def batches(source, tokenizer, *, steps=30, workers=0, **data):
    return train_loader(
        source,
        data=Data(train=Shards(kind="shards", path="."), workers=workers, **data),
        transform=ImageTransform(8, Preprocess()),
        tokenizer=tokenizer,
        batch_size=2,
        start_step=0,
        end_step=steps,
        rank=0,
        world_size=1,
        seed=5,
    )


def test_which_of_several_captions_is_used_is_declared_and_seeded(tmp_path, tokenizer):
    source = captioned(tmp_path)

    def texts(**data) -> list[str]:
        return [text for batch in batches(source, tokenizer, **data) for text in batch.captions]

    drawn = texts(caption="random")
    assert drawn == texts(caption="random", workers=2)
    assert set(drawn) == {"one", "two", "three", "a\nb"}
    assert set(texts(caption="first")) == {"one", "a\nb"}
    transform = ImageTransform(8, Preprocess())
    (batch,) = eval_loader(source, indices=[0, 1], transform=transform, batch_size=2, workers=0)
    assert batch.captions == [("one", "two", "three"), ("a\nb",)]


# --- F48: a loader that dies or stalls -----------------------------------------------------------


class Deadly(ShardSource):
    def read(self, index):
        if index == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().read(index)


class Stuck(ShardSource):
    def read(self, index):
        if index == 1:
            time.sleep(3)
        return super().read(index)


@pytest.mark.parametrize(("kind", "what"), [(Deadly, "killed|exited"), (Stuck, "timed out")])
def test_a_worker_that_dies_or_stalls_is_an_error_that_names_the_shard(
    tmp_path, tokenizer, monkeypatch, kind, what
):
    monkeypatch.setattr(loading, "_STALLED_SECONDS", 0.5)
    captioned(tmp_path)
    source = kind(str(tmp_path))
    with pytest.raises(RuntimeError, match=what) as caught:
        list(batches(source, tokenizer, workers=1))
    assert "sample 1 in 0.tar" in "".join(caught.value.__notes__)
