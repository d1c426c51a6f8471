"""From a sample to a row, and from rows to a training batch; the same for every way of reading."""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import default_collate

from multimodal import config
from multimodal.data.batch import Batch, from_digests, hash64
from multimodal.data.order import seed_for
from multimodal.data.source import NO_CAPTION, BadSample, Sample, Skip
from multimodal.data.text import Tokenizer
from multimodal.data.transforms import ImageTransform

_NUL = "caption with a NUL"


class Row(NamedTuple):
    """One pair of a batch."""

    key: str
    pixels: Tensor
    image_digest: bytes
    caption: str
    text: str
    """The caption in its template."""


class Rows:
    """What a run makes of its samples. Every draw is a function of the seed and two numbers.

    Args:
        data: Says which caption is taken and what stands around it.
        seed: Seed of the run.
    """

    def __init__(
        self, data: config.Data, transform: ImageTransform, tokenizer: Tokenizer, seed: int
    ):
        self._data = data
        self._transform = transform
        self._tokenizer = tokenizer
        self._seed = seed

    def row(self, sample: Sample, *, epoch: int, number: int, position: int) -> Row:
        """Decode and change a sample's picture, and choose its text.

        Args:
            epoch: Which pass through its source the sample belongs to.
            number: Its number, the same in every epoch.
            position: Its place in the run, or whatever tells its draws in an epoch from others'.

        Raises:
            BadSample: when picture or caption cannot be used.
        """
        caption = self._checked_caption(sample, epoch, number, position)
        templates = self._data.templates
        template = templates[seed_for(self._seed, epoch, position, "template") % len(templates)]
        seed = seed_for(self._seed, epoch, position, "image")
        return Row(
            key=sample.key,
            pixels=pixels_of(sample, self._transform, seed),
            # SHA-1 takes half the time of BLAKE2b, which for a large picture is 2 percent of all.
            image_digest=hashlib.sha1(sample.image or b"", usedforsecurity=False).digest()[:8],
            caption=caption,
            text=template.replace("{}", caption),
        )

    def batch(self, rows: list[Row], positions: range, skipped: list[Skip]) -> Batch:
        """Put rows together.

        Args:
            positions: Global positions of the rows.
            skipped: What could not be used on the way.
        """
        captions = [row.text for row in rows]
        texts = self._tokenizer.encode(captions)
        return Batch(
            images=stacked([row.pixels for row in rows]),
            tokens=texts.tokens,
            lengths=texts.lengths,
            keys=[row.key for row in rows],
            positions=torch.tensor(positions),
            captions=captions,
            image_ids=from_digests(row.image_digest for row in rows),
            text_ids=hash64(row.caption for row in rows),
            skipped=skipped,
        )

    def _checked_caption(self, sample: Sample, epoch: int, number: int, position: int) -> str:
        if not sample.captions:
            raise BadSample(NO_CAPTION, sample.key)
        caption = self._caption(sample.captions, epoch, number, position)
        if "\0" in caption:
            raise BadSample(_NUL, sample.key, repr(caption[:80]))
        if self._tokenizer.is_blank(caption):
            raise BadSample(NO_CAPTION, sample.key, f"cleaning leaves nothing of {caption[:80]!r}")
        return caption

    def _caption(self, captions: tuple[str, ...], epoch: int, number: int, position: int) -> str:
        match self._data.caption:
            case "first":
                chosen = 0
            case "random":
                chosen = seed_for(self._seed, epoch, position, "caption")
            case "all":
                # Where a sample starts does not depend on the epoch, so each epoch is one further.
                chosen = epoch + seed_for(self._seed, 0, number, "first caption")
        return captions[chosen % len(captions)]


def pixels_of(sample: Sample, transform: ImageTransform, seed: int | None = None) -> Tensor:
    """A sample's picture, uint8 [3, S, S].

    Raises:
        BadSample: naming the sample, when it cannot be decoded.
    """
    try:
        return transform(sample.image or b"", seed)
    except BadSample as error:
        raise BadSample(error.reason, sample.key, error.detail) from error


def stacked(images: list[Tensor]) -> Tensor:
    """Stack pictures; in a worker, straight into the memory that it shares with its parent."""
    return default_collate(images)
