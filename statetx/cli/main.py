"""The commands: output, files, errors as lines with exit statuses."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from html import escape
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

from .. import _files
from .._tables import Cell, Column, Table, page
from .._text import format_bytes
from .function import BadInput, UserFunction, load_function
from .help import show
from .parser import make_parser

if TYPE_CHECKING:
    from ..memory.baseline import MemoryBaseline

Writer = Callable[[str], None]

FAILED, BAD_INPUT = 1, 2
_INTERRUPTED = 130  # the exit status of a program that SIGINT ended, by convention of the shell


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: the options; the process's if None.

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
    from .._errors import PlanError, TargetError

    try:
        return _execute(options)
    except BadInput as e:
        return _fail(str(e), BAD_INPUT)
    except (PlanError, TargetError) as e:
        return _fail(str(e.args[0]), FAILED)
    except KeyboardInterrupt:
        return _fail("interrupted", _INTERRUPTED)
    except SystemExit as e:
        return _fail(f"{options.function} ended the program with exit status {e.code}", FAILED)
    except Exception as e:
        traceback.print_exception(type(e), e, _users_part(e))
        return FAILED


def _execute(options: argparse.Namespace) -> int:
    if options.command in ("targets", "help"):
        _print(_targets() if options.command == "targets" else show(options.words))
        return 0
    if options.command == "doctor":
        return _doctor(options.json)
    if options.command == "plan":
        _check_budget(options.budget, options.of)
    if options.command == "memory":
        _check_against(options)
    names = ("html", "json", "save", "summary")
    files = {name: path for name in names if (path := getattr(options, name, None)) is not None}
    for name, path in files.items():
        _check_writable(name, path)
    real = [os.path.realpath(path) for path in files.values() if os.path.isfile(path) or not os.path.exists(path)]
    if len({*real}) < len(real):
        raise BadInput(f"{' and '.join(f'--{name}' for name in files)} write to the same file")

    with _device(getattr(options, "target", None)):
        function = load_function(options.function, options.shapes, options.factory)
        output = _RUN[options.command](function, options)
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
        problem = e.args[0].splitlines()[0]
        is_unknown = problem.startswith("There is no target") and not problem.endswith("?")
        raise BadInput(f"--target: {problem}{_LIST_OF_TARGETS if is_unknown else ''}") from None


_LIST_OF_TARGETS = " Known: python -m statetx targets."


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
    package = os.path.dirname(os.path.abspath(__file__)) + os.sep
    first = error.__traceback__
    while first is not None:
        file = first.tb_frame.f_code.co_filename
        if not (file.startswith(package) or "importlib" in file):
            break
        first = first.tb_next
    # A syntax error in the user's file has no frame of it, but names the line.
    return first or (None if isinstance(error, SyntaxError) else error.__traceback__)


# -- commands ----------------------------------------------------------------------------------------------------------


class Output(NamedTuple):
    """The text that a command prints, and the functions that write its files: option to writer.

    Attributes:
        is_failed: whether the exit status shall say so.
    """

    text: str
    writers: dict[str, Writer]
    is_failed: bool = False


def _memory(function: UserFunction, options: argparse.Namespace) -> Output:
    from ..memory import baseline
    from ..memory.measure import memory_profile

    profile = memory_profile(function.fun, *function.args, gradient=options.gradient, **function.kwargs)
    figures = baseline.MemoryBaseline.of(profile)
    key = baseline.key_of(profile.name, figures)
    report, is_failed, summary = str(profile), False, ""
    if options.against is not None:
        try:
            saved = baseline.find(options.against, key)
        except ValueError as e:
            raise BadInput(f"--against: {e}") from None
        difference = baseline.Difference(profile.name, saved, figures, baseline.read_tolerance(options.tolerance))
        report = "\n".join(difference.annotations()) if options.format == "github" else str(difference)
        is_failed, summary = difference.is_regression, difference.markdown()
    return Output(
        report,
        {
            "html": profile.to_html,
            "json": lambda path: _write_json(path, profile.to_dict()),
            "save": lambda path: _save(path, key, figures),
            "summary": lambda path: _files.write(path, summary),
        },
        is_failed,
    )


def _check_against(options: argparse.Namespace) -> None:
    """Mistakes in the options of a comparison show before anything is compiled."""
    from ..memory import baseline

    if options.against is None and (options.format != "text" or options.summary is not None):
        raise BadInput(
            f"--{f'format {options.format}' if options.format != 'text' else 'summary'} is for --against FILE"
        )
    try:
        baseline.read_tolerance(options.tolerance)
        if options.against is not None:
            baseline.load(options.against)
    except (OSError, ValueError) as e:
        raise BadInput(f"--against: {e}") from None


def _save(path: str, key: str, figures: MemoryBaseline) -> None:
    from ..memory.baseline import save

    try:
        save(path, key, figures)
    except ValueError as e:
        raise BadInput(f"--save: {e}") from None


def _fit(function: UserFunction, options: argparse.Namespace) -> Output:
    from ..memory.oom import explain_oom

    named = {"limit": options.limit, "gradient": options.gradient, "time_limit": options.time_limit}
    named["verify"] = options.verify
    report = explain_oom(function.fun, *function.args, **named, **function.kwargs)
    if report.limit_bytes is None:
        raise BadInput(f"fit: {report.profile.backend} does not tell its memory; give --limit 16GiB, or --target h100")
    return _output(report)._replace(is_failed=not report.can_fit)


def _residuals(function: UserFunction, options: argparse.Namespace) -> Output:
    from ..residuals.saved import saved_residuals

    named = {"argnums": options.argnums, "wrt": options.wrt, "has_aux": options.has_aux}
    return _output(saved_residuals(function.fun, *function.args, **named, **function.kwargs))


def _report(function: UserFunction, options: argparse.Namespace) -> Output:
    from ..residuals.measure import memory_report

    named: dict[str, Any] = {"gradient": options.gradient}
    named |= {} if options.policies is None else {"policies": options.policies}
    return _output(memory_report(function.fun, *function.args, **named, **function.kwargs))


def _plan(function: UserFunction, options: argparse.Namespace) -> Output:
    from ..planner.planner import plan

    names = ("budget", "of", "objective", "offload", "stored_as", "argnums", "time_limit", "verify")
    result = plan(function.fun, *function.args, **{name: getattr(options, name) for name in names}, **function.kwargs)
    return Output(str(result), {"html": _html_writer(result), "json": result.save})


def _verify(function: UserFunction, options: argparse.Namespace) -> Output:
    from .._verify.functions import filled, plain
    from .._verify.same import same_step

    args, kwargs = filled((function.args, function.kwargs))
    reference = plain(function.fun)
    if options.against is not None:
        reference = load_function(options.against, options.shapes, options.factory).fun
    report = same_step(reference, function.fun, args, kwargs, steps=options.steps, tolerance=options.tolerance)
    writers = {"json": lambda path: _write_json(path, report.to_dict())}
    return Output(str(report), writers, is_failed=bool(report.problem))


def _doctor(path: str | None) -> int:
    """Versions, and a line for each known fault."""
    from importlib import metadata

    from .._known import FAULTS
    from .._targets import current

    if path is not None:
        _check_writable("json", path)
    named = {(d.metadata["Name"] or "").lower().replace("_", "-"): d.version for d in metadata.distributions()}
    libraries = ("statetx", "jax", "jaxlib", "numpy", "brainstate", "flax", "libtpu")
    versions = {name: v for name, v in sorted(named.items()) if name in libraries or name.startswith("jax-")}
    faults = [{"thread": f.thread, "what": f.what, "fix": f.fix, "verdict": f.verdict()} for f in FAULTS]
    lines = [f"{name} {version}" for name, version in versions.items()]
    lines = [f"{', '.join(lines)}; {len(current.local_devices())} x {current.local_devices()[0].device_kind}", ""]
    for f in faults:
        lines.append(f"{f['verdict']}: {f['what']} {f['thread']}")
        lines += [f"  Fix: {f['fix']}."] * (f["verdict"] == "wrong here")
    _print("\n".join(lines))
    if path is not None:
        _write_json(path, {"versions": versions, "faults": faults})
        _print(f"Wrote {path}")
    return 0


def _targets() -> str:
    """The table of common devices."""
    from .._targets.plugins import table
    from .._targets.target import Target

    rows, reasons = [], {}
    for name, spec in table().items():
        device = Target(name)
        availability = "yes"
        if device.missing:
            reasons.setdefault(device.missing, len(reasons) + 1)
            availability = f"no ({reasons[device.missing]})"
        texts = (name, device.kind, format_bytes(device.memory_bytes), availability, spec.source)
        rows.append([Cell(text) for text in texts])
    columns = [
        Column("target"),
        Column("device"),
        Column("for programs", "right"),
        Column("here"),
        Column("figures", rank=1),
    ]
    notes = [(f"({number})", f"{reason}.") for reason, number in reasons.items()]
    several = (
        "'h100:8', 'h100:2x8' (two hosts of eight), 'tpu v5e:2x4' (a grid of chips); or a file that Target.save wrote."
    )
    return str(Table("", columns, rows, [*notes, ("Several:", several)]))


def _output(result: Any) -> Output:
    return Output(str(result), {"html": _html_writer(result), "json": lambda path: _write_json(path, result.to_dict())})


def _write_json(path: str, content: Any) -> None:
    _files.write(path, json.dumps(content))


def _html_writer(result: Any) -> Writer:
    """A page with the tables that a notebook shows."""
    name = escape(result.name)
    main = f'<section class="card statetx">{result._html()}</section>'
    content = page(
        f"statetx: {result.name}",
        main,
        header=f'<p class="eyebrow">{type(result).__name__}</p><h1><code>{name}</code></h1>',
    )
    return lambda path: _files.write(path, content)


_RUN = {
    "memory": _memory,
    "fit": _fit,
    "residuals": _residuals,
    "report": _report,
    "plan": _plan,
    "verify": _verify,
}
