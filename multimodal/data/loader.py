"""Batches, made by worker processes, in an order that nothing but the settings decides.

A step t takes the global positions [t * B, (t + 1) * B) and rank r the r-th equal part of them. One
item of the DataLoader is one step's part, built whole by one worker, so neither the number of
workers nor that of ranks touches the order, and resuming is starting at another step.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate, get_worker_info

from multimodal import config
from multimodal.data.batch import Batch, EvalBatch, Skip, from_digests, hash64
from multimodal.data.mixture import fetch_ahead, training_order
from multimodal.data.order import seed_for
from multimodal.data.source import NO_CAPTION, BadSample, Sample, Source
from multimodal.data.text import Tokenizer
from multimodal.data.transforms import ImageTransform

_NUL = "caption with a NUL"
_BAD_IN_A_ROW = 100
"""Candidates for one place in a batch, after which the data count as unusable."""
_STALLED_SECONDS = 600
"""A worker that gives no batch for so long counts as stuck."""


def step_positions(step: int, *, batch_size: int, rank: int, world_size: int) -> range:
    """Global positions that a rank takes in a step.

    Raises:
        ValueError: when the ranks cannot share the batch equally.
    """
    if batch_size % world_size:
        allowed = [n for n in range(1, batch_size + 1) if batch_size % n == 0]
        raise ValueError(
            f"a batch of {batch_size} cannot be shared equally by {world_size} processes; with "
            f"this batch_size the number of processes can be {', '.join(map(str, allowed))}"
        )
    part = batch_size // world_size
    start = step * batch_size + rank * part
    return range(start, start + part)


def train_loader(
    source: Source,
    *,
    data: config.Data,
    transform: ImageTransform,
    tokenizer: Tokenizer,
    batch_size: int,
    start_step: int,
    end_step: int,
    rank: int,
    world_size: int,
    seed: int,
) -> DataLoader[Batch]:
    """Loader of this rank's `Batch` for each step in [start_step, end_step), in order.

    An unusable sample is replaced by the next one of the same source that stands whole batches
    later in the order, and is reported in `Batch.skipped`. Within an epoch a batch never holds a
    sample twice; one that reaches into the next epoch may.

    Args:
        batch_size: Pairs in a step over all ranks.

    Raises:
        ValueError: when the ranks cannot share the batch equally.
    """
    step_positions(0, batch_size=batch_size, rank=rank, world_size=world_size)
    reading = Reading(source, data.workers)
    steps = _TrainSteps(reading, data, transform, tokenizer, batch_size, rank, world_size, seed)
    return in_workers(steps, reading, range(start_step, end_step), data.workers)


def eval_loader(
    source: Source,
    *,
    indices: Sequence[int],
    transform: ImageTransform,
    batch_size: int,
    workers: int,
) -> DataLoader[EvalBatch]:
    """Loader of `EvalBatch` over the given samples, in order; unusable ones are left out."""
    reading = Reading(source, workers)
    batches = _EvalBatches(reading, indices, transform, batch_size)
    return in_workers(batches, reading, range(len(batches)), workers)


class Reading:
    """The source as the workers read it, with a note of the sample that each has read last."""

    def __init__(self, source: Source, workers: int):
        self.source = source
        self._last = torch.full((max(1, workers),), -1).share_memory_()

    def read(self, index: int) -> Sample:
        worker = get_worker_info()
        self._last.numpy()[worker.id if worker else 0] = index
        return self.source.read(index)

    def __str__(self) -> str:
        started = [index for index in self._last.tolist() if index >= 0]
        return ", ".join(f"sample {i} in {self.source.place(i)}" for i in started) or "none yet"


class _Loader(DataLoader):
    """A DataLoader whose errors name the samples that its workers read last."""

    reading: Reading

    def __iter__(self):
        return self._named(super().__iter__())

    def _named(self, batches):
        try:
            yield from batches
        except RuntimeError as error:  # a worker that died, or that gives nothing
            error.add_note(f"samples that the loader read last: {self.reading}")
            raise


def in_workers(dataset: Dataset, reading: Reading, items: range, workers: int) -> DataLoader:
    """The dataset's items in order, made by worker processes, or in this process if there are none.

    Args:
        reading: The source as the dataset reads it.
    """
    loader = _Loader(
        dataset,
        batch_size=None,
        sampler=items,
        num_workers=workers,
        pin_memory=torch.cuda.is_available(),
        timeout=_STALLED_SECONDS if workers else 0,
        worker_init_fn=_start_worker,
        # Fork starts at once and shares the source. It is safe here: workers run one thread, and
        # neither touch CUDA nor take part in collectives.
        multiprocessing_context="fork" if workers and sys.platform == "linux" else None,
        # Its own generator, else the loader would draw its (unused) seed from the global state.
        generator=torch.Generator(),
    )
    loader.reading = reading
    return loader


def _start_worker(worker: int) -> None:
    torch.set_num_threads(1)


class _Row(NamedTuple):
    """One pair of a batch."""

    key: str
    pixels: Tensor
    image_digest: bytes
    caption: str
    text: str
    """The caption in its template."""


class _TrainSteps(Dataset):
    """Map from a step's number to this rank's batch."""

    def __init__(
        self,
        reading: Reading,
        data: config.Data,
        transform: ImageTransform,
        tokenizer: Tokenizer,
        batch_size: int,
        rank: int,
        world_size: int,
        seed: int,
    ):
        self._reading = reading
        self._data = data
        self._transform = transform
        self._tokenizer = tokenizer
        self._batch_size = batch_size
        self._rank = rank
        self._world_size = world_size
        self._seed = seed
        self._order = training_order(reading.source, seed=seed, window=data.shuffle_window)

    def __getitem__(self, step: int) -> Batch:
        positions = step_positions(
            step, batch_size=self._batch_size, rank=self._rank, world_size=self._world_size
        )
        fetch_ahead(self._reading.source, self._order, positions[0])
        skipped: list[Skip] = []
        rows = [self._usable(position, skipped) for position in positions]
        captions = [row.text for row in rows]
        texts = self._tokenizer.encode(captions)
        return Batch(
            images=_stacked([row.pixels for row in rows]),
            tokens=texts.tokens,
            lengths=texts.lengths,
            keys=[row.key for row in rows],
            positions=torch.tensor(positions),
            captions=captions,
            image_ids=from_digests(row.image_digest for row in rows),
            text_ids=hash64(row.caption for row in rows),
            skipped=skipped,
        )

    def _usable(self, position: int, skipped: list[Skip]) -> _Row:
        """The sample at a position, or the nearest usable one whole batches later.

        Only the position's own failure is reported: each later one is met in its own batch.
        """
        own = self._order.locate(position)
        failures = []
        for batches_later in range(_BAD_IN_A_ROW):
            place = self._order.later(position, batches_later, self._batch_size)
            try:
                return self._prepared(place.index, own.epoch, position)
            except BadSample as error:
                failures.append(_skip(self._reading.source, place.index, error, position))
            if batches_later == 0:
                skipped += failures
        raise ValueError(
            f"{self._reading.source.description}: {_BAD_IN_A_ROW} samples in a row cannot be used, "
            f"from position {position} on; the first: {failures[0]}; the last: {failures[-1]}"
        )

    def _prepared(self, index: int, epoch: int, position: int) -> _Row:
        sample = self._reading.read(index)
        caption = self._checked_caption(sample, index, epoch, position)
        templates = self._data.templates
        template = templates[seed_for(self._seed, epoch, position, "template") % len(templates)]
        seed = seed_for(self._seed, epoch, position, "image")
        return _Row(
            key=sample.key,
            pixels=_pixels(sample, self._transform, seed),
            # SHA-1 takes half the time of BLAKE2b, which for a large picture is 2 percent of all.
            image_digest=hashlib.sha1(sample.image or b"", usedforsecurity=False).digest()[:8],
            caption=caption,
            text=template.replace("{}", caption),
        )

    def _checked_caption(self, sample: Sample, index: int, epoch: int, position: int) -> str:
        if not sample.captions:
            raise BadSample(NO_CAPTION, sample.key)
        caption = self._caption(sample.captions, index, epoch, position)
        if "\0" in caption:
            raise BadSample(_NUL, sample.key, repr(caption[:80]))
        if self._tokenizer.is_blank(caption):
            raise BadSample(NO_CAPTION, sample.key, f"cleaning leaves nothing of {caption[:80]!r}")
        return caption

    def _caption(self, captions: tuple[str, ...], index: int, epoch: int, position: int) -> str:
        match self._data.caption:
            case "first":
                chosen = 0
            case "random":
                chosen = seed_for(self._seed, epoch, position, "caption")
            case "all":
                # Where a sample starts does not depend on the epoch, so each epoch is one further.
                chosen = epoch + seed_for(self._seed, 0, index, "first caption")
        return captions[chosen % len(captions)]


class _EvalBatches(Dataset):
    """Map from a batch's number to its samples."""

    def __init__(
        self, reading: Reading, indices: Sequence[int], transform: ImageTransform, batch_size: int
    ):
        self._reading = reading
        self._indices = indices
        self._transform = transform
        self._batch_size = batch_size

    def __len__(self) -> int:
        return -(-len(self._indices) // self._batch_size)

    def __getitem__(self, number: int) -> EvalBatch:
        start = number * self._batch_size
        size = self._transform.size
        samples, images, indices, skipped = [], [], [], []
        for index in self._indices[start : start + self._batch_size]:
            try:
                sample = self._reading.read(index)
                images.append(_pixels(sample, self._transform))
            except BadSample as error:
                skipped.append(_skip(self._reading.source, index, error))
                continue
            samples.append(sample)
            indices.append(int(index))
        nothing = torch.empty(0, 3, size, size, dtype=torch.uint8)
        return EvalBatch(
            images=_stacked(images) if images else nothing,
            keys=[sample.key for sample in samples],
            captions=[sample.captions for sample in samples],
            metas=[sample.meta for sample in samples],
            indices=indices,
            skipped=skipped,
        )


def _pixels(sample: Sample, transform: ImageTransform, seed: int | None = None) -> Tensor:
    try:
        return transform(sample.image or b"", seed)
    except BadSample as error:
        raise BadSample(error.reason, sample.key, error.detail) from error


def _stacked(images: list[Tensor]) -> Tensor:
    """Stack pictures; in a worker, straight into the memory that it shares with its parent."""
    return default_collate(images)


def _skip(source: Source, index: int, error: BadSample, position: int = -1) -> Skip:
    place = source.place(index)
    return Skip(error.key, place, error.reason, error.detail, int(index), position)
