"""Which values a rematerialised function saves: policies, the survey of values, marks, and the fence on CPUs."""
