"""Stored types: how a residual is stored in fewer bits between the passes.

A `StoredType` encodes a value as a smaller array and decodes it again. It is a frozen value, so that it can be part of
a policy and of the parameters of an equation. All formats work along the last axis, so that they commute with loops and
sharding along the others; a scalar counts as an axis of one entry. If the type splits the last axis over devices (an
explicit mesh), each device's part is encoded by itself, and the stored array is split in the same way.

- ``bits``: values that are 0 or 1, eight in a byte, the first in the lowest bit.
- ``bfloat16``, ``float8_e4m3fn``, ``float8_e5m2``: floats rounded to nearest even. Values beyond the largest of a
  float8 become its largest.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding

from .. import _jax
from .._equations.primitives import Runs, inner_jaxprs, row_of
from .._errors import PolicyError
from .._jax import Jaxpr, Literal
from .._text import suggestion
from .._tree import num_bytes

NAMES = ("bits", "bfloat16", "float8_e4m3fn", "float8_e5m2")


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

    def shrinks(self, aval: Any) -> bool:
        """Whether values of a type become smaller in this format. Others are stored unchanged.

        Whether the values are 0 or 1, as ``bits`` needs, is not in the type.
        """
        length = aval.shape[-1] if aval.shape else 1
        # A symbolic size (jax.export) cannot be compared with others: the last one decides which format is smaller.
        if not isinstance(length, int) or 0 in aval.shape or jnp.issubdtype(aval.dtype, jax.dtypes.extended):
            return False
        is_real = not jnp.issubdtype(aval.dtype, jnp.complexfloating)
        is_storable = is_real if self.name == "bits" else jnp.issubdtype(aval.dtype, jnp.floating)
        row = jax.ShapeDtypeStruct((length // _num_parts(aval),), aval.dtype)  # of one part
        return bool(is_storable) and num_bytes(row) > self.nbytes(row)

    def stored_type(self, aval: Any) -> jax.ShapeDtypeStruct:
        """The type of the array that a value of this type is stored as."""
        *batch, length = aval.shape or (1,)
        if self.name == "bits":
            return jax.ShapeDtypeStruct((*batch, _num_bytes_of_bits(length, _num_parts(aval))), jnp.uint8)
        return jax.ShapeDtypeStruct((*batch, length), jnp.dtype(self.name))

    def nbytes(self, aval: Any) -> int:
        """The bytes that a value of this type is stored in."""
        return num_bytes(self.stored_type(aval))

    def encode(self, x: jax.Array) -> jax.Array:
        """Encode a value as an array of the type `stored_type`."""
        x = x.reshape(x.shape or (1,))
        if self.name == "bits":
            return _pack(x)
        largest = float(jnp.finfo(self.name).max)
        # e4m3fn has no infinity, so that a larger value would become nan. `clip` lets nan pass.
        return (jnp.clip(x, -largest, largest) if self.name.startswith("float8") else x).astype(self.name)

    def decode(self, stored: jax.Array, aval: Any) -> jax.Array:
        """Decode a value of this type from the array that `encode` made."""
        length = aval.shape[-1] if aval.shape else 1
        x = _unpack(stored, length, _num_parts(aval)) if self.name == "bits" else stored
        return x.astype(aval.dtype).reshape(aval.shape)

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


# -- bits ------------------------------------------------------------------------------------------------------------


def _num_parts(aval: Any) -> int:
    """Number of shards along the last axis, by the type's sharding."""
    sharding = getattr(aval, "sharding", None)
    if not isinstance(sharding, NamedSharding) or len(sharding.spec) != len(aval.shape) or not aval.shape:
        return 1
    last = sharding.spec.partitions[-1]
    axes = last if isinstance(last, tuple) else (last,)
    return math.prod([sharding.mesh.shape[axis] for axis in axes if axis in sharding.mesh.explicit_axes])


def _num_bytes_of_bits(length: int, num_parts: int) -> int:
    return num_parts * -(-(length // num_parts) // 8)


def _pack(x: jax.Array) -> jax.Array:
    num_parts, (*batch, length) = _num_parts(jax.typeof(x)), x.shape
    is_set = x if x.dtype == bool else x != 0  # a comparison of a boolean with 0 raises under strict promotion
    bits, num_bytes = is_set.astype(jnp.uint8), _num_bytes_of_bits(length, num_parts)
    if 8 * num_bytes != length:  # zeros at the end of each part
        parts = bits if num_parts == 1 else bits.reshape(*batch, num_parts, length // num_parts)
        padding = (0, (8 * num_bytes - length) // num_parts, 0)
        parts = lax.pad(parts, np.uint8(0), [*[(0, 0, 0)] * (parts.ndim - 1), padding])
        bits = parts.reshape(*batch, 8 * num_bytes)
    bits = bits.reshape(*batch, num_bytes, 8)
    packed = bits[..., 0]
    for k in range(1, 8):  # unlike a sum over the axis, one elementwise operation
        packed = packed | (bits[..., k] << jnp.uint8(k))
    return packed


def _unpack(packed: jax.Array, length: int, num_parts: int) -> jax.Array:
    *batch, num_bytes = packed.shape
    shifts = jnp.arange(8, dtype=jnp.uint8).reshape((1,) * packed.ndim + (8,))
    bits = ((packed[..., None] >> shifts) & jnp.uint8(1)).reshape(*batch, 8 * num_bytes)
    if num_parts == 1 or 8 * num_bytes == length:
        return bits[..., :length]
    parts = bits.reshape(*batch, num_parts, 8 * num_bytes // num_parts)
    return parts[..., : length // num_parts].reshape(*batch, length)


# -- proofs that a value is 0 or 1 -----------------------------------------------------------------------------------

# The result of a comparison, converted, moved, multiplied, or chosen from others that are. The proof goes forward
# through the equations and errs on one side: a value that it does not prove may be 0 or 1 all the same.


def are_bits(eqn: Any, operands: Sequence[bool]) -> list[bool]:
    """Tell for each result of an equation if it is proved to be 0 or 1; `operands` says the same of its operands."""
    return [is_bool(v.aval) or b for v, b in zip(eqn.outvars, _proved(eqn, operands), strict=True)]


def of_steps(jaxpr: Jaxpr, num_consts: int, num_carry: int, operands: Sequence[bool]) -> tuple[list[bool], list[bool]]:
    """Tell for each input and output of a loop's step if it is proved to be 0 or 1 in every step; `operands` says
    it of the loop's operands.

    By induction: of the carries that are 0 or 1 before the first step, the largest set that a step keeps so.
    """
    inputs, carries = list(operands), slice(num_consts, num_consts + num_carry)
    while True:
        outs = _outputs(jaxpr, inputs)
        stable = [a and b for a, b in zip(inputs[carries], outs, strict=False)]
        if stable == inputs[carries]:
            return inputs, outs
        inputs[carries] = stable


def is_bits(atom: Any) -> bool:
    """Whether a literal is 0 or 1, or a variable is boolean. -0.0 is another number, whose sign a bit would lose."""
    if isinstance(atom, Literal):
        value = np.asarray(atom.val)
        return value.dtype.kind in "biuf" and bool(np.all(((value == 0) & ~np.signbit(value)) | (value == 1)))
    return is_bool(atom.aval)


def is_bool(aval: Any) -> bool:
    return getattr(aval, "dtype", None) == np.dtype(bool)


def _proved(eqn: Any, operands: Sequence[bool]) -> list[bool]:
    name, num = eqn.primitive.name, len(eqn.outvars)
    row = row_of(eqn)
    if row.forwards and num > 1:  # `optimization_barrier`, `device_put`: each result is one operand
        return list(operands) if num == len(operands) else [False] * num
    if row.bits is not None:  # the maximum of no entries is infinite
        return [all(operands[row.bits]) and all(getattr(v.aval, "size", 0) for v in eqn.invars)] * num
    if name == "integer_pow":
        return [operands[0] and eqn.params["y"] > 0]
    if name == "sub":  # 1 - x
        minuend = eqn.invars[0]
        return [operands[1] and isinstance(minuend, Literal) and bool(np.all(np.asarray(minuend.val) == 1))]

    jaxprs = inner_jaxprs(eqn)
    if not jaxprs:
        return [False] * num
    if row.runs is Runs.BRANCH:
        branches = [_outputs(jaxpr, operands[1:]) for jaxpr in jaxprs]
        return [all(bits) for bits in zip(*branches, strict=True)]
    if name == "scan":
        num_consts, num_carry = _jax.scan_counts(eqn)
        inputs, outs = of_steps(jaxprs[0], num_consts, num_carry, operands)
        # The last carry may be the first.
        return [*inputs[num_consts : num_consts + num_carry], *outs[num_carry:]]
    return _outputs(jaxprs[0], operands) if len(jaxprs[0].invars) == len(operands) else [False] * num


def _outputs(jaxpr: Jaxpr, inputs: Sequence[bool]) -> list[bool]:
    read = reader(jaxpr, inputs)
    return [read(v) for v in jaxpr.outvars]


def reader(jaxpr: Jaxpr, inputs: Sequence[bool] = ()) -> Callable[[Any], bool]:
    """A function that says whether a variable or literal of a program is proved to be 0 or 1, given this of its first
    inputs.
    """
    env = dict(zip(jaxpr.invars, inputs, strict=False))

    def read(atom: Any) -> bool:
        return is_bits(atom) or (not isinstance(atom, Literal) and env.get(atom, False))

    for eqn in jaxpr.eqns:
        env.update(zip(eqn.outvars, are_bits(eqn, [read(v) for v in eqn.invars]), strict=True))
    return read
