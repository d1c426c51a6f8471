"""Our settings as those of an OpenCLIP model: `model_cfg` and `preprocess_cfg`, or what is wrong.

The reverse is `openclip_settings`, by which the result is read again before it is given out. Patch
dropout stays behind: OpenCLIP makes its models in training mode, and not every reader calls `eval`.
"""

from __future__ import annotations

from typing import Any

from multimodal import config
from multimodal.data.text import Tokenizer
from multimodal.weights.openclip_settings import check_pooling, openclip_section
from multimodal.weights.require import misfits, refuse

_ENCODER = {
    "norm": ("layernorm",),
    "activation": ("quick_gelu", "gelu", "gelu_tanh"),
    "bias": (True,),
    "qk_norm": (False,),
    "gated_attention": (False,),
    "position": ("learned",),
    "rope": (False,),
}
_NEEDED = {
    "image": _ENCODER
    | {
        "kind": ("vit",),
        "patch_bias": (False,),
        "class_token": (True,),
        "registers": (0,),
        "pool": ("cls", "mean"),
    },
    "text": _ENCODER | {"kind": ("transformer",), "pool": ("eot", "last")},
    "": {"image_projection": ("linear",)},
}
_DEFAULT_EPS = 1e-5
_START_BIAS = -10.0
"""Of SigLIP, where ours depends on the batch size; the weights hold the value."""


def openclip_config(section: config.Model, tokenizer: Tokenizer) -> dict[str, Any]:
    """The `model_cfg` for our settings; nothing in it names a tokenizer.

    Raises:
        ValueError: when there is none; all settings at fault are listed.
    """
    refuse(misfits(section, _NEEDED) + _combinations(section), "an OpenCLIP model")
    image, text = section.image, section.text
    bias = _START_BIAS if section.logit_bias == "auto" else section.logit_bias
    model_cfg = {
        "embed_dim": section.embed_dim,
        **_if(image.activation == "quick_gelu", quick_gelu=True),
        **_if(bias is not None, init_logit_bias=bias),
        "vision_cfg": {
            "image_size": image.image_size,
            "patch_size": image.patch_size,
            "head_width": image.width // image.heads,
            **_encoder(image),
            **_if(not image.pre_norm, no_ln_pre=True),
            **_if(image.pool == "mean", pool_type="avg"),
        },
        "text_cfg": {
            "context_length": text.context_length,
            "vocab_size": text.vocab_size,
            "heads": text.heads,
            **_encoder(text),
            **_if(not text.causal, no_causal_mask=True),
            **_pool(text, tokenizer),
            **_if(section.text_projection == "linear_bias", proj_bias=True),
            **_if(section.text_projection == "none", proj_type="none"),
        },
    }
    check_pooling(model_cfg, tokenizer)
    again = openclip_section(model_cfg, tokenizer=section.tokenizer, preprocess=section.preprocess)
    lost = what_counts(again) != what_counts(section)
    assert not lost, f"settings are lost on the way: {section} became {again}"
    return model_cfg


def openclip_preprocess(section: config.Model) -> dict[str, Any]:
    """The `preprocess_cfg` for our settings."""
    preprocess = section.preprocess
    return {
        "size": section.image.image_size,
        "mean": preprocess.mean,
        "std": preprocess.std,
        "interpolation": preprocess.interpolation,
        "resize_mode": preprocess.resize_mode,
    }


def _combinations(section: config.Model) -> list[str]:
    """Settings that OpenCLIP has, but not together."""
    image, text, wrong = section.image, section.text, []
    if not (isinstance(image, config.VitImage) and isinstance(text, config.TransformerText)):
        return wrong
    quick = [tower.activation == "quick_gelu" for tower in (image, text)]
    if any(quick) and not all(quick):
        wrong.append(
            f"model.image.activation={image.activation!r} with model.text.activation="
            f"{text.activation!r} (quick_gelu is for both towers or none)"
        )
    if text.mask_padding and not (text.causal and text.pool == "eot"):
        wrong.append("model.text.mask_padding=True (its texts see their padding)")
    return wrong


def _encoder(section: config.Encoder) -> dict[str, Any]:
    """What both towers have."""
    return {
        "width": section.width,
        "layers": section.depth,
        **_if(section.mlp_ratio != 4.0, mlp_ratio=_ratio(section)),
        **_if(section.layer_scale is not None, ls_init_value=section.layer_scale),
        **_if(section.activation == "gelu_tanh", act_kwargs={"approximate": "tanh"}),
        **_if(section.norm_eps != _DEFAULT_EPS, norm_kwargs={"eps": section.norm_eps}),
    }


def _ratio(section: config.Encoder) -> float:
    """A ratio that, times the width and cut to a whole number, is the hidden size of the MLP."""
    hidden = round(section.width * section.mlp_ratio)
    exact = hidden / section.width
    return exact if int(section.width * exact) == hidden else (hidden + 0.25) / section.width


def _pool(text: config.TransformerText, tokenizer: Tokenizer) -> dict[str, Any]:
    if text.pool == "last":
        return {"pool_type": "last"}
    if tokenizer.eos_id == tokenizer.vocab_size - 1:
        return {}  # argmax, which versions below 3 know too
    return {"pool_type": "eos", "eos_id": tokenizer.eos_id}


def _if(condition: bool, **settings: Any) -> dict[str, Any]:
    return settings if condition else {}


def what_counts(section: config.Model) -> dict[str, Any]:
    """Settings of a model that OpenCLIP can hold, without those that change nothing in use."""
    content = section.model_dump(exclude={"logit_scale": True, "tokenizer": True})
    content["logit_bias"] = section.logit_bias is not None
    for part in ("image", "text"):
        tower = content[part]
        tower["hidden"] = round(tower["width"] * tower.pop("mlp_ratio"))
        tower["scaled"] = tower.pop("layer_scale") is not None
        idle = {"dropout", "drop_path", "kernel", "rope_theta", "mask_padding", "fixed_length"}
        idle |= {"patch_dropout"}
        content[part] = {name: value for name, value in tower.items() if name not in idle}
    return content
