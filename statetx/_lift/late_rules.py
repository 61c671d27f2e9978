"""Derivative rules that run late: JAX runs them when it differentiates staged equations, after the call that staged
these.

A state that such a rule reads may have changed since, or lack a write of the staged function itself. `watched` notes
the rules' reads and refuses a state that the function writes; `are_current` tells whether the states still hold the
values read. A Ref that a rule closes over is read when the rule runs, like a state: JAX cannot close over one in a
branch, nor discharge one in a `custom_jvp`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from .. import _frames, _jax, _states
from .._equations.structure import Body
from .._errors import StateAccessError
from .._frames import Effect, Frame, current_frame
from .._states import Kind
from .stage import with_read_refs


class _RuleFrame(Frame):
    """The frame of a derivative rule that runs."""

    def __init__(self, watch: RuleWatch, on_read: Callable):
        super().__init__(f"the derivative rule of {watch.place}", on_read=on_read)
        self.watch = watch


def _enclosing_frame() -> Frame | None:
    """The frame of the innermost call that runs, rules left out: a rule may run in another rule, in a trace that ends
    with it.
    """
    frame = current_frame()
    while isinstance(frame, _RuleFrame):
        frame = frame.parent
    return frame


def running_rule() -> RuleWatch | None:
    """The watch of the innermost derivative rule that runs."""
    frame = current_frame()
    while frame is not None and not isinstance(frame, _RuleFrame):
        frame = frame.parent
    return None if frame is None else frame.watch


@dataclasses.dataclass(eq=False)
class RuleWatch:
    """Runs one derivative rule and notes its reads; see `watched`.

    Attributes:
        reads: each state that the rule has read, with the leaves of its value.
    """

    name: str
    _written: dict[int, tuple[object, str]]
    place: str
    _inner: Sequence[Any]
    _is_framed: bool
    reads: list[tuple[Any, Kind, list[Any]]] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self.enter()

    def enter(self) -> None:
        """Note the traces that may read a Ref for the equations bound now: the traces of calls that end only when the
        enclosing call does.

        In a loop of JAX in a call, say, a Ref has values of its own, which the trace of the call does not know.
        """
        self._homes: list[Any] = []
        self._bound_in = _jax.innermost_derivative(_jax.current_trace())
        trace, frame = _jax.staging_trace(_jax.current_trace()), _enclosing_frame()
        while trace is _jax.staging_trace(_trace_of(frame)):
            self._homes.append(_jax.trace_ref(trace))
            if frame is None or frame.is_kept:
                break
            while frame is not None and _jax.staging_trace(frame.trace) is trace:
                frame = frame.parent
            trace = _jax.staging_trace(getattr(trace, "parent_trace", None))

    def __call__(self, rule: Callable, *args: Any, is_backward: bool = False) -> Any:
        if not self._is_framed:
            return rule(*args)
        on_read = functools.partial(self._on_read, trace=_jax.current_trace(), is_backward=is_backward)
        frame = _RuleFrame(self, on_read=on_read)
        out = frame.run(rule, *args)
        _frames.publish(frame.effects)
        if not is_backward:  # JAX may have cached other rules' earlier outputs
            self.check_kept()
        return out

    def check_kept(self) -> None:
        for state, kind, leaves in self.all_reads():
            self._refuse_written(state, kind)
            tracers = [leaf() for leaf in leaves if isinstance(leaf, weakref.ref)]
            self._refuse_differentiated(state, kind, tracers, _jax.current_trace(), is_backward=False)

    def explicit(self, jaxpr: Any, consts: list[Any]) -> tuple[Any, list[Any]]:
        """A rule's equations, with values in place of the Refs that it reads, if these can be read now."""
        if not _jax.has_made_refs():
            return jaxpr, consts
        body = Body.close(jaxpr, consts)  # nested equations may hold a Ref
        refs = [x for x in body.operands if isinstance(x, jax.Ref)]
        for ref in refs:
            self._refuse_written(ref, _states.kind_of_state(ref))
        if not refs or any(isinstance(x, _jax.Tracer) for x in refs) or not self._is_bound_here():
            return jaxpr, consts
        body = with_read_refs(body, self._read_ref)
        return _jax.open_jaxpr(_jax.close(body.jaxpr, body.operands))[0], body.operands

    def _is_bound_here(self) -> bool:
        frame = _enclosing_frame()
        home = _jax.staging_trace(_trace_of(frame))
        if _jax.trace_ref(home) not in self._homes or _jax.enclosing_shard_map() is not None:
            return False
        while frame is not None and frame.trace is not home:
            frame = frame.parent
        return frame is not None or home is _jax.eager_trace  # else a trace of JAX's own, such as `jax.jit`'s

    def _read_ref(self, ref: Any, kind: Kind) -> Any:
        with _jax.in_trace(_trace_of(_enclosing_frame())):
            value, buffer = kind.get(ref), _jax.ref_buffer(ref)
        if not (_jax.is_rule_inspected() and isinstance(value, _jax.Tracer)):  # as in `_on_read`
            self.reads.append((ref, kind, [object() if buffer is None else buffer]))
        return value

    def all_reads(self) -> Iterator[tuple[Any, Kind, list[Any]]]:
        yield from self.reads
        for watch in self._inner:
            yield from watch.all_reads()

    def _on_read(self, state: Any, kind: Kind, value: Any, trace: Any, is_backward: bool) -> Any:
        self._refuse_written(state, kind)
        if not _jax.is_rule_inspected():  # else JAX may run the rule in another trace, or never
            self._refuse_differentiated(state, kind, value, trace, is_backward)
        if _jax.is_rule_inspected() and any(isinstance(x, _jax.Tracer) for x in jax.tree.leaves(value)):
            return value  # JAX reads again when it differentiates: `rule_of`
        if not any(s is state and _is_same(leaves, value) for s, _, leaves in self.reads):
            self.reads.append((state, kind, [_saved(x) for x in jax.tree.leaves(value)]))
        return value

    def _refuse_differentiated(self, state: Any, kind: Kind, value: Any, trace: Any, is_backward: bool) -> None:
        for derivative in _jax.derivatives_of(value):
            if _jax.is_derivative_of_rule(derivative, self._bound_in, trace, is_backward):
                rule = running_rule() or self
                what = _states.describe(state, kind, value=value)
                raise differentiated_error(rule.name, f"the derivative rule of {rule.place}", what)

    def _refuse_written(self, state: Any, kind: Kind) -> None:
        token = kind.token(state)
        if id(token) in self._written:
            _, site = self._written[id(token)]
            raise StateAccessError(
                f"{self.name}: the derivative rule of {self.place} read {_states.describe(state, kind)}, which "
                f"{self.name} writes at {site}. JAX runs the rule when it differentiates the whole "
                f"{self.name.partition('(')[0]}, where the state has its value from before.\n"
                "Fix: pass the value as an argument to the function that has the rule; its rule gets that, and may "
                "keep it as a residual."
            )


def watched(
    name: str, body: Body, effects: Sequence[Effect], *, is_framed: bool = True
) -> tuple[Body, list[RuleWatch]]:
    """Let each derivative rule of a user in a body run through a `RuleWatch`; return the body and the watches, more of
    them once rules have run.

    Args:
        name: the call that was staged, for messages.
        effects: its writes. The rules must not read these states.
        is_framed: whether to note the rules' reads of states other than Refs.
    """
    if not _jax.has_users_rule(body.jaxpr):
        return body, []
    watches: list[RuleWatch] = []
    # By token: a state made in the call must not live on because a rule might read it.
    tokens = [(e.kind.token(e.state), e.site) for e in effects]
    written = {id(token): (token, site) for token, site in tokens}

    def watch_for(place: str, inner: Sequence[Any]) -> RuleWatch:
        watch = RuleWatch(name, written, place, inner, is_framed)
        watches.append(watch)
        return watch

    return Body(_jax.with_watched_rules(body.jaxpr, watch_for), body.operands), watches


def guarded(name: str, body: Body, effects: Sequence[Effect]) -> Body:
    """The body, whose derivative rules must not read the states that it writes, nor those that a call around
    differentiates; arguments as of `watched`.
    """
    # Not always: rules of other libraries may write states, which is no write of a frame for the rule.
    is_framed = any(e.kind.is_watched for e in effects) or _are_states_differentiated()
    return watched(name, body, effects, is_framed=is_framed)[0] if is_framed or _jax.has_made_refs() else body


def _are_states_differentiated() -> bool:
    frame = current_frame()
    while frame is not None and not frame.differentiates_states:
        frame = frame.parent
    return frame is not None


def differentiated_error(name: str, rule: str, what: str) -> StateAccessError:
    """The error for a derivative rule that has read a state whose value is being differentiated."""
    return StateAccessError(
        f"{name}: {rule} read {what}, whose value is differentiated. JAX runs the rule outside of this "
        f"derivative, and cannot differentiate with respect to what the rule closes over.\n"
        f"Fix: pass the value as an argument to the function that has the rule; its rule gets that, with its tangent."
    )


@contextlib.contextmanager
def named_rules(frame: Frame) -> Iterator[None]:
    """Name the states in JAX's error for a derivative rule that uses a value being differentiated, for a frame's call.

    The rule need not have read them through the frame, which sees the first read of a state only.
    """
    try:
        yield
    except jax.errors.UnexpectedTracerError as e:
        rule = _jax.failed_rule(e)
        descriptions = [_states.describe(state, kind, value=value) for state, kind, value in _differentiated_in(frame)]
        if rule is None or not descriptions:
            raise
        raise differentiated_error(frame.name, f"the derivative rule {rule}", " or ".join(descriptions)) from e


Held = list[tuple[Any, Kind, list[weakref.ref]]]


def held_by_derivatives(frame: Frame) -> Held:
    """The states of a call with values that a derivative traces, and the tracers; they may be of a trace that ends with
    the call.
    """
    return [
        (state, kind, [weakref.ref(x) for x in jax.tree.leaves(value) if isinstance(x, _jax.Tracer)])
        for state, kind, value in _differentiated_in(frame)
    ]


def refuse_kept(name: str, held: Held, residuals: Iterable[Any]) -> None:
    """Refuse values of a derivative that has ended, which a derivative rule has kept: JAX fails when it runs the
    program.

    Args:
        held: `held_by_derivatives` of the call.
        residuals: the derivative's residuals. The trace around it may have such values as constants, too.
    """
    if not held:
        return
    values = [*residuals, *_jax.constants_of(_jax.staging_trace(_jax.current_trace()))]
    ended = {id(x) for x in values if isinstance(x, _jax.Tracer) and not _jax.is_live(x._trace)}
    for state, kind, tracers in held:
        if any(id(tracer()) in ended for tracer in tracers):
            raise differentiated_error(name, "a derivative rule", _states.describe(state, kind))


def _differentiated_in(frame: Frame) -> Iterator[tuple[Any, Kind, Any]]:
    """The states that a call has touched whose values a derivative traces, with the values."""
    for access in frame.accesses.values():
        value = access.kind.get(access.state)
        if any(True for _ in _jax.derivatives_of(value)):
            yield access.state, access.kind, value


def are_current(watches: Sequence[RuleWatch]) -> bool:
    """Whether the states that rules have read still hold the same values."""
    return all(
        not kind.is_invalidated(state)
        and _is_same(leaves, kind.read(state) if kind.is_watched else _jax.ref_buffer(state))
        for watch in watches
        for state, kind, leaves in watch.all_reads()
    )


def _trace_of(frame: Frame | None) -> Any:
    return _jax.eager_trace if frame is None else frame.trace


def _saved(leaf: Any) -> Any:
    if isinstance(leaf, _jax.Tracer):
        return weakref.ref(leaf)  # its trace may have ended
    return object() if isinstance(leaf, np.ndarray) else leaf  # an array that may change in place is never the same


def _is_same(saved: list[Any], value: Any) -> bool:
    leaves = jax.tree.leaves(value)
    return len(leaves) == len(saved) and all(
        (old() if isinstance(old, weakref.ref) else old) is new for old, new in zip(saved, leaves, strict=True)
    )
