"""Identities, rules of `jax.experimental.checkify` for primitives of this package, and the order of gradients."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from jax._src import checkify as _checkify
from jax._src import core as _core
from jax._src.ad_util import Zero as _Zero
from jax._src.interpreters import ad as _ad
from jax._src.interpreters import batching as _batching
from jax._src.interpreters import mlir as _mlir

from .equations import ClosedJaxpr
from .versions import NUM_CHECKIFY_CONTEXTS


def identity(name: str) -> Any:
    """A primitive that returns its first operand, with its tangent, and is no operation in a compiled program.

    It has no transpose. `jax.vmap` must map the first operand, if any.
    """
    primitive = _core.Primitive(name)
    primitive.def_impl(lambda x, *_, **__: x)
    primitive.def_abstract_eval(lambda x, *_, **__: x)

    def bind(args: Any, others: Any, **params: Any) -> tuple[Any, Any]:
        return primitive.bind(*args, **params), others[0]

    _ad.primitive_jvps[primitive] = _batching.primitive_batchers[primitive] = bind
    _mlir.register_lowering(primitive, lambda ctx, x, *_, **__: [x])
    return primitive


def check_inside(primitive: Any, jaxpr_of: Callable[..., ClosedJaxpr]) -> None:
    """Let checkify check what a primitive runs; without a rule it would not look into a call that is one equation.

    Args:
        jaxpr_of: ``(*args, **params) -> jaxpr``, what it runs, for its operands and parameters.
    """

    def rule(*operands: Any, **params: Any) -> tuple[Any, list[Any]]:
        context, (error, enabled_errors, *args) = operands[:NUM_CHECKIFY_CONTEXTS], operands[NUM_CHECKIFY_CONTEXTS:]
        return _checkify.checkify_jaxpr(*context, jaxpr_of(*args, **params), enabled_errors, error, *args)

    _checkify.error_checks[primitive] = rule


# -- the order of two gradients that do not depend on each other -----------------------------------------------------

# A compiler may run them in turns, and then the values that each computes again are in memory together.
# ``hold(x, others)`` is x, once the others are computed. ``note(x, noted)`` is x, too. It notes the cotangent of x, so
# that another computation can wait for a whole gradient.


hold_primitive = identity("statetx_hold")
note_primitive = identity("statetx_note")


def hold(x: Any, others: Sequence[Any], *, is_sequential: bool = False) -> Any:
    """Return x, once the others are computed.

    Args:
        is_sequential: whether what begins with x shall also wait for what a program computes before; noted here, done
            elsewhere.
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


_ad.primitive_transposes[hold_primitive] = lambda ct, x, *others, **_: [ct, *(None for _ in others)]


def _note_transpose(ct: Any, _: Any, *, noted: Noted) -> list[Any]:
    if isinstance(ct, _core.Tracer):  # neither zero nor computed already
        noted.add(ct)
    return [ct]


def _note_jvp(primals: Sequence[Any], tangents: Sequence[Any], *, noted: Noted) -> tuple[Any, Any]:
    # In the tangents only, which are gone once the backward pass is traced.
    (x,), (t,) = primals, tangents
    return x, (t if type(t) is _Zero else note_primitive.bind(t, noted=noted))


_ad.primitive_jvps[note_primitive] = _note_jvp
_ad.primitive_transposes[note_primitive] = _note_transpose
