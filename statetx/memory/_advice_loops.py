"""Changes of what loops keep: a rematerialized body, strategies with fewer carries."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterable

from .._loops import schedule
from .._loops.strategy import Levels, Slots, Strategy
from ._edits import ChangeCandidate, Checkpoint
from .buffer import Buffer, Change, Gap, Kind, Loop, Timeline, freed_bytes


def _stacks(profile: Timeline, kind: Kind) -> dict[Loop, list[Buffer]]:
    """Stacks that each loop of known length makes for its backward pass: in the forward pass, or where it is
    computed again.
    """
    stacks: dict[Loop, list[Buffer]] = defaultdict(list)
    for b in profile.buffers:
        if b.kind == kind and b.stacked is not None and b.stacked.length:
            stacks[b.stacked].append(b)
    return stacks


def bodies(profile: Timeline, kind: Kind = "residual") -> Iterable[ChangeCandidate]:
    """Rematerialize a loop's body: it stacks its carry, and one step's residuals are recomputed at a time."""
    for loop, stacks in _stacks(profile, kind).items():
        inner = [b for b in stacks if b.primitive != "carry"]
        if inner:
            change, num_bytes = Change("remat", str(loop), _text_of_body(loop)), _freed_bytes(profile, inner)
            more = functools.partial(_checkpointed, profile, loop, frozenset(stacks), 2)
            yield ChangeCandidate(change, frozenset(inner), num_bytes, Checkpoint(loop), more)


def _freed_bytes(profile: Timeline, stacks: Iterable[Buffer]) -> int:
    return freed_bytes(profile, (Gap(b.start, b.end, b.num_bytes) for b in stacks))


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
        if first := _checkpointed(profile, loop, frozenset(stacks), 2):
            yield first


def _checkpointed(profile: Timeline, loop: Loop, stacks: frozenset[Buffer], level: int) -> ChangeCandidate | None:
    """A loop with a strategy whose steps run so many times at most before their reversal."""
    length = loop.length or 1
    strategy, num_carries = _strategy(profile.backend, length, level)
    if level > 2 and num_carries >= _strategy(profile.backend, length, level - 1)[1]:
        return None
    how = ""
    if loop.library:
        how = f", which is in {loop.library}, by a plan (statetx.plan), or with a loop of your own in its place"
    text = (
        f"Checkpoint the {loop}{how}: statetx.scan(..., checkpoint=statetx.policies.{strategy!r}) keeps "
        f"{num_carries} carries."
    )
    change, more = Change("slots", str(loop), text), functools.partial(_checkpointed, profile, loop, stacks, level + 1)
    return ChangeCandidate(change, stacks, _freed_bytes(profile, stacks), Checkpoint(loop, strategy), more)


def _strategy(backend: str, length: int, level: int) -> tuple[Strategy, int]:
    """The strategy, and the carries that it keeps.

    On GPUs XLA waits for the device in each turn of a schedule of slots (decision 47).
    """
    if backend == "gpu":
        lengths = schedule.nested_lengths(length, level)
        return Levels(level), sum(lengths[:-1])
    slots = schedule.slots_for(length, level)
    return Slots(slots), slots
