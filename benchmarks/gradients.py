"""Steps whose gradients never exist: with another jit, and with `statetx.jit`.

Compared
    A step of nnx layers with Adam, of the sizes of google/flax#5116 (three sets of 2.5 GB; the issue tells temporaries of 5.26 GB for nnx, 2.76 GB for
    pure JAX); the step of JAX's page on host offloading, four layers of 7,168 x 7,168 with a global norm and Adam (the page tells 4.59 GB, and 2.87 GB
    with moments on the host); ViT-L/16 of flax.linen with Adam, 24 scanned layers; and 16 scanned layers of 1,024 x 1,024 (batch 64) whose gradients are clipped by their norm,
    which takes two backward passes. The code of a step stays, and its jit changes.

Measured
    Temporaries and peak of the program compiled for a GPU that is not there, and operations counted from the equations.

With ``--times``, small programs on this machine instead, with ``release_gradients=`` None and False, interleaved: CPU time of a step, and of tracing and compiling.
With ``--json OUT`` rows take the place of those of the same programs.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
from _common import Sample, Stopwatch, finish, interleave, start, summaries, timed

import statetx

GB = 2**30
COLUMNS = ("program", "way", "temporaries", "peak", "operations")
Way = tuple[str, Callable, tuple]


def types(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def typed(*shape: int, dtype: Any = jnp.float32) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


def nnx_layers(*, is_quick: bool) -> Iterator[Way]:
    """Residual layers of flax.nnx in `nnx.scan`, each rematerialized, and `nnx.Optimizer`."""
    from flax import nnx

    layers, width, batch = (4, 64, 16) if is_quick else (10, 8192, 64)

    class Block(nnx.Module):
        def __init__(self, rngs: Any):
            self.linear = nnx.Linear(width, width, use_bias=False, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return x + jnp.tanh(self.linear(x))

    class Net(nnx.Module):
        def __init__(self, rngs: Any):
            make = nnx.split_rngs(splits=layers)(nnx.vmap(Block, in_axes=0, out_axes=0))
            self.blocks = make(rngs)

        def __call__(self, x: Any) -> Any:
            @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
            def run(x: Any, block: Any) -> Any:
                return nnx.remat(lambda b, x: b(x))(block, x)

            return run(x, self.blocks)

    def make() -> Any:
        net = Net(nnx.Rngs(0))
        return net, nnx.Optimizer(net, optax.adam(1e-3), wrt=nnx.Param)

    graph, abstract = nnx.split(nnx.eval_shape(make))

    def step(state: Any, x: Any) -> Any:
        net, optimizer = nnx.merge(graph, state)
        value, grads = nnx.value_and_grad(lambda net, x: jnp.mean(net(x) ** 2))(net, x)
        optimizer.update(net, grads)
        return nnx.state((net, optimizer)), value

    def pure(state: Any, x: Any) -> Any:
        weights, moments = state

        def loss(weights: Any, x: Any) -> Any:
            layer = jax.checkpoint(lambda x, w: x + jnp.tanh(x @ w))
            return jnp.mean(jax.lax.scan(lambda x, w: (layer(x, w), None), x, weights)[0] ** 2)

        value, grads = jax.value_and_grad(loss)(weights, x)
        updates, moments = optax.adam(1e-3).update(grads, moments)
        return (optax.apply_updates(weights, updates), moments), value

    weights, x = typed(layers, width, width), typed(batch, width)
    state = weights, jax.eval_shape(optax.adam(1e-3).init, weights)
    yield "nnx, jax.jit", jax.jit(step, donate_argnums=0), (types(abstract), x)
    yield "nnx, statetx.jit", statetx.jit(step, donate_argnums=0), (types(abstract), x)
    yield "pure JAX, jax.jit", jax.jit(pure, donate_argnums=0), (state, x)
    yield "pure JAX, statetx.jit", statetx.jit(pure, donate_argnums=0), (state, x)


def offloading_page(*, is_quick: bool) -> Iterator[Way]:
    """Four unrolled layers, whose gradients have to be there at once for their norm."""
    width, parts = (64, 4) if is_quick else (7168, 8)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1))

    def loss(params: Any, x: Any) -> Any:
        y = x
        for w in params:
            y = jax.nn.gelu(y @ w)
        return jnp.mean((y - x) ** 2) + 0.01 * sum(jnp.mean(w**2) for w in params)

    def step(take: Callable, params: Any, moments: Any, x: Any) -> Any:
        _, grads = take(params, x)
        updates, moments = optimizer.update(grads, moments, params)
        return optax.apply_updates(params, updates), moments

    def in_parts(params: Any, x: Any) -> Any:
        return statetx.microbatch(jax.value_and_grad(loss), parts, argnums=1)(params, x)

    params, x = (typed(width, width),) * 4, typed(width, width)
    args = params, jax.eval_shape(optimizer.init, params), x
    steps = {"as on the page": jax.value_and_grad(loss), f"{parts} parts": in_parts}
    for way, take in steps.items():
        yield way, jax.jit(functools.partial(step, take), donate_argnums=(0, 1)), args


def vision_transformer(*, is_quick: bool) -> Iterator[Way]:
    """Layers of flax.linen in `nn.scan`, each rematerialized."""
    import flax.linen as nn

    layers, width, heads, batch, pixels = (2, 32, 2, 2, 32) if is_quick else (24, 1024, 16, 16, 224)

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x: Any, _: Any) -> Any:
            y = nn.LayerNorm()(x)
            x = x + nn.MultiHeadDotProductAttention(heads)(y, y)
            y = nn.Dense(4 * width)(nn.LayerNorm()(x))
            return x + nn.Dense(width)(nn.gelu(y)), None

    class Model(nn.Module):
        @nn.compact
        def __call__(self, images: Any) -> Any:
            x = nn.Conv(width, (16, 16), (16, 16), "VALID")(images)
            x = x.reshape(x.shape[0], -1, width)
            x = x + self.param("position", nn.initializers.normal(0.02), (1, x.shape[1], width))
            block = nn.remat(Block, prevent_cse=False)
            x, _ = nn.scan(block, variable_axes={"params": 0}, split_rngs={"params": True}, length=layers)()(x, None)
            return nn.Dense(1000)(nn.LayerNorm()(x.mean(1)))

    model, optimizer = Model(), optax.adam(1e-3)
    images, labels = typed(batch, pixels, pixels, 3), typed(batch, dtype=jnp.int32)
    params = jax.eval_shape(model.init, jax.random.key(0), images)

    def step(params: Any, moments: Any, images: Any, labels: Any) -> Any:
        def loss(params: Any) -> Any:
            return optax.softmax_cross_entropy_with_integer_labels(model.apply(params, images), labels).mean()

        value, grads = jax.value_and_grad(loss)(params)
        updates, moments = optimizer.update(grads, moments)
        return optax.apply_updates(params, updates), moments, value

    args = params, jax.eval_shape(optimizer.init, params), images, labels
    yield "jax.jit", jax.jit(step, donate_argnums=(0, 1)), args
    yield "statetx.jit", statetx.jit(step, donate_argnums=(0, 1)), args


def clipped(*, is_quick: bool) -> Iterator[Way]:
    """Residual layers, rematerialized, with clipping by a global norm and Adam."""
    layers, width, batch = (4, 64, 4) if is_quick else (16, 1024, 64)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))

    def step(weights: Any, moments: Any, x: Any) -> Any:
        def loss(weights: Any) -> Any:
            layer = jax.checkpoint(lambda x, w: x + jnp.tanh(x @ w))
            return jnp.mean(jax.lax.scan(lambda x, w: (layer(x, w), None), x, weights)[0] ** 2)

        value, grads = jax.value_and_grad(loss)(weights)
        updates, moments = optimizer.update(grads, moments, weights)
        return optax.apply_updates(weights, updates), moments, value

    weights = typed(layers, width, width)
    args = weights, jax.eval_shape(optimizer.init, weights), typed(batch, width)
    yield "jax.jit", jax.jit(step, donate_argnums=(0, 1)), args
    yield "statetx.jit, True", statetx.jit(step, donate_argnums=(0, 1), release_gradients=True), args


PROGRAMS = {
    "nnx layers (flax#5116)": (nnx_layers, "h100"),
    "host offloading (JAX's page)": (offloading_page, "h100"),
    "ViT-L/16": (vision_transformer, "a100-80gb"),
    "clipped by the norm": (clipped, "h100"),
}


def measured(name: str, *, is_quick: bool) -> Iterator[dict[str, Any]]:
    """A row for each way of a program."""
    make, target = PROGRAMS[name]
    with statetx.target(target):
        for way, step, args in make(is_quick=is_quick):
            cost = statetx.measure(step, *args, gradient=False)
            row = {"program": name, "way": way, "target": target, "flops": cost.flops}
            row |= {"argument_bytes": cost.argument_bytes, "temp_bytes": cost.temp_bytes, "peak_bytes": cost.peak_bytes}
            print(row, flush=True)
            yield row


def rows(results: list[dict[str, Any]]) -> list[list[str]]:
    sizes = ("temp_bytes", "peak_bytes")
    first = {row["program"]: row["flops"] for row in reversed(results)}
    return [
        [
            f"{row['program']}, {row['target'].upper()}"
            if before is None or before["program"] != row["program"]
            else "",
            row["way"],
            *(f"{row[size] / GB:.2f} GB" for size in sizes),
            f"{100 * (row['flops'] / first[row['program']] - 1):+.1f}%",
        ]
        for before, row in zip([None, *results], results, strict=False)
    ]


# -- times on this machine -------------------------------------------------------------------------------------------


Made = tuple[Callable, Any, Any]
"""A step ``(state, x) -> (state, value)``, its state and its input."""


def layer(x: Any, w: Any) -> Any:
    return x + jnp.tanh(x @ w)


def in_parts(take: Callable, parts: int, weights: Any, x: Any) -> Any:
    """What `statetx.microbatch` replaces: a loop that adds the gradients of parts."""

    def part(sums: Any, x: Any) -> Any:
        return jax.tree.map(lambda s, g: s + g / parts, sums, take(weights, x)), None

    zeros = jnp.zeros(()), jax.tree.map(jnp.zeros_like, weights)
    return jax.lax.scan(part, zeros, x.reshape(parts, -1, *x.shape[1:]))[0]


def scanned(optimizer: Any, *, parts: int = 1, by_hand: bool = False) -> Made:
    """16 rematerialized layers, with optax by hand."""

    def step(state: Any, x: Any) -> Any:
        weights, moments = state

        def loss(weights: Any, x: Any) -> Any:
            run = lambda x, w: (jax.checkpoint(layer)(x, w), None)
            return jnp.mean(jax.lax.scan(run, x, weights)[0] ** 2)

        take = jax.value_and_grad(loss)
        if parts == 1:
            value, grads = take(weights, x)
        elif by_hand:
            value, grads = in_parts(take, parts, weights, x)
        else:
            value, grads = statetx.microbatch(take, parts, argnums=1)(weights, x)
        updates, moments = optimizer.update(grads, moments, weights)
        return (optax.apply_updates(weights, updates), moments), value

    weights = jax.random.normal(jax.random.key(0), (16, 256, 256)) / 256
    return step, (weights, optimizer.init(weights)), jnp.ones((64, 256))


def small_nnx() -> Made:
    """`nnx.scan` and `nnx.Optimizer` with SGD."""
    from flax import nnx

    class Block(nnx.Module):
        def __init__(self, rngs: Any):
            self.linear = nnx.Linear(256, 256, rngs=rngs)

    blocks = nnx.split_rngs(splits=8)(nnx.vmap(Block, in_axes=0, out_axes=0))(nnx.Rngs(0))
    graph, state = nnx.split((blocks, nnx.Optimizer(blocks, optax.sgd(0.1), wrt=nnx.Param)))

    def step(state: Any, x: Any) -> Any:
        blocks, optimizer = nnx.merge(graph, state)

        def loss(blocks: Any) -> Any:
            run = nnx.remat(lambda x, block: x + jnp.tanh(block.linear(x)))
            return jnp.mean(nnx.scan(run, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, blocks) ** 2)

        value, grads = nnx.value_and_grad(loss)(blocks)
        optimizer.update(blocks, grads)
        return nnx.state((blocks, optimizer)), value

    return step, state, jnp.ones((64, 256))


def attention() -> Made:
    """Four blocks of attention of flax.linen in `nn.scan`, with SGD."""
    import flax.linen as nn

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x: Any, _: Any) -> Any:
            y = nn.LayerNorm()(x)
            x = x + nn.MultiHeadDotProductAttention(4)(y, y)
            return x + nn.Dense(128)(nn.gelu(nn.Dense(512)(nn.LayerNorm()(x)))), None

    block = nn.remat(Block, prevent_cse=False)
    model = nn.scan(block, variable_axes={"params": 0}, split_rngs={"params": True}, length=4)()
    x = jax.random.normal(jax.random.key(1), (4, 64, 128))
    optimizer = optax.sgd(0.1)

    def step(state: Any, x: Any) -> Any:
        params, moments = state
        value, grads = jax.value_and_grad(lambda params: jnp.mean(model.apply(params, x, None)[0] ** 2))(params)
        updates, moments = optimizer.update(grads, moments)
        return (optax.apply_updates(params, updates), moments), value

    params = model.init(jax.random.key(0), x, None)
    return step, (params, optimizer.init(params)), x


SMALL: dict[str, Callable[[bool], Made]] = {
    "SGD": lambda _: scanned(optax.sgd(0.1)),
    "Adam": lambda _: scanned(optax.adam(1e-3)),
    "4 parts, SGD": lambda is_plain: scanned(optax.sgd(0.1), parts=4, by_hand=is_plain),
    "nnx, SGD": lambda _: small_nnx(),
    "attention of linen, SGD": lambda _: attention(),
}
LEFT = {"Adam"}
"""On CPUs their moments stay outside of the loop: the compiled program is the same, and only the analysis takes time."""
RELEASES = {"plain": False, "released": None}


def times_of(name: str, *, rounds: int) -> dict[str, Any]:
    """CPU seconds of a step, and of tracing and compiling, with and without."""
    steps = 5

    def trained(release: bool | None) -> Callable[[], Sample]:
        step, state, x = SMALL[name](release is False)
        jitted = statetx.jit(step, donate_argnums=0, release_gradients=release)

        def run() -> Any:
            nonlocal state
            for _ in range(steps):
                state, value = jitted(state, x)
            return value

        return timed(run)

    def built(release: bool | None) -> Callable[[], Sample]:
        def sample() -> Sample:
            step, state, x = SMALL[name](release is False)
            watch = Stopwatch()
            statetx.jit(step, donate_argnums=0, release_gradients=release).lower(state, x).compile()
            return watch.read()

        return sample

    row: dict[str, Any] = {"program": name}
    quantities = {"build": (built, rounds)} | ({} if name in LEFT else {"step": (trained, 5 * rounds)})
    for quantity, (make, num) in quantities.items():
        samples = interleave({way: make(release) for way, release in RELEASES.items()}, num)
        row[quantity] = summaries(samples["released"], samples["plain"])["cpu_ratio"]
    print(row, flush=True)
    return row


def figures_of(results: list[dict[str, Any]], times: list[dict[str, Any]]) -> dict[str, Any]:
    """What the limits are about."""
    by_way = {(row["program"], row["way"]): row for row in results}
    figures: dict[str, Any] = {}
    nnx, page, vit, norm = PROGRAMS
    if (row := by_way.get((nnx, "nnx, statetx.jit"))) is not None:
        figures["nnx: GB of temporaries"] = row["temp_bytes"] / GB
    if (row := by_way.get((page, "8 parts"))) is not None:
        figures["host offloading: GB at the peak"] = row["peak_bytes"] / GB
    if (row := by_way.get((vit, "statetx.jit"))) is not None:
        figures["ViT-L: peak, of jax.jit"] = row["peak_bytes"] / by_way[vit, "jax.jit"]["peak_bytes"]
    if (row := by_way.get((norm, "statetx.jit, True"))) is not None:
        figures["clipped: peak, of jax.jit"] = row["peak_bytes"] / by_way[norm, "jax.jit"]["peak_bytes"]
    for quantity, title in (("step", "CPU time of a step"), ("build", "tracing and compiling")) if times else ():
        measured_rows = [row for row in times if quantity in row]
        worst = max(measured_rows, key=lambda row: row[quantity]["median"])
        figures[f"{title}, the most of {len(measured_rows)} programs"] = worst[quantity]
    return figures


def main() -> None:
    only = {"choices": [*PROGRAMS, *SMALL], "help": "one program alone"}
    timed_only = {"action": "store_true", "help": "CPU times of small programs in place of memory"}
    options, env = start(__doc__ or "", only=only, times=timed_only)
    stored = json.loads(options.json.read_text()) if options.json and options.json.exists() else {}
    results, times = stored.get("results", []), stored.get("times", [])
    names = [options.only] if options.only else SMALL if options.times else PROGRAMS
    if options.times:
        new = [times_of(name, rounds=1 if options.quick else options.rounds or 9) for name in names]
        times = [*(row for row in times if row["program"] not in names), *new]
    else:
        results = [*(row for row in results if row["program"] not in names)]
        results += [row for name in names for row in measured(name, is_quick=options.quick)]
        results.sort(key=lambda row: [*PROGRAMS].index(row["program"]))
    finish("gradients", options, env, figures_of(results, times), results=results, times=times)


if __name__ == "__main__":
    main()
