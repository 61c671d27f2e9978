"""Trace and lowering of the value and gradient of a rematerialised 24-block MLP with one counter state a block.

What is compared
    The same program, written by hand in plain JAX with its counters passed in and out (one function object for all
    `jax.checkpoint` calls, a fresh closure for each, no remat at all), with `statetx.remat` on a method, and with
    brainstate's own `remat` and `grad`. All of them update the counters and return loss and gradients.

What is measured
    Seconds from a function that JAX has never seen to its jaxpr (trace) and from there to StableHLO (lowering). A
    contestant gives one sample a round; medians of the ratios within a round are what to trust.

What is fair
    Each sample makes a new model, new functions and a new `jax.jit`, so that no cache keyed by one of these can hit.
    What JAX itself caches of its own jitted library functions is warm for everyone after one round that is thrown
    away. statetx also keeps its table of structures, by design, and what JAX hung on the functions in it: "cleared"
    empties it before each sample, which is what the first trace in a process meets, and "warm" is what a later one
    does (a second jitted step over the same layers, a step that is compiled again for another batch). The target is
    for "cleared". Making the model and `functionalize(...).values`, which has no counterpart in the other forms, are
    not timed; `statetx.jit(f).lower(x)` is timed whole, with the search for states in it, as is brainstate's.

Counts
    Equations of the jaxpr, runs of a block's Python body from nothing to the lowered program, FLOPs and temporary bytes
    of the compiled program. The order of inputs and outputs is the same in all but brainstate's, whose program XLA
    fuses a little differently for it.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
from _common import environment, header, interleave, markdown_table, parse_args, ratios, renew_section
from _common import show, summary, write_json

import statetx
from statetx._jaxpr import table

NUM_BLOCKS, WIDTH, BATCH = 24, 64, 32
TARGET = 0.6
# On a CPU this XLA pass removes the barriers of jax.checkpoint, and what is recomputed is merged with the forward pass:
# by default every contestant compiles to what it would be without remat. Without the pass the difference shows.
KEEP_BARRIERS = {"xla_disable_hlo_passes": "cse_barrier_expander"} if jax.default_backend() == "cpu" else {}
SHARED, FRESH, PLAIN = "functional, one function object", "functional, fresh closures", "functional, no remat"
CLEARED, WARM = "statetx.remat, table cleared", "statetx.remat, table warm"
JIT_CLEARED, JIT_WARM = "statetx.jit(...).lower, table cleared", "statetx.jit(...).lower, table warm"
OF_BRAINSTATE = "statetx.jit(...).lower, brainstate states, cleared"
BRAINSTATE = "brainstate.transform remat, grad, jit"

_runs = 0  # of a block's Python body


def affine_pair(x: Any, w1: Any, b1: Any, w2: Any, b2: Any) -> Any:
    """The body of a block, in every contestant."""
    global _runs
    _runs += 1
    return x + jnp.tanh(x @ w1 + b1) @ w2 + b2


def new_weights() -> list[dict[str, jax.Array]]:
    rng = np.random.default_rng(0)
    weight = lambda *shape: jnp.asarray(rng.normal(size=shape) / np.sqrt(WIDTH), jnp.float32)  # noqa: E731
    return [
        {"w1": weight(WIDTH, WIDTH), "b1": weight(WIDTH), "w2": weight(WIDTH, WIDTH), "b2": weight(WIDTH)}
        for _ in range(NUM_BLOCKS)
    ]


def new_input() -> jax.Array:
    return jnp.linspace(-1.0, 1.0, BATCH * WIDTH).reshape(BATCH, WIDTH)


# -- the contestants -------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Case:
    """One contestant, made anew.

    Attributes:
        trace: gives something with ``.jaxpr`` and ``.lower()``; None where only `lower` is offered.
        lower: from nothing to a ``jax.stages.Lowered``.
        loss_and_sum: runs it: the loss, and the sum of the absolute gradients.
    """

    trace: Callable[[], Any] | None
    lower: Callable[[], Any] | None
    loss_and_sum: Callable[[], tuple[Any, Any]]


def total(grads: Any) -> Any:
    return sum(jnp.abs(g).sum() for g in jax.tree.leaves(grads))


def functional(wrap: Callable[[], Callable[[], Callable]]) -> Case:
    """`wrap()` is called once a model and what it gives once a block."""
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

    rematerialised = jax.checkpoint(block)
    return lambda: rematerialised


def fresh_closures() -> Callable[[], Callable]:
    def make() -> Callable:
        def block(w: dict, count: Any, x: Any) -> tuple[Any, Any]:
            return affine_pair(x, **w), count + 1

        return jax.checkpoint(block)

    return make


def no_remat() -> Callable[[], Callable]:
    return lambda: lambda w, count, x: (affine_pair(x, **w), count + 1)


class Block:
    """With native states."""

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


def with_statetx(block_type: Callable, *, whole: bool) -> Case:
    """`whole`: as ``statetx.jit(step).lower(x)``; else with trace and lowering apart, by `functionalize`."""
    blocks, x = [block_type(w) for w in new_weights()], new_input()
    step = statetx.value_and_grad(stateful_loss(blocks), wrt=[b.weights for b in blocks])

    def loss_and_sum() -> tuple[Any, Any]:
        value, grads = statetx.jit(step)(x)
        return value, total(grads)

    if whole:
        return Case(None, lambda: statetx.jit(step).lower(x), loss_and_sum)
    pure = statetx.functionalize(step)
    values = pure.values(x)
    return Case(lambda: jax.jit(pure).trace(values, x), None, loss_and_sum)


def with_brainstate() -> Case:
    blocks, x = [BrainstateBlock(w) for w in new_weights()], new_input()
    # Used as a decorator in the class body, brainstate's remat takes `self` for an array; a bound method works.
    loss = stateful_loss([brainstate.transform.remat(b.forward) for b in blocks])
    step = brainstate.transform.grad(loss, [b.weights for b in blocks], return_value=True)

    def loss_and_sum() -> tuple[Any, Any]:
        grads, value = brainstate.transform.jit(step)(x)
        return value, total(grads)

    return Case(lambda: brainstate.transform.jit(step).trace(x), None, loss_and_sum)


CONTESTANTS: dict[str, Callable[[], Case]] = {
    SHARED: lambda: functional(one_function_object),
    FRESH: lambda: functional(fresh_closures),
    PLAIN: lambda: functional(no_remat),
    CLEARED: lambda: with_statetx(Block, whole=False),
    WARM: lambda: with_statetx(Block, whole=False),
    JIT_CLEARED: lambda: with_statetx(Block, whole=True),
    JIT_WARM: lambda: with_statetx(Block, whole=True),
    OF_BRAINSTATE: lambda: with_statetx(BrainstateBlock, whole=True),
    BRAINSTATE: with_brainstate,
}


# -- measuring -------------------------------------------------------------------------------------------------


def timed(name: str, trace_times: list[float]) -> Callable[[], float]:
    """Give the seconds of trace and lowering; those of the trace are appended to `trace_times`."""

    def sample() -> float:
        case = CONTESTANTS[name]()
        if name.endswith("cleared"):
            clear_table()
        start = time.perf_counter()
        if case.lower is not None:
            case.lower()
            return time.perf_counter() - start
        assert case.trace is not None
        traced = case.trace()
        trace_times.append(time.perf_counter() - start)
        traced.lower()
        return time.perf_counter() - start

    return sample


def clear_table() -> None:
    import gc

    table.clear()
    gc.collect()  # what was kept is part of cycles, and JAX's caches hold on to it weakly


def num_equations(jaxpr: Any) -> int:
    """Equations of a jaxpr and of those inside it, each as often as it occurs."""
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    inner = (p for eqn in jaxpr.eqns for v in eqn.params.values() for p in (v if isinstance(v, (tuple, list)) else [v]))
    return len(jaxpr.eqns) + sum(num_equations(p) for p in inner if hasattr(p, "eqns") or hasattr(p, "jaxpr"))


def figures(name: str) -> dict[str, Any]:
    """What does not vary: of one trace, lowering and compilation."""
    global _runs
    case = CONTESTANTS[name]()
    clear_table()
    _runs = 0
    traced = case.trace() if case.trace is not None else None
    lowered = traced.lower() if traced is not None else case.lower()  # type: ignore[misc]
    runs = _runs
    loss, grads = case.loss_and_sum()
    return {
        "equations": num_equations(traced.jaxpr) if traced is not None else None,
        "runs": runs,
        "default": costs(lowered.compile()),
        "fenced": costs(lowered.compile(compiler_options=KEEP_BARRIERS)),
        "loss": float(loss),
        "gradients": float(grads),
    }


def costs(compiled: Any) -> dict[str, float]:
    memory = compiled.memory_analysis()
    return {"flops": compiled.cost_analysis()["flops"], "temp_bytes": memory.temp_size_in_bytes}


def measure(rounds: int) -> dict[str, Any]:
    trace_times: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
    samples = interleave({name: timed(name, trace_times[name]) for name in CONTESTANTS}, rounds)
    results = {}
    for name in CONTESTANTS:
        trace = trace_times[name][-rounds:]  # without the warm-up
        lowering = [whole - t for whole, t in zip(samples[name], trace, strict=True)] if trace else []
        results[name] = {
            "trace": summary(trace) if trace else None,
            "lowering": summary(lowering) if trace else None,
            "both": summary(samples[name]),
            "ratio": ratios(samples[name], samples[FRESH]),
            "samples": samples[name],
            **figures(name),
        }
    return results


def check(results: dict[str, Any]) -> list[str]:
    """Raise if the programs are not the same; say how the targets were met."""
    reference = results[SHARED]
    for name, r in results.items():
        np.testing.assert_allclose([r["loss"], r["gradients"]], [reference["loss"], reference["gradients"]], rtol=1e-4)
    lines = []
    for name in (CLEARED, JIT_CLEARED):
        r = results[name]
        same = all(r[key] == reference[key] for key in ("default", "fenced"))
        lines.append(f"{name}: FLOPs and temporary bytes {'equal' if same else 'DIFFER from'} those of '{SHARED}'.")
        met = "met" if r["ratio"]["median"] <= TARGET else "MISSED"
        lines.append(
            f"{name}: {r['ratio']['median']:.2f} of '{FRESH}' (middle half {r['ratio']['q1']:.2f} to "
            f"{r['ratio']['q3']:.2f}, minima {r['ratio']['of_min']:.2f}); target at most {TARGET}: {met}."
        )
    return lines


# -- printing --------------------------------------------------------------------------------------------------

TIMES = ("contestant", "trace ms", "lowering ms", "both ms", "middle half", "least", "ratio", "middle half", "of least")
COUNTS = ("contestant", "equations", "body runs", "FLOPs", "temporary bytes", "FLOPs, barriers kept", "bytes, barriers kept")


def time_rows(results: dict[str, Any]) -> list[list[str]]:
    ms = lambda s, key="median": "" if s is None else f"{1e3 * s[key]:.0f}"  # noqa: E731
    spread = lambda s, unit, digits: f"{unit * s['q1']:.{digits}f} to {unit * s['q3']:.{digits}f}"  # noqa: E731
    return [
        [
            name,
            ms(r["trace"]),
            ms(r["lowering"]),
            ms(r["both"]),
            spread(r["both"], 1e3, 0),
            ms(r["both"], "min"),
            f"{r['ratio']['median']:.2f}",
            spread(r["ratio"], 1, 2),
            f"{r['ratio']['of_min']:.2f}",
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
    rounds = 2 if options.quick else 21
    print(header(env))
    results = measure(rounds)
    show(f"{NUM_BLOCKS} blocks: trace and lowering, {rounds} rounds; ratio to '{FRESH}'", TIMES, time_rows(results))
    show("The same in counts", COUNTS, count_rows(results))
    lines = check(results)
    print("\n".join(lines))
    if options.json:
        write_json(options.json, env, {"rounds": rounds, "results": results, "verdict": lines})
    if options.markdown:
        text = [
            f"{header(env)}; {rounds} rounds.",
            markdown_table(TIMES, time_rows(results)),
            markdown_table(COUNTS, count_rows(results)),
            "\n".join(f"- {line}" for line in lines),
        ]
        renew_section(options.markdown, "bench_trace", "\n\n".join(text))


if __name__ == "__main__":
    main()
