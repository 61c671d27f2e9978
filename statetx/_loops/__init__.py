"""Loops: strategies and schedules of checkpoints, nested and checkpointed loops, binding, tuning."""
