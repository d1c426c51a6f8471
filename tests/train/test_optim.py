"""Which parameters decay, and that the optimiser is AdamW as defined."""

import pytest
import torch
from tools import TINY
from torch import nn

from multimodal.config import Model, Optim
from multimodal.config_io import check, merge
from multimodal.models.build import build_model
from multimodal.train.optim import build_optimizer, named_parameters, optimizer_groups
from multimodal.train.parameters import is_decayed

EVERYTHING = {
    "image": {
        "pool": "map",
        "registers": 2,
        "layer_scale": 0.1,
        "patch_bias": True,
        "qk_norm": True,
        "gated_attention": True,
    },
    "text": {"activation": "swiglu"},
    "text_projection": "linear_bias",
    "logit_bias": -10.0,
}


def test_matrices_decay_and_nothing_else():
    model = build_model(check(merge(TINY["model"], EVERYTHING), Model))
    decayed, kept = optimizer_groups(model, Optim(weight_decay=0.3))
    assert (decayed["weight_decay"], kept["weight_decay"]) == (0.3, 0.0)
    names = {name for name, _ in model.named_parameters()}
    assert set(decayed["names"]) | set(kept["names"]) == names
    assert not set(decayed["names"]) & set(kept["names"])
    matrices = {
        f"{path}.weight"
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear | nn.Embedding)
    }
    assert set(decayed["names"]) == matrices
    for expected in (
        "image.class_token",
        "image.registers",
        "image.position.weight",
        "image.pool.probe",
        "text.position.weight",
        "temperature.logit_scale",
        "temperature.logit_bias",
        "text_projection.bias",
    ):
        assert expected in kept["names"]


@pytest.mark.parametrize(
    "name",
    [
        "model.pos_embed",
        "model.cls_token",
        "model.reg_token",
        "model.attn_pool.latent",
        "model.embeddings.position_embeddings.weight",
        "model.embeddings.class_embedding",
    ],
)
def test_names_of_other_libraries_are_known(name):
    assert not is_decayed(name, nn.Parameter(torch.ones(2, 3)))


def test_a_library_model_may_name_more():
    class Tower(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.ones(5, 3))
            self.weight = nn.Parameter(torch.ones(2, 3))
            self.frozen = nn.Parameter(torch.ones(2, 3), requires_grad=False)

        def no_weight_decay(self):
            return {"table"}

    optimizer = build_optimizer(nn.Sequential(Tower()), Optim(weight_decay=0.3))
    decayed, kept = optimizer.param_groups
    assert (decayed["names"], kept["names"]) == (["0.weight"], ["0.table"])


def test_updates_are_those_of_the_formula():
    """One step of arXiv 1711.05101, algorithm 2, on a matrix and on a bias."""
    model = nn.Linear(3, 2)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizer = build_optimizer(model, Optim(lr=0.1, betas=[0.9, 0.98], eps=1e-3, weight_decay=0.5))
    (model(torch.randn(5, 3)) ** 2).sum().backward()
    optimizer.step()
    for name, parameter in named_parameters(optimizer).items():
        decay = 0.5 if name == "weight" else 0.0
        # After one step the corrected moments are the gradient and its square.
        g = parameter.grad
        expected = before[name] * (1 - 0.1 * decay) - 0.1 * g / (g.abs() + 1e-3)
        torch.testing.assert_close(parameter.detach(), expected)
