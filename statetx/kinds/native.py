"""`State`, `Param`, `RngState`: mutable cells that statetx's transforms see."""

from __future__ import annotations

import collections
import html
import operator
import sys
import types
import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from .. import _frames, _jax, _states
from .._atomic import Store
from .._errors import StateValueError
from .._text import brief
from .._tree import whole_number
from .._typing import public
from .misuse import NotAnArray, prepare

T = TypeVar("T")
if TYPE_CHECKING:  # `typing` knows defaults from Python 3.13 on
    import typing_extensions

    A = typing_extensions.TypeVar("A", default=jax.Array)
else:
    A = TypeVar("A")


class Invalidated:
    """The value of a state that was invalidated, with the reason."""

    __slots__ = ("reason",)

    def __init__(self, reason: str):
        self.reason = reason

    def __repr__(self) -> str:
        return f"<no value: {self.reason}>"


@public
class State(NotAnArray, Generic[T]):
    """A mutable cell that holds an array or a tree of arrays.

    Read and write it through `value`. Functions that do so become pure under statetx's transforms: the states that they
    read are inputs of the compiled program, the states that they write are outputs. Subclass it freely to tell kinds of
    state apart; a subclass is a filter for `statetx.states`, `grad(wrt=...)` and ``states=``.

    Args:
        value: the first value; an array, a Python number or any pytree of these. Other objects are stored unchanged.
        name: for messages and tables, where no path is known.
        **metadata: anything you want to store with the state.

    Example:
        >>> import jax.numpy as jnp
        >>> counter = State(jnp.zeros((), jnp.int32), name="steps", unit="1")
        >>> counter.value += 1
        >>> counter
        State(i32[] 1, name='steps', unit='1')
    """

    __slots__ = ("__weakref__", "_home", "_owner", "_site", "_value", "_view", "metadata", "name")

    name: str | None
    metadata: dict[str, Any]
    _owner: _frames.Frame | None  # the innermost open frame that has touched the state or made it
    _home: weakref.ref | None  # the trace the state was made in, None if made eagerly
    _view: weakref.ref | None  # to brainstate's view of the state, once one of its transforms has touched it

    def __init__(self, value: T, *, name: str | None = None, **metadata: Any):
        # `kind_of` loads the kinds of libraries imported by now: they must see the new state.
        if _states.kind_of(value) is not None and not _states.is_array_state(value):
            raise StateValueError(
                f"A state cannot hold a state: got {_states.describe(value)} as the value of a new "
                f"{type(self).__name__}. Pass its value ({type(value).__name__}.value) instead."
            )
        self._begin(value, _construction_site(), name, metadata)

    def _begin(self, value: T, site: tuple[str, int], name: str | None, metadata: dict[str, Any]) -> None:
        frame = _frames.current_frame()
        self._value = value
        self._view = None
        self._owner = frame
        self._home = _jax.trace_ref(_jax.current_trace())
        self._site = site
        self.name = name
        self.metadata = metadata
        if frame is not None:
            frame.mark_created(self, NATIVE)

    @property
    def value(self) -> T:
        """The value; assign to it to replace it."""
        # The fast path of every read and write: the thread's own frame and one identity, no call. `touch` runs once
        # a frame.
        frame = _frames._local.frame
        value = self._value if self._owner is frame else NATIVE.touched_value(self, frame)
        if type(value) is Invalidated:
            raise _states.invalidated_state_error(self, NATIVE.site_of(self), value.reason)
        if self._home is not None:
            _check_home(self, value)
        return value  # type: ignore[return-value]

    @value.setter
    def value(self, value: T) -> None:
        frame = _frames._local.frame
        if isinstance(value, State):
            raise StateValueError(
                f"A state cannot hold a state: {_states.describe(self)} was assigned {_states.describe(value)}. "
                f"Assign its .value instead."
            )

        if self._owner is not frame:
            NATIVE.touch(self, frame, writing=True)
        access = frame.accesses.get(id(self)) if frame is not None else None

        # Before the check of leaks: a state whose trace has ended may take values of the present one.
        if self._home is not None:
            _reset_dead_home(self)
        # Under the frame's own trace every tracer may be written, since the frame restores the old value when it
        # closes. Under any other, such as a plain `jax.grad` inside, the value may be a tracer that would stay
        # behind.
        if not _jax.is_eager() and (frame is None or _jax.current_trace() is not frame.trace):
            _frames.check_write(self, NATIVE, value, NATIVE.anchor(self, frame, access), _states.call_site())
        if frame is not None and access is not None:
            access.count_write()
            if not access.written:
                frame.note_write(access)
        owner = self._owner
        if frame is None and owner is not None:  # another thread has acquired the state meanwhile
            raise _frames.foreign_state_error(self, NATIVE, owner)
        self._value = value

    def touch_from(self, frame: Any) -> None:
        """Report a touch by another library's transform to a frame and the frames around it."""
        NATIVE.touch(self, frame, writing=False)

    def __repr__(self) -> str:
        from .._text import value_str

        # The value in the slot, not `value`: a repr in a debugger must not be a read, nor raise.
        content = repr(self._value) if type(self._value) is Invalidated else value_str(self._value)
        extra = {"name": self.name} if self.name is not None else {}
        fields = "".join(f", {k}={v!r}" for k, v in {**extra, **self.metadata}.items())
        return f"{type(self).__name__}({content}{fields})"

    def _repr_html_(self) -> str:
        return f"<code>{html.escape(repr(self))}</code>"

    def __getstate__(self) -> dict[str, Any]:
        attributes = {**_slots_of_subclasses(self), **getattr(self, "__dict__", {})}
        return {
            "value": self.value,
            "name": self.name,
            "metadata": self.metadata,
            "site": self._site,
            "attributes": attributes,
        }

    def __setstate__(self, saved: dict[str, Any]) -> None:
        for key, value in saved["attributes"].items():
            object.__setattr__(self, key, value)
        self._begin(saved["value"], saved["site"], saved["name"], saved["metadata"])


@public
class Param(State[A]):
    """A trainable state: `grad(wrt=Param)` differentiates with respect to all of them.

    Example:
        >>> import jax.numpy as jnp
        >>> Param(jnp.ones((2, 3)))
        Param(f32[2,3])
    """

    __slots__ = ()


@public
class RngState(State[jax.Array]):
    """A state that holds a random key and advances with every draw.

    A rematerialized function sees the same draws when it is recomputed, and the key advances once. To read `value`
    draws nothing: two random functions that get ``rng.value`` return the same numbers. JAX's checker
    (``jax.config.update("jax_debug_key_reuse", True)``) reports it.

    Args:
        key: an integer seed, a key of ``jax.random.key``, or a legacy ``uint32[2]`` key.

    Example:
        >>> import jax, statetx
        >>> rng = statetx.RngState(0)
        >>> a, b = rng.next(), rng.next()
        >>> bool(jax.random.uniform(a) == jax.random.uniform(b))
        False
        >>> rng.split(3).shape
        (3,)
    """

    __slots__ = ()

    def __init__(self, key: int | jax.Array, *, name: str | None = None, **metadata: Any):
        super().__init__(_as_key(key), name=name, **metadata)

    if not TYPE_CHECKING:  # a checker would take every name for an attribute

        def __getattr__(self, name: str) -> Any:
            use = "" if name.startswith("_") else ". Draw a key by .next(), and give it to a function of jax.random"
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{use}", name=name, obj=self)

    def next(self) -> jax.Array:
        """Draw one key, of shape ``()``. Reads and writes the state."""
        self.value, key = jax.random.split(self.value)
        return key

    def split(self, n: int) -> jax.Array:
        """Draw `n` keys, of shape ``(n,)``. Reads and writes the state."""
        if whole_number(n) is None:
            raise StateValueError(
                f"{_states.describe(self)} cannot be split into {brief(n)} keys.\n"
                f"Fix: split(n), with a whole number of at least 0."
            )
        keys = jax.random.split(self.value, n + 1)
        self.value = keys[0]
        return keys[1:]


def _slots_of_subclasses(state: State) -> dict[str, Any]:
    names = [
        name
        for cls in type(state).__mro__
        if cls is not State
        for name, value in vars(cls).items()
        if isinstance(value, types.MemberDescriptorType)
    ]
    return {name: getattr(state, name) for name in names if hasattr(state, name)}


def _as_key(key: Any) -> jax.Array:
    dtype: Any = getattr(key, "dtype", None)
    is_traced_seed = isinstance(key, _jax.Tracer) and jnp.issubdtype(dtype, jnp.integer)
    try:
        return jax.random.key(key if is_traced_seed else operator.index(key))
    except TypeError:  # not an integer
        pass
    if dtype is not None and (jnp.issubdtype(dtype, jax.dtypes.prng_key) or dtype == np.uint32):
        return key
    raise StateValueError(
        f"RngState needs an integer seed or a random key, got {type(key).__name__}. "
        f"Write RngState(0) or RngState(jax.random.key(0))."
    )


def _construction_site() -> tuple[str, int]:
    """The line that constructs the state: the caller of the outermost ``__init__``."""
    frame = sys._getframe(2)
    while frame.f_code.co_name == "__init__" and "__class__" in frame.f_code.co_freevars and frame.f_back is not None:
        frame = frame.f_back  # the __init__ of a subclass, which calls super()
    return frame.f_code.co_filename, frame.f_lineno


def _check_home(state: State, value: Any) -> None:
    """Raise if the state was made under a trace that has ended, and still holds a tracer."""
    home = state._home() if state._home is not None else None
    if home is None or _jax.is_live(home):
        return
    if _jax.has_tracers(value):
        name = _jax.transform_name(home)
        reason = f"it was created under jax's {name}, which has ended, and holds what {name} was tracing"
        raise _states.invalidated_state_error(state, NATIVE.site_of(state), reason)


def _reset_dead_home(state: State, frame: _frames.Frame | None = None) -> None:
    """Move the home of a written state to the trace of `frame`, or none, if the trace that it was made in has ended."""
    home = state._home() if state._home is not None else None
    if home is None or not _jax.is_live(home):
        state._home = None if frame is None else _jax.trace_ref(frame.trace)


class _Native(_frames.WatchedKind):
    """`statetx.State` as a kind; see `_states.Kind`."""

    name = "statetx"
    base = State
    bookkeeping = frozenset(State.__slots__)
    folder = _states.PACKAGE

    def get(self, state: State) -> Any:
        return state._value

    def store(self, state: State, value: Any) -> Store:
        return _set_value, state, value

    # Attributes and slots without calls: `jit` runs these for every state in every call.
    def check_free(self, states: Sequence[State]) -> None:
        for state, owner in [(s, s._owner) for s in states if s._owner is not None]:
            raise _frames.foreign_state_error(state, self, owner)

    def _values(self, states: Sequence[State]) -> list[Any]:
        return [s._value for s in states]

    def store_all(self, states: Sequence[State], values: Iterable[Any]) -> Store:
        # A `deque` of length 0 consumes the map in C, in one call that no signal interrupts (decision 18).
        return collections.deque, map(_set_value, states, values), 0

    def read(self, state: State) -> Any:
        return state.value

    def write(self, state: State, value: Any) -> None:
        state.value = value

    def adopt(self, state: State, site: str) -> list[Store]:
        return [(_set_home, state, _jax.trace_ref(_jax.current_trace()))]

    def anchor(self, state: State, frame: Any, access: _frames.Access | None) -> Any | None:
        if access is not None:
            return frame.trace
        return state._home() if state._home is not None else None  # the trace it was made in

    def invalidate(self, state: State, reason: str, closing: Any) -> list[Store]:
        frame = _frames.enclosing_frame(closing)
        home = None if frame is None else _jax.trace_ref(frame.trace)
        stores = [self.store(state, Invalidated(reason)), self.set_owner(state, frame), (_set_home, state, home)]
        return stores if frame is None else [*stores, frame.creation(state, self)]

    def is_invalidated(self, state: State) -> bool:
        return type(state._value) is Invalidated

    def owner(self, state: State) -> _frames.Frame | None:
        return state._owner

    def set_owner(self, state: State, frame: Any) -> Store:
        return _set_owner, state, frame

    def is_random(self, state: State) -> bool:
        return isinstance(state, RngState)

    def is_trainable(self, state: State) -> bool:
        return isinstance(state, Param)

    def name_of(self, state: State) -> str | None:
        return state.name

    def site_of(self, state: State) -> str:
        return "{}:{}".format(*state._site)


prepare(State, RngState)
# Setters of slots are functions in C, as a `Store` must be.
_set_value, _set_owner, _set_home = (State.__dict__[slot].__set__ for slot in ("_value", "_owner", "_home"))

NATIVE = _Native()
_states.register_kind(NATIVE)
