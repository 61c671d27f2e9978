"""The speeds of the suite, and its progress: a pytest plugin, which `conftest` registers.

`make test` runs each law, kind, error and public name. Tests that cost more are `thorough` or `slow`: `.ci/run` runs
all of the first, and `make test-twelfth` of the second a twelfth by the day of the year, the same one again 12 days
later. It ends by itself after its minutes (``--minutes``), and tells which tests it left; it begins elsewhere each
time. A run ends with one line for each speed, with its CPU seconds; ``--times FILE`` writes those of each test.
"""

from __future__ import annotations

import collections
import datetime
import os
import pathlib
import random
import time
import zlib

import pytest

PARTS = 12
# Reasons of a skip that is no property of JAX's version or of the machine: what `make` or `.ci/run` installs is absent.
MISSING = ("could not import", "is installed", "is not installed")


def add_options(parser: pytest.Parser) -> None:
    group = parser.getgroup("speeds")
    group.addoption("--twelfth", help="of the tests marked slow, a twelfth: 0 to 11, or today")
    group.addoption("--minutes", type=float, help="begin no test after so many minutes, and tell which were left")
    group.addoption("--times", type=pathlib.Path, help="write CPU seconds, speed and outcome of each test to a file")
    group.addoption("--complete", action="store_true", help="a test that is skipped since something is missing fails")


def part_of(nodeid: str) -> int:
    """The twelfth that a test is in; it stays there when other tests come and go."""
    return zlib.crc32(nodeid.encode()) % PARTS


def today(date: datetime.date | None = None) -> tuple[int, int]:
    """The twelfth of a day, and how often the year has come to it."""
    day = (date or datetime.date.today()).timetuple().tm_yday
    return day % PARTS, day // PARTS


def cpu_seconds() -> float:
    """CPU time of this process and of those that it has started and that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


class Speeds:
    """One run: its twelfth, its end, its progress on the terminal."""

    def __init__(self, config: pytest.Config):
        self._config = config
        self._is_worker = hasattr(config, "workerinput")
        self._twelfth = config.getoption("--twelfth")
        minutes = config.getoption("--minutes")
        self._times = None if self._is_worker else config.getoption("--times")
        self._start = time.time()
        self._end = None if minutes is None else self._start + 60 * minutes
        if self._is_worker and self._end is not None:
            self._end = config.workerinput["end"]
        self._left: list[str] = []
        self._num_finished = 0
        self._cpu = cpu_seconds()  # of this process, when its last test ended
        self._rows: list[tuple[float, str, str, str]] = []  # CPU seconds, speed, outcome, test
        self._outcomes: dict[str, str] = {}
        self._counts = {"test": collections.Counter(), "thorough": collections.Counter(), "slow": collections.Counter()}
        self._cpu_of_speed: collections.Counter[str] = collections.Counter()

    # -- which tests run --

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        if self._twelfth is None:
            return
        number, turn = today() if self._twelfth == "today" else (int(self._twelfth), 0)
        chosen = [item for item in items if part_of(item.nodeid) == number]
        config.hook.pytest_deselected(items=[item for item in items if part_of(item.nodeid) != number])
        start = random.Random(turn).randrange(len(chosen)) if chosen else 0
        items[:] = chosen[start:] + chosen[:start]

    def pytest_collection_finish(self) -> None:
        self._cpu = cpu_seconds()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        if self._end is None or time.time() < self._end:
            return None
        self._left.append(item.nodeid)
        return True

    # -- between the processes of a run --

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node) -> None:
        node.workerinput["end"] = self._end

    def pytest_sessionfinish(self) -> None:
        if self._is_worker:
            self._config.workeroutput["left"] = self._left

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node) -> None:
        self._left += getattr(node, "workeroutput", {}).get("left", [])

    # -- what a person sees --

    def pytest_report_header(self) -> str | None:
        if self._twelfth is None:
            return None
        number = today()[0] if self._twelfth == "today" else self._twelfth
        return f"twelfth {number} of the slow tests; again: make test-twelfth TWELFTH={number}"

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item):
        report = yield
        if self._config.getoption("--complete") and report.skipped and not hasattr(report, "wasxfail"):
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            if any(words in reason for words in MISSING):
                report.outcome, report.longrepr = "failed", f"{reason}\nThis run may skip nothing (--complete)."
        if report.when == "teardown":
            before, self._cpu = self._cpu, cpu_seconds()
            report.user_properties = [*report.user_properties, ("cpu", self._cpu - before)]
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        speed = next((name for name in ("slow", "thorough") if name in report.keywords), "test")
        if report.when == "call" or report.outcome != "passed":
            outcome = "error" if report.failed and report.when != "call" else report.outcome
            outcome = self._outcomes[report.nodeid] = "xfailed" if hasattr(report, "wasxfail") else outcome
            self._counts[speed][outcome] += 1
        if report.when == "teardown":
            self._num_finished += 1
            seconds = dict(report.user_properties)["cpu"]
            self._cpu_of_speed[speed] += seconds
            name = "smoke" if speed == "test" and "smoke" in report.keywords else speed
            self._rows.append((seconds, name, self._outcomes.pop(report.nodeid, "passed"), report.nodeid))

    def progress(self, total: int) -> str:
        """`` [ 40%, 3 min left]``, by the number of tests, or by the end of a run that has one."""
        done = self._num_finished
        passed = time.time() - self._start
        if not done or done >= total:
            return f" [{done / max(total, 1):4.0%}]"
        left = passed * (total - done) / done
        if self._end is not None:
            left = min(left, max(self._end - time.time(), 0.0))
        return f" [{done / total:4.0%}, {duration(left)} left]"

    def pytest_terminal_summary(self, terminalreporter) -> None:
        if self._left:
            files = collections.Counter(test.partition("::")[0] for test in self._left)
            terminalreporter.section("left for another day")
            terminalreporter.line(f"{len(self._left)} tests: " + ", ".join(f"{n} of {f}" for f, n in files.items()))
        for speed, counts in self._counts.items():
            if counts:
                line = ", ".join(f"{n} {outcome}" for outcome, n in sorted(counts.items()))
                terminalreporter.line(f"{speed}: {line} in {self._cpu_of_speed[speed]:.1f}s of CPU")
        if self._times is not None:
            rows = sorted(self._rows, reverse=True)
            self._times.write_text(
                "".join(f"{seconds:.3f}\t{speed}\t{outcome}\t{test}\n" for seconds, speed, outcome, test in rows)
            )


def duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


def register(config: pytest.Config) -> None:
    speeds = Speeds(config)
    config.pluginmanager.register(speeds, "speeds")
    reporter = config.pluginmanager.getplugin("terminalreporter")
    if reporter is not None:  # pytest tells how many tests have run, and not how long the others will take
        reporter._get_progress_information_message = lambda: speeds.progress(reporter._session.testscollected)
        reporter._screen_width -= len(", 10 min left")
