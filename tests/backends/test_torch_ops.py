"""torch's operators on a CPU: those in C and those in Python are one, and what they refuse."""

import threading
from itertools import product
from typing import Any

import pytest
import torch

import policy_kernels
from policy_torch import _native, _operators, _stable

OPS = torch.ops.policy_core_v1
E4, E5, S8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8
N, K = 31, 65

pytestmark = pytest.mark.skipif(not policy_kernels.available(), reason="no native kernels")
needs_c = pytest.mark.skipif(
    bool(_stable.reason_against()), reason=f"operators in Python: {_stable.reason_against()}"
)


def codes(n: int = N, k: int = K, dtype: torch.dtype = S8) -> torch.Tensor:
    numbers = torch.randint(-127, 128, (n, k), generator=torch.Generator().manual_seed(n * k))
    return numbers.to(S8) if dtype == S8 else (numbers / 16).to(dtype)


def floats(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))


def arguments(name: str, x: torch.Tensor, bias: Any, dtype: torch.dtype) -> tuple[Any, ...]:
    """Gives arguments of a product for an input of shape (..., K)."""
    kind = E4 if "f8" in name else S8
    scale = floats(N).abs() + 0.1
    scales = (x.numel() // K if x.numel() else 0,)
    given = (x,)
    if name == "linear_f8":
        given = (x.to(E5), floats(*scales).abs())
    elif name == "packed_linear_f8":
        given = (x, None)
    weight = (codes(dtype=kind),)
    if name.startswith("packed"):
        weight = (_native.pack(weight[0]), N, K, kind)
    return (*given, *weight, scale, bias, dtype)


def bits(x: Any) -> Any:
    if isinstance(x, tuple):
        return tuple(map(bits, x))
    return x.reshape(-1).view(torch.uint8)


def same(y: Any, wanted: Any) -> bool:
    if isinstance(y, tuple):
        return all(map(same, y, wanted))
    return (
        y.shape == wanted.shape and y.dtype == wanted.dtype and torch.equal(bits(y), bits(wanted))
    )


PRODUCTS = [*_stable.OPERATIONS, *(f"packed_{one}" for one in _stable.OPERATIONS)]
INPUTS = {
    "matrix": lambda: floats(5, K),
    "one row": lambda: floats(1, K),
    "no rows": lambda: floats(2, 0, K),
    "vector": lambda: floats(K),
    "four axes": lambda: floats(2, 1, 3, K),
    "turned": lambda: floats(3, 4, K).transpose(0, 1),
    "columns": lambda: floats(K, 5).t(),
    "sliced": lambda: floats(4, 3, 2 * K)[:, ::2, 7 : 7 + K],
    "every second": lambda: floats(5, 2 * K)[:, ::2],
    "repeated": lambda: floats(1, K).expand(4, K),
}


@needs_c
@pytest.mark.parametrize("x", INPUTS.values(), ids=INPUTS.keys())
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_in_c_are_those_in_python(name: str, x: Any) -> None:
    """Inputs of any strides and leading axes have one answer, and a row for each of their rows."""
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    for dtype, biased in product(dtypes, (False, True)):
        bias = floats(N).to(dtype) if biased else None
        given = arguments(name, x().to(dtype), bias, dtype)
        y = getattr(OPS, name)(*given)
        assert y.shape == (*x().shape[:-1], N)
        assert same(y, _operators.IN_PYTHON[name](*given))


@needs_c
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize(
    "shape", [(3, 5), (0, 5), (3, 0), (7,), (2, 3, 5000), (1, 300_000)], ids=str
)
def test_codes_in_c_are_those_in_python(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """The encoders give one answer too, on one thread and on several, in rows of any length."""
    x = floats(*shape).to(dtype) * 300
    if x.numel() > 4:
        x.view(-1)[:4] = torch.tensor([torch.nan, torch.inf, -torch.inf, 0])
    for some in (x, x[..., ::2], x.t() if x.ndim == 2 else x):
        assert same(OPS.quantize_rows_f8(some), _operators.IN_PYTHON["quantize_rows_f8"](some))
        for kind in (E4, E5):
            assert same(OPS.scale_f8(some, kind), _operators.IN_PYTHON["scale_f8"](some, kind))
            finite = some.nan_to_num(0, 0, 0)
            assert same(OPS.scale_f8(finite, kind), _operators.IN_PYTHON["scale_f8"](finite, kind))
        for scale, kind in ((0.7, E4), (1e-3, E5), (torch.nan, E4)):
            given = (some, torch.tensor(scale), kind)
            assert same(OPS.encode_f8(*given), _operators.IN_PYTHON["encode_f8"](*given))


@needs_c
@pytest.mark.parametrize("kind", [S8, E4, E5], ids=str)
def test_reading_back_in_c_is_that_in_python(kind: torch.dtype) -> None:
    """Unpacked codes and looked-up rows have one answer, at an address of any kind."""
    packed = _native.pack(codes(dtype=kind))
    shifted = torch.empty(packed.numel() + 1, dtype=torch.uint8)[1:].copy_(packed)
    for some in (packed, shifted):
        assert same(OPS.unpack(some, N, K, kind), codes(dtype=kind))
    for dtype, shape in product((torch.float32, torch.bfloat16, torch.float64), [(), (4,), (2, 0)]):
        ids = torch.randint(0, N, shape, dtype=torch.int32)
        for scale in (floats(N, 1).abs(), torch.tensor([[0.3]])):
            given = (ids, packed, N, K, kind, scale, dtype)
            y = OPS.packed_rows(*given)
            assert y.shape == (*shape, K)
            assert same(y, _operators.IN_PYTHON["packed_rows"](*given))


@needs_c
def test_an_input_that_is_quantized_on_the_way() -> None:
    """`packed_linear_f8` takes floats, with a scale or without, and codes, with one answer."""
    x, packed, scale = floats(5, K), _native.pack(codes(dtype=E4)), floats(N).abs()
    rest = (packed, N, K, E4, scale, None, torch.float32)
    x_codes, x_scale = OPS.quantize_rows_f8(x)
    assert same(OPS.packed_linear_f8(x, None, *rest), OPS.packed_linear_f8(x_codes, x_scale, *rest))
    one = torch.tensor(0.01)
    x_codes = OPS.encode_f8(x, one, E4)
    assert same(OPS.packed_linear_f8(x, one, *rest), OPS.packed_linear_f8(x_codes, one, *rest))


@pytest.mark.parametrize("name", PRODUCTS)
def test_operators_keep_torchs_rules(name: str) -> None:
    """`opcheck` finds schema, fake implementation and dispatch of every product in order."""
    given = arguments(name, floats(2, 3, K), None, torch.float32)
    # torch 2.13 cannot compare float8 tensors, which test_schema does.
    float8 = any(isinstance(one, torch.Tensor) and one.dtype in (E4, E5) for one in given)
    checks = ("test_faketensor",) if float8 else ("test_schema", "test_faketensor")
    torch.library.opcheck(getattr(OPS, name).default, given, test_utils=checks)


def test_other_operators_keep_torchs_rules() -> None:
    """`opcheck` finds those that make and read codes in order too."""
    x, packed, scale = floats(2, 3, K), _native.pack(codes()), floats(N).abs()
    for op, given in (
        (OPS.encode_f8, (x, torch.tensor(0.1), E4)),
        (OPS.scale_f8, (x, E5)),
        (OPS.quantize_rows_f8, (x,)),
    ):
        torch.library.opcheck(op.default, given, test_utils="test_faketensor")
    ids = torch.tensor([[1, 2]])
    for op, given in (
        (OPS.unpack, (packed, N, K, S8)),
        (OPS.packed_rows, (ids, packed, N, K, S8, scale, torch.bfloat16)),
    ):
        torch.library.opcheck(op.default, given, test_utils=("test_schema", "test_faketensor"))


def wrong() -> dict[str, tuple[str, tuple[Any, ...], str]]:
    x, scale, packed = floats(2, K), floats(N).abs(), _native.pack(codes())
    f32, one = torch.float32, torch.tensor(1.0)
    x8 = x.to(E4)
    ids = torch.tensor([0])
    return {
        "columns": ("linear_s8", (x[:, :5], codes(), scale, None, f32), r"\(..., 65\), got .* 5"),
        "no axes": ("linear_s8", (one, codes(), scale, None, f32), r"got one of 0 axes"),
        "codes of 3 axes": ("linear_s8w", (x, codes()[None], scale, None, f32), "got 3 axes"),
        "kind": ("linear_s8", (x, codes(dtype=E4), scale, None, f32), "a weight in int8"),
        "float8 kind": ("linear_f8w", (x, codes(), scale, None, f32), "a weight in float8"),
        "scales": ("linear_s8", (x, codes(), scale[:3], None, f32), "31 elements, got 3"),
        "scale's dtype": ("linear_s8", (x, codes(), scale.half(), None, f32), "in float32"),
        "bias": ("linear_s8", (x, codes(), scale, scale[:3], f32), "bias of 31 elements, got 3"),
        "input's codes": ("linear_f8", (x, one, x8, one, None, f32), "an input in float8"),
        "input's scales": ("linear_f8", (x8, scale, x8, one, None, f32), "2 elements or one"),
        "packed": ("packed_linear_s8", (x, packed[1:], N, K, S8, scale, None, f32), "packed bytes"),
        "packed's n": ("packed_linear_s8", (x, packed, N - 9, K, S8, scale[9:], None, f32), "got"),
        "packed's kind": (
            "packed_linear_f8",
            (x, None, packed, N, K, E4, scale, None, f32),
            "code",
        ),
        "scale beside codes": (
            "packed_linear_f8",
            (x8, None, packed, N, K, E4, one, None, f32),
            "scale",
        ),
        "negative n": ("packed_linear_s8", (x, packed, -1, K, S8, scale, None, f32), "expected"),
        "ids": ("packed_rows", (ids + N, packed, N, K, S8, scale, f32), "ids"),
        "one scale": ("encode_f8", (x, scale, E4), "one scale"),
        "scale 0": ("encode_f8", (x, torch.tensor(0.0), E4), "greater than 0"),
        "code": ("encode_f8", (x, one, S8), "float8_e4m3fn or float8_e5m2"),
        "rows": ("quantize_rows_f8", (one,), "without axes"),
    }


@needs_c
@pytest.mark.parametrize("case", wrong() if policy_kernels.available() else ())
def test_wrong_arguments_are_refused(case: str) -> None:
    """What does not fit is an error that says what was expected and what came; nothing leaks."""
    name, given, said = wrong()[case]
    tensors = [one for one in given if isinstance(one, torch.Tensor)]
    before = [one._use_count() for one in tensors]
    for _ in range(3):
        with pytest.raises(RuntimeError, match=said):
            getattr(OPS, name)(*given)
    assert [one._use_count() for one in tensors] == before


@needs_c
@pytest.mark.parametrize("name", PRODUCTS)
def test_arguments_are_given_back(name: str) -> None:
    """After a call nobody but the caller holds its arguments and its result."""
    given = arguments(name, floats(4, 2 * K)[:, ::2], floats(N), torch.float64)
    tensors = [one for one in given if isinstance(one, torch.Tensor)]
    before = [one._use_count() for one in tensors]
    y = getattr(OPS, name)(*given)
    assert [one._use_count() for one in tensors] == before
    assert y._use_count() == torch.empty(1)._use_count()


@needs_c
def test_threads_may_call_at_once() -> None:
    """Operators called by several threads at once give the answers of one."""
    layers = [arguments(name, floats(64, K), None, torch.float32) for name in PRODUCTS]
    wanted = [getattr(OPS, name)(*given) for name, given in zip(PRODUCTS, layers, strict=True)]
    right = []

    def call() -> None:
        for _ in range(20):
            for name, given, y in zip(PRODUCTS, layers, wanted, strict=True):
                right.append(same(getattr(OPS, name)(*given), y))

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(right) == 4 * 20 * len(PRODUCTS)
    assert all(right)
