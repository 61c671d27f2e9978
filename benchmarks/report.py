"""Write the pages of numbers from results: ``python benchmarks/report.py [FOLDER]``.

The results of every benchmark are committed in ``benchmarks/results``, without single samples. Given a FOLDER of newer
ones (``out/bench``), its files replace those. Then each section of a page, between ``<!-- name -->`` and
``<!-- end name -->``, is written from the results, and so are the charts: docs/performance.md, docs/comparison.md and
docs/benchmarks. ``--show NAME`` prints all figures of a benchmark. ``tests/test_figures.py`` compares pages and
results.

``demo.json`` is ``results.json`` of ``make demo`` with the figures that ``docs/demo_figure.py`` adds; ``sharding.json``
is that of ``examples/train_multihost.py``, and ``spiking_deep.json`` that of ``examples/spiking_deep.py``.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
DOCS = HERE.parent / "docs"
RESULTS = HERE / "results"
IMAGES = DOCS / "images"
sys.path.insert(0, str(HERE))

from _common import header, markdown_table, renew_section  # noqa: E402

MIB = 2**20
PAGES = [
    DOCS / "performance.md",
    DOCS / "comparison.md",
    DOCS / "how-to" / "sharding-table.md",
    DOCS / "how-to" / "spiking-networks.md",
    DOCS / "spiking.md",
    DOCS / "migrate" / "programs.md",
    *sorted((DOCS / "benchmarks").glob("*.md")),
]


@functools.cache
def load(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text())


@functools.cache
def module(name: str) -> Any:
    """A benchmark's module; some import the libraries that they compare."""
    # Not by its plain name, which one of them shares with a module of the tests.
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", HERE / f"{name}.py")
    assert spec is not None and spec.loader is not None
    loaded = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def keep(folder: Path) -> None:
    """Copy results, without samples and with seven digits."""
    RESULTS.mkdir(exist_ok=True)
    for path in sorted(folder.glob("*.json")):
        # The loops' verdicts compare samples, and the page on devices shows a loss.
        dropped = {"loops": ("losses",), "sharding": ("samples",)}.get(path.stem, ("losses", "samples"))
        (RESULTS / path.name).write_text(json.dumps(trimmed(json.loads(path.read_text()), dropped), indent=1) + "\n")


def trimmed(data: Any, dropped: Sequence[str]) -> Any:
    if isinstance(data, dict):
        return {key: trimmed(value, dropped) for key, value in data.items() if key not in dropped}
    if isinstance(data, list):
        return [trimmed(value, dropped) for value in data]
    return float(f"{data:.7g}") if isinstance(data, float) else data


# -- logs: all figures of a benchmark ------------------------------------------------------------------------------


def wide(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table with a sticky head; verdicts in it have a color."""
    return (
        f'<div class="wide" markdown>\n\n{markdown_table(columns, [[marked(c) for c in row] for row in rows])}\n\n'
        f"</div>"
    )


def marked(cell: str) -> str:
    cell = re.sub(r"^([\d.,]+) to ([\d.,]+)$", "\\1\N{EN DASH}\\2", cell)
    classes = {"met": "ok", "yes": "ok", "MISSED": "wrong", "NO": "wrong"}
    return f"{cell.lower()} {{.{classes[cell]}}}" if cell in classes else cell


def verdicts(lines: Sequence[str]) -> str:
    """A list of figures against their limits."""
    lines = [re.sub(r"\bmet\b", "*met*{.ok}", line) for line in lines]
    return "\n".join(f"- {re.sub('MISSED', '*missed*{.wrong}', line)}" for line in lines)


def log(name: str, tables: Callable[[Any, dict[str, Any]], list[tuple[Sequence[str], Sequence[Sequence[str]]]]]) -> str:
    data = load(name)
    rounds = f"; {data['rounds']} rounds" if "rounds" in data else ""
    parts = [f"Measured by `python benchmarks/{name}.py`: {header(data['environment'])}{rounds}."]
    parts += [wide(*table) for table in tables(module(name), data["results"])]
    return "\n\n".join([*parts, verdicts(data["verdict"])])


def log_loops() -> str:
    data = load("loops")
    parts = [f"Measured by `python benchmarks/loops.py`: {header(data['environment'])}."]
    for name, (title, _, describe) in module("loops").SECTIONS.items():
        if name not in data:  # a run of some sections alone
            continue
        columns, rows, lines = describe(data[name]["results"])
        parts += [f"## {title}", wide(columns, rows), verdicts(lines)]
    return "\n\n".join(part for part in parts if part)


def log_planner() -> str:
    data, planner = load("planner"), module("planner")
    tables = [*planner.tables(data["programs"]), planner.fence_table(data["fence"]), planner.scale_table(data["scale"])]
    parts = [f"Measured by `python benchmarks/planner.py`: {header(data['environment'])}."]
    for title, columns, rows in tables:
        parts += [f"## {title}", wide(columns, rows)]
    return "\n\n".join(parts)


def log_whole_plans() -> str:
    data, whole_plans = load("whole_plans"), module("whole_plans")
    parts = [f"Measured by `python benchmarks/whole_plans.py`: {header(data['environment'])}."]
    for title, columns, rows in whole_plans.tables(data["programs"]):
        parts += [f"## {title}", wide(columns, rows)]
    return "\n\n".join([*parts, verdicts(data["verdict"])])


def log_target_plans_ablation() -> str:
    data, target_plans, plans = load("target_plans_ablation"), module("target_plans"), load("target_plans")["results"]
    made_by = f"Measured by `python benchmarks/target_plans.py --without ...`: {header(data['environment'])}."
    table = wide(target_plans.ABLATION_COLUMNS, target_plans.ablation_rows(data["results"]))
    return "\n\n".join([made_by, table, verdicts(target_plans.treatments(plans))])


def log_target_plans() -> str:
    data, target_plans = load("target_plans"), module("target_plans")
    parts = [f"Measured by `python benchmarks/target_plans.py`: {header(data['environment'])}."]
    for device, by_program in data["results"].items():
        parts += [f"## For {device}", wide(target_plans.COLUMNS, target_plans.rows(by_program))]
    return "\n\n".join([*parts, verdicts(data["verdict"])])


# -- the page on performance: the figures that matter --------------------------------------------------------------


def median(result: dict[str, Any], what: str = "cpu_ratio") -> float:
    return result[what]["median"]


def mib(num_bytes: float) -> str:
    value = num_bytes / MIB
    return f"{value:,.0f} MiB" if value >= 100 else f"{value:.1f} MiB" if value >= 10 else f"{value:.2f} MiB"


def summary() -> str:
    """Five sentences."""
    demo, planner, loops = load("demo"), load("planner"), load("loops")
    plain, scheduled = demo["runs"]["plain"], demo["runs"]["scheduled"]
    same = demo["comparisons"]["scheduled"]
    assert same["loss_difference"] == same["weight_difference"] == 0
    before, stock, ours = planner["fence"]["MLP"]
    gru = loops["gru"]["results"]
    slots, equinox = gru["statetx Slots(90)"], gru["equinox, 90"]
    train = load("bench_dispatch")["results"]["train"]
    sizes = [size for size in train if "nnx.jit" in train[size]]
    names = module("bench_dispatch")
    span = lambda name: " to ".join(f"{pick(median(train[s][name]) for s in sizes):.2f}" for pick in (min, max))
    trace = load("bench_trace")["results"]
    first = module("bench_trace")
    lines = [
        f"**The demo.** `checkpoint={scheduled['checkpoint']}` trains a GRU through {demo['options']['seq']:,} steps "
        f"in "
        f"{mib(scheduled['temporary_bytes'])} of temporary memory instead of {mib(plain['temporary_bytes'])} "
        f"(1/{plain['temporary_bytes'] / scheduled['temporary_bytes']:.0f}), with {demo['step_runs']['scheduled']:.2f} "
        f"runs of each step instead of 1 and {demo['time']['scheduled']:.2f} times the time; losses and weights are "
        f"the same, bit for bit.",
        f"**Blocks on a CPU.** An MLP of 12 blocks takes {mib(before)} without rematerialization, {mib(stock)} with "
        f"`jax.checkpoint`, "
        f"whose recomputation XLA before jaxlib 0.11.1 merges with the forward pass on CPUs, and {mib(ours)} with "
        f"`statetx.remat`.",
        f"**Loops.** Through 4,096 steps of a GRU, `Slots(90)` takes {mib(slots['bytes'])} instead of "
        f"{mib(gru['plain scan']['bytes'])}, "
        f"at {median(slots):.2f} times the CPU time of a plain scan; equinox's checkpointed loop with as many slots "
        f"takes "
        f"{mib(equinox['bytes'])} at {median(equinox):.2f} times.",
        f"**Calls.** A compiled training step with {int(sizes[0]):,} to {int(sizes[-1]):,} states costs "
        f"{span(names.STATETX)} times a call of "
        f"`jax.jit` with the states passed by hand ({span(names.EQUINOX)} with equinox, {span(names.BRAINSTATE)} "
        f"with brainstate, "
        f"{span(names.NNX)} with nnx).",
        f"**Tracing.** Tracing and lowering 24 blocks under `statetx.remat` takes {median(trace[first.CLEARED]):.2f} "
        f"of the time of "
        f"`jax.checkpoint` on closures ({median(trace[first.EQUINOX]):.2f} with equinox, "
        f"{median(trace[first.BRAINSTATE]):.2f} with "
        f"brainstate, {median(trace[first.NNX]):.2f} with nnx).",
    ]
    return "\n".join(f"- {line}" for line in lines)


def summary_memory() -> str:
    _, columns, rows = module("planner").fence_table(load("planner")["fence"])
    return wide(columns, rows)


def without_repeats(rows: list[list[str]]) -> list[list[str]]:
    """Rows that name their program in the first one of it alone."""
    programs = ["", *(row[0] for row in rows)]
    return [[row[0] if row[0] != previous else "", *row[1:]] for row, previous in zip(rows, programs, strict=False)]


def summary_loops() -> str:
    loops = load("loops")
    rows = []
    for title, name in (("GRU, 4,096 steps", "gru"), ("LIF, 4,096 steps", "lif"), ("256 layers", "stack")):
        for who, r in loops[name]["results"].items():
            if "Slots" in who or who.startswith(("plain", "equinox", "jax.checkpoint", "brainstate", "flax")):
                rows.append([title, who, mib(r["bytes"]), f"{median(r):.2f}"])
    return wide(("program", "implementation", "temporary memory", "CPU time of plain"), without_repeats(rows))


def summary_plans() -> str:
    (_, columns, rows), *_ = module("whole_plans").tables(load("whole_plans")["programs"])
    return wide(columns, rows)


def summary_microbatches() -> str:
    of_microbatches = module("microbatch")
    chosen = [
        of_microbatches.COLUMNS.index(name) for name in ("program", "implementation", "of full batch", "CPU of by hand")
    ]
    pick = lambda row: [row[i] for i in chosen]
    rows = [pick(row) for row in of_microbatches.rows(load("microbatch")["results"])]
    return wide(pick(of_microbatches.COLUMNS), without_repeats(rows))


def met_budgets() -> str:
    programs = load("planner")["programs"].values()
    points = [p for r in programs for p in r["points"]]
    met = sum(p["bytes"] <= p["budget"] for p in points)
    extras = [min(p["extra"] for p in r["points"] if p["budget"] <= 2 / 3 * r["bytes"]) for r in programs]
    return (
        f"{met} of {len(points)} budgets are met by the compiled programs. Within two thirds of the memory without "
        f"rematerialization, plans add {100 * min(extras):.1f} to {100 * max(extras):.1f}% operations."
    )


def summary_trace() -> str:
    trace = module("bench_trace")
    names = {
        trace.FRESH: "`jax.checkpoint`, closures",
        trace.SHARED: "`jax.checkpoint`, one function object",
        trace.CLEARED: "`statetx.remat`, first trace",
        trace.WARM: "`statetx.remat`, later trace",
        trace.NNX: "flax.nnx",
        trace.EQUINOX: "equinox",
        trace.BRAINSTATE: "brainstate",
        trace.HAIKU: "haiku",
        trace.LINEN: "flax.linen",
    }
    results = load("bench_trace")["results"]
    rows = [
        [label, f"{1e3 * median(results[name], 'cpu'):.0f}", f"{median(results[name]):.2f}"]
        for name, label in names.items()
    ]
    return wide(("implementation", "CPU ms", "ratio"), rows)


def summary_dispatch() -> str:
    train = load("bench_dispatch")["results"]["train"]
    sizes = [size for size in train if "nnx.jit" in train[size]]
    columns = ["training step", *(f"{int(size):,} states" for size in sizes)]
    rows = [[name, *(f"{median(train[size][name]):.2f}" for size in sizes)] for name in train[sizes[0]]]
    return wide(columns, rows)


def summary_eager() -> str:
    results = load("bench_eager")["results"]
    names = list(next(iter(results.values())))
    rows = [[name, *(f"{median(calls[name]):,.2f}" for calls in results.values())] for name in names]
    return wide(("call", *results), rows)


def summary_transforms() -> str:
    of_transforms = module("bench_transforms")
    results = {n: r for n, r in load("bench_transforms")["results"].items() if n != "no transform"}
    ratios = sorted((median(r[of_transforms.CLEARED], "wall_ratio"), name) for name, r in results.items())
    met = sum(ratio <= of_transforms.TARGET for ratio, _ in ratios)
    for r in results.values():
        assert all(r[of_transforms.TWIN][what] == r[of_transforms.CLEARED][what] for what in ("runs", "equations"))
    (low, _), (middle, _), (high, worst) = ratios[0], ratios[len(ratios) // 2], ratios[-1]
    return (
        f"The first trace takes {low:.2f} to {high:.2f} times that of the same program with states threaded by hand "
        f"in plain JAX "
        f"(median {middle:.2f}, slowest `{worst}`); {met} of {len(ratios)} transforms are within the limit of "
        f"{of_transforms.TARGET}. "
        "Bodies run as often as in plain JAX, and the jaxprs have as many equations."
    )


def summary_import() -> str:
    figures = load("bench_import")["figures"]
    alone, used = (figures[f"import statetx{what}, of import jax"]["median"] for what in ("", " with its transforms"))
    return (
        f"`import statetx` takes {alone:.2f} times the CPU time of `import jax`, and {used:.2f} times with its "
        f"transforms loaded, "
        "which happens on first use. brainstate, flax, scipy, rich, matplotlib, optax and orbax are not imported."
    )


def summary_scale() -> str:
    figures = load("bench_scale")["figures"]
    show = lambda name: f"{figures[name]:.2f}"
    return (
        f"Dispatch grows with the number of states to the power {show('states: growth of dispatch')} "
        f"(`jax.jit` by hand: {show('states: growth of dispatch, jax.jit')}), tracing with the number of unrolled "
        f"layers to the power "
        f"{show('unrolled layers: growth of trace')}, between the two largest sizes. Stacked layers and steps of a "
        f"loop cost nothing more "
        f"({show('stacked layers: growth of trace')} and {show('steps: growth of trace')})."
    )


def environment_text() -> str:
    environment = load("planner")["environment"]
    dates = sorted({load(name)["environment"]["date"] for name in RUNS})
    return (
        f"Versions: python {environment['python']}, jax {environment['jax']}, {environment['cpus']} CPU cores; "
        f"{' and '.join(dates)}."
    )


RUNS = (
    "bench_trace",
    "bench_transforms",
    "bench_dispatch",
    "bench_eager",
    "bench_scale",
    "bench_import",
    "loops",
    "planner",
)


def sharding() -> str:
    runs = [r for r in load("sharding")["runs"].values() if not r["resumes"]]
    one, *several = runs
    columns = ("devices", "processes", "last loss", "largest relative difference of losses")
    columns += ("temporary", "predicted", "weights, momenta, batch", "collectives")
    rows = [
        [
            f"{r['devices']}",
            f"{r['processes']}",
            f"{r['losses'][-1]:.6f}",
            "" if r is one else f"{r['loss_difference']:.1e}",
            f"{r['temporary_bytes'] / MIB:.1f} MiB",
            "" if r is one else f"{r['predicted_bytes'] / MIB:.1f} MiB",
            f"{r['argument_bytes'] / MIB:.1f} MiB",
            f"{sum(r['communicated_bytes'].values()) / MIB:.1f} MiB" if r["communicated_bytes"] else "0",
        ]
        for r in runs
    ]
    off = max(abs(100 * (r["temporary_bytes"] / r["predicted_bytes"] - 1)) for r in several)
    parts = {
        ", ".join(f"{num / MIB:.1f} MiB of {kind}s" for kind, num in r["communicated_bytes"].items() if num >= MIB / 20)
        for r in several
    }
    assert len(parts) == 1, "the same with any number of devices"
    return (
        f"{wide(columns, rows)}\n\nMeasured memory is within {off:.1f}% of the prediction. Collectives are "
        f"{parts.pop()}; the layers' weights are {one['layers'] * one['layer_bytes'] / MIB:.0f} MiB."
    )


def sharding_summary() -> str:
    runs = [r for r in load("sharding")["runs"].values() if not r["resumes"]]
    one, most = runs[0], runs[-2]
    return (
        f"On {most['devices']} devices, fully sharded training with `remat_scan` needs "
        f"{most['temporary_bytes'] / MIB:.1f} MiB of temporary "
        f"memory on each device instead of {one['temporary_bytes'] / MIB:.1f} MiB on one, and communicates "
        f"{sum(most['communicated_bytes'].values()) / MIB:.1f} MiB per step. Losses differ by at most "
        f"{max(r['loss_difference'] for r in runs):.1e}, relatively."
    )


def spiking(part: str) -> str:
    of_spiking, results = module("spiking"), load("spiking_deep")
    return of_spiking.summary(results) if part == "summary" else wide(*of_spiking.table(results))


def spiking_online() -> str:
    of_spiking, data = module("spiking"), load("online_rules")
    parts = [f"Measured by `python benchmarks/online_rules.py`: {header(data['environment'])}."]
    return "\n\n".join(
        [*parts, wide(*of_spiking.online_table(data["results"])), of_spiking.online_summary(data["results"])]
    )


def published(name: str) -> str:
    return wide(*getattr(module("published"), f"{name}_table")(load("published")[name]))


def advice() -> str:
    """How many changes by hand are advised, the steps that do not fit before and after their lists, and regressions."""
    advised, cases, found = load("advised"), load("advice"), load("regressions")
    changes = [c for program in advised for c in program["changes"].values() if c.get("saved", 0.0) >= 0.2]
    seconds = [program["seconds"] for program in advised]
    gib = lambda key, case: f"{case[key] / 2**30:.1f}"  # noqa: E731
    rows = [f"{c['name']} {gib('needed_bytes', c)} to {gib('followed_bytes', c)}" for c in cases]
    same = [c for c in (*found["versions"], *found["drawn"]) if c["before"] == c["after"]]
    return (
        f"Of {len(advised)} programs with a place for a change by hand (a rematerialized call or body of a loop, a "
        f"strategy, donation, parts), `explain_oom` names {sum(c['ok'] for c in changes)} of {len(changes)} changes that "
        f"save a fifth of the peak, with the bytes of the program changed by hand "
        f"({100 * max(c['off'] or 0 for c in changes):.1f}% off at most), in at most {max(seconds)} seconds "
        f"beside the profile. {sum(c['fits'] for c in cases)} of {len(cases)} steps that do not fit on an A100 of 40 GB "
        f"fit after its list (GiB, of {gib('limit_bytes', cases[0])}): {', '.join(rows)}. "
        f"{sum(p['found'] for p in found['planted'])} of {len(found['planted'])} planted regressions are named by owner "
        f"and line; {sum(c['programs'] for c in same)} comparisons of unchanged programs, each of three versions of JAX "
        f"with its own records, raise {sum(c['alarms'] for c in same)} alarms."
    )


# -- charts --------------------------------------------------------------------------------------------------------

GREY, ORANGE, TEAL = "#9ca3af", "#e08a3c", "#0e7386"


def draw_performance(path: Path) -> None:
    """Memory of unrolled programs, and memory against time of a long loop."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    figure = Figure(figsize=(6, 6.2), layout="constrained", facecolor="white")
    top, bottom = figure.subplots(2, 1)
    programs = load("planner")["fence"]
    labels = ("no remat", "jax.checkpoint", "statetx.remat")
    for i, (label, color) in enumerate(zip(labels, (GREY, ORANGE, TEAL), strict=True)):
        heights = [v[i] / MIB for v in programs.values()]
        bars = top.bar([n + 0.27 * (i - 1) for n in range(len(programs))], heights, 0.25, color=color, label=label)
        top.bar_label(bars, [f"{h:.0f}" for h in heights], fontsize=8.5, padding=1)
    top.set_xticks(range(len(programs)), list(programs))
    top.set_ylabel("temporary memory, MiB")
    top.set_title("Blocks under remat, compiled for a CPU", loc="left", fontsize=11, weight="bold")
    top.legend(frameon=False)
    top.margins(y=0.12)
    labels = {  # of the points, with their offsets
        "plain scan": ("plain scan", -6, 6),
        "jax.checkpoint, nested by hand": ("jax.checkpoint, nested by hand", 7, -4),
        "brainstate checkpointed_scan": ("brainstate", 6, 6),
        "equinox, 16": ("equinox, 16 slots", 7, 3),
        "equinox, 90": ("equinox, 90 slots", 7, 6),
        "statetx Slots(16)": ("statetx, Slots(16)", 7, -4),
        "statetx Slots(90)": ("statetx, Slots(90)", 7, -12),
    }
    for who, (label, right, up) in labels.items():
        r = load("loops")["gru"]["results"][who]
        color = TEAL if who.startswith("statetx") else "#4b5563" if who == "plain scan" else "#a8500c"
        point = r["bytes"] / MIB, median(r)
        bottom.scatter(*point, color=color, s=45, zorder=2)
        side = "right" if right < 0 else "left"
        bottom.annotate(label, point, textcoords="offset points", xytext=(right, up), ha=side, fontsize=9, color=color)
    bottom.set_xscale("log")
    bottom.set_xlim(1, 2500)
    bottom.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,g}"))
    bottom.set_ylim(0.9, max(2.15, bottom.get_ylim()[1]))
    bottom.set_xlabel("temporary memory, MiB")
    bottom.set_ylabel("CPU time of a plain scan")
    bottom.set_title("Gradient through 4,096 steps of a GRU", loc="left", fontsize=11, weight="bold")
    bottom.grid(color="#e5e7eb", zorder=0)
    for axes in (top, bottom):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None})


def by_number(results: dict[str, dict[str, Any]]) -> dict[str, dict[int, Any]]:
    return {kind: {int(num): costs for num, costs in by_size.items()} for kind, by_size in results.items()}


CHARTS: dict[str, Callable[[Path], None]] = {
    "performance": draw_performance,
    "comparison": lambda path: module("behaviors").draw(load("behaviors"), path),
    "scale": lambda path: module("bench_scale").picture(by_number(load("bench_scale")["results"]), path),
    "spiking": lambda path: module("spiking").picture(load("spiking_deep"), path),
    "gpu": lambda path: module("gpu").picture(load("gpu"), path),
    "planner": lambda path: module("planner").picture(load("planner")["programs"], path),
    "whole_plans": lambda path: module("whole_plans").picture(load("whole_plans")["programs"], path),
}

SECTIONS: dict[str, Callable[[], str]] = {
    "summary": summary,
    "environment": environment_text,
    "memory": summary_memory,
    "long loops": summary_loops,
    "plans": summary_plans,
    "microbatches": summary_microbatches,
    "budgets": met_budgets,
    "trace": summary_trace,
    "dispatch": summary_dispatch,
    "eager": summary_eager,
    "transforms": summary_transforms,
    "import": summary_import,
    "scale": summary_scale,
    "gpu: summary": lambda: module("gpu").summary(load("gpu")),
    "sharding": sharding,
    "sharding: summary": sharding_summary,
    "spiking: summary": lambda: spiking("summary"),
    "spiking: table": lambda: spiking("table"),
    "spiking: short": lambda: module("spiking").short(load("spiking_deep")),
    "spiking: online": spiking_online,
    "advice": advice,
    "published: environment": lambda: module("published").conditions(load("published")),
    "published: delays": lambda: published("delays"),
    "published: vgg": lambda: published("vgg"),
    "published: models": lambda: wide(*module("published_models").table(load("published_models"))),
    "gradients": lambda: log("gradients", lambda m, results: [(m.COLUMNS, m.rows(results))]),
    **{
        name: functools.partial(log, name, lambda m, results: [(m.COLUMNS, m.rows(results))])
        for name in ("ecosystem", "gpu")
    },
    "sharded_targets": lambda: log("sharded_targets", lambda m, results: [(m.COLUMNS, m.lines(results))]),
    "targets": lambda: log("targets", lambda m, results: [(m.COLUMNS, m.rows(results, load("gpu")["results"]))]),
    "target_models": lambda: log("target_models", lambda m, results: [(m.COLUMNS, m.rows(results))]),
    "target_plans": log_target_plans,
    "kernel_times": lambda: log("kernel_times", lambda m, results: [(m.COLUMNS, m.rows(results))]),
    "comparison: conclusion": lambda: module("behaviors").conclusion(load("behaviors")),
    "comparison: totals": lambda: (
        f'<div class="wide" markdown>\n\n{module("behaviors").totals_text(load("behaviors"))}\n\n</div>'
    ),
    "comparison: method": lambda: module("behaviors").method_text(load("behaviors")),
    "comparison: libraries": lambda: module("behaviors").libraries_text(load("behaviors")),
    "comparison: groups": lambda: module("behaviors").groups_text(load("behaviors")),
}

# Complete tables, which no page has: `--show` prints them.
LOGS: dict[str, Callable[[], str]] = {
    "bench_trace": lambda: log(
        "bench_trace", lambda m, results: [(m.TIMES, m.time_rows(results)), (m.COUNTS, m.count_rows(results))]
    ),
    **{
        name: functools.partial(log, name, lambda m, results: [(m.COLUMNS, m.rows(results))])
        for name in ("bench_transforms", "bench_dispatch", "bench_eager", "bench_scale", "bench_import", "microbatch")
    },
    "loops": log_loops,
    "planner": log_planner,
    "target_plans_ablation": log_target_plans_ablation,
    "whole_plans": log_whole_plans,
    "behaviors": lambda: (
        f"{module('behaviors').method_text(load('behaviors'))}\n\n"
        f"{module('behaviors').groups_text(load('behaviors'), messages=True)}"
    ),
}


def sections_of(page: Path) -> list[str]:
    """The sections in a page that are written here."""
    return [name for name in re.findall(r"<!-- (?!end )([\w: ]+) -->", page.read_text()) if name in SECTIONS]


def draw(folder: Path) -> None:
    import matplotlib

    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "statetx", "font.family": "sans-serif"}):
        for name, chart in CHARTS.items():
            chart(folder / f"{name}.svg")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "folder", type=Path, nargs="?", help="results of a run, which replace the committed ones of the same names"
    )
    parser.add_argument("--show", choices=LOGS, help="print all figures of a benchmark, and write nothing")
    options = parser.parse_args()
    if options.show:
        print(LOGS[options.show]())
        return
    if options.folder:
        keep(options.folder)
    for page in PAGES:
        for name in sections_of(page):
            renew_section(page, name, SECTIONS[name]())
    draw(IMAGES)


if __name__ == "__main__":
    main()
