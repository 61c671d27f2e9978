"""A step in two parts: forward, which returns what is kept for the derivative (residuals), and backward, which reads
them.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from .. import _jax
from .._equations.flops import count
from .._equations.inline import inline
from .._equations.primitives import JIT, REMAT, row_of
from .._lift.stage import close_derivative
from .._positions import replaced
from .._remat.fence import contains_loop  # it also lowers `_jax.hold`
from .._tree import is_float, num_bytes
from .cut import needed_equations, smallest_residuals
from .rows import row_bytes
from .step import LoopStep

_MANY_CARRIES = 4  # measured: a loop that runs once saves memory at 16 and more, and takes some at 1.3 and 2.6


class BackwardStep:
    """The forward and the backward part of a step, differentiated with respect to some inputs.

    Args:
        diff_constants, diff_carry, diff_xs: the differentiated inputs.

    Attributes:
        residual_avals: the types of the residuals in slots. What the backward part can have without them is not among
            them: constants, the element of xs, what is computed from constants alone, and what cheap operations compute
            from the residuals (see `cut`).
    """

    def __init__(
        self, step: LoopStep, diff_constants: Sequence[int], diff_carry: Sequence[int], diff_xs: Sequence[int]
    ):
        self._step = step
        self._diff = diff_constants, diff_carry, diff_xs
        self._float_ys = [i for i, a in enumerate(step.y_avals) if is_float(a)]
        self._num_constants, self._num_carry = step.num_constants, step.num_carry
        avals = [*step.constant_avals, *step.avals, *step.x_avals]
        jaxpr, consts = _jax.stage(self._differentiated, avals, traced_for="scan", name=f"{step.name}, forward")
        self._body = body = close_derivative(jaxpr, consts)

        # The leaves of the pullback are read from what is known without the step, and from what is stored.
        first_carry, first_x = (
            body.num_operands + step.num_constants,
            body.num_operands + step.num_constants + step.num_carry,
        )
        invars, outvars = body.jaxpr.invars, body.jaxpr.outvars
        self._leaves = outvars[step.num_carry :]
        leaves = list(dict.fromkeys(v for v in self._leaves if isinstance(v, _jax.Var)))
        self._inputs = [*invars[:first_carry], *invars[first_x:]]
        known = {*self._inputs, *_computed_from(body.jaxpr, invars[:first_carry])}

        # A leaf of the carry among the residuals is stored as slots store it.
        carry_avals = [row.stored for row in step.rows]
        carries = {v: i for i, v in enumerate(invars[first_carry:first_x]) if step.rows[i].format is not None}
        stored_type = lambda v: carry_avals[carries[v]] if v in carries else v.aval
        cost = lambda v: row_bytes(stored_type(v), carry_avals)
        self._stored = smallest_residuals(body.jaxpr, [v for v in leaves if v not in known], known, cost)
        self._carries = {n: carries[v] for n, v in enumerate(self._stored) if v in carries}
        self.residual_avals = list(map(stored_type, self._stored))
        self._forward = _part(body.jaxpr, [*outvars[: step.num_carry], *self._stored])

        self._computed = [v for v in leaves if v not in {*self._inputs, *self._stored}]
        available = {*self._inputs, *self._stored}
        self._again = _jax.rebuild(
            body.jaxpr,
            invars=[*self._inputs, *self._stored],
            outvars=self._computed,
            eqns=needed_equations(body.jaxpr, self._computed, available),
        )

    def _differentiated(self, *values: Any) -> list:
        diff_constants, diff_carry, diff_xs = self._diff
        constants, carry, x = self._sort(values)

        def run(constant_values: list, carry_values: list, x_values: list) -> tuple[tuple[list, list], list]:
            last, y = self._step.saving(
                replaced(constants, diff_constants, constant_values),
                replaced(carry, diff_carry, carry_values),
                replaced(x, diff_xs, x_values),
            )
            return ([last[i] for i in diff_carry], [y[i] for i in self._float_ys]), last

        _, pull, last = jax.vjp(
            run,
            [constants[i] for i in diff_constants],
            [carry[i] for i in diff_carry],
            [x[i] for i in diff_xs],
            has_aux=True,
        )
        leaves, self._treedef = jax.tree.flatten(pull)
        return [*last, *leaves]

    @functools.cached_property
    def flops(self) -> int:
        """Operations of the backward part."""
        step, carry = self._step, self._diff[1]
        types = [*step.constant_avals, *step.x_avals, *(v.aval for v in self._stored)]
        types += [*(step.avals[i] for i in carry), *(step.y_avals[i] for i in self._float_ys)]
        jaxpr, _ = _jax.stage(self._flat_backward, types, traced_for="scan", name=f"{step.name}, backward")
        return count(jaxpr)

    def _flat_backward(self, *values: Any) -> list:
        """`backward` of flat values: constants, elements, residuals, cotangents of the carry and of the ys."""
        step = self._step
        sizes = [step.num_constants, len(step.x_avals), len(self.residual_avals), len(self._diff[1])]
        first, second, third, fourth = itertools.accumulate(sizes)
        parts = values[:first], values[first:second], values[second:third], values[third:fourth], values[fourth:]
        return jax.tree.leaves(self.backward(*map(list, parts)))

    @functools.cached_property
    def rerun(self) -> float:
        """Which part of the step, by operations, the backward part runs again because of the step's policy."""
        step = self._step
        if step.policy is None:
            return 0.0
        unchanged = BackwardStep(step.with_length(step.length, None), *self._diff)
        return max(0, self.flops - unchanged.flops) / max(1, count(step.body.jaxpr))

    def _sort(self, values: Sequence[Any]) -> tuple[list, list, list]:
        first, last = self._num_constants, self._num_constants + self._num_carry
        return list(values[:first]), list(values[first:last]), list(values[last:])

    def forward(self, constants: list, carry: list, x: list) -> tuple[list, list]:
        """The next carry, and the residuals."""
        outs = _jax.evaluate(self._forward, (), (*self._body.operands, *constants, *carry, *x))
        return outs[: self._num_carry], outs[self._num_carry :]

    def encoded(self, residuals: list, step: Any) -> list:
        """The residuals of a step of the loop as slots hold them, of the types `residual_avals`."""
        rows = self._step.rows
        return replaced(
            residuals, self._carries, [rows[i].encode(residuals[n], step) for n, i in self._carries.items()]
        )

    def decoded(self, residuals: list, step: Any, first: list) -> list:
        """The inverse of `encoded`, given the carry before the loop's first step."""
        rows = self._step.rows
        values = [rows[i].decode(residuals[n], step, first[i]) for n, i in self._carries.items()]
        return replaced(residuals, list(self._carries), values)

    def backward(self, constants: list, x: list, residuals: list, ct_carry: list, ct_ys: list) -> tuple:
        """The cotangents of the differentiated constants, carries and elements, from those of the next carry and the
        float ys.
        """
        inputs = [*self._body.operands, *constants, *x, *residuals]
        values = dict(zip([*self._inputs, *self._stored], inputs, strict=True))
        if self._computed:
            values.update(zip(self._computed, _jax.evaluate(self._again, (), inputs), strict=True))
        leaves = [values[v] if isinstance(v, _jax.Var) else v.val for v in self._leaves]
        return self._treedef.unflatten(leaves)((ct_carry, ct_ys))

    def backward_reading(
        self,
        constants: list,
        read: Callable[[int, list], Any],
        write: Callable[[int, Any], Any],
        residuals: list,
        ct_carry: list,
        ct_ys: list,
    ) -> tuple:
        """As `backward`, but each element is read where it is needed, and each cotangent of one written where it is
        computed.

        XLA:CPU starts whatever is ready. It would read the elements of all xs first, such as the weights of a layer,
        and hold them beside the cotangents of as many bytes that are computed meanwhile.

        Args:
            read: ``(index, awaited) -> element`` of the xs with this index, read once the arrays `awaited` are
                computed.
            write: ``(index, cotangent) -> array`` with the cotangent of the differentiated xs with this index. Reading
                waits for those that are larger than a carry.

        Returns:
            The cotangents of the differentiated constants and carries, and the arrays that `write` returned.
        """
        first, num_cts = len(constants), len(self._diff[0]) + len(self._diff[1])
        last = first + len(self._step.x_avals)
        elements = dict.fromkeys(range(first, last))
        before, after = constants, [*residuals, *ct_carry, *ct_ys]
        types = [*map(jax.typeof, before), *self._step.x_avals, *map(jax.typeof, after)]
        staged = _jax.stage(self._flat_backward, types, traced_for="scan", name=f"{self._step.name}, backward")
        # A barrier or a fence keeps the recomputation of a user's region from being started early.
        has_barrier = lambda eqn: eqn.params.get("prevent_cse")
        jaxpr = inline(*staged, calls=JIT | REMAT, deep=False, unless=has_barrier)
        eqns = _by_elements(jaxpr, jaxpr.invars[first:last])
        jaxpr = _jax.rebuild(jaxpr, invars=jaxpr.invars, outvars=jaxpr.outvars, eqns=eqns)
        places = {v: n for n, v in enumerate(jaxpr.outvars[num_cts:]) if isinstance(v, _jax.Var)}
        computed: dict[int, Any] = {}  # by identity; an array in it stays alive, so that no other gets its identity
        written: dict[int, Any] = {}
        # Cotangents of weights. To wait for small ones, such as those of inputs, would only make products wait for each
        # other.
        carry_bytes = sum(map(num_bytes, self._step.avals))
        is_large = [num_bytes(self._step.x_avals[i]) > carry_bytes for i in self._diff[2]]

        def value(x: Any, awaited: list) -> Any:
            if not isinstance(x, _Unread):
                return x
            if elements[x.index] is None:
                elements[x.index] = read(x.index - first, awaited)
            return elements[x.index]

        def rule(eqn: Any, operands: list) -> list:
            awaited = []
            if _has_operands(eqn):
                awaited = [x for x in operands if id(x) in computed] + [x for n, x in written.items() if is_large[n]]
            outs = _jax.bind_equation(eqn, eqn.params, [value(x, awaited) for x in operands])
            computed.update((id(x), x) for x in outs)
            written.update(
                (n, write(n, x)) for x, v in zip(outs, eqn.outvars, strict=True) if (n := places.get(v)) is not None
            )
            return outs

        cts = [value(x, []) for x in _jax.interpret(jaxpr, [*before, *map(_Unread, elements), *after], rule)]
        ct_xs = [written[n] if n in written else write(n, ct) for n, ct in enumerate(cts[num_cts:])]
        return cts[: len(self._diff[0])], cts[len(self._diff[0]) : num_cts], ct_xs


class _Unread(NamedTuple):
    """An element of xs that is read when an equation needs it; `index` is that of the input."""

    index: int


def starts_early(step: LoopStep) -> bool:
    """Whether XLA:CPU would allocate much of what a step reads and writes at the start of the program around it.

    It starts whatever is ready: the buffers that loops in the step fill, and what is computed from constants alone,
    such as a layer's weights from those of all layers.
    """
    if contains_loop(step.body.jaxpr):
        return True
    jaxpr = inline(step.body.jaxpr, calls=JIT | REMAT, deep=False)
    computed = _computed_from(jaxpr, jaxpr.invars[: step.num_constants])
    operands = {v for eqn in jaxpr.eqns if _has_operands(eqn) for v in eqn.invars if isinstance(v, _jax.Var)}
    num_early = sum(num_bytes(v.aval) for v in computed & operands)
    return num_early > _MANY_CARRIES * sum(map(num_bytes, step.avals))


def _has_operands(eqn: Any) -> bool:
    """Whether an equation reads operands from memory: XLA fuses their reading with elementwise operations and sums, but
    not with a product.
    """
    return not (row_of(eqn).fuses or row_of(eqn).reads_fused)


def _by_elements(jaxpr: Any, elements: Sequence[Any]) -> list:
    """The equations, those first that need the fewest elements one after the other."""
    num_reads = dict.fromkeys(jaxpr.invars, 0)

    def reads(eqn: Any) -> int:
        operands = [v for v in eqn.invars if isinstance(v, _jax.Var)]
        num = max((num_reads[v] for v in operands), default=0)
        num += _has_operands(eqn) and any(v in elements for v in operands)
        num_reads.update(dict.fromkeys(eqn.outvars, num))
        return num

    return [eqn for _, eqn in sorted([(reads(eqn), eqn) for eqn in jaxpr.eqns], key=lambda pair: pair[0])]


def _computed_from(jaxpr: Any, inputs: Sequence[Any]) -> set:
    """The variables that equations compute from these inputs alone."""
    known, computed = set(inputs), set()
    for eqn in jaxpr.eqns:
        if not eqn.effects and all(v in known for v in eqn.invars if isinstance(v, _jax.Var)):
            known.update(eqn.outvars)
            computed.update(eqn.outvars)
    return computed


def _part(jaxpr: Any, outvars: Sequence[Any]) -> Any:
    """The equations that these variables need."""
    return _jax.without_dead_code(_jax.rebuild(jaxpr, invars=jaxpr.invars, outvars=outvars))
