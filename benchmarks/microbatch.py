"""Gradients of a large batch in parts: `statetx.microbatch` against a loop written by hand, and against the full batch.

Compared
    Value and gradient of a transformer, a multi-layer perceptron and a convolutional net (benchmarks/programs.py), in 8 parts. "by hand" is a
    ``jax.lax.scan`` over the parts whose carry is the sum of losses and gradients, as one writes it with ``jax.value_and_grad``. "gradients" is
    ``microbatch`` of the gradient function, "loss" the gradient of ``microbatch`` of the loss. "remat" is the gradient of a scan over
    rematerialized parts, the other way to differentiate a loss in parts.

Measured
    Memory is XLA's temporary memory, beyond arguments and results (``memory_analysis().temp_size_in_bytes``). Time is of the compiled program;
    implementations take turns in each round, and ratios are taken within a round. CPU time is of the whole process. Gradients are compared
    with those of the full batch before anything is timed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import programs
from _common import MIB, finish, memory_and_time, show, spread, start

import statetx

NUM = 8
SIZES: dict[str, Any] = {
    "transformer": {"layers": 2, "width": 128, "time": 64, "batch": 32},
    "mlp": {"layers": 4, "width": 128, "batch": 2048},
    "conv_net": {"layers": 3, "channels": 16, "size": 16, "batch": 32},
}
QUICK: dict[str, Any] = {
    "transformer": {"layers": 2, "width": 64, "time": 64, "batch": 16},
    "mlp": {"layers": 2, "width": 64, "batch": 256},
    "conv_net": {"layers": 2, "channels": 8, "size": 16, "batch": 16},
}


def by_hand(loss: Callable) -> Callable:
    """Sums of losses and gradients in the carry of a scan."""

    def gradients(params: Any, x: Any) -> Any:
        def part(total: Any, x: Any) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, total, jax.value_and_grad(loss)(params, x)), None

        zeros = jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
        total, _ = jax.lax.scan(part, zeros, x.reshape(NUM, -1, *x.shape[1:]))
        return jax.tree.map(lambda t: t / NUM, total)

    return gradients


def rematerialized(loss: Callable) -> Callable:
    """The gradient of a scan over rematerialized parts."""

    def mean(params: Any, x: Any) -> Any:
        def part(total: Any, x: Any) -> tuple[Any, None]:
            return total + jax.checkpoint(loss, prevent_cse=False)(params, x), None

        total, _ = jax.lax.scan(part, jnp.zeros(()), x.reshape(NUM, -1, *x.shape[1:]))
        return total / NUM

    return jax.value_and_grad(mean)


def implementations(loss: Callable) -> dict[str, Callable]:
    return {
        "by hand": by_hand(loss),
        "gradients": statetx.microbatch(jax.value_and_grad(loss), NUM, argnums=1),
        "loss": jax.value_and_grad(statetx.microbatch(loss, NUM, argnums=1)),
        "remat": rematerialized(loss),
        "full batch": jax.value_and_grad(loss),
    }


def compare(name: str, sizes: dict[str, Any], rounds: int) -> dict[str, Any]:
    """Memory and time of each implementation."""
    program = getattr(programs, name)(**sizes)
    args = program.params, *program.data
    compiled = {key: jax.jit(f).lower(*args).compile() for key, f in implementations(program.loss).items()}
    expected = compiled["full batch"](*args)
    for run in compiled.values():
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), run(*args), expected)
    return memory_and_time(compiled, args, "by hand", rounds)


COLUMNS = (
    "program",
    "implementation",
    "temporary MiB",
    "of full batch",
    "ms",
    "middle half",
    "of by hand",
    "CPU of by hand",
)


def rows(results: dict[str, Any]) -> list[list[str]]:
    return [
        [
            name,
            key,
            f"{r['temp_bytes'] / MIB:.1f}",
            f"{r['temp_bytes'] / found['full batch']['temp_bytes']:.3f}",
            f"{1e3 * r['wall']['median']:.0f}",
            spread(r["wall"], 1e3, 0),
            f"{r['wall_ratio']['median']:.2f}",
            f"{r['cpu_ratio']['median']:.2f}",
        ]
        for name, found in results.items()
        for key, r in found.items()
    ]


def main() -> None:
    options, env = start(__doc__ or "")
    sizes = QUICK if options.quick else SIZES
    rounds = options.rounds or (3 if options.quick else 20)
    results, figures = {}, {}
    for name in sizes:
        results[name] = found = compare(name, sizes[name], rounds)
        full = found["full batch"]["temp_bytes"]
        show(f"{name} in {NUM} parts", COLUMNS, rows({name: found}))
        for key in ("gradients", "loss"):
            figures[f"{name}: time of {key}, of by hand"] = found[key]["cpu_ratio"]
            figures[f"{name}: memory of {key}, of the full batch"] = found[key]["temp_bytes"] / full
    finish("microbatch", options, env, figures, results=results)


if __name__ == "__main__":
    main()
