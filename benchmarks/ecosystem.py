"""Programs of the brainstate family under statetx's transforms, beside brainstate's own.

Compared
    The programs of ``tests/ecosystem/brain_programs.py``, which use layers, optimizers and trainers of braintools,
    brainpy.state, braincell and braintrace. Each is built twice in one process, with brainstate's transforms and with
    statetx's; their outputs are compared before anything is timed.

Measured
    CPU time a step, medians of interleaved rounds, and the ratio within a round; the time of the first two steps, which
    includes staging and compilation; the number of programs that XLA compiles in later steps; temporary bytes of one step
    compiled as one program with its states as arguments.

Needs the extra ``ecosystem``.
"""

from __future__ import annotations

import statistics
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "ecosystem"))

import jax
import numpy as np
from _common import (
    Sample,
    Stopwatch,
    environment,
    header,
    interleave,
    parse_args,
    show,
    spread,
    summaries,
    write_json,
)

import statetx
from brain_programs import OURS, PROGRAMS, THEIRS, Program, Size, start
from helpers import compilations

WRITTEN_IN = {"brainstate": THEIRS, "statetx": OURS}


def begin(name: str, transforms: Any, size: Size) -> tuple[Program, float, list[Any]]:
    """A program, and the seconds and outputs of its first two steps; in the second, types of states may have changed."""
    program = start(name, transforms, size)
    watch = Stopwatch()
    outputs = [jax.block_until_ready(program.step()) for _ in range(2)]
    return program, watch.read()["cpu"], outputs


def difference(a: Any, b: Any) -> float:
    """The largest difference of two trees of outputs, relative to the largest number in each array; NaN if one alone is not finite."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return float(np.max([relative(np.asarray(x, float), np.asarray(y, float)) for x, y in pairs]))


def relative(x: np.ndarray, y: np.ndarray) -> float:
    differs = (x != y) & ~(np.isnan(x) & np.isnan(y))
    if not (np.isfinite(x[differs]).all() and np.isfinite(y[differs]).all()):
        return np.nan
    return np.abs(x - y)[differs].max(initial=0.0) / max(np.abs(x[np.isfinite(x)]).max(initial=0.0), 1e-30)


def temporary_bytes(name: str, transforms: Any, size: Size) -> int:
    """Temporary bytes of one step, compiled as one program."""
    compiled = statetx.jit(start(name, transforms, size).step).lower().compile()
    return compiled.memory_analysis().temp_size_in_bytes


def timed(program: Program) -> Callable[[], Sample]:
    def sample() -> Sample:
        watch = Stopwatch()
        jax.block_until_ready(program.step())
        return watch.read()

    return sample


def measure(name: str, rounds: int, size: Size) -> dict[str, Any]:
    begun = {library: begin(name, transforms, size) for library, transforms in WRITTEN_IN.items()}
    samples = interleave({library: timed(program) for library, (program, *_) in begun.items()}, rounds)
    result: dict[str, Any] = {"difference": difference(*(outputs for *_, outputs in begun.values()))}
    for library, (program, seconds, _) in begun.items():
        with compilations() as events:
            program.step()
        result[library] = {
            "first": seconds,
            "compiled": len(events),
            "temporary": temporary_bytes(name, WRITTEN_IN[library], size),
            **summaries(samples[library], samples["brainstate"]),
        }
    return result


COLUMNS = (
    "program",
    "difference",
    "brainstate: CPU ms",
    "statetx: CPU ms",
    "ratio",
    "middle half",
    "first two steps",
    "KiB",
    "KiB, statetx",
    "compiled a step",
)


def row(name: str, result: dict[str, Any]) -> list[str]:
    theirs, ours = result["brainstate"], result["statetx"]
    return [
        name.replace("_", " "),
        f"{result['difference']:.0e}" if result["difference"] else "0",
        f"{1e3 * theirs['cpu']['median']:.2f}",
        f"{1e3 * ours['cpu']['median']:.2f}",
        f"{ours['cpu_ratio']['median']:.2f}",
        spread(ours["cpu_ratio"], 1, 2),
        f"{ours['first'] / theirs['first']:.2f}",
        f"{theirs['temporary'] / 1024:,.0f}",
        f"{ours['temporary'] / 1024:,.0f}",
        f"{theirs['compiled']} and {ours['compiled']}",
    ]


def rows(results: dict[str, Any]) -> list[list[str]]:
    return [row(name, result) for name, result in results.items()]


def main() -> None:
    only = {"nargs": "+", "choices": list(PROGRAMS), "help": "these programs alone"}
    options = parse_args(__doc__ or "", only=only)
    warnings.filterwarnings("ignore", message="ETP primitive")
    env = environment()
    size = Size() if options.quick else Size(steps=100, batch=32, hidden=64)
    rounds = options.rounds or (3 if options.quick else 30)
    print(header(env))
    results = {name: measure(name, rounds, size) for name in options.only or PROGRAMS}
    show(f"Programs of the brainstate family, {rounds} rounds, {size}", COLUMNS, rows(results))
    ratio = statistics.geometric_mean(r["statetx"]["cpu_ratio"]["median"] for r in results.values())
    line = f"CPU time a step, of brainstate's: {ratio:.2f} (geometric mean)."
    print(line)
    if options.json:
        write_json(options.json, env, {"rounds": rounds, "size": size._asdict(), "results": results, "verdict": [line]})


if __name__ == "__main__":
    main()
