"""Changes that are tried: a program with some of its functions rematerialized, compiled for the device."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable
from typing import Any

import jax

from .. import _jax
from .._equations.compiled import Cost, Program, is_out_of_memory
from .._equations.structure import Body
from .._jax import Jaxpr
from .._remat.gradients import rewritten_by
from .._remat.rewriter import Rewriter
from ..planner._layout import UNPLANNED, as_planned, rewrite
from ..planner._option import Decision, Interval
from ..planner._parts import Flat, flatten
from ..residuals.measure import with_gradient, without_gradient
from ._names import calls_of
from ._scopes import numbered_calls

_SAVES_NOTHING = Decision(frozenset())


class Trials:
    """Compiles a step with calls of some functions rematerialized, as ``@statetx.remat`` on them would.

    Args:
        gradient: whether the gradient of the step is part of the program.
        time_limit: seconds; no compilation begins that is expected to end later.
    """

    def __init__(
        self,
        step: Callable,
        args: tuple,
        kwargs: dict[str, Any],
        *,
        gradient: bool,
        options: dict[str, Any],
        time_limit: float,
    ):
        self._step, self._args, self._kwargs = step, args, kwargs
        self._program_of = with_gradient if gradient else without_gradient
        self._options = options
        self._end = time.monotonic() + time_limit
        self._longest = 0.0
        self._flops: int | None = None

    def compile(self, functions: Iterable[str]) -> Cost | None:
        """What the changed program takes; None if it was not tried, or the compiler runs out of memory.

        It is not tried if no time is left, or if the equations that are differentiated have no such call outside of loops, or have functions that
        are rematerialized already.
        """
        begin = time.monotonic()
        if begin + self._longest > self._end:
            return None
        rewriter = _CallsRematerialized(frozenset(functions))
        with numbered_calls(), rewritten_by(rewriter):
            program = self._program()
        cost = None
        if rewriter.functions_seen == rewriter.functions:
            try:
                cost = program.cost
            except jax.errors.JaxRuntimeError as e:
                if not is_out_of_memory(e):
                    raise
        self._longest = max(self._longest, time.monotonic() - begin)
        return cost

    def added_operations(self, cost: Cost) -> float:
        """The operations that a changed program has more, relative to the unchanged one."""
        if self._flops is None:
            self._flops = self._program().flops
        return cost.flops / max(self._flops, 1) - 1

    def _program(self) -> Program:
        program = self._program_of(self._step, self._args, self._kwargs)
        return program.for_types(program.arrays, self._options)


class _CallsRematerialized(Rewriter):
    """Rematerializes each call of some functions in what is differentiated.

    Attributes:
        functions_seen: those with a call that it has rematerialized.
    """

    is_used_once = True

    def __init__(self, functions: frozenset[str]):
        self.functions = functions
        self.functions_seen: set[str] = set()

    def rewrite(self, body: Body, name: str, num_out: int) -> Callable:
        program = Flat(flatten(body.jaxpr))
        found = _calls(program.jaxpr, self.functions)
        intervals = {i for i in found if _is_allowed(program, i)}
        # A function that is rematerialized already would lose its policy.
        if not intervals or program.blocks:
            return body
        self.functions_seen |= {function for i, function in found.items() if i in intervals}
        bounds = sorted({0, len(program), *itertools.chain.from_iterable(intervals)})
        spans = list(itertools.pairwise(bounds))
        parts = [program.part(*span) for span in spans]
        decisions = [_SAVES_NOTHING if span in intervals else UNPLANNED for span in spans]
        return as_planned(Body(rewrite(program.jaxpr, parts, decisions), []))


def _calls(jaxpr: Jaxpr, functions: frozenset[str]) -> dict[Interval, str]:
    """The equations from the first to the last of each outermost call of these functions."""
    bounds: dict[tuple[str, ...], list[int]] = {}
    for i, eqn in enumerate(jaxpr.eqns):
        calls = calls_of(str(eqn.source_info.name_stack))
        depth = next((n for n, call in enumerate(calls) if call.rpartition("~")[0] in functions), None)
        if depth is not None:
            bounds.setdefault(calls[: depth + 1], []).append(i)
    return {(found[0], found[-1] + 1): call[-1].rpartition("~")[0] for call, found in bounds.items()}


def _is_allowed(program: Flat, interval: Interval) -> bool:
    start, end = interval
    return end - start > 1 and not _jax.forbidden_effects(program.part(start, end).jaxpr)
