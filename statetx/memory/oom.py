"""`explain_oom`: why a step does not fit into the memory of a device, with changes that make it fit."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax

from .._equations.compiler import full_device_options, is_out_of_memory, num_compiled
from .._errors import StatetxError
from .._lift.wrapper import check_callable, name_of, short_name
from .._spinner import spinner
from .._tables import Cell, Column, Table, Tabular
from .._targets import current
from .._text import counted, format_bytes, format_seconds, parse_bytes, short_path
from ..planner._budget import TimeLeft, read_time_limit
from ..planner.planner import plan
from ..residuals._trace import TracedCall, inspects
from ._estimate import estimate
from ._logits import num_words
from ._search import NEGLIGIBLE, Remedy, Unused, remedies_for
from ._show import PeakRow, rows_at_peak
from ._tried import Trials, bytes_on_device
from .measure import MemoryProfile, profiled

_MAX_ROWS = 6
_LEAST_SHARE = 0.005  # of the peak; smaller groups are not listed
_FOR_TRIALS = 0.7  # of the time, with the first compilation; the rest is for a plan
_LEAST_FOR_PLAN = 1.0  # seconds
_MOST_FOR_PLAN = 5.0  # seconds, if the trials took less


_LAST_RESORT = (
    "smaller batches with accumulated gradients, shard states and arguments over more devices, smaller dtypes, or a "
    "smaller model."
)


class Alternative(NamedTuple):
    """A plan in place of the changes.

    Attributes:
        text: how to make and use it; or why there is none.
        needed_bytes: the peak of the planned program; None without a plan.
        added_operations: relative to the unchanged step.
    """

    text: str
    needed_bytes: int | None = None
    added_operations: float = 0.0


@dataclasses.dataclass(frozen=True, repr=False)
class OutOfMemory(Tabular):
    """Why a step does not fit into the memory of a device; made by `explain_oom`.

    Prints as text, in colors with ``rich.print``, as HTML in a notebook. Sizes are in bytes, of one device.

    Attributes:
        name: of the step.
        profile: the memory profile; ``profile.note`` says so where it is an estimate.
        limit_bytes: the memory of the device; None if unknown.
        limit_source: who says so: "limit=", "the device" or "the error"; empty if unknown.
        other_bytes: arrays on the device that the step neither takes nor returns; of a given limit, those that it
            closes over.
        requested_bytes: the size of the failed allocation; None if the error does not say.
        remedies: changes that together make it fit, the cheapest first; all that help if they do not suffice.
        unused: the tools that are not among them, with the reasons; nothing unless changes were compiled.
        tried: the changes that were compiled alone, used or not.
        plan: the automatic alternative; None if none was made.
        num_compiled: the programs that were compiled, with the plan's.
        logits_bytes, num_words: the bytes at the peak that are logits, and the words that they are for; zeros if that
            is little.
        seconds, processor_seconds: wall time, and time of all processors. On a busy machine the first is the longer
            one.
    """

    name: str
    profile: MemoryProfile
    limit_bytes: int | None
    limit_source: str
    other_bytes: int
    requested_bytes: int | None
    remedies: tuple[Remedy, ...] = ()
    unused: tuple[Unused, ...] = ()
    tried: tuple[Remedy, ...] = ()
    plan: Alternative | None = None
    num_compiled: int = 0
    logits_bytes: int = 0
    num_words: int = 0
    seconds: float = 0.0
    processor_seconds: float = 0.0

    @property
    def needed_bytes(self) -> int:
        """Bytes that the program needs: arguments, outputs, temporaries and constants."""
        return self.profile.peak_bytes + self.profile.constant_bytes

    @property
    def short_bytes(self) -> int:
        """Bytes that are missing; 0 if the program fits, or if the limit is unknown."""
        return 0 if self.limit_bytes is None else max(0, self.needed_bytes - self.limit_bytes + self.other_bytes)

    @property
    def can_fit(self) -> bool:
        """Whether it fits, or does after the changes, as compiled, if their conditions hold, or with a plan. False if
        the limit is unknown.
        """
        is_planned = self.plan is not None and self.plan.needed_bytes is not None
        return self.limit_bytes is not None and (
            not self.short_bytes or is_planned or any(r.fits for r in self.remedies)
        )

    @property
    def available_bytes(self) -> int | None:
        """Bytes that the device has for the program; None if unknown."""
        return None if self.limit_bytes is None else self.limit_bytes - self.other_bytes

    def to_dict(self) -> dict[str, Any]:
        """Lists, dicts, numbers and text, for ``json.dump``; without the profile, which has its own."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "profile"}
        told = lambda some: [r._asdict() | {"change": r.change._asdict()} for r in some]
        lists = {
            "remedies": told(self.remedies),
            "tried": told(self.tried),
            "unused": [u._asdict() for u in self.unused],
            "plan": None if self.plan is None else self.plan._asdict(),
        }
        return fields | {"needed_bytes": self.needed_bytes, "short_bytes": self.short_bytes} | lists

    def _table(self) -> Table:
        rows = [(row.num_bytes, row.kind, *_owner_and_line(row)) for row in rows_at_peak(self.profile)]
        rows.append((self.profile.constant_bytes, "constant", "", ""))
        large = sorted((r for r in rows if r[0] >= _LEAST_SHARE * self.needed_bytes), key=lambda r: -r[0])
        cells = []
        for size, *texts in large[:_MAX_ROWS]:
            share = size / max(self.needed_bytes, 1)
            cells.append([Cell(format_bytes(size), "yellow", share), Cell(f"{100 * share:.0f}%"), *map(Cell, texts)])
        return Table(self._headline(), _COLUMNS, cells, list(self._notes()))

    def _headline(self) -> str:
        with_gradient = " with its gradient" if self.profile.gradient else ""
        needs = f"{self.name}{with_gradient} needs {format_bytes(self.needed_bytes)} on a device"
        if self.limit_bytes is None:
            return f"{needs}; the memory of the device is unknown."
        has = f"{needs}, which has {format_bytes(self.limit_bytes)}"
        has += f", of which other arrays take {format_bytes(self.other_bytes)}" if self.other_bytes else ""
        return f"{has}: {format_bytes(self.short_bytes)} too much." if self.short_bytes else f"{has}: it fits."

    def _notes(self) -> Iterator[tuple[str, str]]:
        if self.requested_bytes is not None:
            yield "Error:", f"the allocation that failed asked for {format_bytes(self.requested_bytes)}."
        if self.limit_bytes is None:
            yield (
                "Limit:",
                f"the {self.profile.backend} backend does not tell it. Pass limit='16GiB' to see what is missing.",
            )
        elif self.short_bytes:
            yield from self._remedy_notes()
        else:
            yield "If it failed anyway:", _OTHER_CAUSES
        if self.short_bytes and self.num_words:
            yield (
                "Logits:",
                f"{format_bytes(self.logits_bytes)} of the peak have a value for each of {self.num_words:,} words, by "
                "the shapes. statetx.chunked(loss, axis, size) around the last product and the loss has one "
                "chunk of them.",
            )
        is_told = any(r.change.action == "argument" for r in self.remedies)
        if self.profile.constant_bytes >= _LEAST_SHARE * self.needed_bytes and not is_told:
            yield "Constants:", _CONSTANTS
        if self.profile.note:
            yield "Note:", self.profile.note
        if self.profile.gradient:
            yield (
                "Compiled:",
                f"{self.name} and its gradient. With gradient=False {self.name} alone, as for an evaluation.",
            )
        if self.tried:
            yield (
                "Time:",
                f"{counted(self.num_compiled, 'program')} compiled in {self.seconds:.1f} s, with "
                f"{self.processor_seconds:.1f} s of processor time.",
            )
        yield "More:", "print(report.profile), or report.profile.to_html('memory.html')."

    def _remedy_notes(self) -> Iterator[tuple[str, str]]:
        for n, remedy in enumerate(self.remedies, 1):
            text = remedy.change.text.rstrip(".")
            if not remedy.is_compiled:
                yield f"[{n}]", f"{text} ({_how_known(remedy)})."
                continue
            text += f": {format_bytes(remedy.change.saved_bytes)} less ({_how_known(remedy)})"
            total = f", {format_bytes(remedy.saved_bytes)} with those before it" if n > 1 else ""
            end = f"; {format_bytes(remedy.needed_bytes)} needed then."
            if remedy.fits:
                is_sure = not any(r.change.condition for r in self.remedies[:n])
                end = ". It fits then." if is_sure else ". It fits then, but only if the condition holds."
            yield f"[{n}]", f"{text}{total}{end}"
        if not all(r.is_compiled for r in self.remedies):
            yield "Not known:", f"whether these changes suffice, since not all were compiled. Else use {_LAST_RESORT}"
        elif not any(r.fits for r in self.remedies):
            which = "these changes do" if len(self.remedies) > 1 else "this change does" if self.remedies else ""
            yield "Not enough:", f"{f'{which} not suffice' if which else 'no change was found'}. Use {_LAST_RESORT}"
        if self.plan is not None:
            yield "Or a plan:", self.plan.text
        if self.unused:
            yield "Not used:", "; ".join(f"{u.tool}: {u.reason}" for u in self.unused) + "."


def _how_known(remedy: Remedy) -> str:
    if not remedy.is_compiled:
        return f"not tried: {remedy.why_untried}" if remedy.why_untried else "not compiled"
    time = "" if remedy.seconds is None else f", estimated {format_seconds(remedy.seconds)}"
    return f"compiled, {100 * (remedy.added_operations or 0):+.1f}% operations{time}"


def _owner_and_line(row: PeakRow) -> tuple[str, str]:
    owner = f"{row.owner} ({row.num_owners})" if row.num_owners > 1 else row.owner
    return owner, " ".join(filter(None, [short_path(row.source), row.function and f"({row.function})"]))


_COLUMNS = (
    Column("bytes", "right", "bold"),
    Column("share", "right"),
    Column("kind"),
    Column("owner", code=True),
    Column("line", rank=1),
)

_CONSTANTS = (
    "arrays that the function closes over have a copy in the program. Pass those that are on the device anyway as "
    "arguments, or keep them in states."
)
_OTHER_CAUSES = (
    "other processes use the device (JAX takes 75% of a GPU when it starts), other arrays are alive "
    "(jax.live_arrays()), free memory is in pieces, or an earlier call of another program failed."
)


@inspects
def explain_oom(
    step: Callable[..., Any],
    /,
    *args: Any,
    error: BaseException | str | None = None,
    limit: int | str | None = None,
    gradient: bool | None = None,
    time_limit: float | None = 60.0,
    progress: bool | None = None,
    verify: bool = False,
    **kwargs: Any,
) -> OutOfMemory:
    """Explain why a step ends with ``RESOURCE_EXHAUSTED``: its memory, the device's, and changes that make it fit.

    The step, or a loss with its gradient, is compiled and not run. No state changes. A change is tried before it is
    told: the program with it is compiled, alone and together with others, until it fits. First come changes that cost
    no operations, such as donation, then rematerialization of the function that holds most, the same with a policy, and
    parts of the batch. The bytes of a change are its saving beyond the changes before it. Changes that cannot be tried,
    or not within the time limit, are named without bytes. A plan is made unless the changes add no operations. Programs
    are kept on the disk, as plans are: a second call compiles the step alone.

    Args:
        step: the function that failed, or would: a training step, which differentiates inside, or a loss.
        *args, **kwargs: its arguments: arrays, also deleted or donated ones, or ``jax.ShapeDtypeStruct``.
        error: the exception, or its text: it names the bytes asked for, and on TPUs the memory of the device.
        limit: the memory of the device, in bytes or as ``"16GiB"``. By default as the first local device tells, or
            else the error. CPUs tell none.
        gradient: whether the program also computes the derivative of `step`, as in `memory_profile`: by default unless
            it is a training step. False for an evaluation.
        time_limit: seconds of wall time for all; then the best so far is told. The step itself, the first changes and
            changes that are told to fit are compiled in any case. No other compilation begins if one as long as the
            longest so far would not end in time, and a plan only if its last compilations would, too. 0 to name changes
            only, None for no limit.
        progress: whether to show the trials (with rich); by default on a terminal.
        verify: whether the plan is run and held against the plain step, as in `plan`.

    Returns:
        `OutOfMemory`, which prints. Where the compiler itself runs out of memory, its profile is an estimate from the
        equations before compilation.

    Raises:
        PolicyError: `limit` is not a size.

    Source:
        ``jax.Device.memory_stats``, and the messages of XLA's allocators.

    Example:
        >>> import jax, jax.numpy as jnp, statetx
        >>> def step(w, x):
        ...     grad = jax.grad(lambda w: jnp.tanh(jnp.tanh(x @ w) @ w).sum())(w)
        ...     return w - 0.1 * grad
        >>> x = jax.ShapeDtypeStruct((4096, 64), jnp.float32)
        >>> report = statetx.explain_oom(step, jnp.eye(64), x, limit="2MiB")
        >>> report.short_bytes == report.needed_bytes - 2 * 2**20 > 0
        True
    """
    check_callable("explain_oom", step)
    time_left = TimeLeft(read_time_limit(time_limit))
    first, processor_begin = num_compiled(), time.process_time()
    with spinner(f"explain_oom of {_name(step)}", is_shown=progress) as tell, time_left.running():
        tell("the step")
        report, call = _without_changes(step, args, kwargs, error, limit, gradient, time_left)
        profile, trials, begin = report.profile, None, time_left.used
        if report.short_bytes and not profile.note and time_left.limit:
            of_program = {"gradient": profile.gradient, "constant_bytes": profile.constant_bytes}
            trials = Trials(call, time_left=time_left, share=_FOR_TRIALS, **of_program)
        remedies, unused, tried = remedies_for(profile, report.available_bytes, trials, tell)
        report = dataclasses.replace(report, remedies=tuple(remedies), unused=tuple(unused), tried=tuple(tried))
        is_free = any(
            r.fits and not (r.added_operations or 0) > NEGLIGIBLE for r in remedies[-1:]
        )  # no plan costs less
        if trials is not None and not is_free and gradient is not False:
            seconds = _seconds_for_plan(time_left, time_left.used - begin)
            if seconds is None or seconds >= _LEAST_FOR_PLAN:
                tell("a plan")
                report = dataclasses.replace(report, plan=_planned(report, step, args, kwargs, seconds, verify))
    return dataclasses.replace(
        report,
        num_compiled=num_compiled() - first,
        seconds=time_left.used,
        processor_seconds=time.process_time() - processor_begin,
    )


def _without_changes(
    step: Callable[..., Any],
    args: tuple,
    kwargs: dict[str, Any],
    error: BaseException | str | None,
    limit: int | str | None,
    gradient: bool | None,
    time_left: TimeLeft,
) -> tuple[OutOfMemory, TracedCall]:
    """The memory of a step and of the device."""
    texts = [] if error is None else [str(error)]
    try:
        with time_left.compiling():
            profile, call = profiled(step, args, kwargs, gradient, full_device_options())
    except Exception as e:
        if not is_out_of_memory(e):
            raise
        texts.append(str(e))
        profile, call = estimate(step, args, kwargs, gradient), None

    call = call or TracedCall("explain_oom", step, args, kwargs)
    text = "\n".join(texts)
    limit_bytes, source, other_bytes = None if limit is None else parse_bytes(limit, "limit="), "limit=", 0
    stats = current.memory_stats() if limit_bytes is None else None
    if stats and "bytes_limit" in stats:
        limit_bytes, source = stats["bytes_limit"], "the device"
        in_use = stats.get("bytes_in_use", 0)  # none of a target
        other_bytes = max(0, in_use - _bytes_of_inputs(call)) if in_use else 0
    elif limit_bytes is None:
        limit_bytes = _first_size(_CAPACITIES, text)
        source = "the error" if limit_bytes else ""

    if limit is not None and profile.constant_bytes >= _LEAST_SHARE * (profile.peak_bytes + profile.constant_bytes):
        other_bytes = bytes_on_device(call.body.operands)
    words, logits_bytes = num_words(call.body.jaxpr, profile)
    figures = limit_bytes, source, other_bytes, _first_size(_REQUESTS, text)
    return OutOfMemory(_name(step), profile, *figures, num_words=words, logits_bytes=logits_bytes), call


def _name(step: Callable[..., Any]) -> str:
    return short_name(getattr(step, "__name__", "") or name_of(step))


def _seconds_for_plan(time_left: TimeLeft, for_trials: float) -> float | None:
    """The time limit of a plan that ends in time; None for no limit.

    Until a first plan fits it may take twice its limit, and then it ends the compilation that is in progress and
    compiles two programs more, at most. A search of seconds should not be followed by one of minutes.
    """
    if time_left.limit == float("inf"):
        return None
    return min((time_left.limit - time_left.used - 3 * time_left.longest) / 2, max(for_trials, _MOST_FOR_PLAN))


def _planned(
    report: OutOfMemory, step: Callable, args: tuple, kwargs: dict[str, Any], seconds: float | None, verify: bool
) -> Alternative:
    """Bytes of a plan within the limit."""
    assert report.available_bytes is not None
    budget = report.available_bytes - report.profile.constant_bytes
    if budget <= 0:
        constants = format_bytes(report.profile.constant_bytes)
        return Alternative(
            f"statetx.plan finds none: constants take {constants} of {format_bytes(report.available_bytes)}"
        )
    try:
        result = plan(step, *args, budget=budget, time_limit=seconds, progress=False, verify=verify, **kwargs)
    except StatetxError as e:
        return Alternative(f"statetx.plan finds none within {format_bytes(budget)}: {str(e).splitlines()[0]}")
    needed, added = result.total_bytes + report.profile.constant_bytes, result.extra_flops
    return Alternative(
        f"statetx.plan({report.name}, ..., budget={budget}).apply({report.name}) takes {format_bytes(needed)} "
        f"(compiled, {100 * added:+.1f}% operations) without a change of the code.",
        needed,
        added,
    )


# -- the device and the error ----------------------------------------------------------------------------------------


_SIZE = r"([0-9][0-9.,]*) ?([KMGTP]?)(?:i?B|bytes?)?\b"

# GPUs: "Out of memory while trying to allocate 12.30GiB.", or "... 8589934592 bytes."; "Out of memory allocating 123
# bytes."; "Failed to allocate request for 2.0GiB (2147483648B) on device ordinal 0". TPUs, while they run: "Attempting
# to allocate 1.17G. That was not possible. There are 1.07G free."; when they load a program: "Attempting to reserve
# 2.99G at the bottom of memory."
_REQUESTS = (rf"allocate (?:request for )?{_SIZE}", rf"memory allocating {_SIZE}", rf"Attempting to reserve {_SIZE}")

# TPUs, when they compile: "Ran out of memory in memory space hbm. Used 19.33G of 15.48G hbm. Exceeded hbm capacity by
# 3.85G."; newer ones: "Ran out of memory on HBM, the total memory required for HLO temporaries (86.97G) exceeds
# available HBM (15.75G)."
_CAPACITIES = (rf"Used [0-9.,]+ ?[KMGTP]?(?:i?B)? of {_SIZE} hbm", rf"exceeds available HBM \({_SIZE}\)")


def _first_size(patterns: Iterable[str], text: str) -> int | None:
    match = next(filter(None, (re.search(pattern, text, re.IGNORECASE) for pattern in patterns)), None)
    return None if match is None else _bytes_of(match[1], match[2])


def _bytes_of(number: str, prefix: str) -> int:
    # XLA's "G" is 2**30, with and without an "i".
    power = " KMGTP".index(prefix.upper()) if prefix else 0
    return int(float(number.rstrip(".,").replace(",", "")) * 1024**power)


def _bytes_of_inputs(call: TracedCall) -> int:
    """Bytes in the memory of the first device of the arguments and states that exist."""
    device = current.local_device()
    memories = (None, device.default_memory().kind)  # not the host's, where offloaded arrays are
    arrays = {id(i.array): i.array for i in call.inputs if isinstance(i.array, jax.Array)}
    alive = [x for x in arrays.values() if not x.is_deleted() and x.sharding.memory_kind in memories]
    return sum(s.data.nbytes for x in alive for s in x.addressable_shards if s.device == device)
