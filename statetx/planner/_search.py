"""From a budget to a plan that keeps it: propose by the model, compile, read the memory, correct the model, propose again."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from .. import _jax
from .._equations.compiled import Cost, Program, fast_compile_options, memory_analysis_options
from .._equations.differentiate import with_pullback
from .._equations.flops import flops
from .._jax import Jaxpr
from .._lift.around import Around
from .._loops.strategy import Slots
from .._remat.policy import as_policy
from .._tree import is_float
from ._analysis import Option, Price
from ._layout import Layout
from ._parts import flatten, ways_to_cut

STOCK = ("everything", "dots", "dots_without_batch_dims", "nothing")
_TRIES = 7  # compilations for one budget, at most, before stock policies are tried


@dataclasses.dataclass(frozen=True, eq=False)
class Candidate:
    """A choice that was compiled.

    Attributes:
        name: of the stock policy that it is, or "plan".
        options: of the parts of `layout`.
        peak: of the model, in bytes.
        price: of what is computed again, by the model.
        added: what is computed again by the equations of the compiled program; by the model, where these do not show it.
        cost: of the compiled program with its gradient.
        predicted: temporary bytes, as foretold from the model and the candidates compiled before.
    """

    name: str
    layout: Layout
    options: list[Option]
    peak: int
    price: float
    added: float
    cost: Cost
    predicted: float

    @property
    def temp_bytes(self) -> int:
        return self.cost.temp_bytes


class Search:
    """Everything known of one program; asked for one budget after another.

    Args:
        jaxpr: the program, without constants.
        chosen: with respect to which inputs it is differentiated.
        num_out: how many of its outputs are differentiated: the first.
        price: of an equation.
        offload: price of bringing a byte from the host's memory; None if nothing goes there.
        time_limit: seconds.
        report: called with what is done next.
        program_of: the program to be compiled for one like this one; that with its gradient if not given.
        around: what the program runs under.

    Attributes:
        candidates: what has been compiled, in this order; but the program as it is comes first, once it is there.
    """

    def __init__(
        self,
        jaxpr: Jaxpr,
        chosen: Sequence[int],
        num_out: int,
        *,
        price: Price,
        offload: float | None = None,
        time_limit: float | None = None,
        report: Callable[[str], None] = lambda text: None,
        program_of: Callable[[Jaxpr, dict[str, Any]], Program] | None = None,
        around: Around = Around(),  # noqa: B008
    ):
        self._end = None if time_limit is None else time.monotonic() + time_limit
        self._report = report
        self._program_of = program_of or functools.partial(_with_gradient, list(chosen), num_out, around)
        self.price = price
        self.jaxpr = flatten(jaxpr)
        self.candidates: list[Candidate] = []
        self._tried: dict[Any, Candidate] = {}
        fronts: dict[Any, Any] = {}
        policies = [as_policy(p) for p in STOCK]
        report("looking at the program")
        self.layouts: list[Layout] = []
        for program, cuts in ways_to_cut(self.jaxpr):
            if self.layouts and self.is_late():
                break
            options = {"policies": policies, "offload": offload, "deadline": self.is_late, "fronts": fronts}
            options |= {"around": around}
            self.layouts.append(Layout(program, cuts, chosen, num_out, price=price, **options))
            if len(self.layouts) == 1:
                self._compile_unplanned()
        self._forward = sum(map(price, self.jaxpr.eqns))
        self._negligible = 3e-3 * self._forward

    def is_late(self) -> bool:
        """Whether the time is up."""
        return self._end is not None and time.monotonic() > self._end

    # -- fitting ---------------------------------------------------------------------------------------------------

    def fit(self, budget: int) -> Candidate | None:
        """The cheapest candidate within a budget; None if none of those compiled is."""
        self._add_unplanned()
        if self.unplanned_bytes() <= budget:
            self._confirm_unplanned()
        low, high = 0.0, float("inf")
        for _ in range(_TRIES):
            best = self.best(budget)
            if (best is not None and best.added - self._least_price(high) <= self._negligible) or self.is_late():
                break
            target = self._target(budget, low, high)
            found = self._propose(target)
            if found is None:  # below the least that the model thinks possible
                if low == 0.0 and (least := self._least()) is not None and not self._was_tried(*least):
                    self.measure(*least)
                    continue
                break
            if self._was_tried(*found):
                known = self._tried[self._key(*found)]
                low, high = (max(low, target), high) if known.temp_bytes <= budget else (low, min(high, target))
                target = self._next_untried(low, high, known, budget)
                found = None if target is None else self._propose(target)
                if found is None or self._was_tried(*found):
                    break
            candidate = self.measure(*found)
            assert target is not None
            low, high = (max(low, target), high) if candidate.temp_bytes <= budget else (low, min(high, target))
            if high <= low * 1.005:
                break
        if self.best(budget) is None and not self.is_late() and (least := self._least()) is not None:
            self.measure(*least)
        self._try_stock(budget)
        return self.best(budget)

    def best(self, budget: float) -> Candidate | None:
        """The cheapest of what has been compiled that keeps a budget."""
        fitting = [c for c in self.candidates if c.temp_bytes <= budget]
        return min(fitting, key=lambda c: (c.added, c.name != "no remat", c.temp_bytes), default=None)

    def smallest(self) -> Candidate:
        return min(self.candidates, key=lambda c: c.temp_bytes)

    def ends(self) -> tuple[int, int]:
        """The least memory that was reached, and that without rematerialisation."""
        self._add_unplanned()
        least = self._least()
        if least is not None and not self.is_late():
            self.measure(*least)
        return self.smallest().temp_bytes, self.unplanned_bytes()

    def unplanned_bytes(self) -> int:
        """Temporary bytes without rematerialisation."""
        return self.unplanned.temp_bytes

    def part_of_unplanned(self, fraction: float) -> int:
        """A part of these bytes."""
        if fraction > 0.99:
            self._confirm_unplanned()
        return int(fraction * self.unplanned_bytes())

    def curve(self, num: int = 20) -> list[tuple[float, float]]:
        """Predicted bytes and added operations (or seconds), as a part of the program's without a plan, of the model's best
        choices, from the least memory up to that of the program without a plan."""
        self._add_unplanned()
        low = min(layout.least_peak() for layout in self.layouts)
        high = max(low + 1, *(c.peak for c in self.candidates))
        whole = self.whole()
        layouts = list({id(c.layout): c.layout for c in self.candidates}.values())
        found: list[tuple[float, float]] = []
        for limit in np.geomspace(low * 1.001 + 1, high * 1.001 + 1, num):
            choice = self._cheapest(limit, layouts)
            if choice is not None:
                price = sum(o.price for o in choice[1]) / whole
                found.append((self.predict(choice[0].peak(choice[1])), price))
        least = float("inf")
        for i, (_, price) in enumerate(found):
            least = min(least, price)
            found[i] = (max(b for b, _ in found[: i + 1]), least)
        unplanned = float(self.unplanned.temp_bytes)
        return [*(point for point in found if point[0] < unplanned), (unplanned, 0.0)]

    def whole(self) -> float:
        """The price of the program with its gradient."""
        # The backward pass costs about twice the forward pass.
        return max(1e-30, self._as_it_is.flops if self.price is flops else 3 * self._forward)

    @property
    def unplanned(self) -> Candidate:
        """The program without rematerialisation."""
        self._add_unplanned()
        return self.candidates[0]

    def _compile_unplanned(self) -> None:
        """Of a large program this takes longest, since all of it is one region. The compiler leaves Python to others."""
        self._has_unplanned = False
        self._is_confirmed = fast_compile_options() == memory_analysis_options()
        self._as_it_is = self._program_of(self.layouts[0].rewrite(self._untouched), fast_compile_options())
        pool = concurrent.futures.ThreadPoolExecutor(1)
        self._compiling = pool.submit(lambda: self._as_it_is.cost)
        pool.shutdown(wait=False)

    @property
    def _untouched(self) -> list[Option]:
        return [front.untouched for front in self.layouts[0].fronts]

    def _add_unplanned(self) -> None:
        if not self._has_unplanned:
            if not self._compiling.done():
                self._report("compiling the program as it is")
            self._put_unplanned(self._compiling.result())

    def _confirm_unplanned(self) -> None:
        """Compile it once more, with nothing in a hurry that its memory can depend on."""
        if not self._is_confirmed:
            self._report("compiling the program as it is")
            self._put_unplanned(
                self._program_of(self.layouts[0].rewrite(self._untouched), memory_analysis_options()).cost
            )
            self._is_confirmed = True

    def _put_unplanned(self, cost: Cost) -> None:
        layout, options = self.layouts[0], self._untouched
        peak = layout.peak(options)
        found = Candidate("no remat", layout, options, peak, 0.0, 0.0, cost, self.predict(peak))
        self._tried[self._key(layout, options)] = found
        others = self.candidates[1:] if self._has_unplanned else self.candidates
        self.candidates = [found, *others]
        self._has_unplanned = True

    def _least_price(self, limit: float) -> float:
        """Of all choices that the model puts below a limit; 0 without one."""
        found = self._cheapest(limit) if limit < float("inf") else None
        return 0.0 if found is None else sum(o.price for o in found[1])

    def _least(self) -> tuple[Layout, list[Option]] | None:
        """The choice of the lowest peak, once it is known of all that come near it how near they come."""
        while True:
            limit = min(layout.least_peak() for layout in self.layouts) * 1.001 + 1
            found = self._cheapest(limit)
            if found is None or self.is_late() or not (self._learn(*found) | self._learn_of_peak(*found, 1.1 * limit)):
                return found

    def _learn_of_peak(self, layout: Layout, options: Sequence[Option], limit: float) -> bool:
        """Measure all options of the part that a choice has its peak in which alone stay within a limit."""
        part, kept = layout.peak_part(options)
        front, spare = layout.fronts[part], limit - layout.base[part] - kept
        near = [o for o in front.options if o.kept_bytes + o.working_bytes <= spare]
        return any([front.measure(o) for o in near if not self.is_late()])

    def _propose(self, limit: float) -> tuple[Layout, list[Option]] | None:
        """The cheapest choice of all layouts that the model puts within a limit, of options that were measured."""
        while True:
            found = self._cheapest(limit)
            if found is None or not self._learn(*found):
                return found

    def _learn(self, layout: Layout, options: Sequence[Option]) -> bool:
        """Measure the parts of a choice, each on its own; whether anything was not known before."""
        pairs = zip(layout.fronts, options, strict=True)
        return any([front.measure(option) for front, option in pairs if not self.is_late()])

    def _cheapest(self, limit: float, layouts: Sequence[Layout] | None = None) -> tuple[Layout, list[Option]] | None:
        layouts, found = layouts or self.layouts, []
        for i, layout in enumerate(layouts):
            options = layout.choose(limit)
            if options is not None:
                found.append((sum(o.price for o in options), len(layout.parts), i, options))
        if not found:
            return None
        _, _, i, options = min(found, key=lambda f: f[:3])
        return layouts[i], options

    def _next_untried(self, low: float, high: float, known: Candidate, budget: int) -> float | None:
        """A limit of the model whose choice differs from one that is known: above it if that fits, else below."""
        step = 1.02 if known.temp_bytes <= budget else 1 / 1.02
        target = float(known.peak)
        for _ in range(60):
            target *= step
            if not low <= target <= high:
                return None
            found = self._propose(target)
            if found is None:
                return None
            if not self._was_tried(*found):
                return target
        return None

    def _try_stock(self, budget: int) -> None:
        """Compile the stock policies that the model thinks cheaper than the best so far, or all if there is none."""
        for n, name in enumerate(STOCK):
            best = self.best(budget)
            layout = self.layouts[0]
            options = layout.stock(n)
            if self._was_tried(layout, options) or self.is_late():
                continue
            if best is not None:
                if best.added <= max(0.95 * sum(o.price for o in options), self._negligible):
                    continue
                if self._learn(layout, options):
                    options = layout.stock(n)
                if self.predict(layout.peak(options)) > 2 * budget:
                    continue
            self.measure(layout, options, name)

    # -- the model, corrected ----------------------------------------------------------------------------------------

    def predict(self, peak: float, known: Sequence[Candidate] | None = None) -> float:
        """Temporary bytes of a choice with this peak, from those of the candidates that are known."""
        known = self.candidates if known is None else known
        points = sorted({(c.peak, c.temp_bytes) for c in known if c.name != "no remat"})
        if not points:
            # XLA fuses more where nothing is rematerialised: half of what the model was off there, by its logarithm.
            points = sorted({(c.peak, math.sqrt(c.peak * c.temp_bytes)) for c in known})
        if not points:
            return peak
        peaks, temps = np.array(points, float).T
        temps = np.maximum.accumulate(temps)
        if peak <= peaks[0]:
            return float(max(0.0, temps[0] + (peak - peaks[0]) * _slope(peaks[0], temps[0])))
        if peak >= peaks[-1]:
            return float(temps[-1] + (peak - peaks[-1]) * _slope(peaks[-1], temps[-1]))
        return float(np.interp(peak, peaks, temps))

    def _target(self, budget: int, low: float, high: float) -> float:
        """The limit of the model at which the corrected model meets the budget."""
        bottom, top = low, high if high < float("inf") else 4.0 * max([budget, *(c.peak for c in self.candidates)])
        for _ in range(50):
            middle = (bottom + top) / 2
            bottom, top = (middle, top) if self.predict(middle) <= budget else (bottom, middle)
        if high < float("inf"):  # keep away from both ends, else the search creeps
            margin = 0.1 * (high - low)
            return min(max(bottom, low + margin), high - margin)
        return bottom

    # -- compiling ---------------------------------------------------------------------------------------------------

    def _key(self, layout: Layout, options: Sequence[Option]) -> Any:
        return id(layout), tuple((o.kept, o.offloaded, o.loop) for o in options)

    def _was_tried(self, layout: Layout, options: Sequence[Option]) -> bool:
        return self._key(layout, options) in self._tried

    def measure(self, layout: Layout, options: Sequence[Option], name: str = "plan") -> Candidate:
        """Compile a choice."""
        key = self._key(layout, options)
        if key in self._tried:
            return self._tried[key]
        peak = layout.peak(options)
        predicted = self.predict(peak)
        self._report(f"compiling plan {len(self.candidates) + 1}")
        cost = self._program_of(layout.rewrite(options), memory_analysis_options()).cost
        price = sum(o.price for o in options)
        added = price
        # The loops of a schedule have no length that equations show.
        if self.price is flops and not any(isinstance(o.loop, Slots) for o in options):
            added = cost.flops - self._as_it_is.flops
        candidate = Candidate(name, layout, list(options), peak, price, added, cost, predicted)
        self._tried[key] = candidate
        self.candidates.append(candidate)
        return candidate


def _slope(peak: float, temp: float) -> float:
    return temp / peak if peak > 0 else 1.0


def _with_gradient(
    chosen: Sequence[int], num_out: int, around: Around, jaxpr: Jaxpr, compiler_options: dict[str, Any]
) -> Program:
    """A program without constants, with the gradient of its first outputs for the inputs `chosen`."""

    def run(*ins: Any) -> tuple[list[Any], list[Any]]:
        outs = _jax.evaluate(jaxpr, (), ins)
        own, new = outs[:num_out], outs[num_out:]
        return [jnp.asarray(x) for x in own if is_float(x)], [*(x for x in own if not is_float(x)), *new]

    return around.program(with_pullback(run, chosen), [v.aval for v in jaxpr.invars], compiler_options)
