"""`calibrate`: measure the machine's rates of matrix products, memory traffic and host transfers."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .. import _jax
from .._equations.flops import flops
from .._text import format_bytes
from .._tree import num_bytes


@dataclasses.dataclass(frozen=True)
class CostModel:
    """A device's rates, and the time of equations by the roofline model.

    An equation takes as long as its operations or its memory traffic, whichever is longer (Williams, Waterman and Patterson,
    2009). Every elementwise equation counts as reading and writing memory, although XLA fuses many of them: times of these
    err upwards.

    Attributes:
        device: JAX's ``device_kind``.
        flops_per_second: of float32 matrix products.
        bytes_per_second: reads and writes together.
        host_bytes_per_second: between device and host memory.
    """

    device: str
    flops_per_second: float
    bytes_per_second: float
    host_bytes_per_second: float

    def seconds(self, eqn: Any) -> float:
        """The time of an equation, with its inner equations, times the length for a scan."""
        if eqn.primitive.name == "scan":
            body = _jax.open_jaxpr(eqn.params["jaxpr"])[0]
            return eqn.params["length"] * sum(map(self.seconds, body.eqns))
        inner = list(_jax.inner_jaxprs(eqn))
        if inner and not _jax.has_rule(eqn):  # XLA fuses functions with a rule, such as `jax.nn.relu`
            return sum(self.seconds(e) for jaxpr in inner for e in jaxpr.eqns)

        # Each operand is read and each output written once. Tokens and other values without a dtype take no memory.
        traffic = sum(num_bytes(v.aval) for v in (*eqn.invars, *eqn.outvars) if hasattr(v.aval, "dtype"))
        return max(flops(eqn) / self.flops_per_second, traffic / self.bytes_per_second)

    def __str__(self) -> str:
        return (
            f"{self.device}: {self.flops_per_second / 1e9:.3g} GFLOP/s, {format_bytes(int(self.bytes_per_second))}/s of memory, "
            f"{format_bytes(int(self.host_bytes_per_second))}/s to the host"
        )


def calibrate(*, save: bool = True, size: int | None = None, repeats: int = 5) -> CostModel:
    """Measure the default device: a matrix product, a sweep through memory, a transfer to the host and back.

    Takes about a second. ``plan(..., objective="time")`` looks the result up by the kind of device, and measures if there is
    none.

    Args:
        save: whether to write the result to the user's cache folder (``$XDG_CACHE_HOME/statetx``), for later processes.
        size: of the square matrices; by default it depends on the backend.
        repeats: runs of each measurement; the median counts.

    Returns:
        `CostModel`.

    Example:
        >>> import statetx
        >>> model = statetx.calibrate(save=False, size=256, repeats=1)
        >>> model.flops_per_second > 0 and model.bytes_per_second > 0
        True
    """
    # On a CPU a product of the larger size, 1.1e12 operations, would take longer than the second promised above.
    n = size or (1024 if jax.default_backend() == "cpu" else 8192)

    a = jnp.ones((n, n), jnp.float32)
    product = _seconds(jax.jit(lambda x: x @ x), a, repeats)
    large = jnp.ones((max(4 * n * n, 2**22),), jnp.float32)
    sweep = _seconds(jax.jit(lambda x: x + 1), large, repeats)
    try:
        round_trip = _seconds(lambda x: _jax.to_device(_jax.to_host(x)), large, repeats)
    except Exception:  # a backend without host memory: transfers are taken to be as fast as a sweep
        round_trip = sweep

    model = CostModel(
        device=_device_kind(),
        flops_per_second=2 * n**3 / product,
        bytes_per_second=2 * large.nbytes / sweep,
        host_bytes_per_second=2 * large.nbytes / round_trip,
    )
    if save:
        path = _path(model.device)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(dataclasses.asdict(model), indent=1))
    return model


def cost_model() -> CostModel:
    """The stored result of `calibrate` for this kind of device, or a new one."""
    path = _path(_device_kind())
    try:
        return CostModel(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return calibrate()


def _device_kind() -> str:
    return jax.local_devices()[0].device_kind


def _path(device: str) -> pathlib.Path:
    cache = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(cache) / "statetx" / f"{''.join(c if c.isalnum() else '-' for c in device)}.json"


def _seconds(fun: Callable, x: Any, repeats: int) -> float:
    """The median time of a call, without compilation."""
    jax.block_until_ready(fun(x))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(fun(x))
        times.append(time.perf_counter() - start)
    # Not zero, where the clock is coarser than the call: rates are quotients by it.
    return max(statistics.median(times), 1e-9)
