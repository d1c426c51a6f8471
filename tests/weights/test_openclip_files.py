"""OpenCLIP models from files of every kind; what is wrong with one is told by name."""

import json
import re
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
from openclip_models import CFG, make, save, with_changes
from safetensors.torch import save_file
from tiny import picture
from tiny_tokenizers import make_bert, make_clip
from torch import nn
from typer.testing import CliRunner

from multimodal.cli import app
from multimodal.config.foreign import split_name
from multimodal.weights import openclip_names
from multimodal.weights.load import load
from multimodal.weights.openclip_names import infer_config
from multimodal.weights.state_files import read_state

OPENAI = with_changes(text={"vocab_size": 49_408, "hf_tokenizer_name": None})
NAME = "ViT-T-7"


@pytest.fixture(autouse=True)
def a_small_architecture(monkeypatch):
    """Gives the small models of these tests a name."""
    size = openclip_names._Size((33,), 11)
    monkeypatch.setitem(openclip_names._SIZES, "T", size)
    monkeypatch.setattr(openclip_names, "_TEXT_HEAD_WIDTH", 7)


@pytest.fixture(scope="module")
def theirs() -> nn.Module:
    torch.manual_seed(0)
    return make(OPENAI)


@pytest.fixture
def state(theirs):
    return {name: tensor.clone() for name, tensor in theirs.state_dict().items()}


def wrapped(state, prefix):
    return {f"{prefix}{name}": tensor for name, tensor in state.items()}


def trained(state):
    content = {"epoch": 3, "name": "run", "state_dict": state}
    return content | {"optimizer": {"state": {0: {"step": torch.tensor(1.0)}}}}


FILES = {
    "plain": lambda state: state,
    "checkpoint": trained,
    "wrapped by DDP": lambda state: trained(wrapped(state, "module.")),
    "compiled": lambda state: wrapped(state, "_orig_mod."),
    "compiled, then wrapped": lambda state: wrapped(state, "module._orig_mod."),
    "wrapped, then compiled": lambda state: wrapped(state, "_orig_mod.module."),
    "text under its own name": lambda state: {
        name if name.startswith(("visual", "logit")) else f"text.{name}": tensor
        for name, tensor in state.items()
    },
    "OpenAI's sizes, masks, a vector of 1": lambda state: (
        state
        | {"input_resolution": torch.tensor(21), "context_length": torch.tensor(13)}
        | {"vocab_size": torch.tensor(49_408), "attn_mask": torch.zeros(13, 13)}
        | {"logit_scale": state["logit_scale"].reshape(1)}
    ),
}


@torch.no_grad()
@pytest.mark.parametrize("kind", FILES)
def test_weights_are_read_from_every_kind_of_file(kind, theirs, state, tmp_path):
    torch.save(FILES[kind](state), tmp_path / "a:b.pt")
    ours = load(f"open_clip:{NAME}:{tmp_path}/a:b.pt")
    pixels = torch.randn(2, 3, 21, 21)
    expected = theirs.encode_image(pixels, normalize=True)
    assert (ours.model.encode_image(pixels) - expected).abs().max() < 1e-5
    assert ours.model.text.token_embedding.weight.equal(state["token_embedding.weight"])


@pytest.mark.parametrize("suffix", ["pt", "bin", "safetensors"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_becomes_float32(suffix, dtype, state, tmp_path):
    path = tmp_path / f"w.{suffix}"
    half = {name: tensor.to(dtype) for name, tensor in state.items()}
    save_file(half, path) if suffix == "safetensors" else torch.save(half, path)
    found = read_state(path)
    assert found.keys() == state.keys()
    assert {tensor.dtype for tensor in found.values()} == {torch.float32}
    assert all(found[name].equal(half[name].float()) for name in found)


def test_the_name_tells_the_activation_and_the_log_says_so(state, tmp_path, caplog):
    save_file(state, tmp_path / "w.safetensors")
    with caplog.at_level("INFO"):
        plain = load(f"open_clip:{NAME}:{tmp_path}/w.safetensors")
        quick = load(f"open_clip:{NAME}-quickgelu:{tmp_path}/w.safetensors")
    assert (plain.config.image.activation, quick.config.text.activation) == ("gelu", "quick_gelu")
    assert "activation GELU, by the name" in caplog.text
    assert "activation QuickGELU, by the name" in caplog.text
    assert plain.config.image.heads == 3 and plain.config.text.heads == 5


def test_a_name_of_the_hub_is_looked_up_in_the_cache_first(tmp_path, monkeypatch):
    save(make(CFG), CFG, tmp_path)
    asked = []

    def snapshot(name, local_files_only=False, allow_patterns=None):
        asked.append((name, local_files_only))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    load("open_clip:hf-hub:org/name")
    assert asked == [("org/name", True)]


def test_from_the_hub_only_one_file_of_weights_is_fetched(tmp_path, monkeypatch):
    save(make(CFG), CFG, tmp_path)
    files = ["open_clip_pytorch_model.bin", "open_clip_model.safetensors", "README.md"]
    asked = []

    def snapshot(name, local_files_only=False, allow_patterns=None):
        if local_files_only:
            raise FileNotFoundError("not in the cache")
        asked.extend(allow_patterns)
        return str(tmp_path)

    def info(name, timeout):
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=file) for file in files])

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    monkeypatch.setattr(huggingface_hub, "model_info", info)
    load("open_clip:hf-hub:org/name")
    assert "open_clip_model.safetensors" in asked and files[0] not in asked

    monkeypatch.setattr(huggingface_hub, "model_info", lambda name, timeout: 1 / 0)
    with pytest.raises(
        ValueError, match=r"hf-hub:org/name is neither in the cache nor .*\(division"
    ):
        load("open_clip:hf-hub:org/name")


# --- mistakes ------------------------------------------------------------------------------------


def lost(state):
    del state["visual.transformer.resblocks.1.attn.in_proj_bias"]
    return state


BROKEN = {
    r"missing: visual\.transformer\.resblocks\.1\.attn\.in_proj_bias\b": lost,
    r"not expected: visual\.extra": lambda state: state | {"visual.extra": torch.zeros(2)},
    r"visual\.ln_post\.bias has shape \[34\], needed \[33\]": lambda state: (
        state | {"visual.ln_post.bias": torch.zeros(34)}
    ),
    r"text_projection has shape \[19, 35\], needed \[35, 19\]": lambda state: (
        state | {"text_projection": torch.zeros(19, 35)}
    ),
    r"in_proj_weight has shape \[66, 33\], needed \[99, 33\]": lambda state: (
        state | {"visual.transformer.resblocks.0.attn.in_proj_weight": torch.zeros(66, 33)}
    ),
    r"w\.pt: .*visual\.conv1\.weight is missing\. Found a, b": lambda state: dict.fromkeys(
        "ab", torch.zeros(1)
    ),
    r"w\.pt: .*visual\.conv1\.weight is missing\. Found nothing": lambda state: {},
    r"w\.pt: .*they have width 34 instead of 33": lambda state: (
        state | {"visual.conv1.weight": torch.zeros(34, 3, 7, 7)}
    ),
    r"patches of 5 instead of 7 pixels": lambda state: (
        state | {"visual.conv1.weight": torch.zeros(33, 3, 5, 5)}
    ),
}


@pytest.mark.parametrize("message", BROKEN)
def test_weights_that_do_not_fit_are_refused_by_name(message, state, tmp_path):
    torch.save(BROKEN[message](state), tmp_path / "w.pt")
    with pytest.raises(ValueError, match=message):
        load(f"open_clip:{NAME}:{tmp_path}/w.pt")


@pytest.mark.parametrize(
    "name", ["ViT-X-14", "RN50", "ViT-B-32-fast", "vit-b-32", "ViT-S-32-worldwide", "", "ViT-B"]
)
def test_an_unknown_architecture_is_refused_with_those_that_are_known(name, state):
    with pytest.raises(ValueError, match=r"not an architecture .*S, M, B, L.*open_clip_config"):
        infer_config(name, state)


def test_the_picture_size_in_a_name_must_be_that_of_the_weights(state):
    assert infer_config(f"{NAME}-21", state)["vision_cfg"]["image_size"] == 21
    with pytest.raises(ValueError, match="pictures of 21 instead of 28 pixels"):
        infer_config(f"{NAME}-28", state)


@pytest.mark.filterwarnings("ignore")  # TorchScript is deprecated
def test_files_that_are_no_weights_are_refused(tmp_path):
    (tmp_path / "text.pt").write_text("not a file of torch")
    (tmp_path / "text.safetensors").write_text("not one of safetensors")
    torch.save({"a": 1}, tmp_path / "number.pt")
    torch.save([torch.zeros(1)], tmp_path / "list.pt")
    torch.save(nn.Linear(2, 2), tmp_path / "code.pt")
    torch.jit.save(torch.jit.script(nn.Linear(2, 2)), tmp_path / "script.pt")
    expected = {
        "text.pt": "no file of torch.save, or damaged|cannot be read without running code",
        "text.safetensors": "is damaged",
        "number.pt": "holds a dict with a; needed are tensors by name",
        "list.pt": "holds a list",
        "code.pt": "cannot be read without running code that is in it",
        "script.pt": r"TorchScript archive.*not run here.*torch\.jit\.load.*torch\.save",
        "nothing.pt": "no file of weights",
    }
    for name, message in expected.items():
        with pytest.raises(ValueError, match=re.compile(message, re.DOTALL)):
            load(f"open_clip:ViT-B-32:{tmp_path / name}")


@pytest.mark.filterwarnings("ignore")
def test_the_advice_for_torchscript_works(theirs, tmp_path, state):
    """What the message says to run gives a file that loads."""
    pixels, tokens = torch.zeros(1, 3, 21, 21), torch.zeros(1, 13, dtype=torch.long)
    torch.jit.save(torch.jit.trace(theirs, (pixels, tokens)), tmp_path / "w.pt")
    with pytest.raises(ValueError, match="TorchScript") as error:
        load(f"open_clip:{NAME}:{tmp_path}/w.pt")
    exec(re.search(r'python -c "(.*)"', str(error.value))[1])
    ours = load(f"open_clip:{NAME}:{tmp_path}/w-weights.pt")
    assert ours.model.text.token_embedding.weight.equal(state["token_embedding.weight"])


def test_a_folder_that_is_not_complete_is_refused(tmp_path):
    name = save(make(CFG), CFG, tmp_path)
    config = tmp_path / "open_clip_config.json"
    (tmp_path / "open_clip_model.safetensors").rename(tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match=r"has no weights; needed is one of open_clip_model"):
        load(name)
    for content in ("{", "[]", "{}", '{"model_cfg": {"vision_cfg": 3, "text_cfg": {}}}'):
        config.write_text(content)
        with pytest.raises(ValueError, match="not a description of an OpenCLIP model"):
            load(name)
    config.unlink()
    with pytest.raises(ValueError, match=r"has no open_clip_config\.json.*ARCHITECTURE:FILE"):
        load(name)


def test_a_folder_with_a_pickled_file_is_read(tmp_path, state):
    name = save(make(CFG), CFG, tmp_path)
    expected = load(name).model.state_dict()
    tensors = read_state(tmp_path / "open_clip_model.safetensors")
    (tmp_path / "open_clip_model.safetensors").unlink()
    torch.save(tensors, tmp_path / "open_clip_pytorch_model.bin")
    found = load(name).model.state_dict()
    assert all(found[key].equal(tensor) for key, tensor in expected.items())


def test_the_bias_is_the_one_of_the_weights(tmp_path):
    """OpenCLIP takes 0 for one that only the settings have; ours then has none."""
    name = save(make(CFG), CFG | {"init_logit_bias": -10}, tmp_path / "a")
    assert load(name).logit_bias() is None
    with_bias = make(CFG | {"init_logit_bias": -7.0})
    assert load(save(with_bias, CFG, tmp_path / "b")).logit_bias() == -7.0


UNSUPPORTED = {
    "vision_cfg.layers=[3, 4, 6, 3]: the image tower is a ResNet": {
        "image": {"layers": [3, 4, 6, 3]}
    },
    "vision_cfg.timm_model_name='gone'": {"image": {"timm_model_name": "gone"}},
    "vision_cfg.attentional_pool=True": {"image": {"attentional_pool": True}},
    "vision_cfg.image_size=[21, 28] is not square": {"image": {"image_size": [21, 28]}},
    "vision_cfg.final_ln_after_pool=True": {
        "image": {"pool_type": "avg", "final_ln_after_pool": True}
    },
    "text_cfg.hf_model_name='roberta-base'": {"text": {"hf_model_name": "roberta-base"}},
    "text_cfg.pool_type='first'": {"text": {"pool_type": "first"}},
    "text_cfg.embed_cls=True": {"text": {"embed_cls": True}},
    "text_cfg.qk_norm=True": {"text": {"qk_norm": True}},
    "text_cfg.scale_fc=True": {"text": {"scale_fc": True}},
    "text_cfg.norm_kwargs={'bias': False}": {"text": {"norm_kwargs": {"bias": False}}},
    "text_cfg.act_kwargs={'approximate': 'tanh'} with quick_gelu": {
        "text": {"act_kwargs": {"approximate": "tanh"}},
        "quick_gelu": True,
    },
    "text_cfg.new_thing is not known": {"text": {"new_thing": 1}},
    "model_cfg.multimodal_cfg={}": {"multimodal_cfg": {}},
    "model_cfg.other is not known": {"other": None},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "open_clip"
    save(make(CFG), CFG, path)
    return path


@pytest.mark.parametrize("message", UNSUPPORTED)
def test_settings_that_cannot_be_expressed_are_refused(message, folder):
    write(folder, with_changes(**UNSUPPORTED[message]))
    with pytest.raises(ValueError, match=re.escape(message)):
        load(f"open_clip:{folder}")


def test_all_that_cannot_be_expressed_is_listed(folder):
    write(folder, with_changes(image={"attentional_pool": True, "x": 1}, text={"y": 2}, z=3))
    with pytest.raises(ValueError) as error:
        load(f"open_clip:{folder}")
    for part in ("attentional_pool=True", "vision_cfg.x", "text_cfg.y", "model_cfg.z"):
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ({"pool_type": "eos", "eos_id": 2}, r"end token's id is 515, and not text_cfg\.eos_id=2"),
        ({"tokenizer_kwargs": {"strip_sep_token": True}}, "only clean is"),
        ({"tokenizer_kwargs": {"clean": "lower", "language": "de"}}, "only clean is"),
        ({"tokenizer_mode": "clips"}, "tokenizer_mode='clips'"),
        ({"hf_tokenizer_name": None}, "49408 ids"),
    ],
)
def test_a_tokenizer_that_does_not_fit_is_refused(text, message, folder):
    write(folder, with_changes(text=text))
    with pytest.raises(ValueError, match=message):
        load(f"open_clip:{folder}")


def test_texts_must_not_be_pooled_at_a_larger_id_than_the_end_token_s(folder):
    """OpenCLIP would take the feature of whatever word has the largest id."""
    write(folder, with_changes())
    make_bert(folder)
    with pytest.raises(ValueError, match=r"'argmax' .* id 3 is not the largest of its 12 ids"):
        load(f"open_clip:{folder}")
    write(folder, with_changes(text={"pool_type": "eos", "eos_id": 3}))
    assert load(f"open_clip:{folder}").config.text.pool == "eot"
    make_clip(folder)


@pytest.mark.parametrize(
    ("preprocess", "message"),
    [
        ({"resize_mode": "longest"}, "resize_mode"),
        ({"interpolation": "random"}, "interpolation"),
        ({"mode": "L"}, "not RGB"),
        ({"mean": 0.5}, "mean"),
    ],
)
def test_preprocessing_that_is_not_ours_is_refused(preprocess, message, folder):
    write(folder, CFG, preprocess)
    with pytest.raises(ValueError, match=message):
        load(f"open_clip:{folder}")


def write(folder, cfg, preprocess=None):
    content = {"model_cfg": cfg, "preprocess_cfg": preprocess or {}}
    (folder / "open_clip_config.json").write_text(json.dumps(content))


# --- the command line ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["open_clip:{folder}", "open_clip:ViT-T-7:{folder}/w.safetensors"])
def test_classify(name, tmp_path, theirs, state):
    save(theirs, OPENAI, tmp_path / "model")
    save_file(state, tmp_path / "model" / "w.safetensors")
    picture(3).save(tmp_path / "a.png")
    model = name.format(folder=tmp_path / "model")
    arguments = ["classify", model, str(tmp_path / "a.png"), "--labels", "red,green", "--json"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert sorted(json.loads(result.stdout)[0]["labels"]) == ["green", "red"]


def test_names_are_taken_apart_at_the_first_colon():
    assert split_name("open_clip:ViT-B-32:/a:b/c.pt") == ("open_clip", "ViT-B-32:/a:b/c.pt")
    assert split_name("hf:a/b") == ("hf", "a/b")
    for path in ("runs/a", "open_clip", "C:/models/x", "hfx:a", "./open_clip:x"):
        assert split_name(path) == (None, path)
