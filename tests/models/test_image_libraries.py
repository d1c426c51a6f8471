"""Image towers with weights of timm (from files) and of transformers, against those libraries."""

import json

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from timm.layers import resample_abs_pos_embed
from tiny import tiny_pretrained, tiny_section
from transformers import (
    AutoModel,
    BertConfig,
    CLIPVisionConfig,
    ConvNextConfig,
    Dinov2Config,
    Dinov2WithRegistersConfig,
    DINOv3ViTConfig,
    SiglipVisionConfig,
    ViTConfig,
)

from multimodal import config
from multimodal.models.build import build_model
from multimodal.models.hf_image import HfImageTower
from multimodal.models.timm_image import TimmTower
from multimodal.weights.load import load
from multimodal.weights.save import save_model

SIZE = 28
VIT = {
    "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "image_size": SIZE,
    "patch_size": 7,
}  # fmt: skip
MLP = {"intermediate_size": 40}
MODELS = {
    "dinov2": (Dinov2Config(**VIT, mlp_ratio=2, layerscale_value=0.7), 1),
    "dinov2_registers": (Dinov2WithRegistersConfig(**VIT, mlp_ratio=2, num_register_tokens=3), 4),
    "dinov3": (DINOv3ViTConfig(**VIT, **MLP, num_register_tokens=2, layerscale_value=0.7), 3),
    "vit": (ViTConfig(**VIT, **MLP), 1),
    "clip": (CLIPVisionConfig(**VIT, **MLP), 1),
    "siglip": (SiglipVisionConfig(**VIT, **MLP), 0),
    "convnext": (ConvNextConfig(num_stages=3, hidden_sizes=[8, 12, 16], depths=[1, 1, 1]), None),
}
"""Each with the number of tokens before the patches."""
POOLS = {
    **{name: ("cls", "mean", "pooler") for name in MODELS},
    "clip": ("pooler",), "siglip": ("pooler",), "convnext": ("pooler",),
}  # fmt: skip
CASES = [(name, pool) for name in MODELS for pool in POOLS[name]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A saved random model of each kind, with weights large enough for every part to matter."""
    folder = tmp_path_factory.mktemp("hf")
    for name, (settings, _) in MODELS.items():
        torch.manual_seed(0)
        model = AutoModel.from_config(settings)
        for key, parameter in model.named_parameters():
            if parameter.ndim >= 2 and "token" not in key and "position" not in key:
                parameter.data.normal_(std=parameter[0].numel() ** -0.5)
            else:
                parameter.data += 0.3 * torch.randn_like(parameter)
        model.save_pretrained(folder / name)
    return folder


def section(name, **fields) -> config.HfImage:
    return config.HfImage(**({"kind": "hf", "name": str(name), "image_size": SIZE} | fields))


def pixels(size: int = SIZE) -> torch.Tensor:
    return torch.randn(2, 3, size, size)


# --- transformers --------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "pool"), CASES)
@torch.no_grad()
def test_features_are_those_of_transformers(folders, name, pool):
    theirs = AutoModel.from_pretrained(folders / name).eval()
    ours = HfImageTower(section(folders / name, pool=pool)).eval()
    x = pixels()
    output, prefix = theirs(pixel_values=x), MODELS[name][1]
    expected = {
        "cls": lambda: output.last_hidden_state[:, 0],
        "mean": lambda: output.last_hidden_state[:, prefix:].mean(1),
        "pooler": lambda: output.pooler_output,
    }[pool]()
    features = ours(x)
    assert features.shape == (2, ours.width)
    torch.testing.assert_close(features, expected, atol=1e-6, rtol=1e-5)


def test_the_pools_differ(folders):
    """Otherwise the test above would prove little; registers are no patches."""
    x = pixels()
    for name in ("dinov2", "dinov2_registers", "dinov3", "vit"):
        towers = [HfImageTower(section(folders / name, pool=pool)).eval() for pool in POOLS[name]]
        features = [tower(x) for tower in towers]
        assert (features[0] - features[1]).abs().max() > 1e-2
        if MODELS[name][1] > 1:
            with_registers = towers[1].model(pixel_values=x).last_hidden_state[:, 1:].mean(1)
            assert (features[1] - with_registers).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["dinov2", "dinov2_registers", "dinov3", "vit", "clip"])
@torch.no_grad()
def test_pictures_of_another_size_are_the_models_own_matter(folders, name):
    size = 42
    theirs = AutoModel.from_pretrained(folders / name).eval()
    own = {"interpolate_pos_encoding": True} if name in ("vit", "clip") else {}
    x = pixels(size)
    expected = theirs(pixel_values=x, **own).pooler_output
    tower = HfImageTower(section(folders / name, pool="pooler", image_size=size)).eval()
    torch.testing.assert_close(tower(x), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(("name", "pool"), CASES)
def test_all_weights_that_learn_get_a_gradient(folders, name, pool):
    tower = HfImageTower(section(folders / name, pool=pool))
    tower(pixels()).square().sum().backward()
    without = [n for n, p in tower.named_parameters() if p.requires_grad and p.grad is None]
    assert not without
    frozen = [n for n, p in tower.named_parameters() if not p.requires_grad]
    assert all(name.endswith("mask_token") for name in frozen)


def test_pretrained_decides_between_weights_and_architecture(folders):
    theirs = AutoModel.from_pretrained(folders / "dinov2").state_dict()
    taken = HfImageTower(section(folders / "dinov2")).model.state_dict()
    fresh = HfImageTower(section(folders / "dinov2", pretrained=False)).model.state_dict()
    assert all(torch.equal(taken[name], theirs[name]) for name in theirs)
    assert not torch.equal(fresh["embeddings.position_embeddings"], theirs["embeddings.cls_token"])


@pytest.mark.parametrize(("name", "pool"), CASES)
def test_a_model_folder_is_bit_equal_and_needs_no_other_file(folders, name, pool, tmp_path):
    source = folders / name
    of = tiny_section(image=section(source, pool=pool).model_dump())
    saved = tiny_pretrained(of)
    save_model(tmp_path, model=saved.model, section=of, tokenizer=saved.tokenizer)
    assert [path.name for path in (tmp_path / "image").iterdir()] == ["config.json"]
    hidden = source.rename(source.with_name("moved"))
    try:
        again = load(tmp_path)
    finally:
        hidden.rename(source)
    for key, tensor in saved.model.state_dict().items():
        assert torch.equal(again.model.state_dict()[key], tensor), key
    x = pixels()
    assert torch.equal(again.model.encode_image(x), saved.model.eval().encode_image(x))


def test_checkpointing_changes_no_gradient(folders):
    def gradients(mode):
        tower = HfImageTower(section(folders / "dinov2")).train()
        tower.checkpoint_activations(mode)
        torch.manual_seed(3)
        tower(pixels()).square().sum().backward()
        return [p.grad for p in tower.parameters() if p.grad is not None]

    for plain, again in zip(gradients("none"), gradients("full"), strict=True):
        assert torch.equal(plain, again)


def damaged(folders, tmp_path, change, name="dinov2"):
    """A copy of a saved model whose tensors were changed."""
    state = load_file(folders / name / "model.safetensors")
    change(state)
    text = (folders / name / "config.json").read_text()
    (tmp_path / "config.json").write_text(text)
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    return section(tmp_path)


def test_weights_that_do_not_fit_are_named(folders, tmp_path):
    weight = "encoder.layer.1.mlp.fc1.weight"
    more = "encoder.layer.2.mlp.fc1.weight"
    with pytest.raises(ValueError, match=f"missing {weight}"):
        HfImageTower(damaged(folders, tmp_path, lambda s: s.pop(weight)))
    with pytest.raises(ValueError, match=f"unexpected {more}"):
        HfImageTower(damaged(folders, tmp_path, lambda s: s.update({more: torch.zeros(2)})))
    with pytest.raises(ValueError, match=rf"{weight} (is \[2\] instead of \[48, 24\]|of another)"):
        HfImageTower(damaged(folders, tmp_path, lambda s: s.update({weight: torch.zeros(2)})))
    with pytest.raises(ValueError, match=r"missing embeddings.cls_token.* and \d+ more"):
        HfImageTower(
            damaged(folders, tmp_path, lambda s: (s.clear(), s.update({"a.b": torch.zeros(2)})))
        )


def test_a_head_of_the_file_is_left_out_and_a_pooler_it_lacks_matters_only_if_used(
    folders, tmp_path
):
    def change(state):
        state["classifier.weight"] = torch.zeros(5, 24)
        del state["pooler.dense.weight"], state["pooler.dense.bias"]

    HfImageTower(damaged(folders, tmp_path, change, "vit"))
    with pytest.raises(ValueError, match=r"missing pooler.dense.bias"):
        HfImageTower(section(tmp_path, pool="pooler"))


def test_mistakes_are_explained(folders, tmp_path):
    with pytest.raises(ValueError, match=r"model.image.name='no/such-model'.*`hf download no/such"):
        HfImageTower(section("no/such-model"))
    with pytest.raises(ValueError, match=r"pool=cls, but .*ConvNextModel\).*pool=pooler"):
        HfImageTower(section(folders / "convnext"))
    with pytest.raises(ValueError, match=r"pool=mean.*pools in layers of its own.*pool=pooler"):
        HfImageTower(section(folders / "siglip", pool="mean"))
    AutoModel.from_config(
        BertConfig(hidden_size=12, num_hidden_layers=1, num_attention_heads=2, vocab_size=9)
    ).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"BertModel, which takes no pictures"):
        HfImageTower(section(tmp_path))


# --- timm ----------------------------------------------------------------------------------------


def timm_section(name="test_vit", **fields) -> config.TimmImage:
    return config.TimmImage(**({"kind": "timm", "name": name, "image_size": 160} | fields))


def write(path, state):
    if path.suffix == ".safetensors":
        save_file(state, path)
    else:
        torch.save(state, path)
    return str(path)


@pytest.mark.parametrize("name", ["test_vit", "test_resnet", "test_convnext"])
@pytest.mark.parametrize("file", ["a.safetensors", "a.pth"])
@torch.no_grad()
def test_a_file_of_timm_weights_gives_timms_features(tmp_path, name, file):
    theirs = timm.create_model(name).eval()
    path = write(tmp_path / file, theirs.state_dict())
    ours = TimmTower(timm_section(name, pretrained=path)).eval()
    x = pixels(160)
    theirs.reset_classifier(0)
    assert torch.equal(ours(x), theirs(x))


def test_a_training_checkpoint_is_unwrapped(tmp_path):
    theirs = timm.create_model("test_vit")
    state = {f"module.{name}": tensor for name, tensor in theirs.state_dict().items()}
    path = write(tmp_path / "a.pth", {"epoch": 3, "state_dict": state})
    ours = TimmTower(timm_section(pretrained=path))
    assert torch.equal(ours.model.pos_embed, theirs.pos_embed)


def test_positions_are_resampled_as_timm_does_it(tmp_path):
    theirs = timm.create_model("test_vit")
    path = write(tmp_path / "a.safetensors", theirs.state_dict())
    ours = TimmTower(timm_section(pretrained=path, image_size=224)).model.pos_embed
    prefix = 0 if theirs.no_embed_class else theirs.num_prefix_tokens
    expected = resample_abs_pos_embed(theirs.pos_embed, [14, 14], num_prefix_tokens=prefix)
    assert ours.shape == (1, 14 * 14 + prefix, 64)
    assert torch.equal(ours, expected)


@pytest.mark.parametrize("name", ["test_vit", "test_resnet", "dla46_c"])
def test_timm_weights_that_do_not_fit_are_named(tmp_path, name):
    """Of DLA timm itself checks no name."""
    state = {n: torch.zeros(x.shape) for n, x in timm.create_model(name).state_dict().items()}
    lost = next(n for n in state if n.endswith("bias"))

    def refused(match, changed):
        path = write(tmp_path / "a.safetensors", changed)
        with pytest.raises(ValueError, match=match):
            TimmTower(timm_section(name, pretrained=path))

    refused(rf"(?i)missing.*{lost}", {n: x for n, x in state.items() if n != lost})
    refused("(?i)unexpected.*extra.weight", state | {"extra.weight": torch.zeros(2)})
    refused(rf"size mismatch for {lost}", state | {lost: torch.zeros(2)})
    refused("(?i)missing", {"a": torch.zeros(2)})


@pytest.mark.slow
def test_siglip_weights_fit_its_trunk_with_another_pool(tmp_path):
    size = {"image_size": 256}
    whole = timm.create_model("vit_base_patch32_siglip_256", num_classes=0)
    path = write(tmp_path / "a.safetensors", whole.state_dict())
    ours = TimmTower(timm_section("vit_base_patch32_siglip_gap_256", pretrained=path, **size))
    assert torch.equal(ours.model.blocks[11].mlp.fc2.weight, whole.blocks[11].mlp.fc2.weight)


def test_a_file_that_holds_code_is_refused(tmp_path):
    path = write(tmp_path / "a.pth", {"a": torch.nn.Linear(2, 2)})
    with pytest.raises(ValueError, match=r"a.pth has no weights .*(?i:weights.only)"):
        TimmTower(timm_section(pretrained=path))
    with pytest.raises(ValueError, match=r"there is no file '/nowhere.pth'"):
        TimmTower(timm_section(pretrained="/nowhere.pth"))


def timm_folder(folder, **args) -> timm.models.VisionTransformer:
    model = timm.create_model("test_vit", num_classes=7, **args)
    folder.mkdir()
    save_file(model.state_dict(), folder / "model.safetensors")
    description = {"architecture": "test_vit", "num_classes": 7, "model_args": args}
    description["pretrained_cfg"] = {"num_classes": 7, "input_size": [3, 160, 160]}
    (folder / "config.json").write_text(json.dumps(description))
    return model


def test_a_local_folder_of_timm_is_read_and_saved_with_its_architecture(tmp_path):
    theirs = timm_folder(tmp_path / "source", embed_dim=96, num_heads=3).eval()
    name = f"local-dir:{tmp_path / 'source'}"
    of = tiny_section(image=timm_section(name, pretrained=True).model_dump())
    saved = tiny_pretrained(of)
    x = pixels(160)
    theirs.reset_classifier(0)
    assert saved.model.image.width == 96
    assert torch.equal(saved.model.eval().image(x), theirs(x))
    save_model(tmp_path / "m", model=saved.model, section=of, tokenizer=saved.tokenizer)
    (tmp_path / "source").rename(tmp_path / "moved")
    again = load(tmp_path / "m")
    assert torch.equal(again.model.encode_image(x), saved.model.encode_image(x))


def test_a_model_of_timms_own_list_needs_no_architecture_file(tmp_path):
    of = tiny_section(image=timm_section().model_dump())
    saved = tiny_pretrained(of)
    save_model(tmp_path, model=saved.model, section=of, tokenizer=saved.tokenizer)
    assert not (tmp_path / "image").exists()
    assert load(tmp_path).config.image == of.image


def test_a_projection_may_have_a_bias():
    model = build_model(tiny_section(image_projection="linear_bias"))
    assert model.image_projection.bias.shape == (model.embed_dim,)
    assert not model.image_projection.bias.any()
