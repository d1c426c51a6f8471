"""Batches, made by worker processes, in an order that nothing but the settings decides.

A step t takes the global positions [t * B, (t + 1) * B) and rank r the r-th equal part of them. One
item of the DataLoader is one step's part, built whole by one worker, so neither the number of
workers nor that of ranks touches the order, and resuming is starting at another step.

A stream cannot be read by number: its workers make every n-th step each, of shards of their own
(see `stream`), and there the order depends on how many they are.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from multimodal import config
from multimodal.data.batch import Batch, EvalBatch, Skip
from multimodal.data.mixture import fetch_ahead, training_order
from multimodal.data.order import Ordering
from multimodal.data.rows import Row, Rows, pixels_of, stacked
from multimodal.data.source import BadSample, Sample, Source
from multimodal.data.stream import Streamed, StreamSource, TrainingSource
from multimodal.data.text import Tokenizer
from multimodal.data.transforms import ImageTransform
from multimodal.data.worker_signals import held_back, leave_to_the_run

_BAD_IN_A_ROW = 100
"""Candidates for one place in a batch, after which the data count as unusable."""
_STALLED_SECONDS = 480
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


@dataclass(frozen=True)
class Share:
    """A rank's part of every batch.

    Attributes:
        batch_size: Pairs in a step over all ranks.
    """

    batch_size: int
    rank: int
    world_size: int

    def positions(self, step: int) -> range:
        return step_positions(
            step, batch_size=self.batch_size, rank=self.rank, world_size=self.world_size
        )


def train_loader(
    source: TrainingSource,
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
    stalled: float | None = None,
) -> DataLoader[Batch]:
    """Loader of this rank's `Batch` for each step in [start_step, end_step), in order.

    An unusable sample is replaced by the next one of the same source that stands whole batches
    later in the order (in a stream, by the next one), and is reported in `Batch.skipped`. Within an
    epoch a batch never holds a sample twice; one that reaches into the next epoch may.

    Args:
        batch_size: Pairs in a step over all ranks.
        stalled: Seconds after which a worker that gives no batch counts as stuck; 0 is never.

    Raises:
        ValueError: when the ranks cannot share the batch equally, or a stream's shards at all.
    """
    share = Share(batch_size, rank, world_size)
    share.positions(0)
    rows = Rows(data, transform, tokenizer, seed)
    items = range(start_step, end_step)
    if isinstance(source, StreamSource):
        workers = source.workers(data.workers, world_size)
        stream = _StreamSteps(source, rows, items, share, workers, seed)
        return in_workers(stream, stream, None, workers, stalled)
    reading = Reading(source, data.workers)
    order = training_order(source, seed=seed, window=data.shuffle_window)
    steps = _TrainSteps(reading, rows, order, share)
    return in_workers(steps, reading, items, data.workers, stalled)


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


class LastRead:
    """A note of what each worker has read last, for when one dies."""

    def __init__(self, workers: int):
        self._numbers = torch.full((max(1, workers),), -1).share_memory_()

    def note(self, number: int) -> None:
        worker = get_worker_info()
        self._numbers.numpy()[worker.id if worker else 0] = number

    def told(self, place: Callable[[int], str]) -> str:
        """The notes in words; `place` says what a number stands for."""
        return ", ".join(place(n) for n in self._numbers.tolist() if n >= 0) or "none yet"


class Reading:
    """The source as the workers read it, with a note of the sample that each has read last."""

    def __init__(self, source: Source, workers: int):
        self.source = source
        self._last = LastRead(workers)

    def read(self, index: int) -> Sample:
        self._last.note(index)
        return self.source.read(index)

    def __str__(self) -> str:
        return self._last.told(lambda index: f"sample {index} in {self.source.place(index)}")


class _Loader(DataLoader):
    """A DataLoader whose errors name the samples that its workers read last."""

    reading: Reading | _StreamSteps

    def __iter__(self):
        with held_back():
            batches = super().__iter__()
        return self._named(batches)

    def _named(self, batches):
        try:
            yield from batches
        except RuntimeError as error:  # a worker that died, or that gives nothing
            error.add_note(f"samples that the loader read last: {self.reading}")
            raise


def in_workers(
    dataset: Dataset,
    reading: Reading | _StreamSteps,
    items: range | None,
    workers: int,
    stalled: float | None = None,
) -> DataLoader:
    """The dataset's items in order, made by worker processes, or in this process if there are none.

    Args:
        reading: The source as the dataset reads it.
        items: What the dataset is asked for; None where it gives its items by itself.
        stalled: As for `train_loader`.
    """
    stalled = _STALLED_SECONDS if stalled is None else stalled
    loader = _Loader(
        dataset,
        batch_size=None,
        sampler=items,
        num_workers=workers,
        pin_memory=torch.cuda.is_available(),
        timeout=stalled if workers else 0,
        worker_init_fn=_start_worker,
        # Fork starts at once and shares the source. It is safe here: workers neither touch CUDA nor
        # take part in collectives.
        multiprocessing_context="fork" if workers and sys.platform == "linux" else None,
        # Its own generator, else the loader would draw its (unused) seed from the global state.
        generator=torch.Generator(),
    )
    loader.reading = reading
    return loader


def _start_worker(worker: int) -> None:
    torch.set_num_threads(1)
    leave_to_the_run()


class _TrainSteps(Dataset):
    """Map from a step's number to this rank's batch."""

    def __init__(self, reading: Reading, rows: Rows, order: Ordering, share: Share):
        self._reading = reading
        self._rows = rows
        self._order = order
        self._share = share

    def __getitem__(self, step: int) -> Batch:
        positions = self._share.positions(step)
        fetch_ahead(self._reading.source, self._order, positions[0])
        skipped: list[Skip] = []
        rows = [self._usable(position, skipped) for position in positions]
        return self._rows.batch(rows, positions, skipped)

    def _usable(self, position: int, skipped: list[Skip]) -> Row:
        """The sample at a position, or the nearest usable one whole batches later.

        Only the position's own failure is reported: each later one is met in its own batch.
        """
        own = self._order.locate(position)
        failures = []
        for batches_later in range(_BAD_IN_A_ROW):
            place = self._order.later(position, batches_later, self._share.batch_size)
            try:
                sample = self._reading.read(place.index)
                return self._rows.row(
                    sample, epoch=own.epoch, number=place.index, position=position
                )
            except BadSample as error:
                failures.append(_skip(self._reading.source, place.index, error, position))
            if batches_later == 0:
                skipped += failures
        raise ValueError(
            f"{self._reading.source.description}: {_BAD_IN_A_ROW} samples in a row cannot be used, "
            f"from position {position} on; the first: {failures[0]}; the last: {failures[-1]}"
        )


class _StreamSteps(IterableDataset):
    """This rank's batches of some steps, of which each worker gives every n-th.

    What cannot be used is reported with the position that waited for it.
    """

    def __init__(
        self,
        source: StreamSource,
        rows: Rows,
        steps: range,
        share: Share,
        workers: int,
        seed: int,
    ):
        self._source = source
        self._rows = rows
        self._steps = steps
        self._share = share
        self._seed = seed
        self._last = LastRead(workers)

    def __str__(self) -> str:
        return self._last.told(lambda shard: f"shard {self._source.names[shard]}")

    def __iter__(self) -> Iterator[Batch]:
        worker = get_worker_info()
        number, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        items = self._source.endless(
            seed=self._seed,
            position=self._steps.start * self._share.batch_size,
            reader=self._share.rank * workers + number,
            readers=self._share.world_size * workers,
        )
        for step in self._steps[number::workers]:
            skipped: list[Skip] = []
            positions = self._share.positions(step)
            rows = [self._next(items, position, skipped) for position in positions]
            yield self._rows.batch(rows, positions, skipped)

    def _next(self, items: Iterator[Streamed | Skip], position: int, skipped: list[Skip]) -> Row:
        """The next usable sample."""
        left_out: list[Skip] = []
        while len(left_out) < _BAD_IN_A_ROW:
            item = next(items)
            if isinstance(item, Streamed):
                self._last.note(item.shard)
                try:
                    row = self._rows.row(
                        item.sample, epoch=item.epoch, number=item.number, position=item.number
                    )
                    skipped += left_out
                    return row
                except BadSample as error:
                    place = self._source.names[item.shard]
                    item = Skip(error.key, place, error.reason, error.detail, item.index)
            left_out.append(replace(item, position=position))
        raise ValueError(
            f"{self._source.description}: {_BAD_IN_A_ROW} samples in a row cannot be used; the "
            f"first: {left_out[0]}; the last: {left_out[-1]}"
        )


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
                images.append(pixels_of(sample, self._transform))
            except BadSample as error:
                skipped.append(_skip(self._reading.source, index, error))
                continue
            samples.append(sample)
            indices.append(int(index))
        nothing = torch.empty(0, 3, size, size, dtype=torch.uint8)
        return EvalBatch(
            images=stacked(images) if images else nothing,
            keys=[sample.key for sample in samples],
            captions=[sample.captions for sample in samples],
            metas=[sample.meta for sample in samples],
            indices=indices,
            skipped=skipped,
        )


def _skip(source: Source, index: int, error: BadSample, position: int = -1) -> Skip:
    place = source.place(index)
    return Skip(error.key, place, error.reason, error.detail, int(index), position)
