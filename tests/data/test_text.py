import json
import pickle
import random
import string
import sys
import unicodedata

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, processors
from torch.utils.data import DataLoader, Dataset

from multimodal.config import BpeTokenizer, HfTokenizer
from multimodal.data.text import Tokenizer, build_tokenizer

CAPTIONS = [
    "a photo of a cat",
    "A cat on the roof of the house",
    "the roof of a red house",
    "woman firefighter with medium-dark skin",
    "man firefighter with dark skin",
    "r\u00e9sum\u00e9 of a cat, the cat's r\u00e9sum\u00e9",
]
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
LITERALS = ["<|endoftext|>", "<|startoftext|>", "</s>", "<pad>", "[SEP]", "[CLS] [PAD]", "<eos>"]


def train(captions=CAPTIONS, *, lowercase=True, vocab_size=307, context=13, fixed=False):
    return build_tokenizer(
        BpeTokenizer(kind="bpe", lowercase=lowercase),
        context_length=context,
        fixed_length=fixed,
        vocab_size=vocab_size,
        captions=captions,
    )


def from_hf(name, *, lowercase=False, vocab_size=None, context=13, fixed=False):
    return build_tokenizer(
        HfTokenizer(kind="hf", name=str(name), lowercase=lowercase),
        context_length=context,
        fixed_length=fixed,
        vocab_size=vocab_size,
        captions=[],
    )


def make_clip(folder):
    from transformers import CLIPTokenizerFast

    pieces = BYTES + [f"{letter}</w>" for letter in BYTES] + ["ca", "cat</w>"]
    vocab = {piece: i for i, piece in enumerate([*pieces, "<|startoftext|>", "<|endoftext|>"])}
    tokenizer = CLIPTokenizerFast(vocab=vocab, merges=[("c", "a"), ("ca", "t</w>")])
    tokenizer.save_pretrained(folder)
    return tokenizer


def make_bert(folder):
    from transformers import BertTokenizerFast

    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "cat", "##s", "[", "]", "sep", "e"]
    tokenizer = BertTokenizerFast(vocab={piece: i for i, piece in enumerate(pieces)})
    tokenizer.save_pretrained(folder)
    return tokenizer


def make_gpt2(folder):
    from transformers import GPT2TokenizerFast

    vocab = {piece: i for i, piece in enumerate([*BYTES, "<|endoftext|>"])}
    tokenizer = GPT2TokenizerFast(vocab=vocab, merges=[])
    tokenizer.save_pretrained(folder)
    return tokenizer


def make_unigram(folder, template="$A </s>", **tokens):
    """Of the kind of SigLIP and T5: the special tokens are pieces of the model like all others."""
    from transformers import PreTrainedTokenizerFast

    letters = [(letter, -5.0) for letter in string.ascii_lowercase + "</>[]\u2581"]
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("<x>", 0.0), ("cat", -1.0), *letters]
    backend = Backend(models.Unigram(pieces, unk_id=2))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    specials = [("</s>", 1), ("<x>", 3)]
    backend.post_processor = processors.TemplateProcessing(single=template, special_tokens=specials)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, **{"eos_token": "</s>", "pad_token": "<pad>", **tokens}
    )
    tokenizer.save_pretrained(folder)
    return tokenizer


MAKERS = {"clip": make_clip, "bert": make_bert, "gpt2": make_gpt2, "unigram": make_unigram}


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


def rows(batch):
    return [row[:n] for row, n in zip(batch.tokens.tolist(), batch.lengths.tolist(), strict=True)]


def assert_well_formed(tokenizer, batch):
    """Exactly one start and one end, the end last, padding behind, all ids in the table."""
    assert batch.tokens.dtype == batch.lengths.dtype == torch.int64
    assert batch.tokens.min() >= 0 and batch.tokens.max() < tokenizer.vocab_size
    for row, padded in zip(rows(batch), batch.tokens.tolist(), strict=True):
        assert len(row) <= tokenizer.context_length
        assert row.count(tokenizer.eos_id) == 1 and row[-1] == tokenizer.eos_id
        if tokenizer.bos_id is not None:
            assert row.count(tokenizer.bos_id) == 1 and row[0] == tokenizer.bos_id
        assert set(padded[len(row) :]) <= {tokenizer.pad_id}


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


@settings(deadline=None, max_examples=50)
@given(text=st.text(max_size=60))
def test_the_bpe_loses_nothing_but_case_and_spaces(text):
    tokenizer = train(context=1009)
    (row,) = rows(tokenizer.encode([text]))
    normal = unicodedata.normalize("NFC", text)
    decoded = tokenizer._backend.decode(row[1:-1])
    assert "".join(decoded.split()) == "".join(normal.lower().split())


def test_composed_and_decomposed_accents_are_the_same_text(bpe):
    composed, decomposed = bpe.encode(["r\u00e9sum\u00e9", "re\u0301sume\u0301"]).tokens
    assert torch.equal(composed, decomposed)


def test_a_word_has_the_same_ids_at_the_start_and_inside(bpe):
    alone, inside = rows(bpe.encode(["cat", "roof cat"]))
    assert inside[-len(alone) + 1 :] == alone[1:]


def test_spaces_between_words_do_not_matter(bpe):
    tidy, untidy = bpe.encode(["a red house", "\n a\t red \u00a0house  "]).tokens
    assert torch.equal(tidy, untidy)


def test_surrogate_pairs_are_the_character_they_stand_for(bpe):
    pair, character = bpe.encode(["a \ud83d\ude00", "a \U0001f600"]).tokens
    assert torch.equal(pair, character)


@pytest.mark.parametrize("lowercase", [True, False])
def test_case_matters_only_when_asked(lowercase):
    tokenizer = train(lowercase=lowercase)
    small, large = tokenizer.encode(["the cat", "The CAT"]).tokens
    assert torch.equal(small, large) == lowercase == tokenizer.lowercase


@pytest.mark.parametrize("lowercase", [True, False])
def test_lower_case_can_be_asked_of_a_family_that_has_it_not(tmp_path, lowercase):
    make_unigram(tmp_path)
    small, large = rows(from_hf(tmp_path, lowercase=lowercase).encode(["cat", "CAT"]))
    assert (small == large) == lowercase


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


def test_a_cut_text_keeps_its_first_tokens(bpe):
    long = train(context=101)
    text = "a photo of a cat on the roof of the house with a red cat"
    (cut,), (whole,) = rows(bpe.encode([text])), rows(long.encode([text]))
    assert len(cut) == 13 < len(whole)
    assert cut == [*whole[:12], bpe.eos_id]


def test_texts_are_encoded_alike_alone_and_together(bpe):
    together = rows(bpe.encode(iter(CAPTIONS)))
    assert together == [rows(bpe.encode([text]))[0] for text in CAPTIONS]


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
    ],
)
def test_special_ids_are_those_of_the_family(tokenizers, family, bos, eos, pad, vocab_size):
    found = tokenizers[family]
    ids = (found.bos_id, found.eos_id, found.pad_id, found.vocab_size)
    assert ids == (bos, eos, pad, vocab_size)


@pytest.mark.parametrize("family", ["clip", "bert", "unigram"])
def test_ids_are_those_that_transformers_gives(tmp_path, tokenizers, family):
    theirs = MAKERS[family](tmp_path)
    texts = ["a cat", "", "cats a cat a cat a cat a cat a cat", "a" * 31, "Cat"]
    expected = theirs(texts, truncation=True, max_length=13)["input_ids"]
    assert rows(tokenizers[family].encode(texts)) == expected


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


@pytest.mark.parametrize("package", ["ftfy", "sentencepiece", "regex"])
def test_ids_do_not_depend_on_optional_packages(tmp_path, tokenizers, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    make_clip(tmp_path)
    for family, again in (("clip", from_hf(tmp_path)), ("bpe", train())):
        assert torch.equal(
            again.encode(CAPTIONS).tokens, tokenizers[family].encode(CAPTIONS).tokens
        )


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


@pytest.mark.parametrize("name", ["no-such/tokenizer", "empty"])
def test_a_tokenizer_that_cannot_be_had_says_what_to_do(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(
        ValueError, match=rf"tokenizer\.name='{name}'.*local folder.*HF_HUB_OFFLINE"
    ):
        from_hf(name)


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
