"""``STATETX_DEBUG``: where states are touched, recorded where it is set and at no cost where it is not."""

import os
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

import statetx
from statetx import _frames, _jax, _states
from statetx._environment import flag

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


def test_source_locations_are_shown_for_every_kind(tmp_path):
    text = PAGE.read_text()
    script = re.search(r"```python\n(.*?)```", text, re.S)[1]
    expected = re.search(r"```text\n(.*?)```", text, re.S)[1]
    first = script.count("\n") + MORE[: MORE.index("    y =")].count("\n") + 1
    places = [(str(first), str(first + 1)), (str(first), str(first + 2))]
    assert run(script + MORE, tmp_path, STATETX_DEBUG="1") == f"{expected}{places}\n"


def test_edited_equations_are_type_checked(tmp_path):
    """In this suite, with the variable set, and not otherwise: JAX's check costs about as much as the edit."""
    jaxpr = jax.make_jaxpr(lambda x: jnp.sin(jnp.cos(x)))(1.0).jaxpr
    with pytest.raises(jax.errors.JaxprTypeError, match="not defined"):
        _jax.with_equations(jaxpr, jaxpr.eqns[1:])
    asked = "from statetx import _jax; print(_jax.check_edits())\n"
    assert run("import statetx\n" + asked, tmp_path, STATETX_DEBUG="1") == "True\n"
    assert run("import statetx\n" + asked, tmp_path, STATETX_DEBUG="false") == "False\n"


def test_words_that_switch_it_on_and_off(monkeypatch):
    for words, expected in ((("1", "True", "yes", " on "), True), (("", "0", "false", "No", "OFF"), False)):
        for word in words:
            monkeypatch.setenv("STATETX_DEBUG", word)
            assert flag("STATETX_DEBUG") is expected, word
    monkeypatch.delenv("STATETX_DEBUG")
    assert flag("STATETX_DEBUG") is False
    monkeypatch.setenv("STATETX_DEBUG", "flase")
    with pytest.raises(ValueError, match=r"STATETX_DEBUG='flase' is neither on \(1, true, yes, on\) nor off"):
        flag("STATETX_DEBUG")


@pytest.mark.skipif("STATETX_DEBUG" in os.environ, reason="this run records")
def test_nothing_is_recorded_by_default():
    assert _states.history is _states.no_history
    assert statetx.State.value.fget.__module__ == "statetx.kinds.native"
    assert _frames.Frame.touch.__module__ == "statetx._frames.frame"
