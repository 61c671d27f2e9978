"""What keeps the recomputation of a rematerialised function from being merged with the first computation.

JAX puts a barrier between them, which XLA on CPUs removes too early. There the function is lowered as a branch that is
always taken and that no compiler can know to be. Nothing changes in tracing: how a function is fenced travels with its
policy.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo as hlo

from .. import _jax
from .._jax import Jaxpr


@dataclasses.dataclass(frozen=True)
class Fenced:
    """A policy that says how the function it is for is fenced: of its parameters, the one that JAX hands on untouched.

    Attributes:
        fence: "cond" to run the backward pass of the function in a branch, so that no compiler merges it with the
            forward pass or starts it early; "auto" for this where JAX's own barrier does not last: on CPUs before jaxlib 0.11.1.
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
    drops_barriers = _jax.CPU_DROPS_BARRIERS and _jax.platforms(ctx) == ("cpu",)
    is_fenced = isinstance(policy, Fenced) and (policy.fence == "cond" or drops_barriers)
    # In shard_map a value's type says on which devices it differs, and both branches would have to agree on that.
    is_plain = not jaxpr.effects and not any(getattr(getattr(a, "mat", None), "varying", ()) for a in ctx.avals_in)
    avals = (*ctx.avals_in, *ctx.avals_out)
    # A size that is a symbol (jax.export) cannot be compared with others.
    is_plain = is_plain and all(isinstance(d, int) for a in avals for d in getattr(a, "shape", ()))
    if not (differentiated and is_fenced and is_plain and any(map(_has_bits, ctx.avals_in))):
        return as_jax(ctx, *args, jaxpr=jaxpr, differentiated=differentiated, policy=policy, **params)
    if any(eqn.primitive.name == "conv_general_dilated" for eqn in jaxpr.eqns):
        jaxpr = _in_canonical_order(jaxpr)
    # A branch that is always taken, and that no compiler can know to be.
    types = [_jax.ir_type(aval) for aval in ctx.avals_out]
    is_divided = _jax.num_devices(ctx) > 1 and _jax.platforms(ctx) == ("cpu",)
    index = _not_zero_anywhere() if is_divided else _not_zero(args, ctx.avals_in)
    branches = hlo.CaseOp(types, index, num_branches=2)
    with ir.InsertionPoint(branches.regions[0].blocks.append()):
        hlo.return_([_zeros(t) for t in types])
    with ir.InsertionPoint(branches.regions[1].blocks.append()):
        hlo.return_(as_jax(ctx, *args, jaxpr=jaxpr, differentiated=False, policy=None, prevent_cse=False))
    return [_jax.with_sharding(ctx, x, aval) for x, aval in zip(branches.results, ctx.avals_out, strict=True)]


_jax.set_remat_lowering(_lower)


def _not_zero(args: Sequence[Any], avals: Sequence[Any]) -> Any:
    """A number that is not zero, as computed from the bits of an entry of some arrays.

    A branch waits for all its operands, so it need not be computed from every one; but not from constants alone, as
    cotangents sometimes are. The smallest and the largest are parameters mostly: reading what is computed in the program
    makes XLA fuse anew, which took 1.4 times as long to compile.
    """
    given = [n for n, aval in enumerate(avals) if _has_bits(aval)]
    by_size = sorted(given, key=lambda n: (avals[n].size, str(avals[n].dtype), avals[n].shape))  # in whatever order
    number = _int32(2)
    for n in dict.fromkeys((by_size[0], by_size[-1], given[-1])):
        number = hlo.or_(number, _bits_of_entry(args[n], avals[n]))
    return number


def _not_zero_anywhere() -> Any:
    """The same for CPU programs of several devices, where reading an entry of a divided array would take a collective.

    XLA's partitioner does not change a replica's number, and its CPU passes do not fold it, though a partitioned program has one
    replica only.
    """
    return hlo.or_(_int32(2), hlo.convert(_scalar(ir.IntegerType.get_signless(32)), hlo.replica_id()))


def _bits_of_entry(x: Any, aval: Any) -> Any:
    """The bits of an array's first entry, as an int32."""
    if aval.ndim:
        first = hlo.slice(x, *(ir.DenseI64ArrayAttr.get([n] * aval.ndim) for n in (0, 1, 1)))
        x = hlo.reshape(_scalar(x.type.element_type), first)
    if jnp.issubdtype(aval.dtype, jnp.complexfloating):
        x = hlo.real(x)
    width = x.type.element_type.width
    bits = hlo.bitcast_convert(_scalar(ir.IntegerType.get_signless(width)), x)
    return bits if width == 32 else hlo.convert(_scalar(ir.IntegerType.get_signless(32)), bits)


def _zeros(kind: Any) -> Any:
    zero = hlo.convert(_scalar(kind.element_type), _int32(0))
    return hlo.broadcast_in_dim(kind, zero, ir.DenseI64ArrayAttr.get([]))


def _int32(value: int) -> Any:
    kind = ir.IntegerType.get_signless(32)
    return hlo.constant(ir.DenseElementsAttr.get_splat(_scalar(kind), ir.IntegerAttr.get(kind, value)))


def _scalar(element: Any) -> Any:
    return ir.RankedTensorType.get((), element)


def _in_canonical_order(jaxpr: Jaxpr) -> Jaxpr:
    """The jaxpr with each convolution on arrays in the order of dimensions that XLA has fast code for on CPUs.

    XLA puts them in that order itself, but only outside branches and loops (`ConvCanonicalization` visits the entry
    computation alone); derivatives of convolutions are in others, and were 20 times slower here.
    """
    run = functools.partial(_with_canonical_convolutions, jaxpr)
    return _jax.stage(run, [v.aval for v in jaxpr.invars], traced_for="remat", name="checkpoint")[0]


def _with_canonical_convolutions(jaxpr: Jaxpr, *args: Any) -> list[Any]:
    def rule(eqn: Any, operands: list[Any]) -> list[Any]:
        is_plain = eqn.params.get("batch_group_count") == 1 and eqn.params.get("out_sharding") is None
        if eqn.primitive.name == "conv_general_dilated" and is_plain:
            return [_canonical_convolution(*operands, **eqn.params)]
        return _jax.bind_equation(eqn, eqn.params, operands)

    return _jax.interpret(jaxpr, args, rule)


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


def _has_bits(aval: Any) -> bool:
    """Whether the array has an entry that is a number of whole bytes."""
    if not (getattr(aval, "size", 0) and jnp.issubdtype(aval.dtype, jnp.number)):
        return False
    if jnp.issubdtype(aval.dtype, jnp.complexfloating):
        return True
    info = jnp.iinfo if jnp.issubdtype(aval.dtype, jnp.integer) else jnp.finfo
    return info(aval.dtype).bits == 8 * aval.dtype.itemsize
