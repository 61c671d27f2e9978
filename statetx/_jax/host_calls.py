"""Python functions that a program calls on the host: whether it calls any, whether they have returned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax._src import callback as _callback
from jax._src import debugging as _debugging

from . import patches
from .editing import closed_like, map_jaxprs
from .equations import Jaxpr, equations_in, open_jaxpr
from .traces import ArrayImpl

_note: Callable[[], None] | None = None


def note_host_calls(note: Callable[[], None]) -> None:
    """Call `note` whenever a function on the host becomes part of a program, or of eager code."""
    global _note
    _note = note


def _noticed(bind: Callable[..., Any]) -> Callable[..., Any]:
    def noticed_bind(*args: Any, **params: Any) -> Any:
        if _note is not None:
            _note()
        return bind(*args, **params)

    return noticed_bind


_REASON = (
    "A function on the host may raise after the call has returned: statetx waits for it before it stores the call's "
    "writes. Otherwise it is JAX's own."
)
for _name, _primitive in {
    "callback.pure_callback_p": _callback.pure_callback_p,
    "callback.io_callback_p": _callback.io_callback_p,
    "debugging.debug_callback_p": _debugging.debug_callback_p,
}.items():
    patches.replace(f"jax._src.{_name}.bind", _primitive, _noticed(_primitive.bind), _REASON)


def calls_host(jaxpr: Jaxpr) -> bool:
    """Whether a program calls functions of the user on the host. A `jax.debug.print` is none: it does not raise."""
    return any(eqn.primitive.name.endswith("_callback") for eqn in equations_in(jaxpr))


def pure_callbacks(jaxpr: Jaxpr) -> list[Any]:
    """The functions of the user that a program calls by `jax.pure_callback`."""
    found = [eqn.params["callback"] for eqn in equations_in(jaxpr) if eqn.primitive is _callback.pure_callback_p]
    return [getattr(callback, "callback_func", callback) for callback in found]


_DEBUG_EFFECTS = {_debugging.debug_effect, _debugging.ordered_debug_effect}


def without_debug_calls(x: Any) -> Any:
    """A jaxpr, closed or not, without its calls of `jax.debug` at any depth: nothing is computed from them."""
    jaxpr = open_jaxpr(x)[0]
    if not _DEBUG_EFFECTS & jaxpr.effects:
        return x
    eqns = [eqn for eqn in jaxpr.eqns if eqn.primitive.name not in ("debug_callback", "debug_print")]
    eqns = [map_jaxprs(without_debug_calls, e).replace(effects=e.effects - _DEBUG_EFFECTS) for e in eqns]
    return closed_like(x, jaxpr.replace(eqns=eqns, effects=jaxpr.effects - _DEBUG_EFFECTS))


def wait_for(tree: Any) -> None:
    """Wait until arrays are computed; raise the error of a function on the host that has failed meanwhile."""
    jax.block_until_ready([x for x in jax.tree.leaves(tree) if isinstance(x, ArrayImpl)])


def has_failed(tree: Any) -> bool:
    """Wait for arrays; whether a function on the host has raised meanwhile."""
    try:
        wait_for(tree)
    except Exception:  # the type is JAX's choice, and depends on when it is raised
        return True
    return False
