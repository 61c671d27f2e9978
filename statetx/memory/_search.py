"""Search for changes that make a step fit: each is compiled alone, in a fixed order, then together with others, until
it fits or the time is over.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from typing import NamedTuple

from .._equations.compiled import Cost
from .._text import format_bytes
from ..planner._search.candidates import best_within
from ._advice import candidates
from ._advice_parts import in_parts
from ._edits import ChangeCandidate, Edit
from ._tried import Trials
from .buffer import Buffer, Change
from .measure import MemoryProfile

_WORTH = 0.005  # of the peak, that a change in a combination has to save
_MOST_PARTS = 1024
_FREE = ("order", "donate", "argument", "release")
"""The changes that add no operations. They are tried first."""
_FIRST = ("remat", "policy", "microbatch")
"""Then one of each of these, also where the time is over."""
NEGLIGIBLE = 0.001  # of the operations: no other change is sought for less


class Remedy(NamedTuple):
    """A change, and the program after it and all changes before it.

    Attributes:
        change: the change. If it was compiled, its ``saved_bytes`` are measured, beyond the savings of the changes
            before it. Else they are 0.
        saved_bytes: the saving of all changes so far.
        needed_bytes: the program's peak after them.
        fits: whether this is within the limit, as compiled.
        is_compiled: whether the program was compiled with this change and the compiled changes before it; else the
            change is only named.
        why_untried: why it was not compiled; empty if it was, or if nothing was.
        added_operations: of the program with the compiled changes so far, relative to the unchanged step; None if it is
            not compiled.
        seconds: XLA's estimate of the time of a run with them, for a target that it knows; else None.
    """

    change: Change
    saved_bytes: int
    needed_bytes: int
    fits: bool
    is_compiled: bool = False
    added_operations: float | None = None
    seconds: float | None = None
    why_untried: str = ""


class Unused(NamedTuple):
    """A tool that is not used, and why not."""

    tool: str
    reason: str


TOOLS = {
    "remat": ("rematerialization", "no function keeps residuals at the peak beyond its own backward pass"),
    "policy": ("a policy", "no function was found for one"),
    "slots": ("checkpoint= of a loop", "no loop of known length keeps residuals of its steps"),
    "donate": ("donation", "no output could take the memory of an argument that is not donated yet"),
    "bits": ("bits", "no function takes large arrays that are known to be 0 or 1"),
    "argument": ("constants as arguments", "the program has no large constant"),
    "release": ("updates in the backward loop", "no update reads gradients of scanned layers"),
    "order": ("the order of the outputs", "donated inputs are updated in place"),
    "microbatch": ("parts", "no argument has an axis of examples"),
}
"""By the action of a change: the name of the tool, and why a program has no such change."""


def remedies_for(
    profile: MemoryProfile, available: int | None, trials: Trials | None, tell: Callable[[str], None]
) -> tuple[list[Remedy], list[Unused], list[Remedy]]:
    """Find changes that make a program fit.

    Args:
        available: bytes for the program; None if unknown.
        trials: compiles changed programs, if it is known that this one does not fit; None to name changes only.
        tell: is told of each step.

    Returns:
        The changes that together make it fit, or all that help; the tools that are not used, unless changes were only
        named; the changes that were compiled alone.
    """
    needed = profile.peak_bytes + profile.constant_bytes
    if available is not None and needed <= available:
        return [], [], []
    missing = float("inf") if available is None else needed - available
    advised = candidates(dataclasses.replace(profile, note=""), missing, to_try=trials is not None)
    if trials is not None:
        assert available is not None
        return _RemedySearch(profile, available, trials, tell, *in_order(advised)).run()
    # An array that is passed as an argument may have no other copy on the device.
    first, others = in_order(c for c in advised if c.change.action != "argument")
    named = _named([*first, *others], frozenset())
    return [Remedy(change, 0, needed, False) for change, _ in named], [], []


class _RemedySearch:
    """Compiles changes of a program that does not fit: arguments as for `remedies_for`.

    Args:
        first, others: the changes that are compiled in any case, and those that are while there is time.
    """

    def __init__(
        self,
        profile: MemoryProfile,
        available: int,
        trials: Trials,
        tell: Callable[[str], None],
        first: Sequence[ChangeCandidate],
        others: Sequence[ChangeCandidate],
    ):
        self._profile, self._trials, self._tell = profile, trials, tell
        self._first, self._others = first, others
        self._most = available - profile.constant_bytes  # of a peak that fits
        self._alone: dict[str, str] = {}  # the effect of each tool alone, by action

    def run(self) -> tuple[list[Remedy], list[Unused], list[Remedy]]:
        profile, tried = self._profile, self._try_alone()
        chosen = self._cheapest(tried) or self._together(tried)
        remedies = list(self._compiled(chosen))
        if not (remedies and remedies[-1].fits):
            compiled = [t.candidate for t in tried]
            every = [*self._first, *self._others]
            unknown = [c for c in every if c not in compiled and c.freed_bytes > 0]
            saved = remedies[-1].saved_bytes if remedies else 0
            needed = profile.peak_bytes + profile.constant_bytes - saved
            for change, edit in _named(unknown, frozenset(b for c in chosen for b in c.buffers)):
                remedies.append(Remedy(change, saved, needed, False, why_untried=self._trials.why_not(edit)))
        used = {r.change.action for r in remedies}
        if profile.reordered is None:  # most programs return their updates in order
            used.add("order")
        if profile.releasable is None:
            used.add("release")
        why = {a: self._alone.get(a, none) for a, (_, none) in TOOLS.items() if a not in used}
        if profile.gradient and "donate" in why:
            why["donate"] = "a gradient reads its arguments"
        return remedies, [Unused(TOOLS[a][0], reason) for a, reason in why.items()], [t.alone for t in tried]

    def _cost(self, chosen: Sequence[ChangeCandidate], *, is_first: bool = False) -> Cost | None:
        self._tell("; ".join(f"{TOOLS[c.change.action][0]} {c.change.owner}" for c in chosen))
        return self._trials.cost(*_edits_of(chosen), is_first=is_first)

    def _fits(self, chosen: Sequence[ChangeCandidate]) -> bool:
        cost = self._cost(chosen)
        return cost is not None and cost.peak_bytes <= self._most

    def _try_alone(self) -> list[_Alone]:
        compiled: list[_Alone] = []
        self._tell(", ".join(TOOLS[c.change.action][0] for c in self._first))
        self._trials.compile_first([_edits_of([c]) for c in self._first])
        for n, c in enumerate([*self._first, *self._others]):
            is_first = n < len(self._first)
            if not is_first and any(t.suffices and t.operations <= NEGLIGIBLE for t in compiled):
                self._alone.setdefault(c.change.action, "not tried: the listed changes cost nothing")
                continue
            cost = self._cost([c], is_first=is_first)
            peak_before = None if cost is None else self._peak_before(c)
            if cost is None and not c.freed_bytes:  # it is not named either
                continue
            if cost is None or peak_before is None:
                why = f"not tried: {self._trials.why_not(c.edit)}"
            else:
                remedy = self._remedy(c.change, peak_before, cost)
                suffices = remedy.fits and not c.change.condition and c.prerequisite is None
                added_cost = round(remedy.added_operations or 0.0, 3)
                compiled.append(tried := _Alone(c, remedy, cost, cost.peak_bytes, added_cost, suffices))
                why = tried.text
            self._alone.setdefault(c.change.action, why)
        return compiled

    def _peak_before(self, c: ChangeCandidate) -> int | None:
        """The peak before a change, after its prerequisite: it claims only its own saving."""
        if c.prerequisite is None:
            return self._profile.peak_bytes
        cost = self._trials.cost(c.prerequisite)
        return None if cost is None else cost.peak_bytes

    def _remedy(self, change: Change, peak_before: int, cost: Cost) -> Remedy:
        peak, operations = cost.peak_bytes, self._trials.added_operations(cost)
        change = change._replace(saved_bytes=peak_before - peak, is_compiled=True)
        saved, needed = self._profile.peak_bytes - peak, peak + self._profile.constant_bytes
        return Remedy(change, saved, needed, peak <= self._most, True, operations, cost.seconds)

    def _cheapest(self, tried: Sequence[_Alone]) -> list[ChangeCandidate]:
        """The change that a plan would be, of those that suffice alone and hold without a condition."""
        best = best_within((t for t in tried if t.suffices), float("inf"), "auto")
        return [] if best is None else [best.candidate]

    def _together(self, tried: Sequence[_Alone]) -> list[ChangeCandidate]:
        """Changes in the order of operations for a byte until the program fits, then greater numbers of them, then
        parts of the batch.
        """
        chosen: list[ChangeCandidate] = []
        peak = self._profile.peak_bytes

        def saves(changed: list[ChangeCandidate], least: float = 0.0, *, is_first: bool = False) -> bool:
            """Whether these save more than that beyond the chosen ones. Then they are the chosen ones."""
            nonlocal chosen, peak
            cost = self._cost(changed, is_first=is_first)
            if cost is None or peak - cost.peak_bytes <= least:
                return False
            chosen, peak = changed, cost.peak_bytes
            return True

        least = _WORTH * (self._profile.peak_bytes + self._profile.constant_bytes)
        for t in sorted(tried, key=lambda t: t.price):
            c = t.candidate
            if t.alone.change.condition:  # only if nothing else suffices
                continue
            if any(c.change.owner == x.change.owner and c.prerequisite != x.edit for x in chosen):
                continue
            is_first = any(c is x for x in self._first)
            if saves([*chosen, c], least, is_first=is_first) and peak <= self._most:
                return self._without_needless(chosen, tried)
        for n in range(len(chosen)):
            while (more := chosen[n].stronger()) is not None and saves([*chosen[:n], more, *chosen[n + 1 :]]):
                if peak <= self._most:
                    return self._without_needless(chosen, tried)
        with_parts = self._in_parts(chosen, peak)
        if with_parts is not None and self._fits(with_parts):
            return self._without_needless(with_parts, tried)
        # The number of parts that was compiled first may suffice alone, where the time is over for fewer.
        under_condition = [t.candidate for t in tried if t.alone.fits and t.candidate.prerequisite is None]
        return under_condition[:1] or with_parts or chosen

    def _in_parts(self, chosen: Sequence[ChangeCandidate], peak: int) -> list[ChangeCandidate] | None:
        """Choose the fewest parts that suffice, on the assumption that memory is in proportion to a part's size."""
        best, num = None, 2
        while num <= _MOST_PARTS and (c := next(iter(in_parts(self._profile, num)), None)) is not None:
            cost = self._cost([*chosen, c])
            if cost is None:
                self._alone.setdefault("microbatch", f"not tried: {self._trials.why_not(*_edits_of([*chosen, c]))}")
                break
            if cost.peak_bytes >= peak:
                self._alone.setdefault("microbatch", f"{num} parts save nothing")
                break
            best = [*chosen, c]
            if cost.peak_bytes <= self._most:
                break
            of_batch = (peak - cost.peak_bytes) * num / (num - 1)
            for_batch = self._most - (peak - of_batch)
            num = max(2 * num, 2 ** (max(2, int(of_batch / for_batch)) - 1).bit_length()) if for_batch > 0 else 2 * num
        return best

    def _without_needless(self, chosen: Sequence[ChangeCandidate], tried: Sequence[_Alone]) -> list[ChangeCandidate]:
        """Drop the changes that cost operations and are not needed, the most expensive first."""
        operations = {t.candidate.change.owner: t.operations for t in tried}
        for c in sorted(chosen, key=lambda c: -operations.get(c.change.owner, 0)):
            fewer = [x for x in chosen if x is not c]
            is_costly = operations.get(c.change.owner, 0) > NEGLIGIBLE
            if fewer and is_costly and self._fits(fewer):
                chosen = fewer
        return list(chosen)

    def _compiled(self, chosen: Sequence[ChangeCandidate]) -> Iterator[Remedy]:
        peak = self._profile.peak_bytes
        for n, c in enumerate(chosen, 1):
            cost = self._cost(chosen[:n])
            if cost is None:  # the time is over: only the whole was compiled
                continue
            yield self._remedy(c.change, peak, cost)
            peak = cost.peak_bytes


def _named(unknown: Sequence[ChangeCandidate], freed: Set[Buffer]) -> Iterator[tuple[Change, Edit]]:
    """The changes that were not compiled. Of two that free the same buffer the one that frees more at the peak."""
    for c in sorted(unknown, key=lambda c: -c.freed_bytes):
        if not freed & c.buffers:
            freed |= c.buffers
            yield c.change, c.edit


def in_order(advised: Iterable[ChangeCandidate]) -> tuple[list[ChangeCandidate], list[ChangeCandidate]]:
    """The changes in the order of their trials: those that are tried in any case, and the others.

    First those that add no operations, then rematerialization of the functions or loop that free most at the peak, the
    same with a policy, and parts of the batch.
    """
    most_first = sorted(advised, key=lambda c: -c.freed_bytes)
    first = [c for c in most_first if c.change.action in _FREE]
    first += [c for a in _FIRST for c in [c for c in most_first if c.change.action == a][:1]]
    return first, [c for c in most_first if not any(c is x for x in first)]


def _edits_of(chosen: Sequence[ChangeCandidate]) -> list[Edit]:
    """Their edits, without those that another contains, as one that presupposes it."""
    contained = {c.prerequisite for c in chosen}
    return [c.edit for c in chosen if c.edit not in contained]


class _Alone(NamedTuple):
    """A change that was compiled alone, which `best_within` compares as a candidate of the planner.

    Attributes:
        temp_bytes: of the peak.
        added_cost: operations, relative to the unchanged step.
        suffices: whether the step fits with it alone, without a condition.
    """

    candidate: ChangeCandidate
    alone: Remedy
    compiled: Cost
    temp_bytes: int
    added_cost: float
    suffices: bool

    name = "change"

    @property
    def operations(self) -> float:
        return self.alone.added_operations or 0.0

    @property
    def price(self) -> tuple[bool, float, int]:
        """Sort key: added operations for a byte; changes that save nothing alone come last. A change that presupposes
        another one comes after that.
        """
        saved, is_late = self.alone.saved_bytes, self.candidate.prerequisite is not None
        if saved <= 0:
            return is_late, float("inf"), -self.candidate.freed_bytes
        return is_late, max(self.added_cost, 0.0) / saved, -saved

    @property
    def text(self) -> str:
        saved = self.alone.change.saved_bytes
        if saved <= 0:
            return "saves nothing as compiled"
        not_needed = "" if self.alone.fits else "; not enough alone, nor needed with the others"
        if self.alone.change.condition:
            not_needed = (
                f" with {self.alone.change.text.partition(' parts')[0].split()[-1]} parts, if the examples are "
                f"independent"
            )
        beside = " beyond rematerialization" if self.candidate.prerequisite is not None else ""
        return f"{format_bytes(saved)} less{beside}, {100 * self.operations:+.1f}% operations, as compiled{not_needed}"
