"""Which modules can be quantized, and how each kind reads its input: one entry a class.

TensorFlow's modules have no common layers, so an entry is needed for each class that multiplies:
`register_layer` adds one. An entry serves the class and every subclass that does not override
`__call__`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from policy_core._dtypes import shorten
from policy_core._plan import LayerKind

from ._modules import Embedding, LayerNorm, Linear, Weight


@dataclass(frozen=True, kw_only=True)
class LayerAdapter:
    """How modules of one class take a policy.

    Attributes:
        kind: `"linear"` for a module whose variable `weight` multiplies, and whose variable `bias`,
            if any, is added to the product; `"embedding"` for rows of `weight`; `"norm"` for a
            module that computes in float32 inside; `"other"` for one without a quantized form.
        forward: For `"linear"`: `forward(module, linear, *args, **kwargs)` gives the module's
            output, where `linear(x)` is the product under its policy, with the module's bias, and
            `linear(x, bias)` that with another one. None for `linear(x)` itself.
        weight: The attribute that holds the weight, of rank 2.
        bias: The attribute that holds the bias or None; it need not exist.
        transposed: Whether the weight has shape (in, out), as TensorFlow's users write it.
        kept: Attributes of float variables that `__call__` assigns to: they are read as they are.
        left_out: Says of one module why it can't be quantized; `""` if it can.
    """

    kind: LayerKind
    forward: Callable[..., Any] | None = None
    weight: str = "weight"
    bias: str = "bias"
    transposed: bool = False
    kept: tuple[str, ...] = ()
    left_out: Callable[[Any], str] | None = None

    def __post_init__(self) -> None:
        if self.kind not in ("linear", "embedding", "norm", "other"):
            raise ValueError(
                "Expected kind 'linear', 'embedding', 'norm' or 'other'. "
                f"Received: kind={self.kind!r}"
            )
        if self.kind != "linear" and (self.forward is not None or self.transposed):
            raise ValueError(
                f"'forward' and 'transposed' are for kind 'linear', not {self.kind!r}."
            )

    @property
    def renamed(self) -> dict[str, str]:
        """The portable names of a quantizable module's variables, by attribute."""
        if self.kind not in ("linear", "embedding"):
            return {}
        return {self.weight: "weight", self.bias: "bias"}


def register_layer(cls: type, adapter: LayerAdapter) -> None:
    """Lets modules of a class take quantized policies.

    Args:
        cls: A subclass of `tf.Module`.
        adapter: How its modules compute.

    Raises:
        TypeError: `cls` is no such class, or `adapter` no `LayerAdapter`.
        ValueError: `cls` is registered already with another adapter.
    """
    if not (isinstance(cls, type) and issubclass(cls, tf.Module)):
        raise TypeError(f"Expected a subclass of tf.Module. Received: {shorten(cls)}")
    if not isinstance(adapter, LayerAdapter):
        raise TypeError(f"Expected a policy_tensorflow.LayerAdapter. Received: {shorten(adapter)}")
    if _REGISTERED.setdefault(cls, adapter) != adapter:
        raise ValueError(f"{cls.__name__} is registered already with another adapter.")


def adapter_for(cls: type) -> LayerAdapter:
    """Gives how modules of a class take a policy."""
    for base in cls.__mro__:
        if base not in _REGISTERED:
            continue
        adapter = _REGISTERED[base]
        # A subclass that overrides __call__ does something that its base's entry cannot know.
        if call_of(cls) is call_of(base):
            return adapter
        if adapter.kind in ("linear", "embedding"):
            return LayerAdapter(
                kind=adapter.kind,
                weight=adapter.weight,
                bias=adapter.bias,
                transposed=adapter.transposed,
                kept=adapter.kept,
                left_out=_overrides_call,
            )
        return adapter
    kind: LayerKind = "norm" if cls.__name__.endswith(("Norm", "Normalization")) else "other"
    return LayerAdapter(kind=kind)


def call_of(cls: type) -> object:
    """Gives a class's `__call__` as it was written: a `tf.function` as such."""
    return next((vars(kind)["__call__"] for kind in cls.__mro__ if "__call__" in vars(kind)), None)


def _overrides_call(module: Any) -> str:
    return (
        f"{type(module).__name__} overrides __call__; it follows the source policy. "
        "pc.register_layer can say how it computes"
    )


_REGISTERED: dict[type, LayerAdapter] = {
    Linear: LayerAdapter(kind="linear", transposed=True),
    Weight: LayerAdapter(
        kind="linear",
        transposed=True,
        forward=lambda module, linear, x, bias=None: linear(x, bias),
    ),
    Embedding: LayerAdapter(kind="embedding"),
    LayerNorm: LayerAdapter(kind="norm"),
}
