"""`max_batch`: the largest batch whose compiled step keeps a budget of bytes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax

from .. import _jax, _states
from .._equations.compiled import Program, memory_analysis_options
from .._errors import PlanError
from .._lift.batch import Batch, BatchArguments
from .._lift.options import check_flags, notes_shapes
from .._lift.rules import Rules
from .._lift.wrapper import name_of, refuse_value, short_name
from .._loops.parts import part_type
from .._objects.attributes import created_undone
from .._tables import Cell, Column, Table, Tabular
from .._targets import current
from .._text import brief, format_bytes
from .._tree import num_bytes
from .._typing import Filter, Indices, Names
from ..residuals.measure import with_gradient, without_gradient
from ..transforms.functionalize import Functionalize
from ..transforms.microbatch import RULES as MICROBATCH_RULES
from . import _store
from ._budget import impossible_batch, read_amount, unit_question
from ._largest import Search, largest
from ._spinner import spinner

_LIMIT = 2**24  # examples, where the user gives no limit: most programs that take so many do not depend on their number


@dataclasses.dataclass(frozen=True, repr=False)
class MaxBatch(Tabular):
    """The largest batch that fits; made by `max_batch`.

    Usable as an integer where one is an index or a size: ``jnp.zeros((fit, 3))``, ``range(fit)``, ``int(fit)``. Prints as text, in colors with
    ``rich.print``, as HTML in a notebook. Sizes in bytes are those of one device.

    Attributes:
        name: of the step.
        size: the number of examples.
        budget_bytes: the budget.
        total_bytes: what the compiled step takes with them: arguments, outputs and temporaries; donated arguments count once.
        next_bytes: what it takes with the next larger batch; None if `limit` was reached.
        tried: number of examples and bytes of each compiled program, the smallest first.
    """

    name: str
    size: int
    budget_bytes: int
    total_bytes: int
    next_bytes: int | None
    tried: tuple[tuple[int, int], ...]

    def __index__(self) -> int:
        return self.size

    def __int__(self) -> int:
        return self.size

    @property
    def bytes_per_example(self) -> int:
        """By how much the program grows with an example, between the smallest and the largest program that were compiled."""
        (low, low_bytes), (high, high_bytes) = self.tried[0], self.tried[-1]
        return round((high_bytes - low_bytes) / (high - low)) if high > low else 0

    def _table(self) -> Table:
        total, budget = format_bytes(self.total_bytes), format_bytes(self.budget_bytes)
        title = f"{self.name}: {self.size} examples fit, with {total} of {budget}."
        rows = [
            [
                Cell(str(size)),
                Cell(format_bytes(n), share=n / max(b for _, b in self.tried)),
                Cell("yes" if n <= self.budget_bytes else "no"),
            ]
            for size, n in self.tried
        ]
        columns = [Column("examples", "right"), Column("bytes", "right"), Column("fits")]
        per_example = self.bytes_per_example
        fixed = max(self.total_bytes - per_example * self.size, 0)
        note = f"about {format_bytes(per_example)}, and {format_bytes(fixed)} besides."
        return Table(title, columns, rows, [("Each example:", note)] if per_example > 0 else [])


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
    progress: bool = False,
    **kwargs: Any,
) -> MaxBatch:
    """Find the largest batch whose compiled step keeps a budget. Nothing is run and no state changes.

    The step is compiled for a few sizes, usually four: its memory is close to affine in the number of examples. It must accept any number.
    The memory of each program is stored on disk (`STATETX_CACHE`), so that the second run of a script only stages these sizes.

    Args:
        step: a training step, a loss (then with ``gradient=True``), an evaluation; a function that may read and write states, or a
            jitted one, whose donated arguments count once.
        *args, **kwargs: its arguments; ``jax.ShapeDtypeStruct`` may stand for arrays. Their own number of examples is tried first.
        budget: bytes, such as ``"16GiB"``, for arguments, outputs and temporaries on one device; or ``"device"`` for all of its memory.
        argnums: positions of the arguments that hold the batch along the first axis of their arrays; by default all.
        argnames: the same by name.
        multiple: the size is a multiple of this number.
        limit: the largest size to consider. Without it, 2**24 examples that fit are an error.
        gradient: whether the program also computes the derivative with respect to all float arguments and states, as in `measure`.
        states: from filters to rules, as in `microbatch`: an axis for states that have a value for each example, such as the
            hidden states of a recurrent network. They take as many examples as the batch. Other rules make no difference here.
        progress: whether to show progress (with rich).

    Returns:
        `MaxBatch`: ``.size``, and the programs that were compiled. Print it.

    Raises:
        PlanError: the smallest batch does not fit, with ``smallest_bytes``; or as many as 2**24 examples fit and there is no `limit`, for example since the memory does
            not grow with the batch.
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
    refuse_value("max_batch", step)
    check_flags("max_batch", gradient=gradient, progress=progress)
    amount = read_amount(budget)
    if isinstance(amount, float):
        raise PlanError(f"max_batch: budget={budget!r} is a fraction.\nFix: give bytes, such as '16GiB', or 'device'.")
    if multiple < 1 or (limit is not None and limit < multiple):
        raise ValueError(f"max_batch: multiple={multiple} and limit={limit} leave no size.")
    batch = BatchArguments("max_batch", step, argnums, argnames).of(args, kwargs)

    resizable = _Resizable(step, batch, args, kwargs, gradient, states) if states is not None else None

    def bytes_of(index: int) -> int:
        size = index * multiple
        report(f"compiling the step for {size} examples")
        types = batch_types(batch, size)
        program = (
            resizable.program(size) if resizable is not None else step_program(step, *batch.arguments(types), gradient)
        )
        least = program.least_bytes - num_bytes(types)
        if least >= amount:
            raise impossible_batch("max_batch", step, amount, least, "size of the batch")
        return _store.peak_bytes(program)

    fixed = num_bytes((args, kwargs)) - num_bytes(batch.leaves)
    last = (_LIMIT if limit is None else limit) // multiple
    name, first = short_name(name_of(step)), max(batch.size // multiple, 1)
    with spinner(f"max_batch {name}", is_shown=progress) as report:
        search = largest(bytes_of, amount, first, last, size=lambda i: float(i * multiple), bytes_at_zero=fixed)
    if search.best == 0:
        raise PlanError(
            f"max_batch({name}): no batch fits: {multiple} example{'s need' if multiple > 1 else ' needs'} {format_bytes(search.tried[1])}, and the budget is "
            f"{format_bytes(amount)}.{unit_question(amount)}\nFix: rematerialize the blocks of the model, or allow that much; statetx.memory_profile shows what fills it.",
            smallest_bytes=search.tried[1],
        )
    found = _result(name, search, amount, multiple)
    if search.best == last and limit is None:
        raise PlanError(
            _limit_reached(found)
            if found.bytes_per_example > 0 or len(found.tried) == 1
            else _no_growth(found, argnums)
        )
    return found


def _limit_reached(found: MaxBatch) -> str:
    return (
        f"max_batch({found.name}): {found.size} examples fit, with {format_bytes(found.total_bytes)} of {format_bytes(found.budget_bytes)}; no larger batch "
        f"is tried without limit=.\nFix: give limit=, the largest size to consider, such as the number of examples that there are."
    )


def _no_growth(found: MaxBatch, argnums: Indices | None) -> str:
    return (
        f"max_batch({found.name}): the memory of the step does not grow with the batch: {format_bytes(found.total_bytes)} with {found.size} examples.\n"
        f"Cause: argnums={brief(argnums)} are not the arguments that the step computes with.\nFix: name the ones that hold the batch, or give limit=."
    )


class _Resizable:
    """A step with states that have a value for each example, for any number of them."""

    def __init__(
        self,
        step: Callable,
        batch: Batch,
        args: tuple,
        kwargs: dict[str, Any],
        gradient: bool,
        states: Mapping[Filter, Any],
    ):
        self._batch = batch
        self._program = (with_gradient if gradient else without_gradient)(step, args, kwargs)
        self._rules = Rules("max_batch", states, step, MICROBATCH_RULES, args, kwargs)
        self._states = Functionalize(step, takes_refs=True).states(*args, **kwargs)

    def program(self, size: int) -> Program:
        mask, batch_leaves = iter(self._batch.mask()), iter(batch_types(self._batch, size))
        types = []
        for x, keys in zip(self._program.arrays, self._program.keys, strict=True):
            if keys[0].idx == 0:
                types.append(self._state_type(keys[1].key, x, size))
            else:
                types.append(next(batch_leaves) if next(mask) else x)
        self._rules.check_paths()
        with _jax.eval_context():
            return self._program.for_types(types, memory_analysis_options())

    def _state_type(self, path: str, x: Any, size: int) -> Any:
        aval = part_type(self._rules, self._states[path], _jax.abstract(x), self._batch.size, size)
        return x if aval.shape == x.shape else jax.ShapeDtypeStruct(aval.shape, aval.dtype)


def _result(name: str, search: Search, budget: int, multiple: int) -> MaxBatch:
    tried = tuple(sorted((i * multiple, num_bytes) for i, num_bytes in search.tried.items()))
    total, following = search.tried[search.best], search.tried.get(search.best + 1)
    return MaxBatch(name, search.best * multiple, budget, total, following, tried)


def batch_types(batch: Batch, size: int) -> list[Any]:
    """Types for the leaves of a batch with another number of examples; shardings stay if they divide it."""
    types = []
    for x, aval, is_key in zip(batch.leaves, batch.types(size), batch.is_key, strict=True):
        sharding = getattr(x, "sharding", None) if isinstance(x, (jax.Array, jax.ShapeDtypeStruct)) else None
        if not isinstance(sharding, jax.sharding.NamedSharding) or is_key or not _divides(sharding, aval):
            sharding = None
        types.append(jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding))
    return types


def _divides(sharding: Any, aval: Any) -> bool:
    try:
        sharding.shard_shape(aval.shape)
    except ValueError:
        return False
    return True


def step_program(fun: Callable, args: tuple, kwargs: dict[str, Any], gradient: bool) -> Program:
    """The program of a step, with its gradient or without, to be compiled."""
    if hasattr(fun, "lower") and hasattr(fun, "trace") and not gradient:
        # As the user jits it, with its shardings and compiler options.
        with created_undone(fun, args, kwargs):
            traced: Any = _states.jax_traced(fun.trace(*args, **kwargs))
        return Program.of_traced(getattr(traced, "jax_stage", traced), memory_analysis_options())
    program = (with_gradient if gradient else without_gradient)(fun, args, kwargs)
    return program.for_types(program.arrays, memory_analysis_options())
