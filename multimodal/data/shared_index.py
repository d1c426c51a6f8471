"""Indices of new shards made by all ranks together; apart, since it needs torch."""

from __future__ import annotations

from multimodal.data.shards import find_shards, summarize_all
from multimodal.distributed import barrier, rank, world_size


def index_together(path: str) -> None:
    """Index the shards that a path stands for, each rank a part of them. Call it on all ranks.

    A `ShardSource` then finds the indices on the disk. What is wrong with a shard or with the path
    is left for the source to say; where no index can be kept, it makes them by itself.
    """
    try:
        shards = find_shards(path)
    except ValueError:
        shards = []
    summarize_all(f"shards {path}", shards[rank() :: world_size()])
    barrier()
