"""OpenCLIP models whose image tower is timm's: settings and names of weights.

SigLIP's trunk is our own Vision Transformer with attention pooling, and becomes one. Any other
stays timm's; its projection is timm's own classifier (`timm_proj` empty), OpenCLIP's Linear
(`linear`), or there is none (`none`).

What the keys mean is in open_clip/timm_model.py. OpenCLIP builds a trunk at timm's own size and
with timm's activation, whatever `quick_gelu` and `act_kwargs` say for the text.
"""

from __future__ import annotations

from functools import cache

import timm
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from multimodal import config
from multimodal.models.timm_weights import without_values
from multimodal.weights.mapping import Entry, Table, affine, same
from multimodal.weights.openclip import temperature, text_entries
from multimodal.weights.openclip_settings import (
    IMAGE,
    MODEL,
    Cfg,
    refuse_mistakes,
    temperature_settings,
    text_settings,
    unsupported,
)
from multimodal.weights.timm_vit import vit_table

_OWN_POOLS = ("abs_attn", "rot_attn")
_NATIVE = ("timm_model_name", "attentional_pool", "pos_embed_type", "pool_type")
"""Keys that OpenCLIP reads for towers of its own, but for the first."""
_HEAD = "visual.head.proj"


def is_timm(model_cfg: Cfg) -> bool:
    """Whether an OpenCLIP model's image tower is timm's."""
    return bool(model_cfg[IMAGE].get("timm_model_name"))


def timm_section(
    model_cfg: Cfg, *, tokenizer: config.TokenizerSection, preprocess: config.Preprocess
) -> config.Model:
    """Our settings for an OpenCLIP model with an image tower of timm.

    Raises:
        ValueError: listing all that is unknown or cannot be expressed.
    """
    cfg = model_cfg[IMAGE]
    refuse_mistakes(
        [*unsupported(model_cfg, MODEL), *unsupported(cfg, IMAGE, skip=_NATIVE), *_mistakes(cfg)],
        model_cfg,
    )
    return config.Model(
        image=_image(cfg),
        embed_dim=model_cfg["embed_dim"],
        image_projection=_projection(cfg, model_cfg["embed_dim"]),
        preprocess=preprocess,
        tokenizer=tokenizer,
        **text_settings(model_cfg),
        **temperature_settings(model_cfg),
    )


def timm_table(section: config.Model, *, projection: str, text: str = "text.") -> Table:
    """Names of an OpenCLIP model with an image tower of timm, and ours.

    Args:
        section: an image tower of timm, or SigLIP's.
        projection: see `projection_name`.
        text: what stands before the names of the text tower.
    """
    image = section.image
    if isinstance(image, config.VitImage):
        entries = list(vit_table(image, theirs="visual.trunk.", ours="image."))
    else:
        entries = _trunk_entries(image)
    match section.image_projection:
        case "linear":
            entries.append(same(f"{projection}.weight", "image_projection.weight"))
        case "linear_bias":
            entries += affine(projection, "image_projection")
    return (*temperature(section), *entries, *text_entries(section, text))


def projection_name(model_cfg: Cfg) -> str:
    """OpenCLIP's name of the image projection: its own Linear, or the trunk's classifier."""
    cfg = model_cfg[IMAGE]
    if cfg.get("timm_proj", "linear") == "linear":
        return _HEAD
    trunk = _trunk(cfg["timm_model_name"], num_classes=model_cfg["embed_dim"])
    return f"visual.trunk.{_classifier(trunk)}"


# --- settings ------------------------------------------------------------------------------------


def _mistakes(cfg: Cfg) -> list[str]:
    name, pool = cfg["timm_model_name"], cfg.get("timm_pool", "avg")
    if not timm.is_model(name):
        return [f"{IMAGE}.timm_model_name={name!r} is not known to timm {timm.__version__}"]
    wrong = []
    if pool in _OWN_POOLS:
        wrong.append(f"{IMAGE}.timm_pool={pool!r} is a pool of OpenCLIP's own")
    elif pool and pool != (found := _pool(_trunk(name))):
        wrong.append(f"{IMAGE}.timm_pool={pool!r}, but here {name!r} has its own, {found!r}")
    if cfg.get("timm_proj", "linear") not in ("linear", "none", "", None):
        wrong.append(f"{IMAGE}.timm_proj={cfg['timm_proj']!r} (needed 'linear', 'none' or null)")
    side = cfg.get("image_size", 224)
    if isinstance(side, list | tuple) and len(set(side)) > 1:
        wrong.append(f"{IMAGE}.image_size={side} is not square")
    return wrong


def _image(cfg: Cfg) -> config.VitImage | config.TimmImage:
    side = cfg.get("image_size", 224)
    side = side if isinstance(side, int) else side[0]
    trunk = _trunk(cfg["timm_model_name"])
    if _is_siglip(trunk) and side % trunk.patch_embed.patch_size[0] == 0:
        return _siglip_image(trunk, side)
    return config.TimmImage(kind="timm", name=cfg["timm_model_name"], image_size=side)


def _projection(cfg: Cfg, embed_dim: int) -> str:
    match cfg.get("timm_proj", "linear"):
        case "none":
            return "none"
        case "linear":
            return "linear_bias" if cfg.get("timm_proj_bias", False) else "linear"
    trunk = _trunk(cfg["timm_model_name"], num_classes=embed_dim)
    has_bias = trunk.get_submodule(_classifier(trunk)).bias is not None
    return "linear_bias" if has_bias else "linear"


@cache
def _trunk(name: str, num_classes: int = 0) -> nn.Module:
    return without_values(name, num_classes=num_classes)


def _pool(trunk: nn.Module) -> str | None:
    """How a model of timm pools: a name, or a module with one, in the model or in its head."""
    for module in (trunk, getattr(trunk, "head", None)):
        pool = getattr(module, "global_pool", None)
        pool = getattr(pool, "pool_type", pool)
        if isinstance(pool, str):
            return pool
    return None


def _classifier(trunk: nn.Module) -> str:
    """Name of the one Linear that is the classifier."""
    return str(trunk.pretrained_cfg["classifier"])


def _is_siglip(trunk: nn.Module) -> bool:
    """Whether a trunk differs from our own in nothing that names and shapes do not tell."""
    if not (isinstance(trunk, VisionTransformer) and trunk.global_pool == "map"):
        return False
    pool, first = trunk.attn_pool, trunk.blocks[0]
    norms = [module for module in trunk.modules() if isinstance(module, nn.LayerNorm)]
    activations = {_activation(mlp.act) for mlp in (first.mlp, pool.mlp)}
    return (
        trunk.num_prefix_tokens == 0
        and len({norm.eps for norm in norms}) == 1
        and len(activations) == 1
        and None not in activations
        and pool.num_heads == first.attn.num_heads
        and pool.pool == "token"
    )


def _siglip_image(trunk: VisionTransformer, side: int) -> config.VitImage:
    first, width = trunk.blocks[0], trunk.embed_dim
    return config.VitImage(
        kind="vit",
        image_size=side,
        patch_size=trunk.patch_embed.patch_size[0],
        width=width,
        depth=len(trunk.blocks),
        heads=first.attn.num_heads,
        mlp_ratio=first.mlp.fc1.out_features / width,
        activation=_activation(first.mlp.act),
        norm_eps=first.norm1.eps,
        patch_bias=True,
        class_token=False,
        pre_norm=False,
        pool="map",
    )


def _activation(module: nn.Module) -> str | None:
    """timm has modules of its own beside PyTorch's."""
    if isinstance(module, nn.GELU):
        return "gelu_tanh" if getattr(module, "approximate", "none") == "tanh" else "gelu"
    return {"GELUTanh": "gelu_tanh", "GELU": "gelu"}.get(type(module).__name__)


# --- names ---------------------------------------------------------------------------------------


def _trunk_entries(section: config.TimmImage) -> list[Entry]:
    names = _trunk(section.name).state_dict()
    return [same(f"visual.trunk.{name}", f"image.model.{name}") for name in names]
