"""The float policies: immutable, hashable values with Keras's names.

Grammar, as `parse_policy` reads it and `policy.name` writes it:

    policy = float | mode "_from_" float
    float  = "mixed_float16" | "mixed_bfloat16" | (any dtype name)

where `mode` is that of `_modes.py`, and the source of a quantized policy is a float of at least
16 bits or one of the two mixed names.
"""

from typing import Any, Self

from . import _casting
from ._dtypes import standardize_dtype
from ._float_names import dtypes_of, float_name
from ._modes import Mode


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
        self._fill(float_name(name))

    def _fill(self, name: str, **more: Any) -> None:
        source = more.get("_source_name", name)
        compute, variable = dtypes_of(source)
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


def _rebuild(kind: type[DTypePolicy], config: dict[str, Any]) -> DTypePolicy:
    """Undoes pickling."""
    return kind.from_config(config)
