"""`Program`: what one staging of a jitted function gave, ready to run for every call of the same types.

A program gathers the values of its states, calls one `jax.jit`-ed function, and stores what it returns. The arguments come
as a `Call`.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax

from ... import _frames, _jax, _states
from ..._atomic import Store, commit, locked
from ..._equations.structure import Body
from ..._errors import ForeignStateError
from ..._lift.around import note
from ..._lift.stage import Input, InputNames, Lifting, Outcome, frame_for, name_of, pack, stage
from ..._objects.paths import Paths, argument_names
from ..._tree import freeze, is_array_or_number, partition
from ..._typing import PyTree
from ...kinds.native import _Invalidated
from ...kinds.ref import KIND as REF
from .arguments import Call
from .created import Making, States, left_by, notes_for_staging, standing
from .placement import Places, has_tracer, is_on_mesh, names_mesh


class Restage(Exception):
    """JAX asks for types or settings other than those that a program was staged for."""


class _Group:
    """Inputs of one kind of state, whose values are gathered in one go."""

    __slots__ = ("inputs", "kind", "states")

    def __init__(self, kind: Any, inputs: list[Input]):
        self.kind = kind
        self.inputs = inputs
        self.states = States(i.state for i in inputs)


class Program:
    """One staging of a function, ready to run.

    The compiled function takes the values of states that are kept and of those whose memory is donated, a call's
    `operand`, and its donated leaves; it returns the output, or its leaves where not all of it is arrays, and the
    leaves of the written states.

    Args:
        tried: programs for calls of this kind that could not run this one; it shares what JAX compiled for an equal one.

    Attributes:
        is_reusable: whether another call may run it. Not so where the staging closed over a value that another trace
            computes.
        is_direct: whether nothing but arrays goes in and comes out, and none is donated.
        guards: inputs with parts that are not arrays; the program stands for these very parts.
        making: the states that the call makes and leaves behind.
    """

    def __init__(self, owner: Any, call: Call, tried: Sequence[Program]):
        fun = owner.__wrapped__
        self.name = f"jit({name_of(fun)})"
        lifting = Lifting(is_array_or_number)
        arrays = [*call.kept, *call.donated]
        num_kept = len(call.kept)
        before, made, notes = standing(), [], notes_for_staging()

        def run_jitted(frame: Any, *args: Any, **kwargs: Any) -> Any:  # see `straight.BODY`
            out = fun(*args, **kwargs)
            made.extend(left_by(frame, notes))
            return out

        def arguments(leaves: Sequence[Any]) -> tuple[tuple, dict[str, Any]]:
            return call.with_arrays(leaves[:num_kept], leaves[num_kept:])

        def body(*tracers: Any) -> tuple[list, Any]:
            frame = frame_for("jit", fun, on_read=lifting.on_read, aliases=False)
            frame.on_created = notes
            note(tracers, arrays)
            args, kwargs = arguments(tracers)
            out = frame.run(run_jitted, frame, *args, **kwargs)
            for effect in frame.effects:
                _keep_type(effect, lifting.inputs.get(id(effect.state)))
            return pack(out, frame.effects, is_array_or_number)

        self.avals = [_jax.abstract(x) for x in arrays]
        self.settings = _jax.trace_context()
        self._staging = owner.cache.staging
        staged, outcome, refs = stage(body, self.avals, kind="jit", names=InputNames(fun, arguments), lifting=lifting)
        self.outcome: Outcome = outcome.add(refs)
        written = {id(e.state) for e in outcome.effects}
        paths = Paths(fun, call.args, call.kwargs)
        kept, donated = [], []
        for i in lifting.inputs.values():
            # One whose value no equation needs stays: the body may have looked at its type.
            is_donated = id(i.state) in written and not i.part.static and owner.donates(paths(i.state), i.state)
            (donated if is_donated else kept).append(i)
        self.kept, self.donated = _group(kept), _group(donated)
        self.guards = [i for g in self.kept for i in g.inputs if i.part.static]
        self.is_reusable = not any(isinstance(x, _jax.Tracer) for x in staged.operands)
        self._init_compiled(owner, staged, arrays, jax.tree.structure(call.operand), tried)
        operands = self.operands_of(call)
        _jax.name_inputs(self.compiled, operands, self._input_names(owner, call, operands, paths))
        self._init_writers()
        self._made = [e for e in outcome.effects if e.created]
        states = {id(x.state): (x.state, x.kind) for x in (*self._inputs(), *outcome.effects)}
        self.making = Making(made, states, before, notes)
        is_whole = self._writers is not None and not (self._places.is_open or self._places.is_partial)
        self.is_direct = is_whole and not (self.guards or self.donated or outcome.out.static or self.making)

    def count_references(self) -> None:
        """Tell the states that calls have made which of the references to them are this program's."""
        inputs, effects = self._inputs(), self.outcome.effects
        written = [state for _, states, _ in self._writers or () for state in states]
        listed = [*_states_of(self.kept), *_states_of(self.donated), *written]
        self.making.own(self, [*(x.state for x in (*inputs, *effects)), *listed])

    def _init_compiled(
        self, owner: Any, staged: Body, arrays: list[Any], operand_tree: Any, tried: Sequence[Program]
    ) -> None:
        inputs = self._inputs()
        base = staged.num_operands + len(self.avals)
        variables = staged.jaxpr.invars[:base] + [staged.jaxpr.invars[base + v] for i in inputs for v in i.variables]
        jaxpr = _jax.rebuild(staged.jaxpr, invars=variables, outvars=staged.jaxpr.outvars)
        operands, num_out = staged.operands, self.outcome.num_out
        avals = [*self.avals, *(aval for i in inputs for aval in i.avals)]
        treedefs = [None if i in self.guards else i.part.treedef for i in inputs]

        out_part = self.outcome.out
        self._is_on_mesh: bool | None = None  # known when JAX traces `inner` for the first time

        def inner(kept: list, donated: list, operand: PyTree, donated_args: list) -> tuple[PyTree, list]:
            values = [*kept, *donated]
            if jax.tree.structure(operand) != operand_tree:
                raise Restage
            leaves = [*jax.tree.leaves(operand), *donated_args, *jax.tree.leaves(values)]
            for value, treedef in zip(values, treedefs, strict=True):
                if treedef is not None and jax.tree.structure(value) != treedef:
                    raise Restage
            if self.settings != _jax.trace_context() or not _same_types(leaves, avals) or self._is_elsewhere(leaves):
                raise Restage
            self._is_on_mesh = is_on_mesh(map(_jax.abstract, leaves))
            outs = _jax.evaluate(jaxpr, (), (*operands, *leaves))
            return (outs[:num_out] if out_part.static else out_part.combine(outs[:num_out])), outs[num_out:]

        inner.__name__ = inner.__qualname__ = name_of(owner.__wrapped__)
        out_avals = [v.aval for v in jaxpr.outvars[num_out:]]
        self._places = Places(arrays, inputs, self.outcome, out_avals, names_mesh(jaxpr))
        pinned = self._places.out_shardings
        shardings = {} if pinned is None else {"out_shardings": (None, pinned)}
        self._body = Body(jaxpr, operands)
        self._form = (operand_tree, treedefs, out_part.treedef, len(_states_of(self.kept)), self.settings)
        self._is_unlike = bool(self.guards or out_part.static or pinned is not None)
        twin = next((p for p in tried if p.making and self._is_like(p)), None)
        if twin is not None:
            self.compiled = twin.compiled
        else:
            self.compiled = jax.jit(inner, donate_argnums=(1, 3), **shardings, **owner.jax_options)
        for i in inputs:
            i.values = []  # else the program would keep what the states held when it was staged

    def _is_like(self, other: Program) -> bool:
        """Whether what JAX compiles for the one is right for the other, too."""
        if self._is_unlike or other._is_unlike or self._form != other._form:
            return False
        mine, others = self._body, other._body
        return [*map(id, mine.operands)] == [*map(id, others.operands)] and mine.key == others.key

    def _input_names(self, owner: Any, call: Call, operands: tuple, paths: Paths) -> list[str]:
        """What profilers show for the inputs: paths of the states, and arguments as one writes them."""
        kept, donated, _, _ = operands
        states: list[str] = []
        for i, value in zip(self._inputs(), [*kept, *donated], strict=True):
            leaves = jax.tree_util.tree_flatten_with_path(value)[0]
            states += [paths(i.state) + jax.tree_util.keystr(keys) for keys, _ in leaves]
        dynamic = [n for n, is_static in enumerate(owner.static.mask(len(call.args))) if not is_static]
        split = owner.static.split(call.args, call.kwargs)[:2]
        name = argument_names(owner.__wrapped__, call.args, dynamic)
        leaves = jax.tree_util.tree_flatten_with_path(split, is_leaf=_states.is_opaque)[0]
        arguments = [name(keys) for keys, _ in leaves]
        return [*states, *(arguments[n] for n in (*call.layout.kept, *call.layout.donated))]

    def _init_writers(self) -> None:
        """Group the written states by kind; None if the value of some is more than one array."""
        self._writers: list[tuple[Any, list, list[int]]] | None = None
        if all(p.num_dynamic == 1 and jax.tree_util.treedef_is_leaf(p.treedef) for p in self.outcome.values):
            groups: dict[int, tuple[Any, list, list[int]]] = {}
            for n, e in enumerate(self.outcome.effects):
                kind, states, places = groups.setdefault(id(e.kind), (e.kind, States(), []))
                states.append(e.state)
                places.append(n)
            self._writers = list(groups.values())
        # All states of one kind, in the order of the values: what most programs write.
        self._writer = self._writers[0] if self._writers is not None and len(self._writers) == 1 else None
        # Written states whose values are inputs, too, with the places of these.
        places = {id(i.state): n for n, i in enumerate(self._inputs()) if i.kind is not REF}
        self._updated = [(e, places[id(e.state)]) for e in self.outcome.effects if id(e.state) in places]
        for effect in self.outcome.effects:
            effect.value_before = _frames.UNKNOWN  # else the program would keep what the states held when it was staged

    def _inputs(self) -> list[Input]:
        """In the order in which the compiled function takes them."""
        return [i for g in (*self.kept, *self.donated) for i in g.inputs]

    # -- running --

    def run(self, call: Call) -> Any:
        """Run for a call whose types the program accepts; raises `Restage` before anything is done if it does not."""
        if not _frames.is_idle():
            return self._run_watched(call)
        moves = self._moves()
        raw = self._patiently(_values_of, self.kept)
        donated = self._patiently(_values_of, self.donated)
        if self._places:
            self._check_places([*raw, *donated], call)
        kept = self._open_guards(raw)
        if donated:
            kept, donated = _unshare(kept, donated, call)
            operands = (kept, donated, call.operand, call.donated)
            out = self._run_donating(operands, lambda writes: self._store(writes, [], moves))
        else:
            out, writes = self.compiled(kept, donated, call.operand, call.donated)
            self._store(writes, raw, moves)
        return self.outcome.out.combine(out) if self.outcome.out.static else out

    def out_info(self) -> Any:
        """The output, with a ``jax.ShapeDtypeStruct`` for each array."""
        avals: list[Any] = [v.aval for v in self._body.jaxpr.outvars[: self.outcome.num_out]]
        shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type) for a in avals]
        return self.outcome.out.combine(shapes)

    def _moves(self) -> list[Store]:
        """What has to be stored besides values, see `Making.moves`."""
        moves = self.making.moves() if self.making else []
        if moves is None:
            raise Restage
        self.making.was_used = True
        return moves

    def run_directly(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        """`run` where nobody watches and everything is arrays: JAX finds out whether their types are the right ones."""
        groups = self.kept
        try:
            kept = groups[0].kind.get_all(groups[0].states) if len(groups) == 1 else _values_of(groups)
        except ForeignStateError:
            kept = self._patiently(_values_of, groups)
        if self._places and not self._places.accept(kept):
            raise Restage
        out, writes = self.compiled(kept, [], (args, kwargs), [])
        if writes:
            if self._writer is None or threading.active_count() > 1:
                self._store(writes, kept)
            else:
                self._writer[0].set_all(self._writer[1], writes)
        return out

    def _run_donating(self, operands: tuple, store: Callable[[list], None]) -> Any:
        """Run a program that takes the arrays of some states for its results: once it has run, these must be stored.

        `store` may be called again after an interrupt.
        """
        results: list[tuple[Any, list]] = []
        try:
            commit([(results.extend, map(self.compiled, *([x] for x in operands)))])
            store(results[0][1])
        except BaseException as e:
            try:
                if results:
                    store(results[0][1])
            finally:
                self._name_lost(operands[1], e)
            raise
        return results[0][0]

    def _name_lost(self, donated: list, error: BaseException) -> None:
        """Have states whose arrays a failed call has taken say so."""
        inputs = [i for g in self.donated for i in g.inputs]
        lost = [i for i, x in zip(inputs, donated, strict=True) if i.kind.get(i.state) is x and _is_deleted(x)]
        if lost:
            reason = f"its array was donated to {self.name}, which failed"
            commit([i.kind.store(i.state, _Invalidated(reason)) for i in lost])
            names = ", ".join(_states.describe(i.state, i.kind, value=0) for i in lost[:3])
            error.add_note(
                f"{self.name} had taken the arrays of {len(lost)} donated states for its results, and these have no value "
                f"now: {names}{', ...' * (len(lost) > 3)}.\nFix: write them again or restore a checkpoint; without "
                f"donate_states= a call that fails leaves the old values."
            )

    def _store(self, writes: list, values: list, moves: Sequence[Store] = ()) -> None:
        """Store what a call returned; `values` are those that its inputs had."""
        if self._places.is_open:
            self._places.learn(writes)
        if self._writers is None:
            self._publish(writes, values, moves, live=False)
        else:
            self._patiently(functools.partial(locked, _frames.ownership, self._set_all, writes, moves), values)

    def _publish(self, writes: list, values: list, moves: Sequence[Store] = (), *, live: bool) -> None:
        if self._places.is_open:
            self._places.learn(writes)

        def publish(values: list) -> None:
            if values:
                for effect, place in self._updated:
                    effect.value_before = values[place]
            self.outcome.publish(writes, live=live, also=moves)

        self._patiently(publish, values)

    def _set_all(self, writes: list, moves: Sequence[Store], values: list) -> None:
        writers = self._writers or ()
        for kind, states, _ in writers:
            kind.check_free(states)
        if values and threading.active_count() > 1:
            for effect, place in self._updated:
                if effect.kind.get(effect.state) is not values[place]:
                    raise _frames.changed_state_error(effect.state, effect.kind)
        stores = [kind.store_all(states, [writes[n] for n in places]) for kind, states, places in writers]
        commit([*stores, *moves])

    def _patiently(self, touch: Callable[[Any], Any], x: Any) -> Any:
        """Touch states; if another thread holds one, once more when nobody stages this very function any more."""
        try:
            return touch(x)
        except ForeignStateError:
            if not _frames.is_idle():
                raise
            return locked(self._staging, touch, x)

    def _run_watched(self, call: Call, *, live: bool = False) -> Any:
        moves = [] if live else self._moves()
        for effect in self._made:
            effect.created = live  # later calls find the state there
        operands = self.operands_of(call)
        if self._places and not live:
            self._check_places([*operands[0], *operands[1]], call)
        if operands[1]:
            out = self._run_donating(operands, lambda writes: self._publish(writes, [], moves, live=live))
        else:
            out, writes = self.compiled(*operands)
            self._publish(writes, [] if self.guards else operands[0], moves, live=live)
        return self.outcome.out.combine(out) if self.outcome.out.static else out

    def first_run(self, call: Call) -> Any:
        """Run for the call that was staged, whose watchers saw the body touch its states."""
        return self._run_watched(call, live=True)

    def operands_of(self, call: Call) -> tuple[list, list, PyTree, list]:
        """The compiled function's arguments, with each state's value read as a user reads it."""
        kept = self._open_guards([self._patiently(i.kind.read, i.state) for g in self.kept for i in g.inputs])
        donated = [self._patiently(i.kind.read, i.state) for g in self.donated for i in g.inputs]
        if donated:
            kept, donated = _unshare(kept, donated, call)
        return kept, donated, call.operand, call.donated

    def is_for(self, call: Call) -> bool:
        """Whether argument types and settings are those that were staged."""
        return self.settings == _jax.trace_context() and _same_types([*call.kept, *call.donated], self.avals)

    def accepts(self, call: Call) -> bool:
        """`is_for`, and whether the types of states are those that were staged."""
        if not self.is_for(call):
            return False
        if self.making and self.making.moves() is None:
            return False
        values = [self._patiently(i.kind.read, i.state) for i in self._inputs()]
        if self._places and not self._accepts_places(values, call):
            return False
        if self._is_elsewhere([*call.kept, *call.donated, *jax.tree.leaves(values)]):
            return False
        for i, value in zip(self._inputs(), values, strict=True):
            leaves, part = partition(value, is_array_or_number)
            if part.treedef != i.part.treedef or part.mask != i.part.mask or not _same_types(leaves, i.avals):
                return False
            if freeze(part.static) != freeze(i.part.static):
                return False
        return True

    def _open_guards(self, kept: list) -> list:
        if not self.guards:
            return kept
        inputs = [i for g in self.kept for i in g.inputs]
        return [partition(v, is_array_or_number)[0] if i.part.static else v for i, v in zip(inputs, kept, strict=True)]

    # -- shardings --

    def _is_elsewhere(self, leaves: Sequence[Any]) -> bool:
        """Whether some of these arrays lie on a mesh, and none did when the program was made, or the other way round."""
        if self._is_on_mesh is None or self._places.brings_mesh:
            return False
        return self._is_on_mesh != is_on_mesh([_jax.abstract(x) for x in leaves if is_array_or_number(x)])

    def _accepts_places(self, values: Sequence[Any], call: Call) -> bool:
        """Whether the written states lie where the program leaves them; `values` are those of the inputs."""
        if self._places.is_partial and not has_tracer([*call.kept, *call.donated, *values]):
            return False
        return self._places.accept(values)

    def _check_places(self, values: Sequence[Any], call: Call) -> None:
        if not self._accepts_places(values, call):
            raise Restage


def _values_of(groups: list[_Group]) -> list:
    if len(groups) == 1:
        return groups[0].kind.get_all(groups[0].states)
    return [v for group in groups for v in group.kind.get_all(group.states)]


def _states_of(groups: list[_Group]) -> list[Any]:
    return [state for group in groups for state in group.states]


def _group(inputs: list[Input]) -> list[_Group]:
    kinds = {id(i.kind): i.kind for i in inputs}
    return [_Group(kind, [i for i in inputs if i.kind is kind]) for kind in kinds.values()]


def _keep_type(effect: _frames.Effect, read: Input | None) -> None:
    """Make the weak types in a written value those of the value that was read."""
    if read is None:
        return
    leaves, part = partition(effect.value, is_array_or_number)
    if part.treedef != read.part.treedef or part.mask != read.part.mask:
        return
    for n, (leaf, aval) in enumerate(zip(leaves, read.avals, strict=True)):
        now = _jax.abstract(leaf)
        if now.weak_type != aval.weak_type and (now.shape, now.dtype) == (aval.shape, aval.dtype):
            leaves[n] = _jax.with_weak_type(leaf, aval.weak_type)
    effect.value = part.combine(leaves)


def _same_types(leaves: Sequence[Any], avals: Sequence[Any]) -> bool:
    if len(leaves) != len(avals):
        return False
    for leaf, b in zip(leaves, avals, strict=True):
        a = _jax.abstract(leaf)
        if a.shape != b.shape or a.dtype != b.dtype or a.weak_type != b.weak_type:
            return False
        if a.sharding.spec != b.sharding.spec:  # of axes that are explicit; types do not say how others are used
            return False
    return True


def _is_deleted(value: PyTree) -> bool:
    return any(isinstance(x, _jax.ArrayImpl) and x.is_deleted() for x in jax.tree.leaves(value))


def _unshare(kept: list, donated: list, call: Call) -> tuple[list, list]:
    """Copy arrays that would be donated while something else of the call still needs them."""
    seen = {id(x) for x in jax.tree.leaves((kept, call.kept, call.donated))}

    def own(x: Any) -> Any:
        if id(x) in seen and isinstance(x, jax.Array):
            return x.copy()
        seen.add(id(x))
        return x

    return kept, jax.tree.map(own, donated)
