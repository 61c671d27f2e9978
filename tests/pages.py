"""Pages whose outputs are produced by running them: ``python tests/pages.py docs/rematerialisation.md`` writes them anew."""

import argparse
import contextlib
import doctest
import io
import os
import pathlib
import re
import traceback


def fill(text: str) -> str:
    """Run the ``pycon`` blocks of a page, one after the other, and put in what they print."""
    scope: dict = {"__name__": "__main__"}

    def run(block: re.Match) -> str:
        lines = []
        for example in doctest.DocTestParser().get_examples(block[1]):
            first, *rest = example.source.rstrip("\n").split("\n")
            lines += [f">>> {first}", *(f"... {line}".rstrip() for line in rest)]
            lines += printed(example.source, scope)
        return "```pycon\n" + "\n".join(lines) + "\n```"

    columns = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "132"  # wherever it runs
    try:
        return re.sub(r"^```pycon\n(.*?)^```", run, text, flags=re.M | re.S)
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


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pages", nargs="+", type=pathlib.Path)
    for page in parser.parse_args().pages:
        page.write_text(fill(page.read_text()))
