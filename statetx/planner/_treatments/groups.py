"""A loop in groups of steps, each with its own saved values and levels: several loops in place of one.

The loops read the whole xs by the number of the step. Slices of the xs would be copies, as large as the carries of all
steps.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any

import jax.numpy as jnp
from jax import lax

from ... import _jax
from ..._equations.structure import Body
from ..._errors import PolicyError
from ..._jax import Var
from ..._lift.context import device_bytes
from ..._loops.step import LoopStep
from ..._loops.strategy import Lengths, recorded
from ..._records import headed, many, one_of, optional, row, whole
from ..._remat import mark
from ..._remat.atoms import Marks
from .._program.flat import Part
from .._program.values import ADDRESS, Address, labels_of, renumbered
from .copies import instead_of_constant
from .graph import Graph
from .loops import Carries, CheckpointedLoop, OfSteps
from .treatment import Decision, Option, Settings, Treatment, saved_as, undominated

_NUM_SPLITS = 32  # of a long loop: where the second group may begin
_MAX_NESTED = 6  # treatments of the first group in two levels


@dataclasses.dataclass(frozen=True)
class Group:
    """Consecutive steps with equal treatment.

    Attributes:
        number: of steps.
        saved: what a step saves; None for steps that are not rematerialized.
        inner: the steps of an inner loop, where the group is a loop of loops whose carries are stored; 0 for one loop.
        keep: of a loop of loops, as in `Lengths`.
    """

    number: int
    saved: frozenset[Address] | None
    inner: int = 0
    keep: str = "turn"

    @property
    def loop(self) -> Lengths | None:
        if self.saved is None:
            return None
        return Lengths(self.number // self.inner, self.inner, keep=self.keep) if self.inner else Lengths(self.number)

    @property
    def decision(self) -> Decision:
        saved = None if self.saved is None else saved_as(self.saved)
        return Decision(saved, () if self.loop is None else (CheckpointedLoop(self.loop),))

    def __str__(self) -> str:
        if not self.inner:
            return str(self.number)
        return f"{self.number // self.inner} x {self.inner}" + (f" keep={self.keep!r}" if self.keep != "turn" else "")


_GROUP = row(whole(1), optional(many(ADDRESS)), whole(), one_of("turn", "loop"))


@recorded(headed(many(whole()), _GROUP, 1))
@dataclasses.dataclass(frozen=True, repr=False)
class Groups(OfSteps):
    """The groups of a loop, from the first step on.

    Attributes:
        differentiated: which of the xs have cotangents, by position. A loop that reads the whole of such xs would add
            to all their cotangents in each step.
    """

    groups: tuple[Group, ...]
    differentiated: tuple[int, ...] = ()

    @property
    def num_steps(self) -> int:
        return sum(group.number for group in self.groups)

    def check(self, name: str, what: str, num: int) -> None:
        are_turns = all(not g.inner or _are_turns(g.number, g.inner) for g in self.groups)
        if self.num_steps != num or not are_turns:
            raise PolicyError(f"{name}: {self!r} are not groups of {num} {what}.")

    def build(self, step: LoopStep) -> Callable:
        def loop(constants: list, carry: list, xs: list) -> tuple[list, list]:
            part, num_added = _reading_whole(step, xs, self.differentiated)
            whole = [lax.stop_gradient(x) if i in self.differentiated else x for i, x in enumerate(xs)]
            all_ys, start = [], 0
            for group in self.groups:
                # The first steps of a reversed loop read the last elements.
                a, b = start, start + group.number
                first, end = (self.num_steps - b, self.num_steps - a) if step.reverse else (a, b)
                numbers = jnp.arange(first, end, dtype=jnp.int32)
                slices = [xs[i][first:end] for i in self.differentiated]
                call = _loop(part, group, num_added)
                carry, ys = call([*constants, *whole], carry, [numbers, *slices])
                all_ys.append(ys)
                start = b
            if step.reverse:
                all_ys.reverse()
            return carry, [jnp.concatenate(ys) for ys in zip(*all_ys, strict=True)]

        return loop

    def steps(self) -> Iterator[tuple[int, Decision]]:
        for group in self.groups:
            yield group.number, group.decision

    def check_values(self, part: Part, addresses: Set[Address]) -> None:
        num_xs = len(part.eqn.invars) - sum(_jax.scan_counts(part.eqn))
        are_values = all((group.saved or set()) <= addresses for group in self.groups)
        if not are_values or any(i >= num_xs for i in self.differentiated):
            raise ValueError("a value that is not there")

    def to_json(self) -> list:
        encoded = [
            [g.number, None if g.saved is None else sorted(map(list, g.saved)), g.inner, g.keep] for g in self.groups
        ]
        return ["Groups", list(self.differentiated), *encoded]

    @classmethod
    def _of_arguments(cls, differentiated: Any, *groups: Any) -> Groups:  # type: ignore[override]
        decoded = ((n, None if saved is None else frozenset(map(tuple, saved)), *rest) for n, saved, *rest in groups)
        return cls(tuple(Group(*group) for group in decoded), tuple(differentiated))

    def __repr__(self) -> str:
        return f"Groups({', '.join(map(str, self.groups))})"


def _loop(step: LoopStep, group: Group, num_added: int) -> Callable:
    if group.loop is None:
        return step.with_length(group.number, None).plain()
    saved = {renumbered(a, a[0] + num_added): mark.SAVE for a in sorted(group.saved or ())}
    marks = Marks(tuple(labels_of(saved).items()))
    return group.loop.build(step.with_length(group.number, marks, step.carry_formats))


def _reading_whole(step: LoopStep, xs: Sequence[Any], differentiated: Sequence[int]) -> tuple[LoopStep, int]:
    """The step as a function of the whole xs and of its number:
    ``(*constants, *whole, *carry, number, *slices) -> (*carry, *y)``.

    The slices are those of the differentiated xs. They only carry the cotangents: their values are not read. Returns
    the step and the number of equations at its beginning that read the xs.
    """
    jaxpr, num = step.body.jaxpr, step.num_constants + step.num_carry
    types = [*map(_jax.abstract, xs), _jax.abstract(jnp.int32(0)), *(step.x_avals[i] for i in differentiated)]

    def read(*inputs: Any) -> list[Any]:
        whole, number, slices = inputs[: len(xs)], inputs[len(xs)], inputs[len(xs) + 1 :]
        values = [lax.dynamic_index_in_dim(x, number, keepdims=False) for x in whole]
        for i, x in zip(differentiated, slices, strict=True):
            values[i] = instead_of_constant(x, values[i])
        return values

    reading, consts = _jax.stage(read, types, traced_for="statetx.plan", name="read")
    assert not consts
    inputs = [Var(aval) for aval in types]
    eqns = _jax.spliced(reading, inputs, jaxpr.invars[num:], like=jaxpr.eqns[0]) if xs else []
    before, carry = jaxpr.invars[: step.num_constants], jaxpr.invars[step.num_constants : num]
    invars = [*before, *inputs[: len(xs)], *carry, *inputs[len(xs) :]]
    whole = _jax.rebuild(jaxpr, invars=invars, outvars=jaxpr.outvars, eqns=[*eqns, *jaxpr.eqns])
    part = LoopStep(
        Body(whole, []),
        step.num_constants + len(xs),
        step.num_carry,
        length=step.length,
        reverse=step.reverse,
        policy=None,
        name=step.name,
        carry_formats=step.carry_formats,
        exact_first=step.exact_first,
        fence=step.fence,
    )
    return part, len(eqns)


class InGroups(Treatment):
    """Proposals of loops in two groups of steps; in a plan they are a `CheckpointedLoop`."""

    @classmethod
    def expanding(
        cls, part: Part, graph: Graph, settings: Settings
    ) -> Callable[[Sequence[Option]], list[Option]] | None:
        if part.eqn is None:
            return None
        length, first = part.eqn.params["length"], sum(_jax.scan_counts(part.eqn))
        x_bytes = [length * device_bytes(v.aval) for v in part.jaxpr.invars[first:]]
        read, differentiated = (
            [i - first for i in sorted(some) if i >= first] for some in (graph.residual_inputs, graph.diff_indices)
        )

        def with_groups(options: Sequence[Option]) -> list[Option]:
            unchanged = [o for o in options if not o.decision.treatments]
            by_carries: dict[Carries, dict[str, list[Option]]] = {}
            for o in options:
                loop, saved = o.decision.get(CheckpointedLoop), o.decision.saved
                # Groups do not hold values of steps in other ways than in memory.
                if loop is not None and isinstance(loop.strategy, Lengths) and saved == saved_as(o.decision.addresses):
                    kinds = by_carries.setdefault(loop.carries, {"each": [*unchanged], "turn": [], "loop": []})
                    kinds[loop.strategy.keep if _turn_of(o) > 1 else "each"].append(o)
            groups = []
            for carries, kinds in by_carries.items():
                uniform, *nested = kinds.values()
                groups += in_groups(length, uniform, nested, x_bytes, read, differentiated, carries)
            return [options[0], *groups, *options[1:]]

        return with_groups


def in_groups(
    length: int,
    uniform: Sequence[Option],
    nested: Sequence[Sequence[Option]],
    x_bytes: Sequence[int],
    read: Sequence[int],
    differentiated: Sequence[int],
    carries: Carries,
) -> list[Option]:
    """Options with two groups of steps.

    Args:
        uniform: options that treat all steps alike, and store a carry per step.
        nested: options of loops in loops, whose working set is larger, of several kinds.
        x_bytes: of each of the xs.
        read: those that the derivative of a step reads: steps that are not rematerialized store them.
        differentiated: those with a cotangent: the cotangents of the groups are joined.
    """
    read_bytes, differentiated_bytes = (sum(x_bytes[i] for i in some) for some in (read, differentiated))
    some = [_sampled(options) for options in nested]
    pairs = [*_neighbors(uniform), *((a, b) for options in some for a in options for b in uniform)]
    pairs += [(a, b) for one, other in itertools.combinations(some, 2) for a in one for b in other]
    splits = range(max(1, length // _NUM_SPLITS), length, max(1, length // _NUM_SPLITS))
    options = []
    for one, other in pairs:
        # The first group is the one with the larger working set: in its backward pass the bytes of the other are free
        # again.
        first, second = sorted((one, other), key=lambda o: -o.backward_bytes)
        before, after = _turn_of(first), _turn_of(second)
        for number in dict.fromkeys(n // before * before for n in splits):
            if not (_are_turns(number, before) and _are_turns(length - number, after)):
                continue
            parts = (first, number), (second, length - number)
            first_bytes, second_bytes = (
                (o.saved_bytes + (read_bytes if o.decision.saved is None else 0)) * n // length for o, n in parts
            )
            backward = max(second.backward_bytes, first.backward_bytes - second_bytes)
            cost = sum(o.cost * n for o, n in parts) / length
            groups = Groups(tuple(_group(o, n) for o, n in parts), tuple(differentiated))
            saved_bytes = first_bytes + second_bytes + differentiated_bytes
            decision = Decision(None, (CheckpointedLoop(groups, carries, is_fenced=True),))  # groups are several loops
            options.append(Option(saved_bytes, backward, cost, decision))
    return options


def _lengths_of(option: Option) -> Lengths | None:
    """The lengths of a loop of loops; None for one loop."""
    loop = option.decision.get(CheckpointedLoop)
    strategy = None if loop is None else loop.strategy
    return strategy if isinstance(strategy, Lengths) and len(strategy.lengths) > 1 else None


def _turn_of(option: Option) -> int:
    """The steps of a turn of a loop of loops; 1 for one loop."""
    lengths = _lengths_of(option)
    return 1 if lengths is None else lengths.lengths[1]


def _are_turns(number: int, turn: int) -> bool:
    """Whether these steps are turns of so many steps, more than one."""
    return number > 0 and number % turn == 0 and (turn == 1 or number >= 2 * turn)


def _group(option: Option, number: int) -> Group:
    lengths = _lengths_of(option)
    saved = None if option.decision.saved is None else option.decision.addresses
    return Group(number, saved) if lengths is None else Group(number, saved, lengths.lengths[1], lengths.keep)


def _sampled(nested: Sequence[Option]) -> list[Option]:
    """For each set of saved values the levels that take the fewest bytes; of these, the best."""
    least: dict[Any, Option] = {}
    for o in nested:
        saved = o.decision.saved
        if saved not in least or o.total_bytes < least[saved].total_bytes:
            least[saved] = o
    return undominated([*least.values()], lambda o: o.cost, lambda o: o.total_bytes)[:_MAX_NESTED]


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
