"""The examples run as a user runs them: a script, seen through its files and streams."""

import json
import os
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "examples" / "train_long_sequence.py"
TINY = ("--seq", "64", "--steps", "2", "--hidden", "8", "--batch", "2", "--no-curve")
RUNS = ["plain", "nested", "scheduled"]


def environment(**variables):
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return os.environ | {"PYTHONPATH": path, "PYTHONUTF8": "1", "COLUMNS": "120"} | variables


def train(*arguments, out):
    """Run the main job; `out` may be a path that does not exist."""
    command = [sys.executable, str(SCRIPT), "--out", str(out), *arguments]
    options = {"capture_output": True, "encoding": "utf-8", "timeout": 300}
    # A wide terminal without colors: each row of the table is one line.
    return subprocess.run(command, env=environment(TERM="dumb"), cwd=out.parent, **options)


def results_of(run, out):
    assert run.returncode == 0, run.stderr
    return json.loads((out / "results.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("cell", ["gru", "lif"])
def test_all_runs_agree_and_take_less_memory(cell, tmp_path):
    out = tmp_path / "new" / "folder"
    out.parent.mkdir()
    run = train("--quick", "--cell", cell, out=out)
    results = results_of(run, out)

    plain, *others = (results["runs"][name] for name in RUNS)
    # The second loss depends on the first step's gradients and on the optimizer's state.
    assert len(plain["losses"]) == 2 and plain["losses"][0] != plain["losses"][1]
    for name, other in zip(RUNS[1:], others, strict=True):
        comparison = results["comparisons"][name]
        assert other["losses"] == pytest.approx(plain["losses"], rel=1e-5)
        assert comparison["loss_difference"] < 1e-5
        # Adam moves a weight by about --lr (0.003) a step, so equal to 1e-5 is the same path, not no path.
        assert comparison["weight_difference"] < 1e-5
        # Less than the hundreds of 2,048 steps: at 64, the memory of one step is not yet small.
        assert comparison["memory_ratio"] > 2
        # Four weights of the GRU model, three of the LIF model; one hidden state, or two; the optimizer's.
        assert plain["states_written"] == other["states_written"] == 6

    assert (out / "results.png").read_bytes().startswith(b"\x89PNG")
    table = {line.split("│")[1].strip(): line for line in run.stdout.splitlines() if line.startswith("│")}
    for name in RUNS:
        assert name in run.stdout
        assert f"{results['runs'][name]['temporary_bytes'] / 2**20:.3f} MiB" in table["temporary memory"]
        assert f"{results['runs'][name]['final_loss']:.6f}" in table["final loss, nats/character"]
    assert "time relative to plain" not in table  # of a few steps of a small program
    for comparison in results["comparisons"].values():
        assert f"1 / {comparison['memory_ratio']:.1f}" in table["memory relative to plain"]


@pytest.mark.slow
def test_length_not_divisible_by_chunks_loses_no_step(tmp_path):
    # 67 is prime: the last chunk is a shorter one.
    for comparison in results_of(train(*TINY, "--seq", "67", out=tmp_path), tmp_path)["comparisons"].values():
        assert comparison["loss_difference"] < 1e-5
        assert comparison["weight_difference"] < 1e-5


@pytest.mark.slow
def test_the_policy_reaches_the_steps(tmp_path):
    kept = results_of(train(*TINY, "--policy", "everything_saveable", out=tmp_path), tmp_path)
    nothing = results_of(train(*TINY, out=tmp_path), tmp_path)
    assert kept["comparisons"]["nested"]["loss_difference"] < 1e-5
    assert kept["comparisons"]["nested"]["memory_ratio"] < 0.8 * nothing["comparisons"]["nested"]["memory_ratio"]


@pytest.mark.slow
def test_memory_and_time_over_slot_counts(tmp_path):
    # Slots of a size that does not fit beside the weights: XLA also uses the room of results that are yet to come.
    options = ("--curve", "--runs", "scheduled", "--slots", "3", "--batch", "256")
    results = results_of(train(*TINY, *options, out=tmp_path), tmp_path)
    assert results["runs"]["scheduled"]["checkpoint"] == "Slots(3)"
    assert [point["slots"] for point in results["slots"]] == [2, 4, 8, 16]
    memory = [point["temporary_mib"] for point in results["slots"]]
    assert memory == sorted(memory) and memory[-1] > memory[0]
    assert all(point["step_seconds"] > 0 for point in results["slots"])


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS[:2])
def test_one_run_alone(name, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("Ein Zug führt über Gräben. " * 10, encoding="utf-8")
    results = results_of(train(*TINY, "--runs", name, "--text", str(text), out=tmp_path), tmp_path)
    assert list(results["runs"]) == [name] and not results["comparisons"]
    assert (tmp_path / "results.png").exists()


def assert_one_line(error, named):
    assert error.count("\n") == 1 and named in error
    assert "Traceback" not in error


def test_bad_input_ends_in_one_line_and_status_2(tmp_path):
    run = train(*TINY, "--steps", "0", out=tmp_path / "out")
    assert run.returncode == 2
    assert_one_line(run.stderr, named="0")


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        ("--cell nope", "nope"),
        ("--text missing.txt", "missing.txt"),
        ("--policy nope", "nope"),
        pytest.param("--runs plain --lr 1e38", "lower --lr", marks=pytest.mark.thorough),
        ("--batch two", "--batch"),
        ("--lr nan", "--lr"),
        ("--seed -1", "--seed"),
        ("--policy save_only_these_names", "save_only_these_names"),  # it needs names
        ("--text .", "directory"),
        ("--text latin1.txt", "utf-8"),
        ("--text short.txt", "at least 65 characters"),
        ("--out short.txt", "short.txt"),
        ("--unknown", "--unknown"),
    ],
)
def test_more_bad_input_in_this_process(bad, named, tmp_path, monkeypatch, capsys):
    (tmp_path / "latin1.txt").write_bytes("für ".encode("latin-1") * 100)
    (tmp_path / "short.txt").write_text("short")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(SCRIPT.parent)
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *TINY, *bad.split()])
    with pytest.raises(SystemExit) as exit, jax.numpy_rank_promotion("allow"):  # brainstate's layers need it
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert exit.value.code == 2
    assert_one_line(capsys.readouterr().err, named)


def test_help_lists_the_options(tmp_path):
    run = train("--help", out=tmp_path)
    assert run.returncode == 0
    for option in "steps seq batch hidden cell runs slots curve no-curve policy lr text seed out quick".split():
        assert f"--{option}" in run.stdout


HELP = """
import runpy, sys
for script in sys.argv[1:]:
    sys.argv = [script, "--help"]
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as exit:
        assert exit.code == 0
    large = {"jax", "numpy", "matplotlib"} & sys.modules.keys()
    assert not large, f"{script} imports {large}"
"""


def test_help_imports_nothing_large():
    scripts = [str(path) for path in (ROOT / "examples").glob("[!_]*.py")]
    command = [sys.executable, "-c", HELP, *scripts]
    path = str(ROOT / "examples")  # where Python finds _common when it runs a script by name
    run = subprocess.run(command, env=environment(PYTHONPATH=path), capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("--quick") >= len(scripts) == 12


@pytest.mark.slow
def test_ctrl_c_ends_in_one_line_and_writes_the_results_so_far(tmp_path):
    out = tmp_path / "out"
    command = [sys.executable, str(SCRIPT), "--out", str(out), *TINY, "--steps", "5000", "--runs", "plain"]
    env = environment(TERM="xterm", FORCE_COLOR="1")  # the progress bar is drawn while the example runs
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        output = b""
        while b"loss" not in output:  # after the first step
            chunk = os.read(process.stdout.fileno(), 4096)
            assert chunk, process.stderr.read()
            output += chunk
        process.send_signal(signal.SIGINT)
        error = process.communicate(timeout=300)[1].decode()
    assert process.returncode == 130
    assert_one_line(error, named=str(out))
    results = json.loads((out / "results.json").read_text())
    assert results["interrupted"] and f"after step {len(results['runs']['plain']['losses'])} (plain)" in error


# -- the other examples, in this process, which has imported their libraries -----------------------------------

OTHERS = [
    "spiking_digits",
    "spiking_deep",
    "transformer_lm",
    "batchnorm_classifier",
    "nnx_model",
    "refs",
    "hypergradient",
]


@pytest.fixture
def example(tmp_path, monkeypatch, capsys):
    """Run an example by name; returns its exit status, its streams, and results.json if there is one."""
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.syspath_prepend(ROOT / "examples")
    monkeypatch.delitem(sys.modules, "_common", raising=False)
    jax.config.update("jax_disable_most_optimizations", True)  # LLVM takes most of the time otherwise
    jax.config.update("jax_numpy_rank_promotion", "allow")  # brainstate's layers need it

    def run(name, *arguments):
        out = tmp_path / "new" / "folder"
        monkeypatch.setattr(sys, "argv", [f"{name}.py", "--out", str(out), *arguments])
        status = 0
        try:
            runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
        except SystemExit as exit:
            status = exit.code
        captured = capsys.readouterr()
        if status == 0 and "--help" not in arguments:
            assert (out / "results.png").read_bytes().startswith(b"\x89PNG")
            return captured.out, json.loads((out / "results.json").read_text())
        return status, captured

    yield run
    jax.config.update("jax_disable_most_optimizations", False)
    jax.config.update("jax_numpy_rank_promotion", "raise")
    jax.config.update("jax_enable_x64", False)  # of brain_delays
    sys.modules.pop("_common", None)


def falls(losses, part=4):
    """Whether the mean of the last few is below the mean of the first few."""
    few = max(1, len(losses) // part)
    return sum(losses[-few:]) < sum(losses[:few])


@pytest.mark.slow
def test_spiking_digits(example):
    out, results = example("spiking_digits", "--quick")
    plain, slots = results["temporary_bytes"]["plain"], results["temporary_bytes"]["slots"]
    assert falls(results["runs"]["training"]["losses"])
    assert 0.15 < results["accuracy"] < 1  # of ten digits
    assert plain[-1] > 2 * plain[0]  # four times the steps
    assert slots[-1] < plain[-1] / 2 and slots[-1] < 2 * slots[0]
    assert f"{results['accuracy']:.1%}" in out


@pytest.mark.slow
def test_spiking_deep(example):
    pytest.importorskip("brainpy")
    out, results = example("spiking_deep", "--quick", "--layers", "2")
    memory, runs = results["temporary_bytes"], results["runs"]
    plain = runs["plain"]["losses"]
    assert len(plain) == 3 and plain[0] != plain[1]  # the second loss depends on the first gradient
    for way, run in runs.items():
        assert run["losses"][0] == pytest.approx(plain[0], rel=1e-6)
        assert results["gradient_difference"][way] < 1e-5
    assert len(runs["all"]["losses"]) == 6
    short, long = memory["steps"]
    assert long == 4 * short
    for way in ("plain", "remat"):
        assert memory[way][1] > 2 * memory[way][0]
    for way in ("slots", "mixed", "all"):
        assert memory[way][1] < 1.1 * memory[way][0]
    assert memory["bits"][1] < memory["remat"][1] / 4
    assert memory["all"][1] < memory["mixed"][1] < memory["slots"][1]
    slots, mixed, both = (results["loops"][way][0] for way in ("slots", "mixed", "all"))
    assert not slots["is_mixed"] and mixed["is_mixed"] and both["is_mixed"]
    assert both["runs"] < mixed["runs"] < slots["runs"] == slots["carry_runs"] == mixed["carry_runs"]
    assert f"{mixed['runs']:.2f}" in out
    assert 0 < min(results["spike_rate"]) and max(results["spike_rate"]) < 1
    assert f"{results['accuracy']:.1%}" in out


@pytest.mark.slow
def test_brain_delays(example):
    out, results = example("brain_delays", "--quick")
    ways = results["ways"]
    plain = ways["plain"]
    assert plain["gradient"] != 0
    for way in ("Levels(1)", "coupling", "budget"):
        assert ways[way]["gradient"] == pytest.approx(plain["gradient"], rel=1e-9)
        assert ways[way]["temporary_bytes"] < plain["temporary_bytes"] / 4
    assert ways["Levels(1)"]["temporary_bytes"] < ways["coupling"]["temporary_bytes"]
    assert ways["budget"]["temporary_bytes"] <= 1e6 * results["options"]["budget"]
    assert f"{plain['gradient']:.6e}"[:9] in out


@pytest.mark.slow
def test_spiking_vgg(example):
    pytest.importorskip("braintools")
    out, results = example("spiking_vgg", "--quick")
    plain, bits, convolutions = results["ways"].values()
    for found in (bits, convolutions):
        assert found["gradient_difference"] < 1e-5
        assert found["temporary_bytes"] < plain["temporary_bytes"] / 2
    assert convolutions["operations"] < 1.1 * plain["operations"] < 1.2 * plain["operations"] < bits["operations"]
    assert "exhaustive" in out


@pytest.mark.slow
@pytest.mark.parametrize(
    "budget", ["0.5", "1GiB"]
)  # planning compiles some forty programs; a budget that everything fits in needs one
def test_transformer_lm(budget, example):
    out, results = example("transformer_lm", "--quick", "--budget", budget)
    plain, layer, plan = results["runs"].values()
    assert results["planned_bytes"] <= results["budget_bytes"]
    assert layer["temporary_bytes"] < plain["temporary_bytes"]
    assert budget == "1GiB" or plan["temporary_bytes"] < plain["temporary_bytes"]
    assert layer["losses"] == pytest.approx(plain["losses"], rel=1e-4)  # the same dropout
    assert plan["losses"][:4] == pytest.approx(plain["losses"], rel=1e-4)
    assert falls(plan["losses"])
    assert f"{plan['losses'][-1]:.3f}" in out


@pytest.mark.slow
def test_batchnorm_classifier(example):
    out, results = example("batchnorm_classifier", "--quick")
    plain, remat = results["runs"].values()
    assert plain["writes"] == remat["writes"] == [20]  # as many as there are steps, in every layer
    assert results["statistics_difference"] < 1e-4
    assert any(value not in (0, 1) for values in remat["statistics"].values() for value in values)
    assert remat["losses"] == pytest.approx(plain["losses"], rel=1e-4) and falls(remat["losses"])
    assert remat["temporary_bytes"] < plain["temporary_bytes"]
    assert f"{remat['losses'][-1]:.6f}" in out


@pytest.mark.slow
def test_nnx_model(example):
    pytest.importorskip("flax")
    out, results = example("nnx_model", "--quick")
    plain, remat = results["runs"].values()
    assert plain["draws"] == remat["draws"] == [16]  # two in each of eight steps
    assert results["loss_difference"] < 1e-4 and falls(remat["losses"])
    assert remat["temporary_bytes"] < plain["temporary_bytes"]
    assert remat["training_accuracy"] == pytest.approx(plain["training_accuracy"], abs=0.01)
    assert f"{remat['losses'][-1]:.6f}" in out


@pytest.mark.slow  # the other examples rematerialize alike; test_ref.py has the refs
def test_refs(example):
    out, results = example("refs", "--quick")
    plain, remat = results["runs"].values()
    assert plain["writes"] == remat["writes"] == 60
    assert results["writes_in_one_gradient"]["statetx.remat"] == 1
    assert results["loss_difference"] < 1e-4 and falls(remat["losses"])
    assert remat["counts"] == pytest.approx(plain["counts"], rel=1e-3)
    assert f"{remat['losses'][-1]:.6f}" in out


@pytest.mark.slow  # spiking_digits has the slots; test_laws.py the second derivatives
def test_hypergradient(example):
    out, results = example("hypergradient", "--quick")
    assert results["after"]["validation_loss"] < results["before"]["validation_loss"]
    assert results["slopes"]["gradient"] == pytest.approx(results["slopes"]["differences"], rel=0.1)
    assert results["temporary_bytes"]["slots"] < results["temporary_bytes"]["all steps"] / 2
    assert len(results["after"]["inner_losses"]) == 40
    assert f"{results['after']['validation_loss']:.4f}" in out


@pytest.mark.slow
def test_a_killed_wave_simulation_resumes(tmp_path):
    def start(name):
        sizes = ("--steps", "20000", "--cells", "100", "--segment", "50", "--slots", "3", "--save-every", "0")
        command = [sys.executable, str(SCRIPT.with_name("wave_on_disk.py")), "--out", str(tmp_path / name), *sizes]
        return subprocess.Popen(command, env=environment(TERM="dumb"), stdout=subprocess.PIPE, encoding="utf-8")

    killed = start("killed")
    while not [*tmp_path.glob("killed/store/ct-9*")]:  # in the middle of the reversal
        assert killed.poll() is None
        time.sleep(0.01)
    killed.kill()
    killed.communicate()
    outputs, results = {}, {}
    for name in ("killed", "whole"):
        outputs[name] = start(name).communicate()[0]
        results[name] = json.loads((tmp_path / name / "results.json").read_text())
    assert "the run resumes from there" in outputs["killed"] and "resumes" not in outputs["whole"]
    assert results["killed"]["gradient"] == results["whole"]["gradient"] and any(results["whole"]["gradient"])
    assert results["killed"]["difference"] < 1e-5


@pytest.mark.parametrize("name", OTHERS)
def test_help_and_bad_options_of_the_others(name, example):
    status, captured = example(name, "--help")
    assert status == 0
    for option in "quick seed out updates lr".split():
        assert f"--{option}" in captured.out
    for bad in "--updates 0", "--lr nan", "--seed -1", "--unknown":
        status, captured = example(name, *bad.split())
        assert status == 2
        assert_one_line(captured.err, named=bad.split()[0])


@pytest.mark.parametrize("name", ["brain_delays", "spiking_vgg"])
def test_help_and_bad_options_of_published_tables(name, example):
    status, captured = example(name, "--help")
    assert status == 0 and "--rounds" in captured.out
    status, captured = example(name, "--rounds", "0")
    assert status == 2
    assert_one_line(captured.err, named="--rounds")


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        ("transformer_lm --width 33", "multiple of 32"),
        ("transformer_lm --budget much", "--budget"),
        ("nnx_model --width 17", "multiple of 16"),
        ("spiking_digits --batch 400", "below 361"),
        ("spiking_deep --chunk 7", "divide --steps"),
    ],
)
def test_bad_values_end_in_one_line(bad, named, example):
    status, captured = example(*bad.split())
    assert status == 2
    assert_one_line(captured.err, named)
