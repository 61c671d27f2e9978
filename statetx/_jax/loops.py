"""Make and change the equation of `jax.lax.scan`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax._src.lax.control_flow import loops as _loops
from jax._src.lax.control_flow.loops import scan_p

try:
    # jax 0.12: `scan_p` has trees where it had numbers.
    from jax._src import flattree as _flattree  # pyright: ignore[reportAttributeAccessIssue]
except ImportError:
    _flattree = None
from .equations import ClosedJaxpr
from .meshes import replicated


def bind_scan(
    jaxpr: ClosedJaxpr, constants: Sequence[Any], carry: Sequence[Any], xs: Sequence[Any], *, length: int, reverse: bool
) -> list[Any]:
    """Run `jax.lax.scan` of an already staged body ``(*constants, *carry, *x) -> (*carry, *y)``."""
    counts: dict[str, Any] = {"num_consts": len(constants), "num_carry": len(carry)}
    if _flattree is not None:
        sizes = [_flattree.nones(len(values)) for values in (constants, carry, xs)]
        num_ys = len(jaxpr.out_avals) - len(carry)
        ys = _flattree.nones(num_ys).filter_with_mask([True] * num_ys)  # no ys are forwarded
        counts = {"ft_in": _flattree.pack(tuple(sizes)), "ft_out": _flattree.pack((sizes[1], ys))}
    return scan_p.bind(*constants, *carry, *xs, jaxpr=jaxpr, length=length, reverse=reverse, unroll=1, **counts)


def empty(length: int, aval: Any) -> Any:
    """An uninitialised array for `length` values of type `aval`."""
    return replicated(_loops._empty_array((length,), (None,), aval))


def scan_counts(eqn: Any) -> tuple[int, int]:
    """The numbers of constants and carries of a scan, its first operands in this order."""
    if "num_carry" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    consts, carry, _ = map(list, eqn.params["ft_in"].unpack())  # from jax 0.12 on
    return len(consts), len(carry)


def with_scan_constants(eqn: Any, jaxpr: ClosedJaxpr, constants: Sequence[Any]) -> Any:
    """Replace the body of a scan by one that takes `constants` before its other constants."""
    params = {**eqn.params, "jaxpr": jaxpr}
    if "num_carry" in params:
        params["num_consts"] += len(constants)
    else:
        assert _flattree is not None
        consts, carry, xs = params["ft_in"].unpack()
        params["ft_in"] = _flattree.pack((_flattree.nones(len(constants) + len(list(consts))), carry, xs))
    return eqn.replace(params=params, invars=[*constants, *eqn.invars])
