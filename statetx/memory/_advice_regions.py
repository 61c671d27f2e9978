"""Changes of what functions of the user keep: rematerialization, policies, storage in bits."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Sequence

from .._equations.primitives import FUSED
from .._text import short_path
from ..kinds.linen import flax_remat, module_with_method
from ._calls import Calls, function_of, line_of
from ._edits import ChangeCandidate, Checkpoint, Rematerialize, SaveLess, StoreBits
from .buffer import Buffer, Change, Gap, Timeline, bits_of, is_backward, saving

_LEAST_SHARE = 0.02  # of what policies save in a function, of a result that is named
_POLICY = "dots_without_batch_dims"  # for a rematerialized function


def functions(profile: Timeline) -> Iterable[ChangeCandidate]:
    """Propose each function that the user could rematerialize: its residuals live in the forward pass and in its own
    backward pass only.
    """
    history = _History(profile)
    proposed: set[frozenset[Buffer]] = set()
    for function in _functions(profile, (b.start for b in history.kept)):
        calls = Calls(profile, function)
        freed, gaps = history.freed(function, calls)
        if frozenset(freed) in proposed:  # a function that does nothing but call another one, in a loop perhaps
            continue
        proposed.add(frozenset(freed))
        saved = saving(profile, gaps)
        times = f" ({calls.num} calls)" if calls.num > 1 else ""
        if saves := _saved_by_policy(profile, freed):
            regions = ", ".join(sorted({b.region for b in saves}))
            primitives = ", ".join(sorted({profile.steps[b.start].primitive for b in saves}))
            text = f"Save less in {function}{times}: the policy of {regions} saves results of {primitives}."
            yield ChangeCandidate(Change("policy", function, text, saved), frozenset(freed), SaveLess(function))
            continue
        nested = any(b.kind == "recomputed" and b.region for b in freed)  # not by XLA itself, which has no region
        where = ", inside the function that is rematerialized already" if nested else ""
        file = next((f.file for b in freed for f in profile.steps[b.start].frames if f.function == function), "")
        linen = module_with_method(function, file)
        how = f"@statetx.remat{_at(profile, function, file)}" if linen is None else flax_remat(linen)
        text = f"Rematerialize {function}{times} with {how}{where}."
        yield ChangeCandidate(Change("remat", function, text, saved), frozenset(freed), Rematerialize(function))


def policies(advised: Iterable[ChangeCandidate]) -> Iterable[ChangeCandidate]:
    """Propose a policy for the function, or the body of a loop, whose rematerialization is predicted to save most; how
    much is not known.
    """
    remats = [c for c in advised if c.change.action == "remat" and "statetx.remat" in c.change.text]
    for c in sorted(remats, key=lambda c: -c.change.saved_bytes)[:1]:
        text = c.change.text.replace("statetx.remat", f"statetx.remat(policy={_POLICY!r})")
        change = c.change._replace(action="policy", text=text.replace("carry only", "carry and these"), saved_bytes=0)
        assert isinstance(c.edit, (Rematerialize, Checkpoint))
        edit = dataclasses.replace(c.edit, policy=_POLICY)
        yield ChangeCandidate(change, c.buffers, edit, stronger=lambda c=c: c)


def stacked(profile: Timeline) -> Iterable[ChangeCandidate]:
    """Functions in the body of a loop, which stacks their residuals: by how much the peak falls is not known."""
    by_function: dict[str, list[Buffer]] = defaultdict(list)
    for b in profile.buffers:
        if b.stacked is not None and b.kind in ("residual", "recomputed"):
            by_function[b.function].append(b)
    for function, buffers in by_function.items():
        loop, file = buffers[0].stacked, buffers[0].source.rpartition(":")[0]
        text = f"Rematerialize {function} with @statetx.remat{_at(profile, function, file)}, in the {loop}."
        yield ChangeCandidate(Change("remat", function, text, 0), frozenset(buffers), Rematerialize(function))


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
    bits, history = _bits_kept(profile), _History(profile)
    proposed: set[frozenset[Buffer]] = set()
    for function in _functions(profile, {r for b in bits for r in b.readers}):
        calls = Calls(profile, function)
        # XLA may fuse what reads a value in the backward pass into steps of other calls: the forward pass tells.
        takers = {b: {calls.of(r) for r in b.readers if not is_backward(profile, r, b)} for b in bits}
        inputs = frozenset(b for b in bits if takers[b] - {None, calls.of(b.start)})
        if not inputs or inputs in proposed:
            continue
        proposed.add(inputs)
        freed, gaps = history.freed(function, calls)
        saved_by_remat = saving(profile, gaps)
        for b in inputs:
            backward = [r for r in b.readers if is_backward(profile, r, b)]
            forward = [r for r in b.readers if r < min(backward, default=0)]
            if backward:
                last = max([b.start, *forward])
                packed_bytes = -(-b.num_bytes // bits_of(b.type))
                gaps.append(Gap(last + 1, min(backward) - 1, b.num_bytes - packed_bytes))
            if backward and forward and any(profile.steps[r].is_recomputed for r in backward):
                # A region that stores bits runs as a whole, so that nothing of it is reserved before.
                gaps.append(Gap(b.start, min(forward) - 1, b.num_bytes))
        readers = (profile.steps[r] for b in inputs for r in b.readers)
        file = next((f.file for step in readers for f in step.frames if f.function == function), "")
        saved = saving(profile, gaps) - saved_by_remat
        yield from _storing_bits(profile, function, file, inputs, saved, freed, calls.num)


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
    saved: int,
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
    change, freed = Change("bits", function, text, saved), frozenset([*buffers, *freed])
    regions = {b.region for b in profile.buffers} - {""}
    prerequisite = None if any(_is_region(function, r) for r in regions) else Rematerialize(function)
    yield ChangeCandidate(change, freed, StoreBits(function), prerequisite=prerequisite)


def _most_ended(buffers: Sequence[Buffer]) -> int:
    """The step at which at most a tenth of the bytes is still alive.

    XLA fuses small chains of derivatives into much later steps, which the barrier around a rematerialized function
    prevents.
    """
    remaining_bytes = sum(b.num_bytes for b in buffers) / 10
    for b in sorted(buffers, key=lambda b: -b.end):
        remaining_bytes -= b.num_bytes
        if remaining_bytes <= 0:
            return b.end
    return buffers[0].end


class _History:
    """Operands of each buffer of a program.

    Attributes:
        kept: buffers that a change of the user's may shorten: residuals and recomputed values; no stacks of loops.
    """

    def __init__(self, profile: Timeline):
        self.profile = profile
        self.steps = profile.steps
        self._read_at: dict[int, list[Buffer]] = defaultdict(list)
        for b in profile.buffers:
            for r in b.readers:
                self._read_at[r].append(b)
        # Values that XLA itself recomputes have no region.
        is_kept = lambda b: b.kind == "residual" or (b.kind == "recomputed" and b.region)
        self.kept = [b for b in profile.buffers if is_kept(b) and b.stacked is None]

    def freed(self, function: str, calls: Calls) -> tuple[list[Buffer], list[Gap]]:
        """Buffers that the calls of a function no longer keep if it is rematerialized, and when."""
        profile = self.profile
        by_call: dict[int, list[Buffer]] = defaultdict(list)
        for b in self.kept:
            call = calls.of(b.start)
            if call is not None and not _leaves(profile, b, calls) and not _is_freed_already(profile, b, function):
                by_call[call].append(b)
        freed: list[Buffer] = []
        gaps: list[Gap] = []
        for residuals in by_call.values():
            backward = [r for b in residuals for r in b.readers if is_backward(profile, r, b)]
            if not backward:
                continue
            begin, end = min(backward), _most_ended(residuals)
            for b in residuals:
                last = max([b.start, *(r for r in b.readers if r < begin)])
                gaps.append(Gap(last + 1, b.end, b.num_bytes))
                freed.append(b)
            # A loop is computed again as a whole before the first derivative, and XLA fuses within one repetition only.
            num_bytes = sum(b.num_bytes for b in residuals)
            gaps.append(Gap(begin, end, -(num_bytes if calls.has_loop else self.recomputed_bytes(residuals, function))))
        return freed, gaps

    def recomputed_bytes(self, residuals: Sequence[Buffer], function: str) -> int:
        """Bytes that the backward pass of a call holds of these, if it computes them again.

        XLA fuses elementwise operations into the reading one. So memory is taken by the results of other operations,
        and by values that other operations read.
        """
        held: set[Buffer] = set()
        for b in residuals:
            readers = [self.steps[r].primitive for r in b.readers if is_backward(self.profile, r, b)]
            if not all(map(_is_fused, readers)):
                held.add(b)
            self._add_sources(b, function, held, set())
        return min(sum(b.num_bytes for b in held), sum(b.num_bytes for b in residuals))

    def _add_sources(self, b: Buffer, function: str, held: set[Buffer], seen: set[Buffer]) -> None:
        """Add the sources of `b` behind its elementwise operations: results of operations that XLA does not fuse."""
        if b in seen or function not in self.steps[b.start].stack:
            return
        seen.add(b)
        if not _is_fused(self.steps[b.start].primitive):
            held.add(b)
            return
        for source in self._read_at[b.start]:
            if source is not b and source.kind not in ("argument", "state", "constant"):
                self._add_sources(source, function, held, seen)


def _is_fused(primitive: str) -> bool:
    """Whether XLA computes it inside the operation that reads it. Its own operations have no primitive, and are so."""
    return primitive == "" or primitive in FUSED


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
