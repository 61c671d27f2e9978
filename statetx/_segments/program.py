"""The compiled programs of a segment of a loop: its run, its pull-back."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .. import _jax
from .._lift.staged import to_key_data
from .._loops.step import LoopStep
from .._positions import replaced
from .._tree import is_float


class Segments:
    """A loop in segments of equal length; the last one may be shorter.

    Args:
        step: of the whole loop.
        length: of a segment.
        strategy: how a segment stores less for its pull-back; None for all residuals of its steps.
    """

    def __init__(self, step: LoopStep, length: int, strategy: Any):
        self.step, self.length, self._strategy = step, length, strategy
        self.num = -(-step.length // length)
        self.advance_program = jax.jit(self._advance, static_argnums=0)
        self.pull_program = jax.jit(self._pull, static_argnums=(0, 1))

    def num_steps(self, segment: int) -> int:
        return min(self.length, self.step.length - segment * self.length)

    def place(self, segment: int) -> int:
        """The first element of xs of a segment."""
        first, num = segment * self.length, self.num_steps(segment)
        return self.step.length - first - num if self.step.reverse else first

    def advance(self, segment: int, *args: Any) -> tuple[list, list, Any]:
        """``(constants, carry, xs) ->`` the carry after a segment, its ys, and the checksum of the carry."""
        return self.advance_program(self.num_steps(segment), self.place(segment), *args)

    def _advance(self, num: int, start: Any, constants: list, carry: list, xs: list) -> tuple[list, list, Any]:
        carry, ys = self.step.with_length(num, None).plain()(constants, carry, _slices(xs, start, num))
        return carry, ys, checksum(carry)

    def pull(self, segment: int, diff_indices: tuple[int, ...], *args: Any) -> tuple:
        """``(constants, carry, xs, cts, of_ys) ->`` cotangents of constants, of the carry, and of the segment's xs.

        `cts` are of the differentiated constants and carry, `of_ys` of the ys, by number.
        """
        return self.pull_program(self.num_steps(segment), diff_indices, self.place(segment), *args)

    def programs(self, diff_indices: tuple[int, ...]) -> list[tuple[Callable, dict[str, Any]]]:
        """The two programs of a whole segment, each with the types of its arguments, of all float ys."""
        step, num = self.step, self.num_steps(0)
        of_loop = lambda avals: [jax.ShapeDtypeStruct((step.length, *aval.shape), aval.dtype) for aval in avals]
        args = {"start": 0, "constants": step.constant_avals, "carry": step.avals, "xs": of_loop(step.x_avals)}
        diff_constants, diff_carry, _ = step.sorted_indices(diff_indices)
        cts = [step.constant_avals[i] for i in diff_constants], [step.avals[i] for i in diff_carry]
        of_ys = {i: x for i, x in enumerate(of_loop(step.y_avals)) if is_float(x)}
        pull = functools.partial(self._pull, num, diff_indices)
        return [(functools.partial(self._advance, num), args), (pull, {**args, "cts": cts, "of_ys": of_ys})]

    def _pull(
        self,
        num: int,
        diff_indices: tuple[int, ...],
        start: Any,
        constants: list,
        carry: list,
        xs: list,
        cts: Sequence[list],
        of_ys: dict[int, Any],
    ) -> tuple:
        diff_constants, diff_carry, diff_xs = self.step.sorted_indices(diff_indices)
        if self._strategy is None:
            loop = _with_tangents_in_carry(self.step.with_length(num, None), diff_constants)
        else:
            built = self._strategy.build(self.step.with_length(num, self._strategy.policy))
            loop = lambda constants, copies, *args: built(replaced(constants, diff_constants, copies), *args)
        xs = _slices(xs, start, num)

        def run(copies: list, diff: list, elements: list) -> tuple[list, list, list]:
            args = replaced(carry, diff_carry, diff), replaced(xs, diff_xs, elements)
            last, ys = loop(constants, copies, *args)
            if self._strategy is None:
                copies, last = last[: len(copies)], last[len(copies) :]
            return copies, [last[i] for i in diff_carry], [ys[i] for i in of_ys]

        inputs = [[constants[i] for i in diff_constants], [carry[i] for i in diff_carry], [xs[i] for i in diff_xs]]
        return jax.vjp(run, *inputs)[1]((*cts, _slices(list(of_ys.values()), start, num)))


def _slices(xs: list, start: Any, num: int) -> list:
    return [jax.lax.dynamic_slice_in_dim(x, start, num) for x in xs]


def _with_tangents_in_carry(step: LoopStep, diff_constants: list[int]) -> Callable:
    """The loop ``(constants, copies of those differentiated, carry, xs) -> ([*copies, *carry], ys)``.

    The copies pass through all steps, and each step has their tangents for the constants'. So their cotangents are a
    running sum, which a segment adds to step by step, in the order of the loop that is not in segments: the same bits.
    """
    num_copies, num_carry = len(diff_constants), len(diff_constants) + step.num_carry

    def body(*values: Any) -> list[Any]:
        first_carry = step.num_constants + num_copies
        constants, copies = list(values[: step.num_constants]), values[step.num_constants : first_carry]
        with_tangents = [_jax.with_tangent_of(x, constants[i]) for x, i in zip(copies, diff_constants, strict=True)]
        return [*copies, *step.body((), *replaced(constants, diff_constants, with_tangents), *values[first_carry:])]

    copy_avals = [step.constant_avals[i] for i in diff_constants]
    avals = [*step.constant_avals, *copy_avals, *step.avals, *step.x_avals]
    closed = _jax.close(*_jax.stage(body, avals, traced_for="scan", name=step.name))

    def loop(constants: list, copies: list, carry: list, xs: list) -> tuple[list, list]:
        options = {"length": step.length, "reverse": step.reverse}
        outs = _jax.bind_scan(closed, constants, [*copies, *carry], xs, **options)
        return outs[:num_carry], outs[num_carry:]

    return loop


def checksum(values: Sequence[Any]) -> jax.Array:
    """32 bits that tell arrays apart, computed where they are: it reads them once."""
    total = jnp.uint32(0)
    for x in to_key_data(values):
        x = x.astype(jnp.uint8) if x.dtype == bool else x
        x = jnp.stack([x.real, x.imag]) if jnp.iscomplexobj(x) else x
        words = jax.lax.bitcast_convert_type(x, f"uint{min(32, jax.dtypes.itemsize_bits(x.dtype))}").reshape(-1)
        weights = jax.lax.iota(jnp.uint32, words.size) * jnp.uint32(2654435761) | jnp.uint32(1)
        total = total * jnp.uint32(1000003) + jnp.sum(words.astype(jnp.uint32) * weights, dtype=jnp.uint32)
    return total
