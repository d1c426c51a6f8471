"""Towers written as ONNX graphs, run by onnxruntime."""

import json
import logging

import numpy as np
import pytest
import torch
from test_transformers_clip import randomised
from tiny import tiny_pretrained, tiny_section
from tools import ROOT

from multimodal import config
from multimodal.config_io import read_yaml
from multimodal.models.build import build_model
from multimodal.weights import onnx_towers
from multimodal.weights.convert import convert
from multimodal.weights.parity import compare
from multimodal.weights.pretrained import Pretrained

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")
TEXTS = ["red", "a green dot", "blue sky over the old harbour " * 9, "", "grey, warm"]
TEXT = {"kind": "transformer", "vocab_size": 283, "context_length": 19, "width": 26, "depth": 2}


def make(text=None, image=None, **changes):
    """A model whose every part matters."""
    base = {"kind": "vit", "image_size": 14, "patch_size": 7, "width": 22, "depth": 2, "heads": 2}
    section = tiny_section(
        image=base | (image or {}), text=TEXT | {"heads": 2} | (text or {}), **changes
    )
    return with_weights(tiny_pretrained(section))


def with_weights(pretrained):
    randomised(pretrained.model)
    pretrained.model.eval()
    return pretrained


def tiny_yaml():
    """Rotary positions, SwiGLU, gates, registers and MAP pooling in both towers."""
    tree = read_yaml(ROOT / "configs" / "model" / "tiny.yaml")["model"]
    return with_weights(tiny_pretrained(config.Model.model_validate(tree)))


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """The modern pair, written once."""
    folder = tmp_path_factory.mktemp("onnx")
    pretrained = tiny_yaml()
    onnx_towers.write(pretrained, folder)
    return pretrained, folder


def run(folder, name, values):
    session = onnxruntime.InferenceSession(folder / "onnx" / f"{name}_model.onnx")
    return session.run(None, {session.get_inputs()[0].name: np.asarray(values)})[0]


def shown(folder, name):
    graph = onnx.load(folder / "onnx" / f"{name}_model.onnx").graph
    return [
        (value.name, [d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim])
        for value in (*graph.input, *graph.output)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 5])
def test_both_towers_agree_at_any_batch(exported, batch):
    pretrained, folder = exported
    pixels = torch.randn(batch, 3, 32, 32)
    tokens, lengths = pretrained.tokenizer.encode(TEXTS[:batch])
    with torch.no_grad():
        expected = pretrained.model(pixels, tokens, lengths)
    image, text = run(folder, "vision", pixels), run(folder, "text", tokens)
    assert np.abs(image - expected.image.numpy()).max() < 1e-5
    assert np.abs(text - expected.text.numpy()).max() < 1e-5
    assert np.allclose(np.linalg.norm(np.concatenate([image, text]), axis=1), 1, atol=1e-6)


@pytest.mark.slow
def test_the_end_of_a_text_is_found_whatever_pads_it(exported):
    pretrained, folder = exported
    tokenizer = pretrained.tokenizer
    tokens, lengths = tokenizer.encode(TEXTS)
    with torch.no_grad():
        expected = pretrained.model.encode_text(tokens, lengths).numpy()
    behind = torch.arange(tokens.shape[1]) >= lengths[:, None]
    for padding in (tokenizer.eos_id, tokenizer.pad_id, 0):
        padded = tokens.masked_fill(behind, padding)
        assert np.abs(run(folder, "text", padded) - expected).max() < 1e-5
    for row, length in enumerate(lengths.tolist()):
        alone = run(folder, "text", tokens[row : row + 1, :length])
        assert np.abs(alone - expected[row]).max() < 1e-5


@pytest.mark.slow
def test_a_text_without_an_end_goes_to_the_last_column(exported):
    pretrained, folder = exported
    tokens, lengths = torch.tensor([[5, 9, 7]]), torch.tensor([3])
    with torch.no_grad():
        expected = pretrained.model.encode_text(tokens, lengths).numpy()
    assert np.abs(run(folder, "text", tokens) - expected).max() < 1e-5


@pytest.mark.slow
def test_names_and_free_axes(exported):
    _, folder = exported
    assert shown(folder, "vision") == [
        ("pixel_values", ["batch", 3, 32, 32]),
        ("image_embeds", ["batch", 64]),
    ]
    assert shown(folder, "text") == [
        ("input_ids", ["batch", "sequence"]),
        ("text_embeds", ["batch", 64]),
    ]
    for name in ("vision", "text"):
        onnx.checker.check_model(folder / "onnx" / f"{name}_model.onnx")


@pytest.mark.slow
def test_a_graph_holds_its_own_tower_only(exported):
    pretrained, folder = exported
    parts = {"vision": "image", "text": "text"}
    for name, part in parts.items():
        modules = pretrained.model.modules_of(part)
        size = sum(p.numel() for module in modules for p in module.parameters())
        graph = onnx.load(folder / "onnx" / f"{name}_model.onnx").graph
        held = sum(int(np.prod(tensor.dims)) for tensor in graph.initializer if tensor.dims)
        assert 0.95 * size < held < 1.1 * size


@pytest.mark.slow
@pytest.mark.parametrize("name", ["clip", "siglip"])
def test_a_conversion_is_proven(name, tmp_path):
    kernel = {"kernel": "reference"}
    siglip = {
        "text": kernel | {"causal": False, "fixed_length": True, "pool": "last"},
        "image": kernel | {"pool": "map", "class_token": False, "pre_norm": False},
        "text_projection": "linear_bias",
    }
    pretrained = make(**siglip) if name == "siglip" else make()
    out = tmp_path / "out"
    report = convert(pretrained, out, "onnx").report
    features = [row.difference for row in report.rows if row.tolerance == 1e-5]
    assert len(features) > 8 and max(features) < 5e-6
    if name == "siglip":
        assert shown(out, "text")[0] == ("input_ids", ["batch", 19])
    names = {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()}
    assert names >= {
        "onnx/vision_model.onnx", "onnx/text_model.onnx", "tokenizer.json",
        "tokenizer_config.json", "preprocessor_config.json", "parity.json",
    }  # fmt: skip
    assert all(p.stat().st_mode & 0o777 == 0o644 for p in out.rglob("*") if p.is_file())


@pytest.mark.slow
def test_towers_of_other_libraries(tmp_path):
    from tiny_tokenizers import make_bert
    from transformers import BertConfig, BertModel

    folder = tmp_path / "bert"
    make_bert(folder)
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    BertModel(BertConfig(vocab_size=12, intermediate_size=40, **sizes)).save_pretrained(folder)
    section = tiny_section(
        image={"kind": "timm", "name": "vit_tiny_patch16_224", "image_size": 32},
        text={"kind": "hf", "name": str(folder), "context_length": 13, "pool": "mean"},
        tokenizer={"kind": "hf", "name": str(folder)},
    )
    pretrained = with_weights(tiny_pretrained(section))
    onnx_towers.write(pretrained, tmp_path)
    tokens, lengths = pretrained.tokenizer.encode(["a cat", "a", "cats cat a a a cat a a a a a"])
    pixels = torch.randn(3, 3, 32, 32)
    with torch.no_grad():
        expected = pretrained.model(pixels, tokens, lengths)
    assert np.abs(run(tmp_path, "vision", pixels) - expected.image.numpy()).max() < 1e-5
    assert np.abs(run(tmp_path, "text", tokens) - expected.text.numpy()).max() < 1e-5


@pytest.mark.slow
def test_eight_bits_stay_near_and_are_smaller(exported, tmp_path):
    pretrained, whole = exported
    report = convert(pretrained, tmp_path / "out", "onnx-int8").report
    differences = [row.difference for row in report.rows if row.tolerance == 0.2]
    assert len(differences) > 5 and max(differences) > 1e-3
    for tower in ("vision", "text"):
        small = (tmp_path / "out" / "onnx" / f"{tower}_model_int8.onnx").stat().st_size
        assert small < 0.75 * (whole / "onnx" / f"{tower}_model.onnx").stat().st_size


MUTATIONS = {
    "image epsilon": ("image", {"norm_eps": 1e-5}),
    "image pool": ("image", {"pool": "mean"}),
    "text mask": ("text", {"causal": True}),
    "text epsilon": ("text", {"norm_eps": 1e-5}),
    "rotary base": ("text", {"rope_theta": 100.0}),
    "text pool": ("text", {"pool": "mean"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_wrong_setting_is_noticed(exported, name):
    part, change = MUTATIONS[name]
    pretrained, folder = exported
    tower = getattr(pretrained.config, part).model_copy(update=change)
    wrong = build_model(pretrained.config.model_copy(update={part: tower}))
    state = {k: v for k, v in pretrained.model.state_dict().items() if k in wrong.state_dict()}
    wrong.load_state_dict(state)
    wrong.eval()
    other = Pretrained(wrong, pretrained.transform, pretrained.tokenizer, pretrained.config)
    failed = [row.what for row in compare(other, onnx_towers.reopen(folder)) if not row.passed]
    assert failed and all(part in what for what in failed)


@pytest.mark.slow
def test_a_wrong_activation_is_noticed(exported, monkeypatch):
    pretrained, folder = exported
    theirs = onnx_towers.reopen(folder)
    monkeypatch.setattr(torch.nn.functional, "silu", torch.nn.functional.gelu)
    failed = " ".join(row.what for row in compare(pretrained, theirs) if not row.passed)
    assert "image features" in failed and "text features" in failed


@pytest.mark.slow
def test_a_wrong_order_of_layers_is_noticed(exported):
    pretrained, folder = exported
    theirs = onnx_towers.reopen(folder)
    blocks = pretrained.model.image.encoder.blocks
    order = list(blocks)
    try:
        pretrained.model.image.encoder.blocks = torch.nn.ModuleList(reversed(order))
        assert any("image" in row.what for row in compare(pretrained, theirs) if not row.passed)
    finally:
        pretrained.model.image.encoder.blocks = torch.nn.ModuleList(order)
    assert all(row.passed for row in compare(pretrained, theirs))


@pytest.mark.slow
def test_a_wrong_normalisation_of_pixels_is_noticed(exported, tmp_path):
    pretrained, folder = exported
    path = folder / "preprocessor_config.json"
    right = path.read_text()
    try:
        path.write_text(json.dumps(json.loads(right) | {"image_std": [0.5, 0.5, 0.5]}))
        rows = compare(pretrained, onnx_towers.reopen(folder))
        assert any(row.what.startswith("pixels") and not row.passed for row in rows)
    finally:
        path.write_text(right)


def test_a_missing_package_is_told_in_one_sentence(monkeypatch, tmp_path):
    monkeypatch.setattr(onnx_towers, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"onnx, onnxscript not installed: .*multimodal\[onnx\]"):
        convert(make(), tmp_path / "out", "onnx")
    assert not list(tmp_path.iterdir())
    with pytest.raises(ImportError, match="onnxruntime not installed"):
        onnx_towers.reopen(tmp_path)


def test_weights_above_two_gigabytes_lie_beside_the_graph(monkeypatch, tmp_path):
    monkeypatch.setattr(onnx_towers, "_SINGLE_FILE", 100)
    given = {}
    monkeypatch.setattr(torch.onnx, "export", lambda *_, **options: given.update(options))
    onnx_towers.write(make(), tmp_path)
    assert given["external_data"] is True
    monkeypatch.undo()


def test_writing_leaves_modes_and_logging_as_they_were(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.onnx, "export", lambda *_, **options: None)
    pretrained = make()
    pretrained.model.train()
    onnx_towers.write(pretrained, tmp_path)
    assert all(module.training for module in pretrained.model.modules())
    assert logging.root.manager.disable == logging.NOTSET
