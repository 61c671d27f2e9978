"""Copies: inputs of regions are computed again from what earlier regions keep.

A residual stream ``x + norm(conv(...))`` is cheap to compute from the products before it, and these are kept anyway
where the backward pass reads them. A region that copies reads the kept values instead of the stream: it has copies of
the cheap equations between them. Its input then only carries the cotangent.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from ... import _jax
from ..._equations.dataflow import free_variables, variables_of
from ..._equations.primitives import flops, size
from ..._jax import Atom, Eqn, Jaxpr, Var
from ..._lift.context import device_bytes
from ..._records import one_of
from ..._tree import is_float
from .._program.flat import Part, is_linear, last_reads
from .._program.values import KEEP, Address, Way
from .._tuned import TUNED
from .front import Front
from .proposals import PartsOf, RegionTreatment
from .treatment import Decision, Saved, Settings


@dataclasses.dataclass(frozen=True)
class Copies(RegionTreatment):
    """A region computes inputs again from what earlier regions keep, where that is cheap."""

    name = "copies"
    CHECK = one_of(True)

    def to_json(self) -> bool:
        return True

    @classmethod
    def from_json(cls, fields: Any) -> Copies:
        return cls()

    @classmethod
    def paths(cls, program: Jaxpr, settings: Settings, parts_of: PartsOf) -> _CopyingPaths | None:
        derived = Derived(program)
        return _CopyingPaths(derived, parts_of) if derived.sources else None

    @classmethod
    def prepare(
        cls, jaxpr: Jaxpr, parts: Sequence[Part], decisions: Sequence[Decision]
    ) -> tuple[list[Part], list[Decision]]:
        """Let parts that copy read sources in place of derived values, and let others output these sources."""
        derived = Derived(jaxpr)
        replaced = [
            derived.in_order(part.invars) if decision.get(cls) is not None else []
            for part, decision in zip(parts, decisions, strict=True)
        ]
        read = {source for values in replaced for v in values for source in derived.sources[v]}
        start, new_parts, new_decisions = 0, list[Part](), list[Decision]()
        for part, decision, values in zip(parts, decisions, replaced, strict=True):
            end = start + (1 if part.eqn is not None else len(part.jaxpr.eqns))
            computed = [v for e in jaxpr.eqns[start:end] for v in e.outvars if v in read and v not in part.outvars]
            if values or computed:
                part, decision = _with_copies(derived, part, decision, jaxpr.eqns[start:end], values, computed)
            new_parts.append(part)
            new_decisions.append(decision)
            start = end
        return new_parts, new_decisions


class _CopyingPaths:
    """Paths where each region copies or holds its inputs."""

    def __init__(self, derived: Derived, parts_of: PartsOf):
        self._derived, self._parts_of = derived, parts_of
        self.unheld = derived.sources.keys()
        self._copying = functools.cache(self._make)

    def front(self, start: int, end: int, part: Part, front: Front) -> tuple[Front, int] | None:
        inputs = self._inputs(part)
        sources, derived = self._derived.addresses(start, end)
        if (inputs or sources) and (part.eqn is not None or len(part.jaxpr.eqns) != end - start):
            return None
        copying = self._copying(front, sources, derived) if inputs or sources else front
        return None if copying is None else (copying, sum(device_bytes(v.aval) for v in inputs))

    def _make(self, front: Front, sources: frozenset[Address], derived: frozenset[Address]) -> Front | None:
        """The options of a region that computes inputs again, or holds them. It saves `sources` in any case, but none
        of the `derived` values.
        """
        graph = front.graph
        if graph is None or not sources <= graph.sites.keys():
            return None
        saved: dict[Saved, dict[Address, Way]] = {}
        for decision in (option.decision for option in front.steps):
            values = dict(decision.saved or ())
            if decision.saved is not None and not any(way.is_read_early for way in values.values()):
                values = {a: way for a, way in values.items() if a not in derived} | dict.fromkeys(sources, KEEP)
                saved[frozenset(values.items())] = values
        cost, cost_of_all, held_bytes = self._means(front)
        options = [graph.option(values) for values in saved.values()]
        holding = [o._replace(saved_bytes=o.saved_bytes + held_bytes) for o in options]
        copying = [o._replace(cost=o.cost + cost, decision=Decision(o.decision.saved, (Copies(),))) for o in options]
        # Between small products the cheap equations are most of the program, as in an associative scan, and each
        # region would copy them.
        return front.replaced([*holding, *(copying if cost <= cost_of_all else [])]) if options else None

    def _inputs(self, part: Part) -> list[Var]:
        return self._derived.in_order(part.invars)

    def _means(self, front: Front) -> tuple[float, float, int]:
        """Of the regions of a front, which share the numbers so that equal periods stay equal: the cost of their
        copies, in the forward pass and in the recomputation; of all equations from the first copied one to the last;
        and the bytes of the values.
        """
        values = [self._inputs(part) for part in self._parts_of(front)]
        costs = [self._derived.cost(of_part) for of_part in values]
        cost, cost_of_all = (sum(column) / len(values) for column in zip(*costs, strict=True))
        held_bytes = sum(device_bytes(v.aval) for of_part in values for v in of_part)
        return 2 * cost, cost_of_all, held_bytes // len(values)


class Derived:
    """The values of a flat program that can be copied.

    A value is *derived* if cheap equations compute it from program inputs and from *sources*. A source is a value that
    the backward pass reads anyway: the result of an expensive equation that something reads nonlinearly, the result of
    a reduction, or a sum whose terms are not read otherwise.

    Attributes:
        sources: for each value that is computed again rather than kept, what its copy reads besides inputs of the
            program.
    """

    def __init__(self, jaxpr: Jaxpr):
        self._jaxpr = jaxpr
        self._equation = {v: i for i, e in enumerate(jaxpr.eqns) for v in e.outvars}
        self._is_cheap = [_is_cheap(e) for e in jaxpr.eqns]
        self._small = self._small_values()
        self._needed = self._needed_values()
        self.sources: dict[Var, frozenset[Var]] = {}
        self._depths: dict[Var, int] = {}
        plain: set[Var] = set()  # neither derived nor sources
        for eqn, is_cheap in zip(jaxpr.eqns, self._is_cheap, strict=True):
            self._classify(eqn, is_cheap, plain)
        self._last_reads = last_reads(jaxpr)
        self._last_copies: dict[Var, int] = {}  # the last equation that reads something derived from a source
        for v, sources in self.sources.items():
            for source in sources:
                self._last_copies[source] = max(self._last_copies.get(source, -1), self._last_reads.get(v, -1))

    def _classify(self, eqn: Eqn, is_cheap: bool, plain: set[Var]) -> None:
        operands = variables_of(eqn)
        is_plain = not is_cheap or any(v in plain for v in operands)
        terms = [self.sources.get(v, frozenset([v])) for v in self._large(eqn)]
        is_sum = bool(terms) and all(term != frozenset().union(*terms) for term in terms)
        depth = max((self._depths.get(v, 0) for v in operands), default=0) + is_sum
        if is_plain or depth > TUNED.reduced // 2 or any(_is_reduced(eqn, v) for v in eqn.outvars):
            plain.update(v for v in eqn.outvars if is_plain and v not in self._needed)
            return
        direct = frozenset(v for v in operands if v in self._equation and v not in self.sources)
        sources = direct.union(*(self.sources[v] for v in operands if v in self.sources))
        for v in eqn.outvars:
            self.sources[v], self._depths[v] = sources, depth

    def _small_values(self) -> set[Var]:
        small: set[Var] = set()
        for is_cheap, eqn in zip(self._is_cheap, self._jaxpr.eqns, strict=True):
            computed_of_small = is_cheap and all(v in small for v in variables_of(eqn))
            small.update(v for v in eqn.outvars if computed_of_small or _is_reduced(eqn, v))
        return small

    def _large(self, eqn: Eqn) -> list[Var]:
        """The operands that the program computes and that are not small."""
        return [v for v in variables_of(eqn) if v in self._equation and v not in self._small]

    def _needed_values(self) -> set[Var]:
        """Values that the backward pass reads: those that are read nonlinearly, also beyond linear equations that read
        nothing else.
        """
        needed: set[Var] = set()
        for eqn in reversed(self._jaxpr.eqns):
            if not is_linear(eqn):
                needed.update(variables_of(eqn))
            elif len(large := self._large(eqn)) == 1 and any(v in needed for v in eqn.outvars):
                needed.update(large)
        return needed

    def addresses(self, start: int, end: int) -> tuple[frozenset[Address], frozenset[Address]]:
        """Addresses in an interval of equations: the sources that values derived for later equations read, and its
        derived outputs.
        """
        sources, derived = set[Address](), set[Address]()
        for i in range(start, end):
            for n, v in enumerate(self._jaxpr.eqns[i].outvars):
                if self._last_copies.get(v, -1) >= end:
                    sources.add((i - start, n))
                if v in self.sources and self._last_reads.get(v, -1) >= end:
                    derived.add((i - start, n))
        return frozenset(sources), frozenset(derived)

    def in_order(self, atoms: Sequence[Atom]) -> list[Var]:
        """The derived ones among some operands."""
        return sorted({v for v in atoms if isinstance(v, Var) and v in self.sources}, key=self._equation.__getitem__)

    def cost(self, values: Sequence[Var]) -> tuple[float, float]:
        """The cost of the equations between the sources and some derived values, and of all from the first of them to
        the last.
        """
        indices = self._copied(values)
        all_eqns = self._jaxpr.eqns[indices[0] : indices[-1] + 1] if indices else []
        return sum(flops(self._jaxpr.eqns[i]) for i in indices), sum(map(flops, all_eqns))

    def copied(self, values: Sequence[Var]) -> list[Eqn]:
        """The equations between the sources and some derived values, in order."""
        return [self._jaxpr.eqns[i] for i in self._copied(values)]

    def _copied(self, values: Sequence[Var]) -> list[int]:
        stack, indices = list(values), set[int]()
        while stack:
            i = self._equation[stack.pop()]
            if i not in indices:
                indices.add(i)
                stack += [v for v in variables_of(self._jaxpr.eqns[i]) if v in self.sources]
        return sorted(indices)


def _is_cheap(eqn: Eqn) -> bool:
    if eqn.effects or (eqn.primitive.name != "custom_jvp_call" and any(True for _ in _jax.inner_jaxprs(eqn))):
        return False
    # A product has twice its inner dimension.
    return flops(eqn) <= 2 * TUNED.reduced * sum(size(v) for v in (*eqn.invars, *eqn.outvars))


def _is_reduced(eqn: Eqn, v: Var) -> bool:
    largest = max((device_bytes(u.aval) for u in variables_of(eqn)), default=0)
    return TUNED.reduced * device_bytes(v.aval) <= largest


@jax.custom_jvp
def instead(x: jax.Array, copy: jax.Array) -> jax.Array:
    """The copy of a value, with the value's tangent. Second derivatives take the copy's tangent, which is computed from
    the differentiated values.
    """
    return copy


@instead.defjvp
def _instead_jvp(primals: Sequence[jax.Array], tangents: Sequence[jax.Array]) -> tuple[jax.Array, jax.Array]:
    # Not `instead(*primals)`: a region that computes the copy again would keep the value for it.
    return primals[1], tangents[0]


def _with_copies(
    derived: Derived,
    part: Part,
    decision: Decision,
    eqns: Sequence[Eqn],
    values: Sequence[Var],
    more_outs: Sequence[Var],
) -> tuple[Part, Decision]:
    """A region that copies some of its inputs and has more outputs."""
    first: list[Eqn] = []
    copy_of: dict[Var, Var] = {}
    for eqn in derived.copied(values):
        outvars = [Var(v.aval) for v in eqn.outvars]
        first.append(eqn.replace(invars=_jax.substituted(eqn.invars, copy_of), outvars=outvars))
        copy_of.update(zip(eqn.outvars, outvars, strict=True))
    copying: Callable[[jax.Array, jax.Array], list[jax.Array]] = lambda x, copy: [instead(x, copy)]
    inputs = {v: Var(v.aval) if is_float(v.aval) else copy_of[v] for v in values}
    for v in values:
        if is_float(v.aval):
            avals = [v.aval, copy_of[v].aval]
            jaxpr, _ = _jax.stage(copying, avals, traced_for="statetx.plan", name="copy")
            first += _jax.spliced(jaxpr, [v, copy_of[v]], [inputs[v]], like=eqns[0])
    all_eqns = [*first, *(eqn.replace(invars=_jax.substituted(eqn.invars, inputs)) for eqn in eqns)]
    invars = free_variables(all_eqns)
    outvars = [*(v for e in eqns for v in e.outvars if v in {*part.outvars}), *more_outs]
    jaxpr = _jax.rebuild(part.jaxpr, invars=invars, outvars=outvars, eqns=all_eqns)
    return Part(jaxpr, invars, outvars), decision.after(len(first))
