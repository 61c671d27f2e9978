"""`DifferentiatedStates`: the inputs that a function is differentiated with respect to, arguments or states."""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .. import _jax, _states
from .._errors import StateAccessError, StateFilterError, StateValueError
from .._objects.paths import Paths, argument_names, as_predicate, check_paths, is_filter
from .._objects.walk import Walk, held_states
from .._text import brief, counted, suggestion, type_str
from .._tree import flatten, is_array, is_array_or_number, partition, with_plain_dict
from .._typing import Filter, PyTree
from .late_rules import differentiated_error
from .wrapper import name_of


def split_aux(out: Any, fun: Callable) -> tuple[Any, Any]:
    if not (isinstance(out, (tuple, list)) and len(out) == 2):
        got = type_str(out) if is_array(out) else type(out).__name__
        raise TypeError(
            f"With has_aux=True {name_of(fun)} must return a pair (value, aux), got {got}.\n"
            f"Fix: return both, or leave has_aux out."
        )
    return out[0], out[1]


def parse_argnums(argnums: Any) -> tuple[list[int], bool]:
    """The positions, and whether the result is a tuple.

    Raises:
        TypeError: `argnums` is something else, such as an argument for the function.
    """
    if argnums is None:
        return [], True
    as_tuple = not hasattr(argnums, "__index__") or getattr(argnums, "ndim", 0) > 0
    try:
        return [operator.index(i) for i in (list(argnums) if as_tuple else [argnums])], as_tuple
    except TypeError:
        got = type_str(argnums) if is_array(argnums) else brief(argnums)
        raise TypeError(
            f"argnums must be an int or a sequence of ints, got {got}.\n"
            f"Fix: give the arguments to the function that the "
            f"transform returns, grad(f)(x); differentiate with respect to states by wrt=."
        ) from None


def resolve_argnums(argnums: Any, num_args: int, fun: Callable[..., Any]) -> tuple[list[int], bool]:
    nums, as_tuple = parse_argnums(argnums)
    for i in nums:
        if not -num_args <= i < num_args:
            raise ValueError(
                f"argnums={argnums!r} asks for argument {i}, and {name_of(fun)} was called with {num_args} positional "
                f"arguments.\nFix: pass differentiated arguments by position; or differentiate with respect to states: "
                f"wrt=statetx.Param."
            )
    positions = [i % num_args for i in nums]
    if len(set(positions)) < len(positions):
        raise ValueError(
            f"argnums={argnums!r} names an argument of {name_of(fun)} twice.\nFix: name each argument once."
        )
    return positions, as_tuple


_FIX = (
    "close over the {}, or pass it as an argument that is not differentiated, and choose its states by wrt=: {}(f, "
    "wrt=nnx.Param)"
)
_FIXES = {"vjp": "choose its states by wrt=: vjp(f, ..., wrt=nnx.Param)"} | dict.fromkeys(
    ("jvp", "linearize"),
    "close over the {}, whose states have no tangents then; grad, vjp and jacfwd have wrt= for these",
)


def refuse_lost_writes(transform: str, fun: Callable, effects: Iterable[Any], taken_apart: Iterable[Any]) -> None:
    """Refuse a write to a state in an argument that the transform flattens as a pytree: the write would go to a copy.

    Raises:
        StateAccessError: the function writes such a state. A module of ``flax.nnx``, for example, is a pytree that
            holds its Variables.
    """
    written = {id(e.state): e for e in effects}
    if not written:
        return
    for tree in taken_apart:
        for obj in filter(_states.is_opaque, jax.tree.leaves(tree, is_leaf=_states.is_opaque)):
            for path, state in Walk().held(obj, type(obj).__name__):
                if id(state) in written:
                    raise StateAccessError(
                        f"{transform}({name_of(fun)}) flattens an argument that holds states: the function gets a copy "
                        f"of {type(state).__name__} {path!r}, and its write at {written[id(state)].site} would be "
                        "lost.\n"
                        f"Fix: {_FIXES.get(transform, _FIX).format(type(obj).__name__, transform)}."
                    )


def refuse_arguments(transform: str, fun: Callable, args: tuple, argnums: Sequence[int], *, allow_int: bool) -> None:
    """Raise an error that names the first differentiated argument that JAX cannot differentiate, if there is one."""
    flatten([args[i] for i in argnums])  # raises for a dict that JAX cannot flatten
    error = state_argument_error(transform, fun, args, argnums)
    if error is not None:
        raise error from None
    for n, name, leaf in _leaves_of(fun, args, argnums):
        place = f"{transform}({name_of(fun)}): argument {n} ({name})"
        by_states = lambda n=n: f"wrt={filter_for(held_states(args[n]))}"
        if not is_array_or_number(leaf) and not isinstance(leaf, bool):
            raise TypeError(
                f"{place} is a {type(leaf).__name__}: {brief(leaf)}. Only arrays have gradients.\n"
                f"Fix: choose the differentiated arguments by argnums=, or states by {by_states()}."
            ) from None
        if not allow_int and not jnp.issubdtype(jnp.result_type(leaf), jnp.inexact):
            got = type_str(leaf) if is_array(leaf) else f"{type(leaf).__name__}: {leaf}"
            left_out = "" if leaf is args[n] else ", leave it out of the tree, as equinox.partition does"
            raise TypeError(
                f"{place} is {got}. Gradients need floating-point or complex values.\n"
                f"Fix: convert it to float{left_out}, or choose other arguments by argnums= or states by {by_states()}."
            ) from None


def refuse_types(error: Exception, transform: str, fun: Callable) -> None:
    """Raise JAX's own error (`_states.is_of_jax`) about the types of a derivative with the user's transform and
    function in place of the transform that JAX ran.
    """
    message = str(error)
    ran = next((name for name in ("grad", "jacfwd", "jacrev") if message.startswith(f"{name} ")), None)
    if type(error) is TypeError and ran is not None:  # ours have types of their own
        raise TypeError(f"{transform}({name_of(fun)}){message.removeprefix(ran)}") from None


def state_argument_error(
    transform: str, fun: Callable, args: tuple, argnums: Sequence[int] | None = None
) -> StateValueError | None:
    """The error for a differentiated argument that is a state, or an object that holds states and is not a pytree; or
    None.
    """
    for n, name, leaf in _leaves_of(fun, args, range(len(args)) if argnums is None else argnums):
        if is_array_or_number(leaf):
            continue
        held = [state for _, state in Walk().held(leaf)]
        if held:
            kind = _states.kind_of(leaf)
            what = (
                f"{_states.describe(leaf, kind)}, a state"
                if kind
                else f"a {type(leaf).__name__}, which holds {counted(len(held), 'state')}"
            )
            return StateValueError(
                f"{transform}({name_of(fun)}): argument {n} ({name}) is {what}, and not an array.\n"
                f"Fix: choose states by wrt=, in statetx.{transform}(f, wrt={filter_for(held)})({name}, ...); the "
                "gradients are a dict by path."
            )
    return None


def _leaves_of(fun: Callable, args: tuple, argnums: Sequence[int]) -> Iterator[tuple[int, str, Any]]:
    """Position, name and value of each leaf of the differentiated arguments."""
    name = argument_names(fun, args)
    for keys, leaf in jax.tree_util.tree_flatten_with_path((args, {}))[0]:
        if keys[1].idx in argnums:
            yield keys[1].idx, name(keys), leaf


def filter_for(states: Sequence[Any]) -> str:
    """The class that a filter for the trainable ones of these states would name: ``statetx.Param``."""
    libraries = {"statetx": "statetx", "brainstate": "brainstate", "flax": "nnx"}
    names = []
    for state in states:
        for cls in type(state).__mro__:
            root = cls.__module__.partition(".")[0]
            if root in libraries and not cls.__name__.startswith("_"):
                names.append(f"{libraries[root]}.{cls.__name__}")
                break
    return next((name for name in names if "Param" in name), names[0] if names else "statetx.Param")


class DifferentiatedStates:
    """The states that a function is differentiated with respect to.

    Args:
        wrt: a state, a pytree of states, or a filter over the states that the call can reach.
        allow_int: whether integers may be among them.

    A filter selects among the states that the call touches. States that the function and its arguments hold are
    among them. States further out, which the call may touch, are candidates: they are differentiated too, and are in
    the result if they were read. If a state is read and selected but is neither, the read raises.
    """

    def __init__(self, wrt: Any, fun: Callable, args: tuple, kwargs: dict[str, Any], *, allow_int: bool = False):
        self._fun = fun
        self._allow_int = allow_int
        self._filter = wrt if is_filter(wrt) else None
        self._candidates: set[int] = set()
        if self._filter is not None:
            self._paths = Paths(fun, args, kwargs)
            wrt = self._select(self._paths)
        self.states, self._treedef = flatten(with_plain_dict(wrt), is_leaf=_states.is_opaque)
        self._kinds = [_kind_of(state) for state in self.states]
        if not self.states:
            raise StateFilterError("wrt= is empty: it must name at least one state to differentiate with respect to.")
        self._positions = {id(s): i for i, s in enumerate(self.states)}
        if len(self._positions) < len(self.states):
            duplicate = next(s for i, s in enumerate(self.states) if self._positions[id(s)] != i)
            raise StateFilterError(
                f"wrt= lists {_states.describe(duplicate)} twice. Each state has one gradient: list it once."
            )
        self.has_refs = self._filter is True or any(map(_states.is_unwatched, self.states))
        self._partitions: list[Any] = []
        self._read: set[int] = set()

    def values(self) -> list[list]:
        """The value of each state, as a list of array leaves."""
        values = []
        for state, kind in zip(self.states, self._kinds, strict=True):
            arrays, part = self._differentiable(state, kind, kind.read(state))
            self._partitions.append(part)
            values.append(arrays)
        return values

    def on_read(self, values: list[list]) -> Callable[[Any, Any, Any], Any]:
        """A hook for a frame: the body reads these values instead of the states' own."""

        def on_read(state: Any, kind: Any, value: Any) -> Any:
            self.note_read(state, kind)
            i = self._positions.get(id(state))
            if i is None:
                return value
            if any(map(_jax.is_run_outside, _jax.derivatives_of(values[i][:1]))):
                rule = _jax.running_rule()
                if rule is not None:
                    name = f"the derivative of {name_of(self._fun)}"
                    raise differentiated_error(
                        name, f"the derivative rule {rule}", _states.describe(state, kind, value=value)
                    )
            return self._partitions[i].combine(values[i])

        return on_read

    def note_read(self, state: Any, kind: Any) -> None:
        """Record that the call reads a state; raise if the filter selects the state but the function is not
        differentiated with respect to it."""
        if id(state) in self._positions:
            self._read.add(id(state))
            return
        if self._filter is None or not as_predicate(self._filter)(self._paths(state), state):
            return
        self._differentiable(state, kind, kind.get(state))
        raise StateFilterError(
            f"wrt={brief(self._filter)} selects {_states.describe(state, kind)}, which {name_of(self._fun)} reads. It "
            f"would get no gradient: the walk over the function and its arguments does not find it.\n"
            f"Cause: an object that the walk cannot enter holds it, or code looks it up by name.\n"
            f"Fix: pass the states themselves, wrt={{**statetx.states(model, {brief(self._filter)}), 'name': state}}."
        )

    def has(self, state: Any) -> bool:
        """Whether the function is differentiated with respect to this state."""
        return id(state) in self._positions

    def combine(self, values: list[list]) -> PyTree:
        """Combine array leaves of each state, such as gradients, to the structure of `wrt`; unread candidates are left
        out.
        """
        combined = [part.combine(v) for part, v in zip(self._partitions, values, strict=True)]
        result = jax.tree.unflatten(self._treedef, combined)
        unread = self._candidates - self._read
        if not unread:
            return result
        paths = sorted(self._selected)
        return {p: result[p] for p in paths if id(self._selected[p]) not in unread}

    def _select(self, paths: Paths) -> dict[str, Any]:
        selects = as_predicate(self._filter)
        selected = {path: state for path, state in paths.held.items() if selects(path, state)}
        further = {path: state for path, state in paths.beyond.items() if self._may_be_differentiated(path, state)}
        if selected:
            self._candidates = {id(state) for state in further.values()}
        self._selected = selected | further
        if not self._selected:
            reachable = ", ".join(f"{p} ({type(s).__name__})" for p, s in list(paths.items().items())[:8]) or "none"
            raise StateFilterError(
                f"wrt={brief(self._filter)} selects no state of "
                f"{name_of(self._fun)}.{_nearest(self._filter, paths.items())} "
                f"States that its arguments and variables reach: {reachable}."
            )
        call = f"wrt={brief(self._filter)}"
        check_paths(call, self._filter, paths.items, f"The arguments and variables of {name_of(self._fun)} reach")
        return self._selected

    def _may_be_differentiated(self, path: str, state: Any) -> bool:
        """Whether a state further out, which the call may never touch, is selected and can be read and
        differentiated.
        """
        kind = _kind_of(state)
        owner = kind.owner(state)
        if owner is not None and (owner.thread != threading.get_ident() or not owner.is_open):
            return False
        try:
            is_selected = as_predicate(self._filter)(path, state)
        except Exception:  # the user's predicate need not accept states that the call does not touch
            return False
        arrays, part = partition(kind.get(state), is_array_or_number)
        return bool(is_selected and arrays and not part.static and all(map(self._is_differentiable, arrays)))

    def _is_differentiable(self, x: Any) -> bool:
        if _jax.is_hi_value(x):
            return False
        return self._allow_int or jnp.issubdtype(jnp.result_type(x), jnp.inexact)

    def _differentiable(self, state: Any, kind: Any, value: Any) -> tuple[list, Any]:
        arrays, part = partition(value, is_array_or_number)
        if part.static or not arrays:
            raise StateValueError(
                f"Cannot differentiate with respect to {_states.describe(state, kind)}: its value holds a "
                f"{type(part.static[0] if part.static else value).__name__}, which is not an array."
            )
        for x in arrays:
            if not self._is_differentiable(x):
                raise StateValueError(
                    f"Cannot differentiate with respect to {_states.describe(state, kind)}: gradients need "
                    f"floating-point or complex values. Leave it out of wrt=."
                )
        return arrays, part


def _kind_of(state: Any) -> Any:
    kind = _states.kind_of(state)
    if kind is not None:
        return kind
    held = [] if is_array(state) else held_states(state)
    if held:
        raise StateFilterError(
            f"wrt= has a {type(state).__name__} with {counted(len(held), 'state')}, which is neither a state nor a "
            f"filter.\n"
            f"Fix: wrt=statetx.states(model, {filter_for(held)}), or the filter wrt={filter_for(held)}."
        )
    got = f"an array ({type_str(state)})" if is_array(state) else f"a {type(state).__name__}"
    raise StateFilterError(
        f"wrt= holds {got}, which is not a state. Pass states, a dict of states such as "
        f"statetx.states(model, statetx.Param), or a filter."
    )


def _nearest(filter: Filter, paths: Iterable[str]) -> str:
    globs = (filter,) if isinstance(filter, str) else filter if isinstance(filter, (list, tuple)) else ()
    return next((hint for glob in globs if isinstance(glob, str) and (hint := suggestion(glob, paths))), "")
