"""Texts to token ids: a byte-level BPE trained on the run's captions, or one that exists.

    texts -> clean -> ids of the plain text -> cut -> start and end token around -> pad on the right

Cleaning is part of the tokenizer: it is stored with the model, and a text is cleaned alike in
training and in use. It needs no optional package. The library's tokenizer sees the user's text
only. Start, end and padding are put around it here, by id, so that each text has exactly one start
(where the family has one) and one end, the end is last also when the text is cut, and the
characters `<|endoftext|>` in a caption are but characters.
"""

from __future__ import annotations

import html
import json
import logging
import os
import re
import string
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend
from torch import Tensor

from multimodal.config import (
    BpeTokenizer,
    Cleaning,
    HfTokenizer,
    OpenAiTokenizer,
    TokenizerSection,
)
from multimodal.data.hf_tokenizer import HfParts, read_hf_tokenizer
from multimodal.data.openai_bpe import read_openai_bpe

# Loader processes are forked, and a thread pool of the parent would hang there.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

logger = logging.getLogger(__name__)

FILE = "tokenizer.json"
"""Name of the saved tokenizer in a model folder."""

_ALPHABET = pre_tokenizers.ByteLevel.alphabet()
_MULTIPLE = 8
_SPECIALS = 3


class TokenBatch(NamedTuple):
    """Token ids of some texts.

    Attributes:
        tokens: int64 [B, L], padded on the right.
        lengths: int64 [B], tokens of each text with start and end; the end token is the last.
    """

    tokens: Tensor
    lengths: Tensor


class Tokenizer:
    """Texts to padded token ids. Can be pickled; the ids do not depend on the process.

    Args:
        backend: Tokenizer of the `tokenizers` library. Its own special tokens, cutting and padding
            are not used.
        bos_id: Start token, or None for families without one.
        eos_id: End token.
        pad_id: Padding.
        vocab_size: Number of ids, so the rows that an embedding table needs.
        context_length: Longest text in tokens, start and end included.
        fixed_length: Pad each batch to `context_length`. Otherwise to its longest text, rounded up
            to a multiple of 8.
        unescape: Turn HTML entities into characters first. All other cleaning is in the backend.

    Raises:
        ValueError: when the numbers contradict each other.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        bos_id: int | None,
        eos_id: int,
        pad_id: int,
        vocab_size: int,
        context_length: int,
        fixed_length: bool,
        unescape: bool,
    ):
        self.bos_id = bos_id
        self.eos_id = eos_id
        self.pad_id = pad_id
        self.vocab_size = vocab_size
        self.context_length = context_length
        self.fixed_length = fixed_length
        self.unescape = unescape
        self._start = [] if bos_id is None else [bos_id]
        self._backend = Backend.from_str(backend.to_str())
        self._backend.no_truncation()
        self._backend.no_padding()
        self._backend.encode_special_tokens = True
        self._check()
        self._spelled = _spell_out(self._backend, {*self._start, eos_id})

    def encode(self, texts: Iterable[str]) -> TokenBatch:
        """Tokenize texts.

        Raises:
            TypeError: when given one text, or something that is not a text.
        """
        rows = [self._row(ids) for ids in self._encode_plain(texts)]
        width = self._width(rows)
        padded = [row + [self.pad_id] * (width - len(row)) for row in rows]
        tokens = torch.tensor(padded, dtype=torch.int64).reshape(len(rows), width)
        lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
        return TokenBatch(tokens, lengths)

    def count(self, texts: Iterable[str]) -> list[int]:
        """Tokens of each text with its start and end, before it is cut."""
        return [len(self._whole(ids)) for ids in self._encode_plain(texts)]

    def _encode_plain(self, texts: Iterable[str]) -> list[list[int]]:
        if isinstance(texts, str):
            raise TypeError(f"encode takes a list of texts, not one text: write [{texts[:40]!r}]")
        texts = list(texts)
        for index, text in enumerate(texts):
            if not isinstance(text, str):
                raise TypeError(f"texts[{index}] is a {type(text).__name__}, not a str: {text!r}")
        prepared = [self._prepared(text) for text in texts]
        encodings = self._backend.encode_batch_fast(prepared, add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def is_blank(self, text: str) -> bool:
        """Whether cleaning leaves nothing of a text."""
        if text[:1].isalnum() and not self.unescape:
            return False  # most texts; the library takes 20 us to say the same
        normalizer, prepared = self._backend.normalizer, self._prepared(text)
        return not (normalizer.normalize_str(prepared) if normalizer else prepared).strip()

    def _prepared(self, text: str) -> str:
        return _prepare(text, unescape=self.unescape)

    def _row(self, ids: list[int]) -> list[int]:
        whole = self._whole(ids)
        if len(whole) > self.context_length:
            return [*whole[: self.context_length - 1], self.eos_id]
        return whole

    def _whole(self, ids: list[int]) -> list[int]:
        if not self._spelled.keys().isdisjoint(ids):
            ids = [part for token in ids for part in self._spelled.get(token, (token,))]
        return [*self._start, *ids, self.eos_id]

    def _width(self, rows: list[list[int]]) -> int:
        if self.fixed_length:
            return self.context_length
        longest = max(map(len, rows), default=0)
        return min(-(-longest // _MULTIPLE) * _MULTIPLE, self.context_length)

    def settings(self) -> dict[str, Any]:
        """What, besides `tokenizer.json`, makes an equal tokenizer; plain JSON values."""
        return {
            "bos_id": self.bos_id,
            "eos_id": self.eos_id,
            "pad_id": self.pad_id,
            "vocab_size": self.vocab_size,
            "context_length": self.context_length,
            "fixed_length": self.fixed_length,
            "unescape": self.unescape,
        }

    def as_json(self) -> str:
        """The content of `tokenizer.json`; the rest is in `settings()`."""
        return self._backend.to_str(pretty=True)

    def shortened(self, context_length: int) -> Tokenizer:
        """The same for texts of at most `context_length` tokens."""
        return Tokenizer(self._backend, **{**self.settings(), "context_length": context_length})

    def save(self, folder: str | Path) -> None:
        """Write `tokenizer.json` into a folder."""
        Path(folder, FILE).write_text(self.as_json(), encoding="utf-8")

    @classmethod
    def load(cls, folder: str | Path, settings: dict[str, Any]) -> Tokenizer:
        """Read what `save` wrote.

        Args:
            folder: Holds `tokenizer.json`.
            settings: Result of `settings()`.

        Raises:
            FileNotFoundError: when the file is missing.
            ValueError: when the file is damaged, or settings are missing, unknown or contradictory.
        """
        path = Path(folder, FILE)
        if not path.is_file():
            raise FileNotFoundError(f"{path} is missing: the model folder is not complete")
        expected = {"bos_id", "eos_id", "pad_id", "vocab_size"}
        expected |= {"context_length", "fixed_length", "unescape"}
        if wrong := sorted(expected ^ set(settings)):
            raise ValueError(f"tokenizer settings: {', '.join(wrong)} missing or unknown")
        try:
            backend = Backend.from_file(str(path))
        except Exception as error:  # The library raises nothing narrower.
            raise ValueError(f"{path} is not a tokenizer file: {error}") from error
        return cls(backend, **settings)

    def __reduce__(self):
        return _unpickle, (self._backend.to_str(), self.settings())

    def _check(self) -> None:
        ids = {"bos_id": self.bos_id, "eos_id": self.eos_id, "pad_id": self.pad_id}
        for name, value in ids.items():
            if value is not None and not 0 <= value < self.vocab_size:
                raise ValueError(f"{name}={value} is not below vocab_size={self.vocab_size}")
        if (needed := _count_ids(self._backend)) > self.vocab_size:
            raise ValueError(f"vocab_size={self.vocab_size}, but the tokenizer has {needed} ids")
        if self.context_length < len(self._start) + 1:
            raise ValueError(f"context_length={self.context_length} has no room for start and end")


def build_tokenizer(
    section: TokenizerSection,
    *,
    context_length: int,
    fixed_length: bool,
    vocab_size: int | None,
    captions: Iterable[str],
) -> Tokenizer:
    """Train a tokenizer on captions, or take one of transformers or OpenAI's.

    Args:
        section: Which.
        context_length: Longest text in tokens, start and end included.
        fixed_length: Pad each batch to `context_length`.
        vocab_size: Rows of the model's token embedding; None when not known, which only a tokenizer
            that exists allows.
        captions: Texts to train on; not read for a tokenizer that exists. The same captions give
            the same tokenizer.

    Raises:
        ValueError: when the tokenizer cannot be had or does not fit the model.
    """
    lengths = {"context_length": context_length, "fixed_length": fixed_length}
    match section:
        case BpeTokenizer():
            tokenizer = _train(section, captions, vocab_size, **lengths)
        case HfTokenizer():
            tokenizer = _put_together(read_hf_tokenizer(section.name), section.clean, **lengths)
        case OpenAiTokenizer():
            tokenizer = _put_together(read_openai_bpe(section.vocabulary), section.clean, **lengths)
        case _:
            raise TypeError(f"tokenizer section of type {type(section).__name__}")
    if vocab_size is not None and tokenizer.vocab_size > vocab_size:
        raise ValueError(
            f"the tokenizer has {tokenizer.vocab_size} ids, the model's token embedding "
            f"vocab_size={vocab_size} rows: set model.text.vocab_size to at least the former"
        )
    return tokenizer


def _train(
    section: BpeTokenizer, captions: Iterable[str], vocab_size: int | None, **lengths: Any
) -> Tokenizer:
    """Train a byte-level BPE. The special ids follow those of the text.

    The end token is the largest: some readers of CLIP models pool a text at its largest id.
    """
    least = len(_ALPHABET) + _SPECIALS
    if vocab_size is None:
        raise ValueError(
            "tokenizer.kind=bpe needs model.text.vocab_size, which only text.kind=transformer has: "
            "use tokenizer.kind=hf with the text tower's own name"
        )
    if vocab_size < least:
        raise ValueError(
            f"vocab_size={vocab_size} is too small for tokenizer.kind=bpe: it needs at least "
            f"{least}, for 256 bytes and {_SPECIALS} special tokens"
        )
    backend = Backend(models.BPE())
    backend.normalizer = normalizers.Sequence([normalizers.NFC(), *_cleaning(section.clean)])
    # With a space before the first word too, a word has the same ids anywhere in a text.
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - _SPECIALS,
        min_frequency=2,
        initial_alphabet=sorted(_ALPHABET),
        show_progress=False,
    )
    texts = (_prepare(caption, unescape="unescape" in section.clean) for caption in captions)
    backend.train_from_iterator(texts, trainer)
    first = _count_ids(backend)
    if first > len(_ALPHABET):  # else there was nothing to train on
        logger.info("trained a tokenizer of %d ids", first + _SPECIALS)
    return Tokenizer(
        backend,
        bos_id=first,
        eos_id=first + 2,
        pad_id=first + 1,
        vocab_size=first + _SPECIALS,
        unescape="unescape" in section.clean,
        **lengths,
    )


def _put_together(found: HfParts, clean: list[Cleaning], **lengths: Any) -> Tokenizer:
    if steps := _cleaning(clean):
        own = [found.backend.normalizer] if found.backend.normalizer is not None else []
        found.backend.normalizer = normalizers.Sequence([*steps, *own])
    return Tokenizer(
        found.backend,
        bos_id=found.bos_id,
        eos_id=found.eos_id,
        pad_id=found.pad_id,
        vocab_size=max(_count_ids(found.backend), found.pad_id + 1),
        unescape="unescape" in clean,
        **lengths,
    )


def _cleaning(steps: list[Cleaning]) -> list[normalizers.Normalizer]:
    """What of the cleaning the library does; it is saved with its tokenizer.

    `punctuation` is SigLIP's rule (`canonicalize_text` in big_vision's
    evaluators/proj/image_text/prompt_engineering.py): `_` becomes a space, other ASCII punctuation
    nothing.
    """
    punctuation = Regex(f"[{re.escape(string.punctuation)}]")
    known: dict[Cleaning, list[normalizers.Normalizer]] = {
        "punctuation": [normalizers.Replace("_", " "), normalizers.Replace(punctuation, "")],
        "whitespace": [normalizers.Replace(Regex(r"\s+"), " "), normalizers.Strip()],
        "lower": [normalizers.Lowercase()],
    }
    return [each for step, parts in known.items() if step in steps for each in parts]


def _prepare(text: str, *, unescape: bool) -> str:
    """What is done to a text before the library sees it."""
    text = _valid_unicode(text)
    return html.unescape(html.unescape(text)) if unescape else text


def _spell_out(backend: Backend, ends: set[int]) -> dict[int, list[int]]:
    """For each special id that a text must not contain, the ids of its name's characters.

    The library keeps special tokens out of texts for some models only: a Unigram model finds
    `</s>` in its vocabulary as it does any other piece.
    """
    added = backend.get_added_tokens_decoder()
    unknown = _unknown_id(backend)
    forbidden = {i for i, token in added.items() if token.special and i != unknown} | ends
    spelled = {}
    for special in forbidden:
        name = backend.id_to_token(special) if special != unknown else None
        pieces = [piece.id for letter in name or "" for piece in backend.model.tokenize(letter)]
        spelled[special] = [piece for piece in pieces if piece not in forbidden]
    return spelled


def _unknown_id(backend: Backend) -> int | None:
    """Id for what is in no piece; Unigram models hold a number, the others a name."""
    if isinstance(backend.model, models.Unigram):
        return json.loads(backend.to_str())["model"]["unk_id"]
    name = backend.model.unk_token
    return None if name is None else backend.token_to_id(name)


def _count_ids(backend: Backend) -> int:
    """One more than the largest id; ids may have gaps."""
    return max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1


def _valid_unicode(text: str) -> str:
    """Join surrogate pairs, as in JSON's `\\ud83d\\ude00`; a lone one becomes U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _unpickle(backend: str, settings: dict[str, Any]) -> Tokenizer:
    return Tokenizer(Backend.from_str(backend), **settings)
