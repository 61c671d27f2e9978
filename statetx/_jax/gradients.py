"""See the functions that JAX differentiates in reverse mode, below the names that users bind
(``from jax import grad``).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import jax
from jax._src.interpreters import ad as _ad

from . import patches

Replace = Callable[[Callable, bool], Callable]
"""``(fun, has_aux) -> the function to differentiate in its place``. ``fun(*primals)`` takes and returns trees, with
`has_aux` a pair.
"""

_replace: Replace | None = None


def replace_differentiated(replace: Replace) -> None:
    """Let `replace` see each function that `jax.vjp`, and with it `jax.grad`, is called on, in every thread."""
    global _replace
    _replace = replace


_note: Callable[[list[Any]], None] | None = None


def note_differentiated(note: Callable[[list[Any]], None]) -> None:
    """Let `note` see the leaves of the primals of each function that `jax.vjp`, and with it `jax.grad`, is called on,
    in every thread.
    """
    global _note
    _note = note


_linearize = _ad.linearize


@functools.wraps(_linearize)
def _observed(fun: Callable, *args: Any, **options: Any) -> Any:
    # `jax.linearize` calls this function too, without `is_vjp`.
    if options.get("is_vjp"):
        if _note is not None:  # JAX gives one tree, as a `FlatTree`, which is no pytree
            _note([x for arg in args for x in (arg if hasattr(arg, "unflatten") else jax.tree.leaves(arg))])
        if _replace is not None:
            fun = _replace(fun, bool(options.get("has_aux")))
    return _linearize(fun, *args, **options)


patches.replace(
    "jax._src.interpreters.ad.linearize",
    _ad,
    _observed,
    "`statetx.plan` and `statetx.budget` see the functions that `jax.grad` and `jax.vjp` differentiate, and "
    "`statetx.microbatch` the states whose values they "
    "differentiate. Elsewhere the function is JAX's own.",
)

# The functions that run a backward pass; their names differ between versions of JAX.
_BACKWARD = frozenset(
    [f.__code__ for n in ("backward_pass", "backward_pass3") if (f := getattr(_ad, n, None)) is not None]
)


def in_backward_pass() -> bool:
    """Whether a backward pass is running: a function that is differentiated now is part of a derivative rule."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code in _BACKWARD:
            return True
        frame = frame.f_back
    return False


def differentiated_function(fun: Callable) -> Callable:
    """The function that the user differentiates, for messages, from the one that JAX does."""
    # `jax.grad` binds the other arguments first, in a closure.
    code = getattr(fun, "__code__", None)
    if code is not None and code.co_name == "f_wrapped" and "f" in code.co_freevars:
        fun = fun.__closure__[code.co_freevars.index("f")].cell_contents  # type: ignore[index]
    return getattr(fun, "user_function", fun)
