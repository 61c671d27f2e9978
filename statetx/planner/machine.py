"""`calibrate`: measure the machine's rates of matrix products, memory traffic and host transfers; those of a target as XLA estimates them."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .. import _files, _jax, _records, _states
from .._equations.compiled import Program, is_out_of_memory
from .._equations.flops import flops
from .._equations.primitives import row_of
from .._errors import PolicyWarning, TargetError
from .._targets import current
from .._targets.target import Target
from .._text import format_bytes
from .._tree import num_bytes
from . import _store
from ._fields import rates_of


@dataclasses.dataclass(frozen=True)
class CostModel:
    """A device's rates, and the time of equations by the roofline model.

    An equation takes as long as its operations or its memory traffic, whichever is longer (Williams, Waterman and Patterson,
    2009). An elementwise equation, which XLA fuses into its readers, counts as reading its operands: many of these are fused,
    too, so its time errs upwards. A saved value that XLA would fuse has to be written and read.

    Attributes:
        device: JAX's ``device_kind``.
        flops_per_second: of float32 matrix products.
        bytes_per_second: reads and writes together.
        host_bytes_per_second: between device and host memory.
        transcendentals_per_second: such as exponentials and sines, where they take longer than reading and writing memory.
        spread: the largest relative difference between the runs that a rate was taken from: how stable the machine was.
    """

    device: str
    flops_per_second: float
    bytes_per_second: float
    host_bytes_per_second: float
    spread: float = 0.0
    transcendentals_per_second: float = float("inf")

    def seconds(self, eqn: Any) -> float:
        """The time of an equation, with its inner equations, times the length for a scan."""
        if eqn.primitive.name == "scan":
            body = _jax.open_jaxpr(eqn.params["jaxpr"])[0]
            return eqn.params["length"] * sum(map(self.seconds, body.eqns))
        inner = list(_jax.inner_jaxprs(eqn))
        if inner and not _jax.has_rule(eqn):  # XLA fuses functions with a rule, such as `jax.nn.relu`
            return sum(self.seconds(e) for jaxpr in inner for e in jaxpr.eqns)

        if row_of(eqn).is_label:
            return 0.0

        # Each operand is read and each output written once. Tokens and other values without a dtype take no memory.
        in_memory = eqn.invars if row_of(eqn).fuses else (*eqn.invars, *eqn.outvars)
        traffic = sum(num_bytes(v.aval) for v in in_memory if hasattr(v.aval, "dtype"))
        rate = self.transcendentals_per_second if row_of(eqn).is_transcendental else self.flops_per_second
        return max(flops(eqn) / rate, traffic / self.bytes_per_second)

    def __str__(self) -> str:
        return (
            f"{self.device}: {self.flops_per_second / 1e9:.3g} GFLOP/s, {format_bytes(int(self.bytes_per_second))}/s of memory, "
            f"{format_bytes(int(self.host_bytes_per_second))}/s to the host, to within {100 * self.spread:.0f}%"
        )


def calibrate(*, save: bool = True, size: int | None = None, repeats: int = 5, time_limit: float = 6.0) -> CostModel:
    """Measure the default device: a matrix product, a sweep through memory, an exponential, a transfer to the host and back.

    Each is repeated until its fastest runs agree to within 10%, since other work on the machine only makes runs slower. On an
    idle machine this takes about a second. ``plan(..., objective="time")`` looks the result up by the kind of device, and
    measures if there is none.

    Args:
        save: whether to write the result to the cache folder of statetx (``STATETX_CACHE``, by default
            ``$XDG_CACHE_HOME/statetx``), for later processes. A result that is not stable is not written.
        size: of the square matrices; by default it depends on the backend, and on the free memory of the device.
        repeats: number of the fastest runs that have to agree; their median counts.
        time_limit: seconds for all measurements together.

    Returns:
        `CostModel`; its ``spread`` says how well the runs agree.

    Raises:
        PolicyWarning: the runs did not agree within the time limit.
        TargetError: inside `statetx.target` of a device that is not here.

    Example:
        >>> import statetx
        >>> model = statetx.calibrate(save=False, size=256, repeats=1)
        >>> model.flops_per_second > 0 and model.bytes_per_second > 0
        True
    """
    current.refuse_to_run("calibrate")
    # On a CPU a product of the larger size, 1.1e12 operations, would take longer than the second promised above.
    n = size or (1024 if current.platform() == "cpu" else 8192)
    limit = time_limit / 4

    def measured(n: int) -> tuple[_Measured, ...]:
        a = jnp.ones((n, n), jnp.float32)
        product = _measure(jax.jit(lambda x: x @ x), a, repeats, limit)
        large = jnp.ones((_num_entries(n),), jnp.float32)
        sweep = _measure(jax.jit(lambda x: x + 1), large, repeats, limit)
        exponential = _measure(jax.jit(jnp.exp), large, repeats, limit)
        try:
            round_trip = _measure(lambda x: _jax.to_device(_jax.to_host(x)), large, repeats, limit)
        except Exception as e:  # a backend without host memory: transfers are taken to be as fast as a sweep
            if is_out_of_memory(e):
                raise
            round_trip = sweep
        return product, sweep, exponential, round_trip

    while True:
        try:
            product, sweep, exponential, round_trip = measured(n)
            break
        except jax.errors.JaxRuntimeError as e:  # a model on the device leaves little of its memory
            if size is not None or n <= _SMALLEST or not is_out_of_memory(e):
                raise
        n //= 2

    num = _num_entries(n)
    model = CostModel(
        device=_device_kind(),
        flops_per_second=2 * n**3 / product.seconds,
        bytes_per_second=8 * num / sweep.seconds,
        host_bytes_per_second=8 * num / round_trip.seconds,
        spread=max(product.spread, sweep.spread, exponential.spread, round_trip.spread),
        transcendentals_per_second=(
            num / exponential.seconds if exponential.seconds > (1 + _STABLE) * sweep.seconds else float("inf")
        ),
    )
    if model.spread > _STABLE:
        warnings.warn(
            f"calibrate: the fastest {repeats} runs differ by {100 * model.spread:.0f}%, so the rates are not stable: other "
            f"programs may be running.\nFix: call statetx.calibrate() on an idle machine, or with a longer time_limit.",
            PolicyWarning,
            stacklevel=_states.user_stacklevel(),
        )
    elif save:
        path = _path(model.device)
        if path is not None:
            _store.write(path, _records.dump(dataclasses.asdict(model), indent=1))
    return model


def cost_model() -> CostModel:
    """The stored result of `calibrate` for this kind of device, or a new one, which this process keeps.

    For a target that is not here: a stored result for such a device, or XLA's estimates of what `calibrate` runs.
    """
    device = _device_kind()
    path = _path(device)
    try:
        if path is None:
            return _model_of_process(device, current.absent())
        fields = _records.parse(_files.read(path, _MAX_BYTES, follow_links=False))
        return CostModel(**_records.verified(fields, rates_of(device, _STABLE)))
    except (OSError, ValueError):
        return _model_of_process(device, current.absent())


@functools.cache
def _model_of_process(device: str, target: Target | None) -> CostModel:
    # All plans of a process use the same rates, also where none can be stored.
    return calibrate() if target is None else _estimated_model(target)


_HOST_BYTES_PER_SECOND = 23e9  # of an H200: 2.6 GiB to the host and back in 240 ms (benchmarks/gpu.py)


def _estimated_model(target: Target) -> CostModel:
    n = 8192
    matrix, large = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((n, n), (_num_entries(n),)))
    asked = [(lambda x: x @ x, matrix), (lambda x: x + 1, large), (jnp.exp, large)]
    times = [Program(fun, [x], estimates=True).cost.seconds for fun, x in asked]
    product, sweep, exponential = (t or 0.0 for t in times)
    if not all(times):
        raise TargetError(f"XLA tells no times for the target {target.name}.\nFix: use objective='flops'.")
    num = _num_entries(n)
    return CostModel(
        device=_device_kind(),
        flops_per_second=2 * n**3 / product,
        bytes_per_second=8 * num / sweep,
        host_bytes_per_second=_HOST_BYTES_PER_SECOND,
        transcendentals_per_second=num / exponential if exponential > (1 + _STABLE) * sweep else float("inf"),
    )


def _num_entries(n: int) -> int:
    """Of the float32 array that is read and written, beside matrices of this size: much more than a cache holds."""
    return max(4 * n * n, 2**22)


def _device_kind() -> str:
    return current.device_kind()


def _path(device: str) -> pathlib.Path | None:
    folder = _store.folder()
    return folder and folder / f"{''.join(c if c.isalnum() else '-' for c in device)}.json"


_STABLE = 0.1
_MAX_BYTES = 2**16  # of a file of rates
_SMALLEST = 1024  # size of the matrices


class _Measured(NamedTuple):
    """The time of a call, and the relative difference between the runs that it is the median of."""

    seconds: float
    spread: float


def _measure(fun: Callable, x: Any, repeats: int, time_limit: float) -> _Measured:
    """Run a call, without its compilation, until the fastest `repeats` runs agree."""
    jax.block_until_ready(fun(x))
    end = time.perf_counter() + time_limit
    times: list[float] = []
    while True:
        start = time.perf_counter()
        jax.block_until_ready(fun(x))
        times.append(time.perf_counter() - start)
        if len(times) < repeats:
            continue
        # Not zero, where the clock is coarser than the call: rates are quotients by it.
        fastest = [max(t, 1e-9) for t in sorted(times)[:repeats]]
        spread = fastest[-1] / fastest[0] - 1
        if spread <= _STABLE or time.perf_counter() > end:
            return _Measured(statistics.median(fastest), spread)
