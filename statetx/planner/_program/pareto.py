"""Pareto fronts: what no other undercuts, or equals, in all criteria."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

T = TypeVar("T")

_BLOCK = 64  # rows


def undominated(items: Sequence[T], *criteria: Callable[[T], float]) -> list[T]:
    """The items on the front, by ascending first criterion; of equal ones the first."""
    return [items[i] for i in front(*(np.array([value(item) for item in items], float) for value in criteria))]


def front(first: np.ndarray, second: np.ndarray, *others: np.ndarray) -> np.ndarray:
    """The rows on the front of these criteria, by ascending first criterion; of equal ones the first row."""
    # In this order a row is dominated if an earlier one is at most as large in each criterion but the first.
    order = np.lexsort((*others[::-1], second, first))
    if not others:
        ordered = second[order]
        return order[np.concatenate([[True], ordered[1:] < np.minimum.accumulate(ordered)[:-1]])[: len(order)]]

    # In blocks: those of a block that stay drop most of the rows behind it.
    criteria = np.stack([second, *others])
    kept, rows = [order[:0]], order
    while len(rows):
        block, rows = rows[:_BLOCK], rows[_BLOCK:]
        block = block[~np.triu(_dominates(criteria, block, block), 1).any(0)]
        kept.append(block)
        rows = rows[~_dominates(criteria, block, rows).any(0)]
    return np.concatenate(kept)


def _dominates(criteria: np.ndarray, rows: np.ndarray, others: np.ndarray) -> np.ndarray:
    return np.logical_and.reduce(criteria[:, rows, None] <= criteria[:, None, others])
