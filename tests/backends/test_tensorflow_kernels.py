"""Products with codes: the reference's bits in every mode of TensorFlow, and their gradients."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

import policy_numpy
from policy_core.testing import same_bits
from policy_tensorflow import _kernels, _native, _plain
from policy_tensorflow._ops import TF_DTYPES

SHAPES = [(0, 8, 4), (1, 1, 1), (2, 15, 7), (16, 63, 33), (17, 65, 31), (33, 64, 1), (5, 2048, 70)]
CODES = {
    "linear_s8": "int8",
    "linear_s8w": "int8",
    "linear_f8": "float8_e4m3fn",
    "linear_f8w": "float8_e4m3fn",
}
MODES = ("eager", "function", "unknown", "jit", "plain", "plain function", "xla")


class Product:
    """One product with random operands, by TensorFlow and by the reference."""

    def __init__(self, operation: str, m: int, k: int, n: int, bias: Any = np.float32) -> None:
        generator = np.random.default_rng(m * 10_000 + k * 100 + n)
        self.operation, self.dtype = operation, CODES[operation]
        self.x = generator.standard_normal((m, k), np.float32)
        weight = generator.standard_normal((n, k), np.float32)
        self.codes, scale = policy_numpy.quantize(weight, self.dtype, (1,))
        self.scale = scale[:, 0]
        self.bias = None if bias is None else generator.standard_normal(n).astype(bias)
        bits = tf.constant(self.codes.view(np.uint8))
        self.weight = _native.pack(bits, self.dtype) if _native.available() else bits

    def call(self, x: Any, kernel: Any = None, dtype: str = "float32") -> Any:
        return _kernels.linear(
            self.operation,
            x,
            self.weight,
            tf.constant(self.scale),
            None if self.bias is None else tf.constant(self.bias),
            codes=self.dtype,
            dtype=TF_DTYPES[dtype],
            kernel=kernel,
        )

    def in_mode(self, mode: str, dtype: str = "float32", x_dtype: Any = tf.float32) -> Any:
        kernel = {"xla": "xla"}.get(mode, "tensorflow" if "plain" in mode else None)
        if mode in ("eager", "plain", "xla"):
            return lambda x: self.call(x, kernel, dtype)
        spec = {"unknown": None}.get(mode, [None, self.x.shape[1]])
        return tf.function(
            lambda x: self.call(x, kernel, dtype),
            jit_compile=mode == "jit" or None,
            input_signature=[tf.TensorSpec(spec, x_dtype)],
        )

    def wanted(self, dtype: str = "float32") -> Any:
        kernels = policy_numpy._kernels
        given = (self.codes, self.scale, self.bias, dtype)
        if self.operation == "linear_f8":
            codes, scale = policy_numpy.quantize(self.x, self.dtype, (1,))
            return kernels.linear_f8(codes, scale[:, 0], *given)
        return getattr(kernels, self.operation)(self.x, *given)

    @property
    def weights(self) -> Any:
        return self.codes.astype(np.float32) * self.scale[:, None]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "bias", [np.float32, ml_dtypes.bfloat16, None], ids=["float32", "bfloat16", "none"]
)
def test_int8_has_the_references_bits(mode, bias):
    """int8 products are equal to the bit to numpy's: native or not, traced, compiled, any size."""
    for shape in SHAPES:
        product = Product("linear_s8", *shape, bias=bias)
        assert same_bits(product.in_mode(mode)(tf.constant(product.x)), product.wanted()), shape


@pytest.mark.parametrize("mode", ["eager", "jit", "plain"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_int8_results_of_16_bits_have_the_references_bits(mode, dtype):
    """Inputs and results of 16 bits too, rounded once at the end."""
    product = Product("linear_s8", 5, 70, 33)
    product.x = product.x.astype(getattr(ml_dtypes, dtype, dtype))
    y = product.in_mode(mode, dtype, TF_DTYPES[dtype])(tf.constant(product.x))
    assert same_bits(y, product.wanted(dtype))


@pytest.mark.parametrize("mode", ["eager", "jit", "plain"])
def test_longest_int8_sums(mode):
    """Codes of 127 throughout, one more than fit one int32 sum, are summed as the reference does."""
    product = Product("linear_s8", 2, 131_073, 3)
    product.x = np.full_like(product.x, -3)
    product.codes[:] = 127
    bits = tf.constant(product.codes.view(np.uint8))
    product.weight = _native.pack(bits, "int8") if _native.available() else bits
    assert same_bits(product.in_mode(mode)(tf.constant(product.x)), product.wanted())


@pytest.mark.parametrize("mode", ["eager", "function", "jit", "plain"])
@pytest.mark.parametrize("operation", ["linear_s8w", "linear_f8", "linear_f8w"])
def test_other_products_are_within_their_bound(operation, mode):
    """float8 and weight-only products are within 1e-6 of the exact sum, as the reference's are."""
    for m, k, n in SHAPES:
        product = Product(operation, m, k, n)
        y = product.in_mode(mode)(tf.constant(product.x)).numpy()
        bound = 2.2e-6 * (np.abs(product.x) @ np.abs(product.weights).T + np.abs(product.bias) + 1)
        assert (np.abs(y - product.wanted()) <= bound).all(), (m, k, n)


@pytest.mark.parametrize("mode", ["eager", "function", "jit", "plain"])
def test_special_values(mode):
    """A row with a NaN or an infinity gives NaN alone; zeros and the tiniest rows stay finite."""
    product = Product("linear_s8", 6, 8, 5, bias=None)
    product.x[1, 2], product.x[2, 3] = np.nan, np.inf
    product.x[3], product.x[4] = 0, 1e-40
    y = product.in_mode(mode)(tf.constant(product.x))
    assert same_bits(y, product.wanted())
    assert np.isnan(y[1:3]).all()
    assert not np.any(y[3])


@pytest.mark.parametrize("shape", [(8,), (1, 8), (2, 3, 8), (2, 0, 8), (1, 1, 1, 8)])
@pytest.mark.parametrize("mode", ["eager", "unknown", "plain"])
def test_leading_axes_are_kept(shape, mode):
    """Inputs of any rank give results of that rank."""
    product = Product("linear_s8", 1, 8, 5)
    assert product.in_mode(mode)(tf.ones(shape)).shape == (*shape[:-1], 5)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("operation", CODES)
def test_gradients_go_straight_through(operation, mode):
    """The input gets dy @ W, the bias the sum of dy, in every mode of TensorFlow."""
    product = Product(operation, 6, 15, 7)
    product.bias = tf.Variable(product.bias)
    cotangent = tf.random.stateless_normal((2, 3, 7), (1, 2))

    def gradient(x: Any) -> Any:
        kernel = {"xla": "xla"}.get(mode, "tensorflow" if "plain" in mode else None)
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = _kernels.linear(
                operation,
                x,
                product.weight,
                tf.constant(product.scale),
                product.bias,
                codes=product.dtype,
                dtype=tf.float32,
                kernel=kernel,
            )
        return tape.gradient(y, [x, product.bias], cotangent)

    if mode not in ("eager", "plain", "xla"):
        spec = tf.TensorSpec(None if mode == "unknown" else [None, None, 15])
        gradient = tf.function(gradient, input_signature=[spec], jit_compile=mode == "jit" or None)
    dx, dbias = gradient(tf.constant(product.x.reshape(2, 3, 15)))
    np.testing.assert_allclose(dx, cotangent.numpy() @ product.weights, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(dbias, cotangent.numpy().sum((0, 1)), rtol=1e-5, atol=1e-6)


def test_codes_and_scales_have_no_gradient():
    """Their gradient is None, and a second derivative through the product exists."""
    product = Product("linear_s8", 3, 8, 5)
    x, scale = tf.constant(product.x), tf.constant(product.scale)
    with tf.GradientTape(persistent=True) as outer:
        outer.watch([x, scale])
        with tf.GradientTape() as inner:
            inner.watch(x)
            y = _kernels.linear(
                "linear_s8", x, product.weight, scale, codes="int8", dtype=tf.float32
            )
            loss = tf.reduce_sum(y**2)
        first = inner.gradient(loss, x)
    assert outer.gradient(y, scale) is None
    # d/dx of 2 y W is 2 W W^T, straight through the rounding.
    second = outer.gradient(first, x, tf.ones_like(first))
    wanted = 2 * np.ones_like(product.x) @ product.weights.T @ product.weights
    np.testing.assert_allclose(second, wanted, rtol=1e-4)


@pytest.mark.parametrize("operation", CODES)
def test_vectorized_map_gives_the_same(operation):
    """`tf.vectorized_map` over rows, and over weights, gives what a batch gives; so do gradients."""
    product = Product(operation, 6, 15, 7)
    x = tf.constant(product.x)
    y = product.call(x)
    # TensorFlow vectorizes no look at the bits of floats; then it loops.
    loop = not _native.available() and operation == "linear_f8"
    rows = tf.vectorized_map(product.call, x, fallback_to_while_loop=loop)
    # Float sums depend on how many rows are multiplied at once.
    tolerance = 0 if operation == "linear_s8" else 1e-5
    np.testing.assert_allclose(rows, y, rtol=tolerance, atol=tolerance)
    weights = tf.stack([product.weight] * 6)

    def with_weight(given: Any) -> Any:
        one = Product(operation, 6, 15, 7)
        one.weight = given[1]
        return one.call(given[0], kernel="native" if _native.available() else None)

    each = tf.vectorized_map(with_weight, (x, weights))
    np.testing.assert_allclose(each, y, rtol=tolerance, atol=tolerance)
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = product.call(x)[0]
    jacobian = tape.jacobian(y, x)
    np.testing.assert_allclose(jacobian[:, 0], product.weights, rtol=1e-6)


@pytest.mark.parametrize("kernel", ["native", "tensorflow"])
@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_rows_of_a_table(dtype, kernel):
    """Rows of a packed table are codes times scales, to the bit, for ids of any shape."""
    if kernel == "native" and not _native.available():
        pytest.skip("the kernels were not built")
    table = np.random.default_rng(3).standard_normal((40, 70), np.float32)
    codes, scale = policy_numpy.quantize(table, dtype, (1,))
    bits = tf.constant(codes.view(np.uint8))
    ids = np.array([[0, 39, 7], [7, 7, 1]], np.int32)
    wanted = codes[ids].astype(np.float32) * scale[ids]
    for weight in [bits, _native.pack(bits, dtype)] if _native.available() else [bits]:
        y = _kernels.rows(
            ids,
            weight,
            tf.constant(scale[:, 0]),
            shape=codes.shape,
            codes=dtype,
            dtype=tf.float32,
            kernel=kernel,
        )
        assert same_bits(y, wanted)


def test_what_runs_has_its_name():
    """A graph shows which product runs: the operator of the kernels, or a scope of XLA's dot."""
    product = Product("linear_s8", 2, 8, 4)

    def names(**kind: Any) -> str:
        function = tf.function(lambda x: product.call(x), **kind)
        graph = function.get_concrete_function(tf.TensorSpec([2, 8])).graph
        return " ".join(f"{op.type} {op.name}" for op in graph.get_operations())

    assert ("ImportPolicyCore>LinearV" in names()) is _native.available()
    assert "linear_s8_xla/" in names(jit_compile=True)
    assert "LinearV" not in names(jit_compile=True)
    rows = {name: kernel for name, kernel, _ in _kernels.kernel_table("gpu")}
    assert rows["linear_s8"] == "linear_s8_xla"


def test_plain_encoding_is_the_references_in_graphs():
    """Scales and codes have the reference's bits where Grappler and XLA rewrite arithmetic."""
    x = np.random.default_rng(5).standard_normal((7, 300)).astype(np.float32) * 1e3
    x[0], x[1, 5] = 1e-39, 1e-40
    for dtype in ("float8_e4m3fn", "float8_e5m2"):
        scale = np.float32(np.abs(x).max() / np.float32(3.3))
        wanted = policy_numpy.encode(x, scale, dtype).astype(np.float32)
        for compiled in (None, True):
            encode = tf.function(
                lambda x, s, dtype=dtype: tf.cast(_plain.encode(x, s, dtype), tf.float32),
                jit_compile=compiled,
            )
            np.testing.assert_array_equal(encode(x, scale), wanted)
