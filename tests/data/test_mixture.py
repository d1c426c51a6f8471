import pickle
from collections import Counter
from dataclasses import dataclass, field
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multimodal import config
from multimodal.config import Data
from multimodal.config_io import ConfigError, check
from multimodal.data import mixture
from multimodal.data.build import open_source
from multimodal.data.mixture import MixtureSource, samples_by_source, training_order
from multimodal.data.order import Order
from multimodal.data.source import BadSample, Sample

few = settings(max_examples=40, deadline=None)


@dataclass
class Part:
    """Samples that can be told apart; every group has seven."""

    count: int
    name: str = "part"
    problems: dict[str, int] = field(default_factory=lambda: {"broken": 2})

    @property
    def description(self):
        return f"made {self.name}"

    def __len__(self):
        return self.count

    def groups(self):
        return [7] * (self.count // 7) + [self.count % 7]

    def read(self, index):
        if index == 1:
            raise BadSample("unreadable", f"k{index}", "as made")
        return Sample(f"k{index}", f"{self.name} {index}".encode(), (), {"i": index})

    def place(self, index):
        return f"shard {index // 7}"

    def fingerprint(self):
        return f"{self.name} {self.count}"


def made(sizes: dict[str, int], weights: dict[str, float] | None = None) -> MixtureSource:
    return MixtureSource({name: Part(size, name) for name, size in sizes.items()}, weights)


def taken(source: MixtureSource, positions, seed: int = 0, window: int = 20):
    """(name of the source, number in it) at each position."""
    order = training_order(source, seed=seed, window=window)
    texts = []
    for position in positions:
        place = order.locate(position)
        name, _, number = source.names[place.part], *source._locate(place.index)
        assert source._locate(place.index)[0] == place.part
        texts.append((name, number))
    return texts


SIZES = {"a": 41, "b": 5, "c": 113}


@pytest.mark.parametrize("block", [1, 13, 4096])
def test_without_weights_an_epoch_holds_every_sample_once(monkeypatch, block):
    monkeypatch.setattr(mixture, "_BLOCK", block)
    source = made(SIZES)
    every = {(name, i) for name, size in SIZES.items() for i in range(size)}
    orders = []
    for epoch in range(3):
        orders.append(taken(source, range(epoch * 159, (epoch + 1) * 159)))
        assert Counter(orders[-1]) == Counter(every)
    assert orders[0] != orders[1] != orders[2]


@few
@given(
    st.lists(st.integers(1, 300), min_size=1, max_size=6),
    st.one_of(st.none(), st.lists(st.floats(0.01, 100), min_size=6, max_size=6)),
    st.integers(1, 50),
)
def test_a_source_is_never_a_sample_away_from_its_share_at_the_end_of_a_block(
    sizes, numbers, block
):
    names = [f"s{i}" for i in range(len(sizes))]
    weights = None if numbers is None else dict(zip(names, numbers, strict=False))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mixture, "_BLOCK", block)
        source = made(dict(zip(names, sizes, strict=True)), weights)
        shares = mixture.Shares(source, seed=3)
        wanted = [Fraction(str(w)) for w in weights.values()] if weights else sizes
        counts, position = Counter(), 0
        for _ in range(6):
            size = len(shares._block(position).slots)
            found = [shares.locate(p)[0] for p in range(position, position + size)]
            counts.update(found)
            position += size
            for part, share in enumerate(wanted):
                assert abs(counts[part] - Fraction(share) / sum(wanted) * position) < 1
            assert shares.counts(position) == [counts[i] for i in range(len(sizes))]


def test_rounding_favours_the_largest_remainder(monkeypatch):
    """By hand, for shares of 0.4, 0.3 and 0.3: 4 samples are 1.6, 1.2, 1.2; 8 are 3.2, 2.4, 2.4."""
    monkeypatch.setattr(mixture, "_BLOCK", 4)
    shares = mixture.Shares(made(SIZES, {"a": 4, "b": 3, "c": 3}), seed=0)
    counts = [shares.counts(position) for position in (0, 4, 8, 12, 20)]
    assert counts == [[0, 0, 0], [2, 1, 1], [3, 3, 2], [5, 4, 3], [8, 6, 6]]


def test_each_source_is_passed_through_whole_again_and_again():
    source = made({"small": 11, "large": 1009}, {"small": 1, "large": 3})
    found = taken(source, range(9001))
    for name, size in (("small", 11), ("large", 1009)):
        numbers = [number for own, number in found if own == name]
        passes = [numbers[i : i + size] for i in range(0, len(numbers) - size, size)]
        assert len(passes) > 5
        assert all(sorted(one) == list(range(size)) for one in passes)
        assert passes[0] != passes[1]
    order, turns = training_order(source, seed=0, window=20), Counter()
    for position in range(9001):  # captions that are taken in turn go by the pass of their source
        place = order.locate(position)
        assert place.epoch == turns[place.part] // (1009, 11)[place.part]
        turns[place.part] += 1


@few
@given(st.lists(st.integers(0, 10**7), min_size=1, max_size=10), st.booleans())
def test_a_position_does_not_depend_on_what_was_asked_before(positions, weighted):
    source = made(SIZES, {"a": 0.5, "b": 0.2, "c": 0.3} if weighted else None)
    used = training_order(source, seed=3, window=17)
    for position in positions:
        assert used.locate(position) == training_order(source, seed=3, window=17).locate(position)


def test_counts_by_source_follow_from_the_position():
    source = made(SIZES, {"a": 2, "b": 1, "c": 1})
    order = training_order(source, seed=5, window=20)
    counts = Counter(source.names[order.locate(p).part] for p in range(6001))
    named = {f"samples/{name}": counts[name] for name in "abc"}
    assert samples_by_source(source, 5, 6001) == named
    assert samples_by_source(source, 5, 0) == {"samples/a": 0, "samples/b": 0, "samples/c": 0}
    assert samples_by_source(Part(3), 5, 100) == {}


def test_names_of_sources_mark_keys_places_problems_and_bad_samples():
    source = made({"b": 20, "a": 10})
    assert [len(source), source.groups()] == [30, [7, 3, 7, 7, 6]]
    assert source.read(2).key == "a/k2"
    assert source.read(12) == Sample("b/k2", b"b 2", (), {"i": 2})
    assert (source.place(9), source.place(10)) == ("a/shard 1", "b/shard 0")
    assert source.problems == {"a: broken": 2, "b: broken": 2}
    with pytest.raises(BadSample, match=r"^b/k1: unreadable \(as made\)$"):
        source.read(11)
    for index in (-1, 30):
        with pytest.raises(IndexError):
            source.read(index)
    assert pickle.loads(pickle.dumps(source)).read(12).key == "b/k2"


def test_fingerprint_follows_what_the_order_depends_on():
    prints = [
        made(SIZES).fingerprint(),
        made(SIZES, {"a": 1, "b": 1, "c": 1}).fingerprint(),
        made(SIZES, {"a": 1, "b": 2, "c": 1}).fingerprint(),
        made(SIZES | {"c": 112}).fingerprint(),
        MixtureSource({"x": Part(41, "a"), "b": Part(5, "b"), "c": Part(113, "c")}).fingerprint(),
    ]
    assert len(set(prints)) == len(prints)
    again = made(dict(reversed(SIZES.items())), {"c": 0.5, "b": 1.0, "a": 0.5})
    assert again.fingerprint() == prints[2]


def test_sources_of_equal_sizes_are_not_shuffled_alike():
    source = made({"a": 50, "b": 50})
    found = taken(source, range(100))
    assert [i for name, i in found if name == "a"] != [i for name, i in found if name == "b"]


def test_a_share_below_the_least_is_refused():
    with pytest.raises(ValueError, match=r"mixture: a has a share of 1e-09; .* larger weight"):
        made({"a": 5, "b": 5}, {"a": 1e-9, "b": 1})


def test_one_source_and_a_plain_source():
    source = made({"a": 30})
    assert Counter(taken(source, range(30))) == Counter(("a", i) for i in range(30))
    assert isinstance(training_order(Part(3), seed=0, window=5), Order)


# --- settings ------------------------------------------------------------------------------------

FOLDER = {"kind": "folder", "path": "x"}


def test_a_section_opens_its_sources(tmp_path):
    for name in ("x", "y"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.jpg").write_bytes(b"j")
    folders = {n: config.FolderSource(kind="folder", path=str(tmp_path / n)) for n in ("x", "y")}
    section = config.MixtureSource(kind="mixture", sources=folders, weights={"x": 1.0, "y": 3.0})
    source = open_source(section)
    assert [source.read(i).key for i in range(2)] == ["x/x.jpg", "y/y.jpg"]
    assert source.description.startswith("mixture of 25.0% x (folder ")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weights": {"a": 1.0}}, "weights are given for a, sources for a, b; give each"),
        ({"weights": {"a": 1.0, "b": 0.0}}, "greater than 0"),
        ({"sources": {}}, "at least 1"),
        ({"sources": {"a/b": FOLDER}}, "should match pattern"),
        ({"sources": {"a": {"kind": "mixture"}}}, r"sources\.a\.kind = 'mixture': allowed are"),
    ],
)
def test_mistakes_are_refused(change, message):
    section = {"kind": "mixture", "sources": {"a": FOLDER, "b": FOLDER}} | change
    with pytest.raises(ConfigError, match=message):
        check({"train": section}, Data)


def test_a_rare_source_finds_what_stands_in_for_a_bad_sample_at_once():
    """In the order of the mixture the next sample of the source may be a million places away."""
    order = training_order(made({"big": 300_000, "rare": 3}), seed=1, window=1000)
    position = next(p for p in range(len(order)) if order.locate(p).part == 1)
    places = [order.later(position, batches, 256) for batches in range(6)]
    assert places[0] == order.locate(position)
    assert {place.part for place in places} == {1}
    assert sorted(place.index - 300_000 for place in places) == [0, 0, 1, 1, 2, 2]
