"""Gradients of long loops and deep stacks: memory and time of every way to store less, side by side.

Compared
    gru, lif: the gradient of a recurrent cell over 4,096 steps, hidden 256, batch 32, with a readout at every step;
    with respect to weights and first state. stack: the gradient of a residual network of 256 layers, width 128, batch
    256, with stacked parameters. Implementations are the plain scan, ``statetx.scan(checkpoint=...)``, scans nested by
    hand with ``jax.checkpoint`` (every level, the innermost too), equinox's checkpointed scan, brainstate's, and flax's
    remat_scan.

Measured
    Memory is XLA's temporary memory, beyond arguments and results (``memory_analysis().temp_size_in_bytes``). Time is
    of the compiled gradient; implementations take turns in each round, and ratios are taken within a round. CPU time is
    of the whole process. Gradients are compared with the plain scan's before anything is timed. Runs of the body are
    counted by a host callback, over the same length.

    Implementations are compared at an equal number of slots, and at equal bytes as compiled: for each of equinox's
    programs the number of our slots is chosen that takes as much memory, or less.

Other sections
    turn: what the reversal of a step is made of, the time of a gradient that this predicts, and how fast one with as
    many runs can be. mixed: memory and time with residuals in free slots, relative to the same slots with carries only.
    growth: memory against its bound, size of the program and compile time over lengths up to a million.
    budgets: memory of programs compiled for a byte budget.
    million: a stateful cell through 1,000,000 steps. thousand: tracing and compiling 1,000 layers against 10.

Results are written after each section, and a file of results keeps the sections that a run does not measure: ``--only``
resumes a run.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import brainstate
import equinox.internal as eqxi
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from _common import (
    Stopwatch,
    environment,
    header,
    interleave,
    parse_args,
    show,
    spread,
    summaries,
    write_json,
)

import statetx
from statetx._loops import checkpointed, schedule
from statetx.policies import Budget, Levels, Slots

MIB = 2**20
MARGIN = 2**10  # bytes that `Budget` leaves for the program around the loop
Results = dict[str, Any]


# -- cells and losses --------------------------------------------------------------------------------------------


def gru(weights: dict, h: Any, x: Any) -> tuple[Any, Any]:
    reset, update, new = jnp.split(x @ weights["w"] + weights["b"], 3, -1)
    h_reset, h_update, h_new = jnp.split(h @ weights["u"], 3, -1)
    update = jax.nn.sigmoid(update + h_update)
    h = (1 - update) * h + update * jnp.tanh(new + jax.nn.sigmoid(reset + h_reset) * h_new)
    return h, (h @ weights["out"]).mean()


@jax.custom_jvp
def spike(v: Any) -> Any:
    return (v > 0).astype(v.dtype)


@spike.defjvp
def _(primals: Any, tangents: Any) -> Any:
    return spike(*primals), tangents[0] / (1 + 5 * jnp.abs(primals[0])) ** 2


def lif(weights: dict, state: Any, x: Any) -> tuple[Any, Any]:
    v, trace = state
    v = 0.9 * v + x @ weights["w"] + trace @ weights["u"]
    z = spike(v - 1)
    v, trace = v * (1 - jax.lax.stop_gradient(z)), 0.8 * trace + 0.2 * z
    return (v, trace), (trace @ weights["out"]).mean()


def layer(weights: dict, h: Any) -> Any:
    return h + jnp.tanh(h @ weights["a"]) @ weights["b"]


def normal(*shape: int, seed: int = 0) -> Any:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape) / math.sqrt(shape[-2]), jnp.float32)


def recurrent(cell: Callable, length: int, hidden: int, batch: int) -> tuple[Callable, tuple]:
    """A maker of losses, ``loss(scan) -> (weights, first state, inputs) -> number``, and arguments."""
    gates = 3 if cell is gru else 1
    weights = {"w": normal(hidden, gates * hidden), "u": normal(hidden, gates * hidden, seed=1)}
    weights |= {"out": normal(hidden, 1, seed=2)} | ({"b": jnp.zeros((1, gates * hidden))} if cell is gru else {})
    h = jnp.zeros((batch, hidden))
    state = h if cell is gru else (h, h)

    def loss(scan: Callable) -> Callable:
        def f(weights: dict, state: Any, xs: Any) -> Any:
            _, ys = scan(functools.partial(cell, weights), state, xs)
            return (ys**2).mean()

        return f

    return loss, (weights, state, normal(length, batch, hidden, seed=3))


def deep(num: int, width: int, batch: int) -> tuple[Callable, tuple]:
    weights = {k: normal(num, width, width, seed=i) / math.sqrt(num) for i, k in enumerate("ab")}

    def loss(scan: Callable) -> Callable:
        def f(weights: dict, x: Any) -> Any:
            h, _ = scan(lambda h, w: (layer(w, h), None), x, weights)
            return (h**2).mean()

        return f

    return loss, (weights, normal(batch, width, seed=7))


# -- ways to store less ------------------------------------------------------------------------------------------


def ours(checkpoint: Any) -> Callable:
    return functools.partial(statetx.scan, checkpoint=checkpoint)


def by_hand(inner: int) -> Callable:
    """Two levels of `jax.lax.scan`, each body under ``jax.checkpoint``; the length must be a multiple of `inner`."""

    def scan(f: Callable, init: Any, xs: Any) -> tuple[Any, Any]:
        step = jax.checkpoint(f, prevent_cse=False)
        chunk = jax.checkpoint(lambda c, xs: jax.lax.scan(step, c, xs), prevent_cse=False)
        xs = jax.tree.map(lambda x: x.reshape(-1, inner, *x.shape[1:]), xs)
        carry, ys = jax.lax.scan(chunk, init, xs)
        return carry, jax.tree.map(lambda y: y.reshape(-1, *y.shape[2:]), ys)

    return scan


def equinox_scan(slots: int | None) -> Callable:
    return functools.partial(eqxi.scan, kind="checkpointed", checkpoints=slots)


def flax_remat_scan(num: int, width: int, lengths: tuple[int, int]) -> Callable:
    """The loss of `deep` by ``flax.linen.remat_scan``, on the same parameters."""

    class Layer(nn.Module):
        @nn.compact
        def __call__(self, h: Any) -> Any:
            init = nn.initializers.zeros_init()
            return layer({k: self.param(k, init, (width, width)) for k in "ab"}, h)

    module = nn.remat_scan(Layer, lengths=lengths)()

    def f(weights: dict, x: Any) -> Any:
        stacked = jax.tree.map(lambda w: w.reshape(*lengths, *w.shape[1:]), weights)
        names = list(jax.eval_shape(module.init, jax.random.key(0), x)["params"])
        params = {names[0]: stacked} if names != ["a", "b"] else stacked
        return (module.apply({"params": params}, x) ** 2).mean()

    return f


# -- measuring ---------------------------------------------------------------------------------------------------


def gradient(f: Callable, args: tuple) -> tuple[Any, int, float]:
    """The compiled gradient with respect to the first two arguments, its temporary bytes, and the seconds of its
    compilation.
    """
    lowered = jax.jit(jax.grad(f, (0, 1))).lower(*args)
    start = time.perf_counter()
    compiled = lowered.compile()
    seconds = time.perf_counter() - start
    return compiled, compiled.memory_analysis().temp_size_in_bytes, seconds


def timed(compiled: Any, args: tuple) -> Callable:
    """A function that runs a compiled program and returns its seconds."""

    def run() -> dict[str, float]:
        watch = Stopwatch()
        jax.block_until_ready(compiled(*args))
        return watch.read()

    return run


def race(name: str, losses: dict[str, Callable], args: tuple, rounds: int, base: str) -> Results:
    """Memory and interleaved times of gradients of the same function, with ratios to `base`."""
    built = {who: gradient(f, args) for who, f in losses.items()}
    expected = built[base][0](*args)
    for who, (compiled, *_) in built.items():
        for a, b in zip(jax.tree.leaves(compiled(*args)), jax.tree.leaves(expected), strict=True):
            scale = float(jnp.abs(b).max())
            np.testing.assert_allclose(a, b, rtol=2e-3, atol=1e-4 * scale, err_msg=f"{name}: {who}")

    # The comparison has run each of them once.
    samples = interleave({who: timed(compiled, args) for who, (compiled, *_) in built.items()}, rounds, warmup=0)
    return {
        who: {**summaries(samples[who], samples[base]), "samples": samples[who], "bytes": built[who][1]}
        for who in built
    }


def ratio(results: Results, a: str, b: str, clock: str = "wall") -> float:
    """The ratio of a's time to b's, as the median over rounds."""
    pairs = zip(results[a]["samples"], results[b]["samples"], strict=True)
    return float(np.median([x[clock] / y[clock] for x, y in pairs]))


def runs_a_step(scan: Callable, length: int) -> float:
    """The number of runs of the body in one gradient, divided by the number of steps."""
    calls: list[int] = []

    def step(h: Any, x: Any) -> tuple[Any, None]:
        jax.debug.callback(lambda _: calls.append(0), h)
        return jnp.tanh(h * x), None

    jax.block_until_ready(jax.jit(jax.grad(lambda h: scan(step, h, jnp.ones(length))[0]))(0.5))
    jax.effects_barrier()
    return len(calls) / length


def recurrent_implementations(loss: Callable, length: int) -> dict[str, Callable]:
    few_slots, many_slots = 16, math.isqrt(2 * length)
    inner = 2 ** round(math.log2(math.sqrt(length)))
    return {
        "plain scan": loss(jax.lax.scan),
        "jax.checkpoint, nested by hand": loss(by_hand(inner)),
        "brainstate checkpointed_scan": loss(brainstate.transform.checkpointed_scan),
        f"equinox, {few_slots}": loss(equinox_scan(few_slots)),
        f"equinox, {many_slots}": loss(equinox_scan(many_slots)),
        "statetx Levels(2)": loss(ours(Levels(2))),
        f"statetx Slots({few_slots})": loss(ours(Slots(few_slots))),
        f"statetx Slots({many_slots})": loss(ours(Slots(many_slots))),
        "statetx auto": loss(ours("auto")),
    }


def slots_within(loss: Callable, args: tuple, limit: int, most: int) -> int:
    """About the largest number of slots whose compiled gradient takes at most `limit` temporary bytes; at least 1."""
    bytes_of = lambda num: gradient(loss(ours(Slots(num))), args)[1]
    # A carry a slot, but for what XLA needs beside them: the last choices are compiled.
    first, second = bytes_of(2), bytes_of(10)
    carry = (second - first) / 8
    num = max(1, min(most, 2 + int((limit - first) / carry)))
    while num > 1 and (over := bytes_of(num) - limit) > 0:
        num = max(1, num - math.ceil(over / carry))
    return num


def with_equal_bytes(losses: dict[str, Callable], loss: Callable, args: tuple, length: int) -> dict[str, Callable]:
    """The implementations, and for each of equinox's ours at its bytes."""
    equal = {}
    for who, f in losses.items():
        if who.startswith("equinox"):
            limit = gradient(f, args)[1]
            num = slots_within(loss, args, limit, length)
            equal[f"statetx Slots({num}), bytes of {who}"] = loss(ours(Slots(num)))
    return {**losses, **equal}


def measure_recurrent(cell: Callable, quick: bool) -> Results:
    length, hidden, batch = (64, 16, 4) if quick else (4096, 256, 32)
    loss, args = recurrent(cell, length, hidden, batch)
    losses = with_equal_bytes(recurrent_implementations(loss, length), loss, args, length)
    return race(cell.__name__, losses, args, 1 if quick else 5, "plain scan")


def measure_stack(quick: bool) -> Results:
    num, width, batch = (16, 8, 4) if quick else (256, 128, 256)
    side = math.isqrt(num)
    few_slots, many_slots = 5, math.isqrt(2 * num)
    loss, args = deep(num, width, batch)
    losses = {
        "plain scan": loss(jax.lax.scan),
        "jax.checkpoint, nested by hand": loss(by_hand(side)),
        "flax remat_scan": flax_remat_scan(num, width, (side, side)),
        f"equinox, {few_slots}": loss(equinox_scan(few_slots)),
        f"equinox, {many_slots}": loss(equinox_scan(many_slots)),
        "statetx Levels(1)": loss(ours(Levels(1))),
        "statetx Levels(2)": loss(ours(Levels(2))),
        f"statetx Slots({few_slots})": loss(ours(Slots(few_slots))),
        f"statetx Slots({many_slots})": loss(ours(Slots(many_slots))),
    }
    return race("stack", with_equal_bytes(losses, loss, args, num), args, 1 if quick else 5, "plain scan")


# -- what a turn is made of ---------------------------------------------------------------------------------------


class Problem(NamedTuple):
    """A loop whose gradient is taken apart.

    Attributes:
        loss, args: as of `recurrent` or `deep`.
        slots: how many, of ours and of equinox.
        step: ``(weights, h, x) -> (h, y)``.
        is_stack: whether each step has weights of its own, and no x.
    """

    loss: Callable
    args: tuple
    length: int
    slots: int
    step: Callable
    is_stack: bool


def problems(quick: bool) -> dict[str, Problem]:
    length, hidden, batch = (64, 16, 4) if quick else (1024, 256, 32)
    num, width, rows = (16, 8, 4) if quick else (256, 128, 256)
    cells = {
        cell.__name__: Problem(*recurrent(cell, length, hidden, batch), length, 16, cell, False) for cell in (gru, lif)
    }
    layers = Problem(*deep(num, width, rows), num, 5, lambda w, h, _: (layer(w, h), jnp.float32(0)), True)
    return {**cells, "stack": layers}


RUN = "a run of the step"
NO_WEIGHTS, PRODUCTS = "its reversal, without weights", "and the products of weights' cotangents"
REVERSAL = "and their sum: all of it"


def turn_programs(problem: Problem) -> dict[str, tuple[Callable, tuple]]:
    """Loops of the parts of a step's reversal, each without any schedule or slots."""
    loss, args, length, _, step, is_stack = problem
    at = lambda tree, i: jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, 0, keepdims=False), tree)

    def inputs(weights: Any, xs: tuple, i: Any) -> tuple[Any, Any]:
        return (at(weights, i), None) if is_stack else (weights, at(xs[0], i))

    def forward(weights: Any, state: Any, *xs: Any) -> Any:
        def one(i: Any, h: Any) -> Any:
            w, x = inputs(weights, xs, i)
            return step(w, h, x)[0]

        return jax.lax.fori_loop(0, length, one, state)

    def put(total: Any, ct: Any, i: Any, num_rows: int | None) -> Any:
        """The cotangents of a step's weights in their sum or stack; of products that are not summed a single row, for
        which they are computed.
        """
        if is_stack:
            return jax.lax.dynamic_update_slice_in_dim(total, ct[None, :num_rows], i, 0)
        return total + ct if num_rows is None else total.at[:num_rows].add(ct[:num_rows])

    def turn(weights: Any, state: Any, *xs: Any, of_weights: bool = True, num_rows: int | None = None) -> Any:
        def body(i: Any, loop: tuple) -> tuple:
            ct, total = loop
            w, x = inputs(weights, xs, i)
            # At a carry that differs from step to step: of a constant one XLA computes the product with weights once,
            # before the loop.
            carry, cts = ct, (ct, jnp.float32(1))
            if not of_weights:
                return jax.vjp(lambda h: step(w, h, x), carry)[1](cts)[0], total
            ct_weights, ct = jax.vjp(lambda w, h: step(w, h, x), w, carry)[1](cts)
            return ct, jax.tree.map(lambda t, c: put(t, c, i, num_rows), total, ct_weights)

        return jax.lax.fori_loop(0, length, body, (state, jax.tree.map(jnp.zeros_like, weights)))

    return {
        RUN: (forward, args),
        NO_WEIGHTS: (functools.partial(turn, of_weights=False), args),
        PRODUCTS: (functools.partial(turn, num_rows=1), args),
        REVERSAL: (turn, args),
        **{f"a gradient, {who}": (jax.grad(loss(scan), (0, 1)), args) for who, scan in rivals(problem).items()},
        **({} if is_stack else products_alone(problem)),
    }


def rivals(problem: Problem) -> dict[str, Callable]:
    slots, many_slots = problem.slots, math.isqrt(2 * problem.length)
    scans = {f"Slots({slots})": ours(Slots(slots)), f"equinox, {slots}": equinox_scan(slots)}
    if problem.is_stack:
        return scans
    brainstate_scan = {"brainstate checkpointed_scan": brainstate.transform.checkpointed_scan}
    return {**scans, f"Slots({many_slots})": ours(Slots(many_slots)), **brainstate_scan}


def products_alone(problem: Problem) -> dict[str, tuple[Callable, tuple]]:
    """Loops of the products of two weights' cotangents, of given factors, of one step or of several at once."""

    def products(weights: dict, state: Any, xs: Any, *, together: int, adds: bool) -> Any:
        hidden, width = weights["u"].shape
        cts = jnp.tile(xs[0][:, :1], (together, width))

        def body(i: Any, total: tuple) -> tuple:
            x = jax.lax.dynamic_slice_in_dim(xs, i * together, together, 0).reshape(-1, hidden)
            # What depends on the sum is not taken out of the loop.
            g = cts + 1e-30 * total[0][0, 0]
            add = jnp.add if adds else (lambda a, b: a.at[:1].add(b[:1]))
            return add(total[0], x.T @ g), add(total[1], (2 * x).T @ g)

        zeros = jnp.zeros((hidden, width))
        return jax.lax.fori_loop(0, problem.length // together, body, (zeros, zeros))

    return {
        f"{what} alone, {num} at once": (functools.partial(products, together=num, adds=adds), problem.args)
        for num in (1, 4)
        for what, adds in (("the products", False), ("the products and their sums", True))
    }


def measure_turn(quick: bool) -> Results:
    """For each problem the time of each part, and the runs a step of each gradient."""
    results: Results = {}
    for name, problem in problems(quick).items():
        programs = {who: (jax.jit(f).lower(*args).compile(), args) for who, (f, args) in turn_programs(problem).items()}
        samples = interleave({who: timed(*program) for who, program in programs.items()}, 1 if quick else 9)
        results[name] = {who: {**summaries(s, samples[RUN]), "samples": s} for who, s in samples.items()}
        for who, scan in rivals(problem).items():
            if who.startswith("Slots"):
                runs = statetx.loop_report(problem.loss(scan), *problem.args).rows[0].runs
            else:
                runs = runs_a_step(scan, problem.length)
            results[name][f"a gradient, {who}"]["runs"] = runs
    return results


def of_alone(parts: Results, runs: float, who: str, clock: str) -> float:
    """What so many runs a step take with nothing beside them, the last one in the reversal, relative to a gradient."""

    def alone(n: int) -> float:
        run = parts[RUN]["samples"][n][clock]
        return (runs - 1) * run + parts[REVERSAL]["samples"][n][clock]

    samples = parts[who]["samples"]
    return float(np.median([alone(n) / sample[clock] for n, sample in enumerate(samples)]))


def least_verdict(name: str, parts: Results, mine: str, other: str, limit: float) -> str:
    """What runs and reversals alone say about a ratio of times and its limit."""

    def both(f: Callable[[str], float]) -> str:
        return f"{f('wall'):.2f} (CPU {f('cpu'):.2f})"

    runs, their_runs = parts[mine]["runs"], parts[other]["runs"]
    met = "met" if ratio(parts, mine, other) <= limit else "MISSED"
    short = lambda who: who.removeprefix("a gradient, ")
    return (
        f"{name}, {short(mine)}: {both(lambda c: ratio(parts, mine, other, c))} of the time of {short(other)}, "
        f"target at most {limit}: {met}; "
        f"its {runs:.2f} runs a step and the reversal alone take {both(lambda c: of_alone(parts, runs, mine, c))} of "
        f"its time, the "
        f"{their_runs:.2f} of {short(other)} {both(lambda c: of_alone(parts, their_runs, other, c))} of that one's. "
        f"So {runs:.2f} runs cannot be "
        f"under {both(lambda c: of_alone(parts, runs, other, c))} of its time, and a single run a step not under "
        f"{both(lambda c: of_alone(parts, 1, other, c))}."
    )


def turn_section(results: Results) -> tuple[tuple, list, list[str]]:
    rows, lines = [], []
    for name, parts in results.items():
        ratios = {who: r["cpu_ratio"]["median"] for who, r in parts.items()}
        rows += [[name, who, f"{x:.2f}", f"{parts[who]['wall_ratio']['median']:.2f}"] for who, x in ratios.items()]
        mine = next(who for who in parts if "Slots" in who)
        runs = parts[mine]["runs"]
        # Of the runs one is part of the reversal.
        turn, measured = ratios[REVERSAL], ratios[mine]
        predicted = runs - 1 + turn
        of_weights = 1 - ratios[NO_WEIGHTS] / turn
        lines.append(
            f"{name}: {runs:.2f} runs a step; {runs - 1:.2f} of them and a reversal of {turn:.2f} predict "
            f"{predicted:.2f}, measured "
            f"{measured:.2f}; the slots add {measured / predicted - 1:+.0%}. Of the reversal {of_weights:.0%} are "
            f"cotangents of weights, which the "
            f"plain scan computes too."
        )
        alone = "the products and their sums alone, {} at once"
        if alone.format(1) in ratios:
            bound, four = (ratios[alone.format(num)] for num in (1, 4))
            least = ratios[NO_WEIGHTS] + bound
            lines.append(
                f"{name}: what a reversal must do, its parts measured alone: {least:.2f} of {turn:.2f} runs. "
                f"Products over four steps at once "
                f"would save {bound - four:.2f}, {(bound - four) / measured:.0%} of the gradient, and need memory "
                f"for the factors of four steps."
            )
        lines.append(least_verdict(name, parts, mine, next(who for who in parts if "equinox" in who), 0.8))
        most = [who for who in parts if "Slots" in who][-1]
        lines += [least_verdict(name, parts, most, who, 0.5) for who in parts if "brainstate" in who]
    return ("", "part", "CPU time, in runs of the step", "time"), rows, lines


# -- residuals in slots --------------------------------------------------------------------------------------------


@contextlib.contextmanager
def carries_only() -> Iterator[None]:
    """Slots that hold carries only, as if residuals in them saved nothing."""
    worth, checkpointed.WORTH_MIXING = checkpointed.WORTH_MIXING, 0
    statetx.clear_cache()
    try:
        yield
    finally:
        checkpointed.WORTH_MIXING = worth
        statetx.clear_cache()


def measure_mixed(quick: bool) -> Results:
    """Gradients with residuals in free slots and with carries only, of the same number of slots."""
    length, hidden, batch = (256, 16, 4) if quick else (4096, 128, 16)
    results = {}
    for cell in (lif, gru):
        for slots in (16, 90):
            loss, args = recurrent(cell, length, hidden, batch)
            scan = ours(Slots(slots))
            with carries_only():
                before = gradient(loss(scan), args)
                carry_runs = statetx.loop_report(loss(scan), *args).rows[0].runs
            built = {"carries only": before, "with residuals": gradient(loss(scan), args)}
            runs = {"carries only": carry_runs, "with residuals": statetx.loop_report(loss(scan), *args).rows[0].runs}

            programs = {who: timed(compiled, args) for who, (compiled, *_) in built.items()}
            samples = interleave(programs, 1 if quick else 5)
            for who in built:
                results[f"{cell.__name__}, {slots} slots, {who}"] = {
                    **summaries(samples[who], samples["carries only"]),
                    "bytes": built[who][1],
                    "runs": runs[who],
                }
    return {"gradients": results, "memory": measure_memory(quick)}


def measure_memory(quick: bool) -> list[Results]:
    """Temporary bytes of gradients with residuals in free slots and with carries only."""
    hidden, batch = (16, 4) if quick else (128, 16)
    rows = []
    for length in (64,) if quick else (64, 500):
        cases = {cell.__name__: recurrent(cell, length, hidden, batch) for cell in (gru, lif)}
        for name, (loss, args) in {**cases, "stack": deep(length, hidden, batch)}.items():
            for slots in (16,) if quick else (4, 16, 40):
                f = loss(ours(Slots(slots)))
                with carries_only():
                    before = gradient(f, args)[1]
                is_mixed = statetx.loop_report(f, *args).rows[0].is_mixed
                case = {"name": name, "length": length, "slots": slots, "is_mixed": is_mixed}
                rows.append({**case, "before": before, "bytes": gradient(f, args)[1]})
    return rows


def mixed_section(results: Results) -> tuple[tuple, list, list[str]]:
    limits = {"lif, 90 slots": 0.88, "lif, 16 slots": 0.93, "gru, 90 slots": 1.03, "gru, 16 slots": 1.03}
    gradients = results["gradients"]
    rows = [
        [
            who,
            f"{r['runs']:.2f}",
            f"{r['bytes']:,}",
            f"{r['cpu_ratio']['median']:.2f}",
            f"{r['wall_ratio']['median']:.2f}",
        ]
        for who, r in gradients.items()
    ]
    lines = []
    for case, limit in limits.items():
        mixed, before = gradients[f"{case}, with residuals"], gradients[f"{case}, carries only"]
        time, more = mixed["cpu_ratio"]["median"], mixed["bytes"] - before["bytes"]
        lines.append(
            f"{case}: {time:.2f} of the CPU time with carries only, target at most {limit}: "
            f"{'met' if time <= limit else 'MISSED'}; "
            f"{more:+,} bytes, target at most 1,024: {'met' if more <= 1024 else 'MISSED'}."
        )
    excess = lambda r: r["bytes"] - r["before"]
    memory = results["memory"]
    mixed = [r for r in memory if r["is_mixed"]]
    worst = max(mixed, key=excess)
    lengths, slots = (", ".join(map(str, sorted({r[key] for r in memory}))) for key in ("length", "slots"))
    lines.append(
        f"gru, lif and stack of {lengths} steps, {slots} slots: {len(mixed)} of {len(memory)} hold residuals; at "
        f"most {excess(worst):+,} bytes "
        f"({worst['name']}, {worst['length']} steps, {worst['slots']} slots), target at most 1,024: "
        f"{'met' if excess(worst) <= 1024 else 'MISSED'}."
    )
    return ("", "runs a step", "temporary bytes", "CPU time", "time"), rows, lines


def measure_growth(quick: bool) -> list[Results]:
    """For each length and number of slots: memory over its bound, program size and compile time."""
    hidden, batch = (8, 2) if quick else (64, 8)
    lowering, is_mixed, rows = {}, {}, []
    for slots in (16, 64):
        for length in (64, 256) if quick else (256, 4096, 65_536, 1_000_000):
            loss, (weights, h, _) = recurrent(gru, 1, hidden, batch)
            types = (weights, h, jax.ShapeDtypeStruct((length, batch, hidden), h.dtype))
            f = loss(ours(Slots(slots)))
            lowering[slots, length] = functools.partial(jax.jit(jax.grad(f, (0, 1))).lower, *types)
            is_mixed[slots, length] = statetx.loop_report(f, *types).rows[0].is_mixed

    def sample(case: tuple) -> Callable:
        def run() -> dict[str, float]:
            jax.clear_caches()
            lowered = lowering[case]()
            watch = Stopwatch()
            lowered.compile()
            return watch.read()

        return run

    samples = interleave({case: sample(case) for case in lowering}, 1 if quick else 2)  # type: ignore[misc]
    for (slots, length), slot_samples in samples.items():  # type: ignore[misc]
        compiled = lowering[slots, length]().compile()
        temporary = compiled.memory_analysis().temp_size_in_bytes
        carry = 4 * hidden * batch
        # The outputs ys and their cotangents are temporaries of this program, but not of the loop.
        ys_bytes = 2 * 4 * length
        # With residuals in slots the body stands at two more places: programs are compared with those of their kind.
        kind = is_mixed[slots, length]
        shortest = samples[slots, min(n for s, n in lowering if s == slots and is_mixed[s, n] == kind)]  # type: ignore[index]
        rows.append(
            {
                "length": length,
                "slots": slots,
                "residuals": kind,
                "bytes": temporary,
                "beside": ys_bytes,
                "constant": temporary - ys_bytes - slots * carry,
                "carry": carry,
                "seconds": float(np.median([x["cpu"] for x in slot_samples])),
                "ratio": float(np.median([x["cpu"] / y["cpu"] for x, y in zip(slot_samples, shortest, strict=True)])),
                "size": len(compiled.as_text()),
            }
        )
    return rows


def measure_budgets(quick: bool) -> list[Results]:
    """Memory of the gradient of a loop with a byte budget."""
    rows = []
    lengths = (256,) if quick else (1024, 16_384)
    for length in lengths:
        for hidden, batch in ((16, 4),) if quick else ((32, 4), (128, 16)):
            body = recurrent(gru, length, hidden, batch)[1]
            least = temporary_of(body, Slots(1))
            for factor in (1.02, 1.5, 10):
                budget = int(factor * least) + MARGIN
                rows.append(
                    {
                        "length": length,
                        "hidden": hidden,
                        "batch": batch,
                        "budget": budget,
                        "bytes": temporary_of(body, Budget(budget)),
                    }
                )
    return rows


def temporary_of(args: tuple, checkpoint: Any) -> int:
    """Temporary bytes of the gradient of the loop alone: outputs and their cotangents are results and arguments."""

    def f(args: tuple, cts: Any) -> Any:
        run = lambda w, h, xs: statetx.scan(functools.partial(gru, w), h, xs, checkpoint=checkpoint)
        outs, vjp_fun = jax.vjp(run, *args)
        return outs, vjp_fun(cts)

    weights, h, xs = args
    cts = (h, jax.ShapeDtypeStruct((len(xs),), h.dtype))
    return jax.jit(f).lower(args, cts).compile().memory_analysis().temp_size_in_bytes


class Cell:
    """A stateful cell: weights, a hidden state and a counter."""

    def __init__(self, hidden: int):
        self.w = statetx.Param(0.9 * normal(hidden, hidden))
        self.u = statetx.Param(normal(1, hidden)[0])
        self.h = statetx.State(jnp.zeros(hidden))
        self.n = statetx.State(jnp.int32(0))

    def __call__(self, x: Any) -> Any:
        self.h.value = jnp.tanh(self.h.value @ self.w.value + x * self.u.value)
        self.n.value += 1
        return self.h.value[0]


def measure_million(quick: bool) -> list[Results]:
    rows = []
    length = 10_000 if quick else 1_000_000
    for checkpoint in (Slots(20), Slots(128), Levels(3), "auto"):
        value, temporary, seconds = through_states(length, checkpoint)
        del value
        rows.append({"checkpoint": repr(checkpoint), "length": length, "bytes": temporary, "seconds": seconds})
    short = 1_000 if quick else 100_000
    expected = through_states(short, None)[0]
    for row, checkpoint in zip(rows, (Slots(20), Slots(128), Levels(3), "auto"), strict=True):
        got = through_states(short, checkpoint)[0]
        row["difference"] = max(
            float(jnp.abs(a - b).max() / jnp.abs(b).max()) for a, b in zip(got, expected, strict=True)
        )
        row["compared_at"] = short
    return rows


def through_states(length: int, checkpoint: Any) -> tuple[list, int, float]:
    cell, xs = Cell(32), jnp.sin(0.1 * jnp.arange(float(length)))

    def loss(xs: Any) -> Any:
        _, ys = statetx.scan(lambda c, x: (c, cell(x)), None, xs, checkpoint=checkpoint)
        return (ys**2).mean()

    @statetx.jit
    def step(xs: Any) -> Any:
        return statetx.grad(loss, argnums=0, wrt=[cell.w, cell.u, cell.h])(xs)

    temporary = step.lower(xs).compile().memory_analysis().temp_size_in_bytes
    (by_state, by_x) = jax.block_until_ready(step(xs))
    assert int(cell.n.value) == length
    start = time.perf_counter()
    jax.block_until_ready(step(xs))
    return [*by_state, by_x], temporary, time.perf_counter() - start


def measure_thousand(quick: bool) -> Results:
    """Seconds to trace and to compile the gradients of 10 and of 1,000 layers, and the ratios within each round."""

    class Layer:
        def __init__(self) -> None:
            self.a, self.b = (statetx.Param(normal(32, 32, seed=i)) for i in (0, 1))

        def __call__(self, h: Any) -> Any:
            return layer({"a": self.a.value, "b": self.b.value}, h)

    def sample(num: int) -> Callable:
        layers = statetx.stack(Layer, num)
        x = jnp.ones((4, 32))

        def run() -> dict[str, float]:
            network = statetx.remat_scan(layers)
            pure = statetx.functionalize(statetx.grad(lambda x: network(x).sum(), wrt=statetx.states(layers)))
            values = pure.values(x)
            statetx._equations.structure.table.clear()
            jax.clear_caches()
            start = time.perf_counter()
            lowered = jax.jit(lambda values, x: pure(values, x)).lower(values, x)
            traced = time.perf_counter()
            lowered.compile()
            return {"wall": traced - start, "compile": time.perf_counter() - traced}

        return run

    rounds = 1 if quick else 5
    samples = interleave({"10": sample(10), "1000": sample(100 if quick else 1000)}, rounds)
    return {who: {**summaries(samples[who], samples["10"]), "samples": samples[who]} for who in samples}


# -- printing ----------------------------------------------------------------------------------------------------

RACE_COLUMNS = ("", "temporary MiB", "seconds", "middle half", "CPU seconds", "of plain", "CPU of plain")


def race_rows(results: Results) -> list[list[str]]:
    return [
        [
            who,
            f"{r['bytes'] / MIB:,.2f}",
            f"{r['wall']['median']:.2f}",
            spread(r["wall"], 1, 2),
            f"{r['cpu']['median']:.2f}",
            f"{r['wall_ratio']['median']:.2f}",
            f"{r['cpu_ratio']['median']:.2f}",
        ]
        for who, r in results.items()
    ]


def race_verdicts(name: str, results: Results, length: int) -> list[str]:
    """One line for each target: the measured figures and whether they meet it."""
    lines = []
    for who in results:
        if not who.startswith("equinox"):
            continue
        slots = int(who.split(", ")[1])
        candidate = f"statetx Slots({slots})"
        limit = 0.8 if slots <= math.sqrt(length) / 2 else 1.05
        wall, cpu = ratio(results, candidate, who), ratio(results, candidate, who, "cpu")
        verdict = "met" if wall <= limit else "MISSED"
        memory = results[candidate]["bytes"] / results[who]["bytes"]
        lines.append(
            f"{name}, {slots} slots: {wall:.2f} of equinox's time (CPU {cpu:.2f}), target at most {limit}: {verdict}; "
            f"{memory:.2f} of its memory: {'met' if memory < 1 else 'MISSED'}."
        )
        equal = next((w for w in results if w.endswith(f"bytes of {who}")), None)
        if equal is None:  # results from before this comparison
            continue
        wall, cpu = ratio(results, equal, who), ratio(results, equal, who, "cpu")
        lines.append(
            f"{name}, {equal.removeprefix('statetx ')} ({results[equal]['bytes'] / results[who]['bytes']:.2f} of "
            f"them): {wall:.2f} of its time "
            f"(CPU {cpu:.2f}), target at most 1: {'met' if wall <= 1 else 'MISSED'}."
        )
    best = f"statetx Slots({max(int(w.split('(')[1][:-1]) for w in results if 'Slots' in w and 'bytes' not in w)})"
    for who, limit in (
        ("brainstate checkpointed_scan", 0.5),
        ("flax remat_scan", 1.0),
        ("jax.checkpoint, nested by hand", 1.0),
    ):
        if who in results:
            wall, cpu = ratio(results, best, who), ratio(results, best, who, "cpu")
            memory = results[best]["bytes"] / results[who]["bytes"]
            verdict = "met" if wall <= limit and memory < 1 else "MISSED"
            lines.append(
                f"{name}, {best}: {wall:.2f} of the time of {who} (CPU {cpu:.2f}), target at most {limit}, with "
                f"{memory:.2f} "
                f"of its memory: {verdict}."
            )
    return lines


def growth_section(rows: list[Results]) -> tuple[tuple, list, list[str]]:
    columns = (
        "steps",
        "slots",
        "residuals in slots",
        "temporary KiB",
        "without ys and their cotangents",
        "slots x carry",
        "rest",
        "HLO characters",
        "compile CPU s",
    )
    cells = [
        [
            f"{r['length']:,}",
            str(r["slots"]),
            "yes" if r.get("residuals") else "no",
            f"{r['bytes'] / 1024:,.0f}",
            f"{(r['bytes'] - r['beside']) / 1024:,.0f}",
            f"{r['slots'] * r['carry'] / 1024:,.0f}",
            f"{r['constant'] / 1024:,.0f}",
            f"{r['size']:,}",
            f"{r['seconds']:.2f}",
        ]
        for r in rows
    ]
    lines = []
    kind_of = lambda r: (r["slots"], r.get("residuals", False))  # not in results from before
    for slots, kind in sorted(set(map(kind_of, rows))):
        of_slots = [r for r in rows if kind_of(r) == (slots, kind)]
        sizes, ratios = [r["size"] for r in of_slots], [r["ratio"] for r in of_slots]
        size, compiling = max(sizes) / min(sizes), max(ratios) / min(ratios)
        lines.append(
            f"{slots} slots{' with residuals' if kind else ''}, over lengths: program size within {size:.2f}, target "
            f"1.2: {'met' if size <= 1.2 else 'MISSED'}; "
            f"compile time within {compiling:.2f}, target 1.2: {'met' if compiling <= 1.2 else 'MISSED'}."
        )
    return columns, cells, lines


def budget_section(rows: list[Results]) -> tuple[tuple, list, list[str]]:
    columns = ("steps", "hidden", "batch", "budget KiB", "compiled KiB", "used")
    cells = [
        [
            f"{r['length']:,}",
            str(r["hidden"]),
            str(r["batch"]),
            f"{r['budget'] / 1024:,.0f}",
            f"{r['bytes'] / 1024:,.0f}",
            f"{r['bytes'] / r['budget']:.2f}",
        ]
        for r in rows
    ]
    held = sum(r["bytes"] <= r["budget"] for r in rows)
    return columns, cells, [f"{held} of {len(rows)} budgets held: {'met' if held == len(rows) else 'MISSED'}."]


def million_section(rows: list[Results]) -> tuple[tuple, list, list[str]]:
    columns = ("checkpoint", "steps", "temporary MiB", "seconds", "largest relative difference from plain")
    cells = [
        [
            r["checkpoint"],
            f"{r['length']:,}",
            f"{r['bytes'] / MIB:.2f}",
            f"{r['seconds']:.2f}",
            f"{r['difference']:.1e} at {r['compared_at']:,}",
        ]
        for r in rows
    ]
    worst = max(r["bytes"] for r in rows) / MIB
    return columns, cells, [f"At most {worst:.1f} MiB, target 64 MB: {'met' if worst * MIB <= 64e6 else 'MISSED'}."]


def thousand_section(results: Results) -> tuple[tuple, list, list[str]]:
    columns = ("layers", "trace and lower s", "compile s", "ratio of trace", "ratio of compile")
    cells = [
        [
            who,
            f"{r['wall']['median']:.3f}",
            f"{r['compile']['median']:.3f}",
            f"{r['wall_ratio']['median']:.2f}",
            f"{r['compile_ratio']['median']:.2f}",
        ]
        for who, r in results.items()
    ]
    ratios = [results["1000"][f"{what}_ratio"]["median"] for what in ("wall", "compile")]
    return (
        columns,
        cells,
        [f"Ratios {ratios[0]:.2f} and {ratios[1]:.2f}, target 1.3: {'met' if max(ratios) <= 1.3 else 'MISSED'}."],
    )


def measure_counts(quick: bool) -> list[Results]:
    """Runs of the body for each step, and the fewest possible if slots hold carries only."""
    length = 50 if quick else 1000
    rows = []
    for slots in (5, 10, 20, 50):
        num_runs, equinox_runs = runs_a_step(ours(Slots(slots)), length), runs_a_step(equinox_scan(slots), length)
        optimum = schedule.num_evaluations(length, slots) / length
        assert num_runs <= optimum
        rows.append({"slots": slots, "statetx": num_runs, "optimum": optimum, "equinox": equinox_runs})
    return rows


def counts_section(rows: list[Results]) -> tuple[tuple, list, list[str]]:
    columns = ("slots", "statetx", "the optimum of carries", "equinox")
    return (
        columns,
        [[str(r["slots"]), *(f"{r[who]:.2f}" for who in ("statetx", "optimum", "equinox"))] for r in rows],
        [],
    )


def race_section(name: str, length: int) -> Callable[[Results], tuple[tuple, list, list[str]]]:
    return lambda results: (RACE_COLUMNS, race_rows(results), race_verdicts(name, results, length))


# The title of each section at full size, what measures it, and what makes a table and verdicts of the results.
SECTIONS: dict[str, tuple[str, Callable[[bool], Any], Callable[[Any], tuple[tuple, list, list[str]]]]] = {
    "gru": ("GRU over 4,096 steps", functools.partial(measure_recurrent, gru), race_section("gru", 4096)),
    "lif": ("LIF over 4,096 steps", functools.partial(measure_recurrent, lif), race_section("lif", 4096)),
    "stack": ("Residual network of 256 layers", measure_stack, race_section("stack", 256)),
    "counts": ("Runs of the body for each step of 1,000", measure_counts, counts_section),
    "mixed": ("Residuals in free slots: 4,096 steps, hidden 128, batch 16", measure_mixed, mixed_section),
    "turn": ("What the reversal of a step is made of: 1,024 steps, 256 layers", measure_turn, turn_section),
    "growth": ("Growth with the length: GRU, hidden 64, batch 8", measure_growth, growth_section),
    "budgets": ("Budgets in bytes", measure_budgets, budget_section),
    "million": ("A stateful cell through a million steps", measure_million, million_section),
    "thousand": ("Deep stacks", measure_thousand, thousand_section),
}


def main() -> None:
    only = {"nargs": "+", "choices": list(SECTIONS), "default": list(SECTIONS), "help": "these sections alone"}
    options = parse_args(__doc__ or "", only=only)
    env, quick = environment(), options.quick
    env["equinox"], env["flax"] = (__import__(name).__version__ for name in ("equinox", "flax"))
    print(header(env))
    output = former_sections(options.json)
    for section in options.only:
        title, measure, describe = SECTIONS[section]
        start = time.process_time()
        results = measure(quick)
        seconds = time.process_time() - start
        columns, cells, lines = describe(results)
        output[section] = {"results": results, "verdicts": lines, "cpu_seconds": seconds}
        show(title + (", at a small size" if quick else ""), columns, cells)
        print("\n".join([*lines, f"(measured in {seconds:.0f} CPU seconds)"]), flush=True)
        if options.json:
            write_sections(options.json, env, output)


def former_sections(path: Path | None) -> Results:
    """The sections that a file of results has; none if there is no file."""
    if path is None or not path.exists():
        return {}
    # Results from before have no verdicts of their own.
    return {
        key: value for key, value in json.loads(path.read_text()).items() if key in SECTIONS and "verdicts" in value
    }


def write_sections(path: Path, env: dict[str, Any], output: Results) -> None:
    """Write the sections that are measured, in their order; after each of them, so that a run can be resumed."""
    sections = {section: output[section] for section in SECTIONS if section in output}
    verdict = [line for section in sections.values() for line in section["verdicts"]]
    write_json(path, env, {**sections, "verdict": verdict})


if __name__ == "__main__":
    main()
