"""Rounding of a program: with other options of the compiler, or from inputs that differ by a unit in the last place."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import _jax
from .._equations.compiler import is_known
from .._targets import current
from .._tree import host_array, is_float
from .results import Mismatch


def other_roundings() -> dict[str, Any]:
    """Options that let XLA round otherwise, as far as the backend knows them."""
    # Narrow floats are rounded after each operation, in fusions too.
    wanted = {"xla_backend_optimization_level": 0, "xla_allow_excess_precision": False}
    if current.platform() != "cpu":
        # Without fusions a program takes twice as long to compile on a CPU, where the code of a fusion decides already.
        wanted |= {"xla_disable_hlo_passes": "fusion"}
    return {name: value for name, value in wanted.items() if is_known({name: value})}


def as_double(x: Any) -> Any:
    return jnp.asarray(x, jnp.promote_types(x.dtype, np.float64)) if is_float(x) else x


def unit_of(x: Any) -> float:
    """The relative unit in the last place; 0 of whole numbers."""
    return float(jnp.finfo(x.dtype).eps) if is_float(x) else 0.0


def largest_unit(jaxpr: _jax.Jaxpr) -> float:
    """The largest unit of the values that are computed."""
    return max((unit_of(v.aval) for eqn in _jax.equations_in(jaxpr) for v in eqn.outvars), default=0.0)


def nudged(x: Any, draw: np.random.Generator, unit: float) -> Any:
    """Floats that differ by `unit`, or by their own in the last place, up or down; whole numbers are exact."""
    if not is_float(x):
        return x
    wide = host_array(x).astype(jnp.promote_types(x.dtype, np.float64))
    signs = draw.choice([-1.0, 1.0], wide.shape) * (wide != np.round(wide))
    return jax.device_put((wide * (1 + signs * max(unit, unit_of(x)))).astype(x.dtype), getattr(x, "sharding", None))


def largest(*measured: Mapping[str, Mismatch]) -> dict[str, Mismatch]:
    """Of each result the largest difference."""
    found: dict[str, Mismatch] = {}
    for name, d in itertools.chain(*(results.items() for results in measured)):
        found[name] = max(found.get(name, d), d, key=lambda d: d.error)
    return found
