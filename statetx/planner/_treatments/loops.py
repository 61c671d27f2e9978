"""The options of a loop, from those of its step: its carries at every step, in loops of loops, or in slots."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from ... import _jax
from ..._cached import cached_property
from ..._equations.dataflow import needed_equations
from ..._equations.primitives import flops
from ..._equations.structure import Body
from ..._errors import PolicyError
from ..._jax import Array, ArrayFunction, Arrays, Aval, Var
from ..._lift.context import device_bytes
from ..._loops import schedule
from ..._loops.step import LoopStep
from ..._loops.strategy import Lengths, Slots, Strategy
from ..._records import decoded_by, flag, many, record, row, whole
from ..._remat.atoms import Marks
from ..._remat.policy import Policy
from ..._remat.stored import StoredType
from ..._text import format_bytes, short_path
from ..._tree import is_float
from ...residuals._trace import user_line
from .._program.flat import Part
from .._program.values import FORMAT, Address, InFormat, smallest
from .._tuned import TUNED
from .graph import Graph
from .proposals import RegionTreatment
from .treatment import Decision, Expand, Facts, Option, Saved, Settings, saved_as

Carries = tuple[tuple[int, InFormat], ...]
"""The leaves of a loop's carry that are held in fewer bits, by number."""


class OfSteps(Strategy):
    """A strategy that has values of steps of its own to save."""

    def steps(self) -> Iterator[tuple[int, Decision]]:
        """Numbers of consecutive steps, and the decision for these."""
        raise NotImplementedError

    def check_steps(self, part: Part, facts: Facts) -> None:
        """Raise ValueError if these are for another loop than the part."""


@dataclasses.dataclass(frozen=True)
class CheckpointedLoop(RegionTreatment):
    """Storage of the carries of a loop. The saved values are per step.

    Attributes:
        is_fenced: whether the backward pass is kept from starting early (`_remat.fence`).
    """

    strategy: Strategy
    carries: Carries = ()
    is_fenced: bool = False

    name = "loop"
    CHECK = record({"strategy": decoded_by(Strategy.from_json), "carries": many(row(whole(), FORMAT)), "fenced": flag})

    def to_json(self) -> dict[str, Any]:
        carries = [[n, way.name] for n, way in self.carries]
        return {"strategy": self.strategy.to_json(), "carries": carries, "fenced": self.is_fenced}

    @classmethod
    def from_json(cls, fields: Any) -> CheckpointedLoop:
        carries = tuple((n, InFormat(name)) for n, name in fields["carries"])
        return cls(Strategy.from_json(fields["strategy"]), carries, fields["fenced"])

    @classmethod
    def expanding(cls, part: Part, graph: Graph, settings: Settings) -> Expand | None:
        return None if part.eqn is None else LoopOptions(part, graph, settings)

    def steps(self) -> Iterator[tuple[int, Decision]] | None:
        return self.strategy.steps() if isinstance(self.strategy, OfSteps) else None

    def check(self, part: Part, facts: Facts) -> None:
        if part.eqn is None:
            raise ValueError("a part that is not a loop")
        num_constants, _ = _jax.scan_counts(part.eqn)
        for n, way in self.carries:
            is_exact = n in part.bit_carries and way.format.is_exact and facts.allows(way)
            if not (is_exact and way.format.shrinks(part.jaxpr.invars[num_constants + n].aval)):
                raise ValueError(f"a carry that cannot be kept as {way.name}")
        length = part.eqn.params["length"]
        try:
            self.strategy.check("plan", "steps", length)
        except PolicyError:
            raise ValueError(f"a loop of other than {length} steps") from None
        if isinstance(self.strategy, OfSteps):
            self.strategy.check_steps(part, facts)

    def replacement(self, part: Part, decision: Decision) -> ArrayFunction:
        if self == CheckpointedLoop(Lengths(part.scan.params["length"])) and decision.saved == frozenset():
            # As written, it is the same loop in JAX's own equations, which may take less memory: a loop of ours with
            # derivative rules is linearized (decision 52), and a branch in its steps then returns its residuals twice.
            if part.is_rematerialized:
                return part
        marks = None if decision.saved is None else Marks(tuple(decision.labels().items()))
        carries = {n: way.format for n, way in self.carries}
        return loop_of(part, self.strategy, marks, "auto" if self.is_fenced else None, carries)

    def as_written(self) -> CheckpointedLoop:
        return dataclasses.replace(self, is_fenced=False)

    def line(self, part: Part) -> str:
        file, line, _ = user_line(part.scan)
        location = f" at {short_path(file)}:{line}" if file else ""
        text = f"The loop of {part.scan.params['length']} steps{location} is stored by {self.strategy!r}"
        return f"{text}{self._carries_text(part)}."

    def _carries_text(self, part: Part) -> str:
        if not self.carries:
            return ""
        num_constants, num_carry = _jax.scan_counts(part.scan)
        types = [v.aval for v in part.jaxpr.invars[num_constants : num_constants + num_carry]]
        names = ", ".join(dict.fromkeys(way.name for _, way in self.carries))
        stored = sum(way.num_bytes(types[n]) for n, way in self.carries)
        unchanged = sum(device_bytes(types[n]) for n, _ in self.carries)
        sizes = f"{format_bytes(stored)} in place of {format_bytes(unchanged)}"
        return f", {len(self.carries)} of the {num_carry} arrays in its carry as {names} ({sizes})"


def loop_of(
    part: Part,
    strategy: Strategy | None,
    policy: Policy | None,
    fence: str | None = None,
    carries: Mapping[int, StoredType] = MappingProxyType({}),
) -> ArrayFunction:
    """A part that is a loop, with another strategy; None for none.

    Args:
        policy: of the loop's steps.
        fence: as for `LoopStep`.
        carries: the stored types of the leaves of the carry that are stored in fewer bits, by number.
    """
    num_constants, num_carry = _jax.scan_counts(part.scan)
    step = LoopStep(
        Body(part.jaxpr, []),
        num_constants,
        num_carry,
        length=part.scan.params["length"],
        reverse=part.scan.params["reverse"],
        policy=policy,
        name="plan",
        formats=[carries.get(n) for n in range(num_carry)],
        exact_first=[n for n, is_exact in part.bit_carries.items() if is_exact],
        fence=fence,
    )
    call = step.plain() if strategy is None else strategy.build(step)

    def loop(*args: Array) -> Arrays:
        constants, carry, xs = args[:num_constants], args[num_constants:][:num_carry], args[num_constants + num_carry :]
        carry, ys = call(list(constants), list(carry), list(xs))
        return [*carry, *ys]

    return loop


# -- the options of a loop -------------------------------------------------------------------------------------------

# Carries in use beside the slots of a loop under reversal: the copy that `reverse_steps` reads from a slot, and the
# next carry, which a step computes from it. Cotangents of the carry are among the step's backward bytes.
_CARRIES_BESIDE_SLOTS = 2


class _CarryStorage:
    """Storage of the carry of a loop.

    Attributes:
        ways: of the leaves that are held in fewer bits, by number.
        leaf_bytes: of each leaf in its way.
        decoded_bytes: of the leaves that have to be decoded.
        cost: of storing and decoding a carry.
    """

    def __init__(self, types: Sequence[Aval], ways: Mapping[int, InFormat] = MappingProxyType({})):
        self.ways: Carries = tuple(ways.items())
        self.leaf_bytes = [ways[n].num_bytes(aval) if n in ways else device_bytes(aval) for n, aval in enumerate(types)]
        self.decoded_bytes = sum(way.read_bytes(types[n]) for n, way in ways.items())
        self.cost = float(sum(way.cost(types[n]) for n, way in ways.items()))

    @property
    def num_bytes(self) -> int:
        return sum(self.leaf_bytes)


class LoopOptions:
    """Makes the options of a loop.

    Args:
        part: the loop.
        graph: one step with its derivative.
    """

    def __init__(self, part: Part, graph: Graph, settings: Settings):
        self._is_alone = settings.is_alone
        self._graph = graph
        self._step, self._length = part.jaxpr, part.scan.params["length"]
        self._num_constants, self._num_carry = _jax.scan_counts(part.scan)
        self._first_x = self._num_constants + self._num_carry
        self._xs = part.jaxpr.invars[self._first_x :]

        # The carry, and if that makes it clearly smaller, the carry with leaves that are 0 or 1 in exact formats.
        types = [v.aval for v in self._step.invars[self._num_constants : self._first_x]]
        exact = tuple(f for f in settings.formats if f.is_exact)
        ways = {n: way for n in part.bit_carries if (way := smallest(types[n], exact, is_bits=True)) is not None}
        unchanged, in_bits = _CarryStorage(types), _CarryStorage(types, ways)
        is_smaller = in_bits.num_bytes < (1 - TUNED.negligible) * unchanged.num_bytes
        self._carries = [unchanged, in_bits] if is_smaller else [unchanged]

    def __call__(self, steps: Sequence[Option]) -> list[Option]:
        """The options; the last one applies the last step option to all steps alike, in one loop."""
        unchanged = [self._unchanged(step) for step in steps if step.decision.saved is None]
        options: list[Option] = []
        for carry in reversed(self._carries):
            for step in steps:
                if step.decision.saved is None:
                    options += self._with_slots(step, carry)
                else:
                    options += [*self._nested(step, carry), self._one_level(step, carry)]
        return [*unchanged, *options]

    def _with(self, strategy: Strategy, carry: _CarryStorage, saved: Saved | None = None) -> Decision:
        return Decision(saved, (CheckpointedLoop(strategy, carry.ways, not self._is_alone),))

    # -- all steps alike --

    def _bytes_per_step(self, step: Option, carry: _CarryStorage) -> int:
        """Bytes that a step stores where each stores its own: values that it saves, and of its carry what its backward
        pass reads.
        """
        read = self._graph.inputs_read(step.decision)
        return step.saved_bytes + sum(n for i, n in enumerate(carry.leaf_bytes) if self._num_constants + i in read)

    def _unchanged(self, step: Option) -> Option:
        return step._replace(saved_bytes=self._length * self._bytes_per_step(step, self._carries[0]))

    def _one_level(self, step: Option, carry: _CarryStorage) -> Option:
        return step._replace(
            saved_bytes=self._length * self._bytes_per_step(step, carry),
            backward_bytes=step.backward_bytes + carry.decoded_bytes,
            cost=self._length * (step.cost + carry.cost),
            decision=self._with(Lengths(self._length), carry, step.decision.saved),
        )

    def _nested(self, step: Option, carry: _CarryStorage) -> list[Option]:
        """Loops in loops store a carry per turn of the outer one. To reverse a turn, its steps run again first, and
        store as much as in one loop. Or what steps save is stored for all of them, so that only carries are computed
        again; a turn reads its part as a copy.

        The turns of a division with a remainder read a slice of the xs, which is a copy.
        """
        addresses, of_step = step.decision.addresses, self._bytes_per_step(step, carry)
        kinds = [("turn", self._ahead_cost(addresses), 0)]
        if addresses and step.decision.saved == saved_as(addresses):
            kinds.append(("loop", self._carry_cost(addresses), step.saved_bytes))
        return [
            Option(
                outer * carry.num_bytes + self._length * kept_bytes,
                inner * (of_step + kept_bytes + self._slice_bytes)
                # while a step of a turn is reversed, with the decoded values of the turn and of the step
                + step.backward_bytes
                + 2 * carry.decoded_bytes
                + self._sliced_bytes(outer * inner),
                self._length * (ahead_cost + step.cost) + (outer + self._length) * carry.cost,
                self._with(Lengths(outer, inner, keep=keep), carry, step.decision.saved),
            )
            for keep, ahead_cost, kept_bytes in kinds
            for outer, inner in _lengths(self._length)
        ]

    def _with_slots(self, step: Option, carry: _CarryStorage) -> list[Option]:
        """The loop reversed from slots, for various numbers of them. `step` is the baseline: one step at a time saves
        its residuals.
        """
        ahead_cost, length = self._ahead_cost(), self._length
        slots, options = 1, list[Option]()
        while slots < length:
            # Of all runs as many as there are steps count as the forward pass, which the baseline has too. As many
            # others compute a step's residuals, and the rest the carry alone.
            bytes_of_step = {"carry_bytes": carry.num_bytes, "residual_bytes": step.saved_bytes}
            num_reruns = Slots(slots).runs(length, **bytes_of_step) - length
            cost = length * max(self._graph.residual_cost, ahead_cost) + (num_reruns - length) * ahead_cost
            cost += length * carry.cost  # each step begins with a carry from a slot, at most
            backward_bytes = step.backward_bytes + step.saved_bytes + _CARRIES_BESIDE_SLOTS * self._carries[0].num_bytes
            options.append(Option(slots * carry.num_bytes, backward_bytes, cost, self._with(Slots(slots), carry)))
            slots = slots + 1 if slots < 4 else slots * 3 // 2  # geometric: few options cover every length
        return options

    # -- bytes and costs --

    @cached_property
    def _slice_bytes(self) -> int:
        """Bytes that the reversal of a turn copies for a step: elements of xs and of cotangents of ys, and
        cotangents of xs.
        """
        ys = [v for v in self._step.outvars[self._num_carry :] if is_float(v.aval)]
        differentiated = [self._step.invars[i] for i in self._graph.diff_indices if i >= self._first_x]
        copied = [*self._xs, *ys, *differentiated]
        return sum(device_bytes(v.aval) for v in copied)

    def _sliced_bytes(self, num_steps: int) -> int:
        """The copy of the xs of these steps, if they are not all steps."""
        return num_steps * sum(device_bytes(v.aval) for v in self._xs) if num_steps < self._length else 0

    def _ahead_cost(self, saved: Iterable[Address] = ()) -> float:
        """The cost of a run ahead, which computes the carry and some other values."""
        values = [v for address in saved for v in self._values_at(address)]
        outvars = [*self._step.outvars[: self._num_carry], *values]
        needed = _jax.rebuild(self._step, invars=self._step.invars, outvars=outvars, eqns=self._step.eqns)
        return sum(map(flops, _jax.without_dead_code(needed).eqns))

    def _carry_cost(self, saved: Iterable[Address]) -> float:
        """The cost of computing the carry from saved values and the carry before it."""
        saved_variables = {v for address in saved if len(address) == 2 for v in self._values_at(address)}
        carry = [v for v in self._step.outvars[: self._num_carry] if isinstance(v, Var)]
        return sum(map(flops, needed_equations(self._step.eqns, carry, saved_variables)))

    def _values_at(self, address: Address) -> Sequence[Var]:
        """The value with an address; for one in a rule all results of the call."""
        i, *rest = address
        outvars = self._step.eqns[i].outvars
        return outvars if len(rest) > 1 else [outvars[rest[0]]]


@functools.cache
def _lengths(length: int) -> tuple[tuple[int, int], ...]:
    """Lengths of outer and inner loops to try: about the square root, powers of two, and the divisors next to these."""
    # An inner and an outer loop of two steps each are the least nesting.
    if length < 4:
        return ()
    powers = [2**n for n in range(1, length.bit_length())]
    divisors = [n for n in range(2, length // 2 + 1) if length % n == 0]
    exact = [min(divisors, key=lambda d: abs(math.log(d / n))) for n in powers if divisors]
    candidates = {schedule.nested_lengths(length, 2)[1], *powers, *exact}
    return tuple((length // n, n) for n in sorted(candidates) if 1 < n <= length // 2)
