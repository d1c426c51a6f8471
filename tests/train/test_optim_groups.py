"""What training does with each parameter: by its name, its depth and its part."""

import pytest
import torch
from accelerate import Accelerator
from test_step import own_part, tiny_model, whole_batch
from timm.layers import DropPath
from torch import nn
from transformers import AutoModel, BertConfig

from multimodal import config
from multimodal.config import Optim, Train
from multimodal.losses import ContrastiveLoss
from multimodal.models.depth import parameter_layers
from multimodal.models.hf_text import HfTextTower
from multimodal.models.timm_image import TimmTower
from multimodal.train.gradient import add_gradient
from multimodal.train.optim import build_optimizer, named_parameters
from multimodal.train.parameters import parameter_table, table_lines, treatments
from multimodal.train.start import prepare
from multimodal.train.step import train_step


def optim(*groups, **settings):
    return Optim(groups=[config.ParameterGroup(**group) for group in groups], **settings)


def prepared(section, train=None, *overrides):
    model = tiny_model(*overrides)
    prepare(model, train or Train(), section)
    return model


# --- depth ---------------------------------------------------------------------------------------


def test_the_rate_falls_from_the_projection_to_the_embeddings():
    """Towers of two blocks; the exponents are counted by hand (BEiT, arXiv 2106.08254)."""
    found = treatments(tiny_model(), Optim(layer_decay=0.5))
    expected = {
        "image_projection.weight": 1,
        "temperature.logit_scale": 1,
        "image.norm.weight": 0.5,
        "image.encoder.blocks.1.mlp.inner.fc1.weight": 0.5,
        "image.encoder.blocks.0.attn.norm.bias": 0.25,
        "image.class_token": 0.125,
        "image.position.weight": 0.125,
        "image.patch.proj.weight": 0.125,
        "image.pre_norm.weight": 0.125,
        "text.token_embedding.weight": 0.125,
        "text.encoder.blocks.1.attn.inner.q_proj.weight": 0.5,
        "text.norm.bias": 0.5,
    }
    assert {name: found[name].lr for name in expected} == expected
    assert {t.lr for t in found.values()} == {1, 0.5, 0.25, 0.125}


def test_depth_of_a_bert(tmp_path):
    settings = BertConfig(
        hidden_size=20, intermediate_size=28, num_hidden_layers=3, num_attention_heads=5,
        vocab_size=97, max_position_embeddings=31,
    )  # fmt: skip
    AutoModel.from_config(settings).save_pretrained(tmp_path)
    tower = HfTextTower(config.HfText(kind="hf", name=str(tmp_path), context_length=17))
    for name, layer in parameter_layers(tower).items():
        block = name.partition("encoder.layer.")[2]
        assert layer == (int(block.partition(".")[0]) + 1 if block else 0), name


@pytest.mark.parametrize(("name", "first", "last"), [
    ("test_vit", "model.patch_embed.proj.weight", "model.norm.weight"),
    ("test_convnext", "model.stem.0.weight", "model.head.norm.weight"),
])  # fmt: skip
def test_depth_of_a_timm_model_is_its_own(name, first, last):
    tower = TimmTower(config.TimmImage(kind="timm", name=name, image_size=64))
    layers = parameter_layers(tower)
    assert layers.keys() == {name for name, _ in tower.named_parameters()}
    assert layers[first] == 0 and layers[last] == max(layers.values()) >= 3


def test_a_tower_without_blocks_is_refused():
    with pytest.raises(ValueError, match=r"optim\.layer_decay needs a tower with a row of blocks"):
        parameter_layers(nn.Linear(2, 3))


# --- groups --------------------------------------------------------------------------------------


def test_the_first_match_counts_and_multiplies_with_the_depth():
    section = optim(
        {"match": r"blocks\.0\..*fc1", "lr": 3.0, "weight_decay": 0.7},
        {"match": "^text", "lr": 0.1},
        layer_decay=0.5,
        weight_decay=0.3,
    )
    found = treatments(tiny_model(), section)
    fc1 = found["text.encoder.blocks.0.mlp.inner.fc1.weight"]
    assert (fc1.lr, fc1.weight_decay) == (3 * 0.25, 0.7)
    assert found["text.encoder.blocks.0.mlp.inner.fc1.bias"].weight_decay == 0, "never decays"
    fc2 = found["text.encoder.blocks.0.mlp.inner.fc2.weight"]
    assert (fc2.lr, fc2.weight_decay) == (pytest.approx(0.1 * 0.25), 0.3)
    assert found["text_projection.weight"].lr == pytest.approx(0.1)
    assert found["image_projection.weight"].lr == 1


@pytest.mark.parametrize(
    ("groups", "freeze", "message"),
    [
        ([{"match": "txt.token"}], [], "matches no parameter; names are such as text.token_emb"),
        ([{"match": "^text"}, {"match": "text.*norm"}], [], "all belong to optim.groups.0: ^text"),
        ([{"match": r"^text\.", "lr": 0.1}], ["text"], "all belong to train.freeze: text already"),
        ([{"match": "."}, {"match": "temp"}], [], "the first that matches counts"),
        ([{"match": ".", "freeze": True}], [], "leave no parameter of a tower to train"),
        ([{"match": "^image", "freeze": True}], ["text"], "leave no parameter of a tower"),
    ],
)
def test_a_group_that_does_nothing_is_a_mistake(groups, freeze, message):
    with pytest.raises(ValueError) as caught:
        treatments(tiny_model(), optim(*groups), freeze)
    assert message in str(caught.value)


def test_what_is_frozen_by_part_and_by_name_is_frozen_alike():
    by_part = prepared(Optim(), Train(freeze=["text"]))
    by_name = prepared(optim({"match": "^text", "freeze": True}))
    for a, b in zip(by_part.named_parameters(), by_name.named_parameters(), strict=True):
        assert a[0] == b[0] and a[1].requires_grad == b[1].requires_grad
    for a, b in zip(by_part.modules(), by_name.modules(), strict=True):
        assert a.training == b.training
    assert not by_name.learns("text") and by_name.learns("image")


def test_a_block_that_is_frozen_whole_acts_as_in_evaluation_and_the_others_do_not():
    random = ("model.image.dropout=0.5", "model.image.drop_path=0.5")
    section = optim({"match": r"image\.encoder\.blocks\.0", "freeze": True})
    model = prepared(section, None, *random).train()
    first, second = model.image.encoder.blocks
    assert not first.training and not first.attn.dropout.training
    assert second.training and second.attn.dropout.training and model.image.training
    x = torch.randn(3, 5, 16)
    assert first(x).equal(first(x)) and not second(x).equal(second(x))
    assert not any(m.training for m in model.eval().modules()) and model.train().training
    assert not first.training, "also after an evaluation"
    assert not any(isinstance(m, DropPath) for m in model.modules())


def test_a_partly_frozen_module_stays_in_training():
    model = prepared(optim({"match": r"blocks\.0\.mlp", "freeze": True})).train()
    assert model.image.encoder.blocks[0].training
    assert not model.image.encoder.blocks[0].mlp.training


SOME = optim(
    {"match": r"blocks\.0", "freeze": True},
    {"match": "token_embedding", "lr": 0.25},
    {"match": "image_projection", "lr": 4.0, "weight_decay": 0.0},
    layer_decay=0.5,
    weight_decay=0.0,
)


@pytest.mark.parametrize("size", [None, 3])
def test_the_gradient_of_what_learns_is_the_same_and_the_frozen_have_none(size):
    plain, some = tiny_model(), prepared(SOME)
    for model, cut in ((plain, None), (some, size)):
        add_gradient(
            model,
            ContrastiveLoss(),
            whole_batch(),
            accelerator=Accelerator(cpu=True),
            micro_batch_size=cut,
            seed_of=lambda part: 11 + part,
        )
    frozen = 0
    for (name, a), (_, b) in zip(plain.named_parameters(), some.named_parameters(), strict=True):
        if ".blocks.0." in name:
            assert b.grad is None and not b.requires_grad
            frozen += 1
        else:
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-6, msg=name)
    assert frozen == 32


def test_a_step_moves_each_parameter_by_its_own_rate():
    """Without weight decay Adam's first step is lr * factor * g / (|g| + eps)."""
    model = prepared(SOME)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    gradients = {}

    def look(tower, features):
        gradients.update(
            (n, p.grad.clone()) for n, p in tower.named_parameters() if p.requires_grad
        )
        return {}

    optimizer = build_optimizer(model, SOME)
    train_step(
        model,
        ContrastiveLoss(),
        optimizer,
        own_part(whole_batch()),
        accelerator=Accelerator(cpu=True),
        step=0,
        seed=1,
        lr=1e-2,
        clip_grad_norm=None,
        look=look,
    )
    factors = {name: t.lr for name, t in treatments(model, SOME).items()}
    assert factors["text.token_embedding.weight"] == 0.25 * 0.5**3
    assert factors["image_projection.weight"] == 4
    for name, parameter in model.named_parameters():
        moved = before[name] - parameter.detach()
        g = gradients.get(name, torch.zeros(()))
        expected = 1e-2 * factors[name] * g / (g.abs() + SOME.eps)
        torch.testing.assert_close(moved, expected.expand_as(moved), rtol=1e-3, atol=1e-6, msg=name)
    assert set(named_parameters(optimizer)) == set(gradients), "no state for the frozen"
    assert len(optimizer.state) == len(gradients)


def test_the_table_counts_every_parameter_once():
    model = tiny_model()
    rows = parameter_table(model, treatments(model, SOME))
    names = [name for row in rows for name in row["names"]]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    assert sum(row["parameters"] for row in rows) == sum(p.numel() for p in model.parameters())
    head, *lines = table_lines(rows)
    assert head.split("  ")[0] == "group"
    frozen = [line for line in lines if "frozen" in line]
    assert len(frozen) == 1 and frozen[0].startswith(r"optim.groups.0: blocks\.0")
    assert any("x 4 " in line and "image_projection.weight" in line for line in lines)
    assert any("x 0.03125" in line and "text.token_embedding.weight" in line for line in lines)
