"""Numbers and pictures of the documentation: written from results, and the deterministic ones measured again."""

import json
import pathlib
import re
import runpy

import jax
import pytest
from pages import assert_same

from helpers import benchmark

ROOT = pathlib.Path(__file__).parents[1]
DOCS = ROOT / "docs"
RESULTS = ROOT / "benchmarks" / "results"

# Memory and operations of compiled programs belong to one version of XLA.
same_xla = pytest.mark.skipif(not jax.__version__.startswith("0.10."), reason="the results are of jax 0.10")


@pytest.fixture(scope="module")
def report():
    """benchmarks/report.py. The benchmarks import every library that they compare."""
    for library in ("brainstate", "equinox", "flax", "haiku", "matplotlib", "rich"):
        pytest.importorskip(library)
    with benchmark("report") as report:
        yield report


def results(name):
    return json.loads((RESULTS / f"{name}.json").read_text())


def test_pages_are_written_from_results(report):
    written = []
    for page in report.PAGES:
        text = page.read_text()
        for name in report.sections_of(page):
            section = re.search(f"<!-- {name} -->\n(.*?)\n<!-- end {name} -->", text, re.S)
            assert section is not None, f"{page.name}: {name} does not end"
            assert section[1] == report.SECTIONS[name](), f"run benchmarks/report.py: {name} of {page.name} differs"
            written.append(name)
    assert sorted(written) == sorted(report.SECTIONS), "every section has one place"


def test_complete_results_are_tables(report):
    """Those of which pages have only a part: ``benchmarks/report.py --show`` prints them."""
    for name, log in report.LOGS.items():
        assert re.search(r"\| :?--", log()) and "Measured by" in log(), name


def test_performance_has_numbers_in_its_sections_only(report):
    """Apart from the sizes of programs: what a run measures is not written by hand."""
    text = (DOCS / "performance.md").read_text()
    for name in report.sections_of(DOCS / "performance.md"):
        text = re.sub(f"<!-- {name} -->.*?<!-- end {name} -->", "", text, flags=re.S)
    assert not re.findall(r"\d+\.\d+|\d+%|\d+ [KMG]iB", text)


def test_readme_and_performance_show_the_same_demo():
    demo = results("demo")
    row = next(line for line in (ROOT / "README.md").read_text().split("\n") if line.startswith("| `Slots("))
    plain, slots = (demo["runs"][name]["temporary_bytes"] for name in ("plain", "scheduled"))
    numbers = [demo[key]["scheduled"] for key in ("step_runs", "time")]
    assert [x.strip(" *`") for x in row.strip("|").split("|")] == [
        demo["runs"]["scheduled"]["checkpoint"],
        f"{slots / 2**20:.3f} MiB",
        f"1/{plain / slots:.0f}",
        *(f"{x:.2f}" for x in numbers),
    ]


def texts(svg):
    """What is written in a picture, with the places of its marks."""
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg.read_text())


@pytest.mark.slow
def test_charts_are_drawn_from_results(report, tmp_path):
    report.draw(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(f"{name}.svg" for name in report.CHARTS)
    for path in tmp_path.iterdir():
        assert len(texts(path)) > 10
        assert texts(path) == texts(DOCS / "images" / path.name), f"run benchmarks/report.py: {path.name} differs"


def test_comparison_has_every_row(report):
    behaviors = report.module("behaviors")
    assert {name: len(cells) for name, cells in results("behaviors")["cells"].items()} == {
        library.name: len(behaviors.ROWS) for library in behaviors.LIBRARIES
    }
    page = (DOCS / "comparison.md").read_text()
    num_shown = sum(f"\n| {row.title} |" in page for row in behaviors.ROWS)
    num_more = sum(map(int, re.findall(r"^(\d+) more rows are right in every library", page, re.M)))
    assert num_shown + num_more == len(behaviors.ROWS)


@pytest.mark.slow
@same_xla
def test_memory_of_blocks_is_what_the_page_says(report):
    planner = report.module("planner")
    programs, wraps = planner.PROGRAMS, (planner.identity, jax.checkpoint, planner.statetx.remat)
    got = [planner.cost(programs["MLP"](wrap)).temp_bytes for wrap in wraps]
    assert got == pytest.approx(results("planner")["fence"]["MLP"], rel=0.05)  # another CPU may fuse otherwise
    assert got[2] < 0.3 * got[1]


@pytest.mark.slow
@same_xla
def test_memory_of_a_loop_is_what_the_page_says(report):
    """The largest loop of the page, with two numbers of stored carries; compiled, not run."""
    loops = report.module("loops")
    expected = results("loops")["gru"]["results"]
    loss, _ = loops.recurrent(loops.gru, 2, 256, 32)
    args = jax.eval_shape(lambda: loops.recurrent(loops.gru, 4096, 256, 32)[1])
    for slots in (16, 90):
        gradient = jax.jit(jax.grad(loss(loops.ours(loops.Slots(slots))), argnums=(0, 1)))
        num_bytes = gradient.lower(*args).compile().memory_analysis().temp_size_in_bytes
        assert num_bytes == pytest.approx(expected[f"statetx Slots({slots})"]["bytes"], rel=0.05)


def test_runs_of_the_body_are_at_most_the_optimum_of_carries(report):
    schedule = report.module("loops").schedule
    for row in results("loops")["counts"]["results"]:
        assert schedule.num_evaluations(1000, row["slots"]) / 1000 == pytest.approx(row["optimum"], abs=0.005)
        assert row["statetx"] <= row["optimum"]


@pytest.mark.slow
@same_xla
def test_counts_of_traced_blocks_are_what_the_page_says(report):
    trace = report.module("bench_trace")
    for name in (trace.CLEARED, trace.SHARED):
        expected = results("bench_trace")["results"][name]
        with jax.numpy_rank_promotion("allow"):  # as users have it
            got = trace.counts(name)
        for key in ("equations", "runs"):
            assert got[key] == expected[key]
        for key in ("flops", "temp_bytes"):
            assert got["default"][key] == pytest.approx(expected["default"][key], rel=1e-4 if key == "flops" else 0.05)


@pytest.fixture(scope="module")
def figures():
    pytest.importorskip("matplotlib")
    return runpy.run_path(str(DOCS / "figures.py"))


def draw(figures, names, folder, monkeypatch):
    monkeypatch.setitem(figures["save"].__globals__, "IMAGES", folder)
    for name in names:
        figures[name]()
    return {path.name for path in folder.iterdir()}


@same_xla
@pytest.mark.parametrize("name", ["remat", "loops", "residuals"])
def test_measured_figures_are_current(figures, name, tmp_path, monkeypatch):
    assert draw(figures, [f"draw_{name}"], tmp_path, monkeypatch) == {f"{name}.svg"}
    drawn, committed = (folder / f"{name}.svg" for folder in (tmp_path, DOCS / "images"))
    assert_same("\n".join(texts(drawn)), "\n".join(texts(committed)))  # else run docs/figures.py
    assert curves(drawn) == curves(committed), f"run docs/figures.py: {name}.svg differs"


def curves(svg):
    """The lengths of a picture's paths, which places of words do not change."""
    return [len(path.split()) for path in re.findall(r' d="([^"]*)"', svg.read_text())]


@pytest.mark.slow
def test_figures_are_drawn(report, figures, tmp_path, monkeypatch):
    drawn = draw(figures, [name for name in figures if name.startswith("draw_")], tmp_path, monkeypatch)
    for name in drawn:
        assert texts(tmp_path / name) == texts(DOCS / "images" / name), f"run docs/figures.py: {name} differs"
    charts = {f"{name}.svg" for name in report.CHARTS}
    assert drawn | charts == {path.name for path in (DOCS / "images").iterdir() if path.is_file()}
    pages = [ROOT / "README.md", *DOCS.rglob("*.md")]
    assert all(any(name in page.read_text() for page in pages) for name in drawn | charts)
