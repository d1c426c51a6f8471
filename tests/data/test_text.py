import json
import pickle
import random
import string
import unicodedata

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizers import (
    CAPTIONS,
    LITERALS,
    MAKERS,
    from_hf,
    make_clip,
    make_unigram,
    rows,
    train,
)
from torch.utils.data import DataLoader, Dataset

from multimodal.data.text import Tokenizer


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


@settings(deadline=None, max_examples=50)
@given(text=st.text(max_size=60))
def test_the_bpe_loses_nothing_but_case_and_spaces(text):
    tokenizer = train(context=1009)
    (row,) = rows(tokenizer.encode([text]))
    normal = unicodedata.normalize("NFC", text)
    decoded = tokenizer._backend.decode(row[1:-1])
    assert "".join(decoded.split()) == "".join(normal.lower().split())


def test_a_word_has_the_same_ids_at_the_start_and_inside(bpe):
    alone, inside = rows(bpe.encode(["cat", "roof cat"]))
    assert inside[-len(alone) + 1 :] == alone[1:]


def test_spaces_between_words_do_not_matter(bpe):
    tidy, untidy = bpe.encode(["a red house", "\n a\t red \u00a0house  "]).tokens
    assert torch.equal(tidy, untidy)


def test_surrogate_pairs_are_the_character_they_stand_for(bpe):
    pair, character = bpe.encode(["a \ud83d\ude00", "a \U0001f600"]).tokens
    assert torch.equal(pair, character)


@pytest.mark.parametrize("clean", [["whitespace"], ["lower"]])
def test_case_matters_only_when_asked(clean):
    small, large = train(clean=clean).encode(["the cat", "The CAT"]).tokens
    assert torch.equal(small, large) == ("lower" in clean)


@pytest.mark.parametrize("clean", [[], ["lower"]])
def test_lower_case_can_be_asked_of_a_family_that_has_it_not(tmp_path, clean):
    make_unigram(tmp_path)
    small, large = rows(from_hf(tmp_path, clean=clean).encode(["cat", "CAT"]))
    assert (small == large) == ("lower" in clean)


@pytest.mark.parametrize(
    "texts, width",
    [([], 0), ([""], 8), (["c" * 5], 8), (["c" * 6], 16), (["c" * 13], 16), (["c" * 99], 19)],
)
def test_a_batch_is_as_long_as_its_longest_text_in_steps_of_eight(texts, width):
    # A token for each letter, for the space before the first, for start and end.
    tokenizer = train(captions=["z"], vocab_size=259, context=19)
    assert tokenizer.encode(texts).tokens.shape == (len(texts), width)


@pytest.mark.parametrize("texts", [[], [""], ["a cat", "a"], ["cat " * 99]])
def test_fixed_length_pads_every_batch_to_the_context(texts):
    tokenizer = train(fixed=True, context=19)
    batch = tokenizer.encode(texts)
    assert batch.tokens.shape == (len(texts), 19)
    free = train(context=19).encode(texts)
    assert torch.equal(batch.lengths, free.lengths)
    assert torch.equal(batch.tokens[:, : free.tokens.shape[1]], free.tokens)


def test_texts_are_encoded_alike_alone_and_together(bpe):
    together = rows(bpe.encode(iter(CAPTIONS)))
    assert together == [rows(bpe.encode([text]))[0] for text in CAPTIONS]


# --- cleaning ------------------------------------------------------------------------------------

SIGLIP = ["punctuation", "whitespace", "lower"]
MESSY = [
    "A photo_of: a CAT!",
    " it's  (the)\tcat ",
    "100 % cat \u2013 r\u00e9sum\u00e9",
    "_",
    "...",
]


def canonical(text: str) -> str:
    """SigLIP's rule as its authors state it."""
    text = text.replace("_", " ").translate(str.maketrans("", "", string.punctuation)).lower()
    return " ".join(text.split())


@pytest.mark.parametrize("family", ["siglip", "gemma", "xlm_roberta", "clip"])
def test_texts_are_made_canonical_before_the_tokenizers_own_rules(tmp_path, family):
    MAKERS[family](tmp_path)
    plain, clean = from_hf(tmp_path, context=59), from_hf(tmp_path, context=59, clean=SIGLIP)
    assert rows(clean.encode(MESSY)) == rows(plain.encode([canonical(text) for text in MESSY]))
    assert rows(clean.encode(MESSY)) != rows(plain.encode(MESSY))


def test_a_trained_tokenizer_cleans_what_it_is_trained_on_and_what_it_encodes():
    messy = [text for text in MESSY for _ in range(3)]
    clean = train(messy, clean=[*SIGLIP, "unescape"])
    assert rows(clean.encode(MESSY)) == rows(
        train([canonical(text) for text in messy], clean=[]).encode(map(canonical, MESSY))
    )


def test_html_is_unescaped_as_often_as_openclip_does():
    plain, clean = train(clean=["lower"]), train(clean=["lower", "unescape"])
    escaped = ["cat &amp; house", "cat &amp;amp; house", "&lt;cat&gt;", "r&eacute;sum&#233;"]
    texts = ["cat & house", "cat & house", "<cat>", "r\u00e9sum\u00e9"]
    assert rows(clean.encode(escaped)) == rows(plain.encode(texts))
    assert rows(plain.encode(escaped[:1])) != rows(plain.encode(texts[:1]))


@pytest.mark.parametrize("keep", ["save", "pickle"])
def test_cleaning_is_kept_with_the_tokenizer(tmp_path, keep):
    tokenizer = train(clean=[*SIGLIP, "unescape"])
    tokenizer.save(tmp_path)
    if keep == "save":
        again = Tokenizer.load(tmp_path, json.loads(json.dumps(tokenizer.settings())))
    else:
        again = pickle.loads(pickle.dumps(tokenizer))
    texts = [*MESSY, "&amp;quot;cat&amp;quot;"]
    assert rows(again.encode(texts)) == rows(tokenizer.encode(texts))
    assert rows(again.encode(["cat!"])) == rows(again.encode(["CAT"]))


@pytest.mark.parametrize(
    ("clean", "blank"),
    [([], []), (["whitespace"], []), (SIGLIP, ["...", "_", "(!)"]), (["unescape"], ["&nbsp;"])],
)
def test_a_text_is_blank_when_cleaning_leaves_nothing(clean, blank):
    tokenizer = train(clean=clean)
    texts = ["", " \t", "a", "...", "_", "(!)", "&nbsp;", "\u00e9"]
    assert [text for text in texts if tokenizer.is_blank(text)] == ["", " \t", *blank]


# --- training ------------------------------------------------------------------------------------


def test_the_same_captions_give_the_same_file_in_any_order(tmp_path):
    shuffled = CAPTIONS * 3
    random.Random(0).shuffle(shuffled)
    files = []
    for number, captions in enumerate([CAPTIONS * 3, iter(CAPTIONS * 3), shuffled]):
        folder = tmp_path / str(number)
        folder.mkdir()
        train(captions).save(folder)
        files.append((folder / "tokenizer.json").read_bytes())
    assert files[0] == files[1] == files[2]


def test_a_trained_tokenizer_fits_the_table_and_its_end_is_the_largest_id():
    for vocab_size in (259, 271, 49_408):
        tokenizer = train(vocab_size=vocab_size)
        assert tokenizer.vocab_size <= vocab_size
        assert tokenizer.eos_id == tokenizer.vocab_size - 1
        assert len({tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id}) == 3
    assert tokenizer.vocab_size < 400, "a few captions do not fill a large table"


def test_training_learns_the_words_of_the_captions(bpe):
    learned, unknown = bpe.encode(["firefighter", "qzxvwkjyqzx"]).lengths
    assert learned == 3 < unknown


@pytest.mark.parametrize(
    "vocab_size, message",
    [(258, r"vocab_size=258 is too small.*at least 259"), (None, "needs model.text.vocab_size")],
)
def test_a_table_too_small_for_bytes_is_refused(vocab_size, message):
    with pytest.raises(ValueError, match=message):
        train(vocab_size=vocab_size)


# --- transformers --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "family, bos, eos, pad, vocab_size",
    [
        ("clip", 514, 515, 515, 516),
        ("bert", 2, 3, 0, 12),
        ("gpt2", None, 256, 256, 257),
        ("unigram", None, 1, 0, 37),
        ("siglip", None, 1, 1, 37),
        ("t5", None, 1, 0, 31),
        ("xlm_roberta", 0, 2, 1, 59),
        ("gemma", None, 1, 0, 290),
    ],
)
def test_special_ids_are_those_of_the_family(tokenizers, family, bos, eos, pad, vocab_size):
    found = tokenizers[family]
    ids = (found.bos_id, found.eos_id, found.pad_id, found.vocab_size)
    assert ids == (bos, eos, pad, vocab_size)


@pytest.mark.parametrize("fixed", [True, False])
@pytest.mark.parametrize("family", [name for name in MAKERS if name != "gpt2"])
def test_ids_and_padding_are_those_that_transformers_gives(tmp_path, family, fixed):
    """Of GPT-2's family it adds no end, which texts need here."""
    from transformers import AutoTokenizer

    MAKERS[family](tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    texts = ["a cat", "", "cats a cat a cat a cat a cat a cat", "a" * 31, "Cat", "zebra, \u00e9!"]
    expected = theirs(
        texts,
        truncation=True,
        max_length=16,
        padding="max_length" if fixed else "longest",
        padding_side="right",
        return_tensors="pt",
    )
    ours = from_hf(tmp_path, context=16, fixed=fixed).encode(texts)
    width = expected["input_ids"].shape[1]
    assert torch.equal(ours.tokens[:, :width], expected["input_ids"])
    assert width == 16 or (ours.tokens[:, width:] == expected["input_ids"][1, -1]).all()
    assert torch.equal(ours.lengths, expected["attention_mask"].sum(dim=1))


@pytest.mark.slow
def test_ids_of_the_real_clip_vocabulary_are_those_of_open_clip(tmp_path):
    open_clip = pytest.importorskip("open_clip")
    from transformers import CLIPTokenizerFast

    theirs = open_clip.tokenizer.SimpleTokenizer()
    merges = sorted(theirs.bpe_ranks, key=theirs.bpe_ranks.get)
    renamed = {"<start_of_text>": "<|startoftext|>", "<end_of_text>": "<|endoftext|>"}
    vocab = {renamed.get(piece, piece): i for piece, i in theirs.encoder.items()}
    CLIPTokenizerFast(vocab=vocab, merges=merges).save_pretrained(tmp_path)
    ours = from_hf(tmp_path, context=77, fixed=True, vocab_size=49_408)
    assert (ours.bos_id, ours.eos_id) == (49_406, 49_407)
    texts = [*CAPTIONS, "", "I should've, don't!", "12 dogs: $3.50", "word " * 100, "\U0001f600 x"]
    batch = ours.encode(texts)
    expected = theirs(texts, context_length=77)
    real = torch.arange(77) < batch.lengths[:, None]
    assert torch.equal(batch.tokens[real], expected[real]), "they pad with 0"


def test_a_family_with_a_slow_class_is_read_from_its_file(tmp_path, tokenizers):
    make_unigram(tmp_path)
    described = json.loads((tmp_path / "tokenizer_config.json").read_text())
    described["tokenizer_class"] = "SiglipTokenizer"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(described))
    (tmp_path / "config.json").write_text('{"model_type": "siglip"}')
    expected = tokenizers["unigram"].encode(["cat cat"]).tokens
    assert torch.equal(from_hf(tmp_path).encode(["cat cat"]).tokens, expected)


def test_a_start_token_of_another_kind_is_kept(tmp_path):
    make_unigram(tmp_path, template="<x> $A </s>")
    assert from_hf(tmp_path).bos_id == 3


@pytest.mark.parametrize(
    "template, tokens, message",
    [
        ("<x> <x> $A </s>", {}, "puts 2 tokens before and 1 after"),
        ("$A", {"eos_token": None}, "has no end token"),
    ],
)
def test_families_that_cannot_be_used_say_why(tmp_path, template, tokens, message):
    make_unigram(tmp_path, template, **tokens)
    with pytest.raises(ValueError, match=message):
        from_hf(tmp_path)


def test_a_tokenizer_larger_than_the_table_is_refused_with_both_numbers(tmp_path):
    make_clip(tmp_path)
    assert from_hf(tmp_path, vocab_size=516).vocab_size == 516
    with pytest.raises(ValueError, match=r"516 ids.*vocab_size=515"):
        from_hf(tmp_path, vocab_size=515)


# --- keeping -------------------------------------------------------------------------------------

HARD = [*CAPTIONS, *LITERALS, "", "CAT " * 31, "\0", "\U0001f600"]


@pytest.mark.parametrize("family", ["bpe", *MAKERS])
def test_a_saved_tokenizer_gives_the_same_ids(tmp_path, tokenizers, family):
    tokenizer = tokenizers[family]
    tokenizer.save(tmp_path)
    again = Tokenizer.load(tmp_path, json.loads(json.dumps(tokenizer.settings())))
    assert again.settings() == tokenizer.settings()
    assert torch.equal(again.encode(HARD).tokens, tokenizer.encode(HARD).tokens)


@pytest.mark.parametrize("family", ["bpe", *MAKERS])
def test_a_pickled_tokenizer_gives_the_same_ids(tokenizers, family):
    tokenizer = tokenizers[family]
    again = pickle.loads(pickle.dumps(tokenizer))
    assert again.settings() == tokenizer.settings()
    assert torch.equal(again.encode(HARD).tokens, tokenizer.encode(HARD).tokens)


class Encoded(Dataset):
    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def __len__(self):
        return len(CAPTIONS)

    def __getitem__(self, index):
        return self.tokenizer.encode([CAPTIONS[index]]).tokens[0]


def test_loader_processes_give_the_same_ids(bpe):
    fixed = train(fixed=True)
    loaded = [row[0] for row in DataLoader(Encoded(fixed), batch_size=1, num_workers=2)]
    assert torch.equal(torch.stack(loaded), fixed.encode(CAPTIONS).tokens)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"eos_id": None, "pad_id": ...}, "pad_id missing"),
        ({"colour": 3}, "colour missing or unknown"),
        ({"eos_id": 307}, r"eos_id=307 is not below vocab_size="),
        ({"vocab_size": 261}, r"is not below vocab_size=261"),
        ({"bos_id": 0, "eos_id": 0, "pad_id": 0, "vocab_size": 211}, r"vocab_size=211, but"),
        ({"context_length": 1}, "no room"),
    ],
)
def test_settings_that_do_not_fit_the_file_are_refused(tmp_path, bpe, change, message):
    bpe.save(tmp_path)
    changed = {k: v for k, v in {**bpe.settings(), **change}.items() if v is not ...}
    with pytest.raises(ValueError, match=message):
        Tokenizer.load(tmp_path, changed)


def test_a_missing_or_damaged_file_is_named(tmp_path, bpe):
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json is missing"):
        Tokenizer.load(tmp_path, bpe.settings())
    (tmp_path / "tokenizer.json").write_text('{"model": ')
    with pytest.raises(ValueError, match=r"tokenizer\.json is not a tokenizer file"):
        Tokenizer.load(tmp_path, bpe.settings())


@pytest.mark.parametrize(
    "texts, message",
    [("a cat", r"not one text: write \['a cat'\]"), (["a", None], r"texts\[1\] is a NoneType")],
)
def test_what_is_not_a_list_of_texts_is_refused(bpe, texts, message):
    with pytest.raises(TypeError, match=message):
        bpe.encode(texts)
