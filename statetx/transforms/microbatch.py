"""`microbatch`: a function on the parts of a batch, one after the other, with its outputs reduced.

The function is staged once for each size of a part. Its outputs are accumulated as the loop goes, so that a gradient
function needs the memory of one part and of one gradient. A loss, too, has a gradient of that kind: see
`statetx._loops.accumulated`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .. import _hooks, _jax, _states
from .._errors import FunctionError, StateAccessError, StateValueError, StaticArgumentError
from .._frames.foreign import held_by_libraries, undo_changes
from .._lift.batch import Batch, BatchArguments
from .._lift.carry import settle
from .._lift.differentiated import resolve_argnums
from .._lift.options import keeps_type, transform
from .._lift.outcome import publish_leaves, with_new_states, without_new_states
from .._lift.rules import Broadcast, Carry, First, Last, Mean, Rules, Split
from .._lift.staged import Staged
from .._lift.wrapper import Wrapper, name_of
from .._loops.parts import REDUCTIONS, EqualParts, Progress, Turns, part_type
from .._targets import current
from .._targets.target import Target
from .._text import brief, suggestion, type_str
from .._tree import ARRAY, is_argument, is_integer, partition, whole_number
from .._typing import Filter, Indices, Names, PyTree
from .abstract import eval_shape
from .functionalize import trace_states
from .grad import ValueAndGrad
from .jit.arguments import static_key
from .jit.cache import Programs

RULES = (Carry, Broadcast, Split, Mean, First, Last)

_MAX_FITS = 1024  # choices that one function remembers


@keeps_type
@transform({"microbatch_size": "give the number of parts, num=batch_size // microbatch_size"})
def microbatch(
    fun: Callable[..., Any] | None = None,
    num: int | str | None = None,
    *,
    budget: int | str | None = None,
    argnums: Indices | None = None,
    argnames: Names = (),
    states: Mapping[Filter, Any] | None = None,
    reduce: PyTree = "mean",
    weight: Callable[..., Any] | None = None,
    interleave: bool | None = None,
    accumulate: Any = "float32",
    target: Target | str | None = None,
) -> Callable[..., Any]:
    """Split a batch into parts, run a function on one part after the other, and take the mean of its outputs.

    Also called gradient accumulation. For functions that return gradients, and for losses: the gradients of a loss in
    parts (``jax.grad``, `grad`) are accumulated, too, and no part is computed again. It takes the memory of one part
    and of one set of gradients.

    Args:
        fun: a function whose outputs are arrays: ``statetx.value_and_grad(loss)``, ``jax.grad(loss)``, a loss, an
            evaluation.
        num: the number of parts. Sizes differ by one where it does not divide the batch; each part counts with its size
            in a mean. ``"fit"``, the default with `budget`: the fewest parts whose compiled program keeps the budget.
            The measurements of the compiled candidates are stored on disk (`STATETX_CACHE`): the second run of a
            script only stages these programs. A batch without examples is one part, as for `fun` alone.
        budget: bytes, such as ``"2GiB"``, or ``"device"``: for arguments, outputs and temporaries of the function as
            compiled alone, with its gradient if it is a loss.
        argnums: positions of the arguments that hold the batch along the first axis of their arrays. By default all,
            except the ones that a `grad` or `value_and_grad` differentiates. A random key among them
            (``jax.random.key``) is split: each part gets its own. Values other than arrays pass untouched.
        argnames: the same by name.
        states: from filters to rules for the states that they select. Filters are tried in order.

            - `Carry`, the default for states that `fun` writes: as a loop would leave it. Each part reads the previous
              part's value.
            - `Mean`, `First`, `Last`: each part reads the value from before the call; the mean of the parts' values, or
              one part's value, remains.
            - `Split`, for random states: each part has a key of its own, and the state advances once. `Broadcast`: all
              parts share the draws.
            - an axis: the state has a value for each example along it; a part reads and writes the values of its own
              examples.
        reduce: how outputs are combined, as a tree prefix of the output: ``"mean"``, ``"sum"``, ``"first"``,
            ``"last"``, ``"concat"`` (along the first axis, for a value for each example) or ``"stack"`` (one value for
            each part). ``"sum"`` for a loss that is a sum over the batch.
        weight: called with the arguments of a part, returns its weight in a mean, in place of its size; it may read
            states. A mean over the true entries of a mask needs ``weight=lambda x, mask: mask.sum()``. A part of weight
            0 is left out; the mean is 0 if all are.
        interleave: whether a part has every ``num``-th example in place of consecutive ones. A batch that is sharded
            along its first axis stays on its devices then. By default only if the batch is known to be sharded so.
        accumulate: the dtype for sums, means and gradients of a loss in parts where their own has fewer bits: bfloat16,
            float16 and float8. They are rounded to their own once, after the last part. None adds them up in their
            own.
        target: the device that `budget` is for, if not this machine's: see `statetx.Target`.

    Returns:
        A function of the same arguments, for the whole batch.

    State:
        Reads and writes the same states as `fun`; each is stored once, after the last part.

    Memory:
        The temporaries of one part and the reduced outputs, once, in the dtype of `accumulate`. A loss under
        reverse-mode differentiation: the temporaries of one part of its gradient. Other functions, and higher
        derivatives of a loss, have each part rematerialized: the parts are run twice.

    Raises:
        StaticArgumentError: `num` is not a number of parts, or an argument that the function does not have.
        ValueError: the arguments differ in the number of examples, or there are fewer examples than parts.
        StateAccessError: the function wrote a `Broadcast` state.
        FunctionError: the function is a training step: an `Optimizer` updates states in it, or it writes another value
            to a `Param` (or another library's parameter) that it has differentiated. Each part would be a step of its
            own.
        CarryTypeError: a part would change the type of a state.
        StateValueError: the outputs that are averaged have a value for each example of a part.

    Source:
        ``optax.microbatching``; ``jax.lax.scan``.

    Example:
        >>> import jax.numpy as jnp, statetx
        >>> w, seen = statetx.Param(jnp.array(2.0)), statetx.State(0)
        >>> def loss(x):
        ...     seen.value += x.shape[0]
        ...     return ((w.value - x) ** 2).mean()
        >>> step = statetx.microbatch(statetx.value_and_grad(loss, wrt=w), 4)
        >>> value, gradient = step(jnp.arange(10.0))
        >>> round(float(value), 4), round(float(gradient), 4), int(seen.value)
        (14.5, -5.0, 10)
    """
    ...


class Partwise(Wrapper):
    """A function that runs on one part of its arguments after the other; `microbatch` and `chunked` have subclasses."""

    def __init__(self, fun: Callable, **options: Any):
        super().__init__(fun, **options)
        name = self.maker.__name__
        for how in jax.tree.leaves(self._options["reduce"]):
            _check_reduction(name, how)
        _check_accumulate(name, self._options["accumulate"])
        Rules(name, self._options["states"], fun, RULES)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        if _jax.is_jit_disabled():
            with jax.disable_jit(False):  # parts are staged: only then their outputs' types are known
                return self(*args, **kwargs)
        batch = self.batch_of(args, kwargs)
        num = self.num_parts(batch, args, kwargs) if batch.size else 1
        if 0 < batch.size < num:
            raise ValueError(
                f"{self.maker.__name__}({name_of(self.__wrapped__)}): {batch.size} examples cannot be split into "
                f"{num} parts.\n"
                f"Fix: give at most {batch.size} parts."
            )
        return _PartwiseCall(self.maker.__name__, self.__wrapped__, batch, num, self._options).run(args, kwargs)

    def batch_of(self, args: tuple, kwargs: dict[str, Any]) -> Batch:
        raise NotImplementedError

    def num_parts(self, batch: Batch, args: tuple, kwargs: dict[str, Any]) -> int:
        raise NotImplementedError


class Microbatch(Partwise, made_by=microbatch):
    """Made by `microbatch`."""

    def __init__(self, fun: Callable, **options: Any):
        super().__init__(fun, **options)
        self._budget = self._options["budget"]
        self._num = _check_num(self._options["num"], self._budget)
        argnums, argnames = self._options["argnums"], self._options["argnames"]
        self._batch = BatchArguments("microbatch", fun, argnums, argnames, functools.partial(_diff_argnums, fun))
        self._fits = Programs(_MAX_FITS)  # the choices for the budget

    def batch_of(self, args: tuple, kwargs: dict[str, Any]) -> Batch:
        return self._batch.of(args, kwargs)

    def num_parts(self, batch: Batch, args: tuple, kwargs: dict[str, Any]) -> int:
        return self.fit(*args, **kwargs).num if isinstance(self._num, str) else self._num

    def fit(self, /, *args: Any, **kwargs: Any) -> Any:
        """Choose the parts for arguments of these types, with ``num="fit"``. The result prints as text;
        nothing is run.
        """
        with current.within(self._options["target"]):
            return self._fit(args, kwargs)

    def _fit(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        batch = self.batch_of(args, kwargs)
        # A flag, or the value of a state, may change the program as types of arguments do.
        touched = trace_states(self.__wrapped__)(*args, **kwargs)
        values = [_states.kind_of_state(row.state).read(row.state) for row in touched if not row.created]
        arrays, part = partition((args, kwargs, values), is_argument)
        is_differentiated = any(map(_jax.is_differentiated, arrays))
        types = tuple([str(_jax.abstract(x)) for x in arrays])
        key = (types, part.treedef, part.mask, static_key(part.static), is_differentiated, _jax.trace_context())
        if key not in self._fits:
            self._fits.keep(
                key, [_hooks.fits["microbatch"](self, self._budget, batch, args, kwargs, is_differentiated)]
            )
        return self._fits[key][0]

    def with_num(self, num: int) -> Microbatch:
        """Return the transform with a number of parts."""
        return type(self)(self.__wrapped__, **{**self._options, "num": num, "budget": None})


@dataclasses.dataclass(eq=False)
class _PartwiseCall:
    """One call of a function on the parts of a batch."""

    transform: str
    fun: Callable
    batch: Batch
    num: int
    options: dict[str, Any]

    def __post_init__(self) -> None:
        self.name = f"{self.transform}({name_of(self.fun)})"
        self.dtype = _check_accumulate(self.transform, self.options["accumulate"])
        interleave = self.options["interleave"]
        self.is_interleaved = self.batch.is_sharded() if interleave is None else bool(interleave)

    def run(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        rules = Rules(self.transform, self.options["states"], self.fun, RULES, args, kwargs)
        groups = self._groups()
        examples = [self._examples(parts, first) for parts, first in groups]
        weights = self._weights(examples)
        progress = Progress()
        out_avals: list[Any] | None = None
        held = held_by_libraries()
        for (parts, _), xs, w in zip(groups, examples, weights, strict=True):
            undo_changes(held)  # haiku's modules get the same names in parts of each size
            staged = self._stage(parts, xs, rules)
            self._refuse_step(staged)
            share = None if w is not None else parts.size / self.batch.size if self.batch.size else 1.0
            turns = Turns(staged, rules, self._reductions(staged, out_avals), share, self.dtype)
            out_avals = list(staged.out_avals)
            turns.run(parts, xs, w, self.num, progress)
        rules.check_paths()
        effects = progress.effects.values()
        publish_leaves([e for e, _ in effects], [part for _, part in effects], turns.state_values(progress))
        return with_new_states(staged.outs[1].combine(turns.outputs(progress)))

    def _groups(self) -> list[tuple[EqualParts, int]]:
        """Runs of parts of equal size, each with the number of parts before it. The larger parts come first."""
        size, more = divmod(self.batch.size, self.num)
        boundary = more * (size + 1)
        groups = [
            (EqualParts(0, more, size + 1, self.is_interleaved), 0),
            (EqualParts(boundary, self.num - more, size, self.is_interleaved), more),
        ]
        return [(parts, first) for parts, first in groups if parts.num]

    def _examples(self, parts: EqualParts, first: int) -> list[Any]:
        return [
            jax.random.split(x, self.num)[first : first + parts.num] if is_key else parts.split(jnp.asarray(x))
            for x, is_key in zip(self.batch.leaves, self.batch.is_key, strict=True)
        ]

    def _weights(self, examples: list[list[Any]]) -> list[Any]:
        """Weights of the parts of each group, as shares of the whole; None if each part counts with its size."""
        weight = self.options["weight"]
        if weight is None:
            return [None] * len(examples)

        weights = [self._weights_of(weight, xs) for xs in examples]
        total = sum(w.sum() for w in weights)
        return [w / jnp.where(total == 0, 1, total) for w in weights]

    def _weights_of(self, weight: Callable, examples: list[Any]) -> Any:
        """The weights of parts of equal size."""
        batch = self.batch

        def call(*leaves: Any) -> tuple[Any]:
            args, kwargs = batch.arguments(leaves)
            return (jnp.asarray(weight(*args, **kwargs), float),)

        avals = [_jax.drop_axis(_jax.abstract(x), 0) for x in examples]
        staged = Staged(self.transform, weight, avals, arguments=batch.arguments, call=call)
        for effect in staged.effects:
            raise StateAccessError(
                f"{self.name}: weight= may read states, and wrote {_states.describe(effect.state)} at {effect.site}.\n"
                f"Fix: write the state in the function itself."
            )
        if [aval.shape for aval in staged.out_avals] != [()]:
            raise StateValueError(
                f"{self.name}: weight= must return a number for each part, and returned "
                f"{', '.join(map(type_str, staged.out_avals))}.\n"
                f"Fix: reduce it, as in weight=lambda x, mask: mask.sum()."
            )
        reads = list(staged.inputs.values())
        body = staged.arrange([*staged.operand_vars, *reads, *staged.arg_vars], staged.out_vars)
        constants = [*staged.operands, *(x for read in reads for x in read.values)]
        return jax.lax.map(lambda xs: body((), *constants, *xs)[0], examples)

    def _stage(self, parts: EqualParts, examples: list[Any], rules: Rules) -> Staged:
        fun, batch = self.fun, self.batch
        avals = [_jax.drop_axis(_jax.abstract(x), 0) for x in examples]

        def call(*leaves: Any) -> tuple[tuple, Any]:
            args, kwargs = batch.arguments(leaves)
            return (), without_new_states(fun(*args, **kwargs))

        def slice(state: Any, aval: Any) -> Any:
            return part_type(rules, state, aval, batch.size, parts.size)

        def stage(_: list, enter: Callable) -> Staged:
            # Not "scan": forward and backward pass of a part are in one body, where XLA merges a recomputation with the
            # first computation unless it is prevented.
            return Staged(self.transform, fun, avals, arguments=batch.arguments, call=call, slice=slice, enter=enter)

        keeps_type = lambda effect: rules(effect.state) is not Split and not isinstance(rules(effect.state), int)
        return settle(stage, [], partition(())[1], is_carried=keeps_type)[0]

    def _refuse_step(self, staged: Staged) -> None:
        gradient = f"statetx.microbatch(statetx.value_and_grad(loss, wrt=...), {self.num})"
        if self.transform == "chunked":
            gradient = "statetx.value_and_grad(statetx.chunked(loss, size=...), wrt=...)"
        for effect in staged.effects:
            if effect.stepped:
                raise FunctionError(
                    f"{self.name} would run a training step on each part: {name_of(self.fun)} differentiates "
                    f"{_states.describe(effect.state, effect.kind)}, and writes it at {effect.site}. So each part "
                    f"would update it, by its own gradient.\n"
                    f"Fix: take the gradient in parts, and update once after it: {gradient}(x). A step for each part "
                    f"is a statetx.scan over parts."
                )

    def _reductions(self, staged: Staged, larger: Sequence[Any] | None) -> list[str]:
        """Reduction of each leaf of the output; `larger` are the outputs of parts with one more example, if
        there are such.
        """
        out = staged.outs[1]
        reduction = self.options["reduce"]
        reduce = "mean" if reduction is None else reduction
        if reduction is None and out.treedef == ARRAY.treedef and staged.out_avals[0].shape:
            raise StateValueError(
                f"{self.name} is for a loss, and {name_of(self.fun)} returns {type_str(staged.out_avals[0])} for a "
                f"part, not a number.\n"
                f'Fix: reduce it, with .mean(); or say how the parts are combined: reduce="concat" for a value for '
                f'each example, "mean" or "sum".'
            )
        skeleton = out.combine(range(out.num_dynamic))
        try:
            reductions = jax.tree.leaves(jax.tree.broadcast(reduce, skeleton))
        except ValueError as e:
            raise StateValueError(
                f"{self.name}: reduce={brief(reduction)} is not a tree prefix of the output, "
                f"{jax.tree.structure(skeleton)}.\n"
                f'Fix: give a word for each part of the output, as in reduce=(("mean", "concat"), "mean") for '
                f"((loss, outputs), gradients)."
            ) from e
        for how, aval in zip(reductions, staged.out_avals, strict=True):
            if how == "concat" and not aval.shape:
                raise StateValueError(
                    f'{self.name}: reduce="concat" is for outputs with a value for each example, and an output of a '
                    f'part is {type_str(aval)}.\nFix: reduce="stack" for one value for each part, or "mean", "sum".'
                )
        for how, aval, larger_aval in zip(reductions, staged.out_avals, larger or staged.out_avals, strict=True):
            if how != "concat" and aval.shape != larger_aval.shape:
                raise StateValueError(
                    f"{self.name}: {self.num} parts of {self.batch.size} examples are not equal, and an output is "
                    f"{type_str(larger_aval)} for the larger ones and {type_str(aval)} for the others; reduce={how!r} "
                    f"needs equal shapes.\n"
                    f'Fix: reduce="concat" for outputs with a value for each example, or a number of parts that '
                    f"divides the batch."
                )
        if larger is None:
            self._refuse_examples(reductions, staged)
        return reductions

    def _refuse_examples(self, reductions: Sequence[str], staged: Staged) -> None:
        """Refuse a mean over parts of values for each example, which equal parts do not show."""
        size = self.batch.size // self.num
        shapes = [aval.shape for how, aval in zip(reductions, staged.out_avals, strict=True) if how == "mean"]
        if self.num == 1 or not shapes or any(shape[:1] != (size,) for shape in shapes):
            return
        # The axis may be one of a gradient: parts of another size tell.
        args, kwargs = self.batch.arguments(self.batch.types(size + 1))
        lengths: list[Any] = []
        with contextlib.suppress(Exception):  # the function may take this size only
            outs = zip(reductions, jax.tree.leaves(eval_shape(self.fun, *args, **kwargs)), strict=True)
            lengths = [x.shape[:1] for how, x in outs if how == "mean"]
        if lengths and all(length == (size + 1,) for length in lengths):
            raise StateValueError(
                f"{self.name}: outputs have a value for each of the {size} examples of a part, such as "
                f"{type_str(staged.out_avals[reductions.index('mean')])}, and are combined by "
                f"reduce={self.options['reduce']!r}.\n"
                f'Fix: reduce="concat" keeps a value for each example; or take the mean in the function.'
            )


def _check_num(num: Any, budget: Any) -> int | str:
    if num is None and budget is not None:
        num = "fit"
    if num == "fit":
        if budget is None:
            raise StaticArgumentError('microbatch: num="fit" needs a budget.\nFix: budget="2GiB", or budget="device".')
        return "fit"
    if budget is not None:
        raise StaticArgumentError(
            f"microbatch: num={num!r} and budget={budget!r} do not go together; give one of them."
        )
    value = whole_number(num, 1)
    if value is None:
        raise StaticArgumentError(
            f'microbatch: num={brief(num)} is not a number of parts: give a whole number of at least 1, or "fit" '
            f"with a budget."
        )
    return value


def _check_reduction(transform: str, how: Any) -> None:
    if how not in REDUCTIONS:
        hint = suggestion(how, REDUCTIONS) if isinstance(how, str) else ""
        raise StaticArgumentError(
            f"{transform}: reduce={how!r} is not one of {', '.join(map(repr, REDUCTIONS))}.{hint}"
        )


def _check_accumulate(transform: str, dtype: Any) -> Any:
    """The dtype of ``accumulate=``, as JAX has it under the present setting of x64; None for None."""
    if dtype is None:
        return None
    try:
        checked = jnp.dtype(dtype)
    except (TypeError, ValueError):
        checked = None
    if checked is None or not jnp.issubdtype(checked, jnp.floating):
        number = "num" if transform == "microbatch" else "size"
        fix = 'accumulate="float32", or None to add up gradients in their own dtype'
        if is_integer(dtype):
            fix = f"{number}={dtype}: the number of {'parts' if number == 'num' else 'elements of a chunk'} is {number}"
        raise StaticArgumentError(f"{transform}: accumulate={brief(dtype)} is not a dtype of floats.\nFix: {fix}.")
    return jax.dtypes.canonicalize_dtype(checked)


def _diff_argnums(fun: Callable, num_args: int) -> list[int]:
    """The arguments that a function, made by statetx's `grad`, differentiates."""
    while isinstance(fun, Wrapper):
        if isinstance(fun, ValueAndGrad):
            return resolve_argnums(fun.argnums, num_args, fun)[0]
        fun = fun.__wrapped__
    return []
