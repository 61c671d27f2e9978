"""Loops with carries on disk: the bits of the plain loop, whatever happens to the process and its files; the schedule
of carries in memory and on disk, which has the cost of H-Revolve.
"""

import contextlib
import errno
import functools
import gc
import heapq
import itertools
import json
import os
import pathlib
import random
import shutil
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from libraries import LIBRARIES

import statetx
from helpers import assert_close
from statetx import _files, policies
from statetx._segments import run as module
from statetx._segments.program import Segments
from statetx._segments.schedule import DISK, MEMORY, Advance, Drop, Keep, Load, Reverse, TierSchedule, jump_in_memory
from statetx._segments.store import Store
from statetx.policies import Disk

STEPS = 12
RNG = np.random.default_rng(0)
W = jnp.asarray(RNG.normal(size=(3, 3)) / 2, jnp.float32)
H = jnp.asarray(RNG.normal(size=3), jnp.float32)
XS = jnp.asarray(RNG.normal(size=(STEPS, 3)), jnp.float32)
EAGER = {"slots": 1, "save_every": 0, "costs": (0.1, 0.1)}  # files after each segment, and files of the schedule


def step(w, h, x):
    h = jnp.tanh(h @ w + x * jnp.sum(w))  # two uses of w, whose cotangents are summed in the order of the plain loop
    return h, jnp.sum(h)


def loss(w, h, xs, checkpoint=None, reverse=False, scale=1.0):
    h, ys = statetx.scan(functools.partial(step, w), h, xs, checkpoint=checkpoint, reverse=reverse)
    return jnp.sum(h**2) + ys @ jnp.arange(scale, scale + len(xs))


of_all = jax.value_and_grad(loss, (0, 1, 2))


@functools.cache
def plain(reverse=False):
    return of_all(W, H, XS, None, reverse)


def same(actual, desired):
    jax.tree.map(np.testing.assert_array_equal, actual, desired)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(
    "options", [EAGER, {"slots": 2}, {"slots": 1, "host": 2, "save_every": 0}, {"slots": 1, "limit": "64KiB"}], ids=str
)
def test_values_and_gradients_have_the_bits_of_the_plain_loop(tmp_path, options, reverse):
    disk = Disk(tmp_path, 4, **options)
    same(of_all(W, H, XS, disk, reverse), plain(reverse))
    with forbidden("advance", "pull"):  # it is done, and its results are there
        same(of_all(W, H, XS, disk, reverse), plain(reverse))


@contextlib.contextmanager
def forbidden(*names):
    """Let the programs of segments not run."""

    def run(*_):
        raise AssertionError("a segment has run")

    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.setattr(Segments, name, run)
        yield


@pytest.mark.parametrize("inner", [None, policies.Slots(2), policies.Levels(2)], ids=str)
@pytest.mark.parametrize("name", LIBRARIES)
def test_states_of_every_kind_take_part(name, inner, tmp_path):
    library = LIBRARIES[name]

    def results(checkpoint):
        w, count, rng = library.param(W), library.make(jnp.zeros(())), library.rng()
        of_w = () if library.name == "ref" else (w,)

        def step(h, x):
            weights = w if library.name == "ref" else library.get(w)
            library.set(count, library.get(count) + jnp.sum(h))
            h = jnp.tanh(h @ weights + x) + 0.1 * jax.random.normal(library.draw(rng), h.shape)
            return h, jnp.sum(h) * library.get(count)

        def loss(h):
            h, ys = statetx.scan(step, h, XS, checkpoint=checkpoint)
            return jnp.sum(ys) + jnp.sum(h) + library.get(count)

        options = {"wrt": list(of_w)} if of_w else {}
        out = statetx.value_and_grad(loss, 0, **options)(H)
        key = library.get(library.key_of(rng))
        state = jax.tree.map(
            lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x, key
        )
        return (out[0], library.get(count), state), out[1]

    (values, grads), (plain_values, plain_grads) = results(Disk(tmp_path, 4, checkpoint=inner, **EAGER)), results(None)
    same(values, plain_values)
    # Within a segment a strategy sums the cotangents of constants from zero.
    close = functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6)
    jax.tree.map(np.testing.assert_array_equal if inner is None else close, grads, plain_grads)


@pytest.mark.parametrize("inner", [policies.Slots(2), policies.Levels(2)], ids=str)
@pytest.mark.parametrize("reverse", [False, True])
def test_within_a_segment_a_strategy_stores_less(tmp_path, inner, reverse):
    disk = Disk(tmp_path, 4, checkpoint=inner, **EAGER)
    value, grads = of_all(W, H, XS, disk, reverse)
    plain_value, plain_grads = plain(reverse)
    same(value, plain_value)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), grads, plain_grads)
    mapped = lambda h: loss(W, h, XS, disk, reverse)
    forward = (H,), (jnp.ones_like(H),)
    same(jax.jvp(mapped, *forward), jax.jvp(lambda h: loss(W, h, XS, None, reverse), *forward))


def ei_network():
    """Excitatory and inhibitory neurons of brainpy, after Vogels and Abbott 2005: 16 and 4."""
    brainstate, brainpy, u = (pytest.importorskip(name) for name in ("brainstate", "brainpy", "brainunit"))

    class Network(brainstate.nn.Module):
        def __init__(self):
            super().__init__()
            options = {"V_rest": -60 * u.mV, "V_th": -50 * u.mV, "V_reset": -60 * u.mV}
            self.neurons = brainpy.state.LIFRef(20, R=1 * u.ohm, tau=20 * u.ms, tau_ref=5 * u.ms, **options)
            self.excitation, self.inhibition = self.project(16, 2, 0), self.project(4, 20, -80)

        def project(self, num, strength, potential):
            weights = RNG.random((num, 20)).astype(np.float32) * strength * u.mS
            return brainpy.state.AlignPostProj(
                comm=brainstate.nn.Linear(num, 20, w_init=weights, b_init=None),
                syn=brainpy.state.Expon.desc(20, tau=5 * u.ms),
                out=brainpy.state.COBA.desc(E=potential * u.mV),
                post=self.neurons,
            )

        def update(self, n, current):
            with brainstate.environ.context(t=n * 0.1 * u.ms, dt=0.1 * u.ms):
                spikes = self.neurons.get_spike()
                self.excitation(spikes[:16])
                self.inhibition(spikes[16:])
                noise = brainstate.random.uniform(0.9, 1.1, 20)
                self.neurons(current * noise * u.mA)
                return self.neurons.get_spike()

    network = Network()
    return network, network.states(brainstate.ParamState), lambda: brainstate.nn.init_all_states(network), brainstate


@pytest.mark.slow
def test_a_network_of_brainpy_runs_unchanged(tmp_path):
    network, weights, initialize, brainstate = ei_network()

    def rate(current, checkpoint):
        initialize()
        body = lambda _, n: (None, network.update(n, current))
        return jnp.mean(statetx.scan(body, None, jnp.arange(60.0), checkpoint=checkpoint)[1])

    def results(checkpoint):
        brainstate.random.seed(0)
        value, grads = statetx.value_and_grad(rate, 0, wrt=weights)(20.0, checkpoint)
        last = [network.neurons.V.value.mantissa, jax.random.key_data(brainstate.random.DEFAULT.value)]
        return [np.asarray(x) for x in jax.tree.leaves((value, grads, last))]

    on_disk, desired = results(Disk(tmp_path, 20, slots=1, save_every=0, costs=(0.1, 0.1))), results(None)
    assert_close(on_disk, desired, rtol=1e-5, atol=1e-9)
    assert len(desired) == 6 and all(x.any() for x in desired)


def test_a_partial_differential_equation_of_plain_jax(tmp_path):
    def step(u, _):  # Gray and Scott's reaction with diffusion, on a torus
        a, b = u
        spread = lambda x: sum(jnp.roll(x, n, axis) for n in (-1, 1) for axis in (0, 1)) - 4 * x
        reaction = a * b**2
        return (a + 0.2 * spread(a) - reaction + 0.03 * (1 - a), b + 0.1 * spread(b) + reaction - 0.09 * b), None

    def final(u, checkpoint):
        return jnp.sum(statetx.scan(step, u, length=50, checkpoint=checkpoint)[0][1] ** 2)

    u = jnp.ones((8, 8)), jnp.zeros((8, 8)).at[3:5, 3:5].set(0.5)
    same(jax.value_and_grad(final)(u, Disk(tmp_path, 10, **EAGER)), jax.value_and_grad(final)(u, None))


# -- kills ---------------------------------------------------------------------------------------------------------


class Killed(BaseException):
    """In place of a kill: nothing that comes after it reaches the disk."""


def run_until(moment, disk, patch):
    """Call the gradient; at the operation of this number the process is as good as dead. Whether it was reached."""
    num, dead = 0, False

    def counted(fun):
        def operation(*args, **kwargs):
            nonlocal num, dead
            num += 1
            dead = dead or num > moment
            if dead:
                raise Killed
            return fun(*args, **kwargs)

        return operation

    for owner, name in ((_files, "replace"), (Store, "_remove"), (Segments, "advance"), (Segments, "pull")):
        patch.setattr(owner, name, counted(getattr(owner, name)))
    try:
        of_all(W, H, XS, disk)
    except Killed:
        return True
    return False


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.thorough)])
def test_a_killed_call_resumes_with_the_same_bits(tmp_path, every):
    disk = Disk(tmp_path / "store", 4, **EAGER)
    for moment in itertools.count(0, every):
        with pytest.MonkeyPatch.context() as patch:
            if not run_until(moment, disk, patch):
                break
        same(of_all(W, H, XS, disk), plain())
        shutil.rmtree(disk.path)
    assert moment > 20


def test_a_call_that_is_killed_again_and_again_ends(tmp_path):
    disk = Disk(tmp_path, 2, **EAGER)
    for num_calls in itertools.count(1):  # noqa: B007
        with pytest.MonkeyPatch.context() as patch:
            if not run_until(12, disk, patch):
                break
    assert 2 < num_calls < 30
    same(of_all(W, H, XS, disk), plain())


# -- damage, and what a store refuses ------------------------------------------------------------------------------


@pytest.fixture
def unfinished(tmp_path):
    """The path of a store whose reversal was killed half way."""
    path = tmp_path / "store"
    with pytest.MonkeyPatch.context() as patch:
        assert run_until(46, Disk(path, 2, **EAGER), patch)
    assert [*path.glob("ct-*")] and not [*path.glob("ct-6.*")]
    return path


def damage(path, draw):
    """Change some files: a bit, a part, all of one; or give one the content of another."""
    for file in draw.sample(sorted(path.glob("*.arrays")), draw.randint(1, 3)):
        content = bytearray(file.read_bytes())
        match draw.randrange(5):
            case 0:
                content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
            case 1:
                del content[draw.randrange(len(content)) :]
            case 2:
                content += bytes(draw.randrange(1, 9))
            case 3:
                content = draw.choice(sorted(path.glob("*.arrays"))).read_bytes()
            case 4:
                file.unlink()
                continue
        file.write_bytes(content)


def test_every_changed_byte_of_a_file_is_found(tmp_path):
    store = Store(str(tmp_path))
    for n in range((store.write("carry-1", [W]), store.flush(), store.sizes["carry-1.arrays"])[2]):
        store.write("carry-1", [W])
        store.flush()
        file = tmp_path / "carry-1.arrays"
        content = bytearray(file.read_bytes())
        content[n] ^= 1
        file.write_bytes(content)
        assert store.read("carry-1") is None and not file.exists()
    store.close()


def test_a_file_beyond_the_limit_is_not_written(tmp_path):
    store = Store(str(tmp_path), limit=1000)
    store.write("carry-1", [W])
    store.write("carry-2", [np.ones(300, np.float32)])
    with pytest.raises(statetx.CheckpointError, match=r"its limit is 1000 B"):
        store.flush()
    store.close()
    assert [*tmp_path.glob("*.arrays")] == [tmp_path / "carry-1.arrays"]


@pytest.mark.parametrize("length", [0, 9])
def test_a_loop_without_a_carry_or_without_steps(tmp_path, length):
    def loss(w, checkpoint=None):
        xs = jnp.arange(float(length))
        return w + jnp.sum(statetx.scan(lambda h, x: (h, jnp.sin(w * x)), None, xs, checkpoint=checkpoint)[1])

    same(jax.grad(loss)(0.3, Disk(tmp_path, 2, **EAGER)), jax.grad(loss)(0.3))


def test_numbers_are_differentiated(tmp_path):
    def loss(w, checkpoint=None):
        return statetx.scan(lambda h, _: (jnp.tanh(w * h), None), 1.0, length=9, checkpoint=checkpoint)[0]

    same(jax.grad(loss)(0.9, Disk(tmp_path, 2)), jax.grad(loss)(0.9))


@pytest.mark.parametrize("seed", [0, pytest.param(range(1, 201), marks=pytest.mark.slow)], ids=["one", "many"])
def test_damaged_files_are_found_and_computed_again(unfinished, seed):
    whole = shutil.copytree(unfinished, unfinished.with_name("whole"))
    for number in [seed] if isinstance(seed, int) else seed:
        shutil.rmtree(unfinished)
        shutil.copytree(whole, unfinished)
        damage(unfinished, random.Random(number))
        same(of_all(W, H, XS, Disk(unfinished, 2, **EAGER)), plain())


def _halved(h):
    return np.float32(0.5) * h


def _kept(h):
    return np.float32(1.0) * h


def _with_rule(function):
    @jax.custom_vjp
    def fun(h):
        return h

    fun.defvjp(lambda h: (h, None), lambda _, ct: (jax.pure_callback(function, ct, ct),))
    return fun


@pytest.mark.parametrize(
    ("place", "of"),
    [
        ("the step", lambda function: function),
        ("the step", lambda function: lambda h: function(h)),
        ("the step", lambda function: functools.partial(lambda function, h: function(h), function)),
        ("the step", lambda function: {_halved: np.sin, _kept: np.cos}[function]),
        ("another loss", _with_rule),
    ],
)
def test_another_function_on_the_host_is_refused(tmp_path, place, of):
    def gradient(function):
        def body(h, x):
            if of is _with_rule:
                return jnp.tanh(of(function)(h) + x), None
            return jnp.tanh(h + jax.pure_callback(of(function), h, jax.lax.stop_gradient(h)) + x), None

        disk = Disk(tmp_path, 4, **EAGER)
        return jax.grad(lambda h: jnp.sum(statetx.scan(body, h, XS, checkpoint=disk)[0]))(H)

    with forbidden("pull"), pytest.raises(AssertionError, match="a segment has run"):
        gradient(_halved)
    with pytest.raises(statetx.CheckpointError, match=place):
        gradient(_kept)
    assert (gradient(_halved) != gradient(_kept)).any(), "the first resumes, and its store is replaced then"


def test_a_call_that_is_not_the_same_is_refused_by_name(unfinished):
    disk, other = Disk(unfinished, 2, **EAGER), Disk(unfinished, 3, **EAGER)
    files = {file: file.read_bytes() for file in unfinished.glob("*.arrays")}

    def other_step(w, h, xs, checkpoint):
        h, ys = statetx.scan(lambda h, x: (jnp.sin(h @ w + x), jnp.sum(h)), h, xs, checkpoint=checkpoint)
        return jnp.sum(h) + jnp.sum(ys)

    def refused(*words, call=of_all, args=(W, H, XS), disk=disk, **options):
        with pytest.raises(statetx.CheckpointError) as e:
            call(*args, disk, **options)
        assert all(word in str(e.value) for word in ("unfinished gradient of another call", *words))

    refused("constant 0, f32[3,3]", args=(W + 1, H, XS))
    refused("carry or state 0, f32[3]", args=(W, -H, XS))
    refused("xs 0, f32[12,3]", args=(W, H, XS.at[3].set(0)))
    refused("length", "equations of the step", args=(W, H, XS[:-1]))
    refused("segments", disk=other)
    refused("what is differentiated", call=jax.grad(loss))
    refused("equations of the step", call=jax.value_and_grad(other_step, (0, 1, 2)))
    refused("cotangents", scale=2.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "__version__", "0.0.1")
        refused("versions")
    assert files == {file: file.read_bytes() for file in unfinished.glob("*.arrays")}
    same(of_all(W, H, XS, disk), plain())


def test_cotangents_of_another_loss_are_not_taken_over(tmp_path, monkeypatch):
    disk, write = Disk(tmp_path, 4, **EAGER), Store.write

    def killed(self, name, *args):
        write(self, name, *args)
        if name == "xs-0-1":  # the file of the sum that belongs to it is not there yet
            raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Store, "write", killed)
        of_all(W, H, XS, disk)
    (tmp_path / "loss.arrays").unlink()  # damaged; else the other loss is refused
    same(of_all(W, H, XS, disk, scale=2.0), of_all(W, H, XS, scale=2.0))


def test_a_store_that_is_done_serves_the_next_call(tmp_path):
    disk = Disk(tmp_path, 4, slots=2)
    same(of_all(W, H, XS, disk), plain())
    same(of_all(-W, H, XS, disk), of_all(-W, H, XS))
    same(of_all(-W, H, XS, disk, scale=3.0), of_all(-W, H, XS, scale=3.0))


def test_a_pullback_may_be_called_twice(tmp_path):
    of_disk, of_plain = (jax.vjp(functools.partial(loss, checkpoint=c), W, H, XS)[1] for c in (Disk(tmp_path, 4), None))
    for ct in (1.0, 1.0, 0.5):
        same(of_disk(jnp.float32(ct)), of_plain(jnp.float32(ct)))


def test_one_of_two_users_of_a_store_is_refused(tmp_path):
    holder = Store(str(tmp_path))
    with pytest.raises(statetx.CheckpointError, match="in use, by another process"):
        of_all(W, H, XS, Disk(tmp_path, 4))
    holder.close()
    same(of_all(W, H, XS, Disk(tmp_path, 4)), plain())


@pytest.mark.parametrize("num", range(1, 12, 3))
def test_a_full_disk_harms_nothing(tmp_path, monkeypatch, num):
    disk, written = Disk(tmp_path, 4, **EAGER), statetx.State(jnp.zeros(()))
    replace = _files.replace

    def full(path, *parts):
        nonlocal num
        num -= 1
        if num < 0:
            pathlib.Path(path).with_name(".statetx-0123456789abcdef.part").write_bytes(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        replace(path, *parts)

    def counted(*args):
        def body(h, x):
            written.value += 1
            return step(args[0], h, x)

        h, ys = statetx.scan(body, args[1], args[2], checkpoint=disk)
        return jnp.sum(h**2) + ys @ jnp.arange(1.0, 1 + STEPS)

    monkeypatch.setattr(_files, "replace", full)
    with pytest.raises(statetx.CheckpointError, match="No space left on device"):
        statetx.value_and_grad(counted, (0, 1, 2))(W, H, XS)
    assert float(written.value) == 0
    monkeypatch.undo()
    same(statetx.value_and_grad(counted, (0, 1, 2))(W, H, XS), plain())
    assert float(written.value) == STEPS
    assert not [*tmp_path.glob(".statetx-*")]


def test_the_limit_of_bytes_is_kept(tmp_path, monkeypatch):
    sizes, limit = [], 200 * 1024
    replace = _files.replace

    def measured(path, *parts):
        replace(path, *parts)
        sizes.append(sum(file.stat().st_size for file in tmp_path.glob("*.arrays")))

    monkeypatch.setattr(_files, "replace", measured)
    big = jnp.ones((4096,))
    call = jax.grad(lambda x, c: statetx.scan(lambda x, _: (jnp.sin(x), None), x, length=9, checkpoint=c)[0].sum())
    same(call(big, Disk(tmp_path, 1, limit=limit, **EAGER)), call(big, None))
    assert 4 * big.nbytes < max(sizes) <= limit
    with pytest.raises(policies.PolicyError, match="raise limit="):
        call(big, Disk(tmp_path / "small", 1, limit=limit // 2))


# -- bad input -------------------------------------------------------------------------------------------------------


def test_a_step_that_is_not_deterministic_is_found(tmp_path, monkeypatch):
    advance, num = Segments.advance, itertools.count()

    def noisy(self, segment, constants, carry, xs):
        noise = 0.1 * next(num) if segment == 0 else 0.0
        return advance(self, segment, constants, [x + noise for x in carry], xs)

    monkeypatch.setattr(Segments, "advance", noisy)
    with pytest.raises(statetx.EffectError, match="steps from 0 to 4 gave another carry"):
        of_all(W, H, XS, Disk(tmp_path, 4, slots=1, costs=(9, 9)))


@pytest.mark.parametrize("callback", [jax.debug.print, functools.partial(jax.debug.callback, print)])
def test_a_step_with_effects_on_the_host_is_refused(tmp_path, callback):
    def body(h, _):
        callback("{}", h)
        return h, None

    with pytest.raises(statetx.EffectError, match="(?s)a step calls the host.*jax.pure_callback"):
        statetx.scan(body, 1.0, length=4, checkpoint=Disk(tmp_path, 2))


@pytest.mark.parametrize("fails", [False, True])
def test_a_pure_function_on_the_host_is_called_again(tmp_path, fails):
    """As diffrax's solvers and `equinox.error_if` call one, which raises an error."""
    calls = itertools.count()

    def check(h):
        if fails and next(calls) >= 7:
            raise ValueError("the step is too small")
        return h

    def loss(h, checkpoint=None):
        def body(h, x):
            checked = jax.pure_callback(check, h, jax.lax.stop_gradient(h))
            return jnp.tanh(h * (1 + 0.1 * checked) + x), None

        return jnp.sum(statetx.scan(body, h, XS, checkpoint=checkpoint)[0] ** 2)

    disk = Disk(tmp_path, 4, **EAGER)
    if fails:
        with pytest.raises((ValueError, RuntimeError), match="the step is too small"):  # the type is JAX's choice
            jax.grad(loss)(H, disk)
        fails = False
    same(jax.grad(loss)(H, disk), jax.grad(loss)(H))


@pytest.mark.parametrize(
    "traced",
    [
        lambda f: statetx.jit(jax.grad(f)),
        lambda f: jax.vmap(jax.grad(f), in_axes=(None, 0)),
        lambda f: jax.hessian(f),
        lambda f: jax.grad(lambda w, h: jax.grad(f, 1)(w, h).sum()),
    ],
    ids=["jit", "vmap", "hessian", "twice"],
)
def test_a_traced_gradient_is_refused(tmp_path, traced):
    disk = Disk(tmp_path, 4)
    h = jnp.stack([H, H]) if "vmap" in traced.__code__.co_names else H
    with pytest.raises(policies.PolicyError, match="runs the loop from the host"):
        traced(lambda w, h: loss(w, h, XS, disk))(W, h)
    assert not [*tmp_path.glob("*.arrays")]


def test_values_and_forward_mode_need_no_files(tmp_path):
    disk = Disk(tmp_path, 4)
    same(loss(W, H, XS, disk), loss(W, H, XS))
    same(statetx.jit(loss)(W, H, XS, disk), statetx.jit(loss)(W, H, XS))
    same(*(jax.jvp(lambda w, c=c: loss(w, H, XS, c), (W,), (W,)) for c in (disk, None)))
    assert not [*tmp_path.iterdir()]


def test_a_mapped_loop_is_one_loop(tmp_path):
    def total(w, checkpoint):
        return jax.vmap(lambda h: loss(w, h, XS, checkpoint))(jnp.stack([H, -H])).sum()

    same(jax.value_and_grad(total)(W, Disk(tmp_path, 4)), jax.value_and_grad(total)(W, None))


@pytest.mark.parametrize(
    "options",
    [
        {"path": 1},
        {"segment": 0},
        {"segment": 2.5},
        {"slots": 0},
        {"host": -1},
        {"limit": "much"},
        {"checkpoint": "most"},
        {"save_every": -1.0},
        {"costs": (1.0, float("nan"))},
    ],
    ids=str,
)
def test_an_option_that_is_wrong_is_named(options):
    with pytest.raises(policies.PolicyError, match=next(iter(options))):
        Disk(**{"path": "store", "segment": 4, **options})


def test_runs_are_told():
    assert Disk("store", 4, slots=8).num_runs(12) == 12 + 12  # in the sweep and in the pull-backs
    assert Disk("store", 4, slots=1, costs=(9, 9)).num_runs(12) == 12 + 12 + 4  # and the first segment again


def watched_run(monkeypatch, disk, call, *args):
    """Call a gradient; the most bytes on the device, in the host's memory and on disk, and the runs of the step."""
    runs, most, num_runs = [], [0, 0, 0], 0
    forward, write = module.SegmentedRun.forward, Store.write
    monkeypatch.setattr(module.SegmentedRun, "forward", lambda self: (runs.append(self), forward(self))[1])
    # No carry waits for the thread.
    monkeypatch.setattr(Store, "write", lambda self, *args: (write(self, *args), self.flush())[0])
    gc.collect()
    of_all = lambda arrays, kind: sum(x.nbytes for x in jax.tree.leaves(list(arrays)) if isinstance(x, kind))
    others = sum(x.nbytes for x in jax.live_arrays()) - of_all(args[:1], jax.Array)

    def look(*new):
        run = runs[-1]
        in_host = of_all(run.memory.values(), np.ndarray)
        of_loop = of_all([new, run.outs.items, run.pulled.items if run.pulled else []], jax.Array)
        # A copy in the host's memory is one in name only where the host is the device.
        on_device = sum(x.nbytes for x in jax.live_arrays()) - others - in_host - of_loop
        most[:2] = max(most[0], on_device), max(most[1], in_host)

    def run(self, segment, *args, fun, of_loop):
        nonlocal num_runs
        num_runs += self.num_steps(segment)
        out = fun(self, segment, *args)
        look(out[of_loop])
        return out

    def replace(*args, fun=_files.replace):
        fun(*args)
        most[2] = max(most[2], sum(path.stat().st_size for path in pathlib.Path(disk.path).glob("*.arrays")))

    monkeypatch.setattr(Segments, "advance", functools.partialmethod(run, fun=Segments.advance, of_loop=1))
    monkeypatch.setattr(Segments, "pull", functools.partialmethod(run, fun=Segments.pull, of_loop=2))
    monkeypatch.setattr(_files, "replace", replace)
    call(*args)
    return most, num_runs


@pytest.mark.sample
@pytest.mark.parametrize(
    "options",
    [{"slots": 3}, {"slots": 3, "host": 4, "costs": (9, 9)}, {"slots": 2, "limit": "6200 KiB"}],
    ids=str,
)
def test_bytes_in_each_tier_are_as_told(tmp_path, monkeypatch, options):
    def loss(h, scale, xs):
        def step(carry, x):
            h, n = carry
            return (jnp.sin(h * scale) + x, n + 1), h[:32] * n[0]

        carry, ys = statetx.scan(step, (h, jnp.zeros(1 << 13, jnp.int32)), xs, checkpoint=disk)
        return jnp.sum(carry[0]) + jnp.sum(ys)

    disk = Disk(tmp_path, 1, **{"costs": (1, 1), "save_every": 0, **options})
    args = jnp.ones(1 << 14), jnp.ones(1 << 14), jnp.ones((40, 1 << 14))
    (row,) = statetx.loop_report(loss, *args).rows
    assert (row.length, row.carry_bytes) == (40, 3 << 15) and not [*tmp_path.iterdir()]
    most, num_runs = watched_run(monkeypatch, disk, jax.grad(loss, (0, 1, 2)), *args)
    assert [tier.name for tier in row.tiers] == ["device", "host", "disk"]
    np.testing.assert_allclose(most, [tier.num_bytes for tier in row.tiers], rtol=0.02)
    assert num_runs == round(40 * row.runs) and most[1] == row.carry_bytes * row.tiers[1].num_carries


def test_carries_in_each_tier_are_as_many_as_told(tmp_path, monkeypatch):
    disk, x = Disk(tmp_path, 3, slots=2, save_every=0, costs=(1, 1)), jnp.ones(1 << 14)
    gradient = jax.grad(lambda x: statetx.scan(lambda h, _: (jnp.sin(h), None), x, length=40, checkpoint=disk)[0].sum())
    most, num_runs = watched_run(monkeypatch, disk, gradient, x)
    (row,) = statetx.loop_report(gradient, x).rows
    np.testing.assert_allclose(np.array(most) / x.nbytes, [tier.num_carries for tier in row.tiers], rtol=0.02)
    assert num_runs == disk.num_runs(40) == 40 * row.runs
    assert "on disk" in str(statetx.loop_report(gradient, x))


def test_runs_within_segments_are_those_of_their_loops(tmp_path):
    (row, inner) = statetx.loop_report(lambda w: loss(w, H, XS, Disk(tmp_path, 6, checkpoint=3)), W).rows
    assert (inner.length, inner.slots, inner.tiers) == (6, 3, ())
    assert row.runs == 1 + inner.runs


def test_a_profile_is_of_the_largest_program_with_the_stored_carries(tmp_path):
    x = jnp.ones(1 << 12)

    def loss(x, slots):
        disk = Disk(tmp_path, 5, slots=slots)
        return statetx.scan(lambda h, _: (jnp.sin(h), None), x, length=100, checkpoint=disk)[0].sum()

    few, many = (functools.partial(loss, slots=n) for n in (2, 9))
    profiles = [statetx.memory_profile(fun, x) for fun in (few, many, jax.grad(few))]
    tiers = [statetx.loop_report(fun, x).rows[0].tiers[0].num_carries for fun in (few, many)]
    assert profiles[1].peak_bytes - profiles[0].peak_bytes == (tiers[1] - tiers[0]) * x.nbytes > 0
    assert profiles[2].peak_bytes == profiles[0].peak_bytes >= (tiers[0] + 5) * x.nbytes  # residuals of 5 steps
    assert "driven from the host, by policies.Disk" in str(profiles[0]) and not [*tmp_path.iterdir()]


def test_progress_is_one_line(tmp_path, capsys):
    def body(h, x):
        return step(W, h, x)

    run = lambda h: jnp.sum(statetx.scan(body, h, XS, checkpoint=Disk(tmp_path, 4), progress=True)[0])
    lines, seconds = [], itertools.count()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "monotonic", lambda: next(seconds))
        patch.setattr(module, "spinner", lambda *_, is_shown: contextlib.nullcontext(lines.append))
        jax.grad(run)(H)
    assert lines[0].startswith("forward, step 4 of 12, ") and " on disk, " in lines[0] and lines[0].endswith(" s left")
    assert lines[-1].startswith("backward, step 0 of 12, ") and lines[-1].endswith(", 0 s left")


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.parametrize("first", [2, 10, 18, 26, 34])
def test_killed_processes_resume_with_the_same_bits(tmp_path, first):
    script, numbers = pathlib.Path(__file__).with_name("killed.py"), map(str, (first, 42, 47, 50))
    run = [sys.executable, str(script), str(tmp_path / "store"), *numbers]
    result = json.loads(subprocess.run(run, capture_output=True, text=True, check=True).stdout)
    assert result["same"] and len(result["killed"]) == 4 and set(result["killed"]) == {"forward", "backward"}


# -- the schedule ----------------------------------------------------------------------------------------------------

# Files, and the costs of a write and a read.
DISKS = (1, 1, 1), (2, 2, 2), (3, 5, 3), (4, 0.5, 0.25)
# For (segments, slots) the runs, writes and reads of `HRevolve(segments, slots, files, wd=write, rd=read)` of
# checkpoint_schedules 1.0.4, times their costs, for each of DISKS. Forward runs that save for the reverse step do not
# count: they are in the pull-backs.
ORACLE = {
    (3, 1): (3, 3, 3, 2.75),
    (3, 2): (2, 2, 2, 2.0),
    (3, 4): (2, 2, 2, 2.0),
    (8, 1): (17, 20, 24, 12.0),
    (8, 2): (13, 14, 14, 11.0),
    (8, 4): (10, 10, 10, 9.25),
    (17, 1): (55, 52, 62, 32.5),
    (17, 2): (39, 41, 46, 29.0),
    (17, 4): (29, 30, 30, 27.0),
    (33, 1): (154, 125, 135, 79.5),
    (33, 2): (101, 96, 105, 71.5),
    (33, 4): (74, 74, 78, 59.0),
    (60, 1): (390, 277, 276, 174.5),
    (60, 2): (240, 207, 211, 152.5),
    (60, 4): (160, 155, 163, 133.5),
}


def performed(schedule, lost=()):
    """Cost of what the schedule does, as `ORACLE` counts; the files `lost` cannot be read.

    Checks that each action is possible, and that slots and files suffice.
    """
    stored, tiers, at_hand, end, cost, lost = {}, {}, 0, schedule.length, 0.0, set(lost)
    for actions in (schedule.sweep(0, stored), schedule.reversal(schedule.length, stored)):
        for action in actions:
            match action:
                case Advance(first, last):
                    assert at_hand == first < last
                    cost, at_hand = cost + last - first, last
                case Keep(position, tier):
                    assert position == at_hand
                    cost += schedule.write * (tier == DISK)
                    tiers[position] = tier
                case Load(position) if position in lost:
                    del stored[position], tiers[position]
                    lost.remove(position)
                case Load(position):
                    # The turn of the last segment starts from the carry at hand.
                    cost += schedule.read * (tiers[position] == DISK and position != at_hand)
                    at_hand = position
                case Reverse(position):
                    assert position == at_hand == end - 1
                    end = position
                case Drop(position):
                    del tiers[position]
            assert list(tiers.values()).count(MEMORY) <= schedule.slots
            assert schedule.files is None or list(tiers.values()).count(DISK) <= schedule.files
    assert end == 0
    return cost - 1  # the last segment: a pull-back that runs before the loss needs no run of its own


@pytest.mark.parametrize("length, slots", ORACLE)
def test_cost_is_that_of_hrevolve(length, slots):
    schedules = [TierSchedule(length, slots, files, write, read) for files, write, read in DISKS]
    assert tuple(s.cost for s in schedules) == ORACLE[length, slots]
    assert tuple(map(performed, schedules)) == ORACLE[length, slots]


def least_cost(length, slots, files, write, read):
    """The least cost of all schedules, by Dijkstra's algorithm over what is at hand, in slots, in files, and left."""
    queue, seen, ties = [(0.0, 0, (0, frozenset(), frozenset(), length))], set(), itertools.count(1)
    while True:
        cost, _, state = heapq.heappop(queue)
        if state in seen:
            continue
        seen.add(state)
        hand, memory, disk, end = state
        if end == 0:
            return cost
        steps = [(0, (p, memory, disk, end)) for p in memory] + [(read, (p, memory, disk, end)) for p in disk]
        steps += [(0, (hand, memory - {p}, disk, end)) for p in memory]
        steps += [(0, (hand, memory, disk - {p}, end)) for p in disk]
        if hand is not None:
            steps += [(1, (hand + 1, memory, disk, end))] * (hand < end - 1)
            steps += [(0, (None, memory, disk, end - 1))] * (hand == end - 1)
            steps += [(0, (hand, memory | {hand}, disk, end))] * (len(memory) < slots)
            steps += [(write, (hand, memory, disk | {hand}, end))] * (len(disk) < files)
        for added, new in steps:
            heapq.heappush(queue, (cost + added, next(ties), new))


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("disk", DISKS, ids=str)
def test_no_schedule_costs_less(disk, slots):
    for length in range(1, 6):
        assert TierSchedule(length, slots, *disk).cost == least_cost(length, slots, *disk)


@functools.cache
def optimum(length, slots):
    if length == 1 or slots == 1:
        return length * (length - 1) // 2
    return min(j + optimum(length - j, slots - 1) + optimum(j, slots) for j in range(1, length))


def test_runs_in_memory_are_the_optimum():
    for slots in range(1, 6):
        for length in range(1, 40):
            assert TierSchedule(length, slots, 0, 1, 1).cost == optimum(length, slots)
            if length > 1 < slots:
                j = jump_in_memory(length, slots)
                assert j + optimum(length - j, slots - 1) + optimum(j, slots) == optimum(length, slots)


def test_files_that_are_worth_it_are_as_good_as_more():
    assert (
        TierSchedule(60, 2, None, 2, 2).cost == TierSchedule(60, 2, 59, 2, 2).cost < TierSchedule(60, 2, 2, 2, 2).cost
    )


@pytest.mark.parametrize("write", [0.25, 2, 9])
def test_files_beyond_those_that_are_used_cost_no_time(write):
    for length in (1, 7, 30, 60):
        enough = TierSchedule(length, 2, None, write, 1)
        num, stored = 0, {}
        for _ in itertools.chain(enough.sweep(0, stored), enough.reversal(length, stored)):
            num = max(num, list(stored.values()).count(DISK))
        assert enough._most_files() == num
        assert TierSchedule(length, 2, num, write, 1).files is None
        if num:
            assert TierSchedule(length, 2, num - 1, write, 1).files == num - 1


def test_a_loop_of_one_segment_stores_nothing():
    assert performed(TierSchedule(1, 8, None, 1, 1)) == 0


@pytest.mark.parametrize("lost", [[6], [3, 6, 9], range(1, 30)])
def test_carries_that_cannot_be_read_are_computed_again(lost):
    schedule = TierSchedule(30, 1, None, 0.25, 0.25)
    assert performed(schedule, lost) >= schedule.cost


def test_files_of_kills_leave_less_room_for_others():
    schedule = TierSchedule(60, 2, 18, 2, 1)
    assert schedule.files is None
    stored = {0: DISK, **dict.fromkeys(range(1, 12), DISK)}
    reversed_ = []
    for action in itertools.chain(schedule.sweep(11, stored), schedule.reversal(60, stored)):
        assert list(stored.values()).count(DISK) <= 18 and list(stored.values()).count(MEMORY) <= 2
        reversed_ += [action.position] if isinstance(action, Reverse) else []
    assert reversed_ == list(range(60))[::-1]


def test_a_sweep_resumes_from_files():
    schedule, stored = TierSchedule(20, 2, 3, 1, 1), {0: DISK, 4: DISK, 9: DISK}
    actions = [*schedule.sweep(9, stored), *schedule.reversal(20, stored)]
    assert actions[0] in (Keep(9, MEMORY), Advance(9, actions[0][-1]))
    assert [a.position for a in actions if isinstance(a, Reverse)] == list(range(20))[::-1]
    assert [a.position for a in actions if isinstance(a, Drop) and a.position in (4, 9)] == [9, 4]
