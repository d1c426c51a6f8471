"""The steps of a run with the best values of a metric, as metrics.jsonl has them."""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Iterable

from multimodal.config import Best, Config
from multimodal.evaluate.run import rate_names
from multimodal.train.report import Row
from multimodal.train.run_weights import EMA_SUFFIX, evaluation_names


def check_best(config: Config) -> None:
    """See that the metric of `checkpoint.best` will be there.

    Raises:
        ValueError: when no evaluation gives it, naming the nearest that are, or not on the way.
    """
    best = config.checkpoint.best
    if best is None:
        return
    sections = config.evaluate
    names = [
        f"{name}/{rate}"
        for name in evaluation_names(config)
        for rate in rate_names(sections[name.removesuffix(EMA_SUFFIX)])
    ]
    if best.metric not in names:
        near = difflib.get_close_matches(best.metric, names, n=2, cutoff=0.5)
        meant = f"did you mean {' or '.join(near)}? " if near else ""
        raise ValueError(
            f"checkpoint.best.metric={best.metric!r} is given by no evaluation; {meant}"
            f"there are {', '.join(names) or 'no evaluations (set evaluate.NAME)'}"
        )
    name = best.metric.partition("/")[0].removesuffix(EMA_SUFFIX)
    if sections[name].every is None:
        raise ValueError(
            f"checkpoint.best.metric={best.metric!r} needs more than one value, but {name} is "
            f'evaluated at the end only; set evaluate.{name}.every, such as "1 epochs"'
        )


def metric_values(best: Best, rows: Iterable[Row]) -> dict[int, float]:
    """The metric by step; a value that is no number is left out."""
    name, _, metric = best.metric.partition("/")
    values = {row["step"]: row.get(metric) for row in rows if row.get("eval") == name}
    return {step: x for step, x in values.items() if x is not None and math.isfinite(x)}


def best_steps(best: Best, values: dict[int, float], steps: Collection[int]) -> list[int]:
    """The `best.keep` of `steps` with the best values, best first; of equal ones the earlier."""
    sign = -1 if best.mode == "max" else 1
    ranked = sorted((step for step in steps if step in values), key=lambda s: (sign * values[s], s))
    return ranked[: best.keep]
