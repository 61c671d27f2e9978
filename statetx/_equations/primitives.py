"""The table of primitives: one row for each, with everything that statetx knows about it by name.

A primitive without a row counts as an operation on arrays: its result has a new buffer and costs one operation for each
entry. A wrong or missing row makes reported costs larger or recomputes more; it never changes a computed value. Other
sets of names are projections of `TABLE`.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Callable, Iterable
from fractions import Fraction
from typing import Any

from .. import _jax
from .._jax import Jaxpr
from .._tree import has_known_sizes, num_bytes
from . import blocks


class Forwards(enum.IntEnum):
    """Forwarding: the share of its first operand that a primitive hands to its result."""

    NOTHING = 0
    ENTRIES = 1  # the same entries in another shape, type or memory: the state they come from is still known
    VALUE = 2  # the operand itself: provenance names the operation that computed it


class Runs(enum.Enum):
    """How a primitive runs the jaxpr in its parameters."""

    NOT = 0
    ONCE = 1  # on its operands, for its results
    LOOP = 2
    BRANCH = 3
    PRIMAL = 4  # only if it is not differentiated; otherwise its rule runs


@dataclasses.dataclass(frozen=True)
class PrimitiveRow:
    """One primitive.

    Attributes:
        is_view: the result is free to recompute, so a policy saves it only by name or by primitive.
        forwards: how much of its first operand the result is.
        is_fill: the result is a broadcast operand, or uninitialized memory.
        is_label: it describes a value and computes nothing, so a listing needs no line for it.
        fuses: XLA fuses it into its consumers, so the result has no buffer unless another operation reads it.
        reads_fused: XLA fuses its operands into it.
        places: it determines the sharding or memory of arrays.
        runs, jaxpr: how it runs a jaxpr, and the name of the parameter that holds it (a tuple of jaxprs for branches).
        is_inlined: a listing or the planner's graph may show its equations in its place.
        flops: operations of an equation; None: one for each entry of the largest result.
        is_linear: the result is linear in its float operands together, as a sum is.
        is_elementwise: an entry of a result is a function of the entries of the operands at its place, and of numbers.
        bits: the operands that make a result of zeros and ones if they have no other entries, ``slice(0)`` if any do;
            None if the operands alone do not.
        block: the rule for a block of rows of an equation (`blocks`); None: not known.
    """

    is_view: bool = False
    forwards: Forwards = Forwards.NOTHING
    is_fill: bool = False
    is_label: bool = False
    fuses: bool = False
    reads_fused: bool = False
    places: bool = False
    runs: Runs = Runs.NOT
    jaxpr: str = ""
    is_inlined: bool = False
    flops: Callable[[Any], float] | None = None
    is_linear: bool = False
    is_elementwise: bool = False
    bits: slice | None = None
    block: Callable[[Any, int], blocks.Rowwise | None] | None = None


# -- floating-point operations ---------------------------------------------------------------------------------------


def size(atom: Any) -> int:
    return math.prod(getattr(atom.aval, "shape", ()))


def _free(eqn: Any) -> int:
    return 0


def _dot(eqn: Any) -> int:
    (contracted, _), _ = eqn.params["dimension_numbers"]
    return 2 * size(eqn.outvars[0]) * math.prod(eqn.invars[0].aval.shape[d] for d in contracted)


def _conv(eqn: Any) -> int:
    # Each entry of the result is a sum over the kernel of one output channel, which holds the channels of one group.
    kernel = eqn.invars[1].aval.shape
    out_channels = kernel[eqn.params["dimension_numbers"].rhs_spec[0]]
    return 2 * size(eqn.outvars[0]) * math.prod(kernel) // max(out_channels, 1)


def _fft(eqn: Any) -> float:
    length = max(math.prod(eqn.params["fft_lengths"]), 2)
    return 5 * max(size(eqn.invars[0]), size(eqn.outvars[0])) * math.log2(length)  # Cooley and Tukey


def _sort(eqn: Any) -> float:
    shape = eqn.invars[0].aval.shape
    length = shape[eqn.params.get("dimension", -1)] if shape else 1
    return size(eqn.invars[0]) * math.log2(max(length, 2))


def _top_k(eqn: Any) -> float:
    return size(eqn.invars[0]) * math.log2(max(eqn.params["k"], 2))


def _matrices(factor: float) -> Callable[[Any], float]:
    """``factor m n min(m, n)`` for each m x n matrix of the first operand: leading terms of Golub and Van Loan."""

    def rule(eqn: Any) -> float:
        *_, m, n = eqn.invars[0].aval.shape
        return factor * size(eqn.invars[0]) * min(m, n)

    return rule


def _triangular_solve(eqn: Any) -> int:
    return size(eqn.invars[1]) * eqn.invars[0].aval.shape[-1]


def _window(operand: Callable[[Any], Any]) -> Callable[[Any], int]:
    return lambda eqn: size(operand(eqn)) * math.prod(eqn.params["window_dimensions"])


def _of_operand(index: int) -> Callable[[Any], int]:
    return lambda eqn: size(eqn.invars[index])


def _of_result(factor: float) -> Callable[[Any], float]:
    return lambda eqn: factor * size(eqn.outvars[0])


def _power(eqn: Any) -> int:
    return size(eqn.outvars[0]) * max(abs(eqn.params["y"]).bit_length(), 1)  # repeated squaring


_ROUNDS = 20
_THREEFRY = 5 * _ROUNDS + 3 * 5  # a 20-round block: add, rotate (3), xor a round; a key injection every fourth


# -- the rows --------------------------------------------------------------------------------------------------------


def _rows(names: str, **facts: Any) -> dict[str, PrimitiveRow]:
    return dict.fromkeys(names.split(), PrimitiveRow(**facts))


_ENTRIES, _VALUE = Forwards.ENTRIES, Forwards.VALUE

TABLE: dict[str, PrimitiveRow] = {
    # The result is the operand.
    **_rows(f"name {_jax.mark_primitive.name}", is_view=True, forwards=_VALUE, is_label=True, fuses=True, flops=_free),
    **_rows("statetx_stored statetx_attach", is_view=True, forwards=_VALUE, is_label=True, fuses=True, flops=_free),
    **_rows("statetx_with_tangent_of", fuses=True, flops=_free),
    **_rows("statetx_link", is_view=True, forwards=_ENTRIES, is_label=True, fuses=True, flops=_free),
    **_rows(_jax.runs_primitive.name, is_view=True, forwards=_VALUE, is_label=True, fuses=True, flops=_free),
    **_rows("reduce_precision", forwards=_VALUE, is_label=True, fuses=True, flops=_free),
    **_rows("copy copy_p statetx_batch_first", is_view=True, forwards=_VALUE, fuses=True, flops=_free),
    **_rows("pvary", is_view=True, forwards=_VALUE, fuses=True, flops=_free),  # in shard_map: it counts as varying
    **_rows(_jax.note_primitive.name, is_view=True, forwards=_VALUE, is_label=True, fuses=True, flops=_free),
    **_rows(_jax.hold_primitive.name, forwards=_VALUE, flops=_free),
    **_rows("optimization_barrier", forwards=_VALUE, flops=_free),
    **_rows("device_put", forwards=_VALUE, places=True, flops=_free),
    # The result has the entries of the operand.
    **_rows("reshape transpose squeeze expand_dims", is_view=True, forwards=_ENTRIES, fuses=True, flops=_free),
    **_rows("broadcast_in_dim", is_view=True, forwards=_ENTRIES, is_fill=True, fuses=True, flops=_free),
    **_rows("reduced_vary_cast_p vary_unreduced_cast_p", is_view=True, forwards=_ENTRIES, fuses=True, flops=_free),
    **_rows("convert_element_type", forwards=_ENTRIES, fuses=True, flops=_free),
    **_rows("sharding_constraint reshard", forwards=_ENTRIES, places=True, flops=_free),
    # Moves of data.
    **_rows("empty empty2", is_fill=True, flops=_free),
    **_rows("imag iota pad real rev select_n slice stop_gradient", fuses=True, flops=_free),
    **_rows(
        "axis_index bitcast_convert_type concatenate create_token dynamic_slice dynamic_update_slice gather "
        "random_seed random_unwrap random_wrap scatter split statetx_notice symbolic_zeros tie_in unvmap_any",
        flops=_free,
    ),
    # Elementwise operations: one operation an entry (a sine counts as much as a sum).
    **_rows(
        "abs acos acosh add add_any and asin asinh atan atan2 atanh cbrt ceil clamp cos cosh div eq erf erf_inv erfc "
        "exp exp2 expm1 floor ge gt is_finite le lgamma log log1p log2 logistic lt max min mul ne neg not "
        "one_minus_square or pow rem round rsqrt shift_left shift_right_arithmetic shift_right_logical sign sin sinh "
        "sqrt square sub tan tanh xor",
        fuses=True,
        is_elementwise=True,
    ),
    **_rows("integer_pow", fuses=True, flops=_power, is_elementwise=True),
    # The spike of braintools' surrogate gradients: a comparison.
    **_rows("heaviside_surrogate_gradient", fuses=True, bits=slice(0)),
    # Reductions: one operation an entry of the operand.
    **_rows(
        "argmax argmin reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum",
        reads_fused=True,
        flops=_of_operand(0),
    ),
    **_rows("reduce_window_max reduce_window_min reduce_window_sum", flops=_window(lambda eqn: eqn.outvars[0])),
    **_rows("select_and_scatter_add", flops=_window(lambda eqn: eqn.invars[1])),
    **_rows("scatter-add scatter_add scatter-mul scatter_mul", flops=_of_operand(2)),
    # Products, factorizations, transforms.
    **_rows("dot_general", flops=_dot),
    **_rows("conv_general_dilated", flops=_conv),
    # For square matrices n^3 / 3 (Cholesky), 2 n^3 / 3 (LU), 4 n^3 / 3 (Householder QR), and as much again to form Q.
    **_rows("cholesky", flops=_matrices(1 / 3)),
    **_rows("lu", flops=_matrices(2 / 3)),
    **_rows("geqrf householder_product", flops=_matrices(4 / 3)),
    **_rows("qr", flops=_matrices(8 / 3)),
    # With vectors: 9 n^3 (symmetric QR), 21 n^3 (Golub and Reinsch), 25 n^3 (unsymmetric QR: the Schur form and its
    # basis).
    **_rows("eigh", flops=_matrices(9)),
    **_rows("svd", flops=_matrices(21)),
    **_rows("eig", flops=_matrices(25)),
    **_rows("triangular_solve", flops=_triangular_solve),
    **_rows("fft", flops=_fft),
    **_rows("sort", flops=_sort),
    **_rows("top_k", flops=_top_k),
    **_rows("threefry2x32 random_split random_fold_in", flops=_of_result(_THREEFRY)),
    # One block of threefry has two words of 32 bits.
    **_rows("random_bits", flops=_of_result(_THREEFRY / 2)),
    # Calls, loops, branches. JAX asks its policies about the equations within, not about the operation.
    **_rows("jit remat2", runs=Runs.ONCE, jaxpr="jaxpr", is_inlined=True),
    **_rows(f"{_jax.CLOSED_CALL} statetx_call statetx_settled", runs=Runs.ONCE, jaxpr="call_jaxpr", is_inlined=True),
    **_rows("shard_map", runs=Runs.ONCE, jaxpr="jaxpr", places=True),
    **_rows("compute_on", runs=Runs.ONCE, jaxpr="jaxpr"),
    **_rows("custom_jvp_call custom_vjp_call", runs=Runs.PRIMAL, jaxpr="call_jaxpr", is_inlined=True),
    # `_jax.call_loop`: its jaxpr is the plain loop.
    **_rows("statetx_loop", runs=Runs.PRIMAL, jaxpr="jaxpr", is_inlined=True),
    **_rows("scan", runs=Runs.LOOP, jaxpr="jaxpr"),
    **_rows("cond", runs=Runs.BRANCH, jaxpr="branches"),
}


def _set(names: str, **facts: Any) -> None:
    for name in names.split():
        TABLE[name] = dataclasses.replace(TABLE.get(name, _DEFAULT), **facts)


_DEFAULT = PrimitiveRow()

# Entries of the first operand, or functions of them that take 0 to 0 and 1 to 1; of all operands; of some.
_set(" ".join(name for name, row in TABLE.items() if row.forwards), bits=slice(1))
_set("abs ceil dynamic_slice floor real rev round sign slice split sqrt stop_gradient unstack", bits=slice(1))
_set("square reduce_max reduce_min reduce_prod", bits=slice(1))
_set("and concatenate max min mul or pad stack xor", bits=slice(None))
_set("select_n", bits=slice(1, None))
_set("dynamic_update_slice", bits=slice(2))
_set("scatter", bits=slice(None, None, 2))  # not the indices

_set(
    "add add_any sub neg convert_element_type reshape transpose broadcast_in_dim squeeze expand_dims reduce_sum "
    "concatenate slice dynamic_slice pad rev copy gather scatter-add cumsum real imag select_n",
    is_linear=True,
)


# Others that have an entry of the result for each of the operands'.
_set(f"name {_jax.mark_primitive.name} {_jax.note_primitive.name} reduce_precision", is_elementwise=True)
_set(
    "convert_element_type copy copy_p imag optimization_barrier pvary real select_n stop_gradient", is_elementwise=True
)

_set(" ".join(name for name, row in TABLE.items() if row.is_elementwise), block=blocks.elementwise)
_set("broadcast_in_dim", block=blocks.broadcast)
_set("reshape", block=blocks.shaped("new_sizes"))
_set("iota", block=blocks.iota)
_set("transpose", block=blocks.transpose)
_set("dot_general", block=blocks.dot)
_set("slice", block=blocks.sliced)
_set("pad", block=blocks.pad)
_set(
    "reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum argmax argmin",
    block=blocks.unless_axis_0("axes"),
)
_set("squeeze rev", block=blocks.unless_axis_0("dimensions"))
_set("cumsum cumprod cummax cummin split", block=blocks.unless_axis_0("axis"))
_set("concatenate", block=blocks.unless_axis_0("dimension"))


def row_of(eqn: Any) -> PrimitiveRow:
    """The row of an equation's primitive."""
    return TABLE.get(eqn.primitive.name, _DEFAULT)


def _names(predicate: Callable[[PrimitiveRow], Any]) -> frozenset[str]:
    return frozenset(name for name, row in TABLE.items() if predicate(row))


JIT = frozenset({"jit"})
REMAT = frozenset({"remat2"})

VIEWS = _names(lambda row: row.is_view)
FUSED = _names(lambda row: row.fuses)
CALLS = _names(lambda row: row.runs is Runs.ONCE)
ENTERED = _names(lambda row: row.runs in (Runs.ONCE, Runs.LOOP, Runs.BRANCH))
"""Primitives whose inner values a policy can save one by one."""
LOOPS = _names(lambda row: row.runs is Runs.LOOP) | {"while"}
INLINED = _names(lambda row: row.is_inlined)
EAGER = INLINED - JIT
"""The calls that do not compile: in an eager backward pass each of their equations runs alone."""


def inner_jaxprs(eqn: Any) -> list[_jax.Jaxpr]:
    """The jaxprs that an equation runs, by its row: one for a call or loop, one for each branch, none for an
    operation.
    """
    key = row_of(eqn).jaxpr
    if not key:
        return []
    param = eqn.params[key]
    return [_jax.open_jaxpr(x)[0] for x in (param if isinstance(param, (tuple, list)) else [param])]


# -- operations of equations -----------------------------------------------------------------------------------------

# An elementwise primitive counts one operation for each entry of its result (a sine as much as a sum), a reduction one
# for each entry of its operand; products and convolutions count two for each multiply-add. Moving data is free. Matrix
# factorizations count their leading terms (Golub and Van Loan, Matrix Computations, 4th edition). A branch counts its
# most expensive case, a shard_map one device. A ``while`` loop inside a checkpointed loop counts the steps that the
# schedule makes (`_jax.known_runs`). Any other ``while`` loop counts one step, since its number of steps is unknown:
# there, and only there, the count may be far too small.


def count(jaxpr: Jaxpr, num_parts: int = 1) -> int:
    """Operations of a jaxpr's equations, or of one of the equal parts that they are divided into.

    In a shard_map, each equation is for one device already.
    """
    return round(_count(jaxpr, Fraction(1, num_parts)))


def flops(eqn: Any) -> int:
    """Operations of an equation, including the jaxprs in it."""
    return round(_flops(eqn, 1))


# Of a loop that runs a mean number of times, the exact product with the length of the loop around it is a whole number:
# fractions are rounded at the end only.


def _count(jaxpr: Jaxpr, share: Fraction | int) -> Fraction | int:
    return sum(_flops(eqn, share) for eqn in jaxpr.eqns)


def _flops(eqn: Any, share: Fraction | int) -> Fraction | int:
    """The share of an equation's operations that runs on a device."""
    name, rule = eqn.primitive.name, row_of(eqn).flops
    # With symbolic sizes (jax.export) an estimate, which decides between equal results.
    if not all(has_known_sizes(v.aval) for v in (*eqn.invars, *eqn.outvars)):
        return share * sum(num_bytes(v.aval) for v in eqn.outvars)
    if rule is not None:
        return share * int(rule(eqn))
    # An unknown primitive with a jaxpr counts as one run of it.
    inner_share = _share_inside(eqn, share) if name == "shard_map" else share
    inner = [times * _count(jaxpr, inner_share) for jaxpr, times in _inner(eqn)]
    if inner:
        return max(inner) if row_of(eqn).runs is Runs.BRANCH else sum(inner)
    if name.startswith(("reduce_", "arg", "cum")):
        return share * size(eqn.invars[0])
    return share * max((size(v) for v in eqn.outvars), default=0)


def _share_inside(eqn: Any, share: Fraction | int) -> Fraction | int:
    """The share in a shard_map: along the mesh axes that it maps, its equations are for one device already."""
    return min(1, share * _jax.num_mapped(eqn))


def _inner(eqn: Any) -> Iterable[tuple[Jaxpr, Fraction | int]]:
    """The jaxprs in an equation and the number of times each runs; for a custom derivative, the function without its
    rule.
    """
    params, row = eqn.params, row_of(eqn)
    if row.runs is Runs.PRIMAL:
        params = {row.jaxpr: params[row.jaxpr]}
    elif getattr(lowered := params.get("lowered"), "adds_operations", False):
        params = {row.jaxpr: _jax.without_dead_code(lowered(params[row.jaxpr]))}
    known_runs = _jax.known_runs(eqn)
    times: Any = params["length"] if row.runs is Runs.LOOP else 1 if known_runs is None else known_runs
    for param in params.values():
        for x in param if isinstance(param, (tuple, list)) else (param,):
            if _jax.is_jaxpr(x):
                yield _jax.open_jaxpr(x)[0], times
