"""Lower programs, also for devices that are not there."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax._src import config
from jax._src.interpreters import pxla
from jax._src.sharding_impls import UNSPECIFIED  # pyright: ignore[reportPrivateImportUsage]
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from .equations import open_jaxpr
from .evaluation import evaluate
from .staging import name_function


def compile_settings(lowered: Any) -> list[str]:
    """Settings that the compiler gets with a lowered program (``jax.stages.Lowered``) beside its text."""
    computation = lowered._lowering
    names = ("in_shardings", "out_shardings", "in_layouts", "out_layouts", "num_devices")
    return [repr(x) for x in (computation._compiler_options_kvs, *map(computation.compile_args.get, names))]


def num_devices_of(lowered: Any) -> int | None:
    """The number of devices that a lowered program (``jax.stages.Lowered``) runs on; None if it does not say."""
    return lowered._lowering.compile_args.get("num_devices") or None


def num_devices_of_compiled(compiled: Any) -> int:
    """The number of devices that a compiled program (``jax.stages.Compiled``) runs on."""
    # Its `input_shardings` raise for a function that closes over a Ref.
    shardings = (*compiled._executable._in_shardings, *compiled._executable._out_shardings)
    return max((len(s.device_set) for s in shardings), default=1)


def num_parts_of(lowered: Any) -> int:
    """The number of parts that the inputs of a lowered program are divided into, by the axes of the mesh that they use;
    1 if each device has all of them.
    """
    sizes: dict[str, int] = {}
    for sharding in lowered._lowering.compile_args["in_shardings"]:
        if isinstance(sharding, jax.sharding.NamedSharding):
            axes = [
                axis for entry in sharding.spec.partitions for axis in (entry if isinstance(entry, tuple) else (entry,))
            ]
            sizes |= {axis: sharding.mesh.shape[axis] for axis in axes if axis in sharding.mesh.shape}
    return math.prod(sizes.values())


# A program is traced for the devices of this machine: its arguments, meshes and constraints name them. `lowered_for`
# lowers it by the rules of another platform and exchanges the devices of the module, which names devices by their
# number only.

_LOWERING_NAMES = {"gpu": "cuda"}


class CallOperand(NamedTuple):
    """An operand of a jitted function: an argument, or its type; or a constant of the program."""

    value: Any
    name: str = ""
    is_donated: bool = False
    is_constant: bool = False


def traced_alone(eqn: Any, operands: Sequence[CallOperand]) -> Any:
    """The ``jax.stages.Traced`` of the jitted function that an equation calls, as if no other one called it: with
    its own order of inputs and outputs, shardings and donated arguments.
    """
    params, (jaxpr, consts) = eqn.params, open_jaxpr(eqn.params["jaxpr"])
    is_donated = [x.is_donated or flag for x, flag in zip(operands, params["donated_invars"], strict=True)]
    inputs = [(x, flag) for x, flag in zip(operands, is_donated, strict=True) if not x.is_constant]

    def run(*arrays: Any) -> list[Any]:
        remaining = iter(arrays)
        return evaluate(jaxpr, consts, [x.value if x.is_constant else next(remaining) for x in operands])

    run.__name__ = run.__qualname__ = params["name"]
    name_function(run, jaxpr.debug_info.traced_for, jaxpr.debug_info.func_src_info, [x.name for x, _ in inputs])
    shardings = [None if s is UNSPECIFIED else s for s in params["out_shardings"]]
    options: dict[str, Any] = {"out_shardings": shardings} if any(s is not None for s in shardings) else {}
    donated = tuple(n for n, (_, flag) in enumerate(inputs) if flag)
    jitted = jax.jit(run, donate_argnums=donated, keep_unused=params["keep_unused"], **options)
    return jitted.trace(*(x.value for x, _ in inputs))


def with_jaxpr(traced: Any, jaxpr: Any) -> Any:
    """A ``jax.stages.Traced`` with another closed jaxpr, which takes and returns the same arrays."""
    traced = copy.copy(traced)
    traced._params, traced._lojax = {**traced._params, "jaxpr": jaxpr}, None
    return traced


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
    """Switch off JAX's cache of compiled programs on the disk for a block.

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
