"""A plan as a table and as a picture, and the rows and lines of its programs."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Sequence
from typing import Any

from ..._equations.flops import flops
from ..._extras import require
from ..._files import write_figure
from ..._jax import Jaxpr
from ..._lift.context import device_bytes
from ..._remat.survey import Site
from ..._tables import Cell, Column, Table
from ..._text import format_bytes, format_flops, format_seconds, short_path, type_str
from ...residuals._trace import user_line
from ...residuals.report import BASELINE
from ...residuals.table import see_profile
from .._budget import STEP
from .._program.flat import Part
from .._program.values import InFormat, Way, values_of
from .._treatments.loops import steps_of
from .._treatments.treatment import Decision
from .record import PlanRow, Result, parts_of

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


def table(plan: Result) -> Table:
    # Rows that differ in their number only, from parts of different structure, become one.
    totals: dict[PlanRow, int] = {}
    for row in plan.rows:
        if row.decision != "unchanged":
            key = dataclasses.replace(row, times=0)
            totals[key] = totals.get(key, 0) + row.times
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


def _title(plan: Result) -> str:
    name = f"{'' if plan.is_step else 'gradient of '}{plan.name}"
    extra = f"{100 * plan.extra_flops:+.1f}% operations"
    is_step = plan.of == STEP
    # The model knows choices that are near the plan, and the unplanned program badly.
    unplanned = format_bytes(_counted(plan, plan.unplanned_bytes)) if plan.unplanned_is_compiled else ""
    if is_step:
        without = f" (without a plan {unplanned})" if unplanned else ""
        return f"{name}: {format_bytes(plan.total_bytes)} of {format_bytes(plan.budget_bytes)}{without}, {extra}"
    without = f", without a plan {unplanned}" if unplanned else ""
    return (
        f"{name}: {format_bytes(plan.temp_bytes)} of temporary memory (predicted {format_bytes(plan.predicted_bytes)}, "
        f"budget {format_bytes(plan.budget_bytes)}{without}), {extra}"
    )


def _notes(plan: Result) -> Iterator[str]:
    yield (
        f"Arguments {format_bytes(plan.argument_bytes)}, outputs {format_bytes(plan.output_bytes)}"
        f"{f' ({format_bytes(plan.alias_bytes)} of them in place of donated arguments)' if plan.alias_bytes else ''}, "
        f"temporaries {format_bytes(plan.temp_bytes)} (predicted {format_bytes(plan.predicted_bytes)})."
    )
    if plan.num_devices > 1:
        yield f"Values have the bytes of all {plan.num_devices} devices, other sizes are those of one."
    yield from plan.groups[:_MAX_GROUPS]
    if len(plan.groups) > _MAX_GROUPS:
        yield f"And {len(plan.groups) - _MAX_GROUPS} more kinds of regions."
    yield from plan.loops
    others = [*_stock_texts(plan)]
    if others:
        predicted = " (~: predicted, not compiled)" if any("~" in text for text in others) else ""
        yield f"Compared with: {', '.join(others)}{predicted}."
    if plan.is_sequential:
        yield "The gradients of the step are computed one after the other."
    if plan.inner is not None:
        yield f"Gradients inside of the loss: {plan.inner}."
    if plan.stock:
        unchanged = "It fits unchanged."
        if plan.extra_flops > 0:  # of what plans leave
            unchanged = (
                "It fits without the rematerialized functions. Those inside of branches and of inner loops stay."
            )
        yield f"This is the stock policy {plan.stock!r}." if plan.stock != BASELINE else unchanged
    if plan.seconds is not None:
        yield f"Time: {format_seconds(plan.seconds)}, the fastest of {len(plan.timed())}."
    if not plan.complete:
        yield "The time limit ended the search; this is the best plan so far."


def _stock_texts(plan: Result) -> Iterator[str]:
    """The baseline, if it was compiled, and the stock policies: what they take and cost."""
    measured: dict[str, tuple[int, float]] = {}
    for name, temp_bytes, extra in plan.measured():
        if name != "plan":  # a stock policy may have been compiled for several cuts: the smallest counts
            measured[name] = min(measured.get(name, (temp_bytes, extra)), (temp_bytes, extra))
    rows = [(name, temp_bytes, extra, False) for name, (temp_bytes, extra) in measured.items()]
    # The model knows the unplanned program badly, and `everything` is nearly that.
    rows += [row for row in plan.stock_policies() if row[0] not in measured and (row[0] != "everything" or not row[3])]
    for name, temp_bytes, extra, is_predicted in rows:
        mark = "~" if is_predicted else ""
        yield f"{name} {mark}{format_bytes(_counted(plan, temp_bytes))} {mark}{100 * extra:+.1f}%"


def _counted(plan: Result, temp_bytes: int) -> int:
    """What the budget counts of a program with these temporaries."""
    return temp_bytes + (plan.fixed_bytes if plan.of == STEP else 0)


def plot(plan: Result, path: str | os.PathLike | None) -> Any:
    require("matplotlib.figure", "plot")
    from matplotlib.figure import Figure

    # Not by pyplot, which holds every figure until it is closed.
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    mib = 2.0**20
    at = lambda temp_bytes: _counted(plan, temp_bytes) / mib

    curve = plan.curve()
    axes.plot([at(b) for b, _ in curve], [100 * x for _, x in curve], color="#0072b2", label="model", zorder=1)
    plans = [(b, x) for n, b, x in plan.measured() if n == "plan"]
    axes.scatter([at(b) for b, _ in plans], [100 * x for _, x in plans], s=22, color="#0072b2", label="plans, compiled")
    for n, b, x in plan.measured():
        if n != "plan":
            axes.scatter([at(b)], [100 * x], marker="D", s=30, color="#e69f00")
            axes.annotate(n, (at(b), 100 * x), textcoords="offset points", xytext=(6, 5), fontsize=8)

    this = (at(plan.temp_bytes), 100 * plan.extra_flops)
    axes.scatter(*([x] for x in this), s=90, facecolors="none", edgecolors="#d55e00", linewidths=2)
    axes.annotate("this plan", this, textcoords="offset points", xytext=(8, 8), color="#d55e00")

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


def described(program: Jaxpr, fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of one gradient, a flat program, with those that print it: a row for each value, and the loops and
    groups of regions.
    """
    _, parts, decisions = parts_of(program, fields)
    return fields | {
        "rows": [dataclasses.asdict(row) for row in _rows(parts, decisions)],
        "loops": [line for p, d in zip(parts, decisions, strict=True) for t in d.treatments if (line := t.line(p))],
        "groups": list(_groups(parts, decisions)),
    }


def _rows(parts: Sequence[Part], decisions: Sequence[Decision]) -> list[PlanRow]:
    # Equal parts with equal decisions have equal rows: list them once, with their number.
    counts: dict[Any, list[Any]] = {}
    for part, decision in zip(parts, decisions, strict=True):
        key = (part.key, decision)
        counts.setdefault(key, [part, decision, 0])[2] += 1
    rows = []
    for part, decision, times in counts.values():
        length = part.eqn.params["length"] if part.eqn is not None else 1
        for number, step in steps_of(decision, length):
            rows += _rows_of(part, step, times * number)
    return sorted(rows, key=PlanRow.rank)


def _rows_of(part: Part, decision: Decision, times: int) -> Iterator[PlanRow]:
    ways = dict(decision.saved or ())
    for address, site in values_of(part.jaxpr).sites.items():
        if decision.is_unchanged:
            what = "unchanged"
        else:
            what = _verb(ways[address]) if address in ways else "recompute"

        file, line, function = user_line(site.eqn)
        names = ", ".join(sorted(site.value.names))
        type_text = type_str(site.value.type, weak=False)
        owner = f"{short_path(file)}:{line} ({function})" if file else ""
        value = f"{names or site.eqn.primitive.name} {type_text}"
        yield PlanRow(value, owner, times, device_bytes(site.value.type), what, float(flops(site.eqn)))


def _verb(way: Way) -> str:
    return f"keep as {way.name}" if isinstance(way, InFormat) else way.name


def _groups(parts: Sequence[Part], decisions: Sequence[Decision]) -> Iterator[str]:
    """Neighboring parts of equal structure, from the first to the last layer: which of them keep what."""
    layers: list[tuple[Part, list[Decision]]] = []
    structures: dict[Any, list[Decision]] = {}
    for part, decision in zip(parts, decisions, strict=True):
        if decision.is_unchanged:
            continue
        if part.key not in structures:
            structures[part.key] = []
            layers.append((part, structures[part.key]))
        structures[part.key].append(decision)

    for part, same in layers:
        # The same decision for a run of them is one line's worth of text.
        runs: list[tuple[Decision, int]] = []
        for decision in same:
            if runs and runs[-1][0] == decision:
                runs[-1] = (decision, runs[-1][1] + 1)
            else:
                runs.append((decision, 1))
        if len(same) > 1:
            yield f"{len(same)} equal regions{_place(part)}: {_runs_text(part, runs)}"
        else:
            yield f"A region of {len(part.jaxpr.eqns)} equations{_place(part)}: {_kept_text(part, same[0])}"


def _place(part: Part) -> str:
    for eqn in part.jaxpr.eqns:
        file, line, function = user_line(eqn)
        if file:
            return f" from {short_path(file)}:{line} ({function})"
    return ""


def _runs_text(part: Part, runs: Sequence[tuple[Decision, int]]) -> str:
    texts, number = [], 1
    for decision, times in runs:
        numbers = f"{number}" if times == 1 else f"{number}-{number + times - 1}"
        texts.append(f"{numbers} {_kept_text(part, decision)}")
        number += times
    return "; ".join(texts)


def _kept_text(part: Part, decision: Decision) -> str:
    return _saved_text(part, decision) + "".join(treatment.text(part) for treatment in decision.treatments)


def _saved_text(part: Part, decision: Decision) -> str:
    ways, sites = dict(decision.saved or ()), values_of(part.jaxpr).sites
    saved = [site for address, site in sites.items() if address in ways]
    if not saved:
        return "keep nothing"
    size = lambda site: device_bytes(site.value.type)

    def held_bytes(site: Site) -> int:
        way = ways[site.address]
        return way.num_bytes(site.value.type) if isinstance(way, InFormat) else size(site)

    kept_bytes = sum(map(held_bytes, saved))
    # Means, and other values of a sixteenth of the largest one's size and below, tell nothing.
    least = max(map(size, sites.values())) / 16
    saved = [site for site in saved if size(site) > least]
    if not saved:
        return f"keep small values ({format_bytes(kept_bytes)})"
    names = []
    for site in saved:
        way = ways[site.address]
        format = f" as {way.name}" if isinstance(way, InFormat) else ""
        names.append(f"{', '.join(sorted(site.value.names)) or site.eqn.primitive.name}{format}")
    counts = {n: names.count(n) for n in dict.fromkeys(names)}
    text = ", ".join(n if c == 1 else f"{c} {n}" for n, c in counts.items())
    return f"keep {text} ({format_bytes(kept_bytes)})"
