"""Shards on a store of fsspec's own, in memory, and behind a web server on this machine."""

import ast
import json
import multiprocessing
import os
import pickle
import shutil
import threading
import time
from collections import Counter
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import fsspec
import numpy as np
import pytest
from made_data import keys_in_order, pairs, write_tar

from multimodal.config import Data, ShardsSource
from multimodal.data import remote
from multimodal.data.build import open_source, source_from_path
from multimodal.data.mixture import MixtureSource, fetch_ahead, training_order
from multimodal.data.remote import RemoteSource
from multimodal.data.shard_cache import ShardCache
from multimodal.data.shards import ShardSource
from multimodal.data.source import BadSample
from multimodal.data.tar_index import load_index, stored_head, summarize

COUNTS = [7, 3, 11, 5, 2]
SHARD = 30_720
"""The largest; the others have 20,480, 10,240, 20,480 and 10,240 bytes, and all 92,160."""


@pytest.fixture
def local(tmp_path):
    """Five uneven shards."""
    folder = tmp_path / "data"
    folder.mkdir()
    for i, count in enumerate(COUNTS):
        write_tar(folder / f"{i}.tar", pairs([f"{i}-{j}" for j in range(count)]))
    return folder


@pytest.fixture
def store(local, tmp_path, monkeypatch):
    """The same shards in memory, and a count of what was fetched."""
    filesystem = fsspec.filesystem("memory")
    filesystem.store.clear()
    for path in local.iterdir():
        filesystem.pipe(f"/bucket/{path.name}", path.read_bytes())
    fetched = Counter()
    get_file = type(filesystem).get_file

    def counted(self, path, target, **options):
        fetched[path.rpartition("/")[2]] += 1
        return get_file(self, path, target, **options)

    monkeypatch.setattr(type(filesystem), "get_file", counted)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    yield fetched
    filesystem.store.clear()


def cached(folder) -> list[str]:
    return sorted(path.name for path in folder.glob("*/*.tar"))


def taken(folder) -> int:
    return sum(path.stat().st_size for path in folder.glob("*/*.tar*") if path.suffix != ".npz")


def opened(folder, path: str = "memory://bucket/", shards: float = 100) -> RemoteSource:
    return RemoteSource(path, str(folder), shards * SHARD / 1e9)


def everything(source) -> list[tuple]:
    samples = [source.read(i) for i in range(len(source))]
    return [(s.key, s.image, s.captions, s.meta, source.place(i)) for i, s in enumerate(samples)]


@pytest.mark.parametrize("path", ["memory://bucket", "memory://bucket/{0..4}.tar",
                                  "memory://bucket/*.tar"])  # fmt: skip
def test_remote_shards_are_read_like_local_ones(store, local, tmp_path, path):
    source, expected = opened(tmp_path / "cache", path), ShardSource(str(local))
    assert everything(source) == everything(expected)
    assert source.groups() == expected.groups() == COUNTS
    assert source.fingerprint() == expected.fingerprint()
    assert everything(pickle.loads(pickle.dumps(source))) == everything(expected)
    assert {store[f"{i}.tar"] for i in range(5)} == {1}
    with pytest.raises(IndexError):
        source.read(28)


def test_an_index_beside_the_shards_saves_fetching_them(store, local, tmp_path):
    ShardSource(str(local))
    filesystem = fsspec.filesystem("memory")
    for path in local.glob("*.npz"):
        filesystem.pipe(f"/bucket/{path.name}", path.read_bytes())
    source = opened(tmp_path / "cache")
    assert source.groups() == COUNTS
    assert not any(name.endswith(".tar") for name in store)
    assert source.read(9).key == "1-2"
    assert (store["1.tar"], store["0.tar"]) == (1, 0)


def test_an_index_of_another_shard_of_the_same_size_pairs_nothing_wrongly(store, local, tmp_path):
    """A tar is filled up to a multiple of 10 KiB, so one written anew often has the old size."""
    first, again = (list(pairs(names)) for names in ("abc", "cab"))
    write_tar(local / "9.tar", first)
    ShardSource(str(local / "9.tar"))
    filesystem = fsspec.filesystem("memory")
    index = local / "9.tar.index.npz"
    filesystem.pipe(f"/bucket/{index.name}", index.read_bytes())
    write_tar(local / "9.tar", again)
    filesystem.pipe("/bucket/9.tar", (local / "9.tar").read_bytes())
    source = RemoteSource("memory://bucket/9.tar", str(tmp_path / "cache"), 1.0)
    expected = {s.key: s for s in map(ShardSource(str(local / "9.tar")).read, range(3))}
    found = [source.read(i) for i in range(3)]
    assert {sample.key: sample for sample in found} == expected


def test_a_store_whose_errors_are_no_os_errors_is_asked_again(store, local, tmp_path, monkeypatch):
    real, failures = remote.filesystem_of, [RuntimeError("503"), RuntimeError("cut")]
    source = opened(tmp_path / "cache")
    monkeypatch.setattr(remote.time, "sleep", lambda seconds: None)

    def filesystem(url):
        if failures:
            raise failures.pop()
        return real(url)

    monkeypatch.setattr(remote, "filesystem_of", filesystem)
    shutil.rmtree(tmp_path / "cache")
    assert source.read(0).key and not failures


def test_the_cache_stays_within_its_size_and_keeps_indices(store, tmp_path):
    folder = tmp_path / "cache"
    source = opened(folder, shards=2.2)
    limit = int(2.2 * SHARD)
    for index in [*range(28), *range(27, -1, -1), 0, 27, 13, 0, 27]:
        assert source.read(index).key.startswith(source.place(index)[0])
        assert taken(folder) <= limit
    assert store["0.tar"] > 1
    store.clear()
    again = opened(folder, shards=2.2)
    assert (again.groups(), dict(store)) == (COUNTS, {})


def test_a_shard_in_use_stays(store, tmp_path):
    folder = tmp_path / "cache"
    source = opened(folder)
    source.read(0)
    held = next(folder.glob("*/0.tar"))
    other = opened(folder, shards=1.2)
    for index in (8, 12, 27):
        other.read(index)
        assert held.exists()
    assert cached(folder) == ["0.tar", "4.tar"]
    source._release_others()
    other.read(8)
    assert not held.exists()


def test_the_least_recently_used_goes_first(store, tmp_path):
    folder = tmp_path / "cache"
    source = opened(folder, shards=10)
    for index in (0, 12, 8, 22):
        source._release_others()
        source.read(index)
    source._release_others()
    source.read(0)
    source._release_others()
    opened(folder, shards=2.1).read(27)
    assert cached(folder) == ["0.tar", "1.tar", "3.tar", "4.tar"]


def test_shards_of_the_next_window_are_fetched_ahead_and_in_order(store, tmp_path):
    folder = tmp_path / "cache"
    source = opened(folder)
    shutil.rmtree(folder)
    folder.mkdir()
    store.clear()
    order = training_order(source, seed=1, window=3)
    wanted = [source.place(index) for index in order.ahead(0)]
    assert len(wanted) < 5
    fetch_ahead(source, order, 0)
    deadline = time.monotonic() + 20
    while len(cached(folder)) < len(set(wanted)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [n for n in store if n.endswith("tar")] == list(dict.fromkeys(wanted))
    assert cached(folder) == sorted(set(wanted))


def test_what_comes_next_is_told_to_the_sources_of_a_mixture(store, tmp_path, monkeypatch):
    source = MixtureSource({"far": opened(tmp_path / "c"), "far2": opened(tmp_path / "d")})
    order = training_order(source, seed=1, window=6)
    told = []
    monkeypatch.setattr(RemoteSource, "fetch_ahead", lambda self, indices: told.append(indices))
    fetch_ahead(source, order, 17)
    assert told == [
        own.ahead(turn) for own, turn in zip(order.orders, order.turns(17), strict=True)
    ]


@pytest.mark.parametrize("workers", [0, 2])
def test_training_reads_the_same_samples_as_from_local_shards(store, local, tmp_path, workers):
    """With room for less than all shards, and with loader processes that share the cache."""
    section = ShardsSource(kind="shards", path="memory://bucket")
    data = Data(train=section, workers=workers, shuffle_window=7)
    source = opened(tmp_path / "cache", shards=2.5)
    found = keys_in_order(source, data, steps=range(20), batch_size=4, ranks=2)
    expected = keys_in_order(ShardSource(str(local)), data, steps=range(20), batch_size=4)
    assert found == expected


def test_a_window_that_does_not_fit_is_refused(store, tmp_path):
    source = opened(tmp_path / "cache", shards=1.5)
    with pytest.raises(
        ValueError, match=r"set cache_size above that, or data.shuffle_window to \d"
    ):
        training_order(source, seed=0, window=20)
    training_order(source, seed=0, window=3)


def test_a_lost_shard_spoils_its_samples_only(store, tmp_path, monkeypatch):
    monkeypatch.setattr(remote.time, "sleep", lambda seconds: None)
    source = opened(tmp_path / "cache")
    shutil.rmtree(tmp_path / "cache")
    fsspec.filesystem("memory").rm("/bucket/1.tar")
    with pytest.raises(BadSample, match="shard cannot be fetched"):
        source.read(8)
    assert source.read(0).key == "0-0"
    fsspec.filesystem("memory").pipe("/bucket/2.tar", b"cut")
    with pytest.raises(BadSample, match="3 bytes came instead of"):
        source.read(12)
    assert not list((tmp_path / "cache").glob("*/*.part"))


def test_mistakes_are_one_sentence(store, tmp_path):
    with pytest.raises(ValueError, match="leads to no shard"):
        opened(tmp_path, "memory://nowhere")
    with pytest.raises(ValueError, match="does not fit the cache of cache_size"):
        opened(tmp_path, shards=0.01)
    with pytest.raises(ValueError, match="nosuch"):
        opened(tmp_path, "nosuch://bucket")
    with pytest.raises(ValueError, match="chained"):
        opened(tmp_path, "simplecache::memory://bucket")
    with pytest.raises(ValueError, match="is a pipe"):
        open_source(ShardsSource(kind="shards", path="pipe:cat s3://x"))
    assert opened(tmp_path, "memory://bucket/{4..6}.tar").problems == {"missing shard": 2}


def _read_all(folder: str, queue) -> None:
    try:
        source = opened(folder, shards=2.2)
        queue.put([source.read(index).key for index in range(28)])
    except BaseException as error:
        queue.put(repr(error))
        raise


def test_several_processes_share_one_cache(store, local, tmp_path):
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    workers = [
        context.Process(target=_read_all, args=(str(tmp_path / "cache"), queue)) for _ in range(4)
    ]
    for worker in workers:
        worker.start()
    found = [queue.get() for _ in workers]
    for worker in workers:
        worker.join(60)
    expected = ShardSource(str(local))
    assert found == [[expected.read(index).key for index in range(28)]] * 4
    # Four readers may each have had a shard in use; now there is one.
    last = opened(tmp_path / "cache", shards=1.1)
    assert (last.read(12).key, last.read(0).key) == ("2-2", "0-0")
    assert taken(tmp_path / "cache") <= 1.1 * SHARD


def test_a_file_is_fetched_once_and_a_stale_part_is_replaced(tmp_path):
    cache = ShardCache(tmp_path, 100)
    path = cache.path("x", "a.tar")
    path.parent.mkdir()
    path.with_name("a.tar.5.part").write_bytes(b"left by a process that was killed")
    fetched = []

    def fetch(target) -> None:
        fetched.append(target)
        time.sleep(0.1)
        target.write_bytes(b"12345")

    hold = partial(cache.hold, path, 5, fetch, short_of_room=lambda: None)
    threads = [threading.Thread(target=hold) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert (len(fetched), path.read_bytes()) == (1, b"12345")
    assert sorted(os.listdir(path.parent)) == ["a.tar", "lock"]


def test_what_is_being_fetched_takes_its_whole_room(tmp_path):
    """Stores' clients begin a file empty, whatever stood there."""
    cache = ShardCache(tmp_path, 100)
    first, second = cache.path("x", "a.tar"), cache.path("y", "b.tar")

    def fetch(target) -> None:
        target.write_bytes(b"")
        cache.fetch_ahead(second, 60, lambda other: other.write_bytes(b"2" * 60))
        target.write_bytes(b"1" * 60)

    cache.fetch_ahead(first, 60, fetch)
    assert first.exists() and not second.exists()


def test_a_file_that_vanishes_while_room_is_made_is_no_matter(tmp_path, monkeypatch):
    """As a part does that another process has just made whole."""
    cache = ShardCache(tmp_path, 100)
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "a.tar").write_bytes(b"1" * 80)
    gone = tmp_path / "x" / "b.tar.part"
    listed = type(tmp_path).glob
    monkeypatch.setattr(type(tmp_path), "glob", lambda self, p: [gone, *listed(self, p)])
    assert not cache._make_room(101)
    assert not (tmp_path / "x" / "a.tar").exists()


def test_the_head_of_an_index_is_read_without_parsing_python(local, monkeypatch):
    """`ast` fails now and then in threads (CPython issue 106905), and `np.load` uses it."""
    shard = local / "1.tar"
    load_index(shard)
    place = local / "1.tar.index.npz"
    with np.load(place) as stored:
        about = json.loads(stored["about"].tobytes())
    monkeypatch.setattr(ast, "literal_eval", None)
    state = shard.stat()
    assert stored_head(place, state.st_size) == (about["samples"], {})
    assert summarize(shard).samples == about["samples"] == 3
    assert stored_head(place, 5) is stored_head(local / "none.npz", state.st_size) is None


@pytest.fixture
def web(local, tmp_path, monkeypatch):
    """A web server's address, and how often each path is still answered with an error."""
    pytest.importorskip("aiohttp")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    busy: dict[str, list[int]] = {}

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, *arguments):
            pass

        def send_head(self):
            if busy.get(self.path):
                return self.send_error(busy[self.path].pop())
            return super().send_head()

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(local)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}", busy
    server.shutdown()
    server.server_close()


def test_a_web_server(local, web):
    source = source_from_path(web[0] + "/{0..5}.tar")
    assert source.problems == {"missing shard": 1}
    assert [s[:4] for s in everything(source)] == [
        s[:4] for s in everything(ShardSource(str(local)))
    ]


@pytest.mark.parametrize("path", ["/", "/{0..4}.tar"])
def test_a_web_server_that_is_busy_for_a_moment_is_asked_again(web, monkeypatch, path):
    url, busy = web
    waits = []
    monkeypatch.setattr(remote.time, "sleep", waits.append)
    # HEAD and GET are both answered with an error before fsspec gives up.
    busy |= {"/": [503], "/1.tar": [503, 503], "/2.tar": [429, 504, 500, 503]}
    busy |= {"/3.tar.index.npz": [503, 503]}
    source = source_from_path(url + path)
    assert len(source) == sum(COUNTS) and not source.problems
    assert not any(busy.values()) or path != "/"
    assert sorted(waits) == [1, 1, 1, 1, 2] if path == "/" else [1, 1, 1, 2]


def test_a_web_server_that_stays_busy_is_an_error_and_no_missing_shard(web, monkeypatch):
    url, busy = web
    monkeypatch.setattr(remote.time, "sleep", lambda seconds: None)
    busy["/1.tar"] = [503] * 99
    with pytest.raises(ValueError, match=r"/1\.tar cannot be reached: "):
        source_from_path(url + "/{0..4}.tar")
    busy["/"] = [503] * 99
    with pytest.raises(ValueError, match="cannot be listed: 503"):
        source_from_path(url)


def test_settings_lead_to_it(store, tmp_path):
    section = ShardsSource(
        kind="shards", path="memory://bucket", cache_dir=str(tmp_path / "c"), cache_size=1.5
    )
    source = open_source(Data(train=section).train)
    assert isinstance(source, RemoteSource)
    assert (source._cache.folder, source._cache.limit) == (tmp_path / "c", 1_500_000_000)
