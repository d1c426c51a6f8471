import hashlib
import json
import tarfile

import pytest
from made_data import encode, jpeg, photo

from multimodal.data import pack as packing
from multimodal.data.folder import FolderSource
from multimodal.data.pack import pack
from multimodal.data.shards import ShardSource
from multimodal.data.tables import TableSource


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def source(tmp_path):
    """Eleven pictures with one caption, two captions, metadata; one is no picture."""
    folder = tmp_path / "pictures"
    folder.mkdir()
    for i in range(11):
        kind = ("JPEG", "PNG", "WEBP", "GIF")[i % 4]
        (folder / f"{i:02d} x.{kind.lower()}").write_bytes(encode(photo(seed=i), kind))
        if i % 3:
            (folder / f"{i:02d} x.txt").write_text(f"caption {i}")
        else:
            record = {"captions": [f"caption {i}", f"text {i}"], "width": i}
            (folder / f"{i:02d} x.json").write_text(json.dumps(record))
    (folder / "06 x.webp").write_bytes(b"<html>")
    return FolderSource(str(folder))


def contents(folder) -> dict[str, str]:
    files = [path for path in folder.iterdir() if not path.name.endswith(".npz")]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_a_pack_holds_what_the_source_holds(source, tmp_path):
    steps = []
    state = pack(source, tmp_path / "out", samples_per_shard=4, progress=steps.append)
    assert (state.complete, state.samples, state.skipped) == (True, [4, 3, 3], {"not an image": 1})
    assert sum(steps) == 11
    packed = ShardSource(str(tmp_path / "out"))
    assert packed.groups() == [4, 3, 3]
    assert packed.problems == {}
    originals = [source.read(i) for i in range(11) if i != 6]
    for i, original in enumerate(originals):
        sample = packed.read(i)
        assert sample.image == original.image
        assert sample.captions == original.captions
        assert sample.meta == {"key": original.key} | original.meta
    assert packed.read(5).key == "000010001"


def test_the_layout_is_that_of_webdataset_tools(source, tmp_path):
    pack(source, tmp_path / "out", samples_per_shard=4)
    assert sorted(contents(tmp_path / "out")) == [
        "00000.tar",
        "00001.tar",
        "00002.tar",
        "README.md",
        "pack.json",
    ]
    with tarfile.open(tmp_path / "out" / "00000.tar") as shard:
        names = shard.getnames()
        assert names[:3] == ["000000000.jpg", "000000000.txt", "000000000.json"]
        assert shard.extractfile("000000000.txt").read() == b"caption 0"
    card = (tmp_path / "out" / "README.md").read_text()
    assert "samples: 10" in card
    assert "left out: 1 x not an image" in card


def test_a_second_call_changes_nothing(source, tmp_path):
    out = tmp_path / "out"
    pack(source, out, samples_per_shard=4)
    before = {path.name: path.stat().st_mtime_ns for path in out.iterdir()}
    assert pack(source, out, samples_per_shard=4).complete
    assert {path.name: path.stat().st_mtime_ns for path in out.iterdir()} == before


@pytest.mark.parametrize("stop_at", [0, 1, 5, 10])
def test_a_stopped_pack_is_taken_up_and_ends_the_same(source, tmp_path, stop_at):
    pack(source, tmp_path / "whole", samples_per_shard=4)
    done = []

    def stop(count: int) -> None:
        done.append(count)
        if sum(done) > stop_at:
            raise KeyboardInterrupt

    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        pack(source, out, samples_per_shard=4, progress=stop)
    steps = []
    pack(source, out, samples_per_shard=4, progress=steps.append)
    assert sum(steps) == 11
    assert contents(out) == contents(tmp_path / "whole")


def test_another_pack_in_the_folder_is_refused(source, tmp_path):
    out = tmp_path / "out"
    pack(source, out, samples_per_shard=4)
    with pytest.raises(ValueError, match="samples_per_shard=4, not 5"):
        pack(source, out, samples_per_shard=5)
    (tmp_path / "pictures" / "00 x.jpeg").write_bytes(jpeg(99))
    with pytest.raises(ValueError, match="holds a pack of folder"):
        pack(FolderSource(str(tmp_path / "pictures")), out, samples_per_shard=4)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep me")
    with pytest.raises(ValueError, match="is not empty and holds no pack"):
        pack(source, tmp_path / "mine")
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["notes.txt"]


def test_nothing_usable_is_an_error(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jpg").write_bytes(b"<html>")
    with pytest.raises(ValueError, match=r"no sample can be packed: .'not an image': 1"):
        pack(FolderSource(str(tmp_path / "in")), tmp_path / "out")


def test_pictures_without_text_are_left_out(tmp_path):
    (tmp_path / "a.jpg").write_bytes(jpeg())
    with pytest.raises(ValueError, match="no caption"):
        pack(FolderSource(str(tmp_path)), tmp_path / "out")


def test_classes_become_class_files(tmp_path):
    for name in ("cat", "dog"):
        (tmp_path / "in" / name).mkdir(parents=True)
        (tmp_path / "in" / name / "1.jpg").write_bytes(jpeg())
    pack(FolderSource(str(tmp_path / "in")), tmp_path / "out")
    packed = ShardSource(str(tmp_path / "out"))
    assert packed.read(1).meta == {"key": "dog/1.jpg", "cls": "dog"}
    assert packed.read(1).captions == ("dog",)
    with tarfile.open(tmp_path / "out" / "00000.tar") as shard:
        assert shard.extractfile("000000001.cls").read() == b"dog"


def test_a_table_can_be_packed(tmp_path):
    (tmp_path / "a.jpg").write_bytes(jpeg())
    (tmp_path / "t.csv").write_text("image,caption,n\na.jpg,\u00e9t\u00e9,3\ngone.jpg,B,4\n")
    state = pack(TableSource(str(tmp_path / "t.csv")), tmp_path / "out")
    assert state.skipped == {"missing file": 1}
    sample = ShardSource(str(tmp_path / "out")).read(0)
    assert (sample.captions, sample.meta) == (("\u00e9t\u00e9",), {"key": "a.jpg", "n": 3})


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"])
def test_endings_follow_the_content(kind):
    ending = packing._extension(encode(photo(), kind), "k")
    assert ending == {"JPEG": "jpg", "TIFF": "tif"}.get(kind, kind.lower())


def test_webdataset_reads_a_pack(source, tmp_path):
    webdataset = pytest.importorskip("webdataset")
    pack(source, tmp_path / "out", samples_per_shard=20)
    samples = list(
        webdataset.WebDataset(str(tmp_path / "out" / "00000.tar"), shardshuffle=False).decode("pil")
    )
    assert len(samples) == 10
    assert samples[0]["txt"] == "caption 0"
    assert samples[0]["json"]["captions"] == ["caption 0", "text 0"]
    assert samples[1]["png"].size == (53, 41)
