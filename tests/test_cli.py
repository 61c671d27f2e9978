"""The command line: `python -m statetx`."""

import inspect
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from searches import SEARCHES

import statetx
from statetx.cli.function import BadInput, parse_shapes
from statetx.cli.help import show
from statetx.cli.main import main
from statetx.cli.parser import make_parser

HERE = pathlib.Path(__file__).parent
LOSS = ["cli_model:loss", "--shapes", "f32[64,256], f32[128,64]"]


@pytest.fixture(autouse=True)
def in_this_folder(monkeypatch):
    monkeypatch.chdir(HERE)
    monkeypatch.setattr(sys, "path", list(sys.path))


def run(capsys, *argv):
    """Exit status, standard output and error."""
    status = main([str(x) for x in argv])
    return status, *capsys.readouterr()


# -- commands --------------------------------------------------------------------------------------------------------


def test_memory_prints_the_profile_of_the_loss_with_its_gradient(capsys):
    status, out, err = run(capsys, "memory", *LOSS)
    assert (status, err) == (0, "")
    profile = statetx.memory_profile(sys.modules["cli_model"].loss, *parse_shapes(LOSS[2])[0])
    assert out == f"{profile}\n" and "backward" in out


def test_memory_without_gradient(capsys):
    with_gradient, without = (run(capsys, "memory", *LOSS, *option)[1] for option in ([], ["--no-gradient"]))
    assert "backward" in with_gradient and "backward" not in without and without.startswith("Peak ")


def test_memory_writes_its_files(capsys, tmp_path):
    files = {name: tmp_path / name for name in ("html", "json")}
    status, out, err = run(capsys, "memory", *LOSS, *[x for name, path in files.items() for x in (f"--{name}", path)])
    assert (status, err) == (0, "")
    assert out.splitlines()[-2:] == [f"Wrote {path}" for path in files.values()]
    numbers = json.loads(files["json"].read_text())
    assert numbers["name"] == "loss" and numbers["peak_bytes"] > 0 and out.startswith(numbers["summary"])
    assert "<html" in files["html"].read_text()


@pytest.mark.parametrize("command, word", [("residuals", "loss keeps"), ("report", "loss: value and gradient")])
def test_residuals_and_report(capsys, tmp_path, command, word):
    html, numbers = tmp_path / "page.html", tmp_path / "numbers.json"
    status, out, err = run(capsys, command, *LOSS, "--html", html, "--json", numbers)
    assert (status, err) == (0, "") and out.startswith(word)
    assert json.loads(numbers.read_text())[{"residuals": "function", "report": "name"}[command]] == "loss"
    page = html.read_text()
    assert page.startswith("<!doctype html>") and "<table" in page and word in page
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]+)"', page)[1]
    assert policy.startswith("default-src 'none'") and "script" not in policy and "<script" not in page
    assert "prefers-color-scheme: dark" in page and "max-width: 720px" in page  # as the page of a profile


@pytest.mark.slow
def test_plan_keeps_the_budget_and_can_be_loaded(capsys, tmp_path):
    path = tmp_path / "plan.json"
    target = ["cli_model.py:make", "--factory"]
    status, out, err = run(capsys, "plan", *target, "--budget", "0.7", "--json", path, "--html", tmp_path / "plan.html")
    assert (status, err) == (0, "") and out.startswith("gradient of Model.loss")
    plan = statetx.Plan.load(path)
    assert plan.temp_bytes <= 0.7 * plan.unplanned_bytes and "<table" in (tmp_path / "plan.html").read_text()


def test_plan_that_no_program_keeps_fails_in_one_line(capsys):
    status, out, err = run(capsys, "plan", *LOSS, "--budget", "1KiB")
    assert status == 1 and out == "" and err.count("\n") == 1 and "No plan for loss keeps the budget of 1.0 KiB" in err


def test_errors_of_target_are_short_lines(capsys, monkeypatch):
    """They name the option once, and no list of all devices."""
    monkeypatch.setattr(statetx._targets.plugins, "is_installed", lambda platform: False)
    monkeypatch.chdir(HERE.parent)
    start = "python -m statetx: error: --target: "
    for name, told in {
        "h100x8": "There is no target named 'h100x8'. Did you mean 'h100:8'?",
        "mi300x": "There is no target named 'mi300x'. Known: python -m statetx targets.",
        "NVIDIA H100 80GB HBM3": "This machine cannot compile for h100: the compiler is not installed: "
        'pip install -e ".[target-cuda]".',
        "tpu v5e:3": "'tpu v5e:3': TPU v5 lite has grids of 2 dimensions, such as 2x4, or one of 1, 4, 8, 16, 32, 64, "
        "128, 256 chips.",
    }.items():
        status, out, err = run(capsys, "report", *LOSS, "--target", name)
        assert (status, out, err) == (2, "", f"{start}{told}\n") and len(err) <= 160


# -- targets ---------------------------------------------------------------------------------------------------------


def test_targets_of_all_forms(capsys):
    x = ["--shapes", "f32[16,64]"]
    names = {
        ("cli_model:model.loss", *x): "Model.loss keeps ",
        ("cli_model:Model.loss", *x): "Model.loss keeps ",  # of a new instance
        ("cli_model:Model.size", *x): "Model.size keeps 1",  # a static method
        (f"{HERE}/cli_model.py:make", "--factory"): "Model.loss keeps ",
        ("./cli_model.py:make_function", "--factory", *x): "Model.loss keeps ",
        ("cli_model:make_with_keywords", "--factory"): "loss keeps",
    }
    for target, text in names.items():
        status, out, err = run(capsys, "residuals", *target)
        assert (status, err) == (0, "") and out.startswith(text), (target, out, err)


def test_step_that_a_factory_makes(capsys):
    status, out, err = run(capsys, "memory", "cli_model:make_step", "--factory", "--no-gradient")
    assert (status, err) == (0, "") and "blocks.*" in out and "backward" in out


def test_keyword_arguments_reach_the_function(capsys):
    shapes = "f32[8,4], f32[2,8], batch={'scale': f32[]}"
    status, out, err = run(capsys, "residuals", "cli_model:loss", "--shapes", shapes)
    assert (status, err) == (0, "") and "batch['scale']" in out


def test_the_module_does_not_see_our_options(capsys, monkeypatch):
    monkeypatch.delitem(sys.modules, "cli_model", raising=False)
    monkeypatch.setattr(sys, "argv", ["statetx", "--shapes", "f32[]"])
    assert run(capsys, "residuals", *LOSS)[0] == 0
    assert sys.modules["cli_model"].ARGV == ["cli_model"] and sys.argv[1] == "--shapes"


def test_a_file_of_a_package_has_its_relative_imports(capsys, tmp_path):
    package = tmp_path / "clipackage"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "parts.py").write_text("def total(x): return (x**2).sum()\n")
    (package / "train.py").write_text("from .parts import total as loss\n")
    status, out, err = run(capsys, "residuals", f"{package}/train.py:loss", "--shapes", "f32[3]")
    assert (status, err) == (0, "") and out.startswith("total keeps 1")


def test_a_file_with_the_name_of_a_loaded_module(capsys, tmp_path):
    (tmp_path / "json.py").write_text("def loss(x): return (x**2).sum()\n")
    assert run(capsys, "residuals", f"{tmp_path}/json.py:loss", "--shapes", "f32[3]")[0] == 0
    assert sys.modules["json"] is json


# -- bad input -------------------------------------------------------------------------------------------------------

BAD = {
    "unknown command": (["memroy", "m:f"], "invalid choice: 'memroy'"),
    "unknown option": (["memory", *LOSS, "--budget", "1"], "unrecognized arguments: --budget 1"),
    "no colon": (["memory", "cli_model"], "'cli_model' is not of the form MODULE:FUNCTION"),
    "unknown module": (["memory", "cli_modle:loss"], "no module named 'cli_modle'"),
    "unknown package": (["memory", "nothing.here:loss"], "no module named 'nothing'"),
    "not a module": (["memory", "a b:loss"], "'a b' is neither a module nor a path"),
    "unknown file": (["memory", "nothing.py:loss"], "no file "),
    "unknown function": (["memory", "cli_model:los"], "cli_model has no attribute 'los'. Did you mean 'loss'?"),
    "unknown method": (["memory", "cli_model:Model.los"], "Model has no attribute 'los'. Did you mean 'loss'?"),
    "not a function": (["memory", "cli_model:answer"], "cli_model:answer is not a function, but of type int"),
    "method without instance": (
        ["memory", "cli_model:Sized.loss"],
        "missing a required argument: 'width'; Sized.loss is",
    ),
    "no shapes": (["memory", "cli_model:loss"], "cli_model:loss(w, x, *, batch=...): missing a required argument: 'w'"),
    "too many": (["memory", "cli_model:loss", "--shapes", "f32[],f32[],f32[]"], "too many positional arguments"),
    "unknown keyword": (["memory", *LOSS[:2], "f32[2],f32[2],y=f32[]"], "got an unexpected keyword argument 'y'"),
    "malformed": (["memory", *LOSS[:2], "f32[2, f32[3]"], "does not match opening parenthesis '['"),
    "factory of a number": (["memory", "cli_model:make_number", "--factory"], "to call with --shapes, and returned 3"),
    "factory with shapes": (["memory", "cli_model:make", "--factory", "--shapes", "f32[]"], "leave out --shapes"),
    "factory with arguments": (["memory", "cli_model:loss", "--factory"], "a factory is called without arguments"),
    "factory without shapes": (["memory", "cli_model:make_function", "--factory"], "give its arguments with --shapes"),
    "no budget": (["plan", *LOSS], "the following arguments are required: --budget"),
    "bad budget": (["plan", *LOSS, "--budget", "many"], "--budget='many' is not a size"),
    "negative budget": (["plan", *LOSS, "--budget=-1"], "--budget='-1' is not a size"),
    "no folder": (["memory", *LOSS, "--html", "/nothing/x.html"], "cannot write /nothing/x.html: there is no folder"),
    "no name": (["memory", *LOSS, "--html", ""], "--html: cannot write : the name is empty"),
    "one file twice": (
        ["memory", *LOSS, "--html", "x.out", "--json", "./x.out"],
        "--html and --json write to the same file",
    ),
    "a folder": (["memory", *LOSS, "--json", str(HERE)], "it is a folder"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_and_status_2(capsys, name):
    argv, words = BAD[name]
    status, out, err = run(capsys, *argv)
    assert status == 2 and out == ""
    assert err.startswith("python -m statetx: error: ") and err.count("\n") == 1 and words in err


def test_a_file_that_cannot_be_written_in_the_end(capsys, tmp_path, monkeypatch):
    """The folder is there when the command starts, and not when it ends."""
    from statetx.residuals.table import Residuals

    def to_dict(self):
        (tmp_path / "gone").rmdir()
        return {}

    (tmp_path / "gone").mkdir()
    monkeypatch.setattr(Residuals, "to_dict", to_dict)
    status, out, err = run(capsys, "residuals", *LOSS, "--json", tmp_path / "gone" / "x.json")
    assert status == 2 and err.count("\n") == 1 and "No such file or directory" in err


# -- failures of the user's code -------------------------------------------------------------------------------------


def test_an_error_of_the_function_has_its_traceback(capsys):
    status, _, err = run(capsys, "memory", "cli_model:broken", "--shapes", "f32[2]")
    assert status == 1 and "return x @ jnp.ones((3, 5))" in err and "TypeError" in err
    assert f"statetx{os.sep}cli" not in err  # the traceback is the user's


def test_an_error_of_the_factory(capsys):
    status, _, err = run(capsys, "memory", "cli_model:make_failing", "--factory")
    assert status == 1 and err.splitlines()[-1] == "ZeroDivisionError: in the factory"
    assert err.count("File ") == 1


def test_a_module_that_the_module_does_not_find(capsys, tmp_path, monkeypatch):
    """It is not the module that the user typed: the traceback has the line of the import."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "needs_more.py").write_text("import nothing_of_this_name")
    status, _, err = run(capsys, "memory", "needs_more:f")
    assert status == 1 and "needs_more.py" in err
    assert err.splitlines()[-1] == "ModuleNotFoundError: No module named 'nothing_of_this_name'"


@pytest.mark.parametrize(
    "content, last_line, num_files",
    [
        ("import nothing_of_this_name", "ModuleNotFoundError: No module named 'nothing_of_this_name'", 1),
        ("x = 1 / 0", "ZeroDivisionError: division by zero", 1),
        ("def f(:", "SyntaxError: invalid syntax", 1),
        ("raise SystemExit(3)", "python -m statetx: error: user_module.py:f ended the program with exit status 3", 0),
        ("raise KeyboardInterrupt", "python -m statetx: error: interrupted", 0),
    ],
)
def test_an_error_of_the_module(capsys, tmp_path, monkeypatch, content, last_line, num_files):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "user_module.py").write_text(content)
    status, out, err = run(capsys, "memory", "user_module.py:f")
    assert status == (130 if "Keyboard" in content else 1)
    assert err.splitlines()[-1] == last_line and err.count("File ") == num_files
    assert "user_module" not in sys.modules


# -- shapes ----------------------------------------------------------------------------------------------------------


def struct(shape, dtype):
    return jax.ShapeDtypeStruct(shape, dtype)


SHAPES = {
    "": ((), {}),
    "f32[32,128],i32[32]": ((struct((32, 128), jnp.float32), struct((32,), jnp.int32)), {}),
    " bf16 [ 2 , 3 ] , ": ((struct((2, 3), jnp.bfloat16),), {}),
    "pred[4], bool[], u8[1_024]": ((struct((4,), bool), struct((), bool), struct((1024,), jnp.uint8)), {}),
    "float16[2], c64[1], f8_e4m3fn[2]": (
        (struct((2,), jnp.float16), struct((1,), jnp.complex64), struct((2,), jnp.float8_e4m3fn)),
        {},
    ),
    "(f32[], [i8[2]], (i8[3],)), (f32[2])": (
        ((struct((), jnp.float32), [struct((2,), jnp.int8)], (struct((3,), jnp.int8),)), struct((2,), jnp.float32)),
        {},
    ),
    "{'x': f32[2], \"y\": (), z: {}}, []": (({"x": struct((2,), jnp.float32), "y": (), "z": {}}, []), {}),
    "f32[1], mask = bool[3], n=i32[]": (
        (struct((1,), jnp.float32),),
        {"mask": struct((3,), bool), "n": struct((), jnp.int32)},
    ),
}


@pytest.mark.parametrize("text", SHAPES)
def test_shapes(text):
    assert parse_shapes(text) == SHAPES[text]


@pytest.mark.parametrize("name, impl", [("fry", "threefry2x32"), ("rbg", "rbg"), ("urbg", "unsafe_rbg")])
def test_shapes_of_keys(name, impl):
    (key,), _ = parse_shapes(f"key<{name}>[3]")
    keys = jax.random.split(jax.random.key(0, impl=impl), 3)
    assert (key.shape, key.dtype) == (keys.shape, keys.dtype)


@pytest.mark.parametrize(
    "text, message",
    [
        ("f32", "expected a type such as f32[2,3], or '(', '[', '{', and got f32, in f32"),
        ("f32[2", "closing parenthesis ')' does not match opening parenthesis '[', in f32[2"),
        ("f32[2],, i32[]", "invalid syntax, in f32[2],, i32[]"),
        ("f32[2] i32[]", "invalid syntax"),
        ("f32[2]) + f(i32[]", "expected arguments, separated by commas"),
        ("f32[-1]", "(-1,) are no sizes of an array"),
        ("f32[1O]", "invalid decimal literal"),
        ("f32[2], flaot32[2]", "'flaot32' is not a type. Did you mean 'float32'?, in f32[2], flaot32[2]"),
        ("x[2]", "'x' is not a type. There are f32, bf16"),
        ("key<abc>[]", "'key<abc>' is not a type of keys"),
        ("f64[2]", "f64 needs 64-bit types: set JAX_ENABLE_X64=1"),
        ("{3: f32[]}", "expected a key such as 'x'"),
        ("{'x' f32[]}", "invalid syntax"),
        ("{**f32[]}", "expected a key such as 'x'"),
        ("{'x': f32[], x: f32[]}", "a key is given twice"),
        ("(f32[2]", "'(' was never closed, in (f32[2]"),
        ("a=f32[], a=f32[]", "a keyword is given twice"),
        ("**f32[]", "a keyword is given twice, or is missing"),
        (f"f32[{'9' * 4301}]", "Exceeds the limit (4300 digits)"),
        (f"f32[{'9' * 19}]", "(9999999999999999999,) are no sizes of an array"),
        ("(" * 5000, ""),
        ("a=f32[], f32[]", "positional argument follows keyword argument"),
    ],
)
def test_malformed_shapes_say_what_is_wrong(text, message):
    with pytest.raises(BadInput) as info:
        parse_shapes(text)
    assert str(info.value).startswith(f"--shapes: {message}") and len(str(info.value)) < 400


@pytest.mark.slow
def test_commands_of_the_readme_fit_its_program():
    text = (HERE.parent / "README.md").read_text()
    exec(re.search(r"```python\n(.*?)```", text, re.S)[1], scope := {})
    commands = re.findall(r"^    python -m statetx (.*)$", text, re.M)
    assert len(commands) > 3
    for command in commands:
        _, name, *options = shlex.split(command)
        args, kwargs = parse_shapes(options[options.index("--shapes") + 1])
        with jax.numpy_rank_promotion("allow"):  # as users have it
            assert jax.eval_shape(scope[name.partition(":")[2]], *args, **kwargs).shape == ()


# -- the program -----------------------------------------------------------------------------------------------------


def test_help_lists_examples(capsys):
    for argv in (["--help"], ["memory", "-h"]):
        status, out, err = run(capsys, *argv)
        assert status == 0 and err == "" and '--shapes "f32[32,128], i32[32]"' in out and "exit status" in out
    assert run(capsys, "--version") == (0, f"statetx {statetx.__version__}\n", "")


@pytest.mark.slow
def test_as_a_program(tmp_path):
    """The folder in which it is started is on the path; a terminal without the characters of the sparkline prints
    others.
    """
    (tmp_path / "train.py").write_text("def loss(x):\n    return (x * x.sum()).sum()\n")
    command = [sys.executable, "-m", "statetx", "memory", "train:loss", "--shapes", "f32[8,8]"]
    environment = os.environ | {"PYTHONPATH": str(HERE.parent), "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("Peak ") and "train.py:2" in done.stdout

    piped = f'"{sys.executable}" -m statetx memory train:loss --shapes "f32[8,8]" | true'
    done = subprocess.run(piped, shell=True, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.stderr == ""

    bad = subprocess.run([*command[:4], "train:nothing"], capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert bad.returncode == 2 and bad.stderr == "python -m statetx: error: train has no attribute 'nothing'\n"


def test_help_shows_the_section_of_an_error(capsys):
    assert main(["help", "TraceLeakError"]) == 0
    shown = capsys.readouterr().out
    assert (
        shown.startswith("TraceLeakError: A write would leave a tracer")
        and "**Cause.**" in shown
        and "**Fix.**" in shown
    )
    assert "ForeignStateError" not in shown and ":::" not in shown and "    total.value += x\n" in shown
    assert main(["help", "ForeignStateError"]) == 0
    assert "        return f(*args)\n" in capsys.readouterr().out, "code keeps its indented lines"
    assert main(["help", "statetx.testing.assert_memory"]) == 0
    assert "at_most: bytes" in capsys.readouterr().out
    assert main(["help", "TraceLeekError"]) == 2
    assert "Did you mean 'TraceLeakError'?" in capsys.readouterr().err


def test_every_error_has_a_section_in_the_help(capsys):
    errors = [name for name in dir(statetx) if name.endswith(("Error", "Warning")) and name != "StatetxError"]
    assert len(errors) > 12
    for name in errors:
        assert main(["help", name]) == 0
        assert len(capsys.readouterr().out.split()) > 60, name


def test_no_command_shows_the_help(capsys):
    assert main([]) == 0
    assert "COMMAND" in capsys.readouterr().out


FITTING = """
import jax, jax.numpy as jnp
def block(ws, x):
    for w in ws:
        x = jnp.tanh(x @ w)
    return x
def loss(layers, x):
    for ws in layers:
        x = block(ws, x)
    return (x**2).mean()
def main():
    return loss, ([[jax.ShapeDtypeStruct((64, 64), "float32")] * 4] * 6, jax.ShapeDtypeStruct((1024, 64), "float32"))
"""


@pytest.mark.slow
def test_fit_lists_what_was_compiled_and_tells_by_its_exit_status(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fitting.py").write_text(FITTING)
    words = ["fit", "fitting.py:main", "--factory", "--limit"]
    assert main([*words, "1GiB"]) == 0
    assert "it fits" in capsys.readouterr().out
    assert main([*words, "5MiB", "--time-limit", "0"]) == 1  # nothing is known to fit that was not compiled
    shown = capsys.readouterr().out
    assert "(not compiled)" in shown and "(compiled" not in shown
    assert main([*words, "5MiB"]) == 0
    shown = capsys.readouterr().out
    assert (
        "Rematerialize block (6 calls) with @statetx.remat" in shown
        and "(compiled, +" in shown
        and "It fits then." in shown
    )
    assert main([*words, "1KiB"]) == 1
    assert main(words[:-1]) == 2
    assert "give --limit 16GiB, or --target h100" in capsys.readouterr().err


def test_help_without_a_name_lists_all_names(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    status, out, err = run(capsys, "help")
    assert (status, err) == (0, "") and max(map(len, out.splitlines())) <= 80
    lines = [line.split() for line in out.splitlines() if line.startswith("  ")]
    modules = {"policies", "testing"}
    listed = {words[0] for words in lines}
    assert {*statetx.__all__} - modules <= listed and "testing.assert_memory" in listed
    headings = [line for line in out.splitlines() if line and not line.startswith(" ")]
    assert headings[0] == "Errors and warnings" and len(headings) == len({*headings}) > 7


@pytest.mark.parametrize(
    "words, name",
    [
        (["every", "n", "layers"], "remat_scan"),
        (["gradient", "accumulation"], "microbatch"),
        (["profile", "memory"], "memory_profile"),
        (["dead", "tracer"], "TraceLeakError"),
        (["large", "vocabulary"], "chunked"),
    ],
)
def test_help_finds_names_by_words(capsys, words, name):
    status, out, _ = run(capsys, "help", *words)
    (found,) = (block for block in out.split("\n\n")[1:] if "https://" not in block)
    found = [line.split()[0] for line in found.splitlines()]
    assert status == 0 and name in found[:5] and len(found) <= 8


@pytest.mark.parametrize("words", SEARCHES)
def test_first_hit_of_the_help_answers(words):
    first, second = [*show(words.split()).splitlines(), ""][2:4]
    address = second.strip().removeprefix("https://statetx.readthedocs.io/en/latest/")
    assert SEARCHES[words] & {address, first.split()[0]}


def test_help_of_words_that_occur_nowhere(capsys):
    assert run(capsys, "help", "qqqq", "zzzz") == (2, "", "python -m statetx: error: help: statetx has no qqqq zzzz.\n")


@pytest.mark.parametrize("name", ["explain_oom", "plan", "Optimizer", "policies.names", "vjp"])
def test_signature_in_the_help_fits_the_terminal(capsys, monkeypatch, name):
    monkeypatch.setenv("COLUMNS", "70")
    status, out, _ = run(capsys, "help", name)
    head = out.partition(" -> ")[0] if name == "plan" else out[: out.index("\n    ")]
    assert status == 0 and "'Callable" not in out and max(map(len, head.splitlines())) <= 70
    if name in ("explain_oom", "plan"):
        scope = {}
        exec(f"from __future__ import annotations\ndef {out.partition(' -> ')[0]}: ...", scope)  # as it stands there
        found, own = inspect.signature(scope[name]), inspect.signature(getattr(statetx, name))
        assert [(p.name, p.kind) for p in found.parameters.values()] == [
            (p.name, p.kind) for p in own.parameters.values()
        ]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("State.value", "State.value, a property\n    The value; assign to it to replace it.\n"),
        ("MemoryProfile.peak_bytes", "MemoryProfile.peak_bytes, a property\n    Bytes that the program reserves"),
    ],
)
def test_help_shows_a_property(capsys, name, text):
    assert run(capsys, "help", name)[1].startswith(text)


def test_each_command_has_examples_of_its_own(capsys):
    whole = run(capsys, "--help")[1]
    for command in ("memory", "fit", "residuals", "report", "plan", "targets", "help"):
        examples = re.findall(r"python -m statetx (\w.*)", run(capsys, command, "--help")[1].partition("examples:")[2])
        assert examples and all(example.split()[0] == command and example in whole for example in examples)


# Parameters of the functions that no command has, and why.
NO_OPTION = {
    "progress": "on a terminal, always",
    "error": "a command has none",
    "compiler_options": "XLA_FLAGS",
    "target": "of all commands: --target",
}


def test_commands_have_the_options_of_their_functions():
    functions = {
        "memory": statetx.memory_profile,
        "fit": statetx.explain_oom,
        "residuals": statetx.saved_residuals,
        "report": statetx.memory_report,
        "plan": statetx.plan,
    }
    for command, fun in functions.items():
        options = vars(make_parser().parse_args([command, "train:loss", *(["--budget", "1"] * (command == "plan"))]))
        named = {p.name for p in inspect.signature(fun).parameters.values() if p.kind is p.KEYWORD_ONLY}
        assert named - NO_OPTION.keys() <= options.keys(), command


@pytest.mark.parametrize(
    "options, message",
    [
        (["plan", "--budget", "1GiB", "--time-limit", "-1"], "--time-limit: -1 is not a number of seconds"),
        (["fit", "--time-limit", "soon"], "--time-limit: soon is not a number of seconds"),
        (["residuals", "--argnums", "x"], "--argnums: x are no positions"),
        (["plan", "--budget", "1GiB", "--objective", "bytes"], "--objective: invalid choice"),
    ],
)
def test_options_are_checked_first(capsys, options, message):
    command, *options = options
    status, out, err = run(capsys, command, "nothing.py:loss", *options)
    assert (status, out) == (2, "") and message in err


def test_plan_has_the_options_of_the_function(capsys, tmp_path):
    path = tmp_path / "plan.json"
    words = ["--objective", "flops", "--stored-as", "", "--time-limit", "30", "--argnums", "0", "--json", path]
    status, _, err = run(capsys, "plan", *LOSS, "--budget", "1MiB", *words)
    assert (status, err) == (0, "") and statetx.Plan.load(path).objective == "flops"


def test_residuals_and_report_have_the_options_of_the_functions(capsys):
    assert run(capsys, "residuals", *LOSS, "--argnums", "0")[0] == 0
    status, out, _ = run(capsys, "report", *LOSS, "--policies", "nothing,dots")
    assert status == 0 and "nothing" in out and "dots" in out


# -- verify ----------------------------------------------------------------------------------------------------------


def test_verify_compares_with_the_step_without_rematerialization(capsys, tmp_path):
    path = tmp_path / "same.json"
    status, out, err = run(capsys, "verify", "cli_model.py:make_step", "--factory", "--steps", "1", "--json", path)
    assert (status, err) == (0, "")
    assert out.startswith("step is the same step as step without rematerialization: 8 results in 1 step, bit for bit.")
    assert json.loads(path.read_text())["problem"] == ""


@pytest.mark.slow
def test_verify_against_another_step_fails_with_its_state(capsys, tmp_path):
    argv = ["verify", "cli_model.py:make_wrong_step", "--against", "cli_model.py:make_step", "--factory"]
    status, out, err = run(capsys, *argv, "--tolerance", "0")
    assert (status, err) == (1, "") and re.search(r"state 'model.blocks.\d.w'\[0, 0\]: ", out)
    assert re.search(r"The first value that differs: mul .*cli_model.py:\d+ in step", out)


def test_bad_input_of_verify(capsys):
    status, out, err = run(capsys, "verify", "cli_model.py:make_step", "--factory", "--against", "cli_model.py:none")
    assert (status, out) == (2, "") and "has no attribute 'none'" in err and err.count("\n") == 1
