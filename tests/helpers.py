"""Counters of runs and compilations, threads, comparisons, programs as the planner reads them, and features of the
installed JAX.
"""

import contextlib
import importlib
import pathlib
import sys
import threading

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
import numpy as np
import pytest

import statetx
from statetx import _frames
from statetx._jax import check_edits as check_edits
from statetx._jax import marks
from statetx._lift.outcome import Outcome
from statetx._loops.rows import SlotMemory
from statetx._remat.stored import StoredType
from statetx.planner._treatments.inner_gradients import PLAIN as PLAIN
from statetx.planner._treatments.inner_gradients import VARIANTS as VARIANTS
from statetx.planner._treatments.inner_gradients import InnerGradients

REMAT3 = getattr(jax.config, "jax_remat3", False)  # not every JAX has it
ENABLE_CHECKS = jax.config.jax_enable_checks

transforms_of_brainstate = pytest.mark.skipif(
    ENABLE_CHECKS,
    reason="JAX_ENABLE_CHECKS: brainstate.transform.jit of a function that reads a state fails, also without statetx",
)


class Counted:
    """A function that counts the runs of its Python body."""

    def __init__(self, fun):
        self.fun = fun
        self.runs = 0

    def __call__(self, *args, **kwargs):
        self.runs += 1
        return self.fun(*args, **kwargs)


@contextlib.contextmanager
def compilations():
    """A list that receives the event of each program that XLA compiles in the block."""
    events = []

    def listener(event, duration, **kwargs):
        if event == "/jax/core/compile/backend_compile_duration":
            events.append(kwargs.get("fun_name", event))

    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
        yield events
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)


@contextlib.contextmanager
def carries_only():
    """A block in which the slots of loops hold carries, and no residuals."""
    from statetx._loops import checkpointed

    with pytest.MonkeyPatch.context() as patch:
        statetx.clear_cache()
        patch.setattr(checkpointed, "WORTH_MIXING", 0)
        yield
    statetx.clear_cache()


@contextlib.contextmanager
def benchmark(name):
    """A module of benchmarks, whose folder has modules with the names of others, as that of the examples has."""
    folder, path = pathlib.Path(__file__).parents[1] / "benchmarks", list(sys.path)
    names = {file.stem for file in folder.glob("*.py")}
    others = {name: sys.modules.pop(name) for name in names & set(sys.modules)}
    sys.path.insert(0, str(folder))
    try:
        yield importlib.import_module(name)
    finally:
        sys.path[:] = path
        for name in names & set(sys.modules):
            del sys.modules[name]
        sys.modules.update(others)


def in_thread(*functions):
    """Run each function in its own thread; re-raise an exception of one of them."""
    errors = []

    def run(fun):
        try:
            fun()
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=run, args=(f,)) for f in functions]
    for t in threads:
        t.start()
    for t in threads:
        t.join(120)
        assert not t.is_alive()
    if errors:
        raise errors[0]


def open_frames():
    """What still collects accesses of states, in this thread or another, in words."""
    return "a frame is open" if _frames.open_frames or _frames.current_frame() is not None else ""


def assert_no_frame_is_open(where=""):
    assert not open_frames(), where


def names_read(monkeypatch):
    """The names of what gradients read in the programs staged since: "bits", "residuals in slots"."""
    names = set()
    divide, write, keep = marks._divide, SlotMemory.write, SlotMemory.keep

    def noted_divide(*args):
        equations = divide(*args)
        if getattr(equations[0], "primitive", None) is marks.attach_primitive:
            names.add(f"{equations[1].params['type']}")
        return equations

    def noted_write(self, *args):
        names.update(str(row.format) for row in self._rows if row.format is not None)
        return write(self, *args)

    def noted_keep(self, *args):
        if any(self._residual_rows):
            names.add("residuals in slots")
        return keep(self, *args)

    rules = marks._pe.partial_eval_jaxpr_custom_rules
    monkeypatch.setitem(rules, marks.stored_primitive, noted_divide)
    monkeypatch.setattr(SlotMemory, "write", noted_write)
    monkeypatch.setattr(SlotMemory, "keep", noted_keep)
    # The checker of JAX 0.10 raises at a `closed_call` with a name.
    checks = check_edits(False)
    yield names
    check_edits(checks)


def equations(jaxpr):
    """All equations of a jaxpr, those of jaxprs inside too."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jex_core.jaxprs_in_params(eqn.params):
            yield from equations(getattr(inner, "jaxpr", inner))


def num_operations(jaxpr):
    """As plans and reports count them."""
    from statetx._equations.primitives import count

    return count(jaxpr)


def temp_bytes(fun, *args):
    """Temporary bytes of the jitted function."""
    return jax.jit(fun).lower(*args).compile().memory_analysis().temp_size_in_bytes


def assert_close(actual, expected, rtol=1e-5, atol=0.0, **options):
    """Trees of one structure are equal up to rounding."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol, atol, **options), actual, expected)


def assert_near(found, expected, rtol=1e-5):
    """Trees of arrays are equal up to a fraction of their entries and of the largest of each array."""
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * float(jnp.abs(b).max()))


def assert_same_gradients(planned, plain, *args, rtol=1e-5):
    assert_near(planned(*args), plain(*args), rtol)


def staged(fun, *args):
    """The equations of a function as the planner reads them."""
    from statetx._equations.structure import Body
    from statetx.planner._program.flat import flatten

    jaxpr = jax.make_jaxpr(fun)(*args)
    return flatten(Body.close(jaxpr.jaxpr, jaxpr.consts).jaxpr)


def captured(fun, *args, argnums=None):
    """What a plan is made of: the gradients of a training step, or of a loss."""
    from statetx.planner._search.capture import capture

    return capture(fun, args, {}, argnums)


def flat(fun, *args):
    from statetx.planner._program.flat import Flat

    return Flat(staged(fun, *args))


def in_turn(cases, num=2):
    """Cases for `parametrize`; the fast suite runs one in `num`."""
    cases = [
        case if hasattr(case, "marks") else pytest.param(*(case if isinstance(case, tuple) else (case,)))
        for case in cases
    ]
    return [
        case if n % num == 0 else case._replace(marks=[*case.marks, pytest.mark.slow]) for n, case in enumerate(cases)
    ]


class Words(StoredType):
    """Floats as the bytes that they consist of: exact for all, so that every law holds of what is stored so."""

    def shrinks(self, aval):
        return jnp.issubdtype(aval.dtype, jnp.floating)

    def stored_type(self, aval):
        return jax.ShapeDtypeStruct((*aval.shape, aval.dtype.itemsize), jnp.uint8)

    def encode(self, x):
        return jax.lax.bitcast_convert_type(x, jnp.uint8)

    def decode(self, stored, aval):
        return jax.lax.bitcast_convert_type(stored, aval.dtype)


WORDS = Words("words")


def inner_gradients(variant):
    """A policy that leaves a function unchanged, but for the gradients that it takes: one of `VARIANTS`."""

    class Only(InnerGradients):
        def __init__(self):
            super().__init__(PLAIN)
            object.__setattr__(self, "inner", InnerGradients(variant))

        def rewrite(self, body, name, num_out):
            return body

    return Only()


def rewritten(rewriter, fun, *args):
    """A function of arrays as a rewriter of plans leaves it."""
    from statetx._equations.structure import Body

    jaxpr = jax.make_jaxpr(fun)(*args)
    run = rewriter.rewrite(Body.close(jaxpr.jaxpr, jaxpr.consts), "fun", 1)
    return lambda *args: run([], *args)


def publish_all_but_one(self, leaves, *, live=True, publish=Outcome.publish):
    """In place of `Outcome.publish`: the last effect of a call is lost."""
    num = len(self.effects) - 1
    if num >= 0:
        self.effects, self.values = self.effects[:num], self.values[:num]
        publish(self, leaves, live=live)


def undo_the_owner_only(access):
    """In place of `Access.undo`: states keep what a call left in them."""
    return [access.kind.set_owner(access.state, access.previous_owner)] if access.acquired else []


def decided(saved=None, *, loop=None, fenced=False, carries=(), stored=(), inputs=(), copies=False):
    """A decision of a plan: addresses that are saved; those of `stored`, inputs and leaves of carries with names of
    stored types.
    """
    from statetx.planner._program.values import INPUT, KEEP, InFormat
    from statetx.planner._treatments.copies import Copies
    from statetx.planner._treatments.loops import CheckpointedLoop
    from statetx.planner._treatments.treatment import Decision

    in_formats = lambda pairs: tuple((at, InFormat(name)) for at, name in pairs)
    in_fewer_bits = in_formats([*stored, *(((INPUT, i), name) for i, name in inputs)])
    ways = None if saved is None else dict.fromkeys(saved, KEEP) | dict(in_fewer_bits)
    treatments = [Copies()] if copies else []
    treatments += [] if loop is None else [CheckpointedLoop(loop, in_formats(carries), fenced)]
    return Decision(None if ways is None else frozenset(ways.items()), tuple(treatments))


def in_force():
    """The settings of `statetx.budget` and `statetx.target` in this thread."""
    from statetx._remat.override import override
    from statetx._targets import current

    return repr(override.rewriter), current._context.value


def forget_what_is_registered(monkeypatch):
    """At the end of a test, forget the kinds of states and the strategies that it registers."""
    from statetx import _hooks, _states
    from statetx._loops import strategy

    for library in _hooks.foreign_kinds:  # a kind that the test is the first to load would be forgotten as well
        with contextlib.suppress(ImportError):
            importlib.import_module(library)
    _states.kinds()
    monkeypatch.setattr(_states, "_kinds", list(_states._kinds))
    monkeypatch.setattr(strategy, "_RECORDED", dict(strategy._RECORDED))


def assert_nothing_is_overridden():
    """No plan or inspection rewrites, visits or observes regions in this thread."""
    from statetx._remat.override import override

    assert override.visited_regions is None and override.rewriter is None and override.observer is None


def locks_of_statetx():
    """The locks that calls of different threads share."""
    from statetx import _states
    from statetx._equations.structure import table

    return [_frames.ownership, _states._kinds_lock, table._lock]
