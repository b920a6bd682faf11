"""Names and facts of dtypes."""

import enum
import json
import pathlib

import ml_dtypes
import numpy as np
import pytest

from policy_core import _dtypes, get
from policy_core._dtypes import DTYPES, did_you_mean, is_integer, shorten, standardize_dtype


def numpy_dtype(name):
    return np.dtype(getattr(ml_dtypes, name, name))


FLOATS = [name for name, dtype in DTYPES.items() if dtype.kind == "float"]
INTEGERS = [name for name, dtype in DTYPES.items() if dtype.kind in ("int", "uint")]


@pytest.mark.parametrize("name", FLOATS)
def test_float_range_is_that_of_ml_dtypes(name):
    """Bits and largest finite value of each float are those that ml_dtypes gives."""
    info = ml_dtypes.finfo(numpy_dtype(name))
    assert (DTYPES[name].bits, DTYPES[name].max) == (info.bits, float(info.max))


@pytest.mark.parametrize("name", FLOATS)
def test_float_specials_are_those_of_ml_dtypes(name):
    """Whether a float has infinities and NaN is what casts of them show."""
    dtype = numpy_dtype(name)
    with np.errstate(all="ignore"):
        infinity, nan = (np.array(x, np.float64).astype(dtype) for x in (np.inf, np.nan))
    assert DTYPES[name].has_inf is bool(np.isinf(infinity.astype(np.float64)))
    assert DTYPES[name].has_nan is bool(np.isnan(nan.astype(np.float64)))


@pytest.mark.parametrize("name", INTEGERS)
def test_integer_range_is_that_of_ml_dtypes(name):
    """Bits, signedness and largest value of each integer are those that ml_dtypes gives."""
    info = ml_dtypes.iinfo(numpy_dtype(name))
    fact = DTYPES[name]
    assert (fact.bits, fact.max, fact.kind) == (
        info.bits,
        int(info.max),
        "int" if int(info.min) < 0 else "uint",
    )


def test_every_name_is_canonical():
    """Each key of the table is the name of its entry and standardizes to itself."""
    for name, dtype in DTYPES.items():
        assert name == dtype.name == standardize_dtype(name)


@pytest.mark.parametrize("name", [name for name in DTYPES if name != "string"])
def test_numpy_forms_give_the_name(name):
    """numpy's dtype object and scalar type of a dtype both give its name."""
    dtype = numpy_dtype(name)
    assert standardize_dtype(dtype) == standardize_dtype(dtype.type) == name


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        pytest.param(bool, "bool", id="bool"),
        pytest.param(int, "int32", id="int"),
        pytest.param(float, "float32", id="float"),
        pytest.param(complex, "complex64", id="complex"),
        pytest.param(str, "string", id="str"),
        pytest.param("int", "int32", id="text-int"),
        pytest.param("float", "float32", id="text-float"),
        pytest.param("torch.float32", "float32", id="torch-prefix"),
        pytest.param("jax.numpy.bfloat16", "bfloat16", id="jax-prefix"),
        pytest.param("jnp.int8", "int8", id="jnp-prefix"),
        pytest.param("np.float64", "float64", id="np-prefix"),
        pytest.param("numpy.float64", "float64", id="numpy-prefix"),
        pytest.param("tf.string", "string", id="tf-prefix"),
        pytest.param("ml_dtypes.int4", "int4", id="ml-dtypes-prefix"),
        pytest.param(np.dtype(">f4"), "float32", id="big-endian"),
        pytest.param(np.dtype("U7"), "string", id="numpy-text"),
        pytest.param(np.dtype("S7"), "string", id="numpy-bytes"),
        pytest.param(np.str_, "string", id="numpy-text-type"),
        pytest.param(np.longlong, "int64", id="numpy-longlong"),
        pytest.param(np.half, "float16", id="numpy-half"),
        pytest.param(np.str_("float32"), "float32", id="numpy-text-value"),
        pytest.param(enum.StrEnum("E", {"A": "int8"}).A, "int8", id="text-enum"),
    ],
)
def test_standardize_dtype(dtype, name):
    """Names with a framework's prefix, Python's types and numpy's types give the plain name."""
    standardized = standardize_dtype(dtype)
    assert standardized == name
    assert type(standardized) is str


@pytest.mark.parametrize(
    ("dtype", "shown"),
    [
        pytest.param("bogus.float16", "'bogus.float16'", id="unknown-prefix"),
        pytest.param("torch.torch.float32", "'torch.torch.float32'", id="prefix-twice"),
        pytest.param("np.int", "'np.int'", id="no-such-type"),
        pytest.param("Float32", "'Float32'", id="case"),
        pytest.param(" float32", "' float32'", id="space"),
        pytest.param("", "''", id="empty"),
        pytest.param(b"float32", "b'float32'", id="bytes"),
        pytest.param(pathlib.PurePosixPath("float32"), "PurePosixPath('float32')", id="a-path"),
        pytest.param(np.float32(3), "3.0", id="a-value"),
        pytest.param(np.array("float32"), "float32", id="an-array-of-text"),
        pytest.param(np.generic, "numpy.generic", id="abstract-type"),
        pytest.param(np.dtype("O"), "dtype('O')", id="object-dtype"),
        pytest.param(np.dtype([("a", "f4")]), "dtype([", id="structured-dtype"),
        pytest.param(None, "None", id="none"),
        pytest.param(123, "123", id="a-number"),
        pytest.param(["float32"], "['float32']", id="a-list"),
        pytest.param(np, "module", id="a-module"),
    ],
)
def test_standardize_dtype_refuses(dtype, shown):
    """What is no dtype is refused, and the message shows what came."""
    with pytest.raises(ValueError, match="Invalid dtype: ") as caught:
        standardize_dtype(dtype)
    assert shown in str(caught.value)


def test_a_near_miss_gets_a_suggestion():
    """A misspelled name is answered with the nearest name."""
    with pytest.raises(ValueError, match=r"Did you mean 'bfloat16'\?"):
        standardize_dtype("bflaot16")


def test_frameworks_dtypes_give_one_policy(run_python):
    """torch's, JAX's, numpy's and TensorFlow's float32 and the name give one policy."""
    names = run_python(
        """
import json, numpy as np, torch, jax.numpy as jnp, tensorflow as tf
import policy_core as pc
forms = [torch.float32, torch.float, jnp.float32, jnp.dtype("float32"), np.float32,
         np.dtype("float32"), tf.float32, "float32", "torch.float32", "tf.float32", float]
more = [torch.half, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn,
        jnp.bfloat16, jnp.int4, jnp.float8_e5m2, tf.bfloat16, tf.half, tf.string, tf.complex64]
refused = []
for form in (torch.qint8, tf.qint8, tf.resource, torch.zeros(()), jnp.zeros(()), torch.nn.Linear):
    try:
        pc.get(form)
    except ValueError as error:
        refused.append(str(error)[:33])
print(json.dumps([len({pc.get(form) for form in forms}), pc.get(forms[0]).name,
                  [pc.get(form).name for form in more], refused]))
""",
        TF_CPP_MIN_LOG_LEVEL="3",
    )
    count, name, more, refused = json.loads(names.splitlines()[-1])
    assert (count, name) == (1, "float32")
    assert more == [
        *("float16", "bfloat16", "int64", "bool", "float8_e4m3fn"),
        *("bfloat16", "int4", "float8_e5m2"),
        *("bfloat16", "float16", "string", "complex64"),
    ]
    assert refused == ["Cannot interpret `dtype` argument"] * 6


@pytest.mark.parametrize("_", range(2))
def test_int_has_one_answer(_):
    """The name `int` means the same each time."""
    assert get("int") is get("int")
    assert get("int").name == "int32"


@pytest.mark.parametrize(
    ("value", "answer"),
    [
        pytest.param(3, True, id="int"),
        pytest.param(np.int64(3), True, id="numpy-int"),
        pytest.param(np.array(3), True, id="numpy-array-of-one"),
        pytest.param(True, False, id="bool"),
        pytest.param(np.True_, False, id="numpy-bool"),
        pytest.param(3.0, False, id="float"),
        pytest.param(np.array(3.0), False, id="numpy-array-of-float"),
        pytest.param(np.array([3, 4]), False, id="numpy-array-of-two"),
        pytest.param(int, False, id="the-type-itself"),
        pytest.param("3", False, id="text"),
    ],
)
def test_is_integer(value, answer):
    """Integers of Python and numpy are integers; booleans, floats and types are none."""
    assert is_integer(value) is answer


def test_castable_floats_are_those_of_16_bits_and_more():
    """Autocast may touch floats of 16, 32 and 64 bits, and nothing else."""
    castable = {name for name in DTYPES if _dtypes.is_castable_float(name)}
    assert castable == {"float16", "bfloat16", "float32", "float64"}


def test_messages_stay_short():
    """A huge value is shown by its start and its size; one that cannot be shown, by its type."""
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    assert shorten("x" * 10_000) == f"'{'x' * 119}… (10002 characters)"
    assert shorten(deep) == "<list object>"
    assert did_you_mean("float32" * 100, DTYPES) == "."
