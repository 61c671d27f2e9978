"""`memory_profile`: the live buffers of a compiled program at each of its steps, with their owners."""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, overload

import jax

from .. import _files, _jax, _states
from .._equations.compiled import Program, in_order, temp_bytes_of
from .._equations.compiler import (
    COMPILER_ERRORS,
    ForTarget,
    compile_to_measure,
    count_compilation,
    full_device_options,
    is_out_of_memory,
    lower,
    memory_analysis_options,
)
from .._equations.release.fates import GradientStack, told
from .._equations.release.program import releasable, stacks_in
from .._equations.structure import table
from .._errors import FunctionError, PolicyError, printable
from .._jax import CompiledProgram
from .._lift.options import check_flags
from .._lift.wrapper import check_callable, short_name
from .._loops.derivative import Differentiated
from .._objects.paths import argument_names
from .._objects.walk import created_undone
from .._segments.disk import LoopOnDisk
from .._segments.schedule import Advance, Reverse
from .._spinner import spinner
from .._tables import Line, Printed, Table, Tabular
from .._targets import current
from .._targets.target import Target
from .._text import brief
from .._tree import is_float, is_model
from .._typing import public
from ..residuals._trace import TracedCall, inspects
from ..residuals.loop_report import notes_of
from ..residuals.measure import ArrayProgram
from ..transforms.jit.api import Compiled, Lowered, Traced
from . import _show
from ._advice import AdvisedTimeline
from ._assemble import Assembly, Inputs
from ._numbered import numbered, traced_call
from ._page import to_html
from .buffer import Change, Step

P = ParamSpec("P")


@public
class MemoryProfile(Printed, AdvisedTimeline):
    """The memory of a compiled program, buffer by buffer; made by `memory_profile`.

    Sizes are in bytes, and of one device. Print it, or show it in a notebook.

    Attributes:
        name: of the function.
        buffers: all buffers, in the order of their first step; empty ones are left out.
        steps: the schedule of the compiled program.
        argument_bytes, output_bytes, alias_bytes, temp_bytes: XLA's own figures. Outputs that reuse the memory of an
            argument (donation) count in the first three.
        constant_bytes: of the constants in the program, which XLA's figures leave out.
        num_devices: that the program runs on.
        backend: "cpu", "gpu" or "tpu".
        backward_step: the first step of the backward pass, of the largest gradient if there are several; the number of
            steps if there is none.
        gradient: whether the program has the gradient of a loss among its outputs, and not a step that updates its
            arguments.
        gradients: sentences on the gradients of scanned layers in a step of `jit` (``release_gradients=``).
        note: the missing parts of the profile on this backend; empty if it is complete.
    """

    def _lines(self, width: int, prose: int) -> Iterator[Line]:
        return _show.lines(self, width, prose)

    def _html(self) -> str:
        return _show.html(self)

    def __repr__(self) -> str:
        return (
            f"<MemoryProfile of {printable(self.name)}: {len(self.buffers)} buffers, {self.peak_bytes} bytes at the "
            f"peak>"
        )

    def compare(self, after: MemoryProfile) -> Comparison:
        """Compare with another profile: the peak, its parts, and the owners with their difference. The result prints.

        Args:
            after: the profile of the changed program.
        """
        return Comparison(self, after)

    def to_dict(self) -> dict[str, Any]:
        """The profile as lists, dicts, numbers and text, for ``json.dump``."""
        return _show.to_dict(self)

    def to_html(self, path: str | PathLike[str], *, after: MemoryProfile | None = None) -> None:
        """Write a page with a timeline to zoom, and a list of the buffers to filter. It needs no other file and no
        network.

        Args:
            path: the file to write.
            after: a second profile, shown below the first.
        """
        _files.write(path, to_html(self, after))


@dataclasses.dataclass(frozen=True, repr=False)
class Comparison(Tabular):
    """Two profiles beside each other; made by `MemoryProfile.compare`."""

    before: MemoryProfile
    after: MemoryProfile

    def _table(self) -> Table:
        return _show.compare(self.before, self.after)


@overload
def memory_profile(fun: Callable[P, Any], /, *args: P.args, **kwargs: P.kwargs) -> MemoryProfile: ...
@overload
def memory_profile(compiled: Any, /) -> MemoryProfile: ...
@overload
def memory_profile(fun: Any, /, *args: Any, gradient: bool | None, **kwargs: Any) -> MemoryProfile: ...
@overload
def memory_profile(fun: Any, /, *args: Any, target: Target | str, **kwargs: Any) -> MemoryProfile: ...
@overload
def memory_profile(fun: Any, /, *args: Any, progress: bool | None, **kwargs: Any) -> MemoryProfile: ...
@inspects
def memory_profile(
    fun: Any, /, *args: Any, gradient: bool | None = None, progress: bool | None = None, **kwargs: Any
) -> MemoryProfile:
    """Compile a function, and show what fills its memory at each step of the compiled program.

    Nothing is computed and no state changes. XLA's own buffer assignment gives each buffer's size and place, its
    schedule the buffer's first and last live step, and its metadata the function and the line.

    On GPUs XLA writes the buffer assignment of each compilation to a temporary folder. A program that is compiled
    already has none there, nor has one of a backend that writes none: the result has XLA's totals then, no buffers, and
    a ``note`` that says so.

    A function with a loop of `policies.Disk` is several programs: shown is the largest one of its loops, with the
    stored carries, and a ``note`` says so.

    Args:
        fun: a function that may read and write states, a jitted function, or a program that is traced, lowered or
            compiled already (of ``jax.jit`` or `statetx.jit`; then without further arguments).
        *args, **kwargs: its arguments; arrays may be given as ``jax.ShapeDtypeStruct``.
        gradient: whether the program also computes the derivative of all float outputs with respect to every float
            argument and every float state. By default it does, unless the function is a training step, which takes
            gradients itself (as in `plan`). A function without float outputs, and a program that is staged already, are
            profiled unchanged.
        progress: whether to show progress (with rich); by default on a terminal.

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
        return profiled(fun, args, kwargs, gradient, memory_analysis_options())[0]


def profiled(
    fun: Any, args: tuple, kwargs: dict[str, Any], gradient: bool | None, compiler_options: dict[str, Any]
) -> tuple[MemoryProfile, TracedCall | None]:
    """`memory_profile` of a program that is compiled with these options, unless it is compiled already; and its call,
    if it was traced.
    """
    traced, call = _trace(fun, args, kwargs, gradient)
    return _profiled(traced, compiler_options), call


def _profiled(traced: _TracedProgram, compiler_options: dict[str, Any]) -> MemoryProfile:
    compiled, program = _compiled(traced.stage, compiler_options)
    memory = compiled.memory_analysis()
    if program is None:
        return _totals(traced, memory)
    assert memory is not None  # the program was decoded from it, or beside it
    backend = traced.stage.target.platform if isinstance(traced.stage, ForTarget) else _backend(compiled)
    profile = profile_of(program, memory, traced, _jax.num_devices_of_compiled(compiled), backend)
    reordered = None if traced.jax_traced is None else in_order(traced.jax_traced)
    if reordered is not None:
        saved = profile.peak_bytes - Program.of_traced(reordered, compiler_options).cost.peak_bytes
        profile = dataclasses.replace(profile, reordered=_reordering(traced.jax_traced, saved))
    profile = dataclasses.replace(profile, note=traced.note)
    stacks = [] if traced.jaxpr is None else releasable(traced.jaxpr)
    if not stacks:
        return profile
    num_bytes = sum(stack.num_bytes for stack in stacks)
    return dataclasses.replace(profile, releasable=_releasing(stacks), releasable_bytes=num_bytes)


def _releasing(stacks: Sequence[GradientStack]) -> Change:
    sizes = "; ".join(line.removesuffix(".") for line in told(stacks))
    text = (
        f"Update the weights inside the backward loop: statetx.jit(step, ..., release_gradients=True), where they are "
        f"donated; or by a plan, plan.apply(step). Then {sizes}."
    )
    return Change("release", "gradients", text)


def _reordering(traced: Any, saved: int) -> Change:
    place = traced.jaxpr.jaxpr.debug_info.func_src_info
    text = (
        f"Return the new values in the order of the arguments: {place} returns outputs in another order than the "
        f"donated inputs of the same shape, which XLA then copies"
    )
    return Change("order", place, text, saved_bytes=saved, is_compiled=True)


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
        gradient=traced.gradient,
        gradients=traced.gradients,
    )


def _totals(traced: _TracedProgram, memory: Any) -> MemoryProfile:
    """The profile of a program whose backend does not tell where its buffers are."""
    was_compiled = isinstance(traced.stage, jax.stages.Compiled)
    names = ("argument", "output", "alias", "temp")
    sizes: dict[str, Any] = {f"{name}_bytes": getattr(memory, f"{name}_size_in_bytes", 0) for name in names}
    note = (
        f"The backend {current.platform()!r} does not tell where {'compiled programs' if was_compiled else 'programs'} "
        f"have their buffers, so there are totals only."
        + (" Pass the function, or the lowered program." if was_compiled else "")
    )
    return MemoryProfile(
        name=traced.name,
        buffers=(),
        steps=(Step("program", "", "forward", "", None),),
        **sizes,
        backend=current.platform(),
        gradient=traced.gradient,
        gradients=traced.gradients,
        note=" ".join(filter(None, (traced.note, note))),
    )


def _compiled(stage: Any, options: dict[str, Any]) -> tuple[Any, CompiledProgram | None]:
    """The compiled stage, and its program with the places of its buffers if they can be known."""
    if isinstance(stage, jax.stages.Compiled):
        return stage, _jax.compiled_program(stage)
    count_compilation()
    # The cache may have the program with the names of other functions, and XLA writes nothing of one from there.
    with _jax.without_compilation_cache():
        if _tells_buffers():
            compiled = compile_to_measure(stage, options)
            return compiled, _jax.compiled_program(compiled)
        platform = stage.target.platform if isinstance(stage, ForTarget) else current.platform()
        with tempfile.TemporaryDirectory(prefix="statetx-", ignore_cleanup_errors=True) as folder:
            try:
                compiled = compile_to_measure(stage, options | _jax.options_to_write(Path(folder)))
                return compiled, _jax.written_program(Path(folder), compiled, platform)
            except COMPILER_ERRORS as e:
                if is_out_of_memory(e):
                    raise
        # Its compiler knows no option to write its programs.
        return compile_to_measure(stage, options), None


def _tells_buffers() -> bool:
    """Whether a compiled program tells where it has its buffers."""
    return _tells(current.environment())


@functools.lru_cache(maxsize=16)
def _tells(environment: Any) -> bool:
    compiled = compile_to_measure(lower(jax.jit(lambda x: x + 1).trace(0.0)), full_device_options())
    return _jax.compiled_program(compiled) is not None


class _TracedProgram(NamedTuple):
    """A program to compile, with its inputs.

    Attributes:
        stage: JAX's lowered or compiled stage.
        gradient: whether it is known to be a function with its gradient.
        jax_traced: JAX's trace that was lowered; None if it is not known.
        gradients: sentences on its gradients of scanned layers.
        jaxpr: its equations, if it is a step; None if they are not known.
        note: of the profile.
    """

    name: str
    stage: Any
    inputs: Inputs
    gradient: bool = False
    jax_traced: Any = None
    gradients: tuple[str, ...] = ()
    jaxpr: Any = None
    note: str = ""


def _trace(
    fun: Any, args: tuple, kwargs: dict[str, Any], gradient: bool | None
) -> tuple[_TracedProgram, TracedCall | None]:
    if isinstance(fun, _STAGES):
        if args or kwargs:
            raise FunctionError(
                f"{brief(fun)} is staged for certain arguments already, and memory_profile was called with more.\n"
                f"Fix: call memory_profile with it alone, or with the function itself and the arguments."
            )
        return _staged(fun), None
    check_callable("memory_profile", fun)
    # A program that another library's jit has staged has no names of states: "state_vals[3]". Only there arrays that
    # are no states are inputs.
    is_named = _states.jitted(fun) is not None and not _states.holds_other_arrays(args)
    is_jitted = hasattr(fun, "lower") and hasattr(fun, "trace") and not is_named
    call = None
    if gradient is not False or not is_jitted:
        call = traced_call(fun, args, kwargs)
        has_gradient = any(map(is_float, call.outputs)) and (not call.is_step if gradient is None else gradient)
        if has_gradient or not is_jitted:
            return _of_call(call, has_gradient), call
    with created_undone(fun, args, kwargs), table.bypassed():
        traced = _staged(fun.trace(*args, **kwargs))
        named = traced if traced.inputs.states else traced._replace(inputs=Inputs(_state_names(fun, args, kwargs)))
        return named, call


_STAGES = (Traced, Lowered, Compiled, jax.stages.Traced, jax.stages.Lowered, jax.stages.Compiled)


def _staged(stage: Any) -> _TracedProgram:
    """Profile a traced, lowered or compiled function."""
    if isinstance(stage, Traced):
        jax_stage, inputs = _with_calls(stage.jax_stage), Inputs(stage.state_names)
        return _TracedProgram(stage.name, lower(jax_stage), inputs, False, jax_stage, stage.gradients, jax_stage.jaxpr)
    name = getattr(stage, "fun_name", "") or "the program"  # of a lowered program JAX does not tell
    jax_traced = _states.jax_traced(stage) if hasattr(stage, "lower") else None
    if jax_traced is not None:
        jax_traced = _with_calls(jax_traced)
        stage = lower(jax_traced)
    if isinstance(stage, (Lowered, Compiled)):
        return _TracedProgram(stage.name, stage.jax_stage, Inputs(stage.state_names), gradients=stage.gradients)
    if jax_traced is None:
        return _TracedProgram(name, stage, Inputs())
    gradients = told(stacks_in(jax_traced.jaxpr.jaxpr))
    return _TracedProgram(name, stage, Inputs(), False, jax_traced, gradients, jax_traced.jaxpr)


def _with_calls(traced: Any) -> Any:
    """A ``jax.stages.Traced`` with the calls of the user's functions in the names of its equations."""
    return _jax.with_jaxpr(traced, numbered(traced.jaxpr))


def _state_names(fun: Any, args: tuple, kwargs: dict[str, Any]) -> frozenset[str]:
    """JAX's names of the inputs that are values of states in models among the arguments: it takes flax's apart."""
    is_state = lambda x: _states.kind_of(x) is not None and not _states.is_array_state(x)
    name, flattened = argument_names(fun, args), jax.tree_util.tree_flatten_with_path
    models = [(keys, x) for keys, x in flattened((args, kwargs), is_leaf=is_model)[0] if is_model(x)]
    states = [((*keys, *inner), x) for keys, model in models for inner, x in flattened(model, is_leaf=is_state)[0]]
    return frozenset(name((*keys, *inner)) for keys, x in states if is_state(x) for inner, _ in flattened(x)[0])


def _of_call(call: TracedCall, gradient: bool) -> _TracedProgram:
    program = ArrayProgram(call, gradient)
    run = _jax.name_function(lambda *arrays: program.run(*arrays), "jit", call.name, program.names)
    try:
        traced = Program(run, program.arrays, donated=program.donated)
    except PolicyError:
        loops = [x for x in notes_of(call, may_be_step=not gradient) if isinstance(x.loop, LoopOnDisk)]
        if not loops:
            raise
        return _of_segments(call.name, loops)
    inputs = Inputs(frozenset(program.states), _output_names(call, program) if gradient else ())
    jaxpr = None if gradient else traced.jaxpr
    return _TracedProgram(short_name(call.name), traced.lowered, inputs, gradient, jaxpr=jaxpr)


def _of_segments(name: str, loops: Sequence[Differentiated]) -> _TracedProgram:
    """The largest program of loops that are driven from the host, with the carries that are stored around it."""
    traces = []
    for note in loops:
        moments = [*note.loop.schedule(note.diff_indices).replay(note.loop.options.host)]
        of = lambda kind, moments=moments: [m.device for m in moments if isinstance(m.action, kind)]
        # Without the carries that the program reads and writes.
        nums = max(of(Advance)) - 2, max(of(Reverse)) - 1
        for (fun, segment), num in zip(note.loop.segments.programs(note.diff_indices), nums, strict=True):
            with_stored = jax.jit(lambda stored, segment, fun=fun: fun(**segment), keep_unused=True)
            traces.append(with_stored.trace([segment["carry"]] * num, segment))
    options = memory_analysis_options()
    largest = max(traces, key=lambda traced: Program.of_traced(traced, options).cost.peak_bytes)
    text = (
        f"{short_name(name)} is driven from the host, by policies.Disk. This is the largest program of its loops, with "
        f"the stored carries (statetx.loop_report tells how many). What runs before and after the loops is not in it."
    )
    return _TracedProgram(short_name(name), lower(largest), Inputs(), note=text)


def _output_names(call: TracedCall, program: ArrayProgram) -> tuple[str, ...]:
    """Names of the outputs of a program with its gradient; empty for new values of states, which their modules name."""
    num_floats = sum(map(is_float, call.outputs))
    first = ["output"] if num_floats == 1 else [f"output {n}" for n in range(num_floats)]
    gradients = [f"gradient of {program.names[i]}" for i in program.diff_indices]
    return (*first, *[""] * (call.num_results - num_floats), *gradients)


def _backend(compiled: Any) -> str:
    return compiled.runtime_executable().local_devices()[0].platform
