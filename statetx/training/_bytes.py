"""Arrays of small dtypes that tensorstore, by which orbax writes arrays, does not have: their entries are saved as
bytes.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._digest import on_device


def is_writable(dtype: Any) -> bool:
    """Whether arrays of a dtype are saved unchanged."""
    import tensorstore  # orbax needs it, and is itself optional

    if jnp.issubdtype(dtype, jax.dtypes.extended):
        return True  # orbax saves the words of keys
    try:
        tensorstore.dtype(dtype)
    except ValueError:  # in 0.1.86 uint2, uint4, float8_e4m3, and NumPy's float128
        return False
    return True


def encode(x: Any) -> Any:
    """The entries of an array, of at most 8 bits each, as uint8 with the same sharding."""
    return _converted(x, np.dtype(np.uint8)) if isinstance(x, jax.Array) else x.view(np.uint8)


def decode(x: Any, dtype: Any) -> Any:
    """The inverse of `encode`."""
    return _converted(x, dtype) if isinstance(x, jax.Array) else x.view(dtype)


def _converted(x: jax.Array, dtype: Any) -> jax.Array:
    return jax.device_put(_convert(on_device(x), dtype), x.sharding)


@functools.partial(jax.jit, static_argnums=1)
def _convert(x: jax.Array, dtype: Any) -> jax.Array:
    if jnp.issubdtype(x.dtype, jnp.integer) and jnp.issubdtype(dtype, jnp.integer):
        return x.astype(dtype)  # of different sizes in the device's memory, so that no bits can be cast
    return jax.lax.bitcast_convert_type(x, dtype)
