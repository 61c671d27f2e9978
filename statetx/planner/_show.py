# pyright: reportUnknownMemberType=false
"""A plan as people see it: table, picture, lines of its programs."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import os
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

from .._environment import require
from .._equations.primitives import flops
from .._files import write_figure
from .._jax import Eqn, Jaxpr
from .._lift.context import device_bytes
from .._remat.survey import Site
from .._tables import Cell, Column, Table
from .._text import format_bytes, format_flops, format_seconds, short_path, type_str
from ..residuals._trace import user_line
from ..residuals.diagnosis import BASELINE
from ..residuals.table import see_profile
from ._budget import STEP
from ._program.flat import Part
from ._program.values import InFormat, Way, values_of
from ._record import GradientPlan, PlanData, PlanRow, Shown
from ._treatments.treatment import Decision

_MAX_ROWS = 16  # of the printed table
_MAX_GROUPS = 6
_COLUMNS = (
    Column("value", code=True),
    Column("owner", rank=1),
    Column("times", "right", rank=1),
    Column("bytes", "right"),
    Column("decision", style="bold"),
    Column("cost", "right", rank=2),
)
_COLORS = {"keep": "green", "offload": "cyan", "recompute": "yellow"}


def table(plan: PlanData) -> Table:
    # Rows that differ in their number only, from parts of different structure, become one.
    totals: collections.Counter[PlanRow] = collections.Counter()
    for row in plan.rows:
        if row.decision != "unchanged":
            totals[dataclasses.replace(row, times=0)] += row.times
    planned = [dataclasses.replace(row, times=times) for row, times in totals.items()]

    # Rows below half a percent of the baseline's memory tell nothing.
    large = [row for row in planned if 200 * row.bytes * row.times >= plan.unplanned_bytes][:_MAX_ROWS]
    most = max((r.bytes * r.times for r in large), default=1)
    rows = [
        [
            Cell(r.value),
            Cell(r.owner),
            Cell(str(r.times)),
            Cell(format_bytes(r.bytes), _color(r.decision), share=r.bytes * r.times / max(most, 1)),
            Cell(r.decision, _color(r.decision)),
            Cell(format_flops(int(r.price))),
        ]
        for r in large
    ]
    notes = [f"and {len(planned) - len(large)} more"] if len(planned) > len(large) else []
    notes += _notes(plan)
    return Table(_title(plan), _COLUMNS, rows, [*((text, "") for text in notes), see_profile("plan.apply(fun)")])


def _color(decision: str) -> str:
    return _COLORS.get(decision.split(" as ")[0], "")


def _title(plan: PlanData) -> str:
    if plan.of == STEP:
        taken, notes = f"{format_bytes(plan.total_bytes)} of {format_bytes(plan.budget_bytes)}", []
    else:
        taken = f"{format_bytes(plan.temp_bytes)} of temporary memory"
        notes = [f"predicted {format_bytes(plan.predicted_bytes)}", f"budget {format_bytes(plan.budget_bytes)}"]
    # The model knows choices that are near the plan, and the unplanned program badly.
    if plan.unplanned_is_compiled:
        notes.append(f"without rematerialization {format_bytes(_counted(plan, plan.unplanned_bytes))}")
    name = f"{'' if plan.is_step else 'gradient of '}{plan.name}"
    in_brackets = f" ({', '.join(notes)})" if notes else ""
    time = "" if plan.seconds is None else f", {format_seconds(plan.seconds)}"
    return f"{name}: {taken}{in_brackets}, {100 * plan.extra_flops:+.1f}% operations{time}"


def _notes(plan: PlanData) -> Iterator[str]:
    yield (
        f"Arguments {format_bytes(plan.argument_bytes)}, outputs {format_bytes(plan.output_bytes)}"
        f"{f' ({format_bytes(plan.alias_bytes)} of them in place of donated arguments)' if plan.alias_bytes else ''}, "
        f"temporaries {format_bytes(plan.temp_bytes)} (predicted {format_bytes(plan.predicted_bytes)})."
    )
    if plan.num_devices > 1:
        yield f"Values have the bytes of all {plan.num_devices} devices, other sizes are of one."
    yield from plan.groups[:_MAX_GROUPS]
    if len(plan.groups) > _MAX_GROUPS:
        yield f"And {len(plan.groups) - _MAX_GROUPS} more kinds of regions."
    yield from plan.loops
    yield from (f"Updates in the backward pass: {line}" for line in plan.released)
    stock_texts = [*_stock_texts(plan)]
    if stock_texts:
        predicted = " (~: predicted, not compiled)" if any("~" in text for text in stock_texts) else ""
        yield f"Compared with: {', '.join(stock_texts)}{predicted}."
    if plan.is_sequential:
        yield "The gradients of the step are computed one after the other."
    if plan.inner is not None:
        yield f"Gradients inside of the loss: {plan.inner}."
    if plan.stock == BASELINE and plan.extra_flops > 0:  # of what plans leave
        yield "It fits without the rematerialized functions. Those inside of branches and of inner loops stay."
    elif plan.stock:
        unchanged = "It fits without rematerialization." if plan.released else "It fits unchanged."
        yield unchanged if plan.stock == BASELINE else f"This is the stock policy {plan.stock!r}."
    if plan.seconds is not None:
        num = sum(_counted(plan, num_bytes) <= plan.budget_bytes for _, num_bytes, _ in plan.timed)
        among = "" if plan.objective == "flops" else f", the fastest of {num} within the budget"
        yield f"{'Time' if plan.objective == 'time' else 'Estimated time'}: {format_seconds(plan.seconds)}{among}."
    if not plan.complete:
        yield "The time limit ended the search; this is the best plan so far."


def _stock_texts(plan: PlanData) -> Iterator[str]:
    """Bytes, cost and time of the baseline, if it was compiled, and of the stock policies."""
    times = {(name, temp_bytes): f" {format_seconds(seconds)}" for name, temp_bytes, seconds in plan.timed}
    rows: dict[str, tuple[int, float, str]] = {}
    for name, temp_bytes, extra in plan.measured:
        if name != "plan":  # a stock policy may have been compiled for several cuts: the smallest counts
            rows[name] = min(rows.get(name, (temp_bytes, extra, "")), (temp_bytes, extra, ""))
    for name, temp_bytes, extra, is_predicted in plan.stock_policies:
        # The model knows the unplanned program badly, and `everything` is nearly that.
        if not is_predicted or name != "everything":
            rows.setdefault(name, (temp_bytes, extra, "~" if is_predicted else ""))
    for name, (temp_bytes, extra, mark) in rows.items():
        time = times.get((name, temp_bytes), "")
        yield f"{name} {mark}{format_bytes(_counted(plan, temp_bytes))} {mark}{100 * extra:+.1f}%{time}"


def _counted(plan: PlanData, temp_bytes: int) -> int:
    """Bytes that the budget counts of a program with these temporaries."""
    return temp_bytes + (plan.fixed_bytes if plan.of == STEP else 0)


def plot(plan: PlanData, path: str | os.PathLike[str] | None) -> Any:
    require("matplotlib.figure", "plot")
    from matplotlib.figure import Figure

    # Not by pyplot, which holds every figure until it is closed.
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    mib = 2.0**20

    def coordinates(points: Sequence[Sequence[float]]) -> tuple[list[float], list[float]]:
        return [_counted(plan, int(b)) / mib for b, _ in points], [100 * x for _, x in points]

    def annotate(text: str, point: Sequence[float], **options: Any) -> None:
        (x,), (y,) = coordinates([point])
        axes.annotate(text, (x, y), textcoords="offset points", xytext=(7, 6), **options)

    axes.plot(*coordinates(plan.curve), color="#0072b2", label="model", zorder=1)
    plans, other_rows = ([row for row in plan.measured if (row[0] == "plan") is is_plan] for is_plan in (True, False))
    axes.scatter(*coordinates([point for _, *point in plans]), s=22, color="#0072b2", label="plans, compiled")
    axes.scatter(*coordinates([point for _, *point in other_rows]), marker="D", s=30, color="#e69f00")
    for name, *point in other_rows:
        annotate(name, point, fontsize=8)
    this = plan.temp_bytes, plan.extra_flops
    axes.scatter(*coordinates([this]), s=90, facecolors="none", edgecolors="#d55e00", linewidths=2)
    annotate("this plan", this, color="#d55e00")

    axes.axvline(plan.budget_bytes / mib, color="#999999", linestyle="--", linewidth=1, label="budget")
    axes.set_xlabel(f"{'memory' if plan.of == STEP else 'temporary memory'}, MiB")
    axes.set_ylabel("added operations, %")
    axes.set_title(f"{plan.name}: operations over memory", loc="left", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_ylim(bottom=-1)
    axes.legend(frameon=False, fontsize=8)
    if path is not None:
        write_figure(path, figure)
    return figure


# -- the rows and lines of a program --------------------------------------------------------------------------------


def described(programs: Sequence[Jaxpr], gradients: Sequence[GradientPlan]) -> Shown:
    """Rows and lines that print a plan: a row for each value, and lines for its loops and groups of regions.

    Args:
        programs: the flat gradients.
        gradients: the plan of each.
    """
    rows: list[PlanRow] = []
    loops: list[str] = []
    groups: list[str] = []
    for program, gradient in zip(programs, gradients, strict=True):
        _, parts, decisions = gradient.split(program)
        pairs = list(zip(parts, decisions, strict=True))
        # Equal parts with equal decisions have equal rows: list them once, with their number.
        ranges: dict[tuple[Hashable, Decision], list[Part]] = collections.defaultdict(list)
        for part, decision in pairs:
            ranges[part.key, decision].append(part)
        for (_, decision), equal in ranges.items():
            rows += _rows(equal[0], decision, len(equal))
        loops += [line for part, decision in pairs for t in decision.treatments if (line := t.line(part))]
        groups += _groups(pairs)
    return Shown(tuple(rows), tuple(groups), tuple(loops))


def _rows(part: Part, decision: Decision, times: int) -> Iterator[PlanRow]:
    length = part.eqn.params["length"] if part.eqn is not None else 1
    for number, step in decision.steps(length):
        ways = dict(step.saved or ())
        for address, site in values_of(part.jaxpr).sites.items():
            what = _verb(ways[address]) if address in ways else "unchanged" if step.is_unchanged else "recompute"
            value = f"{_name(site)} {type_str(site.value.type, weak=False)}"
            num_bytes, price = device_bytes(site.value.type), float(flops(site.eqn))
            yield PlanRow(value, _origin(site.eqn), times * number, num_bytes, what, price)


def _verb(way: Way) -> str:
    return f"keep as {way.name}" if isinstance(way, InFormat) else way.name


def _name(site: Site) -> str:
    return ", ".join(sorted(site.value.names)) or site.eqn.primitive.name


def _groups(pairs: Sequence[tuple[Part, Decision]]) -> Iterator[str]:
    """Neighboring parts of equal structure, from the first to the last layer: which of them keep what."""
    layers: dict[Hashable, tuple[Part, list[Decision]]] = {}
    for part, decision in pairs:
        if not decision.is_unchanged:
            layers.setdefault(part.key, (part, []))[1].append(decision)
    for part, decisions in layers.values():
        place = next((f" from {origin}" for eqn in part.jaxpr.eqns if (origin := _origin(eqn))), "")
        if len(decisions) == 1:
            yield f"A region of {len(part.jaxpr.eqns)} equations{place}: {_kept_text(part, decisions[0])}"
            continue
        # The same decision for a run of them is one line's worth of text.
        first, texts = 1, list[str]()
        for decision, equal_decisions in itertools.groupby(decisions):
            last = first + len(list(equal_decisions)) - 1
            texts.append(f"{first if first == last else f'{first}-{last}'} {_kept_text(part, decision)}")
            first = last + 1
        yield f"{len(decisions)} equal regions{place}: {'; '.join(texts)}"


def _origin(eqn: Eqn) -> str:
    file, line, function = user_line(eqn)
    return f"{short_path(file)}:{line} ({function})" if file else ""


def _kept_text(part: Part, decision: Decision) -> str:
    text, inputs = _saved_text(part, decision), decision.inputs
    if not inputs:
        return text
    names = ", ".join(dict.fromkeys(way.name for way in inputs.values()))
    stored = sum(way.num_bytes(part.jaxpr.invars[i].aval) for i, way in inputs.items())
    what = "the input" if len(inputs) == 1 else f"{len(inputs)} inputs"
    return f"{text}, {what} as {names} ({format_bytes(stored)})"


def _saved_text(part: Part, decision: Decision) -> str:
    ways, sites = dict(decision.saved or ()), values_of(part.jaxpr).sites
    saved = [(site, ways[address]) for address, site in sites.items() if address in ways]
    if not saved:
        return "keep nothing"
    size: Callable[[Site], int] = lambda site: device_bytes(site.value.type)
    kept_bytes = sum(w.num_bytes(s.value.type) if isinstance(w, InFormat) else size(s) for s, w in saved)
    # Means, and other values of a sixteenth of the largest one's size and below, tell nothing.
    least = max(map(size, sites.values())) / 16
    names = collections.Counter(
        f"{_name(site)}{f' as {way.name}' if isinstance(way, InFormat) else ''}"
        for site, way in saved
        if size(site) > least
    )
    text = ", ".join(name if number == 1 else f"{number} {name}" for name, number in names.items())
    return f"keep {text or 'small values'} ({format_bytes(kept_bytes)})"
