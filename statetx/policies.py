"""Policies for rematerialized functions, as values.

A policy decides for each value of the function, as written, whether to save it for the backward pass, to offload it
(save it in another memory), or to recompute it. Policies are frozen, hashable, equal by content, and print as written.
They combine:

- ``a | b`` takes the greater of both decisions, in the order save > offload > recompute;
- ``a & b`` takes the lesser;
- ``~a`` saves the values that `a` recomputes, and no others;
- ``a.then(b)`` asks `b` only about values that `a` recomputes, so that `a` can offload values that `b` would save;
- ``a.stored_as("bits")`` stores the values of `a` in fewer bits (`Policy.stored_as`).

Members of ``jax.checkpoint_policies`` are policies too: by themselves, with JAX's own meaning (applied to each equation
of the differentiated and batched program); or inside this algebra, applied to the function as written.

Example:
    >>> from statetx import policies
    >>> policies.names("hidden") | policies.dots
    names('hidden') | dots
    >>> policies.names("b", "a") == policies.names("a", "b")
    True
"""

from __future__ import annotations

import functools

from ._errors import PolicyError
from ._loops.strategy import Lengths as Lengths
from ._loops.strategy import Levels as Levels
from ._loops.strategy import Slots as Slots
from ._loops.tune import Budget as Budget
from ._remat.atoms import ExceptNames, Names, Offload, Path, Primitives, Size, States
from ._remat.atoms import dots as dots
from ._remat.atoms import dots_without_batch_dims as dots_without_batch_dims
from ._remat.atoms import everything as everything
from ._remat.atoms import masks as masks
from ._remat.atoms import nothing as nothing
from ._remat.parse import as_value_policy
from ._remat.policy import Or
from ._remat.policy import Policy as Policy
from ._segments.disk import Disk as Disk
from ._text import parse_bytes, suggestion
from ._typing import Filter

__all__ = [
    "Budget",
    "Disk",
    "Lengths",
    "Levels",
    "Policy",
    "Slots",
    "dots",
    "dots_without_batch_dims",
    "everything",
    "except_names",
    "larger_than",
    "masks",
    "names",
    "nothing",
    "offload",
    "path",
    "primitives",
    "smaller_than",
    "states",
]


def __dir__() -> list[str]:
    return __all__


def names(*chosen: str, missing: str = "raise") -> Policy:
    """Save the values that ``statetx.checkpoint_name`` (or JAX's) gave one of these names.

    Saves the value itself, so that the operation that computes it does not run again either.

    Args:
        *chosen: the names.
        missing: the reaction to a name that no value of the function has: ``"raise"``, ``"warn"`` or ``"ignore"``. The
            other policies with names, patterns or filters have the same argument.
    """
    return Names(_strings("names", chosen), missing=missing)


def except_names(*chosen: str, missing: str = "raise") -> Policy:
    """Save every value that the function computes, except values with one of these names."""
    return ExceptNames(_strings("except_names", chosen), missing=missing)


def offload(*values: str | Policy, src: str = "device", dst: str = "pinned_host", otherwise: str = "raise") -> Policy:
    """Store values in another memory, and fetch them for the backward pass.

    Args:
        *values: names, or policies, whose saved values are offloaded.
        src: the memory where the values are computed.
        dst: the memory where they are stored.
        otherwise: the reaction to a backend without these memories: ``"raise"`` or ``"save"``.
    """
    if otherwise not in ("raise", "save"):
        raise PolicyError(
            f"offload: otherwise= must be 'raise' or 'save', got "
            f"{otherwise!r}.{suggestion(otherwise, ['raise', 'save'])}"
        )
    if not values:
        raise PolicyError("offload needs names or policies: offload('hidden'), offload(policies.dots).")
    strings = [x for x in values if isinstance(x, str)]
    children = [
        *([names(*strings)] if strings else []),
        *(as_value_policy(x) for x in values if not isinstance(x, str)),
    ]
    return Offload(functools.reduce(Or, children), src, dst, otherwise)


def larger_than(size: int | str) -> Policy:
    """Save values larger than this, in bytes or as ``"1MiB"``, summed over all steps of the loops around them."""
    return Size(parse_bytes(size), True)


def smaller_than(size: int | str) -> Policy:
    """Save values smaller than this, in bytes or as ``"64KiB"``, summed over all steps of the loops around them."""
    return Size(parse_bytes(size), False)


def primitives(*chosen: str, missing: str = "raise") -> Policy:
    """Save results of these primitives, by their names in a jaxpr: ``"conv_general_dilated"``, ``"exp"``."""
    return Primitives(_strings("primitives", chosen), missing=missing)


def path(pattern: str, *, missing: str = "raise") -> Policy:
    """Save values whose nearest states have a path that matches a glob, such as ``"blocks.3.*"``.

    A value's nearest states are the states that its operation reads, or else the nearest states of its latest operand:
    so the values that ``blocks.3`` computes with its own parameters, until another module's parameters come in. Paths
    are relative to the rematerialized function: ``"w"`` in a block's own method, ``"blocks.3.w"`` in the whole model's.
    """
    (pattern,) = _strings("path", (pattern,))
    return Path(pattern, missing=missing)


def states(filter: Filter, *, missing: str = "raise") -> Policy:
    """Save the results of operations on states that the filter selects, such as products with parameters."""
    return States(filter, missing=missing)


def _strings(name: str, args: tuple) -> frozenset[str]:
    if not args or not all(isinstance(x, str) for x in args):
        raise PolicyError(f"policies.{name} takes strings, at least one; got {', '.join(map(repr, args)) or 'none'}.")
    return frozenset(args)
