"""Loops of many kinds, to compare the memory of slots that hold residuals with that of slots that hold carries only."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import statetx


class Program(NamedTuple):
    """A loop; arrays are `width` wide, for a batch of `batch` examples.

    Attributes:
        step: ``(w, carry, x) -> (carry, y)``.
        carry: before the first step.
        w: the constants that the step reads.
        x: the shape of an element of xs.
    """

    step: Any
    carry: Any
    w: Any
    x: tuple


PROGRAMS = {}


def program(fun):
    """Add ``fun(width, batch) -> Program`` to the table."""
    PROGRAMS[fun.__name__] = fun
    return fun


def array(*shape):
    return jax.random.normal(jax.random.key(len(shape)), shape) / 8


def rows(width, batch, num=1):
    """As many carries of one type."""
    return (jnp.zeros((batch, width)),) * num


def gradient(name, checkpoint, width, batch, length):
    """The gradient of a loss of the loop with respect to constants and xs, the loss, and arguments."""
    step, init, w, x = PROGRAMS[name](width, batch)
    is_float = lambda a: jnp.issubdtype(a.dtype, jnp.floating)

    def loss(w, xs):
        carry, ys = statetx.scan(functools.partial(step, w), init, xs, checkpoint=checkpoint)
        return sum(jnp.sum(a.astype(jnp.float32) ** 2) for a in jax.tree.leaves((carry, ys)) if is_float(a))

    return jax.grad(loss, (0, 1)), loss, (w, array(length, *x))


def with_scan(width, batch, wrap):
    """A step that scans over layers."""

    def step(w, h, x):
        return jax.lax.scan(wrap(lambda h, w: (jnp.tanh(h @ w + x), None)), h, w)[0], None

    return Program(step, *rows(width, batch), array(4, width, width), (batch, width))


@program
def scan_of_layers(width, batch):
    return with_scan(width, batch, lambda layer: layer)


@program
def scan_of_checkpointed_layers(width, batch):
    return with_scan(width, batch, jax.checkpoint)


@program
def scan_of_one_layer(width, batch):
    def step(w, h, x):
        return jax.lax.scan(lambda h, _: (jnp.tanh(h @ w + x), None), h, None, 4)[0], None

    return Program(step, *rows(width, batch), array(width, width), (batch, width))


@program
def fori_of_layers(width, batch):
    def step(w, h, x):
        return jax.lax.fori_loop(0, 3, lambda i, h: jnp.tanh(h @ w[i] + x), h), None

    return Program(step, *rows(width, batch), array(3, width, width), (batch, width))


@program
def normalization(width, batch):
    def step(w, carry, x):
        h, mean = carry
        h = h @ w + x
        h = h * jax.lax.rsqrt((h**2).mean(-1, keepdims=True) + 1)
        return (h, 0.9 * mean + h), mean.sum()

    return Program(step, rows(width, batch, 2), array(width, width), (batch, width))


@program
def three_carries(width, batch):
    def step(w, carry, x):
        hs = []
        for h, (recurrent, forward) in zip(carry, w, strict=True):
            x = jnp.tanh(h @ recurrent + x @ forward)
            hs.append(x)
        return tuple(hs), None

    return Program(step, rows(width, batch, 3), array(3, 2, width, width), (batch, width))


@program
def branches(width, batch):
    def step(w, carry, x):
        h, n = carry
        h = jax.lax.cond(n % 3 == 0, lambda h: jnp.tanh(h @ w + x), lambda h: jnp.sin(h @ w) + x, h)
        return (h, n + 1), None

    return Program(step, (jnp.ones((batch, width)), jnp.int32(0)), array(width, width), (batch, width))


# -- carries that are moving averages of others ----------------------------------------------------------------------


@program
def average_read_out(width, batch):
    def step(w, carry, x):
        h, mean = carry
        h = jnp.tanh(h @ w + x)
        return (h, 0.9 * mean + 0.1 * h), (mean @ w).mean(-1)

    return Program(step, rows(width, batch, 2), array(width, width), (batch, width))


@program
def spikes_with_trace(width, batch):
    def step(w, carry, x):
        v, trace = carry
        v = 0.9 * v + x @ w
        z = jax.nn.sigmoid(4 * (v - 1))
        return (v * (1 - jax.lax.stop_gradient(z)), 0.8 * trace + 0.2 * z), trace.sum()

    return Program(step, rows(width, batch, 2), array(width, width), (batch, width))


@program
def filters(width, batch):
    def step(w, carry, x):
        a, b, c = carry
        a = 0.9 * a + x @ w
        b = 0.8 * b + jnp.tanh(a)
        c = 0.7 * c + jnp.sin(b) @ w
        return (a, b, c), c.mean()

    return Program(step, rows(width, batch, 3), array(width, width), (batch, width))
