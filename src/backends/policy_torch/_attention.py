"""`nn.MultiheadAttention` with projections that are layers of their own.

torch's class keeps the weights of its three input projections in one parameter, and reads that of its
output projection without calling it, so neither could have a policy. A wrapped one has the children
`in_proj` and `out_proj`, calls both, and computes the attention between them.
"""

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from ._classes import Wrapped, base_class

_OWNER = "_policy_owner"


def is_plain(module: nn.Module) -> bool:
    """Says whether a module is an attention as torch made it."""
    return isinstance(module, nn.MultiheadAttention) and not isinstance(module, Attention)


def is_output_projection(module: nn.Module) -> bool:
    """Says whether a layer is the output projection of an attention."""
    return isinstance(module, NonDynamicallyQuantizableLinear)


def reason_against(module: nn.Module) -> str:
    """Says why an attention cannot have its projections as layers; `""` for any other module."""
    if not is_plain(module):
        return ""
    assert isinstance(module, nn.MultiheadAttention)
    if base_class(module).forward is not nn.MultiheadAttention.forward:
        return f"{type(module).__name__} overrides forward; it follows the source policy"
    if not module._qkv_same_embed_dim:
        return "keys or values of another width have weights of their own"
    if module.bias_k is not None or module.bias_v is not None or module.add_zero_attn:
        return "add_bias_kv and add_zero_attn are not supported"
    if type(module.out_proj) is not NonDynamicallyQuantizableLinear:
        return f"its out_proj is a {type(module.out_proj).__name__}"
    if hasattr(module, "in_proj"):
        return "it has an attribute 'in_proj' of its own"
    if module.in_proj_weight is None or "in_proj_weight" not in module._parameters:
        return "it computes its weights anew at each call"
    return ""


def input_projection(module: Any) -> nn.Module:
    """Gives a linear layer of an attention's own input parameters; the attention does not change."""
    projection = nn.Linear.__new__(nn.Linear)
    nn.Module.__init__(projection)
    projection.in_features = module.embed_dim
    projection.out_features = 3 * module.embed_dim
    projection.training = module.training
    projection._parameters["weight"] = module.in_proj_weight
    projection._parameters["bias"] = module.in_proj_bias
    # Past nn.Module's setattr: the owner is no child.
    projection.__dict__[_OWNER] = module
    return projection


def attached(layer: nn.Module) -> nn.Module:
    """Makes an input projection a child of its attention; any other layer stays as it is."""
    owner = layer.__dict__.pop(_OWNER, None)
    if owner is None:
        return layer
    for name in ("in_proj_weight", "in_proj_bias"):
        owner._parameters.pop(name, None)
    others = dict(owner._modules)
    owner._modules.clear()
    owner._modules.update({"in_proj": layer, **others})
    owner.__class__ = attention_class(type(owner))
    return layer


def detach_unwrapped(model: nn.Module) -> None:
    """Gives every attention whose projections are plain again its own class and parameters."""
    for module in model.modules():
        if not isinstance(module, Attention) or isinstance(module.in_proj, Wrapped):
            continue
        projection = module._modules.pop("in_proj")
        assert projection is not None
        module.__class__ = module._policy_base  # type: ignore[assignment]
        others = dict(module._parameters)  # type: ignore[has-type]
        own = {
            "in_proj_weight": projection._parameters["weight"],
            "in_proj_bias": projection._parameters["bias"],
        }
        module._parameters.clear()
        module._parameters.update({**own, **others})


class Attention:
    """The mixin of a wrapped attention."""

    _policy_base: type[nn.Module]
    _policy_calls_projections = True

    @property
    def in_proj_weight(self) -> torch.Tensor:
        """The weight of the input projection, (3 * embed_dim, embed_dim), as a float."""
        weight: torch.Tensor = self.in_proj.weight  # type: ignore[attr-defined]
        return weight

    @property
    def in_proj_bias(self) -> torch.Tensor | None:
        """The bias of the input projection, (3 * embed_dim,), or None."""
        bias: torch.Tensor | None = self.in_proj.bias  # type: ignore[attr-defined]
        return bias

    def __reduce_ex__(self, protocol: Any) -> Any:
        _, _, state, *rest = super().__reduce_ex__(2)
        return _rebuild, (self._policy_base,), state, *rest

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        for name in ("weight", "bias"):
            if f"{prefix}in_proj_{name}" in state_dict:
                state_dict[f"{prefix}in_proj.{name}"] = state_dict.pop(f"{prefix}in_proj_{name}")
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)  # type: ignore[misc]

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = True,
        attn_mask: torch.Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if is_causal is True and attn_mask is None:
            raise RuntimeError("is_causal is a hint about attn_mask: give the mask too.")
        self_attention = query is key and key is value
        batched = query.dim() == 3
        heads, width = self.num_heads, self.embed_dim  # type: ignore[attr-defined]
        first = self.batch_first  # type: ignore[attr-defined]
        if self_attention:
            q, k, v = self.in_proj(query).chunk(3, -1)  # type: ignore[attr-defined]
        else:
            q = self.in_proj(query)[..., :width]  # type: ignore[attr-defined]
            both = self.in_proj(key)[..., width:]  # type: ignore[attr-defined]
            k, v = both.chunk(2, -1)
            if key is not value:
                v = self.in_proj(value)[..., 2 * width :]  # type: ignore[attr-defined]
        q, k, v = (_heads(t, heads, batched, first) for t in (q, k, v))
        mask = _mask(attn_mask, key_padding_mask, q, k)
        dropout = self.dropout if self.training else 0.0  # type: ignore[attr-defined]
        weights = None
        if need_weights:
            scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
            weights = torch.softmax((scores if mask is None else scores + mask).float(), -1)
            weights = F.dropout(weights.to(q.dtype), dropout)
            y = weights @ v
            weights = weights.mean(1) if average_attn_weights else weights
            weights = weights if batched else weights.squeeze(0)
        else:
            # torch's transformer may give a tensor here, which a compiler cannot branch on; the
            # mask says the same.
            causal = is_causal is True and key_padding_mask is None
            y = F.scaled_dot_product_attention(
                q, k, v, None if causal else mask, dropout, is_causal=causal
            )
        # (batch, heads, length, size) to what came in.
        y = y.transpose(1, 2).flatten(2)
        if not batched:
            y = y.squeeze(0)
        elif not first:
            y = y.transpose(0, 1)
        return self.out_proj(y), weights  # type: ignore[attr-defined]


def _heads(x: torch.Tensor, heads: int, batched: bool, batch_first: bool) -> torch.Tensor:
    """Gives a projection as (batch, heads, length, size)."""
    if not batched:
        x = x.unsqueeze(0)
    elif not batch_first:
        x = x.transpose(0, 1)
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def _mask(
    attn_mask: torch.Tensor | None,
    key_padding_mask: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
) -> torch.Tensor | None:
    """Gives both masks as one that is added to the scores of shape (batch, heads, L, S)."""
    total = None
    if attn_mask is not None:
        total = _additive(attn_mask, q.dtype)
        if total.dim() == 3:
            total = total.unflatten(0, (q.shape[0], q.shape[1]))
    if key_padding_mask is not None:
        padding = _additive(key_padding_mask, q.dtype).reshape(-1, 1, 1, k.shape[2])
        total = padding if total is None else total + padding
    return total


def _additive(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Gives a mask that is added: a boolean one is True where nothing may be seen."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, float("-inf"))


_CLASSES: dict[type[nn.Module], type[Any]] = {}


def attention_class(base: type[nn.Module]) -> type[Any]:
    """Gives the class of wrapped attentions for a class of attentions, made once."""
    if base not in _CLASSES:
        attributes = {
            "__module__": base.__module__,
            "__qualname__": base.__qualname__,
            "_policy_base": base,
        }
        _CLASSES[base] = type(base.__name__, (Attention, base), attributes)
    return _CLASSES[base]


def _rebuild(base: type[nn.Module]) -> Any:
    kind: Any = attention_class(base)
    return kind.__new__(kind)
