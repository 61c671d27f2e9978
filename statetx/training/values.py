"""The values of states as a dict of arrays by path, for the libraries that write files: `values`, `restore`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .. import _frames, _jax, _states
from .._atomic import commit, locked
from .._errors import CheckpointError, StateValueError
from .._objects.contents import HIDDEN, children
from .._objects.walk import Walk
from .._text import brief, type_str
from .._tree import is_array, is_array_or_number

_NUMBERS = (bool, int, float, complex)


def values(obj: Any) -> dict[str, Any]:
    """Take the values of all states in an object, as a dict of arrays by path.

    The dict is what ``orbax``, ``safetensors`` and ``numpy.savez`` write: a flat dict of strings and arrays, of states
    of every library. `restore` puts it back.

    Args:
        obj: a model, a function, or a container of these: the states that `statetx.states` finds, and those that its
            methods read from closures and modules. To select some, give a dict of states: ``values(states(model,
            filter))``.

    Returns:
        The array of each state by its path. A state that holds a pytree has an item for each leaf, by the state's
        path and the leaf's: ``"linear.weight['bias']"``. A random key is its words (`jax.random.key_data`), a Python
        number is a NumPy scalar of 64 bits. The arrays are the states' own, not copies: a step that donates its states
        deletes them.

    Raises:
        CheckpointError: there is no state in `obj`, a value in place of a state, or a state without a path that another
            process finds again.
        StateValueError: a state holds something other than arrays and numbers.

    State:
        Reads all states, in transforms as well.

    Example:
        >>> import jax.numpy as jnp, statetx
        >>> model = {"w": statetx.Param(jnp.ones(2)), "rng": statetx.RngState(0), "step": statetx.State(3)}
        >>> saved = statetx.values(model)
        >>> {path: x.tolist() for path, x in saved.items()}
        {'w': [1.0, 1.0], 'rng': [0, 0], 'step': 3}
        >>> model["w"].value = jnp.zeros(2)
        >>> statetx.restore(model, saved)
        >>> model["w"].value.tolist()
        [1.0, 1.0]
    """
    return {path: _saved(path, x) for entry in _entries("values", obj) for path, x in entry.leaves.items()}


def restore(obj: Any, values: Mapping[str, Any]) -> None:
    """Give the states in an object the values that `values` took: all of them, or none if it raises.

    Args:
        obj: as for `values`, built in the same way.
        values: the dict, as a library has read it: arrays of JAX or NumPy, by path. `numpy.load` gives arrays of
            ``bfloat16`` and other small dtypes without their dtype; they get the state's.

    Raises:
        CheckpointError: a path is missing or too many, or a value has another shape or dtype than the one that it
            replaces, or has been deleted: the message names the first.

    State:
        Writes all states, or none. Each array is copied, and placed as the one that it replaces: the same sharding,
        weak type, or kind (JAX's, NumPy's, a Python number).

    Example:
        >>> import jax.numpy as jnp, statetx
        >>> layer = {"w": statetx.Param(jnp.ones((3, 2)))}
        >>> statetx.restore(layer, {"w": jnp.zeros((3, 2))})
        >>> layer["w"].value.sum().item()
        0.0
    """
    if not isinstance(values, Mapping):
        raise CheckpointError(
            f"restore: the values are {brief(values)}, not a dict of arrays by path.\n"
            f"Fix: restore(model, values), where values is what statetx.values(model) gave."
        )
    entries = _entries("restore", obj)
    paths = {path for entry in entries for path in entry.leaves}
    for path in values:
        if path not in paths:
            raise _mismatch(f"they have {path!r}, which the program does not have")
    new = [entry.restored(values) for entry in entries]  # every value is made and checked before any state is written
    if _frames.is_idle():
        locked(_frames.ownership, _store_all, entries, new)
    else:
        _write_all(entries, new)


class _Entry(NamedTuple):
    """A state of the program, with the leaves of its value by path."""

    state: Any
    kind: Any
    leaves: dict[str, Any]
    treedef: Any

    def restored(self, values: Mapping[str, Any]) -> Any:
        return self.treedef.unflatten([_restored(path, values, current) for path, current in self.leaves.items()])


def _entries(function: str, obj: Any) -> list[_Entry]:
    entries = []
    for path, state in _states_of(function, obj).items():
        kind = _states.kind_of_state(state)
        flat, treedef = jax.tree_util.tree_flatten_with_path(kind.read(state), is_leaf=_states.is_opaque)
        leaves = {path + jax.tree_util.keystr(keys): leaf for keys, leaf in flat}
        entries.append(_Entry(state, kind, leaves, treedef))
    return entries


def _store_all(entries: list[_Entry], values: list[Any]) -> None:
    # Under the lock of ownership: no other thread can acquire a state between the check and the stores.
    for state, kind, *_ in entries:
        if (owner := kind.owner(state)) is not None:
            raise _frames.foreign_state_error(state, kind, owner)
    commit([entry.kind.store(entry.state, value) for entry, value in zip(entries, values, strict=True)])


def _write_all(entries: list[_Entry], values: list[Any]) -> None:
    """Write states as their users do: a transform sees it, and one of JAX's own refuses some."""
    with contextlib.ExitStack() as undo:
        for entry, value in zip(entries, values, strict=True):
            entry.kind.write(entry.state, value)
            undo.callback(entry.kind.write, entry.state, entry.treedef.unflatten(entry.leaves.values()))
        undo.pop_all()


# -- one value -------------------------------------------------------------------------------------------------------


def _is_key(x: Any) -> bool:
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _saved(path: str, x: Any) -> Any:
    if _is_key(x):
        return jax.random.key_data(x)
    if isinstance(x, jax.Array):
        return x
    if (type(x) in _NUMBERS or is_array(x)) and np.asarray(x).dtype != object:
        return np.asarray(x)
    raise StateValueError(
        f"values: the state {path!r} holds {brief(x)}, which is not an array or a number.\n"
        f"Fix: leave it out: values(statetx.states(model, filter))."
    )


def _restored(path: str, values: Mapping[str, Any], current: Any) -> Any:
    """The value of a leaf, checked, and placed as the one that it replaces."""
    if path not in values:
        raise _mismatch(f"they have no {path!r}; they have {brief(list(values))}")
    x, old = values[path], _saved(path, current)
    if not is_array_or_number(x):
        raise _mismatch(f"{path!r} is {brief(x)} in them, not an array")
    if isinstance(x, jax.Array) and not isinstance(x, _jax.Tracer) and x.is_deleted():
        raise CheckpointError(
            f"restore: the array of {path!r} has been deleted: a step that donates its states took its memory.\n"
            f"Fix: copy the values before the step: jax.device_get(statetx.values(model))."
        )
    x = jax.random.key_data(x) if _is_key(x) else x if isinstance(x, jax.Array) else np.asarray(x)
    if x.dtype.type is np.void and x.dtype.itemsize == old.dtype.itemsize:
        x = x.view(old.dtype)  # numpy.save knows no dtype of ml_dtypes, and writes bytes
    is_number = x.shape == () and x.dtype.kind == old.dtype.kind  # a trained model may have arrays for numbers
    if x.shape != old.shape or not (x.dtype == old.dtype or is_number):
        raise _mismatch(f"{path!r} is {type_str(x)} in them, and {type_str(old)} in the program")
    if x.dtype != old.dtype and x.dtype.kind in "iu" and not isinstance(x, _jax.Tracer):
        limits = np.iinfo(old.dtype)
        if not limits.min <= int(x) <= limits.max:
            raise _mismatch(f"{path!r} is {int(x)} in them, which {type_str(old)} cannot hold")
    if type(current) in _NUMBERS:
        return type(current)(x.item()) if not isinstance(x, _jax.Tracer) else x
    if not isinstance(current, jax.Array):
        return type(current)(x) if isinstance(current, np.generic) else np.array(x, current.dtype)
    if _is_key(current):
        words = x if isinstance(x, _jax.Tracer) else jnp.array(np.asarray(x))
        return _placed(jax.random.wrap_key_data(words, impl=jax.random.key_impl(current)), current)
    x = _placed(x if x.dtype == old.dtype else x.astype(old.dtype), current)
    return _jax.with_weak_type(x, True) if jax.typeof(current).weak_type else x


def _placed(x: Any, current: jax.Array) -> jax.Array:
    if isinstance(x, _jax.Tracer) or isinstance(current, _jax.Tracer):
        return jnp.asarray(x)
    if current.committed:
        return jax.device_put(x, current.sharding, may_alias=False)
    return jnp.array(x) if _is_key(x) else jnp.array(np.asarray(x))  # an array made from NumPy's is not committed


def _mismatch(difference: str) -> CheckpointError:
    return CheckpointError(
        f"restore: the values are of other states: {difference}.\n"
        "Fix: build the model, and the dict of states, as when the values were taken."
    )


# -- the states ------------------------------------------------------------------------------------------------------


def _states_of(function: str, obj: Any) -> dict[str, Any]:
    """The states in an object, by paths that another process finds as well."""

    # A container of states only has its keys for paths. One that lists a state twice saves it once, by the first path.
    leaves: dict[str, Any] = {}
    for path, leaf in _leaves_of(obj, ""):
        if leaves.setdefault(path, leaf) is not leaf:
            raise CheckpointError(
                f"{function}: two of the states given have the same path, {path!r}.\nFix: rename a key of the dict."
            )
    if all(_states.kind_of(leaf) is not None for leaf in leaves.values()):
        first_paths = {id(state): path for path, state in reversed(leaves.items())}
        states = {path: state for path, state in leaves.items() if first_paths[id(state)] == path}
    else:
        states = {}
        # All methods are followed: which of them the training step calls is not known here.
        walk = Walk(all_methods=True)
        for path, leaf in leaves.items():
            _check_callable(function, path, leaf)
            states.update(walk.held(leaf, path))
        states.update(walk.beyond())
        _refuse_unstable(function, states, walk)
    if not states:
        raise CheckpointError(
            f"{function}: there is no state in {brief(obj)}, so nothing would be saved.\n"
            f"Fix: give the model, or a dict of states."
        )
    return states


def _leaves_of(obj: Any, path: str) -> Iterator[tuple[str, Any]]:
    """The items of nested dicts, lists and tuples, by path."""
    if type(obj) not in (dict, list, tuple):
        yield path, obj
        return
    for key, child in children(obj):
        yield from _leaves_of(child, f"{path}.{key}" if path else key)


def _check_callable(function: str, path: str, leaf: Any) -> None:
    if is_array_or_number(leaf) or isinstance(leaf, (bool, str, bytes)):
        raise CheckpointError(
            f"{function}: {path or 'its argument'!r} is {type_str(leaf)}, not a state, and would not be saved.\n"
            f"Fix: give the state itself rather than its value, keep the value in a statetx.State, or leave it out."
        )


def _refuse_unstable(function: str, states: Mapping[str, Any], walk: Walk) -> None:
    for path in states:
        if HIDDEN in path.split("."):
            holder = path.partition(f".{HIDDEN}")[0]
            raise CheckpointError(
                f"{function}: a state is held by {holder!r}, an iterator, a cache or another object whose contents "
                "have no names, so no path finds it in another process.\n"
                "Fix: hold it in a list, a dict or an attribute as well, or give a dict of states."
            )
        for holder in walk.unstable:
            if path.startswith(f"{holder}." if holder else ""):
                raise CheckpointError(
                    f"{function}: the state {path!r} is in the set {holder!r}, which has no order, and other items "
                    "of the set have the same name or type, so no path tells them apart in another process.\n"
                    "Fix: use a list or a dict, or give the states distinct names (name=)."
                )
