"""brainstate states and modules, under statetx's transforms and under brainstate's own."""

import brainstate
import brainunit as u
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from brainstate import nn

import statetx
from helpers import Counted, compilations
from statetx.kinds import brainstate as kind

X = jax.random.normal(jax.random.key(1), (5, 4))


@pytest.fixture(autouse=True)
def _rank_promotion_as_brainstate_needs_it():
    with jax.numpy_rank_promotion("allow"):
        yield


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(4, 8)
        self.norm = nn.BatchNorm0d((8,))
        self.drop = nn.Dropout(0.5)
        self.readout = nn.Linear(8, 1)
        self.calls = brainstate.ShortTermState(jnp.zeros((), jnp.int32))

    def block(self, x):
        self.calls.value += 1
        return self.drop(self.norm(jax.nn.relu(self.hidden(x))))

    @statetx.remat
    def rematerialised(self, x):
        return self.block(x)

    def loss(self, x, remat):
        return (self.readout(self.rematerialised(x) if remat else self.block(x)) ** 2).mean()


def fresh():
    brainstate.random.seed(0)
    return Net()


def loop(net, remat, scan):
    def loss(x):
        return scan(lambda c, k: (c + net.loss(x + k, remat), None), jnp.float32(0), jnp.arange(3.0))[0]

    return loss


def statetx_grad(f, params):
    return statetx.value_and_grad(f, wrt=params)


def brainstate_grad(f, params):
    return lambda x: brainstate.transform.grad(f, params, return_value=True)(x)[::-1]


def for_loop(f, init, xs):
    return brainstate.transform.for_loop(lambda k: f(jnp.float32(0), k)[0], xs).sum(), None


PROGRAMS = {
    "statetx.grad": lambda net, r: (statetx_grad, lambda x: net.loss(x, r)),
    "statetx.jit(grad)": lambda net, r: (
        lambda f, p: statetx.jit(statetx_grad(f, p)),
        lambda x: net.loss(x, r),
    ),
    "statetx.grad(scan)": lambda net, r: (statetx_grad, loop(net, r, statetx.scan)),
    "brainstate.grad": lambda net, r: (brainstate_grad, lambda x: net.loss(x, r)),
    "brainstate.jit(grad)": lambda net, r: (
        lambda f, p: brainstate.transform.jit(brainstate_grad(f, p)),
        lambda x: net.loss(x, r),
    ),
    "brainstate.grad(scan)": lambda net, r: (brainstate_grad, loop(net, r, brainstate.transform.scan)),
    "brainstate.grad(for_loop)": lambda net, r: (brainstate_grad, loop(net, r, for_loop)),
    "brainstate.jit(grad(statetx.scan))": lambda net, r: (
        lambda f, p: brainstate.transform.jit(brainstate_grad(f, p)),
        loop(net, r, statetx.scan),
    ),
    "statetx.jit(brainstate.grad)": lambda net, r: (
        lambda f, p: statetx.jit(brainstate_grad(f, p)),
        lambda x: net.loss(x, r),
    ),
}


def run(program, remat, fit):
    """Value, gradients and all states after two steps."""
    net = fresh()
    params = statetx.states(net, brainstate.ParamState)
    transform, loss = PROGRAMS[program](net, remat)
    step = transform(loss, params)
    with brainstate.environ.context(fit=fit):
        out = [step(X), step(X)]
    states = {path: s.value for path, s in statetx.states(net).items()}
    return out, states, jax.random.key_data(brainstate.random.DEFAULT.value)


@pytest.mark.parametrize("fit", [True, False])
@pytest.mark.parametrize("program", PROGRAMS)
def test_rematerialised_method_equals_the_plain_one(program, fit):
    expected, actual = run(program, False, fit), run(program, True, fit)
    # Exact on jax 0.10; newer XLA fuses the two programs of a gradient differently in the last bit.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7), actual, expected)
    calls = actual[1]["calls"]
    assert int(calls) == (6 if "scan" in program or "for_loop" in program else 2)
    assert float(jnp.abs(actual[0][0][1]["hidden.weight"]["weight"]).max()) > 0


def test_mode_switched_between_two_calls_is_seen():
    for wrap in (lambda f: f, statetx.jit):
        net = fresh()
        f = wrap(statetx.grad(lambda x, net=net: net.loss(x, True)))
        with brainstate.environ.context(fit=True):
            f(X)
            key = brainstate.random.DEFAULT.value
            dropped = f(X)
            assert brainstate.random.DEFAULT.value is not key
        with brainstate.environ.context(fit=False):
            key = jax.random.key_data(brainstate.random.DEFAULT.value)
            first, second = f(X), f(X)
            np.testing.assert_array_equal(jax.random.key_data(brainstate.random.DEFAULT.value), key)
        np.testing.assert_array_equal(first, second)  # no dropout
        assert not np.array_equal(first, dropped)
        expected = fresh()
        with brainstate.environ.context(fit=True):
            statetx.grad(lambda x, net=expected: net.loss(x, False))(X)
            expected_dropped = statetx.grad(lambda x, net=expected: net.loss(x, False))(X)
        np.testing.assert_allclose(dropped, expected_dropped, rtol=1e-6, atol=1e-7)


def test_random_state_read_for_the_first_time_in_a_trace():
    for wrap in (statetx.grad, statetx.jit, lambda f: statetx.grad(statetx.remat(f))):
        rng = brainstate.random.RandomState(np.array([0, 7], np.uint32))  # kept as a NumPy seed until it is read

        def f(x, rng=rng):
            return x * jax.random.uniform(rng.split_key())

        first = wrap(f)(1.0)
        assert not isinstance(rng.value, jax.core.Tracer)
        assert jnp.issubdtype(rng.value.dtype, jax.dtypes.prng_key)
        assert float(wrap(f)(1.0)) != float(first)
        again = brainstate.random.RandomState(np.array([0, 7], np.uint32))
        wrap(lambda x, rng=again: x * jax.random.uniform(rng.split_key()))(1.0)
        again.seed(3)
        statetx.scan(lambda c, x, rng=again: (c + jax.random.uniform(rng.split_key()), None), jnp.float32(0), length=3)


def test_values_with_units():
    v = brainstate.HiddenState(jnp.array([1.0, 2.0]) * u.mV)
    w = brainstate.ParamState(jnp.array([0.5, 0.5]))

    @statetx.remat
    def f(x):
        v.value = v.value * w.value + x * u.mV
        return (v.value / u.mV).sum()

    before = v.value
    g = statetx.grad(f, wrt=w)(1.0)
    np.testing.assert_allclose(g, [1.0, 2.0])
    assert v.value.unit == u.mV
    np.testing.assert_allclose(v.value.mantissa, [1.5, 2.0])
    statetx.scan(lambda c, x: (c + f(x), None), jnp.float32(0), jnp.ones(3))
    assert v.value.unit == u.mV

    def changes_unit(c, x):
        v.value = v.value * u.second
        return c, None

    kept = v.value
    with pytest.raises(statetx.CarryTypeError, match=r"HiddenState .*test_brainstate.py:\d+"):
        statetx.scan(changes_unit, 0, jnp.ones(3))
    assert v.value is kept and before is not kept


def test_hooks_fire_once_and_their_change_is_made_once():
    for wrap in (lambda f: f, lambda f: statetx.grad(statetx.remat(f)), statetx.grad, statetx.jit):
        s = brainstate.ShortTermState(jnp.asarray(1.0))
        fired = []

        def double(ctx, fired=fired):
            ctx.transformed_value = ctx.value * 2
            fired.append(1)

        s.register_hook("write_before", double)

        def f(x, s=s):
            s.value = s.value + x
            return s.value

        wrap(f)(3.0)
        assert float(s.value) == 8.0 and len(fired) == 1


def test_write_under_a_raw_transform():
    s = brainstate.ShortTermState(jnp.ones(()), name="v")

    def f(x):
        s.value = s.value * x
        return s.value

    before = s.value
    for call in (
        lambda: jax.grad(statetx.remat(f))(1.0),
        lambda: statetx.grad(lambda x: jax.jit(f)(x))(1.0),
        lambda: statetx.jit(lambda x: jax.vmap(f)(x * jnp.ones(3)).sum())(1.0),
    ):
        match = r"ShortTermState 'v' \(float32\[\], made at .*test_brainstate.py:\d+\).*at .*test_brainstate.py:\d+"
        with pytest.raises(statetx.TraceLeakError, match=match):
            call()
        assert s.value is before


def test_states_intact_after_an_exception():
    net = fresh()
    before = {p: s.value for p, s in statetx.states(net).items()}

    def fails(x):
        net.block(x)
        raise KeyError("after the writes")

    for wrap in (statetx.grad, statetx.jit, lambda f: statetx.grad(statetx.remat(f))):
        with brainstate.environ.context(fit=True), pytest.raises(KeyError):
            wrap(fails)(X)
        assert all(s.value is before[p] for p, s in statetx.states(net).items())
    assert not kind._context.state_stack and not kind._context.new_state_catcher


def test_state_created_inside_and_kept():
    class Lazy(nn.Module):
        def __call__(self, x):
            if not hasattr(self, "n"):
                self.n = brainstate.ShortTermState(jnp.zeros(()))
            self.n.value = self.n.value + x
            return self.n.value * x

    for wrap in (statetx.grad, lambda f: statetx.grad(statetx.remat(f)), statetx.jit):
        lazy = Lazy()
        f = wrap(lazy)
        for i in range(1, 4):
            f(jnp.asarray(2.0))
            assert float(lazy.n.value) == 2.0 * i
    lazy = Lazy()
    step = brainstate.transform.jit(lambda x: brainstate.transform.grad(lambda y: lazy(y))(x))
    lazy(jnp.asarray(0.0))
    step(jnp.asarray(2.0))
    assert float(lazy.n.value) == 2.0


def test_jit_compiles_once_and_reports_to_brainstate():
    net = fresh()
    body = Counted(lambda x: net.loss(x, True))
    f = statetx.jit(body)
    with brainstate.environ.context(fit=True):
        f(X)
        f(X)
        with compilations() as compiled:
            f(X)
            f(X)
        assert body.runs == 1 and not compiled and int(net.calls.value) == 4

        @brainstate.transform.jit
        def outer(x):
            return f(x)

        outer(X)
        outer(X)
        assert int(net.calls.value) == 6 and body.runs == 1


def test_trace_table_names_the_library():
    with brainstate.environ.context(fit=True):
        trace = statetx.trace_states(fresh().block)(X)
    kinds = {r.path: r.kind for r in trace}
    assert kinds["hidden.weight"] == "brainstate.ParamState"
    assert "calls" in trace.writes


def test_both_kinds_in_one_program():
    h, n = brainstate.HiddenState(jnp.zeros(3)), statetx.State(0)
    w = statetx.Param(jnp.ones(3))

    @statetx.jit
    def step(xs):
        def body(c, x):
            h.value = jnp.tanh(h.value + w.value * x)
            n.value += 1
            return c, h.value

        return statetx.grad(lambda: statetx.scan(statetx.remat(body), 0, xs)[1].sum(), wrt=w)()

    for i in range(1, 4):
        step(jnp.ones((5, 3)))
        assert int(n.value) == 5 * i and float(h.value[0]) > 0.9


def test_private_names_relied_upon():
    s = brainstate.State(1.0)
    assert s.__dict__["_value"] == 1.0 and s.__dict__["_been_writen"] is False and s.stack_level == 0
    with brainstate.StateTraceStack():
        assert brainstate.State(1.0).stack_level == 1
        assert len(kind._context.state_stack) == 1
    s._invalidate_trace_value()
    with pytest.raises(Exception, match="created inside a traced function"):
        _ = s.value


# -- statetx.State under brainstate's transforms ---------------------------------------------------------------


class Native:
    """A model of statetx's own states."""

    def __init__(self):
        self.w = statetx.Param(jnp.array([0.5, 1.5, -0.4]))
        self.h = statetx.State(jnp.array([0.1, 0.2, 0.3]))
        self.n = statetx.State(jnp.zeros((), jnp.int32))
        self.rng = statetx.RngState(0)

    def step(self, x):
        mask = jax.random.bernoulli(self.rng.next(), 0.7, (3,))
        self.h.value = jnp.tanh(self.w.value * x + self.h.value) * mask
        self.n.value += 1
        return self.h.value.sum()

    def values(self):
        return self.h.value, self.n.value, jax.random.key_data(self.rng.value)


BRAINSTATE = {
    "jit": lambda m, f: brainstate.transform.jit(f),
    "jit(jit)": lambda m, f: brainstate.transform.jit(lambda x: brainstate.transform.jit(f)(x)),
    "scan": lambda m, f: lambda x: brainstate.transform.scan(lambda c, k: (c, f(x * k)), 0.0, jnp.ones(3))[1].sum(),
    "for_loop": lambda m, f: lambda x: brainstate.transform.for_loop(lambda k: f(x * k), jnp.ones(3)).sum(),
    "checkpointed_for_loop": lambda m, f: (
        lambda x: brainstate.transform.checkpointed_for_loop(lambda k: f(x * k), jnp.ones(3)).sum()
    ),
    "cond": lambda m, f: lambda x: brainstate.transform.cond(jnp.asarray(True), f, lambda x: x * 0.0, x),
    "while_loop": lambda m, f: (
        lambda x: brainstate.transform.while_loop(
            lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] + f(x)), (0, jnp.float32(0))
        )[1]
    ),
    "jit(statetx.grad)": lambda m, f: brainstate.transform.jit(lambda x: statetx.grad(f)(x)),
    "statetx.jit(brainstate.jit)": lambda m, f: statetx.jit(lambda x: brainstate.transform.jit(f)(x)),
    "jit(statetx.jit)": lambda m, f: brainstate.transform.jit(lambda x, g=statetx.jit(f): g(x)),  # noqa: B008
    "jit(statetx.scan)": lambda m, f: brainstate.transform.jit(
        lambda x: statetx.scan(lambda c, k: (c, f(x * k)), 0, jnp.ones(3))[1].sum()
    ),
}


@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("program", BRAINSTATE)
def test_native_states_under_brainstates_transforms(program, remat):
    m, expected = Native(), Native()
    f = statetx.remat(m.step) if remat else m.step
    g = BRAINSTATE[program](m, f)
    times = 3 if "loop" in program or "scan" in program else 1
    for _ in range(3):
        out = g(jnp.float32(0.8))
        ref = sum(float(expected.step(jnp.float32(0.8))) for _ in range(times))
        if "grad" not in program:
            np.testing.assert_allclose(out, ref, rtol=1e-5)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), m.values(), expected.values())
        assert not any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(m.values()))
    m.h.value = jnp.ones(3)  # a value set from outside is seen by the compiled program
    expected.h.value = jnp.ones(3)
    g(jnp.float32(0.8))
    for _ in range(times):
        expected.step(jnp.float32(0.8))
    np.testing.assert_allclose(m.h.value, expected.h.value, rtol=1e-5)


def test_native_states_beside_brainstate_gradients():
    m, net = Native(), fresh()
    params = statetx.states(net, brainstate.ParamState)

    def loss(x):
        return net.loss(x, True) * m.step(jnp.float32(0.8))

    with brainstate.environ.context(fit=True):
        for _ in range(2):
            brainstate.transform.jit(brainstate.transform.grad(loss, params))(X)
    assert int(m.n.value) == int(net.calls.value) == 2


def test_native_states_are_intact_after_a_failure_under_brainstate():
    m = Native()
    before = m.h.value

    def fails(x):
        m.step(x)
        raise KeyError

    for wrap in (brainstate.transform.jit, lambda f: lambda x: brainstate.transform.for_loop(f, x * jnp.ones(2))):
        with pytest.raises(KeyError):
            wrap(fails)(jnp.float32(0.5))
        assert statetx.State(0).value == 0 and m.h._owner is None
        np.testing.assert_array_equal(before, m.h.value)


def test_native_state_kept_from_a_brainstate_trace_says_so():
    kept = []
    brainstate.transform.jit(lambda x: kept.append(statetx.State(x)) or x)(jnp.ones(3))
    with pytest.raises(statetx.StateAccessError, match="created inside a transform of brainstate"):
        _ = kept[0].value
