"""Steps of a model that is sharded over the ranks (FSDP2) are those of DDP, whatever is set."""

import os

import pytest
from test_step import assert_alike, own_part, tiny_model, whole_batch
from tiny import tiny_pretrained
from tools import FSDP2, on_ranks

from multimodal.config import Optim, ParameterGroup
from multimodal.losses import ContrastiveLoss
from multimodal.train.machine import make_accelerator
from multimodal.train.optim import build_optimizer
from multimodal.train.parameters import treatments
from multimodal.train.run_weights import RunWeights
from multimodal.train.step import train_step
from multimodal.weights.pretrained import Pretrained

GROUPS = Optim(
    layer_decay=0.5,
    groups=[
        ParameterGroup(match=r"image.*blocks\.0|token_embedding", freeze=True),
        ParameterGroup(match="norm", lr=3.0),
    ],
)
STEPS = {
    "plain": {},
    "micro-batches": {"micro_batch_size": 3},
    "full checkpointing": {"checkpoint_activations": "full", "micro_batch_size": 3},
    "selective checkpointing": {"checkpoint_activations": "selective"},
    "frozen temperature": {"freeze": ["temperature"]},
    "frozen image": {"freeze": ["image"], "micro_batch_size": 3},
    "groups": {"optim": GROUPS, "micro_batch_size": 3},
    "random": {"overrides": ("model.image.dropout=0.1", "model.text.drop_path=0.3")},
    "bf16": {"precision": "bf16"},
    "kept after forward": {"reshard": "false", "micro_batch_size": 3},
}


def steps(name, sharded):
    """Four steps with an average; their results, the weights and the average, whole."""
    case = dict(STEPS[name])
    os.environ["ACCELERATE_MIXED_PRECISION"] = case.pop("precision", "no")
    if sharded:
        os.environ.update(FSDP2, FSDP_RESHARD_AFTER_FORWARD=case.pop("reshard", "true"))
    accelerator = make_accelerator()
    model = tiny_model("model.logit_bias=-2.0", *case.get("overrides", ()))
    model.checkpoint_activations(case.get("checkpoint_activations", "none"))
    optim = case.get("optim", Optim())
    found = treatments(model, optim, case.get("freeze", ()))
    model.freeze(name for name, how in found.items() if how.frozen)
    pretrained = Pretrained(model, *parts_besides_the_model())
    weights = RunWeights(pretrained, decay=0.6, found=None)
    prepared, results = weights.distribute(accelerator), []
    optimizer = build_optimizer(model, optim)
    for step in range(4):
        result = train_step(
            prepared,
            ContrastiveLoss(),
            optimizer,
            own_part(whole_batch()),
            accelerator=accelerator,
            step=step,
            seed=3,
            lr=1e-3,
            clip_grad_norm=1.0,
            micro_batch_size=case.get("micro_batch_size"),
        )
        results.append(result)
        weights.update()
    states = [{n: x.clone() for n, x in m.model.state_dict().items()} for _, m in weights.usable()]
    return results, states[0], states[1]


def parts_besides_the_model():
    pretrained = tiny_pretrained()
    return pretrained.transform, pretrained.tokenizer, pretrained.config


def all_steps(names, sharded):
    return {name: steps(name, sharded) for name in names}


def assert_sharded_like_ddp(names):
    in_ddp, sharded = on_ranks(2, all_steps, names, False)[0], on_ranks(2, all_steps, names, True)
    for name in names:
        results, weights, averaged = in_ddp[name]
        for ours in (rank[name] for rank in sharded):
            if name == "bf16":
                # Norms and positions are gathered in bf16, of 8 bits.
                for a, b in zip(ours[0], results, strict=True):
                    assert a.loss == pytest.approx(b.loss, rel=0.02)
                continue
            assert_alike((results, weights), [ours[:2]])
            assert_alike((results, averaged), [(ours[0], ours[2])])
            assert not all(averaged[n].equal(x) for n, x in weights.items())
        first, second = (rank[name] for rank in sharded)
        for kind in (1, 2):
            assert all(x.equal(second[kind][n]) for n, x in first[kind].items()), name


def test_sharded_steps_are_those_of_ddp():
    assert_sharded_like_ddp(["micro-batches"])


@pytest.mark.slow
def test_sharded_steps_are_those_of_ddp_whatever_is_set():
    assert_sharded_like_ddp(list(STEPS))
