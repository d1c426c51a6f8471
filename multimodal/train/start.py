"""What a run starts from: its data, its tokenizer and its weights, new or from a checkpoint."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader

from multimodal import config
from multimodal.config import Config
from multimodal.data.batch import Batch
from multimodal.data.build import open_source, open_training
from multimodal.data.first_look import sources_in
from multimodal.data.loader import train_loader
from multimodal.data.mixture import MixtureSource
from multimodal.data.shared_index import index_together
from multimodal.data.source import BadSample
from multimodal.data.stream import Streamed, StreamSource, TrainingSource
from multimodal.data.tar_index import LOST
from multimodal.data.text import Tokenizer, build_tokenizer
from multimodal.data.transforms import ImageTransform
from multimodal.distributed import gather_objects, main_first, on_main, rank, world_size
from multimodal.evaluate.zero_shot import check_labels
from multimodal.losses.sigmoid import initial_bias
from multimodal.models.build import build_model
from multimodal.models.two_tower import TwoTower
from multimodal.train.best import check_best
from multimodal.train.checkpoint import Checkpoint
from multimodal.train.parameters import Treatment, treatments
from multimodal.train.watchdog import timeout_seconds
from multimodal.weights.describe import describe
from multimodal.weights.init import check_init, start_from, tokenizer_of
from multimodal.weights.load import load
from multimodal.weights.pretrained import Pretrained

log = logging.getLogger(__name__)

_STALLED_SHARE = 0.8
"""Of `train.timeout`, after which a loader says which worker is stuck, before the watchdog ends."""
_TOKENIZER_SAMPLES = 200_000
"""Samples whose captions train a tokenizer, spread evenly over the data; of a stream, the first."""


def open_data(whole: Config) -> TrainingSource:
    """Open the training data, and see that the evaluations' data is there before hours are spent.

    Shards that have no index yet are scanned by all ranks together, each a part of them.

    Raises:
        ValueError: on all ranks, when a source cannot be opened or too many shards are lost.
    """
    parts = sources_in([whole.data.train, whole.evaluate])
    for path in dict.fromkeys(p.path for p in parts if isinstance(p, config.ShardsSource)):
        index_together(path)
    source = main_first(lambda: open_training(whole.data.train))
    check_shards(source, whole.data)
    on_main(lambda: check_evaluations(whole))
    return source


def check_shards(source: TrainingSource, data: config.Data) -> None:
    """Samples of lost shards are as lost as unreadable ones, though nobody knows their number.

    Raises:
        ValueError: when a larger share of the shards is lost than of samples may be, or a stream
            has fewer shards than there are processes.
    """
    if isinstance(source, StreamSource):
        source.workers(data.workers, world_size())
    for part in source.sources if isinstance(source, MixtureSource) else [source]:
        lost = sum(part.problems.get(reason, 0) for reason in LOST)
        if lost > data.max_skipped * len(part.groups()):
            raise ValueError(
                f"{part.description}: {lost} of {len(part.groups())} shards are missing, cut or "
                f"damaged, more than data.max_skipped={data.max_skipped} allows; repair them, "
                "name only the others in data.train.path, or raise data.max_skipped"
            )


def check_evaluations(whole: Config) -> None:
    """Open the data of all evaluations, and see that they give what the checkpoints need.

    Raises:
        ValueError: naming the evaluation, when its data or labels do not fit.
    """
    check_best(whole)
    for name, section in whole.evaluate.items():
        for data in (section.data, *getattr(section, "more_captions", ())):
            try:
                source = open_source(data)
                if isinstance(section, config.ZeroShot):
                    check_labels(source, section)
            except ValueError as error:
                raise ValueError(f"evaluate.{name}: {error}") from error


def check_fingerprint(source: TrainingSource, found: Checkpoint | None) -> str:
    """The fingerprint of the training data, once all ranks and the checkpoint agree on it.

    Raises:
        ValueError: on all ranks, when they do not.
    """
    own = source.fingerprint()
    if len(set(gather_objects(own))) > 1:
        raise ValueError(
            f"{source.description} differs between the processes' machines; give all the same data"
        )
    if found is not None and found.state["data"]["fingerprint"] != own:
        before = found.state["data"]
        raise ValueError(
            f"the training data has changed since {found.path}: {before['description']} held "
            f"{before['samples']} samples, {source.description} holds {len(source)}, and names, "
            "sizes or counts differ, so the order of samples cannot go on; restore the data, or "
            "start a new run with run=..."
        )
    return own


def starting_model(
    config: Config, source: TrainingSource, found: Checkpoint | None, device: torch.device
) -> Pretrained:
    """The model on its device with its tokenizer: the checkpoint's, or new and seeded.

    A new one takes from `model.init` what the settings say.
    """
    if found is not None:
        pretrained = load(found.model, device=device)
        _refuse_batch_norm(pretrained.model)
        return pretrained
    section, init = config.model.plain(), config.model.init
    if section.logit_bias == "auto":
        bias = initial_bias(config.train.batch_size)
        section = section.model_copy(update={"logit_bias": bias})
    theirs = None if init is None else main_first(lambda: load(init))
    if theirs is not None and config.model.takes("text"):
        tokenizer = tokenizer_of(theirs, section)
    else:
        tokenizer = _new_tokenizer(config, source)
    torch.manual_seed(config.seed)
    new = theirs is None
    model = build_model(section) if new else start_from(theirs, config.model, section)
    _refuse_batch_norm(model)
    return Pretrained(
        model=model.to(device),
        transform=ImageTransform(section.image.image_size, section.preprocess),
        tokenizer=tokenizer,
        config=section,
    )


def prepare(model: TwoTower, train: config.Train, optim: config.Optim) -> dict[str, Treatment]:
    """What the settings of training change about a model; how they treat its parameters.

    Raises:
        ValueError: when `optim.groups` do not fit the model's parameters.
    """
    treated = treatments(model, optim, train.freeze)
    model.checkpoint_activations(train.checkpoint_activations)
    model.freeze(name for name, how in treated.items() if how.frozen)
    if train.compile:
        # Else compiled dropout would draw other numbers than plain dropout.
        model.compile(options={"fallback_random": True})
    return treated


def training_batches(
    config: Config, source: TrainingSource, pretrained: Pretrained, *, start: int, end: int
) -> DataLoader[Batch]:
    """Loader of this rank's batches of the steps in [start, end)."""
    model, limit = config.model, timeout_seconds(config.train.timeout)
    return train_loader(
        source,
        data=config.data,
        transform=ImageTransform(model.image.image_size, model.preprocess, config.data.augment),
        tokenizer=pretrained.tokenizer,
        batch_size=config.train.batch_size,
        start_step=start,
        end_step=end,
        rank=rank(),
        world_size=world_size(),
        seed=config.seed,
        stalled=0 if limit is None else _STALLED_SHARE * limit,
    )


def _refuse_batch_norm(model: nn.Module) -> None:
    """With several processes its statistics are of a part of the batch, and the gradient is wrong.

    Raises:
        ValueError: when there are several processes and the model has one.
    """
    kind = nn.modules.batchnorm._BatchNorm
    names = [name for name, module in model.named_modules() if isinstance(module, kind)]
    if names and world_size() > 1:
        raise ValueError(
            f"{names[0]} and {len(names) - 1} more layers are batch normalisations, which make a "
            "run depend on the number of processes; train in one process, or choose a tower with "
            "layer normalisation, such as a ViT or a ConvNeXt"
        )


def check_start(config: Config) -> None:
    """See that a new run's parts can be had and fit each other, before anything is written.

    A run that has checkpoints resumes with the model and the tokenizer in them.

    Raises:
        ValueError: on all ranks, when a tokenizer cannot be had, or `model.init` does not fit.
    """
    on_main(lambda: _has_checkpoints(config.run) or _check_start(config))


def _check_start(config: Config) -> None:
    if config.model.init is not None:
        check_init(config.model, describe(config.model.init))
    if not config.model.takes("text"):
        _build_tokenizer(config, captions=())


def _has_checkpoints(run: str) -> bool:
    return any(Path(run, "checkpoints").glob("step-*"))


def _new_tokenizer(config: Config, source: TrainingSource) -> Tokenizer:
    """Built on rank 0; the others read what it saved."""
    with tempfile.TemporaryDirectory() as folder:

        def build() -> tuple[dict, dict[str, bytes]]:
            captions = _training_texts(source, config.data.templates)
            tokenizer = _build_tokenizer(config, captions)
            tokenizer.save(Path(folder))
            return tokenizer.settings(), {p.name: p.read_bytes() for p in Path(folder).iterdir()}

        settings, files = on_main(build)
        for name, content in files.items():
            (Path(folder) / name).write_bytes(content)
        return Tokenizer.load(Path(folder), settings)


def _build_tokenizer(whole: Config, captions: Iterable[str]) -> Tokenizer:
    text = whole.model.text
    ours = isinstance(text, config.TransformerText)
    return build_tokenizer(
        whole.model.tokenizer,
        context_length=text.context_length,
        fixed_length=ours and text.fixed_length,
        vocab_size=text.vocab_size if ours else None,
        captions=captions,
    )


def _training_texts(source: TrainingSource, templates: list[str]) -> Iterator[str]:
    """Captions in their templates, of an even sample of the data."""
    for index, captions in _some_captions(source):
        for number, caption in enumerate(captions):
            yield templates[(index + number) % len(templates)].replace("{}", caption)


def _some_captions(source: TrainingSource) -> Iterator[tuple[int, tuple[str, ...]]]:
    if isinstance(source, StreamSource):
        for index, item in enumerate(islice(source.examples(), _TOKENIZER_SAMPLES)):
            yield index, item.sample.captions if isinstance(item, Streamed) else ()
        return
    stride = max(1, len(source) // _TOKENIZER_SAMPLES)
    for index in range(0, len(source), stride):
        try:
            yield index, source.read(index).captions
        except BadSample:
            continue
