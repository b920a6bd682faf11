"""float8 training: gradients and state against the reference, functions, accumulation."""

import copy
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import policy_core as pc
import policy_numpy
import policy_tensorflow as pt
from policy_core.testing import same_bits

MODES = ("eager", "function", "jit")


def compiled(step: Any, mode: str) -> Any:
    """Gives a step as it is, or as a function."""
    if mode == "eager":
        return step
    return tf.function(step, jit_compile=mode == "jit" or None)


def pair(k: int, n: int, policy: str) -> tuple[Any, Any]:
    """Gives one linear layer under a policy here and in the reference."""
    generator = np.random.default_rng(k * 100 + n)
    weight = generator.standard_normal((n, k), np.float32)
    bias = generator.standard_normal(n, np.float32)
    ours = pt.Linear(k, n)
    ours.weight.assign(weight.T)
    ours.bias.assign(bias)
    theirs = policy_numpy.Dense(k, n)
    theirs.tensors.update(weight=weight, bias=bias)
    return pc.wrap(ours, policy), pc.wrap(theirs, policy)


def state(layer: Any, role: str, count: int = 4) -> Any:
    """Gives the newest entries of a role's history."""
    return getattr(layer, f"{role}_amax_history").numpy()[:count]


@pytest.mark.parametrize("policy", ["float8_from_float32", "float8/dynamic_from_float32"])
@pytest.mark.parametrize(
    ("mode", "k", "n", "m"),
    [
        ("eager", 33, 17, 5),
        ("eager", 32, 15, 1),
        ("eager", 16, 1, 2),
        ("function", 33, 17, 5),
        ("jit", 33, 1, 5),
    ],
)
def test_gradients_and_state_are_the_references(
    policy: str, mode: str, k: int, n: int, m: int
) -> None:
    """Three training steps give the reference's outputs, gradients and scales, of odd sizes too."""
    ours, theirs = pair(k, n, policy)
    generator = np.random.default_rng(0)

    def step(x: Any, dy: Any) -> Any:
        with pt.training(), tf.GradientTape() as tape:
            tape.watch(x)
            y = ours(x)
        return [y, *tape.gradient(y, [x, ours.weight, ours.bias], dy)]

    step = compiled(step, mode)
    plan = theirs.wrapping.plan
    for size in (1, 100, 0.01):
        x = generator.standard_normal((m, k), np.float32) * np.float32(size)
        dy = generator.standard_normal((m, n), np.float32) * np.float32(size)
        y, dx, dweight, dbias = step(tf.constant(x), tf.constant(dy))
        wanted, operands, moved = policy_numpy.linear(x, theirs.tensors, plan, True)
        theirs.tensors.update(moved)
        wanted_dx, gradients, moved = policy_numpy.linear_gradient(
            dy, operands, theirs.tensors, plan
        )
        theirs.tensors.update(moved)
        for got, reference in [
            (y, wanted),
            (dx, wanted_dx),
            (dweight, gradients["weight"].T),
            (dbias, gradients["bias"]),
        ]:
            np.testing.assert_allclose(got, reference, rtol=1e-5, atol=1e-5 * size * (size + 1))
        if plan.delayed:
            for role in ("input", "weight", "output_grad"):
                np.testing.assert_array_equal(
                    state(ours, role), theirs.tensors[f"{role}_amax_history"][:4]
                )
                name = f"{role}_scale"
                assert getattr(ours, name).numpy() == theirs.tensors[name]


class Branches(tf.Module):
    """Two layers, of which one may not be used."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = pt.Linear(8, 8), pt.Linear(8, 8)

    def __call__(self, x: Any) -> Any:
        return self.used(self.used(x))


@pytest.mark.parametrize("mode", MODES)
def test_each_call_is_an_entry(mode: str) -> None:
    """A layer that is called twice makes two entries a step; one that is not called makes none."""
    model = pc.wrap(Branches(), "float8_from_float32")
    x = tf.random.stateless_normal((4, 8), (1, 2))

    def step(x: Any) -> Any:
        with pt.training(), tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(x) ** 2)
        return tape.gradient(loss, [model.used.weight])

    step = compiled(step, mode)
    for _ in range(2):
        step(x)
    for role in ("input", "weight", "output_grad"):
        assert np.count_nonzero(state(model.used, role, 1024)) == 4
        assert not state(model.unused, role, 1024).any()
    np.testing.assert_allclose(state(model.used, "input")[1], np.abs(x).max())


@pytest.mark.parametrize("mode", MODES)
def test_micro_batches_are_calls(mode: str) -> None:
    """Under gradient accumulation each micro-batch moves the state once."""
    layer = pc.wrap(pt.Linear(8, 4), "float8_from_float32")
    x = np.random.default_rng(0).standard_normal((3, 5, 8)).astype(np.float32)

    def step(x: Any) -> Any:
        total = tf.zeros((8, 4))
        for batch in tf.unstack(x):
            with pt.training(), tf.GradientTape() as tape:
                loss = tf.reduce_sum(layer(batch))
            total += tape.gradient(loss, layer.weight)
        return total

    compiled(step, mode)(tf.constant(x))
    np.testing.assert_array_equal(state(layer, "input")[:3], np.abs(x).max((1, 2))[::-1])
    assert np.count_nonzero(state(layer, "output_grad")) == 3


@pytest.mark.parametrize("mode", MODES)
def test_evaluation_and_its_gradients_move_nothing(mode: str) -> None:
    """Calls outside `training()`, with gradients or without, leave the state alone."""
    layer = pc.wrap(pt.Linear(8, 4), "float8_from_float32")

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(x))
        return tape.gradient(loss, layer.weight)

    compiled(step, mode)(tf.ones((2, 8)))
    for role in ("input", "weight", "output_grad"):
        assert not state(layer, role, 1024).any()


@pytest.mark.parametrize("policy", ["float8_from_float32", "float8/dynamic_from_float32"])
def test_jacobian_of_a_trained_layer(policy: str) -> None:
    """`jacobian` and `batch_jacobian` of a layer that has state give its weight, and move nothing."""
    layer = pc.wrap(pt.Linear(8, 4), policy)
    x = tf.reshape(tf.range(24, dtype=tf.float32), (3, 8))
    with pt.training(), tf.GradientTape() as tape:
        loss = tf.reduce_sum(layer(x))
    tape.gradient(loss, layer.weight)
    before = [variable.numpy() for variable in layer.variables]
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(x)
        y = layer(x)
    bound = float(tf.reduce_max(tf.abs(layer.weight))) / 8
    wanted = np.tile(tf.transpose(layer.weight), (3, 1, 1))
    np.testing.assert_allclose(tape.batch_jacobian(y, x), wanted, atol=bound)
    rows = np.asarray(tape.jacobian(y, x))[range(3), :, range(3)]
    np.testing.assert_allclose(rows, wanted, atol=bound)
    assert all(map(same_bits, before, [variable.numpy() for variable in layer.variables]))


def test_scope_belongs_inside_the_function() -> None:
    """A function that is traced inside a scope that was entered outside of it is refused."""
    layer = pc.wrap(pt.Linear(8, 4), "float8_from_float32")
    function = tf.function(layer)
    with pytest.raises(RuntimeError, match=r"inside the tf\.function"), pt.training():
        function(tf.ones((2, 8)))
    assert not state(layer, "input").any()


def test_scope_reaches_into_branches_and_loops() -> None:
    """In a function's `tf.cond` and `tf.while_loop` its scope holds, and the state moves."""
    layer = pc.wrap(pt.Linear(8, 8), "float8_from_float32")

    @tf.function
    def step(x: Any, often: Any) -> Any:
        with pt.training():
            x = tf.cond(often > 0, lambda: layer(x), lambda: x)
            for _ in tf.range(often):
                x = layer(x)
        return x

    step(tf.ones((2, 8)), tf.constant(2))
    assert np.count_nonzero(state(layer, "input")) == 3
    step(tf.ones((2, 8)), tf.constant(0))
    assert np.count_nonzero(state(layer, "input")) == 3


@pytest.mark.parametrize("mode", ["function", "jit"])
def test_gradients_of_branches_and_loops(mode: str) -> None:
    """Through `tf.cond` and `tf.while_loop` gradients and state are those of plain Python."""
    layer = pc.wrap(pt.Linear(8, 8), "float8_from_float32")
    other = copy.deepcopy(layer)

    def in_graph(x: Any) -> Any:
        x = tf.cond(tf.reduce_sum(x) > -1e9, lambda: layer(x), lambda: x)
        loop = ((lambda i, x: i < 3), (lambda i, x: (i + 1, layer(x))), [0, x])
        return tf.while_loop(*loop, maximum_iterations=3)[1]

    def in_python(x: Any) -> Any:
        for _ in range(4):
            x = other(x)
        return x

    def step(call: Any, weight: Any) -> Any:
        def gradient(x: Any) -> Any:
            with pt.training(), tf.GradientTape() as tape:
                loss = tf.reduce_sum(call(x) ** 2)
            return tape.gradient(loss, weight)

        return gradient

    first, second = compiled(step(in_graph, layer.weight), mode), step(in_python, other.weight)
    for scale in (1, 10, 2):
        x = scale * tf.reshape(tf.range(16, dtype=tf.float32), (2, 8))
        wanted = second(x)
        bound = 1e-4 * float(tf.reduce_max(tf.abs(wanted)))
        np.testing.assert_allclose(first(x), wanted, rtol=1e-4, atol=bound)
    for role in ("input", "weight", "output_grad"):
        np.testing.assert_allclose(state(layer, role, 13), state(other, role, 13), rtol=1e-4)
        assert np.count_nonzero(state(layer, role, 13)) == 12


@pytest.mark.parametrize(
    ("policy", "mode"),
    [
        ("mixed_bfloat16", "function"),
        ("float8_from_float32", "eager"),
        ("float8_from_mixed_bfloat16", "function"),
        ("float8/dynamic_from_mixed_bfloat16", "jit"),
        ("int8_from_float32", "function"),
    ],
)
def test_a_model_learns(policy: str, mode: str) -> None:
    """A few steps of gradient descent end near float32's loss; int8 trains what is not codes."""
    generator = np.random.default_rng(0)
    x = tf.constant(generator.standard_normal((64, 8)).astype(np.float32))
    target = tf.constant(np.tanh(x.numpy() @ generator.standard_normal((8, 4))).astype(np.float32))

    def losses(policy: str, mode: str) -> Any:
        layers = [pt.Linear(8, 32), pt.LayerNorm(32), pt.Linear(32, 4)]
        for seed, layer in enumerate(layers[::2]):
            layer.weight.assign(tf.random.stateless_normal(layer.weight.shape, (seed, 0)) * 0.2)
        for layer in layers:
            pc.wrap(layer, policy)
        variables = [v for layer in layers for v in layer.trainable_variables]

        def step() -> Any:
            with pt.training(), tf.GradientTape() as tape:
                y = x
                for layer in layers:
                    y = layer(y)
                loss = tf.reduce_mean((tf.cast(y, tf.float32) - target) ** 2)
            for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
                assert gradient.dtype == variable.dtype
                variable.assign_sub(0.3 * gradient)
            return loss

        step = compiled(step, mode)
        return [float(step()) for _ in range(20)]

    found, wanted = losses(policy, mode), losses("float32", "function")
    assert found[-1] < 0.5 * found[0] or policy.startswith("int8")
    assert found[-1] < found[0]
    assert found[-1] < 1.1 * wanted[-1] or policy.startswith("int8")


def test_frozen_layers_pass_gradients_on() -> None:
    """A frozen layer, float8 or int8, gives the input its gradient, and the bias."""
    for policy in ("float8_from_float32", "int8_from_float32"):
        layer = pc.freeze(pc.wrap(pt.Linear(8, 4), policy))
        x = tf.ones((2, 8))
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x)
        dx, dbias = tape.gradient(y, [x, layer.bias])
        np.testing.assert_allclose(dx, np.ones((2, 4)) @ layer.weight.numpy().T, rtol=1e-5)
        np.testing.assert_allclose(dbias, [2, 2, 2, 2])


def test_bad_gradients_are_not_recorded() -> None:
    """A NaN in an output gradient shows in the results, and it and an infinity not in the state."""
    layer = pc.wrap(pt.Linear(8, 4), "float8_from_float32")
    for value in (1.0, np.inf, np.nan, 2.0):
        with pt.training(), tf.GradientTape() as tape:
            y = layer(tf.ones((2, 8)))
        gradient = tape.gradient(y, layer.weight, tf.fill((2, 4), value))
        assert np.isnan(gradient).all() == np.isnan(value)
    np.testing.assert_array_equal(state(layer, "output_grad"), [2, 1, 0, 0])
    assert np.isfinite(layer.output_grad_scale.numpy())
