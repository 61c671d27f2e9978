"""Statistics of the cache that calls of equal structure share: `cache_info`, `clear_cache`."""

from __future__ import annotations

from typing import NamedTuple

from ._equations.structure import table
from ._tables import Cell, Column, Table
from ._typing import public


class Counts(NamedTuple):
    """Statistics of a cache.

    Attributes:
        hits, misses: numbers of lookups that found an entry, and that did not.
        size, max_size: number of entries, and the number above which the least recently used are evicted.
    """

    hits: int
    misses: int
    size: int
    max_size: int


@public
class CacheInfo(NamedTuple):
    """The result of `cache_info`; prints as a table.

    Attributes:
        structures: programs whose derivatives, lowering and compilation are shared by calls of equal structure.
        transforms: hits and misses in `structures`, by transform.
    """

    structures: Counts
    transforms: dict[str, tuple[int, int]]

    def __str__(self) -> str:
        rows = [["structures", *map(str, self.structures)]]
        rows += [[f"  {name}", str(hits), str(misses), "", ""] for name, (hits, misses) in self.transforms.items()]
        columns = [Column("shared"), *(Column(name, "right") for name in ("hits", "misses", "kept", "at most"))]
        return str(Table("", columns, [list(map(Cell, row)) for row in rows]))


def cache_info() -> CacheInfo:
    """Count how often calls of equal structure shared work.

    A transform runs your Python on every call. The work after that (differentiation, lowering, compilation) is done
    once for all calls with equal equations, such as the layers of a model or the iterations of a loop around ``scan``.
    Many misses where you expected hits mean that the programs differ: in a shape, a dtype, a Python number.

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
    """Empty the cache and reset its counts. JAX's own caches are left: see ``jax.clear_caches``."""
    table.clear()
