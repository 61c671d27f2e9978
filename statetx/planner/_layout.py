"""A program cut into parts, the options of each part, and the cheapest choice of options within a limit of bytes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .. import _jax
from .._equations.structure import Body
from .._jax import Jaxpr, Literal
from .._lift.context import TraceContext, device_bytes
from .._loops import schedule
from .._loops.step import Step
from .._loops.strategy import Lengths, Slots
from .._remat import decide, fence, mark
from .._remat.atoms import Marks
from ._analysis import EquationCost, Graph, Option, pareto_front
from ._parts import Part, cotangent_variables, differentiated_variables, run, split

_MAX_STATES = 16384  # pairs of saved bytes and cost that the dynamic program follows

# Carries in use beside the slots of a loop under reversal: the copy that `_loops.reversal` reads from a slot, and the next carry,
# which a step computes from it. Cotangents of the carry are among the step's backward bytes.
_CARRIES_BESIDE_SLOTS = 2


class Layout:
    """One way to cut a program.

    Args:
        jaxpr: the program, flat.
        cuts: see `split`.
        diff_indices: the inputs to differentiate with respect to.
        num_out: number of differentiated outputs; they come first.
        fronts: a cache that layouts of the same program share, by part.

    Attributes:
        parts, fronts: the parts, and the options of each.
        base: for each part, the bytes live during its backward pass under any choice: the inputs, computed by the program, of
            this part and of all parts before it.
    """

    _versions: list[int] | None = None  # of the fronts, when `_numbers` and `_choices` were computed
    _numbers: list[np.ndarray]
    _choices: dict[float, list[Option] | None]

    def __init__(
        self,
        jaxpr: Jaxpr,
        cuts: Sequence[int] | None,
        diff_indices: Sequence[int],
        num_out: int,
        *,
        equation_cost: EquationCost,
        policies: Sequence[Any],
        offload: float | None,
        deadline: Callable[[], bool],
        fronts: dict[Any, Front],
        context: TraceContext,
    ):
        self.jaxpr = jaxpr
        self.cuts = cuts
        self.parts = split(jaxpr, cuts)
        self.fronts: list[Front] = []

        # Inputs of the program are arguments of the compiled program, not temporary memory: only computed variables count.
        computed = {v for e in jaxpr.eqns for v in e.outvars}
        differentiated = differentiated_variables(jaxpr, diff_indices)
        with_cotangent = cotangent_variables(jaxpr, num_out)
        first_reader: dict[Any, int] = {}
        for i, part in enumerate(self.parts):
            variables = [None if isinstance(v, Literal) else v for v in part.invars]
            is_computed = tuple(v in computed for v in variables)
            is_differentiated = tuple(v in differentiated for v in variables)
            has_cotangent = tuple(v in with_cotangent for v in part.outvars)

            # Equal parts, such as the layers of a model, share one analysis.
            key = (part.key, is_computed, is_differentiated, has_cotangent)
            if key not in fronts:
                fronts[key] = _front(
                    part,
                    is_computed,
                    is_differentiated,
                    has_cotangent,
                    equation_cost,
                    policies,
                    offload,
                    deadline,
                    context,
                )
            self.fronts.append(fronts[key])
            for v, c in zip(variables, is_computed, strict=True):
                if c:
                    first_reader.setdefault(v, i)

        # Backward passes run in reverse, so an input lives from its first reader to the backward pass of that same part: during
        # the backward pass of part i the inputs of parts 0 to i are live, each counted once.
        input_bytes = [0] * len(self.parts)
        for v, i in first_reader.items():
            input_bytes[i] += device_bytes(v.aval)
        self.base = np.cumsum(input_bytes).tolist()

    @property
    def options(self) -> list[list[Option]]:
        """The options of each part."""
        return [front.options for front in self.fronts]

    def stock(self, number: int) -> list[Option]:
        """For each part, the option of the stock policy with this number."""
        return [front.stock[number] for front in self.fronts]

    # -- the model --
    #
    # During the backward pass of part i are live: base[i], the saved bytes of parts 0 to i, and the backward bytes of part i.

    def peak(self, options: Sequence[Option]) -> int:
        """The most bytes in use during the backward pass of any part."""
        saved_bytes, peak = 0, 0
        for base, option in zip(self.base, options, strict=True):
            saved_bytes += option.saved_bytes
            peak = max(peak, base + saved_bytes + option.backward_bytes)
        return peak

    def peak_part(self, options: Sequence[Option]) -> tuple[int, int]:
        """Return the index of the part whose backward pass has the peak, and the bytes saved by the parts before it."""
        sums = np.cumsum([0, *(o.saved_bytes for o in options)])
        in_use = [b + s + o.saved_bytes + o.backward_bytes for b, s, o in zip(self.base, sums, options, strict=False)]
        part = int(np.argmax(in_use))
        return part, int(sums[part])

    def least_peak(self) -> int:
        """The lowest limit with a feasible choice, to within 0.01%, never below it."""
        # Bisection. Invariant: `high` is feasible, as the peak of a choice at first; nothing below `low` is.
        low, high = 0, max(1, self.peak([min(o, key=lambda x: x.saved_bytes + x.backward_bytes) for o in self.options]))
        while high - low > max(1, high // 10_000):
            middle = (low + high) // 2
            low, high = (low, middle) if self._fits(middle) else (middle, high)
        return high

    def _fits(self, limit: float) -> bool:
        # Greedy is exact here: fewer saved bytes leave more room for every later part.
        saved_bytes = 0
        for base, options in zip(self.base, self.options, strict=True):
            fitting = [o.saved_bytes for o in options if base + saved_bytes + o.saved_bytes + o.backward_bytes <= limit]
            if not fitting:
                return False
            saved_bytes += min(fitting)
        return True

    def choose(self, limit: float) -> list[Option] | None:
        """The cheapest options within a limit, None if none fit: an exact dynamic program over the parts.

        Its states are the Pareto front of (saved bytes, cost) over the parts so far. A front of more than `_MAX_STATES` is
        sampled; the choice may then cost more than the optimum, but keeps the limit.
        """
        versions = [front.version for front in self.fronts]
        if versions != self._versions:
            self._versions, self._choices = versions, {}
            self._numbers = [np.array([o[1:4] for o in options], float).T[:, :, None] for options in self.options]
        if limit not in self._choices:
            self._choices[limit] = self._choose(limit)
        return self._choices[limit]

    def _choose(self, limit: float) -> list[Option] | None:
        state_bytes, state_costs = np.zeros(1), np.zeros(1)  # sorted by cost; more cost, fewer bytes
        steps: list[tuple[np.ndarray, np.ndarray]] = []
        for base, (saved_bytes, backward_bytes, costs) in zip(self.base, self._numbers, strict=True):
            # Every pair of an option (rows) and a state (columns) that fits during the backward pass of this part. Later parts only
            # add saved bytes, which are checked there: a pair that does not fit here never will.
            new_bytes = state_bytes + saved_bytes
            option, parent = np.nonzero(new_bytes <= limit - base - backward_bytes)
            if not len(parent):
                return None
            new_bytes = new_bytes[option, parent]
            new_costs = (state_costs + costs)[option, parent]

            # The Pareto front of the pairs: by ascending cost, those with fewer bytes than every cheaper one.
            order = np.argsort(new_costs, kind="stable")  # fast: the input is one sorted run for each option
            ordered = new_bytes[order]
            order = order[np.concatenate([[True], ordered[1:] < np.minimum.accumulate(ordered)[:-1]])]

            # Sampling keeps both ends: the cheapest state, and the one of the fewest bytes, which fits if any does.
            if len(order) > _MAX_STATES:
                order = order[np.unique(np.linspace(0, len(order) - 1, _MAX_STATES).astype(int))]
            state_bytes, state_costs = new_bytes[order], new_costs[order]
            steps.append((parent[order], option[order]))

        # Backtrack from the cheapest state, which is the first.
        state, choice = 0, []
        for (parent, option), options in zip(reversed(steps), reversed(self.options), strict=True):
            choice.append(options[option[state]])
            state = parent[state]
        return choice[::-1]

    # -- the program --

    def rewrite(self, options: Sequence[Option]) -> Jaxpr:
        """Apply an option to each part."""
        return rewrite(self.jaxpr, self.parts, options)


def rewrite(jaxpr: Jaxpr, parts: Sequence[Part], options: Sequence[Option]) -> Jaxpr:
    """Apply an option to each part of a program."""
    # Equal parts with equal decisions share one function, so that JAX traces and differentiates it once.
    cache: dict[Any, Callable | None] = {}
    replacements = []
    for part, option in zip(parts, options, strict=True):
        key = (part.key, option.saved, option.offloaded, option.loop)
        if key not in cache:
            cache[key] = _loop(part, option) if part.eqn is not None else _region(part, option)
        replacements.append(cache[key])
    avals = [v.aval for v in jaxpr.invars]
    body = Body.close(
        *_jax.stage(
            lambda *args: run(jaxpr, parts, replacements, args), avals, traced_for="statetx.plan", name="planned"
        )
    )
    assert not body.operands, "rewriting a program without constants made some"
    return body.jaxpr


def marks_of(option: Option) -> dict[tuple[int, ...], str]:
    """The saved values of an option, as labels for `decide.keep`."""
    offload = mark.offload("device", _jax.HOST_MEMORY)
    return {a: offload if a in option.offloaded else mark.SAVE for a in sorted(option.saved or ())}


def _region(part: Part, option: Option) -> Callable | None:
    if option.saved is None:
        return None
    # A region that saves nothing is bound exactly as the user's remat would be, inner jits included: XLA's scheduling, and
    # with it the memory, depends on them.
    jaxpr, policy = decide.keep(part.jaxpr, marks_of(option)) if option.saved else (part.original_jaxpr, None)
    return lambda *args: _jax.rematerialize(jaxpr, args, policy=fence.with_fence(policy, "auto"), prevent_cse=True)


def _loop(part: Part, option: Option) -> Callable:
    step = _step(part, option)
    num_constants, num_carry = _jax.scan_counts(part.eqn)
    if option.loop is None:
        call: Callable = step.plain()
    else:
        call = option.loop.build(step)

    def loop(*args: Any) -> list[Any]:
        constants, carry, xs = args[:num_constants], args[num_constants:][:num_carry], args[num_constants + num_carry :]
        carry, ys = call(list(constants), list(carry), list(xs))
        return [*carry, *ys]

    return loop


def _step(part: Part, option: Option) -> Step:
    num_constants, num_carry = _jax.scan_counts(part.eqn)
    marks = None if option.saved is None else Marks(tuple(marks_of(option).items()))
    params = part.eqn.params
    return Step(
        Body(part.jaxpr, []),
        num_constants,
        num_carry,
        length=params["length"],
        reverse=params["reverse"],
        policy=marks,
        name="plan",
    )


# -- options ---------------------------------------------------------------------------------------------------------


class Front:
    """The Pareto front of a part's options, shared by all parts of equal structure.

    Attributes:
        baseline: the option that leaves the part unchanged.
        options: the Pareto front.
        stock: the option of each stock policy.
        version: number of measurements so far; each may change the front.

    Args:
        steps: options of the part's equations; for a loop, of one step. The first leaves them unchanged.
        stock: the options of the stock policies for the equations.
        graph: measures options; None if there is nothing to measure.
        expand: maps options of a step to options of its loop.
    """

    def __init__(
        self,
        steps: Sequence[Option],
        stock: Sequence[Option],
        graph: Graph | None = None,
        expand: Callable[[Sequence[Option]], list[Option]] = list,
    ):
        self._steps, self._stock = list(steps), list(stock)
        self._graph = graph
        self._expand = expand
        self._measured: set[Any] = set()
        self.version = 0
        self._update()

    def _update(self) -> None:
        self.baseline = self._expand(self._steps[:1])[0]
        self.stock = [self._expand([o])[-1] for o in self._stock]
        self.options = pareto_front([*self._expand(self._steps), *self.stock])

    def measure(self, option: Option) -> bool:
        """Replace modeled backward bytes by those of the compiled backward pass. Returns whether anything was measured."""
        key = option.saved, option.offloaded
        if self._graph is None or key in self._measured:
            return False
        self._measured.add(key)

        # A policy may save the same values as an option of the front: both are replaced, and the program is compiled once.
        backward_bytes: int | None = None
        for options in (self._steps, self._stock):
            for i, o in enumerate(options):
                if (o.saved, o.offloaded) == key:
                    if backward_bytes is None:
                        backward_bytes = self._graph.measure(o).backward_bytes
                    options[i] = o._replace(backward_bytes=backward_bytes)
        self.version += 1
        self._update()
        return True


def _front(
    part: Part,
    is_computed: Sequence[bool],
    is_differentiated: Sequence[bool],
    has_cotangent: Sequence[bool],
    equation_cost: EquationCost,
    policies: Sequence[Any],
    offload: float | None,
    deadline: Callable[[], bool],
    context: TraceContext,
) -> Front:
    # Without tangents or cotangents the part has no backward pass, and saves nothing for it.
    free = [Option(None, 0, 0, 0.0)]
    if not any(is_differentiated) or not any(has_cotangent):
        return Front(free, free * len(policies))

    # JAX does not rematerialize an equation whose side effect would run again.
    is_fixed = part.category == "rest" or bool(_jax.forbidden_effects(part.jaxpr))

    if part.eqn is not None:
        # A step's carry comes from the step before, so it has tangents and cotangents from the second step on.
        num_constants, num_carry = _jax.scan_counts(part.eqn)
        is_computed = [num_constants <= i < num_constants + num_carry for i in range(len(part.jaxpr.invars))]
        is_differentiated = [d or c for d, c in zip(is_differentiated, is_computed, strict=True)]
        has_cotangent = [c or i < num_carry for i, c in enumerate(has_cotangent)]

        # No value of a step is offloaded: `_of_loop` makes the options of nested loops without the offloaded subset, whose bytes
        # would then be missing from the model. This errs towards more recomputation.
        offload = None
    try:
        graph = Graph(part.jaxpr, equation_cost, is_computed, is_differentiated, has_cotangent, context)
    except Exception:  # no reverse-mode derivative: the error belongs where the user differentiates, and only there
        return Front(free, free * len(policies))

    expand = list if part.eqn is None else functools.partial(_of_loop, part, graph, is_computed)
    baseline = graph.baseline()
    if is_fixed:
        return Front([baseline], [baseline] * len(policies), None, lambda steps: expand(steps)[:1])
    stock = [graph.by_policy(policy) for policy in policies]
    return Front([baseline, *graph.front(offload=offload, deadline=deadline), *stock], stock, graph, expand)


def _of_loop(part: Part, graph: Graph, is_carry: Sequence[bool], steps: Sequence[Option]) -> list[Option]:
    """The options of a loop, from those of its step. The last one applies the last step option, with a carry stored per step."""
    length, invars = part.eqn.params["length"], part.jaxpr.invars
    carry_bytes = sum(device_bytes(v.aval) for v, c in zip(invars, is_carry, strict=True) if c)

    options = []
    for step in steps:
        if step.saved is None:
            # Without rematerialization each step stores its residuals, and the carries among them.
            residual_carry_bytes = sum(device_bytes(invars[i].aval) for i in graph.residual_inputs if is_carry[i])
            options.append(step._replace(saved_bytes=length * (step.saved_bytes + residual_carry_bytes)))
            options += _with_slots(step, graph, length, carry_bytes)
            continue
        for inner in _inner_lengths(length):
            # Nested loops store a carry per outer step. The backward pass of an outer step runs its inner loop again first, which
            # stores a carry and the saved values per inner step. So each step runs once more than in a plain loop. A remainder of
            # the division, of fewer than `inner` steps, is not counted: this errs low, and compiled candidates correct it.
            outer = length // inner
            backward_bytes = inner * (carry_bytes + step.saved_bytes) + step.backward_bytes
            cost = length * (graph.forward_cost + step.cost)
            options.append(Option(step.saved, outer * carry_bytes, backward_bytes, cost, loop=Lengths(outer, inner)))

        # Last, as `Front` relies on: one level, with a carry and the saved values of every step.
        saved_bytes = length * (carry_bytes + step.saved_bytes)
        options.append(step._replace(saved_bytes=saved_bytes, cost=length * step.cost, loop=Lengths(length)))
    return options


def _with_slots(step: Option, graph: Graph, length: int, carry_bytes: int) -> list[Option]:
    """The loop reversed from slots, for various numbers of them. `step` is the baseline: one step at a time saves its residuals."""
    options, slots = [], 1
    while slots < length:
        # Of all evaluations as many as there are steps count as the forward pass, which the baseline has too.
        num_reruns = schedule.num_evaluations(length, slots) - length
        backward_bytes = step.backward_bytes + step.saved_bytes + _CARRIES_BESIDE_SLOTS * carry_bytes
        options.append(
            Option(None, slots * carry_bytes, backward_bytes, num_reruns * graph.forward_cost, loop=Slots(slots))
        )
        slots = slots + 1 if slots < 4 else slots * 3 // 2  # geometric: few options cover every length
    return options


@functools.cache
def _inner_lengths(length: int) -> tuple[int, ...]:
    """Lengths of inner loops to try: about the square root, and powers of two."""
    # An inner and an outer loop of two steps each are the least nesting.
    if length < 4:
        return ()
    root = schedule.nested_lengths(length, 2)[1]
    candidates = {root, *(2**n for n in range(1, length.bit_length()))}
    return tuple(n for n in candidates if 1 < n <= length // 2)
