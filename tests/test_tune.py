"""Budgets under `vmap`: bytes of a loop's gradient for all examples, wherever the `vmap` is."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import statetx
from helpers import assert_close, compilations
from statetx import policies
from statetx.policies import Levels, Slots

LENGTH, EXAMPLES, WIDTH = 128, 64, 8
BUDGET = 2**17  # bytes; with all examples the plain loop takes eight times as much, and one alone fits
W = 0.3 * jnp.eye(WIDTH) + 0.05
X = jnp.linspace(-1, 1, EXAMPLES * WIDTH).reshape(EXAMPLES, WIDTH)


def one(w, x, checkpoint, length=LENGTH):
    def body(h, _):
        for _ in range(4):
            h = jnp.tanh(h @ w)
        return h, None

    return statetx.scan(body, x, None, length, checkpoint=checkpoint)[0].sum()


def in_a_loop(w, x, checkpoint):
    """A loop that is staged as part of another, before it is differentiated or mapped."""
    step = statetx.remat(lambda c, _: (c + one(w, jnp.sin(x + c), checkpoint), None))
    return statetx.scan(step, 0.0, None, 2)[0]


def grad_of_vmap(vmap):
    return lambda cp: jax.grad(lambda w, x: vmap(lambda x: one(w, x, cp))(x).sum())


PROGRAMS = {
    "grad of vmap": grad_of_vmap(jax.vmap),
    "grad of statetx.vmap": grad_of_vmap(statetx.vmap),
    "grad of vmap of vmap": lambda cp: jax.grad(
        lambda w, x: jax.vmap(jax.vmap(lambda x: one(w, x, cp)))(x.reshape(8, 8, -1)).sum()
    ),
    "grad of vmap of jit": lambda cp: jax.grad(lambda w, x: jax.vmap(jax.jit(lambda x: one(w, x, cp)))(x).sum()),
    "grad of vmap of remat": lambda cp: jax.grad(
        lambda w, x: jax.vmap(statetx.remat(lambda x: one(w, x, cp)))(x).sum()
    ),
    "grad of vmap, in a loop": lambda cp: jax.grad(lambda w, x: jax.vmap(lambda x: in_a_loop(w, x, cp))(x).sum()),
    "vmap of grad": lambda cp: lambda w, x: jax.vmap(jax.grad(lambda x: one(w, x, cp)))(x),
    "statetx.vmap of statetx.grad": lambda cp: lambda w, x: statetx.vmap(statetx.grad(lambda x: one(w, x, cp)))(x),
    "vmap of jit of grad": lambda cp: lambda w, x: jax.vmap(jax.jit(jax.grad(lambda x: one(w, x, cp))))(x),
    "vmap of grad of vmap": lambda cp: (
        lambda w, x: jax.vmap(jax.grad(lambda x: jax.vmap(lambda x: one(w, x, cp))(x).sum()))(x.reshape(8, 8, -1))
    ),
    "vmap of vmap of grad": lambda cp: (
        lambda w, x: jax.vmap(jax.vmap(jax.grad(lambda x: one(w, x, cp))))(x.reshape(8, 8, -1))
    ),
    "vmap of grad over weights": lambda cp: (
        lambda w, x: jax.vmap(jax.grad(lambda w, x: one(w, x, cp)))(jnp.broadcast_to(w, (EXAMPLES, *w.shape)), x)
    ),
}


def temporary(f):
    return jax.jit(f).lower(W, X).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.sample("slow")
@pytest.mark.parametrize(
    "name", [p if n in (0, 4) else pytest.param(p, marks=pytest.mark.slow) for n, p in enumerate(PROGRAMS)]
)
def test_budget_holds_for_all_examples(name):
    make = PROGRAMS[name]
    around = EXAMPLES * W.nbytes + X.nbytes  # outside of the loop: weights and a first carry for every example
    assert temporary(make(None)) > 4 * BUDGET
    assert temporary(make(policies.Budget(BUDGET))) <= BUDGET + around
    actual, expected = make(policies.Budget(BUDGET))(W, X), make(None)(W, X)
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-6)


def through(loop):
    """The same steps in loops of other kinds, as ``f(w, x, checkpoint)``."""

    def turn(h, w):
        for _ in range(4):
            h = jnp.tanh(h @ w)
        return h

    def fori_loop(w, x, checkpoint):
        return statetx.fori_loop(0, LENGTH, lambda i, h: turn(h, w), x, checkpoint=checkpoint).sum()

    def map(w, x, checkpoint):
        return statetx.map(lambda t: turn(x * t, w).sum(), jnp.linspace(0, 1, LENGTH), checkpoint=checkpoint).sum()

    def remat_scan(w, x, checkpoint):
        if checkpoint is None:
            return fori_loop(w, x, None)
        ws = statetx.Param(jnp.broadcast_to(w, (LENGTH, *w.shape)))
        return statetx.remat_scan(lambda h: turn(h, ws.value), checkpoint, num=LENGTH)(x).sum()

    return locals()[loop]


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["fori_loop", "map", "remat_scan"])
def test_budget_holds_for_all_examples_in_every_loop(loop):
    def make(checkpoint):
        return lambda w, x: jax.vmap(jax.grad(lambda x: through(loop)(w, x, checkpoint)))(x)

    assert temporary(make(None)) > 4 * BUDGET
    assert temporary(make(policies.Budget(BUDGET))) <= BUDGET + 2**14
    actual, expected = make(policies.Budget(BUDGET))(W, X), make(None)(W, X)
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-6)


def test_loop_that_fits_with_all_examples_stays_plain():
    f = grad_of_vmap(jax.vmap)
    assert temporary(f(policies.Budget("64MiB"))) == temporary(f(None))


@pytest.mark.parametrize("mapped", [False, True], ids=["grad", "vmap of grad"])
def test_plain_loop_has_the_equations_of_a_scan_and_a_note(mapped):
    def equations(checkpoint):
        f = jax.grad(lambda x: one(W, x, checkpoint))
        f = jax.jit(jax.vmap(f) if mapped else f)
        traced = f.trace(X if mapped else X[0])
        return len(traced.jaxpr.eqns), str(traced.jaxpr).count("statetx_notice"), traced.lower().as_text()

    num, _, expected = equations(None)
    for checkpoint in ("auto", policies.Budget("64MiB")):
        assert equations(checkpoint) == (num + 1, 1, expected)


@pytest.mark.sample
@pytest.mark.parametrize("name", ["grad of vmap", "vmap of grad", "grad of vmap, in a loop"])
def test_auto_counts_the_examples(name, monkeypatch):
    monkeypatch.setattr("statetx._loops.tune._SMALL", BUDGET)
    make = PROGRAMS[name]
    assert temporary(make("auto")) < temporary(make(None)) / 4
    alone = lambda cp: jax.jit(jax.grad(lambda w, x: one(w, x, cp))).lower(W, X[0]).compile()
    plain, auto = (alone(cp).memory_analysis().temp_size_in_bytes for cp in (None, "auto"))
    assert auto == plain


@pytest.mark.sample
@pytest.mark.parametrize(
    "checkpoint, expected",
    [
        ("auto", Levels(2)),
        (policies.Budget("0.4MiB"), Levels(2)),
        (policies.Budget("0.2MiB"), Slots),
        (policies.Budget("8MiB"), None),
    ],
)
def test_loops_on_gpus_have_known_lengths(checkpoint, expected, monkeypatch):
    """XLA waits for a GPU before each turn of a loop of unknown length."""
    monkeypatch.setattr("statetx._loops.tune._waits_for_loops", lambda: True)
    monkeypatch.setattr("statetx._loops.tune._SMALL", 1000)
    xs = jnp.linspace(0, 1, 1000 * 512).reshape(1000, 4, 128)

    def gradient(checkpoint):
        def loss(w):
            step = lambda h, x: (jnp.tanh(h @ w + x), None)
            return statetx.scan(step, xs[0], xs, checkpoint=checkpoint)[0].sum()

        return jax.jit(jax.grad(loss)).trace(jnp.eye(128) / 2)

    found = gradient(checkpoint)
    # The primitive of a schedule's first sweep is a custom derivative, and its loops are `while`s.
    assert ("while[" in str(found.jaxpr)) == (expected is Slots)
    if expected is not Slots:
        temporary = found.lower().compile().memory_analysis().temp_size_in_bytes
        assert temporary == gradient(expected).lower().compile().memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("checkpoint", ["auto", policies.Budget("1MiB")])
def test_loops_on_gpus_are_reported(checkpoint, monkeypatch):
    monkeypatch.setattr("statetx._loops.tune._waits_for_loops", lambda: True)

    def loss(w):
        step = lambda h, x: (jnp.tanh(h @ w + x), h.mean())
        return statetx.scan(step, jnp.ones((8, 64)), jnp.ones(2000), checkpoint=checkpoint)[1].sum()

    row = statetx.loop_report(loss, jnp.eye(64) / 2, policies=()).rows[0]
    assert (row.slots, row.runs, row.carry_bytes, row.is_mixed) == (90, 3.0, 2048, False)


@pytest.mark.slow
def test_least_budget_is_reported_with_its_examples():
    with pytest.raises(statetx.PolicyError, match=r"mapped over 64 examples.* needs .* with one slot"):
        grad_of_vmap(jax.vmap)(policies.Budget("8KiB"))(W, X)
    with pytest.raises(statetx.PolicyError, match=r"this loop, mapped over 64 examples, needs .* with one slot"):
        PROGRAMS["vmap of grad"](policies.Budget("8KiB"))(W, X)
    jax.grad(one)(W, X[0], policies.Budget("8KiB"))


@pytest.mark.sample
@pytest.mark.parametrize("size", [BUDGET, 2**14])  # plain for one example, or in slots
def test_gradient_mapped_too_late_raises(size):
    f = jax.jit(jax.grad(lambda x: one(W, x, policies.Budget(size))))
    expected = jnp.stack([f(x) for x in X[:2]])
    np.testing.assert_allclose(jax.vmap(f)(X[:2]), expected, rtol=1e-5)  # two examples fit
    message = r"is exceeded: the gradient of this loop, mapped over 64 examples, needs .*\n.*jit outside of the vmap"
    with pytest.raises(statetx.PolicyError, match=message):
        jax.vmap(f)(X)
    with pytest.raises(statetx.PolicyError, match=message):
        jax.vmap(jax.vmap(f))(X.reshape(32, 2, -1))


def test_gradient_in_a_mapped_loop_raises():
    with pytest.raises(statetx.PolicyError, match=r"is exceeded: .* over 64 examples"):
        jax.vmap(jax.grad(lambda x: in_a_loop(W, x, policies.Budget(BUDGET))))(X)
    f = jax.vmap(jax.grad(lambda x: in_a_loop(W, x, policies.Budget("64MiB"))))
    np.testing.assert_allclose(f(X[:2]), jax.vmap(jax.grad(lambda x: in_a_loop(W, x, None)))(X[:2]), rtol=1e-5)


def test_nothing_is_measured_without_a_gradient():
    x = X[0]
    with compilations() as compiled:
        one(W, x, policies.Budget("8KiB"))
    assert {"jit(scan)"} <= set(compiled) <= {"jit(scan)", "jit(_reduce_sum)"}
    one(W, X[0], policies.Budget(1))
    with pytest.raises(statetx.PolicyError, match="with one slot"):
        jax.grad(one)(W, X[0], policies.Budget(1))


@pytest.mark.slow
def test_budget_is_measured_once():
    f, x = PROGRAMS["vmap of grad"](policies.Budget(BUDGET)), X + 1
    f(W, X)
    with compilations() as compiled:
        f(W, x)
    assert not compiled


# -- mapped loops --------------------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_shared_weights_have_one_cotangent():
    w, x = jnp.eye(64) * 0.9, jnp.ones((32, 64))

    def loss(w, x):
        return statetx.scan(lambda h, _: (jnp.tanh(h @ w), None), x, None, 64, checkpoint=policies.Slots(4))[0].sum()

    f = jax.jit(jax.grad(lambda w: jax.vmap(lambda x: loss(w, x))(x).sum()))
    assert f.lower(w).compile().memory_analysis().temp_size_in_bytes < 8 * w.nbytes  # not one of each example's


def everything(checkpoint, reverse=False):
    """A loop with mapped and unmapped inputs and outputs of every kind."""

    def f(w, b, h, key, xs, zs):
        def step(carry, x):
            h, total, n, key, still = carry
            x, z = x
            key, sub = jax.random.split(key)
            h = jnp.tanh(h @ w + b * x + 0.1 * jax.random.normal(sub, h.shape)) * jnp.cos(n)
            return (h, total + z.sum(), n + 1, key, still * 0.9), (h[:2], n, z, x * 2)

        first = (h, jnp.float32(0), jnp.int32(0), key, jnp.float32(1))
        (h, total, n, _, still), ys = statetx.scan(step, first, (xs, zs), reverse=reverse, checkpoint=checkpoint)
        return (h**2).sum() + total * still + n + sum((y**2).sum() for y in ys)

    return f


ARGS = (
    jnp.eye(3) * 0.5,
    jnp.linspace(0.1, 0.4, 6).reshape(2, 3),
    jnp.linspace(-1, 1, 6).reshape(3, 2),
    jax.random.split(jax.random.key(0), 2),
    jnp.sin(jnp.arange(2 * 13 * 3.0)).reshape(13, 2, 3),
    jnp.cos(jnp.arange(13 * 3.0)).reshape(13, 3),
)
AXES = (None, 0, 1, 0, 1, None)


@pytest.mark.thorough
@pytest.mark.sample("slow")
@pytest.mark.parametrize("reverse", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "strategy",
    [
        policies.Slots(3),
        pytest.param(policies.Slots(2, policy=policies.dots), marks=pytest.mark.slow),
        policies.Budget("1MiB"),
    ],
    ids=repr,
)
def test_mapped_loops_have_the_gradients_of_plain_loops(strategy, reverse):
    def loss(checkpoint):
        return lambda *args: jax.vmap(everything(checkpoint, reverse), AXES)(*args).sum()

    argnums = (0, 1, 2, 4, 5)
    actual, expected = (jax.jit(jax.value_and_grad(loss(cp), argnums))(*ARGS) for cp in (strategy, None))
    assert_close(actual, expected, rtol=2e-5, atol=1e-5)
    per_example = [jax.vmap(jax.grad(everything(cp, reverse), argnums), AXES)(*ARGS) for cp in (strategy, None)]
    for a, b in zip(*map(jax.tree.leaves, per_example), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-5)


@pytest.mark.slow
def test_mapped_loop_with_an_axis_name_and_a_collective():
    def loss(x, checkpoint):
        step = lambda h, _: (jnp.tanh(h + jax.lax.pmean(h, "examples")), None)
        return statetx.scan(step, x, None, 100, checkpoint=checkpoint)[0].sum()

    x = jnp.linspace(-1, 1, 12).reshape(4, 3)
    for make in (
        lambda cp: jax.grad(lambda x: jax.vmap(lambda x: loss(x, cp), axis_name="examples")(x).sum()),
        lambda cp: jax.vmap(jax.grad(lambda x: loss(x, cp)), axis_name="examples"),
    ):
        expected = make(None)(x)
        for strategy in (policies.Slots(3), policies.Budget("8KiB"), policies.Budget("1MiB")):
            np.testing.assert_allclose(make(strategy)(x), expected, rtol=1e-5)


def test_linear_loop_is_transposed():
    def run(x, checkpoint=None):
        return statetx.scan(lambda h, x: (0.5 * h + x, h), jnp.zeros(3), x, checkpoint=checkpoint)

    x = jnp.arange(12.0).reshape(4, 3)
    ct = (jnp.ones(3), x**2)
    actual, expected = (jax.linear_transpose(f, x)(ct) for f in (lambda x: run(x, policies.Slots(2)), run))
    np.testing.assert_allclose(actual, expected)


def test_nested_loop_hits_the_cache():
    """Loops with rules of their own are values: a body that holds one is compared, and is alike."""

    def loss(w):
        inner = lambda h: statetx.scan(lambda h, _: (jnp.tanh(h * w), None), h, None, 5, checkpoint=2)[0]
        return statetx.scan(lambda h, _: (inner(h), None), 1.0, None, 3)[0]

    half, other = jnp.float32(0.5), jnp.float32(0.7)
    loss(half)
    statetx.clear_cache()
    loss(half)
    misses = statetx.cache_info().structures.misses
    with compilations() as compiled:
        loss(other)
    assert statetx.cache_info().structures.misses == misses and not compiled


@pytest.mark.thorough
def test_inputs_that_are_not_differentiated_need_no_budget():
    """The cotangents of a block's inputs are not computed, so they do not count."""

    def loss(w, xs):
        def block(h, xs):
            return jax.lax.scan(lambda h, x: (jnp.tanh(w * h + x), None), h, xs)[0], None

        return jnp.sum(statetx.scan(block, jnp.zeros(16), xs, checkpoint=policies.Budget("1KiB"))[0])

    def least(argnums):
        with pytest.raises(statetx.PolicyError, match="with one slot") as error:
            jax.grad(loss, argnums)(0.5, jnp.sin(jnp.arange(2.0**15)).reshape(64, -1, 16))
        return float(re.search(r"needs ([\d.]+) KiB", str(error.value))[1])

    assert least(0) < 0.95 * least((0, 1))
