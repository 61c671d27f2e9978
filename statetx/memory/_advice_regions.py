"""Changes of what functions of the user keep: rematerialization, policies, storage in bits."""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence

from .._equations.primitives import FUSED
from .._text import short_path
from ..kinds.linen import flax_remat, module_with_method
from ._calls import Calls, function_of, line_of
from ._edits import ChangeCandidate, Checkpoint, Rematerialize, SaveLess, StoreBits
from .buffer import Buffer, Change, Gap, Timeline, bits_of, freed_bytes, is_backward

_LEAST_SHARE = 0.02  # of what policies save in a function, of a result that is named
_POLICY = "dots_without_batch_dims"  # for a rematerialized function


def functions(profile: Timeline) -> Iterable[ChangeCandidate]:
    """Propose each function that the user could rematerialize: its residuals live in the forward pass and in its own
    backward pass only.
    """
    kept = _kept(profile)
    proposed: set[frozenset[Buffer]] = set()
    for function in _functions(profile, (b.start for b in kept)):
        calls = Calls(profile, function)
        freed, gaps = _freed(profile, kept, function, calls)
        if frozenset(freed) in proposed:  # a function that does nothing but call another one, in a loop perhaps
            continue
        proposed.add(frozenset(freed))
        num_bytes = freed_bytes(profile, gaps)
        times = f" ({calls.num} calls)" if calls.num > 1 else ""
        if saves := _saved_by_policy(profile, freed):
            regions = ", ".join(sorted({b.region for b in saves}))
            primitives = ", ".join(sorted({profile.steps[b.start].primitive for b in saves}))
            text = f"Save less in {function}{times}: the policy of {regions} saves results of {primitives}."
            yield ChangeCandidate(Change("policy", function, text), frozenset(freed), num_bytes, SaveLess(function))
            continue
        nested = any(b.kind == "recomputed" and b.region for b in freed)  # not by XLA itself, which has no region
        where = ", inside the function that is rematerialized already" if nested else ""
        file = next((f.file for b in freed for f in profile.steps[b.start].frames if f.function == function), "")
        linen = module_with_method(function, file)
        how = f"@statetx.remat{_at(profile, function, file)}" if linen is None else flax_remat(linen)
        text = f"Rematerialize {function}{times} with {how}{where}."
        change = Change("remat", function, text)
        yield ChangeCandidate(change, frozenset(freed), num_bytes, Rematerialize(function))


def policies(advised: Iterable[ChangeCandidate]) -> Iterable[ChangeCandidate]:
    """Propose a policy for the function, or the body of a loop, whose rematerialization frees most."""
    remats = [c for c in advised if c.change.action == "remat" and "statetx.remat" in c.change.text]
    for c in sorted(remats, key=lambda c: -c.freed_bytes)[:1]:
        text = c.change.text.replace("statetx.remat", f"statetx.remat(policy={_POLICY!r})")
        change = c.change._replace(action="policy", text=text.replace("carry only", "carry and these"))
        assert isinstance(c.edit, (Rematerialize, Checkpoint))
        edit = dataclasses.replace(c.edit, policy=_POLICY)
        yield ChangeCandidate(change, c.buffers, 0, edit, stronger=lambda c=c: c)


def stacked(profile: Timeline) -> Iterable[ChangeCandidate]:
    """Functions in the body of a loop, which stacks their residuals."""
    by_function: dict[str, list[Buffer]] = defaultdict(list)
    for b in profile.buffers:
        if b.stacked is not None and b.kind in ("residual", "recomputed"):
            by_function[b.function].append(b)
    for function, buffers in by_function.items():
        loop, file = buffers[0].stacked, buffers[0].source.rpartition(":")[0]
        text = f"Rematerialize {function} with @statetx.remat{_at(profile, function, file)}, in the {loop}."
        yield ChangeCandidate(Change("remat", function, text), frozenset(buffers), 0, Rematerialize(function))


def _at(profile: Timeline, function: str, file: str) -> str:
    line = line_of(profile, function, file)
    return "" if line is None else f" at {short_path(f'{file}:{line}')}"


def _is_freed_already(profile: Timeline, b: Buffer, function: str) -> bool:
    """Whether a region computes it again that does not contain the function but is the function, or is called by it."""
    if b.kind != "recomputed":
        return False
    functions = [f.function for f in profile.steps[b.start].frames]
    region = next((n for n, f in enumerate(functions) if _is_region(f, b.region)), len(functions))
    return function in functions[region:]


def _is_region(function: str, region: str) -> bool:
    # Of a callable object, the region has the name of its class.
    return f".{function}".endswith((f".{region}", f".{region}.__call__"))


def _saved_by_policy(profile: Timeline, freed: Sequence[Buffer]) -> list[Buffer]:
    """The results that policies save, if they are most of the bytes freed at the peak; else empty.

    The counters of a rematerialized function have its region, too: a few bytes are no reason to change a policy.
    """
    at_peak = [b for b in freed if b.start <= profile.peak_step <= b.end]
    saved = [b for b in at_peak if b.kind == "residual" and b.region]
    num_bytes = sum(b.num_bytes for b in saved)
    if 2 * num_bytes <= sum(b.num_bytes for b in at_peak):
        return []
    return [b for b in saved if b.num_bytes >= _LEAST_SHARE * num_bytes]


def bits(profile: Timeline) -> Iterable[ChangeCandidate]:
    """Propose each function that reads zeros and ones, as floats or bytes: rematerialized, it needs an eighth of a byte
    for each after its last read in the forward pass.
    """
    bits, kept = _bits_kept(profile), _kept(profile)
    proposed: set[frozenset[Buffer]] = set()
    for function in _functions(profile, {r for b in bits for r in b.readers}):
        calls = Calls(profile, function)
        # XLA may fuse what reads a value in the backward pass into steps of other calls: the forward pass tells.
        takers = {b: {calls.of(r) for r in b.readers if not is_backward(profile, r, b)} for b in bits}
        inputs = frozenset(b for b in bits if takers[b] - {None, calls.of(b.start)})
        if not inputs or inputs in proposed:
            continue
        proposed.add(inputs)
        freed, gaps = _freed(profile, kept, function, calls)
        freed_by_remat = freed_bytes(profile, gaps)
        for b in inputs:
            packed_bytes = -(-b.num_bytes // bits_of(b.type))
            gaps += [gap._replace(num_bytes=b.num_bytes - packed_bytes) for gap in _waiting(profile, [b])]
        readers = (profile.steps[r] for b in inputs for r in b.readers)
        file = next((f.file for step in readers for f in step.frames if f.function == function), "")
        num_bytes = freed_bytes(profile, gaps) - freed_by_remat
        yield from _storing_bits(profile, function, file, inputs, num_bytes, freed, calls.num)


def stacked_bits(profile: Timeline) -> Iterable[ChangeCandidate]:
    """Propose it for functions in the body of a loop, which stacks their residuals: which of them reads the zeros and
    ones is not known.
    """
    by_function: dict[str, list[Buffer]] = defaultdict(list)
    for b in _bits_kept(profile):
        if b.stacked is not None:
            for function in {b.function, *profile.steps[b.start].stack}:
                by_function[function].append(b)
    for function, buffers in by_function.items():
        yield from _storing_bits(profile, function, buffers[0].source.rpartition(":")[0], buffers, 0)


def _bits_kept(profile: Timeline) -> list[Buffer]:
    return [b for b in profile.buffers if b.is_bits and b.kind == "residual" and not b.stored_as]


def _storing_bits(
    profile: Timeline,
    function: str,
    file: str,
    buffers: Iterable[Buffer],
    num_bytes: int,
    freed: Iterable[Buffer] = (),
    num_calls: int = 1,
) -> Iterable[ChangeCandidate]:
    if module_with_method(function, file) is not None:  # `flax.linen.remat` stores no bits
        return
    times, types = f" ({num_calls} calls)" if num_calls > 1 else "", ", ".join(sorted({b.type for b in buffers}))
    text = (
        f"Store the zeros and ones that {function}{times} takes ({types}) as bits: "
        f"@statetx.remat(inputs_stored_as='bits'){_at(profile, function, file)}, or "
    )
    text += "a tuple, as in ('bits', None), if not all of its arguments are 0 or 1."
    change, freed = Change("bits", function, text), frozenset([*buffers, *freed])
    regions = {b.region for b in profile.buffers} - {""}
    prerequisite = None if any(_is_region(function, r) for r in regions) else Rematerialize(function)
    yield ChangeCandidate(change, freed, num_bytes, StoreBits(function), prerequisite=prerequisite)


def _kept(profile: Timeline) -> list[Buffer]:
    """Buffers that a change of the user's may shorten: residuals and recomputed values; no stacks of loops."""
    # Values that XLA itself recomputes have no region.
    is_kept = lambda b: b.kind == "residual" or (b.kind == "recomputed" and b.region)
    return [b for b in profile.buffers if is_kept(b) and b.stacked is None]


def _freed(profile: Timeline, kept: Iterable[Buffer], function: str, calls: Calls) -> tuple[list[Buffer], list[Gap]]:
    """Buffers that the calls of a function no longer keep if it is rematerialized, and when."""
    by_call: dict[int, list[Buffer]] = defaultdict(list)
    for b in kept:
        call = calls.of(b.start)
        if call is not None and not _leaves(profile, b, calls) and not _is_freed_already(profile, b, function):
            by_call[call].append(b)
    gaps = [_waiting(profile, residuals, has_loop=calls.has_loop) for residuals in by_call.values()]
    return [*itertools.chain(*by_call.values())], [*itertools.chain(*gaps)]


def _waiting(profile: Timeline, residuals: Sequence[Buffer], *, has_loop: bool = True) -> list[Gap]:
    """From the last step of the forward pass that reads each of these to the first of the backward pass that reads
    any; to the end for results that XLA fuses into the step that reads them.

    Args:
        has_loop: whether a loop is computed again, as a whole: XLA fuses within one repetition only.
    """
    begin = min((r for b in residuals for r in b.readers if is_backward(profile, r, b)), default=0)
    last = lambda b: max([b.start, *(r for r in b.readers if r < begin)])
    end = lambda b: begin - 1 if has_loop or b.primitive not in FUSED else b.end
    return [Gap(last(b) + 1, end(b), b.num_bytes) for b in residuals]


def _functions(profile: Timeline, steps: Iterable[int]) -> list[str]:
    """The user's functions that run these steps, innermost first; not the whole program, nor derivative rules, whose
    calls have no numbers.
    """
    depth: dict[str, int] = {}
    for step in steps:
        for n, function in enumerate(reversed(profile.steps[step].stack)):
            depth[function] = max(depth.get(function, 0), n)
    stacks = [set(s.stack) for s in profile.steps if s.stack]
    outermost = set.intersection(*stacks) if stacks else set()  # the profiled function and its callers
    numbered = {function_of(call) for s in profile.steps for call in s.calls} - {""} or depth.keys()
    return sorted((f for f in depth if f not in outermost and f in numbered), key=lambda f: (-depth[f], f))


def _leaves(profile: Timeline, b: Buffer, calls: Calls) -> bool:
    """Whether other calls or functions read it in the forward pass: then it stays, as their input."""
    own_call = calls.of(b.start)
    return any(calls.of(r) != own_call for r in b.readers if not is_backward(profile, r, b))
