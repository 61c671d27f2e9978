"""The commands of `python -m statetx`: options, help."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

from .function import BadInput

_COMMANDS = {
    "memory": "what is alive at the peak of the compiled program, who made it, and what to change",
    "fit": "whether the program fits into the memory of a device, and the shortest list of changes that makes it fit",
    "residuals": "the values that the forward pass saves for the backward pass, and why",
    "report": "the memory of the compiled program with and without rematerialization",
    "plan": "which values to save and which to recompute, so that the program fits a budget",
    "verify": "whether two training steps do the same, and the first state and line that differ",
}
_EXAMPLES = {
    "memory": """\
memory train:loss --shapes "f32[32,128], i32[32]"
memory train.py:step --factory --html memory.html
memory train.py:step --factory --target h100 --against memory.json
""",
    "fit": """\
fit train.py:step --factory --target a100-40gb
fit train:loss --shapes "f32[32,128]" --limit 16GiB --time-limit 300
""",
    "residuals": """\
residuals train:model.loss --shapes 'f32[8,64], {"mask": bool[8]}'
residuals train:loss --shapes "f32[32,128]" --argnums 0 --html residuals.html
""",
    "report": """\
report train:loss --shapes "f32[32,128], key<fry>[]" --json report.json
report train:loss --shapes "f32[32,128]" --policies nothing,dots
""",
    "plan": """\
plan train:loss --shapes "f32[32,128]" --budget 64MiB
plan train:loss --shapes "f32[32,128]" --target h100 --budget device --time-limit 300
""",
    "verify": """\
verify train.py:step --against train.py:plain --factory
verify train:step --shapes "f32[32,128], i32[32]"
""",
    "targets": "targets\n",
    "doctor": "doctor\n",
    "help": """\
help
help TraceLeakError
help every layer
""",
}
_INPUTS = """\
MODULE is a module that can be imported from here, or a path to a .py file; FUNCTION may be dotted (model.loss). Of a
class that needs no arguments, a method is called on a new instance (Model.loss).

With --factory, FUNCTION is called without arguments and returns (fun, args) or (fun, args, kwargs), or a function
alone, to call with --shapes. Arrays in args may be jax.ShapeDtypeStruct: nothing is computed.

exit status: 0; 1 if your code fails, nothing makes it fit, no plan keeps the budget, the memory grew, or a step is not
the same; 2 for bad input.
"""


def _epilog(*names: str) -> str:
    """The examples of these commands, and for those that take a function, how it is named."""
    lines = [line for name in names for line in _EXAMPLES[name].splitlines()]
    examples = "\n".join(["examples:", *(f"  python -m statetx {line}" for line in lines)])
    return f"{examples}\n\n{_INPUTS}" if any(name in _COMMANDS for name in names) else examples


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        raise BadInput(message)


def make_parser() -> argparse.ArgumentParser:
    import statetx

    style: dict[str, Any] = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
    parser = _Parser(
        prog="python -m statetx",
        description="See the memory of a JAX function before it runs. Functions may read and write states, or be "
        "plain JAX.",
        epilog=_epilog(*_EXAMPLES),
        **style,
    )
    parser.add_argument("--version", action="version", version=f"statetx {statetx.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, summary in _COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=f"Show {summary}.", epilog=_epilog(name), **style)
        _add_options(command, name)
    summary = "the devices that --target knows, and which can be compiled for here"
    commands.add_parser("targets", help=summary, description=f"Show {summary}.", epilog=_epilog("targets"), **style)
    summary = "the versions of JAX and its libraries, and which known faults of theirs are in them"
    command = commands.add_parser(
        "doctor", help=summary, description=f"Show {summary}.", epilog=_epilog("doctor"), **style
    )
    command.add_argument("--json", metavar="FILE", help="write them")
    summary = "what an error means and how to mend it, or what a function does"
    command = commands.add_parser("help", help=summary, description=f"Show {summary}.", epilog=_epilog("help"), **style)
    command.add_argument(
        "words",
        nargs="*",
        metavar="NAME",
        help="an error or another public name, such as TraceLeakError or remat; or words to search for; without any, "
        "all names are listed",
    )
    return parser


def _add_options(command: argparse.ArgumentParser, name: str) -> None:
    command.add_argument(
        "function", metavar="MODULE:FUNCTION", help="the function, such as train:loss or train.py:loss"
    )
    command.add_argument(
        "--shapes", metavar="TYPES", help="its arguments, such as \"f32[32,128], {'y': i32[32]}, scale=f32[]\""
    )
    command.add_argument("--factory", action="store_true", help="FUNCTION makes the function and its arguments")
    if name == "verify":
        command.add_argument(
            "--against",
            metavar="MODULE:FUNCTION",
            help="the reference, of the same arguments (default: the step itself without rematerialization, plans and "
            "checkpoints of loops)",
        )
        command.add_argument("--steps", type=int, default=3, help="how many are compared (default: %(default)s)")
        command.add_argument(
            "--tolerance", type=float, metavar="PART", help="relative to the largest entry (default: measured rounding)"
        )
    else:
        command.add_argument(
            "--target",
            metavar="DEVICE",
            help="compile for a device that may not be here: h100, 'tpu v5e:2x4' (see targets)",
        )
        command.add_argument("--html", metavar="FILE", help="write a page")
    command.add_argument(
        "--json", metavar="FILE", help="write numbers" if name != "plan" else "write the plan, for Plan.load"
    )
    if name == "fit":
        command.add_argument(
            "--limit", metavar="SIZE", help="the memory of the device, such as 16GiB (default: the device's own)"
        )
    if name in ("fit", "plan"):
        command.add_argument("--verify", action="store_true", help="run the plan, and hold it against the plain step")
        command.add_argument(
            "--time-limit",
            type=_seconds,
            default=60.0,
            metavar="SECONDS",
            help="for compiling candidates; then the best so far is told (default: 60"
            + ("; 0: predictions alone)" if name == "fit" else ")"),
        )
    if name in ("residuals", "plan"):
        command.add_argument(
            "--argnums",
            type=_positions,
            metavar="N,N",
            help="the arguments to differentiate, such as 0,2 (default: all floats)",
        )
    if name == "residuals":
        command.add_argument("--wrt", metavar="GLOB", help="the states to differentiate, by path, such as 'encoder.*'")
        command.add_argument("--has-aux", action="store_true", help="FUNCTION returns a pair (outputs, auxiliary data)")
    if name == "report":
        command.add_argument(
            "--policies", type=_names, metavar="NAME,NAME", help="policies to compare with, such as nothing,dots"
        )
    if name in ("memory", "fit", "report"):
        command.add_argument(
            "--gradient",
            action=argparse.BooleanOptionalAction,
            help="whether the function is differentiated; by default, unless it is a training step",
        )
    if name == "memory":
        command.add_argument("--save", metavar="FILE", help="put the size into a file, for --against and assert_memory")
        command.add_argument(
            "--against", metavar="FILE", help="compare with such a file: what grew, and exit status 1 if the peak did"
        )
        command.add_argument(
            "--tolerance", default="1%", metavar="PART", help="by how much the peak may grow (default: %(default)s)"
        )
        command.add_argument(
            "--format",
            default="text",
            choices=("text", "github"),
            help="of what --against prints: text, or annotations that GitHub shows beside the source",
        )
        command.add_argument("--summary", metavar="FILE", help="write what --against finds as a table in Markdown")
    if name == "plan":
        command.add_argument(
            "--budget",
            required=True,
            metavar="SIZE",
            help="memory of one device: 64MiB, 'device', or a fraction of that without rematerialization, such as 0.5",
        )
        command.add_argument(
            "--of",
            default="step",
            choices=("step", "temporaries"),
            help="what counts: arguments, outputs and temporaries (step, the default), or temporaries only",
        )
        command.add_argument(
            "--objective",
            default="auto",
            choices=("auto", "flops", "time"),
            help="the cost that a plan minimizes: time as XLA estimates it for GPUs, else operations (auto, the "
            "default); operations (flops); or time on this machine (time)",
        )
        command.add_argument("--offload", action="store_true", help="values may be kept in the memory of the host")
        command.add_argument(
            "--stored-as",
            type=_names,
            default=("bits",),
            metavar="FORMAT,FORMAT",
            help="formats of fewer bits for saved values: bits (the default, exact), bfloat16, float8_e4m3fn, "
            "float8_e5m2; '' for none",
        )


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not seconds >= 0:
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds")
    return seconds


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _positions(text: str) -> tuple[int, ...]:
    try:
        return tuple(map(int, _names(text)))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text} are no positions, such as 0,2") from None
