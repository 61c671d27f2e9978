"""Errors for wrong options of a transform, or for arguments of the function in the wrong place or form."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from types import NoneType
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast, overload

import jax
import numpy as np

from .. import _states
from .._errors import FunctionError, StatetxError
from .._objects.paths import argument_names
from .._text import brief, counted, suggestion, type_str
from .._tree import flatten, is_array, is_integer, whole_number
from .wrapper import name_of, short_name

F = TypeVar("F", bound=Callable[..., Any])
P = ParamSpec("P")


class Transform(Protocol[P]):
    """The type of a transform that returns a function of the same type, or with options alone a decorator."""

    @overload
    def __call__(self, fun: F, /, *args: P.args, **kwargs: P.kwargs) -> F: ...
    @overload
    def __call__(self, fun: None = None, /, *args: P.args, **kwargs: P.kwargs) -> Callable[[F], F]: ...


def keeps_type(transform: Callable[Concatenate[Any, P], Any]) -> Transform[P]:
    """Declare for type checkers that a transform returns a function of the same type."""
    return cast(Transform[P], transform)


def transform(hints: Mapping[str, str] | None = None, call: str = "", fix: str | None = None) -> Callable[[F], F]:
    """Decorate the declaration of a transform: its signature and its docstring.

    The signature is the only list of the options: calls are checked by it, it has the defaults, and the `Wrapper` that
    is ``made_by`` the transform gets all options of a call. Arguments as in `with_checked_options`.
    """

    def decorate(declaration: F) -> F:
        name, *optional = inspect.signature(declaration).parameters

        @with_checked_options(hints, call, fix)
        @functools.wraps(declaration)
        def made(*args: Any, **kwargs: Any) -> Any:
            wrapper: Any = made.wrapper  # type: ignore[attr-defined]
            fun, *positional = args or (kwargs.pop(name, None),)
            return wrapper.make(fun, {**wrapper.defaults, **dict(zip(optional, positional, strict=False)), **kwargs})

        return made  # type: ignore[return-value]

    return decorate


def with_checked_options(
    hints: Mapping[str, str] | None = None, call: str = "", fix: str | None = None
) -> Callable[[F], F]:
    """Decorate a transform: an unknown option, or an argument of the function in place of an option, raises an error
    with the fix.

    Args:
        hints: what to do, by name of an option that other libraries have.
        call: a sentence for a call with the arguments of the function.
        fix: what to write in place of a call with too many arguments; by default ``transform(fun)(x)``.
    """

    def decorate(transform: F) -> F:
        parameters = inspect.signature(transform).parameters.values()
        accepted = {p.name for p in parameters}
        num_positional = sum(p.kind is not p.KEYWORD_ONLY for p in parameters)
        flags = {p.name: i for i, p in enumerate(parameters) if p.annotation in ("bool", "bool | None")}
        positional = [p.name for p in parameters][:num_positional]

        def check(args: tuple, kwargs: dict[str, Any]) -> None:
            if len(args) > num_positional:
                raise TypeError(_too_many(transform.__name__, args, num_positional, call, fix))
            if not kwargs.keys() <= accepted:
                options = [p.name for p in parameters if p.name != "fun"]
                raise TypeError(_unknown(transform.__name__, sorted(kwargs.keys() - accepted), options, hints or {}))
            if fix is None:
                _refuse_arrays(transform.__name__, args, positional)
            by_position = {name: args[i] for name, i in flags.items() if i < len(args)}
            check_flags(transform.__name__, **by_position, **{name: kwargs[name] for name in flags if name in kwargs})

        @functools.wraps(transform)
        def checked(*args: Any, **kwargs: Any) -> Any:
            if len(args) != 1 or kwargs:  # else as in most calls: the function alone
                check(args, kwargs)
            return transform(*args, **kwargs)

        return checked  # type: ignore[return-value]

    return decorate


def check_flags(transform: str, error: type[Exception] = TypeError, /, **flags: Any) -> None:
    """Raise if an option that is True or False is something else. None counts as False, 0 as False and 1 as True."""
    for name, value in flags.items():
        if isinstance(value, (bool, np.bool_, NoneType)) or (type(value) is int and value in (0, 1)):
            continue
        got = f"an array, {type_str(value)}" if is_array(value) else brief(value)
        fix = " The program depends on it, so it must be a value of Python, as bool(x) is." if is_array(value) else ""
        raise error(f"{transform}: {name}= must be True or False, got {got}.{fix}")


def check_whole(call: str, name: str, value: Any, least: int = 0) -> int:
    """The value of an option that is a number of things; raise `ValueError` if it is none."""
    count = whole_number(value, least)
    if count is None:
        what = f"a whole number of at least {least} and below 2**31"
        raise ValueError(f"{call}: {name} must be {what}, got {brief(value)}.")
    return count


def _too_many(transform: str, args: tuple, num: int, call: str, fix: str | None) -> str:
    if fix is not None:
        return f"{transform} takes {counted(num, 'positional argument')}, got {len(args)}.{call}\nFix: {fix}"
    expected = "the function" if num == 1 else f"the function and {num - 1} option{'s' if num > 2 else ''}"
    return (
        f"{transform} takes {expected} by position, got {len(args)} positional arguments.{call}\n"
        f"{_fix_of_call(transform, args[0])}"
    )


def _refuse_arrays(transform: str, args: tuple, names: list[str]) -> None:
    """Raise if an option that is given by position is an array or a state, or has one in it: an argument of the
    function.

    An array of integers of NumPy may be positions, as in ``argnums``.
    """
    for name, option in zip(names[1:], args[1:], strict=False):
        for x in jax.tree.leaves(option):
            is_data = is_array(x) and np.ndim(x) and not (isinstance(x, np.ndarray) and x.dtype.kind in "iu")
            if is_data or _states.kind_of(x) is not None:
                got = type_str(x) if is_array(x) else _states.describe(x)
                fix = _fix_of_call(transform, args[0])
                if name == "argnums" and not is_data:
                    fix += f" To differentiate with respect to states: statetx.{transform}(f, wrt=states)."
                raise TypeError(
                    f"{transform} takes the function, and then the option {name}, which cannot be or hold {got}.\n{fix}"
                )


def missing_parameters(fun: Any) -> list[str]:
    """The parameters that a call without arguments lacks."""
    try:
        parameters = inspect.signature(fun).parameters.values()
    except (TypeError, ValueError):  # of a builtin
        return []
    return [
        p.name for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]


def _fix_of_call(transform: str, fun: Any) -> str:
    fun = name_of(fun).rpartition(".")[2] if callable(fun) else "f"
    return f"Fix: give the arguments to the function that it returns: statetx.{transform}({fun})(x)."


def _unknown(transform: str, unknown: list[str], options: list[str], hints: Mapping[str, str]) -> str:
    explanations = [f"{transform} has no {name}=: {hints[name]}." for name in unknown if name in hints]
    if explanations:
        return " ".join(explanations)
    hint = "".join(suggestion(name, options) for name in unknown)
    return f"{transform} got unexpected options: {', '.join(unknown)}.{hint} It has {', '.join(options)}."


def broadcast_prefix(
    call: str, option: str, prefix: Any, tree: Any, *, what: str, entry: str, is_leaf: Any
) -> list[Any]:
    """The entry of a tree prefix for each leaf of a tree; objects that hold states are leaves.

    Args:
        call, option: for messages.
        what: the tree, for messages.
        entry: an entry of the prefix, for messages.
        is_leaf: of the prefix.

    Raises:
        ValueError: it is not a tree prefix.
    """
    entries: list[Any] = []
    fill = lambda x, part: entries.extend([x] * len(jax.tree.leaves(part, is_leaf=_states.is_opaque)))
    try:
        jax.tree.map(fill, prefix, tree, is_leaf=is_leaf)
    except ValueError as e:
        flatten(tree)  # raises for a dict that JAX cannot flatten
        fix = ""
        if isinstance(prefix, tuple) and isinstance(tree, (tuple, list)) and len(prefix) != len(tree):
            fix = f"\nFix: give {entry} for each of them, {len(tree)} in all, not {len(prefix)}."
        raise ValueError(
            f"{call}: {option}={prefix!r} is not a tree prefix of the {what}, whose structure is "
            f"{jax.tree.structure(tree)}.{fix}"
        ) from e
    return entries


def notes_shapes(inspection: F) -> F:
    """Decorate a function that takes a function and then its arguments: an error has a note if arguments are missing,
    or may be shapes, and tells the fix for a jitted function with options of the compiler.

    People write ``measure(loss)``, or ``measure(loss)(x)`` as for a transform; and ``measure(loss, x.shape)``, which
    calls the function with a tuple of integers.
    """
    options = inspect.signature(inspection).parameters.keys()

    @functools.wraps(inspection)
    def noted(fun: Any, /, *args: Any, **kwargs: Any) -> Any:
        try:
            return inspection(fun, *args, **kwargs)
        except Exception as e:
            if isinstance(e, ValueError) and str(e).startswith("`compiler_options` can only be passed to top-level"):
                raise _options_in_a_report(inspection.__name__, fun) from e
            if callable(fun) and not isinstance(e, StatetxError):
                keywords = {name: x for name, x in kwargs.items() if name not in options}
                for note in _notes_of_arguments(inspection.__name__, fun, args, keywords):
                    if note not in getattr(e, "__notes__", ()):  # one inspection may call another
                        e.add_note(note)
            raise

    return noted  # type: ignore[return-value]


def _options_in_a_report(name: str, fun: Any) -> FunctionError:
    what = short_name(name_of(fun))
    return FunctionError(
        f"{name} compiles {what} within a program of its own, and JAX takes compiler_options= for the outermost jit "
        f"alone: {what}, or a function that it calls, is jitted with some.\n"
        f"Usual cause: {what} is the jitted step with the options that it runs with.\n"
        f"Fix: give {name} the step jitted without compiler_options=; measure and memory_report take them as an "
        f"argument of their own."
    )


def _notes_of_arguments(name: str, fun: Any, args: tuple, kwargs: Mapping[str, Any]) -> Iterator[str]:
    if not args and not kwargs and (parameters := missing_parameters(fun)):
        yield (
            f"Fix: give the arguments after the function: statetx.{name}({short_name(name_of(fun))}, "
            f"{', '.join(parameters)})."
        )
    name_of_key = argument_names(fun, args)
    is_shape = lambda x: isinstance(x, (tuple, list)) and bool(x) and all(map(is_integer, x))
    is_leaf = lambda x: is_shape(x) or _states.is_opaque(x)
    try:
        leaves = jax.tree_util.tree_flatten_with_path((args, dict(kwargs)), is_leaf=is_leaf)[0]
    except Exception:  # a container that JAX cannot flatten: the error that gets these notes says so
        return
    for key, x in leaves:
        if is_shape(x):
            yield (
                f"{name} was given {name_of_key(key)}={x!r}, a {type(x).__name__} of integers.\n"
                f"Fix: if it is the shape of an array, give jax.ShapeDtypeStruct({tuple(x)!r}, jnp.float32), or the "
                f"array."
            )
