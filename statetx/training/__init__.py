"""Optimizers with their memory in a state, and the values of states as a dict of arrays."""
