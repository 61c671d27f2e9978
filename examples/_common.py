"""Shared by the examples: options, errors in one line, a progress bar, training in turns, tables, pictures and results.

Nothing large is imported here, so that an example can read its options before it imports JAX.
"""

import argparse
import json
import math
import os
import signal
import statistics
import sys
import time
from pathlib import Path

ORANGE, BLUE, GREEN, GREY = "#e08a3c", "#1f5f99", "#3a8f4f", "#555555"
MIB = 2**20
INTERRUPTED = 130  # the exit status of a program that SIGINT ended, by convention of the shell
_START = time.perf_counter()


class BadInput(Exception):
    """An option or a file that the program cannot use."""


class OneLineParser(argparse.ArgumentParser):
    """A parser whose errors are one line on stderr and exit status 2."""

    def error(self, message):
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())}\n")


def make_parser(doc, name):
    """Return a parser with the options that every example has."""
    show_defaults = argparse.ArgumentDefaultsHelpFormatter
    parser = OneLineParser(description=doc.splitlines()[0], formatter_class=show_defaults)
    parser.add_argument("--seed", type=between(int, -1, 2**32), default=0, help="seed of all random numbers")
    parser.add_argument("--out", type=Path, metavar="DIR", default=Path("out", name), help="folder for the results")
    return parser


def between(kind, low=0, high=math.inf):
    """Return an argparse type: a number of this kind above low and below high."""

    def parse_number(text):
        if not low < kind(text) < high:
            raise argparse.ArgumentTypeError(f"must be above {low} and below {high}, got {text}")
        return kind(text)

    parse_number.__name__ = kind.__name__  # argparse names the type in its message
    return parse_number


def parse(parser, seconds, **quick):
    """Read the options, and ``--quick``. From here on Ctrl-C ends the program with one line.

    Args:
        parser: from `make_parser`, with the example's own options.
        seconds: processor time of a run with ``--quick``, for its help text.
        **quick: the values that ``--quick`` gives to options that are not set.
    """
    parser.add_argument("--quick", action="store_true", help=f"small sizes, about {seconds} s on two CPU cores")
    if parser.parse_args().quick:
        parser.set_defaults(**quick)
    options = parser.parse_args()
    # While libraries are imported: an exception in the middle of an import can be caught or replaced by the library.
    signal.signal(signal.SIGINT, lambda *_: _exit_now("interrupted before the first step; nothing was written"))
    return options


def _exit_now(message):
    os.write(2, f"{message}\n".encode())
    os._exit(INTERRUPTED)


def run(parser, options, example):
    """Run an example, show its table and write its picture and results.

    After Ctrl-C, write the results that the example has so far.

    Args:
        parser: from `make_parser`, for its error messages.
        options: from `parse`.
        example: called with the options, a progress bar and a dict; fills the dict with its results and returns a
            table and a figure.
    """
    from rich.console import Console

    signal.signal(signal.SIGINT, signal.default_int_handler)
    console, results = Console(), {"options": vars(options)}
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        with make_progress(console) as progress:
            table, figure = example(options, progress, results)
        for column in table.columns:
            column.overflow = "fold"  # a narrow terminal breaks lines, and hides nothing
        console.print(table)
        results |= times()
        figure.savefig(options.out / "results.png", dpi=150)
        write_results(results, options.out)
    except (OSError, UnicodeError, BadInput) as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second one would stop the writing
        path = options.out / "results.json"
        write_results(results | times() | {"interrupted": True}, options.out)
        print(f"interrupted {last_step(results)}; what was computed so far is in {path}", file=sys.stderr)
        sys.exit(INTERRUPTED)
    took = "{seconds:.0f} s ({cpu_seconds:.0f} s of processor time)".format_map(results)
    console.print(f"Wrote results.png and results.json into {options.out}, after {took}", soft_wrap=True)


def write_results(results, folder):
    """Write results.json."""
    (folder / "results.json").write_text(json.dumps(results, indent=2, default=str))


def last_step(results):
    """Return the last training step of the results, in words."""
    runs = [(name, run["losses"]) for name, run in results.get("runs", {}).items() if run["losses"]]
    if not runs:
        return "before the first step"
    name, losses = runs[-1]
    return f"after step {len(losses)} ({name})"


def times():
    """Return the seconds since the start, and the processor seconds of this process and of its finished children."""
    used = os.times()
    cpu = used.user + used.system + used.children_user + used.children_system
    return {"seconds": time.perf_counter() - _START, "cpu_seconds": cpu}


def make_progress(console):
    """Return a progress bar whose tasks have a status."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn()
    return Progress(*columns, TextColumn("{task.fields[status]}"), console=console)


def show_bytes(num):
    """Return a number of bytes as text."""
    return f"{num / MIB:,.1f} MiB" if num >= MIB else f"{num / 1024:,.1f} KiB"


def show_seconds(seconds):
    """Return a time as text, with three digits."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def show_difference(ratio):
    """Return a relative difference as text."""
    return f"{ratio:.0e}" if ratio else "0"


def memory_of(step, *args):
    """Return the temporary memory of a step of `statetx.jit`, in bytes. The first call does not compile it again."""
    return step.lower(*args).compile().memory_analysis().temp_size_in_bytes


def compare_times(functions, args, ways, rounds, tell):
    """Run functions in turns; write the processor seconds of each way, and the median of their ratios to "plain"."""
    from jax import block_until_ready  # not before the options are read

    for _ in range(rounds):
        for way, function in functions.items():
            start = time.process_time()
            block_until_ready(function(*args))
            ways[way]["cpu_seconds"].append(time.process_time() - start)
            tell(f"{way}: {ways[way]['cpu_seconds'][-1]:.2f} s")
    for found in ways.values():
        pairs = zip(found["cpu_seconds"], ways["plain"]["cpu_seconds"], strict=True)
        found["time"] = statistics.median(a / b for a, b in pairs)


def train(steps, batches, progress, results):
    """Call each step with each batch: ``step(*batch)``, which returns a loss.

    The steps take turns, so that other work on the machine slows all of them equally.

    Args:
        steps: functions by name.
        batches: an iterable of tuples, with a length.
        progress: from `make_progress`.
        results: a dict; ``results["runs"][name]`` gets ``losses``, appended after every step, and at the end
            ``step_seconds``, the median time of a call. A run that exists is continued, and keeps its ``step_seconds``.

    Returns:
        ``results["runs"]``.
    """
    runs = results.setdefault("runs", {})
    tasks, seconds = {}, {}
    for name in steps:
        tasks[name] = progress.add_task(name, total=len(batches), status="compiling")
        runs.setdefault(name, {"losses": []})
        seconds[name] = []

    for batch in batches:
        for name, step in steps.items():
            start = time.perf_counter()
            loss = float(step(*batch))
            seconds[name].append(time.perf_counter() - start)
            losses = runs[name]["losses"]
            losses.append(loss)
            if not math.isfinite(loss):
                raise BadInput(f"the loss of {name} is {loss} at step {len(losses)}, try a lower --lr")
            progress.update(tasks[name], advance=1, status=f"loss {loss:.4f}")

    for name, durations in seconds.items():  # the first call may compile
        runs[name].setdefault("step_seconds", statistics.median(durations[1:] or durations))
    return runs


def plot_losses(axes, runs, colors, labels=None):
    """Draw the losses of runs: the first as a thick line, so that equal curves on top of it are all visible."""
    for (name, run), width in zip(runs.items(), (6, 3, 1.2)[-len(runs) :], strict=True):
        losses = run["losses"]
        marker = "o" if len(losses) < 5 else None
        label = labels[name] if labels else name
        axes.plot(range(1, len(losses) + 1), losses, marker=marker, color=colors[name], linewidth=width, label=label)


def tidy(axes, counts="", **properties):
    """Set the properties of axes, and the look that all pictures share.

    Args:
        axes: of matplotlib.
        counts: "x", "y" or "xy": axes of whole numbers, which get no ticks in between.
        **properties: of `Axes.set`, such as labels. Logarithmic scales get ticks that are plain numbers.
    """
    from matplotlib import ticker

    axes.set(**properties, axisbelow=True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3)
    for name in counts:
        getattr(axes, f"{name}axis").set_major_locator(ticker.MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    for name in "xy":
        if properties.get(f"{name}scale") == "log":
            axis = getattr(axes, f"{name}axis")
            low, high = sorted(axis.get_view_interval())
            # Within a factor of ten there are at most three of 1, 2, 5, 10, ..., too few to read values.
            axis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)) if high > 10 * low else ticker.MaxNLocator(6))
            axis.set_minor_locator(ticker.NullLocator())
            axis.set_major_formatter("{x:g}")


def legend_below(axes, columns=1):
    """Put the legend of axes below them, where it covers no curve."""
    axes.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=columns)


def bar_chart(axes, values, colors, show, **properties):
    """Draw bars by name with their values, as text, above them."""
    bars = axes.bar(list(values), list(values.values()), color=[colors[name] for name in values], width=0.6)
    axes.bar_label(bars, [show(value) for value in values.values()], padding=3)
    axes.margins(x=0.1, y=0.15)
    tidy(axes, **properties)
