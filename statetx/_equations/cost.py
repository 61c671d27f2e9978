"""What programs cost: floating-point operations of equations, and memory of what is compiled.

Counted are results: one operation for each entry that an elementwise operation gives (a sine counts as much as a sum), for each
entry that a reduction takes, two for each multiply-add of products and convolutions. Moving data costs none. Matrix factorisations
count their leading terms (Golub and Van Loan, Matrix Computations, 4th edition). Of branches the dearest counts, of the
devices in a shard_map one. A loop whose
number of steps is unknown counts one step, so there, and only there, the figure may be far too small.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .. import _jax
from .._jax import Jaxpr

_MOVES = frozenset(
    "broadcast_in_dim reshape transpose squeeze expand_dims slice dynamic_slice dynamic_update_slice gather concatenate pad rev "
    "copy copy_p device_put convert_element_type bitcast_convert_type reduce_precision name statetx_mark iota split stop_gradient "
    "optimization_barrier sharding_constraint select_n empty empty2 create_token random_wrap random_unwrap random_seed real imag "
    "scatter tie_in unvmap_any pvary axis_index symbolic_zeros statetx_notice".split()
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
            if _jax.is_jaxpr(sub):
                yield _jax.open_jaxpr(sub)[0], times


# -- whole programs ------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Cost:
    """What a compiled program costs.

    Attributes:
        flops: operations of its equations, loops counted with their lengths.
        compiled_flops: operations as XLA counts them: the body of a loop once.
        argument_bytes, output_bytes, temp_bytes: memory, by XLA's own analysis.
    """

    flops: int
    compiled_flops: float
    argument_bytes: int
    output_bytes: int
    temp_bytes: int

    @property
    def peak_bytes(self) -> int:
        """Arguments, outputs and temporaries together."""
        return self.argument_bytes + self.output_bytes + self.temp_bytes


def sizing_options() -> dict[str, Any]:
    """Compiler options for a program that is compiled to learn its memory, not to be run.

    On a CPU the machine code is left unoptimised, which halves the time; memory is assigned before, and is the same.
    """
    return {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else {}


@functools.cache
def hurried_options() -> dict[str, Any]:
    """The same in half the time again, where there is a way; memory may differ by some hundred bytes."""
    options = {**sizing_options(), "xla_cpu_use_fusion_emitters": False}  # which jaxlib 0.12 has no more
    if jax.default_backend() == "cpu":
        try:
            jax.jit(lambda x: x).lower(0.0).compile(options)
            return options
        except jax.errors.JaxRuntimeError:
            pass
    return sizing_options()


class Program:
    """A function of arrays, traced for arguments of certain types, and compiled when it is asked for; nothing is computed.

    Attributes:
        lowered, compiled: as ``jax.jit`` gives them.
        flops: operations of its equations, loops counted with their lengths.
        cost: see `Cost`.
    """

    def __init__(self, fun: Callable, args: Sequence[Any], compiler_options: dict[str, Any] | None = None):
        traced = jax.jit(fun).trace(*args)
        self.lowered = traced.lower()
        self.flops = count(_jax.without_dead_code(traced.jaxpr))
        self._options = compiler_options

    @functools.cached_property
    def compiled(self) -> Any:
        return self.lowered.compile(self._options)

    @functools.cached_property
    def cost(self) -> Cost:
        memory, found = self.compiled.memory_analysis(), self.compiled.cost_analysis()
        assert memory is not None
        found = found[0] if isinstance(found, (list, tuple)) else found
        return Cost(
            flops=self.flops,
            compiled_flops=float((found or {}).get("flops", 0.0)),
            argument_bytes=memory.argument_size_in_bytes,
            output_bytes=memory.output_size_in_bytes,
            temp_bytes=memory.temp_size_in_bytes,
        )


def count(jaxpr: Jaxpr) -> int:
    """Operations of a jaxpr's equations."""
    return sum(map(flops, jaxpr.eqns))


def with_pullback(
    fun: Callable[..., tuple[list, list]], moving: Sequence[int]
) -> Callable[..., tuple[list, list, list]]:
    """``fun(*arrays) -> (outputs, others)``, and the cotangents of the arrays `moving` for outputs' cotangents of one.

    Of such a program is measured what a gradient takes, here and wherever one is planned.
    """

    def step(*arrays: Any) -> tuple[list, list, list]:
        def differentiated(*moved: Any) -> tuple[list, list]:
            whole = list(arrays)
            for i, x in zip(moving, moved, strict=True):
                whole[i] = x
            return fun(*whole)

        outs, pull, others = jax.vjp(differentiated, *(arrays[i] for i in moving), has_aux=True)
        return outs, others, list(pull([_jax.varying_like(jnp.ones_like(x), x) for x in outs]))

    return step
