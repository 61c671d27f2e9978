"""From a staged body to its loop: as it is, or stored as ``checkpoint=`` says, choosing by measuring what that leaves open."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from . import _compat, _control, _schedule
from ._checkpointed import Scheduled, floats_of
from ._cost import Program
from ._errors import EffectError, PolicyError
from ._jaxpr import Body, table
from ._lift import name_of
from ._nested import Step, nested
from ._progress import Bars
from ._staged import Staged
from ._strategy import Auto, Budget, Lengths, Levels, Slots, Strategy, as_strategy
from ._text import format_bytes
from ._tree import is_float, num_bytes


def resolve_strategy(name: str, checkpoint: Any, unroll: Any) -> Strategy | None:
    """What ``checkpoint=`` means, None if nothing.

    Raises:
        PolicyError: it means nothing known, or comes with `unroll`.
    """
    if checkpoint is None:
        return None
    if unroll is True or unroll not in (1, False, None):
        raise PolicyError(
            f"{name}: unroll={unroll!r} and checkpoint={checkpoint!r} do not go together; give one of them."
        )
    return as_strategy(name, checkpoint)


def make_loop(
    staged: Staged,
    body: Body,
    num_constants: int,
    avals: Sequence[Any],
    length: int,
    *,
    reverse: bool = False,
    unroll: int | bool = 1,
    strategy: Strategy | None = None,
    progress: bool = False,
) -> Callable:
    """The loop ``(constants, carry, xs) -> (carry, ys)`` of a body that `staged` gave, from the table.

    Args:
        body: ``(*constants, *carry, *x) -> (*carry, *y)``.
        avals: the types that the carry must keep.
        strategy: how it is stored, if it is not as it is.
        progress: whether a bar shows how far it is.

    Raises:
        EffectError: the body has effects that must not be repeated, and a strategy would.
        PolicyError: the strategy cannot be had.
    """
    refuse_effects(staged, body, strategy)
    title = f"{staged.name} {name_of(staged.fun).rpartition('.')[2]}" if progress else None

    def build(body: Body) -> Callable:
        name = f"{staged.name}({name_of(staged.fun)})"
        if strategy is None and title is None:
            return _control.scan(body, num_constants, avals, length=length, reverse=reverse, unroll=unroll)
        tick = Bars(title, length).tick if title else None
        policy = getattr(strategy, "policy", None)
        options = {"length": length, "reverse": reverse, "policy": policy, "name": name, "tick": tick}
        return _build(Step(body, num_constants, avals, **options), strategy)

    use = (staged.name, strategy, title, length, reverse, type(unroll), unroll, num_constants, *avals)
    return table.get(body, use, build)


def refuse_effects(staged: Staged, body: Body, strategy: Strategy | None) -> None:
    """Raise if a strategy would repeat effects of the body that must not be repeated."""
    for callback, place in _compat.forbidden_effects(body.jaxpr) if strategy is not None else ():
        raise EffectError(
            f"{staged.name}: the body {name_of(staged.fun)} calls {callback} at {place}, a host callback with effects, "
            f"which would run again when a step is recomputed, as checkpoint={strategy!r} has it.\n"
            f"Fix: call it outside the loop, or use jax.pure_callback if it only computes, or jax.debug.callback if it "
            f"may run twice."
        )


def _build(step: Step, strategy: Strategy | None) -> Callable:
    chosen = strategy
    if isinstance(strategy, Auto):
        chosen = _choose(step)
    if isinstance(strategy, Budget):
        chosen = _fit(step, strategy.bytes)
    if chosen is None or step.length == 0:
        return step.plain()
    strategy = chosen
    offload = getattr(strategy, "offload", False)
    if offload and _compat.HOST_MEMORY not in _compat.memory_spaces():
        raise PolicyError(f"{step.name}: {strategy!r}: the devices have no {_compat.HOST_MEMORY!r} memory.")
    if isinstance(strategy, Slots):
        return Scheduled(step, strategy.num, strategy.block, offload=offload)
    if isinstance(strategy, Levels):
        lengths = _schedule.nested_lengths(step.length, strategy.num)
    else:
        assert isinstance(strategy, Lengths)
        lengths = strategy.lengths
        strategy.check(step.name, "steps", step.length)
    return nested(step, lengths, offload=offload)


_SHORT = 64  # steps, below which a schedule gains nothing
_SLACK = 2**10  # bytes by which a program around the loop may differ from the loop's own
_SMALL = 2**22  # bytes that are not worth a second run of anything


def _choose(step: Step) -> Strategy | None:
    """The least memory at which no step is run more than three times; None for a loop that keeps little."""
    kept = _bytes_kept_by_a_step(step)
    carry = _num_bytes(step.avals)
    if step.length < _SHORT or step.length * (kept + carry) <= _SMALL:
        return None
    candidates = []
    block = 1
    while block * block <= step.length:
        slots = _schedule.slots_for(step.length // block, 2)
        candidates.append((slots * carry + (block - 1) * kept, block, slots))
        block *= 2
    _, block, slots = min(candidates)
    return Slots(slots, block=block)


def _fit(step: Step, budget: int) -> Strategy | None:
    """The fewest runs of steps within a budget, as compiled; None if the loop fits as it is."""
    asked, budget = budget, budget - _SLACK
    if temporary_bytes(step, step.plain()) <= budget:
        return None
    least = temporary_bytes(step, Scheduled(step, 1, 1))
    if least > budget:
        raise PolicyError(
            f"{step.name}: the gradient of this loop needs {format_bytes(least + _SLACK)} with one slot, more than the budget of "
            f"{format_bytes(asked)}.\nFix: allow that much; or let a step compute less: give policy=, or rematerialise in it."
        )
    carry = max(1, _num_bytes(step.avals))
    of_block = max(0, temporary_bytes(step, Scheduled(step, 1, 2)) - least) if step.length > 3 else 0
    allowed = budget
    for _ in range(6):
        _, block, slots = _affordable(step.length, allowed - least, carry, of_block)
        over = temporary_bytes(step, Scheduled(step, slots, block)) - budget
        if over <= 0:
            return Slots(slots, block=block)
        allowed -= over + (allowed - least) // 16
        if allowed < least:
            break
    return Slots(1)


def _affordable(length: int, spare: int, carry: int, of_block: int) -> tuple[int, int, int]:
    """The fewest runs of the body, with the size of a block and the number of slots that give them."""
    found, block = [], 1
    while block <= length:
        left = spare - (block - 1) * of_block
        if left < 0 and block > 1:
            break
        num_blocks, rest = divmod(length, block)
        slots = min(1 + max(0, left) // carry, num_blocks)
        runs = (_schedule.num_evaluations(num_blocks, slots) - num_blocks) * block + length + rest
        found.append((runs, block, slots))
        block *= 2
    return min(found)


def temporary_bytes(step: Step, loop: Callable) -> int:
    """What XLA reserves for the gradient of a loop with respect to all its inputs, beyond these and its outputs."""
    leading = lambda aval: jax.ShapeDtypeStruct((step.length, *aval.shape), aval.dtype)  # noqa: E731
    args = (step.constant_avals, step.avals, [leading(a) for a in step.x_avals])
    leaves, treedef = jax.tree.flatten(args)
    floats = [i for i, a in enumerate(leaves) if is_float(a)]

    def gradient(args: tuple, cts: list) -> Any:
        leaves = jax.tree.leaves(args)
        run = lambda *xs: floats_of(loop, args, dict(zip(floats, xs, strict=True)))  # noqa: E731
        outs, pull = jax.vjp(run, *[leaves[i] for i in floats])
        return outs, pull(cts)

    types = treedef.unflatten([jax.ShapeDtypeStruct(a.shape, a.dtype) for a in leaves])
    outs = [a for a in (*step.avals, *map(leading, step.y_avals)) if is_float(a)]
    cts = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in outs]
    return Program(gradient, (types, cts)).cost.temp_bytes


def _bytes_kept_by_a_step(step: Step) -> int:
    """What a step computes and its backward step needs."""
    types = [*step.constant_avals, *step.avals, *step.x_avals]
    floats = [i for i, a in enumerate(types) if is_float(a)]
    sizes = (len(step.constant_avals), step.num_carry)

    def pullback(*values: Any) -> list[Any]:
        def run(*moving: Any) -> list[Any]:
            args = list(values)
            for i, x in zip(floats, moving, strict=True):
                args[i] = x
            carry, y = step.keeping(args[: sizes[0]], args[sizes[0] : sum(sizes)], args[sum(sizes) :])
            return [x for x in (*carry, *y) if is_float(x)]

        return jax.tree.leaves(jax.vjp(run, *[values[i] for i in floats])[1])

    jaxpr, _ = _compat.stage(pullback, types, kind="scan", name="step")
    kept = {v: v.aval for v in jaxpr.outvars if isinstance(v, _compat.Var) and v not in jaxpr.invars}
    return _num_bytes(list(kept.values()))


def _num_bytes(avals: Sequence[Any]) -> int:
    return sum(num_bytes(a) for a in avals)
