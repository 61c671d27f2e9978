"""Every mistake of the table raises an error that names the culprit and the fix; states are still no arrays to anybody
who only asks.
"""

import collections.abc
import copy
import dataclasses
import pickle
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mistakes import TABLE, message, outcome

import statetx
from statetx import Param, RngState, State, policies

X = jnp.ones(4)


FAMILIES = collections.defaultdict(list)
for mistake in TABLE:
    FAMILIES[re.match(r"[\w.]*", mistake.name)[0]].append(mistake)


@pytest.mark.parametrize("family", FAMILIES)
def test_message_names_the_culprit_and_the_fix(family):
    found = [(case.name, *outcome(case)) for case in FAMILIES[family]]
    assert not [f"{name}: {wrong}\n{error and message(error)}" for name, error, wrong in found if wrong]


def test_names_of_mistakes_are_unique():
    names = [case.name for case in TABLE]
    assert len(set(names)) == len(names) >= 127


# -- what states and policies must still do


class Tagged(State):
    """A subclass with an attribute of an array's name."""

    def __init__(self, value):
        super().__init__(value)
        self.shape = "round"


@pytest.mark.parametrize("state", [State(X), Param(X), RngState(0), Tagged(X)])
def test_states_are_compared_by_identity_and_are_leaves(state):
    assert state == state and state != State(X) and hash(state) == hash(state)
    assert state in [state] and {state: 1}[state] == 1
    assert jax.tree.leaves({"a": state}) == [state]
    assert jax.tree.structure(state) == jax.tree.structure(0)
    for protocol in (collections.abc.Iterable, collections.abc.Callable, collections.abc.Hashable):
        assert isinstance(state, protocol) == (protocol is collections.abc.Hashable)
    other = pickle.loads(pickle.dumps(state))
    copies = [copy.copy(state), copy.deepcopy(state), other]
    assert all(type(c) is type(state) and c is not state for c in copies)


def test_attribute_of_a_subclass_replaces_the_message():
    assert Tagged(X).shape == "round" and "shape" in dir(Tagged(X)) and "dtype" not in dir(Tagged(X))
    assert not {"shape", "T", "at"} & {*dir(State(X))} and {"value", "metadata"} <= {*dir(State(X))}
    assert not hasattr(State, "shape") and not hasattr(State(X), "shape") and getattr(State(X), "dtype", 3) == 3


@dataclasses.dataclass
class Holder:
    state: State


def test_states_are_equal_to_themselves_only():
    a, b = State(X), State(X)
    others = [None, "a", (), [], {}, {"a": X}, object, Holder(a), b]
    assert not any([a == other or other == a for other in others]) and all([a != other for other in others])
    assert Holder(a) == Holder(a) != Holder(b)
    assert a in [None, "a", b, a] and a not in {None, "a", b} and [b, a].index(a) == 1 and [a, b].count(b) == 1
    assert {a, b, a, None} == {b, a, None} and {a: 1, "a": 2}.get(b) is None
    np.testing.assert_array_equal(np.array([a, b], object) == np.array([a, a], object), [True, False])
    np.testing.assert_array_equal(np.array([a, None], object) == None, [False, True])  # noqa: E711


@pytest.mark.parametrize(
    "make",
    [
        lambda *states: np.array(states, object),
        lambda *states: np.asarray([*states, None], object)[:-1],
        lambda *states: np.array([states], dtype="O")[0],
    ],
)
def test_state_is_an_item_of_an_array_of_objects(make):
    states = [State(X), RngState(0), Param(X)]
    held = make(*states)
    assert held.shape == (3,) and list(held) == states and list(statetx.states(held).values()) == states


def test_states_and_models_are_arguments_of_transforms():
    w = Param(X)
    loss = lambda w, x: (w.value * x).sum()
    assert statetx.jit(loss)(w, X) == statetx.remat(loss)(w, X) == 4
    assert statetx.grad(loss, argnums=1)(w, X).shape == (4,)
    assert statetx.vmap(lambda x, w: x * w.value[0], in_axes=(0, None))(X, w).shape == (4,)


def test_jax_may_ask_a_policy_for_its_truth_value():
    f = lambda x: jnp.sin(x @ x)
    assert jax.grad(jax.checkpoint(f, policy=policies.dots))(X).shape == (4,)


def test_options_are_those_of_the_signature():
    import inspect

    assert "unknown" not in inspect.signature(statetx.remat).parameters
    assert statetx.jit(fun=lambda x: x, static_argnums=())(1.0) == 1.0
    assert statetx.grad(argnums=0)(lambda x: x * x)(3.0) == 6.0
