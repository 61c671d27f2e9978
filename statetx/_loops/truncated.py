"""Truncated back-propagation through time: loops whose gradients stop between segments of equal length.

A loop of known length is a scan over segments. Each segment is one rematerialized region: the forward sweep stores the
carry at its start, and the backward pass runs the segments again, one at a time. No cotangent passes from a segment to
the one before it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .. import _jax
from .._errors import PolicyError
from .._remat.atoms import everything
from .._tree import is_float
from .._typing import Policy, public
from . import bind
from .build import as_strategy
from .linearized import composed
from .nested import one_after_the_other, rematerialized
from .step import LoopStep
from .strategy import Lengths, Levels, Strategy, set_counts, set_options


@public
@dataclasses.dataclass(frozen=True, repr=False)
class Truncated(Strategy):
    """Stop gradients every `num` steps: truncated back-propagation through time. Values do not change.

    The only strategy that changes gradients. Step 0 is the first that runs, and segments are the steps
    ``[0, num), [num, 2 num), ...``; the last one may be shorter. Between two segments the values of the carry and of
    the states that the body writes continue, and their gradients stop, as by ``jax.lax.stop_gradient``. So:

    - within a segment gradients flow as in the plain loop, from its `ys` to its `xs`, to the values that every step
      reads (weights) and to the carry at its start;
    - the cotangent of the last carry, and of the last values of the states, flows into the last segment only;
    - only the first segment has a gradient with respect to the first carry.

    It works with every order and mode of differentiation and under every transform. Twice in reverse mode it needs
    segments without a strategy, or with `Levels`.

    Args:
        num: the steps of a segment.
        checkpoint: how to store less within a segment: another strategy, or a short form of one, as in `scan`.
        policy: which values of all steps the forward sweep saves, besides the carry at the start of each segment;
            nothing by default. With ``policies.everything`` no step runs twice, and memory grows with the length as in
            the plain loop.

    Memory:
        For T steps ``ceil(T / num)`` carries, and what `num` steps compute (less with `checkpoint`). Each step runs
        twice.

    Raises:
        PolicyError: `num` is not a whole number of at least 1; or `checkpoint` comes with a policy that saves some
            values of a step.

    Source:
        Williams and Peng 1990, "An efficient gradient-based algorithm for on-line training of recurrent network
        trajectories", BPTT(h; h') with h = h'.

    Example:
        >>> import jax, jax.numpy as jnp, statetx
        >>> def loss(w, checkpoint=None):
        ...     return statetx.scan(lambda h, x: (w * h + x, h), 0.0, jnp.ones(4), checkpoint=checkpoint)[0]
        >>> float(jax.grad(loss)(2.0)), float(jax.grad(loss)(2.0, statetx.Truncated(2)))
        (17.0, 13.0)
    """

    num: int
    checkpoint: Any = dataclasses.field(default=None, kw_only=True)
    policy: Policy = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        set_counts(self, "num")
        set_options(self)
        if self.checkpoint is None:
            return
        object.__setattr__(self, "checkpoint", as_strategy("Truncated", self.checkpoint))
        if self.policy not in (None, everything):
            raise PolicyError(
                f"Truncated: policy={self.policy!r} saves values of a step, and checkpoint={self.checkpoint!r} "
                f"decides about them, too."
                f"\nFix: give the policy to the strategy of the segment, as in "
                f"Truncated({self.num}, checkpoint=policies.Slots(4, policy={self.policy!r}))."
            )

    @property
    def truncation(self) -> int:  # type: ignore[override]
        return self.num

    @property
    def step_policy(self) -> Policy:
        return self.policy if self.checkpoint is None else self.checkpoint.step_policy

    def build(self, step: LoopStep) -> Callable:
        return composed(step, lambda step: bind.compiled(_TruncatedLoop(step, self).run))

    def num_runs(self, length: int) -> int:
        num, num_remaining = divmod(length, self.num)
        lengths = [self.num] * num + [num_remaining] * bool(num_remaining)
        in_segments = sum(n if self.checkpoint is None else self.within(n).num_runs(n) for n in lengths)
        # A segment that is a region runs once more: in the forward sweep, where nothing of it is saved.
        return in_segments + (length if self.has_regions(length) else 0)

    def has_regions(self, length: int) -> bool:
        """Whether segments run again in the backward pass; a single one never does."""
        return self.policy != everything and length > self.num

    def within(self, length: int) -> Any:
        """The strategy of a segment of so many steps."""
        inner = self.checkpoint
        # Lengths that fit a whole segment fit no shorter one.
        if isinstance(inner, Lengths) and length != self.num:
            return Levels(len(inner.lengths), policy=inner.policy, offload=inner.offload, keep=inner.keep)
        return inner


class _TruncatedLoop(NamedTuple):
    """A loop of known length."""

    step: LoopStep
    strategy: Truncated

    def run(self, constants: list, carry: list, xs: list) -> tuple[list, list]:
        num, num_remaining = divmod(self.step.length, self.strategy.num)
        if num == 0 or (num == 1 and not num_remaining):
            return self._segment(self.step.length)(constants, carry, xs)
        if not num_remaining:
            return self._whole(num, constants, carry, xs)

        def remainder(carry: list, xs: list) -> tuple[list, list]:
            outs = self._segment(num_remaining)(constants, self._stopped(carry), xs)
            self.step.tick(self.step.length)
            return outs

        segments = functools.partial(self._whole, num, constants)
        return one_after_the_other(segments, remainder, num_remaining, carry, xs, reverse=self.step.reverse)

    def _whole(self, num: int, constants: list, carry: list, xs: list) -> tuple[list, list]:
        """Run `num` segments of full length."""
        segment = self._segment(self.strategy.num)

        # The counter says which segment is the first, whose carry keeps its gradient: a first segment outside the
        # loop would be a second copy of the program.
        def body(loop: tuple[Any, list], xs: list) -> tuple[tuple[Any, list], list]:
            i, carry = loop
            carry, ys = segment(constants, self._stopped(carry, unless=i == 0), xs)
            self.step.tick((i + 1) * self.strategy.num)
            return (i + 1, carry), ys

        xs = [x.reshape(num, self.strategy.num, *x.shape[1:]) for x in xs]
        (_, carry), ys = jax.lax.scan(body, (jnp.int32(0), carry), xs, num, self.step.reverse)
        return carry, [y.reshape(num * self.strategy.num, *y.shape[2:]) for y in ys]

    def _segment(self, length: int) -> Callable:
        """``(constants, carry, xs) -> (carry, ys)`` of one segment."""
        inner, step = self.strategy.within(length), self.step.with_length(length, None)
        if inner is not None:
            run = inner.build(self.step.with_length(length, inner.policy))
        elif self.strategy.has_regions(self.step.length):
            run = step.with_body(self.step.marked[0]).plain()
        else:
            run = step.plain()
        if not self.strategy.has_regions(self.step.length):
            return run
        policy = None if inner is not None else self.step.marked[1]
        return lambda *args: rematerialized(run, policy, *args)

    def _stopped(self, carry: list, unless: Any = None) -> list:
        """The carry without its gradient; where `unless` holds, with it."""

        def stop(n: int, x: Any) -> Any:
            if not is_float(x):
                return x
            stopped = jnp.zeros_like(x) if n in self.step.tangent_carry else jax.lax.stop_gradient(x)
            return stopped if unless is None else jax.lax.select(_jax.varying_like(unless, x), x, stopped)

        return [stop(n, x) for n, x in enumerate(carry)]
