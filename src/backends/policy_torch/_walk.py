"""Walks a module tree: which modules are layers, what each holds, and what cannot be wrapped."""

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils import parametrize

from policy_core._backend import Site, Wrapping
from policy_core._dtypes import shorten
from policy_core._plan import LayerSpec, TensorSpec, plan

from . import _attention
from ._adapters import LayerAdapter, adapter_for
from ._classes import CODES, KeepsCodes, Wrapped, base_class, parts_of
from ._kernels import kernel_table
from ._ops import dtype_name
from ._packed import Packed


def walk(model: Any) -> list[Site]:
    """Gives every layer of a model once, with all its paths.

    A layer is a module without children, or one that has parameters of its own beside them.

    Raises:
        TypeError: The model is no `torch.nn.Module`.
        ValueError: A lazy module has no shapes yet.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"Expected a torch.nn.Module. Received: {shorten(model)}")
    paths: dict[int, list[str]] = {}
    layers: dict[int, nn.Module] = {}
    projections: dict[int, nn.Module] = {}
    for path, layer in _layers(model, "", projections, frozenset()):
        layers[id(layer)] = layer
        paths.setdefault(id(layer), []).append(path)
    inside = {id(m.out_proj) for m in model.modules() if isinstance(m, nn.MultiheadAttention)}
    return [_site(tuple(paths[key]), layer, key in inside) for key, layer in layers.items()]


def _layers(
    module: nn.Module, path: str, projections: dict[int, nn.Module], taken: frozenset[int]
) -> list[tuple[str, nn.Module]]:
    """Gives the layers in a module with their paths, without the parts of another that are taken."""
    found: list[tuple[str, nn.Module]] = []
    if parametrize.is_parametrized(module):
        return [(path, module)]
    if _attention.is_plain(module):
        if not _attention.reason_against(module):
            projection = projections.setdefault(id(module), _attention.input_projection(module))
            return [
                (_join(path, "in_proj"), projection),
                (_join(path, "out_proj"), module.out_proj),  # type: ignore[list-item]
            ]
        # Its own forward reads what the child holds: they are one layer.
        return [(path, module)]
    children = [(name, child) for name, child in module._modules.items() if child is not None]
    read = [part for _, part in parts_of(module)]
    own = [p for part in (module, *read) for p in part._parameters.values() if p is not None]
    if not children or own:
        found.append((path, module))
    taken |= {id(part) for part in read}
    for name, child in children:
        if id(child) not in taken:
            found += _layers(child, _join(path, name), projections, taken)
    return found


def _join(path: str, name: str) -> str:
    return f"{path}/{name}" if path else name


def _site(paths: tuple[str, ...], layer: nn.Module, in_attention: bool) -> Site:
    adapter = adapter_for(base_class(layer))
    tensors = tensors_of(layer, adapter)
    specs = layer._policy_plain if isinstance(layer, Wrapped) else _specs(layer, tensors)
    weight = next((spec for spec in specs if spec.name == "weight"), None)
    device = next((t.device.type for t in tensors.values()), "cpu")
    kind = adapter.kind
    contracted: tuple[int, ...] = ()
    left_out = ""
    if kind in ("linear", "embedding"):
        left_out = _reason_against(layer, adapter, weight, in_attention)
        contracted = tuple(range(1, len(weight.shape))) if weight is not None else ()
    spec = LayerSpec(
        path=paths[0],
        layer_type=type(layer).__name__,
        kind=kind,
        tensors=specs,
        contracted_axes=contracted,
        device=device,
        left_out=left_out or _attention.reason_against(layer),
        kernels=kernel_table(device),
    )
    wrapping = _wrapping_here(layer._policy_wrapping, spec) if isinstance(layer, Wrapped) else None
    return Site(paths=paths, layer=layer, spec=spec, tensors=tensors, wrapping=wrapping)


def _wrapping_here(wrapping: Wrapping, spec: LayerSpec) -> Wrapping:
    """Gives what a layer was wrapped with, with the kernel that runs where the layer is now."""
    made = wrapping.plan
    mode = made.policy.quantization
    frozen = made.quantized and not made.trainable and mode is not None and mode.scheme.trainable
    here = plan(made.asked, spec, frozen)
    if here.policy != made.policy or (here.kernel, here.note) == (made.kernel, made.note):
        return wrapping
    return replace(wrapping, plan=replace(made, kernel=here.kernel, note=here.note))


def tensors_of(layer: nn.Module, adapter: LayerAdapter) -> dict[str, Any]:
    """Gives a layer's stored tensors under their portable names, a linear weight as (out, in)."""
    tensors: dict[str, Any] = {}
    owners = [("", layer)]
    owners += parts_of(layer)
    for prefix, owner in owners:
        buffers = {
            n: b for n, b in owner._buffers.items() if n not in owner._non_persistent_buffers_set
        }
        for name, tensor in [*owner._parameters.items(), *buffers.items()]:
            if tensor is None:
                continue
            if isinstance(tensor, UninitializedParameter):
                raise ValueError(
                    f"{type(layer).__name__} has no shapes yet. Call the model once, then wrap it."
                )
            tensors[prefix + name] = tensor
    if isinstance(layer, Packed):
        return {"weight": layer.packed_codes, **tensors}
    if isinstance(layer, KeepsCodes):
        # In the order of the plan: the codes stand where the weight stood.
        codes = tensors.pop(CODES)
        return {"weight": codes, **tensors}
    if adapter.transposed and "weight" in tensors:
        tensors["weight"] = tensors["weight"].t()
    return tensors


def _specs(layer: nn.Module, tensors: dict[str, torch.Tensor]) -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec(name, tuple(tensor.shape), dtype_name(tensor.dtype))
        for name, tensor in tensors.items()
    )


def _reason_against(
    layer: nn.Module, adapter: LayerAdapter, weight: TensorSpec | None, in_attention: bool
) -> str:
    if _attention.is_output_projection(layer) and not in_attention:
        return "a MultiheadAttention reads this layer and does not call it; wrap that one"
    if weight is None:
        return f"{type(layer).__name__} has no parameter 'weight'"
    return "" if adapter.left_out is None else adapter.left_out(layer)


def reason_to_refuse(layer: nn.Module) -> str:
    """Says why a layer cannot be wrapped under any policy; `""` if it can."""
    kind = type(layer).__name__
    if isinstance(layer, torch.jit.ScriptModule):
        return f"{kind} is compiled by TorchScript. Wrap the model that it was made from."
    if "forward" in vars(layer):
        return (
            f"{kind} has a forward set on the object itself, as some offloading hooks do, which no "
            "policy would reach. Wrap it first, or remove the hooks."
        )
    if parametrize.is_parametrized(layer):
        return (
            f"{kind} has parametrizations of {sorted(layer.parametrizations)}. "  # type: ignore[arg-type]
            "Make them permanent with torch.nn.utils.parametrize.remove_parametrizations first."
        )
    anew = _computed_anew(layer)
    if anew:
        return (
            f"{kind} computes {anew} anew at each call (pruning, weight norm or spectral norm). Make "
            "it permanent first, with prune.remove or its like."
        )
    tensors = [*layer._parameters.values(), *layer._buffers.values()]
    if any(tensor is not None and tensor.is_meta for tensor in tensors):
        return f"{kind} is on the meta device and has no values. Load or initialize it first."
    if any(type(tensor).__name__ == "DTensor" for tensor in layer._parameters.values()):
        return f"{kind} is sharded. Wrap the model before fully_shard."
    if any(type(t) is not nn.Parameter for t in layer._parameters.values() if t is not None):
        odd = sorted({type(t).__name__ for t in layer._parameters.values() if t is not None})
        return f"{kind} has parameters of {odd}; expected torch.nn.Parameter."
    return ""


def _computed_anew(layer: nn.Module) -> list[str]:
    """Gives the tensors that hooks of torch's compute before each call, from parameters of theirs."""
    if isinstance(layer, KeepsCodes):
        return []
    # Under such names pruning, spectral norm and weight norm keep what they compute from.
    sources = [n for n in (*layer._parameters, *layer._buffers) if n.endswith(("_orig", "_v"))]
    names = {name.rpartition("_")[0] for name in sources}
    found = sorted(name for name in names if isinstance(vars(layer).get(name), torch.Tensor))
    multiplies = adapter_for(base_class(layer)).kind in ("linear", "embedding")
    return found or (["weight"] if multiplies and "weight" not in layer._parameters else [])
