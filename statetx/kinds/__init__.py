"""One module for each kind of state: `State`, `jax.Ref`, and brainstate's and nnx's, imported once the program has
imported the library.
"""

from . import native as native  # registers itself, before any other kind
from . import ref as ref
