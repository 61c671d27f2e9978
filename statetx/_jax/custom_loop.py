"""A loop with a derivative of its own, as one equation."""

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

from .._positions import function_of
from .equations import ClosedJaxpr, Jaxpr, abstract


class CustomLoop(Protocol):
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

    def with_body(self, body: Jaxpr) -> CustomLoop: ...

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


def loop_of(eqn: Any) -> CustomLoop | None:
    """The loop of an equation that `call_loop` made; None of other equations."""
    return eqn.params["loop"] if eqn.primitive is _loop_p else None


def with_body(eqn: Any, body: Jaxpr) -> Any:
    """An equation that `call_loop` made, with another body."""
    loop = eqn.params["loop"].with_body(body)
    with eqn.ctx.manager:
        jaxpr = loop.jaxpr_for([v.aval for v in eqn.invars])
    return eqn.replace(params={"jaxpr": jaxpr, "loop": loop})


def call_loop(loop: CustomLoop, args: Sequence[Any]) -> list[Any]:
    """Run a loop with rules of its own, which are called as late as those of JAX's own operations.

    Those of `jax.custom_jvp` are not: in a function that is staged the rule is traced once, without the `vmap` around.
    """
    return _loop_p.bind(*args, jaxpr=loop.jaxpr_for([jax.typeof(x) for x in args]), loop=loop)


_loop_p = _core.Primitive("statetx_loop")
_loop_p.multiple_results = True


def _loop_jvp(args: Any, tangents: Any, *, loop: CustomLoop, **_: Any) -> tuple[list, list]:
    has_tangent = [type(t) is not _Zero and t.dtype != jax.dtypes.float0 for t in tangents]
    outs, pushed = loop.jvp(list(args), {i: t for i, t in enumerate(tangents) if has_tangent[i]})
    rest = iter(pushed)
    is_float = [jnp.issubdtype(x.dtype, jnp.inexact) for x in outs]
    return outs, [
        next(rest) if f else _Zero(abstract(x).to_tangent_aval()) for x, f in zip(outs, is_float, strict=True)
    ]


def _loop_linearize(is_vjp: bool, nonzeros: Any, *args: Any, jaxpr: ClosedJaxpr, loop: CustomLoop) -> Any:
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


def _loop_batch(axis: Any, args: Any, dims: Any, *, loop: CustomLoop, **_: Any) -> tuple[list, list]:
    return loop.map(list(args), list(dims), axis)


def _loop_transpose(cts: Any, *args: Any, jaxpr: ClosedJaxpr, loop: CustomLoop) -> list[Any]:
    """Of a loop that is linear in some arguments, in place of which stand their types."""
    linear = [i for i, x in enumerate(args) if _ad.is_undefined_primal(x)]
    has_ct = [i for i, ct in enumerate(cts) if type(ct) is not _Zero]

    def run(*operands: Any) -> list[Any]:
        outs = _core.jaxpr_as_fun(jaxpr)(*operands)
        return [outs[i] for i in has_ct]

    found = iter(
        jax.linear_transpose(function_of(run, args, linear), *(args[i].aval for i in linear))([cts[i] for i in has_ct])
    )
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
