"""Random programs that mix kinds of states agree with plain Python: outputs, states, types, exceptions, runs of the
body.

`mixed_generator` draws them, `mixed_reference` defines their meaning. ``check_seed(n)`` runs one and prints it,
reduced, if it fails.
"""

from __future__ import annotations

import collections
import functools
import itertools

import jax
import mixed_reference
import mixed_search
import mixed_syntax
import pytest
import random_mixed
from laws import WORDS
from mixed_generator import program_of
from mixed_syntax import source
from random_mixed import check, check_seed, check_threads, reduce

import speeds
import statetx
from helpers import names_read, publish_all_but_one, undo_the_owner_only

NUM_FAST, NUM_SLOW, CHUNK, TURNS = 12, 300, 5, 16


def test_reference_compares_keys_while_something_is_traced():
    key, other = jax.random.key(7), jax.random.key(8)
    jax.jit(lambda x: (mixed_reference._check_equal([key, key], key), x)[1])(1.0)
    with pytest.raises(AssertionError, match="different values"):
        jax.jit(lambda x: (mixed_reference._check_equal([key, other], key), x)[1])(1.0)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, NUM_FAST, 4))
def test_mixed_program_equals_its_reference(first):
    for seed in range(first, first + 4):
        check_seed(seed)


@pytest.mark.slow
def test_gradient_of_a_loop_whose_steps_reverse_a_loop():
    """JAX hoists what is constant in the outer loop, and would drop the derivative rule of the reversal there."""
    check_seed(3192)


@pytest.mark.slow
def test_loop_over_states_that_begin_with_one_container():
    check_seed(1720)


@pytest.fixture
def stored(monkeypatch):
    """Every `remat` without a policy keeps what its body computes, and its arguments, in another form."""
    policy = statetx.policies.everything.stored_as(WORDS)
    monkeypatch.setattr(statetx, "remat", functools.partial(statetx.remat, policy=policy, inputs_stored_as=WORDS))


def rematerializing(seeds):
    """The seeds of programs with a `remat`."""
    return [seed for seed in seeds if " remat(" in source(program_of(seed), "statetx")]


@pytest.mark.slow
def test_mixed_program_stored_in_another_form(stored):
    for seed in rematerializing(range(12))[:4]:
        check_seed(seed)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 250, CHUNK))
def test_mixed_program_stored_in_another_form_at_length(first, stored):
    for seed in rematerializing(range(first, first + CHUNK)):
        check_seed(seed)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, NUM_SLOW, CHUNK))
def test_mixed_program_equals_its_reference_at_length(first):
    """Each turn of the twelfths has other seeds, of 4,800 in all."""
    first += NUM_SLOW * (speeds.today()[1] % TURNS)
    for seed in range(first, first + CHUNK):
        check_seed(seed)


@pytest.mark.sample
@pytest.mark.parametrize("seed", range(3))
def test_mixed_programs_in_two_threads(seed):
    assert not check_threads(seed)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 100, CHUNK))
def test_mixed_programs_in_two_threads_at_length(first):
    for seed in range(first, first + CHUNK):
        assert not check_threads(seed), seed


# -- the search can fail ---------------------------------------------------------------------------------------


BREAKAGES = {
    "states keep what a call left in them": ("_frames.Access.undo", undo_the_owner_only, "grad("),
    "one effect is not published": ("_lift.outcome.Outcome.publish", publish_all_but_one, "vjp("),
    "a key does not advance": ("kinds.native.RngState.next", lambda self: jax.random.split(self.value)[1], "draw("),
    "what a container holds is not compared": ("_frames.Copy.was_changed", lambda self: False, "['a'] = "),
    "an inspection takes a state's value for an attribute of the model": (
        "_objects.walk._attributes",
        lambda obj: getattr(obj, "__dict__", None),
        "look_at('saved_residuals', f1017, ",
    ),
    "gradients of states are lost": (
        "_lift.differentiated.DifferentiatedStates.on_read",
        lambda self, values: lambda state, kind, value: value,
        "wrt=",
    ),
    "what a call writes is forgotten": ("_frames.Frame._collect", lambda self: [], "jvp("),
}
"""By breakage: a name of statetx, its replacement, and a word in the programs that may fail."""


@pytest.mark.slow
@pytest.mark.parametrize("breakage", BREAKAGES)
def test_broken_feature_is_found_and_reduced(breakage, monkeypatch):
    name, broken, word = BREAKAGES[breakage]
    programs = [p for p in map(program_of, range(200)) if word in source(p, "statetx")]
    monkeypatch.setattr(f"statetx.{name}", broken)
    program, found = next((p, f) for p in programs if (f := check(p)))
    reduced, _ = reduce(program, found, limit=8)
    assert check(reduced)
    assert len(source(reduced, "statetx")) <= len(source(program, "statetx"))
    monkeypatch.undo()
    assert not check(reduced), "the counterexample is one without the breakage too"


# -- coverage of the generator ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_generator_reaches_every_feature():
    """Of 400 programs, at least four have each; `python tests/mixed_search.py 0 400 --coverage` prints the counts."""
    counts = mixed_search.coverage(range(400))
    assert min(counts.values()) >= 4, counts
    assert counts["two kinds of states"] >= 300, "kinds are not mixed in most programs"


read = pytest.fixture(names_read)


@pytest.mark.slow
@pytest.mark.parametrize("num", [20, 300])
def test_gradients_of_many_programs_read_bits_and_residuals_in_slots(num, read):
    """Of those that the suite runs, a third; fewer than 15% would be too few to find a fault."""
    counts = collections.Counter()
    for program in map(program_of, range(num)):
        read.clear()
        if any(word in source(program, "statetx") for word in ("Slots(", "bits", "masks")):  # others store nothing
            statetx.clear_cache()
            random_mixed.stage(program)
        counts.update(read)
    assert min(counts["bits"], counts["residuals in slots"]) >= 0.15 * num, counts


def test_programs_are_the_same_for_the_same_seed():
    assert source(program_of(3), "statetx") == source(program_of(3), "statetx")


def test_reduced_programs_are_python():
    for seed in range(5):
        for program in itertools.islice(mixed_syntax.smaller(program_of(seed)), 20):
            for world in ("statetx", "reference"):
                compile(source(program, world), "<program>", "exec")


def test_reduction_ends_with_the_least_that_fails(monkeypatch):
    """With a check that fails where a Ref is made, nothing but that is left."""
    program = next(p for p in map(program_of, range(50)) if any(c.kind == "ref" for c in p.cells))
    monkeypatch.setattr(random_mixed, "check", lambda p: "ref" if any(c.kind == "ref" for c in p.cells) else "")
    reduced, _ = reduce(program, "ref", limit=4000)
    assert [c.kind for c in reduced.cells] == ["ref"]
    assert not reduced.main.body and not reduced.turns
