"""Stateful functions as bodies of loops and branches.

`Staged` runs a function once and gives its equations, in which each state read is an input and each state written an
output. Loops and branches differ only in how they arrange these: `Staged.arrange` makes a body with the inputs and
outputs in any order, with states among them that this function does not touch itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .. import _frames, _jax
from .._equations.structure import Body
from .._errors import StateValueError
from .._frames import Effect, refuse_created
from .._tree import Partition, is_array_or_number, partition
from .stage import Input, InputNames, Lifting, frame_for, name_of, partition_output, set_values, stage


def is_loop_leaf(x: Any) -> bool:
    """Whether a leaf is an array in a loop or branch: arrays and every Python number, bools included."""
    return is_array_or_number(x) or isinstance(x, bool)


class Staged:
    """One function, run once on arguments of given types.

    Args:
        name: the transform, for messages.
        fun: the user's function, for messages.
        call: called with the argument leaves; returns a tuple of trees, each an output of the function.
        arguments: from these leaves, what `fun` is called with, for messages.
        avals: types of the argument leaves.
        traced_for: JAX's label for such a body (`DebugInfo.traced_for`).
        slice, enter: see `Lifting`.

    Attributes:
        outs: for each output tree, its `Partition`; `out_avals` their leaves' types in order.
        inputs: the states that are inputs, by id: those read, and those written even if never read; in the order in
            which they are first touched.
        effects, values: what the function writes, and the `Partition` of each value.
        written, written_vars, written_avals: by id of a written state, its value's `Partition`, and of the leaves the
            variables and types.
    """

    def __init__(
        self,
        name: str,
        fun: Callable,
        call: Callable[..., tuple],
        avals: Sequence[Any],
        *,
        traced_for: str,
        arguments: Callable[[Sequence[Any]], tuple[tuple, dict[str, Any]]],
        slice: Callable[[Any, Any], Any] | None = None,
        enter: Callable[[Any, Any], Any] | None = None,
    ):
        self.name = name
        self.fun = fun
        self.avals = list(avals)
        lifting = Lifting(is_array_or_number, slice, enter)
        self.outs: list[Partition] = []
        self.values: list[Partition] = []

        def body(*tracers: Any) -> tuple[list, Any]:
            frame = frame_for(name, fun, on_read=lifting.on_read, frees_cycles=True)

            def run() -> tuple:
                outs = call(*tracers)
                for access in frame.accesses.values():
                    if access.written and id(access.state) not in lifting.inputs:
                        lifting.on_read(access.state, access.kind, access.value_before)
                return outs

            outs = frame.run(run)
            lifting.inputs = {key: lifting.inputs[key] for key in frame.accesses if key in lifting.inputs}
            refuse_created(frame.effects, frame.name)
            leaves: list[Any] = []
            for tree in outs:
                dynamic, part = partition_output(tree, is_loop_leaf)
                self._refuse_objects(part)
                self.outs.append(part)
                leaves += dynamic
            for effect in frame.effects:
                dynamic, part = partition(effect.value, is_loop_leaf)
                self.values.append(part)
                leaves += dynamic
                effect.value = None
            return leaves, frame.effects

        self._body, effects, refs = stage(
            body, avals, traced_for=traced_for, names=InputNames(fun, arguments), lifting=lifting
        )
        self.effects: list[Effect] = [*effects, *refs]
        self.values += [partition(0, is_loop_leaf)[1] for _ in refs]
        self.inputs: dict[int, Input] = lifting.inputs
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
        self._num_added = lifting.num_variables

    def _refuse_objects(self, part: Partition) -> None:
        if part.static:
            raise StateValueError(
                f"{self.name}: an output of {name_of(self.fun)} is a {type(part.static[0]).__name__}, which is no array.\n"
                f"Fix: return arrays; keep other objects outside the {self.name}."
            )

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
        """The variables that hold a state on entry; new ones if this function does not read it."""
        own = self.inputs.get(id(read.state))
        if own is None:
            return [_jax.Var(aval) for aval in read.avals]
        added = self._body.jaxpr.invars[len(self._body.jaxpr.invars) - self._num_added :]
        return [added[v] for v in own.variables]

    def arrange(self, invars: Sequence[Any], outvars: Sequence[Any]) -> Body:
        """The body with these inputs and outputs; its operands are counted among the inputs."""
        return Body(_jax.rebuild(self._body.jaxpr, invars=invars, outvars=outvars), [])

    def close(self, invars: Sequence[Any], outvars: Sequence[Any]) -> Any:
        """The equations as a closed jaxpr with these inputs and outputs; what the function closed over is constant."""
        return _jax.close(self.arrange([*self.operand_vars, *invars], outvars).jaxpr, self.operands)


def as_types(values: Sequence[Any], avals: Sequence[Any]) -> list[Any]:
    """Values with their weak types made those of `avals`."""
    return [
        x if _jax.abstract(x).weak_type == aval.weak_type else _jax.with_weak_type(x, aval.weak_type)
        for x, aval in zip(values, avals, strict=True)
    ]


def union(parts: Sequence[dict[int, Any]]) -> list[Any]:
    """The values of several dicts by id, each key once, in order."""
    merged: dict[int, Any] = {}
    for part in parts:
        for key, value in part.items():
            merged.setdefault(key, value)
    return list(merged.values())


def publish(effects: Sequence[Effect], parts: Sequence[Partition], leaves: Sequence[Any]) -> None:
    """Store values in the states that were written; `leaves` are those of all of them."""
    set_values(effects, parts, leaves)
    _frames.publish(effects, live=True)
