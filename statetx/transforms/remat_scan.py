"""`remat_scan`: apply deep stacks of layers in bounded memory."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal

from .. import _states
from .._lift.options import check_flags, check_whole
from .._lift.rules import Broadcast, Carry, Split
from .._lift.wrapper import name_of
from .._loops.build import as_strategy
from .._loops.strategy import Lengths, Strategy
from .._objects.paths import Not, Paths, as_predicate, check_paths
from .._text import brief
from .._tree import is_integer
from .._typing import Filter, Policy, PyTree
from .scan import scan
from .stack import Stack, stack


def remat_scan(
    layer: Any,
    lengths: tuple[int, ...] | int | Literal["auto"] | Strategy = "auto",
    *,
    num: int | None = None,
    policy: Policy = None,
    broadcast: Filter = False,
    carry: Filter = False,
    axes: int | Mapping[Filter, int] = 0,
    split_rngs: bool | Filter | None = None,
    has_ys: bool = False,
) -> Callable[..., Any]:
    """Apply one layer many times, each time with its own states, and store few of the carries between the layers.

    As ``flax.linen.remat_scan``, for any number of layers, with inputs and outputs for each layer, and with every
    layer rematerialized, at the innermost level, too.

    Args:
        layer: the layer, applied as ``carry = layer(carry)``:

            - a `Stack`;
            - a class: call the result with the arguments of the class to make the layers;
            - a factory (a callable without required arguments): it is called once for each layer;
            - a function of the carry, which reads and writes already stacked states.
        lengths: the lengths of nested loops (a tuple, outermost first), whose product is the number of layers; or the
            way to store carries: a strategy of `policies`, or ``"auto"``, which stores enough
            that no layer runs more than three times.
        num: number of layers; needed if neither a `Stack` nor `lengths` gives it.
        policy: the values that a layer saves as residuals; nothing by default. ``policies.everything`` leaves layers
            without rematerialization.
        broadcast, carry: filters for states that all layers share: unchanged by the layers, or passed from layer to
            layer.
        axes: the axis along which the states of a function's layers are stacked, for all states or by filter.
        split_rngs: a filter for the shared random states that give each layer a key of its own; True for all, False to
            draw the same in every layer. By default layers draw one after the other, as in a Python loop.
        has_ys: whether the layer returns ``(carry, y)``.

    Returns:
        A callable ``(carry, xs=None, **kwargs)``. `xs` has a leading axis with one element for each layer, the second
        argument of the layer; keyword arguments go unchanged to every layer. It returns the last carry, or with
        ``has_ys`` ``(carry, ys)``. For a class, a function that makes this callable.

    State:
        Layers read and write their slices of the stacked states; `broadcast`, `carry` and `split_rngs` give the rules
        for shared states.

    Memory:
        For n layers: with lengths, ``sum(lengths)`` carries; with ``"auto"``, about ``sqrt(2 n)`` carries. In addition,
        the residuals of one layer, and the gradients.

    Raises:
        PolicyError: `lengths` cannot be met.
        StateValueError: the layers are not alike; see `stack`.

    Source:
        ``flax.linen.remat_scan``.

    Example:
        >>> import jax, jax.numpy as jnp, statetx
        >>> class Block:
        ...     def __init__(self, width):
        ...         self.w = statetx.Param(jnp.full((width, width), 0.1))
        ...
        ...     def __call__(self, x):
        ...         return x + jnp.tanh(x @ self.w.value)
        >>> deep = statetx.remat_scan(Block, lengths=(10, 10))(4)
        >>> deep
        RematScan(100 x Block, Lengths(10, 10))
        >>> grads = statetx.grad(lambda x: deep(x).sum(), wrt=statetx.states(deep))(jnp.ones(4))
        >>> grads["w"].shape
        (100, 4, 4)
    """
    check_flags("remat_scan", has_ys=has_ys)
    if num is not None:
        check_whole("remat_scan", "num", num, 1)
    options = {"broadcast": broadcast, "carry": carry, "axes": axes, "split_rngs": split_rngs}
    strategy = _read_lengths(lengths, policy)
    count = len(layer) if isinstance(layer, Stack) and num is None else num
    count = strategy.num_steps if count is None else count
    if count is not None:
        strategy.check("remat_scan", "layers", count)
    if isinstance(layer, Stack):
        if count != len(layer):
            raise ValueError(f"remat_scan: the stack has {len(layer)} layers, but num or lengths asks for {count}.")
        return RematScan(layer, len(layer), strategy, policy, options, has_ys)
    if isinstance(layer, (list, tuple)):
        raise TypeError(
            "remat_scan needs a Stack, a class, a factory or a function, got a sequence.\n"
            "Fix: statetx.remat_scan(statetx.stack(layers))."
        )
    if count is None:
        raise ValueError("remat_scan: give the number of layers by num= or lengths=.")
    if not callable(layer):
        raise TypeError(f"remat_scan needs a Stack, a class, a factory or a function, got {type(layer).__name__}.")

    def make(*args: Any, **kwargs: Any) -> RematScan:
        if isinstance(axes, Mapping):
            raise ValueError("remat_scan: axes= by filter is for functions, whose states are already stacked.")
        # Not the filters themselves, whose paths `RematScan` checks.
        shared = as_predicate([broadcast, carry])
        layers = stack(lambda: layer(*args, **kwargs), count, axis=axes, shared=shared)
        return RematScan(layers, count, strategy, policy, options, has_ys)

    if inspect.isclass(layer):
        return functools.update_wrapper(make, layer, updated=())
    return make() if _takes_nothing(layer) else RematScan(layer, count, strategy, policy, options, has_ys)


class RematScan:
    """Layers and the loop over them; made by `remat_scan`. ``len(deep)`` is the number of layers."""

    def __init__(self, layers: Any, num: int, strategy: Strategy, policy: Policy, options: dict, has_ys: bool):
        self.__wrapped__ = layers
        self._num = num
        self._strategy = strategy.for_layers(num, policy)
        self._states = _rules(layers, **options)
        self._has_ys = has_ys

    def __len__(self) -> int:
        return self._num

    def __call__(self, carry: PyTree, /, xs: PyTree = None, **kwargs: Any) -> PyTree:
        """Apply the layers; see `remat_scan`."""
        fun = self.__wrapped__.__wrapped__ if isinstance(self.__wrapped__, Stack) else self.__wrapped__
        has_xs, has_ys = xs is not None, self._has_ys

        def body(carry: PyTree, x: PyTree) -> tuple[PyTree, PyTree]:
            out = fun(carry, x, **kwargs) if has_xs else fun(carry, **kwargs)
            return out if has_ys else (out, None)

        out, ys = scan(body, carry, xs, self._num, states=self._states, checkpoint=self._strategy)
        return (out, ys) if has_ys else out

    def __repr__(self) -> str:
        layer = self.__wrapped__
        name = type(layer.__wrapped__).__name__ if isinstance(layer, Stack) else name_of(layer)
        return f"RematScan({self._num} x {name}, {self._strategy!r})"


def _rules(layers: Any, **options: Any) -> dict[Filter, Any]:
    """The rules for `scan`; the first filter that selects a state decides."""
    layer = layers.__wrapped__ if isinstance(layers, Stack) else layers
    axes, split_rngs = options["axes"], options["split_rngs"]
    for option, filter in (options | {"axes": list(axes) if isinstance(axes, Mapping) else ()}).items():
        as_predicate(False if filter is None else filter)  # raises if it is not a filter
        check_paths(f"remat_scan: {option}={brief(filter)}", filter, Paths(layer).items, "A layer reaches")

    rules: dict[Filter, Any] = {}
    if isinstance(layers, Stack):  # the layers' own states come before rules for shared states
        rules[layers.is_stacked] = layers.axis
    if split_rngs is not None:
        rules[_checked(True if split_rngs is False else split_rngs, is_random=True)] = (
            Split if split_rngs is not False else Broadcast
        )
    rules |= {_checked(options["carry"]): Carry, _checked(options["broadcast"]): Broadcast}
    if not isinstance(layers, Stack):
        by_filter = axes if isinstance(axes, Mapping) else {Not(_is_random): axes}
        rules |= {_checked(filter): axis for filter, axis in by_filter.items()}
    return rules


def _checked(filter: Filter, *, is_random: bool = False) -> Filter:
    """A filter with path globs that `remat_scan` has checked, so that `scan` need not. A copy of the loop copies it,
    with the states in it.
    """
    return functools.partial(_selects, filter, is_random)


def _selects(filter: Filter, is_random: bool, path: str, state: Any) -> bool:
    return as_predicate(filter)(path, state) and (not is_random or _is_random(path, state))


def _read_lengths(lengths: Any, policy: Policy) -> Strategy:
    if is_integer(lengths):
        lengths = (lengths,)
    if isinstance(lengths, (list, tuple)) and lengths:
        return Lengths(*lengths, policy=policy)
    strategy = as_strategy("remat_scan", lengths)
    return strategy if policy is None else strategy.with_policy(policy)


def _takes_nothing(layer: Callable) -> bool:
    try:
        parameters = inspect.signature(layer).parameters.values()
    except (TypeError, ValueError):
        return False
    return not any(p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters)


def _is_random(path: str, state: Any) -> bool:
    kind = _states.kind_of(state)
    return kind is not None and kind.is_random(state)
