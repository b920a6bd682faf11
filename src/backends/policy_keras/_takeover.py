"""Layers that Keras itself has quantized: their codes, scales and state in our form.

Keras stores the reciprocal of an int8 scale, `codes ≈ x * scale`; ours is `1 / scale` rounded once
to float32, which differs by at most half a unit in the last place. Codes are taken as they are.
"""

import copy
from typing import Any

import keras
import numpy as np

from policy_core._dtypes import standardize_dtype
from policy_core._plan import ROLES, Plan, TensorSpec

from ._adapters import LayerAdapter, adapter_for
from ._adapters import reason_against as reason_left_out
from ._keras import drop_attribute, raw
from ._kernels import FRAMEWORK
from ._policies import from_keras
from ._stored import Stored, float_tensors

MODES = ("int8", "float8")
"""Keras's modes whose layers can be taken over."""
_ROLES = {"input": "inputs", "weight": "kernel", "output_grad": "outputs_grad"}


def mode_of(layer: Any) -> str | None:
    """Gives the mode by which Keras has quantized a plain layer; None if it has not."""
    mode: str | None = layer.quantization_mode if getattr(layer, "_is_quantized", False) else None
    return mode


def tensors_of(
    layer: Any, adapter: LayerAdapter
) -> tuple[dict[str, Stored], tuple[TensorSpec, ...]]:
    """Gives a layer's own tensors, and the specs of a plain layer in its place."""
    keep = ("weight", "bias")
    tensors = {n: t for n, t in float_tensors(layer, adapter).items() if n in keep}
    dtype = standardize_dtype(layer.variable_dtype)
    plain = tuple(TensorSpec(n, t.shape, dtype) for n, t in tensors.items())
    return tensors, plain


def reason_against(layer: Any, plan: Plan) -> str:
    """Says why a layer that Keras has quantized cannot take a plan; `""` if it can."""
    mode = mode_of(layer)
    if mode is None:
        return ""
    if mode not in MODES:
        return (
            f"Keras has quantized {layer.name!r} as {mode!r}, whose codes no kernel here reads. "
            "Wrap the float model instead."
        )
    why = reason_left_out(layer, adapter_for(type(layer)))
    if why:
        return f"Keras has quantized {layer.name!r} as {mode!r}, which cannot be taken over: {why}."
    same = (mode == "int8" and plan.weight_codes == "int8") or (mode == "float8" and plan.delayed)
    if same or not plan.quantized:
        return ""
    return (
        f"Keras has quantized {layer.name!r} as {mode!r}, and codes are never quantized again. "
        f"Give it {mode}_from_{plan.policy.source_policy.name}, a float policy, or wrap the float "
        "model."
    )


def float_weight(layer: Any, stored: Stored) -> Any:
    """Gives the weight of a layer, dequantized if it is codes, in the files' shape."""
    weight = stored.read()
    if mode_of(layer) != "int8":
        return weight
    return FRAMEWORK.dequantize(weight, scale_of(layer), standardize_dtype(layer.variable_dtype))


def scale_of(layer: Any) -> Any:
    """Gives the scales of a layer that Keras has quantized as int8: float32 of shape (out, 1)."""
    name = "embeddings_scale" if hasattr(layer, "embeddings_scale") else "kernel_scale"
    theirs = FRAMEWORK.to_numpy(raw(getattr(layer, name))).astype(np.float32).reshape(-1, 1)
    return FRAMEWORK.from_numpy(np.float32(1) / theirs)


def state_of(layer: Any, spec: TensorSpec) -> Any | None:
    """Gives one state tensor of a layer that Keras trains in float8, newest first; else None.

    Keras rolls its histories: the newest at 0, the one before at the end. Its scale was taken from
    one call less, and is replaced in the next training call.
    """
    if mode_of(layer) != "float8":
        return None
    role = next((r for r in ROLES if spec.name.startswith(f"{r}_")), None)
    if role is None:
        return None
    if not spec.shape:
        value = FRAMEWORK.to_numpy(raw(getattr(layer, f"{_ROLES[role]}_scale")))
        return FRAMEWORK.from_numpy(value.astype(np.float32))
    theirs = FRAMEWORK.to_numpy(raw(getattr(layer, f"{_ROLES[role]}_amax_history")))
    newest_first = np.concatenate([theirs[:1], theirs[:0:-1]])[: spec.shape[0]]
    padding = np.zeros(spec.shape[0] - newest_first.size, np.float32)
    return FRAMEWORK.from_numpy(np.concatenate([newest_first, padding]).astype(np.float32))


def drop(layer: Any) -> None:
    """Removes from a layer what only Keras's quantization gave it."""
    names = ["kernel_scale", "embeddings_scale", "kernel_zero", "embeddings_zero", "g_idx"]
    for theirs in _ROLES.values():
        names += [f"{theirs}_scale", f"{theirs}_amax_history"]
    for name in names:
        drop_attribute(layer, name)
    for name in ("inputs_quantizer", "_is_quantized"):
        vars(layer).pop(name, None)


def plain_policy(layer: Any) -> Any:
    """Gives the float policy of a plain layer, that behind a quantized one."""
    policy = layer._dtype_policy
    if isinstance(policy, keras.dtype_policies.DTypePolicyMap):
        policy = policy[layer.path] if layer.path else policy.default_policy
    if policy.quantization_mode is None:
        return copy.copy(policy)
    return keras.DTypePolicy(from_keras(policy).source_policy.name)
