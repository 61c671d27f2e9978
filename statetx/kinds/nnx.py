"""`flax.nnx.Variable` with its subclasses.

Every access of a Variable's value, by `get_value`, `set_value`, ``[...]``, ``+=``, `copy_from`, flattening, or nnx's
own transforms, goes through one slot, ``_raw_value``. This module replaces that slot, once and for good, by a property
that reports to the frames of the thread; if no frame is open it costs one lookup in a dict that is mostly empty.

nnx allows writes of a Variable, and of a module's attributes, only under the trace that made them, recorded in
``_trace_state``. This slot, too, is replaced by a property: inside a frame, Variables and modules made before the frame
may be written, since the frame restores the old value; `_frames.check_write` refuses a write that would leave a tracer,
and `Frame.hold` an attribute of a module that would.

Not watched: Variables with ``ref=True``, which hold a `jax.Ref` (a kind of its own), and with ``hijax=True``.

Relied upon beyond the documented interface, and tested in `tests/test_nnx.py`: the slots ``_raw_value`` and
``_trace_state`` of `Variable`; that ``_trace_state`` is set when and only when a Variable is made; the slot
``_trace_state`` of a module's ``PytreeState``; that ``_check_valid_context`` of a module runs before each change of it;
`TraceState`.
"""

from __future__ import annotations

import collections
import functools
import operator
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import flax
import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx import extract, graphlib, pytreelib, tracers, transforms, variablelib

from .. import _frames, _jax, _states
from .._atomic import Store
from .._errors import StateAccessError
from .._frames import Frame
from .._frames.foreign import Held, restoring
from .._objects.contents import children
from .._objects.walk import num_inspections
from .._states import Jitted
from .native import Invalidated

_local = _frames._local
_value: Any = nnx.Variable.__dict__["_raw_value"]
_trace: Any = nnx.Variable.__dict__["_trace_state"]
_metadata: Any = nnx.Variable.__dict__["_var_metadata"]
_module_trace: Any = pytreelib.PytreeState.__dict__["_trace_state"]
_plain_check_context = nnx.Pytree._check_valid_context

# The innermost open frame that has touched a Variable made before it, by the Variable's id; the frame's accesses keep
# the Variable alive. The owner of a Variable that was made in a frame is in its `_FrameTraceState`.
_owner: dict[int, Frame] = {}


class _FrameTraceState(tracers.TraceState):
    """The trace state of a Variable or module that was made while a frame was open."""

    __slots__ = ("_frame", "site")

    def __init__(self, frame: Frame, site: str = ""):
        super().__init__()
        self._frame = weakref.ref(frame)
        self.site = site

    def __reduce__(self) -> Any:
        return tracers.TraceState, ()

    @property
    def frame(self) -> Frame | None:
        """The frame, None once it is closed."""
        frame = self._frame()
        return frame if frame is not None and frame.is_open else None


# -- the properties --------------------------------------------------------------------------------------------


def _get_value(state: nnx.Variable) -> Any:
    frame = _local.frame
    if frame is None:
        # Python does not switch threads between this check and the read.
        value = KIND.get_all([state])[0] if _owner else _value.__get__(state)
    elif _owner.get(id(state)) is frame:
        value = _value.__get__(state)
    else:
        value = KIND.touched_value(state, frame)
    if type(value) is Invalidated:
        # `set_value` looks at the old value, to see whether it is a Ref, before it stores the new one. That look must
        # not raise, or an invalidated Variable could never be written again.
        if sys._getframe(1).f_code is _SET_VALUE:
            return _NoValue(state)
        raise _invalidated_error(state)
    return value


def _set_value(state: nnx.Variable, value: Any) -> None:
    frame = _local.frame
    if frame is not None:
        if _owner.get(id(state)) is not frame:
            KIND.touch(state, frame, writing=True)
        access = frame.accesses.get(id(state))
        if access is not None:
            # See `native.State.value`: only another trace's tracers would stay behind.
            if _jax.current_trace() is not frame.trace:
                _frames.check_write(state, KIND, value, frame.trace, _states.call_site())
            if value is not _value.__get__(state):  # nnx's transforms put unchanged values back, too
                access.count_write(not _states.is_called_from(_TRANSFORMS, through=_VARIABLES))
            if not access.written:
                frame.note_write(access)
        _value.__set__(state, value)
    elif _owner:
        KIND.set_all([state], [value])
    else:
        _value.__set__(state, value)


# Where a Variable is written by its user, and where nnx writes it back. In between the stack has these files only.
_VARIABLES = variablelib.__file__, graphlib.__file__
_TRANSFORMS = extract.__file__, os.path.join(os.path.dirname(transforms.__file__), "")


class _NoValue:
    """The old value that nnx's `set_value` reads from an invalidated Variable before it stores the new one."""

    __slots__ = ("_state",)

    def __init__(self, state: nnx.Variable):
        self._state = state

    def __setitem__(self, index: Any, value: Any) -> None:
        if index is not Ellipsis:
            raise _invalidated_error(self._state)
        _set_value(self._state, value)


_SET_VALUE = nnx.Variable.set_value.__code__


def _invalidated_error(state: nnx.Variable) -> StateAccessError:
    return _states.invalidated_state_error(state, KIND.site_of(state), _value.__get__(state).reason)


def _get_trace(state: nnx.Variable) -> tracers.TraceState:
    frame, trace_state = _local.frame, _trace.__get__(state)
    if frame is None:
        # A Variable that survived the frame it was made in is the user's: as if made now, so that nnx lets it be
        # written.
        is_closed = type(trace_state) is _FrameTraceState and trace_state.frame is None
        return tracers.TraceState() if is_closed else trace_state
    # A Variable made before the frame may be written in it, under the frame's trace or (if no tracer stays behind)
    # another.
    is_older = type(trace_state) is not _FrameTraceState or trace_state.frame is not frame
    return tracers.TraceState() if is_older else trace_state


def _set_trace(state: nnx.Variable, trace_state: tracers.TraceState) -> None:
    # nnx sets this slot once, when it makes a Variable, before the value.
    frame = _local.frame
    if frame is None:
        _trace.__set__(state, tracers.TraceState() if type(trace_state) is _FrameTraceState else trace_state)
        return
    _trace.__set__(state, _FrameTraceState(frame, _states.call_site()))
    # A Variable made in an inner transform of another library, as nnx's own make them, ends with that transform.
    if _jax.current_trace() is frame.trace:
        frame.mark_created(state, KIND, _CreatedRef(state))


def _get_module_trace(state: pytreelib.PytreeState) -> tracers.TraceState:
    trace_state = _module_trace.__get__(state)
    is_closed = type(trace_state) is _FrameTraceState and trace_state.frame is None
    return tracers.TraceState() if is_closed else trace_state


def _set_module_trace(state: pytreelib.PytreeState, trace_state: tracers.TraceState) -> None:
    frame = _local.frame
    _module_trace.__set__(state, trace_state if frame is None else _FrameTraceState(frame))


def _check_context(module: nnx.Pytree, message: Callable[[], str]) -> None:
    frame, trace_state = _local.frame, _module_trace.__get__(module._pytree__state)
    # Refused under a plain transform inside the frame: nothing would remove a tracer from an attribute.
    if frame is None or _jax.current_trace() is not frame.trace or trace_state.is_valid():
        return _plain_check_context(module, message)
    if num_inspections():  # they put attributes back
        return
    home = trace_state.frame if type(trace_state) is _FrameTraceState else None
    while frame is not None and frame is not home:
        frame.hold(module, functools.partial(_attributes_of, module, frame))
        frame = frame.parent


def _attributes_of(module: nnx.Pytree, frame: Frame) -> Held:
    """The attributes of a module that are tracers of a frame's trace."""
    with _jax.in_parent_trace(frame.trace):
        outer = _jax.current_trace()

    def values() -> dict[str, Any]:
        arrays = {name: x for name, x in vars(module).items() if isinstance(x, _jax.Tracer)}
        name = type(module).__name__
        return {f"the attribute {k!r} of {name}": x for k, x in arrays.items() if _jax.leaked_tracers(x, outer)}

    return Held(values, restoring(vars(module)), _explain_attribute)


def _explain_attribute(transform: str, attribute: str) -> str:
    return (
        f" to an array that it computes. An attribute is no state: it would hold what {transform} has traced, and "
        f"break its next use.\nFix: make it an nnx.Variable, or return the array."
    )


# -- frames ----------------------------------------------------------------------------------------------------


class _CreatedRef:
    """A substitute for a weak reference to a Variable made in a frame; Variables allow none.

    It holds a strong reference, and counts references to see whether anyone else has the Variable.
    """

    __slots__ = ("state",)

    def __init__(self, state: Any):
        self.state = state

    def __call__(self) -> Any:
        """The Variable; None if no one else has it, or if it is not watched (it holds a Ref)."""
        if self._count() <= _NUM_REFS_UNSHARED or isinstance(_value.__get__(self.state), jax.Ref):
            return None
        return self.state

    def _count(self) -> int:
        return sys.getrefcount(self.state)


# Measured, not written down: how many references a call itself holds depends on the version of Python.
_NUM_REFS_UNSHARED = _CreatedRef(object())._count()


class _Nnx(_frames.WatchedKind):
    """See `_states.Kind`."""

    name = "flax.nnx"
    base = nnx.Variable
    folder = os.path.join(os.path.dirname(flax.__file__), "")

    def owns(self, obj: Any) -> bool:
        # By type: isinstance() takes a tracer for a Variable.
        return nnx.Variable in type(obj).__mro__ and not isinstance(_value.__get__(obj), jax.Ref)

    def is_opaque(self, obj: Any) -> bool:
        bases = type(obj).__mro__
        if nnx.Variable in bases or nnx.Module in bases:
            return True
        return nnx.Pytree in bases and _holds_states(obj)

    def get(self, state: nnx.Variable) -> Any:
        return _value.__get__(state)

    def store(self, state: nnx.Variable, value: Any) -> Store:
        return _value.__set__, state, value

    def check_free(self, states: Sequence[nnx.Variable]) -> None:
        if _owner:
            super().check_free(states)

    def _values(self, states: Sequence[nnx.Variable]) -> list[Any]:
        return [_value.__get__(s) for s in states]

    def store_all(self, states: Sequence[nnx.Variable], values: Iterable[Any]) -> Store:
        return collections.deque, map(_value.__set__, states, values), 0

    def read(self, state: nnx.Variable) -> Any:
        return _get_value(state)

    def write(self, state: nnx.Variable, value: Any) -> None:
        state.set_value(value)

    def touch(self, state: nnx.Variable, frame: Frame | None, *, writing: bool) -> None:
        trace_state = _trace.__get__(state)
        home = trace_state.frame if type(trace_state) is _FrameTraceState else None
        if home is not None and home is frame:
            return
        owner = _owner.get(id(state)) or home
        value = _value.__get__(state)
        if owner is frame or isinstance(value, jax.Ref):
            return
        is_write = writing or type(value) is Invalidated  # an invalidated Variable can only be written
        _frames.report_touch(state, self, frame, owner, writing=is_write)

    def adopt(self, state: nnx.Variable, site: str) -> list[Store]:
        frame = _local.frame
        return [(_trace.__set__, state, tracers.TraceState() if frame is None else _FrameTraceState(frame, site))]

    def anchor(self, state: nnx.Variable, frame: Any, access: Any) -> Any:
        if access is None and not _trace.__get__(state).is_valid():
            return None  # made in the present trace, and dies with it
        return super().anchor(state, frame, access)

    def invalidate(self, state: nnx.Variable, reason: str, closing: Any) -> list[Store]:
        frame = _frames.enclosing_frame(closing)
        stores = [self.store(state, Invalidated(reason)), self.set_owner(state, None)]
        if frame is None:
            assert type(_trace.__get__(state)) is _FrameTraceState, "only Variables made in a frame are invalidated"
            return stores
        # `TraceState` records the current trace, but from now on the Variable belongs to the enclosing frame's trace.
        with _jax.in_trace(frame.trace):
            home = _FrameTraceState(frame, self.site_of(state))
        return [*stores, (_trace.__set__, state, home), frame.creation(state, self, _CreatedRef(state))]

    def is_invalidated(self, state: nnx.Variable) -> bool:
        return type(_value.__get__(state)) is Invalidated

    def owner(self, state: nnx.Variable) -> Frame | None:
        return _owner.get(id(state))

    def set_owner(self, state: nnx.Variable, frame: Any) -> Store:
        return (_owner.pop, id(state), None) if frame is None else (operator.setitem, _owner, id(state), frame)

    def jitted(self, fun: Any) -> Jitted | None:
        if not isinstance(fun, type(nnx.jit(lambda: None))):
            return None
        return Jitted(fun.fun, *_jax.static_arguments(fun.jitted_fn))

    def jax_traced(self, traced: Any) -> Any | None:
        inner = getattr(traced, "traced", None)
        return inner if isinstance(inner, jax.stages.Traced) else None

    def holds_other_arrays(self, obj: Any) -> bool:
        return isinstance(obj, nnx.Pytree) and any(isinstance(x, jax.Array) for _, x in nnx.iter_graph(obj))

    def token(self, state: nnx.Variable) -> object:
        return _metadata.__get__(state)  # a dict of its own: Variables allow no weak reference

    def is_random(self, state: nnx.Variable) -> bool:
        # The key of an RngStream, into which every draw folds the stream's count. Not an array of keys: it was split
        # already.
        return isinstance(state, nnx.RngKey) and jnp.ndim(_value.__get__(state)) == 0

    def is_trainable(self, state: nnx.Variable) -> bool:
        return isinstance(state, nnx.Param)

    def site_of(self, state: nnx.Variable) -> str:
        trace_state = _trace.__get__(state)
        return (type(trace_state) is _FrameTraceState and trace_state.site) or "a place that flax does not record"

    def class_options(self, cls: type) -> dict[str, Any]:
        is_node = issubclass(cls, nnx.Pytree) and not cls._pytree__is_pytree
        # A subclass of a module that opted out of being a pytree must opt out as well: nnx asks each class when it is
        # made.
        return {"pytree": False} if is_node else {}

    def insert_axis(self, state: nnx.Variable, axis: int) -> None:
        names = _axis_names(state)
        if names is not None:
            # The user may name fewer dimensions than there are, as in a PartitionSpec.
            names += [None] * (axis - len(names))
            state.set_metadata(out_sharding=(*names[:axis], None, *names[axis:]))
        state.add_axis(axis, None)  # the user's hooks, as in `nnx.vmap`

    def delete_axis(self, state: nnx.Variable, axis: int) -> None:
        names = _axis_names(state)
        if names is not None:
            state.set_metadata(out_sharding=(*names[:axis], *names[axis + 1 :]))
        state.remove_axis(axis, None)


def _axis_names(state: nnx.Variable) -> list[Any] | None:
    """The mesh axes of each dimension, if the user has given them."""
    names = state.get_metadata("out_sharding", None)
    return list(names) if isinstance(names, tuple | list | jax.sharding.PartitionSpec) else None


def _holds_states(obj: Any) -> bool:
    """Whether an nnx object that is not a module (an optimizer, a random stream, a user's record) has Variables."""
    seen, pending = set(), [obj]
    while pending:
        value = pending.pop()
        bases = type(value).__mro__
        if nnx.Variable in bases or nnx.Module in bases:
            return True
        if id(value) in seen:
            continue
        seen.add(id(value))
        if nnx.Pytree in bases or isinstance(value, (dict, list, tuple)):
            pending += [child for _, child in children(value)]
    return False


KIND = _Nnx()


def _install() -> None:
    replace = _jax.patches.replace
    replace(
        "flax.nnx.Variable._raw_value",
        nnx.Variable,
        property(_get_value, _set_value),
        "Reads and writes are reported to the open calls of the thread. Without one, this costs one lookup in an "
        "empty dict.",
        is_content=True,
    )
    reason = (
        "Variables and modules made before a call of statetx may be written in it, since the call restores the old "
        "value; elsewhere nnx's rule holds."
    )
    replace("flax.nnx.Variable._trace_state", nnx.Variable, property(_get_trace, _set_trace), reason)
    module_trace = property(_get_module_trace, _set_module_trace)
    replace("flax.nnx.pytreelib.PytreeState._trace_state", pytreelib.PytreeState, module_trace, reason)
    replace("flax.nnx.Pytree._check_valid_context", nnx.Pytree, _check_context, reason)


_install()
