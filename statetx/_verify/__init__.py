"""Comparison of two steps: their results from equal states, the rounding that explains a difference, the line of the
first value that differs.
"""
