"""The settings of a model, without its weights where they need not be read for that."""

from __future__ import annotations

from multimodal import config
from multimodal.config.foreign import split_name
from multimodal.weights.load import find_model, load, read_config
from multimodal.weights.save import CONFIG_FILE


def describe(path_or_name: str) -> config.Model:
    """What `load` would give as the settings of a model.

    Raises:
        ValueError: when there is no model.
    """
    if split_name(path_or_name).library is None:
        return read_config(find_model(path_or_name) / CONFIG_FILE)[0]
    return load(path_or_name).config
