"""Limits of a search: `largest_within`, the largest size, or near it, by few measurements, on bytes of every shape that
programs have; the time that is left.
"""

import itertools
import math

import numpy as np
import pytest

from statetx._largest import largest_within
from statetx.planner._budget import TimeLeft

SIZES = range(1, 2**24 + 1)
SHAPES = {
    "affine": lambda n: 1000 + 37 * n,
    "bend": lambda n: 5000 + max(10 * n, 40 * n - 3000),
    "stairs": lambda n: 300 + 64 * -(-n // 8) * 8,
    "convex": lambda n: 100 + n * n // 50 + 3 * n,
}
LONGEST = {"affine": 4, "bend": 8, "stairs": 14, "convex": 14}


class Measure:
    """Bytes of sizes, each measured once."""

    def __init__(self, bytes_of):
        self.bytes_of, self.seen = bytes_of, []

    def __call__(self, size):
        assert size not in self.seen
        self.seen.append(size)
        return self.bytes_of(size)


@pytest.mark.parametrize("name", SHAPES)
def test_search_is_exact_and_short(name):
    bytes_of, rng = SHAPES[name], np.random.default_rng(0)
    for budget in map(int, rng.integers(bytes_of(1), 10**6, 50)):
        measure = Measure(bytes_of)
        size, measured = largest_within(budget, measure, SIZES, 32, {0: 0})
        assert bytes_of(size) <= budget < bytes_of(size + 1)
        assert measured == {n: bytes_of(n) for n in measure.seen} and {size, size + 1} <= measured.keys()
        assert len(measured) <= LONGEST[name], (budget, measured)


def test_line_through_known_points_needs_two_measurements_at_the_budget():
    measure = Measure(SHAPES["affine"])
    assert largest_within(10**6, measure, SIZES, 32, {0: 1000})[0] == 27000
    assert measure.seen == [32, 64 * 32, 27000, 27001]  # a guess is at most 64 times what was measured


@pytest.mark.parametrize("first", [1, 7, 40, 1000])
def test_no_size_fits(first):
    measure = Measure(SHAPES["affine"])
    size, measured = largest_within(1036, measure, range(1, 41), first, {0: 1000})
    assert size == 0 and measured[1] == 1037 and measure.seen[-1] == 1


@pytest.mark.parametrize("first", [1, 7, 40, 1000])
def test_every_size_fits(first):
    size, measured = largest_within(1000 + 37 * 40, Measure(SHAPES["affine"]), range(1, 41), first, {0: 1000})
    assert size == 40 and len(measured) <= 2 and max(measured) == 40


def test_sizes_are_any_ascending_numbers():
    sizes = [n for n in range(1, 361) if 360 % n == 0]
    for budget, first in itertools.product(range(1000, 15000, 370), (1, 50, 360)):
        measure = Measure(SHAPES["affine"])
        size, _ = largest_within(budget, measure, sizes, first, {0: 1000})
        assert size == max([n for n in sizes if SHAPES["affine"](n) <= budget], default=0)
        assert set(measure.seen) <= set(sizes) and len(measure.seen) <= 5
    assert largest_within(100, Measure(lambda n: n), [], 1, {0: 0}) == (0, {})


def test_known_size_counts_as_measured():
    """Slots of a loop: one takes the least, and is known to fit."""
    measure = Measure(lambda n: 500 + 100 * n)
    options = {"tolerance": 1 / 16, "is_enough": lambda num_bytes: num_bytes <= 2000}
    assert largest_within(2000, measure, range(1, 100), 15, {1: 600}, **options) == (15, {15: 2000})
    copies = Measure(lambda n: 500 + 100 * n + 300 * (n > 4))  # that the first guess does not know
    assert largest_within(2000, copies, range(1, 100), 15, {1: 600}, **options) == (12, {15: 2300, 12: 2000})
    above = Measure(lambda n: 600 if n == 1 else 3000)
    size, measured = largest_within(2000, above, range(1, 100), 15, {1: 600}, tries=6, **options)
    assert size == 1 and 1 not in measured and len(measured) <= 6


@pytest.mark.parametrize("tries", [1, 2, 3, 6])
def test_number_of_tries_is_limited(tries):
    measure = Measure(SHAPES["convex"])
    size, measured = largest_within(10**6, measure, SIZES, 32, {0: 0}, tries=tries)
    assert len(measure.seen) == tries and size == max([n for n in measured if measured[n] <= 10**6], default=0) > 0


@pytest.mark.parametrize("name", SHAPES)
def test_tolerance_ends_the_search_near_the_budget(name):
    bytes_of, rng = SHAPES[name], np.random.default_rng(1)
    for budget in map(int, rng.integers(bytes_of(1), 10**6, 50)):
        exact, _ = largest_within(budget, Measure(bytes_of), SIZES, 32, {0: 0})
        size, measured = largest_within(budget, Measure(bytes_of), SIZES, 32, {0: 0}, tolerance=0.03)
        assert bytes_of(size) <= budget
        assert bytes_of(size) > 0.97 * budget or (1.03**2 * size >= exact - 1)
        assert all(max(pair) > 1.03 * min(pair) for pair in itertools.combinations(measured, 2))
        assert len(measured) <= LONGEST[name] - 1


@pytest.mark.parametrize("seed", range(20))
def test_bytes_that_are_noisy_or_fall(seed):
    """The returned size keeps the budget, and the next larger measured one does not."""
    rng = np.random.default_rng(seed)
    noise = rng.integers(-400, 400, 2**12)
    for bytes_of in (lambda n: 1000 + 10 * n + int(noise[n % 2**12]), lambda n: int(9000 + 8000 * math.sin(n / 300))):
        budget = int(rng.integers(1500, 15000))
        measure = Measure(bytes_of)
        size, measured = largest_within(budget, measure, range(1, 2000), 700, {0: 0})
        assert size == 0 or measured[size] <= budget
        larger = [n for n in measured if n > size]
        assert size == 1999 or measured[min(larger)] > budget
        assert len(measured) <= 24


def test_is_enough_ends_the_search():
    measure = Measure(SHAPES["affine"])
    assert largest_within(5000, measure, SIZES, 300, {0: 0}, is_enough=lambda num_bytes: True) == (0, {300: 12100})
    size, measured = largest_within(5000, measure, SIZES, 50, {0: 0}, is_enough=lambda num_bytes: num_bytes <= 5000)
    assert size == 50 and list(measured) == [50]


def test_time_passes_only_while_a_search_runs(clock):
    left = TimeLeft(10)
    clock.append(100)
    assert not left.is_over()
    with left.running():
        clock.append(106)
        with left.running():
            clock.append(109)
        assert not left.is_over(), "counted once"
    clock.append(200)
    assert not left.is_over()
    with left.running():
        clock.append(200.9)
        assert not left.is_over()
        clock.append(201)
        assert left.is_over()
    assert left.is_over()


@pytest.mark.parametrize(("took", "seconds"), [(4, 16), (50, 10)])  # too long takes nothing from the next
def test_what_is_left_goes_to_the_next_search(clock, took, seconds):
    first, second = TimeLeft(10), TimeLeft(10)
    with first.running():
        clock.append(took)
    first.pass_on(second)
    with second.running():
        clock.append(took + seconds - 1)
        assert not second.is_over()
        clock.append(took + seconds)
        assert second.is_over()
    second.renew()
    assert not second.is_over()
    with second.running():
        clock.append(took + seconds + 10)
        assert second.is_over()


def test_no_limit(clock):
    left = TimeLeft(None)
    left.pass_on(TimeLeft(1))
    with left.running():
        clock.append(1e9)
        assert not left.is_over()
