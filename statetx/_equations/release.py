"""Move what consumes a loop's stacked results into the loop, so that the stacks never exist.

Layers in a `scan` have a backward pass that ends in gradients of all layers, stacked. What follows often treats each
layer alone: the sum of gradients of a batch in parts, or the update of an optimizer. For such a row-by-row `f`,

    carry, ys = scan(step, carry, xs)
    outs = f(ys, others)                  and       carry, outs = scan(step + f, carry, (xs, others))

are equal to the bit: each row has the same operations in the same order. On the right one row of ys exists. A stack
among `others` that nothing reads later becomes a carry: each turn overwrites the rows that it has read by those of an
output of the same type.

The rewriting is for lowering. What it makes is not differentiated any more, so that calls with rules are inlined.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from .. import _jax
from .._jax import Jaxpr, Var
from .._targets import current
from .._tree import num_bytes
from .inline import hoist, inline
from .primitives import INLINED, JIT, LOOPS, REMAT, TABLE, inner_jaxprs
from .rowwise import evaluate, rowwise
from .sums import in_order, with_split_sums


class Fate(enum.Enum):
    """What becomes of a stacked result."""

    RELEASED = "it no longer exists"
    RETURNED = "the program returns it"
    READ = "an equation needs several rows at once"
    SHARED = "the device would copy what its consumers overwrite"
    REPLACED = "what its consumers compute is as large"


class Stack(NamedTuple):
    """A stacked result of a loop that other equations read.

    Attributes:
        loop: the equation of the loop.
        num_bytes: its bytes.
        reader: the equation that needs several rows at once, if this is its fate.
    """

    loop: Any
    num_bytes: int
    fate: Fate
    reader: Any = None


class Released(NamedTuple):
    """A jaxpr of the same inputs and outputs after the rewriting, and what became of its stacks."""

    jaxpr: Jaxpr
    stacks: list[Stack]


@dataclasses.dataclass(frozen=True)
class Release:
    """The rewriting of a closed jaxpr where it is lowered; equal ones do the same.

    Attributes:
        overwritable: the positions of inputs whose memory an output may take.
        is_demanded: whether consumers move although the device copies stacks for it.
        splits_sums: whether ``total + (a + b)``, for two cotangents of one value, becomes ``(total + a) + b``, so that
            no sum of cotangents exists beside the total. Both are sums of three in other orders.
    """

    overwritable: tuple[int, ...]
    is_demanded: bool = False
    splits_sums: bool = False
    is_general = True

    def __call__(self, jaxpr: Any) -> Any:
        return _jax.close(self.rewritten(jaxpr).jaxpr, ())

    def rewritten(self, jaxpr: Any) -> Released:
        opened, consts = _jax.open_jaxpr(jaxpr)
        assert not consts
        shares_rows = self.is_demanded or current.platform() != "cpu"
        return released(opened, self.overwritable, shares_rows=shares_rows, splits_sums=self.splits_sums)


def released(
    jaxpr: Jaxpr, overwritable: Collection[int], *, shares_rows: bool = True, splits_sums: bool = False
) -> Released:
    """Move the consumers of stacked results into the loops, at any depth of loops.

    Args:
        jaxpr: without constants.
        overwritable: the positions of inputs whose memory an output may take.
        shares_rows: whether several outputs may be computed from rows that are overwritten. XLA on CPUs computes each
            output by itself, and copies the stack for all but the last.
        splits_sums: as in `Release`.
    """
    if not has_loop(jaxpr):
        return Released(jaxpr, [])
    flat = _without_copies(_flat(jaxpr))
    if splits_sums:
        flat = with_split_sums(flat, {flat.invars[i] for i in overwritable})
    level = _Level(flat, overwritable, shares_rows, splits_sums)
    for eqn in level.eqns[:]:
        if level.has(eqn):
            level.visit(eqn)
    return Released(level.jaxpr(), level.stacks)


class RowLoop(Protocol):
    """A loop of statetx that computes each row of its last results once; the `lowered` of its `_jax.call_whole`.

    Attributes:
        length: number of rows.
        num_stacks: how many of its last results are stacks.
    """

    length: int
    num_stacks: int

    def __call__(self, jaxpr: Any) -> Any: ...

    def run(self, args: Sequence[Any], buffers: list[Any], write: Callable) -> list[Any]:
        """The results, with buffers in the place of the stacks.

        Args:
            buffers: the values before the first row.
            write: ``(buffers, number of a row, rows of the stacks) -> buffers``, called once for each row.
        """
        ...


def _row_loop(eqn: Any) -> RowLoop | None:
    lowered = eqn.params.get("lowered")
    return lowered if hasattr(lowered, "num_stacks") else None


def has_loop(jaxpr: Jaxpr) -> bool:
    """Whether a jaxpr has a loop, at any depth."""
    return any(eqn.primitive.name in LOOPS or any(map(has_loop, inner_jaxprs(eqn))) for eqn in jaxpr.eqns)


# Regions stay: their lowering keeps a recomputation apart. So do calls with shardings, and loops with rules of their
# own, which are lowered by a rewriting of their own.
_CALLS = INLINED - REMAT - {"statetx_loop"}
_FEW = 16
_RUNS_LOOPS = LOOPS | REMAT | {"statetx_loop", "statetx_linear"}


def _flat(jaxpr: Jaxpr) -> Jaxpr:
    """Inline calls that have a loop, or few operations, as many functions of `jax.numpy` are."""

    def stays(eqn: Any) -> bool:
        if eqn.primitive.name in JIT and not _jax.is_unplaced(eqn):
            return True
        (inner,) = inner_jaxprs(eqn)
        return _row_loop(eqn) is not None or (len(inner.eqns) > _FEW and not has_loop(inner))

    return inline(jaxpr, calls=_CALLS, deep=False, unless=stays)


def _without_copies(jaxpr: Jaxpr) -> Jaxpr:
    """Read in the place of a stacked result the operand of which it has each element unchanged.

    `flax.nnx.scan` returns the weights of the layers so, inside a region where JAX does not see it.
    """
    same: dict[Var, Any] = {}
    read = lambda v: same.get(v, v) if isinstance(v, Var) else v
    eqns = []
    for eqn in jaxpr.eqns:
        eqn = eqn.replace(invars=[read(v) for v in eqn.invars]) if same.keys() & _variables(eqn) else eqn
        eqns.append(eqn)
        if eqn.primitive.name == "scan":
            num_constants, num_carry = _jax.scan_counts(eqn)
            body, _ = _jax.open_jaxpr(eqn.params["jaxpr"])
            for n, out in enumerate(eqn.outvars[num_carry:], num_carry):
                i = _input_of(body, body.outvars[n])
                if i is not None and i >= num_constants + num_carry and not _jax.is_dropped(out):
                    same[out] = eqn.invars[i]
    if not same:
        return jaxpr
    outvars = [read(v) for v in jaxpr.outvars]
    return _jax.without_dead_code(_jax.rebuild(jaxpr, invars=jaxpr.invars, outvars=outvars, eqns=eqns))


def _input_of(jaxpr: Jaxpr, v: Any) -> int | None:
    """The position of the input that a variable is, perhaps handed through calls; None for another value."""
    while isinstance(v, Var) and v not in jaxpr.invars:
        eqn = next(e for e in jaxpr.eqns if v in e.outvars)
        if eqn.primitive.name not in INLINED - {"statetx_loop"}:
            return None
        (inner,) = inner_jaxprs(eqn)
        i = _input_of(inner, inner.outvars[eqn.outvars.index(v)])
        if i is None:
            return None
        v = eqn.invars[i - len(inner.invars)]  # a call may have constants before its operands
    return jaxpr.invars.index(v) if isinstance(v, Var) else None


class _Consumers(NamedTuple):
    """The consumers of stacked results of one equation.

    Attributes:
        stacks: the results that only they read.
        eqns: the consumers, in order.
        stacked, whole: their operands from elsewhere, by how they are read.
        outvars: their results that others read.
        in_place: for some of these the stacked operand whose memory each takes.
    """

    stacks: list[Var]
    eqns: list[Any]
    stacked: list[Var]
    whole: list[Var]
    outvars: list[Var]
    in_place: dict[Var, Var]


class _Level:
    """The equations of one jaxpr while consumers move."""

    def __init__(self, jaxpr: Jaxpr, overwritable: Collection[int], shares_rows: bool, splits_sums: bool):
        self._jaxpr = jaxpr
        self._shares_rows, self._splits_sums = shares_rows, splits_sums
        self._kept_inputs = {v for i, v in enumerate(jaxpr.invars) if i not in overwritable}
        self._returned = {v for v in jaxpr.outvars if isinstance(v, Var)}
        self.stacks: list[Stack] = []
        self._set(list(jaxpr.eqns))

    def _set(self, eqns: list[Any]) -> None:
        self.eqns = eqns
        self._positions = {e: n for n, e in enumerate(eqns)}
        self._readers: dict[Var, list[Any]] = {}
        for eqn in eqns:
            for v in _variables(eqn):
                self._readers.setdefault(v, []).append(eqn)
        self._ancestors = functools.cache(self._find_ancestors)

    def _note(self, loop: Any, stacks: Sequence[Var], fate: Fate, reader: Any = None) -> None:
        self.stacks += [Stack(loop, num_bytes(v.aval), fate, reader) for v in stacks]

    def has(self, eqn: Any) -> bool:
        return eqn in self._positions

    def jaxpr(self) -> Jaxpr:
        return _jax.rebuild(self._jaxpr, invars=self._jaxpr.invars, outvars=self._jaxpr.outvars, eqns=self.eqns)

    def visit(self, eqn: Any) -> None:
        """Move the consumers of an equation into it, and do the same in its own jaxpr."""
        for length, outvars in _stacks_of(eqn).items():
            consumers = self._consumers(eqn, length, outvars)
            new = [] if consumers is None else self._moved(eqn, length, consumers)
            if consumers is not None and new:
                self._note(eqn, consumers.stacks, Fate.RELEASED)
                gone = {eqn, *consumers.eqns}
                before = [e for e in self.eqns[: self._positions[eqn]] if e not in gone]
                after = [e for e in self.eqns[self._positions[eqn] :] if e not in gone]
                self._set(in_order([*before, *new, *after]))
                eqn = next((e for e in new if e.primitive is eqn.primitive), None)
                if eqn is None:
                    return
        inside = self._inside(eqn)
        if inside is not eqn:
            self._set([inside if e is eqn else e for e in self.eqns])

    def _inside(self, eqn: Any) -> Any:
        """The equation, after the rewriting of its own jaxpr."""
        if eqn.primitive.name == "scan":
            num_constants, _ = _jax.scan_counts(eqn)
            overwritable: Collection[int] = range(num_constants, len(eqn.invars))
        elif eqn.primitive.name in REMAT:
            overwritable = [i for i, v in enumerate(eqn.invars) if isinstance(v, Var) and self._is_last(v, eqn, ())]
        else:
            return eqn
        (inner,) = inner_jaxprs(eqn)
        if inner.constvars or not has_loop(inner):
            return eqn
        options = {"shares_rows": self._shares_rows, "splits_sums": self._splits_sums}
        new, stacks = released(inner, overwritable, **options)
        self.stacks += stacks
        return _with_jaxpr(eqn, new)

    # -- what may move --

    def _consumers(self, loop: Any, length: int, outvars: Sequence[Var]) -> _Consumers | None:
        stacks = [v for v in outvars if v in self._readers or v in self._returned]
        while stacks:
            eqns = self._rowwise_users(loop, length, stacks)
            kept = [v for v in stacks if v in self._returned or self._reader(v, {*eqns}) is not None]
            if not kept:
                break
            for v in kept:
                reader = self._first_reader(v, {*eqns}) if v not in self._returned else None
                # What the loop's own forward pass hands to its backward pass is no gradient.
                if reader is None or reader.primitive.name not in _RUNS_LOOPS:
                    self._note(loop, [v], Fate.RETURNED if reader is None else Fate.READ, reader)
            stacks = [v for v in stacks if v not in kept]
        if not stacks:
            return None
        return self._described(loop, length, stacks, self._with_producers(loop, length, eqns))

    def _rowwise_users(self, loop: Any, length: int, stacks: Sequence[Var]) -> list[Any]:
        """The equations that treat rows alone of all that they need of the loop, which is rows of these results."""
        rows, others, eqns = {*stacks}, {*loop.outvars} - {*stacks}, []
        for eqn in self.eqns[self._positions[loop] + 1 :]:
            operands = _variables(eqn)
            if operands.isdisjoint(rows) and operands.isdisjoint(others) and not eqn.effects:
                continue
            found = rowwise(eqn, length) if operands.isdisjoint(others) else None
            if found is not None and rows.isdisjoint(_whole(eqn, found)):
                rows.update(eqn.outvars)
                eqns.append(eqn)
            else:
                others.update(eqn.outvars)
        return eqns

    def _first_reader(self, v: Var, rowwise_users: Collection[Any]) -> Any:
        """The first equation that reads several rows of the variable at once, or of what these users make of it."""
        derived = {v}
        for eqn in self.eqns:
            if not derived.isdisjoint(_variables(eqn)):
                if eqn not in rowwise_users:
                    return eqn
                derived.update(eqn.outvars)
        return None

    def _reader(self, v: Var, besides: Collection[Any]) -> Any:
        """An equation that reads the variable, other than these."""
        return next((e for e in self._readers.get(v, ()) if e not in besides), None)

    def _with_producers(self, loop: Any, length: int, consumers: list[Any]) -> list[Any]:
        """Add what computes, row by row, values that only the consumers read, such as the decay of a moment."""
        moving = {*consumers}
        for eqn in reversed(self.eqns):
            if eqn is loop or eqn in moving or not self._returned.isdisjoint(eqn.outvars):
                continue
            readers = [e for v in eqn.outvars for e in self._readers.get(v, ())]
            if readers and all(e in moving for e in readers) and rowwise(eqn, length) is not None:
                moving.add(eqn)
        return [e for e in self.eqns if e in moving]

    def _described(self, loop: Any, length: int, stacks: list[Var], eqns: list[Any]) -> _Consumers | None:
        """The consumers with their operands and results; None if they would not make the program smaller."""
        computed = {*stacks, *(v for e in eqns for v in e.outvars)}
        stacked: dict[Var, None] = {}
        whole: dict[Var, None] = {}
        for eqn in eqns:
            found = rowwise(eqn, length)
            assert found is not None
            whole |= dict.fromkeys(_whole(eqn, found))
            stacked |= dict.fromkeys(v for v in _variables(eqn) if v not in computed and v not in whole)
        moving = {*eqns}
        outvars = [v for e in eqns for v in e.outvars if v in self._returned or self._reader(v, moving) is not None]

        free = [v for v in stacked if self._is_last(v, loop, moving)]
        in_place: dict[Var, Var] = {}
        for out in outvars:
            operand = next((v for v in free if _is_same_type(v.aval, out.aval)), None)
            if operand is not None:
                free.remove(operand)
                in_place[out] = operand
        new = [v for v in outvars if v not in in_place and v not in self._returned]
        if sum(num_bytes(v.aval) for v in new) >= sum(num_bytes(v.aval) for v in stacks):
            reader = self._first_reader(stacks[0], moving)
            self._note(loop, stacks, Fate.REPLACED if reader is None else Fate.READ, reader)
            return None
        if not (self._shares_rows or _are_read_once(eqns, in_place)):
            self._note(loop, stacks, Fate.SHARED)
            return None
        return _Consumers(stacks, eqns, [*stacked], [*whole], outvars, in_place)

    def _is_last(self, v: Var, loop: Any, consumers: Collection[Any]) -> bool:
        """Whether the variable is read by the loop, its consumers, and before the loop; and may be overwritten."""
        if v in self._returned or v in self._kept_inputs:
            return False
        return all(e is loop or e in consumers or e in self._ancestors(loop) for e in self._readers.get(v, ()))

    def _find_ancestors(self, eqn: Any) -> set[Any]:
        """The equations that an equation needs."""
        needed, found = _variables(eqn), set()
        for e in reversed(self.eqns[: self._positions[eqn]]):
            if not needed.isdisjoint(e.outvars):
                found.add(e)
                needed |= _variables(e)
        return found

    # -- moving --

    def _moved(self, eqn: Any, length: int, consumers: _Consumers) -> list[Any]:
        """The equation with its consumers, and equations around it; none if it cannot take them in."""
        row_loop = _row_loop(eqn)
        if row_loop is not None:
            return _into_row_loop(eqn, row_loop, consumers)
        if eqn.primitive.name != "scan":
            return [_into_call(eqn, consumers)]
        views: dict[Var, Var] = {}  # from a reshaped stack to the one that it is made of
        for e in self.eqns:
            if e.primitive.name == "reshape" and isinstance(operand := e.invars[0], Var):
                views[e.outvars[0]] = views.get(operand, operand)
        return _into_scan(eqn, length, consumers, views)


def _variables(eqn: Any) -> set[Var]:
    return {v for v in eqn.invars if isinstance(v, Var)}


def _whole(eqn: Any, found: Any) -> list[Var]:
    """The operands that a rowwise equation does not read by rows."""
    return [v for v, s in zip(eqn.invars, found.is_stacked, strict=True) if not s and isinstance(v, Var)]


def _are_read_once(eqns: Sequence[Any], in_place: dict[Var, Var]) -> bool:
    """Whether one output alone is computed from the rows of each overwritten stack."""
    needed = {out: {out} for out in in_place}
    for variables in needed.values():
        for eqn in reversed(eqns):
            if not variables.isdisjoint(eqn.outvars):
                variables |= _variables(eqn)
    return all(sum(v in variables for variables in needed.values()) == 1 for v in in_place.values())


def _is_same_type(a: Any, b: Any) -> bool:
    return (a.shape, a.dtype, _jax.varying_axes(a)) == (b.shape, b.dtype, _jax.varying_axes(b))


# -- equations that take consumers in --------------------------------------------------------------------------------


def _stacks_of(eqn: Any) -> dict[int, list[Var]]:
    """The stacked results of an equation into which consumers may move, by the length of their loop."""
    found: dict[int, list[Var]] = {}
    if eqn.primitive.name == "scan":
        _, num_carry = _jax.scan_counts(eqn)
        # A number for each step, such as a loss, is not worth a carry.
        found[eqn.params["length"]] = [v for v in eqn.outvars[num_carry:] if len(v.aval.shape) > 1]
    elif (row_loop := _row_loop(eqn)) is not None:
        found[row_loop.length] = [v for v in eqn.outvars[-row_loop.num_stacks :] if len(v.aval.shape) > 1]
    elif eqn.primitive.name in REMAT:
        (inner,) = inner_jaxprs(eqn)
        lengths = {v: length for e in inner.eqns for length, outs in _stacks_of(e).items() for v in outs}
        for v, out in zip(inner.outvars, eqn.outvars, strict=True):
            if isinstance(v, Var) and v in lengths:
                found.setdefault(lengths[v], []).append(out)
    return {length: outs for length, outs in found.items() if length > 1}


def _with_jaxpr(eqn: Any, jaxpr: Jaxpr) -> Any:
    key = TABLE[eqn.primitive.name].jaxpr
    return eqn.replace(params={**eqn.params, key: _jax.closed_like(eqn.params[key], jaxpr)})


def _into_call(call: Any, consumers: _Consumers) -> Any:
    """Move consumers into a region; from there they move into its loop."""
    (inner,) = inner_jaxprs(call)
    # An operand that the region has already is the same input.
    inputs = {v: i for v, i in zip(call.invars, inner.invars, strict=True) if isinstance(v, Var)}
    operands = [v for v in (*consumers.stacked, *consumers.whole) if v not in inputs]
    inputs |= {v: Var(v.aval) for v in operands}
    values: dict[Any, Any] = inputs | dict(zip(call.outvars, inner.outvars, strict=True))
    eqns = list(inner.eqns)
    for eqn in consumers.eqns:
        outvars = [Var(v.aval) for v in eqn.outvars]
        eqns.append(
            eqn.replace(invars=[values.get(v, v) if isinstance(v, Var) else v for v in eqn.invars], outvars=outvars)
        )
        values |= dict(zip(eqn.outvars, outvars, strict=True))

    outvars = [*(v for v in call.outvars if v not in consumers.stacks), *consumers.outvars]
    jaxpr = _jax.rebuild(
        inner,
        invars=[*inner.invars, *(inputs[v] for v in operands)],
        outvars=[values[v] for v in outvars],
        eqns=eqns,
    )
    return _with_jaxpr(call, jaxpr).replace(invars=[*call.invars, *operands], outvars=outvars)


def _into_scan(scan: Any, length: int, consumers: _Consumers, views: dict[Var, Var]) -> list[Any]:
    """Move consumers into the body of a scan.

    Its constants get the whole operands and the stacks that are only read, its carry the stacks that are overwritten,
    and the number of the row.
    """
    body, consts = _jax.open_jaxpr(scan.params["jaxpr"])
    if consts:
        return []
    num_constants, num_carry = _jax.scan_counts(scan)
    first_x = num_constants + num_carry
    ys, targets = scan.outvars[num_carry:], list(consumers.in_place.values())
    kept = [n for n, v in enumerate(ys) if v not in consumers.stacks]
    added = [v for v in consumers.outvars if v not in consumers.in_place]

    # What the loop itself reads of an overwritten stack, it reads from the carry, where nothing has been written yet.
    base = lambda v: views.get(v, v)
    of_targets = {base(v): v for v in targets}
    sources = [of_targets.get(base(v)) if isinstance(v, Var) else None for v in scan.invars[first_x:]]
    xs = [v for v, source in zip(scan.invars[first_x:], sources, strict=True) if source is None]
    x_vars = body.invars[first_x:]
    x_avals: list[Any] = [v.aval for v in x_vars]
    read = [v for v in consumers.stacked if v not in targets]
    step = -1 if scan.params["reverse"] else 1

    def turn(*args: Any) -> list[Any]:
        remaining = iter(args)
        take = lambda like: [next(remaining) for _ in like]
        constants, whole, stacks = take(range(num_constants)), take(consumers.whole), take(read)
        carry, overwritten, index = take(range(num_carry)), take(targets), next(remaining)
        arrays = dict(zip([*read, *targets], [*stacks, *overwritten], strict=True))
        values = {v: _block(x, index, length) for v, x in arrays.items()}

        elements = [
            next(remaining) if source is None else values[source].reshape(aval.shape)
            for source, aval in zip(sources, x_avals, strict=True)
        ]
        outs = _jax.evaluate(body, (), [*constants, *carry, *elements])
        values |= dict(zip(consumers.whole, whole, strict=True))
        values |= {v: y[None] for v, y in zip(ys, outs[num_carry:], strict=True) if v in consumers.stacks}
        evaluate(consumers.eqns, length, values)
        pairs = consumers.in_place.items()
        overwritten = [_with_block(arrays[v], values[out], index, length) for out, v in pairs]
        kept_ys = [outs[num_carry + n] for n in kept]
        return [*outs[:num_carry], *overwritten, index + step, *kept_ys, *(values[v] for v in added)]

    number = _jax.abstract(np.int32(0))
    invars, remaining_xs = scan.invars, [v for v, source in zip(x_vars, sources, strict=True) if source is None]
    constants = [*invars[:num_constants], *consumers.whole, *read]
    variables = [*body.invars[:num_constants], *consumers.whole, *read, *body.invars[num_constants:first_x], *targets]
    avals = [*(v.aval for v in variables), number, *(v.aval for v in remaining_xs)]
    jaxpr, new_consts = _jax.stage(turn, avals, traced_for="scan", name="released")
    if new_consts:
        return []

    first = _jax.Literal(np.int32(0 if step > 0 else length - 1), number)
    carry = [*invars[num_constants:first_x], *targets, first]
    new = _jax.with_scan_operands(scan, _jax.close(jaxpr, ()), constants, carry, xs)
    stacked = new.outvars[len(carry) + len(kept) :]
    outvars = [*scan.outvars[:num_carry], *consumers.in_place, new.outvars[len(carry) - 1], *(ys[n] for n in kept)]
    flat = [e for v, out in zip(stacked, added, strict=True) for e in _reshaped(v, out, scan)]
    return [new.replace(outvars=[*outvars, *stacked]), *flat]


def _into_row_loop(eqn: Any, loop: RowLoop, consumers: _Consumers) -> list[Any]:
    """Move consumers to where a loop of statetx writes its rows: equations in the place of the loop's.

    The buffers are the stacks that are overwritten, and a stack for each other result.
    """
    targets = list(consumers.in_place.values())
    stacks = eqn.outvars[-loop.num_stacks :]
    # It reads its own operands at other times than it writes rows.
    if any(v in eqn.invars for v in targets) or len(targets) < len(consumers.outvars) or [*stacks] != consumers.stacks:
        return []
    read = [v for v in consumers.stacked if v not in targets]
    sources = list(dict.fromkeys(v for v in (*eqn.invars, *consumers.whole, *read) if isinstance(v, Var)))

    def run(*args: Any) -> list[Any]:
        arrays = dict(zip(sources, args, strict=False))
        operands = [arrays[v] if isinstance(v, Var) else v.val for v in eqn.invars]

        def write(buffers: list[Any], index: Any, rows: list[Any]) -> list[Any]:
            current = arrays | dict(zip(targets, buffers, strict=True))
            values = {v: current[v] for v in consumers.whole}
            values |= {v: _block(current[v], index, loop.length) for v in (*read, *targets)}
            values |= {v: row[None] for v, row in zip(stacks, rows, strict=True)}
            evaluate(consumers.eqns, loop.length, values)
            outs = consumers.in_place.items()
            return [_with_block(current[v], values[out], index, loop.length) for out, v in outs]

        return loop.run(operands, list(args[len(sources) :]), write)

    jaxpr, consts = _jax.stage(run, [v.aval for v in (*sources, *targets)], traced_for="scan", name="released")
    jaxpr, arrays = hoist(jaxpr, consts)
    if any(isinstance(x, _jax.Tracer) for x in arrays):
        return []
    outvars = [*eqn.outvars[: -loop.num_stacks], *consumers.in_place]
    outvars = [Var(v.aval) if _jax.is_dropped(v) else v for v in outvars]
    literals = [_jax.Literal(x, v.aval) for x, v in zip(arrays, jaxpr.invars, strict=False)]
    return _jax.spliced(jaxpr, [*literals, *sources, *targets], outvars, eqn)


def _block(x: Any, index: Any, length: int) -> Any:
    """The rows of a stack that belong to a turn of the loop."""
    num = x.shape[0] // length
    start = (index * num if num > 1 else index, *[0] * (x.ndim - 1))
    return jax.lax.dynamic_slice(x, start, (num, *x.shape[1:]), allow_negative_indices=False)


def _with_block(x: Any, block: Any, index: Any, length: int) -> Any:
    num = x.shape[0] // length
    start = (index * num if num > 1 else index, *[0] * (x.ndim - 1))
    return jax.lax.dynamic_update_slice(x, block.astype(x.dtype), start, allow_negative_indices=False)


def _reshaped(v: Var, out: Var, like: Any) -> list[Any]:
    """Equations that reshape one variable to another."""
    aval: Any = out.aval
    jaxpr, _ = _jax.stage(lambda x: [x.reshape(aval.shape)], [v.aval], traced_for="scan", name="released")
    return _jax.spliced(jaxpr, [v], [out], like)
