"""The backend of a framework that is loaded when the framework is."""

import sys
import warnings
from types import SimpleNamespace

import pytest

from policy_core import _backend, _on_import


@pytest.fixture
def framework(monkeypatch, tmp_path):
    """A framework that can be imported, and a record of the backends that were loaded."""
    loaded = []
    (tmp_path / "fake_framework.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    point = SimpleNamespace(module="fake_framework_backend")
    monkeypatch.setattr(_backend, "_entry_points", lambda: {"fake_framework": point})
    monkeypatch.setattr(_backend, "_load", loaded.append)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    yield loaded
    sys.modules.pop("fake_framework", None)


def test_backend_is_loaded_after_its_framework(framework):
    """Nothing happens until the framework is imported, then its backend is loaded, once."""
    _on_import.load_with("fake_framework")
    assert importlib_finds("fake_framework")
    assert framework == []
    import fake_framework

    assert fake_framework.value == 1
    assert framework == ["fake_framework"]
    watched = {getattr(finder, "framework", None) for finder in sys.meta_path}
    assert "fake_framework" not in watched


def importlib_finds(name):
    """Says whether a module could be imported, which imports nothing."""
    from importlib.util import find_spec

    return find_spec(name) is not None


def test_framework_that_may_not_be_imported(framework, monkeypatch):
    """A framework whose import someone has forbidden is not there."""
    monkeypatch.setitem(sys.modules, "fake_framework", None)
    _on_import.load_with("fake_framework")
    assert framework == []


def test_framework_that_is_there_already(framework):
    """The backend of a framework that was imported before is loaded at once."""
    import fake_framework  # noqa: F401

    _on_import.load_with("fake_framework")
    assert framework == ["fake_framework"]


def test_backend_on_its_way_is_left_alone(framework, monkeypatch):
    """A backend that imports its framework itself is not loaded a second time inside."""
    monkeypatch.setitem(sys.modules, "fake_framework_backend", SimpleNamespace())
    _on_import.load_with("fake_framework")
    import fake_framework  # noqa: F401

    assert framework == []


def test_framework_without_a_backend(framework, monkeypatch):
    """Where no backend is installed nothing happens."""
    monkeypatch.setattr(_backend, "_entry_points", dict)
    _on_import.load_with("fake_framework")
    import fake_framework  # noqa: F401

    assert framework == []


def test_broken_backend_warns(framework, monkeypatch):
    """A backend that cannot be loaded is a warning to whoever imports the framework, no error."""

    def fail(name):
        raise ImportError("no such library")

    monkeypatch.setattr(_backend, "_load", fail)
    _on_import.load_with("fake_framework")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        import fake_framework
    assert fake_framework.value == 1
    assert "no such library" in str(seen[0].message)
