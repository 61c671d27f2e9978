"""Derivative rules that run late: JAX runs those of staged equations when it differentiates these, after the call that staged them.

What such a rule reads then may have changed since, or lack what the staged function itself has written. `watched` sees what the rules read and refuses a
state that the function writes; `are_current` tells whether the states still hold what was read.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from .. import _jax, _states
from .._equations.structure import Body
from .._errors import StateAccessError
from .._frames import Effect, Frame
from .._states import Kind
from .outcome import publish


class Watch:
    """Runs one derivative rule and notes what it reads; see `watched`.

    Attributes:
        reads: each state that the rule has read, with the leaves of its value.
    """

    def __init__(self, name: str, written: dict[int, tuple[object, str]], place: str, inner: Sequence[Any]):
        self.reads: list[tuple[Any, Kind, list[Any]]] = []
        self._name = name
        self._written = written
        self._place = place
        self._inner = inner

    def __call__(self, rule: Callable, *args: Any) -> Any:
        frame = Frame(f"the derivative rule of {self._place}", on_read=self._on_read)
        out = frame.run(rule, *args)
        publish(frame.effects)
        for state, kind, _ in self.all_reads():  # JAX may have kept what the rule gave earlier
            self._refuse_written(state, kind)
        return out

    def all_reads(self) -> Iterator[tuple[Any, Kind, list[Any]]]:
        yield from self.reads
        for watch in self._inner:
            yield from watch.all_reads()

    def _on_read(self, state: Any, kind: Kind, value: Any) -> Any:
        self._refuse_written(state, kind)
        if _jax.is_rule_inspected() and any(isinstance(x, _jax.Tracer) for x in jax.tree.leaves(value)):
            return value  # JAX reads again when it differentiates: `rule_of`
        if not any(s is state and _is_same(leaves, value) for s, _, leaves in self.reads):
            self.reads.append((state, kind, [_saved(x) for x in jax.tree.leaves(value)]))
        return value

    def _refuse_written(self, state: Any, kind: Kind) -> None:
        token = kind.token(state)
        if id(token) in self._written:
            _, site = self._written[id(token)]
            raise StateAccessError(
                f"{self._name}: the derivative rule of {self._place} read {_states.describe(state, kind)}, which {self._name} writes at {site}. "
                f"JAX runs the rule when it differentiates the whole {self._name.partition('(')[0]}, where the state has its value from before.\n"
                f"Fix: pass the value as an argument to the function that has the rule; its rule gets that, and may keep it as a residual."
            )


def watched(name: str, body: Body, effects: Sequence[Effect]) -> tuple[Body, list[Watch]]:
    """The body, in which each derivative rule of a user runs through a `Watch`; and the watches, more of them once rules have run.

    Args:
        name: the call that was staged, for messages.
        effects: what it writes. The rules must not read these states.
    """
    if not _jax.has_users_rule(body.jaxpr):
        return body, []
    watches: list[Watch] = []
    # By token: a state made in the call must not live on because a rule might read it.
    tokens = [(e.kind.token(e.state), e.site) for e in effects]
    written = {id(token): (token, site) for token, site in tokens}

    def watch_for(place: str, inner: Sequence[Any]) -> Watch:
        watch = Watch(name, written, place, inner)
        watches.append(watch)
        return watch

    return Body(_jax.with_watched_rules(body.jaxpr, watch_for), body.operands), watches


def guarded(name: str, body: Body, effects: Sequence[Effect]) -> Body:
    """The body, whose derivative rules must not read the states that it writes; arguments as of `watched`."""
    return watched(name, body, effects)[0] if effects else body


def are_current(watches: Sequence[Watch]) -> bool:
    """Whether the states that rules have read hold now what was read."""
    return all(
        not kind.is_invalidated(state) and _is_same(leaves, kind.read(state))
        for watch in watches
        for state, kind, leaves in watch.all_reads()
    )


def _saved(leaf: Any) -> Any:
    if isinstance(leaf, _jax.Tracer):
        return weakref.ref(leaf)  # its trace may have ended
    return object() if isinstance(leaf, np.ndarray) else leaf  # an array that may change in place is never the same


def _is_same(saved: list[Any], value: Any) -> bool:
    leaves = jax.tree.leaves(value)
    return len(leaves) == len(saved) and all(
        (old() if isinstance(old, weakref.ref) else old) is new for old, new in zip(saved, leaves, strict=True)
    )
