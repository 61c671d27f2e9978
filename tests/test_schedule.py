"""The schedule of checkpointed loops: its counts, against brute force and against the runs of the compiled nest of
loops.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import in_turn
from statetx._loops import schedule
from statetx._loops.rows import CarryRow, SlotMemory
from statetx._loops.schedule import Filled, Places, SplitTable, leaves, num_evaluations

RATIOS = [(1, 4), (1, 2), (1, 1), (3, 2), (2, 1), (3, 1), (5, 1)]
"""Bytes of a step's residuals over those of a carry: leaves of a step's residuals, and of a carry."""


def memory(slots, ratio):
    """SlotMemory in which a carry, and a step's residuals, have as many leaves as the ratio says."""
    if ratio is None:
        return SlotMemory(slots, [CarryRow(jax.typeof(jnp.int32(0)))])
    num_residuals, num_carries = ratio
    leaf = jax.typeof(jnp.int32(0))
    return SlotMemory(slots, [CarryRow(leaf)] * num_carries, [leaf] * num_residuals)


# -- counts ----------------------------------------------------------------------------------------------------------


@functools.cache
def fewest_runs_ahead(length, slots):
    """By trying every place for the next stored state."""
    if length <= 1:
        return 0
    if slots == 1:
        return length * (length - 1) // 2
    return min(m + fewest_runs_ahead(m, slots) + fewest_runs_ahead(length - m, slots - 1) for m in range(1, length))


def test_num_evaluations_equals_brute_force():
    for n, c in itertools.product(range(1, 41), range(1, 43)):
        assert num_evaluations(n, c) == fewest_runs_ahead(n + 1, c) + n
        assert schedule.schedule(n, leaves(c)).num_runs == num_evaluations(n, c)


@pytest.mark.parametrize(
    ("length", "slots", "runs_a_step"),
    [(1000, 5, 7.29), (1000, 10, 4.64), (1000, 20, 3.75), (1000, 50, 2.95), (10**6, 20, 7.82), (10**6, 1500, 3.00)],
)
def test_known_optima_of_carries(length, slots, runs_a_step):
    assert round(num_evaluations(length, slots) / length, 2) == runs_a_step
    assert schedule.schedule(length, leaves(slots)).num_runs == num_evaluations(length, slots)


@pytest.mark.parametrize(
    ("length", "slots", "ratio", "runs_a_step"),
    [
        (1000, 10, (1, 1), 3.925),
        (1000, 10, (2, 1), 4.374),
        (1000, 20, (1, 1), 2.829),
        (1000, 20, (3, 1), 3.309),
        (4096, 90, (1, 1), 2.0),
        (10**6, 20, (1, 1), 7.057),
    ],
)
def test_known_counts_with_residuals(length, slots, ratio, runs_a_step):
    num_residuals, num_carries = ratio
    plan = schedule.schedule(length, leaves(slots, num_carries, num_residuals))
    assert plan.num_runs / length == pytest.approx(runs_a_step, abs=6e-4)


def fewest_runs(length, leaves):
    """For each number of slots the fewest runs for loops of 0 to `length` steps: the exact dynamic program."""
    ahead = np.full((len(leaves), length + 1), 2**40)
    ahead[0, :2] = 0
    best = np.where(np.arange(length + 1) > 0, 2**40, 0)
    for s in range(1, len(leaves)):
        ahead[s, : leaves[s] + 1] = 0
        for n in range(leaves[s] + 1, length + 1):
            i = np.arange(1, n)
            ahead[s, n] = (i + ahead[s - 1, n - i] + ahead[s, i]).min()
        best = np.asarray([(best[n::-1] + ahead[s, : n + 1]).min() for n in range(length + 1)])
        yield best + 2 * np.arange(length + 1)


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("longest", [200, pytest.param(1000, marks=pytest.mark.slow)])
def test_counts_are_near_those_of_the_dynamic_program(ratio, longest):
    num_residuals, num_carries = ratio
    excesses = []
    most = leaves(40 if longest > 200 else 12, num_carries, num_residuals)
    for slots, fewest in enumerate(fewest_runs(longest, most), 1):
        for length in (*range(slots, 60, 1 if longest > 200 else 4), *range(60, longest + 1, 31)):
            plan = schedule.schedule(length, most[: slots + 1])
            assert plan.length == length
            assert fewest[length] <= plan.num_runs <= num_evaluations(length, slots), (length, slots)
            excesses.append(plan.num_runs / fewest[length] - 1)
    assert max(excesses) <= 0.03 and np.mean(excesses) <= 0.0005


def followed(splits, length, slots):
    """Runs ahead and leaves, by following every split."""

    @functools.cache
    def count(length, slots):
        advance = int(splits.split(length, slots))
        if advance == 0:
            return 0, 1
        first, rest = count(advance, slots), count(length - advance, slots - 1)
        return advance + first[0] + rest[0], first[1] + rest[1]

    return count(length, slots)


@pytest.mark.parametrize("ratio", RATIOS)
def test_counts_of_a_table_are_those_of_its_splits(ratio):
    num_residuals, num_carries = ratio
    for slots, length in [*itertools.product((1, 2, 5, 17, 40), (40, 97, 200)), (5, 641), (17, 641)]:
        for thresholds in (1, 8):
            splits = schedule.table(length, leaves(slots, num_carries, num_residuals), thresholds)
            plan = schedule._by_table(length, splits)
            counts = [followed(splits, n, slots - i) for i, n in enumerate(plan.segments)]
            assert (plan.num_ahead, plan.num_leaves) == tuple(map(sum, zip(*counts, strict=True))), (length, slots)


def test_splits_of_numbers_and_arrays_agree():
    splits = schedule.table(500, leaves(7, 1, 2), 8)
    on_device = jax.jit(jax.tree.map(jnp.asarray, splits).split)
    for length, slots in itertools.product((1, 2, 3, 17, 100, 333, 499), (1, 2, 5, 7)):
        assert int(on_device(length, slots)) == int(splits.split(length, slots)), (length, slots)


# -- the nest of loops -----------------------------------------------------------------------------------------------


class _Check:
    """The nest of loops for one memory: carries and residuals are numbers of steps, and must be found where they were
    stored.
    """

    def __init__(self, slots, ratio):
        self.slots = memory(slots, ratio)
        self._num_carries, self._num_residuals = (1, 0) if ratio is None else (ratio[1], ratio[0])
        self._reverse = jax.jit(self._run)

    def _places(self):
        def at_once(i, carry, result):
            is_right, next_step = result
            return is_right & (i == next_step) & functools.reduce(jnp.logical_and, [c == i for c in carry]), i - 1

        def keep(i, carry):
            return [c + 1 for c in carry], [carry[0] + 1000 * n for n in range(self._num_residuals)]

        def pull(i, residuals, result):
            is_right, next_step = result
            found = [r == i + 1000 * n for n, r in enumerate(residuals)]
            return functools.reduce(jnp.logical_and, found, is_right & (i == next_step)), i - 1

        advance = lambda first, end, carry: [end + 0 * c for c in carry]
        return Places(advance, at_once, *((keep, pull) if self._num_residuals else ()))

    def _run(self, length, filled, pools):
        (is_right, last), num_ahead = schedule.reverse_steps(
            length, filled, pools, [jnp.int32(0)] * self._num_carries, (True, length - 1), self._places(), self.slots
        )
        return is_right & (last == -1), num_ahead

    def num_runs(self, plan, longest):
        filled = Filled.by_schedule(plan, self.slots.num)
        filled = filled._replace(splits=padded(filled.splits, longest))
        pools = self.slots.make()
        for i, step in enumerate(plan.positions):
            pools = self.slots.write(pools, i, [jnp.int32(step)] * self._num_carries)
        is_right, num_ahead = self._reverse(plan.length, filled, pools)
        assert is_right, plan
        # The forward sweep, steps run ahead, and each step once where it is kept or differentiated at once.
        return 2 * plan.length + int(num_ahead)


def padded(splits, longest):
    """As many columns for every length, so that one program serves them all."""
    rows, before = splits
    more = max(0, longest - rows.shape[1])
    return SplitTable(jnp.pad(rows, ((0, 0), (0, more)), mode="edge"), jnp.pad(before, (0, more), mode="edge"))


def check_counts(slots, ratio, lengths):
    check = _Check(slots, ratio)
    for length in lengths:
        plan = schedule.schedule(length, check.slots.leaves)
        assert check.num_runs(plan, 256) == plan.num_runs, length


def test_leaves_of_memory_are_those_of_the_ratio():
    for ratio in RATIOS:
        assert memory(40, ratio).leaves == leaves(40, ratio[1], ratio[0])
    assert memory(40, None).leaves == leaves(40)


FEW = [(1, None), (5, None), (3, (1, 1)), (7, (3, 2)), (20, (1, 4)), (40, (5, 1))]


@pytest.mark.parametrize(("slots", "ratio"), in_turn(FEW))
def test_compiled_loops_run_the_body_as_often_as_the_table_says(slots, ratio):
    check_counts(slots, ratio, [*range(slots, 200, 11), 200])


@pytest.mark.slow
@pytest.mark.parametrize("slots", range(1, 41))
@pytest.mark.parametrize("ratio", [None, *RATIOS])
def test_compiled_loops_run_the_body_as_often_as_the_table_says_exhaustive(slots, ratio):
    check_counts(slots, ratio, range(slots, 201))


@pytest.mark.parametrize(
    ("length", "slots", "ratio"),
    [
        (4099, 7, None),
        (65_537, 20, (2, 1)),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((999_983, 20, (1, 1)), (10**6, 100, None))),
    ],
)
def test_compiled_loops_have_the_counts_of_long_schedules(length, slots, ratio):
    check_counts(slots, ratio, [length])


# -- where residuals are ---------------------------------------------------------------------------------------------


def test_residuals_of_other_shapes_fill_rows():
    carry = [jax.ShapeDtypeStruct(s, d) for s, d in (((4, 8), jnp.float32), ((4, 8), jnp.float32), ((), jnp.int32))]
    residuals = [jnp.arange(32.0).reshape(4, 8), jnp.arange(40.0).reshape(5, 8), jnp.arange(32).reshape(4, 8) % 3 == 0]
    slots = SlotMemory(
        6, [CarryRow(jax.typeof(jnp.zeros(a.shape, a.dtype))) for a in carry], [jax.typeof(x) for x in residuals]
    )
    # Rows of the floats: one, and three for 72 more entries. Of six slots, twelve rows: three steps, and the last one.
    assert slots.leaves == (1, 1, 2, 2, 3, 3, 4)
    stored = [jnp.ones((4, 8)), 2 * jnp.ones((4, 8)), jnp.int32(7)]
    pools = slots.write(slots.make(), 0, stored)
    for step in (0, 1):
        pools = slots.keep(pools, step, [residuals[0] + step, residuals[1] * step, residuals[2] ^ bool(step)])
    for step in (0, 1):
        first, second, third = slots.kept(pools, step)
        np.testing.assert_array_equal(first, residuals[0] + step)
        np.testing.assert_array_equal(second, residuals[1] * step)
        np.testing.assert_array_equal(third, residuals[2] ^ bool(step))
        assert third.dtype == bool
    a, b, n = slots.read(pools, 0, stored)
    assert (a.sum(), b.sum(), n) == (32, 64, 7)


def test_residuals_without_a_place_leave_carries_only():
    carry = jax.typeof(jnp.zeros((4, 8)))
    half, pairs = (jax.typeof(jnp.zeros((4, 8), dtype)) for dtype in (jnp.bfloat16, jnp.complex64))
    # The bits of two halves are a number of the carry's type, those of a complex number cannot be cast.
    assert SlotMemory(5, [CarryRow(carry)], [half]).leaves == (1, 2, 3, 4, 5, 6)
    assert SlotMemory(5, [CarryRow(carry)], [pairs]).leaves == (1,) * 6
    assert SlotMemory(5, [], [half]).leaves == (1,) * 6


def test_a_step_without_residuals_is_one_leaf():
    assert min(SlotMemory(3, [CarryRow(jax.typeof(jnp.zeros(3)))], []).leaves) > 10**6
