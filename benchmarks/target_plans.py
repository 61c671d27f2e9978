"""Plans for a CPU, an H100 and a TPU v5e: budgets, operations, compilations and the time of planning.

Programs
    The nine of ``programs.py``, those of ``models.py``, which are written with other libraries, those of ``unseen_models.py``, the transformer of 12
    layers of ``gpu.py``, and three of real size in bfloat16. Each is planned for three budgets of temporary memory: what it takes with the policy "dots" on
    its blocks, with its blocks rematerialized (each a thousandth more), and half of what it takes without rematerialization. Their blocks are marked by
    `statetx.remat`; with ``--unmarked``, and in the transformer of ``gpu.py``, they are not.

Measured
    Each plan in a process of its own. The budget is kept if the gradient of the planned loss, compiled as its user compiles it, keeps it. Operations
    are counted from the equations and compared with the program without rematerialization; seconds of a step are XLA's estimate, and kernels
    and the bytes that they move are counted in the compiled program (``kernels.py``). Compilations are all that planning takes, those of parts of the
    program too; the time of planning is the CPU time of all threads, and the time that passed, on a machine that may be busy. The time limit is
    generous, so that plans do not depend on the machine; rows of more than 60 seconds are those that the default limit may end.

The rows of the file given by ``--json`` are kept: an interrupted run goes on, and with ``--limit 500`` it starts no process after 500 seconds. For
GPUs and TPUs it needs ``pip install ".[target-cuda,target-tpu]"``. ``--device cpu`` plans for this machine. ``--without copies`` leaves a treatment of the
planner out; with ``--used benchmarks/results/target_plans.json`` of those plans alone that consist of it. The rows of each treatment have a title of their own in
``benchmarks/results/target_plans_ablation.json``.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gpu
import jax
import jax.numpy as jnp
import kernels
import programs
from _common import environment, header, parse_args, show, write_json
from lower_bound import LowerBound
from models import MODELS, Model, of_program
from unseen_models import UNSEEN, diffusion
from whole_plans import error_of, mib, percent

import statetx
from statetx._equations.compiled import Program
from statetx._targets import current, plugins
from statetx.planner import Planner
from statetx.planner._program.values import InFormat
from statetx.planner._treatments import TREATMENTS
from statetx.planner._treatments.copies import Copies
from statetx.planner._treatments.groups import Groups, InGroups
from statetx.planner._treatments.inner_gradients import PLAIN
from statetx.planner._treatments.loops import CheckpointedLoop
from statetx.residuals.measure import array_program

DEVICES = ("h100", "tpu v5e", "cpu")
BLOCKS = "remat on the blocks"
POLICIES = {BLOCKS: "nothing", "dots on the blocks": "dots"}
BUDGETS = (*POLICIES, "half")
TIME_LIMIT, TIMEOUT = 3000.0, 3600
LONG = "transformer, 12 layers"

ALL: dict[str, Callable[..., Model]] = {
    **{
        name: (lambda *args, make=make, **sizes: of_program(make(*args, **sizes)))
        for name, make in programs.PROGRAMS.items()
    },
    **MODELS,
    **UNSEEN,
    LONG: lambda wrap=programs.identity, **sizes: _of_types(lambda: gpu.transformer(bool(sizes), wrap)),
    "transformer, 12 layers of 1,024, bfloat16": lambda wrap=programs.identity, **sizes: _in_bfloat16(
        lambda: programs.transformer(wrap, **{"layers": 12, "width": 1024, "time": 2048, "batch": 4, **sizes})
    ),
    "convolutional net at 224, bfloat16": lambda wrap=programs.identity, **sizes: _in_bfloat16(
        lambda: programs.conv_net(wrap, **{"layers": 12, "channels": 64, "size": 224, "batch": 16, **sizes})
    ),
    "diffusion U-Net at 64, bfloat16": lambda wrap=programs.identity, **sizes: _in_bfloat16(
        lambda: diffusion(wrap, **{"levels": 3, "channels": 128, "size": 64, "batch": 16, "heads": 8, **sizes})
    ),
}
UNMARKED = (LONG,)
QUICK: dict[str, dict[str, int]] = {
    "MLP": {"layers": 2, "width": 128, "batch": 1024},
    "graph network": {"layers": 2, "width": 16, "nodes": 64, "edges": 512},
}


def _of_types(make: Callable[[], programs.Program]) -> Model:
    loss, params, data = programs.of_types(make)
    return Model(loss, params, data, loss, (params, *data))


def _in_bfloat16(make: Callable[[], Any]) -> Model:
    """A program of real size: the types of its parameters and data, floats of 16 bits."""
    model = _of_types(make)
    narrow = lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16 if x.dtype == jnp.float32 else x.dtype)
    params, data = jax.tree.map(narrow, (model.params, model.data))
    return model._replace(params=params, data=data, step_args=(params, *data))


# -- treatments that can be left out ---------------------------------------------------------------------------------


_planner = sys.modules["statetx.planner.planner"]

WITHOUT: dict[str, Callable[[dict[str, Any]], None]] = {
    "copies": lambda options: _drop(options, Copies),
    "groups": lambda options: _drop(options, InGroups),
    "stored": lambda options: options.update(stored_as=()),
}


def _drop(options: dict[str, Any], treatment: type) -> None:
    options["treatments"] = tuple(t for t in options.get("treatments", TREATMENTS) if t is not treatment)


def used(plan: statetx.Plan) -> list[str]:
    """The treatments that a plan consists of."""
    found = {"inner gradients"} if plan.variant not in (None, PLAIN) else set()
    for gradient in plan.gradients:
        for decision in gradient.decisions:
            loop = decision.get(CheckpointedLoop)
            is_stored = any(isinstance(way, InFormat) for _, way in decision.saved or ())
            is_stored |= loop is not None and bool(loop.carries)
            found |= {"copies"} if decision.get(Copies) is not None else set()
            found |= {"stored"} if is_stored else set()
            found |= {"groups"} if loop is not None and isinstance(loop.strategy, Groups) else set()
    return sorted(found)


# -- one row, in a process of its own --------------------------------------------------------------------------------


def program_of(model: Model, loss: Callable) -> Program:
    """The value and the gradient, to be compiled for the target."""
    whole = array_program("target_plans", statetx.value_and_grad(loss), (model.params, *model.data), {}, gradient=False)
    return whole.for_types(whole.arrays, None, estimates=True)


def cost_of(model: Model, loss: Callable) -> dict[str, Any]:
    """What the user's program takes: the value and the gradient, compiled for the target."""
    program = program_of(model, loss)
    cost, moved = program.cost_on_device, kernels.traffic(program.compiled) if current.platform() == "gpu" else None
    found = {"bytes": cost.temp_bytes, "flops": cost.flops, "seconds": cost.seconds}
    return found | ({} if moved is None else {"kernels": moved.kernels, "tiled": moved.tiled, "moved": moved.num_bytes})


def reference(name: str, title: str, **sizes: int) -> dict[str, Any]:
    """The program without rematerialization, or with a policy on its blocks."""
    wrap = functools.partial(statetx.remat, policy=POLICIES[title]) if title in POLICIES else programs.identity
    return cost_of(model := ALL[name](wrap, **sizes), model.loss)


@contextlib.contextmanager
def counted() -> Iterator[list[float]]:
    """The seconds of each compilation within, by XLA's own account."""
    seconds: list[float] = []

    def note(event: str, duration: float, **_: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            seconds.append(duration)

    jax.monitoring.register_event_duration_secs_listener(note)
    yield seconds
    jax.monitoring.unregister_event_duration_listener(note)


def cpu_seconds() -> float:
    """Of all threads, and of ended processes, such as assemblers."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def planned(
    name: str,
    budget: int,
    base_flops: int,
    marked: bool,
    options: dict[str, Any] | None = None,
    **sizes: int,
) -> dict[str, Any]:
    model = ALL[name](*[statetx.remat] * marked, **sizes)
    row: dict[str, Any] = {"budget": budget}
    begin, cpu = time.perf_counter(), cpu_seconds()
    with counted() as compilations:
        try:
            more = {"of": "temporaries", "argnums": 0, "time_limit": TIME_LIMIT, **(options or {})}
            plan = Planner(model.loss, model.params, *model.data, **more).plan(budget)
        except statetx.PlanError as e:
            row |= error_of(e)
        row |= {"wall": time.perf_counter() - begin, "cpu": cpu_seconds() - cpu}
    row |= {"compilations": len(compilations), "compiling": sum(compilations)}
    if "error" in row:
        return row
    own = cost_of(model, plan.apply(model.loss))
    row |= {**own, "extra": own["flops"] / base_flops - 1}
    row |= {"planned bytes": plan.temp_bytes, "planned extra": plan.extra_flops, "stock": plan.stock}
    row |= {"candidates": len(plan.measured), "complete": plan.complete, "uses": used(plan)}
    within = [seconds for name, num_bytes, seconds in plan.timed if name != "plan" and num_bytes <= budget]
    row |= {"fastest policy": min(within, default=None)}
    if current.platform() == "tpu":  # it does not hold there
        return row
    bound = LowerBound(model.loss, model.params, *model.data).operations_at(budget)
    return row | {"bound": bound if bound > 0 else None}


def one(spec: dict[str, Any]) -> dict[str, Any]:
    """A plan, and the references that are not known yet; of these nothing is kept that would make planning faster."""
    name, title, sizes, refs = spec["program"], spec["budget"], spec["sizes"], spec["references"]
    with contextlib.ExitStack() as stack:
        options: dict[str, Any] = {}
        for treatment in spec["without"]:
            WITHOUT[treatment](options)
        stack.enter_context(statetx.target(None if spec["device"] == "cpu" else spec["device"]))
        for needed in ("no remat", title):
            if needed not in refs and needed != "half":
                refs[needed] = reference(name, needed, **sizes)
        statetx.clear_cache()
        jax.clear_caches()
        plugins._kernel_files.cache_clear()
        plan = planned(name, budget_of(refs, title), refs["no remat"]["flops"], spec["marked"], options, **sizes)
        return {"references": refs, "plan": plan}


def in_own_process(spec: dict[str, Any]) -> dict[str, Any]:
    """`one` in a process of its own; ``{"failed": ...}`` where it ends without a result."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "row.json"
        words = [sys.executable, __file__, "--one", json.dumps(spec), "--json", str(path)]
        environ = {**os.environ, "STATETX_CACHE": ""}  # plans are made, not read
        try:
            done = subprocess.run(words, capture_output=True, text=True, timeout=TIMEOUT, env=environ)
        except subprocess.TimeoutExpired:
            return {"failed": f"not done after {TIMEOUT} s"}
        return json.loads(path.read_text()) if not done.returncode else {"failed": done.stderr[-1000:]}


# -- tables ----------------------------------------------------------------------------------------------------------

COLUMNS = (
    "program and budget",
    "no remat (MiB)",
    "budget (MiB)",
    "plan (MiB)",
    "added operations",
    "the policy's",
    "lower bound",
    "estimated time",
    "of the policy's",
    "bytes moved",
    "the policy's",
    "tiled kernels",
)


def budget_of(found: dict[str, Any], title: str) -> int:
    """A thousandth above the policy: a plan with the same values may take some hundred bytes more, of scalars and tables."""
    return found["no remat"]["bytes"] // 2 if title == "half" else int(1.001 * found[title]["bytes"])


def row_title(program: str, budget: str) -> str:
    return f"{program}: {budget.removesuffix(' on the blocks')}"


def in_mib(num_bytes: int) -> str:
    return mib(num_bytes).removesuffix(" MiB")


def is_kept(row: dict[str, Any]) -> bool:
    return row["bytes"] <= row["budget"]


def rows(by_program: dict[str, dict[str, Any]]) -> list[list[str]]:
    """The rows of one device."""
    lines = []
    for name, found in by_program.items():
        refs = found["references"]
        base = refs.get("no remat", {})
        for title in BUDGETS:
            row = found["plans"].get(title)
            if row is None:
                continue
            if "failed" in row:
                lines.append([row_title(name, title), *[""] * 2, "did not end", *[""] * (len(COLUMNS) - 4)])
                continue
            is_first = title == next(b for b in BUDGETS if b in found["plans"])
            cells = [row_title(name, title), in_mib(base["bytes"])] if is_first else [title, ""]
            policy = percent(refs[title]["flops"] / base["flops"] - 1) if title in refs else ""
            time_text = ""
            if row.get("seconds") and base["seconds"]:
                time_text = f"{row['seconds'] / base['seconds']:.2f}"
            policy_seconds = row.get("fastest policy") or refs.get(title, {}).get("seconds")
            beside = f"{row['seconds'] / policy_seconds:.2f}" if policy_seconds and row.get("seconds") else ""
            smallest = row.get("smallest")
            plan = in_mib(row["bytes"]) if "bytes" in row else f"≥ {in_mib(smallest)}" if smallest else "none"
            extra = percent(row["extra"]) if "extra" in row else ""
            bound = percent(row["bound"]) if row.get("bound") else ""
            plan += "" if "error" in row or is_kept(row) else ", too much"
            moved = [f"{x['moved'] / base['moved']:.2f}" if "moved" in x else "" for x in (row, refs.get(title, {}))]
            tiled = f"{row['tiled']}/{base['tiled']}" if "tiled" in row and row["tiled"] + base["tiled"] else ""
            cells += [in_mib(row["budget"]), plan, extra, policy, bound, time_text, beside]
            lines.append([*cells, *moved, tiled])
    return lines


ABLATION_COLUMNS = (
    "left out",
    "program and budget",
    "added operations with it",
    "without it",
    "kept without it",
    "compilations with it",
    "without",
)


def ablation_rows(results: dict[str, dict[str, Any]]) -> list[list[str]]:
    """The rows of plans without a treatment beside those of the same plans with all of them, which have the device as title."""
    lines = []
    for of_rows, by_program in results.items():
        device, _, treatment = of_rows.partition(" without ")
        if not treatment:
            continue
        for name, found in by_program.items():
            for title, row in found["plans"].items():
                full, is_made = results[device][name]["plans"][title], "bytes" in row
                kept = "yes" if is_made and is_kept(row) else "NO"
                extra = percent(row["extra"]) if is_made else "no plan"
                cells = [treatment, f"{name}: {title}", percent(full["extra"]), extra, kept]
                lines.append([*cells, str(full["compilations"]), str(row["compilations"])])
    return lines


def treatments(results: dict[str, dict[str, Any]]) -> list[str]:
    """How many plans for each device consist of each treatment."""
    lines = []
    for device, by_program in results.items():
        uses = [row["uses"] for found in by_program.values() for row in found["plans"].values() if "uses" in row]
        counts = {name: sum(name in used for used in uses) for name in (*WITHOUT, "inner gradients")}
        text = ", ".join(f"{name} {num}" for name, num in counts.items())
        if uses:
            lines.append(f"{device}: treatments in {len(uses)} plans: {text}")
    return lines


def verdicts(results: dict[str, dict[str, dict[str, Any]]]) -> list[str]:
    lines = []
    for device, by_program in results.items():
        done = [row for found in by_program.values() for row in found["plans"].values()]
        made = [row for row in done if "bytes" in row]
        if not made:
            continue
        expensive = [
            (name, title)
            for name, found in by_program.items()
            for title, row in found["plans"].items()
            if title in found["references"] and "extra" in row
            if row["extra"] > found["references"][title]["flops"] / found["references"]["no remat"]["flops"] - 1 + 1e-6
        ]
        lines.append(
            f"{device}: {sum(map(is_kept, made))} of {len(made)} plans keep their budgets, {len(done) - len(made)} budgets have no plan; a median of {percent(statistics.median(r['extra'] for r in made))} "
            f"operations added; {sum(r['complete'] for r in made)} of {len(made)} searches complete; {statistics.median(r['cpu'] for r in made):.0f} CPU seconds and "
            f"{statistics.median(r['compilations'] for r in made):.0f} compilations at the median, {max(r['cpu'] for r in made):.0f} and "
            f"{max(r['compilations'] for r in made)} at most; more expensive than the policy at its memory: {len(expensive)}"
        )
    return lines


# -- running ---------------------------------------------------------------------------------------------------------


def main() -> None:
    options = parse_args(
        __doc__ or "",
        only={"nargs": "+", "choices": list(ALL), "help": "these programs alone"},
        device={"nargs": "+", "choices": DEVICES, "default": ["h100", "tpu v5e"], "help": "default: %(default)s"},
        budget={"nargs": "+", "choices": BUDGETS, "default": list(BUDGETS), "help": "these budgets alone"},
        without={"nargs": "+", "choices": list(WITHOUT), "default": [], "help": "leave out treatments of the planner"},
        used={
            "metavar": "FILE",
            "help": "the plans alone that consist of the treatments left out, by the rows of this file",
        },
        unmarked={"action": "store_true", "help": "blocks are not marked"},
        limit={"type": float, "metavar": "SECONDS", "help": "start no further process after this time"},
        one={"metavar": "SPEC", "help": argparse.SUPPRESS},
    )
    if options.one:
        options.json.write_text(json.dumps(one(json.loads(options.one))))
        return
    start = time.monotonic()
    env = environment() | {"unmarked": options.unmarked, "quick": options.quick}
    print(header(env))
    results: dict[str, Any] = {}
    if options.json and options.json.exists():
        written = json.loads(options.json.read_text())
        if {**written["environment"], "date": env["date"], "cpus": env["cpus"]} != env:
            raise SystemExit(f"{options.json} is from another version or with other options: name another file")
        results = written["results"]
    names = options.only or list(QUICK if options.quick else ALL)
    with_them = json.loads(Path(options.used).read_text())["results"] if options.used else None

    for title in options.budget:
        for name in names:
            for device in options.device:
                if options.limit is not None and time.monotonic() - start > options.limit:
                    break
                if with_them is not None:
                    row = with_them.get(device, {}).get(name, {"plans": {}})["plans"].get(title, {})
                    if not set(options.without) <= set(row.get("uses", ())):
                        continue
                title_of_rows = f"{device} without {' and '.join(options.without)}" if options.without else device
                found = results.setdefault(title_of_rows, {}).setdefault(name, {"references": {}, "plans": {}})
                spec = {"device": device, "program": name, "sizes": QUICK.get(name, {}) if options.quick else {}}
                spec |= {"without": options.without, "marked": not options.unmarked and name not in UNMARKED}
                if "failed" not in found["plans"].get(title, {"failed": True}):
                    continue
                done = in_own_process(spec | {"budget": title, "references": found["references"]})
                found["references"] |= done.get("references", {})
                found["plans"][title] = done.get("plan", done)
                tail = done.get("failed", "").strip().splitlines()[-1:]
                print(f"{device}, {name}, {title}: {time.monotonic() - start:.0f} s", *tail, flush=True)
                if options.json:  # after each row: a later one may take too long
                    write_json(options.json, env, {"results": results, "verdict": verdicts(results)})
    for device, by_program in results.items():
        show(f"For {device}", COLUMNS, rows(by_program))
    print("\n".join(verdicts(results)))


if __name__ == "__main__":
    main()
