"""Order of two backward passes that do not depend on each other.

A compiler may run them in turns, and then the values that each computes again are in memory together. ``y, xs = follow(y, xs)`` is the identity. In
the backward pass the cotangent of y is held back until those of xs are computed, so that what computed y is reversed after what reads xs.
``note(x, noted)`` is the identity, too. It notes the cotangent of x, so that another computation can wait for a whole gradient.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from jax._src import core as _core
from jax._src.ad_util import Zero as _Zero
from jax._src.interpreters import ad as _ad
from jax._src.interpreters import batching as _batching
from jax._src.interpreters import mlir as _mlir

follow_primitive = _core.Primitive("statetx_follow")
follow_primitive.multiple_results = True

hold_primitive = _core.Primitive("statetx_hold")

note_primitive = _core.Primitive("statetx_note")


def follow(y: Any, xs: Sequence[Any]) -> tuple[Any, list[Any]]:
    """Return y and xs, such that the cotangent of y waits for those of xs."""
    y, *xs = follow_primitive.bind(y, *xs)
    return y, xs


def hold(x: Any, others: Sequence[Any], *, is_sequential: bool = False) -> Any:
    """Return x, once the others are computed.

    Args:
        is_sequential: whether what begins with x shall also wait for what a program computes before; noted here, done elsewhere.
    """
    return hold_primitive.bind(x, *(y for y in others if y is not x), is_sequential=is_sequential)


class Noted:
    """The cotangents that a program being traced has computed: a parameter of an equation, equal to no other."""

    def __init__(self) -> None:
        self._tracers: list[weakref.ref] = []  # they live as long as their program is traced

    def add(self, tracer: Any) -> None:
        self._tracers.append(weakref.ref(tracer))

    def tracers(self) -> list[Any]:
        return [x for ref in self._tracers if (x := ref()) is not None]


def note(x: Any, noted: Noted) -> Any:
    """Return x; a backward pass that is traced adds the cotangent of x to `noted`."""
    return note_primitive.bind(x, noted=noted)


def set_hold_lowering(rule: Callable) -> None:
    """Lower `hold_primitive` by ``rule(ctx, x, *others)``."""
    _mlir.register_lowering(hold_primitive, rule)


def _follow_jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    return follow_primitive.bind(*primals), _among_nonzero(follow_primitive.bind, tangents)


def _follow_transpose(cts: Sequence[Any], *_: Any) -> list[Any]:
    return _among_nonzero(lambda y, *xs: [hold(y, xs), *xs], cts)


def _among_nonzero(fun: Callable[..., list[Any]], arrays: Sequence[Any]) -> list[Any]:
    """Apply `fun` to those that are not zero; to none if the first is zero or all others are."""
    nonzero = [i for i, x in enumerate(arrays) if type(x) is not _Zero]
    outs = list(arrays)
    if nonzero[:1] == [0] and len(nonzero) > 1:
        for i, x in zip(nonzero, fun(*(arrays[i] for i in nonzero)), strict=True):
            outs[i] = x
    return outs


follow_primitive.def_impl(lambda *xs: list(xs))
follow_primitive.def_abstract_eval(lambda *avals: list(avals))
_ad.primitive_jvps[follow_primitive] = _follow_jvp
_ad.primitive_transposes[follow_primitive] = _follow_transpose
_batching.primitive_batchers[follow_primitive] = lambda args, dims: (follow_primitive.bind(*args), dims)
_mlir.register_lowering(follow_primitive, lambda ctx, *xs: list(xs))

hold_primitive.def_impl(lambda x, *_, **__: x)
hold_primitive.def_abstract_eval(lambda x, *_, **__: x)
_ad.primitive_jvps[hold_primitive] = lambda primals, tangents, **params: (
    hold_primitive.bind(*primals, **params),
    tangents[0],
)
_ad.primitive_transposes[hold_primitive] = lambda ct, x, *others, **_: [ct, *(None for _ in others)]
_batching.primitive_batchers[hold_primitive] = lambda args, dims, **params: (
    hold_primitive.bind(*args, **params),
    dims[0],
)


def _note_transpose(ct: Any, _: Any, *, noted: Noted) -> list[Any]:
    if isinstance(ct, _core.Tracer):  # neither zero nor computed already
        noted.add(ct)
    return [ct]


def _note_jvp(primals: Sequence[Any], tangents: Sequence[Any], *, noted: Noted) -> tuple[Any, Any]:
    # In the tangents only, which are gone once the backward pass is traced.
    (x,), (t,) = primals, tangents
    return x, (t if type(t) is _Zero else note_primitive.bind(t, noted=noted))


note_primitive.def_impl(lambda x, **_: x)
note_primitive.def_abstract_eval(lambda x, **_: x)
_ad.primitive_jvps[note_primitive] = _note_jvp
_ad.primitive_transposes[note_primitive] = _note_transpose
_batching.primitive_batchers[note_primitive] = lambda args, dims, **params: (
    note_primitive.bind(*args, **params),
    dims[0],
)
_mlir.register_lowering(note_primitive, lambda ctx, x, **_: [x])
