"""The options of a part of a program, as values: decisions, with bytes and cost; and the Pareto front of several."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

from .._loops.strategy import Strategy
from .._records import Check, decoded_by, either, flag, many, metadata, one_of, optional, record, row, whole
from .._remat.mark import RULE
from .._remat.stored import NAMES, StoredType
from ._pareto import undominated
from ._values import ADDRESS, Address, renumbered

Interval = tuple[int, int]
"""Equations of a program or of a region: the first, and the one after the last."""


class _Json(NamedTuple):
    """How a part of a decision is stored in a plan: its check, and how it is written and read."""

    check: Check
    write: Callable[[Any], Any] = lambda x: x
    read: Callable[[Any], Any] = lambda x: x

    def or_none(self) -> _Json:
        or_none = lambda convert: lambda x: None if x is None else convert(x)  # noqa: E731
        return _Json(optional(self.check), or_none(self.write), or_none(self.read))


_index, _format = whole(), one_of(*NAMES)
_stored = either(row(_index, _index, _format), row(_index, one_of(RULE), _index, _index, _format))

_FLAG = _Json(flag)
_ADDRESSES = _Json(many(ADDRESS), lambda some: sorted(map(list, some)), lambda rows: frozenset(map(tuple, rows)))
_LOOP = _Json(decoded_by(Strategy.from_json), lambda loop: loop.to_json(), Strategy.from_json)
_STORED = _Json(
    many(_stored),
    lambda stored: sorted([*address, format.name] for address, format in stored),
    lambda rows: frozenset((tuple(address), StoredType(name)) for *address, name in rows),
)
_FORMATS = _Json(
    many(row(_index, _format)),
    lambda formats: [[i, format.name] for i, format in formats],
    lambda rows: tuple((i, StoredType(name)) for i, name in rows),
)


class Decision(NamedTuple):
    """What is done with a region, or with each step of a loop.

    Attributes:
        saved: addresses of the saved values; None if the region is not rematerialized.
        offloaded: the subset of `saved` that is stored in host memory.
        loop: for a loop, how its carries are stored; None for an unchanged loop. `saved` then applies to each step.
        copies: whether inputs are computed again from what earlier regions keep, where that is cheap (`_copies`).
        stored: those of `saved` that are stored in fewer bits, with their formats.
        inputs: the inputs that are stored in fewer bits, by index, with their formats.
        fenced: whether the backward pass of a loop is kept from starting early (`_remat.fence`).
        carries: the leaves of a loop's carry that are stored in fewer bits, by number, with their formats.
    """

    saved: Annotated[frozenset[Address] | None, _ADDRESSES.or_none()] = None
    offloaded: Annotated[frozenset[Address], _ADDRESSES] = frozenset()
    loop: Annotated[Strategy | None, _LOOP.or_none()] = None
    copies: Annotated[bool, _FLAG] = False
    stored: Annotated[frozenset[tuple[Address, StoredType]], _STORED] = frozenset()
    inputs: Annotated[tuple[tuple[int, StoredType], ...], _FORMATS] = ()
    fenced: Annotated[bool, _FLAG] = False
    carries: Annotated[tuple[tuple[int, StoredType], ...], _FORMATS] = ()

    def to_json(self) -> dict[str, Any]:
        return {name: json.write(getattr(self, name)) for name, json in _JSON.items()}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Decision:
        return cls(**{name: json.read(fields[name]) for name, json in _JSON.items()})

    @property
    def saving(self) -> tuple[Any, ...]:
        """What is saved and how: the backward bytes of a region, or of a step of a loop, depend on this alone."""
        return self.saved, self.offloaded, self.stored, self.inputs

    def renumbered(self, number: Callable[[int], int]) -> Decision:
        """The decision for a region whose equations have other numbers."""
        saved = None if self.saved is None else frozenset(renumbered(a, number(a[0])) for a in self.saved)
        offloaded = frozenset(renumbered(a, number(a[0])) for a in self.offloaded)
        stored = frozenset((renumbered(a, number(a[0])), format) for a, format in self.stored)
        return self._replace(saved=saved, offloaded=offloaded, stored=stored)


class Option(NamedTuple):
    """A decision for a region, with what it takes.

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
        """What its backward pass has in use."""
        return self.saved_bytes + self.backward_bytes

    def deciding(self, **changes: Any) -> Option:
        """The option with another decision, and the same bytes and cost."""
        return self._replace(decision=self.decision._replace(**changes))


_JSON: dict[str, _Json] = metadata(Decision)

DECISION: Check = record({name: json.check for name, json in _JSON.items()})
"""Check a decision in a record."""


def pareto_front(options: Sequence[Option]) -> list[Option]:
    """The options that no other dominates in cost, saved bytes and backward bytes, the cheapest first."""
    return undominated(options, lambda o: o.cost, lambda o: o.saved_bytes, lambda o: o.backward_bytes)
