"""Models for the planner, written with the layers of other libraries: flax, equinox, haiku, brainstate, and plain JAX.

Each maker returns a `Model`: a loss with its parameters and data, and a whole training step with an optimizer, which
differentiates by ``jax.value_and_grad`` as users of these libraries do; that of brainstate has its parameters in
states. `wrap` is applied to each block's function, as a user would apply ``statetx.remat``; by default blocks are
unchanged.

The models are small: each compiles in a few seconds on a CPU, and activations take most of its memory.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from programs import Program, identity


def donating(step: Callable[..., Any]) -> Any:
    """Compile a step that may use the memory of its parameters and of the optimizer's state for the new ones."""
    return jax.jit(step, donate_argnums=(0, 1))


class Model(NamedTuple):
    """A loss with its arguments, and a training step.

    Attributes:
        loss: ``loss(params, *data)``, a number.
        step: ``step(params, opt_state, *batch)`` returns new parameters, the optimizer's new state and the loss; or it
            keeps them in states, ``step(*batch)``.
        jit: compiles the step as its user would.
    """

    loss: Callable[..., Any]
    params: Any
    data: tuple[Any, ...]
    step: Callable[..., Any]
    step_args: tuple[Any, ...]
    jit: Callable[[Callable], Any] = donating


OPTIMIZER = optax.adam(1e-3)


def with_step(loss: Callable[..., Any], params: Any, data: tuple[Any, ...]) -> Model:
    """A model whose step is Adam on the gradient of its loss."""

    def step(params: Any, opt_state: Any, *data: Any) -> tuple[Any, Any, Any]:
        value, grads = jax.value_and_grad(loss)(params, *data)
        updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    return Model(loss, params, data, step, (params, OPTIMIZER.init(params), *data))


def of_program(program: Program) -> Model:
    """A program of ``programs.py`` with a training step."""
    return with_step(program.loss, program.params, program.data)


def _normal(seed: int, *shape: int, scale: float = 1.0) -> jax.Array:
    return jnp.asarray(scale * np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def _dense(seed: int, *shape: int) -> jax.Array:
    return _normal(seed, *shape, scale=1 / math.sqrt(math.prod(shape[:-1])))


def _integers(seed: int, high: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).integers(0, high, shape), jnp.int32)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def _layer_norm(x: jax.Array) -> jax.Array:
    return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)


# -- flax.nnx --------------------------------------------------------------------------------------------------------


def _rotated(x: jax.Array, positions: jax.Array) -> jax.Array:
    """Rotary embedding of (batch, time, heads, dim)."""
    half = x.shape[-1] // 2
    angles = positions[:, None] / 10_000 ** (jnp.arange(half) / half)[None]
    sin, cos = jnp.sin(angles)[None, :, None], jnp.cos(angles)[None, :, None]
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


@functools.cache
def _gemma_module() -> Any:
    """A class of modules; in a function, so that flax is imported only where a model needs it."""
    from flax import nnx

    class Block(nnx.Module):
        """Grouped-query attention, global or in a sliding window, and a gated hidden layer, with norms before and after
        each.
        """

        def __init__(self, width: int, heads: int, kv_heads: int, hidden: int, window: int | None, *, rngs: nnx.Rngs):
            dim = width // heads
            linear = functools.partial(nnx.LinearGeneral, use_bias=False, rngs=rngs)
            self.query = linear(width, (heads, dim))
            self.key, self.value = linear(width, (kv_heads, dim)), linear(width, (kv_heads, dim))
            self.out = linear((heads, dim), width, axis=(-2, -1))
            self.gate, self.up = linear(width, hidden), linear(width, hidden)
            self.down = linear(hidden, width)
            self.norms = nnx.List([nnx.RMSNorm(width, rngs=rngs) for _ in range(4)])
            self.head_norms = nnx.List([nnx.RMSNorm(dim, rngs=rngs) for _ in range(2)])
            self.window = window

        def attend(self, x: jax.Array) -> jax.Array:
            time = jnp.arange(x.shape[1])
            q = _rotated(self.head_norms[0](self.query(x)), time)
            k, v = _rotated(self.head_norms[1](self.key(x)), time), self.value(x)
            q = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[-1])
            scores = jnp.einsum("btkgd,bskd->bkgts", q, k) / math.sqrt(q.shape[-1])
            scores = 50.0 * jnp.tanh(scores / 50.0)
            ago = time[:, None] - time[None]
            mask = (ago >= 0) & (ago < (self.window or x.shape[1]))
            weights = jax.nn.softmax(jnp.where(mask, scores, -1e30))
            mixed = jnp.einsum("bkgts,bskd->btkgd", weights, v)
            return self.out(mixed.reshape(*x.shape[:2], -1, mixed.shape[-1]))

        def __call__(self, x: jax.Array) -> jax.Array:
            before, after, before_mlp, after_mlp = self.norms
            x = x + after(self.attend(before(x)))
            h = before_mlp(x)
            return x + after_mlp(self.down(jax.nn.gelu(self.gate(h)) * self.up(h)))

    class Gemma(nnx.Module):
        """Tied embeddings, blocks of which every other one looks through a window, capped logits."""

        def __init__(self, layers: int, width: int, vocab: int, window: int, *, rngs: nnx.Rngs):
            self.embed = nnx.Embed(vocab, width, rngs=rngs)
            windows = [window if i % 2 == 0 else None for i in range(layers)]
            self.blocks = nnx.List([Block(width, 4, 2, 3 * width, w, rngs=rngs) for w in windows])
            self.norm = nnx.RMSNorm(width, rngs=rngs)

    return Gemma


def gemma(
    wrap: Callable = identity, *, layers: int = 4, width: int = 128, vocab: int = 512, time: int = 128, batch: int = 8
) -> Model:
    """A language model in the manner of Gemma 3, of flax.nnx modules."""
    from flax import nnx

    graph, params = nnx.split(_gemma_module()(layers, width, vocab, time // 4, rngs=nnx.Rngs(0)))
    block = wrap(lambda params, x, graph: nnx.merge(graph, params)(x))

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        model = nnx.merge(graph, params)
        x = model.embed(tokens[:, :-1]) * math.sqrt(width)
        for layer in model.blocks:
            layer_graph, layer_params = nnx.split(layer)
            x = block(nnx.as_pure(layer_params), x, layer_graph)
        logits = 30.0 * jnp.tanh(model.embed.attend(model.norm(x)) / 30.0)
        return cross_entropy(logits, tokens[:, 1:])

    return with_step(loss, nnx.as_pure(params), (_integers(1, vocab, batch, time + 1),))


def lora(
    wrap: Callable = identity, *, layers: int = 4, width: int = 128, time: int = 64, batch: int = 16, rank: int = 4
) -> Model:
    """Adapters of low rank on the frozen linear layers of a transformer, of ``flax.nnx.LoRALinear``."""
    from flax import nnx

    class Block(nnx.Module):
        def __init__(self, *, rngs: nnx.Rngs):
            linear = functools.partial(nnx.LoRALinear, lora_rank=rank, rngs=rngs)
            self.qkv, self.out = linear(width, 3 * width), linear(width, width)
            self.up, self.down = linear(width, 4 * width), linear(4 * width, width)

        def __call__(self, x: jax.Array) -> jax.Array:
            heads = [y.reshape(*x.shape[:2], 4, -1) for y in jnp.split(self.qkv(_layer_norm(x)), 3, -1)]
            x = x + self.out(jax.nn.dot_product_attention(*heads, is_causal=True).reshape(x.shape))
            return x + self.down(jax.nn.gelu(self.up(_layer_norm(x))))

    blocks = [nnx.split(Block(rngs=nnx.Rngs(i)), nnx.LoRAParam, ...) for i in range(layers)]
    graph = blocks[0][0]
    block = wrap(lambda adapter, frozen, x: nnx.merge(graph, adapter, frozen)(x))

    def loss(adapters: Any, frozen: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        for adapter, weights in zip(adapters, frozen, strict=True):
            x = block(adapter, weights, x)
        return ((_layer_norm(x) - y) ** 2).mean()

    # The second factor of an adapter is zero at first, where the gradient of the other vanishes.
    adapters = [jax.tree.map(lambda a: a + _dense(a.size, *a.shape), nnx.as_pure(a)) for _, a, _ in blocks]
    shape = (batch, time, width)
    return with_step(
        loss, adapters, ([nnx.as_pure(frozen) for *_, frozen in blocks], _normal(1, *shape), _normal(2, *shape))
    )


# -- flax.linen and haiku --------------------------------------------------------------------------------------------


def seq2seq(wrap: Callable = identity, *, width: int = 128, vocab: int = 256, time: int = 64, batch: int = 32) -> Model:
    """Long short-term memories that read a sequence and write another, with attention; cells of flax.linen."""
    from flax import linen as nn

    cell, embed, readout = nn.OptimizedLSTMCell(width), nn.Embed(vocab, width), nn.Dense(vocab)
    read = wrap(lambda p, carry, x: cell.apply(p, carry, x))

    def attended(p: Any, carry: Any, x: jax.Array, memory: jax.Array) -> tuple[Any, jax.Array]:
        carry, h = cell.apply(p["cell"], carry, x)
        weights = jax.nn.softmax(jnp.einsum("bh,tbh->bt", h @ p["query"], memory))
        context = jnp.einsum("bt,tbh->bh", weights, memory)
        return carry, jnp.tanh(jnp.concatenate([h, context], -1) @ p["mix"])

    write = wrap(attended)

    def loss(params: Any, source: jax.Array, target: jax.Array) -> jax.Array:
        xs = embed.apply(params["embed"], source)
        carry = (jnp.zeros((batch, width)), jnp.zeros((batch, width)))
        for p in params["encoder"]:
            carry, xs = jax.lax.scan(lambda c, x, p=p: read(p, c, x), carry, xs)
        ys = embed.apply(params["embed"], target[:-1])
        _, ys = jax.lax.scan(lambda c, y: write(params["decoder"], c, y, xs), carry, ys)
        return cross_entropy(readout.apply(params["readout"], ys), target[1:])

    x, tokens = jnp.zeros((batch, width)), _integers(1, vocab, time, batch)
    keys = jax.random.split(jax.random.key(0), 5)
    cells = [cell.init(k, (x, x), x) for k in keys[:3]]
    params = {
        "embed": embed.init(keys[3], tokens),
        "encoder": cells[:2],
        "decoder": {"cell": cells[2], "query": _dense(2, width, width), "mix": _dense(3, 2 * width, width)},
        "readout": readout.init(keys[4], x),
    }
    return with_step(loss, params, (tokens, _integers(4, vocab, time + 1, batch)))


def gan(wrap: Callable = identity, *, channels: int = 16, size: int = 32, batch: int = 32, latent: int = 32) -> Model:
    """A generator and a discriminator of haiku layers, both trained in each step: two gradients of two losses."""
    import haiku as hk

    levels = int(math.log2(size // 4))
    widths = [channels * 2**i for i in range(levels)]

    def part(layer: Callable[[], Callable], activation: Callable) -> Any:
        return hk.without_apply_rng(hk.transform(lambda x: activation(layer()(x))))

    def grown(width: int) -> Any:
        return part(lambda: hk.Conv2DTranspose(width, 4, 2), lambda x: jax.nn.relu(_layer_norm(x)))

    def shrunk(width: int) -> Any:
        return part(lambda: hk.Conv2D(width, 4, 2), lambda x: jax.nn.leaky_relu(_layer_norm(x)))

    first = part(lambda: hk.Linear(16 * widths[-1]), lambda x: jax.nn.relu(x).reshape(-1, 4, 4, widths[-1]))
    last = part(lambda: hk.Conv2D(3, 3), jnp.tanh)
    head = part(lambda: hk.Sequential([hk.Flatten(), hk.Linear(1)]), lambda x: x)
    generator = [first, *(grown(w) for w in reversed(widths)), last]
    discriminator = [*(shrunk(w) for w in widths), head]
    blocks = {id(f): wrap(f.apply) for f in (*generator, *discriminator)}

    def run(network: list[Any], params: Any, x: jax.Array) -> jax.Array:
        for f, p in zip(network, params, strict=True):
            x = blocks[id(f)](p, x)
        return x

    def made(network: list[Any], x: jax.Array) -> tuple[list[Any], jax.Array]:
        params = []
        for i, f in enumerate(network):
            params.append(f.init(jax.random.key(i), x))
            x = f.apply(params[-1], x)
        return params, x

    def loss_of_generator(params: Any, other: Any, z: jax.Array) -> jax.Array:
        return jax.nn.softplus(-run(discriminator, other, run(generator, params, z))).mean()

    def loss_of_discriminator(params: Any, other: Any, z: jax.Array, real: jax.Array) -> jax.Array:
        fake = run(generator, other, z)
        judged = run(discriminator, params, jnp.concatenate([fake, real]))
        return jax.nn.softplus(judged[:batch]).mean() + jax.nn.softplus(-judged[batch:]).mean()

    def loss(params: Any, z: jax.Array, real: jax.Array) -> jax.Array:
        """A sum with the gradients of both losses."""
        held = jax.lax.stop_gradient(params)
        generated = loss_of_generator(params["g"], held["d"], z)
        return generated + loss_of_discriminator(params["d"], held["g"], z, real)

    def step(params: Any, opt_state: Any, z: jax.Array, real: jax.Array) -> tuple[Any, Any, Any]:
        new, new_state, total = {}, {}, 0.0
        losses = {"d": (loss_of_discriminator, "g", (z, real)), "g": (loss_of_generator, "d", (z,))}
        for name, (part_loss, other, data) in losses.items():
            value, grads = jax.value_and_grad(part_loss)(params[name], (params | new)[other], *data)
            updates, new_state[name] = OPTIMIZER.update(grads, opt_state[name], params[name])
            new[name] = optax.apply_updates(params[name], updates)
            total = total + value
        return new, new_state, total

    g, fake = made(generator, _normal(1, batch, latent))
    d, _ = made(discriminator, fake)
    params, data = {"g": g, "d": d}, (_normal(1, batch, latent), _normal(2, *fake.shape))
    opt_state = {k: OPTIMIZER.init(p) for k, p in params.items()}
    return Model(loss, params, data, step, (params, opt_state, *data))


# -- equinox ---------------------------------------------------------------------------------------------------------


@functools.cache
def _mixture_module() -> Any:
    import equinox as eqx

    class Mixture(eqx.Module):
        router: Any
        up: jax.Array
        down: jax.Array
        capacity: int = eqx.field(static=True)

        def __init__(self, width: int, experts: int, capacity: int, seed: int):
            self.capacity = capacity
            self.router = eqx.nn.Linear(width, experts, use_bias=False, key=jax.random.key(seed))
            self.up = jnp.stack([_dense(100 * seed + i, width, 2 * width) for i in range(experts)])
            self.down = jnp.stack([_dense(100 * seed + 50 + i, 2 * width, width) for i in range(experts)])

        def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            normed, experts = _layer_norm(x), len(self.up)
            probabilities = jax.nn.softmax(jax.vmap(self.router)(normed))
            weights, chosen = jax.lax.top_k(probabilities, 2)
            weights = weights / weights.sum(-1, keepdims=True)
            one_hot = jax.nn.one_hot(chosen.T.reshape(-1), experts)  # best choices first
            place = ((jnp.cumsum(one_hot, 0) - 1) * one_hot).sum(-1).astype(jnp.int32)
            slots = one_hot[:, :, None] * jax.nn.one_hot(place, self.capacity)[:, None]
            dispatch = slots.reshape(2, -1, experts, self.capacity)
            inputs = jnp.einsum("ktec,td->ecd", dispatch, normed)
            hidden = jax.nn.gelu(jnp.einsum("ecd,edh->ech", inputs, self.up))
            outputs = jnp.einsum("ech,ehd->ecd", hidden, self.down)
            combine = jnp.einsum("ktec,tk->tec", dispatch, weights)
            balance = experts * (probabilities.mean(0) * one_hot.mean(0)).sum()
            return x + jnp.einsum("tec,ecd->td", combine, outputs), balance

    return Mixture


def mixture_of_experts(
    wrap: Callable = identity,
    *,
    layers: int = 4,
    width: int = 128,
    tokens: int = 1024,
    experts: int = 8,
    capacity: int = 320,
) -> Model:
    """Each token goes to the two best of eight experts, each of which takes a limited number; equinox modules."""
    import equinox as eqx

    model = [_mixture_module()(width, experts, capacity, i + 1) for i in range(layers)]
    params, static = eqx.partition(model, eqx.is_array)
    block = wrap(lambda layer, x: layer(x))

    def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        total = jnp.zeros(())
        for layer in eqx.combine(params, static):
            x, balance = block(layer, x)
            total = total + balance
        return ((x - y) ** 2).mean() + 0.01 * total

    return with_step(loss, params, (_normal(1, tokens, width), _normal(2, tokens, width)))


@functools.cache
def _vision_module() -> Any:
    import equinox as eqx

    class Block(eqx.Module):
        norms: list[Any]
        attention: Any
        mlp: Any

        def __init__(self, width: int, key: jax.Array):
            a, b = jax.random.split(key)
            self.norms = [eqx.nn.LayerNorm(width) for _ in range(2)]
            self.attention = eqx.nn.MultiheadAttention(4, width, key=a)
            self.mlp = eqx.nn.MLP(width, width, 4 * width, 1, jax.nn.gelu, key=b)

        def __call__(self, x: jax.Array) -> jax.Array:
            h = jax.vmap(self.norms[0])(x)
            x = x + self.attention(h, h, h)
            return x + jax.vmap(self.mlp)(jax.vmap(self.norms[1])(x))

    return Block


def accumulation(
    wrap: Callable = identity, *, layers: int = 4, width: int = 128, time: int = 64, batch: int = 16, parts: int = 4
) -> Model:
    """A vision transformer of equinox layers; the step adds up the gradients of four parts of its batch in a scan."""
    import equinox as eqx

    blocks = [_vision_module()(width, key) for key in jax.random.split(jax.random.key(0), layers)]
    params, static = eqx.partition(blocks, eqx.is_array)
    block = wrap(lambda layer, x: jax.vmap(layer)(x))

    def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        for layer in eqx.combine(params, static):
            x = block(layer, x)
        return ((_layer_norm(x).mean(1) - y) ** 2).mean()

    def step(params: Any, opt_state: Any, xs: jax.Array, ys: jax.Array) -> tuple[Any, Any, Any]:
        def add(total: Any, part: Any) -> tuple[Any, jax.Array]:
            value, grads = jax.value_and_grad(loss)(params, *part)
            return jax.tree.map(jnp.add, total, grads), value

        total, values = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), (xs, ys))
        updates, opt_state = OPTIMIZER.update(jax.tree.map(lambda g: g / parts, total), opt_state, params)
        return optax.apply_updates(params, updates), opt_state, values.mean()

    xs, ys = _normal(1, parts, batch, time, width), _normal(2, parts, batch, width)
    return Model(loss, params, (xs[0], ys[0]), step, (params, OPTIMIZER.init(params), xs, ys))


# -- brainstate ------------------------------------------------------------------------------------------------------


def spiking(
    wrap: Callable = identity, *, steps: int = 100, hidden: int = 128, batch: int = 32, inputs: int = 64
) -> Model:
    """Two layers of leaky integrate-and-fire neurons of brainpy.state, trained through time by surrogate gradients."""
    import brainpy.state
    import brainstate
    import braintools
    import brainunit as u
    from brainstate import nn

    import statetx

    def layer(num_in: int) -> Any:
        current = braintools.init.KaimingNormal(40.0, unit=u.mA)
        return nn.Sequential(
            nn.Linear(num_in, hidden, w_init=current, b_init=lambda size: jnp.zeros(size) * u.mA),
            brainpy.state.Expon(hidden, tau=5.0 * u.ms, g_initializer=braintools.init.Constant(0.0 * u.mA)),
            brainpy.state.LIF(
                hidden,
                tau=20.0 * u.ms,
                V_reset=0.0 * u.mV,
                V_rest=0.0 * u.mV,
                V_th=1.0 * u.mV,
                spk_fun=braintools.surrogate.ReluGrad(),
            ),
        )

    brainstate.random.seed(0)
    with brainstate.environ.context(dt=1.0 * u.ms):
        net = nn.Sequential(layer(inputs), layer(hidden), brainpy.state.LeakyRateReadout(hidden, 10, tau=5.0 * u.ms))
        nn.init_all_states(net, batch_size=batch)
    update = wrap(lambda x: net.update(x))

    def stateful(spikes: jax.Array, labels: jax.Array) -> jax.Array:
        def run(i: jax.Array, x: jax.Array) -> jax.Array:
            with brainstate.environ.context(i=i, t=i * 1.0 * u.ms, dt=1.0 * u.ms):
                return update(x)

        outputs = statetx.map(lambda xs: run(*xs), (jnp.arange(steps), spikes))
        return cross_entropy(outputs.mean(0), labels)

    spikes = (jnp.abs(_normal(1, steps, batch, inputs)) > 1).astype(jnp.float32)
    data = (spikes, _integers(2, 10, batch))
    pure = statetx.functionalize(stateful)
    values, states = pure.values(*data), pure.states(*data)
    params = {k: v for k, v in values.items() if isinstance(states[k], brainstate.ParamState)}
    hidden_states = {k: v for k, v in values.items() if k not in params}

    def loss(params: Any, hidden_states: Any, spikes: jax.Array, labels: jax.Array) -> jax.Array:
        return pure(params | hidden_states, spikes, labels)[0]

    weights = net.states(brainstate.ParamState)
    optimizer = braintools.optim.Adam(lr=1e-3)
    optimizer.register_trainable_weights(weights)

    def step(spikes: jax.Array, labels: jax.Array) -> jax.Array:
        value, grads = statetx.value_and_grad(stateful, wrt=weights)(spikes, labels)
        optimizer.update(grads)
        return value

    return Model(loss, params, (hidden_states, *data), step, data, functools.partial(statetx.jit, donate_states=True))


# -- plain JAX -------------------------------------------------------------------------------------------------------


def graph_network(
    wrap: Callable = identity, *, layers: int = 5, width: int = 64, nodes: int = 1024, edges: int = 8192
) -> Model:
    """Messages along the edges of a random graph, summed at each node, as jraph's networks do it."""
    senders, receivers = _integers(1, nodes, edges), _integers(2, nodes, edges)

    @wrap
    def block(p: Any, h: jax.Array, e: jax.Array, senders: jax.Array, receivers: jax.Array) -> tuple[Any, Any]:
        message = jax.nn.silu(jnp.concatenate([h[senders], h[receivers], e], -1) @ p["edge"]) @ p["message"]
        gathered = jax.ops.segment_sum(message, receivers, num_segments=nodes)
        update = jax.nn.silu(jnp.concatenate([h, gathered], -1) @ p["node"]) @ p["out"]
        return _layer_norm(h + update), e + message

    def loss(params: Any, h: jax.Array, e: jax.Array, y: jax.Array, *graph: jax.Array) -> jax.Array:
        for p in params:
            h, e = block(p, h, e, *graph)
        return ((h - y) ** 2).mean() + (e**2).mean()

    params = [
        {
            "edge": _dense(10 * i, 3 * width, 2 * width),
            "message": _dense(10 * i + 1, 2 * width, width),
            "node": _dense(10 * i + 2, 2 * width, 2 * width),
            "out": _dense(10 * i + 3, 2 * width, width),
        }
        for i in range(layers)
    ]
    return with_step(
        loss,
        params,
        (_normal(1, nodes, width), _normal(2, edges, width), _normal(3, nodes, width), senders, receivers),
    )


def meta_learning(
    wrap: Callable = identity, *, layers: int = 6, width: int = 64, tasks: int = 8, points: int = 256, inner: int = 2
) -> Model:
    """Model-agnostic meta-learning: the loss after two steps of gradient descent, which the gradient goes through."""

    @wrap
    def block(p: Any, x: jax.Array) -> jax.Array:
        return x + jnp.tanh(x @ p["up"]) @ p["down"]

    def task_loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        for p in params:
            x = block(p, x)
        return ((x - y) ** 2).mean()

    def adapted(params: Any, x: jax.Array, y: jax.Array) -> Any:
        for _ in range(inner):
            grads = jax.grad(task_loss)(params, x, y)
            params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        return params

    def loss(params: Any, support: Any, query: Any) -> jax.Array:
        one = lambda support, query: task_loss(adapted(params, *support), *query)
        return jax.vmap(one)(support, query).mean()

    params = [
        {"up": _dense(2 * i, width, 4 * width), "down": _dense(2 * i + 1, 4 * width, width)} for i in range(layers)
    ]
    support, query = ((_normal(s, tasks, points, width), _normal(s + 1, tasks, points, width)) for s in (20, 30))
    return with_step(loss, params, (support, query))


@jax.custom_vjp
def flash_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Attention that saves the logarithm of each row's sum instead of the weights; (batch, heads, time, dim)."""
    return _flash_forward(q, k, v)[0]


def _weights(q: jax.Array, k: jax.Array) -> jax.Array:
    return jnp.einsum("bhtd,bhsd->bhts", q, k, preferred_element_type=jnp.float32) / math.sqrt(q.shape[-1])


def _flash_forward(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, Any]:
    scores = _weights(q, k)
    log_sum = jax.nn.logsumexp(scores, -1, keepdims=True)
    out = jnp.einsum("bhts,bhsd->bhtd", jnp.exp(scores - log_sum).astype(v.dtype), v)
    return out, (q, k, v, out, log_sum)


def _flash_backward(saved: Any, d_out: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    q, k, v, out, log_sum = saved
    weights = jnp.exp(_weights(q, k) - log_sum).astype(v.dtype)
    d_weights = jnp.einsum("bhtd,bhsd->bhts", d_out, v)
    d_scores = weights * (d_weights - (d_out * out).sum(-1, keepdims=True)) / math.sqrt(q.shape[-1])
    d_q, d_k = jnp.einsum("bhts,bhsd->bhtd", d_scores, k), jnp.einsum("bhts,bhtd->bhsd", d_scores, q)
    return d_q, d_k, jnp.einsum("bhts,bhtd->bhsd", weights, d_out)


flash_attention.defvjp(_flash_forward, _flash_backward)


def flash_transformer(
    wrap: Callable = identity, *, layers: int = 4, width: int = 128, time: int = 128, batch: int = 8
) -> Model:
    """Blocks in bfloat16 with parameters in float32, and an attention with a derivative rule of its own."""

    @wrap
    def block(p: Any, x: jax.Array) -> jax.Array:
        p = jax.tree.map(lambda w: w.astype(x.dtype), p)
        heads = (_layer_norm(x) @ p["qkv"]).reshape(*x.shape[:2], 3, 4, -1).transpose(2, 0, 3, 1, 4)
        mixed = flash_attention(*heads).transpose(0, 2, 1, 3).reshape(x.shape)
        x = x + mixed @ p["out"]
        return x + jax.nn.gelu(_layer_norm(x) @ p["up"]) @ p["down"]

    def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        x = x.astype(jnp.bfloat16)
        for p in params:
            x = block(p, x)
        return ((_layer_norm(x.astype(jnp.float32)) - y) ** 2).mean()

    shapes = {"qkv": (width, 3 * width), "out": (width, width), "up": (width, 4 * width), "down": (4 * width, width)}
    params = [{k: _dense(10 * i + n, *s) for n, (k, s) in enumerate(shapes.items())} for i in range(layers)]
    return with_step(loss, params, (_normal(1, batch, time, width), _normal(2, batch, time, width)))


MODELS: dict[str, Callable[..., Model]] = {
    "Gemma (flax.nnx)": gemma,
    "LoRA (flax.nnx)": lora,
    "LSTM seq2seq (flax.linen)": seq2seq,
    "GAN (haiku)": gan,
    "mixture of experts (equinox)": mixture_of_experts,
    "gradient accumulation (equinox)": accumulation,
    "spiking network (brainstate)": spiking,
    "graph network": graph_network,
    "meta-learning": meta_learning,
    "flash attention, bfloat16": flash_transformer,
}
