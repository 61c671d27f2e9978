"""`Places`: where the states that a compiled program writes lie, before a call and after it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from ... import _jax
from ..._atomic import commit
from ..._equations.primitives import row_of
from ..._frames import Effect
from ..._lift.stage import Input, Outcome
from ..._tree import is_array_or_number, partition
from ..._typing import PyTree


class _Written:
    """A written state whose value has the same structure before and after a call.

    Attributes:
        place: the position of its value among the program's inputs; None if the program only writes it.
        start: the position of its first leaf among the written leaves.
        shardings: of each leaf. None: not known before the first call has returned.
        is_fixed: whether the sharding of each leaf is known and divides its new shape.
    """

    __slots__ = ("effect", "is_fixed", "place", "shardings", "start")

    def __init__(self, effect: Effect, place: int | None, start: int, shardings: list[Sharding | None]):
        self.effect = effect
        self.place = place
        self.start = start
        self.shardings = shardings
        self.is_fixed = [True] * len(shardings)


class Places:
    """Shardings of the states that a program writes, if any array of the call lies on a mesh.

    A written state keeps its sharding in every call. A state that is read and not committed to its one device becomes
    replicated: otherwise its type would change with the first call, and the second would compile again. A state that is
    only written and not committed gets the sharding that the compiler chooses in the first call, and keeps it. A leaf whose
    new shape the old sharding does not divide gets the compiler's choice in every call.

    Args:
        arrays: the arguments.
        inputs: the states that are read.
        outcome: what the program returns; `avals` are the types of all written leaves.
        brings_mesh: whether equations of the program name a mesh, so that it runs there wherever its operands are.

    Attributes:
        out_shardings: of the written leaves; None if nothing lies on a mesh.
        is_open: whether some are not known before the first call has returned.
        is_partial: whether arrays on a mesh are computed by an enclosing trace, so that their shardings are unknown.
    """

    def __init__(
        self,
        arrays: Sequence[Any],
        inputs: Sequence[Input],
        outcome: Outcome,
        avals: Sequence[Any],
        brings_mesh: bool = False,
    ):
        self._written: list[_Written] = []
        self.out_shardings: list[Sharding | None] | None = None
        operands = [*arrays, *(x for i in inputs for x in i.values)]
        index = {id(i.state): n for n, i in enumerate(inputs)}
        before: list[list[Any] | None] = []  # the leaves of each written state, if their structure stays
        for effect, part in zip(outcome.effects, outcome.values, strict=True):
            place = index.get(id(effect.state))
            if place is None:
                leaves, old = partition(effect.value_before, is_array_or_number)
            else:
                leaves, old = inputs[place].values, inputs[place].part
            before.append(leaves if old.treedef == part.treedef and old.mask == part.mask else None)
        old_leaves = [x for leaves in before if leaves is not None for x in leaves]
        mesh = _mesh_of(operands, old_leaves)
        self.is_open = False
        hidden = has_tracer(operands if mesh is None else old_leaves)
        self.is_partial = hidden and is_on_mesh(map(_jax.abstract, operands))
        self.brings_mesh = mesh is None and brings_mesh and not hidden
        if mesh is None:
            if self.brings_mesh:
                self._leave_open(outcome, before, index)
            return
        self.out_shardings = []
        for effect, part, leaves in zip(outcome.effects, outcome.values, before, strict=True):
            start = len(self.out_shardings)
            if leaves is None:
                self.out_shardings += [None] * part.num_dynamic
                continue
            place = index.get(id(effect.state))
            if place is None:
                shardings = [_sharding_on(mesh, x) for x in leaves]
            else:
                shardings = _replicate_unplaced(inputs[place], mesh)
            written = _Written(effect, place, start, shardings)
            for n, (x, sharding) in enumerate(zip(leaves, shardings, strict=True)):
                is_known = not isinstance(x, _jax.Tracer)
                written.is_fixed[n] = is_known and (sharding is None or _fits(sharding, avals[start + n]))
            self._written.append(written)
            self.out_shardings += [s if fixed else None for s, fixed in zip(shardings, written.is_fixed, strict=True)]
        self.is_open = any(s is None for w in self._written for s in w.shardings)

    def _leave_open(self, outcome: Outcome, before: Sequence[list | None], index: dict[int, int]) -> None:
        """Every state gets its sharding from the first call."""
        start = 0
        for effect, part, leaves in zip(outcome.effects, outcome.values, before, strict=True):
            if leaves is not None:
                place = index.get(id(effect.state))
                self._written.append(_Written(effect, place, start, [None] * len(leaves)))
            start += part.num_dynamic
        self.is_open = bool(self._written)

    def __bool__(self) -> bool:
        return self.is_partial or bool(self._written)

    def learn(self, writes: Sequence[Any]) -> None:
        """Take the shardings that are not known yet from what the first call returned."""
        if has_tracer(writes):
            return
        for w in self._written:
            for n, sharding in enumerate(w.shardings):
                if sharding is None:
                    w.shardings[n] = getattr(writes[w.start + n], "sharding", None)
        self.is_open = False

    def accept(self, values: Sequence[Any]) -> bool:
        """Whether the written states lie where they did, or may be put there; `values` are those of the inputs."""
        for w in self._written:
            if w.place is None:
                value = w.effect.kind.get(w.effect.state)
            else:
                value = values[w.place]
            if isinstance(value, _jax.ArrayImpl):
                leaves = [value]
            else:
                leaves = [x for x in jax.tree.leaves(value) if isinstance(x, jax.Array)]
            if len(leaves) == len(w.shardings) and not all(map(_lies, leaves, w.shardings, w.is_fixed)):
                return False
        return True


def names_mesh(jaxpr: _jax.Jaxpr) -> bool:
    """Whether an equation says that values are divided among devices."""
    return any(row_of(e).places or any(map(names_mesh, _jax.inner_jaxprs(e))) for e in jaxpr.eqns)


def is_on_mesh(avals: Iterable[Any]) -> bool:
    """Whether a value of one of these types lies on a mesh, which types say for automatic axes, too."""
    return any(not a.sharding.mesh.empty for a in avals)


def has_tracer(values: Iterable[PyTree]) -> bool:
    return any(isinstance(x, _jax.Tracer) for x in jax.tree.leaves(list(values)))


def _lies(x: jax.Array, sharding: Sharding | None, is_fixed: bool) -> bool:
    if sharding is None or not is_fixed or isinstance(x, _jax.Tracer):
        return True
    found = x.sharding
    return found is sharding or found == sharding or not x.committed or found.is_equivalent_to(sharding, x.ndim)


def _mesh_of(operands: Sequence[Any], written: Sequence[Any]) -> Any:
    """The mesh that the operands lie on; that of written values where the operands may be put anywhere."""
    mesh = next((s.mesh for x in operands if (s := _named_sharding(x)) is not None), None)
    if mesh is not None or any(_is_put(x) for x in operands):
        return mesh
    return next((s.mesh for x in written if (s := _named_sharding(x)) is not None), None)


def _named_sharding(x: Any) -> NamedSharding | None:
    if isinstance(x, jax.Array | jax.ShapeDtypeStruct) and not isinstance(x, _jax.Tracer):
        if isinstance(x.sharding, NamedSharding) and isinstance(x.sharding.mesh, jax.sharding.Mesh):
            return x.sharding
    return None


def _is_put(x: Any) -> bool:
    """Whether an array was put where it is."""
    return isinstance(x, jax.Array) and not isinstance(x, _jax.Tracer) and x.committed


def _sharding_on(mesh: Any, x: Any) -> Sharding | None:
    """The sharding of an array that was put on the devices of a mesh."""
    return x.sharding if _is_put(x) and x.sharding.device_set == set(mesh.devices.flat) else None


def _replicate_unplaced(i: Input, mesh: Any) -> list[Sharding | None]:
    """Put those leaves of a state on the mesh that were not put anywhere; the shardings of all of them."""
    stays = [isinstance(x, _jax.Tracer) or _is_put(x) for x in i.values]
    if not all(stays):
        sharding = NamedSharding(mesh, PartitionSpec())
        i.values = [x if stay else _put(x, sharding) for x, stay in zip(i.values, stays, strict=True)]
        commit([i.kind.store(i.state, i.part.combine(i.values))])
    return [x.sharding if _is_put(x) else None for x in i.values]


def _put(x: Any, sharding: NamedSharding) -> Any:
    """An array on these devices. Those of other processes take words of random keys, but no keys."""
    if not isinstance(x, jax.Array) or not jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.device_put(x, sharding)
    words = jax.device_put(jax.random.key_data(x), sharding)
    return jax.random.wrap_key_data(words, impl=jax.random.key_impl(x))


def _fits(sharding: Sharding, aval: Any) -> bool:
    """Whether an array of this type can be divided so."""
    try:
        sharding.shard_shape(aval.shape)
    except ValueError:
        return False
    return True
