"""The only module that touches private names of JAX.

Supported are jax 0.10 to 0.12. Each private name stands here once, with what is relied upon; `tests/test_compat.py`
fails when one of these meanings shifts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import operator
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import FunctionType
from typing import TYPE_CHECKING, Any, Protocol

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
from jax._src import mesh as _mesh
from jax._src import source_info_util
from jax._src import util as _util
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
from jax._src.sharding_impls import UNSPECIFIED  # noqa: F401  # pyright: ignore[reportPrivateImportUsage]  # in equations of jit
from jax._src.state.discharge import discharge_state as _discharge_state
from jax._src.state.types import AbstractRef as _AbstractRef
from jax.api_util import shaped_abstractify
from jax.custom_derivatives import SymbolicZero
from jax.extend.core.primitives import closed_call_p
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
_internal_ref_effect = _core.internal_mutable_array_effect
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


def ends_here(tracer: Any) -> bool:
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


def checks_keys() -> bool:
    """Whether ``jax_debug_key_reuse`` is in force."""
    return _config.debug_key_reuse.value


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


def vmaps_around() -> list[Any]:
    """The traces of every `jax.vmap` around the current trace, innermost first."""
    return [t for t in _parents(_context.trace) if isinstance(t, _batching.BatchTrace)]


def with_examples(x: Any, axis: int | None, to: int, axis_data: Any) -> Any:
    """An array whose examples lie along `axis`, with their axis at `to`; None: the same for all, repeated."""
    if axis is None:
        return _batching.broadcast(x, axis_data.size, to, axis_data.explicit_mesh_axis)
    return jnp.moveaxis(x, axis, to)


def which_are_mapped(x: Any, vmaps: Sequence[Any]) -> list[bool]:
    """For each of `vmaps_around`, whether `x` differs between its examples; True where that cannot be told."""
    found = []
    for trace in vmaps:
        while isinstance(x, (_ad.JVPTracer, _ad.LinearizeTracer)):
            x = x.primal
        if not isinstance(x, _batching.BatchTracer):
            found.append(isinstance(x, Tracer))  # of another kind, such as that of a jit inside the map
        elif x._trace.tag is not trace.tag:
            found.append(False)
        else:
            found.append(x.batch_dim is not None)
            x = x.val
    return found


def map_jaxpr(
    jaxpr: Jaxpr, axis_data: Any, is_mapped: Sequence[bool], instantiate: Sequence[bool]
) -> tuple[Jaxpr, Sequence[Any], list[bool]]:
    """A jaxpr without constants for all examples of a `jax.vmap` at once, along axis 0 of the inputs that are mapped.

    Returns it with its constants, and which outputs are mapped; those in `instantiate` are in any case.
    """
    mapped, outs = _batching.batch_jaxpr(ClosedJaxpr(jaxpr, ()), axis_data, list(is_mapped), list(instantiate))
    return *open_jaxpr(mapped), list(outs)


def map_over(fun: Callable, axis_data: Any, in_axes: Any) -> Callable:
    """`jax.vmap` over the axis of another; examples lie along axis 0 of all outputs."""
    name = None if axis_data.name is _core.no_axis_name else axis_data.name
    options = {"axis_name": name, "axis_size": axis_data.size, "spmd_axis_name": axis_data.spmd_name}
    return jax.vmap(fun, in_axes=in_axes, out_axes=0, **options)


def outside() -> Any:
    """A context in which nothing is being traced."""
    return _core.set_current_trace(_eval_trace)


@dataclasses.dataclass(frozen=True)
class Manual:
    """The `jax.shard_map` that code runs in: its mesh, the axes that are divided by hand, whether types name varying axes."""

    mesh: Any
    axes: tuple[str, ...]
    is_checked: bool


def manual_around() -> Manual | None:
    """The `jax.shard_map` around the code that is running."""
    mesh = jax.sharding.get_abstract_mesh()
    axes = tuple(mesh.manual_axes)
    return Manual(mesh, axes, _config._check_vma.value) if axes else None


def concrete_mesh(mesh: Any) -> Any:
    """A mesh of devices like an abstract one: the one that is set, or else one of the first devices."""
    here = _mesh.get_concrete_mesh()
    if here.shape_tuple == mesh.shape_tuple:
        return here
    auto, manual = jax.sharding.AxisType.Auto, jax.sharding.AxisType.Manual
    types = tuple([auto if t == manual else t for t in mesh.axis_types])
    return jax.make_mesh(mesh.axis_sizes, mesh.axis_names, axis_types=types, devices=jax.devices()[: mesh.size])


def varying_axes(aval: Any) -> frozenset[str]:
    """The axes of a `jax.shard_map` along which a value of this type differs, where types say so."""
    manual = getattr(aval, "mat", None)  # in some versions of JAX `vma` alone
    return frozenset(getattr(aval, "vma", ()) if manual is None else manual.varying)


def as_varying(x: Any, axes: Sequence[str]) -> Any:
    """The value with a type that varies along these axes of a `jax.shard_map`, where types say so."""
    missing = tuple([a for a in axes if a not in varying_axes(jax.typeof(x))])
    return jax.lax.pcast(x, missing, to="varying") if missing and _config._check_vma.value else x


def varying_like(x: Any, y: Any) -> Any:
    """The value with a type that varies along the axes along which `y` does."""
    return as_varying(x, tuple(varying_axes(jax.typeof(y))))


@contextlib.contextmanager
def outside_of_all() -> Iterator[None]:
    """A context in which nothing is being traced, and no `jax.vmap` and no `jax.shard_map` is around."""
    mesh = _mesh.get_concrete_mesh().abstract_mesh
    axes = _context.axis_env
    with _core.set_current_trace(_eval_trace), jax.sharding.use_abstract_mesh(mesh), _config._check_vma(False):
        _context.set_axis_env(_core.top_axis_env)
        try:
            yield
        finally:
            _context.set_axis_env(axes)


def named_axes(axes: Sequence[Any]) -> Any:
    """A context with the names of the axes of these `jax.vmap`s, described as JAX does."""
    return _core.extend_axis_env_nd([(a.name, a.size) for a in axes if a.name is not _core.no_axis_name])


def explicit_axis_of(axis_data: Any) -> Any:
    """The explicit mesh axes along which a `jax.vmap` is divided."""
    return axis_data.explicit_mesh_axis


def primal_of(x: Any) -> Any:
    """The value that a tracer of a derivative varies; None for others."""
    return x.primal if isinstance(x, (_ad.JVPTracer, _ad.LinearizeTracer)) else None


def repeated(aval: Any, num: int) -> Any:
    """The type of so many values of this type along a new axis 0."""
    return _core.unmapped_aval(num, 0, aval)


def examples_of(x: Any) -> tuple[Any, int | None] | None:
    """The values of all examples, and their axis, for the tracer of one; None for others."""
    return (x.val, x.batch_dim) if isinstance(x, _batching.BatchTracer) else None


def enclosing(trace: Any) -> Any:
    """A context in which operations go where they would outside the transform that this trace belongs to."""
    # That of a shard_map which is not compiled names none: it runs right in eager code.
    return _core.set_current_trace(getattr(trace, "parent_trace", _eval_trace))


def within(trace: Any) -> Any:
    """A context in which this trace is the current one."""
    return _core.set_current_trace(trace)


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


def stage(
    fun: Callable[..., list], avals: Sequence[Any], *, kind: str, name: str, names: Sequence[str] | None = None
) -> tuple[Jaxpr, list]:
    """Trace ``fun(*arrays) -> list of arrays`` to a jaxpr; return it with the values it closes over.

    The jaxpr's inputs are `avals` and then whatever `new_input` added, in that order. Errors raised while `fun` runs call
    them by `names`, which are not asked for otherwise, and the function ``str(names)``.
    """
    plain = _core.DebugInfo(kind, name, None, None)
    named: Any = plain if names is None else plain._replace(func_src_info=str(names), arg_names=names)

    def run(*tracers: Any) -> list:
        frame = _context.trace.frame
        try:
            return fun(*tracers)
        finally:
            frame.debug_info = plain  # names keep the arguments

    jaxpr, _, consts = _pe.trace_to_jaxpr_dynamic(_lu.wrap_init(run, debug_info=named), list(avals))
    return jaxpr, consts


def with_tangents(jaxpr: Jaxpr, given: Sequence[bool]) -> list[bool]:
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


def num_devices(ctx: Any) -> int:
    """On how many devices the module runs that is being lowered."""
    axes = ctx.module_context.axis_context
    mesh = getattr(axes, "mesh", None)
    return int(mesh.size if mesh is not None else getattr(axes, "num_devices", 1))


def with_sharding(ctx: Any, x: Any, aval: Any) -> Any:
    """A value while lowering, held to the sharding in its type where axes are explicit."""
    return _mlir.lower_with_sharding_in_types(ctx, x, aval)


CPU_DROPS_BARRIERS = _jaxlib_version[:2] < (0, 12)
"""Whether XLA removes optimisation barriers before it merges equal computations."""


mark_primitive = _core.Primitive("statetx_mark")
"""The identity, which says that a rematerialised function of this package keeps the value: ``region`` is the number of the
function, ``what`` becomes of the value. Policies of JAX do not see it as a name."""
mark_primitive.def_impl(lambda x, **_: x)
mark_primitive.def_abstract_eval(lambda x, **_: x)
_ad.primitive_jvps[mark_primitive] = lambda primals, tangents, **params: (
    mark_primitive.bind(*primals, **params),
    tangents[0],  # not marked: it would be an operation to transpose
)
_batching.primitive_batchers[mark_primitive] = lambda args, dims, **params: (
    mark_primitive.bind(*args, **params),
    dims[0],
)
_mlir.register_lowering(mark_primitive, lambda ctx, x, **_: [x])


def _insert_reduce_precision(jaxpr: Jaxpr, num_res: int) -> Jaxpr:
    """As JAX's function of this name, which rounds what is kept to its own precision, lest the compiler keep more.

    Of float32 and float64 it keeps no more, and there the rounding is only a copy: values marked by us are spared it. And so
    are complex numbers, on which JAX's function fails.
    """
    ours = {e.outvars[0] for e in jaxpr.eqns if e.primitive is mark_primitive}
    first = len(jaxpr.outvars) - num_res
    outs, res = jaxpr.outvars[:first], jaxpr.outvars[first:]

    def is_exact(v: Any) -> bool:
        dtype = getattr(v.aval, "dtype", None)
        return isinstance(v, Var) and ((v in ours and dtype in _EXACT) or dtype in _COMPLEX)

    is_spared = list(map(is_exact, res))
    if not any(is_spared):
        return _insert_reduce_precision_as_jax(jaxpr, num_res)
    rounded = [v for v, s in zip(res, is_spared, strict=True) if not s]
    if not rounded:
        return jaxpr
    others = [v for v, s in zip(res, is_spared, strict=True) if s]
    new = _insert_reduce_precision_as_jax(jaxpr.replace(outvars=[*outs, *others, *rounded]), len(rounded))
    return new.replace(outvars=jaxpr.outvars)


_EXACT = (np.dtype("float32"), np.dtype("float64"))
_COMPLEX = (np.dtype("complex64"), np.dtype("complex128"))
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

    def mapped_transpose(residuals: list, cts: list) -> list:
        ct_dims = [None if ct is None else 0 for ct in cts]
        outs = map_over(transpose, axis, (res_dims, ct_dims))(residuals, cts)
        return [x.sum(0) if d is None else jnp.moveaxis(x, 0, d) for x, d in zip(outs, dims, strict=True)]

    outs = _linear_p.bind(
        *args,
        fun=map_over(fun, axis, (res_dims, dims)),
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


# -- loops with a derivative of their own ----------------------------------------------------------------------


class OwnLoop(Protocol):
    """What `call_loop` calls: a function of arrays with rules of its own.

    Attributes:
        body: the equations of a step, ``(*constants, *carry, *x) -> (*carry, *y)``.
        length: how many steps.
        num_constants, num_carry: how many of the arguments are constants and carries, the first of them.
        keeps_steps: whether it may keep values of every step for its derivative, so that a policy may choose among them.
    """

    body: Jaxpr
    length: int
    num_constants: int
    num_carry: int
    keeps_steps: bool

    def with_body(self, body: Jaxpr) -> OwnLoop: ...

    def is_plain(self) -> bool:
        """Whether its derivative is that of the plain loop where no `vmap` stands around it."""
        ...

    def plain_args(self, args: list) -> list | None:
        """What to differentiate the plain loop at, if that is its derivative at these arguments; None otherwise."""
        ...

    def run(self, args: list) -> list: ...

    def jaxpr_for(self, avals: Sequence[Any]) -> ClosedJaxpr:
        """Its equations, for arguments of these types."""
        ...

    def jvp(self, args: list, tangents: dict[int, Any]) -> tuple[list, list]:
        """The outputs and the tangents of those that are floats, for tangents of the arguments that have some."""
        ...

    def map(self, args: list, axes: list[int | None], axis_data: Any) -> tuple[list, list[int | None]]:
        """The outputs for all examples of a `jax.vmap`, which lie along these axes, and their axes."""
        ...


def loop_of(eqn: Any) -> OwnLoop | None:
    """The loop of an equation that `call_loop` made; None of other equations."""
    return eqn.params["loop"] if eqn.primitive is _loop_p else None


def with_body(eqn: Any, body: Jaxpr) -> Any:
    """An equation that `call_loop` made, with another body."""
    loop = eqn.params["loop"].with_body(body)
    with eqn.ctx.manager:
        jaxpr = loop.jaxpr_for([v.aval for v in eqn.invars])
    return eqn.replace(params={"jaxpr": jaxpr, "loop": loop})


def call_loop(loop: OwnLoop, args: Sequence[Any]) -> list[Any]:
    """Run a loop with rules of its own, which are called as late as those of JAX's own operations.

    Those of `jax.custom_jvp` are not: in a function that is staged the rule is traced once, without the `vmap` around.
    """
    return _loop_p.bind(*args, jaxpr=loop.jaxpr_for([jax.typeof(x) for x in args]), loop=loop)


_loop_p = _core.Primitive("statetx_loop")
_loop_p.multiple_results = True


def _loop_jvp(args: Any, tangents: Any, *, loop: OwnLoop, **_: Any) -> tuple[list, list]:
    has_tangent = [type(t) is not _Zero and t.dtype != jax.dtypes.float0 for t in tangents]
    outs, pushed = loop.jvp(list(args), {i: t for i, t in enumerate(tangents) if has_tangent[i]})
    rest = iter(pushed)
    is_float = [jnp.issubdtype(x.dtype, jnp.inexact) for x in outs]
    return outs, [
        next(rest) if f else _Zero(abstract(x).to_tangent_aval()) for x, f in zip(outs, is_float, strict=True)
    ]


def _loop_linearize(is_vjp: bool, nonzeros: Any, *args: Any, jaxpr: ClosedJaxpr, loop: OwnLoop) -> Any:
    """That of a scan where the derivative is the plain loop's: JAX keeps it, and would trace one by `_loop_jvp` each time."""
    scan = jaxpr.eqns[0]
    scan, body = jaxpr.eqns[0] if len(jaxpr.eqns) == 1 else None, jaxpr.jaxpr
    is_scan = (
        scan is not None and scan.primitive is scan_p and scan.invars == body.invars and scan.outvars == body.outvars
    )
    plain = loop.plain_args(list(args)) if is_scan else None
    if scan is None or plain is None:
        return _ad.fallback_linearize_rule(_loop_p, is_vjp, nonzeros, *args, jaxpr=jaxpr, loop=loop)
    return _ad.primitive_linearizations[scan_p](is_vjp, nonzeros, *plain, **scan.params)


def _loop_batch(axis: Any, args: Any, dims: Any, *, loop: OwnLoop, **_: Any) -> tuple[list, list]:
    return loop.map(list(args), list(dims), axis)


def _loop_transpose(cts: Any, *args: Any, jaxpr: ClosedJaxpr, loop: OwnLoop) -> list[Any]:
    """Of a loop that is linear in some arguments, in place of which stand their types."""
    linear = [i for i, x in enumerate(args) if _ad.is_undefined_primal(x)]
    has_ct = [i for i, ct in enumerate(cts) if type(ct) is not _Zero]

    def run(*values: Any) -> list[Any]:
        whole = list(args)
        for i, x in zip(linear, values, strict=True):
            whole[i] = x
        outs = _core.jaxpr_as_fun(jaxpr)(*whole)
        return [outs[i] for i in has_ct]

    found = iter(jax.linear_transpose(run, *(args[i].aval for i in linear))([cts[i] for i in has_ct]))
    return [next(found) if i in linear else None for i in range(len(args))]


_loop_p.def_impl(lambda *args, loop, jaxpr: loop.run(list(args)))
_loop_p.def_effectful_abstract_eval(lambda *_, loop, jaxpr: (jaxpr.out_avals, jaxpr.effects))
_ad.primitive_jvps[_loop_p] = _loop_jvp
_ad.primitive_linearizations[_loop_p] = _loop_linearize
_ad.primitive_transposes[_loop_p] = _loop_transpose
_batching.fancy_primitive_batchers[_loop_p] = _loop_batch
_mlir.register_lowering(
    _loop_p,
    _mlir.lower_fun(lambda *args, loop, jaxpr: _core.jaxpr_as_fun(jaxpr)(*args), multiple_results=True),
)


# -- noticing vmap ---------------------------------------------------------------------------------------------


def noticing(values: Sequence[Any], which: int, notice: Callable[[Any, list[bool]], Callable]) -> Any:
    """One of `values`, unchanged.

    Whenever a `jax.vmap` maps some of them, also in a program that was traced without it, ``notice(axis, is_mapped)`` is
    called with the `vmap`'s axis, and for each value whether it is mapped; it returns what is called the next time.
    """
    return _notice_p.bind(*values, which=which, notice=notice)


_notice_p = _core.Primitive("statetx_notice")


def _notice_batch(axis: Any, args: Any, dims: Any, *, which: int, notice: Callable) -> tuple[Any, Any]:
    if any(d is not None for d in dims):
        notice = notice(axis, [d is not None for d in dims])
    return _notice_p.bind(*args, which=which, notice=notice), dims[which]


def _notice_impl(*args: Any, which: int, notice: Callable) -> Any:
    return args[which]


_notice_p.def_impl(_notice_impl)
_notice_p.def_abstract_eval(_notice_impl)
_ad.primitive_jvps[_notice_p] = lambda ps, ts, **params: (_notice_p.bind(*ps, **params), ts[params["which"]])
_batching.fancy_primitive_batchers[_notice_p] = _notice_batch
_mlir.register_lowering(_notice_p, _mlir.lower_fun(_notice_impl, multiple_results=False))


# -- editing jaxprs --------------------------------------------------------------------------------------------


def bind_equation(eqn: Any, params: dict[str, Any], args: Sequence[Any]) -> list[Any]:
    """Run one equation, with these parameters, on `args`; what it does is attributed to the line it came from."""
    name_stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
    with source_info_util.user_context(eqn.source_info.traceback, name_stack=name_stack), eqn.ctx.manager:
        outs = eqn.primitive.bind(*args, **eqn.primitive.get_bind_params(params))
    return outs if eqn.primitive.multiple_results else [outs]


def with_varying_inputs(jaxpr: Jaxpr, args: Sequence[Any]) -> list[Any]:
    """Evaluate equations on values that vary along more axes of a `jax.shard_map` than when they were staged."""
    env = dict(zip(jaxpr.invars, args, strict=True))
    read = lambda v: v.val if isinstance(v, Literal) else env[v]  # noqa: E731
    for eqn in jaxpr.eqns:
        ins = [read(v) for v in eqn.invars]
        name = eqn.primitive.name
        if name == "pvary":
            outs = [as_varying(x, eqn.params["axes"]) for x in ins]
        elif name in ("jit", "pjit"):
            inner, consts = open_jaxpr(eqn.params["jaxpr"])
            with eqn.ctx.manager:
                outs = with_varying_inputs(
                    inner.replace(constvars=[], invars=[*inner.constvars, *inner.invars]), [*consts, *ins]
                )
        else:
            if not any(True for _ in inner_jaxprs(eqn)):
                axes = sorted(frozenset().union(*(varying_axes(jax.typeof(x)) for x in ins)))
                ins = [as_varying(x, axes) for x in ins]
            outs = bind_equation(eqn, eqn.params, ins)
        env.update(zip(eqn.outvars, outs, strict=True))
    return [read(v) for v in jaxpr.outvars]


def mark_equation(like: Any, source: Any, target: Any, *, region: int, what: str) -> Any:
    """An equation that marks the variable `source` and makes `target` of it, attributed to the line of an equation."""
    params = {"region": region, "what": what}
    return _core.new_jaxpr_eqn([source], [target], mark_primitive, params, _core.no_effects, like.source_info, like.ctx)


def function_of(eqn: Any) -> Jaxpr:
    """An equation as a function of the variables among its operands."""
    invars = list(dict.fromkeys(v for v in eqn.invars if isinstance(v, Var)))
    outvars = [Var(v.aval) for v in eqn.outvars]
    info = _core.DebugInfo("statetx", eqn.primitive.name, None, None)
    return Jaxpr([], invars, outvars, [eqn.replace(outvars=outvars)], eqn.effects, info)


no_equations = Jaxpr([], [], [], [], debug_info=_core.DebugInfo("statetx", "nothing", (), ()))


def is_dropped(v: Any) -> bool:
    """Whether a result of an equation has no name, since no other reads it."""
    return isinstance(v, _core.DropVar)


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


def established(x: Any) -> Any:
    """A jaxpr, closed or not, with the equations that `jax_remat3` makes for names and `jax.checkpoint` in their older form.

    Only the older form is one that `remat_p` hands to its policy.
    """
    # A derivative rule may have names that the function has not.
    if not (getattr(x, "is_high", False) or getattr(jax.config, "jax_remat3", False)):
        return x
    jaxpr, consts = open_jaxpr(x)
    eqns = [_established_equation(eqn) for eqn in jaxpr.eqns]
    high = any(v.aval.is_high for v in jaxpr.invars) or any(
        e.primitive.is_high(*(v.aval for v in e.invars), **e.params) for e in eqns
    )
    jaxpr = jaxpr.replace(eqns=eqns, is_high=high)
    return jaxpr if isinstance(x, Jaxpr) else ClosedJaxpr(jaxpr, consts)


def _established_equation(eqn: Any) -> Any:
    if has_rule(eqn):
        return with_rule(eqn, established, established(eqn.params["call_jaxpr"]))
    new = eqn.params.get("_prim")
    if new is None:
        return map_jaxprs(established, eqn)
    kind = type(new).__name__ if type(new).__module__ == _ad_checkpoint.__name__ else ""
    if kind == "CheckpointName":
        return eqn.replace(primitive=name_primitive, params={"name": new.name})
    if kind == "RematTraced":
        jaxpr, consts = open_jaxpr(established(new.jaxpr))
        if not consts:
            params = {"jaxpr": jaxpr, "policy": new.policy, "prevent_cse": True, "differentiated": False}
            return eqn.replace(primitive=remat_p, params=params)
    return eqn


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


def memory_of(aval: Any) -> str:
    """The memory that a value waits in; "" for the device's."""
    return HOST_MEMORY if getattr(aval, "memory_space", None) is jax.memory.Space.Host else ""


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


def ref_store(ref: Any, value: Any) -> tuple[Any, ...]:
    """A function and its arguments that store an array in a Ref; written in C where nothing is traced.

    A value that the Ref does not take is refused by JAX here and now.
    """
    buffers = None if isinstance(ref, Tracer) or not is_eager() else getattr(ref, "_refs", None)
    buffer = getattr(buffers, "_buf", None)
    if buffer is None or (buffer.shape, buffer.dtype) != (value.shape, value.dtype):
        return operator.setitem, ref, ..., value
    return setattr, buffers, "_buf", jax.device_put(value, buffer.sharding, may_alias=False)


def belongs_here(x: Any) -> bool:
    """Whether `x` is a tracer of the current trace."""
    return isinstance(x, Tracer) and _tag(x._trace) is _tag(_context.trace)


def touches_refs(jaxpr: Jaxpr, consts: Sequence[Any]) -> bool:
    """Whether a staged function closes over a `jax.Ref` or makes one."""
    if any(isinstance(c, jax.Ref) for c in consts):
        return True
    return any(isinstance(e, _InternalRefEffect) for e in jaxpr.effects)


def discharge_refs(jaxpr: Jaxpr) -> tuple[Jaxpr, list[bool], list[bool]]:
    """Make the Refs of a jaxpr without constants explicit.

    Inputs that are Refs become their values, and the last value of each that is written becomes a further output, in
    the order of the inputs. Returns, for each input, whether it is a Ref that was made explicit, and whether it is written.
    A Ref that is an argument of a function with a derivative rule stays: the rule may write it in the backward pass.
    """
    jaxpr = _hold_rules(jaxpr)
    in_rules = _refs_in_rules(jaxpr)
    is_ref = [isinstance(v.aval, _AbstractRef) and v not in in_rules for v in jaxpr.invars]
    # lower=False keeps the rules of functions that are given a Ref.
    pure, consts = open_jaxpr(_discharge_state(ClosedJaxpr(jaxpr, []), should_discharge=is_ref, lower=False))
    pure = _release_rules(pure)
    num_out = len(jaxpr.outvars)
    invars = [*pure.constvars, *pure.invars]
    refs = [v for v, r in zip(pure.invars, is_ref, strict=True) if r]
    last = pure.outvars[num_out:]
    written = [new is not old for new, old in zip(last, refs, strict=True)]
    outvars = [*pure.outvars[:num_out], *(v for v, w in zip(last, written, strict=True) if w)]
    assert not consts, "discharging a jaxpr without constants made some"
    flags = iter(written)
    return rebuild(pure, invars=invars, outvars=outvars), is_ref, [r and next(flags) for r in is_ref]


class _Held:
    """An equation out of the sight of JAX."""

    def __init__(self, eqn: Any):
        self.eqn = eqn


_held_p = _core.Primitive("statetx_held")
_held_p.multiple_results = True
_held_p.def_abstract_eval(lambda *_, held: [v.aval for v in held.eqn.outvars])


def _hold_rules(x: Any) -> Any:
    """A jaxpr, closed or not, whose calls of functions with a derivative rule, at any depth, are held back.

    JAX discharges after differentiation. Of what stands in an inner jaxpr, or makes a Ref of its own, it would keep the
    function and drop its rule.
    """

    def hold(eqn: Any) -> Any:
        if not has_rule(eqn):
            return map_jaxprs(_hold_rules, eqn)
        if any(isinstance(v.aval, _AbstractRef) for v in eqn.invars):
            return eqn
        return eqn.replace(primitive=_held_p, params={"held": _Held(eqn)}, effects=_core.no_effects)

    return _with_equations_if_other(x, [hold(eqn) for eqn in open_jaxpr(x)[0].eqns])


def _release_rules(x: Any) -> Any:
    """What `_hold_rules` held back, where it stands now."""

    def release(eqn: Any) -> Any:
        if eqn.primitive is _held_p:
            return eqn.params["held"].eqn.replace(invars=eqn.invars, outvars=eqn.outvars)
        inner = map_jaxprs(_release_rules, eqn)
        shows = any(_internal_ref_effect in jaxpr.effects for jaxpr in inner_jaxprs(inner))
        return inner.replace(effects=inner.effects | {_internal_ref_effect}) if shows else inner

    return _with_equations_if_other(x, [release(eqn) for eqn in open_jaxpr(x)[0].eqns])


def _with_equations_if_other(x: Any, eqns: list[Any]) -> Any:
    jaxpr, _ = open_jaxpr(x)
    if all(new is old for new, old in zip(eqns, jaxpr.eqns, strict=True)):
        return x
    effects = jaxpr.effects | {e for eqn in eqns for e in eqn.effects if isinstance(e, _InternalRefEffect)}
    jaxpr = jaxpr.replace(eqns=eqns, effects=effects)
    return jaxpr if isinstance(x, Jaxpr) else ClosedJaxpr(jaxpr, x.consts)


def _refs_in_rules(jaxpr: Any) -> set[Any]:
    """Variables of Refs that some equation hands to a function with a derivative rule, at any depth."""
    found = set()
    for eqn in open_jaxpr(jaxpr)[0].eqns:
        refs = [v for v in eqn.invars if isinstance(v.aval, _AbstractRef)]
        if refs and (eqn.primitive.name in _RULES or any(map(_refs_in_rules, inner_jaxprs(eqn)))):
            found.update(refs)
    return found


# -- structure of equations ------------------------------------------------------------------------------------


def is_jaxpr(x: Any) -> bool:
    return isinstance(x, (Jaxpr, ClosedJaxpr))


def open_jaxpr(x: Any) -> tuple[Jaxpr, Sequence[Any]]:
    """Split a jaxpr, closed or not, into equations and constants (one class serves both from jax 0.12 on)."""
    return (x.jaxpr, x.consts) if isinstance(x, ClosedJaxpr) else (x, getattr(x, "consts", ()))


def is_written_by_jax(jaxpr: Jaxpr) -> bool:
    """Whether a jaxpr is that of a function in JAX's own source, such as ``jnp.where``."""
    return (jaxpr.debug_info.func_filename or "").startswith(JAX_FOLDER)


def map_jaxprs(fun: Callable[[Any], Any], eqn: Any) -> Any:
    """An equation with `fun` applied to each jaxpr in it, closed or not; of a loop with rules of its own, to that of a step.

    Returns the equation itself if that changes none.
    """
    loop = loop_of(eqn)
    if loop is not None:
        body = fun(loop.body)
        return eqn if body is loop.body else with_body(eqn, body)

    def apply(x: Any) -> Any:
        if isinstance(x, (tuple, list)) and any(map(is_jaxpr, x)):
            return getattr(x, "_make", type(x))([apply(v) for v in x])
        return fun(x) if is_jaxpr(x) else x

    params = {key: apply(value) for key, value in eqn.params.items()}
    return eqn if all(params[k] is v for k, v in eqn.params.items()) else eqn.replace(params=params)


def with_equations(x: Any, eqns: Sequence[Any]) -> Any:
    """A jaxpr, closed or not, with other equations for the same inputs and outputs."""
    if isinstance(x, Jaxpr):
        return x.replace(eqns=list(eqns))
    return ClosedJaxpr(x.jaxpr.replace(eqns=list(eqns)), x.consts)


CALLS = dict.fromkeys(["jit", "pjit", "remat2", "remat", "checkpoint", "shard_map", "compute_on"], "jaxpr")
CLOSED_CALL = closed_call_p.name  # "closed_call" before JAX 0.12, "eval_jaxpr" since
CALLS |= {CLOSED_CALL: "call_jaxpr", "core_call": "call_jaxpr"}
"""Operations that run a jaxpr once, on their operands, for their results, and the parameter that it is. A policy of `remat_p` is
asked about the equations within, and not about the operation."""


@contextlib.contextmanager
def inside(*eqns: Any) -> Iterator[None]:
    """A context in which functions are traced as they were for the jaxprs in an equation (in an equation, and so on)."""
    with contextlib.ExitStack() as stack:
        for params in (eqn.params for eqn in eqns if eqn.primitive.name == "shard_map"):
            mesh, axes = params["mesh"], params["newly_manual_axes"]
            manual = axes | set(mesh.manual_axes)
            stack.enter_context(_core.extend_axis_env_nd([(k, v) for k, v in mesh.shape.items() if k in manual]))
            types = dict.fromkeys(axes, jax.sharding.AxisType.Manual)
            stack.enter_context(jax.sharding.use_abstract_mesh(mesh.abstract_mesh.update_axis_types(types)))
            stack.enter_context(_config._check_vma(params["check_vma"]))
        yield


_RULES = {"custom_jvp_call": "jvp_jaxpr_fun", "custom_vjp_call": "fwd_jaxpr_thunk"}


def has_rule(eqn: Any) -> bool:
    """Whether an equation is a call of a function with a custom derivative."""
    return eqn.primitive.name in _RULES


def rule_of(eqn: Any) -> Jaxpr:
    """The equations that take the place of a call with a custom derivative where all its operands are differentiated.

    Of a ``custom_jvp``, ``(*operands, *tangents) -> (*results, *tangents)``, of a ``custom_vjp`` ``(*operands) ->
    (*residuals, *results)``; the first operands, which the function closes over (`num_closed_over`), are left out. As JAX
    asks for them, and JAX keeps the answer.
    """
    num = len(eqn.invars) - num_closed_over(eqn)
    is_jvp = eqn.primitive.name == "custom_jvp_call"
    # What JAX wants to know of each operand: whether its tangent is zero, or whether it is not.
    return eqn.params[_RULES[eqn.primitive.name]].call_wrapped(*[not is_jvp] * num)[0]


def num_closed_over(eqn: Any) -> int:
    return eqn.params["num_consts"]


def results_of_rule(eqn: Any, rule: Jaxpr) -> list[int]:
    """Which outputs of a rule are the results of the function."""
    num = len(eqn.outvars)
    first = 0 if eqn.primitive.name == "custom_jvp_call" else len(rule.outvars) - num
    return list(range(first, first + num))


def with_rule(eqn: Any, edit: Callable[[Jaxpr], Jaxpr], call: Any) -> Any:
    """The equation with an edited rule, and with `call` for the jaxpr that stands where nothing is differentiated."""
    key = _RULES[eqn.primitive.name]
    rule = eqn.params[key]

    @functools.cache  # as JAX's own is, so that what comes of it is traced once
    def edited(*flags: bool) -> Any:
        jaxpr, *others = rule.call_wrapped(*flags)
        return edit(jaxpr), *others

    changes = {key: _lu.wrap_init(edited, debug_info=rule.debug_info), "call_jaxpr": call}
    return eqn.replace(params={**eqn.params, **changes})


def scan_counts(eqn: Any) -> tuple[int, int]:
    """How many constants and carries a scan has: the first of its operands, in this order."""
    if "num_carry" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    consts, carry, _ = map(list, eqn.params["ft_in"].unpack())  # from jax 0.12 on
    return len(consts), len(carry)


def with_scan_constants(eqn: Any, jaxpr: ClosedJaxpr, constants: Sequence[Any]) -> Any:
    """A scan with another body, which takes these variables as its first constants, too."""
    params = {**eqn.params, "jaxpr": jaxpr}
    if "num_carry" in params:
        params["num_consts"] += len(constants)
    else:
        assert _flattree is not None
        consts, carry, xs = params["ft_in"].unpack()
        params["ft_in"] = _flattree.pack((_flattree.nones(len(constants) + len(list(consts))), carry, xs))
    return eqn.replace(params=params, invars=[*constants, *eqn.invars])


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
        if len(found) != 1 or not _stands_in_jax(inner.f):  # one of `with_rule` is another rule than that within
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
    return _stands_in_jax(fun) and all(map(_defined_by_jax, _closed_over(fun, 1)))


def _stands_in_jax(fun: Any) -> bool:
    # Not its __module__, which functools.wraps copies from another function.
    return isinstance(fun, FunctionType) and fun.__code__.co_filename.startswith(JAX_FOLDER + os.sep)


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


def register_cache(cache: Any, name: str) -> None:
    """Have ``jax.clear_caches`` call `cache.cache_clear()`, as long as the cache is alive."""
    _util.register_cache(cache, name)
