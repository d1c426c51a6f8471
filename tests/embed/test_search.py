"""Search finds what brute force finds, and refuses vectors that cannot be compared."""

import json

import numpy as np
import pytest
from tiny import EMBED_DIM, picture, tiny_pretrained, write_pictures

from multimodal.data.build import source_from_path
from multimodal.embed import search as search_module
from multimodal.embed.export import export
from multimodal.embed.search import search

CAPTIONS = [[f"red {i}"] for i in range(11)]


@pytest.fixture(scope="module")
def pretrained():
    return tiny_pretrained()


@pytest.fixture
def folder(pretrained, tmp_path):
    source = source_from_path(str(write_pictures(tmp_path / "pictures", CAPTIONS)))
    export(pretrained, source, tmp_path / "out", rows_per_part=4)
    return tmp_path / "out"


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(search_module, "_CHUNK_ROWS", 3)


def test_each_picture_and_caption_finds_its_own_row(folder, pretrained):
    fingerprint = pretrained.fingerprint()
    pictures = pretrained.encode_image([picture(i) for i in range(11)])
    texts = pretrained.encode_text([texts[0] for texts in CAPTIONS])
    for kind, queries in (("image", pictures), ("text", texts)):
        found = search(folder, queries, 1, fingerprint=fingerprint, kind=kind)
        assert [rows[0].metadata["caption"] for rows in found] == [t[0] for t in CAPTIONS]
        assert all(rows[0].score == pytest.approx(1, abs=1e-3) for rows in found)


@pytest.mark.parametrize("k", [1, 5, 11, 20])
def test_rows_are_those_of_brute_force(folder, pretrained, k):
    queries = np.random.default_rng(0).normal(size=(7, EMBED_DIM)).astype(np.float32)
    files = sorted((folder / "img_emb").glob("*.npy"))
    vectors = np.concatenate([np.load(path) for path in files]).astype(np.float32)
    scores = queries / np.linalg.norm(queries, axis=1, keepdims=True) @ vectors.T
    order = np.argsort(-scores, axis=1)[:, :k]
    found = search(folder, queries, k, fingerprint=pretrained.fingerprint())
    keys = [[row.metadata["key"] for row in rows] for rows in found]
    assert keys == [[f"{i:03d}.png" for i in row] for row in order]
    expected = np.take_along_axis(scores, order, axis=1)
    assert np.allclose([[row.score for row in rows] for rows in found], expected, atol=1e-6)


def test_a_row_is_a_json_object(folder, pretrained):
    query = pretrained.encode_text(["red 3"])
    row = search(folder, query, 1, fingerprint=pretrained.fingerprint())[0][0].as_dict()
    assert json.loads(json.dumps(row)) == row
    assert {"score", "image_path", "caption", "key", "similarity"} <= set(row)


def test_vectors_of_another_model_are_refused(folder):
    other = tiny_pretrained(seed=1)
    with pytest.raises(ValueError, match="vectors cannot be compared"):
        search(folder, other.encode_text(["red"]), fingerprint=other.fingerprint())


def test_an_unfinished_or_changed_folder_is_refused(folder, pretrained):
    query, fingerprint = pretrained.encode_text(["red"]), pretrained.fingerprint()
    (folder / "img_emb" / "img_emb_00001.npy").unlink()
    with pytest.raises(ValueError, match=r"img_emb_00001\.npy is missing"):
        search(folder, query, fingerprint=fingerprint)
    np.save(folder / "img_emb" / "img_emb_00001.npy", np.zeros((3, EMBED_DIM)))
    with pytest.raises(ValueError, match=r"not \[4, 17\]"):
        search(folder, query, fingerprint=fingerprint)
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"complete": False}))
    with pytest.raises(ValueError, match="not complete"):
        search(folder, query, fingerprint=fingerprint)


@pytest.mark.parametrize(
    ("queries", "k", "message"),
    [
        (np.ones((1, EMBED_DIM + 1)), 1, r"shape \(1, 18\)"),
        (np.ones(EMBED_DIM), 1, r"shape \(17,\)"),
        (np.zeros((1, EMBED_DIM)), 1, "no direction"),
        (np.full((1, EMBED_DIM), np.nan), 1, "no direction"),
        (np.ones((1, EMBED_DIM)), 0, "k=0"),
    ],
)
def test_bad_queries_are_refused(folder, pretrained, queries, k, message):
    with pytest.raises(ValueError, match=message):
        search(folder, queries, k, fingerprint=pretrained.fingerprint())
