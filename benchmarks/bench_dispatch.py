"""Dispatch of a jitted step over many states: a training step, and steps that do almost nothing.

Compared
    train: a step of gradient descent on parameters of shape (32, 32), for the mean over a batch of 32 of the square of
    a sum of products with them. update: adds one to each of many scalars. read: only their sum. Each as plain `jax.jit`
    on the same values (a list of arrays in; a list of arrays, or the sum, out), as `statetx.jit` with native states,
    with states in nested containers, with donated states, with brainstate's states and with flax.nnx's, and as users of
    brainstate, flax.nnx, flax.linen, haiku and equinox write it (the latter three pass a nested dict or module to jit).
    A raw step threads its list by hand, so its cost is a lower bound.

Measured
    Seconds a call, from a run of back-to-back calls that ends when the last result is ready: by the wall clock
    and as CPU time of all threads of the process, which other jobs disturb less. Each implementation gives one sample a
    round; trust the median of the ratios within a round. The compiled programs are equal, so the excess over a
    ratio of 1 is the cost of finding, gathering and storing the states.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import Any

import brainstate
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from _common import (
    Sample,
    Stopwatch,
    environment,
    header,
    interleave,
    judge,
    parse_args,
    show,
    spread,
    summaries,
    write_json,
)
from flax import nnx

import statetx

SIZES = (10, 100, 1_000, 5_000)
RAW = "jax.jit on a list"
STATETX, OF_BRAINSTATE, OF_NNX = (
    "statetx.jit, statetx states",
    "statetx.jit, brainstate states",
    "statetx.jit, nnx states",
)
DEEP, DONATED = "statetx.jit, nested containers", "statetx.jit, donated states"
BRAINSTATE, NNX, TREE, EQUINOX = "brainstate.transform.jit", "nnx.jit", "jax.jit on a nested dict", "equinox.filter_jit"
# flax.linen and haiku keep parameters in nested dicts and leave jit to JAX: "nested dict" stands for both.
IMPLEMENTATIONS = (RAW, TREE, STATETX, DEEP, DONATED, OF_BRAINSTATE, OF_NNX, BRAINSTATE, NNX, EQUINOX)
STEPS = ("train", "update", "read")
WIDTH, BATCH = 32, 32
SAMPLE_SECONDS = 0.03  # about how long the calls of one sample take


def new_values(step: str, num: int) -> list[jax.Array]:
    if step == "train":
        return [jnp.eye(WIDTH) * (1 + i / num) for i in range(num)]
    return [jnp.asarray(float(i)) for i in range(num)]


def tree_sum(values: list) -> Any:
    """Add neighbors, to avoid one long chain of additions."""
    while len(values) > 1:
        values = [sum(values[i : i + 8]) for i in range(0, len(values), 8)]
    return values[0]


def loss(values: list) -> Any:
    """A loss of the parameters: cheap, to make dispatch visible, with a gradient that depends on all of them."""
    x = jnp.linspace(-1.0, 1.0, BATCH * WIDTH).reshape(BATCH, WIDTH)
    return jnp.mean((x @ tree_sum(values)) ** 2) / len(values)


def descend(value: Any, gradient: Any) -> Any:
    return value - 1e-3 * gradient


# -- the implementations ------------------------------------------------------------------------------------


def pure_step(step: str) -> Callable[[list], Any]:
    """A pure step from values to new values, or for "read" to their sum."""
    if step == "train":
        return lambda values: [descend(v, g) for v, g in zip(values, jax.grad(loss)(values), strict=True)]
    return (lambda values: [v + 1 for v in values]) if step == "update" else tree_sum


def threaded(
    step: str, values: Any, to_list: Callable, of_list: Callable, jit: Callable = jax.jit
) -> Callable[[], Any]:
    """A jitted step that takes a pytree and returns the new one."""
    fun = pure_step(step)
    if step == "read":
        read = jit(lambda tree: fun(to_list(tree)))
        return lambda: read(values)
    jitted = jit(lambda tree: of_list(tree, fun(to_list(tree))))

    def call() -> Any:
        nonlocal values
        values = jitted(values)
        return values

    return call


def nested(values: list) -> Any:
    """A dict of layers of a few entries each, as libraries keep parameters."""
    return {f"layer_{i:05}": {f"w{j}": v for j, v in enumerate(values[i : i + 4])} for i in range(0, len(values), 4)}


def of_tree(tree: Any, values: list) -> Any:
    return jax.tree.unflatten(jax.tree.structure(tree), values)


class Layer(eqx.Module):
    weights: list[jax.Array]


def stateful(step: str, states: list, holder: Any, jit: Callable) -> Callable[[], Any]:
    """A jitted step that closes over states; `holder` is the container that holds them."""

    def values() -> list:
        return [s.value for s in jax.tree.leaves(holder, is_leaf=lambda x: hasattr(x, "value"))]

    def update() -> None:
        for s in states:
            s.value += 1

    def train() -> None:
        for s, g in zip(states, statetx.grad(lambda: loss(values()), wrt=states)(), strict=True):
            s.value = descend(s.value, g)

    if step == "read":
        return jit(lambda: tree_sum(values()))
    jitted = jit(train if step == "train" else update)

    def call() -> Any:
        jitted()
        return states[-1].value

    return call


def with_brainstate(step: str, states: list) -> Callable[[], Any]:
    if step != "train":
        return stateful(step, states, states, brainstate.transform.jit)
    by_name = dict(enumerate(states))

    @brainstate.transform.jit
    def train() -> None:
        grads = brainstate.transform.grad(lambda: loss([s.value for s in states]), by_name)()
        for n, s in by_name.items():
            s.value = descend(s.value, grads[n])

    def call() -> Any:
        train()
        return states[-1].value

    return call


class Module(nnx.Module):
    def __init__(self, values: list):
        self.weights = nnx.List([nnx.Param(v) for v in values])


def with_nnx(step: str, model: Module) -> Callable[[], Any]:
    of = lambda model: [w.get_value() for w in model.weights]

    @nnx.jit
    def run(model: Module) -> Any:
        if step == "read":
            return tree_sum(of(model))
        if step == "update":
            for w in model.weights:
                w.set_value(w.get_value() + 1)
        else:
            grads = nnx.grad(lambda model: loss(of(model)))(model)
            for w, g in zip(model.weights, jax.tree.leaves(grads), strict=True):
                w.set_value(descend(w.get_value(), g))
        return None

    def call() -> Any:
        out = run(model)
        return out if step == "read" else model.weights[-1].get_value()

    return call


def make(name: str, step: str, num: int) -> Callable[[], Any]:
    values = new_values(step, num)
    if name == RAW:
        return threaded(step, values, lambda x: x, lambda _, x: x)
    if name == TREE:
        return threaded(step, nested(values), jax.tree.leaves, of_tree)
    if name == EQUINOX:
        return threaded(step, Layer(values), jax.tree.leaves, of_tree, eqx.filter_jit)
    if name == NNX:
        return with_nnx(step, Module(values))
    if name == OF_NNX:
        states: list[Any] = [nnx.Param(v) for v in values]
        return stateful(step, states, states, statetx.jit)
    if name in (OF_BRAINSTATE, BRAINSTATE):
        states = [brainstate.ParamState(v) for v in values]
        return with_brainstate(step, states) if name == BRAINSTATE else stateful(step, states, states, statetx.jit)
    states = [statetx.State(v) for v in values]
    jit = functools.partial(statetx.jit, donate_states=True) if name == DONATED else statetx.jit
    return stateful(step, states, nested(states) if name == DEEP else states, jit)


# -- measuring ------------------------------------------------------------------------------------------


def timed(call: Callable[[], Any], num_calls: int) -> Callable[[], Sample]:
    def sample() -> Sample:
        out = jax.block_until_ready(call())  # not timed: the first call after another implementation ran
        watch = Stopwatch()
        for _ in range(num_calls):
            out = call()
        jax.block_until_ready(out)
        return {clock: seconds / num_calls for clock, seconds in watch.read().items()}

    return sample


def num_calls_for(call: Callable[[], Any]) -> int:
    for _ in range(3):
        jax.block_until_ready(call())
    once = min(timed(call, 3)()["wall"] for _ in range(3))
    return max(2, round(SAMPLE_SECONDS / once))


def measure_one(step: str, num: int, rounds: int) -> dict[str, Any]:
    calls = {name: make(name, step, num) for name in implementations_of(step, num)}
    results = [np.asarray(jax.tree.leaves(call())[-1]) for call in calls.values()]
    for result in results:
        np.testing.assert_allclose(result, results[0], rtol=1e-6, err_msg=f"{step} of {num} states")
    gc.collect()
    gc.freeze()  # collections between rounds need not traverse thousands of equations
    samples = interleave({name: timed(call, num_calls_for(call)) for name, call in calls.items()}, rounds)
    gc.unfreeze()
    jax.clear_caches()  # else the programs of all sizes stay: 14 GiB at the end
    return {name: {**summaries(samples[name], samples[RAW]), "samples": samples[name]} for name in calls}


def implementations_of(step: str, num: int) -> tuple[str, ...]:
    """All implementations; fewer for sizes at which XLA takes minutes to compile each."""
    return (RAW, STATETX, OF_BRAINSTATE) if step == "train" and num > 1000 else tuple(IMPLEMENTATIONS)


def measure(sizes: tuple[int, ...], rounds: int) -> dict[str, dict[int, dict[str, Any]]]:
    return {step: {num: measure_one(step, num, rounds) for num in sizes} for step in STEPS}


def figures_of(results: dict[str, Any]) -> dict[str, Any]:
    """The figures that have limits."""
    names = {STATETX: "native", OF_BRAINSTATE: "brainstate"}
    return {
        f"{step}, {num:,} {kind} states, of jax.jit": by_size[num][name]["cpu_ratio"]
        for step, by_size in results.items()
        for name, kind in names.items()
        for num in by_size
    }


# -- printing -------------------------------------------------------------------------------------------

COLUMNS = ("step and implementation", "states", "CPU us a call", "middle half", "least")
COLUMNS += ("ratio", "middle half", "of least", "wall us", "wall ratio")


def rows(results: dict[str, Any]) -> list[list[str]]:
    return [
        [
            f"{step}: {name}",
            f"{int(num):,}",
            f"{1e6 * r['cpu']['median']:,.1f}",
            spread(r["cpu"], 1e6, 1),
            f"{1e6 * r['cpu']['min']:,.1f}",
            f"{r['cpu_ratio']['median']:.2f}",
            spread(r["cpu_ratio"], 1, 2),
            f"{r['cpu_ratio']['of_min']:.2f}",
            f"{1e6 * r['wall']['median']:,.1f}",
            f"{r['wall_ratio']['median']:.2f}",
        ]
        for step, by_size in results.items()
        for num, implementations in by_size.items()
        for name, r in implementations.items()
    ]


def main() -> None:
    options = parse_args(__doc__ or "")
    env = environment()
    sizes, rounds = ((10, 100), 3) if options.quick else (SIZES, 15)
    rounds = options.rounds or rounds
    print(header(env))
    results = measure(sizes, rounds)
    show(f"Dispatch, {rounds} rounds; ratio to '{RAW}'", COLUMNS, rows(results))
    figures = figures_of(results)
    lines = judge("bench_dispatch", figures, quick=options.quick)
    print("\n".join(lines))
    if options.json:
        write_json(options.json, env, {"rounds": rounds, "results": results, "figures": figures, "verdict": lines})


if __name__ == "__main__":
    main()
