"""From a function, a jitted function or a compiled program to its memory profile."""

from __future__ import annotations

import functools
import random
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from .. import _jax, _states
from .._equations.compiled import (
    ForTarget,
    compile_to_measure,
    full_device_options,
    is_out_of_memory,
    lower,
    memory_analysis_options,
    temp_bytes_of,
)
from .._errors import FunctionError
from .._jax import CompiledProgram
from .._lift.options import check_flags, notes_shapes
from .._lift.wrapper import name_of, refuse_value, short_name
from .._objects.paths import argument_names
from .._objects.walk import created_undone
from .._spinner import spinner
from .._targets import current
from .._text import brief
from .._tree import is_float
from ..residuals.measure import ArrayProgram, inspected, without_gradient
from ..residuals.saved import residuals_of
from ..residuals.table import Residuals
from ..transforms.jit.stages import Compiled, Lowered, Traced
from ._assemble import Assembly, Inputs
from ._fallback import without_assignment
from ._scopes import numbered_calls
from .profile import MemoryProfile


@_jax.api_boundary
@notes_shapes
@current.takes_target
def memory_profile(
    fun: Any, /, *args: Any, gradient: bool | None = None, progress: bool = False, **kwargs: Any
) -> MemoryProfile:
    """Compile a function, and show what fills its memory at each step of the compiled program.

    Nothing is computed and no state changes. XLA's own buffer assignment gives each buffer's size and place, its
    schedule the first and last step in which the buffer is alive, and its metadata the function and the line.

    On GPUs XLA writes the buffer assignment of what it compiles to a temporary folder. A program that is compiled
    already has none there, nor has one of a backend that writes none: ``note`` of the result says so then, and the
    buffers are the arguments, the residuals and the outputs, without working memory.

    Args:
        fun: a function that may read and write states, a jitted function, or a program that is traced, lowered or
            compiled already (of ``jax.jit`` or `statetx.jit`; then without further arguments).
        *args, **kwargs: its arguments; ``jax.ShapeDtypeStruct`` may stand for arrays.
        gradient: whether the program also computes the derivative of all float outputs with respect to every float
            argument and every float state. By default it does, unless the function is a training step, which takes
            gradients itself (as in `plan`). A function without float outputs, and a program that is staged already, are
            profiled unchanged.
        progress: whether to show progress (with rich).

    Returns:
        `MemoryProfile`: print it, or write ``.to_html(path)``.

    Raises:
        FunctionError: arguments beside a program that is staged already.

    Source:
        ``jax.stages.Compiled.memory_analysis`` and the optimized program.

    Example:
        >>> import jax, jax.numpy as jnp, statetx
        >>> def loss(w, x):
        ...     return jnp.tanh(jnp.tanh(x @ w) @ w).sum()
        >>> x = jax.ShapeDtypeStruct((4096, 64), jnp.float32)
        >>> profile = statetx.memory_profile(loss, jnp.eye(64), x)
        >>> sum(group.num_bytes for group in profile.at_peak) + profile.unused_bytes == profile.peak_bytes
        True
    """
    check_flags("memory_profile", progress=progress)
    with spinner("memory_profile", is_shown=progress) as tell:
        tell("compiling")
        return profiled(fun, args, kwargs, gradient, memory_analysis_options())


def profiled(
    fun: Any, args: tuple, kwargs: dict[str, Any], gradient: bool | None, compiler_options: dict[str, Any]
) -> MemoryProfile:
    """`memory_profile` of a program that is compiled with these options, unless it is compiled already."""
    with numbered_calls():
        traced = _trace(fun, args, kwargs, gradient)
    compiled, program = _compiled(traced.stage, compiler_options)
    if program is None:
        was_compiled = isinstance(traced.stage, jax.stages.Compiled)
        return without_assignment(traced.name, compiled, traced.residuals, was_compiled=was_compiled)
    memory = compiled.memory_analysis()
    assert memory is not None  # the program was decoded from it, or beside it
    backend = traced.stage.target.platform if isinstance(traced.stage, ForTarget) else _backend(compiled)
    return profile_of(program, memory, traced, _num_devices(compiled), backend)


def profile_of(
    program: CompiledProgram, memory: Any, traced: _TracedProgram, num_devices: int, backend: str
) -> MemoryProfile:
    """The profile of a compiled program of known buffers; `memory` as in ``Compiled.memory_analysis()``."""
    assembly = Assembly(program, traced.inputs)
    buffers = assembly.buffers()
    return MemoryProfile(
        name=traced.name,
        buffers=buffers,
        steps=assembly.steps(),
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        temp_bytes=temp_bytes_of(memory, max((v.num_bytes for v in program.values.values()), default=0)),
        constant_bytes=sum(b.num_bytes for b in buffers if b.kind == "constant"),
        num_devices=num_devices,
        backend=backend,
        backward_step=assembly.names.turn,
        gradient=traced.residuals is not None,
    )


def _compiled(stage: Any, options: dict[str, Any]) -> tuple[Any, CompiledProgram | None]:
    """The compiled stage, and its program with the places of its buffers if they can be known."""
    if isinstance(stage, jax.stages.Compiled):
        return stage, _jax.compiled_program(stage)
    if _tells_buffers():
        with _jax.without_compilation_cache():  # it may have the program with the names of other functions
            compiled = compile_to_measure(stage, options)
        return compiled, _jax.compiled_program(compiled)
    try:
        return _compiled_and_written(stage, options)
    except jax.errors.JaxRuntimeError as e:
        if is_out_of_memory(e):
            raise
    # Its compiler knows no option to write what it compiles.
    return compile_to_measure(stage, options), None


def _compiled_and_written(stage: Any, options: dict[str, Any]) -> tuple[Any, CompiledProgram | None]:
    platform = stage.target.platform if isinstance(stage, ForTarget) else current.platform()
    with tempfile.TemporaryDirectory(prefix="statetx-", ignore_cleanup_errors=True) as folder:
        options = options | _jax.options_to_write(Path(folder))
        compiled = compile_to_measure(stage, options)
        program = _jax.written_program(Path(folder), compiled, platform)
        if program is None and jax.config.values.get("jax_compilation_cache_dir"):
            # The program may come from the cache of JAX, whose key leaves out where XLA writes to. This option, about a
            # program that runs, makes another key.
            unique = {"xla_gpu_executable_warn_stuck_timeout_seconds": random.randrange(10, 2**30)}
            with _jax.without_new_cache_entries():  # nothing would find it
                compiled = compile_to_measure(stage, {**options, **unique})
            program = _jax.written_program(Path(folder), compiled, platform)
    return compiled, program


def _tells_buffers() -> bool:
    """Whether a compiled program tells where it has its buffers."""
    return _tells(current.environment())


@functools.lru_cache(maxsize=16)
def _tells(environment: Any) -> bool:
    compiled = compile_to_measure(lower(jax.jit(lambda x: x + 1).trace(0.0)), full_device_options())
    return _jax.compiled_program(compiled) is not None


class _TracedProgram(NamedTuple):
    """A program to compile, and what is known of it.

    Attributes:
        stage: JAX's lowered or compiled stage.
        residuals: computes the residuals, for a backend that tells no buffers; None if the function is not known.
    """

    name: str
    stage: Any
    inputs: Inputs
    residuals: Callable[[], Residuals] | None


def _trace(fun: Any, args: tuple, kwargs: dict[str, Any], gradient: bool | None) -> _TracedProgram:
    if isinstance(fun, _STAGES):
        if args or kwargs:
            raise FunctionError(
                f"{brief(fun)} is staged for certain arguments already, and memory_profile was called with more.\n"
                f"Fix: call memory_profile with it alone, or with the function itself and the arguments."
            )
        return _staged(fun)
    refuse_value("memory_profile", fun)
    program, gradient = inspected(fun, args, kwargs, gradient)
    if gradient:
        residuals = functools.partial(residuals_of, fun, args, kwargs, may_be_step=False)
        results = jax.eval_shape(program.run, *program.arrays)
        if any(map(is_float, results[0])):
            return _of_function(fun, args, program, residuals, results)
    # A program that another library's jit has staged has no names of states: "state_vals[3]". Only there arrays that
    # are no states are inputs.
    is_named = _states.unjitted(fun) is not None and not _states.holds_other_arrays(args)
    if hasattr(fun, "lower") and hasattr(fun, "trace") and not is_named:
        with created_undone(fun, args, kwargs):
            traced = _staged(fun.trace(*args, **kwargs))
            return traced if traced.inputs.states else traced._replace(inputs=Inputs(_state_names(fun, args, kwargs)))
    program = without_gradient(fun, args, kwargs) if gradient else program
    return _of_function(fun, args, program, None, None)


_STAGES = (Traced, Lowered, Compiled, jax.stages.Traced, jax.stages.Lowered, jax.stages.Compiled)


def _staged(stage: Any) -> _TracedProgram:
    """Of a traced, lowered or compiled function."""
    if isinstance(stage, Traced):
        return _TracedProgram(stage.name, lower(stage.jax_stage), Inputs(stage.state_names), None)
    name = getattr(stage, "fun_name", "") or "the program"  # of a lowered program JAX does not tell
    if hasattr(stage, "lower"):
        stage = lower(stage)
    if isinstance(stage, (Lowered, Compiled)):
        return _TracedProgram(stage.name, stage.jax_stage, Inputs(stage.state_names), None)
    return _TracedProgram(name, stage, Inputs(), None)


def _state_names(fun: Any, args: tuple, kwargs: dict[str, Any]) -> frozenset[str]:
    """JAX's names of the inputs that are values of states in arguments: it takes flax's modules apart."""
    is_state = lambda x: _states.kind_of(x) is not None and not _states.is_array_state(x)
    name = argument_names(fun, args)
    leaves = jax.tree_util.tree_flatten_with_path((args, kwargs), is_leaf=is_state)[0]
    found = [(keys, jax.tree_util.tree_flatten_with_path(x)[0]) for keys, x in leaves if is_state(x)]
    return frozenset(name((*keys, *inner)) for keys, values in found for inner, _ in values)


def _of_function(
    fun: Any, args: tuple, program: ArrayProgram, residuals: Callable | None, results: tuple[list, list, list] | None
) -> _TracedProgram:
    """Of a function of arrays that `with_gradient` or `without_gradient` made; `results` of the former."""
    names, states = input_names(fun, args, program)
    jitted = jax.jit(program.run, donate_argnums=program.donated(program.arrays))
    _jax.name_inputs(jitted, program.arrays, names)
    outputs = _output_names(results, program.arrays, names) if results else ()
    lowered = lower(jitted.trace(*program.arrays))
    return _TracedProgram(short_name(name_of(fun)), lowered, Inputs(frozenset(states), outputs), residuals)


def input_names(fun: Any, args: tuple, program: ArrayProgram) -> tuple[list[str], list[str]]:
    """Names of the program's inputs, and those of them that are paths of states."""
    argument_name = argument_names(fun, args)
    # Keys of the values of states begin with 0 and the state's path, those of arguments with 1 or 2 for args or kwargs.
    names = [
        keys[1].key + jax.tree_util.keystr(keys[2:])
        if keys[0].idx == 0
        else argument_name((jax.tree_util.SequenceKey(keys[0].idx - 1), *keys[1:]))
        for keys in program.keys
    ]
    return names, [name for name, keys in zip(names, program.keys, strict=True) if keys[0].idx == 0]


def _output_names(results: tuple[list, list, list], arrays: Sequence[Any], names: Sequence[str]) -> tuple[str, ...]:
    """Names of what the program of `with_gradient` returns; empty for new values of states, which their
    modules name.
    """
    outputs, others, _ = results
    first = ["output"] if len(outputs) == 1 else [f"output {n}" for n in range(len(outputs))]
    gradients = [f"gradient of {name}" for x, name in zip(arrays, names, strict=True) if is_float(x)]
    return (*first, *[""] * len(others), *gradients)


def _num_devices(compiled: Any) -> int:
    shardings = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    return max((len(s.device_set) for s in shardings), default=1)


def _backend(compiled: Any) -> str:
    return compiled.runtime_executable().local_devices()[0].platform
