"""Growth of costs with the number of states, of layers unrolled and stacked, of steps, and with the depth of nesting.

Measured
    states: dispatch of a jitted step over 10 to 10,000 scalar states, and its trace. unrolled layers: trace and lowering of
    the value and gradient of 1 to 1,000 rematerialized layers. stacked layers: the same with ``statetx.stack``, which
    traces one. steps: the same of a scan with ``checkpoint=Slots(100)`` over 10 to 1,000,000 steps. nesting: of ``remat``
    within ``remat``, up to eight deep.
    Each also for hand-written JAX if it has an equivalent. CPU time; the least of some repeats.

Growth
    The exponent p of cost = c * size**p between the two largest sizes: 1 is linear, 0 is flat. A fixed cost makes p smaller,
    so a figure above 1 is real. jax.jit itself is above 1 once thousands of arrays no longer fit into the processor's
    cache, so the limit there is for the excess of our exponent over the hand-written twin's.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from _common import Stopwatch, environment, header, judge, parse_args, show, write_json

import statetx
from statetx.policies import Slots

WIDTH = 8


def seconds(run: Callable[[], Any], repeats: int) -> float:
    """The least CPU time."""
    times = []
    for _ in range(repeats):
        gc.collect()
        watch = Stopwatch()
        run()
        times.append(watch.read()["cpu"])
    return min(times)


def per_call(call: Callable[[], Any], calls: int) -> Callable[[], Any]:
    def run() -> None:
        for _ in range(calls):
            out = call()
        jax.block_until_ready(out)

    return run


# -- states --------------------------------------------------------------------------------------------------------


def states(num: int) -> dict[str, float]:
    cells = [statetx.State(jnp.asarray(float(i))) for i in range(num)]

    def step() -> None:
        for s in cells:
            s.value += 1

    jitted = statetx.jit(step)
    trace = seconds(lambda: statetx.jit(lambda: step()).lower(), 3)
    jitted(), jitted()
    calls = max(3, 20_000 // num)

    def call() -> Any:
        jitted()
        return cells[-1].value

    values = [jnp.asarray(float(i)) for i in range(num)]
    raw = jax.jit(lambda values: [v + 1 for v in values])
    raw_trace = seconds(lambda: jax.jit(lambda values: [v + 1 for v in values]).lower(values), 3)

    def raw_call() -> Any:
        nonlocal values
        values = raw(values)
        return values

    raw_call()
    return {
        "dispatch": seconds(per_call(call, calls), 5) / calls,
        "dispatch, jax.jit": seconds(per_call(raw_call, calls), 5) / calls,
        "trace": trace,
        "trace, jax.jit": raw_trace,
    }


# -- layers --------------------------------------------------------------------------------------------------------


class Layer:
    def __init__(self, key: Any):
        self.w = statetx.Param(jax.random.normal(key, (WIDTH, WIDTH)) / WIDTH)
        self.count = statetx.State(jnp.zeros((), jnp.int32))

    @statetx.remat
    def __call__(self, x: Any) -> Any:
        self.count.value += 1
        return x + jnp.tanh(x @ self.w.value)


def unrolled(num: int) -> dict[str, float]:
    layers = [Layer(key) for key in jax.random.split(jax.random.key(0), num)]

    def loss(x: Any) -> Any:
        for layer in layers:
            x = layer(x)
        return (x**2).mean()

    def by_hand(ws: Any, counts: Any, x: Any) -> Any:
        def block(w: Any, count: Any, x: Any) -> Any:
            return x + jnp.tanh(x @ w), count + 1

        block = jax.checkpoint(block)

        def loss(ws: Any) -> Any:
            y, new = x, []
            for w, count in zip(ws, counts, strict=True):
                y, count = block(w, count, y)
                new.append(count)
            return (y**2).mean(), new

        return jax.value_and_grad(loss, has_aux=True)(ws)

    x = jnp.ones((4, WIDTH))
    ws, counts = [layer.w.value for layer in layers], [layer.count.value for layer in layers]
    step = statetx.value_and_grad(loss, wrt=[layer.w for layer in layers])
    return {
        "trace": seconds(lambda: statetx.jit(lambda x: step(x)).lower(x), 2),
        "trace, by hand": seconds(lambda: jax.jit(lambda *a: by_hand(*a)).lower(ws, counts, x), 2),
    }


def stacked(num: int) -> dict[str, float]:
    stack = _stack(num)
    step = statetx.value_and_grad(lambda x: (stack(x) ** 2).mean(), wrt=statetx.states(stack, statetx.Param))
    x = jnp.ones((4, WIDTH))
    return {"trace": seconds(lambda: statetx.jit(lambda x: step(x)).lower(x), 3)}


def _stack(num: int) -> Any:
    keys = iter(jax.random.split(jax.random.key(0), num))
    return statetx.stack(lambda: Layer(next(keys)), num)


def steps(num: int) -> dict[str, float]:
    w = statetx.Param(jnp.eye(WIDTH))

    def loss(x: Any) -> Any:
        out, _ = statetx.scan(lambda h, _: (jnp.tanh(h @ w.value), None), x, None, num, checkpoint=Slots(min(num, 100)))
        return out.sum()

    x = jnp.ones((4, WIDTH))
    return {"trace": seconds(lambda: statetx.jit(statetx.value_and_grad(loss, wrt=w)).lower(x), 3)}


def nested(num: int) -> dict[str, float]:
    w = statetx.Param(jnp.eye(WIDTH))

    def innermost(x: Any) -> Any:
        return jnp.tanh(x @ w.value)

    def at(depth: int, wrap: Callable, fun: Callable) -> Callable:
        if depth == 0:
            return fun
        inner = at(depth - 1, wrap, fun)
        return wrap(lambda *x: inner(*x))

    fun = at(num, statetx.remat, innermost)
    pure = at(num, jax.checkpoint, lambda w, x: jnp.tanh(x @ w))
    x, value = jnp.ones((4, WIDTH)), w.value
    step = statetx.value_and_grad(lambda x: fun(x).sum(), wrt=w)
    raw = jax.value_and_grad(lambda w, x: pure(w, x).sum())
    return {
        "trace": seconds(lambda: (statetx.clear_cache(), statetx.jit(lambda x: step(x)).lower(x)), 5),
        "trace, by hand": seconds(lambda: jax.jit(lambda w, x: raw(w, x)).lower(value, x), 5),
    }


KINDS: dict[str, tuple[Callable[[int], dict[str, float]], Sequence[int], Sequence[int]]] = {
    "states": (states, (10, 100, 1_000, 10_000), (10, 100)),
    "unrolled layers": (unrolled, (1, 10, 100, 1_000), (1, 10)),
    "stacked layers": (stacked, (1, 10, 100, 1_000), (1, 10)),
    "steps": (steps, (10, 1_000, 100_000, 1_000_000), (10, 1_000)),
    "nesting": (nested, (1, 2, 4, 8), (1, 2)),
}


def growth(costs: dict[int, dict[str, float]], name: str) -> float:
    (a, first), (b, last) = list(costs.items())[-2:]
    return math.log(last[name] / first[name]) / math.log(b / a)


def figures_of(results: dict[str, dict[int, dict[str, float]]]) -> dict[str, float]:
    figures = {}
    for kind, costs in results.items():
        for name in next(iter(costs.values())):
            figures[f"{kind}: growth of {name}"] = growth(costs, name)
            base, _, twin = name.partition(", ")
            if twin:
                excess = growth(costs, base) - growth(costs, name)
                figures[f"{kind}: growth of {base}, beyond that of {twin}"] = excess
    return figures


def picture(results: dict[str, dict[int, dict[str, float]]], path: str) -> None:
    """Milliseconds over size, a panel for each kind."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, NullFormatter, NullLocator

    figure = Figure(figsize=(9, 5.2), layout="constrained", facecolor="white")
    panels = figure.subplots(2, (len(results) + 1) // 2).ravel()
    colors = {"trace": "#0072b2", "dispatch": "#d55e00"}
    for axes, (kind, costs) in zip(panels, results.items(), strict=False):
        for name in next(iter(costs.values())):
            base, _, twin = name.partition(", ")
            style = {"linestyle": "--", "alpha": 0.6} if twin else {"marker": "o", "markersize": 4}
            axes.loglog(list(costs), [1e3 * c[name] for c in costs.values()], color=colors[base], label=name, **style)
        values = [1e3 * value for c in costs.values() for value in c.values()]
        axes.set_ylim(min(values) / 2, max(2 * max(values), 50 * min(values)))  # a flat cost must look flat
        axes.yaxis.set_minor_formatter(NullFormatter())
        if max(costs) < 10:
            axes.xaxis.set(major_locator=FixedLocator(list(costs)), minor_locator=NullLocator(), ticklabels=list(costs))
        axes.set_title(kind, loc="left", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
        axes.legend(frameon=False, fontsize=7)
    for axes in panels[len(results) :]:
        axes.set_visible(False)
    figure.supylabel("CPU ms", fontsize=9)
    figure.supxlabel("how many", fontsize=9)
    figure.savefig(path, dpi=150, metadata={"Date": None})


COLUMNS = ("growing quantity", "number", "cost", "CPU ms")


def rows(results: dict[str, dict[int, dict[str, float]]]) -> list[list[str]]:
    return [
        [kind, f"{int(num):,}", name, f"{1e3 * value:,.3f}" if value < 0.01 else f"{1e3 * value:,.0f}"]
        for kind, by_size in results.items()
        for num, costs in by_size.items()
        for name, value in costs.items()
    ]


def main() -> None:
    options = parse_args(__doc__ or "", plot={"metavar": "PICTURE", "help": "draw the growth"})
    env = environment()
    print(header(env))
    results = {}
    for kind, (measure, sizes, small) in KINDS.items():
        results[kind] = {num: measure(num) for num in (small if options.quick else sizes)}
    show("Scale", COLUMNS, rows(results))
    figures = figures_of(results)
    lines = judge("bench_scale", figures, quick=options.quick)
    print("\n".join(lines))
    if options.plot:
        picture(results, options.plot)
    if options.json:
        write_json(options.json, env, {"results": results, "figures": figures, "verdict": lines})


if __name__ == "__main__":
    main()
