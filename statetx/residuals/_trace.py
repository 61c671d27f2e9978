"""The forward and the backward pass of a function as equations, and the residuals between them.

``jax.vjp`` returns its pullback as a pytree whose leaves are the residuals. So the function is staged once, with every
argument, state and constant as an input, and then ``jax.vjp`` of it is staged, with these leaves as additional outputs.
No array is computed, and the user's Python runs once.
"""

from __future__ import annotations

import functools
import os
import re
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax

from .. import _jax, _states
from .._equations.differentiate import backward_pass, forward_pass
from .._equations.inline import inline
from .._equations.primitives import INLINED, REMAT
from .._equations.structure import Body, table
from .._jax import Jaxpr
from .._lift.inputs import InputNames, Lifting
from .._lift.outcome import pack
from .._lift.run import frame_for
from .._lift.stage import stage
from .._lift.targets import Targets, resolve_argnums, split_aux
from .._lift.wrapper import name_of, short_name
from .._objects.paths import Paths, argument_names
from .._objects.walk import created_undone
from .._remat.gradients import rewritten_by
from .._remat.rewriter import Observer, is_training_step
from .._tree import Partition, as_array, flatten, is_array, is_array_or_number, is_array_or_type, is_float
from .._typing import Filter, PyTree
from ..transforms.jit.api import Jit


class InputOrigin(NamedTuple):
    """The argument, state or constant that an input of the function comes from.

    Attributes:
        origin: "argument", "state" or "constant".
        path: the argument as written in Python (``params['w']``), or the path of the state.
        kind: the state's type.
    """

    origin: str
    path: str = ""
    kind: str = ""


class Passes:
    """The forward and backward pass of a function.

    Attributes:
        name: the function's name.
        forward: the jaxpr of the forward pass. Its outputs are the `num_out` outputs of the function, then the
            residuals.
        backward: the jaxpr of the backward pass. Its inputs are the residuals and the cotangents of the outputs; its
            outputs are the cotangents of the inputs `chosen`.
        sources: the origin of each input of `forward`.
        regions: names of the rematerialized functions; `regions_of` gives those that an equation belongs to.
    """

    def __init__(
        self, name: str, body: Jaxpr, outs: Sequence[int], chosen: Sequence[int], sources: Sequence[InputOrigin]
    ):
        self.name = short_name(name)
        self.num_out = len(outs)
        self.regions: list[str] = []

        # Before differentiation, which copies the scope of an equation to all equations that it makes from it.
        body = _tag(body, self.regions)

        def run(*inputs: Any) -> list[Any]:
            results = _jax.evaluate(body, (), inputs)
            return [results[i] for i in outs]

        avals = [v.aval for v in body.invars]

        # Values that the body closes over become inputs in front of the others.
        closed, self._pullback = forward_pass(run, avals, chosen, traced_for="statetx.residuals", name=name)
        self.forward = _jax.without_remat3(closed.jaxpr)
        self.sources = [InputOrigin("constant")] * closed.num_operands + list(sources)
        self.chosen = [closed.num_operands + i for i in chosen]

    @property
    def residuals(self) -> list[Any]:
        """The leaves of the pullback: variables of `forward`, or literals."""
        return self.forward.outvars[self.num_out :]

    @functools.cached_property
    def backward(self) -> Jaxpr:
        """Rematerialized regions and loops stand in it as equations, other calls are inlined."""
        avals = [v.aval for v in self.residuals], [v.aval for v in self.forward.outvars[: self.num_out]]
        name = f"backward of {self.name}"
        jaxpr, consts = backward_pass(self._pullback, *avals, traced_for="statetx.residuals", name=name)
        return inline(_jax.without_remat3(jaxpr), consts, calls=INLINED - REMAT)


def differentiate(
    fun: Callable,
    args: tuple,
    kwargs: dict[str, Any],
    *,
    argnums: int | Sequence[int] | None = None,
    wrt: PyTree | Filter = None,
    has_aux: bool = False,
    may_be_step: bool = True,
) -> list[Passes]:
    """Stage a function and its derivative with respect to the inputs that `saved_residuals` documents.

    Of a training step, the different functions that it differentiates, unless `may_be_step` is False.
    """
    # Without a choice every float counts. With `wrt` alone, as in `grad`, no argument does.
    all_inputs = argnums is None and wrt is None
    may_be_step = may_be_step and all_inputs
    if may_be_step:
        fun = _unjitted(fun)  # a trace within would hide which values are states and arguments
    nums, _ = resolve_argnums(argnums, len(args), fun)
    targets = None if wrt is None else Targets(wrt, fun, args, kwargs)

    def is_target_state(state: Any) -> bool:
        return all_inputs or (targets is not None and targets.is_target(state))

    flatten((args, kwargs), _states.is_opaque)  # raises for a dict that JAX cannot flatten
    leaves_with_path, treedef = jax.tree_util.tree_flatten_with_path((args, kwargs), is_leaf=_states.is_opaque)
    are_targets = [all_inputs or (keys[0].idx == 0 and keys[1].idx in nums) for keys, _ in leaves_with_path]

    # A Python number is traced only if it is differentiated, as `grad` would; others may decide branches of the
    # function.
    mask = tuple(
        is_array_or_type(x) or (w and isinstance(x, (float, complex)))
        for (_, x), w in zip(leaves_with_path, are_targets, strict=True)
    )
    static_part = Partition(treedef, mask, tuple(x for (_, x), m in zip(leaves_with_path, mask, strict=True) if not m))
    arrays = [as_array(x) for (_, x), m in zip(leaves_with_path, mask, strict=True) if m]

    paths, argument_name = Paths(fun, args, kwargs), argument_names(fun, args)
    recorder = _GradientRecorder() if may_be_step else None
    lifting = _InspectedReads(targets, paths, recorder)
    name = name_of(fun)
    keys_of_arrays = [keys for (keys, _), m in zip(leaves_with_path, mask, strict=True) if m]

    def body(*tracers: Any) -> tuple[list, None]:
        frame = frame_for("saved_residuals", fun, on_read=lifting.on_read)
        call_args, call_kwargs = static_part.combine(tracers)
        if recorder is None:
            out = frame.run(fun, *call_args, **call_kwargs)
        else:
            recorder.note(tracers, [InputOrigin("argument", argument_name(keys)) for keys in keys_of_arrays])
            with rewritten_by(recorder):
                out = frame.run(fun, *call_args, **call_kwargs)

        # Only the function's own outputs get cotangents, so new values of states are not among the outputs.
        for effect in frame.effects:
            effect.value = None
        leaves, _ = pack(split_aux(out, fun)[0] if has_aux else out, [])
        return leaves, None

    # Structures shared with other functions would give the source lines of the first one.
    with table.bypassed():
        names = InputNames(fun, static_part.combine)
        avals = [_jax.abstract(x) for x in arrays]
        with created_undone(fun, static_part.static):
            staged, _, refs = stage(body, avals, traced_for="statetx.residuals", names=names, lifting=lifting)

        if recorder is not None:
            recorder.origins.clear()
            outputs = [v.aval for v in staged.jaxpr.outvars if is_float(v.aval)]
            if is_training_step(recorder.outputs, outputs):
                return recorder.passes(f"gradient in {short_name(name)}")

        # Inputs of the staged function: closed-over values, arrays of arguments, leaves of states in the order of first
        # reads.
        inputs = [(InputOrigin("constant"), False)] * staged.num_operands
        inputs += [
            (InputOrigin("argument", argument_name(keys)), is_target)
            for (keys, _), is_target, is_dynamic in zip(leaves_with_path, are_targets, mask, strict=True)
            if is_dynamic
        ]
        inputs += _state_inputs(lifting, paths, is_target_state)

        # Only floats have derivatives. The last outputs are values of Refs.
        in_vars, out_vars = staged.jaxpr.invars, staged.jaxpr.outvars[: len(staged.jaxpr.outvars) - len(refs)]
        chosen = [i for i, ((_, t), v) in enumerate(zip(inputs, in_vars, strict=True)) if t and is_float(v.aval)]
        floats = [i for i, v in enumerate(out_vars) if is_float(v.aval)]
        return [Passes(name, staged.jaxpr, floats, chosen, [origin for origin, _ in inputs])]


def _unjitted(fun: Callable) -> Callable:
    """The user's function of a jitted one."""
    if isinstance(fun, Jit) or _jax.is_jitted(fun):
        return fun.__wrapped__
    return _states.unjitted(fun) or fun


def _state_inputs(
    lifting: Lifting, paths: Paths, is_target: Callable[[Any], bool]
) -> Iterator[tuple[InputOrigin, bool]]:
    """The origin of each input that is a leaf of a state, and whether it is differentiated."""
    for state_input in lifting.inputs.values():
        state = state_input.state
        for path in _leaf_paths(state_input.partition, paths(state)):
            yield InputOrigin("state", path, type(state).__name__), is_target(state)


class _InspectedReads(Lifting):
    """Makes every array of a state an input, and the Python numbers of the states that `wrt` selects."""

    def __init__(self, targets: Targets | None, paths: Paths, recorder: _GradientRecorder | None):
        super().__init__(is_array)
        self._targets, self._paths, self._recorder = targets, paths, recorder

    def on_read(self, state: Any, kind: Any, value: Any) -> Any:
        # As in `grad`: a number in a state is traced only if the state is differentiated.
        self.is_dynamic = is_array
        if self._targets is not None:
            self._targets.note_read(state, kind)
            self.is_dynamic = is_array_or_number if self._targets.is_target(state) else is_array
        read = super().on_read(state, kind, value)
        if self._recorder is not None:
            leaves = jax.tree_util.tree_flatten_with_path(read, is_leaf=_states.is_opaque)[0]
            path = self._paths(state)
            origins = [
                InputOrigin("state", path + jax.tree_util.keystr(keys), type(state).__name__) for keys, _ in leaves
            ]
            self._recorder.note([x for _, x in leaves], origins)
        return read


class _GradientRecorder(Observer):
    """Keeps the equations of the functions that are differentiated.

    Attributes:
        origins: by id, arguments and values of states, and what each is.
        outputs: the types of what each function returns.
    """

    def __init__(self) -> None:
        self.origins: dict[int, tuple[Any, InputOrigin]] = {}
        self.outputs: list[Sequence[Any]] = []
        self._found: dict[Any, tuple[Any, ...]] = {}

    def note(self, values: Sequence[Any], origins: Sequence[InputOrigin]) -> None:
        """Note what values are; one that is noted already keeps its origin."""
        for x, origin in zip(values, origins, strict=True):
            self.origins.setdefault(id(x), (x, origin))

    def observe(self, outputs: Sequence[Any], run: Callable, operands: Sequence[Any], args: Sequence[Any]) -> None:
        self.outputs.append(outputs)
        body, inputs, num = run, [*operands, *args], len(operands)
        if not isinstance(body, Body):  # what replaces the function, such as a plan
            call = lambda *xs: run(xs[: len(operands)], *xs[len(operands) :])
            avals = [_jax.abstract(x) for x in inputs]
            body = Body.close(*_jax.stage(call, avals, traced_for="statetx.residuals", name="planned"))
            inputs, num = [*body.operands, *inputs], body.num_operands + num
        chosen = [i for i, x in enumerate(inputs) if is_float(x) and _jax.is_differentiated(x)]
        floats = [i for i, aval in enumerate(outputs) if is_float(aval)]
        sources = [self._origin_of(x, i < num) for i, x in enumerate(inputs)]
        self._found.setdefault((body.key, tuple(chosen)), (body.jaxpr, floats, chosen, sources))

    def _origin_of(self, x: Any, is_closed_over: bool) -> InputOrigin:
        while (entry := self.origins.get(id(x))) is None and (primal := _jax.primal_of(x)) is not None:
            x = primal
        return entry[1] if entry is not None else InputOrigin("constant" if is_closed_over else "argument")

    def passes(self, name: str) -> list[Passes]:
        """Of the functions that differ; beside scalars not those of arrays, which an integrator in the loss
        differentiates.
        """
        found = list(self._found.values())
        of_scalars = [
            (jaxpr, floats, *rest)
            for jaxpr, floats, *rest in found
            if all(jaxpr.outvars[i].aval.shape == () for i in floats)
        ]
        return [Passes(name, *one) for one in of_scalars or found]


def _leaf_paths(part: Partition, path: str) -> list[str]:
    """Paths of the dynamic leaves of a state's value."""
    keys, _ = jax.tree_util.tree_flatten_with_path(part.combine(range(part.num_dynamic)), is_leaf=_states.is_opaque)
    return [path + jax.tree_util.keystr(k) for (k, _), m in zip(keys, part.mask, strict=True) if m]


# -- rematerialized regions ------------------------------------------------------------------------------------

_TAG = "statetx-remat-"


def _tag(x: Any, regions: list[str]) -> Any:
    """Give each rematerialized region its own name scope, which all equations derived from it by differentiation
    inherit.
    """
    jaxpr, _ = _jax.open_jaxpr(x)
    eqns = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in REMAT:
            regions.append(short_name(_jax.open_jaxpr(eqn.params["jaxpr"])[0].debug_info.func_name))
            eqn = _jax.with_scope(eqn, f"{_TAG}{len(regions) - 1}")
        eqns.append(_jax.map_jaxprs(lambda j: _tag(j, regions), eqn))

    # Unchanged jaxprs stay the same objects, which JAX's caches are keyed by.
    is_same = all(new is old for new, old in zip(eqns, jaxpr.eqns, strict=True))
    return x if is_same else _jax.with_equations(x, eqns)


def regions_of(eqn: Any) -> list[int]:
    """The indices of the rematerialized regions that an equation belongs to, outermost first."""
    return [int(n) for n in re.findall(_TAG + r"(\d+)", _jax.scope(eqn))]


_INSTALLED = tuple({sysconfig.get_path(name) + os.sep for name in ("purelib", "platlib", "stdlib")})


def user_line(eqn: Any) -> tuple[str, int, str]:
    """File, line and function of the innermost frame behind an equation that is outside every installed package.

    If all frames are in installed packages: of the innermost one outside JAX, statetx and the libraries of states.
    """
    traceback, folders = eqn.source_info.traceback, _states.library_folders()
    frame = _jax.traceback_frame(traceback, folders + _INSTALLED) or _jax.traceback_frame(traceback, folders)
    file, line, function = frame or ("", 0, "")
    return file, line, short_name(function)
