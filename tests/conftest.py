"""Settings of every test: eight CPU devices, no silent rank promotion, machine code and searches that take less time."""

import atexit
import gc
import importlib.metadata
import os
import pathlib
import platform
import shutil
import subprocess
import sys
import tempfile

# Set before a backend starts, and inherited by the programs that a test starts: compilers take a fifth of the time that they take at
# LLVM's first level. LLVM does not optimize, and a module is not split for threads. jaxlib 0.10 emits fusions without MLIR, which may
# change the memory of a program by a few hundred bytes (`fast_compile_options`). Without AVX2 there is no fused multiply-add: with it,
# two programs that compute the same expressions differed in their last bits. `make test-slow` compiles with the options that users have.
FLAGS = ["--xla_backend_optimization_level=0", "--xla_cpu_parallel_codegen_split_count=1"]
if importlib.metadata.version("jaxlib").startswith("0.10."):  # later ones do not know the option
    FLAGS.append("--xla_cpu_use_fusion_emitters=false")
if platform.machine() in ("x86_64", "AMD64"):
    FLAGS.append("--xla_cpu_max_isa=AVX")
os.environ.setdefault("XLA_FLAGS", " ".join(FLAGS))

# Every worker, with the programs that its tests start, keeps what XLA compiles in a folder of its own: it saves a quarter of
# the suite's time. Not one folder for all: JAX writes an entry in place, and another worker can read half of it.
if "STATETX_TESTS_CACHE" not in os.environ and "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    os.environ["STATETX_TESTS_CACHE"] = tempfile.mkdtemp(prefix="statetx-tests-")
    atexit.register(shutil.rmtree, os.environ["STATETX_TESTS_CACHE"], ignore_errors=True)
if "STATETX_TESTS_CACHE" in os.environ:
    worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = os.path.join(os.environ["STATETX_TESTS_CACHE"], worker)
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

# Plans are made, not read, and the user's own cache stays unchanged. Tests of the cache set a folder.
os.environ["STATETX_CACHE"] = ""
os.environ["COLUMNS"] = "160"  # reports are as wide as the terminal that the tests run in, else

import jax  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_num_cpu_devices", 8)  # before any array is made: backends read it when they start
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_collection(session):
    """Type-check edited jaxprs, and load every public class, so that its doctests are found in the module `statetx`."""
    import statetx
    from statetx import _jax

    _jax.check_edits()
    for name in statetx.__all__:
        getattr(statetx, name)


# `make smoke` runs all of some files, and one case of each test of others, so that each law runs once.
SMOKE = "atomic compat control_flow functionalize grad optimizer package paths placement remat scan state vmap wrapped_functions".split()
SMOKE_ONCE = "behaviors carry effects_table flops jit laws nnx policies ref residuals shard_map".split()


def pytest_collection_modifyitems(items):
    seen = set()
    for item in items:
        name = item.path.stem.removeprefix("test_")
        kind = item.callspec.params.get("dialect") if hasattr(item, "callspec") else None
        case = (name, item.name.partition("[")[0], getattr(kind, "name", ""))
        is_first = case not in seen and not item.get_closest_marker("slow")
        if name in SMOKE or (name in SMOKE_ONCE and is_first):
            item.add_marker("smoke")
        if is_first:
            seen.add(case)


SETTINGS = {}


def pytest_collection_finish(session):
    """Note JAX's settings. Exclude half a million objects of the libraries and of pytest from every garbage collection."""
    SETTINGS.update(jax.config.values)
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)  # after the fixtures of the file have ended
def pytest_runtest_teardown(item, nextitem):
    """After a file, forget compiled programs if they fill memory: four processes of the suite fit in 16 GiB.

    What the file leaves in caches is excluded from later garbage collections: each would take half a second.
    A file that leaves another setting of JAX fails: later tests of this process would see it.
    """
    if nextitem is None or nextitem.path != item.path:
        restore_settings(item.path.name)
    if nextitem is not None and nextitem.path != item.path:
        if resident_bytes() > 2 << 30:
            jax.clear_caches()
            gc.unfreeze()
        gc.collect()
        gc.freeze()


def restore_settings(file):
    changed = {name: value for name, value in jax.config.values.items() if value != SETTINGS[name]}
    for name in changed:
        jax.config.update(name, SETTINGS[name])
    assert not changed, f"{file} leaves other settings of JAX: {changed}"


def resident_bytes() -> int:
    """Memory of this process, 0 where the system does not tell."""
    status = pathlib.Path("/proc/self/statm")
    return int(status.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if status.exists() else 0


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
