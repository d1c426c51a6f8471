"""Image-text retrieval with any number of captions per picture, over all ranks.

Every caption of the data is a query for pictures, and every picture with a caption is a query for
captions. A picture's right captions are all captions whose text equals one of its own; a caption's
right pictures are all that have its text (Karpathy and Fei-Fei's protocol, arXiv 1412.2306, with
any of several captions as a hit; equal texts are equally right).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from multimodal import config
from multimodal.data.build import open_source
from multimodal.data.source import BadSample, Source
from multimodal.distributed import failing_together, gather_rows
from multimodal.evaluate.metrics import Ranks, rank_candidates, recall_at, recall_chance
from multimodal.evaluate.parts import (
    Progress,
    encode_texts,
    gather_features,
    gather_list,
    own_part,
)
from multimodal.weights.pretrained import Pretrained

RECALL_AT = (1, 5, 10)
RECALLS = tuple(f"{side}_retrieval_recall@{k}" for side in ("image", "text") for k in RECALL_AT)


class _Pictures(NamedTuple):
    features: Tensor
    """float32 [N, D]."""
    captions: list[tuple[str, ...]]
    """Of each of the N pictures."""
    skipped: int


def evaluate_retrieval(
    pretrained: Pretrained,
    section: config.Retrieval,
    *,
    batch_size: int,
    workers: int,
    progress: Progress,
) -> dict[str, float | int | None]:
    """Recall in both directions, the same on every rank.

    Returns:
        `image_retrieval_recall@k` (text to image) and `text_retrieval_recall@k` (image to text)
        for k of 1, 5 and 10, each with `<name>_chance`; `images`, `captions`, `text_candidates`
        (captions and those of `more_captions`) and `skipped` (samples that could not be used).

    Raises:
        ValueError: when no sample has both a readable picture and a caption.
    """
    source = open_source(section.data)
    pictures = _encode_pictures(pretrained, source, batch_size, workers, progress)
    own_texts = [text for captions in pictures.captions for text in captions]
    more_texts, unread = _captions(
        [open_source(source) for source in section.more_captions], progress
    )
    texts = own_texts + more_texts
    ids = {text: i for i, text in enumerate(dict.fromkeys(texts))}
    unique = encode_texts(pretrained, list(ids), progress)
    features = unique[[ids[text] for text in texts]]
    text_labels = [{ids[text]} for text in texts]
    image_labels = [{ids[text] for text in captions} for captions in pictures.captions]
    own = len(own_texts)
    to_image = _rank(pretrained, features[:own], pictures.features, text_labels[:own], image_labels)
    to_text = _rank(pretrained, pictures.features, features, image_labels, text_labels)
    return {
        **_recalls("image_retrieval", to_image, len(image_labels)),
        **_recalls("text_retrieval", to_text, len(texts)),
        "images": len(image_labels),
        "captions": own,
        "text_candidates": len(texts),
        "skipped": pictures.skipped + unread,
    }


def _encode_pictures(
    pretrained: Pretrained, source: Source, batch_size: int, workers: int, progress: Progress
) -> _Pictures:
    features, captions, skipped = [], [], 0
    with failing_together():
        for batch, encoded in pretrained.encode_source(
            source, own_part(len(source)), batch_size=batch_size, workers=workers
        ):
            usable = [i for i, texts in enumerate(batch.captions) if texts]
            features.append(encoded[usable])
            captions += [batch.captions[i] for i in usable]
            skipped += len(batch.skipped) + len(batch.keys) - len(usable)
            progress(len(batch.keys))
    captions = gather_list(captions)
    skipped = sum(gather_list([skipped])) + sum(source.problems.values())
    if not captions:
        raise ValueError(
            f"{source.description}: none of {len(source)} samples has a readable picture and a "
            "caption; check the source"
        )
    return _Pictures(gather_features(features, pretrained.model.embed_dim), captions, skipped)


def _captions(sources: Sequence[Source], progress: Progress) -> tuple[list[str], int]:
    """All captions of the sources, and how many samples could not be read."""
    texts, unread = [], 0
    with failing_together():
        for source in sources:
            for index in own_part(len(source)):
                try:
                    texts += source.read(index).captions
                except BadSample:
                    unread += 1
                progress(1)
    return gather_list(texts), sum(gather_list([unread]))


def _rank(
    pretrained: Pretrained,
    queries: Tensor,
    candidates: Tensor,
    query_labels: list[set[int]],
    candidate_labels: list[set[int]],
) -> Ranks:
    """Rank on the model's device, each rank a part of the queries."""
    part = own_part(len(queries))
    part = slice(part.start, part.stop)
    own = rank_candidates(
        queries[part].to(pretrained.device),
        candidates.to(pretrained.device),
        query_labels[part],
        candidate_labels,
    )
    return Ranks(*map(gather_rows, own))


def _recalls(name: str, ranks: Ranks, candidates: int) -> dict[str, float | None]:
    result = {}
    for k in RECALL_AT:
        result[f"{name}_recall@{k}"] = recall_at(ranks, k)
        result[f"{name}_recall@{k}_chance"] = recall_chance(ranks, candidates, k)
    return result
