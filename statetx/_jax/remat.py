"""`jax.checkpoint`: its equation, its lowering, names, policies, offloading, forbidden effects."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
import numpy as np
from jax._src import ad_checkpoint as _ad_checkpoint
from jax._src import core as _core
from jax._src import effects as _effects
from jax._src.ad_checkpoint import remat_p
from jax._src.interpreters import ad as _ad
from jax._src.interpreters import batching as _batching
from jax._src.interpreters import mlir as _mlir
from jax._src.interpreters import partial_eval as _pe
from jax._src.lib import version as _jaxlib_version
from jaxlib.mlir import ir

from . import patches
from .editing import map_jaxprs
from .equations import ClosedJaxpr, Jaxpr, Var, inner_jaxprs, open_jaxpr
from .rules import _closed_over, has_rule, with_rule
from .traces import JAX_FOLDER, traceback_site


def rematerialise(jaxpr: Jaxpr, args: Sequence[Any], *, policy: Any, prevent_cse: bool | tuple[bool, ...]) -> list[Any]:
    """`jax.checkpoint` of a function whose jaxpr, without constants, is there already; `prevent_cse` for each input.

    This is JAX's established rematerialisation also where ``jax_remat3`` is on, which knows neither `prevent_cse` nor
    policies that are not its own.
    """
    return remat_p.bind(*args, jaxpr=jaxpr, policy=policy, prevent_cse=prevent_cse, differentiated=False)


def set_remat_lowering(rule: Callable) -> None:
    """Lower rematerialised functions by ``rule(as_jax, ctx, *args, **params)``; ``as_jax`` is the rule there was."""
    _mlir.register_lowering(remat_p, functools.partial(rule, _mlir._lowerings[remat_p].rule))
    patches.note(
        "the lowering of jax.checkpoint",
        "On CPUs the compiler merges a recomputation with the first computation. The lowering puts a branch around what `statetx.remat` "
        "has marked; any other `jax.checkpoint` is lowered as by JAX.",
    )


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


CPU_DROPS_BARRIERS = _jaxlib_version < (0, 11, 1)
"""Whether XLA removes optimisation barriers before it merges equal computations: measured with 0.10.2, 0.11.0, 0.11.1 and 0.11.2."""

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
    """As JAX's function of this name, which rounds what is kept to its own precision, so that the compiler keeps no more.

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

patches.replace(
    "jax._src.ad_checkpoint._insert_reduce_precision",
    _ad_checkpoint,
    _insert_reduce_precision,
    "JAX copies every value that a rematerialised function keeps, to round it to its own precision. Of float32 and float64 the compiler "
    "keeps no more, so values that statetx marks are spared the copy; complex numbers are, too, on which JAX's function fails.",
)


def mark_equation(like: Any, source: Any, target: Any, *, region: int, what: str) -> Any:
    """An equation that marks the variable `source` and makes `target` of it, attributed to the line of an equation."""
    params = {"region": region, "what": what}
    return _core.new_jaxpr_eqn([source], [target], mark_primitive, params, _core.no_effects, like.source_info, like.ctx)


name_primitive = _ad_checkpoint.name_p
custom_lin_primitive = _ad.custom_lin_p  # what linearising a custom_vjp leaves
Offloadable = _pe.Offloadable


def named(x: Any, name: str) -> Any:
    """`x` under a name that policies of `remat_p` see, whatever ``jax_remat3`` says."""
    return name_primitive.bind(x, name=name)


def without_remat3(x: Any) -> Any:
    """A jaxpr, closed or not, with the equations that `jax_remat3` makes for names and `jax.checkpoint` in their older form.

    Only the older form is one that `remat_p` hands to its policy.
    """
    # A derivative rule may have names that the function has not.
    if not (getattr(x, "is_high", False) or getattr(jax.config, "jax_remat3", False)):
        return x
    jaxpr, consts = open_jaxpr(x)
    eqns = [_equation_without_remat3(eqn) for eqn in jaxpr.eqns]
    high = any(v.aval.is_high for v in jaxpr.invars) or any(
        e.primitive.is_high(*(v.aval for v in e.invars), **e.params) for e in eqns
    )
    jaxpr = jaxpr.replace(eqns=eqns, is_high=high)
    return jaxpr if isinstance(x, Jaxpr) else ClosedJaxpr(jaxpr, consts)


def _equation_without_remat3(eqn: Any) -> Any:
    if has_rule(eqn):
        return with_rule(eqn, without_remat3, without_remat3(eqn.params["call_jaxpr"]))
    new = eqn.params.get("_prim")
    if new is None:
        return map_jaxprs(without_remat3, eqn)
    kind = type(new).__name__ if type(new).__module__ == _ad_checkpoint.__name__ else ""
    if kind == "CheckpointName":
        return eqn.replace(primitive=name_primitive, params={"name": new.name})
    if kind == "RematTraced":
        jaxpr, consts = open_jaxpr(without_remat3(new.jaxpr))
        if not consts:
            params = {"jaxpr": jaxpr, "policy": new.policy, "prevent_cse": True, "differentiated": False}
            return eqn.replace(primitive=remat_p, params=params)
    return eqn


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
    if not is_jax_policy(policy):
        return frozenset()
    # A function with the names in its closure; in some versions a dataclass with the names in its fields.
    contents = [*getattr(policy, "__dict__", {}).values(), *_closed_over(policy, 1)]
    names = (x for content in contents if isinstance(content, (set, frozenset, tuple, list)) for x in content)
    return frozenset(x for x in names if isinstance(x, str))


def is_jax_policy(policy: Any) -> bool:
    """Whether ``jax.checkpoint_policies`` has it, or made it."""
    return (getattr(policy, "__module__", None) or type(policy).__module__).startswith("jax.")


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
