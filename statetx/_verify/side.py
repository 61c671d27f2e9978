"""`Side`: one of two steps that are compared, to be called or as equations."""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import _jax, _states
from .._errors import FunctionError
from .._lift.wrapper import check_callable, name_of, short_name
from .._objects.paths import Paths
from .._objects.walk import created_undone
from .._targets import current
from .._tree import has_deleted, is_array, is_opaque, partition
from ..residuals._trace import TracedCall, TracedWrite, jitted
from ..transforms.jit.api import jit
from .rounding import as_double, largest_unit, nudged, other_roundings


class Side:
    """One of the two functions: as its user calls it, and as equations.

    Attributes:
        states: what is compared, by names with the paths from the reference; see `pair`.
        dropped: the names of created states that a transform of their library has left without a value.
    """

    def __init__(self, fun: Callable, args: tuple, kwargs: dict[str, Any], reference: Callable):
        check_callable("assert_same_step", fun)
        self.fun, self.args, self.kwargs, self._reference = fun, args, kwargs, reference
        self.name = short_name(name_of(fun))
        self._check()
        self._may_donate = jitted(fun) is not None or hasattr(fun, "lower")
        self._call = fun if self._may_donate else jit(fun)
        self._programs: dict[Any, Any] = {}
        self._created: dict[str, str] = {}  # the names of states that its calls create, by their paths from it
        self._array_names: dict[str, list[str]] = {}  # of the results of a run: of the output, and of each state
        self.states: dict[str, Any] = {}
        self.dropped: set[str] = set()
        self.trace()
        self.paths = Paths(fun, args, kwargs)
        self._held = self.paths.items()  # before any call, which may create states

    def _check(self) -> None:
        with contextlib.suppress(ValueError):  # a builtin
            try:
                inspect.signature(self.fun).bind(*self.args, **self.kwargs)
            except TypeError as e:
                raise FunctionError(
                    f"{self.name}{inspect.signature(self.fun)} does not take the arguments: {e}.\n"
                    "Fix: give the arguments of one call, which both functions take."
                ) from None
        for x in jax.tree.leaves((self.args, self.kwargs), is_leaf=is_opaque):
            if isinstance(x, (jax.ShapeDtypeStruct, _jax.Tracer)):
                raise FunctionError(
                    f"{self.name} cannot run here: an argument is {type(x).__name__}, which has no numbers.\n"
                    "Fix: give arrays, and call it outside of functions that are transformed."
                )
        if current.current() is not None:
            raise FunctionError(
                f"{self.name} cannot run here: it is compiled for {current.current()}, which is another device.\n"
                "Fix: compare outside of statetx.target."
            )

    # -- calls ---------------------------------------------------------------------------------------------------------

    def values(self) -> dict[str, Any]:
        return {name: value_of(state) for name, state in self.states.items()}

    def store(self, values: Mapping[str, Any]) -> None:
        for name, state in self.states.items():
            _states.kind_of_state(state).set_all([state], [values[name]])

    def run(self, values: Mapping[str, Any], without: Set[str] = frozenset()) -> dict[str, Any]:
        """Run from these values; the outputs and new values of states, leaf by leaf, without some states.
        The states that the call creates, as one with ``init_all_states`` does, are results, and gone from their objects
        afterwards.
        """
        args, kwargs, given = self.args, self.kwargs, values
        if self._may_donate:
            arrays, part = partition((dict(values), args, kwargs))
            given, args, kwargs = part.combine(list(map(jnp.copy, arrays)))
        self.store(given)
        # Always: no frame sees a state that is created inside of a transform of its library.
        with created_undone(self.fun, self.args, self.kwargs, is_run=True):
            try:
                out = jax.block_until_ready(self._call(*args, **kwargs))
            except Exception as e:
                e.add_note(f"Raised while statetx compared {self.name} with another step; all states are as before.")
                raise
            created = self._created_states()
        left = self._new(self.fun) if created else {}
        if new_states := [path for path, state in left.items() if not has_no_value(state)]:
            raise FunctionError(
                f"{self.name} creates a state that a list, a dict or a global variable holds after the call, "
                f"{new_states[0]!r}, so there is nothing to begin both from.\nFix: create the state outside, "
                "and reset its value in the step; or assign it to an attribute of an object."
            )
        self.dropped |= {name for name, state in created.items() if has_no_value(state)}
        # A program that a transform of their library has kept from an earlier call creates none.
        self.dropped |= {name for name, write in self.writes(self.traced) if write.created} - created.keys()
        trees = {"output": out}
        trees |= {n: value_of(x) for n, x in {**created, **self.states}.items() if n not in self.dropped | without}
        # A state in a donated argument has no value any more, and was not written.
        leaves = {n: _leaves(n, values[n] if n in values and has_deleted(x) else x) for n, x in trees.items()}
        self._array_names = {name: [n for n, x in items if is_array(x)] for name, items in leaves.items()}
        return dict(itertools.chain(*leaves.values()))

    def _created_states(self) -> dict[str, Any]:
        """The states that a call has created, by names with the path from the reference where that has them, too."""
        new = self._new(self.fun)
        of_reference = {id(state): path for path, state in self._new(self._reference).items()} if new else {}
        self._created = {path: _state(of_reference.get(id(state), path)) for path, state in new.items()}
        return {self._created[path]: state for path, state in new.items()}

    def _new(self, fun: Callable) -> dict[str, Any]:
        """The states that a function reaches now and `fun` of this side did not before its calls, by path."""
        earlier_ids = {*map(id, self._held.values())}
        return {p: x for p, x in Paths(fun, self.args, self.kwargs).items().items() if id(x) not in earlier_ids}

    # -- equations -----------------------------------------------------------------------------------------------------

    def trace(self) -> None:
        """Stage the function for the present values of its states."""
        # JAX takes some states in arguments for trees of arrays: its own jit loses what is written to them.
        leaves = filter(is_opaque, jax.tree.leaves((self.args, self.kwargs), is_leaf=is_opaque))
        loses = _jax.is_jitted(self._call) and any(not jax.tree_util.all_leaves([x]) for x in leaves)
        self.traced = TracedCall("assert_same_step", self._call, self.args, self.kwargs, unjits=not loses)

    def touched(self) -> dict[int, tuple[str, Any]]:
        """The states from before the call that it touches, by id, with their paths."""
        states = [i.state for i in self.traced.inputs if i.state is not None]
        states += [w.state for w in self.traced.writes if not w.created]
        return {id(state): (self.paths(state), state) for state in states}

    def equations(self, is_double: bool) -> tuple[TracedCall, list[Any]]:
        """The equations with their inputs; traced again for float64, under ``jax.enable_x64``."""
        arrays = [_jax.as_array(i.array) for i in self.traced.inputs]
        return self.traced.retrace([*map(as_double, arrays)]) if is_double else (self.traced, arrays)

    def evaluate(self, is_double: bool = False) -> Iterator[dict[str, Any]]:
        """Compile the equations so that XLA may round otherwise, and run them; the results by the names of `run`.

        Then run them from inputs that differ by a unit in the last place, again and again: of the narrowest floats that
        are computed in a program of float64, which round smaller differences away.
        """
        traced, arrays = self.equations(is_double)
        inputs = traced.body.operands, *arrays
        key = traced.body.key, len(arrays), *map(jax.typeof, jax.tree.leaves(inputs))
        if key not in self._programs:
            program = jax.jit(lambda *inputs: traced.body(*inputs)).lower(*inputs)
            self._programs[key] = program.compile(compiler_options=other_roundings())
        program, draw = self._programs[key], np.random.default_rng(0)
        yield self.named(traced, program(*inputs))
        unit = largest_unit(traced.body.jaxpr) if is_double else 0.0
        while True:
            yield self.named(traced, program(*jax.tree.map(lambda x: nudged(x, draw, unit), inputs)))

    def writes(self, traced: TracedCall) -> list[tuple[str, TracedWrite]]:
        """What the equations write, by the names of the states."""
        names = {id(state): name for name, state in self.states.items()}
        return [(names.get(id(w.state)) or self._created.get(w.path, _state(w.path)), w) for w in traced.writes]

    def named(self, traced: TracedCall, outs: Sequence[Any]) -> dict[str, Any]:
        """The outputs of equations, or anything in their order, by the names of `run`."""
        position = len(traced.outputs)
        named = dict(zip(self._array_names["output"], outs[:position], strict=False))
        for name, write in self.writes(traced):
            names = self._array_names.get(name, ())
            if len(names) == write.num:
                named |= zip(names, outs[position : position + write.num], strict=True)
            position += write.num
        return named


# -- states ---------------------------------------------------------------------------------------------------------


def pair(reference: Side, step: Side) -> None:
    """Give both the states that either touches, by equal names: one object of both, or two."""
    of_reference, of_step = reference.touched(), step.touched()
    for key, (path, state) in of_reference.items():
        reference.states[_state(path)] = state
        step.states[_state(path)] = state if key in of_step else _named(path, step.paths.items(), state)
    seen = {*map(id, (*reference.states.values(), *step.states.values()))}
    for key, (path, state) in of_step.items():
        if key not in seen:
            name = _state(f"{path} of {step.name}" if _state(path) in reference.states else path)
            reference.states[name], step.states[name] = _named(path, reference.paths.items(), state), state


def _named(path: str, states: Mapping[str, Any], like: Any) -> Any:
    """The state of this path; or the only one whose path ends so, or is the end of it: one function may close over
    another, which closes over the model. `like` itself if there is none.
    """
    if path in states:
        return states[path]
    ends = lambda longer, end: f".{longer}".endswith(f".{end}")
    candidates = [x for p, x in states.items() if type(x) is type(like) and (ends(p, path) or ends(path, p))]
    return candidates[0] if len(candidates) == 1 else like


def value_of(state: Any) -> Any:
    return _states.kind_of_state(state).get(state)


def has_no_value(state: Any) -> bool:
    return _states.kind_of_state(state).is_invalidated(state)


def _leaves(name: str, tree: Any) -> list[tuple[str, Any]]:
    """The leaves with their names, those of flax's modules too; without objects that JAX does not take apart."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    is_value = lambda x: is_array(x) or isinstance(x, (bool, int, float, complex, str))
    return [(name + jax.tree_util.keystr(path), x) for path, x in leaves if is_value(x)]


def _state(path: str) -> str:
    return f"state {path!r}"
