"""The policy classes: immutable, hashable values with Keras's names.

Grammar, as `parse_policy` reads it and `policy.name` writes it:

    policy = float | mode "_from_" float
    float  = "mixed_float16" | "mixed_bfloat16" | (any dtype name)

where `mode` is that of `_modes.py`, and the source of a quantized policy is a float of at least
16 bits or one of the two mixed names.
"""

import functools
import operator
from typing import Any, ClassVar, Self

from . import _casting, _state
from ._dtypes import (
    DTYPES,
    did_you_mean,
    is_castable_float,
    is_integer,
    shorten,
    standardize_dtype,
)
from ._modes import Mode, parse_mode, scheme_names

_MIXED = {"mixed_float16": "float16", "mixed_bfloat16": "bfloat16"}
_SOURCES = ("float32", "bfloat16", "float16", "float64", *_MIXED)


class DTypePolicy:
    """The dtypes in which a layer keeps its variables and computes.

    Args:
        name: Any dtype name, or `"mixed_float16"` or `"mixed_bfloat16"`, which compute in 16 bits
            and keep variables in float32. None takes the (source of the) default policy.

    Raises:
        TypeError: `name` is not a string.
        ValueError: There is no such policy.

    >>> policy = DTypePolicy("mixed_bfloat16")
    >>> policy, policy.compute_dtype, policy.variable_dtype
    (<DTypePolicy "mixed_bfloat16">, 'bfloat16', 'float32')
    """

    _name: str
    _compute_dtype: str
    _variable_dtype: str

    def __init__(self, name: str | None = None) -> None:
        self._fill(_float_name(name))

    def _fill(self, name: str, **more: Any) -> None:
        source = more.get("_source_name", name)
        compute, variable = _dtypes_of(source)
        fields = {"_name": name, "_compute_dtype": compute, "_variable_dtype": variable, **more}
        for key, value in fields.items():
            object.__setattr__(self, key, value)

    @property
    def name(self) -> str:
        """The policy's canonical name; `pc.get(name)` gives an equal policy."""
        return self._name

    @property
    def compute_dtype(self) -> str:
        """The dtype in which a layer computes, and of its float outputs."""
        return self._compute_dtype

    @property
    def variable_dtype(self) -> str:
        """The dtype in which a layer keeps its float variables."""
        return self._variable_dtype

    @property
    def quantization_mode(self) -> str | None:
        """The name of the quantization scheme, such as `"int8"`; None for a float policy.

        Numbers that belong to a mode (a block size) are attributes of their own, as in Keras.
        """
        return None

    @property
    def quantization(self) -> Mode | None:
        """The quantization mode with its parameters; None for a float policy."""
        return None

    @property
    def source_policy(self) -> "DTypePolicy":
        """The float policy behind a quantized one; a float policy is its own source."""
        return self

    def convert_input(self, x: Any, autocast: bool = True, dtype: Any = None) -> Any:
        """Gives `x` with its float tensors in the compute dtype; everything else untouched.

        Args:
            x: A tensor of any framework, or any nest of tensors and other values. Integers,
                booleans, complex numbers, strings, keys, None, and float8 codes pass as they are;
                numpy arrays become tensors of the chosen backend.
            autocast: False casts nothing.
            dtype: Takes the place of the compute dtype.

        Raises:
            ValueError: `dtype` is no dtype.
            BackendError: The backend that should hold numpy arrays is not there.
        """
        target = self.compute_dtype if dtype is None else standardize_dtype(dtype)
        return _casting.convert(x, target, autocast)

    def get_config(self) -> dict[str, Any]:
        """Gives the arguments of the constructor, as JSON types."""
        return {"name": self.name}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """Makes the policy that `get_config` described."""
        return cls(**config)

    def _key(self) -> tuple[Any, ...]:
        kind = DTypePolicy if type(self) is FloatDTypePolicy else type(self)
        return (kind, self._name)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, DTypePolicy):
            return NotImplemented
        return self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __repr__(self) -> str:
        kind = DTypePolicy if type(self) is FloatDTypePolicy else type(self)
        return f'<{kind.__name__} "{self.name}">'

    def __setattr__(self, key: str, value: object) -> None:
        raise AttributeError(f"{self!r} is immutable; make another policy with pc.get(name).")

    def __delattr__(self, key: str) -> None:
        raise AttributeError(f"{self!r} is immutable; make another policy with pc.get(name).")

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.get_config()))


class FloatDTypePolicy(DTypePolicy):
    """An alias kind of `DTypePolicy`, equal to it when the names are."""


class QuantizedDTypePolicy(DTypePolicy):
    """A float policy whose layers also quantize their weights.

    Modes that have a class of their own (`"float8"`, `"int4/128"`) give an object of that class,
    so that one name is one policy.

    Args:
        mode: Such as `"int8"` or `"int8/weight_only"`. The older form with one argument, a whole
            name such as `"int8_from_float32"`, is understood too.
        source_name: The float policy behind it; None takes that of the default policy.

    Raises:
        TypeError: An argument is not a string.
        ValueError: There is no such mode or source, or they don't go together.

    >>> QuantizedDTypePolicy("int8", "mixed_bfloat16")
    <QuantizedDTypePolicy "int8_from_mixed_bfloat16">
    """

    _mode: Mode
    _source_name: str

    def __new__(cls, mode: str, source_name: str | None = None, *_: Any, **more: Any) -> Self:
        if cls is not QuantizedDTypePolicy:
            return super().__new__(cls)
        kind = _class_of(parse_mode(_split(mode, source_name)[0]))
        return super().__new__(kind)  # type: ignore[return-value]  # a subclass of ours, or cls

    def __init__(self, mode: str, source_name: str | None = None) -> None:
        self._fill_quantized(mode, source_name)

    def _fill_quantized(self, text: str, source_name: str | None, **more: Any) -> None:
        text, source_name = _split(text, source_name)
        mode = parse_mode(text)
        source = _float_name(source_name)
        _check_fit(type(self), mode, source)
        self._fill(f"{mode}_from_{source}", _mode=mode, _source_name=source, **more)

    @property
    def quantization_mode(self) -> str:
        """The name of the quantization scheme, such as `"int8"`."""
        return self._mode.scheme.name

    @property
    def quantization(self) -> Mode:
        """The quantization mode with its parameters."""
        return self._mode

    @property
    def source_name(self) -> str:
        """The name of the float policy behind this one."""
        return self._source_name

    @property
    def source_policy(self) -> DTypePolicy:
        """The float policy behind this one."""
        return DTypePolicy(self._source_name)

    def get_config(self) -> dict[str, Any]:
        """Gives the arguments of the constructor, as JSON types."""
        return {"mode": str(self._mode), "source_name": self._source_name}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """Makes the policy that `get_config`, or Keras before 3.4 with `{"name": …}`, described."""
        config = dict(config)
        if "name" in config and "mode" not in config:
            config["mode"] = config.pop("name")
        return cls(**config)


class QuantizedFloat8DTypePolicy(QuantizedDTypePolicy):
    """Float8 with delayed scaling: scales come from the largest values of earlier calls.

    Args:
        mode: `"float8"`.
        source_name: The float policy behind it; None takes that of the default policy.
        amax_history_length: Over how many calls the largest value is taken, 1 to 1,048,576.

    Raises:
        TypeError: `amax_history_length` is not an integer.
        ValueError: It is out of range, or another mode is given.
    """

    default_amax_history_length: ClassVar[int] = 1024
    _amax_history_length: int

    def __init__(
        self,
        mode: str,
        source_name: str | None = None,
        amax_history_length: int = default_amax_history_length,
    ) -> None:
        if not is_integer(amax_history_length):
            raise TypeError(
                "`amax_history_length` must be an integer. "
                f"Received: amax_history_length={shorten(amax_history_length)}"
            )
        length = operator.index(amax_history_length)
        # The upper bound keeps a config from a file from asking for all memory.
        if not 1 <= length <= 2**20:
            raise ValueError(
                "`amax_history_length` must be between 1 and 1048576. "
                f"Received: amax_history_length={length}"
            )
        self._fill_quantized(mode, source_name, _amax_history_length=length)

    @property
    def amax_history_length(self) -> int:
        """Over how many calls the largest value is taken."""
        return self._amax_history_length

    def get_config(self) -> dict[str, Any]:
        """Gives the arguments of the constructor, as JSON types."""
        return {**super().get_config(), "amax_history_length": self._amax_history_length}

    def _key(self) -> tuple[Any, ...]:
        return (*super()._key(), self._amax_history_length)


class Int4DTypePolicy(QuantizedDTypePolicy):
    """`"int4/<block_size>"`: can be named, saved and loaded; no kernel exists for it yet."""

    mode = QuantizedDTypePolicy.quantization_mode  # Keras has it on these classes alone

    @property
    def block_size(self) -> int:
        """How many weights of a channel share a scale; -1 for all of them."""
        return self._mode.parameters[0]


class GPTQDTypePolicy(QuantizedDTypePolicy):
    """`"gptq/<weight_bits>/<group_size>"`: can be named, saved and loaded; no kernel yet."""

    mode = QuantizedDTypePolicy.quantization_mode

    @property
    def weight_bits(self) -> int:
        """Bits of a weight's code: 2, 3, 4 or 8; AWQ takes 4 alone."""
        return self._mode.parameters[0]

    @property
    def group_size(self) -> int:
        """How many weights of a channel share a scale; -1 for all of them."""
        return self._mode.parameters[1]


class AWQDTypePolicy(QuantizedDTypePolicy):
    """`"awq/4/<group_size>"`: can be named, saved and loaded; no kernel exists for it yet."""

    mode = QuantizedDTypePolicy.quantization_mode
    weight_bits = GPTQDTypePolicy.weight_bits
    group_size = GPTQDTypePolicy.group_size


class TernaryDTypePolicy(QuantizedDTypePolicy):
    """`"ternary"`: can be named, saved and loaded; no kernel exists for it yet."""


POLICY_CLASSES: dict[str, type[DTypePolicy]] = {
    kind.__name__: kind
    for kind in (
        DTypePolicy,
        FloatDTypePolicy,
        QuantizedDTypePolicy,
        QuantizedFloat8DTypePolicy,
        Int4DTypePolicy,
        GPTQDTypePolicy,
        AWQDTypePolicy,
        TernaryDTypePolicy,
    )
}


@functools.lru_cache(maxsize=1024)
def parse_policy(text: str) -> DTypePolicy:
    """Reads a policy's name; `.name` of the result is its canonical form.

    Raises:
        ValueError: There is no such policy; the message names the nearest.
    """
    mode, separator, source = text.partition("_from_")
    if separator:
        return QuantizedDTypePolicy(mode, source)
    if text in _MIXED or _is_dtype(text):
        return DTypePolicy(text)
    if text.startswith(scheme_names()):
        raise ValueError(
            "Cannot convert `policy` into a valid pair (`mode`, `source_name`) of a quantized "
            f"policy, such as 'int8_from_float32'. Received: policy={shorten(text)}"
            f"{did_you_mean(text, _known_names())}"
        )
    return DTypePolicy(text)


def _known_names() -> list[str]:
    quantized = [f"{mode}_from_{source}" for mode in scheme_names() for source in _SOURCES]
    return [*DTYPES, *_MIXED, *quantized]


def _is_dtype(name: str) -> bool:
    try:
        standardize_dtype(name)
    except ValueError:
        return False
    return True


def _float_name(name: object) -> str:
    """Gives the canonical name of a float policy; None means the default policy's source."""
    if name is None:
        return _state.dtype_policy().source_policy.name
    if not isinstance(name, str):
        raise TypeError(
            "'name' must be a string, such as 'mixed_float16'. "
            f"Received: name={shorten(name)} (of type {type(name)})"
        )
    if name in _MIXED:
        return name
    try:
        return standardize_dtype(name)
    except ValueError:
        hint = " For a quantized policy use pc.get(name)." if "_from_" in name else ""
        raise ValueError(
            f"Cannot convert {shorten(name)} to a float policy. Expected 'mixed_float16', "
            f"'mixed_bfloat16' or the name of a dtype, such as 'float32'"
            f"{did_you_mean(name, _known_names())}{hint}"
        ) from None


def _dtypes_of(name: str) -> tuple[str, str]:
    return (_MIXED[name], "float32") if name in _MIXED else (name, name)


def _split(text: object, source_name: str | None) -> tuple[str, str | None]:
    """Takes the one-argument form, `QuantizedDTypePolicy("int8_from_float32")`, apart."""
    if isinstance(text, str) and source_name is None and "_from_" in text:
        mode, _, source_name = text.partition("_from_")
        return mode, source_name
    return text, source_name  # type: ignore[return-value]  # parse_mode refuses what is no string


def _class_of(mode: Mode) -> type[DTypePolicy]:
    """Gives the one class whose objects carry this mode."""
    bare = mode.scheme.parameters and not mode.parameters
    return QuantizedDTypePolicy if bare else POLICY_CLASSES[mode.scheme.policy_class]


def _check_fit(kind: type[DTypePolicy], mode: Mode, source: str) -> None:
    required = _class_of(mode)
    # A user's subclass counts as the nearest of our classes that it derives from.
    ours = next(base for base in kind.__mro__ if base in POLICY_CLASSES.values())
    if ours is not required:
        raise ValueError(
            f"Invalid mode for {kind.__name__}: '{mode}' is carried by {required.__name__}. "
            f"pc.get('{mode}_from_{source}') picks the class."
        )
    compute = _dtypes_of(source)[0]
    if not is_castable_float(compute):
        raise ValueError(
            "The source of a quantized policy must be a float policy of at least 16 bits, such "
            f"as 'float32' or 'mixed_bfloat16'. Received: source_name={source!r}"
        )
    if compute in mode.scheme.refused_compute_dtypes:
        instead = source.replace("float16", "bfloat16")
        raise ValueError(
            f"Quantization mode='{mode}' doesn't work well with compute_dtype={compute!r}. "
            f"Use '{mode}_from_{instead}', or '{mode}/weight_only_from_{source}'."
        )


def _rebuild(kind: type[DTypePolicy], config: dict[str, Any]) -> DTypePolicy:
    """Undoes pickling."""
    return kind.from_config(config)
