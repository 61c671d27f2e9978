"""Candidates of a search, and the program with its gradient that is compiled for each of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from .. import _jax
from .._equations.compiled import Cost, Program
from .._equations.differentiate import with_pullback
from .._jax import Jaxpr
from .._lift.context import TraceContext
from .._tree import is_float
from ._layout import Layout
from ._option import Option


@dataclasses.dataclass(frozen=True, eq=False)
class Candidate:
    """A compiled choice of options.

    Attributes:
        name: the stock policy's, "no remat" for the baseline, or "plan".
        options: one for each part of `layout`.
        peak: bytes, by the model.
        predicted_cost: of recomputation, by the model.
        added_cost: of recomputation, by the equations of the compiled program; by the model where these do not show it.
        compiled: the costs of the compiled program, gradient included.
        predicted_bytes: temporary bytes, predicted from the model and the candidates compiled before.
    """

    name: str
    layout: Layout
    options: list[Option]
    peak: int
    predicted_cost: float
    added_cost: float
    compiled: Cost
    predicted_bytes: float

    @property
    def temp_bytes(self) -> int:
        return self.compiled.temp_bytes


def with_gradient(
    diff_indices: Sequence[int],
    num_out: int,
    context: TraceContext,
    jaxpr: Jaxpr,
    compiler_options: dict[str, Any] | None,
) -> Program:
    """A program without constants, with the gradient of its first `num_out` outputs with respect to these inputs."""

    def run(*inputs: Any) -> tuple[list[Any], list[Any]]:
        all_outs = _jax.evaluate(jaxpr, (), inputs)
        outs, new_states = all_outs[:num_out], all_outs[num_out:]

        # Outputs without a derivative and new states stay outputs, as in the user's program, so they are not temporary.
        return [jnp.asarray(x) for x in outs if is_float(x)], [*(x for x in outs if not is_float(x)), *new_states]

    return context.program(with_pullback(run, diff_indices), [v.aval for v in jaxpr.invars], compiler_options)
