"""Changes of the user's code as edits of the staged program: decisions for a derivative, donation, parts of a batch.

An edit is a frozen value. `Trials` compiles a program with some of them. A `ChangeCandidate` has one.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from .. import _jax
from .._equations.primitives import REMAT
from .._jax import Jaxpr
from .._loops.strategy import Lengths, Strategy
from .._remat.stored import BITS, reader
from ..planner._program.flat import Flat, Interval, Part
from ..planner._program.values import INPUT, InFormat
from ..planner._treatments.loops import CheckpointedLoop
from ..planner._treatments.treatment import Decision, Saved, saved_as
from ..residuals._trace import user_line
from ._calls import function_of
from ._names import calls_of, without_calls
from .buffer import Buffer, Change, Loop

_SAVES_NOTHING = Decision(frozenset())


class Edit:
    """Base of edits, which changes nothing.

    Attributes:
        is_of_gradients: whether it decides on equations of a function that is differentiated, where it must find some.
        policy: of the functions, or of the body of the loop; None to save nothing.
    """

    is_of_gradients = True
    policy: str | None = None

    def decisions(self, program: Flat) -> Mapping[Interval, Decision]:
        """Decisions on intervals of the equations of a function that is differentiated."""
        return {}


@dataclasses.dataclass(frozen=True)
class Rematerialize(Edit):
    """``@statetx.remat`` on a function, with a policy or without."""

    function: str
    policy: str | None = None

    def decisions(self, program: Flat) -> Mapping[Interval, Decision]:
        intervals = [i for i in _calls(program.jaxpr, self.function) if _is_allowed(program, i)]
        return dict.fromkeys(intervals, _SAVES_NOTHING)


@dataclasses.dataclass(frozen=True)
class StoreBits(Edit):
    """``@statetx.remat(inputs_stored_as="bits")`` on a function, which may be rematerialized already: of each call, the
    inputs that are proved to be 0 or 1.
    """

    function: str

    def decisions(self, program: Flat) -> Mapping[Interval, Decision]:
        calls = Rematerialize(self.function).decisions(program) or SaveLess(self.function).decisions(program)
        is_bits = reader(program.jaxpr)
        inputs_by_call = {i: _inputs_as_bits(program.blocks.get(i) or program.part(*i), is_bits) for i in calls}
        if not any(inputs_by_call.values()):
            return {}
        return {i: Decision(inputs) for i, inputs in inputs_by_call.items()}


def _inputs_as_bits(part: Part, is_bits: Callable[[Any], bool]) -> Saved:
    fits = [is_bits(v) and BITS.shrinks(v.aval) for v in part.invars]
    return saved_as([(INPUT, i) for i, fit in enumerate(fits) if fit], InFormat(BITS.name))


@dataclasses.dataclass(frozen=True)
class Checkpoint(Edit):
    """A strategy for a loop; None for a rematerialized body, with a policy or without."""

    loop: Loop
    strategy: Strategy | None = None
    policy: str | None = None

    def decisions(self, program: Flat) -> Mapping[Interval, Decision]:
        positions = [i for i in program.loops if self._is_at(program.jaxpr.eqns[i])]
        saved, strategy = (
            (frozenset(), Lengths(self.loop.length or 1)) if self.strategy is None else (None, self.strategy)
        )
        return dict.fromkeys([(i, i + 1) for i in positions], Decision(saved, (CheckpointedLoop(strategy),)))

    def _is_at(self, eqn: Any) -> bool:
        file, line, _ = user_line(eqn)
        return eqn.params["length"] == self.loop.length and f"{file}:{line}" == self.loop.source


@dataclasses.dataclass(frozen=True)
class SaveLess(Edit):
    """Drop the policy of a function that is rematerialized already."""

    function: str

    def decisions(self, program: Flat) -> Mapping[Interval, Decision]:
        positions = [i for i, eqn in enumerate(program.jaxpr.eqns) if eqn.primitive.name in REMAT and self._is_in(eqn)]
        return {(i, i + 1): _SAVES_NOTHING for i in positions}

    def _is_in(self, eqn: Any) -> bool:
        eqns = (eqn, *_jax.open_jaxpr(eqn.params["jaxpr"])[0].eqns)
        names = (call for e in eqns for call in calls_of(_jax.scope(e)))
        return any(function_of(name) == self.function for name in names)


@dataclasses.dataclass(frozen=True)
class Donate(Edit):
    """Donated inputs of the step, by their names."""

    is_of_gradients = False

    inputs: frozenset[str]


@dataclasses.dataclass(frozen=True)
class InOrder(Edit):
    """Outputs in the order of the donated inputs that they update."""

    is_of_gradients = False


@dataclasses.dataclass(frozen=True)
class ReleaseGradients(Edit):
    """Updates of scanned layers in the loop of their backward pass."""

    is_of_gradients = False


@dataclasses.dataclass(frozen=True)
class Untried(Edit):
    """A change that is named and not tried."""

    why: str


@dataclasses.dataclass(frozen=True)
class AsArguments(Edit):
    """Arrays that the step closes over, as arguments."""

    is_of_gradients = False


@dataclasses.dataclass(frozen=True)
class InParts(Edit):
    """Gradients in parts of the batch: ``microbatch(loss, num, interleave=...)``.

    Args:
        arguments: those with examples along their first axis.
        size: how many examples, on a device.
    """

    is_of_gradients = False
    arguments: frozenset[str]
    size: int
    num: int
    interleave: bool


def _calls(jaxpr: Jaxpr, function: str) -> list[Interval]:
    """The equations from the first to the last of each outermost call of a function; gradients inside are left out, and
    edited where they are taken.
    """
    bounds: dict[tuple[str, ...], list[int]] = {}
    stacks = [_jax.scope(eqn) for eqn in jaxpr.eqns]
    derivatives = [re.findall(r"(transpose\()?(jvp\([^()]*\))", without_calls(names)) for names in stacks]
    transposed = {jvp for matches in derivatives for is_transposed, jvp in matches if is_transposed}
    for i, names in enumerate(stacks):
        calls = calls_of(names)
        depth = next((n for n, call in enumerate(calls) if function_of(call) == function), None)
        if depth is not None and transposed.isdisjoint(jvp for _, jvp in derivatives[i]):
            bounds.setdefault(calls[: depth + 1], []).append(i)
    return [(positions[0], positions[-1] + 1) for positions in bounds.values()]


def _is_allowed(program: Flat, interval: Interval) -> bool:
    start, end = interval
    return end - start > 1 and not _jax.forbidden_effects(program.part(start, end).jaxpr)


class ChangeCandidate(NamedTuple):
    """A change, and the buffers that it shortens. Candidates are listed by their cost in time, the cheapest first.

    Attributes:
        freed_bytes: by how much the peak would fall without these buffers while they wait for the backward pass. It
            orders changes that are not compiled.
        edit: the change of the staged program, for the trial.
        prerequisite: the change that it presupposes, if any.
        stronger: makes the same change with a number that saves more; None if there is none.
    """

    change: Change
    buffers: frozenset[Buffer]
    freed_bytes: int
    edit: Edit
    stronger: Callable[[], ChangeCandidate | None] = lambda: None
    prerequisite: Edit | None = None
