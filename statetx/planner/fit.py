"""`Fit`: the policy ``"fit:2GiB"``, which plans each function that it is used on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .._equations.structure import Body
from .._lift.context import TraceContext
from .._remat.rewriter import Rewriter
from .._text import format_bytes
from .._tree import is_float
from ._budget import fit_budget, read_budget, start_search


class Fit(Rewriter):
    """``policy="fit:2GiB"``: plan each function it is used on, for the gradient with respect to all its float inputs.

    Args:
        budget: temporary bytes of that function's gradient, compiled on its own.
        objective, offload, time_limit: as in `plan`.
    """

    def __init__(
        self,
        budget: int | float | str,
        *,
        objective: str = "flops",
        offload: bool = False,
        time_limit: float | None = None,
    ):
        self.budget = read_budget(budget)
        self._options = (objective, offload, time_limit)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Fit) and (self.budget, self._options) == (other.budget, other._options)

    def __hash__(self) -> int:
        return hash((self.budget, self._options))

    def __repr__(self) -> str:
        return f"fit:{self.budget if isinstance(self.budget, float) else format_bytes(self.budget).replace(' ', '')}"

    def rewrite(self, body: Body, name: str, num_out: int) -> Callable:
        # Memory depends on the vmaps and shardings around the call, so each of them has a plan of its own.
        planned: dict[TraceContext, Body] = {}

        def run(operands: Sequence[Any], *args: Any) -> list[Any]:
            context = TraceContext.of([*operands, *args])
            if context not in planned:
                planned[context] = self._plan(body, name, num_out, context)
            return planned[context](operands, *args)

        return run

    def _plan(self, body: Body, name: str, num_out: int, context: TraceContext) -> Body:
        # The derivative that will be taken is not known yet. With respect to all float inputs it takes the most memory, so the
        # plan errs towards saving less than it could.
        diff_indices = [i for i, v in enumerate(body.jaxpr.invars) if is_float(v.aval)]
        search = start_search(body.jaxpr, diff_indices, num_out, *self._options, context=context)
        candidate = fit_budget(search, self.budget, name)
        return Body(candidate.layout.rewrite(candidate.options), [])
