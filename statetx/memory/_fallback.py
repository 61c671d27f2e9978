"""A profile where the backend does not tell where its buffers are: arguments, residuals and outputs, and XLA's
totals.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.tree_util import keystr

from .._targets import current
from .._text import type_str
from ..residuals.table import Residuals
from .buffer import Buffer, Step
from .profile import MemoryProfile

_STEPS = (Step("forward", "", "forward", "", None), Step("backward", "", "backward", "", None))


def without_assignment(
    name: str, compiled: Any, residuals: Callable[[], Residuals] | None, *, was_compiled: bool
) -> MemoryProfile:
    """The profile of two steps, the forward and the backward pass; residuals are alive in both.

    Args:
        was_compiled: whether the caller gave the program compiled, so that XLA could not be told to write where its
            buffers are.
    """
    memory = compiled.memory_analysis()
    # The keys of an argument begin with 0 and its number, or with 1 and its name.
    named = [
        (f"args[{keys[1].idx}]{keystr(keys[2:])}" if keys[0].idx == 0 else keys[1].key + keystr(keys[2:]), x)
        for keys, x in jax.tree_util.tree_flatten_with_path(compiled.in_avals)[0]
    ]
    leaves = jax.tree_util.tree_flatten_with_path(compiled.out_info)[0]
    results = [(f"output{keystr(keys)}", x) for keys, x in leaves]
    arguments = [
        Buffer(name, _num_bytes(x), _type(x), 0, 1, "argument", "forward", name, allocation=n)
        for n, (name, x) in enumerate(named)
    ]
    outputs = [
        Buffer(name, _num_bytes(x), _type(x), 1, 1, "output", "backward", name, allocation=n)
        for n, (name, x) in enumerate(results)
    ]
    kept = [] if residuals is None else [row for row in residuals().rows if row.origin == "intermediate"]
    saved = [
        Buffer(
            f"residual {n}", r.nbytes, r.type, 0, 1, "residual", "forward", r.module or r.function, r.function,
            r.source, r.primitive, allocation=len(arguments) + n,
        )
        for n, r in enumerate(kept)
    ]  # fmt: skip
    sizes = [sum(b.num_bytes for b in group) for group in (arguments, outputs, saved)]
    sizes_of = "argument_size_in_bytes output_size_in_bytes alias_size_in_bytes temp_size_in_bytes".split()
    told = [getattr(memory, name, 0) for name in sizes_of]
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
        backend=current.platform(),
        backward_step=1,
        gradient=residuals is not None,
        note=(
            f"The backend {current.platform()!r} does not tell where "
            f"{'compiled programs' if was_compiled else 'programs'} have their "
            f"buffers, so these are arguments, residuals and outputs, without working memory."
            + (" Pass the function, or the lowered program." if was_compiled else "")
        ),
    )


def _type(x: Any) -> str:
    return type_str(x, weak=False)


def _num_bytes(x: Any) -> int:
    return x.size * x.dtype.itemsize
