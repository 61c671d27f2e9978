"""Changes of what loops keep: a rematerialized body, strategies with fewer carries."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterable, Sequence

from .._loops import schedule
from .._loops.strategy import Levels, Slots, Strategy
from ._edits import ChangeCandidate, Checkpoint
from .buffer import Buffer, Change, Gap, Kind, Loop, Timeline, is_backward, saving


def _stacks(profile: Timeline, kind: Kind) -> dict[Loop, list[Buffer]]:
    """Stacks that each loop of known length makes for its backward pass: in the forward pass, or where it is
    computed again.
    """
    stacks: dict[Loop, list[Buffer]] = defaultdict(list)
    for b in profile.buffers:
        if b.kind == kind and b.stacked is not None and b.stacked.length:
            stacks[b.stacked].append(b)
    return stacks


def _step_of_reversal(buffers: Sequence[Buffer], profile: Timeline) -> tuple[int, int]:
    """First and last step of the backward pass of a loop."""
    reads = [r for b in buffers for r in b.readers if is_backward(profile, r, b)]
    end = max(b.end for b in buffers)
    return (min(reads) if reads else end), end


def bodies(profile: Timeline, kind: Kind = "residual") -> Iterable[ChangeCandidate]:
    """Rematerialize a loop's body: it stacks its carry, and one step's residuals are recomputed at a time."""
    for loop, stacks in _stacks(profile, kind).items():
        inner = [b for b in stacks if b.primitive != "carry"]
        length = loop.length or 1
        if not inner:
            continue
        gaps = [Gap(b.start, b.end, b.num_bytes) for b in inner]
        # XLA stacks the part of the carry that the backward pass reads.
        stacked_bytes = sum(b.num_bytes for b in stacks if b.primitive == "carry")
        added_bytes = max(0, length * _carry_bytes(stacks) - stacked_bytes)
        gaps.append(Gap(min(b.start for b in stacks), max(b.end for b in stacks), -added_bytes))
        begin, end = _step_of_reversal(inner, profile)
        gaps.append(Gap(begin, end, -sum(b.num_bytes for b in inner) // length))
        change = Change("remat", str(loop), _text_of_body(loop), saving(profile, gaps))
        more = functools.partial(_checkpointed, profile, loop, stacks, 2)
        yield ChangeCandidate(change, frozenset(inner), Checkpoint(loop), more)


def _text_of_body(loop: Loop) -> str:
    if loop.library:
        return (
            f"Rematerialize with statetx.remat what the {loop}, which is in {loop.library}, runs: it keeps its carry "
            f"only."
        )
    return f"Rematerialize the body of the {loop} with statetx.remat: it keeps its carry only."


def checkpoints(profile: Timeline, kind: Kind = "residual") -> Iterable[ChangeCandidate]:
    """Checkpoint a loop: some carries are kept, and the residuals of one step, or of an inner loop, are recomputed at
    a time.
    """
    for loop, stacks in _stacks(profile, kind).items():
        if first := _checkpointed(profile, loop, stacks, 2):
            yield first


def _checkpointed(profile: Timeline, loop: Loop, stacks: Sequence[Buffer], level: int) -> ChangeCandidate | None:
    """A loop with a strategy whose steps run so many times at most before their reversal."""
    length = loop.length or 1
    strategy, num_carries, num_steps = _strategy(profile.backend, length, level)
    if level > 2 and num_carries >= _strategy(profile.backend, length, level - 1)[1]:
        return None
    step = num_steps * sum(b.num_bytes for b in stacks) // length
    start, end = min(b.start for b in stacks), max(b.end for b in stacks)
    gaps = [Gap(b.start, b.end, b.num_bytes) for b in stacks]
    gaps += [
        Gap(start, end, -num_carries * _carry_bytes(stacks)),
        Gap(_step_of_reversal(stacks, profile)[0], end, -step),
    ]
    how = ""
    if loop.library:
        how = f", which is in {loop.library}, by a plan (statetx.plan), or with a loop of your own in its place"
    text = (
        f"Checkpoint the {loop}{how}: statetx.scan(..., checkpoint=statetx.policies.{strategy!r}) keeps "
        f"{num_carries} carries."
    )
    change = Change("slots", str(loop), text, saving(profile, gaps))
    more = functools.partial(_checkpointed, profile, loop, stacks, level + 1)
    return ChangeCandidate(change, frozenset(stacks), Checkpoint(loop, strategy), more)


def _carry_bytes(stacks: Sequence[Buffer]) -> int:
    return max(b.carry_bytes for b in stacks)


def _strategy(backend: str, length: int, level: int) -> tuple[Strategy, int, int]:
    """The strategy, the carries that it keeps, and the steps whose residuals are alive at a time.

    On GPUs XLA waits for the device in each turn of a schedule of slots (decision 47).
    """
    if backend == "gpu":
        lengths = schedule.nested_lengths(length, level)
        return Levels(level), sum(lengths[:-1]), lengths[-1]
    slots = schedule.slots_for(length, level)
    return Slots(slots), slots, 1
