"""What a run will take: predicted sizes against counted ones, and each doubt on and off."""

import pytest
import torch
from tools import make_shards, retrieval, tiny_config, tiny_tree

from multimodal.config import Config, Optim
from multimodal.config_io import check
from multimodal.models.build import build_model
from multimodal.train import plan
from multimodal.train.check import check_run
from multimodal.train.optim import build_optimizer
from multimodal.train.plan import Sizes, predict, saved_bytes, step_seconds
from multimodal.train.schedule import plan as schedule_of


def test_the_dry_step_agrees_with_the_prediction(tmp_path):
    shards = make_shards(tmp_path / "data", 80)
    config = tiny_config(
        tmp_path / "run", shards, "train.batch_size=64", "train.micro_batch_size=16"
    )
    report = check_run(config)
    assert report.problems == []
    memory = report.facts["memory"]
    model = build_model(config.model)
    weights = 4 * sum(p.numel() for p in model.parameters())
    for part, bytes_ in {
        "parameters": weights,
        "gradients": weights,
        "optimizer": 2 * weights,
    }.items():
        assert memory[part]["run_mb"] == memory[part]["measured_mb"] == round(bytes_ / 1e6, 2)
    ours = memory["activations"]
    assert ours["dry_mb"] == pytest.approx(ours["measured_mb"], rel=0.1)
    assert memory["together"]["run_mb"] == pytest.approx(
        sum(
            row["run_mb"] for part, row in memory.items() if part not in ("together", "checkpoint")
        ),
        abs=0.05,
    )
    assert memory["checkpoint"]["run_mb"] == memory["checkpoint"]["measured_mb"]
    facts = report.facts
    assert facts["hours"] >= 0 and facts["evaluation_hours"] == 0 and facts["step_seconds"] > 0


def test_activations_are_what_autograd_keeps():
    """Of y = relu(x A) B: x and its product with A; of relu its result, which B needs too."""
    a, b = torch.nn.Linear(5, 7, bias=False), torch.nn.Linear(7, 3, bias=False)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = a, b

        def forward(self, images, tokens, lengths):
            return self.b(self.a(images).relu())

    batch = type("B", (), {"images": torch.ones(11, 5), "tokens": None, "lengths": None})
    batch.to = lambda device: batch
    assert saved_bytes(Model(), batch, torch.device("cpu")) == 4 * 11 * (5 + 7)


def test_only_what_should_grow_grows_with_the_batch():
    sizes = Sizes(1000, 800, 0, 16, 5000.0, 300)
    small = predict(sizes, local=64, micro=32, whole=64, device="cpu")
    large = predict(sizes, local=4096, micro=32, whole=4096, device="cpu")
    grown = {part for part in small if large[part] != small[part]}
    assert grown == {"loss"}
    assert small["parameters"] == 4000 and small["gradients"] == 3200
    assert small["optimizer"] == 6400 and small["activations"] == 32 * 5000
    huge = predict(sizes, local=2**18, micro=32, whole=2**18, device="cpu")
    assert huge["loss"] < 2**18 * (2 * 4 * 256 + 7 * 16 * 4) + 1, "not with its square"


def test_a_step_of_many_micro_batches_takes_up_to_a_third_longer():
    assert step_seconds(100.0, local=200, micro=200, dry=100) == pytest.approx(2.0)
    many = step_seconds(100.0, local=64_000, micro=1, dry=1)
    assert many == pytest.approx(640 * 4 / 3, rel=1e-4)
    assert step_seconds(100.0, local=400, micro=50, dry=400) == pytest.approx(4.0)


def warnings(tmp_path, *overrides, facts=None, memory=None):
    usual = ("train.batch_size=256", "train.duration=400 steps")
    config = check(tiny_tree(tmp_path, tmp_path, *usual, *overrides), Config)
    schedule = schedule_of(config.train, config.optim, data_size=3000)
    return plan.plan_warnings(config, schedule, facts or {}, memory)


def test_a_sensible_run_has_no_warning(tmp_path):
    facts = {
        "memory": {"together": {"run_mb": 900.0}},
        "evaluation_hours": 0.1,
        "hours": 1.0,
        "data_wait": 0.0,
    }
    assert warnings(tmp_path, facts=facts, memory=10**9) == []


CASES = {
    "train.batch_size=32": "gives each pair 31 negatives",
    "train.micro_batch_size=100": "micro_batch_size=100 does not divide the 256 pairs",
    "train.batch_size=250": "not a multiple of 8",
    "data.workers=999": "data.workers=999 makes 999 loader processes on",
    "optim.warmup=500 steps": "is 500 steps and the run has 400, so the learning rate only rises",
    "optim.warmup=70%": "is more than half of the run's 400 steps",
    "log.every=500 steps": "log.every='500 steps' is 500 steps and the run has 400",
    "checkpoint.every=50 epochs": "checkpoint.every='50 epochs' is 586 steps and the run has 400",
}


@pytest.mark.parametrize("override", CASES)
def test_a_doubt_is_told_with_its_numbers(tmp_path, override):
    (found,) = warnings(tmp_path, override)
    assert CASES[override] in found


def test_costs_are_told_with_their_numbers(tmp_path):
    facts = {
        "memory": {"together": {"run_mb": 2500.0}},
        "evaluation_hours": 3.0,
        "hours": 2.0,
        "data_wait": 0.25,
        "data_per_second": 75.0,
        "compute_per_second": 100.0,
    }
    memory, evaluation, wait = warnings(tmp_path, facts=facts, memory=2 * 10**9)
    assert "needs about 2.5 GB and the device has 2.0 GB" in memory
    assert "evaluations take 3 hours and training 2" in evaluation
    assert "75 samples/s and the device takes 100, so it waits 25%" in wait


def test_an_evaluation_each_step_costs_more_than_training(tmp_path):
    shards = make_shards(tmp_path / "data", 40)
    tree = tiny_tree(tmp_path / "run", shards)
    tree["evaluate"] = {
        "rare": retrieval(shards),
        "often": retrieval(make_shards(tmp_path / "big", 300), "1 steps"),
    }
    report = check_run(check(tree, Config))
    assert report.problems == []
    assert report.facts["evaluation_hours"] > 0
    assert any("train.batch_size=8 gives each pair 7" in text for text in report.warnings)


def test_moments_are_counted_as_they_are():
    model = torch.nn.Linear(3, 5)
    optimizer = build_optimizer(model, Optim())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert plan.held_bytes(model, optimizer) == {"parameters": 80, "optimizer": 160}
