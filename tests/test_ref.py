"""`jax.Ref` under statetx's transforms, against the same program on plain values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import statetx
from helpers import Counted, compilations
from statetx import _compat

H = jnp.array([0.3, -0.7, 1.1])
W = jnp.array([0.5, 1.5, -0.4])


class Cell:
    def __init__(self):
        self.h = jax.new_ref(H)
        self.n = jax.new_ref(jnp.zeros((), jnp.int32))
        self.key = jax.new_ref(jax.random.key_data(jax.random.key(0)))
        self.w = statetx.Param(W)

    def step(self, x):
        key, draw = jax.random.split(jax.random.wrap_key_data(self.key[...]))
        self.key[...] = jax.random.key_data(key)
        y = jnp.tanh(self.w.value * x * self.h[...]) * jax.random.bernoulli(draw, 0.7, (3,))
        self.h[...] = jax.lax.stop_gradient(0.5 * self.h[...] + y)
        self.n[...] += 1
        return (y * jnp.arange(1.0, 4.0)).sum()

    def values(self):
        return self.h[...], self.n[...], self.key[...]


def pure(w, x, h, n, key):
    key, draw = jax.random.split(jax.random.wrap_key_data(key))
    y = jnp.tanh(w * x * h) * jax.random.bernoulli(draw, 0.7, (3,))
    return (y * jnp.arange(1.0, 4.0)).sum(), (jax.lax.stop_gradient(0.5 * h + y), n + 1, jax.random.key_data(key))


def check(cell, expected):
    for a, b in zip(cell.values(), expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


FORMS = {
    "method": lambda c: statetx.remat(c.step),
    "closure": lambda c: statetx.remat(lambda x: c.step(x)),
    "argument": lambda c: lambda x: statetx.remat(Cell.step)(c, x),
    "nested": lambda c: statetx.remat(statetx.remat(c.step)),
}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_remat_gives_the_gradient_and_writes_once(form, compiled):
    cell = Cell()
    f = jax.grad(FORMS[form](cell))
    f = jax.jit(f) if compiled else f
    values = cell.values()
    for _ in range(3):
        g, values = jax.grad(lambda x, v=values: pure(W, x, *v), has_aux=True)(0.8)
        np.testing.assert_allclose(f(0.8), g, rtol=1e-6)
        check(cell, values)
    assert int(cell.n[...]) == 3


def test_ref_as_an_argument_itself():
    ref = jax.new_ref(H)

    @statetx.remat
    def f(r, x):
        y = jnp.sin(r[...] * x)
        r[...] = jax.lax.stop_gradient(y)
        r[0] = 0.0
        return y.sum()

    np.testing.assert_allclose(
        jax.grad(lambda x: f(ref, x))(2.0), jax.grad(lambda x: jnp.sin(H * x).sum())(2.0), rtol=1e-6
    )
    np.testing.assert_allclose(ref[...], jnp.sin(H * 2.0).at[0].set(0.0), rtol=1e-6)


def test_loops_carry_refs():
    cell, values = Cell(), Cell().values()
    xs = jnp.linspace(0.1, 0.9, 5)
    body = Counted(lambda c, x: (c + cell.step(x), None))

    def reference(w, xs, values):
        def step(c, x):
            y, v = pure(w, x, *c[1])
            return (c[0] + y, v), None

        return jax.lax.scan(step, (jnp.float32(0), values), xs)[0]

    (_, last), g = jax.value_and_grad(reference, (0, 1), has_aux=True)(W, xs, values)
    loss = lambda xs: statetx.scan(statetx.remat(body), jnp.float32(0), xs)[0]  # noqa: E731
    gw, gx = statetx.grad(loss, argnums=0, wrt=cell.w)(xs)
    np.testing.assert_allclose(gw, g[0], rtol=1e-5)
    np.testing.assert_allclose(gx, g[1], rtol=1e-5)
    check(cell, last)
    assert body.runs == 1
    statetx.fori_loop(0, 3, lambda i, c: c + cell.step(0.5), jnp.float32(0))
    statetx.while_loop(lambda c: cell.n[...] < 10, lambda c: c + cell.step(0.5), jnp.float32(0))
    assert int(cell.n[...]) == 10


def test_branches_and_jit():
    cell, values = Cell(), Cell().values()
    f = statetx.jit(lambda p, x: statetx.cond(p, cell.step, lambda x: x, x))
    for p in (True, False, True):
        f(jnp.asarray(p), jnp.float32(0.8))
        if p:
            values = pure(W, 0.8, *values)[1]
        check(cell, values)
    with compilations() as compiled:
        f(jnp.asarray(False), jnp.float32(0.8))
    assert not [c for c in compiled if "lambda" in str(c)] and int(cell.n[...]) == 2


def test_nothing_is_written_when_the_body_fails():
    cell = Cell()
    before = cell.values()

    def fails(x):
        cell.step(x)
        raise KeyError

    loop = lambda f: lambda x: statetx.fori_loop(0, 2, lambda i, c: f(c), x)  # noqa: E731
    for wrap in (lambda f: jax.grad(statetx.remat(f)), statetx.jit, loop):
        with pytest.raises(KeyError):
            wrap(fails)(0.5)
        check(cell, before)


def test_ref_made_inside_and_rules_of_custom_derivatives():
    @jax.custom_jvp
    def f(x):
        return x

    f.defjvps(lambda t, out, x: 5.0 * t)

    @statetx.remat
    def g(x):
        r = jax.new_ref(x)
        r[...] = f(r[...]) * 2.0
        return r[...].sum()

    np.testing.assert_allclose(jax.grad(g)(H), jnp.full(3, 10.0))
    np.testing.assert_allclose(jax.jit(jax.grad(g))(H), jnp.full(3, 10.0))


def test_paths_and_table():
    cell = Cell()
    assert list(statetx.states(cell)) == ["h", "n", "key", "w"]
    trace = statetx.trace_states(cell.step)(0.5)
    assert {r.path: (r.kind, r.written) for r in trace} == {
        "w": ("Param", False), "h": ("jax.Ref", True), "n": ("jax.Ref", True), "key": ("jax.Ref", True)
    }  # fmt: skip
    check(cell, Cell().values())


def test_discharge_as_relied_upon():
    ref = jax.new_ref(H)
    jaxpr, consts = _compat.stage(lambda x: [x * ref[...].sum()], [jax.typeof(1.0)], kind="jit", name="f")
    assert consts == [ref] and _compat.touches_refs(jaxpr, consts)
    plain = _compat.rebuild(jaxpr, invars=[*jaxpr.constvars, *jaxpr.invars], outvars=jaxpr.outvars)
    explicit, written = _compat.discharge_refs(plain)
    assert written == [False, False] and len(explicit.outvars) == 1
    assert [v.aval.shape for v in explicit.invars] == [(3,), ()]
