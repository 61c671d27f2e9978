"""Lower programs for devices that are not there.

A program is traced for the devices of this machine: its arguments, meshes and constraints name them. `lowered_for`
lowers it by the rules of another platform and exchanges the devices of the module, which names devices by their number
only.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from typing import Any

from jax._src import config
from jax._src.interpreters import pxla
from jax._src.sharding_impls import UNSPECIFIED  # pyright: ignore[reportPrivateImportUsage]
from jax.experimental.compilation_cache.compilation_cache import reset_cache

_LOWERING_NAMES = {"gpu": "cuda"}


class TooFewDevices(ValueError):
    """A program is for more devices (`needed`) than it can be compiled for."""

    def __init__(self, needed: int):
        super().__init__(needed)
        self.needed = needed


def lowered_for(traced: Any, platform: str, devices: Sequence[Any]) -> Any:
    """Lower a ``jax.stages.Traced`` for compile-only devices of a platform.

    Raises:
        TooFewDevices: the program is for more devices.
    """
    lowered = traced.lower(lowering_platforms=(_LOWERING_NAMES.get(platform, platform),))
    # JAX may keep both for another target.
    lowered, computation = copy.copy(lowered), copy.copy(lowered._lowering)
    num = computation.compile_args["num_devices"]
    if num > len(devices):
        raise TooFewDevices(num)
    # The module has the shardings of outputs. JAX would compare these with memories that a compile-only GPU does not
    # list.
    outputs = [UNSPECIFIED for _ in computation.compile_args["out_shardings"]]
    computation.compile_args = {**computation.compile_args, "backend": devices[0].client, "out_shardings": outputs}
    computation._device_list = pxla._create_device_list(tuple(devices[:num]))
    computation._executable = None
    lowered._lowering = computation
    return lowered


@contextlib.contextmanager
def without_compilation_cache() -> Iterator[None]:
    """A context in which JAX neither reads nor writes its cache of compiled programs on the disk.

    The cache's key lacks the figures of a compile-only GPU, so that it would give one card's program for another; and
    it lacks the names of functions.
    """
    # JAX asks its setting once in a process, and remembers the answer until it is reset.
    with config.enable_compilation_cache(False):
        reset_cache()
        try:
            yield
        finally:
            reset_cache()
