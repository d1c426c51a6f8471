"""OpenCLIP's architectures by name: settings from a file's shapes, and from its name the rest.

    ViT-B-16-plus-240-quickgelu
        |  |  |    |      activation: QuickGELU; without it GELU
        |  |  |    picture size, if another than the first one of its kind
        |  |  variant
        |  patch size
        size: width of the image tower, and of its heads

Shapes tell all sizes but those of the heads, and nothing of activation, pooling, tokenizer and
preprocessing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Size, Tensor

from multimodal.weights.openclip import text_prefix

_NAME = re.compile(r"ViT-([A-Za-z]+)-(\d+)((?:-[A-Za-z]+)*?)(?:-(\d+))?(-quickgelu)?")
_TEXT_HEAD_WIDTH = 64
_LAYER_SCALE = 1e-4
"""Initial value in the one architecture that has it, ViT-M-16-alt."""
_XLM_V = {"hf_tokenizer_name": "facebook/xlm-v-base", "pool_type": "eos", "eos_id": 2}
_MT5 = {
    "hf_tokenizer_name": "google/mt5-base",
    "pool_type": "eos",
    "eos_id": 1,
    "tokenizer_kwargs": {"clean": "canonicalize"},
}


class _Size(NamedTuple):
    widths: tuple[int, ...]
    head_width: int = 64


_SIZES = {
    "S": _Size((384,)),
    "M": _Size((512,)),
    "B": _Size((768, 896)),
    "L": _Size((1024,)),
    "H": _Size((1280,), 80),
    "g": _Size((1408,), 88),
    "bigG": _Size((1664,), 104),
    "e": _Size((1792,), 112),
}
_WORLDWIDE = {"L": _MT5, "H": _XLM_V, "bigG": _XLM_V}
_VARIANTS = ("", "-plus", "-alt", "-worldwide")


def infer_config(name: str, state: Mapping[str, Tensor]) -> dict[str, Any]:
    """The `model_cfg` of weights in the native layout.

    Args:
        name: OpenCLIP's name of the architecture.
        state: the weights, of which the shapes are read.

    Raises:
        ValueError: when the name is not known, or the weights are of another architecture.
    """
    found = _NAME.fullmatch(name)
    size = _SIZES.get(found[1]) if found else None
    worldwide = found is not None and found[3] == "-worldwide"
    known = size is not None and found[3] in _VARIANTS
    if not known or (worldwide and found[1] not in _WORLDWIDE):
        raise ValueError(
            f"{name!r} is not an architecture that is known by name; these are ViT-SIZE-PATCH with "
            f"a SIZE of {', '.join(_SIZES)}, and -plus, -alt, -worldwide, the picture's size and "
            "-quickgelu behind it as OpenCLIP has them. For others give a folder with "
            "open_clip_config.json beside the weights"
        )
    shapes = _Shapes(state)
    vision = _vision(shapes) | {"head_width": size.head_width}
    _check(name, vision, widths=size.widths, patch=int(found[2]), side=found[4])
    text = text_config(state, text_prefix(state))
    if worldwide:
        text |= _WORLDWIDE[found[1]]
    model_cfg = {
        "embed_dim": shapes["visual.proj"][1],
        "quick_gelu": found[5] is not None,
        "vision_cfg": vision,
        "text_cfg": text,
    }
    return model_cfg | ({"init_logit_bias": -10.0} if "logit_bias" in state else {})


class _Shapes:
    """Shapes by name; a name that is missing is told."""

    def __init__(self, state: Mapping[str, Tensor]):
        self.state = state

    def __getitem__(self, name: str) -> Size:
        if name not in self.state:
            some = ", ".join(sorted(self.state)[:5]) or "nothing"
            raise ValueError(
                f"the weights are not those of such a model of OpenCLIP: {name} is missing. "
                f"Found {some}"
            )
        return self.state[name].shape

    def count(self, prefix: str) -> int:
        """Blocks below a name."""
        found = (re.match(rf"{re.escape(prefix)}\.(\d+)\.", name) for name in self.state)
        return len({match[1] for match in found if match})

    def has(self, name: str) -> bool:
        return name in self.state


def _vision(shapes: _Shapes) -> dict[str, Any]:
    width, _, patch, _ = shapes["visual.conv1.weight"]
    side = round((shapes["visual.positional_embedding"][0] - 1) ** 0.5)
    return {
        "width": width,
        "patch_size": patch,
        "image_size": side * patch,
        **({} if shapes.has("visual.ln_pre.weight") else {"no_ln_pre": True}),
        **_blocks(shapes, "visual.transformer.resblocks", width),
    }


def text_config(state: Mapping[str, Tensor], prefix: str) -> dict[str, Any]:
    """Settings of a text tower of OpenCLIP's own, as far as shapes tell them.

    Raises:
        ValueError: when it is something else.
    """
    shapes = _Shapes(state)
    vocab, width = shapes[f"{prefix}token_embedding.weight"]
    bias = shapes.has(f"{prefix}text_projection.bias")
    without = not bias and not shapes.has(f"{prefix}text_projection")
    return {
        "vocab_size": vocab,
        "context_length": shapes[f"{prefix}positional_embedding"][0],
        "width": width,
        "heads": width // _TEXT_HEAD_WIDTH,
        **({"proj_bias": True} if bias else {}),
        **({"proj_type": "none"} if without else {}),
        **_blocks(shapes, f"{prefix}transformer.resblocks", width),
    }


def _blocks(shapes: _Shapes, prefix: str, width: int) -> dict[str, Any]:
    scaled = shapes.has(f"{prefix}.0.ls_1.gamma")
    return {
        "layers": shapes.count(prefix),
        "mlp_ratio": shapes[f"{prefix}.0.mlp.c_fc.weight"][0] / width,
        **({"ls_init_value": _LAYER_SCALE} if scaled else {}),
    }


def _check(
    name: str, vision: dict[str, Any], *, widths: tuple[int, ...], patch: int, side: str | None
) -> None:
    wrong = []
    if vision["width"] not in widths:
        wrong.append(f"width {vision['width']} instead of {' or '.join(map(str, widths))}")
    if vision["patch_size"] != patch:
        wrong.append(f"patches of {vision['patch_size']} instead of {patch} pixels")
    if side is not None and vision["image_size"] != int(side):
        wrong.append(f"pictures of {vision['image_size']} instead of {side} pixels")
    if wrong:
        raise ValueError(
            f"the weights are not those of {name}: they have {', '.join(wrong)}; give the name of "
            "the architecture that they were trained with"
        )
