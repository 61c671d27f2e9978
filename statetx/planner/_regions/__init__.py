"""Cuts of a program, the options of each region, and the cheapest path through them within a limit of
bytes.
"""
