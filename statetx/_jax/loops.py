"""Make and change the equation of `jax.lax.scan`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import jax
from jax._src.interpreters import ad as _ad
from jax._src.lax.control_flow import loops as _loops
from jax._src.lax.control_flow.loops import scan_p, while_p

from . import patches
from .equations import ClosedJaxpr, open_jaxpr
from .meshes import replicated
from .primitives import identity
from .versions import SCAN_HAS_TREES, packed, tree_of


def bind_scan(
    jaxpr: ClosedJaxpr, constants: Sequence[Any], carry: Sequence[Any], xs: Sequence[Any], *, length: int, reverse: bool
) -> list[Any]:
    """Run `jax.lax.scan` of an already staged body ``(*constants, *carry, *x) -> (*carry, *y)``."""
    counts: dict[str, Any] = {"num_consts": len(constants), "num_carry": len(carry)}
    if SCAN_HAS_TREES:
        sizes = [tree_of(len(values)) for values in (constants, carry, xs)]
        num_ys = len(jaxpr.out_avals) - len(carry)
        ys = tree_of(num_ys).filter_with_mask([True] * num_ys)  # no ys are forwarded
        counts = {"ft_in": packed(tuple(sizes)), "ft_out": packed((sizes[1], ys))}
    return scan_p.bind(*constants, *carry, *xs, jaxpr=jaxpr, length=length, reverse=reverse, unroll=1, **counts)


_REVERSAL = str(Path(__file__).parents[1] / "_loops" / "reversal.py")
_transpose_while = _ad.primitive_transposes[while_p]


def _refuse_to_transpose(*args: Any, **params: Any) -> Any:
    try:
        return _transpose_while(*args, **params)
    except ValueError as e:
        info = getattr(open_jaxpr(params["body_jaxpr"])[0], "debug_info", None)
        if info is not None and _REVERSAL in info.func_src_info:
            raise ValueError(
                "The gradient of a statetx.while_loop with checkpoint= cannot be differentiated again in reverse "
                "mode: its own loops end when "
                "their steps are done.\n"
                "Fix: take the outer derivative in forward mode, as jax.hessian(f) and jax.jvp(jax.grad(f), ...) do; "
                "or use statetx.scan with "
                "the largest number of steps as its length, whose gradient can be differentiated in both modes."
            ) from None
        name = "fori_loop" if info is not None and info.traced_for == "fori_loop" else "while_loop"
        place = f"{name}({info.func_src_info})" if info is not None else name
        bounds = "give Python integers as bounds, or " if name == "fori_loop" else ""
        raise ValueError(
            f"{e}\nThe loop: {place}.\nFix: {bounds}use statetx.while_loop(..., checkpoint=statetx.policies.Slots(n)), "
            f"which stores n values at a time for the gradient through any number of steps."
        ) from None


_ad.primitive_transposes[while_p] = _refuse_to_transpose
patches.note(
    "the error for `jax.lax.while_loop` in reverse mode",
    "JAX's message advises a loop of known length. To it is added which loop it is, and that `statetx.while_loop` "
    "has `checkpoint=`. A second gradient of the latter has a message of its own.",
)


def empty(length: int, aval: Any) -> Any:
    """An uninitialized array for `length` values of type `aval`."""
    # The function that JAX's own scan makes its ys with: zeros would be written once before they are overwritten.
    return replicated(_loops._empty_array((length,), (None,), aval))


def scan_counts(eqn: Any) -> tuple[int, int]:
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


# -- loops with traced bounds whose number of runs is known
#
# The bounds of a checkpointed loop's inner loops come from tables in the compiled program, so JAX makes them `while`
# loops, and their equations do not say how often they run. The schedule does. The number stands on the condition, in a
# primitive: the condition is never removed, and what rewrites the loop (vmap, hoisting, dead code) keeps its equations.

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
