"""A loop of unknown length that is reversed from a bounded number of slots.

While it runs, the loop stores its carry every so many steps, as often as the slots allow: when all are full, every other
one is given up and the distance doubles. The reversal knows the number of steps and goes on as `checkpointed` does,
storing anew in the slots that become free. It runs more steps than the optimum for a known length: up to a third with
many slots, up to three quarters with two or three.

The idea of giving up every other slot is that of online checkpointing (Stumm and Walther 2010, "New algorithms for
optimal online checkpointing", have a schedule that comes nearer to the optimum for short loops).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .. import _jax
from .._equations.structure import Body
from .._positions import replaced
from .._tree import is_float
from . import bind, schedule
from .checkpointed import Plan, reverse_scheduled
from .derivative import jvp_of, nonzero_tangents, tangents_of
from .nested import Step

_COLUMNS = 64  # of the schedule's table: as many runs of a step ahead of its reversal are planned for


def while_loop(test: Body, step: Step, slots: int | None, max_steps: int | None) -> Callable:
    """``(constants of the test, constants of the body, carry) -> carry``, differentiable in reverse mode if it has slots.

    Args:
        test: ``(*constants, *carry) -> bool``.
        slots: how many carries are stored; None for a loop that is not reversed.
        max_steps: the loop ends after as many, whatever the test says.
    """

    def goes_on(test_constants: list, carry: list, count: Any) -> Any:
        holds = test((), *test_constants, *carry)[0]
        return holds if max_steps is None else holds & (count < max_steps)

    def plain(test_constants: list, constants: list, carry: list) -> list:
        def one(loop: tuple) -> tuple:
            return loop[0] + 1, step(constants, loop[1], [])[0]

        start = (jnp.int32(0), carry)
        return jax.lax.while_loop(lambda loop: goes_on(test_constants, loop[1], loop[0]), one, start)[1]

    plain = bind.compiled(plain)
    if slots is None:
        return plain

    # Where devices of a shard_map may do different numbers of steps, counts vary as the condition does.
    axes = sorted(_jax.varying_axes(test.jaxpr.outvars[0].aval))

    def store(test_constants: list, constants: list, carry: list) -> tuple[list, Any]:
        """The last carry, and what the reversal needs: slots, their positions, which is the last, number of steps."""

        def is_running(loop: tuple) -> Any:
            return goes_on(test_constants, loop[0], loop[1])

        def segment(loop: tuple) -> tuple:
            carry, count, stored, positions, used, distance = loop
            stored = [jax.lax.dynamic_update_index_in_dim(s, x, used, 0) for s, x in zip(stored, carry, strict=True)]
            positions = positions.at[used].set(count)
            end = count + distance

            def one(inner: tuple) -> tuple:
                return step(constants, inner[0], [])[0], inner[1] + 1

            carry, count = jax.lax.while_loop(lambda inner: is_running(inner) & (inner[1] < end), one, (carry, count))
            return carry, count, stored, positions, used + 1, distance

        def fill(loop: tuple) -> tuple:
            """Fill the slots; then, if the loop goes on, give up every other one."""
            loop = jax.lax.while_loop(lambda loop: is_running(loop) & (loop[4] < slots), segment, loop)
            carry, count, stored, positions, used, distance = loop
            again = is_running(loop)
            kept = (slots + 1) // 2
            from_ = jnp.where(again, jnp.minimum(2 * jnp.arange(slots), slots - 1), jnp.arange(slots))
            stored, positions = [s[from_] for s in stored], positions[from_]
            used, distance = jnp.where(again, kept, used), jnp.where(again, 2 * distance, distance)
            # Where one slot is all there is, it holds the first carry, and the rest is one long segment.
            if slots == 1:
                carry, count = jax.lax.while_loop(
                    is_running, lambda inner: (step(constants, inner[0], [])[0], inner[1] + 1), (carry, count)
                )
            return carry, count, stored, positions, used, distance

        stored = [_jax.empty(slots, aval) for aval in step.avals]
        zero, one, positions = jnp.int32(0), jnp.int32(1), _jax.replicated(jnp.zeros(slots, jnp.int32))
        zero, one, positions = (_jax.as_varying(x, axes) for x in (zero, one, positions))
        loop = (carry, zero, stored, positions, zero, one)
        carry, count, stored, positions, used, _ = jax.lax.while_loop(is_running, fill, loop)
        return carry, (stored, positions, used - 1, count)

    def reverse(constants: list, stored: Any, ct_carry: list, moving: tuple[int, ...], floats: tuple[int, ...]) -> list:
        """Cotangents of the constants that `moving` names, and of those of the first carry that `floats` names."""
        slots_of, positions, top, count = stored

        def reverse_step(first: Any, *, carry: list, loop: tuple) -> tuple:
            def run(consts: list, values: list) -> list:
                c, k = replaced(constants, moving, consts), replaced(carry, floats, values)
                return [step.keeping(c, k, [])[0][i] for i in floats]

            _, pull = jax.vjp(run, [constants[i] for i in moving], [carry[i] for i in floats])
            of_consts, ct_carry = pull(loop[0])
            return ct_carry, [a + b for a, b in zip(loop[1], of_consts, strict=True)]

        def advance(first: Any, last: Any, carry: list) -> list:
            return jax.lax.fori_loop(first, last, lambda _, c: step(constants, c, [])[0], carry)

        rows = jnp.asarray(schedule.table(2**31 - 1, slots, columns=_COLUMNS))
        loop = (ct_carry, [jnp.zeros_like(constants[i]) for i in moving])
        plan = Plan(rows, positions, top)
        (ct_carry, sums), _ = reverse_scheduled(count, plan, 1, slots_of, loop, advance, reverse_step)
        return [*sums, *ct_carry]

    store = bind.compiled(store)
    reverse_compiled: dict[tuple, Callable] = {}

    @jax.custom_jvp
    def loop(test_constants: list, constants: list, carry: list) -> list:
        return plain(test_constants, constants, carry)

    def rule(primals: tuple, tangents: tuple) -> tuple[list, list]:
        test_constants, constants, carry = primals
        out, stored = store(*primals)
        leaves, treedef = jax.tree.flatten((primals, stored))
        first, last = len(test_constants), len(test_constants) + len(constants)
        # What only the test reads does not move the result.
        nonzero = {i: t for i, t in nonzero_tangents(tangents).items() if i >= first}
        moving = list(nonzero)
        consts = tuple(i - first for i in moving if i < last)
        floats = [i for i, a in enumerate(step.avals) if is_float(a)]
        followed = tuple(step.moving_carry(i - first for i in moving))

        def push(residuals: list, tangents: list) -> list:
            primals, _ = treedef.unflatten(residuals)
            return jvp_of(plain, primals, dict(zip(moving, tangents, strict=True)))[1]

        def pull(residuals: list, cts: list) -> list:
            (_, constants, _), stored = treedef.unflatten(residuals)
            of_carry = dict(zip(floats, cts, strict=True))
            cts = [_jax.zeros(step.avals[i]) if of_carry[i] is None else of_carry[i] for i in followed]
            key = consts, followed
            run = reverse_compiled.setdefault(key, bind.compiled(lambda c, s, cts: reverse(c, s, cts, *key)))
            found = run(constants, stored, cts)
            of_carry = dict(zip(followed, found[len(consts) :], strict=True))
            return [*found[: len(consts)], *(of_carry[i - last] for i in moving if i >= last)]

        types = [_jax.abstract(out[i]) for i in floats]
        return out, tangents_of(out, _jax.linear_call(push, pull, leaves, list(nonzero.values()), types))

    loop.defjvp(rule, symbolic_zeros=True)
    return loop
