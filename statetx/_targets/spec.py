"""Figures of a kind of device, read from the table of common devices or from a file, and checked."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import tomllib
from collections.abc import Mapping
from typing import Any

from .._errors import TargetError
from .._text import brief

_DEVICES = pathlib.Path(__file__).with_name("devices.toml")


@dataclasses.dataclass(frozen=True)
class Gpu:
    """A kind of NVIDIA GPU.

    Attributes:
        kind: JAX's name of it, ``device_kind``.
        capability: major and minor number of the compute capability.
        cores: number of streaming multiprocessors; the figures "per core" are those of one.
        memory_bytes: of the device. JAX reserves a part of it for programs, see `statetx.Target.memory_bytes`.
        memory_bandwidth: bytes per second.
        source: where the figures come from.
    """

    kind: str
    capability: tuple[int, int]
    cores: int
    fpus_per_core: int
    threads_per_core: int
    shared_memory_per_core: int
    shared_memory_per_block_optin: int
    memory_bytes: int
    memory_bandwidth: int
    l2_cache_bytes: int
    clock_ghz: float
    source: str

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
class Tpu:
    """A kind of TPU.

    Attributes:
        kind: JAX's name of it, ``device_kind``.
        generation: XLA's name of it, such as ``"v5e"``.
        dimensions: of the grid that the chips form, 2 or 3.
        memory_bytes: what a program may use on a chip.
        source: where the figures come from.
    """

    kind: str
    generation: str
    dimensions: int
    memory_bytes: int
    source: str

    platform = "tpu"


@dataclasses.dataclass(frozen=True)
class Cpu:
    """A CPU, as JAX divides it into devices."""

    kind: str
    memory_bytes: int
    source: str

    platform = "cpu"


Spec = Gpu | Tpu | Cpu
KINDS: dict[str, type] = {"gpu": Gpu, "tpu": Tpu, "cpu": Cpu}


@functools.cache
def table() -> dict[str, Spec]:
    """The common devices, by name."""
    groups = tomllib.loads(_DEVICES.read_text(encoding="utf-8"))
    return {
        name: read_spec(platform, fields, _DEVICES.name)
        for platform, group in groups.items()
        for name, fields in group.items()
    }


# Upper bounds keep the numbers of a damaged file away from XLA, which allocates by some of them.
_RANGES = {
    "cores": (1, 10_000),
    "fpus_per_core": (1, 10_000),
    "threads_per_core": (32, 100_000),
    "shared_memory_per_core": (1024, 2**30),
    "shared_memory_per_block_optin": (1024, 2**30),
    "memory_bytes": (2**20, 2**50),
    "memory_bandwidth": (10**6, 10**16),
    "l2_cache_bytes": (1, 2**40),
    "clock_ghz": (0.01, 100),
    "dimensions": (2, 3),
}


def read_spec(platform: Any, fields: Any, where: str) -> Spec:
    """Check the figures of a device that a file names.

    Raises:
        TargetError: a figure is missing, unknown, of another type or out of range; `where` names the file.
    """
    kind = KINDS.get(platform) if isinstance(platform, str) else None
    if kind is None or not isinstance(fields, Mapping):
        raise TargetError(
            f"{where}: the platform of a device is one of {', '.join(KINDS)}, and this file has {brief(platform)}."
        )
    types = {field.name: field.type for field in dataclasses.fields(kind)}
    for problem, names in (("lacks", types.keys() - fields.keys()), ("has an unknown", fields.keys() - types.keys())):
        if names:
            raise TargetError(
                f"{where}: the device {problem} field {brief(min(map(str, names)))}; its fields are {', '.join(types)}."
            )
    values = {name: _checked(name, types[name], fields[name], where) for name in types}
    return kind(**values)


def _checked(name: str, declared: str, value: Any, where: str) -> Any:
    if name == "capability":
        is_pair = (
            isinstance(value, (list, tuple)) and len(value) == 2 and all(type(n) is int and 0 <= n < 100 for n in value)
        )
        if not is_pair:
            raise TargetError(f"{where}: capability={brief(value)} is not a compute capability, such as [9, 0].")
        return tuple(value)
    if declared == "str":
        if not isinstance(value, str) or len(value) > 200 or not value.isprintable():
            raise TargetError(f"{where}: {name}={brief(value)} is not a short text.")
        return value
    low, high = _RANGES[name]
    is_number = type(value) is int or (declared == "float" and type(value) is float)
    if not is_number or not low <= value <= high:
        raise TargetError(f"{where}: {name}={brief(value)} is not a number from {low} to {high}.")
    return float(value) if declared == "float" else value
