"""Models whose memory others published, in words of our own: blocks checkpointed at intervals, budgets, a long sequence.

Compared
    The video transformer of huggingface/diffusers#10611 (LTX-Video's: 28 blocks of width 2,048 in bfloat16, 4,224 tokens of 81 frames of 512 x 768), with
    no block, each block, every second and every fourth one rematerialized, and plans for the memory that the thread tells for these. Attention
    computes its scores again, for 528 queries at a time, where theirs is a fused kernel.
    The Llama-like model of pytorch/pytorch#197838 (32 layers of width 256, 2 x 1,024 tokens, float32), and plans for the memory beside the weights that
    PyTorch takes for seven of its budgets. The thread does not tell the width within a layer: 1,024 has its bytes.
    A Mamba of four layers through 10,000 tokens, as in alxndrTL/mamba.py#80, in segments of 100 tokens: all stored, and with checkpoints.

Measured
    Bytes of the gradient compiled for a GPU that is not there: arguments, outputs and temporaries, which a budget counts. Operations are counted from
    the equations. ``--only video`` runs one of them, and rows of ``--json`` are kept.
"""

from __future__ import annotations

import functools
import itertools
import json
import operator
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from _common import start
from public_models import (
    BF16,
    F32,
    linear_recurrence,
    rms_norm,
    rotated,
    stacked,
    typed,
)

import statetx
from statetx import policies

GB = 10**9
Table = tuple[list[str], list[list[str]]]
Row = dict[str, Any]


def cost_of(name: str, fun: Callable, *args: Any) -> Row:
    """Of the gradient of a loss with respect to its first argument."""
    cost = statetx.measure(jax.jit(jax.value_and_grad(fun)), *args, gradient=False)
    return {
        "way": name,
        "bytes": cost.argument_bytes + cost.output_bytes + cost.temp_bytes,
        "temp_bytes": cost.temp_bytes,
        "flops": cost.flops,
    }


def planned(name: str, fun: Callable, *args: Any, budget: float) -> Row:
    plan = statetx.plan(fun, *args, budget=int(budget), argnums=0, time_limit=300)
    return {**cost_of(name, plan.apply(fun), *args), "budget": int(budget)}


def attention(q: jax.Array, k: jax.Array, v: jax.Array, num: int, *, causal: bool = False) -> jax.Array:
    """Of arrays [batch, time, heads, width], for `num` queries at a time, whose scores are computed again."""

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def some(part: tuple[jax.Array, jax.Array]) -> jax.Array:
        q, places = part
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(F32) / q.shape[-1] ** 0.5
        if causal:
            scores = jnp.where(jnp.arange(k.shape[1]) <= places[:, None], scores, -jnp.inf)
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores).astype(v.dtype), v)

    parts = q.reshape(q.shape[0], -1, num, *q.shape[2:]).swapaxes(0, 1)
    out = jax.lax.map(some, (parts, jnp.arange(q.shape[1]).reshape(-1, num)))
    return out.swapaxes(0, 1).reshape(q.shape)


# -- blocks at intervals ---------------------------------------------------------------------------------------------

PUBLISHED_VIDEO = {"none": 26.66, "every fourth block": 22.19, "every second block": 17.66, "each block": 9.32}  # GB


def video(*, is_quick: bool) -> Iterator[tuple[str, Callable[[], Row]]]:
    """A transformer on the tokens of a video, which also attends to a text."""
    layers, width, heads, tokens, words, wide = (4, 32, 2, 16, 8, 16) if is_quick else (28, 2048, 32, 4224, 128, 4096)

    def norm(x: jax.Array) -> jax.Array:
        return rms_norm(x, jnp.ones((), BF16))

    def attend(w: Any, x: jax.Array, of: jax.Array, rotate: Callable) -> jax.Array:
        split = lambda y: y.reshape(*y.shape[:2], heads, -1)
        q, k = (rotate(split(rms_norm(y @ w[n], w[f"{n} norm"]))) for y, n in ((x, "q"), (of, "k")))
        v = split(of @ w["v"])

        return attention(q, k, v, tokens // 8).reshape(x.shape) @ w["out"]

    def block(w: Any, x: jax.Array, text: jax.Array, time: jax.Array) -> jax.Array:
        shift, scale, gate, shift2, scale2, gate2 = jnp.split(w["table"] + time[:, None], 6, -1)
        y = norm(x) * (1 + scale) + shift
        x = x + gate * attend(w["self"], y, y, rotated)
        x = x + attend(w["cross"], x, text, lambda y: y)
        y = norm(x) * (1 + scale2) + shift2
        return x + gate2 * (jax.nn.gelu(y @ w["up"]) @ w["down"])

    def loss(every: int, params: Any, x: jax.Array, text: jax.Array, time: jax.Array) -> jax.Array:
        first = functools.partial(jax.checkpoint, prevent_cse=False)(block) if every else block
        num = max(every, 1)
        blocks = jax.tree.map(lambda w: w.reshape(-1, num, *w.shape[1:]), params["blocks"])
        text = jax.nn.gelu(text @ params["text"]) @ params["text out"]

        def group(h: jax.Array, ws: Any) -> tuple[jax.Array, None]:
            for n in range(num):
                w = jax.tree.map(operator.itemgetter(n), ws)
                h = (first if n == 0 else block)(w, h, text, time)
            return h, None

        h, _ = jax.lax.scan(group, x @ params["in"], blocks)
        return jnp.mean(jnp.square((norm(h) @ params["out"]).astype(F32)))

    square = typed(width, width, dtype=BF16)
    each = {name: square for name in ("q", "k", "v", "out")}
    each |= {f"{name} norm": typed(width, dtype=BF16) for name in "qk"}
    types = {"self": each, "cross": each, "table": typed(6 * width, dtype=BF16)}
    types |= {"up": typed(width, 4 * width, dtype=BF16), "down": typed(4 * width, width, dtype=BF16)}
    channels = 128
    params = {
        "blocks": stacked(layers, types),
        "in": typed(channels, width, dtype=BF16),
        "out": typed(width, channels, dtype=BF16),
        "text": typed(wide, width, dtype=BF16),
        "text out": square,
    }
    args = (
        params,
        typed(1, tokens, channels, dtype=BF16),
        typed(1, words, wide, dtype=BF16),
        typed(1, 6 * width, dtype=BF16),
    )
    for way, every in {"none": 0, "every fourth block": 4, "every second block": 2, "each block": 1}.items():
        yield way, lambda way=way, every=every: cost_of(way, functools.partial(loss, every), *args)
    plain = functools.partial(loss, 0)
    for way, size in PUBLISHED_VIDEO.items():
        if way != "none":
            budget = 0.9 if is_quick else size * GB
            make = lambda name=f"a plan for {size} GB", budget=budget: planned(name, plain, *args, budget=budget)
            yield f"a plan for {size} GB", make


# -- seven budgets ---------------------------------------------------------------------------------------------------

# MB beside the weights, at 0.15, 0.2, 0.25, 0.3, 0.35, 0.1 and 0.05 of the activations.
PUBLISHED_LLAMA = (274.8, 325.2, 359.4, 411.1, 456.6, 508.2, 1145.4)


def llama(*, is_quick: bool) -> Iterator[tuple[str, Callable[[], Row]]]:
    layers, width, heads, tokens = (2, 16, 2, 16) if is_quick else (32, 256, 8, 1024)

    def block(w: Any, x: jax.Array) -> jax.Array:
        y = rms_norm(x, w["norm"])
        q, k, v = ((y @ w[name]).reshape(*x.shape[:2], heads, -1) for name in "qkv")
        out = attention(rotated(q), rotated(k), v, tokens // 8, causal=True)
        x = x + out.reshape(x.shape) @ w["out"]
        y = rms_norm(x, w["norm 2"])
        return x + (jax.nn.silu(y @ w["gate"]) * (y @ w["up"])) @ w["down"]

    def loss(is_remat: bool, params: Any, x: jax.Array) -> jax.Array:
        run = jax.checkpoint(block, prevent_cse=False) if is_remat else block
        x, _ = jax.lax.scan(lambda x, w: (run(w, x), None), x, params)
        return jnp.mean(jnp.square(x))

    types = {name: typed(width, width) for name in ("q", "k", "v", "out")} | dict.fromkeys(
        ("norm", "norm 2"), typed(width)
    )
    types |= {"gate": typed(width, 4 * width), "up": typed(width, 4 * width), "down": typed(4 * width, width)}
    args = stacked(layers, types), typed(2, tokens, width)
    plain = functools.partial(loss, False)
    weights = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(args))
    without = lambda row: row | {"bytes": row["bytes"] - weights}
    for way, is_remat in {"none": False, "each block": True}.items():
        yield way, lambda way=way, is_remat=is_remat: without(cost_of(way, functools.partial(loss, is_remat), *args))
    for size in PUBLISHED_LLAMA:
        way, budget = f"a plan for {size} MB", 0.9 if is_quick else weights + size * 1e6
        yield way, lambda way=way, budget=budget: without(planned(way, plain, *args, budget=budget))


# -- a long sequence -------------------------------------------------------------------------------------------------


def mamba(*, is_quick: bool) -> Iterator[tuple[str, Callable[[], Row]]]:
    """Selective state spaces, a segment at a time: each layer hands its state and its last inputs on."""
    layers, width, states, rank, tokens, segment = (2, 16, 4, 4, 80, 10) if is_quick else (4, 256, 16, 16, 10_000, 100)
    inner = 2 * width
    block = {
        "norm": typed(width),
        "in": typed(width, 2 * inner),
        "conv": typed(4, inner),
        "select": typed(inner, rank + 2 * states),
        "step": typed(rank, inner),
        "log": typed(inner, states),
        "skip": typed(inner),
        "out": typed(inner, width),
    }

    def layer(w: Any, carry: Any, x: jax.Array) -> tuple[Any, jax.Array]:
        hidden, last = carry
        y, gate = jnp.split(rms_norm(x, w["norm"]) @ w["in"], 2, -1)
        y = jnp.concatenate([last, y])
        last, y = y[-3:], jax.nn.silu(sum(y[n : n + len(x)] * w["conv"][n] for n in range(4)))
        step, b, c = jnp.split(y @ w["select"], (rank, rank + states), -1)
        step = jax.nn.softplus(step @ w["step"])[..., None]
        decay = jnp.exp(-jnp.exp(w["log"]) * step)
        new = step * b[:, None] * y[..., None]
        all_hidden = linear_recurrence(decay, new.at[0].add(decay[0] * hidden), 0)
        y = jnp.einsum("tws,ts->tw", all_hidden, c) + y * w["skip"]
        return (all_hidden[-1], last), x + (y * jax.nn.silu(gate)) @ w["out"]

    def loss(length: int, checkpoint: Any, params: Any, xs: jax.Array) -> jax.Array:
        def step(carries: Any, x: jax.Array) -> tuple[Any, jax.Array]:
            new = []
            for w, carry in zip(params, carries, strict=True):
                carry, x = layer(w, carry, x)
                new.append(carry)
            return new, jnp.mean(x**2)

        carries = [(jnp.zeros((inner, states)), jnp.zeros((3, inner)))] * layers
        _, losses = statetx.scan(step, carries, xs.reshape(-1, length, width), checkpoint=checkpoint)
        return losses.mean()

    args = [block] * layers, typed(tokens, width)
    ways = {
        "the sequence as a whole": (tokens, None),
        f"segments of {segment}, all stored": (segment, None),
        f"segments of {segment}, `Slots(10)`": (segment, policies.Slots(10)),
        f"segments of {segment}, `Levels(1)`": (segment, policies.Levels(1)),
    }
    for way, (length, checkpoint) in ways.items():
        yield way, lambda way=way, n=length, c=checkpoint: cost_of(way, functools.partial(loss, n, c), *args)


UNSHOWN = "segments of 100, all stored"  # more than the whole
COLUMNS = ["gradient, for an H100", "memory", "operations", "told by others"]


def table(results: dict[str, Any]) -> Table:
    names = {
        "video": "LTX-Video's transformer, remat on",
        "llama": "Llama-like, beside the weights, remat on",
        "mamba": "Mamba, 10,000 tokens,",
    }
    told = {("video", way): f"{size} GB" for way, size in PUBLISHED_VIDEO.items()}
    told |= {("mamba", "segments of 100, `Slots(10)`"): "83% less"}
    rows = []
    for name, found in results.items():
        shown = (row for row in found if row["way"] != UNSHOWN)
        for n, (key, group) in enumerate(itertools.groupby(shown, lambda row: (row["bytes"], "budget" in row))):
            size, same = key[0], list(group)  # the same plan for several budgets
            ways = [row["way"] for row in same]
            way = " to ".join([ways[0], ways[-1].removeprefix("a plan for ")]) if ways[1:] else ways[0]
            more = f"{100 * (same[0]['flops'] / found[0]['flops'] - 1):+.1f}%" if n else ""
            shown_size = f"{size / GB:.2f} GB" if size >= GB else f"{size / GB * 1000:.0f} MB"
            rows.append([way if n else f"{names[name]} {way}", shown_size, more, told.get((name, ways[0]), "")])
    return COLUMNS, rows


PROGRAMS = {"video": video, "llama": llama, "mamba": mamba}


def main() -> None:
    options, env = start(
        __doc__ or "",
        target={"default": "h100", "help": "the GPU to compile for"},
        only={"choices": PROGRAMS, "help": "run this program alone"},
    )
    kept = json.loads(options.json.read_text()) if options.json and options.json.exists() else {}
    with statetx.target(options.target):
        for name in [options.only] if options.only else PROGRAMS:
            rows = kept.setdefault(name, [])
            for way, make in PROGRAMS[name](is_quick=options.quick):
                if not any(row["way"] == way for row in rows):
                    try:
                        row = make()
                    except statetx.PlanError as e:
                        row = {"way": way, "smallest_bytes": e.smallest_bytes}
                    rows.append({**row, "date": env["date"]})
                    print(row, flush=True)
                    if options.json:
                        options.json.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
