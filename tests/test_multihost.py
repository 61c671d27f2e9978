"""One model on several devices and on two processes: the example, run as a user runs it."""

import json
import os
import pathlib
import runpy
import subprocess
import sys

import pytest

SCRIPT = pathlib.Path(__file__).parents[1] / "examples" / "train_multihost.py"


def run(out, *options):
    path = os.pathsep.join(filter(None, (str(SCRIPT.parents[1]), os.environ.get("PYTHONPATH"))))
    env = os.environ | {"PYTHONPATH": path, "PYTHONUTF8": "1", "COLUMNS": "160", "TERM": "dumb"}
    command = [sys.executable, str(SCRIPT), "--out", str(out), *options]
    return subprocess.run(command, env=env, cwd=out, capture_output=True, encoding="utf-8", timeout=600)


def check(out, done):
    """The losses are the same everywhere, and memory falls as predicted."""
    assert done.returncode == 0, done.stderr
    runs = json.loads((out / "results.json").read_text())["runs"].values()
    assert (out / "results.png").read_bytes().startswith(b"\x89PNG")
    first = next(iter(runs))
    assert len(set(first["losses"])) == len(first["losses"]), "training changes the loss"
    for r in runs:
        assert r["losses"] == pytest.approx(first["losses"][-len(r["losses"]) :], rel=1e-5)
        assert 0.85 < r["temporary_bytes"] / r["predicted_bytes"] < 1.15
        weights = r["layer_bytes"] * first["layers"]
        if r["devices"] == 1:
            assert not r["communicated_bytes"]
        else:  # the layers' weights, forwards and again backwards; their gradients; little else
            assert 2 * weights <= r["communicated_bytes"]["all-gather"] < 2.6 * weights
            assert weights <= r["communicated_bytes"]["all-reduce"] < 1.6 * weights
    return {(r["devices"], r["processes"], r["resumes"]): r for r in runs}


TINY = ("--steps", "4", "--batch", "512", "--width", "64", "--layers", "4")


def test_two_processes_train_as_one_does_and_one_resumes_what_they_saved(tmp_path):
    runs = check(tmp_path, run(tmp_path, "--devices", "2", *TINY))
    assert list(runs) == [(2, 1, False), (2, 2, False), (1, 1, True)]
    assert len(runs[1, 1, True]["losses"]) == 2, "it began in the middle"


@pytest.mark.slow
def test_on_one_to_eight_devices(tmp_path):
    runs = check(tmp_path, run(tmp_path, "--devices", "1", "2", "4", "8", *TINY, "--batch", "2048"))
    assert len(runs) == 6


def test_bad_input_ends_in_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--out", str(tmp_path), "--devices", "3"])
    monkeypatch.syspath_prepend(SCRIPT.parent)
    with pytest.raises(SystemExit) as exit:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    error = capsys.readouterr().err
    assert exit.value.code == 2 and error.count("\n") == 1 and "multiples of the 3 devices" in error
