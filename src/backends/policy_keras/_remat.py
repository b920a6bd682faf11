"""`keras.RematScope` on JAX: what a call writes leaves it as something that it returns.

JAX traces a call under `jax.checkpoint` by itself. What is written to a variable inside must not be
seen outside, and every argument arrives traced, `training` too, which no layer can then ask about.
So tensors alone are arguments here, and the variables' new values are results.
"""

from collections.abc import Callable
from typing import Any

import keras

from . import _keras

Call = Callable[..., Any]


def rematerialized(make: Call, layer_call: Call, args: Any, kwargs: Any) -> Call:
    """Gives a layer's call for some arguments as its RematScope wants it.

    Args:
        make: Keras's own `rematerialized_call` of the layer.
        layer_call: The layer's call.
        args: Its positional arguments.
        kwargs: Its arguments by name.

    Raises:
        ValueError: When called, if a layer inside adds a loss.
    """
    leaves = keras.tree.flatten((args, kwargs))
    written: list[Any] = []

    def apart(*tensors: Any) -> tuple[Any, list[Any]]:
        given = iter(tensors)
        flat = [next(given) if keras.ops.is_tensor(leaf) else leaf for leaf in leaves]
        own_args, own_kwargs = keras.tree.pack_sequence_as((args, kwargs), flat)
        with _keras.WritingScope() as scope:
            y = layer_call(*own_args, **own_kwargs)
        if scope.losses:
            raise ValueError(
                "A layer adds a loss, such as that of an activity_regularizer, inside a call under "
                "keras.RematScope, which JAX lets out of it in no way. Make that layer, and those "
                "that it is inside, outside of the scope."
            )
        written[:] = scope.written
        return y, [scope.get_current_value(variable) for variable in written]

    made = make(apart, *args, **kwargs)
    if made is apart:
        return layer_call

    def call(*args: Any, **kwargs: Any) -> Any:
        y, values = made(*filter(keras.ops.is_tensor, leaves))
        for variable, value in zip(written, values, strict=True):
            variable.assign(value)
        return y

    return call
