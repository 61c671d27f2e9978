"""Reports on loops with stored carries: what is kept, how often the steps run, and what other policies would give."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from .. import _jax
from .._lift.context import TraceContext, device_bytes
from .._lift.wrapper import name_of, refuse_value
from .._loops.backward import BackwardStep
from .._loops.checkpointed import CheckpointedLoop, memory_for, runs_with_rerun
from .._loops.step import Step
from .._loops.tune import Sized, differentiated_by_all
from .._remat.parse import as_sequence, as_value_policy
from .._tables import Cell, Column, Table, Tabular
from .._text import format_bytes
from .._typing import Policy
from ..transforms.abstract import staged_jaxpr

_POLICIES: tuple[Any, ...] = (None, "dots", "nothing")


@dataclasses.dataclass(frozen=True)
class LoopRow:
    """A loop with one policy for its steps.

    Attributes:
        loop: its name.
        policy: its repr; ``'-'`` without one.
        is_own: whether it is the loop's own policy; the other rows say what it would give.
        length: the number of steps.
        slots: how many carries there is room for; 0 if the loop stays plain.
        carry_bytes, residual_bytes: of a carry, and of what a step keeps for its derivative.
        is_mixed: whether slots hold what steps keep, too.
        runs: how often a gradient runs each step, in the mean. Of steps whose residuals are kept this includes what the policy makes run again.
        carry_runs: the same if slots held carries only.
    """

    loop: str
    policy: str
    is_own: bool
    length: int
    slots: int
    carry_bytes: int
    residual_bytes: int
    is_mixed: bool
    runs: float
    carry_runs: float


class LoopReport(Tabular):
    """The loops with stored carries of a function: a table of `LoopRow`.

    Prints as text, in colors with ``rich.print``, as HTML in a notebook.

    Attributes:
        name: the function's name.
        rows: for each loop one with its own policy, then the others.
    """

    def __init__(self, name: str, rows: Sequence[LoopRow]):
        self.name = name
        self.rows = tuple(rows)

    def _table(self) -> Table:
        num = sum(r.is_own for r in self.rows)
        title = f"{self.name}: {num} loop{'' if num == 1 else 's'} with stored carries"
        columns = [
            Column("loop", rank=1),
            Column("policy", code=True),
            Column("steps", "right", rank=2),
            Column("slots", "right"),
            Column("a carry", "right"),
            Column("kept by a step", "right"),
            Column("runs a step", "right"),
            Column("with carries only", "right", rank=1),
        ]
        least = {r.loop: min(x.runs for x in self.rows if x.loop == r.loop) for r in self.rows}
        rows = [
            [
                Cell(r.loop if r.is_own else ""),
                Cell(r.policy if r.is_own else f"would be {r.policy}"),
                Cell(f"{r.length:,}"),
                Cell(str(r.slots) if r.slots else "plain"),
                Cell(format_bytes(r.carry_bytes)),
                Cell(format_bytes(r.residual_bytes)),
                Cell(f"{r.runs:.2f}", "green" if r.runs == least[r.loop] else ""),
                Cell(f"{r.carry_runs:.2f}"),
            ]
            for r in self.rows
        ]
        return Table(title, columns, rows)


@_jax.api_boundary
def loop_report(
    fun: Callable[..., Any], /, *args: Any, policies: Policy | Sequence[Policy] = _POLICIES, **kwargs: Any
) -> LoopReport:
    """Report on the loops in a function that store carries: bytes, and how often a gradient runs each step.

    For each loop with ``checkpoint=`` slots, a size or ``"auto"``: bytes of a carry, and of what a step keeps for its derivative; the number
    of slots; runs of each step. Where slots hold what steps keep, fewer bytes of it mean fewer runs: further rows say what other
    policies would give. Nothing runs, and no state changes; a loop with a size is compiled, as its gradient would be.

    Listed are `scan` and `fori_loop` with such a strategy, also within `Truncated` and in the steps of one another. Not listed are `while_loop`, whose
    number of steps is unknown, loops with `Levels` or `Lengths`, and loops that `fun` itself differentiates.

    Args:
        fun: a function that may read and write states: the loss, not its gradient.
        *args, **kwargs: its arguments.
        policies: a policy for steps, or a sequence of them, to compare with a loop's own; ``()`` for no comparison.

    Returns:
        `LoopReport`. What a step keeps is counted for a derivative with respect to all its float inputs.

    Raises:
        PolicyError: `policies` is neither a policy nor a sequence of policies.

    Source:
        Griewank and Walther 2000; Maddison 2024, arXiv 2305.09568. The counts are those of the compiled program.

    Example:
        >>> import jax.numpy as jnp, statetx
        >>> from statetx.policies import Slots
        >>> w = jnp.eye(64) / 2
        >>> def loss(h):
        ...     return statetx.scan(lambda h, _: (jnp.sin(h @ w), None), h, None, 1000, checkpoint=Slots(20))[0].sum()
        >>> report = statetx.loop_report(loss, jnp.ones((8, 64)))
        >>> row = report.rows[0]
        >>> row.carry_bytes, row.residual_bytes, row.runs, row.carry_runs
        (2048, 4096, 3.035, 3.75)
    """
    refuse_value("loop_report", fun)
    compared = [None if p is None else as_value_policy(p) for p in as_sequence(policies, "loop_report")]
    jaxpr = staged_jaxpr("loop_report", fun, args, kwargs).jaxpr
    return LoopReport(name_of(fun), [row for loop in _loops(jaxpr) for row in _rows(loop, compared)])


def _loops(jaxpr: Any) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        loop = _jax.loop_of(eqn)
        if loop is not None:
            yield loop
            yield from _loops(loop.body)
        else:
            for inner in _jax.inner_jaxprs(eqn):
                yield from _loops(inner)


def _rows(loop: Any, policies: Sequence[Any]) -> Iterator[LoopRow]:
    if isinstance(loop, Sized):
        loop = loop.chosen(TraceContext())
    step: Step = loop.step
    own = step.policy
    yield _row(loop, step, is_own=True)
    for policy in policies:
        if policy != own:
            yield _row(loop, step.with_length(step.length, policy), is_own=False)


def _row(loop: Any, step: Step, *, is_own: bool) -> LoopRow:
    backward = differentiated_by_all(step)
    length = step.length
    facts: dict[str, Any] = {
        "loop": step.name,
        "policy": "-" if step.policy is None else repr(step.policy),
        "is_own": is_own,
        "length": length,
        "carry_bytes": sum(map(device_bytes, step.slot_avals)),
        "residual_bytes": sum(map(device_bytes, backward.residual_avals)),
    }
    if not isinstance(loop, CheckpointedLoop):
        return LoopRow(**facts, slots=0, is_mixed=False, runs=1.0, carry_runs=1.0)
    runs, carry_runs, is_mixed = _runs(loop, backward)
    return LoopRow(**facts, slots=loop.slots, is_mixed=is_mixed, runs=runs, carry_runs=carry_runs)


def _runs(loop: CheckpointedLoop, step: BackwardStep) -> tuple[float, float, bool]:
    num_blocks, rest = divmod(loop.length, loop.block)
    keeps = step if loop.block == 1 and not loop.offload else None
    _, carries_only, _ = memory_for(num_blocks, loop.slots, loop.step, None)
    _, chosen, is_mixed = memory_for(num_blocks, loop.slots, loop.step, keeps)

    def of(num_runs: float) -> float:
        # A block runs once to be differentiated, and the rest of the loop, shorter than a block, twice.
        return (num_runs * loop.block + 2 * rest) / loop.length

    return of(runs_with_rerun(chosen, step) if is_mixed else chosen.num_runs), of(carries_only.num_runs), is_mixed
