"""Loops under ``jax.disable_jit``: Python's own, whose bodies see concrete values, so that they may print them.

States take part as in the compiled loop. A call is atomic here too: its writes are undone if a step fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp

from .. import _frames, _jax, _states
from .._errors import StateAccessError
from .._frames import Effect, publish, refuse_created
from .._lift.rules import Broadcast, Rules, Split
from .._lift.run import frame_for, run_eagerly
from .._lift.wrapper import name_of
from .._objects.paths import Paths
from .._states import Kind
from .._text import type_str
from .._tree import Partition, is_array, is_array_or_number, partition
from .._typing import PyTree
from .._unfinished import refuse_unfinished


def scan(
    fun: Callable,
    init: PyTree,
    xs: PyTree,
    length: int,
    reverse: bool,
    rules: Rules,
    truncation: int | None = None,
) -> tuple[PyTree, PyTree]:
    """Run `statetx.scan` eagerly, with at least one step; for `truncation` see `Strategy`, here and below."""

    def loop() -> tuple[PyTree, PyTree]:
        leaves, part = partition(xs, lambda x: is_array_or_number(x) or _states.is_array_state(x))
        refs: list[tuple[int, Any, Any]] = [
            (n, x, _states.kind_of_state(x)) for n, x in enumerate(leaves) if _states.is_array_state(x)
        ]
        leaves = [_states.kind_of_state(x).get(x) if _states.is_array_state(x) else jnp.asarray(x) for x in leaves]

        # A Ref among xs is sliced, too: each step gets a Ref of its own, whose last value is stacked back at the end.
        carry, ys, slices = init, [], []
        segments = _EagerSegments(truncation)
        taking_part = _Mapped(fun, length, rules, segments)

        for i in range(length)[:: -1 if reverse else 1]:
            carry = segments.before_step(carry)
            x = [leaf[i] for leaf in leaves]
            for n, _, kind in refs:
                x[n] = kind.new(x[n])
            carry, y = taking_part.step(i, carry, part.combine(x))
            ys.append(y)
            slices.append([kind.get(x[n]) for n, _, kind in refs])

        taking_part.finish()
        if reverse:
            ys.reverse()
            slices.reverse()
        for k, (_, ref, kind) in enumerate(refs):
            kind.write(ref, jnp.stack([step[k] for step in slices]))
        return carry, jax.tree.map(lambda *steps: jnp.stack([jnp.asarray(y) for y in steps]), *ys)

    return run_eagerly("scan", loop, (), {})


def while_loop(test: Callable, body: Callable, init: PyTree, max_steps: int | None) -> PyTree:
    """Run `statetx.while_loop` eagerly."""

    def loop() -> PyTree:
        val, num = init, 0
        while (max_steps is None or num < max_steps) and _holds(test, val):
            val, num = _call("while_loop", body, (val,))[0], num + 1
        return val

    return run_eagerly("while_loop", loop, (), {})


def fori_loop(steps: Iterable[int], body: Callable, init: PyTree, truncation: int | None = None) -> PyTree:
    """Run `statetx.fori_loop` eagerly."""

    def loop() -> PyTree:
        val, segments = init, _EagerSegments(truncation)
        for i in steps:
            val, effects = _call("fori_loop", body, (jnp.asarray(i), segments.before_step(val)))
            segments.note(effects)
        return val

    return run_eagerly("fori_loop", loop, (), {})


def branch(name: str, fun: Callable, operands: tuple) -> PyTree:
    """The taken branch of `statetx.cond` or `statetx.switch`."""
    return _call(name, fun, operands)[0]


def as_pair(out: Any, fun: Callable) -> tuple[PyTree, PyTree]:
    """The carry and the output that the body of a scan returns."""
    refuse_unfinished(out)
    if not (isinstance(out, (tuple, list)) and len(out) == 2):
        items = f" of {len(out)}" if isinstance(out, (tuple, list)) else ""
        got = type_str(out) if is_array(out) else f"{type(out).__name__}{items}"
        raise TypeError(
            f"scan: the body {name_of(fun)} must return a pair (carry, y), got {got}.\n"
            "Fix: return carry, y; without outputs, return carry, None."
        )
    return out[0], out[1]


def refuse_writes(test: Callable, effects: Iterable[Effect]) -> None:
    """Raise if the condition of a while loop has written a state."""
    for effect in effects:
        what = _states.describe(effect.state, effect.kind, Paths(test)(effect.state))
        raise StateAccessError(
            f"while_loop: the condition {name_of(test)} wrote {what} at {effect.site}. A random draw is a write too.\n"
            f"Fix: write it in the body and let the condition read it."
        )


def _holds(test: Callable, val: PyTree) -> bool:
    frame = frame_for("while_loop", test)
    result = frame.run(test, val)
    refuse_writes(test, frame.effects)
    return bool(result)


def _call(name: str, fun: Callable, args: tuple) -> tuple[Any, list[Effect]]:
    frame = frame_for(name, fun, frees_cycles=True)
    out = frame.output(fun, *args)
    refuse_created(frame.effects, frame.name)
    publish(frame.effects)
    return out, frame.effects


class _EagerSegments:
    """The segments of a truncated loop, of `length` steps each; None for a loop whose gradients do not stop."""

    def __init__(self, length: int | None):
        self._length = length
        self._done = 0
        self._carried: dict[int, Effect] = {}  # on the states that some step has written

    def note(self, effects: Iterable[Effect]) -> None:
        self._carried |= {id(effect.state): effect for effect in effects}

    def before_step(self, carry: PyTree) -> PyTree:
        """The carry for the next step. Where a segment begins, its gradient and the written states' stop."""
        is_start = self._length is not None and self._done > 0 and self._done % self._length == 0
        self._done += 1
        if not is_start:
            return carry
        for effect in self._carried.values():
            effect.value = _without_gradient(effect.kind.get(effect.state))
            effect.value_before = _frames.UNKNOWN
        publish([*self._carried.values()])
        return _without_gradient(carry)


def _without_gradient(tree: PyTree) -> PyTree:
    arrays, part = partition(tree)
    return part.combine([jax.lax.stop_gradient(x) for x in arrays])


class _Mapped:
    """The states of a scan that are not simply carried: those with an axis, split, or drawn from alike in
    every step.
    """

    def __init__(self, fun: Callable, length: int, rules: Rules, segments: _EagerSegments):
        self._fun = fun
        self._segments = segments
        self._length = length
        self._rules = rules
        self._keys: dict[int, tuple[Partition, list, list]] = {}  # see `_split`
        self._left: dict[int, tuple[Effect, dict[int, Any]]] = {}  # what steps wrote

    def step(self, i: int, carry: PyTree, x: PyTree) -> tuple[PyTree, PyTree]:
        read = lambda state, kind, value: self._value(i, state, kind, value)
        frame = frame_for("scan", self._fun, on_read=read, frees_cycles=True)
        carry, y = as_pair(frame.output(self._fun, carry, x), self._fun)
        refuse_created(frame.effects, frame.name)

        # Carried states take their new value at once, for the next step to read. The others keep the old one until
        # the last step.
        carried = []
        for effect in frame.effects:
            rule = self._rules(effect.state)
            if rule is Broadcast and not effect.kind.is_random(effect.state):
                raise self._rules.error_of_write(effect, "Carry, or give an axis to stack its writes along")
            if isinstance(rule, int) or rule in (Split, Broadcast):
                self._left.setdefault(id(effect.state), (effect, {}))[1][i] = effect.value
            else:
                carried.append(effect)
        publish(carried)
        self._segments.note(carried)
        return carry, y

    def _value(self, i: int, state: Any, kind: Any, value: Any) -> Any:
        rule = self._rules(state)
        if isinstance(rule, int):
            arrays, part = partition(value)
            for x in arrays:
                self._rules.slice_type(state, _jax.abstract(x), self._length)
            return part.combine([jax.lax.index_in_dim(jnp.asarray(x), i, rule, keepdims=False) for x in arrays])
        if rule is Split:
            part, keys, _ = self._split(state, kind, value)
            return part.combine([k[i] for k in keys])
        return value

    def _split(self, state: Any, kind: Kind, value: Any) -> tuple[Partition, list, list]:
        """The structure of a split state's value before the loop, the keys of the steps, and the keys that it keeps."""
        if id(state) not in self._keys:
            leaves, part = partition(value)
            self._keys[id(state)] = part, *self._rules.split(state, kind, leaves, self._length)
        return self._keys[id(state)]

    def finish(self) -> None:
        """Store the steps' last values in these states."""
        self._rules.check_paths()
        effects = []
        for effect, values in self._left.values():
            rule = self._rules(effect.state)
            if isinstance(rule, int):
                slices = [self._slice_left(effect, values, i, rule) for i in range(self._length)]
                effect.value = jax.tree.map(lambda *xs, axis=rule: jnp.stack(xs, axis), *slices)
            else:
                effect.value = list(values.values())[-1]
                if rule is Split:  # whatever the steps wrote, which may not have read it
                    part, _, kept_keys = self._split(effect.state, effect.kind, effect.kind.get(effect.state))
                    effect.value = part.combine(kept_keys)
            effect.value_before = _frames.UNKNOWN
            effects.append(effect)
        publish(effects)

    def _slice_left(self, effect: Effect, values: dict[int, Any], i: int, axis: int) -> Any:
        if i in values:
            return values[i]
        old_value = effect.kind.get(effect.state)
        return jax.tree.map(lambda x: jax.lax.index_in_dim(jnp.asarray(x), i, axis, keepdims=False), old_value)
