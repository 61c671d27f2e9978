"""`Passes`: a function's forward pass beside its backward pass, as jaxprs.

``jax.vjp`` returns its pullback as a pytree whose leaves are the residuals. It is staged with these leaves as
additional outputs.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from .. import _jax
from .._cached import cached_property
from .._equations.differentiate import backward_pass, forward_pass
from .._equations.inline import inline
from .._equations.primitives import INLINED, REMAT
from .._jax import Jaxpr
from .._lift.context import TraceContext
from .._lift.wrapper import short_name


class InputOrigin(NamedTuple):
    """The argument, state or constant that an input of the function comes from.

    Attributes:
        origin: "argument", "state" or "constant".
        path: the argument as written in Python (``params['w']``), or the path of the state.
        kind: the state's type.
    """

    origin: str
    path: str = ""
    kind: str = ""


class Passes:
    """The forward and backward pass of a function.

    Attributes:
        name: the function's name.
        forward: the jaxpr of the forward pass. Its outputs are the `num_out` outputs of the function, then the
            residuals.
        backward: the jaxpr of the backward pass. Its inputs are the residuals and the cotangents of the outputs; its
            outputs are the cotangents of the inputs `chosen`.
        sources: the origin of each input of `forward`.
        regions: names of the rematerialized functions; `regions_of` gives those that an equation belongs to.
    """

    def __init__(
        self,
        name: str,
        body: Jaxpr,
        outs: Sequence[int],
        chosen: Sequence[int],
        sources: Sequence[InputOrigin],
        context: TraceContext,
    ):
        self.name = short_name(name)
        self.num_out = len(outs)
        self.regions: list[str] = []

        # Before differentiation, which copies the scope of an equation to all equations that it makes from it.
        body = _tag(body, self.regions)

        def run(*inputs: Any) -> list[Any]:
            results = _jax.evaluate(body, (), inputs)
            return [results[i] for i in outs]

        avals = [v.aval for v in body.invars]

        # Values that the body closes over become inputs in front of the others.
        with context.bind_axes():
            closed, self._pullback = forward_pass(run, avals, chosen, traced_for="statetx.residuals", name=name)
        self._context = context
        self.forward = _jax.without_remat3(closed.jaxpr)
        self.sources = [InputOrigin("constant")] * closed.num_operands + list(sources)
        self.chosen = [closed.num_operands + i for i in chosen]

    @property
    def residuals(self) -> list[Any]:
        """The leaves of the pullback: variables of `forward`, or literals."""
        return self.forward.outvars[self.num_out :]

    @cached_property
    def backward(self) -> Jaxpr:
        """Equations of the backward pass: rematerialized regions and loops whole, other calls inlined."""
        avals = [v.aval for v in self.residuals], [v.aval for v in self.forward.outvars[: self.num_out]]
        name = f"backward of {self.name}"
        with self._context.bind_axes():
            jaxpr, consts = backward_pass(self._pullback, *avals, traced_for="statetx.residuals", name=name)
        return inline(_jax.without_remat3(jaxpr), consts, calls=INLINED - REMAT)


_TAG = "statetx-remat-"


def _tag(x: Any, regions: list[str]) -> Any:
    """Give each rematerialized region its own name scope, which all equations derived from it by differentiation
    inherit.
    """

    def tagged(eqn: Any) -> Any:
        if eqn.primitive.name in REMAT:
            regions.append(short_name(_jax.open_jaxpr(eqn.params["jaxpr"])[0].debug_info.func_name))
            eqn = _jax.with_scope(eqn, f"{_TAG}{len(regions) - 1}")
        return _jax.map_jaxprs(lambda j: _tag(j, regions), eqn)

    return _jax.map_equations(tagged, x)


def regions_of(eqn: Any) -> list[int]:
    """The indices of the rematerialized regions that an equation belongs to, outermost first."""
    return [int(n) for n in re.findall(_TAG + r"(\d+)", _jax.scope(eqn))]
