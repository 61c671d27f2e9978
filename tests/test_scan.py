"""`scan`: carried, broadcast, stacked and split states; drift; errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import statetx
from helpers import Counted, compilations

XS = jnp.linspace(-1.0, 1.0, 12).reshape(4, 3)


class Rnn:
    def __init__(self):
        self.w = statetx.Param(jnp.array([0.5, 1.5, -0.4]))
        self.h = statetx.State(jnp.array([0.1, 0.2, 0.3]))
        self.n = statetx.State(0)

    def step(self, carry, x):
        self.h.value = jnp.tanh(self.w.value * x + self.h.value * carry)
        self.n.value += 1
        return carry * 1.1, {"h": self.h.value, "n": self.n.value}


def python_loop(f, init, xs, reverse=False):
    ys, order = [None] * len(xs), range(len(xs))
    for i in reversed(order) if reverse else order:
        init, ys[i] = f(init, xs[i])
    return init, jax.tree.map(lambda *y: jnp.stack([jnp.asarray(v) for v in y]), *ys)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("unroll", [1, 3, True])
def test_equals_the_python_loop(reverse, unroll):
    a, b = Rnn(), Rnn()
    expected = python_loop(a.step, jnp.float32(1.0), XS, reverse)
    actual = statetx.scan(b.step, jnp.float32(1.0), XS, reverse=reverse, unroll=unroll)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), actual, expected)
    np.testing.assert_allclose(a.h.value, b.h.value, rtol=1e-6)
    assert int(b.n.value) == a.n.value == 4


def test_body_runs_once():
    h = statetx.State(jnp.zeros(3))
    reads = Counted(lambda c, x: (c + (h.value * x).sum(), None))
    statetx.scan(reads, jnp.float32(0), XS)
    assert reads.runs == 1

    def body(c, x):
        h.value = h.value + x
        return c + 1, h.value

    writes = Counted(body)
    statetx.scan(writes, 0, XS)
    assert writes.runs == 1
    write_only = Counted(lambda c, x: (setattr(h, "value", x), (c, None))[1])
    statetx.scan(write_only, 0, XS)
    assert write_only.runs == 1
    np.testing.assert_array_equal(h.value, XS[-1])


def test_eager_calls_with_fresh_closures_share_one_program():
    statetx.clear_cache()
    h, xs = statetx.State(jnp.zeros(3)), XS + 2.0  # whose sums are not zero

    def call(k):
        def body(c, x):
            h.value = h.value + x * k
            return c + 1.0, None

        return statetx.scan(body, jnp.float32(0), xs)

    call(jnp.float32(1.0))
    with compilations() as compiled:
        for k in range(2, 6):
            call(jnp.asarray(k, jnp.float32))  # a captured array is an operand, not part of the structure
    assert not compiled and statetx.cache_info().structures[:2] == (4, 1)
    np.testing.assert_allclose(h.value, xs.sum(0) * 15, rtol=1e-5)


def test_no_step_leaves_states_as_they_were():
    h = statetx.State(jnp.ones(3))
    carry, ys = statetx.scan(lambda c, x: (c + 1, setattr(h, "value", h.value * 2) or h.value), 0, length=0)
    assert int(carry) == 0 and ys.shape == (0, 3)
    np.testing.assert_array_equal(h.value, 1)


def test_drift_of_the_carry():
    with pytest.raises(statetx.CarryTypeError, match="with the structure of the carry that it gets"):
        statetx.scan(lambda c, x: ((c, c), None), 0, XS)
    carry, _ = statetx.scan(lambda c, x: (c + x.sum(), None), 0, XS)  # a number takes the body's type, as in JAX
    np.testing.assert_allclose(carry, XS.sum(), atol=1e-6)


def test_stacked_states():
    layers = statetx.Param(jnp.arange(12.0).reshape(3, 4))
    seen = statetx.State(jnp.zeros((4,)))

    def body(c, x):
        seen.value = seen.value + c.sum()
        layers.value = layers.value * 2
        return c + layers.value, None

    rules = {lambda path, s: s is layers: 1, lambda path, s: s is seen: 0}
    carry, _ = statetx.scan(body, jnp.zeros(3), length=4, states=rules)
    np.testing.assert_array_equal(layers.value, np.arange(12.0).reshape(3, 4) * 2)
    np.testing.assert_allclose(carry, layers.value.sum(1))
    np.testing.assert_allclose(seen.value, np.concatenate([[0], np.cumsum(layers.value.sum(0))[:-1]]))


def test_stacked_parameters_gradient():
    w = statetx.Param(jnp.arange(8.0).reshape(4, 2) / 8)

    def loss(x):
        return jnp.sum(
            statetx.scan(lambda c, _: (jnp.sin(c * w.value), None), x, length=4, states={statetx.Param: 0})[0]
        )

    def reference(w, x):
        for i in range(4):
            x = jnp.sin(x * w[i])
        return jnp.sum(x)

    x = jnp.array([0.7, 1.9])
    np.testing.assert_allclose(statetx.grad(loss, wrt=w)(x), jax.grad(reference)(w.value, x), rtol=1e-5)


def test_carry_broadcast_and_mistakes():
    a, b = statetx.State(jnp.zeros(3)), statetx.State(jnp.ones(3))

    def body(c, x):
        a.value = a.value + b.value
        return c, None

    statetx.scan(body, 0, XS, states={lambda p, s: s is b: statetx.Carry, True: statetx.Carry})
    np.testing.assert_array_equal(a.value, 4)
    before = a.value
    with pytest.raises(
        statetx.StateAccessError, match=r"State 'a' .*is declared Broadcast and was written at .*test_scan"
    ):
        statetx.scan(body, 0, XS, states={"a": statetx.Broadcast})
    with pytest.raises(
        statetx.StateValueError, match=r"mapped along axis 0, which must have the length of the scan, 4"
    ):
        statetx.scan(body, 0, XS, states={"b": 0})
    with pytest.raises(statetx.StateValueError, match="is not understood"):
        statetx.scan(body, 0, XS, states={"b": "carry"})
    assert a.value is before


def test_random_states_are_carried_or_split():
    rng = statetx.RngState(0)
    _, carried = statetx.scan(lambda c, x: (c, jax.random.uniform(rng.next())), 0, length=5)
    again = statetx.RngState(0)
    np.testing.assert_array_equal(carried, [jax.random.uniform(again.next()) for _ in range(5)])
    np.testing.assert_array_equal(jax.random.key_data(rng.value), jax.random.key_data(again.value))
    before = rng.value
    _, split = statetx.scan(
        lambda c, x: (c, jax.random.uniform(rng.next())),
        0,
        length=5,
        states={statetx.RngState: statetx.Split},
    )
    assert len(np.unique(np.concatenate([carried, split]))) == 10
    assert not np.array_equal(jax.random.key_data(before), jax.random.key_data(rng.value))


def test_state_made_in_the_body():
    kept = []

    def temporary(c, x):
        s = statetx.State(x)
        s.value = s.value * 2
        return c + s.value.sum(), None

    np.testing.assert_allclose(statetx.scan(temporary, jnp.float32(0), XS)[0], 2 * XS.sum(), atol=1e-6)

    def body(c, x):
        kept.append(statetx.State(x))
        return c, None

    with pytest.raises(statetx.CreatedStateError, match=r"made at .*test_scan.py:\d+ was created inside scan"):
        statetx.scan(body, 0, XS)
    with pytest.raises(statetx.StateAccessError, match="which gives values to states from before it only"):
        _ = kept[0].value


def test_other_objects():
    mode = statetx.State("double")
    out, _ = statetx.scan(lambda c, x: (c * (2 if mode.value == "double" else 3), None), 1, length=3)
    assert int(out) == 8
    with pytest.raises(statetx.StateValueError, match="carry holds a str"):
        statetx.scan(lambda c, x: (c, None), "a", XS)
    with pytest.raises(statetx.StateValueError, match="an output of .* is a str, which is not an array"):
        statetx.scan(lambda c, x: (c, "a"), 0, XS)
    with pytest.raises(statetx.CarryTypeError, match="enters as"):
        statetx.scan(lambda c, x: (setattr(mode, "value", x.sum()), (c, None))[1], 0, XS)
    assert mode.value == "double"


def test_under_plain_jax_transforms_where_no_state_is_written():
    w = statetx.Param(jnp.array([0.5, 1.5, -0.4]))

    def f(xs):
        return statetx.scan(lambda c, x: (c + jnp.sin(x * w.value).sum(), None), jnp.float32(0), xs)[0]

    batch = jnp.stack([XS, 2 * XS])
    expected = [jnp.sin(x * w.value[None]).sum() for x in batch]
    np.testing.assert_allclose(jax.vmap(f)(batch), expected, rtol=1e-6)
    np.testing.assert_allclose(
        jax.jit(jax.vmap(jax.grad(f)))(batch)[1], jnp.cos(2 * XS * w.value[None]) * w.value[None], rtol=1e-5
    )


def test_weak_initial_carry_of_the_right_dtype_is_traced_once():
    runs = 0

    def step(carry, x):
        nonlocal runs
        runs += 1
        return carry * x + jnp.float32(1), carry

    for init in (0.0, jnp.zeros(())):
        ours, theirs = statetx.scan(step, init, jnp.arange(3.0)), jax.lax.scan(step, init, jnp.arange(3.0))
        assert jax.tree.map(jax.typeof, ours) == jax.tree.map(jax.typeof, theirs)
        assert (ours[0].weak_type, ours[1].weak_type) == (theirs[0].weak_type, theirs[1].weak_type)
    runs = 0
    statetx.scan(step, 0.0, jnp.arange(3.0))
    assert runs == 1


@pytest.mark.parametrize("disabled", [False, True])
def test_states_in_xs_need_a_rule(disabled):
    def body(c, a):
        s, x = a if isinstance(a, tuple) else (a, 0.0)
        return c * s.value + x, None

    s = statetx.Param(jnp.arange(1.0, 4.0))
    with jax.disable_jit(disabled):
        for xs in (s, (s, jnp.ones(3))):
            with pytest.raises(
                statetx.StateValueError, match=r"(?s)scan: xs.* holds states.*Param.*states=\{Param: 0\}"
            ):
                statetx.scan(body, 1.0, xs)
        assert float(statetx.scan(body, 1.0, (s, jnp.ones(3)), states={statetx.Param: 0})[0]) == 16.0
        assert float(statetx.scan(body, 1.0, s, states={statetx.Param: 0})[0]) == 6.0
        shared = statetx.State(jnp.float32(2.0))
        assert float(statetx.scan(body, 1.0, shared, 3, states={statetx.State: statetx.Broadcast})[0]) == 8.0
