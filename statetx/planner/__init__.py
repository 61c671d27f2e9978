"""Choose the values to save under a budget of bytes."""

from ._result import PlanRow as PlanRow
from .fit import Fit as Fit
from .fit import budget as budget
from .plan import Plan as Plan
from .planner import Planner as Planner
from .planner import plan as plan
