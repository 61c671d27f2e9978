"""Programs under `jax.jit`, rewritten where JAX has traced them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from jax._src import pjit as _pjit

from . import patches

Rewrite = Callable[[Any, Sequence[bool]], Any]
"""``(closed jaxpr, which inputs are donated) -> closed jaxpr`` of the same inputs and outputs."""

_rewrite: Rewrite | None = None


def rewrite_jitted(rewrite: Rewrite) -> None:
    """Let `rewrite` replace the program of each function under `jax.jit` that is traced, in every thread."""
    global _rewrite
    _rewrite = rewrite


_trace = _pjit._trace_for_jit


@functools.wraps(_trace)
def _observed(*args: Any, **options: Any) -> Any:
    traced = _trace(*args, **options)
    if _rewrite is None:
        return traced
    jaxpr = traced.params["jaxpr"]
    rewritten = _rewrite(jaxpr, traced.params["donated_invars"])
    return traced if rewritten is jaxpr else traced._replace(params={**traced.params, "jaxpr": rewritten})


patches.replace(
    "jax._src.pjit._trace_for_jit",
    _pjit,
    _observed,
    "A plan moves the updates of a jitted step into its backward pass (`statetx.Plan.apply`). Elsewhere the program is "
    "JAX's own.",
)
