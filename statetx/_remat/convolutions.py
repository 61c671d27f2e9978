"""Rewrite convolutions in the order of dimensions that XLA:CPU has fast code for.

XLA does this itself, but only outside branches and loops: `ConvCanonicalization` visits the entry computation alone.
Derivatives of convolutions have other orders, and within the fence's branch they took the generic loop nest, 20 times
slower (decision 12).
"""

from __future__ import annotations

import functools
from typing import Any

import jax

from .. import _jax
from .._jax import Jaxpr


def in_canonical_order(jaxpr: Jaxpr) -> Jaxpr:
    """The jaxpr with each of its convolutions on transposed arrays, in XLA's order; convolutions of inner jaxprs do not
    change.
    """
    run = functools.partial(_with_canonical_convolutions, jaxpr)
    return _jax.stage(run, [v.aval for v in jaxpr.invars], traced_for="remat", name="checkpoint")[0]


def _with_canonical_convolutions(jaxpr: Jaxpr, *args: Any) -> list[Any]:
    def rule(eqn: Any, operands: list[Any]) -> list[Any]:
        # Convolutions in groups, which batching makes, are left unchanged (decision 12). An explicit `out_sharding`
        # names dimensions, and would have to be transposed as well.
        is_plain = eqn.params.get("batch_group_count") == 1 and eqn.params.get("out_sharding") is None
        if eqn.primitive.name == "conv_general_dilated" and is_plain:
            return [_canonical_convolution(*operands, **eqn.params)]
        return _jax.bind_equation(eqn, eqn.params, operands)

    return _jax.interpret(jaxpr, args, rule)


def _canonical_convolution(x: Any, kernel: Any, *, dimension_numbers: Any, **params: Any) -> Any:
    """The convolution with batch first and features last, inputs before outputs in the kernel."""
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
    result = jax.lax.conv_general_dilated_p.bind(x, kernel, dimension_numbers=canonical, **params)

    # Where each dimension of the original result is in the canonical one: batch, features, then space.
    canonical_position = {out_spec[0]: 0, out_spec[1]: last, **{s: 1 + i for i, s in enumerate(out_spec[2:])}}
    return jax.lax.transpose(result, [canonical_position[d] for d in range(n + 2)])
