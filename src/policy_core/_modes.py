"""The quantization modes: one `Scheme` object each, registered here and nowhere else.

Grammar, as `parse_mode` reads it and `str(mode)` writes it:

    mode       = scheme | scheme "/" integer { "/" integer }
    scheme     = "int8" | "int8/weight_only" | "float8" | "float8/dynamic"
               | "float8/weight_only" | "int4" | "gptq" | "awq" | "ternary" | (registered)
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ._dtypes import did_you_mean, shorten

_Parameters = tuple[int, ...]


def _no_check(parameters: _Parameters) -> None:
    """Accepts: the number of parameters has been checked already."""


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """What a quantization mode does, as data; adapters and the plan read it, never its name.

    Attributes:
        name: How the scheme is written, options included: `"int8/weight_only"`.
        parameters: The names of the integers that follow the name, in order.
        parameters_optional: Whether the bare name is a mode too.
        check: Raises ValueError for parameters out of range.
        weight_codes: Dtype of the stored weight codes; None if no kernel exists yet.
        input_codes: Dtype of the input codes; None if the input stays float.
        gradient_codes: Dtype in which the output gradient is quantized; None if it is not.
        scales: `"channel"`: a scale per output channel of the weight and per row of the input;
            `"tensor"`: one per tensor.
        delayed: Whether scales come from a history of earlier calls.
        trainable: Whether the float weight is kept, and trained, until the model is frozen.
        refused_compute_dtypes: Compute dtypes of source policies that the scheme refuses.
        policy_class: Name of the policy class that carries this scheme when it has parameters.
    """

    name: str
    parameters: tuple[str, ...] = ()
    parameters_optional: bool = False
    check: Callable[[_Parameters], None] = _no_check
    weight_codes: str | None = None
    input_codes: str | None = None
    gradient_codes: str | None = None
    scales: Literal["channel", "tensor"] = "channel"
    delayed: bool = False
    trainable: bool = False
    refused_compute_dtypes: frozenset[str] = frozenset()
    policy_class: str = "QuantizedDTypePolicy"

    @property
    def form(self) -> str:
        """How the scheme's modes are written: `"gptq/<weight_bits>/<group_size>"`."""
        return "/".join([self.name, *(f"<{name}>" for name in self.parameters)])


@dataclass(frozen=True)
class Mode:
    """One mode: a scheme with its parameters. `str` gives the canonical text.

    Attributes:
        scheme: The registered scheme.
        parameters: One integer for each of `scheme.parameters`, or none.
    """

    scheme: Scheme
    parameters: _Parameters = ()

    def __str__(self) -> str:
        return "/".join([self.scheme.name, *map(str, self.parameters)])


_SCHEMES: dict[str, Scheme] = {}


def register_scheme(scheme: Scheme) -> Scheme:
    """Adds a scheme, so that its modes can be named in policies.

    Raises:
        ValueError: The name is taken, or holds `_from_`, which separates a mode from its source.
    """
    if scheme.name in _SCHEMES:
        raise ValueError(f"A quantization scheme named {scheme.name!r} is registered already.")
    if "_from_" in scheme.name:
        raise ValueError(f"A scheme's name must not hold '_from_'. Received: {scheme.name!r}")
    _SCHEMES[scheme.name] = scheme
    return scheme


def scheme_names() -> tuple[str, ...]:
    """Gives the names of all registered schemes, in order of registration."""
    return tuple(_SCHEMES)


def parse_mode(text: object) -> Mode:
    """Reads a mode; `str` of the result is its canonical text.

    Args:
        text: Such as `"int8"`, `"int8/weight_only"`, `"int4/128"`.

    Raises:
        TypeError: `text` is not a string.
        ValueError: No such scheme; or parameters that are missing, too many, not integers or
            out of range.

    >>> str(parse_mode("int4/None"))
    'int4/-1'
    """
    if not isinstance(text, str):
        raise TypeError(f"'mode' must be a string, such as 'int8'. Received: mode={shorten(text)}")
    scheme = _SCHEMES.get(text)
    parts = text.split("/")
    if scheme is not None:
        parts = [text]
    elif parts[0] in _SCHEMES and _SCHEMES[parts[0]].parameters:
        scheme = _SCHEMES[parts[0]]
    else:
        raise ValueError(
            f"Invalid quantization mode. Expected one of {_forms()}. "
            f"Received: mode={shorten(text)}{did_you_mean(text, _SCHEMES)}"
        )
    if len(parts) == 1 and (scheme.parameters_optional or not scheme.parameters):
        return Mode(scheme)
    problem = f"Invalid mode {shorten(text)}. Expected the form {scheme.form!r}"
    if len(parts) - 1 != len(scheme.parameters):
        raise ValueError(f"{problem}, with {len(scheme.parameters)} integers.")
    try:
        # Old Keras files hold "int4/None"; "None" and -1 both mean one block per channel.
        parameters = tuple(-1 if part == "None" else _integer(part) for part in parts[1:])
        scheme.check(parameters)
    except ValueError as error:
        raise ValueError(f"{problem}: {error}") from None
    return Mode(scheme, parameters)


def _forms() -> str:
    return ", ".join(repr(scheme.form) for scheme in _SCHEMES.values())


def _integer(text: str) -> int:
    digits = text.removeprefix("-")
    # Nothing that int() would round, strip or read in another alphabet, and no long numbers.
    if not (digits.isascii() and digits.isdigit() and len(digits) <= 9):
        raise ValueError(f"{shorten(text)} must be an integer of at most nine digits.")
    return int(text)


def _check_block(parameters: _Parameters) -> None:
    if parameters[-1] < 1 and parameters[-1] != -1:
        raise ValueError(
            f"the block or group size must be -1 (a whole channel) or positive, not {parameters[-1]}."
        )


def _check_gptq(parameters: _Parameters) -> None:
    if parameters[0] not in (2, 3, 4, 8):
        raise ValueError(f"weight_bits must be 2, 3, 4 or 8, not {parameters[0]}.")
    _check_block(parameters)


def _check_awq(parameters: _Parameters) -> None:
    if parameters[0] != 4:
        raise ValueError(f"AWQ only supports 4-bit weights, not {parameters[0]}.")
    _check_block(parameters)


register_scheme(
    Scheme(
        name="int8",
        weight_codes="int8",
        input_codes="int8",
        # Keras casts the int32 sum to the compute dtype before it scales, which overflows. Our
        # sum stays float32, but configs must mean the same in both.
        refused_compute_dtypes=frozenset({"float16"}),
    )
)
register_scheme(Scheme(name="int8/weight_only", weight_codes="int8"))
register_scheme(
    Scheme(
        name="float8",
        weight_codes="float8_e4m3fn",
        input_codes="float8_e4m3fn",
        gradient_codes="float8_e5m2",
        scales="tensor",
        delayed=True,
        trainable=True,
        policy_class="QuantizedFloat8DTypePolicy",
    )
)
register_scheme(
    Scheme(
        name="float8/dynamic",
        weight_codes="float8_e4m3fn",
        input_codes="float8_e4m3fn",
        gradient_codes="float8_e5m2",
        trainable=True,
    )
)
register_scheme(Scheme(name="float8/weight_only", weight_codes="float8_e4m3fn"))
register_scheme(
    Scheme(
        name="int4",
        parameters=("block_size",),
        parameters_optional=True,
        check=_check_block,
        policy_class="Int4DTypePolicy",
    )
)
register_scheme(
    Scheme(
        name="gptq",
        parameters=("weight_bits", "group_size"),
        check=_check_gptq,
        policy_class="GPTQDTypePolicy",
    )
)
register_scheme(
    Scheme(
        name="awq",
        parameters=("weight_bits", "group_size"),
        check=_check_awq,
        policy_class="AWQDTypePolicy",
    )
)
register_scheme(Scheme(name="ternary", policy_class="TernaryDTypePolicy"))
