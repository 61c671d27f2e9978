"""What the primitives of this package have in common: identities, and rules of `jax.experimental.checkify`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax._src import checkify as _checkify
from jax._src import core as _core
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
