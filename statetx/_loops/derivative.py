"""Operations with a derivative of their own: loops, functions with the derivative of another function.

A loop with checkpoints is a primitive (`_jax.call_loop`), so it is still one loop when it is mapped or differentiated
later. `vmap` makes it the loop of the mapped step, which runs all examples together. A derivative taken after that
counts all examples, and weights that they share get one cotangent; a mapped derivative would give each example its own,
to be summed at the end.

A `vmap` around a derivative maps the equations of the derivative's rule, as for any other function.

A gradient has an equation for each loop that it differentiates, with a note of the loop (`Differentiated`), which
`loop_report` finds in any program.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import jax
from jax.custom_derivatives import SymbolicZero

from .. import _jax
from .._equations.structure import Body
from .._lift.context import TraceContext
from .._positions import replaced
from .._tree import is_float, num_bytes
from . import bind
from .bind import OfLeaves
from .step import LoopStep, MappedStep


class DifferentiableLoop:
    """A loop ``(constants, carry, xs) -> (carry, ys)``, which subclasses differentiate.

    Attributes:
        body: the jaxpr of a step, ``(*constants, *carry, *x) -> (*carry, *y)``.
        length: the number of steps.
        num_constants, num_carry: the numbers of constants and carries, the first arguments in this order.
        keeps_steps: whether its derivative may save values of every step, so that a policy may choose among them.
    """

    keeps_steps = False

    def __init__(self, step: LoopStep):
        self.step = step
        self.body = step.body.jaxpr
        self.length, self.num_constants, self.num_carry = step.length, step.num_constants, step.num_carry
        self._plain = step.plain()
        self._jaxprs: dict[Any, Any] = {}
        self._mapped: dict[Any, tuple[DifferentiableLoop, MappedStep]] = {}

    def __call__(self, constants: list, carry: list, xs: list) -> tuple[list, list]:
        args = [_jax.as_array(x) for x in (*constants, *carry, *xs)]
        outs = _jax.call_loop(self, args)
        return outs[: self.num_carry], outs[self.num_carry :]

    def derivative(
        self, primals: tuple, tangents: dict[int, Any], *, is_linearized: bool
    ) -> tuple[tuple[list, list], list]:
        """The loop's outputs, and the tangents of the float ones.

        Args:
            tangents: the nonzero ones, by leaf of the arguments.
            is_linearized: whether JAX linearizes the loop, as reverse mode does, rather than pushing tangents forward.
                Then the plain loop loses rules (see `linearized`), which shows in derivatives of the derivative.
        """
        raise NotImplementedError

    def with_step(self, step: LoopStep) -> DifferentiableLoop:
        """Return the loop with another step."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.step.name})"

    # -- called by the rules of the primitive --

    def with_body(self, body: _jax.Jaxpr) -> DifferentiableLoop:
        return self.with_step(self.step.with_body(body))

    @property
    def measured_step(self) -> LoopStep:
        """The step to differentiate for properties of every derivative: which tangents are zero, and sizes."""
        return self.step

    def is_plain(self) -> bool:
        """Whether its derivative is the plain loop's when no `vmap` encloses it."""
        return False

    def plain_args(self, args: list, diff_indices: tuple[int, ...]) -> list | None:
        """The arguments at which to differentiate the plain loop instead, if that has the same derivative; else None.

        Args:
            diff_indices: the arguments with a nonzero tangent.
        """
        return None

    def run(self, args: list) -> list:
        carry, ys = self._plain(*self.step.sort(args))
        return [*carry, *ys]

    def jaxpr_for(self, avals: Sequence[Any]) -> Any:
        """The loop as a closed jaxpr for arguments of these types."""
        # A jaxpr that was traced under other settings, such as x64 or a mesh, is another one.
        run = lambda *xs: self.run(list(xs))
        staged = lambda: _jax.close(*_jax.stage(run, avals, traced_for="scan", name=self.step.name))
        return kept(self._jaxprs, tuple(avals), staged)

    def lowered(self, jaxpr: Any) -> Any:
        """The closed jaxpr to compile for `jaxpr`, one of `jaxpr_for`."""
        return jaxpr

    def jvp(self, args: list, tangents: dict[int, Any], *, is_linearized: bool) -> tuple[list, list]:
        """The outputs, and the tangents of the float outputs, None for zero; `tangents` holds the nonzero ones by
        argument index.
        """
        (carry, ys), out_tangents = self.derivative(self.step.sort(args), tangents, is_linearized=is_linearized)
        return [*carry, *ys], self.measured_step.without_zeros(tangents, out_tangents)

    def map(self, args: list, axes: list[int | None], axis_data: Any) -> tuple[list, list[int | None]]:
        """Batch the loop for a `jax.vmap` over these axes of the arguments: the outputs and their batch axes."""
        # JAX's caches go by the identity of the loop, a parameter of the primitive: equal maps get one mapped loop.
        key = (axis_data, *(axis is not None for axis in axes), _jax.trace_context())
        if key not in self._mapped:
            mapped = self.step.mapped(axis_data, [axis is not None for axis in axes])
            self._mapped[key] = self.with_step(mapped.step), mapped
        loop, mapped = self._mapped[key]
        parts = zip(args, axes, mapped.in_axes, strict=True)
        args = [x if inner is None else _jax.with_batch_axis(x, axis, inner, axis_data) for x, axis, inner in parts]
        return _jax.call_loop(loop, [*mapped.consts, *args]), mapped.out_axes


# -- notes of differentiated loops -------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Differentiated:
    """The note of a loop that a program differentiates; also a callback of `_jax.notify_of_vmap`.

    Attributes:
        loop: the differentiated loop, with its `step`.
        diff_indices: the differentiated inputs of the step.
        context: the transforms that the derivative runs under.
    """

    loop: Any
    diff_indices: tuple[int, ...]
    context: TraceContext

    @classmethod
    def here(cls, loop: Any, diff_indices: Iterable[int], **options: Any) -> Differentiated:
        return cls(loop, tuple(diff_indices), TraceContext(manual=_jax.enclosing_shard_map()), **options)

    def __call__(self, axis: Any, is_mapped: Sequence[bool]) -> Differentiated:
        return dataclasses.replace(self, context=self.context.with_vmap(axis, is_mapped))


def with_notice(values: Sequence[Any], callback: Callable) -> list[Any]:
    """Make the smallest of the values depend on an equation with `callback`, see `_jax.notify_of_vmap`."""
    if not values:
        return []
    n = min(range(len(values)), key=lambda i: num_bytes(values[i]))
    return replaced(values, [n], [_jax.notify_of_vmap(values, n, callback)])


# -- derivatives by another function -----------------------------------------------------------------------------


def with_derivative(fun: Callable, derivative: Callable, *, reads_nothing: bool = False) -> Callable:
    """`fun`, compiled, with a derivative of its own.

    Args:
        derivative: ``(args, tangents by leaf) -> (output, tangents of its first float leaves)``; None, and further
            ones, are zero.
        reads_nothing: whether `derivative` reads nothing that may change: see `_jax.derivative_rule`.
    """
    compiled = jax.custom_jvp(bind.compiled(fun))

    def rule(primals: tuple, tangents: tuple) -> tuple[Any, Any]:
        primals = jax.tree.map(_jax.as_array, primals)
        out, out_tangents = derivative(primals, nonzero_tangents(tangents))
        return out, tangents_of(out, out_tangents)

    rule.reads_nothing = reads_nothing  # type: ignore[attr-defined]
    # Without symbolic zeros a zero tangent of xs arrives as an array of the loop's length.
    compiled.defjvp(rule, symbolic_zeros=True)
    return compiled


def linear_in_tangents(
    step: LoopStep,
    primals: tuple,
    stored: Any,
    outs: Any,
    tangents: dict[int, Any],
    *,
    push: Callable,
    pull: Callable,
    operands: Sequence[Any] = (),
) -> list[Any]:
    """The tangents of a loop's float outputs, as a linear map of `tangents` with a transpose of its own.

    Args:
        step: of the loop.
        primals: the loop's arguments; `stored`, further values for `pull`.
        tangents: the nonzero ones, by leaf of `primals`.
        push: ``(operands, primals, tangents) -> tangents`` of the float outputs, None for zero.
        pull: ``(primals, stored, cotangents) -> cotangents of the tangents``; a cotangent that is zero is None.
        operands: the values that `push` closes over.
    """
    # Not `jax.custom_vjp`: it has no forward mode. Not JAX's own `linear_call`: it cannot be mapped (decision 6).
    leaves, treedef = jax.tree.flatten((primals, stored))
    num, types = len(leaves), [_jax.abstract(x) for x in jax.tree.leaves(outs) if is_float(x)]

    def push_leaves(residuals: list, tangents: list) -> list[Any]:
        out_tangents = push(residuals[num:], treedef.unflatten(residuals[:num])[0], tangents)
        return [_jax.zeros(a) if t is None else t for t, a in zip(out_tangents, types, strict=True)]

    def pull_leaves(residuals: list, cts: list) -> list[Any]:
        return pull(*treedef.unflatten(residuals[:num]), cts)

    rules_of = step.name if _jax.has_users_rule(step.body.jaxpr) else None
    residuals, diff = [*leaves, *operands], list(tangents.values())
    return _jax.linear_call(push_leaves, pull_leaves, residuals, diff, types, rules_of=rules_of)


def tangents_by_reversal(
    primals: tuple,
    stored: Any,
    outs: Any,
    tangents: dict[int, Any],
    *,
    forward: Callable,
    reverse: Callable,
    note: Differentiated,
) -> list[Any]:
    """The tangents of a loop's float outputs, as a linear map of `tangents` whose transpose is a reversal.

    For the loop ``y = f(x)`` and the Jacobian J of f at x, forward mode applies J to the tangents by ``jax.jvp`` of
    `forward`, which stores nothing. Reverse mode applies the transpose of J to cotangents by `reverse`, from the values
    stored by the forward sweep.

    Args:
        tangents: the nonzero ones, by leaf of `primals`.
        forward: ``(*primals) -> outs``, differentiable in forward mode.
        reverse: ``(primals, stored, indices of the tangents, cotangents) -> cotangents of these leaves``; a cotangent
            that is zero is None.
        note: of the loop, for the program that reverses it.
    """
    diff_indices, step = tuple(tangents), note.loop.step

    def push(_: list, primals: tuple, tangents: list) -> list[Any]:
        return jvp_of(forward, primals, dict(zip(diff_indices, tangents, strict=True)))[1]

    def pull(primals: tuple, stored: Any, cts: list) -> list[Any]:
        leaves, treedef = jax.tree.flatten((primals, stored))
        return reverse(*treedef.unflatten(with_notice(leaves, note)), diff_indices, cts)

    run, operands = push, []
    if _reads_late(step):  # JAX runs `push` when it lowers the program
        leaves, treedef = jax.tree.flatten(([], primals, list(tangents.values())))
        body = _with_reads(step, lambda *xs: push(*treedef.unflatten(xs)), leaves)
        run, operands = lambda *args: body(args[0], *jax.tree.leaves(args[1:])), body.operands
    return linear_in_tangents(step, primals, stored, outs, tangents, push=run, pull=pull, operands=operands)


def _reads_late(step: LoopStep) -> bool:
    """Whether the step has derivative rules that may read a value of the running trace."""
    return _jax.has_users_rule(step.body.jaxpr) and not _jax.is_eager()


def _with_reads(step: LoopStep, fun: Callable, args: Sequence[Any]) -> Body:
    """The equations of a derivative of the step, with the values that its rules read as operands.

    JAX leaves such a value as a constant in a nested jaxpr, such as a loop's body, where it outlives its trace.
    """
    return Body.close(*_jax.stage(fun, list(map(_jax.abstract, args)), traced_for="scan", name=step.name))


def until_linearized(plain: Callable, linearized: Callable, args: tuple, name: str) -> Any:
    """``plain(*args)``; once JAX has linearized the program around, ``linearized(*args)``, of the same values."""
    if _jax.is_eager():
        return plain(*args)
    leaves, treedef = jax.tree.flatten(args)
    stage = functools.partial(_jax.stage, traced_for="scan", name=name)
    avals, num = list(map(_jax.abstract, leaves)), len(leaves)
    flat = [OfLeaves(fun, treedef) for fun in (plain, linearized)]
    bodies = [Body.close(*stage(run, avals)) for run in flat]
    # Both take the values that the derivative rules of either read.
    operands = [x for body in bodies for x in body.operands]
    avals += map(_jax.abstract, operands)
    first, second = bodies
    end = num + first.num_operands
    closed_plain, closed_linearized = (
        _jax.ClosedJaxpr(*stage(fun, avals))
        for fun in (lambda *xs: first(xs[num:end], *xs[:num]), lambda *xs: second(xs[end:], *xs[:num]))
    )
    outs = _jax.call_until_linearized(closed_plain, closed_linearized, [*leaves, *operands])
    return flat[0].out_tree.unflatten(outs)


def whole(fun: Callable, name: str) -> Callable:
    """`fun` as one equation where something is traced, so that JAX keeps its derivative rule: see `_jax.call_whole`."""
    staged: dict[Any, tuple[Any, Any]] = {}

    def call(*args: Any) -> Any:
        if _jax.is_eager():
            return fun(*args)
        leaves, treedef = jax.tree.flatten(args)
        types = [jax.typeof(x) for x in leaves]
        key = (treedef, tuple(types), _jax.trace_context())
        if key not in staged:
            run = OfLeaves(fun, treedef)
            jaxpr, consts = _jax.stage(run, types, traced_for="scan", name=name)
            if any(isinstance(x, _jax.Tracer) for x in consts):
                return fun(*args)
            staged[key] = _jax.ClosedJaxpr(jaxpr, consts), run.out_tree
        jaxpr, out_tree = staged[key]
        return jax.tree.unflatten(out_tree, _jax.call_whole(jaxpr, leaves))

    return call


D = TypeVar("D")


def kept(cache: dict[Any, D], key: Any, make: Callable[[], D]) -> D:
    """`make()`, kept in a cache for this key and JAX's settings.

    What has `operands` is not kept: a derivative rule may close over another value next time.
    """
    key = key, _jax.trace_context()
    made = cache.get(key) or make()
    if not getattr(made, "operands", ()):
        cache[key] = made
    return made


def tangent_leaves(tangents: Any) -> list[Any]:
    """The leaves of a rule's tangents, symbolic zeros included."""
    return jax.tree.leaves(tangents, is_leaf=lambda t: isinstance(t, SymbolicZero))


def nonzero_tangents(tangents: Any) -> dict[int, Any]:
    """The nonzero float tangents, by leaf."""
    leaves = [t if isinstance(t, SymbolicZero) else _jax.as_array(t) for t in tangent_leaves(tangents)]
    return {i: t for i, t in enumerate(leaves) if not isinstance(t, SymbolicZero) and is_float(t)}


def tangents_of(out: Any, floats: Iterable[Any]) -> Any:
    """The tangents of an output from `floats`, its first float leaves' tangents; None, and further ones, are zero."""
    leaves, treedef = jax.tree.flatten(out)
    remaining = iter(floats)
    tangents = [next(remaining, None) if is_float(x) else None for x in leaves]
    # Symbolic: arrays of zeros would be in the device's memory where offloaded outputs are not.
    pairs = zip(leaves, tangents, strict=True)
    return treedef.unflatten([_jax.zero_tangent(_jax.abstract(x)) if t is None else t for x, t in pairs])


def jvp_of(fun: Callable, args: tuple, tangents: dict[int, Any]) -> tuple[Any, list[Any]]:
    """The output of ``fun(*args)``, and the tangents of its float leaves; `tangents` by leaf of the arguments."""
    leaves = jax.tree.leaves(args)
    out_tree: Any = None

    def of_leaves(*diff_leaves: Any) -> tuple[list, list]:
        nonlocal out_tree
        out = fun(*_with_leaves(args, dict(zip(tangents, diff_leaves, strict=True))))
        outs, out_tree = jax.tree.flatten(out)
        # Other outputs go around `jax.jvp` as aux: their tangents would be float0, which no caller wants.
        return [x for x in outs if is_float(x)], [None if is_float(x) else x for x in outs]

    diff_leaves = [leaves[i] for i in tangents]
    floats, out_tangents, aux = jax.jvp(of_leaves, diff_leaves, list(tangents.values()), has_aux=True)
    remaining = iter(floats)
    return out_tree.unflatten([next(remaining) if x is None else x for x in aux]), out_tangents


def jvp_of_loop(step: LoopStep, fun: Callable, args: tuple, tangents: dict[int, Any]) -> tuple[Any, list[Any]]:
    """`jvp_of` a function that runs the step in loops."""
    if not _reads_late(step):
        return jvp_of(fun, args, tangents)
    leaves, treedef = jax.tree.flatten((args, list(tangents.values())))
    jvp = OfLeaves(lambda args, diff: jvp_of(fun, args, dict(zip(tangents, diff, strict=True))), treedef)
    body = _with_reads(step, jvp, leaves)
    return jvp.out_tree.unflatten(body(body.operands, *leaves))


def without_stored(args: tuple, tangents: dict[int, Any]) -> tuple[tuple, dict[int, Any]]:
    """Drop `stored` and its tangents from the arguments ``(primals, stored, cotangents)`` of a reversal.

    The stored values are functions of the primals. A function that computes them again has no such argument.
    """
    primals, stored, cts = args
    num, num_stored = len(jax.tree.leaves(primals)), len(jax.tree.leaves(stored))
    of_primals = {i: t for i, t in tangents.items() if i < num}
    of_cts = {i - num_stored: t for i, t in tangents.items() if i >= num + num_stored}
    return (primals, cts), of_primals | of_cts


def floats_of(fun: Callable, args: tuple, values: dict[int, Any]) -> list[Any]:
    """The float leaves of ``fun(*args)`` with some leaves of `args` replaced by `values`."""
    return [x for x in jax.tree.leaves(fun(*_with_leaves(args, values))) if is_float(x)]


def _with_leaves(args: tuple, values: dict[int, Any]) -> tuple:
    leaves, treedef = jax.tree.flatten(args)
    return treedef.unflatten([values.get(i, x) for i, x in enumerate(leaves)])
