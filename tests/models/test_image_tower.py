"""The image tower: pooling, positions, sizes, patch dropout."""

import pytest
import torch
from torch import Tensor

from multimodal import config
from multimodal.models.image import Grid, VitTower

BASE = {"kind": "vit", "width": 24, "depth": 2, "heads": 3, "image_size": 20, "patch_size": 5}


def make(**fields) -> VitTower:
    tower = VitTower(config.VitImage(**(BASE | fields))).eval()
    for parameter in tower.parameters():
        if parameter.ndim < 2:  # so that biases and factors cannot hide a mistake
            parameter.data += 0.1 * torch.randn_like(parameter)
    return tower


@pytest.mark.parametrize("rope", [False, True])
@pytest.mark.parametrize("position", ["learned", "sinusoidal", "none"])
@pytest.mark.parametrize("pool", ["cls", "mean", "map"])
def test_every_weight_is_used(pool, position, rope):
    tower = make(pool=pool, position=position, rope=rope, registers=2, drop_path=0.1, dropout=0.1)
    images = torch.randn(3, 3, 20, 20)
    features = tower(images)
    assert features.shape == (3, 24)
    features.square().sum().backward()
    for name, parameter in tower.named_parameters():
        assert parameter.grad.isfinite().all(), name
        # Softmax does not see what all keys share, so its gradient is rounding noise.
        assert parameter.grad.any() or "k_proj.bias" in name, name


@pytest.mark.parametrize(
    "fields",
    [
        {"pool": "cls"},
        {"pool": "mean", "class_token": False},
        {"pool": "map", "registers": 2, "rope": True},
    ],
)
def test_a_picture_does_not_depend_on_its_batch(fields):
    tower = make(**fields)
    images = torch.randn(5, 3, 20, 20)
    whole = tower(images)
    alone = torch.cat([tower(image[None]) for image in images])
    assert (whole - alone).abs().max() < 1e-6


def captured(tower: VitTower, images: Tensor) -> tuple[Tensor, dict]:
    """Tokens that enter the encoder, and the other arguments."""
    seen = []
    hook = tower.encoder.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append((args[0].detach(), kwargs)), with_kwargs=True
    )
    tower(images)
    hook.remove()
    return seen[0]


def test_tokens_are_the_class_token_the_registers_and_the_patches_row_by_row():
    tower = make(registers=2, pre_norm=False)
    images = torch.randn(2, 3, 20, 20)
    x, _ = captured(tower, images)
    assert x.shape == (2, 3 + 16, 24)
    torch.testing.assert_close(x[1, 0], tower.class_token + tower.position.weight[0])
    torch.testing.assert_close(x[1, 1:3], tower.registers)
    patch = images[1, :, 5:10, 15:20].flatten()  # row 1, column 3
    by_hand = tower.patch.proj.weight @ patch + tower.position.weight[1 + 1 * 4 + 3]
    torch.testing.assert_close(x[1, 3 + 1 * 4 + 3], by_hand)


def test_pools_read_the_tokens_they_are_named_after():
    images = torch.randn(2, 3, 20, 20)
    for pool in ("cls", "mean"):
        tower = make(pool=pool, registers=2)
        outputs = []
        tower.encoder.register_forward_hook(lambda _, __, x, out=outputs: out.append(x))
        features = tower(images)
        tokens = tower.norm(outputs[0])
        by_hand = tokens[:, 0] if pool == "cls" else tokens[:, 3:].mean(dim=1)
        torch.testing.assert_close(features, by_hand)


def test_map_pooling_does_not_look_at_the_registers():
    tower = make(pool="map", registers=2)
    seen = []
    tower.pool.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    tower.encoder.register_forward_hook(lambda _, __, x: torch.arange(19.0)[:, None] + 0 * x)
    tower.norm = torch.nn.Identity()
    tower(torch.randn(2, 3, 20, 20))
    assert seen[0][0, :, 0].tolist() == [0, *range(3, 19)]


class TestSizes:
    @pytest.mark.parametrize("position", ["learned", "sinusoidal", "none"])
    def test_any_size_that_the_patch_divides_is_accepted(self, position):
        tower = make(position=position, rope=True)
        assert tower(torch.randn(2, 3, 15, 35)).shape == (2, 24)

    def test_positions_of_the_own_grid_are_left_alone(self):
        tower = make()
        class_position, positions = tower._positions(Grid(4, 4), torch.device("cpu"))
        assert torch.equal(class_position, tower.position.weight[0])
        assert torch.equal(positions, tower.position.weight[1:])

    @pytest.mark.parametrize("class_token", [True, False])
    @pytest.mark.parametrize("size", [Grid(2, 8), Grid(3, 7)])
    def test_positions_are_resampled_for_another_grid_even_with_as_many_patches(
        self, size, class_token
    ):
        """Along an axis that does not matter, resampled positions stay as they are."""
        tower = make(class_token=class_token, pool="mean")
        first = int(class_token)
        ramp = torch.arange(4.0)[:, None].expand(4, 4).flatten()  # row index of each patch
        tower.position.weight.data[first:] = ramp[:, None]
        _, positions = tower._positions(size, torch.device("cpu"))
        grid = positions[:, 0].unflatten(0, size)
        assert (grid - grid[:, :1]).abs().max() < 1e-5
        assert grid[:, 0].diff().min() > 0.2

    def test_a_constant_position_stays_constant(self):
        tower = make()
        tower.position.weight.data[1:] = 0.5
        _, positions = tower._positions(Grid(7, 3), torch.device("cpu"))
        torch.testing.assert_close(positions, torch.full((21, 24), 0.5))

    @pytest.mark.parametrize("shape", [(2, 3, 20, 22), (2, 3, 19, 20), (2, 3, 0, 20)])
    def test_other_sizes_are_refused(self, shape):
        with pytest.raises(ValueError, match=f"{shape[2]} x {shape[3]}.*5 x 5.*multiples of 5"):
            make()(torch.randn(shape))

    @pytest.mark.parametrize("shape", [(3, 20, 20), (2, 1, 20, 20)])
    def test_other_shapes_are_refused(self, shape):
        with pytest.raises(ValueError, match=r"must be \[B, 3, H, W\]"):
            make()(torch.randn(shape))


def keep_these(tower: VitTower, keep: Tensor) -> VitTower:
    """Train mode with these patches instead of drawn ones."""
    tower._draw_patches = lambda *_: keep
    return tower.train()


class TestPatchDropout:
    @pytest.mark.parametrize(
        "fields",
        [
            {"pool": "cls"},
            {"pool": "mean", "position": "sinusoidal"},
            {"pool": "map", "registers": 2, "rope": True},
            {"pool": "cls", "position": "none", "rope": True},
        ],
    )
    def test_all_patches_in_another_order_are_the_same_picture(self, fields):
        """So a patch keeps its own position, absolute and rotary."""
        tower = make(**fields)
        images = torch.randn(3, 3, 20, 20)
        whole = tower(images)
        shuffled = keep_these(tower, torch.rand(3, 16).argsort(dim=1))(images)
        assert (whole - shuffled).abs().max() < 1e-5

    def test_kept_patches_enter_as_without_dropout_and_the_others_have_no_influence(self):
        tower = make(registers=2, rope=True)
        images = torch.randn(2, 3, 20, 20)
        keep = torch.tensor([[3, 15, 0], [7, 4, 12]])
        full, full_kwargs = captured(tower, images)
        keep_these(tower, keep)
        x, kwargs = captured(tower, images)
        features = tower(images)
        assert x.shape == (2, 3 + 3, 24)
        for row in range(2):
            index = torch.cat([torch.arange(3), keep[row] + 3])
            torch.testing.assert_close(x[row], full[row, index])
            for angles, all_angles in zip(kwargs["rope"], full_kwargs["rope"], strict=True):
                assert torch.equal(angles[row, 0], all_angles[index])
        others = images.clone()
        others[0, :, 0:5, 5:15] += 1  # patches 1 and 2 of the first picture
        assert torch.equal(tower(others), features)
        others[0, :, 15:20, 15:20] += 1  # patch 15
        assert not torch.equal(tower(others)[0], features[0])

    def test_training_draws_the_share_for_each_picture_and_evaluation_keeps_all(self):
        tower = make(patch_dropout=0.4)
        args = (50, Grid(4, 4), torch.device("cpu"))
        assert tower._draw_patches(*args) is None
        tower.train()
        keep = tower._draw_patches(*args)
        assert keep.shape == (50, 10)  # 16 * 0.6 = 9.6
        assert all(len(set(row)) == 10 for row in keep.tolist())
        assert keep.min() == 0
        assert keep.max() == 15
        assert len({tuple(sorted(row)) for row in keep.tolist()}) > 40
        counts = keep.flatten().bincount()
        assert counts.min() > 15  # 31 expected: every patch has its turn
        torch.manual_seed(5)
        first = tower._draw_patches(*args)
        torch.manual_seed(5)
        assert torch.equal(first, tower._draw_patches(*args))

    def test_one_patch_is_always_kept(self):
        tower = make(patch_dropout=0.99).train()
        assert tower._draw_patches(2, Grid(4, 4), torch.device("cpu")).shape == (2, 1)
        assert tower(torch.randn(2, 3, 20, 20)).isfinite().all()


def test_stochastic_depth_grows_from_zero_to_the_rate_of_the_last_block():
    tower = make(depth=5, drop_path=0.2)
    rates = [block.attn.drop_path.p for block in tower.encoder.blocks]
    assert rates == pytest.approx([0, 0.05, 0.1, 0.15, 0.2])
    assert rates == [block.mlp.drop_path.p for block in tower.encoder.blocks]


def test_dropout_acts_on_every_branch_in_training_only():
    tower = make(dropout=0.3)
    rates = {b.dropout.p for block in tower.encoder.blocks for b in (block.attn, block.mlp)}
    assert rates == {0.3}
    images = torch.randn(2, 3, 20, 20)
    assert torch.equal(tower(images), tower(images))
    tower.train()
    assert not torch.equal(tower(images), tower(images))
