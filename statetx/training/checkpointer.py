"""`Checkpointer`: states to disk and back, by path.

A step is a directory of orbax's with two items: ``states``, the arrays by path, and ``manifest``, what each state is made of:
its structure, the types of its leaves, the values of those that are no arrays, and a digest of each array, since
orbax's own format does not notice a bit that has changed.
"""

from __future__ import annotations

import functools
import json
import math
import operator
import os
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from .. import _frames, _jax, _states
from .._atomic import commit, locked
from .._errors import CheckpointError, StateValueError
from .._objects.contents import HIDDEN, children
from .._objects.walk import Walk
from .._text import brief, type_str
from .._tree import is_array, is_array_or_number
from .._typing import PyTree, public

_VALUES = (bool, int, float, str, type(None))  # which JSON gives back as they were


@public
class Checkpointer:
    """Save states to a directory as training goes on, and start again from the last step that is whole.

    A thin layer over ``orbax.checkpoint.CheckpointManager``: arrays are written by all processes that hold a part of
    them, in the background, and a step appears in the directory at once or not at all. What is to survive must be a
    state: weights, the optimiser's state, random keys, the position in the data.

    It needs orbax, which comes with ``pip install statetx[checkpoint]``. Use it in a ``with`` block, or `close` it.

    Args:
        directory: where the steps go; made if it does not exist. One program at a time may write there: its first
            `save` removes what an unfinished one has left.
        obj: a model, a function, or a container of these, whose states are saved: those that `statetx.states` finds, and
            those that its methods read from modules and closures. Their paths are the names in the checkpoint. To say
            which, give a dict of states: ``statetx.states(model, filter)``.
        max_to_keep: how many steps stay, the last ones; None for all.
        save_every: `save` writes the steps that this divides, and does nothing for others.

    State:
        `save` reads all states, `restore` writes all of them, or none if it raises. Restored arrays lie as those do
        that they replace, whatever devices they were saved from.

    Memory:
        Until it is written, a step has a copy on the host. `save` returns once that is made, so the next step of
        training may donate its states.

    Example:
        >>> import tempfile, jax.numpy as jnp, statetx
        >>> model = {"w": statetx.Param(jnp.zeros(2)), "rng": statetx.RngState(0), "step": statetx.State(0)}
        >>> folder = tempfile.TemporaryDirectory()
        >>> with statetx.Checkpointer(folder.name, model, save_every=2) as checkpointer:
        ...     for step in range(checkpointer.restore() or 0, 5):
        ...         model["w"].value += 1.0
        ...         _ = checkpointer.save(step + 1)
        >>> with statetx.Checkpointer(folder.name, model) as checkpointer:
        ...     checkpointer.restore(), model["w"].value.tolist()
        (4, [4.0, 4.0])
        >>> folder.cleanup()
    """

    def __init__(
        self, directory: str | os.PathLike, obj: Any, *, max_to_keep: int | None = 3, save_every: int = 1
    ) -> None:
        for name, number in (("max_to_keep", max_to_keep), ("save_every", save_every)):
            if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 1):
                raise ValueError(f"Checkpointer: {name} must be a whole number of at least 1, got {number!r}.")
        try:
            import orbax.checkpoint as orbax
        except ImportError as e:
            raise ImportError("Checkpointer needs orbax: pip install 'statetx[checkpoint]'") from e
        self._obj = obj
        self._directory = _as_directory(directory)
        self._args = orbax.args
        policies = orbax.checkpoint_managers
        self._options = functools.partial(
            orbax.CheckpointManagerOptions,
            save_decision_policy=policies.AnySavePolicy(
                [policies.FixedIntervalPolicy(save_every), policies.PreemptionCheckpointingPolicy()]
            ),
            preservation_policy=policies.LatestN(max_to_keep),
        )
        self._manager = orbax.CheckpointManager(self._directory, options=self._options())
        self._has_saved = False

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, *exc: Any) -> None:
        self.close()

    @property
    def steps(self) -> list[int]:
        """The steps there are, in order; the last one may still be on its way."""
        return sorted(self._manager.all_steps())

    def save(self, step: int, *, force: bool = False) -> bool:
        """Begin to save the states as they are now; earlier saves are waited for.

        Args:
            step: a whole number of at least 0, above those of the steps there are.
            force: save also where `save_every` does not ask for it.

        Returns:
            Whether this step is being saved. It is there for sure once `wait` has returned.

        Raises:
            CheckpointError: the directory has this step or a later one; there is no state to save, a value in place of one, or
                one that no path finds again in another process; of several processes, each has a value of its own.
            StateValueError: a state holds something other than arrays, numbers, strings and None.
            Exception: whatever went wrong when an earlier step was written.
        """
        self._refuse_inside("save")
        step = _as_step("save", step)
        last = self._manager.latest_step()
        if last is not None and step <= last:
            raise CheckpointError(
                f"Checkpointer.save({step}): {self._manager.directory} has step {last}, and steps are saved in order.\n"
                f"Fix: restore the last step before going on, or save to another directory."
            )
        if not (force or self._manager.should_save(step)):
            return False
        live = {path: _Live(state) for path, state in _states_of(self._obj).items()}
        manifest = {path: now.describe(path) for path, now in live.items()}
        if jax.process_count() > 1:
            _refuse_local(live)
        arrays = _nest({path: now.arrays() for path, now in live.items()})
        items: dict[str, Any] = {"manifest": self._args.JsonSave(_sealed(manifest))}
        if arrays:  # orbax saves no empty tree
            items["states"] = self._args.StandardSave(arrays)
        if not self._has_saved:
            # A manager that cleans the directory does so in the background, and waits for that in `save` only. And who
            # only reads must leave alone what another program is writing.
            self._manager.close()
            self._manager = type(self._manager)(
                self._manager.directory, options=self._options(cleanup_tmp_directories=True)
            )
            self._has_saved = True
        return self._manager.save(step, args=self._args.Composite(**items), force=True)

    def wait(self) -> int | None:
        """Wait for what is being saved; returns the last step, which is on disk then, or None if there is none."""
        self._manager.wait_until_finished()
        return self._manager.latest_step()

    def restore(self, step: int | None = None) -> int | None:
        """Give every state the value that it had at a step: all of them, or none if an error is raised.

        Args:
            step: which; the last one if None.

        Returns:
            The step; None, with the states as they are, where `step` is None and nothing was saved yet.

        Raises:
            CheckpointError: the checkpoint is damaged, there is no such step, or it is of other states: the message
                names the first path that is missing, or has another structure, shape or dtype.
        """
        self._refuse_inside("restore")
        self._manager.wait_until_finished()
        step = self._manager.latest_step() if step is None else _as_step("restore", step)
        if step is None:
            return None
        where = f"step {step} in {self._manager.directory}"
        if step not in self.steps:
            raise CheckpointError(f"There is no {where}; it has {', '.join(map(str, self.steps)) or 'none'}.")
        saved = _unsealed(self._read(where, step, manifest=self._args.JsonRestore()), where)
        live = {path: _Live(state) for path, state in _states_of(self._obj).items()}
        _compare(saved, live, where)
        wanted = _nest({path: now.targets(saved[path]["leaves"]) for path, now in live.items()})
        arrays = self._read(where, step, states=self._args.StandardRestore(wanted)) if wanted else {}
        values = []
        for path, now in live.items():
            found = _unnest(arrays.get(path, {}))
            _check_contents(path, saved[path]["leaves"], found, where)
            values.append(now.restored(saved[path]["leaves"], found))
        locked(_frames.ownership, _store_all, list(live.values()), values)
        return step

    def close(self) -> None:
        """Wait for what is being saved, and let go of the directory."""
        self._manager.close()

    def _read(self, where: str, step: int, **item: Any) -> Any:
        (name,) = item
        try:
            return self._manager.restore(step, args=self._args.Composite(**item))[name]
        except Exception as e:  # orbax raises errors of every type on a damaged file
            raise CheckpointError(f"The {name} of {where} cannot be read: {e}\nFix: restore another step.") from e

    def _refuse_inside(self, method: str) -> None:
        if not _frames.is_idle():
            raise CheckpointError(f"Checkpointer.{method} reads and writes files: call it outside of every transform.")


def _as_directory(directory: str | os.PathLike) -> str:
    path = os.path.abspath(directory)
    parts = [path]
    while not os.path.lexists(parts[-1]):
        parts.append(os.path.dirname(parts[-1]))
    if not os.path.isdir(parts[-1]):
        raise CheckpointError(
            f"Checkpointer: {parts[-1]} is no directory. Fix: save to a directory, new or there already."
        )
    return path


def _as_step(method: str, step: Any) -> int:
    try:
        number = -1 if isinstance(step, bool) else operator.index(step)
    except TypeError:
        number = -1
    if number < 0:
        raise CheckpointError(f"Checkpointer.{method}: a step is a whole number of at least 0, got {step!r}.")
    return number


# -- which states ----------------------------------------------------------------------------------------------------


def _states_of(obj: Any) -> dict[str, Any]:
    """What a `Checkpointer` saves, by paths that hold in another process."""
    leaves = dict(_leaves_of(obj, ""))
    found: dict[str, Any] = {}
    if all(_states.kind_of(leaf) is not None for leaf in leaves.values()):
        for path, state in leaves.items():
            if not any(state is other for other in found.values()):
                found[path] = state
    else:
        walk = Walk(all_methods=True)
        for path, leaf in leaves.items():
            _refuse_value(path, leaf)
            found.update(walk.held(leaf, path))
        found.update(walk.beyond())
        _refuse_unstable(found, walk)
    if not found:
        raise CheckpointError(
            f"Checkpointer: there is no state in {brief(obj)}, so nothing would be saved.\nFix: give the model, or a dict of states."
        )
    return found


def _leaves_of(obj: Any, path: str) -> Iterator[tuple[str, Any]]:
    """What the containers hold that a `Checkpointer` was given."""
    if type(obj) not in (dict, list, tuple):
        yield path, obj
        return
    for key, child in children(obj):
        yield from _leaves_of(child, f"{path}.{key}" if path else key)


def _refuse_value(path: str, leaf: Any) -> None:
    if is_array_or_number(leaf) or isinstance(leaf, (bool, str, bytes)):
        raise CheckpointError(
            f"Checkpointer: {path or 'what it was given'!r} is {_article(type_str(leaf))}, no state, and would not be saved.\n"
            f"Fix: give the state itself rather than its value, keep the value in a statetx.State, or leave it out."
        )


def _refuse_unstable(found: Mapping[str, Any], walk: Walk) -> None:
    for path in found:
        if HIDDEN in path.split("."):
            holder = path.partition(f".{HIDDEN}")[0]
            raise CheckpointError(
                f"Checkpointer: a state is held by {holder!r}, an iterator, a cache or another object whose inside has no "
                f"names, so that no path finds it in another process.\n"
                f"Fix: hold it in a list, a dict or an attribute as well, or give a dict of states."
            )
        for holder in walk.unstable:
            if path.startswith(f"{holder}." if holder else ""):
                raise CheckpointError(
                    f"Checkpointer: the state {path!r} is in the set {holder!r}, which has no order, and other items of the "
                    f"set have the same name or type, so that no path tells them apart in another process.\n"
                    f"Fix: use a list or a dict, or give the states names of their own (name=)."
                )


def _article(word: str) -> str:
    return f"{'an' if word[0] in 'aeiou' else 'a'} {word}"


# -- what a checkpoint says of a state -------------------------------------------------------------------------------


class _Live:
    """A state as it is now.

    Attributes:
        leaves: those of its value, each by its place in it; the place of a value that is a lone leaf is "".
        structure: of the value, as text: containers, their keys, and what these know besides leaves, a unit for one.
    """

    def __init__(self, state: Any):
        kind = _states.kind_of(state)
        assert kind is not None
        self.state, self.kind = state, kind
        flat, self._treedef = jax.tree_util.tree_flatten_with_path(kind.read(state), is_leaf=_states.is_opaque)
        self.leaves = {jax.tree_util.keystr(keys): leaf for keys, leaf in flat}
        self.structure = re.sub(r" at 0x[0-9a-f]+", "", str(self._treedef))

    def arrays(self) -> dict[str, Any]:
        """The leaves that orbax saves; it takes none without entries."""
        return {place: x for place, x in self.leaves.items() if is_array(x) and x.size}

    def describe(self, path: str) -> dict[str, Any]:
        """The state's entry in a manifest."""
        return {
            "structure": self.structure,
            "leaves": {place: _describe_leaf(path + place, x) for place, x in self.leaves.items()},
        }

    def targets(self, saved: dict[str, Any]) -> dict[str, Any]:
        """For each array that was saved, what orbax is asked for: the type it had, where the present leaf is."""
        return {place: _target(record, self.leaves[place]) for place, record in saved.items() if "digest" in record}

    def restored(self, saved: dict[str, Any], arrays: dict[str, Any]) -> PyTree:
        """The value that was saved."""
        leaves = []
        for place, now in self.leaves.items():
            record = saved[place]
            if "value" in record:
                leaves.append(record["value"])
            elif place in arrays:
                leaves.append(_as_it_was(arrays[place], record, now))
            else:
                leaves.append(now)  # without entries
        return jax.tree.unflatten(self._treedef, leaves)

    def check_free(self) -> None:
        owner = self.kind.owner(self.state)
        if owner is not None:
            raise _frames.foreign_state_error(self.state, self.kind, owner)


def _describe_leaf(path: str, x: Any) -> dict[str, Any]:
    if _is_plain(x):
        return {"type": _type(x), "value": x}
    if not isinstance(x, (jax.Array, np.ndarray, np.generic)) or not is_array(x):
        raise StateValueError(
            f"Checkpointer: the state {path!r} holds a {type(x).__name__}, which is no array, number, string or None.\n"
            f"Fix: leave it out: Checkpointer(directory, statetx.states(model, filter))."
        )
    record: dict[str, Any] = {"type": _type(x)}
    if x.size:
        record["digest"] = _digest(x)
    if not isinstance(x, jax.Array):
        record["numpy"] = x.dtype.name
    elif jax.typeof(x).weak_type:
        record["weak"] = True
    return record


def _is_plain(x: Any) -> bool:
    return isinstance(x, _VALUES) and not isinstance(x, np.generic)  # NumPy's float64 is a float of Python's, too


def _type(x: Any) -> str:
    """Shape and dtype that a leaf has, or would have as a JAX array: a fresh model has numbers where a trained one has arrays."""
    if _is_plain(x) and isinstance(x, (bool, int, float)):
        return f"{jnp.result_type(type(x)).name}[]"
    if is_array(x):
        aval = _jax.abstract(x)  # a checkpoint is restored to wherever a state lies: shardings do not count
        return type_str(jax.ShapeDtypeStruct(aval.shape, aval.dtype))
    return type(x).__name__


def _target(record: dict[str, Any], now: Any) -> Any:
    if "numpy" in record:
        return np.empty(now.shape, jnp.dtype(record["numpy"]))
    if not isinstance(now, jax.Array):
        now = jnp.asarray(now)
    return jax.ShapeDtypeStruct(now.shape, now.dtype, sharding=now.sharding)


def _as_it_was(x: Any, record: dict[str, Any], now: Any) -> Any:
    if "numpy" in record:
        return x[()] if isinstance(now, np.generic) else x
    if not getattr(now, "committed", False):  # orbax commits what it restores to a device
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            data, impl = jax.random.key_data(x), jax.random.key_impl(x)
            return jax.random.wrap_key_data(jnp.asarray(np.asarray(data)), impl=impl)
        x = jnp.asarray(np.asarray(x))
    return _jax.with_weak_type(x, True) if record.get("weak") else x


def _nest(parts: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """What orbax saves: for each state an array, or the arrays in its value by place."""
    return {path: leaves[""] if "" in leaves else leaves for path, leaves in parts.items() if leaves}


def _unnest(part: Any) -> dict[str, Any]:
    return part if isinstance(part, dict) else {"": part}


# -- is it what it was -----------------------------------------------------------------------------------------------


def _store_all(live: Sequence[_Live], values: Sequence[Any]) -> None:
    for now in live:
        now.check_free()
    commit([now.kind.store(now.state, value) for now, value in zip(live, values, strict=True)])


def _compare(saved: Mapping[str, Any], live: Mapping[str, _Live], where: str) -> None:
    """Raise unless a checkpoint is of these states: same paths, structures, shapes and dtypes."""
    for path, now in live.items():
        if path not in saved:
            raise _differs(where, f"it has no state {path!r}; it has {', '.join(map(repr, saved)) or 'none'}")
        before = saved[path]
        for place, x in now.leaves.items():
            then = before["leaves"].get(place, {}).get("type")
            if then not in (None, _type(x)):
                raise _differs(where, f"{path + place!r} is {then} in it, and {_type(x)} in the program")
        if before["structure"] != now.structure:
            raise _differs(where, f"{path!r} is {before['structure']} in it, and {now.structure} in the program")
    for path in saved:
        if path not in live:
            raise _differs(where, f"it has a state {path!r}, which the program has not")


def _differs(where: str, what: str) -> CheckpointError:
    return CheckpointError(
        f"The checkpoint of {where} is of other states: {what}.\nFix: build the model, and the dict of states that the "
        f"Checkpointer was given, as they were when the checkpoint was saved."
    )


def _sealed(manifest: dict[str, Any]) -> dict[str, Any]:
    return {"states": manifest, "crc32": zlib.crc32(json.dumps(manifest, sort_keys=True).encode())}


def _unsealed(sealed: Any, where: str) -> dict[str, Any]:
    manifest = sealed.get("states") if isinstance(sealed, dict) else None
    if not isinstance(manifest, dict) or _sealed(manifest) != sealed:
        raise CheckpointError(f"The manifest of {where} has changed since it was written.\nFix: restore another step.")
    return manifest


def _check_contents(path: str, saved: Mapping[str, Any], arrays: Mapping[str, Any], where: str) -> None:
    for place, x in arrays.items():
        # The words of a random key may come back without their type.
        if _type(x) != saved[place]["type"] or _digest(x) != saved[place]["digest"]:
            raise CheckpointError(
                f"{path + place!r} has changed since it was written, in {where}.\nFix: restore another step."
            )


def _refuse_local(live: Mapping[str, _Live]) -> None:
    """Raise for values of which several processes have one each: a checkpoint has room for that of process 0.

    Called by all processes at once.
    """
    leaves = {path + place: x for path, now in live.items() for place, x in now.leaves.items()}
    for path, x in leaves.items():
        if isinstance(x, jax.Array) and x.is_fully_addressable:
            raise CheckpointError(
                f"Checkpointer: {path!r}, a {type_str(x)}, lies on devices of this process alone, and each of the "
                f"{jax.process_count()} processes has one of its own.\n"
                f"Fix: put it on a mesh of all processes (jax.make_array_from_process_local_data), or leave it out."
            )
    local = [path for path, x in leaves.items() if not isinstance(x, jax.Array)]
    digests = [zlib.crc32(repr(x).encode()) if _is_plain(x) else _digest(x) for x in map(leaves.__getitem__, local)]
    counts = multihost_utils.process_allgather(np.uint32(len(local)))
    if len(set(counts.tolist())) > 1:
        raise CheckpointError(
            f"Checkpointer: the processes save different states; this one has {len(local)} values that are no jax.Array, "
            f"and the others {sorted(set(counts.tolist()) - {len(local)})}.\nFix: build the same model in every process."
        )
    of_all = multihost_utils.process_allgather(np.array(digests, np.uint32))
    for path, column in zip(local, np.transpose(of_all), strict=True):
        if len(set(column.tolist())) > 1:
            raise CheckpointError(
                f"Checkpointer: {path!r} differs between the processes, and would be restored everywhere as process 0 has it.\n"
                f"Fix: keep it in an array on a mesh of all processes (jax.make_array_from_process_local_data), or leave it "
                f"out and save it by yourself."
            )


def _digest(x: Any) -> int:
    """A number that a changed bit changes, and that does not depend on how an array lies on devices."""
    if not isinstance(x, jax.Array):
        return zlib.crc32(np.asarray(x).tobytes())
    return int(_mixed_sum(_on_device(x)))


def _on_device(x: jax.Array) -> jax.Array:
    """The array in the memory that its devices compute in: it may be kept in that of the host."""
    default = next(iter(x.sharding.device_set)).default_memory().kind
    return x if x.sharding.memory_kind in (None, default) else jax.device_put(x, x.sharding.with_memory_kind(default))


@jax.jit
def _mixed_sum(x: jax.Array) -> jax.Array:
    """The sum, modulo 2**32, of the words of `x`, each with its place, mixed as MurmurHash3 ends (Appleby, 2008)."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if jnp.iscomplexobj(x):
        return 3 * _mixed_sum(x.real) + _mixed_sum(x.imag)
    if x.dtype == bool or jnp.dtype(x.dtype).name.startswith(("int4", "uint4", "int2", "uint2", "float4")):
        x = x.astype(jnp.float32)  # as many values as there are, each its own
    words = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * min(x.dtype.itemsize, 4)}")).astype(jnp.uint32)
    for axis in range(words.ndim):  # so that parts that changed places show
        stride = jnp.uint32(0x9E3779B9 * math.prod(words.shape[axis + 1 :]) % 2**32)
        words += stride * jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis)
    words = (words ^ (words >> 16)) * jnp.uint32(0x85EBCA6B)
    words = (words ^ (words >> 13)) * jnp.uint32(0xC2B2AE35)
    return jnp.sum(words ^ (words >> 16), dtype=jnp.uint32)
