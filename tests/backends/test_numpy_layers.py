"""numpy's layers: shapes, bad inputs, and the gradients that other backends are measured with."""

from typing import Any

import numpy as np
import pytest

import policy_core as pc
import policy_numpy as pn
from policy_core.testing import same_bits


def wrapped(policy: str, k: int = 8, n: int = 5) -> pn.Dense:
    layer: pn.Dense = pc.wrap(pn.Dense(k, n, seed=0), policy)
    return layer


def inputs(m: int = 6, k: int = 8) -> Any:
    return np.random.default_rng(1).standard_normal((m, k), np.float32)


@pytest.mark.parametrize("policy", ["float32", "int8_from_float32", "float8_from_float32"])
@pytest.mark.parametrize("shape", [(7,), (2, 9), (3, 8, 1), ()], ids=str)
def test_wrong_last_axis_is_refused(shape: tuple[int, ...], policy: str) -> None:
    """An input of another width is an error that says which shape was expected."""
    with pytest.raises(ValueError, match=r"Expected an input of shape \(\.\.\., 8\)"):
        wrapped(policy)(np.ones(shape, np.float32))


@pytest.mark.parametrize(
    ("ids", "error"),
    [([0.5], TypeError), ([-1], IndexError), ([10], IndexError), ([True], TypeError)],
    ids=str,
)
@pytest.mark.parametrize("policy", [None, "int8_from_float32"])
def test_wrong_ids_are_refused(ids: list[Any], error: type[Exception], policy: str | None) -> None:
    """Ids must be integers of the table: negative ones do not count from the end."""
    table = pn.Embedding(10, 4, seed=0)
    if policy:
        pc.wrap(table, policy)
    with pytest.raises(error):
        table(ids)


def test_large_ids_are_exact_under_bfloat16() -> None:
    """An integer id passes a bfloat16 policy untouched: 2909 stays 2909, not 2912."""
    table = pc.wrap(pn.Embedding(3000, 2, seed=0), "mixed_bfloat16")
    wanted = table.weight[2909].astype(np.float32)
    assert np.abs(table(np.array(2909)).astype(np.float32) - wanted).max() <= 0.02
    model = pn.Sequential([table])
    assert model([2909]).shape == (1, 2)


@pytest.mark.parametrize(
    "arguments",
    [{"activation": "swish"}, {"in_features": -1}, {"out_features": -3}],
    ids=str,
)
def test_bad_layers_are_refused(arguments: dict[str, Any]) -> None:
    """A size or activation that makes no sense is an error at construction."""
    with pytest.raises(ValueError, match=r"activation|negative"):
        pn.Dense(**{"in_features": 2, "out_features": 2, **arguments})
    with pytest.raises(TypeError, match="Expected layers"):
        pn.Sequential([3])  # type: ignore[list-item]  # the wrong type is the point


def test_layers_that_no_policy_could_reach_are_refused() -> None:
    """A layer whose policy could never act, or whose tensors would not be saved, is an error."""

    class Doubler(pn.Layer):
        def __call__(self, x: Any, training: bool = False) -> Any:
            return 2 * x

    class Positions(pn.Sequential):
        def __init__(self) -> None:
            super().__init__([pn.Dense(2, 2)])
            self.tensors["positions"] = np.ones(2, np.float32)

    for layer, said in ((Doubler(), "Define compute"), (Positions(), "tensors of its own")):
        for function in (pc.wrap, pc.report):
            with pytest.raises(TypeError, match=said):
                function(pn.Sequential([pn.Dense(2, 2), layer]))


def test_leaf_of_a_users_own() -> None:
    """A user's leaf that defines compute follows the source policy, and its tensors are kept."""

    class Scale(pn.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.tensors["factor"] = np.full(2, 3, np.float32)

        def compute(self, x: Any, tensors: dict[str, Any]) -> Any:
            return x * tensors["factor"]

    model = pc.wrap(pn.Sequential([Scale()]), "int8_from_mixed_bfloat16")
    assert model(np.ones((1, 2), np.float32)).dtype.name == "bfloat16"
    row = pc.report(model).rows[0]
    assert row.policy == "mixed_bfloat16"
    assert "Scale has no quantized form" in row.note
    assert row.bytes_after == 8


@pytest.mark.parametrize("activation", ["relu", "tanh", "gelu"])
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "int8_from_mixed_bfloat16"])
def test_activations_follow_the_product(activation: str, policy: str) -> None:
    """A wrapped layer applies its activation in the compute dtype."""
    plain = pn.Dense(8, 5, activation=activation, seed=0)
    y = pc.wrap(pn.Dense(8, 5, activation=activation, seed=0), policy)(inputs())
    assert y.dtype.name == "bfloat16"
    assert np.abs(y.astype(np.float32) - plain(inputs())).max() < 0.05


def test_rows_of_all_sizes_keep_their_precision() -> None:
    """A row of amax 1 beside one of 1000 is as precise: each has its own scale."""
    layer = pn.Dense(2048, 16, seed=0)
    x = np.random.default_rng(0).standard_normal((1, 5, 2048), np.float32)
    x *= np.array([1, 1000, 1e-3, 1, 1e4], np.float32)[None, :, None]
    y = pc.wrap(layer, "int8_from_float32")(x)
    wanted = x @ layer.weight.T
    error = np.linalg.norm(y - wanted, axis=-1) / np.linalg.norm(wanted, axis=-1)
    assert (error < 0.01).all()


@pytest.mark.parametrize("bias_dtype", [None, "float32", "bfloat16"])
def test_bias_of_any_dtype(bias_dtype: str | None) -> None:
    """A bias is added in float32 whatever its dtype, and large bfloat16 inputs stay finite."""
    layer = pn.Dense(8, 5, bias=bias_dtype is not None, seed=0)
    source = "bfloat16" if bias_dtype == "bfloat16" else "mixed_bfloat16"
    pc.wrap(layer, f"int8_from_{source}")
    assert layer.bias is None or layer.bias.dtype.name == bias_dtype
    x = inputs()
    x[0, 0] = 1e5
    assert np.isfinite(layer(x).astype(np.float32)).all()


def test_integer_layer_in_a_mixed_model_casts_nothing() -> None:
    """A layer with an integer policy inside a mixed model runs as it is, without an error."""
    model = pn.Sequential([pn.Dense(8, 8, seed=0), pn.Dense(8, 5, seed=1)])
    pc.wrap(model, {"0": "int32", "1": "mixed_bfloat16"})
    assert model.layers[0](inputs()).dtype == np.float32
    assert model(inputs()).dtype.name == "bfloat16"


def test_embedding_and_linear_agree_on_the_compute_dtype() -> None:
    """Under mixed_bfloat16 an embedding of ids and a linear layer of floats are both bfloat16."""
    table, layer = pn.Embedding(10, 5, seed=0), pn.Dense(8, 5, seed=0)
    pc.wrap(table, "mixed_bfloat16")
    pc.wrap(layer, "mixed_bfloat16")
    total = table(np.arange(6)) + layer(inputs())
    assert total.dtype.name == "bfloat16"
    assert table.weight.dtype == layer.weight.dtype == np.float32


# Gradients.


@pytest.mark.parametrize("m", [1, 2, 5])
@pytest.mark.parametrize(("k", "n"), [(33, 17), (32, 15)])
def test_odd_sizes_train_in_float8(k: int, n: int, m: int) -> None:
    """float8 training works for sizes that no tile divides, with gradients of the right shapes."""
    layer = wrapped("float8_from_float32", k, n)
    assert layer.wrapping is not None
    plan = layer.wrapping.plan
    y, operands, _ = pn.linear(inputs(m, k), layer.tensors, plan, training=True)
    dx, gradients, _ = pn.linear_gradient(y, operands, layer.tensors, plan)
    assert (y.shape, dx.shape, gradients["weight"].shape) == ((m, n), (m, k), (n, k))
    assert np.isfinite(dx).all()


def gradient_of(policy: str, m: int) -> tuple[Any, dict[str, Any], dict[str, Any], pn.Dense]:
    layer = wrapped(policy)
    assert layer.wrapping is not None
    plan = layer.wrapping.plan
    _, operands, state = pn.linear(inputs(m), layer.tensors, plan, training=True)
    layer.tensors.update(state)
    dy = np.random.default_rng(2).standard_normal((m, 5), np.float32)
    dx, gradients, state = pn.linear_gradient(dy, operands, layer.tensors, plan)
    return dx, gradients, state, layer


@pytest.mark.parametrize("policy", ["float8_from_float32", "float8/dynamic_from_float32"])
@pytest.mark.parametrize("m", [1, 2, 5])
def test_float8_gradients_are_near_the_exact_ones(policy: str, m: int) -> None:
    """Gradients through float8 are those of the float layer within the formats' precision."""
    dx, gradients, state, layer = gradient_of(policy, m)
    dy = np.random.default_rng(2).standard_normal((m, 5), np.float32)
    weight = pn.Dense(8, 5, seed=0).weight
    # e5m2 keeps 2 bits and e4m3 keeps 3: relative errors of 1/8 and 1/16 at most, each factor.
    tolerance = 1 / 8 + 1 / 16 + 1 / 128
    assert (np.abs(dx - dy @ weight) <= tolerance * (np.abs(dy) @ np.abs(weight))).all()
    wanted = dy.T @ inputs(m)
    assert (
        np.abs(gradients["weight"] - wanted) <= tolerance * (np.abs(dy).T @ np.abs(inputs(m)))
    ).all()
    assert same_bits(gradients["bias"], dy.sum(0))
    assert gradients["weight"].shape == (5, 8)
    if "dynamic" not in policy:
        assert state["output_grad_amax_history"][0] == np.abs(dy).max()
        assert layer.tensors["input_amax_history"][0] == np.abs(inputs(m)).max()


def test_int8_gradient_is_straight_through() -> None:
    """The input's gradient passes the dequantized weight; codes have no gradient."""
    dx, gradients, state, layer = gradient_of("int8_from_float32", 4)
    dy = np.random.default_rng(2).standard_normal((4, 5), np.float32)
    assert np.allclose(dx, dy @ layer.weight, rtol=1e-6, atol=1e-6)
    assert set(gradients) == {"bias"}
    assert state == {}


def test_gradients_come_in_the_variable_dtype() -> None:
    """Under a mixed policy the weight's gradient is float32, as the weight is."""
    _, gradients, _, _ = gradient_of("float8_from_mixed_bfloat16", 3)
    assert {name: g.dtype.name for name, g in gradients.items()} == {
        "weight": "float32",
        "bias": "float32",
    }


def test_gradient_without_rows() -> None:
    """A batch of 0 gives zero gradients of the right shapes and moves no state."""
    dx, gradients, state, _ = gradient_of("float8_from_float32", 0)
    assert dx.shape == (0, 8)
    assert gradients["weight"].shape == (5, 8)
    assert not gradients["weight"].any()
    assert state == {}


def test_unused_branch_keeps_its_state() -> None:
    """A layer that is not called in ten training steps has the state that it had."""
    used, unused = wrapped("float8_from_float32"), wrapped("float8_from_float32")
    unused(inputs(), training=True)
    before = {name: array.copy() for name, array in unused.tensors.items()}
    for _ in range(10):
        used(inputs(), training=True)
    assert all(same_bits(unused.tensors[name], array) for name, array in before.items())


def test_layer_called_twice_makes_two_entries() -> None:
    """Two calls in one step record two amax values, the newest first."""
    layer = wrapped("float8_from_float32")
    layer(np.full((1, 8), 2, np.float32), training=True)
    layer(np.full((1, 8), 3, np.float32), training=True)
    assert layer.tensors["input_amax_history"][:3].tolist() == [3, 2, 0]


@pytest.mark.parametrize("policy", ["float32", "int8_from_float32", "float8_from_float32"])
def test_complex_and_foreign_bytes(policy: str) -> None:
    """Complex inputs are refused; arrays in the other byte order count by their values."""
    layer = pc.wrap(pn.Dense(8, 4), policy)
    x = np.arange(16, dtype=np.float32).reshape(2, 8)
    assert same_bits(layer(x.astype(x.dtype.newbyteorder())), layer(x))
    with pytest.raises(TypeError, match="Expected real inputs"):
        layer(x * 1j)
