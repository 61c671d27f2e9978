"""Candidates of a search: compiled choices of options, the memory that they predict for others, and the program
compiled for each.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from ... import _jax
from ..._equations.compiled import Cost, Program, memory_analysis_options
from ..._equations.differentiate import with_pullback
from ..._jax import Jaxpr
from ..._lift.context import TraceContext
from ..._tree import is_float
from ...residuals.report import BASELINE
from .._regions.lattice import Choice, Lattice
from .._regions.layout import Layout
from .._treatments.rewrite import UNPLANNED
from .._treatments.treatment import Option
from .baseline import Baseline, ProgramOf


@dataclasses.dataclass(frozen=True, eq=False)
class Candidate:
    """A compiled choice of options.

    Attributes:
        name: the stock policy's, "no remat" for the baseline, or "plan".
        options: one for each part of `layout`.
        peak: bytes, by the model.
        predicted_cost: of recomputation, by the model.
        added_cost: of recomputation, by the equations of the compiled program; by the model where these do not show it.
        compiled: the costs of the compiled program, gradient included.
        predicted_bytes: temporary bytes, predicted from the model and the candidates compiled before.
    """

    name: str
    layout: Layout
    options: list[Option]
    peak: int
    predicted_cost: float
    added_cost: float
    compiled: Cost
    predicted_bytes: float

    @property
    def temp_bytes(self) -> int:
        return self.compiled.temp_bytes


class Candidates:
    """The compiled candidates of a search, and the memory that they predict for other choices.

    They are in order of compilation, except that the baseline comes first once it is compiled.

    Args:
        baseline: the program without rematerialization.
        unplanned: the choice that stands for it.
        program_of: see `ProgramOf`.
        report: called with a description of each compilation.

    Attributes:
        baseline_peak: bytes of the baseline, by the model.
    """

    def __init__(
        self,
        baseline: Baseline,
        unplanned: Choice,
        program_of: ProgramOf,
        report: Callable[[str], None],
    ):
        self._program_of, self._report = program_of, report
        self._baseline, self._unplanned = baseline, unplanned
        self._baseline_candidate: Candidate | None = None
        self._others: dict[Any, Candidate] = {}  # by `_key`

        layout, options = unplanned
        self._baseline_key, self.baseline_peak = _key(layout, options), layout.peak(options)

    def __iter__(self) -> Iterator[Candidate]:
        first = [] if self._baseline_candidate is None else [self._baseline_candidate]
        return iter([*first, *self._others.values()])

    def __len__(self) -> int:
        return len(self._others) + (self._baseline_candidate is not None)

    def find(self, layout: Layout, options: Sequence[Option]) -> Candidate | None:
        """The candidate of a choice; None if it is not compiled."""
        key = _key(layout, options)
        if self._baseline_candidate is not None and key == self._baseline_key:
            return self._baseline_candidate
        return self._others.get(key)

    def has(self, layout: Layout, options: Sequence[Option]) -> bool:
        """Whether a choice is compiled."""
        return self.find(layout, options) is not None

    def measure(self, layout: Layout, options: Sequence[Option], name: str = "plan") -> Candidate:
        """Compile a choice, unless it was compiled before."""
        known = self.find(layout, options)
        if known is not None:
            return known
        if _key(layout, options) == self._baseline_key:  # the model, which said that it takes too much, was wrong
            return self._note_baseline(self._baseline.compile_exactly())
        peak = layout.peak(options)
        predicted = self.predict(peak)
        self._report(f"compiling candidate {len(self) + 1}")
        compiled = self._program_of(layout.rewrite(options), memory_analysis_options()).cost

        # The operations that rewriting adds to the equations are exact, checkpointed loops included.
        predicted_cost, added_cost = sum(o.cost for o in options), compiled.flops - self._baseline.flops
        candidate = Candidate(name, layout, list(options), peak, predicted_cost, added_cost, compiled, predicted)
        self._others[_key(layout, options)] = candidate
        return candidate

    def best(self, budget: float) -> Candidate | None:
        """The cheapest candidate that keeps a budget."""
        fitting = [c for c in self if c.temp_bytes <= budget]
        return min(fitting, key=lambda c: (c.added_cost, c.name != BASELINE, c.temp_bytes), default=None)

    def smallest(self) -> Candidate:
        return min(self, key=lambda c: c.temp_bytes)

    def predict(self, peak: float) -> float:
        """Predict the temporary bytes of a choice with this peak."""
        return predicted_bytes(peak, self.known())

    def known(self) -> list[Candidate]:
        """The candidates, and the baseline if it is extrapolated."""
        cost = None if self._baseline.compiled is not None else self._baseline.extrapolated
        return list(self) if cost is None else [self._candidate_of_baseline(cost), *self]

    # -- the baseline ------------------------------------------------------------------------------------------------

    def compile_baseline(self) -> Candidate:
        """Compile the baseline, unless it is compiled."""
        return self._note_baseline(self._baseline.compile())

    def confirm_baseline(self) -> None:
        """Compile the baseline again where it may be the answer, without the options that may change its memory."""
        self._note_baseline(self._baseline.compile_exactly())

    def baseline_bytes(self) -> int:
        """Temporary bytes of the baseline: by its program, or extrapolated for a long one."""
        known = self._baseline.known
        return self.compile_baseline().temp_bytes if known is None else known.temp_bytes

    @property
    def unplanned_bytes(self) -> int:
        """Temporary bytes of the baseline: as of `baseline_bytes` if these are known, else predicted."""
        known = self._baseline.known
        return int(self.predict(self.baseline_peak)) if known is None else known.temp_bytes

    def _note_baseline(self, compiled: Cost) -> Candidate:
        if self._baseline_candidate is None or self._baseline_candidate.compiled is not compiled:
            self._baseline_candidate = self._candidate_of_baseline(compiled)
        return self._baseline_candidate

    def _candidate_of_baseline(self, compiled: Cost) -> Candidate:
        peak = self.baseline_peak
        return Candidate(BASELINE, *self._unplanned, peak, 0.0, 0.0, compiled, predicted_bytes(peak, list(self)))


def _key(layout: Layout, options: Sequence[Option]) -> tuple[Any, ...]:
    # The decisions alone, since measurements change an option's bytes; and where parts stay unchanged, cuts make no
    # difference.
    decisions = [o.decision for o in options]
    return tuple([(r.start, r.end, d) for r, d in zip(layout.regions, decisions, strict=True) if d != UNPLANNED])


def predicted_bytes(peak: float, candidates: Sequence[Candidate]) -> float:
    """Predict the temporary bytes of a choice with this peak, by interpolation between compiled candidates."""
    points = sorted({(c.peak, c.temp_bytes) for c in candidates if c.name != BASELINE})
    if not points:
        # Only the baseline: a bad guide, since XLA fuses more without remat. Take the geometric mean of it and the
        # model.
        points = sorted({(c.peak, math.sqrt(c.peak * c.temp_bytes)) for c in candidates})
    if not points:
        return peak
    return _interpolate(points, peak)


def _interpolate(points: Sequence[tuple[float, float]], peak: float) -> float:
    """Predict the bytes for a peak of the model from points (peak, measured bytes), in ascending order."""
    # Piecewise linear, and proportional beyond both ends; a higher peak is never predicted to take less memory.
    peaks, temps = np.array(points, float).T
    temps = np.maximum.accumulate(temps)
    if peak <= peaks[0]:
        return float(max(0.0, temps[0] + (peak - peaks[0]) * _slope(peaks[0], temps[0])))
    if peak >= peaks[-1]:
        return float(temps[-1] + (peak - peaks[-1]) * _slope(peaks[-1], temps[-1]))
    return float(np.interp(peak, peaks, temps))


def _slope(peak: float, temp: float) -> float:
    return temp / peak if peak > 0 else 1.0


def with_gradient(
    diff_indices: Sequence[int],
    num_out: int,
    context: TraceContext,
    jaxpr: Jaxpr,
    compiler_options: dict[str, Any] | None,
    constants: Mapping[int, Any] = MappingProxyType({}),
) -> Program:
    """A program with the gradient of its first `num_out` outputs with respect to these inputs. `constants` are as in
    `Recorded`.
    """
    gradient = gradient_of(jaxpr, diff_indices, num_out)
    return context.program(gradient, [v.aval for v in jaxpr.invars], compiler_options, constants=constants)


def gradient_of(jaxpr: Jaxpr, diff_indices: Sequence[int], num_out: int) -> Callable[..., tuple[list, list, list]]:
    """A function of the inputs of a jaxpr that computes its outputs, and the gradient of the first `num_out`
    of them.
    """

    def run(*inputs: Any) -> tuple[list[Any], list[Any]]:
        all_outs = _jax.evaluate(jaxpr, (), inputs)
        outs, new_states = all_outs[:num_out], all_outs[num_out:]

        # Outputs without a derivative and new states stay outputs, as in the user's program, so they are not temporary.
        return [jnp.asarray(x) for x in outs if is_float(x)], [*(x for x in outs if not is_float(x)), *new_states]

    return with_pullback(run, diff_indices)


# -- the stock policies

STOCK = ("everything", "dots", "dots_without_batch_dims", "nothing")

# A stock policy is not compiled if the best candidate costs at most this part of the model's cost for it. The cost may
# be predicted too high, so the margin is wide (0.9 at first, widened so that each policy that might be cheaper is
# tried).
_CLEARLY_CHEAPER = 0.95


class StockPolicy(NamedTuple):
    """A stock policy in a program.

    Attributes:
        is_planned: for each part of `layout`, whether the policy acts on it.
    """

    name: str
    layout: Layout
    is_planned: Sequence[bool]

    @property
    def choice(self) -> Choice:
        """The layout, with the options as measured so far."""
        number = STOCK.index(self.name)
        pairs = zip(self.layout.fronts, self.is_planned, strict=True)
        options: list[Option] = [front.stock[number] if acts else front.baseline for front, acts in pairs]
        return self.layout, options


def policies_in(lattice: Lattice) -> list[StockPolicy]:
    """The stock policies in the layout that they act in."""
    return [StockPolicy(name, *lattice.stock_layout) for name in STOCK]


def compile_within(
    policies: Sequence[StockPolicy],
    candidates: Candidates,
    most: float,
    is_late: Callable[[], bool],
    below: Callable[[], float] = lambda: float("inf"),
) -> list[Candidate]:
    """Compile the policies that are predicted to take at most so many temporary bytes, and to cost less than some cost;
    return them with those that were compiled before.
    """
    found = []
    for policy in policies:
        layout, options = policy.choice
        if not candidates.has(layout, options):
            is_cheap = _CLEARLY_CHEAPER * sum(o.cost for o in options) < below()
            if is_late() or not is_cheap or candidates.predict(layout.peak(options)) > most:
                continue
        found.append(candidates.measure(layout, options, policy.name))
    return found


def outcome(policy: StockPolicy, candidates: Candidates) -> tuple[str, int, float, bool]:
    """Of a stock policy: name, temporary bytes, added cost, and whether these are predicted, since it was not
    compiled.
    """
    layout, options = policy.choice
    candidate = candidates.find(layout, options)
    if candidate is not None:
        return policy.name, candidate.temp_bytes, candidate.added_cost, False
    return policy.name, int(candidates.predict(layout.peak(options))), sum(o.cost for o in options), True
