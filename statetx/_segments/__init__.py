"""Loops driven from the host: segments of steps, whose carries lie in memory and on disk."""
