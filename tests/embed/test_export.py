"""Embedding folders: other programs read them, and no crash or number of ranks changes them."""

import json
import os
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from tiny import EMBED_DIM, damage, picture, tiny_pretrained, write_pictures
from tools import on_ranks

from multimodal.data.build import source_from_path
from multimodal.embed import export as export_module
from multimodal.embed import format as format_module
from multimodal.embed.export import export
from multimodal.embed.format import Manifest, read_manifest
from multimodal.files import write_atomically

COUNT, BAD, BARE = 13, 5, 7
CAPTIONS = [[f"red {i}", "a second one"] if i != BARE else [] for i in range(COUNT)]


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """13 pictures, of which number 5 is damaged and number 7 has no caption."""
    metas = [{"number": i, "score": i / 2 if i % 2 else i, "mixed": 1} for i in range(COUNT)]
    metas[3] |= {"similarity": "in the way", "key": 3, "mixed": "one", "large": 2**70}
    metas[4] |= {"mixed": None, "large": 1}
    folder = write_pictures(tmp_path_factory.mktemp("pictures"), CAPTIONS, metas)
    damage(folder, BAD)
    return folder


def run(pictures, out, **options):
    """Parts of 4 samples, in batches of 3."""
    options = {"rows_per_part": 4, "batch_size": 3, "model_path": "here"} | options
    return export(tiny_pretrained(), source_from_path(str(pictures)), out, **options)


@pytest.fixture(scope="module")
def exported(pictures, tmp_path_factory):
    out = tmp_path_factory.mktemp("exported")
    run(pictures, out)
    return out


def contents(folder):
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def test_numpy_and_pandas_read_aligned_rows(exported, pictures):
    read = {
        name: np.concatenate([np.load(path) for path in sorted((exported / name).glob("*.npy"))])
        for name in ("img_emb", "text_emb")
    }
    table = pd.concat(map(pd.read_parquet, sorted((exported / "metadata").iterdir())))
    numbers = [i for i in range(COUNT) if i != BAD]
    assert table["number"].tolist() == numbers
    assert table["key"].tolist() == [f"{i:03d}.png" for i in numbers]
    assert table["image_path"].tolist() == table["key"].tolist()
    assert table["caption"].tolist() == [CAPTIONS[i][0] if CAPTIONS[i] else "" for i in numbers]
    pretrained = tiny_pretrained()
    image = pretrained.encode_image([picture(i) for i in numbers])
    text = pretrained.encode_text(table["caption"].tolist())
    for name, expected in (("img_emb", image), ("text_emb", text)):
        assert read[name].dtype == np.float16 and read[name].shape == (12, EMBED_DIM)
        assert np.abs(read[name] - expected.numpy()).max() < 1e-3  # half precision
    similarity = (image * text).sum(dim=1).numpy()
    bare = np.array(numbers) == BARE
    assert table["similarity"].isna().to_numpy().tolist() == bare.tolist()
    assert np.abs(table["similarity"].to_numpy()[~bare] - similarity[~bare]).max() < 1e-6


def test_faiss_finds_each_row_by_its_own_vector(exported):
    faiss = pytest.importorskip("faiss")
    files = sorted((exported / "img_emb").glob("*.npy"))
    vectors = np.concatenate([np.load(path) for path in files]).astype(np.float32)
    index = faiss.IndexFlatIP(EMBED_DIM)
    index.add(vectors)
    assert index.search(vectors, 1)[1][:, 0].tolist() == list(range(12))


def test_metadata_keeps_what_the_sample_had(exported):
    table = pd.concat(map(pd.read_parquet, sorted((exported / "metadata").iterdir())))
    assert table["score"].tolist() == [i / 2 if i % 2 else i for i in range(COUNT) if i != BAD]
    row = table[table["number"] == 3].iloc[0]
    assert (row["meta_similarity"], row["meta_key"]) == ("in the way", 3)
    assert (row["mixed"], row["large"]) == ("one", str(2**70))
    assert table[table["number"] == 2].iloc[0]["mixed"] == "1"


def test_what_was_left_out_is_counted_and_listed(exported):
    manifest = read_manifest(exported)
    assert manifest.complete and manifest.skipped == 1
    assert manifest.rows() + manifest.skipped == manifest.samples == COUNT
    assert [part.rows for part in manifest.parts] == [4, 3, 4, 1]
    errors = pd.read_parquet(exported / "errors.parquet")
    assert errors["index"].tolist() == [BAD] and errors["key"].tolist() == ["005.png"]
    assert errors["reason"].tolist() == ["image cut short"]


def test_only_vectors_have_the_ending_of_vectors(exported):
    found = {path.relative_to(exported).as_posix() for path in exported.rglob("*.npy")}
    names = [f"{part:05d}.npy" for part in range(4)]
    assert found == {f"{kind}/{kind}_{name}" for kind in ("img_emb", "text_emb") for name in names}
    assert not list(exported.rglob("*.tmp"))


def crash_at(monkeypatch, number):
    """Stop at a write, after its temporary file is there and before it has its name."""
    calls = []

    def write_or_crash(path, write):
        calls.append(path)
        if len(calls) == number:
            write(path.with_name(path.name + ".tmp"))
            raise KeyboardInterrupt
        write_atomically(path, write)

    for module in (export_module, format_module):
        monkeypatch.setattr(module, "write_atomically", write_or_crash)


@pytest.mark.parametrize("write", range(1, 20))
def test_a_crash_at_any_write_and_a_resume_give_the_same_bytes(
    exported, pictures, tmp_path, monkeypatch, write
):
    with monkeypatch.context() as patch:
        crash_at(patch, write)
        with pytest.raises(KeyboardInterrupt):
            run(pictures, tmp_path)
    before = contents(tmp_path)
    finished = [name for name in before if name.startswith("parts/") and name.endswith(".json")]
    encoded = []
    run(pictures, tmp_path, progress=encoded.append)
    assert contents(tmp_path) == contents(exported)
    assert sum(encoded) == COUNT
    assert len([n for n in encoded if n == 4]) == min(len(finished), 3), "finished parts are kept"


def test_there_are_no_further_writes(pictures, tmp_path, monkeypatch):
    """Else the test above does not cover them all."""
    crash_at(monkeypatch, 20)
    run(pictures, tmp_path)


def test_a_complete_folder_is_left_alone(exported, pictures, monkeypatch):
    monkeypatch.setattr(export_module, "_encode", None)
    assert run(pictures, exported) == read_manifest(exported)


def test_a_finished_part_with_a_lost_file_is_made_again(exported, pictures, tmp_path):
    for name, data in contents(exported).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(data)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    manifest |= {"complete": False, "parts": [], "skipped": 0}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    (tmp_path / "text_emb" / "text_emb_00001.npy").unlink()
    run(pictures, tmp_path)
    assert contents(tmp_path) == contents(exported)


@pytest.mark.parametrize(
    ("options", "field"),
    [({"rows_per_part": 5}, "rows_per_part"), ({"dtype": "float32"}, "dtype")],
)
def test_other_settings_do_not_continue_a_folder(exported, pictures, options, field):
    with pytest.raises(ValueError, match=f"begun with {field}="):
        run(pictures, exported, **options)


def test_another_model_or_other_data_do_not_continue_a_folder(exported, pictures, tmp_path):
    source = source_from_path(str(pictures))
    with pytest.raises(ValueError, match="begun with model_fingerprint="):
        export(tiny_pretrained(seed=1), source, exported, rows_per_part=4)
    other = source_from_path(str(write_pictures(tmp_path, CAPTIONS)))
    with pytest.raises(ValueError, match="begun with source_fingerprint="):
        export(tiny_pretrained(), other, exported, rows_per_part=4)


@pytest.mark.parametrize("name", ["img_emb/mine.npy", "img_emb/img_emb_00004.npy", "more/a.npy"])
def test_foreign_vectors_are_not_mixed_in(pictures, tmp_path, name):
    (tmp_path / name).parent.mkdir()
    np.save(tmp_path / name, np.zeros((2, 3)))
    with pytest.raises(ValueError, match="choose an empty folder"):
        run(pictures, tmp_path)


def test_float32_is_exact(pictures, tmp_path):
    run(pictures, tmp_path, dtype="float32", rows_per_part=100, batch_size=100)
    read = np.load(tmp_path / "img_emb" / "img_emb_00000.npy")
    expected = tiny_pretrained().encode_image([picture(i) for i in range(COUNT) if i != BAD])
    assert np.abs(read - expected.numpy()).max() < 1e-6


def test_a_part_without_a_usable_sample_leaves_no_files(tmp_path):
    folder = write_pictures(tmp_path / "pictures", CAPTIONS[:5])
    damage(folder, 2), damage(folder, 3)
    manifest = run(folder, tmp_path / "out", rows_per_part=2)
    assert [part.rows for part in manifest.parts] == [2, 0, 1]
    assert len(list((tmp_path / "out" / "img_emb").iterdir())) == 2


def test_nothing_to_export_is_an_error(tmp_path):
    folder = write_pictures(tmp_path / "pictures", [["a"]])
    damage(folder, 0)
    with pytest.raises(ValueError, match="none of 1 samples"):
        run(folder, tmp_path / "out")
    assert not read_manifest(tmp_path / "out").complete


def test_a_wrong_manifest_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"manifest\.json is missing"):
        read_manifest(tmp_path)
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        read_manifest(tmp_path)
    fields = dict.fromkeys(Manifest.model_fields, "x")
    (tmp_path / "manifest.json").write_text(json.dumps(fields | {"version": 2}))
    with pytest.raises(ValueError, match="version: Input should be 1"):
        read_manifest(tmp_path)


def test_a_file_name_that_is_not_utf8_does_no_harm(tmp_path):
    for name in (b"\xe9.png", b"\xe8.png"):
        picture(0).save(os.fsdecode(os.path.join(os.fsencode(tmp_path), name)))
    damaged = os.fsdecode(os.path.join(os.fsencode(tmp_path), b"\xe9.png"))
    Path(damaged).write_bytes(b"no picture")
    run(tmp_path, tmp_path / "out")
    assert pd.read_parquet(tmp_path / "out" / "errors.parquet")["key"].tolist() == ["?.png"]
    metadata = tmp_path / "out" / "metadata" / "metadata_00000.parquet"
    assert pd.read_parquet(metadata)["key"].tolist() == ["?.png"]


@pytest.mark.slow
def test_three_ranks_write_what_one_writes(exported, pictures, tmp_path):
    torch.set_num_threads(1)
    on_ranks(3, run, pictures, tmp_path)
    assert contents(tmp_path) == contents(exported)


def test_a_damaged_file_of_a_complete_folder_is_written_again(pictures, tmp_path):
    run(pictures, tmp_path)
    path = tmp_path / "img_emb/img_emb_00001.npy"
    sound = path.read_bytes()
    path.write_bytes(sound[:-1] + bytes([sound[-1] ^ 1]))
    run(pictures, tmp_path)
    assert path.read_bytes() == sound


def test_changed_captions_are_other_data(tmp_path):
    folder = write_pictures(tmp_path / "pictures", [["red"], ["blue"]])
    run(folder, tmp_path / "out")
    (folder / "000.json").write_text('{"captions": ["rot"]}')
    with pytest.raises(ValueError, match="source_fingerprint"):
        run(folder, tmp_path / "out")
