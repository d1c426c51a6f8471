"""The text tower: pooling, what tokens see, positions, and refusals."""

import pytest
import torch
from torch import Tensor

from multimodal import config
from multimodal.models.text import TextTower

VOCAB, CONTEXT = 97, 13
BASE = {"kind": "transformer", "width": 24, "depth": 2, "heads": 3, "vocab_size": VOCAB,
        "context_length": CONTEXT}  # fmt: skip
BIDIRECTIONAL = {"causal": False, "mask_padding": True}
FAMILIES = {
    "clip": {},
    "causal, rope": {"rope": True, "position": "none"},
    "causal, mean": {"pool": "mean", "mask_padding": True},
    "causal, map": {"pool": "map", "mask_padding": True, "position": "sinusoidal"},
    "bidirectional, eot": BIDIRECTIONAL | {"pool": "eot", "rope": True},
    "bidirectional, mean": BIDIRECTIONAL | {"pool": "mean"},
    "bidirectional, map": BIDIRECTIONAL | {"pool": "map"},
}
"""Ways in which a text may be cut to its own length."""
FIXED = {
    "siglip": {"causal": False, "fixed_length": True, "pool": "last"},
    "mean": {"causal": False, "fixed_length": True, "pool": "mean"},
    "causal, last": {"fixed_length": True, "pool": "last"},
    "last without padding": {"fixed_length": True, "pool": "last", "mask_padding": True},
}


def make(**fields) -> TextTower:
    tower = TextTower(config.TransformerText(**(BASE | fields))).eval()
    for parameter in tower.parameters():
        if parameter.ndim < 2:  # so that biases and factors cannot hide a mistake
            parameter.data += 0.1 * torch.randn_like(parameter)
    return tower


def texts(batch: int = 4) -> tuple[Tensor, Tensor]:
    return torch.randint(VOCAB, (batch, CONTEXT)), torch.tensor([CONTEXT, 5, 2, 7])[:batch]


def padding_changed(tokens: Tensor, lengths: Tensor) -> Tensor:
    outside = torch.arange(tokens.shape[1]) >= lengths[:, None]
    return torch.where(outside, (tokens + 1) % VOCAB, tokens)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_text_depends_neither_on_padding_nor_on_its_batch(name):
    tower = make(**FAMILIES[name])
    tokens, lengths = texts()
    whole = tower(tokens, lengths)
    assert torch.equal(tower(padding_changed(tokens, lengths), lengths), whole)
    for row, length in enumerate(lengths.tolist()):
        alone = tower(tokens[row : row + 1, :length], lengths[row : row + 1])
        assert (alone - whole[row]).abs().max() < 2e-6


@pytest.mark.parametrize("name", [*FAMILIES, *FIXED])
def test_every_weight_is_used_and_every_token_counts(name):
    tower = make(**(FAMILIES | FIXED)[name])
    tokens, lengths = texts()
    features = tower(tokens, lengths)
    assert features.shape == (4, 24)
    features.square().sum().backward()
    for parameter_name, parameter in tower.named_parameters():
        assert parameter.grad.isfinite().all(), parameter_name
        # Softmax does not see what all keys share, so its gradient is rounding noise.
        assert parameter.grad.any() or "k_proj.bias" in parameter_name, parameter_name
    for place in range(5):  # of the second text, which has 5 tokens
        other = tokens.clone()
        other[1, place] = (other[1, place] + 1) % VOCAB
        assert (tower(other, lengths)[1] - features[1]).abs().max() > 1e-4


@pytest.mark.parametrize("name", FIXED)
def test_fixed_texts_do_not_depend_on_their_batch(name):
    tower = make(**FIXED[name])
    tokens, lengths = texts()
    whole = tower(tokens, lengths)
    alone = torch.cat([tower(t[None], n[None]) for t, n in zip(tokens, lengths, strict=True)])
    assert (alone - whole).abs().max() < 1e-6


def test_siglip_sees_its_padding_and_masking_hides_it():
    tokens, lengths = texts()
    for name, seen in (("siglip", True), ("causal, last", True), ("mean", True)):
        tower = make(**FIXED[name])
        changed = tower(padding_changed(tokens, lengths), lengths)
        assert torch.equal(changed[0], tower(tokens, lengths)[0])
        assert ((changed[1:] - tower(tokens, lengths)[1:]).abs().amax(dim=1) > 1e-4).all() == seen
    tower = make(**FIXED["last without padding"])
    changed = tokens.clone()
    changed[1, 5:-1] = (changed[1, 5:-1] + 1) % VOCAB  # all of the padding but the last position
    assert torch.equal(tower(changed, lengths), tower(tokens, lengths))


def outputs_of(tower: TextTower, tokens: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Normalised outputs of the stack, and the features."""
    outputs = []
    hook = tower.encoder.register_forward_hook(lambda _, __, x: outputs.append(x))
    features = tower(tokens, lengths)
    hook.remove()
    return tower.norm(outputs[0]), features


@pytest.mark.parametrize(
    ("fields", "place"),
    [({}, lambda n: n - 1), (FIXED["siglip"], lambda n: CONTEXT - 1)],
    ids=["end of text", "last"],
)
def test_one_token_is_the_text(fields, place):
    tower = make(**fields)
    tokens, lengths = texts()
    outputs, features = outputs_of(tower, tokens, lengths)
    for row, length in enumerate(lengths.tolist()):
        torch.testing.assert_close(features[row], outputs[row, place(length)])


def test_the_mean_is_over_the_tokens_of_the_text():
    tower = make(**FAMILIES["bidirectional, mean"])
    tokens, lengths = texts()
    outputs, features = outputs_of(tower, tokens, lengths)
    for row, length in enumerate(lengths.tolist()):
        torch.testing.assert_close(features[row], outputs[row, :length].mean(dim=0))


def test_no_mask_tensor_is_made_where_the_causal_flag_says_it():
    """Attention has faster ways for a flag than for a tensor."""
    seen = []
    for fields in (FAMILIES["causal, map"], FAMILIES["bidirectional, map"], FIXED["siglip"]):
        tower = make(**fields)
        tower.encoder.register_forward_pre_hook(
            lambda _, __, kwargs: seen.append(kwargs["mask"]), with_kwargs=True
        )
        tower(*texts())
    causal, bidirectional, siglip = seen
    assert causal.causal_only
    assert not bidirectional.causal
    assert bidirectional.key_valid.sum(dim=1).tolist() == [CONTEXT, 5, 2, 7]
    assert siglip is None


@pytest.mark.parametrize("position", ["learned", "sinusoidal", "none"])
@pytest.mark.parametrize("rope", [False, True])
def test_order_matters_exactly_when_there_are_positions(position, rope):
    tower = make(position=position, rope=rope, **BIDIRECTIONAL, pool="mean")
    tokens, lengths = texts()
    swapped = tokens.clone()
    swapped[1, [0, 3]] = swapped[1, [3, 0]]
    difference = (tower(swapped, lengths)[1] - tower(tokens, lengths)[1]).abs().max()
    assert (difference > 1e-4) == (position != "none" or rope)


class TestRefusals:
    def test_too_many_tokens(self):
        with pytest.raises(ValueError, match="14 tokens long, more than context_length=13"):
            make()(torch.zeros(2, 14, dtype=torch.long), torch.tensor([14, 3]))

    def test_a_cut_text_where_the_length_is_fixed(self):
        with pytest.raises(ValueError, match="12 tokens long; with fixed_length=true"):
            make(**FIXED["siglip"])(torch.zeros(2, 12, dtype=torch.long), torch.tensor([12, 3]))

    @pytest.mark.parametrize("token", [VOCAB, -1])
    def test_an_unknown_token(self, token):
        tokens, lengths = texts()
        tokens[2, 1] = token
        with pytest.raises(ValueError, match=f"token id {token} is outside 0..96"):
            make()(tokens, lengths)

    @pytest.mark.parametrize("length", [0, CONTEXT + 1])
    def test_an_impossible_length(self, length):
        tokens, lengths = texts()
        lengths[1] = length
        with pytest.raises(ValueError, match=r"must lie in 1\.\.13"):
            make()(tokens, lengths)

    def test_lengths_of_another_batch(self):
        with pytest.raises(ValueError, match=r"\[4, 13\] and lengths \[3\]"):
            make()(texts()[0], texts(3)[1])
