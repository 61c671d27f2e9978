"""`share_traces=`: calls that look alike share one run of the user's Python, and those that do not never do."""

from __future__ import annotations

import functools
import itertools
import threading

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
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

import statetx
from corpus import X
from statetx import _shared

shared = functools.partial(statetx.remat, share_traces=True)
ran = itertools.count()  # of an object that is the same whatever it has counted, the walk takes no notice


def runs_of(call):
    before = next(ran)
    call()
    return next(ran) - before - 1


class Block:
    def __init__(self, i, width=3, rate=0.5):
        self.weights = {"w": statetx.Param(jnp.eye(width) * (1 + i)), "b": statetx.Param(jnp.ones(width) * i)}
        self.count = statetx.State(jnp.zeros((), jnp.int32))
        self.rng = statetx.RngState(i)
        self.scale = jnp.full(width, 1.0 + i, jnp.float32)  # an array that is no state
        self.rate = rate

    @shared
    def __call__(self, x, training=True):
        next(ran)
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
            next(ran)
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
            next(ran)
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
