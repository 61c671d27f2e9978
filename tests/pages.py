"""Pages whose code runs: ``python tests/pages.py docs/residuals.md`` rewrites the outputs of their ``pycon`` blocks.

The ``python`` and ``pycon`` blocks of a page share one scope, in order. A block that cannot run says why, in a comment on the
line above it: ``<!-- not run: needs two hosts -->``.
"""

import argparse
import contextlib
import doctest
import io
import os
import pathlib
import re
import textwrap
import traceback
import types

BLOCK = re.compile(
    r"(?:^ *<!-- not run: (?P<reason>\S.*?) -->\n)?^(?P<indent> *)```(?P<kind>python|pycon)\b.*?\n(?P<code>.*?)^(?P=indent)```$",
    re.M | re.S,
)


def fill(text: str, name: str = "page.py") -> str:
    """Run the blocks of a page, one after the other, and insert the outputs of the ``pycon`` blocks."""
    module = types.ModuleType("__main__")  # its own, so that pages do not share definitions

    def run(block: re.Match) -> str:
        code = textwrap.dedent(block["code"])
        if block["reason"]:
            return block[0]
        if block["kind"] == "python":
            line = text.count("\n", 0, block.start("code"))
            with contextlib.redirect_stdout(io.StringIO()):
                exec(compile("\n" * line + code, name, "exec"), vars(module))
            return block[0]
        lines = []
        for example in doctest.DocTestParser().get_examples(code):
            first, *rest = example.source.rstrip("\n").split("\n")
            lines += [f">>> {first}", *(f"... {line}".rstrip() for line in rest)]
            lines += printed(example.source, vars(module))
        return block[0].replace(block["code"], textwrap.indent("\n".join(lines) + "\n", block["indent"]))

    columns = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "132"  # wherever it runs
    try:
        return BLOCK.sub(run, text)
    finally:
        os.environ.pop("COLUMNS") if columns is None else os.environ.update(COLUMNS=columns)


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


def assert_same(actual: str, expected: str) -> None:
    """Equal texts; sizes and operations with a unit, which XLA measures, may differ by a tenth between machines."""
    for got, want in zip(actual.split("\n"), expected.split("\n"), strict=True):
        if got != want:
            assert SIZE.sub("#", got) == SIZE.sub("#", want), f"{got!r}, and not {want!r}"
            for (a, unit), (b, other) in zip(SIZE.findall(got), SIZE.findall(want), strict=True):
                x, y = float(a.replace(",", "")), float(b.replace(",", ""))
                assert unit == other and abs(x - y) <= 0.1 * y, f"{got!r}, and not {want!r}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pages", nargs="+", type=pathlib.Path)
    for page in parser.parse_args().pages:
        page.write_text(fill(page.read_text(), page.name))
