"""A function on the host that raises while the program runs: the call raises, and every state has its old value.

JAX runs a program after the call has returned if an input is not computed yet, so an error comes later.
"""

import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback
from libraries import VALUED

import statetx

BIG = jnp.ones((300, 300))
SLOW = jax.jit(lambda x: jax.lax.fori_loop(0, 8, lambda i, a: jnp.sin(a @ a), x).sum())


def sensor(x):
    time.sleep(0.01)
    if x < 0:
        raise ValueError("the sensor is off")
    return np.asarray(x)


def pure(x):
    return jax.pure_callback(sensor, jax.ShapeDtypeStruct((), jnp.float32), x, vmap_method="sequential")


def io(x):
    return io_callback(sensor, jax.ShapeDtypeStruct((), jnp.float32), x)


def debug(x):
    jax.debug.callback(sensor, x)
    return x


ERRORS = (jax.errors.JaxRuntimeError, ValueError)  # which one depends on when JAX notices

CALLS = {"pure_callback": pure, "io_callback": io, "debug.callback": debug}


def in_scan(f):
    return lambda x: statetx.scan(lambda carry, _: (carry, f(x)), 0.0, None, length=2)


def in_while_loop(f):
    return lambda x: statetx.fori_loop(0, 2, lambda i, carry: carry + f(x), 0.0)


def in_cond(f):
    return lambda x: statetx.cond(x == x, f, lambda x: x, x)


COUNT = statetx.State(0)


@statetx.jit
def count():
    COUNT.value += 1


WAYS = {
    "jit": statetx.jit,
    "remat": statetx.remat,
    "remat around another call": lambda f: statetx.remat(lambda x: (f(x), count())[0]),
    "scan": in_scan,
    "while_loop": in_while_loop,
    "cond": in_cond,
    "grad": lambda f: statetx.grad(lambda w, x: w * jax.lax.stop_gradient(f(x))),
    "remat in grad": lambda f: statetx.grad(lambda w, x: w * jax.lax.stop_gradient(statetx.remat(f)(x))),
}


@pytest.mark.parametrize("make", VALUED.values(), ids=VALUED)
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_states_keep_their_values_when_a_function_on_the_host_raises(way, make):
    state = make(jnp.float32(0.0))

    def f(x):
        state.value = state.value + pure(x)
        return jnp.float32(1.0)

    run = way(f)
    call_with = (lambda x: run(1.0, x)) if way in (WAYS["grad"], WAYS["remat in grad"]) else run
    call_with(jnp.float32(1.0))
    before = float(SLOW(BIG))
    state.value = SLOW(BIG)
    with pytest.raises(ERRORS, match="the sensor is off"):
        call_with(jnp.float32(-1.0))
    assert float(state.value) == before


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_each_function_on_the_host_is_waited_for(call):
    state = statetx.State(jnp.float32(0.0))

    @statetx.jit
    def step(x):
        state.value += jax.jit(call)(x)

    step(1.0)
    state.value = SLOW(BIG)
    with pytest.raises(ERRORS, match="the sensor is off"):
        step(-1.0)
    assert float(state.value) == float(SLOW(BIG))


def test_a_donated_state_is_invalid_after_an_error_on_the_host():
    state = statetx.State(jnp.float32(0.0))

    @functools.partial(statetx.jit, donate_states=True)
    def step(x):
        state.value = state.value + pure(x)

    step(1.0)
    state.value = SLOW(BIG)
    with pytest.raises(ERRORS, match="the sensor is off") as raised:
        step(-1.0)
    assert "1 donated state, which has no value now: State 'state' (f32[], made at" in "".join(raised.value.__notes__)
    with pytest.raises(statetx.StateAccessError, match="was donated"):
        _ = state.value


def test_programs_without_functions_on_the_host_are_not_waited_for(monkeypatch):
    state = statetx.State(jnp.float32(0.0))

    def step(x):
        jax.debug.print("step {x}", x=x)
        state.value = state.value + x

    statetx.jit(pure)(1.0)
    count()  # has waited for it
    monkeypatch.setattr(jax, "block_until_ready", lambda tree: pytest.fail("waited"))
    for run in (statetx.jit(step), statetx.remat(step)):
        run(1.0)
        run(2.0)
