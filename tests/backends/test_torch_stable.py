"""How torch gets its operators in C: the library, its declarations, its threads, and what is without it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import policy_kernels
from policy_torch import _stable

CSRC = Path(__file__).parents[2] / "src/backends/policy_torch/csrc"

needs_c = pytest.mark.skipif(
    bool(_stable.reason_against()), reason=f"operators in Python: {_stable.reason_against()}"
)


def run(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={k: v for k, v in os.environ.items() if k != "POLICY_NUM_THREADS"} | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_declarations_are_those_of_the_installed_torch(tmp_path: Path) -> None:
    """Every function that the operators call has the type that torch's own headers give it."""
    compiler = shutil.which("c++")
    include = Path(torch.__file__).parent / "include"
    if compiler is None or not (include / "torch/csrc/stable/c/shim.h").exists():
        pytest.skip("there is no C++ compiler, or torch came without headers")
    source = """
#include <type_traits>
#include "torch_shim.h"
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/c/shim.h>
#define COMPARE(result, name, arguments) \\
  static_assert(std::is_same_v<decltype(shim::Functions::name), decltype(&::name)>);
POLICY_TORCH_SHIM(COMPARE)
#if TORCH_FEATURE_VERSION >= TORCH_VERSION_2_13_0
COMPARE(, torch_delete_stable_ivalue, )
#endif
static_assert(shim::kVersion == TORCH_VERSION_2_10_0);
static_assert(std::is_same_v<shim::Value, StableIValue>);
"""
    probe = "static_assert(std::is_same_v<decltype(shim::Functions::aoti_torch_get_dim), int>);"
    for text, compiles in ((source, True), (source + probe, False)):
        (tmp_path / "compare.cc").write_text(text)
        command = [compiler, "-std=c++20", "-fsyntax-only", "-I", str(CSRC), "-I", str(include)]
        command.append(str(tmp_path / "compare.cc"))
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.returncode == 0) is compiles, done.stderr


LAYERS = """
import pathlib, sys, torch
from torch import nn
if HIDE:
    exists = pathlib.Path.exists
    pathlib.Path.exists = lambda self: self.name != "libpolicy_torch.so" and exists(self)
import policy_core as pc
for mode in ("int8", "int8/weight_only", "float8", "float8/dynamic", "float8/weight_only"):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 30), nn.ReLU(), nn.Linear(30, 20))
    pc.freeze(pc.wrap(model, f"{mode}_from_mixed_bfloat16"))
    x = torch.randn(2, 3, 40, requires_grad=True)
    y = model(x)
    y.float().square().sum().backward()
    print(mode, y.view(torch.int16).tolist(), x.grad.tolist())
    print(pc.report(model).rows[0].note, file=sys.stderr)
"""


@needs_c
def test_without_the_library_the_report_says_so() -> None:
    """Without the C operators those in Python give the same bits, and each row says what it costs."""
    hidden = LAYERS.replace("HIDE", "True")
    done = subprocess.run(
        [sys.executable, "-c", hidden], capture_output=True, text=True, check=True
    )
    assert done.stdout == run(LAYERS.replace("HIDE", "False"))
    said = done.stderr.splitlines()
    assert len(said) == 5
    assert all("operators in Python" in one for one in said)
    assert all("libpolicy_torch.so was not built" in one for one in said)


def test_a_library_that_cannot_be_used_is_an_error(tmp_path: Path, monkeypatch: Any) -> None:
    """A library that is damaged or of another version is never passed over."""
    assert _stable.load([str(tmp_path)]) is None
    (tmp_path / _stable.LIBRARY_NAME).write_bytes(b"no library")
    with pytest.raises(policy_kernels.KernelsBrokenError, match="expected a library that loads"):
        _stable.load([str(tmp_path)])


@needs_c
def test_a_library_of_another_version_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The version is compared before anything is called."""
    import policy_torch

    monkeypatch.setattr(_stable._loader, "ABI_VERSION", _stable._loader.ABI_VERSION + 1)
    with pytest.raises(policy_kernels.KernelsBrokenError, match="expected ABI version"):
        _stable.load(policy_torch.__path__)


@needs_c
def test_a_torch_without_the_interface_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch that lacks a function is no error, and named; an operator that torch refuses is one."""

    class Library:
        missing, refused = b"torch_library_impl", b"linear_s8"

        def policy_torch_missing(self) -> bytes:
            return self.missing

        def policy_torch_bind(self, *arguments: Any) -> bytes:
            return self.refused

    library = Library()
    monkeypatch.setattr(_stable, "load", lambda folders: library)
    again = _stable.reason_against.__wrapped__
    assert again() == "this torch has no torch_library_impl; torch 2.10 has"
    library.missing = b""
    with pytest.raises(policy_kernels.KernelsBrokenError, match="refused the operator linear_s8"):
        again()


@needs_c
def test_the_library_needs_torch_only_when_it_is_bound() -> None:
    """In a process without torch the library loads, and says what it misses."""
    import policy_torch

    place = next(p for folder in policy_torch.__path__ for p in Path(folder).glob("*.so"))
    code = f"""
import ctypes
library = ctypes.CDLL({str(place)!r})
library.policy_torch_missing.restype = ctypes.c_char_p
print(library.policy_torch_missing().decode())
"""
    assert run(code).strip() == "libtorch_cpu.so"


THREADS = """
import os, torch, policy_kernels, policy_core as pc
torch.set_num_threads(1)  # nothing before the product makes threads
policy_kernels.set_num_threads(1)
layer = pc.wrap(torch.nn.Linear(1024, 1024), "int8_from_float32")
x = torch.zeros(256, 1024)
torch.set_num_threads({torch_threads})
policy_kernels.set_num_threads(None)
{before}
tasks = lambda: len(os.listdir("/proc/self/task"))
count = tasks()
with torch.no_grad():
    layer(x)
    # Codes that are not packed yet, and codes that are made and read, stay on as many.
    ops, codes, scale = torch.ops.policy_core_v1, layer.weight_codes, layer.weight_scale
    ops.linear_s8(x, codes, scale, None, torch.float32)
    ops.quantize_rows_f8(x)
print(tasks() - count)
"""


@needs_c
@pytest.mark.parametrize(
    ("torch_threads", "before", "environment", "made"),
    [
        (1, "", {}, 0),
        (3, "", {}, 2),
        (1, "policy_kernels.set_num_threads(4)", {}, 3),
        (1, "", {"POLICY_NUM_THREADS": "3"}, 2),
        (3, "", {"POLICY_NUM_THREADS": "1"}, 0),
    ],
    ids=["one", "torch's", "asked of the kernels", "asked in the environment", "asked for one"],
)
def test_threads(torch_threads: int, before: str, environment: Any, made: int) -> None:
    """A product runs on torch's threads, `torch.set_num_threads` counts, unless the kernels were
    asked for a number of their own.
    """
    code = THREADS.format(torch_threads=torch_threads, before=before)
    assert run(code, **environment).strip() == str(made)


@needs_c
def test_fork_after_use_of_torchs_threads() -> None:
    """After a fork a product runs on the kernels' own threads: torch's are gone, and would hang."""
    code = """
import os, torch, policy_core as pc
torch.set_num_threads(2)
layers = [
    pc.freeze(pc.wrap(torch.nn.Linear(1024, 1024), f"{mode}_from_float32"))
    for mode in ("int8", "float8/weight_only", "float8/dynamic")
]
x = torch.ones(256, 1024)
bits = lambda y: y.numpy().tobytes()
with torch.no_grad():
    wanted = [layer(x) for layer in layers]
    pid = os.fork()
    if pid == 0:
        # torch.equal would hang here: it waits for torch's threads.
        right = all(bits(layer(x)) == bits(y) for layer, y in zip(layers, wanted))
        own = len(os.listdir("/proc/self/task"))
        os._exit(0 if right and own > 1 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert all(torch.equal(layer(x), y) for layer, y in zip(layers, wanted))
"""
    run(code)
