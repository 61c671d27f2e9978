"""Settings of every test: eight CPU devices, no silent rank promotion, machine code and searches that take
less time.
"""

import collections
import functools
import gc
import importlib.metadata
import itertools
import os
import pathlib
import platform
import shutil
import subprocess
import sys
import threading
import time

# Set before a backend starts, and inherited by the programs that a test starts: compilers take a fifth of the time that
# they take at LLVM's first level. LLVM does not optimize, and a module is not split for threads. jaxlib 0.10 emits
# fusions without MLIR, which may change the memory of a program by a few hundred bytes (`fast_compile_options`).
# Without AVX2 there is no fused multiply-add: with it, two programs that compute the same expressions differed in their
# last bits. `make test-slow` compiles with the options that users have.
FLAGS = ["--xla_backend_optimization_level=0", "--xla_cpu_parallel_codegen_split_count=1"]
if importlib.metadata.version("jaxlib").startswith("0.10."):  # later ones do not know the option
    FLAGS.append("--xla_cpu_use_fusion_emitters=false")
if platform.machine() in ("x86_64", "AMD64"):
    FLAGS.append("--xla_cpu_max_isa=AVX")
os.environ.setdefault("XLA_FLAGS", " ".join(FLAGS))

# What XLA compiles is kept, from run to run, in one folder for all workers; the programs that tests start read it and
# add nothing. Entries are written by `put_whole`. JAX's own lock comes with a limit (JAX_COMPILATION_CACHE_MAX_SIZE):
# each write reads the times of all entries, 0.1 s for 6,000 of them, and without the package filelock nothing is kept.
ROOT = pathlib.Path(__file__).parents[1]
COMPILED = ROOT / ".pytest_cache" / "compiled"
MOST_BYTES = 1 << 30
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(COMPILED)
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "1e9"  # nothing is written
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

# Plans are made, not read, and the user's own cache stays unchanged. Tests of the cache set a folder.
os.environ["STATETX_CACHE"] = ""
os.environ["COLUMNS"] = "160"  # reports are as wide as the terminal that the tests run in, else

import jax  # noqa: E402
import pytest  # noqa: E402
from jax._src import lru_cache, traceback_util  # noqa: E402
from jax._src.interpreters import mlir  # noqa: E402

import speeds  # noqa: E402

jax.config.update("jax_num_cpu_devices", 8)  # before any array is made: backends read it when they start
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)


def put_whole(self, key, value):
    """As ``LRUCache.put`` of JAX, which writes in place: a worker that reads, or the end of a run, would find half of
    an entry.
    """
    entry = self.path / f"{key}-cache"
    part = entry.with_name(f"{key}-{os.getpid()}-{threading.get_ident()}")
    part.write_bytes(value)
    os.replace(part, entry)


lru_cache.LRUCache.put = put_whole

MAKE_CONTEXT, CONTEXTS = mlir.make_ir_context, threading.local()


def shared_context():
    """JAX's MLIR context, made for every hundredth program of a thread: making one takes a tenth of the time of a small
    program.
    """
    CONTEXTS.uses = getattr(CONTEXTS, "uses", 0) + 1
    if CONTEXTS.uses % 100 == 1:
        CONTEXTS.context = MAKE_CONTEXT()
    return CONTEXTS.context


mlir.make_ir_context = shared_context

# For each frame of a traceback and each folder that JAX leaves out, it asks the file system again.
traceback_util._path_starts_with = functools.cache(traceback_util._path_starts_with)


def pytest_addoption(parser):
    speeds.add_options(parser)


def pytest_configure(config):
    speeds.register(config)


def pytest_sessionstart(session):
    """Begin with an empty cache once programs that are no longer compiled fill it."""
    is_first = not hasattr(session.config, "workerinput")
    if is_first and COMPILED.exists() and sum(path.stat().st_size for path in COMPILED.iterdir()) > MOST_BYTES:
        shutil.rmtree(COMPILED)


def pytest_collection(session):
    """Type-check edited jaxprs, and load every public class, so that its doctests are found in the module `statetx`."""
    import statetx
    from helpers import check_edits

    check_edits()
    for name in statetx.__all__:
        getattr(statetx, name)


# `make smoke` runs all of some files, and one case of each test of others, so that each law runs once.
SMOKE = (
    "atomic compat control_flow functionalize grad optimizer package paths placement remat scan state vmap "
    "wrapped_functions"
).split()
KINDS = "kind dialect library".split()  # parameters of which `sample` keeps each value
SMOKE_ONCE = "behaviors carry effects_table flops jit laws nnx policies ref residuals shard_map".split()


def pytest_collection_modifyitems(items):
    leave_crosses_to_the_slow_suite(items)
    seen, sampled = set(), set()
    for item in items:
        sample = item.get_closest_marker("sample")
        if sample and not item.get_closest_marker("slow"):
            params = item.callspec.params
            cell = item.path, item.originalname, *(str(params[name]) for name in KINDS if name in params)
            if cell in sampled:
                item.add_marker(*sample.args or ("thorough",))
            sampled.add(cell)
        name = item.path.stem.removeprefix("test_")
        kind = item.callspec.params.get("dialect") if hasattr(item, "callspec") else None
        case = (name, item.name.partition("[")[0], getattr(kind, "name", ""))
        is_first = case not in seen and not item.get_closest_marker("slow")
        if name in SMOKE or (name in SMOKE_ONCE and is_first):
            item.add_marker("smoke")
        if is_first:
            seen.add(case)


def leave_crosses_to_the_slow_suite(items):
    """Of a test with two parametrizations or more the fast suite runs cells that have each value of each, or each pair
    of three.
    """
    cells = collections.defaultdict(list)
    for item in items:
        if hasattr(item, "callspec") and not item.get_closest_marker("slow") and not item.get_closest_marker("whole"):
            axes = [mark.args[0] for mark in item.iter_markers("parametrize")]
            axes = [names.replace(" ", "").split(",") if isinstance(names, str) else names for names in axes]
            values = [(n, *(id(item.callspec.params[name]) for name in names)) for n, names in enumerate(axes)]
            if len(axes) > 1:
                parts = values if len(axes) == 2 else itertools.combinations(values, 2)
                cells[item.path, item.originalname].append((item, set(parts)))
    for cross in cells.values():
        missing, used = set().union(*(parts for _, parts in cross)), collections.Counter()
        while missing:
            # One that has most of what is missing, and then what was used least: the values of the shorter axis take
            # turns.
            best = max(cross, key=lambda cell: (len(missing & cell[1]), -sum(used[part] for part in cell[1])))
            cross.remove(best)
            missing -= best[1]
            used.update(best[1])
        for item, _ in cross:
            item.add_marker("slow")


SETTINGS = {}
MEMORY = {"most": 2 << 30}


def pytest_collection_finish(session):
    """Note JAX's settings. Exclude half a million objects of the libraries and of pytest from every garbage
    collection.
    """
    SETTINGS.update(jax.config.values)
    gc.collect()
    gc.freeze()
    gc.set_threshold(
        700, 10, 1000
    )  # all generations after a file, and seldom within one: that took a tenth of the time


@pytest.hookimpl(trylast=True)  # after the fixtures of the file have ended
def pytest_runtest_teardown(item, nextitem):
    """After a file, forget compiled programs if they fill memory: four processes of the suite fit in 16 GiB.

    What the file leaves in caches is excluded from later garbage collections: each would take half a second.
    A file that leaves another setting of JAX fails: later tests of this process would see it.
    """
    if nextitem is None or nextitem.path != item.path:
        restore_settings(item.path.name)
    if nextitem is not None and nextitem.path != item.path:
        is_full = resident_bytes() > MEMORY["most"]
        if is_full:
            jax.clear_caches()
            gc.unfreeze()
        gc.collect()
        gc.freeze()
        if is_full:  # what is free now is used again, and little of it goes back to the system
            MEMORY["most"] = resident_bytes() + (1 << 30)


def restore_settings(file):
    changed = {name: value for name, value in jax.config.values.items() if value != SETTINGS[name]}
    for name in changed:
        jax.config.update(name, SETTINGS[name])
    assert not changed, f"{file} leaves other settings of JAX: {changed}"


def resident_bytes() -> int:
    """Memory of this process, 0 where the system does not tell."""
    status = pathlib.Path("/proc/self/statm")
    return int(status.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if status.exists() else 0


# -- time ------------------------------------------------------------------------------------------------------------

MOST_SECONDS = 5.0
REFERENCE_SECONDS = 0.1  # of `count_up` on the machine that the limit is for: two cores of a server


def count_up():
    total = 0
    for n in range(4_500_000):
        total += n & 7
    return total


SLOWDOWN = {"most": 1.0}


def slowdown():
    """How much longer than the reference this machine takes, at least 1: the most that this process has measured.

    Neighbours of a shared machine come and go: a count of a tenth of a second may miss those that a test has had.
    """
    start = speeds.cpu_seconds()
    count_up()
    shared = 1.5 if os.getloadavg()[0] > 2 * (os.cpu_count() or 1) else 1.0  # caches, which a count has no need of
    SLOWDOWN["most"] = max(SLOWDOWN["most"], shared * (speeds.cpu_seconds() - start) / REFERENCE_SECONDS)
    return SLOWDOWN["most"]


def check_time(seconds, slowdown=slowdown):
    if seconds > MOST_SECONDS and seconds > MOST_SECONDS * slowdown():
        pytest.fail(
            f"This test took {seconds:.1f} s, and may take {MOST_SECONDS} s.\n"
            "Fix: make it cheaper (smaller arrays, one compilation), or mark it slow.",
            pytrace=False,
        )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """A test of the fast suite that takes over five seconds fails.

    Other processes of the machine take none of its CPU time, and threads that compile at the same time take more of it
    than the test.
    """
    start, start_cpu = time.monotonic(), speeds.cpu_seconds()
    result = yield
    if "not slow" in item.config.option.markexpr:
        check_time(min(time.monotonic() - start, speeds.cpu_seconds() - start_cpu))
    return result


@pytest.fixture
def promoted_ranks():
    """As the layers of other libraries need it."""
    with jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture
def clock(monkeypatch):
    """A clock that is set by hand: ``clock.append(seconds)``."""
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[-1])
    return now


@pytest.fixture(scope="session")
def built_site(tmp_path_factory):
    """The documentation site, built strictly: the finished process, and the folder."""
    for module in ("mkdocs", "material", "mkdocstrings_handlers.python"):
        pytest.importorskip(module)
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=pathlib.Path(__file__).parents[1],
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
    )
    return done, folder
