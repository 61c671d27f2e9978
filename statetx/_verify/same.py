"""`same_step`: run a step and its reference from equal states, and say where their results differ."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from .. import _jax, _states
from .._equations.primitives import REMAT
from .._errors import FunctionError
from .._lift.wrapper import check_callable, name_of, short_name
from .._objects.paths import Paths
from .._objects.walk import created_undone
from .._targets import current
from .._text import counted
from .._tree import has_deleted, is_array
from ..residuals._trace import TracedCall, unjitted
from ..transforms.jit.api import jit
from .results import Mismatch, differences
from .rounding import as_double, largest, largest_unit, nudged, other_fusions, unit_of
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
        rounding: the same error of the reference itself, with other fusions, and with inputs that differ by a unit in
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
    sides = _Side(reference, args, kwargs, reference), _Side(step, args, kwargs, reference)
    comparison = _Sides(*sides, _paired(*sides), tolerance)
    with _restored(comparison.pairs.values()), created_undone(reference, step, args, kwargs):
        comparison.run(steps)
    return comparison.report


class _Side:
    """One of the two functions: as its user calls it, and as equations."""

    def __init__(self, fun: Callable, args: tuple, kwargs: dict[str, Any], reference: Callable):
        check_callable("assert_same_step", fun)
        self.fun, self.args, self.kwargs, self._reference = fun, args, kwargs, reference
        self.name = short_name(name_of(fun))
        self._check()
        self._may_donate = unjitted(fun) is not fun or hasattr(fun, "lower")
        self._call = fun if self._may_donate else jit(fun)
        self._programs: dict[Any, Any] = {}
        self._created: dict[str, str] = {}  # the names of states that its calls create, by their paths from it
        self.trace()
        self.paths = Paths(fun, args, kwargs)
        self._held = self.paths.items()  # before any call, which may create states

    def _check(self) -> None:
        with contextlib.suppress(ValueError):  # a builtin
            try:
                inspect.signature(self.fun).bind(*self.args, **self.kwargs)
            except TypeError as e:
                raise FunctionError(
                    f"{self.name}{inspect.signature(self.fun)} does not take the arguments: {e}.\n"
                    "Fix: give the arguments of one call, which both functions take."
                ) from None
        for x in jax.tree.leaves((self.args, self.kwargs), is_leaf=_states.is_opaque):
            if isinstance(x, (jax.ShapeDtypeStruct, _jax.Tracer)):
                raise FunctionError(
                    f"{self.name} cannot run here: an argument is {type(x).__name__}, which has no numbers.\n"
                    "Fix: give arrays, and call it outside of functions that are transformed."
                )
        if current.current() is not None:
            raise FunctionError(
                f"{self.name} cannot run here: it is compiled for {current.current()}, which is another device.\n"
                "Fix: compare outside of statetx.target."
            )

    def trace(self) -> None:
        """Stage the function for the present values of its states."""
        self.traced = TracedCall("assert_same_step", unjitted(self.fun), self.args, self.kwargs)

    def states(self) -> dict[int, tuple[str, Any]]:
        """The states from before the call that it touches, by id, with their paths."""
        touched = [i.state for i in self.traced.inputs if i.state is not None]
        touched += [w.state for w in self.traced.writes if not w.created]
        return {id(state): (self.paths(state), state) for state in touched}

    def run(self, values: Mapping[str, Any], states: Mapping[str, Any]) -> dict[str, Any]:
        """Run from these values; the outputs and new values of states, leaf by leaf. The states that the call creates,
        as one with ``init_all_states`` does, are results, and gone from their objects afterwards.
        """
        args, kwargs, given = self.args, self.kwargs, values
        if self._may_donate:
            given, args, kwargs = _copied((dict(values), args, kwargs))
        _store(states, given)
        creates = any(w.created for w in self.traced.writes)
        with created_undone(self.fun, self.args, self.kwargs, is_run=True) if creates else contextlib.nullcontext():
            try:
                out = jax.block_until_ready(self._call(*args, **kwargs))
            except Exception as e:
                e.add_note(f"Raised while statetx compared {self.name} with another step; all states are as before.")
                raise
            created = self._created_states() if creates else {}
        if new_states := self._new(self.fun) if creates else {}:
            raise FunctionError(
                f"{self.name} creates a state that a list, a dict or a global variable holds after the call, "
                f"{next(iter(new_states))!r}, so there is nothing to begin both from.\nFix: create the state outside, "
                "and reset its value in the step; or assign it to an attribute of an object."
            )
        results = {f"output{path}": x for path, x in _leaves(out)}
        self._output_names = [name for name, x in results.items() if is_array(x)]
        now = {path: _value(state) for path, state in {**created, **states}.items()}
        # A state in a donated argument has no value any more, and was not written.
        now |= {path: values[path] for path, x in now.items() if has_deleted(x)}
        leaves = {_of_state(path): _leaves(value) for path, value in now.items()}
        self._state_keys = {path: [key for key, x in items if is_array(x)] for path, items in leaves.items()}
        return results | {path + key: x for path, items in leaves.items() for key, x in items}

    def _created_states(self) -> dict[str, Any]:
        """The states that a call has created, by the path from the reference where that has them, too."""
        of_reference = {id(state): path for path, state in self._new(self._reference).items()}
        new = self._new(self.fun)
        self._created = {path: of_reference.get(id(state), path) for path, state in new.items()}
        return {self._created[path]: state for path, state in new.items()}

    def _new(self, fun: Callable) -> dict[str, Any]:
        """The states that a function reaches now and `fun` of this side did not before its calls, by path."""
        earlier_ids = {*map(id, self._held.values())}
        return {p: x for p, x in Paths(fun, self.args, self.kwargs).items().items() if id(x) not in earlier_ids}

    def evaluate(
        self, states: Mapping[str, Any], *, is_double: bool, options: Mapping[str, Any], num_nudged: int = 0
    ) -> Iterator[dict[str, Any]]:
        """Compile the equations with these options, and run them; the results by the names that `run` gives.

        Then run them from inputs that differ by a unit in the last place, some times: of the narrowest floats that are
        computed, which round smaller differences away. The results of a run are made when they are asked for.
        """
        traced, arrays = self.equations(is_double)
        inputs = [*traced.body.operands, *arrays]
        key = traced.body.key, tuple(options), *map(jax.typeof, inputs)
        if key not in self._programs:
            program = jax.jit(lambda *xs: traced.body(xs[: len(xs) - len(arrays)], *xs[len(xs) - len(arrays) :]))
            self._programs[key] = program.lower(*inputs).compile(compiler_options=dict(options))
        program, draw = self._programs[key], np.random.default_rng(0)
        unit = largest_unit(traced.body.jaxpr) if is_double and num_nudged else 0.0
        for n in range(1 + num_nudged):
            yield self.named(traced, program(*([nudged(x, draw, unit) for x in inputs] if n else inputs)), states)

    def equations(self, is_double: bool) -> tuple[TracedCall, list[Any]]:
        """The equations with their inputs; traced again for float64, under ``jax.enable_x64``."""
        arrays = [i.array for i in self.traced.inputs]
        return self.traced.retrace([as_double(x) for x in arrays]) if is_double else (self.traced, arrays)

    def named(self, traced: TracedCall, outs: Sequence[Any], states: Mapping[str, Any]) -> dict[str, Any]:
        """The outputs of equations, or anything in their order, by the names that `run` gives."""
        named = dict(zip(self._output_names, outs, strict=False))
        path_of, position = {id(state): path for path, state in states.items()}, len(traced.outputs)
        for write in traced.writes:
            path = _of_state(path_of.get(id(write.state)) or self._created.get(write.path, write.path))
            keys = self._state_keys.get(path, ())
            if len(keys) == write.num:
                named |= {path + key: x for key, x in zip(keys, outs[position:], strict=False)}
            position += write.num
        return named


class _Sides:
    """Both sides, step by step; `report` is the result.

    Attributes:
        pairs: by path, each state of the reference with the step's.
    """

    def __init__(self, reference: _Side, step: _Side, pairs: dict[str, tuple[Any, Any]], tolerance: float | None):
        self.pairs, self._tolerance = pairs, tolerance
        self._sides = reference, step
        self._states = [{path: pair[n] for path, pair in pairs.items()} for n in range(2)]
        self.report = SameStep(step.name, reference.name)

    def run(self, steps: int) -> None:
        self._start = {path: _value(state) for path, state in self._states[0].items()}
        self._calls = [_HostCalls.of(side.traced.body.jaxpr) for side in self._sides]
        for n in range(1, steps + 1):
            expected = self._run(0)
            if not expected:
                raise FunctionError(
                    f"{self.report.reference} returns no array and touches no state: there is nothing to compare.\n"
                    "Fix: return the results, as arrays or trees of arrays."
                )
            end_values = {path: _value(state) for path, state in self._states[0].items()}
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
        return self._sides[n].run(self._start, self._states[n])

    # -- differences ---------------------------------------------------------------------------------------------------

    def _judge(self, mismatches: Mapping[str, Mismatch], expected: Mapping[str, Any]) -> None:
        for n, side in enumerate(self._sides):
            _store(self._states[n], self._start)
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
                    self._states[0], is_double=True, options=other_fusions(), num_nudged=_NUM_NUDGED
                )
                unfused = next(near)
                measured = largest(*map(lambda x: differences(x, unfused), near))
                actual = next(step.evaluate(self._states[1], is_double=True, options=other_fusions()))
            except (TypeError, ValueError) as e:  # its own types do not fit to float64
                self.report.double_problem = str(e).strip().partition("\n")[0].rstrip(":.")
            else:
                double = {n: d for n, d in differences(actual, unfused).items() if n in unfused and n in actual}
                # It may compute parts in fewer bits all the same, and results, too.
                least = {n: max(_DOUBLE, _FACTOR * unit_of(x)) for n, x in unfused.items()}
                if faults := {n: d for n, d in double.items() if not is_within(n, d, measured, least[n])}:
                    exact = next(reference.evaluate(self._states[0], is_double=True, options={}))
                    measured = largest(measured, differences(unfused, exact))
                    faults = {n: d for n, d in faults.items() if not is_within(n, d, measured, least[n])}
                self.report.double_error = max((d.relative for d in double.values()), default=0.0)
                if faults:
                    return {n: mismatches.get(n, faults[n]) for n in [*mismatches, *faults] if n in faults}, True
        factor = _FACTOR if double is None else _FACTOR**2
        least = {n: factor * max(typical, 4 * unit_of(expected[n])) for n in mismatches if n in expected}
        return {n: d for n, d in mismatches.items() if not is_within(n, d, rounding, least.get(n, 0.0))}, False

    def _rounding(self, expected: Mapping[str, Any]) -> tuple[dict[str, Mismatch], float]:
        """Differences of the reference with other roundings, and their median with other fusions."""
        near = self._sides[0].evaluate(
            self._states[0], is_double=False, options=other_fusions(), num_nudged=_NUM_NUDGED
        )
        unfused = next(near)
        rounding = differences(unfused, {name: x for name, x in expected.items() if name in unfused})
        typical = float(np.median([rounding[name].relative if name in rounding else 0.0 for name in unfused] or [0.0]))
        rounding = largest(rounding, *map(lambda x: differences(x, unfused), near))  # one at a time is in memory
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
                lines.append(f"{_of_state(path)} is {verb} {times}, last at {site}.")
        return lines

    def _is_unstable(self, expected: Mapping[str, Any]) -> bool:
        """Whether another run or trace of the reference has another result; then it is the problem."""
        reference = self._sides[0]
        first = reference.traced
        reference.trace()
        second = reference.traced
        is_stable = not differences(self._run(0), expected)
        _store(self._states[0], self._start)
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
                if any(f.startswith(_of_state(p)) for f in faults):
                    reference_site, step_site = (
                        of_side.get(id(s), "") for of_side, s in zip(sites, states, strict=True)
                    )
                    self.report.line, self.report.reference_line = step_site or reference_site, reference_site
                    site = step_site or "no line"
                    return [f"All its values occur in both; {path or _of_state(p)} is written at {site}."]
            return []
        second = second or first
        self.report.line, self.report.reference_line = (first or second).line, second.line  # type: ignore[union-attr]
        lines = [f"The first value that differs: {first}."] if first is not None else []
        return [*lines, f"In {self.report.reference} it is missing or begins to differ with: {second}."]

    def _roots(self, faults: Sequence[str], is_double: bool) -> list[Node | None]:
        recordings, named = [], []
        for side, states in zip(self._sides, self._states, strict=True):
            traced, arrays = side.equations(is_double)
            recordings.append(Recording(traced.body, arrays, other_fusions()))
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


# -- states -----------------------------------------------------------------------------------------------------------


def _paired(reference: _Side, step: _Side) -> dict[str, tuple[Any, Any]]:
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


@contextlib.contextmanager
def _restored(pairs: Any) -> Iterator[None]:
    """Give these states their values again, also after an error."""
    states = {id(state): state for pair in pairs for state in pair}
    values = {key: _value(state) for key, state in states.items()}
    try:
        yield
    finally:
        for key, state in states.items():
            _states.kind_of_state(state).set_all([state], [values[key]])


def _value(state: Any) -> Any:
    return _states.kind_of_state(state).get(state)


def _store(states: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    for path, state in states.items():
        _states.kind_of_state(state).set_all([state], [values[path]])


def _copied(tree: Any) -> Any:
    """Copies of the arrays, for a program that may donate them."""
    copy = lambda x: x.copy() if isinstance(x, (jax.Array, np.ndarray)) and not isinstance(x, jax.Ref) else x
    return jax.tree.map(copy, tree, is_leaf=_states.is_opaque)


def _leaves(tree: Any) -> list[tuple[str, Any]]:
    """The leaves with their paths, those of flax's modules too; without objects that JAX does not take apart."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    is_value = lambda x: is_array(x) or isinstance(x, (bool, int, float, complex, str))
    return [(jax.tree_util.keystr(path), x) for path, x in leaves if is_value(x)]


def _of_state(path: str) -> str:
    return f"state {path!r}"


# -- programs ---------------------------------------------------------------------------------------------------------


def _constants(traced: TracedCall) -> dict[str, Any]:
    """The arrays and numbers that a trace has taken from Python."""
    atoms = (v for eqn in _jax.equations_in(traced.body.jaxpr) for v in eqn.invars)
    literals = (v.val for v in atoms if isinstance(v, _jax.Literal))
    return {str(n): x for n, x in enumerate([*traced.body.operands, *literals])}


@dataclasses.dataclass(frozen=True)
class _HostCalls:
    """How often the host is called with effects, by primitive: each of two steps may have functions of its own.

    Attributes:
        counts: calls outside of recomputations and of loops of unknown length.
        uncounted: primitives in loops of unknown length, or in recomputations only: where one is nested in another, JAX
            marks the first computation as a recomputation, too. A checkpointed loop has both.
        functions: the last function of each primitive, for messages.
    """

    counts: Counter[str]
    uncounted: frozenset[str]
    functions: dict[str, str]

    @classmethod
    def of(cls, jaxpr: Any) -> _HostCalls:
        counts, recomputed, repeated, functions = Counter[str](), set[str](), set[str](), dict[str, str]()

        def visit(jaxpr: Any, times: int, is_recomputed: bool, is_repeated: bool) -> None:
            for eqn in jaxpr.eqns:
                if eqn.effects and eqn.primitive.name.endswith(("_callback", "debug_print")):
                    name = eqn.primitive.name
                    functions[name] = _jax.callback_name(eqn)[0]
                    if is_recomputed:
                        recomputed.add(name)
                    elif is_repeated:
                        repeated.add(name)
                    else:
                        counts[name] += times
                inside = is_recomputed or (eqn.primitive.name in REMAT and eqn.params["differentiated"])
                for inner in _jax.inner_jaxprs(eqn):
                    is_while = is_repeated or eqn.primitive.name == "while"
                    visit(inner, times * eqn.params.get("length", 1), inside, is_while)

        visit(jaxpr, 1, False, False)
        return cls(counts, frozenset(repeated | (recomputed - counts.keys())), functions)

    def differences(self, expected: _HostCalls) -> list[str]:
        """The functions that are not called as often as in another program; called at all, where that is not known."""
        found, functions = [], expected.functions | self.functions
        uncounted = self.uncounted | expected.uncounted
        for name in dict.fromkeys([*expected.counts, *self.counts, *sorted(uncounted)]):
            if name not in uncounted and self.counts[name] != expected.counts[name]:
                times = counted(self.counts[name], "time")
                found.append(f"{functions[name]} {times} in place of {expected.counts[name]}")
            elif (name in self) != (name in expected):
                found.append(f"{functions[name]}: only one of them calls it")
        return found

    def __contains__(self, name: object) -> bool:
        return name in self.counts or name in self.uncounted
