"""Choose the values to save under a budget of bytes."""

from ._plan import Plan as Plan
from ._record import PlanRow as PlanRow
from ._treatments import TREATMENTS as TREATMENTS
from .fit import Fit as Fit
from .fit import budget as budget
from .planner import Planner as Planner
from .planner import plan as plan
