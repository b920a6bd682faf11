"""Names and facts of dtypes, and `standardize_dtype`, which turns anything into such a name."""

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["bool", "int", "uint", "float", "complex", "string"]


@dataclass(frozen=True, slots=True)
class DType:
    """The facts of one dtype.

    Attributes:
        name: The canonical name.
        kind: What its values are.
        bits: Storage of one value in bits; 0 for strings.
        max: The largest finite value; 0 where values are not numbers.
        has_inf: Whether it can hold an infinity.
        has_nan: Whether it can hold a NaN.
    """

    name: str
    kind: Kind
    bits: int
    max: float
    has_inf: bool = False
    has_nan: bool = False


def _integers() -> Iterable[DType]:
    for bits in (2, 4, 8, 16, 32, 64):
        yield DType(f"int{bits}", "int", bits, 2 ** (bits - 1) - 1)
        yield DType(f"uint{bits}", "uint", bits, 2**bits - 1)


# The float8 values are those of the OCP 8-bit floating point specification (e4m3fn, e5m2,
# section 5) and of the ml_dtypes README (the others); a test compares all with ml_dtypes.
_FLOATS = (
    DType("float64", "float", 64, 1.7976931348623157e308, True, True),
    DType("float32", "float", 32, (2 - 2**-23) * 2.0**127, True, True),
    DType("float16", "float", 16, 65504.0, True, True),
    DType("bfloat16", "float", 16, (2 - 2**-7) * 2.0**127, True, True),
    DType("float8_e4m3fn", "float", 8, 448.0, False, True),
    DType("float8_e5m2", "float", 8, 57344.0, True, True),
    DType("float8_e4m3fnuz", "float", 8, 240.0, False, True),
    DType("float8_e5m2fnuz", "float", 8, 57344.0, False, True),
    DType("float8_e4m3", "float", 8, 240.0, True, True),
    DType("float8_e3m4", "float", 8, 15.5, True, True),
    DType("float8_e4m3b11fnuz", "float", 8, 30.0, False, True),
    DType("float8_e8m0fnu", "float", 8, 2.0**127, False, True),
)

DTYPES: dict[str, DType] = {
    dtype.name: dtype
    for dtype in (
        *_FLOATS,
        *_integers(),
        DType("bool", "bool", 8, 1),
        DType("complex64", "complex", 64, 0, True, True),
        DType("complex128", "complex", 128, 0, True, True),
        DType("string", "string", 0, 0),
    )
}

# One answer for Python's own types in every framework; Keras's depends on its backend.
_PYTHON_TYPES = {bool: "bool", int: "int32", float: "float32", complex: "complex64", str: "string"}
_PYTHON_NAMES = {"int": "int32", "float": "float32"}
# Scalar types whose own name is not that of their dtype, in numpy 1 or 2.
_NUMPY_NAMES = {
    "bool_": "bool",
    "str_": "string",
    "bytes_": "string",
    "longlong": "int64",
    "ulonglong": "uint64",
}
_PREFIXES = ("torch.", "jax.numpy.", "jnp.", "numpy.", "np.", "tf.", "ml_dtypes.")
_FRAMEWORKS = frozenset({"numpy", "ml_dtypes", "torch", "jax", "jaxlib", "tensorflow"})


def standardize_dtype(dtype: Any) -> str:
    """Gives the canonical name of a dtype.

    Args:
        dtype: A name (`"float32"`, `"torch.float32"`), a dtype or scalar type of numpy,
            ml_dtypes, torch, JAX or TensorFlow, or one of Python's `bool`, `int`, `float`,
            `complex`, `str`.

    Returns:
        A key of `DTYPES`.

    Raises:
        ValueError: Nothing in `DTYPES` has that name.

    >>> standardize_dtype("torch.bfloat16"), standardize_dtype(int)
    ('bfloat16', 'int32')
    """
    name = _name_of(dtype)
    if name in DTYPES:
        return DTYPES[name].name  # plain text, also where a numpy.str_ came
    raise ValueError(
        f"Invalid dtype: {shorten(dtype)}. Expected the name of a dtype, such as "
        f"'float32' or 'bfloat16', or a dtype of an installed framework{did_you_mean(name, DTYPES)}"
    )


def _name_of(dtype: Any) -> str:
    if isinstance(dtype, str):
        for prefix in _PREFIXES:
            if dtype.startswith(prefix):
                return dtype[len(prefix) :]
        return _PYTHON_NAMES.get(dtype, dtype)
    is_type = isinstance(dtype, type)
    if is_type and dtype in _PYTHON_TYPES:
        return _PYTHON_TYPES[dtype]
    # Only the frameworks' own objects are asked for a name: a pathlib.Path has one too.
    module: str = (dtype if is_type else type(dtype)).__module__
    if module.partition(".")[0] not in _FRAMEWORKS:
        return ""
    if is_type and hasattr(getattr(dtype, "dtype", None), "name"):  # jnp.float32
        return str(dtype.dtype.name)
    if getattr(dtype, "kind", None) in ("U", "S", "T"):  # numpy's strings of any width
        return "string"
    name = getattr(dtype, "name", None) or getattr(dtype, "__name__", None)
    if isinstance(name, str):
        return _NUMPY_NAMES.get(name, name)
    # A torch.dtype has no name. An array has none either, and its text could be anything.
    prefix, _, rest = str(dtype).rpartition("torch.")
    return rest if module == "torch" and not prefix else ""


def is_float(name: str) -> bool:
    """Says whether a canonical dtype name is a float of any width."""
    return DTYPES[name].kind == "float"


def is_castable_float(name: str) -> bool:
    """Says whether autocast may change a tensor of this dtype.

    False for every float narrower than 16 bits: those hold codes, and widening codes without
    their scale would be silent nonsense.
    """
    dtype = DTYPES[name]
    return dtype.kind == "float" and dtype.bits >= 16


def shorten(value: object) -> str:
    """Gives `repr(value)`, cut to a length that fits an error message."""
    try:
        text = repr(value)
    except Exception:  # a repr that fails (nested too deep, foreign) must not hide the error
        return f"<{type(value).__name__} object>"
    return text if len(text) <= 200 else f"{text[:120]}… ({len(text)} characters)"


def did_you_mean(name: object, choices: Iterable[str]) -> str:
    """Gives `". Did you mean 'x'?"` for the nearest choice, or `"."`."""
    # Matching is quadratic in the length, and no real name is that long.
    if not isinstance(name, str) or not 0 < len(name) <= 200:
        return "."
    import difflib  # 4 ms that only an error pays

    nearest = difflib.get_close_matches(name, list(choices), n=1, cutoff=0.6)
    return f". Did you mean {nearest[0]!r}?" if nearest else "."


def is_integer(value: object) -> bool:
    """Says whether a value is an integer (numpy's too) and not a bool.

    >>> is_integer(3), is_integer(True), is_integer(3.0)
    (True, False, False)
    """
    if isinstance(value, bool) or _is_numpy_bool(value):
        return False
    try:
        operator.index(value)  # type: ignore[arg-type]  # it answers for any object
    except TypeError:  # arrays of floats and classes have __index__ too
        return False
    return True


def _is_numpy_bool(value: object) -> bool:
    return type(value).__module__ == "numpy" and type(value).__name__ in ("bool", "bool_")
