"""XLA's FFI interface as the handlers declare it, and what the handlers refuse."""

import shutil
import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from policy_jax import _kernels, _native, _packed

CSRC = Path(__file__).parents[2] / "src/backends/policy_jax/csrc"
FIELDS = {
    "Extension_Base": ["type", "next"],
    "Api_Version": ["major_version", "minor_version"],
    "Metadata": ["api_version", "traits"],
    "Metadata_Extension": ["metadata"],
    "Error_Create_Args": ["message", "errc"],
    "Error_Destroy_Args": ["error"],
    "Buffer": ["dtype", "data", "rank", "dims"],
    "ByteSpan": ["ptr", "len"],
    "Scalar": ["dtype", "value"],
    "Args": ["size", "types", "args"],
    "Rets": ["size", "types", "rets"],
    "Attrs": ["size", "types", "names", "attrs"],
    "ThreadPool_Schedule_Args": ["ctx", "task", "data"],
    "ThreadPool_NumThreads_Args": ["ctx", "num_threads"],
    "CallFrame": ["api", "ctx", "stage", "args", "rets", "attrs"],
}
FUNCTIONS = ["Error_Create", "Error_Destroy", "ThreadPool_Schedule", "ThreadPool_NumThreads"]
NUMBERS = {
    "kExtensionMetadata": "Extension_Metadata",
    "kStageExecute": "ExecutionStage_EXECUTE",
    "kAttrScalar": "AttrType_SCALAR",
    "kInvalidArgument": "Error_Code_INVALID_ARGUMENT",
    "kInternal": "Error_Code_INTERNAL",
    "kU8": "DataType_U8",
    "kS64": "DataType_S64",
    "kF16": "DataType_F16",
    "kF32": "DataType_F32",
    "kBF16": "DataType_BF16",
    "kF8E5M2": "DataType_F8E5M2",
    "kApiMajor": "API_MAJOR",
}


def test_declarations_are_those_of_the_installed_jaxlib(tmp_path):
    """Every field that the handlers read lies where jaxlib's own header has it."""
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    lines = [
        f"static_assert(offsetof(xla_ffi::{struct}, {field}) == offsetof(XLA_FFI_{struct}, {field}));"
        for struct, fields in FIELDS.items()
        for field in fields
    ]
    lines += [
        f"static_assert(offsetof(xla_ffi::Api, {name}) == offsetof(XLA_FFI_Api, XLA_FFI_{name}));"
        for name in FUNCTIONS
    ]
    lines += [f"static_assert(xla_ffi::{own} == XLA_FFI_{name});" for own, name in NUMBERS.items()]
    source = tmp_path / "compare.cc"
    includes = '#include "xla_ffi.h"\n#include "xla/ffi/api/c_api.h"\n'
    source.write_text(includes + "\n".join(lines) + "\n")
    command = [compiler, "-std=c++17", "-fsyntax-only", "-Wno-invalid-offsetof"]
    command += ["-I", str(CSRC), "-I", jax.ffi.include_dir(), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not _native.available(), reason="the native kernels were not built")
class TestHandler:
    """The handler itself."""

    def call(self, x, weight, scale, n=4, k=8, operation=0, out=None):
        out = jax.ShapeDtypeStruct((x.shape[0], n), jnp.float32) if out is None else out
        attributes = {"operation": operation, "n": n, "k": k, "code": 2}
        numbers = {name: np.int64(value) for name, value in attributes.items()}
        return jax.ffi.ffi_call(_native.TARGET, out)(x, weight, scale, **numbers)

    @pytest.mark.parametrize(
        ("changes", "said"),
        [
            ({"x": jnp.ones((2, 7))}, "sizes that agree"),
            ({"scale": jnp.ones(3)}, "sizes that agree"),
            ({"weight": jnp.ones((4, 7), jnp.int8)}, "size of its n and k"),
            ({"weight": jnp.ones((1, 7), jnp.uint8)}, "size of its n and k"),
            ({"operation": 9}, "a call that policy_jax made"),
        ],
        ids=["x", "scale", "codes", "packed", "operation"],
    )
    def test_wrong_operands_are_refused(self, changes, said):
        """Operands that don't agree are an error of XLA's, not a crash."""
        given = {"x": jnp.ones((2, 8)), "weight": jnp.ones((4, 8), jnp.int8), "scale": jnp.ones(4)}
        with pytest.raises(jax.errors.JaxRuntimeError, match=said):
            self.call(**given | changes)

    def test_packed_and_plain_codes_agree(self):
        """A packed weight and its plain codes give the same bits; unpacking gives the codes."""
        codes = jnp.asarray(np.random.default_rng(0).integers(-127, 128, (4, 8), np.int8))
        x = jnp.asarray(np.random.default_rng(1).standard_normal((2, 8), np.float32))
        packed = _packed.packed(codes)
        plain = self.call(x, codes, jnp.ones(4))
        np.testing.assert_array_equal(self.call(x, packed, jnp.ones(4)), plain)
        np.testing.assert_array_equal(_packed.unpacked(packed, (4, 8), "int8"), codes)
        np.testing.assert_array_equal(_packed.unpacked_inside(packed, (4, 8), "int8"), codes)


@pytest.mark.parametrize("shape", [(1, 1), (31, 63), (33, 65), (70, 200), (3, 131_080)])
@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_rows_of_a_packed_table(shape, dtype):
    """Rows are read out of a packed table, and all of it, without a call of the kernels."""
    if not _native.available():
        pytest.skip(_native.reason_against())
    bits = np.random.default_rng(0).integers(-126, 126, shape, np.int8)
    codes = bits.view(getattr(ml_dtypes, dtype)) if dtype != "int8" else bits
    ids = jnp.array([[0, shape[0] - 1], [shape[0] // 2, 0]])
    packed = _packed.packed(jnp.asarray(codes))
    found = jax.jit(_packed.packed_rows, static_argnums=(2, 3))(packed, ids, shape, dtype)
    np.testing.assert_array_equal(np.asarray(found).view(np.int8), bits[np.asarray(ids)])
    whole = jax.jit(_packed.unpacked_anywhere, static_argnums=(1, 2))(packed, shape, dtype)
    np.testing.assert_array_equal(np.asarray(whole).view(np.int8), bits)


def test_ids_outside_a_table():
    """Negative ids count from the end and others outside give NaN, as in `jnp.take`."""
    codes = jnp.arange(1, 7, dtype=jnp.int8).reshape(3, 2)
    scale = jnp.array([[1.0], [2.0], [3.0]])
    ids = jnp.array([0, 2, -1, -3, -4, 3])
    wanted = jnp.take(codes * scale, ids, axis=0, mode="fill")
    found = _kernels.rows(codes, scale, ids, jnp.float32)
    np.testing.assert_array_equal(found, wanted)
    if _native.available():
        packed = _packed.packed(codes)
        found = _kernels.packed_rows(packed, (3, 2), "int8", scale, ids, jnp.float32)
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("rows", [(), (1,), (1, 1), (0,), (2,), (3, 2)])
def test_few_rows_of_xla(rows):
    """XLA's own int8 product of one row, or of none, has the bits that many rows have."""
    rng = np.random.default_rng(0)
    codes = rng.integers(-127, 128, (5, 96), np.int8)
    x = rng.standard_normal((*rows, 96), np.float32)
    scale, bias = rng.random(5, np.float32), rng.random(5, np.float32)
    found = jax.jit(_kernels.linear_s8)(x, codes, scale, bias)
    many = _kernels.linear_s8(np.stack([x.reshape(-1, 96)] * 2), codes, scale, bias)
    np.testing.assert_array_equal(found, many[0].reshape(*rows, 5))


def test_vectorized_rows_of_xla():
    """A row under vmap is one of many: the product has no more rows than there are."""
    rng = np.random.default_rng(0)
    codes, other = rng.integers(-127, 128, (2, 5, 96), np.int8)
    x, scale = rng.standard_normal((4, 96), np.float32), np.ones(5, np.float32)
    product = jax.jit(jax.vmap(lambda x: _kernels.linear_s8(x, codes, scale, None)))
    wanted = _kernels.linear_s8(x, codes, scale, None)
    np.testing.assert_array_equal(product(x), wanted)
    text = product.lower(x).as_text()
    assert "stablehlo.pad" not in text
    both = jax.vmap(_kernels.linear_s8, (None, 0, None, None))
    stack = both(x[0], np.stack([codes, other]), scale, None)
    np.testing.assert_array_equal(stack[0], wanted[0])
    np.testing.assert_array_equal(stack[1], _kernels.linear_s8(x, other, scale, None)[0])


def test_unknown_rows_of_xla():
    """A program that is exported for any number of rows has the same bits for one and for many."""
    codes = jnp.asarray(np.random.default_rng(0).integers(-127, 128, (5, 96), np.int8))
    x = np.random.default_rng(1).standard_normal((4, 96), np.float32)
    product = jax.jit(lambda x: _kernels.linear_s8(x, codes, jnp.ones(5), None))
    (rows,) = jax.export.symbolic_shape("rows")
    program = jax.export.export(product)(jax.ShapeDtypeStruct((rows, 96), jnp.float32))
    for count in (1, 4):
        np.testing.assert_array_equal(program.call(x[:count]), product(x)[:count])
