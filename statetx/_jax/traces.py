"""Traces: the current one, its parents, leaked tracers, source lines of the user's code."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

import jax
import jax.core
from jax._src import config as _config
from jax._src import core as _core
from jax._src import dtypes as _dtypes
from jax._src import hijax as _hijax
from jax._src import literals as _literals
from jax._src import source_info_util, traceback_util
from jax._src import util as _util
from jax._src.array import ArrayImpl as _ArrayImpl
from jax._src.interpreters import ad as _ad
from jax._src.interpreters import batching as _batching
from jax._src.interpreters import partial_eval as _pe

from . import patches

# The package's folder, seen from this file: if the file moves, so does the exclusion.
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
source_info_util.register_exclusion(os.path.join(_PACKAGE, ""))
patches.note(
    "the folders that jax._src.source_info_util leaves out",
    "JAX's messages and profiles name the user's line that called statetx, not a line of statetx.",
)
traceback_util.register_exclusion(_PACKAGE)
patches.note(
    "the folders that jax._src.traceback_util leaves out",
    "Tracebacks show the user's lines and the error, without lines of statetx; JAX_TRACEBACK_FILTERING=off shows all.",
)

api_boundary = traceback_util.api_boundary
"""Marks a function that users call: JAX filters the traceback of an exception that leaves the outermost of these."""

Tracer = jax.core.Tracer
TraceState = _core.OpaqueTraceState
ArrayImpl = _ArrayImpl
"""The type of concrete arrays. (A tracer is of an array or a Ref.)"""

LEAVES = frozenset([ArrayImpl, _ad.JVPTracer, _ad.LinearizeTracer, _batching.BatchTracer])
LEAVES |= frozenset([_pe.DynamicJaxprTracer, _pe.JaxprTracer])
"""Types that are always leaves of a tree: arrays and tracers."""

HiType, MappingSpec, HiPspec = _hijax.HiType, _hijax.MappingSpec, _hijax.HiPspec
"""Classes of hijax: of types, and of how `jax.vmap` maps their values and `jax.shard_map` divides them."""

# Some of these have a function for their type that raises an error.
_known = [cls for cls in _core.pytype_aval_mappings if not issubclass(cls, Tracer)]
_without_hi_type = {cls for cls in _known if cls.__module__.startswith(("builtins", "numpy", "jax."))}


def is_hi_value(x: Any) -> bool:
    """Whether `x` has a type of hijax, or is a tracer of one: JAX passes it as one value, which has no dtype."""
    if type(x) in _without_hi_type:
        return False
    if isinstance(x, Tracer):
        return isinstance(x.aval, HiType)
    typeof = _core.pytype_aval_mappings.get(type(x))
    return typeof is not None and isinstance(typeof(x), HiType)


def is_weak(aval: Any) -> bool:
    """Whether a type is weak; those of hijax never are."""
    return getattr(aval, "weak_type", False)


def strong_type(aval: Any) -> Any:
    """What two types have in common if they differ in weakness at most: shape, dtype and explicit sharding."""
    return aval if isinstance(aval, HiType) else (aval.shape, aval.dtype, aval.sharding.spec)


_context = _core.trace_ctx
eager_trace = _core.eval_trace

# JAX's labels for traces of loop bodies (`DebugInfo.traced_for`); statetx gives the same ones to `stage`.
_LOOP_BODIES = frozenset({"scan", "while_body", "fori_loop"})
PACKAGE_FOLDER = os.path.join(_PACKAGE, "")
JAX_FOLDER = os.path.join(os.path.dirname(jax.__file__), "")  # ends with a separator: not `jaxopt`


UNKNOWN_SITE = "unknown place"


def traceback_site(traceback: Any, folders: tuple[str, ...]) -> str:
    """``file:line`` of the innermost frame of a JAX traceback outside of these folders."""
    file, line, _ = traceback_frame(traceback, folders) or ("", 0, "")
    return f"{file}:{line}" if file else UNKNOWN_SITE


def traceback_frame(
    traceback: Any, folders: tuple[str, ...], unless: Callable[[str], bool] = lambda file: False
) -> tuple[str, int, str] | None:
    """File, line and function of the innermost frame of a JAX traceback outside of these folders and such files."""
    for frame in traceback.frames if traceback is not None else ():
        if not (frame.file_name.startswith(folders) or unless(frame.file_name)):
            return frame.file_name, frame.line_num, frame.function_name
    return None


def frames_of(eqn: Any) -> list[tuple[CodeType, int]]:
    """The code of each function behind an equation, with the offset of its instruction, outermost first. They begin at
    the function that JAX traced.
    """
    traceback = eqn.source_info.traceback
    return [] if traceback is None else [*zip(*traceback.raw_frames(), strict=True)][::-1]


LITERALS = (_literals.TypedInt, _literals.TypedFloat, _literals.TypedComplex, _literals.TypedNdArray)
"""Types that JAX uses for constants made while tracing; they become arrays when the trace ends."""


def current_trace() -> Any:
    """The JAX trace that operations go to; `is_eager` tells whether it executes them."""
    return _context.trace


def is_eager() -> bool:
    """Whether nothing is being traced: operations execute at once."""
    return _context.trace is eager_trace


def has_tracers(tree: Any) -> bool:
    """Whether a leaf is a tracer."""
    return any(isinstance(x, Tracer) for x in jax.tree.leaves(tree))


def trace_ref(trace: Any) -> weakref.ref | None:
    """A weak reference to a trace; None for the eager trace."""
    return None if trace is eager_trace else weakref.ref(trace)


def _tag(trace: Any) -> Any:
    # One transform may use several trace objects (rules of custom derivatives do), which share a tag.
    return getattr(trace, "tag", None) or trace


def _parents(trace: Any) -> Iterator[Any]:
    """The trace and its parents, innermost first, as far as JAX links them (shard_map's trace has no link)."""
    while trace is not None and trace is not eager_trace:
        yield trace
        trace = getattr(trace, "parent_trace", None)


def leaked_tracers(value: Any, anchor: Any | None) -> list[Any]:
    """Tracers in `value` that belong neither to the trace `anchor` (None: the eager trace) nor to a parent of it."""
    tracers = [leaf for leaf in jax.tree.leaves(value) if isinstance(leaf, Tracer)]
    if not tracers:
        return []
    # The anchor's own tracers may stay: the owner of that trace removes them. So may tracers of its parents, which
    # outlive it.
    outer = {id(_tag(t)) for t in _parents(eager_trace if anchor is None else anchor)}
    return [t for t in tracers if id(_tag(t._trace)) not in outer]


_TRANSFORM_OF_TRACE = {
    "JVPTrace": "grad",
    "LinearizeTrace": "grad",
    "BatchTrace": "vmap",
    "ShardMapTrace": "shard_map",
}

_TRANSFORM_OF_BODY = {
    "while_body": "while_loop",
    "while_cond": "while_loop",
    "checkpoint / remat": "checkpoint",
    "remat3": "checkpoint",
}


def is_live(trace: Any) -> bool:
    """Whether a trace is the current one or a parent of it; errs towards True in a shard_map, whose trace JAX does not
    link.
    """
    if any(_tag(t) is _tag(trace) for t in _parents(_context.trace)):
        return True
    return bool(jax.sharding.get_abstract_mesh().manual_axes)


def ends_with_current_trace(tracer: Any) -> bool:
    """Whether a tracer becomes unusable when the current trace ends."""
    return _tag(tracer._trace) is _tag(_context.trace) or not is_live(tracer._trace)


def transform_name(trace: Any) -> str:
    """The name in `jax` of the transform that a trace belongs to: ``"jit"``, ``"grad"`` (for any derivative),
    ``"vmap"``, ``"scan"`` ...
    """
    name = type(trace).__name__
    if name == "DynamicJaxprTrace":
        info = trace.frame.debug_info
        body = "jit" if info is None else info.traced_for.removeprefix("statetx.")
        return _TRANSFORM_OF_BODY.get(body, body)
    return _TRANSFORM_OF_TRACE.get(name, name)


def is_derivative_or_batching(trace: Any) -> bool:
    """Whether a trace belongs to a derivative, a vmap or a shard_map, which stages nothing."""
    return type(trace).__name__ in _TRANSFORM_OF_TRACE


def is_differentiated_or_batched(x: Any) -> bool:
    """Whether a value is traced by a derivative, a vmap or a shard_map."""
    return isinstance(x, Tracer) and is_derivative_or_batching(x._trace)


def staging_trace(trace: Any) -> Any:
    """The trace, or the nearest one around it that is not of a derivative or a vmap: it records operations, or executes
    them.
    """
    while type(trace).__name__ in _TRANSFORM_OF_TRACE and hasattr(trace, "parent_trace"):
        trace = trace.parent_trace
    return trace


def constants_of(trace: Any) -> list[Any]:
    """The values that the equations which a trace has recorded so far close over; none if it records no equations."""
    return list(getattr(getattr(trace, "frame", None), "constvar_to_val", {}).values())


def in_loop_body() -> bool:
    """Whether the current trace is itself the trace of a loop body, not of a transform inside one."""
    return _traced_for(_context.trace) in _LOOP_BODIES


def _traced_for(trace: Any) -> str | None:
    """JAX's label of a trace that stages; None for others, such as grad's and vmap's."""
    info = getattr(getattr(trace, "frame", None), "debug_info", None)
    return None if info is None else info.traced_for


cache_key_context = jax.make_user_context(None)
"""``cache_key_context(key)``: a context that makes `key` a part of the keys of JAX's trace caches."""


def is_jit_disabled() -> bool:
    """Whether `jax.disable_jit` is on."""
    return _config.disable_jit.value


def checks_keys() -> bool:
    """Whether ``jax_debug_key_reuse`` is on."""
    return _config.debug_key_reuse.value


def trace_context() -> Any:
    """Settings of JAX that a trace depends on, all of them as one hashable value."""
    return _config.trace_context()


def eval_context() -> Any:
    """Run a block outside of all traces."""
    return _core.set_current_trace(eager_trace)


def primal_of(x: Any) -> Any:
    """The primal of a tracer of a derivative; None for any other value."""
    return x.primal if isinstance(x, (_ad.JVPTracer, _ad.LinearizeTracer)) else None


def is_jitted(fun: Any) -> bool:
    """Whether `fun` is what `jax.jit` returns."""
    return isinstance(fun, type(jax.jit(lambda: None)))


def static_arguments(jitted: Any) -> tuple[Any, Any]:
    """The positions and the names of the static arguments of a function that `jax.jit` returns."""
    return jitted._jit_info.static_argnums, jitted._jit_info.static_argnames


def in_parent_trace(trace: Any) -> Any:
    """Make the parent of this trace the current trace for a block."""
    # The trace of a shard_map that is not compiled has no parent: it runs in eager code.
    return _core.set_current_trace(getattr(trace, "parent_trace", eager_trace))


def in_trace(trace: Any) -> Any:
    """Make this trace the current one for a block."""
    return _core.set_current_trace(trace)


def is_differentiated(x: Any) -> bool:
    """Whether `x` is a tracer of a transform that differentiates."""
    return isinstance(x, Tracer) and _is_derivative(x._trace)


def derivatives_of(value: Any) -> Iterator[Any]:
    """The traces of the derivatives that differentiate the leaves of a value, innermost first."""
    for x in jax.tree.leaves(value):
        while isinstance(x, (_ad.JVPTracer, _ad.LinearizeTracer, _batching.BatchTracer)):
            if not isinstance(x, _batching.BatchTracer):
                yield x._trace
            x = x.val if isinstance(x, _batching.BatchTracer) else x.primal


def is_run_outside(derivative: Any) -> bool:
    """Whether operations go to the trace around a derivative's, as in a derivative rule that JAX runs for it."""
    trace = _context.trace
    while trace is not derivative.parent_trace:
        if _tag(trace) is _tag(derivative) or not (
            _is_derivative(trace) or type(trace).__name__ in ("BatchTrace", "JaxprTrace")
        ):
            return False
        trace = trace.parent_trace
    return True


def _is_derivative(trace: Any) -> bool:
    return type(trace).__name__ in ("JVPTrace", "LinearizeTrace")


def is_batched(x: Any, trace: Any) -> bool:
    """Whether `x` differs between the examples of the `jax.vmap` that `trace` belongs to."""
    return isinstance(x, _batching.BatchTracer) and x._trace is trace and x.batch_dim is not None


def is_of_current_trace(x: Any) -> bool:
    """Whether `x` is a tracer of the current trace."""
    return isinstance(x, Tracer) and _tag(x._trace) is _tag(_context.trace)


def is_usable_here(x: Any) -> bool:
    """Whether operations accept the tracer `x`: one of the current trace, or of a trace below it in the same
    program.
    """
    for trace in _parents(_context.trace):
        if _tag(x._trace) is _tag(trace):
            return True
        if type(trace).__name__ not in ("JVPTrace", "LinearizeTrace", "BatchTrace"):
            return False  # a program of its own: a tracer of one around it would be closed over
    return False


def register_cache(cache: Any, name: str) -> None:
    """Let ``jax.clear_caches`` call `cache.cache_clear()`; JAX holds the cache weakly."""
    _util.register_cache(cache, name)


def refuse_as_value(cls: type, refuse: Callable[[Any], Any]) -> None:
    """Let JAX call `refuse` with an instance of the class where it needs an array; it raises an error.

    The error must not be a `TypeError`, which JAX replaces by one about ``static_argnums``.
    """
    _core.pytype_aval_mappings[cls] = refuse
    _without_hi_type.add(cls)
    _dtypes.canonicalize_value_handlers[cls] = refuse
