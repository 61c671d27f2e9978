"""``MODULE:FUNCTION`` with ``--shapes``: a function of the user's, with its arguments."""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._text import brief, short_dtype, suggestion


class BadInput(Exception):
    """The command line names something that does not exist or cannot be read: one line on stderr, exit status 2."""


class UserFunction(NamedTuple):
    """A function and its arguments."""

    fun: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def load_function(name: str, shapes: str | None, is_factory: bool) -> UserFunction:
    """Import the user's module, and find or make the function and its arguments.

    Args:
        name: ``MODULE:FUNCTION``.
        shapes: the arguments, for `parse_shapes`; None if there are none.
        is_factory: whether FUNCTION, called without arguments, returns the function, or ``(fun, args)`` or
            ``(fun, args, kwargs)``.

    Raises:
        BadInput: one of them does not exist, or the arguments do not fit.
    """
    module_name, separator, path = name.rpartition(":")
    if not (separator and module_name and path):
        raise BadInput(f"{name!r} is not of the form MODULE:FUNCTION, such as train:loss or train.py:loss")

    # Mistakes in the text show before the module is imported, which may take long.
    args, kwargs = parse_shapes(shapes or "")
    with _as_script(module_name):
        fun = _attribute(_import(module_name), path, module_name)
        if is_factory:
            _check_arguments(fun, name, (), {}, "a factory is called without arguments")
            return _from_factory(fun(), name, args, kwargs, shapes is not None)
    hint = "--shapes has the arguments" if shapes else "give them with --shapes"
    _check_arguments(fun, name, args, kwargs, hint)
    return UserFunction(fun, args, kwargs)


# -- modules ---------------------------------------------------------------------------------------------------------


@contextmanager
def _as_script(module_name: str) -> Iterator[None]:
    """Hide our own options from a module that reads ``sys.argv`` when it is imported."""
    argv = sys.argv
    sys.argv = [module_name]
    try:
        yield
    finally:
        sys.argv = argv


def _import(name: str) -> ModuleType:
    if name.endswith(".py") or os.sep in name or "/" in name:
        return _import_file(name)
    if not all(part.isidentifier() for part in name.split(".")):
        raise BadInput(f"{name!r} is neither a module nor a path to a .py file")
    _add_path(os.getcwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as e:
        # A module that the user's module imports is the user's own error.
        if e.name is None or not f"{name}.".startswith(f"{e.name}."):
            raise
        raise BadInput(f"no module named {e.name!r}, neither in {os.getcwd()} nor installed") from None


def _import_file(path: str) -> ModuleType:
    path = os.path.abspath(path)
    if not os.path.isfile(path):
        raise BadInput(f"no file {path}")
    folder, stem = os.path.dirname(path), os.path.splitext(os.path.basename(path))[0]

    # A file of a package is imported by its full name, so that its relative imports work.
    name = stem
    while os.path.exists(os.path.join(folder, "__init__.py")):
        folder, package = os.path.split(folder)
        name = f"{package}.{name}"
    _add_path(folder)
    if "." in name:
        return importlib.import_module(name.removesuffix(".__init__"))

    # The file may have the name of another module: `test.py`, `statistics.py`.
    if name in sys.modules:
        if getattr(sys.modules[name], "__file__", None) == path:
            return sys.modules[name]
        name = f"{name}_"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise BadInput(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _add_path(folder: str) -> None:
    if folder not in sys.path:
        sys.path.insert(0, folder)


# -- functions -------------------------------------------------------------------------------------------------------


def _attribute(module: ModuleType, path: str, module_name: str) -> Callable[..., Any]:
    value: Any = module
    for name in path.split("."):
        if not hasattr(value, name):
            where = module_name if value is module else brief(value)
            raise BadInput(f"{where} has no attribute {name!r}.{suggestion(name, _public(value))}".rstrip("."))
        value = _method(value, name) if inspect.isclass(value) else getattr(value, name)
    if not callable(value):
        raise BadInput(f"{module_name}:{path} is not a function, but of type {type(value).__name__}")
    return value


def _public(value: Any) -> list[str]:
    return [name for name in dir(value) if not name.startswith("_")]


def _method(cls: type, name: str) -> Any:
    """An attribute of a class; a method of an instance, if the class can be called without arguments."""
    static = inspect.getattr_static(cls, name)
    is_method = callable(static) and hasattr(type(static), "__get__")
    if isinstance(static, (staticmethod, classmethod, type)) or not is_method:
        return getattr(cls, name)
    hint = f"{cls.__name__}.{name} is a method; name an instance, or a --factory that makes one"
    _check_arguments(cls, cls.__name__, (), {}, hint)
    return getattr(cls(), name)


def _check_arguments(
    fun: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any], hint: str
) -> None:
    """The number and the names of arguments; raises BadInput."""
    try:
        signature = inspect.signature(fun)
    except (TypeError, ValueError):  # a builtin
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as e:
        raise BadInput(f"{name}{_short(signature)}: {e}; {hint}") from None


def _short(signature: inspect.Signature) -> str:
    """Drop annotations and defaults, which may be long."""
    parameters = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    parameters = [p if p.default is p.empty else p.replace(default=...) for p in parameters]
    return str(signature.replace(parameters=parameters, return_annotation=signature.empty)).replace("Ellipsis", "...")


def _from_factory(result: Any, name: str, args: tuple, kwargs: dict[str, Any], has_shapes: bool) -> UserFunction:
    if callable(result):
        _check_arguments(result, f"the function of {name}", args, kwargs, "give its arguments with --shapes")
        return UserFunction(result, args, kwargs)
    forms = "(fun, args) or (fun, args, kwargs), or a function to call with --shapes"
    if not isinstance(result, (tuple, list)) or len(result) not in (2, 3) or not callable(result[0]):
        raise BadInput(f"the factory {name} has to return {forms}, and returned {brief(result)}")
    if has_shapes:
        raise BadInput(f"the factory {name} returned the arguments, too: leave out --shapes")
    fun, made_args, *keywords = result
    made_kwargs = keywords[0] if keywords else {}
    if not isinstance(made_args, (tuple, list)) or not isinstance(made_kwargs, dict):
        types = ", ".join(type(x).__name__ for x in result[1:])
        raise BadInput(f"the factory {name} has to return a tuple of arguments and a dict of keywords, not {types}")
    _check_arguments(fun, f"the function of {name}", tuple(made_args), made_kwargs, "the factory made its arguments")
    return UserFunction(fun, tuple(made_args), made_kwargs)


# -- shapes ----------------------------------------------------------------------------------------------------------

_NAMES = (
    "bool int2 int4 int8 int16 int32 int64 uint2 uint4 uint8 uint16 uint32 uint64 bfloat16 float16 float32 float64 "
    "complex64 complex128"
)
_KEYS = {"fry": "threefry2x32", "rbg": "rbg", "urbg": "unsafe_rbg"}  # as JAX prints them in types
_MOST_ENTRIES = 10**18  # along an axis


def parse_shapes(text: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Parse ``--shapes``: the arguments of a call in Python, with types for arrays.

    A type is a dtype (f32, bf16, i32, u8, bool, pred, c64, f8_e4m3fn ..., or in full float32 ..., or key<fry>,
    key<rbg>, key<urbg>) and sizes in brackets. The keys of a dict may lack their quotes.

    Returns:
        The positional and the keyword arguments, with ``jax.ShapeDtypeStruct`` for each type.

    Raises:
        BadInput: it is malformed.

    Example:
        >>> args, kwargs = parse_shapes('f32[32,128], (i32[], [bool[2]]), mask={"a": bf16[4]}')
        >>> args[0].shape, args[1][0].dtype, kwargs["mask"]["a"].dtype
        ((32, 128), dtype('int32'), dtype(bfloat16))
    """
    # What Python's grammar has not: an empty index, and the brackets around the name of a key.
    source = re.sub(r"([\w>]\s*)\[\s*\]", r"\1[()]", text)
    source = re.sub(r"\bkey<(\w*)>", r"key_\1", source)
    try:
        call = ast.parse(f"f({source})", mode="eval").body
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
            raise ValueError("expected arguments, separated by commas")
        kwargs = {k.arg: _argument(k.value) for k in call.keywords if k.arg is not None}
        if len(kwargs) < len(call.keywords):
            raise ValueError("a keyword is given twice, or is missing")
        return tuple(map(_argument, call.args)), kwargs
    except (SyntaxError, ValueError) as e:
        raise BadInput(f"--shapes: {e.args[0]}, in {text[:100]}") from None
    except (RecursionError, MemoryError):
        raise BadInput("--shapes: the brackets are nested too deeply") from None


def _argument(node: ast.AST) -> Any:
    match node:
        case ast.Subscript(value=ast.Name(id=name), slice=sizes):
            sizes = ast.literal_eval(sizes)
            shape = sizes if isinstance(sizes, tuple) else (sizes,)
            if not all(type(n) is int and 0 <= n < _MOST_ENTRIES for n in shape):
                raise ValueError(f"{shape} are no sizes of an array")
            return jax.ShapeDtypeStruct(shape, _dtype(name))
        case ast.Tuple():
            return tuple(map(_argument, node.elts))
        case ast.List():
            return list(map(_argument, node.elts))
        case ast.Dict():
            items = {_key(key): _argument(x) for key, x in zip(node.keys, node.values, strict=True)}
            if len(items) < len(node.keys):
                raise ValueError("a key is given twice")
            return items
    raise ValueError(f"expected a type such as f32[2,3], or '(', '[', '{{', and got {ast.unparse(node)}")


def _key(node: ast.AST | None) -> str:
    match node:
        case ast.Constant(value=str(key)) | ast.Name(id=key):
            return key
    raise ValueError("expected a key such as 'x'")


def _dtype(name: str) -> Any:
    if name.startswith("key_"):
        if name[4:] not in _KEYS:
            raise ValueError(f"'key<{name[4:]}>' is not a type of keys; there are key<fry>, key<rbg> and key<urbg>")
        return jax.eval_shape(lambda: jax.random.key(0, impl=_KEYS[name[4:]])).dtype
    dtypes = _dtypes()
    if name not in dtypes:
        hint = suggestion(name, dtypes) or " There are f32, bf16, i32, bool, key<fry>"
        raise ValueError(f"{name!r} is not a type.{hint}")
    if dtypes[name] != jax.dtypes.canonicalize_dtype(dtypes[name]):
        raise ValueError(f"{name} needs 64-bit types: set JAX_ENABLE_X64=1")
    return dtypes[name]


@functools.cache
def _dtypes() -> dict[str, Any]:
    """Types by their names, short as JAX prints them and in full."""
    small = [name for name in dir(jnp) if name.startswith(("float4_", "float8_"))]
    names = [name for name in [*_NAMES.split(), *small] if hasattr(jnp, name)]
    dtypes = {name: np.dtype(getattr(jnp, name)) for name in names}
    return dtypes | {short_dtype(name): dtype for name, dtype in dtypes.items()} | {"pred": dtypes["bool"]}
