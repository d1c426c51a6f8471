"""Our tokenizer as files that transformers reads, from 4.40 to 5.x.

    tokenizer.json           vocabulary, cleaning, and start and end token put around each text
    tokenizer_config.json    class, context length, names of the special tokens
    special_tokens_map.json  the names once more, for old readers
    vocab.json, merges.txt   of vocabularies like OpenAI's, for readers without tokenizer.json

transformers 4 reads the tokenizer of every CLIP folder with its CLIP class, which keeps the rules
of tokenizer.json but wants its pre-tokenizer to be a sequence. transformers 5 takes the class that
tokenizer_config.json names, and its CLIP class builds the rules of OpenAI's BPE anew; any other
vocabulary is therefore given to the general class. Merges are written as "a b": older versions of
the `tokenizers` library know nothing else.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from multimodal.data.text import FILE, Tokenizer

GENERAL_TOKENIZER = "PreTrainedTokenizerFast"
"""The class of transformers that does what tokenizer.json says and nothing else."""
_WORD_END = "</w>"
_CLIP_STEPS = (["NFC", "Replace", "Lowercase"], ["Split", "ByteLevel"])
"""Normalizer and pre-tokenizer of CLIP's class in transformers."""
_SPACED = [
    {"type": "Replace", "pattern": {"String": _WORD_END}, "content": " "},
    {"type": "Strip", "content": " ", "start": 0, "stop": 1},
]
"""Ends of words to spaces, which CLIP's class does itself."""


_SPECIAL = {
    "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True
}  # fmt: skip


class _Names(NamedTuple):
    bos: str | None
    eos: str
    pad: str
    unk: str


def write_tokenizer(tokenizer: Tokenizer, folder: Path, *, masks_padding: bool) -> None:
    """Write the files.

    Args:
        tokenizer: ours; `unescape` is done by our own code, so no file can hold it.
        folder: where to.
        masks_padding: whether the model is to get a mask of the padding.
    """
    content = json.loads(tokenizer.as_json())
    names = _register(content, tokenizer, keep_pad=not masks_padding)
    content["post_processor"] = _around(names, tokenizer)
    content["truncation"] = content["padding"] = None
    steps = _steps(content, "pre_tokenizer", "pretokenizers")
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": steps}
    if _ends_words(content) and not _is_clip(content):
        content["decoder"] = {"type": "Sequence", "decoders": [content["decoder"], *_SPACED]}
    _join_merges(content["model"])
    _write(folder / FILE, content)
    special = {"bos_token": names.bos, "eos_token": names.eos}
    special |= {"pad_token": names.pad, "unk_token": names.unk}
    special = {name: token for name, token in special.items() if token is not None}
    _write(folder / "special_tokens_map.json", special)
    inputs = ["input_ids", "attention_mask"] if masks_padding else ["input_ids"]
    settings = {
        "tokenizer_class": "CLIPTokenizer" if _is_clip(content) else GENERAL_TOKENIZER,
        "model_max_length": tokenizer.context_length,
        "model_input_names": inputs,
        "padding_side": "right",
        "truncation_side": "right",
        "clean_up_tokenization_spaces": False,
        # The characters <|endoftext|> in a text are but characters; read by 4.57 and newer.
        "split_special_tokens": True,
        **special,
    }
    _write(folder / "tokenizer_config.json", settings)
    if _ends_words(content):
        _write(folder / "vocab.json", content["model"]["vocab"])
        lines = ["#version: 0.2", *content["model"]["merges"], ""]
        (folder / "merges.txt").write_text("\n".join(lines), encoding="utf-8")


def _register(content: dict[str, Any], tokenizer: Tokenizer, *, keep_pad: bool) -> _Names:
    """Make start, end and padding special tokens of the file, and return their names.

    Padding that nothing sees becomes the end token where it is a piece of texts, as OpenCLIP's 0,
    which is `!`: old readers would take every `!` of a text for padding.
    """
    vocab = content["model"]["vocab"]
    added = {token["id"]: token for token in content["added_tokens"]}
    if isinstance(vocab, list):
        known = {number: piece for number, (piece, _) in enumerate(vocab)}
    else:
        known = {number: piece for piece, number in vocab.items()}
    bos, eos, pad = tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id
    if not keep_pad and pad in known and pad not in added:
        pad = eos
    known |= {number: token["content"] for number, token in added.items()}
    new = {bos: "<|startoftext|>", pad: "<|pad|>", eos: "<|endoftext|>"}
    for number, name in new.items():
        if number is None:
            continue
        if number not in known:
            known[number] = _unused(name, set(known.values()))
            if isinstance(vocab, dict):
                vocab[known[number]] = number
        added[number] = _SPECIAL | {"id": number, "content": known[number]}
    content["added_tokens"] = [added[number] for number in sorted(added)]
    unknown = _unknown(content["model"]) or known[eos]
    return _Names(None if bos is None else known[bos], known[eos], known[pad], unknown)


def _unused(name: str, taken: set[str]) -> str:
    while name in taken:
        name = f"<|{name.strip('<|>')}_|>"
    return name


def _unknown(model: dict[str, Any]) -> str | None:
    """Name of the token for what is in no piece."""
    if model["type"] == "Unigram":
        return None if model["unk_id"] is None else model["vocab"][model["unk_id"]][0]
    return model.get("unk_token")


def _around(names: _Names, tokenizer: Tokenizer) -> dict[str, Any]:
    """The post-processor that puts start and end around a text, also one that is cut."""
    ids = {names.eos: tokenizer.eos_id}
    if names.bos is not None and tokenizer.bos_id is not None:
        ids[names.bos] = tokenizer.bos_id
    start = [] if names.bos is None else [_token(names.bos)]
    text = {"Sequence": {"id": "A", "type_id": 0}}
    second = {"Sequence": {"id": "B", "type_id": 0}}
    single = [*start, text, _token(names.eos)]
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, second, _token(names.eos)],
        "special_tokens": {
            name: {"id": name, "ids": [number], "tokens": [name]} for name, number in ids.items()
        },
    }


def _token(name: str) -> dict[str, Any]:
    return {"SpecialToken": {"id": name, "type_id": 0}}


def _steps(content: dict[str, Any], part: str, inner: str) -> list[dict[str, Any]]:
    """The steps of a normalizer or pre-tokenizer: none, one, or those of a sequence."""
    step = content[part]
    if step is None:
        return []
    return step[inner] if step["type"] == "Sequence" else [step]


def _join_merges(model: dict[str, Any]) -> None:
    pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in model.get("merges", [])]
    if pairs and not any(" " in part for pair in pairs for part in pair):
        model["merges"] = [" ".join(pair) for pair in pairs]


def _ends_words(content: dict[str, Any]) -> bool:
    """Whether it is a vocabulary like OpenAI's, whose pieces end words."""
    return content["model"].get("end_of_word_suffix") == _WORD_END


def _is_clip(content: dict[str, Any]) -> bool:
    """Whether the rules are those of OpenAI's BPE; what comes out is compared afterwards."""
    normalizer = [step["type"] for step in _steps(content, "normalizer", "normalizers")]
    pre_tokenizer = [step["type"] for step in _steps(content, "pre_tokenizer", "pretokenizers")]
    return _ends_words(content) and (normalizer, pre_tokenizer) == _CLIP_STEPS


def _write(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
