"""What all JAX models share in `walk`, `validate` and `apply`: tensors in the files' layout."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from policy_core._backend import Site, Step
from policy_core._dtypes import standardize_dtype
from policy_core._forms import OUT_IN, Axes
from policy_core._plan import STATE_SUFFIXES, LayerKind, LayerSpec, Plan, TensorSpec

from . import _delayed, _packed
from ._kernels import is_native, kernel_table
from ._layers import Recipe, frozen_weight, recipe
from ._ops import SHAPES, Array, as_numpy, numpy_dtype, placed_like, platform
from ._quantize import dequantize, quantize


class Stored:
    """One tensor of a layer, seen as files and plans see it.

    Attributes:
        source: What holds it: an array, or a flax Variable, which gives it its identity.
        shape: Its shape in files: a weight is (out, in), a bias (out,).
        codes: What is packed in the array, where it is packed.
    """

    def __init__(
        self,
        source: Any,
        axes: Axes | None = None,
        flat: bool = False,
        codes: TensorSpec | None = None,
    ) -> None:
        self.source = source
        self.axes = axes
        self.codes = codes if codes is not None and _packed.is_packed(self.array) else None
        if self.codes is not None:
            self.shape = self.codes.shape
            return
        shape = tuple(self.array.shape)
        self.shape = axes.file_shape(shape) if axes else (-1,) if flat else shape
        if flat:
            self.shape = (int(np.prod(shape)),)

    @property
    def array(self) -> Array:
        """The framework's array, in its own shape."""
        value = getattr(self.source, "get_raw_value", None)
        return self.source if value is None else value()

    @property
    def dtype(self) -> Any:
        """Its dtype."""
        return self.array.dtype if self.codes is None else numpy_dtype(self.codes.dtype)

    @property
    def nbytes(self) -> int:
        """What it takes."""
        return int(self.array.nbytes)

    def read(self) -> Array:
        """Gives it in the shape that files have."""
        array = self.array
        if self.codes is not None:
            return _packed.unpacked(array, self.codes.shape, self.codes.dtype)
        if array.shape == self.shape and self.axes in (None, OUT_IN):
            return array
        if on_cpu(array):
            # As numpy sees it: outside jit each reshape and transpose would be compiled by itself.
            plain = as_numpy(array)
            plain = self.axes.to_file(SHAPES, plain) if self.axes else plain.reshape(self.shape)
            return placed_like(plain, array)
        return self.axes.to_file(SHAPES, array) if self.axes else array.reshape(self.shape)


def layer_spec(
    path: str,
    layer_type: str,
    kind: LayerKind,
    tensors: dict[str, Stored],
    plain: tuple[TensorSpec, ...] | None,
    left_out: str,
) -> LayerSpec:
    """Gives what the plan needs to know about a layer, as if it were not wrapped.

    Args:
        path: The layer's place.
        layer_type: The name of its plain class.
        kind: How it could be quantized.
        tensors: What it stores now.
        plain: The specs that it had before it was wrapped; None for a plain layer.
        left_out: Why it can't be quantized; `""` if it can.
    """
    if plain is None:
        plain = tuple(
            TensorSpec(name, tensor.shape, standardize_dtype(tensor.dtype))
            for name, tensor in tensors.items()
        )
    first = next(iter(tensors.values())).array if tensors else None
    device = platform(first)
    against = "" if single_device(first) else "the layer is on several devices"
    return LayerSpec(
        path=path,
        layer_type=layer_type,
        kind=kind,
        tensors=plain,
        contracted_axes=(1,) if kind in ("linear", "embedding") else (),
        device=device,
        left_out=left_out,
        kernels=kernel_table(device, against),
    )


def on_cpu(array: Any) -> bool:
    """Says whether an array is there to be read, on one CPU device."""
    concrete = isinstance(array, jax.Array) and not isinstance(array, jax.core.Tracer)
    return concrete and platform(array) == "cpu" and single_device(array)


def single_device(array: Any) -> bool:
    """Says whether an array is on one device; a tracer counts as if it were."""
    if array is None or isinstance(array, jax.core.Tracer):
        return True
    return len(array.devices()) == 1


def weight_spec(shape: tuple[int, ...], dtype: str) -> tuple[TensorSpec, ...]:
    """Gives the specs of a layer that has a weight alone."""
    return (TensorSpec("weight", tuple(shape), dtype),)


def float_tensor(site: Site, name: str) -> Array:
    """Gives a layer's tensor as a float in the files' shape, dequantized if need be."""
    tensor = site.tensors[name].read()
    plan = None if site.wrapping is None else site.wrapping.plan
    if name == "weight" and plan is not None and plan.quantized and not plan.trainable:
        dtype = next(spec.dtype for spec in site.spec.tensors if spec.name == name)
        return dequantize(tensor, site.tensors["weight_scale"].read(), dtype)
    return tensor


def validate(step: Step) -> None:
    """Raises ValueError for a tensor that cannot be stored as decided; changes nothing."""
    if step.stored is not None or step.wrapping is None:
        return
    plan = step.wrapping.plan
    for spec in step.site.spec.tensors:
        kept = next((t for t in plan.storage if t.name == spec.name), None)
        codes = plan.quantized and spec.name == "weight"
        same = kept is None or kept.dtype in (spec.dtype, plan.weight_codes)
        if not codes and same:
            continue
        array = _float(step, spec.name)
        if isinstance(array, jax.core.Tracer):
            continue  # inside jit there is no value to look at
        # Where numpy can look, nothing need be compiled to look.
        ops = np if on_cpu(array) else jnp
        array = as_numpy(array) if ops is np else array
        finite = ops.isfinite(array if array.dtype.itemsize > 2 else array.astype(np.float32))
        if codes and not bool(finite.all()):
            raise ValueError(
                "The weight holds a NaN or an infinity, which has no code. Repair it first."
            )
        if same:
            continue
        assert kept is not None
        with np.errstate(over="ignore"):
            cast = array.astype(numpy_dtype(kept.dtype)).astype(array.dtype)
        if bool(
            (finite & ~ops.isfinite(cast.astype(np.float64 if ops is np else jnp.float32))).any()
        ):
            raise ValueError(
                f"{spec.name!r} holds {float(abs(array).max())}, which {kept.dtype} cannot hold."
            )


def made(step: Step, plan: Plan, known: dict[str, Array] | None = None) -> dict[str, Array]:
    """Gives the tensors of `plan.storage` in the files' shapes: what is there, made, or given.

    Args:
        step: The change to one layer.
        plan: Its plan.
        known: What another layer, which shares the weight, has already.
    """
    known = known or {}
    if step.stored is not None:
        tensors = {name: jnp.asarray(array) for name, array in step.stored.items()}
        return _laid_out({**tensors, **known}, plan, step.site)
    tensors = dict(known)
    for spec in plan.storage:
        if spec.name in tensors:
            continue
        if spec.name == "weight" and plan.quantized and not plan.trainable:
            tensors["weight"], tensors["weight_scale"] = _codes(step, plan)
        elif spec.name.endswith(STATE_SUFFIXES):
            tensors[spec.name] = _state_tensor(step.site, spec)
        else:
            tensors[spec.name] = _float(step, spec.name).astype(numpy_dtype(spec.dtype))
    return _laid_out(tensors, plan, step.site)


def _laid_out(tensors: dict[str, Array], plan: Plan, site: Site) -> dict[str, Array]:
    """Gives tensors with the codes of a product packed, where the kernels will read them."""
    codes = plan.quantized and not plan.trainable and site.spec.kind == "linear"
    weight = tensors.get("weight")
    if codes and is_native(plan.kernel) and on_cpu(weight) and not _packed.is_packed(weight):
        tensors["weight"] = _packed.packed(weight)
    return tensors


def plain_tensors(site: Site) -> dict[str, Array]:
    """Gives the float tensors of a wrapped layer in the files' shapes and their first dtypes."""
    return {
        spec.name: float_tensor(site, spec.name).astype(numpy_dtype(spec.dtype))
        for spec in site.spec.tensors
    }


def read_all(tensors: dict[str, Stored]) -> dict[str, Array]:
    """Gives a layer's tensors in the files' shapes."""
    return {name: tensor.read() for name, tensor in tensors.items()}


def how(plan: Plan, training: bool = False) -> Recipe:
    """Gives the recipe of a quantized linear layer."""
    return recipe(plan, training)


def _float(step: Step, name: str) -> Array:
    if step.floats is not None:
        return jnp.asarray(step.floats[name])
    return float_tensor(step.site, name)


def _codes(step: Step, plan: Plan) -> tuple[Array, Array]:
    assert plan.weight_codes is not None
    site = step.site
    before = None if site.wrapping is None else site.wrapping.plan
    if before is not None and before.asked == plan.asked and step.floats is None:
        # Freezing: the codes with which the layer computes outside training.
        return frozen_weight(recipe(before), read_all(site.tensors))
    return quantize(_float(step, "weight"), plan.weight_codes, plan.scale_axes)


def _state_tensor(site: Site, spec: TensorSpec) -> Array:
    """Gives a state tensor that the layer has already, else one before any training call."""
    own = site.tensors.get(spec.name)
    if own is not None and own.shape == spec.shape:
        return own.array
    fresh = _delayed.no_state(spec.shape[0] if spec.shape else 1)
    return fresh.amax_history if spec.shape else fresh.scale
