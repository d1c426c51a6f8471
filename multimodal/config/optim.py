"""How the weights move: the optimiser, its schedule, and parameters that differ from the others."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import (
    AfterValidator,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    model_validator,
)

from multimodal.config.base import DurationText, Fraction, Probability, Section


def _check_regex(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"{text!r} is no regular expression ({error})") from None
    return text


class ParameterGroup(Section):
    """Parameters by their names, and how they differ from the others."""

    match: Annotated[str, Field(min_length=1), AfterValidator(_check_regex)]
    """Regular expression that is found somewhere in a name, such as `^text\\.` or `norm`."""
    lr: PositiveFloat = 1.0
    """Learning rate as a multiple of what it would be."""
    weight_decay: NonNegativeFloat | None = None
    """In place of `optim.weight_decay`, for those that have any."""
    freeze: bool = False
    """Keep their values, without a gradient and optimiser state."""

    @model_validator(mode="after")
    def _frozen_has_no_rate(self):
        if self.freeze and (self.lr != 1.0 or self.weight_decay is not None):
            raise ValueError(
                f"match={self.match!r}: what has freeze=true has no lr or weight_decay; leave "
                "these out, or freeze"
            )
        return self


class Optim(Section):
    """AdamW with warm-up and cosine decay."""

    lr: PositiveFloat = 5e-4
    """Peak learning rate."""
    betas: Annotated[list[Fraction], Field(min_length=2, max_length=2)] = [0.9, 0.98]
    """Decay rates of the gradient's first and second moment."""
    eps: PositiveFloat = 1e-6
    """Added to the root of the second moment."""
    weight_decay: NonNegativeFloat = 0.2
    """Decay of matrices; norms, biases, positions, class token and temperature have none."""
    layer_decay: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Factor on the learning rate for each layer below the projection (arXiv 2106.08254)."""
    groups: list[ParameterGroup] = []
    """`{match: REGEX, lr: FACTOR, weight_decay: NUMBER, freeze: true}`; the first match counts."""
    warmup: DurationText = "5%"
    """Linear rise of the learning rate from 0: `5%` of the run, `2000 steps`, ..."""
    final_lr: Probability = 0.0
    """Learning rate at the end as a share of the peak."""
    clip_grad_norm: PositiveFloat | None = 1.0
    """Largest gradient norm over all parameters; null leaves gradients as they are."""
