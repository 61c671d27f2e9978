"""``--shapes``: arguments by their types, as in ``f32[32,128], {"x": i32[8]}, mask=bool[32]``.

Grammar, with any white space between the words:

    arguments := [argument ("," argument)* [","]]
    argument  := [name "="] value
    value     := array | "(" values ")" | "[" values "]" | "{" [key ":" value ("," key ":" value)* [","]] "}"
    array     := dtype "[" [size ("," size)* [","]] "]"
    dtype     := f32, bf16, i32, u8, bool, pred, c64, f8_e4m3fn ... | float32 ... | key<fry>, key<rbg>, key<urbg>
    key       := name | quoted text
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from .._text import short_dtype, suggestion
from .bad_input import BadInput

T = TypeVar("T")

_NAMES = "bool int2 int4 int8 int16 int32 int64 uint2 uint4 uint8 uint16 uint32 uint64 bfloat16 float16 float32 float64 complex64 complex128"
_KEYS = {"fry": "threefry2x32", "rbg": "rbg", "urbg": "unsafe_rbg"}  # as JAX prints them in types


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
        return _Parser(text).arguments()
    except RecursionError:
        raise BadInput("--shapes: the brackets are nested too deeply") from None


class _Parser:
    """Reads a text from the left; `_at` is the place of the next character."""

    def __init__(self, text: str):
        self._text = text
        self._at = 0

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        while self._peek():
            if match := self._match(r"([A-Za-z_]\w*)\s*="):
                if match[1] in kwargs:
                    self._fail(f"the keyword {match[1]!r} is there twice", match.start())
                kwargs[match[1]] = self._value()
            else:
                start = self._at
                args.append(self._value())
                if kwargs:
                    self._fail("a positional argument follows a keyword argument", start)
            if self._peek() and not self._take(","):
                self._expected("',' or the end")
        return tuple(args), kwargs

    def _value(self) -> Any:
        if self._take("("):
            values, has_comma = self._items(")", self._value)
            return values[0] if len(values) == 1 and not has_comma else tuple(values)
        if self._take("["):
            return self._items("]", self._value)[0]
        if self._take("{"):
            pairs = self._items("}", self._pair)[0]
            if len(dict(pairs)) < len(pairs):
                self._fail("a key is given twice", self._at)
            return dict(pairs)
        return self._array()

    def _items(self, end: str, item: Callable[[], T]) -> tuple[list[T], bool]:
        """The items before a closing bracket, and whether there is a comma."""
        items: list[T] = []
        has_comma = False
        while not self._take(end):
            if items and not has_comma:
                self._expected(f"',' or {end!r}")
            items.append(item())
            has_comma = self._take(",")
        return items, has_comma or len(items) != 1

    def _pair(self) -> tuple[str, Any]:
        match = self._match(r"'([^']*)'|\"([^\"]*)\"|([A-Za-z_]\w*)") or self._expected("a key such as 'x'")
        if not self._take(":"):
            self._expected("':'")
        return next(group for group in match.groups() if group is not None), self._value()

    def _array(self) -> jax.ShapeDtypeStruct:
        start = self._at
        match = self._match(r"[A-Za-z_]\w*(<\w*>)?")
        if match is None:
            self._expected("a type such as f32[2,3], or '(', '[', '{'")
        dtype = self._dtype(match[0], start)
        if not self._take("["):
            self._expected(f"'[' after {match[0]}")
        return jax.ShapeDtypeStruct(tuple(self._items("]", self._size)[0]), dtype)

    def _size(self) -> int:
        start = self._at
        match = self._match(r"\d[\d_]*(?!\w)") or self._expected("a size such as 32")
        digits = match[0].replace("_", "")
        if len(digits) > 18:
            self._fail(f"a size of {len(digits)} digits is more than an array has", start)
        return int(digits)

    def _dtype(self, name: str, start: int) -> Any:
        if name.startswith("key<"):
            if name[4:-1] not in _KEYS:
                self._fail(f"{name!r} is not a type of keys; there are key<fry>, key<rbg> and key<urbg>", start)
            return _key_dtype(_KEYS[name[4:-1]])
        dtypes = _dtypes()
        if name not in dtypes:
            self._fail(
                f"{name!r} is not a type.{suggestion(name, dtypes) or ' There are f32, bf16, i32, bool, key<fry>'}",
                start,
            )
        dtype = dtypes[name]
        if dtype != jax.dtypes.canonicalize_dtype(dtype):
            self._fail(f"{name} needs 64-bit types: set JAX_ENABLE_X64=1", start)
        return dtype

    # -- characters ------------------------------------------------------------------------------------------------

    def _peek(self) -> str:
        """The next character that is not white space; empty at the end."""
        self._match("")
        return self._text[self._at : self._at + 1]

    def _take(self, character: str) -> bool:
        return self._match(re.escape(character)) is not None

    def _match(self, pattern: str) -> re.Match[str] | None:
        """Read what matches a pattern, after white space."""
        self._at = re.compile(r"\s*").match(self._text, self._at).end()  # pyright: ignore[reportOptionalMemberAccess]
        match = re.compile(pattern).match(self._text, self._at)
        if match:
            self._at = match.end()
        return match

    def _expected(self, what: str) -> NoReturn:
        rest = self._peek()
        self._fail(f"expected {what}, got {repr(rest) if rest else 'the end'}", self._at)

    def _fail(self, problem: str, place: int) -> NoReturn:
        # White space before a word is not part of its place.
        place += len(self._text[place:]) - len(self._text[place:].lstrip())
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
