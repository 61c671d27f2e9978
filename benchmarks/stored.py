"""Residuals stored in fewer bits: what they cost in time, and what rounding does to training.

Compared
    Spiking: 24 blocks, each dense with 256 neurons and leaky integration over 32 steps, a batch of 64. "none"
    differentiates the blocks as they are, "remat" rematerializes each, "bits" also stores the spikes that enter them as
    bits (``inputs_stored_as="bits"``). "bits between" rematerializes pairs of blocks, stores what enters them as bits,
    and keeps the spikes between the two as bits. Transformer: the model of examples/transformer_lm.py, whose layers
    keep everything that the backward pass needs, stored unchanged, as bfloat16, float8_e4m3fn or float8_e5m2.

Measured
    Memory is XLA's temporary memory (``memory_analysis().temp_size_in_bytes``) under default flags. Time is of the
    compiled gradient; implementations take turns in each round, and ratios are taken within a round. Gradients of the
    spiking network are equal bit for bit before anything is timed. Loss is the mean of the last quarter of the training
    steps; its spread is taken over seeds of the unchanged program.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _common import MIB, finish, memory_and_time, show, spread, start
from jax import lax

import statetx
from statetx import policies

SIZES = {"blocks": 24, "width": 256, "steps": 32, "batch": 64}
QUICK = {"blocks": 4, "width": 64, "steps": 8, "batch": 16}
TRANSFORMER = {"layers": 3, "width": 64, "context": 48, "batch": 8, "updates": 120, "seeds": 4}
QUICK_TRANSFORMER = {"layers": 2, "width": 32, "context": 16, "batch": 4, "updates": 8, "seeds": 2}
FORMATS = ("bfloat16", "float8_e4m3fn", "float8_e5m2")

# -- a spiking network -----------------------------------------------------------------------------------------------


@jax.custom_jvp
def spike(v: jax.Array) -> jax.Array:
    return (v > 0).astype(v.dtype)


@spike.defjvp
def _(primals: Any, tangents: Any) -> Any:
    (v,), (t,) = primals, tangents
    return spike(v), t / (1 + 10 * jnp.abs(v)) ** 2


def block(x: jax.Array, w: jax.Array) -> jax.Array:
    def step(v: jax.Array, current: jax.Array) -> tuple[jax.Array, jax.Array]:
        v = 0.9 * v + current
        return v, spike(v - 1)

    return lax.scan(step, jnp.zeros_like(x[0]), x @ w)[1]


def pair(x: jax.Array, v: jax.Array, w: jax.Array) -> jax.Array:
    return block(statetx.checkpoint_name(block(x, v), "spikes"), w)


def losses() -> dict[str, Callable]:
    def loss(block: Callable, width: int, ws: Any, x: Any) -> Any:
        for i in range(0, len(ws), width):
            x = block(x, *ws[i : i + width])
        return (x.mean(0) ** 2).sum()

    bits = policies.names("spikes").stored_as("bits")
    return {
        "none": functools.partial(loss, block, 1),
        "remat": functools.partial(loss, statetx.remat(block), 1),
        "bits": functools.partial(loss, statetx.remat(block, inputs_stored_as=("bits", None)), 1),
        "bits between": functools.partial(
            loss, statetx.remat(pair, policy=bits, inputs_stored_as=("bits", None, None)), 2
        ),
    }


def spiking(blocks: int, width: int, steps: int, batch: int, rounds: int) -> dict[str, Any]:
    keys = jax.random.split(jax.random.key(0), blocks + 1)
    ws = [jax.random.normal(key, (width, width)) * (3 / width**0.5) for key in keys[1:]]
    x = (jax.random.uniform(keys[0], (steps, batch, width)) < 0.2).astype(jnp.float32)
    compiled = {name: jax.jit(jax.grad(loss)).lower(ws, x).compile() for name, loss in losses().items()}
    expected = compiled["remat"](ws, x)
    for run in compiled.values():
        jax.tree.map(np.testing.assert_array_equal, run(ws, x), expected)
    return memory_and_time(compiled, (ws, x), "remat", rounds)


# -- a transformer ---------------------------------------------------------------------------------------------------


def example() -> Any:
    """The module of the example. It and the benchmarks have a ``_common`` each."""
    own = sys.modules.pop("_common")
    sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
    try:
        return importlib.import_module("transformer_lm")
    finally:
        sys.path.pop(0)
        sys.modules["_common"] = own


def curve(model: Any, options: SimpleNamespace, seed: int, format: str | None) -> tuple[list[float], int]:
    """The losses of a training, and the bytes of the residuals that are intermediate values."""
    options = SimpleNamespace(**{**vars(options), "seed": seed})
    policy = policies.everything if format is None else policies.everything.stored_as(format)
    wrap = lambda layers: statetx.remat_scan(layers, len(layers), policy=policy)
    windows, vocabulary = model.sample_windows(options)
    language_model = model.LanguageModel(vocabulary, options, wrap)
    step = model.make_step(language_model, options)
    residuals = statetx.saved_residuals(language_model.loss, windows[0], wrt=statetx.Param)
    return [float(step(window)) for window in windows], residuals.intermediate_bytes


def training(layers: int, width: int, context: int, batch: int, updates: int, seeds: int) -> dict[str, Any]:
    model = example()
    options = SimpleNamespace(
        layers=layers,
        width=width,
        context=context,
        batch=batch,
        updates=updates,
        compared=0,
        dropout=0.1,
        compute="float32",
        lr=0.002,
    )
    tail = slice(-(-3 * updates // 4), None)
    unchanged = [curve(model, options, seed, None) for seed in range(seeds)]
    final = [float(np.mean(losses[tail])) for losses, _ in unchanged]
    results: dict[str, Any] = {
        "unchanged": {"losses": [losses for losses, _ in unchanged], "final": final, "bytes": unchanged[0][1]}
    }
    for format in FORMATS:
        losses, num_bytes = curve(model, options, 0, format)
        results[format] = {"losses": losses, "final": float(np.mean(losses[tail])), "bytes": num_bytes}
    return results


def main() -> None:
    options, env = start(__doc__ or "")
    rounds = options.rounds or (3 if options.quick else 25)
    found = spiking(**(QUICK if options.quick else SIZES), rounds=rounds)
    columns = ["implementation", "temporary MiB", "of remat", "ms", "middle half", "time of remat", "CPU time"]
    remat = found["remat"]["temp_bytes"]
    rows = [
        [
            name,
            f"{r['temp_bytes'] / MIB:.1f}",
            f"{r['temp_bytes'] / remat:.3f}",
            f"{1e3 * r['wall']['median']:.1f}",
            spread(r["wall"], 1e3, 1),
            f"{r['wall_ratio']['median']:.3f}",
            f"{r['cpu_ratio']['median']:.3f}",
        ]
        for name, r in found.items()
    ]
    show("spiking network", columns, rows)

    trained = training(**(QUICK_TRANSFORMER if options.quick else TRANSFORMER))
    final = trained["unchanged"]["final"]
    deviation = float(np.std(final, ddof=1))
    rows = [["unchanged", f"{trained['unchanged']['bytes'] / MIB:.2f}", ", ".join(f"{x:.3f}" for x in final), ""]]
    rows += [
        [
            name,
            f"{trained[name]['bytes'] / MIB:.2f}",
            f"{trained[name]['final']:.3f}",
            f"{(trained[name]['final'] - final[0]) / deviation:+.2f}",
        ]
        for name in FORMATS
    ]
    show("transformer", ["residuals", "MiB", "final loss (a seed each)", "deviations of seeds"], rows)

    figures: dict[str, Any] = {
        "spiking: time of bits, of remat": found["bits"]["cpu_ratio"],
        "spiking: memory of bits, of remat": found["bits"]["temp_bytes"] / remat,
        "spiking: memory of bits, of none": found["bits"]["temp_bytes"] / found["none"]["temp_bytes"],
    }
    for name in FORMATS:
        figures[f"transformer: distance of {name}, in deviations of seeds"] = (
            abs(trained[name]["final"] - final[0]) / deviation
        )
        figures[f"transformer: bytes of {name}, of unchanged"] = trained[name]["bytes"] / trained["unchanged"]["bytes"]
    finish("stored", options, env, figures, spiking=found, transformer=trained)


if __name__ == "__main__":
    main()
