"""How each library makes, reads and writes a state; nothing else in the tests says it."""

from __future__ import annotations

from typing import Any

import brainstate
import jax
from flax import nnx

import statetx


class Library:
    """States with the property `value`, of statetx itself or of a library like it."""

    name = "statetx"
    state: Any = statetx.State
    param: Any = statetx.Param
    no_value: type[Exception] = statetx.StateAccessError
    """Raised where a state is read whose value ended with the call that made it."""

    def make(self, value: Any, name: str | None = None) -> Any:
        return self.state(value, name=name)

    def get(self, state: Any) -> Any:
        return state.value

    def set(self, state: Any, value: Any) -> None:
        state.value = value

    def rng(self, seed: int = 0) -> Any:
        return statetx.RngState(seed)

    def draw(self, rng: Any) -> jax.Array:
        return rng.next()

    def key_of(self, state: Any) -> Any:
        """The state itself, or the one that holds the key of a random stream."""
        return state


class Brainstate(Library):
    name = "brainstate"
    state = brainstate.ShortTermState
    param = brainstate.ParamState
    no_value = brainstate.TraceContextError

    def rng(self, seed: int = 0) -> Any:
        return brainstate.random.RandomState(seed)

    def draw(self, rng: Any) -> jax.Array:
        return rng.split_key()


class Variable(nnx.Variable):
    """A Variable with the property `value`."""

    value = property(nnx.Variable.get_value, nnx.Variable.set_value)


class Nnx(Library):
    name = "nnx"
    state = nnx.Variable
    param = nnx.Param

    def make(self, value: Any, name: str | None = None) -> Any:
        return self.state(value)

    def get(self, state: Any) -> Any:
        return state.get_value()

    def set(self, state: Any, value: Any) -> None:
        state.set_value(value)

    def rng(self, seed: int = 0) -> Any:
        return nnx.Rngs(seed)

    def draw(self, rng: Any) -> jax.Array:
        return rng()

    def key_of(self, state: Any) -> Any:
        return state.default.key if isinstance(state, nnx.Rngs) else state


class ValuedRef:
    """Holds a `jax.Ref`, and has the property `value`."""

    def __init__(self, value: Any):
        self.ref = jax.new_ref(value)

    value = property(lambda self: self.ref[...], lambda self, value: self.ref.__setitem__(..., value))


class Ref(Library):
    """Plain JAX: a Ref has an array, no name, and is not a parameter, which is an array."""

    name = "ref"
    state = staticmethod(jax.new_ref)
    param = staticmethod(lambda value: value)

    def make(self, value: Any, name: str | None = None) -> Any:
        return self.state(value)

    def get(self, state: Any) -> Any:
        return state[...]

    def set(self, state: Any, value: Any) -> None:
        state[...] = value

    def rng(self, seed: int = 0) -> Any:
        return self.make(jax.random.key(seed))

    def draw(self, rng: Any) -> jax.Array:
        rng[...], key = jax.random.split(rng[...])
        return key


LIBRARIES: dict[str, Library] = {library.name: library for library in (Library(), Brainstate(), Nnx(), Ref())}
VALUED = {
    "statetx": statetx.State,
    "brainstate": brainstate.ShortTermState,
    "nnx": Variable,
    "ref": ValuedRef,
}
"""For each library, a class of states with the property `value`."""


def library_of(state: Any) -> Library:
    """The library of a state or of a random stream."""
    if isinstance(state, jax.Ref):
        return LIBRARIES["ref"]
    if isinstance(state, (nnx.Variable, nnx.Rngs)):
        return LIBRARIES["nnx"]
    return LIBRARIES["brainstate" if isinstance(state, brainstate.State) else "statetx"]


def get(state: Any) -> Any:
    """Read a state of any library."""
    return library_of(state).get(state)


def put(state: Any, value: Any) -> None:
    """Write a state of any library."""
    library_of(state).set(state, value)
