"""Training steps on an accelerator: time, peak memory and throughput of every way to save fewer residuals.

Compared
    A transformer (12 layers, width 768, 12 heads, 1,024 tokens, batch 8) and a gated recurrent model (16,384 steps, width
    512, batch 64); gradients of the loss with respect to all parameters. The transformer without rematerialization, with
    each stock policy on its blocks, with products offloaded to the host, and with plans for five budgets, as fractions of
    the memory it takes. The recurrent model with every step stored, in nested loops, by schedules of slots, by these with loops that run on
    the device alone, and with the nested loops' checkpoints in the host's memory.

Measured
    Each in its own process, one after the other, in three rounds: the median time of a step, ten steps after two
    to warm up (of slow ones fewer, for about four seconds); the peak bytes of the device (as its allocator reports; if it does not, as on CPUs, arguments,
    outputs and temporaries of the compiled program, which is what a plan predicts); tokens or steps of the sequence a second.
    Each plan is compared with the fastest stock policy that keeps its budget. Gradients are compared with the first
    implementation's.

The plans are searched first, at the same time, in processes of their own, and read from `STATETX_CACHE`. XLA's choices of
kernels are kept between processes, so that all implementations use the same ones.

With ``--json OUT`` each process's figures are written when it ends, and the same command goes on where it ended: with
``--limit 500`` it starts no process after 500 seconds.

It also runs on a CPU, with ``--quick``, at small sizes. Results are written with the device's name.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # this process only asks for the device's name

import jax
import jax.numpy as jnp
import numpy as np
import programs
from _common import environment, header, parse_args, show, write_json

import statetx
from statetx import policies
from statetx.policies import Levels, Slots

MIB = 2**20
BUDGETS = (0.9, 0.7, 0.5, 0.4, 0.3)  # of the temporary memory without rematerialization
STOCK = ("no remat", "nothing", "dots", "dots_without_batch_dims")
TRANSFORMER = {"layers": 12, "width": 768, "heads": 12, "time": 1024, "batch": 8}
QUICK_TRANSFORMER = {"layers": 2, "width": 64, "heads": 4, "time": 64, "batch": 2}
STEPS_FOR = 4.0  # seconds for the steps of a process
RECURRENT, QUICK_RECURRENT = (16_384, 512, 64), (256, 32, 4)  # steps, width, batch
TIME_LIMIT = 60.0  # seconds of planning
notes: dict[str, Any] = {}  # what this process found before it measured


def transformer(quick: bool, wrap: Callable = programs.identity) -> programs.Program:
    return programs.transformer(wrap, **(QUICK_TRANSFORMER if quick else TRANSFORMER))


def rematerialized(policy: Any) -> Callable[[bool], programs.Program]:
    return lambda quick: transformer(quick, lambda f: statetx.remat(f, policy=policy))


def planned(fraction: float) -> Callable[[bool], programs.Program]:
    def make(quick: bool) -> programs.Program:
        program = transformer(quick)
        options = {"budget": fraction, "of": "temporaries", "argnums": 0, "time_limit": TIME_LIMIT}
        plan = statetx.plan(program.loss, program.params, *program.data, **options)
        notes["planned"] = plan.temp_bytes
        return program._replace(loss=plan.apply(program.loss))

    return make


def recurrent(checkpoint: Any) -> Callable[[bool], programs.Program]:
    def make(quick: bool) -> programs.Program:
        steps, width, batch = QUICK_RECURRENT if quick else RECURRENT
        program = programs.recurrent(steps=steps, width=width, batch=batch)
        return program._replace(loss=lambda params, xs: loss(params, xs, width, batch))

    def loss(p: Any, xs: Any, width: int, batch: int) -> Any:
        def step(h: Any, x: Any) -> tuple[Any, Any]:
            gates = jax.nn.sigmoid(x @ p["x_gates"] + h @ p["h_gates"])
            z, r = jnp.split(gates, 2, -1)
            h = (1 - z) * h + z * jnp.tanh(x @ p["x_new"] + (r * h) @ p["h_new"])
            return h, (h @ p["out"]).mean(-1)

        _, ys = statetx.scan(step, jnp.zeros((batch, width)), xs, checkpoint=checkpoint)
        return (ys**2).mean()

    return make


IMPLEMENTATIONS: dict[str, dict[str, Callable[[bool], programs.Program]]] = {
    "transformer": {
        "no remat": transformer,
        "nothing": rematerialized("nothing"),
        "dots": rematerialized("dots"),
        "dots_without_batch_dims": rematerialized("dots_without_batch_dims"),
        "dots, offloaded": rematerialized(policies.offload(policies.dots, otherwise="save")),
        **{f"plan, {fraction:.0%}": planned(fraction) for fraction in BUDGETS},
    },
    "recurrent": {
        "plain": recurrent(None),
        "Levels(2)": recurrent(Levels(2)),
        "Slots(16)": recurrent(Slots(16)),
        "Slots(128)": recurrent(Slots(128)),
        "Slots(16), device loops": recurrent(Slots(16)),
        "Slots(128), device loops": recurrent(Slots(128)),
        "Levels(2), offloaded": recurrent(Levels(2, offload=True)),
    },
}


def tokens(kind: str, quick: bool) -> int:
    if kind == "transformer":
        sizes = QUICK_TRANSFORMER if quick else TRANSFORMER
        return sizes["time"] * sizes["batch"]
    steps, _, batch = QUICK_RECURRENT if quick else RECURRENT
    return steps * batch


def one(kind: str, name: str, quick: bool) -> dict[str, Any]:
    """Measure one implementation in this process."""
    program = IMPLEMENTATIONS[kind][name](quick)
    step = jax.jit(jax.value_and_grad(program.loss)).lower(program.params, *program.data).compile()
    memory = step.memory_analysis()
    value, grads = jax.block_until_ready(step(program.params, *program.data))
    sums = [float(jnp.abs(g).astype(jnp.float32).sum()) for g in jax.tree.leaves(grads)]
    del grads  # not in memory beside those of the next step
    times: list[float] = []
    begin = time.perf_counter()
    while len(times) < (4 if quick else 11) and (len(times) < 3 or time.perf_counter() - begin < STEPS_FOR):
        start = time.perf_counter()
        jax.block_until_ready(step(program.params, *program.data))
        times.append(time.perf_counter() - start)
    stats = jax.devices()[0].memory_stats() or {}
    compiled = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    return {
        "seconds": statistics.median(times[1:]),
        "peak": stats.get("peak_bytes_in_use", compiled),
        "predicted": compiled,
        "temporary": memory.temp_size_in_bytes,
        "loss": float(value),
        "gradients": sums,
        **notes,
    }


def start_process(option: str, kind: str, name: str, quick: bool) -> subprocess.Popen:
    """Start a process of this script for one implementation."""
    command = [sys.executable, __file__, option, kind, name] + (["--quick"] if quick else [])
    env = environment_of(name)
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)


def environment_of(name: str) -> dict[str, str]:
    """The environment variables of the process of an implementation."""
    caches = Path(tempfile.gettempdir()) / "statetx-gpu-benchmark"
    # By default XLA waits for the device before each turn of a loop of unknown length.
    flags = {"XLA_FLAGS": "--xla_gpu_enable_command_buffer=+WHILE"} if "device loops" in name else {}
    env = flags | {
        "STATETX_CACHE": str(caches / "plans"),
        "JAX_COMPILATION_CACHE_DIR": str(caches / "jax"),  # the choices of kernels
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "1e9",  # but no compiled program
    }
    return env | os.environ


def result(process: subprocess.Popen) -> dict[str, Any]:
    """Wait for a process: what it has printed, or its error."""
    out, err = process.communicate()
    if process.returncode:
        lines = err.strip().splitlines() or ["killed"]
        print("\n".join(lines[-12:]), file=sys.stderr, flush=True)
        raised = [line for line in lines if re.match(r"[\w.]+(Error|Exception): ", line)]
        return {"error": (raised or lines)[-1].rpartition("Error: ")[2]}
    return json.loads(out.splitlines()[-1])


COLUMNS = (
    "model and policy",
    "ms a step",
    "of the first",
    "peak MiB",
    "predicted MiB",
    "temporary MiB",
    "tokens or steps a second",
)


def rows(results: dict[str, dict[str, Any]], quick: bool = False) -> list[list[str]]:
    lines = []
    for kind, by_name in results.items():
        first = next((r["seconds"] for r in by_name.values() if "seconds" in r), 1.0)
        for name, r in by_name.items():
            if "error" in r:
                lines.append([f"{kind}: {name}", r["error"][:60], *[""] * (len(COLUMNS) - 2)])
                continue
            cells = [f"{1e3 * r['seconds']:.1f}", f"{r['seconds'] / first:.2f}", f"{r['peak'] / MIB:,.0f}"]
            cells += [
                f"{r['predicted'] / MIB:,.0f}",
                f"{r['temporary'] / MIB:,.1f}",
                f"{tokens(kind, quick) / r['seconds']:,.0f}",
            ]
            lines.append([f"{kind}: {name}", *cells])
    return lines


def verdicts(results: dict[str, dict[str, Any]]) -> list[str]:
    """Each plan beside the fastest stock policy that keeps its budget; the largest errors of predicted peaks."""
    good = {name: r for name, r in results.get("transformer", {}).items() if "error" not in r}
    lines = []
    for fraction in BUDGETS if "no remat" in good else ():
        name, budget = f"plan, {fraction:.0%}", fraction * good["no remat"]["temporary"]
        if name not in good:
            continue
        stock = {n: r["seconds"] for n, r in good.items() if n in STOCK and r["temporary"] <= budget}
        best = min(stock, key=lambda n: stock[n], default=None)
        beside = (
            "no stock policy keeps it"
            if best is None
            else f"{good[name]['seconds'] / stock[best]:.2f} of the time of {best}"
        )
        temporary = good[name]["temporary"]
        kept = "met" if temporary <= budget else "MISSED"
        lines.append(f"{name}: {temporary / MIB:,.0f} of {budget / MIB:,.0f} MiB, {kept}; {beside}")
    for kind, by_name in results.items():
        errors = {n: r["peak"] / r["predicted"] - 1 for n, r in by_name.items() if "error" not in r}
        if errors:
            worst = max(errors, key=lambda n: abs(errors[n]))
            lines.append(f"{kind}: peak of the device {errors[worst]:+.1%} of the prediction at most ({worst})")
    return lines


def summary(data: dict[str, Any]) -> str:
    """The figures that matter, for the page on performance."""
    models, device = data["results"], data["environment"]["device"]
    stock = {name: models["transformer"][name] for name in STOCK}
    plans = {name: r for name, r in models["transformer"].items() if name.startswith("plan, ")}
    plain = stock.pop("no remat")
    least = min(plans.values(), key=lambda r: r["temporary"])
    names = sorted(stock, key=lambda name: stock[name]["temporary"])
    loop = models["recurrent"]
    shown = ("plain", "Levels(2)", "Slots(128)", "Slots(16)")
    return "\n".join(
        [
            f"- **A transformer** of {TRANSFORMER['layers']} layers on an {device} takes {plain['temporary'] / MIB:,.0f} MiB of temporary "
            f"memory. Plans for five budgets, down to {least['temporary'] / MIB:,.0f} MiB, take "
            f"{min(r['seconds'] for r in plans.values()) / plain['seconds']:.2f} to "
            f"{max(r['seconds'] for r in plans.values()) / plain['seconds']:.2f} times the time; "
            + ", ".join(
                f"`{n}` {stock[n]['seconds'] / plain['seconds']:.2f} at {stock[n]['temporary'] / MIB:,.0f} MiB"
                for n in names
            )
            + ".",
            f"- **A loop** of {RECURRENT[0]:,} steps takes "
            + ", ".join(
                f"{loop[n]['temporary'] / MIB:,.0f} MiB and {loop[n]['seconds'] / loop['plain']['seconds']:.2f} times the time (`{n}`)"
                for n in shown
            )
            + ".",
        ]
    )


def picture(data: dict[str, Any], path: Path) -> None:
    """Time against temporary memory, of both models."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    grey, orange, teal = "#4b5563", "#a8500c", "#0e7386"
    figure = Figure(figsize=(6, 6.4), layout="constrained", facecolor="white")
    titles = (f"Transformer, {TRANSFORMER['layers']} layers", f"Gated recurrent model, {RECURRENT[0]:,} steps")
    for axes, (kind, by_name), title in zip(figure.subplots(2, 1), data["results"].items(), titles, strict=True):
        first = next(iter(by_name.values()))["seconds"]
        if kind == "recurrent":
            axes.set_xscale("log")
        for name, r in by_name.items():
            if "offloaded" in name or "error" in r:
                continue
            is_stock, is_first = name in STOCK, name in ("no remat", "plain")
            color = grey if is_first else orange if is_stock else teal
            point = r["temporary"] / MIB, r["seconds"] / first
            axes.scatter(*point, color=color, s=45, zorder=2)
            side = "right" if is_first else "left"
            offset = (-7, 6) if is_first else (7, 5) if is_stock or kind == "recurrent" else (3, -14)
            label = name.replace("plan, ", "plan " if name == f"plan, {BUDGETS[0]:.0%}" else "")
            axes.annotate(label, point, textcoords="offset points", xytext=offset, ha=side, fontsize=9, color=color)
        axes.set_xlabel("temporary memory, MiB")
        axes.set_ylabel("time of a step, relative")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,g}"))
        axes.set_title(title, loc="left", fontsize=11, weight="bold")
        axes.grid(color="#e5e7eb", zorder=0)
        axes.margins(0.12)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    one_of = {
        "nargs": 2,
        "metavar": ("KIND", "NAME"),
        "help": "measure one implementation in this process and print JSON",
    }
    make = {**one_of, "help": "make one implementation: the search of a plan, which is kept in STATETX_CACHE"}
    limit = {"type": float, "metavar": "SECONDS", "help": "start no further process after this time"}
    options = parse_args(__doc__ or "", one=one_of, make=make, limit=limit)
    if options.make:
        kind, name = options.make
        begin = time.perf_counter()
        IMPLEMENTATIONS[kind][name](options.quick)
        print(json.dumps({"seconds": time.perf_counter() - begin}))
        return
    if options.one:
        print(json.dumps(one(*options.one, options.quick)))
        return
    start = time.monotonic()
    env = environment() | {"device": jax.devices()[0].device_kind, "quick": options.quick}
    print(header(env))
    samples = earlier_samples(options.json, env)
    num_rounds = options.rounds or (1 if options.quick else 3)
    missing = [(k, n) for i in range(num_rounds) for k, names in samples.items() for n in names if len(names[n]) <= i]
    planned_later = [(k, n) for k, n in dict.fromkeys(missing) if n.startswith("plan, ")]
    for kind, name in missing:
        if options.limit is not None and time.monotonic() - start > options.limit:
            break
        if (kind, name) in planned_later:  # the first of them; the programs before it have chosen most kernels
            for (k, n), process in [(p, start_process("--make", *p, options.quick)) for p in planned_later]:
                done = result(process)
                print(f"{k}: {n}, {done.get('error') or format(done['seconds'], '.0f') + ' s to plan'}", flush=True)
                if "error" in done:
                    samples[k][n].append(done)
            planned_later = []
        if any("error" in sample for sample in samples[kind][name]):
            continue
        samples[kind][name].append(result(start_process("--one", kind, name, options.quick)))
        print(f"{kind}: {name}, {time.monotonic() - start:.0f} s", flush=True)
        if options.json:
            write_json(options.json, env, {"samples": samples})
    results = {kind: {n: merged(s) for n, s in by_name.items() if s} for kind, by_name in samples.items()}
    for kind, by_name in results.items():
        good = [r for r in by_name.values() if "error" not in r]
        for r in good:
            np.testing.assert_allclose(r["loss"], good[0]["loss"], rtol=1e-3, err_msg=kind)
            np.testing.assert_allclose(r["gradients"], good[0]["gradients"], rtol=1e-2, err_msg=kind)
    show("On " + env["device"], COLUMNS, rows(results, options.quick))
    verdict = verdicts(results)
    print("\n".join(verdict))
    if options.json:
        write_json(options.json, env, {"samples": samples, "results": results, "verdict": verdict})


def earlier_samples(path: Path | None, env: dict[str, Any]) -> dict[str, dict[str, list]]:
    """What an earlier run has written, if it ran on the same device with the same versions, apart from the date."""
    samples: dict[str, dict[str, list]] = {kind: {n: [] for n in by_name} for kind, by_name in IMPLEMENTATIONS.items()}
    if path is None or not path.exists():
        return samples
    written = json.loads(path.read_text())
    if {**written["environment"], "date": env["date"]} != env:
        raise SystemExit(f"{path} is from another device or version: name another file")
    for kind, by_name in samples.items():
        for name in by_name:
            by_name[name] += written["samples"].get(kind, {}).get(name, [])
    return samples


def merged(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Merge samples of several processes: the median time, the least peak, the first sample's other figures.

    The peak of the first process can be that of the buffers in which XLA times kernels; later ones read its choices.
    """
    failed = [s for s in samples if "error" in s]
    if failed:
        return failed[0]
    return {
        **samples[0],
        "seconds": statistics.median(s["seconds"] for s in samples),
        "peak": min(s["peak"] for s in samples),
    }


if __name__ == "__main__":
    main()
