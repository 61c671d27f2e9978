"""Gradients inside of a loss, rematerialized by variants (decision 43)."""

from __future__ import annotations

import dataclasses

from ... import _jax
from ..._equations.structure import Body
from ..._jax import ArrayFunction
from ..._remat.parse import as_value_policy
from ..._remat.rewriter import Rewriter
from .._program.cuts import candidates
from .._program.flat import Flat, flatten
from . import UNPLANNED, AsWritten, rewrite
from .treatment import Decision

# The equations of a gradient that a meta-learner or a gradient penalty takes are part of the loss that is planned, its
# backward pass among them. What that backward pass computes again is decided when the gradient is taken, not by a plan
# for the equations. So the loss is planned in several variants: its inner gradients without rematerialization, and with
# each of some policies on the blocks of their functions.

PLAIN = "no remat"
VARIANTS = (PLAIN, "nothing", "dots")


@dataclasses.dataclass(frozen=True)
class InnerGradients(Rewriter):
    """Rematerializes the blocks of functions that are differentiated, the user's or else by structure, and the steps of
    their loops.

    Attributes:
        variant: `PLAIN` to rematerialize nothing, else the name of a policy.
    """

    variant: str

    def rewrite(self, body: Body, name: str, num_out: int, /) -> ArrayFunction:
        program = Flat(flatten(body.jaxpr))
        cuts, blocks = candidates(program).stock
        parts = program.split(cuts)
        starts, first, decisions = {start for start, _ in blocks}, 0, list[Decision]()
        # With a fence also loops: XLA unrolls those of few steps, and would merge the recomputation with the first run.
        written = Decision(None, () if self.variant == PLAIN else (AsWritten(as_value_policy(self.variant)),))
        for part in parts:
            # Side effects are not run again, as in the regions of plans.
            is_block = part.eqn is not None or (first in starts and not _jax.forbidden_effects(part.jaxpr))
            decisions.append(written if is_block else UNPLANNED)
            first += 1 if part.eqn is not None else len(part.jaxpr.eqns)
        return Body(rewrite(program.jaxpr, parts, decisions), [])

    def __str__(self) -> str:
        return "without rematerialization" if self.variant == PLAIN else f"with policy {self.variant!r} on their blocks"
