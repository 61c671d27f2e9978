"""`same_step`: a step beside its reference, run from equal states, with the places where results differ."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from .. import _jax, _states
from .._errors import FunctionError
from .._objects.walk import created_undone
from .._text import counted
from ..residuals._trace import TracedCall
from .host_calls import HostCalls
from .results import Mismatch, differences
from .rounding import largest, other_roundings, unit_of
from .side import Side, name_of_state, restored, store, value_of
from .values import Node, Recording, first_unstable, first_values

_FACTOR = 16  # times the measured rounding: more is a fault
_NUM_NUDGED = 3  # runs that measure how rounding grows, as in gradients which are zero but for it
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
    comparison = _Sides(*sides, _paired(*sides), tolerance)
    with restored(comparison.pairs.values()), created_undone(reference, step, args, kwargs):
        comparison.run(steps)
    return comparison.report


class _Sides:
    """Both sides, step by step; `report` is the result.

    Attributes:
        pairs: by path, each state of the reference with the step's.
    """

    def __init__(self, reference: Side, step: Side, pairs: dict[str, tuple[Any, Any]], tolerance: float | None):
        self.pairs, self._tolerance = pairs, tolerance
        self._sides = reference, step
        self._states = [{path: pair[n] for path, pair in pairs.items()} for n in range(2)]
        self.report = SameStep(step.name, reference.name)

    def run(self, steps: int) -> None:
        self._start = {path: value_of(state) for path, state in self._states[0].items()}
        self._calls = [HostCalls.of(side.traced.body.jaxpr) for side in self._sides]
        for n in range(1, steps + 1):
            expected = self._run(0)
            if not expected:
                raise FunctionError(
                    f"{self.report.reference} returns no array and touches no state: there is nothing to compare.\n"
                    "Fix: return the results, as arrays or trees of arrays."
                )
            end_values = {path: value_of(state) for path, state in self._states[0].items()}
            mismatches = differences(self._run(1), expected)
            self.report.steps, self.report.num_results = n, len(expected)
            if mismatches:
                self._judge(mismatches, expected)
            if not self.report.problem and (calls := self._calls[1].differences(self._calls[0])):
                self._fail("", f"calls to the host differ: {'; '.join(calls)}.")
            if self.report.problem:
                return
            self._start = end_values

    def _run(self, n: int) -> dict[str, Any]:
        # What the reference leaves without a value, nothing can read afterwards.
        without = self._sides[0].dropped if n else frozenset()
        return self._sides[n].run(self._start, self._states[n], without)

    # -- differences ---------------------------------------------------------------------------------------------------

    def _judge(self, mismatches: Mapping[str, Mismatch], expected: Mapping[str, Any]) -> None:
        for n, side in enumerate(self._sides):
            store(self._states[n], self._start)
            side.trace()
        if self._is_unstable(expected):
            return
        self.report.error = max([self.report.error, *(d.relative for d in mismatches.values())])
        writes = self._different_writes()
        if self._tolerance is not None:
            faults = {name: d for name, d in mismatches.items() if not d.relative <= self._tolerance}
            is_double = False
        else:
            faults, is_double = self._beyond_rounding(mismatches, expected)
            writes = [] if self.report.double_error is not None else writes
        if not faults and not writes:
            return
        result = next((name for name in faults if name.startswith("state")), next(iter(faults), ""))
        lines = [f"step {self.report.steps} has other results."]
        lines += [f"{name}{faults[name].text}." for name in dict.fromkeys([*[*faults][:1], *[result] * bool(faults)])]
        if faults and self.report.rounding is not None:
            lines.append(f"Relative: {faults[result].relative:.1e}{self.report.measured()}.")
        lines += writes or self._different_writes()
        self._fail(result, "\n".join([*lines, *self._first_line(list(faults), is_double)]))

    def _fail(self, result: str, text: str) -> None:
        self.report.result = result
        self.report.problem = f"{self.report.name} is not the same step as {self.report.reference}: {text}"

    def _beyond_rounding(
        self, mismatches: Mapping[str, Mismatch], expected: Mapping[str, Any]
    ) -> tuple[dict[str, Mismatch], bool]:
        """The differences that are not rounding, and whether they show in float64."""
        reference, step = self._sides
        rounding, typical = self._rounding(expected)

        def is_within(name: str, d: Mismatch, measured: Mapping[str, Mismatch], least: float) -> bool:
            rounding_error = measured[name].error if name in measured else 0.0
            return d.error <= _FACTOR * rounding_error or d.error <= least * d.scale

        double: dict[str, Mismatch] | None = None
        with jax.enable_x64(True):
            try:
                near = reference.evaluate(
                    self._states[0], is_double=True, options=other_roundings(), num_nudged=_NUM_NUDGED
                )
                other = next(near)
                measured = largest(*map(lambda x: differences(x, other), near))
                actual = next(step.evaluate(self._states[1], is_double=True, options=other_roundings()))
            except Exception as e:  # its own types do not fit to float64, or those of its plan: any library may say so
                self.report.double_problem = str(_cause(e)).strip().partition("\n")[0].rstrip(":.")
            else:
                double = {n: d for n, d in differences(actual, other).items() if n in other and n in actual}
                # It may compute parts in fewer bits all the same, and results, too.
                least = {n: max(_DOUBLE, _FACTOR * unit_of(x)) for n, x in other.items()}
                if faults := {n: d for n, d in double.items() if not is_within(n, d, measured, least[n])}:
                    exact = next(reference.evaluate(self._states[0], is_double=True, options={}))
                    measured = largest(measured, differences(other, exact))
                    faults = {n: d for n, d in faults.items() if not is_within(n, d, measured, least[n])}
                self.report.double_error = max((d.relative for d in double.values()), default=0.0)
                if faults:
                    return {n: mismatches.get(n, faults[n]) for n in [*mismatches, *faults] if n in faults}, True
        factor = _FACTOR if double is None else _FACTOR**2
        least = {n: factor * max(typical, 4 * unit_of(expected[n])) for n in mismatches if n in expected}
        return {n: d for n, d in mismatches.items() if not is_within(n, d, rounding, least.get(n, 0.0))}, False

    def _rounding(self, expected: Mapping[str, Any]) -> tuple[dict[str, Mismatch], float]:
        """Differences of the reference with other roundings, and their median if it is compiled otherwise."""
        near = self._sides[0].evaluate(
            self._states[0], is_double=False, options=other_roundings(), num_nudged=_NUM_NUDGED
        )
        other = next(near)
        rounding = differences(other, {name: x for name, x in expected.items() if name in other})
        typical = float(np.median([rounding[name].relative if name in rounding else 0.0 for name in other] or [0.0]))
        rounding = largest(rounding, *map(lambda x: differences(x, other), near))  # one at a time is in memory
        self.report.rounding = max([d.relative for d in rounding.values() if np.isfinite(d.error)], default=0.0)
        return rounding, typical

    def _different_writes(self) -> list[str]:
        """States that one writes more often; of random states, draws."""
        counts = [{id(w.state): w for w in side.traced.writes} for side in self._sides]
        lines = []
        for path, states in self.pairs.items():
            first, second = (of_side.get(id(state)) for of_side, state in zip(counts, states, strict=True))
            numbers = [0 if w is None else w.num_writes for w in (first, second)]
            if numbers[0] != numbers[1] and all(map(math.isfinite, numbers)):  # else it is unknown
                kind = _states.kind_of_state(states[0])
                verb = "drawn from" if kind.is_random(states[0]) else "written"
                site = (second or first).site  # type: ignore[union-attr]
                self.report.line = self.report.line or site
                times = f"{counted(int(numbers[1]), 'time')} in place of {numbers[0]}"
                lines.append(f"{name_of_state(path)} is {verb} {times}, last at {site}.")
        return lines

    def _is_unstable(self, expected: Mapping[str, Any]) -> bool:
        """Whether another run or trace of the reference has another result; then it is the problem."""
        reference = self._sides[0]
        first = reference.traced
        reference.trace()
        second = reference.traced
        is_stable = not differences(self._run(0), expected)
        store(self._states[0], self._start)
        if is_stable and not differences(_constants(second), _constants(first)):
            return False
        arrays = [i.array for i in second.inputs]
        node = first_unstable(*(Recording(t.body, arrays, {}) for t in (first, second)))
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
        with jax.enable_x64(True) if is_double else contextlib.nullcontext():
            first, second = self._roots(faults, is_double)
        if first is None and second is None:
            sites = [{id(w.state): w.site for w in side.traced.writes} for side in self._sides]
            path = self.report.result or next((n for n in faults if n.startswith("state")), "")
            for p, states in self.pairs.items():
                if any(f.startswith(name_of_state(p)) for f in faults):
                    reference_site, step_site = (
                        of_side.get(id(s), "") for of_side, s in zip(sites, states, strict=True)
                    )
                    self.report.line, self.report.reference_line = step_site or reference_site, reference_site
                    site = step_site or "no line"
                    return [f"All its values occur in both; {path or name_of_state(p)} is written at {site}."]
            return []
        second = second or first
        self.report.line, self.report.reference_line = (first or second).line, second.line  # type: ignore[union-attr]
        lines = [f"The first value that differs: {first}."] if first is not None else []
        return [*lines, f"In {self.report.reference} it is missing or begins to differ with: {second}."]

    def _roots(self, faults: Sequence[str], is_double: bool) -> list[Node | None]:
        recordings, named = [], []
        for side, states in zip(self._sides, self._states, strict=True):
            traced, arrays = side.equations(is_double)
            recordings.append(Recording(traced.body, arrays, other_roundings()))
            named.append(side.named(traced, recordings[-1].outputs, states))
        missing = {name: -1 for name in faults}
        reference_places, step_places = (missing | of_side for of_side in named)
        pairs = [(step_places[name], reference_places[name]) for name in faults]
        first, second = first_values(recordings[1], recordings[0], pairs, 1e-10 if is_double else 1e-6)
        if pairs and first is None and second is None and faults[0].startswith("output") and min(pairs[0]) >= 0:
            # All values occur in both: another one is returned.
            nodes = [recordings[n].nodes[pairs[0][1 - n]] for n in (1, 0)]
            first, second = (None if node.eqn is None else node for node in nodes)
        return [first, second]


def _cause(error: BaseException) -> BaseException:
    """The first error: a module may raise another one with its own name."""
    return error if error.__cause__ is None else _cause(error.__cause__)


# -- states ---------------------------------------------------------------------------------------------------------


def _paired(reference: Side, step: Side) -> dict[str, tuple[Any, Any]]:
    """By path, each state that either touches: one object of both, or two of equal paths."""
    of_reference, of_step = reference.states(), step.states()
    pairs: dict[str, tuple[Any, Any]] = {}
    for key, (path, state) in of_reference.items():
        pairs[path] = state, state if key in of_step else _named(path, step.paths.items(), state)
    seen = {id(x) for pair in pairs.values() for x in pair}
    for path, state in of_step.values():
        if id(state) not in seen:
            reference_state = _named(path, reference.paths.items(), state)
            pairs[f"{path} of {step.name}" if path in pairs else path] = reference_state, state
    return pairs


def _named(path: str, states: Mapping[str, Any], like: Any) -> Any:
    """The state of this path; or the only one whose path ends so, or is the end of it: one function may close over
    another, which closes over the model. `like` itself if there is none.
    """
    if path in states:
        return states[path]
    ends = lambda longer, end: f".{longer}".endswith(f".{end}")
    candidates = [x for p, x in states.items() if type(x) is type(like) and (ends(p, path) or ends(path, p))]
    return candidates[0] if len(candidates) == 1 else like


def _constants(traced: TracedCall) -> dict[str, Any]:
    """The arrays and numbers that a trace has taken from Python."""
    atoms = (v for eqn in _jax.equations_in(traced.body.jaxpr) for v in eqn.invars)
    literals = (v.val for v in atoms if isinstance(v, _jax.Literal))
    return {str(n): x for n, x in enumerate([*traced.body.operands, *literals])}
