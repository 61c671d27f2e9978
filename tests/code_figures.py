"""Figures of the code, before and after: ``python tests/code_figures.py --against COMMIT`` prints both side by side.

Sizes, circles of imports, imports against the layers, clones, names that stand for two classes, options spelled twice,
roundabout prose, narrative names, comments, private names of JAX. ``--tests`` also collects the tests, and ``--time``
runs ``make test`` and ``.ci/run``. A figure is a help to see, not a goal: `docs/decisions` and the laws come first.
"""

from __future__ import annotations

import argparse
import ast
import collections
import io
import pathlib
import re
import subprocess
import sys
import tarfile
import tempfile
import time
import tokenize
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = "statetx"

# Phrases that a verb or a noun could replace.
ROUNDABOUT = {
    "clause with what": r"\bwhat (?:is|are|was|were|it|they|the|a|an|one|each|has|goes|comes|must|would|can)\b",
    "that of": r"\b(?:that|those) of\b",
    "preposition and which": r"\b(?:by|for|from|in|of|on|to|with) which\b",
    "as it is": r"\bas (?:it|they) (?:is|are|was|were|has|have|had|stands?)\b",
    "archaic": r"\b(?:anew|dear|foretold|kin|lest|whoever)\b",
    "stands or lies": r"\b(?:stands?|lies)\b",
}
# Names that say a variable's part in a story, not the thing that it holds.
NARRATIVE = set(
    "after again all around before both found given here inside kept known left made many met mine moved moving now "
    "one other others outside "
    "own rest same shown then there wanted whole within".split()
)


class Module:
    """A source file: its text, syntax tree, and the kinds of its lines."""

    def __init__(self, path: pathlib.Path, root: pathlib.Path):
        self.path = path.relative_to(root)
        self.text = path.read_text()
        self.lines = self.text.splitlines()
        self.tree = ast.parse(self.text)
        self.is_package = path.name == "__init__.py"
        parts = self.path.with_suffix("").parts
        self.name = ".".join(parts[:-1] if self.is_package else parts)
        self.strings = [
            node
            for node in ast.walk(self.tree)
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        ]
        tokens = tokenize.generate_tokens(io.StringIO(self.text).readline)
        self.comments = [token for token in tokens if token.type == tokenize.COMMENT]

    @property
    def folder(self) -> str:
        """The layer: the folder under the package, or the module itself."""
        return self.path.parts[1].removesuffix(".py") if len(self.path.parts) > 1 else ""

    def num_code(self) -> int:
        """Lines that are neither blank nor a comment nor part of a docstring."""
        documented = {n for s in self.strings for n in range(s.lineno, (s.end_lineno or s.lineno) + 1)}
        is_code = [bool(line.strip()) and not line.lstrip().startswith("#") for line in self.lines]
        return sum(code and n not in documented for n, code in enumerate(is_code, start=1))

    def imports(self) -> Iterator[ast.Import | ast.ImportFrom]:
        return (node for node in ast.walk(self.tree) if isinstance(node, (ast.Import, ast.ImportFrom)))

    def imported(self) -> Iterator[str]:
        """Full dotted names, of modules or of names in them."""
        for node in self.imports():
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
                continue
            parts = self.name.split(".") if node.level else []
            base = parts[: len(parts) - node.level + self.is_package]
            source = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{source}.{alias.name}" for alias in node.names)

    def prose(self) -> str:
        """Docstrings without their examples, and comments."""
        docs = [re.sub(r"^\s*(?:>>>|\.\.\.).*$", "", s.value.value, flags=re.M) for s in self.strings]  # type: ignore[attr-defined]
        return "\n".join([*docs, *(comment.string for comment in self.comments)])


def read(root: pathlib.Path, folder: str) -> list[Module]:
    return [Module(path, root) for path in sorted((root / folder).rglob("*.py"))]


# -- imports ---------------------------------------------------------------------------------------------------------


def edges(modules: list[Module]) -> dict[str, set[str]]:
    """Which modules each imports, under ``TYPE_CHECKING`` and within functions too."""
    names = {module.name for module in modules}
    graph = {}
    for module in modules:
        targets = {target if target in names else target.rpartition(".")[0] for target in module.imported()}
        graph[module.name] = (targets & names) - {module.name}
    return graph


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Sets of modules that import each other; a package and its own modules do not count, which Python resolves."""
    graph = {name: {t for t in targets if not name.startswith(f"{t}.")} for name, targets in graph.items()}
    reach = {name: reachable(name, graph) for name in graph}
    groups = {frozenset(other for other in reach[name] if name in reach[other]) for name in graph}
    return [sorted(group) for group in groups if len(group) > 1]


def reachable(start: str, graph: dict[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    stack = [start]
    while stack:
        for name in graph[stack.pop()] - seen:
            seen.add(name)
            stack.append(name)
    return seen


def back_arrows(root: pathlib.Path, graph: dict[str, set[str]]) -> list[tuple[str, str]]:
    """Imports that point up the layers of `code_map`, as the tree itself has them."""
    text = re.search(r'^TIERS = """(.*?)"""', (root / "tests" / "code_map.py").read_text(), re.M | re.S)
    height = {name: n for n, line in enumerate(text[1].split("\n") if text else []) for name in line.split()}
    layer = lambda name: height.get(name.split(".")[1]) if "." in name else None
    arrows = []
    for name, targets in graph.items():
        for target in sorted(targets):
            low, high = layer(name), layer(target)
            if low is not None and high is not None and high > low:
                arrows.append((name, target))
    return arrows


# -- names and clones ------------------------------------------------------------------------------------------------


def class_names(modules: list[Module]) -> list[str]:
    """Names of more than one class, at the top of a module."""
    count = collections.Counter(
        node.name.lstrip("_") for module in modules for node in module.tree.body if isinstance(node, ast.ClassDef)
    )
    return sorted(name for name, num in count.items() if num > 1)


def shape(node: object, names: dict[str, int]) -> object:
    """A syntax tree without the names of its variables, which are numbered in the order of their appearance."""
    if isinstance(node, list):
        return tuple(shape(part, names) for part in node)
    if isinstance(node, (ast.Name, ast.arg)):
        return names.setdefault(node.id if isinstance(node, ast.Name) else node.arg, len(names))
    if isinstance(node, ast.AST):
        return type(node).__name__, *(shape(getattr(node, field), names) for field in node._fields)
    return repr(node)


def clones(modules: list[Module], least: int = 4) -> list[list[str]]:
    """Functions of the same statements up to names of variables, of at least so many lines without the docstring."""
    places = collections.defaultdict(list)
    for module in modules:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.FunctionDef):
                body = node.body[1:] if node.body[0] in module.strings else node.body
                if body and (body[-1].end_lineno or 0) - body[0].lineno + 1 >= least:
                    places[shape(body, {})].append(f"{module.path}:{node.lineno}")
    return [alike for alike in places.values() if len(alike) > 1]


def options_again(modules: list[Module]) -> list[str]:
    """Options with a default that a module spells more than once: in signatures, and in fields of its classes."""
    again = []
    for module in modules:
        spelled: collections.Counter[str] = collections.Counter()
        for node in ast.walk(module.tree):
            if isinstance(node, ast.FunctionDef) and not any(ast.unparse(d) == "overload" for d in node.decorator_list):
                pairs = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
                spelled.update(f"{arg.arg}={ast.unparse(default)}" for arg, default in pairs if default is not None)
            elif isinstance(node, ast.ClassDef):
                fields = [n for n in node.body if isinstance(n, ast.AnnAssign) and n.value is not None]
                spelled.update(f"{ast.unparse(n.target)}={ast.unparse(n.value)}" for n in fields if n.value)
        again += [f"{module.path}: {option}" for option, num in spelled.items() for _ in range(num - 1)]
    return again


def narrative_share(modules: list[Module]) -> float:
    names = [
        node.arg if isinstance(node, ast.arg) else node.id
        for module in modules
        for node in ast.walk(module.tree)
        if isinstance(node, ast.arg) or (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
    ]
    return sum(name in NARRATIVE for name in names) / len(names)


def private_names(modules: list[Module]) -> tuple[int, set[str]]:
    """Lines that import from JAX's private modules, and the names that are used of these."""
    lines, names = 0, set()
    for module in modules:
        sources = {}
        for node in module.imports():
            source = node.module or "" if isinstance(node, ast.ImportFrom) else node.names[0].name
            if source.startswith(("jax._src", "jaxlib")):
                lines += 1
                sources |= {alias.asname or alias.name: f"{source}.{alias.name}" for alias in node.names}
        attributes = [
            (node.value.id, node.attr)
            for node in ast.walk(module.tree)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in sources
        ]
        names |= {f"{sources[name]}.{attribute}" for name, attribute in attributes}
        names |= {sources[name] for name in sources.keys() - {name for name, _ in attributes}}
    return lines, names


# -- the table -------------------------------------------------------------------------------------------------------


def figures(root: pathlib.Path, with_tests: bool, with_time: bool) -> dict[str, object]:
    modules, tests = read(root, PACKAGE), read(root, "tests")
    graph = edges(modules)
    code = sum(module.num_code() for module in modules)
    prose = "\n".join(module.prose() for module in modules)
    words = len(re.findall(r"[A-Za-z']+", prose))
    markers = sum(len(re.findall(pattern, prose, re.I)) for pattern in ROUNDABOUT.values())
    private_lines, private = private_names(modules)
    imports = sum((node.end_lineno or 0) - node.lineno + 1 for module in modules for node in module.imports())
    table: dict[str, object] = {
        "files": len(modules),
        "lines": sum(len(module.lines) for module in modules),
        "lines of code": code,
        "lines of imports": imports,
        "longest file": max(len(module.lines) for module in modules),
        "lines over 120 columns": sum(len(line) > 120 for module in modules for line in module.lines),
        "circles of imports": len(circles(graph)),
        "imports up the layers": len(back_arrows(root, graph)),
        "functions that are clones": sum(len(alike) - 1 for alike in clones(modules)),
        "class names used twice": len(class_names(modules)),
        "options spelled again in a module": len(options_again(modules)),
        "roundabout phrases in 1,000 words": round(1000 * markers / words, 1),
        "narrative names": f"{narrative_share(modules):.1%}",
        "comments in 100 lines of code": round(100 * sum(len(module.comments) for module in modules) / code, 1),
        "imports of JAX's private modules": private_lines,
        "private names of JAX": len(private),
        "lines of code in tests": sum(module.num_code() for module in tests),
    }
    by_folder: collections.Counter[str] = collections.Counter()
    for module in modules:
        by_folder[module.folder] += module.num_code()
    table |= {f"code in {folder}": num for folder, num in by_folder.most_common() if num > 200}
    if with_tests:
        command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
        done = subprocess.run(command, cwd=root, capture_output=True, text=True)
        counts = re.search(r"(\d+)(?:/(\d+))? tests collected", done.stdout)
        table |= {"tests of make test": int(counts[1]), "tests in all": int(counts[2] or counts[1])} if counts else {}
    if with_time:
        for name, command in {"make test": ["make", "test"], ".ci/run": [".ci/run"]}.items():
            start = time.monotonic()
            subprocess.run(command, cwd=root, stdout=subprocess.DEVNULL, check=True)
            table[f"seconds of {name}"] = round(time.monotonic() - start)
    return table


def tree_of(commit: str, folder: str) -> pathlib.Path:
    archive = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(folder, filter="data")
    return pathlib.Path(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--against", metavar="COMMIT", help="an earlier commit, in a column of its own")
    parser.add_argument("--tests", action="store_true", help="collect the tests (a minute)")
    parser.add_argument(
        "--time", action="store_true", help="run make test and .ci/run (half an hour, on an idle machine)"
    )
    parser.add_argument("--list", action="store_true", help="name the circles, arrows, clones, classes and options")
    options = parser.parse_args()
    now = figures(ROOT, options.tests, options.time)
    before: dict[str, object] = {}
    if options.against:
        with tempfile.TemporaryDirectory() as folder:
            before = figures(tree_of(options.against, folder), options.tests, options.time)
    for name in [*now, *(name for name in before if name not in now)]:
        row = [before.get(name, ""), now.get(name, "")] if options.against else [now[name]]
        print(f"{name:36}", *(f"{x:,}".rjust(12) if isinstance(x, int) else str(x).rjust(12) for x in row))
    if options.list:
        modules = read(ROOT, PACKAGE)
        graph = edges(modules)
        lists = {
            "circles": circles(graph),
            "imports up": back_arrows(ROOT, graph),
            "clones": clones(modules),
            "classes": class_names(modules),
            "options": options_again(modules),
        }
        for name, items in lists.items():
            print(f"\n{name}", *map(str, items), sep="\n  ")


if __name__ == "__main__":
    main()
