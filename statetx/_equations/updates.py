"""The order of a program's outputs that lets them update its donated inputs in place."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from .._jax import ClosedJaxpr, Jaxpr, Literal
from .inline import inline
from .primitives import FUSED, INLINED


def order_of_updates(jaxpr: ClosedJaxpr, is_donated: Sequence[bool]) -> list[int] | None:
    """The outputs by number, so that each update comes in the order of the donated inputs of its type; None if they do.

    JAX gives the memory of donated inputs to outputs of their type in order. An output may be computed in the memory of
    an input that it depends on entry by entry. Where the memory goes to another one, XLA copies.
    """
    inlined = inline(jaxpr, calls=INLINED)
    inputs_of_type: dict[Any, list[int]] = defaultdict(list)
    outputs_of_type: dict[Any, list[int]] = defaultdict(list)
    for i, v in enumerate(inlined.invars):
        if is_donated[i]:
            inputs_of_type[_type(v)].append(i)
    for o, v in enumerate(inlined.outvars):
        outputs_of_type[_type(v)].append(o)

    updated = _updated_inputs(inlined, is_donated)
    order = list(range(len(inlined.outvars)))
    for type_, inputs in inputs_of_type.items():
        positions = outputs_of_type[type_]
        matched = _matching({o: updated[o] & set(inputs) for o in positions})
        unmatched = [o for o in positions if o not in matched.values()]
        in_order = [matched[i] if i in matched else unmatched.pop(0) for i in inputs if i in matched or unmatched]
        for position, o in zip(positions, [*in_order, *unmatched], strict=True):
            order[position] = o
    return None if order == sorted(order) else order


def _updated_inputs(jaxpr: Jaxpr, is_donated: Sequence[bool]) -> list[frozenset[int]]:
    """The donated inputs that each output depends on entry by entry."""
    inputs_of: dict[Any, frozenset[int]] = {v: frozenset([i]) for i, v in enumerate(jaxpr.invars) if is_donated[i]}
    of = lambda v: frozenset() if isinstance(v, Literal) else inputs_of.get(v, frozenset())
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in FUSED and len(eqn.outvars) == 1:
            operands = [v for v in eqn.invars if _type(v)[0] == _type(eqn.outvars[0])[0]]
            inputs_of[eqn.outvars[0]] = frozenset().union(*map(of, operands))
    return [of(v) for v in jaxpr.outvars]


def _matching(candidates: dict[int, frozenset[int]]) -> dict[int, int]:
    """Give each output one of its inputs, the ones with the fewest first; the output of each input."""
    matched: dict[int, int] = {}
    while candidates:
        o = min(candidates, key=lambda o: (len(candidates[o] - matched.keys()) or len(candidates) + 1, o))
        remaining = candidates.pop(o) - matched.keys()
        if remaining:
            matched[min(remaining)] = o
    return matched


def _type(v: Any) -> Any:
    return v.aval.shape, v.aval.dtype
