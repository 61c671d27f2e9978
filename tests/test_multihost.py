"""One model on several devices and on two processes: the example, run as a user runs it."""

import json
import os
import pathlib
import runpy
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import statetx

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


@pytest.mark.slow  # the fast suite kills one of two processes below
def test_two_processes_equal_one_and_one_resumes_their_checkpoint(tmp_path):
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


PROLOGUE = """
import json, sys, jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
index = int(sys.argv[1])
jax.distributed.initialize(sys.argv[2], 2, index)
"""


def two_processes(program, directory):
    """Start a program, after `PROLOGUE`, as two processes: of two devices each, with the directory as an argument."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    env = dict(os.environ)
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(SCRIPT.parents[1]), env.get("PYTHONPATH"))))
    command = [sys.executable, "-c", PROLOGUE + program]
    return [
        subprocess.Popen(
            [*command, str(i), address, str(directory)],
            env=env,
            stdout=subprocess.DEVNULL,  # gloo writes there, from several threads
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]


def finish(processes):
    """Wait for processes to end well."""
    try:
        errors = [process.communicate(timeout=300)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [p.returncode for p in processes] == [0, 0], errors


TWO_PROCESSES = """
import jax.numpy as jnp, numpy as np, statetx
from jax.sharding import NamedSharding, PartitionSpec as P

mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
x = jax.make_array_from_callback((8,), NamedSharding(mesh, P("d")), lambda i: np.arange(8, dtype=np.float32)[i])
rng, n, traces = statetx.RngState(0), statetx.State(0), []

@statetx.jit
def step(x):
    traces.append(1)
    n.value += 1
    return (x * jax.random.normal(rng.next(), x.shape)).sum()

said = [("losses", [float(step(x)) for _ in range(3)], len(traces), int(n.value))]
for factor in (1.0, 1.5):  # each process has a part of the results alone
    try:
        statetx.testing.assert_same_step(lambda x: x * 2.0, lambda x: x * (2.0 * factor), x)
        said.append("the same")
    except AssertionError as e:
        said.append(str(e))
json.dump(said, open(f"{sys.argv[3]}/said-{index}.json", "w"))
"""


@pytest.mark.slow
def test_two_processes_share_a_key(tmp_path):
    finish(two_processes(TWO_PROCESSES, tmp_path))
    said = [json.loads((tmp_path / f"said-{i}.json").read_text()) for i in range(2)]
    assert said[0] == said[1]
    assert said[0][1] == "the same" and "in place of 2.0 (7 of 8 differ)" in said[0][2]
    rng = statetx.RngState(0)
    losses = [float((np.arange(8.0) * jax.random.normal(rng.next(), (8,))).sum()) for _ in range(3)]
    assert said[0][0] == ["losses", pytest.approx(losses, rel=1e-5), 1, 3], "one trace, three steps"


KILLED = """
import os, jax.numpy as jnp, numpy as np, orbax.checkpoint as ocp, statetx
from jax.sharding import NamedSharding, PartitionSpec as P

mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
place = lambda x: jax.make_array_from_callback(x.shape, NamedSharding(mesh, P("d")), lambda i: x[i])
x = place(np.arange(32, dtype=np.float32).reshape(8, 4) / 32)
w, rng, n = statetx.Param(place(np.full((8, 4), 0.5, np.float32))), statetx.RngState(0), statetx.State(0)

def loss(x):
    return (jax.random.bernoulli(rng.next(), 0.7, x.shape) * jnp.tanh(x * w.value) - x).std()

@statetx.jit(donate_states=True)
def step(x):
    value, gradient = statetx.value_and_grad(statetx.remat(loss), wrt=w)(x)
    w.value, n.value = w.value - 3.0 * gradient, n.value + 1
    return value

states = {"w": w, "rng": rng, "n": n}
with ocp.CheckpointManager(sys.argv[3] + "/saved") as manager:
    if (last := manager.latest_step()) is not None:
        statetx.restore(states, manager.restore(last, args=ocp.args.StandardRestore(statetx.values(states))))
    with open(f"{sys.argv[3]}/said-{index}", "a") as said:
        while int(n.value) < 8:
            print(int(n.value), float(step(x)), file=said, flush=True)
            manager.save(int(n.value), args=ocp.args.StandardSave(statetx.values(states)))
            manager.wait_until_finished()
            if int(n.value) == 4 and not os.path.exists(sys.argv[3] + "/killed"):
                if index == 1:
                    os.kill(os.getpid(), 9)
                manager.wait_until_finished(), float(step(x))  # in which it waits for the one that is gone
"""


@pytest.mark.slow
def test_two_processes_resume_after_one_is_killed(tmp_path):
    first, second = two_processes(KILLED, tmp_path)
    try:
        error = second.communicate(timeout=300)[1]
        assert second.returncode == -9, error
    finally:
        first.kill()  # as a cluster does when one of its machines is gone
        first.communicate()
    (tmp_path / "killed").touch()
    finish(two_processes(KILLED, tmp_path))

    w, rng, losses = jnp.full((8, 4), 0.5), statetx.RngState(0), []
    x = jnp.arange(32.0).reshape(8, 4) / 32
    for _ in range(8):
        kept = jax.random.bernoulli(rng.next(), 0.7, x.shape)
        loss, gradient = jax.value_and_grad(lambda w: (kept * jnp.tanh(x * w) - x).std())(w)  # noqa: B023
        w = w - 3.0 * gradient
        losses.append(float(loss))
    assert losses[-1] < losses[0]
    for i in range(2):
        said = [line.split() for line in (tmp_path / f"said-{i}").read_text().splitlines()]
        assert [int(n) for n, _ in said] == list(range(8)), "no step is done again, none is left out"
        np.testing.assert_allclose([float(loss) for _, loss in said], losses, rtol=1e-5)
