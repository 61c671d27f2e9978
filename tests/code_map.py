"""The map of the code in CONTRIBUTING.md, drawn from the tree: ``python tests/code_map.py`` writes it there."""

import ast
import pathlib

ROOT = pathlib.Path(__file__).parents[1]
PAGE = ROOT / "CONTRIBUTING.md"
BEGIN, END = "<!-- drawn by tests/code_map.py -->\n", "<!-- end -->\n"

# Each folder, or module of the package itself, may import from those above its own.
TIERS = """
_typing
_errors
_text _atomic _cached _positions _largest _environment _hooks
_unfinished
_files _records _tables _spinner _blocks
_targets
_jax
_known
_states
_tree
_objects
_frames
kinds
_equations
_lift
_remat
_loops
_segments
policies
transforms
caches
residuals
_verify
planner
memory
testing
training
cli
__main__
"""


def drawn() -> str:
    """A table of the folders, the topmost first, each with its modules."""
    rows = ["| where | what | modules |", "|---|---|---|"]
    for names in reversed(TIERS.strip().split("\n")):
        for name in names.split():
            folder = ROOT / "statetx" / name
            source = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
            modules = ", ".join(f"`{m}`" for m in _modules(folder))
            rows.append(f"| `{name}{'/' * folder.is_dir()}` | {_summary(source)} | {modules} |")
    return "\n".join(rows) + "\n"


def _modules(folder: pathlib.Path) -> list[str]:
    names = [p.stem for p in folder.glob("*.py") if p.stem != "__init__"]
    return sorted([*names, *(p.parent.name + "/" for p in folder.glob("*/__init__.py"))])


def _summary(source: pathlib.Path) -> str:
    doc = ast.get_docstring(ast.parse(source.read_text()))
    return doc.split("\n\n")[0].replace("\n", " ") if doc else ""


def with_map(page: str) -> str:
    head, _, rest = page.partition(BEGIN)
    return head + BEGIN + "\n" + drawn() + "\n" + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(with_map(PAGE.read_text()))
