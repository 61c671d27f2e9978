"""A region with an decision, as a function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .. import _jax
from .._equations.primitives import row_of, size
from .._jax import Jaxpr, Var
from .._remat import decide, fence, mark
from ._option import Decision
from ._parts import Part
from ._values import labels_of


def marks_of(decision: Decision, *, is_ordered: bool = False) -> dict[tuple[int, ...], mark.Label]:
    """The saved values of a decision, as labels for `decide.keep`.

    Args:
        is_ordered: whether what follows the forward pass waits until values are stored in fewer bits.
    """
    offload, formats = mark.offload("device", _jax.HOST_MEMORY), dict(decision.stored)
    marks: dict[tuple[int, ...], mark.Label] = {}
    for a in sorted(decision.saved or ()):
        marks[a] = mark.Stored(formats[a], mark.SAVE, is_ordered) if a in formats else mark.SAVE
        if a in decision.offloaded:
            marks[a] = offload
    return labels_of(marks)


def region(part: Part, decision: Decision) -> Callable | None:
    """``(*inputs) -> outputs`` of a rematerialized region; None if it is not rematerialized."""
    if decision.saved is None:
        return None
    # A region that saves nothing is bound exactly as the user's remat would be, inner jits included: XLA's scheduling, and
    # with it the memory, depends on them.
    sums = [] if part.original_jaxpr is not part.jaxpr else _sums_of_numbers(part.jaxpr, decision)
    if sums:
        return _around(sums, part, decision) if len(sums) < len(part.jaxpr.eqns) else None
    jaxpr = part.jaxpr if decision.saved else part.original_jaxpr
    inputs = {i: mark.Stored(format, mark.SAVE, is_ordered=True) for i, format in decision.inputs}
    jaxpr, policy = decide.keep(jaxpr, marks_of(decision, is_ordered=True), inputs)
    return lambda *args: _jax.rematerialize(jaxpr, args, policy=fence.with_fence(policy, "auto"), prevent_cse=True)


def _sums_of_numbers(jaxpr: Jaxpr, decision: Decision) -> list[int]:
    """The equations that add up single numbers for outputs alone, such as the losses of layers."""
    saved = {address[0] for address in decision.saved or ()}
    read: set[Any] = set()
    sums = []
    for i, eqn in reversed(list(enumerate(jaxpr.eqns))):
        is_sum = row_of(eqn).is_linear and all(size(v) == 1 for v in (*eqn.invars, *eqn.outvars))
        if is_sum and i not in saved and not eqn.effects and not any(v in read for v in eqn.outvars):
            sums.append(i)
        else:
            read.update(v for v in eqn.invars if isinstance(v, Var))
    return sums[::-1]


def _around(sums: Sequence[int], part: Part, decision: Decision) -> Callable:
    """A region without some equations, which run after it. Else each number would pass through the region, with its cotangent."""
    jaxpr = part.jaxpr
    inside = [i for i in range(len(jaxpr.eqns)) if i not in sums]
    number = {i: n for n, i in enumerate(inside)}
    eqns, after = [jaxpr.eqns[i] for i in inside], [jaxpr.eqns[i] for i in sums]
    read = {v for e in eqns for v in e.invars if isinstance(v, Var)}
    read_after = {v for e in after for v in e.invars if isinstance(v, Var)} | set(jaxpr.outvars)
    invars = [v for v in jaxpr.invars if v in read]
    outvars = [v for e in eqns for v in e.outvars if v in read_after]
    own = Part("region", _jax.rebuild(jaxpr, invars=invars, outvars=outvars, eqns=eqns), invars, outvars)
    inner = region(
        own,
        decision.renumbered(number.__getitem__)._replace(
            inputs=tuple((invars.index(jaxpr.invars[i]), format) for i, format in decision.inputs),
        ),
    )
    rest = _jax.rebuild(jaxpr, invars=[*jaxpr.invars, *outvars], outvars=jaxpr.outvars, eqns=after)
    assert inner is not None

    def call(*args: Any) -> list[Any]:
        values = dict(zip(jaxpr.invars, args, strict=True))
        return _jax.evaluate(rest, (), [*args, *inner(*(values[v] for v in invars))])

    return call
