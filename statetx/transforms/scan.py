"""`scan`: a loop whose body reads and writes states.

The body is staged once. States that it reads become inputs; those that it also writes are carried with the loop,
the others are the same in every step. ``states=`` changes that for the states it names: `Carry` and `Broadcast` say
so explicitly, an axis gives each step its slice of the state and stacks what the steps write, `Split` gives each step
a key of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .. import _compat, _registry
from .._errors import CarryTypeError, StateAccessError, StateValueError
from .._jaxpr import Body, table
from .._lift import Input, Lifting, Outcome, frame_for, name_of, pack, stage
from .._paths import Paths, as_predicate
from .._registry import Effect, refuse_created
from .._tree import Partition, as_array, is_array_or_number, partition, type_str
from .._typing import Filter, PyTree


class _Mode:
    def __init__(self, name: str, doc: str):
        self._name = name
        self.__doc__ = doc

    def __repr__(self) -> str:
        return f"statetx.{self._name}"

    def __reduce__(self) -> str:
        return self._name


Carry = _Mode(
    "Carry",
    "In `scan(states=...)`: each step sees what the step before wrote; the default for written states.",
)
Broadcast = _Mode("Broadcast", "In `scan(states=...)`: each step sees the same value, and a write raises.")
Split = _Mode("Split", "In `scan(states=...)`: a random state gives each step a key of its own, and advances once.")


def scan(
    f: Callable[[Any, Any], tuple[Any, Any]],
    init: PyTree,
    xs: PyTree = None,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    *,
    states: Mapping[Filter, Any] | None = None,
) -> tuple[PyTree, PyTree]:
    """Run ``carry, y = f(carry, x)`` over the leading axis of `xs`; the body may read and write states.

    As ``jax.lax.scan``. The body's Python runs once (twice if the first carry is a Python number that the body turns
    into an array of another type); the compiled loop runs it `length` times. Each step sees the states as the step
    before left them, and after the loop they hold what the last step wrote.

    Args:
        f: the body, ``(carry, x) -> (carry, y)``.
        init: the first carry; a pytree of arrays and Python numbers.
        xs: a pytree of arrays with a leading axis of equal length, or None.
        length: number of steps; needed if `xs` has no arrays.
        reverse: whether to run from the last element to the first.
        unroll: number of steps in one iteration of the compiled loop, as in ``jax.lax.scan``.
        states: how the states that a filter selects take part: `Carry`, `Broadcast`, an axis (the state has one
            slice for each step along it; writes are stacked back), or `Split` for random states. Filters are tried
            in order; states that none selects are carried if written and broadcast if only read.

    Returns:
        ``(carry, ys)``: the last carry, and the outputs stacked along a new leading axis.

    State:
        Reads and writes what the body does. A carried state keeps shape, dtype, weak type and structure.

    Memory:
        Under reverse-mode differentiation each step keeps what its backward step needs: rematerialise the body
        (``statetx.remat``) to keep only what is carried.

    Raises:
        CarryTypeError: a step would change the type of a carried state.
        CreatedStateError: the body created a state that outlives the loop.
        StateAccessError: the body wrote a `Broadcast` state.

    Source:
        ``jax.lax.scan``.

    Example:
        >>> import jax.numpy as jnp, statetx
        >>> total = statetx.State(jnp.zeros(()))
        >>> def body(carry, x):
        ...     total.value += x
        ...     return carry + 1, total.value
        >>> statetx.scan(body, 0, jnp.arange(1.0, 4.0))
        (Array(3, dtype=int32, weak_type=True), Array([1., 3., 6.], dtype=float32))
        >>> float(total.value)
        6.0
    """
    if not callable(f):
        raise TypeError(f"scan needs a callable as the body, got {type(f).__name__}.")
    carry, carry_part = _flatten_carry(init)
    xs_leaves, xs_part = partition(xs, is_array_or_number)
    xs_leaves = [as_array(x) for x in xs_leaves]
    length = _resolve_length(xs_leaves, length)
    rules = _Rules(states, f)
    loop = _Loop(f, carry_part, xs_part, rules, length)
    x_avals = [_slice_aval(x, 0) for x in xs_leaves]
    staged = loop.stage([_compat.abstract(x) for x in carry], x_avals)
    promoted = loop.promote(carry)
    if promoted is not None:
        carry = promoted
        staged = loop.stage([_compat.abstract(x) for x in carry], x_avals)
    loop.check_carry(carry)
    return loop.run(staged, carry, xs_leaves, reverse=bool(reverse), unroll=unroll)


def _flatten_carry(init: PyTree) -> tuple[list, Partition]:
    leaves, part = partition(init, lambda x: is_array_or_number(x) or isinstance(x, bool))
    if part.static:
        raise StateValueError(
            f"scan: the carry holds a {type(part.static[0]).__name__}, which is no array. Close over it in the body."
        )
    return [as_array(x) for x in leaves], part


def _resolve_length(xs: Sequence[Any], length: int | None) -> int:
    lengths = []
    for x in xs:
        if jnp.ndim(x) == 0:
            raise ValueError(f"scan: xs holds a {type_str(x)}, which has no leading axis to loop over.")
        lengths.append(x.shape[0])
    if length is not None:
        length = int(length)
        if any(n != length for n in lengths):
            raise ValueError(f"scan: length={length} disagrees with the leading axes of xs, which are {lengths}.")
        return length
    if not lengths:
        raise ValueError("scan: give length=, or xs with at least one array.")
    if len(set(lengths)) > 1:
        raise ValueError(f"scan: the leading axes of xs have different lengths: {lengths}.")
    return lengths[0]


def _slice_aval(x: Any, axis: int) -> Any:
    """The type of ``x`` (an array or a type) without one axis."""
    aval = x if not isinstance(x, jax.Array) and hasattr(x, "weak_type") else _compat.abstract(x)
    return _compat.drop_axis(aval, axis)


class _Rules:
    """What ``states=`` says of each state."""

    def __init__(self, states: Mapping[Filter, Any] | None, f: Callable):
        self._rules: list[tuple[Callable, Any]] = []
        for filter, rule in (states or {}).items():
            is_axis = isinstance(rule, int) and not isinstance(rule, bool)
            if not (is_axis or isinstance(rule, _Mode)):
                raise StateValueError(
                    f"scan: states={{{filter!r}: {rule!r}}} is not understood. Give an axis (an int), statetx.Carry, "
                    f"statetx.Broadcast or statetx.Split."
                )
            self._rules.append((as_predicate(filter), rule))
        self._paths = Paths(f)
        self._found: dict[int, Any] = {}

    def __call__(self, state: Any) -> Any:
        """`Carry`, `Broadcast`, `Split`, an axis, or None where nothing is said."""
        if not self._rules:
            return None
        if id(state) not in self._found:
            path = self._paths(state)
            self._found[id(state)] = next((rule for keep, rule in self._rules if keep(path, state)), None)
        return self._found[id(state)]

    def path(self, state: Any) -> str:
        return self._paths(state)


class _Loop:
    """One call of `scan`; what stands below is known once the body has been staged.

    Attributes:
        lifting: the states that the body reads, as inputs.
        outcome: its output and the states that it writes.
        carry_out: structure of the carry that it returns, of `num_carry_out` leaves.
        carry_avals, out_avals: types of the carry as the body gets it, and of all that it returns.
    """

    lifting: Lifting
    outcome: Outcome
    carry_out: Partition
    num_carry_out: int
    num_x: int
    carry_avals: list[Any]
    out_avals: list[Any]

    def __init__(self, f: Callable, carry_part: Partition, xs_part: Partition, rules: _Rules, length: int):
        self.f = f
        self.carry_part = carry_part
        self.xs_part = xs_part
        self.rules = rules
        self.length = length

    def stage(self, carry_avals: Sequence[Any], x_avals: Sequence[Any]) -> Body:
        """Trace the body for a carry and an element of these types."""
        num_carry = len(carry_avals)
        self.lifting = lifting = Lifting(is_array_or_number, self._element_type)

        def body(*tracers: Any) -> tuple[list, Any]:
            with frame_for("scan", self.f, on_read=lifting.on_read, allow=None) as frame:
                carry = self.carry_part.combine(tracers[:num_carry])
                out = self.f(carry, self.xs_part.combine(tracers[num_carry:]))
                if not (isinstance(out, (tuple, list)) and len(out) == 2):
                    raise TypeError(
                        f"scan: the body {name_of(self.f)} must return a pair (carry, y), got {type(out).__name__}."
                    )
                # A state that is written but never read is carried too: its old value must be an input.
                for access in frame.accesses.values():
                    if access.written and id(access.state) not in lifting.inputs:
                        lifting.on_read(access.state, access.kind, access.before)
            refuse_created(frame.effects, frame.name)
            carry_out, y = out
            carry_leaves, self.carry_out = partition(carry_out, lambda x: is_array_or_number(x) or isinstance(x, bool))
            leaves, outcome = pack(y, frame.effects, lambda x: is_array_or_number(x) or isinstance(x, bool))
            self._refuse_objects(outcome)
            self.num_carry_out = len(carry_leaves)
            return [*carry_leaves, *leaves], outcome

        staged, self.outcome = stage(body, [*carry_avals, *x_avals], kind="scan", name=name_of(self.f), lifting=lifting)
        self.out_avals = [v.aval for v in staged.jaxpr.outvars]
        self.carry_avals, self.num_x = list(carry_avals), len(x_avals)
        return staged

    def _element_type(self, state: Any, aval: Any) -> Any:
        rule = self.rules(state)
        if isinstance(rule, int):
            if not -len(aval.shape) <= rule < len(aval.shape) or aval.shape[rule] != self.length:
                raise StateValueError(
                    f"scan: {_registry.describe(state, path=self.rules.path(state))} is mapped along axis {rule}, which "
                    f"must have the length of the loop, {self.length}."
                )
            return _compat.drop_axis(aval, rule)
        return aval

    def _refuse_objects(self, outcome: Outcome) -> None:
        if outcome.out.static:
            raise StateValueError(
                f"scan: an output of the body is a {type(outcome.out.static[0]).__name__}, which cannot be stacked. "
                f"Return arrays."
            )

    # -- types --

    def promote(self, carry: list) -> list | None:
        """A first carry with the body's types where it only had a weak type; None if there is nothing to change."""
        if len(carry) != self.num_carry_out:
            return None
        changed = False
        promoted = []
        for x, a, b in zip(carry, self.carry_avals, self.out_avals, strict=False):
            if a.weak_type and not b.weak_type and a.shape == b.shape:
                dtype = jnp.promote_types(a.dtype, b.dtype) if a.dtype != b.dtype else b.dtype
                if dtype == b.dtype:
                    x, changed = jax.lax.convert_element_type(x, b.dtype), True
            promoted.append(x)
        return promoted if changed else None

    def check_carry(self, carry: list) -> None:
        """Raise unless the carry, and each carried state, leaves a step with the type it entered with."""
        if self.carry_out.treedef != self.carry_part.treedef or len(carry) != self.num_carry_out:
            raise CarryTypeError(
                f"scan: the body {name_of(self.f)} must return a carry in the structure it was given,\n"
                f"  given:    {self.carry_part.treedef}\n  returned: {self.carry_out.treedef}"
            )
        for n, (a, b) in enumerate(zip(self.carry_avals, self.out_avals, strict=False)):
            if (a.shape, a.dtype) != (b.shape, b.dtype):
                keys = jax.tree_util.tree_flatten_with_path(self.carry_part.combine(range(len(carry))))[0]
                where = jax.tree_util.keystr(keys[n][0]) or "the carry"
                raise CarryTypeError(
                    f"scan: the body {name_of(self.f)} changes the type of the carry at {where}: it enters a step as "
                    f"{type_str(a)} and leaves it as {type_str(b)}.\nFix: convert it in the body, or start with the "
                    f"type that the body returns."
                )
        for effect, read, avals in self._carried():
            self._check_state(effect, read, avals)

    def _carried(self) -> list[tuple[Effect, Input, list]]:
        """Written states that are not stacked or split, with their types on entry and after a step."""
        start = self.num_carry_out + self.outcome.num_out
        found = []
        for effect, part in zip(self.outcome.effects, self.outcome.values, strict=True):
            avals = self.out_avals[start : start + part.num_dynamic]
            start += part.num_dynamic
            found.append((effect, self.lifting.inputs[id(effect.state)], avals))
        return found

    def _check_state(self, effect: Effect, read: Input, avals: list) -> None:
        position = self.outcome.effects.index(effect)
        part = self.outcome.values[position]
        same = part.treedef == read.part.treedef and part.mask == read.part.mask
        drift = next((p for p in zip(read.avals, avals, strict=True) if _drifts(*p)), None) if same else None
        if same and drift is None:
            return
        if drift is not None:
            before, after = type_str(drift[0]), type_str(drift[1])
        else:
            before, after = str(read.part.treedef), str(part.treedef)
        weak = " (~ marks a weak type, which is that of a Python number)" if "~" in before + after else ""
        path = self.rules.path(effect.state)
        raise CarryTypeError(
            f"scan: a step changes the type of {type(effect.state).__name__} {path!r}, made at {effect.kind.site_of(effect.state)}: "
            f"it enters as {before} and leaves as {after}{weak}, written at {effect.site}.\n"
            f"A carried state must keep its type, since one compiled body runs for every step.\n"
            f"Fix: create the state with the type that the body writes, or convert the value before writing it."
        )

    # -- running --

    def run(self, staged: Body, carry: list, xs: list, *, reverse: bool, unroll: Any) -> tuple[PyTree, PyTree]:
        written = {id(e.state): e for e in self.outcome.effects}
        plan = _Plan(self, staged, written)
        use = ("scan", self.length, reverse, unroll, plan.key)
        kept = table.get(plan.body, use, plan.builder(self.length, reverse, unroll))
        operands, states_in, mapped = plan.values()
        carry_out, states_out, ys, stacked = kept([*staged.operands, *operands], carry, states_in, xs, mapped)
        self.outcome.publish(plan.effect_leaves(states_out, stacked))
        return self.carry_part.combine(carry_out), self.outcome.out.combine(ys)


def _drifts(a: Any, b: Any) -> bool:
    # Strong to weak is no drift: the carry stays strong, and so does all that is computed from it.
    return (a.shape, a.dtype) != (b.shape, b.dtype) or (b.weak_type is False and a.weak_type is True)


class _Plan:
    """The body's inputs and outputs, sorted by how each takes part in the loop.

    Input order of the loop's body: operands and broadcast states, carry, carried states, x, mapped states. Output
    order: carry, carried states, y, mapped states.
    """

    def __init__(self, loop: _Loop, staged: Body, written: dict[int, Effect]):
        inputs = list(loop.lifting.inputs.values())
        self._inputs = inputs
        self.broadcast, self.carried, self.mapped = [], [], []
        for i in inputs:
            rule = loop.rules(i.state)
            effect = written.get(id(i.state))
            if isinstance(rule, int):
                self.mapped.append((i, rule))
            elif rule is Split:
                self.mapped.append((i, Split))
            elif effect is not None and rule is Broadcast:
                raise StateAccessError(
                    f"scan: {_registry.describe(i.state, i.kind, loop.rules.path(i.state))} is declared Broadcast and was "
                    f"written at {effect.site}.\nFix: declare it Carry, or give an axis to stack its writes along."
                )
            elif effect is not None or rule is Carry:
                self.carried.append(i)
            else:
                self.broadcast.append(i)
        self._loop = loop
        self._sort_outputs()
        self.body = self._reorder(staged)
        self.key = (
            len(self._broadcast_vars),
            self.num_carried,
            tuple(r if isinstance(r, int) else 0 for r in self._axes()),
        )

    def _sort_outputs(self) -> None:
        """Find, for each effect, its place among the outputs."""
        loop = self._loop
        places: dict[int, list[int]] = {}
        start = loop.num_carry_out + loop.outcome.num_out
        for effect, part in zip(loop.outcome.effects, loop.outcome.values, strict=True):
            places[id(effect.state)] = list(range(start, start + part.num_dynamic))
            start += part.num_dynamic
        self._places = places
        self._broadcast_vars = [v for i in self.broadcast for v in i.variables]
        self.num_carried = sum(len(i.variables) for i in self.carried)

    def _axes(self) -> list[Any]:
        return [rule for i, rule in self.mapped for _ in i.variables]

    def _reorder(self, staged: Body) -> Body:
        loop, jaxpr = self._loop, staged.jaxpr
        num_ops, num_carry, num_x = staged.num_operands, len(loop.carry_avals), loop.num_x
        base = num_ops + num_carry + num_x
        added = jaxpr.invars[base:]
        take = lambda inputs: [added[v] for i in inputs for v in i.variables]  # noqa: E731
        invars = [
            *jaxpr.invars[:num_ops],
            *take(self.broadcast),
            *jaxpr.invars[num_ops : num_ops + num_carry],
            *take(self.carried),
            *jaxpr.invars[num_ops + num_carry : base],
            *take([i for i, _ in self.mapped]),
        ]
        outs = jaxpr.outvars
        carried_out = []
        for i in self.carried:
            places = self._places.get(id(i.state))
            carried_out += [outs[p] for p in places] if places is not None else take([i])
        self._stacked = [i for i, rule in self.mapped if rule is not Split and id(i.state) in self._places]
        stacked_out = [outs[p] for i in self._stacked for p in self._places[id(i.state)]]
        ys = outs[loop.num_carry_out : loop.num_carry_out + loop.outcome.num_out]
        outvars = [*outs[: loop.num_carry_out], *carried_out, *ys, *stacked_out]
        return Body(_compat.rebuild(jaxpr, invars=invars, outvars=outvars), staged.operands)

    def builder(self, length: int, reverse: bool, unroll: Any) -> Callable[[Body], Callable]:
        num_carry, num_carried = self._loop.num_carry_out, self.num_carried
        num_ys = self._loop.outcome.num_out
        carry_avals = [*self._loop.carry_avals, *(a for i in self.carried for a in i.avals)]

        def build(body: Body) -> Callable:
            def loop(operands: list, carry: list, states: list, xs: list, mapped: list) -> tuple[list, ...]:
                def step(c: list, x: list) -> tuple[list, list]:
                    outs = body(operands, *c, *x)
                    n = num_carry + num_carried
                    return [_as_type(o, a) for o, a in zip(outs[:n], carry_avals, strict=True)], outs[n:]

                c, ys = jax.lax.scan(step, [*carry, *states], [*xs, *mapped], length, reverse, unroll)
                return c[:num_carry], c[num_carry:], ys[:num_ys], ys[num_ys:]

            # Compiled once for each structure where nothing is traced; inlined where something is.
            return jax.jit(loop, inline=True)

        return build

    def values(self) -> tuple[list, list, list]:
        """Broadcast, carried and mapped state values, as the loop takes them."""
        self._advanced: dict[int, Any] = {}
        mapped = []
        for i, rule in self.mapped:
            for x in i.values:
                if rule is Split:
                    keys = jax.random.split(x, self._loop.length + 1)
                    self._advanced[id(i.state)] = keys[0]
                    mapped.append(keys[1:])
                else:
                    mapped.append(jnp.moveaxis(x, rule, 0))
        take = lambda inputs: [x for i in inputs for x in i.values]  # noqa: E731
        return take(self.broadcast), take(self.carried), mapped

    def effect_leaves(self, carried: list, stacked: list) -> list:
        """The values that the loop leaves in the written states, in the order of the effects."""
        found: dict[int, list] = {}
        carried_, stacked_ = iter(carried), iter(stacked)
        for i in self.carried:
            found[id(i.state)] = [next(carried_) for _ in i.variables]
        axes = {id(i.state): rule for i, rule in self.mapped}
        for i in self._stacked:
            found[id(i.state)] = [jnp.moveaxis(next(stacked_), 0, axes[id(i.state)]) for _ in i.variables]
        for key, value in self._advanced.items():
            found[key] = [value]
        return [x for e in self._loop.outcome.effects for x in found[id(e.state)]]


def _as_type(x: Any, aval: Any) -> Any:
    now = _compat.abstract(x)
    return x if now.weak_type == aval.weak_type else _compat.with_weak_type(x, aval.weak_type)
