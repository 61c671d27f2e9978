"""Memory in tests: `assert_memory`, and `python -m statetx memory --save` and `--against`."""

import contextlib
import functools
import inspect
import json
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import statetx
from statetx.cli.main import main
from statetx.policies import Levels
from statetx.testing import assert_memory

DIM, BATCH, LAYERS = 32, 256, 6


def block(w, x):
    return jnp.sin(jnp.tanh(x @ w) @ w)


def copied(w, x):
    kept = jnp.concatenate([x, x], axis=1)  # a copy of twice the size, which the backward pass reads
    return block(w, x) + jnp.sin(kept)[:, :DIM] * jnp.sin(kept)[:, DIM:]


rematerialized = statetx.remat(block)


def loss(ws, x, layer=rematerialized):
    for w in ws:
        x = layer(w, x)
    return (x**2).mean()


LEVELS = Levels(2)


def recurrent(w, xs, checkpoint: Any = LEVELS):
    def cell(h, x):
        for _ in range(8):
            h = jnp.tanh(h @ w + x)
        return h, jnp.sum(h)

    return statetx.scan(cell, jnp.zeros(DIM), xs, checkpoint=checkpoint)[1].sum()


def step(ws, x, donate=(0,)):
    def update(ws, x):
        return jax.tree.map(lambda w, g: w - 0.1 * g, ws, jax.grad(loss)(ws, x))

    return jax.jit(update, donate_argnums=donate), (ws, x)


WS = [jax.ShapeDtypeStruct((DIM, DIM), jnp.float32)] * LAYERS
X = jax.ShapeDtypeStruct((BATCH, DIM), jnp.float32)
XS = jax.ShapeDtypeStruct((BATCH, DIM), jnp.float32)
TABLE = np.sin(np.arange(DIM * 16 * DIM, dtype=np.float32)).reshape(DIM, -1)


def capturing(ws, x):
    return loss(ws, x) + jnp.sin(x @ jnp.asarray(TABLE)).mean()


def step_with_more(ws, x):
    def update(ws, x):
        grads = jax.grad(loss)(ws, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, ws, grads), [jnp.sin(g) for g in grads]

    return jax.jit(update, donate_argnums=0), (ws, x)


def named(fun, name):
    """The same name, as after an edit."""
    wrapper = lambda *args: fun(*args)
    wrapper.__signature__ = inspect.signature(fun)
    wrapper.__name__ = wrapper.__qualname__ = name
    return wrapper


BEFORE = {"loss": (loss, (WS, X)), "recurrent": (recurrent, (WS[0], XS)), "step": step(WS, X)}
REGRESSIONS = {
    "a dropped remat": ("loss", functools.partial(loss, layer=block), (WS, X), r"residuals of .* \(block\)"),
    "a policy that saves all": (
        "loss",
        functools.partial(loss, layer=statetx.remat(block, policy="everything")),
        (WS, X),
        r"residuals of .* \(block\)",
    ),
    "a copy of twice the size": ("loss", functools.partial(loss, layer=copied), (WS, X), r"\(copied\)"),
    "a batch doubled": ("loss", loss, (WS, jax.ShapeDtypeStruct((2 * BATCH, DIM), jnp.float32)), r"the argument x"),
    "a constant captured": ("loss", capturing, (WS, X), r"the constant .*test_memory_baseline.py:\d+"),
    "a loop without its strategy": (
        "recurrent",
        functools.partial(recurrent, checkpoint=None),
        (WS[0], XS),
        r"residuals of .*test_memory_baseline.py:\d+ \(recurrent",
    ),
    "another output": ("step", *step_with_more(WS, X), r"the output .*test_memory_baseline.py:\d+ \(step_with_more"),
    "an argument no longer donated": (
        "step",
        *step(WS, X, donate=()),
        "Of the outputs, 0 B take the memory of donated arguments, and 24.0 KiB did before",
    ),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("memory") / "memory.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STATETX_UPDATE_MEMORY", "1")
        for name, (fun, args) in BEFORE.items():
            assert_memory(fun if name == "step" else named(fun, name), *args, against=path)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("name", BEFORE)
def test_unchanged_program_passes_and_a_size_below_its_peak_fails(saved, name):
    fun, args = BEFORE[name]
    fun = fun if name == "step" else named(fun, name)
    assert_memory(fun, *args, against=saved, tolerance=0)
    peak = statetx.memory_profile(fun, *args).peak_bytes
    assert_memory(fun, *args, at_most=peak)
    with pytest.raises(
        AssertionError, match=rf"{name if name != 'step' else 'update'} on cpu takes .*, 1 B more than .*\n  \w+"
    ):
        assert_memory(fun, *args, at_most=peak - 1)


@pytest.mark.sample
@pytest.mark.parametrize("name", REGRESSIONS)
def test_planted_regression_is_named_by_owner_and_line(saved, name):
    program, fun, args, pattern = REGRESSIONS[name]
    fun = fun if program == "step" else named(fun, program)
    with pytest.raises(AssertionError) as error:
        assert_memory(fun, *args, against=saved)
    first, _, *grown = str(error.value).splitlines()
    assert re.search(
        r"takes [\d.]+ [KM]iB at the peak.*, and took [\d.]+ [KM]iB \(\+[\d.]+%\); 1% more is allowed", first
    )
    assert any(re.search(pattern, line) for line in grown[:3]), str(error.value)


def test_renamed_variables_and_another_order_are_no_difference(saved):
    def loss(ws, x):
        total, renamed = 0.0, x
        for weight in ws:
            renamed = rematerialized(weight, renamed)
        return total + (renamed**2).mean()

    assert_memory(named(loss, "loss"), WS, X, against=saved)


def test_message_names_versions_that_changed(saved, tmp_path):
    path, fields = tmp_path / "memory.json", json.loads(saved.read_text())
    program = fields["programs"]["loss on cpu"]
    program["versions"]["jax"] = "0.1"
    program["peak_bytes"] -= 1
    program["temp_bytes"] -= 1
    path.write_text(json.dumps(fields))
    assert_memory(named(loss, "loss"), WS, X, against=path)
    with pytest.raises(AssertionError, match=r"Versions: jax 0\.1 before, .* now\."):
        assert_memory(named(loss, "loss"), WS, X, against=path, tolerance=0)


@pytest.mark.sample
@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not a file of memory baselines"),
        ('{"version": 1, "programs": {"loss on cpu": {}}}', r"baselines: programs\.'loss on cpu'\.device is missing"),
        ('{"version": 2, "programs": {}}', "version must be one of 1"),
        ('{"version": 1, "programs": {}}', "has no program 'loss on cpu'; it has none"),
        ("", "is not a file of memory baselines"),
        ("[]", "is not a file of memory baselines"),
        ("\x89PNG\x00", "is not a file of memory baselines"),
        ("[" * 100_000, "is not a file of memory baselines"),
        ('{"version": 1, "programs": {"a": NaN}}', "is not a file of memory baselines"),
        ('{"created_by": "statetx.plan"}', "is not a file of memory baselines: version is missing"),
    ],
)
def test_damaged_or_foreign_file_is_refused(tmp_path, content, message):
    path = tmp_path / "memory.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        assert_memory(named(loss, "loss"), WS, X, against=path)
    assert path.read_text() == content


@pytest.mark.sample
@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"loss on cpu"', '"loss on h100"', "has no program 'loss on cpu'; it has loss on h100, recurrent on cpu"),
        (
            '"loss on cpu"',
            '"evaluate on cpu"',
            "has no program 'loss on cpu'; it has evaluate on cpu, recurrent on cpu",
        ),
        ('"peak_bytes": ', '"peak_bytes": -', r"baselines: programs\.'loss on cpu'\.peak_bytes must be"),
        ('"residual"', '"leftover"', r"baselines: programs\.'loss on cpu'\.parts\[\d\]\[0\] must be one of"),
        ('"device": "cpu"', '"device": 3', r"baselines: programs\.'loss on cpu'\.device must be"),
    ],
    ids=["another target", "another program", "a negative size", "an unknown role", "a number for a device"],
)
def test_a_record_of_another_program_or_a_changed_one_is_refused(saved, tmp_path, old, new, message):
    path = tmp_path / "memory.json"
    path.write_text(saved.read_text().replace(old, new))
    with pytest.raises((ValueError, FileNotFoundError), match=message) as error:
        assert_memory(named(loss, "loss"), WS, X, against=path)
    assert "\nFix: " in str(error.value)


def test_bad_arguments_are_refused(tmp_path):
    with pytest.raises(ValueError, match="nothing to compare with"):
        assert_memory(loss, WS, X)
    with pytest.raises(ValueError, match="at_most=.* is not a size"):
        assert_memory(loss, WS, X, at_most="3 furlongs")
    with pytest.raises(ValueError, match="is not a relative difference"):
        assert_memory(loss, WS, X, against=tmp_path / "memory.json", tolerance="little")
    with pytest.raises(FileNotFoundError, match=r"memory\.json"):
        assert_memory(loss, WS, X, against=tmp_path / "memory.json")


SOURCE = """
import jax, jax.numpy as jnp, statetx
layer = {layer}(lambda w, x: jnp.sin(jnp.tanh(x @ w) @ w))
def loss(w, x):
    for _ in range(8):
        x = layer(w, x)
    return (x**2).mean()
def main():
    return loss, (jax.ShapeDtypeStruct((32, 32), "float32"), jax.ShapeDtypeStruct((256, 32), "float32"))
"""


@pytest.mark.slow
def test_command_saves_compares_and_annotates(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train1.py").write_text(SOURCE.format(layer="statetx.remat"))
    (tmp_path / "train2.py").write_text(SOURCE.format(layer=""))
    words = ["memory", "train1.py:main", "--factory"]
    assert main([*words, "--against", "memory.json"]) == 2
    assert "There is no file memory.json. Fix: write it" in capsys.readouterr().err
    assert main([*words, "--format", "github"]) == 2
    assert "--format github is for --against FILE" in capsys.readouterr().err
    assert main([*words, "--summary", "memory.md"]) == 2
    assert "--summary is for --against FILE" in capsys.readouterr().err
    assert main([*words, "--save", "memory.json"]) == 0
    assert main([*words, "--against", "memory.json"]) == 0
    assert "(+0.0%)" in capsys.readouterr().out
    words[1] = "train2.py:main"
    assert main([*words, "--against", "memory.json"]) == 1
    assert re.search(r"residuals of .*train2\.py:3", capsys.readouterr().out)
    assert main([*words, "--against", "memory.json", "--tolerance", "900%"]) == 0
    assert main([*words, "--against", "memory.json", "--tolerance", "x"]) == 2
    capsys.readouterr()
    assert main([*words, "--against", "memory.json", "--format", "github"]) == 1
    first, *others = capsys.readouterr().out.splitlines()
    assert first.startswith("::error title=statetx memory::loss on cpu takes")
    assert others and others[0].startswith("::error file=train2.py,line=3,title=statetx memory::residuals of")


def test_words_that_switch_a_variable_on_and_off(tmp_path, monkeypatch):
    path = tmp_path / "memory.json"
    for words, is_on in ((("1", "True", "yes", " on "), True), (("", "0", "false", "No", "OFF", None), False)):
        for word in words:
            path.unlink(missing_ok=True)
            monkeypatch.delenv("STATETX_UPDATE_MEMORY", raising=False)
            if word is not None:
                monkeypatch.setenv("STATETX_UPDATE_MEMORY", word)
            with contextlib.nullcontext() if is_on else pytest.raises(FileNotFoundError):
                assert_memory(jnp.sin, X, against=path)
            assert path.exists() == is_on, word
    monkeypatch.setenv("STATETX_UPDATE_MEMORY", "flase")
    with pytest.raises(ValueError, match=r"STATETX_UPDATE_MEMORY='flase' is neither on \(1, true, yes, on\) nor off"):
        assert_memory(jnp.sin, X, against=path)
