"""``--shapes``: arguments by their types, as in ``f32[32,128], {"x": i32[8]}, mask=bool[32]``.

The text is the arguments of a call in Python, with types for arrays: a dtype (f32, bf16, i32, u8, bool, pred, c64,
f8_e4m3fn ..., or in full float32 ..., or key<fry>, key<rbg>, key<urbg>) and sizes in brackets. The keys of a dict may
lack their quotes.
"""

from __future__ import annotations

import ast
import functools
import re
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from .._text import short_dtype, suggestion
from .bad_input import BadInput

_NAMES = (
    "bool int2 int4 int8 int16 int32 int64 uint2 uint4 uint8 uint16 uint32 uint64 bfloat16 float16 float32 float64 "
    "complex64 complex128"
)
_KEYS = {"fry": "threefry2x32", "rbg": "rbg", "urbg": "unsafe_rbg"}  # as JAX prints them in types
_ARRAY = re.compile(r"\b([A-Za-z_]\w*(?:<\w*>)?) *\[ *((?:\d[\d_]* *, *)*(?:\d[\d_]*)? *)\]")


def parse_shapes(text: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Parse arguments into ``jax.ShapeDtypeStruct``.

    Args:
        text: the arguments, separated by commas.

    Returns:
        The positional arguments and the keyword arguments.

    Raises:
        BadInput: it is malformed; the message has the place.

    Example:
        >>> args, kwargs = parse_shapes('f32[32,128], (i32[], [bool[2]]), mask={"a": bf16[4]}')
        >>> args[0].shape, args[1][0].dtype, kwargs["mask"]["a"].dtype
        ((32, 128), dtype('int32'), dtype(bfloat16))
    """
    try:
        return _ShapesParser(re.sub(r"\s", " ", text)).arguments()
    except (RecursionError, MemoryError):
        raise BadInput("--shapes: the brackets are nested too deeply") from None


class _ShapesParser:
    """Python's parser, for a text in which a name of the same length stands for each array."""

    def __init__(self, text: str):
        self._text = text
        self._arrays: dict[int, Any] = {}  # by their places

        def name_for(match: re.Match[str]) -> str:
            sizes = [size.strip().replace("_", "") for size in match[2].split(",") if size.strip()]
            for size in sizes:
                if len(size) > 18:
                    self._fail(f"a size of {len(size)} digits is more than an array has", match.start(2))
            dtype = self._dtype(match[1], match.start())
            self._arrays[match.start()] = jax.ShapeDtypeStruct(tuple(map(int, sizes)), dtype)
            return "_".ljust(len(match[0]))

        self._call = f"f({_ARRAY.sub(name_for, text)})"

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        try:
            call = ast.parse(self._call, mode="eval").body
        except (SyntaxError, ValueError) as e:
            problem, place = str(e.args[0]), (getattr(e, "offset", None) or 3) - 3
            if "never closed" in problem or place >= len(self._text) > 0 and "closing" in problem:  # by our bracket
                problem, place = "a bracket is not closed", len(self._text)
            self._fail(problem, place)
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
            self._fail("expected arguments, separated by commas", 0)
        kwargs: dict[str, Any] = {}
        for keyword in call.keywords:
            if keyword.arg is None or keyword.arg in kwargs:
                problem = "is there twice" if keyword.arg else "has no name"
                self._fail(f"the keyword {keyword.arg!r} {problem}", self._place(keyword))
            kwargs[keyword.arg] = self._value(keyword.value)
        return tuple(map(self._value, call.args)), kwargs

    def _value(self, node: ast.AST) -> Any:
        match node:
            case ast.Name() if self._place(node) in self._arrays:
                return self._arrays[self._place(node)]
            case ast.Tuple():
                return tuple(map(self._value, node.elts))
            case ast.List():
                return list(map(self._value, node.elts))
            case ast.Dict():
                items = [(self._key(k or node), self._value(v)) for k, v in zip(node.keys, node.values, strict=True)]
                if len(dict(items)) < len(items):
                    self._fail("a key is given twice", self._place(node))
                return dict(items)
        self._fail("expected a type such as f32[2,3], or '(', '[', '{'", self._place(node))

    def _key(self, node: ast.AST) -> str:
        match node:
            case ast.Constant(value=str(key)) | ast.Name(id=key) if self._place(node) not in self._arrays:
                return key
        self._fail("expected a key such as 'x'", self._place(node))

    def _place(self, node: Any) -> int:
        return len(self._call.encode()[: node.col_offset].decode()) - len("f(")

    def _dtype(self, name: str, start: int) -> Any:
        if name.startswith("key<"):
            if name[4:-1] not in _KEYS:
                self._fail(f"{name!r} is not a type of keys; there are key<fry>, key<rbg> and key<urbg>", start)
            return _key_dtype(_KEYS[name[4:-1]])
        dtypes = _dtypes()
        if name not in dtypes:
            hint = suggestion(name, dtypes) or " There are f32, bf16, i32, bool, key<fry>"
            self._fail(f"{name!r} is not a type.{hint}", start)
        dtype = dtypes[name]
        if dtype != jax.dtypes.canonicalize_dtype(dtype):
            self._fail(f"{name} needs 64-bit types: set JAX_ENABLE_X64=1", start)
        return dtype

    def _fail(self, problem: str, place: int) -> NoReturn:
        before, after = self._text[:place], self._text[place:]
        marked = f"{'...' * (len(before) > 100)}{before[-100:]}>>>{after[:100]}{'...' * (len(after) > 100)}"
        raise BadInput(f"--shapes: {problem.rstrip('.')}, at character {place + 1} (after >>>): {marked}")


@functools.cache
def _dtypes() -> dict[str, Any]:
    """Types by their names, short as JAX prints them and in full."""
    small = [name for name in dir(jnp) if name.startswith(("float4_", "float8_"))]
    names = [name for name in [*_NAMES.split(), *small] if hasattr(jnp, name)]
    dtypes = {name: np.dtype(getattr(jnp, name)) for name in names}
    return dtypes | {short_dtype(name): dtype for name, dtype in dtypes.items()} | {"pred": dtypes["bool"]}


def _key_dtype(implementation: str) -> Any:
    return jax.eval_shape(lambda: jax.random.key(0, impl=implementation)).dtype
