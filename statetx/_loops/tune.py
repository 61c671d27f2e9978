"""Loops whose strategy is decided by sizes: ``checkpoint="auto"``, `Budget`.

The strategy is decided when the gradient is built. A loop that is not differentiated stays plain, and is not measured.
When the gradient is built, every `jax.vmap` inside the derivative has mapped the loop's step (see `derivative`), and
each `vmap` around it is found among the active traces, so that all examples count. Where JAX stages the derivative
without the `vmap` around it (a jitted function, a loop or branch around), the strategy is part of the program when it
is mapped. A budget that is exceeded then raises.

Loops in loops are decided from the outermost in. ``"auto"`` counts what all steps keep, with the values of the loops in
them. A loop that stays plain keeps the values of its loops in every step, so these count so many times (`times`). In
a loop that stores carries they are there once, and may take what these carries take (`limit`).
"""

from __future__ import annotations

import bisect
import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from .. import _jax
from .._cached import cached_property
from .._equations.primitives import REMAT
from .._errors import PolicyError
from .._largest import largest_within
from .._lift.context import Map, TraceContext, device_bytes
from .._remat.parse import as_value_policy
from .._targets import current
from .._text import format_bytes, parse_bytes, type_str
from .._tree import has_known_sizes, is_float
from .._typing import Policy
from . import schedule
from .backward import BackwardStep
from .checkpointed import memory_for
from .derivative import DifferentiableLoop, Differentiated, floats_of, jvp_of, with_notice
from .linearized import ComposedLoop
from .offloaded import refuse_in_loops
from .step import LoopStep
from .strategy import Levels, Slots, Strategy

Diff = tuple[int, ...] | None  # the differentiated inputs of a loop; None for all floats
_SLACK = 2**10  # bytes of difference between the program around the loop and the loop's own
_SMALL = 2**22  # bytes that are not worth a second run of anything
_LEAST_GAIN = 2  # times fewer bytes, or a loop stays plain: a few steps may keep little more than their carries

_log = logging.getLogger("statetx")


@dataclasses.dataclass(frozen=True, repr=False)
class Budget(Strategy):
    """Recompute as little as fits in so many bytes.

    When the loop is differentiated, its gradient program is compiled, a few times the first time that a body of its
    structure is met, and the number of slots (see `Slots`) chosen so that its temporary memory is at most the budget. A
    plain loop that fits stays plain, and a loop that is not differentiated is not measured. On GPUs `Levels` are taken
    if they fit, since slots are slow there.

    Under ``vmap`` the budget holds for all examples together.

    Args:
        bytes: a number, or text such as ``"64MiB"``.
        policy: as in `Slots`.

    Memory:
        The budget bounds the bytes that XLA reserves for the gradient of the loop alone, beyond its inputs and outputs.

    Raises:
        PolicyError: at the call, the size is malformed. When the gradient is built, not even one slot fits; the message
            says how much one slot needs. Or the gradient was traced without a ``vmap`` that maps it later, as with
            ``vmap(grad(jit(f)))``, and exceeds the budget.

    Example:
        >>> from statetx import policies
        >>> policies.Budget("64MiB")
        Budget('64MiB')
    """

    bytes: int
    policy: Policy = dataclasses.field(default=None, kw_only=True)

    def __init__(self, bytes: int | str, *, policy: Policy = None):
        object.__setattr__(self, "bytes", parse_bytes(bytes))
        object.__setattr__(self, "policy", None if policy is None else as_value_policy(policy))

    def build(self, step: LoopStep) -> Callable:
        return Sized(step, self)

    def for_refs(self) -> Strategy:
        return Levels(2, policy=self.policy)


@dataclasses.dataclass(frozen=True, repr=False)
class Auto(Strategy):
    """``checkpoint="auto"``: slots by the sizes of the carry and of a step's residuals, chosen when the loop is
    differentiated; on GPUs `Levels`.

    Attributes:
        times: how many runs of the loop keep their values at a time, because of plain loops around it.
        limit: bytes that the loop may keep; None for `_SMALL`. In a loop that stores carries, the bytes of these.
    """

    times: int = 1
    limit: int | None = None

    def build(self, step: LoopStep) -> Callable:
        return Sized(step, self)

    @property
    def allowed(self) -> int:
        return (_SMALL if self.limit is None else self.limit) // self.times

    def for_refs(self) -> Strategy:
        return Levels(2)

    def for_layers(self, num: int, policy: Policy) -> Strategy:
        # A layer runs at most twice before its reversal, and once in it.
        return Slots(schedule.slots_for(num, 2), policy=policy)

    def with_policy(self, policy: Policy) -> Strategy:
        return self  # `for_layers` takes the policy

    def __repr__(self) -> str:
        return "'auto'"


class LoopOfLevels(ComposedLoop):
    """Nested loops in the place of slots."""

    def __init__(self, step: LoopStep, levels: Levels):
        super().__init__(step, levels.nested)
        self.levels = levels


class Sizes(NamedTuple):
    """Predicted bytes that a loop keeps for its gradient.

    Attributes:
        plain: by the plain loop.
        stored: with the chosen reversal, while its first step is reversed.
        step: the part of `stored` that one step takes.
    """

    plain: int
    stored: int
    step: int


class Sized(DifferentiableLoop):
    """A loop whose reversal is chosen by sizes."""

    keeps_steps = True  # if it stays plain

    def __init__(self, step: LoopStep, strategy: Auto | Budget):
        super().__init__(step)
        self.strategy = strategy
        self.sizes = Sizes(0, 0, 0)  # of "auto", once it has chosen
        plain_body = count_in_plain_loop(self.body, step.length)
        if isinstance(strategy, Auto) and strategy.times > 1:
            plain_body = refuse_in_loops(plain_body, step.name, in_loop=True)
        counting = step.with_body(plain_body)
        if counting.body.jaxpr is not self.body:
            self._plain = counting.plain()
        self._loops: dict[Slots | Levels | None, Callable] = {None: self._plain}
        self._chosen: dict[tuple[TraceContext, Diff], Slots | Levels | None] = {}
        self._bytes: dict[tuple[Slots | Levels | None, TraceContext, Diff], int] = {}

    def with_step(self, step: LoopStep) -> Sized:
        return Sized(step, self.strategy)

    def derivative(
        self, primals: tuple, tangents: dict[int, Any], *, is_linearized: bool
    ) -> tuple[tuple[list, list], list]:
        leaves, treedef = jax.tree.flatten(primals)
        chosen = self._choice(TraceContext.of(leaves), tuple(tangents))
        loop, primals = self._loop(chosen), treedef.unflatten(self._watched(leaves, chosen, tuple(tangents)))
        if isinstance(loop, DifferentiableLoop):
            return loop.derivative(primals, tangents, is_linearized=is_linearized)
        return jvp_of(loop, primals, tangents)

    def is_plain(self) -> bool:
        return self._choice(TraceContext(manual=_jax.enclosing_shard_map())) is None

    def plain_args(self, args: list, diff_indices: tuple[int, ...]) -> list | None:
        is_plain = self._choice(TraceContext.of(args), diff_indices) is None
        return self._watched(args, None, diff_indices) if is_plain else None

    def _watched(self, args: list, chosen: Slots | Levels | None, diff_indices: tuple[int, ...]) -> list:
        """The arguments of the loop, with a note if it is a loop of JAX's, which checks a budget."""
        loop = self if chosen is None else self._loop(chosen)
        if isinstance(self.strategy, Budget):
            return with_notice(args, _BudgetWatch.here(loop, diff_indices, sized=self, chosen=chosen))
        return args if isinstance(chosen, Slots) else with_notice(args, Differentiated.here(loop, diff_indices))

    def _choice(self, context: TraceContext, diff_indices: Diff = None) -> Slots | Levels | None:
        """Choose the reversal of the loop; None if it stays plain."""
        key = context, diff_indices
        if key not in self._chosen:
            choose = self._fit if isinstance(self.strategy, Budget) else self._choose
            self._chosen[key] = choose(context, diff_indices)
        return self._chosen[key]

    def _loop(self, chosen: Slots | Levels | None) -> Callable:
        if chosen not in self._loops:
            assert chosen is not None
            step = self._step_within(chosen)
            self._loops[chosen] = chosen.build(step) if isinstance(chosen, Slots) else LoopOfLevels(step, chosen)
        return self._loops[chosen]

    # -- "auto" --

    def _choose(self, context: TraceContext, diff_indices: Diff) -> Slots | Levels | None:
        """The fewest slots with no more runs than `schedule.slots_for` two runs ahead; None for a loop that keeps
        little, or would keep much also with them.

        With that many carries, and nothing else, each step runs at most three times: in the forward sweep, once more
        ahead of its reversal, and once for its residuals.
        """
        assert isinstance(self.strategy, Auto)
        measured, allowed = self.measured_step, self.strategy.allowed
        backward = _differentiated(measured, diff_indices)
        of_all = lambda avals: sum(map(device_bytes, avals)) * context.num_examples
        plain, has_sizes = measured.length * of_all(backward.plain_avals), all(map(has_known_sizes, measured.avals))
        if has_sizes and plain <= allowed:
            return None
        chosen = Levels(2) if _waits_for_loops() else _slots_for(measured, backward)
        times = self.strategy.times
        stored = _num_stored(chosen, self.length) * of_all([row.stored for row in measured.rows]) * times
        plain *= times
        if has_sizes and _LEAST_GAIN * (stored + of_all(backward.residual_avals)) > plain:
            return None

        # The same with the loops in the step as they will be.
        inner_before, step = auto_loops(measured.body.jaxpr), self._step_within(chosen)
        plain += sum(s.plain - (s.stored - s.step) for s in (x.sizes for x in inner_before)) * measured.length * times
        inner = auto_loops(step.body.jaxpr)
        of_step = of_all((_differentiated(step, diff_indices) if inner else backward).residual_avals)
        of_step += max([loop.sizes.step for loop in inner], default=0)
        self.sizes = Sizes(plain, stored + of_step, of_step)
        if self.strategy.limit is None:
            lengths = [*([times] if times > 1 else []), self.length, *([inner[0].length] if len(inner) == 1 else [])]
            self._say(chosen, lengths)
        return chosen

    @cached_property
    def measured_step(self) -> LoopStep:  # type: ignore[override]
        """The step with loops that are not logged: they are not yet decided."""
        return self._with_limit(self.strategy.allowed) if isinstance(self.strategy, Auto) else self.step

    def _with_limit(self, limit: int) -> LoopStep:
        """The step, with loops in it that may keep so many bytes."""
        return self.step.with_body(_with_auto(self.body, lambda _: Auto(limit=limit)))

    def _step_within(self, chosen: Slots | Levels) -> LoopStep:
        """The step of the loop with the chosen reversal."""
        if isinstance(self.strategy, Budget):
            return self.step
        carry = sum(device_bytes(row.stored) for row in self.step.rows)
        return self._with_limit(_num_stored(chosen, self.length) * carry)

    def _say(self, chosen: Slots | Levels, lengths: Sequence[int]) -> None:
        """Log the choice once for a loop in the source; `lengths` are of the loops around it and in it."""
        place, sizes = self.step.place or self.step.name, self.sizes
        if place in _said:
            return
        _said.add(place)
        _log.warning(
            '%s: checkpoint="auto": %s steps keep %s for the gradient; %r keeps %s (predicted).',
            place,
            " x ".join(map(str, lengths)),
            format_bytes(sizes.plain),
            chosen,
            format_bytes(sizes.stored),
        )

    # -- a number of bytes --

    def _fit(self, context: TraceContext, diff_indices: Diff) -> Slots | Levels | None:
        """The fewest runs of steps within the budget, as compiled, on GPUs without slots if that fits; None if the
        plain loop fits.
        """
        step, budget = self.step, self._budget
        symbolic = [type_str(aval) for aval in step.avals if not has_known_sizes(aval)]
        if symbolic:
            raise PolicyError(
                f"{step.name}: checkpoint={self.strategy!r} needs the sizes of the carry, and {symbolic[0]} has a "
                f"symbolic dimension.\n"
                f"Fix: give policies.Slots(n) or policies.Levels(n), or export with constant shapes."
            )
        fastest = [None, *([Levels(2), Levels(3)] if _waits_for_loops() else [])]
        for chosen in fastest:
            if self._temporary(chosen, context, diff_indices) <= budget:
                return chosen
        least = self._temporary(Slots(1), context, diff_indices)
        if least > budget:
            raise PolicyError(
                f"{step.name}: the gradient of this loop{_over(context)} needs {format_bytes(least + _SLACK)} with one "
                f"slot, more than the budget of {format_bytes(budget + _SLACK)}.\n"
                "Fix: allow that much; or let a step compute less: give policy=, or rematerialize in it."
            )

        # A linear model: bytes = least + (slots - 1) * carry, where a compiled program gives `least`. XLA adds copies
        # that no model knows: each choice is compiled. Without that check 9 of 17 budgets held.
        carry = max(1, sum(device_bytes(row.stored) for row in step.rows) * context.num_examples)
        num, _ = largest_within(
            budget,
            lambda num: self._temporary(Slots(num), context, diff_indices),
            range(1, step.length + 1),
            first=1 + (budget - least) // carry,
            known_bytes={0: least - carry},
            tries=6,
            tolerance=1 / 16,
            is_enough=lambda num_bytes: num_bytes <= budget,
        )
        return Slots(num or 1)

    @property
    def _budget(self) -> int:
        assert isinstance(self.strategy, Budget)
        return self.strategy.bytes - _SLACK

    def _temporary(self, chosen: Slots | Levels | None, context: TraceContext, diff_indices: Diff) -> int:
        key = chosen, context, diff_indices
        if key not in self._bytes:
            self._bytes[key] = temporary_bytes(self.step, self._loop(chosen), context, diff_indices)
        return self._bytes[key]

    def check(self, chosen: Slots | Levels | None, context: TraceContext, diff_indices: Diff) -> None:
        """Raise unless the budget is kept by a loop that has been mapped since its strategy was decided."""
        # Compiled for as many examples or more: that is enough.
        if any(
            key[0] == chosen and key[2] == diff_indices and _covers(key[1].maps, context.maps)
            for key, size in self._bytes.items()
            if size <= self._budget
        ):
            return
        needed = self._temporary(chosen, context, diff_indices)
        if needed > self._budget:
            raise PolicyError(
                f"{self.step.name}: checkpoint={self.strategy!r} is exceeded: the gradient of this "
                f"loop{_over(context)} needs {format_bytes(needed + _SLACK)}. It was traced without that vmap, by a "
                "jit, a loop or a rematerialized function, which trace once, so that the examples could not be "
                "counted.\n"
                "Fix: put jit outside of the vmap; or differentiate outside of it, as in grad(lambda x: "
                "vmap(f)(x).sum()); or give policies.Slots(n), which does not depend on sizes."
            )


@dataclasses.dataclass(frozen=True)
class _BudgetWatch(Differentiated):
    """Checks a budget whenever the gradient is mapped: `context` has its enclosing transforms so far."""

    sized: Sized
    chosen: Slots | Levels | None

    def __call__(self, axis: Any, is_mapped: Sequence[bool]) -> Differentiated:
        watch = super().__call__(axis, is_mapped)
        self.sized.check(self.chosen, watch.context, watch.diff_indices)
        return watch


_said: set[str] = set()  # the places of loops


def _slots_for(step: LoopStep, backward: BackwardStep) -> Slots:
    most = schedule.slots_for(step.length, 2)
    limit = schedule.num_evaluations(step.length, most)
    nums = range(1, most + 1)
    # Runs fall with slots.
    fits = lambda num: memory_for(num, step, backward)[1].num_runs <= limit
    return Slots(nums[bisect.bisect_left(nums, True, key=fits)])


def _num_stored(chosen: Slots | Levels, length: int) -> int:
    """How many carries are stored at a time."""
    return chosen.num if isinstance(chosen, Slots) else sum(chosen.lengths_for(length))


def _waits_for_loops() -> bool:
    """Whether XLA waits for the device before each turn of a loop of unknown length, as in a schedule of slots
    (decision 47).
    """
    return current.platform() == "gpu"


# -- maps around a loop ------------------------------------------------------------------------------------------


def _over(context: TraceContext) -> str:
    return f", mapped over {context.num_examples} examples," if context.maps else ""


def _covers(maps: Sequence[Map], needed: Sequence[Map]) -> bool:
    """Whether the first of `maps` map all that `needed` do, over as many examples or more."""
    return len(needed) <= len(maps) and all(
        axis.size >= needed_axis.size and all(a or not b for a, b in zip(is_mapped, is_needed, strict=True))
        for (axis, is_mapped), (needed_axis, is_needed) in zip(maps, needed, strict=False)
    )


# -- sizes -------------------------------------------------------------------------------------------------------


def temporary_bytes(step: LoopStep, loop: Callable, context: TraceContext, diff_indices: Diff) -> int:
    """Bytes that XLA reserves on a device for the gradient of a loop, beyond its inputs and outputs."""
    of_steps = lambda aval: _jax.stacked_type(aval, step.length)
    avals: list[Any] = [*step.constant_avals, *step.avals, *map(of_steps, step.x_avals)]
    floats = [i for i, a in enumerate(avals) if is_float(a)] if diff_indices is None else diff_indices
    ct_avals = [a for a in (*step.avals, *map(of_steps, step.y_avals)) if is_float(a)]

    def gradient(*inputs: Any) -> Any:
        leaves, cts = list(inputs[: len(avals)]), list(inputs[len(avals) :])
        run = lambda *xs: floats_of(loop, step.sort(leaves), dict(zip(floats, xs, strict=True)))
        outs, pull = jax.vjp(run, *[leaves[i] for i in floats])
        return outs, pull(cts)

    return context.program(gradient, [*avals, *ct_avals]).cost.temp_bytes


def _differentiated(step: LoopStep, diff_indices: Diff) -> BackwardStep:
    """The step in two parts."""
    if diff_indices is None:
        diff_indices = tuple([i for i, a in enumerate(step.in_avals) if is_float(a)])
    return BackwardStep(step, *step.sorted_indices(diff_indices))


# -- loops in loops ----------------------------------------------------------------------------------------------


def auto_loops(jaxpr: _jax.Jaxpr) -> list[Sized]:
    """The loops of ``"auto"`` in these equations, at any depth."""
    loops: list[Sized] = []

    def note(loop: Sized) -> Sized:
        loops.append(loop)
        return loop

    _map_auto(jaxpr, note)
    return loops


def count_in_plain_loop(jaxpr: _jax.Jaxpr, length: int) -> _jax.Jaxpr:
    """The body of a plain loop of so many steps, whose loops of ``"auto"`` count the values of all of them."""
    # A region keeps none of them.
    change = lambda auto: dataclasses.replace(auto, times=auto.times * length)
    return _with_auto(jaxpr, change, unless=lambda eqn: eqn.primitive.name in REMAT or _jax.loop_of(eqn) is not None)


def _with_auto(
    jaxpr: _jax.Jaxpr, change: Callable[[Auto], Auto], unless: Callable[[Any], bool] = lambda eqn: False
) -> _jax.Jaxpr:
    """Replace the strategies of the loops of ``"auto"``."""
    return _map_auto(jaxpr, lambda loop: Sized(loop.step, change(loop.strategy)), unless)  # type: ignore[arg-type]


def _map_auto(x: Any, change: Callable[[Sized], Sized], unless: Callable[[Any], bool] = lambda eqn: False) -> Any:
    """Replace the loops of ``"auto"`` in a jaxpr, closed or not, those in their steps first.

    Args:
        unless: of other equations, which stay.

    Returns:
        `x` itself if nothing changes.
    """

    def changed(eqn: Any) -> Any:
        loop = _jax.loop_of(eqn)
        if isinstance(loop, Sized) and isinstance(loop.strategy, Auto):
            body = _map_auto(loop.body, change, unless)
            new = change(loop if body is loop.body else loop.with_body(body))  # type: ignore[arg-type]
            return eqn if new is loop else _jax.with_loop(eqn, new)
        with _jax.in_shard_maps(eqn):
            return eqn if unless(eqn) else _jax.map_jaxprs(lambda inner: _map_auto(inner, change, unless), eqn)

    return _jax.map_equations(changed, x)
