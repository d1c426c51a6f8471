"""OpenCLIP's architectures with an image tower of timm, by name; what shapes tell is read there.

Three families are known here, the rest where OpenCLIP is installed, from its own files.

    ViT-B-16-SigLIP-256, ViT-B-16-SigLIP2, ViT-SO400M-16-SigLIP-i18n-256
    MobileCLIP-B, MobileCLIP-S1, MobileCLIP2-L-14
    PE-Core-B-16, PE-Core-L-14-336
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from multimodal import config
from multimodal.weights.openclip_names import text_config

_SIGLIP = re.compile(r"ViT-(B|L|SO400M|gopt)-(\d+)-SigLIP(2)?(-i18n)?(?:-(\d+))?")
_MOBILE = re.compile(r"MobileCLIP(2)?-(B|L-14|S(\d))")
_PE = re.compile(r"PE-Core-(T|S|B|L|bigG)-(\d+)(?:-(\d+))?")
_SIZES = {
    **{"T": "tiny", "S": "small", "B": "base", "L": "large", "bigG": "gigantic"},
    **{"SO400M": "so400m", "gopt": "giantopt"},
}
_SIGLIP_HEADS = {768: 12, 1024: 16, 1152: 16}
_SQUASHED = {"mean": [0.5] * 3, "std": [0.5] * 3, "resize_mode": "squash"}
_PLAIN = {"mean": [0.0] * 3, "std": [1.0] * 3, "interpolation": "bilinear"}
_OWN_STATISTICS = {
    "MobileCLIP2-S3": {"interpolation": "bilinear"},
    "MobileCLIP2-S4": {"interpolation": "bilinear"},
    "MobileCLIP2-L-14": {},
}
"""MobileCLIP's later models have CLIP's mean and deviation, the earlier ones none."""


class Known(NamedTuple):
    """What a name stands for.

    Attributes:
        model_cfg: OpenCLIP's settings.
        preprocess: ours, of the published weights.
    """

    model_cfg: dict[str, Any]
    preprocess: config.Preprocess


def timm_config(name: str, state: Mapping[str, Tensor]) -> Known | None:
    """What OpenCLIP's name of an architecture stands for; None for one that is not timm's.

    Raises:
        ValueError: when the weights are of another architecture.
    """
    if match := _SIGLIP.fullmatch(name):
        return _siglip(match, state)
    if match := _MOBILE.fullmatch(name):
        return _mobile(name, match, state)
    if match := _PE.fullmatch(name):
        return _pe(match, state)
    return _installed(name)


def _siglip(match: re.Match, state: Mapping[str, Tensor]) -> Known:
    size, patch, second, i18n, side = match.groups()
    side = int(side or 224)
    text = text_config(state, "text.")
    first = f"timm/ViT-B-16-SigLIP{'-i18n-256' if i18n else ''}"
    text |= {
        "heads": _SIGLIP_HEADS.get(text["width"], text["heads"]),
        "no_causal_mask": True,
        "pool_type": "last",
        "norm_kwargs": {"eps": 1e-6},
        "act_kwargs": {"approximate": "tanh"} if second else {},
        "hf_tokenizer_name": f"timm/{match[0]}" if second else first,
        "tokenizer_kwargs": {"clean": "canonicalize"},
    }
    trunk = f"vit_{_SIZES[size]}_patch{patch}_siglip_{side}"
    known = _config(trunk, side, "map", "none", text, state)
    return Known(known | {"init_logit_bias": -10.0}, config.Preprocess(**_SQUASHED))


def _mobile(name: str, match: re.Match, state: Mapping[str, Tensor]) -> Known:
    trunk = {"B": "vit_base_mci_224", "L-14": "vit_large_patch14_clip_224"}.get(match[2])
    text = text_config(state, "text.") | {"no_causal_mask": match[2] != "B"}
    if trunk is None:
        known = _config(f"fastvit_mci{match[3]}", 256, "avg", None, text, state)
    else:
        known = _config(trunk, 224, "token", None, text, state)
    return Known(known, config.Preprocess(**_OWN_STATISTICS.get(name, _PLAIN)))


def _pe(match: re.Match, state: Mapping[str, Tensor]) -> Known:
    size, patch, side = match.groups()
    side = int(side or 224)
    trunk = f"vit_pe_core_{_SIZES[size]}_patch{patch}_{side}"
    known = _config(trunk, side, "map", None, text_config(state, "text."), state)
    return Known(known, config.Preprocess(**_SQUASHED, interpolation="bilinear"))


def _config(
    trunk: str,
    side: int,
    pool: str,
    proj: str | None,
    text: dict[str, Any],
    state: Mapping[str, Tensor],
) -> dict[str, Any]:
    projected = {"text.text_projection": 1, "text.text_projection.weight": 0}
    embed_dim = next(
        (state[name].shape[axis] for name, axis in projected.items() if name in state),
        text["width"],
    )
    vision = {"timm_model_name": trunk, "timm_pool": pool, "timm_proj": proj, "image_size": side}
    return {"embed_dim": embed_dim, "vision_cfg": vision, "text_cfg": text}


def _installed(name: str) -> Known | None:
    """The settings that an installed OpenCLIP has; its published weights use CLIP's pixels."""
    spec = find_spec("open_clip")
    if spec is None or spec.origin is None or not re.fullmatch(r"[\w.-]+", name):
        return None
    path = Path(spec.origin).parent / "model_configs" / f"{name}.json"
    if not path.is_file():
        return None
    model_cfg = json.loads(path.read_text(encoding="utf-8"))
    if not model_cfg["vision_cfg"].get("timm_model_name"):
        return None
    return Known(model_cfg, config.Preprocess())
