"""Stateful functions as bodies of loops and branches.

`Staged` runs a function once and gives its equations, in which each state read is an input and each state written an
output. Loops and branches differ only in how they arrange these: `Staged.arrange` makes a body with the inputs and
outputs in any order, with states among them that this function does not touch itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from . import _compat
from ._errors import CarryTypeError, StateValueError
from ._jaxpr import Body
from ._lift import Input, Lifting, frame_for, name_of, stage
from ._registry import Effect, refuse_created
from ._tree import Partition, is_array_or_number, partition, tree_type_str, type_str
from ._typing import PyTree


def is_loop_leaf(x: Any) -> bool:
    """Whether a leaf is an array in a loop or branch: arrays and every Python number, bools included."""
    return is_array_or_number(x) or isinstance(x, bool)


class Staged:
    """One function, run once on arguments of given types.

    Args:
        name: the transform, for messages.
        fun: the user's function, for messages.
        call: called with the argument leaves; returns a tuple of trees, each an output of the function.
        avals: types of the argument leaves.
        kind: what JAX calls such a body.
        slice: see `Lifting`.

    Attributes:
        outs: for each output tree, its `Partition`; `out_avals` their leaves' types in order.
        inputs: the states that are inputs, by id: those read, and those written even if never read; in the order in
            which they are first touched.
        effects, values: what the function writes, and the `Partition` of each value; `written_avals` by id of the state.
    """

    def __init__(
        self,
        name: str,
        fun: Callable,
        call: Callable[..., tuple],
        avals: Sequence[Any],
        *,
        kind: str,
        slice: Callable[[Any, Any], Any] | None = None,
    ):
        self.name = name
        self.fun = fun
        self.avals = list(avals)
        lifting = Lifting(is_array_or_number, slice)
        self.outs: list[Partition] = []
        self.values: list[Partition] = []

        def body(*tracers: Any) -> tuple[list, Any]:
            with frame_for(name, fun, on_read=lifting.on_read) as frame:
                outs = call(*tracers)
                for access in frame.accesses.values():
                    if access.written and id(access.state) not in lifting.inputs:
                        lifting.on_read(access.state, access.kind, access.before)
            lifting.inputs = {key: lifting.inputs[key] for key in frame.accesses if key in lifting.inputs}
            refuse_created(frame.effects, frame.name)
            leaves: list[Any] = []
            for tree in outs:
                dynamic, part = partition(tree, is_loop_leaf)
                self._refuse_objects(part)
                self.outs.append(part)
                leaves += dynamic
            for effect in frame.effects:
                dynamic, part = partition(effect.value, is_loop_leaf)
                self.values.append(part)
                leaves += dynamic
                effect.value = None
            return leaves, frame.effects

        self._body, effects, refs = stage(body, avals, kind=kind, name=name_of(fun), lifting=lifting)
        self.effects: list[Effect] = [*effects, *refs]
        self.values += [partition(0, is_loop_leaf)[1] for _ in refs]
        self.inputs: dict[int, Input] = lifting.inputs
        outvars = self._body.jaxpr.outvars
        self.num_out = sum(part.num_dynamic for part in self.outs)
        self.out_vars = outvars[: self.num_out]
        self.out_avals: list[Any] = [v.aval for v in self.out_vars]
        self.written_vars: dict[int, list[Any]] = {}
        position = self.num_out
        for effect, part in zip(self.effects, self.values, strict=True):
            self.written_vars[id(effect.state)] = outvars[position : position + part.num_dynamic]
            position += part.num_dynamic
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
            return [_compat.Var(aval) for aval in read.avals]
        added = self._body.jaxpr.invars[len(self._body.jaxpr.invars) - self._num_added :]
        return [added[v] for v in own.variables]

    def arrange(self, invars: Sequence[Any], outvars: Sequence[Any]) -> Body:
        """The body with these inputs and outputs; its operands are counted among the inputs."""
        return Body(_compat.rebuild(self._body.jaxpr, invars=invars, outvars=outvars), [])

    def close(self, invars: Sequence[Any], outvars: Sequence[Any]) -> Any:
        """The equations as a closed jaxpr with these inputs and outputs; what the function closed over is constant."""
        return _compat.close(self.arrange([*self.operand_vars, *invars], outvars).jaxpr, self.operands)

    # -- checks --

    def check_written(self, effect: Effect, paths: Callable[[Any], str]) -> None:
        """Raise unless the state leaves the function with the type it had on entry; `paths` finds a state's path."""
        read = self.inputs[id(effect.state)]
        part = self.values[self.effects.index(effect)]
        avals = [v.aval for v in self.written_vars[id(effect.state)]]
        same = part.treedef == read.part.treedef and part.mask == read.part.mask and part.static == read.part.static
        drift = next((p for p in zip(read.avals, avals, strict=True) if drifts(*p)), None) if same else None
        if same and drift is None:
            return
        before, after = map(type_str, drift) if drift else (str(read.part.treedef), str(part.treedef))
        if drift is None and read.part.treedef == part.treedef:  # the same containers around other objects
            before, after = tree_type_str(read.part.combine(read.avals)), tree_type_str(part.combine(avals))
        weak = " (~ marks a weak type, that of a Python number)" if "~" in before + after else ""
        raise CarryTypeError(
            f"{self.name} changes the type of {type(effect.state).__name__} {paths(effect.state)!r}, made at "
            f"{effect.kind.site_of(effect.state)}: it enters as {before} and leaves as {after}{weak}, written at "
            f"{effect.site}.\nA state must keep its type here, since one compiled body serves every step or branch.\n"
            f"Fix: create the state with the type that is written (an array for a flag: jnp.array(False)), or convert the "
            f"value before writing it."
        )


def drifts(before: Any, after: Any) -> bool:
    """Whether a value of type `after` cannot go on as one of type `before`.

    From strong to weak is no drift: the strong type is kept, and so is all that is computed from it.
    """
    return (before.shape, before.dtype) != (after.shape, after.dtype) or (before.weak_type and not after.weak_type)


def as_types(values: Sequence[Any], avals: Sequence[Any]) -> list[Any]:
    """Values with their weak types made those of `avals`."""
    return [
        x if _compat.abstract(x).weak_type == aval.weak_type else _compat.with_weak_type(x, aval.weak_type)
        for x, aval in zip(values, avals, strict=True)
    ]


def kept_types(avals: Sequence[Any], out_avals: Sequence[Any]) -> list[Any]:
    """The types that a carry leaves a loop with: weak only where it both enters and leaves a step so, as in JAX."""
    return [b if a.weak_type and not b.weak_type else a for a, b in zip(avals, out_avals, strict=True)]


def union(parts: Sequence[dict[int, Any]]) -> list[Any]:
    """The values of several dicts by id, each key once, in order."""
    merged: dict[int, Any] = {}
    for part in parts:
        for key, value in part.items():
            merged.setdefault(key, value)
    return list(merged.values())


def publish(effects: Sequence[Effect], parts: Sequence[Partition], leaves: Sequence[Any]) -> None:
    """Store values in the states that were written; `leaves` are those of all of them."""
    position = 0
    for effect, part in zip(effects, parts, strict=True):
        effect.value = part.combine(leaves[position : position + part.num_dynamic])
        position += part.num_dynamic
        effect.kind.publish(effect, True)
        effect.value = None


def flatten_carry(name: str, init: PyTree) -> tuple[list[Any], Partition]:
    """The leaves of a carry as arrays.

    Raises:
        StateValueError: some leaf is no array and no number.
    """
    leaves, part = partition(init, is_loop_leaf)
    if part.static:
        raise StateValueError(
            f"{name}: the carry holds a {type(part.static[0]).__name__}, which is no array. Close over it in the body."
        )
    return [
        x.__jax_array__() if not isinstance(x, jax.Array) and hasattr(x, "__jax_array__") else x for x in leaves
    ], part


def check_carry(
    name: str, fun: Callable, given: Partition, avals: Sequence[Any], returned: Partition, out_avals: Any
) -> None:
    """Raise unless a body returns its carry in the structure and with the types that it was given."""
    if returned.treedef != given.treedef:
        raise CarryTypeError(
            f"{name}: the body {name_of(fun)} must return a carry in the structure it was given,\n"
            f"  given:    {given.treedef}\n  returned: {returned.treedef}"
        )
    for n, (a, b) in enumerate(zip(avals, out_avals, strict=True)):
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            keys = jax.tree_util.tree_flatten_with_path(given.combine(range(len(avals))))[0]
            where = jax.tree_util.keystr(keys[n][0]) or "the carry"
            raise CarryTypeError(
                f"{name}: the body {name_of(fun)} changes the type of the carry at {where}: it enters a step as "
                f"{type_str(a)} and leaves it as {type_str(b)}.\nFix: convert it in the body, or start with the type "
                f"that the body returns."
            )


def promote(carry: list[Any], avals: Sequence[Any], out_avals: Sequence[Any]) -> list[Any] | None:
    """A first carry with the body's types where it was a Python number of another, as JAX has it; None if none is."""
    if len(avals) != len(out_avals):
        return None
    changed, promoted = False, []
    for x, a, b in zip(carry, avals, out_avals, strict=True):
        is_number = a.weak_type and not b.weak_type and a.shape == b.shape and a.dtype != b.dtype
        if is_number and jax.numpy.promote_types(a.dtype, b.dtype) == b.dtype:
            x, changed = jax.lax.convert_element_type(x, b.dtype), True
        promoted.append(x)
    return promoted if changed else None
