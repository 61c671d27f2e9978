"""`states`, filters and paths."""

import dataclasses
import functools
import types

import jax.numpy as jnp
import pytest

import statetx
from statetx import Not, Param, State, states


@dataclasses.dataclass
class Layer:
    w: Param
    n: State


class Slotted:
    __slots__ = ("h",)

    def __init__(self):
        self.h = State(0)


class Model:
    def __init__(self):
        shared = Param(1.0)
        self.layers = [Layer(Param(1.0), State(0)), Layer(shared, State(0))]
        self.table = {"emb": shared, 3: State("x")}
        self.slotted = Slotted()
        self.me = self
        self.np = jnp

    def step(self, x):
        return x


GLOBAL_MODEL = Model()


def reads_global(x):
    return helper(x)


def helper(x):
    return GLOBAL_MODEL.step(x)


ALL = ["layers.0.w", "layers.0.n", "layers.1.w", "layers.1.n", "table.3", "slotted.h"]


def test_paths_through_every_container_and_shared_states_once():
    assert list(states(Model())) == ALL


def test_paths_through_functions():
    model = Model()
    assert list(states(model.step)) == ALL
    assert list(states(statetx.remat(model.step))) == ALL
    assert list(states(functools.partial(model.step, 3))) == ALL
    assert list(states(lambda x: model.step(x))) == [f"model.{p}" for p in ALL]
    assert list(states(statetx.jit(lambda x: model.step(x)))) == [f"model.{p}" for p in ALL]
    assert list(states(reads_global)) == [f"GLOBAL_MODEL.{p}" for p in ALL]
    assert list(states([model, Slotted()])) == [f"0.{p}" for p in ALL] + ["1.h"]


@pytest.mark.parametrize(
    ("filter", "expected"),
    [
        (True, ALL),
        (False, []),
        (Param, ["layers.0.w", "layers.1.w"]),
        ("layers.*", ALL[:4]),
        ("*.n", ["layers.0.n", "layers.1.n"]),
        (lambda path, s: s.value == "x", ["table.3"]),
        ([Param, "slotted.*"], ["layers.0.w", "layers.1.w", "slotted.h"]),
        (Not(Param), ["layers.0.n", "layers.1.n", "table.3", "slotted.h"]),
        (~Not("*.n"), ["layers.0.n", "layers.1.n"]),
    ],
)
def test_filters(filter, expected):
    assert list(states(Model(), filter)) == expected


weight = Param(1.0)


class NamesLikeGlobals:
    def __init__(self):
        self.weight = Param(2.0)

    def read(self):
        return self.weight.value


def reads_both(model=NamesLikeGlobals()):  # noqa: B008
    return model.weight.value + weight.value


def reads_weight(self):
    return self.weight.value + weight.value


def test_attribute_differs_from_a_global_of_the_same_name():
    model = NamesLikeGlobals()
    assert states(model.read) == {"weight": model.weight}
    assert statetx.trace_states(model.read)().reads == {"weight": model.weight}


def test_two_states_never_share_a_path():
    found = states([reads_both, types.MethodType(reads_both, NamesLikeGlobals())])
    assert list(found) == ["0.model.weight", "1.weight"]
    found = states(functools.partial(reads_weight, NamesLikeGlobals()))
    assert len(found) == 2 and found["weight"] is weight and "weight#2" in found


@pytest.mark.parametrize(
    "use",
    [
        lambda filter: states(Model(), filter),
        statetx.policies.states,
        lambda filter: statetx.remat_scan(lambda x: x, 3, carry=filter),
    ],
)
def test_invalid_filters_raise(use):
    with pytest.raises(statetx.StateFilterError, match="Not a filter: 3"):
        use(3)


def test_namespace_and_order_of_definition():
    space = types.SimpleNamespace(b=State(1), a=State(2))
    assert list(states(space)) == ["b", "a"]
    assert list(states({"z": State(1), "a": (State(2), State(3))})) == ["z", "a.0", "a.1"]
