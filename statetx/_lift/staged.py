"""Stateful functions as bodies of loops, or as branches.

`Staged` traces a function once, to equations with an input for each state that is read and an output for each state
that is written. Loops and branches differ only in how they arrange these: `Staged.arrange` makes a body with inputs and
outputs in any order, which may include states that this function does not touch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from .. import _jax
from .._equations.structure import Body
from .._errors import StateValueError
from .._frames import Effect, refuse_created
from .._states import kind_of
from .._tree import ARRAY, Partition, is_array_or_number, is_key, is_model, is_opaque, partition
from .late_rules import guarded
from .outcome import partition_output, publish_leaves
from .rules import Broadcast, Carry, Rules, Split
from .run import frame_for
from .stage import Input, InputNames, Lifting, stage
from .wrapper import name_of


def is_loop_leaf(x: Any) -> bool:
    """Whether a leaf becomes an array in a loop or branch: arrays and Python numbers, including bools."""
    return is_array_or_number(x) or isinstance(x, bool)


class Staged:
    """A function traced once, for arguments of certain types.

    Args:
        name: the transform, for messages.
        fun: the user's function.
        avals: types of the argument leaves.
        arguments: maps the argument leaves to the arguments of `fun`.
        call: called with the argument leaves; returns a tuple of trees, each an output. By default one, of `fun`.
        traced_for: JAX's label for such a body (`DebugInfo.traced_for`).
        slice, enter: see `Lifting`.
        may_create: whether the function may create states that outlive it. They are among the written ones.

    Attributes:
        outs: the `Partition` of each output tree.
        out_vars, out_avals: the variables and types of the output leaves, in order.
        inputs: the states that are inputs, by id: every state that is read or written, in the order of first touch.
        effects, values: the writes of the function, and the `Partition` of each value.
        written, written_vars, written_avals: by id of a written state, the `Partition` of its value, and the variables
            and types of the leaves.
    """

    def __init__(
        self,
        name: str,
        fun: Callable,
        avals: Sequence[Any],
        *,
        arguments: Callable[[Sequence[Any]], tuple[tuple, dict[str, Any]]],
        call: Callable[..., tuple] | None = None,
        traced_for: str = "",
        slice: Callable[[Any, Any], Any] | None = None,
        enter: Callable[[Any, Any], Any] | None = None,
        may_create: bool = False,
    ):
        self.name = name
        self.fun = fun
        self.avals = list(avals)
        lifting = Lifting(is_array_or_number, slice, enter)
        self.outs: list[Partition] = []
        self.values: list[Partition] = []

        def call_fun(*leaves: Any) -> tuple[Any]:
            args, kwargs = arguments(leaves)
            return (fun(*args, **kwargs),)

        def body(*tracers: Any) -> tuple[list, Any]:
            frame = frame_for(name, fun, on_read=lifting.on_read, frees_cycles=True)

            def read_written() -> None:
                # Loops and branches need the entry value of every written state, even if it is never read.
                for access in frame.accesses.values():
                    if access.written and id(access.state) not in lifting.inputs:
                        lifting.on_read(access.state, access.kind, access.value_before)

            def outputs() -> list[tuple[list, Partition]]:
                # States that JAX has as pytrees are arrays in a carry or an output, as in `jax.lax`; models are not, as
                # the caller may expect the same one back.
                is_leaf = is_opaque if may_create else is_model
                return [partition_output(x, is_loop_leaf, is_leaf=is_leaf) for x in (call or call_fun)(*tracers)]

            frame.at_end = read_written
            outs = frame.run(outputs)
            lifting.inputs = {key: lifting.inputs[key] for key in frame.accesses if key in lifting.inputs}
            if not may_create:
                refuse_created(frame.effects, frame.name)

            leaves: list[Any] = []
            for dynamic, part in outs:
                self._refuse_objects(part)
                self.outs.append(part)
                leaves += dynamic
            for effect in frame.effects:
                dynamic, part = partition(effect.value, is_loop_leaf)
                self.values.append(part)
                leaves += dynamic
                effect.value = None
            return leaves, frame.effects

        names, traced_for = InputNames(fun, arguments), traced_for or f"statetx.{name}"
        staged, effects, refs = stage(body, avals, traced_for=traced_for, names=names, lifting=lifting)
        self.effects: list[Effect] = [*effects, *refs]
        touched = [(i.state, i.kind) for i in lifting.inputs.values()]
        self._body = guarded(f"{name}({name_of(fun)})", staged, touched)
        self.values += [ARRAY] * len(refs)
        self.inputs: dict[int, Input] = lifting.inputs
        self._num_added = lifting.num_variables
        self._read_outputs()

    def _read_outputs(self) -> None:
        """The variables of the body's outputs: the leaves of `outs`, then of `values`."""
        outvars = self._body.jaxpr.outvars
        self.num_out = sum(part.num_dynamic for part in self.outs)
        self.out_vars = outvars[: self.num_out]
        self.out_avals: list[Any] = [v.aval for v in self.out_vars]
        self.written = {id(e.state): part for e, part in zip(self.effects, self.values, strict=True)}
        self.written_vars: dict[int, list[Any]] = {}
        position = self.num_out
        for effect, part in zip(self.effects, self.values, strict=True):
            self.written_vars[id(effect.state)] = outvars[position : position + part.num_dynamic]
            position += part.num_dynamic
        self.written_avals = {key: [v.aval for v in variables] for key, variables in self.written_vars.items()}

    def _refuse_objects(self, part: Partition) -> None:
        if part.static:
            x = part.static[0]
            fix = "return its .value" if kind_of(x) else f"return arrays; keep other objects outside the {self.name}"
            raise StateValueError(
                f"{self.name}: an output of {name_of(self.fun)} is a {type(x).__name__}, which is not an array.\n"
                f"Fix: {fix}."
            )

    def publish(self, leaves: Mapping[int, Sequence[Any]], refs: Sequence[Effect] = (), *, runs: int = 1) -> None:
        """Store the written values, in the order of the writes.

        Args:
            leaves: by id of the state, of each written state and of `refs`.
            refs: effects of one array each, beside the function's.
            runs: how often the function has run.
        """
        effects = [*self.effects, *refs]
        for effect in effects:
            effect.num_writes *= runs
        publish_leaves(effects, [*self.values, *[ARRAY] * len(refs)], [x for e in effects for x in leaves[id(e.state)]])

    # -- parts of the body --

    @property
    def operands(self) -> list[Any]:
        """Values that the function closed over."""
        return self._body.operands

    @property
    def operand_vars(self) -> list[Any]:
        return self._body.jaxpr.invars[: self._body.num_operands]

    @property
    def arg_vars(self) -> list[Any]:
        start = self._body.num_operands
        return self._body.jaxpr.invars[start : start + len(self.avals)]

    def state_vars(self, read: Input) -> list[Any]:
        """The variables that hold a state on entry; new variables if this function does not read it."""
        state_input = self.inputs.get(id(read.state))
        if state_input is None:
            return [_jax.Var(aval) for aval in read.avals]
        added = self._body.jaxpr.invars[len(self._body.jaxpr.invars) - self._num_added :]
        return [added[v] for v in state_input.variables]

    def arrange(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> Body:
        """The body with these inputs, which include its operands, and these outputs: variables, and states, which hold
        their value on entry or at the end.
        """
        before = {id(i.state): self.state_vars(i) for i in inputs if isinstance(i, Input)}
        after = before | self.written_vars
        invars, outvars = (
            [v for x in items for v in (values[id(x.state)] if isinstance(x, Input) else [x])]
            for items, values in ((inputs, before), (outputs, after))
        )
        return Body(_jax.rebuild(self._body.jaxpr, invars=invars, outvars=outvars), [])

    def close(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> Any:
        """`arrange` as a closed jaxpr; values that the function closed over are its constants."""
        return _jax.close(self.arrange([*self.operand_vars, *inputs], outputs).jaxpr, self.operands)


class SortedStates(NamedTuple):
    """The states that the body of a loop touches, by how they take part in the loop.

    Attributes:
        shared: the same in every step.
        carried: passed from step to step.
        split: keys, split so that each step gets its own.
        mapped: sliced by step, with the axis.
        others: written states whose old value every step reads, with their rules.
    """

    shared: list[Input]
    carried: list[Input]
    split: list[Input]
    mapped: list[tuple[Input, int]]
    others: list[tuple[Input, Any]]


def sort_states(staged: Staged, rules: Rules, fix: str) -> SortedStates:
    """Sort the states of the body of a loop by their rules.

    Args:
        fix: the declaration to use instead, for the error about a `Broadcast` state that the body writes.

    Raises:
        StateAccessError: the body wrote a `Broadcast` state that is not random.
    """
    states = SortedStates([], [], [], [], [])
    effects = {id(e.state): e for e in staged.effects}
    for read in staged.inputs.values():
        rule, effect = rules(read.state), effects.get(id(read.state))
        if isinstance(rule, int):
            states.mapped.append((read, rule))
        elif rule is Split:
            states.split.append(read)
        elif effect is None and rule is not Carry:
            states.shared.append(read)
        elif rule is None or rule is Carry:
            states.carried.append(read)
        elif effect is not None and rule is Broadcast and not read.kind.is_random(read.state):
            raise rules.error_of_write(effect, fix)
        else:
            states.others.append((read, rule))
    return states


def as_types(values: Sequence[Any], avals: Sequence[Any]) -> list[Any]:
    """Make each value as weakly or strongly typed as its `aval`."""
    return [
        x if _jax.is_weak(_jax.abstract(x)) == _jax.is_weak(aval) else _jax.with_weak_type(x, aval.weak_type)
        for x, aval in zip(values, avals, strict=True)
    ]


def union(dicts: Sequence[dict[int, Any]]) -> list[Any]:
    """The values of several dicts, each key once, in order of first occurrence."""
    merged: dict[int, Any] = {}
    for values in dicts:
        for key, value in values.items():
            merged.setdefault(key, value)
    return list(merged.values())


# -- loops that recompute steps, under JAX's checker of key reuse ------------------------------------------------------
#
# ``jax_debug_key_reuse`` counts the uses of a key in the equations. It cannot know that a recomputed step draws the
# same numbers on purpose. While it is on, such a loop gets its keys as key data, which are not counted.


def needs_key_data(*bodies: Body) -> bool:
    """Whether the checker is on and one of the bodies has a key among its inputs or outputs."""
    avals = (v.aval for body in bodies for v in (*body.jaxpr.invars, *body.jaxpr.outvars))
    return _jax.checks_keys() and any(map(is_key, avals))


def body_with_key_data(body: Body) -> Body:
    """The body with key data in place of keys, as inputs, outputs and operands."""
    invars, outvars = body.jaxpr.invars, body.jaxpr.outvars

    def run(*args: Any) -> list[Any]:
        return to_key_data(_jax.evaluate(body.jaxpr, (), to_keys(args, [v.aval for v in invars])))

    avals = [_jax.abstract(jax.eval_shape(_key_data, v.aval)) if is_key(v.aval) else v.aval for v in invars]
    jaxpr, consts = _jax.stage(run, avals, traced_for="scan", name="step")
    assert not consts and len(jaxpr.outvars) == len(outvars)
    return Body(jaxpr, to_key_data(body.operands))


def loop_with_key_data(loop: Callable, body: Body) -> Callable:
    """Wrap a loop of `body_with_key_data(body)` so that it takes and returns keys.

    The loop returns the outputs of the body, as one list or split into several.
    """
    out_avals = [v.aval for v in body.jaxpr.outvars]

    def run(*args: list) -> Any:
        leaves, treedef = jax.tree.flatten(loop(*map(to_key_data, args)))
        return treedef.unflatten(to_keys(leaves, out_avals))

    return run


def to_key_data(values: Sequence[Any]) -> list[Any]:
    return [_key_data(x) if is_key(_jax.abstract(x)) else x for x in values]


def to_keys(values: Sequence[Any], avals: Sequence[Any]) -> list[Any]:
    """Turn key data back into keys wherever `avals`, types of the values or of their elements, are key types."""
    return [
        jax.random.wrap_key_data(x, impl=_impl(aval)) if is_key(aval) else x
        for x, aval in zip(values, avals, strict=True)
    ]


def _key_data(key: Any) -> Any:
    return jax.random.key_data(key)


def _impl(aval: Any) -> Any:
    impls: list[Any] = []  # `key_impl` needs a key: a tracer is one
    jax.eval_shape(lambda key: impls.append(jax.random.key_impl(key)), jax.ShapeDtypeStruct(aval.shape, aval.dtype))
    return impls[0]
