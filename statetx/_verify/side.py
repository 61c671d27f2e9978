"""`Side`: one of two steps that are compared, to be called or as equations."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any

import jax
import numpy as np

from .. import _jax, _states
from .._errors import FunctionError
from .._lift.wrapper import check_callable, name_of, short_name
from .._objects.paths import Paths
from .._objects.walk import created_undone
from .._targets import current
from .._tree import has_deleted, is_array
from ..residuals._trace import TracedCall, jitted
from ..transforms.jit.api import jit
from .rounding import as_double, largest_unit, nudged


class Side:
    """One of the two functions: as its user calls it, and as equations."""

    def __init__(self, fun: Callable, args: tuple, kwargs: dict[str, Any], reference: Callable):
        check_callable("assert_same_step", fun)
        self.fun, self.args, self.kwargs, self._reference = fun, args, kwargs, reference
        self.name = short_name(name_of(fun))
        self._check()
        self._may_donate = jitted(fun) is not None or hasattr(fun, "lower")
        self._call = fun if self._may_donate else jit(fun)
        self._programs: dict[Any, Any] = {}
        self._created: dict[str, str] = {}  # the names of states that its calls create, by their paths from it
        self.dropped: set[str] = set()  # the paths of those that a transform of their library has left without a value
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
        for x in jax.tree.leaves((self.args, self.kwargs), is_leaf=_states.is_opaque):
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

    def trace(self) -> None:
        """Stage the function for the present values of its states."""
        unjits = not (_jax.is_jitted(self._call) and _has_trees(self.args, self.kwargs))
        self.traced = TracedCall("assert_same_step", self._call, self.args, self.kwargs, unjits=unjits)

    def states(self) -> dict[int, tuple[str, Any]]:
        """The states from before the call that it touches, by id, with their paths."""
        touched = [i.state for i in self.traced.inputs if i.state is not None]
        touched += [w.state for w in self.traced.writes if not w.created]
        return {id(state): (self.paths(state), state) for state in touched}

    def run(
        self, values: Mapping[str, Any], states: Mapping[str, Any], without: Set[str] = frozenset()
    ) -> dict[str, Any]:
        """Run from these values; the outputs and new values of states, leaf by leaf, without the states at some paths.
        The states that the call creates, as one with ``init_all_states`` does, are results, and gone from their objects
        afterwards.
        """
        args, kwargs, given = self.args, self.kwargs, values
        if self._may_donate:
            given, args, kwargs = _copied((dict(values), args, kwargs))
        store(states, given)
        # Always: no frame sees a state that is created inside of a transform of its library.
        with created_undone(self.fun, self.args, self.kwargs, is_run=True):
            try:
                out = jax.block_until_ready(self._call(*args, **kwargs))
            except Exception as e:
                e.add_note(f"Raised while statetx compared {self.name} with another step; all states are as before.")
                raise
            created = self._created_states()
        left = self._new(self.fun) if created else {}
        if new_states := {path: x for path, x in left.items() if not has_no_value(x)}:
            raise FunctionError(
                f"{self.name} creates a state that a list, a dict or a global variable holds after the call, "
                f"{next(iter(new_states))!r}, so there is nothing to begin both from.\nFix: create the state outside, "
                "and reset its value in the step; or assign it to an attribute of an object."
            )
        results = {f"output{path}": x for path, x in _leaves(out)}
        self._output_names = [name for name, x in results.items() if is_array(x)]
        self.dropped |= {path for path, state in created.items() if has_no_value(state)}
        skipped = self.dropped | without
        now = {path: value_of(state) for path, state in {**created, **states}.items() if path not in skipped}
        # A state in a donated argument has no value any more, and was not written.
        now |= {path: values[path] for path, x in now.items() if has_deleted(x)}
        leaves = {name_of_state(path): _leaves(value) for path, value in now.items()}
        self._state_keys = {path: [key for key, x in items if is_array(x)] for path, items in leaves.items()}
        return results | {path + key: x for path, items in leaves.items() for key, x in items}

    def _created_states(self) -> dict[str, Any]:
        """The states that a call has created, by the path from the reference where that has them, too."""
        new = self._new(self.fun)
        of_reference = {id(state): path for path, state in self._new(self._reference).items()} if new else {}
        self._created = {path: of_reference.get(id(state), path) for path, state in new.items()}
        return {self._created[path]: state for path, state in new.items()}

    def _new(self, fun: Callable) -> dict[str, Any]:
        """The states that a function reaches now and `fun` of this side did not before its calls, by path."""
        earlier_ids = {*map(id, self._held.values())}
        return {p: x for p, x in Paths(fun, self.args, self.kwargs).items().items() if id(x) not in earlier_ids}

    def evaluate(
        self, states: Mapping[str, Any], *, is_double: bool, options: Mapping[str, Any], num_nudged: int = 0
    ) -> Iterator[dict[str, Any]]:
        """Compile the equations with these options, and run them; the results by the names that `run` gives.

        Then run them from inputs that differ by a unit in the last place, some times: of the narrowest floats that are
        computed, which round smaller differences away. The results of a run are made when they are asked for.
        """
        traced, arrays = self.equations(is_double)
        inputs = [*traced.body.operands, *arrays]
        key = traced.body.key, tuple(options), *map(jax.typeof, inputs)
        if key not in self._programs:
            program = jax.jit(lambda *xs: traced.body(xs[: len(xs) - len(arrays)], *xs[len(xs) - len(arrays) :]))
            self._programs[key] = program.lower(*inputs).compile(compiler_options=dict(options))
        program, draw = self._programs[key], np.random.default_rng(0)
        unit = largest_unit(traced.body.jaxpr) if is_double and num_nudged else 0.0
        for n in range(1 + num_nudged):
            yield self.named(traced, program(*([nudged(x, draw, unit) for x in inputs] if n else inputs)), states)

    def equations(self, is_double: bool) -> tuple[TracedCall, list[Any]]:
        """The equations with their inputs; traced again for float64, under ``jax.enable_x64``."""
        arrays = [_jax.as_array(i.array) for i in self.traced.inputs]
        return self.traced.retrace([as_double(x) for x in arrays]) if is_double else (self.traced, arrays)

    def named(self, traced: TracedCall, outs: Sequence[Any], states: Mapping[str, Any]) -> dict[str, Any]:
        """The outputs of equations, or anything in their order, by the names that `run` gives."""
        named = dict(zip(self._output_names, outs, strict=False))
        path_of, position = {id(state): path for path, state in states.items()}, len(traced.outputs)
        for write in traced.writes:
            path = name_of_state(path_of.get(id(write.state)) or self._created.get(write.path, write.path))
            keys = self._state_keys.get(path, ())
            if len(keys) == write.num:
                named |= {path + key: x for key, x in zip(keys, outs[position:], strict=False)}
            position += write.num
        return named


# -- states ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def restored(pairs: Any) -> Iterator[None]:
    """Give these states their values again, also after an error."""
    states = {id(state): state for pair in pairs for state in pair}
    values = {key: value_of(state) for key, state in states.items()}
    try:
        yield
    finally:
        store(states, values)


def value_of(state: Any) -> Any:
    return _states.kind_of_state(state).get(state)


def has_no_value(state: Any) -> bool:
    return _states.kind_of_state(state).is_invalidated(state)


def store(states: Mapping[Any, Any], values: Mapping[Any, Any]) -> None:
    for key, state in states.items():
        _states.kind_of_state(state).set_all([state], [values[key]])


def _has_trees(*args: Any) -> bool:
    """Whether JAX takes states in the arguments for trees of arrays: its own jit loses what is written to them."""
    leaves = jax.tree.leaves(args, is_leaf=_states.is_opaque)
    return any(_states.is_opaque(x) and not jax.tree_util.all_leaves([x]) for x in leaves)


def _copied(tree: Any) -> Any:
    """Copies of the arrays, for a program that may donate them."""
    copy = lambda x: x.copy() if isinstance(x, (jax.Array, np.ndarray)) and not isinstance(x, jax.Ref) else x
    return jax.tree.map(copy, tree, is_leaf=_states.is_opaque)


def _leaves(tree: Any) -> list[tuple[str, Any]]:
    """The leaves with their paths, those of flax's modules too; without objects that JAX does not take apart."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    is_value = lambda x: is_array(x) or isinstance(x, (bool, int, float, complex, str))
    return [(jax.tree_util.keystr(path), x) for path, x in leaves if is_value(x)]


def name_of_state(path: str) -> str:
    return f"state {path!r}"
