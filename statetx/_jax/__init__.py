"""The only folder that touches private names of JAX.

It supports jax 0.10 to 0.12. Each private name is used in one place; `tests/test_compat.py` fails when the meaning of
one shifts. The public names of its modules, which no two of them share, are names of this package.
"""

from . import patches as patches
from .batching import *
from .buffers import *
from .editing import *
from .equations import *
from .estimates import *
from .evaluation import *
from .host_calls import *
from .jitted import *
from .loops import *
from .lowering import *
from .marks import *
from .meshes import *
from .primitives import *
from .printing import *
from .refs import *
from .remat import *
from .rules import *
from .staging import *
from .tangents import *
from .traces import *
from .traces import _context as _context
from .versions import *
from .whole_calls import *
