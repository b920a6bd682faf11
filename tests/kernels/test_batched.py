"""Stacks of products give what the products give one by one, under every instruction set."""

import ml_dtypes
import numpy as np
import pytest

import policy_kernels
from policy_kernels import linear_batched, pack

E4M3 = ml_dtypes.float8_e4m3fn


def operands(operation, count, m, n, k):
    generator = np.random.default_rng(count * 100 + m)
    codes = generator.integers(-127, 128, (count, n, k)).astype(np.int8)
    x = generator.standard_normal((count, m, k), np.float32)
    if "f8" in operation:
        codes = generator.integers(0, 127, (count, n, k), np.uint8).view(E4M3)
    if operation == "linear_s8_codes":
        x = generator.integers(-127, 128, (count, m, k)).astype(np.int8)
    if operation == "linear_f8":
        x = generator.integers(0, 127, (count, m, k), np.uint8).view(E4M3)
    scale = generator.uniform(0.1, 2, (count, n)).astype(np.float32)
    bias = generator.standard_normal((count, n), np.float32)
    x_scale = generator.uniform(0.1, 2, (count, m)).astype(np.float32)
    return x, [pack(c) for c in codes], scale, bias, x_scale


def one_by_one(operation, x, weights, scale, bias, x_scale):
    results = []
    for i, weight in enumerate(weights):
        added = None if bias is None else bias[i]
        if operation == "linear_s8_codes":
            y = policy_kernels.linear_s8_codes(x[i], x_scale[i], weight, scale[i], added)
        elif operation == "linear_f8":
            arguments = (x[i].view(np.uint8), x_scale[i], "float8_e4m3fn", weight, scale[i])
            y = policy_kernels.linear_f8(*arguments, "float8_e4m3fn", added)
        elif operation == "linear_f8w":
            y = policy_kernels.linear_f8w(x[i], weight, scale[i], "float8_e4m3fn", added)
        else:
            y = getattr(policy_kernels, operation)(x[i], weight, scale[i], added)
        results.append(y)
    return np.stack(results)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("size", [(1, 1, 1, 1), (3, 2, 33, 65), (9, 17, 40, 100), (4, 0, 3, 2)])
@pytest.mark.parametrize(
    "operation", ["linear_s8", "linear_s8_codes", "linear_s8w", "linear_f8", "linear_f8w"]
)
def test_stack_is_its_products(operation, size):
    """A stack has the bits of its products, with and without bias."""
    x, weights, scale, bias, x_scale = operands(operation, *size)
    given = x_scale if operation in ("linear_s8_codes", "linear_f8") else None
    for added in (bias, None):
        y = linear_batched(operation, x, weights, scale, added, x_scale=given)
        assert np.array_equal(y, one_by_one(operation, x, weights, scale, added, x_scale))


def test_dtypes_of_a_stack():
    """x, bias and result may each be float32, bfloat16 or float16."""
    x, weights, scale, bias, _ = operands("linear_s8", 2, 3, 5, 8)
    half = linear_batched(
        "linear_s8", x.astype(np.float16), weights, scale, bias.astype(ml_dtypes.bfloat16)
    )
    assert half.dtype == np.float16
    wide = linear_batched("linear_s8", x, weights, scale, bias, dtype="bfloat16")
    assert wide.dtype == ml_dtypes.bfloat16


def test_empty_stack():
    """No products give an empty result."""
    y = linear_batched("linear_s8", np.ones((0, 2, 3), np.float32), [], np.ones((0, 0), np.float32))
    assert y.shape == (0, 2, 0)


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"operation": "linear"}, ValueError, "expected operation"),
        ({"x": np.ones((2, 3))}, ValueError, "3 axes"),
        ({"x": np.ones((2, 3, 8), np.int8)}, TypeError, "a dtype that linear_s8 takes"),
        ({"x": np.ones((2, 3, 9), np.float32)}, ValueError, "one weight of k=9"),
        ({"weights": []}, ValueError, "one weight of k=8 for each of 2"),
        ({"scale": np.ones((2, 4), np.float32)}, ValueError, "expected scale"),
        ({"scale": np.ones((2, 5))}, TypeError, "expected scale"),
        ({"bias": np.ones((2, 5))}, TypeError, "expected bias"),
        ({"x_scale": np.ones((2, 3), np.float32)}, TypeError, "takes no x_scale"),
        ({"dtype": "int8"}, ValueError, "expected dtype"),
    ],
)
def test_bad_arguments_are_refused(change, error, said):
    """Each wrong argument is named with what was expected."""
    x, weights, scale, bias, _ = operands("linear_s8", 2, 3, 5, 8)
    good = {"operation": "linear_s8", "x": x, "weights": weights, "scale": scale, "bias": bias}
    linear_batched(**good)
    with pytest.raises(error, match=said):
        linear_batched(**{**good, **change})


def test_weights_of_two_kinds_are_refused():
    """All weights of a stack have one dtype and size."""
    x, weights, scale, _, _ = operands("linear_s8", 2, 3, 5, 8)
    other = pack(np.ones((4, 8), np.int8))
    with pytest.raises(ValueError, match="one dtype and size"):
        linear_batched("linear_s8", x, [weights[0], other], scale)
    float8 = pack(np.ones((5, 8), E4M3))
    with pytest.raises(TypeError, match="int8 codes"):
        linear_batched("linear_s8", x, [float8, float8], scale)


def test_native_steps_are_checked(native):
    """Results that would overlap, negative steps and unknown operations are refused."""
    import ctypes

    from policy_kernels._batched import _Steps

    x, weights, scale, _, _ = operands("linear_s8", 2, 3, 5, 8)
    y = np.full((2, 3, 5), 7, np.float32)
    pointers = (ctypes.c_void_p * 2)(*(weight._pointer for weight in weights))

    def call(operation, count, steps):
        data = (x.ctypes.data, 8, None, 1, 2, ctypes.addressof(pointers), scale.ctypes.data, 1)
        return native.pk_linear_batched(
            None, operation, count, steps, 3, 5, 8, 0, *data, 0, None, 0, y.ctypes.data, 5
        )

    good = _Steps(24, 0, 5, 0, 15)
    assert call(0, 2, ctypes.addressof(good)) == 0
    y[:] = 7
    bad = [_Steps(24, 0, 5, 0, 14), _Steps(-1, 0, 5, 0, 15), _Steps(2**62, 0, 5, 0, 15)]
    for steps in bad:
        assert call(0, 2, ctypes.addressof(steps)) == 1
    assert call(0, 2, None) == 1
    assert call(5, 2, ctypes.addressof(good)) == 1
    assert call(0, -1, ctypes.addressof(good)) == 1
    assert (y == 7).all()
