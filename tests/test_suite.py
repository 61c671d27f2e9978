"""The settings of the suite itself: what is compiled is kept, a test that takes too long fails, and of a cross a part
runs.
"""

import collections
import datetime
import itertools
import pathlib
import re
import types

import jax
import jax.numpy as jnp
import pytest

import speeds
import statetx


@pytest.fixture
def conftest(pytestconfig):
    """The settings that pytest has read; another file of that name may be imported by now."""
    path = str(pathlib.Path(__file__).with_name("conftest.py"))
    plugins = pytestconfig.pluginmanager.get_plugins()
    return next(plugin for plugin in plugins if getattr(plugin, "__file__", None) == path)


def events_of(fun, *args):
    """What JAX notes while a function is compiled that nothing in this process has compiled."""
    events = []
    listener = lambda event, **_: events.append(event)
    jax.monitoring.register_event_listener(listener)
    try:
        jax.jit(fun).lower(*args).compile()
    finally:
        jax.monitoring.unregister_event_listener(listener)
    return events


def test_a_program_that_was_compiled_before_is_read():
    fun, x = lambda x: jnp.sin(x) * 1.4142, jnp.arange(5.0)
    events_of(fun, x)
    assert "/jax/compilation_cache/cache_hits" in events_of(lambda x: fun(x), x)


def test_an_entry_is_there_as_a_whole_or_not_at_all(conftest, tmp_path, monkeypatch):
    cache = conftest.lru_cache.LRUCache(str(tmp_path), max_size=-1)
    cache.put("first", b"program")
    assert cache.get("first") == b"program"

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(conftest.os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cache.put("second", b"half a program")
    assert cache.get("second") is None


def test_a_test_of_the_fast_suite_that_takes_over_five_seconds_fails(conftest):
    conftest.check_time(4.9)
    conftest.check_time(6.0, lambda: 2.0)  # on a machine that takes twice as long
    with pytest.raises(pytest.fail.Exception, match="mark it slow"):
        conftest.check_time(6.0, lambda: 1.0)


@pytest.mark.parametrize("axes", ["ab", "abc"])
def test_of_a_cross_the_fast_suite_runs_each_value_or_each_pair(conftest, axes):
    sizes, slow = {"a": 4, "b": 3, "c": 2}, []

    def cell(*values):
        return types.SimpleNamespace(
            path="test_x.py",
            originalname="test_x",
            callspec=types.SimpleNamespace(params=dict(zip(axes, values, strict=True))),
            get_closest_marker=lambda name: None,
            iter_markers=lambda name: [types.SimpleNamespace(args=(axis,)) for axis in axes],
            add_marker=lambda name: slow.append(values),
        )

    every = [*itertools.product(*(range(sizes[axis]) for axis in axes))]
    conftest.leave_crosses_to_the_slow_suite([cell(*values) for values in every])
    fast, places = {*every} - {*slow}, [*itertools.combinations(range(len(axes)), len(axes) - 1)]
    assert all(
        {tuple(v[i] for i in place) for v in fast} == {tuple(v[i] for i in place) for v in every} for place in places
    )
    assert len(fast) <= len(every) // 2


# -- speeds ----------------------------------------------------------------------------------------------------------


def a_run(**options):
    """The plugin of a run with these options, as in one process."""
    options = {"--twelfth": None, "--minutes": None, "--complete": False, "--times": None} | options
    config = types.SimpleNamespace(
        getoption=options.get, hook=types.SimpleNamespace(pytest_deselected=lambda items: None)
    )
    return speeds.Speeds(config), config


def test_twelfths_have_every_slow_test_once_and_begin_elsewhere_in_each_turn():
    tests = [types.SimpleNamespace(nodeid=f"tests/test_x.py::test_x[{n}]") for n in range(200)]
    found = collections.Counter()
    for number in range(speeds.PARTS):
        run, config = a_run(**{"--twelfth": str(number)})
        run.pytest_collection_modifyitems(config, chosen := [*tests])
        assert chosen
        found.update(test.nodeid for test in chosen)
    assert found == {test.nodeid: 1 for test in tests}
    year = [speeds.today(datetime.date(2027, 1, 1) + datetime.timedelta(n)) for n in range(24)]
    assert len(set(year)) == 24 and len({number for number, _ in year}) == speeds.PARTS


def test_a_run_that_is_over_begins_no_test_and_tells_which_it_left():
    lines = []
    reporter = types.SimpleNamespace(section=lines.append, line=lines.append)
    for minutes, left in ((0.0, True), (1.0, None)):
        run, _ = a_run(**{"--minutes": minutes})
        assert run.pytest_runtest_protocol(types.SimpleNamespace(nodeid="tests/test_x.py::test_x")) is left
        run.pytest_terminal_summary(reporter)
    assert lines == ["left for another day", "1 tests: 1 of tests/test_x.py"]


@pytest.mark.whole
@pytest.mark.parametrize("complete", [False, True])
@pytest.mark.parametrize("reason", ["no Chromium is installed", "this JAX has none"])
def test_a_complete_run_fails_where_a_program_is_missing(complete, reason):
    run, _ = a_run(**{"--complete": complete})
    reason_of_skip = ("test_x.py", 1, f"Skipped: {reason}")
    report = types.SimpleNamespace(when="call", skipped=True, outcome="skipped", longrepr=reason_of_skip)
    hook = run.pytest_runtest_makereport(None)
    next(hook)
    with pytest.raises(StopIteration):
        hook.send(report)
    assert report.outcome == ("failed" if complete and "Chromium" in reason else "skipped")


def reports_of(name, outcome="passed", seconds=1.0, marks=()):
    """What pytest reports of a test: its setup, its call, its end."""
    for when in ("setup", "call", "teardown"):
        found = outcome if when == "call" else "passed"
        yield types.SimpleNamespace(
            when=when, nodeid=f"tests/test_x.py::{name}", keywords={name: 1} | dict.fromkeys(marks, 1), outcome=found,
            failed=found == "failed", user_properties=[["cpu", seconds]],
        )  # fmt: skip


def test_a_run_ends_with_a_line_for_each_speed(tmp_path):
    run, _ = a_run(**{"--times": tmp_path / "times"})
    cheap, failed = reports_of("test_a", seconds=0.5), reports_of("test_b", "failed", marks=["thorough"])
    for report in (*cheap, *failed, *reports_of("test_c", "skipped", marks=["thorough"])):
        run.pytest_runtest_logreport(report)
    lines = []
    run.pytest_terminal_summary(types.SimpleNamespace(section=lines.append, line=lines.append))
    assert lines == ["test: 1 passed in 0.5s of CPU", "thorough: 1 failed, 1 skipped in 2.0s of CPU"]
    assert (tmp_path / "times").read_text().endswith("\n0.500\ttest\tpassed\ttests/test_x.py::test_a\n")


def test_progress_has_the_time_left(monkeypatch):
    run, _ = a_run()
    assert run.progress(4) == " [  0%]"
    for report in reports_of("test_x"):
        run.pytest_runtest_logreport(report)
    monkeypatch.setattr(speeds.time, "time", lambda: run._start + 100)
    assert run.progress(4) == " [ 25%, 5 min left]" and run.progress(1) == " [100%]"


# -- what `make test` runs ---------------------------------------------------------------------------------------------

IMPORT = re.compile(r"^(from \S+ import \([^)]*\)|from \S+ import .*|import .*)$", re.M)
DEFINITION = re.compile(r"(?P<decorators>(?:^[@ )].*\n)*)^(?:def|class) (?P<name>\w+)", re.M)
LEFT_OUT = re.compile(r"\bmark\.(slow|thorough|outside|targets)\b")


def words_that_make_test_runs(text):
    """Words in the tests of a file that are not left out, in the functions that they use, and outside of functions."""
    definitions, used = {}, set()
    for chunk in IMPORT.sub("", text).split("\n\n\n"):  # as ruff formats it, between definitions
        words, definition = {*re.findall(r"\w+", chunk)}, DEFINITION.match(chunk.strip())
        if definition is None:
            if "pytestmark" in words and LEFT_OUT.search(chunk):
                return set()
            used |= words
        elif not LEFT_OUT.search(definition["decorators"]):
            definitions[definition["name"]] = words
            used |= words if definition["name"].startswith("test_") else set()
    while reached := [name for name in definitions if name in used]:
        used |= set().union(*(definitions.pop(name) for name in reached))
    return used


def test_words_of_tests_that_are_left_out_are_not_counted():
    chunks = ["import z", "@mark.slow\ndef test_a():\n    first(b)", "def first(x):\n    b", "def second():\n    c"]
    text = "\n\n\n".join([*chunks, "@mark.x(\n    5,\n)\ndef test_d():\n    second()", "TABLE = [e]"])
    assert not words_that_make_test_runs(text) ^ {"mark", "x", "5", "def", "test_d", "second", "c", "TABLE", "e"}


def test_each_public_name_error_and_policy_is_in_a_test_of_make_test():
    """Marks by duration may leave a name to the thorough tests alone."""
    public, used = {*statetx.__all__, *statetx.policies.__all__, *statetx.testing.__all__}, set()
    for path in pathlib.Path(__file__).parent.glob("*.py"):
        is_test, text = path.stem.startswith("test_"), IMPORT.sub("", path.read_text())
        if path.name != "test_package.py":  # which lists them
            used |= words_that_make_test_runs(text) if is_test else {*re.findall(r"\w+", text)}
    left = public - used
    assert not left and len(public) > 80
