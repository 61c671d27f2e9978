"""`map`: apply a function to one element after the other."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp

from .. import _jax
from .._frames.foreign import held_by_libraries, undo_changes
from .._lift.carry import leaf_names
from .._lift.options import check_whole, with_checked_options
from .._lift.rules import Rules
from .._lift.wrapper import check_callable
from .._loops.strategy import Strategy
from .._tree import partition
from .scan import refuse_divided, refuse_states, scan
from .vmap import vmap

X = TypeVar("X")
Y = TypeVar("Y")


@_jax.api_boundary
@with_checked_options(
    {"length": "xs has the elements", "in_axes": "use statetx.vmap"},
    fix="several arrays are one argument, a pytree: statetx.map(lambda elements: f(*elements), (xs, ys)).",
)
def map(
    f: Callable[[X], Y],
    xs: X,
    *,
    batch_size: int | None = None,
    checkpoint: Strategy | int | tuple[int, ...] | Literal["auto"] | None = None,
    progress: bool = False,
) -> Y:
    """Apply a function to each element of the leading axis of `xs`, one after the other; it may read and write states.

    As ``jax.lax.map``: a `scan` without a carry. States that the function writes are carried from one element to the
    next.

    Args:
        f: called with one element.
        xs: a pytree of arrays with a leading axis of equal length. States are mapped by `scan` with ``states=``.
        batch_size: number of elements to process at a time by `vmap`, as in ``jax.lax.map``, 0 for all; states then
            follow the rules of `vmap`.
        checkpoint: how to store less for the gradient of the loop, as in `scan`.
        progress: whether to show a progress bar, as in `scan`.

    Returns:
        The outputs, stacked along a new leading axis.

    Raises:
        StateValueError: `xs` holds states.

    Source:
        ``jax.lax.map``.

    Example:
        >>> import jax.numpy as jnp, statetx
        >>> total = statetx.State(jnp.zeros(()))
        >>> def running_sum(x):
        ...     total.value += x
        ...     return total.value
        >>> statetx.map(running_sum, jnp.arange(4.0))
        Array([0., 1., 3., 6.], dtype=float32)
    """

    check_callable("map", f, "a callable", "the function comes first: map(f, xs)")
    refuse_states(Rules("map", None, f, ()), xs, "scan(lambda carry, x: (carry, f(x)), None, xs, ")

    def loop(f: Callable, xs: Any) -> Any:
        @functools.wraps(f, updated=())  # the name in messages and progress bars
        def step(carry: None, x: Any) -> tuple[None, Any]:
            return carry, f(x)

        return scan(step, None, xs, checkpoint=checkpoint, progress=progress)[1]

    if batch_size is None:
        return loop(f, xs)
    check_whole("map", "batch_size", batch_size, 0)
    lengths = {len(x) for x in jax.tree.leaves(xs)}
    if batch_size and len(lengths) != 1:  # the scan raises the error
        return loop(f, xs)
    batched, length = vmap(f), max(lengths, default=0)
    if not batch_size or 0 < length < batch_size:
        return batched(xs)
    leaves, xs_part = partition(xs)
    refuse_divided("map", leaves, lambda: [f"xs{path}" for path in leaf_names(xs_part)])
    # As in `jax.lax.map`: the elements that fill no batch are one smaller batch at the end.
    num_batched = length // batch_size * batch_size
    batches = jax.tree.map(lambda x: x[:num_batched].reshape(-1, batch_size, *x.shape[1:]), xs)
    held = held_by_libraries()
    ys = jax.tree.map(lambda y: y.reshape(-1, *y.shape[2:]), loop(batched, batches))
    if num_batched == length:
        return ys
    undo_changes(held)  # haiku's modules get the same names again
    last_ys = batched(jax.tree.map(lambda x: x[num_batched:], xs))
    return jax.tree.map(lambda a, b: jnp.concatenate([a, b]), ys, last_ys)
