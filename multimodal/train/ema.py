"""An exponential moving average of the weights, which often does better than the weights.

    ema <- d * ema + (1 - d) * weights,   d = min(decay, (1 + n) / (10 + n)) after n updates

It starts with the weights after the first step. The warm-up of d is TensorFlow's
(`tf.train.ExponentialMovingAverage`): until `decay` is reached, after 9 / (1 - decay) steps, the
average reaches over a ninth of the run, so that the first weights do not linger in it.
"""

from __future__ import annotations

import logging

from torch import Tensor
from torch.optim.swa_utils import PARAM_LIST, AveragedModel, get_ema_multi_avg_fn

from multimodal.train.checkpoint import Checkpoint
from multimodal.weights.load import load_weights
from multimodal.weights.pretrained import Pretrained
from multimodal.weights.save import WEIGHTS_FILE

log = logging.getLogger(__name__)


def make_ema(decay: float, pretrained: Pretrained, found: Checkpoint | None) -> AveragedModel:
    """A new average of float32 weights, or the checkpoint's.

    When a run that had none is resumed with one, it starts with the next step's weights.

    Args:
        pretrained: the model as it is before it is wrapped or sharded.

    Raises:
        ValueError: when the checkpoint should hold an average and does not.
    """
    ema = AveragedModel(pretrained.model, multi_avg_fn=warming_up(decay))
    ema.requires_grad_(False)
    if found is None or found.state["config"]["train"].get("ema") is None:
        return ema
    updates = found.state.get("ema_updates")
    if updates is None or not (found.ema / WEIGHTS_FILE).is_file():
        raise ValueError(
            f"{found.path} was saved with train.ema, but "
            + ("state.json has no ema_updates" if updates is None else "it has no ema/ weights")
            + "; restore it from a copy, remove it to go on from the one before, or resume with "
            "train.ema=null"
        )
    load_weights(ema.module, found.ema / WEIGHTS_FILE)
    ema.n_averaged.fill_(updates)
    return ema


def decay_after(updates: int, decay: float) -> float:
    """The decay of an update that follows `updates` others."""
    return min(decay, (1 + updates) / (10 + updates))


def warming_up(decay: float):
    """What `AveragedModel` takes as `multi_avg_fn`."""

    def update(averaged: PARAM_LIST, current: PARAM_LIST, updates: Tensor | int) -> None:
        get_ema_multi_avg_fn(decay_after(int(updates), decay))(averaged, current, updates)

    return update
