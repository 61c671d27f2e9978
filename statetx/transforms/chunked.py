"""`chunked`: compute a loss in chunks along an axis, so that one chunk of its largest values exists at a time.

The chunks are the parts of a `microbatch` whose batch lies along any axis. A scalar loss is differentiated chunk by chunk as it is computed
(`statetx._loops.accumulated`), so that no chunk runs twice.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict, TypeVar, Unpack, overload

import jax
import jax.numpy as jnp

from .. import _states
from .._errors import StaticArgumentError
from .._lift.options import with_checked_options
from .._lift.wrapper import Wrapper, as_decorator, name_of
from .._objects.paths import argument_names
from .._text import brief, type_str
from .._tree import as_array, flatten, is_array, partition
from .._typing import Filter, PyTree
from .microbatch import Microbatch

F = TypeVar("F", bound=Callable[..., Any])


class ChunkedOptions(TypedDict, total=False):
    """The options of `chunked` besides axis and size."""

    reduce: Any
    weight: Callable[..., Any] | None
    states: Mapping[Filter, Any] | None
    interleave: bool | None
    accumulate: Any


@overload
def chunked(
    loss: F, axis: int | Sequence[int | None] = 0, size: int = 1024, **options: Unpack[ChunkedOptions]
) -> F: ...
@overload
def chunked(
    loss: None = None, axis: int | Sequence[int | None] = 0, size: int = 1024, **options: Unpack[ChunkedOptions]
) -> Callable[[F], F]: ...
@with_checked_options(
    {"chunk_size": "give size=", "num_chunks": "give size=length // num_chunks", "in_axes": "give axis="}
)
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

    For a cross entropy over a large vocabulary, whose logits are the largest array of a language model: the product with the embedding
    belongs into `loss`, and the axis is that of the tokens. A scalar loss is differentiated chunk by chunk as it is computed, and the gradients
    are added up in one buffer: no logits are stored, and none are computed twice.

    Args:
        loss: a function whose outputs are arrays. It is called with chunks of its positional arguments. What it reads in another way
            (states, keyword arguments, its closure) is whole for every chunk, such as the embedding.
        axis: the axis of the chunks in every array among the positional arguments; or for each positional argument its axis, or None for one
            that is passed whole.
        size: elements of a chunk along the axis, at most. ``ceil(length / size)`` chunks, whose sizes differ by at most one.
        reduce: how the outputs of the chunks are combined: ``"mean"`` (each chunk counts with its size), ``"sum"``, or for
            parts of the output as in `microbatch`. The default, a mean, is for losses that are one number, and for tuples and dicts.
        weight: called as `loss`, returns the weight of a chunk in a mean, in place of its size. A loss that is a mean over the true entries of
            a mask needs ``weight=lambda hidden, labels, mask: mask.sum()``.
        states: from filters to rules for the states that they select, as in `microbatch`.
        interleave: whether a chunk has every n-th element, as in `microbatch`; for an axis that is sharded.
        accumulate: the dtype in which half-precision sums, means and gradients are added up, as in `microbatch`.

    Returns:
        A function of the same arguments, with the same output to within rounding.

    State:
        Written states are carried from chunk to chunk, as in `scan`; a random state gives each chunk draws of its own.

    Memory:
        For a scalar loss of T tokens with V logits each: ``size * V`` logits and their cotangents in place of ``T * V``, and one gradient of
        each differentiated argument and state. Other outputs, and higher derivatives, have each chunk rematerialized: it is computed twice.

    Raises:
        StateValueError: the loss returns an array with dimensions, and `reduce` is not given.
        StaticArgumentError: `size` is not a whole number of at least 1, or `axis` does not fit the arguments.
        ValueError: an array lacks the axis, or lengths along it differ.

    Source:
        Hsu et al. 2024, "Liger Kernel", section 3.2 (fused linear cross entropy); here for any loss, by JAX's own derivatives.

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
    options = {
        "axis": axis,
        "size": size,
        "reduce": reduce,
        "weight": weight,
        "states": states,
        "interleave": interleave,
        "accumulate": accumulate,
    }
    return as_decorator(Chunked, loss, options)


class _Chunks(Microbatch):
    transform = "chunked"


class Chunked(Wrapper):
    """Made by `chunked`."""

    def __init__(self, fun: Callable, *, axis: Any, size: Any, **options: Any):
        super().__init__(fun, {"axis": axis, "size": size, **options})
        self._axis = _check_axis(axis)
        self._size = _check_size(size)
        self._of_parts = options
        _Chunks(fun, num=1, budget=None, argnums=None, argnames=(), **options)  # checks them

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        fun, axes = self.__wrapped__, self._axes(len(args))
        split = {i: args[i] for i, a in enumerate(axes) if a is not None}
        num = -(-self._length(args, split, axes) // self._size)
        moved = self._moved(args, axes, lambda x, axis: jnp.moveaxis(x, axis, 0))

        # The parts of a microbatch have the chunks along their first axis.
        def of_chunk(fun: Callable) -> Callable:
            @functools.wraps(fun)
            def call(*args: Any) -> Any:
                return fun(*self._moved(args, axes, lambda x, axis: jnp.moveaxis(x, 0, axis)), **kwargs)

            return call

        options = {**self._of_parts, "argnums": tuple(split), "argnames": (), "budget": None}
        if options["weight"] is not None:
            options["weight"] = of_chunk(options["weight"])
        return _Chunks(of_chunk(fun), num=max(1, num), **options)(*moved)

    def _axes(self, num_args: int) -> tuple[int | None, ...]:
        """For each positional argument the axis of the chunks."""
        axes = (self._axis,) * num_args if isinstance(self._axis, int) else self._axis
        if len(axes) != num_args:
            raise StaticArgumentError(
                f"chunked({name_of(self.__wrapped__)}): axis={axes!r} has {len(axes)} entries, and there are {num_args} positional arguments.\n"
                f"Fix: give each positional argument an axis, or None; arguments that every chunk needs whole may be passed by keyword."
            )
        return axes

    def _moved(self, args: Sequence[Any], axes: Sequence[int | None], move: Callable) -> list[Any]:
        """The arguments, with the axes of their chunked arrays moved."""

        def moved(arg: Any, axis: int | None) -> Any:
            leaves, part = partition(arg)
            return part.combine([x if axis in (None, 0) or _is_key(x) else move(as_array(x), axis) for x in leaves])

        return [moved(arg, axis) for arg, axis in zip(args, axes, strict=True)]

    def _length(self, args: tuple, split: dict[int, Any], axes: Sequence[int | None]) -> int:
        """The length of all chunked arrays along their axes.

        Raises:
            ValueError: an array has no such axis, or lengths differ, or are symbolic.
        """
        name = f"chunked({name_of(self.__wrapped__)})"
        flatten(split)  # raises for a dict that JAX cannot flatten
        first_leaf: dict[int, str] = {}  # by length
        for path, x in jax.tree_util.tree_flatten_with_path(split, is_leaf=_states.is_opaque)[0]:
            if not is_array(x) or _is_key(x):
                continue
            axis, shape = axes[path[0].key], jnp.shape(x)
            keys = [jax.tree_util.SequenceKey(0), jax.tree_util.SequenceKey(path[0].key), *path[1:]]
            leaf = argument_names(self.__wrapped__, args)(keys)
            assert axis is not None
            if not -len(shape) <= axis < len(shape):
                raise ValueError(
                    f"{name}: {leaf} is a {type_str(as_array(x))}, which has no axis {axis}.\n"
                    f"Fix: give None for it in axis=, or pass it by keyword, so that every chunk gets the whole argument."
                )
            first_leaf.setdefault(shape[axis], f"{leaf} has {shape[axis]} along axis {axis}")
        if not first_leaf:
            raise ValueError(f"{name}: no positional argument holds an array to be split.\nFix: pass it by position.")
        symbolic = next((text for length, text in first_leaf.items() if not isinstance(length, int)), None)
        if symbolic is not None:
            raise ValueError(
                f"{name}: {symbolic}, which is symbolic. The number of chunks depends on it.\nFix: export with a constant length."
            )
        if len(first_leaf) > 1:
            raise ValueError(
                f"{name}: the arguments differ in length: {', '.join([*first_leaf.values()][:4])}.\n"
                f"Fix: give the axis of each argument, as in axis=(0, None) for loss(hidden, embedding)."
            )
        return next(iter(first_leaf))


def _check_axis(axis: Any) -> int | tuple[int | None, ...]:
    is_axis = lambda a: isinstance(a, int) and not isinstance(a, bool)  # noqa: E731
    if is_axis(axis):
        return axis
    if isinstance(axis, (tuple, list)) and all(a is None or is_axis(a) for a in axis):
        return tuple(axis)
    raise StaticArgumentError(
        f"chunked: axis={brief(axis)} is neither an axis nor one for each positional argument.\nFix: axis=0, or axis=(0, None)."
    )


def _check_size(size: Any) -> int:
    try:
        value = operator.index(size)
    except TypeError:
        value = 0
    if value < 1 or isinstance(size, bool):
        raise StaticArgumentError(f"chunked: size={brief(size)} must be a whole number of at least 1.")
    return value


def _is_key(x: Any) -> bool:
    return not x.shape and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
