"""Optimizers whose memory is a state, and states on disk."""
