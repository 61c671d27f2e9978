"""Costs of compiled programs, without running them: memory, operations."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from .. import _jax
from .._atomic import new_lock
from .._cached import cached_property
from .._jax import Jaxpr, Literal
from .._tables import Cell, Column, Table
from .._targets import current
from .._text import format_bytes, format_flops, format_seconds
from .._tree import num_bytes
from .compiler import compile_to_measure, count_compilation, estimate_options, lower
from .primitives import JIT, count
from .release.program import with_most_released
from .updates import order_of_updates


@dataclasses.dataclass(frozen=True)
class Cost:
    """Operations and memory of a compiled program, on one device.

    Attributes:
        flops: operations of its equations, loops counted with their lengths and checkpointed loops with all runs of
            their steps; the body of a `while` loop of unknown length once. Operations outside of a shard_map count as
            divided evenly along the axes of the mesh that divide an input; what devices repeat there is more.
        compiled_flops: operations as XLA counts them: the body of a loop once. None where XLA does not tell.
        argument_bytes, output_bytes, temp_bytes: memory, by XLA's memory analysis.
        alias_bytes: of the outputs, those in the memory of donated arguments.
        seconds: XLA's estimate of the time of a run on a GPU or TPU; None on CPUs, and where XLA does not know
            the device, or how often a loop runs.
    """

    flops: int
    compiled_flops: float | None
    argument_bytes: int
    output_bytes: int
    temp_bytes: int
    alias_bytes: int
    seconds: float | None = None

    @property
    def fixed_bytes(self) -> int:
        """Arguments and outputs together. Donated arguments whose memory an output takes count once."""
        return self.argument_bytes + self.output_bytes - self.alias_bytes

    @property
    def peak_bytes(self) -> int:
        """Arguments, outputs and temporaries together."""
        return self.fixed_bytes + self.temp_bytes

    def __str__(self) -> str:
        sizes = {"arguments": self.argument_bytes, "outputs": self.output_bytes, "temporaries": self.temp_bytes}
        listed = ", ".join(f"{name} {format_bytes(size)}" for name, size in sizes.items())
        time = "" if self.seconds is None else f"; estimated {format_seconds(self.seconds)}"
        return f"{format_flops(self.flops)} operations; {listed}; {format_bytes(self.peak_bytes)} in all{time}"

    def _repr_html_(self) -> str:
        return self._table()._repr_html_()

    def _table(self) -> Table:
        sizes = (self.argument_bytes, self.output_bytes, self.temp_bytes, self.peak_bytes)
        names = ("operations", "arguments", "outputs", "temporaries", "in all")
        cells = [Cell(format_flops(self.flops)), *(Cell(format_bytes(size)) for size in sizes)]
        if self.seconds is not None:
            names, cells = (*names, "estimated time"), [*cells, Cell(format_seconds(self.seconds))]
        return Table("Cost of the compiled program", [Column(name, "right") for name in names], [cells])


class Program:
    """A function of arrays, traced for arguments of certain types and compiled on request. It is never run.

    Args:
        donated: positions of the arguments whose memory the outputs may take.
        estimates: whether XLA is asked for the time of a run, which takes a hundredth of the time of a compilation.

    Attributes:
        lowered, compiled: the ``jax.stages`` objects.
        compiler_options: those that it is compiled with.
        flops: operations of its equations on all devices, loops counted with their lengths and checkpointed loops with
            all runs of their steps; the body of a `while` loop of unknown length once, and of a shard_map one device.
        cost: see `Cost`; its `flops` are these.
    """

    def __init__(
        self,
        fun: Callable[..., Any],
        args: Sequence[Any],
        compiler_options: dict[str, Any] | None = None,
        donated: Sequence[int] = (),
        *,
        estimates: bool = False,
    ):
        if estimates:
            compiler_options = {**estimate_options(), **(compiler_options or {})} or None
        self._platform = current.platform()
        traced = jax.jit(fun, donate_argnums=tuple(donated)).trace(*args)
        self._set(_as_called(traced, args, donated), compiler_options)

    @classmethod
    def of_traced(cls, traced: Any, compiler_options: dict[str, Any] | None = None) -> Program:
        """The program of a jitted function that is traced already (``jax.stages.Traced``)."""
        program = cls.__new__(cls)
        program._platform = ""
        program._set(traced, compiler_options)
        return program

    def in_order(self) -> Program | None:
        """The program with its outputs in the order of the donated inputs that they update; None if they are."""
        traced = in_order(self._traced)
        return None if traced is None else Program.of_traced(traced, self.compiler_options)

    def released(self) -> Program | None:
        """The program with updates of scanned layers in the loops of their backward pass; None if none can be."""
        donated = [n for n, x in enumerate(jax.tree.leaves(self._traced.args_info)) if x.donated]
        jaxpr = with_most_released(self._traced.jaxpr, donated)
        if jaxpr is self._traced.jaxpr or _is_on_mesh(jaxpr):
            return None
        traced = _retraced(self._traced, lambda *arrays: _jax.evaluate(*_jax.open_jaxpr(jaxpr), arrays))
        return Program.of_traced(traced, self.compiler_options)

    @property
    def jaxpr(self) -> Any:
        """Its equations, as a closed jaxpr."""
        return self._traced.jaxpr

    def _set(self, traced: Any, compiler_options: dict[str, Any] | None) -> None:
        self._traced, self.lowered = traced, lower(traced)
        # XLA removes dead equations, so they are not counted, nor are the arguments that only these read.
        jaxpr = _jax.without_dead_code(traced.jaxpr)
        self._jaxpr, self.flops, self._largest = jaxpr, count(jaxpr), _largest_value(jaxpr)
        read = _jax.read_variables(jaxpr)
        self._read_bytes = num_bytes([v.aval for v in jaxpr.invars if v in read])
        self.compiler_options = compiler_options
        # Unlike a `cached_property`, one thread compiles and the others wait.
        self._lock = new_lock()
        self._compiled: Any = None
        self._cost: Cost | None = None

    @property
    def _tells_seconds(self) -> bool:
        # Without these options a GPU's program, which takes seconds to decode, has no estimates.
        return self._platform != "gpu" or _jax.ESTIMATES.keys() <= (self.compiler_options or {}).keys()

    @property
    def least_bytes(self) -> int:
        """Bytes of its arguments on one device, or less: they count as divided among all devices. Nothing is
        compiled.
        """
        return self._read_bytes // (_jax.num_devices_of(self.lowered) or current.num_devices())

    @property
    def compiled(self) -> Any:
        with self._lock:
            if self._compiled is None:
                count_compilation()
                self._compiled = compile_to_measure(self.lowered, self.compiler_options)
            return self._compiled

    @cached_property
    def cost_on_device(self) -> Cost:
        """The cost with the operations of one device."""
        return dataclasses.replace(self.cost, flops=count(self._jaxpr, _jax.num_parts_of(self.lowered)))

    @property
    def cost(self) -> Cost:
        compiled = self.compiled
        with self._lock:
            if self._cost is None:
                seconds = _jax.estimated_seconds(compiled, self._platform) if self._tells_seconds else None
                self._cost = _cost_of(compiled, self.flops, self._largest, seconds)
            return self._cost


def _cost_of(compiled: Any, num_flops: int, largest: int, seconds: float | None) -> Cost:
    memory, analysis = compiled.memory_analysis(), compiled.cost_analysis()
    assert memory is not None
    return Cost(
        flops=num_flops,
        # Some backends have no analysis. One without a count is of a program that only moves data.
        compiled_flops=None if analysis is None else float(analysis.get("flops", 0.0)),
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        temp_bytes=temp_bytes_of(memory, largest),
        alias_bytes=memory.alias_size_in_bytes,
        seconds=seconds,
    )


def temp_bytes_of(memory: Any, largest: int) -> int:
    """The temporary bytes in ``Compiled.memory_analysis()``.

    A figure below the size of the largest value of the program was seen to be wrong. It may be right, since XLA
    computes values within the kernels that read them, and in the memory of outputs: there the buffer assignment itself
    is read, and counts if it is more.
    """
    told = memory.temp_size_in_bytes
    return told if told >= largest else max(told, _jax.reserved_bytes(memory))


def _largest_value(jaxpr: Jaxpr) -> int:
    """The size of the largest value that a jaxpr computes, at any depth."""
    return max((num_bytes(v.aval) for eqn in _jax.equations_in(jaxpr) for v in eqn.outvars), default=0)


def _as_called(traced: Any, args: Sequence[Any], donated: Sequence[int]) -> Any:
    """The trace of the jitted function that a program consists of, which is what runs, else the trace itself.

    Where XLA can update in place depends on the order of donated arrays among the inputs and outputs, and on the
    sharding of the outputs.
    """
    jaxpr, leaves = traced.jaxpr.jaxpr, jax.tree.leaves(args)
    if len(jaxpr.eqns) != 1 or jaxpr.eqns[0].primitive.name not in JIT or len(leaves) != len(jaxpr.invars):
        return traced
    names = jaxpr.debug_info.arg_names or [""] * len(leaves)
    constants = zip(jaxpr.constvars, traced.jaxpr.consts, strict=True)
    operands = {v: _jax.CallOperand(x, is_constant=True) for v, x in constants}
    for n, (v, x) in enumerate(zip(jaxpr.invars, leaves, strict=True)):
        operands[v] = _jax.CallOperand(x, names[n], is_donated=n in donated)
    literal = lambda v: _jax.CallOperand(v.val, is_constant=True)
    (eqn,) = jaxpr.eqns
    return _jax.traced_alone(eqn, [literal(v) if isinstance(v, Literal) else operands[v] for v in eqn.invars])


def in_order(traced: Any) -> Any:
    """The trace of a program on one device with its outputs in the order of the donated inputs that they update; None
    if they are.
    """
    inputs = jax.tree.leaves(traced.args_info)
    is_donated = [x.donated for x in inputs]
    order = order_of_updates(traced.jaxpr, is_donated) if any(is_donated) else None
    if order is None or _is_on_mesh(traced.jaxpr):
        return None

    def run(*arrays: Any) -> list[Any]:
        outs = _jax.evaluate(traced.jaxpr.jaxpr, traced.jaxpr.consts, arrays)
        return [outs[o] for o in order]

    return _retraced(traced, run)


def _is_on_mesh(jaxpr: Any) -> bool:
    avals: list[Any] = [v.aval for v in _jax.open_jaxpr(jaxpr)[0].invars]
    return any(not aval.sharding.mesh.empty for aval in avals)


def _retraced(traced: Any, run: Callable[..., Any]) -> Any:
    """The trace of another function of the same arrays, with the same donation."""
    inputs = jax.tree.leaves(traced.args_info)
    donated = tuple(n for n, x in enumerate(inputs) if x.donated)
    types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs]
    return jax.jit(run, donate_argnums=donated).trace(*types)


def donated_inputs(jaxpr: Jaxpr) -> tuple[int, ...]:
    """The inputs that a jitted function, called by this program, donates."""
    donated = {
        v
        for eqn in jaxpr.eqns
        for v, flag in zip(eqn.invars, eqn.params.get("donated_invars", ()), strict=False)
        if flag and not isinstance(v, Literal)
    }
    return tuple(i for i, v in enumerate(jaxpr.invars) if v in donated)


def compile_together(programs: Iterable[Program]) -> None:
    """Compile several programs in threads: XLA releases the GIL. An iterator may trace the next meanwhile."""
    futures: dict[Program, concurrent.futures.Future[Any]] = {}
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        for program in programs:
            if program not in futures:  # a second thread would only wait for the first
                futures[program] = pool.submit(lambda p: p.compiled, program)
        for future in futures.values():
            future.result()
