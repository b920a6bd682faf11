"""The example trains under every policy to the same loss."""

import runpy
from pathlib import Path

EXAMPLE = Path(__file__).parents[3] / "examples" / "keras_quickstart.py"


def test_final_losses_agree():
    """float32, mixed_bfloat16 and float8 end within 2 % of each other; so do frozen and int8."""
    losses = runpy.run_path(str(EXAMPLE))["main"](steps=15)
    assert losses["float32"] < 4
    assert max(losses.values()) <= 1.02 * min(losses.values())
