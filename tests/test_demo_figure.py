"""The table and the picture of the README: written by docs/demo_figure.py, with the bytes that the demo's
steps take.
"""

import json
import pathlib
import re
import runpy

import jax
import pytest

pytest.importorskip("matplotlib")

ROOT = pathlib.Path(__file__).parents[1]
figure = runpy.run_path(str(ROOT / "docs" / "demo_figure.py"))
RESULTS = {
    "options": {"steps": 40, "seq": 2048, "batch": 16, "hidden": 128, "cell": "gru"}
    | {"policy": None, "slots": None, "seed": 0},
    "runs": {
        "plain": {"checkpoint": "None", "temporary_mib": 200.0},
        "nested": {"checkpoint": "Levels(2)", "temporary_mib": 2.0},
        "scheduled": {"checkpoint": "Slots(64)", "temporary_mib": 0.5},
    },
    "comparisons": {
        "nested": {"memory_ratio": 100.0, "loss_difference": 1e-7, "weight_difference": 1e-6},
        "scheduled": {"memory_ratio": 400.0, "loss_difference": 0.0, "weight_difference": 0.0},
    },
    "step_runs": {"plain": 1.0, "nested": 1.25, "scheduled": 1.5},
    "time": {"plain": 1.0, "nested": 1.125, "scheduled": 0.75},
}  # fmt: skip


def written(page):
    """The memory of each run in the table of a page, by its argument."""
    (table,) = figure["MARKED"].findall(page.read_text())
    return dict(re.findall(r"^\| `(.*?)` \| \**([\d.]+ MiB)\** \|", table, re.M))


def test_pages_and_pictures_agree():
    first, second = map(written, figure["PAGES"])
    assert first == second and set(first) == {"None", "Levels(2)", "Slots(64)"}
    for name in ("memory.svg", "memory-dark.svg"):
        text = (figure["IMAGES"] / name).read_text()
        assert all(memory in text for memory in first.values())


def test_results_are_written(tmp_path, monkeypatch, capsys):
    page, results = tmp_path / "page.md", tmp_path / "results.json"
    marks = "<!-- demo: written by docs/demo_figure.py -->\n{}<!-- demo: end -->\n"
    page.write_text("before\n" + marks.format("old\n") + "after\n")
    results.write_text(json.dumps(RESULTS))
    main = figure["main"]
    monkeypatch.setitem(main.__globals__, "PAGES", [page])
    monkeypatch.setitem(main.__globals__, "IMAGES", tmp_path)
    monkeypatch.setattr("sys.argv", ["demo_figure.py", str(results)])
    main()
    text = page.read_text()
    assert text.startswith("before\n<!--") and text.endswith("<!-- demo: end -->\nafter\n") and "old" not in text
    assert "| `None` | 200.0 MiB | 1 | 1.00 | 1.00 |" in text
    assert "| `Slots(64)` | **0.500 MiB** | **1/400** | 1.50 | 0.75 |" in text
    assert "1/400 of the memory, 0.75 × the time" in (tmp_path / "memory.svg").read_text()
    assert (tmp_path / "memory.svg").read_text() != (tmp_path / "memory-dark.svg").read_text()


def test_a_difference_of_the_exact_run_is_refused():
    scheduled = RESULTS["comparisons"]["scheduled"] | {"loss_difference": 1e-7}
    changed = RESULTS | {"comparisons": RESULTS["comparisons"] | {"scheduled": scheduled}}
    with pytest.raises(ValueError, match="no longer has the losses"):
        figure["make_table"](changed)


@pytest.mark.slow
@pytest.mark.skipif(not jax.__version__.startswith("0.10."), reason="other versions of XLA reserve other amounts")
@pytest.mark.parametrize("name, argument", [("scheduled", "Slots(64)"), ("nested", "Levels(2)"), ("plain", "None")])
def test_memory_of_the_demo_is_as_written(name, argument):
    """Compiled at the demo's sizes, and not run: XLA's amounts do not depend on the machine."""
    with jax.numpy_rank_promotion("allow"):  # as in the demo
        memory = figure["measure_memory"](RESULTS, name)
    assert figure["show_memory"]({"temporary_mib": memory / 2**20}) == written(ROOT / "README.md")[argument]
