"""A step of a loop, and loops in loops of it, each rematerialised: reversed, they run steps again instead of keeping all.

The body is there as equations, ``(*constants, *carry, *x) -> (*carry, *y)``. Made of JAX's own parts, nested loops are differentiated
in every order and mode.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .. import _jax
from .._equations.structure import Body
from .._lift.staged import as_types
from .._remat import decide
from .._remat.policy import Policy
from .._tree import is_float
from . import bind
from .cpu_concurrency import overlaps


class Step:
    """One step of a loop.

    Args:
        body: ``(*constants, *carry, *x) -> (*carry, *y)``.
        num_constants: how many constants there are, the body's operands included.
        num_carry: how many carries.
        length: of the loop; `reverse` as in `jax.lax.scan`.
        policy: what a rematerialised step keeps.
        name: of the function, for messages.
        tick: called with the number of steps done, and the phase if that is not the loop itself.
        kept: the body with the names by which its policy keeps values, and JAX's policy for these; made where it is not given.
    """

    def __init__(
        self,
        body: Body,
        num_constants: int,
        num_carry: int,
        *,
        length: int,
        reverse: bool,
        policy: Policy | None,
        name: str,
        tick: Callable | None = None,
        kept: tuple[Any, Any] | None = None,
    ):
        self.body = body
        self._tick = tick
        self.is_shown = tick is not None
        self.avals: list[Any] = [v.aval for v in body.jaxpr.outvars[:num_carry]]
        self.length = length
        self.reverse = reverse
        self.num_constants = num_constants
        self.num_carry = num_carry
        self.constant_avals: list[Any] = [v.aval for v in body.jaxpr.invars[:num_constants]]
        self.x_avals: list[Any] = [v.aval for v in body.jaxpr.invars[num_constants + self.num_carry :]]
        self.y_avals: list[Any] = [v.aval for v in body.jaxpr.outvars[self.num_carry :]]
        self.name = name
        self.policy = policy
        if kept is not None:
            self._kept = kept

    def tick(self, done: Any, phase: str = "") -> None:
        if self._tick is not None:
            self._tick(done, phase)

    def __call__(self, constants: list, carry: list, x: list) -> tuple[list, list]:
        return self._split(self.body((), *constants, *carry, *x))

    def keeping(self, constants: list, carry: list, x: list) -> tuple[list, list]:
        """The step, rematerialised with its policy if it has one."""
        return self(constants, carry, x) if self.policy is None else self.rematerialised(constants, carry, x)

    def rematerialised(self, constants: list, carry: list, x: list) -> tuple[list, list]:
        jaxpr, keeps = self._kept
        return self._split(_jax.rematerialise(jaxpr, [*constants, *carry, *x], policy=keeps, prevent_cse=False))

    @functools.cached_property
    def _kept(self) -> tuple[Any, Any]:
        jaxpr = self.body.jaxpr
        return (jaxpr, None) if self.policy is None else decide.apply(self.policy, jaxpr, (), self.name)

    @functools.cached_property
    def has_overlap(self) -> bool:
        """Whether a loop of it gains from running parts of it side by side: see `cpu_concurrency`."""
        return jax.default_backend() == "cpu" and overlaps(self.body.jaxpr)

    def moving_carry(self, moving: Iterable[int]) -> list[int]:
        """The float carries that a derivative with respect to these inputs of the body must follow: themselves among them, or
        made from them by something that has a derivative."""
        floats = [i for i, aval in enumerate(self.avals) if is_float(aval)]
        given = [False] * len(self.body.jaxpr.invars)
        for i in moving:
            given[i] = True
        first = self.num_constants
        while not all(given[first + i] for i in floats):
            found = [
                i
                for i, moves in enumerate(_jax.outputs_with_tangents(self.body.jaxpr, given)[: self.num_carry])
                if moves
            ]
            if all(given[first + i] for i in found):
                break
            for i in found:
                given[first + i] = True
        return [i for i in floats if given[first + i]]

    def _split(self, outs: list) -> tuple[list, list]:
        return as_types(outs[: self.num_carry], self.avals), outs[self.num_carry :]

    def with_body(self, jaxpr: _jax.Jaxpr) -> Step:
        """The step with other equations, of the same inputs and outputs."""
        step = copy.copy(self)
        step.body = Body(jaxpr, self.body.operands)
        if "_kept" in vars(self) and self._kept[0] is self.body.jaxpr:  # named before it was mapped
            step._kept = (jaxpr, self._kept[1])
        else:
            vars(step).pop("_kept", None)
        return step

    def mapped(self, axis: Any, is_mapped: Sequence[bool]) -> MappedStep:
        """The step for all examples of a `jax.vmap` at once.

        Args:
            axis: the axis of the examples, as JAX describes it.
            is_mapped: for each input of the body, whether it differs between examples.
        """
        # Ours judge the equations as they were staged, so what they keep is named before the equations are mapped.
        jaxpr, keeps = self._kept
        num_before, num_after = self.num_constants, self.num_constants + self.num_carry
        constants, carry, x = (
            list(is_mapped[:num_before]),
            list(is_mapped[num_before:num_after]),
            list(is_mapped[num_after:]),
        )
        while True:  # a carry is mapped if it is at first, or what a step makes of it
            instantiate = [*carry, *([False] * len(self.y_avals))]
            mapped, consts, outs = _jax.map_jaxpr(jaxpr, axis, [*constants, *carry, *x], instantiate)
            if outs[: self.num_carry] == carry:
                break
            carry = [a or b for a, b in zip(carry, outs, strict=False)]
        body = Body.close(mapped, consts)
        step = Step(
            body,
            body.num_operands + self.num_constants,
            self.num_carry,
            length=self.length,
            reverse=self.reverse,
            policy=self.policy,
            name=f"{self.name}, mapped over {axis.size} examples",
            tick=self._tick,
            kept=(body.jaxpr, keeps),
        )
        place = lambda flags, axis: [axis if flag else None for flag in flags]  # noqa: E731
        in_axes = [*place([*constants, *carry], 0), *place(x, 1)]
        return MappedStep(step, body.operands, in_axes, [*place(carry, 0), *place(outs[self.num_carry :], 1)])

    def plain(self) -> Callable:
        """The loop as it is."""
        if not self.is_shown:
            return bind.scan(
                self.body, self.num_constants, self.num_carry, length=self.length, reverse=self.reverse, unroll=1
            )

        def loop(constants: list, carry: list, xs: list) -> tuple[list, list]:
            def one(loop: tuple, x: list) -> tuple[tuple, list]:
                carry, y = self(constants, loop[1], x)
                self.tick(loop[0] + 1)
                return (loop[0] + 1, carry), y

            (_, carry), ys = jax.lax.scan(one, (jnp.int32(0), carry), xs, self.length, self.reverse)
            return carry, ys

        return bind.compiled(loop)


class MappedStep(NamedTuple):
    """A `Step` for all examples at once.

    Attributes:
        consts: values of the step's first constants, which the original has not.
        in_axes: for each constant, carry and xs of the original's loop the axis of the examples, None if it is the same
            for all; `out_axes` for the last carries and the ys.
    """

    step: Step
    consts: list[Any]
    in_axes: list[int | None]
    out_axes: list[int | None]


# -- nested loops ------------------------------------------------------------------------------------------------


def nested(step: Step, lengths: Sequence[int], *, offload: bool = False) -> Callable:
    """``(constants, carry, xs) -> (carry, ys)`` by loops in loops, of which each body is rematerialised.

    With `offload` the outermost stores its carries in the host's memory.
    """

    def loop(constants: list, carry: list, xs: list, length: int, levels: Sequence[int]) -> tuple[list, list]:
        is_outermost = len(levels) == len(lengths)
        inner = math.prod(levels[1:])
        num_turns, rest = divmod(length, inner)

        def turn(carry: list, xs: list, length: int = inner) -> tuple[list, list]:
            if len(levels) == 1:
                return step.rematerialised(constants, carry, xs)
            run = lambda constants, carry, xs: loop(constants, carry, xs, length, levels[1:])  # noqa: E731
            return _rematerialised(run, None, constants, carry, xs)

        def stored(carry: list) -> list:
            return [_jax.named(x, _CARRY) for x in carry] if offload and is_outermost else carry

        def outermost_turn(loop: tuple[Any, list], xs: list) -> tuple[tuple, list]:
            done, carry = loop
            carry, ys = turn(stored(carry), xs)
            step.tick(done + inner)
            return (done + inner, carry), ys

        def turns(carry: list, xs: list) -> tuple[list, list]:
            if len(levels) > 1:
                xs = [x.reshape(num_turns, inner, *x.shape[1:]) for x in xs]
            if is_outermost and step.is_shown:
                (_, carry), ys = jax.lax.scan(outermost_turn, (jnp.int32(0), carry), xs, num_turns, step.reverse)
            else:
                one = lambda carry, xs: turn(stored(carry), xs)  # noqa: E731
                carry, ys = jax.lax.scan(one, carry, xs, num_turns, step.reverse)
            return carry, [y.reshape(num_turns * inner, *y.shape[2:]) for y in ys] if len(levels) > 1 else ys

        if not rest:
            return turns(carry, xs)
        if num_turns == 0:
            return turn(carry, xs, length)
        at = rest if step.reverse else length - rest
        low, high = [x[:at] for x in xs], [x[at:] for x in xs]
        if step.reverse:
            carry, high = turns(carry, high)
            carry, low = turn(stored(carry), low, rest)
        else:
            carry, low = turns(carry, low)
            carry, high = turn(stored(carry), high, rest)
        return carry, [jnp.concatenate(parts) for parts in zip(low, high, strict=True)]

    def whole(constants: list, carry: list, xs: list) -> tuple[list, list]:
        if not offload:
            return loop(constants, carry, xs, step.length, lengths)
        keeps = jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=[_CARRY],
            offload_src="device",
            offload_dst=_jax.HOST_MEMORY,
        )
        run = lambda constants, carry, xs: loop(constants, carry, xs, step.length, lengths)  # noqa: E731
        return _rematerialised(run, keeps, constants, carry, xs)

    return bind.compiled(whole)


_CARRY = "statetx.carry"


def _rematerialised(fun: Callable, policy: Any, *args: Any) -> Any:
    leaves, treedef = jax.tree.flatten(args)
    out_tree: Any = None

    def flat(*leaves: Any) -> list[Any]:
        nonlocal out_tree
        outs, out_tree = jax.tree.flatten(fun(*treedef.unflatten(leaves)))
        return outs

    jaxpr, consts = _jax.stage(flat, [_jax.abstract(x) for x in leaves], traced_for="scan", name="chunk")
    body = Body.close(jaxpr, consts)
    outs = _jax.rematerialise(body.jaxpr, [*body.operands, *leaves], policy=policy, prevent_cse=False)
    return out_tree.unflatten(outs)
