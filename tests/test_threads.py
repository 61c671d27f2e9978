"""Threads, generators, callbacks and finalizers: a state that a call holds is refused elsewhere, and leaks nothing."""

import concurrent.futures
import contextlib
import gc
import os
import random
import subprocess
import sys
import threading
import time
import weakref

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from libraries import Variable

import statetx
from helpers import Counted, assert_close, in_thread
from statetx import _frames, _jax, _states, policies
from statetx.kinds import nnx as nnx_kind
from statetx.kinds.brainstate import observe

KINDS = {
    "statetx.State": statetx.State,
    "brainstate.State": brainstate.ShortTermState,
    "brainstate.ParamState": brainstate.ParamState,
    "nnx.Variable": Variable,
}
MAKE = pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)


@pytest.fixture(autouse=True)
def _nothing_is_held_afterwards():
    with jax.numpy_rank_promotion("allow"):  # brainstate's random states need it
        yield
    assert _frames.current_frame() is None and not observe.owners and not nnx_kind._owner


@contextlib.contextmanager
def switching_often():
    """Have Python change threads as often as it can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)


def is_concrete(x):
    return not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(x))


# -- states of another thread ----------------------------------------------------------------------------------

HOLD = {
    "jit": lambda f: statetx.jit(f)(2.0),
    "grad": lambda f: statetx.grad(f)(2.0),
    "grad(remat)": lambda f: statetx.grad(statetx.remat(f))(2.0),
    "scan": lambda f: statetx.scan(lambda c, x: (c, f(x)), 0, jnp.full(1, 2.0)),
    "vmap(grad)": lambda f: statetx.vmap(lambda x: statetx.grad(lambda y: f(y) * x)(2.0))(jnp.ones(2)),
}


@MAKE
@pytest.mark.parametrize("hold", HOLD)
def test_state_traced_by_another_thread_raises(make, hold):
    s = make(jnp.ones(()))
    program, setter = statetx.jit(lambda x: s.value * x), statetx.jit(lambda x: setattr(s, "value", x))
    assert float(program(1.0)) == 1.0
    setter(jnp.ones(()))
    touches = {
        "read": lambda: s.value,
        "write": lambda: setattr(s, "value", jnp.zeros(())),
        "trace": lambda: statetx.grad(lambda x: s.value * x)(1.0),
        "trace a write": lambda: statetx.grad(lambda x: setattr(s, "value", x) or x)(1.0),
        "compiled read": lambda: program(1.0),
        "compiled write": lambda: setter(jnp.zeros(())),
    }
    if isinstance(s, brainstate.State):
        touches["restore"] = lambda: s.restore_value(jnp.zeros(()))
        touches["brainstate.jit"] = lambda: brainstate.transform.jit(lambda: setattr(s, "value", jnp.zeros(())))()
    if not isinstance(s, nnx.Variable):
        touches["brainstate.grad"] = lambda: brainstate.transform.grad(lambda x: s.value * x, argnums=0)(1.0)
    messages = {}

    def elsewhere():
        for name, touch in touches.items():
            with pytest.raises(statetx.ForeignStateError) as e:
                touch()
            messages[name] = str(e.value)

    def f(x):
        s.value = s.value * x
        in_thread(elsewhere)
        return s.value

    HOLD[hold](f)
    assert messages.keys() == touches.keys()
    for m in messages.values():
        assert type(s).__name__ in m and "(f32[], made at" in m and "another thread is running" in m and "Fix" in m
    assert float(s.value) == 2.0 and float(program(1.0)) == 2.0


@MAKE
def test_unowned_states_are_usable_while_another_thread_traces(make):
    s, other = make(jnp.ones(())), make(jnp.ones(()))

    def elsewhere():
        other.value = other.value + 1
        statetx.grad(lambda x: setattr(other, "value", other.value * x) or x)(3.0)
        assert float(statetx.jit(lambda: other.value)()) == 6.0

    def f(x):
        s.value = s.value * x
        in_thread(elsewhere)
        return s.value

    statetx.grad(f)(2.0)
    assert float(s.value) == 2.0 and float(other.value) == 6.0


@MAKE
def test_state_is_owned_until_its_value_is_restored(make, monkeypatch):
    s = make(jnp.ones(()))
    seen = []

    def look():
        try:
            seen.append(s.value)
        except statetx.ForeignStateError:
            seen.append(None)

    collect = _frames.Frame._collect
    monkeypatch.setattr(_frames.Frame, "_collect", lambda frame: in_thread(look) or collect(frame))
    statetx.grad(lambda x: setattr(s, "value", s.value * x) or x)(2.0)
    assert seen == [None]  # else the other thread would have got the tracer of a call that is closing


def test_brainstates_default_random_state_is_shared_by_threads():
    def f(x):
        x = x * brainstate.random.rand()
        with pytest.raises(statetx.ForeignStateError, match="RandomState"):
            in_thread(brainstate.random.rand)
        return x

    statetx.grad(f)(1.0)
    assert is_concrete(brainstate.random.DEFAULT.value)


def test_state_under_a_brainstate_program_raises_in_another_thread():
    s = statetx.State(jnp.ones(()))
    program = brainstate.transform.jit(lambda x: s.value * x)
    program(1.0)

    def f(x):
        s.value = s.value * x
        with pytest.raises(statetx.ForeignStateError, match="another thread is running"):
            in_thread(lambda: program(1.0))
        return s.value

    statetx.grad(f)(2.0)
    assert float(program(1.0)) == 2.0


# -- at any moment ---------------------------------------------------------------------------------------------


@pytest.mark.sample
@MAKE
@pytest.mark.parametrize("act", ["read", "write", "compiled read", "compiled write", "trace"])
def test_another_thread_never_reads_a_tracer(make, act):
    s = make(jnp.ones(3))
    program, setter = statetx.jit(lambda x: s.value * x), statetx.jit(lambda x: setattr(s, "value", x))
    program(1.0)
    setter(jnp.ones(3))
    touch = {
        "read": lambda: s.value,
        "write": lambda: setattr(s, "value", np.ones(3, np.float32)),
        "compiled read": lambda: program(1.0),
        "compiled write": lambda: setter(jnp.ones(3)),
        "trace": lambda: statetx.grad(lambda x: (s.value * x).sum())(1.0),
    }[act]
    stop, counts = threading.Event(), {"refused": 0, "done": 0, "here": 0}

    def elsewhere():
        pauses = random.Random(0)
        while not stop.is_set():
            try:
                assert is_concrete(touch())
                counts["done"] += 1
            except statetx.ForeignStateError:
                counts["refused"] += 1
            time.sleep(pauses.choice([0, 1e-4, 1e-3, 1e-2]))  # else it may write during every call of the other thread

    def body(x):
        s.value = held = s.value * x
        assert all(s.value is held for _ in range(30))  # nobody else writes it either
        return held.sum()

    def here():
        step, rounds = statetx.grad(body), 0
        try:
            # However busy the machine is: until each of the three has happened often enough.
            while min(counts.values()) < 30 and rounds < 50_000:
                rounds += 1
                with contextlib.suppress(statetx.ForeignStateError):
                    step(1.0)
                    counts["here"] += 1
        finally:
            stop.set()

    with switching_often():
        in_thread(here, elsewhere)
    np.testing.assert_array_equal(s.value, np.ones(3))
    assert min(counts.values()) >= 30, counts


@MAKE
def test_transform_of_another_thread_reading_the_value_raises(make):
    s = make(jnp.ones(3))

    def body(x):
        y, kind = (s.value * x).sum(), _states.kind_of(s)
        for touch in (lambda: kind.read(s), lambda: kind.check_free([s])):  # the latter before a program's results
            with concurrent.futures.ThreadPoolExecutor(1) as pool, pytest.raises(statetx.ForeignStateError):
                pool.submit(touch).result()
        return y

    assert statetx.grad(body)(1.0) == 3.0


@MAKE
def test_simultaneous_traces_of_two_threads_raise_in_one(make, monkeypatch):
    s, start, refused, results = make(jnp.ones(())), threading.Barrier(2), threading.Event(), []
    kind = _states.kind_of(s)
    owner = kind.owner
    monkeypatch.setattr(kind, "owner", lambda state: (owner(state), time.sleep(0.05))[0])  # room for the other thread

    def f(x):
        s.value = s.value * x
        assert refused.wait(60)
        return s.value

    def work():
        start.wait()
        try:
            results.append(float(statetx.grad(f)(2.0)))
        except statetx.ForeignStateError:
            results.append("refused")
            refused.set()

    in_thread(work, work)
    assert sorted(results, key=str) == [1.0, "refused"] and float(s.value) == 2.0


def test_state_acquired_by_another_thread_during_a_write(monkeypatch):
    s, held, go = statetx.State(jnp.ones(())), threading.Event(), threading.Event()
    is_eager, threads = _jax.is_eager, []

    def f(x):
        y = s.value * x
        held.set()
        assert go.wait(60) and s.value is not None
        return y

    def after_the_first_look():
        monkeypatch.setattr(_jax, "is_eager", is_eager)
        threads.append(threading.Thread(target=lambda: statetx.grad(f)(2.0)))
        threads[0].start()
        assert held.wait(60)
        return True

    monkeypatch.setattr(_jax, "is_eager", after_the_first_look)
    with pytest.raises(statetx.ForeignStateError):
        s.value = jnp.zeros(())
    go.set()
    threads[0].join()
    assert float(s.value) == 1.0


def model(make, seed):
    """A recurrent model with states of its own, as a training step; and a step that is plain Python on NumPy floats."""
    w, h, n = make(jnp.asarray(0.5 + seed / 10)), make(jnp.zeros(())), make(jnp.zeros((), jnp.int32))

    @statetx.remat
    def cell(x):
        h.value = jnp.tanh(w.value * x + h.value)
        n.value = n.value + 1
        return h.value

    def step(xs):
        loss = lambda: statetx.scan(lambda c, x: (c + cell(x), None), jnp.float32(0), xs)[0]
        value, g = statetx.value_and_grad(loss, wrt=w)()
        w.value = w.value - 0.1 * g
        return value

    return step, (w, h, n)


def reference(seed, xs, steps):
    def loss(w, h):
        total = 0.0
        for x in xs:
            h = jnp.tanh(w * x + h)
            total = total + h
        return total, h

    w, h = jnp.asarray(0.5 + seed / 10), jnp.zeros(())
    for _ in range(steps):
        (value, h), g = jax.value_and_grad(loss, has_aux=True)(w, h)
        w = w - 0.1 * g
    return value, w, h, steps * len(xs)


@pytest.mark.sample
@MAKE
@pytest.mark.parametrize("compiled", [pytest.param(False, marks=pytest.mark.slow), True])
def test_models_trained_concurrently_equal_models_trained_alone(make, compiled):
    xs, steps, results = jnp.array([0.3, -0.5, 0.8]), 6, {}

    def work(seed):
        step, states = model(make, seed)
        step = statetx.jit(step) if compiled else step
        for _ in range(steps):
            value = step(xs)
        results[seed] = (value, *[s.value for s in states])

    with switching_often():
        in_thread(*[lambda seed=seed: work(seed) for seed in range(4)])
    for seed in range(4):
        assert_close(results[seed], reference(seed, xs, steps), rtol=1e-5)


# -- updates that would be lost --------------------------------------------------------------------------------


@MAKE
@pytest.mark.parametrize("second", ["grad", "jit", "write"])
def test_concurrent_update_before_publication_is_not_lost(make, second):
    n, closed, done = make(jnp.zeros(())), threading.Event(), threading.Event()

    def add(x):
        n.value = n.value + x
        return x * 2.0

    seconds = {
        "grad": lambda: statetx.grad(add)(10.0),
        "jit": lambda: statetx.jit(add)(10.0),
        "write": lambda: setattr(n, "value", n.value + 10.0),
    }

    @jax.custom_vjp
    def wait(x):
        return x

    def backward(_, g):  # it runs when the frame of the call is closed, and before its writes are published
        closed.set()
        assert done.wait(60)
        return (g,)

    wait.defvjp(lambda x: (x, None), backward)

    def elsewhere():
        assert closed.wait(60)
        seconds[second]()
        done.set()

    def here():
        with pytest.raises(statetx.ForeignStateError, match=r"written by another thread.*\n.*lock"):
            statetx.grad(lambda x: add(wait(x)))(1.0)

    in_thread(here, elsewhere)
    assert float(n.value) == 10.0


@MAKE
def test_concurrent_update_during_a_compiled_call_is_not_lost(make):
    n, running, done = make(jnp.zeros(())), threading.Event(), threading.Event()
    meet = [False]

    def host(x):
        if meet[0]:
            running.set()
            assert done.wait(60)
        return np.asarray(x)

    @statetx.jit
    def add(x):
        n.value = n.value + jax.pure_callback(host, jax.ShapeDtypeStruct((), jnp.float32), x)

    add(jnp.float32(1.0))
    meet[0] = True

    def elsewhere():
        assert running.wait(60)
        n.value = jnp.asarray(100.0)
        done.set()

    def here():
        with pytest.raises(statetx.ForeignStateError, match="written by another thread"):
            add(jnp.float32(1.0))
            jax.block_until_ready(n.value)
            running.set()

    # Where the call returns before the program has run, the results are stored at once, and the other write comes
    # later.
    try:
        in_thread(here, elsewhere)
    except pytest.fail.Exception:
        assert float(n.value) == 100.0
    assert float(n.value) == 100.0


@MAKE
def test_unlocked_shared_state_loses_no_update(make):
    n, counted = make(jnp.zeros((), jnp.int32)), []

    def body(x):
        n.value = n.value + 1
        return x * 2.0

    def work():
        succeeded = 0
        while succeeded < 3:
            with contextlib.suppress(statetx.ForeignStateError):
                statetx.grad(body)(1.0)
                counted.append(1)
                succeeded += 1

    with switching_often():
        in_thread(*[work] * 4)
    assert int(n.value) == len(counted) == 12


@MAKE
def test_concurrent_reads_in_eager_remat(make):
    w, both = make(jnp.asarray(2.0)), threading.Barrier(2)

    @statetx.remat
    def f(x):
        y = w.value * x
        both.wait(60)  # each has read it, and neither call has ended
        return y * w.value

    results = []
    in_thread(*[lambda: results.append(float(f(3.0)))] * 2)
    assert results == [12.0, 12.0]


@MAKE
def test_state_written_in_eager_remat_raises_in_another_thread(make):
    s = make(jnp.asarray(2.0))

    def elsewhere():
        for touch in (lambda: s.value, lambda: setattr(s, "value", jnp.zeros(()))):
            with pytest.raises(statetx.ForeignStateError, match="remat"):
                touch()

    @statetx.remat
    def f(x):
        s.value = s.value * x
        in_thread(elsewhere)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        f(3.0)
    assert float(s.value) == 2.0


@MAKE
@pytest.mark.parametrize("make_value", [jnp.float32, lambda x: {"x": jnp.float32(x)}], ids=["array", "dict"])
@pytest.mark.parametrize("wrap", [lambda f: f, statetx.remat], ids=["", "nested"])
def test_update_between_read_and_write_in_eager_remat_is_not_lost(make, make_value, wrap):
    s = make(make_value(1.0))

    @wrap
    @statetx.remat
    def step(meanwhile):
        held = s.value
        meanwhile()
        s.value = jax.tree.map(lambda x: x * 2.0, held)

    def add():
        in_thread(lambda: setattr(s, "value", make_value(10.0)))

    with pytest.raises(statetx.ForeignStateError, match=r"(?s)was written by another thread.*Fix: guard") as e:
        step(add)
    assert type(s).__name__ in str(e.value)
    assert jax.tree.leaves(s.value) == [10.0]
    step(lambda: None)
    assert jax.tree.leaves(s.value) == [20.0]


@MAKE
def test_state_acquired_during_a_read_in_eager_remat_raises(make, monkeypatch):
    s, held, done, real = make(jnp.ones(())), threading.Event(), threading.Event(), _frames.report_touch

    def body(x):
        y = s.value * x
        held.set()
        assert done.wait(60)
        return y

    def then_acquired(*args, **options):
        real(*args, **options)
        if threading.current_thread() is threading.main_thread():
            other.start()
            assert held.wait(60)

    other = threading.Thread(target=lambda: statetx.grad(body)(1.0))
    for module in (_frames, _frames.threads):
        monkeypatch.setattr(module, "report_touch", then_acquired)
    if isinstance(s, brainstate.State):  # its report is of another name
        touch = _frames.Frame.touch
        monkeypatch.setattr(_frames.Frame, "touch", lambda *a, **k: (touch(*a, **k), then_acquired())[0])
        real = lambda: None
    try:
        with pytest.raises(statetx.ForeignStateError, match="another thread is running"):
            statetx.remat(lambda: s.value)()
    finally:
        done.set()
        other.join(60)
    assert float(s.value) == 1.0


# -- one compiled function -------------------------------------------------------------------------------------


@MAKE
def test_concurrent_first_calls_are_staged_once(make):
    w = make(jnp.asarray(2.0))
    start, results = threading.Barrier(4), {}

    def body(x):
        first = w.value
        time.sleep(0.05)  # the others arrive while this one is tracing
        return first * x

    body = Counted(body)
    f = statetx.jit(body)

    def work(i):
        start.wait()
        results[i] = [float(f(float(i))) for _ in range(20)]

    in_thread(*[lambda i=i: work(i) for i in range(4)])
    assert body.runs == 1 and results == {i: [2.0 * i] * 20 for i in range(4)}


@MAKE
def test_compiled_call_waits_while_its_function_is_staged_for_another_type(make):
    s, go, arrived, results = make(jnp.asarray(2.0)), threading.Event(), threading.Event(), []

    def body(x):
        y = s.value * x.sum()
        if x.ndim:
            s.value = s.value * 1.0
            arrived.set()
            assert go.wait(60)
        return y

    f = statetx.jit(body)
    f(jnp.ones(()))

    def other():
        arrived.wait(60)
        threading.Timer(0.2, go.set).start()
        results.append((float(f(jnp.asarray(5.0))), go.is_set()))

    in_thread(lambda: f(jnp.ones(3)), other)
    assert results == [(10.0, True)] and float(s.value) == 2.0


def test_mutually_recursive_functions_do_not_deadlock():
    start = threading.Barrier(2)

    def outer(x, inner):
        start.wait(60)
        return inner(x) + 1

    f = statetx.jit(lambda x, how: outer(x, g) if how == "outer" else x * 2)
    g = statetx.jit(lambda x, how="inner": outer(x, lambda y: f(y, "inner")) if how == "outer" else x * 3)
    results = {}
    in_thread(
        lambda: results.update(f=float(f(1.0, "outer"))),
        lambda: results.update(g=float(g(1.0, "outer"))),
    )
    assert results == {"f": 4.0, "g": 3.0}


def test_function_called_with_many_types_by_many_threads():
    body = Counted(lambda x, k: (w.value * x).sum() * k)
    w = statetx.Param(jnp.asarray(2.0))
    f = statetx.jit(body, static_argnums=1)
    sizes, flags = range(1, 6), range(3)

    def work(i):
        order = np.random.default_rng(i).permutation([(n, k) for n in sizes for k in flags])
        for n, k in np.concatenate([order, order]):
            assert float(f(jnp.ones(int(n)), int(k))) == 2.0 * n * k

    with switching_often():
        in_thread(*[lambda i=i: work(i) for i in range(4)])
    assert body.runs == len(sizes) * len(flags)


@MAKE
def test_compiled_function_with_a_model_for_each_thread(make):
    @statetx.jit
    def add(s, x):
        s.value = s.value + x
        return s.value

    results = {}

    def work(i):
        s = make(jnp.zeros(()))
        for _ in range(30):
            out = add(s, float(i))
        results[i] = (float(out), float(s.value))

    with switching_often():
        in_thread(*[lambda i=i: work(i) for i in range(4)])
    assert results == {i: (30.0 * i, 30.0 * i) for i in range(4)}


# -- generators, timers and callbacks --------------------------------------------------------------------------


@MAKE
def test_generator_that_outlives_its_call(make):
    s, kept = make(jnp.ones(())), []

    def values():
        while True:
            given = yield s.value
            if given is not None:
                s.value = given

    def f(x):
        g = values()
        kept.append(g)  # found in the closure by the search for states, and left alone
        before, _, now = next(g), setattr(s, "value", s.value * x), next(g)
        assert now is s.value and now is not before and not is_concrete(now)
        return now

    for i, wrap in enumerate((statetx.grad, statetx.jit, lambda f: statetx.grad(statetx.remat(f))), start=1):
        wrap(f)(2.0)
        assert float(next(kept[-1])) == 2.0**i  # the state's present value
    kept[0].send(jnp.asarray(5.0))
    assert float(s.value) == 5.0
    with pytest.raises(Exception, match="tracer|trace level|is tracing"):  # each library's own error
        jax.grad(lambda x: kept[0].send(x))(1.0)  # a generator does not bypass the rule
    assert float(s.value) == 5.0


@MAKE
def test_generator_that_traces_between_its_steps(make):
    s = make(jnp.ones(()))

    def steps(x):
        while True:
            yield float(statetx.grad(lambda y: setattr(s, "value", s.value * y) or s.value)(x))

    a, b = steps(2.0), steps(3.0)  # each is suspended while the other runs
    assert [next(a), next(b), next(a), next(b)] == [1.0, 2.0, 6.0, 12.0]
    a.close()
    assert float(s.value) == 36.0


@MAKE
def test_timer_started_in_a_call(make):
    s, returned, done, seen = make(jnp.ones(())), threading.Event(), threading.Event(), []

    def later():
        assert returned.wait(60)
        s.value = s.value + 1
        seen.append(s.value)
        done.set()

    def f(x):
        s.value = s.value * x
        f.timer = threading.Timer(0.0, later)
        f.timer.start()
        return s.value

    statetx.grad(f)(2.0)
    returned.set()
    assert done.wait(60)
    f.timer.join()
    assert float(s.value) == 3.0 and is_concrete(seen)


@MAKE
@pytest.mark.parametrize("callback", ["debug.callback", "pure_callback"])
def test_callback_that_reads_a_state(make, callback):
    s, seen = make(jnp.asarray(3.0)), []

    def host(x):
        seen.append(s.value)
        return np.asarray(x)

    def f(x):
        s.value = s.value * 2
        if callback == "debug.callback":
            jax.debug.callback(host, x)
            return x * s.value
        return jax.pure_callback(host, jax.ShapeDtypeStruct((), jnp.float32), x) * s.value

    f = statetx.jit(f)
    for i in range(1, 4):
        f(1.0)
        jax.effects_barrier()
        assert float(s.value) == 3.0 * 2**i
    # Compiled programs run outside the call's frame: the state has its former value, or already the written one.
    assert len(seen) == 3 and is_concrete(seen)
    assert all(float(v) in (3.0 * 2**i, 6.0 * 2**i) for i, v in enumerate(seen))


@MAKE
def test_callback_touching_a_state_of_the_enclosing_call(make):
    s = make(jnp.asarray(3.0))
    refused = []

    def read():
        with pytest.raises(statetx.ForeignStateError):
            _ = s.value
        refused.append(True)

    def host(x):
        in_thread(read)  # JAX runs callbacks in whatever thread it likes, on a CPU also in this one
        return x

    def f(x):
        s.value = s.value * x
        y = jax.jit(lambda z: jax.pure_callback(host, jax.ShapeDtypeStruct((), jnp.float32), z))(jnp.float32(1.0))
        return s.value * y

    statetx.grad(f)(2.0)
    assert float(s.value) == 6.0 and refused


@MAKE
@pytest.mark.parametrize("wrap", [statetx.grad, statetx.jit], ids=["grad", "jit"])
def test_finalizer_that_writes_a_state_while_a_call_is_open(make, wrap):
    s, total = make(jnp.ones(())), make(jnp.zeros(()))

    class Token:
        pass

    def f(x):
        token = Token()
        weakref.finalize(token, lambda: setattr(total, "value", total.value + s.value))
        s.value = s.value * x
        del token
        gc.collect()
        return s.value

    wrap(f)(2.0)
    assert float(s.value) == 2.0 and float(total.value) == 2.0  # as if the body had written it
    kept = [Token()]
    weakref.finalize(kept[0], lambda: setattr(total, "value", total.value + s.value))
    wrap(lambda x: x * 2.0)(1.0)
    kept.clear()
    assert float(total.value) == 4.0


def test_trace_stack_of_brainstate_left_open_by_a_generator():
    s = statetx.State(jnp.ones(()))

    def suspended():
        with brainstate.StateTraceStack():
            s.value = s.value + 1
            yield

    g = suspended()
    next(g)
    with pytest.raises(statetx.ForeignStateError, match="another thread"):
        in_thread(lambda: s.value)
    g.close()
    assert s._owner is None and float(s.value) == 2.0


FORKED = """
import os, signal, threading, jax.numpy as jnp, statetx
from statetx import _frames
s, ready, done = statetx.State(jnp.float32(1.0)), [threading.Event(), threading.Event()], threading.Event()

def hold(lock=_frames.ownership):
    with lock:
        ready[0].set()
        done.wait()

def trace(x):
    s.value = s.value * x
    ready[1].set()
    done.wait()
    return s.value

threads = [threading.Thread(target=hold), threading.Thread(target=lambda: statetx.grad(trace)(2.0))]
threads[1].start(), ready[1].wait(), threads[0].start(), ready[0].wait()
pid = os.fork()
if pid == 0:
    signal.alarm(30)
    held = s.value
    statetx.remat(lambda: setattr(s, "value", {"was": s.value}))()
    os._exit(0 if type(held) is type(jnp.zeros(())) and s.value["was"] is held else 1)
status = os.waitpid(pid, 0)[1]
done.set()
[t.join() for t in threads]
assert float(s.value) == 2.0
print("child:", os.waitstatus_to_exitcode(status))
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
def test_child_of_a_fork_uses_states_that_other_threads_held():
    run = [sys.executable, "-W", "ignore:os.fork:RuntimeWarning", "-c", FORKED]
    out = subprocess.run(run, capture_output=True, text=True, timeout=120)
    assert out.stdout == "child: 0\n", out


@MAKE
def test_compiled_function_that_writes_a_shared_state_under_a_lock(make):
    s, lock = make(jnp.zeros(())), threading.Lock()

    @statetx.jit
    def add(x):
        s.value = s.value + x

    def work():
        for _ in range(50):
            with lock:
                add(1.0)

    with switching_often():
        in_thread(work, work, work)
    assert float(s.value) == 150.0


@jax.tree_util.register_pytree_node_class
class Slow:
    """Another thread runs whenever one of these is made."""

    meanwhile: list = []

    def __init__(self, x):
        self.x = x
        while self.meanwhile:
            in_thread(self.meanwhile.pop())

    def tree_flatten(self):
        return [self.x], None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


def test_two_threads_that_store_the_results_of_one_program():
    """Each has records of its own: the second would have stored what was left of the first one's."""
    first, second = statetx.State([jnp.zeros(())]), statetx.State(Slow(jnp.zeros(())))

    @statetx.jit
    def add(x):
        first.value, second.value = [first.value[0] + x], Slow(second.value.x + x)

    def work():
        add(1.0)
        Slow.meanwhile.append(lambda: add(10.0))
        with pytest.raises(statetx.ForeignStateError, match="written by another thread"):
            add(100.0)

    in_thread(work)
    assert float(first.value[0]) == float(second.value.x) == 11.0


def test_frame_for_a_transform_of_brainstate_has_what_others_ask_of_frames():
    """Rules of derivatives and reads of states walk over the frames around them, whichever library has opened them."""
    frame, found = _frames.Frame("f"), []
    brainstate.transform.jit(lambda: found.append(_frames.current_frame()))()
    (bridge,) = found
    # Asked by the transform that has made it.
    of_the_call = {"on_read", "allow", "frees_cycles", "at_end", "outer_trace", "effects"}
    missing = {name for name in vars(frame) if not name.startswith("_") and not hasattr(bridge, name)}
    assert type(bridge) is not _frames.Frame and missing == of_the_call


@MAKE
def test_child_of_a_fork_has_the_states_that_another_thread_held(make):
    """As in the child, which lacks that thread: what the fork calls there runs here."""
    state, held, go_on = make(jnp.float32(2.0)), threading.Event(), threading.Event()

    def fun(x):
        y = state.value * x
        held.set()
        go_on.wait(20)
        return y

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        pool.submit(statetx.jit(fun), 1.0)
        assert held.wait(20)
        try:
            with pytest.raises(statetx.ForeignStateError):
                _ = state.value
            frames = [*_frames.frame.open_frames.values()]
            _frames.frame._release_lost_frames()
            assert state.value == 2.0 and not any(frame.is_open for frame in frames)
        finally:
            go_on.set()


def test_a_derivative_rule_waits_for_another_thread():
    """While `remat` looks for the values that its policy names, it runs the rules."""
    policy, finished = policies.primitives("sin"), []

    @jax.custom_jvp
    def sine(x):
        return jnp.sin(x)

    @sine.defjvp
    def _(primals, tangents):
        thread = threading.Thread(
            target=statetx.grad(statetx.remat(lambda x: jnp.cos(jnp.sin(x)), policy=policy)), args=(1.0,)
        )
        thread.start()
        thread.join(timeout=5)
        finished.append(not thread.is_alive())
        return sine(*primals), jnp.cos(*primals) * tangents[0]

    statetx.grad(statetx.remat(lambda x: jnp.cos(jnp.sin(sine(x))), policy=policy))(1.0)
    assert finished and all(finished)
