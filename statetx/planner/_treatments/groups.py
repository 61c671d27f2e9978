"""A loop in groups of steps, each with its own saved values, its own levels: several loops in place of one.

The loops read the whole xs by the number of the step. Slices of the xs would be copies, as large as the carries of all
steps.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from ... import _jax
from ..._equations.structure import Body
from ..._errors import PolicyError
from ..._jax import Array, Arrays, Var
from ..._lift.context import device_bytes
from ..._loops.step import Loop, LoopStep
from ..._loops.strategy import Lengths, recorded
from ..._records import headed, many, one_of, record, row, whole
from ..._remat.atoms import Marks
from .._program.flat import Part
from .._tuned import TUNED
from .graph import Graph
from .loops import Carries, CheckpointedLoop, OfSteps
from .proposals import RegionTreatment
from .treatment import SAVED, Decision, Expand, Facts, Option, Saved, Settings, saved_as, undominated

# Not all that a decision for a whole loop may be.
_LOOP = record({"strategy": headed(one_of("Lengths"), lambda x, path: None), "carries": row(), "fenced": one_of(False)})
_GROUP = row(whole(1), record({"saved": SAVED}, {"loop": _LOOP}))


@recorded(headed(many(whole()), _GROUP, 1))
@dataclasses.dataclass(frozen=True, repr=False)
class Groups(OfSteps):
    """The groups of a loop, from the first step on.

    Attributes:
        groups: numbers of consecutive steps, each with the decision for these: with `Lengths`, unless they are not
            rematerialized.
        differentiated: which of the xs have cotangents, by position. A loop that reads the whole of such xs would add
            to all their cotangents in each step.
    """

    groups: tuple[tuple[int, Decision], ...]
    differentiated: tuple[int, ...] = ()

    @property
    def num_steps(self) -> int:
        return sum(number for number, _ in self.groups)

    def steps(self) -> Iterator[tuple[int, Decision]]:
        return iter(self.groups)

    def check(self, name: str, what: str, num: int) -> None:
        for number, decision in self.groups:
            if (lengths := _lengths_of(decision)) is not None:
                lengths.check(name, what, number)
        if self.num_steps != num:
            raise PolicyError(f"{name}: {self!r} are not groups of {num} {what}.")

    def check_steps(self, part: Part, facts: Facts) -> None:
        for _, decision in self.groups:
            facts.check(part, Decision(decision.saved))
        if any(i >= len(part.scan.invars) - sum(_jax.scan_counts(part.scan)) for i in self.differentiated):
            raise ValueError("an element of a sequence that is not there")

    def build(self, step: LoopStep) -> Loop:
        def loop(constants: Arrays, carry: Arrays, xs: Arrays) -> tuple[Arrays, Arrays]:
            part, num_added = _reading_whole(step, xs, self.differentiated)
            stopped_xs = [lax.stop_gradient(x) if i in self.differentiated else x for i, x in enumerate(xs)]
            start, all_ys = 0, list[Arrays]()
            for number, decision in self.groups:
                # The first steps of a reversed loop read the last elements.
                a, b = start, start + number
                first, end = (self.num_steps - b, self.num_steps - a) if step.reverse else (a, b)
                numbers = jnp.arange(first, end, dtype=jnp.int32)  # pyright: ignore[reportUnknownMemberType]
                slices = [xs[i][first:end] for i in self.differentiated]
                call = _loop(part, number, decision.after(num_added))
                carry, ys = call([*constants, *stopped_xs], carry, [numbers, *slices])
                all_ys.append(ys)
                start = b
            if step.reverse:
                all_ys.reverse()
            return carry, [jnp.concatenate(ys) for ys in zip(*all_ys, strict=True)]

        return loop

    def to_json(self) -> list[Any]:
        return ["Groups", list(self.differentiated), *([n, decision.to_json()] for n, decision in self.groups)]

    @classmethod
    def _of_arguments(cls, differentiated: Any, *groups: Any) -> Groups:  # type: ignore[override]
        return cls(tuple((n, Decision.from_json(fields)) for n, fields in groups), tuple(differentiated))

    def __repr__(self) -> str:
        texts: list[str] = []
        for number, decision in self.groups:
            lengths = _lengths_of(decision)
            text = str(number) if lengths is None else " x ".join(map(str, lengths.lengths))
            texts.append(text if lengths is None or lengths.keep == "turn" else f"{text} keep={lengths.keep!r}")
        return f"Groups({', '.join(texts)})"


def _loop(step: LoopStep, number: int, decision: Decision) -> Loop:
    lengths = _lengths_of(decision)
    if lengths is None:
        return step.with_length(number, None).plain()
    marks = Marks(tuple(decision.labels().items()))
    return lengths.build(step.with_length(number, marks, step.carry_formats))


def _reading_whole(step: LoopStep, xs: Arrays, differentiated: Sequence[int]) -> tuple[LoopStep, int]:
    """The step as a function of the whole xs and of its number:
    ``(*constants, *whole, *carry, number, *slices) -> (*carry, *y)``.

    The slices are of the differentiated xs. They only carry the cotangents: their values are not read. Returns the step
    and the number of equations at its beginning that read the xs.
    """
    jaxpr, num = step.body.jaxpr, step.num_constants + step.num_carry
    types = [*map(_jax.abstract, xs), _jax.abstract(jnp.int32(0)), *(step.x_avals[i] for i in differentiated)]

    def read(*inputs: Array) -> Arrays:
        all_xs, number, slices = inputs[: len(xs)], inputs[len(xs)], inputs[len(xs) + 1 :]
        values: Arrays = [lax.dynamic_index_in_dim(x, number, keepdims=False) for x in all_xs]
        for i, x in zip(differentiated, slices, strict=True):
            values[i] = _jax.with_tangent_of(x, values[i])
        return values

    reading, consts = _jax.stage(read, types, traced_for="statetx.plan", name="read")
    assert not consts
    inputs = [Var(aval) for aval in types]
    eqns = _jax.spliced(reading, inputs, jaxpr.invars[num:], like=jaxpr.eqns[0]) if xs else []
    constants, carry = jaxpr.invars[: step.num_constants], jaxpr.invars[step.num_constants : num]
    invars = [*constants, *inputs[: len(xs)], *carry, *inputs[len(xs) :]]
    rebuilt = _jax.rebuild(jaxpr, invars=invars, outvars=jaxpr.outvars, eqns=[*eqns, *jaxpr.eqns])
    changes = {"body": Body(rebuilt, []), "num_constants": step.num_constants + len(xs)}
    part = dataclasses.replace(step, **changes, policy=None, marks=None, formats=step.carry_formats)
    return part, len(eqns)


class InGroups(RegionTreatment):
    """Proposals of loops in two groups of steps; in a plan they are a `CheckpointedLoop`."""

    @classmethod
    def expanding(cls, part: Part, graph: Graph, settings: Settings) -> Expand | None:
        if part.eqn is None:
            return None
        length, first_x = part.eqn.params["length"], sum(_jax.scan_counts(part.eqn))
        # Steps that are not rematerialized store the xs that their derivative reads. Of the xs with a cotangent the
        # cotangents of the groups are joined.
        inputs = graph.residual_inputs, graph.diff_indices
        read, joined = ([i - first_x for i in sorted(some) if i >= first_x] for some in inputs)
        types = [v.aval for v in part.jaxpr.invars[first_x:]]
        read_bytes, joined_bytes = (length * sum(device_bytes(types[i]) for i in some) for some in (read, joined))

        def mixed(pair: tuple[Option, Option], carries: Carries) -> Iterator[Option]:
            """Two groups of steps, split at several places."""
            # The first group is the one with the larger working set: in its backward pass the bytes of the other are
            # free again.
            first, second = sorted(pair, key=lambda o: -o.backward_bytes)
            first_turn, second_turn = _turn_of(first), _turn_of(second)
            step = max(1, length // 32)  # lengths are often multiples of powers of two
            for number in dict.fromkeys(n // first_turn * first_turn for n in range(step, length, step)):
                if not (_are_turns(number, first_turn) and _are_turns(length - number, second_turn)):
                    continue
                parts = (first, number), (second, length - number)
                first_bytes, second_bytes = (
                    (o.saved_bytes + (read_bytes if o.decision.saved is None else 0)) * n // length for o, n in parts
                )
                groups = Groups(tuple((n, _decision_for(n, o)) for o, n in parts), tuple(joined))
                yield Option(
                    first_bytes + second_bytes + joined_bytes,
                    max(second.backward_bytes, first.backward_bytes - second_bytes),
                    sum(o.cost * n for o, n in parts) / length,
                    Decision(None, (CheckpointedLoop(groups, carries, is_fenced=True),)),  # groups are several loops
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
            pairs = [(pair, carries) for carries, kinds in by_carries.items() for pair in _pairs(*kinds.values())]
            return [options[0], *(option for pair, carries in pairs for option in mixed(pair, carries)), *options[1:]]

        return with_groups


def _pairs(uniform: Sequence[Option], *nested: Sequence[Option]) -> Iterator[tuple[Option, Option]]:
    """Pairs of treatments for two groups.

    Args:
        uniform: options that treat all steps alike, and store a carry per step.
        nested: options of loops in loops, whose working set is larger, of several kinds.
    """
    some = [_sampled(options) for options in nested]
    yield from _neighbors(uniform)
    yield from ((a, b) for options in some for a in options for b in uniform)
    for two in itertools.combinations(some, 2):
        yield from itertools.product(*two)


def _lengths_of(decision: Decision) -> Lengths | None:
    """The lengths of the loops that the steps are in; None if they are not rematerialized."""
    loop = decision.get(CheckpointedLoop)
    return None if loop is None or not isinstance(loop.strategy, Lengths) else loop.strategy


def _turn_of(option: Option) -> int:
    """The steps of a turn of a loop of loops; 1 for one loop."""
    lengths = _lengths_of(option.decision)
    return 1 if lengths is None or len(lengths.lengths) == 1 else lengths.lengths[1]


def _are_turns(number: int, turn: int) -> bool:
    """Whether these steps are turns of so many steps, more than one."""
    return number > 0 and number % turn == 0 and (turn == 1 or number >= 2 * turn)


def _decision_for(number: int, option: Option) -> Decision:
    """Decision of an option for another number of steps."""
    turn, lengths = _turn_of(option), _lengths_of(option.decision)
    if lengths is None:
        return option.decision
    strategy = Lengths(number) if turn == 1 else Lengths(number // turn, turn, keep=lengths.keep)
    return Decision(option.decision.saved, (CheckpointedLoop(strategy),))


def _sampled(nested: Sequence[Option]) -> list[Option]:
    """Choose for each set of saved values the levels that take the fewest bytes; of these, the best."""
    least: dict[Saved | None, Option] = {}
    for o in nested:
        saved = o.decision.saved
        if saved not in least or o.total_bytes < least[saved].total_bytes:
            least[saved] = o
    return undominated([*least.values()], lambda o: o.cost, lambda o: o.total_bytes)[: TUNED.options // 4]


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
