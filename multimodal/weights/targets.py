"""The formats that a model is converted to, by name. Imports nothing: the command line reads it."""

from typing import Literal

Target = Literal["hf", "sentence-transformers", "siglip", "open_clip", "onnx", "onnx-int8", "timm"]
