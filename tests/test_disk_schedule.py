"""The schedule of carries in memory and on disk has the cost of H-Revolve."""

import functools
import heapq
import itertools

import pytest

from statetx._segments.schedule import DISK, MEMORY, Advance, Drop, Keep, Load, Reverse, TierSchedule, jump_in_memory

# Files, and the costs of a write and a read.
DISKS = (1, 1, 1), (2, 2, 2), (3, 5, 3), (4, 0.5, 0.25)
# For (segments, slots) the runs, writes and reads of `HRevolve(segments, slots, files, wd=write, rd=read)` of
# checkpoint_schedules 1.0.4, times their costs, for each of DISKS. Forward runs that save for the reverse step do not
# count: they are in the pull-backs.
ORACLE = {
    (3, 1): (3, 3, 3, 2.75),
    (3, 2): (2, 2, 2, 2.0),
    (3, 4): (2, 2, 2, 2.0),
    (8, 1): (17, 20, 24, 12.0),
    (8, 2): (13, 14, 14, 11.0),
    (8, 4): (10, 10, 10, 9.25),
    (17, 1): (55, 52, 62, 32.5),
    (17, 2): (39, 41, 46, 29.0),
    (17, 4): (29, 30, 30, 27.0),
    (33, 1): (154, 125, 135, 79.5),
    (33, 2): (101, 96, 105, 71.5),
    (33, 4): (74, 74, 78, 59.0),
    (60, 1): (390, 277, 276, 174.5),
    (60, 2): (240, 207, 211, 152.5),
    (60, 4): (160, 155, 163, 133.5),
}


def performed(schedule, lost=()):
    """Cost of what the schedule does, as `ORACLE` counts; the files `lost` cannot be read.

    Checks that each action is possible, and that slots and files suffice.
    """
    stored, tiers, at_hand, end, cost, lost = {}, {}, 0, schedule.length, 0.0, set(lost)
    for actions in (schedule.sweep(0, stored), schedule.reversal(schedule.length, stored)):
        for action in actions:
            match action:
                case Advance(first, last):
                    assert at_hand == first < last
                    cost, at_hand = cost + last - first, last
                case Keep(position, tier):
                    assert position == at_hand
                    cost += schedule.write * (tier == DISK)
                    tiers[position] = tier
                case Load(position) if position in lost:
                    del stored[position], tiers[position]
                    lost.remove(position)
                case Load(position):
                    # The turn of the last segment starts from the carry at hand.
                    cost += schedule.read * (tiers[position] == DISK and position != at_hand)
                    at_hand = position
                case Reverse(position):
                    assert position == at_hand == end - 1
                    end = position
                case Drop(position):
                    del tiers[position]
            assert list(tiers.values()).count(MEMORY) <= schedule.slots
            assert schedule.files is None or list(tiers.values()).count(DISK) <= schedule.files
    assert end == 0
    return cost - 1  # the last segment: a pull-back that runs before the loss needs no run of its own


@pytest.mark.parametrize("length, slots", ORACLE)
def test_cost_is_that_of_hrevolve(length, slots):
    schedules = [TierSchedule(length, slots, files, write, read) for files, write, read in DISKS]
    assert tuple(s.cost for s in schedules) == ORACLE[length, slots]
    assert tuple(map(performed, schedules)) == ORACLE[length, slots]


def least_cost(length, slots, files, write, read):
    """The least cost of all schedules, by Dijkstra's algorithm over what is at hand, in slots, in files, and left."""
    queue, seen, ties = [(0.0, 0, (0, frozenset(), frozenset(), length))], set(), itertools.count(1)
    while True:
        cost, _, state = heapq.heappop(queue)
        if state in seen:
            continue
        seen.add(state)
        hand, memory, disk, end = state
        if end == 0:
            return cost
        steps = [(0, (p, memory, disk, end)) for p in memory] + [(read, (p, memory, disk, end)) for p in disk]
        steps += [(0, (hand, memory - {p}, disk, end)) for p in memory]
        steps += [(0, (hand, memory, disk - {p}, end)) for p in disk]
        if hand is not None:
            steps += [(1, (hand + 1, memory, disk, end))] * (hand < end - 1)
            steps += [(0, (None, memory, disk, end - 1))] * (hand == end - 1)
            steps += [(0, (hand, memory | {hand}, disk, end))] * (len(memory) < slots)
            steps += [(write, (hand, memory, disk | {hand}, end))] * (len(disk) < files)
        for added, new in steps:
            heapq.heappush(queue, (cost + added, next(ties), new))


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("disk", DISKS, ids=str)
def test_no_schedule_costs_less(disk, slots):
    for length in range(1, 6):
        assert TierSchedule(length, slots, *disk).cost == least_cost(length, slots, *disk)


@functools.cache
def optimum(length, slots):
    if length == 1 or slots == 1:
        return length * (length - 1) // 2
    return min(j + optimum(length - j, slots - 1) + optimum(j, slots) for j in range(1, length))


def test_runs_in_memory_are_the_optimum():
    for slots in range(1, 6):
        for length in range(1, 40):
            assert TierSchedule(length, slots, 0, 1, 1).cost == optimum(length, slots)
            if length > 1 < slots:
                j = jump_in_memory(length, slots)
                assert j + optimum(length - j, slots - 1) + optimum(j, slots) == optimum(length, slots)


def test_files_that_are_worth_it_are_as_good_as_more():
    assert (
        TierSchedule(60, 2, None, 2, 2).cost == TierSchedule(60, 2, 59, 2, 2).cost < TierSchedule(60, 2, 2, 2, 2).cost
    )


@pytest.mark.parametrize("write", [0.25, 2, 9])
def test_files_beyond_those_that_are_used_cost_no_time(write):
    for length in (1, 7, 30, 60):
        enough = TierSchedule(length, 2, None, write, 1)
        num, stored = 0, {}
        for _ in itertools.chain(enough.sweep(0, stored), enough.reversal(length, stored)):
            num = max(num, list(stored.values()).count(DISK))
        assert enough._most_files() == num
        assert TierSchedule(length, 2, num, write, 1).files is None
        if num:
            assert TierSchedule(length, 2, num - 1, write, 1).files == num - 1


def test_a_loop_of_one_segment_stores_nothing():
    assert performed(TierSchedule(1, 8, None, 1, 1)) == 0


@pytest.mark.parametrize("lost", [[6], [3, 6, 9], range(1, 30)])
def test_carries_that_cannot_be_read_are_computed_again(lost):
    schedule = TierSchedule(30, 1, None, 0.25, 0.25)
    assert performed(schedule, lost) >= schedule.cost


def test_files_of_kills_leave_less_room_for_others():
    schedule = TierSchedule(60, 2, 18, 2, 1)
    assert schedule.files is None
    stored = {0: DISK, **dict.fromkeys(range(1, 12), DISK)}
    reversed_ = []
    for action in itertools.chain(schedule.sweep(11, stored), schedule.reversal(60, stored)):
        assert list(stored.values()).count(DISK) <= 18 and list(stored.values()).count(MEMORY) <= 2
        reversed_ += [action.position] if isinstance(action, Reverse) else []
    assert reversed_ == list(range(60))[::-1]


def test_a_sweep_resumes_from_files():
    schedule, stored = TierSchedule(20, 2, 3, 1, 1), {0: DISK, 4: DISK, 9: DISK}
    actions = [*schedule.sweep(9, stored), *schedule.reversal(20, stored)]
    assert actions[0] in (Keep(9, MEMORY), Advance(9, actions[0][-1]))
    assert [a.position for a in actions if isinstance(a, Reverse)] == list(range(20))[::-1]
    assert [a.position for a in actions if isinstance(a, Drop) and a.position in (4, 9)] == [9, 4]
