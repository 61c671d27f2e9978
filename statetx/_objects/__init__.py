"""Python objects as graphs: their children, the walk that finds states, paths, filters, opaque objects."""
