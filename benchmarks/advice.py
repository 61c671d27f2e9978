"""Six steps that do not fit on an A100 of 40 GB: does following the list of `statetx.explain_oom` to the letter make each fit?

``python benchmarks/advice.py [NAME ...] [--seconds 120] [--out results.json]`` needs XLA's compiler for GPUs, and no GPU. A step is explained, its list is applied
to the code (the functions below, which look each other up as globals), and the changed step is compiled.
"""

import argparse
import functools
import json
import pathlib
import re
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import statetx

TARGET = "a100-40gb"
CHECKPOINTS: dict[str, Any] = {}  # by the action of a remedy, what `loop` does


def loop(body: Callable, init: Any, xs: Any) -> Any:
    if "body" in CHECKPOINTS:
        return statetx.scan(CHECKPOINTS["body"](body), init, xs)
    return statetx.scan(body, init, xs, checkpoint=CHECKPOINTS.get("slots"))


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def norm(x: jax.Array) -> jax.Array:
    x = x - x.mean(-1, keepdims=True)
    return x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-6)


# -- the steps -----------------------------------------------------------------------------------------------------------


def attention(p: Any, x: jax.Array) -> jax.Array:
    q, k, v = (jnp.einsum("btd,dhe->bhte", x, p[name]) for name in ("q", "k", "v"))
    weights = jax.nn.softmax(q @ k.swapaxes(-1, -2) / 8.0)
    return jnp.einsum("bhte,hed->btd", weights @ v, p["o"])


def layer(p: Any, x: jax.Array) -> jax.Array:
    x = x + attention(p, norm(x))
    return x + jax.nn.gelu(norm(x) @ p["up"]) @ p["down"]


def transformer_loss(params: Any, x: jax.Array) -> jax.Array:
    for p in params:
        x = layer(p, x)
    return (norm(x) ** 2 * x).mean()


def transformer() -> tuple[Any, ...]:
    heads = {"q": f32(1024, 16, 64), "k": f32(1024, 16, 64), "v": f32(1024, 16, 64), "o": f32(16, 64, 1024)}
    return [heads | {"up": f32(1024, 4096), "down": f32(4096, 1024)}] * 4, f32(48, 1024, 1024)


def conv(x: jax.Array, w: jax.Array) -> jax.Array:
    return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def residual_block(p: Any, x: jax.Array) -> jax.Array:
    h = conv(jax.nn.silu(norm(x)), p["first"])
    return conv(x, p["across"]) + conv(jax.nn.silu(norm(h)), p["second"])


def unet_loss(params: Any, x: jax.Array) -> jax.Array:
    skips = []
    for p in params["down"]:
        skips.append(x := residual_block(p, x))
        x = x.reshape(x.shape[0], x.shape[1] // 2, 2, x.shape[2] // 2, 2, x.shape[3]).mean((2, 4))
    for p, skip in zip(params["up"], reversed(skips), strict=True):
        x = residual_block(p, jnp.concatenate([jnp.repeat(jnp.repeat(x, 2, 1), 2, 2), skip], -1))
    return (x**2).mean()


def unet() -> tuple[Any, ...]:
    def block(n: int, m: int) -> Any:
        return {"first": f32(3, 3, n, m), "second": f32(3, 3, m, m), "across": f32(1, 1, n, m)}

    down = [block(3, 64), block(64, 128), block(128, 256), block(256, 256)]
    up = [block(512, 256), block(512, 128), block(256, 64), block(128, 64)]
    return {"down": down, "up": up}, f32(256, 256, 256, 3)


def cell(p: Any, h: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    z, r = jnp.split(jax.nn.sigmoid(x @ p["x_gates"] + h @ p["h_gates"]), 2, -1)
    h = (1 - z) * h + z * jnp.tanh(x @ p["x_new"] + (r * h) @ p["h_new"])
    return h, (h @ p["out"]).mean(-1)


def recurrent_loss(params: Any, xs: jax.Array) -> jax.Array:
    return (loop(lambda h, x: cell(params, h, x), jnp.zeros(xs.shape[1:]), xs)[1] ** 2).mean()


def recurrent() -> tuple[Any, ...]:
    params = {"x_gates": f32(512, 1024), "h_gates": f32(512, 1024), "x_new": f32(512, 512)}
    return params | {"h_new": f32(512, 512), "out": f32(512, 512)}, f32(4096, 768, 512)


@jax.custom_jvp
def spike(v: jax.Array) -> jax.Array:
    return (v > 0).astype(v.dtype)


@spike.defjvp
def _spike_jvp(primals: Any, tangents: Any) -> Any:
    return spike(*primals), tangents[0] / (1 + 10 * jnp.abs(primals[0])) ** 2


def neurons(w: jax.Array, v: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    v = 0.95 * v + x @ w
    s = spike(v - 1.0)
    return v - s, s


def spiking_loss(params: Any, xs: jax.Array) -> jax.Array:
    def step(vs: Any, x: jax.Array) -> tuple[Any, jax.Array]:
        new = []
        for w, v in zip(params, vs, strict=True):
            v, x = neurons(w, v, x)
            new.append(v)
        return new, x.mean(-1)

    return (loop(step, [jnp.zeros((xs.shape[1], 1024))] * 3, xs)[1] ** 2).mean()


def spiking() -> tuple[Any, ...]:
    return [f32(256, 1024), f32(1024, 1024), f32(1024, 1024)], f32(2000, 1024, 256)


def grown(w: jax.Array, x: jax.Array) -> jax.Array:
    return jax.nn.relu(norm(conv(jnp.repeat(jnp.repeat(x, 2, 1), 2, 2), w)))


def shrunk(w: jax.Array, x: jax.Array) -> jax.Array:
    x = x.reshape(x.shape[0], x.shape[1] // 2, 2, x.shape[2] // 2, 2, x.shape[3]).mean((2, 4))
    return jax.nn.leaky_relu(norm(conv(x, w)))


def generated(params: Any, z: jax.Array) -> jax.Array:
    x = z.reshape(-1, 4, 4, 64)
    for w in params[:-1]:
        x = grown(w, x)
    return jnp.tanh(conv(x, params[-1]))


def judged(params: Any, x: jax.Array) -> jax.Array:
    for w in params:
        x = shrunk(w, x)
    return x.mean((1, 2, 3))


def generator_loss(generator: Any, discriminator: Any, z: jax.Array) -> jax.Array:
    return jax.nn.softplus(-judged(discriminator, generated(generator, z))).mean()


def discriminator_loss(discriminator: Any, generator: Any, z: jax.Array, real: jax.Array) -> jax.Array:
    fake = judged(discriminator, generated(generator, z))
    return (jax.nn.softplus(fake) + jax.nn.softplus(-judged(discriminator, real))).mean()


def gan() -> tuple[Any, ...]:
    up, down = (64, 512, 256, 128, 64), (3, 64, 128, 256, 512)
    generator = [f32(3, 3, n, m) for n, m in zip(up, up[1:], strict=False)] + [f32(3, 3, 64, 3)]
    discriminator = [f32(3, 3, n, m) for n, m in zip(down, down[1:], strict=False)]
    return (generator, discriminator), f32(8192, 1024), f32(8192, 64, 64, 3)


def hidden(w: jax.Array, x: jax.Array) -> jax.Array:
    return x + jax.nn.gelu(norm(x) @ w)


def vocabulary_loss(params: Any, tokens: jax.Array) -> jax.Array:
    x = params["embed"][tokens[:, :-1]]
    for w in params["layers"]:
        x = hidden(w, x)
    logits = x @ params["embed"].T
    picked = jnp.take_along_axis(logits, tokens[:, 1:, None], -1)[..., 0]
    return (jax.nn.logsumexp(logits, axis=-1) - picked).mean()


def vocabulary() -> tuple[Any, ...]:
    tokens = jax.ShapeDtypeStruct((32, 1025), jnp.int32)
    return {"embed": f32(131072, 1024), "layers": [f32(1024, 1024)] * 4}, tokens


# -- a training step of each ----------------------------------------------------------------------------------------------


def in_parts(loss: Callable, num: int, argnums: tuple[int, ...]) -> Callable:
    return loss if num == 1 else statetx.microbatch(loss, num, argnums=argnums)


def updated(params: Any, moments: Any, grads: Any) -> tuple[Any, Any]:
    moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, grads)
    return jax.tree.map(lambda p, m: p - 0.1 * m, params, moments), moments


def step_of(loss: Callable, num: int) -> Callable:
    def step(params: Any, moments: Any, *data: Any) -> Any:
        return updated(params, moments, jax.grad(in_parts(loss, num, (1,)))(params, *data))

    return step


def gan_step(num: int) -> Callable:
    def step(params: Any, moments: Any, z: jax.Array, real: jax.Array) -> Any:
        g, d = params
        d_new, d_moments = updated(d, moments[1], jax.grad(in_parts(discriminator_loss, num, (2, 3)))(d, g, z, real))
        g_new, g_moments = updated(g, moments[0], jax.grad(in_parts(generator_loss, num, (2,)))(g, d_new, z))
        return (g_new, d_new), (g_moments, d_moments)

    return step


STEPS: dict[str, tuple[Callable, Callable[[int], Callable]]] = {
    "transformer": (transformer, functools.partial(step_of, transformer_loss)),
    "unet": (unet, functools.partial(step_of, unet_loss)),
    "recurrent": (recurrent, functools.partial(step_of, recurrent_loss)),
    "spiking": (spiking, functools.partial(step_of, spiking_loss)),
    "gan": (gan, gan_step),
    "vocabulary": (vocabulary, functools.partial(step_of, vocabulary_loss)),
}


def followed(make: Callable[[int], Callable], remedies: Any) -> Callable:
    """The step with the changes, as its author would write them."""
    num, donated = 1, []
    for change in (r.change for r in remedies):
        policy = re.search(r"statetx\.remat\(policy='(\w+)'\)", change.text)
        remat = statetx.remat(policy=policy[1]) if policy else statetx.remat
        if change.action == "microbatch":
            num = int(change.text.partition("statetx.microbatch(loss, ")[2].partition(",")[0])
        elif change.action == "donate":
            donated.append(change.owner)
        elif change.action == "slots":
            code = change.text.partition("checkpoint=statetx.policies.")[2].partition(")")[0] + ")"
            CHECKPOINTS["slots"] = eval(code, dict(vars(statetx.policies)))
        elif change.owner in globals():
            globals()[change.owner] = remat(globals()[change.owner])
        elif change.action in ("remat", "policy") and change.owner.startswith("scan"):
            CHECKPOINTS["body"] = remat
        else:
            raise ValueError(f"not followed: {change.text}")
    return jax.jit(make(num), donate_argnames=tuple(donated))


def row(name: str, seconds: float) -> dict[str, Any]:
    types, make = STEPS[name]
    params, *data = types()
    begin = time.monotonic()
    report = statetx.explain_oom(make(1), params, params, *data, target=TARGET, time_limit=seconds)
    spent, before = time.monotonic() - begin, dict(globals())
    try:
        cost = statetx.measure(followed(make, report.remedies), params, params, *data, gradient=False, target=TARGET)
    finally:
        globals().update(before)
        CHECKPOINTS.clear()
    needed = cost.peak_bytes + report.profile.constant_bytes
    return {
        "name": name,
        "needed_bytes": report.needed_bytes,
        "limit_bytes": report.limit_bytes,
        "changes": [
            {"text": r.change.text, "is_compiled": r.is_compiled, "needed_bytes": r.needed_bytes, "added_operations": r.added_operations}
            for r in report.remedies
        ],
        "followed_bytes": needed,
        "fits": report.limit_bytes is not None and needed <= report.limit_bytes,
        "plan": report.plan and report.plan._asdict(),
        "seconds": round(spent),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(STEPS))
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--out", type=pathlib.Path)
    options = parser.parse_args()
    rows = []
    for name in options.names:
        rows.append(row(name, options.seconds))
        print(json.dumps(rows[-1], indent=1), flush=True)
        if options.out:
            options.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
