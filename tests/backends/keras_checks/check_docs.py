"""The page for Keras's users does what it says."""

import doctest
from pathlib import Path

PAGE = Path(__file__).parents[3] / "docs" / "keras.md"


def test_page():
    """Every example on the page gives what it shows."""
    failed, ran = doctest.testfile(str(PAGE), module_relative=False)
    assert ran > 3
    assert not failed
