"""Models and training steps that people run, written for this benchmark in the libraries they use, at real sizes.

Each entry makes a function and the types of its arguments: nothing is initialized, and nothing runs. Layers of equal shape are the
steps of a loop, which compiles once for all of them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

BF16, F32, I32 = jnp.bfloat16, jnp.float32, jnp.int32


class PublicModel(NamedTuple):
    """A model, and what is done with it.

    Attributes:
        size: layers, shapes and what is computed, as a reader would say it.
        make: returns the function and the types of its arguments.
    """

    library: str
    dtype: str
    size: str
    make: Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]


PUBLIC: dict[str, PublicModel] = {}


def public(name: str, library: str, dtype: str, size: str) -> Callable[[Callable], Callable]:
    def add(make: Callable) -> Callable:
        PUBLIC[name] = PublicModel(library, dtype, size, make)
        return make

    return add


def typed(*shape: int, dtype: Any = F32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


KEY = jax.eval_shape(lambda: jax.random.key(0))


def stacked(num: int, types: Any) -> Any:
    """The types of the weights of several equal layers."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((num, *x.shape), x.dtype), types)


def trained(loss: Callable, optimizer: Any, params: Any, *data: Any) -> tuple[Callable, tuple[Any, ...]]:
    """A training step that donates weights and the optimizer's state."""

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Any, state: Any, *data: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, *data)
        updates, state = optimizer.update(grads, state, params)
        return jax.tree.map(lambda p, u: p + u.astype(p.dtype), params, updates), state, value

    return step, (params, jax.eval_shape(optimizer.init, params), *data)


def differentiated(loss: Callable, params: Any, *data: Any) -> tuple[Callable, tuple[Any, ...]]:
    return jax.value_and_grad(loss), (params, *data)


def split(make: Callable[[], Any]) -> tuple[Callable[[Any], Any], Any]:
    """A function that puts weights into a model of flax.nnx, and their types."""
    from flax import nnx

    graph, state = nnx.split(nnx.eval_shape(make))
    leaves, structure = jax.tree.flatten(state)
    return lambda weights: nnx.merge(graph, jax.tree.unflatten(structure, weights)), leaves


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    logits = logits.astype(F32)
    picked = jnp.take_along_axis(logits, labels[..., None], -1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, -1) - picked)


def layer_norm(x: jax.Array, scale: Any = 1.0) -> jax.Array:
    x = x.astype(F32)
    x = (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)
    return x * scale


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return (x * jax.lax.rsqrt(jnp.mean(jnp.square(x.astype(F32)), -1, keepdims=True) + 1e-6)).astype(x.dtype) * scale


def attention(q: jax.Array, k: jax.Array, v: jax.Array, *, causal: bool) -> jax.Array:
    """Of arrays [batch, time, heads, width]; keys may have fewer heads."""
    batch, time, heads, width = q.shape
    groups = k.shape[2]
    q = q.reshape(batch, time, groups, heads // groups, width)
    scores = jnp.einsum("btghd,bsgd->bghts", q, k).astype(F32) / math.sqrt(width)
    if causal:
        scores = jnp.where(jnp.tril(jnp.ones((time, k.shape[1]), bool)), scores, -1e9)
    out = jnp.einsum("bghts,bsgd->btghd", jax.nn.softmax(scores).astype(v.dtype), v)
    return out.reshape(batch, time, heads, width)


# -- images ----------------------------------------------------------------------------------------------------------


@public("ViT-B/16", "flax.linen", "bfloat16", "12 layers, 64 x 224 x 224, AdamW step")
def vision_transformer() -> Any:
    import flax.linen as nn
    import optax

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x: Any, _: Any) -> Any:
            y = nn.LayerNorm(dtype=BF16)(x)
            x = x + nn.MultiHeadDotProductAttention(12, dtype=BF16)(y, y)
            y = nn.Dense(3072, dtype=BF16)(nn.LayerNorm(dtype=BF16)(x))
            return x + nn.Dense(768, dtype=BF16)(nn.gelu(y)), None

    class Model(nn.Module):
        @nn.compact
        def __call__(self, images: Any) -> Any:
            x = nn.Conv(768, (16, 16), (16, 16), "VALID", dtype=BF16)(images)
            x = x.reshape(x.shape[0], -1, 768)
            token = self.param("token", nn.initializers.zeros, (1, 1, 768), F32)
            x = jnp.concatenate([jnp.tile(token.astype(BF16), (x.shape[0], 1, 1)), x], 1)
            x = x + self.param("position", nn.initializers.normal(0.02), (1, x.shape[1], 768), F32).astype(BF16)
            blocks = nn.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=12)
            x, _ = blocks()(x, None)
            return nn.Dense(1000, dtype=BF16)(nn.LayerNorm(dtype=BF16)(x[:, 0]))

    model, images, labels = Model(), typed(64, 224, 224, 3), typed(64, dtype=I32)
    params = jax.eval_shape(model.init, KEY, images)
    return trained(lambda p, x, y: cross_entropy(model.apply(p, x), y), optax.adamw(1e-3), params, images, labels)


@public("ViT patch embedding and MLP head", "flax.nnx", "float32", "width 512, 2,048 x 224 x 224, gradient")
def patch_embedding() -> Any:
    from flax import nnx

    class Model(nnx.Module):
        def __init__(self, rngs: Any):
            self.patches = nnx.Conv(3, 256, (16, 16), strides=(16, 16), padding="VALID", rngs=rngs)
            self.embed = nnx.Linear(256, 512, rngs=rngs)
            self.token = nnx.Param(jnp.zeros((1, 1, 512)))
            self.position = nnx.Param(jnp.zeros((1, 197, 512)))
            self.head = nnx.Linear(512, 1000, rngs=rngs)

        def __call__(self, images: Any) -> Any:
            x = self.patches(images)
            x = self.embed(x.reshape(x.shape[0], -1, 256))
            x = jnp.concatenate([jnp.tile(self.token[...], (x.shape[0], 1, 1)), x], 1) + self.position[...]
            return self.head(nnx.gelu(x).mean(1))

    merge, params = split(lambda: Model(nnx.Rngs(0)))
    loss = lambda params, x, y: cross_entropy(merge(params)(x), y)
    return differentiated(loss, params, typed(2048, 224, 224, 3), typed(2048, dtype=I32))


@public("ResNet-50", "flax.linen", "float32", "batch statistics, 64 x 224 x 224, SGD step")
def resnet() -> Any:
    import flax.linen as nn
    import optax

    norm = functools.partial(nn.BatchNorm, use_running_average=False)

    class Block(nn.Module):
        width: int
        stride: int = 1

        @nn.compact
        def __call__(self, x: Any, _: Any = None) -> Any:
            y = nn.relu(norm()(nn.Conv(self.width, (1, 1), use_bias=False)(x)))
            y = nn.relu(norm()(nn.Conv(self.width, (3, 3), (self.stride,) * 2, use_bias=False)(y)))
            y = norm()(nn.Conv(4 * self.width, (1, 1), use_bias=False)(y))
            if x.shape != y.shape:
                x = norm()(nn.Conv(4 * self.width, (1, 1), (self.stride,) * 2, use_bias=False)(x))
            return nn.relu(x + y), None

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            x = nn.relu(norm()(nn.Conv(64, (7, 7), (2, 2), use_bias=False)(x)))
            x = nn.max_pool(x, (3, 3), (2, 2), "SAME")
            for i, num in enumerate((3, 4, 6, 3)):
                x, _ = Block(64 * 2**i, 1 if i == 0 else 2)(x)
                rest = nn.scan(Block, {"params": 0, "batch_stats": 0}, split_rngs={"params": True}, length=num - 1)
                x, _ = rest(64 * 2**i)(x, None)
            return nn.Dense(1000)(x.mean((1, 2)))

    model, images, labels = Model(), typed(64, 224, 224, 3), typed(64, dtype=I32)
    variables = jax.eval_shape(model.init, KEY, images)
    optimizer = optax.sgd(0.1, momentum=0.9)

    @functools.partial(jax.jit, donate_argnums=(0, 1, 2))
    def step(params: Any, stats: Any, state: Any, images: Any, labels: Any) -> Any:
        def loss(params: Any) -> Any:
            logits, new = model.apply({"params": params, "batch_stats": stats}, images, mutable=["batch_stats"])
            return cross_entropy(logits, labels), new["batch_stats"]

        (value, new), grads = jax.value_and_grad(loss, has_aux=True)(params)
        updates, new_state = optimizer.update(grads, state)
        return optax.apply_updates(params, updates), new, new_state, value

    params = variables["params"]
    return step, (params, variables["batch_stats"], jax.eval_shape(optimizer.init, params), images, labels)


@public("ConvNeXt-T", "equinox", "bfloat16", "18 blocks, 32 x 224 x 224, gradient")
def convnext() -> Any:
    import equinox as eqx

    class Block(eqx.Module):
        depthwise: eqx.nn.Conv2d
        up: eqx.nn.Conv2d
        down: eqx.nn.Conv2d
        scale: jax.Array

        def __init__(self, width: int, key: Any):
            a, b, c = jax.random.split(key, 3)
            self.depthwise = eqx.nn.Conv2d(width, width, 7, padding=3, groups=width, key=a)
            self.up, self.down = eqx.nn.Conv2d(width, 4 * width, 1, key=b), eqx.nn.Conv2d(4 * width, width, 1, key=c)
            self.scale = jnp.full((width, 1, 1), 1e-6)

        def __call__(self, x: Any) -> Any:
            y = jnp.moveaxis(layer_norm(jnp.moveaxis(self.depthwise(x), 0, -1)), -1, 0).astype(x.dtype)
            return x + self.scale * self.down(jax.nn.gelu(self.up(y)))

    widths, depths = (96, 192, 384, 768), (3, 3, 9, 3)

    def make(key: Any) -> Any:
        downs, stages = [], []
        for i, (width, depth) in enumerate(zip(widths, depths, strict=True)):
            size = 4 if i == 0 else 2
            downs.append(eqx.nn.Conv2d(3 if i == 0 else widths[i - 1], width, size, size, key=key))
            stages.append(eqx.filter_vmap(functools.partial(Block, width))(jax.random.split(key, depth)))
        return downs, stages, eqx.nn.Linear(768, 1000, key=key)

    model = eqx.filter_eval_shape(make, jax.random.key(0))
    types, static = eqx.partition(model, lambda x: isinstance(x, jax.ShapeDtypeStruct))
    types = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, BF16), types)

    def loss(types: Any, images: Any, labels: Any) -> Any:
        downs, stages, head = eqx.combine(types, static)

        def one(x: Any) -> Any:
            for down, blocks in zip(downs, stages, strict=True):
                arrays, other = eqx.partition(blocks, eqx.is_array)
                x, _ = jax.lax.scan(lambda x, a: (eqx.combine(a, other)(x), None), down(x), arrays)  # noqa: B023
            return head(x.mean((1, 2)))

        return cross_entropy(jax.vmap(one)(images), labels)

    return differentiated(loss, types, typed(32, 3, 224, 224, dtype=BF16), typed(32, dtype=I32))


@public("EfficientNet block stack", "haiku", "bfloat16", "6 blocks, 128 x 112 x 112, gradient")
def efficientnet() -> Any:
    import haiku as hk

    def forward(x: Any) -> Any:
        x = jax.nn.silu(hk.Conv2D(32, 3, 2)(x))
        for width, stride in ((24, 2), (24, 1), (40, 2), (40, 1), (80, 2), (80, 1)):
            y = jax.nn.silu(hk.Conv2D(6 * x.shape[-1], 1)(x))
            y = jax.nn.silu(hk.DepthwiseConv2D(1, 5, stride)(y))
            gate = jax.nn.silu(hk.Linear(x.shape[-1] // 4)(y.mean((1, 2))))
            y = y * jax.nn.sigmoid(hk.Linear(y.shape[-1])(gate))[:, None, None]
            y = hk.Conv2D(width, 1)(y)
            x = x + y if x.shape == y.shape else y
        return hk.Linear(1000)(x.mean((1, 2)))

    model, images, labels = (
        hk.without_apply_rng(hk.transform(forward)),
        typed(128, 112, 112, 3, dtype=BF16),
        typed(128, dtype=I32),
    )
    params = jax.eval_shape(model.init, KEY, images)
    return differentiated(lambda p, x, y: cross_entropy(model.apply(p, x), y), params, images, labels)


@public("diffusion U-Net with attention", "flax.linen", "float32", "widths to 512, 16 x 64 x 64, Adam step")
def diffusion() -> Any:
    import flax.linen as nn
    import optax

    class Residual(nn.Module):
        width: int

        @nn.compact
        def __call__(self, x: Any, emb: Any) -> Any:
            y = nn.Conv(self.width, (3, 3))(nn.silu(nn.GroupNorm(32)(x)))
            y = y + nn.Dense(self.width)(nn.silu(emb))[:, None, None]
            y = nn.Conv(self.width, (3, 3))(nn.silu(nn.GroupNorm(32)(y)))
            return y + (x if x.shape[-1] == self.width else nn.Conv(self.width, (1, 1))(x))

    class Attention(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            flat = nn.GroupNorm(32)(x).reshape(x.shape[0], -1, x.shape[-1])
            return x + nn.MultiHeadDotProductAttention(8)(flat, flat).reshape(x.shape)

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x: Any, time: Any) -> Any:
            angles = time[:, None] * jnp.exp(-jnp.arange(64) * math.log(10_000) / 64)
            emb = nn.Dense(512)(jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1))
            x, skips = nn.Conv(128, (3, 3))(x), []
            for width in (128, 256, 512):
                x = Residual(width)(x, emb)
                x = Attention()(x) if width == 512 else x
                skips.append(x)
                x = nn.Conv(width, (3, 3), (2, 2))(x)
            x = Attention()(Residual(512)(x, emb))
            for width in (512, 256, 128):
                x = jax.image.resize(x, (x.shape[0], 2 * x.shape[1], 2 * x.shape[2], x.shape[3]), "nearest")
                x = Residual(width)(jnp.concatenate([nn.Conv(width, (3, 3))(x), skips.pop()], -1), emb)
            return nn.Conv(3, (3, 3))(nn.silu(nn.GroupNorm(32)(x)))

    model, images, times = Model(), typed(16, 64, 64, 3), typed(16)
    params = jax.eval_shape(model.init, KEY, images, times)

    def loss(params: Any, key: Any, images: Any, times: Any) -> Any:
        noise = jax.random.normal(key, images.shape)
        a = jnp.cos(times)[:, None, None, None]
        return jnp.mean((model.apply(params, a * images + jnp.sqrt(1 - a * a) * noise, times) - noise) ** 2)

    return trained(loss, optax.adam(1e-4), params, KEY, images, times)


@public("segmentation U-Net", "flax.nnx", "bfloat16", "widths to 512, 8 x 256 x 256, gradient")
def segmentation() -> Any:
    from flax import nnx

    class Double(nnx.Module):
        def __init__(self, features: int, width: int, rngs: Any):
            self.first = nnx.Conv(features, width, (3, 3), dtype=BF16, rngs=rngs)
            self.norm = nnx.GroupNorm(width, 16, dtype=BF16, rngs=rngs)
            self.second = nnx.Conv(width, width, (3, 3), dtype=BF16, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return nnx.relu(self.second(nnx.relu(self.norm(self.first(x)))))

    class Model(nnx.Module):
        def __init__(self, rngs: Any):
            widths = (64, 128, 256, 512)
            self.down = nnx.List([Double(a, b, rngs) for a, b in zip((3, *widths), widths, strict=False)])
            self.ups = nnx.List(
                [nnx.ConvTranspose(2 * w, w, (2, 2), (2, 2), dtype=BF16, rngs=rngs) for w in (256, 128, 64)]
            )
            self.up = nnx.List([Double(2 * w, w, rngs) for w in (256, 128, 64)])
            self.head = nnx.Conv(64, 21, (1, 1), dtype=BF16, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            skips = []
            for i, block in enumerate(self.down):
                x = block(nnx.max_pool(x, (2, 2), (2, 2)) if i else x)
                skips.append(x)
            for up, block, skip in zip(self.ups, self.up, skips[-2::-1], strict=True):
                x = block(jnp.concatenate([up(x), skip], -1))
            return self.head(x)

    merge, params = split(lambda: Model(nnx.Rngs(0)))
    loss = lambda params, x, y: cross_entropy(merge(params)(x), y)
    return differentiated(loss, params, typed(8, 256, 256, 3, dtype=BF16), typed(8, 256, 256, dtype=I32))


@public("DCGAN", "haiku", "float32", "128 x 64 x 64, both gradients")
def gan() -> Any:
    import haiku as hk

    def generate(z: Any) -> Any:
        x = jax.nn.relu(hk.Linear(4 * 4 * 512)(z)).reshape(-1, 4, 4, 512)
        for width in (256, 128, 64):
            x = jax.nn.relu(hk.LayerNorm(-1, True, True)(hk.Conv2DTranspose(width, 4, 2)(x)))
        return jnp.tanh(hk.Conv2DTranspose(3, 4, 2)(x))

    def discriminate(x: Any) -> Any:
        for width in (64, 128, 256, 512):
            x = jax.nn.leaky_relu(hk.Conv2D(width, 4, 2)(x), 0.2)
        return hk.Linear(1)(x.reshape(x.shape[0], -1))[:, 0]

    gen, dis = (hk.without_apply_rng(hk.transform(f)) for f in (generate, discriminate))
    z, images = typed(128, 128), typed(128, 64, 64, 3)
    gen_params, dis_params = jax.eval_shape(gen.init, KEY, z), jax.eval_shape(dis.init, KEY, images)

    def both(gen_params: Any, dis_params: Any, z: Any, images: Any) -> Any:
        def gen_loss(p: Any) -> Any:
            return jax.nn.softplus(-dis.apply(dis_params, gen.apply(p, z))).mean()

        def dis_loss(p: Any) -> Any:
            real, fake = dis.apply(p, images), dis.apply(p, gen.apply(gen_params, z))
            return (jax.nn.softplus(-real) + jax.nn.softplus(fake)).mean()

        return jax.grad(gen_loss)(gen_params), jax.grad(dis_loss)(dis_params)

    return both, (gen_params, dis_params, z, images)


# -- language --------------------------------------------------------------------------------------------------------


def block_types(width: int, heads: int, kv_heads: int, hidden: int, dtype: Any, *, gated: bool) -> dict[str, Any]:
    each = width // heads
    types = {
        "q": typed(width, heads, each, dtype=dtype),
        "k": typed(width, kv_heads, each, dtype=dtype),
        "v": typed(width, kv_heads, each, dtype=dtype),
        "out": typed(heads, each, width, dtype=dtype),
        "up": typed(width, hidden, dtype=dtype),
        "down": typed(hidden, width, dtype=dtype),
        "norms": typed(2, width, dtype=dtype),
    }
    return types | ({"gate": typed(width, hidden, dtype=dtype)} if gated else {})


def rotated(x: jax.Array) -> jax.Array:
    """Rotary positions of [batch, time, heads, width]."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] * jnp.exp(-jnp.arange(half) * math.log(10_000) / half)
    cos, sin = (f(angles)[None, :, None].astype(x.dtype) for f in (jnp.cos, jnp.sin))
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1)


def attended(w: dict[str, Any], x: jax.Array, *, causal: bool = True, rotary: bool = False) -> jax.Array:
    y = rms_norm(x, w["norms"][0])
    q, k, v = (jnp.einsum("btw,whd->bthd", y, w[name]) for name in "qkv")
    q, k = (rotated(q), rotated(k)) if rotary else (q, k)
    return x + jnp.einsum("bthd,hdw->btw", attention(q, k, v, causal=causal), w["out"])


def dense_block(w: dict[str, Any], x: jax.Array, **options: Any) -> jax.Array:
    x = attended(w, x, **options)
    y = rms_norm(x, w["norms"][1])
    hidden = jax.nn.silu(y @ w["gate"]) * (y @ w["up"]) if "gate" in w else jax.nn.gelu(y @ w["up"])
    return x + hidden @ w["down"]


def next_token_loss(block: Callable, params: Any, tokens: jax.Array) -> jax.Array:
    x = params["embed"][tokens]
    x, _ = jax.lax.scan(lambda x, w: (block(w, x), None), x, params["blocks"])
    logits = jnp.einsum("btw,vw->btv", rms_norm(x, params["norm"]), params["embed"])
    return cross_entropy(logits[:, :-1], tokens[:, 1:])


def language_types(layers: int, vocab: int, width: int, dtype: Any, block: Any) -> dict[str, Any]:
    return {
        "embed": typed(vocab, width, dtype=dtype),
        "blocks": stacked(layers, block),
        "norm": typed(width, dtype=dtype),
    }


@public("GPT-2 small", "JAX", "float32", "12 layers, 4 x 1,024 tokens, AdamW step")
def gpt2() -> Any:
    import optax

    block = block_types(768, 12, 12, 3072, F32, gated=False)
    params = language_types(12, 50257, 768, F32, block)
    loss = functools.partial(next_token_loss, dense_block)
    return trained(loss, optax.adamw(3e-4), params, typed(4, 1024, dtype=I32))


@public("Llama-like, grouped queries", "JAX", "bfloat16", "8 layers of 2,048, remat, 4 x 2,048 tokens, SGD step")
def llama() -> Any:
    import optax

    block = block_types(2048, 32, 8, 8192, BF16, gated=True)
    params = language_types(8, 32000, 2048, BF16, block)
    loss = functools.partial(next_token_loss, jax.checkpoint(functools.partial(dense_block, rotary=True)))
    return trained(loss, optax.sgd(1e-3), params, typed(4, 2048, dtype=I32))


@public("mixture of experts, top 2 of 8", "JAX", "bfloat16", "6 layers of 1,024, 4 x 1,024 tokens, gradient")
def mixture() -> Any:
    block = block_types(1024, 16, 4, 2048, BF16, gated=False)
    block |= {
        "up": typed(8, 1024, 2048, dtype=BF16),
        "down": typed(8, 2048, 1024, dtype=BF16),
        "router": typed(1024, 8),
    }

    def expert_block(w: Any, x: jax.Array) -> jax.Array:
        x = attended(w, x)
        flat = rms_norm(x, w["norms"][1]).reshape(-1, x.shape[-1])
        gates, chosen = jax.lax.top_k(jax.nn.softmax(flat.astype(F32) @ w["router"]), 2)
        order = jnp.argsort(chosen.reshape(-1))
        sizes = jnp.bincount(chosen.reshape(-1), length=8).astype(I32)
        rows = flat[order // 2]
        hidden = jax.nn.gelu(jax.lax.ragged_dot(rows, w["up"], sizes))
        out = jax.lax.ragged_dot(hidden, w["down"], sizes) * gates.reshape(-1)[order][:, None].astype(x.dtype)
        return x + jnp.zeros_like(flat).at[order // 2].add(out).reshape(x.shape)

    params = language_types(6, 32000, 1024, BF16, block)
    return differentiated(functools.partial(next_token_loss, expert_block), params, typed(4, 1024, dtype=I32))


@public("BERT-base, masked words", "haiku", "float32", "12 layers, 16 x 512 tokens, gradient")
def bert() -> Any:
    import haiku as hk

    def forward(tokens: Any) -> Any:
        x = hk.Embed(30522, 768)(tokens) + hk.get_parameter("position", (512, 768), init=jnp.zeros)

        def layer(x: Any) -> Any:
            norm = functools.partial(hk.LayerNorm, -1, True, True)
            x = norm()(x + hk.MultiHeadAttention(12, 64, w_init=hk.initializers.TruncatedNormal())(x, x, x))
            return norm()(x + hk.Linear(768)(jax.nn.gelu(hk.Linear(3072)(x))))

        return hk.Linear(30522)(hk.experimental.layer_stack(12)(layer)(x))

    model, tokens = hk.without_apply_rng(hk.transform(forward)), typed(16, 512, dtype=I32)
    params = jax.eval_shape(model.init, KEY, tokens)
    return differentiated(lambda p, x, y: cross_entropy(model.apply(p, x), y), params, tokens, tokens)


@public("encoder-decoder transformer", "equinox", "bfloat16", "6 + 6 layers, 16 x 512 tokens, gradient")
def translation() -> Any:
    import equinox as eqx

    class Block(eqx.Module):
        attention: eqx.nn.MultiheadAttention
        cross: eqx.nn.MultiheadAttention
        up: eqx.nn.Linear
        down: eqx.nn.Linear

        def __init__(self, key: Any):
            self.attention = eqx.nn.MultiheadAttention(8, 512, key=key)
            self.cross = eqx.nn.MultiheadAttention(8, 512, key=key)
            self.up, self.down = eqx.nn.Linear(512, 2048, key=key), eqx.nn.Linear(2048, 512, key=key)

        def __call__(self, x: Any, memory: Any, mask: Any) -> Any:
            y = layer_norm(x).astype(BF16)
            x = x + self.attention(y, y, y, mask)
            x = x + self.cross(layer_norm(x).astype(BF16), memory, memory)
            return x + jax.vmap(self.down)(jax.nn.relu(jax.vmap(self.up)(layer_norm(x).astype(BF16))))

    make = lambda key: [eqx.filter_vmap(Block)(jax.random.split(key, 6)) for _ in range(2)]
    model = eqx.filter_eval_shape(make, jax.random.key(0))
    types, static = eqx.partition(model, lambda x: isinstance(x, jax.ShapeDtypeStruct))
    types = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, BF16), types)

    def run(arrays: Any, other: Any, x: Any, memory: Any, mask: Any) -> Any:
        step = lambda x, a: (eqx.combine(a, other)(x, x if memory is None else memory, mask), None)
        return jax.lax.scan(step, x, arrays)[0]

    def loss(params: Any, source: Any, words: Any) -> Any:
        (encoder, decoder), embed = params
        causal = jnp.tril(jnp.ones((512, 512), bool))

        def one(source: Any, words: Any) -> Any:
            memory = run(encoder, static[0], embed[source], None, None)
            return run(decoder, static[1], embed[words], memory, causal) @ embed.T

        return cross_entropy(jax.vmap(one)(source, words)[:, :-1], words[:, 1:])

    words = typed(16, 512, dtype=I32)
    return differentiated(loss, (types, typed(32000, 512, dtype=BF16)), words, words)


@public("decoding with a cache, top-k and top-p", "JAX", "bfloat16", "16 layers of 2,048, 32 x 4,096 tokens, one step")
def decoding() -> Any:
    block = block_types(2048, 16, 4, 8192, BF16, gated=True)
    params = language_types(16, 32000, 2048, BF16, block)
    cache = typed(16, 2, 32, 4096, 4, 128, dtype=BF16)

    @functools.partial(jax.jit, donate_argnums=(1,))
    def decode(params: Any, cache: Any, position: Any, words: Any, key: Any) -> Any:
        def layer(x: Any, inputs: Any) -> Any:
            w, (keys, values) = inputs
            y = rms_norm(x, w["norms"][0])
            q, k, v = (jnp.einsum("bw,whd->bhd", y, w[name]) for name in "qkv")
            keys = jax.lax.dynamic_update_index_in_dim(keys, k, position, 1)
            values = jax.lax.dynamic_update_index_in_dim(values, v, position, 1)
            scores = jnp.einsum("bghd,bsgd->bghs", q.reshape(32, 4, 4, 128), keys).astype(F32)
            scores = jnp.where(jnp.arange(4096) <= position, scores, -1e9)
            y = jnp.einsum("bghs,bsgd->bghd", jax.nn.softmax(scores).astype(BF16), values).reshape(32, 16, 128)
            x = x + jnp.einsum("bhd,hdw->bw", y, w["out"])
            y = rms_norm(x, w["norms"][1])
            return x + (jax.nn.silu(y @ w["gate"]) * (y @ w["up"])) @ w["down"], jnp.stack([keys, values])

        x, cache = jax.lax.scan(layer, params["embed"][words], (params["blocks"], cache))
        logits = (rms_norm(x, params["norm"]) @ params["embed"].T).astype(F32)
        best, indices = jax.lax.top_k(logits, 50)
        total = jnp.cumsum(jax.nn.softmax(best), -1)
        best = jnp.where(total - jax.nn.softmax(best) < 0.9, best, -jnp.inf)
        chosen = jax.random.categorical(key, best)
        return cache, jnp.take_along_axis(indices, chosen[:, None], 1)[:, 0]

    return decode, (params, cache, typed(dtype=I32), typed(32, dtype=I32), KEY)


# -- state spaces and recurrence -------------------------------------------------------------------------------------


def linear_recurrence(a: jax.Array, b: jax.Array, axis: int) -> jax.Array:
    """The states of x = a x + b, for all times at once."""
    join = lambda left, right: (left[0] * right[0], right[0] * left[1] + right[1])
    return jax.lax.associative_scan(join, (a, b), axis=axis)[1]


@public("Mamba", "JAX", "bfloat16", "8 layers of 1,024, remat, 4 x 1,024 tokens, gradient")
def mamba() -> Any:
    width, states, rank = 2048, 16, 64
    block = {
        "norm": typed(1024, dtype=BF16),
        "in": typed(1024, 2 * width, dtype=BF16),
        "conv": typed(4, 1, width, dtype=BF16),
        "select": typed(width, rank + 2 * states, dtype=BF16),
        "step": typed(rank, width, dtype=BF16),
        "log": typed(width, states),
        "skip": typed(width, dtype=BF16),
        "out": typed(width, 1024, dtype=BF16),
    }

    @jax.checkpoint
    def mamba_block(w: Any, x: jax.Array) -> jax.Array:
        y, gate = jnp.split(rms_norm(x, w["norm"]) @ w["in"], 2, -1)
        y = jax.lax.conv_general_dilated(
            y, w["conv"], (1,), [(3, 0)], dimension_numbers=("NWC", "WIO", "NWC"), feature_group_count=width
        )
        y = jax.nn.silu(y)
        step, b, c = jnp.split(y @ w["select"], (rank, rank + states), -1)
        step = jax.nn.softplus((step @ w["step"]).astype(F32))[..., None]
        decay = jnp.exp(-jnp.exp(w["log"]) * step)
        hidden = linear_recurrence(decay, step * b[:, :, None].astype(F32) * y[..., None].astype(F32), 1)
        y = jnp.einsum("btws,bts->btw", hidden, c.astype(F32)).astype(BF16) + y * w["skip"]
        return x + (y * jax.nn.silu(gate)) @ w["out"]

    params = language_types(8, 50280, 1024, BF16, block)
    return differentiated(functools.partial(next_token_loss, mamba_block), params, typed(4, 1024, dtype=I32))


@public("S5", "flax.linen", "float32", "6 layers of 256, 16 x 4,096 steps, Adam step")
def s5() -> Any:
    import flax.linen as nn
    import optax

    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x: Any, _: Any) -> Any:
            real = lambda name, *shape: self.param(name, nn.initializers.normal(), shape)
            rates = jax.lax.complex(-jnp.exp(real("decay", 256)), real("angle", 256))
            b = jax.lax.complex(real("b_re", 256, 256), real("b_im", 256, 256))
            c = jax.lax.complex(real("c_re", 256, 256), real("c_im", 256, 256))
            step = jnp.exp(real("step", 256))
            inputs = nn.LayerNorm()(x).astype(jnp.complex64) @ b
            decay = jnp.exp(rates * step)
            states = linear_recurrence(jnp.broadcast_to(decay, inputs.shape), inputs * (decay - 1) / rates, 1)
            y = nn.gelu((states @ c).real)
            return x + y * nn.sigmoid(nn.Dense(256)(y)), None

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            layers = nn.scan(Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=6)
            x, _ = layers()(nn.Dense(256)(x), None)
            return nn.Dense(10)(x.mean(1))

    model, x, y = Model(), typed(16, 4096, 3), typed(16, dtype=I32)
    params = jax.eval_shape(model.init, KEY, x)
    return trained(lambda p, x, y: cross_entropy(model.apply(p, x), y), optax.adam(1e-3), params, x, y)


@public("LRU", "brainstate", "float32", "4 layers of 256, 32 x 2,048 steps, gradient")
def lru() -> Any:
    import brainstate

    import statetx

    class Layer(brainstate.nn.Module):
        def __init__(self, width: int, states: int):
            super().__init__()
            normal = lambda *shape: brainstate.ParamState(jnp.asarray(np.zeros(shape, np.float32)))
            self.log, self.angle = normal(states), normal(states)
            self.b_re, self.b_im = normal(width, states), normal(width, states)
            self.c_re, self.c_im = normal(states, width), normal(states, width)

        def __call__(self, x: Any) -> Any:
            decay = jnp.exp(jax.lax.complex(-jnp.exp(self.log.value), self.angle.value))
            scale = jnp.sqrt(1 - jnp.abs(decay) ** 2)
            inputs = jnp.einsum("btw,ws->bts", x, jax.lax.complex(self.b_re.value, self.b_im.value)) * scale
            states = linear_recurrence(jnp.broadcast_to(decay, inputs.shape), inputs, 1)
            y = jnp.einsum("bts,sw->btw", states, jax.lax.complex(self.c_re.value, self.c_im.value)).real
            return x + jax.nn.gelu(y)

    layers = [Layer(256, 256) for _ in range(4)]

    def loss(x: Any, y: Any) -> Any:
        for layer in layers:
            x = layer(x)
        return cross_entropy(x[:, -1], y)

    return statetx.value_and_grad(loss, wrt=brainstate.ParamState), (typed(32, 2048, 256), typed(32, dtype=I32))


@public("LSTM language model", "haiku", "float32", "2 layers of 1,024, 32 x 512 tokens, Adam step")
def lstm() -> Any:
    import haiku as hk
    import optax

    def forward(words: Any) -> Any:
        core = hk.DeepRNN([hk.LSTM(1024), hk.LSTM(1024)])
        out, _ = hk.dynamic_unroll(core, hk.Embed(10_000, 512)(words), core.initial_state(32), time_major=False)
        return hk.Linear(10_000)(out)

    model, words = hk.without_apply_rng(hk.transform(forward)), typed(32, 512, dtype=I32)
    params = jax.eval_shape(model.init, KEY, words)
    loss = lambda p, words: cross_entropy(model.apply(p, words)[:, :-1], words[:, 1:])
    return trained(loss, optax.adam(1e-3), params, words)


@public("GRU, bidirectional, with CTC", "equinox", "float32", "512 units, 16 x 1,000 frames, gradient")
def speech() -> Any:
    import equinox as eqx
    import optax

    make = lambda key: (
        eqx.nn.GRUCell(80, 512, key=key),
        eqx.nn.GRUCell(80, 512, key=key),
        eqx.nn.Linear(1024, 32, key=key),
    )
    types, static = eqx.partition(
        eqx.filter_eval_shape(make, jax.random.key(0)), lambda x: isinstance(x, jax.ShapeDtypeStruct)
    )

    def loss(types: Any, sounds: Any, labels: Any) -> Any:
        forward, backward, head = eqx.combine(types, static)

        def one(x: Any) -> Any:
            run = lambda cell, reverse: jax.lax.scan(
                lambda h, x: (h := cell(x, h), h), jnp.zeros(512), x, reverse=reverse
            )[1]
            return jax.vmap(head)(jnp.concatenate([run(forward, False), run(backward, True)], -1))

        logits = jax.vmap(one)(sounds)
        zeros = jnp.zeros(logits.shape[:2])
        return optax.ctc_loss(logits, zeros, labels, jnp.zeros(labels.shape)).mean()

    return differentiated(loss, types, typed(16, 1000, 80), typed(16, 100, dtype=I32))


@public("world model, recurrent", "flax.nnx", "bfloat16", "1,024 units, 16 x 64 steps, gradient")
def world_model() -> Any:
    from flax import nnx

    class Cell(nnx.Module):
        def __init__(self, rngs: Any):
            self.gru = nnx.GRUCell(1024 + 6, 1024, dtype=BF16, rngs=rngs)
            self.prior = nnx.Linear(1024, 1024, dtype=BF16, rngs=rngs)
            self.posterior = nnx.Linear(1024 + 512, 1024, dtype=BF16, rngs=rngs)
            self.decoder = nnx.Linear(2048, 512, dtype=BF16, rngs=rngs)

    merge, params = split(lambda: Cell(nnx.Rngs(0)))

    def loss(params: Any, key: Any, observed: Any, actions: Any) -> Any:
        cell = merge(params)

        def step(carry: Any, inputs: Any) -> Any:
            hidden, latent, key = carry
            observed, action = inputs
            key, use = jax.random.split(key)
            hidden, _ = cell.gru(hidden, jnp.concatenate([latent, action], -1))
            prior = cell.prior(hidden).reshape(-1, 32, 32).astype(F32)
            logits = cell.posterior(jnp.concatenate([hidden, observed], -1)).reshape(-1, 32, 32).astype(F32)
            soft = jax.nn.softmax(logits)
            hard = jax.nn.one_hot(jax.random.categorical(use, logits), 32)
            latent = (hard + soft - jax.lax.stop_gradient(soft)).reshape(-1, 1024).astype(BF16)
            kl = jnp.sum(soft * (jax.nn.log_softmax(logits) - jax.nn.log_softmax(prior)), (-2, -1))
            error = cell.decoder(jnp.concatenate([hidden, latent], -1)) - observed
            return (hidden, latent, key), jnp.mean(kl) + jnp.mean(error.astype(F32) ** 2)

        zeros = jnp.zeros((16, 1024), BF16)
        return jnp.mean(jax.lax.scan(step, (zeros, zeros, key), (observed, actions))[1])

    return differentiated(loss, params, KEY, typed(64, 16, 512, dtype=BF16), typed(64, 16, 6, dtype=BF16))


# -- spikes ----------------------------------------------------------------------------------------------------------


@jax.custom_jvp
def spike(v: jax.Array) -> jax.Array:
    return (v > 0).astype(v.dtype)


@spike.defjvp
def _spike_jvp(primals: Any, tangents: Any) -> Any:
    (v,), (dv,) = primals, tangents
    return spike(v), dv / (1 + 10 * jnp.abs(v)) ** 2


@public("spiking network, recurrent", "brainstate", "float32", "2,048 neurons, 32 x 250 steps, gradient")
def spiking() -> Any:
    import brainstate

    import statetx

    weights = [
        brainstate.ParamState(jnp.asarray(np.zeros(shape, np.float32)))
        for shape in ((700, 2048), (2048, 2048), (2048, 20))
    ]

    def loss(spikes: Any, labels: Any) -> Any:
        def step(carry: Any, x: Any) -> Any:
            v, threshold, z, out = carry
            v = 0.95 * v + x @ weights[0].value + z @ weights[1].value - threshold * z
            threshold = 1 + 0.98 * (threshold - 1) + 0.02 * z
            z = spike(v - threshold)
            return (v, threshold, z, 0.9 * out + z @ weights[2].value), z.mean()

        zeros = jnp.zeros((spikes.shape[1], 2048))
        (*_, out), rates = statetx.scan(step, (zeros, zeros + 1, zeros, jnp.zeros((spikes.shape[1], 20))), spikes)
        return cross_entropy(out, labels) + rates.mean()

    return statetx.value_and_grad(loss, wrt=brainstate.ParamState), (typed(250, 32, 700), typed(32, dtype=I32))


@public("spiking convolutional net", "JAX", "bfloat16", "4 layers of 64, 16 x 20 steps, gradient")
def spiking_convolutions() -> Any:
    params = [typed(3, 3, a, 64, dtype=BF16) for a in (2, 64, 64, 64)], typed(64 * 9, 10, dtype=BF16)

    def loss(params: Any, videos: Any, labels: Any) -> Any:
        kernels, head = params

        def step(potentials: Any, x: Any) -> Any:
            new = []
            for kernel, v in zip(kernels, potentials, strict=True):
                y = jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
                v = 0.5 * v + y
                x = spike(v - 1)
                new.append(v * (1 - x))
                x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
            return new, x.reshape(x.shape[0], -1) @ head

        start = [jnp.zeros((16, 48 // 2**i, 48 // 2**i, 64), BF16) for i in range(4)]
        return cross_entropy(jax.lax.scan(step, start, videos)[1].mean(0), labels)

    return differentiated(loss, params, typed(20, 16, 48, 48, 2, dtype=BF16), typed(16, dtype=I32))


# -- graphs and points -----------------------------------------------------------------------------------------------


@public("graph convolutions", "haiku", "float32", "3 layers, 1,166,243 edges, gradient")
def graph_convolutions() -> Any:
    import haiku as hk

    nodes, edges = 169_343, 1_166_243

    def forward(x: Any, senders: Any, receivers: Any) -> Any:
        degree = jax.ops.segment_sum(jnp.ones(edges), receivers, nodes) + 1
        for width in (256, 256, 40):
            y = hk.Linear(width)(x) * jax.lax.rsqrt(degree)[:, None]
            x = (y + jax.ops.segment_sum(y[senders], receivers, nodes)) * jax.lax.rsqrt(degree)[:, None]
            x = jax.nn.relu(x) if width == 256 else x
        return x

    model = hk.without_apply_rng(hk.transform(forward))
    data = typed(nodes, 128), typed(edges, dtype=I32), typed(edges, dtype=I32)
    params = jax.eval_shape(model.init, KEY, *data)
    loss = lambda p, y, *data: cross_entropy(model.apply(p, *data), y)
    return differentiated(loss, params, typed(nodes, dtype=I32), *data)


@public("graph attention", "JAX", "bfloat16", "2 layers, 800,000 edges, gradient")
def graph_attention() -> Any:
    params = [{"w": typed(256, 8, 32, dtype=BF16), "a": typed(2, 8, 32, dtype=BF16)} for _ in range(2)]

    def loss(params: Any, x: Any, senders: Any, receivers: Any, labels: Any) -> Any:
        for w in params:
            y = jnp.einsum("nw,whd->nhd", x, w["w"])
            score = jnp.einsum("nhd,hd->nh", y, w["a"][0])[senders] + jnp.einsum("nhd,hd->nh", y, w["a"][1])[receivers]
            score = jax.nn.leaky_relu(score.astype(F32), 0.2)
            most = jax.ops.segment_max(score, receivers, x.shape[0])
            weight = jnp.exp(score - jax.lax.stop_gradient(most)[receivers])
            total = jax.ops.segment_sum(weight, receivers, x.shape[0])
            message = y[senders] * (weight / (total[receivers] + 1e-9))[..., None].astype(BF16)
            x = jax.nn.elu(jax.ops.segment_sum(message, receivers, x.shape[0])).reshape(x.shape[0], -1)
        return cross_entropy(x, labels)

    edges = typed(800_000, dtype=I32)
    return differentiated(loss, params, typed(50_000, 256, dtype=BF16), edges, edges, typed(50_000, dtype=I32))


@public("molecular energies and forces", "flax.linen", "float32", "32 x 32 atoms, gradient of forces")
def molecules() -> Any:
    import flax.linen as nn

    class Energy(nn.Module):
        @nn.compact
        def __call__(self, kinds: Any, positions: Any) -> Any:
            x = nn.Embed(100, 128)(kinds)
            offset = positions[:, None] - positions[None]
            distance = jnp.sqrt((offset**2).sum(-1) + 1e-6)
            radial = jnp.exp(-10 * (distance[..., None] - jnp.linspace(0, 5, 64)) ** 2)
            for _ in range(3):
                filters = nn.Dense(128)(nn.silu(nn.Dense(128)(radial)))
                message = jnp.einsum("ijw,jw->iw", filters, nn.Dense(128)(x))
                x = x + nn.Dense(128)(nn.silu(nn.Dense(128)(message)))
            return nn.Dense(1)(nn.silu(nn.Dense(64)(x))).sum()

    model, kinds, positions = Energy(), typed(32, 32, dtype=I32), typed(32, 32, 3)
    params = jax.eval_shape(model.init, KEY, typed(32, dtype=I32), typed(32, 3))

    def loss(params: Any, kinds: Any, positions: Any, energies: Any, forces: Any) -> Any:
        energy = jax.vmap(jax.value_and_grad(lambda r, k: model.apply(params, k, r)))
        predicted, gradient = energy(positions, kinds)
        return jnp.mean((predicted - energies) ** 2) + jnp.mean((gradient + forces) ** 2)

    return differentiated(loss, params, kinds, positions, typed(32), typed(32, 32, 3))


@public("point cloud, dynamic neighbors", "flax.nnx", "float32", "3 layers, 16 x 1,024 points, gradient")
def point_cloud() -> Any:
    from flax import nnx

    class Model(nnx.Module):
        def __init__(self, rngs: Any):
            self.layers = nnx.List([nnx.Linear(2 * a, b, rngs=rngs) for a, b in ((3, 64), (64, 64), (64, 128))])
            self.head = nnx.Linear(128, 40, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            for layer in self.layers:
                square = (x**2).sum(-1)
                distance = square[:, :, None] + square[:, None] - 2 * jnp.einsum("bnd,bmd->bnm", x, x)
                _, near = jax.lax.top_k(-jax.lax.stop_gradient(distance), 20)
                around = jax.vmap(lambda x, i: x[i])(x, near)
                center = jnp.broadcast_to(x[:, :, None], around.shape)
                x = nnx.leaky_relu(layer(jnp.concatenate([center, around - center], -1))).max(2)
            return self.head(x.max(1))

    merge, params = split(lambda: Model(nnx.Rngs(0)))
    loss = lambda params, x, y: cross_entropy(merge(params)(x), y)
    return differentiated(loss, params, typed(16, 1024, 3), typed(16, dtype=I32))


# -- reinforcement learning ------------------------------------------------------------------------------------------


@public("PPO update", "flax.linen", "float32", "2,048 environments, 4 epochs of 8 parts")
def ppo() -> Any:
    import flax.linen as nn
    import optax

    class Policy(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            for _ in range(2):
                x = nn.tanh(nn.Dense(256)(x))
            return nn.Dense(8)(x), nn.Dense(1)(x)[..., 0]

    model, optimizer = Policy(), optax.chain(optax.clip_by_global_norm(0.5), optax.adam(3e-4))
    steps, envs = 128, 2048
    params = jax.eval_shape(model.init, KEY, typed(60))

    def loss(params: Any, part: Any) -> Any:
        mean, value = model.apply(params, part["observed"])
        ratio = jnp.exp(-0.5 * ((part["action"] - mean) ** 2).sum(-1) - part["log_prob"])
        gain = (part["gain"] - part["gain"].mean()) / (part["gain"].std() + 1e-8)
        clipped = jnp.minimum(ratio * gain, jnp.clip(ratio, 0.8, 1.2) * gain)
        return -clipped.mean() + 0.5 * jnp.mean((value - part["returned"]) ** 2)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def update(params: Any, state: Any, key: Any, data: Any, rewards: Any, ended: Any) -> Any:
        _, values = model.apply(params, data["observed"])

        def backward(carry: Any, x: Any) -> Any:
            gain, following = carry
            reward, value, end = x
            gain = reward + 0.99 * following * (1 - end) - value + 0.99 * 0.95 * (1 - end) * gain
            return (gain, value), gain

        zeros = jnp.zeros(envs)
        _, gains = jax.lax.scan(backward, (zeros, zeros), (rewards, values, ended), reverse=True)
        rows = {**data, "gain": gains, "returned": gains + values}
        rows = jax.tree.map(lambda x: x.reshape(steps * envs, *x.shape[2:]), rows)

        def one_part(carry: Any, part: Any) -> Any:
            params, state = carry
            value, grads = jax.value_and_grad(loss)(params, part)
            updates, state = optimizer.update(grads, state)
            return (optax.apply_updates(params, updates), state), value

        def epoch(carry: Any, key: Any) -> Any:
            order = jax.random.permutation(key, steps * envs)
            parts = jax.tree.map(lambda x: x[order].reshape(8, -1, *x.shape[1:]), rows)
            return jax.lax.scan(one_part, carry, parts)

        return jax.lax.scan(epoch, (params, state), jax.random.split(key, 4))

    data = {"observed": typed(steps, envs, 60), "action": typed(steps, envs, 8), "log_prob": typed(steps, envs)}
    each = typed(steps, envs)
    return update, (params, jax.eval_shape(optimizer.init, params), KEY, data, each, each)


@public("DQN update on pixels", "flax.nnx", "float32", "512 of 20,000 transitions, Adam step")
def dqn() -> Any:
    import optax
    from flax import nnx

    class Network(nnx.Module):
        def __init__(self, rngs: Any):
            self.a = nnx.Conv(4, 32, (8, 8), (4, 4), padding="VALID", rngs=rngs)
            self.b = nnx.Conv(32, 64, (4, 4), (2, 2), padding="VALID", rngs=rngs)
            self.c = nnx.Conv(64, 64, (3, 3), padding="VALID", rngs=rngs)
            self.hidden, self.out = nnx.Linear(3136, 512, rngs=rngs), nnx.Linear(512, 18, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            x = x.astype(F32) / 255
            for layer in (self.a, self.b, self.c):
                x = nnx.relu(layer(x))
            return self.out(nnx.relu(self.hidden(x.reshape(x.shape[0], -1))))

    merge, params = split(lambda: Network(nnx.Rngs(0)))

    def loss(params: Any, old: Any, buffer: Any, priorities: Any, key: Any) -> Any:
        q = lambda p, x: merge(p)(x)
        total = jnp.cumsum(priorities)
        rows = jnp.searchsorted(total, jax.random.uniform(key, (512,)) * total[-1])
        now, then, actions, rewards = (x[rows] for x in buffer)
        best = q(params, then).argmax(-1)
        aim = rewards + 0.99 * jnp.take_along_axis(q(old, then), best[:, None], 1)[:, 0]
        error = jnp.take_along_axis(q(params, now), actions[:, None], 1)[:, 0] - jax.lax.stop_gradient(aim)
        return optax.huber_loss(error).mean()

    frames = typed(20_000, 84, 84, 4, dtype=jnp.uint8)
    buffer = frames, frames, typed(20_000, dtype=I32), typed(20_000)
    return trained(loss, optax.adam(1e-4), params, params, buffer, typed(20_000), KEY)


# -- science ---------------------------------------------------------------------------------------------------------


@public("Fourier neural operator", "JAX", "float32", "4 layers, 16 x 256 x 256, gradient")
def fourier_operator() -> Any:
    layer = {"re": typed(2, 16, 16, 32, 32), "im": typed(2, 16, 16, 32, 32), "w": typed(32, 32), "b": typed(32)}
    params = {"lift": typed(3, 32), "layers": stacked(4, layer), "head": typed(32, 1)}

    def loss(params: Any, x: Any, y: Any) -> Any:
        def one_layer(x: Any, w: Any) -> Any:
            modes = jnp.fft.rfft2(x, axes=(1, 2))
            weights, out = jax.lax.complex(w["re"], w["im"]), jnp.zeros_like(modes)
            low = jnp.einsum("bxyi,xyio->bxyo", modes[:, :16, :16], weights[0])
            high = jnp.einsum("bxyi,xyio->bxyo", modes[:, -16:, :16], weights[1])
            out = out.at[:, :16, :16].set(low).at[:, -16:, :16].set(high)
            return jax.nn.gelu(jnp.fft.irfft2(out, x.shape[1:3], axes=(1, 2)) + x @ w["w"] + w["b"]), None

        x, _ = jax.lax.scan(one_layer, x @ params["lift"], params["layers"])
        return jnp.mean((x @ params["head"] - y) ** 2)

    return differentiated(loss, params, typed(16, 256, 256, 3), typed(16, 256, 256, 1))


@public("spectral Navier-Stokes", "JAX", "float32", "512 x 512, 400 steps, gradient")
def navier_stokes() -> Any:
    n = 512

    def loss(start: Any, frames: Any) -> Any:
        kx, ky = jnp.fft.fftfreq(n, 1 / n)[:, None], jnp.fft.rfftfreq(n, 1 / n)[None]
        square = kx**2 + ky**2
        keep = (jnp.abs(kx) < n / 3) & (ky < n / 3)
        inverse = functools.partial(jnp.fft.irfft2, s=(n, n))

        def step(w: Any, _: Any) -> Any:
            stream = w / jnp.where(square == 0, 1, square)
            u, v = inverse(1j * ky * stream), inverse(-1j * kx * stream)
            moved = jnp.fft.rfft2(u * inverse(1j * kx * w) + v * inverse(1j * ky * w)) * keep
            return (w - 1e-3 * moved) / (1 + 1e-6 * square), None

        def frame(w: Any, seen: Any) -> Any:
            w, _ = jax.lax.scan(jax.checkpoint(step), w, None, length=10)
            return w, jnp.mean((inverse(w) - seen) ** 2)

        return jax.lax.scan(frame, jnp.fft.rfft2(start), frames)[1].mean()

    return differentiated(loss, typed(n, n), typed(40, n, n))


@public("radiance field", "haiku", "bfloat16", "8 layers, 4,096 x 192 points, gradient")
def radiance_field() -> Any:
    import haiku as hk

    def field(x: Any) -> Any:
        waves = (x[..., None] * 2.0 ** jnp.arange(10)).reshape(*x.shape[:-1], -1)
        x = jnp.concatenate([x, jnp.sin(waves), jnp.cos(waves)], -1).astype(BF16)
        for _ in range(8):
            x = jax.nn.relu(hk.Linear(256)(x))
        return hk.Linear(4)(x).astype(F32)

    model = hk.without_apply_rng(hk.transform(field))
    types = jax.eval_shape(model.init, KEY, typed(8, 3))
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, BF16), types)

    def rendered(params: Any, origins: Any, rays: Any, depths: Any) -> Any:
        out = model.apply(params, origins[:, None] + rays[:, None] * depths[..., None])
        gaps = jnp.diff(depths, append=depths[:, -1:] + 1e3)
        through = jnp.exp(-jax.nn.softplus(out[..., 3]) * gaps)
        seen = jnp.cumprod(jnp.concatenate([jnp.ones_like(through[:, :1]), through[:, :-1]], 1), 1)
        weights = seen * (1 - through)
        return (weights[..., None] * jax.nn.sigmoid(out[..., :3])).sum(1), weights

    def loss(params: Any, key: Any, origins: Any, rays: Any, colors: Any) -> Any:
        depths = jnp.broadcast_to(jnp.linspace(2.0, 6.0, 64), (4096, 64))
        coarse, weights = rendered(params[0], origins, rays, depths)
        total = jnp.cumsum(jax.lax.stop_gradient(weights) + 1e-5, -1)
        draws = jax.random.uniform(key, (4096, 128)) * total[:, -1:]
        picked = jax.vmap(lambda t, u, d: d[jnp.searchsorted(t, u)])(total, draws, depths)
        fine, _ = rendered(params[1], origins, rays, jnp.sort(jnp.concatenate([depths, picked], -1)))
        return jnp.mean((coarse - colors) ** 2) + jnp.mean((fine - colors) ** 2)

    rays = typed(4096, 3)
    return differentiated(loss, (params, params), KEY, rays, rays, rays)


@public("Gaussian process", "JAX", "float32", "4,096 points, Cholesky, gradient")
def gaussian_process() -> Any:
    def loss(params: Any, x: Any, y: Any) -> Any:
        scaled = x * jnp.exp(params["scales"])
        square = ((scaled**2).sum(-1)[:, None] + (scaled**2).sum(-1) - 2 * scaled @ scaled.T).clip(0)
        kernel = jnp.exp(params["height"] - 0.5 * square) + jnp.exp(params["noise"]) * jnp.eye(x.shape[0])
        factor = jnp.linalg.cholesky(kernel)
        solved = jax.scipy.linalg.solve_triangular(factor, y, lower=True)
        return 0.5 * (solved**2).sum() + jnp.log(jnp.diagonal(factor)).sum()

    return differentiated(loss, {"scales": typed(8), "height": typed(), "noise": typed()}, typed(4096, 8), typed(4096))


@public("Shampoo step", "JAX", "float32", "4 x 1,024 x 1,024, eigenvalues, QR, SVD")
def shampoo() -> Any:
    weights = [typed(1024, 1024) for _ in range(4)]
    factors = [(typed(1024, 1024), typed(1024, 1024)) for _ in weights]

    def root(a: jax.Array) -> jax.Array:
        values, vectors = jnp.linalg.eigh(a)
        return (vectors * jnp.maximum(values, 1e-6) ** -0.25) @ vectors.T

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(weights: Any, factors: Any, grads: Any, low: Any) -> Any:
        factors = [(0.9 * a + g @ g.T, 0.9 * b + g.T @ g) for (a, b), g in zip(factors, grads, strict=True)]
        moved = [w - 0.1 * root(a) @ g @ root(b) for w, (a, b), g in zip(weights, factors, grads, strict=True)]
        q, _ = jnp.linalg.qr(low)
        return moved, factors, q * jnp.linalg.svd(low, compute_uv=False)

    return step, (weights, factors, weights, typed(512, 512))


@public("neural ODE", "equinox", "float32", "200 steps, 1,024 states, gradient")
def neural_ode() -> Any:
    import equinox as eqx

    make = lambda key: eqx.nn.MLP(64, 64, 512, 3, jax.nn.tanh, key=key)
    types, static = eqx.partition(
        eqx.filter_eval_shape(make, jax.random.key(0)), lambda x: isinstance(x, jax.ShapeDtypeStruct)
    )

    def loss(types: Any, start: Any, end: Any) -> Any:
        flow = jax.vmap(eqx.combine(types, static))

        def step(y: Any, _: Any) -> Any:
            a = flow(y)
            b = flow(y + 0.005 * a)
            c = flow(y + 0.005 * b)
            d = flow(y + 0.01 * c)
            return y + 0.01 / 6 * (a + 2 * b + 2 * c + d), None

        return jnp.mean((jax.lax.scan(step, start, None, length=200)[0] - end) ** 2)

    return differentiated(loss, types, typed(1024, 64), typed(1024, 64))


@public("top-k sparse autoencoder", "JAX", "bfloat16", "24,576 features, 8,192 vectors, Adam step")
def sparse_autoencoder() -> Any:
    import optax

    params = {"in": typed(768, 24576), "out": typed(24576, 768), "bias": typed(768)}

    def loss(params: Any, x: Any) -> Any:
        w = jax.tree.map(lambda a: a.astype(BF16), params)
        values, indices = jax.lax.top_k((x - w["bias"]) @ w["in"], 32)
        sparse = (
            jnp.zeros((x.shape[0], 24576), BF16).at[jnp.arange(x.shape[0])[:, None], indices].set(jax.nn.relu(values))
        )
        return jnp.mean((sparse @ w["out"] + w["bias"] - x).astype(F32) ** 2)

    return trained(loss, optax.adam(1e-4), params, typed(8192, 768, dtype=BF16))
