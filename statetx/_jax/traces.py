"""Which trace is running, which tracers have ended, and lines of a user's code."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from typing import Any

import jax
import jax.core
from jax._src import config as _config
from jax._src import core as _core
from jax._src import literals as _literals
from jax._src import source_info_util
from jax._src import util as _util
from jax._src.array import ArrayImpl as _ArrayImpl
from jax._src.interpreters import ad as _ad
from jax._src.interpreters import batching as _batching
from jax._src.interpreters import partial_eval as _pe

from . import patches

source_info_util.register_exclusion(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
patches.note(
    "the folders that jax._src.source_info_util leaves out",
    "Lines of statetx are no lines of a user: JAX's messages and profiles name the line that called it.",
)
Tracer = jax.core.Tracer
TraceState = _core.OpaqueTraceState
ArrayImpl = _ArrayImpl
"""The type of arrays that are there; tracers may stand for a Ref as well."""

LEAVES = frozenset([ArrayImpl, _ad.JVPTracer, _ad.LinearizeTracer, _batching.BatchTracer])
LEAVES |= frozenset([_pe.DynamicJaxprTracer, _pe.JaxprTracer])
"""Types that no tree takes apart: those of arrays and tracers."""

_context = _core.trace_ctx
_eval_trace = _core.eval_trace

# What JAX calls the trace of a loop body (`DebugInfo.traced_for`); ours are named alike in `stage`.
_LOOP_BODIES = frozenset({"scan", "while_body", "fori_loop"})
JAX_FOLDER = os.path.dirname(jax.__file__)


def traceback_site(traceback: Any, folders: tuple[str, ...]) -> str:
    """``file:line`` of the innermost frame of a JAX traceback that lies in none of the folders."""
    file, line, _ = traceback_frame(traceback, folders) or ("", 0, "")
    return f"{file}:{line}" if file else "unknown place"


def traceback_frame(traceback: Any, folders: tuple[str, ...]) -> tuple[str, int, str] | None:
    """File, line and function of the innermost frame of a JAX traceback that lies in none of the folders."""
    for frame in traceback.frames if traceback is not None else ():
        if not frame.file_name.startswith(folders):
            return frame.file_name, frame.line_num, frame.function_name
    return None


LITERALS = (_literals.TypedInt, _literals.TypedFloat, _literals.TypedComplex, _literals.TypedNdArray)
"""What JAX gives in place of an array for a constant that is made while tracing; an array once the trace has ended."""


def current_trace() -> Any:
    """The JAX trace that operations go to now; `is_eager` says whether it is the one that executes."""
    return _context.trace


def is_eager() -> bool:
    """Whether nothing is being traced here: operations run at once."""
    return _context.trace is _eval_trace


def trace_ref(trace: Any) -> weakref.ref | None:
    """A weak reference to a trace, None for the eager one."""
    return None if trace is _eval_trace else weakref.ref(trace)


def _tag(trace: Any) -> Any:
    # One transform may use several trace objects (the rules of custom derivatives do); their tag is shared.
    return getattr(trace, "tag", None) or trace


def _parents(trace: Any) -> Iterator[Any]:
    """The trace and those around it, innermost first, as far as they are linked (shard_map's is not)."""
    while trace is not None and trace is not _eval_trace:
        yield trace
        trace = getattr(trace, "parent_trace", None)


def leaked_tracers(value: Any, anchor: Any | None) -> list[Any]:
    """Tracers in `value` that do not belong to the trace `anchor` (None: the eager one) or to one around it."""
    tracers = [leaf for leaf in jax.tree.leaves(value) if isinstance(leaf, Tracer)]
    if not tracers:
        return []
    outer = {id(_tag(t)) for t in _parents(_eval_trace if anchor is None else anchor)}
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
    """Whether a trace is the current one or one around it, as far as traces are linked."""
    around = list(_parents(_context.trace))
    return any(_tag(t) is _tag(trace) for t in around) or any(not hasattr(t, "parent_trace") for t in around)


def ends_with_current_trace(tracer: Any) -> bool:
    """Whether a tracer cannot be used when the current trace has ended."""
    return _tag(tracer._trace) is _tag(_context.trace) or not is_live(tracer._trace)


def transform_name(trace: Any) -> str:
    """The transform that a trace belongs to, as its name in `jax`: ``"jit"``, ``"grad"`` (for every kind of
    differentiation), ``"vmap"``, ``"scan"`` ..."""
    name = type(trace).__name__
    if name == "DynamicJaxprTrace":
        info = trace.frame.debug_info
        body = "jit" if info is None else info.traced_for.removeprefix("statetx.")
        return _TRANSFORM_OF_BODY.get(body, body)
    return _TRANSFORM_OF_TRACE.get(name, name)


def in_loop_body() -> bool:
    """Whether the current trace is, itself, that of a loop body (and not of a transform inside one)."""
    info = getattr(getattr(_context.trace, "frame", None), "debug_info", None)
    return info is not None and info.traced_for in _LOOP_BODIES


cache_key_context = jax.make_user_context(None)
"""``cache_key_context(key)``: a context whose traces JAX's caches keep apart from those under other keys."""


def is_jit_disabled() -> bool:
    """Whether `jax.disable_jit` is in force."""
    return _config.disable_jit.value


def checks_keys() -> bool:
    """Whether ``jax_debug_key_reuse`` is in force."""
    return _config.debug_key_reuse.value


def trace_context() -> Any:
    """Hashable: every JAX setting that a trace depends on."""
    return _config.trace_context()


def eval_context() -> Any:
    """A context in which nothing is being traced."""
    return _core.set_current_trace(_eval_trace)


def primal_of(x: Any) -> Any:
    """The value that a tracer of a derivative varies; None for others."""
    return x.primal if isinstance(x, (_ad.JVPTracer, _ad.LinearizeTracer)) else None


def in_parent_trace(trace: Any) -> Any:
    """A context in which operations go where they would outside the transform that this trace belongs to."""
    # That of a shard_map which is not compiled names none: it runs right in eager code.
    return _core.set_current_trace(getattr(trace, "parent_trace", _eval_trace))


def in_trace(trace: Any) -> Any:
    """A context in which this trace is the current one."""
    return _core.set_current_trace(trace)


def is_differentiated(x: Any) -> bool:
    """Whether `x` is what a transform that differentiates, around here, varies."""
    return isinstance(x, Tracer) and type(x._trace).__name__ in ("JVPTrace", "LinearizeTrace")


def is_batched(x: Any, trace: Any) -> bool:
    """Whether `x` differs between the examples of a `jax.vmap`, whose trace this is."""
    return isinstance(x, _batching.BatchTracer) and x._trace is trace and x.batch_dim is not None


def is_of_current_trace(x: Any) -> bool:
    """Whether `x` is a tracer of the current trace."""
    return isinstance(x, Tracer) and _tag(x._trace) is _tag(_context.trace)


def register_cache(cache: Any, name: str) -> None:
    """Have ``jax.clear_caches`` call `cache.cache_clear()`, as long as the cache is alive."""
    _util.register_cache(cache, name)
