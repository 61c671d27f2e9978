"""The behavior table, for each kind of state."""

import itertools

import behaviors
import pytest
from behaviors import ROWS
from kinds import KINDS, Meaning
from laws import WORDS

import statetx


def _cells():
    """Every row with every kind; in the fast suite a third of the kinds in turn, of the nestings, which take longest,
    one.
    """
    for (n, row), (k, dialect) in itertools.product(enumerate(ROWS), enumerate(KINDS)):
        is_slow = (n + k) % (len(KINDS) if row.group == "Nestings" else 3)
        name = f"{dialect.name}-{row.group}: {row.title}".replace(" ", "-")
        yield pytest.param(dialect, row, id=name, marks=pytest.mark.slow if is_slow else ())


@pytest.mark.parametrize("dialect, row", list(_cells()))
def test_behavior(dialect, row):
    if dialect.name in row.refused:
        error, message = row.refused[dialect.name]
        with pytest.raises(error, match=message):
            dialect.run(row)
        return
    wanted = Meaning(dialect.library.name).run(row)
    actual = dialect.run(row)
    assert not behaviors.difference(actual, wanted)
    assert row.check is None or row.check(*actual)


STORED = [  # a third of them in the fast suite
    pytest.param(row, id=f"{row.group}: {row.title}", marks=pytest.mark.slow if n % 3 else ())
    for n, row in enumerate(row for row in ROWS if not row.policy)
]


@pytest.mark.sample
@pytest.mark.parametrize("row", STORED)
def test_behavior_of_residuals_stored_in_another_form(row, monkeypatch):
    dialect, remat = KINDS[0], KINDS[0].remat
    stored = {"policy": statetx.policies.everything.stored_as(WORDS), "inputs_stored_as": WORDS}
    monkeypatch.setattr(dialect, "remat", lambda fun, **options: remat(fun, **options, **stored), raising=False)
    actual, wanted = dialect.run(row), Meaning().run(row)
    assert not behaviors.difference(actual, wanted)


LOOPS = [row for row in ROWS if "scan" in row.title]


@pytest.mark.parametrize(
    "row",
    [pytest.param(row, id=row.title, marks=pytest.mark.slow if n not in (0, 5) else ()) for n, row in enumerate(LOOPS)],
)
def test_behavior_of_loops_reversed_from_slots(row, monkeypatch):
    """Two slots, which hold carries and what steps keep."""
    dialect = KINDS[0]

    def scan(model, f, carry, xs):
        return statetx.scan(lambda c, x: f(model, c, x), carry, xs, checkpoint=2)

    monkeypatch.setattr(dialect, "scan", scan, raising=False)
    actual, wanted = dialect.run(row), Meaning().run(row)
    assert not behaviors.difference(actual, wanted)
