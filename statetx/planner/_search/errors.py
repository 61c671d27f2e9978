"""Errors of a search that finds no plan."""

from __future__ import annotations

from ..._equations.compiled import Cost
from ..._errors import PlanError
from ..._jax import Eqn
from ..._text import format_bytes, short_path
from ...residuals._trace import user_line
from .._budget import STEP, ByteBudget, unit_question
from .capture import Captured


def impossible(captured: Captured, budget: ByteBudget, fixed: Cost) -> PlanError:
    """The error that arguments and outputs leave nothing of the budget for temporaries."""
    constant_bytes = captured.constant_bytes  # which the budget does not count
    donated = f" ({format_bytes(fixed.alias_bytes)} of them in place of donated arguments)" if fixed.alias_bytes else ""
    constants = f" Its constants, which do not count, take {format_bytes(constant_bytes)}." if constant_bytes else ""
    return PlanError(
        f"No plan for {captured.name} keeps the budget of {format_bytes(int(budget.amount))}: arguments take "
        f"{format_bytes(fixed.argument_bytes)} and outputs {format_bytes(fixed.output_bytes)}{donated}, which no plan "
        f"changes, so none was searched for.{constants}{unit_question(budget.amount)}\n"
        f"Fix: allow more than {format_bytes(fixed.fixed_bytes)}; make the arguments smaller (a smaller batch, "
        f"bfloat16, more devices){'' if fixed.alias_bytes else ', or plan the jitted step that donates them'}; "
        f"or count temporaries alone, of='temporaries'.",
        smallest_bytes=fixed.fixed_bytes,
    )


def no_plan(
    captured: Captured,
    budget: ByteBudget,
    fixed: Cost,
    smallest_bytes: int,
    is_complete: bool,
    has_saving: bool,
    undivided: tuple[Eqn, int] | None,
) -> PlanError:
    """The error that no candidate for a program keeps a budget.

    Args:
        smallest_bytes: the least bytes reached, counted as in the budget.
        is_complete: whether the search has ended before its time limit.
        has_saving: whether anything that is compiled takes less than the program without rematerialization.
        undivided: as in `Search`.
    """
    name, budget_bytes, is_late = captured.name, int(budget.amount), not is_complete
    late = ", when the time limit ended the search" if is_late else ""
    fixes = ["give the search more time (time_limit=None)"] if is_late else []
    held = ""
    if undivided is not None and undivided[1] > budget.left(fixed):
        eqn, held_bytes = undivided
        file, line, _ = user_line(eqn)
        place = f" at {short_path(file)}:{line}" if file else ""
        held = (
            f" The backward pass of one operation takes {format_bytes(held_bytes)} of it, which no plan changes: "
            f"{eqn.primitive.name}{place}."
        )
        fixes.insert(0, "let this operation store less, such as fewer checkpoints of a solver")
    elif captured.is_step and not has_saving:  # its gradients take nothing that a plan could save
        loss = f"if {name} is a loss, give argnums=, so that its own gradient is planned (it takes small ones itself)"
        fixes.insert(0, loss)
    parts = ""
    if budget.of == STEP:
        donate = "" if fixed.alias_bytes else " (plan the jitted step, if it donates arguments)"
        parts = (
            f" Arguments take {format_bytes(fixed.argument_bytes)} of it and outputs "
            f"{format_bytes(fixed.output_bytes - fixed.alias_bytes)}, which no plan changes{donate}."
        )
    fixes.append("allow that much; or rematerialize smaller parts, make the batch smaller, or let the loop's steps")
    return PlanError(
        f"No plan for {name} keeps the budget of {format_bytes(budget_bytes)}: the smallest found needs "
        f"{format_bytes(smallest_bytes)}, {format_bytes(smallest_bytes - budget_bytes)} "
        f"more{late}.{held}{parts}{unit_question(budget.amount)}\nFix: {'; '.join(fixes)} compute less.",
        smallest_bytes=smallest_bytes,
    )
