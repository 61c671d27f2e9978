"""Stage functions to jaxprs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jax._src import core as _core
from jax._src import linear_util as _lu
from jax._src import source_info_util
from jax._src.interpreters import partial_eval as _pe

from .equations import ArrayFunction, Jaxpr


def new_input(trace: Any, aval: Any) -> Any:
    """Add an argument to a trace of `stage` while its function is running; return the argument's tracer."""
    with source_info_util.user_context(None):
        return trace.new_arg(aval, source_info_util.current())


# Without the profiler's wrapper: each frame on the way to the user's function takes from the depth of nesting.
_trace: Any = getattr(_pe.trace_to_jaxpr_dynamic, "__wrapped__", _pe.trace_to_jaxpr_dynamic)


def stage(
    fun: ArrayFunction, avals: Sequence[Any], *, traced_for: str, name: str, names: Sequence[str] | None = None
) -> tuple[Jaxpr, list[Any]]:
    """Trace ``fun(*arrays) -> list of arrays`` to a jaxpr; return it with the values it closes over.

    The jaxpr's inputs are `avals`, then those added by `new_input`, in order. Errors raised while `fun` runs name them
    by `names` and the function by ``str(names)``; without an error `names` is never indexed. If they are given, `fun`
    ends with `forget_names`.
    """
    info: Any = _core.DebugInfo(traced_for, name if names is None else str(names), names, None)  # type: ignore[arg-type]
    jaxpr, _, consts = _trace(_lu.wrap_init(fun, debug_info=info), list(avals))
    return jaxpr, consts


def forget_names(trace: Any, traced_for: str, name: str) -> None:
    """Name no arguments in the jaxpr of a trace of `stage` that ends: the names hold the arguments alive."""
    trace.frame.debug_info = _core.DebugInfo(traced_for, name, None, None)


def name_function(
    fun: Callable[..., Any], transform: str, place: str, arguments: Sequence[str] | None = None
) -> Callable[..., Any]:
    """`fun`, which a transform of JAX is given in the place of the user's function: JAX's errors name this one, and its
    arguments.
    """
    names = None if arguments is None else tuple(arguments)
    fun.__fun_debug_info__ = _core.DebugInfo(transform, place, names, None)  # type: ignore[attr-defined]
    return fun


def name_as_staged(fun: Callable[..., Any], jaxpr: Jaxpr) -> Callable[..., Any]:
    """`name_function` by the function that a jaxpr was staged from."""
    info: Any = jaxpr.debug_info
    return name_function(fun, info.traced_for, info.func_src_info)


def variable_of(x: Any) -> Any:
    """The variable of a tracer in the jaxpr of its trace; None for another value."""
    return x.val if isinstance(x, _pe.DynamicJaxprTracer) else None
