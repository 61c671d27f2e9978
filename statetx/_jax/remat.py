"""`jax.checkpoint`: its equation, its lowering, names, policies, offloading, forbidden effects."""

from __future__ import annotations

import dataclasses
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
from jax._src.interpreters import mlir as _mlir
from jax._src.interpreters import partial_eval as _pe
from jaxlib.mlir import ir

from . import patches
from .editing import closed_like, map_jaxprs
from .equations import Jaxpr, Var, equations_in, inner_jaxprs, open_jaxpr
from .marks import attach_primitive, mark_primitive
from .rules import _closed_over, has_rule, with_rule
from .traces import JAX_FOLDER, PACKAGE_FOLDER, traceback_site
from .versions import NAME_CLASSES


def rematerialize(jaxpr: Jaxpr, args: Sequence[Any], *, policy: Any, prevent_cse: bool | tuple[bool, ...]) -> list[Any]:
    """Apply `jax.checkpoint` to an already staged jaxpr without constants; `prevent_cse` may be given for each input.

    It binds `remat_p` even if ``jax_remat3`` is on: the newer form asks a policy about few primitives or none, and in
    jax 0.10 it ignores `prevent_cse`.
    """
    return remat_p.bind(*args, jaxpr=jaxpr, policy=policy, prevent_cse=prevent_cse, differentiated=False)


_is_undone: Callable[[str], bool] | None = None
_bind = remat_p.bind


def undo_checkpoints(is_undone: Callable[[str], bool]) -> None:
    """Let ``is_undone(name)`` say whether a function under `jax.checkpoint` is run without it."""
    global _is_undone
    _is_undone = is_undone


def _bind_or_run(*args: Any, jaxpr: Jaxpr, **params: Any) -> list[Any]:
    info = jaxpr.debug_info  # not of what `rematerialize` is given, such as steps of loops
    if _is_undone is not None and info.traced_for == "checkpoint / remat" and _is_undone(info.func_name):
        return _core.eval_jaxpr(jaxpr, (), *args)
    return _bind(*args, jaxpr=jaxpr, **params)


patches.replace(
    "jax._src.ad_checkpoint.remat_p.bind",
    remat_p,
    _bind_or_run,
    "`statetx.memory_report` compiles a function without its `jax.checkpoint`s, too. Elsewhere it is JAX's own.",
)


def set_remat_lowering(rule: Callable) -> None:
    """Lower rematerialized functions by ``rule(as_jax, ctx, *args, **params)``; ``as_jax`` is JAX's own rule."""
    # For every platform: at this point nobody knows which one a function will be lowered for. The rule looks at its
    # context.
    _mlir.register_lowering(remat_p, functools.partial(rule, _mlir._lowerings[remat_p].rule))
    patches.note(
        "the lowering of jax.checkpoint",
        "On CPUs the compiler merges a recomputation with the first computation; on GPUs it makes the arrays that "
        "loops fill too early. Regions that `statetx.remat` has marked get a branch, or their arrays wait; "
        "any other `jax.checkpoint` is lowered as by JAX.",
    )


def platforms(ctx: Any) -> tuple[str, ...]:
    """The platforms that the module is lowered for."""
    return tuple(ctx.platforms or ctx.module_context.platforms)


def ir_type(aval: Any) -> Any:
    """The MLIR type of an array."""
    # Keys have an extended dtype; StableHLO knows the integers behind it.
    physical: Any = _core.physical_aval(aval)
    return ir.RankedTensorType.get(physical.shape, _mlir.dtype_to_ir_type(physical.dtype))


def num_devices(ctx: Any) -> int:
    """The number of devices that the module being lowered runs on."""
    axes = ctx.module_context.axis_context
    mesh = getattr(axes, "mesh", None)
    return int(mesh.size if mesh is not None else getattr(axes, "num_devices", 1))


def tokens_before(ctx: Any, jaxpr: Any) -> dict[Any, Any]:
    """The tokens that a program being lowered takes, one for each kind of side effects that have an order."""
    return {e: ctx.tokens_in.get(e) for e in _effects.ordered_effects.filter_in(jaxpr.effects)}


def lower_inside(ctx: Any, lower: Callable) -> tuple[list[Any], Callable[[Any], Any]]:
    """The results of ``lower(ctx)`` inside the region of an operation, and its last token by effect.

    They end with the region: `set_tokens` has the operation's own for what follows.
    """
    inner = ctx.replace(tokens_out=None)
    return lower(inner), lambda effect: inner.tokens_out.get(effect)


def set_tokens(ctx: Any, tokens: dict[Any, Any]) -> None:
    """Say which tokens follow the equation being lowered; those of other effects stay as they are."""
    ctx.set_tokens_out(ctx.tokens_in.update_tokens(_mlir.TokenSet(tokens)))


def function_called(ctx: Any, call: Any) -> Any:
    """The function of the module being lowered that an operation calls."""
    return ctx.module_context.symbol_table[call.attributes["callee"].value]


def with_sharding(ctx: Any, x: Any, aval: Any) -> Any:
    """Constrain a value that is being lowered to the sharding in its type, along explicit axes."""
    return _mlir.lower_with_sharding_in_types(ctx, x, aval)


def _insert_reduce_precision(jaxpr: Jaxpr, num_res: int) -> Jaxpr:
    """Round residuals to their own precision, as JAX's function of this name, except where this is a mere copy.

    JAX rounds so that both passes see the same value, since XLA may compute with excess precision (jax-ml/jax#22244).
    It has none for float32 and float64, so marked values of these types are skipped, and so are complex values, on
    which JAX's function fails.
    """
    return _ordered(_round_residuals(jaxpr, num_res))


def _round_residuals(jaxpr: Jaxpr, num_res: int) -> Jaxpr:
    marked = {e.outvars[0] for e in jaxpr.eqns if e.primitive is mark_primitive}
    first = len(jaxpr.outvars) - num_res
    outs, res = jaxpr.outvars[:first], jaxpr.outvars[first:]

    def is_exact(v: Any) -> bool:
        dtype = getattr(v.aval, "dtype", None)
        return isinstance(v, Var) and ((v in marked and dtype in _EXACT) or dtype in _COMPLEX)

    is_skipped = list(map(is_exact, res))
    if not any(is_skipped):
        return _insert_reduce_precision_as_jax(jaxpr, num_res)
    rounded = [v for v, s in zip(res, is_skipped, strict=True) if not s]
    if not rounded:
        return jaxpr
    skipped = [v for v, s in zip(res, is_skipped, strict=True) if s]

    # JAX takes the last outputs for residuals: put the rounded ones last, and restore the order. The variables stay the
    # same.
    new = _insert_reduce_precision_as_jax(jaxpr.replace(outvars=[*outs, *skipped, *rounded]), len(rounded))
    return new.replace(outvars=jaxpr.outvars)


def _ordered(jaxpr: Jaxpr) -> Jaxpr:
    """The forward pass of a region as one equation, if it stores values in another form and what follows must wait for
    that.

    A scheduler that reads ahead would start what follows, or encode late, and hold the values that are encoded
    (decision 29).
    """
    first = next((e for e in jaxpr.eqns if _stores_in_order(e)), None)
    if first is None:
        return jaxpr
    invars, outvars = [Var(v.aval) for v in jaxpr.invars], [Var(v.aval) for v in jaxpr.outvars]
    params = {"jaxpr": jaxpr, "policy": Ordered(), "prevent_cse": False, "differentiated": False}
    eqn = _core.new_jaxpr_eqn(invars, outvars, remat_p, params, jaxpr.effects, first.source_info, first.ctx)
    return jaxpr.replace(invars=invars, outvars=outvars, eqns=[eqn])


def _stores_in_order(eqn: Any) -> bool:
    """Whether an equation, or one inside of it, is the forward pass of a value that is stored in another form."""
    if eqn.primitive is attach_primitive:
        return eqn.params["is_ordered"]
    if eqn.primitive is remat_p:  # a region has its own order
        return False
    return any(_stores_in_order(e) for inner in inner_jaxprs(eqn) for e in inner.eqns)


@dataclasses.dataclass(frozen=True)
class Ordered:
    """The policy of an equation that runs as a whole before what follows (`_ordered`), and under differentiation saves
    everything.
    """

    def __call__(self, *_: Any, **__: Any) -> bool:
        return True


_EXACT = (np.dtype("float32"), np.dtype("float64"))
_COMPLEX = (np.dtype("complex64"), np.dtype("complex128"))
_insert_reduce_precision_as_jax = _ad_checkpoint._insert_reduce_precision

patches.replace(
    "jax._src.ad_checkpoint._insert_reduce_precision",
    _ad_checkpoint,
    _insert_reduce_precision,
    "JAX copies every residual of a rematerialized function, to round it to its own precision. The compiler has no "
    "excess precision for float32 and float64, so values that statetx marks are not copied, nor are complex values, on "
    "which JAX's function fails. A forward pass that stores values in another form becomes one equation.",
)


name_primitive = _ad_checkpoint.name_p
custom_lin_primitive = _ad.custom_lin_p  # in the linearized jaxpr of a custom_vjp
Offloadable = _pe.Offloadable


def named(x: Any, name: str) -> Any:
    """Name `x` for policies of `remat_p`, whether ``jax_remat3`` is on or off."""
    return name_primitive.bind(x, name=name)


def without_remat3(x: Any) -> Any:
    """Replace the equations that ``jax_remat3`` makes for names and `jax.checkpoint`, in a jaxpr closed or not, by the
    older form.

    `remat_p` shows its policy only the older form.
    """
    # Both tests are needed: a derivative rule may hold names while its function, and so the jaxpr, holds none.
    if not (getattr(x, "is_high", False) or getattr(jax.config, "jax_remat3", False)):
        return x
    jaxpr = open_jaxpr(x)[0]
    eqns = [_equation_without_remat3(eqn) for eqn in jaxpr.eqns]
    # Other operations of hijax may remain, and then the jaxpr is still a high one.
    high = any(v.aval.is_high for v in jaxpr.invars) or any(
        e.primitive.is_high(*(v.aval for v in e.invars), **e.params) for e in eqns
    )
    return closed_like(x, jaxpr.replace(eqns=eqns, is_high=high))


def _equation_without_remat3(eqn: Any) -> Any:
    if has_rule(eqn):
        return with_rule(eqn, without_remat3, without_remat3(eqn.params["call_jaxpr"]))
    new = eqn.params.get("_prim")
    if new is None:
        return map_jaxprs(without_remat3, eqn)
    class_name = type(new).__name__ if type(new).__module__ == _ad_checkpoint.__name__ else ""
    if class_name in NAME_CLASSES:
        return eqn.replace(primitive=name_primitive, params={"name": new.name})
    if class_name == "RematTraced":
        jaxpr, consts = open_jaxpr(without_remat3(new.jaxpr))
        if not consts:
            params = {"jaxpr": jaxpr, "policy": new.policy, "prevent_cse": True, "differentiated": False}
            return eqn.replace(primitive=remat_p, params=params)
    return eqn


HOST_MEMORY = "pinned_host"


def memory_of(aval: Any) -> str:
    """The name of the memory that holds a value; "" for the device's."""
    return HOST_MEMORY if getattr(aval, "memory_space", None) is jax.memory.Space.Host else ""


def policy_answer(answer: Any) -> bool | tuple[str, str]:
    """The answer of a JAX policy: whether to save the value, or the memories to offload it from and to."""
    if isinstance(answer, Offloadable):
        return answer.src, answer.dst
    return answer is _pe.Saveable or (answer is not _pe.Recompute and bool(answer))


def names_in_policy(policy: Any) -> frozenset[str]:
    """The names given to a policy made by ``jax.checkpoint_policies``; empty if they are unknown."""
    if not is_jax_policy(policy):
        return frozenset()
    # A function with the names in its closure; in some versions of JAX a dataclass with the names in its fields.
    contents = [*getattr(policy, "__dict__", {}).values(), *_closed_over(policy, 1)]
    names = (x for content in contents if isinstance(content, (set, frozenset, tuple, list)) for x in content)
    return frozenset(x for x in names if isinstance(x, str))


def is_jax_policy(policy: Any) -> bool:
    """Whether a policy is defined in JAX, or made by ``jax.checkpoint_policies``."""
    return (getattr(policy, "__module__", None) or type(policy).__module__).startswith("jax.")


def forbidden_effects(jaxpr: Jaxpr) -> list[tuple[str, str]]:
    """The effects in a jaxpr that cannot be rematerialized: name and source line of each such function or operation."""
    if not _effects.remat_allowed_effects.filter_not_in(jaxpr.effects):
        return []
    forbidden = []
    for eqn in jaxpr.eqns:
        inner = [f for sub in inner_jaxprs(eqn) for f in forbidden_effects(sub)]
        if inner:
            forbidden += inner
        elif _effects.remat_allowed_effects.filter_not_in(eqn.effects):
            forbidden.append(callback_name(eqn))
    return forbidden


def callback_name(eqn: Any) -> tuple[str, str]:
    callback = eqn.params.get("callback")
    callback = getattr(callback, "callback_func", callback)
    code = getattr(callback, "__code__", None)
    if code is not None and code.co_filename.startswith(JAX_FOLDER) and "callback" in code.co_freevars:
        callback = callback.__closure__[code.co_freevars.index("callback")].cell_contents  # of `jax.debug.callback`
    name = getattr(getattr(callback, "func", callback), "__qualname__", None)
    name = f"{eqn.primitive.name} of {name}" if name else eqn.primitive.name
    return name, traceback_site(eqn.source_info.traceback, (JAX_FOLDER, PACKAGE_FOLDER))


def callbacks(jaxpr: Jaxpr) -> list[tuple[str, str]]:
    """The functions that a jaxpr calls on the host: name and source line of each call."""
    is_call = lambda eqn: eqn.primitive.name.endswith(("_callback", "debug_print"))
    return [callback_name(eqn) for eqn in equations_in(jaxpr) if is_call(eqn)]
