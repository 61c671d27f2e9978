"""A program to plan: its parts and values, the ways to hold these, its derivative, its fingerprint."""
