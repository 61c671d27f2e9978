"""The least memory, and the least operations, of any schedule of a program with its gradient: `Plan.lower_bound`.

For each gradient they are optima of an integer program for one moment, the turn (`_turn`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from .._lift.context import device_bytes
from .._targets import current
from .._text import format_bytes
from ._capture import Recorded, Step
from ._dataflow import Dataflow
from ._stored import Formats
from ._turn import Problem, turn_of

_ROUNDING = 1e-9  # relative: the least operations are lowered by it


class LowerBound:
    """Bytes and operations that no schedule of a program with its gradient can undercut: `Plan.lower_bound`.

    Each bound is the optimum of an integer program over all equations, without regions (HiGHS). Its memory is the bytes that must be held
    at the turn from the forward to the backward pass. It errs low: a schedule that reaches it need not exist, since the bytes in use
    before and after the turn are not counted.

    It holds for every order in which the equations of the program and of its derivative may run, and run again, where:

    - The program is the one that JAX differentiates. Each of its values is held whole or not at all, not in parts. It counts in the
      smallest format that the plan may use (``stored_as``). A value in host memory (``offload=True``) counts as held.
    - Operations count as in `Plan.extra_flops`. Elementwise operations, moves of data and random bits are free to repeat: XLA computes
      them within the kernels that read them, where they have no memory and their repetition is not counted.
    - A product, convolution or reduction writes its result to memory, or elementwise functions of it: one kernel does not compute two
      of them that depend on each other, and XLA repeats none by itself (its own rematerialization, on accelerators without enough memory,
      does). A kernel that the program calls, such as one for attention, is free to repeat.
    - Arguments and outputs have memory of their own. XLA holds values in that of outputs until these are computed, so values that fit
      into the largest output are not counted, up to the bytes of all outputs but those in place of donated arguments.
    - A loop runs as a whole the first time; after that each step may be treated in another way. Its steps are described by averages,
      which errs low.
    - Of a training step the gradients count, each with the memory at its own turn. The rest of the step counts as no bytes. Under a ``vmap``
      around a gradient one example counts, on automatic mesh axes the share of a device if all devices share the value.

    Attributes:
        status: "exact" if each bound so far is the optimum of its integer program; "relaxed" if one is only a bound of that, since the
            program has loops or HiGHS met its limit, which errs low. It is zero bytes for a gradient that JAX cannot trace again, and on TPUs,
            which hold values in memory that does not count as temporary.

    Example:
        >>> import jax.numpy as jnp, statetx
        >>> def loss(ws, x):
        ...     for w in ws:
        ...         x = jnp.sin(x @ w)
        ...     return (x**2).mean()
        >>> args = [jnp.ones((64, 64)) / 64] * 4, jnp.ones((512, 64))
        >>> bound = statetx.plan(loss, *args, budget=0.9, of="temporaries", argnums=0).lower_bound
        >>> bound.bytes_at(0.0) // 1024  # the results of four products, 128 KiB each
        512
        >>> bound.bytes_at(0.1) // 1024  # one of the eleven products of the gradient runs again
        384
        >>> round(bound.operations_at(384 * 1024), 2)
        0.09
    """

    def __init__(self, gradients: Sequence[_GradientBound]):
        self._gradients = list(gradients)

    @property
    def status(self) -> str:
        return "exact" if all(g.record.is_exact for g in self._gradients) else "relaxed"

    def bytes_at(self, extra_operations: float) -> int:
        """The least temporary bytes at that many added operations, relative to the baseline as `Plan.extra_flops` is."""
        return max((g.bytes_at(extra_operations) for g in self._gradients), default=0)

    def operations_at(self, num_bytes: float) -> float:
        """The least added operations, relative to the baseline as `Plan.extra_flops` is, at that many temporary bytes."""
        return sum(g.operations_at(num_bytes) for g in self._gradients)

    def curve(self, num: int = 24) -> list[tuple[int, float]]:
        """Points (least bytes, added operations), from the fewest bytes to no operations, by the linear relaxation: at most `bytes_at`."""
        for gradient in self._gradients:
            gradient.relax()
        most = max((g.record.most_operations() for g in self._gradients), default=0.0)
        points = most * np.linspace(1.0, 0.0, num) ** 2  # closer where few operations spare many bytes
        return [(max((g.record.relaxed_bytes_at(x) for g in self._gradients), default=0), float(x)) for x in points]

    def to_json(self) -> list[Any]:
        """The bounds found so far and those of the linear relaxation, as JSON values."""
        self.curve()
        return self.records()

    def records(self) -> list[Any]:
        """The bounds found so far, as JSON values."""
        return [gradient.record.to_json() for gradient in self._gradients]

    @classmethod
    def from_json(cls, fields: Sequence[Any]) -> LowerBound:
        """The bound as it was stored: at other bytes and operations than were asked before, that of the linear relaxation."""
        return cls([_GradientBound(lambda: None, _Record.from_json(record)) for record in fields])

    def __repr__(self) -> str:
        return f"LowerBound({format_bytes(self.bytes_at(0.0))} without added operations, {self.status})"


def lower_bound(
    gradients: Sequence[Recorded],
    output_bytes: Sequence[int] | None,
    baseline_operations: float,
    records: Sequence[Any] | None = None,
    formats: Formats = (),
    shardings: Sequence[jax.sharding.NamedSharding | None] = (),
) -> LowerBound:
    """The bound of a program.

    Args:
        gradients: the functions that it differentiates.
        output_bytes: sizes of its outputs that have memory of their own; None for those of the only gradient.
        baseline_operations: those of the program without rematerialization, with its gradients and the rest of the step.
        records: `LowerBound.records` of an earlier one. What it was asked is not computed again.
        formats: in which values may be held.
        shardings: of the inputs of the step that takes the gradients.
    """
    # What XLA:TPU holds in the vector memory of a core is not among its temporaries, so nothing need be.
    is_known = current.platform() != "tpu"
    find = lambda g: _problem(g, output_bytes, baseline_operations, formats, shardings) if is_known else None  # noqa: E731
    find = current.bind(find)  # which traces the gradient when it is asked
    found = [_Record(is_exact=is_known) for _ in gradients] if records is None else map(_Record.from_json, records)
    bounds = [_GradientBound(functools.partial(find, g), record) for g, record in zip(gradients, found, strict=True)]
    return LowerBound(bounds)


def _problem(
    gradient: Recorded,
    output_bytes: Sequence[int] | None,
    baseline_operations: float,
    formats: Formats,
    shardings: Sequence[jax.sharding.NamedSharding | None],
) -> Problem | None:
    """The integer program of a gradient; None if nothing bounds it."""
    context = gradient.context
    with context.bind_axes():
        flow = Dataflow(gradient.jaxpr, gradient.diff_indices, gradient.num_out, formats)
    turn = turn_of(flow)
    if turn is None:
        return None
    num_devices = context.num_sharing(shardings)
    sizes = flow.output_bytes if output_bytes is None else output_bytes
    return Problem(turn, max(baseline_operations, 1.0), sizes, num_devices)


def free_outputs(step: Step) -> list[int]:
    """Sizes of the outputs of a step that have memory of their own: not that of a donated argument."""
    jaxpr = step.outline.jaxpr
    type_of = lambda v: (v.aval.shape, v.aval.dtype)  # noqa: E731
    donated = [type_of(jaxpr.invars[i]) for i in step.donated]
    sizes = []
    for v in jaxpr.outvars:
        if type_of(v) in donated:
            donated.remove(type_of(v))
        else:
            sizes.append(device_bytes(v.aval))
    return sizes


class _Record:
    """Bounds found so far. Operations are relative to the baseline.

    Attributes:
        lines: pairs (b, s): with x added operations no schedule takes less than ``b - s * x`` bytes.
        points: pairs (x, b): with x added operations or fewer no schedule takes less than b bytes.
        is_exact: see `LowerBound.status`.
        asked: the questions that were answered, as pairs: ("bytes", added operations) and ("operations", bytes).
    """

    def __init__(self, lines: Any = (), points: Any = (), is_exact: bool = True, asked: Any = ()):
        self.lines = {(float(b), float(s)) for b, s in lines}
        self.points = {(float(x), float(b)) for x, b in points}
        self.is_exact = is_exact
        self.asked = {(str(of), float(at)) for of, at in asked}

    def bytes_at(self, extra_operations: float) -> int:
        x = max(extra_operations, 0.0)
        return max(self.relaxed_bytes_at(x), *(math.floor(b) for p, b in self.points if p >= x), 0)

    def relaxed_bytes_at(self, extra_operations: float) -> int:
        return math.floor(max([0.0, *(b - s * extra_operations for b, s in self.lines)]))

    def operations_at(self, num_bytes: float) -> float:
        by_lines = [(b - num_bytes) / s for b, s in self.lines if s > 0]
        return max([0.0, *by_lines, *(x for x, b in self.points if b > num_bytes)])

    def most_operations(self) -> float:
        """The added operations from which on no bytes need be held, by the lines."""
        return max((b / s for b, s in self.lines if s > 0), default=0.0)

    def to_json(self) -> dict[str, Any]:
        known = {"lines": sorted(self.lines), "points": sorted(self.points), "asked": sorted(self.asked)}
        return known | {"exact": self.is_exact}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> _Record:
        return cls(fields["lines"], fields["points"], fields["exact"], fields.get("asked", ()))


class _GradientBound:
    """The bound of one gradient.

    Args:
        find: makes its integer program; None if that is not known.
        record: what was found before.
    """

    def __init__(self, find: Callable[[], Problem | None], record: _Record):
        self._find = find
        self.record = record

    @functools.cached_property
    def _problem(self) -> Problem | None:
        try:
            return self._find()
        except Exception:
            # A rule that cannot be differentiated again: those of equinox's loops keep what a first trace found.
            self.record.is_exact = False
            return None

    def bytes_at(self, extra_operations: float) -> int:
        x = max(extra_operations, 0.0)
        if ("bytes", x) not in self.record.asked and self._problem is not None:
            least, is_optimal = self._problem.least_bytes(x)
            self.record.points.add((x, least))
            self._note(is_optimal, x)
            self.record.asked.add(("bytes", x))
        return self.record.bytes_at(x)

    def operations_at(self, num_bytes: float) -> float:
        if ("operations", float(num_bytes)) not in self.record.asked and self._problem is not None:
            least, is_optimal = self._problem.least_operations(num_bytes)
            if least > 0:  # fewer operations need more bytes; fewer by more than rounding
                self.record.points.add(((1 - _ROUNDING) * least, float(np.nextafter(num_bytes, np.inf))))
            self._note(is_optimal, least)
            self.record.asked.add(("operations", float(num_bytes)))
        return self.record.operations_at(num_bytes)

    def _note(self, is_optimal: bool, extra_operations: float) -> None:
        assert self._problem is not None
        self.record.is_exact &= is_optimal and not self._problem.has_loops
        if not is_optimal:  # the dual bound of HiGHS may be below the relaxation, or missing
            self.record.lines |= self._problem.lines([extra_operations])

    def relax(self, num: int = 16) -> None:
        """Add lines from no added operations to those that let nothing be held."""
        if self._problem is not None:
            self.record.lines |= self._problem.lines(self._problem.most_operations * np.linspace(0.0, 1.0, num) ** 2)
