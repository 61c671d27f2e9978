"""The program that is planned: that of a loss, or of the loss within a training step."""

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
from .._lift.around import Around, sharding_of
from .._lift.stage import name_of
from .._lift.targets import resolve_argnums
from .._remat import decide
from .._remat.policy import Rewriting
from .._tree import is_array, is_float, partition
from ..transforms.abstract import staged_jaxpr
from ..transforms.remat import Remat
from ._parts import flatten
from ._record import fingerprint


class _Found(NamedTuple):
    """A function that was captured.

    Attributes:
        num_out: how many outputs are its own.
        moving: the inputs that are being differentiated.
        variable: the float inputs that are no constants.
        around: what it runs under.
    """

    jaxpr: Jaxpr
    num_out: int
    moving: list[int]
    variable: list[int]
    around: Around


class _Capture(Rewriting):
    """Takes down the program of the function that it is used on, and lets it be."""

    def __init__(self) -> None:
        self.found: list[_Found] = []

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self) -> str:
        return "plan"

    def rewrite(self, body: Body, name: str, num_out: int) -> Callable:
        def run(operands: Sequence[Any], *args: Any) -> list[Any]:
            floats = [(i, x) for i, x in enumerate((*operands, *args)) if is_float(x)]
            moving = [i for i, x in floats if _jax.is_differentiated(x)]
            variable = [i for i, x in floats if isinstance(x, _jax.Tracer)]
            self.found.append(_Found(body.jaxpr, num_out, moving, variable, Around.of([*operands, *args])))
            return body(operands, *args)

        return run


@dataclasses.dataclass(frozen=True)
class Captured:
    """A program to be planned.

    Attributes:
        chosen: the inputs with respect to which it is differentiated.
        num_out: how many of its outputs are: the first.
        around: what it runs under.
        step_with: of a loss within a training step, the step with a program in the loss's place, for compiler options.
    """

    jaxpr: Jaxpr
    chosen: list[int]
    num_out: int
    around: Around
    step_with: Callable[[Jaxpr, dict[str, Any]], Program] | None = None

    @property
    def is_step(self) -> bool:
        return self.step_with is not None


def capture(fun: Callable, args: tuple, kwargs: dict[str, Any], argnums: int | Sequence[int] | None) -> Captured:
    """Trace a function once, and find what of it is to be planned.

    Raises:
        PlanError: there is nothing to differentiate, or more than one function.
    """
    whole, inner = _Capture(), _Capture()
    nums = None if argnums is None else resolve_argnums(argnums, len(args), fun)[0]

    @functools.wraps(fun)
    def traced(*args: Any, **kwargs: Any) -> Any:
        with decide.override.differentiated(lambda loss: Remat(loss, policy=inner)):
            return fun(*args, **kwargs)

    # Whether it differentiates anything itself is seen while it is traced, and it is traced once.
    planned = Remat(fun if nums is not None else traced, policy=whole)
    _jaxpr_of(planned, args, kwargs)
    if inner.found:
        if len({tuple(fingerprint(flatten(f.jaxpr))) for f in inner.found}) > 1:
            raise PlanError(
                f"{name_of(fun)} differentiates more than one function. Fix: make a plan for each of them, and use it as "
                f"remat(loss, policy=plan)."
            )
        loss = inner.found[0]
        step_with = functools.partial(_step_with, fun, args, kwargs)
        return Captured(loss.jaxpr, loss.moving, loss.num_out, loss.around, step_with)
    (found,) = whole.found
    is_chosen = []
    for n, part in enumerate((*args, *kwargs.values())):
        is_chosen += [nums is None or n in nums] * len(partition(part, _is_traced)[0])
    num_operands = len(found.jaxpr.invars) - len(is_chosen)
    chosen = [i for i in found.variable if i < num_operands or is_chosen[i - num_operands]]
    if not chosen or not any(is_float(v.aval) for v in found.jaxpr.outvars[: found.num_out]):
        raise PlanError(
            f"{name_of(fun)} has no float output, or no float argument or state, so there is nothing to differentiate; and it "
            f"differentiates nothing itself by statetx.grad."
        )
    return Captured(found.jaxpr, chosen, found.num_out, found.around)


def _is_traced(x: Any) -> bool:
    """Whether `remat` traces an argument."""
    return is_array(x) or isinstance(x, jax.ShapeDtypeStruct)


def _jaxpr_of(fun: Callable, args: tuple, kwargs: dict[str, Any]) -> tuple[Any, list[Any]]:
    """The program of a call, and its inputs: what states hold, and the arrays; other arguments are as they are."""
    arrays, others = partition((args, kwargs), _is_traced)

    @functools.wraps(fun)
    def call(*arrays: Any) -> Any:
        call_args, call_kwargs = others.combine(arrays)
        return fun(*call_args, **call_kwargs)

    return staged_jaxpr(call, arrays)


class _Instead(Rewriting):
    """Has a program that is there already in the place of the function."""

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
    """A training step whose loss is this program."""
    instead = _Instead(jaxpr)

    def step(*args: Any, **kwargs: Any) -> Any:
        with decide.override.differentiated(lambda loss: Remat(loss, policy=instead)):
            return fun(*args, **kwargs)

    program, inputs = _jaxpr_of(step, args, kwargs)
    shardings = tuple(map(sharding_of, inputs))
    around = Around(shardings=shardings if any(shardings) else ())
    return around.program(jex_core.jaxpr_as_fun(program), program.in_avals, compiler_options)
