"""Small tokenizers of every family, and what must hold of all they give."""

import string

import torch
from tokenizers import Tokenizer as Backend
from tokenizers import models, normalizers, pre_tokenizers, processors

from multimodal.config import BpeTokenizer, HfTokenizer
from multimodal.data.text import build_tokenizer

CAPTIONS = [
    "a photo of a cat",
    "A cat on the roof of the house",
    "the roof of a red house",
    "woman firefighter with medium-dark skin",
    "man firefighter with dark skin",
    "r\u00e9sum\u00e9 of a cat, the cat's r\u00e9sum\u00e9",
]
LITERALS = ["<|endoftext|>", "<|startoftext|>", "</s>", "<pad>", "[SEP]", "[CLS] [PAD]", "<eos>"]
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())


def train(captions=CAPTIONS, *, vocab_size=307, context=13, fixed=False, **options):
    return build_tokenizer(
        BpeTokenizer(kind="bpe", **options),
        context_length=context,
        fixed_length=fixed,
        vocab_size=vocab_size,
        captions=captions,
    )


def from_hf(name, *, vocab_size=None, context=13, fixed=False, **options):
    return build_tokenizer(
        HfTokenizer(kind="hf", name=str(name), **options),
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


def make_siglip(folder):
    """As SigLIP's, and T5's: the end only, which is the padding too."""
    return make_unigram(folder, pad_token="</s>")


def make_t5(folder):
    from transformers import T5TokenizerFast

    letters = [(letter, -5.0) for letter in string.ascii_lowercase + "\u2581"]
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("\u2581cat", -1.0), *letters]
    tokenizer = T5TokenizerFast(vocab=pieces, extra_ids=0)
    tokenizer.save_pretrained(folder)
    return tokenizer


def make_xlm_roberta(folder):
    """Also XLM-V, with its 900,000 pieces (MetaCLIP 2)."""
    from transformers import XLMRobertaTokenizerFast

    specials = [(piece, 0.0) for piece in ("<s>", "<pad>", "</s>", "<unk>")]
    letters = [(letter, -5.0) for letter in string.ascii_letters + "\u2581"]
    pieces = [*specials, ("\u2581cat", -1.0), *letters, ("<mask>", 0.0)]
    tokenizer = XLMRobertaTokenizerFast(vocab=pieces)
    tokenizer.save_pretrained(folder)
    return tokenizer


def make_nllb(folder):
    """A language before the text and the end behind it."""
    from transformers import NllbTokenizerFast

    letters = [*string.ascii_letters, "\u2581", "ca", "cat", "\u2581cat"]
    vocab = {p: i for i, p in enumerate(["<s>", "<pad>", "</s>", "<unk>", *letters])}
    merges = [("c", "a"), ("ca", "t"), ("\u2581", "cat")]
    tokenizer = NllbTokenizerFast(vocab=vocab, merges=merges, src_lang="eng_Latn")
    tokenizer.save_pretrained(folder)
    return tokenizer


def make_gemma(folder):
    """As SigLIP 2's: Gemma's pieces, no start, the end behind."""
    from transformers import PreTrainedTokenizerFast

    pieces = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
    pieces += [f"<0x{byte:02X}>" for byte in range(256)]
    pieces += [*string.ascii_lowercase, "\u2581", "ca", "cat"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    model = models.BPE(
        vocab, [("c", "a"), ("ca", "t")], fuse_unk=True, unk_token="<unk>", byte_fallback=True
    )
    backend = Backend(model)
    backend.normalizer = normalizers.Replace(" ", "\u2581")
    backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    backend.post_processor = processors.TemplateProcessing(
        single="$A <eos>", special_tokens=[("<eos>", 1)]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        unk_token="<unk>",
        padding_side="left",
    )
    tokenizer.save_pretrained(folder)
    return tokenizer


MAKERS = {
    "clip": make_clip,
    "siglip": make_siglip,
    "gemma": make_gemma,
    "xlm_roberta": make_xlm_roberta,
    "nllb": make_nllb,
    "bert": make_bert,
    "t5": make_t5,
    "gpt2": make_gpt2,
    "unigram": make_unigram,
}
"""By family; each writes a small tokenizer of its kind into a folder, and returns it."""


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
