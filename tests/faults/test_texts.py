"""Faults F40 and F47: odd captions, and a tokenizer that cannot be had."""

import shutil
import socket
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from made_data import jpeg
from tiny_tokenizers import (
    CAPTIONS,
    LITERALS,
    MAKERS,
    assert_well_formed,
    from_hf,
    make_clip,
    rows,
    train,
)
from tools import make_shards, tiny_config
from tools import rows as metrics

from multimodal.config import Augment, Data, FolderSource, Preprocess
from multimodal.data.loader import train_loader
from multimodal.data.source import BadSample, Sample, parse_sidecars
from multimodal.data.text import Tokenizer
from multimodal.data.transforms import ImageTransform
from multimodal.train import loop


@pytest.fixture(scope="module")
def bpe():
    return train()


@pytest.fixture(scope="module")
def tokenizers(bpe, tmp_path_factory):
    found = {"bpe": bpe}
    for name, make in MAKERS.items():
        folder = tmp_path_factory.mktemp(name)
        make(folder)
        found[name] = from_hf(folder)
    return found


# --- F40: odd captions ---------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["bpe", *MAKERS])
@settings(deadline=None, max_examples=50)
@given(texts=st.lists(st.text(max_size=40) | st.sampled_from(LITERALS), min_size=1, max_size=5))
def test_any_text_has_one_start_and_one_end(tokenizers, family, texts):
    assert_well_formed(tokenizers[family], tokenizers[family].encode(texts))


@pytest.mark.parametrize("family", ["bpe", *MAKERS])
@pytest.mark.parametrize(
    "text",
    [
        "cat " * 10_007,
        "c" * 10_007,
        "\0 cat \0",
        "\ud83d\ude00 \udfff lone",
        "\u05e9\u05dc\u05d5\u05dd \u202e",
        "\U0001f469\U0001f3fe\u200d\U0001f692",
        " \t\n ",
        *LITERALS,
        " ".join(LITERALS),
    ],
)
def test_odd_texts_are_well_formed(tokenizers, family, text):
    batch = tokenizers[family].encode([text, "a cat"])
    assert_well_formed(tokenizers[family], batch)
    assert rows(batch)[1] == rows(tokenizers[family].encode(["a cat"]))[0]


@pytest.mark.parametrize("family", ["bpe", *MAKERS])
def test_an_empty_text_is_start_and_end(tokenizers, family):
    tokenizer = tokenizers[family]
    start = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    assert rows(tokenizer.encode([""])) == [[*start, tokenizer.eos_id]]


@pytest.mark.parametrize(
    "family, literal",
    [
        ("bpe", "<|endoftext|>"),
        ("clip", "<|startoftext|>"),
        ("clip", "<|endoftext|>"),
        ("gpt2", "<|endoftext|>"),
        ("unigram", "</s>"),
    ],
)
def test_a_special_token_in_a_text_is_spelled_and_not_dropped(tokenizers, family, literal):
    found = tokenizers[family]
    tokenizer = Tokenizer(found._backend, **{**found.settings(), "context_length": 31})
    (row,) = rows(tokenizer.encode([literal]))
    pieces = [tokenizer._backend.id_to_token(i) or "" for i in row[:-1] if i != tokenizer.bos_id]
    assert "".join(pieces).replace("</w>", "").strip("\u0120\u2581") == literal


def test_training_texts_that_hold_special_tokens_do_not_make_them_special():
    tokenizer = train(["<|endoftext|> <|startoftext|> </s>"] * 17, context=29)
    assert_well_formed(tokenizer, tokenizer.encode(["<|endoftext|>", "a <|startoftext|> b </s>"]))


def test_composed_and_decomposed_accents_are_the_same_text(bpe):
    composed, decomposed = bpe.encode(["r\u00e9sum\u00e9", "re\u0301sume\u0301"]).tokens
    assert torch.equal(composed, decomposed)


@pytest.mark.parametrize("package", ["ftfy", "sentencepiece", "regex"])
def test_ids_do_not_depend_on_optional_packages(tmp_path, tokenizers, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    make_clip(tmp_path)
    for family, again in (("clip", from_hf(tmp_path)), ("bpe", train())):
        assert torch.equal(
            again.encode(CAPTIONS).tokens, tokenizers[family].encode(CAPTIONS).tokens
        )


@pytest.mark.parametrize("name", ["no-such/tokenizer", "empty"])
def test_a_tokenizer_that_cannot_be_had_says_what_to_do(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(
        ValueError, match=rf"tokenizer\.name='{name}'.*local folder.*HF_HUB_OFFLINE"
    ):
        from_hf(name)


def test_a_cut_text_keeps_its_first_tokens(bpe):
    long = train(context=101)
    text = "a photo of a cat on the roof of the house with a red cat"
    (cut,), (whole,) = rows(bpe.encode([text])), rows(long.encode([text]))
    assert len(cut) == 13 < len(whole)
    assert cut == [*whole[:12], bpe.eos_id]


class Captioned:
    """One sample for each tuple of captions."""

    description, problems = "captioned", {}

    def __init__(self, *captions):
        self.captions = captions

    def __len__(self):
        return len(self.captions)

    def groups(self):
        return [len(self)]

    def read(self, index):
        return Sample(f"k{index}", jpeg(index, 18, 16), self.captions[index], {})

    def place(self, index):
        return "captioned"

    def fingerprint(self):
        return "captioned"


def trained_on(source, tokenizer):
    """The captions of the first epoch, and its skips."""
    loader = train_loader(
        source,
        data=Data(train=FolderSource(kind="folder", path="."), workers=0, caption="first"),
        transform=ImageTransform(16, Preprocess(), Augment()),
        tokenizer=tokenizer,
        batch_size=1,
        start_step=0,
        end_step=len(source),
        rank=0,
        world_size=1,
        seed=0,
    )
    batches = list(loader)
    for batch in batches:
        assert_well_formed(tokenizer, batch)
    return [batch.captions[0] for batch in batches], [s for b in batches for s in b.skipped]


def test_what_is_no_text_is_skipped_and_counted():
    """The policy: no caption, nothing left of it, or a NUL in it make a sample unusable."""
    usable = [(f"cat {number}",) for number in range(9)]
    bad = {9: ((), "no caption"), 10: (("...",), "no caption"), 11: (("_ !",), "no caption")}
    bad[12] = (("a\0cat",), "caption with a NUL")
    source = Captioned(*usable, *(captions for captions, _ in bad.values()))
    clean = train(clean=["punctuation", "whitespace", "lower"])
    captions, skips = trained_on(source, clean)
    assert {(skip.key, skip.reason) for skip in skips} == {
        (f"k{index}", reason) for index, (_, reason) in bad.items()
    }
    assert len(captions) == len(source)
    assert set(captions) == {caption for (caption,) in usable}


def test_words_that_stand_for_nothing_elsewhere_are_words_here():
    words = ["NA", "null", "None", "nan", "N/A", "0", "false"]
    captions, skips = trained_on(Captioned(*((word,) for word in words)), train())
    assert sorted(captions) == sorted(words)
    assert skips == []


def test_half_a_surrogate_pair_does_not_end_the_run():
    captions, skips = trained_on(Captioned(("a \ud83d cat",), ("\ud83d\ude00",)), train())
    assert len(captions) == 2 and skips == []


@pytest.mark.parametrize(
    ("files", "captions"),
    [
        ({"text": b" \t\r\n "}, ()),
        ({"text": b""}, ()),
        ({"record": b'{"caption": null}'}, ()),
        ({"record": b'{"captions": ["", null, " a cat ", "null"]}'}, ("a cat", "null")),
        ({"text": b"\xef\xbb\xbfa cat\r\n"}, ("a cat",)),
        (
            {"text": "\u05e9\u05dc\u05d5\u05dd \u202e".encode()},
            ("\u05e9\u05dc\u05d5\u05dd \u202e",),
        ),
    ],
)
def test_files_beside_a_picture_give_texts_or_nothing(files, captions):
    given = {"text": None, "record": None, "label": None, **files}
    assert parse_sidecars("k", **given)[0] == captions


@pytest.mark.parametrize("name", ["text", "record"])
def test_invalid_utf_8_is_a_bad_sample_with_a_reason(name):
    files = {"text": b"caf\xe9", "record": b'{"caption": "caf\xe9"}'}
    with pytest.raises(BadSample) as caught:
        parse_sidecars("k", **{"text": None, "record": None, "label": None, name: files[name]})
    assert caught.value.reason in ("text is not UTF-8", "damaged JSON")
    assert caught.value.key == "k"


# --- F47: no network -----------------------------------------------------------------------------


@pytest.fixture
def unplugged(monkeypatch):
    """Every connection fails, and so does every look-up of a name; gives those tried."""
    tried = []

    def refuse(*arguments, **_):
        tried.append(arguments)
        raise OSError("the network is unplugged")

    for name in ("connect", "connect_ex", "bind", "sendto"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    return tried


def test_the_default_tokenizer_trains_and_a_run_ends_unplugged(tmp_path, unplugged):
    source = make_shards(tmp_path / "shards", 26)
    loop.train(tiny_config(tmp_path / "run", source, "train.duration=2 steps"))
    assert (tmp_path / "run" / "model" / "tokenizer.json").is_file()


def test_a_tokenizer_in_a_folder_works_unplugged(tmp_path, unplugged):
    make_clip(tmp_path)
    assert_well_formed(tokenizer := from_hf(tmp_path), tokenizer.encode(CAPTIONS))


@pytest.mark.parametrize("offline", ["0", "1"])
def test_a_missing_tokenizer_is_refused_before_anything_is_written(
    tmp_path, monkeypatch, unplugged, offline
):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", offline == "1")
    source = make_shards(tmp_path / "shards", 26)
    run = tmp_path / "runs" / "a"
    settings = tiny_config(
        run, source, "model.tokenizer.kind=hf", "model.tokenizer.name=no-such/tokenizer"
    )
    with pytest.raises(ValueError, match=r"tokenizer\.name='no-such/tokenizer'.*local folder"):
        loop.train(settings)
    assert not run.parent.exists()
    assert len(unplugged) <= (3 if offline == "0" else 0), "no trying again for minutes"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.text.vocab_size=200", "vocab_size=200 is too small.*at least 259"),
        ("model.tokenizer.name=FOLDER", r"516 ids.*vocab_size=300"),
    ],
)
def test_a_tokenizer_that_does_not_fit_is_refused_before_anything_is_written(
    tmp_path, override, message
):
    make_clip(tmp_path / "clip")
    kind = ["model.tokenizer.kind=hf"] if "FOLDER" in override else []
    override = override.replace("FOLDER", str(tmp_path / "clip"))
    run = tmp_path / "run"
    settings = tiny_config(run, make_shards(tmp_path / "shards", 26), *kind, override)
    with pytest.raises(ValueError, match=message):
        loop.train(settings)
    assert not run.exists()


def test_a_run_resumes_without_the_tokenizer_it_started_from(tmp_path):
    """It is in the checkpoint."""
    make_clip(tmp_path / "clip")
    source, run = make_shards(tmp_path / "shards", 26), tmp_path / "run"
    options = ["model.tokenizer.kind=hf", f"model.tokenizer.name={tmp_path / 'clip'}"]
    options += ["model.text.vocab_size=600", "train.duration=4 steps"]
    loop.train(tiny_config(run, source, *options))
    shutil.rmtree(tmp_path / "clip")
    longer = [*options[:-1], "train.duration=6 steps"]
    loop.train(tiny_config(run, source, *longer))
    assert [row["step"] for row in metrics(run) if "loss" in row] == [1, 2, 3, 4, 5, 6]
