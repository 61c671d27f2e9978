"""Reads the options, runs a command, and turns errors into lines and exit statuses."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import traceback
from collections.abc import Sequence
from types import TracebackType
from typing import Any, NoReturn

from .target import BadInput, load_target

FAILED, BAD_INPUT = 1, 2
_INTERRUPTED = 130  # the exit status of a program that SIGINT ended, by convention of the shell

_COMMANDS = {
    "memory": "what is alive at the peak of the compiled program, who made it, and what to change",
    "fit": "whether the program fits into the memory of a device, and the shortest list of changes that makes it fit",
    "residuals": "the values that the forward pass saves for the backward pass, and why",
    "report": "the memory of the compiled program with and without rematerialization",
    "plan": "which values to save and which to recompute, so that the program fits a budget",
}
_EXAMPLES = """\
examples:
  python -m statetx memory train:loss --shapes "f32[32,128], i32[32]"
  python -m statetx memory train.py:step --factory --html memory.html
  python -m statetx memory train.py:step --factory --target h100 --against memory.json
  python -m statetx fit train.py:step --factory --target a100-40gb
  python -m statetx residuals train:model.loss --shapes 'f32[8,64], {"mask": bool[8]}'
  python -m statetx report train:loss --shapes "f32[32,128], key<fry>[]" --json report.json
  python -m statetx plan train:loss --shapes "f32[32,128]" --budget 64MiB
  python -m statetx plan train:loss --shapes "f32[32,128]" --target h100 --budget device
  python -m statetx targets
  python -m statetx help TraceLeakError

MODULE is a module that can be imported from here, or a path to a .py file; FUNCTION may be dotted (model.loss). Of a
class that needs no arguments, a method is called on a new instance (Model.loss).

With --factory, FUNCTION is called without arguments and returns (fun, args) or (fun, args, kwargs), or a function
alone, to call with --shapes. Arrays in args may be jax.ShapeDtypeStruct: nothing is computed.

exit status: 0; 1 if your code fails, nothing makes it fit, no plan keeps the budget, or the memory grew; 2 for
bad input.
"""


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
        epilog=_EXAMPLES,
        **style,
    )
    parser.add_argument("--version", action="version", version=f"statetx {statetx.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, summary in _COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=f"Show {summary}.", epilog=_EXAMPLES, **style)
        _add_options(command, name)
    summary = "the devices that --target knows, and which can be compiled for here"
    commands.add_parser("targets", help=summary, description=f"Show {summary}.", **style)
    summary = "what an error means and how to mend it, or what a function does"
    command = commands.add_parser("help", help=summary, description=f"Show {summary}.", **style)
    command.add_argument(
        "name", metavar="NAME", help="an error or another public name, such as TraceLeakError or remat"
    )
    return parser


def _add_options(command: argparse.ArgumentParser, name: str) -> None:
    command.add_argument("target", metavar="MODULE:FUNCTION", help="the function, such as train:loss or train.py:loss")
    command.add_argument(
        "--shapes", metavar="TYPES", help="its arguments, such as \"f32[32,128], {'y': i32[32]}, scale=f32[]\""
    )
    command.add_argument(
        "--target",
        dest="device",
        metavar="DEVICE",
        help="compile for a device that may not be here: h100, 'tpu v5e:2x4' (see targets)",
    )
    command.add_argument("--factory", action="store_true", help="FUNCTION makes the function and its arguments")
    command.add_argument("--html", metavar="FILE", help="write a page")
    command.add_argument(
        "--json", metavar="FILE", help="write numbers" if name != "plan" else "write the plan, for Plan.load"
    )
    if name == "fit":
        command.add_argument(
            "--limit", metavar="SIZE", help="the memory of the device, such as 16GiB (default: what it tells)"
        )
        command.add_argument(
            "--time-limit",
            type=float,
            default=60.0,
            metavar="SECONDS",
            help="for trying changes; then the best so far is told (default: 60; 0: predictions alone)",
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
    if name == "plan":
        command.add_argument(
            "--budget",
            required=True,
            metavar="SIZE",
            help="memory of one device: 64MiB, 'device', or a fraction such as 0.5 of the memory without a plan",
        )
        command.add_argument(
            "--of",
            default="step",
            choices=("step", "temporaries"),
            help="what counts: arguments, outputs and temporaries (step, the default), or temporaries only",
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: the options; those of the process if None.

    Returns:
        The exit status: 0; 1 if the user's code fails, nothing makes it fit, no plan keeps the budget, or the memory
        grew; 2 for bad input, with one line on stderr.
    """
    try:
        parser = make_parser()
        words = sys.argv[1:] if argv is None else argv
        if not words:
            parser.print_help()
            return 0
        options = parser.parse_args(words)
    except BadInput as e:
        return _fail(str(e), BAD_INPUT)
    except SystemExit as e:  # --help and --version
        return int(e.code or 0)
    return _run(options)


def _run(options: argparse.Namespace) -> int:
    from .._errors import PlanError

    try:
        return _execute(options)
    except BadInput as e:
        return _fail(str(e), BAD_INPUT)
    except PlanError as e:
        return _fail(str(e.args[0]), FAILED)
    except KeyboardInterrupt:
        return _fail("interrupted", _INTERRUPTED)
    except SystemExit as e:
        return _fail(f"{options.target} ended the program with exit status {e.code}", FAILED)
    except Exception as e:
        traceback.print_exception(type(e), e, _users_part(e))
        return FAILED


def _execute(options: argparse.Namespace) -> int:
    from . import commands

    if options.command in ("targets", "help"):
        _print(commands.targets() if options.command == "targets" else commands.explain(options.name))
        return 0
    if options.command == "plan":
        _check_budget(options.budget, options.of)
    if options.command == "memory":
        commands.check_against(options)
    names = ("html", "json", "save")
    files = {name: path for name in names if (path := getattr(options, name, None)) is not None}
    for name, path in files.items():
        _check_writable(name, path)
    real = [os.path.realpath(path) for path in files.values() if os.path.isfile(path) or not os.path.exists(path)]
    if len({*real}) < len(real):
        raise BadInput(f"{' and '.join(f'--{name}' for name in files)} write to the same file")

    with _device(options.device):
        target = load_target(options.target, options.shapes, options.factory)
        output = getattr(commands, options.command)(target, options)
    _print(output.text)
    for name, path in files.items():
        try:
            output.writers[name](path)
        except OSError as e:
            raise BadInput(f"--{name}: cannot write {path}: {e.strerror or e}") from e
        _print(f"Wrote {path}")
    return FAILED if output.is_failed else 0


def _device(name: str | None) -> contextlib.AbstractContextManager[Any]:
    from .._errors import TargetError
    from .._targets import current

    if name is None:
        return contextlib.nullcontext()
    try:
        return current.target(current.as_target(name))
    except TargetError as e:
        raise BadInput(f"--target: {e.args[0]}") from None


def _check_budget(budget: str, of: str) -> None:
    from .._errors import PlanError
    from ..planner._budget import ByteBudget

    try:
        ByteBudget.read(budget, of)
    except PlanError as e:
        raise BadInput(f"--{e.args[0]}") from None


def _check_writable(name: str, path: str) -> None:
    """A mistake shows before anything is compiled."""
    folder = os.path.dirname(os.path.abspath(path))
    reason = ""
    if not path:
        reason = "the name is empty"
    elif not os.path.isdir(folder):
        reason = f"there is no folder {folder}"
    elif os.path.isdir(path):
        reason = "it is a folder"
    elif os.path.exists(path) and not os.access(path, os.W_OK):
        reason = "permission denied"
    elif not os.access(folder, os.W_OK) and (os.path.isfile(path) or not os.path.exists(path)):
        reason = f"permission denied in {folder}, where the file is written before it gets its name"
    if reason:
        raise BadInput(f"--{name}: cannot write {path}: {reason}")


# -- output ----------------------------------------------------------------------------------------------------------


def _print(text: str) -> None:
    """Print, with question marks for the characters of the sparkline on a terminal that lacks them."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    try:
        print(text.encode(encoding, "replace").decode(encoding), flush=True)
    except BrokenPipeError:  # `| head` has read enough; what Python still holds goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(message: str, status: int) -> int:
    print(f"python -m statetx: error: {' '.join(message.split())}", file=sys.stderr)
    return status


def _users_part(error: Exception) -> TracebackType | None:
    """The traceback from the first frame that is neither ours nor the import system's."""
    own = os.path.dirname(os.path.abspath(__file__)) + os.sep
    first = error.__traceback__
    while first is not None:
        file = first.tb_frame.f_code.co_filename
        if not (file.startswith(own) or "importlib" in file):
            break
        first = first.tb_next
    # A syntax error in the user's file has no frame of it, but names the line.
    return first or (None if isinstance(error, SyntaxError) else error.__traceback__)
