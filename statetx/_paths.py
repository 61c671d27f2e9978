"""Where states live: `states`, the filters that select among them, and paths for messages.

A path joins attribute names, mapping keys and sequence indices by dots: ``encoder.layers.0.weight``. What is
reached through a bound method has the same path as through the object; what a function closes over starts with
the variable's name.
"""

from __future__ import annotations

import dataclasses
import dis
import fnmatch
import functools
import inspect
import types
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any

import jax
import numpy as np

from . import _registry
from ._errors import StateFilterError
from ._text import brief
from ._typing import Filter

_ATOMS = (str, bytes, int, float, complex, bool, type(None), type, types.ModuleType, np.ndarray, np.generic)
_ATOMS += (jax.Array, types.BuiltinFunctionType, np.ufunc, np.dtype)


@dataclasses.dataclass(frozen=True)
class Not:
    """The filter that selects what another does not.

    Example:
        >>> from statetx import Param, State, states
        >>> model = {"w": Param(1.0), "n": State(0)}
        >>> list(states(model, Not(Param)))
        ['n']
    """

    filter: Filter

    def __invert__(self) -> Filter:
        return self.filter

    def __repr__(self) -> str:
        return f"Not({brief(self.filter)})"


def states(obj: Any, filter: Filter = True) -> dict[str, Any]:
    """Find the states in an object: a mapping from path to state.

    Looks through attributes, dataclasses, mappings, sequences, pytrees, bound methods, partials, and the variables
    that a function closes over or reads from its module. A state that is reachable in several ways appears once,
    under the first path; order and paths are those of definition, the same in every run.

    Args:
        obj: model, function, or container of these.
        filter: a state type, a path glob (``"encoder.*"``), a predicate ``(path, state) -> bool``, True, False, a
            sequence of these (selects what any of them selects), or `Not` of one.

    Raises:
        StateFilterError: `filter` is none of the above.

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
    return {path: state for path, state in _walk(obj) if select(path, state)}


def is_filter(x: Any) -> bool:
    """Whether `x` is a filter rather than a state or a container of states."""
    if isinstance(x, (bool, str, Not)) or inspect.isclass(x):
        return True
    if isinstance(x, (list, tuple)):
        return bool(x) and all(map(is_filter, x))
    return callable(x) and _registry.kind_of(x) is None


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
        parts = [as_predicate(f) for f in filter]
        return lambda path, state: any(p(path, state) for p in parts)
    if _registry.kind_of(filter) is not None:
        return lambda path, state: state is filter
    if callable(filter):
        return lambda path, state: bool(filter(path, state))
    raise StateFilterError(
        f"Not a filter: {filter!r}. Use a state type, a path glob such as 'encoder.*', a function (path, state) -> "
        f"bool, True, False, a list of these, or statetx.Not of one."
    )


class Paths:
    """Paths of the states that a call can reach, found when first asked for."""

    def __init__(self, fun: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None):
        self._roots = (fun, tuple(args), dict(kwargs or {}))
        self._found: dict[int, str] | None = None

    def items(self) -> dict[str, Any]:
        """Every state that the call can reach, by path."""
        return {path: state for path, state in _walk_call(*self._roots)}

    def __call__(self, state: Any) -> str:
        """The state's path, else its name, else its type and the place where it was made."""
        if self._found is None:
            self._found = {id(s): path for path, s in self.items().items()}
        path = self._found.get(id(state))
        if path is None:
            kind = _registry.kind_of(state)
            assert kind is not None
            path = kind.name_of(state) or f"{type(state).__name__}@{short_site(kind.site_of(state))}"
        return path


def argument_names(
    fun: Callable, args: tuple, positions: Sequence[int] | None = None
) -> Callable[[Sequence[Any]], str]:
    """Names the leaves of ``(args, kwargs)``, given their paths, as one writes them: ``x``, ``params['w']``.

    `positions`: of those arguments that are left, where some were taken out.
    """
    try:
        parameters = list(inspect.signature(fun).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    rest = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), "args")
    positional += [f"{rest}[{i}]" for i in range(len(args) - len(positional))]

    if positions is not None:
        positional = [positional[n] for n in positions]

    def name(keys: Sequence[Any]) -> str:
        first = positional[keys[1].idx] if keys[0].idx == 0 else keys[1].key
        return first + jax.tree_util.keystr(tuple(keys[2:]))

    return name


def reaches(kind: type, fun: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call can reach a state of this type."""
    return any(isinstance(state, kind) for _, state in _walk_call(fun, args, kwargs))


def short_site(site: str) -> str:
    """``file:line`` without the folders."""
    return site.replace("\\", "/").rsplit("/", 1)[-1]


def _walk(obj: Any) -> Iterator[tuple[str, Any]]:
    return _Walk().visit(obj, "", own_globals(obj))


def _walk_call(fun: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    walk = _Walk()
    for name, value in _named_arguments(fun, args, kwargs):
        yield from walk.visit(value, "" if name == "self" else name, None)
    yield from walk.visit(fun, "", own_globals(fun))


def _named_arguments(fun: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[str, Any]]:
    try:
        names = list(inspect.signature(fun).parameters)
    except (TypeError, ValueError):
        names = []
    names += [str(i) for i in range(len(names), len(args))]
    return [*zip(names, args, strict=False), *kwargs.items()]


def own_globals(obj: Any) -> dict[str, Any] | None:
    """The module variables that a function may reach: followed for functions of the same module only."""
    while True:
        if isinstance(obj, functools.partial):
            obj = obj.func
        elif isinstance(obj, types.MethodType):
            obj = obj.__func__
        elif _is_wrapper(obj):
            obj = obj.__wrapped__
        else:
            return obj.__globals__ if isinstance(obj, types.FunctionType) else None


class _Walk:
    def __init__(self) -> None:
        self._seen: set[int] = set()
        self._used: dict[str, int] = {}
        self._keep: list[Any] = []  # objects made on the way must outlive the walk, or their ids are used again

    def visit(self, obj: Any, path: str, module: dict[str, Any] | None) -> Iterator[tuple[str, Any]]:
        if id(obj) in self._seen or (isinstance(obj, _ATOMS) and not isinstance(obj, jax.Ref)):
            return
        self._seen.add(id(obj))
        self._keep.append(obj)
        if _registry.kind_of(obj) is not None:
            num = self._used[path] = self._used.get(path, 0) + 1
            yield path if num == 1 else f"{path}#{num}", obj
            return
        for key, child in _children(obj, module):
            yield from self.visit(child, f"{path}.{key}" if path and key else path or key, module)


def children(obj: Any) -> Iterator[tuple[str, Any]]:
    """What an object holds, with the part of a path for each."""
    return _children(obj, own_globals(obj))


def _children(obj: Any, module: dict[str, Any] | None) -> Iterator[tuple[str, Any]]:
    if isinstance(obj, Mapping):
        yield from ((str(k), v) for k, v in obj.items())
    elif isinstance(obj, (list, tuple)):
        names = getattr(obj, "_fields", None) or map(str, range(len(obj)))
        yield from zip(names, obj, strict=True)
    elif isinstance(obj, Set):
        return  # no order, no path
    elif isinstance(obj, types.GeneratorType):
        return  # to look at what it gives would change it
    elif isinstance(obj, types.MethodType):
        yield "", obj.__self__
        yield "", obj.__func__
    elif isinstance(obj, functools.partial):
        yield "", obj.func
        yield from _named_arguments(obj.func, obj.args, obj.keywords)
    elif isinstance(obj, types.FunctionType):
        yield from _function_variables(obj, module)
    elif _is_wrapper(obj):
        yield "", obj.__wrapped__
    elif type(obj).__module__.split(".")[0] in ("jax", "jaxlib", "numpy", "threading", "weakref"):
        return
    else:
        yield from _attributes(obj)


def _is_wrapper(obj: Any) -> bool:
    """Whether an object stands for the function it wraps; an instance of a class that wraps another does not."""
    return "__wrapped__" in getattr(obj, "__dict__", ())


def _attributes(obj: Any) -> Iterator[tuple[str, Any]]:
    found = False
    for cls in type(obj).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            if not slot.startswith("__") and hasattr(obj, slot):
                found = True
                yield slot, getattr(obj, slot)
    attributes = getattr(obj, "__dict__", None)
    if attributes is not None:
        yield from list(attributes.items())
    elif not found:
        children, _ = jax.tree_util.tree_flatten_with_path(obj, is_leaf=lambda x: x is not obj)
        if not (len(children) == 1 and children[0][1] is obj):
            yield from ((jax.tree_util.keystr(keys, simple=True), child) for keys, child in children)


def _function_variables(fun: types.FunctionType, module: dict[str, Any] | None) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(fun.__code__.co_freevars, fun.__closure__ or (), strict=True):
        try:
            content = cell.cell_contents
        except ValueError:
            continue
        yield "" if name in ("self", "fun", "__class__") else name, content
    for default in fun.__defaults__ or ():
        yield "", default
    if fun.__globals__ is module:
        for name in global_names(fun.__code__):
            if name in fun.__globals__:
                content = fun.__globals__[name]
                yield "" if isinstance(content, types.FunctionType) else name, content


_GLOBAL_READS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")


@functools.lru_cache(maxsize=1024)
def global_names(code: types.CodeType) -> tuple[str, ...]:
    """The module variables that a function's code reads, in order; not the attributes, which are among its names too."""
    names = [i.argval for i in dis.get_instructions(code) if i.opname in _GLOBAL_READS]
    inner = [name for const in code.co_consts if isinstance(const, types.CodeType) for name in global_names(const)]
    return tuple(dict.fromkeys([*names, *inner]))
