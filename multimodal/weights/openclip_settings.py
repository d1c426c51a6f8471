"""Settings of an OpenCLIP model (`model_cfg` of open_clip_config.json) as ours.

What OpenCLIP's keys mean is in its `CLIPVisionCfg` and `CLIPTextCfg` (open_clip/model.py) and
`PreprocessCfg` (open_clip/transform.py). Reading is strict: a key that is not known, or a value
that our towers cannot express exactly, is refused, and all of them are listed.

OpenCLIP runs every text at its full length and hides no padding, so a tower that is not causal
sees it. It cuts the hidden size of an MLP to a whole number, where ours is rounded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from multimodal import config
from multimodal.data.text import Tokenizer

Cfg = Mapping[str, Any]

MODEL, IMAGE, TEXT = "model_cfg", "vision_cfg", "text_cfg"
LOGIT_SCALE = 1 / 0.07
_SHOWN = 60
_PLAIN_BLOCK = {
    "block_type": (None, "default", "custom"),  # `custom` without its features is the same block
    "qk_norm": (False,),
    "scaled_cosine_attn": (False,),
    "scale_heads": (False,),
    "scale_attn_inner": (False,),
    "scale_attn": (False,),
    "scale_fc": (False,),
    "output_tokens": (False,),
}
_ALLOWED: dict[str, dict[str, tuple]] = {
    MODEL: {"multimodal_cfg": (None,)},
    IMAGE: _PLAIN_BLOCK
    | {
        "timm_model_name": (None, ""),
        "attentional_pool": (False,),
        "pos_embed_type": ("learnable", "sin_cos_2d"),  # the latter is a tensor of the file, too
        "pool_type": ("tok", "avg"),
    },
    TEXT: _PLAIN_BLOCK
    | {
        "hf_model_name": (None, ""),
        "embed_cls": (False,),
        "tokenizer_mode": (None, ""),
        "pool_type": ("argmax", "eos", "last"),
        "proj_type": ("linear", "none"),
    },
}
"""Values that are supported, of keys that have others."""
_READ = {
    MODEL: {
        *("embed_dim", "vision_cfg", "text_cfg", "quick_gelu", "custom_text"),
        *("init_logit_scale", "init_logit_bias", "nonscalar_logit_scale"),
    },
    IMAGE: {
        *("layers", "width", "head_width", "mlp_ratio", "patch_size", "image_size"),
        *("ls_init_value", "patch_dropout", "no_ln_pre", "final_ln_after_pool"),
        *("act_kwargs", "norm_kwargs"),
    },
    TEXT: {
        *("layers", "width", "heads", "mlp_ratio", "context_length", "vocab_size"),
        *("ls_init_value", "no_causal_mask", "proj_bias", "eos_id", "act_kwargs", "norm_kwargs"),
        *("hf_tokenizer_name", "tokenizer_kwargs"),
    },
}
_IDLE = {
    MODEL: set(),
    IMAGE: {
        *("attn_pooler_queries", "attn_pooler_heads", "timm_model_pretrained", "timm_pool"),
        *("timm_proj", "timm_proj_bias", "timm_drop", "timm_drop_path"),
    },
    TEXT: {
        *("pad_id", "final_ln_after_pool"),  # OpenCLIP's own text tower does not read them
        *("hf_model_pretrained", "hf_proj_type", "hf_pooler_type"),
    },
}
"""Keys without an effect on what is supported."""


def openclip_section(
    model_cfg: Cfg, *, tokenizer: config.TokenizerSection, preprocess: config.Preprocess
) -> config.Model:
    """Our settings for an OpenCLIP model whose two towers are its own.

    Raises:
        ValueError: listing all that is unknown or cannot be expressed.
    """
    refuse_mistakes(unsupported(model_cfg, MODEL) + _image_mistakes(model_cfg), model_cfg)
    cfg = model_cfg[IMAGE]
    width, quick = cfg.get("width", 768), model_cfg.get("quick_gelu", False)
    return config.Model(
        image=config.VitImage(
            kind="vit",
            image_size=_side(cfg.get("image_size", 224)),
            patch_size=_side(cfg.get("patch_size", 16)),
            pre_norm=not cfg.get("no_ln_pre", False),
            pool="mean" if cfg.get("pool_type") == "avg" else "cls",
            patch_dropout=cfg.get("patch_dropout", 0.0),
            heads=width // cfg.get("head_width", 64),
            **_encoder(cfg, width, quick=quick),
        ),
        embed_dim=model_cfg["embed_dim"],
        preprocess=preprocess,
        tokenizer=tokenizer,
        **text_settings(model_cfg),
        **temperature_settings(model_cfg),
    )


def text_settings(model_cfg: Cfg) -> dict[str, Any]:
    """`text` and `text_projection` of our settings, for a text tower of OpenCLIP's own."""
    cfg = model_cfg[TEXT]
    causal, last = not cfg.get("no_causal_mask", False), cfg.get("pool_type") == "last"
    text = config.TransformerText(
        kind="transformer",
        vocab_size=cfg.get("vocab_size", 49_408),
        context_length=cfg.get("context_length", 77),
        fixed_length=last or not causal,
        causal=causal,
        pool="last" if last else "eot",
        heads=cfg.get("heads", 8),
        **_encoder(cfg, cfg.get("width", 512), quick=model_cfg.get("quick_gelu", False)),
    )
    projection = "linear_bias" if cfg.get("proj_bias", False) else "linear"
    without = cfg.get("proj_type") == "none"
    return {"text": text, "text_projection": "none" if without else projection}


def temperature_settings(model_cfg: Cfg) -> dict[str, Any]:
    """`logit_scale` and `logit_bias` of our settings: what they were before training."""
    scale = model_cfg.get("init_logit_scale")
    factor = LOGIT_SCALE if scale is None else math.exp(scale)
    return {
        "logit_scale": min(max(factor, 1.0), 100.0),
        "logit_bias": model_cfg.get("init_logit_bias"),
    }


def refuse_mistakes(found: list[str], model_cfg: Cfg) -> None:
    """Refuse a model for what was found, and for what is wrong with its text tower.

    Raises:
        ValueError: listing all of it, if there is any.
    """
    text = model_cfg[TEXT]
    quick = model_cfg.get("quick_gelu", False)
    wrong = [*found, *unsupported(text, TEXT), *_kwargs(text, TEXT, quick=quick)]
    if wrong:
        raise ValueError(f"this OpenCLIP model cannot be expressed here: {'; '.join(wrong)}")


def check_pooling(model_cfg: Cfg, tokenizer: Tokenizer) -> None:
    """See that OpenCLIP finds a text's end where ours is: at the last token, the end token.

    Raises:
        ValueError: when it would pool at another token of texts by this tokenizer.
    """
    cfg = model_cfg[TEXT]
    pool, eos = cfg.get("pool_type", "argmax"), tokenizer.eos_id
    problem = None
    if pool == "argmax" and eos != tokenizer.vocab_size - 1:
        problem = f"the end token's id {eos} is not the largest of its {tokenizer.vocab_size} ids"
    if pool == "eos" and eos != (expected := cfg.get("eos_id", 2)):
        problem = f"the end token's id is {eos}, and not text_cfg.eos_id={expected}"
    if pool == "eos" and eos == tokenizer.bos_id:
        problem = f"its start token has the end token's id {eos}"
    if problem is not None:
        raise ValueError(f"text_cfg.pool_type={pool!r} does not fit the tokenizer: {problem}")


def _image_mistakes(model_cfg: Cfg) -> list[str]:
    cfg = model_cfg[IMAGE]
    wrong = unsupported(cfg, IMAGE) + _kwargs(cfg, IMAGE, quick=model_cfg.get("quick_gelu", False))
    if isinstance(cfg.get("layers"), list | tuple):
        wrong.append(f"{IMAGE}.layers={cfg['layers']}: the image tower is a ResNet")
    for name in ("image_size", "patch_size"):
        if isinstance(cfg.get(name), list | tuple) and len(set(cfg[name])) > 1:
            wrong.append(f"{IMAGE}.{name}={cfg[name]} is not square")
    if cfg.get("pool_type") == "avg" and cfg.get("final_ln_after_pool", False):
        wrong.append(f"{IMAGE}.final_ln_after_pool=True with pool_type='avg', as in CLIPA")
    return wrong


def unsupported(cfg: Cfg, part: str, *, skip: tuple[str, ...] = ()) -> list[str]:
    """What of a part is unknown or has a value that is not supported, but for the keys `skip`."""
    allowed = {name: values for name, values in _ALLOWED[part].items() if name not in skip}
    known = _ALLOWED[part].keys() | _READ[part] | _IDLE[part]
    wrong = [f"{part}.{name} is not known" for name in sorted(cfg.keys() - known)]
    for name in allowed.keys() & cfg.keys():
        if cfg[name] not in allowed[name]:
            value, needed = repr(cfg[name])[:_SHOWN], " or ".join(map(repr, allowed[name]))
            wrong.append(f"{part}.{name}={value} (needed {needed})")
    return sorted(wrong)


def _kwargs(cfg: Cfg, part: str, *, quick: bool) -> list[str]:
    """What of the arguments of activation and normalisation cannot be expressed."""
    act, norm = cfg.get("act_kwargs") or {}, cfg.get("norm_kwargs") or {}
    wrong = []
    if act not in ({}, {"approximate": "none"}, {"approximate": "tanh"}) or (act and quick):
        wrong.append(f"{part}.act_kwargs={act}{' with quick_gelu' if quick else ''}")
    if norm.keys() - {"eps"}:
        wrong.append(f"{part}.norm_kwargs={norm} (only eps is supported)")
    return wrong


def _encoder(cfg: Cfg, width: int, *, quick: bool) -> dict[str, Any]:
    tanh = (cfg.get("act_kwargs") or {}).get("approximate") == "tanh"
    return {
        "width": width,
        "depth": cfg.get("layers", 12),
        "mlp_ratio": int(width * cfg.get("mlp_ratio", 4.0)) / width,
        "activation": "quick_gelu" if quick else "gelu_tanh" if tanh else "gelu",
        "norm_eps": (cfg.get("norm_kwargs") or {}).get("eps", 1e-5),
        "layer_scale": cfg.get("ls_init_value"),
    }


def _side(size: int | list[int]) -> int:
    return size if isinstance(size, int) else size[0]
