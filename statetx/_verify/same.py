"""`same_step`: a step beside its reference, run from equal states, with the places where results differ."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from .. import _states
from .._errors import FunctionError
from .._objects.walk import created_undone
from .._text import counted
from .host_calls import HostCalls
from .results import Mismatch, differences
from .rounding import largest, unit_of
from .side import Side, pair
from .values import Recording

_FACTOR = 16  # times the measured rounding: more is a fault
_NUM_RUNS = 4  # that measure how rounding grows, as in gradients which are zero but for it
_DOUBLE = 1e-11  # relative; rounding in float64 is far below, a fault far above


@dataclasses.dataclass
class SameStep:
    """What `same_step` found. Prints as text.

    Attributes:
        name, reference: the functions.
        steps: those that were compared.
        problem: what differs; empty if nothing does.
        result: the first result that differs, ``state 'model.w'``.
        line: where in the step the first value that differs is computed, or the state is written: ``file:line``.
        reference_line: the same in the reference.
        error: the largest difference of an entry, relative to the largest entry of its array.
        rounding: the same error of the reference itself, compiled otherwise, and with inputs that differ by a unit in
            the last place; None if it was not needed.
        double_error: the largest relative difference in float64; None if it was not needed or is not possible.
        double_problem: why it is not possible; empty otherwise.
    """

    name: str
    reference: str
    steps: int = 0
    num_results: int = 0
    problem: str = ""
    result: str = ""
    line: str = ""
    reference_line: str = ""
    error: float = 0.0
    rounding: float | None = None
    double_error: float | None = None
    double_problem: str = ""

    def __str__(self) -> str:
        if self.problem:
            return self.problem
        head = f"{self.name} is the same step as {self.reference}: {counted(self.num_results, 'result')} in "
        head += counted(self.steps, "step")
        if not self.error:
            return f"{head}, bit for bit."
        return f"{head}, up to {self.error:.1e} (relative){self.measured()}."

    def measured(self) -> str:
        if self.rounding is None:
            return ""
        double = f"not possible ({self.double_problem})" if self.double_error is None else f"{self.double_error:.1e}"
        return f"; {self.reference} with other roundings: {self.rounding:.1e}; both in float64: {double}"

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def same_step(
    reference: Callable[..., Any],
    step: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    steps: int,
    tolerance: float | None,
) -> SameStep:
    """Run both for some steps, each step of both from the reference's states.

    Raises:
        FunctionError: they cannot be compared here.
    """
    sides = Side(reference, args, kwargs, reference), Side(step, args, kwargs, reference)
    pair(*sides)
    comparison = _Comparison(*sides, tolerance)
    before = [side.values() for side in sides]
    try:
        with created_undone(reference, step, args, kwargs):
            comparison.run(steps)
    finally:
        for side, values in zip(sides, before, strict=True):
            side.store(values)
    return comparison.report


class _Comparison:
    """Both sides, step by step; `report` is the result."""

    def __init__(self, reference: Side, step: Side, tolerance: float | None):
        self._sides, self._tolerance = (reference, step), tolerance
        self.report = SameStep(step.name, reference.name)

    def run(self, steps: int) -> None:
        reference, step = self._sides
        calls = [HostCalls.of(side.traced.body.jaxpr) for side in self._sides]
        self._start = reference.values()
        for self.report.steps in range(1, steps + 1):
            expected = reference.run(self._start)
            if not expected:
                raise FunctionError(
                    f"{reference.name} returns no array and touches no state: there is nothing to compare.\n"
                    "Fix: return the results, as arrays or trees of arrays."
                )
            end_values, self.report.num_results = reference.values(), len(expected)
            # What the reference leaves without a value, nothing can read afterwards.
            if mismatches := differences(step.run(self._start, reference.dropped), expected):
                self._judge(mismatches, expected)
            if not self.report.problem and (different := calls[1].differences(calls[0])):
                self._fail(f"calls to the host differ: {'; '.join(different)}.")
            if self.report.problem:
                return
            self._start = end_values

    def _fail(self, text: str) -> None:
        self.report.problem = f"{self.report.name} is not the same step as {self.report.reference}: {text}"

    # -- differences ---------------------------------------------------------------------------------------------------

    def _judge(self, mismatches: Mapping[str, Mismatch], expected: Mapping[str, Any]) -> None:
        report = self.report
        for side in self._sides:
            side.store(self._start)
            side.trace()
        if self._is_unstable():
            return
        report.error = max([report.error, *(d.relative for d in mismatches.values())])
        if self._tolerance is None:
            faults, is_double = self._beyond_rounding(mismatches, expected)
        else:
            faults, is_double = {n: d for n, d in mismatches.items() if not d.relative <= self._tolerance}, False
        writes = self._different_writes()
        if not faults and (not writes or report.double_error is not None):
            return
        first = next(iter(faults), "")
        report.result = next((name for name in faults if name.startswith("state")), first)
        lines = [f"step {report.steps} has other results."]
        lines += [f"{name}{faults[name].text}." for name in dict.fromkeys([first, report.result]) if name]
        if faults and report.rounding is not None:
            lines.append(f"Relative: {faults[report.result].relative:.1e}{report.measured()}.")
        self._fail("\n".join([*lines, *writes, *self._first_line([*faults], is_double)]))

    def _beyond_rounding(
        self, mismatches: Mapping[str, Mismatch], expected: Mapping[str, Any]
    ) -> tuple[dict[str, Mismatch], bool]:
        """The differences that are not rounding, and whether they show in float64."""
        report = self.report
        _, (otherwise, *nudged) = self._rounding(expected)
        typical = float(np.median([otherwise[n].relative if n in otherwise else 0.0 for n in expected]))
        rounding = largest(otherwise, *nudged)
        report.rounding = max([d.relative for d in rounding.values() if math.isfinite(d.error)], default=0.0)
        factor = _FACTOR
        with jax.enable_x64(True):
            try:
                other, nudged = self._rounding()
                actual = next(self._sides[1].evaluate(is_double=True))
            except Exception as e:  # its own types do not fit to float64, or those of its plan: any library may say so
                report.double_problem = str(_cause(e)).strip().partition("\n")[0].rstrip(":.")
            else:
                double = {n: d for n, d in differences(actual, other).items() if n in other and n in actual}
                report.double_error = max((d.relative for d in double.values()), default=0.0)
                # It may compute parts in fewer bits all the same, and results, too.
                if faults := _beyond(double, largest(*nudged), lambda n: max(_DOUBLE, _FACTOR * unit_of(other[n]))):
                    return {n: mismatches.get(n, faults[n]) for n in [*mismatches, *faults] if n in faults}, True
                factor *= _FACTOR
        return _beyond(mismatches, rounding, lambda n: factor * max(typical, 4 * unit_of(expected.get(n)))), False

    def _rounding(self, expected: Mapping[str, Any] | None = None) -> tuple[Any, list[dict[str, Mismatch]]]:
        """Results of the reference, those in float64 by default, and how others with other roundings differ."""
        runs = self._sides[0].evaluate(is_double=expected is None)
        results = next(runs) if expected is None else expected
        compared = map(lambda x: differences(x, {n: results[n] for n in x}), runs)  # one at a time is in memory
        return results, list(itertools.islice(compared, _NUM_RUNS))

    def _different_writes(self) -> list[str]:
        """States that one writes more often; of random states, draws."""
        lines, by_side = [], [dict(side.writes(side.traced)) for side in self._sides]
        for name, state in self._sides[0].states.items():
            writes = [of_side.get(name) for of_side in by_side]
            numbers = [0 if w is None else w.num_writes for w in writes]
            if numbers[0] != numbers[1] and all(map(math.isfinite, numbers)):  # else it is unknown
                verb = "drawn from" if _states.kind_of_state(state).is_random(state) else "written"
                site = next(w.site for w in reversed(writes) if w is not None)
                self.report.line = self.report.line or site
                times = f"{counted(int(numbers[1]), 'time')} in place of {numbers[0]}"
                lines.append(f"{name} is {verb} {times}, last at {site}.")
        return lines

    def _is_unstable(self) -> bool:
        """Whether another run or trace of the reference has another result; then it is the problem."""
        reference, first = self._sides[0], self._sides[0].traced
        results = next(reference.evaluate())
        reference.trace()
        if not differences(next(reference.evaluate()), results):
            return False
        arrays = reference.equations(is_double=False)[1]
        one, other = (Recording(traced.body, arrays) for traced in (first, reference.traced))
        node = one.first_missing(other, one.outputs, 0.0)
        self.report.line = "" if node is None else node.line
        where = "." if node is None else f": the first value that differs is {node}."
        self.report.problem = (
            f"{reference.name} is not deterministic: two runs from equal states differ{where}\n"
            "Usual causes: a host callback, a global random generator, the time.\n"
            "Fix: draw from a state, statetx.RngState, or pass what varies as an argument."
        )
        return True

    def _first_line(self, faults: Sequence[str], is_double: bool) -> list[str]:
        """Where the values begin to differ that lead to these results."""
        report, recordings, places = self.report, [], []
        with jax.enable_x64(True) if is_double else contextlib.nullcontext():
            for side in self._sides:
                traced, arrays = side.equations(is_double)
                recordings.append(Recording(traced.body, arrays))
                places.append(side.named(traced, recordings[-1].outputs))
        starts = [[of_side[name] for name in faults if name in of_side] for of_side in places]
        tolerance = 1e-10 if is_double else 1e-6
        expected, actual = (recordings[n].first_missing(recordings[1 - n], starts[n], tolerance) for n in range(2))
        if expected is actual is None and all(starts) and faults[0].startswith("output"):
            # All values occur in both: another one is returned.
            expected, actual = (r.computed(of_side[0]) for r, of_side in zip(recordings, starts, strict=True))
        if root := expected or actual:
            report.line, report.reference_line = (actual or root).line, root.line
            lines = [f"The first value that differs: {actual}."] if actual else []
            return [*lines, f"In {report.reference} it is missing or begins to differ with: {root}."]
        if not report.result.startswith("state"):
            return []
        is_it = report.result.startswith
        report.reference_line, site = (
            next((w.site for name, w in side.writes(side.traced) if is_it(name)), "") for side in self._sides
        )
        report.line = site or report.reference_line
        return [f"All its values occur in both; {report.result} is written at {site or 'no line'}."]


def _beyond(
    found: Mapping[str, Mismatch], rounding: Mapping[str, Mismatch], least: Callable[[str], float]
) -> dict[str, Mismatch]:
    """The differences that are larger than the measured rounding, and than the least of a result, relative."""
    is_rounding = lambda n, d: (
        d.error <= least(n) * d.scale or (n in rounding and d.error <= _FACTOR * rounding[n].error)
    )
    return {n: d for n, d in found.items() if not is_rounding(n, d)}


def _cause(error: BaseException) -> BaseException:
    """The first error: a module may raise another one with its own name."""
    return error if error.__cause__ is None else _cause(error.__cause__)
