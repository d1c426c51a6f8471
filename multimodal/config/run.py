"""Objective, optimisation, bookkeeping, and the whole configuration of a run."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveInt, model_validator

from multimodal.config.base import (
    DurationText,
    EveryText,
    Fraction,
    MinutesText,
    Section,
)
from multimodal.config.data import Data
from multimodal.config.evaluation import EMA_SUFFIX, Evaluation
from multimodal.config.model import PartName, RunModel
from multimodal.config.optim import Optim

DuplicatesMode = Literal["negative", "ignore", "positive"]


class ContrastiveSection(Section):
    """InfoNCE over the global batch in both directions (arXiv 2103.00020)."""

    kind: Literal["contrastive"]
    """Softmax cross-entropy of each picture over all texts, and of each text over all pictures."""
    label_smoothing: Fraction = 0.0
    """Share of each target that is spread evenly over all candidates."""
    duplicates: DuplicatesMode = "negative"
    """Pairs with one picture or one caption: left out (`ignore`), or sharing the target."""


class SigmoidSection(Section):
    """Pairwise sigmoid loss over the global batch (arXiv 2303.15343)."""

    kind: Literal["sigmoid"]
    """Binary cross-entropy of every picture-text pair."""
    duplicates: DuplicatesMode = "negative"
    """Pairs with one picture or one caption: left out (`ignore`), or labelled like own pairs."""


Loss = Annotated[ContrastiveSection | SigmoidSection, Field(discriminator="kind")]


class Train(Section):
    """How much is trained."""

    batch_size: PositiveInt = 256
    """Pairs in a step over all processes; every pair is a negative of every other."""
    micro_batch_size: PositiveInt | Literal["auto"] | None = None
    """Pairs that fit on a device at once; more work, the same gradient. `auto` (CUDA) tries."""
    checkpoint_activations: Literal["none", "selective", "full"] = "none"
    """Save memory by computing again: the MLPs' hidden layers (`selective`) or whole blocks."""
    compile: bool = False
    """Compile the model (torch.compile): a slow first step, then faster ones, above all on GPUs."""
    freeze: list[PartName] = []
    """Parts that keep their weights: a tower with its projection, or the logits' temperature."""
    duration: DurationText = "32 epochs"
    """Length of the run: `32 epochs`, `1000 steps` or `2e6 samples`."""
    ema: Fraction | None = None
    """Decay of an average of the weights that is also evaluated and is the model in the end."""
    max_nonfinite: PositiveInt = 10
    """Steps in a row, left out since loss or gradient was not finite, that stop the run."""
    timeout: MinutesText | None = "10 min"
    """Time without a sign of life after which a run counts as hung and ends; null waits forever."""

    @model_validator(mode="after")
    def _something_learns(self):
        if {"image", "text"} <= set(self.freeze):
            raise ValueError(f"freeze={self.freeze} leaves no tower to train; keep one out")
        return self


class Best(Section):
    """Checkpoints of the steps with the best values of a metric, kept besides the newest ones."""

    metric: str
    """`EVALUATION/METRIC`, such as `val/image_retrieval_recall@1`; with `ema`, `val@ema/...`."""
    keep: PositiveInt = 1
    """How many; where an evaluation is among them and its step has none, one is saved."""
    mode: Literal["max", "min"] = "max"
    """Whether a large or a small value is good."""


class Checkpoint(Section):
    """When the state of a run is saved."""

    every: EveryText = "1 epochs"
    """Interval between checkpoints, as a duration or `10 min`; the end always saves one."""
    keep: PositiveInt = 2
    """Complete checkpoints to keep; an older one is removed only after a newer one is complete."""
    best: Best | None = None
    """Keep also those with the best values of a metric; null keeps none of them."""
    background: bool = True
    """Write in a thread while training goes on, from a copy in memory that is made first."""
    on_error: Literal["stop", "continue"] = "stop"
    """What a failed save (disk full) does to the run; the end needs one that is saved."""


class Wandb(Section):
    """Weights & Biases. `metrics.jsonl` is written in any case; this is a copy of it."""

    mode: Literal["offline", "online", "disabled"] = "disabled"
    """`offline` needs no network and no account; `wandb sync` sends it later."""
    project: str = "multimodal"
    """Name of the project there."""


class Log(Section):
    """What a run reports."""

    every: EveryText = "10 steps"
    """Interval between rows of metrics, as a duration or `10 min`."""
    wandb: Wandb = Wandb()
    """Weights & Biases."""


class Card(Section):
    """What the model card, `model/README.md`, cannot find out by itself."""

    license: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9.+-]*$")] | None = None
    """SPDX identifier of the model's license, such as `Apache-2.0`; null states none."""
    attribution: str | None = None
    """Who must be named, such as the makers of the training data."""
    description: str | None = None
    """What the model is and what it is for."""


class Config(Section):
    """One training run."""

    run: str = "runs/default"
    """Run folder. Running the same command again resumes the run in it."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of weights, order, augmentation and dropout."""
    model: RunModel
    """What is trained."""
    loss: Loss = ContrastiveSection(kind="contrastive")
    """Training objective."""
    data: Data
    """What it is trained on."""
    train: Train = Train()
    """How much is trained."""
    optim: Optim = Optim()
    """How the weights move."""
    evaluate: dict[str, Evaluation] = {}
    """Evaluations by name."""
    checkpoint: Checkpoint = Checkpoint()
    """When the state is saved."""
    log: Log = Log()
    """What is reported."""
    card: Card = Card()
    """What the model card says besides the facts."""

    @model_validator(mode="after")
    def _frozen_towers_are_trained(self):
        for side in ("image", "text"):
            tower = getattr(self.model, side)
            trained = getattr(tower, "pretrained", False)
            projected = getattr(self.model, f"{side}_projection") != "none"
            known = self.model.takes(side) or (trained and not projected)
            if side in self.train.freeze and not known:
                raise ValueError(
                    f"train.freeze={self.train.freeze} would keep random weights: a frozen {side} "
                    f"side needs model.{side}.pretrained=true (kind timm or hf) and "
                    f"model.{side}_projection=none, or weights of model.init"
                )
        return self

    @model_validator(mode="after")
    def _averages_have_their_names(self):
        taken = [name for name in self.evaluate if name.endswith(EMA_SUFFIX)]
        if taken:
            raise ValueError(
                f"evaluate.{taken[0]}: names that end in {EMA_SUFFIX} are those of evaluations of "
                "the averaged weights (train.ema); choose another one"
            )
        return self

    @model_validator(mode="after")
    def _sigmoid_has_a_bias(self):
        if self.loss.kind == "sigmoid" and self.model.logit_bias is None:
            raise ValueError(
                "loss.kind=sigmoid needs model.logit_bias; set auto, or a number (SigLIP: -10)"
            )
        return self
