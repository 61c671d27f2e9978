"""`jax.export` of functionalised steps: to bytes and back, with the same numbers."""

import functools

import brainstate
import jax
import jax.numpy as jnp
import libraries
import numpy as np
import pytest
from flax import nnx
from jax import export

import statetx
from helpers import in_turn
from statetx import policies


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
        w = libraries.get(self.w)
        w = w["w"] if isinstance(w, dict) else w
        libraries.put(self.h, jnp.tanh(w @ libraries.get(self.h) + x))
        return libraries.get(self.h)


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


# -- symbolic sizes --------------------------------------------------------------------------------------------------


def scanned(checkpoint, w, x, num=40):
    step = lambda h, i: (jnp.tanh(h @ w) + i, None)
    h = statetx.scan(step, x, jnp.arange(num) / num, checkpoint=checkpoint)[0]
    return statetx.vmap(jnp.square, axis_size=x.shape[0])(h).sum()


SYMBOLIC = {
    "none": functools.partial(scanned, None),
    "slots": functools.partial(scanned, policies.Slots(3)),
    "slots with dots": functools.partial(scanned, policies.Slots(3, policy=policies.dots)),
    "levels": functools.partial(scanned, policies.Levels(2)),
    "auto": functools.partial(scanned, "auto", num=300),
    "while": lambda w, x: statetx.while_loop(
        lambda c: c[0] < 9, lambda c: (c[0] + 1, jnp.tanh(c[1] @ w)), (0, x), checkpoint=2
    )[1].sum(),
    "remat": statetx.remat(functools.partial(scanned, None), policy=policies.dots | policies.masks),
}


@pytest.mark.sample
@pytest.mark.parametrize("name", in_turn(SYMBOLIC))
def test_gradients_of_a_symbolic_batch(name):
    w, gradient = jnp.eye(4) / 2, jax.grad(SYMBOLIC[name])
    batch = jax.ShapeDtypeStruct(export.symbolic_shape("b, 4"), jnp.float32)
    exported = export.export(jax.jit(gradient))(w, batch)
    for size in (2, 5):
        x = jnp.linspace(-1.0, 1.0, 4 * size).reshape(size, 4)
        np.testing.assert_allclose(exported.call(w, x), gradient(w, x), rtol=1e-5, atol=1e-6)


def test_auto_stores_less_where_a_size_is_not_known():
    def loss(w, x):
        step = lambda c, _: ((jnp.tanh(c[0] @ w), 0.5 * c[1]), None)
        h, scale = statetx.scan(step, (x, 2.0), None, 9, checkpoint="auto")[0]
        return scale * h.sum()

    def num_loops(shape):
        types = jnp.eye(4), jax.ShapeDtypeStruct(export.symbolic_shape(shape), jnp.float32)
        return str(jax.make_jaxpr(jax.grad(loss))(*types)).count("while[")

    assert num_loops("b, 4") > num_loops("2, 4") == 0


@pytest.mark.parametrize(
    "loss, message",
    [
        (
            functools.partial(scanned, policies.Budget("10KiB")),
            r"Budget\('10KiB'\) needs the sizes of the carry, and f32\[b,4\] has a symbolic",
        ),
        (
            statetx.remat(functools.partial(scanned, None), policy=policies.larger_than("1KiB")),
            r"the size of f32\[b,4\] is not known",
        ),
        (statetx.microbatch(functools.partial(scanned, None), 3, argnums=1), "x .*has the symbolic length b"),
        (statetx.chunked(functools.partial(scanned, None), (None, 0), 2), "x .*has the symbolic length b along axis 0"),
    ],
    ids=["budget", "larger_than", "microbatch", "chunked"],
)
def test_what_compares_sizes_names_the_symbolic_one(loss, message):
    batch = jax.ShapeDtypeStruct(export.symbolic_shape("b, 4"), jnp.float32)
    with pytest.raises((statetx.PolicyError, ValueError), match=message):
        export.export(jax.jit(jax.grad(loss)))(jnp.eye(4), batch)
