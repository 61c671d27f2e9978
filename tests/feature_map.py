"""What each feature is worth, for contributors: ``python tests/feature_map.py`` writes the table of ARCHITECTURE.md.

Lines of code are of modules and of test files, without docstrings and comments. A module counts for the first feature
that names it. Measured figures are those of `docs/benchmarks` and `docs/decisions`.
"""

import fnmatch
import pathlib
import re
import tomllib

from code_figures import Module

ROOT = pathlib.Path(__file__).parents[1]
PAGE = ROOT / "ARCHITECTURE.md"
BEGIN, END = "<!-- drawn by tests/feature_map.py -->\n", "<!-- end of features -->\n"

FEATURES = tomllib.loads((ROOT / "tests" / "features.toml").read_text())["feature"]


def rows() -> list[tuple[str, list[pathlib.Path], list[pathlib.Path], str, str]]:
    """For each feature its modules, its test files, who misses it, and the loss."""
    modules = sorted((ROOT / "statetx").rglob("*.py"))
    found = []
    for feature in FEATURES:
        paths = [p for p in modules if any(_matches(p, pattern) for pattern in feature["modules"])]
        if not paths:
            raise ValueError(f"{feature['name']}: no module is left for it")
        modules = [p for p in modules if p not in paths]
        files = [p for name in feature.get("tests", ()) for p in sorted((ROOT / "tests").glob(f"test_{name}.py"))]
        found.append((feature["name"], paths, files, feature["missed_by"], feature["lost"]))
    if modules:
        raise ValueError(f"modules without a feature: {', '.join(map(str, modules))}")
    return found


def _matches(path: pathlib.Path, pattern: str) -> bool:
    return fnmatch.fnmatch(str(path.relative_to(ROOT / "statetx")), pattern)


def _num_code(paths: list[pathlib.Path]) -> int:
    return sum(Module(path, ROOT).num_code() for path in paths)


def drawn() -> str:
    """The table, the largest feature first."""
    table = [(_num_code(paths), _num_code(files), name, who, lost) for name, paths, files, who, lost in rows()]
    lines = ["| feature | code | tests | missed by | lost without it |", "|---|--:|--:|---|---|"]
    for code, tests, name, who, lost in sorted(table, reverse=True):
        lines.append(f"| {name} | {code:,} | {f'{tests:,}' if tests else ''} | {who} | {lost} |")
    return "\n".join(lines) + "\n"


def with_table(page: str) -> str:
    head, _, rest = page.partition(BEGIN)
    return head + BEGIN + "\n" + drawn() + "\n" + END + rest.partition(END)[2]


def features_of(page: str) -> set[str]:
    """The rows of the table in a page, without their figures, which change with every commit."""
    table = page.partition(BEGIN)[2].partition(END)[0]
    return {re.sub(r"\| [\d,]* ", "| # ", line) for line in table.splitlines()}


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
