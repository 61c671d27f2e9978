"""Plant faults in the package, one at a time, and list those that no test finds: ``make mutations``.

A fault is a small change of one expression or statement: another comparison, index or order, another flag or default,
another axis, swapped arguments, a dropped call or store, an item, a condition or an option left out, no copy, no
``with``. ``--draw 100 --seed 0`` draws a hundred from the folders below, the same ones each time; with ``--kinds flag
copy`` only such. Each is planted in a copy of the checkout, and the tests that execute its statement run until one
fails: first those of `make smoke`, then those of `make test`, each time the tests of the file's own name first, and the
cheapest first. Which tests execute which statement is measured once, by a run of `make test` in a copy where a probe
stands before the statement of each drawn fault (``--measure``). Tests run in forks of one process, which has imported
JAX and the libraries.

A fault gets tests of ``--limit`` CPU seconds; where they take a minute more with the fault, it is found. Results are
kept in out/mutations, so that a run that was stopped goes on; with a larger limit the survivors run again. ``--report``
prints them as a table. A survivor either changes nothing that a user could see, which `EQUIVALENT` says with the
reason, or needs a test.
"""

from __future__ import annotations

import argparse
import ast
import collections
import copy
import dataclasses
import importlib
import itertools
import json
import os
import pathlib
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).parents[1]
OUT = ROOT / "out" / "mutations"
PROBED, PLANTED = OUT / "probed", OUT / "planted"
FOLDERS = "_lift _frames transforms _loops _remat kinds planner _equations".split()
# Survivors that were read, and change nothing that a user could see: the text of the fault without its line, and the
# reason.
EQUIVALENT: dict[str, str] = {
    "statetx/_lift/carry.py swapped arguments: differs(a, b) -> (differs(b, a))": "whether two types differ",
    "statetx/_loops/checkpointed.py comparison: is_float(aval) and number -> (is_float(aval) or number)": (
        "a buffer is written before it is read"
    ),
    "statetx/_remat/rewriter.py dropped: visited.add(id(inner)) -> pass": "time alone",
    "statetx/kinds/brainstate/observe.py left out: innermost and not access.acquired -> (innermost)": "time alone",
    "statetx/kinds/misuse.py index: obj[:_MAX_ITEMS] -> (obj[:_MAX_ITEMS + 1])": "how many items a message looks at",
    "statetx/_loops/bind.py index: handed_on[:num_carry] -> (handed_on[:num_carry + 1])": "the next condition has it",
}


@dataclasses.dataclass(frozen=True)
class Fault:
    """A planted fault: `before`, at these lines and columns (in bytes) of a file, becomes `after`."""

    file: str
    kind: str
    line: int
    column: int
    end_line: int
    end_column: int
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.kind}: {self.before} -> {self.after}"

    def plant(self, root: pathlib.Path) -> None:
        path = root / self.file
        lines = path.read_bytes().splitlines(keepends=True)
        head, tail = lines[self.line - 1][: self.column], lines[self.end_line - 1][self.end_column :]
        after = self.after.replace("\n", "\n" + " " * self.column).encode()
        lines[self.line - 1 : self.end_line] = [head + after + tail]
        path.write_bytes(b"".join(lines))
        ast.parse(path.read_bytes())


# -- what may be planted ---------------------------------------------------------------------------------------------

COMPARISONS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
OPPOSITES = {"any": "all", "all": "any", "min": "max", "max": "min"}


def mutations(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Faults of one node: what each is, and the node in its place."""
    match node:
        case ast.Compare(ops=[op]) if type(op) in COMPARISONS:
            yield "comparison", ast.Compare(node.left, [COMPARISONS[type(op)]()], node.comparators)
        case ast.BoolOp():
            yield "comparison", ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
        case ast.UnaryOp(op=ast.Not()):
            yield "comparison", node.operand
        case ast.Subscript(slice=ast.Constant(value=int(index)), ctx=ast.Load()):
            yield "index", ast.Subscript(node.value, ast.Constant(index + 1 if index == 0 else index - 1), ast.Load())
        case ast.Subscript(slice=ast.Slice(lower=lower, upper=upper, step=None), ctx=ast.Load()) if lower or upper:
            one = lambda bound: bound and ast.BinOp(bound, ast.Add(), ast.Constant(1))
            yield "index", ast.Subscript(node.value, ast.Slice(one(lower), None if lower else one(upper)), ast.Load())
        case ast.BinOp(op=ast.Sub()):
            yield "order", ast.BinOp(node.right, ast.Sub(), node.left)
        case (
            ast.BinOp(op=ast.Add(), left=ast.List() | ast.Tuple())
            | ast.BinOp(op=ast.Add(), right=ast.List() | ast.Tuple())
        ):
            yield "order", ast.BinOp(node.right, ast.Add(), node.left)
        case ast.BinOp(op=ast.Add(), right=ast.Constant(value=1)):
            yield "index", node.left
        case ast.Call(func=ast.Name(id="reversed" | "sorted"), args=[items, *_]):
            yield "order", ast.Call(ast.Name("list", ast.Load()), [items], [])
        case ast.Call(func=ast.Name(id=name)) if name in OPPOSITES:
            yield "comparison", ast.Call(ast.Name(OPPOSITES[name], ast.Load()), node.args, node.keywords)
        case (
            ast.Call(func=ast.Name(id="list" | "dict" | "set"), args=[ast.Name() | ast.Attribute() as items])
            | ast.List(elts=[ast.Starred(value=items)])
            | ast.Dict(keys=[None], values=[items])
        ):
            yield "copy", items
        case ast.Constant(value=bool(flag)):
            yield "flag", ast.Constant(not flag)
        case ast.Continue():
            yield "dropped", ast.Pass()
        case ast.With(items=[ast.withitem(optional_vars=None)]):
            nothing = ast.parse("__import__('contextlib').nullcontext()", mode="eval").body
            yield "with", ast.With([ast.withitem(nothing)], node.body)
        case ast.Call(args=[ast.Name() | ast.Attribute() as a, ast.Name() | ast.Attribute() as b, *rest]):
            if not (isinstance(node.func, ast.Name) and node.func.id in ("isinstance", "issubclass", "getattr")):
                yield "swapped arguments", ast.Call(node.func, [b, a, *rest], node.keywords)
        case ast.Expr(value=ast.Call()) | ast.Assign(targets=[ast.Attribute() | ast.Subscript()]) | ast.AugAssign():
            yield "dropped", ast.Pass()
        case ast.Return(value=ast.IfExp(body=body)):
            yield "comparison", ast.Return(body)
        case ast.IfExp():
            yield "comparison", ast.IfExp(node.test, node.orelse, node.body)
    for kept in left_out(node):
        yield "left out", kept
    if isinstance(node, ast.Call):
        for n, word in enumerate(node.keywords):
            if word.arg != "strict":
                yield "option left out", ast.Call(node.func, node.args, node.keywords[:n] + node.keywords[n + 1 :])
            if word.arg in ("axis", "out_axes", "in_axes") and isinstance(word.value, ast.Constant):
                other = copy.deepcopy(node)
                other.keywords[n].value = ast.Constant(1 if word.value.value == 0 else 0)
                yield "axis", other
        if node.args and isinstance(node.args[-1], ast.Constant) and node.args[-1].value in (0, 1, -1):
            if not isinstance(node.args[-1].value, bool):
                yield (
                    "axis",
                    ast.Call(node.func, [*node.args[:-1], ast.Constant(1 - abs(node.args[-1].value))], node.keywords),
                )


def left_out(node: ast.AST) -> Iterator[ast.AST]:
    """A list without its last item: that of a comprehension, and that which a loop goes over; conditions without the
    last one.
    """
    match node:
        case ast.BoolOp(values=[*values, _]):
            yield values[0] if len(values) == 1 else ast.BoolOp(node.op, values)
        case ast.BinOp(op=ast.BitOr()):
            yield node.left
        case ast.Compare(ops=[ast.In() | ast.NotIn()], comparators=[ast.Tuple(elts=[*items, _])]):
            yield ast.Compare(node.left, node.ops, [ast.Tuple(items, ast.Load())])
        case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp() if node.generators[-1].ifs:
            other = copy.deepcopy(node)
            other.generators[-1].ifs.pop()
            yield other
    if isinstance(node, ast.ListComp):
        yield ast.Subscript(copy.deepcopy(node), ast.Slice(None, ast.Constant(-1)), ast.Load())
    if isinstance(node, ast.List) and isinstance(node.ctx, ast.Load) and len(node.elts) > 1:
        yield ast.List(node.elts[:-1], ast.Load())


def faults_of(file: pathlib.Path) -> Iterator[Fault]:
    """Every fault that may be planted in the functions of a file."""
    source = file.read_bytes()
    tree, lines = ast.parse(source), source.splitlines(keepends=True)
    skipped = {id(n) for f in ast.walk(tree) for n in _skipped(f)}
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef) or "overload" in map(ast.unparse, function.decorator_list):
            continue
        defaults = [d for d in (*function.args.defaults, *function.args.kw_defaults) if d is not None]
        for node in (n for part in (*function.body, *defaults) for n in _own(part)):
            if id(node) in skipped and node not in defaults:
                continue
            for kind, other in mutations(node):
                before = _text_of(lines, node)
                after = ast.unparse(ast.fix_missing_locations(other))
                if isinstance(node, ast.expr):
                    after = f"({after})"
                place = node.lineno, node.col_offset, node.end_lineno or node.lineno, node.end_col_offset or 0
                yield Fault(str(file.relative_to(ROOT)), kind, *place, before, after)


def _text_of(lines: list[bytes], node: ast.AST) -> str:
    """As `ast.get_source_segment`, which splits the source again for each node."""
    part = lines[node.lineno - 1 : node.end_lineno]
    part[-1] = part[-1][: node.end_col_offset]
    part[0] = part[0][node.col_offset :]
    return b"".join(part).decode()


def _own(node: ast.AST) -> Iterator[ast.AST]:
    """A statement's nodes, without those of functions in it."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.ClassDef):
            yield from _own(child)


def _skipped(node: ast.AST) -> Iterator[ast.AST]:
    """Messages, annotations, assertions, and ``strict=``, which is one: text of errors has tests of its own, which
    compare it with the pages.
    """
    match node:
        case ast.Raise() | ast.Assert() | ast.JoinedStr():
            yield from ast.walk(node)
        case ast.AnnAssign(annotation=part) | ast.keyword(arg="strict", value=part):
            yield from ast.walk(part)
        case ast.FunctionDef():
            for part in (node.args, node.returns, *node.decorator_list):
                if part is not None:
                    yield from ast.walk(part)


def drawn(num: int, seed: int, kinds: list[str]) -> list[Fault]:
    """Faults of some kinds or any, drawn with equal chances for folders, and in a folder for files by their size, one
    for each place.
    """
    rng = random.Random(seed)
    of_folder = {
        folder: [
            fault
            for path in sorted((ROOT / "statetx" / folder).rglob("*.py"))
            for fault in faults_of(path)
            if not kinds or fault.kind in kinds
        ]
        for folder in FOLDERS
    }
    found: dict[tuple, Fault] = {}
    while len(found) < num:
        fault = rng.choice(of_folder[rng.choice(FOLDERS)])
        found.setdefault((fault.file, fault.line), fault)
    return list(found.values())


# -- which tests execute it ------------------------------------------------------------------------------------------

PROBE = """
import os

NOTED = set()


def reached(number):
    note = f"{number}\\t{os.environ.get('PYTEST_CURRENT_TEST', '')}\\n"
    if note not in NOTED:
        NOTED.add(note)
        with open(%r, "a") as notes:
            notes.write(note)
"""


def copied(root: pathlib.Path) -> None:
    """A copy of the checkout, with what its tests have compiled."""
    shutil.rmtree(root, ignore_errors=True)
    skip = shutil.ignore_patterns(".git", ".venv*", "out", "__pycache__", ".ruff_cache", "site")
    shutil.copytree(ROOT, root, ignore=skip)


def probe(root: pathlib.Path, faults: list[Fault]) -> None:
    """Insert a probe before the statement of each fault."""
    (root / "fault_probe.py").write_text(PROBE % str(OUT / "reached"))
    of_file: dict[str, list[int]] = collections.defaultdict(list)
    for number, fault in enumerate(faults):
        of_file[fault.file].append(number)
    for file, numbers in of_file.items():
        lines = (root / file).read_bytes().splitlines(keepends=True)
        tree = ast.parse(b"".join(lines))
        spots = collections.defaultdict(list)
        for number in numbers:
            spots[_before_statement(tree, lines, faults[number])].append(number)
        for (line, column), here in sorted(spots.items(), reverse=True):
            text = "; ".join(f"__import__('fault_probe').reached({number})" for number in here).encode()
            head, rest = lines[line - 1][:column], lines[line - 1][column:]
            lines[line - 1] = head + text + (b"; " if head.strip() else b"\n" + head) + rest
        (root / file).write_bytes(b"".join(lines))
        ast.parse((root / file).read_bytes())


def _before_statement(tree: ast.AST, lines: list[bytes], fault: Fault) -> tuple[int, int]:
    """Line and column (in bytes) of the innermost statement around a fault that another may stand before: for one in
    the defaults of a function, the function's first.
    """
    start, end = (fault.line, fault.column), (fault.end_line, fault.end_column)
    around = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.stmt)
        and (node.lineno, node.col_offset) <= start
        and end <= (node.end_lineno or 0, node.end_col_offset or 0)
        and not lines[node.lineno - 1][node.col_offset :].startswith(b"elif")
    ]
    inner = max(around, key=lambda node: (node.lineno, node.col_offset))
    if isinstance(inner, ast.FunctionDef):
        inner = next((s for s in inner.body if not isinstance(s, ast.Expr)), inner.body[-1])
    return inner.lineno, inner.col_offset


def measure(faults: list[Fault], words: list[str]) -> None:
    """Run the tests with a probe at each fault, which notes the test in force."""
    copied(PROBED)
    probe(PROBED, faults)
    (OUT / "reached").write_text("")
    command = [sys.executable, "-m", "pytest", "-n", "2", "--dist", "worksteal", "-q", f"--times={OUT / 'times'}"]
    with open(OUT / "measured.log", "w") as log:
        environment = os.environ | {"PYTHONPATH": str(PROBED)}
        run = subprocess.run([*command, *words], cwd=PROBED, env=environment, stdout=log, stderr=subprocess.STDOUT)
    if run.returncode not in (0, 1):  # of a test that fails, since lines have moved, nothing is expected later
        raise RuntimeError(f"the tests did not run: {log.name}")


class Reached:
    """The tests that execute a fault's statement and pass without the fault."""

    def __init__(self, faults: list[Fault]) -> None:
        rows = [line.split("\t") for line in (OUT / "times").read_text().splitlines()]
        self._seconds = {test: float(seconds) for seconds, _, outcome, test in rows if outcome == "passed"}
        self.smoke = {test for _, speed, _, test in rows if speed == "smoke"}
        self._tests: dict[int, set[str]] = collections.defaultdict(set)
        for line in (OUT / "reached").read_text().splitlines():
            number, _, test = line.partition("\t")
            self._tests[int(number)].add(test.rpartition(" (")[0])
        self._numbers = {str(fault): number for number, fault in enumerate(faults)}

    def tests(self, fault: Fault) -> list[str]:
        """Those of `make smoke` first, then by file, then by time."""
        found = self._tests[self._numbers[str(fault)]] & self._seconds.keys()
        stem = pathlib.Path(fault.file).stem.strip("_")
        far = lambda test: stem not in test.partition("::")[0]
        return sorted(found, key=lambda test: (test not in self.smoke, far(test), self._seconds[test], test))

    def first(self, tests: list[str], seconds: float) -> list[str]:
        """The first ones, at least one, which take so many CPU seconds together."""
        ends = itertools.accumulate(self._seconds[test] for test in tests)
        return [test for n, (test, end) in enumerate(zip(tests, ends, strict=True)) if end <= seconds or n == 0]


# -- one after another -----------------------------------------------------------------------------------------------


def prepare() -> None:
    """Make the copy to plant faults in, and import here what all of its tests import, the package left out."""
    copied(PLANTED)
    subprocess.run([sys.executable, "-m", "compileall", "-q", "statetx"], cwd=PLANTED, check=True)
    os.chdir(PLANTED)
    os.environ["PYTHONPATH"] = str(PLANTED)
    rest = [p for p in sys.path if pathlib.Path(p or ".") != ROOT / "tests"]
    sys.path[:] = [str(PLANTED), str(PLANTED / "tests"), *rest]
    for name in ("conftest", "flax.nnx", "flax.linen", "brainstate", "optax", "hypothesis", "xdist"):
        importlib.import_module(name)
    assert "statetx" not in sys.modules


def run_fork(tests: list[str], limit: float) -> tuple[int, str]:
    """Run tests in a fork until one fails, for so many CPU seconds: the status of the process, and its output."""
    log, status = OUT / "fork.log", 99
    process = os.fork()
    if not process:
        try:
            os.setsid()
            sys.dont_write_bytecode = True
            os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
            with open(log, "w") as output:
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
            most = int(limit) + 60  # imports and collection take some, too
            resource.setrlimit(resource.RLIMIT_CPU, (most, most + 5))
            import pytest

            words = ["-x", "-v", "--no-header", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", ""]
            words += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # of what was imported before the fork
            status = int(pytest.main([*words, *tests]))
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    ended, status, start = 0, 0, time.monotonic()
    while not ended:
        time.sleep(0.05)
        ended, status = os.waitpid(process, os.WNOHANG)
        if not ended and time.monotonic() - start > 600 + 10 * limit:  # it waits for something
            os.killpg(process, signal.SIGKILL)
    return os.waitstatus_to_exitcode(status), log.read_text(errors="replace")


def tried(fault: Fault, reached: Reached, limit: float) -> dict:
    """Run the tests of a fault until one fails: what found it, "nobody" where none does."""
    tests = reached.tests(fault)
    chosen = reached.first(tests, limit)
    result = {"found": "nobody", "by": "", "tests": len(chosen), "of": len(tests), "limit": limit, "seconds": 0.0}
    if not chosen:
        return result
    path = PLANTED / fault.file
    original, times, start = path.read_bytes(), path.stat(), time.monotonic()
    try:
        fault.plant(PLANTED)
        status, text = run_fork(chosen, limit)
    finally:
        path.write_bytes(original)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # what is compiled stays valid
    result["seconds"] = round(time.monotonic() - start, 1)
    if status == 0:
        return result
    failed = failures(text, chosen)
    begun = [test for test in chosen if test in text]
    by = failed[0] if failed else (begun or chosen)[-1]
    if not failed:
        result["ends"] = "the package cannot be imported" if status > 0 else f"signal {-status}"
    return result | {"found": "smoke" if by in reached.smoke or not begun else "test", "by": by}


def failures(text: str, tests: list[str]) -> list[str]:
    """Those of the tests that a run lists as failed."""
    lines = [line.partition(" ")[2] + " - " for line in text.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return [test for line in lines for test in tests if line.startswith(f"{test} - ")]


def check(results: dict[str, dict]) -> None:
    """Forget each result whose test fails without the fault, too."""
    tests = sorted(
        {r["by"] for r in results.values() if r["found"] != "nobody" and "ends" not in r and "checked" not in r}
    )
    while tests:
        status, text = run_fork(tests, 100_000)
        failed = {*failures(text, tests)}
        if status and not failed:
            raise RuntimeError(text[-2000:])
        for name in [name for name, r in results.items() if r["by"] in failed]:
            print("fails without the fault:", results.pop(name)["by"])
        tests = [test for test in tests if test not in failed] if failed else []
    for r in results.values():
        r["checked"] = True


def report(results: dict[str, dict]) -> str:
    counts = collections.Counter(r["found"] for r in results.values())
    lines = [f"{len(results)} faults: " + ", ".join(f"{n} by {name}" for name, n in counts.most_common())]
    for name, r in sorted(results.items(), key=lambda item: (item[1]["found"], item[0])):
        text = re.sub(r":\d+ ", " ", name, count=1)
        reason = f"  (equivalent: {EQUIVALENT[text]})" if text in EQUIVALENT else ""
        lines.append(
            f"{r['found']:7} {r['seconds']:6.1f} s {r['tests']:4} of {r['of']:4} tests  {name}  {r['by']}{reason}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", action="store_true", help="find out again which tests execute which fault")
    parser.add_argument("--draw", type=int, default=100, help="the number of faults")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", default=[], help="draw from faults of these kinds alone")
    parser.add_argument("--limit", type=float, default=30.0, help="CPU seconds of tests for each fault")
    parser.add_argument("--report", action="store_true", help="print what was found so far")
    parser.add_argument("words", nargs="*", help="further words for pytest in the run that is measured")
    options = parser.parse_args()
    OUT.mkdir(parents=True, exist_ok=True)
    kept = OUT / f"seed{options.seed}.json"
    results = json.loads(kept.read_text()) if kept.exists() else {}
    faults = drawn(options.draw, options.seed, options.kinds)
    if options.report:
        print(report(results))
        return
    drawn_before = OUT / "faults"
    names = "\n".join(map(str, faults))
    if options.measure or not drawn_before.exists() or drawn_before.read_text() != names:
        measure(faults, options.words)
        drawn_before.write_text(names)
    reached = Reached(faults)
    prepare()
    for fault in faults:
        before = results.get(str(fault))
        if before is None or (
            before["found"] == "nobody" and before["limit"] < options.limit and before["tests"] < before["of"]
        ):
            result = results[str(fault)] = tried(fault, reached, options.limit)
            kept.write_text(json.dumps(results, indent=1))
            print(f"{result['found']:7} {result['seconds']:6.1f} s  {fault}", flush=True)
    check(results)
    kept.write_text(json.dumps(results, indent=1))
    print(report(results))


if __name__ == "__main__":
    main()
