"""A profile from the equations of a program, for one that cannot be compiled."""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax

from .. import _jax
from .._equations.dataflow import alive_bytes
from .._equations.inline import inline
from .._equations.primitives import INLINED, row_of
from .._jax import Jaxpr, Literal, Var
from .._lift.wrapper import name_of
from .._targets import current
from .._text import type_str
from .._tree import num_bytes
from ..residuals._trace import user_line
from ..residuals.measure import ArrayProgram
from ._names import calls_of
from ._numbered import traced_call
from .buffer import Buffer, Kind, Loop, Phase, Step
from .measure import MemoryProfile

_NOTE = (
    "The compiler itself ran out of memory, so these sizes are estimated from the equations before compilation, for "
    "all devices together. They are too large: the compiler fuses operations, and reuses donated arguments."
)


class _EstimatedValue(NamedTuple):
    """A value of a jaxpr that has memory of its own, with its views.

    Attributes:
        equation: the index of the equation that computes it.
        end: of the last equation that reads it; of the last one of all for an output.
    """

    var: Var
    equation: int
    end: int
    readers: tuple[int, ...]
    is_output: bool


def estimate(step: Callable, args: tuple, kwargs: dict[str, Any], gradient: bool | None = None) -> MemoryProfile:
    """The profile of a step without compiling it: a value is alive from its equation to the last one that reads it.

    Args:
        gradient: as in `memory_profile`.
    """
    call = traced_call(step, args, kwargs)
    gradient = not call.is_step if gradient is None else gradient
    program = ArrayProgram(call, gradient)
    closed = jax.make_jaxpr(program.run)(*program.arrays)
    jaxpr = inline(_jax.close(_jax.without_dead_code(closed), closed.consts), calls=INLINED)
    steps = tuple(_steps(jaxpr))
    buffers = [*_buffers(jaxpr, steps, program.names, len(program.states))]

    sizes = {kind: sum(b.num_bytes for b in buffers if b.kind == kind) for kind in ("state", "argument", "output")}
    profile = MemoryProfile(
        name=name_of(step),
        buffers=tuple(b for b in buffers if b.num_bytes),
        steps=steps,
        argument_bytes=sizes["state"] + sizes["argument"],
        output_bytes=sizes["output"],
        backend=current.platform(),
        note=_NOTE,
        gradient=gradient,
    )
    temp_bytes = max(0, int(profile.timeline.max(initial=0)) - profile.peak_bytes)
    return dataclasses.replace(profile, temp_bytes=temp_bytes)


def _values(jaxpr: Jaxpr) -> Iterator[_EstimatedValue]:
    roots: dict[Var, Var] = {}
    readers: dict[Var, list[int]] = defaultdict(list)
    for i, eqn in enumerate(jaxpr.eqns):
        operands = [roots.get(v, v) for v in eqn.invars if not isinstance(v, Literal)]
        for v in operands:
            readers[v].append(i)
        if operands and row_of(eqn).is_view:
            roots[eqn.outvars[0]] = operands[0]

    outputs = {roots.get(v, v) for v in jaxpr.outvars if not isinstance(v, Literal)}
    for i, eqn in enumerate(jaxpr.eqns):
        for v in eqn.outvars:
            if v not in roots:
                end = len(jaxpr.eqns) - 1 if v in outputs else max(readers[v], default=i)
                yield _EstimatedValue(v, i, end, tuple(readers[v]), v in outputs)


def _peak(jaxpr: Jaxpr) -> int:
    """The most bytes alive in a jaxpr, without its inputs."""
    spans = ((value.equation, value.end, num_bytes(value.var.aval)) for value in _values(jaxpr))
    alive = alive_bytes(len(jaxpr.eqns), spans) + [_inner_peak(eqn) for eqn in jaxpr.eqns]
    return int(alive.max(initial=0))


def _inner_peak(eqn: Any) -> int:
    """Peak of the jaxprs that an equation runs, one after the other: the step of a loop, the branches."""
    return max(map(_peak, _jax.inner_jaxprs(eqn)), default=0)


def _buffers(jaxpr: Jaxpr, steps: Sequence[Step], names: Sequence[str], num_states: int) -> Iterator[Buffer]:
    """The inputs, the computed values, and the peaks inside of equations; each has a place of its own."""
    places = itertools.count()
    for v, name in zip(jaxpr.invars, names, strict=True):
        n, last = next(places), max(len(steps) - 1, 0)
        kind: Kind = "state" if n < num_states else "argument"
        yield Buffer(f"value {n}", num_bytes(v.aval), _type(v), 0, last, kind, "forward", name, allocation=n)

    def computed(v: Var, size: int, start: int, end: int, kind: Kind, readers: tuple[int, ...] = ()) -> Buffer:
        n, step = next(places), steps[start]
        function = step.frames[0].function if step.frames else ""
        origin = step.phase, function, function, step.source, step.primitive
        return Buffer(f"value {n}", size, _type(v), start, end, kind, *origin, allocation=n, readers=readers)

    for value in _values(jaxpr):
        is_saved = steps[value.equation].phase == "forward" and steps[value.end].phase == "backward"
        kind = "output" if value.is_output else "residual" if is_saved else "working memory"
        yield computed(value.var, num_bytes(value.var.aval), value.equation, value.end, kind, value.readers)
    for n, eqn in enumerate(jaxpr.eqns):
        if inner := _inner_peak(eqn):
            yield computed(eqn.outvars[0], inner, n, n, "working memory")


def _type(v: Var) -> str:
    return type_str(v.aval, weak=False)


def _steps(jaxpr: Jaxpr) -> Iterator[Step]:
    is_backward = ["transpose(" in str(eqn.source_info.name_stack) for eqn in jaxpr.eqns]
    last = max((i for i, b in enumerate(is_backward) if b), default=len(is_backward))
    for i, eqn in enumerate(jaxpr.eqns):
        phase: Phase = "backward" if is_backward[i] else "update" if i > last else "forward"
        file, line, function = user_line(eqn)
        name, source = eqn.primitive.name, f"{file}:{line}" if file else ""
        frames = (_jax.StackFrame(function, file, line, 0),) if file else ()
        loop = Loop("scan", eqn.params["length"], source) if name == "scan" else None  # one step for its whole body
        yield Step(name, name, phase, source, loop, frames=frames, calls=calls_of(str(eqn.source_info.name_stack)))
