"""Stage the program to plan: a loss, or the loss within a training step."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex_core

from .. import _jax
from .._equations.compiled import Program
from .._equations.structure import Body
from .._errors import PlanError
from .._jax import Jaxpr
from .._lift.context import TraceContext, sharding_of
from .._lift.targets import resolve_argnums
from .._lift.wrapper import name_of
from .._remat.override import override
from .._remat.rewriter import Rewriter
from .._tree import is_array, is_float, partition
from ..transforms.abstract import staged_jaxpr
from ..transforms.remat import Remat
from ._parts import flatten
from ._record import fingerprint


class _Recorded(NamedTuple):
    """A recorded function.

    Attributes:
        num_out: number of outputs of the function itself; new values of states follow them.
        diff_indices: the inputs under differentiation.
        traced_floats: the float inputs that are traced, not constants.
        context: the transforms and shardings that it runs under.
    """

    jaxpr: Jaxpr
    num_out: int
    diff_indices: list[int]
    traced_floats: list[int]
    context: TraceContext


class _Recorder(Rewriter):
    """A policy that records the function it is used on, and leaves it unchanged."""

    def __init__(self) -> None:
        self.recorded: list[_Recorded] = []

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self) -> str:
        return "plan"

    def rewrite(self, body: Body, name: str, num_out: int) -> Callable:
        def run(operands: Sequence[Any], *args: Any) -> list[Any]:
            # Only the tracers of this call tell what is differentiated and mapped, so they are asked here and now.
            floats = [(i, x) for i, x in enumerate((*operands, *args)) if is_float(x)]
            diff_indices = [i for i, x in floats if _jax.is_differentiated(x)]
            traced_floats = [i for i, x in floats if isinstance(x, _jax.Tracer)]
            self.recorded.append(
                _Recorded(body.jaxpr, num_out, diff_indices, traced_floats, TraceContext.of([*operands, *args]))
            )
            return body(operands, *args)

        return run


@dataclasses.dataclass(frozen=True)
class Captured:
    """A program to plan.

    Attributes:
        diff_indices: the inputs to differentiate with respect to.
        num_out: number of differentiated outputs; they come first.
        context: the transforms and shardings that it runs under.
        step_with: for a training step, ``(loss, compiler_options) -> Program``, the step with this program as its loss.
    """

    jaxpr: Jaxpr
    diff_indices: list[int]
    num_out: int
    context: TraceContext
    step_with: Callable[[Jaxpr, dict[str, Any]], Program] | None = None

    @property
    def is_step(self) -> bool:
        return self.step_with is not None


def capture(fun: Callable, args: tuple, kwargs: dict[str, Any], argnums: int | Sequence[int] | None) -> Captured:
    """Trace a function once, and return the program to plan: its loss if it is a training step, else the function.

    Raises:
        PlanError: there is nothing to differentiate, or more than one function.
    """
    outer, inner = _Recorder(), _Recorder()
    nums = None if argnums is None else resolve_argnums(argnums, len(args), fun)[0]

    @functools.wraps(fun)
    def traced(*args: Any, **kwargs: Any) -> Any:
        with override.wrap_differentiated(lambda loss: Remat(loss, policy=inner)):
            return fun(*args, **kwargs)

    # One trace serves both cases: only during it does it show whether the function differentiates anything itself.
    planned = Remat(fun if nums is not None else traced, policy=outer)
    _stage(planned, args, kwargs)

    if inner.recorded:
        # One loss may be differentiated several times, such as for each microbatch.
        if len({tuple(fingerprint(flatten(f.jaxpr))) for f in inner.recorded}) > 1:
            raise PlanError(
                f"{name_of(fun)} differentiates more than one function. Fix: make a plan for each of them, and use it as "
                f"remat(loss, policy=plan)."
            )

        # The baseline of a step is the whole step, so candidates are compiled within it: its optimizer's memory counts too.
        loss = inner.recorded[0]
        step_with = functools.partial(_step_with, fun, args, kwargs)
        return Captured(loss.jaxpr, loss.diff_indices, loss.num_out, loss.context, step_with)

    # Inputs are the operands (values of states, all of them differentiated), then the arrays of the arguments.
    (function,) = outer.recorded
    # `argnums` counts arguments as the user wrote them, each of which may be a tree of any number of arrays.
    in_argnums = []
    for n, arg in enumerate((*args, *kwargs.values())):
        in_argnums += [nums is None or n in nums] * len(partition(arg, _is_traced)[0])
    num_operands = len(function.jaxpr.invars) - len(in_argnums)
    diff_indices = [i for i in function.traced_floats if i < num_operands or in_argnums[i - num_operands]]
    if not diff_indices or not any(is_float(v.aval) for v in function.jaxpr.outvars[: function.num_out]):
        raise PlanError(
            f"{name_of(fun)} has no float output, or no float argument or state, so there is nothing to differentiate; and it "
            f"does not call statetx.grad itself."
        )
    return Captured(function.jaxpr, diff_indices, function.num_out, function.context)


def _is_traced(x: Any) -> bool:
    """Whether `remat` traces an argument."""
    return is_array(x) or isinstance(x, jax.ShapeDtypeStruct)


def _stage(fun: Callable, args: tuple, kwargs: dict[str, Any]) -> tuple[Any, list[Any]]:
    """Stage a call. Returns its jaxpr and its inputs: values of states, then array arguments. Other arguments are closed over."""
    arrays, static = partition((args, kwargs), _is_traced)

    @functools.wraps(fun)
    def call(*arrays: Any) -> Any:
        call_args, call_kwargs = static.combine(arrays)
        return fun(*call_args, **call_kwargs)

    return staged_jaxpr(call, arrays)


class _Replace(Rewriter):
    """A policy that replaces the function by a given program."""

    def __init__(self, jaxpr: Jaxpr):
        self._planned = Body(jaxpr, [])

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def rewrite(self, body: Body, name: str, num_out: int) -> Callable:
        return lambda operands, *args: self._planned(operands, *args)


def _step_with(
    fun: Callable, args: tuple, kwargs: dict[str, Any], jaxpr: Jaxpr, compiler_options: dict[str, Any]
) -> Program:
    """The training step with this program as its loss."""
    replacement = _Replace(jaxpr)

    def step(*args: Any, **kwargs: Any) -> Any:
        with override.wrap_differentiated(lambda loss: Remat(loss, policy=replacement)):
            return fun(*args, **kwargs)

    # Staged for each candidate: the loss is differentiated inside, so its replacement has to be there when the step is traced.
    closed_jaxpr, inputs = _stage(step, args, kwargs)
    shardings = tuple(map(sharding_of, inputs))
    context = TraceContext(shardings=shardings if any(shardings) else ())
    return context.program(jex_core.jaxpr_as_fun(closed_jaxpr), closed_jaxpr.in_avals, compiler_options)
