"""Rewrite the functions that JAX differentiates, while `override` has a rewriter for them.

One place for every gradient: `jax.grad`, `jax.value_and_grad` and `jax.vjp`, those of other libraries (flax's and
optax's call JAX's), and those of statetx. The function is staged when JAX calls it, and the rewritten equations are
differentiated instead.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .. import _jax
from .._equations.primitives import Runs, row_of
from .._equations.structure import Body, table
from .._lift.outcome import is_traced, pack
from .._lift.stage import InputNames, stage
from .._lift.wrapper import name_of
from .atoms import nothing
from .override import GradientOrder, override
from .rewriter import Observed, Observer, Rewriter


@contextlib.contextmanager
def rewritten_by(rewriter: Rewriter) -> Iterator[None]:
    """Rewrite each function that is differentiated in reverse mode in this block and thread; those inside of one by
    `Rewriter.inner`.

    An observer around the block sees them, too.
    """
    previous = override.gradient_order, override.observer
    override.gradient_order = GradientOrder()
    if isinstance(rewriter, Observer):
        override.observer = rewriter
    elif override.observer is not None:
        rewriter = Observed(rewriter, override.observer)
    try:
        with override.rewrite_gradients(rewriter):
            yield
    finally:
        override.gradient_order, override.observer = previous


@contextlib.contextmanager
def unobserved(rewriter: Rewriter | None = None) -> Iterator[None]:
    """Tell no observer of what is differentiated in this block; a rewriter may be in its place."""
    observer, override.observer = override.observer, None
    try:
        with override.rewrite_gradients(rewriter):
            yield
    finally:
        override.observer = observer


def _replace(fun: Callable, has_aux: bool) -> Callable:
    rewriter = override.rewriter
    # Derivative rules differentiate functions of their own, in the backward pass of a function that has been rewritten.
    if rewriter is None or _jax.in_backward_pass():
        return fun

    def rewritten(*primals: Any) -> Any:
        # A gradient inside the function belongs to it.
        with unobserved(rewriter.inner):
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

    # A rewriter that replaces the function sees inner rematerialized functions with the policy `nothing`, whatever
    # their own, as in `remat`.
    policies: Any = contextlib.nullcontext()
    if not rewriter.keeps_policies:
        policies = override.replacing(nothing, rewriter.inner)
    arrays = [x if isinstance(x, jax.Array) else jnp.asarray(x) for x in arrays]
    names = InputNames(user_function)
    with policies:
        staged, outcome, refs = stage(body, [_jax.abstract(x) for x in arrays], traced_for="statetx.remat", names=names)
    if not rewriter.keeps_order:
        staged, arrays = _in_order_of_reading(staged, arrays)
    name = name_of(user_function)
    build = lambda body: rewriter.rewrite(body, name, num_out)
    replaced = build(staged) if rewriter.is_used_once else table.get(staged, ("gradient", rewriter, num_out), build)
    outs = replaced(staged.operands, *arrays)
    leaves = outcome.add(refs).finish([x if isinstance(x, jax.Array) else jnp.asarray(x) for x in outs])
    return jax.tree.unflatten(out_tree, leaves)


def _in_order_of_reading(body: Body, arrays: Sequence[Any]) -> tuple[Body, list[Any]]:
    """Return the function with its arrays in the order in which it reads them.

    brainstate differentiates with respect to a dict whose keys are addresses of states: the order of its values differs
    from process to process, and a stored plan would not fit.
    """
    jaxpr, first = body.jaxpr, len(body.jaxpr.invars) - len(arrays)
    order = [i for i in _reading_order(jaxpr) if i >= first]
    if order == sorted(order):
        return body, list(arrays)
    invars = [*jaxpr.invars[:first], *(jaxpr.invars[i] for i in order)]
    reordered = _jax.rebuild(jaxpr, invars=invars, outvars=jaxpr.outvars, eqns=jaxpr.eqns)
    return Body(reordered, body.operands), [arrays[i - first] for i in order]


def _reading_order(jaxpr: _jax.Jaxpr) -> list[int]:
    """The inputs of a jaxpr by number: first those that equations read, in their order, then those that are returned
    only, then the others.
    """
    number = {v: i for i, v in enumerate(jaxpr.invars)}
    found: dict[int, None] = {}

    def read(atoms: Sequence[Any]) -> None:
        found.update(dict.fromkeys(number[v] for v in atoms if isinstance(v, _jax.Var) and v in number))

    for eqn in jaxpr.eqns:
        row, operands = row_of(eqn), eqn.invars
        if row.runs is Runs.ONCE:  # a call, whose operands may be in any order, too
            operands = [operands[i] for i in _reading_order(_jax.open_jaxpr(eqn.params[row.jaxpr])[0])]
        read(operands)
    read(jaxpr.outvars)
    others = [i for i in range(len(jaxpr.invars)) if i not in found]
    return [*found, *sorted(others, key=lambda i: str(jaxpr.invars[i].aval))]
