"""Reports: what they count and how they print."""

import json

import numpy as np

import policy_core as pc
import policy_numpy as pn


def model() -> pn.Sequential:
    return pn.Sequential(
        [pn.Dense(32, 16, seed=0), pn.LayerNorm(16), pn.Dense(16, 4, bias=False, seed=1)]
    )


def test_plain_model_is_reported() -> None:
    """A model that was never wrapped has rows too, and its two sizes are one."""
    found = pc.report(model())
    assert found.bytes_before == found.bytes_after == 4 * (32 * 16 + 16 + 32 + 16 * 4)
    assert {(row.asked, row.policy, row.kernel) for row in found.rows} == {("", "", "")}
    assert "(not wrapped)" in str(found)


def test_bytes_are_those_of_the_arrays() -> None:
    """bytes_after is the sum over all arrays that the layers hold, bytes_before of the floats."""
    wrapped = pc.wrap(model(), "int8_from_bfloat16")
    held = sum(a.nbytes for layer in wrapped.layers for a in layer.tensors.values())
    found = pc.report(wrapped)
    assert found.bytes_after == held
    assert found.bytes_before == pc.report(model()).bytes_before
    pc.unwrap(wrapped)
    assert pc.report(wrapped).bytes_after == found.bytes_before


def test_table_names_every_layer_and_totals() -> None:
    """The printed table has a line for each layer, the totals, and each note once."""
    wrapped = pc.wrap(model(), "float8_from_mixed_bfloat16")
    text = str(pc.report(wrapped))
    for word in ("path", "kernel", "total", "float8_from_mixed_bfloat16", "asked: float8_from"):
        assert word in text
    assert text.count("freeze() leaves only codes") == 1
    assert f"{pc.report(wrapped).bytes_after:,}" in text


def test_json_holds_rows_and_totals() -> None:
    """to_json gives what the table shows, for machines."""
    found = pc.report(pc.wrap(model(), "int8_from_float32"))
    data = json.loads(found.to_json())
    assert data["bytes_after"] == found.bytes_after
    assert [row["path"] for row in data["rows"]] == ["0", "1", "2"]
    assert data["rows"][0]["quantized"] is True


def test_slow_kernel_is_named() -> None:
    """Where the kernel that runs is not a fast one, the row says so."""
    row = pc.report(pc.wrap(model(), "int8_from_float32")).rows[0]
    assert row.kernel.startswith("linear_s8_")
    if row.kernel.endswith(("scalar", "numpy")):
        assert "not faster" in row.note


def test_paths_with_brackets_print_as_they_are() -> None:
    """A path that looks like markup is printed, not interpreted."""

    class Odd(pn.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.parts = {"[bold]x": pn.Dense(2, 2)}

    assert "parts/[bold]x" in str(pc.report(Odd()))


def test_report_changes_nothing() -> None:
    """Reporting twice gives equal reports and leaves the arrays as they were."""
    wrapped = pc.wrap(model(), "float8/dynamic_from_float32")
    before = [array for layer in wrapped.layers for array in layer.tensors.values()]
    assert pc.report(wrapped) == pc.report(wrapped)
    after = [array for layer in wrapped.layers for array in layer.tensors.values()]
    assert all(x is y for x, y in zip(before, after, strict=True))
    assert np.isfinite(wrapped(np.ones((1, 32), np.float32)).astype(np.float32)).all()
