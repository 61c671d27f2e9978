"""`shard_map`: run one program on many devices, with states that are replicated or sharded over a mesh."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from .. import _frames, _jax, _states
from .._errors import StateAccessError, StateFilterError, StateValueError
from .._frames import Effect
from .._lift.options import broadcast_prefix, keeps_type, transform
from .._lift.outcome import OutputGroups
from .._lift.run import call, frame_for
from .._lift.wrapper import Wrapper, name_of, place_of
from .._objects.paths import Paths, as_predicate, check_paths, leaf_names
from .._objects.walk import inspecting
from .._text import brief, type_str
from .._tree import Partition, as_array, is_array, is_array_or_number, partition
from .._typing import Filter, PyTree

_REPLICATED = PartitionSpec()
# JAX's marker for specs that are the shardings of the arguments' types.
_INFER = inspect.signature(jax.shard_map).parameters["in_specs"].default


@keeps_type
@transform(
    {
        "state_in_specs": "a state goes in and comes out with the same spec, states={state: PartitionSpec(...)}",
        "state_out_specs": "give it by states=",
    },
    call=" As in jax.shard_map, the mesh is given by keyword.",
    fix="statetx.shard_map(f, mesh=mesh, in_specs=..., out_specs=..., states=...).",
)
def shard_map(
    f: Callable[..., Any] | None = None,
    *,
    mesh: Any = None,
    in_specs: Any = _INFER,
    out_specs: Any,
    axis_names: Any = frozenset(),
    check_vma: bool = True,
    states: Mapping[Filter, PartitionSpec] | None = None,
) -> Callable[..., Any]:
    """Run a function that may read and write states on each device of a mesh, with its shard of the arguments.

    As ``jax.shard_map``. The function's Python runs once.

    Args:
        f: the function of one device's shards. Arguments other than arrays pass untouched.
        mesh: the mesh; by default the mesh of the context.
        in_specs: for each argument, or for parts of it, a ``PartitionSpec``; by default, where the mesh has explicit
            axes, the shardings of the arguments' types.
        out_specs: the same for the output.
        axis_names: as in ``jax.shard_map``.
        check_vma: as in ``jax.shard_map``.
        states: from filters to the ``PartitionSpec`` of the states that they select, among those that the call can
            reach. Each device sees its shard and writes its shard. All other states are replicated: every device sees
            the whole value, and a write must be the same on all devices (the result of a ``psum``, for example).

    Returns:
        A function of the unsharded arguments; its output has the global shapes that `out_specs` give.

    State:
        Reads the states that `f` reads, and also every state that `f` and its arguments hold. Writes the states that
        `f` writes.

    Raises:
        StateAccessError: a write to a replicated state may differ between the devices.
        StateValueError: `states` holds something other than a ``PartitionSpec``.

    Source:
        ``jax.shard_map``.

    Example:
        >>> import jax, jax.numpy as jnp, statetx
        >>> from jax.sharding import PartitionSpec as P
        >>> mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
        >>> h = statetx.State(jnp.zeros(2))
        >>> def f(x):
        ...     h.value = h.value + x
        ...     return jax.lax.psum(x.sum(), "d")
        >>> g = statetx.shard_map(f, mesh=mesh, in_specs=P("d"), out_specs=P(), states={"h": P("d")})
        >>> float(g(jnp.ones(2))), h.value.tolist()
        (2.0, [1.0, 1.0])
    """
    ...


class ShardMap(Wrapper, made_by=shard_map):
    """Made by `shard_map`."""

    def __init__(self, fun: Callable, **options: Any):
        super().__init__(fun, **options)
        self._in_specs, self._out_specs, states = (self._options[name] for name in ("in_specs", "out_specs", "states"))
        jax_options = {name: self._options[name] for name in ("mesh", "axis_names", "check_vma")}
        self._jax_options = {k: v for k, v in jax_options.items() if v is not None}
        self._rules = []
        if states is not None and not isinstance(states, Mapping):
            raise StateValueError(
                f"shard_map: states= maps filters to PartitionSpecs, as in states={{statetx.Param: "
                f"PartitionSpec('d')}}; got {brief(states)}."
            )
        self.filters = list(states or ())
        for filter, spec in (states or {}).items():
            if not isinstance(spec, PartitionSpec):
                raise StateValueError(f"shard_map: states={{{brief(filter)}: {spec!r}}} must give a PartitionSpec.")
            self._rules.append((as_predicate(filter), spec))

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        fun = self.__wrapped__
        call_name = f"shard_map({name_of(fun)})"
        if kwargs:
            raise TypeError(
                f"{call_name}: got {', '.join(kwargs)} by keyword; in_specs has no place for it.\n"
                f"Fix: pass it by position."
            )
        places = _SpecChecks(call_name, self._jax_options)
        leaves, args_part = partition(args, is_array)
        leaves = [as_array(x) for x in leaves]
        if self._in_specs is _INFER:
            specs = [places.infer(x) for x in leaves]
        else:
            specs = _broadcast_specs(call_name, "in_specs", self._in_specs, args)
            specs = [spec for spec, is_dynamic in zip(specs, args_part.mask, strict=True) if is_dynamic]
        devices = _Devices(self, args)
        names = leaf_names(fun, args, {}, args_part.mask)
        for name, spec, x in zip(names, specs, leaves, strict=True):
            places.check(lambda name=name: f"argument {name}", "in_specs", spec, x)
        for state, spec, values in zip(devices.states, devices.state_specs, devices.state_values, strict=True):
            for x in values:
                describe = lambda state=state: _states.describe(state, path=devices.paths(state))
                places.check(describe, "states", spec, x)
        out_specs = [_REPLICATED if s is None else s for s in jax.tree.leaves(self._out_specs, is_leaf=_is_spec)]
        for spec in out_specs:
            places.check_spec(lambda: "the output", "out_specs", spec)
        outputs: list[tuple[str, Any, Any]] = []  # of each array: its name, spec and type

        def body(tracers: list, state_values: list) -> dict[str, list]:
            frame = frame_for(
                "shard_map", fun, on_read=devices.on_read(state_values), frees_cycles=True, outer_trace=enclosing
            )
            out = frame.run(call, fun, args_part.combine(tracers), {})
            _frames.refuse_created(frame.effects, call_name)
            leaf_specs = _broadcast_specs(call_name, "out_specs", self._out_specs, out)
            outputs.extend(places.check_output(out, leaf_specs))
            groups.add_output(out, leaf_specs, is_array_or_number)
            devices.add_effects(frame.effects, groups)
            return groups.pack()

        enclosing = _jax.current_trace()
        groups = OutputGroups([_REPLICATED, *out_specs, *(spec for _, spec in self._rules)])
        in_specs = (specs, devices.state_specs)
        _jax.name_function(body, "shard_map", place_of(fun), [*names, *devices.names()])
        run = jax.shard_map(body, in_specs=in_specs, out_specs=groups.keys, **self._jax_options)
        try:
            outs = run(leaves, devices.state_values)
        except ValueError as e:
            if "out_specs" in str(e) and _states.is_of_jax(e) and self._jax_options.get("check_vma", True):
                places.refuse_varying(outputs)
                if devices.replicated_writes:
                    raise StateAccessError(devices.explain()) from e
            raise
        return groups.finish(outs)

    def spec_of(self, path: str, state: Any) -> PartitionSpec | None:
        return next((spec for keep, spec in self._rules if keep(path, state)), None)


class _Devices:
    """One call: gives the states to JAX as inputs, and collects the writes.

    Attributes:
        paths: paths of states, from the function and its arguments.
        states, state_values, state_specs: the states that are inputs, and for each its arrays and its spec.
        replicated_writes: writes of states without a spec.
    """

    def __init__(self, owner: ShardMap, args: tuple):
        self._owner = owner
        self.paths = Paths(owner.__wrapped__, args)
        self._partitions: dict[int, Partition] = {}
        self.states: list[Any] = []
        self.state_values: list[list] = []
        self.state_specs: list[PartitionSpec] = []
        # Replicated states are inputs, too, not closed over. JAX cannot close over an array that is sharded on explicit
        # axes, has no derivative for a closed-over array on other axes that is read in a loop, and copies any to each
        # device again.
        for filter in owner.filters:
            call = f"shard_map({name_of(owner.__wrapped__)}): states={{{brief(filter)}: ...}}"
            check_paths(call, filter, self.paths.items, "The function and its arguments reach")
        for path, state in self.paths.items().items():
            is_held = path in self.paths.held
            spec = owner.spec_of(path, state)
            is_required = spec is not None and is_held
            if spec is None and is_held and not _states.is_unwatched(state):
                spec = _REPLICATED
            if spec is not None:
                self._add_input(state, spec, is_required)
        self.replicated_writes: list[Effect] = []

    def _add_input(self, state: Any, spec: PartitionSpec, is_required: bool) -> None:
        kind = _states.kind_of_state(state)
        try:
            with inspecting():  # whether the function reads it is not known yet
                value = kind.read(state)
        except Exception:  # the state's library refuses: it has no value, or may not be read here
            if is_required:
                raise
            return  # the call may not touch it
        values, self._partitions[id(state)] = partition(value, is_array)
        self.states.append(state)
        self.state_values.append(values)
        self.state_specs.append(spec)

    def names(self) -> list[str]:
        """The paths of the states, one for each of their arrays."""
        pairs = zip(self.states, self.state_values, strict=True)
        return [self.paths(state) for state, values in pairs for _ in values]

    def on_read(self, values: list[list]) -> Callable[[Any, Any, Any], Any]:
        value_by_id = dict(zip(self._partitions, values, strict=True))

        def on_read(state: Any, kind: Any, value: Any) -> Any:
            if id(state) in value_by_id:
                return self._partitions[id(state)].combine(value_by_id[id(state)])
            path = self.paths(state)
            if self._owner.spec_of(path, state) is not None:
                raise StateFilterError(
                    f"shard_map: states= selects {_states.describe(state, kind, path)}, which "
                    f"{name_of(self._owner.__wrapped__)} reads. Every device would get the whole value: no walk over "
                    "the function and its arguments finds it.\n"
                    "Fix: hold the state in an attribute of an object that the function closes over, or in an argument."
                )
            return value

        return on_read

    def add_effects(self, effects: Sequence[Effect], groups: OutputGroups) -> None:
        """Group the leaves of written values by the specs of their states."""
        for effect in effects:
            spec = self._owner.spec_of(self.paths(effect.state), effect.state)
            if spec is None:
                spec = _REPLICATED
                self.replicated_writes.append(effect)
            leaves, part = partition(effect.value, is_array)
            groups.add_effect(effect, leaves, spec, part.combine)

    def explain(self) -> str:
        written = ", ".join(
            f"{_states.describe(e.state, e.kind, self.paths(e.state))} at {e.site}" for e in self.replicated_writes
        )
        return (
            f"shard_map({name_of(self._owner.__wrapped__)}) wrote replicated states, and JAX cannot tell that all "
            f"devices write the same value: {written}.\nFix: declare the axes over which the state is sharded, "
            f"shard_map(..., states={{path: PartitionSpec(...)}}), or reduce the value over the devices (jax.lax.psum)."
        )


class _SpecChecks:
    """Checks of specs and of devices, whose errors name the user's arguments: JAX sees others.

    Args:
        name: the call, for messages.
        options: of ``jax.shard_map``.
    """

    def __init__(self, name: str, options: Mapping[str, Any]):
        self._name = name
        mesh = options.get("mesh")
        self._mesh = jax.sharding.get_abstract_mesh() if mesh is None else mesh
        is_mesh = isinstance(self._mesh, (jax.sharding.Mesh, jax.sharding.AbstractMesh))
        self._sizes = dict(self._mesh.shape) if is_mesh else {}  # without a mesh: JAX's error says so
        self._axes = set(options.get("axis_names") or self._sizes)

    def infer(self, x: Any) -> PartitionSpec:
        """The spec of an argument: the sharding of its type, over the axes over which the function is mapped."""
        types = zip(self._sizes, getattr(self._mesh, "axis_types", ()), strict=False)
        implicit_axes = [axis for axis, kind in types if axis in self._axes and kind != jax.sharding.AxisType.Explicit]
        if implicit_axes or not self._sizes:
            raise TypeError(
                f"{self._name}: in_specs is missing, and the types of the arguments have no sharding over "
                f"{', '.join(map(repr, implicit_axes)) or 'a mesh'}: only those over explicit axes are part of types.\n"
                "Fix: give in_specs, a PartitionSpec for each argument."
            )
        spec = jax.typeof(x).sharding.spec
        mapped_axes = [tuple(axis for axis in _axes_of((axes,)) if axis in self._axes) for axes in spec.partitions]
        entries = [axes if len(axes) > 1 else axes[0] if axes else None for axes in mapped_axes]
        return PartitionSpec(*entries, unreduced=spec.unreduced, reduced=spec.reduced)

    def check_output(self, out: PyTree, specs: Sequence[Any]) -> list[tuple[str, Any, Any]]:
        """Check the specs of the output; returns the name, the spec and the type of each array."""
        outputs = []
        leaves = jax.tree_util.tree_flatten_with_path(out, is_leaf=_states.is_opaque)[0]
        for (keys, x), spec in zip(leaves, specs, strict=True):
            if is_array_or_number(x):
                name = f"the output{jax.tree_util.keystr(keys)}"
                self._check_rank(lambda name=name: name, "out_specs", spec, as_array(x))
                outputs.append((name, spec, _jax.abstract(as_array(x))))
        return outputs

    def refuse_varying(self, outputs: list[tuple[str, Any, Any]]) -> None:
        """Raise for the first output that varies over an axis that its spec does not have."""
        for name, spec, aval in outputs:
            axes = [axis for axis in _jax.varying_axes(aval) if axis not in _axes_of(spec)]
            if axes:
                raise ValueError(
                    f"{self._name}: {name} ({type_str(aval)}) has the spec {spec} in out_specs, so that it must be the "
                    f"same along the mesh axes {', '.join(map(repr, axes))}, over which it may vary.\n"
                    "Fix: give these axes in out_specs, reduce it over them (jax.lax.psum), or promise that it does "
                    "not vary, by check_vma=False."
                ) from None

    def check(self, name: Callable[[], str], option: str, spec: Any, x: Any) -> None:
        """Check the spec of an input, and the devices that hold it."""
        self.check_spec(name, option, spec)
        if not self._sizes or isinstance(spec, _jax.HiPspec):
            return
        self._check_rank(name, option, spec, x)
        for size, axes in zip(jnp.shape(x), spec.partitions, strict=False):
            num = math.prod(self._sizes[axis] for axis in _axes_of((axes,)))
            if size % num:
                raise ValueError(
                    f"{self._name}: {option} has {spec} for {name()}, of type {type_str(x)}: {size} elements cannot be "
                    f"divided among {num} devices.\nFix: pad the array, or give a spec without the axis {axes!r}."
                )

        if not isinstance(x, jax.Array) or isinstance(x, _jax.Tracer) or not isinstance(self._mesh, jax.sharding.Mesh):
            return
        if x.committed and x.sharding.device_set != set(self._mesh.devices.flat):
            held, needed = sorted(d.id for d in x.sharding.device_set), [d.id for d in self._mesh.devices.flat]
            raise ValueError(
                f"{self._name}: {name()} is committed to the devices {held}, and the mesh has the devices {needed}.\n"
                f"Fix: place it on the mesh, by jax.device_put(x, jax.NamedSharding(mesh, {spec}))."
            )

    def check_spec(self, name: Callable[[], str], option: str, spec: Any) -> None:
        if isinstance(spec, _jax.HiPspec):
            return  # of a type of hijax, which checks it
        if not isinstance(spec, PartitionSpec):
            raise TypeError(
                f"{self._name}: {option} has {brief(spec)} for {name()}, which is not a PartitionSpec.\n"
                f"Fix: jax.P('axis') for an array that is sharded, jax.P() for one that every device has whole."
            )
        unknown = [axis for axis in _axes_of(spec) if axis not in self._axes]
        if unknown and self._sizes:
            raise ValueError(
                f"{self._name}: {option} has {spec} for {name()}, and {unknown[0]!r} is not an axis of the mesh over "
                f"which the function is mapped: {', '.join(map(repr, sorted(self._axes, key=str)))}."
            )

    def _check_rank(self, name: Callable[[], str], option: str, spec: Any, x: Any) -> None:
        if not isinstance(spec, _jax.HiPspec) and len(spec) > jnp.ndim(x):
            raise ValueError(
                f"{self._name}: {option} has {spec} for {name()}, of type {type_str(x)}: more entries than the array "
                f"has dimensions.\n"
                f"Fix: give a spec with fewer entries, or a jax.P() for a scalar, which is the same on all devices."
            )


def _axes_of(spec: Iterable[Any]) -> list[Any]:
    """The mesh axes in a spec, in order; last those over which it is a sum in parts, or was reduced."""
    if isinstance(spec, PartitionSpec):
        return [*_axes_of(spec.partitions), *sorted(spec.unreduced | spec.reduced, key=str)]
    return [a for axes in spec for a in (axes if isinstance(axes, tuple) else (axes,)) if a is not None]


def _is_spec(x: Any) -> bool:
    return x is None or isinstance(x, PartitionSpec)


def _broadcast_specs(name: str, option: str, specs: Any, tree: PyTree) -> list[PartitionSpec]:
    what = "arguments" if option == "in_specs" else "output"
    entries = broadcast_prefix(name, option, specs, tree, what=what, entry="a spec", is_leaf=_is_spec)
    return [_REPLICATED if spec is None else spec for spec in entries]
