"""Figures of a step, the same for any number of ranks and micro-batches; alarms that are rare."""

import json
import math
import random
import statistics

import pytest
import torch
from accelerate import Accelerator
from test_step import own_part, tiny_model, whole_batch
from tools import on_ranks
from torch.distributed.fsdp import fully_shard

from multimodal.config import Model, Optim
from multimodal.config_io import check, read_yaml
from multimodal.distributed import world_size
from multimodal.losses import ContrastiveLoss
from multimodal.models.build import build_model
from multimodal.models.two_tower import Features
from multimodal.train import diagnostics
from multimodal.train.collapse import Collapse
from multimodal.train.diagnostics import Diagnostics, geometry
from multimodal.train.flops import PairFlops, matmul_rate
from multimodal.train.optim import build_optimizer
from multimodal.train.spikes import LossBand
from multimodal.train.step import train_step


class Looking(Diagnostics):
    def __init__(self):
        self._device = torch.device("cpu")


def metrics_of_a_step(micro_batch_size=None, wrap="plain"):
    accelerator = Accelerator(cpu=True)
    model = tiny_model()
    if wrap == "fsdp":
        for tower in (model.image, model.text):
            fully_shard(tower)
        scalars = set(model.temperature.parameters())
        prepared = fully_shard(model, ignored_params=scalars)
    else:
        prepared = accelerator.prepare_model(model)
    optimizer = build_optimizer(model, Optim())
    result = train_step(
        prepared,
        ContrastiveLoss(),
        optimizer,
        own_part(whole_batch()),
        accelerator=accelerator,
        step=0,
        seed=3,
        lr=1e-3,
        clip_grad_norm=1e-3,
        micro_batch_size=micro_batch_size,
        look=Looking().look,
    )
    return result


def plain_norms():
    """From one graph over the whole batch."""
    batch, model = whole_batch(), tiny_model()
    ids = {"image_ids": batch.image_ids, "text_ids": batch.text_ids}
    ContrastiveLoss()(*model(batch.images, batch.tokens, batch.lengths), **ids).backward()
    squares = dict.fromkeys(("image", "text", "temperature"), 0.0)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            squares[name.split(".")[0].removesuffix("_projection")] += float(
                parameter.grad.double().square().sum()
            )
    return {f"{part}_grad_norm": math.sqrt(x) for part, x in squares.items()}


@pytest.mark.parametrize(
    ("ranks", "micro_batch_size", "wrap"),
    [(1, None, "plain"), (1, 3, "plain"), (2, 3, "plain"), (4, None, "plain"), (2, 2, "fsdp")],
)
def test_each_part_has_the_norm_of_the_whole_batch_before_clipping(ranks, micro_batch_size, wrap):
    expected = plain_norms()
    for result in on_ranks(ranks, metrics_of_a_step, micro_batch_size, wrap):
        found = {name: result.metrics[name] for name in expected}
        assert found == pytest.approx(expected, rel=1e-4)
        whole = math.sqrt(sum(x * x for x in found.values()))
        assert whole == pytest.approx(result.grad_norm, rel=1e-5)
        assert result.grad_norm > 1e-2, "the gradient is clipped to far less"


def own_geometry(most):
    diagnostics._PAIRS = most
    generator = torch.Generator().manual_seed(0)
    image, text = (
        torch.nn.functional.normalize(torch.randn(60, 7, generator=generator)) for _ in "it"
    )
    batch = torch.arange(60).chunk(world_size())[torch.distributed.get_rank()]
    return geometry(Features(image[batch], text[batch], torch.ones(()), None))


@pytest.mark.parametrize("most", [512, 13])
def test_the_geometry_does_not_depend_on_the_number_of_ranks(most):
    (one,) = on_ranks(1, own_geometry, most)
    for ranks in (2, 3):
        for found in on_ranks(ranks, own_geometry, most):
            assert found == pytest.approx(one, rel=1e-6)
    assert all(map(math.isfinite, one.values()))


def test_the_geometry_takes_no_more_rows_than_it_says(monkeypatch):
    monkeypatch.setattr(diagnostics, "_PAIRS", 13)
    chosen = diagnostics._own_share(60)
    assert len(chosen) == 13 and len(set(chosen.tolist())) == 13 and int(chosen[-1]) == 55
    assert diagnostics._own_share(7).tolist() == list(range(7))


# --- Collapse ------------------------------------------------------------------------------------


def warnings(ranks, *, allowed=128, warmed_up=False, state=None):
    collapse, found = Collapse(state or {}), []
    for row, rank in enumerate(ranks):
        metrics = {"image_effective_rank": rank, "text_effective_rank": 60.0}
        for text in collapse.look(metrics, allowed=allowed, warmed_up=warmed_up):
            found.append((row, text))
    return found


def test_a_fall_to_few_directions_is_told_once():
    found = warnings([40, 30, 1.5, 1.2, 1.1, 1.1, 1.1])
    assert [row for row, _ in found] == [4]
    assert (
        "image embeddings have collapsed: their effective rank is 1.1 of at most 128"
        in (found[0][1])
    )
    again = warnings([40, 1.5, 1.2, 1.1, 40, 1.1, 1.1, 1.1])
    assert [row for row, _ in again] == [3, 7]


def test_low_from_the_start_is_a_collapse_only_after_the_warm_up():
    assert warnings([1.3] * 9) == []
    assert [row for row, _ in warnings([1.3] * 9, warmed_up=True)] == [2]


@pytest.mark.parametrize(
    "ranks",
    [
        [66, 32, 26, 19, 15, 12, 14, 20, 30],  # a fresh model that starts to learn
        [40, 1.5, 1.5, 30, 1.5, 1.5, 30],  # two odd rows
        [5, 4, 4.5, 5, 6, 7],
    ],
)
def test_what_is_no_collapse_is_not_told(ranks):
    assert warnings(ranks) == [] and warnings(ranks, warmed_up=True) == []


@pytest.mark.parametrize("collapsed", [False, True])
def test_a_fresh_model_is_told_from_a_collapsed_one(collapsed):
    torch.manual_seed(0)
    model = build_model(check(read_yaml("configs/model/quickstart.yaml")["model"], Model)).train()
    images = torch.randint(0, 256, (64, 3, 64, 64), dtype=torch.uint8)
    tokens = torch.randint(3, 2048, (64, 8))
    with torch.no_grad():
        features = model(images, tokens, torch.full((64,), 8))
    if collapsed:
        noise = 1e-4 * torch.randn(64, 128)
        image = torch.nn.functional.normalize(features.image[:1] + noise)
        features = features._replace(image=image)
    collapse, found = Collapse({}), []
    for _ in range(3):
        found += collapse.look(geometry(features), allowed=64, warmed_up=True)
    assert len(found) == collapsed and all("image" in text for text in found)


def test_small_batches_are_never_judged():
    assert warnings([4, 1.2, 1.2, 1.2, 1.2], allowed=8, warmed_up=True) == []


def test_a_resumed_run_knows_how_good_it_was():
    collapse = Collapse({})
    for rank in (40, 1.2, 1.2):
        list(collapse.look({"image_effective_rank": rank}, allowed=128, warmed_up=False))
    state = json.loads(json.dumps(collapse.state()))
    assert [row for row, _ in warnings([1.2, 1.2], state=state)] == [0]


# --- Spikes --------------------------------------------------------------------------------------


def test_the_band_is_median_and_deviations_of_the_last_hundred():
    draw = random.Random(0)
    losses = [3 + draw.gauss(0, 0.2) for _ in range(150)]
    band = LossBand()
    for number, loss in enumerate(losses):
        assert (band.median_and_limit() is None) == (number < 20)
        band.add(loss)
    last = sorted(losses[-100:])
    median = (last[49] + last[50]) / 2
    deviation = statistics.median(abs(x - median) for x in last)
    found = band.median_and_limit()
    assert found == pytest.approx((median, median + 5 * 1.4826 * deviation))
    assert LossBand(json.loads(json.dumps(band.losses))).median_and_limit() == found


def test_a_falling_noisy_loss_has_no_spike_and_two_and_a_half_times_is_one():
    draw = random.Random(1)
    band, outside = LossBand(), []
    for step in range(2000):
        usual = 0.3 + 5 * math.exp(-step / 300)
        loss = usual * (2.5 if step == 1500 else 1 + 0.05 * draw.gauss(0, 1))
        found = band.median_and_limit()
        if found is not None and loss > found[1]:
            outside.append(step)
        band.add(loss)
    assert outside == [1500]


# --- Arithmetic ----------------------------------------------------------------------------------


def test_operations_of_a_pair_are_those_of_its_matrix_products():
    model, size, length = tiny_model("model.image.patch_dropout=0.25"), 16, 16

    class Made:
        transform = type("T", (), {"size": size})
        config = type("C", (), {"text": type("X", (), {"context_length": length})})

    Made.model = model
    Made.model.eval()  # as it comes from a checkpoint
    found = diagnostics.count_flops(Made)
    width, depth, places, hidden = 16, 2, 13, 64
    block = 2 * (4 * width * width + 2 * width * hidden)
    attention = 4 * width

    def tower(n):
        return depth * n * (block + attention * n)

    image = tower(places) + 12 * 2 * 48 * width + 2 * width * 12
    text = tower(length) + 2 * width * 12
    assert found.image == 3 * image
    assert found.text_token * length == 3 * text
    assert found.embed_dim == 12
    whole = PairFlops(10.0, 2.0, 5).of(batch_size=4, tokens=3)
    assert whole == 10 + 6 + 6 * 4 * 5


def test_a_device_multiplies_and_is_measured_in_well_under_a_second():
    assert 1e8 < matmul_rate(torch.device("cpu"), torch.float32) < 1e14
