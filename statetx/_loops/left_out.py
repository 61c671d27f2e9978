"""Derivatives of parts that are left out of an output.

A part of weight 0 adds nothing to a mean, and its cotangent is 0. JAX multiplies this 0 with the derivatives of the
part. Where they are NaN or infinite, as those of a mean over nothing, 0/0, the products are NaN. So the tangents of the
part's inputs, and with them its cotangents, are replaced by 0, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .. import _jax
from .._equations.structure import Body
from .._positions import replaced
from .._tree import is_float


def with_left_out(
    body: Body, inputs: Sequence[Any], groups: Sequence[str | None], is_left_out: Callable[[str], Any]
) -> list[Any]:
    """The outputs of a part, without derivatives where it is left out of them.

    Args:
        body: the part; it has no operands.
        groups: for each output, its group; None for an output that the part is always in.
        is_left_out: called with a group, whether the part is left out of its outputs.
    """
    outvars = body.jaxpr.outvars
    members: dict[str | None, list[int]] = {}
    for n, (group, v) in enumerate(zip(groups, outvars, strict=True)):
        if is_float(v.aval):
            members.setdefault(group, []).append(n)
    if len(members) == 1:
        (group,) = members
        return body((), *inputs) if group is None else _masked(body.jaxpr, inputs, is_left_out(group))

    # Outputs of other groups need the tangents of the inputs. So each group has its own from a copy of the equations,
    # which is dead code where nothing is differentiated. Callbacks in it would run twice.
    outs = body((), *inputs)
    for group, positions in members.items():
        if group is None or body.jaxpr.effects:
            continue
        copy = _jax.rebuild(body.jaxpr, invars=body.jaxpr.invars, outvars=[outvars[n] for n in positions])
        of_copy = _masked(_jax.without_dead_code(copy), inputs, is_left_out(group))
        # Under `jax.vmap` both values must be mapped if one is.
        own = [jnp.where(is_left_out(group), outs[n], outs[n]) for n in positions]
        outs = replaced(outs, positions, list(map(with_tangent_of, own, of_copy)))
    return outs


def _masked(jaxpr: _jax.Jaxpr, inputs: Sequence[Any], is_left_out: Any) -> list[Any]:
    """The outputs of a jaxpr, without derivatives if `is_left_out`."""
    # In a shard_map, whether a part is left out may differ between devices.
    inputs = [_masked_tangent(is_left_out, _jax.varying_like(x, is_left_out)) if is_float(x) else x for x in inputs]
    if _jax.varying_axes(jax.typeof(is_left_out)):
        return _jax.with_varying_inputs(jaxpr, inputs)
    return _jax.evaluate(jaxpr, (), inputs)


def _masked_tangent(is_zero: Any, x: Any) -> Any:
    """`x`, with a tangent of 0 if `is_zero`."""
    return jnp.where(is_zero, jax.lax.stop_gradient(x), x)  # for XLA, `x`


@jax.custom_jvp
def with_tangent_of(x: Any, y: Any) -> Any:
    """`x`, which equals `y`, with the tangent of `y`."""
    return x


def _with_tangent_of_jvp(primals: tuple, tangents: tuple) -> tuple[Any, Any]:
    return with_tangent_of(*primals), tangents[1]  # so that the tangent has the derivatives of `y`, too


_with_tangent_of_jvp.reads_nothing = True  # type: ignore[attr-defined]  # see `_jax.derivative_rule`
with_tangent_of.defjvp(_with_tangent_of_jvp, symbolic_zeros=True)
