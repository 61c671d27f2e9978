"""A program to plan: its parts and values, the ways to hold these, cuts, derivative, fingerprint."""
