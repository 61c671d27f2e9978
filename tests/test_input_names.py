"""JAX's errors about traced values name the argument, or the state, that the value comes from."""

import jax
import jax.numpy as jnp
import pytest

import statetx

X = jnp.ones(3)
YES = jnp.bool_(True)


def choose(x, train):
    return x if train else 2 * x


def of(m, name):
    return getattr(m if m is statetx else jax.lax, name)


CALLS = {
    "jit": lambda m: m.jit(choose)(X, YES),
    "jit by keyword": lambda m: m.jit(choose)(X, train=YES),
    "jit of a dict": lambda m: m.jit(lambda d: choose(d["x"], d["train"]))({"x": X, "train": YES}),
    "jit, static before": lambda m: m.jit(lambda n, x, train: choose(x, train), static_argnums=0)(2, X, YES),
    "jit, donated before": lambda m: m.jit(choose, donate_argnums=0)(jnp.ones(3), YES),
    "jit of a method": lambda m: m.jit(Model().step)(X, YES),
    "jit, *args": lambda m: m.jit(lambda *args: choose(*args))(X, YES),
    "remat": lambda m: m.grad(lambda x: m.checkpoint(choose)(x, YES).sum())(X),
    "make_jaxpr": lambda m: m.make_jaxpr(choose)(X, YES),
    "eval_shape": lambda m: m.eval_shape(choose, X, YES),
    "grad in jit": lambda m: m.jit(m.grad(lambda x, train: choose(x, train).sum()))(X, YES),
    "scan": lambda m: of(m, "scan")(lambda c, y: (choose(c, y), None), X, jnp.ones(3, bool)),
    "cond": lambda m: of(m, "cond")(YES, choose, choose, X, YES),
    "while_loop": lambda m: of(m, "while_loop")(lambda c: c[1], lambda c: (choose(*c), c[1]), (X, YES)),
    "fori_loop": lambda m: of(m, "fori_loop")(0, 3, lambda i, c: choose(c, i > 1), X),
}


class Model:
    def step(self, x, train):
        return choose(x, train)


def place(error):
    """The sentence about where the value comes from: the function, its file and line, the argument."""
    sentences = [line for line in str(error).splitlines() if "The error occurred" in line]
    function = sentences[0].partition("function ")[2].rpartition(" for ")[0]
    return function.rpartition("<locals>.")[2], sentences[0].rpartition("value")[2]


@pytest.mark.parametrize("name", CALLS)
def test_arguments_are_named_like_in_jax(name):
    with pytest.raises(jax.errors.TracerBoolConversionError) as wanted:
        CALLS[name](jax)
    with pytest.raises(jax.errors.TracerBoolConversionError) as raised:
        CALLS[name](statetx)
    assert "argument" in str(wanted.value)
    assert place(raised.value)[1] == place(wanted.value)[1]
    assert place(raised.value)[0].rpartition(" at ")[2] == place(wanted.value)[0].rpartition(" at ")[2]


@pytest.mark.parametrize("transform", [statetx.jit, lambda f: statetx.grad(statetx.remat(f)), statetx.make_jaxpr])
def test_states_are_named_by_path(transform):
    model = {"flags": {"train": statetx.State(YES)}}

    def loss(x):
        return choose(x, model["flags"]["train"].value).sum()

    with pytest.raises(jax.errors.TracerBoolConversionError) as raised:
        statetx.jit(transform(loss))(X)
    assert "the value of the argument model.flags.train." in str(raised.value)
