"""Commands: the work of each, its output and its files."""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import json
import pathlib
import pydoc
import re
import sys
from collections.abc import Callable
from html import escape
from typing import TYPE_CHECKING, Any, NamedTuple

from .. import _files
from .._tables import Cell, Column, Table, page
from .._text import format_bytes, suggestion
from .target import BadInput, UserFunction

if TYPE_CHECKING:
    from ..memory.baseline import MemoryBaseline

Writer = Callable[[str], None]


class Output(NamedTuple):
    """The text that a command prints, and the functions that write its files: option to writer.

    Attributes:
        is_failed: whether the exit status shall say so.
    """

    text: str
    writers: dict[str, Writer]
    is_failed: bool = False


def memory(target: UserFunction, options: argparse.Namespace) -> Output:
    from ..memory import baseline
    from ..memory.measure import memory_profile

    profile = memory_profile(target.fun, *target.args, gradient=options.gradient, **target.kwargs)
    now = baseline.MemoryBaseline.of(profile)
    key = baseline.key_of(profile.name, now)
    shown, is_failed = str(profile), False
    if options.against is not None:
        try:
            before = baseline.find(options.against, key)
        except ValueError as e:
            raise BadInput(f"--against: {e}") from None
        difference = baseline.Difference(profile.name, before, now, baseline.read_tolerance(options.tolerance))
        shown = "\n".join(difference.annotations()) if options.format == "github" else str(difference)
        is_failed = difference.is_regression
    return Output(
        shown,
        {
            "html": profile.to_html,
            "json": lambda path: _write_json(path, profile.to_dict()),
            "save": lambda path: _save(path, key, now),
        },
        is_failed,
    )


def check_against(options: argparse.Namespace) -> None:
    """Mistakes in the options of a comparison show before anything is compiled."""
    from ..memory import baseline

    if options.against is None and options.format != "text":
        raise BadInput(f"--format {options.format} is for --against FILE")
    try:
        baseline.read_tolerance(options.tolerance)
        if options.against is not None:
            baseline.load(options.against)
    except (OSError, ValueError) as e:
        raise BadInput(f"--against: {e}") from None


def _save(path: str, key: str, now: MemoryBaseline) -> None:
    from ..memory.baseline import save

    try:
        save(path, key, now)
    except ValueError as e:
        raise BadInput(f"--save: {e}") from None


def fit(target: UserFunction, options: argparse.Namespace) -> Output:
    from ..memory.oom import explain_oom

    is_shown = sys.stdout.isatty() and importlib.util.find_spec("rich") is not None
    named = {"limit": options.limit, "gradient": options.gradient, "time_limit": options.time_limit}
    report = explain_oom(target.fun, *target.args, **named, progress=is_shown, **target.kwargs)
    if report.limit_bytes is None:
        raise BadInput(f"fit: {report.profile.backend} does not tell its memory; give --limit 16GiB, or --target h100")
    return _output(report)._replace(is_failed=not report.can_fit)


def residuals(target: UserFunction, options: argparse.Namespace) -> Output:
    from ..residuals.saved import saved_residuals

    return _output(saved_residuals(target.fun, *target.args, **target.kwargs))


def report(target: UserFunction, options: argparse.Namespace) -> Output:
    from ..residuals.report import memory_report

    return _output(memory_report(target.fun, *target.args, gradient=options.gradient, **target.kwargs))


def plan(target: UserFunction, options: argparse.Namespace) -> Output:
    from ..planner.planner import plan

    made = plan(target.fun, *target.args, budget=options.budget, of=options.of, **target.kwargs)
    return Output(str(made), {"html": _html_writer(made), "json": made.save})


def targets() -> str:
    """The table of common devices."""
    from .._targets.spec import table
    from .._targets.target import Target

    rows, reasons = [], {}
    for name, spec in table().items():
        device = Target(name)
        here = "yes"
        if device.missing:
            reasons.setdefault(device.missing, len(reasons) + 1)
            here = f"no ({reasons[device.missing]})"
        texts = (name, device.kind, format_bytes(device.memory_bytes), here, spec.source)
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


def explain(name: str) -> str:
    """Print the entry of an error on the errors page, else the signature and the docstring of a public name."""
    import statetx

    found: Any = statetx
    for part in name.removeprefix("statetx.").split("."):
        known = [n for n in dir(found) if not n.startswith("_")]
        if part not in known:
            raise BadInput(f"help: statetx has no {name}.{suggestion(part, known)}")
        found = getattr(found, part)
    if isinstance(found, type) and issubclass(found, Exception) and (section := _section(found.__name__)):
        return f"{found.__name__}: {inspect.getdoc(found)}\n\n{section}"
    return "\n".join(pydoc.plain(pydoc.render_doc(found)).splitlines()[2:])


def _section(error: str) -> str:
    """The part of docs/errors.md under the heading of an error; empty if there is none."""
    for path in (
        pathlib.Path(__file__).with_name("errors.md"),
        pathlib.Path(__file__).parents[2] / "docs" / "errors.md",
    ):
        if path.is_file():
            _, heading, rest = path.read_text(encoding="utf-8").partition(f"\n## {error}\n")
            # Without what is for the generator of the site.
            text = re.sub(r"^(:::.*\n(?: +.*\n)*|```.*\n)", "", rest.split("\n## ")[0] + "\n", flags=re.M)
            return text.strip() if heading else ""
    return ""


def _output(result: Any) -> Output:
    return Output(str(result), {"html": _html_writer(result), "json": lambda path: _write_json(path, result.to_dict())})


def _write_json(path: str, content: Any) -> None:
    _files.write(path, json.dumps(content))


def _html_writer(result: Any) -> Writer:
    """A page with the tables that a notebook shows."""
    name = escape(result.name)
    main = f'<section class="card statetx">{result._html()}</section>'
    made = page(
        f"statetx: {result.name}",
        main,
        header=f'<p class="eyebrow">{type(result).__name__}</p><h1><code>{name}</code></h1>',
    )
    return lambda path: _files.write(path, made)
