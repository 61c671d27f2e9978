"""Run the behavior table on statetx and other libraries: the results of docs/comparison.md, which ``report.py`` writes.

``tests/behaviors.py`` has the rows, with the expected results of a rematerialized function of a stateful model;
``benchmarks/peers.py`` and ``tests/kinds.py`` translate them to each library. Each library runs in its own process, and
a row that hangs or ends that process costs that row only. Nothing is timed.

Cells
    ok          values, gradients and final states are right, and the gradient's jaxpr has a checkpoint in it
    no remat    right, but without such an equation: nothing is recomputed, and nothing saved
    wrong       a value, gradient or state differs from the expected one, without an error
    error       an exception
    hang, crash the row took too long, or ended its process
    *           the same program without rematerialization is not right either

Needs the dependency group ``bench``: ``make bench``, or ``pip install -e . --group bench``.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import functools
import multiprocessing
import os
import re
import sys
import textwrap
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import behaviors
import jax
import kinds
import peers
from _common import environment, header, markdown_table, show, write_json
from behaviors import ROWS, Call, Dialect, Row
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

ROW_LIMIT = 120.0
"""Seconds that a row may take before it counts as hanging; the first row includes the imports."""

TEXT_LIMIT = 160


@dataclasses.dataclass(frozen=True)
class Library:
    """A column of the tables.

    Attributes:
        ways: its dialects; the first that gets a row right counts. If none does, the cell shows the fault of the first
            dialect that is right without rematerialization, or else of the first dialect.
        usage: how the rows are written in it, and how the ways differ.
        merit: its strengths.
    """

    name: str
    remat: str
    packages: tuple[str, ...]
    ways: tuple[Dialect, ...]
    usage: str
    merit: str = ""


LIBRARIES = (
    Library(
        "jax",
        "jax.checkpoint",
        ("jax",),
        (peers.JaxByHand(),),
        "Models are pytrees of parameters; other states are passed to each method and returned by it.",
        "All others here are built on it. It has the policies and offloading, takes any pytree, and is right for every "
        "pure function.",
    ),
    Library(
        "jax Ref",
        "jax.checkpoint",
        ("jax",),
        (
            peers.Jax("jax"),
            peers.Jax("jax", kind="no_grad_no_remat"),
            peers.JaxPure("jax"),
            peers.JaxPure("jax", kind="no_grad_no_remat"),
        ),
        "Models are pytrees; parameters are arrays and arguments of what is differentiated, other states are "
        "`jax.Ref`s. "
        "Four ways: Refs of the default kind, which last as long as the model; the same of kind `no_grad_no_remat`; "
        "Refs of "
        "either kind that live within a pure function which takes and returns their values.",
        "State without plumbing and without a library, in jit and loops; Refs that are not differentiated may be "
        "marked so.",
    ),
    Library(
        "linen",
        "flax.linen.remat",
        ("flax",),
        (peers.Linen(),),
        "Variables of an `nn.Module` under `apply`, `nn.remat` on methods, lifted transforms inside, JAX's outside.",
        "No stale results, since every call is traced again, and every nesting is right, random draws included; the "
        "states of a step are explicit, so a failed one cannot leave anything behind.",
    ),
    Library(
        "nnx",
        "flax.nnx.remat",
        ("flax",),
        (
            peers.Nnx("nnx"),
            peers.Nnx("nnx", updates=False),
            peers.Nnx("nnx", graph=False, updates=False),
        ),
        "Variables of an `nnx.Module`, which is an argument of every transform; `nnx.split` and `nnx.merge` around "
        "JAX's "
        "`jvp`, `vjp`, `linearize` and `hessian`. Three ways: graph mode, graph mode without graph updates, tree mode.",
        "Models are ordinary Python objects, shared references are kept, states may be created and reshaped "
        "inside transforms, attributes count as part of a function's structure, and most unsupported programs raise "
        "an error.",
    ),
    Library(
        "haiku",
        "hk.remat",
        ("dm-haiku",),
        (peers.Haiku(),),
        "`hk.Module` under `hk.transform_with_state`, `hk.remat` on bound methods in it, Haiku's loops and branches "
        "inside, JAX's transforms outside.",
        "Inside a transformed function anything can be rematerialized, bound methods and closures too, with four small "
        "helpers that thread every state; it keeps JAX from reusing a stale trace.",
    ),
    Library(
        "equinox",
        "equinox.filter_checkpoint",
        ("equinox",),
        (peers.Equinox(),),
        "Parameters in an `eqx.Module`; other states are passed to each method and returned by it. Equinox's "
        "transforms "
        "where it has them, else JAX's.",
        "Every leaf that is not an array is static without being declared, outputs too, and explicit state has no "
        "special cases. "
        "The price is that states pass through every signature.",
    ),
    Library(
        "brainstate",
        "brainstate.transform.remat",
        ("brainstate",),
        (peers.Brainstate("brainstate", "bound method"), peers.Brainstate("brainstate", "decorator")),
        "States of a `brainstate.nn.Module`, found in closures. Two ways: a new `remat(self.body)` in each call, or a "
        "decorator with the model declared static.",
        "States need no plumbing at all, in its own loops, branches, maps and derivatives; writes outside of "
        "its transforms are refused rather than leaked.",
    ),
    Library(
        "statetx",
        "statetx.remat",
        ("statetx",),
        (kinds.Native(),),
        "`statetx.State`, `statetx.Param`, `statetx.RngState`.",
    ),
    Library(
        "statetx brainstate",
        "statetx.remat",
        ("statetx", "brainstate"),
        (kinds.Brainstate(),),
        "The states of brainstate models.",
    ),
    Library("statetx nnx", "statetx.remat", ("statetx", "flax"), (kinds.Nnx(),), "The Variables of `nnx.Module`s."),
    Library(
        "statetx Ref",
        "statetx.remat",
        ("statetx", "jax"),
        (kinds.Ref(),),
        "`jax.Ref`s of the default kind held by an object.",
    ),
)


# -- one cell ------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Fault:
    """`kind` is a mark of the module's docstring; `anyway`: the program is not right without rematerialization
    either.
    """

    kind: str
    text: str
    anyway: bool = False

    def __str__(self) -> str:
        return f"not without remat either: {self.text}" if self.anyway else self.text


@dataclasses.dataclass(frozen=True)
class Cell:
    """The result of a row: the index of the way that was right, or a fault.

    `looked` is False if the gradient could not be traced to a jaxpr.
    """

    way: int = 0
    fault: Fault | None = None
    looked: bool = True


def judge(library: Library, row: Row) -> Cell:
    cells = []
    for way, dialect in enumerate(library.ways):
        cell = judge_way(dialect, row)
        if cell.fault is None:
            return dataclasses.replace(cell, way=way)
        cells.append(cell)
    return next((cell for cell in cells if cell.fault is not None and not cell.fault.anyway), cells[0])


def judge_way(dialect: Dialect, row: Row) -> Cell:
    fault = find_fault(dialect, row, dialect.run)
    if fault is None:
        is_remat = has_checkpoint(dialect, row) if "grad" in row.around else True
        no_remat = Fault("no remat", "ok, but nothing is rematerialized: no checkpoint in the gradient's jaxpr")
        return Cell(fault=no_remat if is_remat is False else None, looked=is_remat is not None)
    bare_fault = find_fault(dialect, row, lambda row: without_remat(dialect, row))
    return Cell(fault=fault if bare_fault is None else dataclasses.replace(bare_fault, anyway=True))


def find_fault(dialect: Dialect, row: Row, run: Callable[[Row], tuple[list, dict]]) -> Fault | None:
    try:
        actual = run(row)
        difference = behaviors.difference(actual, expected(dialect, row))
        if not difference and row.check is not None and not row.check(*actual):
            difference = "two calls draw the same numbers" if row.draws else "the row's own check fails"
    except Exception as error:
        return Fault("error", tidy(f"{type(error).__name__}: {error}"))
    return Fault("wrong", tidy(f"wrong value: {difference}")) if difference else None


def expected(dialect: Dialect, row: Row) -> tuple[list, dict[str, Any]]:
    """The results by the reference, or, where the row draws keys, which differ between libraries, by the dialect."""
    return without_remat(dialect, row) if row.draws else kinds.Meaning().run(row)


def without_remat(dialect: Dialect, row: Row) -> tuple[list, dict[str, Any]]:
    """The results of the row without rematerialization."""
    bare = copy.copy(dialect)
    bare.remat = lambda fun, **options: fun  # type: ignore[method-assign]
    return bare.run(row)


def has_checkpoint(dialect: Dialect, row: Row) -> bool | None:
    """Whether the jaxpr of the row's first call has a checkpoint in it; None if the call cannot be traced.

    First the model is made within the trace, where writes are at the level of its own states. If that fails it is made
    just before the trace, since a Ref made in a trace is not a Ref from outside. No other model is touched.
    """
    first_call = row.calls[0]

    def run(x: Any, dialect: Dialect) -> list:
        call = Call((x, *first_call.args[1:]), first_call.kwargs)
        outcome = dialect.run(dataclasses.replace(row, calls=(call,)))
        return [leaf for leaf in jax.tree.leaves(outcome) if isinstance(leaf, jax.Array)]

    for candidate in (dialect, with_model(dialect, row)):
        try:
            jaxpr = jax.make_jaxpr(functools.partial(run, dialect=candidate))(first_call.args[0])
            break
        except Exception:
            continue
    else:
        return None

    # A checkpoint without equations does not count: its function only forwards arguments, as the constructor of a model
    # does.
    return any(e.primitive.name in CHECKPOINTS and e.params["jaxpr"].eqns for e in equations(jaxpr))


def with_model(dialect: Dialect, row: Row) -> Dialect:
    """A copy of the dialect with an already built model."""
    model, bound = dialect.build(row), copy.copy(dialect)
    bound.build = lambda row: model  # type: ignore[method-assign]
    return bound


CHECKPOINTS = ("checkpoint", "remat", "remat2")


def equations(jaxpr: Any) -> Iterator[Any]:
    """The equations of a jaxpr and of the jaxprs inside it."""
    for equation in jaxpr.eqns:
        yield equation
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=is_jaxpr):
            if is_jaxpr(value):
                yield from equations(value)


def is_jaxpr(x: Any) -> bool:
    return hasattr(x, "eqns")


def tidy(message: str) -> str:
    """The first nonempty line, without paths, addresses and links, shortened to fit."""
    line = next(line for line in message.splitlines() if line.strip())
    for pattern, replacement in (
        (r"\s*\(https?://\S+\)", ""),
        (r" at (/\S+|<\S+>)", ""),
        (r"/\S+/(\S+\.py)", r"\1"),
        (r" ?(at )?0x[0-9a-f]+", ""),
        (r"id=\d+", "id"),
        (r"\s+", " "),
        ("`", "'"),
    ):
        line = re.sub(pattern, replacement, line)
    return textwrap.shorten(line, TEXT_LIMIT, placeholder=" ...")


# -- running -------------------------------------------------------------------------------------------------------


def work(library: int, start: int, results: Any) -> None:
    """Judge the rows from `start` on, in a separate process, and send a cell for each."""
    warnings.simplefilter("ignore")
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    for row in ROWS[start:]:
        results.send(judge(LIBRARIES[library], row))


def measure(library: int, report: Callable[[], None]) -> list[Cell]:
    context = multiprocessing.get_context("spawn")
    cells: list[Cell] = []

    def add(cell: Cell) -> None:
        cells.append(cell)
        report()

    while len(cells) < len(ROWS):
        results, sender = context.Pipe(duplex=False)
        process = context.Process(target=work, args=(library, len(cells), sender), daemon=True)
        process.start()
        sender.close()
        try:
            while len(cells) < len(ROWS):
                if not results.poll(ROW_LIMIT):
                    add(Cell(fault=Fault("hang", f"no result within {ROW_LIMIT:.0f} seconds")))
                    break
                add(results.recv())
        except EOFError:
            process.join()
            add(Cell(fault=Fault("crash", f"the process ended with exit code {process.exitcode}")))
        finally:
            process.kill()
            process.join()
    return cells


def measure_all(chosen: Sequence[int], jobs: int) -> dict[str, list[Cell]]:
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns) as progress, ThreadPoolExecutor(jobs) as pool:
        tasks = {n: progress.add_task(LIBRARIES[n].name, total=len(ROWS)) for n in chosen}
        futures = {n: pool.submit(measure, n, lambda n=n: progress.advance(tasks[n])) for n in chosen}
        return {LIBRARIES[n].name: future.result() for n, future in futures.items()}


# -- reporting -----------------------------------------------------------------------------------------------------

Outcome = dict[str, list[Cell]]  # by library
Table = tuple[list[str], list[list[str]]]  # columns, rows


def faults(outcome: Outcome) -> Iterator[Fault]:
    return (cell.fault for cells in outcome.values() for cell in cells if cell.fault is not None)


def count_kinds(cells: Sequence[Cell]) -> Counter:
    return Counter("ok" if cell.fault is None else cell.fault.kind for cell in cells)


def totals(outcome: Outcome, versions: dict[str, str]) -> Table:
    kinds_of_fault = ["no remat", "wrong", "error", *sorted({"hang", "crash"} & {f.kind for f in faults(outcome)})]
    rows = []
    for library in LIBRARIES:
        if library.name not in outcome:
            continue
        cells = outcome[library.name]
        count = count_kinds(cells)
        anyway = sum(cell.fault is not None and cell.fault.anyway for cell in cells)
        numbers = [f"{count['ok']} of {len(ROWS)}", *(str(count[kind]) for kind in kinds_of_fault), str(anyway)]
        rows.append([library.name, f"`{library.remat}`", ", ".join(versions[p] for p in library.packages), *numbers])
    return ["library", "rematerialized with", "version", "ok", *kinds_of_fault, "of these *"], rows


def group_table(group: str, outcome: Outcome) -> tuple[Table, list[str]]:
    """The table of a group of rows, and its footnotes; equal texts share a footnote."""
    notes: dict[str, int] = {}

    def mark(fault: Fault | None) -> str:
        if fault is None:
            return "ok"
        number = notes.setdefault(str(fault), len(notes) + 1)
        return f"{fault.kind} {number}{'*' if fault.anyway else ''}"

    rows = [
        [row.title, *(mark(cells[n].fault) for cells in outcome.values())]
        for n, row in enumerate(ROWS)
        if row.group == group
    ]
    return (["row", *outcome], rows), list(notes)


def groups() -> list[str]:
    return list(dict.fromkeys(row.group for row in ROWS))


# -- the page ------------------------------------------------------------------------------------------------------


def load(data: dict[str, Any]) -> Outcome:
    """The outcome in a file of results."""
    read = lambda cell: Cell(**{**cell, "fault": Fault(**cell["fault"]) if cell["fault"] else None})
    return {name: [read(cell) for cell in cells] for name, cells in data["cells"].items()}


def merged(outcome: Outcome) -> Outcome:
    """Without the columns of other libraries' states in statetx whose cells are all those of its own states."""
    same = [n for n in outcome if n.startswith("statetx ") and outcome[n] == outcome["statetx"]]
    return {name: cells for name, cells in outcome.items() if name not in same}


def conclusion(data: dict[str, Any]) -> str:
    outcome = load(data)
    ours = {name: count_kinds(cells) for name, cells in outcome.items() if name.startswith("statetx")}
    others = {name: count_kinds(cells) for name, cells in outcome.items() if name not in ours}
    least, most = (pick(others, key=lambda name: others[name]["ok"]) for pick in (min, max))
    total = sum(others.values(), Counter())
    by_group = Counter(
        row.group for name in others for row, cell in zip(ROWS, outcome[name], strict=True) if cell.fault is not None
    )
    assert len(others) == 7, "the sentence below names them"
    anyway = sum(f.anyway for f in faults({name: outcome[name] for name in ours}))
    all_right = [name for name in ours if ours[name]["ok"] == len(ROWS)]
    rest = {name: ours[name]["ok"] for name in ours if name not in all_right}
    (worst, num_worst), (second, num_second) = by_group.most_common(2)
    num_faults = sum(by_group.values())
    return f"""\
Does `remat` (rematerialization, also called gradient checkpointing or activation checkpointing) give correct results for functions that
read and write states? {len(ROWS)} small programs were run in statetx and in seven other ways: plain JAX with states passed by hand, `jax.Ref`s,
flax.linen, flax.nnx, haiku, equinox and brainstate.

- `statetx.remat` is right in {len(ROWS)} of {len(ROWS)} with {listed([OWN_STATES[name] for name in all_right])}\
{"".join(f", and in {num} with {OWN_STATES[name]}" for name, num in rest.items())}.
- {f"The remaining {anyway} programs fail without rematerialization, too." if anyway == sum(len(ROWS) - n for n in rest.values()) else f"{anyway} of the remaining programs fail without rematerialization, too."}
- The others are right in {others[least]["ok"]} ({least}) to {others[most]["ok"]} ({most}, which passes states by hand) of the {len(ROWS)}.
- They fail with an exception rather than silently: {total["error"]} errors, {total["wrong"]} wrong results, {total["no remat"]} without any rematerialization.
- Of these {num_faults} cases {num_worst} are in the group [{worst}](#{worst.lower().replace(" ", "-")}), {num_second} in [{second}](#{second.lower().replace(" ", "-")}).

The programs were chosen by the authors of statetx, who run them as tests, so expect statetx to do well on them. Speed and memory are on
the page [Performance](performance.md)."""


def listed(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


OWN_STATES = {
    "statetx": "its own states",
    "statetx brainstate": "brainstate's states",
    "statetx nnx": "nnx's Variables",
    "statetx Ref": "`jax.Ref`s",
}


def totals_text(data: dict[str, Any]) -> str:
    return markdown_table(*totals(load(data), data["versions"]))


def method_text(data: dict[str, Any]) -> str:
    return METHOD.format(header=header(data["environment"]), rows=len(ROWS), limit=int(ROW_LIMIT))


def libraries_text(data: dict[str, Any]) -> str:
    outcome = load(data)
    return "\n".join(describe(library, outcome[library.name]) for library in LIBRARIES if library.name in outcome)


def groups_text(data: dict[str, Any], messages: bool = False) -> str:
    """For each group of rows those that are not right in every library, with or without their messages, and the names
    of the others.
    """
    outcome = load(data)
    shown = merged(outcome)
    gone = [name for name in outcome if name not in shown]
    parts, number = [], re.compile(r"(?!)" if messages else r" \d+")
    if gone:
        parts.append(
            f"The column *statetx* stands for {', '.join(['statetx', *gone])}: their results are the same in every row."
        )
    for group in groups():
        (columns, rows), notes = group_table(group, shown)
        cells = [
            [row[0], *(f"{number.sub('', mark)} {{.{CLASSES.get(mark.split()[0], 'wrong')}}}" for mark in row[1:])]
            for row in rows
        ]
        right = [row[0] for row in rows if set(row[1:]) == {"ok"}]
        cells = [row for row in cells if row[0] not in right]
        parts.append(f"## {group}")
        if cells:
            parts.append(f'<div class="wide" markdown>\n\n{markdown_table(columns, cells, rule=CENTERED)}\n\n</div>')
        if right:
            parts.append(f"{len(right)} more rows are right in every library.")
        if notes and messages:
            lines = "\n".join(f"    {n}. `{note}`" for n, note in enumerate(notes, 1))
            parts.append(f'??? note "Messages of {group.lower()}"\n\n{lines}')
    return "\n\n".join(parts)


CENTERED = ":-:"
CLASSES = {"ok": "ok", "no": "none", "error": "error"}  # of cells, by the first word of the mark


def draw(data: dict[str, Any], path: Path) -> None:
    """A bar for each library: how many rows have which mark."""
    from matplotlib.figure import Figure

    counts = {name: count_kinds(cells) for name, cells in merged(load(data)).items()}
    names = sorted(counts, key=lambda name: counts[name]["ok"])
    figure = Figure(figsize=(6, 3.3), layout="constrained", facecolor="white")
    axes = figure.subplots()
    left = dict.fromkeys(names, 0)
    kinds_of_mark = {"ok": "#3a8f4f", "no remat": "#9ca3af", "error": "#e08a3c", "wrong": "#c0392b"}
    kinds_of_mark |= {kind: "#c0392b" for kind in ("hang", "crash") if any(c[kind] for c in counts.values())}
    for kind, color in kinds_of_mark.items():
        widths = [counts[name][kind] for name in names]
        bars = axes.barh(names, widths, left=list(left.values()), color=color, label=kind, height=0.7)
        if kind in ("ok", "error"):
            axes.bar_label(
                bars, [str(w) if w > 2 else "" for w in widths], label_type="center", color="white", fontsize=9
            )
        left = {name: left[name] + counts[name][kind] for name in names}
    axes.set_xlim(0, len(ROWS))
    axes.set_xlabel(f"programs, of {len(ROWS)}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, ncols=len(kinds_of_mark), loc="lower left", bbox_to_anchor=(0, 1), fontsize=9)
    figure.savefig(path, metadata={"Date": None})


def describe(library: Library, cells: Sequence[Cell]) -> str:
    text = f"**{library.name}**: {library.usage}"
    if len(library.ways) > 1:
        wins = Counter(cell.way for cell in cells if cell.fault is None)
        text += f" Right in the first way {wins[0]}"
        text += "".join(f", else in the {ORDINALS[n]} {wins[n]}" for n in range(1, len(library.ways))) + "."
    if library.merit:
        text += f" *Strengths:* {library.merit}"
    unseen = sum(not cell.looked for cell in cells)
    if unseen:
        text += f" In {unseen} rows the gradient could not be traced to a jaxpr."
    return textwrap.fill(f"- {text}", 120, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


ORDINALS = ("first", "second", "third", "fourth")

METHOD = """\
Measured by `python benchmarks/behaviors.py`: {header}.

Each of the {rows} rows is one function, without any library in it (`tests/behaviors.py`), which is translated to each library
(`benchmarks/peers.py`, `tests/kinds.py`). The expected values, gradients and final states are those of the same function without
rematerialization, as a pure function in plain JAX with Python loops and branches. Random draws differ between libraries, so that rows with
draws are compared with the same program in the same library without rematerialization. If a library has several ways to write a row, the
first that is right counts. If it lacks a transform, JAX's is applied to the library's functions.

| mark | meaning |
|---|---|
| ok {{.ok}} | values, gradients and final states are right, and the gradient's jaxpr has a checkpoint equation (rows under `grad`) |
| no remat {{.none}} | right, but without such an equation: nothing is recomputed, and no memory is saved |
| wrong {{.wrong}} | a value, gradient or state is not as expected, without an error |
| error {{.error}} | an exception |
| hang, crash {{.wrong}} | no result within {limit} seconds, or the process ended |
| * | the same program without rematerialization is not right either |

`python benchmarks/report.py --show behaviors` has the message of each fault."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the outcomes to OUT")
    names = [library.name for library in LIBRARIES]
    parser.add_argument("--only", action="append", choices=names, metavar="NAME", help=f"one of: {', '.join(names)}")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time (default 2)")
    options = parser.parse_args()
    outcome = measure_all([n for n, name in enumerate(names) if name in (options.only or names)], options.jobs)
    for group in groups():
        (columns, rows), notes = group_table(group, outcome)
        show(group, columns, rows)
        print(*(f"{n:3}. {note}" for n, note in enumerate(notes, 1)), sep="\n", end="\n\n")
    versions = {package: metadata.version(package) for library in LIBRARIES for package in library.packages}
    show("Totals", *totals(outcome, versions))
    if options.json:
        cells = {name: [dataclasses.asdict(cell) for cell in cells] for name, cells in outcome.items()}
        write_json(options.json, environment(), {"versions": versions, "cells": cells})


if __name__ == "__main__":
    main()
