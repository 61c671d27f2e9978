"""The tables and the picture of the pages on spiking networks, from the results of ``examples/spiking_deep.py`` and ``online_rules.py``.

``spiking_deep.json`` is ``results.json`` of the example.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _common import MIB

GREY, ORANGE, BLUE, RED, PURPLE, TEAL = "#6b7280", "#c96f1a", "#1f5f99", "#b03a48", "#7a4fa3", "#0e7386"
# The ways of the example: label, color, and what is stored for the gradient.
WAYS = {
    "plain": ("plain", GREY, "every value of every step"),
    "remat": ("remat", ORANGE, "the input of each layer"),
    "bits": ("remat, inputs as bits", BLUE, "the input of each layer, as bits"),
    "slots": ("Slots({slots})", RED, "the states before a few chunks"),
    "mixed": (
        "mixed Slots({slots}), remat",
        PURPLE,
        "the states before a few chunks; in free slots and in the chunk that is reversed, the input of each layer",
    ),
    "all": ("mixed Slots({slots}), bits", TEAL, "the same, inputs as bits"),
}
Table = tuple[Sequence[str], list[list[str]]]


def label(results: dict[str, Any], way: str) -> str:
    return WAYS[way][0].format(**results["options"])


def relative_time(results: dict[str, Any], way: str) -> float:
    return results["runs"][way]["step_seconds"] / results["runs"]["plain"]["step_seconds"]


def table(results: dict[str, Any]) -> Table:
    """One row for each way."""
    memory = results["temporary_bytes"]
    columns = [
        "way",
        "stored for the gradient",
        *(f"{n:,} steps" for n in memory["steps"]),
        "of plain",
        "runs of a chunk",
        "time",
    ]
    rows = []
    for way, (_, _, stored) in WAYS.items():
        sizes = [f"{n / MIB:,.1f} MiB" for n in memory[way]]
        ratio = memory["plain"][-1] / memory[way][-1]
        time = f"{relative_time(results, way):.2f}"
        runs = ", ".join(f"{row['runs']:.2f}" for row in results["loops"].get(way, []))
        rows.append([label(results, way), stored, *sizes, "1" if way == "plain" else f"1/{ratio:,.0f}", runs, time])
    return columns, rows


def summary(results: dict[str, Any]) -> str:
    """What the table shows, in words."""
    options, memory = results["options"], results["temporary_bytes"]
    plain, least, differences = memory["plain"], memory["all"], results["gradient_difference"]
    slots, mixed, both = (results["loops"][way][-1] for way in ("slots", "mixed", "all"))
    assert differences["slots"] == differences["mixed"] == differences["all"] == 0, "as written below"
    assert not slots["is_mixed"] and mixed["is_mixed"] and both["is_mixed"], "as written below"

    def kept(row: dict[str, Any]) -> str:
        return f"{row['residual_bytes'] / 2**10:,.0f} KiB"

    return (
        f"{options['layers']} layers of {options['neurons']} neurons, batch {options['batch']}, chunks of {options['chunk']} steps, on a CPU with XLA's "
        f"default flags. Through {memory['steps'][-1]:,} steps the gradient takes {least[-1] / MIB:.1f} MiB instead of "
        f"{plain[-1] / MIB:,.0f} MiB. Gradients of all ways "
        f"differ by at most {max(differences.values()):.0e} of the largest entry, those with `Slots` not at all. After {options['updates']} training steps through "
        f"{options['steps']:,} time steps the network names the direction of {results['accuracy']:.1%} of new streams.\n\n"
        f"The states before a chunk are {slots['carry_bytes'] / 2**10:,.0f} KiB. A chunk of unchanged layers keeps {kept(slots)}, too much for slots, which hold "
        f"states only: each chunk runs {slots['runs']:.2f} times at the greatest length. Of rematerialized layers it keeps {kept(mixed)}, and {kept(both)} with inputs as bits. "
        f"Free slots hold that, and each chunk runs {mixed['runs']:.2f} and {both['runs']:.2f} times."
    )


def short(results: dict[str, Any]) -> str:
    """Memory at the least and the greatest length, in one sentence."""
    memory = results["temporary_bytes"]
    steps = memory["steps"]
    parts = [f"{label(results, way)} {memory[way][0] / MIB:,.1f} and {memory[way][-1] / MIB:,.1f} MiB" for way in WAYS]
    return (
        f"Through {steps[0]:,} and {steps[-1]:,} steps, a training step of the network above takes: {'; '.join(parts)}."
    )


def picture(results: dict[str, Any], path: Path) -> None:
    """Draw memory and runs over the number of steps, and memory against time."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    figure = Figure(figsize=(13, 4.2), layout="constrained", facecolor="white")
    over, again, against = figure.subplots(1, 3, width_ratios=(1.15, 0.95, 1.1))
    memory = results["temporary_bytes"]
    sizes = {way: [n / MIB for n in memory[way]] for way in WAYS}
    over.set(yscale="log", ylabel="temporary memory of a training step, MiB")
    _plot_over_steps(over, results, sizes, {way: label(results, way) for way in WAYS})
    over.set_title("Memory over the length of the stream", loc="left", fontsize=11, weight="bold")
    runs = {way: [row["runs"] for row in rows] for way, rows in results["loops"].items()}
    again.set(ylim=(1, 1.05 * max(map(max, runs.values()))), ylabel="runs of a chunk")
    _plot_over_steps(again, results, runs, {way: way for way in runs})
    again.set_title(f"Runs with {results['options']['slots']} slots", loc="left", fontsize=11, weight="bold")

    points = {way: (relative_time(results, way), sizes[way][0]) for way in WAYS}
    for way, (time, size) in points.items():
        against.scatter(time, size, color=WAYS[way][1], s=55, zorder=2)
        # On the side where no other way of about the same memory is.
        is_left = any(time < t and 2 / 3 < size / n < 3 / 2 for t, n in points.values())
        offset, side = ((-9, 0), "right") if is_left else ((9, 0), "left")
        text: dict[str, Any] = {"textcoords": "offset points", "color": WAYS[way][1], "va": "center", "ha": side}
        against.annotate(way, (time, size), xytext=offset, **text)
    against.set(yscale="log", xlabel="time of a training step, relative to plain", ylabel="temporary memory, MiB")
    against.set_xlim(0, 1.25 * max(time for time, _ in points.values()))
    against.set_title(f"Memory against time, {memory['steps'][0]:,} steps", loc="left", fontsize=11, weight="bold")
    for axes in (over, against):
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,g}"))
    for axes in (over, again, against):
        axes.grid(color="#e5e7eb", zorder=0)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None})


def _plot_over_steps(axes: Any, results: dict[str, Any], lines: dict[str, list[float]], names: dict[str, str]) -> None:
    """Draw a line for each way, with its name at the end, where names that would overlap are moved apart."""
    from matplotlib.ticker import NullLocator

    steps = results["temporary_bytes"]["steps"]
    for way, values in lines.items():
        axes.plot(steps, values, "o-", color=WAYS[way][1], lw=2, ms=5)
    axes.set(xscale="log", xlabel="time steps")
    axes.set_xticks(steps, [f"{n:,}" for n in steps])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_ylim(axes.get_ylim())
    to_fraction = axes.transScale + axes.transLimits
    heights = {way: to_fraction.transform((steps[-1], values[-1]))[1] for way, values in lines.items()}
    lowest = 0.0
    for way in sorted(reversed(heights), key=heights.__getitem__):
        lowest = max(lowest, heights[way])
        axes.annotate(names[way], (1.01, lowest), xycoords="axes fraction", color=WAYS[way][1], va="center")
        lowest += 0.055  # of the height, a line of text


# -- online rules --------------------------------------------------------------------------------------------------


def online_table(results: dict[str, Any]) -> Table:
    """One row for each number of steps and gradient: cosines with the exact gradient, memory and time."""
    first = next(iter(results.values()))
    names = [name for name, value in first.items() if isinstance(value, dict)]
    layers = range(1, 1 + len(first[names[0]]["cosine"]))
    columns = ["steps", "gradient", *(f"cosine, layer {i}" for i in layers), "temporary memory", "CPU time"]
    rows = []
    for steps, result in results.items():
        for name in names:
            own = result[name]
            cosines = ["1" if name == "exact" else f"{c:.2f}" for c in own["cosine"]]
            size, time = f"{own['bytes'] / MIB:.2f} MiB", f"{own['cpu_ratio']['median']:.2f}"
            rows.append([f"{int(steps):,}", name, *cosines, size, time])
    return columns, rows


def online_summary(results: dict[str, Any]) -> str:
    difference = max(result["difference"] for result in results.values())
    close = f"to {difference:.0e} of its largest entry" if difference else "bit for bit"
    plain = [f"{result['plain_bytes'] / MIB:.1f} MiB" for result in results.values()]
    return (
        f"The exact gradient is that of a plain scan, {close}; plain scans take "
        f"{', '.join(plain[:-1])} and {plain[-1]}."
    )
