"""What the kernel tests share."""

import ctypes

import pytest

from policy_kernels import _loader, build_info, set_isa


@pytest.fixture(params=build_info().present_isas)
def isa(request):
    """Each instruction set that has kernels, chosen for the length of a test."""
    before = build_info().isa
    set_isa(request.param)
    yield request.param
    set_isa(before)


@pytest.fixture
def native() -> ctypes.CDLL:
    """The C interface itself."""
    return _loader.library()
