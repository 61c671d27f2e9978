"""Dispatch of a jitted step that does almost nothing, over many scalar states.

What is compared
    A step that adds one to every state, and one that only reads them all (their sum), as plain `jax.jit` on the
    same values (list of arrays in; list of arrays or the sum out), as `statetx.jit` with native states and with
    brainstate's, and as brainstate's own `jit`. A raw step threads its list by hand, so what it costs is a floor.

What is measured
    Seconds a call, from a run of back-to-back calls that ends when the last result is there: by the wall clock
    and as CPU time of all threads of the process, which other jobs disturb less. A contestant gives one sample a
    round; the median of the ratios within a round is what to trust. The compiled programs are equal, so what
    exceeds the raw ratio of 1 is the cost of finding, gathering and storing the states.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
from _common import (
    Sample,
    Stopwatch,
    environment,
    header,
    interleave,
    markdown_table,
    parse_args,
    renew_section,
    show,
    spread,
    summaries,
    write_json,
)

import statetx

SIZES = (10, 100, 1_000, 5_000)
RAW = "jax.jit on a list"
STATETX, OF_BRAINSTATE = "statetx.jit, statetx states", "statetx.jit, brainstate states"
BRAINSTATE = "brainstate.transform.jit"
CONTESTANTS = (RAW, STATETX, OF_BRAINSTATE, BRAINSTATE)
STEPS = ("update", "read")
TARGET = 1.3  # for native states, of raw
SAMPLE_SECONDS = 0.03  # about how long the calls of one sample take


def new_values(num: int) -> list[jax.Array]:
    return [jnp.asarray(float(i)) for i in range(num)]


def tree_sum(values: list) -> Any:
    """Adds neighbours, so that the program is not one chain."""
    while len(values) > 1:
        values = [sum(values[i : i + 8]) for i in range(0, len(values), 8)]
    return values[0]


# -- the contestants ------------------------------------------------------------------------------------


def raw(step: str, num: int) -> Callable[[], Any]:
    values = new_values(num)
    update = jax.jit(lambda values: [v + 1 for v in values])
    read = jax.jit(tree_sum)

    def call_update() -> Any:
        nonlocal values
        values = update(values)
        return values

    return call_update if step == "update" else lambda: read(values)


def stateful(step: str, num: int, state_type: Callable, jit: Callable) -> Callable[[], Any]:
    states = [state_type(v) for v in new_values(num)]

    def update() -> None:
        for s in states:
            s.value += 1

    def read() -> Any:
        return tree_sum([s.value for s in states])

    if step == "read":
        return jit(read)
    jitted = jit(update)

    def call_update() -> Any:
        jitted()
        return states[-1].value

    return call_update


def make(name: str, step: str, num: int) -> Callable[[], Any]:
    if name == RAW:
        return raw(step, num)
    state_type = statetx.State if name == STATETX else brainstate.ShortTermState
    return stateful(step, num, state_type, brainstate.transform.jit if name == BRAINSTATE else statetx.jit)


# -- measuring ------------------------------------------------------------------------------------------


def timed(call: Callable[[], Any], num_calls: int) -> Callable[[], Sample]:
    def sample() -> Sample:
        out = jax.block_until_ready(call())  # after whoever came before: not timed
        watch = Stopwatch()
        for _ in range(num_calls):
            out = call()
        jax.block_until_ready(out)
        return {what: seconds / num_calls for what, seconds in watch.read().items()}

    return sample


def num_calls_for(call: Callable[[], Any]) -> int:
    for _ in range(3):
        jax.block_until_ready(call())
    once = min(timed(call, 3)()["wall"] for _ in range(3))
    return max(2, round(SAMPLE_SECONDS / once))


def measure_one(step: str, num: int, rounds: int) -> dict[str, Any]:
    calls = {name: make(name, step, num) for name in CONTESTANTS}
    results = [float(jax.tree.leaves(call())[-1]) for call in calls.values()]
    assert len(set(results)) == 1, f"{step} of {num} states differs: {results}"
    gc.collect()
    gc.freeze()  # thousands of equations, which need not be looked through between rounds
    samples = interleave({name: timed(call, num_calls_for(call)) for name, call in calls.items()}, rounds)
    gc.unfreeze()
    return {name: {**summaries(samples[name], samples[RAW]), "samples": samples[name]} for name in CONTESTANTS}


def measure(sizes: tuple[int, ...], rounds: int) -> dict[str, dict[int, dict[str, Any]]]:
    return {step: {num: measure_one(step, num, rounds) for num in sizes} for step in STEPS}


def check(results: dict[str, Any]) -> list[str]:
    lines = []
    for step, by_size in results.items():
        for num, r in by_size.items():
            ratio = r[STATETX]["cpu_ratio"]
            met = "met" if ratio["median"] <= TARGET else "MISSED"
            lines.append(
                f"{step}, {num:,} states: '{STATETX}' takes {ratio['median']:.2f} of '{RAW}' "
                f"(by the wall clock {r[STATETX]['wall_ratio']['median']:.2f}); target at most {TARGET}: {met}."
            )
    return lines


# -- printing -------------------------------------------------------------------------------------------

COLUMNS = ("step and contestant", "states", "CPU us a call", "middle half", "least")
COLUMNS += ("ratio", "middle half", "of least", "wall us", "wall ratio")


def rows(results: dict[str, Any]) -> list[list[str]]:
    return [
        [
            f"{step}: {name}",
            f"{num:,}",
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
        for num, contestants in by_size.items()
        for name, r in contestants.items()
    ]


def main() -> None:
    options = parse_args(__doc__ or "")
    env = environment()
    sizes, rounds = ((10, 100), 5) if options.quick else (SIZES, 31)
    print(header(env))
    results = measure(sizes, rounds)
    show(f"Dispatch, {rounds} rounds; ratio to '{RAW}'", COLUMNS, rows(results))
    lines = [] if options.quick else check(results)
    print("\n".join(lines))
    if options.json:
        write_json(options.json, env, {"rounds": rounds, "results": results, "verdict": lines})
    if options.markdown:
        verdict = "\n".join(f"- {line}" for line in lines)
        text = [f"{header(env)}; {rounds} rounds.", markdown_table(COLUMNS, rows(results)), verdict]
        renew_section(options.markdown, "bench_dispatch", "\n\n".join(text))


if __name__ == "__main__":
    main()
