"""Code that creates a state only sometimes is never taken for code that creates one in each run.

Each of these programs accumulates 1, 2, 3 in plain Python, since later calls find the state of the first one. If the first
call alone proved that the state is made each time, they would give 1, 1, 1.
"""

import functools
import operator
import types

import brainstate
import jax.numpy as jnp
import pytest

import statetx
from helpers import in_turn
from statetx.transforms.jit import straight


class Box:
    def __init__(self, **attributes):
        vars(self).update(attributes)


def nothing():
    pass


def stored_where_there_is_none(S):
    box = Box()

    def step():
        new = S(jnp.zeros(()))
        if not hasattr(box, "h"):
            box.h = new
        return box.h

    return step


def moved_to_another_attribute(S):
    box = Box(h=None)

    def step():
        box.new = S(jnp.zeros(()))
        if box.h is None:
            box.h, box.new = box.new, None
        return box.h

    return step


def moved_to_another_object(S):
    a, b = Box(), Box(h=None)

    def step():
        a.h = S(jnp.zeros(()))
        if b.h is None:
            b.h, a.h = a.h, None
        return b.h

    return step


def method_that_replaces_itself(S):
    box = Box()

    def make():
        box.h = S(jnp.zeros(()))
        box.make = nothing

    def step():
        box.make()
        return box.h

    box.make = make
    return step


def variable_that_is_bound_again(S):
    box = Box()

    def make():
        nonlocal f
        box.h = S(jnp.zeros(()))
        f = nothing

    def step():
        f()
        return box.h

    f = make
    return step


def global_that_is_bound_again(S):
    module = types.ModuleType("module")
    source = """
def nothing():
    pass
def make():
    global f
    box.h = S(zeros(()))
    f = nothing
def step():
    f()
    return box.h
f = make
"""
    vars(module).update(S=S, zeros=jnp.zeros, box=Box())
    exec(source, vars(module))
    return module.step


def item_of_a_table(S):
    box = Box(i=0)

    def make():
        box.h = S(jnp.zeros(()))
        box.i = 1

    table = [make, nothing]

    def step():
        table[box.i]()
        return box.h

    return step


def item_that_a_library_takes(S):
    box = Box(i=0)

    def make():
        box.h = S(jnp.zeros(()))
        box.i = 1

    table = [make, nothing]

    def step():
        operator.itemgetter(box.i)(table)()
        return box.h

    return step


def setter_of_a_property(S):
    class Once(Box):
        _h = None

        @property
        def h(self):
            return self._h

        @h.setter
        def h(self, value):
            if self._h is None:
                self._h = value

    box = Once()

    def step():
        box.h = S(jnp.zeros(()))
        return box.h

    return step


def own_setattr(S):
    class Once(Box):
        def __setattr__(self, name, value):
            vars(self).setdefault(name, value)

    box = Once()

    def step():
        box.h = S(jnp.zeros(()))
        return box.h

    return step


def cached_function(S):
    box = Box()

    @functools.cache
    def make():
        return S(jnp.zeros(()))

    def step():
        box.h = make()
        return box.h

    return step


def old_one_put_back(S):
    box = Box(old=None)

    def step():
        box.h = S(jnp.zeros(()))
        if box.old is not None:
            box.h = box.old
        box.old = box.h
        return box.h

    return step


def boolean_operator(S):
    box = Box(h=None)

    def step():
        box.h is not None or setattr(box, "h", S(jnp.zeros(())))
        return box.h

    return step


def loop(S):
    box = Box(done=[0])

    def step():
        for _ in box.done:
            box.h = S(jnp.zeros(()))
        box.done = []
        return box.h

    return step


def match(S):
    box = Box(h=None)

    def step():
        match box.h:
            case None:
                box.h = S(jnp.zeros(()))
        return box.h

    return step


def cached_function_that_stores(S):
    box = Box()

    @functools.cache
    def make():
        box.h = S(jnp.zeros(()))

    def step():
        make()
        return box.h

    return step


PROGRAMS = [
    cached_function_that_stores,
    *(stored_where_there_is_none, moved_to_another_attribute, moved_to_another_object, method_that_replaces_itself),
    *(variable_that_is_bound_again, global_that_is_bound_again, item_of_a_table, item_that_a_library_takes),
    *(setter_of_a_property, own_setattr, cached_function, old_one_put_back, boolean_operator, loop, match),
]
KINDS = {"statetx": statetx.State, "brainstate": brainstate.HiddenState}


@pytest.mark.parametrize(
    "kind",
    [pytest.param(statetx.State, marks=pytest.mark.slow), brainstate.HiddenState],
    ids=KINDS,
)
@pytest.mark.parametrize("program", list(in_turn(PROGRAMS)), ids=lambda f: f.__name__)
def test_state_created_only_in_the_first_call_continues(program, kind):
    find = program(kind)

    @statetx.jit
    def step(x):
        h = find()
        h.value = h.value + x
        return h.value

    assert [float(step(1.0)) for _ in range(4)] == [1.0, 2.0, 3.0, 4.0]


def num_runs(step):
    runs = []

    def counted(x):
        out = step(x)
        runs.append(1)
        return out

    f = statetx.jit(counted)
    assert [float(f(x)) for x in (1.0, 2.0, 3.0)] == [2.0, 4.0, 6.0]
    return len(runs)


def assigned_directly(box):
    def step(x):
        y = jnp.asarray(x, jnp.float32)
        box.h = box.g = statetx.State(y * 2)
        return box.h.value

    return step


def returned_by_a_helper(box):
    def make(x):
        return statetx.State(2 * x)

    def step(x):
        box.h = make(x)
        return box.h.value

    return step


def inside_with(box):
    def step(x):
        with brainstate.environ.context(fit=True):
            box.h = brainstate.HiddenState(2 * x)
        return box.h.value

    return step


STRAIGHT = [assigned_directly, returned_by_a_helper, inside_with]


@pytest.mark.parametrize("program", STRAIGHT, ids=lambda f: f.__name__)
def test_straight_code_is_staged_once(program):
    assert num_runs(program(Box())) == 1


@pytest.mark.parametrize(
    "name", list(in_turn(["LOAD_FAST_OR_NOT", "CALL_SOMETIMES", "STORE_FAST_MAYBE", "JUMP_NOWHERE"], 4))
)
@pytest.mark.parametrize("where", [pytest.param("before", marks=pytest.mark.slow), "after"])
def test_unknown_operation_counts_as_a_condition(monkeypatch, name, where):
    read = straight._instructions

    def with_an_unknown_one(code):
        ops = read(code)
        if code.co_name != "step":
            return ops
        store = next(n for n, op in enumerate(ops) if op.opname == "STORE_ATTR")
        place = next(n for n, op in enumerate(ops) if op.opname != "RESUME") if where == "before" else store
        return [*ops[:place], ops[place]._replace(opname=name), *ops[place:]]

    assert num_runs(assigned_directly(Box())) == 1
    monkeypatch.setattr(straight, "_instructions", with_an_unknown_one)
    assert num_runs(assigned_directly(Box())) == 2
