"""Run by test_jax_sharding.py with 8 virtual CPU devices; prints what failed, and exits with 1."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
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
                    and name != "contraction"
                ):
                    failures.append((mode, name, batch, "an all-gather"))


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
    check_data_parallel_state(failures)
    check_global_state(failures)
    print("\n".join(map(str, failures)))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
