"""Truncated back-propagation through time: loops whose gradients stop between segments of equal length.

A loop of known length is a scan over segments, of which each is one rematerialized region: the forward sweep stores the
carry at the start of each segment, and the backward pass runs the segments again, one at a time. No cotangent passes
from a segment to the one before it, so that the gradient of a loop of unknown length, which has only a last carry, is
that of its last segment.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .. import _jax
from .._equations.structure import Body
from .._errors import PolicyError
from .._remat.atoms import everything
from .._tree import is_float
from .._typing import Policy, public
from . import bind
from .build import as_strategy
from .derivative import jvp_of, with_derivative
from .nested import rematerialized
from .online import OnlineLoop
from .step import LoopStep
from .strategy import Lengths, Levels, Slots, Strategy, set_counts, set_options


@public
@dataclasses.dataclass(frozen=True, repr=False)
class Truncated(Strategy):
    """Stop gradients every `num` steps: truncated back-propagation through time. Values are those of the plain loop.

    The only strategy that changes gradients. Step 0 is the first that runs, and segments are the steps
    ``[0, num), [num, 2 num), ...``; the last one may be shorter. Between two segments the values of the carry and of
    the states that the body writes continue, and their gradients stop, as by ``jax.lax.stop_gradient``. So:

    - within a segment gradients flow as in the plain loop, from its `ys` to its `xs`, to the values that every step
      reads (weights) and to the carry at its start;
    - the cotangent of the last carry, and of the last values of the states, flows into the last segment only;
    - only the first segment has a gradient with respect to the first carry.

    It works with every order and mode of differentiation and under every transform. Twice in reverse mode it needs
    segments without a strategy, or with `Levels`. In `while_loop`, whose result is its last carry, the gradient is that
    of the last segment; it can be differentiated again in forward mode only.

    Args:
        num: the steps of a segment.
        checkpoint: how to store less within a segment: another strategy, or a short form of one, as in `scan`.
        policy: which values of all steps the forward sweep saves, besides the carry at the start of each segment;
            nothing by default. With ``policies.everything`` no step runs twice, and memory grows with the length as in
            the plain loop.

    Memory:
        For T steps ``ceil(T / num)`` carries, and what `num` steps compute (less with `checkpoint`). Each step runs
        twice. In `while_loop`: `num` + 1 carries, or with ``Slots(c)`` c + 1, and what one step computes; only the last
        segment runs again.

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
        return bind.compiled(_TruncatedLoop(step, self).run)

    def for_unknown_length(self, name: str) -> Any:
        if self.policy is not None:
            raise PolicyError(
                f"{name}: {self!r}: a loop of unknown length saves no values of its steps.\n"
                f"Fix: leave policy= out, or use scan or fori_loop."
            )
        if self.checkpoint is not None:
            self.checkpoint.for_unknown_length(name)
        return self

    def build_while(self, test: Body, step: LoopStep, max_steps: int | None) -> Callable:
        """As `Slots.build_while`."""
        slots: Any = self.checkpoint or Slots(self.num)
        return _while_loop(test, step.with_length(0, slots.policy), self.num, slots.num, max_steps)

    def num_runs(self, length: int) -> int:
        num, rest = divmod(length, self.num)
        lengths = [self.num] * num + [rest] * bool(rest)
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


class _TruncatedLoop:
    """A loop of known length."""

    def __init__(self, step: LoopStep, strategy: Truncated):
        self._step = step
        self._length = strategy.num
        self._strategy = strategy
        self._has_regions = strategy.has_regions(step.length)

    def run(self, constants: list, carry: list, xs: list) -> tuple[list, list]:
        num, rest = divmod(self._step.length, self._length)
        if num == 0 or (num == 1 and not rest):
            return self._segment(self._step.length)(constants, carry, xs)
        if not rest:
            return self._whole(num, constants, carry, xs)

        # The remainder runs last. In reverse the loop ends at the beginning of xs.
        reverse = self._step.reverse
        boundary = rest if reverse else num * self._length
        low, high = [x[:boundary] for x in xs], [x[boundary:] for x in xs]
        carry, whole_ys = self._whole(num, constants, carry, high if reverse else low)
        carry, rest_ys = self._segment(rest)(constants, _stopped(carry), low if reverse else high)
        self._step.tick(self._step.length)
        parts = (rest_ys, whole_ys) if reverse else (whole_ys, rest_ys)
        return carry, [jnp.concatenate(ys) for ys in zip(*parts, strict=True)]

    def _whole(self, num: int, constants: list, carry: list, xs: list) -> tuple[list, list]:
        """Run `num` segments of full length."""
        segment = self._segment(self._length)

        # The counter says which segment is the first, whose carry keeps its gradient: a first segment outside the
        # loop would be a second copy of the program.
        def body(loop: tuple[Any, list], xs: list) -> tuple[tuple[Any, list], list]:
            i, carry = loop
            carry, ys = segment(constants, _stopped(carry, unless=i == 0), xs)
            self._step.tick((i + 1) * self._length)
            return (i + 1, carry), ys

        xs = [x.reshape(num, self._length, *x.shape[1:]) for x in xs]
        (_, carry), ys = jax.lax.scan(body, (jnp.int32(0), carry), xs, num, self._step.reverse)
        return carry, [y.reshape(num * self._length, *y.shape[2:]) for y in ys]

    def _segment(self, length: int) -> Callable:
        """``(constants, carry, xs) -> (carry, ys)`` of one segment."""
        inner, step = self._strategy.within(length), self._step.with_length(length, None)
        if inner is not None:
            run = inner.build(self._step.with_length(length, inner.policy))
        elif self._has_regions:
            run = step.with_body(self._step.marked[0]).plain()
        else:
            run = step.plain()
        if not self._has_regions:
            return run
        policy = None if inner is not None else self._step.marked[1]
        return lambda *args: rematerialized(run, policy, *args)


def _stopped(carry: list, unless: Any = None) -> list:
    """The carry without its gradient; where `unless` holds, with it."""

    def stop(x: Any) -> Any:
        if not is_float(x):
            return x
        stopped = jax.lax.stop_gradient(x)
        return stopped if unless is None else jax.lax.select(_jax.varying_like(unless, x), x, stopped)

    return [stop(x) for x in carry]


# -- loops of unknown length --------------------------------------------------------------------------------------


class _SegmentSweep(NamedTuple):
    """The forward sweep after `count` steps.

    `start` is the carry before the last segment that has begun, and `first` the number of steps before it.
    """

    carry: list
    count: Any
    start: list
    first: Any


class _Counted(OnlineLoop):
    """A loop of at most `max_steps` steps; their number stands in the place of the constants of its test."""

    def is_running(self, test_constants: list, carry: list, count: Any) -> Any:
        return count < test_constants[0]


def _while_loop(test: Body, step: LoopStep, num: int, slots: int, max_steps: int | None) -> Callable:
    """As `online.while_loop`, with gradients through the last segment of `num` steps only."""
    whole = OnlineLoop(test, step, 0, max_steps)
    last_segment = _Counted(test, step, min(slots, num), num).with_rule()

    def sweep(test_constants: list, constants: list, carry: list) -> _SegmentSweep:
        def segment(before: _SegmentSweep) -> _SegmentSweep:
            """Run up to `num` steps. Only carry and count pass through this loop: XLA copies what a loop carries."""
            end = before.count + num
            carry, count = jax.lax.while_loop(
                lambda loop: whole.is_running(test_constants, *loop) & (loop[1] < end),
                lambda loop: (step(constants, loop[0], [])[0], loop[1] + 1),
                (before.carry, before.count),
            )
            return _SegmentSweep(carry, count, before.carry, before.count)

        # Where devices of a shard_map may run different numbers of steps, counts vary as the condition does.
        zero = _jax.as_varying(jnp.int32(0), sorted(_jax.varying_axes(test.jaxpr.outvars[0].aval)))
        is_running = lambda swept: whole.is_running(test_constants, swept.carry, swept.count)
        return jax.lax.while_loop(is_running, segment, _SegmentSweep(carry, zero, carry, zero))

    def truncated(test_constants: list, constants: list, carry: list) -> list:
        swept = sweep(*jax.lax.stop_gradient((test_constants, constants, carry)))
        # The carry before the first segment keeps its gradient.
        starts = zip(carry, swept.start, strict=True)
        start = [jax.lax.select(swept.first == 0, x, s) if is_float(x) else s for x, s in starts]
        return last_segment([swept.count - swept.first], constants, start)

    def derivative(args: tuple, tangents: dict[int, Any]) -> Any:
        outs, out_tangents = jvp_of(truncated, args, tangents)
        num_test = len(args[0])
        return outs, step.without_zeros([i - num_test for i in tangents if i >= num_test], out_tangents)

    return with_derivative(whole.run, derivative)
