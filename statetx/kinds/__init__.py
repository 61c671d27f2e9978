"""One module for each kind of state; those of a library are imported once the program has imported it."""

from . import native as native  # registers itself, before any other kind
from . import ref as ref
