"""The derivative of a region, staged: its forward pass, which computes residuals, and its backward pass, which reads
them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Container, Sequence
from typing import Any

import jax.numpy as jnp

from ... import _jax
from ..._equations.differentiate import backward_pass, forward_pass
from ..._equations.inline import inline
from ..._equations.primitives import JIT
from ..._equations.structure import Body
from ..._jax import Jaxpr, Literal, Var


@dataclasses.dataclass(frozen=True, eq=False)
class ForwardPass:
    """A forward pass: ``(constants, inputs) -> (differentiated outputs, residuals)``.

    Attributes:
        num_outs: number of differentiated outputs.
        num_constants: arrays that rules of the derivative close over; the region's own inputs follow.
    """

    jaxpr: Jaxpr
    num_outs: int
    num_constants: int = 0

    @property
    def inputs(self) -> list[Any]:
        """The variables of the region's inputs, in order."""
        return list(self.jaxpr.invars[self.num_constants :])

    @functools.cached_property
    def residuals(self) -> set[Any]:
        """The variables that the backward pass reads, inputs among them."""
        return {v for v in self.jaxpr.outvars[self.num_outs :] if isinstance(v, Var)}

    @functools.cached_property
    def computed_residuals(self) -> list[Any]:
        """The distinct residuals that are not inputs, in order."""
        inputs = set(self.jaxpr.invars)
        atoms = self.jaxpr.outvars[self.num_outs :]
        return list({v: None for v in atoms if not isinstance(v, Literal) and v not in inputs})

    @functools.cached_property
    def producer(self) -> dict[Any, int]:
        """The number of the equation that computes each variable."""
        return {v: i for i, e in enumerate(self.jaxpr.eqns) for v in e.outvars}

    def needed(self, available: Container[Any] = ()) -> list[int]:
        """The numbers of the equations that the residuals depend on, in order, where some variables are available."""
        # Backwards from the residuals, not beyond available variables and inputs: a variable without a producer is an
        # input.
        stack, needed = list(self.computed_residuals), set()
        while stack:
            v = stack.pop()
            i = self.producer.get(v)
            if v in available or i is None or i in needed:
                continue
            needed.add(i)
            stack += [u for u in self.jaxpr.eqns[i].invars if isinstance(u, Var)]
        return sorted(needed)


@dataclasses.dataclass(frozen=True)
class BackwardPass:
    """A backward pass.

    Attributes:
        residuals, cotangents: its inputs.
        forward_residuals: for each of `residuals`, the variable of the forward pass.
    """

    jaxpr: Jaxpr
    residuals: list[Any]
    forward_residuals: list[Any]
    cotangents: list[Any]


def derivative_of(
    jaxpr: Jaxpr, diff_indices: Sequence[int], out_indices: Sequence[int]
) -> tuple[ForwardPass, BackwardPass]:
    """Stage the derivative of some outputs of a region with respect to some inputs."""

    def run(*inputs: Any) -> list[Any]:
        outs = _jax.evaluate(jaxpr, (), inputs)
        return [jnp.asarray(outs[i]) for i in out_indices]

    in_avals = [v.aval for v in jaxpr.invars]
    forward = forward_pass(run, in_avals, diff_indices, traced_for="statetx.plan", name="forward")
    forward_jaxpr = inline(forward.body.jaxpr, calls=JIT, deep=False)
    num_outs = len(out_indices)
    residuals = forward_jaxpr.outvars[num_outs:]

    avals = [v.aval for v in residuals], [v.aval for v in forward_jaxpr.outvars[:num_outs]]
    body = Body.close(*backward_pass(forward.pullback, *avals, traced_for="statetx.plan", name="backward"))
    backward_jaxpr = inline(_bind_literals(body, residuals), calls=JIT, deep=False)

    # Literal residuals are inlined, so the inputs are the other residuals in order, then the cotangents.
    variables = [v for v in residuals if isinstance(v, Var)]
    inputs, cotangents = backward_jaxpr.invars[: len(variables)], backward_jaxpr.invars[len(variables) :]
    passes = ForwardPass(forward_jaxpr, num_outs, forward.body.num_operands)
    return passes, BackwardPass(backward_jaxpr, inputs, variables, cotangents)


def without_identities(
    forward: ForwardPass, backward: BackwardPass, is_identity: Callable[[Any], bool]
) -> tuple[ForwardPass, BackwardPass]:
    """Return the derivative without the equations that are identities."""
    plain, read = _without(forward.jaxpr, is_identity)
    variables = [read(v) for v in backward.forward_residuals]
    backward_jaxpr, _ = _without(backward.jaxpr, is_identity)
    return (
        dataclasses.replace(forward, jaxpr=plain),
        dataclasses.replace(backward, jaxpr=backward_jaxpr, forward_residuals=variables),
    )


def _without(jaxpr: Jaxpr, is_identity: Callable[[Any], bool]) -> tuple[Jaxpr, Callable[[Any], Any]]:
    """A jaxpr without some equations, and what is read instead of an atom."""
    operands: dict[Any, Any] = {}
    read = lambda atom: atom if isinstance(atom, Literal) else operands.get(atom, atom)
    eqns = []
    for eqn in jaxpr.eqns:
        eqn = eqn.replace(invars=[read(a) for a in eqn.invars])
        if is_identity(eqn):
            operands[eqn.outvars[0]] = eqn.invars[0]
        else:
            eqns.append(eqn)
    return _jax.rebuild(jaxpr, invars=jaxpr.invars, outvars=[read(a) for a in jaxpr.outvars], eqns=eqns), read


def _bind_literals(backward: Body, residuals: Sequence[Any]) -> Jaxpr:
    """The backward pass without dead code, with its closed-over values and literal residuals inlined."""
    atoms: list[Any] = [Literal(x, v.aval) for x, v in zip(backward.operands, backward.jaxpr.invars, strict=False)]
    atoms += residuals
    literals = {v: a for v, a in zip(backward.jaxpr.invars, atoms, strict=False) if isinstance(a, Literal)}
    return _jax.without_dead_code(_jax.with_literals(backward.jaxpr, literals))
