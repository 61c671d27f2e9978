"""Stage functions to jaxprs, evaluate and edit jaxprs, and lower programs, also for devices that are not there."""

from __future__ import annotations

import contextlib
import copy
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax.extend.core
import jax.numpy as jnp
from jax._src import config, source_info_util
from jax._src import core as _core
from jax._src import linear_util as _lu
from jax._src.interpreters import ad as _ad
from jax._src.interpreters import partial_eval as _pe
from jax._src.interpreters import pxla
from jax._src.sharding_impls import UNSPECIFIED  # pyright: ignore[reportPrivateImportUsage]
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from .equations import ClosedJaxpr, Jaxpr, Literal, Var, as_array, is_jaxpr, open_jaxpr
from .loops import loop_of, scan_counts, scan_p, with_body
from .traces import _context
from .versions import is_check_missing

_value_of = operator.attrgetter("val")


def bind_equation(
    eqn: Any, params: dict[str, Any], args: Sequence[Any], context: contextlib.AbstractContextManager | None = None
) -> list[Any]:
    """Run one equation on `args` with these parameters; its operations keep the source line and name stack of `eqn`.

    Args:
        context: in the place of the settings that the equation was traced under.
    """
    # `eqn.ctx` has the settings that the equation was traced under, such as the mesh; lowering looks them up there.
    name_stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
    with source_info_util.user_context(eqn.source_info.traceback, name_stack=name_stack), context or eqn.ctx.manager:
        outs = eqn.primitive.bind(*args, **eqn.primitive.get_bind_params(params))
    return outs if eqn.primitive.multiple_results else [outs]


def interpret(
    jaxpr: Any, args: Sequence[Any], rule: Callable[[Any, list[Any]], Sequence[Any]], *, literal: Callable = _value_of
) -> list[Any]:
    """Evaluate a jaxpr over any domain; return its outputs in that domain.

    Args:
        jaxpr: any object with `constvars`, `invars`, `outvars` and `eqns`; each equation has `invars` and `outvars`.
        args: values of its constants and then of its inputs.
        rule: ``(equation, operands) -> results``.
        literal: maps a literal to the domain; by default to its value.
    """
    env = dict(zip([*jaxpr.constvars, *jaxpr.invars], args, strict=True))

    def read(atom: Any) -> Any:
        return literal(atom) if isinstance(atom, Literal) else env[atom]

    for eqn in jaxpr.eqns:
        env.update(zip(eqn.outvars, rule(eqn, [read(v) for v in eqn.invars]), strict=True))
    return [read(v) for v in jaxpr.outvars]


def function_of(eqn: Any) -> Jaxpr:
    """A jaxpr of this one equation; its inputs are the variables among the operands."""
    # An operand that is read twice is one input. Literals stay in the equation.
    invars = list(dict.fromkeys(v for v in eqn.invars if isinstance(v, Var)))
    outvars = [Var(v.aval) for v in eqn.outvars]
    info = _core.DebugInfo("statetx", eqn.primitive.name, None, None)
    return Jaxpr([], invars, outvars, [eqn.replace(outvars=outvars)], eqn.effects, info)


class _EditChecks:
    """Whether edited jaxprs are type-checked. A check costs about as much as the edit."""

    on = False


def check_edits(on: bool = True) -> bool:
    """Switch type checks of edited jaxprs on or off; return the former setting."""
    former, _EditChecks.on = _EditChecks.on, on
    return former


def _checked(jaxpr: Jaxpr) -> Jaxpr:
    """Return the jaxpr after JAX's check that each variable is defined once, before its uses, with the right type.

    The body of a `jax.shard_map` alone is not checked: its axis names are bound only within the program that contains
    it.
    """
    if _EditChecks.on and not any(map(_is_manual, (v.aval for v in (*jaxpr.invars, *jaxpr.outvars)))):
        try:
            jax.extend.core.check_jaxpr(jaxpr)
        except NameError:  # an axis of a `jax.shard_map` that types do not show (check_vma=False)
            pass
        except TypeError as e:
            if not is_check_missing(e):
                raise
    return jaxpr


def _is_manual(aval: Any) -> bool:
    sharding = getattr(aval, "sharding", None)
    return sharding is not None and bool(sharding.mesh.manual_axes)


def rebuild(jaxpr: Jaxpr, *, invars: Sequence[Any], outvars: Sequence[Any], eqns: Sequence[Any] | None = None) -> Jaxpr:
    """Replace a jaxpr's inputs, outputs and equations; the result has no constants."""
    # The names of inputs and outputs are by position, and would name others now.
    info = jaxpr.debug_info._replace(arg_names=None, result_paths=None)
    eqns = jaxpr.eqns if eqns is None else list(eqns)
    return _checked(jaxpr.replace(constvars=[], invars=list(invars), outvars=list(outvars), eqns=eqns, debug_info=info))


def constants_as_inputs(jaxpr: Jaxpr) -> Jaxpr:
    """The jaxpr with its constants as the first inputs."""
    if not jaxpr.constvars:
        return jaxpr
    return rebuild(jaxpr, invars=[*jaxpr.constvars, *jaxpr.invars], outvars=jaxpr.outvars)


def with_literals(jaxpr: Jaxpr, literals: dict[Any, Any]) -> Jaxpr:
    """Replace some inputs of a jaxpr by literals; the result has no constants."""

    def read(atom: Any) -> Any:
        return atom if isinstance(atom, Literal) else literals.get(atom, atom)

    eqns = [e.replace(invars=[read(v) for v in e.invars]) for e in jaxpr.eqns]
    invars = [v for v in jaxpr.invars if v not in literals]
    return rebuild(jaxpr, invars=invars, outvars=[read(v) for v in jaxpr.outvars], eqns=eqns)


def without_dead_code(jaxpr: Any) -> Jaxpr:
    """Remove equations that the outputs do not need, also within loops and regions; the jaxpr may be closed."""
    jaxpr, _ = open_jaxpr(jaxpr)
    return _pe.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)[0]


def with_dropped_results(jaxpr: Jaxpr) -> Jaxpr:
    """Drop the results that nothing reads."""
    read = {v for atoms in (jaxpr.outvars, *(e.invars for e in jaxpr.eqns)) for v in atoms if isinstance(v, Var)}
    drop = lambda eqn: eqn.replace(outvars=[v if v in read else _core.DropVar(v.aval) for v in eqn.outvars])
    return jaxpr.replace(eqns=[eqn if read.issuperset(eqn.outvars) else drop(eqn) for eqn in jaxpr.eqns])


def map_jaxprs(fun: Callable[[Any], Any], eqn: Any) -> Any:
    """Apply `fun` to each jaxpr in an equation, closed or not; in a `CustomLoop`, to the body of a step.

    Returns `eqn` itself if no jaxpr changes.
    """
    loop = loop_of(eqn)
    if loop is not None:
        body = fun(loop.body)
        return eqn if body is loop.body else with_body(eqn, body)

    def apply(x: Any) -> Any:
        if isinstance(x, (tuple, list)) and any(map(is_jaxpr, x)):
            # A tuple of branches stays a tuple; a NamedTuple's constructor takes its fields one by one.
            return getattr(x, "_make", type(x))([apply(v) for v in x])
        return fun(x) if is_jaxpr(x) else x

    params = {key: apply(value) for key, value in eqn.params.items()}
    return eqn if all(params[k] is v for k, v in eqn.params.items()) else eqn.replace(params=params)


def with_equations(x: Any, eqns: Sequence[Any]) -> Any:
    """Replace the equations of a jaxpr, closed or not; inputs and outputs stay."""
    if isinstance(x, Jaxpr):
        return _checked(x.replace(eqns=list(eqns)))
    return ClosedJaxpr(_checked(x.jaxpr.replace(eqns=list(eqns))), x.consts)


def closed_like(x: Any, jaxpr: Jaxpr) -> Any:
    """Close `jaxpr`, which has no constants, if `x` is closed: a primitive's parameter is always one or always the
    other.
    """
    return jaxpr if isinstance(x, Jaxpr) else ClosedJaxpr(jaxpr, ())


def named_like(closed: ClosedJaxpr, like: Jaxpr) -> ClosedJaxpr:
    """A closed jaxpr with the names of the inputs and outputs of another, which has as many of both."""
    jaxpr, consts = open_jaxpr(closed)
    return ClosedJaxpr(jaxpr.replace(debug_info=like.debug_info), consts)


def spliced(jaxpr: Jaxpr, sources: Sequence[Any], targets: Sequence[Any], like: Any) -> list[Any]:
    """The equations of a jaxpr without constants between other variables, with the source line of the equation
    `like`.
    """
    eqns: list[Any] = []

    def copied(eqn: Any, operands: list[Any]) -> list[Any]:
        outvars = [Var(v.aval) for v in eqn.outvars]
        eqns.append(eqn.replace(invars=operands, outvars=outvars, source_info=like.source_info))
        return outvars

    outs = interpret(jaxpr, sources, copied, literal=lambda atom: atom)
    renamed = dict(zip(outs, targets, strict=True))
    return [e.replace(outvars=[renamed.get(v, v) for v in e.outvars]) for e in eqns]


def is_unplaced(eqn: Any) -> bool:
    """Whether the equation of a ``jax.jit`` says nothing of shardings, layouts, donation or options of the compiler."""
    params = eqn.params
    is_unspecified = all(x is UNSPECIFIED for x in (*params["in_shardings"], *params["out_shardings"]))
    layouts = (*params["in_layouts"], *params["out_layouts"])
    return is_unspecified and not (any(params["donated_invars"]) or params["compiler_options_kvs"] or any(layouts))


def with_scope(eqn: Any, name: str) -> Any:
    """Add a name to the equation's name stack; everything that JAX derives from the equation inherits it."""
    info = eqn.source_info
    return eqn.replace(source_info=info.replace(name_stack=info.name_stack.extend(name)))


def inlined(eqn: Any, outer: Any, *, same_line: bool, **changes: Any) -> Any:
    """An equation of the jaxpr in `outer`, below the name stack of `outer`; with `same_line` also at its
    source line.
    """
    info, outer_info = eqn.source_info, outer.source_info
    info = info.replace(name_stack=outer_info.name_stack + info.name_stack)
    return eqn.replace(source_info=info.replace(traceback=outer_info.traceback) if same_line else info, **changes)


def new_input(trace: Any, aval: Any) -> Any:
    """Add an argument to a trace of `stage` while its function is running; return the argument's tracer."""
    with source_info_util.user_context(None):
        return trace.new_arg(aval, source_info_util.current())


# Without the profiler's wrapper: each frame on the way to the user's function takes from the depth of nesting.
_trace: Any = getattr(_pe.trace_to_jaxpr_dynamic, "__wrapped__", _pe.trace_to_jaxpr_dynamic)


def stage(
    fun: Callable[..., list], avals: Sequence[Any], *, traced_for: str, name: str, names: Sequence[str] | None = None
) -> tuple[Jaxpr, list]:
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
    """The variable of a tracer in the jaxpr of its trace; None for another value."""
    return x.val if isinstance(x, _pe.DynamicJaxprTracer) else None


def outputs_with_tangents(jaxpr: Jaxpr, has_tangent: Sequence[bool]) -> list[bool]:
    """Tell for each output of a jaxpr whether its tangent may be nonzero; `has_tangent` says the same of the inputs."""
    return list(_ad.jvp_jaxpr(ClosedJaxpr(jaxpr, ()), list(has_tangent), instantiate=False)[1])


def steps_with_tangents(
    jaxpr: Jaxpr, has_tangent: Sequence[bool], num_constants: int, num_carry: int
) -> tuple[list[bool], list[bool]]:
    """Tell for each input and output of a loop's body if its tangent may be nonzero in some step; `has_tangent` says
    it of the loop's operands.

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


def evaluate_single_turns(
    jaxpr: Jaxpr, args: Sequence[Any], is_stacked: Sequence[bool], is_out_stacked: Sequence[bool]
) -> list[Any]:
    """Evaluate a jaxpr without constants, with the bodies of its scans of length 1 in their places.

    Args:
        is_stacked: for each input, whether the argument is the only element of the array that the jaxpr takes;
            `is_out_stacked` says it of results.
    """
    values: dict[Any, Any] = {}
    elements: dict[Any, Any] = {}  # what passes from scan to scan is not stacked in between
    for v, x, flag in zip(jaxpr.invars, args, is_stacked, strict=True):
        (elements if flag else values)[v] = x

    def read(v: Any) -> Any:
        if isinstance(v, Literal):
            return v.val
        return values[v] if v in values else elements[v][None]

    def element(v: Any) -> Any:
        return elements[v] if not isinstance(v, Literal) and v in elements else jnp.asarray(read(v))[0]

    for eqn in jaxpr.eqns:
        if eqn.primitive is scan_p and eqn.params["length"] == 1 and not eqn.effects:
            body, consts = open_jaxpr(eqn.params["jaxpr"])
            num_consts, num_carry = scan_counts(eqn)
            first_x = num_consts + num_carry
            if len(body.outvars) == len(eqn.outvars):  # JAX 0.12 may forward some
                x = map(element, eqn.invars[first_x:])
                outs = evaluate(body, consts, [*map(read, eqn.invars[:first_x]), *x])
                values.update(zip(eqn.outvars[:num_carry], outs, strict=False))
                elements.update(zip(eqn.outvars[num_carry:], outs[num_carry:], strict=True))
                continue
        values.update(zip(eqn.outvars, bind_equation(eqn, eqn.params, [read(v) for v in eqn.invars]), strict=True))
    return [element(v) if flag else read(v) for v, flag in zip(jaxpr.outvars, is_out_stacked, strict=True)]


def compile_settings(lowered: Any) -> list[str]:
    """Settings that the compiler gets with a lowered program (``jax.stages.Lowered``) beside its text."""
    computation = lowered._lowering
    names = ("in_shardings", "out_shardings", "in_layouts", "out_layouts", "num_devices")
    return [repr(x) for x in (computation._compiler_options_kvs, *map(computation.compile_args.get, names))]


def num_devices_of(lowered: Any) -> int | None:
    """The number of devices that a lowered program (``jax.stages.Lowered``) runs on; None if it does not say."""
    return lowered._lowering.compile_args.get("num_devices") or None


def num_parts_of(lowered: Any) -> int:
    """The number of parts that the inputs of a lowered program are divided into, by the axes of the mesh that they use;
    1 if each device has all of them.
    """
    sizes: dict[str, int] = {}
    for sharding in lowered._lowering.compile_args["in_shardings"]:
        if isinstance(sharding, jax.sharding.NamedSharding):
            axes = [axis for entry in sharding.spec for axis in (entry if isinstance(entry, tuple) else (entry,))]
            sizes |= {axis: sharding.mesh.shape[axis] for axis in axes if axis in sharding.mesh.shape}
    return math.prod(sizes.values())


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


# -- programs for devices that are not there ------------------------------------------------------------------------

# A program is traced for the devices of this machine: its arguments, meshes and constraints name them. `lowered_for`
# lowers it by the rules of another platform and exchanges the devices of the module, which names devices by their
# number only.

_LOWERING_NAMES = {"gpu": "cuda"}


class CallOperand(NamedTuple):
    """What a jitted function is called with: an argument, or its type; or a value that the program has inside."""

    value: Any
    name: str = ""
    is_donated: bool = False
    is_constant: bool = False


def traced_alone(eqn: Any, operands: Sequence[CallOperand]) -> Any:
    """The ``jax.stages.Traced`` of the jitted function that an equation calls, as if no other one called it: with
    its own order of inputs and outputs, shardings and donated arguments.
    """
    params, (jaxpr, consts) = eqn.params, open_jaxpr(eqn.params["jaxpr"])
    is_donated = [x.is_donated or flag for x, flag in zip(operands, params["donated_invars"], strict=True)]
    inputs = [(x, flag) for x, flag in zip(operands, is_donated, strict=True) if not x.is_constant]

    def run(*arrays: Any) -> list[Any]:
        remaining = iter(arrays)
        return evaluate(jaxpr, consts, [x.value if x.is_constant else next(remaining) for x in operands])

    run.__name__ = run.__qualname__ = params["name"]
    name_function(run, jaxpr.debug_info.traced_for, jaxpr.debug_info.func_src_info, [x.name for x, _ in inputs])
    shardings = [None if s is UNSPECIFIED else s for s in params["out_shardings"]]
    options: dict[str, Any] = {"out_shardings": shardings} if any(s is not None for s in shardings) else {}
    donated = tuple(n for n, (_, flag) in enumerate(inputs) if flag)
    jitted = jax.jit(run, donate_argnums=donated, keep_unused=params["keep_unused"], **options)
    return jitted.trace(*(x.value for x, _ in inputs))


class TooFewDevices(ValueError):
    """A program is for more devices (`needed`) than it can be compiled for."""

    def __init__(self, needed: int):
        super().__init__(needed)
        self.needed = needed


def lowered_for(traced: Any, platform: str, devices: Sequence[Any]) -> Any:
    """Lower a ``jax.stages.Traced`` for compile-only devices of a platform.

    Raises:
        TooFewDevices: the program is for more devices.
    """
    lowered = traced.lower(lowering_platforms=(_LOWERING_NAMES.get(platform, platform),))
    # JAX may keep both for another target.
    lowered, computation = copy.copy(lowered), copy.copy(lowered._lowering)
    num = computation.compile_args["num_devices"]
    if num > len(devices):
        raise TooFewDevices(num)
    # The module has the shardings of outputs. JAX would compare these with memories that a compile-only GPU does not
    # list.
    outputs = [UNSPECIFIED for _ in computation.compile_args["out_shardings"]]
    computation.compile_args = {**computation.compile_args, "backend": devices[0].client, "out_shardings": outputs}
    computation._device_list = pxla._create_device_list(tuple(devices[:num]))
    computation._executable = None
    lowered._lowering = computation
    return lowered


@contextlib.contextmanager
def without_compilation_cache() -> Iterator[None]:
    """Switch off JAX's cache of compiled programs on the disk for a block.

    The cache's key lacks the figures of a compile-only GPU, so that it would give one card's program for another; and
    it lacks the names of functions.
    """
    # JAX asks its setting once in a process, and remembers the answer until it is reset.
    with config.enable_compilation_cache(False):
        reset_cache()
        try:
            yield
        finally:
            reset_cache()
