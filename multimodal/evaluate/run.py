"""One call for any evaluation. It never trains, so a training loop can call it on all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import assert_never

from multimodal import config
from multimodal.evaluate.parts import Progress
from multimodal.evaluate.retrieval import RECALLS, evaluate_retrieval
from multimodal.evaluate.zero_shot import evaluate_zero_shot, rates
from multimodal.weights.pretrained import Pretrained

Metrics = dict[str, float | int | None]


def evaluate(
    pretrained: Pretrained,
    section: config.Evaluation,
    *,
    batch_size: int = 64,
    workers: int = 0,
    progress: Progress = lambda count: None,
) -> Metrics:
    """Run one evaluation; call it on all ranks, and all get the same figures.

    Args:
        pretrained: the model.
        section: what to evaluate on.
        batch_size: pictures encoded at once by each rank.
        workers: loader processes of each rank.
        progress: told now and then how many pictures or texts this rank has done; what it raises on
            one rank ends the evaluation on all.

    Returns:
        Figures by name, as JSON values. One that does not exist, such as acc5 of 3 classes, is
        None.
    """
    how = {"batch_size": batch_size, "workers": workers, "progress": progress}
    match section:
        case config.Retrieval():
            return evaluate_retrieval(pretrained, section, **how)
        case config.ZeroShot():
            return evaluate_zero_shot(pretrained, section, **how)
        case _:
            assert_never(section)


def rate_names(section: config.Evaluation) -> tuple[str, ...]:
    """Names of the rates (more is better) that an evaluation gives."""
    match section:
        case config.Retrieval():
            return RECALLS
        case config.ZeroShot():
            return rates(section)
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
