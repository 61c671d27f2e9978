"""A program cut into parts, an option for each of them, and the program rewritten by these."""

from __future__ import annotations

import enum
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax

from .. import _jax
from .._equations.structure import Body
from .._jax import Jaxpr
from .._lift.context import device_bytes
from .._loops.step import Step
from .._loops.strategy import Strategy
from .._remat.atoms import Marks
from .._remat.override import override
from .._remat.policy import Policy
from .._remat.stored import StoredType
from .._tree import is_float
from ._copies import with_copies
from ._fronts import Front
from ._option import Decision, Option
from ._parts import Flat, Part, run
from ._regions import marks_of, region

UNPLANNED = Decision()
"""The decision to leave a part unchanged, without its bytes."""


class Region(NamedTuple):
    """An interval of equations that may be a part.

    Attributes:
        out_bytes: its outputs that later equations read.
        cotangent_bytes: live during its backward pass besides those of its outputs: the cotangents of values that it or equations
            before it read, and equations after it too.
    """

    start: int
    end: int
    part: Part
    front: Front
    out_bytes: int
    cotangent_bytes: int = 0


class Waits(enum.Enum):
    """What a gradient waits for before it begins."""

    FOR_NOTHING = "nothing"
    FOR_INPUTS = "inputs"  # until all that it reads is computed
    FOR_GRADIENTS = "gradients"  # until the gradient before it is computed, too


class Layout:
    """One way to cut a program.

    Attributes:
        cuts: the first equation of each part.
        parts, fronts: the parts, and the options of each.
        base: for each part, the bytes live during its backward pass under any choice: the values that parts before it computed
            for parts after them, and `Region.cotangent_bytes`. A value that only later parts read is live as its cotangent.
    """

    def __init__(self, program: Flat, regions: Sequence[Region]):
        self.program = program
        self.regions = list(regions)
        self.cuts = tuple(r.start for r in regions)
        self.parts = [r.part for r in regions]
        self.fronts = [r.front for r in regions]
        outputs = itertools.accumulate([0, *(r.out_bytes for r in regions[:-1])] if regions else [])
        self.base = [o + r.cotangent_bytes for o, r in zip(outputs, regions, strict=True)]

    @property
    def jaxpr(self) -> Jaxpr:
        return self.program.jaxpr

    def in_use(self, options: Sequence[Option]) -> list[int]:
        """The bytes in use during the backward pass of each part."""
        saved = itertools.accumulate(option.saved_bytes for option in options)
        return [b + s + o.backward_bytes for b, s, o in zip(self.base, saved, options, strict=True)]

    def peak(self, options: Sequence[Option]) -> int:
        """The most bytes in use during the backward pass of any part."""
        return max(self.in_use(options), default=0)

    def peak_part(self, options: Sequence[Option]) -> tuple[int, int]:
        """Return the index of the part whose backward pass has the peak, and the bytes saved by the parts before it."""
        in_use = self.in_use(options)
        part = in_use.index(max(in_use))
        return part, sum(option.saved_bytes for option in options[:part])

    def rewrite(self, options: Sequence[Option], waits: Waits = Waits.FOR_NOTHING) -> Jaxpr:
        """Apply an option to each part."""
        last_input = None if waits is Waits.FOR_NOTHING else self.first_read()
        is_sequential = waits is Waits.FOR_GRADIENTS
        decisions = [option.decision for option in options]
        return rewrite(self.jaxpr, self.parts, decisions, last_input=last_input, is_sequential=is_sequential)

    def first_read(self) -> int | None:
        """The smallest input, by number, of the first part with a backward pass; None if it has none."""
        first = next((r.part for r in self.regions if not r.front.is_free), None)
        reads = [] if first is None else first.invars
        numbers = [i for i, v in enumerate(self.jaxpr.invars) if v in reads and is_float(v.aval)]
        return min(numbers, key=lambda i: device_bytes(self.jaxpr.invars[i].aval), default=None)


def rewrite(
    jaxpr: Jaxpr,
    parts: Sequence[Part],
    decisions: Sequence[Decision],
    *,
    last_input: int | None = None,
    is_sequential: bool = False,
) -> Jaxpr:
    """Apply a decision to each part of a program.

    Args:
        last_input: the number of an input that waits for all others; None for no such order.
        is_sequential: whether this input also waits for the gradient before.
    """
    parts, decisions = with_copies(jaxpr, parts, decisions)
    # Equal parts with equal decisions share one function, so that JAX traces and differentiates it once.
    cache: dict[Any, Callable | None] = {}
    replacements = []
    for part, decision in zip(parts, decisions, strict=True):
        key = (part.key, decision)
        if key not in cache:
            cache[key] = _loop(part, decision) if part.eqn is not None else region(part, decision)
        replacements.append(cache[key])

    def planned(*args: Any) -> list[Any]:
        if last_input is not None:
            args = tuple(
                _jax.hold(x, args, is_sequential=is_sequential) if i == last_input else x for i, x in enumerate(args)
            )
        # `flatten` leaves out conversions of weak types within the program.
        outs = run(jaxpr, parts, replacements, [_typed(x, is_weak=False) for x in args])
        return [_typed(x, is_weak=_is_weak(v.aval)) for x, v in zip(outs, jaxpr.outvars, strict=True)]

    avals = [v.aval for v in jaxpr.invars]
    body = Body.close(*_jax.stage(planned, avals, traced_for="statetx.plan", name="planned"))
    assert not body.operands, "rewriting a program without constants made some"
    return body.jaxpr


def _is_weak(aval: Any) -> bool:
    return getattr(aval, "weak_type", False)


def _typed(x: Any, *, is_weak: bool) -> Any:
    return x if _is_weak(jax.typeof(x)) == is_weak else _jax.with_weak_type(x, is_weak)


def as_planned(planned: Body) -> Callable:
    """``(operands, *args) -> outputs`` of a rewritten function, which waits for the gradient before if `rewrite` was told so."""
    held = [e.invars[0] for e in planned.jaxpr.eqns if e.primitive is _jax.hold_primitive and e.params["is_sequential"]]
    last_inputs = [i for i, v in enumerate(planned.jaxpr.invars) if v in held]

    def run(operands: Sequence[Any], *args: Any) -> list[Any]:
        if not last_inputs or override.gradient_order is None:
            return planned(operands, *args)
        return override.gradient_order.run(functools.partial(planned, ()), last_inputs[0], [*operands, *args])

    return run


def _loop(part: Part, decision: Decision) -> Callable:
    marks = None if decision.saved is None else Marks(tuple(marks_of(decision).items()))
    return loop_of(part, decision.loop, marks, "auto" if decision.fenced else None, dict(decision.carries))


def loop_of(
    part: Part,
    strategy: Strategy | None,
    policy: Policy | None,
    fence: str | None = None,
    carries: Mapping[int, StoredType] = MappingProxyType({}),
) -> Callable:
    """A part that is a loop, with another strategy; None for none.

    Args:
        policy: of the loop's steps.
        fence: as for `Step`.
        carries: the leaves of the carry that are stored in fewer bits, by number, with their formats.
    """
    num_constants, num_carry = _jax.scan_counts(part.eqn)
    formats = [carries.get(n) for n in range(num_carry)]
    step = Step(
        Body(part.jaxpr, []),
        num_constants,
        num_carry,
        length=part.eqn.params["length"],
        reverse=part.eqn.params["reverse"],
        policy=policy,
        name="plan",
        carry_formats=formats,
        exact_first=[n for n, is_exact in part.bit_carries.items() if is_exact],
        fence=fence,
    )
    call = step.plain() if strategy is None else strategy.build(step)

    def loop(*args: Any) -> list[Any]:
        constants, carry, xs = args[:num_constants], args[num_constants:][:num_carry], args[num_constants + num_carry :]
        carry, ys = call(list(constants), list(carry), list(xs))
        return [*carry, *ys]

    return loop
