"""A program cut into parts, an option for each of them, and the program rewritten by these."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from .. import _jax
from .._equations.structure import Body
from .._jax import Jaxpr
from .._loops.step import Step
from .._remat import decide, fence, mark
from .._remat.atoms import Marks
from ._analysis import Option
from ._copies import with_copies
from ._fronts import Front
from ._parts import Flat, Part, run

UNPLANNED = Option(None, 0, 0, 0.0)
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
        outputs = itertools.accumulate([0, *(r.out_bytes for r in regions[:-1])])
        self.base = [o + r.cotangent_bytes for o, r in zip(outputs, regions, strict=True)]

    @property
    def jaxpr(self) -> Jaxpr:
        return self.program.jaxpr

    def peak(self, options: Sequence[Option]) -> int:
        """The most bytes in use during the backward pass of any part."""
        saved_bytes, peak = 0, 0
        for base, option in zip(self.base, options, strict=True):
            saved_bytes += option.saved_bytes
            peak = max(peak, base + saved_bytes + option.backward_bytes)
        return peak

    def peak_part(self, options: Sequence[Option]) -> tuple[int, int]:
        """Return the index of the part whose backward pass has the peak, and the bytes saved by the parts before it."""
        sums = np.cumsum([0, *(o.saved_bytes for o in options)])
        in_use = [b + s + o.saved_bytes + o.backward_bytes for b, s, o in zip(self.base, sums, options, strict=False)]
        part = int(np.argmax(in_use))
        return part, int(sums[part])

    def rewrite(self, options: Sequence[Option]) -> Jaxpr:
        """Apply an option to each part."""
        return rewrite(self.jaxpr, self.parts, options)


def rewrite(jaxpr: Jaxpr, parts: Sequence[Part], options: Sequence[Option]) -> Jaxpr:
    """Apply an option to each part of a program."""
    parts, options = with_copies(jaxpr, parts, options)
    # Equal parts with equal decisions share one function, so that JAX traces and differentiates it once.
    cache: dict[Any, Callable | None] = {}
    replacements = []
    for part, option in zip(parts, options, strict=True):
        key = (part.key, option.decision)
        if key not in cache:
            cache[key] = _loop(part, option) if part.eqn is not None else _region(part, option)
        replacements.append(cache[key])
    avals = [v.aval for v in jaxpr.invars]
    body = Body.close(
        *_jax.stage(
            lambda *args: run(jaxpr, parts, replacements, args), avals, traced_for="statetx.plan", name="planned"
        )
    )
    assert not body.operands, "rewriting a program without constants made some"
    return body.jaxpr


def marks_of(option: Option, *, is_ordered: bool = False) -> dict[tuple[int, ...], mark.Label]:
    """The saved values of an option, as labels for `decide.keep`.

    Args:
        is_ordered: whether what follows the forward pass waits until values are stored in fewer bits.
    """
    offload, formats = mark.offload("device", _jax.HOST_MEMORY), dict(option.stored)
    marks: dict[tuple[int, ...], mark.Label] = {}
    for a in sorted(option.saved or ()):
        marks[a] = mark.Stored(formats[a], mark.SAVE, is_ordered) if a in formats else mark.SAVE
        if a in option.offloaded:
            marks[a] = offload
    return marks


def _region(part: Part, option: Option) -> Callable | None:
    if option.saved is None:
        return None
    # A region that saves nothing is bound exactly as the user's remat would be, inner jits included: XLA's scheduling, and
    # with it the memory, depends on them.
    jaxpr = part.jaxpr if option.saved else part.original_jaxpr
    inputs = {i: mark.Stored(format, mark.SAVE, is_ordered=True) for i, format in option.inputs}
    jaxpr, policy = decide.keep(jaxpr, marks_of(option, is_ordered=True), inputs)
    return lambda *args: _jax.rematerialize(jaxpr, args, policy=fence.with_fence(policy, "auto"), prevent_cse=True)


def _loop(part: Part, option: Option) -> Callable:
    step = _step(part, option)
    num_constants, num_carry = _jax.scan_counts(part.eqn)
    if option.loop is None:
        call: Callable = step.plain()
    else:
        call = option.loop.build(step)

    def loop(*args: Any) -> list[Any]:
        constants, carry, xs = args[:num_constants], args[num_constants:][:num_carry], args[num_constants + num_carry :]
        carry, ys = call(list(constants), list(carry), list(xs))
        return [*carry, *ys]

    return loop


def _step(part: Part, option: Option) -> Step:
    num_constants, num_carry = _jax.scan_counts(part.eqn)
    marks = None if option.saved is None else Marks(tuple(marks_of(option).items()))
    params = part.eqn.params
    return Step(
        Body(part.jaxpr, []),
        num_constants,
        num_carry,
        length=params["length"],
        reverse=params["reverse"],
        policy=marks,
        name="plan",
    )
