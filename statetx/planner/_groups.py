"""A loop in groups of steps, each with its own saved values: two scans in place of one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp

from .._loops.step import Step
from .._loops.strategy import Lengths, Strategy
from .._remat import mark
from .._remat.atoms import Marks
from ._analysis import Address, Option

_NUM_SPLITS = 8  # of a long loop: where the second group may begin


@dataclasses.dataclass(frozen=True, repr=False)
class Groups(Strategy):
    """Consecutive steps with equal treatment, from the first step on.

    Attributes:
        groups: for each its number of steps, and what a step saves; None for steps that are not rematerialized.
    """

    groups: tuple[tuple[int, frozenset[Address] | None], ...]

    @property
    def num_steps(self) -> int:
        return sum(number for number, _ in self.groups)

    def build(self, step: Step) -> Callable:
        loops = [(number, _loop(step, number, saved)) for number, saved in self.groups]

        def loop(constants: list, carry: list, xs: list) -> tuple[list, list]:
            all_ys, start = [], 0
            for number, call in loops:
                # The first steps of a reversed loop read the last elements.
                a, b = start, start + number
                at = slice(self.num_steps - b, self.num_steps - a) if step.reverse else slice(a, b)
                carry, ys = call(constants, carry, [x[at] for x in xs])
                all_ys.append(ys)
                start = b
            if step.reverse:
                all_ys.reverse()
            return carry, [jnp.concatenate(ys) for ys in zip(*all_ys, strict=True)]

        return loop

    def steps(self) -> Iterator[tuple[int, Option]]:
        """For each group its number of steps, and the decision for them, without bytes and cost."""
        for number, saved in self.groups:
            yield number, Option(saved, 0, 0, 0.0, loop=None if saved is None else Lengths(number))

    def to_json(self) -> list:
        return ["Groups", *([n, None if saved is None else sorted(map(list, saved))] for n, saved in self.groups)]

    @classmethod
    def _of_numbers(cls, *groups: Any) -> Groups:
        decoded = ((n, None if saved is None else frozenset((a, b) for a, b in saved)) for n, saved in groups)
        return cls(tuple(decoded))

    def __repr__(self) -> str:
        return f"Groups({', '.join(str(number) for number, _ in self.groups)})"


def _loop(step: Step, length: int, saved: frozenset[Address] | None) -> Callable:
    if saved is None:
        return step.with_length(length, None).plain()
    marks = Marks(tuple((address, mark.SAVE) for address in sorted(saved)))
    return Lengths(length).build(step.with_length(length, marks))


def in_groups(length: int, uniform: Sequence[Option], slice_bytes: int) -> list[Option]:
    """Options with two groups of steps.

    Args:
        uniform: options that treat all steps alike, and store a carry per step.
        slice_bytes: of the xs: each group gets a copy of its part. The cotangents of a part take the place of the copy.
    """
    options = []
    for fewer, more in _neighbors(uniform):
        # The first group is the one with the larger working set: in its backward pass the bytes of the other are free again.
        first, second = sorted((fewer, more), key=lambda o: -o.backward_bytes)
        for number in range(max(1, length // _NUM_SPLITS), length, max(1, length // _NUM_SPLITS)):
            first_bytes, second_bytes = (
                o.saved_bytes * n // length for o, n in ((first, number), (second, length - number))
            )
            backward = max(second.backward_bytes, first.backward_bytes - second_bytes)
            cost = (first.cost * number + second.cost * (length - number)) / length
            groups = Groups(((number, first.saved), (length - number, second.saved)))
            options.append(Option(None, first_bytes + second_bytes + slice_bytes, backward, cost, loop=groups))
    return options


def _neighbors(options: Sequence[Option]) -> Iterator[tuple[Option, Option]]:
    """Neighbors on the lower convex hull of cost over saved bytes: mixtures of others cost more at the same bytes."""
    hull: list[Option] = []
    for o in sorted(options, key=lambda o: (o.saved_bytes, o.cost)):
        if hull and o.cost >= hull[-1].cost:
            continue
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) >= _slope(hull[-1], o):
            hull.pop()
        hull.append(o)
    yield from zip(hull, hull[1:], strict=False)


def _slope(a: Option, b: Option) -> float:
    return (b.cost - a.cost) / max(1, b.saved_bytes - a.saved_bytes)
