"""XLA's compilers for GPUs and TPUs, on machines that have neither: the packages, how they are loaded, and the devices they make."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import pathlib
import platform
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import jax
from jax.experimental import topologies

from .._errors import TargetError
from .spec import Gpu, Spec, Tpu

_CUDA_PLUGINS = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")
_EXTRAS = {"gpu": "target-cuda", "tpu": "target-tpu"}


def install_line(platform_name: str) -> str:
    """The command that installs the compiler of a platform."""
    return f'pip install "statetx[{_EXTRAS[platform_name]}]"'


def missing(spec: Spec) -> str:
    """What keeps this machine from compiling for a kind of device, with the way out; "" if nothing does."""
    if spec.platform == "cpu":
        return ""
    if sys.platform != "linux":
        return f"XLA's compilers for GPUs and TPUs exist for Linux only, and this is {platform.system()}: use a Linux machine or a container"
    if not _is_installed(spec.platform):
        return f"the compiler is not installed: {install_line(spec.platform)}"
    if isinstance(spec, Gpu) and spec.capability < (7, 5) and _cuda_plugin() == _CUDA_PLUGINS[0]:
        return "CUDA 13 compiles for compute capability 7.5 and newer: install the plugin of CUDA 12, which the extra target-cuda has"
    return ""


def _is_installed(platform_name: str) -> bool:
    return bool(_cuda_plugin()) if platform_name == "gpu" else _has("libtpu")


def _cuda_plugin() -> str:
    return next(filter(_has, _CUDA_PLUGINS), "")


def _has(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # no jax_plugins at all
        return False


# -- compile-only devices ------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=16)
def compile_only_devices(spec: Spec, hosts: int, shape: tuple[int, ...]) -> tuple[Any, ...]:
    """Devices of a kind that XLA can compile for, and that are not there.

    Args:
        hosts: number of hosts; a TPU's follows from `shape`.
        shape: devices of a host; of a TPU the grid of chips.

    Raises:
        TargetError: the compiler is not installed, is of another version than jaxlib, or refuses.
    """
    problem = missing(spec)
    if problem:
        raise TargetError(f"This machine cannot compile for {spec.kind}: {problem}.")
    try:
        with quiet_stderr():
            if isinstance(spec, Tpu):
                return _tpu_devices(spec, shape)
            assert isinstance(spec, Gpu)
            return _gpu_devices(spec, hosts, shape[0])
    except (RuntimeError, NotImplementedError, ValueError) as e:
        raise TargetError(
            f"XLA's compiler for {spec.kind} does not start: {str(e).splitlines()[0]}\nFix: install the plugin of the same version as "
            f"jaxlib {_version('jaxlib')}: {install_line(spec.platform)} --upgrade"
        ) from e


def _gpu_devices(spec: Gpu, hosts: int, devices: int) -> tuple[Any, ...]:
    # Hosts are connected by the network, which XLA calls slices.
    topology = f"{hosts}x1x{devices}"
    make = functools.partial(
        topologies.get_topology_desc, platform="cuda", target_config=spec.config(), topology=topology
    )
    try:
        return tuple(make().devices)
    except NotImplementedError:
        # JAX has left out the plugin when it looked for devices, since there is no driver.
        _register_cuda()
        return tuple(make().devices)


def _register_cuda() -> None:
    name = "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"  # of the driver, which the compiler does not need
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        importlib.import_module(_cuda_plugin()).initialize()
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _tpu_devices(spec: Tpu, shape: tuple[int, ...]) -> tuple[Any, ...]:
    name = f"{spec.generation}:{'x'.join(map(str, shape))}"
    # The two cores of a TPU v4 are one device.
    options = {"chip_config_name": "megacore"} if spec.generation == "v4" else {}
    return tuple(topologies.get_topology_desc(topology_name=name, platform="tpu", **options).devices)


def _version(package: str) -> str:
    return importlib.import_module(package).__version__


# -- silence -------------------------------------------------------------------------------------------------------


def leave_absent_devices_alone() -> None:
    """Keep JAX from looking for devices whose compilers are installed on a machine without these devices.

    It would print a traceback for CUDA, and messages of libtpu, whenever it starts. Nothing changes where JAX has started, where
    ``JAX_PLATFORMS`` is set, where a package for another kind of device is installed, or where the devices are there.
    """
    if sys.platform != "linux" or jax.config.jax_platforms or not (_has("jax_plugins") or _has("libtpu")):
        return
    installed = {name for name in _EXTRAS if _is_installed(name)}
    absent = {name for name in installed if not _is_visible(name)}
    if not absent or _other_plugins() or _has_started():
        return
    names = [{"gpu": "cuda", "tpu": "tpu"}[name] for name in sorted(installed - absent)]
    jax.config.update("jax_platforms", ",".join([*names, "cpu"]))
    with quiet_stderr(), contextlib.suppress(NotImplementedError):
        # JAX loads the plugins when a topology is asked for first, and CUDA's prints that there is no driver.
        topologies.get_topology_desc(platform="no such platform")


def _is_visible(platform_name: str) -> bool:
    patterns = {"gpu": ("nvidia[0-9]*", "dxg"), "tpu": ("accel[0-9]*", "vfio/[0-9]*")}[platform_name]
    return any(next(pathlib.Path("/dev").glob(pattern), None) is not None for pattern in patterns)


def _other_plugins() -> bool:
    try:
        plugins = importlib.import_module("jax_plugins")
    except ModuleNotFoundError:
        return False
    found = {path.name for folder in plugins.__path__ for path in pathlib.Path(folder).iterdir() if path.is_dir()}
    return any(not name.startswith(("xla_cuda", "_")) for name in found)


def _has_started() -> bool:
    from jax.extend import backend  # noqa: PLC0415

    return bool(getattr(backend, "backends_are_initialized", lambda: False)())


@contextlib.contextmanager
def quiet_stderr() -> Iterator[None]:
    """Keep what C++ libraries write to standard error from the terminal; it is written after all if the block raises."""
    try:
        sys.stderr.flush()
        saved = os.dup(2)
    except (OSError, ValueError, AttributeError):  # no standard error to write to
        yield
        return
    with tempfile.TemporaryFile() as written:
        os.dup2(written.fileno(), 2)
        try:
            yield
        except BaseException:
            os.dup2(saved, 2)
            written.seek(0)
            with contextlib.suppress(OSError):
                os.write(2, written.read())
            raise
        finally:
            os.dup2(saved, 2)
            os.close(saved)
