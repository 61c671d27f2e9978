"""The options of a part of a program: a Pareto front, shared by all parts of equal structure, corrected by
measurements.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ..._cached import cached_property
from ..._equations.compiled import Program, compile_together
from .graph import Graph
from .treatment import Decision, Expand, Option, Saved, pareto_front

FREE = Option(0, 0, 0.0, Decision())
"""The option of a part without a backward pass."""


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
        self.is_free = graph is None and self.steps[:1] == [FREE]

    @cached_property
    def _modeled_steps(self) -> list[Option]:
        return list(self._find_steps())

    # These change with a measurement.

    @cached_property
    def steps(self) -> list[Option]:
        return self._corrected(self._modeled_steps)

    @cached_property
    def baseline(self) -> Option:
        return self._expand(self.steps[:1])[0]

    @cached_property
    def stock(self) -> list[Option]:
        expanded = [self._expand([o])[-1] for o in self._corrected(self._modeled_stock)]
        return [o._replace(decision=o.decision.as_written()) for o in expanded]

    @cached_property
    def options(self) -> list[Option]:
        return pareto_front([*self._expand(self.steps), *self.stock])

    @cached_property
    def columns(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Saved bytes, backward bytes and costs of the options."""
        saved, backward, costs = np.array([option[:3] for option in self.options], float).T
        return saved, backward, costs

    @cached_property
    def are_changed(self) -> np.ndarray:
        """Which of the options change the part."""
        return np.array([not option.decision.is_unchanged for option in self.options])

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
        # Made again, from measured steps.
        for name in ("steps", "baseline", "stock", "options", "columns", "are_changed"):
            vars(self).pop(name, None)
        return True

    def _new(self, option: Option) -> list[Option]:
        """Options of the equations that an option consists of, without those that are measured already."""
        held = dict.fromkeys(step.saved for _, step in option.decision.steps())
        return [self._by_saved[saved] for saved in held if saved in self._by_saved and saved not in self._measured]

    @cached_property
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
