"""Optimizers with their memory in a state, and checkpoints of states."""
