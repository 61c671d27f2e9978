"""One step of a loop: its equations, policy, batching."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .. import _jax
from .._cached import cached_property
from .._equations.structure import Body
from .._lift.staged import as_types
from .._remat import decide
from .._remat.policy import Policy
from .._remat.stored import StoredType
from .._tree import is_float
from . import bind
from .rows import CarryRow

Loop = Callable[[list[Any], list[Any], list[Any]], tuple[list[Any], list[Any]]]
"""``(constants, carry, xs) -> (carry, ys)``."""


@dataclasses.dataclass(eq=False)
class LoopStep:
    """One step of a loop.

    Args:
        body: ``(*constants, *carry, *x) -> (*carry, *y)``.
        num_constants: how many constants there are, the body's operands included.
        num_carry: how many carries.
        length: of the loop; `reverse` as in `jax.lax.scan`.
        policy: which values a rematerialized step saves.
        name: of the function, for messages; `place`: with its line.
        on_tick: called with the number of finished steps, and with the phase unless it is the forward sweep.
        marks: see `marked`; `formats`: see `carry_formats`. By default they are found on demand.
        exact_first: the leaves of the carry whose formats give back the carry before the first step, too. Booleans need
            not be named.
        fence: how the backward pass of `nested` loops is fenced (`_remat.fence.with_fence`); None if it is not. XLA on
            CPUs allocates its results (cotangents of xs, residuals of a turn) at the start of the program if nothing
            holds them back.
        tangent_carry: the carries that are tangents of others. Where a loop stops gradients, they become zero.
    """

    body: Body
    num_constants: int
    num_carry: int
    _: dataclasses.KW_ONLY
    length: int
    reverse: bool
    policy: Policy | None
    name: str
    on_tick: Callable | None = None
    marks: tuple[Any, Any] | None = None
    formats: Sequence[StoredType | None] | None = None
    exact_first: Collection[int] = ()
    fence: str | None = None
    place: str = ""
    tangent_carry: Collection[int] = ()

    def __post_init__(self) -> None:
        types = lambda variables: [v.aval for v in variables]
        invars, outvars = self.body.jaxpr.invars, self.body.jaxpr.outvars
        # Constants include the body's operands, which may be differentiated like any other input.
        self.constant_avals: list[Any] = types(invars[: self.num_constants])
        self.x_avals: list[Any] = types(invars[self.num_constants + self.num_carry :])
        self.avals: list[Any] = types(outvars[: self.num_carry])
        self.y_avals: list[Any] = types(outvars[self.num_carry :])
        self.in_avals: list[Any] = [*self.constant_avals, *self.avals, *self.x_avals]
        self.out_avals: list[Any] = [*self.avals, *self.y_avals]
        self.float_outs = [i for i, aval in enumerate(self.out_avals) if is_float(aval)]
        self.first_x = self.num_constants + self.num_carry

    @property
    def is_shown(self) -> bool:
        return self.on_tick is not None

    def tick(self, done: Any, phase: str = "") -> None:
        if self.on_tick is not None:
            self.on_tick(done, phase)

    def __call__(self, constants: list, carry: list, x: list) -> tuple[list, list]:
        return self._split(self.body((), *constants, *carry, *x))

    def saving(self, constants: list, carry: list, x: list) -> tuple[list, list]:
        """The step, rematerialized with its policy if it has one."""
        return self(constants, carry, x) if self.policy is None else self.rematerialized(constants, carry, x)

    def rematerialized(self, constants: list, carry: list, x: list) -> tuple[list, list]:
        # Always in the body of a loop: XLA does not merge equations of two loops, so no barrier is needed.
        jaxpr, policy = self.marked
        return self._split(_jax.rematerialize(jaxpr, [*constants, *carry, *x], policy=policy, prevent_cse=False))

    def marking(self, constants: list, carry: list, x: list) -> tuple[list, list]:
        """The step with its saved values marked, for a region that saves them."""
        return self._split(_jax.evaluate(self.marked[0], (), [*constants, *carry, *x]))

    @cached_property
    def marked(self) -> tuple[Any, Any]:
        """The body with its saved values marked, and JAX's policy for the marks."""
        if self.marks is not None:
            return self.marks
        jaxpr = self.body.jaxpr
        return (jaxpr, None) if self.policy is None else decide.apply(self.policy, jaxpr, (), self.name)

    @cached_property
    def carry_formats(self) -> list[StoredType | None]:
        """Exact format that the policy asks for, for each leaf of the carry; None for none."""
        if self.formats is not None:
            return list(self.formats)
        return decide.carry_formats(self.policy, self.body.jaxpr, self.num_carry)

    @cached_property
    def rows(self) -> list[CarryRow]:
        """Rows that store the leaves of the carry."""
        leaves = enumerate(zip(self.avals, self.carry_formats, strict=True))
        return [CarryRow(aval, format, n in self.exact_first) for n, (aval, format) in leaves]

    def sort(self, values: Sequence[Any]) -> tuple[list, list, list]:
        """Split a list for all inputs of the body: the part of the constants, of the carry, of xs."""
        first, last = self.num_constants, self.first_x
        return list(values[:first]), list(values[first:last]), list(values[last:])

    def has_tangents(self, diff_indices: Iterable[int]) -> list[bool]:
        """Tell for each output of the loop whether its tangent may be nonzero, if the body's inputs at `diff_indices`
        have one.
        """
        diff_set, jaxpr = set(diff_indices), self.body.jaxpr
        flags = [i in diff_set for i in range(len(jaxpr.invars))]
        of_inputs, of_outs = _jax.steps_with_tangents(jaxpr, flags, self.num_constants, self.num_carry)
        carry = of_inputs[self.num_constants : self.first_x]
        return [*carry, *of_outs[self.num_carry :]]

    def diff_carry(self, diff_indices: Iterable[int]) -> list[int]:
        """The float carries with a nonzero tangent in some step, if the body's inputs at `diff_indices` have one."""
        has_tangent = self.has_tangents(diff_indices)
        return [i for i, aval in enumerate(self.avals) if is_float(aval) and has_tangent[i]]

    def without_zeros(self, diff_indices: Iterable[int], tangents: Sequence[Any]) -> list[Any]:
        """The tangents of the loop's float outputs, with None for those that are zero. JAX keeps these out of what
        follows: a callback takes no other.
        """
        has_tangent = self.has_tangents(diff_indices)
        return [t if has_tangent[i] else None for i, t in zip(self.float_outs, tangents, strict=True)]

    def sorted_indices(self, diff_indices: Sequence[int]) -> tuple[list[int], list[int], list[int]]:
        """The differentiated constants, carries and xs, if these inputs are; of carries those that depend on them."""
        return (
            [i for i in diff_indices if i < self.num_constants],
            self.diff_carry(diff_indices),
            [i - self.first_x for i in diff_indices if i >= self.first_x],
        )

    def diff_inputs(self, diff_indices: Sequence[int]) -> list[int]:
        """`sorted_indices` in one list, as indices among all inputs."""
        diff_constants, diff_carry, diff_xs = self.sorted_indices(diff_indices)
        return [*diff_constants, *(self.num_constants + i for i in diff_carry), *(self.first_x + i for i in diff_xs)]

    def _split(self, outs: list) -> tuple[list, list]:
        return as_types(outs[: self.num_carry], self.avals), outs[self.num_carry :]

    def with_body(self, jaxpr: _jax.Jaxpr) -> LoopStep:
        """The step with other equations, of the same inputs and outputs."""
        is_marked = "marked" in vars(self) and self.marked[0] is self.body.jaxpr  # before it was mapped
        marks = (jaxpr, self.marked[1]) if is_marked else None
        return self._with(body=Body(jaxpr, self.body.operands), marks=marks)

    def with_length(
        self, length: int, policy: Policy | None, carry_formats: Sequence[StoredType | None] | None = None
    ) -> LoopStep:
        """The step of a part of the loop, which reports no progress, with a policy for its values, and by default what
        it says of the carry.
        """
        return self._with(length=length, policy=policy, on_tick=None, marks=None, formats=carry_formats)

    def with_unchanged_carries(self) -> LoopStep:
        """The step of a loop that stores carries unchanged, whatever its policy asks for."""
        return self._with(formats=[None] * self.num_carry)

    def _with(self, **changes: Any) -> LoopStep:
        """The step with other fields, and with those computed on demand."""
        computed = {
            "marks": vars(self).get("marked", self.marks),
            "formats": vars(self).get("carry_formats", self.formats),
        }
        return dataclasses.replace(self, **(computed | changes))

    def mapped(self, axis: Any, is_mapped: Sequence[bool]) -> MappedStep:
        """The step for all examples of a `jax.vmap` at once.

        Args:
            axis: the axis of the examples, as JAX describes it.
            is_mapped: for each input of the body, whether it differs between examples.
        """
        # Policies of statetx judge staged equations, so the saved values are marked before the equations are mapped.
        jaxpr, policy = self.marked

        constants, carry, x = self.sort(is_mapped)
        while True:  # a fixed point: a carry is mapped if its first value is, or its value after some step
            # As JAX's own rule for `scan` (`_scan_batching_rule`). A carry that is mapped stays so: instantiated,
            # even if a step returns a value that all examples share.
            instantiate = [*carry, *([False] * len(self.y_avals))]
            mapped, consts, outs = _jax.map_jaxpr(jaxpr, axis, [*constants, *carry, *x], instantiate)
            if outs[: self.num_carry] == carry:
                break
            carry = [a or b for a, b in zip(carry, outs, strict=False)]

        body = Body.close(mapped, consts)
        step = self._with(
            body=body,
            num_constants=body.num_operands + self.num_constants,
            name=f"{self.name}, mapped over {axis.size} examples",
            marks=(body.jaxpr, policy),
            formats=self.carry_formats,
        )

        # Axis 0 of xs and ys are the steps, so that the examples have axis 1 there.
        axes = lambda flags, axis: [axis if flag else None for flag in flags]
        in_axes = [*axes([*constants, *carry], 0), *axes(x, 1)]
        return MappedStep(step, body.operands, in_axes, [*axes(carry, 0), *axes(outs[self.num_carry :], 1)])

    def plain(self) -> Loop:
        """The loop without checkpoints."""
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
    """A `LoopStep` for all examples at once.

    Attributes:
        consts: values of the step's first constants, which the original step does not have.
        in_axes: for each constant, carry and xs of the original loop the axis of the examples, None if all share it;
            `out_axes` likewise for the last carries and the ys.
    """

    step: LoopStep
    consts: list[Any]
    in_axes: list[int | None]
    out_axes: list[int | None]
