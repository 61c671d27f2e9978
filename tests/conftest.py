"""Settings of every test: eight CPU devices, no silent rank promotion, machine code and searches that take less time."""

import atexit
import gc
import os
import pathlib
import shutil
import tempfile

# Set before a backend starts, and inherited by the programs that a test starts. XLA rewrites as usual, LLVM optimises less:
# a third of the suite's time. `make test-slow` asks for XLA's own level.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=1")

# Workers, and programs that a test starts, share one compilation cache: it saves a quarter of the suite's time.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    folder = tempfile.mkdtemp(prefix="statetx-tests-")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = folder
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)

import jax  # noqa: E402

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
SMOKE_ONCE = "behaviours carry effects_table flops jit laws nnx policies ref residuals shard_map".split()


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


def pytest_collection_finish(session):
    """Exclude half a million objects of the libraries and of pytest from every garbage collection."""
    gc.collect()
    gc.freeze()


def pytest_runtest_teardown(item, nextitem):
    """After a file, forget compiled programs if they fill memory: four processes of the suite fit in 16 GiB."""
    if nextitem is not None and nextitem.path != item.path and resident_bytes() > 2 << 30:
        jax.clear_caches()
        gc.collect()


def resident_bytes() -> int:
    """Memory of this process, 0 where the system does not tell."""
    status = pathlib.Path("/proc/self/statm")
    return int(status.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if status.exists() else 0
