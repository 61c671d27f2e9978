"""What the examples share: options, errors in one line, a progress bar, an optimiser of states, and where results go."""

import argparse
import json
import math
import statistics
import time
from pathlib import Path

import optax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import statetx

ORANGE, BLUE, GREEN, GREY = "#e08a3c", "#1f5f99", "#3a8f4f", "#555555"
MIB = 2**20


class BadInput(Exception):
    """An option or a file that the program cannot work with."""


class OneLineParser(argparse.ArgumentParser):
    """A parser whose errors are one line on stderr and exit status 2."""

    def error(self, message):
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())}\n")


def make_parser(doc, name):
    """Return a parser with the options that every example has."""
    show_defaults = argparse.ArgumentDefaultsHelpFormatter
    parser = OneLineParser(description=doc.splitlines()[0], formatter_class=show_defaults)
    parser.add_argument("--seed", type=between(int, -1, 2**32), default=0, help="seed of all that is random")
    parser.add_argument("--out", type=Path, metavar="DIR", default=Path("out", name), help="where results go")
    return parser


def between(kind, low=0, high=math.inf):
    """Return an argparse type: a number of this kind above low and below high."""

    def parse_number(text):
        if not low < kind(text) < high:
            raise argparse.ArgumentTypeError(f"must be above {low} and below {high}, got {text}")
        return kind(text)

    parse_number.__name__ = kind.__name__  # argparse names the type in its message
    return parse_number


def make_progress(console):
    """Return a progress bar whose tasks have a status."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    return Progress(*columns, TextColumn("{task.fields[status]}"), console=console)


def parse(parser, **quick):
    """Read the options, with one more: ``--quick``, and what it makes of those that are not given."""
    parser.add_argument("--quick", action="store_true", help="small sizes, to see it work within seconds")
    if parser.parse_args().quick:
        parser.set_defaults(**quick)
    return parser.parse_args()


def run(parser, example, **quick):
    """Run an example as the options say, show its table and write its picture and results.

    Args:
        parser: of `make_parser`, with the example's own options.
        example: called with the options and a progress bar; returns a table, a figure and a dict of results.
        **quick: what ``--quick`` makes of options that are not given.
    """
    options = parse(parser, **quick)
    console = Console()
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        wall, cpu = time.perf_counter(), time.process_time()
        with make_progress(console) as progress:
            table, figure, results = example(options, progress)
        took = {"seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - cpu}
        results = {"options": vars(options), **took, **results}
        console.print(table)
        figure.savefig(options.out / "results.png", dpi=150)
        (options.out / "results.json").write_text(json.dumps(results, indent=2, default=str))
    except (OSError, UnicodeError, BadInput) as error:
        parser.error(str(error))
    took = "{seconds:.0f} s ({cpu_seconds:.0f} s of processor time)".format_map(results)
    console.print(f"Wrote results.png and results.json into {options.out}, after {took}", soft_wrap=True)


def show_bytes(num):
    """Return a number of bytes as text."""
    return f"{num / MIB:,.1f} MiB" if num >= MIB else f"{num / 1024:,.1f} KiB"


def show_difference(ratio):
    """Return a relative difference as text."""
    return f"{ratio:.0e}" if ratio else "nothing"


def memory_of(step, *args):
    """Return the bytes that XLA reserves for a step of `statetx.jit`; the first call does not compile it again."""
    return step.lower(*args).compile().memory_analysis().temp_size_in_bytes


def train(steps, batches, progress):
    """Call each of some steps with each batch: ``step(*batch)``, which returns a loss.

    The steps take turns, so that what else the machine does slows all of them.

    Args:
        steps: by name.
        batches: a list of tuples.
        progress: of `make_progress`.

    Returns:
        By name, a dict of the losses and the median seconds of a call, ``losses`` and ``step_seconds``.
    """
    tasks = {name: progress.add_task(name, total=len(batches), status="compiling") for name in steps}
    losses, seconds = {name: [] for name in steps}, {name: [] for name in steps}
    for batch in batches:
        for name, step in steps.items():
            start = time.perf_counter()
            loss = float(step(*batch))
            seconds[name].append(time.perf_counter() - start)
            losses[name].append(loss)
            if not math.isfinite(loss):
                raise BadInput(f"the loss of {name} is {loss} at step {len(losses[name])}, try a lower --lr")
            progress.update(tasks[name], advance=1, status=f"loss {loss:.4f}")
    medians = {name: statistics.median(s[1:] or s) for name, s in seconds.items()}  # the first call may compile
    return {name: {"losses": losses[name], "step_seconds": medians[name]} for name in steps}


class Optimiser:
    """An optax optimiser of states, whose own state is one too."""

    def __init__(self, weights, transformation):
        self.weights, self.transformation = weights, transformation
        self.moments = statetx.State(transformation.init(self.values()))

    def values(self):
        return {path: state.value for path, state in self.weights.items()}

    def update(self, grads):
        """Move the weights, given their gradients by path."""
        updates, self.moments.value = self.transformation.update(grads, self.moments.value, self.values())
        for path, value in optax.apply_updates(self.values(), updates).items():
            self.weights[path].value = value


def tidy(axes, **labels):
    """Give axes their labels, and the looks that all pictures share."""
    axes.set(**labels, axisbelow=True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3)
