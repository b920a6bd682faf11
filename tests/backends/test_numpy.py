"""The reference backend passes the contract that it is the oracle of."""

from policy_core import testing


class TestNumpy(testing.ReferenceContract):
    """The numpy backend, whichever kernels run."""
