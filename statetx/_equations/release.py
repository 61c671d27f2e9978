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
import functools
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from .. import _jax
from .._jax import Jaxpr, Var
from .._targets import current
from .._tree import num_bytes
from .inline import inline
from .primitives import INLINED, JIT, LOOPS, REMAT, TABLE, inner_jaxprs
from .rowwise import evaluate, rowwise


class Stack(NamedTuple):
    """A stacked result of a loop that other equations read.

    Attributes:
        loop: the equation of the loop.
        num_bytes: its bytes.
        reader: an equation that needs several rows at once, or None.
        is_released: whether it no longer exists. If it does, and has no reader, the program returns it.
    """

    loop: Any
    num_bytes: int
    reader: Any
    is_released: bool


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
    """

    overwritable: tuple[int, ...]
    is_demanded: bool = False

    def __call__(self, jaxpr: Any) -> Any:
        return _jax.close(self.rewritten(jaxpr).jaxpr, ())

    def rewritten(self, jaxpr: Any) -> Released:
        opened, consts = _jax.open_jaxpr(jaxpr)
        assert not consts
        return released(opened, self.overwritable, shares_rows=self.is_demanded or current.platform() != "cpu")


def released(jaxpr: Jaxpr, overwritable: Collection[int], *, shares_rows: bool = True) -> Released:
    """Move the consumers of stacked results into the loops, at any depth of loops.

    Args:
        jaxpr: without constants.
        overwritable: the positions of inputs whose memory an output may take.
        shares_rows: whether several outputs may be computed from rows that are overwritten. XLA on CPUs computes each
            output by itself, and copies the stack for all but the last.
    """
    if not _has_loop(jaxpr):
        return Released(jaxpr, [])
    level = _Level(_flat(jaxpr), overwritable, shares_rows)
    for eqn in level.eqns[:]:
        if level.has(eqn):
            level.visit(eqn)
    return Released(level.jaxpr(), level.stacks)


def _has_loop(jaxpr: Jaxpr) -> bool:
    return any(eqn.primitive.name in LOOPS or any(map(_has_loop, inner_jaxprs(eqn))) for eqn in jaxpr.eqns)


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
        return len(inner.eqns) > _FEW and not _has_loop(inner)

    return inline(jaxpr, calls=_CALLS, deep=False, unless=stays)


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

    def __init__(self, jaxpr: Jaxpr, overwritable: Collection[int], shares_rows: bool):
        self._jaxpr = jaxpr
        self._shares_rows = shares_rows
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
                self.stacks += [Stack(eqn, num_bytes(v.aval), None, True) for v in consumers.stacks]
                gone = {eqn, *consumers.eqns}
                before = [e for e in self.eqns[: self._positions[eqn]] if e not in gone]
                after = [e for e in self.eqns[self._positions[eqn] :] if e not in gone]
                self._set(_sorted([*before, *new, *after]))
                eqn = next(e for e in new if e.primitive is eqn.primitive)
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
        if inner.constvars or not _has_loop(inner):
            return eqn
        new, stacks = released(inner, overwritable, shares_rows=self._shares_rows)
        self.stacks += stacks
        return _with_jaxpr(eqn, new)

    # -- what may move --

    def _consumers(self, loop: Any, length: int, outvars: Sequence[Var]) -> _Consumers | None:
        stacks = [v for v in outvars if v in self._readers or v in self._returned]
        while stacks:
            eqns, mixing = self._rowwise_users(loop, length, stacks)
            kept = [v for v in stacks if v in self._returned or self._reader(v, {*eqns}) is not None]
            if not kept:
                break
            # What the loop's own forward pass hands to its backward pass is no gradient.
            readers = {v: None if v in self._returned else mixing or self._reader(v, {*eqns}) for v in kept}
            is_residual = lambda v: any(e.primitive.name in _RUNS_LOOPS for e in self._readers.get(v, ()))
            self.stacks += [Stack(loop, num_bytes(v.aval), readers[v], False) for v in kept if not is_residual(v)]
            stacks = [v for v in stacks if v not in kept]
        if not stacks:
            return None
        return self._described(loop, length, stacks, self._with_producers(loop, length, eqns))

    def _rowwise_users(self, loop: Any, length: int, stacks: Sequence[Var]) -> tuple[list[Any], Any]:
        """The equations that treat rows alone of all that they need of the loop, which is rows of these results; and
        the first that mixes rows, or None.
        """
        rows, others, eqns, mixing = {*stacks}, {*loop.outvars} - {*stacks}, [], None
        for eqn in self.eqns[self._positions[loop] + 1 :]:
            operands = _variables(eqn)
            if operands.isdisjoint(rows) and operands.isdisjoint(others) and not eqn.effects:
                continue
            found = rowwise(eqn, length) if operands.isdisjoint(others) else None
            if found is not None and rows.isdisjoint(_whole(eqn, found)):
                rows.update(eqn.outvars)
                eqns.append(eqn)
            else:
                mixing = mixing or (None if operands.isdisjoint(rows) else eqn)
                others.update(eqn.outvars)
        return eqns, mixing

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
        is_smaller = sum(num_bytes(v.aval) for v in new) < sum(num_bytes(v.aval) for v in stacks)
        if not is_smaller or not (self._shares_rows or _are_read_once(eqns, in_place)):
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
        if eqn.primitive.name != "scan":
            return [_into_call(eqn, consumers)]
        views: dict[Var, Var] = {}  # from a reshaped stack to the one that it is made of
        for e in self.eqns:
            if e.primitive.name == "reshape" and isinstance(e.invars[0], Var):
                views[e.outvars[0]] = views.get(e.invars[0], e.invars[0])
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


def _sorted(eqns: list[Any]) -> list[Any]:
    """The equations in an order in which each comes after those that it needs, near to the given one."""
    producers = {v: e for e in eqns for v in e.outvars}
    done: dict[Any, None] = {}
    pending = eqns[::-1]
    while pending:
        eqn = pending[-1]
        needed = [] if eqn in done else [e for v in _variables(eqn) if (e := producers.get(v)) and e not in done]
        if needed:
            pending += needed
        else:
            done[pending.pop()] = None
    return list(done)


# -- equations that take consumers in --------------------------------------------------------------------------------


def _stacks_of(eqn: Any) -> dict[int, list[Var]]:
    """The stacked results of an equation into which consumers may move, by the length of their loop."""
    found: dict[int, list[Var]] = {}
    if eqn.primitive.name == "scan":
        _, num_carry = _jax.scan_counts(eqn)
        # A number for each step, such as a loss, is not worth a carry.
        found[eqn.params["length"]] = [v for v in eqn.outvars[num_carry:] if len(v.aval.shape) > 1]
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
            next(remaining) if source is None else values[source].reshape(v.aval.shape)
            for source, v in zip(sources, x_vars, strict=True)
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
    jaxpr, _ = _jax.stage(lambda x: [x.reshape(out.aval.shape)], [v.aval], traced_for="scan", name="released")
    return _jax.spliced(jaxpr, [v], [out], like)
