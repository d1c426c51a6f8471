"""One call for any evaluation. It never trains, so a training loop can call it on all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import assert_never

from multimodal import config
from multimodal.evaluate.retrieval import evaluate_retrieval
from multimodal.evaluate.zero_shot import evaluate_zero_shot
from multimodal.weights.pretrained import Pretrained

Metrics = dict[str, float | int | None]


def evaluate(
    pretrained: Pretrained, section: config.Evaluation, *, batch_size: int = 64, workers: int = 0
) -> Metrics:
    """Run one evaluation; call it on all ranks, and all get the same figures.

    Args:
        pretrained: the model.
        section: what to evaluate on.
        batch_size: pictures encoded at once by each rank.
        workers: loader processes of each rank.

    Returns:
        Figures by name, as JSON values. One that does not exist, such as acc5 of 3 classes, is
        None.
    """
    match section:
        case config.Retrieval():
            return evaluate_retrieval(pretrained, section, batch_size=batch_size, workers=workers)
        case config.ZeroShot():
            return evaluate_zero_shot(pretrained, section, batch_size=batch_size, workers=workers)
        case _:
            assert_never(section)


def evaluate_all(
    pretrained: Pretrained,
    sections: Mapping[str, config.Evaluation],
    *,
    batch_size: int = 64,
    workers: int = 0,
) -> dict[str, Metrics]:
    """Run evaluations in their order and return the figures of each by its name."""
    return {
        name: evaluate(pretrained, section, batch_size=batch_size, workers=workers)
        for name, section in sections.items()
    }
