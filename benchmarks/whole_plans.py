"""Plans of whole programs, marked and unmarked, against stock policies, rematerialized blocks and a lower bound.

Programs
    The nine of ``programs.py`` and those of ``models.py``, which are written with other libraries. Each runs in a process of its
    own, so that its memory is freed.

Measured
    Each stock policy is used on the blocks ("remat on the blocks" is the policy "nothing" there) and on the whole loss. For the
    memory of each of them the program is planned twice: with its blocks marked by `statetx.remat`, and without marks. Memory is
    XLA's temporary memory of the program that the user compiles, the value and the gradient of the planned loss; operations are
    counted from its equations and compared with the program without rematerialization.

    The lower bound counts what is held at the turn from the forward to the backward pass, and no memory that the backward pass works
    with. For the plan at the memory of rematerialized blocks both are measured in the compiled program: the bytes held at the turn, and
    the most bytes of working memory (cotangents, values computed again, copies in another layout). The bound at the bytes held, and at
    what the working memory leaves of the budget, tell what else binds. Two more things do in some programs. A loop reads and writes whole
    sequences, which the next loop reads again, and no plan computes a sequence again that another loop has written. And what a gradient
    inside of the loss computes again is differentiated, too: so many operations are added before anything else is planned.

    A training step with Adam, whose parameters and optimizer state are donated, is planned for the total of the step with
    rematerialized blocks, and for the middle between that and the step without rematerialization: arguments, outputs and temporary
    memory of the compiled step, less what is donated.

Rows of earlier runs in the file given by ``--json`` are kept, apart from those given by ``--only``: an interrupted run goes on.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import jax.numpy as jnp
import numpy as np
from _common import environment, header, parse_args, show, write_json
from lower_bound import LowerBound
from models import MODELS, Model, of_program
from programs import PROGRAMS, identity

import statetx
from statetx._equations.inline import inline
from statetx._equations.primitives import JIT, REMAT
from statetx._jax import Var, scan_counts
from statetx.planner import Planner
from statetx.planner._treatments.inner_gradients import PLAIN

MIB = 2.0**20
STOCK = ("nothing", "dots", "dots_without_batch_dims")
BLOCKS = "remat on the blocks"
TIMEOUT = 3600  # seconds for a program
TIME_LIMIT = 600.0  # seconds for a plan, so that the plans are the same on a machine that is busy
MARGIN = 5.0  # points of added operations over the lower bound, at the memory of rematerialized blocks
NEAR = 0.005  # added operations that two plans for one budget may differ by

ALL: dict[str, Callable[..., Model]] = {
    **{name: (lambda *args, make=make, **sizes: of_program(make(*args, **sizes))) for name, make in PROGRAMS.items()},
    **MODELS,
}

SMALL: dict[str, dict[str, int]] = {
    "MLP": {"layers": 3, "width": 32, "batch": 256},
    "graph network": {"layers": 2, "width": 16, "nodes": 64, "edges": 512},
    "gradient accumulation (equinox)": {"layers": 2, "width": 32, "time": 16, "batch": 4},
}


# -- one program -----------------------------------------------------------------------------------------------------


def judge(name: str, *, brief: bool = False, **sizes: int) -> dict[str, Any]:
    """Stock policies, plans and the training step of one program.

    Args:
        brief: only the policies "nothing" and "dots", on the blocks, and of a training step only the total with rematerialized
            blocks.
    """
    make = functools.partial(ALL[name], **sizes)
    model = make(identity)
    base = cost_of(model, model.loss)
    policies = {}
    for policy in STOCK[:2] if brief else STOCK:
        marked = make(functools.partial(statetx.remat, policy=policy)).loss
        on_blocks = BLOCKS if policy == "nothing" else f"{policy} on the blocks"
        policies[on_blocks] = cost_of(model, marked)
        if not brief:
            policies[f"{policy} on the loss"] = cost_of(model, statetx.remat(model.loss, policy=policy))
    stock = {p: {"bytes": c.temp_bytes, "extra": c.flops / base.flops - 1} for p, c in policies.items()}
    losses = {"unmarked": model.loss, "marked": make(statetx.remat).loss}
    return {
        "bytes": base.temp_bytes,
        "flops": base.flops,
        "stock": stock,
        "plans": {
            marks: plans_of(model, loss, base.flops, {c["bytes"] for c in stock.values()}, stock[BLOCKS]["bytes"])
            for marks, loss in losses.items()
        },
        "step": judge_step(model, make(statetx.remat), brief=brief),
    }


def cost_of(model: Model, loss: Callable) -> Any:
    return statetx.measure(statetx.value_and_grad(loss), model.params, *model.data, gradient=False)


def plans_of(model: Model, loss: Callable, base_flops: int, budgets: set[int], explained: int) -> list[dict[str, Any]]:
    """Plans for each budget, the least memory first. For one of them what binds is measured, too."""
    start = time.perf_counter()
    planner, rows, compiled = None, [], 0
    lower = LowerBound(loss, model.params, *model.data)
    for budget in sorted(budgets):
        row: dict[str, Any] = {"budget": budget}
        try:
            planner = planner or Planner(
                loss, model.params, *model.data, argnums=0, of="temporaries", time_limit=TIME_LIMIT
            )
            plan = planner.plan(budget)
        except Exception as e:
            row |= error_of(e)
        else:
            row["seconds"] = time.perf_counter() - start
            own = cost_of(model, plan.apply(loss))
            row |= {"bytes": own.temp_bytes, "extra": own.flops / base_flops - 1}
            row |= {"planned bytes": plan.temp_bytes, "planned extra": plan.extra_flops, "stock": plan.stock}
            row |= {
                "compiled": len(plan.measured) - compiled,
                "complete": plan.complete,
                "bound": bound_of(lower, plan),
            }
            compiled = len(plan.measured)
            if budget == explained:
                row |= what_binds(model, plan.apply(loss), budget, lower)
                row |= what_else_binds(model, loss, lower, budget - row["working"], inner_cost(planner, plan))
        rows.append({"seconds": time.perf_counter() - start, **row})
        start = time.perf_counter()
    return rows


def what_binds(model: Model, loss: Callable, budget: int, bound: Any) -> dict[str, Any]:
    """The temporary bytes of a compiled gradient that are held at the turn, the most bytes of its working memory, and the bounds of both."""
    profile = statetx.memory_profile(statetx.value_and_grad(loss), model.params, *model.data, gradient=False)
    outputs = {
        b.allocation for b in profile.buffers if b.kind == "output"
    }  # XLA uses their memory until they are written

    def most(*kinds: str) -> int:
        changes = np.zeros(len(profile.steps) + 1, int)
        for b in profile.buffers:
            if b.kind in kinds and b.allocation not in outputs:
                changes[b.start] += b.num_bytes
                changes[b.end + 1] -= b.num_bytes
        return int(changes.cumsum().max())

    held, working = most("residual"), most("recomputed", "working memory")
    at_held, at_rest = bound.operations_at(held), bound.operations_at(budget - working)
    return {"held": held, "bound at held": at_held, "working": working, "bound at rest": at_rest}


def what_else_binds(model: Model, loss: Callable, bound: LowerBound, left: int, inner: float) -> dict[str, Any]:
    """The sequences between loops, the operations that rematerialization of inner gradients adds, and the bound with both, within `left` bytes.

    It is an estimate rather than a bound: a schedule that holds the sequences may need less of what the bound holds.
    """
    sequences = sequence_bytes(loss, model.params, *model.data)
    return {
        "sequences": sequences,
        "inner": inner,
        "bound at all": inner + bound.operations_at(left - sequences),
    }


def inner_cost(planner: Planner, plan: Any) -> float:
    """Operations that rematerialization of the gradients inside of the loss adds, before anything else is planned."""
    if plan.inner is None:
        return 0.0
    costs = {search.captured.variant: search.total_cost() for search in planner._searches}
    return costs[plan.inner.variant] / costs[PLAIN] - 1


def sequence_bytes(fun: Callable, *args: Any) -> int:
    """Bytes of the floats that a function computes and that its loops read slice by slice, or write so; each counts once."""
    jaxpr = inline(statetx.make_jaxpr(fun)(*args), calls=JIT | REMAT)
    read = {v for eqn in jaxpr.eqns for v in eqn.invars if isinstance(v, Var)}.union(
        v for v in jaxpr.outvars if isinstance(v, Var)
    )
    computed = {v: v.aval for eqn in jaxpr.eqns for v in eqn.outvars if v in read}
    found: dict[Any, Any] = {}
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "scan":
            num_constants, num_carry = scan_counts(eqn)
            xs, ys = eqn.invars[num_constants + num_carry :], eqn.outvars[num_carry:]
            found |= {v: computed[v] for v in (*xs, *ys) if isinstance(v, Var) and v in computed}
    return sum(a.size * a.dtype.itemsize for a in found.values() if jnp.issubdtype(a.dtype, jnp.floating))


def error_of(e: Exception) -> dict[str, Any]:
    return {"error": type(e).__name__, "text": str(e)[:400], "smallest": getattr(e, "smallest_bytes", None)}


def bound_of(bound: LowerBound, plan: Any) -> dict[str, Any]:
    """The least operations at the budget and the least bytes at the plan's operations, of any schedule."""
    start = time.perf_counter()
    found = {"extra": bound.operations_at(plan.budget_bytes), "bytes": bound.bytes_at(plan.extra_flops)}
    return {**found, "seconds": time.perf_counter() - start}


def judge_step(model: Model, marked: Model, *, brief: bool = False) -> dict[str, Any]:
    """Whole-step budgets: the total of the compiled step, with donation."""
    base, full = total_of(model, model.step), total_of(marked, marked.step)
    base_flops = statetx.measure(model.step, *model.step_args, gradient=False).flops
    rows = []
    budgets = [(full, "bytes"), *([] if brief else [((base + full) // 2, "bytes")])]
    for budget, kind in [*budgets, (full, "device")]:
        row: dict[str, Any] = {"budget": budget, "kind": kind}
        start = time.perf_counter()
        try:
            plan = plan_step(model, budget, kind)
            row["seconds"] = time.perf_counter() - start
            planned = plan.apply(model.step)
            own_flops = statetx.measure(planned, *model.step_args, gradient=False).flops
            row |= {"bytes": total_of(model, planned), "extra": own_flops / base_flops - 1}
            row |= {"planned extra": plan.extra_flops, "compiled": len(plan.measured), "complete": plan.complete}
        except Exception as e:
            row |= error_of(e)
        rows.append({"seconds": time.perf_counter() - start, **row})
    return {"bytes": base, "full": full, "plans": rows}


def plan_step(model: Model, budget: int, kind: str) -> Any:
    """A plan for an amount of memory, or for a device that pretends to have it."""
    step = model.jit(model.step)
    if kind == "bytes":
        return statetx.plan(step, *model.step_args, budget=budget, time_limit=TIME_LIMIT)
    with mock.patch.dict(os.environ, {"STATETX_DEVICE_MEMORY": str(budget)}):
        return statetx.plan(step, *model.step_args, budget="device", time_limit=TIME_LIMIT)


def memory_of(model: Model, step: Callable) -> Any:
    return model.jit(step).lower(*model.step_args).compile().memory_analysis()


def total(memory: Any) -> int:
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    return held - memory.alias_size_in_bytes


def total_of(model: Model, step: Callable) -> int:
    return total(memory_of(model, step))


# -- verdicts --------------------------------------------------------------------------------------------------------


def failures(result: dict[str, Any]) -> list[str]:
    """A line for each rule that a program's plans break."""
    lines = []
    for marks, rows in result["plans"].items():
        for row in rows:
            for reference, c in result["stock"].items():
                if c["bytes"] == row["budget"]:
                    lines += [f"{marks}, at the memory of {reference}: {text}" for text in broken(row, c)]
            lines += [f"{marks}: {text}" for text in overlooked(result, row)]
        distance = distance_of(result, marks)
        if distance is not None and distance > MARGIN:
            names = "bound at held", "bound at rest", "bound at all"
            of_held, of_rest, of_all = (distance_of(result, marks, name) for name in names)
            lines.append(
                f"{marks}, at the memory of {BLOCKS}: {distance:.1f} points over the lower bound, {of_held:.1f} over that of the bytes "
                f"held, {of_rest:.1f} over that of what its working memory leaves, {of_all:.1f} with sequences and inner gradients"
            )
    for row in result["step"]["plans"]:
        lines += [f"step, {text}" for text in broken(row, {"bytes": row["budget"], "extra": float("inf")})]
    return lines


def broken(row: dict[str, Any], reference: dict[str, Any]) -> list[str]:
    budget = f"{row['budget'] / MIB:.2f} MiB"
    if "error" in row:
        smallest = f", smallest {row['smallest'] / MIB:.2f} MiB" if row.get("smallest") else f": {row['text'][:150]}"
        return [f"{budget}: {row['error']}{smallest}"]
    lines = []
    if row["bytes"] > row["budget"]:
        lines.append(f"{budget} exceeded: {row['bytes'] / MIB:.2f} MiB in the user's program")
    if row["extra"] > reference["extra"] + 1e-9:
        lines.append(f"{budget}: {percent(row['extra'])} where the policy costs {percent(reference['extra'])}")
    return lines


def overlooked(result: dict[str, Any], row: dict[str, Any]) -> list[str]:
    """A cheaper plan within the budget of `row`, made for another budget or from the other marks."""
    if "error" in row:
        return []
    fitting = [p for rows in result["plans"].values() for p in rows if p.get("bytes", float("inf")) <= row["budget"]]
    best = min(fitting, key=lambda p: p["extra"], default=row)
    if row["extra"] <= best["extra"] + NEAR:
        return []
    return [
        f"{row['budget'] / MIB:.2f} MiB: {percent(row['extra'])} where another plan of {best['bytes'] / MIB:.2f} MiB "
        f"costs {percent(best['extra'])}"
    ]


def at_blocks(result: dict[str, Any], marks: str) -> dict[str, Any]:
    """The plan at the memory of rematerialized blocks."""
    return next(r for r in result["plans"][marks] if r["budget"] == result["stock"][BLOCKS]["bytes"])


def cheapest_at_blocks(result: dict[str, Any]) -> dict[str, Any] | None:
    rows = [row for marks in result["plans"] if "error" not in (row := at_blocks(result, marks))]
    return min(rows, key=lambda row: row["extra"], default=None)


def distance_of(result: dict[str, Any], marks: str, bound: str = "bound") -> float | None:
    """Points of added operations over a lower bound, at the memory of rematerialized blocks."""
    row = at_blocks(result, marks)
    if "error" in row:
        return None
    return 100 * (row["extra"] - (row["bound"]["extra"] if bound == "bound" else row[bound]))


# -- tables and picture ----------------------------------------------------------------------------------------------

Table = tuple[str, list[str], list[list[str]]]  # title, columns, rows


def percent(x: float) -> str:
    return f"{100 * x:+.1f}%"


def mib(num_bytes: float) -> str:
    return f"{num_bytes / MIB:.1f} MiB"


def extra_text(row: dict[str, Any]) -> str:
    return percent(row["extra"]) if "error" not in row else "none"


def tables(results: dict[str, Any]) -> list[Table]:
    columns = ["program", "no remat", BLOCKS, "dots on the blocks", "plan there, marked", "unmarked"]
    columns += ["at the memory of dots, marked", "unmarked"]
    cells = []
    for name, r in results.items():
        blocks, dots = r["stock"][BLOCKS], r["stock"]["dots on the blocks"]
        at_dots = {m: next(p for p in rows if p["budget"] == dots["bytes"]) for m, rows in r["plans"].items()}
        row = [name, mib(r["bytes"]), *(f"{mib(c['bytes'])} {percent(c['extra'])}" for c in (blocks, dots))]
        row += [extra_text(at_blocks(r, m)) for m in ("marked", "unmarked")]
        cells.append([*row, *(extra_text(at_dots[m]) for m in ("marked", "unmarked"))])
    memory = "Plans at the memory of rematerialized blocks and of dots", columns, cells
    return [memory, distance_table(results), budget_table(results)]


def distance_table(results: dict[str, Any]) -> Table:
    columns = ["program", "plan", "lower bound", "held at the turn", "lower bound of that", "working memory"]
    columns += ["lower bound of the rest", "sequences of loops", "inner gradients", "lower bound with these"]
    cells = [
        [name, percent(best["extra"]), percent(best["bound"]["extra"])]
        + [mib(best["held"]), percent(best["bound at held"]), mib(best["working"]), percent(best["bound at rest"])]
        + [mib(best["sequences"]), percent(best["inner"]), percent(best["bound at all"])]
        for name, r in results.items()
        if (best := cheapest_at_blocks(r))
    ]
    return "What binds at the memory of rematerialized blocks", columns, cells


def budget_table(results: dict[str, Any]) -> Table:
    columns = ["program", "marked: budgets met", "unmarked: budgets met", "more expensive than a policy"]
    columns += ["step without remat", "step with remat on the blocks", "planned steps"]
    columns += ["seconds of the longest plan", "compiled for it", "the step again, from the cache"]
    cells = [[name, *verdict_cells(r)] for name, r in results.items()]
    return "Budgets met in the program that the user compiles", columns, cells


def verdict_cells(r: dict[str, Any]) -> list[str]:
    plans, steps = r["plans"], r["step"]["plans"]
    more_expensive = sum(" where the policy costs " in line for line in failures(r))
    longest = max((p for rows in (*plans.values(), steps) for p in rows), key=lambda p: p["seconds"])
    again = next(p["seconds"] for p in steps if p["kind"] == "device")
    totals = ", ".join(f"{mib(p['bytes'])} {percent(p['extra'])}" if "error" not in p else "none" for p in steps)
    return [
        *(f"{num_met(plans[m])} of {len(plans[m])}" for m in ("marked", "unmarked")),
        str(more_expensive),
        *(mib(r["step"][k]) for k in ("bytes", "full")),
        f"{totals}: {num_met(steps)} of {len(steps)}",
        f"{longest['seconds']:.0f}",
        f"{longest.get('compiled', 0)}",
        f"{again:.1f} s",
    ]


def num_met(rows: list[dict[str, Any]]) -> int:
    return sum("error" not in p and p["bytes"] <= p["budget"] for p in rows)


def lines_of(results: dict[str, Any]) -> list[str]:
    """The main figures, a line for each."""
    groups = {m: [p for r in results.values() for p in r["plans"][m]] for m in ("marked", "unmarked")}
    groups["training steps"] = [p for r in results.values() for p in r["step"]["plans"]]
    lines = [f"{group}: {num_met(rows)} of {len(rows)} budgets kept" for group, rows in groups.items()]
    num_expensive = sum(" where the policy costs " in line for r in results.values() for line in failures(r))
    lines.append(f"more expensive than a stock policy at its memory: {num_expensive}")
    distances = {n: [d for m in r["plans"] if (d := distance_of(r, m)) is not None] for n, r in results.items()}
    lines += [f"{n}: {max(d):.1f} points over the lower bound" for n, d in distances.items() if d]
    return lines


def picture(results: dict[str, Any], path: str) -> None:
    """Added operations at the memory of rematerialized blocks: the blocks, the plans, the lower bound; a line a program."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.5, 0.34 * len(results) + 1.2), layout="constrained", facecolor="white")
    axes = figure.subplots()
    names = list(reversed(results))
    marks: dict[str, dict[str, Any]] = {
        "unmarked": {"marker": "D", "s": 34, "color": "#56b4e9"},
        "marked": {"marker": "o", "s": 80, "facecolor": "none", "edgecolor": "#0072b2", "lw": 1.5},
    }
    handles: dict[str, Any] = {}
    for y, name in enumerate(names):
        points = {m: at_blocks(results[name], m) for m in marks}
        blocks = 100 * results[name]["stock"][BLOCKS]["extra"]
        axes.plot([0, blocks], [y, y], color="#e5e7eb", lw=5, zorder=0, solid_capstyle="butt")
        handles[BLOCKS] = axes.scatter(blocks, y, marker="|", s=160, lw=2.5, color="#e69f00")
        for m, style in marks.items():
            if "error" in points[m]:
                offset = {"xytext": (8, -3), "textcoords": "offset points"}
                axes.annotate(f"no {m} plan", (blocks, y), **offset, fontsize=7, color="#c0392b")
            else:
                extra = 100 * points[m]["extra"]
                handles[f"plan, {m}"] = axes.scatter(extra, y, zorder=2, **style)
        if best := cheapest_at_blocks(results[name]):
            tick: dict[str, Any] = {"marker": "|", "s": 160, "lw": 1.5}
            handles["lower bound"] = axes.scatter(100 * best["bound"]["extra"], y, color="#111827", **tick)
            handles["lower bound with all that is measured"] = axes.scatter(
                100 * best["bound at all"], y, color="#9ca3af", **tick
            )
    axes.set_yticks(range(len(names)), names)
    axes.set_xlabel("added operations at the memory of rematerialized blocks, %")
    axes.set_xlim(-1, 1.1 * axes.get_xlim()[1])
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(handles.values(), handles, frameon=False, fontsize=8, loc="outside upper center", ncols=3)
    figure.savefig(path, metadata={"Date": None})


# -- running ---------------------------------------------------------------------------------------------------------


def in_own_process(name: str, flags: list[str]) -> dict[str, Any]:
    """`judge` in a process of its own; ``{"failed": ...}`` where it ends without a result."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "row.json"
        words = [sys.executable, __file__, "--one", name, "--json", str(path), *flags]
        own_cache = {**os.environ, "STATETX_CACHE": folder}  # no plan of an earlier run
        try:
            done = subprocess.run(words, capture_output=True, text=True, timeout=TIMEOUT, env=own_cache)
        except subprocess.TimeoutExpired:
            return {"failed": f"not done after {TIMEOUT} s"}
        if done.returncode:
            return {"failed": done.stderr[-2000:]}
        return json.loads(path.read_text())


def main() -> None:
    options = parse_args(
        __doc__ or "",
        only={"nargs": "+", "choices": list(ALL), "help": "these alone"},
        one={"choices": list(ALL), "help": argparse.SUPPRESS},
        brief={"action": "store_true", "help": "fewer budgets"},
        plot={"metavar": "PICTURE", "help": "draw added operations"},
    )
    if options.one:
        sizes = SMALL[options.one] if options.quick else {}
        options.json.write_text(json.dumps(judge(options.one, brief=options.brief, **sizes)))
        return
    env = environment()
    print(header(env))
    names = options.only or list(SMALL if options.quick else ALL)
    rows: dict[str, Any] = {}
    if options.json and options.json.exists():
        rows = json.loads(options.json.read_text()).get("programs", {})
    for name in (n for n in names if options.only or n not in rows):
        start = time.perf_counter()
        rows[name] = in_own_process(name, [f"--{f}" for f in ("quick", "brief") if getattr(options, f)])
        print(f"{name}: {time.perf_counter() - start:.0f} s", flush=True)
        lines = [rows[name]["failed"]] if "failed" in rows[name] else failures(rows[name])
        print("\n".join(f"  {line}" for line in lines), flush=True)
        if options.json:  # after each program: a later one may take too long
            write_json(options.json, env, {"programs": rows})
    results = {n: rows[n] for n in ALL if n in rows and "failed" not in rows[n]}
    for table in tables(results):
        show(*table)
    if options.json:
        write_json(options.json, env, {"programs": rows, "verdict": lines_of(results)})
    if options.plot and results:
        picture(results, options.plot)


if __name__ == "__main__":
    main()
