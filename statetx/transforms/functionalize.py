"""The states of a call, told by `trace_states`; explicit inputs or outputs by `functionalize`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

import jax

from .. import _jax, _states
from .._errors import StateAccessError, StateValueError
from .._frames import Effect, Frame, refuse_created
from .._lift.options import transform
from .._lift.outcome import pack, partition_output
from .._lift.run import RefValues, call, frame_for, run_eagerly
from .._lift.stage import InputNames, Lifting, read_types, stage
from .._lift.wrapper import Wrapper, name_of
from .._objects.contents import has_parts
from .._objects.paths import Paths, short_site
from .._objects.walk import created_undone
from .._tables import Cell, Column, Table, Tabular
from .._text import brief, counted, format_bytes, short_tree_type_str, suggestion
from .._tree import (
    Partition,
    as_array,
    freeze,
    is_argument,
    is_array,
    is_array_or_number,
    is_array_or_type,
    num_bytes,
    partition,
)
from .._typing import PyTree, public

P = ParamSpec("P")
R = TypeVar("R")


@dataclasses.dataclass(frozen=True)
class StateRow:
    """One state of a `StateTrace`.

    Attributes:
        path: its path from the function or the arguments; its name or place of creation if no path is found.
        state: the state itself.
        kind: the name of its type.
        type: shape and dtype of its value, or of the leaves of a container.
        bytes: size of the value's arrays.
        read: whether the call reads the state's initial value.
        written: whether the call writes it.
        created: whether the call creates it.
        written_at: ``file:line`` of the first write.
        read_at: ``file:line`` of the first read; recorded only if ``STATETX_DEBUG`` is set.
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
class StateTrace(Tabular):
    """The states that one call reads, writes and creates.

    Prints as a table: as plain text with ``print``, in colors with ``rich.print``, as HTML in a notebook.

    Attributes:
        rows: a `StateRow` for each state, in order of the first touch.
        reads, writes, created: the states by path.
    """

    _COLUMNS = (
        Column("path", code=True),
        Column("kind"),
        Column("shape and dtype", code=True),
        Column("bytes", "right", "bold"),
        *map(Column, ("read", "written", "created")),
    )

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

    def _table(self) -> Table:
        shows_sites = any(r.read_at for r in self.rows)

        def mark(is_true: bool, site: str = "") -> str:
            return (site if shows_sites and site else "yes") if is_true else ""

        rows = []
        for r in self.rows:
            read, written = mark(r.read, short_site(r.read_at)), mark(r.written, short_site(r.written_at))
            rows.append([*map(Cell, (r.path, r.kind, r.type, format_bytes(r.bytes), read, written, mark(r.created)))])
        if not rows:
            return Table(f"{self.name}: no states", self._COLUMNS, rows)
        total = format_bytes(sum(r.bytes for r in self.rows))
        counts = f"{counted(len(rows), 'state')}, {total}; {len(self.reads)} read, {len(self.writes)} written"
        return Table(f"{self.name}: {counts}", self._COLUMNS, rows)


@transform()
def trace_states(fun: Callable[P, Any]) -> Callable[P, StateTrace]:
    """List the states that a function reads, writes and creates, without running it.

    Args:
        fun: a function that may read and write states.

    Returns:
        A function of the same arguments (a ``jax.ShapeDtypeStruct`` may replace an array) that returns a `StateTrace`.
        It traces `fun` abstractly: no array is computed and no state changes. States that the call creates are dropped,
        also from attributes.

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
        w     Param  f32[2,2]          16 B  yes
        h     State  f32[2]             8 B        yes
    """
    ...


class TraceStates(Wrapper[P, Any], made_by=trace_states):
    """Made by `trace_states`."""

    def __call__(self, /, *args: Any, **kwargs: Any) -> StateTrace:
        with created_undone(self.__wrapped__, args, kwargs):
            frame, refs, paths = _trace(self.__wrapped__, args, kwargs)
            rows = _rows(frame, refs, paths)
        return StateTrace(name_of(self.__wrapped__).split(".")[-1], rows)


def _trace(fun: Callable, args: tuple, kwargs: dict[str, Any]) -> tuple[Frame, list[tuple[Any, bool]], Paths]:
    """Run `fun` abstractly.

    Returns:
        Its closed frame; the Refs that it touches, with a flag if written; the paths.
    """
    arrays, args_part = partition((args, kwargs), is_array_or_type)
    frame = frame_for("trace_states", fun, on_read=read_types)

    def body(*tracers: Any) -> tuple[list, None]:
        call_args, call_kwargs = args_part.combine(tracers)
        out = frame.run(fun, *call_args, **call_kwargs)
        for effect in frame.effects:
            # The rows outlive the trace.
            type_only = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if isinstance(x, _jax.Tracer) else x
            effect.value = jax.tree.map(type_only, effect.value)
        return pack(out, [])[0], None

    avals = [_jax.abstract(as_array(x)) for x in arrays]
    refs = Lifting(is_array)  # collects Refs only: the frame does not get it
    names = InputNames(fun, args_part.combine)
    _, _, effects = stage(body, avals, traced_for="statetx.trace_states", names=names, lifting=refs)
    written = {id(e.state) for e in effects}
    touched_refs = [(i.state, id(i.state) in written) for i in refs.inputs.values()]
    return frame, touched_refs, Paths(fun, args, kwargs)


def _rows(frame: Frame, refs: list[tuple[Any, bool]], paths: Paths) -> list[StateRow]:
    """The rows of the states that a frame has watched, and of Refs, each with a flag if written."""
    effects = {id(e.state): e for e in frame.effects}
    rows: list[StateRow] = []
    num_used: dict[str, int] = {}

    def add(state: Any, kind: Any, value: PyTree, **uses: Any) -> None:
        path = paths(state)
        num_used[path] = num_used.get(path, 0) + 1
        if num_used[path] > 1:  # two states of the same name that no path tells apart
            path = f"{path}#{num_used[path]}"
        name = type(state).__name__ if kind.name == "statetx" else f"{kind.name}.{type(state).__name__}"
        name = kind.name if _states.is_unwatched(state) else name
        rows.append(StateRow(path, state, name, short_tree_type_str(value, 60), num_bytes(value), **uses))

    for access in frame.accesses.values():
        effect = effects.get(id(access.state))
        uses = {"read": access.read, "written": effect is not None, "created": False}
        sites = {"written_at": effect.site if effect else "", "read_at": access.read_site}
        add(access.state, access.kind, access.kind.get(access.state), **uses, **sites)
    for effect in frame.effects:
        if effect.created:  # not an input, so not a written one
            uses = {"read": False, "written": False, "created": True}
            add(effect.state, effect.kind, effect.value, **uses, written_at=effect.site)
    for ref, is_written in refs:
        add(ref, _states.kind_of_state(ref), _read(ref), read=True, written=is_written, created=False)
    return rows


@transform()
def functionalize(fun: Callable[P, R]) -> Functionalize[P, R]:
    """Turn a function that reads and writes states into a pure function, for use under any plain JAX transform.

    Args:
        fun: a function that may read and write states.

    Returns:
        ``pure``, with

        - ``pure.values(*args)``: the current values of the states that the call touches, by path. They hold arrays and
          numbers only, so that any JAX transform takes them; any other leaf (a mode string, a flag) is None in the
          value, and is read from the state when `pure` is called. A state without arrays and numbers is left out,
          unless it is a flag that the call writes.
        - ``pure(values, *args)``: returns ``(out, new_values)``; `new_values` has the same paths. No state is touched.
        - ``pure.states(*args)``: the same states, by path.
        - ``pure.store(values, *args)``: writes such values to the states.

    A ``jax.Ref`` is left to JAX: it is not among the values, and a call writes it in place.

    Raises:
        StateAccessError: the call touches a state that is not in `values`.
        CreatedStateError: the call creates a state that outlives it.
        StateValueError: the call replaces a leaf other than an array, number or flag (a string, for example).

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
    ...


class Functionalize(Wrapper[P, R], made_by=functionalize):
    """Made by `functionalize`."""

    def __init__(self, fun: Callable, takes_refs: bool = False):
        super().__init__(fun)
        # Refs are among the values, and a call writes none: for calls that are only inspected.
        self._takes_refs = takes_refs
        self._states_by_path: dict[str, Any] = {}

    def states(self, /, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Trace a call with these arguments; return the states that it touches, by path."""
        with created_undone(self.__wrapped__, args, kwargs):
            frame, refs, paths = _trace(self.__wrapped__, args, kwargs)
        rows = [r for r in _rows(frame, refs if self._takes_refs else [], paths) if not r.created]
        states = {r.path: r.state for r in rows if _is_taken(r)}
        self._states_by_path |= states
        return states

    def values(self, /, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Read the current values of the states that a call with these arguments touches, by path."""
        return {path: _arrays_only(_read(state)) for path, state in self.states(*args, **kwargs).items()}

    def store(self, values: Mapping[str, Any], /, *args: Any, **kwargs: Any) -> None:
        """Write values to their states: all of them, or none if one fails.

        Args:
            values: a dict from `values`, or the new values from a call.
            args: the function's arguments, which tell the models that the paths begin at. By default the arguments of
                the last call.

        Raises:
            StateAccessError: a path that the function does not have.
        """
        states = self._resolve(values, args, kwargs)
        run_eagerly(f"functionalize({name_of(self.__wrapped__)}).store", _write_all, (states, values), {})

    def __call__(self, values: Mapping[str, Any], /, *args: P.args, **kwargs: P.kwargs) -> tuple[R, dict[str, Any]]:
        fun = self.__wrapped__
        states = self._resolve(values, args, kwargs)
        value_by_id = {id(state): values[path] for path, state in states.items()}

        def on_read(state: Any, kind: Any, value: Any) -> Any:
            if id(state) in value_by_id:
                return _with_current_leaves(value_by_id[id(state)], value)
            if not partition(value, is_array_or_number)[0]:
                return value
            raise StateAccessError(self._missing(state, kind, args, kwargs))

        frame = frame_for("functionalize", fun, on_read=on_read, frees_cycles=True)
        takes_refs = any(map(_states.is_unwatched, states.values()))
        refs = RefValues(fun, args, kwargs) if _jax.is_eager() else None
        try:
            run = (lambda: call(fun, args, kwargs, True)) if takes_refs else (lambda: fun(*args, **kwargs))
            out = frame.output(run)
        except BaseException:
            if refs is not None:
                refs.restore()
            raise
        partition_output(out)  # refuses generators, and objects that hold tracers of an enclosing trace

        refuse_created(frame.effects, f"functionalize({name_of(fun)})")
        new_values = dict(values)
        paths = {id(state): path for path, state in states.items()}
        for effect in frame.effects:
            path = paths.get(id(effect.state))
            value = _new_value(effect, path)
            if path is not None:
                new_values[path] = value
            elif jax.tree.leaves(value):
                raise StateAccessError(self._missing(effect.state, effect.kind, args, kwargs))
        return out, new_values

    def _resolve(self, values: Mapping[str, Any], args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
        if not isinstance(values, Mapping):
            raise TypeError(
                f"The first argument of a functionalized {name_of(self.__wrapped__)} must be the dict from "
                f".values(*args), got {type(values).__name__}."
            )
        # A path such as "model.w" means the state of this call's model, not of an earlier call's.
        leaves = jax.tree.leaves((args, kwargs), is_leaf=_states.is_opaque)
        if not (self._states_by_path.keys() >= values.keys() and not any(map(has_parts, leaves))):
            self._states_by_path |= Paths(self.__wrapped__, args, kwargs).items()
        unknown = [path for path in values if path not in self._states_by_path]
        if unknown:
            raise StateAccessError(
                f"No state of {name_of(self.__wrapped__)} has the path "
                f"{unknown[0]!r}.{suggestion(unknown[0], self._states_by_path)} Known paths: "
                f"{', '.join(self._states_by_path) or 'none'}."
            )
        return {path: self._states_by_path[path] for path in values}

    def _missing(self, state: Any, kind: Any, args: tuple, kwargs: dict[str, Any]) -> str:
        path = Paths(self.__wrapped__, args, kwargs)(state)
        return (
            f"The call touched {_states.describe(state, kind, path)}, which is not among the given values.\n"
            f"Fix: take the values from .values(*args) of a call that touches the same states."
        )


def _read(state: Any) -> Any:
    kind = _states.kind_of_state(state)
    return kind.read(state)


def _is_taken(row: StateRow) -> bool:
    """Whether the values have the state: it holds arrays or numbers, or a flag that the call writes."""
    leaves, _ = _split(_read(row.state))
    return bool(leaves) and (row.written or is_array_or_number(leaves[0]))


# -- values that any JAX transform takes -----------------------------------------------------------------------------
#
# A value passes as its arrays and numbers, with None for each other (static) leaf. Before a call the None is replaced
# by the state's present leaf. After the call an unchanged leaf becomes None again; a changed one raises, unless it is a
# bool.


def _split(value: PyTree) -> tuple[list[Any], Partition]:
    """Partition a state's value. Arrays and numbers are dynamic; if there are none, Python bools are."""
    arrays, part = partition(value, is_array_or_number)
    return (arrays, part) if arrays else partition(value, is_argument)


def _arrays_only(value: PyTree) -> PyTree:
    """The value with None for each static leaf."""
    arrays, part = _split(value)
    return _with_static(part, [None] * len(part.static)).combine(arrays)


def _with_static(part: Partition, static: Sequence[Any]) -> Partition:
    return Partition(part.treedef, part.mask, tuple(static))


def _write_all(states: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    for path, state in states.items():
        kind = _states.kind_of_state(state)
        kind.write(state, _with_current_leaves(values[path], kind.read(state)))


def _with_current_leaves(value: PyTree, current: PyTree) -> PyTree:
    """The given value with each None for a static leaf replaced by the state's present leaf."""
    _, part = _split(current)
    if not part.static:
        return value
    leaves, treedef = jax.tree.flatten(value, is_leaf=_states.is_opaque)
    return (
        part.combine(leaves)
        if treedef == jax.tree.structure(_arrays_only(current), is_leaf=_states.is_opaque)
        else value
    )


def _new_value(effect: Effect, path: str | None) -> PyTree:
    """The new value of a state, with None for each unchanged static leaf."""
    arrays, part = _split(effect.value)
    if not part.static:
        return effect.value
    old_part = _split(_read(effect.state))[1]
    same_places = (old_part.treedef, old_part.mask) == (part.treedef, part.mask)
    static: list[Any] = []
    for i, leaf in enumerate(part.static):
        is_same = same_places and freeze(leaf) == freeze(old_part.static[i])
        if not (is_same or isinstance(leaf, bool)):
            raise StateValueError(
                f"The call writes {brief(leaf)} to {_states.describe(effect.state, effect.kind, path)}, at "
                f"{effect.site}. New values are arrays and numbers, which any JAX transform takes.\n"
                "Fix: write it outside of the functionalized function, or keep a number in its place."
            )
        static.append(None if is_same else leaf)
    return _with_static(part, static).combine(arrays)
