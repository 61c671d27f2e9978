"""Loops that recompute steps, under JAX's checker of key reuse.

``jax_debug_key_reuse`` counts the uses of a key in the equations. It cannot know that a recomputed step draws the same
numbers on purpose. While it is on, such a loop gets its keys as key data, which are not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from .. import _jax
from .._equations.structure import Body
from .._tree import is_key


def is_needed(*bodies: Body) -> bool:
    """Whether the checker is on and one of the bodies has a key among its inputs or outputs."""
    avals = (v.aval for body in bodies for v in (*body.jaxpr.invars, *body.jaxpr.outvars))
    return _jax.checks_keys() and any(map(is_key, avals))


def body_with_key_data(body: Body) -> Body:
    """The body with key data in place of keys, as inputs, outputs and operands."""
    invars, outvars = body.jaxpr.invars, body.jaxpr.outvars

    def run(*args: Any) -> list[Any]:
        return to_key_data(_jax.evaluate(body.jaxpr, (), to_keys(args, [v.aval for v in invars])))

    avals = [_jax.abstract(jax.eval_shape(_key_data, v.aval)) if is_key(v.aval) else v.aval for v in invars]
    jaxpr, consts = _jax.stage(run, avals, traced_for="scan", name="step")
    assert not consts and len(jaxpr.outvars) == len(outvars)
    return Body(jaxpr, to_key_data(body.operands))


def loop_with_key_data(loop: Callable, body: Body) -> Callable:
    """Wrap a loop of `body_with_key_data(body)` so that it takes and returns keys.

    The loop returns the outputs of the body, as one list or split into several.
    """
    out_avals = [v.aval for v in body.jaxpr.outvars]

    def run(*args: list) -> Any:
        leaves, treedef = jax.tree.flatten(loop(*map(to_key_data, args)))
        return treedef.unflatten(to_keys(leaves, out_avals))

    return run


def to_key_data(values: Sequence[Any]) -> list[Any]:
    return [_key_data(x) if is_key(_jax.abstract(x)) else x for x in values]


def to_keys(values: Sequence[Any], avals: Sequence[Any]) -> list[Any]:
    """Turn key data back into keys wherever `avals`, types of the values or of their elements, are key types."""
    return [
        jax.random.wrap_key_data(x, impl=_impl(aval)) if is_key(aval) else x
        for x, aval in zip(values, avals, strict=True)
    ]


def _key_data(key: Any) -> Any:
    return jax.random.key_data(key)


def _impl(aval: Any) -> Any:
    impls: list[Any] = []  # `key_impl` needs a key: a tracer is one
    jax.eval_shape(lambda key: impls.append(jax.random.key_impl(key)), jax.ShapeDtypeStruct(aval.shape, aval.dtype))
    return impls[0]
