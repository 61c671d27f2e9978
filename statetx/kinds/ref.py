"""`jax.Ref` (`jax.new_ref`) as a kind of state.

JAX itself traces reads and writes of a Ref, so frames do not watch Refs: the Refs that a staged function touches are
constants of its jaxpr, however the function reached them. `_lift.stage` then rewrites the equations so that the Ref's
value is an input and, if it is written, an output; the transform reads the Ref before the call and writes it after
(decision 4). Transforms without staging stage a function that can reach a Ref (`_lift.run.call`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .. import _frames, _jax, _states
from .._atomic import Store, commit, in_one


class _RefKind(_states.Kind):
    """See `_states.Kind`."""

    name = "jax.Ref"
    base = jax.Ref
    is_watched = False
    is_array = True
    folder = _jax.JAX_FOLDER

    def owns(self, obj: Any) -> bool:
        # Most objects are none by their type; JAX's own test takes ten times as long.
        cls = type(obj)
        return (jax.Ref in cls.__mro__ or issubclass(cls, _jax.Tracer)) and isinstance(obj, jax.Ref)

    def new(self, value: Any) -> Any:
        return jax.new_ref(value)

    def get(self, state: Any) -> Any:
        return _jax.ref_value(state)

    def store(self, state: Any, value: Any) -> Store:
        return _jax.ref_store(state, value)

    read = get

    def write(self, state: Any, value: Any) -> None:
        commit([self.store(state, value)])

    def operands(self, states: Sequence[Any]) -> list[Any]:
        return [_jax.ref_array(ref) for ref in states]

    def set_results(self, states: Sequence[Any], values: Iterable[Any]) -> None:
        commit([self.store_results(states, values)])

    def store_results(self, states: Sequence[Any], values: Iterable[Any]) -> Store:
        return in_one([_jax.ref_store_own(ref, value) for ref, value in zip(states, values, strict=True)])

    def announce(self, effect: _frames.Effect, live: bool) -> list[Store]:
        del live  # JAX sees every write and checks it
        return [self.store(effect.state, effect.value)]

    def invalidate(self, state: Any, reason: str, closing: Any) -> list[Store]:
        raise AssertionError("Refs are never recorded as created")

    def is_invalidated(self, state: Any) -> bool:
        return False

    def owner(self, state: Any) -> None:
        return None  # JAX is responsible for the use of a Ref by several threads

    def set_owner(self, state: Any, frame: Any) -> Store:
        raise AssertionError("frames hold no Refs")

    def is_random(self, state: Any) -> bool:
        return jnp.issubdtype(state.dtype, jax.dtypes.prng_key)

    def site_of(self, state: Any) -> str:
        return "a place that JAX does not record"


KIND = _RefKind()
_states.register_kind(KIND)
