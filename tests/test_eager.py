"""Loops under `jax.disable_jit`: bodies see concrete values, and results are the same as without it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import statetx
from statetx import Broadcast, Split

XS = jnp.arange(1.0, 5.0)


class Model:
    def __init__(self):
        self.total = statetx.State(jnp.zeros(()))
        self.w = statetx.Param(jnp.asarray(0.5))
        self.slots = statetx.State(jnp.arange(8.0).reshape(2, 4))
        self.rng = statetx.RngState(jax.random.key(3))
        self.same = statetx.RngState(jax.random.key(4))
        self.ref = jax.new_ref(jnp.zeros(()))
        self.seen = []

    def step(self, carry, x):
        self.total.value += x * self.w.value
        self.slots.value = self.slots.value + carry
        self.ref[...] += x
        noise = jax.random.normal(self.rng.next()) + jax.random.normal(self.same.next())
        return jnp.tanh(carry + self.slots.value.sum() + noise), self.total.value + noise

    def values(self):
        states = (self.total, self.slots, self.rng, self.same)
        return [
            *(jax.random.key_data(v) if jnp.issubdtype(v.dtype, jax.dtypes.prng_key) else v for v in map(read, states)),
            self.ref[...],
        ]


def read(state):
    return jnp.asarray(state.value)


def run(reverse, checkpoint):
    model = Model()
    rules = {"slots": 1, "rng": Split, "same": Broadcast}
    out = statetx.scan(model.step, 0.25, XS, reverse=reverse, states=rules, checkpoint=checkpoint)
    return out, model.values()


@pytest.mark.parametrize("checkpoint", [None, 2])
@pytest.mark.parametrize("reverse", [False, True])
def test_scan_with_every_rule_for_states(reverse, checkpoint):
    expected = run(reverse, checkpoint)
    with jax.disable_jit():
        out = run(reverse, checkpoint)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-6), out, expected)


LOOPS = {
    "scan": lambda f: statetx.scan(lambda c, x: (f(c), None), 1.0, XS)[0],
    "map": lambda f: statetx.map(f, XS).sum(),
    "fori_loop": lambda f: statetx.fori_loop(0, 4, lambda i, x: f(x) + i, 1.0),
    "while_loop": lambda f: statetx.while_loop(lambda x: x < 50.0, f, 1.0),
    "while_loop, max_steps": lambda f: statetx.while_loop(lambda x: x < 50.0, f, 1.0, max_steps=2),
    "while_loop, checkpoint": lambda f: statetx.while_loop(lambda x: x < 50.0, f, 1.0, checkpoint=2),
}


@pytest.mark.parametrize("name", LOOPS)
def test_bodies_see_concrete_values(name):
    n = statetx.State(0)

    def f(x):
        n.value += 1
        return 2.0 * x

    def concrete(x):
        assert float(x) > 0
        return f(x)

    expected, steps = LOOPS[name](f), int(n.value)
    with pytest.raises(jax.errors.ConcretizationTypeError):
        LOOPS[name](concrete)
    n.value = 0
    with jax.disable_jit():
        np.testing.assert_allclose(LOOPS[name](concrete), expected)
    assert int(n.value) == steps


def test_a_condition_and_a_body_with_arrays_of_their_own():
    def first_power(factor, least):
        return statetx.while_loop(lambda x: x < least, lambda x: factor * x, jnp.float32(1.0))

    with jax.disable_jit():
        powers = jax.vmap(first_power)(jnp.array([2.0, 3.0]), jnp.array([30.0, 50.0]))
    assert powers.tolist() == [32.0, 81.0]


@pytest.mark.parametrize("name", LOOPS)
def test_failed_step_undoes_the_loop(name):
    n = statetx.State(jnp.zeros(()))

    def f(x):
        n.value += 1
        if n.value > 1:
            raise ValueError("in the second step")
        return 2.0 * x

    with jax.disable_jit(), pytest.raises(ValueError, match="second step"):
        LOOPS[name](f)
    assert n.value == 0


@pytest.mark.parametrize("name", LOOPS)
def test_gradients(name):
    w = statetx.Param(jnp.asarray(2.0))
    is_differentiable = name not in ("while_loop", "while_loop, max_steps")
    loss = lambda: LOOPS[name](statetx.remat(lambda x: w.value * x))
    with jax.disable_jit():
        out = statetx.grad(loss, wrt=w)()
    if is_differentiable:
        np.testing.assert_allclose(out, statetx.grad(loss, wrt=w)(), rtol=1e-6)


def test_while_loop_under_vmap_with_different_lengths():
    def count(x):
        return statetx.while_loop(lambda x: x < 10.0, lambda x: 2 * x, x)

    with jax.disable_jit():
        np.testing.assert_allclose(statetx.vmap(count)(jnp.array([1.0, 6.0])), [16.0, 12.0])


def test_zero_steps():
    n = statetx.State(0)

    def f(c, x):
        n.value += 1
        return c, x

    with jax.disable_jit():
        carry, ys = statetx.scan(f, 1.0, jnp.zeros((0, 3)))
    assert float(carry) == 1.0 and ys.shape == (0, 3) and int(n.value) == 0


def test_mistakes_match_the_compiled_loop():
    s, made = statetx.State(jnp.zeros(())), []

    def write(*args):
        s.value += 1.0
        return args[0]

    def create(c, x):
        made.append(statetx.State(c))
        return c, x

    with jax.disable_jit():
        with pytest.raises(statetx.StateAccessError, match="declared Broadcast and was written at .*test_eager"):
            statetx.scan(lambda c, x: (write(c), x), 0.0, XS, states={statetx.State: Broadcast})
        with pytest.raises(statetx.StateAccessError, match="the condition .* wrote"):
            statetx.while_loop(lambda x: write(x) < 3, lambda x: x + 1, 0.0)
        with pytest.raises(statetx.CreatedStateError, match="created inside scan"):
            statetx.scan(create, 0.0, XS)
        with pytest.raises(TypeError, match=r"must return a pair \(carry, y\)"):
            statetx.scan(lambda c, x: c, 0.0, XS)
        with pytest.raises(
            statetx.StateValueError, match="mapped along axis 0, which must have the length of the scan, 4"
        ):
            statetx.scan(lambda c, x: (c + s.value.sum(), x), 0.0, XS, states={statetx.State: 0})
    assert s.value == 0


@pytest.mark.parametrize(
    "branch_of", [lambda f: statetx.cond(True, f, lambda: 0.0), lambda f: statetx.switch(1, [lambda: 0.0, f])]
)
def test_branch_under_disable_jit_is_atomic(branch_of):
    n, made = statetx.State(0.0), []

    def raises():
        n.value += 1.0
        raise ZeroDivisionError

    def writes():
        n.value += 1.0
        return 2.0

    def creates():
        made.append(statetx.State(0.0))
        return 1.0

    with jax.disable_jit():
        with pytest.raises(ZeroDivisionError):
            branch_of(raises)
        assert n.value == 0.0
        assert branch_of(writes) == 2.0 and n.value == 1.0
        with pytest.raises(statetx.CreatedStateError):
            branch_of(creates)
