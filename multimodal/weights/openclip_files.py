"""OpenCLIP models from files: weights with the name of their architecture, or a described folder.

ViT-B-32:weights.safetensors    any file of weights, its architecture by OpenCLIP's name
FOLDER                          open_clip_config.json, weights, and a tokenizer unless it is
                                OpenAI's
hf-hub:ORG/NAME                 such a folder on the hub
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from multimodal import config
from multimodal.data.openai_bpe import has_openai_vocabulary
from multimodal.data.text import Tokenizer, build_tokenizer
from multimodal.models.build import build_model
from multimodal.models.two_tower import TwoTower
from multimodal.weights.mapping import Table, to_ours
from multimodal.weights.openclip import openclip_table, text_prefix
from multimodal.weights.openclip_names import infer_config
from multimodal.weights.openclip_settings import check_pooling, openclip_section
from multimodal.weights.openclip_timm_names import timm_config
from multimodal.weights.state_files import read_state

CONFIG_FILE = "open_clip_config.json"
WEIGHTS_FILES = (
    *("open_clip_model.safetensors", "open_clip_pytorch_model.safetensors"),
    *("open_clip_pytorch_model.bin", "open_clip_pytorch_model.pth"),
)
"""Where OpenCLIP looks first, in its order."""
_HUB = "hf-hub:"
_HUB_SECONDS = 20
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
_SMALL_FILES = ("*.json", "*.txt", "*.model")
_EXTRA = ("input_resolution", "context_length", "vocab_size", "attn_mask", "text.attn_mask")
"""What files hold besides weights: OpenAI's sizes, and masks that old versions saved."""
_PLACEHOLDER_BIAS = -10.0
_CLEAN: dict[str, list[config.Cleaning]] = {
    "whitespace": ["unescape", "whitespace"],
    "lower": ["unescape", "whitespace", "lower"],
    "canonicalize": ["unescape", "punctuation", "whitespace", "lower"],
}
"""`tokenizer_kwargs.clean` of OpenCLIP, but for ftfy, as our steps."""

log = logging.getLogger(__name__)


class Found(NamedTuple):
    """What lies on the disk.

    Attributes:
        model_cfg: OpenCLIP's settings of the model.
        preprocess: ours.
        state: weights by OpenCLIP's names.
        folder: where a tokenizer may lie.
        weights: their file.
    """

    model_cfg: dict[str, Any]
    preprocess: config.Preprocess
    state: dict[str, Tensor]
    folder: Path
    weights: Path


def load_open_clip(name: str) -> tuple[config.Model, TwoTower, Tokenizer]:
    """Settings, model and tokenizer of an OpenCLIP model.

    Args:
        name: `ARCHITECTURE:FILE`, `FOLDER` or `hf-hub:ORG/NAME`.

    Raises:
        ValueError: when there is none, it is damaged, or cannot be expressed here.
    """
    found = _find(name)
    try:
        return _convert(found)
    except ValueError as error:
        raise ValueError(f"open_clip:{name} ({found.weights}): {error}") from error


def _convert(found: Found) -> tuple[config.Model, TwoTower, Tokenizer]:
    layout = _layout(found.model_cfg)
    section = layout.section(
        found.model_cfg,
        tokenizer=_tokenizer_section(found.model_cfg["text_cfg"], found.folder),
        preprocess=found.preprocess,
    )
    tokenizer = build_tokenizer(
        section.tokenizer,
        context_length=section.text.context_length,
        fixed_length=section.text.fixed_length,
        vocab_size=section.text.vocab_size,
        captions=(),
    )
    check_pooling(found.model_cfg, tokenizer)
    model = build_model(section)
    table = layout.table(section, text_prefix(found.state))
    model.load_state_dict(to_ours(table, found.state, model.state_dict()))
    return section, model, tokenizer


class _Layout(NamedTuple):
    """How the settings and weights of a kind of model are read."""

    section: Callable[..., config.Model]
    table: Callable[[config.Model, str], Table]


def _layout(model_cfg: Mapping[str, Any]) -> _Layout:
    if not model_cfg["vision_cfg"].get("timm_model_name"):
        return _Layout(openclip_section, openclip_table)
    # Imported here, since timm takes seconds to import.
    from multimodal.weights.openclip_timm import projection_name, timm_section, timm_table

    return _Layout(
        timm_section,
        lambda section, text: timm_table(section, projection=projection_name(model_cfg), text=text),
    )


# --- what lies there -----------------------------------------------------------------------------


def _find(name: str) -> Found:
    if name.startswith(_HUB):
        return _read_folder(_download(name.removeprefix(_HUB)))
    if Path(name).is_dir():
        return _read_folder(Path(name))
    architecture, colon, file = name.partition(":")
    if not colon:
        raise ValueError(
            f"open_clip:{name}: no such folder; give open_clip:ARCHITECTURE:FILE with OpenCLIP's "
            f"name of the architecture, a folder with {CONFIG_FILE}, or open_clip:{_HUB}ORG/NAME"
        )
    return _read_file(architecture, Path(file))


def _read_file(architecture: str, path: Path) -> Found:
    state = _read_weights(path)
    try:
        if (known := timm_config(architecture, state)) is not None:
            model_cfg = _with_bias(known.model_cfg, state)
            return Found(model_cfg, known.preprocess, state, path.parent, path)
        model_cfg = infer_config(architecture, state)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    log.info(
        "%s is read as %s: activation %s, by the name, since weights do not tell (those of OpenAI, "
        "MetaCLIP and DFN need a name with -quickgelu); pictures of %d pixels",
        path,
        architecture,
        "QuickGELU" if model_cfg["quick_gelu"] else "GELU",
        model_cfg["vision_cfg"]["image_size"],
    )
    return Found(model_cfg, config.Preprocess(), state, path.parent, path)


def _read_folder(folder: Path) -> Found:
    path = folder / CONFIG_FILE
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        model_cfg = dict(content["model_cfg"])
        dict(model_cfg["vision_cfg"]), dict(model_cfg["text_cfg"])
        preprocess = _preprocess(content.get("preprocess_cfg") or {})
    except FileNotFoundError:
        raise ValueError(
            f"{folder} has no {CONFIG_FILE}, which says what the weights are; without it give "
            "open_clip:ARCHITECTURE:FILE"
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a description of an OpenCLIP model: {error!r}") from None
    weights = _weights_in(folder)
    if weights is None:
        raise ValueError(f"{folder} has no weights; needed is one of {', '.join(WEIGHTS_FILES)}")
    state = _read_weights(weights)
    return Found(_with_bias(model_cfg, state), preprocess, state, folder, weights)


def _with_bias(model_cfg: dict[str, Any], state: Mapping[str, Tensor]) -> dict[str, Any]:
    """Let the settings have an offset of the logits where the weights do; OpenCLIP takes 0 then."""
    rest = {name: value for name, value in model_cfg.items() if name != "init_logit_bias"}
    if "logit_bias" not in state:
        return rest
    bias = model_cfg.get("init_logit_bias")
    return rest | {"init_logit_bias": _PLACEHOLDER_BIAS if bias is None else bias}


def _weights_in(folder: Path) -> Path | None:
    return next((folder / name for name in WEIGHTS_FILES if (folder / name).is_file()), None)


def _read_weights(path: Path) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in read_state(path).items() if name not in _EXTRA}


def _download(name: str) -> Path:
    """The folder of a model of the hub in the cache; fetched if it is not there."""
    from huggingface_hub import model_info, snapshot_download

    try:
        folder = Path(snapshot_download(name, local_files_only=True))
        if (folder / CONFIG_FILE).is_file() and _weights_in(folder):
            return folder
    except (OSError, ValueError):  # not in the cache, or no name of the hub
        pass
    try:
        siblings = model_info(name, timeout=_HUB_SECONDS).siblings or ()
        listed = {file.rfilename for file in siblings}
        weights = [file for file in WEIGHTS_FILES if file in listed][:1]
        return Path(snapshot_download(name, allow_patterns=[*_SMALL_FILES, *weights]))
    except Exception as error:  # of requests or of httpx, by the version of huggingface_hub
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise ValueError(
            f"open_clip:{_HUB}{name} is neither in the cache nor to be had from the hub "
            f"({reason}); give a folder or a file, or connect to a network"
        ) from None


# --- what belongs to it --------------------------------------------------------------------------


def _tokenizer_section(text_cfg: Mapping[str, Any], folder: Path) -> config.TokenizerSection:
    """OpenAI's BPE, or the named tokenizer of transformers, from the folder if it is there."""
    kwargs = dict(text_cfg.get("tokenizer_kwargs") or {})
    name = text_cfg.get("hf_tokenizer_name")
    clean = kwargs.pop("clean", "whitespace" if name else "lower")
    if kwargs or clean not in _CLEAN or (clean == "whitespace" and not name):
        raise ValueError(
            f"text_cfg.tokenizer_kwargs={text_cfg['tokenizer_kwargs']} is not supported; only "
            f"clean is, as {', '.join(_CLEAN)}"
        )
    if name:
        beside = any((folder / file).is_file() for file in _TOKENIZER_FILES)
        return config.HfTokenizer(
            kind="hf", name=str(folder) if beside else name, clean=_CLEAN[clean]
        )
    return config.OpenAiTokenizer(
        kind="openai",
        vocabulary=str(folder) if has_openai_vocabulary(folder) else None,
        clean=[step for step in _CLEAN[clean] if step not in ("whitespace", "lower")],
    )


def _preprocess(cfg: Mapping[str, Any]) -> config.Preprocess:
    """Our settings for a `preprocess_cfg`; its size is the model's in any case."""
    if cfg.get("mode", "RGB") != "RGB":
        raise ValueError(f"preprocess_cfg.mode={cfg['mode']!r} is not RGB")
    names = ("mean", "std", "interpolation", "resize_mode")
    given = {name: cfg[name] for name in names if cfg.get(name) is not None}
    return config.Preprocess.model_validate(given)
