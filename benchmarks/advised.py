"""Forty programs, each changed by hand: does `statetx.explain_oom` name what saves a fifth of the peak, with the bytes
that it takes?

``python benchmarks/advised.py [NAME ...] [--out results.json]``. A program is built with a `Hand`, which makes at most
one change: it rematerializes the repeated call or the body of the loop, gives the loop a strategy, donates the
parameters, or takes the gradient in parts. Nothing runs. Libraries that are not installed are left out. What the
programs change by hand, and no more, is asked of the advice: a change that it tried alone, on the same function or
loop, whose program takes the bytes of the program by hand.
"""

import argparse
import functools
import importlib.util
import json
import pathlib
import time
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import statetx
from statetx import policies

PARTS = 8
SAVES, NEAR = 0.2, 0.02  # what is asked for, and how near the bytes must be


class Hand:
    """Makes one change of a program, and notes which it could make.

    Attributes:
        changes: the changes that the program has a place for, with the function that is changed.
    """

    def __init__(self, change: str = "", strategy: Any = None):
        self.change, self.strategy = change, strategy
        self.changes: dict[str, str] = {}

    def remat(self, fun: Callable, of: Any = None) -> Callable:
        """The repeated call; `of` is the function that it runs, if `fun` is none."""
        of = fun if of is None else of
        self.changes["remat"] = of.__qualname__.replace("<locals>.", "")
        return statetx.remat(fun) if self.change == "remat" else fun

    def scan(self, body: Callable, init: Any, xs: Any, **options: Any) -> Any:
        self.changes |= {"body": "scan", "slots": "scan"}
        if self.change == "slots":
            options["checkpoint"] = self.strategy
        return statetx.scan(statetx.remat(body) if self.change == "body" else body, init, xs, **options)

    def step(self, loss: Callable, batch: tuple[int, ...] = (1,)) -> Callable:
        """A step of gradient descent with momentum; `batch` are the arguments with examples, if any."""
        self.changes |= {"donate": "params"} | ({"parts": "batch"} if batch else {})
        if self.change == "parts":
            loss = statetx.microbatch(loss, PARTS, argnums=batch)

        def step(params: Any, moments: Any, *data: Any) -> Any:
            grads = jax.grad(loss)(params, *data)
            moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, grads)
            return jax.tree.map(lambda p, m: p - 0.1 * m, params, moments), moments

        return jax.jit(step, donate_argnames=("params",) if self.change == "donate" else ())

    def stateful(
        self, loss: Callable, states: Any, wrt: Any = statetx.Param, batch: tuple[int, ...] = (0,)
    ) -> Callable:
        """The same of a loss that reads states, without momentum."""
        self.changes |= {"donate": "states"} | ({"parts": "batch"} if batch else {})
        if self.change == "parts":
            loss = statetx.microbatch(loss, PARTS, argnums=batch)

        def step(*data: Any) -> None:
            params = statetx.states(states, wrt)
            for name, g in statetx.grad(loss, wrt=params)(*data).items():
                params[name].value = params[name].value - 0.1 * g

        return statetx.jit(step, donate_states=self.change == "donate")


PROGRAMS: dict[str, Callable[[Hand], tuple[Callable, tuple]]] = {}
NEEDS: dict[str, str] = {}


def program(library: str = "") -> Callable:
    def add(make: Callable) -> Callable:
        PROGRAMS[make.__name__] = make
        NEEDS[make.__name__] = library
        return make

    return add


def f32(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def square(n: int, num: int) -> list[Any]:
    return [f32(n, n)] * num


def wave(w: jax.Array, x: jax.Array) -> jax.Array:
    return x + jnp.sin(jnp.tanh(jnp.cos(x @ w)) * x) @ w.T


def norm(x: jax.Array) -> jax.Array:
    x = x - x.mean(-1, keepdims=True)
    return x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-6)


def conv(x: jax.Array, w: jax.Array) -> jax.Array:
    return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


# -- functions
# -------------------------------------------------------------------------------------------------------------


def with_moments(
    hand: Hand, loss: Callable, params: Any, *data: Any, batch: tuple[int, ...] = (1,)
) -> tuple[Callable, tuple]:
    return hand.step(loss, batch), (params, params, *data)


@program()
def loop_over_layers(hand: Hand) -> Any:
    layer = hand.remat(wave)

    def loss(ws: Any, x: Any) -> Any:
        for w in ws:
            x = layer(w, x)
        return (x**2).mean()

    return with_moments(hand, loss, square(64, 8), f32(512, 64))


@program()
def loop_inside_of_blocks(hand: Hand) -> Any:
    def block(ws: Any, x: Any) -> Any:
        for w in ws:
            x = jnp.sin(jnp.tanh(x @ w))
        return x

    wrapped = hand.remat(block)

    def loss(blocks: Any, x: Any) -> Any:
        for ws in blocks:
            x = x + wrapped(ws, x)
        return (x**2).mean()

    return with_moments(hand, loss, [square(64, 3)] * 5, f32(512, 64))


@program()
def recursion(hand: Hand) -> Any:
    layer = hand.remat(wave)

    def down(ws: Any, x: Any) -> Any:
        return down(ws[1:], layer(ws[0], x)) if ws else x

    return with_moments(hand, lambda ws, x: (down(ws, x) ** 2).mean(), square(64, 8), f32(512, 64))


@program()
def comprehension(hand: Hand) -> Any:
    branch = hand.remat(wave)
    loss = lambda ws, x: (sum(branch(w, jnp.sin((n + 1) * x)) for n, w in enumerate(ws)) ** 2).mean()
    return with_moments(hand, loss, square(64, 8), f32(512, 64))


@program()
def list_of_branches(hand: Hand) -> Any:
    branch = hand.remat(wave)

    def loss(ws: Any, x: Any) -> Any:
        return (jnp.concatenate([branch(w, x) for w in ws], -1) ** 3).mean()

    return with_moments(hand, loss, square(64, 6), f32(512, 64))


@program()
def tree_map_over_layers(hand: Hand) -> Any:
    layer = hand.remat(wave)

    def loss(ws: Any, x: Any) -> Any:
        return sum(jax.tree.leaves(jax.tree.map(lambda w: (layer(w, x) ** 2).mean(), ws)))

    return with_moments(hand, loss, {f"layer{n}": f32(64, 64) for n in range(8)}, f32(512, 64))


@program()
def reduce_over_layers(hand: Hand) -> Any:
    layer = hand.remat(wave)
    loss = lambda ws, x: (functools.reduce(lambda x, w: layer(w, x), ws, x) ** 2).mean()
    return with_moments(hand, loss, square(64, 8), f32(512, 64))


@program()
def transformer(hand: Hand) -> Any:
    def layer(p: Any, x: Any) -> Any:
        h = norm(x)
        q, k, v = (jnp.einsum("btd,dhe->bhte", h, p[name]) for name in "qkv")
        a = jax.nn.softmax(q @ k.swapaxes(-1, -2) / 4.0) @ v
        x = x + jnp.einsum("bhte,hed->btd", a, p["o"])
        return x + jax.nn.gelu(norm(x) @ p["up"]) @ p["down"]

    wrapped = hand.remat(layer)

    def loss(params: Any, x: Any) -> Any:
        for p in params:
            x = wrapped(p, x)
        return (norm(x) ** 2 * x).mean()

    heads = {name: f32(32, 4, 8) for name in "qkv"} | {"o": f32(4, 8, 32), "up": f32(32, 128), "down": f32(128, 32)}
    return with_moments(hand, loss, [heads] * 6, f32(16, 64, 32))


@program()
def convolutions(hand: Hand) -> Any:
    def block(ws: Any, x: Any) -> Any:
        return x + conv(jax.nn.silu(norm(conv(jax.nn.silu(norm(x)), ws[0]))), ws[1])

    wrapped = hand.remat(block)

    def loss(params: Any, x: Any) -> Any:
        for ws in params:
            x = wrapped(ws, x)
        return (x**2).mean()

    return with_moments(hand, loss, [[f32(3, 3, 16, 16)] * 2] * 5, f32(16, 16, 16, 16))


@program()
def unet(hand: Hand) -> Any:
    def block(w: Any, x: Any) -> Any:
        return jax.nn.silu(norm(conv(jax.nn.silu(norm(conv(x, w[0]))), w[1])))

    wrapped = hand.remat(block)

    def loss(params: Any, x: Any) -> Any:
        skips = []
        for p in params["down"]:
            skips.append(x := wrapped(p, x))
            x = x.reshape(x.shape[0], x.shape[1] // 2, 2, x.shape[2] // 2, 2, x.shape[3]).mean((2, 4))
        for p, skip in zip(params["up"], reversed(skips), strict=True):
            x = wrapped(p, jnp.concatenate([jnp.repeat(jnp.repeat(x, 2, 1), 2, 2), skip], -1))
        return (x**2).mean()

    c = lambda n, m: [f32(3, 3, n, m), f32(3, 3, m, m)]
    params = {"down": [c(3, 8), c(8, 16), c(16, 16)], "up": [c(32, 16), c(32, 8), c(16, 8)]}
    return with_moments(hand, loss, params, f32(32, 32, 32, 3))


@program()
def dense_net(hand: Hand) -> Any:
    def layer(w: Any, x: Any) -> Any:
        return jnp.tanh(norm(jnp.sin(x @ w)))

    wrapped = hand.remat(layer)

    def loss(ws: Any, x: Any) -> Any:
        for w in ws:
            x = jnp.concatenate([x, wrapped(w, x)], -1)
        return (x**2).mean()

    return with_moments(hand, loss, [f32(32 * (n + 1), 32) for n in range(6)], f32(1024, 32))


@program()
def mixture_of_experts(hand: Hand) -> Any:
    def expert(p: Any, x: Any) -> Any:
        return jax.nn.gelu(x @ p["up"]) @ p["down"]

    wrapped = hand.remat(expert)

    def loss(params: Any, x: Any) -> Any:
        for layer in params:
            gates = jax.nn.softmax(x @ layer["router"])
            x = x + sum(gates[:, n, None] * wrapped(p, x) for n, p in enumerate(layer["experts"]))
        return (x**2).mean()

    layer = {"router": f32(32, 4), "experts": [{"up": f32(32, 128), "down": f32(128, 32)}] * 4}
    return with_moments(hand, loss, [layer] * 3, f32(512, 32))


@program()
def graph_network(hand: Hand) -> Any:
    def messages(w: Any, x: Any, edges: Any) -> Any:
        m = jnp.tanh(jnp.concatenate([x[edges[0]], x[edges[1]]], -1) @ w)
        return x + jax.ops.segment_sum(jnp.sin(m) * m, edges[1], x.shape[0])

    wrapped = hand.remat(messages)

    def loss(ws: Any, x: Any, edges: Any) -> Any:
        for w in ws:
            x = wrapped(w, x, edges)
        return (x**2).mean()

    return with_moments(
        hand, loss, [f32(64, 32)] * 5, f32(256, 32), jax.ShapeDtypeStruct((2, 2048), jnp.int32), batch=()
    )


@program()
def normalizing_flow(hand: Hand) -> Any:
    def coupling(p: Any, x: Any) -> Any:
        a, b = jnp.split(x, 2, -1)
        h = jnp.tanh(a @ p["in"])
        scale = jnp.tanh(h @ p["scale"])
        return jnp.concatenate([b * jnp.exp(scale) + h @ p["shift"], a], -1), scale.sum(-1)

    wrapped = hand.remat(coupling)

    def loss(params: Any, x: Any) -> Any:
        total = 0.0
        for p in params:
            x, added = wrapped(p, x)
            total = total + added
        return (0.5 * (x**2).sum(-1) - total).mean()

    return with_moments(hand, loss, [{"in": f32(16, 64), "scale": f32(64, 16), "shift": f32(64, 16)}] * 8, f32(512, 32))


@program()
def bfloat16_layers(hand: Hand) -> Any:
    layer = hand.remat(wave)

    def loss(ws: Any, x: Any) -> Any:
        x = x.astype(jnp.bfloat16)
        for w in ws:
            x = layer(w.astype(jnp.bfloat16), x)
        return (x.astype(jnp.float32) ** 2).mean()

    return with_moments(hand, loss, square(64, 8), f32(512, 64))


@program()
def large_vocabulary(hand: Hand) -> Any:
    def loss(params: Any, tokens: Any) -> Any:
        x = params["embed"][tokens[:, :-1]]
        x = x + jax.nn.gelu(norm(x) @ params["w"])
        logits = x @ params["embed"].T
        return (jax.nn.logsumexp(logits, axis=-1) - jnp.take_along_axis(logits, tokens[:, 1:, None], -1)[..., 0]).mean()

    return with_moments(
        hand, loss, {"embed": f32(2048, 32), "w": f32(32, 32)}, jax.ShapeDtypeStruct((16, 33), jnp.int32)
    )


@program()
def large_weights(hand: Hand) -> Any:
    loss = lambda ws, x: (functools.reduce(lambda x, w: jnp.tanh(x @ w), ws, x) ** 2).mean()
    return with_moments(hand, loss, square(512, 3), f32(16, 512))


# -- several gradients
# -----------------------------------------------------------------------------------------------------


@program()
def adversaries(hand: Hand) -> Any:
    layer = hand.remat(wave)

    def network(ws: Any, x: Any) -> Any:
        for w in ws:
            x = layer(w, x)
        return x

    def of_generator(g: Any, d: Any, z: Any) -> Any:
        return jax.nn.softplus(-network(d, network(g, z)).mean(-1)).mean()

    def of_discriminator(d: Any, g: Any, z: Any, real: Any) -> Any:
        return (jax.nn.softplus(network(d, network(g, z))) + jax.nn.softplus(-network(d, real))).mean()

    def step(g: Any, d: Any, z: Any, real: Any) -> Any:
        d = jax.tree.map(lambda p, g: p - 0.1 * g, d, jax.grad(of_discriminator)(d, g, z, real))
        return jax.tree.map(lambda p, g: p - 0.1 * g, g, jax.grad(of_generator)(g, d, z)), d

    return jax.jit(step), (square(64, 5), square(64, 5), f32(512, 64), f32(512, 64))


@program()
def meta_learner(hand: Hand) -> Any:
    layer = hand.remat(wave)

    def loss(ws: Any, x: Any) -> Any:
        for w in ws:
            x = layer(w, x)
        return (x**2).mean()

    def outer(ws: Any, support: Any, query: Any) -> Any:
        adapted = jax.tree.map(lambda w, g: w - 0.1 * g, ws, jax.grad(loss)(ws, support))
        return loss(adapted, query)

    return with_moments(hand, outer, square(32, 5), f32(512, 32), f32(512, 32), batch=())


@program()
def teacher_and_student(hand: Hand) -> Any:
    layer = hand.remat(wave)

    def network(ws: Any, x: Any) -> Any:
        for w in ws:
            x = layer(w, x)
        return x

    loss = lambda ws, x, teacher: ((network(ws, x) - network(teacher, x)) ** 2).mean()
    return with_moments(hand, loss, square(64, 5), f32(512, 64), square(64, 8))


# -- loops -----------------------------------------------------------------------------------------------------------------


@program()
def recurrent(hand: Hand) -> Any:
    def loss(p: Any, xs: Any) -> Any:
        def cell(h: Any, x: Any) -> Any:
            z, r = jnp.split(jax.nn.sigmoid(x @ p["x"] + h @ p["h"]), 2, -1)
            h = (1 - z) * h + z * jnp.tanh(x @ p["n"] + (r * h) @ p["m"])
            return h, (h @ p["out"]).mean(-1)

        return (hand.scan(cell, jnp.zeros((16, 32)), xs)[1] ** 2).mean()

    p = {"x": f32(32, 64), "h": f32(32, 64), "n": f32(32, 32), "m": f32(32, 32), "out": f32(32, 32)}
    return with_moments(hand, loss, p, f32(400, 16, 32), batch=())


@program()
def long_memory(hand: Hand) -> Any:
    def loss(p: Any, xs: Any) -> Any:
        def cell(carry: Any, x: Any) -> Any:
            h, c = carry
            i, f, o, g = jnp.split(x @ p["x"] + h @ p["h"], 4, -1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            return (jax.nn.sigmoid(o) * jnp.tanh(c), c), None

        return (hand.scan(cell, (jnp.zeros((16, 32)),) * 2, xs)[0][0] ** 2).mean()

    return with_moments(hand, loss, {"x": f32(8, 128), "h": f32(32, 128)}, f32(300, 16, 8), batch=())


@jax.custom_jvp
def spike(v: jax.Array) -> jax.Array:
    return (v > 0).astype(v.dtype)


@spike.defjvp
def _spike_jvp(primals: Any, tangents: Any) -> Any:
    return spike(*primals), tangents[0] / (1 + 10 * jnp.abs(primals[0])) ** 2


@program()
def spiking(hand: Hand) -> Any:
    def loss(ws: Any, xs: Any) -> Any:
        def step(vs: Any, x: Any) -> Any:
            new = []
            for w, v in zip(ws, vs, strict=True):
                v = 0.95 * v + x @ w
                x = spike(v - 1.0)
                new.append(v - x)
            return new, x.mean(-1)

        return (hand.scan(step, [jnp.zeros((16, 64))] * 3, xs)[1] ** 2).mean()

    return with_moments(hand, loss, square(64, 3), f32(200, 16, 64), batch=())


@program()
def scan_over_layers(hand: Hand) -> Any:
    loss = lambda ws, x: (hand.scan(lambda x, w: (wave(w, x), None), x, ws)[0] ** 2).mean()
    return with_moments(hand, loss, f32(12, 32, 32), f32(512, 32))


@program()
def integrator(hand: Hand) -> Any:
    def loss(w: Any, x: Any) -> Any:
        def flow(x: Any, t: Any) -> Any:
            k = [jnp.tanh(x @ w + t)]
            for a in (0.5, 0.5, 1.0):
                k.append(jnp.tanh((x + 0.1 * a * k[-1]) @ w + t))
            return x + 0.1 / 6 * (k[0] + 2 * k[1] + 2 * k[2] + k[3]), None

        return (hand.scan(flow, x, jnp.arange(100.0))[0] ** 2).mean()

    return with_moments(hand, loss, f32(32, 32), f32(256, 32))


@program()
def chunks_of_steps(hand: Hand) -> Any:
    """A loop in a loop, of which the outer one is checkpointed."""

    def loss(w: Any, xs: Any) -> Any:
        def chunk(h: Any, xs: Any) -> Any:
            return jax.lax.scan(lambda h, x: (jnp.sin(jnp.tanh(h @ w + x)), None), h, xs)[0], None

        return (hand.scan(chunk, jnp.zeros((32, 32)), xs)[0] ** 2).mean()

    return with_moments(hand, loss, f32(32, 32), f32(30, 20, 32, 32), batch=())


@program()
def layers_inside_of_a_loop(hand: Hand) -> Any:
    layer = hand.remat(wave)

    def loss(ws: Any, xs: Any) -> Any:
        def body(h: Any, x: Any) -> Any:
            h = h + x
            for w in ws:
                h = layer(w, h)
            return h, None

        return (jax.lax.scan(jax.checkpoint(body), jnp.zeros((512, 32)), xs)[0] ** 2).mean()

    return with_moments(hand, loss, square(32, 8), f32(4, 512, 32), batch=())


@program()
def layers_inside_of_a_stage(hand: Hand) -> Any:
    layer = hand.remat(wave)

    @jax.checkpoint
    def stage(ws: Any, x: Any) -> Any:
        for w in ws:
            x = layer(w, x)
        return x

    def loss(stages: Any, x: Any) -> Any:
        for ws in stages:
            x = stage(ws, x)
        return (x**2).mean()

    return with_moments(hand, loss, [square(32, 8)] * 2, f32(512, 32))


@program()
def loop_inside_of_a_stage(hand: Hand) -> Any:
    @jax.checkpoint
    def stage(w: Any, x: Any) -> Any:
        return hand.scan(lambda x, t: (jnp.sin(jnp.tanh(x @ w + t)), None), x, jnp.arange(60.0))[0]

    def loss(ws: Any, x: Any) -> Any:
        for w in ws:
            x = stage(w, x)
        return (x**2).mean()

    return with_moments(hand, loss, square(32, 3), f32(256, 32))


@program()
def calls_in_the_body_of_a_loop(hand: Hand) -> Any:
    layer = hand.remat(wave)

    def loss(ws: Any, xs: Any) -> Any:
        def body(h: Any, x: Any) -> Any:
            for w in ws:
                h = layer(w, h + x)
            return h, h.mean()

        return (jax.lax.scan(body, jnp.zeros((64, 32)), xs)[1] ** 2).mean()

    return with_moments(hand, loss, square(32, 2), f32(40, 64, 32), batch=())


# -- states ----------------------------------------------------------------------------------------------------------------


class Block:
    def __init__(self, seed: int, width: int = 64):
        self.w = statetx.Param(jax.random.normal(jax.random.key(seed), (width, width)) / 8)

    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(3):
            x = x + jnp.sin(jnp.tanh(x @ self.w.value))
        return x


@program()
def blocks_with_states(hand: Hand) -> Any:
    blocks = [Block(n) for n in range(6)]
    wrapped = [hand.remat(b, Block.__call__) for b in blocks]

    def loss(x: Any) -> Any:
        for block in wrapped:
            x = block(x)
        return (x**2).mean()

    return hand.stateful(loss, blocks), (f32(512, 64),)


class Dropout(Block):
    def __init__(self, seed: int):
        super().__init__(seed)
        self.rng = statetx.RngState(jax.random.key(seed))

    def __call__(self, x: jax.Array) -> jax.Array:
        keep = jax.random.bernoulli(self.rng.next(), 0.9, x.shape)
        return x + jnp.where(keep, jnp.sin(jnp.tanh(x @ self.w.value)), 0.0)


@program()
def blocks_with_dropout(hand: Hand) -> Any:
    blocks = [Dropout(n) for n in range(6)]
    wrapped = [hand.remat(b, Dropout.__call__) for b in blocks]

    def loss(x: Any) -> Any:
        for block in wrapped:
            x = block(x)
        return (x**2).mean()

    return hand.stateful(loss, blocks, batch=()), (f32(512, 64),)


# -- flax ------------------------------------------------------------------------------------------------------------------


@program("flax")
def nnx_list(hand: Hand) -> Any:
    from flax import nnx

    class Layer(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.up, self.down = nnx.Linear(32, 128, rngs=rngs), nnx.Linear(128, 32, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return x + self.down(nnx.gelu(self.up(x)))

    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.layers = nnx.List([Layer(rngs) for _ in range(6)])

    model = Model(nnx.Rngs(0))

    def loss(x: Any) -> Any:
        for layer in model.layers:
            x = hand.remat(layer, Layer.__call__)(x)
        return (x**2).mean()

    step, args = hand.stateful(loss, model, nnx.Param), (f32(512, 32),)
    loss(jnp.ones((512, 32)))  # notes the changes
    return step, args


@program("flax")
def nnx_convolutions(hand: Hand) -> Any:
    from flax import nnx

    class Residual(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.first, self.second = (nnx.Conv(8, 8, (3, 3), rngs=rngs) for _ in range(2))
            self.norm = nnx.LayerNorm(8, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return x + self.second(nnx.silu(self.first(nnx.silu(self.norm(x)))))

    blocks = nnx.List([Residual(nnx.Rngs(n)) for n in range(4)])
    wrapped = [hand.remat(b, Residual.__call__) for b in blocks]

    def loss(x: Any) -> Any:
        for block in wrapped:
            x = block(x)
        return (x**2).mean()

    return hand.stateful(loss, blocks, nnx.Param), (f32(16, 16, 16, 8),)


@program("flax")
def nnx_cell(hand: Hand) -> Any:
    from flax import nnx

    cell = nnx.GRUCell(16, 32, rngs=nnx.Rngs(0))

    def loss(xs: Any) -> Any:
        return (hand.scan(lambda h, x: (cell(h, x)[0], None), jnp.zeros((16, 32)), xs)[0] ** 2).mean()

    return hand.stateful(loss, cell, nnx.Param, batch=()), (f32(200, 16, 16),)


@program("flax")
def linen_blocks(hand: Hand) -> Any:
    from flax import linen as nn

    class Wide(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return x + nn.Dense(32)(nn.gelu(nn.Dense(128)(nn.LayerNorm()(x))))

    hand.changes["remat"] = "linen_blocks.Wide.__call__"
    inner = nn.remat(Wide) if hand.change == "remat" else Wide

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            for n in range(5):
                x = inner(name=f"block{n}")(x)
            return x

    model = Model()
    params = jax.eval_shape(model.init, jax.random.key(0), f32(512, 32))
    return with_moments(hand, lambda p, x: (model.apply(p, x) ** 2).mean(), params, f32(512, 32))


# -- equinox, haiku, optax
# ---------------------------------------------------------------------------------------------------


@program("equinox")
def equinox_blocks(hand: Hand) -> Any:
    import equinox as eqx

    class Gated(eqx.Module):
        up: eqx.nn.Linear
        down: eqx.nn.Linear

        def __init__(self, key: Any):
            self.up, self.down = eqx.nn.Linear(32, 128, key=key), eqx.nn.Linear(128, 32, key=key)

        def __call__(self, x: jax.Array) -> jax.Array:
            return x + jax.vmap(self.down)(jax.nn.gelu(jax.vmap(self.up)(x)))

    params, static = eqx.partition([Gated(jax.random.key(n)) for n in range(6)], eqx.is_array)

    def loss(params: Any, x: Any) -> Any:
        for block in eqx.combine(params, static):
            x = hand.remat(block, Gated.__call__)(x)
        return (x**2).mean()

    return with_moments(hand, loss, params, f32(512, 32))


@program("equinox")
def equinox_cell(hand: Hand) -> Any:
    import equinox as eqx

    params, static = eqx.partition(eqx.nn.GRUCell(16, 32, key=jax.random.key(0)), eqx.is_array)

    def loss(params: Any, xs: Any) -> Any:
        cell = jax.vmap(eqx.combine(params, static))
        return (hand.scan(lambda h, x: (cell(x, h), None), jnp.zeros((16, 32)), xs)[0] ** 2).mean()

    return with_moments(hand, loss, params, f32(200, 16, 16), batch=())


@program("haiku")
def haiku_blocks(hand: Hand) -> Any:
    import haiku as hk

    class Wide(hk.Module):
        def __call__(self, x: jax.Array) -> jax.Array:
            return x + hk.Linear(32)(jax.nn.gelu(hk.Linear(128)(x)))

    def network(x: jax.Array) -> jax.Array:
        for _ in range(5):
            x = hand.remat(Wide(), Wide.__call__)(x)
        return x

    model = hk.without_apply_rng(hk.transform(network))
    params = jax.eval_shape(model.init, jax.random.key(0), f32(512, 32))
    return with_moments(hand, lambda p, x: (model.apply(p, x) ** 2).mean(), params, f32(512, 32))


@program("optax")
def optax_adam(hand: Hand) -> Any:
    import optax

    optimizer, layer = optax.adam(1e-3), hand.remat(wave)

    def loss(ws: Any, x: Any) -> Any:
        for w in ws:
            x = layer(w, x)
        return (x**2).mean()

    hand.changes["donate"] = "params"

    def step(params: Any, state: Any, x: Any) -> Any:
        updates, state = optimizer.update(jax.grad(loss)(params, x), state, params)
        return optax.apply_updates(params, updates), state

    params = square(128, 6)
    state = jax.eval_shape(optimizer.init, params)
    donated = ("params",) if hand.change == "donate" else ()
    return jax.jit(step, donate_argnames=donated), (params, state, f32(256, 128))


# -- brainstate
# --------------------------------------------------------------------------------------------------------------


@program("brainstate")
def brainstate_blocks(hand: Hand) -> Any:
    import brainstate as bst

    class Layer(bst.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = bst.nn.Linear(32, 128), bst.nn.Linear(128, 32)

        def update(self, x: jax.Array) -> jax.Array:
            return x + self.down(jnp.sin(jnp.tanh(self.up(x))))

    layers = [Layer() for _ in range(6)]
    wrapped = [hand.remat(layer.update, Layer.update) for layer in layers]

    def loss(x: Any) -> Any:
        for layer in wrapped:
            x = layer(x)
        return (x**2).mean()

    return _of_brainstate(hand, loss, layers), (f32(512, 32),)


@program("brainstate")
def brainstate_neurons(hand: Hand) -> Any:
    import brainstate as bst

    w = bst.ParamState(jnp.eye(64))

    def loss(xs: Any) -> Any:
        def step(v: Any, x: Any) -> Any:
            v = 0.9 * v + x @ w.value
            s = spike(v - 1.0)
            return v - s, s.mean()

        return (hand.scan(step, jnp.zeros((32, 64)), xs)[1] ** 2).mean()

    return _of_brainstate(hand, loss, w, ()), (f32(200, 32, 64),)


def _of_brainstate(hand: Hand, loss: Callable, model: Any, batch: tuple[int, ...] = (0,)) -> Callable:
    """With a parameter that is a dict of arrays."""
    import brainstate as bst

    hand.changes |= {"donate": "states"} | ({"parts": "batch"} if batch else {})
    if hand.change == "parts":
        loss = statetx.microbatch(loss, PARTS, argnums=batch)

    def step(*data: Any) -> None:
        params = statetx.states(model, bst.ParamState)
        for name, g in statetx.grad(loss, wrt=params)(*data).items():
            params[name].value = jax.tree.map(lambda p, g: p - 0.1 * g, params[name].value, g)

    return statetx.jit(step, donate_states=hand.change == "donate")


# -- running -----------------------------------------------------------------------------------------------------------------

ACTIONS = {"remat": "remat", "body": "remat", "slots": "slots", "donate": "donate", "parts": "microbatch"}


def measured(make: Callable, change: str = "", strategy: Any = None) -> tuple[int, dict[str, str]]:
    """The peak of the program changed by hand, and the changes that it has places for."""
    hand = Hand(change, strategy)
    step, args = make(hand)
    return statetx.measure(step, *args, gradient=False).peak_bytes, hand.changes


def row(name: str) -> dict[str, Any]:
    make = PROGRAMS[name]
    begin = time.process_time()
    step, args = make(Hand())
    statetx.memory_profile(step, *args, gradient=False)
    of_profile = time.process_time() - begin
    plain, changes = measured(make)
    begin = time.process_time()
    report = statetx.explain_oom(step, *args, gradient=False, limit=int((1 - SAVES) * plain), time_limit=None)
    seconds = time.process_time() - begin - of_profile  # it makes a profile, too
    tried = {(r.change.action, r.change.owner): r for r in report.tried}
    found = {}
    for change, target in changes.items():
        action = ACTIONS[change]
        matching = [
            r
            for (a, t), r in tried.items()
            if a == action and (t == target or (target == "scan" and t.startswith("scan")))
        ]
        strategy = policies.Levels(2)
        if change == "slots" and matching:
            code = matching[0].change.text.partition("checkpoint=statetx.policies.")[2].partition(")")[0] + ")"
            strategy = eval(code, dict(vars(policies)))
        try:
            by_hand, _ = measured(make, change, strategy)
        except Exception as e:  # a program by hand that its library refuses
            found[change] = {"refused": f"{type(e).__name__}: {str(e).splitlines()[0][:200]}"}
            continue
        needed = matching[0].needed_bytes - report.profile.constant_bytes if matching else None
        saved = 1 - by_hand / plain
        off = None if needed is None else needed / by_hand - 1
        found[change] = {
            "target": target,
            "by_hand_bytes": by_hand,
            "saved": round(saved, 4),
            "advised_bytes": needed,
            "off": None if off is None else round(off, 4),
            "ok": saved < SAVES or (off is not None and abs(off) <= NEAR),
        }
    return {
        "name": name,
        "peak_bytes": plain,
        "changes": found,
        "remedies": [r.change.text for r in report.remedies],
        "tried": len(report.tried),
        "profile_seconds": round(of_profile, 1),
        "seconds": round(seconds, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(PROGRAMS))
    parser.add_argument("--out", type=pathlib.Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # of libraries, about names that they changed
    rows: dict[str, Any] = {}
    if options.out and options.out.exists():
        rows = {r["name"]: r for r in json.loads(options.out.read_text())}
    for name in options.names:
        if NEEDS[name] and importlib.util.find_spec(NEEDS[name]) is None:
            continue
        rows[name] = row(name)
        parts = [
            f"{c} {'refused' if 'refused' in f else ('OK' if f['ok'] else 'WRONG')} {f.get('saved', '')} "
            f"{f.get('off', '')}"
            for c, f in rows[name]["changes"].items()
        ]
        print(f"{name}: {'; '.join(parts)}; {rows[name]['seconds']} s", flush=True)
        if options.out:
            options.out.write_text(json.dumps([rows[n] for n in PROGRAMS if n in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
