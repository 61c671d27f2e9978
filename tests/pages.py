"""Pages whose code runs: ``python tests/pages.py docs/residuals.md`` rewrites the outputs of their ``pycon`` blocks,
and so it does for the cells of a notebook.

The ``python`` and ``pycon`` blocks of a page share one scope, in order, and `page.py` is the script that the ``python``
blocks make. A block that cannot run says why, in a comment on the line above it: ``<!-- not run: needs two hosts -->``.
"""

import argparse
import ast
import contextlib
import doctest
import io
import json
import os
import pathlib
import re
import textwrap
import traceback
import types

BLOCK = re.compile(
    r"(?:^ *<!-- not run: (?P<reason>\S.*?) -->\n)?^(?P<indent> *)```(?P<kind>python|pycon)\b.*?\n"
    r"(?P<code>.*?)^(?P=indent)```$",
    re.M | re.S,
)


def fill(text: str) -> str:
    """Run the blocks of a page, one after the other, and insert the outputs of the ``pycon`` blocks."""
    module = types.ModuleType("__main__")  # its own, so that pages do not share definitions
    num_lines = 0  # of the python blocks so far

    def run(block: re.Match) -> str:
        nonlocal num_lines
        code = textwrap.dedent(block["code"])
        if block["reason"]:
            return block[0]
        if block["kind"] == "python":
            with contextlib.redirect_stdout(io.StringIO()):
                exec(compile("\n" * num_lines + code, "page.py", "exec"), vars(module))
            num_lines += code.count("\n")
            return block[0]
        lines = []
        for example in doctest.DocTestParser().get_examples(code):
            first, *rest = example.source.rstrip("\n").split("\n")
            lines += [f">>> {first}", *(f"... {line}".rstrip() for line in rest)]
            lines += printed(example.source, vars(module))
        return block[0].replace(block["code"], textwrap.indent("\n".join(lines) + "\n", block["indent"]))

    with terminal_of(132):
        return BLOCK.sub(run, text)


@contextlib.contextmanager
def terminal_of(columns: int):
    """Let tables have the same width wherever they are printed."""
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = str(columns)
    try:
        yield
    finally:
        os.environ.pop("COLUMNS") if before is None else os.environ.update(COLUMNS=before)


def fill_notebook(text: str) -> str:
    """Run the cells of a notebook in order, and insert what they print and the value that each ends with."""
    notebook, module = json.loads(text), types.ModuleType("__main__")
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    with terminal_of(132):
        for number, cell in enumerate(cells, 1):
            tree = ast.parse("".join(cell["source"]))
            last = ast.Expression(tree.body.pop().value) if isinstance(tree.body[-1], ast.Expr) else None
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(compile(tree, f"cell {number}", "exec"), vars(module))
                value = last and eval(compile(last, f"cell {number}", "eval"), vars(module))
            outputs = [{"name": "stdout", "output_type": "stream", "text": lines_of(out.getvalue())}]
            if value is not None:
                data = {"text/plain": lines_of(repr(value))}
                if hasattr(value, "_repr_html_"):
                    data["text/html"] = lines_of(value._repr_html_())
                result = {"data": data, "execution_count": number, "metadata": {}, "output_type": "execute_result"}
                outputs.append(result)
            cell["execution_count"] = number
            cell["outputs"] = [x for x in outputs if x.get("text") != []]
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def lines_of(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def printed(source: str, scope: dict) -> list[str]:
    out = io.StringIO()
    try:
        with contextlib.redirect_stdout(out):
            exec(compile(source, "page.py", "single"), scope)
    except Exception as e:
        said = "".join(traceback.format_exception_only(e)).split("\n----")[0]
        return ["Traceback (most recent call last):", "    ...", *said.rstrip("\n").split("\n")]
    return [line.rstrip() for line in out.getvalue().rstrip("\n").split("\n")] if out.getvalue() else []


SIZE = re.compile(r" *[+-]?(\d[\d,]*\.?\d*) ?(B|KiB|MiB|GiB|[kMG]?FLOP|%)(?!\w)")

SEARCH = re.compile(r"\d+ programs compiled in [\d.]+ s, with [\d.]+ s")


def assert_same(actual: str, expected: str) -> None:
    """Equal texts; sizes and operations with a unit, which XLA measures, may differ by a tenth between machines,
    and the effort of a search by any number.
    """
    for got, want in zip(actual.split("\n"), expected.split("\n"), strict=True):
        if got != want:
            got, want = SEARCH.sub("#", got), SEARCH.sub("#", want)
            assert SIZE.sub("#", got) == SIZE.sub("#", want), f"{got!r}, and not {want!r}"
            for (a, unit), (b, other) in zip(SIZE.findall(got), SIZE.findall(want), strict=True):
                x, y = float(a.replace(",", "")), float(b.replace(",", ""))
                assert unit == other and abs(x - y) <= 0.1 * y, f"{got!r}, and not {want!r}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pages", nargs="+", type=pathlib.Path)
    for page in parser.parse_args().pages:
        page.write_text((fill_notebook if page.suffix == ".ipynb" else fill)(page.read_text()))
