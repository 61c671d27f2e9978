"""`jax.export` of functionalised steps: to bytes and back, with the same numbers."""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import export

import statetx


class Model:
    """A recurrent cell with a weight, a memory and a count, in a rematerialized loop."""

    def __init__(self, kind):
        if kind == "brainstate":
            self.w, self.h = brainstate.ParamState({"w": W}), brainstate.HiddenState(H)
        elif kind == "nnx":
            self.w, self.h = nnx.Param(W), nnx.BatchStat(H)
        else:
            self.w, self.h = statetx.Param(W), statetx.State(H)
        self.count = statetx.State(jnp.zeros((), jnp.int32))

    @statetx.remat
    def step(self, x):
        self.count.value += 1
        w = self.w.get_value() if isinstance(self.w, nnx.Variable) else self.w.value
        w = w["w"] if isinstance(w, dict) else w
        if isinstance(self.h, nnx.Variable):
            self.h.set_value(jnp.tanh(w @ self.h.get_value() + x))
            return self.h.get_value()
        self.h.value = jnp.tanh(w @ self.h.value + x)
        return self.h.value


W, H = jnp.array([[0.5, -0.25], [0.125, 1.0]]), jnp.array([0.1, 0.2])
XS = jnp.linspace(-1.0, 1.0, 6).reshape(3, 2)


def trained(model):
    def train(xs):
        def loss():
            return statetx.scan(lambda c, x: (c, model.step(x)), None, xs)[1].sum()

        value, grads = statetx.value_and_grad(loss, wrt={"w": model.w})()
        return value, jax.tree.leaves(grads)

    return train


@pytest.mark.parametrize("kind", ["statetx", "brainstate", "nnx"])
def test_exported_step_gives_equal_results(kind):
    train = trained(Model(kind))
    pure = statetx.functionalize(train)
    values = pure.values(XS)
    size = export.symbolic_shape("t")[0]
    data = export.export(jax.jit(pure), platforms=["cpu", "cuda"])(
        values, jax.ShapeDtypeStruct((size, 2), jnp.float32)
    ).serialize(vjp_order=1)
    loaded = export.deserialize(data)
    expected, expected_values = jax.jit(pure)(values, XS)
    out, new_values = loaded.call(values, XS)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), (out, new_values), (expected, expected_values)
    )
    assert int(new_values["model.count"]) == 3 and not np.allclose(new_values["model.h"], H)
    of_xs = [jax.grad(lambda xs, f=f: f(values, xs)[0][0])(XS) for f in (loaded.call, pure)]
    np.testing.assert_allclose(*of_xs, rtol=1e-5)
    assert np.abs(of_xs[0]).min() > 0


def test_states_by_path_are_updated_from_the_results():
    model = Model("statetx")
    pure = statetx.functionalize(trained(model))
    _, values = export.deserialize(export.export(jax.jit(pure))(pure.values(XS), XS).serialize()).call(
        pure.values(XS), XS
    )
    for path, state in pure.states(XS).items():
        state.value = values[path]
    assert int(model.count.value) == 3
