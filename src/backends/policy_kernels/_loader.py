"""Find and load the native library once; say what it is, or why it is not there."""

import ctypes
import functools
import os
import sys
from collections.abc import Iterable
from ctypes import c_int32
from dataclasses import dataclass
from pathlib import Path

from ._signatures import ABI_VERSION as ABI_VERSION
from ._signatures import SIGNATURES

LIBRARY_NAME = "libpolicy_kernels.so"

_ERROR_ARGUMENT, _ERROR_MEMORY, _ERROR_UNSUPPORTED = 1, 2, 3

_HOW_TO_BUILD = (
    "Reinstall policy-core from source with a C++17 compiler (gcc or clang); "
    "with POLICY_REQUIRE_KERNELS=1 the installation fails and shows why the kernels cannot be built."
)


class KernelsUnavailableError(RuntimeError):
    """A kernel was called, and the native library was not built."""


class KernelsBrokenError(KernelsUnavailableError, ImportError):
    """The native library is there but cannot be used: damaged, of another version, or set up wrongly."""


@dataclass(frozen=True, repr=False)
class BuildInfo:
    """What the native library is, or why it is not in use.

    Attributes:
        built: True when the library is loaded and its kernels can be called.
        library: path of the library file, None when there is none.
        abi_version: version of the C interface, None when not loaded.
        compiler: name and version of the compiler, None when not loaded.
        compiled_isas: instruction sets in the library, plainest first; empty when not loaded.
        present_isas: those of them that this CPU has and the system allows; empty when not loaded.
        isa: the instruction set whose kernels run now, None when not loaded.
        amx_permission: ``"granted"``, ``"absent"``, ``"refused: ..."``, or ``"emulated"`` in a build
            for tests; None when not loaded.
        threads: how many threads a product may use, None when not loaded.
        reason: why the kernels cannot be called, None when they can.
    """

    built: bool
    library: Path | None = None
    abi_version: int | None = None
    compiler: str | None = None
    compiled_isas: tuple[str, ...] = ()
    present_isas: tuple[str, ...] = ()
    isa: str | None = None
    amx_permission: str | None = None
    threads: int | None = None
    reason: str | None = None

    def __repr__(self) -> str:
        if not self.built:
            return f"BuildInfo(built=False, reason={self.reason!r})"
        name = None if self.library is None else self.library.name
        return (
            f"BuildInfo(built=True, library={name!r}, abi_version={self.abi_version!r}, "
            f"compiler={self.compiler!r}, compiled_isas={self.compiled_isas!r}, "
            f"present_isas={self.present_isas!r}, isa={self.isa!r}, "
            f"amx_permission={self.amx_permission!r}, threads={self.threads!r})"
        )


@dataclass(frozen=True)
class _Failure:
    error: type[KernelsUnavailableError]
    reason: str
    library: Path | None


def load(folders: Iterable[str], isa: str | None) -> ctypes.CDLL:
    """The native library from the first of some folders that has it, with signatures set.

    Args:
        folders: where to look for ``LIBRARY_NAME``.
        isa: instruction set to use; None for the best that is compiled in and present.

    Returns:
        The loaded library.

    Raises:
        KernelsUnavailableError: no folder has the library.
        KernelsBrokenError: it cannot be loaded, has another ABI version, lacks a function, or
            does not offer `isa`.
    """
    places = [Path(folder) / LIBRARY_NAME for folder in folders]
    path = next((place for place in places if place.exists()), None)
    if path is None:
        looked = ", ".join(str(place.parent) for place in places)
        raise KernelsUnavailableError(
            f"the native kernels were not built: expected {LIBRARY_NAME} in {looked}. "
            + _HOW_TO_BUILD
        )
    try:
        library = ctypes.CDLL(str(path))
        library.pk_abi_version.restype = c_int32
        library.pk_abi_version.argtypes = []
        version = library.pk_abi_version()
        if version != ABI_VERSION:
            raise KernelsBrokenError(
                f"{path}: expected ABI version {ABI_VERSION}, got {version!r}. {_HOW_TO_BUILD}"
            )
        for name, (restype, argtypes) in SIGNATURES.items():
            function = getattr(library, name)
            function.restype = restype
            function.argtypes = argtypes
    except (OSError, AttributeError) as error:
        raise KernelsBrokenError(
            f"{path}: expected a library that loads, got: {error}. {_HOW_TO_BUILD}"
        ) from error
    if isa is not None and library.pk_set_isa(isa.encode()) != 0:
        raise KernelsBrokenError(f"POLICY_ISA={isa!r}: {last_error(library)}")
    threads = os.environ.get("POLICY_NUM_THREADS")
    if threads is not None and not (threads.isascii() and threads.isdigit() and int(threads) > 0):
        raise KernelsBrokenError(
            f"expected POLICY_NUM_THREADS to be a number of at least 1, got {threads!r}"
        )
    return library


@functools.cache
def _loaded() -> ctypes.CDLL | _Failure:
    # An editable installation keeps the library and the Python files in two folders; the package's
    # path names both.
    folders = list(sys.modules["policy_kernels"].__path__)
    try:
        return load(folders, os.environ.get("POLICY_ISA") or None)
    except KernelsUnavailableError as error:
        places = (Path(folder) / LIBRARY_NAME for folder in folders)
        path = next((place for place in places if place.exists()), None)
        return _Failure(type(error), str(error), path)


def library() -> ctypes.CDLL:
    """The native library, loaded at the first call; POLICY_ISA is read then.

    Raises:
        KernelsUnavailableError: it was not built.
        KernelsBrokenError: it is there but cannot be used.
    """
    loaded = _loaded()
    if isinstance(loaded, _Failure):
        raise loaded.error(loaded.reason)
    return loaded


def last_error(native: ctypes.CDLL) -> str:
    """The native library's message for this thread's latest failing call."""
    message: bytes = native.pk_last_error()
    return message.decode()


def check(status: int) -> None:
    """Raise what a native status code stands for; nothing for 0.

    Raises:
        ValueError: an argument was refused, or an ISA or operation is not there.
        MemoryError: a scratch buffer could not be allocated.
        RuntimeError: the status is none that this version knows.
    """
    if status == 0:
        return
    message = last_error(library())
    if status in (_ERROR_ARGUMENT, _ERROR_UNSUPPORTED):
        raise ValueError(message)
    if status == _ERROR_MEMORY:
        raise MemoryError(message)
    raise RuntimeError(f"expected a status from 0 to 3, got {status!r}: {message}")


def available() -> bool:
    """True when the kernels can be called, False when they were not built.

    Raises:
        KernelsBrokenError: the library is there but cannot be used; that is never passed over.
    """
    loaded = _loaded()
    if isinstance(loaded, _Failure):
        if issubclass(loaded.error, KernelsBrokenError):
            raise loaded.error(loaded.reason)
        return False
    return True


def build_info() -> BuildInfo:
    """What the native library is, or why it is not in use; never raises."""
    loaded = _loaded()
    if isinstance(loaded, _Failure):
        return BuildInfo(built=False, library=loaded.library, reason=loaded.reason)
    text: bytes = loaded.pk_build_info()
    facts = dict(part.split("=", 1) for part in text.decode().split(";"))
    return BuildInfo(
        built=True,
        library=Path(loaded._name),
        abi_version=loaded.pk_abi_version(),
        compiler=facts["compiler"],
        compiled_isas=tuple(facts["isas"].split(",")),
        present_isas=tuple(loaded.pk_present_isas().decode().split(",")),
        isa=loaded.pk_isa().decode(),
        amx_permission=loaded.pk_amx_permission().decode(),
        threads=loaded.pk_num_threads(),
    )


def kernel_name(op: str) -> str:
    """The name of the kernel that serves an operation now: ``linear_s8`` -> ``linear_s8_scalar``.

    Args:
        op: the name of a kernel function of this package.

    Raises:
        ValueError: there is no such operation.
        KernelsUnavailableError: the library was not built.
    """
    native = library()
    name: bytes | None = native.pk_kernel_name(op.encode())
    if name is None:
        raise ValueError(last_error(native))
    return name.decode()


def set_isa(name: str) -> None:
    """Make the whole process use the kernels of one instruction set.

    Args:
        name: one of ``build_info().compiled_isas`` that this CPU has.

    Raises:
        ValueError: it is not compiled in, or this CPU lacks it.
        KernelsUnavailableError: the library was not built.
    """
    check(library().pk_set_isa(name.encode()))


def num_threads() -> int:
    """How many threads a product may use, the caller among them.

    What ``set_num_threads`` asked for; else the environment's POLICY_NUM_THREADS; else as many as the
    CPU affinity and the cgroup quota leave this process. Small products run on the caller alone.

    Raises:
        KernelsUnavailableError: the library was not built.
    """
    count: int = library().pk_num_threads()
    return count


def set_num_threads(count: int | None) -> None:
    """Say how many threads products may use, for the whole process.

    Args:
        count: from 1 to 1024; None for the default.

    Raises:
        ValueError: count is out of range.
        KernelsUnavailableError: the library was not built.
    """
    if count == 0:
        raise ValueError("expected count from 1 to 1024, or None for the default, got 0")
    check(library().pk_set_num_threads(0 if count is None else count))
