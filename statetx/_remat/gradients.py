"""Rewrite the functions that JAX differentiates, while `override` has a rewriter for them.

One place for every gradient: `jax.grad`, `jax.value_and_grad` and `jax.vjp`, those of other libraries (flax's and optax's call JAX's),
and those of statetx. The function is staged when JAX calls it, and the rewritten equations are differentiated instead.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from .. import _jax
from .._equations.structure import table
from .._lift.inputs import InputNames
from .._lift.outcome import is_traced, pack
from .._lift.stage import stage
from .._lift.wrapper import name_of
from .atoms import nothing
from .gradient_order import GradientOrder
from .override import override
from .rewriter import Rewriter


@contextlib.contextmanager
def rewritten_by(rewriter: Rewriter) -> Iterator[None]:
    """Rewrite each function that is differentiated in reverse mode in this block and thread; those inside of one by `Rewriter.inner`."""
    previous, override.gradient_order = override.gradient_order, GradientOrder()
    try:
        with override.rewrite_gradients(rewriter):
            yield
    finally:
        override.gradient_order = previous


def _replace(fun: Callable, has_aux: bool) -> Callable:
    rewriter = override.rewriter
    # Derivative rules differentiate functions of their own, in the backward pass of a function that has been rewritten.
    if rewriter is None or _jax.in_backward_pass():
        return fun

    def rewritten(*primals: Any) -> Any:
        # A gradient inside the function belongs to it.
        with override.rewrite_gradients(rewriter.inner):
            return _run(fun, has_aux, rewriter, primals)

    return rewritten


_jax.replace_differentiated(_replace)


def _run(fun: Callable, has_aux: bool, rewriter: Rewriter, primals: tuple) -> Any:
    arrays, in_tree = jax.tree.flatten(primals)
    user_function = _jax.differentiated_function(fun)
    out_tree, num_out = None, 0

    def body(*tracers: Any) -> tuple[list, Any]:
        nonlocal out_tree, num_out
        out = fun(*jax.tree.unflatten(in_tree, tracers))
        leaves, out_tree = jax.tree.flatten(out)

        # Auxiliary outputs come last, and get no cotangents. What is not a pair is JAX's to refuse.
        is_pair = has_aux and isinstance(out, (tuple, list)) and len(out) == 2
        num_out = sum(map(is_traced, jax.tree.leaves(out[0] if is_pair else out)))
        return pack(leaves, [])

    # A rewriter sees inner rematerialized functions with the policy `nothing`, whatever their own, as in `remat`.
    arrays = [x if isinstance(x, jax.Array) else jnp.asarray(x) for x in arrays]
    names = InputNames(user_function)
    with override(nothing, suppress_warnings=True, rewriter=rewriter.inner):
        staged, outcome, refs = stage(body, [_jax.abstract(x) for x in arrays], traced_for="statetx.remat", names=names)
    name = name_of(user_function)
    build = lambda body: rewriter.rewrite(body, name, num_out)  # noqa: E731
    outs = table.get(staged, ("gradient", rewriter, num_out), build)(staged.operands, *arrays)
    leaves = outcome.add(refs).finish([x if isinstance(x, jax.Array) else jnp.asarray(x) for x in outs])
    return jax.tree.unflatten(out_tree, leaves)
