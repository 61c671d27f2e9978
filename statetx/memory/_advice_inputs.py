"""Changes of what goes into a program or comes out: donation, arguments for constants, the order of outputs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from ._edits import AsArguments, ChangeCandidate, Donate, InOrder, ReleaseGradients
from ._names import parent
from .buffer import Buffer, Change, Timeline

_LEAST_SHARE = 0.02  # of all constants, of one that is named


def donations(profile: Timeline) -> Iterable[ChangeCandidate]:
    """Arguments and states of a step whose memory an output of the same type could take."""
    if profile.gradient:
        return
    inputs = [b for b in profile.buffers if b.kind in ("state", "argument")]
    reused = {b.allocation for b in inputs}
    free: dict[str, list[Buffer]] = defaultdict(list)
    for b in profile.buffers:
        if b.kind == "output" and b.allocation not in reused:
            free[b.type].append(b)
    taken: dict[str, list[Buffer]] = defaultdict(list)
    for b in sorted(inputs, key=lambda b: (b.kind != "state", b.owner)):
        if free[b.type] and not any(o.allocation == b.allocation for o in profile.buffers if o.kind == "output"):
            free[b.type].pop()
            taken["states" if b.kind == "state" else argument_of(b.owner)].append(b)
    for target, buffers in taken.items():
        how = "donate_states=True" if target == "states" else f"donate_argnames={target!r}"
        what = "the states that the step writes" if target == "states" else f"the argument {target}"
        text = f"Donate {what}: statetx.jit(step, {how}). An output takes their memory."
        num_bytes = sum(b.num_bytes for b in buffers)
        edit = Donate(frozenset(b.owner for b in buffers))
        yield ChangeCandidate(Change("donate", target, text), frozenset(buffers), num_bytes, edit)


def order(profile: Timeline) -> Iterable[ChangeCandidate]:
    """Outputs of a step in another order than the donated inputs of their type: compiled when the profile was made."""
    if profile.reordered is not None:
        yield ChangeCandidate(profile.reordered, frozenset(), profile.reordered.saved_bytes, InOrder())


def releases(profile: Timeline) -> Iterable[ChangeCandidate]:
    """Updates of scanned layers, which could run in the loop that computes their gradients."""
    if profile.releasable is not None:
        yield ChangeCandidate(profile.releasable, frozenset(), profile.releasable_bytes, ReleaseGradients())


def argument_of(path: str) -> str:
    """The argument that an array belongs to: ``params`` of ``params['w']``."""
    return path if not parent(path) else argument_of(parent(path))


def constants(profile: Timeline) -> Iterable[ChangeCandidate]:
    # Single numbers are literals of the program, such as the 0 that a sum begins with, and no arrays to be passed.
    arrays = [b for b in profile.buffers if b.kind == "constant" and not b.type.endswith("[]")]
    largest_first = sorted(arrays, key=lambda b: -b.num_bytes)
    large = [b for b in largest_first if b.num_bytes >= _LEAST_SHARE * profile.constant_bytes]
    if large:
        types = ", ".join(dict.fromkeys(b.type for b in large))
        singular = f"the constant {types} as an argument, or keep it in a State", "its own copy of it"
        plural = f"the constants {types} as arguments, or keep them in States", "its own copies of them"
        which, copies = plural if len(large) > 1 else singular
        text = f"Pass {which}: a compiled program has {copies}."
        change = Change("argument", large[0].owner, text)
        yield ChangeCandidate(change, frozenset(large), sum(b.num_bytes for b in large), AsArguments())
