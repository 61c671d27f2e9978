"""The manifest of a checkpoint: a record of each state, compared with the program's states before any of them is
restored.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import re
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from .. import _frames, _jax, _states
from .._errors import CheckpointError, StateValueError
from .._text import brief, short_dtype, type_str
from .._tree import is_array
from .._typing import PyTree

_VALUES = (bool, int, float, complex, str, type(None))


# -- a state's record in a checkpoint --------------------------------------------------------------------------------


class LiveState:
    """A state of the program, with its current value.

    Attributes:
        leaves: the leaves of its value by key path; the path of a value that is a single leaf is "".
        structure: the value's tree structure as text: containers, their keys, and their static data, such as a unit.
    """

    def __init__(self, state: Any):
        kind = _states.kind_of_state(state)
        self.state, self.kind = state, kind

        # Addresses in the text of static data differ between processes.
        flat, self._treedef = jax.tree_util.tree_flatten_with_path(kind.read(state), is_leaf=_states.is_opaque)
        self.leaves = {jax.tree_util.keystr(keys): leaf for keys, leaf in flat}
        self.structure = re.sub(r" at 0x[0-9a-f]+", "", str(self._treedef))

    def arrays(self) -> dict[str, Any]:
        """The leaves that orbax saves: arrays, except empty ones, which it refuses."""
        arrays = {keys: x for keys, x in self.leaves.items() if is_array(x) and x.size}
        return {keys: x if is_writable(x.dtype) else encode(x) for keys, x in arrays.items()}

    def describe(self, path: str) -> dict[str, Any]:
        """The state's entry in a manifest."""
        return {
            "structure": self.structure,
            "leaves": {keys: _describe_leaf(path + keys, x) for keys, x in self.leaves.items()},
        }

    def targets(self, records: dict[str, Any]) -> dict[str, Any]:
        """Type to request from orbax for each saved array, with the sharding of the current leaf."""
        return {keys: _target(record, self.leaves[keys]) for keys, record in records.items() if "digest" in record}

    def decoded(self, records: dict[str, Any], arrays: dict[str, Any]) -> dict[str, Any]:
        """The arrays that were saved, from those that orbax has read."""
        return {
            keys: decode(x, self.leaves[keys].dtype) if records[keys].get("bytes") else x for keys, x in arrays.items()
        }

    def restored(self, records: dict[str, Any], arrays: dict[str, Any]) -> PyTree:
        """The saved value."""
        leaves = []
        for keys, current in self.leaves.items():
            record = records[keys]
            if "value" in record:
                value = complex(*record["value"]) if isinstance(record["value"], list) else record["value"]
                if not _is_plain(value) or _type(value) != record["type"]:
                    raise ValueError(f"{keys or 'the value'} is {brief(value)}")
                leaves.append(value)
            elif is_array(current) and not current.size:
                leaves.append(current)  # it was not saved
            else:
                leaves.append(_restore_leaf(arrays[keys], record, current))
        return jax.tree.unflatten(self._treedef, leaves)

    def check_free(self) -> None:
        owner = self.kind.owner(self.state)
        if owner is not None:
            raise _frames.foreign_state_error(self.state, self.kind, owner)


def _describe_leaf(path: str, x: Any) -> dict[str, Any]:
    if _is_plain(x):
        # JSON returns the others unchanged.
        return {"type": _type(x), "value": [x.real, x.imag] if isinstance(x, complex) else x}
    if not isinstance(x, (jax.Array, np.ndarray, np.generic)) or not is_array(x):
        raise StateValueError(
            f"Checkpointer: the state {path!r} holds {type(x).__name__}, which is not an array, number, string or "
            f"None.\n"
            f"Fix: leave it out: Checkpointer(directory, statetx.states(model, filter))."
        )
    is_encoded = not is_writable(x.dtype)
    if is_encoded and x.dtype.itemsize > 1:
        raise StateValueError(
            f"Checkpointer: the state {path!r} holds {x.dtype.name}{list(x.shape)}, and no JAX array has this dtype.\n"
            f"Fix: convert it, or leave it out: Checkpointer(directory, statetx.states(model, filter))."
        )

    # orbax does not store weak types, and must be told which arrays to restore as NumPy's.
    record: dict[str, Any] = {"type": _type(x)}
    if x.size:
        record["digest"] = digest(x)
        if is_encoded:
            record["bytes"] = True
    if not isinstance(x, jax.Array):
        record["numpy"] = x.dtype.name
    elif jax.typeof(x).weak_type:
        record["weak"] = True
    return record


def _is_plain(x: Any) -> bool:
    return type(x) in _VALUES  # not a subclass: NumPy's float64 is one of float, and an IntEnum of int


def _type(x: Any) -> str:
    """Shape and dtype of a leaf as a JAX array, in the format of the manifest: ``float32[2,3]``. A number counts as an
    array: a trained model may have arrays where a new one has numbers.
    """
    if _is_plain(x) and isinstance(x, (bool, int, float, complex)):
        return f"{jnp.result_type(type(x)).name}[]"
    if is_array(x):
        aval = _jax.abstract(x)  # without sharding: a checkpoint is restored to the state's own
        return f"{aval.dtype.name}[{','.join(map(str, aval.shape))}]"
    return type(x).__name__


def _target(record: dict[str, Any], current: Any) -> Any:
    # The saved array has the same shape and dtype: `compare` has checked that.
    if "numpy" in record:
        return np.empty(current.shape, np.uint8 if record.get("bytes") else jnp.dtype(record["numpy"]))
    if not isinstance(current, jax.Array):
        current = jnp.asarray(current)
    dtype = jnp.uint8 if record.get("bytes") else current.dtype
    return jax.ShapeDtypeStruct(current.shape, dtype, sharding=current.sharding)


def _restore_leaf(x: Any, record: dict[str, Any], current: Any) -> Any:
    """Undo the changes of a round trip through orbax: to NumPy scalars, committed devices and weak types."""
    if "numpy" in record:
        return x[()] if isinstance(current, np.generic) else x
    if not getattr(current, "committed", False):  # orbax commits restored arrays to a device
        # By way of NumPy: an array made from a NumPy array is uncommitted. NumPy has no keys, but has their words.
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            data, impl = jax.random.key_data(x), jax.random.key_impl(x)
            return jax.random.wrap_key_data(jnp.asarray(np.asarray(data)), impl=impl)
        x = jnp.asarray(np.asarray(x))
    return _jax.with_weak_type(x, True) if record.get("weak") else x


def nest(leaves: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """The tree that orbax saves: for each state an array, or its arrays by key path."""
    # A value that is a single array, whose key path is "", goes by the path of its state alone.
    return {path: arrays[""] if "" in arrays else arrays for path, arrays in leaves.items() if arrays}


def unnest(arrays: Any) -> dict[str, Any]:
    return arrays if isinstance(arrays, dict) else {"": arrays}


# -- verification ----------------------------------------------------------------------------------------------------


def compare(manifest: Mapping[str, Any], live: Mapping[str, LiveState], location: str) -> None:
    """Raise unless a checkpoint is of these states: same paths, structures, shapes and dtypes."""
    # Types before structures: a difference in one shape says more. Leaves that only one side has show in the structure.
    for path, entry in live.items():
        if path not in manifest:
            raise _mismatch(
                location, f"it has no state {path!r}; it has {_short(', '.join(map(repr, manifest))) or 'none'}"
            )
        record = manifest[path]
        for keys, x in entry.leaves.items():
            saved_type = record["leaves"].get(keys, {}).get("type")
            if saved_type not in (None, _type(x)):
                types = [_short(short_dtype(text)) for text in (saved_type, _type(x))]
                raise _mismatch(location, f"{path + keys!r} is {types[0]} in it, and {types[1]} in the program")
        if record["structure"] != entry.structure:
            structures = [_short(s) for s in (record["structure"], entry.structure)]
            raise _mismatch(location, f"{path!r} is {structures[0]} in it, and {structures[1]} in the program")
        if record["leaves"].keys() != entry.leaves.keys():
            raise ValueError(f"{path!r} has other leaves than its structure")
    for path in manifest:
        if path not in live:
            raise _mismatch(location, f"it has a state {path!r}, which the program does not have")


def _short(structure: str) -> str:
    return structure if len(structure) <= 1000 else f"{structure[:1000]}..."


@contextlib.contextmanager
def reading(location: str) -> Iterator[None]:
    """Raise one error for all that a manifest lacks, or has in place of something else, while it is used.

    Its checksum finds damage. A file with the right checksum, and other contents than `describe` writes, is forged.
    """
    try:
        yield
    except CheckpointError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as e:
        problem = f"{type(e).__name__}: {_short(str(e))}"
        raise CheckpointError(f"The manifest of {location} is damaged: {problem}.\nFix: restore another step.") from e


def _mismatch(location: str, difference: str) -> CheckpointError:
    return CheckpointError(
        f"The checkpoint of {location} is of other states: {difference}.\n"
        "Fix: build the model, and the dict of states for the Checkpointer, as they were when the checkpoint was saved."
    )


def seal(manifest: dict[str, Any]) -> dict[str, Any]:
    # Sorted: the order of keys may change between writing and reading.
    return {"states": manifest, "crc32": zlib.crc32(json.dumps(manifest, sort_keys=True).encode())}


def unseal(sealed: Any, location: str) -> dict[str, Any]:
    manifest: Any = sealed.get("states") if isinstance(sealed, dict) else None
    try:
        is_sealed = isinstance(manifest, dict) and seal(manifest) == sealed
    except RecursionError:
        is_sealed = False
    if not is_sealed:
        raise CheckpointError(
            f"The manifest of {location} has changed since it was written.\nFix: restore another step."
        )
    return manifest


def check_contents(path: str, records: Mapping[str, Any], arrays: Mapping[str, Any], location: str) -> None:
    for keys, x in arrays.items():
        # The type is compared too: a random key may come back as its plain words.
        if _type(x) != records[keys]["type"] or digest(x) != records[keys]["digest"]:
            raise CheckpointError(
                f"{path + keys!r} has changed since it was written, in {location}.\nFix: restore another step."
            )


def refuse_local(live: Mapping[str, LiveState]) -> None:
    """Raise for values that differ between processes: a checkpoint has room for process 0's only.

    All processes call this at once.
    """
    leaves = {path + keys: x for path, entry in live.items() for keys, x in entry.leaves.items()}

    # Even equal arrays on each process's own devices are refused: orbax saves them of process 0 only.
    for path, x in leaves.items():
        if isinstance(x, jax.Array) and x.is_fully_addressable:
            raise CheckpointError(
                f"Checkpointer: {path!r} ({type_str(x)}) is on devices of this process only, and each of the "
                f"{jax.process_count()} processes has its own.\n"
                f"Fix: put it on a mesh of all processes (jax.make_array_from_process_local_data), or leave it out."
            )

    # Numbers and NumPy arrays may be saved if they are equal everywhere. Compare their number before their digests,
    # since `process_allgather` needs equal shapes.
    paths = [path for path, x in leaves.items() if not isinstance(x, jax.Array)]
    digests = [zlib.crc32(repr(x).encode()) if _is_plain(x) else digest(x) for x in map(leaves.__getitem__, paths)]
    counts = multihost_utils.process_allgather(np.uint32(len(paths)))
    if len(set(counts.tolist())) > 1:
        raise CheckpointError(
            f"Checkpointer: the processes save different states; this one has {len(paths)} values that are not "
            f"jax.Arrays, and the others {sorted(set(counts.tolist()) - {len(paths)})}.\n"
            "Fix: build the same model in every process."
        )
    gathered = multihost_utils.process_allgather(np.array(digests, np.uint32))
    for path, column in zip(paths, np.transpose(gathered), strict=True):
        if len(set(column.tolist())) > 1:
            raise CheckpointError(
                f"Checkpointer: {path!r} differs between the processes, and would be restored everywhere as process 0 "
                "has it.\n"
                "Fix: keep it in an array on a mesh of all processes (jax.make_array_from_process_local_data), or "
                "leave it out and save it yourself."
            )


# -- the arrays --------------------------------------------------------------------------------------------------------
#
# The checksum of an array is the same for every sharding. Orbax writes arrays by tensorstore, which lacks some small
# dtypes: their entries are saved as bytes.


def digest(x: Any) -> int:
    """A checksum of the values, independent of the sharding: it is computed before saving and after restoring
    elsewhere.
    """
    if not isinstance(x, jax.Array):
        return zlib.crc32(np.asarray(x).tobytes())
    return int(mixed_sum(on_device(x)))


def on_device(x: jax.Array) -> jax.Array:
    """Move an array from host memory to the default memory of its devices, so that they can compute with it."""
    # All devices of a sharding are of one kind, so any of them tells the default.
    default = next(iter(x.sharding.device_set)).default_memory().kind
    return x if x.sharding.memory_kind in (None, default) else jax.device_put(x, x.sharding.with_memory_kind(default))


@jax.jit
def mixed_sum(x: jax.Array) -> jax.Array:
    """The sum, modulo 2**32, of the words of `x`, each offset by its position and mixed by MurmurHash3's finalizer
    (Appleby, 2008).

    Such a sum does not depend on the order, and so not on how `x` is sharded.
    """
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if jnp.iscomplexobj(x):
        return 3 * mixed_sum(x.real) + mixed_sum(x.imag)
    if x.dtype == bool or jnp.dtype(x.dtype).name.startswith(("int4", "uint4", "int2", "uint2", "float4")):
        x = x.astype(jnp.float32)  # injective: float32 has every value of these types

    # As integers of at most 32 bits: the values' bits rather than the values, so that NaNs and signed zeros count, too.
    # A wider dtype gives one more axis, of two words.
    words = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * min(x.dtype.itemsize, 4)}")).astype(jnp.uint32)

    # Add a multiple of each word's position in row-major order, so that a permutation of values changes the sum. The
    # factor is odd, so different positions modulo 2**32 have different offsets.
    for axis in range(words.ndim):
        stride = jnp.uint32(0x9E3779B9 * math.prod(words.shape[axis + 1 :]) % 2**32)
        words += stride * jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis)

    # Each line is a bijection of words, so a change of one word always changes the sum (decision 26).
    words = (words ^ (words >> 16)) * jnp.uint32(0x85EBCA6B)
    words = (words ^ (words >> 13)) * jnp.uint32(0xC2B2AE35)
    return jnp.sum(words ^ (words >> 16), dtype=jnp.uint32)


def is_writable(dtype: Any) -> bool:
    """Whether arrays of a dtype are saved unchanged."""
    import tensorstore  # orbax needs it, and is itself optional

    if jnp.issubdtype(dtype, jax.dtypes.extended):
        return True  # orbax saves the words of keys
    try:
        tensorstore.dtype(dtype)
    except ValueError:  # in 0.1.86 uint2, uint4, float8_e4m3, and NumPy's float128
        return False
    return True


def encode(x: Any) -> Any:
    """The entries of an array, of at most 8 bits each, as uint8 with the same sharding."""
    return _converted(x, np.dtype(np.uint8)) if isinstance(x, jax.Array) else x.view(np.uint8)


def decode(x: Any, dtype: Any) -> Any:
    """The inverse of `encode`."""
    return _converted(x, dtype) if isinstance(x, jax.Array) else x.view(dtype)


def _converted(x: jax.Array, dtype: Any) -> jax.Array:
    return jax.device_put(_convert(on_device(x), dtype), x.sharding)


@functools.partial(jax.jit, static_argnums=1)
def _convert(x: jax.Array, dtype: Any) -> jax.Array:
    if jnp.issubdtype(x.dtype, jnp.integer) and jnp.issubdtype(dtype, jnp.integer):
        return x.astype(dtype)  # of different sizes in the device's memory, so that no bits can be cast
    return jax.lax.bitcast_convert_type(x, dtype)
