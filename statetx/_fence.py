"""What keeps the recomputation of a rematerialised function from being merged with the first computation.

JAX puts a barrier between them, which XLA on CPUs removes too early. There the function is lowered as a branch that is
always taken and that no compiler can know to be. Nothing changes in tracing: how a function is fenced travels with its
policy.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import _compat
from ._compat import Jaxpr, Literal, Tracer


@dataclasses.dataclass(frozen=True)
class Fenced:
    """A policy that says how the function it is for is fenced: of its parameters, the one that JAX hands on untouched.

    Attributes:
        fence: "cond" to run the backward pass of the function in a branch, so that no compiler merges it with the
            forward pass or starts it early; "auto" for this where JAX's own barrier does not last: on CPUs before jaxlib 0.12.
    """

    policy: Any
    fence: str

    def __call__(self, *args: Any, **params: Any) -> Any:
        return self.policy is not None and self.policy(*args, **params)


def around(policy: Any, fence: str | None) -> Any:
    """The policy of a function that is fenced; JAX's own barrier is there anyway."""
    return Fenced(policy, fence) if fence in ("auto", "cond") else policy


def _lower(
    as_jax: Callable, ctx: Any, *args: Any, jaxpr: Jaxpr, differentiated: bool, policy: Any, **params: Any
) -> Any:
    drops_barriers = _compat.CPU_DROPS_BARRIERS and _compat.platforms(ctx) == ("cpu",)
    is_fenced = isinstance(policy, Fenced) and (policy.fence == "cond" or drops_barriers)
    # In shard_map a value's type says on which devices it differs, and both branches would have to agree on that.
    is_plain = not jaxpr.effects and not any(getattr(getattr(a, "mat", None), "varying", ()) for a in ctx.avals_in)
    # A size that is a symbol (jax.export) cannot be compared with others.
    is_plain = is_plain and all(isinstance(d, int) for a in ctx.avals_in for d in getattr(a, "shape", ()))
    if differentiated and is_fenced and is_plain and any(map(_has_bits, ctx.avals_in)):
        fenced = _fenced_jaxprs.get(jaxpr)
        if fenced is None:
            fenced = _fenced_jaxprs[jaxpr] = _fenced(jaxpr, ctx.avals_in)
        return as_jax(ctx, *args, jaxpr=fenced, differentiated=False, policy=None, prevent_cse=False)
    return as_jax(ctx, *args, jaxpr=jaxpr, differentiated=differentiated, policy=policy, **params)


_fenced_jaxprs: weakref.WeakKeyDictionary[Jaxpr, Jaxpr] = weakref.WeakKeyDictionary()
_compat.lower_remat_by(_lower)


def _fenced(jaxpr: Jaxpr, avals: Sequence[Any]) -> Jaxpr:
    """Run a jaxpr once all its inputs are there, in a branch that is always taken and that no compiler can know to be."""
    if any(eqn.primitive.name == "conv_general_dilated" for eqn in jaxpr.eqns):
        run, _ = _compat.stage(lambda *args: _with_canonical_convolutions(jaxpr, args), avals, kind="cond", name="run")
    else:
        run = jaxpr
    skip, _ = _compat.stage(lambda *_: [_empty_of(v.aval) for v in jaxpr.outvars], avals, kind="cond", name="skip")
    branches = (_compat.ClosedJaxpr(skip, ()), _compat.ClosedJaxpr(run, ()))
    # Where axes are explicit, the entry of a sharded array that tells that it is there is for the compiler to find.
    is_there = jax.sharding.auto_axes(_is_there, out_sharding=jax.P()) if _compat.has_explicit_axes() else _is_there
    both, _ = _compat.stage(
        lambda *args: _compat.cond_p.bind(is_there(args), *args, branches=branches), avals, kind="cond", name="fence"
    )
    return both


def _with_canonical_convolutions(jaxpr: Jaxpr, args: Sequence[Any]) -> list[Any]:
    """Run a jaxpr with each convolution on arrays in the order of dimensions that XLA has fast code for on CPUs.

    XLA puts them in that order itself, but only outside branches and loops (`ConvCanonicalization` visits the entry
    computation alone); derivatives of convolutions are in others, and were 20 times slower here.
    """
    env = dict(zip(jaxpr.invars, args, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else env[atom]

    for eqn in jaxpr.eqns:
        ins = [read(v) for v in eqn.invars]
        is_plain = eqn.params.get("batch_group_count") == 1 and eqn.params.get("out_sharding") is None
        if eqn.primitive.name == "conv_general_dilated" and is_plain:
            outs = [_canonical_convolution(*ins, **eqn.params)]
        else:
            outs = _compat.bind_equation(eqn, eqn.params, ins)
        env.update(zip(eqn.outvars, outs, strict=True))
    return [read(v) for v in jaxpr.outvars]


def _canonical_convolution(x: Any, kernel: Any, *, dimension_numbers: Any, **params: Any) -> Any:
    """The convolution with batch first and features last, inputs before outputs in the kernel."""
    (batch, feature, *space), (out, into, *window), found = dimension_numbers
    n = len(space)
    last = n + 1
    numbers = jax.lax.ConvDimensionNumbers((0, last, *range(1, last)), (last, n, *range(n)), (0, last, *range(1, last)))
    x, kernel = jax.lax.transpose(x, (batch, *space, feature)), jax.lax.transpose(kernel, (*window, into, out))
    result = jax.lax.conv_general_dilated_p.bind(x, kernel, dimension_numbers=numbers, **params)
    place = {found[0]: 0, found[1]: last, **{s: 1 + i for i, s in enumerate(found[2:])}}
    return jax.lax.transpose(result, [place[d] for d in range(n + 2)])


def _empty_of(aval: Any) -> Any:
    return jax.lax.full(aval.shape, 0, aval.dtype, sharding=None if aval.sharding.mesh.empty else aval.sharding)


def _is_there(args: Sequence[Any]) -> Any:
    """1, as computed from an entry of some arrays: whether a number has no more bits set than it has bits.

    A branch waits for all its operands, so it need not be computed from every one; but not from constants alone, as
    cotangents sometimes are.
    """
    given = [x for x in args if _has_bits(x.aval if isinstance(x, Tracer) else jax.typeof(x))]
    by_size = sorted(given, key=lambda x: (x.size, str(x.dtype), x.shape))  # whatever the order of the inputs
    chosen = {id(x): x for x in (by_size[0], by_size[-1], given[-1])}
    count: Any = np.int32(0)
    for x in chosen.values():
        entry = jax.lax.reshape(jax.lax.slice(x, [0] * x.ndim, [1] * x.ndim), ())
        entry = jax.lax.real(entry) if jnp.iscomplexobj(entry) else entry
        bits = jax.lax.bitcast_convert_type(entry, jnp.dtype(f"uint{8 * entry.dtype.itemsize}"))
        count = jax.lax.add(count, jax.lax.convert_element_type(jax.lax.population_count(bits), np.int32))
    return jax.lax.convert_element_type(jax.lax.le(count, np.int32(64 * len(chosen))), np.int32)


def _has_bits(aval: Any) -> bool:
    """Whether the array has an entry that is a number of whole bytes."""
    if not (getattr(aval, "size", 0) and jnp.issubdtype(aval.dtype, jnp.number)):
        return False
    if jnp.issubdtype(aval.dtype, jnp.complexfloating):
        return True
    info = jnp.iinfo if jnp.issubdtype(aval.dtype, jnp.integer) else jnp.finfo
    return info(aval.dtype).bits == 8 * aval.dtype.itemsize
