"""Find values that were declared to be 0 or 1, to be stored as bits, and are not.

Nothing is checked by default: a check takes a host callback. With ``STATETX_DEBUG=1`` every call checks, and raises;
`testing` checks while it runs a function step by step, and collects what it finds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from .. import _jax, _states
from .._environment import flag
from .._errors import PolicyError
from .policy import Policy, StoredAs
from .stored import StoredType
from .survey import Site

Input = tuple[Sequence[str], int]
"""An input of a function: the names of all inputs, and its index. The names are looked up only where a check needs
them.
"""


class _DeclarationChecks(threading.local):
    """Whether declarations are checked in this thread.

    Attributes:
        messages: where wrong declarations are collected; None to raise.
        loops: where the policies of loops that declare values are noted; None to note nothing.
    """

    is_on: bool = flag("STATETX_DEBUG")
    messages: list[str] | None = None
    loops: list[Policy] | None = None


checks = _DeclarationChecks()


@contextlib.contextmanager
def collected() -> Iterator[list[str]]:
    """Check declarations in this block; gives the list of the messages."""
    former = checks.is_on, checks.messages
    checks.is_on, checks.messages = True, []
    try:
        with _jax.cache_key_context(object()):  # jax.jit must not reuse a trace without checks
            yield checks.messages
    finally:
        checks.is_on, checks.messages = former


@contextlib.contextmanager
def noted_loops() -> Iterator[list[Policy]]:
    """Note, in this block, the policies of loops that declare values; gives the list. Loops that run as Python do not
    apply them.
    """
    former, checks.loops = checks.loops, []
    try:
        yield checks.loops
    finally:
        checks.loops = former


def note_loop(policy: Any) -> None:
    """Note the policy of a loop that is called, None if it has none, for `noted_loops`."""
    if checks.loops is not None and isinstance(policy, Policy):
        if any(isinstance(a, StoredAs) and a.format.is_exact for a in policy.atoms()):
            checks.loops.append(policy)


def key() -> Any:
    """A key for functions that were built under the present setting."""
    return checks.is_on if checks.messages is None else id(checks.messages)


def checking(format: StoredType, source: Site | Input) -> StoredType:
    """The format of a declared value, with a check of it if declarations are checked."""
    if not checks.is_on:
        return format
    check = functools.partial(_check, _describe(source), format, checks.messages)
    return dataclasses.replace(format, check=check)


def _describe(source: Site | Input) -> str:
    if not isinstance(source, Site):
        names, n = source
        return f"the argument {names[n]!r} of {names}"
    names = " or ".join(repr(name) for name in sorted(source.value.names))
    place = _jax.traceback_site(source.eqn.source_info.traceback, _states.library_folders())
    return f"the value {names}, computed at {place}," if names else f"the value computed at {place}"


def _check(description: str, format: StoredType, messages: list[str] | None, x: Any) -> None:
    x = np.asarray(x)
    wrong = np.asarray(format.differs(x))
    if not wrong.any():
        return
    message = (
        f"{description} is stored as {format}, which declares that it is 0 or 1, but of its {x.size} entries "
        f"{wrong.sum()} are not: "
        f"the first of them is {x[wrong][0]}."
    )
    if messages is None:
        raise PolicyError(f"{message}\nFix: leave it out of stored_as('{format}'), or store it as 'bfloat16'.")
    if not any(other.startswith(description) for other in messages):  # a loop checks a value in each step
        messages.append(message)
