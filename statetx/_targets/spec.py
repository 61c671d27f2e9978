"""Figures of a kind of device, read from the table of common devices or from a file, and checked."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import tomllib
from collections.abc import Mapping
from typing import Any

from .._records import Check, real, record, row, text, whole
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


@functools.cache
def table() -> dict[str, Spec]:
    """The common devices, by name."""
    groups = tomllib.loads(_DEVICES.read_text(encoding="utf-8"))
    return {name: make_spec(platform, fields) for platform, group in groups.items() for name, fields in group.items()}


def make_spec(platform: str, fields: Mapping[str, Any]) -> Spec:
    """The figures of a device of a platform, which `CHECKS` accepts."""
    if platform == "gpu":
        return Gpu(**{**fields, "capability": tuple(fields["capability"])})
    return (Tpu if platform == "tpu" else Cpu)(**fields)


def short_text(x: Any, at: str) -> None:
    """Check a name: a file of a target goes into messages and into XLA's text."""
    text(x, at)
    if len(x) > 200 or not x.isprintable() or set(x) & set('{}"\\'):
        raise ValueError(f"{at} must be a short name, got {brief(x)}")


# Upper bounds keep the numbers of a damaged file away from XLA, which allocates by some of them.
_COMMON = {"kind": short_text, "memory_bytes": whole(2**20, 2**50), "source": short_text}
CHECKS: dict[str, Check] = {
    "gpu": record(
        _COMMON
        | {
            "capability": row(whole(1, 99), whole(0, 99)),
            "cores": whole(1, 10_000),
            "fpus_per_core": whole(1, 10_000),
            "threads_per_core": whole(32, 100_000),
            "shared_memory_per_core": whole(1024, 2**30),
            "shared_memory_per_block_optin": whole(1024, 2**30),
            "memory_bandwidth": whole(10**6, 10**16),
            "l2_cache_bytes": whole(1, 2**40),
            "clock_ghz": real(0.01, 100),
        }
    ),
    "tpu": record(_COMMON | {"generation": short_text, "dimensions": whole(2, 3)}),
    "cpu": record(_COMMON),
}
