"""Trace time of every transform on a stateful function, against the same computation threaded by hand.

Compared
    For each transform a program that uses it once, in two forms. The stateful one calls a recurrent cell with six
    states (two weights, a bias, two running averages, a counter) under the transform of `statetx`. Its twin is plain
    JAX: weights, averages and counter are arguments and results, and cross the transform as one would write it by hand
    (auxiliary outputs of derivatives, carries of loops, operands of branches, axes of `jax.vmap`, specs of
    `jax.shard_map`; weights that a loop or branch only reads are closed over). Both call the same `gru`.

Measured
    Seconds from a function that is new to JAX to its jaxpr: ``jax.jit(f).trace(...)``, where `f` is the twin or
    ``statetx.functionalize`` of the stateful program. Its frame, which ``statetx.jit`` would have as well, counts for
    the stateful side; ``.values``, which has no counterpart, does not. "no transform" is the program with only the
    frame. Three rows are timed as a whole on both sides: jit as ``jit(f).lower(...)`` (statetx has no separate
    trace), eval_shape and make_jaxpr as calls, including the search for states. Each implementation gives
    one sample a round; the target is for the median, over the rounds, of the ratios within a round by the wall clock.
    CPU time is shown beside it.

Fairness
    Each sample makes new states, new functions and a new `jax.jit`, on both sides, so no cache keyed by one of
    these can hit; JAX's caches of its own library functions are warm for both. statetx also keeps a table of
    structures: it is emptied before each sample ("cleared"), as for the first trace of a model, or left unchanged
    ("warm"), as for a second layer of equal structure or a later trace. The target is for "cleared".

Counts
    Runs of the cell's Python in one sample, and equations of the jaxpr and the jaxprs inside it. A function that
    returns no jaxpr (`eval_shape`) has no count; the equations of jit are of a program that calls the jitted function.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable
from typing import Any

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
    write_json,
)
from jax.sharding import PartitionSpec as P

import statetx
from statetx._equations.structure import table

WIDTH, BATCH, STEPS = 8, 4, 5
TARGET = 1.15
TWIN, CLEARED, WARM = "by hand", "statetx, table cleared", "statetx, table warm"
MESH = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))

_runs = 0  # of the cell's Python body


def gru(weights: dict, stats: dict, h: Any, x: Any) -> tuple[Any, dict]:
    """One step of a gated recurrent unit on inputs normalized by running averages: the work of both sides."""
    global _runs
    _runs += 1
    x_mean = x.mean(axis=0)
    mean = 0.9 * stats["mean"] + 0.1 * x_mean
    var = 0.9 * stats["var"] + 0.1 * jnp.mean((x - x_mean) ** 2, axis=0)
    x = (x - mean) * jax.lax.rsqrt(var + 1e-5)
    gates = x @ weights["w"] + weights["b"]
    reset, update, new = jnp.split(gates, 3, axis=-1)
    h_reset, h_update, h_new = jnp.split(h @ weights["u"], 3, axis=-1)
    update = jax.nn.sigmoid(update + h_update)
    new = jnp.tanh(new + jax.nn.sigmoid(reset + h_reset) * h_new)
    return (1 - update) * h + update * new, {"mean": mean, "var": var, "count": stats["count"] + 1}


def new_values(copies: int | None = None) -> tuple[dict, dict]:
    """Weights, and running averages with a counter; `copies` of the averages, stacked, if given."""
    rng = np.random.default_rng(0)
    weight = lambda *shape: jnp.asarray(rng.normal(size=shape) / np.sqrt(WIDTH), jnp.float32)
    lead = () if copies is None else (copies,)
    weights = {"w": weight(WIDTH, 3 * WIDTH), "u": weight(WIDTH, 3 * WIDTH), "b": weight(3 * WIDTH)}
    stats = {"mean": jnp.zeros((*lead, WIDTH)), "var": jnp.ones((*lead, WIDTH)), "count": jnp.zeros((), jnp.int32)}
    return weights, stats


def new_inputs() -> tuple[jax.Array, jax.Array, jax.Array]:
    """A hidden state, an input, and a sequence of inputs: the arguments of every program."""
    xs = jnp.linspace(-1.0, 1.0, STEPS * BATCH * WIDTH).reshape(STEPS, BATCH, WIDTH)
    return jnp.full((BATCH, WIDTH), 0.1, jnp.float32), xs[0], xs


class Average(statetx.State):
    """A running average."""


class Cell:
    """A cell that applies `gru` to states."""

    def __init__(self, copies: int | None = None):
        weights, stats = new_values(copies)
        self.weights = {k: statetx.Param(v) for k, v in weights.items()}
        self.mean, self.var = Average(stats["mean"]), Average(stats["var"])
        self.count = statetx.State(stats["count"])

    def __call__(self, h: Any, x: Any) -> Any:
        stats = {"mean": self.mean.value, "var": self.var.value, "count": self.count.value}
        h, stats = gru({k: p.value for k, p in self.weights.items()}, stats, h, x)
        self.mean.value, self.var.value, self.count.value = stats["mean"], stats["var"], stats["count"]
        return h

    def loss(self, h: Any, x: Any) -> Any:
        return jnp.mean(self(h, x) ** 2)


def gru_loss(weights: dict, stats: dict, h: Any, x: Any) -> tuple[Any, dict]:
    """The loss of `Cell.loss`, threaded by hand."""
    h, stats = gru(weights, stats, h, x)
    return jnp.mean(h**2), stats


# -- the programs ----------------------------------------------------------------------------------------
#
# Each pair holds makers of the stateful program ``(h, x, xs) -> out`` of a cell, and of the twin
# ``(weights, stats, h, x, xs) -> (out, stats)``.


def plain() -> Pair:
    def stateful(cell: Cell) -> Callable:
        return lambda h, x, xs: cell(h, x)

    def by_hand() -> Callable:
        return lambda weights, stats, h, x, xs: gru(weights, stats, h, x)

    return Pair(stateful, by_hand)


def remat() -> Pair:
    def stateful(cell: Cell) -> Callable:
        step = statetx.remat(cell.__call__)
        return lambda h, x, xs: step(h, x)

    def by_hand() -> Callable:
        step = jax.checkpoint(lambda *args: gru(*args))
        return lambda weights, stats, h, x, xs: step(weights, stats, h, x)

    return Pair(stateful, by_hand)


def remat_in_grad() -> Pair:
    def stateful(cell: Cell) -> Callable:
        step = statetx.value_and_grad(statetx.remat(cell.loss), wrt=cell.weights)
        return lambda h, x, xs: step(h, x)

    def by_hand() -> Callable:
        step = jax.value_and_grad(jax.checkpoint(lambda *args: gru_loss(*args)), has_aux=True)

        def program(weights: dict, stats: dict, h: Any, x: Any, xs: Any) -> tuple[Any, dict]:
            (loss, stats), grads = step(weights, stats, h, x)
            return (loss, grads), stats

        return program

    return Pair(stateful, by_hand)


def jit() -> Pair:
    def stateful(cell: Cell) -> Callable:
        step = statetx.jit(cell.__call__)
        return lambda h, x, xs: step(h, x)

    def by_hand() -> Callable:
        step = jax.jit(lambda *args: gru(*args))
        return lambda weights, stats, h, x, xs: step(weights, stats, h, x)

    def lower(cell: Cell) -> Callable:
        return lambda h, x, xs: statetx.jit(cell.__call__).lower(h, x)

    def lower_by_hand(weights: dict, stats: dict, h: Any, x: Any, xs: Any) -> Any:
        return jax.jit(lambda *args: gru(*args)).lower(weights, stats, h, x)

    return Pair(stateful, by_hand, lower, lower_by_hand)


def grad() -> Pair:
    def stateful(cell: Cell) -> Callable:
        step = statetx.grad(cell.loss, wrt=cell.weights)
        return lambda h, x, xs: step(h, x)

    def by_hand() -> Callable:
        step = jax.grad(lambda *args: gru_loss(*args), has_aux=True)
        return lambda weights, stats, h, x, xs: step(weights, stats, h, x)

    return Pair(stateful, by_hand)


def value_and_grad() -> Pair:
    def stateful(cell: Cell) -> Callable:
        step = statetx.value_and_grad(cell.loss, wrt=cell.weights)
        return lambda h, x, xs: step(h, x)

    def by_hand() -> Callable:
        step = jax.value_and_grad(lambda *args: gru_loss(*args), has_aux=True)

        def program(weights: dict, stats: dict, h: Any, x: Any, xs: Any) -> tuple[Any, dict]:
            (loss, stats), grads = step(weights, stats, h, x)
            return (loss, grads), stats

        return program

    return Pair(stateful, by_hand)


def vjp() -> Pair:
    def stateful(cell: Cell) -> Callable:
        def program(h: Any, x: Any, xs: Any) -> Any:
            out, pullback = statetx.vjp(cell, h, x, wrt=cell.weights)
            return out, pullback(out)

        return program

    def by_hand() -> Callable:
        def program(weights: dict, stats: dict, h: Any, x: Any, xs: Any) -> tuple[Any, dict]:
            out, pullback, stats = jax.vjp(lambda w, h, x: gru(w, stats, h, x), weights, h, x, has_aux=True)
            of_weights, *of_args = pullback(out)
            return (out, (of_weights, tuple(of_args))), stats

        return program

    return Pair(stateful, by_hand)


def jvp() -> Pair:
    def stateful(cell: Cell) -> Callable:
        return lambda h, x, xs: statetx.jvp(cell, (h, x), (x, h))

    def by_hand() -> Callable:
        def program(weights: dict, stats: dict, h: Any, x: Any, xs: Any) -> tuple[Any, dict]:
            out, tangent, stats = jax.jvp(lambda h, x: gru(weights, stats, h, x), (h, x), (x, h), has_aux=True)
            return (out, tangent), stats

        return program

    return Pair(stateful, by_hand)


def linearize() -> Pair:
    def stateful(cell: Cell) -> Callable:
        def program(h: Any, x: Any, xs: Any) -> Any:
            out, pushforward = statetx.linearize(cell, h, x)
            return out, pushforward(x, h)

        return program

    def by_hand() -> Callable:
        def program(weights: dict, stats: dict, h: Any, x: Any, xs: Any) -> tuple[Any, dict]:
            out, pushforward, stats = jax.linearize(lambda h, x: gru(weights, stats, h, x), h, x, has_aux=True)
            return (out, pushforward(x, h)), stats

        return program

    return Pair(stateful, by_hand)


def jacobian(name: str, stateful_fun: str, fun: Callable) -> Pair:
    """A Jacobian or Hessian with respect to the bias."""

    def stateful(cell: Cell) -> Callable:
        step = getattr(statetx, name)(getattr(cell, stateful_fun), wrt=cell.weights["b"])
        return lambda h, x, xs: step(h, x)

    def by_hand() -> Callable:
        of_bias = lambda bias, weights, *args: fun({**weights, "b": bias}, *args)
        step = getattr(jax, name)(of_bias, has_aux=True)
        return lambda weights, stats, h, x, xs: step(weights["b"], weights, stats, h, x)

    return Pair(stateful, by_hand)


def vmap() -> Pair:
    """Each example has its own averages; the counter is shared."""

    def stateful(cell: Cell) -> Callable:
        step = statetx.vmap(cell, in_axes=(None, 0), states={Average: 0})
        return lambda h, x, xs: step(h, xs)

    def by_hand() -> Callable:
        axes = {"mean": 0, "var": 0, "count": None}
        step = jax.vmap(lambda *args: gru(*args), in_axes=(None, axes, None, 0), out_axes=(0, axes))
        return lambda weights, stats, h, x, xs: step(weights, stats, h, xs)

    return Pair(stateful, by_hand, copies=STEPS)


def scan() -> Pair:
    def stateful(cell: Cell) -> Callable:
        def step(h: Any, x: Any) -> tuple[Any, Any]:
            h = cell(h, x)
            return h, h

        return lambda h, x, xs: statetx.scan(step, h, xs)

    def by_hand() -> Callable:
        def program(weights: dict, stats: dict, h: Any, x: Any, xs: Any) -> tuple[Any, dict]:
            def step(carry: tuple, x: Any) -> tuple[Any, Any]:
                h, stats = gru(weights, carry[1], carry[0], x)
                return (h, stats), h

            (h, stats), hs = jax.lax.scan(step, (h, stats), xs)
            return (h, hs), stats

        return program

    return Pair(stateful, by_hand)


def fori_loop() -> Pair:
    def stateful(cell: Cell) -> Callable:
        return lambda h, x, xs: statetx.fori_loop(0, STEPS, lambda i, h: cell(h, x), h)

    def by_hand() -> Callable:
        def program(weights: dict, stats: dict, h: Any, x: Any, xs: Any) -> tuple[Any, dict]:
            return jax.lax.fori_loop(0, STEPS, lambda i, carry: gru(weights, carry[1], carry[0], x), (h, stats))

        return program

    return Pair(stateful, by_hand)


def while_loop() -> Pair:
    def stateful(cell: Cell) -> Callable:
        return lambda h, x, xs: statetx.while_loop(lambda h: cell.count.value < STEPS, lambda h: cell(h, x), h)

    def by_hand() -> Callable:
        def program(weights: dict, stats: dict, h: Any, x: Any, xs: Any) -> tuple[Any, dict]:
            def step(carry: tuple) -> tuple[Any, dict]:
                return gru(weights, carry[1], carry[0], x)

            return jax.lax.while_loop(lambda carry: carry[1]["count"] < STEPS, step, (h, stats))

        return program

    return Pair(stateful, by_hand)


def cond() -> Pair:
    def stateful(cell: Cell) -> Callable:
        skip = lambda h, x: h
        return lambda h, x, xs: statetx.cond(h[0, 0] > 0, cell, skip, h, x)

    def by_hand() -> Callable:
        def program(weights: dict, stats: dict, h: Any, x: Any, xs: Any) -> tuple[Any, dict]:
            step = lambda stats, h, x: gru(weights, stats, h, x)
            skip = lambda stats, h, x: (h, stats)
            return jax.lax.cond(h[0, 0] > 0, step, skip, stats, h, x)

        return program

    return Pair(stateful, by_hand)


def switch() -> Pair:
    """One branch does nothing and two run the cell."""

    def stateful(cell: Cell) -> Callable:
        branches = [lambda h, x: h, lambda h, x: cell(h, x), lambda h, x: cell(h, -x)]
        return lambda h, x, xs: statetx.switch(h[0, 0].astype(int), branches, h, x)

    def by_hand() -> Callable:
        def program(weights: dict, stats: dict, h: Any, x: Any, xs: Any) -> tuple[Any, dict]:
            branches = [
                lambda stats, h, x: (h, stats),
                lambda stats, h, x: gru(weights, stats, h, x),
                lambda stats, h, x: gru(weights, stats, h, -x),
            ]
            return jax.lax.switch(h[0, 0].astype(int), branches, stats, h, x)

        return program

    return Pair(stateful, by_hand)


def map() -> Pair:
    """`jax.lax.map` carries nothing: by hand it becomes a scan."""

    def stateful(cell: Cell) -> Callable:
        return lambda h, x, xs: statetx.map(lambda x: cell(h, x), xs)

    def by_hand() -> Callable:
        def program(weights: dict, stats: dict, h: Any, x: Any, xs: Any) -> tuple[Any, dict]:
            def step(stats: dict, x: Any) -> tuple[dict, Any]:
                out, stats = gru(weights, stats, h, x)
                return stats, out

            stats, out = jax.lax.scan(step, stats, xs)
            return out, stats

        return program

    return Pair(stateful, by_hand)


def eval_shape() -> Pair:
    def stateful(cell: Cell) -> Callable:
        return lambda h, x, xs: statetx.eval_shape(cell, h, x)

    def by_hand(weights: dict, stats: dict, h: Any, x: Any, xs: Any) -> Any:
        return jax.eval_shape(lambda *args: gru(*args), weights, stats, h, x)

    return Pair(None, None, stateful, by_hand)


def make_jaxpr() -> Pair:
    def stateful(cell: Cell) -> Callable:
        return lambda h, x, xs: statetx.make_jaxpr(cell)(h, x)

    def by_hand(weights: dict, stats: dict, h: Any, x: Any, xs: Any) -> Any:
        return jax.make_jaxpr(lambda *args: gru(*args))(weights, stats, h, x)

    return Pair(None, None, stateful, by_hand)


def shard_map() -> Pair:
    """The batch and the averages are split over a mesh of one device; weights and counter are replicated."""
    split = P("d")

    def stateful(cell: Cell) -> Callable:
        specs = {"in_specs": (split, split), "out_specs": split, "states": {Average: split}}
        step = statetx.shard_map(cell, mesh=MESH, **specs)
        return lambda h, x, xs: step(h, x)

    def by_hand() -> Callable:
        of_stats = {"mean": split, "var": split, "count": P()}
        specs = {"in_specs": (P(), of_stats, split, split), "out_specs": (split, of_stats)}
        step = jax.shard_map(lambda *args: gru(*args), mesh=MESH, **specs)
        return lambda weights, stats, h, x, xs: step(weights, stats, h, x)

    return Pair(stateful, by_hand)


@dataclasses.dataclass
class Pair:
    """A stateful program and its twin.

    Attributes:
        stateful, by_hand: make the two, as described above; None if only the following can be called.
        timed, timed_by_hand: timed instead of a trace: a maker of the stateful function, and the function by hand
            itself.
        copies: number of stacked copies of the running averages.
    """

    stateful: Callable[[Cell], Callable] | None
    by_hand: Callable[[], Callable] | None
    timed: Callable[[Cell], Callable] | None = None
    timed_by_hand: Callable | None = None
    copies: int | None = None


PROGRAMS: dict[str, Pair] = {
    "no transform": plain(),
    "remat": remat(),
    "remat in value_and_grad": remat_in_grad(),
    "jit (trace and lowering)": jit(),
    "grad": grad(),
    "value_and_grad": value_and_grad(),
    "vjp": vjp(),
    "jvp": jvp(),
    "linearize": linearize(),
    "jacfwd": jacobian("jacfwd", "__call__", gru),
    "jacrev": jacobian("jacrev", "__call__", gru),
    "hessian": jacobian("hessian", "loss", gru_loss),
    "vmap": vmap(),
    "scan": scan(),
    "fori_loop": fori_loop(),
    "while_loop": while_loop(),
    "cond": cond(),
    "switch": switch(),
    "map": map(),
    "eval_shape": eval_shape(),
    "make_jaxpr": make_jaxpr(),
    "shard_map": shard_map(),
}


# -- measuring -------------------------------------------------------------------------------------------


def new_trace(pair: Pair, side: str) -> Callable[[], Any]:
    """Make one side's program again; return the function to time."""
    inputs = new_inputs()
    if side == TWIN:
        weights, stats = new_values(pair.copies)
        if pair.timed_by_hand is not None:
            return lambda: pair.timed_by_hand(weights, stats, *inputs)  # type: ignore[misc]
        assert pair.by_hand is not None
        program = pair.by_hand()
        return lambda: jax.jit(program).trace(weights, stats, *inputs)
    cell = Cell(pair.copies)
    if pair.timed is not None:
        program = pair.timed(cell)
        return lambda: program(*inputs)
    assert pair.stateful is not None
    pure = statetx.functionalize(pair.stateful(cell))
    values = pure.values(*inputs)
    return lambda: jax.jit(pure).trace(values, *inputs)


def timed(pair: Pair, side: str) -> Callable[[], Sample]:
    def sample() -> Sample:
        trace = new_trace(pair, side)
        if side == CLEARED:
            table.clear()
        watch = Stopwatch()
        trace()
        return watch.read()

    return sample


def figures(pair: Pair, side: str) -> dict[str, Any]:
    """The deterministic figures of one sample."""
    global _runs
    trace = new_trace(pair, side)
    table.clear()
    _runs = 0
    traced = trace()
    runs = _runs
    if pair.stateful is not None and pair.timed is not None:
        traced = new_trace(dataclasses.replace(pair, timed=None, timed_by_hand=None), side)()
    jaxpr = getattr(traced, "jaxpr", None)
    return {"runs": runs, "equations": None if jaxpr is None else num_equations(jaxpr)}


def check_results(name: str, pair: Pair) -> None:
    """Raise unless both sides give the same output and the same new values of the states."""
    if pair.stateful is None or pair.by_hand is None:
        return
    inputs = new_inputs()
    out, stats = jax.jit(pair.by_hand())(*new_values(pair.copies), *inputs)
    cell = Cell(pair.copies)
    stateful_out = statetx.jit(pair.stateful(cell))(*inputs)
    new = {"mean": cell.mean.value, "var": cell.var.value, "count": cell.count.value}
    for a, b in zip(jax.tree.leaves((out, stats)), jax.tree.leaves((stateful_out, new)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6, err_msg=name)


def measure_one(name: str, rounds: int) -> dict[str, Any]:
    pair = PROGRAMS[name]
    check_results(name, pair)
    # JAX keeps an entry for each trace that combines concrete arrays, as in `eval_shape`, and they slow it down.
    jax.clear_caches()
    gc.collect()
    gc.freeze()  # collections between rounds need not traverse the programs compiled so far
    samples = interleave({side: timed(pair, side) for side in (TWIN, CLEARED, WARM)}, rounds, warmup=3)
    gc.unfreeze()
    return {
        side: {**summaries(samples[side], samples[TWIN]), "samples": samples[side], **figures(pair, side)}
        for side in samples
    }


def check(results: dict[str, Any]) -> list[str]:
    ratios = {name: r[CLEARED]["wall_ratio"]["median"] for name, r in results.items() if name != "no transform"}
    missed = [f"{name} {ratio:.2f}" for name, ratio in ratios.items() if ratio > TARGET]
    line = f"{len(ratios) - len(missed)} of {len(ratios)} rows meet the target of at most {TARGET}"
    return [f"{line}; missed by {', '.join(missed)}." if missed else f"{line}."]


# -- printing --------------------------------------------------------------------------------------------

COLUMNS = ("transform", "by hand ms", "statetx ms", "ratio", "middle half", "of least", "CPU ratio", "warm ratio")
COLUMNS += (f"at most {TARGET}", "body runs", "equations")


def rows(results: dict[str, Any]) -> list[list[str]]:
    return [
        [
            name,
            f"{1e3 * r[TWIN]['wall']['median']:.2f}",
            f"{1e3 * r[CLEARED]['wall']['median']:.2f}",
            f"{r[CLEARED]['wall_ratio']['median']:.2f}",
            spread(r[CLEARED]["wall_ratio"], 1, 2),
            f"{r[CLEARED]['wall_ratio']['of_min']:.2f}",
            f"{r[CLEARED]['cpu_ratio']['median']:.2f}",
            f"{r[WARM]['wall_ratio']['median']:.2f}",
            verdict(name, r[CLEARED]["wall_ratio"]["median"]),
            f"{r[TWIN]['runs']}, {r[CLEARED]['runs']}",
            "" if r[TWIN]["equations"] is None else f"{r[TWIN]['equations']}, {r[CLEARED]['equations']}",
        ]
        for name, r in results.items()
    ]


def verdict(name: str, ratio: float) -> str:
    if name == "no transform":
        return ""
    return "met" if ratio <= TARGET else "MISSED"


def main() -> None:
    only = {"nargs": "+", "choices": list(PROGRAMS), "default": list(PROGRAMS), "help": "measure these alone"}
    options = parse_args(__doc__ or "", only=only)
    env = environment()
    rounds = 2 if options.quick else 31
    print(header(env))
    results = {name: measure_one(name, rounds) for name in options.only}
    show(f"Trace of each transform, {rounds} rounds; counts: by hand, statetx", COLUMNS, rows(results))
    lines = [] if options.quick else check(results)
    worst = max(
        (r[CLEARED]["wall_ratio"] for n, r in results.items() if n != "no transform"), key=lambda r: r["median"]
    )
    figures = {"worst transform, of jax": worst}
    lines += judge("bench_transforms", figures, quick=options.quick)
    print("\n".join(lines))
    if options.json:
        write_json(options.json, env, {"rounds": rounds, "results": results, "figures": figures, "verdict": lines})


if __name__ == "__main__":
    main()
