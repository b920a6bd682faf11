"""JAX's transformations over products with codes: jit, grad, vmap, scan, checkpoint, export, …"""

import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import policy_core as pc
import policy_jax
import policy_numpy
from policy_core.testing import same_bits
from policy_jax import _kernels, _native

MODES = ("int8", "int8/weight_only", "float8", "float8/dynamic", "float8/weight_only")
KERNELS = pytest.mark.skipif(not _native.available(), reason="the native kernels were not built")


def inputs(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32))


def weight(mode, k=24, n=10):
    return policy_jax.quantize_array(inputs(k, n, seed=9), f"{mode}_from_float32")


@pytest.mark.parametrize("mode", MODES)
def test_vmap_is_a_loop(mode):
    """vmap over inputs gives the bits of one call over all of them, and of a loop."""
    w, x = weight(mode), inputs(6, 5, 24)
    whole = x @ w
    batched = jax.vmap(lambda x: x @ w)(x)
    twice = jax.vmap(jax.vmap(lambda x: x @ w))(x)
    close = same_bits if mode == "int8" else np.allclose
    assert close(batched, whole)
    assert close(twice, whole)
    if mode != "float8":  # per tensor: its scale belongs to the batch
        assert close(jnp.stack([row @ w for row in x]), whole)


@pytest.mark.parametrize("mode", MODES)
def test_vmap_over_weights(mode):
    """vmap over a stack of weights gives each its own product."""
    weights = [
        policy_jax.quantize_array(inputs(24, 10, seed=s), f"{mode}_from_float32") for s in (1, 2)
    ]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *weights)
    x = inputs(5, 24)
    y = jax.jit(jax.vmap(lambda w: x @ w))(stacked)
    np.testing.assert_allclose(y, jnp.stack([x @ w for w in weights]), rtol=1e-5, atol=1e-5)
    both = jax.vmap(lambda w, x: x @ w)(stacked, jnp.stack([x, 2 * x]))
    np.testing.assert_allclose(both[1], 2 * x @ weights[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_vmap_of_grad_and_grad_of_vmap(mode):
    """Gradients for each example sum to the gradient of the batch."""
    w, x = weight(mode), inputs(6, 24)
    each = jax.vmap(jax.grad(lambda x: jnp.square(x @ w).sum()))(x)
    whole = jax.grad(lambda x: jnp.square(jax.vmap(lambda x: x @ w)(x)).sum())(x)
    np.testing.assert_allclose(each, whole, rtol=0.1, atol=0.1 * float(jnp.abs(whole).max()))
    assert each.shape == x.shape


@pytest.mark.parametrize("mode", ["float8", "float8/dynamic"])
def test_weight_gradients_under_vmap(mode):
    """grad(vmap) gives one weight gradient; vmap(grad) one for each example; they agree."""
    w, x = weight(mode), inputs(6, 24)

    def loss(values, x):
        tensors = {**w.tensors, "weight": values}
        own = policy_jax.QuantizedArray(tensors, w.axes, w.shape, w.wrapping)
        return jnp.square(x @ own).sum()

    values = w.tensors["weight"]
    whole = jax.grad(lambda v: jax.vmap(loss, (None, 0))(v, x).sum())(values)
    each = jax.vmap(jax.grad(loss), (None, 0))(values, x)
    assert each.shape == (6, *values.shape)
    largest = float(jnp.abs(whole).max())
    np.testing.assert_allclose(each.sum(0), whole, atol=0.1 * largest)


@pytest.mark.parametrize("mode", MODES)
def test_scan_checkpoint_jit_and_disable_jit(mode):
    """scan, checkpoint, jit and no jit at all give the same values and gradients."""
    w = policy_jax.quantize_array(inputs(16, 16), f"{mode}_from_float32")
    x = inputs(3, 16)

    def body(x, _):
        return jnp.tanh(x @ w), None

    def loop(x):
        for _ in range(3):
            x, _ = body(x, None)
        return x

    wanted = loop(x)
    exact = same_bits if mode == "int8" else np.allclose
    assert exact(jax.jit(lambda x: jax.lax.scan(body, x, length=3)[0])(x), wanted)
    with jax.disable_jit():
        assert exact(loop(x), wanted)
    gradient = jax.grad(lambda x: loop(x).sum())(x)
    again = jax.jit(jax.grad(lambda x: jax.checkpoint(loop)(x).sum()))(x)
    np.testing.assert_allclose(again, gradient, rtol=1e-4, atol=1e-5)


def test_donated_inputs():
    """A donated input may be reused by XLA; the result is right."""
    w, x = weight("int8", 24, 24), inputs(5, 24)
    wanted = x @ w
    assert same_bits(jax.jit(lambda x: x @ w, donate_argnums=0)(x + 0), wanted)


@pytest.mark.parametrize("mode", MODES)
def test_kernels_and_xla_agree(mode):
    """The CPU kernels and XLA's dots give the same numbers, int8 to the bit."""
    values, x = inputs(65, 33), inputs(7, 65)
    policy = f"{mode}_from_float32"
    dense = policy_numpy.Dense(65, 33, bias=False)
    dense.tensors["weight"] = np.ascontiguousarray(np.asarray(values).T)
    wanted = pc.wrap(dense, policy)(np.asarray(x))
    native = x @ policy_jax.quantize_array(values, policy)
    on_several = pytest.MonkeyPatch()
    on_several.setattr(_native, "reason_against", lambda: "for this test")
    try:
        plain = policy_jax.quantize_array(values, policy)
    finally:
        on_several.undo()
    assert plain.wrapping.plan.kernel.endswith("_xla")
    assert "for this test" in plain.wrapping.plan.note
    for y in (native, x @ plain, jax.jit(lambda x: x @ plain)(x)):
        if mode == "int8":
            assert same_bits(y, wanted)
        else:
            bound = 2e-6 * (np.abs(x) @ np.abs(values) + 1) * 1.1
            assert (np.abs(y - wanted) <= bound).all()


@pytest.mark.parametrize("k", [512, 1024, 131_072, 131_073])
def test_largest_codes_sum_exactly(k):
    """Codes of ±127 all along a contraction sum to the integer, split where int32 ends."""
    x = jnp.full((2, k), 3.0).at[1].multiply(-1)
    codes = jnp.full((3, k), 127, jnp.int8)
    y = _kernels.linear_s8(x, codes, jnp.ones(3, jnp.float32), None)
    wanted = policy_numpy._kernels.reference_linear_s8(
        np.asarray(x), np.asarray(codes), np.ones(3, np.float32), None
    )
    assert same_bits(y, wanted)


@KERNELS
def test_subnormal_results_are_the_references():
    """The kernels keep subnormal numbers, which XLA's own arithmetic takes for zeros."""
    values = inputs(16, 4) * jnp.float32(1e-18)
    x = inputs(3, 16) * jnp.float32(1e-21)
    dense = policy_numpy.Dense(16, 4, bias=False)
    dense.tensors["weight"] = np.ascontiguousarray(np.asarray(values).T)
    wanted = pc.wrap(dense, "int8_from_float32")(np.asarray(x))
    w = policy_jax.quantize_array(values, "int8_from_float32")
    assert (np.abs(wanted) < 1.2e-38).any()
    assert same_bits(np.asarray(x @ w), wanted)


@KERNELS
@pytest.mark.parametrize("mode", MODES)
def test_program_names_the_kernel(mode):
    """What the report names is what the compiled program calls."""
    w, x = weight(mode), inputs(5, 24)
    assert not w.wrapping.plan.kernel.endswith("_xla")
    assert _native.TARGET in jax.jit(lambda x: x @ w).lower(x).as_text()


@KERNELS
def test_many_threads_at_once():
    """Calls from several threads give the same bits."""
    w, x = weight("int8", 256, 64), inputs(64, 256)
    call = jax.jit(lambda x: x @ w)
    wanted, wrong = call(x), []

    def work():
        wrong.extend(i for i in range(20) if not same_bits(call(x), wanted))

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_exported_programs_run_in_another_process(tmp_path):
    """Products and gradients that are exported here give the same bits in another process."""
    x = inputs(5, 24)
    wanted = {}
    for mode in MODES:
        w = weight(mode)
        function = jax.jit(jax.value_and_grad(lambda x, w=w: jnp.square(x @ w).sum()))
        exported = jax.export.export(function, disabled_checks=policy_jax.export_checks())(x)
        name = mode.replace("/", "-")
        (tmp_path / f"{name}.program").write_bytes(exported.serialize())
        wanted[name] = function(x)
    np.save(tmp_path / "x.npy", x)
    code = (
        "import jax, numpy as np, pathlib, policy_jax, sys\n"
        "policy_jax.register()\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "for path in folder.glob('*.program'):\n"
        "    program = jax.export.deserialize(path.read_bytes())\n"
        "    y, dx = program.call(np.load(folder / 'x.npy'))\n"
        "    np.savez(path.with_suffix('.npz'), y=y, dx=dx)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=120)
    for name, (y, dx) in wanted.items():
        found = np.load(tmp_path / f"{name}.npz")
        assert same_bits(found["y"], y)
        assert same_bits(found["dx"], dx)


def test_policy_jax_imports_jax_alone():
    """Neither flax nor equinox is imported by the backend, nor by wrapping a function."""
    code = (
        "import sys, policy_core as pc\n"
        "pc.wrap(lambda x: x, 'mixed_bfloat16'); pc.backend('jax')\n"
        "assert 'jax' in sys.modules\n"
        "found = {'flax', 'equinox', 'torch', 'tensorflow', 'optax'} & set(sys.modules)\n"
        "assert not found, found\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.parametrize("mode", ["int8", "int8/weight_only", "float8/weight_only"])
def test_codes_have_second_derivatives(mode):
    """A second derivative through a layer that keeps codes is that of its dequantized weight."""
    layer = pc.wrap(nnx.Linear(8, 4, rngs=nnx.Rngs(0)), f"{mode}_from_float32")
    weight = pc.unwrap(nnx.clone(layer)).kernel[...]
    x = jnp.ones((3, 8))
    first = jax.grad(lambda x: jnp.square(layer(x)).sum())
    second = jax.jit(jax.grad(lambda x: first(x).sum()))(x)
    np.testing.assert_allclose(
        second, 2 * jnp.ones((3, 8)) @ weight @ weight.T, rtol=1e-4, atol=1e-5
    )
