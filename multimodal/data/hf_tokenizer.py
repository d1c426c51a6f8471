"""Tokenizers of transformers, taken apart: the fast backend and the ids it puts around a text."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer as Backend

from multimodal.files import resolve_package

_HUB_SECONDS = 20


class HfParts(NamedTuple):
    """Attributes:
    backend: A copy of the fast tokenizer.
    bos_id: The token before a text, or None.
    eos_id: The token after a text.
    pad_id: Padding.
    """

    backend: Backend
    bos_id: int | None
    eos_id: int
    pad_id: int


def read_hf_tokenizer(name: str) -> HfParts:
    """Read a tokenizer by hub name or local folder. No code of the repository is run.

    Start and end are the tokens that the tokenizer itself adds to a text: CLIP both, BERT its
    [CLS] and [SEP], SigLIP the end only. One that adds no end, as GPT-2's, has it added all the
    same, since texts are pooled there.

    Raises:
        ValueError: when it cannot be read, is not a fast one, or puts more than one token before
            or after a text.
    """
    found = _load(resolve_package(name))
    whole = found("a")["input_ids"]
    plain = found("a", add_special_tokens=False)["input_ids"]
    start = next(
        (i for i in range(len(whole)) if whole[i : i + len(plain)] == plain),
        None,
    )
    if start is None:
        raise ValueError(f"tokenizer.name={name!r}: special tokens change the ids of the text")
    before, after = whole[:start], whole[start + len(plain) :]
    if len(before) > 1 or len(after) > 1:
        raise ValueError(
            f"tokenizer.name={name!r} puts {len(before)} tokens before and {len(after)} after a "
            "text; at most one each is supported"
        )
    end = after[0] if after else found.eos_token_id
    if end is None:
        raise ValueError(f"tokenizer.name={name!r} has no end token, which pooling needs")
    return HfParts(
        backend=Backend.from_str(found.backend_tokenizer.to_str()),
        bos_id=before[0] if before else None,
        eos_id=end,
        pad_id=end if found.pad_token_id is None else found.pad_token_id,
    )


def _load(name: str) -> Any:
    """A fast tokenizer of transformers: of a folder or the cache, else from the hub."""
    found, reason = _read(name, local_files_only=True)
    if found is None and not Path(name).is_dir():
        reason = _why_not_on_hub(name)
        if reason is None:
            found, reason = _read(name, local_files_only=False)
    if found is None:
        raise ValueError(
            f"tokenizer.name={name!r}: no fast tokenizer found ({reason}). Give a local folder "
            "with tokenizer.json, or the name of a model on the hub, with a network and "
            "HF_HUB_OFFLINE unset; tokenizer.kind=bpe needs neither"
        )
    return found


def _read(name: str, *, local_files_only: bool) -> tuple[Any, str]:
    """A fast tokenizer, or None and why not.

    Families with a slow class only (SigLIP) are read from their `tokenizer.json`.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    reasons = []
    for kind in (AutoTokenizer, PreTrainedTokenizerFast):
        try:
            found = kind.from_pretrained(
                name, trust_remote_code=False, local_files_only=local_files_only
            )
        except (OSError, ValueError, ImportError, KeyError, TypeError) as error:
            reasons.append(str(error))
            continue
        if hasattr(found, "backend_tokenizer"):
            return found, ""
        reasons.append(f"{type(found).__name__} is not a fast tokenizer")
    return None, reasons[0].strip().split("\n")[0]


def _why_not_on_hub(name: str) -> str | None:
    """Ask the hub once; without a network, transformers would try again for minutes."""
    from huggingface_hub import model_info

    try:
        model_info(name, timeout=_HUB_SECONDS)
    except Exception as error:  # of requests or of httpx, by the version of huggingface_hub
        return str(error).strip().split("\n")[0] or type(error).__name__
    return None
