"""`ReleasedProgram`: a program that releases the gradients of its loops where it is lowered."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from ... import _jax
from ..._jax import Jaxpr, Literal, Var
from ..._positions import replaced
from ..dataflow import variables_of
from ..inline import hoist
from ..primitives import count, flops, inner_jaxprs
from .fates import GradientStack
from .loops import has_stacks
from .rewriting import Release


class ReleasedProgram:
    """A program whose whole computation is one equation, which is rewritten where it is lowered.

    Inputs that nothing reads, and those that are outputs, are left to JAX, which knows more of them than of operands of
    a call.

    Args:
        jaxpr: without constants.
        overwritable: the inputs whose memory an output may take.
        placements: of the inputs (see `devices`); none if all are unknown.
        options: further fields of `Release`.
    """

    def __init__(self, jaxpr: Jaxpr, overwritable: Collection[int], placements: Sequence[Any] = (), **options: bool):
        live = _jax.without_dead_code(jaxpr)
        read = {v for eqn in live.eqns for v in variables_of(eqn)}
        computed = {v for eqn in live.eqns for v in eqn.outvars}
        self._jaxpr = jaxpr
        self._used = [i for i, v in enumerate(live.invars) if v in read]
        self._computed = [n for n, v in enumerate(live.outvars) if isinstance(v, Var) and v in computed]
        invars, outvars = [live.invars[i] for i in self._used], [live.outvars[n] for n in self._computed]
        self._call = _jax.close(_jax.rebuild(live, invars=invars, outvars=outvars), ())
        positions = [n for n, i in enumerate(self._used) if i in overwritable and live.invars[i] not in live.outvars]
        placements = [placements[i] for i in self._used] if placements else []
        self._release = Release(tuple(positions), tuple(placements), **options)

    @classmethod
    def of(
        cls, jaxpr: Jaxpr, overwritable: Collection[int], placements: Sequence[Any] = (), **options: bool
    ) -> ReleasedProgram | None:
        """The program; None if no loop has stacks, or it cannot be one equation: a Ref is no operand of a call."""
        if jaxpr.is_high or not has_stacks(jaxpr):
            return None
        return cls(jaxpr, overwritable, placements, **options)

    def __call__(self, args: Sequence[Any]) -> list[Any]:
        """The outputs."""
        values = _jax.call_whole(self._call, [args[i] for i in self._used], self._release)
        inputs = dict(zip(self._jaxpr.invars, args, strict=True))
        outs = [v.val if isinstance(v, Literal) else inputs.get(v) for v in self._jaxpr.outvars]
        return replaced(outs, self._computed, values)

    def stacks(self) -> list[GradientStack]:
        """The stacked results of its loops, each with what becomes of it."""
        stacks = self._release.rewritten(self._call).stacks
        return [stack._replace(inputs=tuple([self._used[i] for i in stack.inputs])) for stack in stacks]


def with_released_gradients(jaxpr: Any, overwritable: Collection[int], **options: bool) -> Any:
    """A closed jaxpr as a `ReleasedProgram`, with these options; itself if it cannot be one."""
    opened, consts = _jax.open_jaxpr(jaxpr)
    if opened.is_high:
        return jaxpr
    hoisted, arrays = hoist(opened, consts)
    num = len(arrays)
    program = ReleasedProgram.of(hoisted, {num + i for i in overwritable}, (), **options)
    if program is None:
        return jaxpr
    avals = [v.aval for v in hoisted.invars[num:]]
    new, new_consts = _jax.stage(lambda *args: program([*arrays, *args]), avals, traced_for="jit", name="released")
    return _jax.named_like(_jax.close(*hoist(new, new_consts)), opened)


def with_most_released(jaxpr: Any, overwritable: Collection[int]) -> Any:
    """A closed jaxpr that releases its gradients, in loops that run twice if no other way releases more than now."""
    current_bytes = released_bytes(stacks_in(_jax.open_jaxpr(jaxpr)[0]))
    for repeats in (False, True):
        program = with_released_gradients(jaxpr, overwritable, repeats=repeats)
        if released_bytes(stacks_in(_jax.open_jaxpr(program)[0])) > current_bytes:
            return program
    return jaxpr


def stacks_in(jaxpr: Jaxpr) -> list[GradientStack]:
    """The stacked results of the loops in programs that release gradients, each with what becomes of it."""
    stacks: list[GradientStack] = []
    for eqn in jaxpr.eqns:
        lowered = eqn.params.get("lowered")
        if isinstance(lowered, Release):
            stacks += lowered.rewritten(eqn.params["call_jaxpr"]).stacks
        else:
            for inner in inner_jaxprs(eqn):
                stacks += stacks_in(inner)
    return stacks


def repeated_flops(jaxpr: Jaxpr) -> int:
    """Operations that are added by loops which run twice, in programs that release gradients."""
    added = 0
    for eqn in jaxpr.eqns:
        if isinstance(eqn.params.get("lowered"), Release):
            added += flops(eqn) - count(eqn.params["call_jaxpr"].jaxpr)
        else:
            added += sum(map(repeated_flops, inner_jaxprs(eqn)))
    return added


def released_bytes(stacks: Sequence[GradientStack]) -> int:
    return sum(stack.num_bytes for stack in stacks if stack.is_released)


def releasable(jaxpr: Any) -> list[GradientStack]:
    """The gradients that a closed jaxpr would release if it donated all inputs; none if it releases as much now."""
    program = with_most_released(jaxpr, range(len(_jax.open_jaxpr(jaxpr)[0].invars)))
    stacks = [] if program is jaxpr else stacks_in(_jax.open_jaxpr(program)[0])
    return [stack for stack in stacks if stack.is_released]
