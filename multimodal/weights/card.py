"""The model card that goes with a model into another format."""

from __future__ import annotations

import re
from pathlib import Path

from multimodal.config.foreign import split_name
from multimodal.weights.load import find_model
from multimodal.weights.save import CARD_FILE
from multimodal.weights.targets import Target

_LIBRARIES: dict[Target, str] = {
    "hf": "transformers",
    "siglip": "transformers",
    "onnx-int8": "onnx",
}
"""What the hub calls those whose target has another name."""


def read_card(path_or_name: str) -> str | None:
    """The card in the folder of a model, as `load` takes it; None if there is none."""
    name = split_name(path_or_name)
    path = (Path(name.rest) if name.library else find_model(path_or_name)) / CARD_FILE
    return path.read_text(encoding="utf-8") if path.is_file() else None


def converted_card(card: str, to: Target, usage: str) -> str:
    """The card of a converted model: license, data and figures stay, its library changes.

    Args:
        usage: how the other library reads the model.
    """
    card = re.sub(
        r"^library_name: .*$",
        f"library_name: {_LIBRARIES.get(to, to)}",
        card,
        count=1,
        flags=re.MULTILINE,
    )
    if to == "timm":  # the image tower alone
        card = card.replace("zero-shot-image-classification", "image-feature-extraction", 1)
    read = f"## Use\n\nConverted for {to}; read it with\n\n```\n{usage}\n```\n\n"
    return re.sub(r"^## Use\n.*?(?=^## )", lambda found: read, card, flags=re.DOTALL | re.MULTILINE)
