"""Train, evaluate and use CLIP-style image-text models."""

from __future__ import annotations

from typing import TYPE_CHECKING

from multimodal.config import Config

if TYPE_CHECKING:
    from multimodal.weights.pretrained import Pretrained

__all__ = ["Config", "__version__", "load"]
__version__ = "0.1.0"


def load(path_or_name: str, device: str = "cpu") -> Pretrained:
    """Load a trained model; see `multimodal.weights.load.load`."""
    from multimodal.weights.load import load as load_weights  # keeps torch out of the import

    return load_weights(path_or_name, device=device)
