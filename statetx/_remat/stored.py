"""Stored types: how a residual is stored in fewer bits between the forward and the backward pass.

A `StoredType` encodes a value as smaller arrays and decodes it again. It is a frozen value, so that it can be part of a policy and of the parameters
of an equation. All formats work along the last axis, so that they commute with loops and sharding along the others; a scalar counts as
an axis of one entry. If the type splits the last axis over devices (an explicit mesh), each device's part is encoded by itself, and
the stored arrays are split in the same way.

- ``bits``: values that are 0 or 1, eight in a byte, the first in the lowest bit.
- ``bfloat16``, ``float8_e4m3fn``: floats rounded to nearest even. float8 has no infinity: larger values become its largest.
- ``int8``: floats as integers times a scale, one scale for each `BLOCK` entries, rounded up or down at random: without bias, whatever is
  summed (Chen et al., ActNN, ICML 2021). The key of the random numbers is a sum over the bits of the value, and part of what is stored: a value that is
  computed again may differ in its last bit, and is rounded with the key of the first time.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding

from .._errors import PolicyError
from .._text import suggestion
from .._tree import num_bytes

BLOCK = 128
"""Entries of the last axis that share a scale, as int8."""

NAMES = ("bits", "bfloat16", "float8_e4m3fn", "int8")


@dataclasses.dataclass(frozen=True, repr=False)
class StoredType:
    """A format for residuals, by name.

    Attributes:
        name: one of `NAMES`.
    """

    name: str

    @property
    def is_exact(self) -> bool:
        """Whether decoding gives the value back, for the values that it is for."""
        return self.name == "bits"

    @property
    def has_key(self) -> bool:
        """Whether values are rounded at random. The key is then the last of the stored arrays."""
        return self.name == "int8"

    def shrinks(self, aval: Any) -> bool:
        """Whether values of a type become smaller in this format. Others are stored unchanged.

        Whether the values are 0 or 1, as ``bits`` needs, is not in the type.
        """
        *batch, length = aval.shape or (1,)
        # A symbolic size (jax.export) cannot be compared with others: the last one decides which format is smaller.
        is_known = all(isinstance(n, int) for n in (batch if self.name == "int8" else ())) and isinstance(length, int)
        if not is_known or 0 in aval.shape or jnp.issubdtype(aval.dtype, jax.dtypes.extended):
            return False
        is_real = not jnp.issubdtype(aval.dtype, jnp.complexfloating)
        is_storable = is_real if self.name == "bits" else jnp.issubdtype(aval.dtype, jnp.floating)
        row = jax.ShapeDtypeStruct((length // _num_parts(aval),), aval.dtype)  # of one part
        compared = aval if self.has_key else row  # all rows share a key
        return bool(is_storable) and num_bytes(compared) > self.nbytes(compared)

    def types(self, aval: Any) -> list[jax.ShapeDtypeStruct]:
        """The types of the arrays that a value of this type is stored as."""
        *batch, length = aval.shape or (1,)
        if self.name == "bits":
            return [jax.ShapeDtypeStruct((*batch, _num_blocks(length, 8, _num_parts(aval))), jnp.uint8)]
        codes = jax.ShapeDtypeStruct((*batch, length), jnp.dtype(self.name))
        if self.name != "int8":
            return [codes]
        num_scales = _num_blocks(length, BLOCK, _num_parts(aval))
        scales = jax.ShapeDtypeStruct((*batch, num_scales), _scale_dtype(aval.dtype))
        return [codes, scales, jax.ShapeDtypeStruct((), jnp.uint32)]

    def nbytes(self, aval: Any) -> int:
        """The bytes that a value of this type is stored in."""
        return num_bytes(self.types(aval))

    def encode(self, x: jax.Array, key: jax.Array | None = None) -> list[jax.Array]:
        """Encode a value as arrays of the types `types`.

        Args:
            x: the value.
            key: a uint32 scalar, for random rounding; by default `key_of` the value.
        """
        x = x.reshape(x.shape or (1,))
        if self.name == "bits":
            return [_pack(x)]
        if self.name == "int8":
            key = self.key_of(x) if key is None else key
            return [*_quantize(x, key), key]
        largest = float(jnp.finfo(self.name).max)
        # float8 has no infinity, so a larger value would become nan. `clip` lets nan pass.
        return [(jnp.clip(x, -largest, largest) if self.name == "float8_e4m3fn" else x).astype(self.name)]

    def key_of(self, x: jax.Array) -> jax.Array:
        """A key for random rounding from all bits of a value, so that another value, in another step of a training, gets another one."""
        words = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
        return lax.reduce(words, jnp.uint32(0), lax.add, tuple(range(words.ndim)))

    def decode(self, stored: Sequence[jax.Array], aval: Any) -> jax.Array:
        """Decode a value of this type from the arrays that `encode` made."""
        length = aval.shape[-1] if aval.shape else 1
        if self.name == "bits":
            x = _unpack(stored[0], length, _num_parts(aval)).astype(aval.dtype)
        elif self.name == "int8":
            codes, scales, _ = stored
            x = _dequantize(codes, scales, _num_parts(aval)).astype(aval.dtype)
        else:
            x = stored[0].astype(aval.dtype)
        return x.reshape(aval.shape)

    def differs(self, x: jax.Array) -> jax.Array:
        """Where an exact format does not give the value back: entries that are neither 0 nor 1."""
        return jnp.zeros(x.shape, bool) if x.dtype == bool else (x != 0) & (x != 1)

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return repr(self.name)


BITS = StoredType("bits")


def as_stored_type(name: Any, what: str) -> StoredType:
    """Convert an argument of users.

    Args:
        name: the name of a format, or a `StoredType`.
        what: the function and its parameter, for messages.
    """
    if isinstance(name, StoredType):
        return name
    if not isinstance(name, str) or name not in NAMES:
        hint = suggestion(name, NAMES) if isinstance(name, str) else ""
        raise PolicyError(f"{what} must be one of {', '.join(map(repr, NAMES))}, got {name!r}.{hint}")
    return StoredType(name)


# -- blocks of the last axis -----------------------------------------------------------------------------------------


def _num_parts(aval: Any) -> int:
    """In how many parts the type splits the last axis over devices."""
    sharding = getattr(aval, "sharding", None)
    if not isinstance(sharding, NamedSharding) or len(sharding.spec) != len(aval.shape) or not aval.shape:
        return 1
    axes = sharding.spec[-1] if isinstance(sharding.spec[-1], tuple) else (sharding.spec[-1],)
    return math.prod([sharding.mesh.shape[axis] for axis in axes if axis in sharding.mesh.explicit_axes])


def _num_blocks(length: int, size: int, num_parts: int) -> int:
    return num_parts * -(-(length // num_parts) // size)


def _padded(x: jax.Array, size: int, num_parts: int) -> jax.Array:
    """The array as blocks, ``[..., n]`` to ``[..., number of blocks, size]``, with zeros at the end of each part."""
    *batch, length = x.shape
    num_blocks = _num_blocks(length, size, num_parts)
    if num_blocks * size != length:
        parts = x if num_parts == 1 else x.reshape(*batch, num_parts, length // num_parts)
        more = (num_blocks * size - length) // num_parts
        parts = lax.pad(parts, x.dtype.type(0), [*[(0, 0, 0)] * (parts.ndim - 1), (0, more, 0)])
        x = parts.reshape(*batch, num_blocks * size)
    return x.reshape(*batch, num_blocks, size)


def _joined(blocks: jax.Array, length: int, num_parts: int) -> jax.Array:
    """The inverse of `_padded`."""
    *batch, num_blocks, size = blocks.shape
    x = blocks.reshape(*batch, num_blocks * size)
    if num_parts == 1 or num_blocks * size == length:
        return x[..., :length]
    parts = x.reshape(*batch, num_parts, num_blocks * size // num_parts)
    return parts[..., : length // num_parts].reshape(*batch, length)


# -- bits ------------------------------------------------------------------------------------------------------------


def _pack(x: jax.Array) -> jax.Array:
    is_set = x if x.dtype == bool else x != 0  # a comparison of a boolean with 0 raises under strict promotion
    bits = _padded(is_set.astype(jnp.uint8), 8, _num_parts(jax.typeof(x)))
    packed = bits[..., 0]
    for k in range(1, 8):  # unlike a sum over the axis, one elementwise operation
        packed = packed | (bits[..., k] << jnp.uint8(k))
    return packed


def _unpack(packed: jax.Array, length: int, num_parts: int) -> jax.Array:
    shifts = jnp.arange(8, dtype=jnp.uint8).reshape((1,) * packed.ndim + (8,))
    bits = (packed[..., None] >> shifts) & jnp.uint8(1)
    return _joined(bits, length, num_parts)


# -- int8 ----------------------------------------------------------------------------------------------------------
# A block x is stored as q s with s = max |x| / 127 and q = floor(x / s + u), u uniform on [0, 1). Then q is within -127 .. 127, and
# E[q] = x / s, so that E[q s] = x.


def _scale_dtype(dtype: Any) -> Any:
    return jnp.float64 if jnp.dtype(dtype) == jnp.dtype("float64") else jnp.float32


def _quantize(x: jax.Array, key: jax.Array) -> list[jax.Array]:
    num_parts = _num_parts(jax.typeof(x))
    blocks = _padded(x.astype(_scale_dtype(x.dtype)), BLOCK, num_parts)
    largest = jnp.abs(blocks).max(-1, keepdims=True)
    scales = jnp.where(largest == 0, 1, largest * (1 / 127)).astype(
        blocks.dtype
    )  # nan and infinity stay: the block is nan

    codes = jnp.floor(blocks / scales + _uniform(key, blocks.shape).astype(blocks.dtype))
    codes = jnp.clip(codes, -127, 127).astype(jnp.int8)  # x / s may be rounded up
    return [_joined(codes, x.shape[-1], num_parts), scales[..., 0]]


def _dequantize(codes: jax.Array, scales: jax.Array, num_parts: int) -> jax.Array:
    blocks = _padded(codes, BLOCK, num_parts).astype(scales.dtype) * scales[..., None]
    return _joined(blocks, codes.shape[-1], num_parts)


def _uniform(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Numbers of [0, 1) from a key and their positions. A hash, as good random numbers would cost more than the rounding."""
    position = lax.iota(jnp.uint32, _size(shape)).reshape(shape)
    return (_mix(position ^ _mix(key)) >> jnp.uint32(8)).astype(jnp.float32) * jnp.float32(2**-24)


def _size(shape: Sequence[int]) -> int:
    size = 1
    for n in shape:
        size *= n
    return size


def _mix(x: jax.Array) -> jax.Array:
    """A bijection of uint32 whose output bits depend on all input bits (the finalizer of MurmurHash3)."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        x = (x ^ (x >> jnp.uint32(shift))) * jnp.uint32(factor)
    return x
