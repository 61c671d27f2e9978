"""`explain_oom`: what is missing, and changes that make a step fit, on a CPU with a pretended limit."""

import io
import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.errors import JaxRuntimeError

import statetx
from statetx import _jax
from statetx._equations import compiler
from statetx._equations.compiler import fast_compile_options
from statetx.memory import oom
from statetx.memory._edits import Rematerialize
from statetx.memory._estimate import estimate
from statetx.memory._show import rows_at_peak
from statetx.memory._tried import NotTried, Trials
from statetx.memory.measure import memory_profile
from statetx.memory.oom import explain_oom
from statetx.planner import _budget
from statetx.planner._budget import TimeLeft
from statetx.residuals._trace import TracedCall

GIB = 2**30
X = jax.ShapeDtypeStruct((4096, 32), jnp.float32)


class Block:
    wrap = staticmethod(lambda f: f)

    def __init__(self, seed):
        key = jax.random.key(seed)
        self.up = statetx.Param(jax.random.normal(key, (32, 128)) / 32)
        self.down = statetx.Param(jax.random.normal(key, (128, 32)) / 32)

    def body(self, x):
        return x + jax.nn.gelu(x @ self.up.value) @ self.down.value


class Model:
    def __init__(self, wrap=lambda f: f):
        self.blocks = [Block(i) for i in range(4)]
        self.run = wrap(Block.body)

    def loss(self, x):
        for block in self.blocks:
            x = self.run(block, x)
        return jnp.mean(x**2)

    def step(self, x):
        """A training step that is not jitted."""
        params = statetx.states(self, statetx.Param)
        value, grads = statetx.value_and_grad(self.loss, wrt=params)(x)
        for name, grad in grads.items():
            params[name].value -= 0.1 * grad
        return value


@pytest.fixture(autouse=True)
def unplanned(monkeypatch):
    """Without the plan, which takes seconds."""
    monkeypatch.setattr(oom, "_planned", lambda *_: None)


def peak(step, *args):
    return memory_profile(step, *args, gradient=False).peak_bytes


# -- what is missing -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_report_says_what_is_missing_and_who_fills_the_memory():
    model = Model()
    report = explain_oom(model.step, X, limit="4MiB")
    assert report.limit_bytes == 4 * 2**20 and report.limit_source == "limit="
    # and constants of a few bytes
    assert 0 <= report.needed_bytes - peak(model.step, X) < 100 and report.needed_bytes > 10 * 2**20
    assert report.short_bytes == report.needed_bytes - report.limit_bytes
    text = str(report)
    assert text.startswith("step needs ") and "which has 4.0 MiB" in text and "too much" in text
    assert "Block.body" in text and "test_explain_oom.py:" in text
    largest = rows_at_peak(report.profile)[0]
    assert f"{100 * largest.num_bytes / report.needed_bytes:.0f}%" in text


def test_step_that_fits_says_so_and_has_no_changes():
    report = explain_oom(Model().step, X, limit=GIB)
    assert report.short_bytes == 0 and report.can_fit and report.remedies == ()
    assert "it fits" in str(report) and "jax.live_arrays()" in str(report)


def test_constants_count():
    table = np.random.default_rng(0).normal(size=(512, 512)).astype(np.float32)
    report = explain_oom(lambda x: x @ table, jnp.ones((1, 512)), limit="512KiB")
    assert report.needed_bytes >= report.profile.peak_bytes + table.nbytes
    assert report.short_bytes > 0 and "Constants: arrays that the function closes over" in str(report)
    # As an argument it would be needed as well.
    assert "argument" not in {r.change.action for r in report.remedies} and not report.can_fit


def test_without_a_limit_the_report_asks_for_one():
    report = explain_oom(Model().step, X)
    assert report.limit_bytes is None and report.short_bytes == 0 and not report.can_fit
    assert "Pass limit=" in str(report) and "it fits" not in str(report)
    assert len(report.remedies) >= 1  # what would save most, all the same


@pytest.mark.parametrize("compiles", [True, False])
def test_loss_is_explained_with_its_gradient(compiles, monkeypatch):
    blocks = [Block(i) for i in range(4)]

    def loss(x):
        for block in blocks:
            x = block.body(x)
        return jnp.mean(x**2)

    if not compiles:
        monkeypatch.setattr(oom, "profiled", refuses("RESOURCE_EXHAUSTED: out of memory"))
    report, alone = (explain_oom(loss, X, limit=GIB, gradient=g) for g in (None, False))
    assert report.needed_bytes > 2 * alone.needed_bytes
    if compiles:
        assert 0 <= report.needed_bytes - statetx.measure(loss, X).peak_bytes < 100
    assert str(report).startswith(f"{report.name} with its gradient needs") and "gradient=False" in str(report)
    assert str(alone).startswith(f"{report.name} needs") and "gradient" not in str(alone)


def test_limit_that_is_no_size_raises():
    with pytest.raises(statetx.PolicyError, match="limit=.* is not a size"):
        explain_oom(Model().step, X, limit="16 gigs")


# -- changes ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_following_the_changes_makes_it_fit():
    needed = peak(Model().step, X)
    limit = int(0.7 * needed)
    report = explain_oom(Model().step, X, limit=limit, time_limit=None)
    assert report.can_fit and report.remedies[-1].fits and not any(r.fits for r in report.remedies[:-1])
    (remedy,) = report.remedies
    assert remedy.change.action == "policy" and "Block.body" in remedy.change.text
    wraps = lambda f: f, statetx.remat(policy="dots_without_batch_dims")
    plain, by_hand = (statetx.measure(Model(wrap).step, X, gradient=False) for wrap in wraps)
    assert remedy.needed_bytes == pytest.approx(by_hand.peak_bytes, rel=0.02) and by_hand.peak_bytes <= limit
    assert remedy.added_operations == pytest.approx(by_hand.flops / plain.flops - 1, rel=0.02)
    assert "less (compiled, +" in str(report) and "It fits then" in str(report)
    # The step and each change; and a pair, to see that one is not needed.
    assert len(report.tried) < report.num_compiled == report.to_dict()["num_compiled"]
    assert f"{report.num_compiled} programs compiled in {report.seconds:.1f} s, with " in str(report)
    assert 0 < report.to_dict()["processor_seconds"] == report.processor_seconds


class Clock:
    """A clock by which each compilation takes ten seconds, and a plan as long as it may."""

    def __init__(self, monkeypatch, seconds_each=10.0):
        self.now, self.trials, self.plans, self.each = 0.0, 0, [], seconds_each
        profiled = oom.profiled
        for module in (_budget, oom):
            monkeypatch.setattr(module, "time", types.SimpleNamespace(monotonic=self.read, process_time=self.read))
        monkeypatch.setattr(oom, "profiled", lambda *args: self.after(self.each, profiled, *args))
        monkeypatch.setattr(Trials, "_trial", lambda *_: lambda: self.after(self.each, self._try))
        monkeypatch.setattr(oom, "_planned", lambda *args: self.plans.append(args[-1]) or self.after(2 * args[-1] + 30))

    def read(self):
        return self.now

    def after(self, seconds, run=lambda: None, *args):
        self.now += seconds
        return run(*args)

    def _try(self):
        self.trials += 1
        return NotTried("by the clock")


@pytest.mark.sample
@pytest.mark.parametrize("limit, trials, plans", [(5, 3, 0), (50, 3, 0), (60, 3, 0), (120, 5, 1)])
def test_one_time_limit_ends_the_trials_and_the_plan_but_for_the_first_changes(limit, trials, plans, monkeypatch):
    clock = Clock(monkeypatch)
    report = explain_oom(Model().step, X, limit=1000, time_limit=limit)
    assert (clock.trials, len(clock.plans)) == (trials, plans)
    # The step and the first changes are compiled in any case: rematerialization, a policy, parts.
    assert clock.now == report.seconds <= max(limit, 40)


@pytest.mark.slow
def test_each_kind_of_change_is_compiled_before_the_time_is_over():
    x = jax.ShapeDtypeStruct((256, 32), jnp.float32)  # of which the states are a part
    report = explain_oom(Model().step, x, limit=1000, time_limit=1e-9)
    assert [t.change.action for t in report.tried] == ["donate", "remat", "policy", "microbatch"]
    assert report.remedies and not report.can_fit and "It fits then" not in str(report)
    # What is not compiled is named without bytes.
    text = str(explain_oom(Model().step, X, limit=1000, time_limit=0))
    assert "[1] " in text and "(not compiled)" in text and " less" not in text and "It fits then" not in text


def test_changes_that_were_compiled_before_are_read_from_the_disk(monkeypatch, tmp_path):
    def step(w, x):
        return w - 0.1 * jax.grad(lambda w: layer_of_two(w, layer_of_two(w, x)[1])[1].sum())(w)

    monkeypatch.setenv("STATETX_CACHE", str(tmp_path))
    arrays = jnp.eye(32), jax.ShapeDtypeStruct((256, 32), jnp.float32)
    first, again = (explain_oom(step, *arrays, limit="64KiB") for _ in range(2))
    assert again.num_compiled == 1 < first.num_compiled
    assert again.tried == first.tried and again.remedies == first.remedies


@pytest.mark.parametrize(("has_times", "action"), [(False, "policy"), (True, "remat")])
def test_of_changes_that_suffice_alone_the_fastest_is_listed_where_times_are_known(has_times, action, monkeypatch):
    seconds = lambda compiled, platform: 1 / compiled.cost_analysis()["flops"]  # the more operations, the faster
    if has_times:
        monkeypatch.setattr(_jax, "estimated_seconds", seconds)
    report = explain_oom(Model().step, X, limit="24MiB")
    assert [r.change.action for r in report.remedies] == [action] and report.can_fit
    assert {r.change.action for r in report.tried if r.fits} >= {"policy", "remat"}


@pytest.mark.slow
def test_savings_add_up_and_changes_free_different_buffers():
    def hidden(block, x):
        return jnp.tanh(jnp.sin(x @ block.up.value))

    def body(block, x):
        return x + jnp.cos(hidden(block, x) @ block.down.value)

    model = Model()
    model.run = body
    report = explain_oom(model.step, X, limit=1000)
    savings = [r.change.saved_bytes for r in report.remedies]
    assert [r.saved_bytes for r in report.remedies] == list(np.cumsum(savings))
    assert [r.needed_bytes for r in report.remedies] == [max(0, report.needed_bytes - s) for s in np.cumsum(savings)]
    # The block saves the residuals of the function that it calls, too: both changes are known, and one is listed.
    assert len([c for c in report.profile.changes if c.action == "remat"]) > 1
    assert len([r for r in report.remedies if r.change.action == "remat"]) == 1
    assert not report.can_fit and "do not suffice" in str(report) or "does not suffice" in str(report)


def layer_of_two(w, x):
    return x, jnp.tanh(jnp.tanh(x @ w) @ w)


def layer_without(w, x):
    return None, jnp.tanh(jnp.tanh(x @ w) @ w)


layer_without.__code__ = layer_without.__code__.replace(co_qualname="layer_of_two")


@pytest.mark.parametrize("layer", [layer_of_two, layer_without], ids=["returned", "not"])
def test_remat_of_a_function_that_returns_an_argument_takes_what_it_takes_by_hand(layer):
    # The cotangent of the argument comes from the backward pass of the call alone; outside it would take memory.
    def loss_with(layer):
        def loss(weights, x):
            for w in weights:
                returned, y = layer(w, x)
                x = (x if returned is None else returned) + y
            return jnp.mean(x**2)

        return loss

    for size in (256, 512):  # what was traced before has other types
        arrays = [jnp.eye(32)] * 3, jax.ShapeDtypeStruct((size, 32), jnp.float32)
        call = TracedCall("explain_oom", loss_with(layer), arrays, {})
        tried = Trials(call, gradient=True, time_left=TimeLeft(None)).cost(Rematerialize("layer_of_two"))
        assert tried.peak_bytes == statetx.measure(loss_with(statetx.remat(layer)), *arrays).peak_bytes


@pytest.mark.slow
def test_splitting_the_batch_is_advised_under_its_condition_alone():
    def loss(w, x, y):
        for _ in range(6):
            x = jnp.tanh(x @ w)
        return ((x - y) ** 2).mean()

    def step(w, x, y):
        return w - 0.1 * jax.grad(loss)(w, x, y)

    x = jax.ShapeDtypeStruct((4096, 64), jnp.float32)
    report = explain_oom(step, jnp.eye(64), x, x, limit="6MiB")
    (remedy,) = report.remedies
    assert remedy.fits and remedy.change.action == "microbatch"
    # The weights have an axis of 64, too, but they are updated.
    assert remedy.change.condition == "axis 0 of x, y holds 4,096 independent examples (not steps in time)"
    assert remedy.change.condition in remedy.change.text
    assert "It fits then, but only if the condition holds." in str(report) and "It fits then.\n" not in str(report)


def test_parts_that_suffice_are_listed_where_the_time_is_over_for_fewer():
    def step(w, x):
        return w - 0.1 * jax.grad(lambda w: (jnp.tanh(jnp.tanh(x @ w) @ w) ** 2).mean())(w)

    x = jax.ShapeDtypeStruct((4096, 64), jnp.float32)
    report = explain_oom(step, jnp.eye(64), x, limit="2MiB", time_limit=1e-9)
    (remedy,) = report.remedies
    assert remedy.is_compiled and remedy.fits and "split them into 8 parts" in remedy.change.text
    assert "It fits then, but only if the condition holds." in str(report)


def test_parts_of_a_batch_that_lies_on_several_devices_are_compiled():
    def step(w, x):
        return w - 0.1 * jax.grad(lambda w: (jnp.tanh(jnp.tanh(x @ w) @ w) ** 2).mean())(w)

    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    x = jax.ShapeDtypeStruct((16384, 64), jnp.float32, sharding=jax.NamedSharding(mesh, jax.P("data")))
    report = explain_oom(step, jnp.eye(64), x, limit="3.1MiB", time_limit=1e-9)
    (remedy,) = report.remedies
    assert remedy.is_compiled and remedy.fits and "interleave=True" in remedy.change.text
    assert "axis 0 of x holds 4,096 independent examples on each device" in remedy.change.text


def recurrent_step(ws, xs):  # time-major, as usual: 64 steps of 8 sequences
    def loss(ws):
        hs = jax.lax.scan(lambda h, x: (jnp.tanh(h @ ws[0] + x),) * 2, jnp.zeros((8, 128)), xs)[1]
        for w in ws[1:]:
            hs = jnp.tanh(hs @ w)
        return (hs**2).sum()

    return [w - 0.1 * g for w, g in zip(ws, jax.grad(loss)(ws), strict=True)]


RECURRENT_ARGS = [jnp.eye(128)] * 13, jax.ShapeDtypeStruct((64, 8, 128), jnp.float32)


@pytest.mark.slow
def test_axis_that_a_scan_runs_over_is_no_batch():
    report = explain_oom(jax.jit(recurrent_step, donate_argnums=0), *RECURRENT_ARGS, limit="1MiB", time_limit=0)
    assert report.remedies[0].change.action == "slots" and "scan of 64 steps" in report.remedies[0].change.text
    owners = {change.owner for change in report.profile.changes}
    assert "batch" not in owners
    # The loss is called once: the operations of its loops, which have it twice in their stacks, are no calls.
    assert not any(owner.endswith("loss") for owner in owners)


# -- errors and devices ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, requested, capacity",
    [
        ("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 8589934592 bytes.", 8 * GIB, None),
        ("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 12.50GiB.", int(12.5 * GIB), None),
        ("RESOURCE_EXHAUSTED: Out of memory allocating 34359738368 bytes.", 32 * GIB, None),
        ("Failed to allocate request for 2.00GiB (2147483648B) on device ordinal 0", 2 * GIB, None),
        ("Attempting to allocate 512.00M. That was not possible. There are 1.07M free.", GIB // 2, None),
        ("Attempting to reserve 3.00G at the bottom of memory. That was not possible.", 3 * GIB, None),
        (
            "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 19.50G "
            "of "
            "15.50G hbm. Exceeded hbm capacity by 4.00G.",
            None,
            int(15.5 * GIB),
        ),
        (
            "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory required for "
            "HLO temporaries "
            "(86.97G) exceeds available HBM (15.75G). HLO module: jit__lambda.",
            None,
            int(15.75 * GIB),
        ),
        ("Ran out of memory in memory space vmem. Used 19.50M of 16.00M vmem.", None, None),
        ("something else", None, None),
    ],
)
def test_sizes_in_errors(text, requested, capacity):
    report = explain_oom(lambda x: x + 1, X, error=text)
    assert report.requested_bytes == requested and report.limit_bytes == capacity
    assert report.limit_source == ("the error" if capacity else "")
    if requested:
        assert "the allocation that failed asked for" in str(report)


def test_limit_goes_before_the_device_and_the_device_before_the_error(monkeypatch):
    error = JaxRuntimeError("Used 3.00G of 2.00G hbm.")
    assert explain_oom(lambda x: x, X, error=error).limit_bytes == 2 * GIB
    monkeypatch.setattr(oom.current, "memory_stats", lambda: {"bytes_limit": 5 * GIB, "bytes_in_use": 0})
    assert explain_oom(lambda x: x, X, error=error).limit_bytes == 5 * GIB
    assert explain_oom(lambda x: x, X, error=error, limit="1GiB").limit_bytes == GIB


def test_other_arrays_on_the_device_are_taken_from_its_memory(monkeypatch):
    w, x = statetx.State(jnp.ones((256, 256))), jnp.ones((256, 256))

    def step(x):
        w.value = w.value + x

    other = 3 * 2**20
    stats = {"bytes_limit": 4 * 2**20, "bytes_in_use": x.nbytes + w.value.nbytes + other}
    monkeypatch.setattr(oom.current, "memory_stats", lambda: stats)
    report = explain_oom(step, x)
    assert report.other_bytes == other and report.limit_source == "the device"
    # Two inputs and an output of 256 KiB fit into 4 MiB, and with 3 MiB of other arrays into 3.75 MiB.
    assert report.needed_bytes == 3 * x.nbytes and report.short_bytes == 0
    stats["bytes_in_use"] += 2**19
    report = explain_oom(step, x)
    assert report.short_bytes == report.needed_bytes - 2**19 and "of which other arrays take 3.5 MiB" in str(report)


# -- inputs ----------------------------------------------------------------------------------------------------------


def test_donated_arguments_and_states_and_no_state_changes():
    count = statetx.State(jnp.zeros(()))
    w = statetx.State(jnp.ones((64, 64)))

    @statetx.jit(donate_argnums=0, donate_states=True)
    def step(c, x):
        count.value += 1
        w.value = w.value * 2
        return c + jnp.tanh(x @ w.value)

    c, x = jnp.zeros((128, 64)), jnp.ones((128, 64))
    abstract = explain_oom(step, jax.ShapeDtypeStruct(c.shape, c.dtype), x, limit=1, gradient=False)
    step(c, x)
    assert c.is_deleted() and count.value == 1
    report = explain_oom(step, c, x, limit=1, gradient=False)
    assert report.needed_bytes == abstract.needed_bytes and report.profile.alias_bytes >= c.nbytes + w.value.nbytes
    assert count.value == 1

    w.value.delete()  # as after a call that failed
    assert explain_oom(step, c, x, limit=1, gradient=False).needed_bytes == report.needed_bytes
    assert explain_oom(step.__wrapped__, c, x, limit=1, gradient=False).needed_bytes > report.needed_bytes


def test_keyword_arguments_and_plain_jax():
    step = jax.jit(lambda w, x: w - jax.grad(lambda w: jnp.tanh(x @ w).sum())(w))
    report = explain_oom(step, jnp.ones((64, 64)), x=jnp.ones((512, 64)), limit="64KiB")
    assert report.short_bytes > 0 and report.profile.argument_bytes == (64 + 512) * 64 * 4


def test_arrays_in_the_hosts_memory_take_none_of_the_device(monkeypatch):
    host = jax.sharding.SingleDeviceSharding(jax.local_devices()[0], memory_kind="pinned_host")
    offloaded, x = jax.device_put(jnp.ones((256, 256)), host), jnp.ones((8, 256))
    monkeypatch.setattr(oom.current, "memory_stats", lambda: {"bytes_limit": GIB, "bytes_in_use": x.nbytes + 1000})
    report = explain_oom(lambda w, x: jnp.tanh(x @ jax.device_put(w, jax.memory.Space.Device)).sum(), offloaded, x)
    assert report.other_bytes == 1000


# -- without the compiler --------------------------------------------------------------------------------------------


def refuses(message):
    def profiled(*args):
        raise JaxRuntimeError(message)

    return profiled


@pytest.mark.slow
def test_compiler_without_memory_gives_an_estimate(monkeypatch):
    compiled = explain_oom(Model().step, X, limit="4MiB")
    error = "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 20.00M of 15.00M hbm."
    monkeypatch.setattr(oom, "profiled", refuses(error))
    report = explain_oom(Model().step, X)
    assert report.limit_bytes == 15 * 2**20 and "estimated from the equations" in report.profile.note
    assert report.needed_bytes > compiled.needed_bytes  # fusion is left out
    assert report.profile.argument_bytes == compiled.profile.argument_bytes
    assert report.profile.at_peak[0].kind == "residual" and report.profile.at_peak[0].function == "Block.body"
    assert "Rematerialize Block.body" in report.remedies[0].change.text
    assert "estimated" in str(report)


@pytest.fixture
def full_gpu(monkeypatch):
    """A compiler that times kernels in a device's memory which is full. Returns the options of each compilation."""
    options, compile = [], jax.stages.Lowered.compile

    def refusing(lowered, compiler_options=None):
        options.append(compiler_options)
        if (compiler_options or {}).get("xla_gpu_autotune_level") != 0:
            raise JaxRuntimeError("RESOURCE_EXHAUSTED: Failed to get configs for: 3 out of 9 instructions.")
        return compile(lowered, compiler_options)

    compiler._is_known_to.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(jax.stages.Lowered, "compile", refusing)
        patch.setattr(jax, "default_backend", lambda: "gpu")
        yield options
    compiler._is_known_to.cache_clear()


@pytest.mark.slow
def test_programs_that_do_not_fit_are_measured_without_timing_kernels(full_gpu):
    report = explain_oom(Model().step, X, limit="4MiB")
    assert "estimated" not in str(report) and all(
        o.get("xla_gpu_autotune_level") == 0 or "xla_gpu_collect_cost_model_stats" in o for o in full_gpu
    ), "at the first try"
    full_gpu.clear()
    assert statetx.memory_profile(Model().step, X).temp_bytes == report.profile.temp_bytes
    assert len(full_gpu) == 2, "at the second try"
    plan = statetx.plan(
        lambda w: sum(jnp.sin(jnp.sin(w)).sum() for _ in range(2)), jnp.ones(1000), budget=1.0, argnums=0
    )
    assert plan.temp_bytes is not None and full_gpu[-1] == {"xla_gpu_autotune_level": 0}
    assert fast_compile_options() == full_gpu[-1], "parts of a plan need no kernels, whether it fits or not"


def test_other_errors_of_the_compiler_pass_through(monkeypatch):
    monkeypatch.setattr(oom, "profiled", refuses("INTERNAL: something else"))
    with pytest.raises(JaxRuntimeError, match="INTERNAL"):
        explain_oom(Model().step, X, limit=1)


def test_estimate_counts_values_from_their_equation_to_the_last_reader():
    n = 1000

    def f(x):
        y = jnp.cos(x).reshape(10, 100)  # the view is read after `z` exists
        z = jnp.sin(y)
        return (z * y).sum()

    profile = estimate(f, (jnp.ones(n),), {}, False)
    # x, cos(x), sin(y) and the product
    assert profile.peak_bytes == 4 * 4 * n == profile.timeline.max()
    assert sum(g.num_bytes for g in profile.at_peak) + profile.unused_bytes == profile.peak_bytes

    def loop(x):
        return jax.lax.scan(lambda c, _: (jnp.cos(jnp.outer(c, c)).sum(0), None), x, None, length=7)[0]

    # The step of a loop: a matrix and its cosine. Around it the carry before the loop and after it.
    assert estimate(loop, (jnp.ones(n),), {}, False).peak_bytes == pytest.approx(2 * 4 * n * n, rel=0.01)


def test_estimate_tells_the_lengths_of_scans():
    """So that the axis that a scan runs over is not taken for a batch."""
    steps = estimate(recurrent_step, RECURRENT_ARGS, {}, None).steps
    assert {
        (step.primitive, step.loop and step.loop.length) for step in steps if step.primitive in ("scan", "tanh")
    } == {
        ("scan", 64),
        ("tanh", None),
    }


# -- forms -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_report_prints_in_every_form():
    from rich.console import Console

    report = explain_oom(Model().step, X, limit="4MiB", error="Out of memory allocating 1024 bytes.")
    console = Console(file=io.StringIO(), width=100)
    console.print(report)
    for form in (str(report), report._repr_html_(), console.file.getvalue()):
        assert all(word in form for word in ("step needs", "Block.body", "[1]", "1.0 KiB", "report.profile"))
    data = json.loads(json.dumps(report.to_dict()))
    assert data["short_bytes"] == report.short_bytes and data["remedies"][0]["change"]["text"]


def vocabulary_loss(hidden, embedding, labels):
    logits = hidden @ embedding
    return jnp.mean(jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, labels[..., None], -1)[..., 0])


def test_logits_at_the_peak_lead_to_chunked():
    """Without compiled changes: what is looked at are the shapes of the program."""
    args = [jax.ShapeDtypeStruct((2, 256, 32), "float32"), jax.ShapeDtypeStruct((32, 2000), "float32")]
    labels = jax.ShapeDtypeStruct((2, 256), "int32")
    report = explain_oom(vocabulary_loss, *args, labels, limit="256KiB", time_limit=0)
    assert report.num_words == 2000 and report.logits_bytes >= 2 * 2 * 256 * 2000 * 4  # with their gradient
    assert "a value for each of 2,000 words" in str(report) and "statetx.chunked(loss" in str(report)
    hidden_layer = explain_oom(Model().loss, X, limit="1MiB", time_limit=0)
    assert hidden_layer.num_words == 0 and "chunked" not in str(hidden_layer)
    assert "chunked" not in str(explain_oom(vocabulary_loss, *args, labels, limit="1GiB", time_limit=0))


@pytest.mark.parametrize("layer", ["attention", "few features"])
def test_scores_of_attention_and_wide_first_layers_are_no_logits(layer):
    def attention(w, x):  # each of 512 steps has a score for each other, of 8 features
        return jax.nn.softmax(x @ w @ x.mT) @ x

    def few_features(w, x):
        return jnp.tanh(jnp.sin(x[..., :4] @ w) + 1)

    fun, width = (attention, 8) if layer == "attention" else (few_features, 512)
    arrays = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((8 if width == 8 else 4, width), (2, 512, 8))]
    report = explain_oom(lambda w, x: fun(w, x).sum(), *arrays, limit="64KiB", time_limit=0)
    assert report.short_bytes and report.num_words == 0
