"""Plant faults in the package, one at a time, and list those that no test finds: ``make mutations``.

A fault is a small change of one expression or statement: another comparison, index or order, a dropped call or store,
another axis, swapped arguments, an item left out. ``--draw 100 --seed 0`` draws a hundred from the folders below, the
same ones each time. Each is planted in a copy of the checkout, and the tests that execute its line run until one fails:
first those of `make smoke`, then those of `make test`, each time the tests of the file's own name first. Which tests
execute which line is measured once, by a run of `make test` under coverage (``--measure``).

Results are kept in out/mutations, so that a run that was stopped goes on. ``--report`` prints them as a table. A
survivor either changes nothing that a user could see, which `EQUIVALENT` says with the reason, or needs a test.
"""

from __future__ import annotations

import argparse
import ast
import collections
import copy
import dataclasses
import json
import os
import pathlib
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).parents[1]
OUT = ROOT / "out" / "mutations"
COVERAGE = OUT / "coverage"
FOLDERS = "_lift _frames transforms _loops _remat kinds planner _equations".split()
# Survivors that were read, and change nothing that a user could see: the text of the fault, and the reason.
EQUIVALENT: dict[str, str] = {}


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
        case ast.Call(func=ast.Name(id="any" | "all")):
            other = "all" if node.func.id == "any" else "any"
            yield "comparison", ast.Call(ast.Name(other, ast.Load()), node.args, node.keywords)
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
    """A list without its last item: that of a comprehension, and that which a loop goes over."""
    if isinstance(node, ast.ListComp):
        yield ast.Subscript(copy.deepcopy(node), ast.Slice(None, ast.Constant(-1)), ast.Load())
    if isinstance(node, ast.List) and isinstance(node.ctx, ast.Load) and len(node.elts) > 1:
        yield ast.List(node.elts[:-1], ast.Load())


def faults_of(file: pathlib.Path) -> Iterator[Fault]:
    """Every fault that may be planted in the functions of a file."""
    source = file.read_text()
    tree = ast.parse(source)
    skipped = {id(n) for f in ast.walk(tree) for n in _skipped(f)}
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef):
            continue
        for node in (n for statement in function.body for n in _own(statement)):
            if id(node) in skipped:
                continue
            for kind, other in mutations(node):
                before = ast.get_source_segment(source, node)
                after = ast.unparse(ast.fix_missing_locations(other))
                if isinstance(node, ast.expr):
                    after = f"({after})"
                yield Fault(
                    str(file.relative_to(ROOT)),
                    kind,
                    node.lineno,
                    node.col_offset,
                    node.end_lineno or node.lineno,
                    node.end_col_offset or 0,
                    before or "",
                    after,
                )


def _own(node: ast.AST) -> Iterator[ast.AST]:
    """A statement's nodes, without those of functions in it."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.ClassDef):
            yield from _own(child)


def _skipped(node: ast.AST) -> Iterator[ast.AST]:
    """Messages, annotations and assertions: text of errors has tests of its own, which compare it with the pages."""
    match node:
        case ast.Raise() | ast.Assert() | ast.JoinedStr():
            yield from ast.walk(node)
        case ast.AnnAssign(annotation=annotation):
            yield from ast.walk(annotation)
        case ast.FunctionDef():
            for part in (node.args, node.returns, *node.decorator_list):
                if part is not None:
                    yield from ast.walk(part)


def drawn(num: int, seed: int) -> list[Fault]:
    """Faults drawn with equal chances for folders, and in a folder for files by their size, one for each place."""
    rng = random.Random(seed)
    of_folder = {
        folder: [f for path in sorted((ROOT / "statetx" / folder).rglob("*.py")) for f in faults_of(path)]
        for folder in FOLDERS
    }
    found: dict[tuple, Fault] = {}
    while len(found) < num:
        fault = rng.choice(of_folder[rng.choice(FOLDERS)])
        found.setdefault((fault.file, fault.line), fault)
    return list(found.values())


# -- which tests execute it ------------------------------------------------------------------------------------------


def measure(words: list[str]) -> None:
    """Run the tests under coverage, with the test in force as the context of each line."""
    OUT.mkdir(parents=True, exist_ok=True)
    settings = OUT / "coveragerc"
    settings.write_text("[run]\nsource = statetx\n")
    command = [sys.executable, "-m", "pytest", "-n", "2", "--dist", "worksteal", "-q", "--cov=statetx"]
    command += [f"--cov-config={settings}", "--cov-context=test", "--cov-report=", "--durations=0", "-vv", *words]
    with open(OUT / "measured.log", "w") as log:
        subprocess.run(
            command, cwd=ROOT, env=os.environ | {"COVERAGE_FILE": str(COVERAGE)}, stdout=log, stderr=subprocess.STDOUT
        )


def durations() -> dict[str, float]:
    """Seconds of each test in the run under coverage."""
    seconds: dict[str, float] = collections.defaultdict(float)
    for line in (OUT / "measured.log").read_text().splitlines():
        words = line.split(maxsplit=2)
        if len(words) == 3 and words[1] in ("call", "setup") and words[0].endswith("s"):
            seconds[words[2]] += float(words[0][:-1])
    return seconds


class Executed:
    """The tests that execute a line, cheapest first."""

    def __init__(self) -> None:
        from coverage import CoverageData

        self._data = CoverageData(basename=str(COVERAGE))
        self._data.read()
        self._seconds = durations()
        listed = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "--collect-only", "-m", "smoke and not slow and not thorough"],
            cwd=ROOT, capture_output=True, text=True,
        ).stdout  # fmt: skip
        self.smoke = {line for line in listed.splitlines() if "::" in line}

    def tests(self, fault: Fault) -> list[str]:
        """The tests that execute a line of the fault: of `make smoke` first, then by file, then by time."""
        lines = self._data.contexts_by_lineno(str(ROOT / fault.file))
        names = {name for n in range(fault.line, fault.end_line + 1) for name in lines.get(n, [])}
        ids = {name.rpartition("|")[0] for name in names if "|" in name}
        stem = pathlib.Path(fault.file).stem.strip("_")
        near = lambda test: stem not in test.partition("::")[0]
        return sorted(ids, key=lambda test: (test not in self.smoke, near(test), self._seconds.get(test, 9.0), test))


# -- one after another -----------------------------------------------------------------------------------------------


def copied(root: pathlib.Path) -> None:
    """A copy of the checkout to plant faults in, with what its tests have compiled."""
    shutil.rmtree(root, ignore_errors=True)
    skip = shutil.ignore_patterns(".git", ".venv*", "out", "__pycache__", ".ruff_cache", "site")
    shutil.copytree(ROOT, root, ignore=skip)


def tried(fault: Fault, root: pathlib.Path, tests: list[str], smoke: set[str], limit: float) -> dict:
    """Run the tests on the planted fault until one fails: what found it, "nobody" where none does within the limit."""
    original = (ROOT / fault.file).read_bytes()
    start = time.monotonic()
    chosen = tests[:400]
    try:
        fault.plant(root)
        run = subprocess.run(
            [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider", "-m", "", *chosen],
            cwd=root,
            env=os.environ | {"PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
            timeout=limit,
        )
        text, is_over = run.stdout, False
    except subprocess.TimeoutExpired as e:
        text, is_over = (e.stdout or b"").decode(errors="replace"), True
        run = None
    finally:
        (root / fault.file).write_bytes(original)
    failed = [line.split()[1] for line in text.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    if failed:
        found = "smoke" if failed[0] in smoke else "test"
    elif run is not None and run.returncode not in (0, 1, 5):
        found, failed = "smoke", ["(the package or pytest ends)"]
    elif is_over:
        found, failed = "time", ["(over the limit: an endless loop, or many tests)"]
    else:
        found, failed = "nobody", []
    seconds = round(time.monotonic() - start, 1)
    return {"found": found, "by": failed[:1], "tests": len(chosen), "of": len(tests), "seconds": seconds}


def report(results: dict[str, dict]) -> str:
    counts = collections.Counter(r["found"] for r in results.values())
    lines = [f"{len(results)} faults: " + ", ".join(f"{n} by {name}" for name, n in counts.most_common())]
    for name, r in sorted(results.items(), key=lambda item: (item[1]["found"], item[0])):
        reason = f"  (equivalent: {EQUIVALENT[name]})" if name in EQUIVALENT else ""
        lines.append(f"{r['found']:7} {r['seconds']:6.1f} s {r['tests']:4} tests  {name}{reason}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", action="store_true", help="run the tests under coverage first")
    parser.add_argument("--draw", type=int, default=100, help="the number of faults")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=240.0, help="most seconds for the tests of a fault")
    parser.add_argument("--part", default="1/1", help="as 1/2: every second fault, for two processes")
    parser.add_argument("--report", action="store_true", help="print what was found so far")
    parser.add_argument("words", nargs="*", help="further words for pytest in the run under coverage")
    options = parser.parse_args()
    if options.measure or not COVERAGE.exists():
        measure(options.words)
    part, parts = map(int, options.part.split("/"))
    kept = OUT / f"seed{options.seed}-{part}of{parts}.json"
    results = json.loads(kept.read_text()) if kept.exists() else {}
    if options.report:
        for other in OUT.glob(f"seed{options.seed}-*.json"):
            results |= json.loads(other.read_text())
        print(report(results))
        return
    executed, root = Executed(), OUT / f"copy{part}"
    copied(root)
    for fault in drawn(options.draw, options.seed)[part - 1 :: parts]:
        if str(fault) not in results:
            tests = executed.tests(fault)
            results[str(fault)] = tried(fault, root, tests, executed.smoke, options.limit)
            kept.write_text(json.dumps(results, indent=1))
            print(f"{results[str(fault)]['found']:7} {results[str(fault)]['seconds']:6.1f} s  {fault}", flush=True)
    print(report(results))


if __name__ == "__main__":
    main()
