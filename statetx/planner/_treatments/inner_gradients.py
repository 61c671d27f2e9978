"""Gradients inside of a loss, rematerialized by variants (decision 43)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ... import _jax
from ..._equations.structure import Body
from ..._jax import Array, ArrayFunction, Arrays
from ..._loops.strategy import Lengths
from ..._remat import decide, fence
from ..._remat.parse import as_policy
from ..._remat.policy import Policy
from ..._remat.rewriter import Rewriter
from .._program.cuts import candidates
from .._program.flat import Flat, Part, flatten, run
from .loops import loop_of

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
        starts, first = {start for start, _ in blocks}, 0
        replacements: list[ArrayFunction | None] = []
        for part in parts:
            replacements.append(self._replacement(part, name) if part.eqn is not None or first in starts else None)
            first += 1 if part.eqn is not None else len(part.jaxpr.eqns)
        jaxpr = program.jaxpr

        def call(operands: Sequence[Array], *args: Array) -> Arrays:
            return run(jaxpr, parts, replacements, [*operands, *args])

        return call

    def __str__(self) -> str:
        return "without rematerialization" if self.variant == PLAIN else f"with policy {self.variant!r} on their blocks"

    def _replacement(self, part: Part, name: str) -> ArrayFunction | None:
        """A block, or the steps of a loop, rematerialized; None to leave it unchanged."""
        policy = None if self.variant == PLAIN else as_policy(self.variant)
        assert policy is None or isinstance(policy, Policy)
        if part.eqn is not None:
            # Without a policy it has no rematerialization that the user gave to its steps, either.
            strategy = None if policy is None else Lengths(part.eqn.params["length"])
            # With a fence: XLA unrolls loops of few steps, and would merge the recomputation with the first run.
            return loop_of(part, strategy, policy, fence="auto")
        # Side effects are not run again, as in the regions of plans.
        if policy is None or _jax.forbidden_effects(part.jaxpr):
            return None
        jaxpr, jax_policy = decide.apply(policy, part.jaxpr, (), name)
        fenced = fence.with_fence(jax_policy, "auto")
        return lambda *args: _jax.rematerialize(jaxpr, args, policy=fenced, prevent_cse=True)
