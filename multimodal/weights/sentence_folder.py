"""A CLIP folder as sentence-transformers reads it: the layout of `hf_folder`, another reader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from multimodal.weights import hf
from multimodal.weights.hf_folder import known_of
from multimodal.weights.parity import Theirs

USAGE = "sentence_transformers.SentenceTransformer({out!r})"


def reopen(folder: Path) -> Theirs:
    """The model as sentence-transformers reads it.

    Raises:
        ImportError: when the package is not installed.
    """
    try:
        import sentence_transformers
    except ImportError as error:
        raise ImportError(
            "sentence-transformers is not installed (pip install 'multimodal[convert]')"
        ) from error
    with hf.quiet():
        model = sentence_transformers.SentenceTransformer(str(folder), device="cpu")

    def embed(inputs: list[Any]) -> Tensor:
        return torch.from_numpy(model.encode(inputs, show_progress_bar=False))

    return Theirs(
        library=f"sentence-transformers {sentence_transformers.__version__}",
        embed_images=embed,
        embed_texts=embed,
        unescapes=False,
        known=known_of(model.tokenizer),
    )
