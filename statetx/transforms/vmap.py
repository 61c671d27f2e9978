"""`vmap`: map a function over examples, with states that are shared, mapped or split.

The function runs once, inside `jax.vmap`. A state has the same value for every example, unless ``states=`` gives it an
axis; a random state gives each example a key of its own. A write to a state without an axis must be the same for every
example, too: the state can hold one value only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.export
import jax.numpy as jnp

from .. import _jax, _states
from .._errors import StateAccessError, StateValueError
from .._frames import Effect, Frame, open_inside
from .._lift.batch import common_length
from .._lift.options import broadcast_prefix, check_whole, keeps_type, transform
from .._lift.outcome import OutputGroups
from .._lift.rules import Broadcast, Rules, Split
from .._lift.run import call, frame_for
from .._lift.staged import is_loop_leaf
from .._lift.wrapper import Wrapper, name_of
from .._objects.paths import argument_names, leaf_names
from .._objects.walk import held_states, num_inspections
from .._states import Kind
from .._text import brief, type_str
from .._tree import Partition, as_array, flatten, is_array, is_array_or_number, partition
from .._typing import Filter, PyTree

_HINTS = dict.fromkeys(
    ["in_states", "out_states", "state_in_axes", "state_out_axes"],
    "a state goes in and comes out along the same axis, states={filter: axis}",
)


@keeps_type
@transform(_HINTS)
def vmap(
    fun: Callable[..., Any] | None = None,
    in_axes: Any = 0,
    out_axes: Any = 0,
    axis_name: Any = None,
    axis_size: int | None = None,
    spmd_axis_name: Any = None,
    *,
    states: Mapping[Filter, Any] | None = None,
) -> Callable[..., Any]:
    """Map a function that may read and write states over an axis of its arguments.

    As ``jax.vmap``. The function's Python runs once.

    Args:
        fun: the function of one example. Arguments other than arrays (a model, a flag) pass untouched.
        in_axes: for each argument, or for parts of it, the axis to map over, or None; as in ``jax.vmap``. States that
            an argument holds are mapped by `states`: an axis for such an argument raises if they have no rule there.
        out_axes: the same for the output.
        axis_name: a name for collectives.
        axis_size: number of examples; needed if no argument is mapped and no state that `fun` holds has an axis.
        spmd_axis_name: as in ``jax.vmap``.
        states: from filters to rules for the states that they select. A rule is an axis (each example has its own
            slice, and its writes are stacked back along that axis), `Broadcast` (all examples share the value) or
            `Split` (each example has a key of its own). By default random states are split and all others broadcast.

    Returns:
        A function of the batched arguments; each array of its output has the batch axis given by `out_axes`.

    State:
        A split random state advances once, whatever the examples draw from it or set it to. A broadcast state can be
        written if the value is the same for every example (a counter, a mean over `axis_name`). States that the call
        creates and that outlive it are stacked along a new leading axis, or along their axis in `states`; with
        `Broadcast` they keep the one value of all examples.

    Raises:
        StateAccessError: a write to a state that is not mapped differs between the examples.
        StateValueError: the length of a mapped state's axis differs from the number of examples; or `in_axes` gives an
            axis to an argument that holds states without a rule, and no array.

    Source:
        ``jax.vmap``.

    Example:
        >>> import jax.numpy as jnp, statetx
        >>> w, h = statetx.Param(jnp.asarray(2.0)), statetx.State(jnp.zeros(3))
        >>> def step(x):
        ...     h.value = h.value + w.value * x
        ...     return h.value
        >>> statetx.vmap(step, states={"h": 0})(jnp.arange(3.0))
        Array([0., 2., 4.], dtype=float32)
        >>> h.value
        Array([0., 2., 4.], dtype=float32)
    """
    ...


class Vmap(Wrapper, made_by=vmap):
    """Made by `vmap`."""

    def __init__(self, fun: Callable, **options: Any):
        super().__init__(fun, **options)
        self._jax_options = {name: self._options[name] for name in ("axis_name", "axis_size", "spmd_axis_name")}
        self._in_axes, self._out_axes = (_of_states(name, self._options[name]) for name in ("in_axes", "out_axes"))
        self._states = states = self._options["states"]
        size = self._options["axis_size"]
        if size is not None and not jax.export.is_symbolic_dim(size):
            check_whole("vmap", "axis_size", size)
        Rules("vmap", states, fun, (Broadcast, Split))

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        fun = self.__wrapped__
        in_axes = tuple(self._in_axes) if isinstance(self._in_axes, list) else self._in_axes
        call_args, call_kwargs = args, kwargs
        args, kwargs = _with_units((args, kwargs))
        arg_axes = _broadcast_axes("in_axes", in_axes, args)
        leaves, args_part = partition((args, kwargs), lambda x: _is_dynamic(x) or _states.is_array_state(x))
        axes = [*arg_axes, *_broadcast_axes("in_axes", 0, kwargs)]
        axes = [a for a, is_dynamic in zip(axes, args_part.mask, strict=True) if is_dynamic]

        mapped = [x for x, a in zip(leaves, axes, strict=True) if a is not None]
        mapped = [x if _states.is_array_state(x) else as_array(_whole(x)) for x in mapped]
        rules = Rules("vmap", self._states, fun, (Broadcast, Split), call_args, call_kwargs)
        _refuse_axes_of_others(rules, fun, in_axes, args, kwargs)
        size = self._num_examples(args, kwargs, args_part.mask, leaves, axes, rules)
        examples = _Examples(self, rules)

        def body(tracers: list) -> dict[str, list]:
            mapped_tracers = iter(tracers)
            # Leaves that are not mapped bypass `jax.vmap`: a Python number stays a number, a Ref the user's own.
            dynamic = [next(mapped_tracers) if a is not None else _whole(x) for x, a in zip(leaves, axes, strict=True)]
            examples.frame = frame = frame_for("vmap", fun, on_read=examples.on_read)
            examples.trace = _jax.current_trace()

            def at_end() -> None:
                for state, _ in frame.created():  # asked while they have their values, which a filter may look at
                    rules(state)
                examples.note_reads()

            def output() -> tuple[PyTree, dict[int, int]]:
                out = _with_units(call(fun, *args_part.combine(dynamic)))
                return out, _axes_of_states(self._out_axes, out)

            frame.at_end = at_end
            out, axes_of_states = frame.run(output)
            axes_out = _broadcast_axes("out_axes", self._out_axes, out)
            _check_output(f"vmap({name_of(fun)})", out, axes_out, examples.trace)
            groups.add_output(out, axes_out, _is_dynamic)
            examples.add_effects(frame.effects, groups, axes_of_states)
            return {name: [_whole(x) for x in group] for name, group in groups.pack().items()}

        mapped_axes = [a for a in axes if a is not None]
        out_axes = [axis for axis in jax.tree.leaves(self._out_axes) if isinstance(axis, (int, _jax.MappingSpec))]
        groups = OutputGroups([None, 0, *out_axes])
        run = jax.vmap(body, in_axes=(mapped_axes,), out_axes=groups.keys, **{**self._jax_options, "axis_size": size})
        return groups.finish(run(mapped))

    def _num_examples(
        self, args: tuple, kwargs: dict[str, Any], mask: Sequence[bool], leaves: list, axes: list, rules: Rules
    ) -> int | None:
        """The number of examples for `jax.vmap`; None if it can take the number from the arguments."""
        call, size = f"vmap({name_of(self.__wrapped__)})", self._options["axis_size"]
        length = common_length(
            call,
            leaves,
            axes,
            lambda: leaf_names(self.__wrapped__, args, kwargs, mask),
            lacking="give None for it in in_axes, so that every example gets the whole argument",
            differing="give arrays of equal length along these axes, or None in in_axes for arguments that all "
            "examples share",
            option=None if size is None else ("axis_size", size),
        )
        if length is not None:
            return size
        # No array has an axis. `jax.vmap` does not see states, so a mapped state gives the number.
        size = rules.size_of_mapped()
        if size is None:
            raise ValueError(
                f"{call}: no argument has an axis to map over, so the number of examples is not known. Python "
                f"numbers have none.\n"
                f"Fix: give an array, an axis in states=, or axis_size=."
            )
        return size


class _Examples:
    """One call of a mapped function: gives it the values of states, and collects its writes.

    Attributes:
        frame: the frame of the call, and
        trace: JAX's trace of the map, set when the map begins.
    """

    frame: Frame
    trace: Any

    def __init__(self, owner: Vmap, rules: Rules):
        self._owner = owner
        self._rules = rules
        self._advanced: dict[int, Any] = {}  # by id, the next values of the split states that were read
        self._num_inspections = num_inspections()
        self._reads: list[tuple[Any, str, list[Frame]]] = []  # of states that a read advances: line, inner frames

    def on_read(self, state: Any, kind: Kind, value: Any) -> Any:
        rule = self._rule(state, kind)
        if rule is Split:
            keys, part = self._split(state, kind, value)
            if kind.advances_when_read and num_inspections() == self._num_inspections:
                self._reads.append((state, _states.call_site(), open_inside(self.frame)))
            return part.combine([_jax.batch_tracer(self.trace, x, 0) for x in keys])
        if not isinstance(rule, int):
            return value
        arrays, part = partition(value)
        for x in arrays:
            self._rules.slice_type(state, _jax.abstract(x), _jax.batch_size(self.trace))
        with _jax.in_parent_trace(self.trace):
            return part.combine([_jax.batch_tracer(self.trace, jnp.asarray(x), rule) for x in arrays])

    def _rule(self, state: Any, kind: Kind) -> Any:
        """The rule of a state from before the call. Random states are split, whether the function reads them or not."""
        rule = self._rules(state)
        return Split if rule is None and kind.is_random(state) else rule

    def _split(self, state: Any, kind: Kind, value: Any) -> tuple[list, Partition]:
        """The examples' keys, for each array of the value. They are computed outside the map, on whole arrays: the read
        may happen in an inner trace.
        """
        arrays, part = partition(value)
        with _jax.in_parent_trace(self.trace):
            keys, kept_keys = self._rules.split(state, kind, arrays, _jax.batch_size(self.trace))
        self._advanced[id(state)] = part.combine(kept_keys)
        return keys, part

    def note_reads(self) -> None:
        """Count reads that advance a state as writes, except in inner calls that have failed."""
        for state, site, frames in self._reads:
            access = self.frame.accesses.get(id(state))
            if access is not None and all(frame.is_complete for frame in frames):
                self.frame.note_write(access, site)

    def add_effects(self, effects: Sequence[Effect], groups: OutputGroups, out_axes: Mapping[int, int]) -> None:
        """Group the leaves of written values by axis: 0 for those with one slice for each example, None for those that
        all share.

        Args:
            out_axes: by id, the axes of states in the output, which new ones without a rule have.
        """
        rules = [self._rules(e.state) if e.created else self._rule(e.state, e.kind) for e in effects]
        self._rules.check_paths()
        for effect, rule in zip(effects, rules, strict=True):
            if rule is Split and not effect.created and not effect.kind.is_invalidated(effect.state):
                # It advances once, whatever the examples have written. One that was not read is split here.
                if id(effect.state) not in self._advanced:
                    self._split(effect.state, effect.kind, effect.value_before)
                groups.add_effect(effect, [], None, functools.partial(_first, self._advanced[id(effect.state)]))
                continue
            axis = rule if isinstance(rule, int) else None
            if axis is None and effect.created and rule is not Broadcast:
                axis = out_axes.get(id(effect.state), 0)
            leaves, part = partition(effect.value, is_array if axis is None else is_array_or_number)
            if axis is None:
                self._check_equal(effect, leaves)
                groups.add_effect(effect, leaves, None, part.combine)
            else:
                self._check_axis(effect, leaves, axis)
                groups.add_effect(effect, leaves, 0, functools.partial(_with_axis, part, axis))

    def _check_axis(self, effect: Effect, leaves: Sequence[Any], axis: int) -> None:
        for x in leaves:
            if not -jnp.ndim(x) - 1 <= axis <= jnp.ndim(x):
                path = self._rules.path(effect.state)
                raise StateValueError(
                    f"vmap({name_of(self._owner.__wrapped__)}): states={{{path!r}: {axis}}}: a value of "
                    f"{type_str(x)} for each example, written at {effect.site}, "
                    f"cannot be stacked along axis {axis}.\nFix: give an axis from 0 to {jnp.ndim(x)}."
                )

    def _check_equal(self, effect: Effect, leaves: Sequence[Any]) -> None:
        if not any(_jax.is_batched(x, self.trace) for x in leaves):
            return
        path = self._rules.path(effect.state)
        if effect.kind.is_random(effect.state):
            raise StateAccessError(
                f"vmap({name_of(self._owner.__wrapped__)}): "
                f"{_states.describe(effect.state, effect.kind, path, effect.value)} was set to another key in each "
                f"example, at {effect.site}, and is declared Broadcast: all examples share one.\n"
                f"Fix: declare it Split, as random states are by default: each example has a key of its own, and the "
                f"state advances once."
            )
        counts = all(x.ndim == 0 and jnp.issubdtype(x.dtype, jnp.integer) for x in leaves)
        draws = " If it counts random draws, draw before the branch that only some examples take." if counts else ""
        raise StateAccessError(
            f"vmap({name_of(self._owner.__wrapped__)}) wrote a value that differs between the examples to "
            f"{_states.describe(effect.state, effect.kind, path, effect.value)}, at {effect.site}. One state cannot "
            "hold them all.\n"
            f"Fix: declare the axis along which it has one slice for each example, vmap(..., states={{{path!r}: 0}}), "
            "and give it a value with that axis if the function reads it; or reduce the value over the examples first "
            f"(jax.lax.pmean over an axis_name).{draws}"
        )


def _first(value: Any, _: list) -> Any:
    return value


def _with_axis(part: Partition, axis: int, leaves: list) -> Any:
    return part.combine([jnp.moveaxis(x, 0, axis) for x in leaves])


def _of_states(option: str, axes: Any) -> Any:
    """Axes with the one that a state or a model holds in its place: ``jax.tree.map`` over flax's trees gives such."""
    is_none = lambda x: x is None

    def axis_of(x: Any) -> Any:
        first, *others = jax.tree.leaves(x, is_leaf=is_none)
        if any(axis != first for axis in others):
            raise ValueError(
                f"vmap: {option} has a {type(x).__name__} with several axes, {first!r} and others.\n"
                f"Fix: give one axis for it, and others for its states by states=."
            )
        return first

    return jax.tree.map(axis_of, axes, is_leaf=lambda x: x is None or _states.is_opaque(x))


def _broadcast_axes(option: str, axes: Any, tree: PyTree) -> list[int | None]:
    """The axis of each leaf of `tree`, from a tree prefix of axes; None for leaves that cannot be mapped."""
    what = "arguments" if option == "in_axes" else "output"
    is_none = lambda x: x is None
    entries = broadcast_prefix("vmap", option, axes, tree, what=what, entry="an axis", is_leaf=is_none)
    for axis in entries:
        if axis is not None and not isinstance(axis, (int, _jax.MappingSpec)):
            raise TypeError(f"vmap: {option} must hold ints and None, got {type(axis).__name__}: {axis!r}.")
    can_map = _can_map if option == "in_axes" else lambda x: _can_map(x) or _is_dynamic(x)
    leaves = jax.tree.leaves(tree, is_leaf=_states.is_opaque)
    return [axis if can_map(x) else None for axis, x in zip(entries, leaves, strict=True)]


def _axes_of_states(axes: Any, out: PyTree) -> dict[int, int]:
    """By id, the axis of each state in the output, where it is not the first."""
    if not any(isinstance(axis, int) and axis for axis in jax.tree.leaves(axes)):
        return {}
    options = {"what": "output", "entry": "an axis", "is_leaf": lambda x: x is None}
    entries = broadcast_prefix("vmap", "out_axes", axes, out, **options)
    leaves = jax.tree.leaves(out, is_leaf=_states.is_opaque)
    return {id(s): axis for x, axis in zip(leaves, entries, strict=True) if axis for s in held_states(x)}


def _check_output(call: str, out: PyTree, axes: Sequence[int | None], trace: Any) -> None:
    """Raise for the first array of the output that cannot have its axis: JAX's error would name none of them."""
    leaves = jax.tree_util.tree_flatten_with_path(out, is_leaf=_states.is_opaque)[0]
    for (keys, x), axis in zip(leaves, axes, strict=True):
        name = f"the output{jax.tree_util.keystr(keys)}"
        if axis is None and _jax.is_batched(x, trace):
            raise ValueError(
                f"{call}: out_axes has None for {name}, {type_str(x)} for each example, which differs between the "
                f"examples.\nFix: give the axis along which they are stacked, such as 0, or reduce it over them."
            )
        if isinstance(x, _Unit) or _jax.is_hi_value(x):
            continue  # JAX's rule for its type checks its axis
        if axis is not None and not -jnp.ndim(x) - 1 <= axis <= jnp.ndim(x):
            raise ValueError(
                f"{call}: out_axes has {axis} for {name}, {type_str(x)} for each example: they can be stacked along an "
                f"axis from 0 to {jnp.ndim(x)}."
            )


def _can_map(leaf: Any) -> bool:
    return is_array(leaf) or isinstance(leaf, _Unit) or _states.is_array_state(leaf)


class _Unit:
    """A value that JAX maps as a whole, by rules for its type: a sparse matrix, whose shape is not one of its arrays.
    It is a leaf of a tree in place of its pytree.
    """

    def __init__(self, value: Any):
        self.value = value
        self.shape, self.dtype = value.shape, value.dtype


def _with_units(tree: PyTree) -> PyTree:
    """A tree whose values that JAX maps as a whole are leaves."""
    is_leaf = lambda x: _jax.has_own_map(x) or _states.is_opaque(x)
    leaves, treedef = flatten(tree, is_leaf)
    if not any(map(_jax.has_own_map, leaves)):
        return tree
    return treedef.unflatten([_Unit(x) if _jax.has_own_map(x) else x for x in leaves])


def _whole(x: Any) -> Any:
    return x.value if isinstance(x, _Unit) else x


def _is_dynamic(x: Any) -> bool:
    return is_loop_leaf(x) or isinstance(x, _Unit)


def _refuse_axes_of_others(rules: Rules, fun: Callable, in_axes: Any, args: tuple, kwargs: dict[str, Any]) -> None:
    """Raise if an argument, or a part of one, has an axis and holds states without a rule; or a number, and no array.

    One axis for all arguments is not meant for a model, which passes untouched, unless JAX has its states as pytrees,
    and could map all of them.
    """
    parts: list[tuple[tuple, int, list]] = []

    def add(keys: tuple, axis: int | None, part: PyTree) -> None:
        leaves = jax.tree.leaves(part, is_leaf=_states.is_opaque)
        in_trees = [x for x in leaves if _states.is_opaque(x) and not jax.tree_util.all_leaves([x])]
        is_for_all = keys[0].idx == 1 or isinstance(in_axes, int)
        if is_for_all:
            is_refused = in_trees and all(jnp.ndim(x) > 0 for x in jax.tree.leaves(in_trees))
        else:
            is_refused = in_trees or not any(map(_can_map, leaves))
        if axis is not None and is_refused:
            parts.append((keys, axis, in_trees or leaves))

    axes = (in_axes,) * len(args) if isinstance(in_axes, int) else in_axes
    every = (axes, dict.fromkeys(kwargs, 0))
    jax.tree_util.tree_map_with_path(add, every, (args, kwargs), is_leaf=lambda x: x is None)
    for keys, axis, leaves in parts:
        name = argument_names(fun, args)(keys)
        number = next((x for x in leaves if is_loop_leaf(x)), None)
        if number is not None:
            raise ValueError(
                f"vmap({name_of(fun)}): argument {name} is the {type(number).__name__} {brief(number)}, which has no "
                f"axis {axis}.\n"
                f"Fix: give None for it in in_axes, so that every example gets it, or give an array with a value for "
                f"each example."
            )
        given = f"give None for {name} in in_axes" if keys[0].idx == 0 else "pass it by position, with None in in_axes"
        shared = f"or {given}, if all examples share them"
        rules.refuse_unruled(f"argument {name}, with the axis {axis} in in_axes,", leaves, axis, "vmap(..., ", shared)
