"""Batches within a budget of bytes: `max_batch`, the largest of a step, or the fewest parts for `microbatch`."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import jax

from .. import _jax, _states
from .._equations.compiled import Program
from .._equations.compiler import memory_analysis_options
from .._errors import PlanError
from .._largest import largest_within
from .._lift.batch import Batch, BatchArguments
from .._lift.context import divides, sharding_of
from .._lift.options import check_flags, notes_shapes
from .._lift.outcome import without_new_states
from .._lift.rules import Rules
from .._lift.wrapper import check_callable, name_of, short_name
from .._loops.parts import part_type
from .._objects.walk import created_undone
from .._spinner import spinner
from .._tables import Cell, Column, Table, Tabular
from .._targets import current
from .._text import brief, counted, format_bytes
from .._tree import is_float, num_bytes
from .._typing import Filter, Indices, Names
from ..residuals.measure import array_program
from ..transforms.abstract import eval_shape
from ..transforms.microbatch import RULES, Microbatch
from . import _store
from ._budget import read_amount, unit_question

_LIMIT = 2**24  # examples, where the user gives no limit: most programs that take so many do not depend on their number


@dataclasses.dataclass(frozen=True, repr=False)
class BatchFit(Tabular):
    """Batch that fits a budget; made by `max_batch` and by ``microbatch(fun, "fit", budget=...).fit(*args)``.

    Usable as an integer, the number of examples, where one is an index or a size: ``jnp.zeros((fit, 3))``,
    ``range(fit)``, ``int(fit)``. Prints as text, in colors with ``rich.print``, as HTML in a notebook. Sizes in bytes
    are for one device.

    Attributes:
        name: of the function.
        size: the number of examples, of a batch in parts those in the largest part.
        budget_bytes: the budget.
        total_bytes: the bytes of the compiled program: arguments, outputs and temporaries; of a step donated arguments
            count once.
        tried: the number of examples, or of parts, and bytes of each program that was compiled, the smallest number
            first.
        next_bytes: the bytes of the next larger batch; None if `limit` was reached, and for parts.
        num: the number of parts; None for `max_batch`.
    """

    name: str
    size: int
    budget_bytes: int
    total_bytes: int
    tried: tuple[tuple[int, int], ...]
    next_bytes: int | None = None
    num: int | None = None

    def __index__(self) -> int:
        return self.size

    __int__ = __index__

    @property
    def bytes_per_example(self) -> int:
        """Bytes of a step for one more example, between the smallest and the largest program that were compiled; 0 for
        parts.
        """
        (low, low_bytes), (high, high_bytes) = self.tried[0], self.tried[-1]
        return round((high_bytes - low_bytes) / (high - low)) if high > low and self.num is None else 0

    def _table(self) -> Table:
        total, budget = format_bytes(self.total_bytes), format_bytes(self.budget_bytes)
        headline = f"{self.size} examples fit, with {total} of {budget}."
        if self.num is not None:
            headline = f"{counted(self.num, 'part')} of {counted(self.size, 'example')}, {total} of {budget}."
        most = max(1, *(n for _, n in self.tried))
        rows = [
            [Cell(str(num)), Cell(format_bytes(n), share=n / most), Cell("yes" if n <= self.budget_bytes else "no")]
            for num, n in self.tried
        ]
        notes: list[tuple[str, str]] = []
        if (each := self.bytes_per_example) > 0:
            fixed = max(self.total_bytes - each * self.size, 0)
            notes.append(("Each example:", f"about {format_bytes(each)}, and {format_bytes(fixed)} besides."))
        first = Column("examples" if self.num is None else "parts", "right")
        return Table(f"{self.name}: {headline}", [first, Column("bytes", "right"), Column("fits")], rows, notes)


# -- the largest batch -----------------------------------------------------------------------------------------------


@_jax.api_boundary
@notes_shapes
@current.takes_target
def max_batch(
    step: Callable[..., Any],
    /,
    *args: Any,
    budget: int | str,
    argnums: Indices | None = None,
    argnames: Names = (),
    multiple: int = 1,
    limit: int | None = None,
    gradient: bool = False,
    states: Mapping[Filter, Any] | None = None,
    progress: bool | None = None,
    **kwargs: Any,
) -> BatchFit:
    """Find the largest batch whose compiled step keeps a budget. Nothing is run and no state changes.

    The step is compiled for a few sizes, usually four: its memory is close to affine in the number of examples. It must
    accept any number. The memory of each program is stored on disk (`STATETX_CACHE`), so that the second run of a
    script only stages these sizes.

    Args:
        step: a training step, a loss (then with ``gradient=True``), an evaluation; a function that may read and write
            states, or a jitted one, whose donated arguments count once.
        *args, **kwargs: its arguments; arrays may be given as ``jax.ShapeDtypeStruct``. Their own number of examples is
            tried first.
        budget: bytes, such as ``"16GiB"``, for arguments, outputs and temporaries on one device; or ``"device"`` for
            all of its memory.
        argnums: positions of the arguments that hold the batch along the first axis of their arrays; by default all.
        argnames: the same by name.
        multiple: the size is a multiple of this number.
        limit: the largest size to consider. Without it, 2**24 examples that fit are an error.
        gradient: whether the program also computes the derivative with respect to all float arguments and states, as in
            `measure`.
        states: from filters to rules, as in `microbatch`: an axis for states that have a value for each example, such
            as the hidden states of a recurrent network. They take as many examples as the batch. Other rules make no
            difference here.
        progress: whether to show progress (with rich); by default on a terminal.

    Returns:
        `BatchFit`: ``.size``, and the programs that were compiled. Print it.

    Raises:
        PlanError: the smallest batch does not fit, with ``smallest_bytes``; or as many as 2**24 examples fit and there
            is no `limit`, for example since the memory does not grow with the batch.
        ValueError: the arguments differ in the number of examples.
        StateValueError: a state with an axis has another number of examples than the arguments.

    Source:
        ``jax.stages.Compiled.memory_analysis``.

    Example:
        >>> import jax, jax.numpy as jnp, statetx
        >>> loss = lambda w, x: jnp.tanh(jnp.tanh(x @ w) @ w).sum()
        >>> x = jax.ShapeDtypeStruct((64, 256), jnp.float32)
        >>> fit = statetx.max_batch(jax.grad(loss), jnp.eye(256), x, argnums=1, budget="16MiB")
        >>> fit.total_bytes <= 2**24 < fit.next_bytes
        True
    """
    check_callable("max_batch", step)
    check_flags("max_batch", gradient=gradient, progress=progress)
    amount = _bytes("max_batch", budget, "16GiB")
    if multiple < 1 or (limit is not None and limit < multiple):
        raise ValueError(f"max_batch: multiple={multiple} and limit={limit} leave no size.")
    batch = BatchArguments("max_batch", step, argnums, argnames).of(args, kwargs)
    program_of = _programs(step, batch, args, kwargs, gradient, states)

    def bytes_of(size: int) -> int:
        report(f"compiling the step for {size} examples")
        types = batch_types(batch, size)
        return _peak_bytes("max_batch", step, program_of(types, size), amount, "size of the batch", num_bytes(types))

    fixed = num_bytes((args, kwargs)) - num_bytes(batch.leaves)
    sizes = range(multiple, (_LIMIT if limit is None else limit) + 1, multiple)
    name = short_name(name_of(step))
    with spinner(f"max_batch {name}", is_shown=progress) as report:
        best, measured = largest_within(amount, bytes_of, sizes, batch.size, {0: fixed})
    if best == 0:
        needed = f"{multiple} example{'s need' if multiple > 1 else ' needs'} {format_bytes(measured[multiple])}"
        raise PlanError(
            f"max_batch({name}): no batch fits: {needed}, and the budget is "
            f"{format_bytes(amount)}.{unit_question(amount)}\n"
            f"Fix: rematerialize the blocks of the model, or allow that much; statetx.memory_profile shows what "
            f"fills it.",
            smallest_bytes=measured[multiple],
        )
    tried = tuple(sorted(measured.items()))
    result = BatchFit(name, best, amount, measured[best], tried, measured.get(best + multiple))
    if best < sizes[-1] or limit is not None:
        return result
    grows = result.bytes_per_example > 0 or len(tried) == 1
    cause = (
        "Fix: give limit=, the largest size to consider, such as the number of examples that there are."
        if grows
        else f"Cause: the memory of the step does not grow with the batch; argnums={brief(argnums)} are not the "
        f"arguments that the step computes with.\nFix: name the ones that hold the batch, or give limit=."
    )
    raise PlanError(
        f"max_batch({name}): {result.size} examples fit, with {format_bytes(result.total_bytes)} of "
        f"{format_bytes(amount)}; no larger batch is tried without limit=.\n{cause}"
    )


def _programs(
    step: Callable[..., Any],
    batch: Batch,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    gradient: bool,
    states: Mapping[Filter, Any] | None,
) -> Callable[[list[jax.ShapeDtypeStruct], int], Program]:
    """The programs of a step for other types of its batch, and the number of examples of these types."""
    options = memory_analysis_options()
    jitted: Any = step
    if hasattr(jitted, "lower") and hasattr(jitted, "trace") and not gradient and states is None:

        def as_jitted(types: list[jax.ShapeDtypeStruct], size: int) -> Program:
            # As the user jits it, with its shardings and compiler options.
            args, kwargs = batch.arguments(types)
            with created_undone(step, args, kwargs):
                traced: Any = _states.jax_traced(jitted.trace(*args, **kwargs))
            return Program.of_traced(getattr(traced, "jax_stage", traced), options)

        return as_jitted

    program = array_program("max_batch", step, args, kwargs, gradient)
    rules = Rules("max_batch", states or {}, step, RULES, args, kwargs)

    def of_arrays(types: list[jax.ShapeDtypeStruct], size: int) -> Program:
        mask, of_batch, values = iter(batch.mask), iter(types), list[Any]()
        for x, read in zip(program.arrays, program.inputs, strict=True):
            if read.state is None:
                x = next(of_batch) if next(mask) else x
            elif states:
                aval = part_type(rules, read.state, _jax.abstract(x), batch.size, size)
                x = x if aval.shape == x.shape else jax.ShapeDtypeStruct(aval.shape, aval.dtype)
            values.append(x)
        rules.check_paths()
        with _jax.eval_context():
            return program.for_types(values, options)

    return of_arrays


def batch_types(batch: Batch, size: int) -> list[jax.ShapeDtypeStruct]:
    """Types for the leaves of a batch with another number of examples; shardings stay if they divide it."""
    types: list[jax.ShapeDtypeStruct] = []
    for x, aval, is_key in zip(batch.leaves, batch.types(size), batch.is_key, strict=True):
        sharding = getattr(x, "sharding", None) if isinstance(x, (jax.Array, jax.ShapeDtypeStruct)) else None
        if not isinstance(sharding, jax.sharding.NamedSharding) or is_key or not divides(sharding, aval.shape):
            sharding = None
        types.append(jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding))
    return types


# -- the fewest parts ------------------------------------------------------------------------------------------------


def parts(
    micro: Microbatch,
    budget: int | str,
    batch: Batch,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    is_differentiated: bool,
) -> BatchFit:
    """Choose the fewest parts whose compiled program keeps the budget: of a loss its gradient with respect to float
    states and all arguments but the batch.

    Args:
        batch: the batch of the call with `args` and `kwargs`.
        is_differentiated: whether an array among the arguments and the states that are touched is being differentiated.

    Raises:
        PlanError: nothing keeps the budget.
    """
    amount, fun = _bytes("microbatch", budget, "2GiB"), micro.__wrapped__
    part_args, part_kwargs = batch.arguments(batch.types(1))
    outs = jax.tree.leaves(eval_shape(fun, *part_args, **part_kwargs))
    is_loss = is_differentiated or (len(outs) == 1 and not outs[0].shape and is_float(outs[0]))
    not_differentiated = batch.mask if is_loss else ()

    def bytes_of(part_size: int) -> int:
        in_parts = micro.with_num(-(-batch.size // part_size))

        def call(*args: Any, **kwargs: Any) -> Any:
            return without_new_states(in_parts(*args, **kwargs))

        program = array_program("microbatch", call, args, kwargs, is_loss, not_differentiated)
        with _jax.eval_context():
            program = program.for_types([_type(x) for x in program.arrays], memory_analysis_options())
        return _peak_bytes("microbatch", fun, program, amount, "number of parts")

    part_sizes, fixed = _part_sizes(batch.size), num_bytes([args, kwargs])
    best, measured = largest_within(amount, bytes_of, part_sizes, batch.size, {0: fixed})
    name = short_name(name_of(fun))
    if best == 0:
        raise PlanError(
            f"microbatch({name}): the budget of {format_bytes(amount)} cannot be kept: parts of one example need "
            f"{format_bytes(measured[1])}.{unit_question(amount)}\n"
            f"Fix: allow that much, rematerialize the blocks of the model, or plan a part, "
            f"statetx.plan({name}, *args, budget=...), and give microbatch plan.apply({name}).",
            smallest_bytes=measured[1],
        )
    tried = sorted((-(-batch.size // part_size), n) for part_size, n in measured.items())
    return BatchFit(name, best, amount, measured[best], tuple(tried), num=-(-batch.size // best))


def _part_sizes(size: int) -> list[int]:
    """Sizes of the largest part: divisors, which need one loop only, unless they are far apart."""
    divisors = [n for n in range(1, size + 1) if size % n == 0]
    if all(high <= 4 * low for low, high in itertools.pairwise(divisors)):
        return divisors
    return sorted({-(-size // num) for num in range(1, size + 1)})


# -- both ------------------------------------------------------------------------------------------------------------


def _bytes(transform: str, budget: int | str, example: str) -> int:
    """The bytes of a budget."""
    amount = read_amount(budget)
    if isinstance(amount, float):
        fix = f"give bytes, such as {example!r}, or 'device'."
        raise PlanError(f"{transform}: budget={budget!r} is a fraction.\nFix: {fix}")
    return amount


def _peak_bytes(
    transform: str, fun: Callable[..., Any], program: Program, budget: int, of_batch: str, more: int = 0
) -> int:
    """The bytes of a compiled program. It is not compiled if its arguments beside the batch fill the budget."""
    least = program.least_bytes - more
    if least >= budget:
        raise PlanError(
            f"{transform}({short_name(name_of(fun))}): the budget of {format_bytes(budget)} cannot be kept: "
            f"arguments and states take {format_bytes(least)} "
            f"with any {of_batch}, so none was compiled.{unit_question(budget)}\n"
            f"Fix: allow more than that, or make them smaller (bfloat16, more devices).",
            smallest_bytes=least,
        )
    return _store.cost(program)().peak_bytes


def _type(x: Any) -> jax.ShapeDtypeStruct:
    aval = _jax.abstract(x)
    return jax.ShapeDtypeStruct(
        aval.shape, aval.dtype, sharding=sharding_of(x), weak_type=getattr(aval, "weak_type", False)
    )
