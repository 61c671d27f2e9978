"""`Frame`: the states that a call reads or writes, with their values before it."""

from __future__ import annotations

import dataclasses
import functools
import gc
import operator
import os
import sysconfig
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any, TypeVar

import jax

from .. import _jax
from .._atomic import Store, commit, locked
from .._errors import StateValueError
from .._states import Kind, call_site, describe, kinds, library_folders
from .._tree import is_model
from .access import UNKNOWN, Access, Copy, Effect, check_write, is_leaf, is_writable, refuse_hidden_in
from .foreign import Held, held_by_libraries, refuse_changes, undo_changes
from .threads import _local, acquire, open_frames, ownership, set_current_frame

T = TypeVar("T")

_STDLIB = sysconfig.get_path("stdlib")


_REPLACED = (
    "An array has no .value. Was a state replaced by an array, as in `model.mean = x`?\n"
    "Fix: `model.mean.value = x` writes the state."
)


@dataclasses.dataclass(eq=False)
class Frame:
    """Watches one call, made by `run`.

    Attributes:
        name: the call in messages: ``"remat(loss)"``.
        on_read: called with the value of a state whose first touch is a read; returns its value in the body. Called
            once for a state.
        at_end: called once the function has returned, while the states have the values that it gave them.
        allow: called with each state touched; raises if the call may not touch it.
        is_undo: the body runs eagerly, and the frame only undoes its writes. It acquires the states that the body
            writes; other threads may read those that it only reads.
        frees_cycles: whether the transform must know which of the states made in the call outlive it. States that only
            reference cycles hold are then freed first; a jitted function that closes over a local state is such a
            cycle.
        outer_trace: the trace around the transform, if the transform's own trace does not name it.
        is_kept: whether the equations that the call records serve other calls, too.
        differentiates_states: whether the call is given values of states that are differentiated.
        differentiated: by the id of their token (`Kind.token`), the trainable states that the call has differentiated
            so far: the token, which keeps no state alive, and the values; of those that an inner call has
            differentiated no values, which are of a trace that has ended.
    """

    name: str
    on_read: Callable[[Any, Kind, Any], Any] | None = None
    allow: Callable[[Any, Kind], None] | None = None
    _: dataclasses.KW_ONLY
    is_undo: bool = False
    frees_cycles: bool = False
    outer_trace: Any = None
    is_kept: bool = False
    at_end: Callable[[], None] | None = None
    differentiates_states: bool = False
    is_open: bool = False
    is_complete: bool = False  # whether the function has returned, and no check has failed
    accesses: dict[int, Access] = dataclasses.field(default_factory=dict)
    effects: list[Effect] = dataclasses.field(default_factory=list)
    differentiated: dict[int, tuple[Any, list[Any]]] = dataclasses.field(default_factory=dict)
    _created: list[tuple[Callable[[], Any], Kind]] = dataclasses.field(default_factory=list)
    _kinds: list[Kind] = dataclasses.field(default_factory=list)
    _unchecked_writes: list[Access] = dataclasses.field(default_factory=list)
    _added: list[Effect] = dataclasses.field(default_factory=list)
    _held: list[Held] = dataclasses.field(default_factory=list)  # by other libraries; as it was before the call
    _held_ids: set[int] = dataclasses.field(default_factory=set)  # of objects that `_held` keeps alive
    _copies: dict[int, tuple[Any, Copy]] = dataclasses.field(default_factory=dict)  # by id of the container, kept alive

    def run(self, fun: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
        """Call a function and watch it. Once it has returned, `effects` has its writes."""
        try:
            self._open()
            out = fun(*args, **kwargs)
            if self.at_end is not None:
                self.at_end()
            assert _local.frame is self, "a trace context was left open inside the call"
            if self._unchecked_writes:
                self._check_writes()
            refuse_changes(self.name, self._held)
            if self.frees_cycles and any(True for _ in self.created()):
                gc.collect()
            self.effects = self._collect()
            self.close()
            self.is_complete = True
            return out
        except BaseException as e:
            self._abandon()
            undo_changes(self._held)
            if type(e) is AttributeError and e.name == "value" and isinstance(e.obj, jax.Array):
                if _REPLACED not in getattr(e, "__notes__", ()):  # an inner frame has added it
                    e.add_note(_REPLACED)
            raise

    def output(self, fun: Callable[..., T], /, *args: Any) -> T:
        """Call a function as `run` does. States in its output that JAX has as pytrees are new ones, with the values at
        the end of the call.
        """
        leaves, treedef = self.run(lambda: jax.tree.flatten(fun(*args), is_model))
        return treedef.unflatten(leaves)

    def _open(self) -> None:
        self.parent = _local.frame
        self.trace = _jax.current_trace()
        self.thread = threading.get_ident()
        self._kinds = list(kinds())
        self._held = [] if self.is_undo else held_by_libraries()
        opening = [store for kind in self._kinds for store in kind.open(self)]
        commit(
            [
                *opening,
                (operator.setitem, open_frames, id(self), self),
                (setattr, self, "is_open", True),
                (set_current_frame, self),
            ]
        )

    def close(self) -> None:
        """Give every state its old value and owner, in one step. Does nothing to a closed frame."""
        if not self.is_open:
            return

        reason = f"it was created inside {self.name}, which did not complete, or only inspected the function"
        stores: list[Store] = []
        for kind in reversed(self._kinds):
            stores += kind.close(self)
        for access in self.accesses.values():
            stores += access.undo()
        for state, kind in self.created():
            # The value belongs to the trace that ends here. The transform publishes one of the enclosing trace.
            stores += kind.invalidate(state, reason, self)

        replaced = [access.kind.get(access.state) for access in self.accesses.values()]  # alive until after `commit`
        commit(
            [
                *stores,
                (set_current_frame, self.parent),
                (setattr, self, "is_open", False),
                (open_frames.pop, id(self), None),
            ]
        )
        del replaced

        self.trace = self.on_read = self.at_end = None  # a cycle would keep what the call closes over
        end_differentiated(self)
        self._created.clear()
        self._copies.clear()
        for access in self.accesses.values():  # the values may be tracers of the trace that ends here
            access.value_before = access.value_in_body = UNKNOWN
            access.copy = None

    def _abandon(self) -> None:
        """Close the frame, after the inner frames that an interrupt has left open."""
        inner, frame = [], _local.frame
        while frame is not None and frame is not self:
            inner.append(frame)
            frame = frame.parent
        if frame is self:
            for frame in inner:
                frame.close()
        self.close()

    def release(self) -> None:
        """Give every state its old value and owner, in a process made by `os.fork` that lacks the frame's thread."""
        stores = [store for access in self.accesses.values() for store in access.undo()]
        commit([*stores, (setattr, self, "is_open", False), (open_frames.pop, id(self), None)])

    # -- called by kinds while the frame is open --

    def touch(self, state: Any, kind: Kind, *, writing: bool) -> Access:
        """Record the first touch of a state by the body, or, in an undo frame, the first write of a state that it has
        read.
        """
        if self._unchecked_writes:
            self._check_writes()
        access = self.accesses.get(id(state))
        if access is None and self.allow is not None:
            self.allow(state, kind)
        if self.is_undo:  # other threads may acquire a state that this frame reads, but not before it has the value
            return locked(ownership, self._touch, state, kind, access, writing)
        return self._touch(state, kind, access, writing)

    def _touch(self, state: Any, kind: Kind, access: Access | None, writing: bool) -> Access:
        access = acquire(state, kind, self, access, writing=writing)
        if access.value_before is UNKNOWN:
            try:
                self._set_value_in_body(access, writing)
            except BaseException:
                if access.value_before is UNKNOWN:
                    del self.accesses[id(state)]
                    commit([kind.set_owner(state, access.previous_owner)])
                raise
        return access

    def _set_value_in_body(self, access: Access, writing: bool) -> None:
        """Store the value that the body sees: from `on_read`, or a copy of a container."""
        state, kind = access.state, access.kind
        value_before = value_in_body = kind.get(state)
        # A state without a value can only be written.
        if self.on_read is not None and not writing and not kind.is_invalidated(state):
            value_in_body = self.on_read(state, kind, value_before)
        if not is_leaf(value_in_body) or is_writable(value_in_body):
            # The body may change the container in place, and the old value must survive that. States that hold the same
            # container share the copy, unless `on_read` gives each a value of its own.
            if value_in_body is value_before:
                _, access.copy = self._copies.setdefault(id(value_before), (value_before, Copy(value_before)))
            else:
                access.copy = Copy(value_in_body)
            value_in_body = access.copy.value
        access.value_before, access.value_in_body = value_before, value_in_body
        if value_in_body is not value_before:
            commit([kind.store(state, value_in_body)])

    def hold(self, obj: Any, held: Callable[[], Held]) -> None:
        """Refuse that the call changes what `held` returns of an object; to be called before each change."""
        if id(obj) not in self._held_ids:
            self._held.append(held())
            self._held_ids.add(id(obj))

    def mark_written(self, access: Access) -> None:
        """Record a write before its value is stored; the leak check follows at the next touch, or at the end."""
        access.written = True
        access.site = call_site()
        if _jax.current_trace() is not self.trace:
            self._unchecked_writes.append(access)

    def note_write(self, access: Access, site: str = "") -> None:
        """Record a write that has been checked for leaks."""
        access.written = True
        access.site = access.site or site or call_site()

    def add_effect(self, effect: Effect) -> None:
        """Record the effect on a state that has no `Access`: a `jax.Ref`."""
        self._added.append(effect)

    def mark_created(self, state: Any, kind: Kind, ref: Callable[[], Any] | None = None) -> None:
        """Record a state made in the call; `ref` replaces the weak reference for states that allow none."""
        commit([self.creation(state, kind, ref)])

    def creation(self, state: Any, kind: Kind, ref: Callable[[], Any] | None = None) -> Store:
        """The store that records the state, for `mark_created`."""
        return self._created.append, (ref or weakref.ref(state), kind)

    def _check_writes(self) -> None:
        writes, self._unchecked_writes = self._unchecked_writes, []
        for access in writes:
            value = access.kind.get(access.state)
            check_write(access.state, access.kind, value, self.trace, access.site, after_store=True)

    # -- closing --

    def created(self) -> Iterator[tuple[Any, Kind]]:
        """States made in the call that are alive, each once."""
        seen = set()
        for ref, kind in self._created:
            state = ref()
            if state is not None and id(state) not in seen:
                seen.add(id(state))
                yield state, kind

    def _collect(self) -> list[Effect]:
        effects = []
        for access in self.accesses.values():
            value = access.kind.get(access.state)
            changed = access.copy is not None and access.copy.was_changed()
            if access.written or value is not access.value_in_body or changed:
                if changed:
                    self._refuse_alias(access)
                site = access.site or "a line that changed it in place"
                if changed:
                    self._check_unreported_write(access.state, access.kind, value, site)
                effect = Effect(access.state, access.kind, value, site, value_before=access.value_before)
                effect.stepped = self._is_stepped(access, value)
                effect.num_writes, effect.last_site = max(access.num_writes, int(changed)), access.last_site
                effects.append(effect)

        for state, kind in self.created():
            # Made in an inner call that failed or was only inspected; something may keep it alive, such as equations.
            if kind.is_invalidated(state):
                continue
            value, site = kind.get(state), kind.site_of(state)
            self._check_unreported_write(state, kind, value, site)
            effects.append(Effect(state, kind, value, site, created=True))

        for effect in effects:
            if not is_leaf(effect.value):
                refuse_hidden_in(effect)
        return effects + self._added

    def _is_stepped(self, access: Access, value: Any) -> bool:
        """See `Effect.stepped`. A value that the state had before counts as none."""
        entry = self.differentiated.get(id(access.kind.token(access.state)))
        if not (access.stepped or entry is not None):
            return False
        values = entry[1] if entry is not None else []
        return not any(value is x for x in (access.value_in_body, *values))

    def _check_unreported_write(self, state: Any, kind: Kind, value: Any, site: str) -> None:
        """`check_write` for a container that was changed in place and for a new state: neither was reported as
        a write.
        """
        leaked, frame = [value], self
        while leaked and frame is not None:  # JAX does not link the trace of a shard_map to the enclosing traces
            leaked, frame = _jax.leaked_tracers(leaked, frame.trace), frame.parent
        if leaked:
            check_write(state, kind, value, self.trace, site, after_store=True)

    def _refuse_alias(self, access: Access) -> None:
        """Raise if another state held the container that the body has changed in place, and has a copy of its own in
        this frame or one around it.
        """
        frame: Frame | None = self
        while frame is not None:
            first = frame.accesses.get(id(access.state))
            if first is None or (frame is not self and first.written):  # it has another container there
                return
            for second in frame.accesses.values():
                is_held = second.value_before is first.value_before and second.copy is not first.copy
                if is_held and not (frame is not self and second.written):
                    a, b = (describe(x.state, x.kind, value=first.value_before) for x in (first, second))
                    raise StateValueError(
                        f"{self.name} changed in place a {type(first.value_before).__name__} that two states hold: {a} "
                        f"and {b}. {frame.name} gives each state a container of its own.\n"
                        "Fix: assign a new container to .value, or keep it in one state."
                    )
            frame = frame.parent


def _release_lost_frames() -> None:
    for frame in reversed(list(open_frames.values())):
        if frame.thread != threading.get_ident():
            frame.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_release_lost_frames)


_IN_RULE = (
    "Raised in a derivative rule that statetx called to inspect the function, whose own call had ended: {site}\n"
    "Fix: if the rule refuses the tangent of an argument, leave it out by argnums=, or give jax.grad(loss) in place of "
    "the loss, whose floats are all differentiated. Else let the rule read arguments only, no states or attributes "
    "that the call sets. There is no plan and no report "
    "of a backward pass for rules that do, such as those of braintrace's online algorithms."
)


def undone(fun: Callable[..., T]) -> Callable[..., T]:
    """`fun`, whose writes to states are undone once it has returned.

    For equations that are differentiated later than in the user's call, only to inspect them: their derivative rules
    may be Python that reads and writes states. An exception of such a rule has a note that says so.
    """

    @functools.wraps(fun)
    def call(*args: Any, **kwargs: Any) -> T:
        try:
            return Frame("a derivative rule", is_undo=True).run(fun, *args, **kwargs)
        except Exception as e:
            site = _site_of_user(e.__traceback__)
            note = _IN_RULE.format(site=site)
            if site is not None and note not in getattr(e, "__notes__", ()):
                e.add_note(note)
            raise

    return call


def _site_of_user(traceback: TracebackType | None) -> str | None:
    """The first line of a traceback that is neither in a library nor in Python itself."""
    folders = library_folders()
    while traceback is not None:
        file = traceback.tb_frame.f_code.co_filename
        is_python = file.startswith(_STDLIB) and "site-packages" not in file
        if not (is_python or file.startswith(("<", *folders))):
            return f"{file}:{traceback.tb_lineno}"
        traceback = traceback.tb_next
    return None


def enclosing_frame(closing: Any) -> Any:
    """The parent of a frame that is about to close; the current frame for None."""
    return _local.frame if closing is None else closing.parent


def open_inside(frame: Frame) -> list[Frame]:
    """The open frames of this thread inside of one, the innermost first."""
    inner, current = [], _local.frame
    while current is not None and current is not frame:
        inner.append(current)
        current = current.parent
    return inner


def end_differentiated(frame: Any) -> None:
    """Tell the parent of a frame that closes which states it has differentiated."""
    if frame.parent is not None:
        for key, (token, _) in frame.differentiated.items():
            frame.parent.differentiated.setdefault(key, (token, []))
    frame.differentiated = {}


def forget_differentiated(effects: Iterable[Effect]) -> None:
    """Drop the record of a function that was differentiated and has written states itself: that is no training step."""
    for effect in effects:
        effect.stepped = False
        if _local.frame is not None:
            _local.frame.differentiated.pop(id(effect.kind.token(effect.state)), None)


def note_step(state: Any) -> None:
    """Record in the current frame that the value it has written to a state is the update of a training step."""
    access = None if _local.frame is None else _local.frame.accesses.get(id(state))
    if access is not None:
        access.stepped = True


def _note_differentiated(primals: list[Any]) -> None:
    frame: Any = _local.frame
    if frame is None:
        return
    ids = {id(x) for x in primals}
    while frame is not None:
        for access in frame.accesses.values():
            if access.kind.is_trainable(access.state):
                value = access.kind.get(access.state)
                if any(id(x) in ids for x in jax.tree.leaves(value)):
                    token = access.kind.token(access.state)
                    frame.differentiated.setdefault(id(token), (token, []))[1].append(value)
        frame = frame.parent


_jax.note_differentiated(_note_differentiated)
