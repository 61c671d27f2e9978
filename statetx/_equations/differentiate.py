"""The two passes of a derivative in reverse mode, as equations.

``jax.vjp`` returns its pullback as a pytree whose leaves are the residuals. Tracing it twice, with these leaves as further outputs of the
forward pass and as inputs of the backward pass, gives both passes; nothing is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .. import _jax
from .._jax import Jaxpr
from .._positions import function_of
from .structure import Body


class ForwardPass(NamedTuple):
    """A function with its residuals as further outputs.

    Attributes:
        body: ``(*inputs) -> (*outputs, *residuals)``.
        pullback: the structure of the pullback, whose leaves are the residuals.
    """

    body: Body
    pullback: Any


def forward_pass(
    fun: Callable[..., list], avals: Sequence[Any], diff_indices: Sequence[int], *, traced_for: str, name: str
) -> ForwardPass:
    """Stage ``fun(*inputs) -> outputs`` and the residuals that ``jax.vjp`` keeps for the inputs at `diff_indices`."""
    pullback: Any = None

    def run(*inputs: Any) -> list[Any]:
        nonlocal pullback
        outputs, pull = jax.vjp(function_of(fun, inputs, diff_indices), *(inputs[i] for i in diff_indices))
        leaves, pullback = jax.tree.flatten(pull)
        return [*outputs, *leaves]

    body = Body.close(*_jax.stage(run, avals, traced_for=traced_for, name=name))
    return ForwardPass(body, pullback)


def backward_pass(
    pullback: Any, residual_avals: Sequence[Any], cotangent_avals: Sequence[Any], *, traced_for: str, name: str
) -> tuple[Jaxpr, Sequence[Any]]:
    """``(*residuals, *cotangents) -> cotangents of the inputs``, as a jaxpr and its constants."""
    num = len(residual_avals)

    def run(*inputs: Any) -> list[Any]:
        pull = jax.tree.unflatten(pullback, inputs[:num])
        return jax.tree.leaves(pull(list(inputs[num:])))

    return _jax.stage(run, [*residual_avals, *cotangent_avals], traced_for=traced_for, name=name)


def with_pullback(
    fun: Callable[..., tuple[list, list]], diff_indices: Sequence[int]
) -> Callable[..., tuple[list, list, list]]:
    """``fun(*arrays) -> (outputs, aux)`` with the cotangents of the arrays at `diff_indices`, for cotangents of one.

    It is the program whose memory stands for a gradient, in a measurement and in a plan.
    """

    def step(*arrays: Any) -> tuple[list, list, list]:
        diff_args = (arrays[i] for i in diff_indices)
        outs, pull, aux = jax.vjp(function_of(fun, arrays, diff_indices), *diff_args, has_aux=True)
        return outs, aux, list(pull([_jax.varying_like(jnp.ones_like(x), x) for x in outs]))

    return step
