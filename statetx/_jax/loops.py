"""Loops as equations: `jax.lax.scan`'s, or one with derivative rules of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
from jax._src import core as _core
from jax._src.ad_util import Zero as _Zero
from jax._src.interpreters import ad as _ad
from jax._src.interpreters import partial_eval as _pe
from jax._src.lax.control_flow.loops import scan_p, while_p

from .._positions import function_of as _function_of
from . import patches
from .equations import ClosedJaxpr, Eqn, Jaxpr, Var, abstract, as_array, open_jaxpr, with_nonzero
from .primitives import call_primitive, identity
from .staging import name_function
from .traces import eval_context
from .versions import SCAN_HAS_TREES, packed, tree_of

CustomLoop = Any
"""A loop with rules of its own, which `call_loop` runs: a `DifferentiableLoop` of `_loops.derivative`."""


def loop_of(eqn: Any) -> CustomLoop | None:
    """The loop of an equation made by `call_loop`; None for any other equation."""
    return eqn.params["loop"] if eqn.primitive is _loop_p else None


def with_body(eqn: Any, body: Jaxpr) -> Any:
    """Replace the loop body in an equation made by `call_loop`."""
    return with_loop(eqn, eqn.params["loop"].with_body(body))


def with_loop(eqn: Any, loop: CustomLoop) -> Any:
    """Replace the loop in an equation made by `call_loop`."""
    # The settings of the equation: the edited loop is traced under the same ones as the loop was.
    with eqn.ctx.manager:
        jaxpr = loop.jaxpr_for([v.aval for v in eqn.invars])
    return eqn.replace(params={"jaxpr": jaxpr, "loop": loop})


def call_loop(loop: CustomLoop, args: Sequence[Any]) -> list[Any]:
    """Run a loop whose rules are called as late as the rules of JAX's own primitives.

    A `jax.custom_jvp` would be too early: in a staged function its rule is traced once, without the enclosing `vmap`.
    """
    return _loop_p.bind(*args, jaxpr=loop.jaxpr_for([jax.typeof(x) for x in args]), loop=loop)


def _loop_jvp(args: Any, tangents: Any, *, loop: CustomLoop, **_: Any) -> tuple[list, list]:
    with eval_context():  # a linearization would trace the conversion of a number
        args = [as_array(x) for x in args]
    tangents, diff_indices = with_nonzero(tangents)
    diff_tangents = {i: tangents[i] for i in diff_indices}
    # A linearization is a jvp at tangents that it does not know.
    is_linearized = any(isinstance(t, _pe.JaxprTracer) for t in diff_tangents.values())
    outs, out_tangents = loop.jvp(args, diff_tangents, is_linearized=is_linearized)
    float_tangents = iter(out_tangents)
    tangents = [next(float_tangents) if jnp.issubdtype(x.dtype, jnp.inexact) else None for x in outs]
    zeros = [_Zero(abstract(x).to_tangent_aval()) for x in outs]
    return outs, [zero if t is None else t for t, zero in zip(tangents, zeros, strict=True)]


def _loop_linearize(is_vjp: bool, nonzeros: Any, *args: Any, jaxpr: ClosedJaxpr, loop: CustomLoop) -> Any:
    """Use the linearization of a scan if the derivative is the plain loop's.

    JAX caches the scan's linearization; the fallback would trace `_loop_jvp` on every call.
    """
    scan, body = jaxpr.eqns[0] if len(jaxpr.eqns) == 1 else None, jaxpr.jaxpr
    # JAX's rule is called with the operands and parameters of the inner equation: they must be the loop's own, in the
    # same order.
    is_scan = (
        scan is not None and scan.primitive is scan_p and scan.invars == body.invars and scan.outvars == body.outvars
    )
    floats = [i for i, x in enumerate(args) if nonzeros[i] and jnp.issubdtype(jnp.result_type(x), jnp.inexact)]
    plain = loop.plain_args(list(args), tuple(floats)) if is_scan else None
    if scan is None or plain is None:
        return _ad.fallback_linearize_rule(_loop_p, is_vjp, nonzeros, *args, jaxpr=jaxpr, loop=loop)
    return _ad.primitive_linearizations[scan_p](is_vjp, nonzeros, *plain, **scan.params)


def _loop_batch(axis: Any, args: Any, dims: Any, *, loop: CustomLoop, **_: Any) -> tuple[list, list]:
    return loop.map(list(args), list(dims), axis)


def _loop_transpose(cts: Any, *args: Any, jaxpr: ClosedJaxpr, loop: CustomLoop) -> list[Any]:
    """Transpose a loop that is linear in its arguments that are undefined primals, which have only types."""
    linear = [i for i, x in enumerate(args) if _ad.is_undefined_primal(x)]
    has_ct = [i for i, ct in enumerate(cts) if type(ct) is not _Zero]

    # Outputs without a cotangent are left out: `jax.linear_transpose` wants one for each.
    def run(*operands: Any) -> list[Any]:
        outs = _core.jaxpr_as_fun(jaxpr)(*operands)
        return [outs[i] for i in has_ct]

    arg_cts = iter(
        jax.linear_transpose(_function_of(run, args, linear), *(args[i].aval for i in linear))([cts[i] for i in has_ct])
    )
    return [next(arg_cts) if i in linear else None for i in range(len(args))]


_loop_p = call_primitive(
    "statetx_loop",
    lambda *args, loop, jaxpr: loop.run(list(args)),
    # With effects, or JAX would take a loop with a debug callback for pure, and remove it when nothing reads its
    # results.
    lambda *_, loop, jaxpr: (jaxpr.out_avals, _core.positional_effects(jaxpr)),
    jvp=_loop_jvp,
    batch=_loop_batch,
    jaxpr_of=lambda *_, loop, jaxpr: jaxpr,
    lowered=lambda *args, loop, jaxpr: _core.jaxpr_as_fun(loop.lowered(jaxpr))(*args),
)
_ad.primitive_linearizations[_loop_p] = _loop_linearize
_ad.primitive_transposes[_loop_p] = _loop_transpose


# -- the loops of JAX ---------------------------------------------------------------------------------------------


def bind_scan(
    jaxpr: ClosedJaxpr, constants: Sequence[Any], carry: Sequence[Any], xs: Sequence[Any], *, length: int, reverse: bool
) -> list[Any]:
    """Run `jax.lax.scan` of an already staged body ``(*constants, *carry, *x) -> (*carry, *y)``."""
    counts = _counts(jaxpr, constants, carry, xs)
    return scan_p.bind(*constants, *carry, *xs, jaxpr=jaxpr, length=length, reverse=reverse, unroll=1, **counts)


def _counts(jaxpr: ClosedJaxpr, constants: Sequence[Any], carry: Sequence[Any], xs: Sequence[Any]) -> dict[str, Any]:
    """The parameters of a scan that tell its operands and results apart."""
    if not SCAN_HAS_TREES:
        return {"num_consts": len(constants), "num_carry": len(carry)}
    sizes = [tree_of(len(values)) for values in (constants, carry, xs)]
    num_ys = len(jaxpr.out_avals) - len(carry)
    ys = tree_of(num_ys).filter_with_mask([True] * num_ys)  # no ys are forwarded
    return {"ft_in": packed(tuple(sizes)), "ft_out": packed((sizes[1], ys))}


_transpose_while = _ad.primitive_transposes[while_p]
_OF_SLOTS = "statetx: "


def of_slots(test: Callable[[Any], Any], derivative: str) -> Callable[[Any], Any]:
    """The condition of a loop that computes the "gradient" or the "tangent" of a loop of unknown length with slots."""
    return name_function(test, "while_cond", _OF_SLOTS + derivative)


def _refuse_to_transpose(*args: Any, **params: Any) -> Any:
    try:
        return _transpose_while(*args, **params)
    except ValueError as e:
        test, info = (open_jaxpr(params[key])[0].debug_info for key in ("cond_jaxpr", "body_jaxpr"))
        if test.func_src_info.startswith(_OF_SLOTS):
            derivative = test.func_src_info.removeprefix(_OF_SLOTS)
            adverb = "again " if derivative == "gradient" else ""
            raise ValueError(
                f"The {derivative} of a statetx.while_loop with checkpoint= cannot be differentiated {adverb}in "
                "reverse mode: its own loops end when their steps are done.\n"
                "Fix: take the outer derivative in forward mode, as jax.hessian(f) and jax.jvp(jax.grad(f), ...) do; "
                "or use statetx.scan with the largest number of steps as its length, whose gradient can be "
                "differentiated in both modes."
            ) from None
        name = "fori_loop" if info.traced_for == "fori_loop" else "while_loop"
        bounds = "give Python integers as bounds, or " if name == "fori_loop" else ""
        raise ValueError(
            f"{e}\nThe loop: {name}({info.func_src_info}).\n"
            f"Fix: {bounds}use statetx.while_loop(..., checkpoint=statetx.policies.Slots(n)), which stores n values "
            f"at a time for the gradient through any number of steps."
        ) from None


_ad.primitive_transposes[while_p] = _refuse_to_transpose
patches.note(
    "the error for `jax.lax.while_loop` in reverse mode",
    "JAX's message advises a loop of known length. To it is added which loop it is, and that `statetx.while_loop` "
    "has `checkpoint=`. A second gradient of the latter has a message of its own.",
)


def scan_counts(eqn: Eqn) -> tuple[int, int]:
    """The numbers of constants and carries of a scan, its first operands in this order."""
    if "num_carry" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    consts, carry, _ = map(list, eqn.params["ft_in"].unpack())
    return len(consts), len(carry)


def with_scan_constants(eqn: Any, jaxpr: ClosedJaxpr, constants: Sequence[Any]) -> Any:
    """Replace the body of a scan by one that takes `constants` before its other constants."""
    params = {**eqn.params, "jaxpr": jaxpr}
    if "num_carry" in params:
        params["num_consts"] += len(constants)
    else:
        consts, carry, xs = params["ft_in"].unpack()
        params["ft_in"] = packed((tree_of(len(constants) + len(list(consts))), carry, xs))
    return eqn.replace(params=params, invars=[*constants, *eqn.invars])


def with_scan_operands(
    eqn: Any, jaxpr: ClosedJaxpr, constants: Sequence[Any], carry: Sequence[Any], xs: Sequence[Any]
) -> Any:
    """Replace the body and all operands of a scan, as an equation with new results."""
    params = {**eqn.params, "jaxpr": jaxpr, **_counts(jaxpr, constants, carry, xs)}
    if "linear" in params:
        params["linear"] = (False,) * (len(constants) + len(carry) + len(xs))
    length, is_stacked = params["length"], [False] * len(carry) + [True] * (len(jaxpr.out_avals) - len(carry))
    types = zip(jaxpr.out_avals, is_stacked, strict=True)
    outvars = [Var(_core.unmapped_aval(length, 0, aval) if stacked else aval) for aval, stacked in types]
    return eqn.replace(params=params, invars=[*constants, *carry, *xs], outvars=outvars, effects=jaxpr.effects)


# -- loops with traced bounds whose number of runs is known
#
# The bounds of a checkpointed loop's inner loops come from tables in the compiled program, so JAX makes them `while`
# loops, and their equations do not say how often they run. The schedule does. A primitive on the condition has the
# number: the condition is never removed, and vmap, hoisting and dead code elimination keep its equations.

runs_primitive = identity("statetx_runs")
"""The identity, on the condition of a `while` loop: ``runs`` is how often its body runs, a mean over the entries of the
loop.
"""


def counted(condition: Any, runs: Fraction) -> Any:
    """The condition of a `jax.lax.while_loop` whose body runs so often, in the mean over the entries of the loop."""
    return runs_primitive.bind(condition, runs=runs)


def known_runs(eqn: Any) -> Fraction | None:
    """Runs of the body of a loop, as `counted` says; None for any other equation."""
    if eqn.primitive is not while_p:
        return None
    condition = open_jaxpr(eqn.params["cond_jaxpr"])[0]
    return next((e.params["runs"] for e in condition.eqns if e.primitive is runs_primitive), None)


def counted_fori_loop(first: Any, end: Any, body: Callable[[Any, Any], Any], init: Any, runs: Fraction) -> Any:
    """`jax.lax.fori_loop` with traced bounds, of a known mean number of `runs`."""
    return jax.lax.while_loop(
        lambda loop: counted(loop[0] < end, runs), lambda loop: (loop[0] + 1, body(*loop)), (first, init)
    )[1]
