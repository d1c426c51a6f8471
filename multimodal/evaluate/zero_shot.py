"""Zero-shot classification: the class whose prompts are nearest to the picture (arXiv 2103.00020,
section 3.1), over all ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from multimodal import config
from multimodal.data.build import open_source
from multimodal.data.source import BadSample, Source
from multimodal.distributed import failing_together
from multimodal.evaluate.metrics import accuracy, class_ranks
from multimodal.evaluate.parts import Progress, gather_features, gather_list, own_part
from multimodal.weights.pretrained import Pretrained, refuse_repeated


def evaluate_zero_shot(
    pretrained: Pretrained,
    section: config.ZeroShot,
    *,
    batch_size: int,
    workers: int,
    progress: Progress,
) -> dict[str, float | int | None]:
    """Accuracy of the class names, the same on every rank.

    Returns:
        The figures of `metrics.accuracy`, and `skipped`, the number of samples that could
        not be used.

    Raises:
        ValueError: when a sample's label is not one of the classes, a class is there twice, or no
            sample can be read.
    """
    classes = _class_embeddings(pretrained, section)
    rows = {name: row for row, name in enumerate(section.classes)}
    source = open_source(section.data)
    ranks, labels, skipped = [], [], 0
    with failing_together():
        for batch, features in pretrained.encode_source(
            source, own_part(len(source)), batch_size=batch_size, workers=workers
        ):
            own = [
                class_row(meta, section.label, rows, key)
                for meta, key in zip(batch.metas, batch.keys, strict=True)
            ]
            if own:
                ranks += class_ranks(features @ classes.T, torch.tensor(own)).tolist()
            labels += own
            skipped += len(batch.skipped)
            progress(len(batch.keys))
    labels = gather_list(labels)
    if not labels:
        raise ValueError(
            f"{source.description}: none of {len(source)} samples can be read; check the source"
        )
    result = accuracy(torch.tensor(gather_list(ranks)), torch.tensor(labels), len(classes))
    skipped = sum(gather_list([skipped])) + sum(source.problems.values())
    return {**result, "skipped": skipped}


def rates(section: config.ZeroShot) -> tuple[str, ...]:
    """Names of the accuracies that these classes can have."""
    of_five = ("acc5",) if len(section.classes) >= 5 else ()
    return ("acc1", *of_five, "mean_per_class_recall")


def _class_embeddings(pretrained: Pretrained, section: config.ZeroShot) -> Tensor:
    """float32 [C, D] on the CPU; each rank encodes a part of the classes."""
    refuse_repeated("classes", section.classes)
    part = own_part(len(section.classes))
    names = section.classes[part.start : part.stop]
    with failing_together():
        own = [pretrained.class_embeddings(names, section.templates)] if names else []
    return gather_features(own, pretrained.model.embed_dim)


def check_labels(source: Source, section: config.ZeroShot, *, samples: int = 200) -> None:
    """See that the labels of some samples, spread over the source, are classes.

    Raises:
        ValueError: when one is not, or a class is there twice.
    """
    refuse_repeated("classes", section.classes)
    rows = {name: row for row, name in enumerate(section.classes)}
    for index in range(0, len(source), max(1, len(source) // samples)):
        try:
            sample = source.read(index)
        except BadSample:
            continue
        class_row(sample.meta, section.label, rows, sample.key)


def class_row(meta: dict, field: str, rows: dict[str, int], key: str) -> int:
    """Row of a sample's class: a text is a class name, or else the number of its row.

    Raises:
        ValueError: when the field is missing or its value is neither.
    """
    if field not in meta:
        raise ValueError(
            f"sample {key!r} has no field {field!r} for its class; its fields are "
            f"{sorted(meta) or 'none'}: set `label` to the right one"
        )
    value = meta[field]
    if isinstance(value, str) and value in rows:
        return rows[value]
    text = str(value).strip()
    if text.isdecimal() and int(text) < len(rows):
        return int(text)
    raise ValueError(
        f"sample {key!r} has {field}={value!r}, which is neither one of the {len(rows)} class "
        f"names ({', '.join(list(rows)[:5])}, ...) nor a row of them; correct `classes` or `label`"
    )
