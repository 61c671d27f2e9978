"""`Checkpointer`: save states to disk and restore them, by path.

A step is an orbax directory with two items: ``states``, the arrays by path, and ``manifest``, a record of each state:
its structure, the types of its leaves, the values of leaves that are not arrays, and a digest of each array, since
orbax's own format does not notice a changed bit.
"""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from .. import _frames, _states
from .._atomic import commit, locked
from .._environment import require
from .._errors import CheckpointError
from .._objects.contents import HIDDEN, children
from .._objects.walk import Walk
from .._text import brief, type_str
from .._tree import is_array_or_number, is_integer, whole_number
from .._typing import public
from . import _steps
from ._manifest import (
    LiveState,
    check_contents,
    compare,
    nest,
    reading,
    refuse_local,
    seal,
    unnest,
    unseal,
)


@public
class Checkpointer:
    """Save states to a directory during training, and resume from the last complete step.

    A thin layer over ``orbax.checkpoint.CheckpointManager``: all processes that hold a part of an array write it, in
    the background, and a step appears in the directory atomically. Everything to be restored must be a state: weights,
    the optimizer's state, random keys, the position in the data.

    Needs orbax: ``pip install 'statetx[saving]'``. Use it in a ``with`` block, or `close` it.

    Args:
        directory: where steps are saved; created if it does not exist. One program at a time may write there: its first
            `save` removes the files of unfinished saves.
        obj: a model, a function, or a container of these, whose states are saved: the states that `statetx.states`
            finds, and states that its methods read from modules and closures. Their paths are the names in the
            checkpoint. To select some, give a dict of states: ``statetx.states(model, filter)``.
        max_to_keep: number of last steps to keep; None for all.
        save_every: `save` writes the steps that this number divides, and skips others.

    State:
        `save` reads all states. `restore` writes all of them, or none if it raises. Restored arrays take the shardings
        of the arrays that they replace, whatever devices they were saved from.

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
            if number is not None and (not is_integer(number) or number < 1):
                raise ValueError(f"Checkpointer: {name} must be a whole number of at least 1, got {number!r}.")
        orbax = require("orbax.checkpoint", "Checkpointer", "saving")

        # Steps are saved at the interval, and when a preemption is announced. A partial, since the first `save` makes a
        # second manager with one more option.
        self._obj = obj
        self._directory = _as_directory(directory)
        self._args = orbax.args
        policies = orbax.checkpoint_managers
        self._options = functools.partial(
            orbax.CheckpointManagerOptions,
            save_decision_policy=policies.AnySavePolicy(
                [policies.FixedIntervalPolicy(save_every), policies.PreemptionCheckpointingPolicy()]
            ),
            preservation_policy=_steps.Latest(self._directory, max_to_keep),
            step_name_format=_steps.StepNames(),
        )
        with _as_one_error(f"{self._directory} cannot be opened", "give a directory that can be read, or made"):
            self._manager = orbax.CheckpointManager(self._directory, options=self._options())
        self._has_saved = False

    def __repr__(self) -> str:
        return f"Checkpointer({str(self._directory)!r}, steps {self.steps})"

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
            CheckpointError: the directory has this step or a later one, or something else of this name, or cannot be
                written; an earlier step could not be written; `obj` has no state, or a value in place of a
                state, or a state without a path that another process finds again; or a value differs between processes.
            StateValueError: a state holds something other than arrays, numbers, strings and None.
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
        # States are found again at each save: a model may have gained or replaced some.
        self._check_place(step)
        live = {path: LiveState(state) for path, state in _states_of(self._obj).items()}
        manifest = {path: entry.describe(path) for path, entry in live.items()}
        if jax.process_count() > 1:
            refuse_local(live)
        arrays = nest({path: entry.arrays() for path, entry in live.items()})
        items: dict[str, Any] = {"manifest": self._args.JsonSave(seal(manifest))}
        if arrays:  # orbax refuses to save an empty tree
            items["states"] = self._args.StandardSave(arrays)

        with self._writing():
            self._clean()
            return self._manager.save(step, args=self._args.Composite(**items), force=True)

    def _check_place(self, step: int) -> None:
        """Raise unless the step can be written. What orbax finds out later leaves threads behind that wait for minutes,
        also when the process ends.
        """
        path = os.path.join(self._directory, str(step))
        if os.path.lexists(path):  # orbax would remove it
            raise CheckpointError(
                f"Checkpointer.save({step}): there is {path}, which is not a step that a Checkpointer has written.\n"
                f"Fix: move it elsewhere, or save to another directory."
            )
        try:
            with tempfile.TemporaryFile(dir=self._directory):
                pass
        except OSError as e:
            raise CheckpointError(
                f"Checkpointer.save({step}): {self._directory} cannot be written: {e.strerror}.\n"
                f"Fix: make it writable, or save to another directory."
            ) from e

    def _clean(self) -> None:
        """Remove the files of unfinished saves, before the first save."""
        if not self._has_saved:
            # Cleaning waits for the first save: a reader must not remove the files that another program is writing. And
            # a manager cleans in the background, and waits for that in `save` only.
            self._manager.close()
            self._manager = type(self._manager)(
                self._manager.directory, options=self._options(cleanup_tmp_directories=True)
            )
            self._has_saved = True

    def wait(self) -> int | None:
        """Wait for saves to finish. Returns the last step, or None if there is none.

        Raises:
            CheckpointError: a step could not be written.
        """
        with self._writing():
            self._manager.wait_until_finished()
        return self._manager.latest_step()

    def restore(self, step: int | None = None) -> int | None:
        """Restore the value of every state at a step: of all states, or of none if an error is raised.

        Args:
            step: the step; the last one if None.

        Returns:
            The step; or None, with the states unchanged, if `step` is None and nothing was saved yet.

        Raises:
            CheckpointError: the checkpoint is damaged, the step does not exist, or the checkpoint is of other states:
                the message names the first path that is missing, or has another structure, shape or dtype.
        """
        self._refuse_inside("restore")

        # A step that is still being written is among the steps, and not readable yet.
        self.wait()
        step = self._manager.latest_step() if step is None else _as_step("restore", step)
        if step is None:
            return None
        location = f"step {step} in {self._manager.directory}"
        if step not in self.steps:
            raise CheckpointError(f"There is no {location}; it has {', '.join(map(str, self.steps)) or 'none'}.")

        irregular = _steps.irregular(os.path.join(self._directory, str(step)))
        if irregular is not None:
            raise CheckpointError(
                f"{irregular!r} in {location} is not a file, and would not be read to its end.\n"
                f"Fix: restore another step."
            )

        # First the manifest: it tells which arrays to request, and whether the checkpoint is of these states at all.
        manifest = unseal(self._read(location, step, manifest=self._args.JsonRestore()), location)
        live = {path: LiveState(state) for path, state in _states_of(self._obj).items()}
        with reading(location):
            compare(manifest, live, location)
            targets = nest({path: entry.targets(manifest[path]["leaves"]) for path, entry in live.items()})
        arrays = self._read(location, step, states=self._args.StandardRestore(targets)) if targets else {}

        # Every value is made and checked before any state is written.
        values = []
        with reading(location):
            for path, entry in live.items():
                records = manifest[path]["leaves"]
                leaves = entry.decoded(records, unnest(arrays.get(path, {})))
                check_contents(path, records, leaves, location)
                values.append(entry.restored(records, leaves))
        locked(_frames.ownership, _store_all, list(live.values()), values)
        return step

    def close(self) -> None:
        """Wait for saves to finish, and release the directory.

        Raises:
            CheckpointError: a step could not be written.
        """
        with self._writing():
            self._manager.close()

    def _writing(self) -> contextlib.AbstractContextManager[None]:
        return _as_one_error(
            f"A step could not be written to {self._directory}", "make room there, or save to another directory"
        )

    def _read(self, location: str, step: int, **item: Any) -> Any:
        (name,) = item
        try:
            return self._manager.restore(step, args=self._args.Composite(**item))[name]
        except Exception as e:  # orbax raises errors of every type on a damaged file
            raise CheckpointError(f"The {name} of {location} cannot be read: {e}\nFix: restore another step.") from e

    def _refuse_inside(self, method: str) -> None:
        if not _frames.is_idle():
            raise CheckpointError(f"Checkpointer.{method} reads and writes files: call it outside of every transform.")


@contextlib.contextmanager
def _as_one_error(what: str, fix: str) -> Iterator[None]:
    """Raise `CheckpointError` for errors of orbax and of the file system, which have every type."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as e:
        raise CheckpointError(f"Checkpointer: {what}: {e}\nFix: {fix}.") from e


def _as_directory(directory: str | os.PathLike) -> str:
    """The absolute path, after checking that its nearest existing ancestor is a directory."""
    if not isinstance(directory, (str, os.PathLike)):
        raise TypeError(
            f"Checkpointer: the directory must be a path, got {brief(directory)}.\n"
            f"Fix: the directory comes first: Checkpointer('checkpoints', model)."
        )
    # `lexists`, since a broken link exists and is not a directory.
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
    number = whole_number(step)
    if number is None:
        raise CheckpointError(
            f"Checkpointer.{method}: a step is a whole number of at least 0 and below 2**31, got {step!r}."
        )
    return number


def _store_all(live: Sequence[LiveState], values: Sequence[Any]) -> None:
    # Under the lock of ownership: no other thread can acquire a state between the check and the stores.
    for entry in live:
        entry.check_free()
    commit([entry.kind.store(entry.state, value) for entry, value in zip(live, values, strict=True)])


# -- the saved states ------------------------------------------------------------------------------------------------


def _states_of(obj: Any) -> dict[str, Any]:
    """The states that a `Checkpointer` saves, by paths that another process finds as well."""

    # A container of states only has its keys for paths. One that lists a state twice saves it once, by the first path.
    leaves: dict[str, Any] = {}
    for path, leaf in _leaves_of(obj, ""):
        if leaves.setdefault(path, leaf) is not leaf:
            raise CheckpointError(
                f"Checkpointer: two of the states given have the path {path!r}, by which they are saved.\n"
                f"Fix: rename a key of the dict."
            )
    states: dict[str, Any] = {}
    if all(_states.kind_of(leaf) is not None for leaf in leaves.values()):
        for path, state in leaves.items():
            if not any(state is unique for unique in states.values()):
                states[path] = state

    else:
        # All methods are followed: which of them the training step calls is not known here.
        walk = Walk(all_methods=True)
        for path, leaf in leaves.items():
            _check_callable(path, leaf)
            states.update(walk.held(leaf, path))
        states.update(walk.beyond())
        _refuse_unstable(states, walk)
    if not states:
        raise CheckpointError(
            f"Checkpointer: there is no state in {brief(obj)}, so nothing would be saved.\n"
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


def _check_callable(path: str, leaf: Any) -> None:
    if is_array_or_number(leaf) or isinstance(leaf, (bool, str, bytes)):
        raise CheckpointError(
            f"Checkpointer: {path or 'its argument'!r} is {type_str(leaf)}, not a state, and would not be saved.\n"
            f"Fix: give the state itself rather than its value, keep the value in a statetx.State, or leave it out."
        )


def _refuse_unstable(states: Mapping[str, Any], walk: Walk) -> None:
    for path in states:
        if HIDDEN in path.split("."):
            holder = path.partition(f".{HIDDEN}")[0]
            raise CheckpointError(
                f"Checkpointer: a state is held by {holder!r}, an iterator, a cache or another object whose contents "
                "have no names, so no path finds it in another process.\n"
                "Fix: hold it in a list, a dict or an attribute as well, or give a dict of states."
            )
        for holder in walk.unstable:
            if path.startswith(f"{holder}." if holder else ""):
                raise CheckpointError(
                    f"Checkpointer: the state {path!r} is in the set {holder!r}, which has no order, and other items "
                    "of the set have the same name or type, so no path tells them apart in another process.\n"
                    "Fix: use a list or a dict, or give the states distinct names (name=)."
                )
