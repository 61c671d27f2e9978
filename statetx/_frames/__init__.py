"""Frames: which states a call reads and writes, and what they held before it.

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

from .access import UNKNOWN as UNKNOWN
from .access import Access as Access
from .access import Copy as Copy
from .access import Effect as Effect
from .access import check_write as check_write
from .access import refuse_created as refuse_created
from .frame import Frame as Frame
from .frame import enclosing_frame as enclosing_frame
from .frame import end_differentiated as end_differentiated
from .frame import forget_differentiated as forget_differentiated
from .frame import note_step as note_step
from .frame import undone as undone
from .threads import WatchedKind as WatchedKind
from .threads import _local as _local
from .threads import acquire as acquire
from .threads import changed_state_error as changed_state_error
from .threads import current_frame as _current_frame
from .threads import foreign_state_error as foreign_state_error
from .threads import idle_modes as idle_modes
from .threads import is_idle as is_idle
from .threads import open_frames as open_frames
from .threads import ownership as ownership
from .threads import publish as publish
from .threads import report_touch as report_touch
from .threads import set_current_frame as set_current_frame

current_frame: _Callable[[], Frame | None] = _current_frame
"""The innermost open frame of this thread."""
