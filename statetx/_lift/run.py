"""Run a function in a frame under a JAX transform, which sees arrays only.

One of the two ways to carry states through a transform; derivatives, `vmap` and `shard_map` use it. The other way is
`stage`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax

from .. import _frames, _jax, _states
from .._atomic import commit
from .._equations.structure import Body
from .._frames import Frame
from .._objects.paths import Paths, reaches_unwatched
from .._objects.walk import held_states
from .._states import Kind
from .._tree import Partition, as_value, is_array_or_number, is_opaque
from .._typing import PyTree
from .._unfinished import refuse_unfinished
from .differentiated import DifferentiatedStates, refuse_lost_writes, split_aux
from .late_rules import Held, guarded, held_by_derivatives, named_rules, refuse_kept
from .outcome import Outcome, is_traced, pack, pack_effects, partition_output
from .stage import InputNames, stage
from .wrapper import name_of

T = TypeVar("T")


@dataclasses.dataclass(eq=False)
class FramedRun:
    """A stateful function in the form that JAX's derivatives need; one call.

    Call it inside JAX's transform, which carries its outputs, and then `finish` after the transform has returned.

    Attributes:
        name: the transform, for messages.
        fun: the user's function.
        has_aux: whether `fun` returns a pair, and JAX differentiates its first item only.
        diff_states: the states that JAX differentiates, too.
        out: the structure of the output: see `flat`.
    """

    name: str
    fun: Callable
    has_aux: bool
    diff_states: DifferentiatedStates | None = None
    _held: Held = dataclasses.field(default_factory=list)
    _outcome: Outcome = dataclasses.field(init=False)
    out: Partition = dataclasses.field(init=False)

    def __call__(
        self,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        state_values: Any = (),
        diff_args: Sequence[Any] = (),
        of_output: Callable[[PyTree], T] = lambda out: out,  # type: ignore[assignment, return-value]
    ) -> tuple[T, list]:
        """Call the function in a frame; returns its output and the arrays of aux and effects. What aux holds of
        `diff_args` is a tree of arrays, as these are to JAX.

        Args:
            args, kwargs: the arguments, with JAX's tracers in them.
            state_values: the values of `diff_states`, from JAX.
            diff_args: the arguments that JAX has flattened: writes to states in them would be lost.
            of_output: maps the output in the frame, where states that the call has made have their values.
        """
        diff_states = self.diff_states
        frame = frame_for(self.name, self.fun, on_read=diff_states and diff_states.on_read(state_values))
        frame.differentiates_states = diff_states is not None

        def watched_call() -> Any:
            result = call(self.fun, args, kwargs, diff_states is not None and diff_states.has_refs)
            self._held = list(held_by_derivatives(frame))
            out, aux = split_aux(result, self.fun) if self.has_aux else (result, None)
            return of_output(out), aux

        out, aux = frame.run(watched_call)
        refuse_lost_writes(self.name, self.fun, frame.effects, diff_args)

        def is_leaf(x: Any) -> bool:
            if not is_opaque(x):
                return False
            copies, states = {id(state) for state in held_states(diff_args)}, held_states([x])
            return not (states and all(id(state) in copies for state in states))

        aux_leaves, aux_part = partition_output(aux, is_traced, is_leaf=is_leaf)
        leaves, self._outcome = pack_effects(aux_leaves, aux_part, frame.effects, is_traced)
        return out, leaves

    def flat(self, args: Sequence[Any], state_values: Any = ()) -> tuple[list, list]:
        """Run as a call of this object does, for the arrays of the output, whose structure is `out` from then on. JAX
        has flattened all arguments, but not models whose states are `diff_states`.
        """

        def leaves_of(out: PyTree) -> list:
            out_leaves, self.out = partition_output(out, is_array_or_number, is_leaf=None)
            return [as_value(x) for x in out_leaves]

        return self(args, {}, state_values, args if self.diff_states is None else (), leaves_of)

    def named(self, pure: Callable[..., T]) -> Callable[..., T]:
        """Tell the planner whose derivative JAX takes of `pure`, the function of arrays around the call."""
        pure.user_function = self.fun  # type: ignore[attr-defined]
        return pure

    def finish(self, leaves: Sequence[Any], residuals: PyTree = ()) -> PyTree:
        """Store the effects' values in their states and return aux; `leaves` as from the call, `residuals` a linear map
        of JAX that outlives it.
        """
        self._refuse_kept(jax.tree.leaves(residuals))
        _frames.forget_differentiated(self._outcome.effects)
        return self._outcome.finish(leaves)

    def explain(self) -> None:
        """Raise what `finish` raises, if JAX has met such a value earlier, in the backward pass of its transform."""
        self._refuse_kept(None)

    def _refuse_kept(self, residuals: Sequence[Any] | None) -> None:
        refuse_kept(f"{self.name}({name_of(self.fun)})", self._held, residuals)


def call(fun: Callable, args: Sequence[Any], kwargs: dict[str, Any], wants_refs: bool = False) -> PyTree:
    """Run a function under the current frame, for a transform that needs no jaxpr.

    JAX refuses writes of differentiated or mapped values to a `jax.Ref` from outside the transform. If the call can
    reach one, or `wants_refs` is true, the function is staged and its Refs are discharged; the frame gets their last
    values.
    """
    frame = _frames.current_frame()
    assert frame is not None
    if not _jax.has_made_refs() or not (wants_refs or reaches_unwatched(fun, args, kwargs)):
        with named_rules(frame):
            out = fun(*args, **kwargs)
        refuse_unfinished(out)
        return out

    def body() -> tuple[list, Any]:
        inner = Frame(frame.name)
        return pack(inner.run(fun, *args, **kwargs), inner.effects)

    def read(ref: Any, kind: Kind) -> Any:
        value = kind.get(ref) if _jax.is_of_current_trace(ref) else _read_outside(ref, kind, frame)
        return value if frame.on_read is None else frame.on_read(ref, kind, value)

    transform = frame.name.partition("(")[0]
    staged, outcome, refs = stage(body, (), traced_for=f"statetx.{transform}", names=InputNames(fun), read=read)
    staged = guarded(frame.name, staged, [(access.state, access.kind) for access in frame.accesses.values()])
    if _jax.enclosing_shard_map() is not None:
        staged = Body(_jax.on_current_mesh(staged.jaxpr), staged.operands)
    outs = [as_value(x) for x in staged(staged.operands)]

    for effect in reversed(refs):  # their values are the last outputs
        effect.value = outs.pop()
        if _jax.is_of_current_trace(effect.state):
            _frames.publish([effect])  # a mapped argument: a Ref of this trace, which JAX lets us write
        else:
            frame.add_effect(effect)
    return outcome.finish(outs)


def _read_outside(ref: Any, kind: Kind, frame: Frame) -> Any:
    """Read a Ref of the enclosing trace in that trace: inside a shard_map it cannot be read."""
    with _jax.in_parent_trace(frame.trace) if frame.outer_trace is None else _jax.in_trace(frame.outer_trace):
        return kind.get(ref)


def run_eagerly(name: str, fun: Callable[..., T], args: Sequence[Any], kwargs: dict[str, Any], allow: Any = None) -> T:
    """Run a function without a transform of JAX, and undo its writes if it fails; `name`, `allow` as in `Frame`."""
    frame = Frame(name, allow=allow, is_undo=True)
    refs = RefValues(fun, args, kwargs)
    try:
        out = frame.run(fun, *args, **kwargs)
        if _frames.has_called_host():
            refs.wait()
        _frames.publish(frame.effects, also=[(refs.values.clear,)])
        return out
    except BaseException:
        refs.restore()
        raise


class RefValues:
    """The values of the Refs that a call can reach, to restore them if it fails: frames do not see their writes."""

    def __init__(self, fun: Callable, args: Sequence[Any], kwargs: dict[str, Any]):
        states = Paths(fun, args, kwargs).items().values() if _jax.has_made_refs() else ()
        unwatched = [(state, _states.kind_of_state(state)) for state in states if _states.is_unwatched(state)]
        self.values = [(state, kind, kind.get(state)) for state, kind in unwatched]

    def wait(self) -> None:
        """Wait until the values that the call has written are computed."""
        _jax.wait_for([kind.get(state) for state, kind, _ in self.values])

    def restore(self) -> None:
        commit([kind.store(state, value) for state, kind, value in self.values])


def frame_for(name: str, fun: Callable, **hooks: Any) -> Frame:
    return Frame(f"{name}({name_of(fun)})", **hooks)
