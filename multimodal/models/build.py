"""From a config section to a model with fresh weights.

The initial weights are those of CLIP (arXiv 2103.00020, in OpenAI's code `initialize_parameters`),
for both towers: W is a tower's width, D its depth, and each number a standard deviation.

    queries, keys, values, gate of attention   W^-1/2
    outputs of attention and MLP               W^-1/2 (2 D)^-1/2
    first Linears of the MLP                   (2 W)^-1/2
    class token, registers, image positions    W^-1/2
    token embedding, text positions            0.02, 0.01
    patch embedding, projections               fan-in^-1/2
    biases                                     0

Towers from timm and transformers keep what those libraries give them.
"""

from __future__ import annotations

from typing import assert_never

from torch import Tensor, nn

from multimodal import config
from multimodal.layers.attention import MultiHeadAttention
from multimodal.layers.mlp import Mlp, SwiGlu
from multimodal.layers.pool import LatentPool
from multimodal.models.encoder import EncoderStack
from multimodal.models.image import VitTower
from multimodal.models.text import TextTower
from multimodal.models.two_tower import TwoTower


def build_model(
    section: config.Model, *, image: nn.Module | None = None, text: nn.Module | None = None
) -> TwoTower:
    """Build a model. Weights are drawn from torch's global generator, so seed it first.

    A tower whose section says `pretrained` starts from its library's weights.

    Args:
        image: a tower to take in place of a new one.
        text: likewise.

    Raises:
        ValueError: when the parts do not fit, or a tower's library does not have it.
    """
    model = TwoTower(
        image or _image_tower(section.image), text or _text_tower(section.text), section
    )
    for projection in (model.image_projection, model.text_projection):
        if isinstance(projection, nn.Linear):
            _init_linear(projection, projection.in_features**-0.5)
    return model


def build_tower(section: config.ImageTower | config.TextTower) -> nn.Module:
    """Build one tower, as `build_model` does."""
    if isinstance(section, config.TransformerText | config.HfText):
        return _text_tower(section)
    return _image_tower(section)


def _image_tower(section: config.ImageTower) -> nn.Module:
    match section:
        case config.VitImage():
            tower = VitTower(section)
            _init_image(tower)
            return tower
        case config.TimmImage():
            # Imported here, as the tower of transformers below: both libraries take seconds.
            from multimodal.models.timm_image import TimmTower

            return TimmTower(section)
        case config.HfImage():
            from multimodal.models.hf_image import HfImageTower

            return HfImageTower(section)
        case _:
            assert_never(section)


def _text_tower(section: config.TextTower) -> nn.Module:
    match section:
        case config.TransformerText():
            tower = TextTower(section)
            _init_text(tower)
            return tower
        case config.HfText():
            from multimodal.models.hf_text import HfTextTower

            return HfTextTower(section)
        case _:
            assert_never(section)


def _init_image(tower: VitTower) -> None:
    _init_linear(tower.patch.proj, tower.patch.proj.in_features**-0.5)
    for tensor in (tower.class_token, tower.registers):
        if tensor is not None:
            _normal(tensor, tower.width**-0.5)
    if tower.position is not None:
        _normal(tower.position.weight, tower.width**-0.5)
    _init_encoder(tower.encoder, tower.pool)


def _init_text(tower: TextTower) -> None:
    _normal(tower.token_embedding.weight, 0.02)
    if tower.position is not None:
        _normal(tower.position.weight, 0.01)
    _init_encoder(tower.encoder, tower.pool)


def _init_encoder(encoder: EncoderStack, pool: LatentPool | None) -> None:
    # Each block adds two branches to the residual stream; this keeps its variance near 1.
    residual_scale = (2 * len(encoder.blocks)) ** -0.5
    for block in encoder.blocks:
        _init_attention(block.attn.inner, residual_scale)
        _init_mlp(block.mlp.inner, residual_scale)
    if pool is not None:
        _init_attention(pool.attention, 1.0)
        _init_mlp(pool.mlp, 1.0)


def _init_attention(attention: MultiHeadAttention, output_scale: float) -> None:
    std = attention.q_proj.in_features**-0.5
    for linear in (attention.q_proj, attention.k_proj, attention.v_proj, attention.gate):
        if linear is not None:
            _init_linear(linear, std)
    _init_linear(attention.out_proj, std * output_scale)


def _init_mlp(mlp: Mlp | SwiGlu, output_scale: float) -> None:
    match mlp:
        case Mlp():
            first, last = [mlp.fc1], mlp.fc2
        case SwiGlu():
            first, last = [mlp.gate, mlp.up], mlp.down
        case _:
            assert_never(mlp)
    width = last.out_features
    for linear in first:
        _init_linear(linear, (2 * width) ** -0.5)
    _init_linear(last, width**-0.5 * output_scale)


def _init_linear(linear: nn.Linear, std: float) -> None:
    _normal(linear.weight, std)
    if linear.bias is not None:
        nn.init.zeros_(linear.bias)


def _normal(tensor: Tensor, std: float) -> None:
    nn.init.normal_(tensor, std=std)
