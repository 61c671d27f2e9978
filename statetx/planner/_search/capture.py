"""Stage the program to plan: a loss, or the gradients within a training step."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from ... import _jax
from ..._cached import cached_property
from ..._equations.compiled import Cost, Program, donated_inputs
from ..._equations.release.loops import has_loop
from ..._equations.release.program import repeated_flops
from ..._errors import PlanError
from ..._jax import Arrays, Aval, Jaxpr
from ..._lift.context import TraceContext, close_over, device_bytes, divides
from ..._lift.differentiated import resolve_argnums
from ..._lift.wrapper import name_of
from ..._remat.decide import refuse_effects
from ..._remat.override import rewritten_by
from ..._remat.rewriter import Rewriter, Seen, is_training_step
from ..._tree import is_array_or_type, is_float, num_bytes, partition
from ..._typing import Argnums
from ...transforms.abstract import staged_jaxpr
from ...transforms.remat import Remat
from .._program.devices import is_on_devices
from .._program.flat import last_reads
from .._treatments.inner_gradients import VARIANTS, InnerGradients
from .._treatments.released import released
from .._treatments.treatment import Treatment
from .._tuned import TUNED
from .recorders import InnerGradientRecorder, Recorded, Recorder, Replace, gradient_of, taken

ProgramOf = Callable[[Jaxpr, dict[str, Any] | None], Program]
"""``(jaxpr, compiler_options) -> Program`` makes the program to compile for a rewritten one: with its gradient, or the
step that takes it.
"""


@dataclasses.dataclass(frozen=True)
class CapturedStep:
    """A training step.

    Attributes:
        outline: the step with each gradient as one equation.
        donated: positions of the inputs that the step donates.
        fun, args, kwargs: the step and its arguments, to stage it with other gradients.
        is_in_shard_map: whether a gradient is taken in a shard_map.
        inner: rewrites the gradients inside of its gradients.
        treatment: of the whole step; None for none.
    """

    outline: Recorded
    donated: tuple[int, ...]
    fun: Callable[..., Any]
    args: Sequence[Any]
    kwargs: dict[str, Any]
    is_in_shard_map: bool
    inner: Rewriter | None = None
    treatment: type[Treatment] | None = None

    def compiled_with(self, programs: dict[tuple[str, ...], Jaxpr], compiler_options: dict[str, Any] | None) -> Program:
        """The step with these programs in place of the functions that it differentiates, which have these keys."""
        # Staged for each candidate: the functions are differentiated inside, so they have to be replaced when the step
        # is traced.
        recorded = self.with_gradients(programs) if programs else self.program
        avals = [v.aval for v in recorded.jaxpr.invars]
        run: Callable[..., Arrays] = lambda *inputs: _jax.evaluate(recorded.jaxpr, (), inputs)
        with self._outside():
            return recorded.context.program(run, avals, compiler_options, self.donated, recorded.constants)

    def with_gradients(self, programs: dict[tuple[str, ...], Jaxpr]) -> Recorded:
        """The step with other gradients, as for `compiled_with`, before it is compiled."""
        with self._outside(), contextlib.nullcontext() if self.treatment is None else self.treatment.around():
            return _record(self.fun, self.args, self.kwargs, Replace(programs, self.inner))

    @cached_property
    def program(self) -> Recorded:
        """The whole step, with its gradients as the user wrote them."""
        return self.with_gradients({})

    def _outside(self) -> contextlib.AbstractContextManager[None]:
        # The axes of a shard_map are bound while its gradient is analyzed, but the step begins outside of it.
        return _jax.outside_all_transforms() if self.is_in_shard_map else contextlib.nullcontext()


@dataclasses.dataclass(frozen=True)
class Captured:
    """A program to plan.

    Attributes:
        gradients: the distinct functions to differentiate: the loss, or the step's.
        num_taken: how many gradients of these functions the step takes.
        ignored: the lines of functions that the step differentiates and that take next to nothing.
        step: the step that differentiates them; None for a loss, unless it consists of a shard_map.
        variant: of the gradients inside of these, as in `InnerGradients`; None if there are none.
        is_loss: whether the step only differentiates a loss.
        name: of the function.
    """

    gradients: tuple[Recorded, ...]
    ignored: tuple[tuple[str, ...], ...] = ()
    step: CapturedStep | None = None
    variant: str | None = None
    num_taken: int = 1
    is_loss: bool = False
    name: str = ""

    def program(self, programs: Sequence[Jaxpr], compiler_options: dict[str, Any] | None) -> Program:
        """The program that the budget is for, with these in place of its gradients; none for the user's."""
        if self.step is None:
            (gradient,) = self.gradients
            return gradient.program(programs[0] if programs else gradient.jaxpr, compiler_options)
        return self.step.compiled_with(self._by_key(programs), compiler_options)

    def _by_key(self, programs: Sequence[Jaxpr]) -> dict[tuple[str, ...], Jaxpr]:
        return dict(zip([g.key for g in self.gradients], programs, strict=bool(programs)))

    def released(self, programs: Sequence[Jaxpr]) -> dict[str, Any]:
        """The gradients that the step releases, with these programs in place of them, as fields of a plan."""
        if self.step is None or not any(has_loop(gradient.jaxpr) for gradient in self.gradients):
            return released(None)
        if programs and not self.released_bytes:
            return released(None)
        step = self.step.with_gradients(self._by_key(programs)) if programs else self.step.program
        return released(step.jaxpr)

    @cached_property
    def released_bytes(self) -> int:
        """Bytes of the gradients that the step releases without a plan."""
        return self.released(())["released_bytes"]

    @cached_property
    def repeated_flops(self) -> int:
        """Operations of the loops that run twice."""
        return repeated_flops(self.step.program.jaxpr) if self.step and self.step.treatment else 0

    @property
    def of_step(self) -> str | None:
        """The name of the treatment."""
        return None if self.treatment is None else self.treatment.name

    @property
    def treatment(self) -> type[Treatment] | None:
        """The treatment of the whole step."""
        return None if self.step is None else self.step.treatment

    def treated(self, treatments: Sequence[type[Treatment]]) -> list[Captured]:
        """The program with each of the treatments that may change the whole step."""
        step = self.step if self.is_step else None
        if step is None:
            return []
        gradients = [gradient.jaxpr for gradient in self.gradients]
        changing = [t for t in treatments if t.may_change(gradients, bool(step.donated))]
        return [dataclasses.replace(self, step=dataclasses.replace(step, treatment=t)) for t in changing]

    @property
    def context(self) -> TraceContext:
        """The transforms around its gradient, if it takes one."""
        return self.gradients[0].context if self.num_taken == 1 else TraceContext()

    @property
    def is_step(self) -> bool:
        """Whether it is a step of the user."""
        return self.step is not None and not self.is_loss

    @property
    def num_devices(self) -> int:
        """The number of devices that the compiler may share a value between."""
        more = () if self.step is None else self.step.outline.context.shardings
        return max(gradient.context.num_sharing(more) for gradient in self.gradients)

    @property
    def constant_bytes(self) -> int:
        """Bytes of the arrays that the program closes over."""
        program = self.gradients[0] if self.step is None else self.step.outline
        return num_bytes(list(program.constants.values()))

    @cached_property
    def fixed(self) -> Cost:
        """The bytes of arguments and outputs, by their types: an estimate, which the compiled program corrects."""
        program = self.gradients[0] if self.step is None else self.step.program
        differentiated = program.diff_indices if self.step is None else ()
        jaxpr, context = _jax.without_dead_code(program.jaxpr), program.context
        outputs = [v.aval for v in (*jaxpr.outvars, *(jaxpr.invars[i] for i in differentiated))]
        used = last_reads(jaxpr).keys() - {jaxpr.invars[i] for i in program.constants}

        # On automatic axes only the shardings of inputs are known: outputs of the type of an input count as sharded
        # like it.
        shardings = [*context.shardings, *[None] * (len(jaxpr.invars) - len(context.shardings))]
        sizes = [_bytes_on_device(v.aval, s) for v, s in zip(jaxpr.invars, shardings, strict=False)]
        like = {_type(v.aval): size for v, size in zip(jaxpr.invars, sizes, strict=False)}
        free = [_type(jaxpr.invars[i].aval) for i in (self.step.donated if self.step is not None else ())]
        alias_bytes = output_bytes = 0
        for aval in outputs:
            size = like.get(_type(aval), device_bytes(aval)) * context.num_examples
            output_bytes += size
            if _type(aval) in free:  # an output takes the memory of a donated input of its type
                free.remove(_type(aval))
                alias_bytes += size
        argument_bytes = sum(size for v, size in zip(jaxpr.invars, sizes, strict=True) if v in used)
        return Cost(0, 0.0, argument_bytes, output_bytes, 0, alias_bytes)


def _bytes_on_device(aval: Aval, sharding: jax.sharding.NamedSharding | None) -> int:
    array = _jax.shaped(aval)
    if sharding is None or len(sharding.spec) > len(array.shape) or not divides(sharding, array.shape):
        return device_bytes(aval)
    return num_bytes(jax.ShapeDtypeStruct(sharding.shard_shape(array.shape), array.dtype))


def _type(aval: Aval) -> tuple[Any, ...]:
    array = _jax.shaped(aval)
    return array.shape, array.dtype


def variants(fun: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], argnums: Argnums) -> list[Captured]:
    """The program to plan, as by `capture`. If gradients are taken inside of the loss, one for each variant of these.

    Their results are equal. The first is without rematerialization of inner gradients.
    """
    seen = Seen()
    captured = capture(fun, args, kwargs, argnums, seen)
    if not seen.any:
        return [captured]
    by_gradients: dict[tuple[tuple[str, ...], ...], Captured] = {}
    for variant in VARIANTS:
        program = capture(fun, args, kwargs, argnums, InnerGradients(variant))
        by_gradients.setdefault(
            tuple(g.lines for g in program.gradients), dataclasses.replace(program, variant=variant)
        )
    return list(by_gradients.values())


def capture(
    fun: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    argnums: Argnums,
    of_inner: Rewriter | None = None,
) -> Captured:
    """Trace a function once, and return the program to plan: its gradients if it is a training step, else the function.

    Args:
        of_inner: rewrites the gradients inside of these.

    Raises:
        PlanError: there is nothing to differentiate.
    """
    nums = None if argnums is None else resolve_argnums(argnums, len(args), fun)[0]

    # One trace serves both cases: only during it does it show whether the function differentiates anything itself.
    inner = InnerGradientRecorder(of_inner)
    function = _record(fun, args, kwargs, inner if nums is None else None, of_inner)
    seen = inner.take()
    recorded = taken(seen, function.jaxpr)
    if recorded and not _is_step(function, recorded):
        function = _record(fun, args, kwargs, None, of_inner)
    elif recorded:
        gradients, ignored = _distinct(recorded, seen)
        is_in_shard_map = any(gradient.context.manual is not None for gradient in gradients)
        step = CapturedStep(function, donated_inputs(function.jaxpr), fun, args, kwargs, is_in_shard_map, of_inner)
        num_taken = sum(r.lines not in ignored for r in recorded)
        return Captured(gradients, ignored, step, num_taken=num_taken)

    refuse_effects(function.jaxpr, f"plan({name_of(fun)})")

    # Inputs are the operands (values of states, all of them differentiated), then the arrays of the arguments.
    # `argnums` counts arguments as the user wrote them; an argument may be a tree of any number of arrays.
    in_argnums: list[bool] = []
    for n, arg in enumerate((*args, *kwargs.values())):
        in_argnums += [nums is None or n in nums] * len(partition(arg, is_array_or_type)[0])
    num_operands = len(function.jaxpr.invars) - len(in_argnums)
    diff_indices = [i for i in function.traced_floats if i < num_operands or in_argnums[i - num_operands]]
    if not diff_indices or not any(is_float(v.aval) for v in function.jaxpr.outvars[: function.num_out]):
        raise PlanError(
            f"{name_of(fun)} has no float output, or no float argument or state, so there is nothing to "
            f"differentiate; and it takes no gradient itself."
        )
    is_outermost = not function.context.maps and function.context.manual is None
    if is_outermost and is_on_devices(function.jaxpr):
        return _on_devices(function, diff_indices)
    return Captured((dataclasses.replace(function, diff_indices=diff_indices),))


def _is_step(function: Recorded, gradients: Sequence[Recorded]) -> bool:
    outputs = [v.aval for v in function.jaxpr.outvars[: function.num_out] if is_float(v.aval)]
    return is_training_step([[v.aval for v in g.jaxpr.outvars[: g.num_out]] for g in gradients], outputs)


def _on_devices(loss: Recorded, diff_indices: Sequence[int]) -> Captured:
    """A loss that consists of a shard_map: the step that computes its gradient, with the program of a device to
    differentiate.
    """
    jaxpr = loss.jaxpr
    types = loss.context.types([v.aval for v in jaxpr.invars])
    gradient, types = close_over(gradient_of(jaxpr, diff_indices, loss.num_out), types, loss.constants)
    captured = capture(gradient, tuple(types), {}, None)
    return dataclasses.replace(captured, is_loss=True)


def _distinct(
    recorded: Sequence[Recorded], seen: Sequence[Recorded]
) -> tuple[tuple[Recorded, ...], tuple[tuple[str, ...], ...]]:
    """The different functions among the recorded ones, and the lines of others: of those that take next to
    nothing, such as a rule of a library on a few scalars, and of those that were only seen.
    """
    # One loss may be differentiated several times, such as for each microbatch.
    distinct = {r.key: r for r in reversed(recorded)}
    sizes = {key: _value_bytes(r) for key, r in distinct.items()}
    least = TUNED.negligible * max(sizes.values())
    large = tuple(r for key, r in reversed(distinct.items()) if sizes[key] >= least)
    planned = {r.lines for r in large}
    return large, tuple(lines for lines in dict.fromkeys(r.lines for r in seen) if lines not in planned)


def _value_bytes(recorded: Recorded) -> int:
    values = [v.aval for eqn in recorded.flat.eqns for v in eqn.outvars]
    return recorded.context.num_examples * sum(device_bytes(aval) for aval in values if hasattr(aval, "dtype"))


def _record(
    fun: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    rewriter: Rewriter | None,
    inner: Rewriter | None = None,
) -> Recorded:
    """Stage a call, with the functions that it differentiates rewritten. Arguments other than arrays are
    closed over.
    """
    outer = Recorder(inner)

    @functools.wraps(fun)
    def traced(*args: Any, **kwargs: Any) -> list[Any]:
        # Outputs in the order of `jax.jit`, which flattens the variables of flax too: XLA's schedule depends on it.
        if rewriter is None:
            return jax.tree.leaves(fun(*args, **kwargs))
        with rewritten_by(rewriter):
            return jax.tree.leaves(fun(*args, **kwargs))

    arrays, static = partition((args, kwargs), is_array_or_type)
    planned = Remat(traced, policy=outer)

    @functools.wraps(fun)
    def call(*arrays: jax.Array) -> None:
        call_args, call_kwargs = static.combine(arrays)
        planned(*call_args, **call_kwargs)  # its outputs are recorded

    traced.__qualname__ = call.__qualname__ = name_of(fun)  # of an object, too, which has none of its own
    staged_jaxpr("plan", call, arrays, {})
    (function,) = outer.take()
    return function
