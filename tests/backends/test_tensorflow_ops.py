"""The operators in C: TensorFlow's interface as they declare it, shapes, and what they refuse."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

import policy_tensorflow
from policy_tensorflow import _native, _plain

CSRC = Path(__file__).parents[2] / "src/backends/policy_tensorflow/csrc"
NUMBERS = {
    "kFloat": "TF_FLOAT",
    "kUint8": "TF_UINT8",
    "kInt64": "TF_INT64",
    "kBfloat16": "TF_BFLOAT16",
    "kHalf": "TF_HALF",
    "kOk": "TF_OK",
    "kInvalidArgument": "TF_INVALID_ARGUMENT",
    "kResourceExhausted": "TF_RESOURCE_EXHAUSTED",
    "kInternal": "TF_INTERNAL",
}
COMPARISON = """
#include <type_traits>
#include "tensorflow/c/kernels.h"
#include "tensorflow/c/ops.h"
#include "tensorflow/c/tf_datatype.h"
#include "tensorflow/c/tf_status.h"
#include "tensorflow/c/tf_tensor.h"
#include "tensorflow_c.h"
using namespace tensorflow_c;
static_assert(sizeof(TF_DataType) == sizeof(int) && sizeof(TF_Code) == sizeof(int));
#define SAME(name, result, arguments) \\
  static_assert(std::is_same<decltype(Api::name), decltype(&TF_##name)>::value, #name);
POLICY_TENSORFLOW_FUNCTIONS(SAME)
"""


def test_declarations_are_those_of_the_installed_tensorflow(tmp_path: Path) -> None:
    """Every function that the operators call has the signature in TensorFlow's own headers."""
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    lines = [
        f"static_assert(static_cast<int>({own}) == static_cast<int>({name}));"
        for own, name in NUMBERS.items()
    ]
    source = tmp_path / "compare.cc"
    source.write_text(COMPARISON + "\n".join(lines) + "\n")
    command = [compiler, "-std=c++17", "-fsyntax-only", "-w", "-I", str(CSRC)]
    command += ["-I", tf.sysconfig.get_include(), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


pytestmark = pytest.mark.skipif(not _native.available(), reason="the kernels were not built")

CODES = np.random.default_rng(0).integers(-127, 128, (4, 8), np.int8)


def bits(array):
    return tf.constant(np.asarray(array).view(np.uint8))


class TestOperators:
    """The operators themselves."""

    def call(self, **changes):
        given = {
            "x": tf.ones((2, 8)),
            "x_scale": tf.zeros(0),
            "weight": bits(CODES),
            "scale": tf.ones(4),
            "bias": tf.zeros(0),
            "Y": tf.float32,
            "operation": 0,
            "code": 2,
        }
        return _native._OPERATORS["linear"](**given | changes)

    @pytest.mark.parametrize(
        ("changes", "said"),
        [
            ({"x": tf.ones((2, 7))}, "codes of shape"),
            ({"x": tf.ones(())}, r"x to have shape \[..., k\]"),
            ({"scale": tf.ones(3)}, "codes of shape"),
            ({"scale": tf.ones((4, 1))}, r"scale to have shape \[n\]"),
            ({"weight": tf.zeros(7, tf.uint8)}, "packed weight of the size"),
            ({"weight": tf.zeros((1, 4, 8), tf.uint8)}, "codes of shape"),
            ({"bias": tf.zeros(3)}, "bias to have shape"),
            ({"operation": 9}, "operation to be from 0 to 3"),
            ({"code": 7}, "code"),
            ({"x": tf.zeros((2, 8), tf.uint8)}, "x to be floats"),
            ({"x": tf.zeros((2, 8), tf.float16), "operation": 2}, "float32 or codes"),
            ({"x": tf.zeros((2, 8), tf.uint8), "operation": 2, "code": 0}, "one for each row"),
        ],
    )
    def test_wrong_operands_are_refused(self, changes, said):
        """Operands that don't agree are an InvalidArgumentError with a reason, not a crash."""
        with pytest.raises(tf.errors.InvalidArgumentError, match=said):
            self.call(**changes)

    def test_memory_that_is_no_packed_weight_is_refused(self):
        """Bytes of the right size without the packed form's mark are refused."""
        packed = _native.pack(bits(CODES), "int8")
        with pytest.raises(tf.errors.InvalidArgumentError, match="what pk_pack wrote"):
            self.call(weight=tf.zeros_like(packed))

    def test_packed_and_plain_codes_agree(self):
        """A packed weight and its plain codes give the same bits; unpacking gives the codes."""
        packed = _native.pack(bits(CODES), "int8")
        np.testing.assert_array_equal(self.call(weight=packed), self.call())
        np.testing.assert_array_equal(_native.unpack(packed, (4, 8), "int8"), bits(CODES))

    @pytest.mark.parametrize("shape", [(1, 1), (31, 63), (33, 65), (0, 5), (5, 0), (3, 131_073)])
    @pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
    def test_layout_is_what_plain_operators_read(self, shape, dtype):
        """TensorFlow's own operators unpack what the kernels packed, of any size."""
        codes = np.random.default_rng(1).integers(0, 127, shape, np.uint8)
        packed = _native.pack(tf.constant(codes), dtype)
        np.testing.assert_array_equal(_plain.unpacked(packed, shape, dtype), codes)

    def test_weight_at_an_odd_address_is_read_right(self):
        """A packed weight that shares memory with another tensor is copied where it must be."""
        packed = _native.pack(bits(CODES), "int8")
        slices = tf.split(tf.concat([tf.zeros(24, tf.uint8), packed], 0), [24, packed.shape[0]])
        np.testing.assert_array_equal(self.call(weight=slices[1]), self.call())

    def test_rows_that_are_not_there_are_refused(self):
        """An id outside of a packed table is an error."""
        packed = _native.pack(bits(CODES), "int8")
        with pytest.raises(tf.errors.InvalidArgumentError, match="ids"):
            _native.rows(tf.constant([4]), packed, (4, 8), "int8", tf.ones(4), tf.float32)

    @pytest.mark.parametrize(
        ("shape", "wanted"),
        [([None, None, 8], [None, None, 4]), ([None], [4]), ([2, None], [2, 4]), (None, None)],
    )
    def test_shapes_are_inferred(self, shape, wanted):
        """A graph knows a product's shape as far as it knows the input's."""
        function = tf.function(lambda x: self.call(x=x))
        traced = function.get_concrete_function(tf.TensorSpec(shape, tf.float32))
        assert traced.structured_outputs.shape.as_list() == wanted if wanted else True
        if wanted is None:
            assert traced.structured_outputs.shape.rank is None

    def test_shape_errors_come_when_tracing(self):
        """A scalar input is refused before anything runs."""
        with pytest.raises(ValueError, match="must be at least rank 1"):
            tf.function(lambda x: self.call(x=x)).get_concrete_function(tf.TensorSpec(()))


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "int8"])
@pytest.mark.parametrize("compiled", [False, True])
def test_decode_is_exact(dtype, compiled):
    """All 256 codes of each dtype are decoded exactly from their bits, compiled or not."""
    codes = np.arange(256, dtype=np.uint8)
    wanted = codes.view(getattr(ml_dtypes, dtype, dtype)).astype(np.float32)
    decode = tf.function(lambda codes: _plain.decode(codes, dtype), jit_compile=compiled)
    np.testing.assert_array_equal(decode(codes), wanted)


def test_register_says_that_all_is_well():
    """`register` gives no reason against the kernels where they were built, as often as asked."""
    assert policy_tensorflow.register() == ""
    assert policy_tensorflow.register() == ""


def test_threads_are_tensorflows() -> None:
    """The kernels take tf.config.threading's number of threads for one operator."""
    code = """
import tensorflow as tf
tf.config.threading.set_intra_op_parallelism_threads(1)
import policy_core as pc, policy_kernels, policy_tensorflow as pt
pc.wrap(pt.Linear(8, 4), "int8_from_float32")(tf.ones((2, 8)))
print(policy_kernels.num_threads())
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={name: v for name, v in os.environ.items() if name != "POLICY_NUM_THREADS"},
    )
    assert done.stdout == "1\n", done.stderr[-2000:]
