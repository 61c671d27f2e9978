"""The passes of a function, forward then backward, as jaxprs.

``jax.vjp`` returns its pullback as a pytree whose leaves are the residuals. The forward pass is traced with these
leaves as further outputs, the backward pass with these leaves as inputs; nothing is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .. import _frames, _jax
from .._jax import Jaxpr
from .._positions import function_of
from .structure import Body


class StagedForward(NamedTuple):
    """A function with its residuals as further outputs.

    Attributes:
        body: ``(*inputs) -> (*outputs, *residuals)``.
        pullback: the treedef of the pullback, whose leaves are the residuals.
    """

    body: Body
    pullback: Any


def forward_pass(
    fun: Callable[..., list[Any]], avals: Sequence[Any], diff_indices: Sequence[int], *, traced_for: str, name: str
) -> StagedForward:
    """Stage ``fun(*inputs) -> outputs`` with the residuals that ``jax.vjp`` saves for the inputs at `diff_indices`."""
    pullback: Any = None

    @_frames.undone
    def run(*inputs: Any) -> list[Any]:
        nonlocal pullback
        # The treedef leaves the trace by `nonlocal`: only arrays can be outputs of a jaxpr, and `backward_pass` needs
        # it to rebuild the pullback from its residuals.
        outputs, vjp_fun = jax.vjp(function_of(fun, inputs, diff_indices), *(inputs[i] for i in diff_indices))
        residuals, pullback = jax.tree.flatten(vjp_fun)
        return [*outputs, *residuals]

    body = Body.close(*_jax.stage(run, avals, traced_for=traced_for, name=name))
    return StagedForward(body, pullback)


def backward_pass(
    pullback: Any, residual_avals: Sequence[Any], cotangent_avals: Sequence[Any], *, traced_for: str, name: str
) -> tuple[Jaxpr, Sequence[Any]]:
    """Stage ``(*residuals, *cotangents) -> cotangents of the inputs``; return the jaxpr and its constants."""
    num = len(residual_avals)

    @_frames.undone
    def run(*inputs: Any) -> list[Any]:
        vjp_fun = jax.tree.unflatten(pullback, inputs[:num])
        return jax.tree.leaves(vjp_fun(list(inputs[num:])))

    return _jax.stage(run, [*residual_avals, *cotangent_avals], traced_for=traced_for, name=name)


def with_pullback(
    fun: Callable[..., tuple[list[Any], list[Any]]], diff_indices: Sequence[int]
) -> Callable[..., tuple[list[Any], list[Any], list[Any]]]:
    """Add to ``fun(*arrays) -> (outputs, aux)`` the cotangents of the arrays at `diff_indices`, for output cotangents
    of one.

    Measurements and plans take the memory of this program for the memory of a gradient.
    """

    @_frames.undone
    def step(*arrays: Any) -> tuple[list[Any], list[Any], list[Any]]:
        diff_args = (arrays[i] for i in diff_indices)
        outs, vjp_fun, aux = jax.vjp(function_of(fun, arrays, diff_indices), *diff_args, has_aux=True)
        # Cotangents of one inside a shard_map must vary along the axes of their outputs, as its types demand.
        return outs, aux, list(vjp_fun([_jax.varying_like(jnp.ones_like(x), x) for x in outs]))

    return step
