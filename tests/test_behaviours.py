"""The behaviour table, for each kind of state."""

import behaviours
import pytest
from behaviours import ROWS
from kinds import KINDS


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.group}: {row.title}".replace(" ", "-"))
@pytest.mark.parametrize("dialect", KINDS, ids=lambda dialect: dialect.name)
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
