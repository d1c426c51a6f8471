"""Whatever a model folder says is used: removed it is refused, and changed it is refused or
changes what the model gives. What has no effect by right is listed, with the reason."""

import json
import shutil
from pathlib import Path
from typing import get_args

import pytest
import torch
from pydantic import BaseModel
from tiny import picture, tiny_pretrained, tiny_section
from transformers import BertConfig

from multimodal import config
from multimodal.models.build import build_model
from multimodal.weights.load import load
from multimodal.weights.save import save_model

CLIP = {"text": {"rope": True, "width": 24, "depth": 2}}
SIGLIP = {
    "image": {
        **{"class_token": False, "pool": "map", "patch_bias": True, "activation": "gelu_tanh"},
        **{"rope": True, "heads": 1, "width": 24, "position": "none", "registers": 2},
    },
    "text": {"causal": False, "fixed_length": True, "pool": "last", "depth": 2},
    "text_projection": "linear_bias",
    "logit_bias": -3.0,
    "preprocess": {"resize_mode": "squash"},
    "tokenizer": {"clean": ["unescape", "lower"]},
}
TEXTS = [
    *("A Red   square", "blue &amp; grey, warm!", "grey", "", "\u0130stanbul\u00a0\u2014 10\u20ac"),
    "sun " * 40,
    "<|endoftext|> in between",
]
INERT = {
    "kernel": "another way to the same numbers",
    "dropout": "for training only",
    "drop_path": "for training only",
    "patch_dropout": "for training only",
    "layer_scale": "where it begins; its values are weights",
    "logit_scale": "where it begins; its value is a weight",
    "logit_bias": "where it begins; its value is a weight",
    "tokenizer.vocab_size": "a bound, which the towers' rows and the ids in use keep in check",
    "model.tokenizer.kind": "how the tokenizer was made; what it does is in tokenizer.json",
    "model.tokenizer.clean": "how the tokenizer was made; what it does is in tokenizer.json",
    "rope_theta": "used with rope only",
    "mask_padding": "no difference where a causal text ends in its pooled token, or for one text",
}


def merged(tree, over):
    pairs = {
        k: merged(tree[k], v) if isinstance(v, dict) and k in tree else v for k, v in over.items()
    }
    return tree | pairs


def section_of(changes):
    return config.Model.model_validate(merged(tiny_section().model_dump(), changes))


@pytest.fixture(scope="module", params=[CLIP, SIGLIP], ids=["clip", "siglip"])
def saved(request, tmp_path_factory):
    """A model folder and what the model in it gives."""
    folder = tmp_path_factory.mktemp("saved") / "model"
    pretrained = tiny_pretrained(section_of(request.param))
    with torch.no_grad():
        for parameter in pretrained.model.parameters():  # biases and gates begin as zeros
            parameter.add_(0.1 * torch.randn(parameter.shape))
        pretrained.model.temperature.logit_scale.fill_(2.0)
    save_model(
        folder,
        model=pretrained.model,
        section=pretrained.config,
        tokenizer=pretrained.tokenizer,
    )
    return folder, given(load(folder))


def given(pretrained):
    """All that a model gives, as exact bytes."""
    tokens, lengths = pretrained.tokenizer.encode(TEXTS)
    alone = [pretrained.tokenizer.encode([text]).tokens for text in TEXTS]
    images = [picture(1), picture(2, (9, 40)), picture(3, (14, 14))]
    with torch.inference_mode():
        # Other ids after the end: what masks and pooling make of the padding.
        padded = tokens.clone()
        padded[torch.arange(tokens.shape[1]) >= lengths[:, None]] = 7
        features = pretrained.model.encode_text(padded, lengths)
    found = [
        *(tokens, lengths, *alone, features),
        *(pretrained.encode_image(images), pretrained.encode_text(TEXTS)),
        torch.tensor([pretrained.logit_scale(), pretrained.logit_bias() or 0.0]),
    ]
    return [(list(x.shape), x.numpy().tobytes()) for x in found]


def leaves(tree, prefix=()):
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from leaves(value, (*prefix, name))
        else:
            yield (*prefix, name), value


def literals(annotation):
    """All strings and the like that an annotation allows."""
    found = []
    for part in get_args(annotation):
        found += [part] if isinstance(part, str) else literals(part)
    return found


def annotation_at(schema, path, tree):
    """Type of a setting; of towers that of their kind."""
    for name in path[:-1]:
        tree = tree[name]
        kinds = _classes(schema.model_fields[name].annotation)
        schema = next(c for c in kinds if c.model_validate(tree) and _is_kind(c, tree))
    return schema.model_fields[path[-1]].annotation


def _classes(annotation):
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [found for part in get_args(annotation) for found in _classes(part)]


def _is_kind(schema, tree):
    kind = schema.model_fields.get("kind")
    return kind is None or tree["kind"] in get_args(kind.annotation)


def others(path, value, content):
    """Other values of a setting that could be meant."""
    if path[0] == "model":
        allowed = literals(annotation_at(config.Model, path[1:], content["model"]))
        if isinstance(value, list) and allowed:
            return [[x for x in allowed if x not in value], value[1:]]
        if allowed and isinstance(value, str):
            return [x for x in allowed if x != value]
    match value:
        case bool():
            return [not value]
        case int():
            return [value + 1, 2 * value + 1]
        case float():
            return [value * 3, value / 3]
        case list():
            return [[x * 2 for x in value]]
        case None:
            return [0.1, 1]
    return [f"{value}x"]


def put(tree, path, value):
    for name in path[:-1]:
        tree = tree[name]
    tree[path[-1]] = value


def tried(folder, content):
    """What a folder gives, or None if it is refused."""
    (folder / "config.json").write_text(json.dumps(content))
    try:
        return given(load(folder))
    except ValueError:
        return None


@pytest.fixture
def folder(saved, tmp_path):
    return Path(shutil.copytree(saved[0], tmp_path / "model"))


def test_a_removed_field_is_refused_whichever_it_is(saved, folder):
    content = json.loads((saved[0] / "config.json").read_text())
    paths = [path for path, _ in leaves(content) if path[0] != "versions"]
    paths += [path[:n] for path in paths for n in range(1, len(path))]
    assert len(paths) > 60
    for path in paths:
        changed = json.loads(json.dumps(content))
        inner = changed
        for name in path[:-1]:
            inner = inner[name]
        inner.pop(path[-1], None)
        (folder / "config.json").write_text(json.dumps(changed))
        with pytest.raises(ValueError, match=path[-1]):
            load(folder)


def test_no_changed_field_is_ignored(saved, folder):
    content, before = json.loads((saved[0] / "config.json").read_text()), saved[1]
    assert tried(folder, content) == before
    ignored, refused, changed = [], 0, 0
    for path, value in leaves(content):
        if path[0] == "versions":
            continue
        for other in others(path, value, content):
            again = json.loads(json.dumps(content))
            put(again, path, other)
            found = tried(folder, again)
            refused += found is None
            changed += found is not None and found != before
            if found == before:
                ignored.append(path)
    unlisted = [path for path in ignored if not {".".join(path), path[-1]} & INERT.keys()]
    assert unlisted == []
    assert refused > 40 and changed > 12


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_a_changed_byte_in_a_file_is_refused(folder, name):
    path = folder / name
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"{name} is (not|damaged)|not a tokenizer file"):
        load(folder)


def test_files_of_two_models_alike_are_not_one_model(saved, folder):
    """Names and shapes fit; nothing but the hashes could tell."""
    other = tiny_pretrained(load(saved[0]).config, seed=1)
    parts = {"model": other.model, "section": other.config, "tokenizer": other.tokenizer}
    save_model(folder.with_name("other"), **parts)
    shutil.copy(folder.with_name("other") / "model.safetensors", folder)
    with pytest.raises(ValueError, match=r"model\.safetensors is not the file that config\.json"):
        load(folder)


def test_an_architecture_in_a_librarys_file_is_checked(tmp_path):
    BertConfig(
        vocab_size=299, hidden_size=20, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=13, max_position_embeddings=31,
    ).save_pretrained(tmp_path / "bert")  # fmt: skip
    text = {"kind": "hf", "name": str(tmp_path / "bert"), "context_length": 19, "pretrained": False}
    section = tiny_section(text=text)
    tokenizer = tiny_pretrained().tokenizer
    save_model(tmp_path / "m", model=build_model(section), section=section, tokenizer=tokenizer)
    path = tmp_path / "m/text/config.json"
    load(tmp_path / "m")
    path.write_text(path.read_text().replace('"layer_norm_eps": 1e-12', '"layer_norm_eps": 1e-05'))
    with pytest.raises(ValueError, match=r"text/config\.json is not the file"):
        load(tmp_path / "m")
