"""Programs by the keys of calls: in general (`Programs`), or of one jitted function (`ProgramCache`)."""

from __future__ import annotations

import contextlib
import logging
import types
import warnings
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from ... import _jax, _states
from ..._atomic import locked, new_lock
from ..._errors import StagingWarning
from .arguments import Call, HeldKey, Opening, parts, static_key
from .created import CreatedStates
from .program import StagedProgram

_log = logging.getLogger("statetx")


class Programs(dict[Hashable, list]):
    """Programs by the keys of calls. Bounded: the oldest are dropped first. The programs of a collected object are
    dropped, too.

    A state that refers to its model keeps the model alive until its programs are dropped, since a program holds its
    states.
    """

    def __init__(self, size: int):
        super().__init__()
        self._size = size
        self._watches: dict[Hashable, list[weakref.ref]] = {}

    def keep(self, key: Hashable, programs: list) -> None:
        """Store the programs of a key; not thread-safe."""
        if key not in self:
            self._drop_abandoned()
            while len(self) >= self._size:
                self._forget(self._oldest())
            self._watch(key)
        self[key] = programs

    def clear(self) -> None:
        super().clear()
        self._watches.clear()

    def _watch(self, key: Hashable) -> None:
        weak_self = weakref.ref(self)

        def forget(_: Any) -> None:
            programs = weak_self()
            if programs is not None:
                programs._forget(key)

        watches = []
        for part in parts(key):
            if isinstance(part, HeldKey):
                part.settle()
            obj = part() if isinstance(part, weakref.ref) else part.obj if part.is_weak else None
            if obj is not None:
                watches.append(weakref.ref(obj, forget))
        if watches:
            self._watches[key] = watches

    def _forget(self, key: Hashable) -> None:
        self.pop(key, None)
        self._watches.pop(key, None)

    def _drop_abandoned(self) -> None:
        for key in list(self):
            if any(isinstance(part, HeldKey) and part.is_alone for part in parts(key)):
                self._forget(key)

    def _oldest(self) -> Hashable:
        while True:
            # RuntimeError: an object was collected between `iter` and `next`, which removed its key.
            with contextlib.suppress(RuntimeError):
                return next(iter(self), None)


class ProgramCache:
    """The programs of a function, shared by every `jit` of it with the same options.

    Attributes:
        programs: for each key of calls, its programs, most recently used first.
        fast_path: the program and its modes, if it is the only one and JAX can take the arguments unchanged; else None.
        has_logged, has_warned: whether it was said that the function is staged a second time, and that it is in every
            call.
        lock: held while the programs of a key are reordered.
        staging: held by a thread that stages, so that other threads wait for its program.
        opening: what is opened in the arguments.
    """

    def __init__(self) -> None:
        self.programs = Programs(_MAX_KEYS)
        self.fast_path: tuple[StagedProgram, Hashable] | None = None
        self.has_logged = self.has_warned = False
        self.lock = new_lock()
        self.staging = new_lock()
        self.opening = Opening()
        _jax.register_cache(self, "statetx.jit")

    def cache_clear(self) -> None:
        self.fast_path = None
        self.programs.clear()

    def of(self, call: Call) -> Sequence[StagedProgram]:
        """The programs for calls like this one."""
        return self.programs.get(call.key, ())

    def keep(self, call: Call, program: StagedProgram) -> None:
        """Add a program for calls like this one."""
        locked(self.lock, self._keep, call, program)

    def _keep(self, call: Call, program: StagedProgram) -> None:
        is_first = not self.programs
        self._put_first(call, program)
        self.fast_path = (program, call.modes) if is_first and call.is_direct and program.is_direct else None

    def put_first(self, call: Call, program: StagedProgram) -> None:
        """Note that a program is the most recently used one for calls like this one."""
        locked(self.lock, self._put_first, call, program)

    def _put_first(self, call: Call, program: StagedProgram) -> None:
        other_programs = [p for p in self.of(call) if p is not program and (p.created.can_run() or not p.is_for(call))]
        self.programs.keep(call.key, [program, *other_programs[: _MAX_PROGRAMS - 1]])

    def say_second(self, name: str, created: CreatedStates, earlier: Sequence[CreatedStates]) -> None:
        """Say once that the function is staged a second time, and once if it is staged in every call, because of the
        states it creates.
        """
        created.num_stagings += max(c.num_stagings for c in earlier)
        if not (created.is_returned or self.has_logged):
            self.has_logged = True
            _log.warning(
                "%s is traced, and may be compiled, a second time: its first call created %s. Later calls run this "
                "program, and write the states that this call creates. To trace it once, create the states before the "
                "call.",
                name,
                earlier[0].summary,
            )
        elif created.is_returned and created.num_stagings > 2 and not self.has_warned:
            self.has_warned = True
            advice = (
                f"{name} is staged again in every call: it returns {created.summary}, a new one each time.\n"
                f"Fix: create the state before the call and write it there, or assign it to an attribute of an object "
                f"that exists before the call."
            )
            warnings.warn(advice, StagingWarning, stacklevel=_states.user_stacklevel())


_caches: weakref.WeakKeyDictionary[types.FunctionType, dict[Hashable, ProgramCache]] = weakref.WeakKeyDictionary()


def cache_of(fun: Callable, options: dict[str, Any]) -> ProgramCache:
    """The cache of a function with these options, which every `jit` of it shares."""
    if not isinstance(fun, types.FunctionType):  # a bound method, for example, is a new object at each attribute access
        return ProgramCache()
    caches = _caches.setdefault(fun, {})
    key = static_key(options)
    if key not in caches:
        while len(caches) >= _MAX_OPTIONS:
            caches.pop(next(iter(caches)), None)
        caches[key] = ProgramCache()
    return caches[key]


_MAX_OPTIONS = 8  # combinations of options for one function; the oldest is dropped
_MAX_KEYS = 256  # combinations of static arguments; the oldest is dropped
_MAX_PROGRAMS = 64  # combinations of types for one structure of arguments; the least recently used is dropped
