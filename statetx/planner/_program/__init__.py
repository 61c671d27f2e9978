"""A program to plan: its parts, its values with the ways to hold them, cuts, derivative, fingerprint."""
