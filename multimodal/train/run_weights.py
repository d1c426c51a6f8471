"""The weights of a run: those that train and their average, whole or in parts on the ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from accelerate import Accelerator
from torch import nn

from multimodal.config import EMA_SUFFIX, Config
from multimodal.train.checkpoint import Checkpoint
from multimodal.train.ema import make_ema
from multimodal.train.sharding import Skeleton, is_sharded, prepare_model, shard_model
from multimodal.weights.pretrained import Pretrained


def evaluation_names(config: Config) -> list[str]:
    """Names of all evaluations' rows: of the weights and of their average."""
    suffixes = ("",) if config.train.ema is None else ("", EMA_SUFFIX)
    return [name + suffix for name in config.evaluate for suffix in suffixes]


class RunWeights:
    """What an optimiser moves, and what follows it.

    Attributes:
        pretrained: the model that trains; its parameters are sharded once `distribute` was called
            and the launcher asks for it.
        ema: the average, likewise; None without `train.ema`.
    """

    def __init__(self, pretrained: Pretrained, *, decay: float | None, found: Checkpoint | None):
        self.pretrained = pretrained
        self.ema = None if decay is None else make_ema(decay, pretrained, found)
        self._skeleton = Skeleton(pretrained.model) if is_sharded() else None

    def distribute(self, accelerator: Accelerator) -> nn.Module:
        """Spread over the ranks as the launcher asks; the model to call in training."""
        if self.ema is not None and is_sharded():
            shard_model(self.ema.module, accelerator)
        return prepare_model(self.pretrained.model.train(), accelerator)

    def update(self) -> None:
        """Let the average follow; call it after each step that changed the weights."""
        if self.ema is not None:
            self.ema.update_parameters(self.pretrained.model)

    def usable(self) -> Iterator[tuple[str, Pretrained]]:
        """Each set of weights with its suffix, the average last, as a model to use on any rank.

        Go through it on all ranks. The weights that train are never touched, so there is nothing
        to put back, whatever happens to the copies.
        """
        yield "", self._usable(self.pretrained.model)
        if self.ema is not None:
            yield EMA_SUFFIX, self._usable(self.ema.module)

    def _usable(self, model: nn.Module) -> Pretrained:
        whole = model if self._skeleton is None else self._skeleton.whole(model)
        return replace(self.pretrained, model=whole)
