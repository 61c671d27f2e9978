"""Choose the values to save under a budget of bytes."""

from ._record import PlanRow as PlanRow
from .fit import Fit as Fit
from .machine import CostModel as CostModel
from .machine import calibrate as calibrate
from .plan import Plan as Plan
from .plan import Planner as Planner
from .plan import plan as plan
