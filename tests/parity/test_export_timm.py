"""Image towers written for timm, read back by timm."""

import json
from itertools import pairwise

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from test_transformers_clip import randomised
from tiny import picture, tiny_pretrained, tiny_section

from multimodal import config
from multimodal.weights import timm_folder
from multimodal.weights.convert import convert
from multimodal.weights.mapping import from_ours, to_ours
from multimodal.weights.parity import compare
from multimodal.weights.timm_vit import vit_arguments, vit_name, vit_table

BASE = {"kind": "vit", "image_size": 21, "patch_size": 7, "width": 26, "depth": 2, "heads": 2}
SIGLIP = {
    "class_token": False, "pre_norm": False, "patch_bias": True, "norm_eps": 1e-6,
}  # fmt: skip
TOWERS = {
    "clip": {},
    "quick gelu": {"activation": "quick_gelu"},
    "siglip": SIGLIP | {"pool": "map", "activation": "gelu_tanh"},
    "mean of the patches": {"pool": "mean"},
    "mean without class token": SIGLIP | {"pool": "mean"},
    "registers and scale": SIGLIP | {"pool": "map", "registers": 3, "layer_scale": 0.1},
    "rounded hidden size": SIGLIP | {"pool": "map", "mlp_ratio": 3.76},
}


def make(image=None, **changes):
    """A model whose every part matters."""
    section = tiny_section(image=BASE | (image or {}), **changes)
    pretrained = tiny_pretrained(section)
    randomised(pretrained.model)
    return pretrained


def failed(pretrained, folder):
    return [row.what for row in compare(pretrained, timm_folder.reopen(folder)) if not row.passed]


@pytest.mark.parametrize("name", TOWERS)
def test_timm_gives_the_same_features(name, tmp_path):
    pretrained = make(TOWERS[name])
    report = convert(pretrained, tmp_path / "out", "timm").report
    assert not report.failed and len(report.rows) > 5
    features = [row.difference for row in report.rows if row.tolerance == 1e-5]
    assert max(features) < 5e-6
    model = timm.create_model(f"local-dir:{tmp_path / 'out'}", pretrained=True)
    own = pretrained.model.image.state_dict()
    table = vit_table(pretrained.config.image, ours="")
    trunk = {k: v for k, v in model.state_dict().items() if not k.startswith("head.")}
    for key, tensor in to_ours(table, trunk, own).items():
        assert torch.equal(tensor, own[key]), key


def test_the_file_is_read_by_the_name_of_the_architecture_too(tmp_path):
    section = make().config
    section = section.model_copy(
        update={"image": section.image.model_copy(update={"image_size": 32, "patch_size": 32})}
    )
    pretrained = tiny_pretrained(section)
    timm_folder.write(pretrained, tmp_path)
    overlay = {"file": str(tmp_path / "model.safetensors"), "num_classes": section.embed_dim}
    model = timm.create_model(
        "vit_base_patch32_clip_224", pretrained=True, pretrained_cfg_overlay=overlay,
        num_classes=section.embed_dim, img_size=32, embed_dim=26, depth=2, num_heads=2,
    ).eval()  # fmt: skip
    pixels = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        expected = pretrained.model.image_projection(pretrained.model.eval().image(pixels))
        assert torch.allclose(model(pixels), expected, atol=1e-6)


@pytest.mark.parametrize("projection", ["linear", "none"])
def test_the_projection_is_the_classifier(projection, tmp_path):
    pretrained = make(embed_dim=26, image_projection=projection)
    timm_folder.write(pretrained, tmp_path)
    model = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    trunk = timm.create_model(f"local-dir:{tmp_path}", pretrained=True, num_classes=0).eval()
    pixels = torch.randn(2, 3, 21, 21)
    with torch.no_grad():
        tower = pretrained.model.eval().image(pixels)
        assert torch.allclose(trunk(pixels), tower, atol=1e-5)
        expected = pretrained.model.image_projection(tower)
        assert torch.allclose(model(pixels), expected, atol=1e-5)
    assert model.num_classes == (26 if projection == "linear" else 0)


@pytest.mark.parametrize("name", ["resnet10t", "convnext_atto", "vit_tiny_patch16_224"])
def test_a_tower_of_timm_goes_back_to_timm(name, tmp_path):
    image = {"kind": "timm", "name": name, "image_size": 32}
    pretrained = tiny_pretrained(tiny_section(image=image))
    report = convert(pretrained, tmp_path / "out", "timm").report
    assert not report.failed
    written = load_file(tmp_path / "out" / "model.safetensors")
    own = pretrained.model.image.model.state_dict()
    assert {k for k in own if torch.equal(written[k], own[k])} == set(own)


@pytest.mark.parametrize("mode", ["shortest", "squash"])
@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
def test_timms_own_transform_gives_our_pixels(mode, interpolation, tmp_path):
    statistics = {"mean": [0.1, 0.4, 0.5], "std": [0.5, 0.2, 0.3]}
    preprocess = statistics | {"interpolation": interpolation, "resize_mode": mode}
    pretrained = make(preprocess=preprocess)
    timm_folder.write(pretrained, tmp_path)
    pictures = [picture(i, size) for i, size in enumerate([(21, 21), (60, 45), (40, 52), (30, 9)])]
    rows = compare(pretrained, timm_folder.reopen(tmp_path), pictures)
    grey = [row.difference for row in rows if row.what.startswith("pixels")]
    assert grey and max(grey) < 0.3


MUTATIONS = {
    "activation": ("model_args", "act_layer", "quick_gelu"),
    "pool": ("model_args", "global_pool", "avg"),
    "heads": ("model_args", "num_heads", 13),
    "pre-norm": ("model_args", "pre_norm", False),
    "mean": ("pretrained_cfg", "mean", [0.5, 0.5, 0.5]),
    "crop": ("pretrained_cfg", "crop_pct", 0.8),
    "resize mode": ("pretrained_cfg", "crop_mode", "squash"),
    "epsilon": ("architecture", None, "vit_base_patch16_siglip_224"),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_wrong_setting_is_noticed(name, tmp_path):
    part, key, value = MUTATIONS[name]
    pretrained = make()
    # Tokens as small as this let the epsilon matter.
    pretrained.model.image.patch.proj.weight.data *= 1e-2
    pretrained.model.image.position.weight.data *= 1e-2
    pretrained.model.image.class_token.data *= 1e-2
    timm_folder.write(pretrained, tmp_path)
    assert not failed(pretrained, tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    if key is None:
        content[part] = value
    else:
        assert content[part][key] != value
        content[part][key] = value
    (tmp_path / "config.json").write_text(json.dumps(content))
    if name == "pre-norm":
        _forget_pre_norm(tmp_path)
    assert failed(pretrained, tmp_path)


def _forget_pre_norm(folder):
    state = load_file(folder / "model.safetensors")
    state = {k: v for k, v in state.items() if not k.startswith("norm_pre")}
    save_file(state | {"patch_embed.proj.bias": torch.zeros(26)}, folder / "model.safetensors")


@pytest.mark.parametrize("pair", list(pairwise(range(3))))
def test_a_wrong_order_of_layers_is_noticed(pair, tmp_path):
    pretrained = make({"depth": 3})
    timm_folder.write(pretrained, tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    a, b = (f"blocks.{i}." for i in pair)
    names = {a: b, b: a}
    swapped = {
        next((names[p] + k.removeprefix(p) for p in names if k.startswith(p)), k): v
        for k, v in state.items()
    }
    save_file(swapped, tmp_path / "model.safetensors")
    assert failed(pretrained, tmp_path)


def test_all_that_timm_does_not_have_is_listed(tmp_path):
    image = {"rope": True, "activation": "swiglu", "gated_attention": True, "qk_norm": True}
    pretrained = make(
        image | {"norm_eps": 1e-4, "norm": "rmsnorm", "width": 24, "patch_bias": True}
    )
    with pytest.raises(ValueError) as error:
        convert(pretrained, tmp_path / "out", "timm")
    for name in (*image, "norm_eps", "norm", "patch_bias"):
        assert f"model.image.{name}=" in str(error.value), name
    assert not list(tmp_path.iterdir())


def test_a_class_token_that_timm_would_not_pool_is_refused(tmp_path):
    with pytest.raises(ValueError, match="class_token=True with registers=2 and pool='cls'"):
        convert(make({"registers": 2}), tmp_path / "out", "timm")
    with pytest.raises(ValueError, match="class_token=True with registers=0 and pool='map'"):
        convert(make({"pool": "map"}), tmp_path / "out", "timm")


@pytest.mark.parametrize(
    ("expected", "image"),
    [
        ("vit_base_patch32_clip_224", {"patch_size": 32}),
        ("vit_base_patch16_clip_quickgelu_224", {"activation": "quick_gelu"}),
        ("vit_large_patch14_clip_336",
         {"patch_size": 14, "image_size": 336, "width": 1024, "depth": 24, "heads": 16}),
        ("vit_base_patch16_siglip_256", SIGLIP | {"pool": "map", "image_size": 256}),
        ("vit_base_patch16_siglip_gap_256", SIGLIP | {"pool": "mean", "image_size": 256}),
        ("vit_so400m_patch14_siglip_378",
         SIGLIP | {"pool": "map", "image_size": 378, "patch_size": 14, "width": 1152,
                   "depth": 27, "heads": 16, "mlp_ratio": 3.7362, "activation": "gelu_tanh"}),
    ],
)  # fmt: skip
def test_a_known_size_has_timms_name_and_its_shapes(expected, image):
    section = config.VitImage.model_validate({"kind": "vit"} | image)
    name = vit_name(section)
    assert name == expected
    one = {"num_classes": 0, "depth": 1}
    plain = timm.create_model(name, **one).state_dict()
    ours = timm.create_model(name, **vit_arguments(section) | one).state_dict()
    assert {k: v.shape for k, v in plain.items()} == {k: v.shape for k, v in ours.items()}


def test_files_can_be_read_by_all_and_need_no_pickle(tmp_path):
    convert(make(), tmp_path / "out", "timm")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"config.json", "model.safetensors", "parity.json"}
    assert all(path.stat().st_mode & 0o777 == 0o644 for path in (tmp_path / "out").iterdir())


def test_there_and_back_is_bit_equal():
    pretrained = make(TOWERS["registers and scale"])
    table = vit_table(pretrained.config.image, theirs="visual.trunk.", ours="")
    own = pretrained.model.image.state_dict()
    arguments = vit_arguments(pretrained.config.image)
    theirs = timm.create_model(vit_name(pretrained.config.image), num_classes=0, **arguments)
    like = {f"visual.trunk.{k}": v for k, v in theirs.state_dict().items()}
    back = to_ours(table, from_ours(table, own, like), own)
    assert all(torch.equal(back[k], own[k]) for k in own)
