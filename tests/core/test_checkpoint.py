"""Files: what is in them, and every way in which one can be wrong."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from torch import nn

import policy_core as pc
import policy_numpy as pn
from policy_core.errors import CheckpointError


def model(seed: int = 0) -> pn.Sequential:
    return pn.Sequential(
        [
            pn.Embedding(10, 8, seed=seed),
            pn.Dense(8, 8, activation="relu", seed=seed + 1),
            pn.LayerNorm(8),
            pn.Dense(8, 4, bias=False, seed=seed + 2),
        ]
    )


IDS = np.arange(10)
MAP = {"0": "int8_from_float32", "1": "float8/weight_only_from_float32", "[23]": "bfloat16"}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A file of an int8 model."""
    path = tmp_path / "model.safetensors"
    pc.save(pc.wrap(model(), "int8_from_float32"), path)
    return path


def rewrite(path: Path, change: Callable[[dict, dict], None]) -> None:
    """Changes the arrays and the header of a file."""
    with safe_open(path, framework="np") as opened:
        header = json.loads(opened.metadata()["policy_core"])
    arrays = load_file(path)
    change(arrays, header)
    save_file(arrays, path, metadata={"policy_core": json.dumps(header)})


array = pn.backend.to_numpy


def state(of: pn.Sequential) -> dict[str, bytes]:
    return {
        f"{path}/{name}": array(tensor).tobytes()
        for path, layer in of.flatten()
        for name, tensor in layer.tensors.items()
    }


def test_tensors_are_plain(saved: Path) -> None:
    """Any safetensors reader sees int8 codes and float32 scales under plain names."""
    arrays = load_file(saved)
    assert arrays["1/weight"].dtype == np.int8
    assert arrays["1/weight"].shape == (8, 8)
    assert arrays["1/weight_scale"].dtype == np.float32
    assert arrays["1/bias"].dtype == np.float32
    assert set(arrays) == {
        *("0/weight", "0/weight_scale", "1/weight", "1/weight_scale", "1/bias"),
        *("2/weight", "2/bias", "3/weight", "3/weight_scale"),
    }


def test_metadata_is_versioned_json(saved: Path) -> None:
    """The metadata holds a version, and each layer's policy as Keras writes it."""
    with safe_open(saved, framework="np") as opened:
        header = json.loads(opened.metadata()["policy_core"])
    assert header["version"] == 1
    assert header["layers"]["2"]["policy"] == pc.serialize(pc.get("int8_from_float32"))


def test_map_round_trips(tmp_path: Path) -> None:
    """A model with a policy a layer loads with the same policies and answers."""
    wrapped = pc.wrap(model(), MAP)
    pc.save(wrapped, tmp_path / "m.safetensors")
    loaded = pc.load(model(5), tmp_path / "m.safetensors")
    assert [r.policy for r in pc.report(loaded).rows] == [r.policy for r in pc.report(wrapped).rows]
    assert loaded(IDS).tobytes() == wrapped(IDS).tobytes()


def test_plain_model_stays_plain(tmp_path: Path) -> None:
    """A model that was never wrapped saves and loads without policies."""
    pc.save(model(), tmp_path / "m.safetensors")
    loaded = pc.load(model(5), tmp_path / "m.safetensors")
    assert state(loaded) == state(model())
    assert loaded.layers[0].dtype_policy is None


@pytest.mark.parametrize("policy", ["int8_from_float32", "float8_from_float32", "mixed_bfloat16"])
def test_float_file_loads_into_a_wrapped_model(policy: str, tmp_path: Path) -> None:
    """A float checkpoint loads into a wrapped model as if it had been wrapped afterwards."""
    save_file(
        {f"{p}/{n}": a for p, layer in model().flatten() for n, a in layer.tensors.items()},
        tmp_path / "float.safetensors",
    )
    loaded = pc.load(pc.wrap(model(5), policy), tmp_path / "float.safetensors")
    assert state(loaded) == state(pc.wrap(model(), policy))


def test_mixed_precision_file_holds_float32(tmp_path: Path) -> None:
    """Saved under mixed precision, the variables are float32, and a float32 model takes them."""
    pc.save(pc.wrap(model(), "mixed_bfloat16"), tmp_path / "m.safetensors")
    loaded = pc.load(pc.wrap(model(5), "float32"), tmp_path / "m.safetensors")
    assert {a.dtype.name for layer in loaded.layers for a in layer.tensors.values()} == {"float32"}
    assert loaded.layers[1].dtype_policy == pc.get("float32")
    assert state(loaded) == state(model())


def test_16_and_8_bit_floats_are_exact(tmp_path: Path) -> None:
    """bfloat16, float16 and float8 bits go through a file unchanged."""
    for policy in ("bfloat16", "float16", "float8/weight_only_from_bfloat16"):
        wrapped = pc.wrap(model(), policy)
        pc.save(wrapped, tmp_path / "m.safetensors")
        loaded = pc.load(model(5), tmp_path / "m.safetensors")
        assert state(loaded) == state(wrapped)
    assert array(loaded.layers[1].tensors["weight"]).dtype == ml_dtypes.float8_e4m3fn


def test_tied_weight_is_stored_once(tmp_path: Path) -> None:
    """A tied weight is in the file once, and tied again after loading."""

    def tied(seed: int) -> pn.Sequential:
        table, head = pn.Embedding(10, 8, seed=seed), pn.Dense(8, 10, bias=False)
        head.tensors["weight"] = table.tensors["weight"]
        return pn.Sequential([table, head])

    path = tmp_path / "m.safetensors"
    wrapped = pc.wrap(tied(0), "int8_from_float32")
    pc.save(wrapped, path)
    assert set(load_file(path)) == {"0/weight", "0/weight_scale"}
    loaded = pc.load(tied(5), path)
    assert loaded.layers[0].tensors["weight"] is loaded.layers[1].tensors["weight"]
    assert state(loaded) == state(wrapped)


def test_failed_save_leaves_the_old_file(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save that fails half way leaves the file that was there, and no other."""

    def fail(*args, **kwargs):
        raise OSError("no space")

    before = saved.read_bytes()
    monkeypatch.setattr("safetensors.numpy.save_file", fail)
    with pytest.raises(OSError, match="no space"):
        pc.save(model(), saved)
    assert saved.read_bytes() == before
    assert list(saved.parent.iterdir()) == [saved]


def test_file_has_ordinary_permissions(saved: Path) -> None:
    """A saved model can be read by whoever can read a file made next to it."""
    other = saved.with_name("other")
    other.touch()
    assert saved.stat().st_mode == other.stat().st_mode


def _set(name: str, array: np.ndarray) -> Callable[[dict, dict], None]:
    return lambda arrays, header: arrays.__setitem__(name, array)


def _drop(name: str) -> Callable[[dict, dict], None]:
    return lambda arrays, header: arrays.pop(name)


def _header(**fields: object) -> Callable[[dict, dict], None]:
    return lambda arrays, header: header.update(fields)


def _policy(config: object) -> Callable[[dict, dict], None]:
    return lambda arrays, header: header["layers"]["1"].update(policy=config)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        pytest.param(_drop("1/weight"), "lacks ['weight']", id="missing-tensor"),
        pytest.param(_drop("1/weight_scale"), "lacks", id="missing-scale"),
        pytest.param(_set("1/gamma", np.ones(3)), "has ['gamma'] besides", id="extra-tensor"),
        pytest.param(_set("9/weight", np.ones(3)), "no layer '9'", id="extra-layer"),
        pytest.param(
            _set("1/weight", np.ones((8, 9), np.int8)), "must have shape (8, 8)", id="shape"
        ),
        pytest.param(
            _set("1/weight", np.ones((8, 8), np.int16)),
            "must have shape (8, 8) and dtype",
            id="dtype",
        ),
        pytest.param(
            _set("1/weight_scale", np.full((8, 1), np.nan, np.float32)),
            "weight_scale",
            id="nan-scale",
        ),
        pytest.param(_header(version=2), "version 2", id="newer-version"),
        pytest.param(_header(version="1"), "has no version", id="version-type"),
        pytest.param(_header(layers=[]), "'layers' must map", id="layers-type"),
        pytest.param(_header(tied={"a": 1}), "'tied' must map", id="tied-type"),
        pytest.param(_header(tied={"3/bias": "7/weight"}), "not in the file", id="tied-to-nothing"),
        pytest.param(_policy("int8_form_float32"), "The policy of '1' cannot be read", id="policy"),
        pytest.param(
            _policy({"class_name": "os.system", "config": {}}), "Unknown class", id="class"
        ),
        pytest.param(_policy({"class_name": "DTypePolicyMap", "config": {}}), "map", id="map"),
        pytest.param(_policy(7), "cannot be read", id="policy-type"),
    ],
)
def test_wrong_file_changes_nothing(
    saved: Path, change: Callable[[dict, dict], None], said: str
) -> None:
    """A file that does not fit is refused with what is wrong, and the model stays as it was."""
    rewrite(saved, change)
    fresh = model(5)
    before = state(fresh)
    with pytest.raises(CheckpointError) as raised:
        pc.load(fresh, saved)
    assert said in str(raised.value)
    assert state(fresh) == before
    assert fresh.layers[1].dtype_policy is None


@pytest.mark.parametrize(
    "content",
    [b"", b"short", b"\xff" * 64, b"\x80\x96\x98\x00\x00\x00\x00\x00{"],
    ids=["empty", "short", "huge-header", "cut"],
)
def test_damaged_file_is_refused(content: bytes, tmp_path: Path) -> None:
    """What is no whole safetensors file is refused as such."""
    path = tmp_path / "bad.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="not a whole safetensors file"):
        pc.load(model(), path)


def test_damaged_metadata_is_refused(saved: Path) -> None:
    """Metadata that is not JSON, or nested too deep, is refused."""
    for text in ("{", "[" * 100_000, "3"):
        save_file(load_file(saved), saved, metadata={"policy_core": text})
        with pytest.raises(CheckpointError, match="metadata"):
            pc.load(model(), saved)


def test_unknown_field_is_a_warning(saved: Path) -> None:
    """A field that this version does not know is named in a warning, and the rest is loaded."""
    rewrite(saved, _header(made_by="a later version"))
    with pytest.warns(UserWarning, match="'made_by'"):
        loaded = pc.load(model(5), saved)
    assert loaded.layers[1].dtype_policy == pc.get("int8_from_float32")


def test_missing_file_and_folder(tmp_path: Path) -> None:
    """A path without a file is the operating system's error."""
    with pytest.raises(FileNotFoundError):
        pc.load(model(), tmp_path / "nothing.safetensors")
    with pytest.raises(IsADirectoryError):
        pc.load(model(), tmp_path)


def test_codes_do_not_load_under_another_policy(saved: Path) -> None:
    """int8 codes are refused by a layer that was wrapped otherwise."""
    with pytest.raises(CheckpointError):
        pc.load(pc.wrap(model(5), "float8_from_float32"), saved)


def test_own_tensor_named_like_a_scale_may_be_negative(tmp_path: Path) -> None:
    """A layer's own tensor is no state, whatever its name: it is saved and loaded as it is."""

    class Scaled(pn.Layer):
        def __init__(self, value: float) -> None:
            super().__init__()
            self.tensors["logit_scale"] = np.float32([value])

        def compute(self, x: Any, tensors: dict[str, Any]) -> Any:
            return x * tensors["logit_scale"]

    pc.save(pc.wrap(Scaled(-2), "float32"), tmp_path / "m.safetensors")
    loaded = pc.load(Scaled(1), tmp_path / "m.safetensors")
    assert loaded.tensors["logit_scale"] == -2


def nested(name: str, parameter: str = "p", dtype: torch.dtype = torch.float32) -> nn.Module:
    """A torch module in which two layers have one path where `name` is `"a/b"`."""
    model = nn.ModuleDict({name: nn.Linear(2, 2), "a": nn.ModuleDict({"b": nn.Linear(2, 2)})})
    model.register_parameter(parameter, nn.Parameter(torch.ones(2, dtype=dtype)))
    return model


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (nested("a/b"), "Two layers have the path 'a/b'"),
        (nested("c", "x/y"), "'x/y', which no file can name"),
        (nested("c", "__metadata__"), "'__metadata__', which no file can name"),
        (nested("c", dtype=torch.complex128), "complex128"),
    ],
    ids=["path", "slash", "metadata", "complex128"],
)
def test_what_no_file_can_hold_is_refused(model: nn.Module, said: str, tmp_path: Path) -> None:
    """What a file would lose, or no reader could find again, is an error that leaves no file."""
    with pytest.raises(CheckpointError, match=said):
        pc.save(model, tmp_path / "model")
    assert not list(tmp_path.iterdir())


def test_complex_tensors_are_exact(tmp_path: Path) -> None:
    """Complex tensors of 64 bits go through a file."""
    model = nested("c", dtype=torch.complex64)
    with torch.no_grad():
        model.p.copy_(torch.tensor([1 + 2j, 3 - 4j]))
    pc.save(model, tmp_path / "model")
    loaded = pc.load(nested("c", dtype=torch.complex64), tmp_path / "model")
    assert torch.equal(loaded.p, model.p)
