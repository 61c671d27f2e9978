"""Reports on residuals: the values that a function saves for its backward pass, and the reasons."""

from .fwd_bwd import FwdBwd as FwdBwd
from .fwd_bwd import print_fwd_bwd as print_fwd_bwd
from .measure import measure as measure
from .report import Diagnosis as Diagnosis
from .report import Measured as Measured
from .report import MemoryReport as MemoryReport
from .report import memory_report as memory_report
from .saved import print_saved_residuals as print_saved_residuals
from .saved import saved_residuals as saved_residuals
from .table import Residual as Residual
from .table import Residuals as Residuals
