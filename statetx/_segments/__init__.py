"""Loops driven from the host: segments of steps, whose carries lie in memory or on disk."""
