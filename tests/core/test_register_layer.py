"""`register_layer` finds the backend of a class."""

import pytest

import policy_core as pc
import policy_numpy as pn


@pytest.mark.parametrize("cls", [int, pn.Dense, "Dense", 3], ids=str)
def test_classes_without_a_backend_that_takes_them_are_refused(cls: object) -> None:
    """What is no layer class, or is one of a backend that takes none, is an error that says so."""
    with pytest.raises(TypeError, match="Expected a layer class of a framework whose backend"):
        pc.register_layer(cls, None)  # type: ignore[arg-type]  # the wrong type is the point
