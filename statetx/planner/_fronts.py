"""The options of a part of a program: a Pareto front, shared by all parts of equal structure, and corrected by measurements."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from .. import _jax
from .._lift.context import TraceContext, device_bytes
from .._loops import schedule
from .._loops.strategy import Lengths, Slots
from .._remat.stored import StoredType
from .._tree import is_float
from ._analysis import EquationCost, Graph
from ._groups import Groups, in_groups
from ._option import Option, pareto_front
from ._parts import Part
from ._stored import Formats
from ._values import Address

# Carries in use beside the slots of a loop under reversal: the copy that `_loops.reversal` reads from a slot, and the next carry,
# which a step computes from it. Cotangents of the carry are among the step's backward bytes.
_CARRIES_BESIDE_SLOTS = 2


_FREE = Option(None, 0, 0, 0.0)


class Front:
    """The Pareto front of a part's options, shared by all parts of equal structure.

    Attributes:
        baseline: the option that leaves the part unchanged.
        options: the Pareto front.
        uniform_options: the front of options that treat all steps of a loop alike; the same list if there are no others.
        stock: the option of each stock policy.
        version: number of measurements so far; each may change the front.
        is_free: whether the part has no backward pass.

    Args:
        steps: options of the part's equations; for a loop, of one step. The first leaves them unchanged.
        stock: the options of the stock policies for the equations.
        graph: measures options; None if there is nothing to measure.
        expand: maps options of a step to options of its loop.
        measured: backward bytes of decisions that are measured, shared by fronts of one graph.
    """

    def __init__(
        self,
        steps: Sequence[Option],
        stock: Sequence[Option],
        graph: Graph | None = None,
        expand: Callable[[Sequence[Option]], list[Option]] = list,
        measured: dict[Any, int] | None = None,
    ):
        self._steps, self._stock = list(steps), list(stock)
        self._graph = graph
        self._expand = expand
        self.is_free = graph is None and self._steps[:1] == [_FREE]
        self._measured: set[Any] = set()
        self._bytes = {} if measured is None else measured
        self.version = 0
        self._update()

    def _update(self) -> None:
        self.baseline = self._expand(self._steps[:1])[0]
        self.stock = [self._expand([o])[-1] for o in self._stock]
        options = [*self._expand(self._steps), *self.stock]
        self.options = pareto_front(options)
        uniform = [o for o in options if not isinstance(o.loop, Groups)]
        self.uniform_options = self.options if len(uniform) == len(options) else pareto_front(uniform)

    def copying(self, kept: frozenset[Address], derived: frozenset[Address], cost: float) -> Front | None:
        """The options of a region that computes inputs again, and keeps what other regions compute theirs from.

        Args:
            kept: what each option saves in any case.
            derived: what none saves.
            cost: of the copies.

        Returns:
            None if the part is not such a region.
        """
        graph = self._graph
        if graph is None or not kept <= graph.sites.keys():
            return None
        saved = dict.fromkeys(
            (o.saved - derived | kept, frozenset(a for a, _ in o.stored) - derived - kept)
            for o in self._steps
            if o.saved is not None and not o.offloaded
        )
        found = [graph.option(values, smaller=smaller) for values, smaller in saved]
        options = [o._replace(cost=o.cost + cost, copies=True) for o in found]
        return Front(options, options[-1:], graph, measured=self._bytes) if options else None

    def storing(self, part: Part, inputs: Mapping[int, StoredType], outputs: Mapping[Address, StoredType]) -> Front:
        """The options of a part where no other part has some of its inputs and outputs, but each holds what it reads itself.

        A rematerialized region stores them in fewer bits.
        """
        graph = self._graph
        if self.is_free or not (inputs or outputs):
            return self
        if graph is not None and part.eqn is None:
            steps, stock = (
                [graph.storing(o, inputs, outputs) for o in options] for options in (self._steps, self._stock)
            )
            return Front(steps, stock, graph, measured=self._bytes)
        held = sum(device_bytes(part.invars[i].aval) for i in inputs)

        def expand(steps: Sequence[Option]) -> list[Option]:
            return [o._replace(saved_bytes=o.saved_bytes + held) for o in self._expand(steps)]

        return Front(self._steps, self._stock, graph, expand, self._bytes)

    def measure(self, option: Option) -> bool:
        """Replace modeled backward bytes by those of the compiled backward pass. Returns whether anything was measured."""
        steps = [step for _, step in option.loop.steps()] if isinstance(option.loop, Groups) else [option]
        new = [d for d in dict.fromkeys(map(_of_step, steps)) if d not in self._measured]
        if self._graph is None or not new:
            return False
        for decision in new:
            self._measure(self._graph, decision)
        self.version += 1
        self._update()
        return True

    def _measure(self, graph: Graph, decision: tuple[Any, ...]) -> None:
        self._measured.add(decision)
        # A policy may save the same values as an option of the front: both are replaced, and the program is compiled once.
        for options in (self._steps, self._stock):
            for i, o in enumerate(options):
                if _of_step(o) == decision:
                    if decision not in self._bytes:
                        self._bytes[decision] = graph.measure(o).backward_bytes
                    options[i] = o._replace(backward_bytes=self._bytes[decision])


def _of_step(option: Option) -> tuple[Any, ...]:
    """What the backward bytes of an option, or of a step of a loop, depend on."""
    return option.saved, option.offloaded, option.stored, option.inputs


def front_of(
    part: Part,
    is_computed: Sequence[bool],
    is_differentiated: Sequence[bool],
    has_cotangent: Sequence[bool],
    equation_cost: EquationCost,
    policies: Sequence[Any],
    offload: float | None,
    deadline: Callable[[], bool],
    context: TraceContext,
    kept_byte_cost: float = 0.0,
    formats: Formats = (),
) -> Front:
    # Without tangents or cotangents the part has no backward pass, and saves nothing for it.
    free = [_FREE]
    if not any(is_differentiated) or not any(has_cotangent):
        return Front(free, free * len(policies))

    # JAX does not rematerialize an equation whose side effect would run again.
    is_fixed = bool(_jax.forbidden_effects(part.jaxpr))

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
        flags = is_computed, is_differentiated, has_cotangent
        graph = Graph(part.jaxpr, equation_cost, *flags, context, kept_byte_cost, formats, part.eqn is not None)
    except Exception:  # no reverse-mode derivative: the error belongs where the user differentiates, and only there
        return Front(free, free * len(policies))

    expand = list if part.eqn is None else functools.partial(_of_loop, part, graph, is_computed, equation_cost)
    baseline = graph.baseline()
    if is_fixed:
        return Front([baseline], [baseline] * len(policies), None, lambda steps: expand(steps)[:1])
    stock = [graph.by_policy(policy) for policy in policies]
    return Front([baseline, *graph.front(offload=offload, deadline=deadline), *stock], stock, graph, expand)


def _of_loop(
    part: Part, graph: Graph, is_carry: Sequence[bool], equation_cost: EquationCost, steps: Sequence[Option]
) -> list[Option]:
    """The options of a loop, from those of its step. The last one applies the last step option, with a carry stored per step."""
    length, invars = part.eqn.params["length"], part.jaxpr.invars
    carry_bytes = sum(device_bytes(v.aval) for v, c in zip(invars, is_carry, strict=True) if c)

    num_constants, num_carry = _jax.scan_counts(part.eqn)

    def ahead_cost(saved: Iterable[Address] = ()) -> float:
        """The cost of a run ahead, which computes the carry and some other values."""
        outvars = [*part.jaxpr.outvars[:num_carry], *(v for i, *n in saved for v in _outputs(part.jaxpr.eqns[i], n))]
        needed = _jax.rebuild(part.jaxpr, invars=invars, outvars=outvars, eqns=part.jaxpr.eqns)
        return sum(map(equation_cost, _jax.without_dead_code(needed).eqns))

    def carry_cost(saved: Iterable[Address]) -> float:
        """The cost of computing the carry from saved values and the carry before it."""
        given = {v for i, *n in saved if len(n) == 1 for v in _outputs(part.jaxpr.eqns[i], n)}
        needed, cost = set(part.jaxpr.outvars[:num_carry]) - given, 0.0
        for eqn in reversed(part.jaxpr.eqns):
            if any(v in needed for v in eqn.outvars):
                cost += equation_cost(eqn)
                needed.update(v for v in eqn.invars if isinstance(v, _jax.Var) and v not in given)
        return cost

    first = num_constants + num_carry
    x_bytes = [length * device_bytes(v.aval) for v in invars[first:]]
    read, differentiated = (
        [i - first for i in sorted(some) if i >= first] for some in (graph.residual_inputs, graph.diff_indices)
    )

    # What the reversal of a turn copies for each of its steps: elements of xs and of cotangents of ys, and cotangents of xs.
    slices = [*invars[first:], *(v for v in part.jaxpr.outvars[num_carry:] if is_float(v.aval))]
    slice_bytes = sum(device_bytes(v.aval) for v in (*slices, *(invars[first + i] for i in differentiated)))

    options, uniform, nested, kept = [], [], [], []
    for step in steps:
        if step.saved is None:
            # Without rematerialization each step stores its residuals, and the carries among them.
            residual_carry_bytes = sum(device_bytes(invars[i].aval) for i in graph.residual_inputs if is_carry[i])
            options.append(step._replace(saved_bytes=length * (step.saved_bytes + residual_carry_bytes)))
            uniform.append(options[-1])
            options += _with_slots(step, graph, ahead_cost(), length, carry_bytes)
            continue
        for inner in _inner_lengths(length):
            # Nested loops store a carry per outer step. The backward pass of an outer step runs its inner loop again first, which
            # stores a carry and the saved values per inner step. So each step runs once more than in a plain loop. A remainder of
            # the division, of fewer than `inner` steps, is not counted: this errs low, and compiled candidates correct it.
            outer = length // inner
            backward_bytes = inner * (carry_bytes + step.saved_bytes + slice_bytes) + step.backward_bytes
            cost = length * (ahead_cost(step.saved) + step.cost)
            option = Option(step.saved, outer * carry_bytes, backward_bytes, cost, loop=Lengths(outer, inner))
            options.append(option._replace(stored=step.stored))
            if not step.stored:
                nested.append(option)
            # What the steps save is stored for all of them, and a turn of the outer loop takes its part as a copy: only carries run again.
            if step.saved and not step.stored:
                saved_bytes = outer * carry_bytes + length * step.saved_bytes
                backward_bytes += inner * step.saved_bytes
                cost = length * (carry_cost(step.saved) + step.cost)
                keeping = Lengths(outer, inner, keep="loop")
                options.append(Option(step.saved, saved_bytes, backward_bytes, cost, loop=keeping))
                kept.append(options[-1])

        # Last, as `Front` relies on: one level, with a carry and the saved values of every step.
        saved_bytes = length * (carry_bytes + step.saved_bytes)
        options.append(step._replace(saved_bytes=saved_bytes, cost=length * step.cost, loop=Lengths(length)))
        if not step.stored:
            uniform.append(options[-1])
    return [options[0], *in_groups(length, uniform, [nested, kept], x_bytes, read, differentiated), *options[1:]]


def _with_slots(step: Option, graph: Graph, ahead_cost: float, length: int, carry_bytes: int) -> list[Option]:
    """The loop reversed from slots, for various numbers of them. `step` is the baseline: one step at a time saves its residuals."""
    options, slots = [], 1
    while slots < length:
        # Of all runs as many as there are steps count as the forward pass, which the baseline has too. As many others compute what a
        # step keeps, and the rest the carry alone.
        bytes_of_step = {"carry_bytes": carry_bytes, "residual_bytes": step.saved_bytes}
        num_reruns = Slots(slots).runs(length, **bytes_of_step) - length
        cost = length * max(graph.residual_cost, ahead_cost) + (num_reruns - length) * ahead_cost
        backward_bytes = step.backward_bytes + step.saved_bytes + _CARRIES_BESIDE_SLOTS * carry_bytes
        options.append(Option(None, slots * carry_bytes, backward_bytes, cost, loop=Slots(slots)))
        slots = slots + 1 if slots < 4 else slots * 3 // 2  # geometric: few options cover every length
    return options


def _outputs(eqn: Any, address: Sequence[int]) -> Sequence[Any]:
    """The output with the rest of an address; all of them for a value of a rule."""
    return eqn.outvars if len(address) > 1 else [eqn.outvars[address[0]]]


@functools.cache
def _inner_lengths(length: int) -> tuple[int, ...]:
    """Lengths of inner loops to try: about the square root, and powers of two."""
    # An inner and an outer loop of two steps each are the least nesting.
    if length < 4:
        return ()
    root = schedule.nested_lengths(length, 2)[1]
    candidates = {root, *(2**n for n in range(1, length.bit_length()))}
    return tuple(n for n in candidates if 1 < n <= length // 2)
