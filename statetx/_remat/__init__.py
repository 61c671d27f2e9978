"""Values that a rematerialized function saves: policies, the survey of values, marks, the fence on CPUs."""

from . import parse as parse  # the operators of `Policy` convert their operands by it
