"""CLIP folders as sentence-transformers reads them."""

import json
import shutil

import numpy as np
import pytest
from convertible import openai_clip, trained_clip

from multimodal.weights import sentence_folder
from multimodal.weights.convert import convert
from multimodal.weights.parity import compare
from multimodal.weights.parity_inputs import PICTURES, TEXTS, by_kind, pictures, texts

sentence_transformers = pytest.importorskip("sentence_transformers")


@pytest.fixture(scope="module", params=["trained", "openai"])
def exported(request, tmp_path_factory):
    root = tmp_path_factory.mktemp("sentences")
    pretrained = trained_clip() if request.param == "trained" else openai_clip(root / "bpe")
    convert(pretrained, root / "out", "sentence-transformers")
    return pretrained, root / "out"


def test_embeddings_of_texts_and_pictures_are_ours(exported):
    pretrained, folder = exported
    report = json.loads((folder / "parity.json").read_text())
    assert report["passed"] and report["library"].startswith("sentence-transformers ")
    model = sentence_transformers.SentenceTransformer(str(folder), device="cpu")
    size = pretrained.transform.size
    images = by_kind(pictures(size), size, pretrained.config.preprocess)[PICTURES]
    found = model.encode(texts()[TEXTS], normalize_embeddings=True)
    assert np.abs(found - pretrained.encode_text(texts()[TEXTS]).numpy()).max() < 1e-5
    found = model.encode(images, normalize_embeddings=True)
    assert np.abs(found - pretrained.encode_image(images).numpy()).max() < 0.02


def test_the_folder_names_the_module_that_old_versions_ask_for(exported):
    _, folder = exported
    (module,) = json.loads((folder / "modules.json").read_text())
    assert module["type"] == "sentence_transformers.models.CLIPModel" and module["path"] == ""


@pytest.mark.parametrize(
    ("file", "part", "values"),
    [
        ("config.json", "text_config", {"hidden_act": "relu"}),
        ("config.json", "vision_config", {"num_attention_heads": 1}),
        ("config.json", "text_config", {"eos_token_id": 5}),
        ("preprocessor_config.json", None, {"image_mean": [0.4, 0.5, 0.5]}),
    ],
)
def test_whatever_is_wrong_in_the_files_is_found(exported, tmp_path, file, part, values):
    pretrained, folder = exported
    shutil.copytree(folder, tmp_path / "copy")
    content = json.loads((folder / file).read_text())
    (content if part is None else content[part]).update(values)
    (tmp_path / "copy" / file).write_text(json.dumps(content))
    rows = compare(pretrained, sentence_folder.reopen(tmp_path / "copy"))
    assert any(not row.passed for row in rows)
