"""Plans against stock policies: memory of the compiled program, and operations added.

The blocks of each program are marked by `statetx.remat`, where the stock policies act. Each program is planned for 20
budgets between the least memory reached and the memory without rematerialization, and for the memory of each stock
policy.

Memory is XLA's temporary memory, operations are counted from the equations; both are measured by `statetx.measure` for
the value and the gradient with respect to the parameters.

Run it with `make bench`, or alone: `python benchmarks/planner.py --only MLP "U-Net"`.
"""

from __future__ import annotations

import functools
import os
import tempfile
import time
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from _common import environment, header, parse_args, show, write_json
from programs import PROGRAMS, Program, identity, scanned_transformer, transformer

import statetx
from statetx.planner import Planner

os.environ["STATETX_CACHE"] = ""  # plans are made, not read

STOCK = ("everything", "dots", "dots_without_batch_dims", "nothing")
NUM_BUDGETS = 20
FENCED = ("MLP", "transformer", "convolutional net", "U-Net")
MIB = 2.0**20

SMALL: dict[str, dict[str, int]] = {
    "MLP": {"layers": 4, "width": 64, "batch": 256},
    "deep MLP": {"layers": 8, "width": 64, "batch": 256},
    "transformer": {"layers": 2, "width": 64, "time": 64, "batch": 2},
    "SwiGLU transformer": {"layers": 2, "width": 64, "batch": 4},
    "scanned transformer": {"layers": 4, "width": 64, "time": 64, "batch": 2},
    "convolutional net": {"layers": 3, "channels": 8, "size": 16, "batch": 4},
    "U-Net": {"levels": 2, "channels": 4, "size": 16, "batch": 4},
    "recurrent": {"steps": 64, "width": 32, "batch": 4},
    "skips": {"layers": 4, "width": 32, "batch": 256},
}


def with_gradient(loss: Any) -> Any:
    return lambda params, *data: statetx.value_and_grad(loss)(params, *data)


def cost(program: Program, loss: Any = None) -> Any:
    return statetx.measure(with_gradient(loss or program.loss), program.params, *program.data, gradient=False)


def judge(name: str, *, quick: bool) -> dict[str, Any]:
    """Plans and stock policies of one program."""
    make = functools.partial(PROGRAMS[name], **(SMALL[name] if quick else {}))
    program = make(identity)
    base = cost(program)
    stock = {p: cost(make(functools.partial(statetx.remat, policy=p))) for p in STOCK}
    start = time.perf_counter()
    planner = Planner(make(statetx.remat).loss, program.params, *program.data, argnums=0, of="temporaries")
    least, most = planner.ends()
    budgets = np.linspace(least, most, 4 if quick else NUM_BUDGETS).astype(int).tolist()
    all_budgets = sorted({*budgets, *(c.temp_bytes for c in stock.values())}, reverse=True)
    first = None
    for budget in all_budgets:
        try:
            planner.plan(int(budget))
        except statetx.PlanError:
            pass
        first = first or time.perf_counter() - start
    seconds = time.perf_counter() - start
    plans = {b: planner.best(int(b)) for b in all_budgets}
    points = [
        {
            "budget": b,
            "bytes": plan.temp_bytes,
            "predicted": plan.predicted_bytes,
            "initial prediction": plan.initial_prediction_bytes,
            "extra": plan.extra_flops,
            "stock": plan.stock,
        }
        for b, plan in sorted(plans.items())
        if plan is not None
    ]
    return {
        "bytes": base.temp_bytes,
        "flops": base.flops,
        "least": planner.ends()[0],
        "budgets": budgets,
        "stock": {p: {"bytes": c.temp_bytes, "extra": c.flops / base.flops - 1} for p, c in stock.items()},
        "points": points,
        "compiled": len(planner.best(10**15).measured),
        "seconds": seconds,
        "seconds of the first plan": first,
        "difference": difference(
            program, make(statetx.remat).loss, [plans[b] for b in budgets[:: max(1, len(budgets) // 3)]]
        ),
    }


def difference(program: Program, loss: Any, plans: list[Any]) -> float:
    """The largest difference between planned and unplanned gradients, relative to the largest entry of each array."""
    expected = jax.jit(jax.grad(program.loss))(program.params, *program.data)
    largest = 0.0
    for plan in (plan for plan in plans if plan is not None):
        got = jax.jit(jax.grad(plan.apply(loss)))(program.params, *program.data)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
            largest = max(largest, float(jnp.abs(a - b).max() / jnp.maximum(jnp.abs(b).max(), 1e-30)))
    return largest


def verdicts(name: str, result: dict[str, Any]) -> dict[str, Any]:
    """Compare the plans with their budgets, predictions and the stock policies."""
    points = result["points"]
    by_budget = {p["budget"]: p for p in points}
    missed = [s for s, c in result["stock"].items() if c["bytes"] not in by_budget]
    more_expensive = [
        s
        for s, c in result["stock"].items()
        if c["bytes"] in by_budget and by_budget[c["bytes"]]["extra"] > c["extra"] + 1e-9
    ]
    full = result["stock"]["nothing"]
    over = [p for p in points if p["bytes"] > p["budget"]]
    # The program without remat is compiled before the model predicts anything: it does not count.
    planned = [p for p in points if p["stock"] != "no remat"]
    share_near = lambda key: np.mean([abs(p[key] / p["bytes"] - 1) <= 0.1 for p in planned])
    extras = [p["extra"] for p in points]
    return {
        "missed": missed,
        "more expensive": more_expensive,
        "over": len(over),
        "at full": by_budget[full["bytes"]]["extra"] if full["bytes"] in by_budget else None,
        "near": float(share_near("predicted")),
        "near before": float(share_near("initial prediction")),
        "monotone": all(b <= a + 1e-12 for a, b in zip(extras, extras[1:], strict=False)),
    }


def fence(quick: bool) -> dict[str, list[int]]:
    """Temporary bytes without rematerialization, with ``jax.checkpoint``, and with `statetx.remat`."""
    temp_bytes = {}
    for name in FENCED:
        make = functools.partial(PROGRAMS[name], **(SMALL[name] if quick else {}))
        temp_bytes[name] = [cost(make(wrap)).temp_bytes for wrap in (identity, jax.checkpoint, statetx.remat)]
    return temp_bytes


def scale(quick: bool) -> list[dict[str, Any]]:
    """The time of one plan for long programs, and for a loop over many layers; then once more, from the cache
    on disk.
    """
    small: dict[str, Any] = {"width": 64, "heads": 4, "time": 64, "batch": 2}
    sizes = (4,) if quick else (26, 58)
    steps = 10 if quick else 100
    programs = {f"transformer of {layers} layers": transformer(layers=layers, **small) for layers in sizes}
    programs[f"scan over {steps} layers"] = scanned_transformer(layers=steps, **small)
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, {"STATETX_CACHE": folder}):
        return [{"program": title, **time_to_plan(program)} for title, program in programs.items()]


def time_to_plan(program: Program) -> dict[str, Any]:
    def run() -> tuple[Any, float]:
        jax.clear_caches()
        start = time.perf_counter()
        plan = statetx.plan(program.loss, program.params, *program.data, budget=0.5, of="temporaries", argnums=0)
        return plan, time.perf_counter() - start

    plan, seconds = run()
    _, seconds_again = run()
    start = time.perf_counter()
    cost(program)
    return {
        "equations": plan.num_equations,
        "seconds": seconds,
        "seconds again": seconds_again,
        "seconds to compile unplanned": time.perf_counter() - start,
        "compiled": len(plan.measured),
        "of budget": plan.temp_bytes / plan.budget_bytes,
        "extra": plan.extra_flops,
    }


def picture(results: dict[str, Any], path: str) -> None:
    """Operations over memory, a panel for each program."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.1 * ((len(results) + 2) // 3)), layout="constrained", facecolor="white")
    panels = np.atleast_1d(figure.subplots((len(results) + 2) // 3, 3)).ravel()
    marks = dict(zip(STOCK, "^sDo", strict=True))
    for axes, (name, result) in zip(panels, results.items(), strict=False):
        points = result["points"]
        axes.step([p["bytes"] / MIB for p in points], [100 * p["extra"] for p in points], where="post", color="#0072b2")
        axes.scatter(
            [p["bytes"] / MIB for p in points], [100 * p["extra"] for p in points], s=12, color="#0072b2", label="plans"
        )
        for policy, c in result["stock"].items():
            axes.scatter(
                [c["bytes"] / MIB], [100 * c["extra"]], marker=marks[policy], s=38, color="#e69f00", label=policy
            )
        axes.axvline(result["bytes"] / MIB, color="#999999", linestyle="--", linewidth=1, label="no remat")
        axes.set_title(name, loc="left", fontsize=10)
        extras = [100 * p["extra"] for p in (*points, *result["stock"].values())]
        axes.set_ylim(-1, min(60, 1.1 * max(extras) + 2))
        axes.set_xlim(left=0)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xlabel("temporary memory, MiB", fontsize=8)
        axes.set_ylabel("added operations, %", fontsize=8)
    panels[0].legend(frameon=False, fontsize=7)
    for axes in panels[len(results) :]:
        axes.set_visible(False)
    figure.savefig(path, dpi=110, metadata={"Date": None})


def main() -> None:
    only = {"nargs": "+", "choices": [*PROGRAMS, "fence", "scale"], "help": "these alone"}
    plot = {"metavar": "PICTURE", "help": "draw operations over memory"}
    options = parse_args(__doc__ or "", only=only, plot=plot)
    env = environment()
    print(header(env))
    chosen = options.only or [*PROGRAMS, "fence", "scale"]
    output: dict[str, Any] = {}
    results = {}
    for name in (n for n in PROGRAMS if n in chosen):
        results[name] = judge(name, quick=options.quick)
        print(f"{name}: {results[name]['seconds']:.0f} s, {results[name]['compiled']} programs compiled", flush=True)
        if options.json:  # after each program: a later one may take too long
            write_json(options.json, env, {"programs": results})
    if results:
        output["programs"] = results
        for title, columns, cells in tables(results):
            show(title, columns, cells)
    if "fence" in chosen:
        output["fence"] = fence(options.quick)
        show(*fence_table(output["fence"]))
    if "scale" in chosen:
        output["scale"] = scale(options.quick)
        show(*scale_table(output["scale"]))
    if options.json:
        write_json(options.json, env, {**output, "verdict": lines_of(output)})
    if options.plot and results:
        picture(results, options.plot)


def lines_of(output: dict[str, Any]) -> list[str]:
    """The main figures, a line for each."""
    lines = []
    for name, r in output.get("programs", {}).items():
        extra = verdicts(name, r)["at full"]
        text = "none" if extra is None else f"{100 * extra:+.1f}%"
        lines.append(f"{name}: {text} operations at full rematerialization's memory")
    lines += [
        f"{n}: {v[2] / v[0]:.2f} of no remat's memory by the fence alone" for n, v in output.get("fence", {}).items()
    ]
    lines += [
        f"{r['program']}, {r['equations']} equations: planned in {r['seconds']:.1f} s" for r in output.get("scale", [])
    ]
    return lines


Table = tuple[str, list[str], list[list[str]]]  # title, columns, rows


def fence_table(results: dict[str, list[int]]) -> Table:
    columns = ["program", "no remat", "jax.checkpoint", "statetx.remat", "of no remat"]
    cells = [[n, *(f"{b / MIB:.1f} MiB" for b in v), f"{v[2] / v[0]:.2f}"] for n, v in results.items()]
    return "Unrolled programs under default compiler flags", columns, cells


def scale_table(results: list[dict[str, Any]]) -> Table:
    columns = [
        "program",
        "equations",
        "seconds",
        "again, from the cache",
        "to compile it unplanned for use",
        "compiled",
    ]
    columns += ["of its budget", "added operations"]
    times = ("seconds", "seconds again", "seconds to compile unplanned")
    cells = [
        [r["program"], str(r["equations"]), *(f"{r[name]:.1f}" for name in times)]
        + [str(r["compiled"]), f"{r['of budget']:.2f}", f"{100 * r['extra']:.2f}%"]
        for r in results
    ]
    return "Time to plan for half of the memory, compilations included", columns, cells


def tables(results: dict[str, Any]) -> tuple[Table, Table]:
    columns = [
        "program",
        "no remat",
        "full remat",
        "dots",
        "plan at full remat's memory",
        "plan at 2/3 of no remat",
        "least",
    ]
    cells = []
    for name, r in results.items():
        v = verdicts(name, r)
        full, dots = r["stock"]["nothing"], r["stock"]["dots"]
        two_thirds = min((p["extra"] for p in r["points"] if p["budget"] <= 2 / 3 * r["bytes"]), default=None)
        percent = lambda x: "none" if x is None else f"{100 * x:+.1f}%"
        row = [name, f"{r['bytes'] / MIB:.1f} MiB"]
        row += [f"{c['bytes'] / MIB:.1f} MiB {percent(c['extra'])}" for c in (full, dots)]
        cells.append([*row, percent(v["at full"]), percent(two_thirds), f"{r['least'] / MIB:.1f} MiB"])
    memory = "Temporary memory and operations added", columns, cells
    columns = [
        "program",
        "budgets met",
        "missed that a policy meets",
        "more expensive than a policy",
        "within 10%",
        "initial prediction within 10%",
    ]
    columns += ["monotone", "gradients differ by", "compiled", "seconds"]
    cells = []
    for name, r in results.items():
        v = verdicts(name, r)
        num_met = sum(p["bytes"] <= p["budget"] for p in r["points"])
        cells.append(
            [
                name,
                f"{num_met} of {len(r['points'])}",
                ", ".join(v["missed"]) or "none",
                ", ".join(v["more expensive"]) or "none",
            ]
            + [f"{100 * v['near']:.0f}%", f"{100 * v['near before']:.0f}%", "yes" if v["monotone"] else "NO"]
            + [f"{r['difference']:.1e}", str(r["compiled"]), f"{r['seconds']:.0f}"]
        )
    return memory, ("Plans against their budgets", columns, cells)


if __name__ == "__main__":
    main()
