"""Eager calls of loops and branches with a fresh closure each time: the remaining cost of tracing again.

Compared
    ``statetx.scan``, ``cond`` and ``while_loop`` called outside ``jit``, with a new function for each call, as people
    write them in a notebook; ``jax.lax``'s with the same function object every time, which is the best JAX can do, and
    with a fresh closure, which compiles each time; brainstate's ``for_loop``, ``cond`` and ``while_loop`` with a fresh
    closure.

Measured
    CPU time a call, medians of interleaved rounds; ratios within a round. Also the growth of the process's resident
    memory over 1,000 calls of each, with garbage collected before and after.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from typing import Any

import brainstate
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

import statetx

LENGTH = 20
REUSED, OURS, WRITING = (
    "jax.lax, one function object",
    "statetx, fresh closure",
    "statetx, fresh closure that writes a state",
)
FRESH, BRAINSTATE = "jax.lax, fresh closure", "brainstate, fresh closure"
XS = jnp.linspace(0.0, 1.0, LENGTH)


def step(c: Any, x: Any) -> tuple[Any, Any]:
    return jnp.tanh(c + x), c


def reuse(make: Callable) -> Callable:
    """Call `make` once; return a function that always returns the result."""
    result = make()
    return lambda: result


def scans() -> dict[str, Callable[[], Any]]:
    fresh = lambda: lambda c, x: step(c, x)
    count = statetx.State(jnp.zeros(()))

    def ours() -> Any:
        def body(c: Any, x: Any) -> tuple[Any, Any]:
            count.value += 1.0
            return step(c, x)

        return statetx.scan(body, jnp.zeros(()), XS)

    total = brainstate.ShortTermState(jnp.zeros(()))

    def brainstates() -> Any:
        def body(x: Any) -> Any:
            total.value = jnp.tanh(total.value + x)
            return total.value

        return brainstate.transform.for_loop(body, XS)

    reused = reuse(fresh)
    return {
        REUSED: lambda: jax.lax.scan(reused(), jnp.zeros(()), XS),
        OURS: lambda: statetx.scan(fresh(), jnp.zeros(()), XS),
        WRITING: ours,
        FRESH: lambda: jax.lax.scan(fresh(), jnp.zeros(()), XS),
        BRAINSTATE: brainstates,
    }


def conds() -> dict[str, Callable[[], Any]]:
    yes, no = (lambda x: jnp.sin(x)), (lambda x: x * 2.0)
    flag, x = jnp.array(True), jnp.ones(4)
    state = statetx.State(jnp.ones(4))

    def ours() -> Any:
        def write(x: Any) -> Any:
            state.value = jnp.sin(x)
            return state.value

        return statetx.cond(flag, write, lambda x: no(x), x)

    return {
        REUSED: lambda: jax.lax.cond(flag, yes, no, x),
        OURS: lambda: statetx.cond(flag, lambda x: yes(x), lambda x: no(x), x),
        WRITING: ours,
        FRESH: lambda: jax.lax.cond(flag, lambda x: yes(x), lambda x: no(x), x),
        BRAINSTATE: lambda: brainstate.transform.cond(flag, lambda x: yes(x), lambda x: no(x), x),
    }


def while_loops() -> dict[str, Callable[[], Any]]:
    go, turn = (lambda c: c < LENGTH), (lambda c: c + 1)
    zero = jnp.zeros((), jnp.int32)
    count = statetx.State(jnp.zeros(()))

    def ours() -> Any:
        def body(c: Any) -> Any:
            count.value += 1.0
            return turn(c)

        return statetx.while_loop(lambda c: go(c), body, zero)

    return {
        REUSED: lambda: jax.lax.while_loop(go, turn, zero),
        OURS: lambda: statetx.while_loop(lambda c: go(c), lambda c: turn(c), zero),
        WRITING: ours,
        FRESH: lambda: jax.lax.while_loop(lambda c: go(c), lambda c: turn(c), zero),
        BRAINSTATE: lambda: brainstate.transform.while_loop(lambda c: go(c), lambda c: turn(c), zero),
    }


CALLS = {"scan": scans, "cond": conds, "while_loop": while_loops}


def timed(call: Callable[[], Any], times: int) -> Callable[[], Sample]:
    def sample() -> Sample:
        watch = Stopwatch()
        for _ in range(times):
            out = call()
        jax.block_until_ready(out)
        return {clock: seconds / times for clock, seconds in watch.read().items()}

    return sample


def resident_kib() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1024


def growth(call: Callable[[], Any], calls: int) -> float:
    """Growth of the process in KiB a call, on average."""
    for _ in range(50):
        call()
    gc.collect()
    start_kib = resident_kib()
    for _ in range(calls):
        jax.block_until_ready(call())
    gc.collect()
    return (resident_kib() - start_kib) / calls


def measure(rounds: int, calls: int) -> dict[str, Any]:
    results = {}
    for name, make in CALLS.items():
        implementations = make()
        # Implementations that compile on every call are a thousand times slower: one call a sample is enough.
        times = {n: 20 if n in (REUSED, OURS, WRITING) else 1 for n in implementations}
        samples = interleave({n: timed(call, times[n]) for n, call in implementations.items()}, rounds, warmup=2)
        kib = {n: growth(call, calls) for n, call in implementations.items() if n in (REUSED, OURS, WRITING)}
        kib[BRAINSTATE] = growth(implementations[BRAINSTATE], max(10, calls // 50))
        results[name] = {
            n: {**summaries(samples[n], samples[REUSED]), "kib": kib.get(n), "samples": samples[n]}
            for n in implementations
        }
    return results


def figures_of(results: dict[str, Any]) -> dict[str, Any]:
    figures = {f"{name}, of jax.lax with one function object": r[OURS]["cpu_ratio"] for name, r in results.items()}
    return {**figures, "KiB kept a call, 1,000 calls": max(r[WRITING]["kib"] for r in results.values())}


COLUMNS = ("call and implementation", "CPU us a call", "middle half", "ratio", "middle half", "KiB kept a call")


def rows(results: dict[str, Any]) -> list[list[str]]:
    return [
        [
            f"{name}: {n}",
            f"{1e6 * r['cpu']['median']:,.0f}",
            spread(r["cpu"], 1e6, 0),
            f"{r['cpu_ratio']['median']:.2f}",
            spread(r["cpu_ratio"], 1, 2),
            "" if r["kib"] is None else f"{r['kib']:.2f}",
        ]
        for name, result in results.items()
        for n, r in result.items()
    ]


def main() -> None:
    options = parse_args(__doc__ or "")
    env = environment()
    rounds, calls = (3, 100) if options.quick else (15, 1_000)
    rounds = options.rounds or rounds
    print(header(env))
    results = measure(rounds, calls)
    for name, make in CALLS.items():
        values = [np.asarray(jax.tree.leaves(call())[0]) for n, call in make().items() if n != BRAINSTATE]
        assert all(np.allclose(v, values[0]) for v in values), name
    show(f"Eager calls, {rounds} rounds; ratio to '{REUSED}'", COLUMNS, rows(results))
    figures = figures_of(results)
    lines = judge("bench_eager", figures, quick=options.quick)
    print("\n".join(lines))
    if options.json:
        write_json(options.json, env, {"rounds": rounds, "results": results, "figures": figures, "verdict": lines})


if __name__ == "__main__":
    main()
