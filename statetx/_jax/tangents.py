"""The inputs or outputs of jaxprs whose tangents may be nonzero."""

from __future__ import annotations

from collections.abc import Sequence

from jax._src.interpreters import ad as _ad
from jax._src.util import weakref_lru_cache

from .equations import ClosedJaxpr, Jaxpr


def outputs_with_tangents(jaxpr: Jaxpr, has_tangent: Sequence[bool]) -> list[bool]:
    """Tell for each output of a jaxpr whether its tangent may be nonzero; `has_tangent` says the same of the inputs."""
    return _outputs_with_tangents(jaxpr, tuple(has_tangent))


# Every loop in the jaxpr asks this of its body: without the cache each level of nesting would multiply the work. Only
# the answer is kept: `_ad.jvp_jaxpr` would keep constants, too.
@weakref_lru_cache
def _outputs_with_tangents(jaxpr: Jaxpr, has_tangent: tuple[bool, ...]) -> list[bool]:
    return list(_ad.jvp_jaxpr(ClosedJaxpr(jaxpr, ()), list(has_tangent), instantiate=False)[1])


def steps_with_tangents(
    jaxpr: Jaxpr, has_tangent: Sequence[bool], num_constants: int, num_carry: int
) -> tuple[list[bool], list[bool]]:
    """Tell for each input and output of a loop's body if its tangent may be nonzero in some step; `has_tangent` says
    it of the loop's operands.

    A fixed point, as in JAX's own rule for `scan`: a carry whose tangent becomes nonzero in one step may make others
    nonzero in the next.
    """
    flags, first, last = list(has_tangent), num_constants, num_constants + num_carry
    while True:  # flags only change from False to True, so it ends after at most one turn for each carry
        outs = outputs_with_tangents(jaxpr, flags)
        carry = [a or b for a, b in zip(flags[first:last], outs, strict=False)]
        if carry == flags[first:last]:
            return flags, outs
        flags[first:last] = carry
