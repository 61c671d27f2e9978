"""States that a jitted function creates in its calls: two stagings at most, with the same values as in plain Python."""

import functools
import gc
import random
import threading
import types
import weakref
from types import SimpleNamespace

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from libraries import VALUED

import statetx
from helpers import compilations, in_thread

KINDS = {name: VALUED[name] for name in ("statetx", "brainstate", "nnx")}
each_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


class Box:
    pass


@each_kind
def test_second_staging_is_said_once(kind, caplog):
    box = SimpleNamespace()

    @statetx.jit
    def step(x):
        box.h = kind(x + 1.0)
        return box.h.value.sum()

    @statetx.jit
    def plain(x):
        return x

    for x in (1.0, 2.0, 3.0, jnp.ones(2), jnp.ones(2)):
        step(x), plain(x)
    (said,) = [r.getMessage() for r in caplog.records if r.name == "statetx"]
    assert "step) is traced, and may be compiled, a second time" in said
    assert f"its first call created {kind.__name__} (at {__file__}:" in said


@each_kind
def test_equal_equations_are_compiled_once(kind):
    box = SimpleNamespace()

    def step(x):
        box.h = kind(x + 1.0)
        return jnp.sin(box.h.value)

    f = statetx.jit(step)
    with compilations() as events:
        for n in range(4):
            assert float(f(np.float32(n))) == pytest.approx(np.sin(n + 1))
    assert len(events) == 1


# -- made where there is none ----------------------------------------------------------------------------------


def by_hasattr(box, make):
    if not hasattr(box, "n"):
        box.n = make()
    return box.n


def by_exception(box, make):
    try:
        return box.n
    except AttributeError:
        box.n = make()
        return box.n


def in_dict(box, make):
    states = vars(box).setdefault("states", {})
    if "n" not in states:
        states["n"] = make()
    return states["n"]


def in_list(box, make):
    states = vars(box).setdefault("states", [])
    if not states:
        states.append(make())
    return states[0]


helper = types.ModuleType("a_module_of_helpers")
exec("def find(box, make):\n    if not hasattr(box, 'n'):\n        box.n = make()\n    return box.n", vars(helper))


class Cached(Box):
    make: object

    @functools.cached_property
    def n(self):
        return self.make()


def by_cached_property(box, make):
    box.__class__ = Cached
    box.make = make
    return box.n


def made_first_and_put_there_if_there_is_none(box, make):
    new = make()
    if not hasattr(box, "n"):
        box.n = new
    return box.n


def method_that_replaces_itself(box, make):
    def fill():
        box.n, box.fill = make(), lambda: None

    vars(box).setdefault("fill", fill)()
    return box.n


class Once(Box):
    def __setattr__(self, name, value):
        vars(self).setdefault(name, value)


def by_own_setattr(box, make):
    vars(box).setdefault("once", Once()).n = make()
    return box.once.n


by_box = weakref.WeakKeyDictionary()


def by_a_cache_that_no_walk_sees(box, make):
    by_box.setdefault(box, functools.cache(make))
    return by_box[box]()


LAZY = [by_hasattr, by_exception, in_dict, in_list, helper.find, by_cached_property]
LAZY += [made_first_and_put_there_if_there_is_none, method_that_replaces_itself, by_own_setattr]
LAZY += [by_a_cache_that_no_walk_sees]


@each_kind
@pytest.mark.parametrize("find", LAZY, ids=lambda f: f.__name__)
def test_state_created_lazily_continues(find, kind):
    box, runs = Box(), []

    @statetx.jit
    def step(x):
        runs.append(1)
        n = find(box, lambda: kind(jnp.zeros(())))
        n.value = n.value + x
        return n.value

    assert [float(step(1.0)) for _ in range(4)] == [1.0, 2.0, 3.0, 4.0]
    assert len(runs) == 2


# -- actions of the caller -------------------------------------------------------------------------------------


def holding(kind):
    """A box, and a compiled step that gives it a new state in each call."""
    box = SimpleNamespace()

    @statetx.jit
    def step(x):
        box.h = kind(2 * x)
        return box.h.value

    return box, step


@each_kind
def test_referenced_state_of_a_staged_call_keeps_its_value(kind):
    box, step = holding(kind)
    step(1.0)
    old = box.h
    step(2.0)
    assert float(old.value) == 2.0 and float(box.h.value) == 4.0 and box.h is not old
    kept, _ = box.h, step(3.0)
    assert float(old.value) == 2.0 and float(kept.value) == 6.0 and box.h is kept  # no Python creates another one


@each_kind
def test_state_assigned_by_the_caller_is_replaced(kind):
    box, step = holding(kind)
    step(1.0)
    box.h.value = jnp.float32(7.0)
    assert float(step(2.0)) == 4.0 and float(box.h.value) == 4.0
    box.h = kind(jnp.float32(8.0))
    assert float(step(3.0)) == 6.0 and float(box.h.value) == 6.0
    del box.h
    assert float(step(4.0)) == 8.0 and float(box.h.value) == 8.0


@each_kind
def test_returned_states_are_new_in_each_call_and_compiled_once(kind):
    class Model:
        def __init__(self, x):
            self.w = kind(2 * x)

    make, models = statetx.jit(Model), []
    with compilations() as events:
        models += [make(x) for x in (1.0, 2.0)]
        with pytest.warns(
            statetx.StagingWarning, match=rf"returns {kind.__name__} \(at .*test_created.py:\d+\)"
        ) as caught:
            models += [make(x) for x in (3.0, 4.0, 5.0)]
    assert len(events) == 1
    assert len(caught) == 1 and [float(m.w.value) for m in models] == [2.0, 4.0, 6.0, 8.0, 10.0]
    assert caught[0].filename == __file__


def test_object_that_holds_the_states_may_be_returned():
    cell, runs = Cell(), []

    @statetx.jit
    def step(x):
        runs.append(1)
        brainstate.nn.init_all_states(cell, 2)
        cell.h.value = cell.h.value + x
        return cell

    for x in (1.0, 2.0, 3.0, 4.0):
        assert step(x) is cell
        np.testing.assert_array_equal(cell.h.value, np.full((2, 3), x))
    assert len(runs) == 2


@each_kind
def test_appended_states_are_those_of_two_calls(kind):
    """A list grows when Python runs, as under ``jax.jit``."""
    box, runs = SimpleNamespace(made=[]), []

    @statetx.jit
    def step(x):
        runs.append(1)
        box.made.append(kind(2 * x))
        return x

    for x in (1.0, 2.0, 3.0, 4.0):
        step(x)
    assert len(runs) == 2 and [float(s.value) for s in box.made] == [2.0, 8.0]


def test_unreachable_cycle_is_not_a_reference():
    box, runs = Box(), []

    @statetx.jit
    def step(x):
        learner = Box()  # as an algorithm of braintrace that is compiled in the step
        learner.itself, learner.count = learner, statetx.State(x)
        box.h = statetx.State(learner.count.value * 2)
        runs.append(1)
        return box.h.value

    assert [float(step(x)) for x in (1.0, 2.0, 3.0, 4.0)] == [2.0, 4.0, 6.0, 8.0]
    assert len(runs) <= 2


# -- programs --------------------------------------------------------------------------------------------------


@each_kind
def test_alternating_batch_sizes_are_staged_twice_each(kind):
    box, runs = Box(), []

    @statetx.jit
    def step(xs):
        box.h = kind(jnp.zeros_like(xs))
        box.h.value = box.h.value + xs
        runs.append(1)
        return box.h.value.sum()

    for x in (1.0, 2.0, 3.0):
        for size in (2, 5):
            assert float(step(jnp.full(size, x))) == size * x
            np.testing.assert_array_equal(box.h.value, np.full(size, x))
    assert len(runs) == 4


@each_kind
def test_functions_that_create_and_read_one_state(kind):
    """Each finds the state of the last call in the attribute, of whichever function."""
    box, runs = Box(), []

    def create(scale, x):
        runs.append(1)
        box.learner = Box()
        box.learner.h = kind(scale * x)
        return box.learner.h.value

    def read(x):
        runs.append(1)
        return box.learner.h.value + x

    def count(x):
        runs.append(1)
        box.learner.h.value = box.learner.h.value + x
        return box.learner.h.value

    train, evaluate = (statetx.jit(functools.partial(create, scale)) for scale in (2, 3))
    read, count = statetx.jit(read), statetx.jit(count)
    for n in range(5):
        for x, create, scale in ((n + 1.0, train, 2), (n + 2.0, evaluate, 3), (n + 3.0, evaluate, 3)):
            assert float(create(x)) == scale * x == float(box.learner.h.value)
            assert float(read(1.0)) == scale * x + 1
            assert [float(count(1.0)) for _ in range(2)] == [scale * x + 1, scale * x + 2]
        if n == 2:
            num_runs = len(runs)
    assert len(runs) == num_runs


@each_kind
@pytest.mark.parametrize("donate_states", [False, True])
def test_state_made_from_the_one_it_replaces(kind, donate_states):
    """The program reads the state of the last call, not that of the first: in attributes, items and variables."""
    box, runs, variable = SimpleNamespace(h=kind(jnp.zeros(())), d={}, learner=Box()), [], kind(jnp.zeros(()))
    box.d["h"], box.learner.h = kind(jnp.zeros(())), kind(jnp.zeros(()))

    @statetx.jit(donate_states=donate_states)
    def step(x):
        nonlocal variable
        runs.append(1)
        learner = Box()
        learner.h = kind(box.learner.h.value + x)
        box.learner = learner
        box.before, box.h = box.h, kind(box.h.value + x)
        box.d["h"], variable = kind(box.d["h"].value + x), kind(variable.value + x)
        return box.h.value + box.d["h"].value + box.learner.h.value + variable.value

    for n in range(1, 6):
        assert float(step(1.0)) == 4 * n
        states = (box.h, box.d["h"], box.learner.h, variable)
        assert [float(s.value) for s in states] == [n] * 4 and float(box.before.value) == n - 1
    assert len(runs) == 2


@each_kind
def test_created_states_in_nested_jit(kind):
    box, runs = Box(), []

    @statetx.jit
    def inner(x):
        box.h = kind(x)
        box.h.value = box.h.value * 2
        return box.h.value

    @statetx.jit
    def outer(x):
        runs.append(1)
        return inner(x) + inner(x + 1)

    assert [float(outer(x)) for x in (1.0, 2.0, 3.0, 4.0)] == [6.0, 10.0, 14.0, 18.0]
    assert float(box.h.value) == 10.0
    assert float(inner(1.0)) == 2.0 and float(box.h.value) == 2.0
    assert float(outer(1.0)) == 6.0 and float(box.h.value) == 4.0
    assert len(runs) <= 3


@each_kind
@pytest.mark.parametrize("transform", ["grad", "remat", "vjp", "vmap"])
def test_created_states_in_jit_inside_a_transform(kind, transform):
    box = Box()

    @statetx.jit
    def step(x):
        box.h = kind(jnp.sin(x))
        box.h.value = box.h.value * 2
        return box.h.value

    outside = {
        "grad": lambda x: statetx.grad(step)(x),
        "remat": lambda x: statetx.grad(statetx.remat(step))(x),
        "vjp": lambda x: statetx.vjp(step, x)[1](1.0)[0],
        "vmap": lambda x: statetx.vmap(step)(jnp.full(2, x))[0] / np.tan(x),
    }[transform]
    for x in (0.1, 0.2, 0.3):
        assert float(outside(x)) == pytest.approx(2 * np.cos(x), rel=1e-5)
        np.testing.assert_allclose(box.h.value, np.full(jnp.shape(box.h.value), 2 * np.sin(x)), rtol=1e-5)
        assert float(step(x + 0.05)) == pytest.approx(2 * np.sin(x + 0.05), rel=1e-5)
        assert float(box.h.value) == pytest.approx(2 * np.sin(x + 0.05), rel=1e-5)


@each_kind
def test_failed_call_restores_the_previous_state(kind):
    box = Box()

    @statetx.jit
    def step(x):
        box.h = kind(x)
        box.g = kind(box.h.value + 1)
        if jnp.shape(x) == (3,):
            raise ValueError("three")
        return box.h.value.sum()

    step(jnp.ones(2))
    with pytest.raises(ValueError, match="three"):
        step(jnp.ones(3))
    assert float(step(jnp.full(2, 2.0))) == 4.0
    np.testing.assert_array_equal(box.h.value, [2.0, 2.0])
    np.testing.assert_array_equal(box.g.value, [3.0, 3.0])


def test_deleted_models_are_freed():
    class Net(brainstate.nn.Module):
        def init_state(self):
            self.h = brainstate.HiddenState(jnp.zeros(3))

    net = Net()
    step = statetx.jit(lambda net: brainstate.nn.init_all_states(net) and None)
    step(net)
    step(net)
    freed = []
    weakref.finalize(net, freed.append, 1)
    del net
    step.clear_cache()
    gc.collect()
    assert freed


def test_garbage_is_collected_only_for_states_that_are_created(monkeypatch):
    """It takes longer than to trace a small function."""
    s, kept, collected = statetx.State(1.0), [], []
    monkeypatch.setattr(gc, "collect", lambda: collected.append(1))
    statetx.jit(lambda x: x * s.value)(1.0)
    statetx.grad(lambda x: (kept.append(statetx.State(x)), x)[1])(1.0)  # each that is alive has a value at its end
    assert not collected
    statetx.jit(lambda x: kept.append(statetx.State(x)))(1.0)
    assert collected


@each_kind
def test_alternating_threads_share_one_program(kind):
    box, runs, lock = Box(), [], threading.Lock()

    def step(x):
        box.h = kind(2 * x)
        runs.append(1)
        return box.h.value

    f = statetx.jit(step)

    def work(start):
        for x in range(start, start + 20):
            with lock:
                assert float(f(float(x))) == 2 * x and float(box.h.value) == 2 * x

    in_thread(lambda: work(0), lambda: work(100))
    assert len(runs) == 2


# -- inspected and compiled ahead of time ----------------------------------------------------------------------


@each_kind
def test_inspecting_a_step_that_creates_states_leaves_no_trace(kind):
    box, step = holding(kind)

    def inspect(x):
        assert step.eval_shape(x).shape == jnp.shape(x)
        assert step.lower(x).out_info.shape == step.trace(x).out_info.shape == jnp.shape(x)

    inspect(1.0)
    assert not vars(box)
    for x in (1.0, 2.0, 3.0, 4.0):
        assert float(step(x)) == 2 * x
        h = box.h
        inspect(x)
        inspect(jnp.ones(3))
        assert box.h is h and float(box.h.value) == 2 * x


@each_kind
@pytest.mark.parametrize("num_before", [0, 1, 2])
def test_compiled_step_creates_its_states_in_every_call(kind, num_before):
    box = Box()
    box.total = kind(jnp.zeros(()))

    @statetx.jit
    def step(x):
        box.h = kind(2 * x)
        box.total = kind(box.total.value + x)
        return box.h.value

    for _ in range(num_before):
        step(1.0)
    compiled = step.lower(1.0).compile()
    with compilations() as events:
        for n in range(1, 5):
            assert float(compiled(float(n))) == 2 * n == float(box.h.value)
            assert float(box.total.value) == num_before + n * (n + 1) / 2
    assert not events
    assert float(step(7.0)) == 14.0 == float(box.h.value)


@each_kind
def test_compiled_step_that_creates_a_state_once_refuses_the_second_call(kind):
    box = Box()

    @statetx.jit
    def step(x):
        n = by_hasattr(box, lambda: kind(jnp.zeros(())))
        n.value = n.value + x
        return n.value

    compiled = step.lower(1.0).compile()
    assert float(compiled(1.0)) == 1.0
    with pytest.raises(TypeError, match="the states of that time"):
        compiled(1.0)
    assert float(box.n.value) == 1.0
    compiled = step.lower(1.0).compile()
    assert [float(compiled(1.0)), float(compiled(1.0)), float(step(1.0))] == [2.0, 3.0, 4.0]


# -- brainstate's idioms ---------------------------------------------------------------------------------------


class Cell(brainstate.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = brainstate.ParamState(jnp.full(3, 0.5))

    def init_state(self, batch_size=None):
        self.h = brainstate.HiddenState(jnp.zeros((batch_size, 3)))

    def update(self, x):
        self.h.value = jnp.tanh(self.h.value * self.w.value + x)
        return self.h.value


def run_cells(cell, xs):
    return statetx.map(cell.update, xs)[-1]


def init_all_states(cell, xs):
    brainstate.nn.init_all_states(cell, xs.shape[1])
    return run_cells(cell, xs)


def vmap_new_states(cell, xs):
    brainstate.nn.vmap_init_all_states(cell, axis_size=2, batch_size=1, state_tag="new")
    return statetx.map(lambda x: brainstate.nn.Vmap(cell, vmap_states="new")(x[:, None])[:, 0], xs)[-1]


def nn_map(cell, xs):
    many = brainstate.nn.Map(cell, init_map_size=2)
    many.init_all_states(batch_size=1)
    return statetx.map(lambda x: many.update(x[:, None])[:, 0], xs)[-1]


@pytest.mark.parametrize("how", [init_all_states, vmap_new_states, nn_map], ids=lambda f: f.__name__)
def test_idiom_equals_plain_python_and_is_staged_at_most_twice(how):
    xs, runs = jnp.linspace(-1.0, 1.0, 24).reshape(4, 2, 3), []

    def step(cell, xs):
        out = how(cell, xs)
        runs.append(1)
        return out

    jitted, plain = Cell(), Cell()
    f = statetx.jit(functools.partial(step, jitted))
    with jax.numpy_rank_promotion("allow"):
        for n in range(1, 5):
            expected = how(plain, xs * n)
            np.testing.assert_allclose(f(xs * n), expected, rtol=1e-5)
            np.testing.assert_allclose(jitted.h.value, plain.h.value, rtol=1e-5)
    assert len(runs) == 2


# -- random programs -------------------------------------------------------------------------------------------

# None moves a state that was there before from one attribute to another in each call: that is for Python to do, and is
# not repeated by any program of `jit`.
STATEMENTS = """
box.{a} = S(x * {k})
box.{a} = box.{b} = S(x * {k})
box.{a} = make(x)
new = S(x); box.{a} = new
box.l = [S(x), S(x * {k})]
box.l = box.l[-1:] + [S(x)]
box.l.append(S(x)); box.l = box.l[-2:]
box.d['{a}'] = S(x + {k})
box.d = {{'{a}': S(x), '{b}': S(x * {k})}}
box.d.setdefault('{b}', S(x))
box.{a}, box.{b} = S(x + {k}), box.{a}
box.{a} = S(box.{b}.value + x)
box.{b} = box.{a}
box.keep = box.{a}; box.{a} = S(x)
fill(box, '{a}', x)
IF hasattr(box, 'm'): box.m.value = box.m.value + x
IF not hasattr(box, 'm'): box.m = S(x)
IF not hasattr(box, 'm'): box.m = box.{a}; box.{a} = S(x * {k})
IF box.n is None: box.n = S(x * {k})
IF box.n is None: box.n = box.{a}
IF len(box.l) < 2: box.l.append(S(x))
IF '{a}' not in box.d: box.d['{a}'] = S(x)
box.n = None
box.{a}.value = box.{a}.value + x
box.{b}.value = box.{b}.value * 0.5 + box.{a}.value
out = out + box.{a}.value
out = out + sum(s.value for s in box.l)
out = out + sum(s.value for s in box.d.values())
""".strip().splitlines()


def random_program(seed):
    """Source of a step, of statements that make, move, drop, read and write states."""
    rand = random.Random(seed)
    lines = ["def step(x):", "    out = x"]
    for _ in range(rand.randint(1, 6)):
        a, b = rand.sample("ab", 2)
        line = rand.choice(STATEMENTS).format(a=a, b=b, k=rand.randint(2, 5))
        lines += [f"    {line.replace('IF', 'if')}"]
    lines += ["    out = out + box.a.value - box.b.value", "    return out"]
    return "\n".join(lines)


def run_program(source, kind, transform, num_calls=6):
    """Outputs and the values in `box` after each call."""
    box = Box()
    box.a, box.b, box.n, box.l, box.d = kind(jnp.float32(1)), kind(jnp.float32(2)), None, [kind(jnp.float32(3))], {}

    def make(x):
        return kind(x + 1)

    def fill(box, name, x):
        setattr(box, name, kind(x - 1))

    scope = {"S": kind, "box": box, "make": make, "fill": fill}
    exec(source, scope)
    step, seen = transform(scope["step"]), []
    for n in range(num_calls):
        out = float(step(jnp.float32(n + 1)))
        numbers = {}
        for name, x in sorted(vars(box).items()):
            states = x.items() if isinstance(x, dict) else enumerate(x) if isinstance(x, list) else [(0, x)]
            numbers.update({(name, k): None if s is None else float(s.value) for k, s in states})
        seen.append((out, numbers))
        del x, states
    return seen


def check_random_program(seed, kind):
    source = random_program(seed)
    expected = run_program(source, kind, lambda f: f)
    runs = []
    result = run_program(source, kind, lambda step: statetx.jit(lambda x: (runs.append(1), step(x))[1]))
    assert len(runs) <= 2, source
    for n, (a, b) in enumerate(zip(result, expected, strict=True)):
        assert a[1].keys() == b[1].keys(), (source, n)
        assert a == b, f"call {n} of\n{source}"


@pytest.mark.parametrize(
    ("seed", "kind"),
    [
        pytest.param(seed, kind, id=f"{seed}-{name}", marks=[pytest.mark.slow] * ((seed, name) != (0, "statetx")))
        for seed in range(8)
        for name, kind in KINDS.items()
    ],
)
def test_random_program_equals_plain_python(seed, kind):
    for n in range(5):
        check_random_program(5 * seed + n, kind)
