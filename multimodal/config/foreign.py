"""Names of models that other libraries wrote: a library's name, a colon, and what it is.

hf:FOLDER_OR_NAME              a model of transformers
open_clip:ARCHITECTURE:FILE    weights of OpenCLIP, such as open_clip:ViT-B-32:b32.safetensors
open_clip:FOLDER               one with open_clip_config.json
open_clip:hf-hub:NAME          such a folder on the hub
big_vision:FILE.npz            a SigLIP of big_vision
"""

from __future__ import annotations

import re
from typing import NamedTuple

LIBRARIES = ("hf", "open_clip", "big_vision")
FORMS = "hf:FOLDER_OR_NAME, open_clip:FOLDER, open_clip:ARCHITECTURE:FILE or big_vision:FILE.npz"
"""For messages and help texts."""
BEFORE_PATH = r"hf:|big_vision:|open_clip:(?:[\w-]+:)?"
"""Regular expression of what stands before a path."""
_NAME = re.compile(rf"({'|'.join(LIBRARIES)}):(.*)", re.DOTALL)


class ModelName(NamedTuple):
    """Attributes:
    library: one of `LIBRARIES`, or None for a path.
    rest: what follows it.
    """

    library: str | None
    rest: str


def split_name(name: str) -> ModelName:
    """Take a model's name apart."""
    match = _NAME.fullmatch(name)
    return ModelName(None, name) if match is None else ModelName(match[1], match[2])
