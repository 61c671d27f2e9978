"""``microbatch(fun, "fit", budget=...)``: how many parts, and what the program of a part saves."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax

from .. import _jax
from .._equations.compiled import Program, memory_analysis_options
from .._equations.differentiate import with_pullback
from .._errors import PlanError
from .._lift.batch import Batch
from .._lift.context import sharding_of
from .._lift.wrapper import name_of, short_name
from .._tables import Cell, Column, Table, Tabular
from .._text import format_bytes
from .._tree import is_array_or_type, is_float, num_bytes, partition
from ..transforms.abstract import eval_shape
from ..transforms.functionalize import Functionalize
from ..transforms.microbatch import without_new_states
from . import _store
from ._budget import TEMPORARIES, impossible_batch, read_amount, unit_question
from ._fields import PART, VERSION
from ._largest import largest
from .plan import Plan
from .planner import DEFAULT_TIME_LIMIT, Planner

_MAX_EXTRA_FLOPS = 0.02  # that a plan may add to save parts
_SECONDS = 20.0  # for a plan that saves parts; one without which nothing fits has the planner's own limit


@dataclasses.dataclass(frozen=True, repr=False)
class Fit(Tabular):
    """A number of parts for a budget; made by ``microbatch(fun, "fit", budget=...).fit(*args)``. Sizes in bytes, of one device.

    Attributes:
        name: of the function.
        num: the number of parts.
        size: examples in the largest part.
        fun: the function of a part: the user's, or with `plan` applied.
        plan: the `Plan` for a part; None if a part fits without.
        budget_bytes: the budget.
        total_bytes: what the compiled program takes: arguments, outputs and temporaries.
        tried: number of parts and bytes of each program that was compiled without a plan, the fewest parts first.
    """

    name: str
    num: int
    size: int
    fun: Callable[..., Any]
    plan: Plan | None
    budget_bytes: int
    total_bytes: int
    tried: tuple[tuple[int, int], ...]

    def _table(self) -> Table:
        parts = f"{self.num} part{'s' * (self.num > 1)} of {self.size} example{'s' * (self.size > 1)}"
        title = f"{self.name}: {parts}, {format_bytes(self.total_bytes)} of {format_bytes(self.budget_bytes)}."
        most = max(n for _, n in self.tried)
        rows = [
            [
                Cell(str(num)),
                Cell(format_bytes(n), share=n / max(most, 1)),
                Cell("yes" if n <= self.budget_bytes else "no"),
            ]
            for num, n in self.tried
        ]
        notes = []
        if self.plan is not None:
            notes = [
                ("Plan:", f"a part saves less, for {100 * self.plan.extra_flops:.1f}% added operations; see .plan.")
            ]
        return Table(title, [Column("parts", "right"), Column("bytes", "right"), Column("fits")], rows, notes)


def fit(
    micro: Any, budget: int | str, batch: Batch, args: tuple, kwargs: dict[str, Any], is_differentiated: bool
) -> Fit:
    """Choose the fewest parts whose compiled program keeps the budget.

    Of these programs, one with fewer parts and a plan is taken if the plan adds few operations; or if not even single examples fit.

    Args:
        micro: the `Microbatch`.
        batch: the batch of the call with `args` and `kwargs`.
        is_differentiated: whether an array among the arguments and the states that are touched is being differentiated.

    Raises:
        PlanError: nothing keeps the budget.
    """
    amount = read_amount(budget)
    if isinstance(amount, float):
        raise PlanError(f"microbatch: budget={budget!r} is a fraction.\nFix: give bytes, such as '2GiB', or 'device'.")
    search = _Search(micro, batch, args, kwargs, is_differentiated, amount)
    nums = _candidates(batch.size)
    sizes = [-(-batch.size // num) for num in nums]
    arguments = num_bytes([args, kwargs])
    found = largest(
        lambda i: search.peak_bytes(nums[i - 1]),
        amount,
        len(sizes),
        len(sizes),
        size=lambda i: float(sizes[i - 1]),
        bytes_at_zero=arguments,
    )
    tried = tuple(sorted((nums[i - 1], n) for i, n in found.tried.items()))
    num = nums[found.best - 1] if found.best else None
    name = short_name(name_of(micro.__wrapped__))
    planned = search.planned(num, amount)
    if planned is not None:
        num, fun, part_plan, total = planned
        return Fit(name, num, -(-batch.size // num), fun, part_plan, amount, total, tried)
    if num is None:
        least = min(n for _, n in tried)
        raise PlanError(
            f"microbatch({name}): the budget of {format_bytes(amount)} cannot be kept: parts of one example need {format_bytes(least)}.{unit_question(amount)}\n"
            f"Fix: allow that much, or rematerialize the blocks of the model.",
            smallest_bytes=least,
        )
    total = dict(tried)[num]
    return Fit(name, num, -(-batch.size // num), micro.__wrapped__, None, amount, total, tried)


def _candidates(size: int) -> list[int]:
    """Numbers of parts, the largest first: divisors, which need one loop only, unless they are far apart."""
    divisors = [n for n in range(size, 0, -1) if size % n == 0]
    if all(high <= 4 * low for high, low in itertools.pairwise(divisors)):
        return divisors
    part_sizes = sorted({-(-size // num) for num in range(1, size + 1)})
    return [-(-size // part_size) for part_size in part_sizes]


class _Search:
    """Compiles the candidates."""

    def __init__(
        self, micro: Any, batch: Batch, args: tuple, kwargs: dict[str, Any], is_differentiated: bool, budget: int
    ):
        self._micro = micro
        self._budget = budget
        self._batch = batch
        self._args, self._kwargs = args, kwargs
        self.peak_bytes = functools.cache(self._peak_bytes)
        part_args, part_kwargs = batch.arguments(batch.types(1))
        out = jax.tree.leaves(eval_shape(micro.__wrapped__, *part_args, **part_kwargs))
        is_scalar = len(out) == 1 and not out[0].shape and is_float(out[0])
        self._is_loss = is_scalar or is_differentiated

    def _peak_bytes(self, num: int, fun: Callable | None = None) -> int:
        """Of the function in so many parts; of its gradient with respect to float states and all but the batch if it is a loss."""
        micro = self._micro.with_num(num, fun)
        call = lambda *args, **kwargs: without_new_states(micro(*args, **kwargs))  # noqa: E731
        pure: Any = Functionalize(call, takes_refs=True)
        inputs = (pure.values(*self._args, **self._kwargs), self._args, self._kwargs)
        arrays, part = partition(inputs, is_array_or_type)
        mask = self._batch.mask()
        in_batch = [False] * (len(arrays) - len(mask)) + mask  # the values of states come first
        diff = [i for i, x in enumerate(arrays) if is_float(x) and not in_batch[i]] if self._is_loss else []

        def run(*arrays: Any) -> tuple[list, list]:
            values, args, kwargs = part.combine(arrays)
            out, new_values = pure(values, *args, **kwargs)
            written = [value for path, value in new_values.items() if value is not values[path]]
            floats, others = partition(out, is_float)
            return floats, partition([*others.static, written], is_array_or_type)[0]

        types = [_type(x) for x in arrays]
        with _jax.eval_context():
            program = Program(with_pullback(run, diff) if diff else run, types, memory_analysis_options())
        if program.least_bytes >= self._budget:
            raise impossible_batch(
                "microbatch", self._micro.__wrapped__, self._budget, program.least_bytes, "number of parts"
            )
        return _store.peak_bytes(program)

    def planned(self, num: int | None, budget: int) -> tuple[int, Callable, Plan, int] | None:
        """Fewer parts than `num` (None: no number fits) with a plan: the number, the planned function, the plan, and the bytes."""
        # All parts must have the size that the plan is for.
        divisors = [n for n in range(1, self._batch.size + 1) if self._batch.size % n == 0 and (num is None or n < num)]
        if not divisors:
            return None
        fewer = divisors[-1]
        fun, left = self._micro.__wrapped__, budget - self.peak_bytes(fewer)
        part_args, part_kwargs = self._batch.arguments(self._batch.types(self._batch.size // fewer))
        part_args, part_kwargs = jax.tree.map(_as_type, (part_args, part_kwargs))
        argnums = self._diff_argnums() if self._is_loss else None
        time_limit = DEFAULT_TIME_LIMIT if num is None else _SECONDS
        try:
            with _jax.eval_context():
                planner = Planner(
                    fun, *part_args, of=TEMPORARIES, argnums=argnums, time_limit=time_limit, **part_kwargs
                )
                part_plan = _plan_of_part(planner, left)
        except PlanError:
            return None
        if part_plan is None or (num is not None and part_plan.extra_flops > _MAX_EXTRA_FLOPS):
            return None
        planned = part_plan.apply(fun)
        total = self._peak_bytes(fewer, planned)
        return (fewer, planned, part_plan, total) if total <= budget else None

    def _diff_argnums(self) -> tuple[int, ...] | None:
        """The arguments besides the batch; None, for all, if there are no others."""
        others = [
            i for i, x in enumerate(self._args) if any(map(is_float, jax.tree.leaves(x))) and not self._batch.holds(i)
        ]
        return tuple(others) or None


def _plan_of_part(planner: Planner, left: int) -> Plan | None:
    """The plan for a part, where the loop without a plan leaves so many bytes of the budget, or exceeds it; None if there is none.

    The budget of the part is stored beside the plan, since it depends on what the part takes without one.
    """
    key = planner.key("part", left)
    fields = _store.load(key, PART)
    if fields is not None:
        with contextlib.suppress(PlanError):  # no plan keeps a budget that is not ours
            return None if fields["budget"] is None else planner.plan(fields["budget"])
    budget = _budget_of_part(planner, left)
    _store.save(key, {"version": VERSION, "budget": budget})
    return None if budget is None else planner.plan(budget)


def _budget_of_part(planner: Planner, left: int) -> int | None:
    """A budget for the temporaries of a part that a plan keeps; None if there is none."""
    # What the loop takes besides one part, arguments and outputs included, no plan changes.
    least, most = planner.ends()
    if most + left < least:
        return None
    try:
        return planner.plan(most + left).budget_bytes
    except PlanError:
        return None


def _type(x: Any) -> jax.ShapeDtypeStruct:
    aval = _jax.abstract(x)
    return jax.ShapeDtypeStruct(
        aval.shape, aval.dtype, sharding=sharding_of(x), weak_type=getattr(aval, "weak_type", False)
    )


def _as_type(x: Any) -> Any:
    """A tracer's type; other values as they are."""
    return _type(x) if isinstance(x, _jax.Tracer) else x
