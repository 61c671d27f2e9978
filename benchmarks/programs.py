"""Programs for the planner: pure functions of parameters and data, built of blocks that the caller may wrap.

Each maker returns ``loss, params, data``, where ``loss(params, *data)`` is a number. `wrap` is applied to each block's
function, as a user would apply ``statetx.remat``; by default blocks are unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Program(NamedTuple):
    """A loss, its parameters, and its data."""

    loss: Callable[..., Any]
    params: Any
    data: tuple[Any, ...]


def identity(fun: Callable) -> Callable:
    return fun


def _dense(rng: np.random.Generator, *shape: int) -> jax.Array:
    fan_in = math.prod(shape[:-1])
    return jnp.asarray((rng.standard_normal(shape) / math.sqrt(fan_in)).astype(np.float32))


def _normal(rng: np.random.Generator, *shape: int) -> jax.Array:
    return jnp.asarray(rng.standard_normal(shape).astype(np.float32))


def of_types(make: Callable[[], Program]) -> Program:
    """A program with the types of its parameters and data in place of values, which take time and memory to make."""
    global _dense, _normal  # noqa: PLW0603
    before, made = (_dense, _normal), []
    _dense = _normal = lambda rng, *shape: jnp.zeros(shape)

    def inputs() -> Any:
        made.append(make())
        return made[0].params, made[0].data

    try:
        params, data = jax.eval_shape(inputs)
    finally:
        _dense, _normal = before
    return Program(made[0].loss, params, data)


def norm(x: jax.Array) -> jax.Array:
    return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)


# -- multi-layer perceptrons -----------------------------------------------------------------------------------------


def mlp(wrap: Callable = identity, *, layers: int = 12, width: int = 512, batch: int = 2048) -> Program:
    """Residual blocks of two matrix products, four times as wide between them."""
    rng = np.random.default_rng(0)

    @wrap
    def block(p: Any, x: jax.Array) -> jax.Array:
        return x + jnp.tanh(x @ p["up"]) @ p["down"]

    def loss(params: Any, x: jax.Array) -> jax.Array:
        for p in params:
            x = block(p, x)
        return (x**2).mean()

    params = [{"up": _dense(rng, width, 4 * width), "down": _dense(rng, 4 * width, width)} for _ in range(layers)]
    return Program(loss, params, (_normal(rng, batch, width),))


def deep_mlp(wrap: Callable = identity, *, layers: int = 40, width: int = 512, batch: int = 2048) -> Program:
    """One matrix product and one activation a layer; blocks of four layers."""
    rng = np.random.default_rng(0)

    @wrap
    def block(ws: Any, x: jax.Array) -> jax.Array:
        for w in ws:
            x = jax.nn.gelu(x @ w)
        return x

    def loss(params: Any, x: jax.Array) -> jax.Array:
        for ws in params:
            x = block(ws, x)
        return (x**2).mean()

    params = [[_dense(rng, width, width) for _ in range(4)] for _ in range(layers // 4)]
    return Program(loss, params, (_normal(rng, batch, width),))


# -- transformers ----------------------------------------------------------------------------------------------------


def _attention(p: Any, x: jax.Array, heads: int) -> jax.Array:
    batch, time, width = x.shape
    q, k, v = jnp.split(x @ p["qkv"], 3, -1)
    q, k, v = (y.reshape(batch, time, heads, width // heads) for y in (q, k, v))
    scores = jnp.einsum("bthd,bshd->bhts", q, k) / math.sqrt(width // heads)
    mask = jnp.tril(jnp.ones((time, time), bool))
    weights = jax.nn.softmax(jnp.where(mask, scores, -1e9))
    return jnp.einsum("bhts,bshd->bthd", weights, v).reshape(batch, time, width) @ p["out"]


def _transformer_params(rng: np.random.Generator, width: int, hidden: int, *, gated: bool) -> dict[str, jax.Array]:
    p = {"qkv": _dense(rng, width, 3 * width), "out": _dense(rng, width, width)}
    p |= {"up": _dense(rng, width, hidden), "down": _dense(rng, hidden, width)}
    return p | {"gate": _dense(rng, width, hidden)} if gated else p


def _transformer_block(p: Any, x: jax.Array, *, heads: int, gated: bool) -> jax.Array:
    x = x + _attention(p, norm(x), heads)
    h = norm(x)
    h = jax.nn.silu(h @ p["gate"]) * (h @ p["up"]) if gated else jax.nn.gelu(h @ p["up"])
    return x + h @ p["down"]


def transformer(
    wrap: Callable = identity,
    *,
    layers: int = 5,
    width: int = 256,
    heads: int = 8,
    time: int = 256,
    batch: int = 8,
    gated: bool = False,
) -> Program:
    """Pre-norm blocks of attention and two matrix products."""
    rng = np.random.default_rng(0)
    hidden = width * (8 // 3 if gated else 4)

    @wrap
    def block(p: Any, x: jax.Array) -> jax.Array:
        return _transformer_block(p, x, heads=heads, gated=gated)

    def loss(params: Any, x: jax.Array) -> jax.Array:
        for p in params:
            x = block(p, x)
        return (norm(x) ** 2 * x).mean()

    params = [_transformer_params(rng, width, hidden, gated=gated) for _ in range(layers)]
    return Program(loss, params, (_normal(rng, batch, time, width),))


def swiglu_transformer(wrap: Callable = identity, **options: Any) -> Program:
    """A transformer with gated hidden layers and short sequences."""
    return transformer(wrap, **{"layers": 4, "time": 64, "batch": 32, "gated": True, **options})


def scanned_transformer(
    wrap: Callable = identity, *, layers: int = 16, width: int = 256, heads: int = 8, time: int = 256, batch: int = 8
) -> Program:
    """The same blocks with their parameters stacked, in one scan."""
    import statetx

    rng = np.random.default_rng(0)

    @wrap
    def block(p: Any, x: jax.Array) -> jax.Array:
        return _transformer_block(p, x, heads=heads, gated=False)

    def loss(params: Any, x: jax.Array) -> jax.Array:
        x, _ = statetx.scan(lambda h, p: (block(p, h), None), x, params)
        return (norm(x) ** 2 * x).mean()

    params = [_transformer_params(rng, width, 4 * width, gated=False) for _ in range(layers)]
    stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *params)
    return Program(loss, stacked, (_normal(rng, batch, time, width),))


# -- images ----------------------------------------------------------------------------------------------------------


def _conv(x: jax.Array, w: jax.Array, stride: int = 1) -> jax.Array:
    return jax.lax.conv_general_dilated(x, w, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def _channel_norm(x: jax.Array) -> jax.Array:
    mean = x.mean((1, 2), keepdims=True)
    return (x - mean) * jax.lax.rsqrt(x.var((1, 2), keepdims=True) + 1e-5)


def conv_net(
    wrap: Callable = identity, *, layers: int = 8, channels: int = 32, size: int = 32, batch: int = 16
) -> Program:
    """Residual blocks of two normalized convolutions."""
    rng = np.random.default_rng(0)

    @wrap
    def block(p: Any, x: jax.Array) -> jax.Array:
        h = jax.nn.relu(_channel_norm(_conv(x, p["first"])))
        return jax.nn.relu(x + _channel_norm(_conv(h, p["second"])))

    def loss(params: Any, x: jax.Array) -> jax.Array:
        for p in params:
            x = block(p, x)
        return (x**2).mean()

    kernel = (3, 3, channels, channels)
    params = [{"first": _dense(rng, *kernel), "second": _dense(rng, *kernel)} for _ in range(layers)]
    return Program(loss, params, (_normal(rng, batch, size, size, channels),))


def unet(wrap: Callable = identity, *, levels: int = 3, channels: int = 16, size: int = 64, batch: int = 8) -> Program:
    """Residual blocks down and up again, two at each size, with skip connections from each size."""
    rng = np.random.default_rng(0)

    @wrap
    def block(p: Any, x: jax.Array) -> jax.Array:
        h = _conv(jax.nn.silu(_channel_norm(x)), p["first"])
        return _conv(x, p["across"]) + _conv(jax.nn.silu(_channel_norm(h)), p["second"])

    def loss(params: Any, x: jax.Array) -> jax.Array:
        skips = []
        for blocks in params["down"]:
            for p in blocks:
                x = block(p, x)
            skips.append(x)
            x = x.reshape(x.shape[0], x.shape[1] // 2, 2, x.shape[2] // 2, 2, x.shape[3]).mean((2, 4))
        for p in params["middle"]:
            x = block(p, x)
        for blocks, skip in zip(params["up"], reversed(skips), strict=True):
            x = jnp.concatenate([jnp.repeat(jnp.repeat(x, 2, 1), 2, 2), skip], -1)
            for p in blocks:
                x = block(p, x)
        return (x**2).mean()

    def two_blocks(in_width: int, width: int) -> list[Any]:
        return [
            {
                "first": _dense(rng, 3, 3, n, width),
                "second": _dense(rng, 3, 3, width, width),
                "across": _dense(rng, 1, 1, n, width),
            }
            for n in (in_width, width)
        ]

    widths = [channels * 2**i for i in range(levels + 1)]
    params = {
        "down": [two_blocks(3 if i == 0 else widths[i - 1], widths[i]) for i in range(levels)],
        "middle": two_blocks(widths[-2], widths[-1]),
        "up": [two_blocks(widths[i + 1] + widths[i], widths[i]) for i in reversed(range(levels))],
    }
    return Program(loss, params, (_normal(rng, batch, size, size, 3),))


# -- others ----------------------------------------------------------------------------------------------------------


def recurrent(wrap: Callable = identity, *, steps: int = 512, width: int = 128, batch: int = 32) -> Program:
    """A gated recurrent unit over time with a readout at each step."""
    import statetx

    rng = np.random.default_rng(0)

    @wrap
    def step(p: Any, h: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        gates = jax.nn.sigmoid(x @ p["x_gates"] + h @ p["h_gates"])
        z, r = jnp.split(gates, 2, -1)
        new = jnp.tanh(x @ p["x_new"] + (r * h) @ p["h_new"])
        h = (1 - z) * h + z * new
        return h, (h @ p["out"]).mean(-1)

    def loss(params: Any, xs: jax.Array) -> jax.Array:
        _, ys = statetx.scan(lambda h, x: step(params, h, x), jnp.zeros((batch, width)), xs)
        return (ys**2).mean()

    params = {"x_gates": _dense(rng, width, 2 * width), "h_gates": _dense(rng, width, 2 * width)}
    params |= {"x_new": _dense(rng, width, width), "h_new": _dense(rng, width, width), "out": _dense(rng, width, width)}
    return Program(loss, params, (_normal(rng, steps, batch, width),))


def skip_mixture(wrap: Callable = identity, *, layers: int = 10, width: int = 256, batch: int = 2048) -> Program:
    """Blocks of several types (gated, normalized, softmax mixtures), each of which reads the results of two earlier blocks."""
    rng = np.random.default_rng(0)

    @wrap
    def gated(p: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        return x + (jax.nn.sigmoid(y @ p["a"]) * jnp.tanh(x @ p["b"])) @ p["c"]

    @wrap
    def mixed(p: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        weights = jax.nn.softmax(norm(x) @ p["a"])
        return y + weights * jnp.sin(y @ p["b"]) + jax.nn.gelu(x @ p["c"])

    def loss(params: Any, x: jax.Array) -> jax.Array:
        seen = [x, x]
        for i, p in enumerate(params):
            seen.append((mixed if i % 3 == 2 else gated)(p, seen[-1], seen[max(0, len(seen) - 4)]))
        return (norm(seen[-1] + seen[2]) ** 2 * seen[-1]).mean()

    params = [{k: _dense(rng, width, width) for k in "abc"} for _ in range(layers)]
    return Program(loss, params, (_normal(rng, batch, width),))


PROGRAMS: dict[str, Callable[..., Program]] = {
    "MLP": mlp,
    "deep MLP": deep_mlp,
    "transformer": transformer,
    "SwiGLU transformer": swiglu_transformer,
    "scanned transformer": scanned_transformer,
    "convolutional net": conv_net,
    "recurrent": recurrent,
    "skips": skip_mixture,
    "U-Net": unet,
}
