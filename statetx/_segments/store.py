"""A directory of arrays that survives its process: checksums, atomic writes in a thread, a lock, a limit of bytes."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import hashlib
import json
import os
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from .. import _files
from .._errors import CheckpointError
from .._text import format_bytes

_DIGEST = 16  # bytes
_NAME = re.compile(r"[a-z]+(-\d+)*\.arrays")


def digest(*parts: Any) -> str:
    """A checksum of buffers."""
    return _hash(parts).hex()


def _hash(parts: Sequence[Any]) -> bytes:
    hashed = hashlib.blake2b(digest_size=_DIGEST)
    for part in parts:
        is_array = isinstance(part, np.ndarray)
        hashed.update(np.ascontiguousarray(part).reshape(-1).view(np.uint8).data if is_array else part)
    return hashed.digest()


class Store:
    """The files of one loop. Reads see the writes before them; a file that is damaged, or another's, is None.

    Args:
        path: of the directory, made if there is none. It is locked until `close`.
        limit: of the bytes of all files together; None for none.

    Attributes:
        owner: the name of the run; files of another run count as damaged.

    Raises:
        CheckpointError: another process, or another loop of this one, uses the directory; or it cannot be written.
    """

    def __init__(self, path: str, limit: int | None = None):
        self.path, self.limit, self.owner = path, limit, ""
        self._pending: collections.deque[concurrent.futures.Future] = collections.deque()
        self._failure: BaseException | None = None
        try:
            os.makedirs(path, exist_ok=True)
            self._lock = _files.lock(os.path.join(path, "lock"))
        except BlockingIOError as e:
            raise CheckpointError(
                f"The store {path} is in use, by another process or by another loop of this one.\n"
                f"Fix: wait until it is done, or give each loop a directory of its own."
            ) from e
        except OSError as e:
            raise self._unwritable(e) from e
        for name in os.listdir(path):  # left by a killed process
            if re.fullmatch(_files.TEMPORARY, name):
                os.unlink(os.path.join(path, name))
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="statetx-store")
        self.sizes = {n: os.path.getsize(self._at(n)) for n in os.listdir(path) if _NAME.fullmatch(n)}

    def _at(self, file: str) -> str:
        return os.path.join(self.path, file)

    def _unwritable(self, error: OSError) -> CheckpointError:
        return CheckpointError(
            f"The store {self.path} cannot be written: {error.strerror}. Its files are whole, and no state has "
            f"changed.\nFix: make room, or make it writable, and call again: the loop resumes there."
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of all files, the one that is being written included."""
        return sum(list(self.sizes.values()))  # a copy: the thread adds files

    def names(self, kind: str) -> list[tuple[int, ...]]:
        """The numbers in the names of all files of a kind, in order."""
        names = [file.removesuffix(".arrays").split("-") for file in list(self.sizes)]
        return sorted(tuple(map(int, numbers)) for first, *numbers in names if first == kind)

    # -- in the thread, one after the other --

    def write(self, name: str, arrays: Sequence[Any]) -> None:
        """Write a file beside the computation.

        Raises:
            CheckpointError: this file, or one before it, cannot be written.
        """
        self._submit(self._write, name, list(arrays))

    def prune(self, kind: str, kept_numbers: Sequence[int]) -> None:
        """Remove all files of a kind but those with these numbers, once the writes before are done."""
        self._submit(self._prune, kind, set(kept_numbers))

    def _submit(self, fun: Callable, *args: Any) -> None:
        self._pending.append(self._thread.submit(self._run, fun, *args))
        self.flush(2)  # at most so many carries wait in memory

    def _run(self, fun: Callable, *args: Any) -> None:
        if self._failure is not None:  # the old file must stay if its replacement is missing
            raise self._failure
        try:
            fun(*args)
        except BaseException as e:
            self._failure = e
            raise

    def flush(self, pending: int = 0) -> None:
        """Wait until no more than `pending` operations are left; raise the error of an earlier one."""
        while len(self._pending) > pending:
            self._pending.popleft().result()

    def _write(self, name: str, arrays: list) -> None:
        file, values = f"{name}.arrays", [np.ascontiguousarray(x) for x in arrays]
        types = [(x.dtype.name, np.shape(y)) for x, y in zip(values, arrays, strict=True)]
        header = json.dumps([name, self.owner, types]).encode() + b"\n"
        parts = [header, *(x.reshape(-1).view(np.uint8) for x in values)]
        size = _DIGEST + sum(map(len, parts))
        total = self.num_bytes + size  # a file that is replaced is there until the new one is whole
        if self.limit is not None and total > self.limit:
            raise CheckpointError(
                f"The store {self.path} would have {format_bytes(total)} with {name}, and its limit is "
                f"{format_bytes(self.limit)}.\nFix: raise limit=, or let the segments be longer."
            )
        try:
            _files.replace(self._at(file), _hash(parts), *parts)
        except OSError as e:
            raise self._unwritable(e) from e
        self.sizes[file] = size

    def _prune(self, kind: str, kept_numbers: set[int]) -> None:
        for numbers in self.names(kind):
            if not kept_numbers.intersection(numbers[:1]):
                self._remove("-".join(map(str, (kind, *numbers))) + ".arrays")

    def _remove(self, file: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._at(file))
        self.sizes.pop(file, None)

    def read(self, name: str) -> list[np.ndarray] | None:
        """The arrays of a file. A damaged file is removed."""
        self.flush()
        file = f"{name}.arrays"
        try:
            content = _files.read(self._at(file), self.sizes.get(file, 0))
            if content[:_DIGEST] != _hash([memoryview(content)[_DIGEST:]]):
                raise ValueError("the checksum differs")
            end = content.index(b"\n", _DIGEST) + 1
            *owner, types = json.loads(content[_DIGEST:end])
            if owner != [name, self.owner]:
                raise ValueError("it is of another run")
            arrays = []
            for dtype, shape in types:
                count = int(np.prod(shape, dtype=np.int64))
                arrays.append(np.frombuffer(content, jnp.dtype(dtype), count, end).reshape(shape))
                end += arrays[-1].nbytes
            return arrays
        except (OSError, ValueError):
            self._remove(file)
            return None

    def close(self) -> None:
        """Finish the writes and unlock the directory; errors of writes are for `flush` to raise."""
        self._thread.shutdown(wait=True)
        self._lock.close()
