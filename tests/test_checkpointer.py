"""`Checkpointer`: every kind of state and value, refusals that leave states alone, shardings, kills."""

import contextlib
import enum
import gc
import inspect
import json
import os
import pathlib
import random
import re
import shutil
import subprocess
import sys
import threading
import time

import brainstate
import brainunit as u
import damaged
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from libraries import get

import statetx
from helpers import Counted, compilations

CHILD = pathlib.Path(__file__).with_name("interrupted.py")
OPTIMISER = optax.adamw(1e-3)


class Everything:
    """A state of every kind, with every sort of value."""

    def __init__(self, seed):
        self.number = seed
        x = np.random.default_rng(seed).normal(size=(4, 3)).astype(np.float32)
        self.w = statetx.Param(jnp.asarray(x))
        weights = {"w": jnp.asarray(x), "b": jnp.asarray(x[0])}
        self.optimizer = statetx.State(OPTIMISER.update(weights, OPTIMISER.init(weights), weights)[1])
        self.dtypes = [
            statetx.State(jnp.asarray(x > 0 if d == "bool" else x).astype(d))
            for d in ("bfloat16", "float8_e4m3fn", "int4", "uint4", "bool", "complex64", "uint32")
        ]
        self.rng = statetx.RngState(seed)
        self.keys = statetx.State(jax.random.split(jax.random.key(seed, impl="rbg"), 3))
        self.numbers = statetx.State(
            {"int": seed, "float": seed / 3, "flag": seed > 1, "text": str(seed), "none": None, "complex": seed - 0.5j}
        )
        self.weak = statetx.State(jnp.asarray(float(seed)))
        self.numpy = statetx.State([x.astype(np.float64), np.int16(seed)])
        self.empty = statetx.State(jnp.zeros((0, 3)))
        self.linear = brainstate.nn.Linear(3, 2)  # its ParamState holds a dict
        self.linear.weight.value = {"weight": jnp.asarray(x[:3, :2]), "bias": jnp.asarray(x[3, :2])}
        self.random = brainstate.random.RandomState(seed)
        self.voltage = brainstate.HiddenState(jnp.asarray(x[0]) * u.mV)
        self.flax = nnx.Linear(3, 2, rngs=nnx.Rngs(seed), bias_init=nnx.initializers.normal())
        self.ref = jax.new_ref(jnp.asarray(x))


def contents(obj):
    """All that the states hold, to compare: types and bits."""

    def show(x):
        if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return str(x.dtype), np.asarray(jax.random.key_data(x)).tolist()
        weak = jax.typeof(x).weak_type if isinstance(x, jax.Array) else None
        return type(x), weak, getattr(x, "dtype", None), np.asarray(x).tobytes() if hasattr(x, "dtype") else x

    return {
        path: (jax.tree.structure(get(s)), [show(x) for x in jax.tree.leaves(get(s))])
        for path, s in statetx.states(obj).items()
    }


def on_mesh(spec, shape=(8,), axes=("d",), kind=AxisType.Auto):
    return NamedSharding(jax.make_mesh(shape, axes, axis_types=(kind,) * len(axes)), PartitionSpec(*spec))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A directory with step 7 of `Everything(1)`, and its values."""
    directory = tmp_path_factory.mktemp("saved")
    model = Everything(1)
    with statetx.Checkpointer(directory, model) as checkpointer:
        assert checkpointer.restore() is None and checkpointer.steps == []
        assert checkpointer.save(7) and checkpointer.wait() == 7
    return directory, contents(model)


@pytest.mark.thorough
def test_restore_every_kind_of_state_and_value(saved):
    directory, expected = saved
    other = Everything(2)
    before = contents(other)
    assert [path for path in expected if before[path] == expected[path]] == ["empty"], "the models must differ"
    with statetx.Checkpointer(directory, other) as checkpointer:
        assert checkpointer.restore() == 7
    assert contents(other) == expected
    assert other.number == 2  # no state


def test_restore_an_array_into_a_python_number(tmp_path):
    trained, fresh = statetx.State(0), statetx.State(0)
    statetx.jit(lambda: setattr(trained, "value", trained.value + 1))()
    assert isinstance(trained.value, jax.Array)
    with statetx.Checkpointer(tmp_path, {"n": trained}) as checkpointer:
        checkpointer.save(1)
    with statetx.Checkpointer(tmp_path, {"n": fresh}) as checkpointer:
        checkpointer.restore()
        assert int(fresh.value) == 1 and jax.typeof(fresh.value) == jax.typeof(trained.value)
        fresh.value = 5
        checkpointer.save(2)
        checkpointer.restore(1)
        checkpointer.restore(2)
    assert fresh.value == 5 and type(fresh.value) is int


@pytest.mark.parametrize("devices", [1, 8])
def test_save_survives_donation_by_the_next_step(tmp_path, devices):
    w = statetx.Param(jax.device_put(jnp.zeros((512, 512)), on_mesh(("d",), (devices,))))
    step = statetx.jit(lambda: setattr(w, "value", w.value + 1), donate_states=True)
    with statetx.Checkpointer(tmp_path, {"w": w}) as checkpointer:
        step()
        checkpointer.save(1)
        for _ in range(3):
            old = w.value
            step()
        assert old.is_deleted()
        checkpointer.restore()
    assert (w.value == 1).all()


# -- when, and how many --


def test_save_every_force_and_max_to_keep(tmp_path):
    n = statetx.State(jnp.zeros(()))
    with statetx.Checkpointer(tmp_path, [n], save_every=3, max_to_keep=2) as checkpointer:
        begun = [step for step in range(1, 11) if checkpointer.save(step)]
        assert begun == [3, 6, 9] and checkpointer.wait() == 9 and checkpointer.steps == [6, 9]
        assert repr(checkpointer) == f"Checkpointer({str(tmp_path)!r}, steps [6, 9])"
        assert checkpointer.save(10, force=True) and checkpointer.wait() == 10 and checkpointer.steps == [9, 10]
        with pytest.raises(statetx.CheckpointError, match=r"save\(10\).*has step 10"):
            checkpointer.save(10)
    with pytest.raises(ValueError, match="max_to_keep"):
        statetx.Checkpointer(tmp_path, [n], max_to_keep=0)


def test_folders_of_the_user_are_no_steps_and_stay(tmp_path):
    for fold in ("1", "2", "900", "007", "notes"):
        (tmp_path / fold / "manifest").mkdir(parents=True)
        (tmp_path / fold / "measurements.csv").write_text("the only copy")
    (tmp_path / "3").write_text("a file")
    state = statetx.State(jnp.zeros(2))
    with statetx.Checkpointer(tmp_path, [state], max_to_keep=1) as checkpointer:
        assert checkpointer.steps == [] and checkpointer.restore() is None
        for step in (1, 3):
            with pytest.raises(
                statetx.CheckpointError, match=rf"save\({step}\): there is .*{step}, which is not a step"
            ):
                checkpointer.save(step)
        for step in (100, 200, 300):
            checkpointer.save(step)
        assert checkpointer.wait() == 300 and checkpointer.steps == [300]
    left = sorted(p.name for p in tmp_path.iterdir())
    assert left == ["007", "1", "2", "3", "300", "900", "notes"]
    assert all((tmp_path / fold / "measurements.csv").exists() for fold in ("1", "2", "900", "007", "notes"))


def test_step_that_was_moved_and_linked_back_stays(tmp_path):
    state, directory = statetx.State(jnp.ones(2)), tmp_path / "runs"
    with statetx.Checkpointer(directory, [state]) as checkpointer:
        checkpointer.save(1)
    shutil.move(directory / "1", tmp_path / "moved")
    (directory / "1").symlink_to(tmp_path / "moved")
    with statetx.Checkpointer(directory, [state], max_to_keep=2) as checkpointer:
        for step in (20, 21, 22, 23):
            state.value = jnp.full(2, float(step))
            assert checkpointer.save(step) and checkpointer.wait() == step
        assert checkpointer.steps == [1, 22, 23]
        assert checkpointer.restore(1) == 1 and state.value.tolist() == [1, 1]
    assert (tmp_path / "moved" / "manifest").is_dir()


READ_ONLY = """
import os, sys, jax.numpy as jnp, statetx
state, directory = statetx.State(jnp.zeros(2)), sys.argv[1]
checkpointer = statetx.Checkpointer(directory, [state])
checkpointer.save(1), checkpointer.wait()
os.rename(directory, directory + ".moved"), open(directory, "w").close()  # root writes to all directories
try:
    checkpointer.save(2)
except statetx.CheckpointError as e:
    print(e)
"""


@pytest.mark.thorough
def test_process_ends_after_a_save_to_a_directory_that_cannot_be_written(tmp_path):
    """orbax would leave threads behind that wait five minutes for each other."""
    command = [sys.executable, "-c", READ_ONLY, str(tmp_path / "runs")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert re.search(r"save\(2\): .*runs cannot be written: Not a directory", done.stdout), done.stdout


def test_save_unsupported_value_raises_with_path(tmp_path):
    model = {"w": statetx.Param(jnp.ones(2)), "f": statetx.State({"g": print})}
    with statetx.Checkpointer(tmp_path, model) as checkpointer:
        with pytest.raises(statetx.StateValueError, match=r"f\['g'\].*builtin_function.*\n.*statetx.states"):
            checkpointer.save(1)
        assert checkpointer.steps == []
        statetx.Checkpointer(tmp_path, statetx.states(model, statetx.Param)).save(1)

    with statetx.Checkpointer(tmp_path / "long", {"x": statetx.State([np.zeros(2, np.longdouble)])}) as checkpointer:
        with pytest.raises(statetx.StateValueError, match=r"'x\[0\]' holds .*\[2\], and no JAX array has this dtype"):
            checkpointer.save(1)
        assert checkpointer.steps == []

    class Phase(enum.IntEnum):
        WARM_UP = 1

    with statetx.Checkpointer(tmp_path / "enum", {"phase": statetx.State(Phase.WARM_UP)}) as checkpointer:
        with pytest.raises(
            statetx.StateValueError, match="the state 'phase' holds Phase, which is not an array, number"
        ):
            checkpointer.save(1)


@pytest.mark.parametrize("keys", [(("a", "b"), "a.b"), (1, "1")])
def test_states_of_one_path_raise(keys, tmp_path):
    first, second = statetx.State(jnp.ones(2)), statetx.State(jnp.zeros(2))
    model = (
        {keys[0][0]: {keys[0][1]: first}, keys[1]: second}
        if isinstance(keys[0], tuple)
        else {keys[0]: first, keys[1]: second}
    )
    with pytest.raises(statetx.CheckpointError, match=r"two of the states given have the path '(a\.b|1)'"):
        statetx.Checkpointer(tmp_path, model).save(1)
    with statetx.Checkpointer(tmp_path, {"a": first, "b": [first]}) as checkpointer:  # one state twice is saved once
        checkpointer.save(1)


def test_save_and_restore_inside_a_transform_raise(tmp_path):
    w = statetx.Param(jnp.ones(2))
    with statetx.Checkpointer(tmp_path, [w]) as checkpointer:
        for inside in (lambda: checkpointer.save(1), checkpointer.restore):
            with pytest.raises(statetx.CheckpointError, match="outside"):
                statetx.jit(inside)()
        assert checkpointer.steps == []


# -- foreign and damaged checkpoints --


def refused(directory, model, match, step=None):
    """Check that restoring raises an error that matches, and changes nothing."""
    before = {path: jax.tree.leaves(get(s)) for path, s in statetx.states(model).items() if not isinstance(s, jax.Ref)}
    with statetx.Checkpointer(directory, model) as checkpointer:
        with pytest.raises(statetx.CheckpointError, match=match):
            checkpointer.restore(step)
    for path, leaves in before.items():
        assert all(a is b for a, b in zip(leaves, jax.tree.leaves(get(statetx.states(model)[path])), strict=True)), path


def without(model, name):
    delattr(model, name)
    return model


def with_value(model, name, value):
    getattr(model, name).value = value
    return model


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda m: setattr(m, "more", statetx.State(0)) or m, "it has no state 'more'"),
        (lambda m: without(m, "rng"), "it has a state 'rng'"),
        (lambda m: with_value(m, "w", jnp.zeros((4, 4))), r"'w' is f32\[4,3\] in it, and f32\[4,4\]"),
        (lambda m: with_value(m, "w", jnp.zeros((4, 3), jnp.float16)), r"'w' is f32\[4,3\] in it, and f16"),
        (lambda m: with_value(m, "voltage", get(m.voltage).to(u.volt)), r"'voltage' is .*mV.* and .*V"),
        (lambda m: with_value(m, "rng", jax.random.key(0, impl="rbg")), r"'rng' is key<fry>\[\] in it, and key<rbg>"),
        (lambda m: with_value(m, "numbers", {"int": 1}), r"'numbers' is PyTreeDef.*float"),
        (lambda m: with_value(m, "optimizer", optax.sgd(1.0).init({})), r"'optimizer' is PyTreeDef"),
    ],
    ids="more less shape dtype unit generator keys optimizer".split(),
)
def test_restore_into_other_states_raises_with_first_path(saved, change, match):
    refused(saved[0], change(Everything(2)), match)


def test_restore_missing_step_raises(saved):
    refused(saved[0], Everything(2), "There is no step 3 .* it has 7", step=3)


def close_coroutines():
    """Where a read fails, orbax leaves coroutines behind that nobody waits for, and that complain in another test."""
    for x in gc.get_objects():
        if inspect.iscoroutine(x):
            with contextlib.suppress(Exception):  # which orbax makes of being closed
                x.close()


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_restore_damaged_file_raises_or_is_exact(tmp_path):
    x = jnp.asarray(np.random.default_rng(0).normal(size=512), jnp.float32)
    with statetx.Checkpointer(tmp_path / "whole", [statetx.State(x)]) as checkpointer:
        checkpointer.save(1)
    files = [f for f in sorted((tmp_path / "whole").rglob("*")) if f.is_file() and f.name != "commit_success.txt"]
    damage = random.Random(0)
    refused_files = set()
    for n, (file, is_cut) in enumerate([(file, is_cut) for file in files for is_cut in (True, False)]):
        copy = tmp_path / str(n)
        shutil.copytree(tmp_path / "whole", copy)
        broken = copy / file.relative_to(tmp_path / "whole")
        content = bytearray(broken.read_bytes())
        if is_cut:
            content = content[: len(content) * 2 // 3]
        else:
            content[damage.randrange(len(content))] ^= 1 << damage.randrange(8)
        broken.write_bytes(content)
        state = statetx.State(jnp.zeros(512))
        before = state.value
        with statetx.Checkpointer(copy, [state]) as checkpointer:
            try:
                restored = checkpointer.restore()
            except statetx.CheckpointError:
                close_coroutines()
                assert state.value is before
                refused_files.add((file.name, is_cut))
            else:
                np.testing.assert_array_equal(state.value, x if restored else before)
    assert {("metadata", True), ("metadata", False), ("manifest.ocdbt", True)} <= refused_files
    assert len(refused_files) >= 8, refused_files


def test_restore_flipped_bit_raises(tmp_path):
    noise = np.random.default_rng(0).integers(0, 2**32, (2, 4096), np.uint32)
    model = {"first": statetx.State(jnp.asarray(noise[0])), "second": statetx.State({"x": jnp.asarray(noise[1])})}
    with statetx.Checkpointer(tmp_path, model) as checkpointer:
        checkpointer.save(1)
    piece = noise[1, 1000:1004].tobytes()  # noise cannot be compressed; which file holds it is a matter of timing
    data = next(f for f in tmp_path.rglob("ocdbt.process_0/d/*") if piece in f.read_bytes())
    content = bytearray(data.read_bytes())
    place = content.find(piece)
    content[place] ^= 1
    data.write_bytes(content)
    model["first"].value = jnp.zeros(4096, jnp.uint32)
    refused(tmp_path, model, r"\"second\['x'\]\" has changed since it was written")


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_restore_swapped_arrays_raises(kind, tmp_path):
    x = jnp.arange(128.0).reshape(16, 8)
    swapped = [x[::-1], x[:, ::-1], x.reshape(16, 4, 2)[:, :, ::-1].reshape(16, 8), x.at[3:5].set(x[4:2:-1])]
    shardings = [None, on_mesh(("d",), kind=kind), on_mesh((None, "b"), (2, 4), ("a", "b"), kind=kind)]
    model = {"x": statetx.State(x)}
    with statetx.Checkpointer(tmp_path, model, max_to_keep=None) as checkpointer:
        for step, value in enumerate([x, *swapped]):
            model["x"].value = jax.device_put(value, shardings[step % 3])
            checkpointer.save(step)
    for step in range(1, 1 + len(swapped)):  # the manifest of the first step beside the arrays of another
        shutil.copytree(tmp_path / "0" / "manifest", tmp_path / str(step) / "manifest", dirs_exist_ok=True)
    for sharding in shardings:
        model["x"].value = jax.device_put(jnp.zeros_like(x), sharding)
        with statetx.Checkpointer(tmp_path, model) as checkpointer:
            checkpointer.restore(0)
        np.testing.assert_array_equal(model["x"].value, x)
    for step in range(1, 1 + len(swapped)):
        refused(tmp_path, model, "has changed since it was written", step)


SMALL = [name for name in dir(jnp) if name.startswith(("int2", "int4", "uint2", "uint4", "float4_", "float8_"))]


@pytest.mark.parametrize("name", SMALL)
def test_restore_small_dtypes(tmp_path, name):
    """Of some of them tensorstore has no arrays: every pattern of bits, in each place."""
    dtype = jnp.dtype(name)
    num_bits = jnp.finfo(dtype).bits if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).bits
    x = np.arange(2**num_bits, dtype=np.uint8).repeat(8)
    x = x.view(dtype) if jnp.issubdtype(dtype, jnp.floating) else x.astype(dtype)
    mesh = on_mesh(("d",))
    places = [jnp.asarray, lambda x: jax.device_put(x, mesh)]
    if num_bits == 8:
        places.append(lambda x: jax.device_put(x, mesh.with_memory_kind("pinned_host")))
    values = [*(place(x) for place in places), x, x[-1]]
    states = [statetx.State(value) for value in values]
    with statetx.Checkpointer(tmp_path, states) as checkpointer:
        checkpointer.save(1)
        for state, place in zip(states, [*places, np.asarray, lambda x: x[0]], strict=True):
            state.value = place(np.zeros_like(x))
        checkpointer.restore()
    for state, value in zip(states, values, strict=True):
        assert type(state.value) is type(value) and state.value.dtype == dtype
        assert getattr(state.value, "sharding", None) == getattr(value, "sharding", None)
        assert getattr(state.value, "committed", None) == getattr(value, "committed", None)
        assert np.asarray(state.value).tobytes() == np.asarray(value).tobytes()


def test_restore_numpy_scalars(tmp_path):
    states = [statetx.State(np.float64(0.1)), statetx.State(np.int32(7)), statetx.State(np.bool_(True))]
    with statetx.Checkpointer(tmp_path, states) as checkpointer:
        checkpointer.save(1)
        for state in states:
            state.value = type(state.value)(0)
        checkpointer.restore()
    assert [s.value for s in states] == [0.1, 7, True]


def test_restore_changed_number_raises(tmp_path):
    state = statetx.State(5)
    with statetx.Checkpointer(tmp_path, [state]) as checkpointer:
        checkpointer.save(1)
    manifest = tmp_path / "1" / "manifest" / "metadata"
    assert manifest.read_text().count('"value": 5') == 1
    manifest.write_text(manifest.read_text().replace('"value": 5', '"value": 7'))
    refused(tmp_path, [state], "manifest .* has changed")


@pytest.mark.parametrize("num", [60, pytest.param(300, marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_restore_tampered_manifest_raises_one_error_or_is_exact(saved, monkeypatch, num):
    """With the checksum of what it says. Then only numbers, text and weak types can be forged; unknown fields are not
    read.
    """
    directory, expected = saved
    file, rng, counts = directory / "7" / "manifest" / "metadata", random.Random(0), {"error": 0, "restored": 0}
    original, model = file.read_text(), Everything(2)
    states = json.loads(original)["states"]
    with statetx.Checkpointer(directory, model) as checkpointer:
        if num < 100:  # without orbax, which takes most of the time
            monkeypatch.setattr(checkpointer, "_read", reads_once(checkpointer._read, file))
            checkpointer.restore()
        for _ in range(num):
            tampered = damaged.poisoned(states, rng)
            file.write_text(json.dumps(damaged.sealed(tampered)))
            before = contents(model)
            try:
                assert checkpointer.restore() == 7
            except statetx.CheckpointError as e:
                assert "step 7 in " in str(e) and len(str(e)) < 4000
                assert contents(model) == before
                counts["error"] += 1
            else:
                counts["restored"] += 1
                for path, found in contents(model).items():
                    leaves = [(leaf, states[path]["leaves"][k]) for k, leaf in tampered[path]["leaves"].items()]
                    forged = [pair for pair in leaves if pair[0] != pair[1]]
                    assert found == expected[path] or forged, path
                    assert all(
                        not (a.keys() ^ b.keys()) & {"type", "value", "digest", "bytes", "numpy"}
                        and a.get("digest") == b.get("digest")
                        for a, b in forged
                    )
        file.write_text(original)
        assert checkpointer.restore() == 7 and contents(model) == expected
    close_coroutines()
    assert counts["error"] > 0.8 * num, counts


def reads_once(read, file):
    """In place of a method that reads by orbax: the manifest from its file, and the arrays from memory."""
    whole = {}

    def read_quickly(location, step, **item):
        if "manifest" in item:
            return json.loads(file.read_text())
        if not whole:
            whole.update(read(location, step, **item))
        targets = item["states"].item
        pick = lambda path, x: {k: x[k] for k in targets[path]} if isinstance(x, dict) else x
        return {path: pick(path, x) for path, x in whole.items() if path in targets}

    return read_quickly


@pytest.mark.parametrize("name", ["manifest/metadata", "_CHECKPOINT_METADATA", "states/_METADATA", "metrics/metrics"])
def test_pipes_in_a_step_are_not_read(tmp_path, name):
    state = statetx.State(jnp.ones(2))
    with statetx.Checkpointer(tmp_path, [state]) as checkpointer:
        checkpointer.save(1)
    file = tmp_path / "1" / name
    file.parent.mkdir(exist_ok=True)
    file.unlink(missing_ok=True)
    os.mkfifo(file)
    is_step = name != "metrics/metrics"  # a Checkpointer writes none
    refused(tmp_path, [state], f"'{name}' in step 1 .* is not a file" if is_step else "There is no step 1", step=1)


@pytest.mark.parametrize("item", ["manifest", "states"])
def test_restore_with_a_state_of_another_thread_changes_nothing(tmp_path, monkeypatch, item):
    a, b = statetx.State(jnp.ones(2)), statetx.State(jnp.ones(2))
    inside, done = threading.Event(), threading.Event()

    @statetx.jit
    def slow(x):
        b.value = b.value + x
        inside.set()
        done.wait(60)

    with statetx.Checkpointer(tmp_path, {"a": a, "b": b}) as checkpointer:
        checkpointer.save(1)
        a.value = before = jnp.zeros(2)
        thread = threading.Thread(target=slow, args=(1.0,))
        read = checkpointer._read

        def read_meanwhile(*args, **items):
            if item in items:
                thread.start()
                inside.wait(60)
            return read(*args, **items)

        monkeypatch.setattr(checkpointer, "_read", read_meanwhile)
        try:
            with pytest.raises(statetx.ForeignStateError):
                checkpointer.restore()
        finally:
            done.set()
            thread.join()
    assert a.value is before


# -- many devices --


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_restore_keeps_current_shardings(tmp_path, kind):
    x = jnp.arange(128.0).reshape(16, 8)
    rows, columns = on_mesh(("d",), kind=kind), on_mesh((None, "b"), (2, 4), ("a", "b"), kind=kind)
    w = statetx.Param(jax.device_put(x, rows))
    alone, key = statetx.State(jnp.ones(3)), statetx.State(jax.device_put(jax.random.key(3), on_mesh((), kind=kind)))
    with statetx.Checkpointer(tmp_path, {"w": w, "alone": alone, "key": key}) as checkpointer:
        checkpointer.save(1)
        for sharding in (rows, columns, None):
            zeros = jnp.zeros_like(x)
            w.value = zeros if sharding is None else jax.device_put(zeros, sharding)
            before, alone.value = w.value, jnp.zeros(3)
            checkpointer.restore()
            np.testing.assert_array_equal(w.value, x)
            assert w.value.sharding == before.sharding and w.value.committed == before.committed
            assert not alone.value.committed and (alone.value == 1).all()
            assert key.value.sharding == on_mesh((), kind=kind)


def test_restore_keeps_host_memory(tmp_path):
    pinned = on_mesh(("d",)).with_memory_kind("pinned_host")
    moments = statetx.State(jax.device_put(jnp.arange(128.0).reshape(16, 8), pinned))
    with statetx.Checkpointer(tmp_path, {"moments": moments}) as checkpointer:
        checkpointer.save(1)
        moments.value = jax.device_put(jnp.zeros((16, 8)), pinned)
        checkpointer.restore()
    assert moments.value.sharding == pinned
    np.testing.assert_array_equal(jax.device_get(moments.value).ravel(), np.arange(128.0))


def test_restore_does_not_recompile_the_step(tmp_path):
    w, n = statetx.Param(jax.device_put(jnp.arange(8.0), on_mesh(("d",)))), statetx.State(0)

    @Counted
    def body(x):
        w.value = w.value * x
        n.value += 1

    step = statetx.jit(body)
    with statetx.Checkpointer(tmp_path, [w, n]) as checkpointer:
        step(2.0)
        checkpointer.save(1)
        step(2.0)
        checkpointer.restore()
        with compilations() as compiled:
            step(2.0)
    assert body.runs == 1 and not compiled
    np.testing.assert_array_equal(w.value, 4.0 * jnp.arange(8.0))


# -- killed --


def lives(directory, kills, seed):
    """Kill a training run repeatedly, at random moments, and let it end; yields the output of each run."""
    moments = random.Random(seed)
    env = os.environ | {"JAX_PLATFORMS": "cpu"}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(CHILD.parents[1]), env.get("PYTHONPATH")]))
    steps = 0
    for life in range(kills + 1):
        is_last = life == kills
        command = [sys.executable, str(CHILD), str(directory), str(steps + 3 if is_last else 10**9)]
        with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            printed = []
            if not is_last:
                # Most of them while step after step is saved, some while it starts, compiles or restores.
                wanted = "saved" if moments.random() < 0.8 else "begin" if moments.random() < 0.8 else ""
                while wanted and wanted not in "".join(printed[-1:]):
                    printed.append(child.stdout.readline())
                time.sleep(moments.uniform(0.0, 1.0))
                child.kill()
            printed += child.stdout.readlines()
        assert child.returncode == (0 if is_last else -9)
        said = [json.loads(line) for line in printed if line.endswith("\n")]  # the last may have been cut off
        steps = max([steps, *(what["step"] for what in said if "step" in what)])
        yield said


def check_kills(directory, kills, seed):
    losses, saved, begun = {}, 0, []
    for said in lives(directory, kills, seed):
        for what in said:
            if "begin" in what:
                assert what["begin"] >= saved, "a step that was reported as saved is lost"
                begun.append(what["begin"])
            elif "saved" in what:
                saved = what["saved"]
            elif "step" in what:
                losses.setdefault(what["step"], set()).add(what["loss"])
    expected = said[-1]["expected"]
    assert len(expected) == saved == max(losses) and losses == {i: {x} for i, x in enumerate(expected, 1)}
    return {"begun": begun, "steps": saved}


@pytest.mark.slow
def test_killed_run_resumes_to_the_same_losses(tmp_path):
    report = check_kills(tmp_path, kills=2, seed=0)
    assert report["begun"][-1] > 0


@pytest.mark.slow
def test_killed_run_resumes_to_the_same_losses_after_fifty_kills(tmp_path):
    report = check_kills(tmp_path, kills=50, seed=1)
    assert len(set(report["begun"])) > 25, report
    print(report)


# -- invalid objects, steps and directories --


@pytest.mark.parametrize(
    ("obj", "match"),
    [
        (lambda w: {"w": w.value}, r"'w' is f32\[3\], not a state"),
        (lambda w: {"w": w.value.astype("uint8")}, r"'w' is u8\[3\]"),
        (lambda w: {"w": w, "step": 3}, "'step' is int, not a state"),
        (lambda w: {"w": w, "deep": [{"rate": 0.1}]}, "'deep.0.rate' is float, not a state"),
        (lambda w: {"w": w, "name": "a"}, "'name' is str, not a state"),
        (lambda w: 3.0, "'its argument' is float, not a state"),
        (lambda w: np.ones(3), "f64"),
        (lambda w: {}, "there is no state in {}"),
        (lambda w: lambda x: x, "there is no state in"),
        (lambda w: None, "there is no state in None"),
    ],
    ids="value unsigned integer number name lone array empty function None".split(),
)
def test_save_object_without_states_raises(tmp_path, obj, match):
    w = statetx.Param(jnp.ones(3))
    with statetx.Checkpointer(tmp_path, obj(w)) as checkpointer:
        with pytest.raises(statetx.CheckpointError, match=match):
            checkpointer.save(1)
        assert checkpointer.steps == []


def test_save_model_with_stateless_attributes(tmp_path):
    class Model:
        def __init__(self):
            self.w, self.scale = statetx.Param(jnp.ones(3)), jnp.ones(3)

    model = {"layers": [Model(), jnp.tanh], "none": None}
    with statetx.Checkpointer(tmp_path, model) as checkpointer:
        assert checkpointer.save(1)


@pytest.mark.parametrize("step", [True, 1.5, -1, "1", None, np.float32(1)])
def test_step_must_be_an_integer(tmp_path, step):
    with statetx.Checkpointer(tmp_path, [statetx.State(1.0)]) as checkpointer:
        with pytest.raises(statetx.CheckpointError, match="a step is a whole number of at least 0"):
            checkpointer.save(step)
        if step is not None:
            with pytest.raises(statetx.CheckpointError, match=r"Checkpointer.restore: a step"):
                checkpointer.restore(step)
        assert checkpointer.steps == []
        assert checkpointer.save(np.int32(0)) and checkpointer.wait() == 0


def test_directory_that_is_a_file_raises(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    for directory in (file, file / "deeper" / "still"):
        with pytest.raises(statetx.CheckpointError, match=r"file is not a directory"):
            statetx.Checkpointer(directory, [statetx.State(1.0)])


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
@pytest.mark.parametrize("name", ["rng", "x"])
def test_restore_key_without_type_raises(tmp_path, name):
    states = {"rng": statetx.RngState(3), "x": statetx.State(jnp.ones(3))}
    with statetx.Checkpointer(tmp_path, {name: states[name]}) as checkpointer:
        checkpointer.save(1)
    (tmp_path / "1/states/array_metadatas/process_0").unlink()
    before = states[name].value
    with statetx.Checkpointer(tmp_path, {name: states[name]}) as checkpointer:
        if name == "rng":
            with pytest.raises(statetx.CheckpointError, match="'rng' has changed since it was written"):
                checkpointer.restore()
            assert states[name].value is before
        else:  # nobody needs it for other arrays
            assert checkpointer.restore() == 1
