"""What accelerators are given: programs lowered for them on a machine that has none."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import policy_jax
from policy_jax import _native

PRODUCTS = {
    "int8": ("i8", "i8", "i32"),
    "float8": ("f8E4M3FN", "f8E4M3FN", "f32"),
    "float8/dynamic": ("f8E4M3FN", "f8E4M3FN", "f32"),
}


@pytest.fixture(autouse=True)
def _as_on_an_accelerator(monkeypatch):
    """Weights are wrapped as where the CPU kernels are not."""
    monkeypatch.setattr(_native, "reason_against", lambda: "for this test")


def lowered(mode, platform, gradient=False):
    """The StableHLO of a product in bfloat16, for a platform."""
    values = np.random.default_rng(0).standard_normal((64, 48), np.float32)
    w = policy_jax.quantize_array(values, f"{mode}_from_mixed_bfloat16")
    assert w.wrapping.plan.kernel.endswith("_xla")

    def loss(x, tensors):
        own = policy_jax.QuantizedArray({**w.tensors, **tensors}, w.axes, w.shape, w.wrapping)
        return jnp.square((x @ own).astype(jnp.float32)).sum()

    floats = {"weight": w.tensors["weight"]} if w.wrapping.plan.trainable else {}
    if gradient:
        given = jax.ShapeDtypeStruct((32, 64), jnp.bfloat16), floats
        return (
            jax.jit(jax.grad(loss, argnums=(0, 1)))
            .trace(*given)
            .lower(lowering_platforms=(platform,))
            .as_text()
        )
    given = jax.ShapeDtypeStruct((32, 64), jnp.bfloat16), w
    return jax.jit(lambda x, w: x @ w).trace(*given).lower(lowering_platforms=(platform,)).as_text()


def dots(text):
    """The element types of every product: left, right and result."""
    found = re.findall(r"stablehlo\.dot_general .*", text)
    return [tuple(re.findall(r"tensor<(?:\d+x)*(\w+)>", line)[-3:]) for line in found]


@pytest.mark.parametrize("platform", ["cuda", "rocm", "tpu"])
@pytest.mark.parametrize("mode", PRODUCTS)
def test_the_product_is_written_on_the_codes(mode, platform):
    """The one product multiplies codes by codes: no compiler need find a pattern to see it."""
    assert dots(lowered(mode, platform)) == [PRODUCTS[mode]]


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_gradients_are_products_of_codes(platform):
    """Under delayed scaling both gradients multiply e5m2 by e4m3 codes, as one scale serves each."""
    backward = ("f8E5M2", "f8E4M3FN", "f32")
    assert dots(lowered("float8", platform, gradient=True)) == [
        PRODUCTS["float8"],
        backward,
        backward,
    ]


@pytest.mark.parametrize("mode", ["int8", "float8/dynamic"])
def test_gradients_are_in_the_compute_dtype(mode):
    """Where scales are summed over, gradients multiply what codes stand for, in the compute dtype."""
    forward, *backward = dots(lowered(mode, "cuda", gradient=True))
    assert forward == PRODUCTS[mode]
    assert set(backward) == {("bf16", "bf16", "f32")}
    assert len(backward) == (1 if mode == "int8" else 2)


@pytest.mark.parametrize("mode", ["float8", "float8/dynamic"])
def test_float8_is_summed_in_float32_on_gpus(mode):
    """The product forbids cuBLAS to add with fewer bits."""
    assert "precision = [HIGHEST, HIGHEST]" in lowered(mode, "cuda")


def test_cpus_multiply_float8_as_float32():
    """Without kernels XLA's CPU multiplies what the codes stand for, which is exact."""
    assert dots(lowered("float8", "cpu")) == [("f32", "f32", "f32")]


@pytest.mark.parametrize("mode", ["int8/weight_only", "float8/weight_only"])
def test_weights_alone_are_multiplied_as_floats(mode):
    """Codes of the weight alone are multiplied in the compute dtype, in which they are exact."""
    text = lowered(mode, "cuda")
    assert dots(text) == [("bf16", "bf16", "f32")]
    assert "custom_call" not in text
    assert dots(lowered(mode, "cpu")) == [("f32", "f32", "f32")]


@pytest.mark.parametrize("mode", PRODUCTS)
def test_one_export_serves_several_platforms(mode):
    """An exported program for CPU and GPU runs here, and holds the product on codes too."""
    values = np.random.default_rng(0).standard_normal((64, 48), np.float32)
    w = policy_jax.quantize_array(values, f"{mode}_from_float32")
    x = np.random.default_rng(1).standard_normal((5, 64), np.float32)
    exported = jax.export.export(jax.jit(lambda x: x @ w), platforms=("cpu", "cuda"))(x)
    assert PRODUCTS[mode] in dots(exported.mlir_module())
    np.testing.assert_array_equal(exported.call(x), jax.jit(lambda x: x @ w)(x))
