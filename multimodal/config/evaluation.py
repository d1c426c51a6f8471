"""What is measured, on which data."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from multimodal.config.base import EveryText, Section
from multimodal.config.data import Source

EMA_SUFFIX = "@ema"
"""Of the name of an evaluation of the averaged weights (`train.ema`)."""


class Retrieval(Section):
    """Image-text retrieval: recall at 1, 5 and 10 in both directions."""

    kind: Literal["retrieval"]
    """Rank all captions for each picture and all pictures for each caption."""
    data: Source
    """Pictures with captions."""
    more_captions: list[Source] = []
    """Further sources whose captions join the candidates of each picture."""
    every: EveryText | None = None
    """Interval in training; null evaluates at the end only."""


class ZeroShot(Section):
    """Zero-shot classification by the similarity of a picture to each class's prompts."""

    kind: Literal["zero_shot"]
    """Classify pictures by class names."""
    data: Source
    """Pictures with a class."""
    label: str = "cls"
    """Metadata field that holds the class: its name, or its row in `classes`."""
    classes: Annotated[list[str], Field(min_length=2)]
    """Class names."""
    templates: Annotated[list[str], Field(min_length=1)] = ["a photo of {}."]
    """Prompts around a class name; their embeddings are averaged."""
    every: EveryText | None = None
    """Interval in training; null evaluates at the end only."""


Evaluation = Annotated[Retrieval | ZeroShot, Field(discriminator="kind")]


class EvaluateConfig(Section):
    """What `multimodal evaluate` reads."""

    evaluate: dict[str, Evaluation]
    """Evaluations by name."""

    @model_validator(mode="after")
    def _something_to_evaluate(self):
        if not self.evaluate:
            raise ValueError(
                "there is no evaluation; add one, such as evaluate.val.kind=retrieval "
                "evaluate.val.data.kind=table evaluate.val.data.path=val.csv"
            )
        return self
