"""From a path to a ready model. Strict: what is missing, unexpected or contradictory is an error.

A model folder describes itself, so nothing else is read, and nothing in it can run code.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from multimodal import config
from multimodal.config.foreign import FORMS, split_name
from multimodal.data.text import FILE as TOKENIZER_FILE
from multimodal.data.text import Tokenizer
from multimodal.data.transforms import ImageTransform
from multimodal.files import file_hash
from multimodal.models.build import build_model
from multimodal.models.two_tower import TwoTower
from multimodal.weights.checkpoints import (
    MANIFEST,
    checkpoint_model,
    find_damage,
    newest_first,
    step_of,
)
from multimodal.weights.pretrained import Pretrained
from multimodal.weights.save import (
    CONFIG_FILE,
    FORMAT,
    FORMAT_VERSION,
    IMAGE_FOLDER,
    TEXT_FOLDER,
    WEIGHTS_FILE,
    described_files,
    is_described_elsewhere,
)

log = logging.getLogger(__name__)
_FILES = (CONFIG_FILE, WEIGHTS_FILE, TOKENIZER_FILE)
_CONFIG_FIELDS = ("format", "version", "model", "tokenizer", "versions", "sha256")


def load(path_or_name: str | Path, device: str | torch.device = "cpu") -> Pretrained:
    """Load a model for use.

    Args:
        path_or_name: a model folder; a checkpoint folder; a run folder, whose final model is
            taken, and while there is none, that of its newest sound checkpoint; or a model of
            another library, see `config.foreign`. A checkpoint with EMA weights stands for those;
            the raw ones are in its `model/`.
        device: where it runs; `auto` takes the best there is.

    Raises:
        ValueError: when there is no model, or a file of it is missing or does not fit the others.
    """
    section, model, tokenizer = _load(path_or_name)
    return Pretrained(
        model=model.to(_device(device)).eval(),
        transform=ImageTransform(section.image.image_size, section.preprocess),
        tokenizer=tokenizer,
        config=section,
    )


def _load(path_or_name: str | Path) -> tuple[config.Model, TwoTower, Tokenizer]:
    name = split_name(str(path_or_name))
    match name.library:  # imported here, since transformers takes seconds to import
        case "hf":
            from multimodal.weights.hub import load_hf

            return load_hf(name.rest)
        case "open_clip":
            from multimodal.weights.openclip_files import load_open_clip

            return load_open_clip(name.rest)
        case "big_vision":
            from multimodal.weights.big_vision import load_big_vision

            return load_big_vision(name.rest)
        case _:
            return _load_folder(find_model(path_or_name))


def _load_folder(folder: Path) -> tuple[config.Model, TwoTower, Tokenizer]:
    for name in _FILES:
        if not (folder / name).is_file():
            raise ValueError(
                f"{folder} has no {name}, so the model in it is incomplete; copy all of "
                f"{', '.join(_FILES)}, or save it again"
            )
    section, settings = read_config(folder / CONFIG_FILE)
    try:
        tokenizer = Tokenizer.load(folder, settings)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{folder}: {error}; use files that were saved together") from error
    _check_tokenizer(tokenizer, section.text, folder)
    model = build_model(_without_downloads(section, folder))
    load_weights(model, folder / WEIGHTS_FILE)
    _check_files(folder, section)
    return section, model, tokenizer


def _check_files(folder: Path, section: config.Model) -> None:
    """What strict names and shapes cannot tell: a flipped bit, or files of two models alike."""
    hashes = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))["sha256"]
    names = described_files(section)
    hashes = hashes if isinstance(hashes, dict) else {}
    _check_fields(hashes, dict.fromkeys(names), folder / CONFIG_FILE, "sha256.")
    for name in names:
        if hashes[name] != file_hash(folder / name):
            raise ValueError(
                f"{folder / name} is not the file that {CONFIG_FILE} was saved with (SHA-256 "
                "differs): it is damaged or of another model; copy the folder again, or, if the "
                "change is wanted, save the model with multimodal.weights.save"
            )


# --- where the model is --------------------------------------------------------------------------


def find_model(path: str | Path) -> Path:
    """The model folder that a path stands for.

    Raises:
        ValueError: when there is none.
    """
    path = Path(path)
    if any((path / name).is_file() for name in (CONFIG_FILE, WEIGHTS_FILE)):
        return path
    is_checkpoint = step_of(path) is not None and (path / MANIFEST).is_file()
    if is_checkpoint and (problem := _model_damage(path)):
        raise ValueError(f"checkpoint {path} is damaged: {problem}; use another one of its run")
    for folder in (checkpoint_model(path), *_checkpoint_models(path)):
        if (folder / CONFIG_FILE).is_file():
            return folder
    raise ValueError(
        f"no model at {str(path)!r}; give a model folder (with {', '.join(_FILES)}), a checkpoint "
        f"folder, the folder of a run that has saved a checkpoint, or {FORMS}"
    )


def _checkpoint_models(run: Path) -> Iterator[Path]:
    """Models of a run's sound checkpoints, the newest first."""
    for checkpoint in newest_first(run):
        problem = _model_damage(checkpoint)
        if problem is None:
            yield checkpoint_model(checkpoint)
        else:
            log.warning("checkpoint %s is damaged and not used: %s", checkpoint, problem)


def _model_damage(checkpoint: Path) -> str | None:
    return find_damage(checkpoint, under=f"{checkpoint_model(checkpoint).name}/")


# --- what it is ----------------------------------------------------------------------------------


def read_config(path: Path) -> tuple[config.Model, dict[str, Any]]:
    """The settings of the model and of the tokenizer in a model folder's config.json.

    Raises:
        ValueError: when it is not such a file, or of another version.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}); save the model again") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        hint = ""
        if isinstance(content, dict) and "model_type" in content:
            hint = f"; it is a folder of transformers, so write hf:{path.parent}"
        raise ValueError(
            f'{path} has no "format": "{FORMAT}", so this program did not write it{hint}'
        )
    if content.get("version") != FORMAT_VERSION:
        raise ValueError(
            f"{path} has format version {content.get('version')!r}, and this program reads "
            f"{FORMAT_VERSION}; use the version of the program that wrote it"
        )
    _check_fields(content, dict.fromkeys(_CONFIG_FIELDS), path, "")
    try:
        section = config.Model.model_validate(content["model"])
    except ValidationError as error:
        wrong = [f"model.{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
        raise ValueError(f"{path}: {'; '.join(wrong)}; save the model again") from None
    _check_fields(content["model"], section.model_dump(), path, "model.")
    return section, content["tokenizer"]


def _check_fields(found: dict, expected: dict, path: Path, prefix: str) -> None:
    """Refuse missing fields too: a default may not be what the weights were trained with."""
    for name in sorted(found.keys() ^ expected.keys()):
        problem = "lacks the field" if name in expected else "has the unknown field"
        raise ValueError(
            f"{path} {problem} {prefix}{name}; use the version of the program that wrote it, or "
            "save the model again"
        )
    for name, value in expected.items():
        if isinstance(value, dict):
            _check_fields(found[name], value, path, f"{prefix}{name}.")


def _check_tokenizer(tokenizer: Tokenizer, text: config.TextTower, folder: Path) -> None:
    wrong = []
    if tokenizer.context_length != text.context_length:
        wrong.append(f"context_length={tokenizer.context_length} for {text.context_length}")
    if isinstance(text, config.TransformerText):
        if tokenizer.fixed_length != text.fixed_length:
            wrong.append(f"fixed_length={tokenizer.fixed_length} for {text.fixed_length}")
        if tokenizer.vocab_size > text.vocab_size:
            wrong.append(f"vocab_size={tokenizer.vocab_size} for {text.vocab_size}")
    if wrong:
        raise ValueError(
            f"{folder}: the tokenizer does not fit the text tower: it has {', '.join(wrong)}; use "
            "files that were saved together"
        )


def _without_downloads(section: config.Model, folder: Path) -> config.Model:
    """The section of a model whose weights come from a file, not from where it once started."""
    image, text = section.image, section.text
    if isinstance(image, config.TimmImage | config.HfImage):
        image = image.model_copy(update={"pretrained": False})
        if is_described_elsewhere(image):
            prefix = "local-dir:" if isinstance(image, config.TimmImage) else ""
            image = image.model_copy(update={"name": f"{prefix}{folder / IMAGE_FOLDER}"})
    if isinstance(text, config.HfText):
        own = {"pretrained": False, "name": str(folder / TEXT_FOLDER)}
        text = text.model_copy(update=own)
    return section.model_copy(update={"image": image, "text": text})


# --- weights -------------------------------------------------------------------------------------


def load_weights(model: nn.Module, path: Path) -> None:
    """Copy the tensors of a safetensors file into the model.

    Raises:
        ValueError: when a tensor is missing, unexpected or of another shape, naming all of them.
    """
    try:
        state = load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged ({error}); copy or save it again") from None
    own = model.state_dict()
    problems = [f"missing {name}" for name in own.keys() - state.keys()]
    problems += [f"unexpected {name}" for name in state.keys() - own.keys()]
    problems += [
        f"{name} is {list(state[name].shape)} instead of {list(own[name].shape)}"
        for name in own.keys() & state.keys()
        if state[name].shape != own[name].shape
    ]
    if problems:
        raise ValueError(
            f"the weights in {path} do not fit the model that {CONFIG_FILE} beside them describes: "
            f"{'; '.join(sorted(problems))}; use files that were saved together"
        )
    model.load_state_dict(state)


def _device(name: str | torch.device) -> torch.device:
    best = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    if name == "auto":
        return best
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "meta", best.type):
        raise ValueError(
            f"device={str(name)!r} is not here; this machine has {best.type}"
            f"{'' if best.type == 'cpu' else ' and cpu'}, or say auto"
        )
    return device
