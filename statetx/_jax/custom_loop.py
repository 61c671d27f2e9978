"""A loop with custom derivative and batching rules, as one equation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.core
import jax.numpy as jnp
from jax._src import core as _core
from jax._src.ad_util import Zero as _Zero
from jax._src.interpreters import ad as _ad
from jax._src.interpreters import batching as _batching
from jax._src.interpreters import mlir as _mlir
from jax._src.lax.control_flow.loops import scan_p

from .._positions import function_of as _function_of
from .equations import ClosedJaxpr, Jaxpr, abstract, as_array, with_nonzero
from .primitives import check_inside


class CustomLoop(Protocol):
    """The loop that `call_loop` runs: a function of arrays with its own rules.

    Attributes:
        body: the jaxpr of a step, ``(*constants, *carry, *x) -> (*carry, *y)``.
        length: the number of steps.
        num_constants, num_carry: the numbers of constants and carries, the first arguments in this order.
        keeps_steps: whether its derivative may save values of every step, so that a policy may choose among them.
    """

    body: Jaxpr
    length: int
    num_constants: int
    num_carry: int
    keeps_steps: bool

    def with_body(self, body: Jaxpr) -> CustomLoop: ...

    def is_plain(self) -> bool:
        """Whether its derivative is the plain loop's when no `vmap` encloses it."""
        ...

    def plain_args(self, args: list, diff_indices: tuple[int, ...]) -> list | None:
        """The arguments at which to differentiate the plain loop instead, if that has the same derivative; else None.

        Args:
            diff_indices: the arguments with a nonzero tangent.
        """
        ...

    def run(self, args: list) -> list: ...

    def jaxpr_for(self, avals: Sequence[Any]) -> ClosedJaxpr:
        """The loop as a closed jaxpr for arguments of these types."""
        ...

    def jvp(self, args: list, tangents: dict[int, Any]) -> tuple[list, list]:
        """The outputs, and the tangents of the float outputs, None for zero; `tangents` holds the nonzero ones by
        argument index.
        """
        ...

    def map(self, args: list, axes: list[int | None], axis_data: Any) -> tuple[list, list[int | None]]:
        """Batch the loop for a `jax.vmap` over these axes of the arguments: the outputs and their batch axes."""
        ...


def loop_of(eqn: Any) -> CustomLoop | None:
    """The loop of an equation made by `call_loop`; None for any other equation."""
    return eqn.params["loop"] if eqn.primitive is _loop_p else None


def with_body(eqn: Any, body: Jaxpr) -> Any:
    """Replace the loop body in an equation made by `call_loop`."""
    loop = eqn.params["loop"].with_body(body)
    # The settings of the equation: the jaxpr of the edited loop is traced as that of the loop was.
    with eqn.ctx.manager:
        jaxpr = loop.jaxpr_for([v.aval for v in eqn.invars])
    return eqn.replace(params={"jaxpr": jaxpr, "loop": loop})


def call_loop(loop: CustomLoop, args: Sequence[Any]) -> list[Any]:
    """Run a loop whose rules are called as late as the rules of JAX's own primitives.

    A `jax.custom_jvp` would be too early: in a staged function its rule is traced once, without the enclosing `vmap`.
    """
    return _loop_p.bind(*args, jaxpr=loop.jaxpr_for([jax.typeof(x) for x in args]), loop=loop)


_loop_p = _core.Primitive("statetx_loop")
_loop_p.multiple_results = True


def _loop_jvp(args: Any, tangents: Any, *, loop: CustomLoop, **_: Any) -> tuple[list, list]:
    args = [as_array(x) for x in args]
    tangents, diff_indices = with_nonzero(tangents)
    outs, out_tangents = loop.jvp(args, {i: tangents[i] for i in diff_indices})
    float_tangents = iter(out_tangents)
    tangents = [next(float_tangents) if jnp.issubdtype(x.dtype, jnp.inexact) else None for x in outs]
    zeros = [_Zero(abstract(x).to_tangent_aval()) for x in outs]
    return outs, [zero if t is None else t for t, zero in zip(tangents, zeros, strict=True)]


def _loop_linearize(is_vjp: bool, nonzeros: Any, *args: Any, jaxpr: ClosedJaxpr, loop: CustomLoop) -> Any:
    """Use the linearization of a scan if the derivative is the plain loop's.

    JAX caches that of a scan; the fallback would trace `_loop_jvp` on every call.
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
    """Transpose a loop that is linear in some arguments: the ones that are undefined primals, of which only types
    exist.
    """
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


_loop_p.def_impl(lambda *args, loop, jaxpr: loop.run(list(args)))
# With effects, or JAX would take a loop with a debug callback for pure, and remove it when nothing reads its results.
_loop_p.def_effectful_abstract_eval(lambda *_, loop, jaxpr: (jaxpr.out_avals, jaxpr.effects))
_ad.primitive_jvps[_loop_p] = _loop_jvp
_ad.primitive_linearizations[_loop_p] = _loop_linearize
_ad.primitive_transposes[_loop_p] = _loop_transpose
_batching.fancy_primitive_batchers[_loop_p] = _loop_batch

_mlir.register_lowering(
    _loop_p,
    _mlir.lower_fun(lambda *args, loop, jaxpr: _core.jaxpr_as_fun(jaxpr)(*args), multiple_results=True),
)

check_inside(_loop_p, lambda *_, loop, jaxpr: jaxpr)
