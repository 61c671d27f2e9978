"""What is shared between calls that are alike, in numbers: `cache_info` and `clear_cache`."""

from __future__ import annotations

from typing import NamedTuple

from ._equations.structure import table
from ._text import format_table
from ._typing import public


class Counts(NamedTuple):
    """How a cache did.

    Attributes:
        hits, misses: how often it had, and had not, what was asked for.
        size, max_size: entries it holds, and may hold before the least recently used ones go.
    """

    hits: int
    misses: int
    size: int
    max_size: int


@public
class CacheInfo(NamedTuple):
    """What `cache_info` returns; prints as a table.

    Attributes:
        structures: programs that were differentiated, lowered and compiled for another call of the same structure.
        transforms: hits and misses in `structures` by the transform that asked.
    """

    structures: Counts
    transforms: dict[str, tuple[int, int]]

    def __str__(self) -> str:
        rows = [["structures", *map(str, self.structures)]]
        rows += [[f"  {name}", str(hits), str(misses), "", ""] for name, (hits, misses) in self.transforms.items()]
        columns = ["shared", "hits", "misses", "kept", "at most"]
        return format_table(columns, rows, right=columns[1:])


def cache_info() -> CacheInfo:
    """Say how often work was shared between calls that are alike.

    A transform runs your Python on every call. What comes after it, differentiation, lowering, compilation, is done once
    for all calls whose equations are the same, such as the layers of a model or the turns of a loop around ``scan``. Many
    misses where you expected hits mean that the programs differ: in a shape, a type, a Python number.

    Example:
        >>> import jax.numpy as jnp, statetx
        >>> statetx.clear_cache()
        >>> for scale in (1.0, 2.0, 3.0):
        ...     y, _ = statetx.scan(lambda c, x: (c + jnp.sin(x), None), 0.0, scale * jnp.ones(5))
        >>> print(statetx.cache_info())
        shared      hits  misses  kept  at most
        ----------  ----  ------  ----  -------
        structures     2       1     1     2048
          scan         2       1
    """
    structures = Counts(table.hits, table.misses, len(table), table.size)
    return CacheInfo(structures, table.by_transform())


def clear_cache() -> None:
    """Forget all that is shared, and count from zero. JAX's own caches are left: see ``jax.clear_caches``."""
    table.clear()
