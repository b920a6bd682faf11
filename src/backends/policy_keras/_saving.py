"""Wrapped layers from configs and from weights files."""

import functools
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import keras
import numpy as np

from policy_core import DTypePolicyMap, get
from policy_core._backend import Wrapping
from policy_core._dtypes import DTYPES, is_castable_float, shorten
from policy_core._plan import TensorSpec, plan
from policy_core.errors import ConfigError

from . import _containers, _keras
from ._change import become
from ._classes import VERSION, Wrapped, adapter_of, base_class, wrapped_class
from ._kernels import FRAMEWORK, PRODUCTS
from ._layers import KeepsCodes
from ._stored import SCALE, codes_variable, quantized_tensors
from ._walk import spec_of, tensors_of, walk


def rebuild(config: dict[str, Any]) -> Any:
    """Gives the layer of a config that a wrapped layer or container gave.

    Its variables get their values when Keras loads them.

    Raises:
        ConfigError: The config is of a newer version, or damaged.
    """
    config = dict(config)
    kept = config.pop("policy_core", None)
    if not isinstance(kept, dict) or not isinstance(kept.get("version"), int):
        raise ConfigError(f"Expected the config of a wrapped layer. Received: {shorten(config)}")
    if kept["version"] > VERSION:
        raise ConfigError(
            f"A wrapped layer's config has version {kept['version']}; this policy-core reads up to "
            f"{VERSION}. Install a newer one."
        )
    layer = keras.saving.deserialize_keras_object({**kept["base"], "config": config})
    if "dtype" in kept:
        object.__setattr__(layer, "__class__", wrapped_class(_containers.Graph, type(layer)))
        vars(layer)["_policy_plain_dtype"] = layer._dtype_policy
        vars(layer)["_dtype_policy"] = keras.DTypePolicy(kept["dtype"])
        return layer
    if "layers" not in kept:
        when_built(layer, lambda: attach(layer, kept))
        return layer
    kind = wrapped_class(_containers.Container, base_class(layer))
    object.__setattr__(layer, "__class__", kind)
    vars(layer)["_policy_pending"] = kept["layers"]
    settle_pending(layer)
    return layer


def settle_pending(container: Any) -> None:
    """Wraps the layers in a container that its config has named, as soon as it is built.

    Not before: until then all of them compute in the dtype for which they were made.
    """
    pending: dict[str, Any] = vars(container).get("_policy_pending", {})
    if container.built and not _keras.is_tracing():
        for site in walk(container, unbuilt=True) if pending else ():
            path = next((path for path in site.paths if path in pending), None)
            if path is not None and site.layer.built:
                kept = pending.pop(path)
                if not isinstance(site.layer, Wrapped):
                    attach(site.layer, kept)
        _containers.settle(container)
    if not pending:
        vars(container).pop("_policy_pending", None)


def when_built(layer: Any, action: Callable[[], None]) -> None:
    """Does something when a layer has its variables, at the latest before they are loaded."""
    if layer.built and not _keras.is_tracing():
        action()
        return
    fields, build = vars(layer), layer.build

    def done() -> None:
        if layer.built and not _keras.is_tracing():
            fields["build"] = build
            fields.pop("load_own_variables", None)
            action()

    @functools.wraps(build)
    def build_and_do(*args: Any, **kwargs: Any) -> None:
        build(*args, **kwargs)
        done()

    def do_and_load(store: Any) -> None:
        done()
        layer.load_own_variables(store)

    fields["build"] = build_and_do
    fields["load_own_variables"] = do_and_load


def attach(layer: Any, kept: dict[str, Any]) -> None:
    """Gives a plain, built layer the wrapped form that a config keeps; all codes are 0."""
    policy = get(kept["policy"])
    if isinstance(policy, DTypePolicyMap):
        raise ConfigError(f"A layer has one policy. Received: {shorten(kept['policy'])}")
    adapter = adapter_of(layer)
    tensors, specs = tensors_of(layer, adapter)
    given = kept.get("plain_dtype")
    plain_dtype = None if given is None else keras.DTypePolicy(given)
    if plain_dtype is not None:
        dtype = plain_dtype.variable_dtype
        specs = tuple(
            TensorSpec(s.name, s.shape, dtype if is_castable_float(s.dtype) else s.dtype)
            for s in specs
        )
    spec = spec_of(layer, adapter, "", tensors, specs)
    spec = replace(spec, left_out=spec.left_out or str(kept.get("left_out", "")))
    made = plan(policy, spec, bool(kept.get("frozen")))
    zeros = {
        spec.name: FRAMEWORK.from_numpy(
            np.full(spec.shape, float(spec.name.endswith("_scale")), _numpy_dtype(spec.dtype))
        )
        for spec in (made.storage if made.quantized else ())
    }
    wrapping = Wrapping(plan=made, bytes_before=int(kept.get("bytes_before", 0)))
    become(layer, wrapping, specs, zeros, {}, False)
    if plain_dtype is not None:
        vars(layer)["_policy_plain_dtype"] = plain_dtype


def load_variables(layer: Any, store: Any) -> None:
    """Gives a quantized layer the variables of a store.

    Args:
        layer: The layer.
        store: Arrays by the names that a wrapped layer writes; or by the positions `"0"`, `"1"`, …
            that a plain one writes, which are quantized on the way.

    Raises:
        ValueError: A name, shape or version does not fit.
    """
    names = set(store.keys())
    if "version" not in names:
        _load_plain(layer, store, names)
        return
    version = int(np.asarray(store["version"]))
    if version > VERSION:
        raise ValueError(
            f"The variables of {layer.name!r} have version {version}; this policy-core reads up to "
            f"{VERSION}. Install a newer one."
        )
    wanted = quantized_tensors(layer)
    if names - {"version"} != set(wanted):
        raise ValueError(
            f"Layer {layer.name!r} under {layer.policy_plan.asked.name!r} needs {sorted(wanted)}; "
            f"the file has {sorted(names - {'version'})}. Wrap the model as it was when saved."
        )
    arrays = {name: np.asarray(store[name]) for name in wanted}
    for name, stored in wanted.items():
        if arrays[name].shape != stored.shape:
            raise ValueError(
                f"{name!r} of layer {layer.name!r} must have shape {stored.shape}. "
                f"The file has {arrays[name].shape}."
            )
    for name, stored in wanted.items():
        array = arrays[name]
        if "float8" in stored.dtype:
            array = array.view(_numpy_dtype(stored.dtype))
        if name == "weight" and isinstance(layer, KeepsCodes):
            write_codes(layer, FRAMEWORK.from_numpy(array))
        else:
            stored.write(FRAMEWORK.from_numpy(array.astype(_numpy_dtype(stored.dtype))))


def write_codes(layer: Any, codes: Any) -> None:
    """Gives a layer other codes, of shape (out, in)."""
    multiplies = layer._policy_adapter.kind != "embedding"
    _, stored = PRODUCTS.store(codes, layer.policy_plan, multiplies)
    codes_variable(layer).assign(stored)


def _load_plain(layer: Any, store: Any, names: set[str]) -> None:
    floats = [s for s in layer._policy_plain if s.name in ("weight", "bias")]
    if names != {str(i) for i in range(len(floats))}:
        raise ValueError(
            f"Layer {layer.name!r} expected the variables of a wrapped layer, or those of a plain "
            f"{base_class(layer).__name__}. The file has {sorted(names)}."
        )
    plan, own = layer.policy_plan, quantized_tensors(layer)
    for i, spec in enumerate(floats):
        array = np.asarray(store[str(i)])
        if not re.fullmatch(r"b?float\d+", array.dtype.name) or DTYPES[array.dtype.name].bits < 16:
            raise ValueError(f"Expected floats for {layer.name!r}. The file has {array.dtype}.")
        value = FRAMEWORK.from_numpy(array)
        if spec.name == "bias":
            own["bias"].variable.assign(value)
            continue
        if tuple(array.shape) != vars(layer)["_policy_kernel_shape"]:
            raise ValueError(
                f"The weight of {layer.name!r} must have shape "
                f"{vars(layer)['_policy_kernel_shape']}. The file has {array.shape}."
            )
        if plan.trainable:
            own["weight"].variable.assign(value)
            continue
        form = layer._policy_form
        value = value if form is None else form.axes.to_file(keras.ops, value)
        codes, scale = FRAMEWORK.quantize(value, plan.weight_codes, plan.scale_axes)
        write_codes(layer, codes)
        getattr(layer, SCALE).assign(scale)


def _numpy_dtype(name: str) -> Any:
    import ml_dtypes

    return np.dtype(getattr(ml_dtypes, name, name))
