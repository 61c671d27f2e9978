"""Trace and lowering of a rematerialized 24-block MLP's value and gradient, a counter state in each block.

Compared
    The same program, written by hand in plain JAX with its counters passed in and out (one function object for
    all `jax.checkpoint` calls, a fresh closure for each, no remat at all), with `statetx.remat` on a method, and with
    the `remat` and gradient of brainstate, flax.nnx, flax.linen, haiku and equinox, each on a module of its own kind.
    All update the counters and return loss and gradients.

Measured
    Seconds from a function that is new to JAX to its jaxpr (trace) and from there to StableHLO
    (lowering), as CPU time of the process, which other jobs disturb less than the wall clock. Each implementation
    gives one sample a round; trust the median of the ratios within a round.

Fairness
    Each sample makes a new model, new functions and a new `jax.jit`, so no cache keyed by one of these
    can hit. JAX's caches of its own jitted library functions are warm for all after one discarded round.
    statetx also keeps its table of structures, by design, and with it JAX's cache entries for the functions in
    it. "cleared" empties the table before each sample, as for the first trace of a model; "warm" does not, as
    for a later trace (a second jitted step over the same layers, a notebook cell run again). The
    target is for "cleared". Making the model and `functionalize(...).values`, which has no counterpart in the
    other implementations, are not timed. `statetx.jit(f).lower(x)` is timed as a whole, including the search for
    states, as is brainstate's.

First call
    Trace, lowering and compilation together, for plain JAX and for statetx, with the same fence around recomputation
    and without one: on a CPU the fence makes a different program, one that really recomputes.

Counts
    Equations of the jaxpr, runs of a block's Python body from nothing to the lowered program, FLOPs and
    temporary bytes of the compiled program. XLA's fusion, and so both of the latter, depends a little on the
    order of inputs and outputs, which is the same in all implementations except brainstate's.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
from collections.abc import Callable
from typing import Any

import brainstate
import equinox as eqx
import flax.linen as nn
import haiku as hk
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
    num_equations,
    parse_args,
    show,
    spread,
    summaries,
    summary,
    write_json,
)
from flax import nnx

import statetx

NUM_BLOCKS, WIDTH, BATCH = 24, 64, 32
# On a CPU this XLA pass removes the barriers of jax.checkpoint, and XLA then merges the recomputation with the
# forward pass: by default all compile to the same program as without remat. Without the pass they differ.
KEEP_BARRIERS = {"xla_disable_hlo_passes": "cse_barrier_expander"} if jax.default_backend() == "cpu" else {}
FENCED = "functional, one function object, statetx fence"
SHARED, FRESH, PLAIN = "functional, one function object", "functional, fresh closures", "functional, no remat"
CLEARED, WARM = "statetx.remat, table cleared", "statetx.remat, table warm"
JIT_CLEARED, JIT_WARM = "statetx.jit(...).lower, table cleared", "statetx.jit(...).lower, table warm"
OF_BRAINSTATE = "statetx.jit(...).lower, brainstate states, cleared"
BRAINSTATE = "brainstate.transform remat, grad, jit"
NNX, LINEN, HAIKU, EQUINOX = (
    "flax.nnx remat, value_and_grad, jit",
    "flax.linen remat",
    "haiku remat",
    "equinox filter_checkpoint",
)

body_runs: list[None] = []  # one entry for each run of `affine_pair`


def affine_pair(x: Any, w1: Any, b1: Any, w2: Any, b2: Any) -> Any:
    """The body of a block, in every implementation."""
    body_runs.append(None)
    return x + jnp.tanh(x @ w1 + b1) @ w2 + b2


def new_weights() -> list[dict[str, jax.Array]]:
    rng = np.random.default_rng(0)
    weight = lambda *shape: jnp.asarray(rng.normal(size=shape) / np.sqrt(WIDTH), jnp.float32)
    return [
        {"w1": weight(WIDTH, WIDTH), "b1": weight(WIDTH), "w2": weight(WIDTH, WIDTH), "b2": weight(WIDTH)}
        for _ in range(NUM_BLOCKS)
    ]


def new_input() -> jax.Array:
    return jnp.linspace(-1.0, 1.0, BATCH * WIDTH).reshape(BATCH, WIDTH)


# -- the implementations -------------------------------------------------------------------------------------


@dataclasses.dataclass
class Case:
    """A new instance of one implementation.

    Attributes:
        trace: returns an object with ``.jaxpr`` and ``.lower()``; None if the library offers only `lower`.
        lower: traces and lowers to a ``jax.stages.Lowered``.
        loss_and_sum: runs the program; returns the loss and the sum of the absolute gradients.
    """

    trace: Callable[[], Any] | None
    lower: Callable[[], Any] | None
    loss_and_sum: Callable[[], tuple[Any, Any]]


def total(grads: Any) -> Any:
    return sum(jnp.abs(g).sum() for g in jax.tree.leaves(grads))


def functional(wrap: Callable[[], Callable[[], Callable]]) -> Case:
    """Plain JAX: `wrap()` is called once a model, and the function that it returns once a block."""
    weights, x = new_weights(), new_input()
    counts = [jnp.zeros((), jnp.int32) for _ in weights]

    def step(weights: list, counts: list, x: Any) -> Any:
        block_for = wrap()

        def loss(weights: list) -> tuple[Any, list]:
            y, new_counts = x, []
            for w, count in zip(weights, counts, strict=True):
                y, count = block_for()(w, count, y)
                new_counts.append(count)
            return jnp.mean(y**2), new_counts

        (value, new_counts), grads = jax.value_and_grad(loss, has_aux=True)(weights)
        return value, grads, new_counts

    def loss_and_sum() -> tuple[Any, Any]:
        value, grads, _ = jax.jit(step)(weights, counts, x)
        return value, total(grads)

    return Case(lambda: jax.jit(step).trace(weights, counts, x), None, loss_and_sum)


def one_function_object() -> Callable[[], Callable]:
    def block(w: dict, count: Any, x: Any) -> tuple[Any, Any]:
        return affine_pair(x, **w), count + 1

    rematerialized = jax.checkpoint(block)
    return lambda: rematerialized


def fresh_closures() -> Callable[[], Callable]:
    def make() -> Callable:
        def block(w: dict, count: Any, x: Any) -> tuple[Any, Any]:
            return affine_pair(x, **w), count + 1

        return jax.checkpoint(block)

    return make


def no_remat() -> Callable[[], Callable]:
    return lambda: lambda w, count, x: (affine_pair(x, **w), count + 1)


class Block:
    """A block with native states."""

    def __init__(self, weights: dict[str, jax.Array]):
        self.weights = {k: statetx.Param(v) for k, v in weights.items()}
        self.count = statetx.State(jnp.zeros((), jnp.int32))

    @statetx.remat
    def __call__(self, x: Any) -> Any:
        self.count.value += 1
        return affine_pair(x, **{k: p.value for k, p in self.weights.items()})


class BrainstateBlock(brainstate.nn.Module):
    def __init__(self, weights: dict[str, jax.Array]):
        super().__init__()
        self.weights = {k: brainstate.ParamState(v) for k, v in weights.items()}
        self.count = brainstate.ShortTermState(jnp.zeros((), jnp.int32))

    def forward(self, x: Any) -> Any:
        self.count.value += 1
        return affine_pair(x, **{k: p.value for k, p in self.weights.items()})

    __call__ = statetx.remat(forward)


def stateful_loss(blocks: list[Callable]) -> Callable[[Any], Any]:
    def loss(x: Any) -> Any:
        for block in blocks:
            x = block(x)
        return jnp.mean(x**2)

    return loss


def with_statetx(block_type: Callable, *, with_jit: bool) -> Case:
    """`with_jit`: as ``statetx.jit(step).lower(x)``; else trace and lowering separately, by `functionalize`."""
    blocks, x = [block_type(w) for w in new_weights()], new_input()
    step = statetx.value_and_grad(stateful_loss(blocks), wrt=[b.weights for b in blocks])

    def loss_and_sum() -> tuple[Any, Any]:
        value, grads = statetx.jit(step)(x)
        return value, total(grads)

    if with_jit:
        return Case(None, lambda: statetx.jit(step).lower(x), loss_and_sum)
    pure = statetx.functionalize(step)
    values = pure.values(x)
    return Case(lambda: jax.jit(pure).trace(values, x), None, loss_and_sum)


class UnfencedBlock(Block):
    __call__ = statetx.remat(Block.__call__.__wrapped__, fence=None)


def with_brainstate() -> Case:
    blocks, x = [BrainstateBlock(w) for w in new_weights()], new_input()
    # As a decorator in the class body, brainstate's remat takes `self` for an array; a bound method works.
    loss = stateful_loss([brainstate.transform.remat(b.forward) for b in blocks])
    step = brainstate.transform.grad(loss, [b.weights for b in blocks], return_value=True)

    def loss_and_sum() -> tuple[Any, Any]:
        grads, value = brainstate.transform.jit(step)(x)
        return value, total(grads)

    return Case(lambda: brainstate.transform.jit(step).trace(x), None, loss_and_sum)


class NnxBlock(nnx.Module):
    def __init__(self, weights: dict[str, jax.Array]):
        self.w1, self.b1, self.w2, self.b2 = (nnx.Param(weights[k]) for k in ("w1", "b1", "w2", "b2"))
        self.count = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x: Any) -> Any:
        self.count.set_value(self.count.get_value() + 1)
        return affine_pair(x, *(p.get_value() for p in (self.w1, self.b1, self.w2, self.b2)))


class NnxModel(nnx.Module):
    def __init__(self) -> None:
        self.blocks = nnx.List([NnxBlock(w) for w in new_weights()])

    def __call__(self, x: Any) -> Any:
        block_of = nnx.remat(NnxBlock.__call__)
        for block in self.blocks:
            x = block_of(block, x)
        return x


def with_nnx() -> Case:
    model, x = NnxModel(), new_input()
    step = nnx.jit(nnx.value_and_grad(lambda model, x: jnp.mean(model(x) ** 2)))

    def loss_and_sum() -> tuple[Any, Any]:
        value, grads = step(model, x)
        return value, total(grads)

    return Case(None, lambda: step.lower(model, x), loss_and_sum)


class LinenBlock(nn.Module):
    weights: Any

    @nn.compact
    def __call__(self, x: Any) -> Any:
        ws = [self.param(k, lambda _, k=k: self.weights[k]) for k in ("w1", "b1", "w2", "b2")]
        count = self.variable("counts", "count", lambda: jnp.zeros((), jnp.int32))
        count.value += 1
        return affine_pair(x, *ws)


class LinenModel(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        for w in new_weights():
            x = nn.remat(LinenBlock)(w)(x)
        return x


def of_pure(model: Callable[[Any, Any, Any], Any], params: Any, counts: Any, x: Any) -> Case:
    """A library whose models are functions ``(params, counts, x) -> (y, counts)``."""

    def step(params: Any, counts: Any, x: Any) -> Any:
        def loss(params: Any) -> tuple[Any, Any]:
            y, new_counts = model(params, counts, x)
            return jnp.mean(y**2), new_counts

        (value, new_counts), grads = jax.value_and_grad(loss, has_aux=True)(params)
        return value, grads, new_counts

    def loss_and_sum() -> tuple[Any, Any]:
        value, grads, _ = jax.jit(step)(params, counts, x)
        return value, total(grads)

    return Case(lambda: jax.jit(step).trace(params, counts, x), None, loss_and_sum)


def with_linen() -> Case:
    model, x = LinenModel(), new_input()
    variables = model.init(jax.random.key(0), x)

    def apply(params: Any, counts: Any, x: Any) -> Any:
        y, new = model.apply({"params": params, "counts": counts}, x, mutable=["counts"])
        return y, new["counts"]

    return of_pure(apply, variables["params"], variables["counts"], x)


def with_haiku() -> Case:
    weights, x = new_weights(), new_input()

    def block(n: int, x: Any) -> Any:
        ws = [
            hk.get_parameter(f"{k}_{n}", weights[n][k].shape, init=lambda *_, k=k: weights[n][k])
            for k in ("w1", "b1", "w2", "b2")
        ]
        count = hk.get_state(f"count_{n}", (), jnp.int32, init=jnp.zeros)
        hk.set_state(f"count_{n}", count + 1)
        return affine_pair(x, *ws)

    def forward(x: Any) -> Any:
        for n in range(NUM_BLOCKS):
            x = hk.remat(functools.partial(block, n))(x)
        return x

    model = hk.transform_with_state(forward)
    params, counts = model.init(None, x)
    return of_pure(lambda params, counts, x: model.apply(params, counts, None, x), params, counts, x)


class EquinoxBlock(eqx.Module):
    w1: jax.Array
    b1: jax.Array
    w2: jax.Array
    b2: jax.Array

    def __call__(self, count: Any, x: Any) -> Any:
        return affine_pair(x, self.w1, self.b1, self.w2, self.b2), count + 1


def with_equinox() -> Case:
    blocks, x = [EquinoxBlock(**w) for w in new_weights()], new_input()

    def model(blocks: Any, counts: Any, x: Any) -> Any:
        new = []
        for block, count in zip(blocks, counts, strict=True):
            x, count = eqx.filter_checkpoint(block)(count, x)
            new.append(count)
        return x, new

    return of_pure(model, blocks, [jnp.zeros((), jnp.int32) for _ in blocks], x)


def fenced_functional() -> Case:
    """As by hand with one function object, with statetx's fence: what is compiled is then the same."""
    return functional(lambda: (lambda wrapped: lambda: wrapped)(statetx.remat(_pure_block)))


def _pure_block(w: dict, count: Any, x: Any) -> tuple[Any, Any]:
    return affine_pair(x, **w), count + 1


UNFENCED = "statetx.remat(fence=None), cleared"
IMPLEMENTATIONS: dict[str, Callable[[], Case]] = {
    SHARED: lambda: functional(one_function_object),
    FRESH: lambda: functional(fresh_closures),
    FENCED: fenced_functional,
    PLAIN: lambda: functional(no_remat),
    CLEARED: lambda: with_statetx(Block, with_jit=False),
    WARM: lambda: with_statetx(Block, with_jit=False),
    JIT_CLEARED: lambda: with_statetx(Block, with_jit=True),
    JIT_WARM: lambda: with_statetx(Block, with_jit=True),
    OF_BRAINSTATE: lambda: with_statetx(BrainstateBlock, with_jit=True),
    BRAINSTATE: with_brainstate,
    NNX: with_nnx,
    LINEN: with_linen,
    HAIKU: with_haiku,
    EQUINOX: with_equinox,
}


# -- measuring -------------------------------------------------------------------------------------------


def timed(name: str) -> Callable[[], Sample]:
    def sample() -> Sample:
        case = IMPLEMENTATIONS[name]()
        if name.endswith("cleared"):
            statetx.clear_cache()
        gc.collect()  # former table entries are in reference cycles, and JAX's caches hold them weakly: free them
        watch = Stopwatch()
        if case.lower is not None:
            case.lower()
            return watch.read()
        assert case.trace is not None
        traced = case.trace()
        trace = watch.read()["cpu"]
        traced.lower()
        total_times = watch.read()
        return {**total_times, "trace": trace, "lowering": total_times["cpu"] - trace}

    return sample


def counts(name: str) -> dict[str, Any]:
    """The deterministic figures of one trace, lowering and compilation."""
    case = IMPLEMENTATIONS[name]()
    statetx.clear_cache()
    gc.collect()
    body_runs.clear()
    traced = case.trace() if case.trace is not None else None
    lowered = traced.lower() if traced is not None else case.lower()  # type: ignore[misc]
    num_runs = len(body_runs)
    loss, grads = case.loss_and_sum()
    return {
        "equations": num_equations(traced.jaxpr) if traced is not None else None,
        "runs": num_runs,
        "default": costs(lowered.compile()),
        "fenced": costs(lowered.compile(compiler_options=KEEP_BARRIERS)),
        "loss": float(loss),
        "gradients": float(grads),
    }


def costs(compiled: Any) -> dict[str, float]:
    memory = compiled.memory_analysis()
    return {"flops": compiled.cost_analysis()["flops"], "temp_bytes": memory.temp_size_in_bytes}


def measure(rounds: int) -> dict[str, Any]:
    samples = interleave({name: timed(name) for name in IMPLEMENTATIONS}, rounds)
    return {
        name: {**summaries(samples[name], samples[FRESH]), "samples": samples[name], **counts(name)}
        for name in IMPLEMENTATIONS
    }


def check(results: dict[str, Any]) -> list[str]:
    """Raise if the programs do not compute the same; say whether they cost the same."""
    reference = results[SHARED]
    for r in results.values():
        for key in ("loss", "gradients"):
            np.testing.assert_allclose(r[key], reference[key], rtol=1e-4)
    is_equal = all(results[CLEARED][key] == results[FENCED][key] for key in ("default", "fenced"))
    verdict = "equal" if is_equal else "DIFFER from"
    return [f"{CLEARED}: FLOPs and temporary bytes {verdict} those of '{FENCED}'."]


def paired(results: dict[str, Any], name: str, base: str) -> dict[str, float]:
    """Ratios of CPU time within a round."""
    ours, theirs = (results[n]["samples"] for n in (name, base))
    return summary([a["cpu"] / b["cpu"] for a, b in zip(ours, theirs, strict=True)])


def figures_of(results: dict[str, Any], first: dict[str, Any]) -> dict[str, Any]:
    """The figures that have limits."""
    return {
        "remat, of fresh closures": paired(results, CLEARED, FRESH),
        "remat, of one function object": paired(results, CLEARED, SHARED),
        "statetx.jit, of flax.nnx": paired(results, JIT_CLEARED, NNX),
        "statetx.jit, of brainstate": paired(results, JIT_CLEARED, BRAINSTATE),
        "first call, of functional with the same fence": paired(first, CLEARED, FENCED),
        "first call without a fence, of functional with jax.checkpoint": paired(first, UNFENCED, SHARED),
        "first call, of functional with jax.checkpoint": paired(first, CLEARED, SHARED),
    }


def first_calls(rounds: int) -> dict[str, Any]:
    """Trace, lowering and compilation together."""
    makes = {name: IMPLEMENTATIONS[name] for name in (SHARED, FENCED, CLEARED)}
    makes[UNFENCED] = lambda: with_statetx(UnfencedBlock, with_jit=False)

    def sample(make: Callable[[], Case]) -> Callable[[], Sample]:
        def run() -> Sample:
            case = make()
            statetx.clear_cache()
            gc.collect()
            watch = Stopwatch()
            assert case.trace is not None
            case.trace().lower().compile()
            return watch.read()

        return run

    samples = interleave({name: sample(make) for name, make in makes.items()}, rounds)
    return {name: {**summaries(s, samples[SHARED]), "samples": s} for name, s in samples.items()}


# -- printing --------------------------------------------------------------------------------------------

TIMES = ("implementation", "trace ms", "lowering ms", "both ms", "middle half", "least")
TIMES += ("ratio", "middle half", "of least", "wall ratio")
COUNTS = ("implementation", "equations", "body runs", "FLOPs", "temporary bytes")
COUNTS += ("FLOPs, barriers kept", "bytes, barriers kept")


def time_rows(results: dict[str, Any]) -> list[list[str]]:
    ms = lambda s, key="median": "" if s is None else f"{1e3 * s[key]:.0f}"
    return [
        [
            name,
            ms(r.get("trace")),
            ms(r.get("lowering")),
            ms(r["cpu"]),
            spread(r["cpu"], 1e3, 0),
            ms(r["cpu"], "min"),
            f"{r['cpu_ratio']['median']:.2f}",
            spread(r["cpu_ratio"], 1, 2),
            f"{r['cpu_ratio']['of_min']:.2f}",
            f"{r['wall_ratio']['median']:.2f}",
        ]
        for name, r in results.items()
    ]


def count_rows(results: dict[str, Any]) -> list[list[str]]:
    return [
        [
            name,
            "" if r["equations"] is None else f"{r['equations']:,}",
            str(r["runs"]),
            *(f"{r[how][key]:,.0f}" for how in ("default", "fenced") for key in ("flops", "temp_bytes")),
        ]
        for name, r in results.items()
    ]


def main() -> None:
    options = parse_args(__doc__ or "")
    env = environment()
    if options.quick:
        global NUM_BLOCKS
        NUM_BLOCKS = 4
    rounds = options.rounds or (2 if options.quick else 15)
    print(header(env))
    results = measure(rounds)
    first = first_calls(rounds)
    title = f"{NUM_BLOCKS} blocks: CPU time of trace and lowering, {rounds} rounds; ratio to '{FRESH}'"
    show(title, TIMES, time_rows(results))
    show("The same in counts", COUNTS, count_rows(results))
    figures = figures_of(results, first)
    lines = [*check(results), *judge("bench_trace", figures, quick=options.quick)]
    print("\n".join(lines))
    if options.json:
        write_json(
            options.json,
            env,
            {"rounds": rounds, "results": results, "first": first, "figures": figures, "verdict": lines},
        )


if __name__ == "__main__":
    main()
