"""Two tables that others published, and the same work here: the gradient of a brain model with delays, and a spiking VGG.

Compared
    Gradients by ``examples/brain_delays.py`` with the table of tvboptim, "Gradient checkpointing for long DDE simulations" (CPU, float64), and
    training steps by ``examples/spiking_vgg.py`` with that of SpikingJelly's tutorial on memory optimization (RTX 4090). If tvboptim is
    installed, its connectome is used and its own solver takes part.

Measured
    XLA's temporary memory (``memory_analysis().temp_size_in_bytes``), and CPU time of the process: ways take turns, and ratios to the plain way
    of the same round are taken. tvboptim's page has the growth of the
    process instead. ``--target h100`` adds the VGG's memory on a GPU that is not there.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from _common import finish, start

EXAMPLES = Path(__file__).parents[1] / "examples"
MB = 10**6
Table = tuple[list[str], list[list[str]]]


def run_example(name: str, words: list[str]) -> dict[str, Any]:
    """Run an example in a process of its own; return its results."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, EXAMPLES / f"{name}.py", "--out", folder, *words], check=True)
        results = json.loads((Path(folder) / "results.json").read_text())
    del results["options"]["out"]
    for found in results["ways"].values():
        found["loss"] = f"{found['loss']:.13f}"  # all digits, which committed numbers do not have
    return results


def delays_table(results: dict[str, Any]) -> Table:
    """The page's rows, then those of this machine; time is relative to the plain gradient of the same library."""
    rows = [
        [f"tvboptim's page: {way}", f"{found['bytes'] / MB:.1f} MB", f"{found['time']:.2f}", ""]
        for way, found in results["published"].items()
    ]
    budget, ways = results["options"]["budget"], results["ways"]
    labels = {
        "coupling": '`Levels(1, policy=names("coupling"), keep="loop")`',
        "Levels(1)": "`Levels(1)`",
        "budget": f'`Budget("{budget:g}MB")`',
        "plain": "statetx: plain",
    }
    for way, found in ways.items():
        baseline = ways["tvboptim" if way.startswith("tvboptim") else "plain"]["cpu_seconds"]
        label = f"{way}, here" if way.startswith("tvboptim") else labels[way]
        pairs = zip(found["cpu_seconds"], baseline, strict=True)
        ratio, seconds = middle([a / b for a, b in pairs]), middle(found["cpu_seconds"])
        rows.append([label, f"{found['temporary_bytes'] / MB:.1f} MB", f"{ratio:.2f}", f"{seconds:.2f} s"])
    return ["gradient of G", "memory", "time of plain", "CPU time"], rows


def vgg_table(results: dict[str, Any]) -> Table:
    """The tutorial's rows, then those of this machine, and the memory on a GPU that is not there."""
    rows = [
        [f"SpikingJelly: {way}", f"{found['memory_mb']:,.0f} MB", f"{found['ratio']:.2f}", f"{found['time']:.2f}",
         f"{found['search_seconds']:.0f} s" if found["search_seconds"] else ""]
        for way, found in results["published"].items() if way not in ("safe", "balanced")
    ]  # fmt: skip
    labels = {
        "plain": "statetx, CPU: plain",
        "bits": "bits",
        "convolutions": "convolutions stored",
    }
    target = results["options"]["target"]
    for way, found in results["ways"].items():
        size, ratio = f"{found['temporary_bytes'] / MB:,.0f} MB", f"{found['temporary_ratio']:.2f}"
        rows.append([labels[way], size, ratio, f"{found['time']:.2f}", ""])
    for way, found in results["ways"].items() if target else ():
        label = f"{target.upper()}: plain" if way == "plain" else labels[way]
        rows.append([label, f"{found['target_bytes'] / MB:,.0f} MB", f"{found['target_ratio']:.2f}", "", ""])
    return ["training step", "memory", "of plain", "time of plain", "search"], rows


def conditions(data: dict[str, Any]) -> str:
    """What was measured, how far the gradients differ, and what is the same as on tvboptim's page."""
    delays, vgg = data["delays"], data["vgg"]
    steps = delays["options"]["scans"] * delays["options"]["period"]
    ours = [found for way, found in delays["ways"].items() if not way.startswith("tvboptim")]
    with_tvboptim = delays["options"]["connectome"] == "tvboptim"
    same = (
        f"Loss {ours[1]['loss']} and gradient {ours[1]['gradient']:.6e} are those of the page. "
        if with_tvboptim
        else ""
    )
    return (
        f"Measured by `python benchmarks/published.py --target h100` with tvboptim 0.4.0, {data['environment']['date']}. {steps:,} steps, "
        f"{delays['options']['regions']} regions, float64. {same}Gradients differ by "
        f"{max(found['gradient_difference'] for found in ours):.0e}, of the VGG by "
        f"{max(found['gradient_difference'] for found in vgg['ways'].values()):.0e}."
    )


def middle(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def figures_of(delays: dict[str, Any], vgg: dict[str, Any]) -> dict[str, float]:
    """What the limits are about."""
    found, kept = delays["ways"], vgg["ways"]["convolutions"]
    figures = {
        "delays: MB with the coupling stored": found["coupling"]["temporary_bytes"] / MB,
        "delays: time with the coupling stored, of plain": found["coupling"]["time"],
        "delays: MB of a budget of 32 MB": found["budget"]["temporary_bytes"] / MB,
        "vgg: memory, of plain": kept["temporary_ratio"],
        "vgg: time, of plain": kept["time"],
    }
    if "target_ratio" in kept:
        figures["vgg: memory on the GPU, of plain"] = kept["target_ratio"]
    return figures


def main() -> None:
    options, env = start(__doc__ or "", target={"help": "a GPU to compile for as well, such as h100"})
    words = ["--quick"] * options.quick + (["--rounds", str(options.rounds)] if options.rounds else [])
    has_tvboptim = importlib.util.find_spec("tvboptim") is not None and not options.quick
    delays = run_example("brain_delays", words + ["--connectome", "tvboptim"] * has_tvboptim)
    vgg = run_example("spiking_vgg", words + (["--target", options.target] if options.target else []))
    finish("published", options, env, figures_of(delays, vgg), delays=delays, vgg=vgg)


if __name__ == "__main__":
    main()
