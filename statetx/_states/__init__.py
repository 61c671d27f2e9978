"""States of every library behind one protocol: `Kind`, the registry of kinds, and parts of messages.

A *kind* of state (this package's, brainstate's, ...) is an object that implements `Kind`.
"""

from .messages import PACKAGE as PACKAGE
from .messages import call_site as call_site
from .messages import describe as describe
from .messages import invalidated_state_error as invalidated_state_error
from .messages import library_folders as library_folders
from .messages import no_history as no_history
from .messages import refuse_states as refuse_states
from .messages import user_stacklevel as user_stacklevel
from .protocol import Kind as Kind
from .registry import _kinds_lock as _kinds_lock
from .registry import class_options as class_options
from .registry import holds_other_arrays as holds_other_arrays
from .registry import is_array_state as is_array_state
from .registry import is_opaque as is_opaque
from .registry import is_unwatched as is_unwatched
from .registry import jax_traced as jax_traced
from .registry import kind_of as kind_of
from .registry import kind_of_state as kind_of_state
from .registry import kinds as kinds
from .registry import modes as modes
from .registry import register_kind as register_kind
from .registry import unjitted as unjitted
