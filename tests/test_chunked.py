"""Chunked losses: values and gradients of the whole loss, in the memory of one chunk of logits."""

import functools
import pickle

import brainstate
import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import statetx
from helpers import in_turn

RNG = np.random.default_rng(0)
EMBEDDING = jnp.asarray(RNG.normal(size=(16, 300)) / 4, jnp.float32)
HIDDEN = jnp.asarray(RNG.normal(size=(2, 50, 16)), jnp.float32)
LABELS = jnp.asarray(RNG.integers(300, size=(2, 50)))
MASK = jnp.asarray(RNG.random((2, 50)) < 0.7, jnp.float32).at[:, 20:30].set(0)  # whole chunks of it are 0


def near(actual, desired, rtol=2e-5):
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=rtol, atol=1e-6), actual, desired)


def entropies(hidden, labels, embedding=EMBEDDING):
    return optax.softmax_cross_entropy_with_integer_labels(hidden @ embedding, labels)


def mean(hidden, labels, embedding=EMBEDDING):
    return jnp.mean(entropies(hidden, labels, embedding))


def both(fun, *args):
    """Value and gradients with respect to the first and the last argument."""
    return jax.value_and_grad(fun, (0, len(args) - 1))(*args)


# -- values and gradients ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", in_turn([1, 7, 10, 1000]))
def test_mean_equals_the_whole_loss(size):
    ours = statetx.chunked(mean, axis=(1, 1, None), size=size)
    near(both(ours, HIDDEN, LABELS, EMBEDDING), both(mean, HIDDEN, LABELS, EMBEDDING))


@pytest.mark.slow
def test_keyword_arguments_are_whole():
    ours = statetx.chunked(mean, axis=1, size=9)
    near(
        jax.grad(lambda e: ours(HIDDEN, LABELS, embedding=e))(EMBEDDING),
        jax.grad(lambda e: mean(HIDDEN, LABELS, e))(EMBEDDING),
    )


@pytest.mark.slow
def test_sum_of_several_outputs_and_masks():
    def sums(hidden, labels, mask, embedding):
        of_tokens = entropies(hidden, labels, embedding)
        return jnp.sum(of_tokens * mask), jnp.sum(mask)

    def masked(hidden, labels, mask, embedding):
        total, num = sums(hidden, labels, mask, embedding)
        return total / num

    args = HIDDEN, LABELS, MASK, EMBEDDING
    axes = (1, 1, 1, None)

    def by_sums(*args):
        total, num = statetx.chunked(sums, axis=axes, size=9, reduce="sum")(*args)
        return total / num

    def mean_of_chunk(*args):
        total, num = sums(*args)
        return total / num

    by_weight = statetx.chunked(mean_of_chunk, axis=axes, size=9, weight=lambda h, y, mask, e: mask.sum())
    near(both(by_sums, *args), both(masked, *args))
    near(both(by_weight, *args), both(masked, *args))
    of_chunks = statetx.chunked(mean_of_chunk, axis=axes, size=5)
    assert not np.isclose(of_chunks(*args), masked(*args))  # the mean of the chunks' means is another number


@pytest.mark.slow
def test_a_value_for_each_token():
    tokens = HIDDEN.reshape(100, 16), LABELS.reshape(100)

    def ours(h, y, e):
        return jnp.sum(statetx.chunked(entropies, axis=(0, 0, None), size=9, reduce="concat")(h, y, e) ** 2)

    near(both(ours, *tokens, EMBEDDING), both(lambda *a: jnp.sum(entropies(*a) ** 2), *tokens, EMBEDDING))


def test_flags_lists_and_negative_axes():
    def loss(batch, scale, training):
        assert training is True and scale == 2.0
        return scale * mean(batch["hidden"], batch["labels"][0])

    batch = {"hidden": jnp.moveaxis(HIDDEN, 1, 0), "labels": [LABELS.T]}
    near(statetx.chunked(loss, 0, 9)(batch, 2.0, True), loss(batch, 2.0, True))

    def per_example(x):
        return jnp.mean(x**2)

    near(statetx.chunked(per_example, -1, 7)(HIDDEN), per_example(HIDDEN))


# -- memory --------------------------------------------------------------------------------------------------------


def compiled(fun, *args):
    return jax.jit(fun).lower(*args).compile()


@pytest.mark.parametrize(
    ("chunk", "options"),
    [(mean, {}), (lambda *args: jnp.sum(entropies(*args)), {"reduce": "sum"}), (entropies, {"reduce": "concat"})],
)
def test_memory_is_that_of_one_chunk(chunk, options):
    """Of 16 chunks: at most three arrays of one chunk's logits, where the whole loss has two of all."""
    hidden, labels, embedding = jnp.ones((2048, 8)), jnp.zeros(2048, int), jnp.ones((8, 2000))
    logits = 2048 * 2000 * 4
    ours = statetx.chunked(chunk, axis=(0, 0, None), size=128, **options)

    def size(f):
        return (
            compiled(jax.value_and_grad(lambda *a: jnp.sum(f(*a)), (0, 2)), hidden, labels, embedding)
            .memory_analysis()
            .temp_size_in_bytes
        )

    assert size(chunk) > 1.9 * logits
    assert size(ours) < 3.2 / 16 * logits + 2 * embedding.nbytes
    forward = compiled(ours, hidden, labels, embedding).memory_analysis().temp_size_in_bytes
    assert forward < 1.2 / 16 * logits


def num_products(fun, *args):
    """Matrix products in a program, loops counted with their lengths."""

    def count(jaxpr, times):
        total = 0
        for eqn in jaxpr.eqns:
            total += times * (eqn.primitive.name == "dot_general")
            for inner in jax.extend.core.jaxprs_in_params(eqn.params):
                total += count(inner, times * eqn.params.get("length", 1))
        return total

    return count(jax.make_jaxpr(fun)(*args).jaxpr, 1)


def test_no_chunk_is_computed_twice():
    """Three products a chunk, as the whole loss: the logits, and the gradients of hidden and embedding."""
    args = HIDDEN, LABELS, EMBEDDING

    def gradient(f):
        return jax.value_and_grad(f, (0, 2))

    assert num_products(gradient(mean), *args) == 3
    assert num_products(gradient(statetx.chunked(mean, axis=(1, 1, None), size=10)), *args) == 3 * 5


# -- language models -----------------------------------------------------------------------------------------------


class NnxHead(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(300, 16, rngs=rngs)
        self.block = nnx.Linear(16, 16, rngs=rngs)

    def hidden(self, tokens):
        x = self.embed(tokens)
        return x + jnp.tanh(self.block(x))

    def loss(self, hidden, labels):
        return optax.softmax_cross_entropy_with_integer_labels(self.embed.attend(hidden), labels).mean()


class BrainstateHead(brainstate.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = brainstate.nn.Embedding(300, 16)
        self.head = brainstate.nn.Linear(16, 300, b_init=None)

    def hidden(self, tokens):
        return jnp.tanh(self.embed(tokens))

    def loss(self, hidden, labels):
        return optax.softmax_cross_entropy_with_integer_labels(self.head(hidden), labels).mean()


@pytest.mark.parametrize("make", [lambda: NnxHead(nnx.Rngs(0)), BrainstateHead])
def test_language_model_of_another_library(make):
    """The embedding is read before the loss, too: nnx ties it to the head."""
    model = make()
    states = statetx.states(model, filter=nnx.Param if isinstance(model, nnx.Module) else brainstate.ParamState)

    def whole(tokens):
        return model.loss(model.hidden(tokens), jnp.roll(tokens, -1, 1))

    def parts(tokens):
        return statetx.chunked(model.loss, axis=1, size=8)(model.hidden(tokens), jnp.roll(tokens, -1, 1))

    expected = statetx.value_and_grad(whole, wrt=states)(LABELS)
    near(statetx.jit(statetx.value_and_grad(parts, wrt=states))(LABELS), expected)


@pytest.mark.thorough
def test_sharded_batches():
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = jax.make_mesh((2,), ("d",), axis_types=(kind,))
        with jax.set_mesh(mesh):
            sharding = NamedSharding(mesh, P("d"))
            hidden, labels = jax.device_put(HIDDEN, sharding), jax.device_put(LABELS, sharding)

            def one_hot(h, y, e):
                return -jnp.mean(
                    jnp.sum(jax.nn.log_softmax(h @ e) * jax.nn.one_hot(y, 300), -1)
                )  # explicit axes: no gather along a sharded batch

            ours = statetx.chunked(one_hot, axis=(1, 1, None), size=9)
            actual = jax.jit(jax.value_and_grad(ours, (0, 2)))(hidden, labels, EMBEDDING)
        near(actual, both(mean, HIDDEN, LABELS, EMBEDDING))


# -- arguments -----------------------------------------------------------------------------------------------------


@statetx.chunked(size=5)
def module_loss(x):
    """A loss."""
    return jnp.mean(x)


def test_as_decorator_with_name_and_pickle():
    assert module_loss.__name__ == "module_loss" and module_loss.__doc__ == "A loss."
    assert pickle.loads(pickle.dumps(module_loss)) is module_loss
    ours = statetx.chunked(mean, (1, 1, None), 9)
    assert repr(ours) == "statetx.chunked(mean, axis=(1, 1, None), size=9)"
    near(pickle.loads(pickle.dumps(ours))(HIDDEN, LABELS, EMBEDDING), mean(HIDDEN, LABELS))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: statetx.chunked(mean, 0, 3)(HIDDEN, EMBEDDING), r"differ in length: hidden .*has 2 .*labels .*has 16"),
        (lambda: statetx.chunked(mean, 2, 3)(HIDDEN, LABELS), r"labels is a i32\[2,50\], which has no axis 2"),
        (lambda: statetx.chunked(mean, (0,), 3)(HIDDEN, LABELS), r"has 1 entries, and there are 2 positional"),
        (lambda: statetx.chunked(mean, 0, 3)(hidden=HIDDEN, labels=LABELS), r"no argument holds an array"),
        (lambda: statetx.chunked(mean, "0", 3), r"neither an axis nor one for each"),
        (lambda: statetx.chunked(mean, 0, 0), r"size=0 must be a whole number"),
        (lambda: statetx.chunked(mean, 0, 2.5), r"size=2.5 must be a whole number"),
        (lambda: statetx.chunked(mean, 0, 3, chunk_size=3), r"give size="),
        (lambda: statetx.chunked(mean, 0, 3, reduce="average"), r"reduce='average' is not one of"),
    ],
)
def test_errors_name_argument_and_fix(call, message):
    with pytest.raises((statetx.StaticArgumentError, ValueError, TypeError), match=message):
        call()
