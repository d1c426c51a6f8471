"""The model folder: everything that is needed to use a model, and nothing else.

    model.safetensors   weights, in the dtype they have
    tokenizer.json      vocabulary
    text/config.json    architecture of a text tower from transformers; no such file otherwise
    image/config.json   likewise of an image tower from transformers, or from a folder of timm's
    config.json         architecture, preprocessing, tokenizer settings, versions, SHA-256 of the
                        files above; written last
    README.md           the model card, in the model that a run ends with

Each file is replaced atomically, and a folder without config.json is incomplete.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

import multimodal
from multimodal import config
from multimodal.data.text import FILE as TOKENIZER_FILE
from multimodal.data.text import Tokenizer
from multimodal.files import file_hash, write_atomically
from multimodal.models.two_tower import TwoTower

FORMAT = "multimodal"
FORMAT_VERSION = 1
CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
IMAGE_FOLDER, TEXT_FOLDER = "image", "text"
"""Where the architectures of towers lie that a library describes."""
CARD_FILE = "README.md"


def save_model(
    folder: Path | str,
    *,
    model: TwoTower,
    section: config.Model,
    tokenizer: Tokenizer,
    weights: Mapping[str, Tensor] | None = None,
) -> None:
    """Write the model folder; one that is there already is replaced.

    Args:
        folder: where to; made if missing. Other files in it are left alone.
        model: without wrappers (DDP, compiled).
        section: what the model was built from.
        tokenizer: what its texts were encoded with.
        weights: a state dict to save instead of the model's own.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG_FILE).unlink(missing_ok=True)
    tokenizer.save(folder)
    if is_described_elsewhere(section.image):
        model.image.save_architecture(folder / IMAGE_FOLDER)
    if is_described_elsewhere(section.text):
        model.text.save_architecture(folder / TEXT_FOLDER)
    weights = model.state_dict() if weights is None else weights
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
    write_atomically(folder / WEIGHTS_FILE, lambda path: save_file(state, path))
    hashes = {name: file_hash(folder / name) for name in described_files(section)}
    text = json.dumps(_describe(section, tokenizer) | {"sha256": hashes}, indent=2) + "\n"
    write_atomically(folder / CONFIG_FILE, lambda path: path.write_text(text, encoding="utf-8"))


def described_files(section: config.Model) -> list[str]:
    """Names of the files that belong to a model besides config.json, which holds their hashes."""
    towers = {IMAGE_FOLDER: section.image, TEXT_FOLDER: section.text}
    elsewhere = [name for name, tower in towers.items() if is_described_elsewhere(tower)]
    return [WEIGHTS_FILE, TOKENIZER_FILE, *(f"{name}/{CONFIG_FILE}" for name in elsewhere)]


def is_described_elsewhere(tower: config.ImageTower | config.TextTower) -> bool:
    """Whether a tower's architecture is in a library's file and not in its section."""
    if isinstance(tower, config.TimmImage):
        return ":" in tower.name  # a folder or the hub, not timm's own list
    return isinstance(tower, config.HfImage | config.HfText)


def _describe(section: config.Model, tokenizer: Tokenizer) -> dict:
    return {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "model": section.model_dump(),
        "tokenizer": tokenizer.settings(),
        "versions": {
            "multimodal": multimodal.__version__,
            "torch": torch.__version__,
            "timm": version("timm"),
            "transformers": version("transformers"),
        },
    }
