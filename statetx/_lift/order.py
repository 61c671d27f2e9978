"""`OutputOrder`: the order of a program's outputs, which decides whether states are updated in place."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from .stage import Input


class OutputOrder:
    """The order of a program's outputs: new leaves of donated states, the output, other leaves of states.

    JAX gives the memory of donated inputs to the outputs of their types in order. An update is computed in place only
    if the new leaf of a state gets the memory of the old one, so the new leaves come before everything else, in the
    order of the old ones.

    Args:
        written: the written states, each with its number of leaves; `avals` are the types of all these leaves.
        donated: the donated states, in the order of the inputs.

    Attributes:
        updated: the positions of the new leaves of donated states among the written leaves. A leaf of another type than
            the old one, whose memory it cannot take, is not among them.
    """

    def __init__(self, written: Iterable[tuple[Any, int]], avals: Sequence[Any], donated: Iterable[Input]):
        positions_of, first = {}, 0
        for state, num in written:
            positions_of[id(state)] = range(first, first + num)
            first += num

        self.updated: list[int] = []
        for i in donated:
            positions = positions_of.get(id(i.state), ())
            if len(positions) == len(i.avals):
                is_same = [_type(avals[n]) == _type(old) for n, old in zip(positions, i.avals, strict=True)]
                self.updated += [n for n, flag in zip(positions, is_same, strict=True) if flag]
        in_place = set(self.updated)
        self._others = [n for n in range(first) if n not in in_place]
        position_of = {n: position for position, n in enumerate([*self.updated, *self._others])}
        self._positions = [position_of[n] for n in range(first)]

    def arrange(self, out: Any, leaves: Sequence[Any]) -> tuple[list[Any], Any, list[Any]]:
        """The program's outputs, from the output and the written leaves."""
        return [leaves[n] for n in self.updated], out, [leaves[n] for n in self._others]

    def restore(self, updated: list[Any], out: Any, other_leaves: list[Any]) -> tuple[Any, list[Any]]:
        """The reverse of `arrange`."""
        if not updated:
            return out, other_leaves
        leaves = [*updated, *other_leaves]
        return out, [leaves[position] for position in self._positions]


def _type(aval: Any) -> tuple[Any, ...]:
    return aval.shape, aval.dtype
