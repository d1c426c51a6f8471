"""The evaluations of a run: those that are due at a step, and its end."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from matplotlib.figure import FigureBase

from multimodal.config import Config, Retrieval
from multimodal.data.build import open_source
from multimodal.data.stream import TrainingSource
from multimodal.distributed import on_main
from multimodal.evaluate.parts import Progress
from multimodal.evaluate.report import draw_predictions, first_captions, print_results
from multimodal.evaluate.run import evaluate
from multimodal.train.card import data_terms, model_card
from multimodal.train.checkpoint import Checkpoint
from multimodal.train.curves import write_report
from multimodal.train.report import Report, Row, read_rows
from multimodal.train.run_folder import publish_model, read_results, write_results
from multimodal.train.run_weights import RunWeights, evaluation_names
from multimodal.train.schedule import Schedule
from multimodal.weights.pretrained import Pretrained

log = logging.getLogger(__name__)


def evaluate_due(
    config: Config,
    schedule: Schedule,
    weights: RunWeights,
    report: Report,
    step: int,
    minutes: tuple[float, float] = (0.0, 0.0),
    *,
    progress: Progress,
) -> bool:
    """Run the evaluations that belong to a step and have no row yet; whether any belong to it.

    Each is of the weights that train and of their average, in a row of its own.

    They come after the checkpoint, which a broken evaluation then cannot cost; a run that was
    stopped between the two makes up for them when it resumes.

    Args:
        progress: may raise StopRequested on any rank, which ends them on all.

    Raises:
        StopRequested: on all ranks, when a signal has asked one of them to stop.
    """
    sections = config.evaluate.items()
    due = [name for name, s in sections if schedule.is_time(s.every, step, minutes=minutes)]
    if due:
        done = on_main(lambda: _evaluations_at(Path(config.run), step))
        workers = config.data.workers
        for suffix, pretrained in weights.usable():
            for name in (n for n in due if n + suffix not in done):
                section = config.evaluate[name]
                figures = evaluate(pretrained, section, workers=workers, progress=progress)
                report.evaluation(step, name + suffix, figures)
    return bool(due)


def finish(config: Config, weights: RunWeights, source: TrainingSource, last: Checkpoint) -> None:
    """Write what is left of the run: results, report, the model, which is the average if any."""
    run = Path(config.run)
    *_, (suffix, pretrained) = weights.usable()

    def write() -> None:
        found = _evaluations_at(run, last.step)
        results = {name: found[name] for name in evaluation_names(config)}
        write_results(run, results)
        pictures = _picture_sheet(config, pretrained)
        write_report(run, read_rows(run / "metrics.jsonl"), pictures)
        card = model_card(
            config,
            state=last.state,
            results={name + suffix: results[name + suffix] for name in config.evaluate},
            parameters=pretrained.model.parameter_counts(),
            terms=data_terms(source),
        )
        publish_model(run, last.path, card)

    on_main(write)
    log.info("finished: %s after %d steps; the model is in %s", run, last.step, run / "model")
    if weights.ema is not None:
        log.info("it has the averaged weights (train.ema); those that trained: %s", last.model)
    on_main(lambda: print_results(read_results(run)))


def _picture_sheet(config: Config, pretrained: Pretrained) -> Callable[[FigureBase], None] | None:
    """What draws pictures of the first retrieval evaluation with their most probable captions."""
    for section in config.evaluate.values():
        if isinstance(section, Retrieval):
            source = open_source(section.data)
            captions = first_captions(source)
            return lambda figure: draw_predictions(pretrained, source, captions, figure)
    return None


def _evaluations_at(run: Path, step: int) -> dict[str, Row]:
    rows = [r for r in read_rows(run / "metrics.jsonl") if r["step"] == step and "eval" in r]
    return {r["eval"]: {k: v for k, v in r.items() if k not in ("step", "eval")} for r in rows}
