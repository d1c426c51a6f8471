"""Samples a second read from tar shards: ours in full random order, webdataset shuffled.

    python scripts/bench/shards.py --out shards.json

Both read the same shards in one process, pictures are not decoded, and the shards are in the page
cache, so what is measured is the reader. Ours reads a random permutation of all samples, with their
captions and JSON parsed. webdataset reads shards in random order and shuffles within a buffer, as
OpenCLIP does: `webdataset` gives raw bytes, `webdataset parsed` captions and JSON too. They take
turns, and the best round of each counts, by the processor time of the process. Ours needs an index,
which is made once; its time is given apart.
"""

from __future__ import annotations

import argparse
import io
import json
import random
import tarfile
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

SHARDS = 8
BUFFER = 5000
"""Samples in webdataset's buffer, as OpenCLIP sets it."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--samples", type=int, default=16_000)
    parser.add_argument("--kilobytes", type=int, default=20, help="Size of a picture.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="JSON file to write.")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make_shards(Path(folder), options.samples // SHARDS, options.kilobytes)
        start = time.process_time()
        ours = OurSamples(folder)
        print(f"indexed {options.samples} samples in {time.process_time() - start:.2f} s")
        readers = {
            "webdataset": webdataset_samples(folder),
            "webdataset parsed": webdataset_samples(folder).decode(),
            "multimodal": ours,
        }
        rounds: dict[str, list[float]] = {name: [] for name in readers}
        for _ in range(options.rounds):
            for name, samples in readers.items():
                rounds[name].append(round(rate(samples, options.samples)))
                print(f"{name:18}{rounds[name][-1]:10.0f} samples/s", flush=True)
    best = {name: max(rates) for name, rates in rounds.items()}
    ratio = {name: round(best["multimodal"] / figure, 2) for name, figure in best.items()}
    print(f"\nmultimodal over each: {ratio}")
    if options.out:
        report = {"best": best, "ratio": ratio, "rounds": rounds, "samples": options.samples}
        report |= {"kilobytes": options.kilobytes, "shards": SHARDS, "buffer": BUFFER}
        options.out.write_text(json.dumps(report, indent=1) + "\n")


def rate(samples: Iterable[Any], expected: int) -> float:
    start = time.process_time()
    count = sum(1 for _ in samples)
    assert count == expected, f"read {count} of {expected} samples"
    return count / (time.process_time() - start)


class OurSamples:
    """Every sample in a new random order each time."""

    def __init__(self, folder: str):
        from multimodal.data.shards import ShardSource

        self._source = ShardSource(folder)

    def __iter__(self):
        order = list(range(len(self._source)))
        random.shuffle(order)
        return map(self._source.read, order)


def webdataset_samples(folder: str) -> Any:
    import webdataset

    paths = f"{folder}/{{00000..{SHARDS - 1:05d}}}.tar"
    return webdataset.WebDataset(paths, shardshuffle=SHARDS).shuffle(BUFFER, initial=1000)


def make_shards(folder: Path, per_shard: int, kilobytes: int) -> None:
    """Write shards in the layout of img2dataset, with noise for pictures."""
    for shard in range(SHARDS):
        with tarfile.open(folder / f"{shard:05d}.tar", "w") as tar:
            for place in range(per_shard):
                record = json.dumps({"caption": "a dog", "url": "http://x.org", "width": 256})
                parts = {"jpg": random.randbytes(kilobytes * 1000), "txt": b"a dog"}
                for ending, content in (parts | {"json": record.encode()}).items():
                    info = tarfile.TarInfo(f"{shard:05d}{place:04d}.{ending}")
                    info.size = len(content)
                    tar.addfile(info, io.BytesIO(content))


if __name__ == "__main__":
    main()
