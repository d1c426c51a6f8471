import pytest
from made_data import pairs, write_tar

from multimodal import config
from multimodal.data.build import open_source, source_from_path
from multimodal.data.folder import FolderSource
from multimodal.data.shards import ShardSource
from multimodal.data.source import BadSample
from multimodal.data.tables import TableSource


def make(root, *names: str) -> FolderSource:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode())
    return FolderSource(str(root))


def test_captions_beside_the_pictures(tmp_path):
    (tmp_path / "x").mkdir()
    (tmp_path / "x/c.json").write_text('{"captions": ["one", "two"], "id": 3}')
    source = make(
        tmp_path, "a.JPG", "a.txt", "x/v1.2 b.png", "x/v1.2 b.txt", "x/c.webp", "lone.gif"
    )
    samples = [source.read(i) for i in range(len(source))]
    assert [s.key for s in samples] == ["a.JPG", "x/c.webp", "x/v1.2 b.png"]
    assert [s.captions for s in samples] == [("a.txt",), ("one", "two"), ("x/v1.2 b.txt",)]
    assert samples[1].meta == {"id": 3}
    assert samples[0].image == b"a.JPG"
    assert source.problems == {"no caption": 1}


def test_files_beside_pictures_are_read_whatever_their_case(tmp_path):
    (tmp_path / "b.Json").write_text('{"captions": ["one"], "id": 3}')
    source = make(tmp_path, "a.jpg", "a.TXT", "b.PNG", "c.jpeg", "c.txt")
    samples = [source.read(i) for i in range(len(source))]
    assert [s.captions for s in samples] == [("a.TXT",), ("one",), ("c.txt",)]
    assert samples[1].meta == {"id": 3}
    assert source.problems == {}
    before = source.fingerprint()
    (tmp_path / "a.TXT").write_bytes(b"A.txt")
    assert source.fingerprint() != before
    (tmp_path / "a.TXT").unlink()
    with pytest.raises(BadSample, match="missing file"):
        source.read(0)


def test_sub_folders_are_classes_where_no_caption_is_there(tmp_path):
    source = make(tmp_path, "tabby cat/1.jpg", "dog/deep/2.jpeg", "README.txt", "dog/.hidden.jpg")
    samples = [source.read(i) for i in range(len(source))]
    assert [(s.key, s.captions, s.meta) for s in samples] == [
        ("dog/deep/2.jpeg", ("dog",), {"cls": "dog"}),
        ("tabby cat/1.jpg", ("tabby cat",), {"cls": "tabby cat"}),
    ]
    assert source.problems == {}
    assert source.place(0) == "dog/deep"


def test_pictures_alone_have_no_caption(tmp_path):
    sample = make(tmp_path, "a.jpg").read(0)
    assert (sample.captions, sample.meta) == ((), {})


def test_a_vanished_picture_is_a_bad_sample(tmp_path):
    source = make(tmp_path, "a.jpg", "b.jpg")
    (tmp_path / "a.jpg").unlink()
    with pytest.raises(BadSample, match="missing file"):
        source.read(0)
    assert source.read(1).key == "b.jpg"
    with pytest.raises(IndexError):
        source.read(2)


def test_empty_and_missing_folders_are_errors(tmp_path):
    with pytest.raises(ValueError, match="no picture in this folder"):
        make(tmp_path, "note.txt")
    with pytest.raises(ValueError, match="there is no such folder"):
        FolderSource(str(tmp_path / "nowhere"))


def test_fingerprint_follows_names_and_sizes(tmp_path):
    prints = [make(tmp_path / str(i), name).fingerprint() for i, name in enumerate(["a.jpg"] * 2)]
    other = make(tmp_path / "3", "b.jpg").fingerprint()
    assert prints[0] == prints[1] != other


def test_large_folders_come_in_small_groups(tmp_path):
    source = make(tmp_path, "a.jpg")
    source._names *= 2503
    assert source.groups() == [1000, 1000, 503]


# --- build ---------------------------------------------------------------------------------------


def test_a_path_leads_to_the_right_source(tmp_path):
    make(tmp_path / "pictures", "a.jpg")
    (tmp_path / "t.csv").write_text("image,caption\npictures/a.jpg,A\n")
    (tmp_path / "shards").mkdir()
    write_tar(tmp_path / "shards" / "0.tar", pairs(["a"]))
    for path, kind in [
        ("pictures", FolderSource),
        ("t.csv", TableSource),
        ("shards", ShardSource),
        ("shards/0.tar", ShardSource),
        ("shards/*.tar", ShardSource),
        ("shards/{0..0}.tar", ShardSource),
    ]:
        assert type(source_from_path(str(tmp_path / path))) is kind
    with pytest.raises(ValueError, match="there is no such file or folder"):
        source_from_path(str(tmp_path / "nothing"))
    (tmp_path / "notes.txt").write_text("no data")
    with pytest.raises(ValueError, match=r"is no data source; give a folder with \.tar shards"):
        source_from_path(str(tmp_path / "notes.txt"))
    with pytest.raises(ValueError, match="only local files are read"):
        source_from_path("pipe:curl x")


def test_a_section_leads_to_the_right_source(tmp_path):
    make(tmp_path, "a.jpg")
    (tmp_path / "t.csv").write_text("i,c\na.jpg,A\n")
    write_tar(tmp_path / "0.tar", pairs(["a"]))
    folder = config.FolderSource(kind="folder", path=str(tmp_path))
    table = config.TableSource(
        kind="table", path=str(tmp_path / "t.csv"), image_column="i", caption_column="c"
    )
    shards = config.ShardsSource(kind="shards", path=str(tmp_path))
    assert type(open_source(folder)) is FolderSource
    assert open_source(table).read(0).captions == ("A",)
    assert open_source(shards).read(0).key == "a"


def test_links_are_followed_once_and_broken_ones_are_bad_samples(tmp_path):
    outside, root = tmp_path / "outside", tmp_path / "root"
    for folder in (outside, root / "dogs"):
        folder.mkdir(parents=True)
        (folder / "a.jpg").write_bytes(b"a picture")
    (root / "cats").symlink_to(outside)
    (outside / "again").symlink_to(root)
    (root / "dogs" / "b.jpg").symlink_to(tmp_path / "nowhere")
    source = FolderSource(str(root))
    assert len(source) == 3 and len(source.fingerprint()) == 64
    assert [source.read(i).captions for i in (0, 1)] == [("cats",), ("dogs",)]
    with pytest.raises(BadSample, match="missing file"):
        source.read(2)


def test_what_is_no_picture_is_counted_and_a_text_may_keep_the_ending(tmp_path):
    for name in ("a.jpg", "b.jpg"):
        (tmp_path / name).write_bytes(b"a picture")
        (tmp_path / f"{name}.txt").write_text(f"of {name}")
    (tmp_path / "c.heic").write_bytes(b"?")
    source = FolderSource(str(tmp_path))
    assert source.problems == {"unknown file type": 1}
    assert [source.read(i).captions for i in (0, 1)] == [("of a.jpg",), ("of b.jpg",)]
