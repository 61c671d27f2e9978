"""`states`, with the filters that select among them; paths for messages.

A path joins attribute names, mapping keys and sequence indices by dots: ``encoder.layers.0.weight``. A bound method
adds nothing to the path of its object; the path of a closed-over variable starts with the variable's name.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import inspect
import itertools
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Never, TypeVar, overload

import jax

from .. import _states
from .._cached import cached_property
from .._errors import StateFilterError
from .._text import brief, counted, suggestion, type_str
from .._tree import is_array, is_array_or_number
from .._typing import Filter, public
from .contents import named_arguments
from .walk import Walk


@public
@dataclasses.dataclass(frozen=True)
class Not:
    """The complement of a filter: selects the states that it does not.

    Example:
        >>> from statetx import Param, State, states
        >>> model = {"w": Param(1.0), "n": State(0)}
        >>> list(states(model, Not(Param)))
        ['n']
    """

    filter: Filter

    def __init__(self, filter: Filter, *others: Never):
        if others:
            raise TypeError(
                f"Not takes one filter, got {1 + len(others)}.\n"
                f"Fix: Not([...]) excludes what any filter of a list selects."
            )
        object.__setattr__(self, "filter", filter)

    def __invert__(self) -> Filter:
        return self.filter

    def __repr__(self) -> str:
        return f"Not({brief(self.filter)})"


S = TypeVar("S")


@overload
def states(obj: Any, filter: type[S]) -> dict[str, S]: ...
@overload
def states(obj: Any, filter: Filter = True) -> dict[str, Any]: ...
def states(obj: Any, filter: Filter = True) -> dict[str, Any]:
    """Find the states in an object: a mapping from path to state.

    Looks through attributes, slots, class attributes, mappings, sequences, sets, arrays of objects, pytrees, bound
    methods, partials, and a function's closure, defaults and module variables. A state that is reachable in several
    ways appears once, under the first path. Order and paths follow the definitions, the same in every run. Only a set
    has no order: its states are ordered by name, or by type and number.

    The dict is a plain one, so that JAX takes it as a pytree: to replace an item changes no object. Write a state's
    ``value``.

    Variables that methods would read if they were called, and weak references, do not belong to the object. A transform
    with a filter applies it to every state that the call touches, and includes these.

    Args:
        obj: model, function, or container of these.
        filter: a state type, a path glob (``"encoder.*"``), a predicate ``(path, state) -> bool``, True, False, a
            sequence of these (selects what any of them selects), or `Not` of one.

    Raises:
        StateFilterError: `filter` is none of the above, or a path in it selects no state; or `obj` is a class without
            states of its own, an array, a number or a text, or a container of arrays. A type need not occur.

    Example:
        >>> from statetx import Param, State
        >>> class Layer:
        ...     def __init__(self):
        ...         self.w, self.count = Param(1.0), State(0)
        >>> list(states({"a": Layer(), "b": Layer()}, Param))
        ['a.w', 'b.w']
        >>> list(states([Layer()], "0.c*"))
        ['0.count']
    """
    select = as_predicate(filter)
    held = dict(Walk().held(obj))
    if not held:
        _refuse_without_states(obj)
    check_paths("states", filter, lambda: held, "The object holds")
    return {path: state for path, state in held.items() if select(path, state)}


def _refuse_without_states(obj: Any) -> None:
    """Raise if an object without states is of a type that has none."""
    if inspect.isclass(obj):
        raise StateFilterError(
            f"states: got the class {obj.__qualname__}, which holds no states: its instances do.\n"
            f"Fix: give an instance, as in states({obj.__name__}(...))."
        )
    if is_array_or_number(obj) or isinstance(obj, (bool, str, bytes)):
        raise StateFilterError(
            f"states: got a value of type {type_str(obj)}, which holds no states.\n"
            f"Fix: give the model, or another object that holds states."
        )
    leaves = jax.tree.leaves(obj) if isinstance(obj, (dict, list, tuple)) else []
    if leaves and all(map(is_array_or_number, leaves)):
        raise StateFilterError(
            f"states: got a {type(obj).__name__} of {counted(len(leaves), 'array')}, which holds no states.\n"
            f"Fix: keep each array in a state, as in statetx.Param(array); or give the arrays as arguments, which "
            f"grad differentiates by argnums=."
        )


def holds_states(obj: Any) -> bool:
    """Whether an object holds states itself, not counting its class's."""
    return next(Walk(follows_classes=False).held(obj, is_called=False), None) is not None


def is_filter(x: Any) -> bool:
    """Whether `x` is a filter rather than a state or a container of states."""
    if isinstance(x, (bool, str, Not)) or inspect.isclass(x):
        return True
    if isinstance(x, (list, tuple)):
        return bool(x) and all(map(is_filter, x))
    return callable(x) and _states.kind_of(x) is None and not _is_model(x)


def _is_model(x: Any) -> bool:
    """Whether a callable is an object with states, or with arrays as of equinox, rather than a predicate."""
    return not isinstance(x, _FUNCTIONS) and (holds_states(x) or any(map(is_array, jax.tree.leaves(x))))


_FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, functools.partial, type)


def as_predicate(filter: Filter) -> Callable[[str, Any], bool]:
    """Turn a filter into ``(path, state) -> bool``."""
    if isinstance(filter, bool):
        return lambda path, state: filter
    if isinstance(filter, str):
        return lambda path, state: fnmatch.fnmatchcase(path, filter)
    if inspect.isclass(filter):
        return lambda path, state: isinstance(state, filter)

    if isinstance(filter, Not):
        inner = as_predicate(filter.filter)
        return lambda path, state: not inner(path, state)
    if isinstance(filter, (list, tuple)):
        predicates = [as_predicate(item) for item in filter]
        return lambda path, state: any(p(path, state) for p in predicates)
    if _states.kind_of(filter) is not None:
        return lambda path, state: state is filter

    if callable(filter) and not _is_model(filter):
        return lambda path, state: bool(filter(path, state))
    raise StateFilterError(
        f"Not a filter: {brief(filter)}. Use a state type, a path glob such as 'encoder.*', a function (path, state) "
        "-> bool, True, False, a list of these, or statetx.Not of one."
    )


def globs_in(filter: Filter) -> list[str]:
    """The path globs of a filter."""
    if isinstance(filter, (list, tuple)):
        return [glob for item in filter for glob in globs_in(item)]
    if isinstance(filter, Not):
        return globs_in(filter.filter)
    return [filter] if isinstance(filter, str) else []


def check_paths(name: str, filter: Filter, paths: Callable[[], Collection[str]], those: str) -> None:
    """Raise if a path glob of a filter selects none of these states. Types and functions need not select any.

    Args:
        name: the call up to the filter, for the message.
        filter: the filter.
        paths: returns the paths of the states; called only if the filter has a glob.
        those: the beginning of the sentence that lists them.

    Raises:
        StateFilterError: a path glob selects none.
    """
    globs = globs_in(filter)
    all_paths = paths() if globs else ()
    for glob in globs:
        if not any(fnmatch.fnmatchcase(path, glob) for path in all_paths):
            listed = [*map(repr, itertools.islice(all_paths, _MAX_LISTED)), *["..."] * (len(all_paths) > _MAX_LISTED)]
            raise StateFilterError(
                f"{name}: the path {glob!r} selects no state.{suggestion(glob, all_paths)} {those}: "
                f"{', '.join(listed) or 'none'}.\n"
                f"Fix: correct the path, or select by a type, which need not occur."
            )


_MAX_LISTED = 12


class Paths:
    """Paths of the states that a call can reach, computed on first use."""

    def __init__(self, fun: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None):
        self._fun = fun
        self._arguments = (tuple(args), dict(kwargs or {}))

    @cached_property
    def _walk(self) -> Walk:
        return Walk()

    @cached_property
    def held(self) -> dict[str, Any]:
        """The states that the function and its arguments hold or read by name."""
        pairs = [
            self._walk.held(value, name, is_called=False)
            for name, value in named_arguments(self._fun, *self._arguments)
        ]
        return dict(itertools.chain(*pairs, self._walk.held(self._fun)))

    @cached_property
    def beyond(self) -> dict[str, Any]:
        """Further states that the call may touch: read by methods and their helpers, or referred to weakly."""
        # `held` is read for its effect: `beyond` continues the same walk, and must come second.
        return {} if self.held is None else dict(self._walk.beyond())

    def items(self) -> dict[str, Any]:
        """Every state that the call can reach, by path."""
        return self.held | self.beyond

    @cached_property
    def _by_state(self) -> dict[int, str]:
        return {id(state): path for path, state in self.items().items()}

    def __call__(self, state: Any) -> str:
        """The state's path, else its name, else its type and the place where it was made."""
        return self._by_state.get(id(state)) or label(state)


def label(state: Any) -> str:
    """The label of a state without a path: its name, else its type and the place where it was made."""
    kind = _states.kind_of_state(state)
    return kind.name_of(state) or f"{type(state).__name__}@{short_site(kind.site_of(state))}"


def argument_names(
    fun: Callable, args: tuple, positions: Sequence[int] | None = None
) -> Callable[[Sequence[Any]], str]:
    """Return a function from the key path of a leaf of ``(args, kwargs)`` to its name in Python: ``x``,
    ``params['w']``.

    `positions`: the original positions of the remaining arguments, if some were removed.
    """
    try:
        parameters = list(inspect.signature(fun).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    variadic = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), "args")
    positional += [f"{variadic}[{i}]" for i in range(len(args) - len(positional))]

    if positions is not None:
        positional = [positional[n] for n in positions]

    def name(keys: Sequence[Any]) -> str:
        # The tree is ``(args, kwargs)``: the first key tells which, the second is a position or a name.
        first = positional[keys[1].idx] if keys[0].idx == 0 else keys[1].key
        return first + jax.tree_util.keystr(tuple(keys[2:]))

    return name


def leaf_names(fun: Callable, args: tuple, kwargs: dict[str, Any], mask: Sequence[bool]) -> list[str]:
    """The names in Python of the leaves of ``(args, kwargs)`` that the mask selects."""
    leaves = jax.tree_util.tree_flatten_with_path((args, kwargs), is_leaf=_states.is_opaque)[0]
    name = argument_names(fun, args)
    return [name(keys) for (keys, _), is_selected in zip(leaves, mask, strict=True) if is_selected]


def reaches_unwatched(fun: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call can reach a state that no frame sees."""
    return any(map(_states.is_unwatched, Paths(fun, args, kwargs).items().values()))


def short_site(site: str) -> str:
    """``file:line`` without the folders."""
    return site.replace("\\", "/").rsplit("/", 1)[-1]
