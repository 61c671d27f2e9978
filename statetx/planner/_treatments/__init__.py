"""The treatments of plans: what may be done with a part of a program. To add one, write its file and list it here."""

from __future__ import annotations

from .copies import Copies
from .groups import InGroups
from .inputs import StoredInputs
from .loops import CheckpointedLoop
from .treatment import Treatment

TREATMENTS: tuple[type[Treatment], ...] = (Copies, StoredInputs, CheckpointedLoop, InGroups)
"""All treatments, in the order in which they make proposals."""
