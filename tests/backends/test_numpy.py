"""The reference backend passes the contract that it is the oracle of."""

from policy_core.testing import ReferenceContract


class TestNumpy(ReferenceContract):
    """The numpy backend, whichever kernels run."""
