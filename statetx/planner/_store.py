"""Plans on disk, by the structure of the program: the second run of a script reads its plans. And the bytes of measured programs.

``STATETX_CACHE`` names the folder; by default it is ``$XDG_CACHE_HOME/statetx``, and the empty string, 0, off, no, none or false switch the store off.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gzip
import hashlib
import importlib.metadata
import os
import pathlib
import re
import stat
import sysconfig
import time
import types
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from .. import _files, _jax, _records
from .._environment import switch
from .._equations.compiled import Program
from .._jax import Jaxpr
from .._records import Check
from .._states.messages import library_folders
from .._targets import current
from ._plan.record import PEAK, VERSION

_MAX_BYTES = 64 * 2**20  # of all stored plans together
_MAX_ENTRY = 32 * 2**20  # of one of them, not compressed
_ABANDONED = 24 * 60 * 60.0  # seconds after which a file that is not yet whole is left by a killed process
_MAX_DEPTH = 8  # of functions within a derivative rule


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


# -- entries -----------------------------------------------------------------------------------------------------------


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
        content = _decompressed(_files.read(path, _MAX_ENTRY, follow_links=False))
        fields = _records.verified(_records.parse(content), check)
    except (OSError, ValueError, zlib.error):
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


def _decompressed(content: bytes) -> bytes:
    """The inverse of `gzip.compress`; what becomes larger than an entry is refused on the way."""
    decompressor = zlib.decompressobj(wbits=31)
    found = decompressor.decompress(content, _MAX_ENTRY)
    if not decompressor.eof or decompressor.unused_data:
        raise ValueError("it is not a single stream of at most the size of an entry")
    return found


def _path(key: str) -> pathlib.Path | None:
    root = folder()
    return None if root is None else root / "plans" / f"{key}.json.gz"


def _remove_oldest(plans: pathlib.Path) -> None:
    """Keep our entries below the limit, and remove what killed processes left. Other files are not ours: they stay, and do not count."""
    entries = []
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


def peak_bytes(program: Program) -> int:
    """Arguments, outputs and temporaries of a program. It is compiled only if its bytes are not stored.

    They are found by what the compiler gets, its text and the options, so that those of another program cannot be taken for them.
    """
    lowered = program.lowered
    text = hashlib.sha256(lowered.as_text().encode()).hexdigest()  # long, if arrays are constants of the program
    key = _digest(*_environment(), program.compiler_options, *_jax.compile_settings(lowered), text).hexdigest()
    measured = lambda: {"version": VERSION, "peak_bytes": program.cost.peak_bytes}  # noqa: E731
    return remembered(key, PEAK, measured)["peak_bytes"]


# -- keys --------------------------------------------------------------------------------------------------------------


def key_of(programs: Sequence[tuple[Jaxpr, Sequence[str], Any]], *settings: Any) -> str:
    """A digest of programs and of everything else that a plan for them depends on.

    Args:
        programs: each with its `full_fingerprint` and its `TraceContext`.
        settings: values whose `repr` tells them apart.
    """
    digest = _digest(*_environment(), *settings)
    for jaxpr, lines, context in programs:
        digest.update(f"{[str(v.aval) for v in jaxpr.invars]} {_without_addresses(context)}\n".encode())
        digest.update("\n".join(lines).encode())
        digest.update("\n".join(_rules(jaxpr)).encode())
        numbers = {v: i for i, v in enumerate([*jaxpr.invars, *(v for e in jaxpr.eqns for v in e.outvars)])}
        digest.update(str([numbers.get(v) if isinstance(v, _jax.Var) else str(v) for v in jaxpr.outvars]).encode())
    return digest.hexdigest()


def _digest(*values: Any) -> Any:
    digest = hashlib.sha256()
    for value in values:
        digest.update(f"{_without_addresses(value)}\n".encode())
    return digest


def _environment() -> list[Any]:
    return [
        VERSION,
        _sources(),
        (jax.__version__, importlib.metadata.version("jaxlib")),
        current.environment(),
        [os.environ.get(name) for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")],
        jax.config.values.get("jax_remat3"),
    ]


@functools.cache
def _sources() -> str:
    """A digest of statetx itself: another version may plan otherwise."""
    digest = hashlib.sha256()
    for path in sorted(pathlib.Path(__file__).parents[1].rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _without_addresses(x: Any) -> str:
    return re.sub(r" at 0x[0-9a-f]+", "", x if isinstance(x, str) else repr(x))


def _rules(jaxpr: Jaxpr) -> Iterator[str]:
    """The code of the derivative rules in a program, which its fingerprint leaves out."""
    for eqn in jaxpr.eqns:
        for name, value in sorted(eqn.params.items()):
            is_rule = type(value).__name__ == "WrappedFun"  # JAX's wrapper of a rule
            if is_rule or (callable(value) and not isinstance(value, type) and not _jax.is_jaxpr(value)):
                yield f"{name} {_code(value, set())}"
        for inner in _jax.inner_jaxprs(eqn):
            yield from _rules(inner)


def _code(x: Any, seen: set[int], depth: int = 0) -> str:
    """A digest of a function's code, and of the functions that it closes over, wraps or calls.

    Of other values in closures, defaults and globals, numbers, text, what dicts hold, the attributes of plain objects and JAX's policies
    count, the rest by its type only. Lists are not looked into: JAX remembers there what a rule gave. Nor are functions of libraries.
    """
    if isinstance(x, (str, bytes, int, float, complex, type(None))):
        return repr(x)
    if id(x) in seen or depth > _MAX_DEPTH:
        return ""
    seen.add(id(x))
    inside = functools.partial(_code, seen=seen, depth=depth + 1)
    if type(x) is tuple:  # JAX's records of source lines are named ones
        return f"({','.join(map(inside, x))})"
    if isinstance(x, functools.partial):
        return f"partial({inside(x.func)},{inside(x.args)},{inside(x.keywords)})"
    code = getattr(x, "__code__", None)
    if code is not None:
        cells = [c.cell_contents for c in x.__closure__ or () if _is_filled(c)]
        cells += [x.__defaults__, x.__kwdefaults__, *_globals_of(x)]
        if isinstance(x, types.MethodType):  # a rule that runs through a watch
            cells.append(x.__self__)
        return f"{_code_digest(code)}({','.join(map(inside, cells))})"
    wrapped: Callable | None = getattr(x, "f", None) or getattr(x, "__wrapped__", None)  # JAX's `WrappedFun` has `f`
    if wrapped is not None:
        return f"{type(x).__name__}({inside(wrapped)},{inside(tuple(getattr(x, 'transforms', ())))})"
    if isinstance(x, (set, frozenset)):  # the names of a policy of JAX 0.12
        return f"({','.join(sorted(map(inside, x)))})"
    if type(x) is dict or isinstance(x, types.SimpleNamespace) or dataclasses.is_dataclass(x):
        values: dict[Any, Any] = x if type(x) is dict else _attributes(x)  # pyright: ignore[reportAssignmentType]
        return (
            f"{type(x).__name__}({','.join(sorted(f'{k}:{inside(v)}' for k, v in values.items() if type(k) is str))})"
        )
    is_policy = callable(x) and type(x).__module__.startswith("jax")  # their text has their settings
    return _without_addresses(x) if is_policy else type(x).__name__


def _attributes(x: Any) -> dict[str, Any]:
    """Of a plain object, or those fields of a dataclass that are set."""
    names = vars(x) if isinstance(x, types.SimpleNamespace) else [field.name for field in dataclasses.fields(x)]
    return {name: getattr(x, name) for name in names if hasattr(x, name)}


def _globals_of(function: Any) -> list[Any]:
    """The globals that a user's function reads, in the order of their names, without modules and classes."""
    code, values = function.__code__, function.__globals__
    if code.co_filename.startswith((*library_folders(), sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"))):
        return []
    found = [values[name] for name in sorted(set(_names_in(code))) if name in values]
    return [x for x in found if not isinstance(x, (types.ModuleType, type))]


def _names_in(code: Any) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if hasattr(constant, "co_names"):
            yield from _names_in(constant)


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _code_digest(code: Any) -> str:
    # The order in which a set is printed differs between processes.
    ordered = lambda c: sorted(map(repr, c)) if isinstance(c, frozenset) else repr(c)  # noqa: E731
    constants = [_code_digest(c) if hasattr(c, "co_code") else ordered(c) for c in code.co_consts]
    return hashlib.sha256(code.co_code + repr((constants, code.co_names)).encode()).hexdigest()[:16]
