"""`chunked`: compute a loss in chunks along an axis, so that one chunk of its largest values exists at a time.

The chunks are the parts of a `microbatch` whose batch may have any axis. A scalar loss is differentiated chunk by chunk
in the forward pass (`statetx._loops.accumulated`), so that no chunk runs twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .._errors import StaticArgumentError
from .._lift.batch import Batch, batch_along
from .._lift.options import keeps_type, transform
from .._lift.wrapper import name_of
from .._text import brief
from .._tree import whole_number
from .._typing import Filter, PyTree
from .microbatch import Partwise


@keeps_type
@transform({"chunk_size": "give size=", "num_chunks": "give size=length // num_chunks", "in_axes": "give axis="})
def chunked(
    loss: Callable[..., Any] | None = None,
    axis: int | Sequence[int | None] = 0,
    size: int = 1024,
    *,
    reduce: PyTree = None,
    weight: Callable[..., Any] | None = None,
    states: Mapping[Filter, Any] | None = None,
    interleave: bool | None = None,
    accumulate: Any = "float32",
) -> Callable[..., Any]:
    """Compute a loss in chunks along an axis of its arguments, forward and backward, one chunk at a time.

    For a cross entropy over a large vocabulary, whose logits are the largest array of a language model: the product
    with the embedding belongs into `loss`, and the axis counts tokens. A scalar loss is differentiated chunk by chunk
    in the forward pass, and the gradients are added up in one buffer: no logits are stored, and none are computed
    twice.

    Args:
        loss: a function whose outputs are arrays. It is called with chunks of its positional arguments. States, keyword
            arguments and its closure are whole for every chunk, such as the embedding.
        axis: the axis of the chunks in every array among the positional arguments; or for each positional argument its
            axis, or None for one that is passed whole.
        size: elements of a chunk along the axis, at most. ``ceil(length / size)`` chunks, whose sizes differ by at most
            one. A length of 0 is one chunk.
        reduce: how the outputs of the chunks are combined: ``"mean"`` (each chunk counts with its size), ``"sum"``, or
            for parts of the output as in `microbatch`. The default, a mean, is for losses that are one number, and for
            tuples and dicts.
        weight: called as `loss`, returns the weight of a chunk in a mean, in place of its size. A loss that is a mean
            over the true entries of a mask needs ``weight=lambda hidden, labels, mask: mask.sum()``.
        states: from filters to rules for the states that they select, as in `microbatch`.
        interleave: whether a chunk has every n-th element, as in `microbatch`; for an axis that is sharded.
        accumulate: the dtype for sums of half-precision outputs and gradients, as in `microbatch`.

    Returns:
        A function of the same arguments, with the same output to within rounding.

    State:
        Written states are carried from chunk to chunk, as in `scan`; a random state gives each chunk draws of its own.

    Memory:
        For a scalar loss of T tokens with V logits each: ``size * V`` logits and their cotangents in place of
        ``T * V``, and one gradient of each differentiated argument and state. Other outputs, and higher derivatives,
        have each chunk rematerialized: it is computed twice.

    Raises:
        StateValueError: the loss returns an array with dimensions, and `reduce` is not given.
        StaticArgumentError: `size` is not a whole number of at least 1, or `axis` does not fit the arguments.
        ValueError: an array lacks the axis, or lengths along it differ.

    Source:
        Hsu et al. 2024, "Liger Kernel", section 3.2 (fused linear cross entropy); here for any loss, by JAX's own
        derivatives.

    Example:
        >>> import jax, jax.numpy as jnp, statetx
        >>> embedding = statetx.Param(jnp.ones((8, 32_000)) / 8)
        >>> def loss(hidden, labels):
        ...     logits = hidden @ embedding.value
        ...     at_labels = jnp.take_along_axis(logits, labels[:, None], axis=-1)[:, 0]
        ...     return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - at_labels)
        >>> hidden, labels = jnp.ones((512, 8)), jnp.zeros(512, int)
        >>> whole, parts = loss, statetx.chunked(loss, axis=0, size=64)
        >>> bool(jnp.isclose(parts(hidden, labels), whole(hidden, labels)))
        True
        >>> size = lambda f: (
        ...     statetx.measure(statetx.value_and_grad(f, wrt=embedding), hidden, labels, gradient=False).temp_bytes
        ... )
        >>> size(parts) < size(whole) / 4
        True
    """
    ...


class Chunked(Partwise, made_by=chunked):
    """Made by `chunked`."""

    def __init__(self, fun: Callable, **options: Any):
        super().__init__(fun, **options)
        self._axis = _check_axis(self._options["axis"])
        self._size = _check_size(self._options["size"])

    def batch_of(self, args: tuple, kwargs: dict[str, Any]) -> Batch:
        call = f"chunked({name_of(self.__wrapped__)})"
        axes = (self._axis,) * len(args) if isinstance(self._axis, int) else self._axis
        if len(axes) != len(args):
            raise StaticArgumentError(
                f"{call}: axis={axes!r} has {len(axes)} entries, and there are {len(args)} positional arguments.\n"
                f"Fix: give each positional argument an axis, or None; arguments that every chunk needs whole may be "
                f"passed by keyword."
            )
        return batch_along(
            call,
            self.__wrapped__,
            {i: axis for i, axis in enumerate(axes) if axis is not None},
            args,
            kwargs,
            lacking="give None for it in axis=, or pass it by keyword, so that every chunk gets the whole argument; "
            "the size of a chunk is size=",
            differing="give the axis of each argument, as in axis=(0, None) for loss(hidden, embedding)",
            missing="pass it by position",
        )

    def num_parts(self, batch: Batch, args: tuple, kwargs: dict[str, Any]) -> int:
        return -(-batch.size // self._size)


def _check_axis(axis: Any) -> int | tuple[int | None, ...]:
    is_axis = lambda a: isinstance(a, int) and not isinstance(a, bool)
    if is_axis(axis):
        return axis
    if isinstance(axis, (tuple, list)) and all(a is None or is_axis(a) for a in axis):
        return tuple(axis)
    raise StaticArgumentError(
        f"chunked: axis={brief(axis)} is neither an axis nor one for each positional argument.\n"
        f"Fix: axis=0, or axis=(0, None)."
    )


def _check_size(size: Any) -> int:
    value = whole_number(size, 1)
    if value is None:
        raise StaticArgumentError(f"chunked: size={brief(size)} must be a whole number of at least 1.")
    return value
