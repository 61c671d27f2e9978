"""What a rematerialised region keeps: policies, the survey of values, marks, and the fence on CPUs."""
