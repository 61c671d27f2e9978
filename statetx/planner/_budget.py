"""A budget in bytes or as a fraction of the baseline's memory, and the search for the best candidate within it."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Sequence
from typing import Any

from .. import _jax
from .._equations.compiled import Program
from .._equations.flops import flops
from .._errors import PlanError
from .._jax import Jaxpr
from .._lift.context import TraceContext
from .._text import format_bytes, parse_bytes
from ._search import Candidate, Search
from .machine import cost_model


def read_budget(argument: Any) -> int | float:
    """Bytes as an int, or a fraction of the baseline's as a float. 1 is a byte, 1.0 the whole."""
    budget: Any = argument
    if isinstance(argument, str):
        # "0.5" is a fraction, as 0.5 is; "2.5GiB" and "1" are bytes.
        try:
            budget = (
                float(argument)
                if "." in argument and argument.strip().replace(".", "").isdigit()
                else parse_bytes(argument.strip())
            )
        except ValueError:
            budget = None

    # NumPy's numbers count as well. A bool is an `int` in Python, but not an amount.
    is_number = isinstance(budget, numbers.Real) and not isinstance(budget, bool)
    value = float(budget) if is_number else math.nan
    if not math.isfinite(value) or value <= 0 or (value > 1 and value != int(value)):
        raise PlanError(
            f"budget={argument!r} is not a size; use 2**31, '2GiB' or a fraction of the memory without a plan, such as 0.5."
        )
    is_fraction = value < 1 or (value == 1 and not isinstance(budget, numbers.Integral))
    return value if is_fraction else int(value)


def budget_bytes(search: Search, budget: int | float) -> int:
    return budget if isinstance(budget, int) else search.fraction_of_baseline(budget)


def start_search(
    jaxpr: Jaxpr,
    diff_indices: Sequence[int],
    num_out: int,
    objective: str,
    offload: bool,
    time_limit: float | None,
    report: Callable[[str], None] = lambda text: None,
    program_of: Callable[[Jaxpr, dict[str, Any]], Program] | None = None,
    context: TraceContext = TraceContext(),  # noqa: B008
) -> Search:
    # Operations have no exchange rate with transfers: under "flops" offloading is free, and limited by memory alone. Without host
    # memory nothing is offloaded; the values are saved or recomputed.
    per_byte = None
    equation_cost: Callable[[Any], float] = flops
    if objective == "time":
        model = cost_model()
        equation_cost = model.seconds
    if offload and _jax.HOST_MEMORY in _jax.memory_spaces():
        per_byte = 1 / cost_model().host_bytes_per_second if objective == "time" else 0.0
    options = {"equation_cost": equation_cost, "offload": per_byte, "time_limit": time_limit, "report": report}
    return Search(jaxpr, diff_indices, num_out, program_of=program_of, context=context, **options)


def fit_budget(search: Search, budget: int | float, name: str) -> Candidate:
    bytes_ = budget_bytes(search, budget)
    candidate = search.fit(bytes_)
    if candidate is None:
        least = search.smallest().temp_bytes
        late = ", when the time limit ended the search" if search.is_late() else ""
        raise PlanError(
            f"No plan for {name} keeps the budget of {format_bytes(bytes_)}: the smallest found needs "
            f"{format_bytes(least)}, {format_bytes(least - bytes_)} more{late}.\nFix: allow that much; or rematerialize smaller "
            f"parts, make the batch smaller, or let the loop's steps compute less.",
            smallest_bytes=least,
        )
    return candidate
