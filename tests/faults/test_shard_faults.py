"""Damaged, odd and hostile shards. What must come out follows from Python's own `tarfile`, which
reads the intact archive."""

import io
import logging
import os
import pickle
import tarfile
from collections import defaultdict

import numpy as np
import pytest
from made_data import jpeg, pairs, write_tar

from multimodal.data.pack import pack
from multimodal.data.shards import ShardSource
from multimodal.data.source import IMAGE_EXTENSIONS, BadSample
from multimodal.data.tar_index import APART


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def keys(source: ShardSource) -> list[str]:
    return [source.read(i).key for i in range(len(source))]


def left_out(tmp_path, members) -> ShardSource:
    """A shard with these members beside one good sample, which must survive."""
    source = ShardSource(str(write_tar(tmp_path / "p.tar", [*members, *pairs(["good"])])))
    assert keys(source) == ["good"]
    return source


def triples(names: list[str]) -> list[tuple[str, bytes]]:
    """Members of samples with a picture, a text and a class."""
    members = []
    for name in names:
        members += [*pairs([name]), (f"{name}.cls", name[:1].encode())]
    return members


# --- F26: cut shards -----------------------------------------------------------------------------


def as_tarfile_reads(shard) -> dict[str, dict[str, tuple[bytes, int]]]:
    """For each key the content of its parts by ending, and the offset where each ends."""
    found = defaultdict(dict)
    with tarfile.open(shard) as tar:
        for member in tar:
            key, _, ending = member.name.rpartition(".")
            content = tar.extractfile(member).read()
            found[key][ending] = content, member.offset_data + member.size
    return dict(found)


@pytest.mark.parametrize("order", ["side by side", "pictures first"])
@pytest.mark.parametrize("kind", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_a_cut_at_every_256_bytes_never_mixes_samples_and_is_always_told(tmp_path, kind, order):
    names = ["a", "b/c", "d.e", "f/" * 50 + "g" * 90, "h"]
    members = triples(names)
    if order == "pictures first":
        members.sort(key=lambda member: not member[0].endswith("jpg"))
    shard = write_tar(tmp_path / "whole.tar", members, format=kind)
    whole, data = as_tarfile_reads(shard), shard.read_bytes()
    assert keys(ShardSource(str(shard))) == names
    with tarfile.open(shard) as tar:
        starts = {member.offset_data: member.name for member in tar}
    ends = {key: max(end for _, end in parts.values()) for key, parts in whole.items()}
    told_complete = []
    for size in range(0, len(data), 256):
        cut = tmp_path / "cut.tar"
        cut.write_bytes(data[:size])
        try:
            source = ShardSource(str(cut))
        except ValueError as error:
            assert "truncated shard" in str(error) or "empty shard" in str(error)
            continue
        for sample in map(source.read, range(len(source))):
            parts = {ending: content for ending, (content, _) in whole[sample.key].items()}
            assert sample.image == parts["jpg"]
            assert sample.captions == (parts["txt"].decode(),)
            if order == "side by side":
                assert sample.meta == {"cls": parts["cls"].decode()}
        if not source.problems:
            told_complete.append(size)
            assert len(source) == len(names)
            continue
        assert source.problems["truncated shard"] == 1
        place = f"in {starts[size]}" if size in starts else "byte "
        assert source.examples["truncated shard"][0].startswith(f"cut.tar: {place}"[:200])
        if order == "side by side":  # at most the last whole sample is given up
            sound = [key for key in names if ends[key] <= size]
            assert sound[:-1] == keys(source)[: len(sound) - 1]
            assert set(keys(source)) <= set(sound)
    # Only a cut behind the end marker's first block may pass for complete.
    assert all(size >= max(ends.values()) + 512 - 256 for size in told_complete)


def test_a_flipped_header_bit_ends_the_shard_and_is_named(tmp_path):
    shard = write_tar(tmp_path / "a.tar", pairs(["a", "b", "c"]))
    with tarfile.open(shard) as tar:
        place = tar.getmember("c.jpg").offset
    data = bytearray(shard.read_bytes())
    data[place] ^= 1
    shard.write_bytes(data)
    source = ShardSource(str(shard))
    assert keys(source) == ["a"]
    assert source.problems == {"damaged shard": 1, "cut sample": 1}
    assert source.examples["damaged shard"] == (f"a.tar: byte {place}",)
    assert source.examples["cut sample"] == ("a.tar: b",)


def test_a_shard_cut_while_in_use_is_noticed(tmp_path):
    shard = write_tar(tmp_path / "a.tar", pairs(["a", "b"]))
    source = ShardSource(str(shard))
    source.read(0)
    os.truncate(shard, 600)
    with pytest.raises(BadSample, match="changed while in use"):
        source.read(1)


def test_a_shard_replaced_or_removed_before_it_is_read_is_noticed(tmp_path):
    shard = write_tar(tmp_path / "a.tar", pairs(["a", "b"]))
    source = ShardSource(str(shard))
    write_tar(shard, pairs(["a"]))
    with pytest.raises(BadSample, match="changed while in use"):
        source.read(1)
    shard.unlink()
    with pytest.raises(BadSample, match="unreadable shard"):
        source.read(0)


@pytest.mark.parametrize("start", [12, 13])
def test_zeros_for_a_part_of_a_shard_are_not_its_end(tmp_path, start):
    """What a download leaves that has reserved its place and not come to it."""
    path = tmp_path / "a.tar"
    write_tar(path, pairs([f"k{i}" for i in range(60)]))
    data = bytearray(path.read_bytes())
    place = start * len(data) // 40 // 512 * 512
    data[place:] = bytes(len(data) - place)
    path.write_bytes(data)
    assert "zeros for a part of the shard" in ShardSource(str(path)).problems


def test_a_shard_behind_another_is_not_lost_without_a_word(tmp_path):
    for name in "ab":
        write_tar(tmp_path / f"{name}.tar", pairs([f"{name}1", f"{name}2"]))
    both = tmp_path / "c.tar"
    both.write_bytes(b"".join((tmp_path / f"{name}.tar").read_bytes() for name in "ab"))
    assert "data after the end of the shard" in ShardSource(str(both)).problems


# --- F27: not a shard ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "reason"),
    [(b"", "empty shard"), (b"<html>" * 200, "not a tar file"), (b"\0" * 10240, "they are empty")],
)
def test_no_usable_sample_is_an_error_that_says_why(tmp_path, content, reason):
    (tmp_path / "a.tar").write_bytes(content)
    with pytest.raises(ValueError, match=reason):
        ShardSource(str(tmp_path))


def test_bad_shards_beside_good_ones_are_counted_and_named(tmp_path, caplog):
    write_tar(tmp_path / "00000.tar", pairs(["a"]))
    (tmp_path / "00001.tar").write_bytes(b"<html>" * 200)
    (tmp_path / "00002.tar").write_bytes(b"")
    (tmp_path / "00004.tar").mkdir()
    source = ShardSource(str(tmp_path / "{00000..00004}.tar"))
    assert source.problems == dict.fromkeys(
        ("not a tar file", "empty shard", "missing shard", "unreadable shard"), 1
    )
    assert source.groups() == [1, 0, 0, 0, 0]
    assert source.read(0).key == "a"
    for name in ("00001.tar", "00002.tar", "00003.tar", "00004.tar"):
        assert name in caplog.text


# --- F29 to F31: keys and parts ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        ([("a.jpg", b"i")], {"no caption": 1}),
        ([("a.txt", b"t")], {"no image": 1}),
        ([("a.jpg", b"1"), ("a.jpg", b"2"), ("a.txt", b"t")], {"duplicate key": 1}),
        ([("a.jpg", b"1"), ("a.png", b"2"), ("a.txt", b"t")], {"duplicate key": 1}),
        ([("a.jpg", b"1"), ("a.txt", b"2"), ("a.TXT", b"t")], {"duplicate key": 1}),
        (pairs(["a", "a"]), {"duplicate key": 1}),
        (pairs(["x/._a"]), {"hidden file": 2}),
        ([("a.jpg", b"i"), ("a.npy", b"p")], {"unknown file type": 1, "no caption": 1}),
        ([("README", b"r")], {"unknown file type": 1}),
    ],
)
def test_left_out_samples_are_counted_and_named_by_reason(tmp_path, members, expected, caplog):
    source = left_out(tmp_path, members)
    assert source.problems == expected
    names = {name for name, _ in members} | {name.rpartition(".")[0] for name, _ in members}
    for reason in expected:
        assert reason in caplog.text
        for example in source.examples[reason]:
            assert example.removeprefix("p.tar: ") in names
            assert example in caplog.text


def test_of_many_bad_samples_a_few_are_named_and_all_counted(tmp_path, caplog):
    members = [(f"{i:04d}.jpg", b"i") for i in range(500)]
    source = left_out(tmp_path, members)
    assert source.problems == {"no caption": 500}
    assert source.examples["no caption"] == tuple(f"p.tar: {i:04d}" for i in range(10))
    assert "and 490 more" in caplog.text
    again = ShardSource(str(tmp_path / "p.tar"))  # from the stored index
    assert (again.problems, again.examples) == (source.problems, source.examples)


def test_parts_that_do_not_stand_side_by_side_are_joined_and_noted(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    members = pairs(["a", "b", "c"])
    a_jpg, a_txt, b_jpg, b_txt, *rest = members
    shard = write_tar(tmp_path / "a.tar", [a_jpg, b_jpg, a_txt, b_txt, *rest])
    for _ in range(2):  # scanned, and from the stored index
        source = ShardSource(str(shard))
        assert (source.problems, source.notes) == ({}, {APART: 2})
        assert source.examples[APART] == ("a.tar: a", "a.tar: b")
        for sample in map(source.read, range(3)):
            assert sample.captions == (sample.key,)
            assert sample.image == b"picture of " + sample.key.encode()
    assert "a.tar: b" in caplog.text


def test_one_key_in_two_shards_is_two_samples_and_can_be_listed(tmp_path):
    for shard, text in (("0.tar", b"one"), ("1.tar", b"two")):
        members = [("k.jpg", b"picture " + text), ("k.txt", text), *pairs([shard])]
        write_tar(tmp_path / shard, members)
    source = ShardSource(str(tmp_path))
    found = [source.read(i) for i in range(4)]
    assert [sample.captions for sample in found if sample.key == "k"] == [("one",), ("two",)]
    assert all(s.image == b"picture " + s.captions[0].encode() for s in found if s.key == "k")
    assert source.repeated_keys() == (1, ("0.tar, 1.tar: k",))


@pytest.mark.parametrize("ending", [*IMAGE_EXTENSIONS, "JPG", "Png", "TIFF", "JpEg"])
def test_usual_picture_endings_are_read_in_any_case(tmp_path, ending):
    shard = write_tar(tmp_path / "a.tar", [(f"k.{ending}", b"i"), ("k.txt", b"t")])
    assert keys(ShardSource(str(shard))) == ["k"]


@pytest.mark.parametrize("name", ["cat no. 2", "v1.2/a.b.c", "photo.jpg", "a..b", "x.y/z"])
def test_a_key_is_the_name_up_to_the_last_dot(tmp_path, name):
    shard = write_tar(tmp_path / "a.tar", pairs([name]))
    assert list(as_tarfile_reads(shard)) == keys(ShardSource(str(shard))) == [name]


# --- F33: hostile shards -------------------------------------------------------------------------


UNSAFE = ["../a", "/etc/a", "a/../../b", "C:\\a", "..\\a", "\\\\host\\share\\a"]


@pytest.mark.parametrize("name", UNSAFE)
def test_names_that_lead_elsewhere_are_refused(tmp_path, name):
    source = left_out(tmp_path, pairs([name]))
    assert source.problems == {"unsafe name": 2}


def with_links(path, kind):
    """A link to a secret as the picture of one sample and as the text of another."""
    with tarfile.open(path, "w") as tar:
        for name in ("evil.jpg", "worse.txt"):
            link = tarfile.TarInfo(name)
            link.type, link.linkname = kind, str(path.parent / "secret")
            tar.addfile(link)
        for name, data in [("evil.txt", b"t"), ("worse.jpg", b"i"), *pairs(["good"])]:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE])
def test_links_and_special_files_are_never_followed(tmp_path, kind):
    (tmp_path / "secret").write_bytes(jpeg())
    with_links(tmp_path / "a.tar", kind)
    source = ShardSource(str(tmp_path / "a.tar"))
    assert keys(source) == ["good"]
    reason = "special file in the shard" if kind == tarfile.FIFOTYPE else "link in the shard"
    assert source.problems == {reason: 2, "no image": 1, "no caption": 1}


@pytest.mark.parametrize("path", ["pipe:cat a.tar", "pipe:touch pwned", "a.tar; touch pwned"])
def test_nothing_that_looks_like_a_command_is_run(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"shard|pipe"):
        ShardSource(path)
    assert list(tmp_path.iterdir()) == []


class Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, place):
        self.place = place

    def __reduce__(self):
        return os.mkdir, (str(self.place),)


def test_pickles_are_never_loaded(tmp_path):
    bomb = pickle.dumps(Bomb(tmp_path / "pwned"))
    kinds = ("pkl", "pickle", "pyd", "pt", "pth", "npy")
    source = left_out(tmp_path, [(f"good.{kind}", bomb) for kind in kinds])
    assert source.problems == {"unknown file type": len(kinds)}
    planted = tmp_path / "p.tar.index.npz"
    np.savez(planted, about=np.array([Bomb(tmp_path / "pwned")], dtype=object))
    assert keys(ShardSource(str(tmp_path / "p.tar"))) == ["good"]
    assert not (tmp_path / "pwned").exists()


def test_packing_a_hostile_shard_writes_inside_its_folder_only(tmp_path):
    inside = tmp_path / "in"
    inside.mkdir()
    (inside / "secret").write_bytes(jpeg(3))
    with_links(inside / "0.tar", tarfile.SYMTYPE)
    members = [("ok.jpg", jpeg()), ("ok.txt", b"t"), ("ok.pkl", pickle.dumps(Bomb(tmp_path / "x")))]
    for name in UNSAFE:
        members += [(f"{name}.jpg", jpeg()), (f"{name}.txt", b"t")]
    members += [("odd.jpg", jpeg()), ("odd.json", b'{"caption": "c", "key": "../../evil"}')]
    write_tar(inside / "1.tar", members)
    before = {path for path in tmp_path.rglob("*")}
    pack(ShardSource(str(inside)), tmp_path / "deep" / "out")
    made = {path for path in tmp_path.rglob("*")} - before - {tmp_path / "deep"}
    assert {path for path in made if tmp_path / "deep" not in path.parents} <= {
        *(inside / f"{i}.tar.index.npz" for i in range(2)),
    }
    with tarfile.open(tmp_path / "deep" / "out" / "00000.tar") as tar:
        assert all(member.isreg() for member in tar)
        assert all(name.rpartition(".")[0].isdigit() for name in tar.getnames())
        contents = [tar.extractfile(member).read() for member in tar]
    assert jpeg(3) not in contents and jpeg() in contents
