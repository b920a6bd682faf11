"""The quantized policies, and names read into policies; `_policies` has the grammar."""

import functools
import operator
from typing import Any, ClassVar, Self

from ._dtypes import did_you_mean, is_castable_float, is_integer, shorten
from ._float_names import MIXED, dtypes_of, float_name, is_dtype, known_names
from ._modes import Mode, parse_mode, scheme_names
from ._policies import DTypePolicy, FloatDTypePolicy


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
        source = float_name(source_name)
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
    if text in MIXED or is_dtype(text):
        return DTypePolicy(text)
    if text.startswith(scheme_names()):
        raise ValueError(
            "Cannot convert `policy` into a valid pair (`mode`, `source_name`) of a quantized "
            f"policy, such as 'int8_from_float32'. Received: policy={shorten(text)}"
            f"{did_you_mean(text, known_names())}"
        )
    return DTypePolicy(text)


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
    compute = dtypes_of(source)[0]
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
