"""Changes that are tried: the program of a step with some edits, compiled for the device.

Programs are compiled at full length. A GPT of 12 unrolled layers takes 20 s of processor time for a GPU, half of it in
XLA's fusion of kernels; versions with 2 and 3 of its equal layers, as the planner extrapolates them, take 12 s, and the
whole has to be compiled once more for the listed changes. Nor does the peak lie on a line: XLA itself recomputes values
where a program would not fit, so that 5 layers take 27.0 GB and 12 take 31.9; with rematerialization the line is 10%
off.
"""

from __future__ import annotations

import concurrent.futures
import copy
import dataclasses
import functools
import itertools
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax

from .. import _jax
from .._cached import cached_property
from .._equations.compiled import Cost, Program
from .._equations.compiler import COMPILER_ERRORS, full_device_options, is_out_of_memory, one_thread_options
from .._equations.dataflow import variables_of
from .._equations.inline import hoist
from .._equations.primitives import REMAT, count
from .._equations.structure import Body, table
from .._errors import StatetxError
from .._jax import Jaxpr, Literal, Var
from .._remat.override import rewritten_by
from .._remat.parse import as_value_policy
from .._remat.rewriter import Rewriter
from .._tree import is_float, num_bytes
from ..planner import _store
from ..planner._budget import TimeLeft
from ..planner._program.flat import Flat, Interval, Part, flatten
from ..planner._program.values import INPUT
from ..planner._treatments import UNPLANNED, AsWritten, as_planned, rewrite
from ..planner._treatments.treatment import Decision
from ..residuals._trace import TracedCall
from ..residuals.measure import ArrayProgram
from ..transforms.microbatch import microbatch
from ._advice_inputs import argument_of
from ._calls import code_of, returned_arguments
from ._edits import AsArguments, Donate, Edit, InOrder, InParts, ReleaseGradients, Untried
from ._numbered import numbered
from ._outline import Outline, UnresolvedError

_MOST_CHARACTERS = 120  # of an error, in a reason
_MOST_AT_ONCE = 4  # programs that are compiled side by side: XLA takes a GB or two for each


class NotTried(Exception):
    """A changed program cannot be compiled; the message says why."""


def _first_line(e: Exception) -> str:
    return f"{type(e).__name__}: {(str(e).splitlines() or [''])[0][:_MOST_CHARACTERS]}"


class Trials:
    """Compiles a step with some edits.

    Args:
        gradient: whether the gradient of the step is part of the program.
        time_left: no compilation begins that is expected to end later.
        share: of it, that the trials and the time before them may take.
        constant_bytes: of the unchanged program.
    """

    def __init__(
        self,
        call: TracedCall,
        *,
        gradient: bool,
        time_left: TimeLeft,
        share: float = 1.0,
        constant_bytes: int = 0,
    ):
        self._call, self._gradient, self._retraces = call, gradient, False
        self._outline_of = functools.cache(lambda *types: Outline(call, types, keeps_order=self._keeps_order))
        self._arrays = ArrayProgram(call, gradient, evaluate=self._evaluated)
        self._constant_bytes = constant_bytes
        self._time_left, self._share = time_left, share
        self._costs: dict[frozenset[Edit], Cost | NotTried] = {}
        self._captured: list[Any] = []  # the arrays that the step closes over, once they are arguments

    def compile_first(self, changes: Sequence[Sequence[Edit]]) -> None:
        """Compile programs side by side, even if the time is over. One is traced while others are compiled."""
        num = min(_MOST_AT_ONCE, os.cpu_count() or 1)
        with self._time_left.compiling(len(changes)), concurrent.futures.ThreadPoolExecutor(num) as pool:
            try:
                futures = {frozenset(x): pool.submit(self._trial(x)) for x in changes}
                self._costs |= {key: future.result() for key, future in futures.items()}
            except BaseException:  # an interrupt waits for running compilations alone
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def cost(self, *edits: Edit, is_first: bool = False) -> Cost | None:
        """Cost of the program with these edits; None if they cannot be tried, for the reason that `why_not` tells.

        Args:
            is_first: whether it is compiled even if the time is over.
        """
        key = frozenset(edits)
        if key not in self._costs:
            if not (is_first or self._time_left.has_time(self._share)):
                return None
            with self._time_left.compiling():
                self._costs[key] = self._trial(edits)()
        cost = self._costs[key]
        return None if isinstance(cost, NotTried) else cost

    def why_not(self, *edits: Edit) -> str:
        """Reason why the program with these edits was not compiled."""
        return str(self._costs.get(frozenset(edits), "the time was over"))

    @cached_property
    def flops(self) -> int:
        """The operations of the unchanged program."""
        if self._gradient:
            return self._program(()).flops
        return count(_jax.without_dead_code(self._call.body.jaxpr))

    def added_operations(self, cost: Cost) -> float:
        """The operations that a changed program has more, relative to the unchanged one."""
        return cost.flops / max(self.flops, 1) - 1

    def _trial(self, edits: Sequence[Edit]) -> Callable[[], Cost | NotTried]:
        """Trace the program with these edits, and return a function that compiles it, which any thread may call."""
        try:
            program = self._program(edits)
            read = _store.cost(program)
        # A loop, or a derivative rule of the user's, may not allow the change.
        except (NotTried, StatetxError, TypeError, ValueError, NotImplementedError) as e:
            why = NotTried(str(e) if isinstance(e, NotTried) else _first_line(e))  # without the frames of the trace
            return lambda: why

        def compiled() -> Cost | NotTried:
            try:
                cost = read()
            except COMPILER_ERRORS as e:
                return NotTried("the compiler runs out of memory" if is_out_of_memory(e) else _first_line(e))
            if AsArguments() not in edits:
                return cost
            spared = self._spared_constants(program) + bytes_on_device(self._captured)
            return dataclasses.replace(cost, argument_bytes=cost.argument_bytes - spared)

        return compiled

    def _spared_constants(self, program: Program) -> int:
        """Bytes of constants that a program with arrays as arguments does not have."""
        assigned = _jax.compiled_program(program.compiled)
        if assigned is None:
            return min(self._constant_bytes, sum(map(num_bytes, self._captured)))
        return self._constant_bytes - sum(a.num_bytes for a in assigned.allocations if a.is_constant)

    def _evaluated(self, arrays: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """The call, whose differentiated functions the rewriter of this block rewrites."""
        if self._retraces:
            return self._call.retraced(arrays)
        return self._outline(arrays)(arrays)

    def _outline(self, arrays: Sequence[Any]) -> Outline:
        return self._outline_of(*map(_jax.abstract, arrays))

    def _program(self, edits: Sequence[Edit]) -> Program:
        if not self._retraces:
            try:
                return self._changed(edits)
            except UnresolvedError:
                self._retraces = True
        with table.bypassed():
            return self._changed(edits)

    @property
    def _keeps_order(self) -> bool:
        return not self._arrays.states

    def _changed(self, edits: Sequence[Edit]) -> Program:
        if untried := next((e for e in edits if isinstance(e, Untried)), None):
            raise NotTried(untried.why)
        arrays = self._arrays
        rewriter: _Edited = _Edited(edits, keeps_order=self._keeps_order, numbers_calls=self._retraces)
        if in_parts := next((e for e in edits if isinstance(e, InParts)), None):
            rewriter = self._in_parts(rewriter, in_parts)
        donated_names = {name for e in edits if isinstance(e, Donate) for name in e.inputs}
        donated = {*arrays.donated, *(i for i, name in enumerate(arrays.names) if name in donated_names)}
        run, args = arrays.run, arrays.arrays
        if AsArguments() in edits:
            with rewritten_by(rewriter, suppress_warnings=True):
                jaxpr, constants = captured(run, args)
            self._captured = constants
            if not constants:
                raise NotTried("the step closes over no array")
            donated, args = {i + len(constants) for i in donated}, [*map(_jax.abstract, constants), *args]
            run = lambda *xs: _jax.evaluate(jaxpr, (), xs)
        with rewritten_by(rewriter, suppress_warnings=True):
            options = full_device_options() | one_thread_options()
            program = Program(run, args, options, sorted(donated), estimates=True)
        if InOrder() in edits:
            program = program.in_order() or program
        if ReleaseGradients() in edits:
            program = program.released() or program
        if not rewriter.is_complete:
            raise NotTried("its place was not found in the equations")
        return program

    def _in_parts(self, rewriter: _Edited, edit: InParts) -> _EditedInParts:
        """A rewriter with the gradients of one part, from a trace of the step with a batch of its size."""
        of_part = [
            jax.ShapeDtypeStruct((x.shape[0] // edit.num, *x.shape[1:]), x.dtype)
            if i.state is None and argument_of(i.origin.path) in edit.arguments and _leading_size(x) == edit.size
            else jax.typeof(x) if isinstance(x, jax.Array) else x
            for i, x in zip(self._arrays.inputs, self._arrays.arrays, strict=True)
        ]  # fmt: skip
        try:
            with rewritten_by(rewriter, suppress_warnings=True):
                self._rewrite(rewriter, of_part)
        except UnresolvedError:
            raise
        except Exception as e:  # the user's function may need its own size, and says so in any way
            raise NotTried(f"with a part of the batch the step raises {_first_line(e)}") from e
        if not rewriter.gradients:
            raise NotTried("nothing is differentiated")
        return _EditedInParts(rewriter, edit)

    def _rewrite(self, rewriter: Rewriter, of_part: Sequence[Any]) -> None:
        """Let a rewriter see the functions that the step differentiates with arrays of these types."""
        if self._gradient or self._retraces:
            jax.make_jaxpr(lambda *xs: self._arrays.run(*xs))(*of_part)
        else:
            by_input = dict(zip(map(id, self._arrays.inputs), of_part, strict=True))
            in_order = [by_input[id(i)] for i in self._call.inputs]
            self._outline(in_order).rewrite(rewriter)


def _leading_size(x: Any) -> int | None:
    """The length of the first axis on a device."""
    sharding = getattr(x, "sharding", None)
    return next(iter(x.shape if sharding is None else sharding.shard_shape(x.shape)), None)


def captured(run: Callable, arrays: Sequence[Any]) -> tuple[Jaxpr, list[Any]]:
    """A function of arrays as a jaxpr that takes the arrays which it closes over first, and these."""
    closed = jax.make_jaxpr(lambda *xs: run(*xs))(*arrays)
    return hoist(closed.jaxpr, closed.consts)


def bytes_on_device(arrays: Sequence[Any]) -> int:
    """Bytes of those that are on the device anyway, beside the copy in the program."""
    return num_bytes([x for x in arrays if isinstance(x, jax.Array)])


class _Edited(Rewriter):
    """Applies edits to the functions that are differentiated.

    Args:
        keeps_order: as in `Rewriter`. A function takes arguments in their order, and states, which it closes over, in
            the order of its reads.
        numbers_calls: whether it sees functions while the user's Python runs: their calls have no numbers yet.

    Attributes:
        gradients: the functions, in the order of the trace, and the edited ones, ``(operands, *args) -> outputs``;
            without those inside of others.
    """

    is_used_once = True
    keeps_policies = True

    @property
    def inner(self) -> Rewriter | None:
        """Editor of gradients inside of a gradient: the same calls are changed, and only the outer one is noted."""
        inner = copy.copy(self)
        inner.gradients = []
        return inner

    def __init__(self, edits: Sequence[Edit], *, keeps_order: bool = True, numbers_calls: bool = False):
        self._edits, self._numbers_calls = edits, numbers_calls
        self.keeps_order = keeps_order
        self._found: set[Edit] = {e for e in edits if not type(e).is_of_gradients}
        self.gradients: list[tuple[Body, Callable]] = []

    @property
    def is_complete(self) -> bool:
        """Whether each edit has found something to change."""
        return self._found.issuperset(self._edits)

    def rewrite(self, body: Body, name: str, num_out: int) -> Callable:
        edited = self._edited(body)
        self.gradients.append((body, edited))
        return edited

    def _edited(self, body: Body) -> Callable:
        unedited = numbered(body.jaxpr) if self._numbers_calls else body.jaxpr
        jaxpr = self._edited_jaxpr(unedited)
        return body if jaxpr is unedited else as_planned(Body(jaxpr, []))

    def _edited_inside(self, x: Any, *, is_step: bool) -> Any:
        """The step of a loop, or the body of a rematerialized function."""
        jaxpr, constants = _jax.open_jaxpr(x)
        edited = jaxpr if constants else self._edited_jaxpr(jaxpr, is_step=is_step)
        return x if edited is jaxpr else _jax.closed_like(x, edited)

    def _edited_jaxpr(self, jaxpr: Jaxpr, *, is_step: bool = False) -> Jaxpr:
        flat = flatten(jaxpr)

        def edited(eqn: Any) -> Any:
            edit = functools.partial(self._edited_inside, is_step=eqn.primitive.name not in REMAT)
            return _jax.map_jaxprs(edit, eqn) if _has_body(eqn) else eqn

        with_inner_edits = _jax.map_equations(edited, flat)
        program = Flat(with_inner_edits, opens_blocks=False)
        decided: dict[Interval, tuple[Edit, Decision]] = {}
        for edit in self._edits:
            decisions = edit.decisions(program)
            if decisions and not any(a < d and c < b for a, b in decisions for c, d in decided):
                self._found.add(edit)
                decided |= {span: (edit, decision) for span, decision in decisions.items()}
        if not decided:
            return jaxpr if with_inner_edits is flat else program.jaxpr
        bounds = sorted({0, len(program), *itertools.chain.from_iterable(decided)})
        changed = [
            _changed_part(program, span, *decided[span], is_step, self.keeps_order)
            if span in decided
            else (program.part(*span), UNPLANNED)
            for span in itertools.pairwise(bounds)
        ]
        return rewrite(program.jaxpr, [part for part, _ in changed], [decision for _, decision in changed])


def _has_body(eqn: Any) -> bool:
    return eqn.primitive.name in REMAT or eqn.primitive.name == "scan" or _jax.loop_of(eqn) is not None


def _changed_part(
    program: Flat, span: Interval, edit: Edit, decision: Decision, is_step: bool, keeps_order: bool
) -> tuple[Part, Decision]:
    """A part that is changed, and its decision."""
    if (block := program.blocks.get(span)) is not None:
        return block, decision
    part, policy = program.part(*span), None if edit.policy is None else as_value_policy(edit.policy)
    if part.eqn is not None:
        return part, decision if policy is None else Decision(None, (AsWritten(policy, fence=None),))
    called = _as_called(program, part, span, getattr(edit, "function", ""), keeps_order)
    numbers = {i: called.invars.index(part.invars[i]) for i in decision.inputs}
    inputs = frozenset(((INPUT, numbers[i]), way) for i, way in decision.inputs.items())
    return called, Decision(inputs, (AsWritten(policy, fence=None if is_step else "auto"),))


def _as_called(program: Flat, part: Part, span: Interval, function: str, keeps_order: bool) -> Part:
    """A part with the inputs of a call of the function, in its order: XLA's schedule depends on it. So do the outputs:
    an argument that the function returns is one, and has its cotangent from the backward pass of the call alone.

    Parameters come before computed values, as functions and methods mostly have them: in their own order, if they are
    arguments; in the order of the function's reads, if it closes over them.
    """
    number = {v: n for n, v in enumerate(program.jaxpr.invars)}
    for eqn in program.jaxpr.eqns[: span[0]]:  # a parameter of another dtype or form is one
        if (
            len(eqn.invars) == len(eqn.outvars) == 1
            and not isinstance(eqn.invars[0], Literal)
            and eqn.invars[0] in number
        ):
            number[eqn.outvars[0]] = number[eqn.invars[0]]
    code = code_of(part.jaxpr.eqns, function)
    are_arguments = keeps_order and not (code and code.co_freevars)
    variables = [v for v in part.invars if isinstance(v, Var)]
    invars = sorted(variables, key=lambda v: (v not in number, number.get(v, 0) if are_arguments else 0))
    later = {v for eqn in program.jaxpr.eqns[span[1] :] for v in variables_of(eqn)}
    # Rather computed values than parameters.
    returned = sorted((v for v in invars if v in later), key=lambda v: v in number)[: returned_arguments(code)]
    outvars = [*part.jaxpr.outvars, *returned]
    jaxpr = _jax.rebuild(part.jaxpr, invars=invars, outvars=outvars, eqns=part.jaxpr.eqns)
    return Part(jaxpr, invars, [*part.outvars, *returned])


class _EditedInParts(_Edited):
    """Step with each gradient in parts of the batch."""

    def __init__(self, of_part: _Edited, edit: InParts):
        super().__init__((), keeps_order=of_part.keeps_order)
        self._of_part, self._num, self._interleave = of_part, edit.num, edit.interleave
        self._next = 0
        self._is_split = False
        self.gradients = of_part.gradients

    @property
    def inner(self) -> None:  # gradients inside of a part are edited already
        return None

    @property
    def is_complete(self) -> bool:
        return self._is_split and self._of_part.is_complete

    def rewrite(self, body: Body, name: str, num_out: int) -> Callable:
        part, edited = self.gradients[self._next % len(self.gradients)]
        self._next += 1
        inputs = _splits(body.jaxpr.invars, part.jaxpr.invars, self._num)
        outputs = _splits(body.jaxpr.outvars, part.jaxpr.outvars, self._num)
        if inputs is None or outputs is None or not any(inputs):
            return edited if inputs and outputs and not any(outputs) else body
        self._is_split = True
        how = [
            "concat" if split else "mean" if is_float(v.aval) else "last"
            for v, split in zip(body.jaxpr.outvars, outputs, strict=True)
        ]

        def run(operands: Sequence[Any], *args: Any) -> list[Any]:
            num, values = len(operands), [*operands, *args]

            def of_part(*batch: Any) -> list[Any]:
                remaining = iter(batch)
                xs = [next(remaining) if split else x for x, split in zip(values, inputs, strict=True)]
                return list(edited(xs[:num], *xs[num:]))

            return microbatch(of_part, self._num, reduce=how, interleave=self._interleave)(
                *(x for x, split in zip(values, inputs, strict=True) if split)
            )

        return run


def _splits(batch: Sequence[Any], part: Sequence[Any], num: int) -> list[bool] | None:
    """Values that have examples along their first axis, by the types of the whole batch and of a part; None if others
    differ.
    """
    types = lambda some: [(v.aval.shape, v.aval.dtype) for v in some]
    pairs = list(itertools.zip_longest(types(batch), types(part)))
    splits = [a != b for a, b in pairs]
    is_split = lambda a, b: a and b and a[0][:1] == (b[0][0] * num,) and (a[0][1:], a[1]) == (b[0][1:], b[1])
    ok = all(b and b[0] and is_split(a, b) for (a, b), split in zip(pairs, splits, strict=True) if split)
    return splits if ok else None
