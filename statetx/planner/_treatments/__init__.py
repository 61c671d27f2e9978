"""The treatments of plans: possible changes of a part of a program, applied as decided.

To add one, write its file and list it here.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Hashable, Sequence
from typing import Any

import jax

from ... import _jax
from ..._equations.structure import Body
from ..._jax import ArrayFunction, Aval, Jaxpr
from ..._loops.strategy import Lengths
from ..._remat import decide
from ..._remat.fence import with_fence
from ..._remat.override import override
from ..._remat.policy import Policy
from .._program.flat import Part, run
from .copies import Copies
from .groups import InGroups
from .loops import CheckpointedLoop, loop_of
from .released import ReleasedGradients, RepeatedGradients
from .stored_inputs import StoredInputs
from .treatment import Decision, Treatment

_OF_STEPS = ReleasedGradients, RepeatedGradients
TREATMENTS: tuple[type[Treatment], ...] = (Copies, StoredInputs, CheckpointedLoop, InGroups, *_OF_STEPS)
"""All treatments, in the order of their proposals."""

OF_STEPS: dict[str, type[Treatment]] = {treatment.name: treatment for treatment in _OF_STEPS}
"""The treatments of a whole step, by name."""

UNPLANNED = Decision()
"""The decision to leave a part unchanged, without its bytes."""


@dataclasses.dataclass(frozen=True)
class AsWritten(Treatment):
    """A region, or the steps of a loop, rematerialized as a user would write it. No plan has it.

    Attributes:
        policy: None for the values that the decision saves.
        fence: as for `remat`; None where it is called directly in the step of a loop, which keeps it from being merged
            with the forward pass.
    """

    policy: Policy | None
    fence: str | None = "auto"

    name = "as written"

    def replacement(self, part: Part, decision: Decision) -> ArrayFunction:
        if part.eqn is not None:
            return loop_of(part, Lengths(part.eqn.params["length"]), self.policy, self.fence)
        if self.policy is None:
            return _rematerialized(*decision.marked(part.jaxpr), self.fence)
        return _rematerialized(*decide.apply(self.policy, part.jaxpr, (), ""), self.fence)


def rewrite(
    jaxpr: Jaxpr,
    parts: Sequence[Part],
    decisions: Sequence[Decision],
    last_input: int | None = None,
    is_sequential: bool = False,
) -> Jaxpr:
    """Apply a decision to each part of a program.

    Args:
        last_input: the number of an input that waits for all others; None for no such order.
        is_sequential: whether this input also waits for the gradient before.
    """
    kinds = {type(t) for decision in decisions for t in decision.treatments}
    for kind in sorted(kinds, key=lambda kind: kind.name):
        parts, decisions = kind.prepare(jaxpr, parts, decisions)
    # Equal parts with equal decisions share one function, so that JAX traces and differentiates it once.
    cache: dict[Hashable, ArrayFunction | None] = {}
    replacements: list[ArrayFunction | None] = []
    for part, decision in zip(parts, decisions, strict=True):
        key = (part.key, decision)
        if key not in cache:
            cache[key] = _replacement(part, decision)
        replacements.append(cache[key])

    def planned(*args: jax.Array) -> list[jax.Array]:
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


def _is_weak(aval: Aval) -> bool:
    return getattr(aval, "weak_type", False)


def _typed(x: jax.Array, *, is_weak: bool) -> jax.Array:
    return x if _is_weak(jax.typeof(x)) == is_weak else _jax.with_weak_type(x, is_weak)


def as_planned(planned: Body) -> ArrayFunction:
    """``(operands, *args) -> outputs`` of a rewritten function, which waits for the gradient before if `rewrite` was
    told so.
    """
    held = [e.invars[0] for e in planned.jaxpr.eqns if e.primitive is _jax.hold_primitive and e.params["is_sequential"]]
    last_inputs = [i for i, v in enumerate(planned.jaxpr.invars) if v in held]

    def run(operands: Sequence[jax.Array], *args: jax.Array) -> list[jax.Array]:
        if not last_inputs or override.gradient_order is None:
            return planned(operands, *args)
        return override.gradient_order.run(functools.partial(planned, ()), last_inputs[0], [*operands, *args])

    return run


def _replacement(part: Part, decision: Decision) -> ArrayFunction | None:
    """The function in place of a part; None for its own."""
    for treatment in decision.treatments:
        if (replaced := treatment.replacement(part, decision)) is not None:
            return replaced
    return loop_of(part, None, None) if part.eqn is not None else _region(part, decision)


def _region(part: Part, decision: Decision) -> ArrayFunction | None:
    """``(*inputs) -> outputs`` of a rematerialized region; None if it is not rematerialized."""
    if decision.saved is None:
        return None
    # A region that saves nothing is bound exactly as the user's remat would be, inner jits included: XLA's scheduling,
    # and with it the memory, depends on them.
    return _rematerialized(*decision.marked(part.jaxpr if decision.labels() else part.original_jaxpr))


def _rematerialized(jaxpr: Jaxpr, policy: Any, fence: str | None = "auto") -> ArrayFunction:
    fenced = with_fence(policy, fence)
    return lambda *args: _jax.rematerialize(jaxpr, args, policy=fenced, prevent_cse=fence is not None)
