"""`StagedProgram`: the result of staging a jitted function, which runs every call with the same types.

A program takes the values of its states (`ProgramStates`), calls one `jax.jit`-ed function, and stores the returned
values. The arguments come as a `Call`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import jax

from ... import _frames, _jax, _states
from ..._atomic import Store, commit
from ..._equations.inline import inline
from ..._equations.primitives import INLINED
from ..._equations.structure import Body
from ..._lift.carry import leaf_names
from ..._lift.context import note_shardings
from ..._lift.late_rules import guarded
from ..._lift.order import OutputOrder
from ..._lift.outcome import Outcome, pack_effects
from ..._lift.run import frame_for
from ..._lift.stage import Input, InputNames, Lifting, stage
from ..._lift.wrapper import name_of, place_of
from ..._objects.paths import Paths, check_paths
from ..._text import brief, counted
from ..._tree import Partition, has_deleted, is_array_or_number, is_state_tree, partition
from ..._typing import PyTree
from ...kinds.native import Invalidated
from .acceptance import Acceptance, StateShardings, is_on_mesh, names_mesh
from .arguments import Call, Reread
from .created import CreatedStates
from .gradients import GradientRelease
from .new_states import NewStates
from .program_states import ProgramStates


class Restage(Exception):
    """A call has other types or settings than the program was staged for."""


class StagedProgram:
    """The result of staging a function for one call.

    The compiled function takes the values of kept states, the values of donated states, a call's `operand` and its
    donated leaves. It returns the output (or its array leaves, if it has others) and the leaves of the written states
    in an `OutputOrder`.

    Args:
        tried: programs with the same key that do not accept this call. If the equations of one are equal, its compiled
            function is shared.

    Attributes:
        is_reusable: whether other calls may run it: not if the staging closed over a tracer of another trace.
        is_direct: whether all inputs and outputs are arrays, and none is donated.
        states: that it reads and writes.
        created: the states that the call creates and that outlive it.
        compiled: the `jax.jit`-ed function.
        gradients: the release of the gradients of scanned layers.
    """

    def __init__(self, owner: Any, call: Call, tried: Sequence[StagedProgram]):
        fun = owner.__wrapped__
        self.name = f"jit({name_of(fun)})"
        lifting = Lifting(is_array_or_number)
        arrays = call.arrays
        is_second = any(p.created.is_awaiting() and p.is_for(call) for p in tried)
        self.created = CreatedStates(fun, call.args, call.kwargs, is_second=is_second)

        def body(*tracers: Any) -> tuple[list, Any]:
            frame = frame_for("jit", fun, on_read=lifting.on_read, frees_cycles=True, is_kept=True)
            note_shardings(tracers, arrays)

            def output() -> tuple[list, Partition, list[_frames.Effect], frozenset[int]]:
                dynamic = call.dynamic_with(tracers)
                new_states = NewStates(call, dynamic, tracers[len(call.kept) :])
                out = self.created.run(frame, fun, *call.with_dynamic(*dynamic))
                of_arguments = new_states.effects(out, place_of(fun))
                return *self.created.flatten_output(out, _leaves_program), of_arguments, new_states.ids

            leaves, out_part, of_arguments, new_ids = frame.run(output)
            # The state in the arguments, or the new one in its place, is where more than the arguments hold it.
            is_reached = not frame.accesses.keys().isdisjoint(map(id, call.opened_states()))
            is_reached = is_reached or any(e.created and id(e.state) in new_ids for e in frame.effects)
            # As states they keep their sharding, and `donate_states` has them.
            is_state = of_arguments and (owner.donate_states or is_on_mesh(map(_jax.abstract, arrays)))
            if is_reached or is_state:
                raise call.needs_identity()
            for effect in of_arguments:
                old_leaves, part = partition(effect.kind.get(effect.state), is_array_or_number)
                _keep_type(effect, part, [_jax.abstract(x) for x in old_leaves])
            for effect in frame.effects:
                if (read := lifting.inputs.get(id(effect.state))) is not None:
                    _keep_type(effect, read.partition, read.avals)
            effects = [*of_arguments, *frame.effects]
            return pack_effects(leaves, out_part, effects, _leaves_program)

        self._acceptance = Acceptance(arrays)
        names = InputNames(fun, call.with_arrays)
        try:
            staged, outcome, refs = stage(body, self._acceptance.avals, traced_for="jit", names=names, lifting=lifting)
        except Reread:  # Python runs again, and is to find no states that have no value
            self.created.undo()
            raise
        outcome = outcome.add(refs)
        self._out = outcome.out
        staged = guarded(self.name, staged, [(i.state, i.kind) for i in lifting.inputs.values()])

        opened = {id(state): n for n, state in enumerate(call.opened_states())}
        self._opened = [(n, opened[id(e.state)]) for n, e in enumerate(outcome.effects) if id(e.state) in opened]
        touched = [x.state for x in (*lifting.inputs.values(), *outcome.effects)]
        # Those that the function has in another way: in the arguments, too, they would be two, of which one is written.
        may_differ = bool(opened and outcome.effects)
        self._not_opened = {id(x) for x in touched if may_differ and is_state_tree(x)} - opened.keys()

        written = {id(e.state) for e in outcome.effects}
        paths = Paths(fun, call.args, call.kwargs)
        kept, donated = [], []
        for i in lifting.inputs.values():
            # A state whose value no equation uses is still an input: the body may have looked at its type.
            is_donated = id(i.state) in written and not i.partition.static and owner.donates(paths(i.state), i.state)
            (donated if is_donated else kept).append(i)
        option = f"{self.name}: donate_states={brief(owner.donate_states)}"
        reached = lambda: dict.fromkeys([*paths.items(), *map(paths, touched)])
        check_paths(option, owner.donate_states, reached, "The function reaches")
        kept, donated = (sorted(x, key=lambda i: _states.kinds().index(i.kind)) for x in (kept, donated))
        self._donated_paths = [paths(i.state) for i in donated]
        self._kept_paths = {id(i.state): paths(i.state) for i in kept}

        self._calls_host = _jax.calls_host(staged.jaxpr)
        self.is_reusable = not any(isinstance(x, _jax.Tracer) for x in staged.operands)
        inputs = [*kept, *donated]
        names = [paths(i.state) + name for i in inputs for name in leaf_names(i.partition, i.values)]
        self.state_names = frozenset(names)
        self._init_compiled(owner, call, staged, kept, donated, outcome, [*names, *call.names()], tried)
        # The program would keep the staged values alive, and the states of the staged call.
        for i in inputs:
            i.values = []
        for effect in outcome.effects:
            effect.value_before = _frames.UNKNOWN
        for n, _ in self._opened:  # each call has its own
            outcome.effects[n].state = None
        self.states = ProgramStates(kept, donated, outcome, owner.cache.staging)

        self.created.finish(inputs, outcome.effects)
        is_simple = self.states.writers is not None and not (self._shardings.is_open or self._shardings.is_partial)
        is_simple = is_simple and not (self._opened or self._not_opened)
        self.is_direct = is_simple and not (self.states.guards or donated or outcome.out.static or self.created)

    def _init_compiled(
        self,
        owner: Any,
        call: Call,
        staged: Body,
        kept: list[Input],
        donated: list[Input],
        outcome: Outcome,
        names: list[str],
        tried: Sequence[StagedProgram],
    ) -> None:
        inputs, arrays, operand_tree = [*kept, *donated], call.arrays, jax.tree.structure(call.operand)
        base = staged.num_operands + len(arrays)
        invars = staged.jaxpr.invars[:base] + [staged.jaxpr.invars[base + v] for i in inputs for v in i.variables]
        jaxpr = _jax.rebuild(staged.jaxpr, invars=invars, outvars=staged.jaxpr.outvars)
        operands, num_out = staged.operands, outcome.num_out
        avals = [*self._acceptance.avals, *(aval for i in inputs for aval in i.avals)]
        treedefs = [None if i.partition.static else i.partition.treedef for i in inputs]

        out_part = outcome.out
        acceptance = self._acceptance
        out_avals = [v.aval for v in jaxpr.outvars[num_out:]]
        pairs = zip(outcome.effects, outcome.values, strict=True)
        written = [(effect.state, part.num_dynamic) for effect, part in pairs]
        self._order = order = OutputOrder(written, out_avals, donated)
        num_donated = sum(len(i.avals) for i in donated)
        num_inputs = len(operands) + len(avals)
        first_arg = len(operands) + len(jax.tree.leaves(call.operand))
        overwritable = [*range(first_arg, base), *range(num_inputs - num_donated, num_inputs)]
        values = [*operands, *arrays, *(x for i in inputs for x in i.values)]
        num_states = len(names) - len(arrays)
        names_in_order = ["a constant"] * len(operands) + names[num_states:] + names[:num_states]
        named = [*zip(names_in_order, values, strict=True)]
        self.gradients = gradients = GradientRelease(self.name, jaxpr, named, overwritable, owner.release_gradients)

        # JAX calls `inner` again for other types or settings: the staged equations may be wrong then, so raise
        # `Restage`.
        def inner(kept: list, donated: list, operand: PyTree, donated_args: list) -> tuple[list, PyTree, list]:
            values = [*kept, *donated]
            if jax.tree.structure(operand) != operand_tree:
                raise Restage
            leaves = [*jax.tree.leaves(operand), *donated_args, *jax.tree.leaves(values)]
            for value, treedef in zip(values, treedefs, strict=True):
                if treedef is not None and jax.tree.structure(value) != treedef:
                    raise Restage
            if not acceptance.note_traced(leaves, avals):
                raise Restage
            attributes.pop("__fun_debug_info__", None)  # a call of another structure has other names
            if _jax.is_eager():  # JAX looks for the operation that computed a NaN
                outs = _jax.evaluate_checked(inline(jaxpr, calls=INLINED), (*operands, *leaves))
            else:
                outs = gradients.evaluate((*operands, *leaves))
            out = outs[:num_out] if out_part.static else out_part.combine(outs[:num_out])
            return order.arrange(out, outs[num_out:])

        attributes = vars(inner)  # `inner` itself would make a cycle, which keeps the operands until it is collected
        # JAX shows this name in profiles, logs and the compiled module.
        inner.__name__ = inner.__qualname__ = name_of(owner.__wrapped__)
        _jax.name_function(inner, "jit", place_of(owner.__wrapped__), names)
        self._shardings = StateShardings(arrays, inputs, outcome, out_avals, names_mesh(jaxpr))
        acceptance.inputs, acceptance.shardings = inputs, self._shardings
        output_shardings = self._shardings.out_shardings
        shardings = {} if output_shardings is None else {"out_shardings": order.arrange(None, output_shardings)}

        # Programs of a function that creates states differ in these states only. They share the compiled program.
        self._body = Body(jaxpr, operands)
        self._signature = (
            operand_tree,
            treedefs,
            out_part.treedef,
            bool(out_part.static),
            len(kept),
            order.updated,
            acceptance.settings,
        )
        self._is_unshareable = any(i.partition.static for i in inputs) or output_shardings is not None
        equal_program = next((p for p in tried if p.created and self.can_share_compiled(p)), None)
        if equal_program is not None:
            self.compiled = equal_program.compiled
        else:
            self.compiled = jax.jit(inner, donate_argnums=(1, 3), **shardings, **owner.jax_options)

    def can_share_compiled(self, other: StagedProgram) -> bool:
        """Whether the other program's compiled function is also correct for this one."""
        if self._is_unshareable or other._is_unshareable or self._signature != other._signature:
            return False
        body, other_body = self._body, other._body
        return [*map(id, body.operands)] == [*map(id, other_body.operands)] and body.key == other_body.key

    # -- running --

    def _for_states_of(self, call: Call) -> StagedProgram:
        """The program that writes the states in the arguments of a call, not those of the staged one.

        Raises:
            Reread: a state is there twice, or the function has it in another way, too.
        """
        opened = call.opened_states() if self._opened or self._not_opened else []
        ids = {*map(id, opened)}
        if len(ids) < len(opened) or not self._not_opened.isdisjoint(ids):
            raise call.needs_identity()
        if not self._opened:
            return self
        program = copy.copy(self)
        program.states = self.states.writing({n: opened[position] for n, position in self._opened})
        return program

    def run(self, call: Call) -> Any:
        """Run for a call. If the program does not accept its types, raise `Restage` before any side effect; `Reread` if
        needs to know the states in the arguments by their identity.
        """
        return self._for_states_of(call)._run(call)

    def _run(self, call: Call) -> Any:
        if not _frames.is_idle():
            return self._run_watched(call)
        attribute_stores = self._attribute_stores()
        kept, donated = self.states.kept_values(), self.states.donated_values()
        if self._shardings and not self._acceptance.keeps_shardings(call.arrays, [*kept, *donated]):
            raise Restage
        values = [] if donated else kept
        store = lambda writes: self.states.store(writes, values, attribute_stores)
        return self._execute(self._operands(kept, donated, call), store)

    def _operands(self, kept: list, donated: list, call: Call) -> tuple[list, list, PyTree, list]:
        """The compiled function's operands, from the values of the states."""
        kept = self.states.without_guarded(kept)
        arguments = _copy_aliased(call.donated, (kept, call.kept)) if call.donated else []
        if donated:
            donated = _copy_aliased(donated, (kept, call.kept, arguments))
        return kept, donated, call.operand, arguments

    def _execute(self, operands: tuple, publish: Callable[[list], None]) -> Any:
        def store(writes: list) -> None:
            if self._shardings.is_open:
                self._shardings.learn(writes)
            publish(writes)

        if operands[1]:
            out = self._run_donating(operands, store)
        else:
            out, writes = self._call(*operands)
            if self._calls_host:
                _jax.wait_for(writes)
            store(writes)
        return self._out.combine(out) if self._out.static else out

    def _call(self, *operands: Any) -> Any:
        try:
            return self._order.restore(*self.compiled(*operands))
        except (ValueError, RuntimeError) as e:
            if str(e).startswith("Received incompatible devices"):
                fix = "place each state and argument on the devices of the mesh"
                e.args = (f"{e}\nFix: {fix}, by jax.device_put(x, jax.NamedSharding(mesh, spec)).",)
            self._name_deleted(operands[0], e)
            raise

    def _name_deleted(self, kept: list, error: Exception) -> None:
        """Name a state in the exception whose array had been deleted before the call."""
        for i, value in zip(self.states.kept, kept, strict=True):
            if has_deleted(value):
                error.add_note(
                    f"{_states.describe(i.state, i.kind, self._kept_paths[id(i.state)])} holds an array that was "
                    "donated to another function.\nFix: write the state again, or give that function a copy."
                )
                return

    def output(self, outs: tuple[list, Any, list]) -> Any:
        """The function's output, of the results of `compiled` or what JAX says of each."""
        out, _ = self._order.restore(*outs)
        return self._out.combine(out) if self._out.static else out

    def _attribute_stores(self) -> list[Store]:
        """`CreatedStates.attribute_stores`, or `Restage` if the program cannot run this call."""
        attribute_stores = self.created.stores() if self.created else []
        if attribute_stores is None:
            raise Restage
        return attribute_stores

    def run_directly(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        """`run` without open frames and with arrays only; JAX's dispatch checks the types."""
        kept = self.states.kept_values()
        if self._shardings and not self._shardings.accept(kept):
            raise Restage
        out, writes = self._call(kept, [], (args, kwargs), [])
        if writes:
            if self._calls_host:
                _jax.wait_for(writes)
            self.states.store_directly(writes, kept)
        return out

    def _run_donating(self, operands: tuple, store: Callable[[list], None]) -> Any:
        """Run a program that donates the arrays of some states: once it has run, its results must be stored.

        After an interrupt `store` is called again.
        """
        results: list[tuple[list, Any, list]] = []
        try:
            # One call of C code, so that no interrupt can separate the program from its results (decision 18).
            commit([(results.extend, map(self.compiled, *([x] for x in operands)))])
            out, writes = self._order.restore(*results[0])
            if self._calls_host:
                _jax.wait_for(writes)
            store(writes)
        except BaseException as e:
            try:
                if results and not (self._calls_host and _jax.has_failed(results[0])):
                    store(self._order.restore(*results[0])[1])
            finally:
                self._invalidate_donated(operands[1], e)
            raise
        return out

    def _invalidate_donated(self, donated: list, error: BaseException) -> None:
        """Invalidate the states whose arrays a failed call has consumed, and name them in the exception."""
        inputs = zip(self.states.donated, self._donated_paths, donated, strict=True)
        invalid_inputs = [(i, path, x) for i, path, x in inputs if i.kind.get(i.state) is x and has_deleted(x)]
        if invalid_inputs:
            reason = f"its array was donated to {self.name}, which failed"
            commit([i.kind.store(i.state, Invalidated(reason)) for i, _, _ in invalid_inputs])
            names = ", ".join(_states.describe(i.state, i.kind, path, x) for i, path, x in invalid_inputs[:3])
            error.add_note(
                f"{self.name}, or a function before it, had consumed the arrays of "
                f"{counted(len(invalid_inputs), 'donated state')}, which "
                f"{'has' if len(invalid_inputs) == 1 else 'have'} no value now: "
                f"{names}{', ...' * (len(invalid_inputs) > 3)}.\n"
                f"Fix: write them again or restore a checkpoint; without donate_states= a call that fails leaves the "
                f"old values."
            )

    def _run_watched(self, call: Call, *, live: bool = False) -> Any:
        attribute_stores = [] if live else self._attribute_stores()
        operands = self.operands_of(call)
        if not (live or self._acceptance.keeps_shardings(call.arrays, [*operands[0], *operands[1]])):
            raise Restage
        values = [] if self.states.guards or operands[1] else operands[0]
        out = self._execute(operands, lambda writes: self.states.publish(writes, values, attribute_stores, live=live))
        self.created.report()
        return out

    def first_run(self, call: Call) -> Any:
        """Run for the staged call, whose frames have already seen the body touch its states."""
        out = self._for_states_of(call)._run_watched(call, live=True)
        self.settle()
        return out

    def settle(self) -> None:
        """Let later calls read the states that have replaced others in the staged call."""
        if self.created.states:
            self.states.replace_inputs(self.created.successor)
        self.created.settle(self.states.inputs())

    def operands_of(self, call: Call) -> tuple[list, list, PyTree, list]:
        """The compiled function's operands. States are read as by a user, so that open frames see it."""
        kept, donated = self.states.read()
        return self._operands(kept, donated, call)

    def is_for(self, call: Call) -> bool:
        """Whether argument types and settings are the staged ones."""
        return self._acceptance.is_for(call.arrays)

    def accepts(self, call: Call) -> bool:
        """Whether argument types, settings, and the states' types and shardings are the staged ones."""
        if not self.is_for(call):
            return False
        if self.created and self.created.stores() is None:
            return False
        values = [x for some in self.states.read() for x in some]
        return self._acceptance.accepts(call.arrays, values)


def _keep_type(effect: _frames.Effect, old_part: Partition, old_avals: Sequence[Any]) -> None:
    """Give a written value the weak types of the value that was read: the next call then finds this program."""
    leaves, part = partition(effect.value, is_array_or_number)
    if part.treedef != old_part.treedef or part.mask != old_part.mask:
        return
    for n, (leaf, aval) in enumerate(zip(leaves, old_avals, strict=True)):
        new_aval = _jax.abstract(leaf)
        is_other = _jax.is_weak(new_aval) != _jax.is_weak(aval)
        if is_other and (new_aval.shape, new_aval.dtype) == (aval.shape, aval.dtype):
            leaves[n] = _jax.with_weak_type(leaf, aval.weak_type)
    effect.value = part.combine(leaves)


def _copy_aliased(donated: list, operands: PyTree) -> list:
    """The arrays to be donated; copies of those that are also another operand: JAX must not donate an aliased array."""
    seen = {id(x) for x in jax.tree.leaves(operands)}

    def copy_if_aliased(x: Any) -> Any:
        if id(x) in seen and isinstance(x, jax.Array):
            return x.copy()
        seen.add(id(x))
        return x

    return jax.tree.map(copy_if_aliased, donated)


def _leaves_program(x: Any) -> bool:
    """Whether a leaf of the output or of a written value is an output of the program: a token is, too."""
    return is_array_or_number(x) or (isinstance(x, _jax.Tracer) and not _states.is_opaque(x))
