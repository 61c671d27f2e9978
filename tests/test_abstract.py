"""`make_jaxpr` and `eval_shape`."""

import types

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import statetx

X = jnp.arange(3.0)


class Cell:
    def __init__(self):
        self.last = statetx.State(jnp.zeros(3))
        self.w = statetx.Param(jnp.full(3, 2.0))
        self.count = statetx.State({"n": jnp.zeros((), jnp.int32), "mode": "train"})
        self.runs = 0

    def __call__(self, x, scale=1.0):
        self.runs += 1
        self.last.value = x  # written and never read
        count = self.count.value
        self.count.value = {**count, "n": count["n"] + 1}
        return self.w.value * x * scale


def test_make_jaxpr_has_inputs_and_outputs_in_the_order_of_values():
    cell = Cell()
    values = statetx.functionalize(cell).values(X)
    assert list(values) == ["last", "count", "w"]
    cell.runs = 0
    jaxpr = statetx.make_jaxpr(cell)(X, scale=3.0)
    assert cell.runs == 1
    assert [v.aval.shape for v in jaxpr.jaxpr.invars] == [(3,), (), (3,), (3,), ()]
    outs = jax.extend.core.jaxpr_as_fun(jaxpr)(jnp.ones(3), jnp.int32(4), jnp.full(3, 5.0), X, 2.0)
    for out, expected in zip(outs, (10 * X, X, 5, jnp.full(3, 5.0)), strict=True):
        np.testing.assert_array_equal(out, expected)
    assert int(cell.count.value["n"]) == 0 and not cell.last.value.any()
    jax.extend.core.check_jaxpr(jaxpr.jaxpr)


@pytest.mark.parametrize("x", [jax.ShapeDtypeStruct((3,), "float32"), jax.typeof(X)], ids=lambda x: type(x).__name__)
def test_make_jaxpr_takes_types_for_arrays_and_keeps_constants(x):
    table = jnp.array([1.0, 2.0, 4.0])
    cell = Cell()
    jaxpr = statetx.make_jaxpr(lambda flag, x: cell(x) * table if flag is None else x)(None, x)
    assert [c is table for c in jaxpr.consts] == [True]
    outs = jax.extend.core.jaxpr_as_fun(jaxpr)(jnp.zeros(3), jnp.int32(0), jnp.ones(3), X)
    np.testing.assert_array_equal(outs[0], X * table)


def test_make_jaxpr_makes_refs_explicit():
    ref = jax.new_ref(jnp.zeros(3))

    def f(x):
        ref[...] = ref[...] + x
        return x.sum()

    jaxpr = statetx.make_jaxpr(f)(X)
    assert not jaxpr.effects
    out, new = jax.extend.core.jaxpr_as_fun(jaxpr)(jnp.ones(3), X)
    assert float(out) == 3.0 and new.tolist() == [1.0, 2.0, 3.0]
    assert not ref[...].any()


def test_make_jaxpr_refuses_a_state_that_outlives_it():
    made = []
    with pytest.raises(statetx.CreatedStateError, match="make_jaxpr"):
        statetx.make_jaxpr(lambda x: made.append(statetx.State(x)))(X)


def test_eval_shape_returns_objects_without_arrays_unchanged():
    cell = Cell()
    typed, made = types.SimpleNamespace(shape=(3,), dtype=np.float32), jax.ShapeDtypeStruct((3,), "float32")
    assert statetx.eval_shape(lambda x, dtype: (cell(x), dtype), typed, np.float32) == (made, np.float32)
    assert cell.runs == 1 and int(cell.count.value["n"]) == 0


def test_eval_shape_of_a_constructor_returns_a_model_of_types():
    class Native:
        def __init__(self, width):
            self.w = statetx.Param(jnp.ones((2, width)))
            self.opt = statetx.State({"m": jnp.zeros(3), "step": 0})

    made = [
        statetx.eval_shape(lambda: Native(3)).w.value,
        statetx.eval_shape(lambda: brainstate.nn.Linear(2, 3)).weight.value["weight"],
        statetx.eval_shape(lambda: nnx.Linear(2, 3, rngs=nnx.Rngs(0))).kernel.get_value(),
    ]
    for value in made:
        assert isinstance(value, jax.ShapeDtypeStruct) and value.shape == (2, 3) and value.dtype == jnp.float32
    value = statetx.eval_shape(lambda: Native(3)).opt.value
    assert value["m"].shape == (3,) and value["step"].dtype == jnp.int32


class Pair:
    def __init__(self):
        self.w, self.m = statetx.Param(jnp.ones((3, 2))), statetx.State({"mean": jnp.zeros(2), "mode": "train"})
        self.keys = statetx.RngState(jax.random.key(0))

    def __call__(self, x):
        y = x @ self.w.value + jax.random.normal(self.keys.next(), (2,))
        self.m.value = {**self.m.value, "mean": self.m.value["mean"] + y}
        return y


class OfBrainstate(brainstate.nn.Linear):
    def __init__(self):
        super().__init__(3, 2)


@pytest.mark.parametrize("make", [Pair, OfBrainstate, lambda: nnx.Linear(3, 2, rngs=nnx.Rngs(0))])
def test_reports_on_a_model_of_types_equal_those_on_the_model(make):
    def loss(model, x):
        return jnp.mean(jnp.tanh(model(x)) ** 2)

    model, types = make(), statetx.eval_shape(make)
    for report in (
        statetx.measure,
        lambda *args: str(statetx.saved_residuals(*args)),
        lambda *args: str(statetx.trace_states(args[0])(*args[1:])),
        lambda *args: str(statetx.make_jaxpr(args[0])(*args[1:])),
        statetx.eval_shape,
    ):
        assert report(loss, types, X) == report(loss, model, X)
    assert all(isinstance(s.value, jax.ShapeDtypeStruct) for s in statetx.states(types, statetx.Param).values())


def test_make_jaxpr_accepts_static_arguments_and_returns_types():
    s = statetx.State(jnp.ones(2))

    def f(n, x):
        return {"y": s.value * x**n, "n": n}

    closed, shape = statetx.make_jaxpr(f, 0, return_shape=True)(2, jnp.ones(2))
    assert "integer_pow[y=2]" in str(closed) or "square" in str(closed)
    assert shape["y"].shape == (2,) and shape["n"].shape == ()
    assert len(closed.jaxpr.invars) == 2
    with pytest.raises(statetx.StaticArgumentError, match="static_argnums=2 is out of range"):
        statetx.make_jaxpr(f, 2)
