"""The options of a part of a program: a Pareto front, shared by all parts of equal structure, and corrected by
measurements; and a program cut into parts, with an option for each of them: what they take together.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from ... import _frames, _jax
from ..._equations.compiled import Program, compile_together
from ..._jax import Jaxpr
from ..._lift.context import device_bytes
from ..._tree import is_float
from .._program.flat import Flat, Part
from .._treatments import rewrite
from .._treatments.graph import Graph
from .._treatments.loops import steps_of
from .._treatments.treatment import Decision, Expand, Option, Saved, Settings, pareto_front

_FREE = Option(0, 0, 0.0, Decision())

FindOptions = Callable[[], list[Option]]


class Front:
    """The Pareto front of a part's options, shared by all parts of equal structure.

    Attributes:
        baseline: the option that leaves the part unchanged.
        options: the Pareto front.
        stock: the option of each stock policy.
        steps: the options of the part's equations; for a loop, of one step. The first leaves them unchanged.
        graph: the part, or a step, with its derivative, which measures options; None if there is nothing to measure.
        is_free: whether the part has no backward pass.

    Args:
        steps: the attribute, or a function that returns it, called when it is first asked for.
        stock: the options of the stock policies for the equations.
        expand: maps options of the equations to options of the part.
        compiled: measured backward bytes, by the held values; shared by fronts of one graph.
    """

    def __init__(
        self,
        steps: Sequence[Option] | Callable[[], Sequence[Option]],
        stock: Sequence[Option],
        graph: Graph | None = None,
        expand: Expand = list,
        compiled: dict[Saved | None, int] | None = None,
    ):
        self._find_steps = steps if callable(steps) else lambda: steps
        self._modeled_stock = list(stock)
        self.graph = graph
        self._expand = expand
        self._measured: dict[Saved | None, int] = {}
        self._compiled = {} if compiled is None else compiled
        self.is_free = graph is None and self.steps[:1] == [_FREE]

    @functools.cached_property
    def _modeled_steps(self) -> list[Option]:
        return list(self._find_steps())

    # These change with a measurement.

    @functools.cached_property
    def steps(self) -> list[Option]:
        return self._corrected(self._modeled_steps)

    @functools.cached_property
    def baseline(self) -> Option:
        return self._expand(self.steps[:1])[0]

    @functools.cached_property
    def stock(self) -> list[Option]:
        expanded = [self._expand([o])[-1] for o in self._corrected(self._modeled_stock)]
        return [o._replace(decision=o.decision.as_written()) for o in expanded]

    @functools.cached_property
    def options(self) -> list[Option]:
        return pareto_front([*self._expand(self.steps), *self.stock])

    @functools.cached_property
    def columns(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Saved bytes, backward bytes and costs of the options."""
        saved, backward, costs = np.array([option[:3] for option in self.options], float).T
        return saved, backward, costs

    # -- other fronts --

    def replaced(self, options: Sequence[Option]) -> Front:
        """Other options of the same region; the last is for the stock policies."""
        return Front(options, options[-1:], self.graph, compiled=self._compiled)

    def changed(
        self, *, step: Callable[[Option], Option] | None = None, whole: Callable[[Option], Option] | None = None
    ) -> Front:
        """Return the options, each of the equations changed by `step`, or each of the part by `whole`."""
        of_steps = self.steps, self._corrected(self._modeled_stock)
        steps, stock = ([o if step is None else step(o) for o in options] for options in of_steps)
        expand: Expand = lambda steps: list(map(whole, self._expand(steps))) if whole else self._expand(steps)
        return Front(steps, stock, self.graph, expand, self._compiled)

    # -- measurements --

    def programs(self, option: Option) -> list[Program]:
        """The programs that `measure` compiles, unless they are compiled by then."""
        new = [o.decision for o in self._new(option) if o.decision.saved not in self._compiled]
        return [] if self.graph is None else [self.graph.program(decision) for decision in new]

    def measure(self, option: Option) -> bool:
        """Replace modeled backward bytes by measured ones, of the compiled backward pass; returns whether it did."""
        graph, new = self.graph, self._new(option)
        if graph is None or not new:
            return False
        for o in new:
            saved = o.decision.saved
            if saved not in self._compiled:
                self._compiled[saved] = graph.measure(o).backward_bytes
            self._measured[saved] = self._compiled[saved]
        for name in ("steps", "baseline", "stock", "options", "columns"):  # made again, from measured steps
            vars(self).pop(name, None)
        return True

    def _new(self, option: Option) -> list[Option]:
        """Options of the equations that an option consists of, without those that are measured already."""
        held = dict.fromkeys(step.saved for _, step in steps_of(option.decision))
        return [self._by_saved[saved] for saved in held if saved in self._by_saved and saved not in self._measured]

    @functools.cached_property
    def _by_saved(self) -> dict[Saved | None, Option]:
        """The options of the equations, by their saved values. A policy may save the same as an option of the front."""
        return {o.decision.saved: o for o in (*self._modeled_steps, *self._modeled_stock)}

    def _corrected(self, modeled: Sequence[Option]) -> list[Option]:
        """The options with measured bytes; the modeled bytes of others are scaled by the mean error of the model.

        It knows neither fusions nor the order of equations, and errs alike for all options of a part but the unchanged
        one.
        """
        keys = [saved for saved in self._measured if saved is not None]
        error = sum(self._measured[s] for s in keys) / max(1, sum(self._by_saved[s].backward_bytes for s in keys))
        factor = max(1.0, error)
        every = [self._measured.get(o.decision.saved, int(factor * o.backward_bytes)) for o in modeled]
        return [o._replace(backward_bytes=num_bytes) for o, num_bytes in zip(modeled, every, strict=True)]


def measure(pairs: Sequence[tuple[Front, Option]], is_late: Callable[[], bool]) -> bool:
    """Measure options, each on its own, until the time is up. Returns whether anything was new."""
    compile_together(p for front, option in pairs if not is_late() for p in front.programs(option))
    # A list, not a generator: `any` would stop at the first new measurement.
    return any([front.measure(option) for front, option in pairs if not is_late()])


def front_of(
    part: Part,
    is_computed: Sequence[bool],
    is_differentiated: Sequence[bool],
    has_cotangent: Sequence[bool],
    settings: Settings,
    start: Callable[[FindOptions], FindOptions] = lambda find: find,
) -> Front:
    """The front of a part.

    Args:
        start: takes a function that solves integer programs, and returns one that waits for its result.
    """
    # Without tangents or cotangents the part has no backward pass, and saves nothing for it.
    free, policies, offload = [_FREE], settings.policies, settings.offload
    if not any(is_differentiated) or not any(has_cotangent):
        return Front(free, free * len(policies))

    if part.eqn is not None:
        # A step's carry comes from the step before, so it may have tangents, and has cotangents, from the second step
        # on.
        num_constants, num_carry = _jax.scan_counts(part.eqn)
        is_computed = [num_constants <= i < num_constants + num_carry for i in range(len(part.jaxpr.invars))]
        find = _frames.undone(_jax.steps_with_tangents)
        is_differentiated, _ = find(part.jaxpr, is_differentiated, num_constants, num_carry)
        has_cotangent = [c or i < num_carry for i, c in enumerate(has_cotangent)]

        # No value of a step is offloaded: the model of loops of loops does not count the fetches for a turn.
        offload = False
    flags = is_computed, is_differentiated, has_cotangent
    graph = Graph(part.jaxpr, *flags, settings.context, settings.formats, part.eqn is not None, settings.keeps_fusions)
    all_expands = [kind.expanding(part, graph, settings) for kind in settings.treatments]
    expands = [expand for expand in all_expands if expand is not None]

    def expand(steps: Sequence[Option]) -> list[Option]:
        return functools.reduce(lambda options, more: more(options), expands, list(steps))

    baseline = graph.baseline()
    if _jax.forbidden_effects(part.jaxpr):  # JAX does not rematerialize an equation whose side effect would run again
        return Front([baseline], [baseline] * len(policies), None, lambda steps: expand(steps)[:1])
    stock = [graph.by_policy(policy) for policy in policies]
    find_front = start(graph.front_finder(offload, settings.deadline))
    return Front(lambda: [baseline, *find_front(), *stock], stock, graph, expand)


# -- choices ---------------------------------------------------------------------------------------------------------


class OptionTable(NamedTuple):
    """The options of a region.

    Attributes:
        bytes: added for later regions.
        peaks: above the bytes of earlier regions.
        costs: of recomputation.
    """

    bytes: np.ndarray
    peaks: np.ndarray
    costs: np.ndarray


class Region(NamedTuple):
    """An interval of equations that may be a part.

    Attributes:
        out_bytes: its outputs that later equations read.
        cotangent_bytes: live during its backward pass besides its outputs' cotangents: the cotangents of values that it
            or equations before it read, and equations after it too.
    """

    start: int
    end: int
    part: Part
    front: Front
    out_bytes: int
    cotangent_bytes: int = 0

    def table(self) -> OptionTable:
        saved, backward, costs = self.front.columns
        return OptionTable(saved + self.out_bytes, saved + backward + self.cotangent_bytes, costs)


class Waits(enum.Enum):
    """Values that a gradient waits for before it begins."""

    FOR_NOTHING = "nothing"
    FOR_INPUTS = "inputs"  # until all that it reads is computed
    FOR_GRADIENTS = "gradients"  # until the gradient before it is computed, too


@dataclasses.dataclass(frozen=True, eq=False)
class Choice:
    """A program cut into regions, with an option for each of them."""

    program: Flat
    regions: Sequence[Region]
    options: Sequence[Option]

    @property
    def cost(self) -> float:
        return sum(option.cost for option in self.options)

    @functools.cached_property
    def in_use(self) -> list[int]:
        """The bytes in use during the backward pass of each region: the values that regions before it computed for
        regions after them, `Region.cotangent_bytes`, what is saved so far, and its own. A value that only later regions
        read is live as its cotangent.
        """
        outputs = itertools.accumulate((r.out_bytes for r in self.regions), initial=0)
        saved = itertools.accumulate(option.saved_bytes for option in self.options)
        regions = zip(self.regions, self.options, saved, outputs, strict=False)
        return [out_bytes + r.cotangent_bytes + s + o.backward_bytes for r, o, s, out_bytes in regions]

    @property
    def peak(self) -> int:
        """The most bytes in use during the backward pass of any region."""
        return max(self.in_use, default=0)

    def rewrite(self, waits: Waits = Waits.FOR_NOTHING) -> Jaxpr:
        """Apply its option to each region."""
        last_input = None if waits is Waits.FOR_NOTHING else self.first_read()
        is_sequential = waits is Waits.FOR_GRADIENTS
        parts, decisions = [r.part for r in self.regions], [option.decision for option in self.options]
        return rewrite(self.program.jaxpr, parts, decisions, last_input=last_input, is_sequential=is_sequential)

    def first_read(self) -> int | None:
        """The smallest input, by number, of the first region with a backward pass; None if it has none."""
        first = next((r.part for r in self.regions if not r.front.is_free), None)
        reads, inputs = [] if first is None else first.invars, self.program.jaxpr.invars
        numbers = [i for i, v in enumerate(inputs) if v in reads and is_float(v.aval)]
        return min(numbers, key=lambda i: device_bytes(inputs[i].aval), default=None)
