"""How each library makes, reads and writes a state, and the cells that mean it; nothing else in the tests says it."""

from __future__ import annotations

from typing import Any

import brainstate
import jax
import jax.numpy as jnp
from flax import nnx
from mixed_cells import Cell, World

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
        if isinstance(state, nnx.Rngs):
            return state.default.key.get_value(), state.default.count.get_value()
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


class Rng:
    """The random state of the reference: a cell with a key, and with nnx's, one with the number of draws."""

    def __init__(self, world: World, kind: str, seed: int):
        self.key = Cell(world, jax.random.key(seed), is_random=True, is_ref=kind == "ref", library=kind)
        self.count = Cell(world, jnp.uint32(0)) if kind == "nnx" else None


class Cells(Library):
    """The states of a library as cells of the reference."""

    def __init__(self, world: World, name: str):
        self.world = world
        self.name = name

    def make(self, value: Any, name: str | None = None) -> Any:
        return Cell(self.world, value, is_ref=self.name == "ref")

    param = make

    @staticmethod
    def get(state: Any) -> Any:
        if isinstance(state, Rng):
            return state.key.value if state.count is None else (state.key.value, state.count.value)
        return state.value

    def rng(self, seed: int = 0) -> Rng:
        return Rng(self.world, self.name, seed)

    def draw(self, rng: Rng) -> jax.Array:
        if rng.count is not None:
            key = jax.random.fold_in(rng.key.value, rng.count.value)
            rng.count.value = rng.count.value + 1
            return key
        rng.key.value, key = jax.random.split(rng.key.value)
        return key

    def key_of(self, state: Any) -> Any:
        return state.key if isinstance(state, Rng) else state


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
