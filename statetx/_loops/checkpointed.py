"""A loop of known length that is reversed from carries in a bounded number of slots.

The forward sweep stores the carry before some blocks of steps (`schedule`), and `reversal` reverses the blocks. The loops of a reversal
have no reverse mode of their own, so higher derivatives are those of `nested` loops.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from fractions import Fraction
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .. import _jax
from .._lift.staged import as_types
from .._positions import replaced
from .._tree import is_float
from . import schedule
from .cpu_concurrency import concurrent_fori_loop
from .derivative import Loop, floats_of, jvp_of, linear_in_tangents, with_derivative
from .nested import nested
from .reversal import Filled, SlotMemory, reverse_blocks
from .step import Step


class Stored(NamedTuple):
    """What the forward sweep leaves for the reversal.

    Attributes:
        slots: for each leaf of the carry, its values before the blocks of `schedule.first_positions`.
        carry: after the last whole block; empty if no steps are left after it.
    """

    slots: list
    carry: list


class CheckpointedLoop(Loop):
    """A loop that is reversed from a bounded number of slots.

    Args:
        step: of the loop.
        slots: how many carries are stored at a time, the first one included.
        block: how many steps are reversed together, from their residuals.
        offload: whether the carries are stored in the host's memory.
    """

    def __init__(self, step: Step, slots: int, block: int = 1, *, offload: bool = False):
        super().__init__(step)
        self._offload = offload
        self._memory = SlotMemory(offload)
        self._block = block
        self._num_blocks, self._rest = divmod(step.length, block)
        # More slots than blocks would never be written.
        self.slots = max(1, min(slots, self._num_blocks))
        self._sweep = with_derivative(self._store, self._derivative_of_store)
        self._reversal = functools.cache(self._make_reversal)
        # The nested form serves second derivatives in reverse mode (decision 6). Two levels of 20,000 steps store
        # about 2 sqrt(20,000) = 283 carries; three store 3 * 20,000**(1/3) = 81, for one more run of each step.
        lengths = schedule.nested_lengths(step.length, 2 if step.length < 20_000 else 3)
        self._nested = nested(step, lengths)

    def with_step(self, step: Step) -> CheckpointedLoop:
        return CheckpointedLoop(step, self.slots, self._block, offload=self._offload)

    # -- derivatives --

    def derivative(self, primals: tuple, tangents: dict[int, Any]) -> tuple[tuple[list, list], list]:
        outs, stored = self._sweep(*primals)

        def reverse(primals: tuple, stored: Stored, diff_indices: tuple[int, ...], cts: list) -> list:
            has_ct = tuple(ct is not None for ct in cts)
            return self._reversal(diff_indices, has_ct)(primals, stored, [ct for ct in cts if ct is not None])

        return outs, linear_in_tangents(primals, stored, outs, tangents, forward=self._nested, reverse=reverse)

    def _derivative_of_store(self, args: tuple, tangents: dict[int, Any]) -> Any:
        """The derivative of the forward sweep. The stored carries count as constants: the reversal, their only reader, is a
        function of the arguments and is differentiated as such."""
        outs = self._store(*args)
        return outs, jvp_of(self._nested, args, tangents)[1]

    def _make_reversal(self, diff_indices: tuple[int, ...], has_ct: tuple[bool, ...]) -> Callable:
        """``(primals, stored, cotangents) -> cotangents`` of the inputs at `diff_indices`; `has_ct`: which float outputs have
        a cotangent."""

        # Two programs with the same values. The `while` loops of the schedule have no reverse mode, so a derivative
        # of the reversal is that of the nested loops' pullback, which JAX can reverse again.
        def by_schedule(primals: tuple, stored: Stored, cts: list) -> list:
            return _Reversal(self, primals, diff_indices).run(stored, _expanded(cts, has_ct))

        def by_nesting(primals: tuple, cts: list) -> list:
            outs, pull = jax.vjp(
                lambda *xs: floats_of(self._nested, primals, dict(zip(diff_indices, xs, strict=True))),
                *[jax.tree.leaves(primals)[i] for i in diff_indices],
            )
            return list(
                pull(
                    [
                        jnp.zeros_like(x) if ct is None else ct
                        for ct, x in zip(_expanded(cts, has_ct), outs, strict=True)
                    ]
                )
            )

        def derivative(args: tuple, tangents: dict[int, Any]) -> Any:
            primals, stored, cts = args
            num, num_stored = len(jax.tree.leaves(primals)), len(jax.tree.leaves(stored))
            # Tangents of `stored` are left out: the stored carries are functions of the primals, and `by_nesting`
            # computes them again. It has no such argument, so the indices of the cotangents move down.
            of_primals = {i: t for i, t in tangents.items() if i < num}
            of_cts = {i - num_stored: t for i, t in tangents.items() if i >= num + num_stored}
            return jvp_of(by_nesting, (primals, cts), of_primals | of_cts)

        return with_derivative(by_schedule, derivative)

    # -- the forward sweep --

    def index(self, i: Any) -> Any:
        """The position in `xs` of step `i`."""
        return self.step.length - 1 - i if self.step.reverse else i

    def element(self, xs: list, i: Any) -> list:
        return [jax.lax.dynamic_index_in_dim(x, self.index(i), 0, keepdims=False) for x in xs]

    def _store(self, constants: list, carry: list, xs: list) -> tuple[tuple[list, list], Stored]:
        """Run the loop: ``(carry, ys)``, and the stored carries."""
        step = self.step
        positions = schedule.first_positions(self._num_blocks, self.slots) if self._num_blocks else []
        bounds = jnp.asarray([p * self._block for p in (*positions, self._num_blocks)], jnp.int32)
        mean_length = Fraction(self._num_blocks * self._block, max(1, len(positions)))

        # Elements and ys by index, not by `scan`: segments differ in length, and a part of xs for each of them would
        # be a copy.
        def one(i: Any, loop: tuple[list, list]) -> tuple[list, list]:
            carry, y = step(constants, loop[0], self.element(xs, i))
            step.tick(i + 1)
            index = self.index(i)
            return carry, [jax.lax.dynamic_update_index_in_dim(b, v, index, 0) for b, v in zip(loop[1], y, strict=True)]

        # One inner loop with traced bounds for all segments, so that the size of the program does not depend on their
        # number.
        def segment(j: Any, loop: Any) -> Any:
            slots, carry, ys = loop
            slots = self._memory.write(slots, j, carry)
            return (slots, *_jax.counted_fori_loop(bounds[j], bounds[j + 1], one, (carry, ys), mean_length))

        slots = self._memory.make(self.slots, step.avals)
        ys = [_buffer(step.length, aval, i) for i, aval in enumerate(step.y_avals)]
        carry = as_types(carry, step.avals)
        slots, carry, ys = jax.lax.fori_loop(0, len(positions), segment, (slots, carry, ys))

        # The rest is shorter than a block. The carry before it needs no slot: it is reversed first, and its memory is
        # free then.
        before_rest = carry if self._rest else []
        carry, ys = jax.lax.fori_loop(step.length - self._rest, step.length, one, (carry, ys))
        return (carry, ys), Stored(slots, before_rest)

    # -- the reversal --

    @functools.cached_property
    def mean_advance(self) -> Fraction:
        """How many steps the reversal of a block runs ahead of it, in the mean over all blocks."""
        num = self._num_blocks
        # Of `num_evaluations`, each block runs once in the forward sweep, and once when it is reversed.
        num_ahead = schedule.num_evaluations(num, self.slots) - 2 * num
        return Fraction(num_ahead * self._block, max(1, num))

    def reverse(self, stored: Stored, init: Any, advance: Callable, reverse_steps: Callable) -> Any:
        """Reverse all steps, the last first.

        Args:
            advance: ``(first step, end step, carry) -> carry``.
            reverse_steps: ``(first step, number of steps, carry, result) -> result``.
        """
        num, block, result = self._num_blocks, self._block, init
        if self._rest:
            result = reverse_steps(num * block, self._rest, stored.carry, result)
        if num:
            result, _ = reverse_blocks(
                num,
                Filled.by_schedule(num, self.slots),
                stored.slots,
                result,
                lambda first, end, carry: advance(first * block, end * block, carry),
                lambda i, carry, result: reverse_steps(i * block, block, carry, result),
                self._memory,
            )
        return result


class _Cotangents(NamedTuple):
    """After the steps from some step on have been reversed.

    Attributes:
        carry: cotangents of the differentiated carries before that step.
        constants: of the differentiated constants, summed over the reversed steps.
        xs: of the differentiated xs, of the loop's length, written for the reversed steps.
    """

    carry: list
    constants: list
    xs: list


class _Reversal:
    """The backward pass with respect to some inputs of a loop.

    Args:
        diff_indices: of the differentiated inputs among constants, carry, xs.
    """

    def __init__(self, loop: CheckpointedLoop, primals: tuple, diff_indices: tuple[int, ...]):
        self._loop, self._step = loop, loop.step
        self._constants, _, self._xs = primals
        first_carry, first_x = self._step.num_constants, self._step.num_constants + self._step.num_carry
        self._diff_constants = [i for i in diff_indices if i < first_carry]
        self._diff_init = [i - first_carry for i in diff_indices if first_carry <= i < first_x]
        self._diff_xs = [i - first_x for i in diff_indices if i >= first_x]
        self._diff_carry = self._step.diff_carry(diff_indices)
        self._float_carry = [i for i, a in enumerate(self._step.avals) if is_float(a)]
        self._float_ys = [i for i, a in enumerate(self._step.y_avals) if is_float(a)]

    def run(self, stored: Stored, cts: list) -> list:
        """The cotangents of the inputs, from those of the loop's float outputs; None for a zero one."""
        avals = self._step.avals
        ct_carry = dict(zip(self._float_carry, cts, strict=False))
        self._ct_ys = cts[len(self._float_carry) :]
        init = _Cotangents(
            [_jax.zeros(avals[i]) if ct_carry[i] is None else ct_carry[i] for i in self._diff_carry],
            [jnp.zeros_like(self._constants[i]) for i in self._diff_constants],
            # Negative numbers: the ys of the forward sweep, which may still be alive, have the others.
            [_buffer(self._step.length, self._step.x_avals[i], -1 - i) for i in self._diff_xs],
        )
        total = self._loop.reverse(stored, init, self._advance, self._reverse_steps)
        # A carry outside `_diff_carry` depends on no differentiated input: nothing reads its cotangent, which stays
        # as given.
        ct_carry.update(zip(self._diff_carry, total.carry, strict=True))
        return [*total.constants, *(ct_carry[i] for i in self._diff_init), *total.xs]

    def _advance(self, first: Any, end: Any, carry: list) -> list:
        # Most runs of the step in a reversal are made here: only this loop is worth the small kernels (decision 25).
        fori_loop = concurrent_fori_loop if self._step.has_independent_products else _jax.counted_fori_loop
        one = lambda i, c: self._step(self._constants, c, self._loop.element(self._xs, i))[0]  # noqa: E731
        return fori_loop(first, end, one, carry, self._loop.mean_advance)

    def _reverse_steps(self, first: Any, num: int, carry: list, total: _Cotangents) -> _Cotangents:
        # In reverse the last step of the block has its lowest position in xs.
        low = self._loop.index(first + num - 1) if self._step.reverse else first
        part = lambda x: jax.lax.dynamic_slice_in_dim(x, low, num, 0)  # noqa: E731
        elements = [part(x) for x in self._xs]

        def run(diff_constants: list, diff_carry: list, diff_elements: list) -> tuple[list, list]:
            constants = replaced(self._constants, self._diff_constants, diff_constants)
            last, ys = self._run(
                num,
                constants,
                replaced(carry, self._diff_carry, diff_carry),
                replaced(elements, self._diff_xs, diff_elements),
            )
            return [last[i] for i in self._diff_carry], [ys[i] for i in self._float_ys]

        (_, ys), pull = jax.vjp(
            run,
            [self._constants[i] for i in self._diff_constants],
            [carry[i] for i in self._diff_carry],
            [elements[i] for i in self._diff_xs],
        )
        ct_ys = [jnp.zeros_like(y) if ct is None else part(ct) for ct, y in zip(self._ct_ys, ys, strict=True)]
        ct_constants, ct_carry, ct_elements = pull((total.carry, ct_ys))

        self._step.tick(self._step.length - first, "backward")
        sums = [a + b for a, b in zip(total.constants, ct_constants, strict=True)]
        ct_xs = [
            jax.lax.dynamic_update_slice_in_dim(buffer, ct, low, 0)
            for buffer, ct in zip(total.xs, ct_elements, strict=True)
        ]
        return _Cotangents(ct_carry, sums, ct_xs)

    def _run(self, num: int, constants: list, carry: list, elements: list) -> tuple[list, list]:
        """Run some steps, saving their residuals."""
        # A scan of one step would stack the residuals along an axis of one.
        if num > 1:
            body = functools.partial(self._step.saving, constants)
            return jax.lax.scan(body, carry, elements, num, self._step.reverse)
        carry, y = self._step.saving(constants, carry, [x[0] for x in elements])
        return carry, [v[None] for v in y]


def _expanded(values: list, is_given: tuple[bool, ...]) -> list:
    """The values in the places where one is given, None in others."""
    remaining = iter(values)
    return [next(remaining) if given else None for given in is_given]


def _buffer(length: int, aval: Any, number: int) -> Any:
    """An array to be written in place.

    The number must differ between buffers that are alive together. Otherwise XLA makes them as copies of one buffer, which is then
    alive as long as they are.
    """
    buffer = _jax.empty(length, aval)
    return buffer + jnp.asarray(number, aval.dtype) if is_float(aval) and number else buffer
