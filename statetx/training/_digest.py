"""A checksum of an array's values, the same for every sharding."""

from __future__ import annotations

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
