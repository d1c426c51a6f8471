"""Models saved by transformers are read from their folder, and give what they give there."""

import json

import pytest
import torch
from tiny import picture
from transformers import (
    CLIPConfig,
    CLIPImageProcessor,
    CLIPModel,
    CLIPProcessor,
    CLIPTokenizer,
    SiglipConfig,
    SiglipImageProcessor,
    SiglipModel,
)

from multimodal.weights.hf import features_of
from multimodal.weights.hub import _clean as clean_of
from multimodal.weights.load import load

LETTERS = "abcdefghijklmnopqrstuvwxyz"
TEXTS = ["a red box", "harbour at night", "x"]
ENCODER = {"hidden_size": 26, "intermediate_size": 37, "num_hidden_layers": 1}
IMAGE = ENCODER | {"num_attention_heads": 2, "image_size": 21, "patch_size": 7}
TEXT = ENCODER | {"num_attention_heads": 2, "max_position_embeddings": 23}


def tokenizer() -> CLIPTokenizer:
    tokens = [*LETTERS, *(f"{c}</w>" for c in LETTERS), "<|startoftext|>", "<|endoftext|>"]
    return CLIPTokenizer(vocab={token: i for i, token in enumerate(tokens)}, merges=[])


def text_settings(found: CLIPTokenizer) -> dict:
    ids = {"bos_token_id": found.bos_token_id, "eos_token_id": found.eos_token_id}
    return TEXT | ids | {"pad_token_id": found.pad_token_id, "vocab_size": len(found)}


@torch.no_grad()
@pytest.mark.parametrize("whole_processor", [False, True])
def test_clip_folder_gives_the_features_of_transformers(tmp_path, whole_processor):
    found = tokenizer()
    settings = CLIPConfig(text_config=text_settings(found), vision_config=IMAGE, projection_dim=17)
    theirs = CLIPModel(settings).eval()
    theirs.save_pretrained(tmp_path)
    square = {"height": 21, "width": 21}
    images = CLIPImageProcessor(size={"shortest_edge": 21}, crop_size=square)
    if whole_processor:
        CLIPProcessor(images, found).save_pretrained(tmp_path)
    else:
        images.save_pretrained(tmp_path)
        found.save_pretrained(tmp_path)
    ours = load(f"hf:{tmp_path}")
    pixels = images([picture(i, size=(21, 21)) for i in range(3)], return_tensors="pt")
    expected = features_of(theirs.get_image_features(**pixels))
    features = ours.encode_image([picture(i, size=(21, 21)) for i in range(3)])
    assert torch.allclose(features, torch.nn.functional.normalize(expected), atol=1e-5)
    tokens = found(TEXTS, padding=True, return_tensors="pt")
    expected = features_of(theirs.get_text_features(**tokens))
    features = ours.encode_text(TEXTS)
    assert torch.allclose(features, torch.nn.functional.normalize(expected), atol=1e-5)


def test_siglip_folder_is_read_with_its_preprocessing(tmp_path):
    found = tokenizer()
    SiglipModel(
        SiglipConfig(text_config=text_settings(found), vision_config=IMAGE)
    ).save_pretrained(tmp_path)
    images = SiglipImageProcessor(size={"height": 21, "width": 21}, resample=2)
    images.save_pretrained(tmp_path)
    found.save_pretrained(tmp_path)
    ours = load(f"hf:{tmp_path}")
    assert ours.config.preprocess.resize_mode == "squash"
    assert ours.config.preprocess.interpolation == "bilinear"
    assert ours.config.preprocess.mean == [0.5, 0.5, 0.5]
    assert ours.logit_bias() is not None
    assert ours.classify([picture(0)], ["a", "b"]).sum() == pytest.approx(1)


@pytest.mark.parametrize(
    ("kind", "steps"),
    [
        ("SiglipTokenizer", ["punctuation", "whitespace", "lower"]),
        ("GemmaTokenizer", ["lower"]),
        ("PreTrainedTokenizerFast", []),
        ("TokenizersBackend", []),
    ],
)
def test_siglip_texts_are_cleaned_as_its_class_of_tokenizer_says(tmp_path, kind, steps):
    described = tmp_path / "tokenizer_config.json"
    described.write_text(json.dumps({"tokenizer_class": kind}))
    assert clean_of("siglip", str(tmp_path)) == steps
    assert clean_of("clip", str(tmp_path)) == []


def test_a_model_of_another_kind_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(ValueError, match="it is a 'bert' model"):
        load(f"hf:{tmp_path}")


def test_a_damaged_file_of_weights_is_one_sentence(tmp_path):
    CLIPConfig(text_config=TEXT, vision_config=IMAGE).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"cut short")
    with pytest.raises(ValueError, match="no model of transformers that can be used"):
        load(f"hf:{tmp_path}")


def test_a_pickle_with_code_is_one_sentence_and_runs_nothing(tmp_path):
    CLIPConfig(text_config=TEXT, vision_config=IMAGE).save_pretrained(tmp_path)
    torch.save({"logit_scale": Planted(tmp_path / "ran")}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="no model of transformers that can be used"):
        load(f"hf:{tmp_path}")
    assert not (tmp_path / "ran").exists()


class Planted:
    """Runs code when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return exec, (f"open({str(self.path)!r}, 'w').close()",)
