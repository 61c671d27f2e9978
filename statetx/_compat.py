"""The only module that touches private names of JAX.

Supported are jax 0.10 to 0.12. Each private name stands here once, with what is relied upon; `tests/test_compat.py`
fails when one of these meanings shifts.
"""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import FunctionType
from typing import TYPE_CHECKING, Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax._src import ad_checkpoint as _ad_checkpoint
from jax._src import config as _config
from jax._src import core as _core
from jax._src import effects as _effects
from jax._src import linear_util as _lu
from jax._src import literals as _literals
from jax._src import source_info_util
from jax._src.ad_checkpoint import remat_p
from jax._src.ad_util import Zero as _Zero
from jax._src.ad_util import instantiate as _instantiate_zeros
from jax._src.array import ArrayImpl as _ArrayImpl
from jax._src.interpreters import ad as _ad
from jax._src.interpreters import batching as _batching
from jax._src.interpreters import mlir as _mlir
from jax._src.interpreters import partial_eval as _pe
from jax._src.lax import lax as _lax
from jax._src.lax.control_flow import loops as _loops
from jax._src.lax.control_flow.loops import scan_p
from jax._src.lib import version as _jaxlib_version
from jax._src.state.discharge import discharge_state as _discharge_state
from jax._src.state.types import AbstractRef as _AbstractRef
from jax.api_util import shaped_abstractify
from jax.custom_derivatives import SymbolicZero
from jaxlib.mlir import ir

try:
    # jax 0.12: `scan_p` has trees where it had numbers.
    from jax._src import flattree as _flattree  # pyright: ignore[reportAttributeAccessIssue]
except ImportError:
    _flattree = None

source_info_util.register_exclusion(__file__.rsplit("/", 1)[0])

Tracer = jax.core.Tracer
Jaxpr = _core.Jaxpr
if TYPE_CHECKING or hasattr(_core, "ClosedJaxpr"):
    ClosedJaxpr = _core.ClosedJaxpr
else:  # jax 0.12 has one class for both
    ClosedJaxpr = _core.Jaxpr
Literal = _core.Literal
Var = _core.Var
TraceState = _core.OpaqueTraceState
ArrayImpl = _ArrayImpl
"""The type of arrays that are there; tracers may stand for a Ref as well."""
LEAVES = frozenset([ArrayImpl, _ad.JVPTracer, _ad.LinearizeTracer, _batching.BatchTracer])
LEAVES |= frozenset([_pe.DynamicJaxprTracer, _pe.JaxprTracer])
"""Types that no tree takes apart: those of arrays and tracers."""
_context = _core.trace_ctx
_InternalRefEffect = _core.InternalMutableArrayEffect
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


# -- traces ----------------------------------------------------------------------------------------------------


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


traced_apart = jax.make_user_context(None)
"""``traced_apart(key)``: a context whose traces JAX's caches keep apart from those under other keys."""


def name_inputs(jitted: Any, operands: Sequence[Any], names: Sequence[str]) -> None:
    """Trace a function made by `jax.jit`, which keeps the trace, and name the inputs that its program for `operands` has."""
    jaxpr, _ = open_jaxpr(jitted.trace(*operands).jaxpr)
    info = getattr(jaxpr, "_debug_info", None)
    if info is not None:
        closed_over = ("",) * (len(jaxpr.invars) - len(names))
        jaxpr._debug_info = info._replace(arg_names=(*closed_over, *names))


def is_jit_disabled() -> bool:
    """Whether `jax.disable_jit` is in force."""
    return _config.disable_jit.value


def trace_context() -> Any:
    """Hashable: every JAX setting that a trace depends on."""
    return _config.trace_context()


# -- batching --------------------------------------------------------------------------------------------------


def batch_size(trace: Any) -> int:
    """How many examples the `jax.vmap` has whose trace this is."""
    return trace.axis_data.size


def batched(trace: Any, x: Any, axis: int) -> Any:
    """The tracer, in a `jax.vmap`, of one example of `x`, an array with one slice for each along `axis`."""
    return _batching.BatchTracer(trace, x, axis % len(x.shape), source_info_util.current())


def enclosing(trace: Any) -> Any:
    """A context in which operations go where they would outside the transform that this trace belongs to."""
    return _core.set_current_trace(trace.parent_trace)


def is_differentiated(x: Any) -> bool:
    """Whether `x` is what a transform that differentiates, around here, varies."""
    return isinstance(x, Tracer) and type(x._trace).__name__ in ("JVPTrace", "LinearizeTrace")


def is_batched(x: Any, trace: Any) -> bool:
    """Whether `x` differs between the examples of a `jax.vmap`, whose trace this is."""
    return isinstance(x, _batching.BatchTracer) and x._trace is trace and x.batch_dim is not None


# -- staging ---------------------------------------------------------------------------------------------------


def abstract(x: Any) -> Any:
    """The type (shape, dtype, weak type, sharding) that `x` has as an argument of a traced function."""
    return jax.typeof(x) if isinstance(x, jax.Array) else shaped_abstractify(x)


def new_input(trace: Any, aval: Any) -> Any:
    """Add an argument to a trace made by `stage` while its function is running; returns the argument's tracer."""
    with source_info_util.user_context(None):
        return trace.new_arg(aval, source_info_util.current())


def stage(fun: Callable[..., list], avals: Sequence[Any], *, kind: str, name: str) -> tuple[Jaxpr, list]:
    """Trace ``fun(*arrays) -> list of arrays`` to a jaxpr; return it with the values it closes over.

    The jaxpr's inputs are `avals` and then whatever `new_input` added, in that order.
    """
    info = _core.DebugInfo(kind, name, None, None)  # no names: arguments are still being added
    jaxpr, _, consts = _pe.trace_to_jaxpr_dynamic(_lu.wrap_init(fun, debug_info=info), list(avals))
    return jaxpr, consts


def evaluate(jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    """Run a jaxpr's equations on `args`."""
    trace = _context.trace
    args = [*consts, *args]
    if isinstance(trace, _pe.DynamicJaxprTrace) and not (jaxpr.effects or jaxpr.is_high):
        variables = [*jaxpr.constvars, *jaxpr.invars]
        here = source_info_util.current()
        tracers = [trace.to_jaxpr_tracer(x, here) for x in args]
        if all(t.aval == v.aval for t, v in zip(tracers, variables, strict=True)):
            return _copy_equations(trace, jaxpr, dict(zip(variables, tracers, strict=True)), here)
    return _core.jaxpr_as_fun(ClosedJaxpr(jaxpr, args[: len(consts)]))(*args[len(consts) :])


def _copy_equations(trace: Any, jaxpr: Jaxpr, env: dict[Any, Any], here: Any) -> list[Any]:
    """Copy a jaxpr's equations to a trace that records them; `env` maps its inputs to tracers of that trace.

    The result is that of running them one by one, for less: their types are known. (JAX's own
    ``inline_jaxpr_into_trace`` gives every equation the place of the call, and forgets the lines of the user's code.)
    """

    def read(atom: Any, source: Any) -> Any:
        return _pe.DynamicJaxprTracer(trace, atom.aval, atom, source) if isinstance(atom, Literal) else env[atom]

    for eqn in jaxpr.eqns:
        source = eqn.source_info.replace(name_stack=here.name_stack + eqn.source_info.name_stack)
        ins, types = [read(v, source) for v in eqn.invars], [v.aval for v in eqn.outvars]
        outs = trace.emit_eqn(ins, types, eqn.primitive, eqn.params, eqn.effects, source, eqn.ctx)
        env.update(zip(eqn.outvars, outs, strict=True))
    return [read(v, here) for v in jaxpr.outvars]


def rematerialise(jaxpr: Jaxpr, args: Sequence[Any], *, policy: Any, prevent_cse: bool | tuple[bool, ...]) -> list[Any]:
    """`jax.checkpoint` of a function whose jaxpr, without constants, is there already; `prevent_cse` for each input.

    This is JAX's established rematerialisation also where ``jax_remat3`` is on, which knows neither `prevent_cse` nor
    policies that are not its own.
    """
    return remat_p.bind(*args, jaxpr=jaxpr, policy=policy, prevent_cse=prevent_cse, differentiated=False)


def lower_remat_by(rule: Callable) -> None:
    """Lower rematerialised functions by ``rule(as_jax, ctx, *args, **params)``; ``as_jax`` is the rule there was."""
    _mlir.register_lowering(remat_p, functools.partial(rule, _mlir._lowerings[remat_p].rule))


def platforms(ctx: Any) -> tuple[str, ...]:
    """What is lowered for."""
    return tuple(ctx.platforms or ctx.module_context.platforms)


def ir_type(aval: Any) -> Any:
    """The type of an array when it is lowered."""
    physical: Any = _core.physical_aval(aval)
    return ir.RankedTensorType.get(physical.shape, _mlir.dtype_to_ir_type(physical.dtype))


def with_sharding(ctx: Any, x: Any, aval: Any) -> Any:
    """A value while lowering, held to the sharding in its type where axes are explicit."""
    return _mlir.lower_with_sharding_in_types(ctx, x, aval)


CPU_DROPS_BARRIERS = _jaxlib_version[:2] < (0, 12)
"""Whether XLA removes optimisation barriers before it merges equal computations."""


KEPT = "statetx:"
"""What the names begin with that this package gives to values to be kept."""


def _insert_reduce_precision(jaxpr: Jaxpr, num_res: int) -> Jaxpr:
    """As JAX's function of this name, which rounds what is kept to its own precision, lest the compiler keep more.

    Of float32 and float64 it keeps no more, and there the rounding is only a copy: values named by us are spared it.
    """
    ours = {e.outvars[0] for e in jaxpr.eqns if e.primitive is name_primitive and e.params["name"].startswith(KEPT)}
    first = len(jaxpr.outvars) - num_res
    outs, res = jaxpr.outvars[:first], jaxpr.outvars[first:]
    is_spared = [isinstance(v, Var) and v in ours and getattr(v.aval, "dtype", None) in _EXACT for v in res]
    if not any(is_spared):
        return _insert_reduce_precision_as_jax(jaxpr, num_res)
    rounded = [v for v, s in zip(res, is_spared, strict=True) if not s]
    if not rounded:
        return jaxpr
    others = [v for v, s in zip(res, is_spared, strict=True) if s]
    new = _insert_reduce_precision_as_jax(jaxpr.replace(outvars=[*outs, *others, *rounded]), len(rounded))
    return new.replace(outvars=jaxpr.outvars)


_EXACT = (np.dtype("float32"), np.dtype("float64"))
_insert_reduce_precision_as_jax = _ad_checkpoint._insert_reduce_precision
_ad_checkpoint._insert_reduce_precision = _insert_reduce_precision


def bind_scan(
    jaxpr: ClosedJaxpr, constants: Sequence[Any], carry: Sequence[Any], xs: Sequence[Any], *, length: int, reverse: bool
) -> list[Any]:
    """`jax.lax.scan` of a body that is there already, ``(*constants, *carry, *x) -> (*carry, *y)``."""
    counts: dict[str, Any] = {"num_consts": len(constants), "num_carry": len(carry)}
    if _flattree is not None:
        sizes = [_flattree.nones(len(part)) for part in (constants, carry, xs)]
        num_ys = len(jaxpr.out_avals) - len(carry)
        ys = _flattree.nones(num_ys).filter_with_mask([True] * num_ys)  # none is an element handed on
        counts = {"ft_in": _flattree.pack(tuple(sizes)), "ft_out": _flattree.pack((sizes[1], ys))}
    return scan_p.bind(*constants, *carry, *xs, jaxpr=jaxpr, length=length, reverse=reverse, unroll=1, **counts)


def empty(length: int, aval: Any) -> Any:
    """An array for `length` values of type `aval`, of which the content is not determined."""
    return replicated(_loops._empty_array((length,), (None,), aval))


def replicated(x: Any) -> Any:
    """A value with the type of what is computed here: where a mesh with explicit axes is set, one that lies on it."""
    if not has_explicit_axes() or not jax.typeof(x).sharding.mesh.empty:
        return x
    return jax.sharding.reshard(x, jax.P())


def has_explicit_axes() -> bool:
    """Whether the mesh that is set has axes of which types say how arrays lie on them."""
    return jax.sharding.AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types


# -- linear maps -----------------------------------------------------------------------------------------------


def linear_call(
    fun: Callable[[list, list], list],
    transpose: Callable[[list, list], list],
    residuals: Sequence[Any],
    tangents: Sequence[Any],
    out_avals: Sequence[Any],
) -> list[Any]:
    """``fun(residuals, tangents)``, linear in the tangents, with a transpose of its own.

    As ``jax.custom_derivatives.linear_call``, and more: it can be mapped, and differentiated with respect to the
    residuals, which differentiates `fun`.

    Args:
        fun: returns arrays of types `out_avals`.
        transpose: ``(residuals, cotangents) -> cotangents of the tangents``; a cotangent is None where it is zero.
    """
    return _linear_p.bind(
        *residuals, *tangents, fun=fun, transpose=transpose, num_res=len(residuals), out_avals=tuple(out_avals)
    )


_linear_p = _core.Primitive("statetx_linear")
_linear_p.multiple_results = True


def _linear_impl(*args: Any, fun: Callable, transpose: Callable, num_res: int, out_avals: Any) -> list[Any]:
    return fun(list(args[:num_res]), list(args[num_res:]))


def _linear_jvp(primals: Any, tangents: Any, *, fun: Callable, num_res: int, **params: Any) -> Any:
    moving = [i for i, t in enumerate(tangents) if type(t) is not _Zero and t.dtype != jax.dtypes.float0]
    outs = _linear_p.bind(*primals, fun=fun, num_res=num_res, **params)
    if all(i >= num_res for i in moving):
        moved = [_instantiate_zeros(t) for t in tangents[num_res:]]
        return outs, _linear_p.bind(*primals[:num_res], *moved, fun=fun, num_res=num_res, **params)

    def of_moving(*values: Any) -> list[Any]:
        whole = list(primals)
        for i, value in zip(moving, values, strict=True):
            whole[i] = value
        return fun(whole[:num_res], whole[num_res:])

    return jax.jvp(of_moving, [primals[i] for i in moving], [tangents[i] for i in moving])


def _linear_transpose(
    cts: Any, *args: Any, fun: Callable, transpose: Callable, num_res: int, out_avals: Any
) -> list[Any]:
    given = [None if type(ct) is _Zero else ct for ct in cts]
    if all(ct is None for ct in given):
        return [None] * len(args)
    return [None] * num_res + transpose(list(args[:num_res]), given)


def _linear_batch(
    axis: Any, args: Any, dims: Any, *, fun: Callable, transpose: Callable, num_res: int, out_avals: Any
) -> tuple[list[Any], list[Any]]:
    res_dims, dims = list(dims[:num_res]), list(dims[num_res:])
    if all(d is None for d in (*res_dims, *dims)):
        params = {"fun": fun, "transpose": transpose, "num_res": num_res, "out_avals": out_avals}
        return _linear_p.bind(*args, **params), [None] * len(out_avals)
    options = {"axis_size": axis.size, "spmd_axis_name": axis.spmd_name}
    options["axis_name"] = None if axis.name is _core.no_axis_name else axis.name

    def mapped_transpose(residuals: list, cts: list) -> list:
        ct_dims = [None if ct is None else 0 for ct in cts]
        outs = jax.vmap(transpose, in_axes=(res_dims, ct_dims), out_axes=0, **options)(residuals, cts)
        return [x.sum(0) if d is None else jnp.moveaxis(x, 0, d) for x, d in zip(outs, dims, strict=True)]

    outs = _linear_p.bind(
        *args,
        fun=jax.vmap(fun, in_axes=(res_dims, dims), out_axes=0, **options),
        transpose=mapped_transpose,
        num_res=num_res,
        out_avals=tuple(_core.unmapped_aval(axis.size, 0, aval) for aval in out_avals),
    )
    return outs, [0] * len(outs)


_linear_p.def_impl(_linear_impl)
_linear_p.def_abstract_eval(lambda *_, out_avals, **__: list(out_avals))
_ad.primitive_jvps[_linear_p] = _linear_jvp
_ad.primitive_transposes[_linear_p] = _linear_transpose
_batching.fancy_primitive_batchers[_linear_p] = _linear_batch
_mlir.register_lowering(_linear_p, _mlir.lower_fun(_linear_impl, multiple_results=True))


# -- editing jaxprs --------------------------------------------------------------------------------------------


def bind_equation(eqn: Any, params: dict[str, Any], args: Sequence[Any]) -> list[Any]:
    """Run one equation, with these parameters, on `args`; what it does is attributed to the line it came from."""
    name_stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
    with source_info_util.user_context(eqn.source_info.traceback, name_stack=name_stack), eqn.ctx.manager:
        outs = eqn.primitive.bind(*args, **eqn.primitive.get_bind_params(params))
    return outs if eqn.primitive.multiple_results else [outs]


def rebuild(jaxpr: Jaxpr, *, invars: Sequence[Any], outvars: Sequence[Any], eqns: Sequence[Any] | None = None) -> Jaxpr:
    """The jaxpr with other inputs, outputs and equations and with no constants."""
    info = jaxpr.debug_info._replace(arg_names=None, result_paths=None)
    eqns = jaxpr.eqns if eqns is None else list(eqns)
    return jaxpr.replace(constvars=[], invars=list(invars), outvars=list(outvars), eqns=eqns, debug_info=info)


def with_literals(jaxpr: Jaxpr, literals: dict[Any, Any]) -> Jaxpr:
    """The jaxpr without constants and with literals in the places of some inputs."""

    def read(atom: Any) -> Any:
        return atom if isinstance(atom, Literal) else literals.get(atom, atom)

    eqns = [e.replace(invars=[read(v) for v in e.invars]) for e in jaxpr.eqns]
    invars = [v for v in jaxpr.invars if v not in literals]
    return rebuild(jaxpr, invars=invars, outvars=[read(v) for v in jaxpr.outvars], eqns=eqns)


def without_dead_code(jaxpr: Any) -> Jaxpr:
    """The equations of a jaxpr, closed or not, that its outputs need, in loops and regions too."""
    jaxpr, _ = open_jaxpr(jaxpr)
    return _pe.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)[0]


def close(jaxpr: Jaxpr, consts: Sequence[Any]) -> ClosedJaxpr:
    """A jaxpr without constants, with these values for its first inputs."""
    num = len(consts)
    return ClosedJaxpr(jaxpr.replace(constvars=jaxpr.invars[:num], invars=jaxpr.invars[num:]), list(consts))


def drop_axis(aval: Any, axis: int) -> Any:
    """The type of one slice of an array of type `aval` along `axis`."""
    return _core.mapped_aval(aval.shape[axis], axis % len(aval.shape), aval)


def with_weak_type(x: Any, weak: bool) -> Any:
    """`x` with its type made weak or strong, the value unchanged."""
    return _lax._convert_element_type(x, weak_type=weak)


name_primitive = _ad_checkpoint.name_p
custom_lin_primitive = _ad.custom_lin_p  # what linearising a custom_vjp leaves
Offloadable = _pe.Offloadable


def named(x: Any, name: str) -> Any:
    """`x` under a name that policies of `remat_p` see, whatever ``jax_remat3`` says."""
    return name_primitive.bind(x, name=name)


def output_types(primitive: Any, inputs: Sequence[Any], params: dict[str, Any]) -> list[Any]:
    """The types of an operation's results."""
    if "call_jaxpr" in params:  # custom derivatives, which JAX types by the jaxpr alone
        return [v.aval for v in open_jaxpr(params["call_jaxpr"])[0].outvars]
    out = primitive.abstract_eval(*inputs, **params)[0]
    return list(out) if primitive.multiple_results else [out]


def is_debug_callback(primitive: Any) -> bool:
    """Whether an operation is ``jax.debug.callback`` or ``jax.debug.print``."""
    return primitive.name in ("debug_callback", "debug_print")


HOST_MEMORY = "pinned_host"


def to_host(x: Any) -> Any:
    """`x` in the host's memory."""
    return jax.device_put(x, jax.memory.Space.Host)


def to_device(x: Any) -> Any:
    """`x` in the device's memory."""
    return jax.device_put(x, jax.memory.Space.Device)


def memory_spaces() -> list[str]:
    """The memories that the devices of the default backend can address, the one where arrays are made first."""
    device = jax.local_devices()[0]
    kinds = [device.default_memory().kind, *(m.kind for m in device.addressable_memories())]
    return list(dict.fromkeys(kinds))


def policy_answer(answer: Any) -> bool | tuple[str, str]:
    """What a policy of JAX's kind answered: whether to save, or the memories to offload from and to."""
    if isinstance(answer, Offloadable):
        return answer.src, answer.dst
    return answer is _pe.Saveable or (answer is not _pe.Recompute and bool(answer))


def names_in_policy(policy: Any) -> frozenset[str]:
    """The names that a policy made by ``jax.checkpoint_policies`` was given; empty where they cannot be told."""
    found = getattr(policy, "saveable_names", None) or getattr(policy, "names", None)
    if found is None:
        found = [
            x
            for content in _closed_over(policy, 1)
            if isinstance(content, (set, frozenset, tuple, list))
            for x in content
        ]
    return frozenset(x for x in found if isinstance(x, str)) if is_policy_of_jax(policy) else frozenset()


def is_policy_of_jax(policy: Any) -> bool:
    """Whether ``jax.checkpoint_policies`` has it, or made it."""
    return (getattr(policy, "__module__", None) or type(policy).__module__).startswith("jax.")


def inner_jaxprs(eqn: Any) -> Iterator[Jaxpr]:
    """The jaxprs among an equation's parameters."""
    for sub in _core.jaxprs_in_params(eqn.params):
        yield open_jaxpr(sub)[0]


def zero_tangent(aval: Any) -> Any:
    """The tangent of an integer of this type, as the result of a rule for derivatives."""
    return SymbolicZero(aval.to_tangent_aval())


def zeros(aval: Any) -> Any:
    """Zeros of a type, with its sharding unless that is of another mesh than the one that is set."""
    if aval.sharding.mesh != jax.sharding.get_abstract_mesh():
        return jnp.zeros(aval.shape, aval.dtype)
    return _instantiate_zeros(_Zero(aval))


def forbidden_effects(jaxpr: Jaxpr) -> list[tuple[str, str]]:
    """What in a jaxpr cannot be rematerialised: the name of each such function or operation, and its place."""
    if not _effects.remat_allowed_effects.filter_not_in(jaxpr.effects):
        return []
    found = []
    for eqn in jaxpr.eqns:
        inner = [f for sub in inner_jaxprs(eqn) for f in forbidden_effects(sub)]
        if inner:
            found += inner
        elif _effects.remat_allowed_effects.filter_not_in(eqn.effects):
            found.append(_callback(eqn))
    return found


def _callback(eqn: Any) -> tuple[str, str]:
    callback = eqn.params.get("callback")
    callback = getattr(callback, "callback_func", callback)
    name = getattr(callback, "__qualname__", None) or eqn.primitive.name
    return name, traceback_site(eqn.source_info.traceback, (JAX_FOLDER,))


def callbacks(jaxpr: Jaxpr) -> list[tuple[str, str]]:
    """The functions that a jaxpr calls on the host: the name of each, and the place of the call."""
    found = [_callback(eqn) for eqn in jaxpr.eqns if eqn.primitive.name.endswith("_callback")]
    for eqn in jaxpr.eqns:
        for sub in inner_jaxprs(eqn):
            found += callbacks(sub)
    return found


# -- Refs ------------------------------------------------------------------------------------------------------


_ref_init = _AbstractRef.__init__  # every Ref has a type, those too that are made while tracing
_made_refs = False


def _note_ref(self: Any, *args: Any, **kwargs: Any) -> None:
    global _made_refs
    _made_refs = True
    _AbstractRef.__init__ = _ref_init
    _ref_init(self, *args, **kwargs)


_AbstractRef.__init__ = _note_ref  # type: ignore[method-assign]  # until the first Ref is made


def made_refs() -> bool:
    """Whether the program has made a `jax.Ref` since this package was imported."""
    return _made_refs


def belongs_here(x: Any) -> bool:
    """Whether `x` is a tracer of the current trace."""
    return isinstance(x, Tracer) and _tag(x._trace) is _tag(_context.trace)


def touches_refs(jaxpr: Jaxpr, consts: Sequence[Any]) -> bool:
    """Whether a staged function closes over a `jax.Ref` or makes one."""
    if any(isinstance(c, jax.Ref) for c in consts):
        return True
    return any(isinstance(e, _InternalRefEffect) for e in jaxpr.effects)


def discharge_refs(jaxpr: Jaxpr) -> tuple[Jaxpr, list[bool]]:
    """Make every Ref of a jaxpr without constants explicit.

    Inputs that are Refs become their values, and the last value of each that is written becomes a further output, in
    the order of the inputs. Returns, for each input, whether it is such a Ref.
    """
    is_ref = [isinstance(v.aval, _AbstractRef) for v in jaxpr.invars]
    # lower=False keeps the rules of custom derivatives.
    pure, consts = open_jaxpr(_discharge_state(ClosedJaxpr(jaxpr, []), should_discharge=is_ref, lower=False))
    num_out = len(jaxpr.outvars)
    invars = [*pure.constvars, *pure.invars]
    refs = [v for v, r in zip(pure.invars, is_ref, strict=True) if r]
    last = pure.outvars[num_out:]
    written = [new is not old for new, old in zip(last, refs, strict=True)]
    outvars = [*pure.outvars[:num_out], *(v for v, w in zip(last, written, strict=True) if w)]
    assert not consts, "discharging a jaxpr without constants made some"
    flags = iter(written)
    return rebuild(pure, invars=invars, outvars=outvars), [r and next(flags) for r in is_ref]


# -- structure of equations ------------------------------------------------------------------------------------


def is_jaxpr(x: Any) -> bool:
    return isinstance(x, (Jaxpr, ClosedJaxpr))


def open_jaxpr(x: Any) -> tuple[Jaxpr, Sequence[Any]]:
    """Split a jaxpr, closed or not, into equations and constants (one class serves both from jax 0.12 on)."""
    return (x.jaxpr, x.consts) if isinstance(x, ClosedJaxpr) else (x, getattr(x, "consts", ()))


def is_written_by_jax(jaxpr: Jaxpr) -> bool:
    """Whether a jaxpr is that of a function in JAX's own source, such as ``jnp.where``."""
    return (jaxpr.debug_info.func_filename or "").startswith(JAX_FOLDER)


def map_jaxprs(fun: Callable[[Any], Any], params: dict[str, Any]) -> dict[str, Any]:
    """An equation's parameters with `fun` applied to each jaxpr in them, closed or not."""

    def apply(x: Any) -> Any:
        if isinstance(x, (tuple, list)) and any(map(is_jaxpr, x)):
            return getattr(x, "_make", type(x))([apply(v) for v in x])
        return fun(x) if is_jaxpr(x) else x

    return {key: apply(value) for key, value in params.items()}


def with_equations(x: Any, eqns: Sequence[Any]) -> Any:
    """A jaxpr, closed or not, with other equations for the same inputs and outputs."""
    if isinstance(x, Jaxpr):
        return x.replace(eqns=list(eqns))
    return ClosedJaxpr(x.jaxpr.replace(eqns=list(eqns)), x.consts)


def scan_counts(eqn: Any) -> tuple[int, int]:
    """How many constants and carries a scan has: the first of its operands, in this order."""
    if "num_carry" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    consts, carry, _ = map(list, eqn.params["ft_in"].unpack())  # from jax 0.12 on
    return len(consts), len(carry)


def scope(eqn: Any) -> str:
    """The names that stand around an equation: those of ``jax.named_scope`` and of transforms, joined by slashes."""
    return str(eqn.source_info.name_stack)


def with_scope(eqn: Any, name: str) -> Any:
    """The equation with a further name around it, which all that JAX makes of the equation inherits."""
    info = eqn.source_info
    return eqn.replace(source_info=info.replace(name_stack=info.name_stack.extend(name)))


def inlined(eqn: Any, outer: Any, *, same_line: bool, **changes: Any) -> Any:
    """The equation, changed, with the names around `outer`, whose jaxpr it comes from, and on request its line."""
    info, around = eqn.source_info, outer.source_info
    info = info.replace(name_stack=around.name_stack + info.name_stack)
    return eqn.replace(source_info=info.replace(traceback=around.traceback) if same_line else info, **changes)


def derivative_rule(x: Any) -> tuple[Any, ...] | None:
    """What identifies a custom derivative rule held as an equation's parameter; None where nothing does.

    JAX wraps the rule anew in every trace. Only rules that JAX itself defines are recognised: they read nothing
    that may change. A user's rule runs when the equation is differentiated and may read anything, so two
    equations that hold one are never taken for equal.
    """
    if not isinstance(x, _lu.WrappedFun):
        return None
    inner = x
    for _ in range(4):  # the memoising thunks around the rule, each a closure over the next
        found = [f for f in _closed_over(inner.f) if isinstance(f, _lu.WrappedFun)]
        if len(found) != 1:
            break
        inner = found[0]
    rule = inner.f
    if not _defined_by_jax(rule):
        return None
    static = tuple(a for _, args in inner.transforms for a in args if not callable(a))
    return (rule, *static)


def _defined_by_jax(fun: Any) -> bool:
    """Whether a function, and every function it closes over, stands in JAX's own source."""
    if isinstance(fun, (tuple, list)):
        return all(map(_defined_by_jax, fun))
    if isinstance(fun, jax.custom_jvp):
        return _defined_by_jax(fun.fun)
    if not callable(fun):
        return isinstance(fun, (str, int, float, type(None)))
    while not isinstance(fun, FunctionType) and hasattr(fun, "__wrapped__"):
        fun = fun.__wrapped__  # what jax.jit and its kin return
    # Not its __module__, which functools.wraps copies from another function.
    inside = isinstance(fun, FunctionType) and fun.__code__.co_filename.startswith(JAX_FOLDER + os.sep)
    return inside and all(map(_defined_by_jax, _closed_over(fun, 1)))


def _closed_over(fun: Any, depth: int = 3) -> Iterator[Any]:
    if not isinstance(fun, FunctionType) or depth == 0:
        return
    for cell in fun.__closure__ or ():
        try:
            content = cell.cell_contents
        except ValueError:  # an empty cell
            continue
        yield content
        yield from _closed_over(content, depth - 1)
