"""Rounding of a program: with other options of the compiler, or from inputs that differ by a unit in the last place."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import _jax
from .._targets import current
from .._tree import host_array, is_float
from .results import Mismatch

_OTHER_ROUNDINGS: dict[str, Any] = {
    "xla_backend_optimization_level": 0,
    "xla_allow_excess_precision": False,  # narrow floats are rounded after each operation, in fusions too
}


@functools.cache
def other_roundings() -> dict[str, Any]:
    """Options that let XLA round otherwise, as far as the backend knows them."""
    # Without fusions a program takes twice as long to compile on a CPU, where the code of a fusion decides already.
    wanted = _OTHER_ROUNDINGS | ({} if current.platform() == "cpu" else {"xla_disable_hlo_passes": "fusion"})
    options = {}
    for name, value in wanted.items():
        with contextlib.suppress(Exception):
            jax.jit(lambda x: x + 1).lower(1.0).compile(compiler_options={name: value})
            options[name] = value
    return options


def as_double(x: Any) -> Any:
    return jnp.asarray(x, _double_of(x)) if is_float(x) else x


def _double_of(x: Any) -> type:
    return np.complex128 if jnp.issubdtype(x.dtype, np.complexfloating) else np.float64


def unit_of(x: Any) -> float:
    """The relative unit in the last place; 0 of whole numbers."""
    return float(jnp.finfo(x.dtype).eps) if is_float(x) else 0.0


def largest_unit(jaxpr: _jax.Jaxpr) -> float:
    """The largest unit of the values that are computed."""
    units = [[*(unit_of(v.aval) for v in e.outvars), *map(largest_unit, _jax.inner_jaxprs(e))] for e in jaxpr.eqns]
    return max(itertools.chain(*units), default=0.0)


def nudged(x: Any, draw: np.random.Generator, unit: float) -> Any:
    """Floats that differ by `unit`, or by their own in the last place, up or down; whole numbers are exact."""
    if not is_float(x):
        return x
    wide = host_array(x).astype(_double_of(x))
    signs = draw.choice([-1.0, 1.0], wide.shape) * (wide != np.round(wide))
    return jax.device_put((wide * (1 + signs * max(unit, unit_of(x)))).astype(x.dtype), getattr(x, "sharding", None))


def largest(*measured: Mapping[str, Mismatch]) -> dict[str, Mismatch]:
    """Of each result the largest difference."""
    names = {name for results in measured for name in results}
    return {name: max((d[name] for d in measured if name in d), key=lambda d: d.error) for name in names}
