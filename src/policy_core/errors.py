"""The exceptions that policy-core raises besides plain `ValueError` and `TypeError`.

Each subclasses the builtin that a caller would catch without knowing this module.
"""


class ConfigError(ValueError):
    """A serialized config cannot be read: unknown class or field, too deep, too large."""


class UnmatchedRuleError(ValueError):
    """A rule of a policy map matches no layer of the model."""


class AlreadyWrappedError(ValueError):
    """`wrap` met layers that already have another policy."""


class LayerError(ValueError):
    """One layer cannot take its policy; the notes name its path and policy."""


class NoKernelError(NotImplementedError):
    """The mode can be named, saved and loaded, but nothing computes it yet."""


class BackendError(ImportError):
    """A backend is unknown, or its framework is not installed."""


class CheckpointError(ValueError):
    """A file cannot be loaded into this model; the model is as it was."""
