"""`Checkpointer`: save states to disk and restore them, by path.

A step is an orbax directory with two items: ``states``, the arrays by path, and ``manifest``, a record of each state: its
structure, the types of its leaves, the values of leaves that are not arrays, and a digest of each array, since orbax's own
format does not notice a changed bit.
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
from .._text import brief, short_dtype, type_str
from .._tree import is_array, is_array_or_number
from .._typing import PyTree, public

_VALUES = (bool, int, float, str, type(None))  # JSON returns these unchanged


@public
class Checkpointer:
    """Save states to a directory during training, and resume from the last complete step.

    A thin layer over ``orbax.checkpoint.CheckpointManager``: all processes that hold a part of an array write it, in the
    background, and a step appears in the directory atomically. Everything to be restored must be a state: weights, the
    optimiser's state, random keys, the position in the data.

    Needs orbax: ``pip install statetx[checkpoint]``. Use it in a ``with`` block, or `close` it.

    Args:
        directory: where steps are saved; created if it does not exist. One program at a time may write there: its first
            `save` removes the files of unfinished saves.
        obj: a model, a function, or a container of these, whose states are saved: the states that `statetx.states` finds,
            and states that its methods read from modules and closures. Their paths are the names in the checkpoint. To
            select some, give a dict of states: ``statetx.states(model, filter)``.
        max_to_keep: number of last steps to keep; None for all.
        save_every: `save` writes the steps that this number divides, and skips others.

    State:
        `save` reads all states. `restore` writes all of them, or none if it raises. Restored arrays take the shardings of
        the arrays that they replace, whatever devices they were saved from.

    Memory:
        A step has a copy on the host until it is written. `save` returns once the copy is made, so the next training
        step may donate its states.

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
        """The saved steps, in order; the last one may not be complete yet."""
        return sorted(self._manager.all_steps())

    def save(self, step: int, *, force: bool = False) -> bool:
        """Start to save the current states, after earlier saves have finished.

        Args:
            step: a whole number of at least 0, greater than all saved steps.
            force: save even if `save_every` would skip the step.

        Returns:
            Whether this step is being saved. It is on disk once `wait` has returned.

        Raises:
            CheckpointError: the directory has this step or a later one; `obj` has no state, or a value in place of a
                state, or a state without a path that another process finds again; or a value differs between processes.
            StateValueError: a state holds something other than arrays, numbers, strings and None.
            Exception: any error in writing an earlier step.
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
        manifest = {path: entry.describe(path) for path, entry in live.items()}
        if jax.process_count() > 1:
            _refuse_local(live)
        arrays = _nest({path: entry.arrays() for path, entry in live.items()})
        items: dict[str, Any] = {"manifest": self._args.JsonSave(_seal(manifest))}
        if arrays:  # orbax refuses to save an empty tree
            items["states"] = self._args.StandardSave(arrays)

        if not self._has_saved:
            # Cleaning waits for the first save: a reader must not remove the files that another program is writing. And a
            # manager cleans in the background, and waits for that in `save` only.
            self._manager.close()
            self._manager = type(self._manager)(
                self._manager.directory, options=self._options(cleanup_tmp_directories=True)
            )
            self._has_saved = True
        return self._manager.save(step, args=self._args.Composite(**items), force=True)

    def wait(self) -> int | None:
        """Wait for saves to finish. Returns the last step, or None if there is none."""
        self._manager.wait_until_finished()
        return self._manager.latest_step()

    def restore(self, step: int | None = None) -> int | None:
        """Restore the value of every state at a step: of all states, or of none if an error is raised.

        Args:
            step: the step; the last one if None.

        Returns:
            The step; or None, with the states unchanged, if `step` is None and nothing was saved yet.

        Raises:
            CheckpointError: the checkpoint is damaged, the step does not exist, or the checkpoint is of other states: the
                message names the first path that is missing, or has another structure, shape or dtype.
        """
        self._refuse_inside("restore")
        self._manager.wait_until_finished()
        step = self._manager.latest_step() if step is None else _as_step("restore", step)
        if step is None:
            return None
        location = f"step {step} in {self._manager.directory}"
        if step not in self.steps:
            raise CheckpointError(f"There is no {location}; it has {', '.join(map(str, self.steps)) or 'none'}.")

        manifest = _unseal(self._read(location, step, manifest=self._args.JsonRestore()), location)
        live = {path: _Live(state) for path, state in _states_of(self._obj).items()}
        _compare(manifest, live, location)
        targets = _nest({path: entry.targets(manifest[path]["leaves"]) for path, entry in live.items()})
        arrays = self._read(location, step, states=self._args.StandardRestore(targets)) if targets else {}

        # Every value is made and checked before any state is written.
        values = []
        for path, entry in live.items():
            leaves = _unnest(arrays.get(path, {}))
            _check_contents(path, manifest[path]["leaves"], leaves, location)
            values.append(entry.restored(manifest[path]["leaves"], leaves))
        locked(_frames.ownership, _store_all, list(live.values()), values)
        return step

    def close(self) -> None:
        """Wait for saves to finish, and release the directory."""
        self._manager.close()

    def _read(self, location: str, step: int, **item: Any) -> Any:
        (name,) = item
        try:
            return self._manager.restore(step, args=self._args.Composite(**item))[name]
        except Exception as e:  # orbax raises errors of every type on a damaged file
            raise CheckpointError(f"The {name} of {location} cannot be read: {e}\nFix: restore another step.") from e

    def _refuse_inside(self, method: str) -> None:
        if not _frames.is_idle():
            raise CheckpointError(f"Checkpointer.{method} reads and writes files: call it outside of every transform.")


def _as_directory(directory: str | os.PathLike) -> str:
    """The absolute path, after checking that its nearest existing ancestor is a directory."""
    path = os.path.abspath(directory)
    ancestors = [path]
    while not os.path.lexists(ancestors[-1]):
        ancestors.append(os.path.dirname(ancestors[-1]))
    if not os.path.isdir(ancestors[-1]):
        raise CheckpointError(
            f"Checkpointer: {ancestors[-1]} is not a directory. Fix: save to a directory, new or existing."
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


# -- the saved states ------------------------------------------------------------------------------------------------


def _states_of(obj: Any) -> dict[str, Any]:
    """The states that a `Checkpointer` saves, by paths that another process finds as well."""
    leaves = dict(_leaves_of(obj, ""))
    states: dict[str, Any] = {}
    if all(_states.kind_of(leaf) is not None for leaf in leaves.values()):
        for path, state in leaves.items():
            if not any(state is other for other in states.values()):
                states[path] = state
    else:
        walk = Walk(all_methods=True)
        for path, leaf in leaves.items():
            _refuse_value(path, leaf)
            states.update(walk.held(leaf, path))
        states.update(walk.beyond())
        _refuse_unstable(states, walk)
    if not states:
        raise CheckpointError(
            f"Checkpointer: there is no state in {brief(obj)}, so nothing would be saved.\nFix: give the model, or a dict of states."
        )
    return states


def _leaves_of(obj: Any, path: str) -> Iterator[tuple[str, Any]]:
    """The items of nested dicts, lists and tuples, by path."""
    if type(obj) not in (dict, list, tuple):
        yield path, obj
        return
    for key, child in children(obj):
        yield from _leaves_of(child, f"{path}.{key}" if path else key)


def _refuse_value(path: str, leaf: Any) -> None:
    if is_array_or_number(leaf) or isinstance(leaf, (bool, str, bytes)):
        raise CheckpointError(
            f"Checkpointer: {path or 'its argument'!r} is {_article(type_str(leaf))}, not a state, and would not be saved.\n"
            f"Fix: give the state itself rather than its value, keep the value in a statetx.State, or leave it out."
        )


def _refuse_unstable(states: Mapping[str, Any], walk: Walk) -> None:
    for path in states:
        if HIDDEN in path.split("."):
            holder = path.partition(f".{HIDDEN}")[0]
            raise CheckpointError(
                f"Checkpointer: a state is held by {holder!r}, an iterator, a cache or another object whose contents have no "
                f"names, so no path finds it in another process.\n"
                f"Fix: hold it in a list, a dict or an attribute as well, or give a dict of states."
            )
        for holder in walk.unstable:
            if path.startswith(f"{holder}." if holder else ""):
                raise CheckpointError(
                    f"Checkpointer: the state {path!r} is in the set {holder!r}, which has no order, and other items of the "
                    f"set have the same name or type, so no path tells them apart in another process.\n"
                    f"Fix: use a list or a dict, or give the states distinct names (name=)."
                )


def _article(word: str) -> str:
    return f"{'an' if word[0] in 'aeiou' else 'a'} {word}"


# -- a state's record in a checkpoint --------------------------------------------------------------------------------


class _Live:
    """A state of the program, with its current value.

    Attributes:
        leaves: the leaves of its value by key path; the path of a value that is a single leaf is "".
        structure: the value's tree structure as text: containers, their keys, and their static data, such as a unit.
    """

    def __init__(self, state: Any):
        kind = _states.kind_of_state(state)
        self.state, self.kind = state, kind
        flat, self._treedef = jax.tree_util.tree_flatten_with_path(kind.read(state), is_leaf=_states.is_opaque)
        self.leaves = {jax.tree_util.keystr(keys): leaf for keys, leaf in flat}
        self.structure = re.sub(r" at 0x[0-9a-f]+", "", str(self._treedef))

    def arrays(self) -> dict[str, Any]:
        """The leaves that orbax saves: arrays, except empty ones, which it refuses."""
        return {keys: x for keys, x in self.leaves.items() if is_array(x) and x.size}

    def describe(self, path: str) -> dict[str, Any]:
        """The state's entry in a manifest."""
        return {
            "structure": self.structure,
            "leaves": {keys: _describe_leaf(path + keys, x) for keys, x in self.leaves.items()},
        }

    def targets(self, records: dict[str, Any]) -> dict[str, Any]:
        """For each saved array, the type to request from orbax, with the sharding of the current leaf."""
        return {keys: _target(record, self.leaves[keys]) for keys, record in records.items() if "digest" in record}

    def restored(self, records: dict[str, Any], arrays: dict[str, Any]) -> PyTree:
        """The saved value."""
        leaves = []
        for keys, current in self.leaves.items():
            record = records[keys]
            if "value" in record:
                leaves.append(record["value"])
            elif keys in arrays:
                leaves.append(_restore_leaf(arrays[keys], record, current))
            else:
                leaves.append(current)  # an empty array, which was not saved
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
            f"Checkpointer: the state {path!r} holds a {type(x).__name__}, which is not an array, number, string or None.\n"
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
    return isinstance(x, _VALUES) and not isinstance(x, np.generic)  # NumPy's float64 is a subclass of float


def _type(x: Any) -> str:
    """Shape and dtype of a leaf as a JAX array, in the format of the manifest: ``float32[2,3]``. A number counts as an array: a
    trained model may have arrays where a new one has numbers."""
    if _is_plain(x) and isinstance(x, (bool, int, float)):
        return f"{jnp.result_type(type(x)).name}[]"
    if is_array(x):
        aval = _jax.abstract(x)  # without sharding: a checkpoint is restored to the state's own
        return f"{aval.dtype.name}[{','.join(map(str, aval.shape))}]"
    return type(x).__name__


def _target(record: dict[str, Any], current: Any) -> Any:
    if "numpy" in record:
        return np.empty(current.shape, jnp.dtype(record["numpy"]))
    if not isinstance(current, jax.Array):
        current = jnp.asarray(current)
    return jax.ShapeDtypeStruct(current.shape, current.dtype, sharding=current.sharding)


def _restore_leaf(x: Any, record: dict[str, Any], current: Any) -> Any:
    """Undo the changes of a round trip through orbax: to NumPy scalars, committed devices and weak types."""
    if "numpy" in record:
        return x[()] if isinstance(current, np.generic) else x
    if not getattr(current, "committed", False):  # orbax commits restored arrays to a device
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            data, impl = jax.random.key_data(x), jax.random.key_impl(x)
            return jax.random.wrap_key_data(jnp.asarray(np.asarray(data)), impl=impl)
        x = jnp.asarray(np.asarray(x))
    return _jax.with_weak_type(x, True) if record.get("weak") else x


def _nest(leaves: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """The tree that orbax saves: for each state an array, or its arrays by key path."""
    return {path: arrays[""] if "" in arrays else arrays for path, arrays in leaves.items() if arrays}


def _unnest(arrays: Any) -> dict[str, Any]:
    return arrays if isinstance(arrays, dict) else {"": arrays}


# -- verification ----------------------------------------------------------------------------------------------------


def _store_all(live: Sequence[_Live], values: Sequence[Any]) -> None:
    for entry in live:
        entry.check_free()
    commit([entry.kind.store(entry.state, value) for entry, value in zip(live, values, strict=True)])


def _compare(manifest: Mapping[str, Any], live: Mapping[str, _Live], location: str) -> None:
    """Raise unless a checkpoint is of these states: same paths, structures, shapes and dtypes."""
    for path, entry in live.items():
        if path not in manifest:
            raise _mismatch(location, f"it has no state {path!r}; it has {', '.join(map(repr, manifest)) or 'none'}")
        record = manifest[path]
        for keys, x in entry.leaves.items():
            saved_type = record["leaves"].get(keys, {}).get("type")
            if saved_type not in (None, _type(x)):
                types = [short_dtype(text) for text in (saved_type, _type(x))]
                raise _mismatch(location, f"{path + keys!r} is {types[0]} in it, and {types[1]} in the program")
        if record["structure"] != entry.structure:
            raise _mismatch(location, f"{path!r} is {record['structure']} in it, and {entry.structure} in the program")
    for path in manifest:
        if path not in live:
            raise _mismatch(location, f"it has a state {path!r}, which the program does not have")


def _mismatch(location: str, difference: str) -> CheckpointError:
    return CheckpointError(
        f"The checkpoint of {location} is of other states: {difference}.\nFix: build the model, and the dict of states for "
        f"the Checkpointer, as they were when the checkpoint was saved."
    )


def _seal(manifest: dict[str, Any]) -> dict[str, Any]:
    return {"states": manifest, "crc32": zlib.crc32(json.dumps(manifest, sort_keys=True).encode())}


def _unseal(sealed: Any, location: str) -> dict[str, Any]:
    manifest = sealed.get("states") if isinstance(sealed, dict) else None
    if not isinstance(manifest, dict) or _seal(manifest) != sealed:
        raise CheckpointError(
            f"The manifest of {location} has changed since it was written.\nFix: restore another step."
        )
    return manifest


def _check_contents(path: str, records: Mapping[str, Any], arrays: Mapping[str, Any], location: str) -> None:
    for keys, x in arrays.items():
        # The type is compared too: a random key may come back as its plain words.
        if _type(x) != records[keys]["type"] or _digest(x) != records[keys]["digest"]:
            raise CheckpointError(
                f"{path + keys!r} has changed since it was written, in {location}.\nFix: restore another step."
            )


def _refuse_local(live: Mapping[str, _Live]) -> None:
    """Raise for values that differ between processes: a checkpoint has room for process 0's only.

    All processes call this at once.
    """
    leaves = {path + keys: x for path, entry in live.items() for keys, x in entry.leaves.items()}
    for path, x in leaves.items():
        if isinstance(x, jax.Array) and x.is_fully_addressable:
            raise CheckpointError(
                f"Checkpointer: {path!r}, a {type_str(x)}, is on devices of this process only, and each of the "
                f"{jax.process_count()} processes has its own.\n"
                f"Fix: put it on a mesh of all processes (jax.make_array_from_process_local_data), or leave it out."
            )

    # Numbers and NumPy arrays may be saved if they are equal everywhere. Compare their number before their digests, since
    # `process_allgather` needs equal shapes.
    paths = [path for path, x in leaves.items() if not isinstance(x, jax.Array)]
    digests = [zlib.crc32(repr(x).encode()) if _is_plain(x) else _digest(x) for x in map(leaves.__getitem__, paths)]
    counts = multihost_utils.process_allgather(np.uint32(len(paths)))
    if len(set(counts.tolist())) > 1:
        raise CheckpointError(
            f"Checkpointer: the processes save different states; this one has {len(paths)} values that are not jax.Arrays, "
            f"and the others {sorted(set(counts.tolist()) - {len(paths)})}.\nFix: build the same model in every process."
        )
    gathered = multihost_utils.process_allgather(np.array(digests, np.uint32))
    for path, column in zip(paths, np.transpose(gathered), strict=True):
        if len(set(column.tolist())) > 1:
            raise CheckpointError(
                f"Checkpointer: {path!r} differs between the processes, and would be restored everywhere as process 0 has it.\n"
                f"Fix: keep it in an array on a mesh of all processes (jax.make_array_from_process_local_data), or leave it "
                f"out and save it yourself."
            )


def _digest(x: Any) -> int:
    """A checksum of the values, independent of the sharding: it is computed before saving and after restoring elsewhere."""
    if not isinstance(x, jax.Array):
        return zlib.crc32(np.asarray(x).tobytes())
    return int(_mixed_sum(_on_device(x)))


def _on_device(x: jax.Array) -> jax.Array:
    """Move an array from host memory to the default memory of its devices, so that they can compute with it."""
    default = next(iter(x.sharding.device_set)).default_memory().kind
    return x if x.sharding.memory_kind in (None, default) else jax.device_put(x, x.sharding.with_memory_kind(default))


@jax.jit
def _mixed_sum(x: jax.Array) -> jax.Array:
    """The sum, modulo 2**32, of the words of `x`, each offset by its position and mixed by MurmurHash3's finaliser (Appleby, 2008).

    Such a sum does not depend on the order, and so not on how `x` is sharded.
    """
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if jnp.iscomplexobj(x):
        return 3 * _mixed_sum(x.real) + _mixed_sum(x.imag)
    if x.dtype == bool or jnp.dtype(x.dtype).name.startswith(("int4", "uint4", "int2", "uint2", "float4")):
        x = x.astype(jnp.float32)  # injective: float32 has every value of these types
    words = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * min(x.dtype.itemsize, 4)}")).astype(jnp.uint32)
    for axis in range(words.ndim):  # positions, so that a permutation of values changes the sum
        stride = jnp.uint32(0x9E3779B9 * math.prod(words.shape[axis + 1 :]) % 2**32)
        words += stride * jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis)
    words = (words ^ (words >> 16)) * jnp.uint32(0x85EBCA6B)
    words = (words ^ (words >> 13)) * jnp.uint32(0xC2B2AE35)
    return jnp.sum(words ^ (words >> 16), dtype=jnp.uint32)
