"""Pages with outputs say what the code prints."""

import pathlib
import re

import jax
import pytest
from pages import fill

DOCS = pathlib.Path(__file__).parents[1] / "docs"
PAGES = [path for path in sorted(DOCS.rglob("*.md")) if "```pycon" in path.read_text()]


def without_measurements(text):
    """Without the columns that XLA measures, which differ between machines."""
    kept, inside = [], False
    for line in text.split("\n"):
        inside = (inside or line.startswith("policy ")) and bool(line.strip())
        kept.append(" ".join(re.split(r"\s{2,}", line)[:2]) if inside else line)
    return "\n".join(kept)


@pytest.mark.skipif(
    not jax.__version__.startswith("0.10."), reason="other versions of JAX compute with other equations"
)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_page(page):
    text = page.read_text()
    assert without_measurements(fill(text)) == without_measurements(text)


def test_a_wrong_output_is_noticed():
    page = "```pycon\n>>> 1 + 1\n3\n>>> 1 / 0\n```\n"
    right = fill(page)
    assert "\n2\n" in right and "ZeroDivisionError: division by zero" in right
    assert fill(right) == right
