"""The command line: its sub-commands, exit statuses and output."""

import json
import subprocess
import sys

import pytest

from policy_core._cli import main


def test_demo_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    """`policy-core demo` classifies real digits under five policies and prints one row each."""
    assert main(["demo", "--rounds", "1"]) == 0
    out = capsys.readouterr().out
    for word in ("float32", "mixed_bfloat16", "int8_from_float32", "float8_from_float32", "map:"):
        assert word in out


def test_demo_figures_hold(capsys: pytest.CaptureFixture[str]) -> None:
    """The model is right on 97 % of the held-out digits; int8 needs 0.3 of the bytes for it."""
    assert main(["demo", "--json", "--rounds", "1"]) == 0
    results = {row["policy"]: row for row in json.loads(capsys.readouterr().out)}
    float32 = results["float32"]
    assert float32["agreement"] == 1
    assert float32["weight_bytes"] == 301_066 * 4
    for row in results.values():
        assert row["accuracy"] >= 0.97
        assert row["agreement"] >= 0.98
        assert row["milliseconds"] > 0
    for name in ("int8_from_float32", "float8_from_float32"):
        assert results[name]["weight_bytes"] <= 0.3 * float32["weight_bytes"]


def test_demo_without_its_data_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without scikit-learn the demo fails with the command that installs it."""
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    assert main(["demo"]) == 1
    assert "pip install 'policy-core[demo]'" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["nothing"], ["demo", "--rounds", "0"]], ids=str)
def test_bad_usage_exits_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """A missing or unknown command or a bad option prints the usage and exits with 2."""
    with pytest.raises(SystemExit) as raised:
        main(arguments)
    assert raised.value.code == 2
    assert "usage: policy-core" in capsys.readouterr().err


def test_info_names_the_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    """`policy-core info --json` says which instruction set runs."""
    assert main(["info", "--json"]) == 0
    assert "isa" in json.loads(capsys.readouterr().out)


def test_version_and_a_closed_pipe() -> None:
    """`--version` prints the version; a reader that stops early ends the command quietly."""
    run = [sys.executable, "-c", "from policy_core._cli import main; raise SystemExit(main())"]
    shown = subprocess.run([*run, "--version"], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "0.1.0"
    with subprocess.Popen(
        [*run, "info", "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.close()
        _, errors = process.communicate()
    assert "Traceback" not in errors
