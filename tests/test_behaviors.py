"""The behavior table, for each kind of state."""

import itertools

import behaviors
import pytest
from behaviors import ROWS
from kinds import KINDS


def _cells():
    """Every row with every kind; in the fast suite half of the kinds in turn, of the nestings, which take longest, one."""
    for (n, row), (k, dialect) in itertools.product(enumerate(ROWS), enumerate(KINDS)):
        is_slow = (n + k) % (len(KINDS) if row.group == "Nestings" else 2)
        name = f"{dialect.name}-{row.group}: {row.title}".replace(" ", "-")
        yield pytest.param(dialect, row, id=name, marks=pytest.mark.slow if is_slow else ())


@pytest.mark.parametrize("dialect, row", list(_cells()))
def test_behavior(dialect, row):
    if dialect.name in row.refused:
        error, message = row.refused[dialect.name]
        with pytest.raises(error, match=message):
            dialect.run(row)
        return
    wanted = behaviors.expected(dialect, row)
    actual = dialect.run(row)
    assert not behaviors.difference(actual, wanted)
    assert row.check is None or row.check(*actual)
