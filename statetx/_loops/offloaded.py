"""Refusal to offload values of loops where XLA fails.

Values of a loop in a loop compile neither for GPUs nor for TPUs; a jaxlib may read the values of any loop wrongly.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from .. import _jax
from .._equations.primitives import REMAT
from .._errors import PolicyError
from .._known import OFFLOADED_RESIDUALS, offloads_wrongly
from .._remat.fence import Fenced
from .._targets import current

_LOOPS = frozenset({"scan", "while"})


@dataclasses.dataclass(frozen=True)
class _NotOffloading:
    """A policy for JAX that raises where `policy` offloads a value: that is, when the region is differentiated.

    Attributes:
        loop: the outer of two loops around the region, for the message.
        is_wrong: whether the compiler would compute wrong gradients, even of a single loop.
    """

    policy: Any
    loop: str
    is_wrong: bool

    def __call__(self, primitive: Any, *avals: Any, **params: Any) -> Any:
        verdict = self.policy(primitive, *avals, **params)
        if isinstance(verdict, _jax.Offloadable):
            if self.is_wrong:
                raise PolicyError(f"{self.loop}: a region in its body offloads values. {OFFLOADED_RESIDUALS.refusal()}")
            raise PolicyError(
                f"{self.loop}: a loop in its body offloads values to {verdict.dst!r} for the gradient. For a "
                f"{current.platform().upper()} XLA compiles no program that keeps them for all steps of both loops.\n"
                f"Fix: give the outer loop checkpoint=policies.Levels(2), or offload in one loop alone; or let "
                f"statetx.plan(..., offload=True) choose what to offload."
            )
        return verdict


def refuse_in_loops(jaxpr: _jax.Jaxpr, loop: str, *, in_loop: bool = False) -> _jax.Jaxpr:
    """The body of a plain loop for the target: its loops raise if they are differentiated and offload values.

    XLA fails on values of all steps of the inner loop for all steps of the outer one. A region or a loop with
    checkpoints in between keeps them for one step of the outer loop, which works.

    Args:
        in_loop: whether the body is of an inner loop.
    """
    if current.platform() not in ("gpu", "tpu"):
        return jaxpr
    is_wrong = offloads_wrongly()
    return _refusing(jaxpr, loop, in_loop or is_wrong, is_wrong)


def _refusing(x: Any, loop: str, in_loop: bool, is_wrong: bool) -> Any:
    def changed(eqn: Any) -> Any:
        is_region = eqn.primitive.name in REMAT
        if not is_region and _jax.loop_of(eqn) is None:
            in_inner_loop = in_loop or eqn.primitive.name in _LOOPS
            with _jax.in_shard_maps(eqn):
                return _jax.map_jaxprs(lambda inner: _refusing(inner, loop, in_inner_loop, is_wrong), eqn)
        policy = eqn.params["policy"] if is_region and in_loop else None
        if policy is None or isinstance(policy, (_NotOffloading, _jax.Ordered)):  # ordered: by a plan
            return eqn
        is_fenced = isinstance(policy, Fenced) and policy.policy is not None
        new = _NotOffloading(policy.policy if is_fenced else policy, loop, is_wrong)
        new = dataclasses.replace(policy, policy=new) if is_fenced else new
        return eqn.replace(params={**eqn.params, "policy": new})

    return _jax.map_equations(changed, x)
