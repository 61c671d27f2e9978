"""The behaviour table, for each kind of state."""

import itertools

import behaviours
import pytest
from behaviours import ROWS
from kinds import KINDS


def _cells():
    """Every row with every kind; of the nestings, which take longest, one kind in turn in the fast suite."""
    for (n, row), (k, dialect) in itertools.product(enumerate(ROWS), enumerate(KINDS)):
        is_slow = row.group == "Nestings" and (n + k) % len(KINDS)
        name = f"{dialect.name}-{row.group}: {row.title}".replace(" ", "-")
        yield pytest.param(dialect, row, id=name, marks=pytest.mark.slow if is_slow else ())


@pytest.mark.parametrize("dialect, row", list(_cells()))
def test_behaviour(dialect, row):
    if dialect.name in row.refused:
        error, message = row.refused[dialect.name]
        with pytest.raises(error, match=message):
            dialect.run(row)
        return
    wanted = behaviours.expected(dialect, row)
    actual = dialect.run(row)
    assert not behaviours.difference(actual, wanted)
    assert row.check is None or row.check(*actual)
