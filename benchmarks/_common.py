"""Shared by the benchmarks: interleaved timing, the environment, tables, and output of results."""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import os
import platform
import random
import re
import statistics
import sys
import time
import tomllib
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

from statetx._tables import Cell, Column, Table

MIB = 2**20


def start(doc: str, **more: Any) -> tuple[argparse.Namespace, dict[str, Any]]:
    """The options of `parse_args`, and the `environment`, which is printed."""
    options, env = parse_args(doc, **more), environment()
    print(header(env))
    return options, env


def parse_args(doc: str, **more: Any) -> argparse.Namespace:
    """Parse the options that all benchmarks share, and `more`."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smoke test: few repeats, small sizes")
    parser.add_argument(
        "--rounds", type=int, metavar="N", help="interleaved rounds, in place of the benchmark's own number"
    )
    parser.add_argument("--json", type=Path, metavar="OUT", help="write results and samples to OUT")
    for flag, options in more.items():
        parser.add_argument(f"--{flag}", **options)
    return parser.parse_args()


# -- timing ---------------------------------------------------------------------------------------------

Sample = dict[str, float]  # seconds by what they were spent on


class Stopwatch:
    """Wall-clock and CPU seconds of this process since the stopwatch was made.

    CPU time does not grow while the process waits for a core that other jobs use, so on a shared machine it varies less.
    """

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def read(self) -> Sample:
        cpu, wall = time.process_time(), time.perf_counter()
        return {"wall": wall - self._wall, "cpu": cpu - self._cpu}


def interleave(
    implementations: dict[str, Callable[[], Sample]], rounds: int, warmup: int = 1
) -> dict[str, list[Sample]]:
    """Take one sample of each implementation a round, in a new random order each round (with a fixed seed).

    A disturbance of the machine then hits all of them, so ratios within a round stay meaningful, and no implementation
    always runs after the same other one. Garbage is collected between rounds and not during them.
    """
    names = list(implementations)
    shuffle = random.Random(0)
    samples: dict[str, list[Sample]] = {name: [] for name in names}
    for n in range(-warmup, rounds):
        order = shuffle.sample(names, len(names))
        gc.collect()
        gc.disable()
        try:
            for name in order:
                sample = implementations[name]()
                if n >= 0:
                    samples[name].append(sample)
        finally:
            gc.enable()
        if sys.stderr.isatty():
            print(f"\rround {max(n + 1, 0)} of {rounds} ", end="", file=sys.stderr, flush=True)
    if sys.stderr.isatty():
        print("\r" + " " * 30 + "\r", end="", file=sys.stderr, flush=True)
    return samples


def timed(call: Callable[..., Any], *args: Any) -> Callable[[], Sample]:
    """An implementation for `interleave`: the call, until its result is there."""

    def sample() -> Sample:
        watch = Stopwatch()
        jax.block_until_ready(call(*args))
        return watch.read()

    return sample


def memory_and_time(compiled: dict[str, Any], args: Sequence[Any], baseline: str, rounds: int) -> dict[str, Any]:
    """For each compiled program its temporary bytes, its samples, and their `summaries` relative to the baseline."""
    samples = interleave({name: timed(run, *args) for name, run in compiled.items()}, rounds)
    return {
        name: {
            "temp_bytes": run.memory_analysis().temp_size_in_bytes,
            **summaries(samples[name], samples[baseline]),
            "samples": samples[name],
        }
        for name, run in compiled.items()
    }


def summary(values: Sequence[float]) -> dict[str, float]:
    """Minimum, quartiles and median."""
    low, mid, high = statistics.quantiles(values, n=4) if len(values) > 1 else [values[0]] * 3
    return {"min": min(values), "q1": low, "median": mid, "q3": high, "n": len(values)}


def summaries(samples: Sequence[Sample], baseline: Sequence[Sample]) -> dict[str, dict[str, float]]:
    """The `summary` of each quantity, and of its ratios to the baseline within a round if the baseline has it.

    The summary of ratios also holds ``of_min``, the ratio of the two minima.
    """
    result = {}
    for quantity in samples[0]:
        values = [s[quantity] for s in samples]
        result[quantity] = summary(values)
        if quantity in baseline[0]:
            baseline_values = [s[quantity] for s in baseline]
            paired = summary([a / b for a, b in zip(values, baseline_values, strict=True)])
            result[f"{quantity}_ratio"] = {**paired, "of_min": min(values) / min(baseline_values)}
    return result


def judge(benchmark: str, figures: dict[str, Any], *, quick: bool = False) -> list[str]:
    """Compare figures with the limits in ``limits.toml``; return a line for each figure.

    Args:
        figures: by name; a number, or a `summary` of ratios, whose median counts.
        quick: whether this was a smoke test, whose figures mean little.
    """
    limits = tomllib.loads((Path(__file__).parent / "limits.toml").read_text()).get(benchmark, {})
    lines = []
    for name, figure in figures.items():
        number = figure["median"] if isinstance(figure, dict) else figure
        low, high = (figure["q1"], figure["q3"]) if isinstance(figure, dict) else (number, number)
        middle = f" (middle half {low:.2f} to {high:.2f})" if low != high else ""
        line = f"{name}: {number:.2f}{middle}"
        if name in limits:
            verdict = (
                "met"
                if number <= limits[name]
                else "MISSED, by less than the noise"
                if low <= limits[name]
                else "MISSED"
            )
            line += f"; at most {limits[name]:g}: {verdict}"
        lines.append(line + (", a quick run" if quick else "") + ".")
    return lines


def spread(s: dict[str, float], unit: float, digits: int) -> str:
    """The interquartile range of the samples, as text."""
    return f"{unit * s['q1']:.{digits}f} to {unit * s['q3']:.{digits}f}"


# -- counts ---------------------------------------------------------------------------------------------


def num_equations(jaxpr: Any) -> int:
    """The number of equations of a jaxpr and of the jaxprs inside it, each counted as often as it occurs."""
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    params = [v for eqn in jaxpr.eqns for v in eqn.params.values()]
    parts = [p for v in params for p in (v if isinstance(v, (tuple, list)) else [v])]
    return len(jaxpr.eqns) + sum(num_equations(p) for p in parts if hasattr(p, "eqns") or hasattr(p, "jaxpr"))


# -- results --------------------------------------------------------------------------------------------


def environment() -> dict[str, Any]:
    """Versions and machine properties that the results depend on."""
    versions = {name: metadata.version(name) for name in ("jax", "jaxlib", "brainstate")}
    return {
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
        **versions,
        "backend": jax.default_backend(),
        "platform": f"{platform.system()} {platform.machine()}",
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
    }


def header(env: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in env.items())


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table, whose columns but the first are right-aligned."""
    header = [Column(name, "right" if n else "left") for n, name in enumerate(columns)]
    print(f"\n{Table(title, header, [list(map(Cell, row)) for row in rows])}")


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, rule: str = "--:") -> str:
    """A table whose columns but the first are aligned by `rule`: to the right by default."""
    rule_line = ["---"] + [rule] * (len(columns) - 1)
    return "\n".join("| " + " | ".join(line) + " |" for line in (columns, rule_line, *rows))


def write_json(path: Path, env: dict[str, Any], results: dict[str, Any]) -> None:
    path.write_text(json.dumps({"environment": env, **results}, indent=1) + "\n")


def finish(
    benchmark: str, options: argparse.Namespace, env: dict[str, Any], figures: dict[str, Any], **results: Any
) -> None:
    """Print the verdicts of `judge` on the figures; write all of it to ``--json``."""
    verdict = judge(benchmark, figures, quick=options.quick)
    print("\n".join(verdict))
    if options.json:
        write_json(options.json, env, {**results, "figures": figures, "verdict": verdict})


def renew_section(page: Path, name: str, text: str) -> None:
    """Replace the text between ``<!-- name -->`` and ``<!-- end name -->`` in a page."""
    start, end = f"<!-- {name} -->", f"<!-- end {name} -->"
    pattern = re.compile(f"{re.escape(start)}.*?{re.escape(end)}", re.DOTALL)
    section = f"{start}\n{text}\n{end}"
    renewed, num_sections = pattern.subn(lambda _: section, page.read_text())
    if not num_sections:
        sys.exit(f"{page.name} has no section marked {start}")
    page.write_text(renewed)
