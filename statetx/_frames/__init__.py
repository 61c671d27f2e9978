"""Frames: the states that a call reads or writes, with their values before it.

A `Frame` watches one call. For every state that existed before the call and is touched in it, the frame has an
`Access`: the state's value before the call, its value in the body (a transform may replace it by a tracer), whether
it was read before it was written, whether it was written, and where. When the frame closes, normally or by an
exception, each of these states holds its old value again, and the writes of the call are in `Frame.effects`: the
transform carries them out of the trace and publishes them.

Frames of a thread form a stack. A touch is reported to each of them, outermost first, so that every enclosing
transform sees the state as one of its own inputs.

A call is atomic: after an exception or an interrupt (KeyboardInterrupt, at any bytecode) its states hold their old
values or its new ones, never a mixture. Two rules ensure this. Closing a frame and publishing effects change several
states: both first compute a list of stores, and then run it by `commit`, which no signal handler can interrupt. And
`Frame.run` closes its frame on every way out.
"""

from collections.abc import Callable as _Callable

from .access import *
from .frame import *
from .frame import Frame as Frame
from .threads import *
from .threads import _local as _local
from .threads import current_frame as _current_frame

current_frame: _Callable[[], Frame | None] = _current_frame
"""The innermost open frame of this thread."""
