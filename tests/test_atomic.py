"""A call is atomic: the writes of a failed call are undone, for every kind of state, in eager code too."""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import statetx

KINDS = {
    "State": lambda x: statetx.State(x),
    "brainstate": lambda x: brainstate.ShortTermState(x),
    "nnx": lambda x: NnxVariable(x),
    "Ref": lambda x: RefCell(x),
}


class NnxVariable(nnx.Variable):
    value = property(nnx.Variable.get_value, nnx.Variable.set_value)


class RefCell:
    def __init__(self, value):
        self.ref = jax.new_ref(value)

    value = property(lambda self: self.ref[...], lambda self, value: self.ref.__setitem__(..., value))


HOW_CALLED = {
    "eager": lambda f: f,
    "grad": statetx.grad,
    "jit": statetx.jit,
    "grad(jit)": lambda f: statetx.grad(statetx.jit(f)),
}


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("how", HOW_CALLED)
@pytest.mark.parametrize("caught", [False, True])
def test_failed_call_is_undone(make, how, caught):
    n, other = make(jnp.float32(1.0)), make(jnp.float32(1.0))

    @statetx.remat
    def inner(x):
        n.value = n.value + x
        return x

    @statetx.remat
    def risky(x):
        inner(x)  # a call that has returned, within one that fails
        n.value = n.value * 2.0
        raise ZeroDivisionError

    def f(x):
        other.value = other.value + 1.0
        try:
            return risky(x)
        except ZeroDivisionError:
            if not caught:
                raise
            return jnp.sin(x) * n.value

    if caught:
        HOW_CALLED[how](f)(1.0)
    else:
        with pytest.raises(ZeroDivisionError):
            HOW_CALLED[how](f)(1.0)
    undone = not caught and how != "eager"  # in eager code f itself is not a transformed call
    assert float(n.value) == 1.0 and float(other.value) == (1.0 if undone else 2.0)


def test_failed_call_under_disable_jit_is_undone():
    n = statetx.State(0)

    @statetx.jit
    def f(x):
        n.value += 1
        raise ZeroDivisionError

    with jax.disable_jit(), pytest.raises(ZeroDivisionError):
        f(1.0)
    assert n.value == 0


@pytest.mark.parametrize("how", HOW_CALLED)
def test_in_place_changes_of_a_failed_call_are_undone(how):
    tree, array = statetx.State({"a": [1.0]}), statetx.State(np.zeros(2, np.float32))

    @statetx.remat
    def f(x):
        tree.value["a"].append(2.0)
        if how in ("eager", "grad"):  # where arrays are traced they cannot be changed in place
            array.value[0] = 7.0
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        HOW_CALLED[how](f)(1.0)
    assert tree.value == {"a": [1.0]} and array.value.tolist() == [0.0, 0.0]


def test_in_place_changes_of_an_array_survive_the_call():
    array = statetx.State(np.zeros(2))
    raw = array.value

    @statetx.remat
    def f(x):
        array.value[0] = array.value[0] + 7.0
        return x

    f(1.0)
    assert array.value.tolist() == [7.0, 0.0]
    statetx.grad(f)(1.0)
    assert array.value.tolist() == [14.0, 0.0] and raw.tolist() == [0.0, 0.0]
    frozen = statetx.State(np.zeros(2))
    frozen.value.flags.writeable = False
    seen = []
    statetx.grad(lambda x: seen.append(frozen.value) or x)(1.0)
    assert seen[0] is frozen.value  # immutable values are not copied


@pytest.mark.parametrize("how", ["eager", "grad"])
def test_states_sharing_a_container_see_each_others_changes(how):
    def program(transform):
        shared = {"x": 1.0}
        a, b = statetx.State(shared), statetx.State(shared)

        def f(y):
            a.value["x"] = 5.0
            return y * b.value["x"]

        return float(transform(f)(1.0)), a.value["x"], b.value["x"]

    assert program(lambda f: HOW_CALLED[how](statetx.remat(f))) == program(lambda f: f) == (5.0, 5.0, 5.0)


def test_in_place_change_of_a_shared_container_in_a_program_raises():
    shared = {"x": 1.0}
    a, b = statetx.State(shared), statetx.State(shared)

    @statetx.jit
    def f(y):
        a.value["x"] = 5.0
        return y * b.value["x"]

    with pytest.raises(statetx.StateValueError, match="two states hold"):
        f(1.0)
    assert a.value == b.value == {"x": 1.0}


def test_transform_of_brainstate_inside_an_eager_call():
    n = statetx.State(jnp.float32(1.0))

    def add(x):
        n.value = n.value + x
        return n.value * x

    @statetx.remat
    def f(x):
        y = brainstate.transform.jit(add)(x)
        return y + brainstate.transform.for_loop(add, jnp.full(2, x)).sum()

    assert float(f(1.0)) == 9.0 and float(n.value) == 4.0
