"""`scan`: a loop whose body uses states.

The body is staged once. The states that it reads become inputs of the loop. By default a written state is carried and a
state that is only read is the same in every step. ``states=`` gives other rules: `Carry` and `Broadcast` declare this
explicitly, an axis gives each step its slice of the state and stacks the writes, `Split` gives each step a key of its
own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp

from .. import _jax, _states
from .._equations.structure import Body
from .._errors import StateAccessError
from .._frames import Effect
from .._lift.batch import common_length
from .._lift.carry import flatten_carry, leaf_names, settle
from .._lift.options import check_flags, check_whole
from .._lift.rules import Broadcast, Carry, Rules, Split
from .._lift.staged import Staged, sort_states
from .._lift.wrapper import check_callable
from .._loops import eager
from .._loops.build import make_loop, resolve_strategy
from .._loops.strategy import Strategy
from .._text import type_str
from .._tree import as_array, as_value, is_array, is_array_or_number, partition
from .._typing import Filter, PyTree

C = TypeVar("C")
X = TypeVar("X")
Y = TypeVar("Y")


@_jax.api_boundary
def scan(
    f: Callable[[C, X], tuple[C, Y]],
    init: C,
    xs: X | None = None,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    *,
    states: Mapping[Filter, Any] | None = None,
    checkpoint: Strategy | int | tuple[int, ...] | Literal["auto"] | None = None,
    progress: bool = False,
) -> tuple[C, Y]:
    """Run ``carry, y = f(carry, x)`` over the leading axis of `xs`; the body may read and write states.

    As ``jax.lax.scan``. The body's Python runs once, or twice if the carry or a state is a Python number that the body
    turns into an array of another dtype; the compiled loop runs it `length` times. Each step sees the writes of the
    previous step, and after the loop the states hold the values of the last step.

    Args:
        f: the body, ``(carry, x) -> (carry, y)``.
        init: the first carry; a pytree of arrays and Python numbers.
        xs: a pytree of arrays with a leading axis of equal length, or None. A ``jax.Ref`` among them is sliced, too: a
            step gets a Ref of its slice, and after the loop the Ref holds the slices that the steps wrote. Other states
            among them need a rule in `states`.
        length: number of steps; needed if `xs` has no arrays and no state that the body or `xs` holds has an axis.
        reverse: whether to run from the last element to the first.
        unroll: number of steps in one iteration of the compiled loop, as in ``jax.lax.scan``.
        states: from filters to rules for the states that they select: `Carry`, `Broadcast`, an axis (the state has one
            slice for each step along it; writes are stacked back), or `Split` for random states. Filters are tried
            in order. States that none selects are carried if written and broadcast if only read.
        checkpoint: how to store less for the gradient of the loop: one of ``policies.Slots``, ``Budget``, ``Levels`` or
            ``Lengths``; or for short a number of slots or a tuple of lengths; ``"auto"``
            measures and chooses. Results and gradients do not change. ``Truncated(k)`` stops gradients every k steps.
            Requires ``unroll=1``.
        progress: whether to show a progress bar (of rich) for the loop, and for its reversal if there is a schedule.
            Works in compiled programs; the loop reports about a hundred times.

    Returns:
        ``(carry, ys)``: the last carry, and the outputs stacked along a new leading axis.

    State:
        Reads and writes the same states as the body. A carried state keeps shape, dtype and structure. A leaf of a weak
        type, such as a Python number, is promoted as in the carry of ``jax.lax.scan``: ``State(0)`` is a float after
        the loop if the body adds a float, even if there are no steps.

    Memory:
        Under reverse-mode differentiation each step saves the residuals of its backward step: `length` times the
        residuals of the body. Rematerialize the body (``statetx.remat``) to save only the carries, or give `checkpoint`
        to save fewer of them.

    Raises:
        CarryTypeError: a step would change the type of the carry or of a carried state.
        CreatedStateError: the body created a state that outlives the loop.
        StateValueError: `xs` holds states that `states` gives no rule.
        StateAccessError: the body wrote a `Broadcast` state, or reaches a Ref in `xs` in another way, too.
        PolicyError: `checkpoint` cannot be met; a budget that is too small raises when the loop is differentiated.
        EffectError: the body calls a host callback with effects, and `checkpoint` would call it again.

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
    check_callable("scan", f, "a callable as the body", "the body comes first: scan(body, init, xs)")
    check_flags("scan", reverse=reverse, progress=progress)
    _check_known("unroll", unroll)
    if not isinstance(unroll, bool):
        unroll = _as_number("unroll", unroll)
    strategy = resolve_strategy("scan", checkpoint, unroll)
    carry, carry_part = flatten_carry("scan", init)
    xs_leaves, xs_part = partition(xs, lambda x: is_array_or_number(x) or _states.is_array_state(x))
    refs = {n: x for n, x in enumerate(xs_leaves) if _states.is_array_state(x)}
    ref_kinds: dict[int, Any] = {n: _states.kind_of_state(x) for n, x in refs.items()}
    xs_leaves = [ref_kinds[n].get(x) if n in refs else as_array(x) for n, x in enumerate(xs_leaves)]
    rules = Rules("scan", states, f, (Carry, Broadcast, Split))
    if xs_part.static:
        refuse_states(rules, xs, "scan(..., ")
    names = lambda: [f"xs{path}" for path in leaf_names(xs_part)]
    length = _resolve_length(xs_leaves, names, length, rules, xs_part.static)
    refuse_divided("scan", xs_leaves, names)
    if _jax.is_jit_disabled():
        if length:
            first = carry_part.combine([as_value(x) for x in carry])
            return eager.scan(f, first, xs, length, bool(reverse), rules, strategy and strategy.truncation)
        with jax.disable_jit(False):  # without a step, only staging finds the output types
            return scan(f, init, xs, length, states=states)
    x_avals = [_jax.element_type(_jax.abstract(x), length) for x in xs_leaves]

    def arguments(leaves: Sequence[Any]) -> tuple[tuple, dict[str, Any]]:
        return (carry_part.combine(leaves[: len(carry)]), xs_part.combine(leaves[len(carry) :])), {}

    def call(*leaves: Any) -> tuple[Any, Any, list]:
        x = [ref_kinds[n].new(leaf) if n in refs else leaf for n, leaf in enumerate(leaves[len(carry) :])]
        out = eager.as_pair(f(*arguments([*leaves[: len(carry)], *x])[0]), f)
        return *out, [ref_kinds[n].get(x[n]) for n in refs]

    def stage(carry: list, enter: Callable) -> Staged:
        avals = [*map(_jax.abstract, carry), *x_avals]
        slice = lambda state, aval: rules.slice_type(state, aval, length)
        return Staged("scan", f, avals, arguments=arguments, call=call, traced_for="scan", slice=slice, enter=enter)

    def is_carried(effect: Effect) -> bool:
        rule = rules(effect.state)
        return rule is None or rule is Carry or (rule is Broadcast and effect.kind.is_random(effect.state))

    body, carry, _ = settle(stage, carry, carry_part, is_carried=is_carried)
    loop = ScanLoop(body, len(carry), length, rules, _effects_on(refs.values(), body))
    rules.check_paths()
    carry, ys = loop.run(carry, xs_leaves, reverse=bool(reverse), unroll=unroll, strategy=strategy, progress=progress)
    return carry_part.combine(carry), body.outs[1].combine(ys)


def refuse_divided(name: str, leaves: Sequence[Any], names: Callable[[], Sequence[str]]) -> None:
    """Raise for an array that explicit axes of a mesh divide along the axis of the loop."""
    for n, x in enumerate(leaves):
        if _jax.is_divided_first(_jax.abstract(x)):
            raise ValueError(
                f"{name}: {names()[n]}, {jax.typeof(x)}, is divided along its first axis, whose elements the steps "
                f"take in turn.\nFix: divide it along another axis before the loop, by jax.reshard."
            )


def refuse_states(rules: Rules, xs: PyTree, call: str) -> None:
    """Raise if `xs` holds states without a rule. For the arguments see `Rules.refuse_unruled`."""
    for path, x in jax.tree_util.tree_flatten_with_path(xs, is_leaf=_states.is_opaque)[0]:
        if not is_array_or_number(x) and not _states.is_array_state(x):
            otherwise = "or close over them, if all steps share them"
            rules.refuse_unruled(f"xs{jax.tree_util.keystr(path)}", x, 0, call, otherwise)


def _effects_on(refs: Collection[Any], body: Staged) -> list[Effect]:
    """The effects of a loop on the states in `xs` (`jax.Ref`s): each step writes its slice."""
    for ref in refs:
        if id(ref) in body.inputs or sum(r is ref for r in refs) > 1:
            raise StateAccessError(
                f"scan: {_states.describe(ref, _states.kind_of_state(ref))} is given as xs and reached by the body "
                f"in another way, too. A step "
                f"would not know which of the two it writes.\nFix: use only the slice that the body receives."
            )
    return [Effect(ref, _states.kind_of_state(ref), None, _states.kind_of_state(ref).site_of(ref)) for ref in refs]


def _check_known(argument: str, value: Any) -> None:
    """Raise for a tracer in an argument that the structure of the program depends on."""
    if isinstance(value, _jax.Tracer):
        raise jax.errors.ConcretizationTypeError(
            value,
            f"scan: {argument}= must be known while the loop is traced.\n"
            "Fix: give a Python integer; in a jitted function, declare its argument in static_argnames.",
        )


def _as_number(argument: str, value: Any) -> int:
    """A number of steps, as JAX reads it: a float may be whole."""
    return check_whole("scan", f"{argument}=", int(value) if isinstance(value, float) and value.is_integer() else value)


def _resolve_length(
    xs: Sequence[Any], names: Callable[[], list[str]], length: int | None, rules: Rules, objects: Sequence[Any]
) -> int:
    if length is not None:
        _check_known("length", length)
        if is_array(length) and jnp.ndim(length):
            raise TypeError(
                f"scan: length= must be a whole number, got {type_str(length)}.\n"
                f"Fix: several arrays are one argument, a pytree: statetx.scan(body, init, (xs, ys))."
            )
        length = _as_number("length", length)
    size = common_length(
        "scan",
        xs,
        [None if _jax.is_hi_value(x) else 0 for x in xs],  # it has no length of its own
        names,
        lacking=_fix_of_lacking(xs),
        differing="give arrays of equal length, and close over the others in the body",
        option=None if length is None else ("length", length),
    )
    if size is None:
        size = rules.size_of_mapped(*objects)
    if size is None:
        raise ValueError(
            "scan: give length=, or xs with at least one array.\n"
            "Fix: xs comes third, after the first carry: statetx.scan(body, init, xs). A body "
            "without a carry is for statetx.map(f, xs)."
        )
    return size


def _fix_of_lacking(xs: Sequence[Any]) -> str:
    """What to do about a value in xs that has no axis."""
    if not all(isinstance(x, (int, float)) for x in xs):
        return "close over it in the body"
    if len(xs) == 1:
        return f"give a number of steps as statetx.scan(body, init, length={xs[0]})"
    return "a list of numbers is a tree of scalars: make it an array, jnp.asarray(xs)"


class ScanLoop:
    """A staged body, with its states sorted by their rules.

    Inputs of the loop body, in order: operands, broadcast and repeated states, carry, carried and repeated states, x,
    split and mapped states. Outputs, in order: carry, carried and repeated states, y, slices of the Refs in xs, mapped
    states that are written. A repeated state is an input twice: the body reads the constant, and the carry takes its
    last write.

    Args:
        refs: effects on the Refs in xs; their slices follow y among the outputs.
    """

    def __init__(self, body: Staged, num_carry: int, length: int, rules: Rules, refs: Sequence[Effect] = ()):
        self._staged = body
        self._refs = refs
        self._length = length
        self._num_carry = num_carry
        self._rules = rules
        states = sort_states(body, rules, "Carry, or give an axis to stack its writes along")
        self._broadcast, self._carried, self._split, self._mapped, states_by_rule = states
        self._repeated = [i for i, _ in states_by_rule]  # random states with the same draws in every step
        self._stacked = [(i, axis) for i, axis in self._mapped if id(i.state) in body.written]
        self._body = self._arrange()

    def _arrange(self) -> Body:
        staged = self._staged
        constants = [*staged.operand_vars, *self._broadcast, *self._repeated]
        last_writes = [_jax.Var(a) for i in self._repeated for a in i.avals]
        carry = [*staged.arg_vars[: self._num_carry], *self._carried, *last_writes]
        x = [*staged.arg_vars[self._num_carry :], *self._split, *(i for i, _ in self._mapped)]
        carry_out, ys = staged.out_vars[: self._num_carry], staged.out_vars[self._num_carry :]
        stacked = [i for i, _ in self._stacked]
        return staged.arrange([*constants, *carry, *x], [*carry_out, *self._carried, *self._repeated, *ys, *stacked])

    def run(self, carry: list, xs: list, **options: Any) -> tuple[list, list]:
        """Run the loop and publish its writes; returns the leaves of the last carry and of the outputs.

        `options`: see `make_loop`.
        """
        values = lambda inputs: [x for i in inputs for x in i.values]
        splits = [self._rules.split(i.state, i.kind, i.values, self._length) for i in self._split]
        mapped = [
            *(k for keys, _ in splits for k in keys),
            *(jnp.moveaxis(x, axis, 0) for i, axis in self._mapped for x in i.values),
        ]
        carried = values([*self._carried, *self._repeated])

        constants = [*self._staged.operands, *values(self._broadcast), *values(self._repeated)]
        num_carry = len(carry) + len(carried)
        loop = make_loop(self._staged, self._body, len(constants), num_carry, self._length, **options)
        carry, ys = loop(constants, [*carry, *carried], [*xs, *mapped])
        num_carry, num_stacked = self._num_carry, len(self._staged.out_vars) - self._num_carry
        advanced = [key for _, kept_keys in splits for key in kept_keys]
        self._publish(carry[num_carry:], ys[num_stacked:], advanced, ys[num_stacked - len(self._refs) :])
        return carry[:num_carry], ys[: num_stacked - len(self._refs)]

    def _publish(self, carried: list, stacked: list, advanced: list, slices: list) -> None:
        """Store the final values of the written states."""
        carried_leaves, stacked_leaves, advanced_keys = iter(carried), iter(stacked), iter(advanced)
        leaves: dict[int, list] = {}
        for i in (*self._carried, *self._repeated):
            leaves[id(i.state)] = [next(carried_leaves) for _ in i.values]
        for i, axis in self._stacked:
            written = self._staged.written_vars[id(i.state)]
            leaves[id(i.state)] = [jnp.moveaxis(next(stacked_leaves), 0, axis) for _ in written]
        leaves |= {id(i.state): [next(advanced_keys) for _ in i.values] for i in self._split}
        leaves |= {id(e.state): [x] for e, x in zip(self._refs, slices, strict=False)}
        self._staged.publish(leaves, self._refs, runs=self._length)
