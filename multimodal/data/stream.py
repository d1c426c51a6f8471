"""Tar shards that are read from front to back only, on webdataset's pipeline.

For what cannot be read by number, or is not worth an index: web servers without ranges, object
stores behind a mount, shards too large to keep. What a reader (a worker of a rank) does:

    shards of an epoch, permuted    -> those dealt to this reader
    bytes                           -> members, by the same rules as an index (`tar_scan`)
    members side by side, one key   -> samples (webdataset.group_by_keys), or what is wrong
    samples                         -> shuffled in a buffer (webdataset.shuffle)

webdataset's own opener and tar reader are not used: the one runs `pipe:` addresses in a shell, the
other ends at a cut without a word. Nothing is unpickled.

What is guaranteed: an epoch deals out every shard once; a reader whose shards are used up goes on
with the next epoch's, so all ranks have equally many steps. A run that is not interrupted repeats
itself exactly, given the same ranks and workers. Resuming needs the position only: as many shards
as `position / (samples / shards)` count as used, and the others are dealt out anew. With evenly
filled shards each reader then repeats or misses at most about a shard and a shuffle buffer. A
resumed run is not the uninterrupted one to the last bit, as it is for all other sources.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import islice, pairwise
from random import Random
from typing import Any, NamedTuple

from multimodal.data.forward import Forward
from multimodal.data.order import permutation
from multimodal.data.remote import find_urls, is_remote
from multimodal.data.shards import find_shards
from multimodal.data.source import (
    WHOLE_SHARD,
    BadSample,
    Sample,
    Skip,
    Source,
    parse_sidecars,
    split_name,
)
from multimodal.data.tar_index import (
    APART,
    FIELDS,
    IMAGE,
    LABEL,
    RECORD,
    TEXT,
    fault_of,
    refusal,
)
from multimodal.data.tar_scan import Broken, Findings, Flow, members_of

_FIRST = 1000
"""Samples that a buffer holds before it gives the first, or all that it takes if that is less."""
_PROBED = 3
"""Shards that are tried before data without a usable sample are refused."""
_UNEVEN = 0.2
"""How far the declared samples of a shard may be from those found."""
log = logging.getLogger(__name__)


class Streamed(NamedTuple):
    """A usable sample, and where it comes from."""

    sample: Sample
    epoch: int
    shard: int
    index: int
    """Place in the shard."""

    @property
    def number(self) -> int:
        """The same in every epoch, and of no other sample."""
        return self.shard << 32 | self.index


class StreamSource:
    """Shards that are read in sequence.

    Args:
        path: A folder, a file, a pattern, or a URL of these.
        samples: Samples of an epoch, as declared.
        shuffle_buffer: Samples that a reader draws from.

    Raises:
        ValueError: when there is no shard, or the first ones have no usable sample.
    """

    def __init__(self, path: str, samples: int, shuffle_buffer: int):
        self.description = f"stream {path}"
        self._samples = samples
        self._buffer = shuffle_buffer
        named = find_urls(path) if is_remote(path) else [str(p) for p in find_shards(path)]
        self._shards = [s for s in named if is_remote(s) or os.path.exists(s)]
        self._missing = len(named) - len(self._shards)
        self.names = _names(self._shards)
        self.problems: dict[str, int] = {"missing shard": self._missing} if self._missing else {}
        self._probe(path)

    def __len__(self) -> int:
        return self._samples

    def groups(self) -> list[int]:
        """Samples of each shard, were they evenly filled; 0 where it is missing."""
        count = len(self._shards)
        ends = [self._samples * i // count for i in range(count + 1)]
        return [end - start for start, end in pairwise(ends)] + [0] * self._missing

    def fingerprint(self) -> str:
        """SHA-256 of the names of the shards and the declared number of samples."""
        text = "\n".join([*self.names, str(self._samples)])
        return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()

    def workers(self, wanted: int, world_size: int) -> int:
        """How many workers of each rank have shards to read.

        Raises:
            ValueError: when there are not even shards for all ranks.
        """
        shards = len(self._shards)
        if shards < world_size:
            raise ValueError(
                f"{self.description}: {shards} shard(s) cannot be shared by {world_size} "
                f"processes, since each reads shards of its own; use at most {shards} process(es), "
                "write smaller shards, or read them with data.train.kind=shards"
            )
        able = min(wanted, shards // world_size)
        if able < wanted:
            log.info(
                "%s: %d shard(s) keep %d of data.workers=%d workers of each of %d process(es) busy",
                *(self.description, shards, able, wanted, world_size),
            )
        return able

    def endless(
        self, *, seed: int, position: int, reader: int, readers: int
    ) -> Iterator[Streamed | Skip]:
        """What a reader gets from a global position on, epoch after epoch."""
        for epoch, shards in self._deal(seed, position, reader, readers):
            draw = Random(f"{seed}/{epoch}/{reader}/{readers}")
            count = 0
            for item in self._pipeline(shards, epoch, draw):
                count += 1
                yield item
            if reader == 0 and epoch == position // self._samples:
                self._compare(count, len(shards))

    def examples(self) -> Iterator[Streamed | Skip]:
        """Samples for a look at the data, shard after shard, the shards in a fixed mixed order."""
        order = permutation(len(self._shards), "look").tolist()
        yield from self._pipeline(order, 0, None)

    def _deal(
        self, seed: int, position: int, reader: int, readers: int
    ) -> Iterator[tuple[int, list[int]]]:
        """Epochs, each with this reader's shards: every n-th of an endless list."""
        epoch, within = divmod(position, self._samples)
        used = within * len(self._shards) // self._samples
        first = reader
        while True:
            order = permutation(len(self._shards), f"{seed}/{epoch}/stream")[used:]
            yield epoch, order[first::readers].tolist()
            first = (first - len(order)) % readers
            epoch, used = epoch + 1, 0

    def _pipeline(
        self, shards: list[int], epoch: int, draw: Random | None
    ) -> Iterator[Streamed | Skip]:
        """The samples of shards and what is wrong with others; shuffled, if a draw is given."""
        from webdataset.filters import shuffle
        from webdataset.pipeline import DataPipeline
        from webdataset.tariterators import group_by_keys

        return iter(
            DataPipeline(
                partial(self._members, shards),
                partial(group_by_keys, keys=tuple),
                partial(_samples, names=self.names, epoch=epoch),
                shuffle(self._buffer, initial=_FIRST, rng=draw) if draw is not None else None,
            )
        )

    def _members(self, shards: Iterable[int]) -> Iterator[dict[str, Any]]:
        """Parts of samples in the form that webdataset groups; `{}` ends a shard."""
        for shard in shards:
            problems = Findings()
            file = Forward(self._shards[shard])
            try:
                for number, part in enumerate(_parts(Flow(file.read), problems)):
                    # The number keeps apart what has the same name twice.
                    name = (part.key, f"{number} {part.ending}")
                    yield {"fname": name, "data": part.data, "__url__": shard}
            finally:
                file.close()
            self._note(shard, problems)
            yield {}

    def _note(self, shard: int, problems: Findings) -> None:
        """Count members that belong to no sample, and tell of the first of each kind."""
        for reason, finding in problems.items():
            if reason not in self.problems:
                names = ", ".join(finding.names)
                log.info("%s: left out in %s: %s: %s", self.description, shard, reason, names)
            self.problems[reason] = self.problems.get(reason, 0) + finding.count

    def _compare(self, found: int, shards: int) -> None:
        """Say so when the declared number of samples is far from what there is."""
        declared = self._samples / len(self._shards)
        if shards and abs(found / shards / declared - 1) > _UNEVEN:
            log.warning(
                "%s: samples=%d is %.0f a shard, but the %d shard(s) that the first reader had "
                "held %.0f each; an epoch is then no pass over the data, and a resumed run starts "
                "at another place: set samples to their true number",
                *(self.description, self._samples, declared, shards, found / shards),
            )

    def _probe(self, path: str) -> None:
        if not self._shards:
            raise ValueError(f"{path!r}: none of the {self._missing} shards is there")
        order = permutation(len(self._shards), "look")[:_PROBED].tolist()
        reasons: Counter[str] = Counter()
        for item in islice(self._pipeline(order, 0, None), _FIRST):
            if isinstance(item, Streamed):
                return
            reasons[f"{item.reason} ({item.detail})" if item.detail else item.reason] += 1
        found = ", ".join(f"{n} x {reason}" for reason, n in reasons.most_common(_PROBED))
        raise ValueError(
            f"{path!r} has no usable sample in {', '.join(self.names[i] for i in order)}, which "
            f"were tried: {found}; a sample is a picture KEY.jpg (or png, "
            "...) with KEY.txt, KEY.json or KEY.cls"
        )


TrainingSource = Source | StreamSource
"""What can be trained on."""


class _Part(NamedTuple):
    """A part of a sample; with the ending `skip`, why the sample or the whole shard is left out."""

    key: str
    """Empty for the whole shard."""
    ending: str
    data: bytes | tuple[str, str]
    """With `skip`, the reason and the particulars."""


_SKIP = "skip"


def _parts(archive: Flow, problems: Findings) -> Iterator[_Part]:
    """All parts of a shard's samples, in order; `problems` counts the members that are none."""
    key = ""
    try:
        for member in members_of(archive, problems):
            name = member.name.removeprefix("./")
            if reason := refusal(name, split_name(name)[1]):
                problems.add(reason, [name])
                continue
            key, ending = split_name(name)
            data = archive.read(member.offset, member.size)
            if len(data) == member.size:
                yield _Part(key, ending, data)
            else:
                yield _Part(key, _SKIP, ("part too large", f"{member.size} bytes"))
    except Broken as broken:
        key, end = split_name(broken.cut.removeprefix("./"))[0], (broken.reason, broken.place)
    except FileNotFoundError as error:
        end = ("missing shard", str(error))
    except OSError as error:
        end = ("unreadable shard", str(error))
    else:
        if not key:
            yield _Part("", _SKIP, ("shard without a sample", ""))
        return
    if key:
        yield _Part(key, _SKIP, ("cut sample", ""))
    yield _Part("", _SKIP, end)


def _samples(
    groups: Iterable[dict[str, Any]], *, names: list[str], epoch: int
) -> Iterator[Streamed | Skip]:
    """What webdataset has put together as samples, where they are any."""
    shard, index, seen = -1, 0, set()
    for group in groups:
        if group["__url__"] != shard:
            shard, index, seen = group["__url__"], 0, set()
        key = group.pop("__key__")
        try:
            sample = _sample(key, group, apart=key in seen)
            item = Streamed(sample, epoch, shard, index)
        except BadSample as error:
            item = Skip(
                error.key, names[shard], error.reason, error.detail, index if key else WHOLE_SHARD
            )
        yield item
        seen.add(key)
        index += 1


def _sample(key: str, group: dict[str, Any], *, apart: bool) -> Sample:
    """A sample from its parts.

    Raises:
        BadSample: when it has not all, or two of a kind, or others stood elsewhere in the shard.
    """
    parts: dict[int, bytes] = {}
    doubled = False
    for name in group.keys() - {"__url__"}:
        ending = name.split(" ")[1]
        if ending == _SKIP:
            reason, detail = group[name]
            raise BadSample(reason, key, detail)
        doubled |= FIELDS[ending] in parts
        parts[FIELDS[ending]] = group[name]
    if fault := APART if apart else fault_of(parts, doubled=doubled):
        raise BadSample(fault, key)
    captions, meta = parse_sidecars(
        key, text=parts.get(TEXT), record=parts.get(RECORD), label=parts.get(LABEL)
    )
    return Sample(key, parts[IMAGE], captions, meta)


def _names(shards: list[str]) -> list[str]:
    """Short names: what follows the folder that holds all of them."""
    shared = 0
    for level in zip(*(shard.split("/")[:-1] for shard in shards), strict=False):
        if len(set(level)) > 1:
            break
        shared += 1
    return ["/".join(shard.split("/")[shared:]) for shard in shards]
