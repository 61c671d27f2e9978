"""Slots that hold residuals take no more memory than slots that hold carries only."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import slot_programs

import statetx
from statetx._loops import checkpointed
from statetx.policies import Slots

slow = pytest.mark.slow
# More than 1 KiB above carries only until 2026-11-25, each for a reason of its own.
ONCE_LARGER = {
    ("scan_of_layers", "dots"),
    ("scan_of_checkpointed_layers", None),
    ("scan_of_one_layer", "dots"),
    ("fori_of_layers", "dots"),
    ("three_carries", None),
    ("branches", "dots"),
}
# XLA keeps as many bytes at the peak, and leaves a gap between buffers, as large as one leaf of the carry.
GAPS = dict.fromkeys(
    [
        ("normalization", "dots"),  # not with jax 0.12
        ("average_read_out", "dots"),
        ("spikes_with_trace", None),
        ("spikes_with_trace", "dots"),
        ("filters", None),
        ("filters", "dots"),
    ],
    4 * 8 * 64,
)
CASES = [(name, policy) for name in slot_programs.PROGRAMS for policy in (None, "dots")]


@pytest.fixture
def carries_only(monkeypatch):
    """Makes slots hold carries only."""
    yield lambda: (monkeypatch.setattr(checkpointed, "WORTH_MIXING", 0), statetx.clear_cache(), jax.clear_caches())
    statetx.clear_cache()
    jax.clear_caches()


def is_mixed(loss, args):
    statetx.clear_cache()
    return statetx.loop_report(loss, *args, policies=()).rows[0].is_mixed


@pytest.mark.parametrize(
    ("name", "policy"), [pytest.param(*case, marks=() if case in ONCE_LARGER else slow) for case in CASES]
)
def test_slots_with_residuals_take_as_much_as_with_carries_only(name, policy, carries_only):
    def temporary():
        gradient, loss, args = slot_programs.gradient(name, Slots(12, policy=policy), 64, 8, 200)
        num_bytes = jax.jit(gradient).lower(*args).compile().memory_analysis().temp_size_in_bytes
        return num_bytes, is_mixed(loss, args)

    mixed, has_residuals = temporary()
    if not has_residuals and (name, policy) not in ONCE_LARGER:
        pytest.skip("its residuals would save fewer than 3% of the runs")
    assert has_residuals
    carries_only()
    before, has_residuals = temporary()
    assert not has_residuals
    assert mixed <= before + 1024 + GAPS.get((name, policy), 0)


@pytest.mark.parametrize(("name", "policy"), [("scan_of_layers", "dots"), ("three_carries", None)])
def test_gradients_are_those_of_the_plain_loop(name, policy):
    """The last step of a leaf is reversed in a loop of its own, or an element is read after a cotangent is written."""
    (gradient, loss, args), (expected, *_) = (
        slot_programs.gradient(name, checkpoint, 16, 2, 60) for checkpoint in (Slots(9, policy=policy), None)
    )
    assert is_mixed(loss, args)
    for a, b in zip(gradient(*args), expected(*args), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6 * float(jnp.abs(b).max()))
        assert jnp.abs(b).max() > 0


def test_a_step_with_a_loop_runs_as_often_as_the_schedule_says():
    calls = []

    def step(h, x):
        jax.debug.callback(lambda _: calls.append(0), h)
        return jax.lax.scan(lambda h, _: (jnp.sin(h * x), None), h, None, 3)[0], None

    loss = lambda h, xs: statetx.scan(step, h, xs, checkpoint=Slots(20))[0]
    args = 0.5, jnp.ones(60)
    row = statetx.loop_report(loss, *args, policies=()).rows[0]
    assert row.is_mixed
    calls.clear()
    jax.grad(jax.jit(loss), (0, 1))(*args)
    jax.effects_barrier()
    assert len(calls) == round(60 * row.runs)
