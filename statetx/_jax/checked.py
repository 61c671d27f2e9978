"""Rules of `jax.experimental.checkify` for calls that are one equation: the equations inside are checked.

Without a rule checkify would not look into them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from jax._src import checkify as _checkify

from .equations import ClosedJaxpr


def check_inside(primitive: Any, jaxpr_of: Callable[..., ClosedJaxpr]) -> None:
    """Let checkify check what a primitive runs.

    Args:
        jaxpr_of: ``(*args, **params) -> jaxpr``, what it runs, for its operands and parameters.
    """

    def rule(*operands: Any, **params: Any) -> tuple[Any, list[Any]]:
        context, (error, enabled_errors, *args) = operands[:_NUM_CONTEXTS], operands[_NUM_CONTEXTS:]
        return _checkify.checkify_jaxpr(*context, jaxpr_of(*args, **params), enabled_errors, error, *args)

    _checkify.error_checks[primitive] = rule


# From jax 0.11 on a rule takes a context, which numbers the errors, before the error.
_NUM_CONTEXTS = int("ctx" in inspect.signature(_checkify.checkify_jaxpr).parameters)
