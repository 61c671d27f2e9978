"""The tables and the picture of the pages on spiking networks, from the results of ``examples/spiking_deep.py`` and ``online_rules.py``.

``spiking_deep.json`` is ``results.json`` of the example.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _common import MIB

GREY, ORANGE, BLUE, RED, TEAL = "#6b7280", "#c96f1a", "#1f5f99", "#b03a48", "#0e7386"
# The ways of the example: label, color, and what is stored for the gradient.
WAYS = {
    "plain": ("plain", GREY, "every value of every step"),
    "remat": ("remat", ORANGE, "the input of each layer"),
    "bits": ("remat, inputs as bits", BLUE, "the input of each layer, as bits"),
    "slots": ("Slots({slots})", RED, "the states before a few chunks"),
    "all": (
        "Slots({slots}) and bits",
        TEAL,
        "the states before a few chunks; in the chunk that is reversed, the input of each layer, as bits",
    ),
}
Table = tuple[Sequence[str], list[list[str]]]


def label(results: dict[str, Any], way: str) -> str:
    return WAYS[way][0].format(**results["options"])


def relative_time(results: dict[str, Any], way: str) -> float:
    return results["runs"][way]["step_seconds"] / results["runs"]["plain"]["step_seconds"]


def table(results: dict[str, Any]) -> Table:
    """One row for each way."""
    memory = results["temporary_bytes"]
    columns = ["way", "stored for the gradient", *(f"{n:,} steps" for n in memory["steps"]), "of plain", "time"]
    rows = []
    for way, (_, _, stored) in WAYS.items():
        sizes = [f"{n / MIB:,.1f} MiB" for n in memory[way]]
        ratio = memory["plain"][-1] / memory[way][-1]
        time = f"{relative_time(results, way):.2f}"
        rows.append([label(results, way), stored, *sizes, "1" if way == "plain" else f"1/{ratio:,.0f}", time])
    return columns, rows


def summary(results: dict[str, Any]) -> str:
    """What the table shows, in words."""
    options, memory = results["options"], results["temporary_bytes"]
    plain, least, differences = memory["plain"], memory["all"], results["gradient_difference"]
    assert differences["slots"] == differences["all"] == 0, "as written below"
    return (
        f"{options['layers']} layers of {options['neurons']} neurons, batch {options['batch']}, chunks of {options['chunk']} steps, on a CPU with XLA's "
        f"default flags. Through {memory['steps'][-1]:,} steps the gradient takes {least[-1] / MIB:.1f} MiB instead of "
        f"{plain[-1] / MIB:,.0f} MiB. Gradients of all ways "
        f"differ by at most {max(differences.values()):.0e} of the largest entry, those with `Slots` not at all. After {options['updates']} training steps through "
        f"{options['steps']:,} time steps the network names the direction of {results['accuracy']:.1%} of new streams."
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
    """Draw memory over the number of steps, and memory against time."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, NullLocator

    figure = Figure(figsize=(9, 4.2), layout="constrained", facecolor="white")
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(1.25, 1))
    memory = results["temporary_bytes"]
    for way, (_, color, _) in WAYS.items():
        sizes = [n / MIB for n in memory[way]]
        left.plot(memory["steps"], sizes, "o-", color=color, lw=2, ms=5)
        left.annotate(
            label(results, way), (memory["steps"][-1], sizes[-1]), xytext=(8, 0), textcoords="offset points", color=color, va="center"
        )  # fmt: skip
        point = relative_time(results, way), sizes[0]
        right.scatter(*point, color=color, s=55, zorder=2)
        right.annotate(
            label(results, way), point, xytext=(9, 0), textcoords="offset points", color=color, va="center"
        )  # fmt: skip
    left.set(xscale="log", yscale="log", xlabel="time steps", ylabel="temporary memory of a training step, MiB")
    left.set_xticks(memory["steps"], [f"{n:,}" for n in memory["steps"]])
    left.xaxis.set_minor_locator(NullLocator())
    left.set_xlim(memory["steps"][0] / 1.3, memory["steps"][-1] * 6)
    left.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,g}"))
    left.set_title("Memory over the length of the stream", loc="left", fontsize=11, weight="bold")
    right.set_xlim(0, 1.6 * max(relative_time(results, way) for way in WAYS))
    right.set_xlabel("time of a training step, relative to plain")
    right.set_title(f"Memory against time, {memory['steps'][0]:,} steps", loc="left", fontsize=11, weight="bold")
    for axes in (left, right):
        axes.grid(color="#e5e7eb", zorder=0)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None})


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
