import io
import json
import os
import pickle
import tarfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_data import pairs, write_tar

from multimodal.data import shards, tar_index
from multimodal.data.build import source_from_path
from multimodal.data.shards import ShardSource, find_shards
from multimodal.data.source import IMAGE_EXTENSIONS, BadSample


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def keys(source: ShardSource) -> list[str]:
    return [source.read(i).key for i in range(len(source))]


# --- reading -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_members_are_found_where_tarfile_finds_them(tmp_path, kind):
    names = ["plain", "folder/in side", "cat no. 2", "v1.2/a.b.c", "folder/" * 12 + "long" * 20]
    if kind != tarfile.USTAR_FORMAT:
        names += ["x" * 300, "katze-\u00e4\U0001f431"]
    shard = write_tar(tmp_path / "a.tar", pairs(names), format=kind)
    source = ShardSource(str(shard))
    assert keys(source) == names
    for i, name in enumerate(names):
        sample = source.read(i)
        assert sample.image == b"picture of " + name.encode()
        assert sample.captions == (name,)
    assert source.problems == {}


@settings(max_examples=25, deadline=None)
@given(st.permutations(pairs(["a", "b", "c.d"])))
def test_parts_are_joined_by_key_wherever_they_stand(tmp_path_factory, members):
    folder = tmp_path_factory.mktemp("shard")
    source = ShardSource(str(write_tar(folder / "a.tar", members)))
    samples = [source.read(i) for i in range(3)]
    assert sorted(sample.key for sample in samples) == ["a", "b", "c.d"]
    for sample in samples:
        assert sample.captions == (sample.key,)
        assert sample.image == b"picture of " + sample.key.encode()


@pytest.mark.parametrize("ending", [*IMAGE_EXTENSIONS, "JPG", "Png", "TIFF"])
def test_picture_endings(tmp_path, ending):
    shard = write_tar(tmp_path / "a.tar", [(f"k.{ending}", b"i"), ("k.txt", b"t")])
    assert keys(ShardSource(str(shard))) == ["k"]


@pytest.mark.parametrize(
    ("files", "captions", "meta"),
    [
        ({"txt": b" two\nlines \n"}, ("two\nlines",), {}),
        ({"txt": b"\xef\xbb\xbfbom"}, ("bom",), {}),
        ({"txt": b"None"}, ("None",), {}),
        ({"txt": b"  "}, (), {}),
        ({"json": b'{"caption": " c ", "w": 3}'}, ("c",), {"w": 3}),
        ({"json": b'{"caption": "no", "ok": true}', "txt": b"yes"}, ("yes",), {"ok": True}),
        ({"json": b'{"captions": ["a", "", "b"]}', "txt": b"a"}, ("a", "b"), {}),
        ({"json": b'{"x": [1], "y": null, "z": {}}', "cls": b"12"}, (), {"y": None, "cls": 12}),
        ({"cls": b"tabby cat\n"}, (), {"cls": "tabby cat"}),
        ({"cls": b"-1"}, (), {"cls": -1}),
    ],
)
def test_captions_and_metadata(tmp_path, files, captions, meta):
    members = [("k.jpg", b"i"), *((f"k.{ending}", data) for ending, data in files.items())]
    sample = ShardSource(str(write_tar(tmp_path / "a.tar", members))).read(0)
    assert sample.captions == captions
    assert sample.meta == meta


@pytest.mark.parametrize(
    ("ending", "data", "reason"),
    [
        ("txt", b"\xff\xfe", "text is not UTF-8"),
        ("json", b"{", "damaged JSON"),
        ("json", b"[1]", "damaged JSON"),
        ("json", b"[" * 100_000, "damaged JSON"),
    ],
)
def test_unreadable_text_spoils_its_own_sample_only(tmp_path, ending, data, reason):
    members = [("k.jpg", b"i"), (f"k.{ending}", data), *pairs(["good"])]
    source = ShardSource(str(write_tar(tmp_path / "a.tar", members)))
    with pytest.raises(BadSample) as caught:
        source.read(0)
    assert (caught.value.reason, caught.value.key) == (reason, "k")
    assert source.read(1).key == "good"


# --- what stands beside samples ------------------------------------------------------------------


def test_folders_and_a_leading_dot_are_no_problem(tmp_path):
    shard = tmp_path / "a.tar"
    with tarfile.open(shard, "w") as tar:
        folder = tarfile.TarInfo("./f/")
        folder.type = tarfile.DIRTYPE
        tar.addfile(folder)
        for name, data in pairs(["./f/a"]):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    source = ShardSource(str(shard))
    assert (keys(source), source.problems) == (["f/a"], {})


# --- paths and the source as a whole -------------------------------------------------------------


def test_paths(tmp_path):
    names = [f"{i:05d}.tar" for i in range(12)]
    for name in names:
        write_tar(tmp_path / name, pairs([name]))
    found = {
        "": names,
        "{00000..00011}.tar": names,
        "*.tar": names,
        "{00003..00004}.tar": names[3:5],
        "0000{1,7}.tar": ["00001.tar", "00007.tar"],
        "0000[56].tar": ["00005.tar", "00006.tar"],
        "00002.tar": ["00002.tar"],
        "{0000[1-2],00001}.tar": ["00001.tar", "00002.tar"],
    }
    for pattern, expected in found.items():
        assert [p.name for p in find_shards(str(tmp_path / pattern))] == expected
    for pattern in ("no.tar", "no*.tar", "{00000..00011.tar"):
        with pytest.raises(ValueError, match=r"shard|braces"):
            find_shards(str(tmp_path / pattern))


def test_groups_places_and_range(tmp_path):
    write_tar(tmp_path / "0.tar", pairs(["a", "b", "c"]))
    write_tar(tmp_path / "1.tar", pairs(["d"]))
    write_tar(tmp_path / "2.tar", pairs(["e", "f"]))
    source = ShardSource(str(tmp_path))
    assert source.groups() == [3, 1, 2]
    assert len(source) == 6
    assert keys(source) == list("abcdef")
    places = [source.place(i) for i in range(6)]
    assert places == ["0.tar"] * 3 + ["1.tar"] + ["2.tar"] * 2
    for index in (-1, 6):
        with pytest.raises(IndexError):
            source.read(index)


def test_fingerprint_follows_the_content_and_not_the_place(tmp_path):
    prints = []
    for folder, names in [("x", ["a", "b"]), ("y", ["a", "b"]), ("z", ["a", "bc"]), ("w", ["a"])]:
        (tmp_path / folder).mkdir()
        write_tar(tmp_path / folder / "0.tar", pairs(names))
        prints.append(ShardSource(str(tmp_path / folder)).fingerprint())
    assert prints[0] == prints[1]
    assert len(set(prints[1:])) >= 2
    assert prints[3] not in prints[:3]


def test_a_source_survives_pickling_and_many_shards(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "_OPEN_SHARDS", 2)
    for i in range(7):
        write_tar(tmp_path / f"{i}.tar", pairs([f"{i}a", f"{i}b"]))
    source = ShardSource(str(tmp_path))
    expected = keys(source)
    open_files = len(os.listdir("/proc/self/fd"))
    assert keys(source) == expected
    assert keys(pickle.loads(pickle.dumps(source))) == expected
    assert len(os.listdir("/proc/self/fd")) <= open_files + 1


# --- the stored index ----------------------------------------------------------------------------


def test_index_is_stored_beside_the_shard_and_used(tmp_path, monkeypatch):
    shard = write_tar(tmp_path / "a.tar", [*pairs(["a", "b"]), ("c.jpg", b"")])
    first = ShardSource(str(shard))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.tar", "a.tar.index.npz"]
    monkeypatch.setattr(tar_index, "scan", lambda shard: pytest.fail("scanned again"))
    again = ShardSource(str(shard))
    assert keys(again) == keys(first) == ["a", "b"]
    assert again.problems == first.problems == {"no caption": 1}


@pytest.mark.parametrize("change", ["content", "time", "index cut", "index garbage", "index empty"])
def test_a_stale_or_damaged_index_is_made_anew(tmp_path, change):
    shard = write_tar(tmp_path / "a.tar", pairs(["a"]))
    ShardSource(str(shard))
    stored = tmp_path / "a.tar.index.npz"
    before = stored.stat().st_ino
    match change:
        case "content":
            write_tar(shard, [*pairs(["b", "c"]), ("pad.jpg", b"x" * 20_000)])
        case "time":
            os.utime(shard, (1, 1))
        case "index cut":
            stored.write_bytes(stored.read_bytes()[:-40])
        case "index garbage":
            stored.write_bytes(b"not an index")
        case "index empty":
            stored.write_bytes(b"")
    assert keys(ShardSource(str(shard))) == (["b", "c"] if change == "content" else ["a"])
    assert stored.stat().st_ino != before


def test_index_goes_to_the_cache_where_the_folder_is_read_only(tmp_path, monkeypatch):
    (tmp_path / "data").mkdir()
    shard = write_tar(tmp_path / "data" / "a.tar", pairs(["a"]))
    replace = os.replace

    def refuse(source, target):
        if target.parent.name == "data":
            raise PermissionError(13, "read-only")
        replace(source, target)

    monkeypatch.setattr(os, "replace", refuse)
    assert keys(ShardSource(str(shard))) == ["a"]
    assert [p.name for p in (tmp_path / "data").iterdir()] == ["a.tar"]
    assert len(list((tmp_path / "cache" / "multimodal").iterdir())) == 1
    monkeypatch.setattr(tar_index, "scan", lambda shard: pytest.fail("scanned again"))
    assert keys(ShardSource(str(shard))) == ["a"]


def test_no_place_for_the_index_is_only_a_warning(tmp_path, monkeypatch, caplog):
    shard = write_tar(tmp_path / "a.tar", pairs(["a"]))
    monkeypatch.setenv("XDG_CACHE_HOME", str(shard))  # a file: no folder can be made there
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("full")))
    assert keys(ShardSource(str(shard))) == ["a"]
    assert "no place to keep the index of 1 shards" in caplog.text


def test_size_in_a_pax_header_is_followed(tmp_path):
    """As written for members of 8 GB and more, whose own header has no room for the size."""
    shard = tmp_path / "a.tar"
    with tarfile.open(shard, "w", format=tarfile.PAX_FORMAT) as tar:
        for name, data in pairs(["a", "b"]):
            info = tarfile.TarInfo(name)
            info.size, info.pax_headers = len(data), {"comment": "x=y", "size": str(len(data))}
            tar.addfile(info, io.BytesIO(data))
    content = bytearray(shard.read_bytes())
    for start in range(0, len(content), 512):
        if content[start + 156 : start + 157] == b"0":  # a member, not its pax header
            content[start + 124 : start + 136] = b"00000000000\0"
            content[start + 148 : start + 156] = b" " * 8
            checksum = sum(content[start : start + 512])
            content[start + 148 : start + 156] = b"%06o\0 " % checksum
    shard.write_bytes(content)
    source = ShardSource(str(shard))
    assert keys(source) == ["a", "b"]
    assert source.read(1).image == b"picture of b"


def test_img2dataset_layout_is_read(tmp_path):
    record = {"caption": "a dog", "url": "u", "key": "000000007", "status": "success", "width": 4}
    members = [
        ("000000007.jpg", b"i"),
        ("000000007.json", json.dumps(record).encode()),
        ("000000007.txt", b"a dog"),
    ]
    write_tar(tmp_path / "00000.tar", members)
    (tmp_path / "00000_stats.json").write_text("{}")
    (tmp_path / "00000.parquet").write_bytes(b"")
    sample = ShardSource(str(tmp_path)).read(0)
    assert (sample.key, sample.captions, sample.meta["width"]) == ("000000007", ("a dog",), 4)


def test_shards_in_sub_folders_are_pointed_to(tmp_path):
    """As `multimodal pack --splits` makes them."""
    for name in ("train", "val"):
        (tmp_path / name).mkdir()
        write_tar(tmp_path / name / "0.tar", pairs(["a"]))
    for open_it in (ShardSource, source_from_path):
        with pytest.raises(ValueError, match=r"has its shards in .*train, .*val; name one"):
            open_it(str(tmp_path))
