"""Arrays in checkpoints: a checksum of their values, and bytes for small dtypes.

The checksum is the same for every sharding. tensorstore, by which orbax writes arrays, lacks some small dtypes: their
entries are saved as bytes.
"""

from __future__ import annotations

import functools
import math
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def digest(x: Any) -> int:
    """A checksum of the values, independent of the sharding: it is computed before saving and after restoring
    elsewhere.
    """
    if not isinstance(x, jax.Array):
        return zlib.crc32(np.asarray(x).tobytes())
    return int(mixed_sum(on_device(x)))


def on_device(x: jax.Array) -> jax.Array:
    """Move an array from host memory to the default memory of its devices, so that they can compute with it."""
    # All devices of a sharding are of one kind, so any of them tells the default.
    default = next(iter(x.sharding.device_set)).default_memory().kind
    return x if x.sharding.memory_kind in (None, default) else jax.device_put(x, x.sharding.with_memory_kind(default))


@jax.jit
def mixed_sum(x: jax.Array) -> jax.Array:
    """The sum, modulo 2**32, of the words of `x`, each offset by its position and mixed by MurmurHash3's finalizer
    (Appleby, 2008).

    Such a sum does not depend on the order, and so not on how `x` is sharded.
    """
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if jnp.iscomplexobj(x):
        return 3 * mixed_sum(x.real) + mixed_sum(x.imag)
    if x.dtype == bool or jnp.dtype(x.dtype).name.startswith(("int4", "uint4", "int2", "uint2", "float4")):
        x = x.astype(jnp.float32)  # injective: float32 has every value of these types

    # As integers of at most 32 bits: the values' bits rather than the values, so that NaNs and signed zeros count, too.
    # A wider dtype gives one more axis, of two words.
    words = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * min(x.dtype.itemsize, 4)}")).astype(jnp.uint32)

    # Add a multiple of each word's position in row-major order, so that a permutation of values changes the sum. The
    # factor is odd, so different positions modulo 2**32 have different offsets.
    for axis in range(words.ndim):
        stride = jnp.uint32(0x9E3779B9 * math.prod(words.shape[axis + 1 :]) % 2**32)
        words += stride * jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis)

    # Each line is a bijection of words, so a change of one word always changes the sum (decision 26).
    words = (words ^ (words >> 16)) * jnp.uint32(0x85EBCA6B)
    words = (words ^ (words >> 13)) * jnp.uint32(0xC2B2AE35)
    return jnp.sum(words ^ (words >> 16), dtype=jnp.uint32)


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
