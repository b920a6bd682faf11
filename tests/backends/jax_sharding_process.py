"""Run by test_jax_sharding.py with 8 virtual CPU devices; prints what failed, and exits with 1."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import policy_core as pc
import policy_jax
import policy_numpy

KERNELS = {"output": P(None, "model"), "contraction": P("model", None), "whole": P()}
INPUTS = {"batch": P("data"), "whole": P()}
MODES = ("int8", "int8/weight_only", "float8", "float8/dynamic", "float8/weight_only")


def inputs(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def sharded(array, spec):
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto, AxisType.Auto))
    return jax.device_put(jnp.asarray(array), NamedSharding(mesh, spec))


def check_products(failures):
    """Every way to shard a weight and a batch gives the reference's numbers, and stays sharded."""
    weight, x = inputs(32, 16), inputs(8, 32, seed=1)
    for mode in MODES:
        policy = f"{mode}_from_float32"
        dense = policy_numpy.Dense(32, 16, bias=False)
        dense.tensors["weight"] = np.ascontiguousarray(weight.T)
        wanted = pc.wrap(dense, policy)(x)
        for name, spec in KERNELS.items():
            layer = nnx.Linear(32, 16, use_bias=False, rngs=nnx.Rngs(0))
            layer.kernel.set_value(sharded(weight, spec))
            pc.wrap(layer, policy).eval()
            (row,) = pc.report(layer).rows
            if not row.kernel.endswith("_xla"):
                failures.append((mode, name, "kernel", row.kernel))
            codes = getattr(layer, "kernel" if mode == "float8" or "dyn" in mode else "weight")
            spread = len(codes[...].sharding.device_set)
            if spread != 8 or (name != "whole" and codes[...].sharding.is_fully_replicated):
                failures.append((mode, name, "weight is not sharded", codes[...].sharding))
            graph, state = nnx.split(layer)
            call = jax.jit(lambda state, x, graph=graph: nnx.merge(graph, state)(x))
            for batch, x_spec in INPUTS.items():
                y = call(state, sharded(x, x_spec))
                if mode == "int8" and not np.array_equal(np.asarray(y), wanted):
                    failures.append((mode, name, batch, "bits"))
                if not np.allclose(np.asarray(y), wanted, rtol=1e-5, atol=1e-4):
                    failures.append((mode, name, batch, "values"))
                if batch == "batch" and y.sharding.is_fully_replicated:
                    failures.append((mode, name, batch, "gathered", y.sharding))
                if (
                    batch == "batch"
                    and "all-gather" in call.lower(state, sharded(x, x_spec)).compile().as_text()
                ):
                    failures.append((mode, name, batch, "an all-gather"))


WRAPPED = {"output": P("model", None), "contraction": P(None, "model"), "whole": P()}


def put(variable, spec):
    variable.set_value(sharded(variable[...], spec))


def check_wrapped_first(failures):
    """A model that was wrapped on one device and sharded later calls the kernels on each shard."""
    weight, x = inputs(32, 256), inputs(8, 32, seed=1)
    for mode in MODES:
        policy = f"{mode}_from_float32"
        dense = policy_numpy.Dense(32, 256)
        dense.tensors["weight"] = np.ascontiguousarray(weight.T)
        dense.tensors["bias"] = inputs(256, seed=2)
        wanted = pc.wrap(dense, policy)(x)
        for name, spec in WRAPPED.items():
            layer = nnx.Linear(32, 256, rngs=nnx.Rngs(0))
            layer.kernel.set_value(jnp.asarray(weight))
            layer.bias.set_value(jnp.asarray(inputs(256, seed=2)))
            pc.wrap(layer, policy).eval()
            (row,) = pc.report(layer).rows
            if row.kernel.endswith("_xla"):
                failures.append((mode, name, "kernel", row.kernel))
            for _, variable in nnx.iter_graph(layer):
                if isinstance(variable, nnx.Variable):
                    put(variable, P())
            trained = "kernel" if policy.startswith(("float8_", "float8/d")) else "weight"
            # A kernel is (in, out), a packed weight (panels of out, bytes).
            put(getattr(layer, trained), P(*reversed(spec)) if trained == "kernel" else spec)
            if name == "output":
                put(layer.bias, P("model"))
            graph, state = nnx.split(layer)
            call = jax.jit(lambda state, x, graph=graph: nnx.merge(graph, state)(x))
            gradient = jax.jit(
                jax.grad(lambda x, s, graph=graph: jnp.square(nnx.merge(graph, s)(x)).sum())
            )
            for batch, x_spec in INPUTS.items():
                given = sharded(x, x_spec)
                y = call(state, given)
                what = (mode, name, batch)
                if mode == "int8" and not np.array_equal(np.asarray(y), wanted):
                    failures.append((*what, "bits"))
                if not np.allclose(np.asarray(y), wanted, rtol=1e-5, atol=1e-4):
                    failures.append((*what, "values"))
                text = call.lower(state, given).compile().as_text()
                if "policy_jax_linear" not in text:
                    failures.append((*what, "no kernel"))
                if "all-gather" in text and name != "contraction":
                    failures.append((*what, "an all-gather", text))
                if (batch == "batch" or name == "output") and y.sharding.is_fully_replicated:
                    failures.append((*what, "gathered", y.sharding))
                dx = gradient(given, state)
                text = gradient.lower(given, state).compile().as_text()
                if "all-gather" in text and name != "contraction":
                    failures.append((*what, "an all-gather of the gradient", text))
                if batch == "batch" and dx.sharding.is_fully_replicated:
                    failures.append((*what, "gathered", dx.sharding))
            again = pc.unwrap(layer)
            if not np.allclose(again.kernel[...], weight, atol=0.2):
                failures.append((mode, name, "unwrapped"))


def check_channels_that_fill_no_panels(failures):
    """Where devices' channels are no whole panels each device has the whole weight; batches stay."""
    for n in (32, 40, 96):
        w = policy_jax.quantize_array(inputs(16, n), "int8_from_float32")
        x = inputs(8, 16, seed=2)
        wanted = np.asarray(x @ w)
        spread = jax.tree.map(lambda a: sharded(a, P()), w)
        for spec in (P(), P("model")):
            spread.tensors["weight_scale"] = sharded(w.tensors["weight_scale"], spec)
            y = jax.jit(lambda x, w: x @ w)(sharded(x, P("data")), spread)
            if not np.array_equal(np.asarray(y), wanted):
                failures.append(("panels", n, spec, "bits"))
            if y.sharding.is_fully_replicated:
                failures.append(("panels", n, spec, "gathered"))


def check_explicit_mesh(failures):
    """On a mesh that is a part of types, as jax.make_mesh makes it, results and gradients are typed."""
    mesh = jax.make_mesh((2, 4), ("data", "model"))
    assert AxisType.Explicit in mesh.axis_types

    def put(array, spec):
        return jax.device_put(jnp.asarray(array), NamedSharding(mesh, spec))

    def loss(x, w):
        y = x @ w
        return jnp.square(y).sum(), y

    x, weight = inputs(8, 32, seed=2), inputs(32, 256)
    for mode in MODES:
        policy = f"{mode}_from_float32"
        native = policy_jax.quantize_array(weight, policy)
        replicated = jax.tree.map(lambda a: put(a, P()), native)
        spread = policy_jax.quantize_array(put(weight, P(None, "model")), policy)
        step = jax.jit(jax.value_and_grad(loss, has_aux=True))
        (_, wanted), wanted_gradient = step(x, native)
        for name, w, channels in (("kernels", replicated, None), ("xla", spread, "model")):
            (_, y), gradient = step(put(x, P("data")), w)
            what = (mode, "explicit", name)
            if y.sharding.spec != P("data", channels):
                failures.append((*what, "type", y.sharding))
            if gradient.sharding.spec != P("data", None):
                failures.append((*what, "type of the gradient", gradient.sharding))
            if mode == "int8" and not np.array_equal(y, wanted):
                failures.append((*what, "bits"))
            if not np.allclose(y, wanted, rtol=1e-5, atol=1e-4):
                failures.append((*what, "values"))
            if not np.allclose(gradient, wanted_gradient, rtol=1e-4, atol=1e-2):
                failures.append((*what, "gradient"))
    embed = pc.wrap(nnx.Embed(16, 8, rngs=nnx.Rngs(0)), "int8_from_float32")
    graph, state = nnx.split(embed)
    wanted = embed(jnp.arange(8))
    state = jax.tree.map(lambda a: put(a, P()), state)
    call = jax.jit(lambda state, ids: nnx.merge(graph, state)(ids))
    y = call(state, put(jnp.arange(8), P("data")))
    if y.sharding.spec != P("data", None) or not np.array_equal(y, wanted):
        failures.append(("explicit", "embedding", y.sharding))


def check_out_sharding(failures):
    """A quantized nnx layer gives its output in the sharding that a call asks for, as a plain one."""
    mesh = jax.make_mesh((2, 4), ("data", "model"))
    x, ids = inputs(8, 32), jnp.arange(8)
    linear, embed = nnx.Linear(32, 64, rngs=nnx.Rngs(0)), nnx.Embed(16, 32, rngs=nnx.Rngs(0))
    for policy in ("float32", "int8_from_float32", "float8/dynamic_from_float32"):
        pc.wrap(linear, policy, on_wrapped="replace")
        pc.wrap(embed, policy.replace("/dynamic", "/weight_only"), on_wrapped="replace")
        calls = ((linear, x), (embed, ids), (embed.attend, x))
        wanted = [call(given) for call, given in calls]
        with jax.set_mesh(mesh):
            parts = [nnx.split(layer) for layer in (linear, embed)]
            one, two = (
                nnx.merge(g, jax.tree.map(lambda a: jax.device_put(a, NamedSharding(mesh, P())), s))
                for g, s in parts
            )
            for (call, given), value in zip(
                ((one, x), (two, ids), (two.attend, x)), wanted, strict=True
            ):
                given = jax.device_put(given, NamedSharding(mesh, P("data")))
                for spec in (P("data", "model"), P(None, "model"), P(None, None)):
                    y = nnx.jit(lambda x, call=call, spec=spec: call(x, out_sharding=spec))(given)
                    if y.sharding.spec != spec or not np.allclose(y, value, rtol=1e-5, atol=1e-5):
                        failures.append((policy, "out_sharding", spec, y.sharding))


def trained(mesh, wraps_first):
    """The losses of some float8 training steps on an explicit mesh."""
    layer = nnx.Linear(32, 64, rngs=nnx.Rngs(0))
    if wraps_first:
        pc.wrap(layer, "float8_from_float32")
    with jax.set_mesh(mesh):
        for _, variable in nnx.iter_graph(layer):
            if isinstance(variable, nnx.Variable):
                over = P(None, "model") if variable[...].ndim == 2 else P()
                variable.set_value(jax.device_put(variable[...], NamedSharding(mesh, over)))
        pc.wrap(layer, "float8_from_float32")
        x = jax.device_put(jnp.asarray(inputs(8, 32)), NamedSharding(mesh, P("data")))
        optimizer = nnx.Optimizer(layer, optax.sgd(1e-2), wrt=nnx.Param)
        wanted = nnx.DiffState(0, (nnx.Param, policy_jax.Float8GradientState))

        @nnx.jit
        def step(layer, optimizer, x):
            loss, gradients = nnx.value_and_grad(
                lambda layer: jnp.square(layer(x)).mean(), argnums=wanted
            )(layer)
            policy_jax.apply_gradient_state(layer, gradients)
            optimizer.update(layer, nnx.filter_state(gradients, nnx.Param))
            return loss

        losses = [float(step(layer, optimizer, x)) for _ in range(3)]
    return losses, int((layer.output_grad_amax_history[...] > 0).sum())


def check_explicit_training(failures):
    """On an explicit mesh a model trains, wrapped before it was sharded or after, with one outcome."""
    mesh = jax.make_mesh((2, 4), ("data", "model"))
    (first, entries), (second, _) = trained(mesh, True), trained(mesh, False)
    if not np.allclose(first, second, rtol=1e-5) or not first[0] > first[-1] or entries != 3:
        failures.append(("explicit", "training", first, second, entries))


def check_training(failures):
    """A float8 training step over a sharded batch and sharded channels is that of one device."""
    for mode in ("float8", "float8/dynamic"):
        w = policy_jax.quantize_array(inputs(16, 64), f"{mode}_from_float32")
        x = inputs(8, 16, seed=2)

        def loss(values, x, w=w):
            tensors = {**w.tensors, "weight": values}
            own = policy_jax.QuantizedArray(tensors, w.axes, w.shape, w.wrapping)
            y, after = policy_jax.training_dot(x, own)
            return jnp.square(y).sum(), after

        step = jax.jit(jax.grad(loss, has_aux=True))
        values = w.tensors["weight"]
        wanted, wanted_after = step(values, x)
        dw, after = step(sharded(values, P("model", None)), sharded(x, P("data")))
        if not np.allclose(dw, wanted, rtol=1e-4, atol=1e-4 * float(np.abs(wanted).max())):
            failures.append((mode, "training", "gradient"))
        same = jax.tree.map(np.array_equal, after, wanted_after)
        if not jax.tree.all(same):
            failures.append((mode, "training", "state"))
        if dw.sharding.is_fully_replicated:
            failures.append((mode, "training", "gathered"))


def check_data_parallel_state(failures):
    """Under shard_map the amax is the maximum over replicas, by pmax."""
    w = policy_jax.quantize_array(inputs(16, 8), "float8_from_float32")
    x = inputs(8, 16, seed=2) * np.arange(1, 9, dtype=np.float32)[:, None]

    def step(x, w):
        def loss(w):
            y, after = policy_jax.training_dot(x, w)
            return (y * x.sum()).sum(), after

        gradients, after = jax.grad(loss, has_aux=True)(w)
        largest = jax.tree.map(lambda a: jax.lax.pmax(a, "data"), (after, gradients))
        return policy_jax.apply_gradient_state(*largest)

    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    run = jax.shard_map(step, mesh=mesh, in_specs=(P("data"), P()), out_specs=P(), check_vma=False)
    after = jax.jit(run)(x, w)
    if float(after.tensors["input_amax_history"][0]) != float(np.abs(x).max()):
        failures.append(("shard_map", "input amax"))
    wanted = max(abs(float(row.sum(dtype=np.float32))) for row in x)
    if not np.isclose(float(after.tensors["output_grad_amax_history"][0]), wanted, rtol=1e-5):
        failures.append(("shard_map", "output gradient's amax"))


def check_global_state(failures):
    """Under jit with a sharded batch the amax is that of the whole batch."""
    layer = nnx.Linear(16, 8, rngs=nnx.Rngs(0))
    state = nnx.state(layer)
    nnx.update(layer, jax.tree.map(lambda a: sharded(a, P()), state))
    pc.wrap(layer, "float8_from_float32")
    x = inputs(8, 16)
    nnx.jit(lambda layer, x: layer(x))(layer, sharded(x, P("data")))
    if float(layer.input_amax_history[0]) != float(np.abs(x).max()):
        failures.append(("jit", "input amax"))


def main():
    assert jax.device_count() == 8
    failures = []
    check_products(failures)
    if not policy_jax.register():  # the kernels are there
        check_wrapped_first(failures)
    check_channels_that_fill_no_panels(failures)
    check_explicit_mesh(failures)
    check_out_sharding(failures)
    check_explicit_training(failures)
    check_training(failures)
    check_data_parallel_state(failures)
    check_global_state(failures)
    print("\n".join(map(str, failures)))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
