"""The laws, for each program of the corpus under each transform and nesting.

Tolerances. The laws are checked in float64 and floats must agree to 1e-10 of the largest entry of their array: XLA may
fuse a product with a sum, and third derivatives through nine steps of an unstable program multiply such a rounding
(1e-16) by up to a million, while a term that is wrong is wrong in the first digits. Integers, bools, keys, shapes,
dtypes and weak types are always exact. Where nothing compiles, `test_eager_remat_is_identity` demands equal bits, and
`test_law_in_float32` repeats a part of the laws in JAX's default precision.

To see the suite fail: `test_the_suite_can_fail` breaks one feature after another and expects red.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import types
from collections.abc import Callable
from typing import Any

import brainstate
import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
import numpy as np
import pytest
from brainstate._error import TraceContextError
from laws import (
    LOOPS,
    Nesting,
    Stateful,
    assert_no_tracer,
    assert_same,
    cotangents,
    elements,
    grad,
    is_float,
    jit,
    name_of,
    numbers_of,
    packed,
    remat,
    scalar,
    scan,
    slots,
    stored,
    transformed,
    vjp,
)
from mixed_reference import Reference

import corpus
import statetx
from corpus import FOREIGN, NATIVE, PROGRAMS, Program, X, strong
from helpers import in_turn

# -- same as undecorated, one run of the body --------------------------------------------------------------------

NESTINGS: list[Nesting] = [
    (),
    (remat,),
    (remat, remat),
    (grad,),
    (remat, grad),
    (remat, remat, grad),
    (grad, grad),
    (remat, grad, grad),
    (grad, remat, grad),
    (vjp,),
    (remat, vjp),
    (jit,),
    (remat, jit),
    (remat, grad, jit),
    (remat, jit, grad),
    (scan,),
    (remat, scan),
    (scan, remat, grad),
    (remat, scan, grad),
    (remat, scan, grad, jit),
    (remat, scan, remat, scan, grad),
    (remat, scan, grad, grad),
    (remat, grad, scan),
    (jit, scan, vjp),
    (stored, grad),
    (stored, grad, jit),
    (stored, remat, stored, grad),
    (stored, grad, grad),
    (stored, scan, grad, jit),
    (stored, scan, grad, grad),
    (scan, stored, vjp),
    (packed, grad),
    (packed, grad, grad),
    (packed, slots, grad, jit),
    (slots, grad, jit),
    (slots, grad, grad),
    (slots, remat, vjp),
]


def expected_runs(nesting: Nesting, program: Program, call: int) -> range:
    """How often the body's Python may run in the first or a later call."""
    most = 1
    for op in nesting:
        if op is jit and call > program.grows:  # the call after a state was created is of other types
            return range(0, 1)
        most *= 2 if op in LOOPS and program.writes else 1
    return range(1, most + 1)


CORE = [corpus.ReadModifyWrite, corpus.Nested]
# Of the nestings whose residuals are bits or in slots, which take longest, these run in the fast suite, with the first
# of `CORE`.
OF_CORE: list[Nesting] = [(packed, grad, grad), (slots, grad, jit)]
# With the second, which holds containers, one in three.
THIRD = [n for n in NESTINGS if not {packed, slots} & set(n)][::3]


def cases(programs: list[type[Program]], nestings: list[Nesting], fast: list[Nesting] | None = None) -> list:
    """Programs crossed with nestings. Outside `CORE` those that are not `fast` (None: all are) run with the
    slow tests.
    """

    def marks(p: type[Program], n: Nesting) -> list:
        is_core = n in OF_CORE if {packed, slots} & set(n) else True
        is_core = p is CORE[0] and is_core or p is CORE[1] and n in THIRD
        return [] if fast is None or n in fast or is_core else [pytest.mark.slow]

    return [
        pytest.param(p, n, id=f"{p.__name__}-{name_of(n)}", marks=marks(p, n))
        for p in programs
        for n in nestings
        if (place := min([n.index(op) for op in LOOPS if op in n], default=None)) is None
        or (p.loops and n[place:].count(grad) <= p.order_in_loops)
    ]


def one_whole(programs: list[type[Program]], nestings: list[Nesting], fast: list[Nesting], num: int = 2) -> list:
    """The first of `CORE` under each nesting, and one in `num` of the other cases."""
    others = [p for p in programs if p is not CORE[0]]
    return cases(CORE[:1], nestings) + in_turn(cases(others, nestings, fast), num)


def check_law(make: type[Program], nesting: Nesting, num_calls: int = 2, tolerance: float = 1e-10) -> None:
    program, plain = make(), make(Reference())
    call, reference = (transformed(nesting, p.step, p) for p in (program, plain))
    weak = not {jit, *LOOPS} & set(nesting)
    for n in range(num_calls):
        x = jnp.asarray(X) * (1 + 0.3 * n)
        expected, before = reference(x), program.runs
        out = call(x)
        runs = program.runs - before
        assert_no_tracer(program)
        assert_same(out, expected, tolerance=tolerance, weak=weak, where=f"call {n}, output ")
        assert_same(program.values(), plain.values(), tolerance=tolerance, weak=weak, where=f"call {n}, state ")
        assert runs in expected_runs(nesting, program, n), f"call {n}: the body ran {runs} times"


# Outside of `CORE` every program runs with one of these in turn, in the fast suite.
FAST: list[Nesting] = [(remat, grad), (remat, scan, grad, jit), (stored, grad)]


def law_cases() -> list:
    chosen = []
    for n, program in enumerate(PROGRAMS):
        fast = [case.values[1] for case in cases([program], FAST)]  # a program without loops has fewer
        chosen += cases([program], NESTINGS, [fast[n % len(fast)]])
    return chosen


@pytest.mark.parametrize("make, nesting", law_cases())
def test_law_same_as_reference(make, nesting):
    with jax.enable_x64(True):
        check_law(make, nesting, 3 if make.grows else 2)


@pytest.mark.parametrize("make", [corpus.ReadModifyWrite, corpus.Dropout, corpus.Shared], ids=lambda p: p.__name__)
def test_slots_of_the_laws_hold_residuals(make):
    with jax.enable_x64(True):
        program = make()
        row = statetx.loop_report(transformed((slots,), program.step, program), jnp.asarray(X), policies=()).rows[0]
    assert row.is_mixed and row.runs < row.carry_runs


@pytest.mark.parametrize(
    "make, nesting", in_turn(cases(NATIVE, [(remat,), (remat, grad), (remat, scan, grad, jit)], [(remat,)]))
)
def test_law_in_float32(make, nesting):
    check_law(make, nesting, 1, tolerance=1e-4)


# The suite also runs with JAX_ENABLE_CHECKS=1: JAX then checks types and names of every program that it is given.
CHECKED: list[Nesting] = [(remat, jit), (remat, scan, grad, jit)]


@pytest.mark.parametrize("make, nesting", in_turn(cases(NATIVE, CHECKED, [(remat, jit)]), 3))
def test_law_under_the_checks_of_jax(make, nesting):
    with jax.enable_checks(True):
        check_law(make, nesting, 1, tolerance=1e-4)


def test_other_transforms_under_the_checks_of_jax():
    w, h, rng = statetx.Param(jnp.eye(3)), statetx.State(jnp.zeros(3)), statetx.RngState(0)

    def f(x):
        h.value = jnp.tanh(x @ w.value + h.value) + jax.random.normal(rng.next(), (3,))
        return h.value.sum()

    def loss(xs):
        return jnp.sin(xs @ w.value).mean()

    x, xs = jnp.ones(3), jnp.ones((4, 3))
    with jax.enable_checks(True):
        statetx.cond(jnp.array(True), f, f, x)
        statetx.switch(jnp.array(1), [f, f], x)
        statetx.while_loop(lambda n: n < 2, lambda n: n + (f(x) < 9), 0)
        statetx.vmap(lambda v: v * h.value)(xs)
        statetx.jacrev(f)(x)
        statetx.value_and_grad(statetx.microbatch(loss, 2), wrt=w)(xs)
        statetx.grad(statetx.chunked(loss, size=2))(xs)
        statetx.measure(statetx.grad(f), x)
        statetx.saved_residuals(statetx.remat(f), x)
    assert bool(jnp.isfinite(h.value).all())


@pytest.mark.parametrize("make", NATIVE, ids=lambda p: p.__name__)
def test_eager_remat_is_identity(make):
    plain, wrapped = make(), make()
    call = statetx.remat(statetx.remat(wrapped.step))
    for _ in range(2):
        x = jnp.asarray(X, jnp.float32)
        assert_same(call(x), plain.step(x), tolerance=0)
        assert_same(wrapped.values(), plain.values(), tolerance=0)
    assert wrapped.runs == 2


# -- nothing escapes ---------------------------------------------------------------------------------------------

LEAKS: list[Nesting] = [(remat, grad), (remat, vjp), (remat, jit), (remat, scan), (remat, scan, grad, jit)]


@pytest.mark.parametrize("make, nesting", one_whole(NATIVE, LEAKS, [(remat, jit)]) + cases(FOREIGN, LEAKS, []))
def test_no_tracer_leaks(make, nesting):
    program = make()
    call = transformed(nesting, program.step, program)
    gc.freeze()  # JAX collects garbage, and looks for referrers, in each call
    with jax.checking_leaks():
        call(jnp.asarray(X, jnp.float32))
        assert_no_tracer(program)
        call(jnp.asarray(X, jnp.float32))
    assert_no_tracer(program)


class Bang(Exception):
    pass


class Bomb:
    """Raises at the k-th event: before or after an access of a state's value, or an operation of JAX.

    With ``everywhere=False`` only events within the body count.
    """

    def __init__(self, monkeypatch, everywhere: bool = False):
        self.k = -1
        self.count = 0
        self.everywhere = everywhere
        self.is_armed = everywhere
        for cls in (statetx.State, brainstate.State):
            old = cls.value
            monkeypatch.setattr(cls, "value", property(self.around(old.fget), self.around(old.fset)))
        monkeypatch.setattr(jex_core.Primitive, "bind", self.around(jex_core.Primitive.bind))

    def around(self, f: Callable) -> Callable:
        @functools.wraps(f)
        def wrapped(*args, **kwargs):
            self.tick()
            out = f(*args, **kwargs)
            self.tick()
            return out

        return wrapped

    def tick(self) -> None:
        if not self.is_armed:
            return
        self.count += 1
        if self.count == self.k:
            raise Bang(self.k)

    def arm(self, k: int) -> None:
        self.k, self.count = k, 0

    def body(self, f: Stateful) -> Stateful:
        def bombed(x):
            self.is_armed = True
            try:
                return f(x)
            finally:
                self.is_armed = self.everywhere

        return bombed


def held(states: dict[str, Any]) -> dict[str, list]:
    """The values of states: the container itself and each of its leaves."""
    return {name: [state.value, *jax.tree.leaves(state.value)] for name, state in states.items()}


def check_exceptions(make: type[Program], nesting: Nesting, bomb: Bomb, stride: int) -> int:
    """Raise at each event of a call, and see that the states hold the very objects of before; count the events."""
    k, total = 1, 0
    while True:
        program = make()
        call = transformed(nesting, bomb.body(program.step), program)
        bomb.arm(0)
        bomb.is_armed = False
        cells = program.cells()
        before = held(cells)
        contents = {n: repr(jax.tree.structure(v[0])) for n, v in before.items()}
        bomb.arm(k)
        bomb.is_armed = bomb.everywhere
        try:
            call(jnp.asarray(X, jnp.float32))
        except Bang:
            raised = True
        else:
            raised = False
        finally:
            bomb.is_armed = False
        if not raised:
            assert total, "no event at all"
            return total
        total += 1
        after = held(cells)
        for name in cells:
            assert len(before[name]) == len(after[name]), f"event {k}: {name} has another structure"
            for b, a in zip(before[name], after[name], strict=True):
                assert a is b, f"event {k}: {name} held {b}, now {a}"
            assert contents[name] == repr(jax.tree.structure(after[name][0]))
        k += stride


RAISING: list[Nesting] = [
    (grad,),
    (remat, grad),
    (remat, vjp),
    (jit,),
    (scan,),
    (remat, jit, grad),
    (remat, scan, grad, jit),
]


@pytest.mark.parametrize("stride", [pytest.param(1, marks=pytest.mark.slow), 5])
@pytest.mark.parametrize(
    "make, nesting",
    one_whole(NATIVE, RAISING, [(remat, grad), (jit,)], 4) + in_turn(cases(FOREIGN, RAISING, [(remat, grad)]), 4),
)
def test_states_intact_after_an_exception_in_the_body(make, nesting, stride, monkeypatch):
    check_exceptions(make, nesting, Bomb(monkeypatch), stride)


EVERYWHERE = [corpus.ReadModifyWrite, corpus.MutatedDict, corpus.Nested, corpus.LazyInit, corpus.Objects]


@pytest.mark.parametrize("stride", [pytest.param(1, marks=pytest.mark.slow), 29])
@pytest.mark.parametrize("make, nesting", cases(EVERYWHERE, [(remat, grad), (remat, jit), (remat, scan)]))
def test_states_intact_after_an_exception_anywhere(make, nesting, stride, monkeypatch):
    check_exceptions(make, nesting, Bomb(monkeypatch, everywhere=True), stride)


@pytest.mark.parametrize("nesting", [(remat, grad), (jit,), (remat, jit, grad), (remat, scan)], ids=name_of)
def test_call_after_an_exception_is_unaffected(nesting, monkeypatch):
    program, twin = corpus.Nested(), corpus.Nested()
    bomb = Bomb(monkeypatch)
    call = transformed(nesting, bomb.body(program.step), program)
    x = jnp.asarray(X, jnp.float32)
    for k in (3, 9, 15):
        bomb.arm(k)
        with contextlib.suppress(Bang):
            call(x)
    bomb.arm(-1)
    assert_same(call(x), transformed(nesting, twin.step, twin)(x), tolerance=0)
    assert_same(program.values(), twin.values(), tolerance=0)


PLAIN_JAX = {
    "jit": lambda f: jax.jit(f),
    "grad": lambda f: jax.grad(lambda x: scalar(f(x))),
    "vmap": lambda f: lambda x: jax.vmap(f)(elements(x)),
    "scan": lambda f: lambda x: jax.lax.scan(lambda c, x: (c, f(x)), 0, elements(x)),
    "make_jaxpr": lambda f: jax.make_jaxpr(f),
}

# Nothing tells us of an entry put into the dict of a state, nor of any write to brainstate's, unless a frame watches.
WATCHED_ALWAYS = [p for p in NATIVE if p.writes and p is not corpus.MutatedDict]


# Nobody tells us that a plain transform has ended. Our own states look when they are read; brainstate's do not, and one
# that is created under a plain jax.grad or jax.vmap keeps its tracer, with remat as without it.
KEPT_BY_BRAINSTATE = {"LazyInit_brainstate": {"grad", "vmap"}}


def plain_cases() -> list:
    watched = [(p, False) for p in WATCHED_ALWAYS] + [(p, True) for p in PROGRAMS if p.writes]
    slow = ["vmap", "make_jaxpr"]
    fast = [name for name in PLAIN_JAX if name not in slow]
    return [
        pytest.param(p, names, is_remat, id=f"{p.__name__}{'-remat' * is_remat}{suffix}", marks=marks)
        for p, is_remat in watched
        for names, suffix, marks in (
            [(list(PLAIN_JAX), "", [])] if p in NATIVE else [(fast, "", []), (slow, "-vmap", [pytest.mark.slow])]
        )
    ]


@pytest.mark.parametrize("make, names, is_remat", plain_cases())
def test_plain_jax_transform_leaves_no_tracer(make, names, is_remat):
    kept = {name for name in names if tracers_after(make(), name, is_remat)}
    assert kept == KEPT_BY_BRAINSTATE.get(make.__name__, set()) & set(names)


def tracers_after(program: Program, name: str, is_remat: bool) -> list:
    """What the states hold of a trace that has ended."""
    step = statetx.remat(program.step) if is_remat else program.step
    # Values that do not depend on the argument stay concrete under grad and vmap: nothing leaks, nothing raises.
    with contextlib.suppress(statetx.TraceLeakError):
        PLAIN_JAX[name](lambda x: numbers_of(step(x)))(jnp.asarray(X, jnp.float32))
    values = []
    for state in program.cells().values():
        with contextlib.suppress(statetx.StatetxError, TraceContextError):  # created in the call, without a value
            values.append(state.value)
    return [leaf for leaf in jax.tree.leaves(values) if isinstance(leaf, jax.core.Tracer)]


@pytest.mark.parametrize("is_remat", [False, True], ids=["plain", "remat"])
@pytest.mark.parametrize("make", WATCHED_ALWAYS, ids=lambda p: p.__name__)
def test_write_under_a_plain_jit_raises(make, is_remat):
    program = make()
    step = statetx.remat(program.step) if is_remat else program.step
    if make is corpus.PythonNumbers:  # whose new values are Python numbers, which nothing traces
        program.rate.value = strong(0.5)
    with pytest.raises(statetx.TraceLeakError, match=r"statetx\.jit"):
        jax.jit(lambda x: numbers_of(step(x)))(jnp.asarray(X, jnp.float32))


# -- plain jax transforms where nothing is written ---------------------------------------------------------------

READERS = [p for p in PROGRAMS if not p.writes]


@pytest.mark.parametrize("make", READERS, ids=lambda p: p.__name__)
def test_plain_jax_over_remat(make):
    with jax.enable_x64(True):
        program = make()
        f, ref, x = statetx.remat(program.step), make(Reference()).step, jnp.asarray(X)
        batch = elements(x)
        assert_same(jax.vmap(f)(batch), jnp.stack([ref(x) for x in batch]))
        assert_same(jax.jit(f)(x), ref(x))
        assert_same(jax.grad(lambda x: scalar(f(x)))(x), jax.grad(lambda x: scalar(ref(x)))(x))
        assert_same(
            jax.vmap(jax.grad(lambda x: scalar(f(x))))(batch),
            jnp.stack([jax.grad(lambda x: scalar(ref(x)))(x) for x in batch]),
        )
        assert_same(
            jax.jit(jax.value_and_grad(lambda x: scalar(f(x))))(x), jax.value_and_grad(lambda x: scalar(ref(x)))(x)
        )
        assert_same(jax.jacrev(f)(x), jax.jacrev(ref)(x))
        assert_same(jax.jacfwd(f)(x), jax.jacfwd(ref)(x))
        assert_same(jax.hessian(lambda x: scalar(f(x)))(x), jax.hessian(lambda x: scalar(ref(x)))(x))
        assert_same(jax.jvp(f, (x,), (jnp.ones_like(x),)), jax.jvp(ref, (x,), (jnp.ones_like(x),)))
        assert_same(jax.lax.map(f, batch), jnp.stack([ref(x) for x in batch]))
        c, ys = jax.lax.scan(lambda c, _: (f(c), scalar(f(c))), x, length=3)
        assert_same(c, ref(ref(ref(x))))
        assert_same(ys, jnp.stack([scalar(ref(x)), scalar(ref(ref(x))), scalar(ref(ref(ref(x))))]))


# -- without compilation -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make, nesting",
    cases(
        NATIVE,
        [(remat, grad), (remat, vjp), (remat, jit), (remat, scan), (remat, scan, grad, jit)],
        [(remat, grad)],
    ),
)
def test_law_under_disable_jit(make, nesting):
    program, plain = make(), make(Reference())
    x = jnp.asarray(X, jnp.float32)
    with jax.disable_jit():
        expected, out = (transformed(nesting, p.step, p)(x) for p in (plain, program))
        assert_same(out, expected, tolerance=1e-4, weak=False)
        assert_same(program.values(), plain.values(), tolerance=1e-4, weak=False)
    assert_no_tracer(program)


# -- never stale ---------------------------------------------------------------------------------------------------


FLAG = {"gain": 2.0}
GAIN = 2.0


@dataclasses.dataclass
class Flip:
    """A function that is pure but for something that a flip changes.

    Attributes:
        make: gives a new pair of the function and its flip.
        is_global: whether the flip changes a value that every pair reads.
    """

    name: str
    make: Callable[[], tuple[Callable, Callable]]
    x: Any = dataclasses.field(default_factory=lambda: np.array(X, np.float32))
    is_global: bool = False


def attribute(f):
    box = types.SimpleNamespace(gain=2.0)
    return lambda x: f(x, box.gain), lambda: setattr(box, "gain", 3.0)


def module_variable():
    def flip():
        global GAIN
        GAIN = 5.0 - GAIN

    return lambda x: x**2 * GAIN, flip


def closure():
    gain = 2.0

    def flip():
        nonlocal gain
        gain = 3.0

    return lambda x: jnp.sin(gain * x), flip


def default():
    def f(x, gain=2.0):
        return x * x * gain

    return f, lambda: setattr(f, "__defaults__", (3.0,))


def constant_flip(name: str, before: Any, after: Any, f: Callable = lambda x, c: x * c, **options: Any) -> Flip:
    def make():
        box = types.SimpleNamespace(c=before)
        return lambda x: f(x, box.c), lambda: setattr(box, "c", after)

    return Flip(name, make, **options)


def state_flip(name: str, before: Any, after: Any, f: Callable = lambda x, v: x * v, **options: Any) -> Flip:
    def make():
        state = statetx.State(before)
        return lambda x: f(x, state.value), lambda: setattr(state, "value", after)

    return Flip(name, make, **options)


def with_rule(x, gain):
    @jax.custom_jvp
    def g(x):
        return jnp.sin(x)

    g.defjvp(lambda p, t: (g(p[0]), gain * t[0]))
    return g(x)


def with_vjp_rule(x, gain):
    @jax.custom_vjp
    def g(x):
        return jnp.sin(x)

    g.defvjp(lambda x: (g(x), None), lambda _, ct: (gain * ct,))
    return g(x)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _nondiff(x, gain):
    return jnp.sin(x)


_nondiff.defvjp(lambda x, gain: (_nondiff(x, gain), None), lambda gain, _, ct: (gain * ct,))


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _nondiff_jvp(x, gain):
    return jnp.sin(x)


@_nondiff_jvp.defjvp
def _nondiff_jvp_rule(gain, p, t):
    return _nondiff_jvp(p[0], gain), gain * t[0]


_RULE = {"gain": 2.0}


@jax.custom_jvp
def _reads_global(x):
    return jnp.sin(x)


_reads_global.defjvp(lambda p, t: (_reads_global(p[0]), _RULE["gain"] * t[0]))


@jax.custom_vjp
def _reads_global_vjp(x):
    return jnp.sin(x)


_reads_global_vjp.defvjp(lambda x: (_reads_global_vjp(x), None), lambda _, ct: (_RULE["gain"] * ct,))


def flip_rule():
    """Only the derivative changes: the rule reads a global when it runs."""
    _RULE["gain"] = 5.0 - _RULE["gain"]


def nested_rules(x):
    """Rules inside a jitted function, a loop and a branch."""
    y = jax.lax.cond(x[0] > 0, lambda x: jax.lax.map(_reads_global, x), lambda x: x, x)
    return jax.jit(lambda x: _reads_global_vjp(x))(y)


def custom_gradient(x, gain):
    @jax.custom_gradient
    def g(x):
        return jnp.sin(x), lambda ct: gain * ct

    return g(x)


def linear_solve(x, gain):
    return jax.lax.custom_linear_solve(
        lambda v: gain * v, x, lambda _, b: b / gain, lambda _, b: b / gain, symmetric=True
    )


def root(x, gain):
    return jax.lax.custom_root(lambda y: gain * y - x, x, lambda f, y0: x / gain, lambda g, y: y / gain)


def callback(x, gain):
    return jax.pure_callback(
        lambda x: np.asarray(gain * x), jax.ShapeDtypeStruct(x.shape, x.dtype), jax.lax.stop_gradient(x)
    )


def in_loop(x, gain):
    return jax.lax.fori_loop(0, 3, lambda _, y: y * gain, x)


def in_while(x, gain):
    return jax.lax.while_loop(lambda c: c[0] < gain, lambda c: (c[0] + 1, c[1] * 2), (0.0, jax.lax.stop_gradient(x)))[1]


def in_branch(x, gain):
    return jax.lax.cond(x[0] > 0, lambda y: y * gain, lambda y: y, x)


def in_jit(x, gain):
    return jax.jit(lambda y: jnp.sin(y) * gain)(x)


def in_checkpoint(x, gain):
    return jax.checkpoint(lambda y: jnp.sin(y) * gain)(x)


def in_vmap(x, gain):
    return jax.vmap(lambda y: jnp.sin(y) * gain)(x)


def in_custom_jvp_body(x, gain):
    @jax.custom_jvp
    def g(x):
        return jnp.sin(x) * gain

    g.defjvp(lambda p, t: (g(p[0]), t[0]))
    return g(x)


def mutated_numpy(size: int, jitted: bool = False) -> Flip:
    def make():
        c = np.arange(3 * size, dtype=np.float32).reshape(3, size)
        g = lambda x: x * c.sum(1) + c[:, 0]
        h = lambda x: (x[:, None] * c).sum(1)
        return lambda x: jax.jit(lambda x: h(x))(x) if jitted else g(x) + h(x), lambda: np.add(c, 1.0, out=c)

    return Flip(f"MutatedNumpy{size}{'Jit' * jitted}", make)


A, B = jnp.array([1.0, 2.0, 3.0]), jnp.array([4.0, 5.0, 6.0])


def which_state():
    states, chosen = [statetx.State(A), statetx.State(B)], [0]
    return lambda x: x**2 * states[chosen[0]].value, lambda: chosen.__setitem__(0, 1)


def rebound():
    box = types.SimpleNamespace(s=statetx.State(A))
    return lambda x: x**2 * box.s.value, lambda: setattr(box, "s", statetx.State(B))


def draw(x):
    return x * jax.random.normal(jax.random.wrap_key_data(jnp.zeros(2, jnp.uint32), impl="threefry2x32"), (3,))


def setting_flip(name: str, setting: str, value: Callable[[Any], Any], f: Callable) -> Flip:
    flip = lambda: jax.config.update(setting, value(getattr(jax.config, setting)))
    return Flip(name, lambda: (f, flip), is_global=True)


BF16 = np.array([0.3, -0.7, 1.1], jnp.bfloat16)

FLIPS = [
    Flip("Attribute", lambda: attribute(lambda x, gain: jnp.sin(x) * gain)),
    Flip("Branch", lambda: attribute(lambda x, gain: jnp.sin(x) if gain == 2.0 else jnp.cos(x))),
    Flip("ModuleVariable", module_variable, is_global=True),
    Flip("Closure", closure),
    Flip(
        "GlobalDict",
        lambda: (lambda x: x**2 * FLAG["gain"], lambda: FLAG.update(gain=5.0 - FLAG["gain"])),
        is_global=True,
    ),
    Flip("Default", default),
    Flip("GlobalOfRule", lambda: (_reads_global, flip_rule), is_global=True),
    Flip("GlobalOfVjpRule", lambda: (_reads_global_vjp, flip_rule), is_global=True),
    Flip("GlobalOfNestedRule", lambda: (nested_rules, flip_rule), is_global=True),
    state_flip("ShapeOfState", jnp.ones(3), jnp.ones((2, 5)), lambda x, v: x * v.sum()),
    state_flip("DtypeOfState", jnp.ones((), jnp.bfloat16), jnp.ones((), jnp.float32), x=BF16),
    state_flip("WeakTypeOfState", jnp.asarray(1.0), jnp.ones((), jnp.float32), x=BF16),
    state_flip("PythonNumberOfState", 2, 3, lambda x, v: x**v),
    state_flip("StringOfState", "sin", "cos", lambda x, v: getattr(jnp, v)(x)),
    state_flip("KeysOfState", {"a": A, "b": B}, {"b": A, "a": B}, lambda x, v: x * v["a"] - x**2 * v["b"]),
    Flip("WhichState", which_state),
    Flip("Rebound", rebound),
    setting_flip("X64", "jax_enable_x64", lambda _: True, lambda x: jnp.sum(x.astype(float) * jnp.arange(3))),
    setting_flip("PrngImplementation", "jax_threefry_partitionable", lambda before: not before, draw),
    # Raises once promotion is strict, where it did not before.
    setting_flip("Promotion", "jax_numpy_dtype_promotion", lambda _: "strict", lambda x: x * jnp.ones(3, jnp.bfloat16)),
    mutated_numpy(1),
    mutated_numpy(2000),
    mutated_numpy(1, jitted=True),
    mutated_numpy(2000, jitted=True),
    constant_flip("SignOfZero", 0.0, -0.0),
    constant_flip("SignOfZeroNumpy", np.float32(0.0), np.float32(-0.0)),
    constant_flip("SignOfZeroArray", np.zeros(3, np.float32), -np.zeros(3, np.float32)),
    constant_flip("SignOfZeroInJit", 0.0, -0.0, in_jit),
    constant_flip("SignOfZeroInLoop", 0.0, -0.0, in_loop),
    constant_flip("SignOfZeroInVmap", 0.0, -0.0, in_vmap),
    constant_flip("SignOfZeroInCheckpoint", 0.0, -0.0, in_checkpoint),
    constant_flip("SignOfZeroFull", 0.0, -0.0, lambda x, c: x * jnp.full(3, c)),
    constant_flip(
        "SignOfComplexZero",
        complex(1, 0.0),
        complex(1, -0.0),
        lambda x, c: (jnp.sin(x), jnp.imag(jnp.full(3, c, jnp.complex64))),
    ),
    constant_flip("SignOfPad", 0.0, -0.0, lambda x, c: jax.lax.pad(x, c, [(1, 1, 0)])),
    constant_flip("Type", 1, True, lambda x, c: (jnp.sin(x), jnp.asarray(c))),
    constant_flip("TypeFloat", 1, 1.0, lambda x, c: (jnp.sin(x), jnp.asarray(c))),
    constant_flip("TypeFull", 1, True, lambda x, c: (jnp.sin(x), jnp.full(3, c))),
    constant_flip("NumpyInteger", np.int8(1), np.int16(1), lambda x, c: (jnp.sin(x), jnp.asarray(c) + jnp.int8(1))),
    constant_flip("WeakType", 2.0, np.float32(2.0), x=BF16),
    constant_flip("WeakTypeOfArray", jnp.asarray(2.0), jnp.asarray(2.0, jnp.float32), x=BF16),
    constant_flip("WeakTypeInJit", 2.0, np.float32(2.0), in_jit, x=BF16),
    constant_flip("WeakTypeOfOutput", 2.0, np.float32(2.0), lambda x, c: (jnp.sin(x), jnp.asarray(c))),
    constant_flip("DtypeOfArray", jnp.ones(3, jnp.bfloat16), jnp.ones(3, jnp.float32), x=BF16),
    constant_flip("ValueOfArray", jnp.ones(3), 2 * jnp.ones(3)),
    constant_flip("ShapeOfArray", jnp.ones(3), jnp.ones(2), lambda x, c: x * c.sum()),
    constant_flip("Power", 2, 3, lambda x, c: x**c),
    constant_flip("Slice", 2, 3, lambda x, c: x[:c]),
    constant_flip("Axis", 0, 1, lambda x, c: (x[:, None] * jnp.ones((3, 3))).sum(c)),
    constant_flip("Infinity", np.inf, -np.inf),
    constant_flip("NotANumber", 1.0, np.nan),
    constant_flip("Rule", 2.0, 3.0, with_rule),
    constant_flip("RuleSignOfZero", 0.0, -0.0, with_rule),
    constant_flip("VjpRule", 2.0, 3.0, with_vjp_rule),
    constant_flip("NondiffVjp", 2.0, 3.0, _nondiff),
    constant_flip("NondiffJvp", 2.0, 3.0, _nondiff_jvp),
    constant_flip("BodyOfRule", 2.0, 3.0, in_custom_jvp_body),
    constant_flip("CustomGradient", 2.0, 3.0, custom_gradient),
    constant_flip("LinearSolve", 2.0, 3.0, linear_solve),
    constant_flip("Root", 2.0, 3.0, root),
    constant_flip("Callback", 2.0, 3.0, callback),
    constant_flip("Loop", 2.0, 3.0, in_loop),
    constant_flip("While", 2.0, 3.0, in_while),
    constant_flip("Cond", 2.0, 3.0, in_branch),
    constant_flip("Jit", 2.0, 3.0, in_jit),
    constant_flip("Checkpoint", 2.0, 3.0, in_checkpoint),
    constant_flip("Operation", jnp.sin, jnp.cos, lambda x, c: c(x)),
    constant_flip(
        "OperationInScan", jnp.sin, jnp.cos, lambda x, c: jax.lax.scan(lambda a, _: (c(a), None), x, length=2)[0]
    ),
    constant_flip("Activation", jax.nn.relu, jax.nn.relu6, lambda x, c: c(x + 6)),
    constant_flip("ActivationRule", jax.nn.silu, jax.nn.soft_sign, lambda x, c: c(x)),
    constant_flip("Order", True, False, lambda x, c: (jnp.sin(x), jnp.cos(x)) if c else (jnp.cos(x), jnp.sin(x))),
    constant_flip("Keys", True, False, lambda x, c: {"a": jnp.sin(x), "b": x} if c else {"b": jnp.sin(x), "a": x}),
    constant_flip("StopGradient", True, False, lambda x, c: jnp.sin(x) * (jax.lax.stop_gradient(x) if c else x)),
    constant_flip("Operands", True, False, lambda x, c: x - 2 * jnp.sin(x) if c else 2 * jnp.sin(x) - x),
]


def plain_grad(f, x):
    value, pullback = jax.vjp(lambda x: [leaf for leaf in jax.tree.leaves(f(x)) if is_float(leaf)], x)
    return value, pullback(cotangents(value))


def flip_grad(wrap):
    def run(f, x):
        g = wrap(lambda x: [leaf for leaf in jax.tree.leaves(f(x)) if is_float(leaf)])
        value, pullback = statetx.vjp(g, x)
        return value, pullback(cotangents(value))

    return run


def value_and_grad_of(wrap, value_and_grad):
    def run(f, x):
        def loss(x):
            leaves = [leaf for leaf in jax.tree.leaves(wrap(f)(x)) if is_float(leaf)]
            return sum((leaf.astype(jnp.float32) * (1 + i)).sum() for i, leaf in enumerate(leaves)), leaves

        (_, leaves), grads = value_and_grad(loss, has_aux=True)(x)
        return leaves, grads

    return run


def loop(wrap, scan):
    def run(f, x):
        g = wrap(f)
        return scan(lambda c, x: (c + 1, jax.tree.leaves(g(x))), jnp.int32(0), jnp.stack([x, 2 * x]))[1]

    return run


def grad_loop(wrap, scan, vjp):
    def run(f, x):
        rows = lambda x: [leaf for leaf in loop(wrap, scan)(f, x) if is_float(leaf)]
        value, pullback = vjp(rows, x)
        return value, pullback(cotangents(value))

    return run


def identity(f):
    return f


# Each: a call of the flipped function, and its reference without statetx.
WAYS = {
    "jit(remat)": (
        lambda f, x: jax.jit(lambda x: jax.tree.leaves(statetx.remat(f)(x)))(x),
        lambda f, x: jax.jit(lambda x: jax.tree.leaves(f(x)))(x),
    ),
    "statetx.jit(remat)": (
        lambda f, x: statetx.jit(lambda x: jax.tree.leaves(statetx.remat(f)(x)))(x),
        lambda f, x: jax.jit(lambda x: jax.tree.leaves(f(x)))(x),
    ),
    "vjp": (flip_grad(identity), plain_grad),
    "vjp(remat)": (flip_grad(statetx.remat), plain_grad),
    "jax.vjp(remat)": (lambda f, x: plain_grad(statetx.remat(f), x), plain_grad),
    "value_and_grad(remat)": (
        value_and_grad_of(statetx.remat, statetx.value_and_grad),
        value_and_grad_of(identity, jax.value_and_grad),
    ),
    "scan": (loop(identity, statetx.scan), loop(identity, jax.lax.scan)),
    "scan(remat)": (loop(statetx.remat, statetx.scan), loop(identity, jax.lax.scan)),
    "vjp(scan(remat))": (
        grad_loop(statetx.remat, statetx.scan, statetx.vjp),
        grad_loop(identity, jax.lax.scan, jax.vjp),
    ),
    "vjp(remat(scan))": (
        lambda f, x: flip_grad(statetx.remat)(lambda x: loop(identity, statetx.scan)(f, x), x),
        lambda f, x: plain_grad(lambda x: loop(identity, jax.lax.scan)(f, x), x),
    ),
}


def bits(tree: Any) -> tuple:
    """The distinguished properties: structure, types with their weakness, and the sign of zeros."""
    leaves, treedef = jax.tree.flatten(tree)
    return treedef, [(str(jax.typeof(jnp.asarray(x))), jax.typeof(jnp.asarray(x)).weak_type) for x in leaves]


def assert_flip_same(actual: Any, expected: Any) -> None:
    assert bits(actual) == bits(expected)
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        a, e = np.asarray(a), np.asarray(e)
        if a.dtype.kind == "V":  # float0
            continue
        np.testing.assert_allclose(
            a.astype(np.complex128), e.astype(np.complex128), rtol=1e-2 if a.dtype == jnp.bfloat16 else 1e-5, atol=1e-6
        )
        for part in (np.real, np.imag) if a.dtype.kind == "c" else (lambda x: x,):
            zero = part(e) == 0
            np.testing.assert_array_equal(
                np.signbit(part(a).astype(np.float64))[zero], np.signbit(part(e).astype(np.float64))[zero]
            )


def outcome_of(run, f, x):
    try:
        return run(f, x)
    except Exception as e:  # noqa: BLE001
        return type(e)


@pytest.fixture
def settings():
    """Puts back every setting that a flip may change."""
    names = ("jax_enable_x64", "jax_threefry_partitionable", "jax_numpy_dtype_promotion")
    before = {name: getattr(jax.config, name) for name in names}
    yield
    for name, value in before.items():
        jax.config.update(name, value)


FAST_WAYS = ("vjp(remat)", "scan(remat)")


@pytest.mark.parametrize(
    "of, way",
    [
        # Every other flip with one of the fast ways in turn.
        pytest.param(f, w, id=f"{f.name}-{w}", marks=[pytest.mark.slow] * (n % 2 or w != FAST_WAYS[n // 2 % 2]))
        for n, f in enumerate(FLIPS)
        for w in WAYS
    ],
)
def test_never_stale(of, way, settings):
    run, reference = WAYS[way]
    (ours, flip), (theirs, flip_theirs) = of.make(), of.make()
    x = jnp.asarray(of.x)
    assert_flip_same(run(ours, x), reference(as_new(theirs), x))
    flip()
    if not of.is_global:
        flip_theirs()
    expected = outcome_of(reference, as_new(theirs), x)
    got = outcome_of(run, ours, x)
    if isinstance(expected, type):
        assert got is expected
    else:
        assert_flip_same(got, expected)


def as_new(f: Callable) -> Callable:
    """The function as a new object, which no cache of JAX knows."""
    return lambda x: f(x)


@pytest.mark.slow
@pytest.mark.parametrize("of", FLIPS, ids=lambda f: f.name)
def test_each_flip_changes_the_result(of, settings):
    """Otherwise `test_never_stale` would pass for a flip without effect."""
    fun, flip = of.make()
    x = jnp.asarray(of.x)

    def look(f, x):
        return f(x), plain_grad(f, x)

    before = outcome_of(look, as_new(fun), x)
    flip()
    after = outcome_of(look, as_new(fun), x)
    if isinstance(after, type):
        return
    with pytest.raises(AssertionError):
        assert_flip_same(before, after)


@pytest.mark.parametrize("size", [1, 2000])
@pytest.mark.parametrize("is_scan", [False, True], ids=["remat", "scan"])
def test_cache_does_not_follow_a_mutated_numpy_array(is_scan, size):
    """A jitted function inside closes over a NumPy array, which changes; another call finds one of the old content.

    The second call is compiled again: a hit in JAX's cache would hide the compiled function.
    """

    def run(c, wrap):
        f = jax.jit(lambda x: (x[:, None] * c).sum(1))
        g = (lambda x: loop(identity, statetx.scan)(f, x)) if is_scan else statetx.remat(f)
        return wrap(g)(jnp.asarray(X, jnp.float32))

    first, second = np.ones((3, size), np.float32), np.ones((3, size), np.float32)
    expected = run(second, jax.jit)
    statetx.clear_cache()
    run(first, lambda g: lambda x: plain_grad(g, x))
    first += 1.0
    assert_flip_same(run(second, jax.jit), expected)


STATICS = [
    (0.0, -0.0),
    (1, True),
    (1, 1.0),
    (complex(1, 0.0), complex(1, -0.0)),
    ((0.0,), (-0.0,)),
    ([1], (1,)),
    ([1], [True]),
    ({1: 2}, {True: 2}),
    ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    (frozenset([0.0]), frozenset([-0.0])),
    (np.float32(1), np.float64(1)),
    (np.array([0.0]), np.array([-0.0])),
    (np.array([1, 2]), np.array([[1, 2]])),
    (None, False),
    ("1", b"1"),
    (slice(0, 1), slice(False, True)),
]


@pytest.mark.parametrize("first, second", STATICS, ids=lambda v: f"{type(v).__name__} {v!r}")
def test_jit_distinguishes_static_arguments(first, second):
    seen = []

    @statetx.jit(static_argnums=1)
    def f(x, c):
        seen.append(c)
        return x

    for c in (first, second, first, second):
        f(1.0, c)
    assert [(type(c), repr(c)) for c in seen] == [(type(c), repr(c)) for c in (first, second)]


# -- random draws --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "nesting", [(remat, grad), (remat, remat, grad), (remat, jit, grad), (remat, grad, jit)], ids=name_of
)
def test_recomputation_sees_the_draws_of_the_forward_pass(nesting):
    class Masked(Program):
        def setup(self):
            self.rng = self.library.rng(3)

        def body(self, x):
            mask = jax.random.bernoulli(self.library.draw(self.rng), 0.5, (64,))
            return jnp.where(mask, jnp.sin(x.mean() + jnp.arange(64.0)), 0.0) * mask

    program, plain = Masked(), Masked()
    first = transformed(nesting, program.step, program)
    for _ in range(3):
        x = jnp.asarray(X, jnp.float32)
        out = first(x)
        kept = plain.step(x)
        np.testing.assert_array_equal(np.asarray(out["out"]) == 0, np.asarray(kept) == 0)
        key = np.asarray(jax.random.key_data(program.rng.value))
        np.testing.assert_array_equal(key, np.asarray(jax.random.key_data(plain.rng.value)))
        mask = np.asarray(kept) != 0
        # The derivative of the forward pass's mask, by hand: a mask drawn again would give another sum.
        a = np.float64(np.mean(x)) + np.arange(64.0)
        slope = np.sum(mask * 0.7 * np.cos(0.7 * np.sin(a)) * np.cos(a)) / 3
        np.testing.assert_allclose(np.asarray(out["of_x"]), np.full(3, slope), rtol=1e-4)


# -- the suite can fail --------------------------------------------------------------------------------------------


def _law(program: type[Program], nesting: Nesting) -> Callable:
    return lambda monkeypatch: check_law(program, nesting, tolerance=1e-4)


def _stale(flip: Flip, way: str = "vjp(remat)") -> Callable:
    return lambda monkeypatch: test_never_stale(flip, way, None)


def _flip_named(name: str) -> Flip:
    return next(f for f in FLIPS if f.name == name)


def _publish_nothing(self, leaves, *, live=True):
    for effect in self.effects:
        effect.value = None


def _undo_nothing(self):
    return [self.kind.set_owner(self.state, self.previous_owner)] if self.acquired else []


def _run_twice(fun, avals, **options):
    _STAGE(fun, avals, **{**options, "lifting": None})
    return _STAGE(fun, avals, **options)


_STAGE = statetx._lift.stage.stage
_CLOSE = statetx._equations.structure.Body.close.__func__


def _bake(cls, jaxpr, consts):
    """Constants stay in the jaxpr, out of sight of its structure: the first call's values serve all."""
    body = _CLOSE(cls, jaxpr, consts)
    body.operands = [_FIRST.setdefault((body.key, i), x) for i, x in enumerate(body.operands)]
    return body


_FIRST: dict = {}


# By name: the broken function, its replacement, and a check that must fail.
class _Alike:
    """A structure equal to every other."""

    is_incomparable = False

    def __init__(self, jaxpr):
        pass

    def __hash__(self):
        return 0

    def __eq__(self, other):
        return True


BREAKAGES = {
    "writes are lost": ("_lift.outcome.Outcome.publish", _publish_nothing, _law(corpus.ReadModifyWrite, (remat, grad))),
    "writes stay after an exception": (
        "_frames.Access.undo",
        _undo_nothing,
        lambda mp: check_exceptions(corpus.ReadModifyWrite, (remat, grad), Bomb(mp), 1),
    ),
    "a write inside a trace is not looked at": (
        "_jax.leaked_tracers",
        lambda *a: [],
        lambda mp: test_plain_jax_transform_leaves_no_tracer(corpus.ReadModifyWrite, ["jit"], True),
    ),
    "the body runs twice": ("transforms.remat.stage", _run_twice, _law(corpus.ReadOnly, (remat, grad))),
    "literals do not count": ("_equations.structure._constant", lambda x: 0, _stale(_flip_named("Infinity"))),
    "parameters do not count": ("_equations.structure._param", lambda x: 0, _stale(_flip_named("Power"))),
    "the sign of zero does not count": ("_equations.structure._constant", float, _stale(_flip_named("SignOfZero"))),
    "constants are baked in": (
        "_equations.structure.Body.close",
        classmethod(_bake),
        _stale(_flip_named("ValueOfArray")),
    ),
    "operands' types do not count": ("_equations.structure.Structure", _Alike, _stale(_flip_named("Operation"))),
    "derivative rules do not count": ("_jax.derivative_rule", lambda x: (), _stale(_flip_named("Rule"))),
    "static arguments go by equality": (
        "transforms.jit.arguments.static_key",
        lambda x: x,
        lambda mp: test_jit_distinguishes_static_arguments(0.0, -0.0),
    ),
}


@pytest.mark.parametrize("breakage", BREAKAGES)
def test_the_suite_can_fail(breakage, monkeypatch):
    name, broken, check = BREAKAGES[breakage]
    statetx.clear_cache()
    with monkeypatch.context() as patch:
        check(patch)
    statetx.clear_cache()
    with (
        monkeypatch.context() as patch,
        pytest.raises((AssertionError, ValueError, TypeError, jax.errors.JAXTypeError)),
    ):
        patch.setattr(f"statetx.{name}", broken)
        check(patch)
    statetx.clear_cache()
