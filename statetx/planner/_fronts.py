"""The options of a part of a program: a Pareto front, shared by all parts of equal structure, and corrected by measurements."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .. import _frames, _jax
from .._equations.compiled import Program
from .._lift.context import TraceContext, device_bytes
from .._remat.stored import StoredType
from ._analysis import Graph
from ._groups import Groups
from ._loop_options import LoopOptions
from ._option import Decision, Option, pareto_front
from ._parts import Part
from ._stored import Formats
from ._values import Address

_FREE = Option(0, 0, 0.0, Decision())

# Of the mean error of measured options, for those that are not measured: those that save more err less, and what looks too large is never tried.
_OPTIMISM = 0.8

FindOptions = Callable[[], list[Option]]


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
        steps: options of the part's equations; for a loop, of one step. The first leaves them unchanged. Or a function that returns
            them, called when they are first asked for.
        stock: the options of the stock policies for the equations.
        graph: measures options; None if there is nothing to measure.
        expand: maps options of a step to options of its loop.
        measured: backward bytes by what is saved, as far as they are measured; shared by fronts of one graph.
    """

    def __init__(
        self,
        steps: Sequence[Option] | Callable[[], Sequence[Option]],
        stock: Sequence[Option],
        graph: Graph | None = None,
        expand: Callable[[Sequence[Option]], list[Option]] = list,
        measured: dict[Any, int] | None = None,
    ):
        self._find_steps = steps if callable(steps) else lambda: steps
        self._stock = list(stock)
        self._graph = graph
        self._expand = expand
        self.is_free = graph is None and self._steps[:1] == [_FREE]
        self._measured: set[Any] = set()
        self._bytes = {} if measured is None else measured
        self.version = 0

    @functools.cached_property
    def _steps(self) -> list[Option]:
        return list(self._find_steps())

    # These change with a measurement.

    @functools.cached_property
    def baseline(self) -> Option:
        return self._expand(self._steps[:1])[0]

    @functools.cached_property
    def stock(self) -> list[Option]:
        return [self._expand([o])[-1].deciding(fenced=False) for o in self._stock]  # as the user would write it

    @functools.cached_property
    def _all_options(self) -> list[Option]:
        return [*self._expand(self._steps), *self.stock]

    @functools.cached_property
    def options(self) -> list[Option]:
        return pareto_front(self._all_options)

    @functools.cached_property
    def uniform_options(self) -> list[Option]:
        uniform = [o for o in self._all_options if not isinstance(o.decision.loop, Groups)]
        return self.options if len(uniform) == len(self._all_options) else pareto_front(uniform)

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
            (d.saved - derived | kept, frozenset(a for a, _ in d.stored) - derived - kept)
            for d in (option.decision for option in self._steps)
            if d.saved is not None and not d.offloaded
        )
        found = [graph.option(values, smaller=smaller) for values, smaller in saved]
        options = [o._replace(cost=o.cost + cost).deciding(copies=True) for o in found]
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

    def programs(self, option: Option) -> list[Program]:
        """The programs that `measure` compiles, unless they are compiled by then."""
        new = [d for d in self._new(option) if d not in self._bytes]
        if self._graph is None or not new:
            return []
        decisions = {o.decision.saving: o.decision for o in (*self._steps, *self._stock)}
        return [self._graph.program(decisions[d]) for d in new if d in decisions]

    def measure(self, option: Option) -> bool:
        """Replace modeled backward bytes by those of the compiled backward pass. Returns whether anything was measured."""
        new = self._new(option)
        if self._graph is None or not new:
            return False
        _ = self._modeled  # before options get other bytes
        for saving in new:
            self._measure(self._graph, saving)
        self._correct()
        self._renew()
        return True

    @functools.cached_property
    def _modeled(self) -> dict[Any, int]:
        """The backward bytes by the model, of what is not measured yet."""
        return {o.decision.saving: o.backward_bytes for o in (*self._steps, *self._stock)}

    def _correct(self) -> None:
        """Scale the modeled bytes of what is not measured by most of the mean error of what is.

        The model knows neither fusions nor the order of equations, and errs alike for all options of a part.
        """
        every = {o.decision.saving: o.backward_bytes for o in (*self._steps, *self._stock)}
        known = [saving for saving in every if saving in self._measured]
        error = sum(every[saving] for saving in known) / max(1, sum(self._modeled[saving] for saving in known))
        factor = max(1.0, _OPTIMISM * error)
        for options in (self._steps, self._stock):
            for i, o in enumerate(options):
                if (saving := o.decision.saving) not in self._measured:
                    options[i] = o._replace(backward_bytes=int(factor * self._modeled[saving]))

    def _renew(self) -> None:
        """Let the options be made from measured steps."""
        self.version += 1
        for name in ("baseline", "stock", "_all_options", "options", "uniform_options"):
            vars(self).pop(name, None)

    def _new(self, option: Option) -> list[tuple[Any, ...]]:
        """What an option saves, in all its groups of steps, without what is measured already."""
        loop = option.decision.loop
        steps = [step for _, step in loop.steps()] if isinstance(loop, Groups) else [option.decision]
        return [d for d in dict.fromkeys(step.saving for step in steps) if d not in self._measured]

    def _measure(self, graph: Graph, saving: tuple[Any, ...]) -> None:
        self._measured.add(saving)
        # A policy may save the same values as an option of the front: both are replaced, and the program is compiled once.
        for options in (self._steps, self._stock):
            for i, o in enumerate(options):
                if o.decision.saving == saving:
                    if saving not in self._bytes:
                        self._bytes[saving] = graph.measure(o).backward_bytes
                    options[i] = o._replace(backward_bytes=self._bytes[saving])


def front_of(
    part: Part,
    is_computed: Sequence[bool],
    is_differentiated: Sequence[bool],
    has_cotangent: Sequence[bool],
    policies: Sequence[Any],
    offload: bool,
    deadline: Callable[[], bool],
    context: TraceContext,
    formats: Formats = (),
    is_alone: bool = True,
    start: Callable[[FindOptions], FindOptions] = lambda find: find,
) -> Front:
    """The front of a part.

    Args:
        is_alone: as for `LoopOptions`.
        start: takes a function that solves integer programs, and returns one that waits for its result.
    """
    # Without tangents or cotangents the part has no backward pass, and saves nothing for it.
    free = [_FREE]
    if not any(is_differentiated) or not any(has_cotangent):
        return Front(free, free * len(policies))

    # JAX does not rematerialize an equation whose side effect would run again.
    is_fixed = bool(_jax.forbidden_effects(part.jaxpr))

    if part.eqn is not None:
        # A step's carry comes from the step before, so it may have tangents, and has cotangents, from the second step on.
        num_constants, num_carry = _jax.scan_counts(part.eqn)
        is_computed = [num_constants <= i < num_constants + num_carry for i in range(len(part.jaxpr.invars))]
        find = _frames.undone(_jax.steps_with_tangents)
        is_differentiated, _ = find(part.jaxpr, is_differentiated, num_constants, num_carry)
        has_cotangent = [c or i < num_carry for i, c in enumerate(has_cotangent)]

        # No value of a step is offloaded: `LoopOptions` makes those of nested loops without the offloaded subset, whose bytes
        # would then be missing from the model. This errs towards more recomputation.
        offload = False
    flags = is_computed, is_differentiated, has_cotangent
    graph = Graph(part.jaxpr, *flags, context, formats, part.eqn is not None)
    expand = list if part.eqn is None else LoopOptions(part, graph, is_alone, formats)
    baseline = graph.baseline()
    if is_fixed:
        return Front([baseline], [baseline] * len(policies), None, lambda steps: expand(steps)[:1])
    stock = [graph.by_policy(policy) for policy in policies]
    found = start(graph.front_finder(offload, deadline))
    return Front(lambda: [baseline, *found(), *stock], stock, graph, expand)
