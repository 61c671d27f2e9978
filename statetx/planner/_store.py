"""Plans, with bytes of measured programs, on disk by the structure of the program: a script's second run reads them.

``STATETX_CACHE`` names the folder; by default it is ``$XDG_CACHE_HOME/statetx``, and the empty string, 0, off, no, none
or false switch the store off.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gzip
import hashlib
import importlib.metadata
import io
import os
import pathlib
import re
import stat
import time
import zlib
from collections.abc import Callable
from typing import Any

import jax

from .. import _files, _jax, _records
from .._environment import switch
from .._equations.compiled import Cost, Program
from .._records import Check
from .._targets import current
from ._record import COST, VERSION

_MAX_BYTES = 64 * 2**20  # of all stored plans together
_MAX_ENTRY = 32 * 2**20  # of one of them, not compressed
_ABANDONED = 24 * 60 * 60.0  # seconds after which a file that is not yet whole is left by a killed process


def folder() -> pathlib.Path | None:
    """The cache folder of statetx; None if it is switched off."""
    chosen = os.environ.get("STATETX_CACHE")
    if chosen is not None and (is_on := switch(chosen)) is not True:
        return pathlib.Path(chosen) if is_on is None else None
    try:
        cache = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    except RuntimeError:  # the user has no home folder
        return None
    return pathlib.Path(cache) / "statetx"


# -- entries ---------------------------------------------------------------------------------------------------------


def remembered(
    key: str,
    check: Check,
    make: Callable[[], dict[str, Any]],
    is_valid: Callable[[dict[str, Any]], bool] = lambda fields: True,
) -> dict[str, Any]:
    """The stored fields of a key. If there are none that are valid, they are made, and stored.

    Args:
        check: the types and ranges of the fields.
        is_valid: whether stored fields are an answer, as far as that can be told.
    """
    fields = load(key, check)
    if fields is None or not is_valid(fields):
        fields = make()
        save(key, fields)
    return fields


def load(key: str, check: Check) -> dict[str, Any] | None:
    """The stored fields of a key; None if there are none, or none that can be read: every failure is a miss."""
    path = _path(key)
    if path is None:
        return None
    try:
        with gzip.open(io.BytesIO(_files.read(path, _MAX_ENTRY, follow_links=False))) as file:
            content = file.read(_MAX_ENTRY)  # what becomes larger is cut, and no JSON
        fields = _records.verified(_records.parse(content), check)
    except (OSError, EOFError, ValueError, zlib.error):
        return None
    with contextlib.suppress(OSError):  # in a folder that is only read
        os.utime(path, follow_symlinks=False)  # it was used last
    return fields


def save(key: str, fields: dict[str, Any]) -> None:
    """Store the fields of a plan. A folder that cannot be written is no error: the plan is made again."""
    path = _path(key)
    if path is not None and len(content := _records.dump(fields)) <= _MAX_ENTRY:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            _files.replace(path, gzip.compress(content, mtime=0))
            _remove_oldest(path.parent)


def _path(key: str) -> pathlib.Path | None:
    root = folder()
    return None if root is None else root / "plans" / f"{key}.json.gz"


def _remove_oldest(plans: pathlib.Path) -> None:
    """Keep our entries below the limit, and remove what killed processes left. Other files are not ours: they stay, and
    do not count.
    """
    entries: list[tuple[float, int, pathlib.Path]] = []
    for path in plans.iterdir():
        is_temporary = re.fullmatch(_files.TEMPORARY, path.name) is not None
        if not is_temporary and re.fullmatch(r"[0-9a-f]{64}\.json\.gz", path.name) is None:
            continue
        with contextlib.suppress(OSError):  # another process removes as well
            status = path.lstat()
            if not stat.S_ISREG(status.st_mode):
                continue
            if not is_temporary:
                entries.append((status.st_mtime, status.st_size, path))
            elif time.time() - status.st_mtime > _ABANDONED:
                path.unlink()
    excess = sum(size for _, size, _ in entries) - _MAX_BYTES
    for _, size, path in sorted(entries)[:-1]:  # never the one just written
        if excess <= 0:
            return
        with contextlib.suppress(OSError):
            path.unlink()
        excess -= size


def cost(program: Program) -> Callable[[], Cost]:
    """A function for the cost of a program, which compiles it only if it is not stored. Any thread may call it.

    The key is the compiler's input, the program's text and the options, so that another program's cost cannot be
    taken for it.
    """
    lowered = program.lowered
    text = hashlib.sha256(lowered.as_text().encode()).hexdigest()  # long, if arrays are constants of the program
    key = key_of(program.compiler_options, *_jax.compile_settings(lowered), text)

    def measured() -> dict[str, Any]:
        fields = {"version": VERSION, **dataclasses.asdict(program.cost)}
        del fields["flops"]
        return fields

    def read() -> Cost:
        fields = remembered(key, COST, measured)
        return Cost(program.flops, **{name: x for name, x in fields.items() if name != "version"})

    return read


# -- keys ------------------------------------------------------------------------------------------------------------


def key_of(*settings: Any) -> str:
    """A digest of a result's inputs: these values, by their `repr`, and the versions of all code."""
    # Without addresses, which differ between processes.
    text = "\n".join(re.sub(r" at 0x[0-9a-f]+", "", repr(value)) for value in (*_environment(), *settings))
    return hashlib.sha256(text.encode()).hexdigest()


def _environment() -> list[Any]:
    return [
        VERSION,
        _sources(),
        (jax.__version__, importlib.metadata.version("jaxlib")),
        current.environment(),
        [os.environ.get(name) for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")],
        jax.config.values.get("jax_remat3"),  # pyright: ignore[reportUnknownMemberType]
    ]


@functools.cache
def _sources() -> str:
    """A digest of statetx itself: another version may plan otherwise."""
    digest = hashlib.sha256()
    for path in sorted(pathlib.Path(__file__).parents[1].rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
