import itertools
import time
from collections import Counter
from dataclasses import dataclass, field

import pytest
import torch
from made_data import jpeg, pairs, write_tar

from multimodal.config import Augment, BpeTokenizer, Data, FolderSource, Preprocess
from multimodal.data.loader import eval_loader, step_positions, train_loader
from multimodal.data.mixture import MixtureSource, training_order
from multimodal.data.order import Order
from multimodal.data.shards import ShardSource
from multimodal.data.source import BadSample, Sample
from multimodal.data.text import build_tokenizer
from multimodal.data.transforms import ImageTransform

SIZE = 13
PICTURES = [jpeg(seed, 19, 17) for seed in range(5)]


@dataclass
class Made:
    """A source of small pictures with three captions each, some of them bad."""

    count: int = 41
    bad: tuple[int, ...] = ()
    description: str = "made"
    problems: dict[str, int] = field(default_factory=dict)

    def __len__(self):
        return self.count

    def groups(self):
        return [7] * (self.count // 7) + [self.count % 7]

    def read(self, index):
        if index in self.bad[::2]:
            raise BadSample("unreadable", f"k{index}")
        image = b"no picture" if index in self.bad[1::2] else PICTURES[index % len(PICTURES)]
        captions = tuple(f"{text} {index}" for text in ("first", "second", "third"))
        return Sample(f"k{index}", image, captions, {"cls": index % 3})

    def place(self, index):
        return f"shard {index // 7}"

    def fingerprint(self):
        return "made"


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer(
        BpeTokenizer(kind="bpe"),
        context_length=16,
        fixed_length=False,
        vocab_size=300,
        captions=["first second third"],
    )


AUGMENT = Augment(scale=[0.5, 1.0], flip=0.5, color_jitter=0.5, grayscale=0.2)
EVAL = ImageTransform(SIZE, Preprocess())


def make(source, tokenizer, *, world_size=1, rank=0, steps=(0, 9), batch_size=6, seed=0, **data):
    section = {"workers": 0, "shuffle_window": 20, "templates": ["{}", "a photo of {}"]}
    return train_loader(
        source,
        data=Data(train=FolderSource(kind="folder", path="."), **(section | data)),
        transform=ImageTransform(SIZE, Preprocess(), AUGMENT),
        tokenizer=tokenizer,
        batch_size=batch_size,
        start_step=steps[0],
        end_step=steps[1],
        rank=rank,
        world_size=world_size,
        seed=seed,
    )


def rows_of(batches) -> list[tuple]:
    """All that a sample brings into training, one tuple a sample."""
    rows = []
    for batch in batches:
        assert batch.images.dtype == torch.uint8
        assert batch.images.is_contiguous()
        assert batch.tokens.dtype == batch.lengths.dtype == batch.positions.dtype == torch.int64
        assert len(batch.tokens) == len(batch.images) == len(batch.keys) == len(batch.captions)
        for i, key in enumerate(batch.keys):
            tokens = tuple(batch.tokens[i, : batch.lengths[i]].tolist())
            pixels = batch.images[i].numpy().tobytes()
            rows.append((int(batch.positions[i]), key, tokens, batch.captions[i], pixels))
    return rows


def global_rows(source, tokenizer, world_size: int, **options) -> list[tuple]:
    """The rows of all ranks, put together step by step."""
    loaders = [
        make(source, tokenizer, world_size=world_size, rank=rank, **options)
        for rank in range(world_size)
    ]
    return [row for step in zip(*loaders, strict=True) for row in rows_of(step)]


@pytest.fixture(scope="module")
def expected(tokenizer):
    return global_rows(Made(bad=(3, 8, 20)), tokenizer, 1)


# --- order ---------------------------------------------------------------------------------------


def test_positions_are_shared_out_in_order():
    parts = [step_positions(5, batch_size=12, rank=rank, world_size=3) for rank in range(3)]
    assert [list(part) for part in parts] == [
        [60, 61, 62, 63],
        [64, 65, 66, 67],
        [68, 69, 70, 71],
    ]


def test_a_batch_that_ranks_cannot_share_is_refused(tokenizer):
    with pytest.raises(ValueError, match=r"batch of 6 .* by 4 processes; .* can be 1, 2, 3, 6$"):
        make(Made(), tokenizer, world_size=4)


def test_positions_count_up_and_each_epoch_has_every_sample(tokenizer):
    rows = rows_of(make(Made(), tokenizer, steps=(0, 14)))
    assert [row[0] for row in rows] == list(range(84))
    keys = [row[1] for row in rows]
    for epoch in (keys[:41], keys[41:82]):
        assert Counter(epoch) == Counter(f"k{i}" for i in range(41))
    assert keys[:41] != keys[41:82]


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_neither_ranks_nor_workers_change_what_is_trained_on(
    tokenizer, expected, workers, world_size
):
    rows = global_rows(Made(bad=(3, 8, 20)), tokenizer, world_size, workers=workers)
    assert rows == expected


@pytest.mark.parametrize("start", [1, 4, 8])
def test_a_later_start_continues_the_same_sequence(tokenizer, expected, start):
    rows = global_rows(Made(bad=(3, 8, 20)), tokenizer, 1, steps=(start, 9))
    assert rows == expected[6 * start :]


def test_the_seed_changes_order_pixels_and_captions(tokenizer, expected):
    other = global_rows(Made(bad=(3, 8, 20)), tokenizer, 1, seed=1)
    assert [row[1] for row in other] != [row[1] for row in expected]


def test_no_global_random_state_is_touched(tokenizer):
    before = torch.get_rng_state()
    list(make(Made(), tokenizer, workers=1, steps=(0, 2)))
    assert torch.equal(torch.get_rng_state(), before)


# --- captions and changes ------------------------------------------------------------------------


def test_first_caption_and_no_template(tokenizer):
    rows = rows_of(make(Made(), tokenizer, caption="first", templates=["{}"]))
    assert all(row[3] == f"first {row[1][1:]}" for row in rows)


def test_random_captions_and_templates_are_drawn_evenly_and_anew_each_epoch(tokenizer):
    rows = rows_of(make(Made(), tokenizer, steps=(0, 40)))
    words = Counter(row[3].removeprefix("a photo of ").split()[0] for row in rows)
    assert set(words) == {"first", "second", "third"}
    assert min(words.values()) > 50  # of 240; 80 are expected of each
    templates = Counter(row[3].startswith("a photo of ") for row in rows)
    assert min(templates.values()) > 90
    texts = [{row[3] for row in rows if row[1] == f"k{i}"} for i in range(41)]
    assert max(map(len, texts)) > 2
    pictures = [{row[4] for row in rows if row[1] == f"k{i}"} for i in range(41)]
    assert min(map(len, pictures)) >= 5


class Repeated(Made):
    """A picture comes twice under two names, and one name stands for two pictures."""

    def read(self, index):
        sample = super().read(index)
        captions = (f"caption {index % 5}",)
        return Sample(f"k{index % 3}", PICTURES[index // 2 % len(PICTURES)], captions, sample.meta)


def test_equal_pictures_and_captions_are_known_whatever_their_names_and_templates(tokenizer):
    source = Repeated()
    count = 0
    for batch in make(source, tokenizer, templates=["{}", "a photo of {}", "no {}"], steps=(0, 12)):
        words = [text.split()[-1] for text in batch.captions]
        order = Order(source.groups(), seed=0, window=20)
        pictures = [source.read(order.locate(p)[1]).image for p in batch.positions.tolist()]
        for i, j in itertools.combinations(range(len(words)), 2):
            assert (batch.text_ids[i] == batch.text_ids[j]) == (words[i] == words[j])
            same = pictures[i] == pictures[j]
            assert (batch.image_ids[i] == batch.image_ids[j]) == same
            count += same and batch.keys[i] != batch.keys[j]
    assert count


class Several(Made):
    """Samples with one to four captions."""

    def read(self, index):
        sample = super().read(index)
        captions = tuple(f"{word} {index}" for word in "abcd"[: 1 + index % 4])
        return Sample(sample.key, sample.image, captions, sample.meta)


def test_all_captions_of_a_sample_come_in_turn(tokenizer):
    """In any n epochs each of a sample's n captions is seen once, and an epoch stays an epoch."""
    rows = rows_of(make(Several(), tokenizer, caption="all", templates=["{}"], steps=(0, 55)))
    epochs = [rows[start : start + 41] for start in range(0, 8 * 41, 41)]
    seen = [{row[1]: row[3] for row in epoch} for epoch in epochs]
    for index in range(41):
        captions = [f"{word} {index}" for word in "abcd"[: 1 + index % 4]]
        texts = [epoch[f"k{index}"] for epoch in seen]
        for start in range(8 - len(captions)):
            assert sorted(texts[start : start + len(captions)]) == captions
    assert len({text.split()[0] for text in seen[0].values()}) == 4, "not all start with the first"


def test_all_captions_come_in_the_same_turn_for_every_start_and_rank_count(tokenizer):
    options = {"caption": "all", "templates": ["{}"]}
    whole = [row[3] for row in global_rows(Several(), tokenizer, 1, steps=(0, 20), **options)]
    later = [row[3] for row in global_rows(Several(), tokenizer, 3, steps=(9, 20), **options)]
    assert later == whole[54:]


def test_braces_in_a_caption_are_text(tokenizer):
    class Braces(Made):
        def read(self, index):
            return Sample("k", PICTURES[0], ("a {} {0} b",), {})

    rows = rows_of(make(Braces(), tokenizer, templates=["<{}>"], steps=(0, 1)))
    assert {row[3] for row in rows} == {"<a {} {0} b>"}


# --- bad samples ---------------------------------------------------------------------------------


def test_a_bad_sample_is_replaced_from_a_later_batch_and_reported(tokenizer):
    bad = (3, 8, 20)
    order = Order(Made().groups(), seed=0, window=20)
    batches = list(make(Made(bad=bad), tokenizer, steps=(0, 7)))
    reported = [skip for batch in batches for skip in batch.skipped]
    assert [skip.position for skip in reported] == [
        position for position in range(42) if order.locate(position)[1] in bad
    ]
    for skip in reported:
        assert order.locate(skip.position)[1] == skip.index
        assert skip.key == f"k{skip.index}"
        assert skip.place == f"shard {skip.index // 7}"
        assert skip.reason == ("not an image" if skip.index == 8 else "unreadable")
    for row in rows_of(batches):
        candidates = [order.locate(row[0] + 6 * later)[1] for later in range(10)]
        good = next(index for index in candidates if index not in bad)
        assert row[1] == f"k{good}"


def test_in_a_mixture_a_bad_sample_is_replaced_from_its_own_source(tokenizer):
    source = MixtureSource({"a": Made(bad=(3, 8, 20)), "b": Made(count=20)}, {"a": 1, "b": 2})
    order = training_order(source, seed=0, window=20)
    batches = list(make(source, tokenizer, steps=(0, 30)))
    skips = [skip for batch in batches for skip in batch.skipped]
    assert {skip.key for skip in skips} == {"a/k3", "a/k8", "a/k20"}
    assert {skip.place for skip in skips} == {"a/shard 0", "a/shard 1", "a/shard 2"}
    for position, key, *_ in rows_of(batches):
        assert key[0] == "ab"[order.locate(position).part]


def test_a_batch_holds_no_sample_twice_when_many_are_bad(tokenizer):
    source = Made(count=400, bad=tuple(range(0, 400, 3)))
    for batch in make(source, tokenizer, shuffle_window=400, steps=(0, 12)):
        assert len(set(batch.keys)) == len(batch.keys)
        reported = [skip.position for skip in batch.skipped]
        assert len(set(reported)) == len(reported)


def test_a_sample_without_a_caption_is_skipped(tokenizer):
    class Mute(Made):
        def read(self, index):
            sample = super().read(index)
            return Sample(sample.key, sample.image, (), {}) if index == 5 else sample

    batches = list(make(Mute(), tokenizer, steps=(0, 7)))
    skips = [skip for batch in batches for skip in batch.skipped]
    assert {(skip.key, skip.reason) for skip in skips} == {("k5", "no caption")}


def test_unusable_data_stop_with_an_error(tokenizer):
    source = Made(bad=tuple(range(41)))
    start = time.perf_counter()
    with pytest.raises(ValueError, match="100 samples in a row cannot be used, from position 0"):
        list(make(source, tokenizer))
    assert time.perf_counter() - start < 5


def test_one_sample_and_a_batch_larger_than_the_data(tokenizer):
    class One(Made):
        def groups(self):
            return [1]

    rows = rows_of(make(One(count=1), tokenizer, steps=(0, 2), workers=1))
    assert [row[1] for row in rows] == ["k0"] * 12


# --- evaluation ----------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_evaluation_sees_each_sample_once_in_order(workers):
    source = Made(bad=(3, 8, 20))
    indices = list(range(40, 0, -2))
    batches = list(
        eval_loader(source, indices=indices, transform=EVAL, batch_size=6, workers=workers)
    )
    good = [i for i in indices if i not in source.bad]
    assert [i for batch in batches for i in batch.indices] == good
    assert [key for batch in batches for key in batch.keys] == [f"k{i}" for i in good]
    assert [meta for batch in batches for meta in batch.metas] == [{"cls": i % 3} for i in good]
    assert batches[0].captions[0] == ("first 40", "second 40", "third 40")
    skips = [(s.index, s.key, s.reason) for batch in batches for s in batch.skipped]
    assert skips == [(20, "k20", "unreadable"), (8, "k8", "not an image")]
    for batch in batches:
        assert batch.images.is_contiguous()
        assert batch.images.shape == (len(batch.keys), 3, SIZE, SIZE)
        for index, pixels in zip(batch.indices, batch.images, strict=True):
            assert torch.equal(pixels, EVAL(PICTURES[index % len(PICTURES)]))


def test_evaluation_with_nothing_usable_or_nothing_at_all():
    source = Made(bad=(3, 8, 20))
    (batch,) = eval_loader(source, indices=[3, 8], transform=EVAL, batch_size=5, workers=0)
    assert batch.images.shape == (0, 3, SIZE, SIZE)
    assert len(batch.skipped) == 2
    assert list(eval_loader(source, indices=[], transform=EVAL, batch_size=5, workers=1)) == []


# --- from files ----------------------------------------------------------------------------------


def test_shards_are_read_by_forked_workers_in_parallel(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for shard in range(3):
        members = pairs([f"{shard}{i}" for i in range(7)])
        members = [(n, PICTURES[0] if n.endswith("jpg") else data) for n, data in members]
        write_tar(tmp_path / f"{shard}.tar", members)
    source = ShardSource(str(tmp_path))
    source.read(0)  # opens a file that the workers then share with this process
    rows = rows_of(make(source, tokenizer, workers=2, steps=(0, 7), templates=["{}"]))
    assert sorted(row[1] for row in rows[:21]) == sorted(source.read(i).key for i in range(21))
    assert all(row[3] == row[1] for row in rows)


def test_batch_moves_whole(tokenizer):
    (batch,) = make(Made(bad=(3, 8, 20)), tokenizer, steps=(0, 1))
    moved = batch.to("meta")
    tensors = (moved.images, moved.tokens, moved.lengths, moved.positions)
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    assert (moved.keys, moved.captions) == (batch.keys, batch.captions)
