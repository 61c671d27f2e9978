"""A call is atomic: the writes of a failed call are undone, for every kind of state, in eager code too."""

import brainstate
import brainunit as u
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from libraries import VALUED

import statetx
from helpers import transforms_of_brainstate

HOW_CALLED = {
    "eager": lambda f: f,
    "grad": statetx.grad,
    "jit": statetx.jit,
    "grad(jit)": lambda f: statetx.grad(statetx.jit(f)),
}


@pytest.mark.parametrize("make", VALUED.values(), ids=VALUED)
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


# Each transform that gives a state a value of its own: what the body reads of `a`, which it changes, and of `b`, which
# it does not. In: a function of no arguments. Out: what it returns in its last run.
OWN_VALUES = {
    "scan": lambda f: statetx.scan(lambda c, _: (c, f()), None, None, 2)[1][-1],
    "compiled scan": lambda f: statetx.jit(lambda: statetx.scan(lambda c, _: (c, f()), None, None, 2)[1][-1])(),
    "Slots": lambda f: statetx.scan(lambda c, _: (c, f()), None, None, 2, checkpoint=statetx.policies.Slots(1))[1][-1],
    "fori_loop": lambda f: statetx.fori_loop(0, 2, lambda i, c: f(), jnp.zeros(())),
    "while_loop": lambda f: statetx.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, f()), (0, jnp.zeros(())))[1],
    "microbatch": lambda f: statetx.microbatch(lambda x: f(), 2, reduce="stack")(jnp.zeros(4))[-1],
    "cond": lambda f: [statetx.cond(jnp.asarray(True), f, lambda: jnp.zeros(())) for _ in range(2)][-1],
    "jit of remat": lambda f: [statetx.jit(statetx.remat(f))() for _ in range(2)][-1],
    "jit of grad": lambda f: [statetx.jit(statetx.value_and_grad(lambda x: f() + x))(0.0)[0] for _ in range(2)][-1],
}


@pytest.mark.parametrize("make", [lambda t: t, lambda t: u.Quantity(t["x"], unit=u.mV)], ids=["dict", "quantity"])
@pytest.mark.parametrize("run", OWN_VALUES.values(), ids=OWN_VALUES)
def test_states_that_begin_with_one_container_have_values_of_their_own(run, make):
    start = make({"x": jnp.asarray(1.0)})
    a, b = statetx.State(start), statetx.State(start)
    number = lambda value: value["x"] if isinstance(value, dict) else value.mantissa

    def f():
        a.value = make({"x": number(a.value) + 1.0})
        return number(a.value) - 10.0 * number(b.value)

    assert float(run(f)) == 3.0 - 10.0
    assert float(number(a.value)) == 3.0 and float(number(b.value)) == 1.0


@pytest.mark.parametrize("first", ["target", "online"])
@pytest.mark.parametrize("wrap", [lambda f: f, statetx.remat], ids=["plain", "remat"])
def test_gradient_by_a_state_leaves_out_another_that_holds_the_same_container(wrap, first):
    weights = {"w": jnp.array([1.0, 2.0])}
    online, target = statetx.Param(weights), statetx.State(weights)

    def loss(x):
        if first == "target":
            return (-(target.value["w"] * x).sum() + (online.value["w"] * x).sum() + 1.0) ** 2
        return ((online.value["w"] * x).sum() - (target.value["w"] * x).sum() + 1.0) ** 2

    x = jnp.array([1.0, 3.0])
    np.testing.assert_allclose(statetx.grad(wrap(loss), wrt=online)(x)["w"], 2 * x)
    both = statetx.grad(wrap(loss), wrt=[online, target])(x)
    np.testing.assert_allclose([g["w"] for g in both], [2 * x, -2 * x])
    out, pullback = statetx.vjp(wrap(loss), x, wrt=[online, target])
    np.testing.assert_allclose([g["w"] for g in pullback(1.0)[0]], [2 * x, -2 * x])


def test_mapped_and_unmapped_states_may_hold_the_same_container():
    values = {"x": jnp.arange(3.0)}
    mapped, whole = statetx.Param(values), statetx.State(values)

    def f(x):
        return x + mapped.value["x"] + 10.0 * whole.value["x"].sum()

    only = {statetx.Param: 0}
    np.testing.assert_array_equal(statetx.vmap(f, states=only)(jnp.zeros(3)), [30.0, 31.0, 32.0])
    scanned = statetx.scan(lambda c, x: (c, f(x)), None, jnp.zeros(3), states=only)[1]
    np.testing.assert_array_equal(scanned, [30.0, 31.0, 32.0])


def test_values_given_to_a_pure_function_are_those_of_their_states():
    start = {"x": jnp.asarray(1.0)}
    a, b = statetx.State(start), statetx.State(start)
    pure = statetx.functionalize(lambda: a.value["x"] * 2 + b.value["x"] * 3)
    assert float(pure({"a": {"x": 1.0}, "b": {"x": 10.0}})[0]) == 32.0


IN_PLACE = {
    "scan": OWN_VALUES["scan"],
    "scan in scan": lambda f: OWN_VALUES["scan"](lambda: OWN_VALUES["scan"](f)),
    "jit of scan": OWN_VALUES["compiled scan"],
    "jit of remat": OWN_VALUES["jit of remat"],
    "jit of grad": OWN_VALUES["jit of grad"],
    "jit of cond": lambda f: statetx.jit(lambda: OWN_VALUES["cond"](f))(),
}


@pytest.mark.parametrize("run", IN_PLACE.values(), ids=IN_PLACE)
@pytest.mark.parametrize("assigns", [False, True])
def test_in_place_change_of_a_shared_container_in_a_traced_body_raises(run, assigns):
    shared = {"x": jnp.asarray(1.0)}
    a, b = statetx.State(shared), statetx.State(shared)

    def f():
        a.value["x"] = a.value["x"] + 1.0
        if assigns:
            b.value = {"x": b.value["x"] + 1.0}
        return b.value["x"]

    with pytest.raises(statetx.StateValueError, match=r"two states hold[\s\S]*gives each state a container of its own"):
        run(f)
    assert a.value is b.value is shared and float(shared["x"]) == 1.0


@pytest.mark.parametrize("assigned", ["a", "b"])
def test_states_that_are_assigned_another_container_before_share_none(assigned):
    def program(transform, loop):
        shared = {"x": jnp.asarray(1.0)}
        states = {"a": statetx.State(shared), "b": statetx.State(shared)}

        def f():
            states["a"].value["x"] = 2.0 * states["a"].value["x"]
            return states["a"].value["x"] + states["b"].value["x"]

        def step():
            states[assigned].value = {"x": states[assigned].value["x"] + 3.0}
            return loop(f)

        return float(transform(step)()), *(float(s.value["x"]) for s in states.values())

    assert program(statetx.jit, OWN_VALUES["scan"]) == program(lambda f: f, lambda f: [f(), f()][-1])


@transforms_of_brainstate
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


@pytest.mark.parametrize("wrap", [statetx.jit, statetx.remat])
def test_list_inside_of_two_containers_is_two_lists_in_a_transform(wrap):
    """As docs/features.md says: only the containers that states hold themselves are compared."""
    inner = [jnp.zeros(2)]
    state = statetx.State({"a": inner, "b": inner})

    def grow():
        state.value["a"].append(jnp.ones(2))
        return len(state.value["b"])

    assert wrap(grow)() == 1 and len(state.value["a"]) == 2


@pytest.mark.parametrize(
    "transform", [statetx.jit, statetx.remat, statetx.grad, statetx.vmap], ids=lambda f: f.__name__
)
def test_one_of_two_items_may_be_changed_in_place(transform):
    state = statetx.State({"a": jnp.zeros(2), "b": jnp.zeros(2)})

    def body(x):
        state.value["b"] = jnp.ones(2)
        return x.sum()

    transform(body)(jnp.ones((2, 2)))
    assert state.value["b"].tolist() == [1.0, 1.0] and state.value["a"].tolist() == [0.0, 0.0]
