"""Loops in loops of a step, each rematerialized: in reverse, they run steps again instead of storing all residuals.

They consist of JAX's own `scan` and `checkpoint`, so they are differentiated in every order and mode.
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
from .step import Step

_CARRY = "statetx.carry"


def nested(step: Step, lengths: Sequence[int], *, offload: bool = False, keeps_all: bool = False) -> Callable:
    """``(constants, carry, xs) -> (carry, ys)`` by nested loops whose bodies are rematerialized.

    Args:
        offload: whether the outermost loop stores its carries in the host's memory.
        keeps_all: whether what the step's policy saves is stored for all steps, rather than for those of one inner loop.
    """
    run = _Nested(step, lengths, offload, keeps_all)

    def loop(constants: list, carry: list, xs: list) -> tuple[list, list]:
        outermost = lambda constants, carry, xs: run.level(0, constants, step.length, carry, xs)  # noqa: E731
        if offload:
            # JAX offloads residuals by a policy only, so the whole loop is one more region.
            saves_all = keeps_all or len(lengths) == 1
            policy = _OffloadedCarries(step.marked[1] if saves_all else None)
            return rematerialized(outermost, policy, constants, carry, xs)
        if run.region is not None:
            policy = with_fence(KeepMarked(run.region), step.fence)
            return rematerialized(outermost, policy, constants, carry, xs, prevent_cse=True)
        return outermost(constants, carry, xs)

    return bind.compiled(loop)


@dataclasses.dataclass(frozen=True)
class _OffloadedCarries:
    """A policy for JAX: named carries go to the host's memory.

    Attributes:
        other: the policy for all other values; None to save none.
    """

    other: Any

    def __call__(self, primitive: Any, *avals: Any, **params: Any) -> Any:
        if params.get("name") == _CARRY:
            return _jax.Offloadable("device", _jax.HOST_MEMORY)
        return self.other is not None and self.other(primitive, *avals, **params)


class _Nested:
    """The loops by their level, 0 for the outermost.

    A loop of level i runs ``lengths[i]`` turns; a turn of the last level is a step, a turn of another is a loop of the next level. A
    remainder of the length is one more, shorter turn at the end of the loop.
    """

    def __init__(self, step: Step, lengths: Sequence[int], offload: bool, keeps_all: bool):
        self._step = step
        self._lengths = lengths
        self._offload = offload
        # JAX's policy of the turns that are loops. It finds the values that are marked in the step, at any depth.
        self._policy = step.marked[1] if keeps_all else None

        # The number of the region that is the whole loop, if it is fenced. It saves the outermost carries, and what the step saves
        # if that is stored for all steps: then it shares the step's number.
        self.region: int | None = None
        if step.fence is not None and not offload:
            jaxpr, policy = step.marked
            assert policy is None or isinstance(policy, KeepMarked), "what another policy saves would be lost"
            if policy is not None and (keeps_all or len(lengths) == 1):
                self.region = policy.region
            else:
                self.region = max(Survey(jaxpr).regions, default=-1) + 1

    def level(self, i: int, constants: list, length: int, carry: list, xs: list) -> tuple[list, list]:
        """Run `length` steps by the loop of level `i`."""
        turn_length = math.prod(self._lengths[i + 1 :])
        num_turns, rest = divmod(length, turn_length)
        turns = functools.partial(self._turns, i, constants, num_turns)
        turn = functools.partial(self._turn, i, constants)
        if not rest:
            return turns(carry, xs)
        # Shorter than one turn: a `scan` of no steps would still have a body to trace.
        if num_turns == 0:
            return turn(length, carry, xs)

        # In reverse the loop begins at the end of xs: the remainder, its last turn, has the first elements.
        reverse = self._step.reverse
        boundary = rest if reverse else length - rest
        low, high = [x[:boundary] for x in xs], [x[boundary:] for x in xs]
        if reverse:
            carry, high = turns(carry, high)
            carry, low = turn(rest, self._stored(i, carry), low)
        else:
            carry, low = turns(carry, low)
            carry, high = turn(rest, self._stored(i, carry), high)
        return carry, [jnp.concatenate(parts) for parts in zip(low, high, strict=True)]

    def _turn(self, i: int, constants: list, length: int, carry: list, xs: list) -> tuple[list, list]:
        if i == len(self._lengths) - 1:
            return self._step.rematerialized(constants, carry, xs)
        run = lambda constants, carry, xs: self.level(i + 1, constants, length, carry, xs)  # noqa: E731
        return rematerialized(run, self._policy, constants, carry, xs)

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
        """The carry that a turn starts from, named if it is to be offloaded, and marked if it is saved by the region that is the whole loop."""
        if i == 0 and self._offload:
            return [_jax.named(x, _CARRY) for x in carry]
        if i == 0 and self.region is not None:
            return [_jax.mark(x, region=self.region, what=SAVE) for x in carry]
        return carry


def rematerialized(fun: Callable, policy: Any, *args: Any, prevent_cse: bool = False) -> Any:
    """``fun(*args)`` as a rematerialized region; `policy` is JAX's. In a loop's body it needs no barrier."""
    leaves, treedef = jax.tree.flatten(args)
    out_tree: Any = None

    def flat(*leaves: Any) -> list[Any]:
        nonlocal out_tree
        outs, out_tree = jax.tree.flatten(fun(*treedef.unflatten(leaves)))
        return outs

    # Staged here and bound as equations: under ``jax_remat3`` `jax.checkpoint` ignores `prevent_cse` (decision 1).
    jaxpr, consts = _jax.stage(flat, [_jax.abstract(x) for x in leaves], traced_for="scan", name="chunk")
    body = Body.close(jaxpr, consts)
    outs = _jax.rematerialize(body.jaxpr, [*body.operands, *leaves], policy=policy, prevent_cse=prevent_cse)
    return out_tree.unflatten(outs)
