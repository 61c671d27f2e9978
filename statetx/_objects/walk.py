"""The walk over Python objects: every state that can be reached from one, by path.

It has two stages. `Walk.held` finds the states that belong to the object: in attributes, slots, items, closures, class
attributes and, if the walk starts at a function, in the module variables that it and the functions it calls read.
`Walk.beyond` then adds states that a call could touch: in variables that methods read, weak references, and the
referents of opaque objects. A method counts as called if its name occurs in code that the walk has visited. This errs
in both directions, so a transform that selects states compares the result with the states that the call really touches.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import threading
import types
import weakref
from collections.abc import Iterator, Set
from typing import Any, NamedTuple

from .. import _jax, _states
from .code import class_children, global_children, methods, module_children, names_in_bases, reads
from .contents import (
    Children,
    children,
    extras,
    has_parts,
    is_base,
    is_installed,
    is_remote,
    is_wrapper,
    module_of,
    package_of,
    referents,
    set_items,
    weak_children,
)

_NEVER_CALLED = frozenset("__new__ __init__ __post_init__ __init_subclass__ __repr__ __str__ __eq__ __hash__".split())
_NEVER_CALLED |= frozenset("__reduce__ __reduce_ex__ __getstate__ __setstate__ __copy__ __deepcopy__ __del__".split())


class _Context(NamedTuple):
    """The context of a visit.

    Attributes:
        reads: whether functions are followed to the variables that they read.
        owners: the classes whose attributes are visited. An instance of one of them, say in a list of all instances,
            does not belong to the object, and is visited in the second stage.
    """

    reads: bool = False
    owners: frozenset[type] = frozenset()


class Walk:
    """One walk from one or more objects; it yields no state twice.

    Args:
        all_methods: follow every method of the visited classes, not only those whose names occur in visited code.
        follows_classes: whether to visit the attributes of an object's class.

    Attributes:
        unstable: the paths of sets whose items cannot be told apart in another process.
    """

    def __init__(self, *, all_methods: bool = False, follows_classes: bool = True):
        self.unstable: list[str] = []
        self._all_methods = all_methods
        self._follows_classes = follows_classes
        self._own_packages: set[str] = set()  # installed packages whose code is followed, since a root belongs to them
        self._seen: set[int] = set()
        self._alive: list[Any] = []  # objects made during the walk must outlive it, or their ids are reused
        self._used: collections.Counter[str] = collections.Counter()
        self._deferred: collections.deque[tuple[str, Children]] = collections.deque()
        self._classes: list[tuple[str, type]] = []
        self._modules: list[tuple[str, types.ModuleType]] = []
        self._names: set[str] = set()
        self._is_beyond = False

    @property
    def visited(self) -> list[Any]:
        """The objects visited so far, in order."""
        return self._alive

    def held(self, obj: Any, path: str = "", *, is_called: bool | None = None) -> Iterator[tuple[str, Any]]:
        """The states that an object holds, by path.

        `is_called`: whether functions are followed to the variables that they read; by default if `obj` is a function.
        """
        core = _core(obj)
        module = module_of(core) if isinstance(core, types.FunctionType) else type(core).__module__
        self._own_packages.add(package_of(module))
        reads = isinstance(core, types.FunctionType) if is_called is None else is_called
        return self._visit(iter([(path, obj)]), _Context(reads))

    def beyond(self) -> Iterator[tuple[str, Any]]:
        """Further states that a call could touch; call it when `held` is exhausted."""
        self._is_beyond = True
        context = _Context(reads=True)
        has_progressed = True
        # A fixed point: a visited method adds names, names add methods and module variables, and these defer further
        # objects.
        while has_progressed:
            has_progressed = False
            while self._deferred:
                path, contents = self._deferred.popleft()
                yield from self._visit(_under(path, contents), context)
                has_progressed = True
            for path, contents in self._by_name():
                has_progressed = True
                yield from self._visit(_under(path, contents), context)

    def _by_name(self) -> Iterator[tuple[str, Children]]:
        """Methods and module variables whose names occur in the code visited so far."""
        for path, cls in list(self._classes):
            self._names |= names_in_bases(cls, self._names)
            for name, method in methods(cls):
                if id(method) not in self._seen and self._may_run(name):
                    yield path, iter([("", method)])
        for path, module in list(self._modules):
            for name, content in module_children(module, self._names):
                if id(content) not in self._seen and has_parts(content):
                    yield path, iter([("" if isinstance(content, types.FunctionType) else name, content)])

    def _may_run(self, name: str) -> bool:
        if name in _NEVER_CALLED:
            return False
        # Special methods are called by syntax, which leaves no name in the code.
        return self._all_methods or name in self._names or (name.startswith("__") and name.endswith("__"))

    def _visit(self, start: Children, context: _Context) -> Iterator[tuple[str, Any]]:
        # Depth first by a stack of iterators, not by recursion: models may be deeper than Python's stack, and
        # children are listed only when they are reached. Each turn visits one child of the top iterator.
        pending = [(start, context)]
        while pending:
            contents, context = pending[-1]
            # A `break` goes on with the children of `obj`; the `else` runs when the iterator is exhausted.
            for path, obj in contents:
                if not has_parts(obj) or id(obj) in self._seen:
                    continue
                # Not `isinstance`, which runs the code of metaclasses: jaxtyping's raise.
                if context.owners and not context.owners.isdisjoint(type(obj).__mro__):
                    self._deferred.append((path, iter([("", obj)])))
                    continue

                self._seen.add(id(obj))
                self._alive.append(obj)
                kind = _states.kind_of(obj)
                if kind is not None:
                    yield self._named(path), obj
                    pending.append((_under(path, extras(obj, kind)), context))
                elif isinstance(obj, type):
                    self._classes.append((path, obj))
                    pending.append((_under(path, class_children(obj)), _Context(context.reads, context.owners | {obj})))
                else:
                    pending.append((_under(path, self._inside(path, obj, context)), context))
                break
            else:
                pending.pop()

    def _inside(self, path: str, obj: Any, context: _Context) -> Children:
        if isinstance(obj, types.ModuleType):
            self._modules.append((path, obj))
            return
        # Two such items may change places in the next process: `values` must not pair them by path.
        if isinstance(obj, (Set, weakref.WeakSet)) and not set_items(obj)[1]:
            self.unstable.append(path)
        yield from children(obj)
        if isinstance(obj, types.FunctionType):
            if not is_base(module_of(obj)):
                self._names.update(reads(obj.__code__).names)
            if self._follows(module_of(obj)):
                yield from self._visit_or_defer(path, global_children(obj), at_once=context.reads)
        elif self._follows_classes and not is_base(type(obj).__module__):
            yield "", type(obj)
        if is_remote(type(obj)):
            yield from self._visit_or_defer(path, itertools.chain(weak_children(obj), referents(obj)))

    def _visit_or_defer(self, path: str, contents: Children, at_once: bool = False) -> Children:
        if at_once or self._is_beyond:
            yield from contents
        else:
            self._deferred.append((path, contents))

    def _follows(self, module: str) -> bool:
        if is_base(module):
            return False
        return not is_installed(module) or package_of(module) in self._own_packages

    def _named(self, path: str) -> str:
        self._used[path] += 1
        return path if self._used[path] == 1 else f"{path}#{self._used[path]}"


def visited_from(*roots: Any) -> list[Any]:
    """The objects that these roots hold, in order, without their classes' attributes."""
    walk = Walk(follows_classes=False)
    for root in roots:
        collections.deque(walk.held(root), 0)
    return walk.visited


def held_states(obj: Any) -> list[Any]:
    """The states that an object holds itself, not counting its class's, nor those that its code reads."""
    return [state for _, state in Walk(follows_classes=False).held(obj, is_called=False)]


def _under(path: str, contents: Children) -> Children:
    for key, child in contents:
        yield (f"{path}.{key}" if path and key else path or key), child


def _core(obj: Any) -> Any:
    """The function inside partials, bound methods and wrappers, or the object itself."""
    while True:
        if isinstance(obj, functools.partial):
            obj = obj.func
        elif isinstance(obj, types.MethodType):
            obj = obj.__func__
        elif not isinstance(obj, types.FunctionType) and is_wrapper(obj):
            obj = obj.__wrapped__
        else:
            return obj


# -- leftovers of a call that only inspects a function: states without a value, tracers in attributes --

_NONE = object()


class _Inspections(threading.local):
    num_open = 0


_inspections = _Inspections()


def num_inspections() -> int:
    """How many blocks of `inspecting` this thread is in."""
    return _inspections.num_open


@contextlib.contextmanager
def inspecting() -> Iterator[None]:
    """A block that only looks at a call or a state: reads, draws and writes in it do not count."""
    _inspections.num_open += 1
    try:
        yield
    finally:
        _inspections.num_open -= 1


@contextlib.contextmanager
def created_undone(*roots: Any, is_run: bool = False) -> Iterator[None]:
    """Undo, at the end, the assignments of new states, and of tracers, to attributes of the objects that these roots
    hold; of states that have a value, too, if the call `is_run`.

    A call that is traced and not run may create states, as a step with ``init_all_states`` does, or a layer at its
    first call. They have no value afterwards, and the object is to be as before: with the earlier state, or without
    one. Nor has an array in an attribute, which flax.nnx allows. Other assignments stay, as after any trace of JAX; so
    do items of containers that existed before.
    """
    # Held for the call: the references to earlier states cost `jit` another staging at most (decision 16).
    saved = [(obj, dict(attributes)) for obj in visited_from(*roots) if (attributes := _attributes(obj)) is not None]
    earlier_ids = {id(state) for state in held_states(list(roots))} if is_run else set()
    is_new = lambda value: is_run and any(id(state) not in earlier_ids for state in held_states([value]))
    try:
        with contextlib.nullcontext() if is_run else inspecting():
            yield
    finally:
        for obj, attributes in saved:
            for name, value in list((_attributes(obj) or {}).items()):
                earlier = attributes.get(name, _NONE)
                if value is earlier:
                    continue
                if isinstance(value, _jax.Tracer) or _holds_dropped_state(value) or is_new(value):
                    _restore(obj, name, earlier)


def _attributes(obj: Any) -> dict[str, Any] | None:
    """The attributes of an instance; None without a ``__dict__``, and for modules and classes, which are no part of a
    model.

    Attributes of a state that its library sets, such as its value, are left out: frames restore them, to the tracers of
    the enclosing calls.
    """
    if isinstance(obj, (type, types.ModuleType)):
        return None
    try:
        attributes = object.__getattribute__(obj, "__dict__")
    except AttributeError:
        return None
    kind = _states.kind_of(obj)
    return attributes if kind is None else {k: v for k, v in attributes.items() if k not in kind.bookkeeping}


def _holds_dropped_state(obj: Any) -> bool:
    return any(_states.kind_of_state(state).is_invalidated(state) for state in held_states([obj]))


def _restore(obj: Any, name: str, value: Any) -> None:
    # Not by the class's own methods, which may check or convert the value: it was there before.
    if value is _NONE:
        object.__delattr__(obj, name)
    else:
        object.__setattr__(obj, name, value)
