"""`share_traces=`: calls that look alike share one run of the user's Python, and those that do not never do."""

from __future__ import annotations

import dataclasses
import functools
import threading
from typing import Any, Generic, TypeVar

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from test_laws import (
    FLIPS,
    NATIVE,
    PROGRAMS,
    as_new,
    assert_flip_same,
    assert_no_tracer,
    assert_same,
    flip_grad,
    grad,
    jit,
    outcome_of,
    plain_grad,
    pure,
    remat,
    settings,  # noqa: F401
    snapshot,
    transformed,
)

import helpers
import statetx
from corpus import X
from statetx import _shared

Kind = TypeVar("Kind")
shared = functools.partial(statetx.remat, share_traces=True)


def runs_of(call):
    helpers.body_runs.clear()
    call()
    return len(helpers.body_runs)


class Block:
    def __init__(self, i, width=3, rate=0.5):
        self.weights = {"w": statetx.Param(jnp.eye(width) * (1 + i)), "b": statetx.Param(jnp.ones(width) * i)}
        self.count = statetx.State(jnp.zeros((), jnp.int32))
        self.rng = statetx.RngState(i)
        self.scale = jnp.full(width, 1.0 + i, jnp.float32)  # an array that is no state
        self.rate = rate

    @shared
    def __call__(self, x, training=True):
        helpers.body_runs.append(None)
        return self.plain(x, training)

    def plain(self, x, training=True):
        self.count.value += 1
        noise = jax.random.normal(self.rng.next(), x.shape) if training else 0.0
        return jnp.tanh(x @ self.weights["w"].value) * self.scale + self.weights["b"].value * self.rate + 0.1 * noise


def gradient(blocks, method="__call__", x=(0.1, 0.2, 0.3), **options):
    def loss(x):
        for block in blocks:
            x = getattr(block, method)(x, **options)
        return (x**2).sum()

    return statetx.grad(loss, argnums=0, wrt=[b.weights for b in blocks])(jnp.array(x))


def fresh():
    _shared.runs.clear()
    return [Block(i) for i in range(4)], [Block(i) for i in range(4)]


def assert_equal(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5)


def test_layers_share_one_run_and_keep_every_number():
    ours, theirs = fresh()
    assert runs_of(lambda: assert_equal(gradient(ours), gradient(theirs, "plain"))) == 1
    assert runs_of(lambda: assert_equal(gradient(ours), gradient(theirs, "plain"))) == 0, "and later calls do, too"
    for a, b in zip(ours, theirs, strict=True):
        assert int(a.count.value) == 2
        assert (jax.random.key_data(a.rng.value) == jax.random.key_data(b.rng.value)).all()
    assert (statetx.cache_info().runs.hits, statetx.cache_info().runs.misses) == (7, 1)


def test_gradients_are_those_of_each_layers_own_states():
    ours, theirs = fresh()
    (mine, _), (others, _) = gradient(ours), gradient(theirs, "plain")
    assert_equal(mine, others)
    assert not np.allclose(mine[1]["w"], mine[2]["w"]), "else layers could be confused"


@pytest.mark.parametrize(
    "change",
    [
        lambda b: setattr(b, "rate", 2.0),
        lambda b: setattr(b, "plain", lambda x, training=True: 2 * Block.plain(b, x, training)),
        lambda b: b.weights.update(b=statetx.Param(jnp.ones(3, jnp.bfloat16))),
        lambda b: setattr(b.weights["b"], "value", np.float32(2.0)),
        lambda b: setattr(b, "scale", 2.0),
        lambda b: b.weights.update(w=statetx.State(jnp.ones((3, 3)))),
    ],
    ids=["number", "method", "type of a value", "shape", "no array", "type of a state"],
)
def test_a_layer_that_differs_is_run(change):
    ours, theirs = fresh()
    change(ours[2]), change(theirs[2])
    assert runs_of(lambda: assert_equal(gradient(ours), gradient(theirs, "plain"))) == 2


def test_flags_arguments_and_shared_states_tell_calls_apart():
    ours, theirs = fresh()
    assert runs_of(lambda: gradient(ours)) == 1
    assert runs_of(lambda: assert_equal(gradient(ours, training=False), gradient(theirs, "plain", training=False))) == 1
    ours[1].weights["b"] = ours[1].count = statetx.State(jnp.ones(3))  # two names of one state
    assert runs_of(lambda: gradient(ours, x=(0.1, 0.2, 0.3))) == 1


def test_arrays_that_are_no_states_are_those_of_the_call():
    ours, theirs = fresh()
    gradient(ours), gradient(theirs, "plain")
    for blocks in (ours, theirs):
        blocks[1].scale = jnp.array([7.0, 8.0, 9.0])
    assert runs_of(lambda: assert_equal(gradient(ours), gradient(theirs, "plain"))) == 0


@pytest.mark.parametrize("make", FLIPS, ids=lambda f: f.__name__)
def test_never_stale(make, settings):  # noqa: F811
    """What the walk sees is never stale; all that changes in these is within its sight."""
    if make.__name__ in UNSEEN:
        pytest.skip("by its contract")
    _shared.runs.clear()
    ours, theirs = make(), make()
    x = jnp.asarray(make.x)
    run = flip_grad(shared)
    assert_flip_same(run(ours.f, x), plain_grad(as_new(theirs), x))
    ours.flip()
    if not make.is_global:
        theirs.flip()
    expected, got = outcome_of(plain_grad, as_new(theirs), x), outcome_of(run, ours.f, x)
    if isinstance(expected, type):
        assert got is expected
    else:
        assert_flip_same(got, expected)


UNSEEN: frozenset[str] = frozenset()


def shared_remat(f, program):
    return shared(f)


@pytest.mark.parametrize(
    "nesting", [(shared_remat, grad), pytest.param((shared_remat, jit), marks=pytest.mark.slow)], ids=["grad", "jit"]
)
@pytest.mark.parametrize(
    "make", [p if p in NATIVE else pytest.param(p, marks=pytest.mark.slow) for p in PROGRAMS], ids=lambda p: p.__name__
)
def test_law_same_as_reference(make, nesting):
    with jax.enable_x64(True):
        program = make()
        plain = tuple(remat if t is shared_remat else t for t in nesting)
        call, reference = transformed(nesting, program.step, program), pure(plain, program)
        program.runs = Counter()
        values = snapshot(program.values())
        for n in range(3):
            x = jnp.asarray(X) * (1 + 0.3 * n)
            expected, new = reference(snapshot(values), x)
            values = {**values, **new}
            assert_same(call(x), expected, weak=jit not in nesting)
            assert_no_tracer(program)
            assert_same(snapshot(program.values()), values, weak=jit not in nesting)
            values = snapshot(program.values())


class Counter:
    """A number of runs that the walk takes for the same whatever it is."""

    __slots__ = ()

    def __add__(self, other):
        return self


def test_what_belongs_to_one_call_is_not_shared():
    _shared.runs.clear()

    class Owner:
        def __init__(self, w):
            self.w = statetx.Param(jnp.float32(w))

        @shared
        def __call__(self, x):
            helpers.body_runs.append(None)
            return self, jnp.sin(x * self.w.value)

    owners = [Owner(2.0), Owner(3.0)]
    for owner in owners:
        assert statetx.jit(lambda x, owner=owner: owner(x)[1])(1.0) == jnp.sin(owner.w.value)
        assert statetx.grad(lambda x, owner=owner: (lambda out: out[1] if out[0] is owner else None)(owner(x)))(1.0)


def test_in_loops_branches_and_vmap():
    x = jnp.array([0.3, 0.2, 0.1])
    for build in (
        lambda call: lambda x: statetx.scan(lambda h, _: (call(h, False), None), x, None, length=3)[0].sum(),
        lambda call: lambda x: statetx.cond(x[0] > 0, lambda x: call(x, False), lambda x: x, x).sum(),
        lambda call: lambda x: statetx.vmap(lambda x: call(x, False))(jnp.stack([x, x])).sum(),
    ):
        ours, theirs = fresh()

        def gradients(build=build, ours=ours, theirs=theirs):
            for mine, other in zip(ours, theirs, strict=True):
                np.testing.assert_allclose(statetx.grad(build(mine))(x), statetx.grad(build(other.plain))(x), rtol=1e-5)
                assert int(mine.count.value) == int(other.count.value) > 0

        assert runs_of(gradients) == 1


def test_states_of_brainstate_and_their_modes():
    _shared.runs.clear()

    class Layer(brainstate.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.drop = brainstate.nn.Linear(3, 3), brainstate.nn.Dropout(0.5)

        @shared
        def update(self, x):
            helpers.body_runs.append(None)
            return self.drop(self.linear(x))

    layers = [Layer() for _ in range(3)]
    loss = lambda x: sum(layer.update(x).sum() for layer in layers)  # noqa: E731
    x = jnp.arange(3.0)
    with brainstate.environ.context(fit=False):
        assert runs_of(lambda: statetx.grad(loss)(x)) == 1
        quiet = statetx.grad(loss)(x)
        np.testing.assert_allclose(quiet, sum(l.linear.weight.value["weight"].sum(1) for l in layers), rtol=1e-5)  # noqa: E741
    with brainstate.environ.context(fit=True):
        assert runs_of(lambda: statetx.grad(loss)(x)) >= 1
        assert not np.allclose(statetx.grad(loss)(x), quiet)


@dataclasses.dataclass
class OfDataclass(Generic[Kind]):
    w: Any
    scale: float = 2.0

    def __call__(self, x):
        helpers.body_runs.append(None)
        return jnp.sin(self.w.value * x) * self.scale


class OfNnx(nnx.Module):
    def __init__(self, w):
        self.w, self.scale = nnx.Param(w), 2.0

    def __call__(self, x):
        helpers.body_runs.append(None)
        return jnp.sin(self.w[...] * x) * self.scale


@pytest.mark.parametrize("make", [lambda w: OfDataclass(statetx.Param(w)), OfNnx], ids=["dataclass", "nnx"])
def test_modules_of_other_makes_share(make):
    _shared.runs.clear()
    modules = [make(jnp.full(3, w)) for w in (0.5, 1.0, 1.5)]
    call = statetx.remat(type(modules[0]).__call__, share_traces=True)
    loss = lambda x, call=call: sum(call(m, x).sum() for m in modules)  # noqa: E731
    x = jnp.arange(3.0)
    expected = sum(2 * w * jnp.cos(w * x) for w in (0.5, 1.0, 1.5))
    assert runs_of(lambda: np.testing.assert_allclose(statetx.grad(loss)(x), expected, rtol=1e-6)) == 1
    modules[1].scale = 3.0
    expected += jnp.cos(x)
    assert runs_of(lambda: np.testing.assert_allclose(statetx.grad(loss)(x), expected, rtol=1e-6)) == 1


def test_threads_share():
    ours, _ = fresh()
    expected, found = [gradient([Block(i)]) for i in range(4)], {}

    def work(i):
        found[i] = gradient([ours[i]])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    for i in range(4):
        assert_equal(found[i], expected[i])


def test_runs_are_bounded_and_can_be_forgotten():
    ours, _ = fresh()
    for n in range(5):
        gradient([ours[0]], x=(0.1, 0.2, 0.3), training=n % 2 == 0)
    assert statetx.cache_info().runs.size == 2
    small = _shared.Runs(2)
    for n in range(4):
        small.keep(n, None)
    assert len(small) == 2
    statetx.clear_cache()
    assert statetx.cache_info().runs == (0, 0, 0, 512)


# -- what must tell calls apart: pairs of functions of an object and x, each of which a walk that looks less far confuses ----


class Holder:
    def __init__(self, **attributes):
        vars(self).update(attributes)


class Listed(list):
    pass


class Wrapping:
    def __init__(self, fun, factor):
        functools.update_wrapper(self, fun)
        self.factor = factor

    def __call__(self, x):
        return self.factor * x


class Slotted:
    __slots__ = ("__k",)

    def __init__(self, k):
        self.__k = k

    def k(self):
        return self.__k


class Scaled:
    scale = 2.0


class Marked(statetx.State):
    pass


def listed(k):
    made = Listed([1.0])
    made.k = k
    return made


def marked(k):
    made = Marked(jnp.float32(1.0))
    made.k = k
    return made


def with_default(k):
    def fun(x, *, k=k):
        return k * x

    return fun


def with_attribute(k):
    def fun(x):
        return fun.k * x

    fun.k = k
    return fun


def two_states(same):
    a = statetx.State(jnp.float32(2.0))
    return Holder(a=a, b=a if same else statetx.State(jnp.float32(5.0)))


def two_arrays(same):
    a = jnp.array([3.0, 3.0])
    return Holder(a=a, b=a if same else jnp.array([7.0, 7.0]))


def iterator(start):
    made = iter([1.0, 2.0, 3.0])
    [next(made) for _ in range(start)]
    return Holder(made=made)


def two_with(metadata):
    a, b = statetx.State(jnp.float32(1.0)), statetx.State(jnp.float32(1.0))
    a.metadata, b.metadata = metadata
    return Holder(a=a, b=b)


def shared_metadata(same):
    one = {"train": False}
    return two_with([one, one if same else dict(one)])


def sets_for_a_while(o, x):
    o.a.metadata["train"] = True
    try:
        return o.b.value * x * (10 if o.b.metadata["train"] else 1)
    finally:
        o.a.metadata["train"] = False


def metadata_as_attribute(same):
    held, state = {"train": False}, statetx.State(jnp.float32(1.0))
    state.metadata = held if same else dict(held)
    return Holder(held=held, state=state)


def sets_attribute_for_a_while(o, x):
    o.held["train"] = True
    try:
        return o.state.value * x * (10 if o.state.metadata["train"] else 1)
    finally:
        o.held["train"] = False


class Scaling(dict):
    """A dict with attributes."""


def attribute_of_metadata(k):
    state = statetx.State(jnp.float32(1.0))
    state.metadata = Scaling()
    state.metadata.scale = k
    return state


def empty_metadata(kind):
    state = statetx.State(jnp.float32(1.0))
    state.metadata = kind
    return state


class SlottedState(statetx.State):
    __slots__ = ("k",)

    def __init__(self, k):
        super().__init__(jnp.float32(1.0))
        self.k = k


class AttributedState(statetx.State):
    def __init__(self, k):
        super().__init__(jnp.float32(1.0))
        self._k = k


class AttributedBrainstate(brainstate.State):
    def __init__(self, k):
        super().__init__(jnp.float32(1.0))
        self._k = k


def transformed_with_attribute(k):
    @statetx.jit
    def g(x):
        return 2 * x

    g.k = k
    return g


def closures(same):
    def make():
        n = 0

        def add(k):
            nonlocal n
            n += k

        return add, lambda: n

    first, second = make(), make()
    return Holder(add=first[0], get=(first if same else second)[1])


def counted(o, x):
    o.add(1)
    try:
        return x * (1.0 + o.get())
    finally:
        o.add(-1)


def objects(same):
    a, b = Holder(k=0.0), Holder(k=0.0)
    if same:
        b.__dict__ = a.__dict__
    return Holder(a=a, b=b)


def moved_for_a_while(o, x):
    o.a.k = 1.0
    try:
        return x * (1.0 + o.b.k)
    finally:
        o.a.k = 0.0


def named(name):
    def g(x):
        return x

    g.__name__ = name
    return g


PAIRS = {
    "adjacent names of one state": (two_states, (True, False), lambda o, x: o.a.value * x + 10 * o.b.value * x),
    "metadata of two states": (shared_metadata, (False, True), sets_for_a_while),
    "metadata that is an attribute": (metadata_as_attribute, (False, True), sets_attribute_for_a_while),
    "attribute of metadata": (attribute_of_metadata, (2.0, 3.0), lambda s, x: s.value * s.metadata.scale * x),
    "metadata that is empty": (empty_metadata, ({}, []), lambda s, x: x * (2 if isinstance(s.metadata, dict) else 3)),
    "slot of a state": (SlottedState, (2.0, 3.0), lambda s, x: s.value * s.k * x),
    "private attribute of a state": (AttributedState, (2.0, 3.0), lambda s, x: s.value * s._k * x),
    "private attribute of brainstate's": (AttributedBrainstate, (2.0, 3.0), lambda s, x: s.value * s._k * x),
    "attribute of a transformed function": (transformed_with_attribute, (2.0, 3.0), lambda g, x: g(x) * g.k),
    "closures of one cell": (closures, (False, True), lambda o, x: counted(o, x)),
    "objects of one dict": (objects, (False, True), moved_for_a_while),
    "name of a function": (named, ("a", "bb"), lambda g, x: x * len(g.__name__)),
    "option of a transform": (
        lambda k: statetx.grad(lambda a, b: a * b * b, argnums=k),
        (0, 1),
        lambda g, x: g(x, x + 2),
    ),
    "options in a tuple": (
        lambda k: statetx.grad(lambda a, b: a * b * b, argnums=(k,)),
        (0, 1),
        lambda g, x: g(x, x + 2)[0],
    ),
    "adjacent names of one array": (two_arrays, (True, False), lambda o, x: (o.a * x + 10 * o.b * x).sum()),
    "an array that is returned": (lambda k: Holder(t=jnp.array([k, k])), (1.0, 5.0), lambda o, x: o.t + 0 * x),
    "metadata": (
        lambda k: statetx.State(jnp.float32(1.0), scale=k),
        (2.0, 3.0),
        lambda s, x: s.value * s.metadata["scale"] * x,
    ),
    "attribute of a state": (marked, (2.0, 3.0), lambda s, x: s.value * s.k * x),
    "keyword-only default": (with_default, (2.0, 3.0), lambda f, x: f(x)),
    "attribute of a function": (with_attribute, (2.0, 3.0), lambda f, x: f(x)),
    "attribute of a list": (listed, (2.0, 3.0), lambda o, x: o.k * x),
    "wrapping object": (lambda k: Wrapping(abs, k), (2.0, 3.0), lambda o, x: o(x)),
    "type of a key": (lambda k: Holder(d={k: 1.0}), (1, "1"), lambda o, x: x * (2.0 if 1 in o.d else 3.0)),
    "private slot": (Slotted, (2.0, 3.0), lambda o, x: o.k() * x),
    "iterator": (iterator, (1, 2), lambda o, x: next(o.made) * x),
    "bytes that change": (bytearray, (b"a", b"b"), lambda o, x: o[0] * x),
    "random generator": (np.random.default_rng, (1, 2), lambda o, x: o.uniform() * x),
    "flag in an array": (lambda k: Holder(t=jnp.float32(k)), (1.0, 5.0), lambda o, x: float(o.t) * x),
}


@pytest.mark.parametrize("name", PAIRS)
def test_what_tells_calls_apart(name):
    make, (first, second), fun = PAIRS[name]
    _shared.runs.clear()
    call = shared(fun)
    for k in (first, second, first):
        expected, given = fun(make(k), jnp.float32(1.0)), make(k)
        got = jax.jit(lambda x, given=given: call(given, x))(jnp.float32(1.0))
        np.testing.assert_allclose(got, expected, rtol=1e-6)


def test_class_attributes_and_flags_that_methods_read(monkeypatch):
    _shared.runs.clear()
    call = shared(lambda o, x: o.scale * x)
    run = lambda: float(jax.jit(lambda x: call(Scaled(), x))(1.0))  # noqa: E731
    assert (run(), run(), _shared.runs.hits) == (2.0, 2.0, 1)
    monkeypatch.setattr(Scaled, "scale", 5.0)
    assert run() == 5.0


def test_attributes_that_a_run_sets_are_set_in_each():
    _shared.runs.clear()

    def note(o, x):
        o.last = x.shape
        return 2 * x

    holders = [Holder(last=None), Holder(last=None)]
    jax.jit(lambda x: [shared(note)(o, x) for o in holders])(jnp.ones(3))
    assert [o.last for o in holders] == [(3,), (3,)]


def test_an_object_that_cannot_be_looked_at_shares_nothing():
    class Odd(dict):
        def values(self):
            raise KeyError("no")

    call = shared(lambda o, x: 2 * x)
    assert jax.jit(lambda x: call(Odd(a=1), x))(1.0) == 2.0
