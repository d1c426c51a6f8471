"""Text towers of transformers, saved by it: the features of its own AutoModel, and no other's.

Each text is computed there alone and without padding, so that a batch, its padding and its order
cannot matter.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import tiny_pretrained, tiny_section
from torch import Tensor
from transformers import (
    AutoModel,
    BertConfig,
    BertForMaskedLM,
    BertModel,
    CLIPTextConfig,
    DistilBertConfig,
    ModernBertConfig,
    MPNetConfig,
    RobertaConfig,
    RobertaForMaskedLM,
    T5Config,
    XLMRobertaConfig,
)

from multimodal import config
from multimodal.data.text import build_tokenizer
from multimodal.models.build import build_model
from multimodal.models.hf_text import HfTextTower
from multimodal.weights.load import load
from multimodal.weights.pretrained import Pretrained
from multimodal.weights.save import save_model

VOCAB, CONTEXT = 301, 21
SIZES = {
    "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 3,
    "vocab_size": VOCAB,
}  # fmt: skip
IDS = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
MODELS = {
    "bert": BertConfig(**SIZES, max_position_embeddings=CONTEXT),
    "roberta": RobertaConfig(**SIZES, **IDS, max_position_embeddings=CONTEXT + 2),
    "xlm-r": XLMRobertaConfig(**SIZES, **IDS, max_position_embeddings=CONTEXT + 2),
    "mpnet": MPNetConfig(**SIZES, **IDS, max_position_embeddings=CONTEXT + 2),
    "minilm": BertConfig(**SIZES, max_position_embeddings=CONTEXT, type_vocab_size=2),
    "distilbert": DistilBertConfig(
        dim=24, hidden_dim=40, n_layers=2, n_heads=3, vocab_size=VOCAB,
        max_position_embeddings=CONTEXT,
    ),
    "modernbert": ModernBertConfig(
        **SIZES, pad_token_id=0, max_position_embeddings=CONTEXT, global_attn_every_n_layers=2,
        local_attention=6,
    ),
    "t5": T5Config(d_model=24, d_ff=40, num_layers=2, num_heads=3, d_kv=8, vocab_size=VOCAB),
    "clip": CLIPTextConfig(**SIZES, **IDS, max_position_embeddings=CONTEXT),
}  # fmt: skip
POOLS = ("cls", "mean", "eot")


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    """A saved random model of each kind, with weights large enough for every part to matter."""
    folder = tmp_path_factory.mktemp("text")
    for name, settings in MODELS.items():
        torch.manual_seed(0)
        model = AutoModel.from_config(settings)
        for key, parameter in model.named_parameters():
            if parameter.ndim >= 2 and "embed" not in key and "shared" not in key:
                parameter.data.normal_(std=parameter[0].numel() ** -0.5)
            else:
                parameter.data += 0.3 * torch.randn_like(parameter)
        model.save_pretrained(folder / name)
    return folder


def section(name: object, **fields) -> config.HfText:
    return config.HfText(**({"kind": "hf", "name": str(name), "context_length": CONTEXT} | fields))


def texts(name: str) -> tuple[Tensor, Tensor]:
    """Full, padded and short texts, with the family's padding, which is in none of them."""
    lengths = torch.tensor([CONTEXT, 7, 2, 13])
    tokens = torch.randint(5, VOCAB, (4, CONTEXT))
    padding = MODELS[name].pad_token_id or 0
    tokens[torch.arange(CONTEXT) >= lengths[:, None]] = padding
    return tokens, lengths


def alone(model, tokens: Tensor, lengths: Tensor, pool: str) -> Tensor:
    """Features of each text by itself."""
    rows = []
    for row, length in zip(tokens, lengths.tolist(), strict=True):
        states = model(input_ids=row[None, :length]).last_hidden_state[0]
        rows.append({"cls": states[0], "mean": states.mean(0), "eot": states[-1]}[pool])
    return torch.stack(rows)


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_features_are_those_of_transformers_for_each_text_alone(folders, name, pool):
    theirs = AutoModel.from_pretrained(folders / name).eval()
    theirs = theirs.get_encoder() if name == "t5" else theirs
    tower = HfTextTower(section(folders / name, pool=pool)).eval()
    tokens, lengths = texts(name)
    expected = alone(theirs, tokens, lengths, pool)
    found = tower(tokens, lengths)
    assert (found - expected).abs().max() < 1e-5
    cut = tower(tokens[1:3, :7], lengths[1:3])
    assert (cut - expected[1:3]).abs().max() < 1e-5
    order = torch.tensor([2, 0, 3, 1])
    assert (tower(tokens[order], lengths[order]) - expected[order]).abs().max() < 1e-5


MUTATIONS = {
    "cls for mean": ("cls", "mean"),
    "eot for mean": ("eot", "mean"),
    "cls for eot": ("cls", "eot"),
}


@pytest.mark.parametrize("what", MUTATIONS)
@pytest.mark.parametrize("name", ["bert", "roberta", "modernbert", "distilbert"])
@torch.no_grad()
def test_another_pool_is_noticed(folders, name, what):
    """Otherwise the test above would prove little."""
    ours, theirs = MUTATIONS[what]
    model = AutoModel.from_pretrained(folders / name).eval()
    tower = HfTextTower(section(folders / name, pool=ours)).eval()
    tokens, lengths = texts(name)
    assert (tower(tokens, lengths) - alone(model, tokens, lengths, theirs)).abs().max() > 1e-2


@pytest.mark.parametrize("name", ["bert", "roberta", "modernbert", "distilbert", "t5"])
@torch.no_grad()
def test_padding_that_is_not_hidden_is_noticed(folders, name):
    model = AutoModel.from_pretrained(folders / name).eval()
    model = model.get_encoder() if name == "t5" else model
    tokens, lengths = texts(name)
    seen = model(tokens, attention_mask=torch.ones_like(tokens)).last_hidden_state[:, 0]
    tower = HfTextTower(section(folders / name, pool="cls")).eval()
    assert (tower(tokens, lengths) - seen)[1:].abs().max() > 1e-3
    assert (tower(tokens, lengths) - seen)[0].abs().max() < 1e-5


@pytest.mark.parametrize("name", ["bert", "roberta", "xlm-r", "mpnet", "distilbert", "clip"])
def test_the_longest_text_is_known(folders, name):
    """RoBERTa and its kin lose two of their positions."""
    HfTextTower(section(folders / name))
    with pytest.raises(ValueError, match=f"context_length=22 is more than the {CONTEXT} positions"):
        HfTextTower(section(folders / name, context_length=CONTEXT + 1))


@pytest.mark.parametrize("name", MODELS)
def test_a_model_folder_is_bit_equal_and_needs_no_other_file(folders, name, tmp_path):
    source = folders / name
    of = tiny_section(text=section(source, pool="mean").model_dump())
    saved = tiny_pretrained_of(of)
    save_model(tmp_path, model=saved.model, section=of, tokenizer=saved.tokenizer)
    hidden = source.rename(source.with_name("moved"))
    try:
        again = load(tmp_path)
    finally:
        hidden.rename(source)
    for key, tensor in saved.model.state_dict().items():
        assert torch.equal(again.model.state_dict()[key], tensor), key
    tokens, lengths = texts(name)
    whole = saved.model.eval().encode_text(tokens, lengths)
    assert torch.equal(again.model.encode_text(tokens, lengths), whole)


def tiny_pretrained_of(of: config.Model) -> Pretrained:
    """With a tokenizer that such a section does not train itself."""
    tokenizer = build_tokenizer(
        of.tokenizer, context_length=CONTEXT, fixed_length=False, vocab_size=VOCAB, captions=["a"]
    )
    return replace(tiny_pretrained(), model=build_model(of), tokenizer=tokenizer, config=of)


@pytest.mark.parametrize(
    ("settings", "kind"), [("bert", BertForMaskedLM), ("roberta", RobertaForMaskedLM)]
)
def test_a_language_models_head_is_left_out(settings, kind, tmp_path):
    whole = kind(MODELS[settings])
    whole.save_pretrained(tmp_path)
    tower = HfTextTower(section(tmp_path))
    for key, tensor in whole.base_model.state_dict().items():
        assert torch.equal(tower.model.state_dict()[key], tensor), key


def test_weights_that_do_not_fit_are_named(folders, tmp_path):
    BertModel.from_pretrained(folders / "bert").save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    key = "encoder.layer.1.output.dense.bias"

    def refused(match, changed):
        save_file(changed, tmp_path / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ValueError, match=match):
            HfTextTower(section(tmp_path))

    refused(f"missing {key}", {k: v for k, v in state.items() if k != key})
    refused("unexpected encoder.layer.2", state | {"encoder.layer.2.x": torch.zeros(2)})
    refused(rf"{key} (is \[2\] instead of \[24\]|of another shape)", state | {key: torch.zeros(2)})
    refused("missing embeddings", {"a": torch.zeros(2)})
    without_pooler = {k: v for k, v in state.items() if "pooler" not in k}
    save_file(without_pooler, tmp_path / "model.safetensors", metadata={"format": "pt"})
    HfTextTower(section(tmp_path))
