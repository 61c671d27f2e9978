"""A profile where the backend does not tell where its buffers are: arguments, residuals and outputs, and XLA's totals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from ..residuals.table import Residuals
from .buffer import Buffer, Step
from .profile import MemoryProfile

_STEPS = (Step("forward", "", "forward", "", None), Step("backward", "", "backward", "", None))


def without_assignment(name: str, compiled: Any, residuals: Callable[[], Residuals] | None) -> MemoryProfile:
    """The profile of two steps, the forward and the backward pass; residuals are alive in both."""
    memory = compiled.memory_analysis()
    arguments = [
        Buffer(
            f"argument {n}", _num_bytes(x), str(x.dtype), 0, 1, "argument", "forward", f"argument {n}", *_NOWHERE, n, 0
        )
        for n, x in enumerate(jax.tree.leaves(compiled.in_avals))
    ]
    outputs = [
        Buffer(f"output {n}", _num_bytes(x), str(x.dtype), 1, 1, "output", "backward", f"output {n}", *_NOWHERE, n, 0)
        for n, x in enumerate(jax.tree.leaves(compiled.out_info))
    ]
    kept = [] if residuals is None else [row for row in residuals().rows if row.origin == "intermediate"]
    saved = [
        Buffer(
            f"residual {n}", r.nbytes, r.type, 0, 1, "residual", "forward", r.module or r.function, r.function, r.source,
            r.primitive, "", None, None, len(arguments) + n, 0,
        )
        for n, r in enumerate(kept)
    ]  # fmt: skip
    sizes = [sum(b.num_bytes for b in group) for group in (arguments, outputs, saved)]
    told = [0, 0, 0, 0]
    if memory is not None:
        told = [
            memory.argument_size_in_bytes,
            memory.output_size_in_bytes,
            memory.alias_size_in_bytes,
            memory.temp_size_in_bytes,
        ]
    return MemoryProfile(
        name=name,
        buffers=tuple(b for b in (*arguments, *saved, *outputs) if b.num_bytes),
        steps=_STEPS,
        argument_bytes=told[0] or sizes[0],
        output_bytes=told[1] or sizes[1],
        alias_bytes=told[2],
        temp_bytes=told[3] or sizes[2],
        constant_bytes=0,
        num_devices=1,
        backend=jax.default_backend(),
        backward_step=1,
        gradient=residuals is not None,
        note=(
            f"The backend {jax.default_backend()!r} does not tell where its buffers are, so these are arguments, residuals "
            f"and outputs, without working memory."
        ),
    )


_NOWHERE = ("", "", "", "", None, None)


def _num_bytes(x: Any) -> int:
    return x.size * x.dtype.itemsize
