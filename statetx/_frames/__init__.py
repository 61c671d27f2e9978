"""Frames: which states a call reads and writes, and what they held before it.

A `Frame` watches one call. For every state that existed before the call and is touched in it, the frame keeps an
`Access`: the value it held, the value that was put in its place (a transform may hand the body a tracer), whether
it was read before it was written, whether it was written, and where. When the frame closes, normally or by an
exception, each of these states holds its old value again, and what the call wrote is in `Frame.effects`, for the
transform to carry out of the trace and to publish.

Frames of a thread form a stack. A touch is reported to each of them, outermost first, so that every enclosing
transform sees the state as one of its own inputs.

A call is atomic: after an exception or an interrupt (KeyboardInterrupt, at any bytecode) its states hold their old
values or its new ones, never a mixture. Two rules give that. What changes several states at once, closing a frame or
publishing effects, first computes everything as a list of stores and then runs the list by `commit`, which no signal
handler can divide. And whatever keeps a frame from closing, `Frame.run` closes it on the way out.
"""

from .access import UNKNOWN as UNKNOWN
from .access import Access as Access
from .access import Copy as Copy
from .access import Effect as Effect
from .access import is_leaf as is_leaf
from .current import _local as _local
from .current import current_frame as current_frame
from .current import idle_modes as idle_modes
from .current import is_idle as is_idle
from .current import set_current_frame as set_current_frame
from .frame import Frame as Frame
from .frame import around as around
from .frame import num_references as num_references
from .leaks import check_write as check_write
from .leaks import refuse_created as refuse_created
from .threads import changed as changed
from .threads import check_unchanged as check_unchanged
from .threads import foreign as foreign
from .threads import open_frames as open_frames
from .threads import ownership as ownership
from .threads import publish as publish
from .threads import report_touch as report_touch
from .threads import take as take
