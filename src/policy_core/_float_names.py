"""The names of float policies: a dtype's, or one of two that compute in 16 bits."""

from . import _state
from ._dtypes import DTYPES, did_you_mean, shorten, standardize_dtype
from ._modes import scheme_names

MIXED = {"mixed_float16": "float16", "mixed_bfloat16": "bfloat16"}
_SOURCES = ("float32", "bfloat16", "float16", "float64", *MIXED)


def known_names() -> list[str]:
    quantized = [f"{mode}_from_{source}" for mode in scheme_names() for source in _SOURCES]
    return [*DTYPES, *MIXED, *quantized]


def is_dtype(name: str) -> bool:
    try:
        standardize_dtype(name)
    except ValueError:
        return False
    return True


def float_name(name: object) -> str:
    """Gives the canonical name of a float policy; None means the default policy's source."""
    if name is None:
        return _state.dtype_policy().source_policy.name
    if not isinstance(name, str):
        raise TypeError(
            "'name' must be a string, such as 'mixed_float16'. "
            f"Received: name={shorten(name)} (of type {type(name)})"
        )
    if name in MIXED:
        return name
    try:
        return standardize_dtype(name)
    except ValueError:
        hint = " For a quantized policy use pc.get(name)." if "_from_" in name else ""
        raise ValueError(
            f"Cannot convert {shorten(name)} to a float policy. Expected 'mixed_float16', "
            f"'mixed_bfloat16' or the name of a dtype, such as 'float32'"
            f"{did_you_mean(name, known_names())}{hint}"
        ) from None


def dtypes_of(name: str) -> tuple[str, str]:
    return (MIXED[name], "float32") if name in MIXED else (name, name)
