"""Loads the backend of a framework whose saved programs name our operators, when that is imported.

A program that was saved with TensorFlow asks for its operators when it is loaded, in a process that
may do nothing with this package but import it. The framework itself is never imported here.
"""

import sys
import types
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

from . import _backend

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec


def load_with(framework: str) -> None:
    """Loads the backend of a framework now if that is imported, else as soon as it is.

    Args:
        framework: The name of a framework and of its backend.
    """
    # None is how one forbids an import.
    if sys.modules.get(framework) is None:
        sys.meta_path.insert(0, _Watcher(framework))
    else:
        _load(framework)


class _Watcher:
    """Finds one module as the finders after it do, and loads its backend after it.

    A finder by its method alone: `importlib.abc` would cost every import of this package 4 ms.
    """

    def __init__(self, framework: str) -> None:
        self.framework = framework

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> "ModuleSpec | None":
        if name != self.framework:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        found = (finder.find_spec(name, path, target) for finder in others)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: types.ModuleType) -> None:
                execute(module)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                _load(self.framework)

            # On this loader alone, which was made for this spec.
            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _load(framework: str) -> None:
    point = _backend._entry_points().get(framework)
    # A backend that imports its framework is on its way itself.
    if point is None or point.module in sys.modules:
        return
    try:
        _backend._load(framework)
    except Exception as error:
        # Whatever it is, it is no error of whoever imports the framework; whoever uses the backend
        # gets it.
        warnings.warn(
            f"The {framework} backend of policy_core is not usable: {error}", stacklevel=2
        )
