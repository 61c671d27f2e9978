"""Floating-point operations of equations, and what it would cost to compute a value again.

Counted are results: one operation for each entry that an elementwise operation gives (a sine counts as much as a sum), for each
entry that a reduction takes, two for each multiply-add of products and convolutions. Moving data costs none. Matrix factorisations
count their leading terms (Golub and Van Loan, Matrix Computations, 4th edition). Of branches the dearest counts, of the
devices in a shard_map one. A loop whose
number of steps is unknown counts one step, so there, and only there, the figure may be far too small.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from typing import Any

from .. import _compat
from .._compat import Jaxpr, Literal

_MOVES = frozenset(
    "broadcast_in_dim reshape transpose squeeze expand_dims slice dynamic_slice dynamic_update_slice gather concatenate pad rev "
    "copy copy_p device_put convert_element_type bitcast_convert_type reduce_precision name iota split stop_gradient "
    "optimization_barrier sharding_constraint select_n empty empty2 create_token random_wrap random_unwrap random_seed real imag "
    "scatter split tie_in unvmap_any pvary axis_index symbolic_zeros".split()
)
_ROUNDS = 20
_THREEFRY = 5 * _ROUNDS + 3 * 5  # a 20-round block: add, rotate (3), xor a round; a key injection every fourth


def flops(eqn: Any) -> int:
    """Operations of an equation, with those of the equations in it."""
    name = eqn.primitive.name
    if name in _MOVES:
        return 0
    inner = list(_inner(eqn))
    if inner:
        costs = [times * sum(map(flops, jaxpr.eqns)) for jaxpr, times in inner]
        return max(costs) if name == "cond" else sum(costs)
    rule = _RULES.get(name)
    if rule is not None:
        return rule(eqn)
    if name.startswith(("reduce_", "arg", "cum")):
        return _size(eqn.invars[0])
    return max((_size(v) for v in eqn.outvars), default=0)


def _size(atom: Any) -> int:
    return math.prod(getattr(atom.aval, "shape", ()))


def _dot(eqn: Any) -> int:
    (contracted, _), _ = eqn.params["dimension_numbers"]
    return 2 * _size(eqn.outvars[0]) * math.prod(eqn.invars[0].aval.shape[d] for d in contracted)


def _conv(eqn: Any) -> int:
    # Each entry of the result is a sum over the kernel of one output channel, which holds the channels of one group.
    kernel = eqn.invars[1].aval.shape
    out_channels = kernel[eqn.params["dimension_numbers"].rhs_spec[0]]
    return 2 * _size(eqn.outvars[0]) * math.prod(kernel) // max(out_channels, 1)


def _fft(eqn: Any) -> int:
    length = max(math.prod(eqn.params["fft_lengths"]), 2)
    return int(5 * max(_size(eqn.invars[0]), _size(eqn.outvars[0])) * math.log2(length))  # Cooley and Tukey


def _sort(eqn: Any) -> int:
    shape = eqn.invars[0].aval.shape
    length = shape[eqn.params.get("dimension", -1)] if shape else 1
    return int(_size(eqn.invars[0]) * math.log2(max(length, 2)))


def _top_k(eqn: Any) -> int:
    return int(_size(eqn.invars[0]) * math.log2(max(eqn.params["k"], 2)))


def _matrices(factor: float) -> Callable[[Any], int]:
    """``factor m n min(m, n)`` for each m x n matrix of the first operand."""

    def rule(eqn: Any) -> int:
        *_, m, n = eqn.invars[0].aval.shape
        return int(factor * _size(eqn.invars[0]) * min(m, n))

    return rule


def _triangular_solve(eqn: Any) -> int:
    return _size(eqn.invars[1]) * eqn.invars[0].aval.shape[-1]


def _window(eqn: Any) -> int:
    return _size(eqn.outvars[0]) * math.prod(eqn.params["window_dimensions"])


_RULES: dict[str, Callable[[Any], int]] = {
    "dot_general": _dot,
    "conv_general_dilated": _conv,
    "fft": _fft,
    "sort": _sort,
    "top_k": _top_k,
    "cholesky": _matrices(1 / 3),
    "lu": _matrices(2 / 3),
    "geqrf": _matrices(4 / 3),
    "householder_product": _matrices(4 / 3),
    "qr": _matrices(8 / 3),
    "eigh": _matrices(9),
    "eig": _matrices(25),
    "svd": _matrices(21),
    "triangular_solve": _triangular_solve,
    "reduce_window_max": _window,
    "reduce_window_min": _window,
    "reduce_window_sum": _window,
    "select_and_scatter_add": lambda eqn: _size(eqn.invars[1]) * math.prod(eqn.params["window_dimensions"]),
    "scatter-add": lambda eqn: _size(eqn.invars[2]),
    "scatter_add": lambda eqn: _size(eqn.invars[2]),
    "scatter-mul": lambda eqn: _size(eqn.invars[2]),
    "integer_pow": lambda eqn: _size(eqn.outvars[0]) * max(abs(eqn.params["y"]).bit_length(), 1),
    "threefry2x32": lambda eqn: _THREEFRY * _size(eqn.outvars[0]),
    "random_bits": lambda eqn: _THREEFRY * _size(eqn.outvars[0]) // 2,
    "random_split": lambda eqn: _THREEFRY * _size(eqn.outvars[0]),
    "random_fold_in": lambda eqn: _THREEFRY * _size(eqn.outvars[0]),
}


def _inner(eqn: Any) -> Iterable[tuple[Jaxpr, int]]:
    """The jaxprs in an equation and how often each is run."""
    params = eqn.params
    if eqn.primitive.name == "custom_vjp_call" or eqn.primitive.name == "custom_jvp_call":
        params = {"call": params["call_jaxpr"]}
    times = params.get("length", 1) if eqn.primitive.name == "scan" else 1
    for x in params.values():
        for sub in x if isinstance(x, (tuple, list)) else (x,):
            if _compat.is_jaxpr(sub):
                yield _compat.open_jaxpr(sub)[0], times


# -- computing a value again -----------------------------------------------------------------------------------


class Recomputation:
    """The cost of each value of an inlined jaxpr, where some are there already.

    Args:
        jaxpr: every variable in it, at any depth, stands in one place.
        have: variables, at any depth, whose values are there.
    """

    def __init__(self, jaxpr: Jaxpr, have: Collection[Any]):
        self._jaxpr = jaxpr
        self._have = frozenset(have)
        self._made = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}

    def __call__(self, var: Any, but: Collection[Any] = ()) -> int:
        """Operations that give `var` from the inputs and what is there, `but` some of it."""
        have = self._have.difference(but)
        wanted, _ = _slice(self._made, [var], have)
        return sum(_partial(eqn, outs, have)[0] for eqn, outs in wanted)


def _slice(made: dict[Any, Any], targets: Iterable[Any], have: Collection[Any]) -> tuple[list, set]:
    """The equations that give `targets`, each with those of its outputs that are used, and the inputs that they need."""
    wanted: dict[int, tuple[Any, set]] = {}
    inputs = set()
    work = list(targets)
    while work:
        v = work.pop()
        if isinstance(v, Literal) or v in have:
            continue
        eqn = made.get(v)
        if eqn is None:
            inputs.add(v)
            continue
        _, outs = wanted.setdefault(id(eqn), (eqn, set()))
        if v not in outs:
            outs.add(v)
            work += _partial(eqn, outs, have)[1]
    return list(wanted.values()), inputs


def _partial(eqn: Any, outs: Collection[Any], have: Collection[Any]) -> tuple[int, list[Any]]:
    """Operations for some outputs of an equation, and its operands that they need; of a scan only its part is run."""
    if eqn.primitive.name != "scan":
        return flops(eqn), eqn.invars
    body = _compat.open_jaxpr(eqn.params["jaxpr"])[0]
    start, num_carry = _compat.scan_counts(eqn)
    made = {v: e for e in body.eqns for v in e.outvars}
    targets = [inner for v, inner in zip(eqn.outvars, body.outvars, strict=True) if v in outs]
    carries = dict(zip(body.invars[start : start + num_carry], body.outvars[:num_carry], strict=True))
    while True:  # what a step needs of the carry, the step before must compute
        eqns, inputs = _slice(made, targets, have)
        more = [carries[v] for v in inputs if v in carries and carries[v] not in targets]
        if not more:
            break
        targets += more
    cost = eqn.params["length"] * sum(_partial(e, o, have)[0] for e, o in eqns)
    return cost, [a for a, v in zip(eqn.invars, body.invars, strict=True) if v in inputs]
