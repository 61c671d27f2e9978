"""How a loop stores less: what ``checkpoint=`` of `scan`, `fori_loop` and `while_loop` may say.

The members are values: equal where they say the same, hashable, printed as they are written.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from typing import Any

from .._errors import PolicyError
from .._remat.policy import as_policy, parse_bytes
from .._typing import Policy


class Strategy:
    """Base of the ways for a loop to store less than each of its steps computes."""

    def with_policy(self, policy: Policy) -> Strategy:
        """The same, with another ``policy=``."""
        new = copy.copy(self)
        object.__setattr__(new, "policy", as_policy(policy))
        return new

    def __repr__(self) -> str:
        first, *options = dataclasses.fields(self)  # type: ignore[arg-type]
        value = getattr(self, first.name)
        shown = [", ".join(map(repr, value)) if isinstance(value, tuple) else repr(value)]
        shown += [f"{f.name}={getattr(self, f.name)!r}" for f in options if getattr(self, f.name) != f.default]
        return f"{type(self).__name__}({', '.join(shown)})"


def _check_count(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise PolicyError(f"{name} must be a whole number of at least 1, got {value!r}.")


def _set_policy(strategy: Any) -> None:
    if strategy.policy is not None:
        object.__setattr__(strategy, "policy", as_policy(strategy.policy))


@dataclasses.dataclass(frozen=True, repr=False)
class Levels(Strategy):
    """Loops in loops, `num` deep, each rematerialised, of lengths that store the fewest carries.

    Two levels of T steps store about ``2 sqrt(T)`` carries, d levels about ``d T**(1/d)``; each step is run d + 1 times
    in all for a gradient. It is made of JAX's own parts, so it works with every order and mode of differentiation and
    under every transform.

    Args:
        num: how deep; 1 is each step rematerialised, and stores T carries.
        policy: what a step keeps of what it computes, besides its carry; nothing by default.
        offload: whether the outermost loop stores its carries in the host's memory.

    Memory:
        ``sum(lengths)`` carries and what one step computes. A length without suitable divisors leaves a remainder, for
        which the parts of `xs` and `ys` are copied once.

    Raises:
        PolicyError: `num` is no whole number of at least 1.

    Source:
        Chen et al. 2016, "Training deep nets with sublinear memory cost".

    Example:
        >>> import jax, jax.numpy as jnp, statetx
        >>> from statetx import policies
        >>> xs = jnp.linspace(0, 1, 1000)
        >>> def loss(w, checkpoint=None):
        ...     step = lambda h, x: (jnp.tanh(w * h + x), None)
        ...     return statetx.scan(step, 0.0, xs, checkpoint=checkpoint)[0]
        >>> bool(jnp.isclose(jax.grad(loss)(0.5, policies.Levels(3)), jax.grad(loss)(0.5)))
        True
    """

    num: int = 2
    policy: Policy = dataclasses.field(default=None, kw_only=True)
    offload: bool = dataclasses.field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        _check_count("Levels: num", self.num)
        _set_policy(self)


@dataclasses.dataclass(frozen=True, repr=False, init=False)
class Lengths(Strategy):
    """`Levels` with lengths of one's own, outermost first.

    Args:
        *lengths: their product is the loop's length, or less: what it lacks must be less than the product of all but
            the first, and is run as one more, shorter, turn of the outermost loop.
        policy, offload: as in `Levels`.

    Example:
        >>> from statetx import policies
        >>> policies.Lengths(64, 64)
        Lengths(64, 64)
    """

    lengths: tuple[int, ...]
    policy: Policy = None
    offload: bool = False

    def __init__(self, *lengths: int, policy: Policy = None, offload: bool = False):
        if not lengths:
            raise PolicyError("Lengths: give at least one length.")
        for n in lengths:
            _check_count("Lengths: a length", n)
        object.__setattr__(self, "lengths", lengths)
        object.__setattr__(self, "policy", policy)
        object.__setattr__(self, "offload", offload)
        _set_policy(self)

    def check(self, name: str, what: str, num: int) -> None:
        """Raise unless these lengths are those of a loop of `num` turns."""
        inner, whole = math.prod(self.lengths[1:]), math.prod(self.lengths)
        if not whole <= num < whole + inner:
            raise PolicyError(
                f"{name}: Lengths{self.lengths} are {whole} {what} in all, and there are {num}.\n"
                f"Fix: let the first be {max(1, num // inner)}, or use policies.Levels({len(self.lengths)}), which chooses."
            )


@dataclasses.dataclass(frozen=True, repr=False)
class Slots(Strategy):
    """Store `num` carries at a time, and run steps again from the nearest as the binomial schedule has it.

    The fewest runs of the body that this number of slots allows. With ``r`` the least for which
    ``C(num + r, num) > T``, no step is run more than r + 1 times: 3 times with ``num`` about ``sqrt(2 T)``, and 8 times
    for a million steps with 20 slots. The compiled program's size depends on neither T nor `num`.

    Args:
        num: how many carries are stored, the first one included.
        block: how many steps are reversed together, from all that they computed: fewer runs for more memory where
            a step computes little more than its carry.
        policy: what a step keeps of what it computes while it is differentiated; everything by default.
        offload: whether the carries are stored in the host's memory.

    Memory:
        `num` carries, and what `block` steps compute. Cotangents of `xs`, and `ys`, have the loop's length, as always.

    Raises:
        PolicyError: `num` or `block` is no whole number of at least 1.

    Source:
        Griewank and Walther 2000, "Algorithm 799: revolve".

    Example:
        >>> import jax, jax.numpy as jnp, statetx
        >>> xs = jnp.linspace(0, 1, 1000)
        >>> def loss(w, checkpoint=None):
        ...     step = lambda h, x: (jnp.tanh(w * h + x), None)
        ...     return statetx.scan(step, 0.0, xs, checkpoint=checkpoint)[0]
        >>> bool(jnp.isclose(jax.grad(loss)(0.5, 10), jax.grad(loss)(0.5)))  # 10 for policies.Slots(10)
        True
    """

    num: int
    block: int = dataclasses.field(default=1, kw_only=True)
    policy: Policy = dataclasses.field(default=None, kw_only=True)
    offload: bool = dataclasses.field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        _check_count("Slots: num", self.num)
        _check_count("Slots: block", self.block)
        _set_policy(self)


@dataclasses.dataclass(frozen=True, repr=False)
class Budget(Strategy):
    """As little recomputation as fits in so many bytes.

    When the loop is differentiated, its gradient program is compiled, a few times the first time that a body of its
    structure is met, and the number of slots and the block (see `Slots`) chosen so that its temporary memory is at most
    the budget. A plain loop that fits stays plain, and a loop that is not differentiated is not measured.

    Under ``vmap`` the budget holds for all examples together.

    Args:
        bytes: a number, or text such as ``"64MiB"``.
        policy: as in `Slots`.

    Memory:
        What counts is what XLA reserves for the gradient of the loop alone, beyond its inputs and outputs.

    Raises:
        PolicyError: at the call, the size is malformed. When the gradient is built, not even one slot fits; the message
            says how much one slot needs. Or the gradient was traced without a ``vmap`` that maps it later, as with
            ``vmap(grad(jit(f)))``, and exceeds the budget.

    Example:
        >>> from statetx import policies
        >>> policies.Budget("64MiB")
        Budget(67108864)
    """

    bytes: int
    policy: Policy = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "bytes", parse_bytes(self.bytes))
        _set_policy(self)


@dataclasses.dataclass(frozen=True, repr=False)
class Auto(Strategy):
    """Chosen by what the carry and one step take, when the loop is differentiated: see `tune`."""

    def __repr__(self) -> str:
        return "'auto'"


def as_strategy(name: str, checkpoint: Any) -> Strategy:
    """The strategy that a ``checkpoint=`` argument means.

    Raises:
        PolicyError: it means none.
    """
    if isinstance(checkpoint, Strategy):
        return checkpoint
    if checkpoint == "auto":
        return Auto()
    if isinstance(checkpoint, str):
        return Budget(checkpoint)  # type: ignore[arg-type]
    if isinstance(checkpoint, int) and not isinstance(checkpoint, bool):
        return Slots(checkpoint)
    if isinstance(checkpoint, tuple) and checkpoint:
        return Lengths(*checkpoint)
    raise PolicyError(
        f"{name}: checkpoint={checkpoint!r} is none of statetx.policies.Levels, Lengths, Slots, Budget, nor one of their "
        f"short spellings: a number of slots, a tuple of lengths, a size such as '64MiB', or 'auto'."
    )
