"""The examples do what they say."""

import runpy
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_quickstart():
    """All forms of the transformer learn, and end within 2 % of float32's loss."""
    losses = runpy.run_path(str(EXAMPLES / "jax_quickstart.py"))["main"](steps=25)
    assert losses["float32"] < 4
    for name, loss in losses.items():
        assert abs(loss - losses["float32"]) <= 0.02 * losses["float32"], name


def test_equinox_example():
    """The int8 model stays near the float one."""
    assert runpy.run_path(str(EXAMPLES / "jax_equinox.py"))["main"]() < 0.05


def test_functions_example():
    """The quantized parameters stay near the float ones."""
    assert runpy.run_path(str(EXAMPLES / "jax_functions.py"))["main"]() < 0.3
