"""Regions that compute their inputs again from what earlier regions keep."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from helpers import decided, flat
from statetx import _jax
from statetx._lift.context import TraceContext
from statetx.planner._search.capture import Recorded
from statetx.planner._search.lattice import Lattice, cost_of
from statetx.planner._treatments import TREATMENTS, rewrite
from statetx.planner._treatments.inputs import Derived
from statetx.planner._treatments.treatment import Settings

X = jnp.linspace(0, 1, 256 * 64).reshape(256, 64)
WS = [(jnp.full((64, 64), 0.01 * (i + 1)), jnp.full((64, 64), 0.02)) for i in range(4)]


def stream(ws, x):
    """Each layer adds a function of a product, which the backward pass reads, to the stream."""
    for a, b in ws:
        x = jnp.tanh(x + jnp.sin(jnp.cos(x @ a) @ b))
    return (x**2).mean()


def residual(ws, x):
    """Each layer adds a product: the backward pass reads the sum, not the product."""
    for a, b in ws:
        x = x + jnp.cos(x @ a) @ b
    return (x**2).mean()


def names(program, variables):
    return [e.primitive.name for e in program.jaxpr.eqns for v in e.outvars if v in variables]


def test_a_stream_is_derived_from_the_products_that_the_backward_pass_reads():
    program = flat(stream, WS, X)
    copies = Derived(program.jaxpr)
    tanhs = [e.outvars[0] for e in program.jaxpr.eqns if e.primitive.name == "tanh"]
    assert [names(program, copies.sources[v]) for v in tanhs] == [["dot_general"] * n for n in (1, 2, 3, 4)]
    assert not {"dot_general", "reduce_sum"} & {*names(program, copies.sources)}


def test_a_sum_of_products_is_kept_itself():
    program = flat(residual, WS, X)
    copies = Derived(program.jaxpr)
    derived = names(program, copies.sources)
    assert (derived.count("add"), derived.count("cos")) == (1, 4), (
        "the first sum has one computed term, to keep in its place"
    )


def test_a_deep_stream_is_kept_once_in_a_while():
    program = flat(stream, WS * 5, X)
    copies = Derived(program.jaxpr)
    tanhs = [e.outvars[0] for e in program.jaxpr.eqns if e.primitive.name == "tanh"]
    assert max(len(copies.sources[v]) for v in tanhs) < 12 < len(tanhs)


def test_copies_take_less_memory_and_compute_the_same():
    program = flat(stream, WS, X)
    parts = program.split([0, 6, 12, 18])
    assert [p.jaxpr.eqns[0].primitive.name for p in parts] == ["dot_general"] * 4
    keep = [(2, 0)]  # the second product of each layer
    planned = {c: rewrite(program.jaxpr, parts, [decided(keep, copies=c)] * 4) for c in (False, True)}
    indices = list(range(len(program.jaxpr.invars)))
    recorded = Recorded(program.jaxpr, 1, indices, indices, TraceContext())
    cost = {c: recorded.program(jaxpr, None).cost for c, jaxpr in planned.items()}
    assert cost[True].temp_bytes <= cost[False].temp_bytes - 1.9 * X.nbytes, (
        "of three inputs two at a time are not kept"
    )
    assert cost[True].flops <= 1.01 * cost[False].flops

    args = [*jax.tree.leaves(WS), X]
    runs = [lambda *xs, j=j: _jax.evaluate(j, (), xs)[0] for j in (program.jaxpr, planned[True])]
    expected, found = (jax.jit(jax.grad(run, tuple(indices)))(*args) for run in runs)
    for a, b in zip(expected, found, strict=True):
        assert jnp.allclose(a, b, rtol=1e-4, atol=1e-7)
    again = [jax.grad(lambda *xs, run=run: jnp.sum(jax.grad(run, 1)(*xs) ** 2), tuple(indices)) for run in runs]
    for a, b in zip(*(jax.jit(second)(*args) for second in again), strict=True):
        assert jnp.any(a) and jnp.allclose(a, b, rtol=1e-3, atol=1e-5 * jnp.abs(a).max()), "second derivatives"
    backward = [
        e for e in jax.make_jaxpr(jax.grad(runs[1], tuple(indices)))(*args).eqns if e.primitive.name == "remat2"
    ]
    assert sorted(sum(v.aval.shape == X.shape for v in e.invars) for e in backward) == [3, 4, 5, 5], (
        "no value beside its copy"
    )
    tangents = [jnp.ones_like(x) for x in args]
    expected, found = (jax.jvp(run, args, tangents) for run in runs)
    assert jnp.allclose(jnp.stack(expected), jnp.stack(found), rtol=1e-5)


def test_paths_that_copy_are_cheaper_by_the_model():
    program = flat(stream, WS, X)
    families = Lattice(program, range(9), 1, Settings(treatments=TREATMENTS)).families
    assert len(families) == 2
    limit = 1.3 * families[0].least_peak()
    reference, copying = families[0].choose(limit), families[-1].choose(limit)
    assert reference is not None and copying is not None
    assert cost_of(copying) < 0.9 * cost_of(reference)
