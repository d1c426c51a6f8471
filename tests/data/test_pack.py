import hashlib
import io
import itertools
import json
import multiprocessing
import os
import signal
import socket
import tarfile
from collections import Counter

import numpy as np
import pytest
from made_data import encode, jpeg, photo, write_tar
from PIL import ExifTags, Image

from multimodal.data import pack as packing
from multimodal.data import shard_writer, tar_index
from multimodal.data.folder import FolderSource
from multimodal.data.pack import pack
from multimodal.data.recode import Recode, ending_of, recode
from multimodal.data.shards import ShardSource
from multimodal.data.splits import parse_splits, split_of
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
    """Hashes of all files but the indices, which hold the times of their shards, and the lock."""
    others = (".npz", ".lock")
    files = [p for p in folder.rglob("*") if p.is_file() and not p.name.endswith(others)]
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def test_a_pack_holds_what_the_source_holds(source, tmp_path):
    steps = []
    state = pack(source, tmp_path / "out", samples_per_shard=4, progress=steps.append)
    assert (state.complete, state.samples, state.shards) == (True, 10, 3)
    assert state.skipped == {"not an image": 1}
    assert sum(steps) == 11
    packed = ShardSource(str(tmp_path / "out"))
    assert packed.groups() == [4, 4, 2]
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
        "skipped.jsonl",
    ]
    assert not (tmp_path / "out" / ".lock").exists()
    with tarfile.open(tmp_path / "out" / "00000.tar") as shard:
        names = shard.getnames()
        assert names[:3] == ["000000000.jpg", "000000000.txt", "000000000.json"]
        assert shard.extractfile("000000000.txt").read() == b"caption 0"
    card = (tmp_path / "out" / "README.md").read_text()
    assert "samples: 10" in card
    assert "left out: 1 x not an image" in card


def test_a_second_pack_of_the_same_folder_at_a_time_is_refused(source, tmp_path, small_pieces):
    out = tmp_path / "out"
    refusals = []

    def again(count: int) -> None:
        try:
            pack(source, out, samples_per_shard=4)
        except ValueError as error:
            refusals.append(str(error))

    pack(source, tmp_path / "alone", samples_per_shard=4)
    pack(source, out, samples_per_shard=4, progress=again, workers=1)
    assert len(refusals) == 7
    assert set(refusals) == {
        f"{out} is being written by process {os.getpid()} on {socket.gethostname()}; wait for it, "
        "stop it, or choose another folder"
    }
    assert contents(out) == contents(tmp_path / "alone")


def test_what_is_left_out_is_listed(source, tmp_path, small_pieces, caplog):
    (tmp_path / "pictures" / "09 x.json").write_text("{}")
    pack(source, tmp_path / "out")
    lines = (tmp_path / "out" / "skipped.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {
            "key": "06 x.webp",
            "place": ".",
            "reason": "not an image",
            "detail": "starts with b'<html>'",
            "index": 6,
        },
        {
            "key": "09 x.png",
            "place": ".",
            "reason": "no caption",
            "detail": "",
            "index": 9,
        },
    ]
    assert "left out, and listed in skipped.jsonl: 1 x not an image, 1 x no caption" in caplog.text


def test_a_split_without_samples_is_told_and_has_no_folder(source, tmp_path, caplog):
    state = pack(source, tmp_path / "out", splits={"val": 1e-9})
    assert not (tmp_path / "out" / "val").exists() and state.samples == 10
    assert "no sample fell to the split val; it has no folder" in caplog.text


def test_a_second_call_changes_nothing(source, tmp_path):
    out = tmp_path / "out"
    pack(source, out, samples_per_shard=4)
    before = {path.name: path.stat().st_mtime_ns for path in out.iterdir()}
    assert pack(source, out, samples_per_shard=4).complete
    assert {path.name: path.stat().st_mtime_ns for path in out.iterdir()} == before


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(packing, "_PIECE", 2)
    monkeypatch.setattr(packing, "_NOTED_EVERY", 3)


@pytest.mark.parametrize("stop_at", [1, 5, 10])
def test_a_stopped_pack_is_taken_up_and_ends_the_same(source, tmp_path, small_pieces, stop_at):
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


def test_what_a_stop_left_behind_the_last_note_is_cut_off(source, tmp_path, small_pieces):
    pack(source, tmp_path / "whole", samples_per_shard=99)
    out = tmp_path / "out"

    done = []

    def stop(count: int) -> None:
        done.append(count)
        if sum(done) > 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pack(source, out, samples_per_shard=99, progress=stop)
    with (out / ".00000.tar.part").open("ab") as file:
        file.write(b"\xff" * 100_000)
    pack(source, out, samples_per_shard=99)
    assert contents(out) == contents(tmp_path / "whole")


def pack_until_killed(source, out, splits, calls_left: int) -> None:
    """Pack in a process that dies at one of its calls that touch the disk."""
    left = [calls_left]

    def deadly(real):
        def call(*args, **kwargs):
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        return call

    for name in ("fsync", "replace", "truncate"):
        setattr(os, name, deadly(getattr(os, name)))
    shard_writer.load_index = deadly(shard_writer.load_index)
    pack(source, out, samples_per_shard=3, splits=splits)


@pytest.mark.parametrize("splits", [{}, {"val": 0.3}])
def test_a_kill_at_any_moment_costs_nothing_but_time(source, tmp_path, small_pieces, splits):
    pack(source, tmp_path / "whole", samples_per_shard=3, splits=splits)
    context = multiprocessing.get_context("fork")
    for calls in itertools.count():
        out = tmp_path / f"{calls}"
        arguments = source, out, splits, calls
        for again in range(2):  # the second is killed while it goes on
            process = context.Process(target=pack_until_killed, args=(*arguments[:3], calls))
            process.start()
            process.join()
            if process.exitcode == 0:
                break
            assert process.exitcode == -signal.SIGKILL, (calls, again)
        pack(source, out, samples_per_shard=3, splits=splits)
        assert contents(out) == contents(tmp_path / "whole"), calls
        if process.exitcode == 0 and again == 0:
            break
    assert calls > 20


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
    (tmp_path / "in" / "a.txt").write_text("text")
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


def test_the_index_is_there_at_once(source, tmp_path, monkeypatch):
    pack(source, tmp_path / "out", samples_per_shard=4)
    monkeypatch.setattr(tar_index, "scan", lambda shard: pytest.fail("scanned again"))
    assert len(ShardSource(str(tmp_path / "out"))) == 10


# --- pictures encoded anew -----------------------------------------------------------------------


def pixels(data: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"), np.float64)


def psnr(a: np.ndarray, b: np.ndarray) -> float:
    assert a.shape == b.shape
    return 10 * np.log10(255**2 / ((a - b) ** 2).mean())


@pytest.mark.parametrize(("kind", "format"), [("jpeg", "JPEG"), ("webp", "WEBP")])
@pytest.mark.parametrize(("size", "expected"), [((120, 80), (48, 32)), ((70, 201), (32, 92))])
def test_large_pictures_get_the_short_side_as_pillow_scales_them(kind, format, size, expected):
    original = photo(*size)
    stored = recode(encode(original, "PNG"), Recode(32, kind, 95))
    assert Image.open(io.BytesIO(stored)).format == format
    scaled = original.resize(expected, Image.Resampling.BICUBIC)
    assert psnr(pixels(stored), pixels(encode(scaled, format, quality=95))) > 40  # both are lossy


def test_quality_is_that_of_the_encoder():
    data = encode(photo(200, 150), "PNG")
    for quality in (30, 90):
        stored = recode(data, Recode(None, "jpeg", quality))
        assert stored == encode(photo(200, 150), "JPEG", quality=quality)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF"])
def test_small_pictures_stay_byte_for_byte_unless_the_format_asks(kind):
    data = encode(photo(40, 32), kind)
    assert recode(data, Recode(32)) == data
    assert recode(data, Recode()) == data
    changed = recode(data, Recode(32, "jpeg"))
    assert (changed == data) == (kind == "JPEG")
    assert Image.open(io.BytesIO(changed)).format == "JPEG"
    assert Image.open(io.BytesIO(changed)).size == (40, 32)


def test_what_is_encoded_anew_is_upright_on_white_and_without_metadata():
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    exif[ExifTags.Base.Artist] = "somebody"
    wide = photo(90, 60)
    stored = recode(encode(wide, "JPEG", quality=98, exif=exif), Recode(30, None, 95))
    image = Image.open(io.BytesIO(stored))
    assert image.size == (30, 45) and not image.getexif() and b"somebody" not in stored
    upright = wide.transpose(Image.Transpose.ROTATE_270).resize((30, 45), Image.Resampling.BICUBIC)
    assert psnr(pixels(stored), pixels(encode(upright, "PNG"))) > 30
    clear = Image.new("RGBA", (64, 64), (255, 0, 0, 0))
    assert pixels(recode(encode(clear, "PNG"), Recode(16))).min() == 255


@pytest.mark.parametrize("data", [b"", b"<html>", jpeg(1)[:-200]])
def test_a_damaged_picture_is_left_out_of_a_pack_that_encodes(tmp_path, data):
    write_tar(tmp_path / "0.tar", [("a.jpg", data), ("a.txt", b"t"), ("b.jpg", jpeg()), *TEXT])
    state = pack(ShardSource(str(tmp_path)), tmp_path / "out", pictures=Recode(500))
    assert state.samples == 1 and sum(state.skipped.values()) == 1


TEXT = [("b.txt", b"t")]


@pytest.mark.parametrize(
    ("how", "message"), [({"short_side": 0}, "at least 1 pixel"), ({"quality": 101}, "1 to 100")]
)
def test_settings_that_make_no_picture_are_refused(how, message):
    with pytest.raises(ValueError, match=message):
        Recode(**how)


def test_bytes_do_not_depend_on_the_number_of_processes(source, tmp_path, small_pieces):
    options = {"samples_per_shard": 3, "pictures": Recode(24, "webp"), "splits": {"val": 0.4}}
    for workers in (0, 1, 3):
        pack(source, tmp_path / f"{workers}", workers=workers, **options)
    assert contents(tmp_path / "0") == contents(tmp_path / "1") == contents(tmp_path / "3")
    assert "val/00000.tar" in contents(tmp_path / "0")
    with pytest.raises(ValueError, match="was begun with short_side=24, not 25"):
        pack(source, tmp_path / "0", **(options | {"pictures": Recode(25, "webp")}))


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"])
def test_endings_follow_the_content(kind):
    ending = ending_of(encode(photo(), kind))
    assert ending == {"JPEG": "jpg", "TIFF": "tif"}.get(kind, kind.lower())


# --- splits --------------------------------------------------------------------------------------


def test_splits_hold_every_sample_once_by_their_keys(source, tmp_path):
    splits = parse_splits("val=0.3, test=0.2")
    state = pack(source, tmp_path / "out", splits=splits)
    assert list(state.splits) == ["val", "test", "train"]
    found = {}
    for name, written in state.splits.items():
        if written.finished:
            packed = ShardSource(str(tmp_path / "out" / name))
            assert packed.groups() == written.finished
            found |= {packed.read(i).meta["key"]: name for i in range(len(packed))}
    originals = [source.read(i).key for i in range(11) if i != 6]
    assert found == {key: split_of(key, splits) for key in originals}


def test_a_split_gets_its_share_and_a_sample_stays_in_it():
    keys = [f"{i}.jpg" for i in range(20_000)]
    drawn = Counter(split_of(key, {"val": 0.1, "test": 0.05}) for key in keys)
    for name, share in {"val": 0.1, "test": 0.05, "train": 0.85}.items():
        deviation = (20_000 * share * (1 - share)) ** 0.5
        assert abs(drawn[name] - 20_000 * share) < 4 * deviation
    smaller = [key for key in keys if split_of(key, {"val": 0.05}) == "val"]
    assert all(split_of(key, {"val": 0.1}) == "val" for key in smaller)
    assert {split_of(key, {}) for key in keys[:9]} == {""}


@pytest.mark.parametrize(
    "text", ["val", "val=", "val=2", "val=0", "train=0.1", "../x=0.1", "a=0.6,b=0.4", "a=.1,a=.1"]
)
def test_splits_that_make_no_sense_are_refused(text):
    with pytest.raises(ValueError, match="splits: "):
        parse_splits(text)


# --- other tools ---------------------------------------------------------------------------------


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
