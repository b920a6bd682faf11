"""A layer's variables as files and plans see them: portable names, weights as (out, in)."""

import math
from dataclasses import dataclass
from typing import Any

import keras

from policy_core._dtypes import DTYPES, standardize_dtype
from policy_core._forms import Axes
from policy_core._plan import STATE_SUFFIXES, Plan, TensorSpec

from ._adapters import REVERSE_TABLE, UNTIED, LayerAdapter, form_of
from ._keras import own_variables, raw
from ._kernels import CODES, FRAMEWORK, PACKED, PRODUCTS

SCALE = "weight_scale"
GRADIENT_STATE = "output_grad_state"
_NORM_NAMES = {"gamma": "weight", "scale": "weight", "beta": "bias"}


@dataclass(frozen=True)
class Stored:
    """One tensor of a layer.

    Attributes:
        variable: The `keras.Variable` that holds it.
        axes: For a float weight, how its axes make up (out, in).
        flat: Whether it is seen with one axis.
        codes: The codes that the variable holds, in whichever form the framework keeps them.
        part: The part of the variable that it is; None for all of it.
    """

    variable: Any
    axes: Axes | None = None
    flat: bool = False
    codes: TensorSpec | None = None
    part: Any = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape in files."""
        shape = tuple(self.variable.shape)
        if self.codes is not None:
            return self.codes.shape
        if self.part is not None:
            return () if self.part == 0 else (shape[0] - 1,)
        if self.axes is not None:
            return self.axes.file_shape(shape)
        return (math.prod(shape),) if self.flat else shape

    @property
    def dtype(self) -> str:
        """The canonical name of its dtype."""
        return standardize_dtype(self.variable._dtype if self.codes is None else self.codes.dtype)

    @property
    def nbytes(self) -> int:
        """What it takes, a kernel's padding included."""
        shape = self.shape if self.codes is None else tuple(self.variable.shape)
        return math.prod(shape) * DTYPES[standardize_dtype(self.variable._dtype)].bits // 8

    def read(self) -> Any:
        """Gives it in the shape that files have, as a tensor of the framework."""
        tensor = raw(self.variable)
        if self.codes is not None:
            return PRODUCTS.restore(tensor, self.codes.shape, self.codes.dtype)  # type: ignore[arg-type]
        if self.part is not None:
            return tensor[self.part]
        if self.axes is not None:
            return self.axes.to_file(keras.ops, tensor)
        return keras.ops.reshape(tensor, self.shape) if self.flat else tensor

    def write(self, value: Any) -> None:
        """Puts a tensor of the files' shape into the variable."""
        if self.codes is not None:
            raise ValueError("Codes are stored anew, not written to.")
        if self.part is not None:
            whole = FRAMEWORK.to_numpy(raw(self.variable)).copy()
            whole[self.part] = FRAMEWORK.to_numpy(value)
            value = whole
        elif self.axes is not None:
            value = self.axes.from_file(keras.ops, value, tuple(self.variable.shape))
        elif self.flat:
            value = keras.ops.reshape(value, tuple(self.variable.shape))
        self.variable.assign(value)


def float_tensors(layer: Any, adapter: LayerAdapter) -> dict[str, Stored]:
    """Gives the tensors of a layer whose weight is a float, under their portable names."""
    form = form_of(layer, adapter)
    weight = vars(layer).get(adapter.weight) if adapter.weight else None
    bias = vars(layer).get("bias")
    apart = vars(layer).get(REVERSE_TABLE) if adapter is UNTIED else None
    tensors: dict[str, Stored] = {}
    if weight is not None:
        tensors["weight"] = Stored(weight, axes=None if form is None else form.axes)
    for variable in own_variables(layer):
        if variable is weight or variable is apart:
            continue
        if variable is bias and adapter.weight:
            tensors["bias"] = Stored(variable, flat=form is not None and form.flat_bias)
            continue
        name = variable.name
        if adapter.kind == "norm":
            name = _NORM_NAMES.get(name, name)
        tensors[_unused(name, tensors)] = Stored(variable)
    return tensors


def _unused(name: str, tensors: dict[str, Stored]) -> str:
    if name not in tensors:
        return name
    return next(new for i in range(1, 10_000) if (new := f"{name}_{i}") not in tensors)


def quantized_tensors(layer: Any) -> dict[str, Stored]:
    """Gives the tensors of a quantized layer, those of its plan's storage."""
    plan = layer.policy_plan
    form = layer._policy_form
    tensors: dict[str, Stored] = {}
    for spec in plan.storage:
        if spec.name == "weight" and not plan.trainable:
            tensors["weight"] = Stored(codes_variable(layer), codes=spec)
        elif spec.name == "weight":
            variable = getattr(layer, layer._policy_adapter.weight)
            tensors["weight"] = Stored(variable, axes=form.axes)
        elif spec.name == "bias":
            tensors["bias"] = Stored(layer.bias, flat=form is not None and form.flat_bias)
        elif spec.name.startswith("output_grad_") and hasattr(layer, GRADIENT_STATE):
            part = 0 if spec.name.endswith("_scale") else slice(1, None)
            tensors[spec.name] = Stored(getattr(layer, GRADIENT_STATE), part=part)
        else:
            tensors[spec.name] = Stored(getattr(layer, spec.name))
    return tensors


def codes_variable(layer: Any) -> Any:
    """Gives the variable that holds a layer's codes."""
    return getattr(layer, PACKED if hasattr(layer, PACKED) else CODES)


def state_specs(plan: Plan) -> list[TensorSpec]:
    """Gives the delayed-scaling state in a quantized plan's storage, and not the codes' scales."""
    return [
        spec
        for spec in plan.storage
        if spec.name.endswith(STATE_SUFFIXES) and (plan.trainable or spec.name != SCALE)
    ]
