"""`brainstate.State` with its subclasses.

brainstate reports every read and write of a state's value to the `StateTraceStack`s entered in this thread since
the state was created, outermost first. Each frame enters its own stack, an observer that only reports to the frame
(`observe`). So statetx's frames and brainstate's transforms nest in any order, and each sees its own accesses (decision
3). Views and `bridge` are for the other direction.

Relied upon beyond the documented interface, and tested in `tests/test_brainstate.py`: the attributes ``_value``,
``_level``, ``_been_writen`` of a state; its methods ``_read_value`` and ``_write_value``, through which `value` goes;
the thread's ``TRACE_CONTEXT`` (``state_stack``, ``new_state_catcher``); the key of a ``StatefulFunction``, a named
tuple with `static_args` (`bridge`).
"""

from __future__ import annotations

from . import bridge, observe
from .kind import KIND as KIND

bridge.install()
observe.install()
