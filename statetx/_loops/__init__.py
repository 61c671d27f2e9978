"""Loops: strategies, schedules of checkpoints, nested or checkpointed loops, binding, tuning."""
