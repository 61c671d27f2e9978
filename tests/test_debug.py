"""``STATETX_DEBUG``: where states are touched, recorded where it is set and at no cost where it is not."""

import os
import pathlib
import re
import subprocess
import sys

import jax.numpy as jnp
import pytest
from libraries import LIBRARIES, get, put

import statetx
from statetx.kinds import debug

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "how-to" / "debug-and-profile.md"
MORE = """
import brainstate
from flax import nnx

b, v = brainstate.ShortTermState(jnp.ones(2)), nnx.Variable(jnp.ones(2))


def both(x):
    y = b.value * v[...]
    b.value = y * x
    v[...] = y
    return y


rows = list(statetx.trace_states(both)(2.0))
print([(r.read_at.split(":")[-1], r.written_at.split(":")[-1]) for r in rows])
"""


def run(script, folder, **env):
    (folder / "cell.py").write_text(script)
    root = str(PAGE.parents[2])
    done = subprocess.run(
        [sys.executable, "cell.py"],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": root, **env},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.replace(f"{folder}{os.sep}", "")


def test_reads_and_writes_have_places_of_their_own(monkeypatch):
    for owner, names in ((debug.Frame, ("touch", "mark_written", "note_write")), (statetx.State, ("value",))):
        for name in names:  # put back at the end
            monkeypatch.setattr(owner, name, getattr(owner, name))
    monkeypatch.setattr(debug._states, "history", None)
    debug.install()
    a, b = statetx.State(jnp.ones(())), statetx.State(jnp.ones(()))
    rows = statetx.trace_states(lambda x: setattr(a, "value", x) or b.value)(2.0)
    assert [(bool(row.read_at), bool(row.written_at)) for row in rows] == [(False, True), (True, False)]
    log = debug._states.history.__self__
    log._entries[id(b)] = lambda: None, {"read": "a line that read a dead state of this id"}
    b.value = b.value
    assert re.match(", last read at .*test_debug.py:.*, last written at .*test_debug.py:", log.describe(b))


@pytest.mark.slow
def test_source_locations_are_shown_for_every_kind(tmp_path):
    text = PAGE.read_text()
    script = re.search(r"```python\n(.*?)```", text, re.S)[1]
    expected = re.search(r"```text\n(.*?)```", text, re.S)[1]
    first = script.count("\n") + MORE[: MORE.index("    y =")].count("\n") + 1
    places = [(str(first), str(first + 1)), (str(first), str(first + 2))]
    assert run(script + MORE, tmp_path, STATETX_DEBUG="1") == f"{expected}{places}\n"


@pytest.mark.slow
def test_edited_equations_are_type_checked_if_it_is_set(tmp_path):
    asked = "from statetx import _jax; print(_jax.check_edits())\n"
    assert run("import statetx\n" + asked, tmp_path, STATETX_DEBUG="1") == "True\n"
    assert run("import statetx\n" + asked, tmp_path, STATETX_DEBUG="false") == "False\n"


@pytest.mark.skipif("STATETX_DEBUG" in os.environ, reason="this run records")
def test_nothing_is_recorded_by_default():
    states = [library.make(jnp.ones(2)) for library in LIBRARIES.values()]

    def both(x):
        for state in states:
            put(state, get(state) * x)

    rows = list(statetx.trace_states(both)(2.0))
    assert len(rows) == len(states) and all(row.read and not row.read_at for row in rows)
    assert statetx.State.value.fget.__module__ == "statetx.kinds.native"
