"""XLA's estimates of time beside times on the GPU of this machine.

Compared
    Twenty programs of ``target_plans.py``: without rematerialization, with their blocks rematerialized, with the policy "dots" on the blocks, and with a
    plan for the memory of rematerialized blocks (a thousandth more).

Measured
    The median time of the value and the gradient, ten runs after two to warm up (of slow programs fewer, for about a second), and XLA's estimate of
    the compiled program. The verdict is the rank correlation of the two, over all programs and over the ways of one program (the median), and
    the worst ratio of estimate to time, of the whole and relative to the program without rematerialization.

The plans are made first, several at a time, in processes of their own, and read from ``STATETX_CACHE``. Each program is then measured in a process of
its own. The rows of the file given by ``--json`` are kept: an interrupted run goes on, and with ``--limit 500`` it starts no process after 500 seconds.
On an H200 with 16 cores it is made to take less than ten minutes. On a CPU, with ``--quick``, there are no estimates to compare.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _common import environment, header, parse_args, show, write_json
from scipy.stats import spearmanr
from target_plans import ALL, BLOCKS, POLICIES, QUICK, UNMARKED, Model, programs

import statetx

WAYS = ("no remat", *POLICIES, "plan")
NAMES = [name for name in ALL if name not in ("GAN (haiku)", "meta-learning", "mixture of experts (equinox)")]
STEPS_FOR = 1.0  # seconds


def made(name: str, way: str, sizes: dict[str, int]) -> Model:
    """A program, rematerialized in one of the ways."""
    if way != "plan":
        wrap = statetx.remat(policy=POLICIES[way]) if way in POLICIES else programs.identity
        return ALL[name](wrap, **sizes)
    of_blocks = statetx.measure(gradient_of(made(name, BLOCKS, sizes)), *arguments(name, sizes), gradient=False)
    budget = int(1.001 * of_blocks.temp_bytes)
    model = ALL[name](*[statetx.remat] * (name not in UNMARKED), **sizes)
    planned = statetx.plan(model.loss, model.params, *model.data, budget=budget, of="temporaries", argnums=0)
    return model._replace(loss=planned.apply(model.loss))


def gradient_of(model: Model) -> Callable:
    return statetx.value_and_grad(model.loss)


def arguments(name: str, sizes: dict[str, int]) -> tuple[Any, ...]:
    model = ALL[name](**sizes)
    return (model.params, *model.data)


def time_of(step: Callable, args: tuple[Any, ...]) -> float:
    """The median time of a step."""
    times: list[float] = []
    begin = time.perf_counter()
    while len(times) < 12 and (len(times) < 4 or time.perf_counter() - begin < STEPS_FOR):
        start = time.perf_counter()
        jax.block_until_ready(step(*args))
        times.append(time.perf_counter() - start)
    return statistics.median(times[2:])


def one(name: str, sizes: dict[str, int]) -> dict[str, Any]:
    """The estimated and the measured time of each way of a program, and its temporary bytes."""
    found = {}
    is_type = lambda x: isinstance(x, jax.ShapeDtypeStruct)
    zeros = lambda x: jnp.zeros(x.shape, x.dtype) if is_type(x) else x
    args = jax.tree.map(zeros, arguments(name, sizes), is_leaf=is_type)
    for way in WAYS:
        step = gradient_of(made(name, way, sizes))
        cost = statetx.measure(step, *args, gradient=False)
        found[way] = {"estimate": cost.seconds, "seconds": time_of(jax.jit(step), args), "bytes": cost.temp_bytes}
    return found


# -- verdict ---------------------------------------------------------------------------------------------------------


def verdict(results: dict[str, dict[str, Any]]) -> list[str]:
    """The rank correlations, and the worst ratios of estimate to time."""
    known = {
        name: {way: row for way, row in found.items() if row["estimate"]}
        for name, found in results.items()
        if "failed" not in found
    }
    pairs = {(name, way): (r["estimate"], r["seconds"]) for name, found in known.items() for way, r in found.items()}
    if len(pairs) < 2:
        return ["XLA tells no time of these programs"]
    within = [
        correlation((r["estimate"], r["seconds"]) for r in found.values()) for found in known.values() if len(found) > 2
    ]
    relative = {}
    for (name, way), (estimate, seconds) in pairs.items():
        if (plain := pairs.get((name, "no remat"))) is not None:
            relative[name, way] = estimate / plain[0] / (seconds / plain[1])
    lines = [f"rank correlation of {len(pairs)} programs {correlation(pairs.values()):.2f}"]
    lines += [f"of the ways of one program {statistics.median(within):.2f} at the median"] if within else []
    for title, ratios in (
        ("estimate to time", {pair: estimate / seconds for pair, (estimate, seconds) in pairs.items()}),
        ("the same, relative to no remat", relative),
    ):
        if ratios:
            worst = max(ratios, key=lambda pair: abs(np.log(ratios[pair])))
            lines.append(f"worst ratio of {title} {ratios[worst]:.2f} ({', '.join(worst)})")
    return lines


def correlation(pairs: Iterable[tuple[float, float]]) -> float:
    estimates, seconds = zip(*pairs, strict=True)
    return float(spearmanr(estimates, seconds).statistic)


def rows(results: dict[str, dict[str, Any]]) -> list[list[str]]:
    ms = lambda seconds: f"{1e3 * seconds:.2f}" if seconds else ""
    return [
        [f"{name}: {way}", ms(row["estimate"]), ms(row["seconds"]), f"{row['bytes'] / 2**20:,.1f}"]
        for name, found in results.items()
        if "failed" not in found
        for way, row in found.items()
    ]


# -- processes -------------------------------------------------------------------------------------------------------


def in_own_process(option: str, name: str, quick: bool) -> dict[str, Any]:
    words = [sys.executable, __file__, f"--{option}", name, *["--quick"] * quick]
    folder = Path(tempfile.gettempdir()) / "statetx-gpu-times"
    more = {"STATETX_CACHE": str(folder), "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    done = subprocess.run(words, capture_output=True, text=True, env={**more, **os.environ})
    return {"failed": done.stderr[-1000:]} if done.returncode else json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    hidden = {"metavar": "PROGRAM", "help": argparse.SUPPRESS}
    limit = {"type": float, "metavar": "SECONDS", "default": float("inf"), "help": "start no process after this time"}
    options = parse_args(__doc__ or "", make=hidden, one=hidden, limit=limit)
    sizes_of = lambda name: QUICK.get(name, {}) if options.quick else {}
    if options.make:
        made(options.make, "plan", sizes_of(options.make))
        print("{}")
        return
    if options.one:
        print(json.dumps(one(options.one, sizes_of(options.one))))
        return
    start, env = time.monotonic(), environment() | {"quick": options.quick}
    print(header(env))
    results: dict[str, Any] = {}
    if options.json and options.json.exists():
        results = json.loads(options.json.read_text())["results"]
    is_over = lambda: time.monotonic() - start > options.limit
    missing = [n for n in (QUICK if options.quick else NAMES) if "failed" in results.get(n, {"failed": ""})]
    with concurrent.futures.ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 2)) as pool:
        list(pool.map(lambda name: None if is_over() else in_own_process("make", name, options.quick), missing))
    for name in missing:
        if not is_over():
            results[name] = in_own_process("one", name, options.quick)
            print(
                f"{name}: {time.monotonic() - start:.0f} s",
                *results[name].get("failed", "").splitlines()[-1:],
                flush=True,
            )
            if options.json:  # after each program: a later one may take too long
                write_json(options.json, env, {"results": results, "verdict": verdict(results)})
    show("Estimates and times", ("program", "estimate, ms", "time, ms", "temporary MiB"), rows(results))
    print("\n".join(verdict(results)))


if __name__ == "__main__":
    main()
