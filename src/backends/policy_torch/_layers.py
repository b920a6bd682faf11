"""How a wrapped layer computes: one mixin for each way, chosen by its plan."""

import abc
import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.stateless import _reparametrize_module

from policy_core._plan import Plan

from ._adapters import LayerAdapter
from ._autograd import codes_linear, float8_linear
from ._casting import cast_nest, cast_tensor
from ._classes import KeepsCodes, Wrapped, compute_dtype, parts_of
from ._float8 import (
    GradientScale,
    delayed_scale,
    inference_scale_of,
    is_training_call,
    state_of,
)
from ._ops import TORCH_DTYPES


def mixin_for(plan: Plan, adapter: LayerAdapter, base: type[nn.Module]) -> type[Wrapped]:
    """Gives the mixin by which a layer of a class follows its plan."""
    if not plan.autocast:
        return AsItIs
    if not plan.quantized:
        return _FLOAT.get(base.forward, FloatLayer)
    if adapter.kind == "embedding":
        return CodesEmbedding
    return TrainableLinear if plan.trainable else CodesLinear


def autocast_off(device: torch.device) -> Any:
    """Gives a scope in which the layer's policy decides, and no `torch.autocast` around it."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return contextlib.nullcontext()


class AsItIs(Wrapped):
    """A layer under a policy that is no float: nothing is cast."""


class FloatLayer(Wrapped):
    """A layer that reads its parameters in the compute dtype and keeps them in the variable dtype.

    A norm computes in float32 inside. Buffers are read as they are: a layer may write to them.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        plan = self._policy_wrapping.plan
        outside = TORCH_DTYPES[plan.compute_dtype]
        norm = self._policy_adapter.kind == "norm"
        inside = TORCH_DTYPES[plan.accumulator] if norm else outside
        args, kwargs = cast_nest(args, inside), cast_nest(kwargs, inside)
        cast = {}
        for name, parameter in _parameters_of(self):
            if parameter is not None and parameter.dtype != inside:
                cast[name] = cast_tensor(parameter, inside)
        base: Any = super()
        with autocast_off(_device_of(self)):
            if torch.compiler.is_compiling() and cast:
                with _reparametrize_module(self, cast):  # type: ignore[arg-type]
                    y = base.forward(*args, **kwargs)
            else:
                with _reading(self, cast):
                    y = base.forward(*args, **kwargs)
        return cast_nest(y, outside)


class FloatLinear(Wrapped):
    """`nn.Linear` under a float policy."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        dtype = compute_dtype(self)
        x = cast_tensor(input, dtype)
        bias = None if self.bias is None else cast_tensor(self.bias, dtype)
        with autocast_off(x.device):
            return F.linear(x, cast_tensor(self.weight, dtype), bias)


class FloatConv(Wrapped):
    """`nn.Conv1d`, `nn.Conv2d` and `nn.Conv3d` under a float policy."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        dtype = compute_dtype(self)
        x = cast_tensor(input, dtype)
        bias = None if self.bias is None else cast_tensor(self.bias, dtype)
        base: Any = super()
        with autocast_off(x.device):
            y: torch.Tensor = base._conv_forward(x, cast_tensor(self.weight, dtype), bias)
        return y


class FloatEmbedding(Wrapped):
    """`nn.Embedding` under a float policy: rows are cast, not the table."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        base: Any = super()
        return cast_tensor(base.forward(input), compute_dtype(self))


class FloatEmbeddingBag(Wrapped):
    """`nn.EmbeddingBag` under a float policy: bags are cast, not the table, which it may rescale."""

    def forward(
        self,
        input: torch.Tensor,
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        base: Any = super()
        if per_sample_weights is not None:
            # torch demands the table's dtype.
            per_sample_weights = cast_tensor(per_sample_weights, self.weight.dtype)  # type: ignore[attr-defined]
        bags = base.forward(input, offsets, per_sample_weights)
        return cast_tensor(bags, compute_dtype(self))


class CodesEmbedding(KeepsCodes):
    """`nn.Embedding` that keeps only codes."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if input.dtype not in (torch.int64, torch.int32):
            raise TypeError(f"Expected ids of dtype int64 or int32. Received: {input.dtype}")
        return self._rows(input)

    def _rows(self, ids: torch.Tensor) -> torch.Tensor:
        # By their bits: float8 has no look-up of its own.
        codes = F.embedding(ids, self.weight_codes.view(torch.uint8)).view(self.weight_codes.dtype)
        rows = codes.float() * F.embedding(ids, self.weight_scale)
        return rows.to(compute_dtype(self))


class _QuantizedLinear:
    """What the quantized linear layers share: a product, and the adapter's way to use it."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        device = self._device_type()
        if torch.is_autocast_enabled(device):
            with torch.autocast(device, enabled=False):
                return self._computed(*args, **kwargs)
        return self._computed(*args, **kwargs)

    def _computed(self, *args: Any, **kwargs: Any) -> Any:
        forward = self._policy_adapter.forward  # type: ignore[attr-defined]
        if forward is None:
            return self._linear(*args, **kwargs)
        return forward(self, self._linear, *args, **kwargs)

    def _device_type(self) -> str:
        return _device_of(self).type

    @abc.abstractmethod
    def _linear(self, input: torch.Tensor) -> torch.Tensor:
        """Gives the product, from what the form keeps of the weight."""


class CodesLinear(_QuantizedLinear, KeepsCodes):
    """A linear layer that keeps only codes."""

    bias: torch.Tensor | None

    def _linear(self, input: torch.Tensor) -> torch.Tensor:
        plan = self._policy_wrapping.plan
        codes, scale = self.weight_codes, self.weight_scale
        if codes.ndim > 2:
            codes = codes.flatten(1)
        rows = as_rows(as_numbers(input, TORCH_DTYPES[plan.compute_dtype]), codes.shape[1])
        x_scale = None
        if plan.delayed and plan.input_codes is not None:
            x_scale = inference_scale_of(self, "input", rows, plan.input_codes)  # type: ignore[arg-type]
        scale = scale.reshape(()) if plan.delayed else scale.reshape(-1)
        y = codes_linear(rows, x_scale, codes, scale, self.bias, plan)
        return y.reshape(*input.shape[:-1], codes.shape[0])


class TrainableLinear(_QuantizedLinear, Wrapped):
    """A linear layer that computes in float8 and trains its float weight."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    training: bool

    def _linear(self, input: torch.Tensor) -> torch.Tensor:
        plan = self._policy_wrapping.plan
        assert plan.weight_codes is not None
        assert plan.input_codes is not None
        weight = self.weight.t() if self._policy_adapter.transposed else self.weight
        if weight.ndim > 2:
            weight = weight.flatten(1)
        rows = as_rows(as_numbers(input, TORCH_DTYPES[plan.compute_dtype]), weight.shape[1])
        x_scale = weight_scale = state = None
        moving = is_training_call(self, rows.shape[0])  # type: ignore[arg-type]
        group = self._policy_group
        if plan.delayed:
            x_state, weight_state = state_of(self, "input"), state_of(self, "weight")  # type: ignore[arg-type]
            x_scale = delayed_scale(x_state, rows, plan.input_codes, moving, group)
            weight_scale = delayed_scale(weight_state, weight, plan.weight_codes, moving, group)
            state = state_of(self, "output_grad")  # type: ignore[arg-type]
        gradient_scale = GradientScale(state, moving, group)
        y = float8_linear(rows, weight, self.bias, x_scale, weight_scale, gradient_scale, plan)
        return y.reshape(*input.shape[:-1], weight.shape[0])


_FLOAT: dict[Any, type[Wrapped]] = {
    nn.Linear.forward: FloatLinear,
    nn.Embedding.forward: FloatEmbedding,
    nn.EmbeddingBag.forward: FloatEmbeddingBag,
    nn.Conv1d.forward: FloatConv,
    nn.Conv2d.forward: FloatConv,
    nn.Conv3d.forward: FloatConv,
}


def as_rows(x: torch.Tensor, columns: int) -> torch.Tensor:
    """Gives an input of shape (..., columns) as a matrix."""
    check_columns(x, columns)
    if x.ndim == 2:
        return x
    return x.unsqueeze(0) if x.ndim == 1 else x.flatten(0, -2)


def as_numbers(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Gives floats in a dtype; integers and float8 as they are, which products take by their values.

    Raises:
        TypeError: The input is complex.
    """
    x = cast_tensor(x, dtype)
    if x.dtype.is_complex:
        raise TypeError(
            f"Expected real inputs: codes have no imaginary part. Received dtype {x.dtype}."
        )
    return x.float() if x.dtype == torch.bool else x


def check_columns(x: torch.Tensor, columns: int) -> None:
    """Raises ValueError unless an input has the shape (..., columns)."""
    if x.ndim == 0 or x.shape[-1] != columns:
        raise ValueError(
            f"Expected an input of shape (..., {columns}). Received shape {tuple(x.shape)}."
        )


def _parameters_of(module: Any) -> list[tuple[str, torch.Tensor | None]]:
    """Gives the parameters that a layer's own forward reads, by name."""
    own = list(module._parameters.items())
    for prefix, part in parts_of(module):
        own += [(f"{prefix}{name}", p) for name, p in part._parameters.items()]
    return own


@contextlib.contextmanager
def _reading(module: Any, cast: dict[str, torch.Tensor]) -> Iterator[None]:
    """Makes a module read other tensors as its parameters, one thread at a time."""
    if not cast:
        yield
        return
    # Threads that share a model would see each other's exchange of parameters.
    lock = module.__dict__.setdefault("_policy_lock", threading.RLock())
    with lock, _reparametrize_module(module, cast):
        yield


def _device_of(module: Any) -> torch.device:
    for tensors in (module._parameters, module._buffers):
        for tensor in tensors.values():
            if tensor is not None:
                device: torch.device = tensor.device
                return device
    return torch.device("cpu")
