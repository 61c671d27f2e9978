"""Decisions on a part of a program: what it saves, in which form, at which cost.

A treatment is a class in a file of this folder, listed in `TREATMENTS` (`__init__`). It has all that a plan needs to
know of it: its proposals, how it changes the program, its text, its record and the check of that.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Hashable, Iterable, Mapping, Sequence, Set
from typing import Any, ClassVar, NamedTuple, Self, TypeVar

import numpy as np

from ... import _jax
from ..._jax import ArrayFunction, Atom, Jaxpr, Var
from ..._lift.context import TraceContext
from ..._records import Check, either, many, one_of, optional, record, row, whole
from ..._remat import decide, mark
from ..._remat.mark import RULE
from ..._remat.policy import Policy
from ..._remat.survey import Site
from .._program.flat import Part
from .._program.values import (
    INPUT,
    KEEP,
    WAY,
    Address,
    Formats,
    InFormat,
    Way,
    labels_of,
    smallest_of_variables,
    values_of,
    way_of,
)

Saved = frozenset[tuple[Address, Way]]
"""Values of a region, each with the way to hold it."""

T = TypeVar("T", bound="Treatment")
Item = TypeVar("Item")


SAVED = optional(many(either(row(whole(INPUT), whole(), WAY), row(whole(), one_of(RULE), whole(), whole(), WAY))))
"""Check saved values in a record."""


def saved_as(addresses: Set[Address] | Sequence[Address], way: Way = KEEP) -> Saved:
    """Values that are all held in one way."""
    return frozenset((address, way) for address in addresses)


class Settings(NamedTuple):
    """Settings that the options of regions depend on.

    Attributes:
        formats: the allowed storage formats of values; of leaves of a carry only exact ones are used.
        is_alone: whether nothing that is differentiated beside a part has a loop. The fence keeps loops from allocating
            what their backward passes write before it is their turn; it takes a copy of a cotangent.
        offload: whether values may be held in host memory.
        treatments: that make proposals.
        policies: the stock policies.
        context: the transforms and shardings that the program runs under.
        keeps_fusions: as of a `Graph`.
        deadline: whether the time for the analysis is up.
    """

    formats: Formats = ()
    is_alone: bool = True
    offload: bool = False
    treatments: Sequence[type[Treatment]] = ()
    policies: Sequence[Policy] = ()
    context: TraceContext = TraceContext()
    keeps_fusions: bool = False
    deadline: Callable[[], bool] = lambda: False


Expand = Callable[[Sequence["Option"]], list["Option"]]
"""Maps options of the equations to options of the part."""

_RECORDED: dict[str, type[Treatment]] = {}
"""The treatments that a stored plan may have, by name."""


class Treatment:
    """Base of the treatments, which are frozen values. A treatment has no part in a method that it does not override.

    Attributes:
        name: in a stored plan.
        adds_operations: whether a step has more operations with it.
        CHECK: of its record.
    """

    name: ClassVar[str]
    adds_operations: ClassVar[bool] = False
    CHECK: ClassVar[Check]

    def __init_subclass__(cls) -> None:
        if "CHECK" in vars(cls):  # others only propose some
            _RECORDED[cls.name] = cls

    # -- of a whole step --

    @classmethod
    def may_change(cls, gradients: Sequence[Jaxpr], is_donated: bool) -> bool:
        """Whether it may change how a step uses its gradients, which are of these functions.

        Args:
            is_donated: whether the step donates anything.
        """
        return False

    @classmethod
    def around(cls) -> contextlib.AbstractContextManager[None]:
        """A block that traces a step with it."""
        return contextlib.nullcontext()

    # -- in a stored plan --

    def to_json(self) -> Any:
        raise NotImplementedError

    @classmethod
    def from_json(cls, fields: Any) -> Self:
        raise NotImplementedError

    def check(self, part: Part, facts: Facts) -> None:
        """Raise ValueError, with the reason, if it is for another part."""

    # -- in the program --

    @classmethod
    def prepare(
        cls, jaxpr: Jaxpr, parts: Sequence[Part], decisions: Sequence[Decision]
    ) -> tuple[Sequence[Part], Sequence[Decision]]:
        """Change the parts of a program before each is rewritten by itself."""
        return parts, decisions

    def steps(self) -> Iterable[tuple[int, Decision]] | None:
        """Numbers of consecutive steps of a loop, with the decision for these; None if all have the same."""
        return None

    def replacement(self, part: Part, decision: Decision) -> ArrayFunction | None:
        """The function in place of a part; None to leave it to the saved values."""
        return None

    def as_written(self) -> Self:
        """Return the decision as a user would write it."""
        return self

    # -- in printed texts --

    def line(self, part: Part) -> str:
        """A line of its own."""
        return ""


def _address(pair: tuple[Address, Way]) -> Address:
    return pair[0]


class Decision(NamedTuple):
    """Decision on a region, or on each step of a loop.

    Attributes:
        saved: the values that it saves; None if it is not rematerialized.
        treatments: what else is done, at most one of each class, in the order of their names.
    """

    saved: Saved | None = None
    treatments: tuple[Treatment, ...] = ()

    def get(self, kind: type[T]) -> T | None:
        """The treatment of a class."""
        return next((t for t in self.treatments if isinstance(t, kind)), None)

    def steps(self, length: int = 1) -> Iterable[tuple[int, Decision]]:
        """Numbers of consecutive steps of a loop of some length, with the decision for these; a region is one step."""
        of_treatments = (t.steps() for t in self.treatments)
        return next((steps for steps in of_treatments if steps is not None), [(length, self)])

    @property
    def addresses(self) -> frozenset[Address]:
        """The values that are saved, in whatever way."""
        return frozenset(address for address, _ in self.saved or ())

    @property
    def inputs(self) -> dict[int, Way]:
        """The inputs of a region, by index, that it holds in fewer bits."""
        return {address[1]: way for address, way in sorted(self.saved or (), key=_address) if address[0] == INPUT}

    @property
    def is_unchanged(self) -> bool:
        return self.saved is None and not self.treatments

    def labels(self, *, is_ordered: bool = False) -> dict[tuple[int, ...], mark.Label]:
        """The saved values as labels for `decide.keep`; `is_ordered` as for `Way.label`."""
        pairs = sorted(self.saved or (), key=_address)
        return labels_of({a: way.label(is_ordered=is_ordered) for a, way in pairs if a[0] != INPUT})

    def as_written(self) -> Decision:
        """Return the decision as a user would write it."""
        return self._replace(treatments=tuple(t.as_written() for t in self.treatments))

    def marked(self, jaxpr: Jaxpr) -> tuple[Jaxpr, Callable[..., Any]]:
        """A region with marks on the held values, and JAX's policy for these."""
        inputs = {i: way.label(is_ordered=True) for i, way in self.inputs.items()}
        return decide.keep(jaxpr, self.labels(is_ordered=True), inputs)

    def to_json(self) -> dict[str, Any]:
        saved = None if self.saved is None else sorted([*address, way.name] for address, way in self.saved)
        return {"saved": saved, **{t.name: t.to_json() for t in self.treatments}}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Decision:
        rows, kinds = fields["saved"], [kind for name, kind in sorted(_RECORDED.items()) if name in fields]
        saved = None if rows is None else frozenset((tuple(address), way_of(name)) for *address, name in rows)
        return cls(saved, tuple(kind.from_json(fields[kind.name]) for kind in kinds))

    @staticmethod
    def check(x: Any, path: str) -> None:
        """Check a decision in a record."""
        record({"saved": SAVED}, {name: kind.CHECK for name, kind in _RECORDED.items()})(x, path)

    def after(self, number: int) -> Decision:
        """The decision for a region that begins with more equations."""
        if self.saved is None:
            return self
        return self._replace(saved=frozenset(((i + number, *rest), way) for (i, *rest), way in self.saved))


class Facts:
    """Facts that decisions in a record are checked against.

    Args:
        program: flat, that they are for.
        ways: the allowed ways to hold values; None for all.
    """

    def __init__(self, program: Jaxpr, ways: Container[Way] | None = None):
        self._program, self._ways = program, ways
        self._storable: dict[Way, Set[Var]] = {}
        self._sites: dict[Hashable, Mapping[Address, Site]] = {}

    def check(self, part: Part, decision: Decision) -> None:
        """Raise ValueError, with the reason, if a decision is for another part."""
        if decision.is_unchanged:
            return
        if _jax.forbidden_effects(part.jaxpr):
            raise ValueError("a part with effects, which must not run again")
        if decision.inputs and (decision.treatments or part.eqn is not None):
            raise ValueError("inputs in fewer bits where the inputs change")
        for address, way in decision.saved or ():
            if not self._can_hold(part, address, way):
                raise ValueError(f"a value that cannot be kept as {way.name}")
        for treatment in decision.treatments:
            treatment.check(part, self)

    def sites(self, part: Part) -> Mapping[Address, Site]:
        """The values of a part that may be saved."""
        if part.key not in self._sites:
            self._sites[part.key] = values_of(part.jaxpr).sites
        return self._sites[part.key]

    def allows(self, way: Way) -> bool:
        return self._ways is None or way in self._ways

    def can_store(self, variable: Atom | None, way: InFormat) -> bool:
        """Whether a variable of the program may be held in fewer bits."""
        if way not in self._storable:
            self._storable[way] = smallest_of_variables(self._program, (way.format,)).keys()
        return self.allows(way) and variable in self._storable[way]

    def _can_hold(self, part: Part, address: Address, way: Way) -> bool:
        if address[0] == INPUT and address[1] < len(part.invars):
            return isinstance(way, InFormat) and self.can_store(part.invars[address[1]], way)
        if address not in self.sites(part) or not isinstance(way, InFormat):
            return address in self.sites(part) and self.allows(way)
        value = self.sites(part)[address].value
        if not (way.format.shrinks(value.type) and self.allows(way)):
            return False
        if not way.format.is_exact or value.is_bits:
            return True
        # The program around a part may prove more of its results.
        variable = part.jaxpr.eqns[address[0]].outvars[address[-1]] if len(address) == 2 else None
        pairs = zip(part.outvars, part.jaxpr.outvars, strict=False)
        return any(ours is variable and self.can_store(v, way) for v, ours in pairs)


class Option(NamedTuple):
    """A decision for a region, with its bytes and cost.

    Attributes:
        saved_bytes: bytes held between the passes, beyond the region's inputs.
        backward_bytes: bytes in use during its backward pass, beyond the saved ones.
        cost: of recomputation.
    """

    saved_bytes: int
    backward_bytes: int
    cost: float
    decision: Decision

    @property
    def total_bytes(self) -> int:
        """Bytes that its backward pass has in use."""
        return self.saved_bytes + self.backward_bytes


def pareto_front(options: Sequence[Option]) -> list[Option]:
    """The options that no other dominates in cost, saved bytes and backward bytes, the cheapest first."""
    return undominated(options, lambda o: o.cost, lambda o: o.saved_bytes, lambda o: o.backward_bytes)


# -- Pareto fronts: what no other undercuts, or equals, in all criteria -----------------------------------------------

_BLOCK = 64  # rows


def undominated(items: Sequence[Item], *criteria: Callable[[Item], float]) -> list[Item]:
    """The items on the front, by ascending first criterion; of equal ones the first."""
    return [items[i] for i in front(*(np.array([value(item) for item in items], float) for value in criteria))]


def front(first: np.ndarray, second: np.ndarray, *further: np.ndarray) -> np.ndarray:
    """The rows on the front of these criteria, by ascending first criterion; of equal ones the first row."""
    if not further:
        # One stable sort, which is fast for the sorted runs of a sum of fronts. Of rows that are equal in the first
        # criterion, the last that stays has the least of the second.
        order = np.argsort(first, kind="stable")
        ordered = second[order]
        rows = order[np.concatenate([[True], ordered[1:] < np.minimum.accumulate(ordered)[:-1]])[: len(order)]]
        costs = first[rows]
        return rows[np.concatenate([costs[1:] != costs[:-1], [True]])[: len(rows)]]

    # In this order a row is dominated if an earlier one is at most as large in each criterion but the first. In blocks:
    # the rows of a block that stay drop most of the rows behind it.
    order = np.lexsort((*further[::-1], second, first))
    criteria = np.stack([second, *further])
    blocks, rows = [order[:0]], order
    while len(rows):
        block, rows = rows[:_BLOCK], rows[_BLOCK:]
        block = block[~np.triu(_dominates(criteria, block, block), 1).any(0)]
        blocks.append(block)
        rows = rows[~_dominates(criteria, block, rows).any(0)]
    return np.concatenate(blocks)


def _dominates(criteria: np.ndarray, rows: np.ndarray, further: np.ndarray) -> np.ndarray:
    return np.logical_and.reduce(criteria[:, rows, None] <= criteria[:, None, further])
