"""The attributes of classes; the module variables that the code of functions reads."""

from __future__ import annotations

import dis
import enum
import functools
import importlib.util
import itertools
import sys
import types
from collections.abc import Iterator, Sequence, Set
from typing import Any, NamedTuple

import numpy as np

from .contents import ATOMS, Children, by_class, children, is_base, is_installed, module_of

_FUNCTIONS = (types.FunctionType, staticmethod, classmethod, property, functools.cached_property)


def _class_members(cls: type) -> Iterator[tuple[str, Any]]:
    for base in cls.__mro__:
        if not is_base(base.__module__):
            # A list, as attributes may be added while the walk goes on.
            yield from list(vars(base).items())


def class_children(cls: type) -> Children:
    """The attributes of a class that are data, shared by its instances."""
    if issubclass(cls, enum.Enum):
        yield from list(cls.__members__.items())
        return
    for name, content in _class_members(cls):
        is_special = name.startswith(("__", "_abc_")) and (name.endswith("__") or name == "_abc_impl")
        if not (is_special or _is_code(content)):
            yield name, content


def _is_code(content: Any) -> bool:
    """Whether an attribute of a class is a function or another descriptor: one that runs code when it is read."""
    return isinstance(content, _FUNCTIONS) or (hasattr(type(content), "__get__") and not isinstance(content, ATOMS))


def methods(cls: type) -> Iterator[tuple[str, Any]]:
    """The attributes of a class that are functions or other descriptors."""
    return ((name, content) for name, content in _class_members(cls) if _is_code(content))


class Reads(NamedTuple):
    """The names in a function's code, and in the functions defined inside it.

    Attributes:
        variables: module variables that it reads, in order, each followed by the chain of attributes read from it.
        imports: its imports, each as the level of a relative import, the module, and the imported name or "".
        names: all of these, all attributes, and the strings that could be names.
    """

    variables: tuple[tuple[str, ...], ...]
    imports: tuple[tuple[int, str, str], ...]
    names: tuple[str, ...]


_GLOBAL_READS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
_ATTRIBUTE_READS = ("LOAD_ATTR", "LOAD_METHOD")


@functools.lru_cache(maxsize=2**15)  # a library such as keras has 11,000
def reads(code: types.CodeType) -> Reads:
    """Read the names off a function's bytecode."""
    variables: list[tuple[str, ...]] = []
    imports: list[tuple[int, str, str]] = []

    # Long arguments and inline caches may come between a name and its attributes; neither has a meaning here.
    instructions = [
        (i.opname, i.argval) for i in dis.get_instructions(code) if i.opname not in ("EXTENDED_ARG", "CACHE")
    ]
    for index, (operation, name) in enumerate(instructions):
        if operation in _GLOBAL_READS:
            # The chain ends at the first call or item: ``f().a`` gives ``f``.
            attributes = itertools.takewhile(lambda step: step[0] in _ATTRIBUTE_READS, instructions[index + 1 :])
            variables.append((name, *(attribute for _, attribute in attributes)))
        elif operation == "IMPORT_NAME":
            level = instructions[index - 2][1]  # two instructions before: the level, the imported names, the import
            following = itertools.takewhile(
                lambda step: step[0] in ("IMPORT_FROM", "STORE_FAST"), instructions[index + 1 :]
            )
            targets = [target for operation, target in following if operation == "IMPORT_FROM"] or [""]
            imports += [(level, name, target) for target in targets]

    # Strings count as names, since `getattr` takes them. Too many names make the walk visit more, and miss nothing.
    names = [*code.co_names, *(c for c in code.co_consts if isinstance(c, str) and c.isidentifier())]
    for inner in (reads(const) for const in code.co_consts if isinstance(const, types.CodeType)):
        variables += inner.variables
        imports += inner.imports
        names += inner.names
    return Reads(tuple(dict.fromkeys(variables)), tuple(dict.fromkeys(imports)), tuple(dict.fromkeys(names)))


def global_children(fun: types.FunctionType) -> Children:
    """The module variables that a function reads: in its own module, and in modules that it names or imports."""
    code = reads(fun.__code__)
    for name, *attributes in code.variables:
        if name in fun.__globals__:
            yield from _through_modules(fun.__globals__[name], name, attributes)
    for level, name, target in code.imports:
        try:
            full = importlib.util.resolve_name("." * level + name, fun.__globals__.get("__package__"))
        except ImportError:
            continue
        # A module that is not loaded holds no state yet; the walk never imports one.
        if full in sys.modules:
            yield from _through_modules(sys.modules[full], full, [target] if target else [])


def code_of(fun: Any) -> list[str]:
    """The code of a function and of those that it holds, or that a user's function names: without lines, and without
    other values, so that it is the same in each process.
    """
    texts: list[str] = []
    seen, pending = set(), [fun]
    while pending:
        x = pending.pop()
        if id(x) in seen:
            continue
        seen.add(id(x))
        if isinstance(x, types.FunctionType):
            texts.append(_text_of(x.__code__))
            pending += [content for _, content in children(x)]
            if not (is_base(module_of(x)) or is_installed(module_of(x))):
                named = [x.__globals__.get(name) for name in reads(x.__code__).names]
                pending += [f for f in named if isinstance(f, types.FunctionType)]
        elif isinstance(x, (types.BuiltinFunctionType, np.ufunc)):
            texts.append(x.__name__)
        elif isinstance(x, functools.partial):
            pending += [x.func, *x.args, *x.keywords.values()]
        else:
            calls = [vars(cls).get("__call__") for cls in type(x).__mro__]
            calls = [x.__func__] if isinstance(x, types.MethodType) else calls
            pending += [call for call in calls if isinstance(call, types.FunctionType)]
    return texts


def _text_of(const: Any) -> str:
    if isinstance(const, types.CodeType):
        return repr((const.co_code, const.co_names, _text_of(const.co_consts)))
    if isinstance(const, (tuple, frozenset)):
        items = map(_text_of, const)
        return repr([*items] if isinstance(const, tuple) else sorted(items))
    return repr(const)


def _through_modules(content: Any, path: str, attributes: Sequence[str]) -> Children:
    """The object that a chain of attributes leads to: from a module through submodules to the first other object."""
    for name in attributes:
        # From the first object that is not a module the walk goes on by itself: to read an attribute could run the
        # user's code.
        # By its type: `isinstance` reads `__class__`, which a proxy computes.
        if not issubclass(type(content), types.ModuleType) or is_base(content.__name__):
            break
        content, path = vars(content).get(name), f"{path}.{name}"
    yield "" if type(content) is types.FunctionType else path, content


def module_children(module: types.ModuleType, names: Set[str]) -> Children:
    """The variables of a module that have one of these names, sorted; none of modules without states of a user."""
    if not is_base(module.__name__):
        variables = vars(module)
        yield from [(name, variables[name]) for name in sorted(names & variables.keys())]


def names_in_bases(cls: type, names: Set[str]) -> set[str]:
    """Names in the methods that a class inherits from a library: a base's ``__call__`` runs a method of the user's."""
    names_read: set[str] = set()
    for base in cls.__mro__:
        if is_base(base.__module__):
            for name, method_names in _names_by_method(base).items():
                if name == "__call__" or name in names:
                    names_read.update(method_names)
    return names_read


@by_class
def _names_by_method(cls: type) -> dict[str, tuple[str, ...]]:
    functions = {name: f for name, f in vars(cls).items() if isinstance(f, types.FunctionType)}
    return {name: reads(f.__code__).names for name, f in functions.items()}
