"""Files: reads of untrusted contents, atomic writes."""

from __future__ import annotations

import contextlib
import io
import os
import secrets
import stat
from typing import Any

from ._text import format_bytes

Path = str | os.PathLike[str]

TEMPORARY = r"\.statetx-[0-9a-f]{16}\.part"
"""The names of files that are not yet whole, as a regular expression. A killed process leaves them."""


def read(path: Path, most: int, *, follow_links: bool = True) -> bytes:
    """Read a regular file. Others may have no end, or wait for a writer.

    Raises:
        OSError: it cannot be opened.
        ValueError: it is no regular file, or has more than `most` bytes.
    """
    _check_regular(os.stat(path, follow_symlinks=follow_links))
    # Between the two checks it may become another file.
    flags = [getattr(os, name, 0) for name in ("O_BINARY", "O_CLOEXEC", "O_NONBLOCK")]
    no_links = 0 if follow_links else getattr(os, "O_NOFOLLOW", 0)
    with open(os.open(path, os.O_RDONLY | sum(flags) | no_links), "rb") as file:
        _check_regular(os.fstat(file.fileno()))
        content = file.read(most + 1)
    if len(content) > most:
        raise ValueError(f"it has more than {format_bytes(most)}")
    return content


def _check_regular(status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("it is not a regular file")


def write(path: Path, content: bytes | str) -> None:
    """Write a file that the user has named: the old content stays until the new one is complete.

    A link stays, and the file that it leads to is replaced. A pipe or a device, such as /dev/stdout, is written to.

    Raises:
        OSError: it cannot be written; the old file is unchanged.
    """
    data = content.encode(errors="replace") if isinstance(content, str) else content
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        mode = None
    if mode is not None and not stat.S_ISREG(mode):
        with open(path, "wb") as file:
            file.write(data)
        return
    if mode is not None and not os.access(path, os.W_OK):  # a rename would replace a file that is protected
        raise PermissionError(13, os.strerror(13), os.fspath(path))
    try:
        replace(os.path.realpath(path), data, mode=None if mode is None else stat.S_IMODE(mode))
    except OSError as e:
        raise OSError(e.errno, e.strerror, os.fspath(path)) from e  # not the temporary file's name


def replace(path: Path, *parts: Any, mode: int | None = None) -> None:
    """Create or replace a file atomically: another process sees all of the old or all of the new one.

    Args:
        parts: of the content, which are buffers.
    """
    temporary = os.path.join(os.path.dirname(path), f".statetx-{secrets.token_hex(8)}.part")
    try:
        with open(temporary, "xb") as file:
            file.writelines(parts)
        if mode is not None:
            os.chmod(temporary, mode)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def lock(path: Path) -> io.IOBase:
    """Lock a file, made if there is none, until it is closed or the process ends, even by a kill.

    Raises:
        BlockingIOError: it is locked.
        OSError: it cannot be opened.
    """
    import fcntl  # not on Windows

    file = open(path, "ab")  # noqa: SIM115  # the caller closes it
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        file.close()
        raise
    return file


def write_figure(path: Path | io.IOBase, figure: Any) -> None:
    """`write` a figure of matplotlib. As in its ``savefig``, the suffix is the format, and .png is added if there is
    none.
    """
    if hasattr(path, "write"):
        figure.savefig(path, dpi=150)
        return
    root, suffix = os.path.splitext(os.fspath(path))  # type: ignore[arg-type]
    content = io.BytesIO()
    figure.savefig(content, dpi=150, format=suffix[1:] or "png")
    write(root + (suffix or ".png"), content.getvalue())
