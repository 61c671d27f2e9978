"""The fence: keep XLA from merging the recomputation of a rematerialized function with its first computation.

JAX separates them by an optimization barrier, which XLA:CPU removes before it merges common subexpressions (jaxlib
before 0.11.1; decision 8). Newer ones remove it before they order the operations, and start loops and independent
recomputations early. On CPUs the function is lowered as a branch that is always taken, on an index that no compiler can
evaluate. Tracing does not change: the fence travels with the policy, the only parameter of the remat primitive that JAX
forwards unread (decision 14 has the form of the branch).

On GPUs the barrier lasts, but not for constants: the arrays that loops of a region fill wait behind one of their own
(decision 56).
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
from .._tree import has_known_sizes

_GPUS = {"cuda", "rocm"}


@dataclasses.dataclass(frozen=True)
class Fenced:
    """A policy that also says how to fence its function.

    Attributes:
        policy: the policy, as JAX takes it; None to save nothing.
        fence: ``"cond"`` to run the recomputation and the backward pass in a branch, so that no compiler merges them
            with the forward pass or starts them early; ``"auto"`` to do so only where JAX's own barrier does not last:
            on CPUs. With ``"auto"``, loops begin late on GPUs.
    """

    policy: Any
    fence: str

    def __call__(self, *args: Any, **params: Any) -> Any:
        return self.policy is not None and self.policy(*args, **params)


def with_fence(policy: Any, fence: str | None) -> Any:
    """The policy, wrapped in `Fenced` if the function is fenced. JAX's own barrier does not depend on it."""
    return Fenced(policy, fence) if fence in ("auto", "cond") else policy


def _lower(
    as_jax: Callable, ctx: Any, *args: Any, jaxpr: Jaxpr, differentiated: bool, policy: Any, **params: Any
) -> Any:
    if isinstance(policy, _jax.Ordered):
        return _lower_in_order(as_jax, ctx, *args, jaxpr=jaxpr)
    is_fenced = isinstance(policy, Fenced) and (policy.fence == "cond" or _jax.platforms(ctx) == ("cpu",))

    # The undifferentiated function is the first computation: only the recomputation, which has the cotangents among
    # its inputs, goes into the branch.
    if not (differentiated and is_fenced and _is_plain(ctx)):
        outs = as_jax(ctx, *args, jaxpr=jaxpr, differentiated=differentiated, policy=policy, **params)
        if differentiated and isinstance(policy, Fenced) and _GPUS.issuperset(_jax.platforms(ctx)):
            if any(eqn.primitive.name in ("scan", "while") for eqn in _jax.equations_in(jaxpr)):
                _begin_loops_late(ctx, outs, [*args, *_jax.tokens_before(ctx, jaxpr).values()])
        return outs
    if any(eqn.primitive.name == "conv_general_dilated" for eqn in jaxpr.eqns):
        jaxpr = in_canonical_order(jaxpr)
    return _lower_as_branch(as_jax, ctx, *args, jaxpr=jaxpr)


def _is_plain(ctx: Any) -> bool:
    """Whether a function can be lowered as a branch."""
    # It may contain collectives, as for a weight's cotangent in shard_map: all devices take the branch.
    return all(map(has_known_sizes, (*ctx.avals_in, *ctx.avals_out))) and any(map(_has_bits, ctx.avals_in))


def _lower_as_branch(as_jax: Callable, ctx: Any, *args: Any, jaxpr: Jaxpr) -> Any:
    # Branch 1 is always taken: the index is never 0, and an index beyond the last branch means the last.
    types = [_jax.ir_type(aval) for aval in ctx.avals_out]
    tokens = _jax.tokens_before(ctx, jaxpr)  # side effects keep their order: the branch passes their tokens on
    is_divided = _jax.num_devices(ctx) > 1 and _jax.platforms(ctx) == ("cpu",)
    index = _nonzero_from_replica() if is_divided else _nonzero_from_arrays(args, ctx.avals_in)
    branches = hlo.CaseOp([*(token.type for token in tokens.values()), *types], index, num_branches=2)
    with ir.InsertionPoint(branches.regions[0].blocks.append()):
        hlo.return_([*tokens.values(), *(_zeros(t) for t in types)])
    with ir.InsertionPoint(branches.regions[1].blocks.append()):
        # Called so, JAX's rule adds no barrier: the branch takes its place.
        lower = lambda ctx: as_jax(ctx, *args, jaxpr=jaxpr, differentiated=False, policy=None, prevent_cse=False)
        outs, token_after = _jax.lower_inside(ctx, lower)
        hlo.return_([*map(token_after, tokens), *outs])
    new_tokens, outs = branches.results[: len(tokens)], branches.results[len(tokens) :]
    _jax.set_tokens(ctx, dict(zip(tokens, new_tokens, strict=True)))
    return [_jax.with_sharding(ctx, x, aval) for x, aval in zip(outs, ctx.avals_out, strict=True)]


def _begin_loops_late(ctx: Any, outs: Sequence[Any], inputs: Sequence[Any]) -> None:
    """Let what the loops of a lowered region begin with, and is the same for all, wait for their other operands.

    The arrays that a scan fills are constants, which XLA for GPUs makes when the program starts, those of all regions
    at once (decision 56).
    """
    waiting, seen = [*outs], {*inputs}
    while waiting:
        x = waiting.pop()
        if x in seen or isinstance(x.owner, ir.Block):
            continue
        op = x.owner
        seen.update(op.results)
        waiting += op.operands
        if op.name == "stablehlo.while":
            _begin_with_operands(op)
        elif op.name == "func.call" and (function := _jax.function_called(ctx, op)) not in seen:
            seen.add(function)
            block = function.regions[0].blocks[0]
            waiting += block.operations[len(block.operations) - 1].operands


def _begin_with_operands(loop: Any) -> None:
    filled = {n: ops for n, x in enumerate(loop.operands) if (ops := _from_constant(x))}
    computed = (x for n, x in enumerate(loop.operands) if n not in filled and not _is_op(x, "stablehlo.constant"))
    awaited = [x for x in computed if isinstance(x.type, ir.RankedTensorType)]  # not a token
    if not (filled and awaited):
        return
    with ir.InsertionPoint(loop), loop.location:
        numbers = hlo.OptimizationBarrierOp([*(ops[-1].operands[0] for ops in filled.values()), *awaited]).results
        for (n, ops), x in zip(filled.items(), numbers, strict=False):
            for op in reversed(ops):
                op = op.operation.clone()
                op.operands[0] = x
                x = op.results[0]
            loop.operands[n] = x


def _from_constant(x: Any) -> list[Any]:
    """The operations that make an array of a constant number, last first; empty for any other value."""
    ops = []
    while _is_op(x, "stablehlo.broadcast_in_dim", "sdy.sharding_constraint"):
        ops.append(x.owner)
        x = x.owner.operands[0]
    return ops if _is_op(x, "stablehlo.constant") else []


def _is_op(x: Any, *names: str) -> bool:
    return not isinstance(x.owner, ir.Block) and x.owner.name in names


def _lower_in_order(as_jax: Callable, ctx: Any, *args: Any, jaxpr: Jaxpr) -> Any:
    """Lower a forward pass that stores values in fewer bits, such that it ends before anything that reads its results
    begins.

    XLA:CPU's scheduler starts whatever is ready, and would encode late. It runs a branch as a whole; a barrier has no
    effect on it.
    """
    if _jax.platforms(ctx) == ("cpu",) and _is_plain(ctx):
        return _lower_as_branch(as_jax, ctx, *args, jaxpr=jaxpr)
    outs = as_jax(ctx, *args, jaxpr=jaxpr, differentiated=False, policy=None, prevent_cse=False)
    results = hlo.OptimizationBarrierOp(outs).results
    return [_jax.with_sharding(ctx, x, aval) for x, aval in zip(results, ctx.avals_out, strict=True)]


_jax.set_remat_lowering(_lower)


_MAX_AWAITED = 64  # of the arrays that a value waits for: an entry of each is read


def _lower_hold(ctx: Any, x: Any, *awaited: Any, **_: Any) -> list[Any]:
    """Lower a value that waits for others. XLA on CPUs starts early across a barrier, so it selects the value by an
    index that the others determine.
    """
    aval, *other_avals = ctx.avals_in
    is_one_cpu = _jax.platforms(ctx) == ("cpu",) and _jax.num_devices(ctx) == 1
    with_bits = [(y, a) for y, a in zip(awaited, other_avals, strict=True) if has_known_sizes(a) and _has_bits(a)]
    if not (is_one_cpu and has_known_sizes(aval) and _has_bits(aval) and with_bits):
        return [_jax.with_sharding(ctx, hlo.OptimizationBarrierOp([x, *awaited]).results[0], aval)]
    number = _int32(2)
    for y, a in with_bits[:: -(-len(with_bits) // _MAX_AWAITED)]:
        number = hlo.or_(number, _bits_of_entry(y, a))
    return [hlo.select(hlo.compare(number, _int32(0), hlo.ComparisonDirectionAttr.get("NE")), x, _zeros(x.type))]


_jax.set_hold_lowering(_lower_hold)


def _nonzero_from_arrays(args: Sequence[Any], avals: Sequence[Any]) -> Any:
    """An int32 that is never zero, computed from the bits of one entry of up to three arrays.

    A branch waits for all its operands whatever its index reads, so the index need not read all of them. One alone may
    be a constant, as cotangents sometimes are, and a compiler would then evaluate the index. The smallest and the
    largest array are parameters in most programs: an entry of a computed array is fused with its producer, which took
    1.4 times as long to compile (decision 14).
    """
    candidates = [n for n, aval in enumerate(avals) if _has_bits(aval)]
    # Ties are broken by dtype and shape, so that the order of the inputs does not matter.
    by_size = sorted(candidates, key=lambda n: (avals[n].size, str(avals[n].dtype), avals[n].shape))
    number = _int32(2)
    for n in dict.fromkeys((by_size[0], by_size[-1], candidates[-1])):
        number = hlo.or_(number, _bits_of_entry(args[n], avals[n]))
    return number


def _nonzero_from_replica() -> Any:
    """An int32 that is never zero, for CPU programs of several devices.

    To read an entry of a divided array would take a collective. XLA's partitioner does not change a replica's number,
    and its CPU passes do not fold it, although a partitioned program has only one replica.
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


def _zeros(tensor_type: Any) -> Any:
    zero = hlo.convert(_scalar(tensor_type.element_type), _int32(0))
    return hlo.broadcast_in_dim(tensor_type, zero, ir.DenseI64ArrayAttr.get([]))


def _int32(value: int) -> Any:
    element_type = ir.IntegerType.get_signless(32)
    return hlo.constant(ir.DenseElementsAttr.get_splat(_scalar(element_type), ir.IntegerAttr.get(element_type, value)))


def _scalar(element_type: Any) -> Any:
    return ir.RankedTensorType.get((), element_type)


def _has_bits(aval: Any) -> bool:
    """Whether the array has an entry, and entries are numbers of whole bytes (int4 is not)."""
    if not (getattr(aval, "size", 0) and jnp.issubdtype(aval.dtype, jnp.number)):
        return False
    if jnp.issubdtype(aval.dtype, jnp.complexfloating):
        return True
    info = jnp.iinfo if jnp.issubdtype(aval.dtype, jnp.integer) else jnp.finfo
    return info(aval.dtype).bits == 8 * aval.dtype.itemsize


# -- convolutions in a branch ----------------------------------------------------------------------------------------

# XLA:CPU has fast code for one order of a convolution's dimensions. It rewrites others, but not in branches and loops:
# `ConvCanonicalization` visits the entry computation alone. Derivatives of convolutions have other orders, and within
# the fence's branch they took the generic loop nest, 20 times
# slower (decision 12).


def in_canonical_order(jaxpr: Jaxpr) -> Jaxpr:
    """The jaxpr with each of its convolutions on transposed arrays, in XLA's order; convolutions of inner jaxprs do not
    change.
    """
    run = functools.partial(_with_canonical_convolutions, jaxpr)
    return _jax.stage(run, [v.aval for v in jaxpr.invars], traced_for="remat", name="checkpoint")[0]


def _with_canonical_convolutions(jaxpr: Jaxpr, *args: Any) -> list[Any]:
    def rule(eqn: Any, operands: list[Any]) -> list[Any]:
        # An explicit `out_sharding` names dimensions, and would have to be transposed as well.
        if eqn.primitive.name == "conv_general_dilated" and eqn.params.get("out_sharding") is None:
            return [_canonical_convolution(*operands, **eqn.params)]
        return _jax.bind_equation(eqn, eqn.params, operands)

    return _jax.interpret(jaxpr, args, rule)


def _canonical_convolution(
    x: Any, kernel: Any, *, dimension_numbers: Any, batch_group_count: int, feature_group_count: int, **params: Any
) -> Any:
    """The convolution with batch first and features last, inputs before outputs in the kernel, without groups of the
    batch.
    """
    (batch, feature, *space), (kernel_out, kernel_in, *window), out_spec = dimension_numbers
    n = len(space)
    last = n + 1
    # With two dimensions of space: NHWC for inputs and results, HWIO for the kernel. The positions are listed in the
    # order batch, features, space; of the kernel as output features, input features, window.
    canonical = jax.lax.ConvDimensionNumbers(
        (0, last, *range(1, last)), (last, n, *range(n)), (0, last, *range(1, last))
    )
    x = jax.lax.transpose(x, (batch, *space, feature))
    kernel = jax.lax.transpose(kernel, (*window, kernel_in, kernel_out))
    if batch_group_count > 1:
        # The derivative of a convolution in groups of features, by its kernel. Group g of the batch meets group g of
        # the output features, as group g of the features does.
        x, feature_group_count = _batch_groups_as_features(x, batch_group_count), batch_group_count
    groups = {"batch_group_count": 1, "feature_group_count": feature_group_count}
    result = jax.lax.conv_general_dilated_p.bind(x, kernel, dimension_numbers=canonical, **groups, **params)

    # Where each dimension of the original result is in the canonical one: batch, features, then space.
    canonical_position = {out_spec[0]: 0, out_spec[1]: last, **{s: 1 + i for i, s in enumerate(out_spec[2:])}}
    return jax.lax.transpose(result, [canonical_position[d] for d in range(n + 2)])


def _batch_groups_as_features(x: Any, num_groups: int) -> Any:
    """The array, batch first and features last, with the groups of its batch in front of its features."""
    size, *space, num_features = x.shape
    x = jax.lax.reshape(x, (num_groups, size // num_groups, *space, num_features))
    x = jax.lax.transpose(x, (*range(1, x.ndim - 1), 0, x.ndim - 1))
    return jax.lax.reshape(x, (size // num_groups, *space, num_groups * num_features))
