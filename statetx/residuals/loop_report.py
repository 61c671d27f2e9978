"""Reports on loops with stored carries: stored bytes, runs of the steps, also under other policies.

A gradient has an equation for each loop that it differentiates, with a note of the loop and of its differentiated
inputs. So the loops are found in the program that is traced, and counted as they run there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax

from .. import _jax
from .._lift.context import device_bytes
from .._lift.wrapper import check_callable
from .._loops import online
from .._loops.backward import BackwardStep
from .._loops.checkpointed import LoopOfSlots
from .._loops.derivative import Differentiated
from .._loops.step import LoopStep
from .._loops.tune import LoopOfLevels
from .._remat.override import override
from .._remat.parse import as_sequence, as_value_policy
from .._segments.disk import LoopOnDisk, StoredSizes
from .._segments.schedule import Moment, Reverse, runs_of
from .._tables import Cell, Column, Table, Tabular
from .._text import format_bytes
from .._typing import Policy
from ._trace import TracedCall, inspects
from .measure import ArrayProgram

_POLICIES: tuple[Any, ...] = (None, "dots", "nothing")
_LENGTHS = (10, 100, 1000, 10_000)  # of a loop of unknown length


class Tier(NamedTuple):
    """A place of carries: how many it has at a time at the most, cotangents included, and their bytes.

    The device has the loop's argument, the stored carries, the one at hand, its next value, and cotangents. Up to two
    more may wait for the thread that writes files. The disk has the carries of the schedule, the last one, and the
    cotangents of two segments; the outputs and cotangents of the loop's length count in its bytes.
    """

    name: str
    num_carries: int
    num_bytes: int


@dataclasses.dataclass(frozen=True)
class LoopRow:
    """A loop with one policy for its steps.

    Attributes:
        loop: its name.
        policy: its repr; ``'-'`` without one.
        is_own: whether it describes the loop itself; the other rows say what other policies, or other numbers of steps,
            would give.
        length: the number of steps.
        slots: how many carries there is room for, in nested loops the sum of their lengths; 0 if the loop stays plain.
        carry_bytes, residual_bytes: of a carry, and of a step's residuals.
        is_mixed: whether slots hold residuals, too.
        runs: how often a gradient runs each step, in the mean. Of steps whose residuals are kept this includes the
            parts that the policy recomputes.
        carry_runs: the same if slots held carries only.
        tiers: of a loop with `Disk` a `Tier` each for "device", "host" and "disk".
        is_fixed: whether the loop always takes `length` steps. A `while_loop` takes as many as its condition says, and
            has a row for each of several numbers.
    """

    loop: str
    policy: str
    is_own: bool
    length: int
    slots: int
    carry_bytes: int
    residual_bytes: int
    runs: float
    carry_runs: float
    is_mixed: bool = False
    is_fixed: bool = True
    tiers: tuple[Tier, ...] = ()


@dataclasses.dataclass(frozen=True, repr=False)
class LoopReport(Tabular):
    """The loops with stored carries of a function: a table of `LoopRow`.

    Prints as text, in colors with ``rich.print``, as HTML in a notebook.

    Attributes:
        name: the function's name.
        rows: for each loop one with its own policy, then the others.
    """

    name: str
    rows: tuple[LoopRow, ...]

    def _table(self) -> Table:
        num = sum(r.is_own for r in self.rows)
        title = f"{self.name}: {num} differentiated loop{'' if num == 1 else 's'} with stored carries"
        if num == 0:
            title = f"{self.name}: no differentiated loop has slots, a size or 'auto' as its checkpoint="
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
        is_tiered = any(r.tiers for r in self.rows)
        columns += [Column(text, "right") for text in ("on the device", "in host memory", "on disk")] * is_tiered
        of = lambda r: (r.loop, r.length)
        least = {of(r): min(x.runs for x in self.rows if of(x) == of(r)) for r in self.rows}
        rows = [
            [
                Cell(r.loop if r.is_own else ""),
                Cell(r.policy if r.is_own else f"would be {r.policy}" if r.is_fixed else ""),
                Cell(f"{r.length:,}" if r.is_fixed else f"if {r.length:,}"),
                Cell(str(r.slots) if r.slots else "plain"),
                Cell(format_bytes(r.carry_bytes)),
                Cell(format_bytes(r.residual_bytes)),
                Cell(f"{r.runs:.2f}", "green" if r.is_fixed and r.runs == least[of(r)] else ""),
                Cell(f"{r.carry_runs:.2f}"),
                *(Cell(f"{t.num_carries}, {format_bytes(t.num_bytes)}") for t in r.tiers),
                *[Cell("")] * (3 * is_tiered - len(r.tiers)),
            ]
            for r in self.rows
        ]
        return Table(title, columns, rows)


@inspects
def loop_report(
    fun: Callable[..., Any],
    /,
    *args: Any,
    policies: Policy | Sequence[Policy] = _POLICIES,
    argnums: int | Sequence[int] | None = None,
    **kwargs: Any,
) -> LoopReport:
    """Report on the loops in a gradient that store carries: bytes, and how often the gradient runs each step.

    For each loop with ``checkpoint=`` slots, a size or ``"auto"``: bytes of a carry, and of a step's residuals; the
    number of slots; runs of each step. Where slots hold residuals, smaller ones mean fewer runs: further rows show
    other policies. Nothing runs, and no state changes; a loop with a size is compiled, as its gradient would be.

    Listed are `scan`, `fori_loop` and `while_loop` with such a strategy if they are differentiated, also within
    `Truncated` and in the steps of one another, in the order of the backward pass; loops that stay plain come first. A
    loop that runs several times is listed once. Not listed are loops with `Levels` or `Lengths` of your own; if
    ``"auto"`` or a size has chosen them, on GPUs, they have a row. The counts hold for a first derivative in reverse
    mode; a program that differentiates it again runs steps more often.

    A loop with `Disk` has the carries in memory and on disk, with their bytes, as its schedule has them: by the times
    in ``costs=``, or for a read and a write that take as long as a segment. A loop in its segments has a row, too.

    The number of steps of a `while_loop` is known only when it runs. So it has rows for some numbers of steps, up to
    ``max_steps=``. Its slots hold carries only, whatever a policy keeps, so that no other policies are listed.

    Args:
        fun: a training step, which takes gradients itself, by `statetx.grad`, ``jax.grad``, ``jax.vjp`` or a library
            that calls them; or a loss, or another function to differentiate. A function that reverses such loops itself
            counts as a step without `argnums`, and as a loss with them. It may be jitted, and read and write states.
        *args, **kwargs: its arguments.
        policies: a policy for steps, or a sequence of them, to compare with a loop's own; ``()`` for no comparison.
        argnums: the arguments of a loss to differentiate; all by default. Float states are always differentiated,
            arrays that `fun` closes over never. The differentiated values determine the residuals of a step, and so
            the runs. For a training step they are known.

    Returns:
        `LoopReport`. Under ``vmap`` bytes are for all examples.

    Raises:
        PolicyError: `policies` is neither a policy nor a sequence of policies.
        TypeError: `argnums` are no positions.
        ValueError: `argnums` asks for an argument that was not given.

    Source:
        Griewank and Walther 2000; Maddison 2024, arXiv 2305.09568. The counts hold for the compiled program.

    Example:
        >>> import jax, jax.numpy as jnp, statetx
        >>> from statetx.policies import Slots
        >>> def loss(w, h):
        ...     return statetx.scan(lambda h, _: (jnp.sin(h @ w), None), h, None, 1000, checkpoint=Slots(20))[0].sum()
        >>> args = jnp.eye(64) / 2, jnp.ones((8, 64))
        >>> row = statetx.loop_report(loss, *args).rows[0]
        >>> row.carry_bytes, row.residual_bytes, row.runs, row.carry_runs
        (2048, 4096, 3.035, 3.75)
        >>> row = statetx.loop_report(jax.grad(loss, argnums=1), *args).rows[0]
        >>> row.residual_bytes, row.runs
        (2048, 2.829)
    """
    check_callable("loop_report", fun)
    compared = [None if p is None else as_value_policy(p) for p in as_sequence(policies, "loop_report")]
    # Without a choice numbers stay numbers: they may be shapes.
    call = TracedCall("loop_report", fun, args, kwargs, argnums=argnums, traces_numbers=argnums is not None)
    loops: dict[Any, Differentiated] = {}
    for note in notes_of(call, may_be_step=argnums is None):
        loops.setdefault((note.loop, note.diff_indices, note.context.num_examples), note)
    return LoopReport(call.name, tuple(row for note in loops.values() for row in _rows(note, compared)))


def notes_of(call: TracedCall, *, may_be_step: bool) -> list[Differentiated]:
    """The notes in the program of a step, or in the gradient of a loss."""
    notes = _notes_in(call.body.jaxpr)
    if may_be_step and notes:
        return notes
    program = ArrayProgram(call, True, [not is_wanted for is_wanted in call.wanted])
    gradient = lambda *arrays: jax.tree.leaves(program.run(*arrays))
    avals = [_jax.abstract(x) for x in program.arrays]
    try:
        return _notes_in(_jax.stage(gradient, avals, traced_for="statetx.loop_report", name=call.name)[0])
    except Exception:
        # A loss may take gradients, too, as an integrator does that linearizes a neuron. A step without such loops need
        # not have a derivative.
        if may_be_step and call.takes_gradients:
            return []
        raise


def _notes_in(jaxpr: _jax.Jaxpr) -> list[Differentiated]:
    return [note for note in _jax.vmap_callbacks(jaxpr) if isinstance(note, Differentiated)]


def _rows(note: Differentiated, policies: Sequence[Any]) -> Iterator[LoopRow]:
    step: LoopStep = note.loop.step
    # Steps may use the names of axes.
    with note.context.bind_axes():
        if isinstance(note.loop, online.OnlineLoop):
            yield from _rows_of_while(note, step)
            return
        if isinstance(note.loop, LoopOnDisk):
            yield from _rows_on_disk(note, step)
            return
        yield _row(note, step, is_own=True)
        other_policies = [policy for policy in policies if policy != step.policy]
        with override(suppress_warnings=True):  # the user has chosen none of them
            rows = [_row(note, step.with_length(step.length, policy), is_own=False) for policy in other_policies]
        yield from rows


def _rows_on_disk(note: Differentiated, step: LoopStep) -> Iterator[LoopRow]:
    loop: LoopOnDisk = note.loop
    pull, args = loop.segments.programs(note.diff_indices)[1]
    traced = jax.jit(lambda args: pull(**args)).trace(args)
    inner = [row for note in _notes_in(traced.jaxpr.jaxpr) for row in _rows(note, ())]
    runs_of_pull = (lambda num: num * inner[0].runs) if inner else loop.options.runs_of_pull
    moments = [*loop.schedule(note.diff_indices).replay(loop.options.host)]
    runs = runs_of(moments, step.length, loop.segments.length, runs_of_pull)
    tiers = _tiers(moments, loop.sizes(note.diff_indices), loop.segments.num)
    counts: dict[str, Any] = dict.fromkeys(("runs", "carry_runs"), runs / max(1, step.length))
    slots = loop.options.slots + loop.options.host
    yield LoopRow(**_facts(note, step), **counts, is_own=True, length=step.length, slots=slots, tiers=tiers)
    yield from inner


def _tiers(moments: Sequence[Moment], sizes: StoredSizes, num: int) -> tuple[Tier, ...]:
    num_left, on_disk = num, 0
    for m in moments:
        num_left = m.action.position if isinstance(m.action, Reverse) else num_left
        on_disk = max(on_disk, m.disk * sizes.carry + sizes.of_xs * (num - num_left) // num)
    of_device = [
        m.device * sizes.carry + m.cotangents * sizes.cotangents + m.output_cotangents * sizes.of_carry for m in moments
    ]
    in_host = max(m.host for m in moments)
    # Beside the carries of the schedule the last one, and cotangents of two segments; or the last ones of the sweep.
    on_disk += sizes.carry + max(sizes.carry, 2 * sizes.cotangents) + sizes.outs
    return (
        Tier("device", max(m.device + m.cotangents + m.output_cotangents for m in moments), max(of_device)),
        Tier("host", in_host, in_host * sizes.carry),
        Tier("disk", max(m.disk for m in moments) + 3, on_disk),
    )


def _row(note: Differentiated, step: LoopStep, *, is_own: bool) -> LoopRow:
    loop, backward = note.loop, None
    counts: dict[str, Any] = {"slots": 0, "runs": 1.0, "carry_runs": 1.0}
    if isinstance(loop, LoopOfLevels):
        runs = loop.levels.num_runs(step.length) / step.length
        counts = {"slots": sum(loop.levels.lengths_for(step.length)), "runs": runs, "carry_runs": runs}
    elif isinstance(loop, LoopOfSlots):
        plan = (loop if is_own else loop.with_step(step)).plan(note.diff_indices, _jax.trace_context())
        backward, runs, carry_runs = plan.step, loop.runs_a_step(plan), loop.runs_a_step()
        counts = {"slots": loop.slots, "runs": runs, "carry_runs": carry_runs, "is_mixed": plan.is_mixed}
    return LoopRow(**_facts(note, step, backward), **counts, is_own=is_own, length=step.length)


def _rows_of_while(note: Differentiated, step: LoopStep) -> Iterator[LoopRow]:
    loop: online.OnlineLoop = note.loop
    most, facts = loop.max_steps, _facts(note, step)
    lengths = _LENGTHS if most is None else [*(n for n in _LENGTHS if n < most), most]
    for length in lengths:
        runs = online.num_runs(length, loop.slots) / max(length, 1)
        counts: dict[str, Any] = {"length": length, "slots": loop.slots, "runs": runs, "carry_runs": runs}
        yield LoopRow(**facts, **counts, is_own=length == lengths[0], is_fixed=False)


def _facts(note: Differentiated, step: LoopStep, backward: BackwardStep | None = None) -> dict[str, Any]:
    backward = backward or BackwardStep(step, *step.sorted_indices(note.diff_indices))
    of_all = lambda avals: sum(map(device_bytes, avals)) * note.context.num_examples
    return {
        "loop": step.name,
        "policy": "-" if step.policy is None else repr(step.policy),
        "carry_bytes": of_all([row.stored for row in step.rows]),
        "residual_bytes": of_all(backward.residual_avals),
    }
