"""flax nnx: every layer kind, training, and transformations, beyond what the contract shows."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import policy_core as pc
import policy_jax
import policy_numpy
from policy_core.testing import same_bits

GRADIENT = nnx.DiffState(0, (nnx.Param, policy_jax.Float8GradientState))


def rngs():
    return nnx.Rngs(0)


def inputs(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32))


class Net(nnx.Module):
    def __init__(self):
        self.first = nnx.Linear(8, 16, rngs=rngs())
        self.norm = nnx.LayerNorm(16, rngs=rngs())
        self.second = nnx.Linear(16, 4, rngs=rngs())

    def __call__(self, x):
        return self.second(self.norm(nnx.relu(self.first(x))))


LAYERS = {
    "general": (lambda: nnx.LinearGeneral((3, 4), (5, 2), axis=(1, -1), rngs=rngs()), (6, 3, 4)),
    "general-one": (lambda: nnx.LinearGeneral(4, (5, 2), axis=1, rngs=rngs()), (6, 4, 3)),
    "einsum": (lambda: nnx.Einsum("abc,cde->daeb", (4, 5, 2), (5, 2), rngs=rngs()), (6, 3, 4)),
    "einsum-dots": (lambda: nnx.Einsum("...c,cd->...d", (4, 5), (5,), rngs=rngs()), (6, 3, 4)),
    "conv": (lambda: nnx.Conv(4, 5, (3, 3), strides=2, rngs=rngs()), (2, 9, 8, 4)),
    "conv-dilated": (
        lambda: nnx.Conv(4, 5, (3,), padding=1, kernel_dilation=2, rngs=rngs()),
        (9, 4),
    ),
    "attention": (
        lambda: nnx.MultiHeadAttention(num_heads=2, in_features=8, decode=False, rngs=rngs()),
        (2, 6, 8),
    ),
}


@pytest.mark.parametrize("mode", ["int8", "int8/weight_only", "float8", "float8/dynamic"])
@pytest.mark.parametrize(("make", "shape"), LAYERS.values(), ids=LAYERS)
def test_every_layer_kind_is_quantized(make, shape, mode):
    """Each kind of layer with a product computes on codes, near the float layer, and unwraps."""
    x = inputs(*shape)
    wanted = make()(x)
    layer = pc.wrap(make(), f"{mode}_from_float32")
    layer.eval()
    assert all(row.quantized for row in pc.report(layer).rows)
    y = layer(x)
    assert y.shape == wanted.shape
    assert np.abs(y - wanted).max() <= 0.15 * np.abs(wanted).max()
    assert same_bits(pc.unwrap(layer)(x).shape, wanted.shape)


def test_int8_of_general_axes_is_the_reference_to_the_bit():
    """A layer over several axes gives the bits of the reference's product of rows."""
    layer = pc.wrap(LAYERS["general"][0](), "int8_from_float32")
    x = inputs(6, 3, 4)
    dense = policy_numpy.Dense(12, 10)
    plain = LAYERS["general"][0]()
    dense.tensors["weight"] = np.ascontiguousarray(np.asarray(plain.kernel).reshape(12, 10).T)
    dense.tensors["bias"] = np.asarray(plain.bias).reshape(-1)
    wanted = pc.wrap(dense, "int8_from_float32")(np.asarray(x).reshape(6, 12))
    assert same_bits(np.asarray(layer(x)).reshape(6, 10), wanted)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: nnx.Conv(4, 4, (3,), feature_group_count=4, rngs=rngs()), "feature groups"),
        (lambda: nnx.Einsum("ab,ac->abc", (4, 5), rngs=rngs()), "batch axis"),
        (
            lambda: nnx.LinearGeneral(4, 5, batch_axis={0: 3}, rngs=rngs()),
            "batch axes",
        ),
        (
            lambda: nnx.Linear(4, 5, dot_general=lambda *a, **k: None, rngs=rngs()),
            "dot_general of its own",
        ),
    ],
    ids=["groups", "einsum", "batch", "dot_general"],
)
def test_what_cannot_be_quantized_is_left_out_with_the_reason(make, reason):
    """A layer without a product on codes follows the source policy, and the report says why."""
    (row,) = pc.report(pc.wrap(make(), "int8_from_float32")).rows
    assert (row.policy, row.quantized) == ("float32", False)
    assert reason in row.note


def test_attend_uses_the_codes():
    """A quantized table serves as the last layer's weight too."""
    table = nnx.Embed(10, 8, rngs=rngs())
    x = inputs(3, 8)
    wanted = table.attend(x)
    pc.wrap(table, "int8_from_float32")
    assert np.abs(table.attend(x) - wanted).max() <= 0.02 * np.abs(wanted).max()
    with pytest.raises(AttributeError, match=r"pc\.unwrap gives the float layer back"):
        table.embedding  # noqa: B018  # the look-up is what is tested


def test_tied_weights_stay_tied():
    """Two layers with one Param have one codes variable, counted once, and unwrap to one Param."""

    class Tied(nnx.Module):
        def __init__(self):
            self.a = nnx.Linear(8, 8, use_bias=False, rngs=rngs())
            self.b = nnx.Linear(8, 8, use_bias=False, rngs=rngs())
            self.b.kernel = self.a.kernel

    model = pc.wrap(Tied(), "int8_from_float32")
    assert model.a.weight is model.b.weight
    report = pc.report(model)
    assert [row.bytes_before for row in report.rows] == [256, 0]
    assert report.rows[1].bytes_after == 0
    pc.unwrap(model)
    assert model.a.kernel is model.b.kernel
    with pytest.raises(ValueError, match="share one weight"):
        pc.wrap(model, {"a": "int8_from_float32", "b": "float32"})


def test_float_weights_are_freed():
    """After wrapping nothing holds the float weights, and parameters are float alone."""
    import weakref

    model = Net()
    kept = weakref.ref(model.first.kernel.get_raw_value())
    pc.wrap(model, "int8_from_float32")
    assert kept() is None
    for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)):
        assert leaf.dtype == jnp.float32


def reference_net(model):
    first, second = policy_numpy.Dense(8, 16), policy_numpy.Dense(16, 4)
    for ours, theirs in ((first, model.first), (second, model.second)):
        ours.tensors["weight"] = np.ascontiguousarray(np.asarray(theirs.kernel).T)
    return first, second


def training_step(model, optimizer, x, target):
    def loss(model):
        return jnp.square(model(x) - target).mean()

    value, gradients = nnx.value_and_grad(loss, argnums=GRADIENT)(model)
    policy_jax.apply_gradient_state(model, gradients)
    optimizer.update(model, nnx.filter_state(gradients, nnx.Param))
    return value


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_delayed_scaling_trains(jit):
    """A float8 model learns; all three states move in each step, scales as the page says."""
    model = pc.wrap(Net(), "float8_from_float32")
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    step = nnx.jit(training_step) if jit else training_step
    x, target = inputs(32, 8), inputs(32, 4, seed=1)
    losses = [float(step(model, optimizer, x, target)) for _ in range(12 if jit else 2)]
    assert losses[-1] < losses[0]
    for layer in (model.first, model.second):
        for role in ("input", "weight", "output_grad"):
            history = getattr(layer, f"{role}_amax_history")[...]
            assert int((history > 0).sum()) == len(losses), role
            assert float(getattr(layer, f"{role}_scale")[...]) != 1.0
    assert float(model.first.input_amax_history[0]) == float(jnp.abs(x).max())


def test_gradient_has_the_references_numbers():
    """Gradients and the output gradient's state are those of the reference."""
    weight = np.random.default_rng(0).standard_normal((6, 8), np.float32)
    dense = policy_numpy.Dense(8, 6)
    dense.tensors["weight"] = weight
    pc.wrap(dense, "float8_from_float32")
    layer = nnx.Linear(8, 6, rngs=rngs())
    layer.kernel[...] = weight.T
    pc.wrap(layer, "float8_from_float32")
    plan = dense.wrapping.plan
    for seed in range(3):
        x, dy = inputs(5, 8, seed=seed), inputs(5, 6, seed=10 + seed) * 10.0**seed
        _, operands, state = policy_numpy.linear(np.asarray(x), dense.tensors, plan, True)
        dense.tensors.update(state)
        dx, gradients, state = policy_numpy.linear_gradient(
            np.asarray(dy), operands, dense.tensors, plan
        )
        dense.tensors.update(state)

        def loss(layer, x, dy=dy):
            return (layer(x) * dy).sum()

        ours = nnx.grad(loss, argnums=(GRADIENT, 1))(layer, x)
        policy_jax.apply_gradient_state(layer, ours[0])
        np.testing.assert_allclose(ours[1], dx, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(
            ours[0]["kernel"][...], gradients["weight"].T, rtol=1e-5, atol=1e-4
        )
        np.testing.assert_allclose(ours[0]["bias"][...], gradients["bias"], rtol=1e-5, atol=1e-5)
        for name in ("output_grad_scale", "output_grad_amax_history", "input_scale"):
            assert same_bits(getattr(layer, name)[...], dense.tensors[name]), (seed, name)


def test_layer_called_twice_makes_two_entries():
    """A layer that is used twice in a step records both calls of each role; nothing is summed."""
    layer = pc.wrap(nnx.Linear(8, 8, rngs=rngs()), "float8_from_float32")
    x = inputs(4, 8)

    def loss(layer):
        return (layer(x) * 3).sum() + (layer(x * 2) * 5).sum()

    gradients = nnx.grad(loss, argnums=GRADIENT)(layer)
    policy_jax.apply_gradient_state(layer, gradients)
    largest = float(jnp.abs(x).max())
    np.testing.assert_array_equal(layer.input_amax_history[:3], [2 * largest, largest, 0])
    # Backward calls come last to first, so the first call's is the newest.
    np.testing.assert_array_equal(layer.output_grad_amax_history[:3], [3, 5, 0])


def test_scan_over_micro_batches_records_each():
    """A scan over micro-batches, state carried, makes an entry for each, in order."""
    layer = pc.wrap(nnx.Linear(8, 8, rngs=rngs()), "float8_from_float32")
    batches = jnp.stack([inputs(4, 8) * scale for scale in (1.0, 3.0, 2.0)])

    @nnx.jit
    def steps(layer, batches):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def one(layer, x):
            gradients = nnx.grad(lambda layer: (layer(x) * x[0, 0]).sum(), argnums=GRADIENT)(layer)
            policy_jax.apply_gradient_state(layer, gradients)
            return layer

        one(layer, batches)

    steps(layer, batches)
    wanted = np.abs(np.asarray(batches)).max((1, 2))[::-1]
    np.testing.assert_array_equal(layer.input_amax_history[:4], [*wanted, 0])
    wanted = np.abs(np.asarray(batches)[:, 0, 0])[::-1]
    np.testing.assert_array_equal(layer.output_grad_amax_history[:4], [*wanted, 0])


def test_gradient_outside_training_moves_nothing():
    """In evaluation a gradient comes, and no state moves."""
    model = pc.wrap(Net(), "float8_from_float32")
    optimizer = nnx.Optimizer(model, optax.sgd(1e-2), wrt=nnx.Param)
    training_step(model, optimizer, inputs(4, 8), inputs(4, 4))
    model.eval()
    before = jax.tree.map(np.array, nnx.state(model, policy_jax.Float8State))
    gradients = nnx.grad(lambda model: model(inputs(4, 8) * 100).sum(), argnums=GRADIENT)(model)
    policy_jax.apply_gradient_state(model, gradients)
    after = jax.tree.map(np.array, nnx.state(model, policy_jax.Float8State))
    jax.tree.map(np.testing.assert_array_equal, before, after)
    assert gradients["first"]["kernel"][...].any()


def test_unused_branch_keeps_its_history():
    """A branch that no step uses keeps its state."""

    class Branches(nnx.Module):
        def __init__(self):
            self.used = nnx.Linear(8, 4, rngs=rngs())
            self.unused = nnx.Linear(8, 4, rngs=rngs())

        def __call__(self, x):
            return self.used(x)

    model = pc.wrap(Branches(), "float8_from_float32")
    optimizer = nnx.Optimizer(model, optax.sgd(1e-2), wrt=nnx.Param)
    for _ in range(3):
        training_step(model, optimizer, inputs(4, 8), inputs(4, 4))
    assert not model.unused.input_amax_history[...].any()
    assert not model.unused.output_grad_amax_history[...].any()
    assert float(model.unused.input_scale[...]) == 1


def test_no_retrace_per_call():
    """Layers of the same shapes share one compilation, and calls after the first make none."""
    model = pc.wrap(Net(), "int8_from_float32")
    traces = []

    @nnx.jit
    def call(model, x):
        traces.append(None)
        return model(x)

    for seed in range(3):
        call(model, inputs(4, 8, seed=seed))
    assert len(traces) == 1
    graph = nnx.graphdef(model)
    assert graph == nnx.graphdef(pc.wrap(Net(), "int8_from_float32"))
    assert hash(graph) == hash(nnx.graphdef(model))


def test_batch_norm_keeps_its_statistics():
    """BatchNorm under a mixed policy computes in float32, keeps its own statistics, updates them."""
    norm = pc.wrap(nnx.BatchNorm(8, rngs=rngs()), "mixed_bfloat16")
    y = norm(inputs(16, 8) + 3)
    assert y.dtype == jnp.bfloat16
    assert norm.mean[...].dtype == jnp.float32
    assert norm.mean[...].any()
    norm.eval()
    before = np.array(norm.mean[...])
    norm(inputs(16, 8))
    np.testing.assert_array_equal(norm.mean[...], before)


def test_parameters_beside_layers_follow_their_policy():
    """A module that holds parameters and layers is a row of its own, is cast, saved and loaded."""

    class Model(nnx.Module):
        def __init__(self):
            self.scale = nnx.Param(jnp.ones(8))
            self.blocks = nnx.List([nnx.Linear(8, 8, rngs=rngs()) for _ in range(2)])

        def __call__(self, x):
            assert self.scale[...].dtype == jnp.bfloat16
            x = x * self.scale[...]
            for block in self.blocks:
                x = block(x)
            return x

    model = pc.wrap(Model(), "mixed_bfloat16")
    assert [row.path for row in pc.report(model).rows] == ["", "blocks/0", "blocks/1"]
    assert model(inputs(2, 8)).dtype == jnp.bfloat16
    assert model.scale[...].dtype == jnp.float32
    gradients = nnx.grad(lambda model: model(inputs(2, 8)).astype(jnp.float32).sum())(model)
    assert gradients["scale"][...].dtype == jnp.float32


def test_dropout_under_a_policy():
    """Dropout has no weight; it follows the policy and keeps its random stream."""
    model = pc.wrap(
        nnx.Sequential(nnx.Linear(8, 8, rngs=rngs()), nnx.Dropout(0.5, rngs=nnx.Rngs(1))),
        "int8_from_mixed_bfloat16",
    )
    a, b = model(inputs(4, 8)), model(inputs(4, 8))
    assert a.dtype == jnp.bfloat16
    assert (a != b).any()


def test_frozen_layers_give_the_inputs_gradient():
    """The backward pass goes through int8 and frozen layers to the input."""
    for policy in ("int8_from_float32", "float8_from_float32", "int8/weight_only_from_float32"):
        model = pc.freeze(pc.wrap(Net(), policy))
        gradient = jax.grad(lambda x, model=model: model(x).sum())(inputs(4, 8))
        plain = jax.grad(lambda x: Net()(x).sum())(inputs(4, 8))
        assert np.abs(gradient - plain).max() <= 0.3 * np.abs(plain).max()


@pytest.mark.parametrize(
    "after", ["mixed_bfloat16", "float8_from_float32", "float8/dynamic_from_float32"]
)
def test_policy_can_be_replaced(after):
    """Codes give way to another policy's form, with Params again where it has them."""
    model = pc.wrap(Net(), "int8_from_float32")
    x = inputs(4, 8)
    wanted = model(x)
    model = pc.wrap(model, after, on_wrapped="replace")
    assert isinstance(model.first.kernel, nnx.Param)
    assert model.first.kernel[...].shape == (8, 16)
    assert not nnx.state(model, policy_jax.Codes)
    model.eval()
    assert np.abs(model(x).astype(jnp.float32) - wanted).max() <= 0.15 * np.abs(wanted).max()
    model = pc.wrap(model, "int8/weight_only_from_float32", on_wrapped="replace")
    assert not nnx.state(model, policy_jax.Float8State)
    assert not hasattr(model.first, "use_running_average")


def test_tied_layers_have_their_own_rest():
    """Layers that share a weight keep biases and states of their own, also frozen."""

    class Tied(nnx.Module):
        def __init__(self):
            self.a = nnx.Linear(8, 8, rngs=rngs())
            self.b = nnx.Linear(8, 8, rngs=rngs())
            self.b.kernel = self.a.kernel

        def __call__(self, x):
            return self.b(self.a(x))

    model = pc.wrap(Tied(), "float8_from_bfloat16")
    model(inputs(4, 8, seed=3) * 10)
    model = pc.freeze(model)
    assert model.a.weight is model.b.weight
    assert model.b.bias[...].dtype == jnp.bfloat16
    assert model.a.input_scale[...] != model.b.input_scale[...]
    model.eval()
    assert model(inputs(4, 8)).dtype == jnp.bfloat16


@pytest.mark.parametrize("mode", ["int8", "float8"])
def test_models_may_be_wrapped_inside_jit(mode):
    """A model that is made and wrapped inside `nnx.jit` computes what one outside does."""
    policy = f"{mode}_from_float32"

    def make():
        return pc.wrap(nnx.Linear(8, 4, rngs=nnx.Rngs(0)), policy)

    inside, outside = nnx.jit(make)(), make()
    inside.eval()
    outside.eval()
    x = jnp.ones((2, 8))
    assert (inside(x) == outside(x)).all()
    shapes = nnx.state(nnx.eval_shape(make))
    assert shapes["bias"].get_value().shape == (4,)


@pytest.mark.parametrize("mode", ["int8", "float8/weight_only"])
def test_layers_inside_weight_norm_are_left_out(mode):
    """A layer whose kernel `nnx.WeightNorm` computes at each call keeps it, and the report says so."""
    model = nnx.WeightNorm(nnx.Linear(8, 4, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(1))
    x = jnp.ones((2, 8))
    wanted = model(x)
    pc.wrap(model, f"{mode}_from_float32")
    np.testing.assert_allclose(model(x), wanted, rtol=1e-6)
    (row,) = pc.report(model).rows
    assert "WeightNorm computes its weight anew" in row.note
