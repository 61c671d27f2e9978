"""Stage functions to jaxprs, and evaluate jaxprs in the current trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jax._src import core as _core
from jax._src import linear_util as _lu
from jax._src import source_info_util
from jax._src.interpreters import ad as _ad
from jax._src.interpreters import partial_eval as _pe

from .editing import interpret
from .equations import ClosedJaxpr, Jaxpr, as_array, open_jaxpr
from .traces import _context


def name_inputs(jitted: Any, operands: Sequence[Any], names: Sequence[str]) -> None:
    """Name the inputs of a `jax.jit` function's program for `operands`, by tracing it now; JAX caches the trace."""
    jaxpr, _ = open_jaxpr(jitted.trace(*operands).jaxpr)

    # The lowering reads names from the cached trace, so changing them there costs nothing in later calls (decision
    # 10).
    info = getattr(jaxpr, "_debug_info", None)
    if info is not None:
        closed_over = ("",) * (len(jaxpr.invars) - len(names))
        jaxpr._debug_info = info._replace(arg_names=(*closed_over, *names))


def new_input(trace: Any, aval: Any) -> Any:
    """Add an argument to a trace of `stage` while its function is running; return the argument's tracer."""
    with source_info_util.user_context(None):
        return trace.new_arg(aval, source_info_util.current())


def stage(
    fun: Callable[..., list], avals: Sequence[Any], *, traced_for: str, name: str, names: Sequence[str] | None = None
) -> tuple[Jaxpr, list]:
    """Trace ``fun(*arrays) -> list of arrays`` to a jaxpr; return it with the values it closes over.

    The jaxpr's inputs are `avals`, then those added by `new_input`, in order. Errors raised while `fun` runs name them
    by `names` and the function by ``str(names)``; without an error `names` is never indexed.
    """
    unnamed_info = _core.DebugInfo(traced_for, name, None, None)
    info: Any = unnamed_info if names is None else unnamed_info._replace(func_src_info=str(names), arg_names=names)

    def run(*tracers: Any) -> list:
        frame = _context.trace.frame
        try:
            return fun(*tracers)
        finally:
            frame.debug_info = unnamed_info  # `names` holds the arguments alive

    jaxpr, _, consts = _pe.trace_to_jaxpr_dynamic(_lu.wrap_init(run, debug_info=info), list(avals))
    return jaxpr, consts


def name_function(fun: Callable, transform: str, place: str, arguments: Sequence[str] | None = None) -> Callable:
    """`fun`, which a transform of JAX is given in the place of the user's function: JAX's errors name this one, and its
    arguments.
    """
    names = None if arguments is None else tuple(arguments)
    fun.__fun_debug_info__ = _core.DebugInfo(transform, place, names, None)  # type: ignore[attr-defined]
    return fun


def name_as_staged(fun: Callable, jaxpr: Jaxpr) -> Callable:
    """`name_function` by the function that a jaxpr was staged from."""
    info: Any = jaxpr.debug_info
    return name_function(fun, info.traced_for, info.func_src_info)


def variable_of(x: Any) -> Any:
    """The variable that a tracer stands for in the jaxpr of its trace; None for another value."""
    return x.val if isinstance(x, _pe.DynamicJaxprTracer) else None


def outputs_with_tangents(jaxpr: Jaxpr, has_tangent: Sequence[bool]) -> list[bool]:
    """Tell for each output of a jaxpr whether its tangent may be nonzero; `has_tangent` says the same of the inputs."""
    return list(_ad.jvp_jaxpr(ClosedJaxpr(jaxpr, ()), list(has_tangent), instantiate=False)[1])


def steps_with_tangents(
    jaxpr: Jaxpr, has_tangent: Sequence[bool], num_constants: int, num_carry: int
) -> tuple[list[bool], list[bool]]:
    """Tell for each input and output of a loop's body if its tangent may be nonzero in some step; `has_tangent` says
    it of what the loop begins with.

    A fixed point, as in JAX's own rule for `scan`: a carry whose tangent becomes nonzero in one step may make others
    nonzero in the next.
    """
    flags, first, last = list(has_tangent), num_constants, num_constants + num_carry
    while True:  # flags only change from False to True, so it ends after at most one turn for each carry
        outs = outputs_with_tangents(jaxpr, flags)
        carry = [a or b for a, b in zip(flags[first:last], outs, strict=False)]
        if carry == flags[first:last]:
            return flags, outs
        flags[first:last] = carry


def compile_settings(lowered: Any) -> list[str]:
    """Settings that the compiler gets with a lowered program (``jax.stages.Lowered``) beside its text."""
    computation = lowered._lowering
    names = ("in_shardings", "out_shardings", "in_layouts", "out_layouts", "num_devices")
    return [repr(x) for x in (computation._compiler_options_kvs, *map(computation.compile_args.get, names))]


def num_devices_of(lowered: Any) -> int | None:
    """The number of devices that a lowered program (``jax.stages.Lowered``) runs on; None if it does not say."""
    return lowered._lowering.compile_args.get("num_devices") or None


def evaluate(jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    """Evaluate a jaxpr on `args` in the current trace."""
    trace = _context.trace
    args = [*consts, *args]
    if isinstance(trace, _pe.DynamicJaxprTrace) and not (jaxpr.effects or jaxpr.is_high):
        variables = [*jaxpr.constvars, *jaxpr.invars]
        source = source_info_util.current()
        # Copied only if every argument has the very type that the jaxpr was staged for. Another weak type or sharding
        # may change the types of results, which JAX must then infer again.
        tracers = [trace.to_jaxpr_tracer(as_array(x), source) for x in args]
        if all(t.aval == v.aval for t, v in zip(tracers, variables, strict=True)):
            return _copy_equations(trace, jaxpr, tracers, source)
    return _core.jaxpr_as_fun(ClosedJaxpr(jaxpr, args[: len(consts)]))(*args[len(consts) :])


def evaluate_checked(jaxpr: Jaxpr, args: Sequence[Any]) -> list[Any]:
    """Evaluate a jaxpr without constants operation by operation, each checked under ``jax.debug_nans``; `evaluate` does
    not check.

    For JAX's second run of a compiled function that has returned a NaN, which is to name the operation.
    """
    return _core.eval_jaxpr(jaxpr, (), *args)


def _copy_equations(trace: Any, jaxpr: Jaxpr, tracers: Sequence[Any], call_source: Any) -> list[Any]:
    """Copy a jaxpr's equations to a trace that records them; `tracers` of that trace are its inputs.

    The result is the same as binding them one by one, but faster: their types are known. JAX's
    ``inline_jaxpr_into_trace`` was rejected: it gives every equation the source line of the call, so the lines of the
    user's code would be lost.
    """

    def rule(eqn: Any, operands: list[Any]) -> list[Any]:
        source = eqn.source_info.replace(name_stack=call_source.name_stack + eqn.source_info.name_stack)
        types = [v.aval for v in eqn.outvars]
        return trace.emit_eqn(operands, types, eqn.primitive, eqn.params, eqn.effects, source, eqn.ctx)

    literal = lambda atom: _pe.DynamicJaxprTracer(trace, atom.aval, atom, call_source)
    return interpret(jaxpr, tracers, rule, literal=literal)
