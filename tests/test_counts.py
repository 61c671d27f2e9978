"""Counts that must not grow: sizes of compiled programs against handwritten ones, traces, compilations, cache
entries.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from laws import elements, grad, jit, numbers_of, remat, scalar, scan, transformed
from mixed_reference import Reference

import statetx
from corpus import NATIVE, X
from helpers import in_turn


def compiled_counts(fun, *args):
    compiled = jax.jit(fun).lower(*args).compile()
    analysis, memory = compiled.cost_analysis(), compiled.memory_analysis()
    return {
        "flops": analysis.get("flops", 0.0),
        "temporary bytes": memory.temp_size_in_bytes,
        "instructions": compiled.as_text().count(" = "),
    }


def hand_scan(r, wrt):
    """The usual handwritten form: written values in the carry, parameters closed over."""

    def loop(values, x):
        fixed = {k: v for k, v in values.items() if k in PARAMETERS}

        def body(carry, x):
            c, values = carry
            out, values = r({**fixed, **values}, x + 0.1 * jnp.sin(c))
            return (0.5 * c + 0.1 * scalar(out), without(values)), numbers_of(out)

        start = (jnp.asarray(0.5, x.dtype), without(values))
        (c, values), ys = jax.lax.scan(body, start, elements(x))
        return (c, ys), {**fixed, **values}

    def without(values):
        return {k: v for k, v in values.items() if k not in PARAMETERS}

    return loop


def vmap(f, program):
    """Each example with states of its own."""
    return lambda x: statetx.vmap(f, states={True: 0})(elements(x))


def hand_vmap(r, wrt):
    return lambda values, x: jax.vmap(r)(values, elements(x))


def hand_grad(r, wrt):
    def gradients(values, x):
        def loss(targets, x):
            out, new = r({**values, **targets}, x)
            return scalar(out), (out, {**values, **new})

        targets = {k: values[k] for k in wrt}
        (value, (out, new)), (of_states, of_x) = jax.value_and_grad(loss, (0, 1), has_aux=True)(targets, x)
        return {"value": value, "out": out, "of_states": of_states, "of_x": of_x}, new

    return gradients


# JAX's transforms, except `remat`, since JAX has no such fence.
HAND = {
    remat: lambda r, wrt: statetx.remat(r),
    jit: lambda r, wrt: r,
    grad: hand_grad,
    scan: hand_scan,
    vmap: hand_vmap,
}


def by_hand(nesting, make):
    """The same operations as in the program, on values that are passed and returned, under transforms of JAX."""

    def fun(values, x):
        program = make(Reference())
        for name, cell in program.cells().items():
            program.library.set(program.library.key_of(cell), values[name])
        out = program.step(x)
        return out, program.values()

    for transform in nesting:
        fun = HAND[transform](fun, make.wrt)
    return fun


NESTINGS = [
    (remat, grad),
    (scan,),
    (scan, grad),
    (remat, scan, grad),
    (scan, remat, grad),
    (grad,),
    (grad, jit),
    (remat, grad, scan),
    (remat, vmap),
    (vmap, grad),
    (remat, grad, vmap),
    (remat, vmap, scan, grad),
    (scan, vmap, remat, grad),
]
PARAMETERS = ("w", "b")
ALIKE = "ReadModifyWrite MutatedDict PythonNumbers ReadOnly Dropout".split()


FAST = [(remat, grad), (remat, scan, grad), (grad, jit), (remat, grad, vmap), (remat, vmap, scan, grad)]


def programs() -> list:
    """Programs under `vmap` take longest to compile: two of them are enough for the fast suite."""
    return [
        pytest.param(
            p,
            nesting,
            id=f"{p.__name__}-{'-'.join(t.__name__ for t in nesting)}",
            marks=[pytest.mark.slow] * (nesting not in FAST or (vmap in nesting and p.__name__ not in BROAD)),
        )
        for p in NATIVE
        if p.__name__ in ALIKE
        for nesting in NESTINGS
    ]


BROAD = ("Dropout", "MutatedDict")


@pytest.mark.sample
@pytest.mark.parametrize(("make", "nesting"), in_turn(programs(), 3))
def test_compiled_programs_equal_handwritten(make, nesting):
    program = make()
    if vmap in nesting:
        for state in statetx.states(program).values():
            state.value = jax.tree.map(lambda v: jnp.stack([jnp.asarray(v)] * 3), state.value)
    call = statetx.functionalize(transformed(nesting, program.step, program))
    x = jnp.asarray(X)
    ours = compiled_counts(call, call.values(x), x)
    theirs = compiled_counts(by_hand(nesting, make), program.values(), x)
    assert ours == theirs


def test_equal_layers_share_one_trace():
    runs = []

    class Block:
        def __init__(self):
            self.w, self.count = statetx.Param(jnp.eye(3)), statetx.State(jnp.zeros((), jnp.int32))

        @statetx.remat
        def __call__(self, x):
            runs.append(None)
            self.count.value += 1
            return jnp.tanh(x @ self.w.value)

    blocks = [Block() for _ in range(24)]

    def loss(x):
        for block in blocks:
            x = block(x)
        return x.sum()

    statetx.clear_cache()
    statetx.jit(statetx.grad(loss))(jnp.ones(3))
    assert len(runs) == 24
    info = statetx.cache_info()
    assert isinstance(info, statetx.CacheInfo) and info.transforms["remat"] == (23, 1)
