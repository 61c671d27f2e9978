"""What a rematerialised function keeps: policies as values.

A policy judges each value that the function computes, as the function is written, and says whether it is kept for the
backward pass, kept in another memory (offloaded), or recomputed. Policies are frozen: equal where they say the same,
hashable, printed as they are written. They combine:

- ``a | b`` keeps what either keeps; where both speak, saving goes before offloading, and offloading before recomputing;
- ``a & b`` keeps what both keep, by the lesser of the two;
- ``~a`` keeps what `a` recomputes, and nothing else;
- ``a.then(b)`` asks `b` only about what `a` recomputes, so that `a` can offload what `b` would save.

Members of ``jax.checkpoint_policies`` are policies too, by themselves (JAX then judges, with its own meaning: each equation of the
differentiated and batched program), or inside this algebra, where they are asked about the function as it is written.

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
from ._loops.strategy import Budget as Budget
from ._loops.strategy import Lengths as Lengths
from ._loops.strategy import Levels as Levels
from ._loops.strategy import Slots as Slots
from ._remat.policy import ExceptNames, Names, Offload, Or, Path, Primitives, Size, States, as_policy
from ._remat.policy import Policy as Policy
from ._remat.policy import dots as dots
from ._remat.policy import dots_without_batch_dims as dots_without_batch_dims
from ._remat.policy import everything as everything
from ._remat.policy import nothing as nothing
from ._remat.policy import parse_bytes as parse_bytes
from ._text import suggestion
from ._typing import Filter


def names(*chosen: str, missing: str = "raise") -> Policy:
    """Keep the values that ``statetx.checkpoint_name`` (or JAX's) gave one of these names.

    The value itself is kept, so that the operation that computed it is not run again either.

    Args:
        *chosen: the names.
        missing: what to do about a name that no value of the function has: ``"raise"``, ``"warn"`` or ``"ignore"``. The
            other policies that name something take the same.
    """
    return Names(_strings("names", chosen), _check_missing(missing))


def except_names(*chosen: str, missing: str = "raise") -> Policy:
    """Keep every value that the function computes, but those with one of these names."""
    return ExceptNames(_strings("except_names", chosen), _check_missing(missing))


def offload(*what: str | Policy, src: str = "device", dst: str = "pinned_host", otherwise: str = "raise") -> Policy:
    """Keep values in another memory, and fetch them back for the backward pass.

    Args:
        *what: names, or policies; what one of them keeps is offloaded.
        src: the memory in which the values are computed.
        dst: the memory in which they wait.
        otherwise: what to do on a backend without these memories: ``"raise"`` or ``"save"``.
    """
    if otherwise not in ("raise", "save"):
        raise PolicyError(
            f"offload: otherwise= must be 'raise' or 'save', got {otherwise!r}.{suggestion(otherwise, ['raise', 'save'])}"
        )
    if not what:
        raise PolicyError("offload needs names or policies: offload('hidden'), offload(policies.dots).")
    named = [x for x in what if isinstance(x, str)]
    parts = [*([names(*named)] if named else []), *(as_policy(x) for x in what if not isinstance(x, str))]
    return Offload(functools.reduce(Or, parts), src, dst, otherwise)


def larger_than(size: int | str) -> Policy:
    """Keep values of more bytes than this, over all steps of the loops around them; also as ``"1MiB"``."""
    return Size(parse_bytes(size), True)


def smaller_than(size: int | str) -> Policy:
    """Keep values of fewer bytes than this, over all steps of the loops around them; also as ``"64KiB"``."""
    return Size(parse_bytes(size), False)


def primitives(*chosen: str, missing: str = "raise") -> Policy:
    """Keep results of these operations, by their names in a jaxpr: ``"conv_general_dilated"``, ``"exp"``."""
    return Primitives(_strings("primitives", chosen), _check_missing(missing))


def path(pattern: str, *, missing: str = "raise") -> Policy:
    """Keep values that were last computed with a state whose path matches a glob, such as ``"blocks.3.*"``.

    A value belongs to the states that its operation reads, or else to those of its latest operand: what ``blocks.3``
    computes from its own parameters, until another module's parameters come in. Paths are those that the rematerialised
    function sees: ``"w"`` where a block's own method is rematerialised, ``"blocks.3.w"`` where the whole model's is.
    """
    (pattern,) = _strings("path", (pattern,))
    return Path(pattern, _check_missing(missing))


def states(filter: Filter, *, missing: str = "raise") -> Policy:
    """Keep the results of operations on a state that the filter selects, such as the products with parameters."""
    return States(filter, _check_missing(missing))


def _check_missing(missing: str) -> str:
    if missing not in ("raise", "warn", "ignore"):
        raise PolicyError(
            f"missing= must be 'raise', 'warn' or 'ignore', got {missing!r}.{suggestion(missing, ['raise', 'warn', 'ignore'])}"
        )
    return missing


def _strings(name: str, given: tuple) -> frozenset[str]:
    if not given or not all(isinstance(x, str) for x in given):
        raise PolicyError(f"policies.{name} takes strings, at least one; got {', '.join(map(repr, given)) or 'none'}.")
    return frozenset(given)
