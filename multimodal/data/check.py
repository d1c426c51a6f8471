"""What is in a data source, before hours are spent on it: sizes, captions, repeats, damage."""

from __future__ import annotations

import functools
import hashlib
import io
import time
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
from PIL import Image

from multimodal.data.decode import decode
from multimodal.data.mixture import MixtureSource
from multimodal.data.shards import ShardSource
from multimodal.data.source import NO_CAPTION, BadSample, Fetching, Sample, Skip, Source
from multimodal.data.stream import StreamSource, TrainingSource
from multimodal.data.text import Tokenizer

MOST = 10_000
"""Samples looked at, spread evenly over a larger source."""
_BROKEN_NAMED = 50
_SHOWN = 24
_THUMBNAIL = 160
_QUANTILES = {"least": 0, "5%": 5, "median": 50, "95%": 95, "most": 100}


@dataclass(frozen=True)
class Shown:
    """A sample for people."""

    key: str
    captions: tuple[str, ...]
    jpeg: bytes
    """A small copy of the picture."""


@dataclass(frozen=True)
class DataReport:
    """Facts about the samples looked at. All but `shown` are plain JSON values."""

    description: str
    samples: int
    """In the source."""
    left_out: dict[str, int]
    """Entries that are no samples, by reason, from the whole source."""
    left_out_named: dict[str, list[str]]
    """The first of them, as `SHARD: MEMBER`; of shards only."""
    repeated_keys: int
    """Keys that stand in several shards, each a sample of its own; of shards only."""
    looked_at: int
    per_second: float
    """Samples read and decoded in a second, by all threads."""
    broken: dict[str, int]
    """Samples that cannot be used, by reason."""
    broken_samples: list[dict[str, Any]]
    """The first of them, with place and particulars."""
    formats: dict[str, int]
    spreads: dict[str, dict[str, float]]
    """Least, 5 %, median, 95 % and most of `width`, `height`, `aspect` (the longer side over the
    shorter), `bytes`, `captions` (of a sample), `characters` and, given a tokenizer, `tokens` (of a
    caption, with start and end)."""
    context_length: int | None
    """Longest text in tokens of the tokenizer."""
    cut: int | None
    """Captions that are longer."""
    repeated_images: int
    """Pictures whose bytes have come before among those looked at."""
    repeated_captions: int
    """Captions that have come before."""
    scripts: dict[str, int]
    """Captions by the writing system of most of their letters."""
    shown: list[Shown] = field(default_factory=list, repr=False)

    def as_dict(self) -> dict[str, Any]:
        """All but the pictures."""
        return {name: value for name, value in vars(self).items() if name != "shown"}


def check_data(
    source: TrainingSource,
    *,
    tokenizer: Tokenizer | None = None,
    most: int = MOST,
    threads: int = 1,
    progress: Callable[[int], None] | None = None,
) -> DataReport:
    """Read and decode samples of a source, and count what is found.

    They are evenly spread; of a stream they are the first of some shards.

    Args:
        tokenizer: to count tokens and captions that are cut.
        most: samples looked at.
        threads: that read and decode.
        progress: called with a number of samples that have been looked at since the last call.
    """
    looks, started = [], time.perf_counter()
    for look in _looks(source, most, threads):
        looks.append(look)
        if progress is not None:
            progress(1)
    return _report(source, looks, len(looks) / (time.perf_counter() - started), tokenizer)


def _looks(source: TrainingSource, most: int, threads: int) -> Iterator[_Look]:
    if isinstance(source, StreamSource):
        every = max(1, min(most, len(source)) // _SHOWN)
        for number, item in enumerate(islice(source.examples(), most)):
            show = number % every == 0 and number < every * _SHOWN
            yield (
                _Look(skip=item)
                if isinstance(item, Skip)
                else _look(item.sample, source.names[item.shard], item.index, show)
            )
        return
    stride = max(1, -(-len(source) // most))
    indices = range(0, len(source), stride)
    shown = set(indices[:: max(1, len(indices) // _SHOWN)][:_SHOWN])
    if isinstance(source, Fetching | MixtureSource):
        threads = 1  # what fetches its samples keeps room for one reader
    with ThreadPoolExecutor(threads) as pool:
        yield from pool.map(lambda index: _read(source, index, index in shown), indices)


@dataclass(frozen=True)
class _Look:
    """What one sample is; `skip` says why it cannot be used."""

    skip: Skip | None = None
    format: str = ""
    width: int = 0
    height: int = 0
    bytes: int = 0
    digest: bytes = b""
    captions: tuple[str, ...] = ()
    shown: Shown | None = None


def _read(source: Source, index: int, show: bool) -> _Look:
    try:
        return _look(source.read(index), source.place(index), index, show)
    except BadSample as error:
        return _Look(skip=Skip(error.key, source.place(index), error.reason, error.detail, index))


def _look(sample: Sample, place: str, index: int, show: bool) -> _Look:
    try:
        data = sample.image or b""
        try:
            pixels = decode(data)
        except BadSample as error:
            raise BadSample(error.reason, sample.key, error.detail) from error
        if not sample.captions and sample.meta.get("cls") is None:
            raise BadSample(NO_CAPTION, sample.key)
    except BadSample as error:
        return _Look(skip=Skip(error.key, place, error.reason, error.detail, index))
    height, width = pixels.shape[1:]
    shown = None
    if show:
        picture = Image.fromarray(pixels.permute(1, 2, 0).numpy())
        shown = Shown(sample.key, sample.captions, _thumbnail(picture))
    return _Look(
        format=Image.open(io.BytesIO(data)).format or "unknown",
        width=width,
        height=height,
        bytes=len(data),
        digest=hashlib.blake2b(data, digest_size=16).digest(),
        captions=sample.captions,
        shown=shown,
    )


def _thumbnail(picture: Image.Image) -> bytes:
    picture.thumbnail((_THUMBNAIL, _THUMBNAIL))
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG")
    return buffer.getvalue()


def _report(
    source: TrainingSource, looks: list[_Look], per_second: float, tokenizer: Tokenizer | None
) -> DataReport:
    skips = [look.skip for look in looks if look.skip is not None]
    good = [look for look in looks if look.skip is None]
    captions = [caption for look in good for caption in look.captions]
    tokens = tokenizer.count(captions) if tokenizer is not None else []
    numbers = {
        "width": [look.width for look in good],
        "height": [look.height for look in good],
        "aspect": [max(x.width, x.height) / min(x.width, x.height) for x in good],
        "bytes": [look.bytes for look in good],
        "captions": [len(look.captions) for look in good],
        "characters": [len(caption) for caption in captions],
        "tokens": tokens,
    }
    names = source.examples if isinstance(source, ShardSource) else {}
    limit = tokenizer.context_length if tokenizer is not None else None
    return DataReport(
        description=source.description,
        samples=len(source),
        left_out=dict(source.problems),
        left_out_named={
            reason: list(names[reason]) for reason in source.problems if reason in names
        },
        repeated_keys=source.repeated_keys().count if isinstance(source, ShardSource) else 0,
        looked_at=len(looks),
        per_second=round(per_second, 1),
        broken=_counted(skip.reason for skip in skips),
        broken_samples=[vars(skip) for skip in skips[:_BROKEN_NAMED]],
        formats=_counted(look.format for look in good),
        spreads={name: _spread(values) for name, values in numbers.items() if values},
        context_length=limit,
        cut=None if limit is None else sum(count > limit for count in tokens),
        repeated_images=_repeats(look.digest for look in good),
        repeated_captions=_repeats(captions),
        scripts=_counted(_scripts(captions)),
        shown=[look.shown for look in good if look.shown is not None],
    )


def _spread(values: list[int] | list[float]) -> dict[str, float]:
    found = np.percentile(values, list(_QUANTILES.values())).tolist()
    return dict(zip(_QUANTILES, (round(x, 2) for x in found), strict=True))


def _counted(values: Iterable[str]) -> dict[str, int]:
    return dict(Counter(values).most_common())


def _repeats(values: Iterable[object]) -> int:
    counts = Counter(values)
    return counts.total() - len(counts)


def _scripts(captions: Iterable[str]) -> Iterator[str]:
    for caption in captions:
        letters = Counter(_script(letter) for letter in caption if letter.isalpha())
        yield letters.most_common(1)[0][0] if letters else "none"


@functools.cache
def _script(letter: str) -> str:
    """First word of the letter's Unicode name, such as LATIN, CYRILLIC, CJK."""
    return unicodedata.name(letter, "UNKNOWN").split()[0].split("-")[0].lower()
