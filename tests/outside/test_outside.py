"""The suites of other libraries with statetx's transforms: every test passes, or is named with a reason."""

import json
import os
import subprocess
import sys
import textwrap

import pytest

from runner import HERE, judge, load, missing_sentences, read_table, run
from suites import CHECKOUTS, SUITES, Suite

ROOT = HERE.parents[1]


def outcomes_of(name, folder, *options):
    """Outcomes in a separate process: these libraries' tests change settings, and expect a fresh JAX's."""
    out = folder / f"{name}.json"
    command = [sys.executable, str(HERE / "runner.py"), name, "--out", str(out), *options]
    cache = "JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE"  # JAX's tests set one of their own
    env = {k: v for k, v in os.environ.items() if not k.startswith(cache)}
    done = subprocess.run(command, env=env | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads(out.read_text())


@pytest.mark.outside
@pytest.mark.parametrize("name", SUITES)
def test_every_outcome_is_listed(name, tmp_path):
    suite = SUITES[name]
    if not suite.files():
        pytest.skip(f"no tests of {suite.library}: set {CHECKOUTS} to a folder with a checkout {suite.library}/ in it")
    entries = read_table(HERE / f"{name}.toml")
    _, complaints = judge(outcomes_of(name, tmp_path), entries)
    assert not complaints, "\n".join(complaints)


@pytest.mark.outside
@pytest.mark.parametrize("name", SUITES)
def test_listed_tests_pass_without_statetx(name, tmp_path):
    if not SUITES[name].files():
        pytest.skip(f"no tests of {SUITES[name].library}")
    fails = {
        test
        for test, result in outcomes_of(name, tmp_path, "--plain", "--named").items()
        if result["outcome"] == "failed"
    }
    plain = [entry for entry in read_table(HERE / f"{name}.toml") if entry.kind == "plain"]
    assert fails == {test for test in fails if any(entry.matches(test) for entry in plain)}
    assert all(any(entry.matches(test) for test in fails) for entry in plain)


@pytest.mark.parametrize("name", SUITES)
def test_tables_quote_the_documentation(name):
    assert missing_sentences(read_table(HERE / f"{name}.toml"), ROOT) == []


LIBRARY = """
    import unittest
    import math
    from math import floor as down

    class TestLibrary(unittest.TestCase):
        def test_swapped(self):
            self.assertEqual(math.sin(1.0), "ours")

        def test_inside_a_function(self):
            from math import sin
            self.assertEqual(sin(1.0), "ours")

        def test_other_names_are_the_library_s(self):
            self.assertEqual((math.cos(0.0), down(1.5)), (1.0, 1))

        def test_differs(self):
            self.assertLess(math.sin(1.0), 1.0)

        @unittest.skip("here")
        def test_skipped(self):
            pass
"""


@pytest.fixture
def library(tmp_path, monkeypatch):
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "lib_test.py").write_text(textwrap.dedent(LIBRARY))
    monkeypatch.setenv(CHECKOUTS, str(tmp_path))
    return Suite("A library", "lib", ("*_test.py",), lambda: {"math.sin": lambda x: "ours"})


def table(tmp_path, text):
    path = tmp_path / "table.toml"
    path.write_text(textwrap.dedent(text))
    return read_table(path)


def test_only_the_tested_module_sees_the_swaps(library):
    import math

    module = load(library.files()[0], library.swaps())
    assert module.math.sin(1.0) == "ours" != math.sin(1.0)
    assert module.math.cos is math.cos


def test_outcomes_are_judged_by_the_table(library, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["runner"])
    outcomes = run(library, library.swaps())
    assert {
        name.removeprefix("lib_test.TestLibrary.test_"): result["outcome"] for name, result in outcomes.items()
    } == {
        "swapped": "passed",
        "inside_a_function": "passed",
        "other_names_are_the_library_s": "untouched",
        "differs": "failed",
        "skipped": "skipped",
    }
    fault = '[[fault]]\nhappens = "a string"\ntests = ["*.test_differs"]\n'
    assert judge(outcomes, table(tmp_path, fault)) == (
        {"passed": 2, "untouched": 1, "fault": 1, "skipped": 1},
        [],
    )
    assert "fails, and is not named: lib_test.TestLibrary.test_differs" in judge(outcomes, [])[1][0]
    for pattern, complaint in {
        "*.test_swapped": "named as fault, but it is passed",
        "*.test_gone": "there is no such test",
        "*.test_diff*": "named 2 times",
    }.items():
        entries = table(tmp_path, fault + f'[[inapplicable]]\nreason = "none"\ntests = ["{pattern}"]\n')
        (found,) = judge(outcomes, entries)[1]
        assert complaint.replace("fault", "inapplicable") in found


def test_sentence_missing_from_its_page_is_found(tmp_path):
    (tmp_path / "page.md").write_text("One\nsentence. Another.")
    entry = '[[different]]\npage = "page.md"\nsentence = "{}"\ntests = ["*"]\n'
    assert missing_sentences(table(tmp_path, entry.format("One sentence.")), tmp_path) == []
    assert missing_sentences(table(tmp_path, entry.format("No sentence.")), tmp_path) == [
        "page.md does not say: No sentence."
    ]
