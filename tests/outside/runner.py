"""Run the test modules of another library with statetx's transforms in place of its own, and judge every outcome.

The module's source is executed unchanged. Its import statements hand out views of the modules named in a table of swaps
(`{"jax.lax.scan": statetx.scan}`): a view has the replaced names and passes every other one on, so the library itself,
and every module but the tested one, keep their own transforms.

A table for each suite (``jax_remat.toml``) names the tests that do not pass, and why. A test that neither passes nor is
listed is a complaint, and so is a listed one that passes.

Usage:
    export STATETX_OUTSIDE=<folder with checkouts: jax/, flax/>
    python tests/outside/runner.py jax_remat [--plain] [--only TEXT] [--every-case]   # outcomes in
    out/outside/jax_remat.json python tests/outside/runner.py --markdown docs/comparison.md   # counts of all suites;
    runs those without outcomes
"""

from __future__ import annotations

import argparse
import builtins
import contextlib
import dataclasses
import functools
import importlib.metadata
import json
import re
import subprocess
import sys
import tomllib
import traceback
import types
import unittest
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import pytest
from absl.testing import absltest

import statetx
from suites import SUITES, Suite

HERE = Path(__file__).parent
OUTCOMES = HERE.parents[1] / "out" / "outside"
STATETX = str(Path(statetx.__file__).parent)


class View(types.ModuleType):
    """A module with the swapped names replaced; writes go to the module itself."""

    def __init__(self, module: types.ModuleType, swaps: Mapping[str, Any]):
        super().__init__(module.__name__)
        self.__dict__.update(_module=module, _swaps=swaps)

    def __getattr__(self, name: str) -> Any:
        path = f"{self._module.__name__}.{name}"
        return self._swaps[path] if path in self._swaps else view(getattr(self._module, name), self._swaps)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._module, name, value)


def view(x: Any, swaps: Mapping[str, Any]) -> Any:
    """A `View` of a module that holds swapped names, directly or in a submodule; anything else unchanged."""
    if isinstance(x, types.ModuleType) and any(path.startswith(f"{x.__name__}.") for path in swaps):
        return View(x, swaps)
    return x


def load(path: Path, swaps: Mapping[str, Any]) -> types.ModuleType:
    """Execute a test module whose imports are views."""

    def imported(*args: Any, **kwargs: Any) -> Any:
        return view(builtins.__import__(*args, **kwargs), swaps)

    module = types.ModuleType(path.stem)
    module.__file__ = str(path)
    module.__dict__["__builtins__"] = {**vars(builtins), "__import__": imported}
    sys.modules[module.__name__] = module  # dataclasses and pickle look there
    exec(compile(path.read_text(), str(path), "exec", dont_inherit=True), module.__dict__)
    return module


@contextlib.contextmanager
def whole_tracebacks() -> Iterator[None]:
    """In this context JAX leaves tracebacks as they are: the last frame is where the error was raised."""
    before = jax.config.jax_traceback_filtering
    jax.config.update("jax_traceback_filtering", "off")
    try:
        yield
    finally:
        jax.config.update("jax_traceback_filtering", before)


@contextlib.contextmanager
def in_other_words() -> Iterator[None]:
    """In this context, a test that expects an error with JAX's words takes the same type, raised by statetx, in any
    words.
    """
    cases = {unittest.TestCase: "assertRaisesRegex", absltest.TestCase: "assertRaisesWithLiteralMatch"}
    before = {case: getattr(case, name) for case, name in cases.items()}
    unittest.TestCase.assertRaisesRegex = expect  # type: ignore[assignment]
    absltest.TestCase.assertRaisesWithLiteralMatch = lambda case, error, words, *args, **kwargs: expect(  # type: ignore[assignment]
        case, error, re.escape(words), *args, **kwargs
    )
    try:
        yield
    finally:
        for case, name in cases.items():
            setattr(case, name, before[case])


def expect(
    case: unittest.TestCase, error: Any, words: Any, call: Callable | None = None, *args: Any, **kwargs: Any
) -> Any:
    """`unittest.TestCase.assertRaisesRegex`, which takes other words where statetx raised the error."""

    @contextlib.contextmanager
    def expected() -> Iterator[types.SimpleNamespace]:
        caught = types.SimpleNamespace(exception=None)
        try:
            yield caught
        except error as e:
            caught.exception = e
            *_, (frame, _) = traceback.walk_tb(e.__traceback__)
            if not frame.f_code.co_filename.startswith(STATETX) and not re.search(words, str(e)):
                case.fail(f"{words!r} does not match {str(e)!r}, and statetx did not raise it")
        else:
            case.fail(f"{error} not raised")

    if call is None:
        return expected()
    with expected():
        call(*args, **kwargs)


def name_of(nodeid: str) -> str:
    """``file.Class.test``, without the folders."""
    file, *parts = nodeid.split("::")
    return ".".join([Path(file).stem, *parts])


def sample(items: Sequence[pytest.Item], cases: int) -> list[pytest.Item]:
    """Of a test with more than twice as many generated cases, so many, evenly spaced; their names differ from the first
    digit on.
    """
    families: dict[str, list[pytest.Item]] = {}
    for item in items:
        families.setdefault(re.split(r"\d|\[", item.nodeid.rpartition("::")[2])[0] + str(item.path), []).append(item)
    kept = [family[:: -(-len(family) // cases)] if len(family) > 2 * cases else family for family in families.values()]
    return [item for family in kept for item in family]


class Counted:
    """How often any of the swapped functions was called: a test that calls none says nothing about them."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, fun: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(fun)
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return fun(*args, **kwargs)

        return call


class Recorder:
    """A pytest plugin: collects through `load`, keeps the wanted tests and notes their outcomes."""

    def __init__(self, suite: Suite, swaps: Mapping[str, Any], wanted: Callable[[str], bool]):
        self.counted = Counted()
        self.swaps = {path: self.counted(fun) for path, fun in swaps.items()}
        self.suite, self.wanted = suite, wanted
        self.outcomes: dict[str, dict[str, str]] = {}

    def pytest_pycollect_makemodule(self, module_path: Path, parent: pytest.Collector) -> pytest.Module:
        swaps = self.swaps

        class SwappedModule(pytest.Module):
            def _getobj(self) -> types.ModuleType:
                return load(self.path, swaps)

        return SwappedModule.from_parent(parent, path=module_path)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        classes, cases = self.suite.classes, self.suite.cases
        kept = [item for item in items if not classes or (item.parent is not None and item.parent.name in classes)]
        kept = sample(kept, cases) if cases else kept
        items[:] = [item for item in kept if self.wanted(name_of(item.nodeid))]

    def pytest_runtest_setup(self) -> None:
        self.counted.calls = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = name_of(report.nodeid)
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            message = crash.message if crash else str(report.longrepr)
            self.outcomes[name] = {
                "outcome": "failed",
                "message": message[:2000],
                "trace": str(report.longrepr)[-6000:],
            }
        elif report.skipped:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            self.outcomes.setdefault(name, {"outcome": "skipped", "message": reason})
        elif report.when == "call":
            outcome = "passed" if self.counted.calls or not self.swaps else "untouched"
            self.outcomes.setdefault(name, {"outcome": outcome, "message": ""})

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            raise pytest.UsageError(f"the tests cannot be loaded:\n{report.longrepr}")


def run(
    suite: Suite, swaps: Mapping[str, Any], wanted: Callable[[str], bool] = lambda name: True
) -> dict[str, dict[str, str]]:
    """Outcome and message of every wanted test of a suite, by ``file.Class.test``."""
    files = suite.files()
    recorder = Recorder(suite, swaps, wanted)
    options = [
        "-q",
        "--noconftest",
        "-c",
        "/dev/null",
        "--rootdir",
        str(next(iter(files)).parent),
        "-p",
        "no:cacheprovider",
    ]
    options += ["-p", "no:doctest", "--tb=short", "-W", "default"]
    sys.argv[1:] = []  # absl would read them
    with whole_tracebacks(), in_other_words() if swaps else contextlib.nullcontext():
        status = pytest.main([*options, *map(str, files)], plugins=[recorder])
    assert status in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED), status
    return recorder.outcomes


# Entries of a table: the key of its reason, and the column of the report.
KINDS = {"different": "sentence", "inapplicable": "reason", "plain": "reason", "fault": "happens"}


@dataclasses.dataclass(frozen=True)
class Entry:
    """Some tests that do not pass, for one reason; of the names, only ``*`` is a wildcard."""

    kind: str
    why: str
    page: str | None
    tests: tuple[str, ...]

    def matches(self, name: str) -> bool:
        return any(re.fullmatch(re.escape(test).replace(r"\*", ".*"), name) for test in self.tests)


def read_table(path: Path) -> list[Entry]:
    """The entries of a suite's table."""
    table = tomllib.loads(path.read_text())
    return [
        Entry(kind, entry[KINDS[kind]], entry.get("page"), tuple(entry["tests"]))
        for kind, entries in table.items()
        for entry in entries
    ]


def missing_sentences(entries: Sequence[Entry], root: Path) -> list[str]:
    """Quoted sentences that their page does not contain."""
    words = lambda text: " ".join(text.split())
    return [
        f"{entry.page} does not say: {entry.why}"
        for entry in entries
        if entry.kind == "different" and words(entry.why) not in words((root / str(entry.page)).read_text())
    ]


def judge(outcomes: Mapping[str, Mapping[str, str]], entries: Sequence[Entry]) -> tuple[Counter[str], list[str]]:
    """The number of tests of each kind, and the errors in the outcomes or the table."""
    counts, complaints = Counter[str](), []
    for name, result in outcomes.items():
        outcome, named = result["outcome"], [entry for entry in entries if entry.matches(name)]
        if len(named) > 1:
            complaints.append(f"named {len(named)} times: {name}")
        elif outcome == "failed" and not named:
            complaints.append(f"fails, and is not named: {name}: {result['message'][:300]}")
        elif outcome != "failed" and named:
            complaints.append(f"named as {named[0].kind}, but it is {outcome}: {name}")
        counts[named[0].kind if named else outcome] += 1
    for entry in entries:
        unmatched = [test for test in entry.tests if not any(Entry("", "", "", (test,)).matches(n) for n in outcomes)]
        complaints += [f"named, but there is no such test: {test}" for test in unmatched]
    return counts, complaints


def write_counts(page: Path) -> None:
    """Put the counts of every suite in their place at the end of a page."""
    columns = ["passed", "different", "inapplicable", "fault"]
    rows = []
    for name, suite in SUITES.items():
        out = OUTCOMES / f"{name}.json"
        if not out.exists():
            subprocess.run([sys.executable, __file__, name], check=True)
        counts, complaints = judge(json.loads(out.read_text()), read_table(HERE / f"{name}.toml"))
        assert not complaints, "\n".join([f"{name} has complaints:", *complaints])
        counts["inapplicable"] += counts["untouched"] + counts["skipped"] + counts["plain"]
        rows.append(
            f"| {suite.title} | {sum(counts[key] for key in columns)} | "
            f"{' | '.join(str(counts[key]) for key in columns)} |"
        )
    head, _, _ = page.read_text().partition(SECTION)
    page.write_text(head.rstrip("\n") + "\n\n" + SECTION + LEGEND + "\n".join(rows) + "\n")


SECTION = "## Tests of other libraries\n"
LEGEND = f"""
Generated by `python tests/outside/runner.py --markdown docs/comparison.md`: jax {jax.__version__}, \
flax {importlib.metadata.version("flax")}, brainstate {importlib.metadata.version("brainstate")}.

The tests of JAX, flax.nnx and brainstate, run with statetx's transforms. A *difference* is deliberate and documented, mostly in
[differences from JAX](differences.md). *Not applicable* are tests of private names, of options that statetx does not have, skipped tests, and those that
call no replaced function. A *fault* is ours, and open. `tests/outside/*.toml` has the reason for every test that does not pass. nnx's `vmap`, `scan`, `vjp`
and `jvp` stay nnx's. Of JAX's control-flow tests with more than 16 generated cases, 8 run. An expected error must have its type; its words may differ.

| tests | run | passed | difference | not applicable | fault |
|---|--:|--:|--:|--:|--:|
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", choices=SUITES, nargs="?")
    parser.add_argument("--plain", action="store_true", help="with the library's own transforms")
    parser.add_argument("--only", metavar="TEXT", help="tests that have this in their names")
    parser.add_argument("--named", action="store_true", help="tests that stand in the suite's table")
    parser.add_argument("--every-case", action="store_true", help="every generated case of a test, not a sample")
    parser.add_argument("--out", type=Path, help="where to write outcomes and messages")
    parser.add_argument("--markdown", type=Path, metavar="PAGE", help="write the counts of all suites to PAGE")
    options = parser.parse_args()
    if options.markdown:
        return write_counts(options.markdown)

    suite, entries = SUITES[options.suite], read_table(HERE / f"{options.suite}.toml")
    wanted = lambda name: (options.only or "") in name
    if options.named:
        wanted = lambda name: any(entry.matches(name) for entry in entries)
    if options.every_case:
        suite = dataclasses.replace(suite, cases=None)
    outcomes = run(suite, {} if options.plain else suite.swaps(), wanted)
    is_whole = not (options.plain or options.only or options.named)
    out = options.out or (OUTCOMES / f"{options.suite}.json" if is_whole else None)
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(outcomes, indent=1))
    counts, complaints = (
        judge(outcomes, entries) if is_whole else (Counter(r["outcome"] for r in outcomes.values()), [])
    )
    print(*complaints, dict(counts), sep="\n")


if __name__ == "__main__":
    main()
