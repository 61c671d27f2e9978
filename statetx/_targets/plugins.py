"""XLA's compilers for devices that a machine does not have: kinds with their figures, packages, loading."""

from __future__ import annotations

import atexit
import concurrent.futures
import contextlib
import dataclasses
import functools
import importlib
import importlib.metadata
import itertools
import json
import os
import pathlib
import platform
import shutil
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar

import jax
import jax.numpy as jnp
from jax.experimental import topologies

from .._errors import TargetError
from .._records import metadata, real, record, row, text, whole
from .._text import brief
from .absent import CUDA_PLUGINS, cuda_plugin, is_installed, is_visible

_DEVICES = pathlib.Path(__file__).with_name("devices.toml")


def short_text(x: Any, path: str) -> None:
    """Check a name: a file of a target goes into messages and into XLA's text."""
    text(x, path)
    if len(x) > 200 or not x.isprintable() or set(x) & set('{}"\\'):
        raise ValueError(f"{path} must be a short name, got {brief(x)}")


# Upper bounds keep the numbers of a damaged file away from XLA, which allocates by some of them.


@dataclasses.dataclass(frozen=True)
class Spec:
    """A kind of device; each figure with the check of its value in a file.

    Attributes:
        kind: JAX's name of it, ``device_kind``.
        memory_bytes: the memory for programs; of a GPU all memory: JAX reserves a part for programs, see
            `statetx.Target.memory_bytes`.
        source: where the figures come from.
    """

    kind: Annotated[str, short_text]
    memory_bytes: Annotated[int, whole(2**20, 2**50)]
    source: Annotated[str, short_text]

    platform: ClassVar[str]


@dataclasses.dataclass(frozen=True)
class Gpu(Spec):
    """A kind of NVIDIA GPU.

    Attributes:
        capability: major and minor number of the compute capability.
        cores: number of streaming multiprocessors; the figures "per core" are of one.
        memory_bandwidth: bytes per second.
    """

    capability: Annotated[tuple[int, int], row(whole(1, 99), whole(0, 99))]
    cores: Annotated[int, whole(1, 10_000)]
    fpus_per_core: Annotated[int, whole(1, 10_000)]
    threads_per_core: Annotated[int, whole(32, 100_000)]
    shared_memory_per_core: Annotated[int, whole(1024, 2**30)]
    shared_memory_per_block_optin: Annotated[int, whole(1024, 2**30)]
    memory_bandwidth: Annotated[int, whole(10**6, 10**16)]
    l2_cache_bytes: Annotated[int, whole(1, 2**40)]
    clock_ghz: Annotated[float, real(0.01, 100)]

    platform = "gpu"

    def config(self) -> str:
        """XLA's description of the GPU, a ``GpuTargetConfigProto`` as text."""
        major, minor = self.capability
        return f"""
            gpu_device_info {{
              threads_per_block_limit: 1024
              threads_per_warp: 32
              shared_memory_per_block: 49152
              shared_memory_per_core: {self.shared_memory_per_core}
              threads_per_core_limit: {self.threads_per_core}
              core_count: {self.cores}
              fpus_per_core: {self.fpus_per_core}
              block_dim_limit_x: 2147483647
              block_dim_limit_y: 65535
              block_dim_limit_z: 65535
              memory_bandwidth: {self.memory_bandwidth}
              l2_cache_size: {self.l2_cache_bytes}
              clock_rate_ghz: {self.clock_ghz}
              device_memory_size: {self.memory_bytes}
              shared_memory_per_block_optin: {self.shared_memory_per_block_optin}
              cuda_compute_capability {{ major: {major} minor: {minor} }}
              registers_per_core_limit: 65536
              registers_per_block_limit: 65536
            }}
            platform_name: "CUDA"
            dnn_version_info {{ major: 9 minor: 10 }}
            runtime_version {{ major: 12 minor: 9 }}
        """


@dataclasses.dataclass(frozen=True)
class Tpu(Spec):
    """A kind of TPU.

    Attributes:
        generation: XLA's name of it, such as ``"v5e"``.
        dimensions: of the grid that the chips form, 2 or 3.
    """

    generation: Annotated[str, short_text]
    dimensions: Annotated[int, whole(2, 3)]

    platform = "tpu"


@dataclasses.dataclass(frozen=True)
class Cpu(Spec):
    """A CPU, as JAX divides it into devices."""

    platform = "cpu"


_KINDS: dict[str, type[Spec]] = {kind.platform: kind for kind in (Gpu, Tpu, Cpu)}
CHECKS = {name: record(metadata(kind)) for name, kind in _KINDS.items()}


@functools.cache
def table() -> dict[str, Spec]:
    """The common devices, by name."""
    groups = tomllib.loads(_DEVICES.read_text(encoding="utf-8"))
    return {name: make_spec(kind, fields) for kind, group in groups.items() for name, fields in group.items()}


def make_spec(platform_name: str, fields: Mapping[str, Any]) -> Spec:
    """The figures of a device of a platform, which `CHECKS` accepts."""
    figures: dict[str, Any] = {name: tuple(x) if isinstance(x, list) else x for name, x in fields.items()}
    return _KINDS[platform_name](**figures)


# -- compilers ---------------------------------------------------------------------------------------------------------

_EXTRAS = {"gpu": "target-cuda", "tpu": "target-tpu"}


def install_line(platform_name: str) -> str:
    """The command that installs the compiler of a platform, from where statetx was installed."""
    extra, clone = _EXTRAS[platform_name], pathlib.Path(__file__).parents[2]
    if (clone / "pyproject.toml").is_file():
        return f'pip install -e "{"." if clone == pathlib.Path.cwd() else clone}[{extra}]"'
    source = _source()
    return f'pip install "statetx[{extra}]{f" @ {source}" if source else ""}"'


def _source() -> str:
    """The folder or repository that statetx was installed from, as pip writes it; "" for a package index."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError, ValueError, KeyError, TypeError):
        fields = json.loads(importlib.metadata.distribution("statetx").read_text("direct_url.json") or "{}")
        return f"{fields['vcs_info']['vcs']}+{fields['url']}" if "vcs_info" in fields else fields["url"]
    return ""


def missing(spec: Spec) -> str:
    """Reason why this machine cannot compile for a kind of device, with the way out; "" if it can."""
    if spec.platform == "cpu":
        return ""
    if sys.platform != "linux":
        return (
            f"XLA's compilers for GPUs and TPUs exist for Linux only, and this is {platform.system()}: use a Linux "
            f"machine or a container"
        )
    if not is_installed(spec.platform):
        return f"the compiler is not installed: {install_line(spec.platform)}"
    if isinstance(spec, Gpu) and spec.capability < (7, 5) and cuda_plugin() == CUDA_PLUGINS[0]:
        return (
            "CUDA 13 compiles for compute capability 7.5 and newer: install the plugin of CUDA 12, which the extra "
            "target-cuda has"
        )
    return ""


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
        with _flags_for(spec.platform):
            if isinstance(spec, Tpu):
                devices = _tpu_devices(spec, shape)
            else:
                assert isinstance(spec, Gpu)
                devices = _gpu_devices(spec, hosts, shape[0])
            with concurrent.futures.ThreadPoolExecutor(1) as other_thread:  # where the user's mesh is not set
                other_thread.submit(_start, devices[0], spec.platform).result()
            return devices
    except (RuntimeError, NotImplementedError, ValueError, AttributeError, ImportError) as e:
        raise TargetError(
            f"XLA's compiler for {spec.kind} does not start: {(str(e).splitlines() or [repr(e)])[0]}\n"
            f"Fix: install the plugin of the same "
            f"version as jaxlib {_version('jaxlib')}: {install_line(spec.platform)} --upgrade"
        ) from e


def _flags_for(platform_name: str) -> contextlib.AbstractContextManager[None]:
    """Hide flags of other platforms in ``XLA_FLAGS``: a compiler ends the process at one that it does not know, and
    reads them once.
    """
    prefixes = tuple(f"--xla_{name}_" for name in ("cpu", "gpu", "tpu") if name != platform_name)
    flags = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if not flag.startswith(prefixes)]
    return _variable("XLA_FLAGS", " ".join(flags)) if "XLA_FLAGS" in os.environ else contextlib.nullcontext()


def _start(device: Any, platform_name: str) -> None:
    """Compile a program, so that a missing part shows here: ``exp`` needs CUDA's mathematical functions."""
    x = jax.ShapeDtypeStruct((8, 128), jnp.float32, sharding=jax.sharding.SingleDeviceSharding(device))
    options: dict[str, Any] | None = {"xla_gpu_autotune_level": 0} if platform_name == "gpu" else None
    jax.jit(lambda x: jnp.exp(x @ x.T)).lower(x).compile(options)


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
    with _variable("JAX_SKIP_CUDA_CONSTRAINTS_CHECK"):  # of the driver, which the compiler does not need
        importlib.import_module(cuda_plugin()).initialize()


@contextlib.contextmanager
def _variable(name: str, value: str = "1") -> Iterator[None]:
    """Set a variable of the environment."""
    old_value = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if old_value is None:
            del os.environ[name]
        else:
            os.environ[name] = old_value


def _tpu_devices(spec: Tpu, shape: tuple[int, ...]) -> tuple[Any, ...]:
    name = f"{spec.generation}:{'x'.join(map(str, shape))}"
    # The two cores of a TPU v4 are one device.
    options: dict[str, Any] = {"chip_config_name": "megacore"} if spec.generation == "v4" else {}
    # A host has 2x2 chips unless it is said that it has fewer; newer versions of libtpu find out.
    bounds = [2 if n % 2 == 0 else 1 for n in shape[:2]] + [1]
    if bounds != [2, 2, 1]:
        options["chips_per_host_bounds"] = bounds
    with contextlib.nullcontext() if is_visible("tpu") else _without_host():
        return tuple(topologies.get_topology_desc(topology_name=name, platform="tpu", **options).devices)


@contextlib.contextmanager
def _without_host() -> Iterator[None]:
    """Tell libtpu that this is no host of a TPU: it would ask the network, and print errors."""
    # A TPU belongs to one process, and libtpu locks a file. Without a TPU any number of processes compile.
    with (
        _variable("ALLOW_MULTIPLE_LIBTPU_LOAD"),
        _variable("TPU_ACCELERATOR_TYPE", "v5litepod-8"),
        _variable("TPU_WORKER_HOSTNAMES", "localhost"),
    ):
        yield


# -- kernels ---------------------------------------------------------------------------------------------------------


class _KernelFiles:
    """XLA:GPU's files with the kernels of one process; they go when it ends."""

    def __init__(self, process: int):
        self._folder = tempfile.mkdtemp(prefix="statetx-kernels-")
        self._unused: list[str] = []
        self._numbers = itertools.count()
        atexit.register(lambda: os.getpid() == process and shutil.rmtree(self._folder, ignore_errors=True))

    @contextlib.contextmanager
    def one(self) -> Iterator[str]:
        try:
            path = self._unused.pop()  # the one used last has the most kernels
        except IndexError:
            path = os.path.join(self._folder, f"{next(self._numbers)}.pb")
        try:
            yield path
        finally:
            self._unused.append(path)


_kernel_files = functools.cache(_KernelFiles)


def kernel_file() -> contextlib.AbstractContextManager[str]:
    """A file for a compilation to find kernels in that others have assembled, which takes up to half of the time, and
    to add its own.

    Candidates of a plan have most kernels in common. XLA appends to the file, so one compilation at a time has it.
    """
    return _kernel_files(os.getpid()).one()


def _version(package: str) -> str:
    return importlib.import_module(package).__version__
