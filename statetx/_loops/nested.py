"""Loops in loops of a step, each rematerialized: in reverse, they run steps again instead of storing all residuals.

They consist of JAX's own `scan` and `checkpoint`, so they are differentiated in every order and mode. A turn is a
region, whose input is a carry. A leaf of it may be stored in an exact format, as any input of a region. The format says
nothing of the carry before the first step: a turn that begins with this one takes it from where the caller has it, as
slots do (`rows`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .. import _jax
from .._equations.structure import Body
from .._remat.fence import with_fence
from .._remat.mark import SAVE, KeepMarked
from .._remat.survey import Survey
from . import bind
from .step import LoopStep

_CARRY = "statetx.carry"


def nested(step: LoopStep, lengths: Sequence[int], *, offload: bool = False, keeps_all: bool = False) -> Callable:
    """``(constants, carry, xs) -> (carry, ys)`` by nested loops whose bodies are rematerialized.

    Args:
        offload: whether the outermost loop stores its carries in the host's memory.
        keeps_all: whether the values saved by the step's policy are stored for all steps, rather than for the steps of
            one inner loop.
    """
    run = _LoopsByLevel(step, lengths, offload, keeps_all)

    def loop(constants: list, carry: list, xs: list) -> tuple[list, list]:
        outermost = run.all_levels
        if run.policy is not None:
            policy = with_fence(run.policy, step.fence)
            return rematerialized(outermost, policy, constants, carry, xs, prevent_cse=True)
        return outermost(constants, carry, xs)

    return bind.compiled(loop)


@dataclasses.dataclass(frozen=True)
class _OffloadedCarries:
    """A policy for JAX: named carries go to the host's memory.

    Attributes:
        policy: for all other values; None to save none.
    """

    policy: Any

    def __call__(self, primitive: Any, *avals: Any, **params: Any) -> Any:
        if params.get("name") == _CARRY:
            return _jax.Offloadable("device", _jax.HOST_MEMORY)
        return self.policy is not None and self.policy(primitive, *avals, **params)


class _LoopsByLevel:
    """The loops by their level, 0 for the outermost.

    A loop of level i runs ``lengths[i]`` turns; a turn of the last level is a step, a turn of another is a loop of the
    next level. A remainder of the length is one more, shorter turn at the end of the loop.
    """

    def __init__(self, step: LoopStep, lengths: Sequence[int], offload: bool, keeps_all: bool):
        self._step = step
        self._lengths = lengths
        self._offload = offload
        jaxpr, policy = step.marked
        is_ours = policy is None or isinstance(policy, KeepMarked)
        # JAX's policy of the turns that are loops. It finds the values that are marked in the step, at any depth.
        of_turns = policy if keeps_all else None
        self._policies: list[Any] = [*[of_turns] * (len(lengths) - 1), policy]
        if offload:
            self._policies[0] = _OffloadedCarries(self._policies[0])

        # The leaves of the carry that are stored in another format, and the ones whose first value may not fit it.
        rows = [] if offload else step.rows
        self._formats = {n: row.format for n, row in enumerate(rows) if row.format is not None}
        self._firsts = [n for n in self._formats if not rows[n].is_exact_first]

        # A region has a number of its own for the codes of its carry: a region around it saves its own turns' codes.
        assert is_ours or not (self._formats or step.fence), "what another policy saves would be lost"
        number = max(Survey(jaxpr).regions, default=-1) + 1 if self._formats or step.fence else 0
        self._numbers = [number + len(lengths) - 1 - i for i in range(len(lengths))]
        if self._formats:
            self._policies = [_saving(p, n) for p, n in zip(self._policies, self._numbers, strict=True)]

        # JAX's policy of the whole loop, if it is a fenced region. It saves the outermost carries, and with
        # `keeps_all` the step's saved values: then it shares the step's number.
        self.policy: KeepMarked | None = None
        if step.fence is not None and not offload:
            is_shared = policy is not None and (keeps_all or len(lengths) == 1)
            saved_by_step = policy if is_shared else KeepMarked(number + len(lengths))
            self.policy = _saving(saved_by_step, self._numbers[0]) if self._formats else saved_by_step

    def all_levels(self, constants: list, carry: list, xs: list) -> tuple[list, list]:
        """Run the loop."""
        if not self._firsts:
            return self.level(0, constants, self._step.length, carry, xs)
        # The carry before the first step is a constant, and whether there was no step yet is part of the carry.
        first = [carry[n] for n in self._firsts]
        (_, *carry), ys = self.level(0, [*first, *constants], self._step.length, [jnp.bool_(True), *carry], xs)
        return carry, ys

    def level(self, i: int, constants: list, length: int, carry: list, xs: list) -> tuple[list, list]:
        """Run `length` steps by the loop of level `i`."""
        turn_length = math.prod(self._lengths[i + 1 :])
        num_turns, num_remaining = divmod(length, turn_length)
        turns = functools.partial(self._turns, i, constants, num_turns)
        turn = functools.partial(self._turn, i, constants)
        if not num_remaining:
            return turns(carry, xs)
        # Shorter than one turn: a `scan` of no steps would still have a body to trace.
        if num_turns == 0:
            return turn(length, carry, xs)

        remainder = lambda carry, xs: turn(num_remaining, self._stored(i, carry), xs)
        return one_after_the_other(turns, remainder, num_remaining, carry, xs, reverse=self._step.reverse)

    def _turn(self, i: int, constants: list, length: int, carry: list, xs: list) -> tuple[list, list]:
        is_step = i == len(self._lengths) - 1
        is_offloaded = self._offload and i == 0
        if is_step and not self._formats and not is_offloaded:
            return self._step.rematerialized(constants, carry, xs)

        def run(constants: list, carry: list, xs: list) -> tuple[list, list]:
            # Named in the region of a turn, whose policy offloads the names. A region around the loop would divide into
            # a loop that brings the carries of all turns back to the device, and one that reads them there.
            if is_offloaded:
                carry = [_jax.named(x, _CARRY) for x in carry]
            carry = self._in_formats(i, constants, carry)
            if not is_step:
                return self.level(i + 1, constants, length, carry, xs)
            flags, first = self._num_flags, len(self._firsts)
            carry, ys = self._step.marking(constants[first:], carry[flags:], xs)
            return [*[jnp.bool_(False)] * flags, *carry], ys

        return rematerialized(run, self._policies[i], constants, carry, xs)

    @property
    def _num_flags(self) -> int:
        """Number of leaves before the step's carry: 1, a flag of the first step, if some format needs it; else 0."""
        return 1 if self._firsts else 0

    def _in_formats(self, i: int, constants: list, carry: list) -> list:
        """The carry that a turn of level `i` starts from, in the turn, stored in the formats of its leaves."""
        carry, flags = list(carry), self._num_flags
        for n, format in self._formats.items():
            constant = (carry[0], constants[self._firsts.index(n)]) if n in self._firsts else None
            params = {"region": self._numbers[i], "what": SAVE, "is_ordered": False}
            carry[flags + n] = _jax.store(carry[flags + n], format, constant, **params)
        return carry

    def _turns(self, i: int, constants: list, num_turns: int, carry: list, xs: list) -> tuple[list, list]:
        turn_length = math.prod(self._lengths[i + 1 :])
        is_innermost = i == len(self._lengths) - 1
        if not is_innermost:
            xs = [x.reshape(num_turns, turn_length, *x.shape[1:]) for x in xs]

        def body(carry: list, xs: list) -> tuple[list, list]:
            return self._turn(i, constants, turn_length, self._stored(i, carry), xs)

        def counting_body(loop: tuple[Any, list], xs: list) -> tuple[tuple, list]:
            count, carry = loop
            carry, ys = body(carry, xs)
            self._step.tick(count + turn_length)
            return (count + turn_length, carry), ys

        # A counter in the carry, not a range among xs: that would be an array of the loop's length. Only the
        # outermost loop counts, since the inner ones run again in the backward pass, and would report their steps
        # twice.
        if i == 0 and self._step.is_shown:
            init = (jnp.int32(0), carry)
            (_, carry), ys = jax.lax.scan(counting_body, init, xs, num_turns, self._step.reverse)
        else:
            carry, ys = jax.lax.scan(body, carry, xs, num_turns, self._step.reverse)
        return carry, ys if is_innermost else [y.reshape(num_turns * turn_length, *y.shape[2:]) for y in ys]

    def _stored(self, i: int, carry: list) -> list:
        """The carry that a turn starts from, marked if it is saved by the region that is the whole loop."""
        if i == 0 and self.policy is not None:
            region = self.policy.region
            stored = {self._num_flags + n for n in self._formats}  # their codes are marked
            return [x if n in stored else _jax.mark(x, region=region, what=SAVE) for n, x in enumerate(carry)]
        return carry


def _saving(policy: KeepMarked | None, number: int) -> KeepMarked:
    """The policy that also saves the values marked with a number."""
    return KeepMarked(number) if policy is None else KeepMarked(policy.region, policy.inner_regions | {number})


def one_after_the_other(
    first: Callable, second: Callable, num_second: int, carry: list, xs: list, *, reverse: bool
) -> tuple[list, list]:
    """Run two loops ``(carry, xs) -> (carry, ys)``; the second has the last `num_second` steps."""
    # In reverse a loop begins at the end of xs: its last steps have the first elements.
    boundary = num_second if reverse else -num_second
    low, high = [x[:boundary] for x in xs], [x[boundary:] for x in xs]
    carry, first_ys = first(carry, high if reverse else low)
    carry, second_ys = second(carry, low if reverse else high)
    parts = (second_ys, first_ys) if reverse else (first_ys, second_ys)
    return carry, [jnp.concatenate(ys) for ys in zip(*parts, strict=True)]


def rematerialized(fun: Callable, policy: Any, *args: Any, prevent_cse: bool = False) -> Any:
    """``fun(*args)`` as a rematerialized region; `policy` is JAX's. In a loop's body it needs no barrier."""
    leaves, treedef = jax.tree.flatten(args)
    flat = bind.OfLeaves(fun, treedef)
    # Staged here and bound as equations: under ``jax_remat3`` the `jax.checkpoint` of jax 0.10 ignores `prevent_cse`
    # (decision 1).
    jaxpr, consts = _jax.stage(flat, [_jax.abstract(x) for x in leaves], traced_for="scan", name="chunk")
    body = Body.close(jaxpr, consts)
    outs = _jax.rematerialize(body.jaxpr, [*body.operands, *leaves], policy=policy, prevent_cse=prevent_cse)
    return flat.out_tree.unflatten(outs)
