"""Losses against a plain full-batch implementation, in one and in several processes."""

import itertools
import math

import pytest
import torch
from naive_losses import naive_contrastive, naive_metrics, naive_sigmoid
from tools import on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from multimodal.config import ContrastiveSection, SigmoidSection
from multimodal.losses import ContrastiveLoss, SigmoidLoss, tiles
from multimodal.losses.build import build_loss
from multimodal.losses.full_precision import full_precision
from multimodal.losses.sigmoid import initial_bias

PAIRS, WIDTH, EMBED = 52, 11, 7
ROWS = 5  # of a tile; 13 pairs on each of four ranks are two tiles and a rest
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
MODES = ("negative", "ignore", "positive")
LOSSES = {
    "contrastive": (ContrastiveLoss, naive_contrastive),
    "sigmoid": (SigmoidLoss, naive_sigmoid),
}
VARIANTS = [
    *(
        ("contrastive", {"duplicates": mode, "label_smoothing": smoothing})
        for mode, smoothing in itertools.product(MODES, (0.0, 0.15))
    ),
    *(("sigmoid", {"duplicates": mode}) for mode in MODES),
]


class Towers(nn.Module):
    """Two linear towers and a temperature: enough to give every kind of parameter a gradient."""

    def __init__(self, dtype, scale=9.0):
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        weights = torch.randn(2, EMBED, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
        self.image, self.text = (nn.Parameter(weight.clone()) for weight in weights)
        self.log_scale = nn.Parameter(torch.tensor(math.log(scale), dtype=dtype))
        self.bias = nn.Parameter(torch.tensor(-3.0, dtype=dtype))

    def forward(self, images, texts):
        image = nn.functional.normalize(images @ self.image.T, dim=-1)
        text = nn.functional.normalize(texts @ self.text.T, dim=-1)
        return image, text, self.log_scale.exp(), self.bias


def inputs(dtype):
    generator = torch.Generator().manual_seed(2)
    return torch.randn(2, PAIRS, WIDTH, generator=generator, dtype=torch.float64).to(dtype)


def ids():
    """Some pictures and some captions occur several times, far apart; 2**62 apart too."""
    generator = torch.Generator().manual_seed(3)
    numbers = torch.randint(0, 40, (2, PAIRS), generator=generator)
    return dict(zip(("image_ids", "text_ids"), (numbers - 20) * 2**57, strict=True))


def unit_features(pairs=PAIRS, width=EMBED, dtype=torch.float32):
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(2, pairs, width, generator=generator, dtype=torch.float64)
    return [y.to(dtype).requires_grad_() for y in nn.functional.normalize(x, dim=-1)]


def scalar(value, dtype=torch.float32):
    return torch.tensor(value, dtype=dtype, requires_grad=True)


@pytest.fixture
def small_tiles(monkeypatch):
    monkeypatch.setattr(tiles, "_TILE", {"cpu": 1})
    monkeypatch.setattr(tiles, "_FEWEST_ROWS", ROWS)


def loss_and_gradients(model, loss, images, texts, **options):
    model.zero_grad(set_to_none=True)
    value = loss(*model(images, texts), **options)
    value.backward()
    named = {n.removeprefix("module."): p.grad for n, p in model.named_parameters()}
    return value.detach(), {n: torch.zeros(()) if g is None else g for n, g in named.items()}


def all_shares(world_size):
    """On one rank: its share of the batch through DDP; the gradients that DDP leaves."""
    tiles._TILE, tiles._FEWEST_ROWS = {"cpu": 1}, ROWS
    count = PAIRS // world_size
    rank = torch.distributed.get_rank()
    rows = slice(rank * count, (rank + 1) * count)
    options = {name: x[rows] for name, x in ids().items()}
    shares = []
    for (name, settings), dtype in itertools.product(VARIANTS, TOLERANCE):
        model = Towers(dtype)
        model = DistributedDataParallel(model) if world_size > 1 else model
        loss = LOSSES[name][0](**settings)
        share = loss_and_gradients(model, loss, *inputs(dtype)[:, rows], **options)
        shares.append((*share, torch.stack(loss.metrics)))
    return shares


def assert_close(actual, expected, tolerance):
    torch.testing.assert_close(actual, expected.to(actual.dtype), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_loss_metrics_and_every_gradient_equal_the_full_batch(world_size):
    cases = itertools.product(VARIANTS, TOLERANCE.items())
    ranks = on_ranks(world_size, all_shares, world_size)
    model = Towers(torch.float64)
    for ((name, settings), (_, tolerance)), *shares in zip(cases, *ranks, strict=True):
        expected, gradients = loss_and_gradients(
            model, LOSSES[name][1], *inputs(torch.float64), **ids(), **settings
        )
        features = model(*inputs(torch.float64))[:2]
        metrics = naive_metrics(*features, **ids(), duplicates=settings["duplicates"])
        assert_close(torch.stack([share[0] for share in shares]).mean(), expected, tolerance)
        assert_close(torch.stack([share[2] for share in shares]).mean(0), metrics, tolerance)
        for share in shares:
            for key, gradient in share[1].items():
                assert_close(gradient, gradients[key], tolerance)


def test_modes_and_smoothing_differ_on_these_inputs():
    model, values = Towers(torch.float64), []
    for name, settings in VARIANTS:
        loss = LOSSES[name][0](**settings)
        values.append(loss(*model(*inputs(torch.float64)), **ids()).item())
    assert all(abs(a - b) > 1e-3 for a, b in itertools.combinations(values, 2))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("close", [False, True], ids=["untrained", "well trained"])
@pytest.mark.parametrize(("name", "settings"), VARIANTS)
def test_nothing_is_lost_at_scale_100(name, settings, close, dtype, small_tiles):
    image, text = unit_features(pairs=23, dtype=dtype)
    if close:
        text = nn.functional.normalize(image + 0.3 * text, dim=-1).detach().requires_grad_()
    options = {key: x[:23] for key, x in ids().items()}
    arguments = [image, text, scalar(100.0, dtype), scalar(-10.0, dtype)]
    exact = [x.detach().double().requires_grad_() for x in arguments]
    value = LOSSES[name][0](**settings)(*arguments, **options)
    expected = LOSSES[name][1](*exact, **options, **settings)
    assert_close(value, expected, TOLERANCE[dtype])
    # A float32 logit near 100 is off by up to 8e-6, and so is, relatively, a probability. The loss
    # of the well trained is 1e-4 and its slopes are differences of such: ours are off by up to
    # 6e-4, those of torch's cross_entropy on all logits by 8e-4.
    tolerance = 1e-11 if dtype == torch.float64 else 1e-3 if close else 2e-5
    value.backward()
    expected.backward()
    for x, y in zip(arguments, exact, strict=True):
        if y.grad is not None:
            error = (x.grad.double() - y.grad).norm() / y.grad.norm()
            assert error < tolerance


def test_matching_duplicates_of_the_well_trained_keep_their_digits(small_tiles):
    """Sums of thousands whose difference is the loss would leave none of them."""
    generator = torch.Generator().manual_seed(3)
    centres = nn.functional.normalize(torch.randn(7, 64, generator=generator), dim=-1)
    label = torch.arange(203) % 7
    image, text = (
        nn.functional.normalize(
            centres[label] + 0.02 * torch.randn(203, 64, generator=generator), dim=-1
        ).requires_grad_()
        for _ in range(2)
    )
    arguments = [image, text, scalar(100.0), scalar(-60.0)]
    exact = [x.detach().double().requires_grad_() for x in arguments]
    value = SigmoidLoss(duplicates="positive")(*arguments, text_ids=label)
    expected = naive_sigmoid(
        *exact, image_ids=torch.arange(203), text_ids=label, duplicates="positive"
    )
    assert_close(value, expected, 1e-4)
    value.backward()
    expected.backward()
    for x, y in zip(arguments, exact, strict=True):
        assert (x.grad.double() - y.grad).norm() / y.grad.norm() < 1e-4


def test_a_well_trained_pairs_gradient_keeps_its_leading_digits(small_tiles):
    """p - 1 of about -2e-5 must not drown in the rounding of logits near 100, 8e-6 apart."""
    width = 17
    image = nn.functional.normalize(torch.eye(width) + 0.555, dim=-1).requires_grad_()
    scale = scalar(100.0)
    value = ContrastiveLoss()(image, image.detach(), scale)
    exact = image.detach().double().requires_grad_()
    expected = naive_contrastive(
        exact, exact.detach(), scale.double(), image_ids=range(width), text_ids=range(width)
    )
    assert 1e-5 < expected.item() < 1e-4
    value.backward()
    expected.backward()
    assert value.item() == pytest.approx(expected.item(), rel=1e-2)
    assert (image.grad.double() - exact.grad).norm() < 3e-2 * exact.grad.norm()


@pytest.mark.parametrize(("name", "settings"), VARIANTS)
@pytest.mark.parametrize("given", ["image_ids", "text_ids"])
def test_one_kind_of_ids_is_enough(given, name, settings, small_tiles):
    image, text = unit_features(dtype=torch.float64)
    different = torch.arange(PAIRS)
    scale, bias = torch.tensor(5.0).double(), torch.tensor(-1.0).double()
    value = LOSSES[name][0](**settings)(image, text, scale, bias, **{given: ids()[given]})
    whole = {"image_ids": different, "text_ids": different} | {given: ids()[given]}
    assert_close(value, LOSSES[name][1](image, text, scale, bias, **whole, **settings), 1e-10)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("mode", MODES)
def test_a_batch_of_one_picture_has_finite_gradients(name, mode, small_tiles):
    image, text = unit_features()
    scale, bias = scalar(5.0), scalar(-1.0)
    loss = LOSSES[name][0](duplicates=mode)
    value = loss(image, text, scale, bias, image_ids=torch.zeros(PAIRS, dtype=torch.int64))
    value.backward()
    if (name, mode) == ("contrastive", "ignore"):
        assert value.item() == 0 and not image.grad.any()
    assert all(x.grad.isfinite().all() for x in (image, text, scale, bias))
    assert torch.stack(loss.metrics).isfinite().all()


@pytest.mark.parametrize("name", LOSSES)
def test_without_ids_duplicates_are_refused(name):
    image, text = unit_features()
    loss = LOSSES[name][0](duplicates="ignore")
    with pytest.raises(ValueError, match=r"duplicates='ignore' needs image_ids or text_ids"):
        loss(image, text, torch.tensor(1.0))
    with pytest.raises(ValueError, match=r"text_ids \(3,\) must be one id for each of 52 pairs"):
        loss(image, text, torch.tensor(1.0), text_ids=torch.arange(3))


def test_contrastive_gives_a_useless_bias_a_gradient_of_exactly_zero():
    _, gradients = loss_and_gradients(
        Towers(torch.float32), ContrastiveLoss(), *inputs(torch.float32)
    )
    assert gradients["bias"].item() == 0


@pytest.mark.parametrize(("name", "settings"), VARIANTS)
def test_autocast_and_16_bit_features_do_not_lower_the_precision(name, settings):
    def run(cast, autocast):
        leaves = [*unit_features(), scalar(9.0), scalar(-3.0)]
        image, text = (x.to(torch.bfloat16).to(cast) for x in leaves[:2])
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            value = LOSSES[name][0](**settings)(image, text, *leaves[2:], **ids())
            value.backward()
        return value, leaves[2].grad, leaves[3].grad, *(x.grad for x in leaves[:2])

    inside, outside = run(torch.bfloat16, True), run(torch.float32, False)
    assert inside[0].dtype == torch.float32
    for a, b in zip(inside[:3], outside[:3], strict=True):
        assert a.item() == b.item()
    for a, b in zip(inside[3:], outside[3:], strict=True):
        assert torch.equal(a, b.bfloat16().float())


def test_code_in_full_precision_is_out_of_autocasts_reach():
    features = torch.rand(3, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16), full_precision(features, features) as (x, y):
        assert (x @ y.T).dtype == torch.float32


def test_sigmoid_is_exact_for_negatives_of_a_large_logit():
    image = torch.ones(2, 4, dtype=torch.float64) / 2
    value = SigmoidLoss()(image, image, torch.tensor(21.0))
    assert value.item() == pytest.approx(21 + 2 * math.log1p(math.exp(-21)), rel=1e-14)


class LargestTensor(TorchDispatchMode):
    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else [result]:
            if isinstance(x, torch.Tensor):
                self.elements = max(self.elements, x.untyped_storage().nbytes() // x.itemsize)
        return result


@pytest.mark.parametrize(("name", "settings"), VARIANTS)
def test_nothing_as_large_as_the_square_of_the_batch_is_made(name, settings, small_tiles):
    pairs, width = 211, 3
    arguments = [*unit_features(pairs, width), scalar(9.0), scalar(-3.0)]
    options = {key: torch.arange(pairs) // 2 for key in ("image_ids", "text_ids")}
    with LargestTensor() as largest:
        LOSSES[name][0](**settings)(*arguments, **options).backward()
    assert largest.elements == ROWS * pairs


@pytest.mark.parametrize("name", LOSSES)
def test_a_second_backward_pass_gives_the_same_gradient(name):
    arguments = [*unit_features(), scalar(9.0), scalar(-3.0)]
    value = LOSSES[name][0]()(*arguments)
    first = torch.autograd.grad(value, arguments, retain_graph=True)
    again = torch.autograd.grad(3 * value, arguments)
    for a, b in zip(first, again, strict=True):
        torch.testing.assert_close(3 * a, b)


@pytest.mark.parametrize("name", LOSSES)
def test_a_compiled_caller_gets_the_same(name):
    loss = LOSSES[name][0]()

    def step(image, text, scale, bias):
        return 2 * loss(nn.functional.normalize(image, dim=-1), text, scale.exp(), bias)

    arguments = [*unit_features(), scalar(2.0), scalar(-3.0)]
    values = [f(*arguments) for f in (step, torch.compile(step, backend="aot_eager"))]
    gradients = [torch.autograd.grad(value, arguments) for value in values]
    for a, b in zip((values[0], *gradients[0]), (values[1], *gradients[1]), strict=True):
        torch.testing.assert_close(a, b)


def test_equal_embeddings_are_no_hits():
    image, text = torch.ones(2, 6, 4) / 2
    for name in LOSSES:
        loss = LOSSES[name][0]()
        loss(image, text, torch.tensor(3.0))
        assert [x.item() for x in loss.metrics] == [0, 0, 1, 1]


@pytest.mark.parametrize("name", LOSSES)
def test_a_fresh_model_starts_near_chance(name):
    n = 256
    image, text = nn.functional.normalize(torch.randn(2, n, 512), dim=-1)
    if name == "contrastive":
        value = ContrastiveLoss()(image, text, torch.tensor(1.0))
        assert value.item() == pytest.approx(math.log(n), abs=0.02)
    else:
        value = SigmoidLoss()(image, text, torch.tensor(1e-6), torch.tensor(-10.0))
        assert value.item() == pytest.approx(10.0 + n * math.exp(-10), abs=0.01)


def test_the_initial_bias_has_no_slope_in_a_fresh_model():
    n = 211
    image, text = nn.functional.normalize(torch.randn(2, n, 64), dim=-1)
    bias = scalar(initial_bias(n))
    SigmoidLoss()(image, text, torch.tensor(1e-6), bias).backward()
    assert abs(bias.grad.item()) < 1e-5
    assert initial_bias(32768) == pytest.approx(-10.4, abs=0.01)


@pytest.mark.parametrize("name", LOSSES)
def test_other_shapes_are_refused(name):
    with pytest.raises(ValueError, match=r"\(3, 5\) and text features \(2, 5\)"):
        LOSSES[name][0]()(torch.ones(3, 5), torch.ones(2, 5), torch.tensor(1.0))


def test_a_section_builds_its_loss():
    section = ContrastiveSection(kind="contrastive", label_smoothing=0.1, duplicates="ignore")
    loss = build_loss(section)
    assert isinstance(loss, ContrastiveLoss)
    assert (loss.label_smoothing, loss.duplicates) == (0.1, "ignore")
    loss = build_loss(SigmoidSection(kind="sigmoid", duplicates="positive"))
    assert isinstance(loss, SigmoidLoss) and loss.duplicates == "positive"
