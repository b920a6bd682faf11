"""TensorFlow passes the contract."""

from policy_core.testing import BackendContract


class TestTensorFlow(BackendContract):
    """The TensorFlow backend."""

    backend_name = "tensorflow"
