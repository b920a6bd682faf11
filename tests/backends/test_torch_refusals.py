"""What torch models cannot be wrapped, and what arrays become."""

import dataclasses
import subprocess
import sys
import warnings
from collections import OrderedDict
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

import policy_core as pc

from .torch_models import inputs


class Named(nn.Linear):
    """Does not override forward."""


def lazy() -> nn.Module:
    return nn.LazyLinear(4)


def pruned() -> nn.Module:
    return prune.l1_unstructured(nn.Linear(8, 4), "weight", 0.5)


def pruned_recurrent() -> nn.Module:
    return prune.l1_unstructured(nn.LSTM(8, 4), "weight_hh_l0", 0.5)


def parametrized() -> nn.Module:
    return parametrizations.orthogonal(nn.Linear(8, 4))


def meta() -> nn.Module:
    return nn.Linear(8, 4, device="meta")


def patched() -> nn.Module:
    layer = nn.Linear(8, 4)
    layer.forward = layer.forward  # type: ignore[method-assign]  # as accelerate does
    return layer


def scripted() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates TorchScript
        return torch.jit.script(nn.Linear(8, 4))


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "int8_from_float32"])
@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lazy, "no shapes yet"),
        (pruned, "prune.remove"),
        (pruned_recurrent, "weight_hh_l0"),
        (parametrized, "remove_parametrizations"),
        (meta, "meta device"),
        (patched, "set on the object itself"),
        (scripted, "TorchScript"),
    ],
    ids=["lazy", "pruned", "pruned recurrent", "parametrized", "meta", "patched", "scripted"],
)
def test_what_cannot_be_wrapped_is_refused(make: Any, said: str, policy: str) -> None:
    """Layers whose weights are not there, or made anew at each call, are refused; nothing changes."""
    model = nn.Sequential(nn.Linear(8, 8), make())
    kinds = [type(layer) for layer in model]
    with pytest.raises(ValueError, match=said):
        pc.wrap(model, policy)
    assert [type(layer) for layer in model] == kinds


def test_attribute_that_the_policy_needs_is_refused() -> None:
    """A layer that has an attribute of a state tensor's name is refused."""
    layer = Named(4, 4)
    layer.input_scale = 3  # type: ignore[assignment]
    with pytest.raises(ValueError, match="'input_scale', which the policy needs"):
        pc.wrap(layer, "float8_from_float32")


def test_a_weight_that_does_not_fit_is_refused() -> None:
    """A weight of 1e5 is refused under float16."""
    layer = nn.Linear(4, 4)
    layer.weight.data[0, 0] = 1e5
    with pytest.raises(ValueError, match="which float16 cannot hold"):
        pc.wrap(layer, "float16")
    assert layer.weight.dtype == torch.float32


# Arrays.


def test_numpy_arrays_become_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays of any dtype, layout and byte order become tensors of the chosen backend."""
    monkeypatch.setenv("POLICY_BACKEND", "torch")
    frozen = np.arange(4.0)
    frozen.flags.writeable = False
    nest = {
        "f": np.arange(3.0)[::-1],
        "big": np.arange(3, dtype=">f4"),
        "frozen": frozen,
        "e4m3": np.ones(2, ml_dtypes.float8_e4m3fn),
        "bf16": np.ones((), ml_dtypes.bfloat16),
        "ids": np.arange(3),
        "text": "x",
    }
    out = pc.convert_input(nest, "mixed_bfloat16")
    assert out["f"].tolist() == [2, 1, 0]
    assert out["e4m3"].dtype == torch.float8_e4m3fn
    assert {out[n].dtype for n in ("f", "big", "frozen", "bf16")} == {torch.bfloat16}
    assert out["ids"].dtype == torch.int64
    with pytest.raises(ValueError, match="torch has no dtype"):
        pc.convert_input(np.array(["a"]), "float32")


def test_nests_of_tensors_are_cast() -> None:
    """Model outputs, named tuples and dataclasses keep their classes; each float leaf is cast."""

    class ModelOutput(OrderedDict):  # type: ignore[type-arg]  # as Hugging Face has it
        def __getattr__(self, name: str) -> Any:
            return self[name]

    class Pair(NamedTuple):
        x: torch.Tensor
        n: int

    @dataclasses.dataclass
    class Batch:
        pair: Pair
        ids: torch.Tensor
        text: str = "a"

    ids = torch.arange(3)
    nest = ModelOutput(logits=torch.ones(2), batch=Batch(Pair(torch.ones(2), 1), ids), none=None)
    out = pc.convert_input(nest, "mixed_bfloat16")
    assert type(out) is ModelOutput
    assert out.logits.dtype == out.batch.pair.x.dtype == torch.bfloat16
    assert out.batch.ids is ids
    assert nest.logits.dtype == torch.float32


def test_casts_stay_on_the_tensors_device() -> None:
    """A tensor is cast where it is; an array goes to the CPU."""
    y = pc.convert_input({"x": torch.ones(2, device="meta")}, "mixed_bfloat16")["x"]
    assert (y.device.type, y.dtype) == ("meta", torch.bfloat16)


def test_fork_after_use() -> None:
    """A child of a fork, such as a DataLoader's worker, computes too, and does not hang."""
    # In a process of its own: JAX, where another test imported it, warns of every fork.
    code = """
import os, torch, policy_core as pc
torch.set_num_threads(1)  # torch's own pool does not survive a fork
layer = pc.wrap(torch.nn.Linear(256, 256), "int8_from_float32")
x = torch.ones(64, 256)
with torch.no_grad():
    wanted = layer(x)
    pid = os.fork()
    if pid == 0:
        os._exit(0 if torch.equal(layer(x), wanted) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_casts_to_float8_saturate() -> None:
    """A cast to float8_e4m3fn gives the largest code where torch's own gives NaN."""
    y = pc.backend("torch").convert_input(torch.tensor([1000.0, -464, 465, 448]), "float8_e4m3fn")
    assert y.float().tolist() == [448, -448, 448, 448]
    with pytest.raises(ValueError, match="Cannot cast to"):
        pc.backend("torch").convert_input(torch.ones(1), "float8_e5m2fnuz")


def test_integer_policy_casts_nothing() -> None:
    """A layer with an integer policy inside a mixed model runs as it is."""
    model = pc.wrap(
        nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 5)), {"0": "int32", "1": "mixed_bfloat16"}
    )
    assert model[0](inputs(2, 8)).dtype == torch.float32
    assert model(inputs(2, 8)).dtype == torch.bfloat16


def test_repr_names_policies() -> None:
    """`print(model)` says which policy each layer has."""
    model = pc.wrap(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), "int8_from_float32")
    text = repr(model)
    assert "(0): Linear(in_features=8, out_features=8, bias=True" in text
    assert '<QuantizedDTypePolicy "int8_from_float32">' in text
