"""Slots: memory for some carries, whose free part holds residuals of steps.

The slots are arrays of rows, *pools*: one for each type among the leaves of the carry. A carry takes a row of a pool
for each leaf of that type; carries fill a pool from the front, slot by slot, and residuals from the back, step by step.
A leaf of the carry may be stored in an exact format, eight 0s and 1s to a byte: its pool then has rows of codes. A
policy knows the results of a step, but not the carry before the first one: that belongs to slot 0, and is read from the
caller's array.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .. import _jax
from .._cached import cached_property
from .._remat.stored import StoredType
from .._tree import is_key, num_bytes

_UNBOUNDED = 2**31 - 1
_MISFIT = 1000  # times the bytes of a residual, if it fits into no row


class _Pack(NamedTuple):
    """Residuals that have no rows of their own: raveled, one after the other, in whole rows of one pool.

    Attributes:
        indices: of the residuals.
        pool, num_rows: where, and how many rows they take.
    """

    indices: list[int]
    pool: int
    num_rows: int


class _ResidualLayout(NamedTuple):
    """Places of the residuals of a step.

    Attributes:
        places: pool and row of each; None for one in the pack, and for one without bytes.
        rows: how many rows they take, by pool.
    """

    places: list[tuple[int, int] | None]
    rows: list[int]
    pack: _Pack | None


class CarryRow:
    """Row that stores a leaf of the carry.

    Args:
        aval: its type.
        format: an exact format, which is taken if it is smaller; None to store the leaf unchanged.
        is_exact_first: whether the format restores the leaf before the first step, too, as for booleans.
    """

    def __init__(self, aval: Any, format: StoredType | None = None, is_exact_first: bool = False):
        self.aval = aval
        self.format = None if format is None or not format.shrinks(aval) else format
        self.is_exact_first = is_exact_first or aval.dtype == bool

    @cached_property
    def stored(self) -> Any:
        """The type of the stored leaf."""
        return self.aval if self.format is None else _type_of(self.format.encode, self.aval)

    def encode(self, x: Any) -> Any:
        """Encode the leaf for storage."""
        return x if self.format is None else self.format.encode(x)

    def decode(self, codes: Any, step: Any, first: Any) -> Any:
        """The inverse of `encode`; `first` is the leaf before step 0."""
        if self.format is None:
            return codes
        x = self.format.decode(codes, jax.typeof(first))
        return x if self.is_exact_first else jax.lax.select(step == 0, first, x)


def _type_of(encode: Callable, aval: Any) -> Any:
    # Traced, for the sharding in the type.
    jaxpr, _ = _jax.stage(lambda x: [encode(x)], [aval], traced_for="scan", name="encode")
    return jaxpr.outvars[0].aval


class SlotMemory:
    """The pools for carries of some types, and for residuals if they fit.

    Args:
        num: how many carries there is room for.
        rows: of the carry's leaves.
        residual_avals: the types of the residuals of a step; None if the slots are to hold carries only.
    Attributes:
        leaves: for 0 to `num` free slots, how many steps can be reversed from the residuals that these hold (see
            `schedule`).
    """

    def __init__(self, num: int, rows: Sequence[CarryRow], residual_avals: Sequence[Any] | None = None):
        self.num = num
        self._residual_avals = list(residual_avals or ())
        self._rows = list(rows)
        carry_avals = [row.stored for row in self._rows]

        # Without residuals each leaf has a pool of its own.
        keys = [_type(a) if residual_avals is not None else i for i, a in enumerate(carry_avals)]
        pools = {key: i for i, key in enumerate(dict.fromkeys(keys))}
        self._pool_avals = [carry_avals[keys.index(key)] for key in pools]
        self._carry_places = [(pools[key], keys[:i].count(key)) for i, key in enumerate(keys)]
        self._carry_rows = [keys.count(key) for key in pools]

        layout = None if residual_avals is None else self._layout(pools)
        self._residual_places, self._residual_rows, self._pack = layout or _ResidualLayout([], [0] * len(pools), None)
        self.leaves = tuple([self._leaf(s) if layout else 1 for s in range(num + 1)])

    def _layout(self, pools: dict[Any, int]) -> _ResidualLayout | None:
        """Residuals in rows of the pools of their types, others in a pack; None if they do not fit."""
        rows, places = [0] * len(self._pool_avals), []
        for aval in self._residual_avals:
            # A carry with one scalar among arrays has room for one scalar of a step. Any number fits into a row of the
            # arrays.
            is_packed = _jax.is_link(aval) or (aval.ndim == 0 and not is_key(aval))
            pool = None if is_packed else pools.get(_type(aval))
            places.append(None if pool is None else (pool, rows[pool]))
            if pool is not None:
                rows[pool] += 1
        unplaced = [i for i, aval in enumerate(self._residual_avals) if places[i] is None and not _jax.is_link(aval)]
        pack = self._packed(unplaced, rows) if unplaced else None
        if pack is not None:
            rows[pack.pool] += pack.num_rows
        return None if unplaced and pack is None else _ResidualLayout(places, rows, pack)

    def _leaf(self, slots: int) -> int:
        """The last step keeps nothing: it is differentiated at once."""
        rows = zip(self._carry_rows, self._residual_rows, strict=True)
        return 1 + min([slots * free // needed for free, needed in rows if needed], default=_UNBOUNDED - 1)

    def _packed(self, indices: list[int], rows: Sequence[int]) -> _Pack | None:
        """Find places for these residuals, whatever their types, beside `rows` of others in each pool; None if there
        are none.
        """
        avals = [self._residual_avals[i] for i in indices]

        def holds(pool: int) -> bool:
            row = self._pool_avals[pool]
            return row.size > 0 and all(_can_hold(row, aval) for aval in avals)

        pools = [i for i in range(len(self._pool_avals)) if holds(i)]
        if not pools:
            return None
        # The pool whose slots they fill the least.
        num_rows = {
            i: math.ceil(sum(_entries(self._pool_avals[i], a) for a in avals) / self._pool_avals[i].size) for i in pools
        }
        best = min(pools, key=lambda i: (num_rows[i] + rows[i]) / self._carry_rows[i])
        return _Pack(indices, best, num_rows[best])

    # -- carries --

    def make(self) -> list:
        rows = zip(self._carry_rows, self._pool_avals, strict=True)
        return [_for_pool(_jax.empty(self.num * rows, aval)) for rows, aval in rows]

    def _from_pool(self, rows: Any, pool: int) -> Any:
        dtype = self._pool_avals[pool].dtype
        return jax.lax.bitcast_convert_type(rows, dtype) if dtype == jnp.bfloat16 else rows

    def read(self, pools: list, slot: Any, first: list) -> list:
        """The carry in a slot; `first` is the carry in slot 0."""
        places = zip(self._rows, self._carry_places, first, strict=True)
        return [row.decode(self._row(pools, i, slot * self._carry_rows[i] + n), slot, x) for row, (i, n), x in places]

    def write(self, pools: list, slot: Any, carry: list) -> list:
        pools = list(pools)
        for row, (i, n), x in zip(self._rows, self._carry_places, carry, strict=True):
            pools[i] = self._with_row(pools[i], slot * self._carry_rows[i] + n, row.encode(x))
        return pools

    def _row(self, pools: list, i: int, row: Any) -> Any:
        return self._from_pool(jax.lax.dynamic_index_in_dim(pools[i], row, 0, keepdims=False), i)

    def _with_row(self, pool: Any, row: Any, x: Any) -> Any:
        return jax.lax.dynamic_update_index_in_dim(pool, _for_pool(x), row, 0)

    # -- residuals --

    def _first_row(self, pool: int, step: Any) -> Any:
        """The first row of a step of the leaf, in one pool."""
        return self.num * self._carry_rows[pool] - (step + 1) * self._residual_rows[pool]

    def keep(self, pools: list, step: Any, residuals: list) -> list:
        """Write the residuals of a leaf's step, by its number in the leaf."""
        pools = list(pools)
        for place, x in zip(self._residual_places, residuals, strict=True):
            if place is not None:
                i, n = place
                pools[i] = self._with_row(pools[i], self._first_row(i, step) + n, x)
        if self._pack is not None:
            indices, i, num_rows = self._pack
            first = self._first_row(i, step) + self._residual_rows[i] - num_rows
            rows = _ravel([residuals[n] for n in indices], self._pool_avals[i], num_rows)
            pools[i] = jax.lax.dynamic_update_slice_in_dim(pools[i], _for_pool(rows), first, 0)
        return pools

    def kept(self, pools: list, step: Any) -> list:
        """The residuals of a leaf's step."""
        residuals: list[Any] = [
            None if place is None else self._row(pools, place[0], self._first_row(place[0], step) + place[1])
            for place in self._residual_places
        ]
        if self._pack is not None:
            indices, i, num_rows = self._pack
            first = self._first_row(i, step) + self._residual_rows[i] - num_rows
            rows = self._from_pool(jax.lax.dynamic_slice_in_dim(pools[i], first, num_rows, 0), i)
            for n, x in zip(indices, _unravel(rows, [self._residual_avals[n] for n in indices]), strict=True):
                residuals[n] = x
        for n, aval in enumerate(self._residual_avals):
            if _jax.is_link(aval):
                residuals[n] = _jax.new_link(aval)
        return residuals


def _for_pool(rows: Any) -> Any:
    """Rows as pools hold them: XLA:CPU computes bfloat16 in float32, and would make a float32 copy of a pool."""
    return jax.lax.bitcast_convert_type(rows, jnp.uint16) if rows.dtype == jnp.bfloat16 else rows


def row_bytes(aval: Any, carry_avals: Sequence[Any]) -> int:
    """Approximate bytes of a residual in slots; too many for one that fits into no row."""
    if _jax.is_link(aval):
        return 0
    if any(_type(aval) == _type(a) for a in carry_avals):
        return num_bytes(aval)
    sizes = [_entries(a, aval) * a.dtype.itemsize for a in carry_avals if a.size and _can_hold(a, aval)]
    # One more, for rows that it does not fill.
    return min(sizes) + 1 if sizes else _MISFIT * num_bytes(aval) + 1


def _type(aval: Any) -> tuple:
    return aval.shape, aval.dtype, aval.sharding, _jax.varying_axes(aval)


def _can_hold(row: Any, aval: Any) -> bool:
    """Whether values of a type can be stored in rows of another one, whose shape it has not."""
    # The shape of an array that is split over devices by its type cannot be changed.
    if any(axis is not None for a in (row, aval) for axis in a.sharding.spec.partitions):
        return False
    if _jax.varying_axes(row) != _jax.varying_axes(aval):
        return False
    if any(jnp.issubdtype(a.dtype, jax.dtypes.extended) for a in (row, aval)):
        return False
    # The bits of a number are a number of another type; JAX cannot cast booleans and complex numbers so.
    numbers = [jnp.issubdtype(a.dtype, jnp.integer) or jnp.issubdtype(a.dtype, jnp.floating) for a in (row, aval)]
    return row.dtype == aval.dtype or all(numbers) or (numbers[0] and aval.dtype == bool)


def _entries(row: Any, aval: Any) -> int:
    """Number of entries of a row's type that a residual takes. A boolean takes one: zero or one."""
    return aval.size if aval.dtype == bool else -(-aval.size * aval.dtype.itemsize // row.dtype.itemsize)


def _ravel(values: list, row: Any, num_rows: int) -> Any:
    flat = jnp.concatenate([_as_entries(x, row.dtype) for x in values])
    flat = jnp.pad(flat, (0, num_rows * row.size - flat.size))
    return flat.reshape(num_rows, *row.shape)


def _unravel(rows: Any, avals: list) -> list:
    flat, values, start = rows.ravel(), [], 0
    for aval in avals:
        num = _entries(rows, aval)
        values.append(_from_entries(flat[start : start + num], aval))
        start += num
    return values


def _as_entries(x: Any, dtype: Any) -> Any:
    if dtype in (x.dtype, bool) or x.dtype == bool:
        return x.astype(dtype).ravel()
    flat, ratio = x.ravel(), dtype.itemsize // x.dtype.itemsize
    if ratio > 1:  # several entries of `x` in one
        flat = jnp.pad(flat, (0, -flat.size % ratio)).reshape(-1, ratio)
    return jax.lax.bitcast_convert_type(flat, dtype).ravel()


def _from_entries(flat: Any, aval: Any) -> Any:
    if aval.dtype in (flat.dtype, bool):
        return flat.reshape(aval.shape).astype(aval.dtype)
    ratio = aval.dtype.itemsize // flat.dtype.itemsize
    if ratio > 1:
        flat = flat.reshape(-1, ratio)
    return jax.lax.bitcast_convert_type(flat, aval.dtype).ravel()[: aval.size].reshape(aval.shape)
