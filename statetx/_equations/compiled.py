"""Memory and operation counts of compiled programs, without running them."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import logging
import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from .. import _jax
from .._atomic import new_lock
from .._errors import TargetError
from .._jax import Jaxpr, Literal, Var
from .._tables import Cell, Column, Table
from .._targets import current
from .._targets.absent import quiet_stderr
from .._targets.plugins import kernel_file
from .._targets.target import Target
from .._text import counted, format_bytes, format_flops, format_seconds
from .._tree import num_bytes
from .primitives import JIT, count
from .release import with_most_released
from .updates import order_of_updates

_log = logging.getLogger("statetx")


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


def memory_analysis_options() -> dict[str, Any]:
    """Compiler options for a program that is compiled only to measure its memory.

    On a CPU they leave the machine code unoptimized, which halves the compile time, and emit it as one module, which
    saves a fifth for small programs. XLA assigns memory before that step, so the memory is exact.
    """
    on_cpu = {"xla_backend_optimization_level": 0, "xla_cpu_parallel_codegen_split_count": 1}
    return on_cpu if current.platform() == "cpu" else {}


def candidate_options() -> dict[str, Any]:
    """Compiler options for a program whose memory and time are compared with those of others."""
    return {**memory_analysis_options(), **estimate_options()}


_WITHOUT_TIMING = {"xla_gpu_autotune_level": 0}


def fast_compile_options() -> dict[str, Any]:
    """Faster compiler options for the same purpose; memory may differ a little, on CPUs by a few hundred bytes.

    On a GPU they leave out that XLA times kernels, which takes two thirds of a compilation; for a target it never does.
    """
    options = candidate_options()
    if current.absent() is not None:
        return options
    on_cpu = {**options, "xla_cpu_use_fusion_emitters": False}  # jaxlib 0.12 no longer has it
    faster = {"cpu": on_cpu, "gpu": {**options, **_WITHOUT_TIMING}}.get(current.platform())
    return faster if faster and _is_known(faster) else options


def full_device_options() -> dict[str, Any]:
    """Compiler options for the same purpose where a program does not fit, or other arrays fill the device."""
    return {**memory_analysis_options(), **(_WITHOUT_TIMING if current.platform() == "gpu" else {})}


def one_thread_options() -> dict[str, Any]:
    """Compiler options for programs that are compiled side by side; the programs are the same.

    Threads that wait for each other take a quarter of the processor time of a compilation for a GPU.
    """
    return {"xla_gpu_force_compilation_parallelism": 1} if current.platform() == "gpu" else {}


def estimate_options() -> dict[str, Any]:
    """Compiler options that let XLA tell its estimate of time; they change neither the program nor its memory."""
    return dict(_jax.ESTIMATES) if current.platform() == "gpu" and _tells_times(current.environment()) else {}


@functools.cache
def _tells_times(environment: tuple[Any, ...]) -> bool:
    # XLA's models of products know some GPUs only, and a compilation for others fails: "Cannot find key: sm_80".
    try:
        lower(jax.jit(lambda x: x @ x).trace(jax.ShapeDtypeStruct((256, 256), "float32"))).compile(dict(_jax.ESTIMATES))
    except jax.errors.JaxRuntimeError:
        return False
    return True


def compile_to_measure(lowered: Any, compiler_options: dict[str, Any] | None) -> Any:
    """Compile a ``jax.stages.Lowered`` whose memory is asked for; again with other options where XLA fails.

    Raises:
        UncompilableError: XLA fails with all of them, for a target.
    """
    errors: list[Exception] = []
    for options in _attempts(lowered, compiler_options or {}):
        try:
            compiled = lowered.compile(options or None)
        except jax.errors.JaxRuntimeError as e:
            errors.append(e)
            if _is_final(e):
                break
        else:
            if errors and options.items() >= _WITHOUT_FUSED_PRODUCTS.items():
                _tell_of_unfused_products(lowered.target, errors[0])
            return compiled
    if isinstance(lowered, ForTarget):
        raise _uncompilable(lowered.target, errors[0]) from errors[0]
    if current.platform() != "gpu" or not is_out_of_memory(errors[-1]):
        raise errors[0]
    # XLA times kernels while it compiles, with copies of their operands in the device's memory. What does not fit there
    # is compiled without that: the choice of kernels changes little of the memory, and a program that does not fit is
    # asked for most.
    return lowered.compile({**(compiler_options or {}), **_WITHOUT_TIMING})


_count_lock = new_lock()
_num_compiled = 0


def num_compiled() -> int:
    """The programs that this process has compiled so far to measure them."""
    return _num_compiled


def count_compilation() -> None:
    global _num_compiled
    with _count_lock:
        _num_compiled += 1


_WITHOUT_FUSED_PRODUCTS = {"xla_gpu_enable_triton_gemm": False}


def _attempts(lowered: Any, options: dict[str, Any]) -> list[dict[str, Any]]:
    """The options to compile with, one after another.

    The model of time knows the program that `_tells_times` tried, but not every one. XLA:GPU fuses a matrix product
    with what makes its operands, and then looks for tiles of the fused kernel. On a device it times several and skips
    those that fail; where nothing is timed it has one, and fails with it (openxla/xla#36792, jax-ml/jax#34010).
    """
    without_estimates = {name: value for name, value in options.items() if name not in _jax.ESTIMATES}
    attempts = [options] if len(without_estimates) == len(options) else [options, without_estimates]
    if isinstance(lowered, ForTarget) and lowered.target.platform == "gpu":
        attempts += [attempt | _WITHOUT_FUSED_PRODUCTS for attempt in attempts]
    return attempts


def _is_final(error: Exception) -> bool:
    """Whether XLA fails with all options: the memory is too small, not the shared memory of a core of a GPU."""
    return is_out_of_memory(error) and "hared memory" not in str(error)


_targets_with_unfused_products: set[Target] = set()


def _tell_of_unfused_products(target: Target, error: Exception) -> None:
    """Once for each target: a plan compiles dozens of programs."""
    if target not in _targets_with_unfused_products:
        _targets_with_unfused_products.add(target)
        _log.warning(
            "A program for %s is compiled without fusing matrix products: XLA has no tiles for one of them, and none "
            "can be timed without the device. Its memory may be larger than there, where XLA fuses the others. Later "
            "programs like it are compiled so, too. (XLA: %s)",
            target.name,
            _first_line(error),
        )


class UncompilableError(TargetError):
    """XLA cannot compile a program for a target; its cause is XLA's error."""


COMPILER_ERRORS = (jax.errors.JaxRuntimeError, UncompilableError)


def _uncompilable(target: Target, error: Exception) -> UncompilableError:
    line = _first_line(error)
    if _is_final(error):
        return UncompilableError(
            f"The program does not fit on the target {target.name}. XLA: {line}\n"
            f"Fix: statetx.explain_oom, with the same arguments, lists changes that make it fit."
        )
    return UncompilableError(
        f"XLA cannot compile the program for the target {target.name}. XLA: {line}\n"
        f"Usual cause: an operation that this kind of device lacks, or a fault of XLA's compiler.\n"
        f"Fix: leave the operation out while you measure, or measure for another target or with another version of jax."
    )


def _first_line(error: Exception) -> str:
    text = next(iter(str(error).splitlines()), "")
    return text if len(text) <= _MOST_OF_MESSAGE else f"{text[:_MOST_OF_MESSAGE]}..."


_MOST_OF_MESSAGE = 200  # characters: some messages hold an instruction


class ForTarget:
    """A ``jax.stages.Lowered`` of a program that is compiled for a target; as such, but for `compile`."""

    def __init__(self, lowered: Any, target: Target):
        self._lowered, self.target = lowered, target

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lowered, name)

    def compile(self, compiler_options: dict[str, Any] | None = None) -> Any:
        is_gpu = self.target.platform == "gpu"
        with kernel_file() if is_gpu else contextlib.nullcontext() as path:
            target_options = {**_WITHOUT_TIMING, "xla_gpu_kernel_cache_file": path} if is_gpu else {}
            with _jax.without_compilation_cache(), quiet_stderr():
                return self._lowered.compile({**(compiler_options or {}), **target_options} or None)


def is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, COMPILER_ERRORS) and "RESOURCE_EXHAUSTED" in str(error)


def _is_known(compiler_options: dict[str, Any]) -> bool:
    return _is_known_to(current.platform(), tuple(compiler_options.items()))


@functools.cache
def _is_known_to(platform: str, compiler_options: tuple[tuple[str, Any], ...]) -> bool:
    # A jaxlib that lacks one of them raises.
    try:
        lower(jax.jit(lambda x: x).trace(0.0)).compile(dict(compiler_options))
    except jax.errors.JaxRuntimeError:
        return False
    return True


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
        fun: Callable,
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
        read = {v for atoms in (jaxpr.outvars, *(e.invars for e in jaxpr.eqns)) for v in atoms if isinstance(v, Var)}
        self._read_bytes = num_bytes([v.aval for v in jaxpr.invars if v in read])
        self.compiler_options = compiler_options
        # Not `functools.cached_property`: up to Python 3.11 it has one lock for all programs, and threads would compile
        # one after another.
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

    @functools.cached_property
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
    sizes = (num_bytes(v.aval) for eqn in jaxpr.eqns for v in eqn.outvars)
    inner_sizes = (_largest_value(_jax.open_jaxpr(x)[0]) for eqn in jaxpr.eqns for x in _jax.inner_jaxprs(eqn))
    return max((*sizes, *inner_sizes), default=0)


def lower(traced: Any) -> Any:
    """Lower a traced function for the current target, without a warning of donated arguments that no output can take:
    the user's jit says so.
    """
    target = current.current()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
        return traced.lower() if target is None else _lowered_for(target, traced)


def _lowered_for(target: Target, traced: Any) -> ForTarget:
    called = _jax.callbacks(traced.jaxpr.jaxpr)
    if called and target.platform != "cpu":
        listed = "; ".join(dict.fromkeys(f"{name} at {line}" for name, line in called))
        raise TargetError(
            f"The program calls Python functions on the host, which exist on this machine only: {listed}. It cannot "
            f"be compiled for the target "
            f"{target.name}.\nFix: leave them out while you measure."
        )
    try:
        return ForTarget(_jax.lowered_for(traced, target.platform, target.devices), target)
    except _jax.TooFewDevices as e:
        raise TargetError(
            f"The program is for {counted(e.needed, 'device')}, by the shardings of its arguments or its mesh, and "
            f"the target {target.name} has "
            f"{target.num_devices}.\nFix: name as many, as in target='{target.name.partition(':')[0]}:{e.needed}'."
        ) from e


def _as_called(traced: Any, args: Sequence[Any], donated: Sequence[int]) -> Any:
    """The trace of the jitted function that a program consists of, which is what runs, else the trace itself.

    The order in which a program takes and returns donated arrays decides what XLA can update in place. So does
    the sharding of its outputs.
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
    order = order_of_updates(traced.jaxpr.jaxpr, is_donated) if any(is_donated) else None
    if order is None or _is_on_mesh(traced.jaxpr):
        return None

    def run(*arrays: Any) -> list[Any]:
        outs = _jax.evaluate(traced.jaxpr.jaxpr, traced.jaxpr.consts, arrays)
        return [outs[o] for o in order]

    return _retraced(traced, run)


def _is_on_mesh(jaxpr: Any) -> bool:
    avals: list[Any] = [v.aval for v in _jax.open_jaxpr(jaxpr)[0].invars]
    return any(not aval.sharding.mesh.empty for aval in avals)


def _retraced(traced: Any, run: Callable) -> Any:
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
