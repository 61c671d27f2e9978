"""The behaviour table, for each kind of state."""

import pytest

import behaviours
from behaviours import ROWS, Bang
from kinds import KINDS


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.group}: {row.title}".replace(" ", "-"))
@pytest.mark.parametrize("dialect", KINDS, ids=lambda dialect: dialect.name)
def test_behaviour(dialect, row):
    wanted = behaviours.expected(dialect, row)
    actual = dialect.run(row)
    assert not behaviours.difference(actual, wanted)
    assert row.check is None or row.check(*actual)
