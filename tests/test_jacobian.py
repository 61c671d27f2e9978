"""`jvp`, `linearize`, `jacfwd`, `jacrev`, `hessian`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import statetx
from helpers import Counted, assert_close

X = jnp.array([0.3, -0.9])


class Model:
    def __init__(self):
        self.w = statetx.Param(jnp.array([[0.5, 1.0], [2.0, -1.0], [0.1, 0.7]]))
        self.s = statetx.Param({"scale": 3.0})
        self.n = statetx.State(0)
        self.last = statetx.State(jnp.zeros(3))

    def __call__(self, x):
        self.n.value += 1
        self.last.value = jnp.sin(self.w.value @ x) * self.s.value["scale"]
        return {"y": self.last.value, "z": (x**2).sum()}


def pure(w, s, x):
    return {"y": jnp.sin(w @ x) * s["scale"], "z": (x**2).sum()}


close = functools.partial(assert_close, atol=1e-6)


def test_jvp_and_linearize_run_once_and_write_once():
    m = Model()
    f = Counted(m)
    tangent = jnp.array([1.0, 2.0])
    expected = jax.jvp(lambda x: pure(m.w.value, m.s.value, x), (X,), (tangent,))
    close(statetx.jvp(f, (X,), (tangent,)), expected)
    assert f.runs == 1 and m.n.value == 1
    out, push = statetx.linearize(f, X)
    close((out, push(tangent)), expected)
    close(push(2 * tangent), jax.tree.map(lambda t: 2 * t, expected[1]))
    assert f.runs == 2 and m.n.value == 2
    np.testing.assert_allclose(m.last.value, expected[0]["y"], rtol=1e-6)
    out, tangent_out, aux = statetx.jvp(lambda x: (m(x), "label"), (X,), (tangent,), has_aux=True)
    close((out, tangent_out), expected)
    assert aux == "label"
    out, push, aux = statetx.linearize(lambda x: (m(x), m.n.value), X, has_aux=True)
    assert aux == 4


@pytest.mark.sample
@pytest.mark.parametrize("name", ["jacfwd", "jacrev"])
def test_jacobians_have_the_structure_of_wrt(name):
    ours, theirs = getattr(statetx, name), getattr(jax, name)
    m = Model()
    jw, js, jx = theirs(pure, (0, 1, 2))(m.w.value, m.s.value, X)["y"]
    f = Counted(m)
    close(ours(f)(X)["y"], jx)
    assert f.runs == 1 and m.n.value == 1
    close(ours(m, argnums=(0,))(X)["y"], (jx,))
    close(ours(m, wrt={"w": m.w, "s": m.s})(X)["y"], {"w": jw, "s": js})
    close(ours(m, 0, wrt=m.w)(X)["y"], (jw, jx))
    jac, aux = ours(lambda x: (m(x), {"n": m.n.value}), has_aux=True)(X)
    close(jac["y"], jx)
    assert aux == {"n": 5}
    close(statetx.jit(ours(statetx.remat(m)))(X)["y"], jx)
    np.testing.assert_allclose(m.last.value, pure(m.w.value, m.s.value, X)["y"], rtol=1e-6)


@pytest.mark.slow
def test_hessian():
    m = Model()

    def loss(x):
        return (m(x)["y"] ** 2).sum()

    def reference(w, x):
        return (pure(w, m.s.value, x)["y"] ** 2).sum()

    f = Counted(loss)
    close(statetx.hessian(f)(X), jax.hessian(reference, 1)(m.w.value, X))
    assert f.runs == 1 and m.n.value == 1
    close(statetx.hessian(loss, wrt=m.w)(X), jax.hessian(reference, 0)(m.w.value, X))
    close(statetx.hessian(wrt={"w": m.w})(loss)(X)["w"]["w"], jax.hessian(reference, 0)(m.w.value, X))
    close(statetx.hessian(statetx.remat(loss))(X), jax.hessian(reference, 1)(m.w.value, X))
    h, aux = statetx.hessian(lambda x: (loss(x), "aux"), has_aux=True)(X)
    assert aux == "aux"
    close(h, jax.hessian(reference, 1)(m.w.value, X))


@pytest.mark.parametrize("jit", [jax.jit, statetx.jit], ids=["jax", "statetx"])
def test_linear_map_crosses_a_compiled_function(jit):
    w = statetx.Param(jnp.array([1.0, 2.0]))

    def f(x):
        return {"y": w.value * jnp.sin(x)}

    x = jnp.array([0.3, 0.7])
    push = jit(lambda x: statetx.linearize(f, x)[1])(x)
    np.testing.assert_allclose(push(jnp.ones(2))["y"], w.value * jnp.cos(x), rtol=1e-6)
    np.testing.assert_allclose(jit(lambda p, t: p(t))(push, jnp.ones(2))["y"], w.value * jnp.cos(x), rtol=1e-6)


def test_jvp_errors_describe_primals():
    with pytest.raises(
        TypeError, match="jvp: primals must be a tuple or a list with an item for each argument of .*, got float"
    ):
        statetx.jvp(lambda x: x, 1.0, (1.0,))
    with pytest.raises(TypeError, match="jvp: tangents must be a tuple or a list"):
        statetx.jvp(lambda x: x, (1.0,), jnp.ones(1))
