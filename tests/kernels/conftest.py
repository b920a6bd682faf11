"""What the kernel tests share."""

import ctypes
import os

import pytest

import policy_kernels
from policy_kernels import _loader, build_info, set_isa

# A folder with another build of the library, for example with sanitizers, to test in place of the
# installed one.
if folder := os.environ.get("POLICY_KERNELS_TEST_LIBRARY"):
    policy_kernels.__path__.insert(0, folder)


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
