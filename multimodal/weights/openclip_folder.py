"""A folder that OpenCLIP 3 opens by `local-dir:`, and older versions by its weights alone.

    open_clip_config.json          architecture and preprocessing
    open_clip_model.safetensors    weights, float32, by OpenCLIP's names
    tokenizer files                see `tokenizer_files`; read where the config has a
                                   `hf_tokenizer_name`, so unless the tokenizer is OpenAI's

Where the architecture has a name in OpenCLIP, the file of weights is enough for any version:
`create_model(NAME, pretrained=FILE)`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor

from multimodal import config
from multimodal.data.openai_bpe import END, PAD, START, is_openai_bpe
from multimodal.data.text import Tokenizer
from multimodal.files import write_atomically
from multimodal.models.two_tower import TwoTower
from multimodal.weights import parity_inputs
from multimodal.weights.mapping import from_ours, shapes_of_theirs
from multimodal.weights.openclip import openclip_table
from multimodal.weights.openclip_config import (
    openclip_config,
    openclip_preprocess,
    what_counts,
)
from multimodal.weights.openclip_files import CONFIG_FILE, WEIGHTS_FILES
from multimodal.weights.openclip_settings import openclip_section
from multimodal.weights.parity import Theirs
from multimodal.weights.pretrained import Pretrained
from multimodal.weights.quiet import quiet
from multimodal.weights.tokenizer_files import write_tokenizer

USAGE = (
    "open_clip.create_model_from_pretrained('local-dir:{out}'), "
    "open_clip.get_tokenizer('local-dir:{out}')"
)
WEIGHTS_FILE = WEIGHTS_FILES[0]
_TOKENIZER_NAME = "in-this-folder"
"""OpenCLIP reads the folder's tokenizer whatever the name; on the hub it has to be the hub's."""
KNOWN = {
    parity_inputs.ENTITIES: "OpenCLIP reads HTML entities, whatever the model was trained with",
    parity_inputs.SPELLED: "OpenCLIP knows other spellings of special tokens",
    parity_inputs.MISREAD: "OpenCLIP mends texts in the wrong encoding (ftfy)",
    parity_inputs.QUOTES: "OpenCLIP makes quotation marks straight (ftfy)",
    parity_inputs.UNUSUAL: "OpenCLIP drops transparency and orientation, and cuts 16-bit values",
}

log = logging.getLogger(__name__)


def write(pretrained: Pretrained, folder: Path) -> None:
    """Write the folder.

    Raises:
        ValueError: when OpenCLIP cannot hold the model; all settings at fault are listed.
    """
    section, tokenizer = pretrained.config, pretrained.tokenizer
    model_cfg = openclip_config(section, tokenizer)
    if not _has_own_tokenizer(section, tokenizer):
        model_cfg["text_cfg"]["hf_tokenizer_name"] = _TOKENIZER_NAME
    state = openclip_state(pretrained.model, section)
    write_atomically(folder / WEIGHTS_FILE, lambda path: save_file(state, path, {"format": "pt"}))
    write_tokenizer(tokenizer, folder, masks_padding=False)
    content = {"model_cfg": model_cfg, "preprocess_cfg": openclip_preprocess(section)}
    text = json.dumps(content, indent=2) + "\n"
    write_atomically(folder / CONFIG_FILE, lambda path: path.write_text(text, encoding="utf-8"))


def openclip_state(model: TwoTower, section: config.Model) -> dict[str, Tensor]:
    """Our weights by OpenCLIP's names, the text tower at the root."""
    table, patch = openclip_table(section), section.image.patch_size
    ours = {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}
    like = shapes_of_theirs(table, ours)
    kernel = torch.empty(section.image.width, 3, patch, patch, device="meta")
    theirs = from_ours(table, ours, like | {"visual.conv1.weight": kernel})
    return {name: tensor.contiguous() for name, tensor in theirs.items()}


def reopen(folder: Path) -> Theirs:
    """The model as OpenCLIP reads it; also by its file alone, where the architecture has a name.

    Raises:
        ImportError: when it is not installed.
    """
    if find_spec("open_clip") is None:
        raise ImportError("open_clip is not installed (pip install open_clip_torch)")
    import open_clip

    source = f"local-dir:{folder}"
    library = f"open_clip {version('open_clip_torch')}"
    with quiet():
        model, preprocess = open_clip.create_model_from_pretrained(source)
        model.eval()
        tokenizer = open_clip.get_tokenizer(source)
        if (name := builtin_name(folder)) is not None:
            _compare_with_file(model.eval(), name, folder / WEIGHTS_FILE)
    if name is not None:
        log.info("any version reads it as %s with pretrained=%s", name, WEIGHTS_FILE)
        library += f" (local-dir:, and {name} with pretrained={WEIGHTS_FILE})"
    bias = getattr(model, "logit_bias", None)

    def tokens(texts: list[str]) -> list[list[int]]:
        eos = getattr(tokenizer, "eot_token_id", None)
        eos = tokenizer.tokenizer.eos_token_id if eos is None else eos
        return [row[: row.index(eos) + 1] for row in tokenizer(texts).tolist()]

    return Theirs(
        library=library,
        image=model.encode_image,
        text=lambda tokens, lengths: model.encode_text(tokens),
        pixels=lambda images: _pixels(preprocess, images),
        tokens=tokens,
        logit_scale=model.logit_scale.exp().item(),
        logit_bias=None if bias is None else bias.item(),
        any_length=False,
        known=KNOWN,
    )


def builtin_name(folder: Path) -> str | None:
    """OpenCLIP's name of the architecture, with which a version without `local-dir:` reads it.

    Such a name stands for OpenAI's tokenizer and preprocessing too.
    """
    import open_clip

    content = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    if content["model_cfg"]["text_cfg"].get("hf_tokenizer_name"):
        return None
    if config.Preprocess(**_without_size(content["preprocess_cfg"])) != config.Preprocess():
        return None
    needed = _architecture(content["model_cfg"])
    for name in open_clip.list_models():
        model_cfg = open_clip.get_model_config(name)
        if not model_cfg["text_cfg"].get("hf_tokenizer_name"):
            try:
                if _architecture(model_cfg) == needed:
                    return name
            except ValueError:
                continue  # a model that cannot be ours
    return None


def _architecture(model_cfg: dict[str, Any]) -> dict[str, Any]:
    """What the weights need to give the same features."""
    section = openclip_section(
        model_cfg,
        tokenizer=config.OpenAiTokenizer(kind="openai"),
        preprocess=config.Preprocess(),
    )
    return what_counts(section)


def _without_size(cfg: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in cfg.items() if name != "size"}


def _has_own_tokenizer(section: config.Model, tokenizer: Tokenizer) -> bool:
    """Whether OpenCLIP's own tokenizer gives the same ids, and the same padding if it is seen."""
    hidden = section.text.causal and section.text.pool == "eot"
    ids = (tokenizer.bos_id, tokenizer.eos_id) == (START, END)
    padding = hidden or tokenizer.pad_id == PAD
    return ids and padding and is_openai_bpe(tokenizer.as_json())


def _pixels(preprocess: Callable[[Image.Image], Tensor], images: list[Image.Image]) -> Tensor:
    return torch.stack([preprocess(image) for image in images])


@torch.no_grad()
def _compare_with_file(model: torch.nn.Module, name: str, file: Path) -> None:
    """See that OpenCLIP makes the same model of the file alone."""
    import open_clip

    other = open_clip.create_model(name, pretrained=str(file)).eval()
    size = model.visual.image_size
    pixels = torch.randn(1, 3, *(size if isinstance(size, tuple) else (size, size)))
    tokens = torch.arange(model.context_length)[None] + START - model.context_length
    for encode in ("encode_image", "encode_text"):
        given = pixels if encode == "encode_image" else tokens
        if not torch.equal(getattr(model, encode)(given), getattr(other, encode)(given)):
            raise ValueError(f"{encode} of {name} with pretrained={file} gives other features")
