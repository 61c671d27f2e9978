"""The registry as a tool: `trace_states` reports what a call touches, `functionalize` makes it explicit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

import jax

from .. import _jax, _states
from .._errors import CreatedStateError, StateAccessError, StateValueError
from .._frames import Access, Effect, Frame
from .._lift.stage import (
    InputNames,
    Lifting,
    Wrapper,
    as_decorator,
    frame_for,
    name_of,
    pack,
    run_at_once,
    stage,
    take_apart,
)
from .._objects.paths import Paths, short_site
from .._text import brief, format_bytes, format_table, short_tree_type_str, suggestion, tree_type_str
from .._tree import Partition, as_array, freeze, is_argument, is_array, is_array_or_number, num_bytes, partition
from .._typing import PyTree, public

P = ParamSpec("P")
R = TypeVar("R")


@dataclasses.dataclass(frozen=True)
class StateRow:
    """One state of a `StateTrace`.

    Attributes:
        path: where the call reaches it; its name or place of creation where no path is found.
        state: the state itself.
        kind: its type's name.
        type: shape and dtype of its value, or of the leaves of a container.
        bytes: size of the value's arrays.
        read: whether the call reads the value that the state had before it.
        written: whether the call writes it.
        created: whether the call creates it.
        written_at: ``file:line`` of the first write.
        read_at: of the first read; known only where ``STATETX_DEBUG`` was set.
    """

    path: str
    state: Any
    kind: str
    type: str
    bytes: int
    read: bool
    written: bool
    created: bool
    written_at: str = ""
    read_at: str = ""


@public
class StateTrace:
    """What one call reads, writes and creates; prints as a table.

    Attributes:
        rows: a `StateRow` for each state, in the order in which the call touches them.
        reads, writes, created: the states by path.
    """

    _COLUMNS = ("path", "kind", "shape and dtype", "bytes", "read", "written", "created")

    def __init__(self, name: str, rows: list[StateRow]):
        self.name = name
        self.rows = rows
        self.reads = {r.path: r.state for r in rows if r.read}
        self.writes = {r.path: r.state for r in rows if r.written}
        self.created = {r.path: r.state for r in rows if r.created}

    def __iter__(self):
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def _cells(self) -> list[tuple[str, ...]]:
        shows_places = any(r.read_at for r in self.rows)

        def mark(is_so: bool, place: str = "") -> str:
            return (place if shows_places and place else "yes") if is_so else ""

        return [
            (
                *(r.path, r.kind, r.type, format_bytes(r.bytes)),
                *(mark(r.read, short_site(r.read_at)), mark(r.written, short_site(r.written_at)), mark(r.created)),
            )
            for r in self.rows
        ]

    def _title(self) -> str:
        total = format_bytes(sum(r.bytes for r in self.rows))
        return f"{self.name}: {len(self.rows)} states, {total}; {len(self.reads)} read, {len(self.writes)} written"

    def __str__(self) -> str:
        if not self.rows:
            return f"{self.name}: no states"
        return f"{self._title()}\n{format_table(self._COLUMNS, self._cells(), right=('bytes',))}"

    __repr__ = __str__

    def __rich__(self) -> Any:
        from rich.table import Table

        table = Table(title=self._title())
        for column in self._COLUMNS:
            table.add_column(column, justify="right" if column == "bytes" else "left")
        for cells in self._cells():
            table.add_row(*cells)
        return table


def trace_states(fun: Callable[P, Any]) -> Callable[P, StateTrace]:
    """Find out which states a function reads, writes and creates, without running it.

    Args:
        fun: a function that may read and write states.

    Returns:
        A function of the same arguments (``jax.ShapeDtypeStruct`` may stand for arrays) that returns a `StateTrace`.
        It traces `fun` abstractly: no array is computed and no state changes.

    Example:
        >>> import jax.numpy as jnp, statetx
        >>> class Cell:
        ...     def __init__(self):
        ...         self.w, self.h = statetx.Param(jnp.eye(2)), statetx.State(jnp.zeros(2))
        ...
        ...     def step(self, x):
        ...         self.h.value = self.w.value @ x
        >>> print(statetx.trace_states(Cell().step)(jnp.ones(2)))
        step: 2 states, 24 B; 1 read, 1 written
        path  kind   shape and dtype  bytes  read  written  created
        ----  -----  ---------------  -----  ----  -------  -------
        w     Param  float32[2,2]      16 B  yes
        h     State  float32[2]         8 B        yes
    """
    return as_decorator(TraceStates, fun, {})


class TraceStates(Wrapper[P, Any]):
    """Made by `trace_states`."""

    def __init__(self, fun: Callable):
        super().__init__(fun, {})

    def __call__(self, /, *args: Any, **kwargs: Any) -> StateTrace:
        frame, refs, paths = _trace(self.__wrapped__, args, kwargs)
        return StateTrace(name_of(self.__wrapped__).split(".")[-1], [*_rows(frame, paths), *_ref_rows(refs, paths)])


def _trace(fun: Callable, args: tuple, kwargs: dict[str, Any]) -> tuple[Frame, list[tuple[Any, bool]], Paths]:
    """Run `fun` abstractly; the closed frame says what it touched, and the list which Refs, and if it writes them."""
    arrays, others = partition((args, kwargs), lambda x: is_array(x) or isinstance(x, jax.ShapeDtypeStruct))
    frame = frame_for("trace_states", fun)

    def body(*tracers: Any) -> tuple[list, None]:
        call_args, call_kwargs = others.combine(tracers)
        out = frame.run(fun, *call_args, **call_kwargs)
        for effect in frame.effects:
            effect.value = jax.tree.map(_type_only, effect.value)
        leaves, _ = pack(out, [])
        return leaves, None

    avals = [_jax.abstract(as_array(x)) for x in arrays]
    refs = Lifting(is_array)  # not given to the frame: it collects Refs only
    _, _, effects = stage(body, avals, kind="statetx.trace_states", names=InputNames(fun, others.combine), lifting=refs)
    written = {id(e.state) for e in effects}
    found = [(i.state, id(i.state) in written) for i in refs.inputs.values()]
    return frame, found, Paths(fun, args, kwargs)


def _ref_rows(refs: list[tuple[Any, bool]], paths: Paths) -> list[StateRow]:
    return [
        StateRow(paths(ref), ref, "jax.Ref", tree_type_str(ref[...]), num_bytes(ref[...]), True, written, False)
        for ref, written in refs
    ]


def _type_only(x: Any) -> Any:
    return jax.ShapeDtypeStruct(x.shape, x.dtype) if isinstance(x, _jax.Tracer) else x


def _rows(frame: Frame, paths: Paths) -> list[StateRow]:
    written = {id(e.state): e for e in frame.effects}
    rows: list[StateRow] = []
    used: dict[str, int] = {}

    def add(state: Any, kind: Any, value: PyTree, access: Access | None) -> None:
        path = paths(state)
        used[path] = used.get(path, 0) + 1
        if used[path] > 1:  # two states of the same name that no path tells apart
            path = f"{path}#{used[path]}"
        kind_name = type(state).__name__ if kind.name == "statetx" else f"{kind.name}.{type(state).__name__}"
        type_ = short_tree_type_str(value, 60)
        read, effect = access is not None and access.read, written.get(id(state))
        is_written = access is not None and effect is not None
        row = StateRow(path, state, kind_name, type_, num_bytes(value), read, is_written, created=access is None)
        places = {"written_at": effect.site if effect else "", "read_at": getattr(access, "read_site", "")}
        rows.append(dataclasses.replace(row, **places))

    for access in frame.accesses.values():
        add(access.state, access.kind, access.kind.get(access.state), access)
    for effect in frame.effects:
        if effect.created:
            add(effect.state, effect.kind, effect.value, None)
    return rows


def functionalize(fun: Callable[P, R]) -> Functionalize[P, R]:
    """Make a pure function of one that reads and writes states, for use under any plain JAX transform.

    Args:
        fun: a function that may read and write states.

    Returns:
        ``pure``, with

        - ``pure.values(*args)``: the current values of the states that the call touches, by path: arrays and numbers, which
          any JAX transform takes. What else is in a state's tree (a mode string, a flag) is read from the state when `pure` is
          called, and is None in the value. A state that holds nothing else is left out, unless it is a flag that the call
          writes.
        - ``pure(values, *args)``: ``(out, new_values)``, the latter with the same paths. No state is touched.
        - ``pure.states(*args)``: these states by path.
        - ``pure.store(values, *args)``: puts such values into the states.

    A ``jax.Ref`` is left to JAX: it is no part of the values, and a call writes it in place.

    Raises:
        StateAccessError: the call touches a state that `values` does not hold.
        CreatedStateError: the call creates a state that outlives it.
        StateValueError: the call writes another string, or another object that is no array, to a state.

    Example:
        >>> import jax, jax.numpy as jnp, statetx
        >>> n = statetx.State(jnp.zeros(()), name="n")
        >>> def f(x):
        ...     n.value += x
        ...     return 2 * n.value
        >>> pure = statetx.functionalize(f)
        >>> out, new = jax.jit(pure)(pure.values(1.0), 1.0)
        >>> float(out), float(new["n"]), float(n.value)
        (2.0, 1.0, 0.0)
    """
    return as_decorator(Functionalize, fun, {})


class Functionalize(Wrapper[P, R]):
    """Made by `functionalize`."""

    def __init__(self, fun: Callable):
        super().__init__(fun, {})
        self._known: dict[str, Any] = {}

    def states(self, /, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The states that a call with these arguments touches, by path."""
        frame, _, paths = _trace(self.__wrapped__, args, kwargs)
        rows = [r for r in _rows(frame, paths) if not r.created]
        found = {r.path: r.state for r in rows if _holds_numbers(r.state) or (r.written and _arrays_of(r.state))}
        self._known |= found
        return found

    def values(self, /, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The current values of these states, by path."""
        return {path: _passable(_read(state)) for path, state in self.states(*args, **kwargs).items()}

    def store(self, values: Mapping[str, Any], /, *args: Any, **kwargs: Any) -> None:
        """Put values into the states that they are of, all or none.

        Args:
            values: a dict as `values` gives it, or as a call returns it.
            args: of the function; only where the states are not known from an earlier call.

        Raises:
            StateAccessError: a path that the function does not have.
        """
        states = self._resolve(values, args, kwargs)
        run_at_once("functionalize", _write_all, (states, values), {})

    def __call__(self, values: Mapping[str, Any], /, *args: P.args, **kwargs: P.kwargs) -> tuple[R, dict[str, Any]]:
        fun = self.__wrapped__
        states = self._resolve(values, args, kwargs)
        given = {id(state): values[path] for path, state in states.items()}

        def on_read(state: Any, kind: Any, value: Any) -> Any:
            if id(state) in given:
                return _completed(given[id(state)], value)
            if not partition(value, is_array_or_number)[0]:
                return value
            raise StateAccessError(self._missing(state, kind, args, kwargs))

        frame = frame_for("functionalize", fun, on_read=on_read, frees_cycles=True)
        out = frame.run(fun, *args, **kwargs)
        take_apart(out)
        new = dict(values)
        paths = {id(state): path for path, state in states.items()}
        for effect in frame.effects:
            if effect.created:
                raise CreatedStateError(
                    f"{type(effect.state).__name__} made at {effect.site} was created inside {frame.name} and outlived "
                    f"the call, whose only results are values.\nFix: create the state before the call."
                )
            path = paths.get(id(effect.state))
            value = _written(effect, path)
            if path is not None:
                new[path] = value
            elif jax.tree.leaves(value):
                raise StateAccessError(self._missing(effect.state, effect.kind, args, kwargs))
        return out, new

    def _resolve(self, values: Mapping[str, Any], args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
        if not isinstance(values, Mapping):
            raise TypeError(
                f"The first argument of a functionalized {name_of(self.__wrapped__)} is the dict that .values(*args) "
                f"gives, got {type(values).__name__}."
            )
        if not self._known.keys() >= values.keys():
            self._known |= Paths(self.__wrapped__, args, kwargs).items()
        unknown = [path for path in values if path not in self._known]
        if unknown:
            raise StateAccessError(
                f"No state of {name_of(self.__wrapped__)} has the path {unknown[0]!r}.{suggestion(unknown[0], self._known)} Known paths: "
                f"{', '.join(self._known) or 'none'}."
            )
        return {path: self._known[path] for path in values}

    def _missing(self, state: Any, kind: Any, args: tuple, kwargs: dict[str, Any]) -> str:
        path = Paths(self.__wrapped__, args, kwargs)(state)
        return (
            f"The call touched {_states.describe(state, kind, path)}, which the given values do not hold.\n"
            f"Fix: take the values from .values(*args) of a call that touches the same states."
        )


def _read(state: Any) -> Any:
    kind = _states.kind_of(state)
    assert kind is not None
    return kind.read(state)


def _holds_numbers(state: Any) -> bool:
    return bool(partition(_read(state), is_array_or_number)[0])


# -- values that any JAX transform takes -------------------------------------------------------------------------------


def _split(value: PyTree) -> tuple[list[Any], Partition]:
    """Partition a state's value: arrays and numbers are dynamic, and in a value without these its flags are."""
    arrays, part = partition(value, is_array_or_number)
    return (arrays, part) if arrays else partition(value, is_argument)


def _arrays_of(state: Any) -> list[Any]:
    return _split(_read(state))[0]


def _passable(value: PyTree) -> PyTree:
    """A value with None for every leaf that no JAX transform takes."""
    arrays, part = _split(value)
    return _with_static(part, [None] * len(part.static)).combine(arrays)


def _with_static(part: Partition, static: Sequence[Any]) -> Partition:
    return Partition(part.treedef, part.mask, tuple(static))


def _write_all(states: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    for path, state in states.items():
        kind = _states.kind_of(state)
        assert kind is not None
        kind.write(state, _completed(values[path], kind.read(state)))


def _completed(given: PyTree, now: PyTree) -> PyTree:
    """What was given, with the leaves that the state has now where it has None and they are no arrays."""
    _, part = _split(now)
    if not part.static:
        return given
    leaves, treedef = jax.tree.flatten(given, is_leaf=_states.is_opaque)
    return part.combine(leaves) if treedef == jax.tree.structure(_passable(now), is_leaf=_states.is_opaque) else given


def _written(effect: Effect, path: str | None) -> PyTree:
    """The new value of a state, with None where it has what it had."""
    arrays, part = _split(effect.value)
    if not part.static:
        return effect.value
    before = _split(_read(effect.state))[1]
    same_places = (before.treedef, before.mask) == (part.treedef, part.mask)
    static: list[Any] = []
    for i, leaf in enumerate(part.static):
        is_same = same_places and freeze(leaf) == freeze(before.static[i])
        if not (is_same or isinstance(leaf, bool)):
            raise StateValueError(
                f"The call writes {brief(leaf)} to {_states.describe(effect.state, effect.kind, path)}, at {effect.site}. "
                f"New values are arrays and numbers, which any JAX transform takes.\n"
                f"Fix: write it outside of the functionalized function, or keep a number in its place."
            )
        static.append(None if is_same else leaf)
    return _with_static(part, static).combine(arrays)
