"""Switches off the fused paths of torch's transformer layers where these would miss a policy.

Outside training `nn.TransformerEncoderLayer` and `nn.TransformerEncoder` hand the weights of their
layers to one fused routine, without calling the layers.
"""

from torch import nn

from ._classes import Wrapped

_SAVED = "_policy_fast_path"
_SWITCHES: tuple[tuple[type[nn.Module], str, object], ...] = (
    (nn.TransformerEncoderLayer, "activation_relu_or_gelu", 0),
    (nn.TransformerEncoder, "use_nested_tensor", False),
)


def update(model: nn.Module) -> None:
    """Switches fused paths off where a layer inside is wrapped, and back on where none is."""
    for module in model.modules():
        for kind, name, off in _SWITCHES:
            if not isinstance(module, kind) or not hasattr(module, name):
                continue
            wrapped = any(isinstance(inner, Wrapped) for inner in module.modules())
            saved = module.__dict__.get(_SAVED)
            if wrapped and saved is None:
                module.__dict__[_SAVED] = getattr(module, name)
                setattr(module, name, off)
            elif not wrapped and _SAVED in module.__dict__:
                setattr(module, name, module.__dict__.pop(_SAVED))
