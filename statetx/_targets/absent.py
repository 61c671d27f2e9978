"""Machines that compile for GPUs or TPUs without having any: JAX is kept from looking for them.

Imported with statetx, so it imports little.
"""

from __future__ import annotations

import importlib
import importlib.util
import pathlib
import sys

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
    jax = importlib.import_module("jax")
    if not absent or jax.config.jax_platforms or _other_plugins() or _has_started():
        return
    present = [{"gpu": "cuda", "tpu": "tpu"}[name] for name in sorted(installed - absent)]
    jax.config.update("jax_platforms", ",".join([*present, "cpu"]))


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
