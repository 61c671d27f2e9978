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
    is_float = lambda a: jnp.issubdtype(a.dtype, jnp.floating)  # noqa: E731

    def loss(w, xs):
        carry, ys = statetx.scan(functools.partial(step, w), init, xs, checkpoint=checkpoint)
        return sum(jnp.sum(a.astype(jnp.float32) ** 2) for a in jax.tree.leaves((carry, ys)) if is_float(a))

    return jax.grad(loss, (0, 1)), loss, (w, array(length, *x))


@program
def rnn(width, batch):
    step = lambda w, h, x: (jnp.tanh(h @ w + x), None)  # noqa: E731
    return Program(step, *rows(width, batch), array(width, width), (batch, width))


@program
def rnn_with_ys(width, batch):
    def step(w, h, x):
        h = jnp.tanh(h @ w + x)
        return h, h.sum()

    return Program(step, *rows(width, batch), array(width, width), (batch, width))


@program
def lstm(width, batch):
    def step(w, carry, x):
        h, c = carry
        i, f, g, o = jnp.split(jnp.concatenate([h, x], -1) @ w, 4, -1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        return (jax.nn.sigmoid(o) * jnp.tanh(c), c), None

    return Program(step, rows(width, batch, 2), array(2 * width, 4 * width), (batch, width))


@program
def gru(width, batch):
    def step(w, h, x):
        (r, u, n), (hr, hu, hn) = (jnp.split(a, 3, -1) for a in (x @ w[0], h @ w[1]))
        r, u = jax.nn.sigmoid(r + hr), jax.nn.sigmoid(u + hu)
        return (1 - u) * jnp.tanh(n + r * hn) + u * h, None

    weights = array(width, 3 * width), array(width, 3 * width)
    return Program(step, *rows(width, batch), weights, (batch, width))


@program
def spiking(width, batch):
    def step(w, carry, x):
        v, trace = carry
        v = 0.9 * v + x @ w + trace @ w
        z = jax.nn.sigmoid(4 * (v - 1))
        return (v * (1 - jax.lax.stop_gradient(z)), 0.8 * trace + 0.2 * z), trace.sum()

    return Program(step, rows(width, batch, 2), array(width, width), (batch, width))


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
def integer(width, batch):
    def step(w, carry, x):
        h, n = carry
        return (jnp.tanh(h @ w + x) * jnp.cos(n * 0.1), n + 1), None

    return Program(step, (*rows(width, batch), jnp.int32(0)), array(width, width), (batch, width))


@program
def scalar(width, batch):
    def step(w, carry, x):
        h, s = carry
        h = jnp.tanh(h @ w + x) * s
        return (h, 0.9 * s + jnp.tanh(h.sum())), s

    return Program(step, (*rows(width, batch), jnp.float32(1)), array(width, width), (batch, width))


@program
def scalars_of_rows(width, batch):
    def step(w, carry, x):
        h, s = carry
        h = h @ w + x
        f = [jnp.tanh((h[i % batch] * h[(i + 1) % batch]).sum()) for i in range(4)]
        return (0.9 * h * f[0] * s, 0.5 * s + f[1] * f[2] * f[3]), s

    return Program(step, (jnp.ones((batch, width)), jnp.float32(0.7)), array(width, width), (batch, width))


@program
def several_scalars(width, batch):
    def step(w, carry, x):
        h, a, b, n = carry
        h = jnp.tanh(h @ w + x * a)
        a, b = jnp.sin(a * b + h.mean()), jnp.cos(b * a - h.mean())
        return (h, a, b, n + 1), a * b

    carry = (*rows(width, batch), jnp.float32(1), jnp.float32(0.5), jnp.int32(0))
    return Program(step, carry, array(width, width), (batch, width))


@program
def keys(width, batch):
    def step(w, carry, x):
        h, n, key = carry
        key, sub = jax.random.split(key)
        mask = jax.random.bernoulli(sub, 0.7, h.shape)
        return (jnp.where(mask, jnp.tanh(h @ w + x), 0), n + 1, key), h.sum() * jnp.cos(n)

    return Program(step, (*rows(width, batch), jnp.int32(0), jax.random.key(0)), array(width, width), (batch, width))


@program
def dropout(width, batch):
    def step(w, carry, x):
        h, key = carry
        key, sub = jax.random.split(key)
        h = jnp.tanh(h @ w + x)
        return (jnp.where(jax.random.bernoulli(sub, 0.7, h.shape), h, 0) @ w, key), None

    return Program(step, (*rows(width, batch), jax.random.key(0)), array(width, width), (batch, width))


@program
def normalization(width, batch):
    def step(w, carry, x):
        h, mean = carry
        h = h @ w + x
        h = h * jax.lax.rsqrt((h**2).mean(-1, keepdims=True) + 1)
        return (h, 0.9 * mean + h), mean.sum()

    return Program(step, rows(width, batch, 2), array(width, width), (batch, width))


@program
def fast_weights(width, batch):
    def step(w, a, x):
        a = 0.9 * a + jnp.tanh((x @ w[0]).T @ (x @ w[1]))
        return a, (a @ w[0]).mean()

    return Program(step, jnp.zeros((width, width)), array(2, width, width), (batch, width))


@program
def two_dtypes(width, batch):
    def step(w, carry, x):
        h, g = carry
        h = jnp.tanh(h @ w + x + g.astype(jnp.float32))
        return (h, jnp.tanh(g * 0.5 + h.astype(jnp.bfloat16))), None

    carry = (*rows(width, batch), jnp.zeros((batch, width), jnp.bfloat16))
    return Program(step, carry, array(width, width), (batch, width))


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
def carries_of_three_sizes(width, batch):
    half = width // 2

    def step(w, carry, x):
        h, g, s = carry
        h = jnp.tanh(h @ w + x * s[:, None])
        g = 0.9 * g + jnp.tanh(h[:, :half] @ w[:half, :half])
        return (h, g, jax.nn.sigmoid(s + g.mean(-1))), g.sum()

    carry = (*rows(width, batch), *rows(half, batch), jnp.ones(batch))
    return Program(step, carry, array(width, width), (batch, width))


@program
def elementwise(width, batch):
    return Program(lambda w, h, x: (jnp.sin(h * w + x), None), *rows(width, batch), array(1, width), (batch, width))


@program
def runge_kutta(width, batch):
    def step(w, h, x):
        f = lambda h: jnp.tanh(h @ w + x)  # noqa: E731
        a = f(h)
        b = f(h + 0.05 * a)
        c = f(h + 0.05 * b)
        return h + 0.1 / 6 * (a + 2 * b + 2 * c + f(h + 0.1 * c)), None

    return Program(step, *rows(width, batch), array(width, width), (batch, width))


@program
def weights_as_xs(width, batch):
    step = lambda w, h, x: (h + w * jnp.tanh(h @ x), None)  # noqa: E731
    return Program(step, jnp.ones((batch, width)), jnp.float32(1), (width, width))


@program
def attention(width, batch):
    def step(w, h, x):
        q, k, v = h @ w[0], h @ w[1], h @ w[2]
        return jnp.tanh(jax.nn.softmax(q @ k.T / width**0.5) @ v + x), None

    return Program(step, jnp.ones((batch, width)), array(3, width, width), (batch, width))


@program
def branches(width, batch):
    def step(w, carry, x):
        h, n = carry
        h = jax.lax.cond(n % 3 == 0, lambda h: jnp.tanh(h @ w + x), lambda h: jnp.sin(h @ w) + x, h)
        return (h, n + 1), None

    return Program(step, (jnp.ones((batch, width)), jnp.int32(0)), array(width, width), (batch, width))


@program
def convolution(width, batch):
    def step(w, h, x):
        y = jax.lax.conv_general_dilated(h[:, None], w, (1,), "SAME")[:, 0]
        return jnp.tanh(y + x), None

    return Program(step, jnp.ones((batch, width)), array(1, 1, 5), (batch, width))


# -- carries that are moving averages of others ----------------------------------------------------------------------


@program
def average(width, batch):
    def step(w, carry, x):
        h, mean = carry
        h = jnp.tanh(h @ w + x)
        return (h, 0.9 * mean + 0.1 * h), mean.sum()

    return Program(step, rows(width, batch, 2), array(width, width), (batch, width))


@program
def average_read_out(width, batch):
    def step(w, carry, x):
        h, mean = carry
        h = jnp.tanh(h @ w + x)
        return (h, 0.9 * mean + 0.1 * h), (mean @ w).mean(-1)

    return Program(step, rows(width, batch, 2), array(width, width), (batch, width))


@program
def two_averages(width, batch):
    def step(w, carry, x):
        h, mean, square = carry
        h = jnp.tanh(h @ w + x)
        return (h, 0.9 * mean + 0.1 * h, 0.99 * square + 0.01 * h * h), mean.sum() + square.sum()

    return Program(step, rows(width, batch, 3), array(width, width), (batch, width))


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


@program
def running_sum(width, batch):
    def step(w, carry, x):
        h, total = carry
        h = jnp.tanh(h @ w + x)
        return (h, total + h**2), None

    return Program(step, rows(width, batch, 2), array(width, width), (batch, width))


@program
def adaptive_threshold(width, batch):
    def step(w, carry, x):
        v, threshold, trace = carry
        v = 0.9 * v + x @ w + trace @ w
        z = jax.nn.sigmoid(4 * (v - 1 - threshold))
        return (v - jax.lax.stop_gradient(z), 0.95 * threshold + 0.05 * z, 0.8 * trace + 0.2 * z), z.mean()

    return Program(step, rows(width, batch, 3), array(width, width), (batch, width))


@program
def average_over_batch(width, batch):
    def step(w, carry, x):
        h, mean, n = carry
        h = jnp.tanh(h @ w + x)
        return (h, mean * 0.9 + h.mean(0) * 0.1, n + 1), (mean**2).sum()

    carry = (*rows(width, batch), jnp.zeros(width), jnp.int32(0))
    return Program(step, carry, array(width, width), (batch, width))
