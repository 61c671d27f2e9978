"""A call as equations, traced once for all reports.

The function is staged once, with every argument, state and constant as an input: `TracedCall`. Nothing else runs the
user's Python. Compiled programs evaluate these equations.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import jax

from .. import _jax, _states
from .._equations.structure import Body, table
from .._frames import Effect
from .._lift.carry import leaf_names
from .._lift.context import TraceContext, note_shardings
from .._lift.differentiated import DifferentiatedStates, resolve_argnums, split_aux
from .._lift.options import notes_shapes
from .._lift.order import OutputOrder
from .._lift.outcome import partition_output
from .._lift.run import frame_for
from .._lift.signature import StaticArguments
from .._lift.stage import InputNames, Lifting, stage
from .._lift.wrapper import name_of, short_name
from .._objects.paths import Paths, argument_names
from .._objects.walk import created_undone
from .._remat.override import override, rewritten_by
from .._remat.rewriter import MARKER, Observer, is_step_by_marks, marks_in
from .._states import Jitted
from .._targets import current
from .._tree import (
    Partition,
    as_array,
    flatten,
    is_argument,
    is_array,
    is_array_or_number,
    is_array_or_type,
    is_float,
    is_state_tree,
    partition,
)
from .._typing import Filter, PyTree
from ..transforms.jit.api import Jit
from ._passes import InputOrigin, Passes

F = TypeVar("F", bound=Callable[..., Any])


def inspects(fun: F) -> F:
    """Decorate a report on a function of the user's: it takes ``target=``, notes shapes in errors, and is left out of
    tracebacks.
    """
    return _jax.api_boundary(notes_shapes(current.takes_target(fun)))


class TracedInput(NamedTuple):
    """An input of a traced call.

    Attributes:
        array: the array, or its type.
        state: the state that it is a leaf of; None for arguments.
        index: its number among the arguments, or among the leaves of the state.
    """

    array: Any
    origin: InputOrigin
    state: Any = None
    index: int = 0


class TracedWrite(NamedTuple):
    """The new value of a state: `num` outputs of the equations, in the order of the writes.

    Attributes:
        path: of the state.
        site: the line of the last write.
        num_writes: as `Effect.num_writes`.
        created: whether the call has made the state.
    """

    state: Any
    path: str
    num: int
    site: str
    num_writes: float
    created: bool


class TracedCall:
    """A call of a function as equations, from the arrays of its arguments and its states.

    No array is computed and no state changes.

    Args:
        name: who asks, for messages.
        argnums, wrt, has_aux: as in `saved_residuals`.
        has_passes: whether `passes` will be asked for.
        traces_numbers: whether a Python number is traced if it is differentiated, as `grad` would. Others may decide
            branches of the function, or be shapes.
        unjits: whether the user's function of a jitted one is traced, with the arguments that it has under jit: a
            trace within would hide which values are states and arguments.
        types: the inputs, with arrays of other types.

    Attributes:
        body: the inputs are its operands and `inputs`, the outputs the function's and the values of the states that it
            writes or creates.
        outputs: the types of the function's outputs.
        num_results: the number of all that the call returns.
        inputs: the arrays of the arguments, then of the states in the order of their first reads.
        wanted: which arrays of the arguments are differentiated.
        given: the ids of states that are arguments by themselves, as in an ``nnx.State``, and are not written.
        takes_gradients: whether it differentiates functions.
        is_step: whether it is a training step, which takes gradients itself, and no loss.
    """

    def __init__(
        self,
        name: str,
        fun: Callable,
        args: tuple,
        kwargs: dict[str, Any],
        *,
        argnums: int | Sequence[int] | None = None,
        wrt: PyTree | Filter = None,
        has_aux: bool = False,
        has_passes: bool = False,
        traces_numbers: bool = False,
        unjits: bool = False,
        types: Sequence[TracedInput] | None = None,
    ):
        self._call, self._unjits = (name, fun, args, kwargs), unjits
        user = jitted(fun) if unjits else None
        fun = fun if user is None else user.fun
        self.name = name_of(fun)
        # Without a choice every float counts. With `wrt` alone, as in `grad`, no argument does.
        self._all_inputs = argnums is None and wrt is None
        nums, _ = resolve_argnums(argnums, len(args), fun)
        self._diff_states = None if wrt is None else DifferentiatedStates(wrt, fun, args, kwargs)

        flatten((args, kwargs), _states.is_opaque)  # raises for a dict that JAX cannot flatten
        leaves_with_path, treedef = jax.tree_util.tree_flatten_with_path((args, kwargs), is_leaf=_states.is_opaque)
        is_differentiated = lambda keys: self._all_inputs or (keys[0].idx == 0 and keys[1].idx in nums)

        is_traced = _is_traced_by(user, args)
        is_dynamic = lambda keys, x: (
            is_array_or_type(x)
            or (traces_numbers and is_differentiated(keys) and isinstance(x, (float, complex)))
            or (is_argument(x) and is_traced(keys))
        )
        mask = tuple(is_dynamic(keys, x) for keys, x in leaves_with_path)
        static = tuple(x for (_, x), m in zip(leaves_with_path, mask, strict=True) if not m)
        static_part = Partition(treedef, mask, static)
        dynamic = [(keys, x) for (keys, x), m in zip(leaves_with_path, mask, strict=True) if m]
        arrays = [as_array(x) for _, x in dynamic]
        self.wanted = [is_differentiated(keys) for keys, _ in dynamic]

        paths, argument_name = Paths(fun, args, kwargs), argument_names(fun, args)
        origins = [InputOrigin("argument", argument_name(keys)) for keys, _ in dynamic]
        # A recorder bypasses JAX's caches. `MARKER` fills them with one trace.
        self._recorder = recorder = _GradientRecorder()
        observer = recorder if has_passes else MARKER
        lifting = _InspectedReads(self._diff_states, paths, recorder, types)
        num_out = 0
        self.writes: list[TracedWrite] = []

        def body(*tracers: Any) -> tuple[list, None]:
            nonlocal num_out
            note_shardings(tracers, arrays)
            # nnx leaves gradients in cyclic garbage, which would seem to outlive the call.
            frame = frame_for(name, fun, on_read=lifting.on_read, frees_cycles=True)
            call_args, call_kwargs = static_part.combine(tracers)
            recorder.note(tracers, origins)

            def outputs() -> list:
                out = fun(*call_args, **call_kwargs)
                # Of a module of flax, too, as `jax.jit` returns them.
                return partition_output(split_aux(out, fun)[0] if has_aux else out, is_array, is_leaf=None)[0]

            # A trace for other types is part of another one, which may have a rewriter of its own.
            with _observed_by(observer) if types is None else contextlib.nullcontext():
                leaves = frame.run(outputs)
            num_out = len(leaves)
            for effect in frame.effects:
                written = partition(effect.value, is_array)[0]
                self.writes.append(_traced_write(effect, paths, len(written)))
                leaves += written
                effect.value = None
            return leaves, None

        avals = [_jax.abstract(x) for x in (arrays if types is None else [i.array for i in types if i.state is None])]
        # Structures shared with other functions would give the source lines of the first one.
        of_its_own = table.bypassed() if has_passes else contextlib.nullcontext()
        with of_its_own, created_undone(fun, static):
            names = InputNames(fun, static_part.combine)
            self.body, _, refs = stage(body, avals, traced_for=f"statetx.{name}", names=names, lifting=lifting)
        recorder.origins.clear()
        self.inputs = [
            TracedInput(x, origin, None, n) for n, (x, origin) in enumerate(zip(arrays, origins, strict=True))
        ]
        self.inputs += _state_inputs(lifting, paths)
        self.outputs = [v.aval for v in self.body.jaxpr.outvars[:num_out]]
        self.writes += [_traced_write(effect, paths, 1) for effect in refs]
        self.given = {id(x) for x in static if is_state_tree(x)} - {id(w.state) for w in self.writes}
        self._written = self._changed(lifting, [(w.state, w.num) for w in self.writes])
        self.num_results = num_out + len(self._written)
        marks = marks_in(self.body.jaxpr)
        self.takes_gradients = bool(marks)
        self.is_step = is_step_by_marks(marks, filter(is_float, self.outputs))

    def _changed(self, lifting: Lifting, writes: Sequence[tuple[Any, int]]) -> list[int]:
        """The outputs that are values of states which the call changes, of writes each with its number of leaves: new
        values in the order of the old ones, then values of other states.

        A state that is only read keeps its value. As an output it would count twice: XLA copies an argument that is
        returned. An array written back unchanged is taken for one that is only read.
        """
        first, changed = len(self.outputs), set()
        of_states = self.body.jaxpr.invars[len(self.body.jaxpr.invars) - lifting.num_variables :]
        for state, num in writes:
            read = lifting.inputs.get(id(state))
            old_variables = [] if read is None else [of_states[i] for i in read.variables]
            if self.body.jaxpr.outvars[first : first + num] != old_variables:
                changed.update(range(first, first + num))
            first += num
        positions = range(len(self.outputs), first)
        order = OutputOrder(writes, [self.body.jaxpr.outvars[i].aval for i in positions], lifting.inputs.values())
        updated, _, other_positions = order.arrange(None, positions)
        return [i for i in (*updated, *other_positions) if i in changed]

    def __call__(self, arrays: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """The outputs, and the values of the states that are written or created."""
        return self.results(self.body(self.body.operands, *arrays))

    def results(self, outs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """As by a call, of all outputs of the equations."""
        num_out = len(self.outputs)
        return list(outs[:num_out]), [outs[i] for i in self._written]

    def retraced(self, arrays: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Trace again, for arrays of any types: the user's Python runs for them."""
        traced, arrays = self.retrace(arrays)
        return traced(arrays)

    def retrace(self, arrays: Sequence[Any]) -> tuple[TracedCall, list[Any]]:
        """The call traced again, for arrays of any types, with the arrays in the order of its inputs."""
        by_state = {(id(i.state), i.index): x for i, x in zip(self.inputs, arrays, strict=True)}
        inputs = [i._replace(array=x) for i, x in zip(self.inputs, arrays, strict=True)]
        traced = TracedCall(*self._call, unjits=self._unjits, types=inputs)
        # A state that was not read before has its own value.
        return traced, [by_state.get((id(i.state), i.index), i.array) for i in traced.inputs]

    def passes(self, *, may_be_step: bool = True) -> list[Passes]:
        """The forward and backward pass; for a training step one pair for each different function that it
        differentiates, unless `may_be_step` is False.
        """
        if may_be_step and self._all_inputs and self.is_step:
            return self._recorder.passes(f"gradient in {short_name(self.name)}")
        is_differentiated = lambda i: (
            self._all_inputs or (self._diff_states is not None and self._diff_states.has(i.state))
        )
        is_wanted = [*self.wanted, *map(is_differentiated, self.inputs[len(self.wanted) :])]
        # Only floats have derivatives.
        jaxpr, first = self.body.jaxpr, self.body.num_operands
        chosen = [first + i for i, w in enumerate(is_wanted) if w and is_float(jaxpr.invars[first + i].aval)]
        floats = [i for i, v in enumerate(self.outputs) if is_float(v)]
        sources = [InputOrigin("constant")] * first + [i.origin for i in self.inputs]
        return [Passes(self.name, jaxpr, floats, chosen, sources, TraceContext())]


@contextlib.contextmanager
def _observed_by(observer: Observer) -> Iterator[None]:
    """Tell an observer of the functions that are differentiated in this block, also of those that a rewriter around it
    replaces, such as a `budget`.
    """
    rewriter = override.rewriter
    with rewritten_by(observer):
        if rewriter is None or isinstance(rewriter, Observer):
            yield
            return
        with rewritten_by(rewriter):
            yield


def jitted(fun: Callable) -> Jitted | None:
    """What a jitted function is made of; None for another function."""
    if isinstance(fun, Jit):
        return Jitted(fun.__wrapped__, fun.static_argnums, fun.static_argnames)
    if _jax.is_jitted(fun):
        return Jitted(fun.__wrapped__, *_jax.static_arguments(fun))
    return _states.jitted(fun)


def _is_traced_by(user: Jitted | None, args: tuple) -> Callable[[tuple[Any, ...]], bool]:
    """``(keys in (args, kwargs)) -> bool``: whether jit traces this argument, also where it is a Python number."""
    if user is None:
        return lambda keys: False
    static = StaticArguments(*user)
    mask = static.mask(len(args))
    return lambda keys: not (mask[keys[1].idx] if keys[0].idx == 0 else keys[1].key in static.names)


def _traced_write(effect: Effect, paths: Paths, num: int) -> TracedWrite:
    site = effect.last_site or effect.site
    return TracedWrite(effect.state, paths(effect.state), num, site, effect.num_writes, effect.created)


def _state_inputs(lifting: Lifting, paths: Paths) -> Iterator[TracedInput]:
    for read in lifting.inputs.values():
        path, kind = paths(read.state), type(read.state).__name__
        for n, (x, name) in enumerate(zip(read.values, leaf_names(read.partition, read.values), strict=True)):
            yield TracedInput(x, InputOrigin("state", path + name, kind), read.state, n)


class _InspectedReads(Lifting):
    """Makes every array of a state an input, and the Python numbers of the states that `wrt` selects.

    Args:
        types: the inputs, with arrays of other types than the states have.
    """

    def __init__(
        self,
        diff_states: DifferentiatedStates | None,
        paths: Paths,
        recorder: _GradientRecorder,
        types: Sequence[TracedInput] | None,
    ):
        of_state: dict[int, list[Any]] = {}
        for i in types or ():
            of_state.setdefault(id(i.state), []).append(_jax.abstract(i.array))
        remaining = {key: iter(avals) for key, avals in of_state.items()}
        other_type = lambda state, aval: next(remaining.get(id(state), iter(())), aval)
        super().__init__(is_array, None if types is None else other_type)
        self._diff_states, self._paths, self._recorder = diff_states, paths, recorder

    def on_read(self, state: Any, kind: Any, value: Any) -> Any:
        # As in `grad`: a number in a state is traced only if the state is differentiated.
        self.is_dynamic = is_array
        if self._diff_states is not None:
            self._diff_states.note_read(state, kind)
            self.is_dynamic = is_array_or_number if self._diff_states.has(state) else is_array
        read = super().on_read(state, kind, value)
        leaves = jax.tree_util.tree_flatten_with_path(read, is_leaf=_states.is_opaque)[0]
        path, kind = self._paths(state), type(state).__name__
        origins = [InputOrigin("state", path + jax.tree_util.keystr(keys), kind) for keys, _ in leaves]
        self._recorder.note([x for _, x in leaves], origins)
        return read


class _GradientRecorder(Observer):
    """Keeps the equations of the functions that are differentiated.

    Attributes:
        origins: by id, arguments and values of states, each with its origin.
    """

    def __init__(self) -> None:
        self.origins: dict[int, tuple[Any, InputOrigin]] = {}
        self._found: dict[Any, tuple[Any, ...]] = {}

    def note(self, values: Sequence[Any], origins: Sequence[InputOrigin]) -> None:
        """Note the origins of values; a value that has one keeps it."""
        for x, origin in zip(values, origins, strict=True):
            self.origins.setdefault(id(x), (x, origin))

    def observe(self, outputs: Sequence[Any], run: Callable, operands: Sequence[Any], args: Sequence[Any]) -> None:
        body, inputs, num = run, [*operands, *args], len(operands)
        if not isinstance(body, Body):  # what replaces the function, such as a plan
            call = lambda *xs: run(xs[: len(operands)], *xs[len(operands) :])
            avals = [_jax.abstract(x) for x in inputs]
            body = Body.close(*_jax.stage(call, avals, traced_for="statetx.residuals", name="planned"))
            inputs, num = [*body.operands, *inputs], body.num_operands + num
        chosen = [i for i, x in enumerate(inputs) if is_float(x) and _jax.is_differentiated(x)]
        floats = [i for i, aval in enumerate(outputs) if is_float(aval)]
        sources = [self._origin_of(x, i < num) for i, x in enumerate(inputs)]
        context = TraceContext.of(inputs)
        self._found.setdefault((body.key, tuple(chosen)), (body.jaxpr, floats, chosen, sources, context))

    def _origin_of(self, x: Any, is_closed_over: bool) -> InputOrigin:
        while (entry := self.origins.get(id(x))) is None and (primal := _jax.primal_of(x)) is not None:
            x = primal
        return entry[1] if entry is not None else InputOrigin("constant" if is_closed_over else "argument")

    def passes(self, name: str) -> list[Passes]:
        """Passes of the different functions; if some have scalar outputs, of these only: an integrator in the loss
        differentiates the others.
        """
        recorded = list(self._found.values())
        of_scalars = [
            (jaxpr, floats, *inputs)
            for jaxpr, floats, *inputs in recorded
            if all(jaxpr.outvars[i].aval.shape == () for i in floats)
        ]
        return [Passes(name, *fields) for fields in of_scalars or recorded]


# -- rematerialized regions ------------------------------------------------------------------------------------

INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
"""Parts of the paths of installed packages, of this environment or another one."""
_LIBRARIES = (*INSTALLED, f"{os.sep}lib{os.sep}python3")


@functools.lru_cache(maxsize=1000)
def is_library(file: str) -> bool:
    """Whether a file belongs to an installed package or to Python."""
    return any(part in file for part in _LIBRARIES) or file.startswith("<frozen")


def user_line(eqn: Any) -> tuple[str, int, str]:
    """File, line and function of the innermost frame behind an equation that is outside every installed package.

    If all frames are in installed packages: of the innermost one outside JAX, statetx and the libraries of states.
    """
    traceback, folders = eqn.source_info.traceback, _states.library_folders()
    frame = _jax.traceback_frame(traceback, folders, is_library) or _jax.traceback_frame(traceback, folders)
    file, line, function = frame or ("", 0, "")
    return file, line, short_name(function)
