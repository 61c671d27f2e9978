"""Messages: the printed form of objects, and suggestions for misspelled names."""

import functools
import re

import jax.numpy as jnp
import optax
import pytest

import statetx
from statetx import Param, State, policies

W = Param(jnp.ones((2, 3)), name="w")


class Layer:
    def __init__(self):
        self.weight, self.count = Param(jnp.ones(2)), State(jnp.zeros(2))

    @statetx.remat(policy="dots")
    def step(self, x):
        return x * self.weight.value


def f(x):
    return x


@pytest.mark.parametrize(
    "obj, text",
    [
        (State({"a": jnp.ones(2), "b": 1.5}), "State({'a': f32[2], 'b': float})"),
        (State([jnp.ones(2)] * 40), "State(list of 40 leaves)"),
        (Layer.step, "statetx.remat(Layer.step, policy='dots')"),
        (statetx.remat(functools.partial(f)), "statetx.remat(f)"),
        (statetx.remat(f, states=False, fence=None), "statetx.remat(f, fence=None, states=False)"),
        (
            statetx.jit(f, donate_states=True, static_argnums=0),
            "statetx.jit(f, static_argnums=0, donate_states=True)",
        ),
        (statetx.grad(f, wrt=Param), "statetx.grad(f, wrt=Param)"),
        (statetx.value_and_grad(f, wrt=[W]), "statetx.value_and_grad(f, wrt=[Param(f32[2,3], name='w')])"),
        (statetx.vmap(f, states={Param: 0}), "statetx.vmap(f, states={Param: 0})"),
        (statetx.jacrev(f, argnums=1), "statetx.jacrev(f, argnums=1)"),
        (statetx.functionalize(f), "statetx.functionalize(f)"),
        (statetx.trace_states(f), "statetx.trace_states(f)"),
        (policies.states(statetx.Not(Param)), "states(Not(Param))"),
    ],
)
def test_repr(obj, text):
    assert repr(obj) == text


def test_states_table_shortens_long_values():
    memory = State(optax.adam(0.1).init({f"layer{i}": jnp.ones(2) for i in range(8)}), name="memory")
    table = str(statetx.trace_states(lambda: memory.value)())
    assert "tuple of 17 leaves" in table and max(map(len, table.split("\n"))) < 100


def loss(x):
    return (W.value.sum() * x).sum()


def layer_loss(layer, x):
    return (layer.weight.value * x).sum()


@pytest.mark.parametrize(
    "call, error, meant",
    [
        (lambda: statetx.remat(f, fence="barier"), TypeError, "barrier"),
        (lambda: statetx.remat(f, polciy="dots"), TypeError, "policy"),
        (lambda: statetx.remat(f, policy="dot"), statetx.PolicyError, "dots"),
        (lambda: policies.names("h", missing="warning"), statetx.PolicyError, "warn"),
        (lambda: policies.offload("h", otherwise="saved"), statetx.PolicyError, "save"),
        (lambda: statetx.plan(loss, 1.0, budget="1MiB", objective="flop"), ValueError, "flops"),
        (lambda: statetx.jit(f, static_argnames="xs"), statetx.StaticArgumentError, "x"),
        (lambda: statetx.jit(layer_loss, donate_argnames="laier"), statetx.StaticArgumentError, "layer"),
        (lambda: statetx.grad(layer_loss, wrt="layer.wieght")(Layer(), 1.0), statetx.StateFilterError, "layer.weight"),
        (
            lambda: statetx.functionalize(layer_loss)({"weight": 1.0}, Layer(), 1.0),
            statetx.StateAccessError,
            "layer.weight",
        ),
    ],
)
def test_nearest_name_is_suggested(call, error, meant):
    with pytest.raises(error, match=re.escape(f"Did you mean {meant!r}?")):
        call()


@pytest.mark.parametrize("transform", ["scan", "vmap"])
def test_path_that_selects_no_state_raises(transform):
    layer = Layer()

    def run(states):
        if transform == "scan":
            return statetx.scan(lambda c, x: (c, layer.count.value * x), None, jnp.ones(2), states=states)
        return statetx.vmap(lambda x: layer.count.value * x, states=states)(jnp.ones(2))

    with pytest.raises(
        statetx.StateFilterError, match=r"states=\{'layer.cuont': ...\} selects no state.*'layer.count'\?"
    ):
        run({"layer.cuont": 0})
    run({"layer.c*": 0})
    run({State: 0, "layer.count": 0, Param: 0})  # shadowed by a type; a type need not occur


def test_donated_arguments_are_named_in_errors():
    with pytest.raises(statetx.StaticArgumentError, match=r"^donate_argnums=3 is out of range"):
        statetx.jit(f, donate_argnums=3)
    with pytest.raises(statetx.StaticArgumentError, match=r"^donate_argnames='laier'"):
        statetx.jit(layer_loss, donate_argnames="laier")
