"""Ranks that meet shards without an index scan them together."""

import os

from made_data import pairs, write_tar
from tools import on_ranks

from multimodal.data import tar_index
from multimodal.data.shards import ShardSource
from multimodal.data.shared_index import index_together

NAMES = [f"{i:05d}.tar" for i in range(7)]


def open_and_count(path: str, cache: str, *, may_store: bool) -> tuple[list[str], list[str]]:
    """Shards that this rank scanned, and the keys that it then reads."""
    os.environ["XDG_CACHE_HOME"] = cache
    scanned = []
    real = tar_index.scan

    def counted(shard):
        scanned.append(shard.name)
        return real(shard)

    def refuse(*_):
        raise PermissionError(13, "read-only")

    tar_index.scan = counted
    if not may_store:
        os.replace = refuse
    index_together(path)
    source = ShardSource(path)
    return scanned, [source.read(i).key for i in range(len(source))]


def stored(path: str, cache: str):
    return open_and_count(path, cache, may_store=True)


def not_stored(path: str, cache: str):
    return open_and_count(path, cache, may_store=False)


def expected(folder) -> list[str]:
    for number, name in enumerate(NAMES):
        write_tar(folder / name, pairs([f"{name} {i}" for i in range(number + 1)]))
    return [f"{name} {i}" for number, name in enumerate(NAMES) for i in range(number + 1)]


def test_each_shard_is_scanned_once_by_one_rank(tmp_path):
    keys = expected(tmp_path)
    results = on_ranks(3, stored, str(tmp_path), str(tmp_path / "cache"))
    assert [found for _, found in results] == [keys] * 3
    assert sorted(name for scanned, _ in results for name in scanned) == NAMES
    assert all(len(scanned) >= 2 for scanned, _ in results)


def test_where_no_index_can_be_kept_all_ranks_still_read_the_same(tmp_path):
    keys = expected(tmp_path)
    for scanned, found in on_ranks(2, not_stored, str(tmp_path), str(tmp_path / "cache")):
        assert found == keys
        assert set(scanned) == set(NAMES)


def test_a_path_that_leads_nowhere_holds_nobody_up(tmp_path):
    assert on_ranks(2, index_together, str(tmp_path / "gone")) == [None, None]
