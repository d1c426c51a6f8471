"""The byte-level BPE of OpenAI's CLIP: 49,408 ids, made from the list of its 48,894 merges.

    ids 0..255       the bytes, in the order of `bytes_to_unicode` of openai/CLIP
    256..511         the bytes at the end of a word
    512..49405       the merges, in their order
    49406, 49407     start and end of a text

Texts are treated as by OpenCLIP, whose ids come out, but for its use of ftfy, which mends broken
characters and makes quotes straight, and for the words `<start_of_text>` and `<end_of_text>`, which
are its special tokens. Padding is 0, as in OpenCLIP; a text tower that is not causal sees it.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from multimodal.data.hf_tokenizer import HfParts, read_hf_tokenizer

START, END, PAD = 49_406, 49_407, 0
HUB_NAME = "openai/clip-vit-base-patch32"
_SPECIALS = ("<|startoftext|>", "<|endoftext|>")
_MERGES = 48_894
_SHA256 = "f61f2adf497e6f5357c347aeb4646fabe82f341e946de5bdec5d2858e41bef4a"
"""Of the merges, one a line, its two parts with a space between them."""
_FILES = ("tokenizer.json", "merges.txt", "bpe_simple_vocab_16e6.txt.gz")
_PACKAGES = ("open_clip", "clip")
_LAST_SIGMA = r"(?<=\p{L})\u03a3(?![\p{M}\p{Cf}\p{Lm}\p{Sk}.:'\u00b7\u2018\u2019]*\p{L})"
"""Unicode's Final_Sigma, but for what may stand between it and the letter before."""
_WORD = r"'s|'t|'re|'ve|'m|'ll|'d|\p{L}+|\p{N}|[^\s\p{L}\p{N}]+"

Merges = list[tuple[str, str]]


def read_openai_bpe(vocabulary: str | None = None) -> HfParts:
    """The tokenizer, without a network if its vocabulary is on this machine.

    Args:
        vocabulary: `tokenizer.json`, `merges.txt` or `bpe_simple_vocab_16e6.txt.gz`, or a folder
            with one of them; None looks into the packages open_clip and clip if they are installed,
            then into the cache of transformers, then on the hub.

    Raises:
        ValueError: when it is not found, or is another one.
    """
    if vocabulary is None:
        path = next(_packaged(), None)
        merges = _of_hub() if path is None else _read_merges(path)
    else:
        merges = _read_merges(_file_of(Path(vocabulary)))
    return HfParts(backend=_backend(merges), bos_id=START, eos_id=END, pad_id=PAD)


def has_openai_vocabulary(folder: Path) -> bool:
    """Whether a folder holds a file that `read_openai_bpe` reads."""
    try:
        _read_merges(_file_of(folder))
    except ValueError:
        return False
    return True


def is_openai_bpe(tokenizer_json: str) -> bool:
    """Whether the text of a `tokenizer.json` has this vocabulary; its cleaning is not looked at."""
    model = json.loads(tokenizer_json).get("model", {})
    return model.get("type") == "BPE" and _hash(_pairs(model["merges"])) == _SHA256


def _packaged() -> Iterator[Path]:
    for package in _PACKAGES:
        found = find_spec(package)
        for folder in (found.submodule_search_locations or []) if found else []:
            path = Path(folder, _FILES[-1])
            if path.is_file():
                yield path


def _of_hub() -> Merges:
    try:
        backend = read_hf_tokenizer(HUB_NAME).backend
    except ValueError as error:
        raise ValueError(
            f"OpenAI's vocabulary is not on this machine, and not on the hub ({error}). Install "
            f"open_clip_torch, which brings it, or set tokenizer.vocabulary to {_one_of_files()}, "
            f"such as those of {HUB_NAME}"
        ) from None
    return _pairs(json.loads(backend.to_str())["model"]["merges"])


def _file_of(path: Path) -> Path:
    found = [path / name for name in _FILES] if path.is_dir() else [path]
    for file in found:
        if file.is_file():
            return file
    raise ValueError(
        f"tokenizer.vocabulary={str(path)!r}: no such file, or a folder without one; give "
        f"{_one_of_files()}, or a folder with it"
    )


def _read_merges(path: Path) -> Merges:
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        if path.suffix == ".json":
            merges = _pairs(json.loads(content)["model"]["merges"])
        else:
            merges = _pairs(content.decode("utf-8").split("\n")[1 : _MERGES + 1])
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} has no list of merges that can be read: {error!r}") from None
    if _hash(merges) != _SHA256:
        raise ValueError(
            f"{path} is not the vocabulary of OpenAI's CLIP: its {len(merges)} merges are others; "
            "use tokenizer.kind=hf for another tokenizer"
        )
    return merges


def _pairs(merges: Iterable[str | list[str]]) -> Merges:
    """Merges as files have them, `a b` or [a, b], in pairs."""
    parts = (merge.split(" ") if isinstance(merge, str) else merge for merge in merges)
    return [(first, second) for first, second in parts]


def _hash(merges: Merges) -> str:
    return hashlib.sha256("\n".join(map(" ".join, merges)).encode()).hexdigest()


def _backend(merges: Merges) -> Backend:
    letters = _letters()
    pieces = [*letters, *(f"{letter}</w>" for letter in letters), *map("".join, merges)]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    backend = Backend(models.BPE(vocab=vocab, merges=merges, end_of_word_suffix="</w>"))
    backend.add_special_tokens([AddedToken(name, special=True) for name in _SPECIALS])
    backend.normalizer = normalizers.Sequence(
        [
            normalizers.NFC(),
            normalizers.Replace(Regex(r"\s+"), " "),
            normalizers.Strip(),
            # Python lowers the last sigma of a word to another letter, the library does not.
            normalizers.Replace(Regex(_LAST_SIGMA), "\u03c2"),
            normalizers.Lowercase(),
        ]
    )
    words = pre_tokenizers.Split(Regex(_WORD), behavior="removed", invert=True)
    spelled = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([words, spelled])
    backend.decoder = decoders.ByteLevel()
    return backend


def _letters() -> list[str]:
    """The 256 characters that stand for the bytes: first those of the printable ones."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = 256 - len(printable)
    return [chr(code) for code in printable] + [chr(256 + index) for index in range(others)]


def _one_of_files() -> str:
    return f"{', '.join(_FILES[:-1])} or {_FILES[-1]}"
