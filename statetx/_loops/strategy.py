"""Strategies: how a loop stores less for its derivative, as ``checkpoint=`` of a loop says.

A strategy is a frozen value: comparable, hashable, and its repr is the call that makes it. `Budget` and `Auto`, which
choose by sizes, are in `tune`.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import numbers
from collections.abc import Callable
from fractions import Fraction
from typing import Any, TypeVar

from .. import _jax
from .._equations.structure import Body
from .._errors import PlanError, PolicyError
from .._known import OFFLOADED_RESIDUALS, offloads_wrongly
from .._lift.options import check_flags
from .._records import Check, headed, one_of, row, whole
from .._remat.parse import as_value_policy
from .._targets import current
from .._text import brief, size_literal
from .._tree import is_integer
from .._typing import Policy
from . import online, schedule
from .checkpointed import WORTH_MIXING, LoopOfSlots
from .linearized import composed
from .nested import nested
from .step import Loop, LoopStep

S = TypeVar("S", bound="Strategy")


class Strategy:
    """Base of strategies. A subclass is a frozen dataclass that says how to `build` the loop.

    Attributes:
        policy: which values a step saves.
        offload: whether the stored carries are in the host's memory.
        num_steps: the length that the strategy itself implies; None if it fits any.
        truncation: gradients stop between segments of so many steps; None if they flow through the whole loop.
    """

    policy: Policy = None
    offload: bool = False
    truncation: int | None = None

    @property
    def num_steps(self) -> int | None:
        return None

    @property
    def step_policy(self) -> Policy:
        """The policy for the values of a step, perhaps of another strategy within this one."""
        return self.policy

    def build(self, step: LoopStep) -> Loop:
        """The loop ``(constants, carry, xs) -> (carry, ys)`` of a step."""
        raise NotImplementedError

    def check(self, name: str, what: str, num: int) -> None:
        """Raise `PolicyError` unless the strategy fits a loop of `num` turns."""

    def for_unknown_length(self, name: str) -> Any:
        """The strategy, with `build_while`, of a loop whose number of steps is known only at its end."""
        raise PolicyError(
            f"{name}: checkpoint={self!r} needs a known number of steps.\n"
            f"Fix: give policies.Slots(n), or use scan or fori_loop."
        )

    def for_layers(self, num: int, policy: Policy) -> Strategy:
        """The strategy for a stack of `num` layers, without measurements."""
        return self

    def for_refs(self) -> Strategy:
        """The strategy of a loop with a `jax.Ref` that a derivative rule may write: JAX knows the order of writes in
        loops of its own only.
        """
        return self

    def num_runs(self, length: int) -> int:
        """Number of runs of the step in a gradient."""
        raise NotImplementedError

    def with_policy(self, policy: Policy) -> Strategy:
        """The strategy with another ``policy=``."""
        new = copy.copy(self)
        # Not by `dataclasses.replace`, which calls the constructor: `Lengths` takes its lengths by position only.
        object.__setattr__(new, "policy", as_value_policy(policy))
        return new

    def __repr__(self) -> str:
        fields = dataclasses.fields(self)  # type: ignore[arg-type]
        first, *options = sorted(fields, key=lambda field: field.kw_only is True)
        value = getattr(self, first.name)
        show = size_literal if first.name == "bytes" else repr
        args = [", ".join(map(show, value if isinstance(value, tuple) else (value,)))]
        args += [f"{f.name}={getattr(self, f.name)!r}" for f in options if getattr(self, f.name) != f.default]
        return f"{type(self).__name__}({', '.join(args)})"

    # -- in a saved plan --

    def to_json(self) -> list[Any]:
        """The name of the class and its arguments."""
        raise NotImplementedError

    @staticmethod
    def from_json(record: list[Any]) -> Strategy:
        """The inverse of `to_json`, for strategies that are `recorded`.

        Raises:
            PlanError: there is no strategy of this name, or it does not take these arguments.
        """
        try:
            headed(one_of(*_RECORDED), lambda *_: None)(record, "a strategy")
            name, *arguments = record
            cls, check = _RECORDED[name]
            check(arguments, name)
            return cls._of_arguments(*arguments)
        except ValueError as e:
            raise PlanError(str(e.args[0])) from e

    @classmethod
    def _of_arguments(cls, *arguments: Any) -> Strategy:
        return cls(*arguments)


_RECORDED: dict[str, tuple[type[Strategy], Check]] = {}


def recorded(check: Check) -> Callable[[type[S]], type[S]]:
    """Let plans have a strategy: files name it by its class, and no other class takes that name.

    Args:
        check: of the arguments, as `Strategy.to_json` lists them after the name.
    """

    def register(cls: type[S]) -> type[S]:
        if cls.__name__ in _RECORDED:
            raise PolicyError(
                f"There is a strategy with the name {cls.__name__!r} in saved plans.\nFix: give the class another name."
            )
        _RECORDED[cls.__name__] = cls, check
        return cls

    return register


def set_counts(strategy: Any, *names: str) -> None:
    """Make these fields of a frozen strategy whole numbers of at least 1."""
    for name in names:
        count = as_count(f"{type(strategy).__name__}: {name}", getattr(strategy, name))
        object.__setattr__(strategy, name, count)


def as_count(name: str, value: Any, least: int = 1) -> int:
    """A whole number of any integer type, NumPy's included, as an int."""
    if not is_integer(value) or not least <= value < 2**63:
        limit = " and below 2**63" if is_integer(value) and value >= least else ""
        raise PolicyError(f"{name} must be a whole number of at least {least}{limit}, got {brief(value)}.")
    return int(value)


def _exact_bytes(name: str, value: Any) -> Fraction:
    """A number of bytes, of any real type."""
    is_real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_real or not math.isfinite(value) or value < 0:
        raise PolicyError(f"{name} must be a finite number of at least 0, got {value!r}.")
    return Fraction(int(value) if isinstance(value, numbers.Integral) else float(value))


def set_options(strategy: Any) -> None:
    """Check `policy` and `offload` of a frozen strategy, and make the policy one for values."""
    check_flags(type(strategy).__name__, PolicyError, offload=strategy.offload)
    if strategy.policy is not None:
        object.__setattr__(strategy, "policy", as_value_policy(strategy.policy))


@dataclasses.dataclass(frozen=True, repr=False)
class NestedLoops(Strategy):
    """Base of the strategies of loops in loops, `Levels` and `Lengths`."""

    policy: Policy = dataclasses.field(default=None, kw_only=True)
    offload: bool = dataclasses.field(default=False, kw_only=True)
    keep: str = dataclasses.field(default="turn", kw_only=True)

    def __post_init__(self) -> None:
        set_options(self)
        if self.keep not in ("turn", "loop"):
            raise PolicyError(f'{type(self).__name__}: keep must be "turn" or "loop", got {self.keep!r}.')

    def lengths_for(self, length: int) -> tuple[int, ...]:
        """The lengths of the loops of a loop of so many steps, outermost first."""
        raise NotImplementedError

    def build(self, step: LoopStep) -> Loop:
        self.check(step.name, "steps", step.length)
        if self.offload and _jax.HOST_MEMORY not in current.memory_kinds():
            raise PolicyError(f"{step.name}: {self!r}: the devices have no {_jax.HOST_MEMORY!r} memory.")
        if self.offload and offloads_wrongly():
            raise PolicyError(f"{step.name}: {self!r}. {OFFLOADED_RESIDUALS.refusal()}")
        if self.keep == "loop" and step.policy is None:
            raise PolicyError(
                f'{step.name}: {self!r} keeps nothing without a policy. Fix: give policy=, or leave keep="loop" out.'
            )
        return composed(step, self.nested)

    def nested(self, step: LoopStep) -> Loop:
        """The loops of a step, which fits them."""
        lengths = self.lengths_for(step.length)
        return nested(step, lengths, offload=self.offload, keeps_all=self.keep == "loop")


@dataclasses.dataclass(frozen=True, repr=False)
class Levels(NestedLoops):
    """Loops in loops, `num` deep, each rematerialized, of lengths that store the fewest carries.

    Two levels of T steps store about ``2 sqrt(T)`` carries, d levels about ``d T**(1/d)``; each step is run d + 1 times
    in all for a gradient. It is made of JAX's own parts, so it works with every order and mode of differentiation and
    under every transform.

    Args:
        num: how deep; 1 is each step rematerialized, and stores T carries.
        policy: the values that a step keeps, besides its carry; nothing by default. With ``stored_as("bits")`` the
            loops also store the leaves of the carry as bits that are 0 or 1, as `Slots` does.
        offload: whether the outermost loop stores its carries in the host's memory, unchanged. Such a loop has no
            second derivative in reverse mode: JAX has none of values that a policy offloads.
        keep: how long the policy's values are kept: "turn", for the steps of an innermost loop, while these are
            reversed; or "loop", for all steps from the forward pass on. Then the steps run again only to find their
            carries. Of a recurrent layer whose products are kept, that is elementwise work: fewer bytes than carries
            and products of all steps, at hardly more operations.

    Memory:
        ``sum(lengths)`` carries and the values of one step; with ``keep="loop"`` also the policy's values of T steps.
        A length without suitable divisors leaves a remainder, whose parts of `xs` and `ys` are copied once.

    Raises:
        PolicyError: `num` is not a whole number of at least 1, `keep` is neither "turn" nor "loop", or it is "loop"
            without a policy.

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

    def __post_init__(self) -> None:
        set_counts(self, "num")
        super().__post_init__()

    def lengths_for(self, length: int) -> tuple[int, ...]:
        return tuple(schedule.nested_lengths(length, self.num))

    def num_runs(self, length: int) -> int:
        # Once in the forward sweep, and once for each level whose turns are rematerialized: level i runs the steps of
        # a turn again to find the carries that level i + 1 starts from; the last one finds residuals.
        return (len(self.lengths_for(length)) + 1) * length


@recorded(headed(one_of("turn", "loop"), whole(1), 1))
@dataclasses.dataclass(frozen=True, repr=False, init=False)
class Lengths(NestedLoops):
    """`Levels` with lengths that you choose, outermost first.

    Args:
        *lengths: their product is the loop's length, or less: the remainder must be less than the product of all but
            the first, and is run as one more, shorter, turn of the outermost loop.
        policy, offload, keep: as in `Levels`.

    Example:
        >>> from statetx import policies
        >>> policies.Lengths(64, 64)
        Lengths(64, 64)
    """

    lengths: tuple[int, ...]

    def __init__(self, *lengths: int, policy: Policy = None, offload: bool = False, keep: str = "turn"):
        if not lengths:
            raise PolicyError("Lengths: give at least one length.")
        object.__setattr__(self, "lengths", tuple([as_count("Lengths: a length", n) for n in lengths]))
        super().__init__(policy=policy, offload=offload, keep=keep)

    @property
    def num_steps(self) -> int:
        return math.prod(self.lengths)

    def lengths_for(self, length: int) -> tuple[int, ...]:
        return self.lengths

    def num_runs(self, length: int) -> int:
        return (len(self.lengths) + 1) * length

    def to_json(self) -> list:
        return ["Lengths", self.keep, *self.lengths]

    @classmethod
    def _of_arguments(cls, keep: str, *lengths: int) -> Lengths:  # type: ignore[override]
        return cls(*lengths, keep=keep)

    def check(self, name: str, what: str, num: int) -> None:
        inner, product = math.prod(self.lengths[1:]), self.num_steps
        if not product <= num < product + inner:
            raise PolicyError(
                f"{name}: Lengths{self.lengths} are {product} {what} in all, and there are {num}.\n"
                f"Fix: let the first be {max(1, num // inner)}, or use policies.Levels({len(self.lengths)}), which "
                f"chooses."
            )


@recorded(row(whole(1)))
@dataclasses.dataclass(frozen=True, repr=False)
class Slots(Strategy):
    """Store `num` carries at a time, and run steps again from the nearest; keep residuals of steps in free slots.

    With carries only this is the binomial schedule, the fewest runs of the body that this number of slots allows: with
    ``r`` the least number such that ``C(num + r, num) > T``, no step is run more than r + 1 times: 3 times with ``num``
    about ``sqrt(2 T)``, and 8 times for a million steps with 20 slots. In the reversal slots become free. Where that
    saves more than 3% of the runs, they hold residuals of steps, so that these are not run again: 1,000 steps with 20
    slots take 2.8 runs a step instead of 3.75 if a step keeps as many bytes as a carry has (see `runs`). The memory is
    the same. The compiled program's size depends on neither T nor `num`.

    Args:
        num: how many carries there is room for, the first one included.
        policy: the values that a step keeps while it is differentiated; by default its residuals, without those that
            cheap operations compute again from the rest. With ``stored_as("bits")`` slots also hold the leaves of the
            carry as bits that are booleans, or that each step computes as 0 or 1: proved, or selected by name.

    Memory:
        `num` carries, as slots store them, and the values of one step. Cotangents of `xs`, and `ys`, have the loop's
        length, as always.

    Raises:
        PolicyError: `num` is not a whole number of at least 1.

    Source:
        Griewank and Walther 2000, "Algorithm 799: revolve"; with residuals in free slots Maddison 2024, arXiv
        2305.09568.

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
    policy: Policy = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        set_counts(self, "num")
        set_options(self)

    def build(self, step: LoopStep) -> Loop:
        return LoopOfSlots(step, self.num)

    def for_refs(self) -> Strategy:
        return Levels(2, policy=self.policy)

    def for_unknown_length(self, name: str) -> Any:
        return self

    def build_while(self, test: Body, step: LoopStep, max_steps: int | None) -> Callable:
        """The loop ``(constants of the test, constants of the body, carry) -> carry``, for as long as the test
        holds.
        """
        return online.while_loop(test, step, self.num, max_steps)

    def runs(self, length: int, *, carry_bytes: float = 1, residual_bytes: float | None = None) -> int:
        """Number of runs of the step in a gradient, if a step keeps `residual_bytes` for its derivative.

        Free slots hold residuals where this saves more than 3% of the runs. The compiled program has this count if a
        step's values have the types of the carry's leaves; `statetx.loop_report` has the bytes and the count of a
        given loop.

        Args:
            length: of the loop.
            carry_bytes, residual_bytes: of a carry, and of a step's residuals. Only their ratio counts. Without
                `residual_bytes` slots hold carries only.

        Raises:
            PolicyError: `length` is not a whole number, or negative; or a number of bytes is not finite, or negative.

        Example:
            >>> from statetx.policies import Slots
            >>> Slots(20).runs(1000), Slots(20).runs(1000, carry_bytes=512, residual_bytes=512)
            (3750, 2829)
        """
        length = as_count("Slots.runs: length", length, 0)
        of_carry = _exact_bytes("Slots.runs: carry_bytes", carry_bytes)
        of_residuals = None if residual_bytes is None else _exact_bytes("Slots.runs: residual_bytes", residual_bytes)
        with_carries = self.num_runs(length)
        if of_residuals is None:
            return with_carries
        ratio = of_carry / of_residuals if of_residuals else length
        num = max(1, min(self.num, length))
        mixed = schedule.schedule(length, tuple([1 + int(s * ratio) for s in range(num + 1)])).num_runs
        return mixed if mixed < WORTH_MIXING * with_carries else with_carries

    def num_runs(self, length: int) -> int:
        """Runs of the loop and of its reversal if slots hold carries only, which is an upper bound (see `runs`)."""
        length = as_count("Slots.num_runs: length", length, 0)
        return schedule.num_evaluations(length, max(1, min(self.num, length)))

    def to_json(self) -> list:
        return ["Slots", self.num]
