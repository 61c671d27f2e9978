"""Python objects as graphs: what they hold, the walk that finds states, paths and filters, opaque objects."""
