"""Programs whose memory has a known answer, before and after the change that `memory_profile` advises."""

import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import statetx
from statetx import policies

f32 = jnp.float32


def arrays(*shapes):
    return tuple(jax.ShapeDtypeStruct(shape, f32) for shape in shapes)


class Case(NamedTuple):
    """A function without and with the change, and what the report's first line must say."""

    before: object
    after: object  # or a function of the change's text that returns it
    args: tuple
    action: str
    named: str
    gradient: bool = True


class Layer:
    def __init__(self, width, hidden):
        self.w = statetx.Param(jnp.full((width, hidden), 1 / width))
        self.v = statetx.Param(jnp.full((hidden, width), 1 / hidden))

    def __call__(self, x):
        h = jnp.tanh(2.0 * jnp.sin(x @ self.w.value))
        return x + (jnp.cos(h) * h) @ self.v.value


class Normalized(Layer):
    """A layer that subtracts a mean, of which it keeps a running mean: a residual that the whole loss reads, too."""

    def __init__(self, width, hidden):
        super().__init__(width, hidden)
        self.mean = statetx.State(jnp.zeros((1, width)))

    def __call__(self, x):
        mean = x.mean(0, keepdims=True)
        self.mean.value = 0.9 * self.mean.value + 0.1 * mean
        h = jnp.tanh(2.0 * jnp.sin((x - mean) @ self.w.value))
        return x + (jnp.cos(h) * h) @ self.v.value


class Dropped(Layer):
    """A layer with dropout, whose key is that of its counter."""

    def __init__(self, width, hidden):
        super().__init__(width, hidden)
        self.count = statetx.State(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        self.count.value += 1
        h = jnp.tanh(2.0 * jnp.sin(x @ self.w.value))
        mask = jax.random.bernoulli(jax.random.fold_in(jax.random.key(0), self.count.value), 0.9, h.shape)
        return x + jnp.where(mask, jnp.cos(h) * h, 0.0) @ self.v.value


class Stack:
    """Layers, one after the other."""

    def __init__(self, layers):
        self.layers = layers

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def loss_of(layers, wrap=lambda layer: layer):
    def loss(x):
        for layer in layers:
            x = wrap(layer)(x)
        return (x**2).sum()

    return loss


def one_large_layer():
    layers = [Layer(64, hidden) for hidden in (64, 2048, 64, 64)]
    return Case(loss_of(layers), loss_of(layers, statetx.remat), arrays((512, 64)), "remat", "layers.1")


def many_layers():
    layers = [Layer(64, 256) for _ in range(12)]
    return Case(loss_of(layers), loss_of(layers, statetx.remat), arrays((512, 64)), "remat", "Layer.__call__")


def huge_temporary():
    def nearest(rows, x):
        return jnp.sort((rows[:, None, 0] - x[None, :, 0]) ** 2, axis=1)[:, :2].sum(1)

    def whole(x):
        return nearest(x, x).sum()

    def in_parts(x):
        return jax.lax.map(lambda row: nearest(row[None], x)[0], x, batch_size=x.shape[0] // 8).sum()

    return Case(whole, in_parts, arrays((2048, 64)), "microbatch", "nearest", gradient=False)


def large_batch():
    def loss(w, x):
        logits = x @ w
        return jax.nn.logsumexp(logits * 2 + jnp.sin(logits), -1).sum()

    step = jax.value_and_grad(loss)
    in_parts = statetx.microbatch(step, 8, argnums=1, reduce="sum")
    return Case(step, in_parts, arrays((64, 1024), (2048, 64)), "microbatch", "loss", gradient=False)


def undonated_states():
    state = statetx.State(jnp.zeros((1024, 1024)))

    def step(x):
        state.value = 0.9 * state.value + x.sum()

    donated = statetx.jit(step, donate_states=True)
    return Case(statetx.jit(step), donated, arrays((8,)), "donate", "state", gradient=False)


def undonated_argument():
    def step(params, x):
        return jax.tree.map(lambda p: p * x.sum(), params)

    args = ({"a": jax.ShapeDtypeStruct((512, 512), f32), "b": jax.ShapeDtypeStruct((512,), f32)}, *arrays((8,)))
    donated = jax.jit(step, donate_argnames="params")
    return Case(jax.jit(step), donated, args, "donate", "params", gradient=False)


def stacked_carries():
    w = statetx.Param(jnp.eye(64))

    def loss(xs, checkpoint=None):
        def body(h, x):
            return jnp.tanh(h @ w.value + x[None]), None

        return (statetx.scan(body, jnp.zeros((32, 64)), xs, checkpoint=checkpoint)[0] ** 2).sum()

    def after(text):
        (slots,) = re.findall(r"Slots\((\d+)\)", text)
        return lambda xs: loss(xs, policies.Slots(int(slots)))

    return Case(loss, after, arrays((512, 64)), "slots", "scan of 512 steps")


def peak_in_recomputation():
    blocks = [Stack([Layer(64, 512) for _ in range(4)]) for _ in range(3)]

    def nested(block):
        return statetx.remat(Stack([statetx.remat(layer) for layer in block.layers]))

    return Case(loss_of(blocks, statetx.remat), loss_of(blocks, nested), arrays((512, 64)), "remat", "Layer.__call__")


def constants():
    table = np.asarray(np.random.default_rng(0).standard_normal((1024, 1024)), np.float32)

    def lookup(x, table=table):
        return jnp.sin(x @ table).sum()

    state = statetx.State(table)
    return Case(
        jax.jit(lookup), lambda x: lookup(x, state.value), arrays((4, 1024)), "argument", "constant", gradient=False
    )


KNOWN = (
    one_large_layer,
    many_layers,
    huge_temporary,
    large_batch,
    undonated_states,
    undonated_argument,
    stacked_carries,
    peak_in_recomputation,
    constants,
)
