"""torch's operators against the reference: every size, stride and dtype, on every path."""

from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import policy_kernels
import policy_numpy as pn
from policy_core.testing import same_bits
from policy_numpy import _kernels as reference
from policy_torch import _emulation, _kernels, _native, _operators, _scaled_mm
from policy_torch._casting import to_numpy

SIZES = list(product((0, 1, 2, 8, 15, 16, 17, 33), (1, 15, 63, 64, 65), (1, 7, 31, 33)))
FLOAT8 = ("float8_e4m3fn", "float8_e5m2")


PATHS = ("chosen", "operators in Python", "plain torch", "plain torch without int_mm")


@pytest.fixture(params=PATHS)
def ops(request: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Gives the products by the operators that were chosen, by those in Python, by plain torch."""
    if request.param == "chosen":
        return _kernels
    if "plain" in request.param:
        monkeypatch.setattr(_native, "outruns_torch", lambda operation: False)
    if "without" in request.param:
        monkeypatch.setattr(_emulation, "int_mm_is_exact", lambda device: False)
    return SimpleNamespace(**_operators.IN_PYTHON)


def floats(m: int, k: int, seed: int) -> Any:
    return np.random.default_rng(seed).standard_normal((m, k), np.float32)


def of(array: Any) -> Any:
    return None if array is None else torch.tensor(array)


def codes_of(array: Any, dtype: str) -> tuple[Any, Any, torch.Tensor, torch.Tensor]:
    codes, scale = pn.quantize(array, dtype, (1,))
    bits = torch.tensor(codes.view(np.uint8)).view(getattr(torch, dtype))
    return codes, scale[:, 0], bits, torch.tensor(scale[:, 0])


def test_int8_products_are_exact(ops: Any) -> None:
    """`linear_s8` has the reference's bits for all sizes, with and without bias."""
    for m, k, n in SIZES:
        x, weight = floats(m, k, m), floats(n, k, n)
        bias = floats(1, n, 3)[0] if m % 2 else None
        codes, scale, ours, our_scale = codes_of(weight, "int8")
        wanted = reference.reference_linear_s8(x, codes, scale, bias)
        y = ops.linear_s8(of(x), ours, our_scale, of(bias), torch.float32)
        assert same_bits(y.numpy(), wanted), (m, k, n)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_float_dtypes_in_and_out(ops: Any, dtype: torch.dtype) -> None:
    """Inputs, biases and results of 16 bits are those of float32, cast once."""
    x, bias = of(floats(5, 70, 0)).to(dtype), of(floats(1, 9, 2)[0]).to(dtype)
    *_, codes, scale = codes_of(floats(9, 70, 1), "int8")
    y = ops.linear_s8(x, codes, scale, bias, dtype)
    exact = ops.linear_s8(x.float(), codes, scale, bias.float(), torch.float32)
    assert torch.equal(y, exact.to(dtype))


@pytest.mark.parametrize("k", [512, 4096, 131_072, 131_073])
def test_long_sums_of_extreme_codes(ops: Any, k: int) -> None:
    """Codes of 127 throughout, which saturate many instructions, have the reference's bits."""
    x = np.ones((2, k), np.float32)
    codes, scale = np.full((3, k), -127, np.int8), np.ones(3, np.float32)
    wanted = reference.reference_linear_s8(x, codes, scale, None)
    y = ops.linear_s8(of(x), of(codes), of(scale), None, torch.float32)
    assert same_bits(y.numpy(), wanted)


def test_any_strides(ops: Any) -> None:
    """Transposed, sliced and repeated inputs and codes give what their copies give."""
    x, weight = of(floats(6, 20, 0)), floats(20, 9, 1)
    codes, scale = codes_of(weight.T.copy(), "int8")[2:]
    wanted = ops.linear_s8(x, codes, scale, None, torch.float32)
    turned = x.t().contiguous().t()
    wide = torch.zeros(6, 50)
    wide[:, 5:25] = x
    for same in (turned, wide[:, 5:25]):
        assert torch.equal(ops.linear_s8(same, codes, scale, None, torch.float32), wanted)
    columns = codes.t().contiguous().t()
    assert torch.equal(ops.linear_s8(x, columns, scale, None, torch.float32), wanted)
    repeated = x[:1].expand(4, -1)
    y = ops.linear_s8(repeated, codes, scale, None, torch.float32)
    assert torch.equal(y, wanted[:1].expand(4, -1))


@pytest.mark.parametrize("formats", [("float8_e4m3fn", "float8_e4m3fn"), FLOAT8[::-1]], ids=str)
def test_float8_products_are_near_the_exact_ones(ops: Any, formats: tuple[str, str]) -> None:
    """`linear_f8` keeps within 1e-6 of a float64 sum, for a scale per row or for all."""
    for m, k, n in SIZES[::3]:
        x_codes, x_scale, ours, our_scale = codes_of(floats(m, k, m), formats[0])
        codes, scale, w, w_scale = codes_of(floats(n, k, n), formats[1])
        left = x_codes.astype(np.float64) * x_scale[:, None]
        right = codes.astype(np.float64) * scale[:, None]
        y = ops.linear_f8(ours, our_scale, w, w_scale, None, torch.float32)
        bound = 1e-6 * (np.abs(left) @ np.abs(right).T)
        assert (np.abs(y.numpy() - left @ right.T) <= bound).all(), (m, k, n)
        one, two = torch.tensor(0.5), torch.tensor(2.0)
        y = ops.linear_f8(ours, one, w, two, None, torch.float32)
        x64, w64 = x_codes.astype(np.float64), codes.astype(np.float64)
        bound = 1e-6 * (np.abs(x64) @ np.abs(w64).T)
        assert (np.abs(y.numpy() - x64 @ w64.T) <= bound).all(), (m, k, n)


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_weight_only_products_are_near_the_exact_ones(ops: Any, dtype: str) -> None:
    """`linear_s8w` and `linear_f8w` keep within 1e-6 of a float64 sum."""
    operation = ops.linear_s8w if dtype == "int8" else ops.linear_f8w
    for m, k, n in SIZES[::3]:
        x = floats(m, k, m)
        codes, scale, w, w_scale = codes_of(floats(n, k, n), dtype)
        right = codes.astype(np.float64) * scale[:, None]
        y = operation(of(x), w, w_scale, None, torch.float32)
        bound = 1e-6 * (np.abs(x).astype(np.float64) @ np.abs(right).T)
        assert (np.abs(y.numpy() - x.astype(np.float64) @ right.T) <= bound).all(), (m, k, n)


@pytest.mark.parametrize("dtype", FLOAT8)
def test_encoders_are_the_reference(dtype: str) -> None:
    """`encode_f8` has the reference's codes, whichever path runs."""
    x = floats(40, 33, 0) * np.float32(300)
    x[0, :4] = [np.nan, np.inf, -np.inf, 0]
    wanted = pn.encode(x, np.float32(0.7), dtype)
    codes = _kernels.encode_f8(of(x), torch.tensor(np.float32(0.7)), dtype)
    assert same_bits(to_numpy(codes), wanted)
    for rows in (x[1:], x):
        codes, scale = _kernels.quantize_rows_f8(of(rows))
        wanted, wanted_scale = pn.quantize(rows, "float8_e4m3fn", (1,))
        assert same_bits(to_numpy(codes), wanted)
        assert same_bits(scale.numpy(), wanted_scale[:, 0])


def test_int_mm_gets_the_sizes_that_cuda_demands(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch._int_mm` is called with more than 16 rows and multiples of 8, whatever comes."""
    seen = []
    int_mm = torch._int_mm

    def strict(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        (m, k), n = x.shape, y.shape[1]
        seen.append((m, k, n))
        assert m > 16
        assert k % 8 == 0
        assert n % 8 == 0
        assert x.is_contiguous()
        assert y.t().is_contiguous()
        return int_mm(x, y)

    monkeypatch.setattr(torch, "_int_mm", strict)
    for m, k, n in SIZES:
        x = torch.randint(-127, 128, (m, k), dtype=torch.int8)
        codes = torch.randint(-127, 128, (n, k), dtype=torch.int8)
        wanted = x.double() @ codes.double().t()
        assert torch.equal(_emulation.int_mm(x, codes).double(), wanted)
    assert seen


def test_scaled_mm_gets_the_sizes_that_cuda_demands(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch._scaled_mm` is called with multiples of 16 and a column-major right side."""

    def strict(x: torch.Tensor, y: torch.Tensor, *scales: Any, **options: Any) -> torch.Tensor:
        assert all(size % 16 == 0 and size > 0 for size in (*x.shape, y.shape[1]))
        assert x.is_contiguous()
        assert y.t().is_contiguous()
        assert options == {"out_dtype": torch.float32, "use_fast_accum": False}
        return x.float() @ y.float()

    monkeypatch.setattr(torch, "_scaled_mm", strict)
    for m, k, n in SIZES[::3]:
        x_codes, x_scale = codes_of(floats(m, k, m), "float8_e5m2")[2:]
        codes, scale = codes_of(floats(n, k, n), "float8_e4m3fn")[2:]
        bias = of(floats(1, n, 0)[0])
        y = _scaled_mm.linear_f8(x_codes, x_scale, codes, scale, bias, torch.bfloat16)
        wanted = _emulation.linear_f8(x_codes, x_scale, codes, scale, bias, torch.float32)
        assert y.shape == (m, n)
        assert torch.allclose(y.float(), wanted, rtol=2**-8, atol=1e-6)


def test_absent_instructions_are_named() -> None:
    """Where a device has no instruction, the table names plain torch and says what it means."""
    table = {operation: (name, note) for operation, name, note in _kernels.kernel_table("mps")}
    assert table["linear_s8"][0] == "linear_s8_torch"
    assert "smaller, not faster" in table["linear_f8"][1]
    assert not _scaled_mm.supported("cpu")
    assert not _emulation.int_mm_is_exact("mps")
    assert "torch._int_mm" in table["linear_s8"][1]
    assert "torch._scaled_mm" in table["linear_f8"][1]


def test_probe_gives_the_reason_in_torchs_words() -> None:
    """A probe that torch refuses gives torch's message; other errors are not passed over."""

    def refused() -> bool:
        raise NotImplementedError("Could not run 'aten::_int_mm'\nmore")

    def broken() -> bool:
        raise TypeError("wrong arguments")

    assert _emulation.failure_of(refused) == "Could not run 'aten::_int_mm'"
    assert _emulation.failure_of(lambda: False) == "its result is not exact"
    assert _emulation.failure_of(lambda: True) == ""
    with pytest.raises(TypeError):
        _emulation.failure_of(broken)


@pytest.mark.skipif(not _native.outruns_torch("linear_s8"), reason="no native kernels that pack")
@pytest.mark.parametrize("dtype", ["int8", *FLOAT8])
def test_packed_codes_come_back(dtype: str) -> None:
    """Packing loses nothing, for all sizes, and a copy at an address of another kind still works."""
    for _, k, n in SIZES:
        codes, scale = codes_of(floats(n, k, n), dtype)[2:]
        packed = _native.pack(codes)
        back = _kernels.unpack(packed, n, k, codes.dtype)
        assert torch.equal(back.view(torch.uint8), codes.view(torch.uint8))
        shifted = torch.empty(packed.numel() + 1, dtype=torch.uint8)[1:].copy_(packed)
        back = _kernels.unpack(shifted, n, k, codes.dtype)
        assert torch.equal(back.view(torch.uint8), codes.view(torch.uint8))
        ids = torch.arange(n).flip(0)
        rows = _kernels.packed_rows(ids, packed, n, k, codes.dtype, scale, torch.float32)
        assert torch.equal(rows, (codes.float() * scale[:, None])[ids])


@pytest.mark.skipif(not _native.outruns_torch("linear_s8"), reason="no native kernels")
def test_threads_follow_torch_unless_others_were_asked_for() -> None:
    """`torch.set_num_threads` counts for the kernels too, until someone sets their own number."""
    before = torch.get_num_threads(), policy_kernels.num_threads()
    threads = _native._Threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            threads.follow()
            assert policy_kernels.num_threads() == count
        policy_kernels.set_num_threads(3)
        torch.set_num_threads(1)
        threads.follow()
        assert policy_kernels.num_threads() == 3
    finally:
        torch.set_num_threads(before[0])
        policy_kernels.set_num_threads(before[1])
