"""`Acceptance`: the calls that a program is for, with the shardings of the states that it writes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from ... import _jax
from ..._atomic import commit
from ..._equations.primitives import row_of
from ..._frames import Effect, moving
from ..._lift.context import divides
from ..._lift.outcome import Outcome
from ..._lift.stage import Input
from ..._tree import freeze, is_array_or_number, partition


class Acceptance:
    """The calls that a program accepts: those with the types, the settings and the states of the staged call.

    Args:
        arrays: the arguments of the staged call.

    Attributes:
        avals: their types.
        settings: JAX's settings when the function was staged.
        inputs: the states that are read, in the order of the program's operands.
        shardings: of the states that the program writes.
    """

    inputs: list[Input]
    shardings: StateShardings

    def __init__(self, arrays: Sequence[Any]):
        self.avals = [_jax.abstract(x) for x in arrays]
        self.settings = _jax.trace_context()
        self._is_on_mesh: bool | None = None  # set when JAX first traces the program

    def is_for(self, arrays: Sequence[Any]) -> bool:
        """Whether the types of the arguments, and the settings, are the staged ones."""
        return self.settings == _jax.trace_context() and _same_types(arrays, self.avals)

    def accepts(self, arrays: Sequence[Any], values: Sequence[Any]) -> bool:
        """Whether the inputs' values have the staged types, structures and shardings."""
        if not self.keeps_shardings(arrays, values) or self._is_mesh_changed([*arrays, *jax.tree.leaves(values)]):
            return False
        for i, value in zip(self.inputs, values, strict=True):
            leaves, part = partition(value, is_array_or_number)
            if part.treedef != i.partition.treedef or part.mask != i.partition.mask or not _same_types(leaves, i.avals):
                return False
            if freeze(part.static) != freeze(i.partition.static):
                return False
        return True

    def keeps_shardings(self, arrays: Sequence[Any], values: Sequence[Any]) -> bool:
        """Whether the written states have the shardings that the program returns; `values` are the inputs' values."""
        if not self.shardings:
            return True
        if self.shardings.is_partial and not _jax.has_tracers([*arrays, *values]):
            return False
        return self.shardings.accept(values)

    def note_traced(self, leaves: Sequence[Any], avals: Sequence[Any]) -> bool:
        """Note that JAX traces the program for these operands; False if it was staged for others."""
        is_staged = self.settings == _jax.trace_context() and _same_types(leaves, avals)
        if not is_staged or self._is_mesh_changed(leaves):
            return False
        self._is_on_mesh = is_on_mesh(map(_jax.abstract, leaves))
        return True

    def _is_mesh_changed(self, leaves: Sequence[Any]) -> bool:
        """Whether some of these arrays are on a mesh and none was when the program was staged, or the reverse."""
        if self._is_on_mesh is None or self.shardings.has_inner_mesh:
            return False
        return self._is_on_mesh != is_on_mesh([_jax.abstract(x) for x in leaves if is_array_or_number(x)])


def _same_types(leaves: Sequence[Any], avals: Sequence[Any]) -> bool:
    if len(leaves) != len(avals):
        return False
    for leaf, b in zip(leaves, avals, strict=True):
        a = _jax.abstract(leaf)
        if _jax.strong_type(a) != _jax.strong_type(b) or _jax.is_weak(a) != _jax.is_weak(b):
            return False
    return True


@dataclasses.dataclass(slots=True, eq=False)
class _Written:
    """A written state whose value has the same structure before and after a call.

    Attributes:
        input_index: index of its value among the program's inputs; None if the program only writes it.
        start: index of its first leaf among the written leaves.
        shardings: the sharding of each leaf; None if not known before the first call has returned.
        is_fixed: for each leaf, whether its sharding is known and divides its new shape.
    """

    effect: Effect
    input_index: int | None
    start: int
    shardings: list[Sharding | None]
    is_fixed: list[bool]


class StateShardings:
    """The shardings of the states that a program writes, if any array of the call is on a mesh.

    A written state keeps its sharding in every call. A state that is read and not committed to its one device becomes
    replicated: otherwise its type would change in the first call, and the second call would compile again. A state that
    is only written and not committed gets the sharding that the compiler chooses in the first call, and keeps it. A
    leaf whose new shape is not divided by the old sharding gets the compiler's choice in every call.

    Args:
        arrays: the arguments.
        inputs: the states that are read.
        outcome: the output and effects of the program; `avals` are the types of all written leaves.
        has_inner_mesh: whether equations of the program name a mesh, so that it runs there wherever its operands are.

    Attributes:
        out_shardings: the shardings of the written leaves, None for the compiler's choice; or None if no array is on a
            mesh.
        is_open: whether some shardings are not known before the first call has returned.
        is_partial: whether arrays on a mesh are computed by an enclosing trace, so that their shardings are unknown.
        has_inner_mesh: whether only the program's equations name a mesh, and no operand is on one.
    """

    def __init__(
        self,
        arrays: Sequence[Any],
        inputs: Sequence[Input],
        outcome: Outcome,
        avals: Sequence[Any],
        has_inner_mesh: bool = False,
    ):
        self._written: list[_Written] = []
        self.out_shardings: list[Sharding | None] | None = None

        operands = [*arrays, *(x for i in inputs for x in i.values)]
        input_indices = {id(i.state): n for n, i in enumerate(inputs)}
        old_leaves_of: list[
            list[Any] | None
        ] = []  # the old leaves of each written state; None if its structure changes
        for effect, part in zip(outcome.effects, outcome.values, strict=True):
            input_index = input_indices.get(id(effect.state))
            if input_index is None:
                leaves, old_part = partition(effect.value_before, is_array_or_number)
            else:
                leaves, old_part = inputs[input_index].values, inputs[input_index].partition
            old_leaves_of.append(leaves if old_part.treedef == part.treedef and old_part.mask == part.mask else None)

        old_leaves = [x for leaves in old_leaves_of if leaves is not None for x in leaves]
        mesh = _mesh_of(operands, old_leaves)
        self.is_open = False
        is_traced = _jax.has_tracers(operands if mesh is None else old_leaves)
        self.is_partial = is_traced and is_on_mesh(map(_jax.abstract, operands))
        self.has_inner_mesh = mesh is None and has_inner_mesh and not is_traced
        if mesh is None and not self.has_inner_mesh:
            return

        out_shardings: list[Sharding | None] = []
        for effect, part, leaves in zip(outcome.effects, outcome.values, old_leaves_of, strict=True):
            start = len(out_shardings)
            if leaves is None:
                out_shardings += [None] * part.num_dynamic
                continue
            input_index = input_indices.get(id(effect.state))
            if mesh is None:  # the first call tells
                shardings: list[Sharding | None] = [None] * len(leaves)
            elif input_index is None:
                shardings = [_sharding_on(mesh, x) for x in leaves]
            else:
                shardings = _replicate_uncommitted(inputs[input_index], mesh)
            # The sharding of a tracer is not known, and one that does not divide the new shape cannot be kept.
            is_fixed = [
                not isinstance(x, _jax.Tracer) and (sharding is None or divides(sharding, aval.shape))
                for x, sharding, aval in zip(leaves, shardings, avals[start:], strict=False)
            ]
            self._written.append(_Written(effect, input_index, start, shardings, is_fixed))
            out_shardings += [s if fixed else None for s, fixed in zip(shardings, is_fixed, strict=True)]
        self.is_open = any(s is None for w in self._written for s in w.shardings)
        self.out_shardings = None if mesh is None else out_shardings

    def __bool__(self) -> bool:
        return self.is_partial or bool(self._written)

    def learn(self, writes: Sequence[Any]) -> None:
        """Record the shardings that are not known yet from the values that the first call returned."""
        if _jax.has_tracers(writes):
            return
        for w in self._written:
            for n, sharding in enumerate(w.shardings):
                if sharding is None:
                    w.shardings[n] = getattr(writes[w.start + n], "sharding", None)
        self.is_open = False

    def accept(self, values: Sequence[Any]) -> bool:
        """Whether the written states have the recorded shardings, or can get them; `values` are the inputs' values."""
        for w in self._written:
            if w.input_index is None:
                value = w.effect.kind.get(w.effect.state)
            else:
                value = values[w.input_index]
            if isinstance(value, _jax.ArrayImpl):
                leaves = [value]
            else:
                leaves = [x for x in jax.tree.leaves(value) if isinstance(x, jax.Array)]
            if len(leaves) == len(w.shardings) and not all(
                map(_has_expected_sharding, leaves, w.shardings, w.is_fixed)
            ):
                return False
        return True


def names_mesh(jaxpr: _jax.Jaxpr) -> bool:
    """Whether an equation distributes values over devices."""
    return any(row_of(eqn).places for eqn in _jax.equations_in(jaxpr))


def is_on_mesh(avals: Iterable[Any]) -> bool:
    """Whether a value of one of these types is on a mesh. Types name the mesh for automatic axes, too."""
    return any(not a.sharding.mesh.empty for a in avals if not isinstance(a, _jax.HiType))


def _has_expected_sharding(x: jax.Array, sharding: Sharding | None, is_fixed: bool) -> bool:
    if sharding is None or not is_fixed or isinstance(x, _jax.Tracer):
        return True
    actual = x.sharding
    # An uncommitted array can be moved: JAX places it where the program needs it.
    return actual is sharding or actual == sharding or not x.committed or actual.is_equivalent_to(sharding, x.ndim)


def _mesh_of(operands: Sequence[Any], written: Sequence[Any]) -> Any:
    """The mesh of the operands; the mesh of the written values if no operand is committed to its devices."""
    mesh = next((s.mesh for x in operands if (s := _named_sharding(x)) is not None), None)
    if mesh is not None or any(_is_committed(x) for x in operands):
        return mesh
    return next((s.mesh for x in written if (s := _named_sharding(x)) is not None), None)


def _named_sharding(x: Any) -> NamedSharding | None:
    if isinstance(x, jax.Array | jax.ShapeDtypeStruct) and not isinstance(x, _jax.Tracer):
        if isinstance(x.sharding, NamedSharding) and isinstance(x.sharding.mesh, jax.sharding.Mesh):
            return x.sharding
    return None


def _is_committed(x: Any) -> bool:
    """Whether an array is committed to its devices; a tracer is not."""
    return isinstance(x, jax.Array) and not isinstance(x, _jax.Tracer) and x.committed


def _sharding_on(mesh: Any, x: Any) -> Sharding | None:
    """The sharding of an array that is committed to the devices of a mesh; None for another."""
    return x.sharding if _is_committed(x) and x.sharding.device_set == set(mesh.devices.flat) else None


def _replicate_uncommitted(read: Input, mesh: Any) -> list[Sharding | None]:
    """Replicate the uncommitted leaves of a state over the mesh; returns the shardings of all its leaves."""
    is_final = [isinstance(x, _jax.Tracer) or _is_committed(x) for x in read.values]
    if not all(is_final) and _jax.is_eager():  # in a trace, the enclosing program places the values
        sharding = NamedSharding(mesh, PartitionSpec())
        read.values = [x if final else _put(x, sharding) for x, final in zip(read.values, is_final, strict=True)]
        commit(moving(read.state, read.kind, read.partition.combine(read.values)))
    return [x.sharding if _is_committed(x) else None for x in read.values]


def _put(x: Any, sharding: NamedSharding) -> Any:
    """Put an array on devices. `jax.device_put` takes the words of random keys to devices of other processes, but no
    keys.
    """
    if not isinstance(x, jax.Array) or not jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.device_put(x, sharding)
    words = jax.device_put(jax.random.key_data(x), sharding)
    return jax.random.wrap_key_data(words, impl=jax.random.key_impl(x))
