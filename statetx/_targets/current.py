"""The device that programs are compiled for: the only module that asks JAX for its backend, for its devices.

`statetx.target` replaces the machine's devices for a block, ``STATETX_TARGET`` for a process. Every decision by device
asks here. The target is part of JAX's cache keys (``jax.make_user_context``), so nothing traced or compiled for one
device is used for another.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import inspect
import os
from collections.abc import Callable
from typing import Any, TypeVar, cast

import jax
from jax.extend.backend import get_backend

from .._blocks import Block
from .._errors import TargetError
from .target import Target

_VARIABLE = "STATETX_TARGET"
F = TypeVar("F", bound=Callable[..., Any])
_context: Any = jax.make_user_context(None)


def target(device: Target | str | os.PathLike[str] | None, /) -> Block[Target | None]:
    """Compile for a device that may not be here, in every call of the block that measures, profiles or plans.

    Inside, `plan`, `measure`, `memory_report`, `memory_profile`, `explain_oom`, `loop_report`, `max_batch`,
    `microbatch` with ``budget=`` and `saved_residuals` compile for the target, and what depends on the device is chosen
    for it. Arrays stay where they are, and what runs, runs here. Also a decorator of a function. A block belongs to its
    thread, as JAX's do: a coroutine does not wait inside of one.

    Args:
        device: a `Target`, the name of one, or None for the devices of this machine.

    Raises:
        TargetError: the name is not known, or its compiler is not installed.

    Example:
        >>> import jax.numpy as jnp, statetx
        >>> with statetx.target(None):
        ...     cost = statetx.measure(lambda x: (x * x).sum(), jnp.ones(4), gradient=False)
        >>> cost.argument_bytes
        16
    """
    chosen = as_target(device)
    call = f"statetx.target({None if device is None else str(getattr(device, 'name', device))!r})"
    setting = _HERE if chosen is None else chosen
    return Block(call, "so that nothing is compiled for it", lambda: _context(setting), chosen)


_HERE = "here"  # unlike None, it also takes the place of STATETX_TARGET


def within(device: Target | str | os.PathLike[str] | None) -> contextlib.AbstractContextManager[Any]:
    """The block of an argument ``target=``; None leaves the target that is in force."""
    return contextlib.nullcontext() if device is None else target(device)


def bind(fun: F) -> F:
    """A function that runs for the target that is in force now, wherever it is called."""
    chosen = current()

    @functools.wraps(fun)
    def run(*args: Any, **kwargs: Any) -> Any:
        with kept(chosen):
            return fun(*args, **kwargs)

    return cast("F", run)


def kept(chosen: Target | None) -> contextlib.AbstractContextManager[Any]:
    """The block of an earlier `current`. If that is still in force, JAX's caches stay unchanged."""
    return contextlib.nullcontext() if current() == chosen else target(chosen)


def as_target(device: Target | str | os.PathLike[str] | None) -> Target | None:
    """The `Target` of an argument ``target=``; without its compiler, raises `TargetError`."""
    if device is None:
        return None
    chosen = device if isinstance(device, Target) else Target(device)
    if chosen.missing:
        raise TargetError(f"This machine cannot compile for {chosen.name}: {chosen.missing}.")
    return chosen


def takes_target(fun: F) -> F:
    """Give a function the keyword ``target=``, under which it runs.

    The keywords of the functions that measure belong to the measured function, which may have a `target` of its own,
    such as labels: a name, a path and a `Target` are ours, anything else is passed on.
    """
    signature = inspect.signature(fun)
    parameters = list(signature.parameters.values())
    index = next((i for i, p in enumerate(parameters) if p.kind is p.VAR_KEYWORD), len(parameters))
    parameter = inspect.Parameter(
        "target", inspect.Parameter.KEYWORD_ONLY, default=None, annotation="Target | str | None"
    )

    @functools.wraps(fun)
    def with_target(*args: Any, **kwargs: Any) -> Any:
        if isinstance(kwargs.get("target"), (Target, str, os.PathLike)):
            with target(kwargs.pop("target")):
                return fun(*args, **kwargs)
        if kwargs.get("target", ...) is None and not _has_target(*args[:1]):
            del kwargs["target"]  # our default
        return fun(*args, **kwargs)

    parameters = [*parameters[:index], parameter, *parameters[index:]]
    with_target.__signature__ = signature.replace(parameters=parameters)  # pyright: ignore[reportAttributeAccessIssue]
    return cast("F", with_target)


def _has_target(*measured: Any) -> bool:
    """Whether a function takes a keyword `target`."""
    try:
        parameters = [p for fun in measured for p in inspect.signature(fun).parameters.values()]
    except (TypeError, ValueError):  # of a builtin
        return True
    return any(p.name == "target" or p.kind is p.VAR_KEYWORD for p in parameters)


def current() -> Target | None:
    """The target of the running block or of ``STATETX_TARGET``; None for the devices of this machine."""
    value = _context.value
    if value is None:
        named = os.environ.get(_VARIABLE)
        return _of_environment(named) if named else None
    return None if value == _HERE else value


def _of_environment(name: str) -> Target | None:
    try:
        return as_target(name)
    except TargetError as e:
        raise TargetError(f"{_VARIABLE}: {e.args[0]}") from e


def absent() -> Target | None:
    """The target if it is not this machine: a GPU or a TPU."""
    chosen = current()
    return None if chosen is None or chosen.platform == "cpu" else chosen


def platform() -> str:
    """The platform of the device that programs are compiled for: ``"cpu"``, ``"gpu"`` or ``"tpu"``."""
    chosen = current()
    return jax.default_backend() if chosen is None else chosen.platform


def device_kind() -> str:
    """The kind of the device that programs are compiled for, such as ``"NVIDIA H100 80GB HBM3"``."""
    chosen = current()
    return jax.local_devices()[0].device_kind if chosen is None else chosen.kind


def num_devices() -> int:
    """The number of devices that programs can be compiled for together."""
    chosen = current()
    return jax.device_count() if chosen is None else chosen.num_devices


def memory_kinds() -> list[str]:
    """The memories that the device can address, its default memory first."""
    chosen = current()
    if chosen is not None and chosen.platform != "cpu":
        return ["device", "pinned_host"]  # a compile-only GPU does not list its own
    device = jax.local_devices()[0]
    names = [device.default_memory().kind, *(m.kind for m in device.addressable_memories())]
    return list(dict.fromkeys(names))


def local_device() -> Any:
    """A device of this machine, for the shardings of programs: `lower` exchanges it for the target's."""
    return jax.local_devices()[0]


def memory_stats() -> dict[str, int] | None:
    """Figures that the first device gives of its memory; of a target, its size; None on a CPU."""
    chosen = current()
    return local_device().memory_stats() if chosen is None else {"bytes_limit": chosen.memory_bytes}


def local_devices() -> list[Any]:
    """The devices of this machine and process."""
    return jax.local_devices()


def first_devices(num: int) -> list[Any]:
    """Devices of this machine, for a mesh of a program."""
    return jax.devices()[:num]


def environment() -> tuple[Any, ...]:
    """Name of all that a compiled program depends on beside its equations and options: the backend, or the target."""
    chosen = current()
    if chosen is not None and chosen.platform != "cpu":
        return (chosen.platform, *chosen.key, _versions(chosen.platform))
    backend, devices = get_backend(), jax.devices()
    return (backend.platform, backend.platform_version, devices[0].device_kind, len(devices))


def _versions(platform_name: str) -> tuple[str, ...]:
    names = ("libtpu",) if platform_name == "tpu" else ("jax-cuda12-plugin", "jax-cuda13-plugin")
    versions = []
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions.append(f"{name} {importlib.metadata.version(name)}")
    return tuple(versions)
