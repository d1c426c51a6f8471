"""A model in use: pictures and texts in, unit vectors and probabilities out.

Legend: N pictures or texts, C classes, D embedding size, S image size, B batch, L tokens.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from jaxtyping import Float32, Int64, UInt8
from PIL import Image
from torch import Tensor

from multimodal import config
from multimodal.data.batch import EvalBatch
from multimodal.data.decode import from_pil
from multimodal.data.loader import eval_loader
from multimodal.data.source import BadSample, Source
from multimodal.data.text import Tokenizer
from multimodal.data.transforms import ImageTransform
from multimodal.models.two_tower import TwoTower

DEFAULT_TEMPLATE = "a photo of {}."
_SORT_WINDOW = 64
"""Batches of text that are tokenised together and sorted by length."""

Picture = str | Path | bytes | Image.Image


@dataclass(frozen=True)
class Pretrained:
    """A model with what turns files into its inputs.

    Making one copies nothing, so a training loop can wrap its live model in it. All methods work in
    evaluation mode without gradients, and leave the mode of every module as it was.
    """

    model: TwoTower = field(repr=False)
    transform: ImageTransform
    tokenizer: Tokenizer
    config: config.Model

    def __post_init__(self):
        rows = self.model.text.vocab_size
        if self.tokenizer.vocab_size > rows:
            raise ValueError(
                f"the tokenizer has {self.tokenizer.vocab_size} ids and the text tower {rows} "
                "embeddings, so they do not belong together; set model.tokenizer to the tower's own"
            )

    @property
    def device(self) -> torch.device:
        """Where the model's weights are."""
        return self.model.temperature.logit_scale.device

    def encode_image(
        self, images: Sequence[Picture], batch_size: int = 64
    ) -> Float32[Tensor, "N D"]:
        """Embed pictures.

        Args:
            images: paths, encoded bytes (JPEG, PNG, ...) or PIL images, in any mix.
            batch_size: pictures encoded at once.

        Returns:
            Unit vectors on the CPU.

        Raises:
            ValueError: when one cannot be read, naming it.
        """
        images = _listed(images, "images", Picture)
        features = torch.empty(len(images), self.model.embed_dim)
        for start in range(0, len(images), batch_size):
            chunk = images[start : start + batch_size]
            pixels = [self._pixels(image, start + i) for i, image in enumerate(chunk)]
            features[start : start + len(chunk)] = self._embed_pixels(torch.stack(pixels))
        return features

    def readable(self, paths: Sequence[Path]) -> tuple[list[Path], dict[Path, str]]:
        """Sort picture files into those that can be read and those that cannot, with the reason.

        Raises:
            ValueError: when none can be read.
        """
        good: list[Path] = []
        broken: dict[Path, str] = {}
        for index, path in enumerate(paths):
            try:
                self._pixels(path, index)
                good.append(path)
            except ValueError as error:
                broken[path] = str(error.__cause__)
        if not good:
            raise ValueError("; ".join(f"{path}: {reason}" for path, reason in broken.items()))
        return good, broken

    def encode_source(
        self, source: Source, indices: Sequence[int], *, batch_size: int, workers: int
    ) -> Iterator[tuple[EvalBatch, Float32[Tensor, "n D"]]]:
        """Embed the pictures of a source.

        Yields:
            Batches in the order of `indices`, each with unit vectors on the CPU for the samples
            that could be read; the others are in its `skipped`.
        """
        loader = eval_loader(
            source,
            indices=indices,
            transform=self.transform,
            batch_size=batch_size,
            workers=workers,
        )
        for batch in loader:
            features = torch.empty(len(batch.keys), self.model.embed_dim)
            if len(batch.keys):
                features[:] = self._embed_pixels(batch.images)
            yield batch, features

    def encode_text(self, texts: Sequence[str], batch_size: int = 256) -> Float32[Tensor, "N D"]:
        """Embed texts, those of similar length together.

        Returns:
            Unit vectors on the CPU.
        """
        texts = _listed(texts, "texts", str)
        features = torch.empty(len(texts), self.model.embed_dim)
        for start in range(0, len(texts), batch_size * _SORT_WINDOW):
            window = texts[start : start + batch_size * _SORT_WINDOW]
            tokens, lengths = self.tokenizer.encode(window)
            order = lengths.argsort(stable=True)
            for rows in order.split(batch_size):
                length = self._padded_length(tokens.shape[1], int(lengths[rows].max()))
                features[start + rows] = self._embed_tokens(tokens[rows, :length], lengths[rows])
        return features

    def class_embeddings(
        self, labels: Sequence[str], templates: Sequence[str] | None = None
    ) -> Float32[Tensor, "C D"]:
        """One vector for each class: the mean over its prompts' vectors, at unit length.

        Args:
            labels: class names.
            templates: prompts with `{}` or `{c}` where the name goes; by default
                "a photo of {}.".

        Returns:
            Unit vectors on the CPU.

        Raises:
            ValueError: without labels or templates, when a label is there twice, or when a template
                has no place for the name.
        """
        labels = _listed(labels, "labels", str)
        templates = (
            [DEFAULT_TEMPLATE] if templates is None else _listed(templates, "templates", str)
        )
        if not labels or not templates:
            raise ValueError(
                f"{len(labels)} labels and {len(templates)} templates; give at least 1"
            )
        refuse_repeated("labels", labels)
        prompts = [fill(template, label) for label in labels for template in templates]
        features = self.encode_text(prompts).unflatten(0, (len(labels), len(templates)))
        return torch.nn.functional.normalize(features.mean(dim=1), dim=-1)

    def classify(
        self,
        images: Sequence[Picture],
        labels: Sequence[str],
        templates: Sequence[str] | None = None,
    ) -> Float32[Tensor, "N C"]:
        """Probabilities of class names for pictures.

        The softmax over the labels of logit_scale * cosine, so each row sums to 1 and depends on
        which labels compete. That holds for models trained with the sigmoid loss too: their
        `logit_bias` is the same for all labels and cancels.

        Returns:
            Probabilities on the CPU.
        """
        classes = self.class_embeddings(labels, templates)
        return (self.logit_scale() * self.encode_image(images) @ classes.T).softmax(dim=-1)

    def logit_scale(self) -> float:
        """Factor on the cosine similarities."""
        return self.model.temperature()[0].item()

    def logit_bias(self) -> float | None:
        """Offset of the logits, of models trained with the sigmoid loss."""
        bias = self.model.temperature()[1]
        return None if bias is None else bias.item()

    def fingerprint(self) -> str:
        """SHA-256 over the names, types, shapes and bytes of all weights, in order of name."""
        digest = hashlib.sha256()
        for name, tensor in sorted(self.model.state_dict().items()):
            digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
            flat = tensor.detach().cpu().contiguous().flatten()
            digest.update(flat.view(torch.uint8).numpy())
        return digest.hexdigest()

    def _pixels(self, image: Picture, index: int) -> UInt8[Tensor, "3 S S"]:
        try:
            if isinstance(image, Image.Image):
                return self.transform.apply(from_pil(image))
            return self.transform(image if isinstance(image, bytes) else Path(image).read_bytes())
        except (OSError, BadSample) as error:
            name = image if isinstance(image, str | Path) else f"<{type(image).__name__}>"
            raise ValueError(f"image {index} ({name}) cannot be used: {error}") from error

    def _embed_pixels(self, images: UInt8[Tensor, "B 3 S S"]) -> Float32[Tensor, "B D"]:
        with inference(self.model):
            return self.model.encode_image(images.to(self.device)).float().cpu()

    def _embed_tokens(
        self, tokens: Int64[Tensor, "B L"], lengths: Int64[Tensor, "B"]
    ) -> Float32[Tensor, "B D"]:
        with inference(self.model):
            features = self.model.encode_text(tokens.to(self.device), lengths.to(self.device))
            return features.float().cpu()

    def _padded_length(self, padded: int, longest: int) -> int:
        """Columns that a batch of texts keeps, as the tokenizer would have padded it alone."""
        return padded if self.tokenizer.fixed_length else min(padded, -(-longest // 8) * 8)


def refuse_repeated(name: str, values: Sequence[str]) -> None:
    """Raise a ValueError when a value is there twice: equal classes can only tie."""
    repeated = sorted(value for value, count in Counter(values).items() if count > 1)
    if repeated:
        raise ValueError(f"{name} holds {repeated} more than once; keep one of each")


def fill(template: str, label: str) -> str:
    """Put a class name into a prompt; other braces stay as they are.

    Raises:
        ValueError: when the template has neither `{}` nor `{c}`.
    """
    for place in ("{}", "{c}"):
        if place in template:
            return template.replace(place, label)
    raise ValueError(
        f"template {template!r} has no place for the class name; write {{}} or {{c}} there"
    )


def _listed(items: Sequence, name: str, kind: type) -> list:
    """A list of the items, refusing a lone one: a single text is also a sequence of texts."""
    if isinstance(items, kind):
        raise TypeError(f"{name} is one {type(items).__name__}; give a list, such as [{name}]")
    items = list(items)
    for index, item in enumerate(items):
        if not isinstance(item, kind):
            raise TypeError(f"{name}[{index}] is a {type(item).__name__}; allowed: {kind}")
    return items


@contextmanager
def inference(model: torch.nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; afterwards every module is in the mode it was in."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.inference_mode():
            yield
    finally:
        for module in training:
            module.training = True
