"""The documentation: its code runs and prints the given outputs, and the site shows every page and every name."""

import contextlib
import doctest
import functools
import http.server
import json
import pathlib
import pydoc
import re
import shutil
import socket
import subprocess
import textwrap
import threading
import time
import types
import urllib.request
from inspect import isclass

import jax
import numpy as np
import pytest
from pages import BLOCK, assert_same, fill, fill_notebook

import statetx
from helpers import forget_what_is_registered
from statetx import policies, testing

ROOT = pathlib.Path(__file__).parents[1]
DOCS = ROOT / "docs"
EVERY_PAGE = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
PAGES = [path for path in EVERY_PAGE if BLOCK.search(path.read_text())]
GUIDES = [path for path in PAGES if path.parent.name == "migrate" and path.stem != "pytorch"]  # torch is not run
name_of = lambda path: str(path.relative_to(ROOT))


def without_measurements(text):
    """Without the columns that XLA measures, which differ between machines."""
    kept, inside = [], False
    for line in text.split("\n"):
        inside = (inside or line.startswith("policy ")) and bool(line.strip())
        kept.append(" ".join(re.split(r"\s{2,}", line)[:2]) if inside else line)
    return "\n".join(kept)


def test_sizes_in_pages_may_differ_by_a_tenth():
    assert_same("12.0 MiB, 1 call", "13.0 MiB, 1 call")
    for other in ("14.0 MiB, 1 call", "12.0 KiB, 1 call", "12.0 MiB, 2 call", "12.0 MiB"):
        with pytest.raises(AssertionError):
            assert_same("12.0 MiB, 1 call", other)


def run_page(page, folder, monkeypatch):
    text = page.read_text()
    for library in set(re.findall(r"^ *(?:import|from) (haiku|equinox|flax|braintools)\b", text, re.M)):
        pytest.importorskip(library)
    monkeypatch.chdir(folder)  # for its output
    forget_what_is_registered(monkeypatch)
    with jax.numpy_rank_promotion("allow"):  # as users have it
        filled = fill(text)
    if (
        jax.__version__.startswith("0.10.") or page.stem == "remat3"
    ):  # other versions of JAX compute with other equations
        assert_same(without_measurements(filled), without_measurements(text))
    else:
        assert filled.count("Traceback") == text.count("Traceback")


# They take over five seconds: they plan, or train through thousands of steps.
LONG = {"every-nth-layer", "loops", "out-of-memory", "planning", "recipes", "spiking-networks"}


@pytest.mark.sample
@pytest.mark.parametrize(
    "page",
    [pytest.param(p, marks=[pytest.mark.slow] * (p.stem in LONG)) for p in PAGES if p not in GUIDES],
    ids=name_of,
)
def test_page_runs(page, tmp_path, monkeypatch):
    run_page(page, tmp_path, monkeypatch)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "page",
    [p if p.stem in ("brainstate", "linen") else pytest.param(p, marks=pytest.mark.slow) for p in GUIDES],
    ids=name_of,
)
def test_guide_compares_both_sides(page, tmp_path, monkeypatch):
    """The page itself compares losses, gradients and states of both libraries: here, that it does, and not zeros."""
    compare, largest = np.testing.assert_allclose, []

    def assert_allclose(actual, desired, **options):
        largest.append(float(np.abs(desired).max()))
        compare(actual, desired, **options)

    monkeypatch.setattr(np.testing, "assert_allclose", assert_allclose)
    run_page(page, tmp_path, monkeypatch)
    assert len(largest) > 20
    assert sum(x > 1e-3 for x in largest) > 0.8 * len(largest)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "path",
    [pytest.param(p, marks=[pytest.mark.slow] * (p.stem == "memory")) for p in sorted(ROOT.glob("examples/*.ipynb"))],
    ids=name_of,
)
def test_notebook_runs(path):
    pytest.importorskip("optax")
    text = path.read_text()
    with jax.numpy_rank_promotion("allow"):
        filled = fill_notebook(text)
    actual, expected = map(printed_by_cells, (filled, text))
    assert expected.count("MiB") > 10 and "<table" in text
    if jax.__version__.startswith("0.10."):
        assert_same(without_measurements(actual), without_measurements(expected))


def printed_by_cells(notebook):
    """What the cells of a notebook show as text."""
    outputs = [output for cell in json.loads(notebook)["cells"] for output in cell.get("outputs", ())]
    return "".join("".join(x["text"] if "text" in x else x["data"]["text/plain"]) + "\n" for x in outputs)


def test_notebook_shows_what_cells_print_and_end_with():
    cells = ["print(1)", "x = 2", "x + 1", "print(3); None"]
    cells = [{"cell_type": "code", "source": [cell]} for cell in cells] + [{"cell_type": "markdown", "source": ["*a*"]}]
    filled = fill_notebook(json.dumps({"cells": cells}))
    assert printed_by_cells(filled) == "1\n\n3\n3\n\n"
    with pytest.raises(ZeroDivisionError):
        fill_notebook(json.dumps({"cells": [{"cell_type": "code", "source": ["1 / 0"]}]}))


def test_wrong_output_fails():
    page = "```pycon\n>>> 1 + 1\n3\n>>> 1 / 0\n```\n"
    right = fill(page)
    assert "\n2\n" in right and "ZeroDivisionError: division by zero" in right
    assert fill(right) == right


def test_blocks_share_a_scope_and_failures_are_raised():
    page = '```python\nx = 1\n```\n=== "tab"\n\n    ```python\n    x += 1\n    ```\n\n```pycon\n>>> x\n```\n'
    assert fill(page).endswith(">>> x\n2\n```\n")
    assert fill(fill(page)) == fill(page)
    with pytest.raises(ZeroDivisionError):
        fill("```python\n1 / 0\n```\n")
    assert fill("<!-- not run: why not -->\n```python\n1 / 0\n```\n")


def words(page):
    """What a reader sees, code and tables included: without comments, tags, marks of attributes and addresses
    of links.
    """
    text = re.sub(
        r"<!--.*?-->|\{[ :.#][^}\n]*\}|</?(?:div|p|picture|source|img|br)\b[^>]*>", "", page.read_text(), flags=re.S
    )
    text = re.sub(r"\]\([^)\s]*\)", "]", text)
    return [word for word in text.split() if re.search(r"\w", word)]


def test_pages_are_short():
    """A subject has one page of its idea, one guide and one reference page; who adds one shortens others."""
    assert sum(len(words(page)) for page in DOCS.rglob("*.md")) <= 60_000
    long = {page.name: len(words(page)) for page in DOCS.glob("concepts/*.md") if len(words(page)) > 400}
    assert not long


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_definitions_can_be_pasted(page):
    """They are plain code: behind prompts they are a syntax error in a script, and in Python's own prompt."""
    blocks = [block["code"] for block in BLOCK.finditer(page.read_text()) if block["kind"] == "pycon"]
    examples = [example for code in blocks for example in doctest.DocTestParser().get_examples(textwrap.dedent(code))]
    assert not [e.source for e in examples if e.source.startswith(("def ", "class ", "@")) and not e.want]


def test_few_blocks_are_skipped():
    reasons = [block["reason"] for page in PAGES for block in BLOCK.finditer(page.read_text()) if block["reason"]]
    assert len(reasons) <= 2, reasons


def site():
    """The pages that the navigation in mkdocs.yml names."""
    text = (ROOT / "mkdocs.yml").read_text()
    return re.findall(r"([\w/-]+\.md)$", text[text.index("\nnav:") :], re.M)


def test_navigation_names_every_page():
    pages = {str(path.relative_to(DOCS)) for path in EVERY_PAGE if path.is_relative_to(DOCS)} - set(records())
    named = site()
    assert len(named) == len(set(named))
    assert set(named) == pages | {"architecture.md", "contributing.md", "changelog.md"}, (
        "a new page needs a place in mkdocs.yml"
    )


def records():
    return [f"decisions/{path.name}" for path in DOCS.glob("decisions/0*.md")]


def test_list_of_decisions_names_every_record():
    text = (DOCS / "decisions" / "README.md").read_text()
    listed = re.findall(r"^- \[.*?\]\((0[\w-]+\.md)\)", text, re.M)
    in_force = [path.name for path in DOCS.glob("decisions/0*.md") if "\nStatus: accepted" in path.read_text()]
    assert sorted(listed) == sorted(in_force)  # a line below the list names the others
    assert sorted(re.findall(r"\]\((0[\w-]+\.md)\)", text)) == sorted(name.rpartition("/")[2] for name in records())


@functools.cache
def code_files():
    """The text of each file that a contributor's page may name, by its path."""
    folders = [ROOT / name for name in ("statetx", "tests", "benchmarks", "docs")]
    found = [path for folder in folders for path in folder.rglob("*") if path.suffix in (".py", ".md", ".toml")]
    return {str(path.relative_to(ROOT)): path.read_text() for path in found}


@functools.cache
def text_of(name):
    """The text of the files whose paths end with a name, or of all that are in a folder of that name."""
    is_meant = lambda path: f"/{name}" in path if name.endswith("/") else path.endswith(f"/{name}")
    return "\n".join(text for path, text in code_files().items() if is_meant(f"/{path}"))


def defines(text, names):
    """Whether a text has a function, class, field, variable or import of each name."""
    pattern = r"^\s*(?:def|class) {0}\b|^\s*(?:self\.)?{0}(?:: .*)? = |^    {0}: |import .*\b{0}\b"
    return all(re.search(pattern.format(name), text, re.M) for name in names)


@functools.cache
def words_of_code():
    return set(re.findall(r"\w+", "\n".join(text for path, text in code_files().items() if path.endswith(".py"))))


def is_unknown(span):
    """Whether a page has a name of no code: `a path`, `path: name`, a command, or names with dots between them."""
    path, _, name = span.partition(": ")
    if re.fullmatch(r"[\w./-]+(\.(py|md|toml)|/)", path):
        return not text_of(path) or bool(name and not defines(text_of(path), name.split(".")))
    if scripts := re.findall(r"[\w./-]+\.py\b", span):
        return not all(map(text_of, scripts))
    name = re.sub(r"\(.*\)$", "", span)
    if not re.fullmatch(r"\w+(\.\w+)*", name) or re.match(r"(jax|jaxlib|nnx|brainstate)\.", name):
        return False  # no name, or one of another library
    names = name.split(".")
    for num in range(len(names), 0, -1):  # as many as lead to a module or a folder
        path = "statetx/" + "/".join(names[:num])
        if text := text_of(f"{path}.py") or text_of(f"{path}/"):
            return not defines(text, names[num:])
    if re.match(r"_[^_]", name):
        return len(names) > 1 or not defines(text_of("statetx/"), names)
    return not words_of_code() >= set(names)


@pytest.mark.parametrize(
    "page",
    [
        ROOT / "ARCHITECTURE.md",
        *(path for path in sorted(DOCS.glob("decisions/0*.md")) if "\nStatus: accepted" in path.read_text()),
    ],
    ids=name_of,
)
def test_names_of_code_exist(page):
    """Files, classes and functions that pages for contributors name; a decision that was replaced may name others."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M)
    assert not [span for span in re.findall(r"(?<!`)`([^`\n]+)`", text) if is_unknown(span)]


def test_decisions_have_numbers_of_their_own():
    numbers = [int(name.partition("/")[2][:4]) for name in records()]
    assert len(numbers) == len(set(numbers))
    named = {int(n) for text in code_files().values() for n in re.findall(r"\bdecision (\d+)", text)}
    assert named <= set(numbers) and len(named) > 15


def test_reference_has_every_public_name():
    text = "".join(path.read_text() for path in [*sorted((DOCS / "api").glob("*.md")), DOCS / "errors.md"])
    shown = re.findall(r"^::: statetx\.(\S+)$", text, re.M)
    assert len(shown) == len(set(shown))
    is_module = lambda x: isinstance(x, types.ModuleType)
    expected = {name for name in dir(statetx) if not name.startswith("_") and not is_module(getattr(statetx, name))}
    expected.remove("checkpoint")  # which is remat
    for module in (policies, testing):
        short = module.__name__.removeprefix("statetx.")
        expected |= {f"{short}.{name}" for name, x in vars(module).items() if is_of(module, name, x)}
    assert expected <= set(shown), "a new public name needs a place in docs/api or docs/errors.md"
    for name in shown:
        assert pydoc.locate(f"statetx.{name}") is not None, "a page shows a name that is gone"


def public_errors():
    return [x for x in (getattr(statetx, name) for name in dir(statetx)) if isclass(x) and issubclass(x, Exception)]


@pytest.mark.parametrize("cls", public_errors(), ids=lambda cls: cls.__name__)
def test_errors_page_explains(cls):
    """Each public error and warning has a section with its message, cause, fix and an example."""
    text = (DOCS / "errors.md").read_text()
    sections = dict(part.split("\n", 1) for part in re.split(r"^## ", text, flags=re.M)[1:])
    section = sections[cls.__name__]
    anchor = f"#{cls.__name__.lower()}"  # as mkdocs makes it from the heading
    assert str(cls("")).endswith(f"/errors/{anchor}")
    if cls is statetx.StatetxError:
        return
    assert f"({anchor})" in text.partition("\n## ")[0], "the table at the top of the page lists it"
    assert section.index(f"\nstatetx.{cls.__name__}: ") < section.index("**Cause.**") < section.index("**Fix.**")
    examples = [block["code"] for block in BLOCK.finditer(section)]
    wrong, fixed = section.split("**Cause.**")
    assert len(examples) >= 2 and wrong.count("Traceback") == 1 and "Traceback" not in fixed


def is_of(module, name, x):
    """Whether a name is one of a module's own: defined there, or imported there to be public (``import X as X``)."""
    if name.startswith("_"):
        return False
    source = pathlib.Path(module.__file__).read_text()
    return getattr(x, "__module__", None) == module.__name__ or f"import {name} as {name}" in source


@pytest.mark.slow
def test_site_builds(built_site):
    """Strictly: without a dead link, an anchor that is not there, or a name that the reference does not find."""
    done, tmp_path = built_site
    assert done.returncode == 0, done.stderr
    remat_page = (tmp_path / "api" / "remat" / "remat" / "index.html").read_text()
    assert 'id="statetx.remat"' in remat_page and ">unknown<" not in remat_page
    for name in ("Policy", "Filter", "Indices", "Names"):  # types of parameters are links
        assert f'href="../../types/#{name.lower()}"' in remat_page, name
    group_page = (tmp_path / "api" / "remat" / "index.html").read_text()
    assert 'href="remat/#statetx.remat"' in group_page
    assert "https://github.com/statetx/statetx/edit/main/docs/api/remat.md" in group_page
    assert f"statetx {statetx.__version__}" in remat_page  # in the header, with the link to the repository
    errors_page = (tmp_path / "errors" / "index.html").read_text()
    for cls in public_errors():
        assert f'id="{str(cls("")).rpartition("#")[2]}"' in errors_page
    pages = [path.read_text() for path in tmp_path.rglob("*.html")]
    loaded = {
        url
        for page in pages
        for url in re.findall(r'<(?:script|link(?! rel="canonical")|img)[^>]*(?:src|href)="(https?:[^"]*)', page)
    }
    assert not loaded, "the site works without a network"


# -- in a browser ----------------------------------------------------------------------------------------------------


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


@pytest.fixture(scope="module")
def browser(built_site):
    """The built site in Chromium: a function that sends it a WebDriver command, and the site's address."""
    program = shutil.which("chromedriver")
    if program is None:
        pytest.skip("no chromedriver is installed")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def send(path, body=None, method=None):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, method=method)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)["value"]

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=built_site[1]))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    site = f"http://127.0.0.1:{server.server_port}"
    with subprocess.Popen([program, f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as driver:
        for _ in range(100):
            with contextlib.suppress(OSError):
                send("/status")
                break
            time.sleep(0.1)
        options = {"args": ["--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1400,1000"]}
        capabilities = {"alwaysMatch": {"goog:chromeOptions": options}}
        session = f"/session/{send('/session', {'capabilities': capabilities})['sessionId']}"
        grant = {"permissions": ["clipboardReadWrite", "clipboardSanitizedWrite"], "origin": site}
        send(f"{session}/goog/cdp/execute", {"cmd": "Browser.grantPermissions", "params": grant})
        yield lambda path, **body: send(session + path, body), site
        send(session, method="DELETE")
        driver.terminate()
    server.shutdown()
    server.server_close()


def copied(browser, page, blocks=""):
    """What each copy button of a page puts into the clipboard, in order; of the blocks that a selector names."""
    command, site = browser
    command("/url", url=f"{site}/{page}/")
    time.sleep(0.5)  # the page's scripts add the buttons
    texts = []
    for button in command("/elements", using="css selector", value=f'{blocks} [data-md-type="copy"]'):
        (element,) = button.values()
        command("/execute/sync", script="arguments[0].scrollIntoView({ block: 'center' })", args=[button])
        command(f"/element/{element}/click")
        texts.append(command("/execute/sync", script="return navigator.clipboard.readText()", args=[]))
    return texts


@pytest.mark.thorough
def test_copied_blocks_of_a_page_run(browser):
    """Without prompts and outputs: the page's own code, block by block."""
    texts = copied(browser, "concepts/state")
    scope = {}
    for text in texts:
        with contextlib.suppress(statetx.StatetxError):  # the page shows one
            exec(compile(text, "copied", "exec"), scope)
    page = (DOCS / "concepts" / "state.md").read_text()
    assert len(texts) == page.count("```python") + len(re.findall(r"^(>>>.*\n([.]{3}.*\n)*)+(?!>>>)", page, re.M)) > 2


@pytest.mark.thorough
def test_copied_examples_of_docstrings_have_no_prompts(browser):
    texts = copied(browser, "api/remat/remat", ".highlight:has(.gp)")
    assert texts
    for text in texts:
        compile(text, "copied", "exec")
