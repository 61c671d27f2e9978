"""Derivative rules that JAX runs late: when it differentiates staged equations, after the call that staged them.

By then the states have other values than the function has read, a write would be of no call, and JAX keeps the results
of a rule. So a rule in staged equations may not touch a state, nor a Ref that it closes over: `guarded` refuses it by
name. A rule that JAX runs at once, in a derivative of a function without staged parts, may read states whose value is
not differentiated.
"""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax

from .. import _frames, _jax, _states
from .._equations.structure import Body
from .._errors import StateAccessError
from .._frames import Frame
from .._states import Kind
from .._tree import partition
from .stage import CONVERSIONS, has_ended


@dataclasses.dataclass(eq=False)
class Guard:
    """Runs one derivative rule of a staged call, and refuses states and Refs that it touches.

    Attributes:
        name: the call, for messages.
        place: the function that has the rule, with its line.
        touched: descriptions of the states that the call has touched.
    """

    name: str
    place: str
    touched: list[str]

    def __call__(self, rule: Callable, *args: Any) -> Any:
        """Call ``rule(*args)`` in a frame that no state of before may be touched in."""
        frame = Frame(f"the derivative rule of {self.place}", allow=self._refuse)
        try:
            out = frame.run(rule, *args)
        except jax.errors.UnexpectedTracerError as e:
            if not self.touched:
                raise
            raise self._ended_error() from e
        _frames.publish(frame.effects)
        return out

    def backward(self, rule: Callable, *args: Any) -> Any:
        """Call the backward rule; its equations show which Refs it closes over, since no frame watches them."""
        if _jax.has_made_refs():
            arrays, part = partition(args, lambda x: isinstance(x, (jax.Array, jax.Ref)))

            def run(*tracers: Any) -> list[Any]:
                self(rule, *part.combine(tracers))
                return []

            with contextlib.suppress(*CONVERSIONS):  # it needs known values: JAX raises where it has none
                avals = [_jax.abstract(x) for x in arrays]
                self.check_equations(*_jax.stage(run, avals, traced_for="statetx", name="a backward rule"))
        return self(rule, *args)

    def check_equations(self, jaxpr: Any, consts: Sequence[Any]) -> None:
        """Refuse Refs, and values of the call's own trace, among the values that a rule's equations close over."""
        for x in Body.close(jaxpr, consts).operands:
            if isinstance(x, jax.Ref):
                self._refuse(x, _states.kind_of_state(x))
            if self.touched and isinstance(x, _jax.Tracer) and has_ended(x._trace):
                raise self._ended_error()

    def _refuse(self, state: Any, kind: Kind) -> None:
        # The rule of one of our own loops runs the users' rules of its body.
        place = (_states.PACKAGE in self.place and _jax.running_rule()) or self.place
        raise StateAccessError(
            f"{self.name}: the derivative rule of {place} touches {described(state, kind)}. JAX runs the rule "
            f"when it differentiates the whole {self.name.partition('(')[0]}, after the call, where a read could be "
            "too late and a write would be lost.\n"
            "Fix: pass the value as an argument to the function that has the rule: its rule gets it, too, and may keep "
            "it as a residual."
        )

    def _ended_error(self) -> StateAccessError:
        return StateAccessError(
            f"{self.name}: the derivative rule of {self.place} uses a traced value that it closes over, or has in "
            f"nondiff_argnums. JAX runs the rule after the call, when the value has gone. The call touches "
            f"{' and '.join(self.touched)}.\n"
            "Fix: pass the value as an argument outside of nondiff_argnums; the rule may ignore its tangent, or return "
            "zeros for it."
        )


def described(state: Any, kind: Kind) -> str:
    value = jax.ShapeDtypeStruct(state.shape, state.dtype) if isinstance(state, jax.Ref) else None
    return _states.describe(state, kind, value=value)  # a read of a Ref would be an equation


def guarded(name: str, body: Body, touched: Iterable[tuple[Any, Kind]]) -> Body:
    """The body, whose users' derivative rules may not touch a state.

    Args:
        name: the call that was staged, for messages.
        touched: the states that it has touched.
    """
    if not _jax.has_users_rule(body.jaxpr):
        return body
    texts = [described(state, kind) for state, kind in touched]  # no state lives on because of a rule
    return Body(_jax.with_guarded_rules(body.jaxpr, lambda place: Guard(name, place, texts)), body.operands)


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


def refuse_kept(name: str, held: Held, residuals: Iterable[Any] | None) -> None:
    """Refuse values of a derivative that has ended, which a derivative rule has kept: JAX fails when it runs the
    program.

    Args:
        held: `held_by_derivatives` of the call.
        residuals: the derivative's residuals. The trace around it may have such values as constants, too. None if JAX
            has failed: then all that is kept counts.
    """
    if not held:
        return
    values = [tracer() for _, _, tracers in held for tracer in tracers]
    if residuals is not None:
        kept = {*map(id, residuals), *map(id, _jax.constants_of(_jax.staging_trace(_jax.current_trace())))}
        values = [x for x in values if id(x) in kept]
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
