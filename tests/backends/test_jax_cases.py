"""JAX's side of faults that people reported elsewhere, and its equality with torch."""

import subprocess
import sys
import weakref

import equinox as eqx
import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from safetensors.torch import load_file

import policy_core as pc
import policy_jax
import policy_numpy
from policy_core.testing import same_bits
from policy_jax import _native, _sites

MODES = ("int8", "int8/weight_only", "float8", "float8/dynamic", "float8/weight_only")


def inputs(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def bits(x):
    """Any framework's tensor as bytes."""
    if isinstance(x, torch.Tensor):
        return x.detach().contiguous().view(torch.uint8).numpy()
    return np.ascontiguousarray(np.asarray(x)).view(np.uint8)


def torch_layer(k, n, policy):
    layer = torch.nn.Linear(k, n)
    with torch.no_grad():
        layer.weight.copy_(torch.from_numpy(inputs(n, k)))
        layer.bias.copy_(torch.from_numpy(inputs(n, seed=1)))
    return pc.wrap(layer, policy).eval()


def jax_layer(k, n, policy):
    layer = nnx.Linear(k, n, rngs=nnx.Rngs(0))
    layer.kernel.set_value(jnp.asarray(inputs(n, k).T))
    layer.bias.set_value(jnp.asarray(inputs(n, seed=1)))
    pc.wrap(layer, policy).eval()
    return layer


@pytest.mark.parametrize("source", ["float32", "mixed_bfloat16"])
@pytest.mark.parametrize(("m", "k", "n"), [(1, 64, 32), (17, 65, 33), (128, 300, 100)])
def test_int8_is_torchs_to_the_bit(m, k, n, source):
    """JAX and torch give the same bits for one int8 layer, jitted or not."""
    policy = f"int8_from_{source}"
    x = inputs(m, k, seed=2)
    with torch.no_grad():
        wanted = bits(torch_layer(k, n, policy)(torch.from_numpy(x)))
    layer = jax_layer(k, n, policy)
    np.testing.assert_array_equal(bits(layer(jnp.asarray(x))), wanted)
    np.testing.assert_array_equal(bits(nnx.jit(lambda m, x: m(x))(layer, jnp.asarray(x))), wanted)


@pytest.mark.parametrize("mode", ["int8", "int8/weight_only", "float8/weight_only"])
def test_files_hold_the_codes_and_scales_that_torch_stores(mode, tmp_path):
    """The same float layer becomes the same codes and scales, byte for byte, in both."""
    for name, make in (("jax", jax_layer), ("torch", torch_layer)):
        pc.save(make(70, 33, f"{mode}_from_float32"), tmp_path / name)
    ours, theirs = load_file(tmp_path / "jax"), load_file(tmp_path / "torch")
    assert set(ours) == set(theirs) == {"weight", "weight_scale", "bias"}
    for name in ours:
        np.testing.assert_array_equal(bits(ours[name]), bits(theirs[name]))


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("axes", [(1,), (0, 1)])
def test_quantizers_are_torchs_to_the_bit(dtype, axes):
    """Codes and scales are torch's for every code dtype, per row and per tensor."""
    x = inputs(37, 65) * np.float32(10) ** np.arange(-18, 19, dtype=np.float32)[:, None]
    ours = pc.backend("jax").quantize(jnp.asarray(x), dtype, axes)
    theirs = pc.backend("torch").quantize(torch.from_numpy(x), dtype, axes)
    for own, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(bits(own), bits(other))


FORK = """
import os, sys, warnings
warnings.simplefilter("ignore")  # of JAX, about the fork
import jax, jax.numpy as jnp, numpy as np
import policy_core as pc, policy_jax, policy_numpy
values = np.random.default_rng(0).standard_normal((1024, 512), np.float32)
w = policy_jax.quantize_array(values, "int8_from_float32")
x = np.random.default_rng(1).standard_normal((256, 1024), np.float32)
given = jnp.asarray(x)
call = jax.jit(lambda x: x @ w)
wanted = np.asarray(call(given))
child = os.fork()
if child == 0:
    dense = policy_numpy.Dense(1024, 512, bias=False)
    dense.tensors["weight"] = np.ascontiguousarray(values.T)
    again = np.asarray(call(given)), pc.wrap(dense, "int8_from_float32")(x)
    os._exit(0 if all(np.array_equal(y, wanted) for y in again) else 3)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(not _native.available(), reason="the native kernels were not built")
def test_a_fork_after_use_computes():
    """A forked child, which has none of XLA's threads, runs a compiled product and the kernels."""
    done = subprocess.run([sys.executable, "-c", FORK], timeout=120, check=False)
    assert done.returncode == 0


def test_wrapping_many_layers_needs_the_memory_of_one_more(monkeypatch):
    """Over 20 layers live bytes never exceed the start by a layer, and end below 0.3 of it."""
    k = 256
    model = nnx.Sequential(*[nnx.Linear(k, k, rngs=nnx.Rngs(i)) for i in range(20)])
    floats = [weakref.ref(layer.kernel.get_raw_value()) for layer in model.layers]

    def live():
        arrays = {a.unsafe_buffer_pointer(): a.nbytes for a in jax.live_arrays()}
        return sum(arrays.values())

    others = live() - 20 * (k * k + k) * 4
    start, seen = live(), []
    made = _sites.made

    def watched(*args):
        result = made(*args)
        seen.append(live())
        return result

    monkeypatch.setattr(_sites, "made", watched)
    pc.wrap(model, "int8_from_float32")
    assert len(seen) == 20
    assert max(seen) <= start + k * k * 4
    assert all(kept() is None for kept in floats)
    assert live() - others <= 0.3 * (start - others)
    assert live() < seen[0]


@pytest.mark.parametrize("policy", ["int8_from_mixed_bfloat16", "float8_from_float32"])
def test_disable_jit_gives_the_jitted_values(policy):
    """Without jit a model gives the values of the jitted one, int8 the bits."""
    layer, x = jax_layer(24, 40, policy), jnp.asarray(inputs(5, 24, seed=2))
    wanted = nnx.jit(lambda m, x: m(x))(layer, x)
    with jax.disable_jit():
        plain = layer(x)
    assert same_bits(plain, wanted) if "int8" in policy else np.allclose(plain, wanted, rtol=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_a_donated_model_comes_back(mode):
    """A state that is donated and returned, packed codes too, computes as before."""
    layer, x = jax_layer(64, 96, f"{mode}_from_float32"), jnp.asarray(inputs(5, 64, seed=2))
    wanted = layer(x)
    graph, state = nnx.split(layer)
    state = jax.tree.map(jnp.copy, state)

    def step(state, x):
        return nnx.merge(graph, state)(x), state

    call = jax.jit(step, donate_argnums=0)
    for _ in range(3):
        y, state = call(state, x)
        np.testing.assert_allclose(y, wanted, rtol=1e-6, atol=1e-6)


def test_forward_mode_is_jaxs_own_error():
    """jvp of a product on codes, whose rounding has no derivative, is refused by JAX itself."""
    w = policy_jax.quantize_array(inputs(8, 4), "int8_from_float32")
    x = jnp.asarray(inputs(2, 8))
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda x: x @ w, (x,), (x,))


def test_an_integer_policy_inside_a_mixed_model_casts_nothing():
    """A layer under int32 is left to its own dtypes, and the others compute in bfloat16."""

    class Model(nnx.Module):
        def __init__(self):
            self.counts = nnx.Dropout(0.0)
            self.dense = nnx.Linear(8, 4, rngs=nnx.Rngs(0))

        def __call__(self, x, ids):
            return self.dense(x), self.counts(ids), self.counts(x)

    model = pc.wrap(Model(), {"counts": "int32", "dense": "mixed_bfloat16"})
    y, ids, same = model(jnp.ones((2, 8)), jnp.arange(3))
    assert (y.dtype, ids.dtype, same.dtype) == (jnp.bfloat16, jnp.int32, jnp.float32)


@pytest.mark.parametrize("kind", ["nnx", "linen", "equinox"])
def test_mixed_models_compute_in_the_compute_dtype(kind):
    """The product runs on bfloat16 operands, and parameters stay float32."""
    x = jnp.ones((2, 8))
    if kind == "linen":
        dense = linen.Dense(4)
        module, variables = pc.wrap((dense, dense.init(jax.random.key(0), x)), "mixed_bfloat16")
        call, arrays = (lambda x: module.apply(variables, x)), variables
    elif kind == "equinox":
        layer = pc.wrap(eqx.nn.Linear(8, 4, key=jax.random.key(0)), "mixed_bfloat16")
        call, arrays = jax.vmap(layer), eqx.filter(layer, eqx.is_array)
    else:
        layer = pc.wrap(nnx.Linear(8, 4, rngs=nnx.Rngs(0)), "mixed_bfloat16")
        call, arrays = layer, nnx.state(layer)
    program = str(jax.make_jaxpr(call)(x))
    (line,) = [line for line in program.splitlines() if "dot_general" in line]
    assert call(x).dtype == jnp.bfloat16
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(arrays))
    text = jax.jit(call).lower(x).as_text()
    (product,) = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    assert product.count("bf16>") >= 2, (line, product)


def test_embedding_and_linear_are_both_in_the_compute_dtype():
    """Under mixed_bfloat16 a sum of an embedding and a linear layer is bfloat16."""
    embed = pc.wrap(nnx.Embed(10, 4, rngs=nnx.Rngs(0)), "mixed_bfloat16")
    dense = pc.wrap(nnx.Linear(8, 4, rngs=nnx.Rngs(0)), "mixed_bfloat16")
    y = embed(jnp.arange(2)) + dense(jnp.ones((2, 8)))
    assert y.dtype == jnp.bfloat16


def test_a_default_float8_policy_says_what_it_does():
    """Under a default of float8 linear layers quantize, the others follow the source policy."""

    class Model(nnx.Module):
        def __init__(self):
            self.norm = nnx.LayerNorm(8, rngs=nnx.Rngs(0))
            self.drop = nnx.Dropout(0.1, rngs=nnx.Rngs(0))
            self.dense = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
            self.out = nnx.Linear(8, 4, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return self.out(self.drop(self.dense(self.norm(x))))

    with pc.policy_scope("float8_from_mixed_bfloat16"):
        model = pc.wrap(Model())
    rows = {row.path: row for row in pc.report(model).rows}
    assert {path for path, row in rows.items() if row.quantized} == {"dense", "out"}
    for path, row in rows.items():
        wanted = "float8_from_mixed_bfloat16" if row.quantized else "mixed_bfloat16"
        assert (row.policy, getattr(model, path).dtype_policy.name) == (wanted, wanted)
    assert model(jnp.ones((3, 8))).dtype == jnp.bfloat16


@pytest.mark.parametrize("shape", [(2, 2048), (1, 5, 2048), (2, 3, 4)])
def test_rows_of_different_sizes_are_each_precise(shape):
    """Rows with amax 1 and 1000 side by side are each within 1 % of the float product."""
    k = shape[-1]
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, shape).astype(np.float32)
    x.reshape(-1, k)[1::2] *= 1000
    w = rng.uniform(-1, 1, (k, 16)).astype(np.float32)
    y = np.asarray(jnp.asarray(x) @ policy_jax.quantize_array(w, "int8_from_float32"))
    for own, row in zip(y.reshape(-1, 16), x.reshape(-1, k), strict=True):
        error = np.linalg.norm(own - row @ w) / np.linalg.norm(row @ w)
        assert error < 0.01


@pytest.mark.parametrize("k", [1, 15, 63, 64, 65])
@pytest.mark.parametrize("n", [1, 7, 31, 33])
def test_sizes_that_nothing_divides_are_the_references(k, n):
    """Every number of rows from none to 33 gives the reference's int8 bits."""
    values = inputs(k, n)
    dense = policy_numpy.Dense(k, n, bias=False)
    dense.tensors["weight"] = np.ascontiguousarray(values.T)
    reference = pc.wrap(dense, "int8_from_float32")
    w = policy_jax.quantize_array(values, "int8_from_float32")
    for m in (0, 1, 2, 8, 15, 16, 17, 33):
        x = inputs(m, k, seed=m)
        assert same_bits(np.asarray(jnp.asarray(x) @ w), reference(x))


@pytest.mark.parametrize("mode", ["float8", "float8/dynamic"])
@pytest.mark.parametrize(("k", "n"), [(33, 17), (32, 15)])
@pytest.mark.parametrize("m", [1, 2, 5])
def test_float8_trains_at_odd_sizes(m, k, n, mode):
    """Forward and backward work where no hardware's tile divides, with gradients of the shapes."""
    layer = pc.wrap(nnx.Linear(k, n, rngs=nnx.Rngs(0)), f"{mode}_from_float32")
    x = jnp.asarray(inputs(m, k))
    gradients = nnx.grad(lambda layer: jnp.square(layer(x)).sum())(layer)
    assert gradients["kernel"].shape == (k, n)
    assert gradients["bias"].shape == (n,)
    assert bool(jnp.isfinite(gradients["kernel"].get_value()).all())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bias", [None, "float32", "bfloat16"])
def test_biases_of_any_dtype_and_large_inputs(bias, mode):
    """A bias or none, in either dtype, and a bfloat16 input of 1e5 give finite, close results."""
    k, n = 32, 8
    layer = nnx.Linear(
        k, n, use_bias=bias is not None, param_dtype=jnp.dtype(bias or "float32"), rngs=nnx.Rngs(0)
    )
    x = jnp.asarray(inputs(3, k)).at[0, 0].set(1e5).astype(jnp.bfloat16)
    wanted = np.asarray(layer(x.astype(jnp.float32)), np.float32)
    pc.wrap(layer, f"{mode}_from_mixed_bfloat16").eval()
    y = np.asarray(layer(x), np.float32)
    assert np.isfinite(y).all()
    np.testing.assert_allclose(y[0], wanted[0], rtol=0.1, atol=0.1 * np.abs(wanted[0]).max())


def test_tied_head_goes_through_a_file(tmp_path):
    """A head that is the embedding's table is stored once, also after a file."""

    class Model(nnx.Module):
        def __init__(self):
            self.embed = nnx.Embed(40, 8, rngs=nnx.Rngs(0))
            self.dense = nnx.Linear(8, 8, rngs=nnx.Rngs(1))

        def __call__(self, ids):
            return self.embed.attend(self.dense(self.embed(ids)))

    model = pc.wrap(Model(), "int8_from_float32")
    ids = jnp.arange(5)
    pc.save(model, tmp_path / "m.safetensors")
    again = pc.load(Model(), tmp_path / "m.safetensors")
    assert same_bits(again(ids), model(ids))
    assert pc.report(again).bytes_after == pc.report(model).bytes_after


@pytest.mark.parametrize("dtype", ["uint8", "int8", "bool", "float8_e4m3fn"])
@pytest.mark.parametrize("mode", MODES)
def test_inputs_of_eight_bits_count_by_their_values(mode, dtype):
    """A quantized layer takes small integers and float8 values for numbers, not for codes."""
    layer = jax_layer(16, 4, f"{mode}_from_float32")
    x = jnp.asarray(np.arange(32).reshape(2, 16) % 7, dtype)
    assert same_bits(np.asarray(layer(x)), np.asarray(layer(x.astype(jnp.float32))))


@pytest.mark.parametrize("mode", MODES)
def test_complex_inputs_of_codes_are_refused(mode):
    """A product on codes refuses complex inputs: it would lose their imaginary part."""
    layer = jax_layer(16, 4, f"{mode}_from_float32")
    with pytest.raises(TypeError, match="Expected real inputs"):
        layer(jnp.ones((2, 16)) * 1j)


@pytest.mark.parametrize("dtype", ["int32", "complex64"])
@pytest.mark.parametrize("kind", ["nnx", "linen", "equinox"])
def test_what_is_not_cast_is_not_cut_off(kind, dtype):
    """Integers and complex inputs of a layer under `mixed_bfloat16` give no integers and keep both parts."""
    x = jnp.asarray(np.arange(8) + (0 if dtype == "int32" else 2j), dtype)
    if kind == "nnx":
        plain = nnx.Linear(8, 3, rngs=nnx.Rngs(0))
        wanted = plain(x)
        y = pc.wrap(plain, "mixed_bfloat16")(x)
    elif kind == "linen":
        pair = (linen.Dense(3), linen.Dense(3).init(jax.random.key(0), jnp.ones((1, 8))))
        wanted = pair[0].apply(pair[1], x)
        module, variables = pc.wrap(pair, "mixed_bfloat16")
        y = module.apply(variables, x)
    else:
        plain = eqx.nn.Linear(8, 3, key=jax.random.key(0))
        wanted = plain(x)
        y = pc.wrap(plain, "mixed_bfloat16")(x)
    np.testing.assert_allclose(
        np.asarray(y, wanted.dtype), np.asarray(wanted), atol=0.02 * float(abs(wanted).max())
    )


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "int8_from_float32"])
def test_layers_take_their_input_by_its_name(policy):
    """A wrapped flax layer is called by keyword as the plain one is."""
    x = jnp.ones((2, 8))
    ids = jnp.ones(2, jnp.int32)
    layer = pc.wrap(nnx.Linear(8, 3, rngs=nnx.Rngs(0)), policy)
    table = pc.wrap(nnx.Embed(8, 3, rngs=nnx.Rngs(0)), policy)
    dense = linen.Dense(3)
    module, variables = pc.wrap((dense, dense.init(jax.random.key(0), x)), policy)
    assert (layer(inputs=x) == layer(x)).all()
    assert (table(inputs=ids) == table(ids)).all()
    assert (module.apply(variables, inputs=x) == module.apply(variables, x)).all()
