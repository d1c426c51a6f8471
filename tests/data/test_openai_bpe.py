"""OpenAI's BPE: the ids of OpenCLIP's own tokenizer, from every place where the vocabulary lies."""

import gzip
import json
import random
import unicodedata

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models

from multimodal.config import OpenAiTokenizer
from multimodal.data import openai_bpe
from multimodal.data.hf_tokenizer import HfParts
from multimodal.data.openai_bpe import has_openai_vocabulary, is_openai_bpe, read_openai_bpe
from multimodal.data.text import build_tokenizer

open_clip = pytest.importorskip("open_clip")


def build(**settings):
    return build_tokenizer(
        OpenAiTokenizer(kind="openai", **settings),
        context_length=77,
        fixed_length=True,
        vocab_size=49_408,
        captions=(),
    )


@pytest.fixture(scope="module")
def tokenizer():
    return build()


def characters(first: int, last: int) -> list[str]:
    return [chr(code) for code in range(first, last) if unicodedata.category(chr(code)) != "Cn"]


POOLS = {
    "ascii": [*characters(32, 127), "\t", "\n"],
    "words": ["don't", "WE'LL", "I'm", "A1", "<|endoftext|>", "it's", "CAT'S", "_x_", "--", " "],
    "latin": [*characters(0xC0, 0x250), " ", "'"],
    "greek": [*characters(0x386, 0x3FF), " ", " ", "\u03a3", "."],
    "cyrillic": [*characters(0x400, 0x530), " "],
    "arabic": [*characters(0x600, 0x6FF), " "],
    "kana and hangul": [*characters(0x3041, 0x30FF), *characters(0xAC00, 0xD7A3), " "],
    "han": [*characters(0x4E00, 0x9FFF), " ", "1"],
    "emoji": [*characters(0x1F300, 0x1F640), "\u200d", "a", " "],
}


@pytest.mark.parametrize("pool", POOLS)
def test_ids_are_those_of_open_clip(tokenizer, pool):
    """Texts that ftfy changes are left out: that difference is known."""
    import ftfy

    draw = random.Random(0)
    texts = ["".join(draw.choices(POOLS[pool], k=draw.randint(0, 60))) for _ in range(300)]
    texts = [text for text in texts if ftfy.fix_text(text) == unicodedata.normalize("NFC", text)]
    assert len(texts) > 100
    expected = open_clip.tokenize(texts)
    for text, row, other in zip(texts, tokenizer.encode(texts).tokens, expected, strict=True):
        assert row.tolist() == other.tolist(), repr(text)


def test_html_entities_and_the_length_are_treated_as_there(tokenizer):
    texts = ["a &amp; b &lt;i&gt;", "fish &amp;amp; chips", "word " * 200, "", "  "]
    tokens, lengths = tokenizer.encode(texts)
    assert tokens.tolist() == open_clip.tokenize(texts).tolist()
    assert lengths.tolist() == [8, 5, 77, 2, 2]


@pytest.fixture(scope="module")
def files(tmp_path_factory, tokenizer):
    folder = tmp_path_factory.mktemp("vocabulary")
    tokenizer.save(folder)
    merges = json.loads((folder / "tokenizer.json").read_text())["model"]["merges"]
    lines = [merge if isinstance(merge, str) else " ".join(merge) for merge in merges]
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *lines, ""]))
    content = "\n".join(["first line", *lines, "more that is not used"]).encode()
    (folder / "bpe_simple_vocab_16e6.txt.gz").write_bytes(gzip.compress(content))
    return folder


@pytest.mark.parametrize(
    "name", ["", "tokenizer.json", "merges.txt", "bpe_simple_vocab_16e6.txt.gz"]
)
def test_the_vocabulary_is_read_from_files_and_folders(files, tokenizer, name):
    found = build(vocabulary=str(files / name))
    texts = ["A photo of a cat's r\u00e9sum\u00e9", "12 o'clock", "\u72ac"]
    assert found.encode(texts).tokens.tolist() == tokenizer.encode(texts).tokens.tolist()
    assert found.settings() == tokenizer.settings()


def test_without_the_packages_the_hub_is_asked(monkeypatch, files):
    monkeypatch.setattr(openai_bpe, "_PACKAGES", ("no_such_package",))
    backend = Backend.from_file(str(files / "tokenizer.json"))
    parts = HfParts(backend=backend, bos_id=1, eos_id=2, pad_id=3)
    monkeypatch.setattr(openai_bpe, "read_hf_tokenizer", lambda name: parts)
    assert read_openai_bpe()[1:] == (49_406, 49_407, 0)
    monkeypatch.undo()
    monkeypatch.setattr(openai_bpe, "_PACKAGES", ("no_such_package",))
    monkeypatch.setattr(openai_bpe, "HUB_NAME", str(files / "nowhere"))
    with pytest.raises(ValueError, match=r"not on the hub .*Install open_clip_torch.*merges\.txt"):
        read_openai_bpe()


def test_another_vocabulary_is_refused(files, tmp_path):
    with pytest.raises(ValueError, match="no such file, or a folder without one"):
        read_openai_bpe(str(tmp_path))
    assert not has_openai_vocabulary(tmp_path)
    lines = (files / "merges.txt").read_text().split("\n")
    lines[7], lines[8] = lines[8], lines[7]
    (tmp_path / "merges.txt").write_text("\n".join(lines))
    assert not has_openai_vocabulary(tmp_path)
    assert has_openai_vocabulary(files)
    with pytest.raises(ValueError, match=r"merges\.txt is not the vocabulary of OpenAI's CLIP"):
        read_openai_bpe(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json has no list of merges"):
        read_openai_bpe(str(tmp_path))


def test_the_vocabulary_is_recognised(files):
    assert is_openai_bpe((files / "tokenizer.json").read_text())
    assert not is_openai_bpe(Backend(models.BPE()).to_str())
    assert not is_openai_bpe(Backend(models.WordLevel({"a": 0}, unk_token="a")).to_str())
