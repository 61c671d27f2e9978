"""Random stateful programs agree with their pure reference: outputs, final states, keys, exceptions, second calls.

`random_programs` defines the programs and their meaning. Floats agree to a relative 1e-9 (1e-11 near zero) in
float64, since XLA may fuse operations that the reference does one at a time; integers, keys, shapes and dtypes exactly.
To see the suite fail: `test_broken_feature_is_found` breaks one after another and expects a counterexample.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import hypothesis
import jax
import pytest
import random_programs
from hypothesis import HealthCheck, Phase, example, given, settings
from laws import WORDS
from random_programs import (
    Binary,
    Block,
    Call,
    Const,
    Draw,
    Inspect,
    Let,
    Local,
    Raise,
    Read,
    Unary,
    Write,
    check,
    programs,
)

import statetx
from helpers import undo_the_owner_only
from statetx._lift.outcome import Outcome
from statetx._loops import checkpointed

COMMON: dict[str, Any] = {
    "deadline": None,
    "derandomize": True,
    "database": None,
    "suppress_health_check": list(HealthCheck),  # a program takes as long as it takes to compile
}

# Found by the search and reduced; listed so that no change of the generator can lose them.
NUMBER_TO_MAPPED_STATE = Block(
    (Call("vmap", Block((Write("u", (), Const(0.3), raw=True),), Local(0)), Local(0), mapped=("u",)),), Local(0)
)


@settings(max_examples=25, **COMMON)
@example(NUMBER_TO_MAPPED_STATE)
@given(programs())
def test_random_program_equals_its_reference(program):
    check(program)


@settings(max_examples=3, **COMMON)
@given(programs())
def test_random_program_under_the_checks_of_jax(program):
    with jax.enable_checks(True):
        check(program)


@pytest.mark.slow
@settings(max_examples=5000, **COMMON)
@given(programs())
def test_random_program_equals_its_reference_at_length(program):
    check(program)


@pytest.fixture
def stored(monkeypatch):
    """Every `remat` keeps what its body computes, and its arguments, in another form."""
    policy = statetx.policies.everything.stored_as(WORDS)
    monkeypatch.setattr(statetx, "remat", functools.partial(statetx.remat, policy=policy, inputs_stored_as=WORDS))


@settings(max_examples=15, **COMMON)
@given(programs().filter(lambda p: any(isinstance(x, Call) and x.kind == "remat" for x in parts(p))))
def test_random_program_stored_in_another_form(stored, program):
    check(program)


@pytest.fixture
def slots(monkeypatch):
    """Every scan is reversed from two slots, some of which hold what steps keep; of that, a factor of 1 as bits."""
    checkpoint = statetx.policies.Slots(2, policy=statetx.policies.everything.stored_as("bits"))
    scan, memory_for, are_mixed = statetx.scan, checkpointed.memory_for, []

    def from_slots(body: Any, carry: Any, xs: Any, **options: Any) -> Any:
        def step(carry: Any, x: Any) -> tuple[Any, Any]:
            new, y = body(carry, x)
            return new * (carry > -99.0).astype(new.dtype), y

        return scan(step, carry, xs, **options | {"checkpoint": checkpoint})

    def noted(*args: Any, **options: Any) -> Any:
        memory = memory_for(*args, **options)
        are_mixed.append(memory[-1])
        return memory

    monkeypatch.setattr(statetx, "scan", from_slots)
    monkeypatch.setattr(checkpointed, "memory_for", noted)
    statetx.clear_cache()
    yield
    assert any(are_mixed)


def looped(program: Block) -> Block:
    """The gradient of a loop over the program, whose carry goes through a sine."""
    carry = Local(1 + sum(isinstance(s, (Let, Draw, Call)) for s in program.body))
    step = Block(program.body, Binary("mid", program.result, Unary("sin", carry)))
    loop = Block((Call("scan", step, Binary("mid", Local(0), Read("v")), xs=Local(0)),), Local(0))
    return Block((Call("grad", loop, Local(0)),), Local(0))


@settings(max_examples=6, **COMMON)
@given(programs(depth=2).map(looped))
def test_random_program_from_slots(slots, program):
    check(program)


@pytest.mark.slow
@settings(max_examples=500, **COMMON)
@given(programs().map(looped))
def test_random_program_from_slots_at_length(slots, program):
    check(program)


# -- the search can fail ---------------------------------------------------------------------------------------


def publish_all_but_one(self, leaves, *, live=True, publish=Outcome.publish):
    kept = len(self.effects) - 1
    if kept < 0:
        return
    self.effects, self.values = self.effects[:kept], self.values[:kept]
    publish(self, leaves, live=live)


def advance_nothing(self):
    return jax.random.split(self.value)[1]


def see_the_state_itself(self, values):
    return lambda state, kind, value: value


BREAKAGES = {
    "states keep what a call left in them": ("_frames.Access.undo", undo_the_owner_only),
    "one effect is not published": ("_lift.outcome.Outcome.publish", publish_all_but_one),
    "a key does not advance": ("kinds.native.RngState.next", advance_nothing),
    "gradients of states are lost": ("_lift.targets.Targets.on_read", see_the_state_itself),
    "a shared key is split": ("transforms.vmap.Split", statetx.Broadcast),
    "what a call writes is forgotten": ("_frames.Frame._collect", lambda self: []),
}


def fails(program: Block) -> bool:
    try:
        check(program, calls=1)
    except Exception:  # a broken feature may fail in any way
        return True
    return False


@pytest.mark.parametrize(
    "breakage", [b if n == 0 else pytest.param(b, marks=pytest.mark.slow) for n, b in enumerate(BREAKAGES)]
)
def test_broken_feature_is_found(breakage, monkeypatch):
    name, broken = BREAKAGES[breakage]
    monkeypatch.setattr(f"statetx.{name}", broken)
    wanted = settings(max_examples=300, phases=[Phase.generate], **COMMON)
    found = hypothesis.find(programs(), fails, settings=wanted)
    monkeypatch.undo()
    assert not fails(found), "the counterexample is one without the breakage too"


# -- coverage of the generator ---------------------------------------------------------------------------------


def parts(node: Any) -> Iterator[Any]:
    """The node and everything in it."""
    yield node
    if isinstance(node, tuple):
        for part in node:
            yield from parts(part)
    elif dataclasses.is_dataclass(node):
        for field in dataclasses.fields(node):
            yield from parts(getattr(node, field.name))


def has(test: Any) -> Any:
    return lambda program: any(test(part) for part in parts(program))


def inspects(how: str) -> Any:
    return has(lambda part: isinstance(part, Inspect) and part.how == how)


WANTED = {
    **{kind: has(lambda p, kind=kind: isinstance(p, Call) and p.kind == kind) for kind in random_programs.MEANINGS},
    "depth 4": lambda program: random_programs.count_calls(program)["depth"] == 4,
    "exception caught inside a transform": lambda program: any(
        isinstance(c, Call) and has(lambda p: isinstance(p, Call) and p.caught and Raise() in p.block.body)(c.block)
        for c in parts(program)
    ),
    "second name": has(lambda p: isinstance(p, Read) and p.name == "v_too"),
    "gradient of a state": has(lambda p: isinstance(p, Call) and p.kind == "grad" and "s" in p.wrt),
    "mapped state in a scan": has(lambda p: isinstance(p, Call) and p.kind == "scan" and "m" in p.mapped),
    "Python number written": has(lambda p: isinstance(p, Write) and p.raw),
    "derivative of a rule that reads a state": has(
        lambda p: isinstance(p, Call) and p.kind == "grad" and has(lambda e: getattr(e, "op", "") == "ruled")(p.block)
    ),
    **{
        f"{how} inside a transform": has(lambda p, how=how: isinstance(p, Call) and inspects(how)((p.block, p.other)))
        for how in random_programs.INSPECTIONS
    },
}


@pytest.mark.parametrize("feature", WANTED)
def test_generator_reaches_every_feature(feature):
    wanted = settings(max_examples=1000, phases=[Phase.generate], **COMMON)
    hypothesis.find(programs(), WANTED[feature], settings=wanted)
