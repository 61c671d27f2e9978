"""XLA's compiler for the current device, or for a target: lowering, options, errors."""

from __future__ import annotations

import contextlib
import functools
import logging
import warnings
from typing import Any

import jax

from .. import _jax
from .._atomic import new_lock
from .._errors import TargetError
from .._targets import current
from .._targets.plugins import kernel_file
from .._targets.target import Target
from .._text import counted

_log = logging.getLogger("statetx")


def memory_analysis_options() -> dict[str, Any]:
    """Compiler options for a program that is compiled only to measure its memory.

    On a CPU they leave the machine code unoptimized, which halves the compile time, and emit it as one module, which
    saves a fifth for small programs. XLA assigns memory before that step, so the memory is exact.
    """
    on_cpu = {"xla_backend_optimization_level": 0, "xla_cpu_parallel_codegen_split_count": 1}
    return on_cpu if current.platform() == "cpu" else {}


def candidate_options() -> dict[str, Any]:
    """Compiler options for programs whose memory and time are compared."""
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
    return faster if faster and is_known(faster) else options


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


COMPILER_ERRORS: tuple[type[Exception], ...] = (jax.errors.JaxRuntimeError, UncompilableError)


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
            with _jax.without_compilation_cache():
                return self._lowered.compile({**(compiler_options or {}), **target_options} or None)


def is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, COMPILER_ERRORS) and "RESOURCE_EXHAUSTED" in str(error)


def is_known(compiler_options: dict[str, Any]) -> bool:
    return _is_known_to(current.platform(), tuple(compiler_options.items()))


@functools.cache
def _is_known_to(platform: str, compiler_options: tuple[tuple[str, Any], ...]) -> bool:
    # A jaxlib that lacks one of them raises.
    try:
        lower(jax.jit(lambda x: x).trace(0.0)).compile(dict(compiler_options))
    except jax.errors.JaxRuntimeError:
        return False
    return True


def lower(traced: Any) -> Any:
    """Lower a traced function for the current target, without a warning of donated arguments that no output can take:
    the user's jit says so.
    """
    target = current.current()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
        return traced.lower() if target is None else _lowered_for(target, traced)


def _lowered_for(target: Target, traced: Any) -> ForTarget:
    traced = _jax.with_jaxpr(traced, _jax.without_debug_calls(traced.jaxpr))
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
