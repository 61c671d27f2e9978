"""Machines with XLA's compilers for GPUs and TPUs, and without these devices: JAX is kept from looking for them.

Imported with statetx, so it imports little.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import pathlib
import sys
import tempfile
import threading
from collections.abc import Iterator
from typing import Any

CUDA_PLUGINS = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")
_DEVICE_FILES = {"gpu": ("nvidia[0-9]*", "dxg"), "tpu": ("accel[0-9]*", "vfio/[0-9]*")}


def is_installed(platform_name: str) -> bool:
    """Whether the compiler of a platform is installed."""
    return bool(cuda_plugin()) if platform_name == "gpu" else _has("libtpu")


def cuda_plugin() -> str:
    """The module that registers the compiler for NVIDIA GPUs; "" without one."""
    return next(filter(_has, CUDA_PLUGINS), "")


def _has(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # no package around it
        return False


def load_jax() -> None:
    """Import JAX, and keep it from looking for absent devices whose compilers are installed.

    It would print a traceback for CUDA, and messages of libtpu, whenever it starts. Nothing changes where JAX has
    started, where ``JAX_PLATFORMS`` is set, where a package for another kind of device is installed, or where the
    devices are present.
    """
    installed = {name for name in _DEVICE_FILES if is_installed(name)} if sys.platform == "linux" else set()
    absent = {name for name in installed if not is_visible(name)}
    with quiet_stderr() if absent and "jax" not in sys.modules else contextlib.nullcontext():
        jax = importlib.import_module("jax")
    if not absent or jax.config.jax_platforms or _other_plugins() or _has_started():
        return
    present = [{"gpu": "cuda", "tpu": "tpu"}[name] for name in sorted(installed - absent)]
    jax.config.update("jax_platforms", ",".join([*present, "cpu"]))
    topologies = importlib.import_module("jax.experimental.topologies")
    with quiet_stderr(), contextlib.suppress(NotImplementedError):
        # JAX loads the plugins when a topology is asked for first, and CUDA's complains of the missing driver.
        topologies.get_topology_desc(platform="no such platform")


def is_visible(platform_name: str) -> bool:
    """Whether this machine has a device of a platform."""
    return any(next(pathlib.Path("/dev").glob(pattern), None) is not None for pattern in _DEVICE_FILES[platform_name])


def _other_plugins() -> bool:
    try:
        plugins = importlib.import_module("jax_plugins")
    except ModuleNotFoundError:
        return False
    folders = {path.name for folder in plugins.__path__ for path in pathlib.Path(folder).iterdir() if path.is_dir()}
    return any(not name.startswith(("xla_cuda", "_")) for name in folders)


def _has_started() -> bool:
    from jax.extend import backend  # noqa: PLC0415

    return bool(getattr(backend, "backends_are_initialized", lambda: False)())


class _Silence:
    """Standard error sent to a file while blocks of any threads run: the first redirects it, the last one restores it.

    A compiler may end the process. A shell waits for that, and then shows the file: nothing in the process could.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._depth = 0
        self._saved = self._written = -1
        self._witness: Any = None

    def enter(self) -> None:
        with self._lock:
            self._depth += 1
            if self._depth > 1:
                return
            try:
                sys.stderr.flush()
                self._saved = os.dup(2)
            except (OSError, ValueError, AttributeError):  # no standard error to write to
                self._saved = -1
                return
            self._written, path = tempfile.mkstemp()
            os.unlink(path)
            self._witness = _shows_at_exit(self._written)
            os.dup2(self._written, 2)

    def leave(self) -> str:
        """Restore standard error after the last block. Returns the text written since the first began."""
        with self._lock:
            self._depth -= 1
            if self._saved < 0:
                return ""
            text = os.pread(self._written, _MOST_SHOWN, max(0, os.fstat(self._written).st_size - _MOST_SHOWN))
            if not self._depth:
                os.dup2(self._saved, 2)
                if self._witness is not None:
                    self._witness.communicate(b"done\n")
                os.close(self._written)
                os.close(self._saved)
                self._saved, self._witness = -1, None
            return text.decode(errors="replace").strip()


_MOST_SHOWN = 4096  # bytes; the end tells the error


def _shows_at_exit(file: int) -> Any:
    """A process that writes a file to standard error if this one ends before it says that it is done; None where there
    is no shell.
    """
    import subprocess  # noqa: PLC0415

    words = ["/bin/sh", "-c", f"read done || cat /dev/fd/{file} >&2"]
    try:
        # Of a session of its own, so that a key that interrupts this process does not end it.
        return subprocess.Popen(words, stdin=subprocess.PIPE, pass_fds=(file,), start_new_session=True)
    except OSError:
        return None


_silence = _Silence()


@contextlib.contextmanager
def quiet_stderr() -> Iterator[None]:
    """Keep what C++ libraries write to standard error from the terminal. An error has it as a note; if the process
    ends, it is shown.
    """
    _silence.enter()
    try:
        yield
    except BaseException as e:
        text = _silence.leave()
        if text and isinstance(e, Exception):
            e.add_note(f"Written to standard error before:\n{text}")
        raise
    else:
        _silence.leave()
