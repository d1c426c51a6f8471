"""What a converted model is compared on: pictures and texts by kind, and random tokens.

Libraries differ on some kinds of input by design. They are kept apart from the others, so that a
known difference hides nothing else.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

import numpy as np
import torch
from PIL import ExifTags, Image
from torch import Tensor

from multimodal import config
from multimodal.data.text import Tokenizer

PICTURES = "pictures"
EXACT = "pictures as large as the model's input"
OFF_CENTRE = "pictures whose crop cannot be centred"
UNUSUAL = "transparent, turned, 16-bit or very long pictures"
TEXTS = "texts"
ENTITIES = "texts with HTML entities"
SPELLED = "texts that spell special tokens"
QUOTES = "texts with typographic quotation marks"
MISREAD = "texts in the wrong encoding"

_LONG = 8
"""Aspect ratio from which our own preprocessing cuts before it scales."""
_LINE = "a photo of two small dogs running over the wet sand at the end of a long summer day, "
_MARKS = re.compile("\u0120|\u2581|</w>|^##")
"""What kinds of vocabularies write at the start or the end of a word."""


def texts() -> dict[str, list[str]]:
    """Texts by kind; among the usual ones blank and very long ones, and several scripts."""
    return {
        TEXTS: [
            "a photo of a cat.",
            "Two DOGS, running; 3 balls (red) - it's 100% fun!",
            "",
            " \t\n ",
            "  many   spaces\tand\nlines  ",
            "caf\u00e9 r\u00e9sum\u00e9, na\u00efve; cafe\u0301 r\u0065\u0301sum\u00e9",
            "\u732b\u306e\u5199\u771f \u043a\u043e\u0448\u043a\u0430 \u03b3\u03ac\u03c4\u03b1",
            "\U0001f600 \U0001f469\U0001f3fd\u200d\U0001f692 woman firefighter: medium skin tone",
            "don't we've they'll I'm you're she'd 'quoted'",
            "snake_case and-dashes/and.dots, black & white",
            "x" * 300,
            _LINE * 30,
            "!?" * 200,
        ],
        ENTITIES: ["black &amp; white", "&lt;b&gt; &quot;x&quot;", "caf&eacute; &amp;amp; bar"],
        SPELLED: ["<|endoftext|>", "a <|startoftext|> dog <|endoftext|>", "</s><pad>[SEP] <eos>"],
        QUOTES: ["the cat\u2019s \u201cbest\u201d photo", "\u2018one\u2019 \u00abtwo\u00bb"],
        MISREAD: ["caf\u00c3\u00a9 \u00e2\u20ac\u0153quoted\u00e2\u20ac\u009d"],
    }  # fmt: skip


def pictures(size: int) -> list[Image.Image]:
    """Made pictures with edges, gradients and fine texture, for a tower of `size` pixels.

    The first is as large as the tower's input; the others are larger and smaller, square, wide,
    tall, grey and transparent.
    """
    sizes = [(size, size), (2 * size, 2 * size), (3 * size, 2 * size), (size + 40, size + 64)]
    sizes += [(size // 2 + 1, size // 2 + 1), (size + 3, size), (size, size + 7), (3 * size, size)]
    made = [_made(i, *shape) for i, shape in enumerate(sizes)]
    made.append(_made(20, 2 * size, 2 * size).convert("L"))
    transparent = _made(21, 2 * size, 2 * size)
    transparent.putalpha(_made(22, 2 * size, 2 * size).convert("L"))
    return [*made, transparent]


def by_kind(
    images: Sequence[Image.Image], size: int, preprocess: config.Preprocess
) -> dict[str, list[Image.Image]]:
    """Pictures by their kind; kinds without a picture are left out."""
    kinds: dict[str, list[Image.Image]] = {}
    for image in images:
        kinds.setdefault(_kind(image, size, preprocess), []).append(image)
    return kinds


def vocabulary_texts(tokenizer: Tokenizer) -> list[str]:
    """Texts that fit the context and hold, as a word, every piece made of ASCII letters."""
    vocab = json.loads(tokenizer.as_json())["model"]["vocab"]
    pieces = vocab if isinstance(vocab, dict) else (piece for piece, _ in vocab)
    bare = (_MARKS.sub("", piece) for piece in pieces)
    words = sorted({word for word in bare if word.isascii() and word.isalpha()})
    # A piece from within words can take several tokens when it stands alone.
    together = max(1, tokenizer.context_length // 5)
    return [" ".join(words[i : i + together]) for i in range(0, len(words), together)]


def random_texts(
    *, context_length: int, vocab_size: int, eos_id: int, pad_id: int
) -> tuple[Tensor, Tensor]:
    """Tokens [3, L] and lengths [3]: a full, a half and a shortest text.

    Each ends in its only end token; behind it there is padding, which is in no text.
    """
    if not 0 <= eos_id < vocab_size:
        raise ValueError(f"eos_token_id={eos_id} is outside the {vocab_size} tokens of the model")
    usual = torch.tensor([i for i in range(vocab_size) if i not in (eos_id, pad_id)])
    generator = torch.Generator().manual_seed(0)
    tokens = usual[torch.randint(len(usual), (3, context_length), generator=generator)]
    lengths = torch.tensor([context_length, max(1, context_length // 2), 1])
    tokens[torch.arange(context_length) >= lengths[:, None]] = pad_id
    tokens[torch.arange(3), lengths - 1] = eos_id
    return tokens, lengths


def _kind(image: Image.Image, size: int, preprocess: config.Preprocess) -> str:
    width, height = image.size
    turned = image.getexif().get(ExifTags.Base.Orientation, 1) != 1
    long = max(width, height) > _LONG * min(width, height)
    if image.mode not in ("RGB", "L") or image.has_transparency_data or turned or long:
        return UNUSUAL
    rest = int(size * max(width, height) / min(width, height)) - size
    if preprocess.resize_mode == "shortest" and rest % 2:
        return OFF_CENTRE
    if image.size == (size, size):
        return EXACT
    return PICTURES


def _made(seed: int, width: int, height: int) -> Image.Image:
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:height, :width] / max(width, height)
    waves = rng.uniform(2, 9, (3, 2))
    values = [127 + 90 * np.sin(2 * np.pi * (a * x + b * y)) for a, b in waves]
    pixels = np.stack(values, axis=-1) + rng.normal(0, 12, (height, width, 3))
    for _ in range(6):
        top, left = rng.integers(0, height), rng.integers(0, width)
        block = pixels[top : top + height // 4 + 1, left : left + width // 4 + 1]
        block[:] = rng.integers(0, 256, 3)
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
