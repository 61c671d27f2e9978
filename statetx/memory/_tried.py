"""Changes that are tried: the program of a step with some edits, compiled for the device."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from .. import _jax
from .._equations.compiled import Cost, Program, is_out_of_memory
from .._equations.primitives import REMAT
from .._equations.structure import Body
from .._jax import Jaxpr, Literal
from .._remat.gradients import rewritten_by
from .._remat.rewriter import Rewriter
from .._tree import is_float
from ..planner._program.flat import Flat, Part, flatten
from ..planner._treatments.rewrite import UNPLANNED, as_planned, rewrite
from ..planner._treatments.treatment import Decision, Interval
from ..residuals.measure import ArrayProgram, with_gradient, without_gradient
from ..transforms.microbatch import microbatch
from ._advice import argument_of
from ._edits import Donate, Edit, InParts
from ._scopes import numbered_calls
from .measure import input_names


class Trials:
    """Compiles a step with some edits.

    Args:
        gradient: whether the gradient of the step is part of the program.
        time_limit: seconds; no compilation begins that is expected to end later.
    """

    def __init__(
        self,
        step: Callable,
        args: tuple,
        kwargs: dict[str, Any],
        *,
        gradient: bool,
        options: dict[str, Any],
        time_limit: float,
    ):
        self._step, self._args, self._kwargs = step, args, kwargs
        self._program_of = with_gradient if gradient else without_gradient
        self._options = options
        self._end = time.monotonic() + time_limit
        self._longest = 0.0
        self._costs: dict[frozenset[Edit], Cost | None] = {}

    @property
    def seconds_left(self) -> float:
        return max(0.0, self._end - time.monotonic())

    @property
    def is_late(self) -> bool:
        """Whether another compilation would probably end after the time limit."""
        return self._longest > self.seconds_left or not self.seconds_left

    def cost(self, *edits: Edit) -> Cost | None:
        """What the program with these edits takes; None if an edit finds nothing to change, or the compiler runs out of memory, or time is short."""
        key = frozenset(edits)
        if key not in self._costs:
            if self.is_late:
                return None
            begin = time.monotonic()
            self._costs[key] = self._compiled(edits)
            self._longest = max(self._longest, time.monotonic() - begin)
        return self._costs[key]

    @functools.cached_property
    def flops(self) -> int:
        """The operations of the unchanged program."""
        with numbered_calls():
            return self._program(()).flops

    def added_operations(self, cost: Cost) -> float:
        """The operations that a changed program has more, relative to the unchanged one."""
        return cost.flops / max(self.flops, 1) - 1

    def _compiled(self, edits: Sequence[Edit]) -> Cost | None:
        try:
            with numbered_calls():
                program = self._program(edits)
        except Exception:  # the changed program may ask of a loop or of a rule of the user's what it does not allow
            return None
        try:
            return None if program is None else program.cost
        except jax.errors.JaxRuntimeError as e:
            if not is_out_of_memory(e):
                raise
            return None

    def _program(self, edits: Sequence[Edit]) -> Any:
        arrays = self._program_of(self._step, self._args, self._kwargs)
        names, states = input_names(self._step, self._args, arrays)
        rewriter: _Edited = _Edited(edits, keeps_order=not states)
        if in_parts := next((e for e in edits if isinstance(e, InParts)), None):
            rewriter = self._in_parts(arrays, rewriter, in_parts)
            if not rewriter.gradients:
                return None
        given = {name for e in edits if isinstance(e, Donate) for name in e.inputs}
        donated = {*arrays.donated(arrays.arrays), *(i for i, name in enumerate(names) if name in given)}
        with rewritten_by(rewriter):
            program = Program(arrays.run, arrays.arrays, self._options, sorted(donated), estimates=True)
        return program if rewriter.is_complete else None

    def _in_parts(self, arrays: ArrayProgram, rewriter: _Edited, edit: InParts) -> _EditedInParts:
        """A rewriter with the gradients of one part, for which the step is traced with a batch of its size."""
        names, states = input_names(self._step, self._args, arrays)
        of_part = [
            jax.ShapeDtypeStruct((edit.size // edit.num, *x.shape[1:]), x.dtype)
            if name not in states and argument_of(name) in edit.arguments and x.shape[:1] == (edit.size,)
            else jax.typeof(x) if isinstance(x, jax.Array) else x
            for x, name in zip(arrays.arrays, names, strict=True)
        ]  # fmt: skip
        try:
            with rewritten_by(rewriter):
                jax.make_jaxpr(lambda *xs: arrays.run(*xs))(*of_part)
        except Exception:  # the user's function may need its own size, and says so in any way
            rewriter.gradients.clear()
        return _EditedInParts(rewriter, edit)


class _Gradient(NamedTuple):
    """A function that is differentiated, and the edited one: ``(operands, *args) -> outputs``."""

    body: Body
    edited: Callable


class _Edited(Rewriter):
    """Applies edits to the functions that are differentiated.

    Args:
        keeps_order: as in `Rewriter`. A function takes arguments in their order, and states, which it closes over, in that in which it reads them.

    Attributes:
        gradients: the functions, in the order of the trace.
    """

    is_used_once = True
    keeps_policies = True

    @property
    def inner(self) -> Rewriter:  # gradients inside of a gradient: of both, the same calls are changed
        return self

    def __init__(self, edits: Sequence[Edit], *, keeps_order: bool = True):
        self._edits = edits
        self.keeps_order = keeps_order
        self._found: set[Edit] = {e for e in edits if isinstance(e, (Donate, InParts))}
        self.gradients: list[_Gradient] = []

    @property
    def is_complete(self) -> bool:
        """Whether each edit has found something to change."""
        return self._found.issuperset(self._edits)

    def rewrite(self, body: Body, name: str, num_out: int) -> Callable:
        edited = self._edited(body)
        self.gradients.append(_Gradient(body, edited))
        return edited

    def _edited(self, body: Body) -> Callable:
        jaxpr = self._edited_jaxpr(body.jaxpr)
        return body if jaxpr is body.jaxpr else as_planned(Body(jaxpr, []))

    def _edited_inside(self, x: Any) -> Any:
        """The body of a loop, or of a rematerialized function."""
        jaxpr, constants = _jax.open_jaxpr(x)
        edited = jaxpr if constants else self._edited_jaxpr(jaxpr)
        return x if edited is jaxpr else _jax.closed_like(x, edited)

    def _edited_jaxpr(self, jaxpr: Jaxpr) -> Jaxpr:
        flat = flatten(jaxpr)
        eqns = [_jax.map_jaxprs(self._edited_inside, e) if _has_body(e) else e for e in flat.eqns]
        is_same = all(a is b for a, b in zip(eqns, flat.eqns, strict=True))
        program = Flat(flat if is_same else _jax.with_equations(flat, eqns), opens_blocks=False)
        decided: dict[Interval, Decision] = {}
        for edit in self._edits:
            own = edit.decisions(program)
            if own and not any(a < d and c < b for a, b in own for c, d in decided):
                self._found.add(edit)
                decided |= own
        if not decided:
            return jaxpr if is_same else program.jaxpr
        bounds = sorted({0, len(program), *itertools.chain.from_iterable(decided)})
        spans = list(itertools.pairwise(bounds))
        parts = [(span in decided and program.blocks.get(span)) or _as_called(program, span) for span in spans]
        return rewrite(program.jaxpr, parts, [decided.get(span, UNPLANNED) for span in spans])


def _has_body(eqn: Any) -> bool:
    return eqn.primitive.name in REMAT or eqn.primitive.name == "scan" or _jax.loop_of(eqn) is not None


def _as_called(program: Flat, span: Interval) -> Part:
    """A part that takes parameters before what is computed, as functions and methods mostly do: XLA orders by it what it runs."""
    part = program.part(*span)
    if part.eqn is not None:
        return part
    number = {v: n for n, v in enumerate(program.jaxpr.invars)}
    for eqn in program.jaxpr.eqns[: span[0]]:  # a parameter of another dtype or form is one
        if (
            len(eqn.invars) == len(eqn.outvars) == 1
            and not isinstance(eqn.invars[0], Literal)
            and eqn.invars[0] in number
        ):
            number[eqn.outvars[0]] = number[eqn.invars[0]]
    invars = sorted(part.invars, key=lambda v: number.get(v, len(number)))
    jaxpr = _jax.rebuild(part.jaxpr, invars=invars, outvars=part.jaxpr.outvars, eqns=part.jaxpr.eqns)
    return Part("region", jaxpr, invars, part.outvars)


class _EditedInParts(_Edited):
    """The same, with each gradient in parts of the batch."""

    def __init__(self, of_part: _Edited, edit: InParts):
        super().__init__((), keeps_order=of_part.keeps_order)
        self._of_part, self._num = of_part, edit.num
        self._next = 0
        self._is_split = False
        self.gradients = of_part.gradients

    @property
    def is_complete(self) -> bool:
        return self._is_split and self._of_part.is_complete

    def rewrite(self, body: Body, name: str, num_out: int) -> Callable:
        part, self._next = self.gradients[self._next % len(self.gradients)], self._next + 1
        inputs = _splits(body.jaxpr.invars, part.body.jaxpr.invars, self._num)
        outputs = _splits(body.jaxpr.outvars, part.body.jaxpr.outvars, self._num)
        if inputs is None or outputs is None or not any(inputs):
            return part.edited if inputs and outputs and not any(outputs) else body
        self._is_split = True
        how = [
            "concat" if split else "mean" if is_float(v.aval) else "last"
            for v, split in zip(body.jaxpr.outvars, outputs, strict=True)
        ]

        def run(operands: Sequence[Any], *args: Any) -> list[Any]:
            num, values = len(operands), [*operands, *args]

            def of_part(*batch: Any) -> list[Any]:
                rest = iter(batch)
                xs = [next(rest) if split else x for x, split in zip(values, inputs, strict=True)]
                return list(part.edited(xs[:num], *xs[num:]))

            return microbatch(of_part, self._num, reduce=how)(
                *(x for x, split in zip(values, inputs, strict=True) if split)
            )

        return run


def _splits(whole: Sequence[Any], part: Sequence[Any], num: int) -> list[bool] | None:
    """Which values have examples along their first axis, by the types of the whole batch and of a part; None if others differ."""
    types = lambda some: [(v.aval.shape, v.aval.dtype) for v in some]  # noqa: E731
    pairs = list(itertools.zip_longest(types(whole), types(part)))
    splits = [a != b for a, b in pairs]
    is_split = lambda a, b: a and b and a[0][:1] == (b[0][0] * num,) and (a[0][1:], a[1]) == (b[0][1:], b[1])  # noqa: E731
    ok = all(b and b[0] and is_split(a, b) for (a, b), split in zip(pairs, splits, strict=True) if split)
    return splits if ok else None
