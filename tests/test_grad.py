"""`grad`, `value_and_grad`, `vjp`: structures, auxiliary data, errors. The laws are in `test_laws.py`."""

import functools

import brainstate
import brainunit as u
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import statetx
from helpers import Counted, assert_close, transforms_of_brainstate

A, B = jnp.array([1.0, -2.0]), jnp.array([[0.5, 1.0], [2.0, -1.0]])


class Model:
    def __init__(self):
        self.a = statetx.Param(A)
        self.b = statetx.Param({"m": B, "s": 3.0})
        self.n = statetx.State(0)

    def loss(self, x, y=1.0):
        self.n.value += 1
        b = self.b.value
        return jnp.sum(jnp.sin(b["m"] @ (self.a.value * x))) * b["s"] * y


def reference(a, b, x, y=1.0):
    return jnp.sum(jnp.sin(b["m"] @ (a * x))) * b["s"] * y


X = jnp.array([0.3, 0.9])
GA, GB, GX, GY = jax.grad(reference, (0, 1, 2, 3))(A, {"m": B, "s": 3.0}, X, 1.0)


close = functools.partial(assert_close, rtol=1e-6)


def test_gradients_have_the_structure_of_wrt():
    m = Model()
    close(statetx.grad(m.loss)(X), GX)
    close(statetx.grad(m.loss, np.arange(2))(X, 1.0), (GX, GY))
    close(statetx.grad(m.loss, argnums=-1)(X, 1.0), GY)
    close(statetx.grad(m.loss, wrt=m.a)(X), GA)
    close(statetx.grad(m.loss, wrt=m.b)(X), GB)
    close(statetx.grad(m.loss, wrt=[m.b, m.a])(X), [GB, GA])
    close(statetx.grad(m.loss, wrt={"k": m.a, "deep": (m.b,)})(X), {"k": GA, "deep": (GB,)})
    close(statetx.grad(m.loss, wrt=statetx.states(m, statetx.Param))(X), {"a": GA, "b": GB})
    close(statetx.grad(m.loss, argnums=0, wrt=m.a)(X), (GA, GX))
    close(statetx.grad(m.loss, argnums=(1, 0), wrt=[m.a])(X, 1.0), ([GA], (GY, GX)))
    assert m.n.value == 10


@pytest.mark.parametrize("filter", [statetx.Param, "[ab]", ["a", "b"], lambda path, s: path != "n"])
def test_filters_select_among_reachable_states(filter):
    m = Model()
    close(statetx.grad(m.loss, wrt=filter)(X), {"a": GA, "b": GB})
    named = statetx.grad(lambda x: m.loss(x), wrt=statetx.Param)(X)
    close(named, {"m.a": GA, "m.b": GB})
    passed = statetx.grad(lambda model, x: model.loss(x), wrt=statetx.Param)(m, X)
    close(passed, {"model.a": GA, "model.b": GB})


def test_value_and_aux():
    m = Model()

    def f(x):
        return m.loss(x), {"label": "aux", "twice": 2 * x, "n": m.n.value}

    value = reference(A, {"m": B, "s": 3.0}, X)
    v, g = statetx.value_and_grad(m.loss, wrt=m.a)(X)
    close((v, g), (value, GA))
    (v, aux), g = statetx.value_and_grad(f, has_aux=True)(X)
    close((v, g), (value, GX))
    assert aux["label"] == "aux" and aux["n"] == 2
    np.testing.assert_array_equal(aux["twice"], 2 * X)
    g, aux = statetx.grad(f, wrt=m.a, has_aux=True)(X)
    close(g, GA)


def test_as_decorators():
    n = statetx.State(0)

    @statetx.grad
    def f(x):
        n.value += 1
        return x**2

    @statetx.value_and_grad(argnums=1, has_aux=True)
    def g(x, y):
        return x * y, x

    assert f(3.0) == 6 and n.value == 1
    assert g(3.0, 2.0) == ((6.0, 3.0), 3.0)

    class M:
        w = statetx.Param(2.0)

        @statetx.grad(argnums=1)
        def slope(self, x):
            return self.w.value * x

    assert M().slope(1.0) == 2.0


def test_untouched_target_has_zero_gradient():
    s = statetx.Param(jnp.ones(3))
    close(statetx.grad(lambda x: x**2, wrt=s)(2.0), jnp.zeros(3))


def test_non_differentiable_targets_raise():
    m = Model()
    with pytest.raises(statetx.StateValueError, match="a str, which is not an array"):
        statetx.grad(m.loss, wrt=statetx.State("text"))(X)
    for argnums in (0, 0), (0, -2):
        with pytest.raises(ValueError, match=r"names an argument of .*loss twice"):
            statetx.grad(m.loss, argnums=argnums)(X, 1.0)
    n, values = m.n.value, (m.a.value, m.b.value)
    with pytest.raises(statetx.FunctionError, match="returns a scalar"):
        statetx.grad(lambda x: (m.loss(x), x)[1])(X)
    assert m.n.value == n and m.a.value is values[0] and m.b.value is values[1]


def test_vjp():
    m = Model()
    count = Counted(lambda x, y: {"out": m.loss(x) * y, "x": x * y, "tag": "t"})
    out, pullback = statetx.vjp(count, X, 2.0)
    expected, reference_pullback = jax.vjp(
        lambda x, y: {"out": reference(A, {"m": B, "s": 3.0}, x) * y, "x": x * y}, X, 2.0
    )
    assert out["tag"] == "t"
    close({k: out[k] for k in ("out", "x")}, expected)
    for scale in (1.0, 3.0):
        cotangent = {"out": jnp.float32(scale), "x": X * scale}
        close(pullback({**cotangent, "tag": "t"}), reference_pullback(cotangent))
    assert count.runs == 1 and m.n.value == 1
    with pytest.raises(TypeError, match="needs a cotangent in the structure"):
        pullback(1.0)


def test_vjp_with_states_and_aux():
    m = Model()
    out, pullback, aux = statetx.vjp(lambda x: (m.loss(x), m.n.value), X, wrt={"a": m.a}, has_aux=True)
    of_states, (of_x,) = pullback(1.0)
    close(of_states, {"a": GA})
    close(of_x, GX)
    assert aux == 1


@transforms_of_brainstate
def test_brainstate_targets():
    net = brainstate.nn.Linear(2, 3)
    w = statetx.states(net, brainstate.ParamState)
    grads = statetx.grad(lambda x: (net(x) ** 2).sum(), wrt=w)(X)
    expected = brainstate.transform.grad(lambda x: (net(x) ** 2).sum(), w)(X)
    close(grads, expected)


def test_integer_arguments_pass_when_not_differentiated():
    s = statetx.State(jnp.zeros((), jnp.int32))

    def f(x, n, mode):
        s.value = s.value + n
        return x ** int(n) if mode == "power" else x

    assert float(statetx.grad(f)(2.0, 3, "power")) == 12.0 and int(s.value) == 3


def test_integers_get_float0_where_they_are_allowed():
    count, w = statetx.Param(jnp.arange(3)), statetx.Param(A)

    def loss(x):
        return (count.value * 1.0).sum() * x * w.value.sum()

    of_count = statetx.grad(loss, wrt=count, allow_int=True)(2.0)
    assert of_count.dtype == jax.dtypes.float0 and of_count.shape == (3,)
    grads = statetx.grad(loss, wrt=statetx.Param, allow_int=True)(2.0)
    assert grads["count"].dtype == jax.dtypes.float0
    np.testing.assert_allclose(grads["w"], jnp.full(2, 6.0))
    jacobian = statetx.jacrev(loss, allow_int=True, wrt=count)(2.0)
    assert jacobian.dtype == jax.jacrev(lambda count: (count * 1.0).sum(), allow_int=True)(count.value).dtype
    with pytest.raises(statetx.StateValueError, match="gradients need floating-point"):
        statetx.grad(loss, wrt=count)(2.0)
    with pytest.raises(statetx.StateValueError, match="gradients need floating-point"):
        statetx.grad(loss, wrt=statetx.Param)(2.0)


@pytest.mark.parametrize("jit", [jax.jit, statetx.jit], ids=["jax", "statetx"])
def test_pullback_crosses_a_compiled_function(jit):
    w = statetx.Param(jnp.array([1.0, 2.0]))

    def f(x, flag):
        return {"y": w.value * jnp.sin(x["a"]), "flag": flag}

    def start(x):
        return statetx.vjp(f, {"a": x}, "text", wrt={"w": w})

    x, cotangent = jnp.array([0.3, 0.7]), jnp.array([1.0, -1.0])
    _, plain = start(x)
    expected = plain({"y": cotangent, "flag": "text"})
    _, pullback = jit(lambda x: (0, start(x)[1]))(x)
    for out in (
        pullback({"y": cotangent, "flag": "text"}),
        jit(lambda p, c: p({"y": c, "flag": "t"})[0])(pullback, cotangent),
    ):
        out = out if isinstance(out, tuple) else (out, expected[1])
        np.testing.assert_allclose(out[0]["w"], expected[0]["w"])
        np.testing.assert_allclose(out[1][0]["a"], expected[1][0]["a"])
    assert "pullback of" in repr(pullback)
    with pytest.raises(TypeError, match=r"pullback of .*f needs a cotangent in the structure"):
        pullback(cotangent)


def test_loss_with_a_unit_or_in_a_container_is_named():
    w = statetx.Param(jnp.ones(3))
    with pytest.raises(statetx.FunctionError, match=r"returned the Quantity f32\[\] mV\.\nFix: return its magnitude"):
        statetx.grad(lambda: w.value.sum() * u.mV, wrt=w)()
    with pytest.raises(statetx.FunctionError, match=r"returned the pytree \{'a': f32\[\]\}\.\nFix: return one number"):
        statetx.grad(lambda: {"a": w.value.sum()}, wrt=w)()


def test_cotangent_of_a_bool_is_that_of_jax():
    pick = lambda pred, x: jax.lax.cond(pred, lambda x: 2 * x, lambda x: x, x)
    expected = jax.vjp(pick, True, 1.0)[1](1.0)
    found = statetx.vjp(pick, True, 1.0)[1](1.0)
    assert [x.dtype for x in found] == [x.dtype for x in expected] and found[1] == expected[1] == 2


def test_a_loss_that_returns_a_dict_of_brainstate_is_refused():
    """It raises KeyError for an attribute that it does not have."""
    layer = brainstate.nn.Linear(2, 2)
    with pytest.raises(statetx.FunctionError, match="needs a function that returns a scalar: .*the pytree"):
        statetx.grad(lambda x: layer.states())(1.0)


@pytest.mark.parametrize("x", [3.0, np.float32(3)], ids=["weak", "strong"])
@pytest.mark.parametrize("f", [jnp.sin, lambda x: 2 * x, lambda x: jnp.float32(2) * x], ids=["sin", "weak", "strong"])
def test_number_as_cotangent_is_of_a_weak_type(f, x):
    ours, theirs = (tx.vjp(f, x)[1](1.0)[0] for tx in (statetx, jax))
    assert jax.typeof(ours) == jax.typeof(theirs) and float(ours) == float(theirs)
