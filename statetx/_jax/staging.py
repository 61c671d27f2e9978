"""Functions to jaxprs, and jaxprs into the trace that is running."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jax._src import core as _core
from jax._src import linear_util as _lu
from jax._src import source_info_util
from jax._src.interpreters import ad as _ad
from jax._src.interpreters import partial_eval as _pe

from .editing import interpret
from .equations import ClosedJaxpr, Jaxpr, open_jaxpr
from .traces import _context


def name_inputs(jitted: Any, operands: Sequence[Any], names: Sequence[str]) -> None:
    """Trace a function made by `jax.jit`, which keeps the trace, and name the inputs that its program for `operands` has."""
    jaxpr, _ = open_jaxpr(jitted.trace(*operands).jaxpr)
    info = getattr(jaxpr, "_debug_info", None)
    if info is not None:
        closed_over = ("",) * (len(jaxpr.invars) - len(names))
        jaxpr._debug_info = info._replace(arg_names=(*closed_over, *names))


def new_input(trace: Any, aval: Any) -> Any:
    """Add an argument to a trace made by `stage` while its function is running; returns the argument's tracer."""
    with source_info_util.user_context(None):
        return trace.new_arg(aval, source_info_util.current())


def stage(
    fun: Callable[..., list], avals: Sequence[Any], *, traced_for: str, name: str, names: Sequence[str] | None = None
) -> tuple[Jaxpr, list]:
    """Trace ``fun(*arrays) -> list of arrays`` to a jaxpr; return it with the values it closes over.

    The jaxpr's inputs are `avals` and then whatever `new_input` added, in that order. Errors raised while `fun` runs call
    them by `names`, which are not asked for otherwise, and the function ``str(names)``.
    """
    plain = _core.DebugInfo(traced_for, name, None, None)
    named: Any = plain if names is None else plain._replace(func_src_info=str(names), arg_names=names)

    def run(*tracers: Any) -> list:
        frame = _context.trace.frame
        try:
            return fun(*tracers)
        finally:
            frame.debug_info = plain  # names keep the arguments

    jaxpr, _, consts = _pe.trace_to_jaxpr_dynamic(_lu.wrap_init(run, debug_info=named), list(avals))
    return jaxpr, consts


def outputs_with_tangents(jaxpr: Jaxpr, given: Sequence[bool]) -> list[bool]:
    """Which outputs of a jaxpr have a tangent that is not zero by itself, where these inputs have one."""
    return list(_ad.jvp_jaxpr(ClosedJaxpr(jaxpr, ()), list(given), instantiate=False)[1])


def evaluate(jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    """Run a jaxpr's equations on `args`."""
    trace = _context.trace
    args = [*consts, *args]
    if isinstance(trace, _pe.DynamicJaxprTrace) and not (jaxpr.effects or jaxpr.is_high):
        variables = [*jaxpr.constvars, *jaxpr.invars]
        here = source_info_util.current()
        tracers = [trace.to_jaxpr_tracer(x, here) for x in args]
        if all(t.aval == v.aval for t, v in zip(tracers, variables, strict=True)):
            return _copy_equations(trace, jaxpr, tracers, here)
    return _core.jaxpr_as_fun(ClosedJaxpr(jaxpr, args[: len(consts)]))(*args[len(consts) :])


def _copy_equations(trace: Any, jaxpr: Jaxpr, tracers: Sequence[Any], here: Any) -> list[Any]:
    """Copy a jaxpr's equations to a trace that records them; `tracers` of that trace are its inputs.

    The result is that of running them one by one, for less: their types are known. (JAX's own
    ``inline_jaxpr_into_trace`` gives every equation the place of the call, and forgets the lines of the user's code.)
    """

    def rule(eqn: Any, operands: list[Any]) -> list[Any]:
        source = eqn.source_info.replace(name_stack=here.name_stack + eqn.source_info.name_stack)
        types = [v.aval for v in eqn.outvars]
        return trace.emit_eqn(operands, types, eqn.primitive, eqn.params, eqn.effects, source, eqn.ctx)

    literal = lambda atom: _pe.DynamicJaxprTracer(trace, atom.aval, atom, here)  # noqa: E731
    return interpret(jaxpr, tracers, rule, literal=literal)
