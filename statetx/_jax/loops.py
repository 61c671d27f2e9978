"""Make and change the equation of `jax.lax.scan`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax._src.lax.control_flow import loops as _loops
from jax._src.lax.control_flow.loops import scan_p, while_p
from jax.interpreters import ad

try:
    # jax 0.12: `scan_p` has trees where it had numbers.
    from jax._src import flattree as _flattree  # pyright: ignore[reportAttributeAccessIssue]
except ImportError:
    _flattree = None
from . import patches
from .equations import ClosedJaxpr, open_jaxpr
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


_transpose_while = ad.primitive_transposes[while_p]


def _refuse_to_transpose(*args: Any, **params: Any) -> Any:
    try:
        return _transpose_while(*args, **params)
    except ValueError as e:
        info = getattr(open_jaxpr(params["body_jaxpr"])[0], "debug_info", None)
        name = "fori_loop" if info is not None and info.traced_for == "fori_loop" else "while_loop"
        place = f"{name}({info.func_src_info})" if info is not None else name
        bounds = "give Python integers as bounds, or " if name == "fori_loop" else ""
        raise ValueError(
            f"{e}\nThe loop: {place}.\nFix: {bounds}use statetx.while_loop(..., checkpoint=statetx.policies.Slots(n)), "
            f"which stores n values at a time for the gradient through any number of steps."
        ) from None


ad.primitive_transposes[while_p] = _refuse_to_transpose
patches.note(
    "the error for `jax.lax.while_loop` in reverse mode",
    "JAX's message advises a loop of known length. To it is added which loop it is, and that `statetx.while_loop` has `checkpoint=`.",
)


def empty(length: int, aval: Any) -> Any:
    """An uninitialized array for `length` values of type `aval`."""
    # The function that JAX's own scan makes its ys with: zeros would be written once before they are overwritten.
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
