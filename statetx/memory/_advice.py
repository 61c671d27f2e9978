"""Changes of the program that would lower the peak, with the bytes that each would save.

A change shortens the lifetimes of some buffers. Its saving is predicted from the timeline: the present peak, less the
peak of the timeline with the shorter lifetimes. The prediction leaves out that XLA may fuse and place the changed
program otherwise.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

from .._equations.primitives import FUSED
from .._text import short_path
from ..kinds.linen import flax_remat, module_with_method
from ._edits import (
    AsArguments,
    ChangeCandidate,
    Donate,
    InOrder,
    InParts,
    Predicted,
    ReleaseGradients,
    Rematerialize,
    SaveLess,
    StoreBits,
    bodies,
    checkpoints,
)
from ._names import parent
from ._scopes import Calls, line_of
from .buffer import Buffer, Change, Gap, Group, Timeline, bits_of, grouped, is_backward, saving, shape_of

_LEAST_SHARE = 0.02  # changes that save less of the peak are left out
_MUCH = 0.15  # of the peak, that a function has which is tried though it is predicted to save nothing
_MOST_TRIED = 4  # of such functions
_NUM_PARTS = 8  # of a value that is computed in parts
_LEAST_EXAMPLES = 4  # that a batch has
_POLICY = "dots_without_batch_dims"  # for a rematerialized function


class AdvisedTimeline(Timeline):
    """A timeline with changes that would lower its peak, for the views."""

    @functools.cached_property
    def changes(self) -> tuple[Change, ...]:
        """The changes that are worth it, the largest saving first; of two with the same target the better one."""
        changes = (c.change for c in candidates(self))
        return tuple(sorted(changes, key=lambda c: (-c.saved_bytes, c.action, c.target)))

    @functools.cached_property
    def at_peak(self) -> tuple[Group, ...]:
        """Buffers alive at the peak, grouped by kind, owner and line, the largest group first; of each the cheapest
        change that frees at least half of it.
        """
        cheapest_first = candidates(self)

        def change_of(group: Group) -> Change | None:
            freed = lambda c: sum(b.num_bytes for b in group.buffers if b in c.buffers)
            return next((c.change for c in cheapest_first if 2 * freed(c) >= group.num_bytes), None)

        return tuple(g._replace(change=change_of(g)) for g in grouped(self.alive(self.peak_step)))


def candidates(profile: Timeline, missing: float = float("inf"), *, to_try: bool = False) -> list[ChangeCandidate]:
    """The changes that are worth it, the cheapest first: those that save a share of the peak, or the bytes that are
    missing.

    Args:
        to_try: whether they will be compiled: then with each function that has much of the peak, whatever the timeline
            predicts.
    """
    if profile.note:
        return []
    makers: list[Callable[[Timeline], Iterable[ChangeCandidate]]] = [
        _order,
        _donations,
        _releases,
        _constants,
        _remat,
        _bits,
        bodies,
        checkpoints,
        _rows,
    ]
    least = min(_LEAST_SHARE * profile.peak_bytes, max(missing, 1))
    advised = [c for make in makers for c in make(profile) if c.change.saved_bytes >= least]
    if to_try:
        at_peak = set(profile.alive(profile.peak_step))
        held = lambda c: sum(b.num_bytes for b in c.buffers & at_peak)
        edits = {c.edit for c in advised}
        unadvised = [
            *_remat(profile),
            *_stacked(profile),
            *_stacked_bits(profile),
            *bodies(profile, "recomputed"),
            *checkpoints(profile, "recomputed"),
        ]
        unadvised = [c for c in unadvised if c.edit not in edits]
        unadvised = sorted((c for c in unadvised if held(c) >= _MUCH * profile.peak_bytes), key=held, reverse=True)
        unpredicted = [c._replace(change=c.change._replace(saved_bytes=0)) for c in unadvised[:_MOST_TRIED]]
        return [*advised, *unpredicted, *_policies(advised), *in_parts(profile)]
    # Splitting the batch nearly always saves most, but not in every program may a batch be split: it is advised where
    # no other change does a quarter of it.
    most = max((c.change.saved_bytes for c in advised), default=0)
    return advised + [c for c in in_parts(profile) if c.change.saved_bytes >= max(4 * most, least)]


# -- arguments and constants -----------------------------------------------------------------------------------------


def _donations(profile: Timeline) -> Iterable[ChangeCandidate]:
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
        yield ChangeCandidate(Change("donate", target, text, num_bytes), frozenset(buffers), edit)


def _order(profile: Timeline) -> Iterable[ChangeCandidate]:
    """Outputs of a step in another order than the donated inputs of their type: compiled when the profile was made."""
    if profile.reordered is not None:
        yield ChangeCandidate(profile.reordered, frozenset(), InOrder())


def _releases(profile: Timeline) -> Iterable[ChangeCandidate]:
    """Updates of scanned layers, which could run in the loop that computes their gradients."""
    if profile.releasable is not None:
        yield ChangeCandidate(profile.releasable, frozenset(), ReleaseGradients())


def argument_of(path: str) -> str:
    """The argument that an array belongs to: ``params`` of ``params['w']``."""
    return path if not parent(path) else argument_of(parent(path))


def _constants(profile: Timeline) -> Iterable[ChangeCandidate]:
    constants = sorted((b for b in profile.buffers if b.kind == "constant"), key=lambda b: -b.num_bytes)
    large = [b for b in constants if b.num_bytes >= _LEAST_SHARE * profile.constant_bytes]
    if large:
        which = (
            f"the constant {large[0].type} as an argument, or keep it in a State: a compiled program has its own "
            f"copy of it"
        )
        if len(large) > 1:
            types = ", ".join(dict.fromkeys(b.type for b in large))
            which = (
                f"the constants {types} as arguments, or keep them in States: a compiled program has its own copies "
                f"of them"
            )
        change = Change("argument", large[0].owner, f"Pass {which}.", sum(b.num_bytes for b in large))
        yield ChangeCandidate(change, frozenset(large), AsArguments())


# -- rematerialization -----------------------------------------------------------------------------------------------


def _remat(profile: Timeline) -> Iterable[ChangeCandidate]:
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
        how = f"@statetx.remat{_at(function, file)}" if linen is None else flax_remat(linen)
        text = f"Rematerialize {function}{times} with {how}{where}."
        yield ChangeCandidate(Change("remat", function, text, saved), frozenset(freed), Rematerialize(function))


def _policies(advised: Iterable[ChangeCandidate]) -> Iterable[ChangeCandidate]:
    """Propose a policy for the function whose rematerialization is predicted to save most; how much is not known."""
    functions = [c for c in advised if isinstance(c.edit, Rematerialize) and "statetx.remat" in c.change.text]
    for c in sorted(functions, key=lambda c: -c.change.saved_bytes)[:1]:
        text = c.change.text.replace("@statetx.remat", f"@statetx.remat(policy={_POLICY!r})")
        change = c.change._replace(action="policy", text=text, saved_bytes=0)
        yield ChangeCandidate(change, c.buffers, Rematerialize(c.change.target, _POLICY), stronger=lambda c=c: c)


def _stacked(profile: Timeline) -> Iterable[ChangeCandidate]:
    """Functions in the body of a loop, which stacks their residuals: by how much the peak falls is not known."""
    by_function: dict[str, list[Buffer]] = defaultdict(list)
    for b in profile.buffers:
        if b.stacked is not None and b.kind in ("residual", "recomputed"):
            by_function[b.function].append(b)
    for function, buffers in by_function.items():
        loop, file = buffers[0].stacked, buffers[0].source.rpartition(":")[0]
        text = f"Rematerialize {function} with @statetx.remat{_at(function, file)}, in the {loop}."
        yield ChangeCandidate(Change("remat", function, text, 0), frozenset(buffers), Rematerialize(function))


def _at(function: str, file: str) -> str:
    line = line_of(function, file)
    return "" if line is None else f" at {short_path(f'{file}:{line}')}"


def _is_freed_already(profile: Timeline, b: Buffer, function: str) -> bool:
    """Whether a region computes it again that does not contain the function but is the function, or is called by it."""
    if b.kind != "recomputed":
        return False
    functions = [f.function for f in profile.steps[b.start].frames]
    # Of a callable object, the region has the name of its class.
    names = (f".{b.region}", f".{b.region}.__call__")
    region = next((n for n, f in enumerate(functions) if f".{f}".endswith(names)), len(functions))
    return function in functions[region:]


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


def _bits(profile: Timeline) -> Iterable[ChangeCandidate]:
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


def _stacked_bits(profile: Timeline) -> Iterable[ChangeCandidate]:
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
        f"@statetx.remat(inputs_stored_as='bits'){_at(function, file)}, or "
    )
    text += "a tuple, as in ('bits', None), if not all of its arguments are 0 or 1."
    change, freed = Change("bits", function, text, saved), frozenset([*buffers, *freed])
    # Of a callable object, the region has the name of its class.
    names = {end for b in profile.buffers if b.region for end in (f".{b.region}", f".{b.region}.__call__")}
    is_rematerialized = any(f".{function}".endswith(end) for end in names)
    after = None if is_rematerialized else Rematerialize(function)
    yield ChangeCandidate(change, freed, StoreBits(function), after=after)


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
    """The user's functions that run these steps, innermost first; not the whole program."""
    depth: dict[str, int] = {}
    for step in steps:
        for n, function in enumerate(reversed(profile.steps[step].stack)):
            depth[function] = max(depth.get(function, 0), n)
    stacks = [set(s.stack) for s in profile.steps if s.stack]
    outermost = set.intersection(*stacks) if stacks else set()  # the profiled function and its callers
    return sorted((f for f in depth if f not in outermost), key=lambda f: (-depth[f], f))


def _leaves(profile: Timeline, b: Buffer, calls: Calls) -> bool:
    """Whether other calls or functions read it in the forward pass: then it stays, as their input."""
    own_call = calls.of(b.start)
    return any(calls.of(r) != own_call for r in b.readers if not is_backward(profile, r, b))


# -- values in parts


def _rows(profile: Timeline) -> Iterable[ChangeCandidate]:
    """Propose, for programs without gradients, the function of the largest temporary value in parts of its rows."""
    if any(step.phase == "backward" for step in profile.steps):
        return
    temporary = [
        b for b in profile.alive(profile.peak_step) if b.kind in ("working memory", "recomputed") and b.readers
    ]
    for b in temporary[:1]:
        size = next(iter(shape_of(b.type)), 0)
        if (
            10 * b.num_bytes < profile.peak_bytes
            or size < _NUM_PARTS
            or size in _loop_lengths(profile)
            or b.stacked is not None
        ):
            continue
        alike = [x for x in profile.buffers if (x.type, x.kind, x.function) == (b.type, b.kind, b.function)]
        gaps = [Gap(x.start, x.end, x.num_bytes - x.num_bytes // _NUM_PARTS) for x in alike]
        where = b.function or b.owner
        condition = f"{where} computes each of the {size:,} entries along axis 0 of {b.type} independently"
        text = (
            f"If {condition}, compute them in {_NUM_PARTS} parts, as with statetx.map(..., "
            f"batch_size={-(-size // _NUM_PARTS)})."
        )
        change = Change("microbatch", where, text, saving(profile, gaps), condition)
        yield ChangeCandidate(change, frozenset(alike), Predicted("only you know whether its rows are independent"))


def in_parts(profile: Timeline, num: int | None = None) -> Iterable[ChangeCandidate]:
    """Split the batch of a gradient into parts: of temporaries with an axis of examples, one part's are alive at a
    time.

    Args:
        num: the least number of parts; by default eight, or as many as there are examples.
    """
    if not any(step.phase == "backward" for step in profile.steps):
        return
    # A buffer without readers is working memory of a library, which does not grow with the batch.
    temporary = [b for b in profile.buffers if b.kind in ("residual", "recomputed", "working memory") and b.readers]
    shapes = {b: shape_of(b.type) for b in profile.buffers}
    leading = _leading_axes(profile)

    def scaling(size: int) -> list[Buffer]:
        # XLA merges the axis of examples with others: any multiple of it as the first axis counts.
        return [b for b in temporary if shapes[b] and (shapes[b][0] % size == 0 or size in shapes[b])]

    # An axis of weights that divides the batch finds the same buffers, and a few others: the largest axis that finds
    # nearly all is the batch.
    num_bytes = {size: sum(b.num_bytes for b in scaling(size)) for size in leading}
    size = max((n for n in leading if num_bytes[n] >= 0.9 * max(num_bytes.values())), default=0)
    buffers = scaling(size) if size else []
    if not buffers:
        return
    least = min(_NUM_PARTS, size) if num is None else num
    num = next((n for n in range(least, size + 1) if size % n == 0), 0)
    if not num:
        return
    gaps = [Gap(b.start, b.end, b.num_bytes - b.num_bytes // num) for b in buffers]
    # Gradients are added up from the first part on. As outputs they have their memory for the whole time already.
    inputs = {b.type for b in profile.buffers if b.kind in ("state", "argument")}
    gradients = [b for b in temporary if b.phase == "backward" and b.type in inputs and b not in set(buffers)]
    gaps += [Gap(0, b.start - 1, -b.num_bytes) for b in gradients]
    condition = f"axis 0 of {', '.join(leading[size])} holds {size:,} independent examples (not steps in time)"
    text = (
        f"If {condition}, split them into {num} parts: take the gradient of statetx.microbatch(loss, {num}, "
        "argnums=...), whose argnums= are the arguments of the loss with these examples."
    )
    change = Change("microbatch", "batch", text, saving(profile, gaps), condition)
    edit = InParts(frozenset(leading[size]), size, num)
    yield ChangeCandidate(change, frozenset(buffers), edit, lambda: next(iter(in_parts(profile, 2 * num)), None))


def _leading_axes(profile: Timeline) -> dict[int, list[str]]:
    """The arguments by the size of their first axis, if that may be an axis of examples.

    An axis as long as a loop is probably a scan's: time, or layers. An argument with a gradient or an update of its
    type is probably a parameter.
    """
    is_update = lambda b: b.kind == "output" and b.phase != "forward" and not profile.gradient
    updated = {b.type for b in profile.buffers if is_update(b)}
    loops = _loop_lengths(profile)
    leading: dict[int, list[str]] = defaultdict(list)
    for b in profile.buffers:
        size = next(iter(shape_of(b.type)), 0)
        is_key = b.type.startswith("u32") and len(shape_of(b.type)) == 1  # of random numbers, perhaps
        is_batch = size >= _LEAST_EXAMPLES and size not in loops and not is_key
        if b.kind == "argument" and b.type not in updated and is_batch:
            name = argument_of(b.owner)
            leading[size] += [name] if name not in leading[size] else []
    return leading


def _loop_lengths(profile: Timeline) -> set[int | None]:
    return {step.loop.length for step in profile.steps if step.loop is not None}
