"""Finding the library; what is said when it is missing, damaged or another version."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import policy_kernels as pk
from policy_kernels import _info, _loader

OPERATIONS = [
    "quantize_rows_s8",
    "encode_f8",
    "quantize_rows_f8",
    "decode_f8",
    "linear_s8",
    "linear_s8_codes",
    "linear_s8w",
    "linear_f8",
    "linear_f8w",
]

# The groups of kernels that serve each instruction set.
SERVING = {
    "scalar": {"scalar"},
    "avx2": {"avx2"},
    "avxvnni": {"avx2", "avxvnni"},
    "avx512vnni": {"avx512", "avx512vnni"},
    "avx512bf16": {"avx512", "avx512vnni", "avx512bf16"},
    "amx": {"avx512", "avx512bf16", "amx"},
}

PROBE = """
import json
import numpy as np
import policy_kernels as pk

def outcome(call):
    try:
        return repr(call())
    except Exception as error:
        return [type(error).__name__, str(error)]

x = np.ones((1, 2), np.float32)
print(json.dumps({
    "available": outcome(pk.available),
    "call": outcome(lambda: pk.quantize_rows_s8(x)),
    "reason": pk.build_info().reason,
    "info": repr(pk.build_info()),
}))
"""


def probe(folder=None, **environment):
    """What PROBE prints in a new process; with the package in `folder` instead of the installed."""
    options = []
    if folder is not None:
        # Without site, an editable installation's import hook does not come first.
        options = ["-S"]
        site_packages = Path(np.__file__).parents[1]
        environment["PYTHONPATH"] = os.pathsep.join([str(folder), str(site_packages)])
    done = subprocess.run(
        [sys.executable, *options, "-c", PROBE],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


@pytest.fixture
def package(tmp_path):
    """A folder with a copy of the package's Python files and without the library."""
    copy = tmp_path / "policy_kernels"
    shutil.copytree(Path(_loader.__file__).parent, copy, ignore=shutil.ignore_patterns("*.so"))
    return tmp_path


def test_build_info_tells_what_is_loaded():
    """The library is loaded, has this version, and runs an ISA that it was compiled with."""
    info = pk.build_info()
    assert pk.available() is True
    assert info.built is True
    assert info.reason is None
    assert info.abi_version == _loader.ABI_VERSION
    assert info.library.is_file()
    assert info.isa in info.present_isas
    assert set(info.present_isas) <= set(info.compiled_isas)
    assert info.amx_permission == "absent" or info.amx_permission.startswith(
        ("granted", "refused: ", "emulated")
    )
    assert info.threads == pk.num_threads() >= 1
    assert info.compiled_isas[0] == "scalar"
    assert info.compiler.split()[0] in ("gcc", "clang")


def test_build_info_is_a_value_whose_repr_has_no_folder():
    """BuildInfo is frozen, equal by value, and shows the library's name alone."""
    info = pk.build_info()
    assert info == pk.build_info()
    assert f"library={info.library.name!r}" in repr(info)
    assert str(info.library.parent) not in repr(info)
    with pytest.raises(dataclasses.FrozenInstanceError):
        info.isa = "other"


@pytest.mark.parametrize("op", OPERATIONS)
def test_kernel_names_are_operation_and_isa(isa, op):
    """Every public kernel function has a kernel, named after itself and what it needs."""
    assert callable(getattr(pk, op))
    name = pk.kernel_name(op)
    assert name.startswith(f"{op}_")
    assert name.removeprefix(f"{op}_") in SERVING[isa]


def test_a_missing_library_is_told_and_raised_on_use(package):
    """Import works, available() is False, and a call says how to build."""
    seen = probe(package)
    assert seen["available"] == "False"
    kind, message = seen["call"]
    assert kind == "KernelsUnavailableError"
    assert message == seen["reason"]
    assert "were not built: expected libpolicy_kernels.so in" in message
    assert "POLICY_REQUIRE_KERNELS=1" in message
    assert seen["info"].startswith("BuildInfo(built=False, reason='the native kernels")


def test_a_damaged_library_is_told_and_raised_on_use(package):
    """A file that is no library is an error on use and on asking, not a reason to fall back."""
    (package / "policy_kernels" / _loader.LIBRARY_NAME).write_bytes(b"not a library")
    seen = probe(package)
    for key in ("available", "call"):
        kind, message = seen[key]
        assert kind == "KernelsBrokenError"
        assert "expected a library that loads" in message
    assert seen["reason"] == message


def test_a_library_of_another_version_is_refused(monkeypatch):
    """The ABI version is compared before any function is called."""
    folder = str(pk.build_info().library.parent)
    own = _loader.ABI_VERSION
    monkeypatch.setattr(_loader, "ABI_VERSION", own + 1)
    with pytest.raises(pk.KernelsBrokenError, match=f"expected ABI version {own + 1}, got {own}"):
        _loader.load([folder], None)


def test_a_library_that_lacks_a_function_is_refused(monkeypatch):
    """All functions are looked up when the library is loaded."""
    folder = str(pk.build_info().library.parent)
    monkeypatch.setitem(_loader.SIGNATURES, "pk_linear_s9", _loader.SIGNATURES["pk_linear_s8"])
    with pytest.raises(pk.KernelsBrokenError, match="pk_linear_s9"):
        _loader.load([folder], None)


def test_the_first_folder_that_has_the_library_serves(tmp_path):
    """Folders without the library are passed over."""
    folder = str(pk.build_info().library.parent)
    before = pk.build_info().isa
    assert before is not None
    try:
        loaded = _loader.load([str(tmp_path), folder], "scalar")
        assert loaded.pk_abi_version() == _loader.ABI_VERSION
    finally:
        # It is the same library again, and the choice is the process's.
        pk.set_isa(before)


def test_policy_isa_chooses_the_instruction_set():
    """POLICY_ISA names the ISA for the process."""
    seen = probe(POLICY_ISA="scalar")
    assert "isa='scalar'" in seen["info"]


def test_policy_isa_that_is_absent_is_an_error():
    """An ISA that was asked for and is not there is never replaced by another."""
    seen = probe(POLICY_ISA="avx9")
    for key in ("available", "call"):
        kind, message = seen[key]
        assert kind == "KernelsBrokenError"
        assert message.startswith("POLICY_ISA='avx9': ")
        assert "Compiled: scalar" in message


@pytest.mark.parametrize("value", ["0", "-1", "two", ""])
def test_a_number_of_threads_that_is_none_is_an_error(value):
    """POLICY_NUM_THREADS is never passed over."""
    kind, message = probe(POLICY_NUM_THREADS=value)["call"]
    assert kind == "KernelsBrokenError"
    assert f"POLICY_NUM_THREADS to be a number of at least 1, got {value!r}" in message


def test_errors_are_builtin_errors_too():
    """Code that catches RuntimeError or ImportError sees them."""
    assert issubclass(pk.KernelsUnavailableError, RuntimeError)
    assert issubclass(pk.KernelsBrokenError, pk.KernelsUnavailableError)
    assert issubclass(pk.KernelsBrokenError, ImportError)


def test_importing_brings_in_numpy_alone():
    """The package knows no framework and no core."""
    code = "import sys, policy_kernels; print(*sorted({m.split('.')[0] for m in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert {"policy_kernels", "numpy"} <= loaded
    assert not loaded & {"policy_core", "policy_numpy", "torch", "jax", "tensorflow", "keras"}


def test_info_prints_json(capsys):
    """`info --json` is one object with the facts of build_info()."""
    assert _info.main(["--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    info = pk.build_info()
    assert facts["isa"] == info.isa
    assert facts["compiled_isas"] == list(info.compiled_isas)
    assert facts["present_isas"] == list(info.present_isas)
    assert facts["threads"] == info.threads
    assert facts["library"] == str(info.library)
    assert facts["numpy"] == np.__version__
    assert facts["cpu"]


def test_info_prints_a_line_for_each_fact(capsys):
    """`info` prints what --json holds, for people."""
    assert _info.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(_info.facts())
    assert any(line.split() == ["kernels", "yes"] for line in lines)
