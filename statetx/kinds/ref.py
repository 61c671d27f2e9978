"""`jax.Ref` (`jax.new_ref`) as a kind of state.

JAX itself traces reads and writes of a Ref, so nothing is watched here: a function that has been staged holds the Refs
it touches among the values it closes over, whichever way it reached them. `_lift.stage` then rewrites the equations
so that the Ref's value goes in and, if it is written, comes out; the transform reads the Ref before the call and
writes it after. Transforms that stage nothing stage a function that can reach a Ref (`_lift.call`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .. import _compat, _registry


class _RefKind:
    """See `_registry.Kind`."""

    name = "jax.Ref"
    bookkeeping: frozenset[str] = frozenset()
    folder = _compat.JAX_FOLDER

    def owns(self, obj: Any) -> bool:
        return isinstance(obj, jax.Ref)

    is_opaque = owns

    def get(self, state: Any) -> Any:
        return state[...]

    def set(self, state: Any, value: Any) -> None:
        state[...] = value

    read = get
    write = set

    def get_all(self, states: Sequence[Any]) -> list[Any]:
        return [ref[...] for ref in states]

    def set_all(self, states: Sequence[Any], values: Iterable[Any]) -> None:
        for ref, value in zip(states, values, strict=True):
            ref[...] = value

    def publish(self, effect: _registry.Effect, live: bool) -> None:
        del live  # JAX sees the write wherever it stands, and checks it
        effect.state[...] = effect.value

    def bury(self, state: Any, reason: str) -> None:
        raise AssertionError("Refs are never recorded as created")

    def owner(self, state: Any) -> None:
        return None  # what threads do to a Ref is JAX's affair

    def own(self, state: Any, frame: Any) -> None:
        pass

    def is_random(self, state: Any) -> bool:
        return jnp.issubdtype(state.dtype, jax.dtypes.prng_key)

    def name_of(self, state: Any) -> str | None:
        return None

    def site_of(self, state: Any) -> str:
        return "a place that JAX does not record"

    def open(self, frame: _registry.Frame) -> None:
        pass

    def close(self, frame: _registry.Frame) -> None:
        pass


KIND = _RefKind()
_registry.register_kind(KIND)
