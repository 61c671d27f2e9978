"""`memory_profile`: sums to XLA's figures, known answers, names, and what the advice saves."""

import dataclasses
import functools
import gc
import itertools
import json
import lzma
import os
import pathlib
import subprocess
import sys
import types
from collections import defaultdict

import jax
import jax.numpy as jnp
import memory_programs
import numpy as np
import pytest
from flax import nnx
from jax._src import pjit
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import corpus
import statetx
from helpers import benchmark, in_turn
from statetx import _jax
from statetx._equations.compiler import memory_analysis_options
from statetx._equations.structure import table
from statetx.memory import _lifetimes, _names, measure
from statetx.memory._advice import candidates
from statetx.memory._assemble import Assembly, Inputs

X = jax.ShapeDtypeStruct((512, 64), jnp.float32)
NARROW = jax.ShapeDtypeStruct((64, 16), jnp.float32)


def profile_and_program(fun, *args, **options):
    traced, _ = measure._trace(fun, args, {}, options.get("gradient", True))
    compiled = traced.stage
    if not isinstance(compiled, jax.stages.Compiled):
        compiled = compiled.compile(memory_analysis_options())
    program = _jax.compiled_program(compiled)
    assert program is not None
    return statetx.memory_profile(compiled), program, compiled.memory_analysis()


def overlaps(found):
    """Pairs of values that share memory and live at the same time, apart from the step in which one replaces
    the other.
    """
    by_allocation = defaultdict(list)
    for lifetime in found:
        by_allocation[lifetime.allocation].append(lifetime)
    pairs = []
    for group in by_allocation.values():
        group.sort(key=lambda x: x.start)
        for n, a in enumerate(group):
            for b in group[n + 1 :]:
                if b.start >= a.end:
                    continue
                if a.offset < b.offset + b.num_bytes and b.offset < a.offset + a.num_bytes:
                    pairs.append((a, b))
    return pairs


def check_sums(fun, *args, **options):
    """Lifetimes agree with XLA's placement, and sizes with its figures, to the byte."""
    return check_profile(*profile_and_program(fun, *args, **options))


def check_profile(profile, program, memory):
    schedule = _lifetimes.FlatSchedule(program)
    found = _lifetimes.lifetimes(program, schedule, _lifetimes.Flow(program, schedule))
    # XLA lets values share memory only if they are never alive together: lifetimes that are too long show here.
    assert overlaps(found) == []

    told = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    assert profile.peak_bytes == told + memory.temp_size_in_bytes
    at_peak = sum(group.num_bytes for group in profile.at_peak)
    assert at_peak == profile.timeline.max() and at_peak + profile.unused_bytes == profile.peak_bytes
    assert profile.unused_bytes >= 0 and profile.timeline.min() >= 0
    by_place = {}
    for b in profile.buffers:
        by_place.setdefault(b.allocation, []).append(b)
    for a in program.allocations:  # every byte of an allocation is some buffer's
        if not (a.is_thread_local or a.is_elsewhere) and a.num_bytes:
            assert max(b.offset + b.num_bytes for b in by_place[a.index]) == a.num_bytes
    # Each step alone: the buffers alive take no byte twice.
    for step in range(0, len(profile.steps), max(1, len(profile.steps) // 20)):
        assert sum(b.num_bytes for b in profile.alive(step)) == profile.timeline[step]
    return profile


def test_values_on_the_host_take_none_of_the_devices_memory():
    _, program, memory = profile_and_program(lambda w: jnp.tanh(jnp.tanh(w @ w) @ w).sum(), jnp.eye(64))
    temporary = [
        a
        for a in program.allocations
        if a.parameter is None and not (a.is_output or a.is_constant or a.is_thread_local)
    ]
    assert sum(a.num_bytes for a in temporary) == memory.temp_size_in_bytes > 0
    offloaded = [a._replace(is_elsewhere=a in temporary) for a in program.allocations]
    on_device, on_both = (
        {b.allocation for b in Assembly(dataclasses.replace(program, allocations=allocations), Inputs()).buffers()}
        for allocations in (offloaded, program.allocations)
    )
    assert on_both - on_device == {a.index for a in temporary}


def test_operations_that_run_beside_others_hold_their_operands_until_they_are_done():
    """As on GPUs. XLA's rules: HloDataflowAnalysis in xla/hlo/analysis."""
    entry, wrapped = 1, 2
    instructions = [
        ("x", "parameter", (), (), entry),
        ("a", "negate", ("x",), (), entry),
        ("start", "async-start", ("a",), (wrapped,), entry),
        ("q", "parameter", (), (), wrapped),
        ("result", "fusion", ("q",), (), wrapped),
        ("between", "negate", ("x",), (), entry),
        ("done", "async-done", ("start",), (), entry),
        ("copy", "copy-start", ("between",), (), entry),
        ("used", "negate", ("done",), (), entry),
        ("copied", "copy-done", ("copy",), (), entry),
        ("root", "add", ("used", "copied"), (), entry),
    ]
    defined = {"x": (), "a": (), "result": (), "between": (), "copy": (0,), "used": (), "root": ()}
    values = [(name, index, 4, name) for name, index in defined.items()]
    program = _program_of([(*i, "", "", 0) for i in instructions], {entry: "root", wrapped: "result"}, values)
    schedule = _lifetimes.FlatSchedule(program)
    starts, ends = _lifetimes._spans(program, schedule, _lifetimes.Flow(program, schedule))
    names, ids = [i.name for i in schedule.order], {name: n for n, name in enumerate(defined)}
    assert {n: (names[starts[ids[n]]], names[ends[ids[n]]]) for n in ("a", "result", "between", "copy")} == {
        "a": ("a", "done"),
        "result": ("result", "used"),
        "between": ("between", "copied"),
        "copy": ("copy", "root"),
    }


SUMMED = [cls for cls in corpus.PROGRAMS if not cls.grows]


@pytest.mark.sample
@pytest.mark.parametrize("cls", in_turn(SUMMED), ids=lambda c: c.__name__)
def test_what_is_alive_at_the_peak_sums_to_xlas_figures(cls):
    check_sums(cls().step, jnp.asarray(corpus.X))


IN_LOOPS = [cls for cls in SUMMED if cls.loops and cls is not corpus.Objects]


@pytest.mark.parametrize(
    "cls", [pytest.param(cls, marks=[pytest.mark.slow] * (n % 6 > 0)) for n, cls in enumerate(IN_LOOPS)],
    ids=lambda c: c.__name__,
)  # fmt: skip
def test_what_is_alive_in_a_loop_sums_to_xlas_figures(cls):
    program = cls()

    def loop(xs):
        return statetx.scan(lambda c, x: (c, program.step(x)), 0.0, xs)[1]

    check_sums(loop, jnp.stack([jnp.asarray(corpus.X)] * 4))


with benchmark("programs") as programs:
    pass
SLOW_PROGRAMS = ("SwiGLU transformer", "convolutional net", "deep MLP")


WRAPS = {"plain": lambda f: f, "remat": statetx.remat}


@pytest.mark.sample("slow")
@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW_PROGRAMS)) for n in programs.PROGRAMS]
)
def test_planners_programs_sum_to_xlas_figures(name, wrap):
    loss, params, data = programs.PROGRAMS[name](WRAPS[wrap])
    check_sums(loss, params, *data)


@pytest.mark.sample
@pytest.mark.parametrize("make", memory_programs.KNOWN, ids=lambda f: f.__name__)
def test_first_line_names_the_known_answer_and_the_advice_saves_memory(make):
    case = make()
    before = statetx.memory_profile(case.before, *case.args, gradient=case.gradient)
    first_line = str(before).splitlines()[0]
    assert case.named in first_line
    change = before.changes[0]
    assert change.action == case.action and change.text[:-1].lower() in first_line.lower()

    after = case.after(change.text) if make is memory_programs.stacked_carries else case.after
    found = statetx.memory_profile(after, *case.args, gradient=case.gradient)
    sizes = before.peak_bytes, found.peak_bytes
    if case.action == "argument":  # the program's own copy
        sizes = before.constant_bytes, found.constant_bytes
    assert sizes[1] < 0.8 * sizes[0] and not (change.saved_bytes or change.is_compiled)


def test_advice_to_save_less_where_a_policy_saves_much():
    layers = [memory_programs.Layer(64, 256) for _ in range(6)]
    args = memory_programs.arrays((512, 64))
    before = statetx.memory_profile(memory_programs.loss_of(layers, lambda f: statetx.remat(f, policy="dots")), *args)
    (change,) = (c for c in before.changes if c.action == "policy")
    assert "Layer.__call__ (6 calls)" in change.text and "dot_general" in change.text
    after = statetx.memory_profile(memory_programs.loss_of(layers, statetx.remat), *args)
    assert after.peak_bytes < 0.9 * before.peak_bytes
    assert not [c for c in after.changes if c.action == "policy"]


def test_calls_of_a_function_are_counted_once_where_xla_copies_operands_of_its_products():
    layers = [memory_programs.Layer(32, 128) for _ in range(3)]
    params = statetx.states(layers, statetx.Param)

    @statetx.jit(donate_states=True)
    def step(x):
        grads = statetx.grad(memory_programs.loss_of(layers), wrt=params)(x)
        for path, param in params.items():
            param.value -= 0.1 * grads[path]

    profile = statetx.memory_profile(step, *memory_programs.arrays((4096, 32)), gradient=False)
    assert "Layer.__call__ (3 calls)" in profile.changes[0].text


@pytest.mark.slow
def test_no_policy_is_advised_where_the_loss_is_rematerialized_as_a_whole():
    """A counter that a rematerialized loss writes has its region, as what a policy saves has."""
    layers = [memory_programs.Dropped(64, 256) for _ in range(4)]
    step = _step(layers, statetx.remat(memory_programs.loss_of(layers)))
    profile = statetx.memory_profile(step, *memory_programs.arrays((2048, 64)), gradient=False)
    small = [b for b in profile.buffers if b.kind == "residual" and b.region]
    assert small and sum(b.num_bytes for b in small) < 0.02 * profile.peak_bytes
    assert not [c for c in profile.changes if c.action == "policy"]
    inside = [c for c in profile.changes if "inside the function that is rematerialized already" in c.text]
    # Where XLA runs all layers again before the first derivative of a layer, rematerialized layers spare nothing at the
    # peak.
    expected = {"Dropped.__call__"} if jax.__version_info__ < (0, 11, 1) else set()
    assert {c.owner for c in inside} == expected


def test_advice_inside_a_rematerialized_function_names_functions_inside_it():
    first, second = (memory_programs.Layer(64, width) for width in (512, 256))

    def loss(x):
        x = first(x)
        return (second(x) ** 2).mean()

    step = _step([first, second], statetx.remat(loss))
    profile = statetx.memory_profile(step, *memory_programs.arrays((2048, 64)), gradient=False)
    owners = {c.owner for c in profile.changes if "is rematerialized already" in c.text}
    assert owners == {"Layer.__call__"}  # the loss is rematerialized already, and the step calls it


def _step(layers, loss):
    params = statetx.states(layers, statetx.Param)

    @statetx.jit(donate_states=True)
    def step(x):
        value, grads = statetx.value_and_grad(loss, wrt=params)(x)
        for path, param in params.items():
            param.value -= 0.1 * grads[path]
        return value

    return step


class _Weights:
    def __init__(self):
        self.ws = [statetx.Param(jnp.ones((128, 128)) / 12) for _ in range(4)]


class _Loop(_Weights):
    def __call__(self, x):
        for w in self.ws:
            x = jax.nn.relu(x @ w.value)
        return x


class _Lines(_Weights):
    def __call__(self, x):
        a, b, c, d = self.ws
        x = jnp.tanh(x @ a.value)
        x = jnp.tanh(x @ b.value)
        x = jnp.tanh(x @ c.value)
        return jnp.tanh(x @ d.value)


class _Recursive(_Weights):
    def __call__(self, x, n=0):
        return x if n == 4 else self(jnp.tanh(x @ self.ws[n].value), n + 1)


class _Reduced(_Weights):
    def __call__(self, x):
        return functools.reduce(lambda x, w: jnp.tanh(x @ w.value), self.ws, x)


class _Mapped(_Weights):
    def __call__(self, x):
        return sum(jax.tree.map(lambda w: jnp.tanh(x @ w), [w.value for w in self.ws]))


class _Library(nnx.Module):
    def __init__(self):
        self.layers = nnx.List([nnx.Linear(128, 128, rngs=nnx.Rngs(0)) for _ in range(4)])

    def __call__(self, x):
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return x


@pytest.mark.sample
@pytest.mark.parametrize("model", [_Loop, _Lines, _Recursive, _Reduced, _Mapped, _Library])
def test_calls_of_a_block_are_told_apart_from_the_loop_in_it(model):
    """Their lines are equal, and the compiled programs of some kinds too: the cache of JAX must not give the names of
    another.
    """
    blocks, x = [model() for _ in range(6)], jnp.ones((2048, 128))

    def loss(x, wrap=lambda block: block):
        for block in blocks:
            x = wrap(block)(x)
        return jnp.mean(x**2)

    profile = statetx.memory_profile(loss, x)
    changed = statetx.memory_profile(functools.partial(loss, wrap=statetx.remat), x)
    change = next(c for c in profile.changes if c.action == "remat")
    where = f"tests/test_memory_profile.py:{model.__call__.__code__.co_firstlineno}"
    assert change.text == f"Rematerialize {model.__name__}.__call__ (6 calls) with @statetx.remat at {where}."
    assert changed.peak_bytes < 0.7 * profile.peak_bytes


@pytest.mark.parametrize("num", [2, 4])
def test_a_loss_that_loops_over_layers_is_one_call_and_not_advised(num):
    layers = [memory_programs.Normalized(64, 256) for _ in range(num)]
    loss, args = memory_programs.loss_of(layers), memory_programs.arrays((2048, 64))
    profile = statetx.memory_profile(_step(layers, loss), *args, gradient=False)
    remats = [c for c in profile.changes if c.action == "remat"]
    assert not [c for c in remats if c.owner.endswith("loss")]
    assert f"Normalized.__call__ ({num} calls)" in remats[0].text
    # Followed, the advice to rematerialize the loss would raise the peak.
    whole = statetx.memory_profile(_step(layers, statetx.remat(loss)), *args, gradient=False)
    assert whole.peak_bytes > profile.peak_bytes


def test_a_loss_with_a_product_behind_its_layers_is_not_advised():
    layers, last = [memory_programs.Normalized(64, 256) for _ in range(4)], memory_programs.Layer(64, 64)

    def loss(x):
        for layer in layers:
            x = layer(x)
        return ((x @ last.w.value) ** 2).mean()

    profile = statetx.memory_profile(_step([layers, last], loss), *memory_programs.arrays((2048, 64)), gradient=False)
    assert {c.owner for c in profile.changes if c.action == "remat"} == {"Normalized.__call__"}


def _layer(layer, x):
    return jnp.tanh(_hidden(layer, x)) @ layer.v.value


def _hidden(layer, x):
    return jnp.tanh(2.0 * jnp.sin(x @ layer.w.value))


def _in_turn(layer, x):
    return _layer(layer, _scaled(x))


def _scaled(x):
    return x / (1 + (x**2).sum(-1, keepdims=True))


@pytest.mark.parametrize("function", [_layer, _in_turn])
def test_a_function_that_a_loop_calls_has_a_call_for_each_repetition(function):
    """Whether it has operations of its own, or calls two functions in turn."""
    layers = [memory_programs.Layer(64, 256) for _ in range(4)]

    def loss(x):
        for layer in layers:
            x = function(layer, x)
        return (x**2).mean()

    profile = statetx.memory_profile(_step(layers, loss), *memory_programs.arrays((2048, 64)), gradient=False)
    owners = {c.owner: c.text for c in profile.changes if c.action == "remat"}
    assert f"{function.__name__} (4 calls)" in owners[function.__name__]
    assert not [owner for owner in owners if owner.endswith("loss")]


def test_operations_of_a_loop_in_a_loss_are_no_calls_of_it():
    layers = [memory_programs.Normalized(64, 256) for _ in range(4)]

    def loss(x):
        for layer in layers:
            x = x + _hidden(layer, x - x.mean(0, keepdims=True)) @ layer.v.value
        return (x**2).mean()

    profile = statetx.memory_profile(_step(layers, loss), *memory_programs.arrays((2048, 64)), gradient=False)
    owners = {c.owner for c in profile.changes if c.action == "remat"}
    assert "_hidden" in owners and not [owner for owner in owners if owner.endswith("loss")]


class Block:
    def __init__(self):
        self.w = statetx.Param(jnp.eye(64))
        self.calls = statetx.State(jnp.zeros(()))

    def __call__(self, x):
        self.calls.value += 1
        return jnp.tanh(jnp.sin(x @ self.w.value) @ self.w.value)


class Net:
    def __init__(self, wrap=lambda block: block):
        self.blocks = [Block() for _ in range(3)]
        self._wrap = wrap

    def __call__(self, x):
        for block in self.blocks:
            x = self._wrap(block)(x)
        return x


def test_buffers_have_kinds_owners_and_lines():
    net = Net()
    profile = statetx.memory_profile(lambda x: net(x).sum(), X)
    by_owner = {b.owner: b.kind for b in profile.buffers if b.kind in ("state", "argument")}
    assert by_owner["net.blocks.2.w"] == "state" and by_owner["x"] == "argument"
    residuals = [b for b in profile.buffers if b.kind == "residual" and b.num_bytes == 512 * 64 * 4]
    assert {b.owner for b in residuals} == {f"net.blocks.{i}" for i in range(3)}
    assert {b.function for b in residuals} == {"Block.__call__"}
    outputs = {b.owner for b in profile.buffers if b.kind == "output"}
    assert {"output", "gradient of net.blocks.1.w", "gradient of x"} <= outputs
    lines = {b.source for b in residuals}
    assert all("test_memory_profile.py:" in line for line in lines)
    assert net.blocks[0].calls.value == 0  # nothing ran


def test_the_functions_that_ask_for_a_profile_own_nothing_in_it():
    """A constant of a jitted function has the line of its call, which is the one that asks."""

    @jax.jit
    def loss(w, xs):
        return jnp.sum(jax.lax.scan(lambda h, x: (jnp.tanh(h @ w + x), None), jnp.zeros((4, 16)), xs)[0])

    w, xs = jax.ShapeDtypeStruct((16, 16), jnp.float32), jax.ShapeDtypeStruct((8, 4, 16), jnp.float32)

    def asking():
        return statetx.memory_profile(loss, w, xs)

    profile = asking()
    functions = {b.function for b in profile.buffers} | {f.function for s in profile.steps for f in s.frames}
    this = "test_the_functions_that_ask_for_a_profile_own_nothing_in_it"
    assert functions == {"", f"{this}.loss", f"{this}.loss.<lambda>"}
    assert not any("asking" in b.owner for b in profile.buffers)


def test_recomputed_buffers_and_regions_are_told():
    net = Net(statetx.remat)
    profile = statetx.memory_profile(lambda x: net(x).sum(), X)
    recomputed = [b for b in profile.buffers if b.kind == "recomputed" and b.num_bytes == 512 * 64 * 4]
    assert recomputed and {b.region for b in recomputed} == {"Block"}
    assert {b.phase for b in recomputed} == {"backward"}
    assert all(b.start >= profile.backward_step for b in recomputed)
    plain = statetx.memory_profile(lambda x: Net()(x).sum(), X)
    assert not [b for b in plain.buffers if b.kind == "recomputed"]


def test_stacks_of_a_loop_name_its_steps():
    case = memory_programs.stacked_carries()
    profile = statetx.memory_profile(case.before, *case.args)
    stacks = [b for b in profile.buffers if b.stacked is not None and b.kind == "residual"]
    assert {b.stacked.length for b in stacks} == {512} and {b.type for b in stacks} == {"f32[512,32,64]"}
    assert "carry" in {b.primitive for b in stacks}
    # They live from before the loop to the end of its reversal: the loop's body lies between, inside them.
    inside = [n for n, s in enumerate(profile.steps) if s.loop is not None and s.loop.length == 512]
    assert all(b.start <= inside[0] and b.end >= inside[-1] - 3 for b in stacks)


def products_in_a_loop(scan, wrap=lambda f: f):
    """A loop of 32 steps whose backward pass reads the two wide products of a step, and not the narrow carry."""
    wide, narrow = jnp.full((16, 512), 0.01), jnp.full((512, 16), 0.1)
    step = wrap(lambda c, _: (((c @ wide) * (c @ (2 * wide))) @ narrow, None))
    return lambda c: scan(step, c, None, 32)[0].sum()


@pytest.mark.thorough
def test_a_loop_whose_carry_is_not_stacked_is_advised():
    plain = statetx.memory_profile(products_in_a_loop(statetx.scan), NARROW)
    stacks = [b for b in plain.buffers if b.stacked is not None]
    assert len(stacks) == 2 and all(b.primitive == "dot_general" for b in stacks)
    named = {c.action for c in plain.changes if c.owner.startswith("scan of 32 steps")}
    slots = functools.partial(statetx.scan, checkpoint=statetx.policies.Slots(7))
    by_hand = {"slots": products_in_a_loop(slots), "remat": products_in_a_loop(statetx.scan, statetx.remat)}
    assert named == by_hand.keys() and "policies.Slots(7))" in str(plain.changes)
    assert all(statetx.memory_profile(loss, NARROW).peak_bytes < 0.5 * plain.peak_bytes for loss in by_hand.values())


def test_residuals_of_a_loop_in_a_loop_are_no_carry():
    inner = products_in_a_loop(lambda step, c, _, num: jax.lax.scan(step, c, None, num))
    profile = statetx.memory_profile(lambda c: jax.lax.scan(lambda c, _: (c * inner(c), None), c, None, 8)[0], NARROW)
    stacks = [b for b in profile.buffers if b.stacked is not None and b.stacked.length == 8]
    assert {b.type: b.primitive for b in stacks if b.num_bytes > 2**20} == {"f32[8,32,64,512]": "dot_general"}


def test_a_step_is_profiled_unchanged():
    net = Net()

    def step(x):
        grads = statetx.grad(lambda x: net(x).sum(), wrt=statetx.states(net, statetx.Param))(x)
        for path, state in statetx.states(net, statetx.Param).items():
            state.value -= 0.1 * grads[path]

    plain = check_sums(statetx.jit(step), X, gradient=False)
    donated = check_sums(statetx.jit(step, donate_states=True), X, gradient=False)
    weights = 3 * 64 * 64 * 4 + 3 * 4
    assert plain.alias_bytes == 0 and donated.alias_bytes == weights
    phases = [s.phase for s in plain.steps]
    assert set(phases) == {"forward", "backward", "update"}
    assert [c.owner for c in plain.changes if c.action == "donate"] == ["net"]
    assert not [c for c in donated.changes if c.action == "donate"]
    # A step without float outputs is profiled without a gradient, too.
    assert statetx.memory_profile(step, X).peak_bytes == pytest.approx(plain.peak_bytes, abs=64)


def test_the_results_of_a_step_are_of_its_update_though_the_loss_is_the_first():
    def step(w, x):
        value, grad = jax.value_and_grad(lambda w: jnp.tanh(jnp.tanh(x @ w) @ w).sum())(w)
        return value, w - 0.1 * grad

    steps = statetx.memory_profile(step, jnp.eye(64), X).steps
    assert steps[-1].phase == "update" and steps[0].phase == "forward"


@pytest.mark.thorough
def test_residuals_are_told_in_a_loop_over_training_steps_with_an_optimizer():
    """The optimizer has more operations than the forward pass, and none of them is of a gradient."""

    def loss(w, xs):
        return (jax.lax.scan(lambda h, x: (jnp.tanh(h @ w + x), None), jnp.zeros((16, 32)), xs)[0] ** 2).sum()

    def step(w, moments, xs):
        gradient = jax.grad(loss)(w, xs)
        for n, m in enumerate(moments):
            gradient = jnp.cumsum(gradient, axis=n % 2) + m  # XLA fuses no two of these
        return w - 0.1 * gradient, [0.9 * m + gradient for m in moments]

    def train(w, moments, xs):
        def epoch(c, _):
            return jax.lax.scan(lambda c, _: (step(*c, xs), None), c, None, length=2)[0], None

        return jax.lax.scan(epoch, (w, moments), None, length=3)[0]

    args = memory_programs.arrays((32, 32)) + (
        [*memory_programs.arrays(*[(32, 32)] * 12)],
        *memory_programs.arrays((64, 16, 32)),
    )
    for fun in (step, train):
        profile = statetx.memory_profile(jax.jit(fun), *args, gradient=False)
        stacks = [b for b in profile.buffers if b.stacked is not None and b.type == "f32[64,16,32]"]
        assert stacks and {b.kind for b in stacks} == {"residual"}
        assert profile.changes[0].action == "slots" and "scan of 64 steps" in profile.changes[0].text


def test_residuals_of_each_gradient_of_a_step_are_told():
    def loss(ws, x):
        for w in ws:
            x = jnp.tanh(x @ w)
        return (x**2).sum()

    def update(ws, x):
        return [w - 0.1 * g for w, g in zip(ws, jax.grad(loss)(ws, x), strict=True)]

    def step(small, large, x):
        small = update(small, x)
        return small, update(large, x + small[0][0, 0])  # in this order

    args = [[*memory_programs.arrays(*[(64, 64)] * n)] for n in (4, 12)]
    profile = statetx.memory_profile(jax.jit(step), *args, X, gradient=False)
    (forward,) = {b.source for b in profile.buffers if b.kind == "residual" and b.primitive == "tanh"}
    tanhs = [b for b in profile.buffers if b.source == forward and b.primitive == "tanh" and b.phase == "forward"]
    assert {b.kind for b in tanhs} == {"residual"} and len(tanhs) >= 3 + 11  # XLA may fuse the last one with the loss


def test_programs_of_plain_jax():
    def fun(params, x):
        return jnp.tanh(x @ params["w"]) @ params["w"].T

    params = {"w": jax.ShapeDtypeStruct((64, 32), jnp.float32)}
    jitted = jax.jit(fun)
    stages = [jitted.trace(params, X), jitted.lower(params, X), jitted.lower(params, X).compile()]
    profiles = [statetx.memory_profile(s) for s in stages]
    profiles += [statetx.memory_profile(f, params, X, gradient=False) for f in (jitted, fun)]
    assert len({p.peak_bytes for p in profiles}) == 1
    for p in profiles:
        assert {b.owner for b in p.buffers if b.kind == "argument"} == {"params['w']", "x"}
    assert not [b for b in profiles[0].buffers if b.kind in ("state", "residual")]
    with pytest.raises(statetx.FunctionError, match="staged for certain arguments"):
        statetx.memory_profile(stages[0], params)


@pytest.mark.thorough
def test_advice_on_a_loop_in_a_library_is_a_plan_or_a_loop_of_ones_own():
    nnx = pytest.importorskip("flax.nnx")
    model = nnx.RNN(nnx.OptimizedLSTMCell(16, 16, rngs=nnx.Rngs(0)))
    profile = statetx.memory_profile(lambda x: (model(x) ** 2).mean(), *memory_programs.arrays((8, 30, 16)))
    texts = {c.action: c.text for c in profile.changes if "scan of 30 steps" in c.owner}
    how = "by a plan (statetx.plan), or with a loop of your own in its place: statetx.scan("
    assert f"which is in flax, {how}" in texts["slots"]
    assert texts["remat"].startswith("Rematerialize with statetx.remat what the scan of 30 steps at ")

    case = memory_programs.stacked_carries()
    own = statetx.memory_profile(case.before, *case.args).changes[0]
    assert own.action == "slots" and "which is in" not in own.text


def test_models_of_flax():
    nnx = pytest.importorskip("flax.nnx")
    model = nnx.Sequential(nnx.Linear(64, 256, rngs=nnx.Rngs(0)), nnx.relu, nnx.Linear(256, 64, rngs=nnx.Rngs(1)))
    check_sums(lambda x: (model(x) ** 2).sum(), X)
    profile = statetx.memory_profile(lambda x: (model(x) ** 2).sum(), X)
    owners = {b.owner for b in profile.buffers if b.kind == "state"}
    assert len(owners) == 4 and all("model" in owner for owner in owners)


@pytest.mark.parametrize("options", [{"donate_argnames": "model"}, {"donate_argnums": (0,)}])
def test_donated_arguments_of_flax_are_counted_once(options):
    nnx = pytest.importorskip("flax.nnx")

    def step(model, x):
        grads = nnx.grad(lambda model: (jnp.tanh(model(x)) ** 2).mean())(model)
        nnx.update(model, jax.tree.map(lambda w, g: w - 0.1 * g, nnx.state(model), grads))

    model, x = nnx.Linear(64, 64, rngs=nnx.Rngs(0)), jnp.ones((8, 64))
    jitted = nnx.jit(step, **options)
    memory = jitted.lower(model, x).compile().memory_analysis()
    profile = statetx.memory_profile(jitted, model, x)
    assert profile.alias_bytes == memory.alias_size_in_bytes > 0
    assert profile.peak_bytes == statetx.measure(jitted, model, x).peak_bytes
    assert {b.owner for b in profile.buffers if b.kind == "state"} == {"model.kernel", "model.bias"}
    assert "donate" not in {change.action for change in profile.changes}
    assert statetx.explain_oom(jitted, model, x, limit=profile.peak_bytes + profile.constant_bytes).short_bytes == 0
    around = statetx.memory_profile(lambda model, x: jitted(model, x), model, x)
    assert around.alias_bytes == profile.alias_bytes
    plain = statetx.memory_profile(nnx.jit(step), model, x)
    assert not plain.alias_bytes and "donate" in {change.action for change in plain.changes}


def test_sizes_of_a_sharded_program_are_those_of_a_device():
    mesh = Mesh(np.array(jax.devices()[:4]), "d")
    w = statetx.Param(jax.device_put(jnp.eye(64), NamedSharding(mesh, P())))
    x = jax.ShapeDtypeStruct((512, 64), jnp.float32, sharding=NamedSharding(mesh, P("d")))
    sharded = check_sums(statetx.jit(lambda x: jnp.tanh(x @ w.value)), x, gradient=False)
    profile = statetx.memory_profile(statetx.jit(lambda x: jnp.tanh(x @ w.value)), x, gradient=False)
    assert profile.num_devices == 4 and sharded.argument_bytes == 64 * 64 * 4 + 512 * 64 * 4 // 4


def test_backend_without_buffer_assignment(monkeypatch):
    exact = statetx.memory_profile(lambda x: Net()(x).sum(), X)
    monkeypatch.setattr(_jax, "compiled_program", lambda compiled: None)
    monkeypatch.setattr(_jax, "written_program", lambda folder, compiled, platform: None)
    monkeypatch.setattr(measure, "_tells_buffers", lambda: False)
    profile = statetx.memory_profile(lambda x: Net()(x).sum(), X)
    assert "does not tell" in profile.note and profile.note in str(profile) and "lowered" not in profile.note
    assert profile.peak_bytes == exact.peak_bytes and profile.changes == ()
    assert profile.buffers == () and profile.argument_bytes == exact.argument_bytes and "not told" in str(profile)
    json.dumps(profile.to_dict())


def test_a_compiled_program_without_buffer_assignment(monkeypatch):
    """As on a GPU: XLA can be told to write it only while it compiles."""
    fun = lambda params, x, *, scale: (jnp.tanh(x @ params["w"]) * scale).sum()
    lowered = jax.jit(jax.grad(fun)).lower({"w": jnp.eye(64)}, X, scale=2.0)
    monkeypatch.setattr(_jax, "compiled_program", lambda compiled: None)
    profile = statetx.memory_profile(lowered.compile())
    assert "Pass the function, or the lowered program." in profile.note
    assert "not told" in str(profile) and "gaps" not in str(profile)
    assert profile.argument_bytes == 64 * 64 * 4 + 512 * 64 * 4 + 4


@pytest.fixture
def untold(monkeypatch):
    """A backend that tells no buffer assignment, but writes it, as those of GPUs."""
    monkeypatch.setattr(_jax, "compiled_program", lambda compiled: None)
    measure._tells.cache_clear()
    yield
    measure._tells.cache_clear()


@pytest.mark.parametrize("gradient", [True, False])
def test_a_program_that_xla_writes_is_the_compiled_one(gradient, request):
    exact = statetx.memory_profile(Net().__call__, X, gradient=gradient)
    request.getfixturevalue("untold")
    found = statetx.memory_profile(Net().__call__, X, gradient=gradient)
    assert not found.note and str(found) == str(exact) and found.buffers == exact.buffers


def test_a_program_in_jaxs_cache_is_compiled_again(untold):
    """XLA writes nothing of a program that it does not compile. The tests have a cache (conftest.py)."""
    lowered = jax.jit(jax.grad(lambda w: jnp.tanh(jnp.tanh(w @ w) @ w).sum())).lower(jnp.eye(48))
    first, second = statetx.memory_profile(lowered), statetx.memory_profile(lowered)
    assert not first.note and not second.note and first.buffers == second.buffers


@pytest.fixture
def own_cache(tmp_path):
    """JAX's cache of compiled programs in another folder, which no other worker of the tests fills."""
    folder = jax.config.values["jax_compilation_cache_dir"]
    for now in (str(tmp_path), folder):
        jax.config.update("jax_compilation_cache_dir", now)
        compilation_cache.reset_cache()
        if now != folder:
            yield tmp_path


def test_profiles_of_a_program_in_jaxs_cache_add_nothing_to_it(untold, own_cache):
    lowered = jax.jit(jax.grad(lambda w: jnp.sin(jnp.tanh(w @ w) @ w).sum())).lower(jnp.eye(40))
    lowered.compile()
    before = {path.name for path in own_cache.glob("*-cache")}
    assert before and not statetx.memory_profile(lowered).note
    assert {path.name for path in own_cache.glob("*-cache")} == before


def test_a_compiler_that_cannot_write_its_programs(untold, monkeypatch):
    compile = jax.stages.Lowered.compile

    def refusing(lowered, compiler_options=None):
        if "xla_dump_to" in (compiler_options or {}):
            raise jax.errors.JaxRuntimeError("INVALID_ARGUMENT: No such compile option: 'xla_dump_to'")
        return compile(lowered, compiler_options)

    monkeypatch.setattr(jax.stages.Lowered, "compile", refusing)
    assert "does not tell" in statetx.memory_profile(lambda x: jnp.tanh(x).sum(), X).note


def test_profile_is_written_in_every_form(tmp_path):
    profile = statetx.memory_profile(lambda x: Net()(x).sum(), X)
    json.dumps(profile.to_dict())
    profile.to_html(tmp_path / "p.html", after=profile)
    assert "peak, step" in profile._repr_html_() and (tmp_path / "p.html").read_text().startswith("<!")
    other = statetx.memory_profile(lambda x: Net(statetx.remat)(x).sum(), X)
    assert "Peak of <lambda>: 1.0 MiB before" in str(profile.compare(other)) and "residual" in str(
        profile.compare(other)
    )


def test_the_body_of_a_scan_is_no_scope():
    """JAX calls it "closed_call", and "eval_jaxpr" since 0.11.2."""

    def loss(w, xs):
        step = statetx.remat(lambda c, x: (jnp.tanh(c @ w + x), (c**2).mean()))
        return jax.lax.scan(step, jnp.zeros((8, 16)), xs)[1].sum()

    profile = statetx.memory_profile(loss, jnp.eye(16), jnp.ones((12, 8, 16)))
    names = {name for b in profile.buffers for name in (*b.owner.split("/"), b.region)}
    assert not names & {"closed_call", "eval_jaxpr"}
    assert {b.loop.name for b in profile.buffers if b.loop is not None} == {"scan"}


# The profiles of programs that XLA compiled on an H200 (`gpu_programs`), and for one, with the sizes that it told:
# arguments, outputs, memory of both, temporaries.
GPU_PROGRAMS = {
    "transformer_step": (8388608, 6291532, 6291456, 103580432),
    "offloaded_loop": (10092544, 262144, 0, 362544),
    "convolutions": (8830976, 442392, 0, 58872336),
    "rematerialized_by_xla": (1476395008, 1207960332, 0, 276488525584),
    "transformer_step_for_target": (8388608, 6291532, 6291456, 101777424),
    "rematerialized_for_target": (20971520, 18874560, 0, 195036432),
}


def gpu_profile(name):
    """Check the profile: sizes sum to XLA's figures, and what shares memory is never alive together."""
    folder = pathlib.Path(__file__).with_name("gpu_programs")
    message = _jax.buffers._message(lzma.decompress((folder / f"{name}.hlo.pb.xz").read_bytes()))
    program = _jax.buffers.decode(message[1][0], message[3][0])
    names = "argument_size_in_bytes", "output_size_in_bytes", "alias_size_in_bytes", "temp_size_in_bytes"
    memory = types.SimpleNamespace(**dict(zip(names, GPU_PROGRAMS[name], strict=True)))
    traced = measure._TracedProgram(name, None, Inputs(), None)
    return check_profile(measure.profile_of(program, memory, traced, 1, "gpu"), program, memory)


def test_a_training_step_of_a_gpu():
    profile = gpu_profile("transformer_step")
    assert profile.unused_bytes < 0.01 * profile.peak_bytes
    assert [phase for phase, _ in itertools.groupby(s.phase for s in profile.steps)][-2:] == ["backward", "update"]
    kept = [g for g in profile.at_peak if g.kind == "residual"]
    assert {g.function for g in kept} >= {"attention", "block", "normed"}
    assert (kept[0].function, kept[0].source) == ("attention", "<stdin>:29"), "the softmax"
    assert not any(step.calls for step in profile.steps), "it was traced before calls had numbers"
    primitives = [s.primitive for s in profile.steps]
    assert primitives.count("dot_general") >= 2 * 3 * 5, (
        "products in three kinds of kernels, of three for each in the forward pass"
    )


def test_calls_of_a_program_for_a_gpu_are_told_apart():
    profile = gpu_profile("transformer_step_for_target")
    remats = [change.text.partition(" with")[0] for change in profile.changes]
    assert remats == ["Rematerialize block (2 calls)", "Rematerialize attention (2 calls)"]
    assert {call.rpartition("~")[0] for step in profile.steps for call in step.calls} >= {
        "attention",
        "block",
        "normed",
    }


def test_an_offloaded_loop_of_a_gpu():
    profile = gpu_profile("offloaded_loop")
    carries = 300 * 32 * 256 * 4
    assert profile.temp_bytes < carries / 20 and all(
        b.num_bytes < carries for b in profile.buffers if b.kind != "argument"
    )
    assert {b.loop.length for b in profile.buffers if b.loop is not None} == {300}


def test_convolutions_of_a_gpu():
    profile = gpu_profile("convolutions")
    kept = [b for b in profile.alive(profile.peak_step) if b.kind == "residual" and b.num_bytes >= 2**23]
    assert {(b.function, b.primitive) for b in kept} >= {("convolution", "conv_general_dilated")}
    assert sum(b.primitive == "conv_general_dilated" and b.phase == "forward" for b in kept) == 3
    assert not any("[" in s.primitive for s in profile.steps), "a copy of an argument has the argument's name"
    assert "2 x f32[32,32,32,64], 8 x f32[64]" in str(profile), "the largest arrays first"


def test_a_program_that_does_not_fit_is_advised_by_what_the_user_can_change():
    """XLA itself computes some values again there, and moves others: no change of the user's shortens these."""
    assert any(_names.AGAIN.search(step.name) for step in gpu_profile("rematerialized_by_xla").steps)
    profile = gpu_profile("rematerialized_for_target")
    assert sum(_names.AGAIN.search(step.name) is not None for step in profile.steps) > 20
    change = profile.changes[0]
    assert change.action == "remat" and change.text.startswith("Rematerialize _transformer_block (6 calls)")
    assert [c.text.partition(" with")[0] for c in profile.changes if c.action == "remat"][1:] == [
        "Rematerialize _attention (6 calls)",
        "Rematerialize norm (12 calls)",
    ]


class _Instruction(types.SimpleNamespace):
    __hash__ = object.__hash__


def _program_of(instructions, computations, defined, entry=1):
    """A program by hand: rows (name, opcode, operands, called, computation, type, op_name, index), roots of
    computations, defined values.
    """
    ids = {name: n for n, (name, *_) in enumerate(instructions)}
    frames = (_jax.StackFrame("net", "/home/ann/net.py", 7, 0),)
    made = [
        _Instruction(
            id=ids[name], name=name, opcode=opcode, operands=[ids[o] for o in operands], called=list(called),
            computation=where, type=type_, op_name=op_name, index=index, target="__cublas$gemm",
            frames=frames if op_name else (), trip_count=16 if opcode == "while" else None,
        )
        for name, opcode, operands, called, where, type_, op_name, index in instructions
    ]  # fmt: skip
    found = {
        number: _jax.buffers.Computation(number, "", ids[root], [i for i in made if i.computation == number])
        for number, root in computations.items()
    }
    values = {
        n: _jax.buffers.BufferValue(n, (ids[name], index), size) for n, (name, index, size, _) in enumerate(defined)
    }
    by_place = {}
    for n, (_, _, size, place) in enumerate(defined):
        by_place.setdefault(place, []).append((n, 0, size))
    allocations = [
        _jax.buffers.Allocation(n, held[0][2], None, False, False, False, False, held)
        for n, held in enumerate(by_place.values())
    ]
    return _jax.CompiledProgram("", entry, found, {i.id: i for i in made}, values, allocations)


def _assembled(*program):
    return Assembly(_program_of(*program), Inputs())


def test_what_a_loop_stacks_is_told_behind_asynchronous_copies_and_operations_with_several_results():
    """As on GPUs: opcodes and names as XLA 2026-11 prints them for an H200."""
    entry, body, condition, several = 1, 2, 3, 6
    stack, row, one = "f32[16,4,8]", "f32[1,4,8]", "f32[4,8]"
    carry = ("i32[]", one, stack, stack, stack)
    into, at = "jit(f)/jvp()/while/body", "jit(f)/jvp()/while/body/closed_call"
    backward = "jit(f)/transpose(jvp())/reduce_sum"
    instructions = [
        ("first", "broadcast", (), (), entry, "i32[]", "", 0),
        *(
            (name, "broadcast", (), (), entry, t, "", 0)
            for name, t in zip(("h", "a", "b", "c"), carry[1:], strict=True)
        ),
        ("init", "tuple", ("first", "h", "a", "b", "c"), (), entry, carry, "", 0),
        ("loop", "while", ("init",), (body, condition), entry, carry, "jit(f)/jvp()/while", 0),
        *((f"out{n}", "get-tuple-element", ("loop",), (), entry, stack, "", n) for n in (2, 3, 4)),
        ("root", "add", ("out2", "out3", "out4"), (), entry, "f32[]", backward, 0),
        ("p", "parameter", (), (), condition, carry, "", 0),
        ("less", "compare", ("p",), (), condition, "bool[]", f"{into}/lt", 0),
        ("q", "parameter", (), (), body, carry, "", 0),
        *((f"in{n}", "get-tuple-element", ("q",), (), body, t, "", n) for n, t in enumerate(carry)),
        ("gemm", "custom-call", ("in1",), (), body, (one, "i8[64]"), f"{at}/dot_general", 0),
        ("product", "get-tuple-element", ("gemm",), (), body, one, "", 0),
        ("product1", "bitcast", ("product",), (), body, row, "", 0),
        ("both", "fusion", ("product",), (several,), body, (one, one), f"{at}/tanh", 0),
        ("next", "get-tuple-element", ("both",), (), body, one, "", 0),
        ("factor", "get-tuple-element", ("both",), (), body, one, "", 1),
        ("factor1", "bitcast", ("factor",), (), body, row, "", 0),
        ("carry1", "bitcast", ("in1",), (), body, row, "", 0),
    ]
    rows = {2: "product1", 3: "factor1", 4: "carry1"}
    update = f"{into}/dynamic_update_slice"
    instructions += [
        (f"start{n}", "async-start", (f"in{n}", s, "in0"), (10 + n,), body, (), update, 0) for n, s in rows.items()
    ]
    instructions += [(f"done{n}", "async-done", (f"start{n}",), (), body, stack, update, 0) for n in rows]
    instructions += [
        ("i", "add", ("in0",), (), body, "i32[]", f"{into}/add", 0),
        ("end", "tuple", ("i", "next", "done2", "done3", "done4"), (), body, carry, "", 0),
        ("t", "parameter", (), (), several, one, "", 0),
        ("tanh", "tanh", ("t",), (), several, one, f"{at}/tanh", 0),
        ("sub", "subtract", ("tanh",), (), several, one, f"{at}/sub", 0),
        ("pair", "tuple", ("tanh", "sub"), (), several, (one, one), "", 0),
    ]
    for n in rows:
        instructions += [
            *((f"w{n}{m}", "parameter", (), (), 10 + n, t, "", m) for m, t in enumerate((stack, row, "i32[]"))),
            (f"write{n}", "fusion", (f"w{n}0", f"w{n}1", f"w{n}2"), (20 + n,), 10 + n, stack, update, 0),
            *((f"v{n}{m}", "parameter", (), (), 20 + n, t, "", m) for m, t in enumerate((stack, row, "i32[]"))),
            (f"update{n}", "dynamic-update-slice", (f"v{n}0", f"v{n}1", f"v{n}2"), (), 20 + n, stack, update, 0),
        ]
    computations = {entry: "root", body: "end", condition: "less", several: "pair"}
    computations |= {10 + n: f"write{n}" for n in rows} | {20 + n: f"update{n}" for n in rows}
    defined = [
        ("gemm", (0,), 128, "product"),
        ("gemm", (1,), 64, "scratch"),
        ("both", (0,), 128, "next"),
        ("both", (1,), 128, "factor"),
    ]
    for n, name in zip(rows, "abc", strict=True):
        defined += [(name, (), 2048, f"stack{n}"), (f"write{n}", (), 2048, f"stack{n}")]
    assembly = _assembled(instructions, computations, defined)
    stacks = [b for b in assembly.buffers() if b.stacked is not None]
    assert {b.name: b.primitive for b in stacks} == {"write2": "dot_general", "write3": "sub", "write4": "carry"}


def test_products_by_a_library_and_its_working_memory():
    """As on GPUs: of a product, cuBLAS returns 4 or 32 MiB of working memory beside the result, and it may have another
    operation's name.
    """
    matrix, scratch = "f32[256,64]", "i8[33554432]"
    instructions = [
        ("x", "parameter", (), (), 1, matrix, "x", 0),
        ("gemm", "custom-call", ("x",), (), 1, (matrix, scratch), "jit(f)/jvp()/net/transpose", 0),
        ("product", "get-tuple-element", ("gemm",), (), 1, matrix, "", 0),
        ("root", "negate", ("product",), (), 1, matrix, "jit(f)/transpose(jvp())/net/neg", 0),
    ]
    defined = [
        ("x", (), 65536, "x"),
        ("gemm", (0,), 65536, "product"),
        ("gemm", (1,), 2**25, "scratch"),
        ("root", (), 65536, "out"),
    ]
    assembly = _assembled(instructions, {1: "root"}, defined)
    found = {b.type: b for b in assembly.buffers() if b.name == "gemm"}
    assert {type_: (b.kind, b.primitive) for type_, b in found.items()} == {
        matrix: ("residual", "dot_general"),
        scratch: ("working memory", "dot_general"),
    }
    steps = assembly.steps()
    profile = statetx.MemoryProfile(
        "f", assembly.buffers(), steps, 65536, 65536, 0, 65536 + 2**25, 0, 1, "gpu", assembly.names.turn, True
    )
    assert "33,554,432" not in " ".join(c.text for c in profile.changes)
    assert all(c.freed_bytes < 2**17 for c in candidates(profile))


def test_what_xla_itself_computes_again_is_no_residual():
    """As on GPUs, where XLA does so in programs that would not fit: a clone with the name stack of the first
    computation.
    """
    matrix = "f32[256,64]"
    instructions = [
        ("x", "parameter", (), (), 1, matrix, "x", 0),
        ("tanh.1", "tanh", ("x",), (), 1, matrix, "jit(f)/jvp()/net/tanh", 0),
        ("sum", "sine", ("tanh.1",), (), 1, matrix, "jit(f)/jvp()/net/sin", 0),
        ("back", "cosine", ("sum",), (), 1, matrix, "jit(f)/transpose(jvp())/net/cos", 0),
        ("tanh.1.remat", "tanh", ("x",), (), 1, matrix, "jit(f)/jvp()/net/tanh", 0),
        ("root", "multiply", ("back", "tanh.1.remat"), (), 1, matrix, "jit(f)/transpose(jvp())/net/mul", 0),
    ]
    defined = [(name, (), 65536, name) for name, *_ in instructions]
    assembly = _assembled(instructions, {1: "root"}, defined)
    (again,) = (b for b in assembly.buffers() if b.name == "tanh.1.remat")
    assert (again.kind, again.phase) == ("recomputed", "backward")
    assert [s.name for s in assembly.steps() if s.is_recomputed] == ["tanh.1.remat"]


def test_an_array_among_several_results_of_a_fusion_has_the_operation_that_computes_it():
    """As on GPUs: XLA gives the fusion the name of one of them. Here a block's output and the mask of its dropout."""
    x, mask, inside = "f32[256,64]", "bool[256,64]", 2
    instructions = [
        ("x", "parameter", (), (), 1, x, "x", 0),
        ("both", "fusion", ("x",), (inside,), 1, (x, mask), "jit(f)/jvp()/net/add", 0),
        ("out", "get-tuple-element", ("both",), (), 1, x, "", 0),
        ("kept", "get-tuple-element", ("both",), (), 1, mask, "", 1),
        ("used", "negate", ("out",), (), 1, x, "jit(f)/jvp()/net/neg", 0),
        ("root", "select", ("kept", "used"), (), 1, x, "jit(f)/transpose(jvp())/net/select_n", 0),
        ("p", "parameter", (), (), inside, x, "", 0),
        ("sum", "add", ("p",), (), inside, x, "jit(f)/jvp()/net/add", 0),
        ("less", "compare", ("p",), (), inside, mask, "jit(f)/jvp()/net/lt", 0),
        ("pair", "tuple", ("sum", "less"), (), inside, (x, mask), "", 0),
    ]
    defined = [
        ("x", (), 65536, "x"),
        ("both", (0,), 65536, "a"),
        ("both", (1,), 16384, "b"),
        ("used", (), 65536, "c"),
        ("root", (), 65536, "d"),
    ]
    assembly = _assembled(instructions, {1: "root", inside: "pair"}, defined)
    found = {b.type: (b.primitive, b.is_bits, b.kind) for b in assembly.buffers() if b.name == "both"}
    assert found == {x: ("add", False, "working memory"), mask: ("lt", True, "residual")}


def test_what_xla_computes_again_in_the_forward_pass_is_a_residual():
    """As on GPUs, where a program would not fit: often such an operation is only moved."""
    x = "f32[256,64]"
    instructions = [
        ("x", "parameter", (), (), 1, x, "x", 0),
        ("a", "exponential", ("x",), (), 1, x, "jit(f)/jvp()/net/exp", 0),
        ("b", "tanh", ("a",), (), 1, x, "jit(f)/jvp()/net/tanh", 0),
        ("a.remat", "exponential", ("x",), (), 1, x, "jit(f)/jvp()/net/exp", 0),
        ("c", "negate", ("b",), (), 1, x, "jit(f)/transpose(jvp())/net/neg", 0),
        ("b.remat2", "tanh", ("a.remat",), (), 1, x, "jit(f)/jvp()/net/tanh", 0),
        ("root", "multiply", ("c", "b.remat2"), (), 1, x, "jit(f)/transpose(jvp())/net/mul", 0),
    ]
    defined = [(name, (), 65536, name) for name, *_ in instructions]
    assembly = _assembled(instructions, {1: "root"}, defined)
    kinds = {b.name: b.kind for b in assembly.buffers()}
    assert kinds["a.remat"] == kinds["b"] == "residual" and kinds["b.remat2"] == "recomputed"


def test_a_slice_that_is_written_beside_other_operations_takes_the_memory_of_the_stack_once():
    """As on GPUs: the stack that a slice is written into is an operand of an asynchronous operation, which holds it
    until it is done.
    """
    stack, row = "f32[16,4,8]", "f32[1,4,8]"
    instructions = [
        ("x", "parameter", (), (), 1, row, "x", 0),
        ("empty", "broadcast", (), (), 1, stack, "", 0),
        ("start", "async-start", ("empty", "x"), (2,), 1, (), "", 0),
        ("between", "negate", ("x",), (), 1, row, "", 0),
        ("between2", "negate", ("between",), (), 1, row, "", 0),
        ("done", "async-done", ("start",), (), 1, stack, "", 0),
        ("root", "add", ("done", "between2"), (), 1, stack, "", 0),
        ("w0", "parameter", (), (), 2, stack, "", 0),
        ("w1", "parameter", (), (), 2, row, "", 1),
        ("write", "dynamic-update-slice", ("w0", "w1"), (), 2, stack, "", 0),
    ]
    defined = [
        ("x", (), 128, "x"),
        ("empty", (), 2048, "s"),
        ("write", (), 2048, "s"),
        ("between", (), 128, "b"),
        ("between2", (), 128, "c"),
        ("root", (), 2048, "r"),
    ]
    program = _program_of(instructions, {1: "root", 2: "write"}, defined)
    schedule = _lifetimes.FlatSchedule(program)
    assert overlaps(_lifetimes.lifetimes(program, schedule, _lifetimes.Flow(program, schedule))) == []


@pytest.mark.thorough
@pytest.mark.sample("slow")
@pytest.mark.parametrize("flag", ["--xla_dump_hlo_module_re=nothing", "--xla_dump_compress_protos=true"])
def test_flags_of_the_user_about_what_xla_writes_do_not_matter(flag):
    code = (
        "import jax, jax.numpy as jnp, statetx; from statetx.memory import measure; measure._tells_buffers = lambda: "
        "False;"
        "assert not statetx.memory_profile(lambda x: jnp.tanh(x).sum(), jnp.ones(8)).note"
    )
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "XLA_FLAGS": flag}, check=True)


def test_a_product_of_transposed_weights_belongs_to_their_module():
    """As on GPUs, which transpose weights first, several by one fusion; the other operand is of the module before."""
    x, w = "f32[256,64]", "f32[64,64]"
    name = "jit(f)/dot_general"
    instructions = [
        ("x", "parameter", (), (), 1, x, "x", 0),
        *((f"w{n}", "parameter", (), (), 1, w, f"net.layers.{n}.w", n + 1) for n in (0, 1)),
        ("turned", "fusion", ("w0", "w1"), (2,), 1, (w, w), "", 0),
        *((f"t{n}", "get-tuple-element", ("turned",), (), 1, w, "", n) for n in (0, 1)),
        ("first", "custom-call", ("x", "t0"), (), 1, x, name, 0),
        ("second", "custom-call", ("first", "t1"), (), 1, x, name, 0),
        ("root", "negate", ("second",), (), 1, x, "", 0),
        *((f"p{n}", "parameter", (), (), 2, w, "", n) for n in (0, 1)),
        *((f"o{n}", "transpose", (f"p{n}",), (), 2, w, "", 0) for n in (0, 1)),
        ("pair", "tuple", ("o0", "o1"), (), 2, (w, w), "", 0),
    ]
    defined = [(n, (), 65536, n) for n in ("x", "w0", "w1", "first", "second", "root")]
    defined += [("turned", (n,), 65536, f"turned{n}") for n in (0, 1)]
    assembly = _assembled(instructions, {1: "root", 2: "pair"}, defined)
    owners = {b.name: b.owner for b in assembly.buffers()}
    assert (owners["first"], owners["second"]) == ("net.layers.0", "net.layers.1")


def test_what_the_backward_pass_and_then_the_loss_read_is_a_residual():
    """As on GPUs, where XLA may compute the loss behind the update."""
    x = "f32[256,64]"
    instructions = [
        ("x", "parameter", (), (), 1, x, "x", 0),
        ("logits", "tanh", ("x",), (), 1, x, "jit(f)/jvp()/net/tanh", 0),
        ("grad", "negate", ("logits",), (), 1, x, "jit(f)/transpose(jvp())/net/neg", 0),
        ("new", "add", ("grad",), (), 1, x, "jit(f)/add", 0),
        ("loss", "reduce", ("logits",), (), 1, "f32[]", "jit(f)/jvp()/net/reduce_sum", 0),
        ("root", "tuple", ("new", "loss"), (), 1, (x, "f32[]"), "", 0),
    ]
    defined = [(n, (), 65536, n) for n in ("x", "logits", "grad", "new", "loss")]
    assembly = _assembled(instructions, {1: "root"}, defined)
    assert {b.name: b.kind for b in assembly.buffers()}["logits"] == "residual"


@pytest.mark.parametrize("look", [statetx.memory_profile, statetx.explain_oom], ids=lambda f: f.__name__)
def test_decoded_program_is_freed_with_its_profile(look):
    def loss(w, x):
        return jnp.tanh(x @ w).sum()

    def num_alive():
        gc.collect()
        return sum(type(x) in (Assembly, _jax.CompiledProgram, _jax.Instruction) for x in gc.get_objects())

    before = num_alive()
    look(loss, jnp.eye(8), jnp.ones((4, 8)))
    assert num_alive() == before


def loss_of_tanh(w, x):
    return statetx.remat(lambda x: jnp.tanh(x @ w).sum())(x)


@pytest.mark.parametrize(
    "look", [statetx.memory_profile, statetx.explain_oom, statetx.measure], ids=lambda f: f.__name__
)
@pytest.mark.parametrize(
    "fun", [loss_of_tanh, jax.jit(lambda w, x: w - jax.grad(loss_of_tanh)(w, x))], ids=["loss", "step"]
)
def test_profiles_of_one_function_fill_no_cache(look, fun):
    def num_entries():
        gc.collect()
        return len(table), sum(type(x) is pjit.InferParamsCacheEntry for x in gc.get_objects())

    args = jnp.eye(8), jnp.ones((4, 8))
    look(fun, *args)
    before = num_entries()
    look(fun, *args), look(fun, *args)
    after = num_entries()  # entries of other tests may end meanwhile, and frozen ones are not counted
    assert after[0] <= before[0] and after[1] <= before[1]


def test_numbers_in_the_program_are_no_constants_to_pass():
    """The 0 that a sum begins with, and the cotangent 1, are no arrays of the user's."""
    profile = statetx.memory_profile(lambda x: x.sum(), jnp.ones(4))
    assert {b.type for b in profile.buffers if b.kind == "constant"} <= {"f32[]"}
    assert profile.changes == ()
