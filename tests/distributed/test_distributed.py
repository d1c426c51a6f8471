"""Collectives with and without a process group."""

import pytest
import torch
from tools import on_ranks

from multimodal import distributed


def exercise():
    """Everything once on a rank, with values that tell the ranks apart."""
    r, world = distributed.rank(), distributed.world_size()
    x = torch.full((2, 3), float(r + 1), requires_grad=True)
    gathered = distributed.gather_with_grad(x)
    weights = torch.arange(2.0 * world).unsqueeze(1) * (r + 1)
    (gathered * weights).sum().backward()
    mistake = None
    try:
        distributed.on_main(lambda: int("seven"))
    except ValueError as error:
        mistake = str(error), hasattr(error, "told_elsewhere")
    return {
        "rank": r,
        "main": distributed.is_main(),
        "gathered": gathered.detach(),
        "gradient": x.grad,
        "rows": distributed.gather_rows(torch.full((r, 2), r, dtype=torch.int64)),
        "none": distributed.gather_rows(torch.zeros(0, 5)),
        "flags": distributed.gather_rows(torch.tensor([r == 1])),
        "objects": distributed.gather_objects({"rank": r}),
        "broadcast": distributed.broadcast_object(f"from {r}"),
        "sum": distributed.all_reduce_sum(torch.tensor([r, 1])),
        "max": distributed.all_reduce_max(torch.tensor([r, -r])),
        "on_main": distributed.on_main(lambda: distributed.rank() + 7),
        "mistake": mistake,
    }


@pytest.mark.parametrize("world", [1, 3])
def test_collectives_see_all_ranks_in_order(world):
    results = on_ranks(world, exercise) if world > 1 else [exercise()]
    total = sum(range(1, world + 1))
    for r, result in enumerate(results):
        assert (result["rank"], result["main"]) == (r, r == 0)
        assert result["gathered"][:, 0].tolist() == [1 + i // 2 for i in range(2 * world)]
        expected = torch.tensor([2.0 * r, 2.0 * r + 1]).unsqueeze(1).expand(2, 3) * total
        assert torch.equal(result["gradient"], expected)
        assert result["rows"].tolist() == [[i, i] for i in range(world) for _ in range(i)]
        assert result["none"].shape == (0, 5)
        assert result["flags"].tolist() == [i == 1 for i in range(world)]
        assert result["objects"] == [{"rank": i} for i in range(world)]
        assert result["broadcast"] == "from 0"
        assert result["sum"].tolist() == [sum(range(world)), world]
        assert result["max"].tolist() == [world - 1, 0]
        assert result["on_main"] == 7
        assert "seven" in result["mistake"][0]
        assert result["mistake"][1] == (r > 0)


def test_reductions_leave_their_argument_alone():
    x = torch.ones(3)
    distributed.all_reduce_sum(x).add_(1)
    assert x.tolist() == [1, 1, 1]


def test_shutdown_without_a_group_does_nothing():
    distributed.shutdown()
    distributed.barrier()
