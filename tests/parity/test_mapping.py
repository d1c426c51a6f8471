"""Tables of names: strict in both directions."""

import pytest
import torch
from torch import Tensor

from multimodal.weights.mapping import Entry, affine, from_ours, same, to_ours

TABLE = (
    same("scale", "temperature", reshape=True),
    same("conv.weight", "patch.weight", reshape=True),
    *affine("ln", "norm"),
    Entry("qkv", ("q", "k", "v")),
    same("proj", "proj.weight", transpose=True),
)


def theirs() -> dict[str, Tensor]:
    return {
        "scale": torch.randn(1),
        "conv.weight": torch.randn(5, 3, 2, 2),
        "ln.weight": torch.randn(7),
        "ln.bias": torch.randn(7),
        "qkv": torch.randn(9, 2),
        "proj": torch.randn(2, 5),
    }


def ours() -> dict[str, Tensor]:
    return {
        "temperature": torch.zeros(()),
        "patch.weight": torch.zeros(5, 12),
        "norm.weight": torch.zeros(7),
        "norm.bias": torch.zeros(7),
        "q": torch.zeros(3, 2),
        "k": torch.zeros(3, 2),
        "v": torch.zeros(3, 2),
        "proj.weight": torch.zeros(5, 2),
    }


def test_tensors_get_our_names_and_shapes():
    state = theirs()
    result = to_ours(TABLE, state, ours())
    assert {name: x.shape for name, x in result.items()} == {n: x.shape for n, x in ours().items()}
    assert torch.equal(result["patch.weight"], state["conv.weight"].flatten(1))
    assert torch.equal(result["k"], state["qkv"][3:6])
    assert torch.equal(result["proj.weight"], state["proj"].T)
    assert result["temperature"] == state["scale"][0]


def test_there_and_back_is_bit_equal():
    state = theirs()
    again = from_ours(TABLE, to_ours(TABLE, state, ours()), state)
    assert set(again) == set(state)
    assert all(torch.equal(again[name], state[name]) for name in state)


def test_parts_of_different_heights_are_split_where_they_belong():
    table = (Entry("kv", ("k", "v")),)
    like = {"k": torch.zeros(2, 3), "v": torch.zeros(5, 3)}
    state = {"kv": torch.randn(7, 3)}
    result = to_ours(table, state, like)
    assert torch.equal(result["v"], state["kv"][2:])
    assert torch.equal(from_ours(table, result, state)["kv"], state["kv"])


def test_parts_are_transposed_before_they_are_split_and_after_they_are_joined():
    table = (Entry("kv", ("k", "v"), transpose=True),)
    like = {"k": torch.zeros(2, 3), "v": torch.zeros(5, 3)}
    state = {"kv": torch.randn(3, 7)}
    result = to_ours(table, state, like)
    assert torch.equal(result["v"], state["kv"][:, 2:].T)
    assert torch.equal(from_ours(table, result, state)["kv"], state["kv"])


def test_square_matrices_are_transposed_too():
    table, square = (same("proj", "proj.weight", transpose=True),), torch.randn(3, 3)
    result = to_ours(table, {"proj": square}, {"proj.weight": torch.zeros(3, 3)})
    assert torch.equal(result["proj.weight"], square.T)
    assert torch.equal(from_ours(table, result, {"proj": torch.zeros(3, 3)})["proj"], square)


def test_a_matrix_that_was_not_transposed_is_refused_with_the_shapes_of_its_own_side():
    state = theirs() | {"proj": torch.zeros(5, 2)}
    with pytest.raises(ValueError, match=r"proj has shape \[5, 2\], needed \[2, 5\]"):
        to_ours(TABLE, state, ours())
    state = ours() | {"proj.weight": torch.zeros(2, 5)}
    with pytest.raises(ValueError, match=r"proj.weight has shape \[2, 5\], needed \[5, 2\]"):
        from_ours(TABLE, state, theirs())


CONVERSIONS = {"to_ours": (to_ours, theirs, ours), "from_ours": (from_ours, ours, theirs)}


@pytest.mark.parametrize("name", CONVERSIONS)
class TestStrictness:
    def test_every_missing_tensor_is_named(self, name):
        convert, given, like = CONVERSIONS[name]
        for key in given():
            state = given()
            del state[key]
            with pytest.raises(ValueError, match=rf"missing: {key}\b.*depth"):
                convert(TABLE, state, like())

    def test_an_unknown_tensor_is_named(self, name):
        convert, given, like = CONVERSIONS[name]
        with pytest.raises(ValueError, match=r"not expected: block\.99"):
            convert(TABLE, given() | {"block.99": torch.zeros(2)}, like())

    def test_every_wrong_shape_is_named_with_both_shapes(self, name):
        convert, given, like = CONVERSIONS[name]
        for key, tensor in given().items():
            state = given() | {key: torch.zeros(11, *tensor.shape[1:])}
            with pytest.raises(ValueError, match=rf"{key}.* has shape \[1?1.*\], needed \["):
                convert(TABLE, state, like())

    def test_a_state_without_one_known_name_is_of_another_kind(self, name):
        convert, _, like = CONVERSIONS[name]
        with pytest.raises(ValueError, match=r"of another kind.*Found a, b; needed "):
            convert(TABLE, {"a": torch.zeros(2), "b": torch.zeros(2)}, like())
        with pytest.raises(ValueError, match="of another kind: not one of 0 names"):
            convert(TABLE, {}, like())

    def test_a_table_that_leaves_out_a_tensor_of_the_model_is_refused(self, name):
        convert, given, like = CONVERSIONS[name]
        with pytest.raises(ValueError, match=r"names of the model .*not expected: extra"):
            convert(TABLE, given(), like() | {"extra": torch.zeros(2)})


def test_only_declared_tensors_are_reshaped():
    state = theirs() | {"ln.weight": torch.zeros(7, 1)}
    with pytest.raises(ValueError, match=r"ln.weight has shape \[7, 1\], needed \[7\]"):
        to_ours(TABLE, state, ours())
    transposed = theirs() | {"conv.weight": torch.zeros(2, 2, 3, 5)}
    with pytest.raises(ValueError, match=r"conv.weight has shape \[2, 2, 3, 5\]"):
        to_ours(TABLE, transposed, ours())


def test_long_lists_are_shortened():
    with pytest.raises(ValueError, match="and 95 more"):
        to_ours(TABLE, theirs() | {f"x{i:02}": torch.zeros(1) for i in range(100)}, ours())
