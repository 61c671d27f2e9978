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
from statetx.kinds.brainstate import observe
from statetx.kinds.brainstate.kind import KIND

pytestmark = pytest.mark.usefixtures("promoted_ranks")
T = brainstate.transform
X = jax.random.normal(jax.random.key(1), (5, 4))


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
    def rematerialized(self, x):
        return self.block(x)

    def loss(self, x, remat):
        return (self.readout(self.rematerialized(x) if remat else self.block(x)) ** 2).mean()


def fresh():
    brainstate.random.seed(0)
    return Net()


def assert_same(actual, expected):
    """Equal up to the rounding of sums: XLA compiles a rematerialized function as a whole, with other fusions on each
    machine.

    Measured: 0 on one CPU, 3.6e-7 beside entries of 1.4 (three units in the last place) on another, both with jax
    0.10.2.
    """
    atol = 5e-6 * np.abs(expected).max(initial=0)
    np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=atol)


@pytest.mark.thorough
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


def test_error_names_the_import_that_made_the_default_random_state():
    with pytest.raises(statetx.TraceLeakError, match=r"DEFAULT' .*, made at (?!<frozen)\S+:\d+\)"):
        jax.jit(lambda x: statetx.remat(brainstate.random.rand)() + x)(1.0)


@pytest.mark.thorough
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

        @T.jit
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


def test_private_names_relied_upon():
    s = brainstate.State(1.0)
    assert s.__dict__["_value"] == 1.0 and s.__dict__["_been_writen"] is False and s.stack_level == 0
    with brainstate.StateTraceStack():
        assert brainstate.State(1.0).stack_level == 1
        assert len(observe.context.state_stack) == 1
    s._invalidate_trace_value()
    with pytest.raises(Exception, match="created inside a traced function"):
        _ = s.value


def test_values_are_read_and_written_only_through_guarded_methods(monkeypatch):
    s, calls = brainstate.ShortTermState(1.0), []
    for name in ("_read_value", "_write_value", "restore_value"):
        method = getattr(brainstate.State, name)
        monkeypatch.setattr(
            brainstate.State, name, lambda self, *a, name=name, method=method: calls.append(name) or method(self, *a)
        )
    assert s.value == 1.0
    s.value = 2.0
    s.restore_value(3.0)
    assert calls == ["_read_value", "_write_value", "restore_value"] and s.value == 3.0


# -- statetx.State under brainstate's transforms ---------------------------------------------------------------


class Mixed:
    """A parameter of brainstate's beside states of statetx's; `pure` is the same step by hand."""

    def __init__(self):
        self.w = brainstate.ParamState(jnp.array([0.5, 1.5, -0.4]))
        self.p = statetx.Param(jnp.array([1.0, -2.0, 0.7]))
        self.h = statetx.State(jnp.array([0.1, 0.2, 0.3]), name="h")
        self.n = statetx.State(jnp.zeros((), jnp.int32))
        self.rng = statetx.RngState(0)

    def step(self, x):
        mask = jax.random.bernoulli(self.rng.next(), 0.7, (3,))
        self.h.value = jnp.tanh(self.w.value * x + self.h.value) * mask * self.p.value
        self.n.value += 1
        return (self.h.value**2).sum()

    def values(self):
        return self.h.value, self.n.value, jax.random.key_data(self.rng.value)

    def check(self, expected):
        h, n, key = expected
        jax.tree.map(close, self.values(), (h, n, jax.random.key_data(key)))
        assert not any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((self.values(), self.w.value)))
        assert all(s._owner is None for s in (self.p, self.h, self.n, self.rng))


BRAINSTATE = {
    "jit": lambda m, f: T.jit(f),
    "jit(jit)": lambda m, f: T.jit(lambda x: T.jit(f)(x)),
    "scan": lambda m, f: lambda x: T.scan(lambda c, k: (c, f(x * k)), 0.0, jnp.ones(3))[1].sum(),
    "for_loop": lambda m, f: lambda x: T.for_loop(lambda k: f(x * k), jnp.ones(3)).sum(),
    "checkpointed_for_loop": lambda m, f: lambda x: T.checkpointed_for_loop(lambda k: f(x * k), jnp.ones(3)).sum(),
    "cond": lambda m, f: lambda x: T.cond(jnp.asarray(True), f, lambda x: x * 0.0, x),
    "while_loop": lambda m, f: (
        lambda x: T.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] + f(x)), (0, jnp.float32(0)))[1]
    ),
    "jit(statetx.grad)": lambda m, f: T.jit(lambda x: statetx.grad(f)(x)),
    "statetx.jit(brainstate.jit)": lambda m, f: statetx.jit(lambda x: T.jit(f)(x)),
    "jit(statetx.jit)": lambda m, f: T.jit(lambda x, g=statetx.jit(f): g(x)),  # noqa: B008
    "jit(statetx.scan)": lambda m, f: T.jit(
        lambda x: statetx.scan(lambda c, k: (c, f(x * k)), 0, jnp.ones(3))[1].sum()
    ),
}


@pytest.mark.sample
@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("program", BRAINSTATE)
def test_native_states_under_brainstates_transforms(program, remat):
    m, expected = Mixed(), Mixed()
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


def test_leaked_native_state_of_a_brainstate_trace_raises():
    kept = []
    T.jit(lambda x: kept.append(statetx.State(x)) or x)(jnp.ones(3))
    with pytest.raises(statetx.StateAccessError, match="created inside a transform of brainstate"):
        _ = kept[0].value


# -- statetx's states and transforms inside brainstate's derivatives and maps ----------------------------------


def pure(w, x, states):
    h, n, key = states
    key, k = jax.random.split(key)
    h = jnp.tanh(w * x + h) * jax.random.bernoulli(k, 0.7, (3,)) * jnp.array([1.0, -2.0, 0.7])
    return (h**2).sum(), (h, n + 1, key)


def thrice(w, x, states):
    total = 0.0
    for k in (1.0, 0.5, -0.7):
        y, states = pure(w, x * k, states)
        total = total + y
    return total, states


START = (jnp.array([0.1, 0.2, 0.3]), jnp.zeros((), jnp.int32), jax.random.key(0))
KS = jnp.array([1.0, 0.5, -0.7])


def close(a, b):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def at_w(derivative, body=pure):
    """The derivative of `body` with respect to the parameter, and the states after it, by hand."""

    def run(w, x, states):
        return derivative(lambda w: body(w, x, states)[0])(w), body(w, x, states)[1]

    return run


def at_x(derivative, body=pure):
    def run(w, x, states):
        return derivative(lambda x: body(w, x, states)[0])(x), body(w, x, states)[1]

    return run


def looped(f, loop):
    return lambda x: loop(lambda k: f(x * k), KS).sum()


def statetx_loop(f):
    return lambda x: statetx.scan(lambda c, k: (c + f(x * k), None), jnp.float32(0), KS)[0]


def twice(x):
    return jnp.stack([x, 3 * x])


DERIVATIVES = {
    "grad": (lambda m, f: T.grad(f, m.w), at_w(jax.grad)),
    "grad by argument": (lambda m, f: T.grad(f, argnums=0), at_x(jax.grad)),
    "vector_grad": (
        lambda m, f: T.vector_grad(lambda x: twice(f(x)), m.w),
        at_w(lambda g: lambda w: 4 * jax.grad(g)(w)),
    ),
    "jacrev": (lambda m, f: T.jacrev(lambda x: twice(f(x)), m.w), at_w(lambda g: jax.jacrev(lambda w: twice(g(w))))),
    "jacfwd": (lambda m, f: T.jacfwd(lambda x: twice(f(x)), m.w), at_w(lambda g: jax.jacrev(lambda w: twice(g(w))))),
    "hessian": (lambda m, f: T.hessian(f, m.w), at_w(jax.hessian)),
    "vjp": (lambda m, f: lambda x: T.vjp(f, x)[1](jnp.float32(1)), at_x(jax.grad)),
    "jvp": (lambda m, f: lambda x: T.jvp(f, (x,), (jnp.float32(1),))[1], at_x(jax.grad)),
    "jit(grad)": (lambda m, f: T.jit(T.grad(f, m.w)), at_w(jax.grad)),
    "grad(jit)": (lambda m, f: T.grad(T.jit(f), m.w), at_w(jax.grad)),
    "grad(checkpoint)": (lambda m, f: T.grad(T.checkpoint(f), m.w), at_w(jax.grad)),
    "grad(cond)": (lambda m, f: T.grad(lambda x: T.cond(x > 0, f, lambda x: x * 0.0, x), m.w), at_w(jax.grad)),
    "grad(switch)": (lambda m, f: T.grad(lambda x: T.switch(1, [lambda x: x, f], x), m.w), at_w(jax.grad)),
    "grad(ifelse)": (
        lambda m, f: T.grad(lambda x: T.ifelse([x > 0, x <= 0], [f, lambda x: x], x), m.w),
        at_w(jax.grad),
    ),
    "grad(for_loop)": (lambda m, f: T.grad(looped(f, T.for_loop), m.w), at_w(jax.grad, thrice)),
    "jit(grad(for_loop))": (lambda m, f: T.jit(T.grad(looped(f, T.for_loop), m.w)), at_w(jax.grad, thrice)),
    "grad(checkpointed_for_loop)": (
        lambda m, f: T.grad(looped(f, T.checkpointed_for_loop), m.w),
        at_w(jax.grad, thrice),
    ),
    "grad(checkpointed_scan)": (
        lambda m, f: T.grad(lambda x: T.checkpointed_scan(lambda c, k: (c, f(x * k)), 0.0, KS)[1].sum(), m.w),
        at_w(jax.grad, thrice),
    ),
    "grad(map)": (lambda m, f: T.grad(lambda x: T.map(lambda k: f(x * k), KS).sum(), m.w), at_w(jax.grad, thrice)),
    "hessian(for_loop)": (lambda m, f: T.hessian(looped(f, T.for_loop), m.w), at_w(jax.hessian, thrice)),
    "grad(statetx.scan)": (lambda m, f: T.grad(statetx_loop(f), m.w), at_w(jax.grad, thrice)),
    "grad(statetx.jit)": (lambda m, f: T.grad(statetx.jit(f), m.w), at_w(jax.grad)),
    "grad(statetx.cond)": (
        lambda m, f: T.grad(lambda x: statetx.cond(x > 0, f, lambda x: x * 0.0, x), m.w),
        at_w(jax.grad),
    ),
    "grad(statetx.grad)": (
        lambda m, f: T.grad(lambda x: statetx.grad(f)(x), m.w),
        lambda w, x, s: (jax.grad(lambda w: jax.grad(lambda x: pure(w, x, s)[0])(x))(w), pure(w, x, s)[1]),
    ),
    "grad(statetx.vjp)": (lambda m, f: T.grad(lambda x: statetx.vjp(f, x)[0], m.w), at_w(jax.grad)),
    "statetx.jit(grad)": (lambda m, f: statetx.jit(T.grad(f, m.w)), at_w(jax.grad)),
    "statetx.jit(statetx.scan(grad))": (
        lambda m, f: statetx.jit(
            lambda x: statetx.scan(lambda c, k: (c + T.grad(f, m.w)(x * k), None), jnp.zeros(3), KS)[0]
        ),
        lambda w, x, s: one_by_one(w, x, s),
    ),
    "statetx.grad(statetx.jit(jit))": (
        lambda m, f: lambda x: statetx.grad(statetx.jit(T.jit(f)), wrt=m.w)(x),
        at_w(jax.grad),
    ),
}


def one_by_one(w, x, states):
    total = 0.0
    for k in KS:
        g, states = at_w(jax.grad)(w, x * k, states)
        total = total + g
    return total, states


@pytest.mark.sample
@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("program", DERIVATIVES)
def test_native_states_under_brainstates_derivatives(program, remat):
    m = Mixed()
    ours, by_hand = DERIVATIVES[program]
    g = ours(m, statetx.remat(m.step) if remat else m.step)
    states, w = START, m.w.value
    for x in (0.8, 0.3):
        out = g(jnp.float32(x))
        expected, states = by_hand(w, jnp.float32(x), states)
        close(out, expected)
        m.check(states)
        assert float(jnp.abs(jnp.asarray(expected)).max()) > 1e-3
        np.testing.assert_array_equal(m.w.value, w)


def test_native_states_intact_after_an_exception_under_brainstates_transforms():
    m = Mixed()
    before = m.values()

    def fails(x):
        m.step(x)
        raise KeyError

    for run in (
        lambda x: T.jit(fails)(x),
        lambda x: T.for_loop(fails, x * jnp.ones(2)),
        lambda x: T.grad(fails, m.w)(x),
        lambda x: T.jacfwd(fails, m.w)(x),
        lambda x: T.jit(T.grad(fails, m.w))(x),
        lambda x: T.vmap(fails)(x * KS),
        lambda x: T.vmap2(fails)(x * KS),
        lambda x: T.grad(lambda y: T.vmap(fails)(y * KS).sum(), m.w)(x),
        lambda x: statetx.grad(lambda y: T.vmap(fails)(y * KS).sum())(x),
    ):
        with pytest.raises(KeyError):
            run(jnp.float32(0.5))
        jax.tree.map(np.testing.assert_array_equal, m.values(), before)
        m.check(START)


MAPS = {
    "vmap": lambda f, **states: T.vmap(f, **states),
    "vmap2": lambda f, in_states=None, out_states=None: T.vmap2(f, state_in_axes=in_states, state_out_axes=out_states),
}
AROUND = {
    "eager": lambda f: f,
    "jit": lambda f: T.jit(f),
    "jit(jit)": lambda f: T.jit(lambda x: T.jit(f)(x)),
    "for_loop": lambda f: lambda x: T.for_loop(f, x[None])[0],
    "statetx.jit": lambda f: statetx.jit(f),
    "statetx.grad(statetx.jit)": lambda f: lambda x: statetx.vjp(statetx.jit(f), x)[0],
    "jit(statetx.vmap)": lambda f: T.jit(lambda x: statetx.vmap(lambda k: f(x), axis_size=1)(jnp.ones(1))[0]),
}
XS = jnp.array([1.0, -2.0, 0.5])


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("vmap", MAPS)
def test_native_states_under_brainstates_vmap(vmap, around):
    vmap, wrap = MAPS[vmap], AROUND[around]
    w, n, q = statetx.Param(jnp.float32(2)), statetx.State(jnp.float32(0), name="n"), statetx.State(XS * 10)

    def f(x):
        n.value = n.value + w.value  # the same for every example
        q.value = q.value * x + n.value  # one for each
        return q.value * w.value

    g = wrap(vmap(f, in_states=q, out_states=q))
    expected_n, expected_q = 0.0, XS * 10
    for _ in range(3):
        out = g(XS)
        expected_n = expected_n + 2.0
        expected_q = expected_q * XS + expected_n
        close(out, expected_q * 2.0)
        close(q.value, expected_q)
        close(n.value, expected_n)
        assert not any(isinstance(s.value, jax.core.Tracer) for s in (w, n, q))
        assert n._owner is None and q._owner is None


@pytest.mark.parametrize("vmap", MAPS)
def test_declared_states_only_read_under_brainstates_vmap(vmap):
    q, b = statetx.State(XS * 10), brainstate.ShortTermState(XS * 3)
    out = MAPS[vmap](lambda x: q.value * x + b.value, in_states=[q, b])(XS)
    close(out, XS * 10 * XS + XS * 3)  # each example has its own slice
    out = T.vmap2(lambda x: q.value * x, state_in_axes={0: statetx.State})(XS)
    close(out, XS * 10 * XS)  # by type, too


@pytest.mark.sample
@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("vmap", MAPS)
def test_native_random_state_is_split_by_brainstates_vmap(vmap, around):
    rng, reference = statetx.RngState(0), brainstate.random.RandomState(jax.random.key(0))
    g = AROUND[around](MAPS[vmap](lambda x: x + jax.random.uniform(rng.next())))
    expected = AROUND[around](MAPS[vmap](lambda x: x + jax.random.uniform(reference.split_key())))
    for _ in range(1 if "statetx.vmap" in around else 2):
        draws = g(XS)
        np.testing.assert_array_equal(draws, expected(XS))
        assert len(np.unique(draws - XS)) == 3
        if "statetx.vmap" in around:  # after it each kind has the key that its library gives
            continue
        np.testing.assert_array_equal(*map(jax.random.key_data, (rng.value, reference.value)))


@pytest.mark.sample
@pytest.mark.parametrize("vmap", MAPS)
def test_nested_derivatives_and_maps_of_brainstate(vmap):
    vmap = MAPS[vmap]
    w, n = statetx.Param(jnp.float32(2)), statetx.State(jnp.float32(1))
    v = brainstate.ParamState(jnp.float32(3))

    @statetx.remat
    def f(x):
        n.value = n.value + 1
        return jnp.sin(x * v.value) * w.value * n.value

    def by_hand(v, xs, n):
        return (jnp.sin(xs * v) * 2.0 * (n + 1)).sum()

    programs = {
        "grad(vmap)": T.grad(lambda xs: vmap(f)(xs).sum(), v),
        "jit(grad(vmap))": T.jit(T.grad(lambda xs: vmap(f)(xs).sum(), v)),
        "grad(jit(vmap))": T.grad(lambda xs: T.jit(vmap(f))(xs).sum(), v),
        "vmap(grad)": lambda xs: vmap(T.grad(f, v))(xs).sum(),
        "jit(vmap(grad))": T.jit(lambda xs: vmap(T.grad(f, v))(xs).sum()),
        "statetx.jit(grad(vmap))": statetx.jit(T.grad(lambda xs: vmap(f)(xs).sum(), v)),
        "statetx.grad(vmap)": lambda xs: statetx.grad(lambda: vmap(f)(xs).sum(), wrt=v)(),
        "grad(statetx.vmap)": T.grad(lambda xs: statetx.vmap(f)(xs).sum(), v),
        "vmap(statetx.grad)": lambda xs: vmap(lambda x: statetx.grad(lambda: f(x), wrt=v)())(xs).sum(),
    }
    count = 1.0
    for _ in range(2):
        for name, program in programs.items():
            np.testing.assert_allclose(program(XS), jax.grad(by_hand)(3.0, XS, count), rtol=1e-5, err_msg=name)
            count += 1
            assert float(n.value) == count, name
            assert not any(isinstance(s.value, jax.core.Tracer) for s in (w, n, v)) and n._owner is None


def test_batched_write_under_brainstates_vmap_needs_declaration():
    total = statetx.State(jnp.float32(0), name="total")

    def f(x):
        total.value = total.value + x
        return x

    match = r"State 'total' \(f32\[\], made at .*test_brainstate.py:\d+\) .*out_states.*\nFix: .*statetx's transform"
    for wrap in (lambda g: g, T.jit, statetx.jit):
        with pytest.raises(statetx.StateAccessError, match=match):
            wrap(T.vmap(f))(XS)
        assert float(total.value) == 0.0 and total._owner is None


def test_native_state_outliving_its_brainstate_transform():
    kept = []

    @T.jit
    def make(x):
        if not kept:
            kept.append(statetx.State(np.float32(1)))
            T.jit(lambda: kept[0].value)()  # brainstate meets it inside a transform
        return x

    make(1.0)
    s = kept[0]
    inner = T.jit(lambda x: setattr(s, "value", s.value * x))
    inner(2.0)
    outer = T.jit(lambda x: inner(x) or x)  # finds the program of `inner`, whose Python does not run again
    for _ in range(2):
        outer(3.0)
    assert float(s.value) == 18.0

    gone = []
    T.jit(lambda x: gone.append(statetx.State(x)) or x)(1.0)
    with pytest.raises(statetx.StateAccessError, match="created inside a transform of brainstate"):
        T.jit(lambda: gone[0].value)()


# -- states of brainstate with other values or hooks under statetx's transforms --------------------------------

A = np.array([[0.3, -0.2], [0.5, 0.1], [-0.4, 0.7]], np.float32)


def plain(cls, **metadata):
    return lambda: cls(jnp.asarray(A), **metadata), lambda s: s.value, lambda s, a: setattr(s, "value", a)


def group_write(s, a):
    s.set_value({0: a[:, 0], "1": a[:, 1]})


def tree_read(s):
    return jnp.stack([s.get_value("v") / u.mV, s.get_value(1) / u.nA], axis=-1)


def tree_write(s, a):
    s.set_value({"v": a[:, 0] * u.mV, 1: a[:, 1] * u.nA})


STATES = {
    "DelayState": plain(brainstate.DelayState),
    "named and tagged": plain(brainstate.ShortTermState, name="v", tag="membrane"),
    "quantity": (
        lambda: brainstate.HiddenState(jnp.asarray(A) * u.mV),
        lambda s: s.value / u.mV,
        lambda s, a: setattr(s, "value", a * u.mV),
    ),
    "tree of quantities": (
        lambda: brainstate.ParamState({"v": jnp.asarray(A[:, 0]) * u.mV, "i": jnp.asarray(A[:, 1]) * u.nA}),
        lambda s: jnp.stack([s.value["v"] / u.mV, s.value["i"] / u.nA], axis=-1),
        lambda s, a: setattr(s, "value", {"v": a[:, 0] * u.mV, "i": a[:, 1] * u.nA}),
    ),
    "HiddenGroupState": (lambda: brainstate.HiddenGroupState(jnp.asarray(A)), lambda s: s.value, group_write),
    "HiddenTreeState": (
        lambda: brainstate.HiddenTreeState({"v": jnp.asarray(A[:, 0]) * u.mV, "i": jnp.asarray(A[:, 1]) * u.nA}),
        tree_read,
        tree_write,
    ),
}


def advance(a, x):
    return jnp.tanh(a) * 0.5 + x


UNDER = {
    # for each, the statetx program of a body, and how often the body advances the state; x is 0.25 throughout
    "jit": (lambda f: statetx.jit(f), 1),
    "jit(grad(scan(remat)))": (
        lambda f: statetx.jit(
            statetx.grad(lambda x: statetx.scan(lambda c, _: (c + statetx.remat(f)(x), None), x * 0, length=3)[0])
        ),
        3,
    ),
    "vmap": (lambda f: lambda x: statetx.vmap(lambda k: f(x) * k)(jnp.ones(2))[0], 1),
    "cond": (lambda f: lambda x: statetx.cond(x > 0, f, lambda x: x, x), 1),
}


@pytest.mark.parametrize("program", UNDER)
@pytest.mark.parametrize("state", STATES)
def test_every_kind_of_state_under_statetx(state, program):
    make, read, write = STATES[state]
    transform, times = UNDER[program]
    s = make()
    kept = {k: getattr(s, k, None) for k in ("name", "tag", "name2index", "name2unit")}

    def f(x):
        write(s, advance(read(s), x))
        return (read(s) ** 2).sum()

    def loss(a, x):
        total = 0.0
        for _ in range(times):
            a = advance(a, x)
            total = total + (a**2).sum()
        return total

    derivative = jax.grad if "grad" in program else lambda f: f
    g, a, x = transform(f), jnp.asarray(A), jnp.float32(0.25)
    structure = jax.tree.structure(s.value)
    for _ in range(2):
        out = g(x)
        close(out, derivative(lambda x, a=a: loss(a, x))(x))
        for _ in range(times):
            a = advance(a, x)
        close(read(s), a)
        assert jax.tree.structure(s.value) == structure and s.stack_level == 0
        assert not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(s.value))
    assert kept == {k: getattr(s, k, None) for k in kept}


@pytest.mark.parametrize("program", UNDER)
def test_hooks_of_every_sort_under_statetx(program):
    transform, _ = UNDER[program]
    s, fired = brainstate.ShortTermState(jnp.float32(1)), {"read": 0, "write_after": 0, "write_before": 0}

    def count(name):
        fired[name] += 1

    s.register_hook("read", lambda ctx: count("read"))
    s.register_hook("write_after", lambda ctx: count("write_after"))
    s.register_hook(
        "write_before", lambda ctx: (count("write_before"), setattr(ctx, "transformed_value", ctx.value * 2))[0]
    )
    runs = []

    def f(x):
        runs.append(True)
        s.value = s.value + x
        return x * 1.0

    transform(f)(jnp.float32(0.25))
    times, expected = UNDER[program][1], 1.0
    for _ in range(times):
        expected = (expected + 0.25) * 2
    close(s.value, expected)
    # As often as the body's Python ran, and (since the last line read it) one read more.
    assert fired == {"read": len(runs) + 1, "write_after": len(runs), "write_before": len(runs)}


@pytest.mark.thorough
def test_gradients_of_a_flatted_dict_are_a_plain_dict():
    """As brainstate gives them: programs add them to dicts of zeros, the values of the same states."""
    net = fresh()
    weights = net.states(brainstate.ParamState)
    zeros = {path: jax.tree.map(jnp.zeros_like, w.value) for path, w in weights.items()}
    with brainstate.environ.context(fit=False):
        loss = lambda: net.loss(X, False)
        value, ours = statetx.value_and_grad(loss, wrt=weights)()
        theirs = T.grad(loss, weights)()
        total, _ = statetx.scan(
            lambda c, _: (jax.tree.map(jnp.add, c, statetx.grad(loss, wrt=weights)()), None), zeros, length=2
        )
    same = np.testing.assert_allclose if jax.__version_info__ < (0, 12) else assert_same
    jax.tree.map(same, ours, theirs)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, 2 * b, rtol=1e-6), total, theirs)
    assert any(np.abs(g).max() > 0 for g in jax.tree.leaves(ours))
    with brainstate.environ.context(fit=False):
        assert type(statetx.vjp(loss, wrt=weights)[1](jnp.ones_like(value))[0]) is dict


@pytest.mark.parametrize("make", [statetx.State, brainstate.State])
@pytest.mark.parametrize("writes", [False, True])
def test_state_created_in_an_eager_call_works_in_a_brainstate_transform(writes, make):
    kept = []

    @statetx.remat
    def step(x):
        state = make(jnp.asarray(2.0))
        kept.append(state)

        def scale(x):
            if writes:
                state.value = state.value + 1.0
            return x * state.value

        return T.jit(scale)(x)

    assert float(step(3.0)) == (9.0 if writes else 6.0)
    assert float(kept[0].value) == (3.0 if writes else 2.0)


def test_random_state_of_brainstate_has_its_name():
    f = lambda x: x + brainstate.random.randn(3)
    assert list(statetx.trace_states(f)(jnp.ones(3)).reads) == ["brainstate.random.DEFAULT"]


INSIDE = {
    "plain": lambda f: f,
    "remat": statetx.remat,
    "jit": statetx.jit,
    "grad": lambda f: lambda x: statetx.value_and_grad(f)(x)[0],
    "scan": lambda f: lambda x: statetx.scan(lambda c, _: (c, f(c)), x, None, 1)[1][0],
    "cond": lambda f: lambda x: statetx.cond(x > -9.0, f, lambda x: 0.0 * x, x),
}
OUTSIDE = {
    "jit": lambda f: T.jit(f),
    "scan": lambda f: lambda x: T.scan(lambda c, _: (c, f(c)), x, jnp.zeros(1))[1][0],
    "cond": lambda f: lambda x: T.cond(x > -9.0, f, lambda x: 0.0 * x, x),
    "grad": lambda f: lambda x: T.grad(f, return_value=True)(x)[1],
}


@pytest.mark.parametrize("inside", [name for name in INSIDE if name != "plain"])
@pytest.mark.parametrize("outside", OUTSIDE)
def test_change_in_place_reaches_the_transform_of_brainstate(outside, inside):
    """A change in place reports no write to it."""
    s = brainstate.ShortTermState({"a": jnp.zeros(())})

    def f(x):
        s.value["a"] = s.value["a"] + 1.0
        return x * s.value["a"]

    run = OUTSIDE[outside](INSIDE[inside](f))
    assert [float(run(2.0)), float(run(2.0))] == [2.0, 4.0]
    assert float(s.value["a"]) == 2.0


def test_gradient_of_brainstate_takes_states_of_its_own():
    """As docs/features.md says."""
    w = statetx.State(jnp.ones(3))
    with pytest.raises(TypeError, match="grad_states must be State"):
        T.grad(lambda: (w.value**2).sum(), grad_states={"w": w})()


@pytest.mark.parametrize("make", [statetx.Param, brainstate.ParamState])
def test_number_assigned_in_a_branch_of_brainstate_under_eager_remat_is_a_write_of_this_thread(make):
    state = make(0.5)

    @statetx.remat
    def f(x):
        before = state.value

        def assign(x):
            state.value = 0.25  # no tracer: brainstate gives the old value back when it has staged the branch
            return x + state.value

        def keep(x):
            state.value = state.value * 1.0
            return x

        return T.cond(x > 0, assign, keep, x) + before

    assert f(jnp.float32(1.0)) == 1.75 and state.value == 0.25
    assert f(jnp.float32(-1.0)) == -0.75 and state.value == 0.25


def test_random_state_reads_a_seed_as_a_key():
    rng, plain = brainstate.random.RandomState(3), brainstate.random.RandomState(3)
    rng.value = np.array([0, 3], np.uint32)
    assert rng.value == plain.value
    rng.value = np.array([0, 3], np.uint32)
    assert statetx.remat(lambda x: x + jax.random.normal(rng.value))(0.0) == jax.random.normal(plain.value)
    assert rng.value == plain.value


def test_transforms_of_brainstate_leave_no_catcher_of_states():
    state = statetx.State(0.0)
    for transform in (brainstate.transform.jit, brainstate.transform.checkpoint):
        transform(lambda x: state.value + x)(1.0)
    assert not observe.context.new_state_catcher and not observe.context.state_stack


def test_a_setting_of_brainstate_with_a_unit_is_known_by_its_value():
    calls = []

    @statetx.jit
    def step(x):
        calls.append(x)
        return x * (brainstate.environ.get("dt") / u.ms)

    for dt in (0.1, 0.1, 0.2, 0.2):
        with brainstate.environ.context(dt=dt * u.ms):
            assert float(step(1.0)) == pytest.approx(dt)
    assert len(calls) == 2
    with brainstate.environ.context(fit=True):
        assert KIND.mode() is KIND.mode(), "not made anew in each call"


def test_states_in_the_cache_of_brainstates_jit_are_not_created_by_the_step():
    """Its default random state is in no object of the user, and in the cache after the first call."""
    w = brainstate.ParamState(jnp.ones(3))

    def step(x):
        w.value += x * brainstate.random.normal(size=(3,))

    compiled = brainstate.transform.jit(step)
    statetx.testing.assert_same_step(compiled, step, jnp.ones(3), steps=2)
    assert list(statetx.states(compiled)) == ["w"]
