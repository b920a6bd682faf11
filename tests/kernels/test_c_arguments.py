"""The C interface itself: what it refuses, and that it keeps inside its buffers."""

import ctypes
import threading

import numpy as np
import pytest

ARGUMENT, UNSUPPORTED = 1, 3
M, N, K = 3, 5, 4
HUGE = 2**62


def packed(native, n, k, code):
    """A packed weight of ones, with what is needed to find its bytes again."""
    size = ctypes.c_int64()
    assert native.pk_packed_bytes(n, k, ctypes.addressof(size)) == 0
    memory = np.zeros(size.value, np.uint8)
    codes = np.ones((n, k), np.int8)
    assert native.pk_pack(code, n, k, codes.ctypes.data, k, memory.ctypes.data) == 0
    return memory


def buffers():
    """Arrays for every argument, larger than M, N, K need."""
    return {
        "x": np.ones((M, K), np.float32),
        "x8": np.ones((M, K), np.int8),
        "plain": np.ones((N, K), np.int8),
        "room": np.zeros(4096, np.uint8),
        "rows": np.ones(M, np.float32),
        "channels": np.ones(N, np.float32),
        "codes": np.full((N, K), 77, np.int8),
        "y": np.full((M, N), 77, np.float32),
    }


# Each function's arguments in order: a name with a value, or with the buffer it points to.
ON = ("executor", None)
SIZES = [ON, ("m", M), ("n", N), ("k", K)]
X = [("x", "x"), ("ldx", K)]
FLOATS = [("x_dtype", 0), *X]
X8 = [("x", "x8"), ("ldx", K)]
SCALED_W = [("w", "packed"), ("w_scale", "channels")]
OUT = [("bias_dtype", 0), ("bias", "channels"), ("y_dtype", 0), ("y", "y"), ("ldy", N)]
ROWS = [("m", M), ("k", K), *X, ("codes", "codes"), ("ldq", K), ("scale", "rows")]
S8 = [*SIZES, *FLOATS, *SCALED_W, *OUT]
SCALED_X8 = [*X8, ("x_scale", "rows")]
F8_W = [("w_format", 1), *SCALED_W, ("w_scale_stride", 1)]
PACK = [("code", 2), ("n", N), ("k", K)]
FUNCTIONS = {
    "pk_quantize_rows_s8": ROWS,
    "pk_encode_f8": [("format", 0), ("n", K), ("x", "x"), ("scale", 1.0), ("codes", "codes")],
    "pk_encode_rows_f8": [
        ("executor", None),
        ("format", 0),
        ("m", M),
        ("k", K),
        *X,
        ("scale", "rows"),
        ("scale_stride", 1),
        ("codes", "codes"),
        ("ldq", K),
    ],
    "pk_quantize_rows_f8": [("format", 0), *ROWS],
    "pk_decode_f8": [("format", 0), ("n", K), ("codes", "x8"), ("y", "y")],
    "pk_pack": [*PACK, ("w", "plain"), ("ldw", K), ("packed", "room")],
    "pk_unpack": [*PACK, ("packed", "packed"), ("w", "codes"), ("ldw", K)],
    "pk_pack_on": [ON, *PACK, ("w", "plain"), ("ldw", K), ("packed", "room")],
    "pk_unpack_on": [ON, *PACK, ("packed", "packed"), ("w", "codes"), ("ldw", K)],
    "pk_linear_s8": S8,
    "pk_linear_s8_codes": [*SIZES, *SCALED_X8, *SCALED_W, *OUT],
    "pk_linear_s8w": S8,
    "pk_linear_f8": [*SIZES, ("x_format", 0), *SCALED_X8, ("x_scale_stride", 1), *F8_W, *OUT],
    "pk_linear_f8w": [*SIZES, *FLOATS, *F8_W, *OUT],
}


def call(native, function, **changed):
    """Status, message and outputs of a valid call with some arguments changed."""
    memory = buffers()
    # A size of 0 makes another packed weight; sizes that are refused are compared with this one.
    n, k = (0 if changed.get(name) == 0 else size for name, size in (("n", N), ("k", K)))
    memory["packed"] = packed(native, n, k, 1 if "f8" in function else 2)
    arguments = []
    for name, value in FUNCTIONS[function]:
        given = changed.get(name, value)
        arguments.append(memory[given].ctypes.data if isinstance(given, str) else given)
    status = getattr(native, function)(*arguments)
    return status, native.pk_last_error().decode(), memory


def names(function, *wanted):
    return [name for name, _ in FUNCTIONS[function] if name in wanted]


def cases(*wanted):
    return [(function, name) for function in FUNCTIONS for name in names(function, *wanted)]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_unchanged_call_succeeds(native, function):
    """The probe can pass: the refusals below come from the one argument that is changed."""
    assert call(native, function)[0] == 0


def refused(native, function, said, **changed):
    status, message, memory = call(native, function, **changed)
    assert status == ARGUMENT
    assert message.startswith(f"{function}: expected ")
    assert said in message
    assert (memory["codes"] == 77).all()
    assert (memory["y"] == 77).all()


@pytest.mark.parametrize(("function", "name"), cases("m", "n", "k"))
@pytest.mark.parametrize("value", [-1, -(2**63)])
def test_negative_sizes_are_refused(native, function, name, value):
    """A negative size is an argument error that names it, and nothing is written."""
    refused(native, function, f"{name} >= 0, got {value}", **{name: value})


@pytest.mark.parametrize(("function", "name"), cases("m", "n", "k"))
def test_sizes_whose_products_overflow_are_refused(native, function, name):
    """2**62 elements are an argument error, also where a product wraps to a small number."""
    refused(native, function, str(HUGE), **{name: HUGE})


@pytest.mark.parametrize("function", [f for f in FUNCTIONS if names(f, "ldx")])
def test_products_that_wrap_to_zero_are_refused(native, function):
    """2**32 rows of 2**32 elements, whose product is 0 modulo 2**64, do not look empty."""
    refused(native, function, "fit in memory", m=2**32, k=2**32, ldx=2**32, ldw=2**32, ldq=2**32)


@pytest.mark.parametrize(("function", "name"), cases("ldx", "ldw", "ldy", "ldq"))
@pytest.mark.parametrize("value", [-1, 0, K - 1])
def test_short_strides_are_refused(native, function, name, value):
    """A row stride below the row's length is an argument error."""
    refused(native, function, f"got {value}", **{name: value})


@pytest.mark.parametrize(("function", "name"), cases("ldx", "ldw", "ldy", "ldq"))
def test_strides_whose_products_overflow_are_refused(native, function, name):
    """A matrix that spans more than the address space is an argument error."""
    refused(native, function, "fit in memory", **{name: HUGE})


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (function, name)
        for function, arguments in FUNCTIONS.items()
        for name, value in arguments
        if isinstance(value, str) and name != "bias"
    ],
)
def test_null_pointers_are_refused(native, function, name):
    """NULL for something that has elements is an argument error that names it."""
    refused(native, function, f"for {name}, got NULL", **{name: None})


@pytest.mark.parametrize(("function", "name"), cases("format", "x_format", "w_format"))
@pytest.mark.parametrize("value", [-1, 2])
def test_unknown_formats_are_refused(native, function, name, value):
    """A format that is neither of the two is an argument error."""
    refused(native, function, f"{name} to be 0 (float8_e4m3fn)", **{name: value})


@pytest.mark.parametrize(("function", "name"), cases("x_dtype", "bias_dtype", "y_dtype"))
@pytest.mark.parametrize("value", [-1, 3])
def test_unknown_dtypes_are_refused(native, function, name, value):
    """A dtype that is none of the three is an argument error."""
    refused(native, function, f"{name} to be 0 (float32)", **{name: value})


@pytest.mark.parametrize("function", ["pk_pack", "pk_unpack", "pk_pack_on", "pk_unpack_on"])
@pytest.mark.parametrize("value", [-1, 3])
def test_unknown_codes_are_refused(native, function, value):
    """Codes are of three kinds."""
    refused(native, function, "code to be 0 (float8_e4m3fn)", code=value)


PACKED = [(f, name) for f in FUNCTIONS for name, value in FUNCTIONS[f] if value == "packed"]


@pytest.mark.parametrize(("function", "name"), PACKED)
def test_bytes_that_are_no_packed_weight_are_refused(native, function, name):
    """Memory that pk_pack did not write is told from what it did."""
    refused(native, function, f"{name} to be what pk_pack wrote", **{name: "room"})


@pytest.mark.parametrize("function", [function for function, _ in PACKED])
def test_a_packed_weight_of_another_shape_is_refused(native, function):
    """n, k and the kind of codes must be those of the packed weight."""
    refused(native, function, f"got n={N}, k={K} and code", k=K - 1)


class Executor(ctypes.Structure):
    _fields_ = (
        ("threads", ctypes.c_int32),
        ("submit", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
        ("run", ctypes.c_void_p),
    )


@pytest.mark.parametrize("function", [f for f in FUNCTIONS if ON in FUNCTIONS[f]])
@pytest.mark.parametrize("threads", [-1, 0, 2])
def test_an_executor_that_cannot_run_is_refused(native, function, threads):
    """There is at least one thread, and with more a way to reach them."""
    executor = Executor(threads)
    said = (
        f"executor with threads >= 1 and, above 1, a function submit or run, got threads={threads}"
    )
    refused(native, function, said, executor=ctypes.addressof(executor))


@pytest.mark.parametrize(("function", "name"), cases("x_scale_stride", "w_scale_stride"))
@pytest.mark.parametrize("value", [-1, 2])
def test_scale_strides_other_than_0_and_1_are_refused(native, function, name, value):
    """There are scales for all or for each."""
    refused(native, function, f"{name} to be 0", **{name: value})


@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), -float("inf")])
def test_scales_that_cannot_divide_are_refused(native, value):
    """encode_f8 takes scales > 0 and finite, and NaN."""
    refused(native, "pk_encode_f8", "scale > 0 and finite", scale=value)


def pointers_to_nothing(function, size):
    """The pointers that have no elements when a size is 0."""
    if "linear" in function:
        table = {"m": ["x", "x_scale", "y"], "n": ["w", "w_scale", "bias", "y"], "k": ["x"]}
        return names(function, *table[size])
    if "pack" in function:
        return ["w"]
    if size == "k":
        return names(function, "x", "codes")
    return [name for name, value in FUNCTIONS[function] if isinstance(value, str)]


@pytest.mark.parametrize(("function", "size"), cases("m", "n", "k"))
def test_null_is_allowed_where_there_are_no_elements(native, function, size):
    """With a size of 0, the pointers to nothing may be NULL."""
    nothing = pointers_to_nothing(function, size)
    assert nothing
    assert call(native, function, **dict.fromkeys(nothing), **{size: 0})[0] == 0


@pytest.mark.parametrize("function", [f for f in FUNCTIONS if "linear" in f])
def test_no_contraction_gives_the_bias_or_zero(native, function):
    """K = 0 is a sum of nothing."""
    assert (call(native, function, k=0)[2]["y"] == 1).all()
    assert (call(native, function, k=0, bias=None)[2]["y"] == 0).all()


@pytest.mark.parametrize("function", [f for f in FUNCTIONS if "linear" in f])
@pytest.mark.parametrize(("m", "n", "k"), [(3, 5, 4), (9, 7, 13), (17, 3, 65)])
def test_gaps_between_rows_are_neither_used_nor_written(isa, native, function, m, n, k):
    """With wide strides the gaps hold poison on input and stay as they were on output."""
    poison = {np.float32: np.nan, np.int8: 0x7F, np.uint8: 0x7F}

    def padded(rows, columns, dtype):
        array = np.full((rows + 2, columns + 3), poison[dtype], dtype)
        array[1:-1, :columns] = 1
        return array

    x8_type = np.uint8 if "f8" in function else np.int8
    x = padded(m, k, np.float32 if ("x", "x") in FUNCTIONS[function] else x8_type)
    scales = np.ones(max(m, n), np.float32)
    y = np.full((m + 2, n + 2), 77, np.float32)
    memory = {"x": x[1:], "x8": x[1:], "y": y[1:], "rows": scales, "channels": scales}
    memory["packed"] = packed(native, n, k, 1 if "f8" in function else 2)
    values = {"m": m, "n": n, "k": k, "ldx": k + 3, "ldy": n + 2, "bias": None}
    arguments = []
    for name, value in FUNCTIONS[function]:
        given = values.get(name, value)
        arguments.append(memory[given].ctypes.data if isinstance(given, str) else given)
    assert getattr(native, function)(*arguments) == 0
    result = y[1:-1, :n].copy()
    assert np.isfinite(result).all()
    assert (result == result[0, 0]).all()
    assert result[0, 0] != 77
    y[1:-1, :n] = 77
    assert (y == 77).all()


def test_unknown_operations_and_isas_are_refused(native):
    """NULL and unknown names are errors that list what there is."""
    assert native.pk_kernel_name(b"linear_s9") is None
    assert "Operations: quantize_rows_s8" in native.pk_last_error().decode()
    assert native.pk_kernel_name(None) is None
    for name in (b"avx9", b"", None, b"x" * 1000):
        assert native.pk_set_isa(name) == UNSUPPORTED
        assert "Compiled: scalar" in native.pk_last_error().decode()


def test_the_message_belongs_to_the_thread(native):
    """A failure in another thread leaves this thread's message alone."""
    call(native, "pk_decode_f8", n=-5)
    before = native.pk_last_error()
    seen = []
    other = threading.Thread(target=lambda: seen.append(call(native, "pk_decode_f8", n=-6)[1]))
    other.start()
    other.join()
    assert "got -6" in seen[0]
    assert native.pk_last_error() == before


def test_memory_that_cannot_be_had_is_a_memory_error(native):
    """A row of codes larger than any machine's memory is refused before x is read."""
    x, one = ctypes.c_float(1), ctypes.c_float(1)
    k = 2**60
    memory = packed(native, 1, 1, 2)
    start = -memory.ctypes.data % 64
    memory[start + 16 : start + 24].view(np.int64)[0] = k  # the header's k
    arguments = [None, 1, 1, k, 0, ctypes.addressof(x), k, memory.ctypes.data]
    output = [ctypes.addressof(one), 0, None, 0, ctypes.addressof(one), 1]
    assert native.pk_linear_s8(*arguments, *output) == 2
    assert "could not allocate" in native.pk_last_error().decode()


def test_sizes_that_no_memory_holds_cannot_be_packed(native):
    """The size of a packed weight is checked, not wrapped."""
    size = ctypes.c_int64()
    for n, k in ((2**62, 4), (4, 2**62), (2**63 - 1, 2**63 - 1)):
        assert native.pk_packed_bytes(n, k, ctypes.addressof(size)) == ARGUMENT
        assert "fit in memory" in native.pk_last_error().decode()
