"""`Release`: the rewriting of a program that moves consumers into loops."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from ... import _jax
from ..._jax import Jaxpr, Var
from ..._targets import current
from ..._tree import num_bytes
from ..dataflow import needed_equations, variables_of
from ..primitives import LOOPS, REMAT, inner_jaxprs
from ..rowwise import rowwise
from ..sums import in_order, with_split_sums
from .consumers import Consumers, are_read_once, paired, read_whole
from .devices import into_shard_map, with_free_values
from .entering import into_call, into_row_loop, into_scan
from .fates import Fate, GradientStack
from .flat import flattened, without_copies
from .loops import has_loop, row_loop, stacks_of, with_jaxpr
from .quotients import with_reciprocals
from .repeated import repeated, with_split_reductions

_RUNS_LOOPS = LOOPS | REMAT | {"statetx_loop", "statetx_linear", "shard_map"}


class Released(NamedTuple):
    """A jaxpr of the same inputs and outputs after the rewriting, and what became of its stacks."""

    jaxpr: Jaxpr
    stacks: list[GradientStack]


@dataclasses.dataclass(frozen=True)
class Release:
    """The rewriting of a closed jaxpr where it is lowered; equal ones do the same.

    Attributes:
        overwritable: the positions of inputs whose memory an output may take.
        placements: of the inputs (see `devices`); none if all are unknown.
        is_demanded: whether consumers move although the device copies stacks for it.
        splits_sums: whether ``total + (a + b)``, for two cotangents of one value, becomes ``(total + a) + b``, so that
            no sum of cotangents exists beside the total. Both are sums of three in other orders.
        repeats: whether a loop runs twice where a number that is computed from all rows is needed first.
    """

    overwritable: tuple[int, ...]
    placements: tuple[Any, ...] = ()
    is_demanded: bool = False
    splits_sums: bool = False
    repeats: bool = False
    is_general = True

    def __call__(self, jaxpr: Any) -> Any:
        return _jax.close(self.rewritten(jaxpr).jaxpr, ())

    @property
    def adds_operations(self) -> bool:
        """Whether a program's operations are counted after the rewriting."""
        return self.repeats

    def rewritten(self, jaxpr: Any) -> Released:
        opened, consts = _jax.open_jaxpr(jaxpr)
        assert not consts
        placements = dict(zip(opened.invars, self.placements, strict=False))
        prepared = with_reciprocals(opened)
        new, stacks = released(prepared, self.overwritable, self, placements, False)
        # Where nothing is released, XLA gets the program unchanged.
        return Released(opened if new is prepared else new, stacks)


def released(
    jaxpr: Jaxpr,
    overwritable: Collection[int],
    options: Release,
    placements: Mapping[Var, Any],
    is_in_backward: bool,
) -> Released:
    """Move the consumers of stacked results into the loops, at any depth of loops.

    Args:
        jaxpr: without constants.
        overwritable: the positions of inputs whose memory an output may take.
        options: of the whole program.
        placements: of inputs (see `devices`); the others are unknown.
        is_in_backward: whether the jaxpr is of an equation of a backward pass.
    """
    if not has_loop(jaxpr):
        return Released(jaxpr, [])
    flat = without_copies(flattened(jaxpr))
    if options.splits_sums:
        flat = with_split_sums(flat, {flat.invars[i] for i in overwritable})
    placements = {v: placements.get(old) for old, v in zip(jaxpr.invars, flat.invars, strict=True)}
    level = _Level(flat, overwritable, options, placements, is_in_backward)
    for eqn in level.eqns[:]:
        if level.has(eqn):
            level.visit(eqn)
    is_changed = options.splits_sums or any(stack.is_released for stack in level.stacks)
    return Released(level.jaxpr() if is_changed else jaxpr, level.stacks)


class _Level:
    """The equations of one jaxpr while consumers move."""

    def __init__(
        self,
        jaxpr: Jaxpr,
        overwritable: Collection[int],
        options: Release,
        placements: Mapping[Var, Any],
        is_in_backward: bool,
    ):
        self._jaxpr, self._options, self._is_in_backward = jaxpr, options, is_in_backward
        self._placements = with_free_values(jaxpr.eqns, placements)
        self._kept_inputs = {v for i, v in enumerate(jaxpr.invars) if i not in overwritable}
        self._returned = {v for v in jaxpr.outvars if isinstance(v, Var)}
        self._read_by_loops = {v for e in jaxpr.eqns if e.primitive.name in _RUNS_LOOPS for v in variables_of(e)}
        self.stacks: list[GradientStack] = []
        self._set(list(jaxpr.eqns))

    def _set(self, eqns: list[Any]) -> None:
        self.eqns = eqns
        self._positions = {e: n for n, e in enumerate(eqns)}
        self._readers: dict[Var, list[Any]] = {}
        for eqn in eqns:
            for v in variables_of(eqn):
                self._readers.setdefault(v, []).append(eqn)
        self._ancestors = functools.cache(self._find_ancestors)

    def _is_backward(self, loop: Any) -> bool:
        """Whether a loop is of a backward pass. Others have no gradients, but statistics, losses or residuals."""
        scope = _jax.scope(loop)
        return (self._is_in_backward or "transpose(" in scope) and "rematted_computation" not in scope

    def _note(self, loop: Any, stacks: Sequence[Var], fate: Fate, reader: Any = None) -> None:
        new = [GradientStack(loop, num_bytes(v.aval), fate, reader, self._weights_like(v)) for v in stacks]
        self.stacks += [stack for stack in new if stack.is_released or self._is_backward(loop)]

    def _weights_like(self, stack: Var) -> tuple[int, ...]:
        shape_of = lambda v: getattr(v.aval, "shape", None)
        inputs = enumerate(self._jaxpr.invars)
        return tuple([i for i, v in inputs if v in self._read_by_loops and shape_of(v) == shape_of(stack)])

    def has(self, eqn: Any) -> bool:
        return eqn in self._positions

    def jaxpr(self) -> Jaxpr:
        return _jax.rebuild(self._jaxpr, invars=self._jaxpr.invars, outvars=self._jaxpr.outvars, eqns=self.eqns)

    def visit(self, eqn: Any) -> None:
        """Move the consumers of an equation into it, and do the same in its own jaxpr."""
        repeats = self._options.repeats and eqn.primitive.name != "shard_map"
        if not repeats or not any(self._repeat(eqn, *stacks) for stacks in stacks_of(eqn).items()):
            self._visit_once(eqn)

    def _repeat(self, loop: Any, length: int, outvars: Sequence[Var]) -> bool:
        """Release all stacks of a loop in a second run of it, if the consumers need numbers that are computed from all
        rows; without a change if this cannot be.
        """
        eqns, stacks = self.eqns, [v for v in outvars if v in self._readers]
        readers = [reader for v in stacks for reader in self._readers[v] if reader.primitive.name in _RUNS_LOOPS]
        if not self._is_backward(loop) or any(rowwise(reader, length) is None for reader in readers):
            return False
        split = with_split_reductions(eqns, stacks, length)
        if len(split) > len(eqns) and self._releases_all(split, loop):
            return True
        self._set(split)
        users = self._with_producers(loop, length, self._rowwise_users(loop, length, stacks))
        twice = repeated(split, loop, stacks, users)
        noted = len(self.stacks)
        released_stacks = [] if twice is None else self._releases_all(twice.eqns, twice.first, twice.second)
        if twice is not None and released_stacks:
            self.stacks[noted:] = [s._replace(fate=Fate.REPEATED, reader=twice.reader) for s in released_stacks]
            return True
        self._set(eqns)
        return False

    def _releases_all(self, eqns: list[Any], *loops: Any) -> list[GradientStack]:
        """Release the stacks of loops in these equations, and return those of the last one; none, without a note, if
        one is kept.
        """
        noted = start = len(self.stacks)
        self._set(eqns)
        for loop in loops:
            start = len(self.stacks)
            self._visit_once(loop)
            if any(not stack.is_released for stack in self.stacks[start:]) or len(self.stacks) == start:
                del self.stacks[noted:]
                return []
        return self.stacks[start:]

    def _visit_once(self, eqn: Any) -> None:
        for length, outvars in stacks_of(eqn).items():
            consumers = self._consumers(eqn, length, outvars)
            new = [] if consumers is None else self._moved(eqn, length, consumers)
            if consumers is not None and new:
                # Inside of a region or a shard_map they move on, or are kept for another reason.
                if eqn.primitive.name not in REMAT | {"shard_map"}:
                    self._note(eqn, consumers.stacks, Fate.RELEASED)
                gone, position = {eqn, *consumers.eqns}, self._positions[eqn]
                eqns = [*self.eqns[:position], *new, *self.eqns[position:]]
                self._set(in_order([e for e in eqns if e not in gone]))
                eqn = next((e for e in new if e.primitive is eqn.primitive), None)
                if eqn is None:
                    return
        rewritten = self._inside(eqn)
        if rewritten is not eqn:
            self._set([rewritten if e is eqn else e for e in self.eqns])

    def _inside(self, eqn: Any) -> Any:
        """The equation, after the rewriting of its own jaxpr."""
        end = len(eqn.invars)
        if eqn.primitive.name == "scan":
            num_constants, num_carry = _jax.scan_counts(eqn)
            overwritable: Collection[int] = range(num_constants, len(eqn.invars))
            end = num_constants + num_carry
        elif eqn.primitive.name in REMAT | {"shard_map"}:
            overwritable = [i for i, v in enumerate(eqn.invars) if isinstance(v, Var) and self._is_last(v, eqn, ())]
        else:
            return eqn
        (inner,) = inner_jaxprs(eqn)
        if inner.constvars or not has_loop(inner):
            return eqn
        # In a shard_map, types show no shardings over its axes.
        end = 0 if eqn.primitive.name == "shard_map" else end
        operand_pairs = zip(inner.invars[:end], eqn.invars, strict=False)
        placements = {v: self._placements.get(x) for v, x in operand_pairs if isinstance(x, Var)}
        with _jax.in_shard_maps(eqn):
            new, stacks = released(inner, overwritable, self._options, placements, self._is_backward(eqn))
        # The fate of results that leave a shard_map is noted here.
        positions = {v: i for i, v in enumerate(self._jaxpr.invars)}
        outer = lambda s: tuple([positions[v] for i in s.inputs if (v := eqn.invars[i]) in positions])
        is_told = lambda s: eqn.primitive.name != "shard_map" or s.fate is not Fate.RETURNED
        self.stacks += [s._replace(inputs=outer(s)) for s in stacks if is_told(s)]
        return with_jaxpr(eqn, new)

    # -- what may move --

    def _consumers(self, loop: Any, length: int, outvars: Sequence[Var]) -> Consumers | None:
        stacks = [v for v in outvars if v in self._readers or v in self._returned]
        while stacks:
            eqns = self._rowwise_users(loop, length, stacks)
            kept_stacks = [v for v in stacks if v in self._returned or self._reader(v, {*eqns}) is not None]
            if not kept_stacks:
                break
            for v in kept_stacks:
                reader = self._first_reader(v, {*eqns}) if v not in self._returned else None
                # Residuals of the loop's own forward pass are no gradients.
                if reader is None or reader.primitive.name not in _RUNS_LOOPS:
                    self._note(loop, [v], Fate.RETURNED if reader is None else Fate.READ, reader)
            stacks = [v for v in stacks if v not in kept_stacks]
        if not stacks:
            return None
        return self._described(loop, length, stacks, self._with_producers(loop, length, eqns))

    def _rowwise_users(self, loop: Any, length: int, stacks: Sequence[Var]) -> list[Any]:
        """The equations that treat rows alone of all that they need of the loop, which is rows of these results."""
        rows, other_vars, eqns = {*stacks}, {*loop.outvars} - {*stacks}, []
        for eqn in self.eqns[self._positions[loop] + 1 :]:
            operands = variables_of(eqn)
            if operands.isdisjoint(rows) and operands.isdisjoint(other_vars) and not eqn.effects:
                continue
            block = rowwise(eqn, length) if operands.isdisjoint(other_vars) else None
            if block is not None and rows.isdisjoint(read_whole(eqn, block)):
                rows.update(eqn.outvars)
                eqns.append(eqn)
            else:
                other_vars.update(eqn.outvars)
        return eqns

    def _first_reader(self, v: Var, rowwise_users: Collection[Any]) -> Any:
        """The first equation that reads several rows of the variable at once, or of what these users make of it."""
        derived = {v}
        for eqn in self.eqns:
            if not derived.isdisjoint(variables_of(eqn)):
                if eqn not in rowwise_users:
                    return eqn
                derived.update(eqn.outvars)
        return None

    def _reader(self, v: Var, besides: Collection[Any]) -> Any:
        """An equation that reads the variable, other than these."""
        return next((e for e in self._readers.get(v, ()) if e not in besides), None)

    def _with_producers(self, loop: Any, length: int, consumers: list[Any]) -> list[Any]:
        """Add what computes, row by row, values that only the consumers read, such as the decay of a moment."""
        extended = {*consumers}

        def reads_rows(v: Var, eqn: Any) -> bool:
            block = rowwise(eqn, length) if eqn in extended else None
            return block is not None and v not in read_whole(eqn, block)

        for eqn in reversed(self.eqns):
            if eqn is loop or eqn in extended or not self._returned.isdisjoint(eqn.outvars):
                continue
            readers = [(v, e) for v in eqn.outvars for e in self._readers.get(v, ())]
            if readers and rowwise(eqn, length) is not None and all(map(reads_rows, *zip(*readers, strict=True))):
                extended.add(eqn)
        return [e for e in self.eqns if e in extended]

    def _described(self, loop: Any, length: int, stacks: list[Var], eqns: list[Any]) -> Consumers | None:
        """The consumers with their operands and results; None if they would not make the program smaller."""
        computed = {*stacks, *(v for e in eqns for v in e.outvars)}
        stacked: dict[Var, None] = {}
        whole: dict[Var, None] = {}
        for eqn in eqns:
            block = rowwise(eqn, length)
            assert block is not None
            whole |= dict.fromkeys(read_whole(eqn, block))
            stacked |= dict.fromkeys(v for v in variables_of(eqn) if v not in computed and v not in whole)
        consumers = {*eqns}
        outvars = [v for e in eqns for v in e.outvars if v in self._returned or self._reader(v, consumers) is not None]

        free = [v for v in stacked if self._is_last(v, loop, consumers)]
        in_place = paired(eqns, outvars, free)
        # Operands whose memory an output would take after something else has read them.
        blocked = [v for v in stacked if v not in free and self._may_be_overwritten(v)]
        late = [*paired(eqns, [v for v in outvars if v not in in_place], blocked).values()]
        new = [v for v in outvars if v not in in_place and v not in self._returned]
        if sum(num_bytes(v.aval) for v in new) >= sum(num_bytes(v.aval) for v in stacks):
            reader = self._first_reader(stacks[0], consumers)
            self._note(loop, stacks, Fate.REPLACED if reader is None else Fate.READ, reader)
            return None
        if num_bytes([v.aval for v in late]) >= num_bytes([v.aval for v in stacks]):
            self._note(loop, stacks, Fate.LATE, self._reader(late[0], {loop, *consumers}))
            return None
        copied = None if self._options.is_demanded else self._copied(loop, length, eqns, in_place)
        if copied is not None:
            self._note(loop, stacks, copied)
            return None
        return Consumers(stacks, eqns, [*stacked], [*whole], outvars, in_place)

    def _copied(self, loop: Any, length: int, eqns: list[Any], in_place: dict[Var, Var]) -> Fate | None:
        """Why XLA would copy stacks that the consumers overwrite; None if it does not.

        On CPUs it computes each output by itself, and copies a stack that several read for all but the last. In
        unrolled steps without regions it reads rows after it has overwritten others; on GPUs this matters if there is
        no loop left.
        """
        unroll = loop.params.get("unroll", 1)
        is_unrolled = unroll > 1 and not any(e.primitive.name in REMAT for e in inner_jaxprs(loop)[0].eqns)
        is_on_cpu, is_shared = current.platform() == "cpu", not are_read_once(eqns, in_place)
        if is_on_cpu and is_shared:
            return Fate.SHARED
        return Fate.UNROLLED if is_unrolled and (is_on_cpu or (is_shared and unroll >= length)) else None

    def _is_last(self, v: Var, loop: Any, consumers: Collection[Any]) -> bool:
        """Whether the variable is read by the loop, its consumers, and before these; and may be overwritten."""
        if not self._may_be_overwritten(v):
            return False
        readers = [e for e in self._readers.get(v, ()) if e is not loop and e not in consumers]
        return all(any(e in self._ancestors(x) for x in (loop, *consumers)) for e in readers)

    def _may_be_overwritten(self, v: Var) -> bool:
        return v not in self._returned and v not in self._kept_inputs

    def _find_ancestors(self, eqn: Any) -> set[Any]:
        """The equations that an equation needs."""
        return {*needed_equations(self.eqns[: self._positions[eqn]], variables_of(eqn))}

    # -- moving --

    def _moved(self, eqn: Any, length: int, consumers: Consumers) -> list[Any]:
        """The equation with its consumers, and equations around it; none if it cannot take them in."""
        rows = row_loop(eqn)
        if rows is not None:
            return into_row_loop(eqn, rows, consumers)
        if eqn.primitive.name == "shard_map":
            result = into_shard_map(eqn, consumers, self._placements)
            if not isinstance(result, list):
                self._note(eqn, consumers.stacks, Fate.MANUAL, result)
                return []
            return result
        if eqn.primitive.name != "scan":
            return [into_call(eqn, consumers)]
        views: dict[Var, Var] = {}  # from a reshaped stack to the one that it is made of
        for e in self.eqns:
            if e.primitive.name == "reshape" and isinstance(operand := e.invars[0], Var):
                views[e.outvars[0]] = views.get(operand, operand)
        return into_scan(eqn, length, consumers, views)
