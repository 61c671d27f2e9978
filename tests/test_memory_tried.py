"""Changes that are tried: the program with an edit takes what the program takes that is changed by hand."""

import contextlib
import dataclasses
import functools
import os
import threading

import jax
import jax.numpy as jnp
import pytest

import statetx
from statetx import policies
from statetx.memory import oom
from statetx.memory._advice import candidates
from statetx.memory._advice_parts import in_parts
from statetx.memory._edits import AsArguments, Checkpoint, Rematerialize, SaveLess
from statetx.memory._tried import Trials
from statetx.memory.oom import explain_oom
from statetx.planner._budget import TimeLeft
from statetx.residuals._trace import TracedCall

F32 = jnp.float32
X = jax.ShapeDtypeStruct((1024, 64), F32)


@pytest.fixture(autouse=True)
def unplanned(monkeypatch, request):
    """Without the plan, which takes seconds."""
    if "plan" not in request.node.name:
        monkeypatch.setattr(oom, "_planned", lambda *_: None)


def trials_of(step, args, gradient=False, **options):
    return Trials(TracedCall("explain_oom", step, args, {}), gradient=gradient, time_left=TimeLeft(None), **options)


def cost_of(step, args, *edits, gradient=False):
    return trials_of(step, args, gradient).cost(*edits)


def edits_of(step, args, action, **options):
    profile = statetx.memory_profile(step, *args, **options)
    return [c.edit for c in candidates(profile) if c.change.action == action]


def check_as_by_hand(cost, by_hand, args, gradient=False):
    expected = statetx.measure(by_hand, *args, gradient=gradient)
    assert cost.peak_bytes == pytest.approx(expected.peak_bytes, rel=0.02)
    assert cost.flops == pytest.approx(expected.flops, rel=0.02)


# -- loops -----------------------------------------------------------------------------------------------------------

RECURRENT = jnp.eye(32), jax.ShapeDtypeStruct((300, 16, 32), F32)


def recurrent(scan, wrap=lambda body: body, **options):
    def loss(w, xs):
        def body(h, x):
            a = jnp.tanh(h @ w + x)
            return jnp.tanh(a * jnp.cos(a) + jnp.sin(x)), None

        return (scan(wrap(body), jnp.zeros((16, 32)), xs, **options)[0] ** 2).sum()

    return lambda w, xs: w - 0.1 * jax.grad(loss)(w, xs)


@pytest.mark.sample
@pytest.mark.parametrize("scan", [jax.lax.scan, statetx.scan])
@pytest.mark.parametrize("strategy", [policies.Slots(7), policies.Levels(2), None])
def test_a_strategy_for_a_loop_takes_what_it_takes_by_hand(scan, strategy):
    step = recurrent(scan)
    (loop,) = {edit.loop for edit in edits_of(step, RECURRENT, "slots")}
    by_hand = recurrent(statetx.scan, checkpoint=strategy) if strategy else recurrent(statetx.scan, statetx.remat)
    cost = cost_of(step, RECURRENT, Checkpoint(loop, strategy))
    check_as_by_hand(cost, by_hand, RECURRENT)
    assert cost.peak_bytes < 0.7 * statetx.measure(step, *RECURRENT, gradient=False).peak_bytes


@pytest.mark.parametrize("scan", [jax.lax.scan, statetx.scan])
def test_the_body_of_a_loop_with_a_policy_takes_what_it_takes_by_hand(scan):
    step, policy = recurrent(scan), "dots_without_batch_dims"
    tried = candidates(statetx.memory_profile(step, *RECURRENT), to_try=True)
    (edit,) = (c.edit for c in tried if c.change.action == "policy")
    assert edit.policy == policy
    cost = cost_of(step, RECURRENT, edit)
    check_as_by_hand(cost, recurrent(statetx.scan, statetx.remat(policy=policy)), RECURRENT)
    nothing, plain = cost_of(step, RECURRENT, Checkpoint(edit.loop)), cost_of(step, RECURRENT)
    assert nothing.peak_bytes < cost.peak_bytes < plain.peak_bytes and nothing.flops > cost.flops > plain.flops


def test_a_policy_that_is_tried_gives_no_warning():
    """It saves all that this body computes; nobody has written it."""

    def step(*args):
        loss = lambda v, w, x: jax.lax.scan(lambda x, vw: ((x @ vw[0]) @ vw[1], None), x, (v, w))[0].sum()
        return jax.grad(loss, (0, 1))(*args)

    args = jnp.ones((300, 8, 8)), jnp.ones((300, 8, 8)), jnp.ones((64, 8))
    tried = candidates(statetx.memory_profile(step, *args), to_try=True)
    (loop,) = {c.edit.loop for c in tried if isinstance(c.edit, Checkpoint)}
    cost_of(step, args, Checkpoint(loop, policy="dots_without_batch_dims"))


@pytest.mark.slow
def test_a_loop_gets_the_number_with_which_it_fits():
    step = recurrent(jax.lax.scan)
    limits = [statetx.measure(recurrent(statetx.scan, checkpoint=c), *RECURRENT).peak_bytes for c in (24, 11)]
    plain = statetx.measure(recurrent(statetx.scan, statetx.remat), *RECURRENT).peak_bytes
    for limit, code in (
        (plain, "the body of the scan of 300 steps"),
        (limits[0], "checkpoint=statetx.policies.Slots(24)"),
        (limits[1], "checkpoint=statetx.policies.Slots(11)"),
    ):
        report = explain_oom(step, *RECURRENT, limit=limit + 100, time_limit=None)
        (remedy,) = report.remedies
        assert code in remedy.change.text and remedy.is_compiled and remedy.fits, str(report)
        assert "test_memory_tried.py:" in remedy.change.text


@pytest.mark.slow
def test_the_body_of_a_loop_around_a_loop_is_named_and_tried():
    def loss(w, xs):
        outer = lambda h, x: jax.lax.scan(lambda h, _: (jnp.tanh(h @ w + x), None), h, None, length=20)
        return (jax.lax.scan(outer, jnp.zeros((16, 32)), xs)[0] ** 2).sum()

    args = jnp.eye(32), jnp.ones((50, 16, 32))
    report = explain_oom(loss, *args, limit="1MiB", time_limit=None)
    assert report.remedies[0].change.text.startswith("Rematerialize the body of the scan of 50 steps")
    (slots,) = (c for c in report.profile.changes if c.action == "slots")
    assert {c.action for c in report.profile.changes if c.owner == slots.owner} == {"slots", "remat"}
    assert report.remedies[0].added_operations < 0.5 and report.remedies[-1].fits


def test_an_edit_that_cannot_be_made_is_not_tried_and_the_reason_is_told():
    step = recurrent(jax.lax.scan)
    (loop,) = {edit.loop for edit in edits_of(step, RECURRENT, "slots")}
    trials = trials_of(step, RECURRENT)
    too_short, other = Checkpoint(loop, policies.Lengths(7, 5)), Checkpoint(loop._replace(length=299))
    for edit, reason in (
        (too_short, "PolicyError: "),  # 35 steps of 300
        (other, "its place was not found"),
        (AsArguments(), "the step closes over no array"),
    ):
        assert trials.cost(edit) is None and trials.why_not(edit).startswith(reason), trials.why_not(edit)


@pytest.mark.parametrize("over", [lambda grad: grad, lambda grad: jax.vmap(grad, in_axes=(None, 0))])
def test_a_step_is_traced_once_for_all_trials_unless_its_gradient_is_mapped(over):
    calls = []

    def inner(w, x):
        return jnp.sin(jnp.tanh(x @ w) @ w)

    def loss(w, x):
        calls.append(1)
        return (inner(w, x) ** 2).mean()

    def step(w, x):
        return w - over(jax.grad(loss))(w, x).reshape(-1, 8, 8).sum(0)

    args = jnp.eye(8), jnp.ones((3, 4, 8))
    trials, edit = trials_of(step, args), Rematerialize(inner.__qualname__.replace("<locals>.", ""))
    costs = [trials.cost(*edits) for edits in ([], [edit])]
    num = len(calls)
    costs += [trials.cost(dataclasses.replace(edit, policy="dots"))]
    assert (len(calls) > num) == (over(jax.grad) is not jax.grad)
    by_hand = lambda w, x: (
        w - over(jax.grad(lambda w, x: (statetx.remat(inner)(w, x) ** 2).mean()))(w, x).reshape(-1, 8, 8).sum(0)
    )
    for cost, program in zip(costs, (step, by_hand), strict=False):
        check_as_by_hand(cost, program, args)
    assert costs[0].flops <= costs[2].flops < costs[1].flops


def test_an_error_of_the_package_itself_is_not_taken_for_a_change_that_cannot_be_tried():
    class Broken(Rematerialize):
        def decisions(self, program):
            return {}[self.function]

    with pytest.raises(KeyError, match="cell"):
        cost_of(recurrent(jax.lax.scan), RECURRENT, Broken("cell"))


# -- rematerialized functions


class Block:
    def __init__(self, seed, policy=None):
        self.w = statetx.Param(jax.random.normal(jax.random.key(seed), (64, 64)) / 8)
        self.run = statetx.remat(self.body, policy=policy) if policy is not None else self.body

    def body(self, x):
        for _ in range(3):
            x = jnp.tanh(jax.nn.gelu(x @ self.w.value))
        return x

    def __call__(self, x):
        return x + self.run(x)


def training_step(blocks, wrap=lambda block: block):
    def loss(x):
        for block in blocks:
            x = wrap(block)(x)
        return jnp.mean(x**2)

    def step(x):
        params = statetx.states(blocks, statetx.Param)
        for name, gradient in statetx.grad(loss, wrt=params)(x).items():
            params[name].value -= 0.1 * gradient

    return step


@pytest.mark.slow
def test_a_policy_that_saves_less_takes_what_it_takes_by_hand():
    saving = training_step([Block(n, "dots") for n in range(4)])
    cost = cost_of(saving, (X,), SaveLess("Block.body"))
    check_as_by_hand(cost, training_step([Block(n, policies.nothing) for n in range(4)]), (X,))
    assert cost.peak_bytes < 0.9 * statetx.measure(saving, X, gradient=False).peak_bytes


@pytest.mark.slow
def test_functions_with_policies_inside_of_a_rematerialized_one_keep_them():
    blocks = [Block(n, "dots") for n in range(4)]
    cost = cost_of(training_step(blocks), (X,), Rematerialize("Block.__call__"))
    check_as_by_hand(cost, training_step(blocks, statetx.remat), (X,))


def layer(w, x):
    return x + jnp.sin(jnp.tanh(jnp.cos(x @ w)) * x) @ w.T


def layers_in_a_loop(layer, scan):
    def loss(ws, x):
        body = lambda x, _: (functools.reduce(lambda x, w: layer(w, x), ws, x), None)
        return (jax.lax.scan(jax.checkpoint(body), x, None, length=3)[0] ** 2).mean()

    return loss


def layers_in_a_stage(layer, scan):
    stage = jax.checkpoint(lambda ws, x: functools.reduce(lambda x, w: layer(w, x), ws, x))
    return lambda ws, x: (stage(ws, jnp.sin(stage(ws, x))) ** 2).mean()


def layers_in_a_plain_loop(layer, scan):
    def loss(ws, x):
        body = lambda x, _: (functools.reduce(lambda x, w: layer(w, x), ws, x), x.mean())
        x, means = jax.lax.scan(body, x, None, length=4)
        return (x**2).mean() + means.sum()

    return loss


def loop_in_a_stage(layer, scan):
    stage = jax.checkpoint(lambda w, x: scan(lambda x, t: (jnp.sin(jnp.tanh(x @ w + t)), None), x, jnp.arange(40.0))[0])
    return lambda ws, x: (stage(ws[0], stage(ws[1], x)) ** 2).mean()


@pytest.mark.slow
@pytest.mark.parametrize(
    "make, action",
    [
        *((f, "remat") for f in (layers_in_a_loop, layers_in_a_plain_loop, layers_in_a_stage)),
        (loop_in_a_stage, "slots"),
    ],
)
def test_changes_inside_of_loops_and_rematerialized_functions_take_what_they_take_by_hand(make, action):
    args = [jnp.eye(32)] * 3, jax.ShapeDtypeStruct((512, 32), F32)
    by_hand = make(layer, functools.partial(statetx.scan, checkpoint=policies.Slots(8)))
    if action == "remat":
        by_hand = make(statetx.remat(layer), statetx.scan)
    plain, changed = statetx.measure(make(layer, statetx.scan), *args), statetx.measure(by_hand, *args)
    assert changed.peak_bytes < 0.8 * plain.peak_bytes
    report = explain_oom(make(layer, statetx.scan), *args, limit=int(0.9 * plain.peak_bytes), time_limit=None)
    found = [t for t in report.tried if t.change.action == action and (action == "slots" or t.change.owner == "layer")]
    assert [t.needed_bytes for t in found] == [pytest.approx(changed.peak_bytes, rel=0.02)], str(report)


@pytest.mark.thorough
def test_functions_take_their_parameters_first_as_by_hand():
    loss = lambda ws, x, layer=layer: (functools.reduce(lambda x, w: layer(w, x), ws, x) ** 2).mean()
    args = [jnp.eye(64)] * 6, jax.ShapeDtypeStruct((512, 64), F32)
    step = lambda ws, x, loss=loss: jax.tree.map(lambda w, g: w - g, ws, jax.grad(loss)(ws, x))
    by_hand = functools.partial(step, loss=functools.partial(loss, layer=statetx.remat(layer)))
    assert cost_of(step, args, Rematerialize("layer")).peak_bytes == statetx.measure(by_hand, *args).peak_bytes


def layer_of(p):
    def run(x):
        return x + jnp.sin(x @ p["up"] + p["a"][None]) @ p["down"]

    return run


@pytest.mark.thorough
def test_functions_that_have_their_parameters_from_elsewhere_take_them_as_they_read_them():
    def step(params, x, wrap=lambda f: f):
        loss = lambda ps: (functools.reduce(lambda x, p: wrap(layer_of(p))(x), ps, x) ** 2).mean()
        return jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(params))

    f32 = lambda *shape: jax.ShapeDtypeStruct(shape, F32)
    args = [{"a": f32(256), "down": f32(256, 32), "up": f32(32, 256)}] * 5, f32(256, 32)
    cost = cost_of(step, args, Rematerialize("layer_of.run"))
    assert cost.peak_bytes == statetx.measure(functools.partial(step, wrap=statetx.remat), *args).peak_bytes


@pytest.mark.slow
def test_calls_under_a_derivative_forward_take_what_they_take_by_hand():
    def loss(ws, x, layer=layer):
        y, tangent = jax.jvp(lambda x: functools.reduce(lambda x, w: layer(w, x), ws, x), (x,), (jnp.cos(x),))
        return (tangent**2).sum() + y.sum()

    args = [jnp.eye(64)] * 4, jax.ShapeDtypeStruct((512, 64), F32)
    cost = cost_of(loss, args, Rematerialize("layer"), gradient=True)
    check_as_by_hand(cost, functools.partial(loss, layer=statetx.remat(layer)), args, gradient=True)
    assert cost.peak_bytes < 0.8 * statetx.measure(loss, *args).peak_bytes


# -- bits ------------------------------------------------------------------------------------------------------------


@jax.custom_jvp
def spike(v):
    return (v > 0).astype(v.dtype)


@spike.defjvp
def _spike_jvp(primals, tangents):
    return spike(*primals), tangents[0] / (1 + 10 * jnp.abs(primals[0])) ** 2


def dense(w, s):
    return spike(s @ w - 1.0)


def spiking(ws, x, first=dense, others=dense):
    return (functools.reduce(lambda s, w: others(w, s), ws[1:], first(ws[0], x)) ** 2).sum()


@pytest.mark.slow
@pytest.mark.parametrize("is_rematerialized", [False, True])
def test_spikes_stored_as_bits_take_what_they_take_by_hand(is_rematerialized):
    args = [jnp.eye(64)] * 5, X
    if not is_rematerialized:  # they claim what they add to that
        (bits,) = (c for c in candidates(statetx.memory_profile(spiking, *args)) if c.change.action == "bits")
        assert bits.prerequisite == Rematerialize("dense") and bits.freed_bytes <= 4 * X.size * 4
    step = functools.partial(spiking, first=statetx.remat(dense), others=statetx.remat(dense))
    step = step if is_rematerialized else spiking
    (edit,) = edits_of(step, args, "bits")
    by_hand = functools.partial(
        spiking, first=statetx.remat(dense), others=statetx.remat(dense, inputs_stored_as=(None, "bits"))
    )
    cost = cost_of(step, args, edit, gradient=True)
    check_as_by_hand(cost, by_hand, args, gradient=True)
    assert (
        cost.peak_bytes
        < 0.9 * statetx.measure(functools.partial(spiking, others=statetx.remat(dense)), *args).peak_bytes
    )


@pytest.mark.slow
def test_spikes_inside_of_a_loop_are_tried_as_bits():
    def loss(ws, xs, first=dense, others=dense):
        step = lambda v, x: (v, functools.reduce(lambda s, w: others(w, s), ws[1:], first(ws[0], x + v)))
        return (statetx.scan(step, jnp.zeros((64, 64)), xs)[1] ** 2).sum()

    args = [jnp.eye(64)] * 4, jax.ShapeDtypeStruct((40, 64, 64), F32)
    by_hand = functools.partial(
        loss, first=statetx.remat(dense), others=statetx.remat(dense, inputs_stored_as=(None, "bits"))
    )
    expected = statetx.measure(by_hand, *args).peak_bytes
    report = explain_oom(loss, *args, limit=expected, time_limit=None)
    (tried,) = (t for t in report.tried if t.change.action == "bits")
    assert tried.needed_bytes == pytest.approx(expected, rel=0.02)


# -- constants


@pytest.mark.thorough
def test_a_constant_that_is_on_the_device_anyway_is_an_argument_and_counts_once():
    def step(w, x, table):
        return w - 0.1 * jax.grad(lambda w: (jnp.tanh(jnp.tanh(x @ w) @ table) ** 2).sum())(w)

    table = jax.random.normal(jax.random.key(0), (256, 256))
    args = jnp.eye(256), jax.ShapeDtypeStruct((64, 256), F32)
    closed = functools.partial(step, table=table)
    by_hand = statetx.measure(step, *args, table, gradient=False).peak_bytes
    report = explain_oom(lambda w, x: closed(w, x), *args, limit=by_hand + 100, time_limit=None)
    assert report.other_bytes == table.nbytes
    (remedy,) = report.remedies
    assert remedy.change.action == "argument" and remedy.is_compiled and remedy.added_operations == 0
    assert remedy.needed_bytes + table.nbytes == pytest.approx(by_hand, abs=64)


# -- donation


@pytest.mark.thorough
@pytest.mark.parametrize("is_jitted", [False, True])
def test_donated_states_take_what_they_take_by_hand(is_jitted):
    w, m = statetx.Param(jnp.eye(256)), statetx.State(jnp.zeros((256, 256)))

    def step(x):
        value, gradient = statetx.value_and_grad(lambda x: jnp.tanh(x @ w.value).sum(), wrt=w)(x)
        m.value = 0.9 * m.value + gradient
        w.value = w.value - 0.1 * m.value
        return value

    args = (jax.ShapeDtypeStruct((64, 256), F32),)
    plain = statetx.jit(step) if is_jitted else step
    (edit,) = edits_of(plain, args, "donate")
    by_hand = statetx.jit(step, donate_states=True)
    check_as_by_hand(cost_of(plain, args, edit), by_hand, args)
    limit = statetx.measure(by_hand, *args, gradient=False).peak_bytes + 100
    (remedy,) = explain_oom(plain, *args, limit=limit, time_limit=None).remedies
    assert "donate_states=True" in remedy.change.text and remedy.is_compiled and remedy.added_operations == 0


def test_donated_arguments_take_what_they_take_by_hand():
    def step(params, moments, x):
        gradient = jax.grad(lambda p: jnp.tanh(x @ p["w"]).sum())(params)
        moments = jax.tree.map(lambda a, b: 0.9 * a + b, moments, gradient)
        return jax.tree.map(lambda a, b: a - b, params, moments), moments

    args = {"w": jnp.eye(256)}, {"w": jnp.eye(256)}, jax.ShapeDtypeStruct((64, 256), F32)
    edits = edits_of(step, args, "donate")
    assert len(edits) == 2
    check_as_by_hand(cost_of(step, args, *edits), jax.jit(step, donate_argnums=(0, 1)), args)


# -- parts of the batch


def loss_of(w, x, y):
    for _ in range(6):
        x = jnp.tanh(x @ w)
    return ((x - y) ** 2).mean()


def in_four(loss):
    return statetx.microbatch(loss, 4, argnums=(1, 2))


def step_of(loss=loss_of):
    return lambda w, x, y: w - 0.1 * jax.grad(loss)(w, x, y)


def two_gradients(wrap=lambda loss: loss):
    """Of which the second differentiates inside."""

    def adapted(w, x, y):
        return loss_of(w - 0.1 * jax.grad(loss_of)(w, x, y), x, y)

    def step(w, x, y):
        w = w - 0.1 * jax.grad(wrap(loss_of))(w, x, y)
        return w - 0.1 * jax.grad(wrap(adapted))(w, y, x)

    return step


BATCH = jnp.eye(64), X, X


@pytest.mark.sample("slow")
@pytest.mark.parametrize(
    "step, by_hand, gradient",
    [
        (step_of(), step_of(in_four(loss_of)), False),
        pytest.param(jax.jit(step_of()), step_of(in_four(loss_of)), False, marks=pytest.mark.slow),
        pytest.param(
            step_of(), lambda w, x, y: w - 0.1 * in_four(jax.grad(loss_of))(w, x, y), False, marks=pytest.mark.slow
        ),
        (loss_of, in_four(loss_of), True),
        (two_gradients(), two_gradients(in_four), False),
    ],
)
def test_parts_of_a_batch_take_what_they_take_by_hand(step, by_hand, gradient):
    (candidate,) = in_parts(statetx.memory_profile(step, *BATCH), 4)
    cost = cost_of(step, BATCH, candidate.edit, gradient=gradient)
    check_as_by_hand(cost, by_hand, BATCH, gradient)
    assert cost.peak_bytes < 0.7 * statetx.measure(step, *BATCH, gradient=gradient).peak_bytes


@pytest.mark.slow
def test_parts_and_rematerialization_go_together():
    blocks = [Block(n) for n in range(4)]
    (parts,) = in_parts(statetx.memory_profile(training_step(blocks), X), 4)

    def by_hand(x):
        params = statetx.states(blocks, statetx.Param)

        def loss(x):
            for block in blocks:
                x = statetx.remat(block)(x)
            return jnp.mean(x**2)

        for name, gradient in statetx.grad(statetx.microbatch(loss, 4), wrt=params)(x).items():
            params[name].value -= 0.1 * gradient

    cost = cost_of(training_step(blocks), (X,), Rematerialize("Block.__call__"), parts.edit)
    check_as_by_hand(cost, by_hand, (X,))


def test_a_step_that_needs_its_batch_is_not_tried_in_parts():
    def loss(w, x, y):
        return loss_of(w, x.reshape(1024, 64), y)

    (candidate,) = in_parts(statetx.memory_profile(step_of(loss), *BATCH), 4)
    assert cost_of(step_of(loss), BATCH, candidate.edit) is None


def test_a_batch_of_the_type_of_a_parameter_is_found():
    """The parameters take the outputs of this type, and the other argument is the batch."""

    def step(params, x, y):
        loss = lambda params: loss_of(params["w"], jnp.sin(x @ params["v"]) @ params["u"], y)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))

    params = {"w": jnp.eye(64), "v": jnp.ones((64, 256)), "u": jnp.ones((256, 64))}
    x, y = jnp.ones((256, 64)), jnp.ones((256, 1))
    (candidate,) = in_parts(statetx.memory_profile(step, params, x, y), 4)
    assert candidate.edit.arguments == {"x", "y"}
    assert cost_of(step, (params, x, y), candidate.edit) is not None


# -- in combination


SMALL = jax.ShapeDtypeStruct((128, 64), F32)


@pytest.mark.slow
def test_changes_are_combined_until_it_fits():
    blocks = [Block(n) for n in range(3)]
    remat = cost_of(training_step(blocks), (SMALL,), Rematerialize("Block.__call__"))
    report = explain_oom(training_step(blocks), SMALL, limit=int(0.6 * remat.peak_bytes), time_limit=None)
    assert [r.change.action for r in report.remedies] == ["donate", "remat", "microbatch"]
    assert [r.fits for r in report.remedies] == [False, False, True]
    assert all(r.is_compiled for r in report.remedies)


@pytest.mark.slow
def test_what_costs_nothing_goes_first_and_the_reasons_against_others_are_told():
    blocks = [Block(n) for n in range(3)]
    plain = statetx.measure(training_step(blocks), SMALL, gradient=False)
    report = explain_oom(training_step(blocks), SMALL, limit=plain.peak_bytes - 1000, time_limit=None)
    assert [r.change.action for r in report.remedies] == ["donate"]
    reasons = {u.tool: u.reason for u in report.unused}
    assert "less, +" in reasons["rematerialization"] and "as compiled" in reasons["rematerialization"]
    assert reasons["parts"].endswith("as compiled with 8 parts, if the examples are independent")
    assert {t.change.action for t in report.tried} == {"donate", "remat", "policy", "microbatch"}
    assert reasons["checkpoint= of a loop"].startswith("no loop") and "donation" not in reasons
    assert "Not used: rematerialization: " in str(report)


@pytest.mark.slow
def test_a_plan_is_the_alternative_with_its_cost():
    blocks = [Block(n) for n in range(2)]
    limit = int(0.8 * statetx.measure(training_step(blocks), X, gradient=False).peak_bytes)
    report = explain_oom(training_step(blocks), X, limit=limit, time_limit=120)
    assert report.plan.needed_bytes <= limit and f"Or a plan: {report.plan.text}" in str(report)
    none = explain_oom(training_step(blocks), X, limit=1000, time_limit=60)
    assert none.plan.needed_bytes is None and not none.can_fit and "statetx.plan finds none" in str(none)


@pytest.mark.slow
def test_a_small_change_is_told_where_little_is_missing():
    blocks = [Block(n) for n in range(3)]  # whose weights are one percent
    profile = statetx.memory_profile(training_step(blocks), X, gradient=False)
    assert "donate" not in {c.action for c in profile.changes}
    needed = profile.peak_bytes + profile.constant_bytes
    (remedy,) = explain_oom(training_step(blocks), X, limit=needed - 1000, time_limit=None).remedies
    assert remedy.change.action == "donate" and remedy.added_operations == 0 and remedy.fits


@pytest.mark.slow
def test_progress_tells_what_is_tried(monkeypatch):
    told, shown = [], []
    spinner = lambda what, is_shown: shown.append(is_shown) or contextlib.nullcontext(told.append)
    monkeypatch.setattr(oom, "spinner", spinner)
    blocks = [Block(n) for n in range(2)]
    explain_oom(training_step(blocks), SMALL, limit=1000, progress=True, time_limit=None)
    assert shown == [True] and "rematerialization Block.__call__" in " ".join(told) and "parts batch" in " ".join(told)


def test_an_interrupt_ends_the_compilations_that_wait(monkeypatch):
    compiled, again = [], threading.Event()

    def trial(self, edits):
        if edits == "last":
            threading.Timer(0.1, again.set).start()
            raise KeyboardInterrupt
        return lambda: compiled.append(edits) or again.wait(5)

    monkeypatch.setattr(Trials, "_trial", trial)
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    with pytest.raises(KeyboardInterrupt):
        trials_of(lambda x: x, [X]).compile_first(["first", "second", "last"])
    assert compiled == ["first"]


@pytest.mark.slow
def test_without_time_changes_are_named():
    report = explain_oom(training_step([Block(n) for n in range(4)]), X, limit=1000, time_limit=0)
    assert report.remedies and not any(r.is_compiled for r in report.remedies) and report.unused == ()
    assert report.plan is None
