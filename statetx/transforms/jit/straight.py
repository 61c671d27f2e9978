"""Prove from bytecode that a state is created unconditionally, from the jitted function down to the constructor.

Three conditions must hold. Code that is not understood counts as conditional, so that an error costs a second staging and not
a wrong value.

- In every function on the stack, the bytecode up to the running call is straight: no branch, no loop, no handler, and no
  completed call except of library functions, since a user's function may check whether the state exists already. Library code
  that calls user code in the same way in each run is skipped (`Kind.deterministic_paths`).
- The state goes directly from its constructor into attributes, ``self.h = State(...)``: a state in a variable may later be
  stored only if there is none yet.
- The variables and attributes that this code has read hold the same objects when the function has returned: a method that
  creates the state may have replaced itself by another method.
"""

from __future__ import annotations

import dis
import functools
import gc
import inspect
import numbers
import sys
import sysconfig
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from ... import _jax, _states
from ..._objects.contents import package_of

BODY = "run_jitted"
"""The name of the function in `program` that runs a jitted function."""

# Instructions without control flow. Any that is not listed, in a new Python version for example, counts as a branch.
_HARMLESS = frozenset(
    """
    BINARY_OP BINARY_SLICE BINARY_SUBSCR BUILD_CONST_KEY_MAP BUILD_LIST BUILD_MAP BUILD_SLICE BUILD_TUPLE CALL
    CALL_FUNCTION_EX CALL_INTRINSIC_1 CALL_KW COPY COPY_FREE_VARS DICT_MERGE DICT_UPDATE KW_NAMES LIST_EXTEND LOAD_CLOSURE
    LOAD_CONST MAKE_CELL MAKE_FUNCTION NOP POP_TOP PRECALL PUSH_NULL RESUME SET_FUNCTION_ATTRIBUTE STORE_ATTR STORE_DEREF
    STORE_FAST STORE_FAST_STORE_FAST STORE_GLOBAL SWAP UNARY_NEGATIVE UNPACK_SEQUENCE
    """.split()
)
# Instructions that load a variable, the start of a chain ``a.b.c``.
_ROOTS = frozenset(
    """
    LOAD_DEREF LOAD_FAST LOAD_FAST_CHECK LOAD_FAST_LOAD_FAST LOAD_GLOBAL LOAD_NAME STORE_FAST_LOAD_FAST
    """.split()
)
_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")
_CALLS = ("CALL", "CALL_FUNCTION_EX", "CALL_KW")
_NULL_FOLLOWS = sys.version_info >= (3, 13)
"""Whether a call's NULL is pushed after the called function; until Python 3.12 it is pushed before."""

# Treated like functions of a library.
_BUILTINS = frozenset([abs, dict, float, int, len, list, max, min, print, range, round, sum, tuple])
_NUMERIC = ("jax", "jaxlib", "numpy", "ml_dtypes", "math")
_DATA = (numbers.Number, str, type(None))
_FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.ModuleType, type)
_PLAIN = (jax.Array, np.ndarray, np.generic, tuple, list, dict, *_DATA)


class _Conditional(Exception):
    """The code has something that may depend on whether the state exists."""


_UNKNOWN = object()
"""Represents a value that is not tracked, such as the result of a library function."""


class _Read:
    """A variable or an attribute, and the object that it held. Keeps no state and no container of states alive."""

    __slots__ = ("_get", "_id", "_ref")

    def __init__(self, get: Callable[[], Any], value: Any):
        self._get = get
        self._id = id(value)
        self._ref = _weak(value)

    def is_same(self) -> bool:
        """Whether the variable or attribute holds the same object now."""
        try:
            current = self._get()
        except _Conditional:  # the owner was collected
            return False
        return id(current) == self._id and (self._ref is None or self._ref() is current)


def _weak(x: Any) -> weakref.ref | None:
    return weakref.ref(x) if type(x).__weakrefoffset__ else None


class Note:
    """Record of a state that straight code created.

    Attributes:
        names: names of the attributes that the code has read.
        stores: the attributes that the state is stored in, as pairs of the owner's id and the name.
    """

    def __init__(self, names: set[str], stores: set[tuple[int, str]], reads: list[_Read]):
        self.names = names
        self.stores = stores
        self._reads = reads

    def holds(self) -> bool:
        """Whether the code would read the same objects now."""
        return all(read.is_same() for read in self._reads)


class Notes(dict[int, "Note | None"]):
    """A `Note` for each created state by id; None if it may have been created conditionally."""

    def __call__(self, state: Any) -> None:
        """Take a note; called by the state's constructor."""
        try:
            self[id(state)] = _note(list(_stack()))
        except _Conditional:
            self[id(state)] = None


def _note(frames: Sequence[types.FrameType]) -> Note:
    """Read the code of these frames, innermost first. Raises `_Conditional`."""
    codes = {f.f_code for f in frames}
    readers = [None if f.f_code.co_filename.startswith(_conductors()) else _Reader(f, codes) for f in frames]
    for reader in readers:
        if reader is not None:
            reader.read()
    stores = _stores(readers)
    user_readers = [reader for reader in readers if reader is not None]
    if any(a.stored & b.objects for a in user_readers for b in user_readers):
        raise _Conditional  # an object was read under a name that was stored: the call may have created it, too
    return Note(
        {name for reader in user_readers for name in reader.names},
        stores,
        [read for reader in user_readers for read in reader.reads],
    )


def _stores(readers: Sequence[_Reader | None]) -> set[tuple[int, str]]:
    """The attributes that the state is stored in when its constructor returns."""
    is_outside_constructor = False
    for reader in readers:
        if not is_outside_constructor and (reader is None or reader.is_constructor):
            continue  # a constructor of the state's own type
        is_outside_constructor = True
        if reader is None:
            raise _Conditional
        stores = reader.stores_of_result()
        if stores is not None:
            return stores
    raise _Conditional


def _stack() -> Iterator[types.FrameType]:
    """The frames between the constructor and the outermost jitted function that is being staged, innermost first."""
    frames, num = [], 0
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        frames.append(frame)
        if frame.f_code.co_name == BODY and frame.f_code.co_filename.startswith(_states.PACKAGE):
            num = len(frames)
        frame = frame.f_back
    return iter(frames[:num])


def _conductors() -> tuple[str, ...]:
    return (_states.PACKAGE, _jax.JAX_FOLDER, *(file for kind in _states.kinds() for file in kind.deterministic_paths))


@functools.cache
def _installed() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    return paths["purelib"], paths["platlib"], paths["stdlib"]


@functools.lru_cache(maxsize=1024)
def _instructions(code: types.CodeType) -> list[Any]:
    return [i for i in dis.get_instructions(code) if i.opname not in ("CACHE", "EXTENDED_ARG")]


class _Reader:
    """Reads the bytecode of a running function, up to the instruction that it is at.

    Args:
        codes: the code objects of all running functions on the stack; calls of these are allowed.

    Attributes:
        is_constructor: whether the function is a constructor of a state's type.
        names: names of the attributes read.
        objects: names of the attributes and global variables read that hold neither data nor a function.
        stored: names of the attributes and global variables that the function has stored.
        reads: the reads of anything but data: without a branch, only a function or an object can change the code that runs.
    """

    def __init__(self, frame: types.FrameType, codes: set[types.CodeType]):
        self._frame = frame
        self._codes = codes
        self._locals = frame.f_locals
        self._assigned: set[str] = set()
        self.names: set[str] = set()
        self.objects: set[str] = set()
        self.stored: set[str] = set()
        self.reads: list[_Read] = []
        self.is_constructor = self._is_constructor()

    def read(self) -> None:
        """Read the code; raises `_Conditional` if it is not straight."""
        ops = [i for i in _instructions(self._frame.f_code) if i.offset <= self._frame.f_lasti]
        value, head = _UNKNOWN, 0  # value and first instruction of the current chain ``a.b.c``
        for n, op in enumerate(ops):
            next_opname = ops[n + 1].opname if n + 1 < len(ops) else ""
            if op.opname in _ROOTS:
                value, head = self._load(op), n
            elif op.opname in _ATTRIBUTES:
                value = self._attribute(value, op.argval)
            else:
                value = _UNKNOWN
                self._pass(op, ops[n - 1], ops[n + 1 : n + 4])
                continue
            if next_opname not in _ATTRIBUTES:
                is_called = op.opname == "LOAD_METHOD" or "NULL" in op.argrepr
                is_called = is_called or "PUSH_NULL" == (next_opname if _NULL_FOLLOWS else ops[head - 1].opname)
                self._check(value, is_called)

    def stores_of_result(self) -> set[tuple[int, str]] | None:
        """The attributes that take the result of the running call; None if the result is returned at once."""
        code = _instructions(self._frame.f_code)
        following = [i for i in code if i.offset > self._frame.f_lasti]
        if code[len(code) - len(following) - 1].opname not in _CALLS:
            raise _Conditional
        if following[0].opname == "RETURN_VALUE":
            return None

        # ``a.h = b.h = State(...)``: the result is copied on the stack, and each owner is loaded before its store.
        stores, num, owner = set(), 1, _UNKNOWN  # num: copies of the result on the stack
        for op in following:
            name: Any = op.argval
            if op.opname in _ROOTS and op.opname != "STORE_FAST_LOAD_FAST" and not isinstance(op.argval, tuple):
                owner = self._load(op)
            elif op.opname in _ATTRIBUTES:
                owner = self._attribute(owner, name)
            elif op.opname == "COPY" and op.arg == 1 and owner is _UNKNOWN:
                num += 1
            elif op.opname == "STORE_ATTR" and owner is not _UNKNOWN and _is_plainly_set(owner, name):
                stores.add((id(owner), name))
                num, owner = num - 1, _UNKNOWN
                if num == 0:
                    return stores
            else:
                break
        raise _Conditional

    def _is_constructor(self) -> bool:
        code = self._frame.f_code
        if code.co_name not in ("__init__", "__new__", "__post_init__"):
            return False
        first = self._locals.get(code.co_varnames[0]) if code.co_varnames else None
        if not _is_state_type(first if isinstance(first, type) else type(first)):
            raise _Conditional  # an object that the call also creates is a new one in each call
        return True

    def _pass(self, op: Any, previous: Any, following: list[Any]) -> None:
        """Check an instruction that loads no variable and no attribute."""
        if op.opname == "BEFORE_WITH":
            is_straight = previous.opname in _CALLS  # the context manager is the result of a library call
        elif op.opname == "PUSH_NULL" and _NULL_FOLLOWS:
            is_straight = previous.opname in (*_ROOTS, *_ATTRIBUTES, *_CALLS)  # not an item of a container of functions
        elif isinstance(op.argval, types.CodeType):
            is_straight = op.argval in self._codes or any(i.opname.startswith("STORE_") for i in following)
        else:
            is_straight = op.opname in _HARMLESS
        names: Any = op.argval
        if op.opname in ("STORE_ATTR", "STORE_GLOBAL"):
            self.stored.add(names)
        elif op.opname.startswith("STORE_"):
            self._store(names if isinstance(names, tuple) else (names,))
        if not is_straight:
            raise _Conditional

    def _store(self, names: tuple[str, ...]) -> None:
        # These variables may have been read before. `_locals` has only the last value of a variable.
        code = self._frame.f_code
        num_starred = sum(bool(code.co_flags & flag) for flag in (inspect.CO_VARARGS, inspect.CO_VARKEYWORDS))
        num = code.co_argcount + code.co_kwonlyargcount + num_starred
        read_names = {*self._assigned, *code.co_varnames[:num], *code.co_freevars}
        if not read_names.isdisjoint(names):
            raise _Conditional  # its value when it was read is lost
        self._assigned.update(names)

    def _load(self, op: Any) -> Any:
        if op.opname == "STORE_FAST_LOAD_FAST":
            self._store(op.argval[:1])
            return self._variable(op.argval[1])
        if isinstance(op.argval, tuple):
            self._check(self._variable(op.argval[0]), False)
            return self._variable(op.argval[1])
        if op.opname in ("LOAD_GLOBAL", "LOAD_NAME") and op.argval not in self._locals:
            return self._global(op.argval)
        return self._variable(op.argval)

    def _global(self, name: str) -> Any:
        variables, builtins = self._frame.f_globals, self._frame.f_builtins

        def get() -> Any:
            return variables[name] if name in variables else builtins.get(name, _UNKNOWN)

        return self._note_read(get, name)

    def _note_read(self, get: Callable[[], Any], name: str = "") -> Any:
        value = get()
        if not isinstance(value, _DATA):
            self.reads.append(_Read(get, value))
        if name and not (isinstance(value, (*_PLAIN, *_FUNCTIONS)) or _is_ours(value)):
            self.objects.add(name)
        return value

    def _variable(self, name: str) -> Any:
        value = self._locals.get(name, _UNKNOWN)
        if name in self._assigned and not (isinstance(value, (*_PLAIN, *_FUNCTIONS)) or _is_ours(value)):
            raise _Conditional  # an object that was created in the call
        if name in self._frame.f_code.co_freevars:
            for cell in self._cells(name, value):
                self._note_read(functools.partial(_contents, cell))
        return value

    @functools.cached_property
    def _functions(self) -> list[types.FunctionType]:
        """The functions with this code; any of them may be the running one. The search visits every object."""
        code = self._frame.f_code
        return [f for f in gc.get_referrers(code) if isinstance(f, types.FunctionType) and f.__code__ is code]

    def _cells(self, name: str, value: Any) -> list[types.CellType]:
        """The cells that the running function may read for a variable of an enclosing function."""
        index = self._frame.f_code.co_freevars.index(name)
        cells = [f.__closure__[index] for f in self._functions if f.__closure__]
        cells = [cell for cell in cells if _contents(cell) is value]
        if not cells:
            raise _Conditional
        return cells

    def _attribute(self, value: Any, name: str) -> Any:
        self.names.add(name)
        if value is _UNKNOWN or isinstance(value, jax.Array):
            if not hasattr(jax.Array, name):
                raise _Conditional
            return _UNKNOWN
        if _is_state_type(type(value)) or isinstance(value, (list, tuple, dict)):
            attribute = _static(value, name)
        else:
            owner = _weak(value) or (lambda: value)
            attribute = self._note_read(lambda: _static(owner(), name), name)
        if isinstance(attribute, property):
            self._check(attribute.fget, True)
            return _UNKNOWN
        if isinstance(attribute, (staticmethod, classmethod)):
            return attribute.__func__
        if hasattr(type(attribute), "__get__") and not isinstance(
            attribute, (types.FunctionType, types.MethodDescriptorType)
        ):
            raise _Conditional
        return attribute

    def _check(self, value: Any, is_called: bool) -> None:
        """Raise if a value may be, or call, user code that has run and returned."""
        if isinstance(value, types.MethodType):
            value = value.__func__
        if isinstance(value, types.FunctionType):
            is_straight = value.__code__ in self._codes or value.__code__.co_filename.startswith(_libraries())
        elif isinstance(value, type):
            is_straight = _is_state_type(value) or value in _BUILTINS or value.__module__.startswith(_NUMERIC)
        elif isinstance(value, types.BuiltinFunctionType):
            is_straight = value in _BUILTINS or str(value.__module__).startswith(_NUMERIC)
        elif package_of(type(value).__module__) == "statetx" and hasattr(value, "__wrapped__"):
            return self._check(
                value.__wrapped__, is_called
            )  # a transform; other wrappers, as a cache, may leave out the call
        elif isinstance(value, functools.partial):
            for part in (value.func, *value.args, *value.keywords.values()):
                self._check(part, False)
            return
        else:
            is_straight = value is _UNKNOWN or not (is_called or hasattr(value, "__wrapped__"))
            is_straight = is_straight or type(value).__module__.startswith(_NUMERIC)
        if not is_straight:
            raise _Conditional


def _libraries() -> tuple[str, ...]:
    return (*_installed(), *_states.library_folders())


def _is_ours(obj: Any) -> bool:
    """Whether the object is the result of a transform of statetx or JAX."""
    return package_of(type(obj).__module__) == "statetx" or type(obj).__module__.startswith(_NUMERIC)


def _is_state_type(cls: type) -> bool:
    return any(issubclass(cls, kind.base) for kind in _states.kinds())


def _static(obj: Any, name: str) -> Any:
    """Look up an attribute without running user code."""
    if isinstance(obj, types.ModuleType):
        return vars(obj).get(name, _UNKNOWN)
    if not isinstance(type(obj).__getattribute__, types.WrapperDescriptorType):
        raise _Conditional
    attribute = inspect.getattr_static(obj, name, _UNKNOWN)
    if attribute is _UNKNOWN:
        raise _Conditional  # comes from `__getattr__`
    return attribute.__get__(obj) if isinstance(attribute, types.MemberDescriptorType) else attribute


def _is_plainly_set(owner: Any, name: str) -> bool:
    """Whether setting the attribute runs no user code."""
    setter = type(owner).__setattr__
    is_known = isinstance(setter, types.WrapperDescriptorType) or _code_file(setter).startswith(
        _states.library_folders()
    )
    attribute = inspect.getattr_static(type(owner), name, None)
    is_data = hasattr(type(attribute), "__set__") and not isinstance(attribute, types.MemberDescriptorType)
    return is_known and not is_data and not isinstance(owner, (type, types.ModuleType))


def _code_file(fun: Any) -> str:
    return getattr(getattr(fun, "__code__", None), "co_filename", "")


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _UNKNOWN
