"""`StagedProgram`: the result of staging a jitted function, which runs every call with the same types.

A program gathers the values of its states, calls one `jax.jit`-ed function, and stores the returned values. The
arguments come as a `Call`.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax

from ... import _frames, _jax, _states
from ..._atomic import Store, commit, locked
from ..._equations.inline import inline
from ..._equations.primitives import INLINED
from ..._equations.structure import Body
from ..._errors import ForeignStateError
from ..._lift.context import note_shardings
from ..._lift.inputs import Input, InputNames, Lifting
from ..._lift.late_rules import are_current, watched
from ..._lift.outcome import Outcome, pack
from ..._lift.run import frame_for
from ..._lift.stage import stage
from ..._lift.wrapper import name_of
from ..._objects.paths import Paths, check_paths
from ..._text import brief
from ..._tree import freeze, is_array_or_number, partition
from ..._typing import PyTree
from ...kinds.native import Invalidated
from .arguments import Call, copy_aliased_donations, input_names, name_operands
from .created import CreatedStates
from .placement import StateShardings, has_tracer, is_on_mesh, names_mesh


class Restage(Exception):
    """A call has other types or settings than the program was staged for."""


class _KindGroup:
    """Inputs of one kind of state, whose values are read by one call."""

    __slots__ = ("inputs", "kind", "states")

    def __init__(self, kind: Any, inputs: list[Input]):
        self.kind = kind
        self.inputs = inputs
        self.states = [i.state for i in inputs]


class StagedProgram:
    """The result of staging a function for one call.

    The compiled function takes the values of kept states, the values of donated states, a call's `operand` and its
    donated leaves. It returns the output (or its array leaves, if it has others) and the leaves of the written states.

    Args:
        tried: programs with the same key that do not accept this call. If the equations of one are equal, its compiled
            function is shared.

    Attributes:
        is_reusable: whether other calls may run it: not if the staging closed over a tracer of another trace.
        is_direct: whether all inputs and outputs are arrays, and none is donated.
        guards: inputs whose value has leaves other than arrays. The program holds for these leaves only.
        created: the states that the call creates and that outlive it.
        compiled: the `jax.jit`-ed function.
    """

    def __init__(self, owner: Any, call: Call, tried: Sequence[StagedProgram]):
        fun = owner.__wrapped__
        self.name = f"jit({name_of(fun)})"
        lifting = Lifting(is_array_or_number)
        arrays = [*call.kept, *call.donated]
        num_kept = len(call.kept)
        is_second = any(p.created.is_awaiting() and p.is_for(call) for p in tried)
        self.created = CreatedStates(fun, call.args, call.kwargs, is_second=is_second)

        def arguments(leaves: Sequence[Any]) -> tuple[tuple, dict[str, Any]]:
            return call.with_arrays(leaves[:num_kept], leaves[num_kept:])

        def body(*tracers: Any) -> tuple[list, Any]:
            frame = frame_for("jit", fun, on_read=lifting.on_read, frees_cycles=True, is_kept=True)
            note_shardings(tracers, arrays)
            args, kwargs = arguments(tracers)
            out = frame.run(self.created.run, frame, fun, args, kwargs)
            for effect in frame.effects:
                _keep_type(effect, lifting.inputs.get(id(effect.state)))
            return pack(out, frame.effects, is_array_or_number)

        self.avals = [_jax.abstract(x) for x in arrays]
        self.settings = _jax.trace_context()
        self._staging = owner.cache.staging
        staged, outcome, refs = stage(
            body, self.avals, traced_for="jit", names=InputNames(fun, arguments), lifting=lifting
        )
        self.outcome: Outcome = outcome.add(refs)
        staged, self._rules = watched(self.name, staged, self.outcome.effects)

        written = {id(e.state) for e in outcome.effects}
        paths = Paths(fun, call.args, call.kwargs)
        kept, donated = [], []
        for i in lifting.inputs.values():
            # A state whose value no equation uses is still an input: the body may have looked at its type.
            is_donated = id(i.state) in written and not i.partition.static and owner.donates(paths(i.state), i.state)
            (donated if is_donated else kept).append(i)
        touched = [x.state for x in (*lifting.inputs.values(), *outcome.effects)]
        option = f"{self.name}: donate_states={brief(owner.donate_states)}"
        check_paths(
            option,
            owner.donate_states,
            lambda: dict.fromkeys([*paths.items(), *map(paths, touched)]),
            "The function reaches",
        )
        self.kept, self.donated = _group(kept), _group(donated)
        self.guards = [i for g in self.kept for i in g.inputs if i.partition.static]

        self.is_reusable = not any(isinstance(x, _jax.Tracer) for x in staged.operands)
        self._init_compiled(owner, staged, arrays, jax.tree.structure(call.operand), tried)
        operands = self.operands_of(call)
        self._names = names = input_names(owner, call, self._inputs(), operands, paths)
        self.state_names = frozenset(names[: len(names) - len(self.avals)])
        _jax.name_inputs(self.compiled, operands, names)
        self._init_writers()

        self._created_effects = [e for e in outcome.effects if e.created]
        self.created.finish(self._inputs(), outcome.effects)
        is_simple = self._writers is not None and not (self._shardings.is_open or self._shardings.is_partial)
        self.is_direct = is_simple and not (self.guards or self.donated or outcome.out.static or self.created)

    def _init_compiled(
        self, owner: Any, staged: Body, arrays: list[Any], operand_tree: Any, tried: Sequence[StagedProgram]
    ) -> None:
        inputs = self._inputs()
        base = staged.num_operands + len(self.avals)
        invars = staged.jaxpr.invars[:base] + [staged.jaxpr.invars[base + v] for i in inputs for v in i.variables]
        jaxpr = _jax.rebuild(staged.jaxpr, invars=invars, outvars=staged.jaxpr.outvars)
        operands, num_out = staged.operands, self.outcome.num_out
        avals = [*self.avals, *(aval for i in inputs for aval in i.avals)]
        treedefs = [None if i in self.guards else i.partition.treedef for i in inputs]

        out_part = self.outcome.out
        self._is_on_mesh: bool | None = None  # set when JAX first traces `inner`

        # JAX calls `inner` again for other types or settings, for which the staged equations may be wrong: raise
        # `Restage`.
        def inner(kept: list, donated: list, operand: PyTree, donated_args: list) -> tuple[PyTree, list]:
            values = [*kept, *donated]
            if jax.tree.structure(operand) != operand_tree:
                raise Restage
            leaves = [*jax.tree.leaves(operand), *donated_args, *jax.tree.leaves(values)]
            for value, treedef in zip(values, treedefs, strict=True):
                if treedef is not None and jax.tree.structure(value) != treedef:
                    raise Restage
            if self.settings != _jax.trace_context() or not _same_types(leaves, avals) or self._is_mesh_changed(leaves):
                raise Restage
            self._is_on_mesh = is_on_mesh(map(_jax.abstract, leaves))
            if _jax.is_eager():  # JAX looks for the operation that computed a NaN
                outs = _jax.evaluate_checked(inline(jaxpr, calls=INLINED), (*operands, *leaves))
            else:
                outs = _jax.evaluate(jaxpr, (), (*operands, *leaves))
            return (outs[:num_out] if out_part.static else out_part.combine(outs[:num_out])), outs[num_out:]

        # JAX shows this name in profiles, logs and the compiled module.
        inner.__name__ = inner.__qualname__ = name_of(owner.__wrapped__)
        out_avals = [v.aval for v in jaxpr.outvars[num_out:]]
        self._shardings = StateShardings(arrays, inputs, self.outcome, out_avals, names_mesh(jaxpr))
        output_shardings = self._shardings.out_shardings
        shardings = {} if output_shardings is None else {"out_shardings": (None, output_shardings)}

        # Programs of a function that creates states differ in these states only. They share what JAX compiles.
        self._body = Body(jaxpr, operands)
        self._signature = (
            operand_tree,
            treedefs,
            out_part.treedef,
            bool(out_part.static),
            sum(len(g.states) for g in self.kept),
            self.settings,
        )
        self._is_unshareable = bool(self.guards or output_shardings is not None)
        equal_program = next((p for p in tried if p.created and self.can_share_compiled(p)), None)
        if equal_program is not None:
            self.compiled = equal_program.compiled
        else:
            self.compiled = jax.jit(inner, donate_argnums=(1, 3), **shardings, **owner.jax_options)
        for i in inputs:
            i.values = []  # else the program would keep the staged values alive

    def can_share_compiled(self, other: StagedProgram) -> bool:
        """Whether the other program's compiled function is also correct for this one."""
        if self._is_unshareable or other._is_unshareable or self._signature != other._signature:
            return False
        body, other_body = self._body, other._body
        return [*map(id, body.operands)] == [*map(id, other_body.operands)] and body.key == other_body.key

    def _init_writers(self) -> None:
        """Group the written states by kind. `_writers` is None if a value is not a single array."""
        self._writers: list[tuple[Any, list, list[int]]] | None = None
        if all(p.num_dynamic == 1 and jax.tree_util.treedef_is_leaf(p.treedef) for p in self.outcome.values):
            groups: dict[int, tuple[Any, list, list[int]]] = {}
            for n, e in enumerate(self.outcome.effects):
                kind, states, indices = groups.setdefault(id(e.kind), (e.kind, [], []))
                states.append(e.state)
                indices.append(n)
            self._writers = list(groups.values())
        # The common case: all written states are of one kind, in the order of the values.
        self._writer = self._writers[0] if self._writers is not None and len(self._writers) == 1 else None

        # Written states that are also inputs, with the index of the input.
        input_indices = {id(i.state): n for n, i in enumerate(self._inputs()) if i.kind.is_watched}
        self._updated = [(e, input_indices[id(e.state)]) for e in self.outcome.effects if id(e.state) in input_indices]
        for effect in self.outcome.effects:
            effect.value_before = _frames.UNKNOWN  # else the program would keep the staged values alive

    def _inputs(self) -> list[Input]:
        """The inputs in the order of the compiled function's operands."""
        return [i for g in (*self.kept, *self.donated) for i in g.inputs]

    # -- running --

    def run(self, call: Call) -> Any:
        """Run for a call. If the program does not accept its types, raise `Restage` before any side effect."""
        if not _frames.is_idle():
            return self._run_watched(call)
        attribute_stores = self._attribute_stores()
        kept_values = self._retry_when_released(_values_of, self.kept)
        donated = self._retry_when_released(_values_of, self.donated)
        if self._shardings:
            self._check_shardings([*kept_values, *donated], call)

        kept = self._open_guards(kept_values)
        if donated:
            kept, donated = copy_aliased_donations(kept, donated, call)
            operands = (kept, donated, call.operand, call.donated)
            out = self._run_donating(operands, lambda writes: self._store(writes, [], attribute_stores))
        else:
            out, writes = self._call(kept, donated, call.operand, call.donated)
            self._store(writes, kept_values, attribute_stores)
        return self.outcome.out.combine(out) if self.outcome.out.static else out

    def _call(self, *operands: Any) -> Any:
        try:
            return self.compiled(*operands)
        except ValueError as e:
            name_operands(e, self._names, operands)
            raise

    def out_info(self) -> Any:
        """The output with a ``jax.ShapeDtypeStruct`` for each array."""
        avals: list[Any] = [v.aval for v in self._body.jaxpr.outvars[: self.outcome.num_out]]
        shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type) for a in avals]
        return self.outcome.out.combine(shapes)

    def _attribute_stores(self) -> list[Store]:
        """`CreatedStates.attribute_stores`, or `Restage` if the program cannot run this call."""
        attribute_stores = self.created.stores() if self.created else []
        if attribute_stores is None:
            raise Restage
        return attribute_stores

    def run_directly(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        """`run` without open frames and with arrays only; JAX's dispatch checks the types."""
        groups = self.kept
        try:
            kept = groups[0].kind.get_all(groups[0].states) if len(groups) == 1 else _values_of(groups)
        except ForeignStateError:
            kept = self._retry_when_released(_values_of, groups)
        if self._shardings and not self._shardings.accept(kept):
            raise Restage
        out, writes = self._call(kept, [], (args, kwargs), [])
        if writes:
            # Values are compared only if the process has several threads (decision 18).
            if self._writer is None or threading.active_count() > 1:
                self._store(writes, kept)
            else:
                self._writer[0].set_all(self._writer[1], writes)
        return out

    def _run_donating(self, operands: tuple, store: Callable[[list], None]) -> Any:
        """Run a program that donates the arrays of some states: once it has run, its results must be stored.

        After an interrupt `store` is called again.
        """
        results: list[tuple[Any, list]] = []
        try:
            # One call of C code, so that no interrupt can separate the program from its results (decision 18).
            commit([(results.extend, map(self.compiled, *([x] for x in operands)))])
            store(results[0][1])
        except BaseException as e:
            try:
                if results:
                    store(results[0][1])
            finally:
                self._invalidate_donated(operands[1], e)
            raise
        return results[0][0]

    def _invalidate_donated(self, donated: list, error: BaseException) -> None:
        """Invalidate the states whose arrays a failed call has consumed, and name them in the exception."""
        inputs = [i for g in self.donated for i in g.inputs]
        invalid_inputs = [
            i for i, x in zip(inputs, donated, strict=True) if i.kind.get(i.state) is x and _is_deleted(x)
        ]
        if invalid_inputs:
            reason = f"its array was donated to {self.name}, which failed"
            commit([i.kind.store(i.state, Invalidated(reason)) for i in invalid_inputs])
            names = ", ".join(_states.describe(i.state, i.kind, value=0) for i in invalid_inputs[:3])
            error.add_note(
                f"{self.name} had consumed the arrays of {len(invalid_inputs)} donated states, which have no value "
                f"now: "
                f"{names}{', ...' * (len(invalid_inputs) > 3)}.\n"
                f"Fix: write them again or restore a checkpoint; without "
                f"donate_states= a call that fails leaves the old values."
            )

    def _store(self, writes: list, values: list, attribute_stores: Sequence[Store] = ()) -> None:
        """Store the values that a call returned; `values` are its inputs' values, to detect writes by other threads."""
        if self._shardings.is_open:
            self._shardings.learn(writes)
        if self._writers is None:
            self._publish(writes, values, attribute_stores, live=False)
        else:
            self._retry_when_released(
                functools.partial(locked, _frames.ownership, self._set_all, writes, attribute_stores), values
            )

    def _publish(self, writes: list, values: list, attribute_stores: Sequence[Store] = (), *, live: bool) -> None:
        if self._shardings.is_open:
            self._shardings.learn(writes)

        def publish(values: list) -> None:
            if values:
                for effect, index in self._updated:
                    effect.value_before = values[index]
            self.outcome.publish(writes, live=live, also=attribute_stores)

        self._retry_when_released(publish, values)

    def _set_all(self, writes: list, attribute_stores: Sequence[Store], values: list) -> None:
        writers = self._writers or ()
        for kind, states, _ in writers:
            kind.check_free(states)  # checks come before the stores: all or none (decision 18)
        if values and threading.active_count() > 1:
            for effect, index in self._updated:
                if effect.kind.get(effect.state) is not values[index]:
                    raise _frames.changed_state_error(effect.state, effect.kind)
        stores = [kind.store_all(states, [writes[n] for n in indices]) for kind, states, indices in writers]
        commit([*stores, *attribute_stores])

    def _retry_when_released(self, touch: Callable[[Any], Any], x: Any) -> Any:
        """Touch states; if another thread owns one, retry once after the current staging of this function."""
        try:
            return touch(x)
        except ForeignStateError:  # a thread that stages this function owns the states that it has touched
            if not _frames.is_idle():
                raise
            return locked(self._staging, touch, x)

    def _run_watched(self, call: Call, *, live: bool = False) -> Any:
        attribute_stores = [] if live else self._attribute_stores()
        if self.is_stale():
            raise Restage
        for watch in self._rules:
            watch.enter()
        for effect in self._created_effects:
            effect.created = live  # in later calls the state exists already
        operands = self.operands_of(call)
        if self._shardings and not live:
            self._check_shardings([*operands[0], *operands[1]], call)
        if operands[1]:
            out = self._run_donating(operands, lambda writes: self._publish(writes, [], attribute_stores, live=live))
        else:
            out, writes = self._call(*operands)
            self._publish(writes, [] if self.guards else operands[0], attribute_stores, live=live)
        self.created.report()
        return self.outcome.out.combine(out) if self.outcome.out.static else out

    def first_run(self, call: Call) -> Any:
        """Run for the staged call, whose frames have already seen the body touch its states."""
        out = self._run_watched(call, live=True)
        self.settle()
        return out

    def settle(self) -> None:
        """Let later calls read the states that have replaced others in the staged call."""
        if self.created.states:
            for group in (*self.kept, *self.donated):
                for i in group.inputs:
                    i.state = self.created.successor(i.state)
                group.states = [i.state for i in group.inputs]
            self._init_writers()
        self.created.settle(self._inputs())

    def operands_of(self, call: Call) -> tuple[list, list, PyTree, list]:
        """The compiled function's operands. States are read as by a user, so that open frames see it."""
        kept = self._open_guards([self._retry_when_released(i.kind.read, i.state) for g in self.kept for i in g.inputs])
        donated = [self._retry_when_released(i.kind.read, i.state) for g in self.donated for i in g.inputs]
        if donated:
            kept, donated = copy_aliased_donations(kept, donated, call)
        return kept, donated, call.operand, call.donated

    def is_for(self, call: Call) -> bool:
        """Whether argument types and settings are the staged ones."""
        return self.settings == _jax.trace_context() and _same_types([*call.kept, *call.donated], self.avals)

    def is_stale(self) -> bool:
        """Whether a derivative rule in it has read states that hold other values now. JAX runs a rule of the program
        once.
        """
        return bool(self._rules) and not (_frames.is_idle() or are_current(self._rules))

    def accepts(self, call: Call) -> bool:
        """Whether argument types, settings, and the states' types and shardings are the staged ones."""
        if not self.is_for(call) or self.is_stale():
            return False
        if self.created and self.created.stores() is None:
            return False
        values = [self._retry_when_released(i.kind.read, i.state) for i in self._inputs()]
        if self._shardings and not self._accepts_shardings(values, call):
            return False
        if self._is_mesh_changed([*call.kept, *call.donated, *jax.tree.leaves(values)]):
            return False
        for i, value in zip(self._inputs(), values, strict=True):
            leaves, part = partition(value, is_array_or_number)
            if part.treedef != i.partition.treedef or part.mask != i.partition.mask or not _same_types(leaves, i.avals):
                return False
            if freeze(part.static) != freeze(i.partition.static):
                return False
        return True

    def _open_guards(self, kept: list) -> list:
        if not self.guards:
            return kept
        inputs = [i for g in self.kept for i in g.inputs]
        return [
            partition(v, is_array_or_number)[0] if i.partition.static else v for i, v in zip(inputs, kept, strict=True)
        ]

    # -- shardings --

    def _is_mesh_changed(self, leaves: Sequence[Any]) -> bool:
        """Whether some of these arrays are on a mesh and none was when the program was staged, or the reverse."""
        if self._is_on_mesh is None or self._shardings.has_inner_mesh:
            return False
        return self._is_on_mesh != is_on_mesh([_jax.abstract(x) for x in leaves if is_array_or_number(x)])

    def _accepts_shardings(self, values: Sequence[Any], call: Call) -> bool:
        """Whether the written states have the shardings that the program returns; `values` are the inputs' values."""
        if self._shardings.is_partial and not has_tracer([*call.kept, *call.donated, *values]):
            return False
        return self._shardings.accept(values)

    def _check_shardings(self, values: Sequence[Any], call: Call) -> None:
        if not self._accepts_shardings(values, call):
            raise Restage


def _values_of(groups: list[_KindGroup]) -> list:
    if len(groups) == 1:
        return groups[0].kind.get_all(groups[0].states)
    return [v for group in groups for v in group.kind.get_all(group.states)]


def _group(inputs: list[Input]) -> list[_KindGroup]:
    kinds = {id(i.kind): i.kind for i in inputs}
    return [_KindGroup(kind, [i for i in inputs if i.kind is kind]) for kind in kinds.values()]


def _keep_type(effect: _frames.Effect, state_input: Input | None) -> None:
    """Give a written value the weak types of the value that was read: the next call then finds this program."""
    if state_input is None:
        return
    leaves, part = partition(effect.value, is_array_or_number)
    if part.treedef != state_input.partition.treedef or part.mask != state_input.partition.mask:
        return
    for n, (leaf, aval) in enumerate(zip(leaves, state_input.avals, strict=True)):
        new_aval = _jax.abstract(leaf)
        if new_aval.weak_type != aval.weak_type and (new_aval.shape, new_aval.dtype) == (aval.shape, aval.dtype):
            leaves[n] = _jax.with_weak_type(leaf, aval.weak_type)
    effect.value = part.combine(leaves)


def _same_types(leaves: Sequence[Any], avals: Sequence[Any]) -> bool:
    if len(leaves) != len(avals):
        return False
    for leaf, b in zip(leaves, avals, strict=True):
        a = _jax.abstract(leaf)
        if a.shape != b.shape or a.dtype != b.dtype or a.weak_type != b.weak_type:
            return False
        if a.sharding.spec != b.sharding.spec:  # explicit axes only: types do not contain the sharding over others
            return False
    return True


def _is_deleted(value: PyTree) -> bool:
    return any(isinstance(x, _jax.ArrayImpl) and x.is_deleted() for x in jax.tree.leaves(value))
