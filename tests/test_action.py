"""The action of this repository: its step runs in a shell, with a program called gh that notes its arguments."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

from statetx.cli.main import main

yaml = pytest.importorskip("yaml")

ROOT = pathlib.Path(__file__).parents[1]
ACTION = yaml.safe_load((ROOT / "action.yml").read_text())
(STEP,) = ACTION["runs"]["steps"]

PROGRAM = """
import jax, jax.numpy as jnp, statetx
layer = {layer}(lambda w, x: jnp.sin(jnp.tanh(x @ w) @ w))
def loss(w, x):
    for _ in range(4):
        x = layer(w, x)
    return (x**2).mean()
"""


def value_of(expression, given):
    """An expression of GitHub, as it evaluates to these inputs and properties of the event."""
    comments, names = re.subn(r" == 'true' && (.*) \|\| ''$", r" \1", expression)
    names = comments.split()
    return given.get(names[-1], "") if len(names) == 1 or given[names[0]] == "true" else ""


def run(folder, *, python=None, **inputs):
    """Exit status, output, job summary and comments of the action in a folder."""
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    noted = folder / "comments.md"
    scripts = {
        "python": python or f'exec {sys.executable} "$@"',
        "gh": f'[ "$*" = "pr comment https://pull --body-file $5" ] && cat "$5" >> {noted}',
    }
    for name, text in scripts.items():
        (programs / name).write_text(f"#!/bin/bash\n{text}\n")
        (programs / name).chmod(0o755)
    given = {f"inputs.{name}": entry.get("default", "") for name, entry in ACTION["inputs"].items()}
    given |= {f"inputs.{name}": value for name, value in inputs.items()}
    given |= {"github.token": "t", "github.event.pull_request.html_url": "https://pull"}
    values = {
        name: re.sub(r"\$\{\{ (.*?) \}\}", lambda m: value_of(m[1], given), text) for name, text in STEP["env"].items()
    }
    summary = folder / "summary.md"
    summary.write_text("before\n")
    noted.write_text("")
    environ = {**os.environ, **values, "GITHUB_STEP_SUMMARY": str(summary), "PYTHONPATH": str(ROOT)}
    environ["PATH"] = f"{programs}:{os.environ['PATH']}"
    command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", STEP["run"]]  # as GitHub runs `shell: bash`
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr, summary.read_text(), noted.read_text()


@pytest.mark.slow
def test_what_grew_is_in_the_summary_and_in_a_comment(tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text(PROGRAM.format(layer="statetx.remat"))
    words = ["train.py:loss", "--shapes", "f32[32,32], f32[256,32]"]
    monkeypatch.chdir(tmp_path)
    assert main(["memory", *words, "--save", "memory.json"]) == 0
    (tmp_path / "train.py").write_text(PROGRAM.format(layer=""))
    asked = {"program": words[0], "options": '--shapes "f32[32,32], f32[256,32]"'}
    status, out, summary, comment = run(tmp_path, **asked)
    assert status == 1, out
    assert "::error file=train.py,line=3,title=statetx memory::residuals of" in out
    assert summary == f"before\n{comment}"
    assert comment.startswith("**loss on cpu takes ") and "| grew | owner | line | before | now |\n" in comment
    assert re.search(r"^\| residual \| .* \| train\.py:3 \(.*\) \| [\d.]+ \w+ \| [\d.]+ \w+ \|$", comment, re.M)


FAKE = 'while [ "$1" != --summary ]; do shift; done; {}'


@pytest.mark.parametrize(
    "python, inputs, expected",
    [
        (FAKE.format('echo same > "$2"'), {}, (0, "before\nsame\n", "")),
        (FAKE.format('echo more > "$2"; exit 1'), {}, (1, "before\nmore\n", "more\n")),
        (FAKE.format('echo more > "$2"; exit 1'), {"comment": "false"}, (1, "before\nmore\n", "")),
        ("exit 1", {}, (1, "before\n", "")),  # the user's program failed
        ("exit 2", {}, (2, "before\n", "")),  # bad input
    ],
    ids=["as before", "grown", "grown, without a comment", "the program fails", "bad input"],
)
def test_exit_status_and_comments(tmp_path, python, inputs, expected):
    status, out, *texts = run(tmp_path, python=python, program="train:loss", **inputs)
    assert (status, *texts) == expected, out


def test_options_may_have_quotes_and_be_absent(tmp_path):
    show = 'printf "<%s>" "$@"'
    words = "<-m><statetx><memory><train:loss>{}<--against><memory.json><--format><github><--summary>"
    assert words.format("") in run(tmp_path, python=show, program="train:loss")[1]
    out = run(tmp_path, python=show, program="train:loss", options="--factory --target 'tpu v5e'")[1]
    assert words.format("<--factory><--target><tpu v5e>") in out


def test_a_token_that_may_not_comment_changes_no_status(tmp_path):
    python = FAKE.format(f'echo more > "$2"; echo "exit 4" > {tmp_path}/bin/gh; exit 1')
    status, out, *_ = run(tmp_path, python=python, program="train:loss")
    assert status == 1 and "::warning::The token may not comment" in out


def test_expressions_name_the_inputs():
    named = re.findall(r"inputs\.(\w+)", str(STEP["env"]))
    assert sorted(named) == sorted(ACTION["inputs"]) and "inputs." not in STEP["run"]


def test_page_uses_the_action_with_inputs_that_it_has():
    page = (ROOT / "docs" / "how-to" / "memory-in-ci.md").read_text()
    text = re.search(r"^    # .github/workflows/memory.yml\n((?:    .*\n)+)", page, re.M)[1]
    workflow = yaml.safe_load(text)
    (step,) = (
        step for step in workflow["jobs"]["memory"]["steps"] if step.get("uses", "").startswith("statetx/statetx@")
    )
    required = {name for name, entry in ACTION["inputs"].items() if entry.get("required")}
    assert required <= set(step["with"]) <= set(ACTION["inputs"])
    assert workflow["permissions"]["pull-requests"] == "write"


def test_hosted_ci_runs_what_the_local_one_runs():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    assert [step["run"] for step in workflow["jobs"]["test"]["steps"] if "run" in step] == [".ci/run"]
