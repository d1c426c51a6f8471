"""Weights for pictures of another size, against OpenCLIP's and timm's own resampling."""

from types import SimpleNamespace

import pytest
import timm
import torch
from timm.layers import resample_abs_pos_embed
from tiny import tiny_section

from multimodal import config
from multimodal.models.build import build_model
from multimodal.weights.resize import resize_positions

NAME = "image.position.weight"


def section(image_size: int, **fields) -> config.Model:
    image = tiny_section().image.model_dump() | {"image_size": image_size} | fields
    return tiny_section(image=image)


def state_of(of: config.Model, seed: int = 0) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return build_model(of).state_dict()


@pytest.mark.parametrize("size", [42, 28, 7])
def test_positions_are_those_of_open_clip(size):
    open_clip = pytest.importorskip("open_clip")
    old, new = section(35), section(size)
    state = state_of(old)
    theirs = {"visual.positional_embedding": state[NAME].clone()}
    grid = (size // 7, size // 7)
    open_clip.model.resize_pos_embed(
        theirs, SimpleNamespace(visual=SimpleNamespace(grid_size=grid))
    )
    resized = resize_positions(state, old=old, new=new)
    torch.testing.assert_close(
        resized[NAME], theirs["visual.positional_embedding"], atol=1e-7, rtol=1e-6
    )
    assert torch.equal(resized[NAME][0], state[NAME][0]), "the class token stays"
    build_model(new).load_state_dict(resized)
    assert all(resized[name] is state[name] for name in state if name != NAME)


def test_a_resized_model_sees_what_the_old_one_sees_in_a_picture_of_that_size():
    old, new = section(35), section(21)
    model = build_model(old).eval()
    resized = build_model(new).eval()
    resized.load_state_dict(resize_positions(model.state_dict(), old=old, new=new))
    pixels = torch.randn(2, 3, 21, 21)
    assert torch.equal(model.encode_image(pixels), resized.encode_image(pixels))


def test_a_tower_without_class_token_has_positions_for_patches_only():
    fields = {"class_token": False, "pool": "map", "pre_norm": False}
    old, new = section(35, **fields), section(14, **fields)
    state = state_of(old)
    expected = resample_abs_pos_embed(state[NAME][None], [2, 2], [5, 5], num_prefix_tokens=0)[0]
    resized = resize_positions(state, old=old, new=new)
    assert torch.equal(resized[NAME], expected)
    build_model(new).load_state_dict(resized)


@pytest.mark.parametrize("position", ["sinusoidal", "none"])
def test_positions_that_are_not_learned_need_nothing(position):
    fields = {"position": position, "rope": position == "none", "width": 24}
    old, new = section(35, **fields), section(14, **fields)
    state = state_of(old)
    resized = resize_positions(state, old=old, new=new)
    assert resized.keys() == state.keys()
    assert all(resized[name] is state[name] for name in state)


def test_the_same_size_changes_nothing_and_the_state_given_stays():
    old = section(35)
    state = state_of(old)
    same = resize_positions(state, old=old, new=old)
    assert same is not state
    assert all(same[name] is state[name] for name in state)
    before = state[NAME]
    resize_positions(state, old=old, new=section(14))
    assert state[NAME] is before


def timm_section(image_size: int, name: str = "test_vit") -> config.Model:
    return tiny_section(image={"kind": "timm", "name": name, "image_size": image_size})


@pytest.mark.parametrize("size", [64, 224])
def test_a_timm_vit_gets_what_timm_would_load_at_that_size(size):
    old, new = timm_section(160), timm_section(size)
    model = build_model(old)
    resized = resize_positions(model.state_dict(), old=old, new=new)
    theirs = timm.create_model(
        "test_vit", pretrained=True, num_classes=0, img_size=size,
        pretrained_cfg_overlay={"state_dict": model.image.model.state_dict(), "num_classes": 0},
    ).state_dict()  # fmt: skip
    assert theirs["pos_embed"].shape != model.image.model.pos_embed.shape
    for name, tensor in theirs.items():
        assert torch.equal(resized[f"image.model.{name}"], tensor), name
    build_model(new).load_state_dict(resized)


def test_a_timm_convnet_keeps_its_weights():
    old, new = timm_section(64, "test_resnet"), timm_section(96, "test_resnet")
    state = state_of(old)
    resized = resize_positions(state, old=old, new=new)
    assert all(resized[name] is state[name] for name in state)


def test_mistakes_are_explained():
    old = section(35)
    state = state_of(old)
    with pytest.raises(ValueError, match=r"kind=timm, but the weights are of kind=vit"):
        resize_positions(state, old=old, new=timm_section(64))
    wrong = old.model_copy(update={"image": old.image.model_copy(update={"image_size": 36})})
    with pytest.raises(ValueError, match=r"image_size=36 is not a multiple .*patch_size=7"):
        resize_positions(state, old=old, new=wrong)
