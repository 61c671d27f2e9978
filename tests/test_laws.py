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
import functools
from collections.abc import Callable
from typing import Any

import brainstate
import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
import numpy as np
import pytest

import corpus
import statetx
from corpus import NATIVE, PROGRAMS, Program, X

# -- trees -----------------------------------------------------------------------------------------------------


def is_array(x: Any) -> bool:
    return isinstance(x, (jax.Array, np.ndarray, np.generic))


def is_float(x: Any) -> bool:
    return is_array(x) and jnp.issubdtype(x.dtype, jnp.inexact)


def is_key(x: Any) -> bool:
    return is_array(x) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def scalar(out: Any) -> jax.Array:
    """A number that depends on every float of the output, each in a different way."""
    floats = [leaf for leaf in jax.tree.leaves(out) if is_float(leaf)]
    return sum(jnp.sum(jnp.sin(0.7 * leaf + i)) for i, leaf in enumerate(floats))  # type: ignore[return-value]


def numbers_of(out: Any) -> list:
    return [leaf for leaf in jax.tree.leaves(out) if is_array(leaf) or isinstance(leaf, (int, float))]


def cotangents(out: Any) -> Any:
    """A cotangent for an output: different for each entry, float0 for integers; other leaves as they are."""

    def cotangent(leaf: Any) -> Any:
        if is_float(leaf):
            return (0.3 + 0.1 * jnp.arange(leaf.size, dtype=leaf.dtype)).reshape(leaf.shape)
        return np.zeros(np.shape(leaf), jax.dtypes.float0) if is_array(leaf) or isinstance(leaf, int) else leaf

    return jax.tree.map(cotangent, out, is_leaf=lambda x: isinstance(x, type))


def snapshot(values: dict[str, Any]) -> dict[str, Any]:
    """Another container with the same leaves: programs may change theirs in place."""
    return jax.tree.map(lambda x: x, values)


def assert_same(actual: Any, expected: Any, *, tolerance: float = 1e-10, weak: bool = True, where: str = "") -> None:
    """Equal structure, types and values; Python numbers may have become arrays."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected), where
    paths = [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_flatten_with_path(expected)[0]]
    for path, a, e in zip(paths, jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert not isinstance(a, jax.core.Tracer), f"{where}{path}: {a}"
        if not (is_array(e) or isinstance(e, (int, float))):
            assert a is e or a == e, f"{where}{path}"
            continue
        ta, te = jax.typeof(jnp.asarray(a)), jax.typeof(jnp.asarray(e))
        assert (ta.shape, ta.dtype) == (te.shape, te.dtype), f"{where}{path}: {ta} instead of {te}"
        if weak:
            assert ta.weak_type == te.weak_type, f"{where}{path}: weak type {ta.weak_type}"
        if is_key(e):
            a, e = jax.random.key_data(a), jax.random.key_data(e)
        a, e = np.asarray(a), np.asarray(e)
        if is_float(e) and tolerance:
            scale = max(1.0, float(np.max(np.abs(e), initial=0)))
            np.testing.assert_allclose(a, e, rtol=0, atol=tolerance * scale, err_msg=f"{where}{path}")
        else:
            np.testing.assert_array_equal(a, e, err_msg=f"{where}{path}")


def assert_no_tracer(program: Program) -> None:
    for name, state in program.cells().items():
        for leaf in jax.tree.leaves(state.value):
            assert not isinstance(leaf, jax.core.Tracer), f"{name} holds {leaf}"


# -- transforms, and what they mean for a pure function ----------------------------------------------------------

Stateful = Callable[[jax.Array], Any]
Pure = Callable[[dict[str, Any], jax.Array], tuple[Any, dict[str, Any]]]


def remat(f: Stateful, program: Program) -> Stateful:
    return statetx.remat(f)


def jit(f: Stateful, program: Program) -> Stateful:
    return statetx.jit(f)


def unchanged(r: Pure, wrt: tuple[str, ...]) -> Pure:
    return r


def grad(f: Stateful, program: Program) -> Stateful:
    targets = program.targets()

    def loss(x):
        out = f(x)
        return scalar(out), out

    def gradients(x):
        if targets:
            (value, out), (of_states, of_x) = statetx.value_and_grad(loss, 0, wrt=targets, has_aux=True)(x)
        else:
            (value, out), of_x = statetx.value_and_grad(loss, has_aux=True)(x)
            of_states = {}
        return {"value": value, "out": out, "of_states": of_states, "of_x": of_x}

    return gradients


def pure_grad(r: Pure, wrt: tuple[str, ...]) -> Pure:
    def gradients(v, x):
        others = None

        def loss(targets, x):
            nonlocal others
            out, new = r({**v, **targets}, x)
            arrays, others = split(({**v, **new}, out))
            return scalar(out), arrays

        targets = {k: v[k] for k in wrt}
        (value, arrays), (of_states, of_x) = jax.value_and_grad(loss, (0, 1), has_aux=True)(targets, x)
        new, out = others(arrays)
        return {"value": value, "out": out, "of_states": of_states, "of_x": of_x}, new

    return gradients


def split(tree: Any) -> tuple[list, Callable[[list], Any]]:
    leaves, treedef = jax.tree.flatten(tree)
    mask = [is_array(leaf) for leaf in leaves]

    def merge(arrays: list) -> Any:
        given = iter(arrays)
        return treedef.unflatten([next(given) if m else leaf for m, leaf in zip(mask, leaves, strict=True)])

    return [leaf for leaf, m in zip(leaves, mask, strict=True) if m], merge


def vjp(f: Stateful, program: Program) -> Stateful:
    targets = program.targets()

    def pulled(x):
        out, pullback = statetx.vjp(f, x, wrt=targets or None)
        grads = pullback(cotangents(out))
        of_states, (of_x,) = grads if targets else ({}, grads)
        return {"out": out, "of_states": of_states, "of_x": of_x}

    return pulled


def pure_vjp(r: Pure, wrt: tuple[str, ...]) -> Pure:
    def pulled(v, x):
        others = None

        def run(targets, x):
            nonlocal others
            out, new = r({**v, **targets}, x)
            arrays, others = split(({**v, **new}, out))
            return [leaf for leaf in jax.tree.leaves(out) if is_float(leaf)], arrays

        floats, pullback, arrays = jax.vjp(run, {k: v[k] for k in wrt}, x, has_aux=True)
        new, out = others(arrays)
        of_states, of_x = pullback([c for c in jax.tree.leaves(cotangents(out)) if is_float(c)])
        return {"out": out, "of_states": of_states, "of_x": of_x}, new

    return pulled


def _elements(x: jax.Array) -> jax.Array:
    return jnp.stack([x, 0.5 * x, x + 0.25])


def scan(f: Stateful, program: Program) -> Stateful:
    def body(c, x):
        out = f(x + 0.1 * jnp.sin(c))
        return 0.5 * c + 0.1 * scalar(out), numbers_of(out)

    return lambda x: statetx.scan(body, jnp.asarray(0.5, x.dtype), _elements(x))


def pure_scan(r: Pure, wrt: tuple[str, ...]) -> Pure:
    def loop(v, x):
        c, rows = jnp.asarray(0.5, x.dtype), []
        for x_t in _elements(x):
            out, v = r(v, x_t + 0.1 * jnp.sin(c))
            c = 0.5 * c + 0.1 * scalar(out)
            rows.append(numbers_of(out))
        return (c, [jnp.stack(column) for column in zip(*rows, strict=True)]), v

    return loop


PURE = {remat: unchanged, jit: unchanged, grad: pure_grad, vjp: pure_vjp, scan: pure_scan}

Nesting = tuple[Callable, ...]  # from the inside out


def transformed(nesting: Nesting, f: Stateful, program: Program) -> Stateful:
    for op in nesting:
        f = op(f, program)
    return f


def pure(nesting: Nesting, program: Program | type[Program]) -> Pure:
    r: Pure = program.ref
    for op in nesting:
        r = PURE[op](r, program.wrt)
    return r


def name_of(nesting: Nesting) -> str:
    name = "step"
    for op in nesting:
        name = f"{op.__name__}({name})"
    return name


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
]


def expected_runs(nesting: Nesting, program: Program, call: int) -> range:
    """How often the body's Python may run in the first or a later call."""
    most = 1
    for op in nesting:
        if op is jit and call > program.grows:  # the call after a state was created is of other types
            return range(0, 1)
        most *= 2 if op is scan and program.writes else 1
    return range(1, most + 1)


def cases(programs: list[type[Program]], nestings: list[Nesting]) -> list:
    return [
        pytest.param(p, n, id=f"{p.__name__}-{name_of(n)}")
        for p in programs
        for n in nestings
        if scan not in n or (p.loops and n[n.index(scan) :].count(grad) <= p.order_in_loops)
    ]


def check_law(make: type[Program], nesting: Nesting, num_calls: int = 2, tolerance: float = 1e-10) -> None:
    program = make()
    call, reference = transformed(nesting, program.step, program), pure(nesting, program)
    values = snapshot(program.values())
    weak = not {jit, scan} & set(nesting)
    for n in range(num_calls):
        x = jnp.asarray(X) * (1 + 0.3 * n)
        expected, new = reference(snapshot(values), x)
        values = {**values, **new}
        before = program.runs
        out = call(x)
        runs = program.runs - before
        assert_no_tracer(program)
        assert_same(out, expected, tolerance=tolerance, weak=weak, where=f"call {n}, output ")
        assert_same(snapshot(program.values()), values, tolerance=tolerance, weak=weak, where=f"call {n}, state ")
        assert runs in expected_runs(nesting, program, n), f"call {n}: the body ran {runs} times"
        values = snapshot(program.values())


@pytest.mark.parametrize("make, nesting", cases(PROGRAMS, NESTINGS))
def test_law_same_as_reference(make, nesting):
    with jax.enable_x64(True):
        check_law(make, nesting, 3 if make.grows else 2)


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

LEAKS: list[Nesting] = [(remat, grad), (remat, grad, grad), (remat, vjp), (remat, jit), (remat, scan, grad, jit)]


@pytest.mark.parametrize("make, nesting", cases(PROGRAMS, LEAKS))
def test_no_tracer_leaks(make, nesting):
    program = make()
    call = transformed(nesting, program.step, program)
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
    """What states hold, with the container itself and each of its leaves."""
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


@pytest.mark.parametrize("make, nesting", cases(PROGRAMS, RAISING))
def test_states_are_intact_after_an_exception_in_the_body(make, nesting, monkeypatch):
    check_exceptions(make, nesting, Bomb(monkeypatch), stride=1)


EVERYWHERE = [corpus.ReadModifyWrite, corpus.MutatedDict, corpus.Nested, corpus.LazyInit, corpus.Objects]


@pytest.mark.parametrize("make, nesting", cases(EVERYWHERE, [(remat, grad), (remat, vjp), (jit,), (remat, scan)]))
def test_states_are_intact_after_an_exception_anywhere(make, nesting, monkeypatch):
    check_exceptions(make, nesting, Bomb(monkeypatch, everywhere=True), stride=1)


@pytest.mark.parametrize("nesting", [(remat, grad), (jit,), (remat, jit, grad), (remat, scan)], ids=name_of)
def test_a_call_after_an_exception_is_as_if_it_had_not_been(nesting, monkeypatch):
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
    "vmap": lambda f: lambda x: jax.vmap(lambda x: numbers_of(f(x)))(_elements(x)),
    "scan": lambda f: lambda x: jax.lax.scan(lambda c, x: (c, numbers_of(f(x))), 0, _elements(x)),
    "make_jaxpr": lambda f: jax.make_jaxpr(lambda x: numbers_of(f(x))),
}


@pytest.mark.parametrize("is_remat", [False, True], ids=["plain", "remat"])
@pytest.mark.parametrize("name", PLAIN_JAX)
@pytest.mark.parametrize("make", [p for p in PROGRAMS if p.writes], ids=lambda p: p.__name__)
def test_a_plain_jax_transform_leaves_no_tracer(make, name, is_remat):
    program = make()
    step = statetx.remat(program.step) if is_remat else program.step
    call = PLAIN_JAX[name](lambda x: {k: v for k, v in enumerate(numbers_of(step(x)))})
    # Values that do not depend on the argument stay concrete under grad and vmap: nothing leaks, nothing raises.
    with contextlib.suppress(statetx.TraceLeakError):
        call(jnp.asarray(X, jnp.float32))
    assert_no_tracer(program)


@pytest.mark.parametrize("make", [p for p in PROGRAMS if p.writes], ids=lambda p: p.__name__)
def test_a_write_under_a_plain_jit_raises(make):
    program = make()
    with pytest.raises(statetx.TraceLeakError, match=r"statetx\.jit"):
        jax.jit(lambda x: numbers_of(program.step(x)))(jnp.asarray(X, jnp.float32))
    assert_no_tracer(program)


# -- plain jax transforms where nothing is written ---------------------------------------------------------------

READERS = [p for p in PROGRAMS if not p.writes]


@pytest.mark.parametrize("make", READERS, ids=lambda p: p.__name__)
def test_plain_jax_over_remat(make):
    with jax.enable_x64(True):
        program = make()
        f, v, x = statetx.remat(program.step), program.values(), jnp.asarray(X)
        ref = lambda x: make.ref(v, x)[0]  # noqa: E731
        batch = _elements(x)
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
    "make, nesting", cases(NATIVE, [(remat, grad), (remat, vjp), (remat, jit), (remat, scan), (remat, scan, grad, jit)])
)
def test_law_under_disable_jit(make, nesting):
    program = make()
    call, reference = transformed(nesting, program.step, program), pure(nesting, program)
    values = snapshot(program.values())
    x = jnp.asarray(X, jnp.float32)
    with jax.disable_jit():
        expected, new = reference(values, x)
        assert_same(call(x), expected, tolerance=1e-4, weak=False)
        assert_same(snapshot(program.values()), {**values, **new}, tolerance=1e-4, weak=False)
    assert_no_tracer(program)
