"""Whether a model gives the same here and in another library, whichever way it was converted.

`Theirs` describes the model as the other library reads it, `compare` gives one row for each thing
that can differ. With a wrong activation, epsilon or end token weights load without a complaint, so
every conversion ends here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from PIL import Image
from torch import Tensor

from multimodal.data.decode import from_pil
from multimodal.models.two_tower import TwoTower, normalise, unit_length
from multimodal.weights import parity_inputs as inputs
from multimodal.weights.pretrained import Pretrained, inference

TOLERANCE = 1e-5
"""Largest distance of two unit vectors that come from equal inputs. float32 gives about 1e-6."""
_GREY = 0.1
"""Largest mean difference of a picture's prepared pixels, in grey levels.

The rounding of Pillow and PyTorch differs by 0.01, bicubic and bilinear resampling by 0.6 and more.
"""
_SAME_GREY = 1e-3
"""The same where nothing is scaled, so that all is arithmetic."""
_OWN_WAY = 0.05
"""Largest distance of two unit vectors where each side prepared the picture itself."""
_SCORE = 1e-3
"""Largest difference of two probabilities for a picture that needs no scaling."""
_LABELS = ["cat", "dog", "sea", "a red square", "two dogs on a beach", "a photo of a cat."]


@dataclass(frozen=True, kw_only=True)
class Theirs:
    """A model as another library reads it. What is None, it does not have, and is not compared."""

    library: str
    """Name and version, such as `transformers 5.24.0`."""
    image: Callable[[Tensor], Tensor] | None = None
    """Normalised pixels [B, 3, S, S] to features [B, D] of any length."""
    text: Callable[[Tensor, Tensor], Tensor] | None = None
    """Tokens [T, L] and lengths [T] to features [T, D] of any length."""
    pixels: Callable[[list[Image.Image]], Tensor] | None = None
    """Its own preprocessing: pictures to normalised pixels [B, 3, S, S]."""
    tokens: Callable[[list[str]], list[list[int]]] | None = None
    """Its own tokenizer: each text's ids up to and with the end token, cut to the context."""
    embed_images: Callable[[list[Image.Image]], Tensor] | None = None
    """Pictures to features in one call of the library, if it has one."""
    embed_texts: Callable[[list[str]], Tensor] | None = None
    """Texts to features in one call of the library, if it has one."""
    scores: Callable[[Image.Image, list[str]], list[float]] | None = None
    """A picture's scores for these texts, which are used as they are and fit into the context."""
    logit_scale: float | None = None
    """Factor on the similarities, not its logarithm."""
    logit_bias: float | None = None
    """Offset of the logits."""
    tolerance: float = TOLERANCE
    """Largest distance of two unit vectors that come from equal inputs."""
    any_length: bool = True
    """Whether `text` takes tokens that are not padded to the context length."""
    unescapes: bool | None = None
    """Whether its tokenizer turns HTML entities into characters."""
    known: Mapping[str, str] = field(default_factory=dict)
    """Kinds of input (see `parity_inputs`) that differ by design, with the reason."""


@dataclass(frozen=True)
class Row:
    """One comparison."""

    what: str
    difference: float
    tolerance: float
    reason: str | None = None
    """Why a difference is as it must be; such a row does not fail."""

    @property
    def equal(self) -> bool:
        """Whether the difference is within the tolerance; NaN is not."""
        return self.difference <= self.tolerance

    @property
    def passed(self) -> bool:
        """Whether it is equal, or known to differ."""
        return self.equal or self.reason is not None

    def as_dict(self) -> dict:
        """Plain JSON values; a difference that is no number is null."""
        found = {"what": self.what, "difference": self.difference, "tolerance": self.tolerance}
        if not math.isfinite(self.difference):
            found["difference"] = None
        if self.reason is not None and not self.equal:
            found["known_difference"] = self.reason
        return found | {"passed": self.passed}

    def line(self) -> str:
        """For people."""
        state = "ok" if self.equal else "known" if self.passed else "FAILED"
        why = f"  ({self.reason})" if state == "known" else ""
        return f"{state:6} {self.difference:8.1e} of {self.tolerance:.0e}  {self.what}{why}"


def compare(
    pretrained: Pretrained, theirs: Theirs, pictures: Sequence[Image.Image] | None = None
) -> list[Row]:
    """Compare a model with itself in another library, on the CPU.

    Args:
        pretrained: ours.
        theirs: the other.
        pictures: real ones; by default some are made.

    Returns:
        Everything that both have: features of random and of real inputs, pixels, token ids,
        scale, offset, logits, scores.
    """
    tokenizer = pretrained.tokenizer
    made = inputs.pictures(pretrained.transform.size)
    with inference(pretrained.model):
        rows = compare_towers(
            pretrained.model,
            theirs,
            image_size=pretrained.transform.size,
            context_length=tokenizer.context_length,
            fixed_length=tokenizer.fixed_length,
            vocab_size=tokenizer.vocab_size,
            eos_id=tokenizer.eos_id,
            pad_id=tokenizer.pad_id,
        )
        rows += _pictures(pretrained, theirs, made if pictures is None else [made[0], *pictures])
        rows += _texts(pretrained, theirs)
        rows += _temperature(pretrained, theirs)
        rows += _together(pretrained, theirs, made[0])
    return rows


def compare_towers(
    model: TwoTower,
    theirs: Theirs,
    *,
    image_size: int,
    context_length: int,
    fixed_length: bool,
    vocab_size: int,
    eos_id: int,
    pad_id: int,
) -> list[Row]:
    """Compare features of random pixels, and of random tokens of several lengths."""
    rows = []
    with inference(model):
        if theirs.image is not None:
            generator = torch.Generator().manual_seed(0)
            pixels = torch.randn(2, 3, image_size, image_size, generator=generator)
            distance = _distance(model.encode_image(pixels), theirs.image(pixels))
            rows.append(Row("image features of random pixels", distance, theirs.tolerance))
        if theirs.text is not None:
            tokens, lengths = inputs.random_texts(
                context_length=context_length, vocab_size=vocab_size, eos_id=eos_id, pad_id=pad_id
            )
            ours = model.encode_text(tokens, lengths)
            distance = _distance(ours, theirs.text(tokens, lengths))
            rows.append(Row("text features of random tokens", distance, theirs.tolerance))
            if theirs.any_length and not fixed_length:
                cut = int(lengths[1])
                distance = _distance(ours[1:], theirs.text(tokens[1:, :cut], lengths[1:]))
                what = "text features of random tokens, less padded"
                rows.append(Row(what, distance, theirs.tolerance))
    return rows


def refuse_failed(rows: Sequence[Row], what: str) -> None:
    """Raise a ValueError that names the rows that failed, if any did."""
    if failed := [row for row in rows if not row.passed]:
        wrong = "; ".join(
            f"{row.what} are {row.difference:.1e} away, allowed {row.tolerance:.0e}"
            for row in failed
        )
        raise ValueError(
            f"{what}: {wrong}; a setting such as activation, epsilon or pooling does not fit "
            "these weights"
        )


def _pictures(
    pretrained: Pretrained, theirs: Theirs, pictures: Sequence[Image.Image]
) -> Iterator[Row]:
    section, size = pretrained.config.preprocess, pretrained.transform.size
    for kind, images in inputs.by_kind(pictures, size, section).items():
        reason = theirs.known.get(kind)
        ours = _our_pixels(pretrained, images)
        features = pretrained.model.encode_image(ours)
        if theirs.pixels is not None:
            pixels = theirs.pixels(images)
            grey = _grey_levels(ours, pixels, section.std)
            limit = _SAME_GREY if kind == inputs.EXACT else _GREY
            yield Row(f"pixels of {len(images)} {kind}, in grey levels", grey, limit, reason)
            if pixels.shape != ours.shape:
                continue
            if theirs.image is not None:
                distance = _distance(pretrained.model.encode_image(pixels), theirs.image(pixels))
                yield Row(f"image features of {kind}", distance, theirs.tolerance)
        elif theirs.image is not None:
            distance = _distance(features, theirs.image(ours))
            yield Row(f"image features of {len(images)} {kind}", distance, theirs.tolerance)
        own_way = _own_way(theirs)
        if own_way is not None:
            what = f"image features of {kind}, each side's own pixels"
            least = 0.0 if kind == inputs.EXACT else _OWN_WAY
            limit = max(least, theirs.tolerance)
            yield Row(what, _distance(features, own_way(images)), limit, reason)


def _own_way(theirs: Theirs) -> Callable[[list[Image.Image]], Tensor] | None:
    """Pictures to features with nothing of ours."""
    pixels, image = theirs.pixels, theirs.image
    if theirs.embed_images is not None or pixels is None or image is None:
        return theirs.embed_images
    return lambda images: image(pixels(images))


def _texts(pretrained: Pretrained, theirs: Theirs) -> Iterator[Row]:
    if theirs.tokens is not None:
        texts = inputs.vocabulary_texts(pretrained.tokenizer)
        wrong = _differing_ids(pretrained, theirs.tokens, texts)
        yield Row(f"token ids of {len(texts)} texts of all pieces, number that differ", wrong, 0)
    for kind, texts in inputs.texts().items():
        reason = theirs.known.get(kind)
        if kind == inputs.ENTITIES and theirs.unescapes == pretrained.tokenizer.unescape:
            reason = None
        tokens, lengths = pretrained.tokenizer.encode(texts)
        ours = pretrained.model.encode_text(tokens, lengths)
        if theirs.tokens is not None:
            wrong = _differing_ids(pretrained, theirs.tokens, texts)
            yield Row(f"token ids of {len(texts)} {kind}, number that differ", wrong, 0, reason)
        if theirs.text is not None:
            padded = _padded(tokens, pretrained, theirs)
            distance = _distance(ours, theirs.text(padded, lengths))
            yield Row(f"text features of {kind}", distance, theirs.tolerance)
        if theirs.embed_texts is not None:
            distance = _distance(ours, theirs.embed_texts(texts))
            what = f"text features of {kind}, each side's own tokens"
            yield Row(what, distance, theirs.tolerance, reason)


def _differing_ids(
    pretrained: Pretrained, encode: Callable[[list[str]], list[list[int]]], texts: list[str]
) -> int:
    tokens, lengths = pretrained.tokenizer.encode(texts)
    own = [row[:n] for row, n in zip(tokens.tolist(), lengths.tolist(), strict=True)]
    return sum(a != b for a, b in zip(own, encode(texts), strict=True))


def _temperature(pretrained: Pretrained, theirs: Theirs) -> Iterator[Row]:
    scale, bias = pretrained.logit_scale(), pretrained.logit_bias()
    if theirs.logit_scale is not None:
        difference = abs(scale - theirs.logit_scale) / scale
        yield Row("logit scale, relative", difference, TOLERANCE)
    if theirs.logit_bias is not None or (bias is not None and theirs.logit_scale is not None):
        difference = abs((bias or 0.0) - (theirs.logit_bias or 0.0))
        yield Row("logit bias", difference, TOLERANCE, theirs.known.get("logit bias"))


def _together(pretrained: Pretrained, theirs: Theirs, image: Image.Image) -> Iterator[Row]:
    """Logits and scores of a picture that is as large as the model's input."""
    scale, bias = pretrained.logit_scale(), pretrained.logit_bias() or 0.0
    pixels = _our_pixels(pretrained, [image])
    counts = zip(_LABELS, pretrained.tokenizer.count(_LABELS), strict=True)
    labels = [label for label, n in counts if n <= pretrained.tokenizer.context_length]
    if len(labels) < 2:
        return
    tokens, lengths = pretrained.tokenizer.encode(labels)
    features = pretrained.model(pixels, tokens, lengths)
    logits = scale * features.image @ features.text.T + bias
    if theirs.image and theirs.text and theirs.logit_scale is not None:
        image_features = unit_length(theirs.image(pixels))
        text_features = unit_length(theirs.text(_padded(tokens, pretrained, theirs), lengths))
        difference = math.inf
        if image_features.shape[1] == text_features.shape[1]:
            found = theirs.logit_scale * image_features @ text_features.T
            difference = (logits - found - (theirs.logit_bias or 0.0)).abs().max().item()
        reason = theirs.known.get("logit bias")
        yield Row("logits", difference, 3 * max(1.0, scale) * theirs.tolerance, reason)
    if theirs.scores is not None:
        ours = logits.softmax(-1) if theirs.logit_bias is None else logits.sigmoid()
        found = torch.tensor([theirs.scores(image, labels)])
        difference = (ours - found).abs().max().item()
        yield Row("zero-shot scores of a picture", difference, _SCORE)


def _our_pixels(pretrained: Pretrained, images: Sequence[Image.Image]) -> Tensor:
    """Normalised pixels as our model takes them, float32 [B, 3, S, S]."""
    pixels = torch.stack([pretrained.transform.apply(from_pil(image)) for image in images])
    section = pretrained.config.preprocess
    return normalise(pixels, section.mean, section.std)


def _padded(tokens: Tensor, pretrained: Pretrained, theirs: Theirs) -> Tensor:
    missing = 0 if theirs.any_length else pretrained.tokenizer.context_length - tokens.shape[1]
    return torch.nn.functional.pad(tokens, (0, missing), value=pretrained.tokenizer.pad_id)


def _grey_levels(a: Tensor, b: Tensor, std: Sequence[float]) -> float:
    """Largest mean difference of a picture of both."""
    if a.shape != b.shape:
        return math.inf
    difference = (a - b).abs() * 255 * torch.tensor(std)[:, None, None]
    return difference.mean(dim=(1, 2, 3)).max().item()


def _distance(a: Tensor, b: Tensor) -> float:
    """Largest distance of two rows at unit length."""
    if a.shape != b.shape:
        return math.inf
    return (unit_length(a) - unit_length(b.float())).norm(dim=1).max().item()
