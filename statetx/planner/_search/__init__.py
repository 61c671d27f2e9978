"""The search: capture a program, find the options of its regions, compile what promises most, correct the model, until
nothing is left that is worth a compilation.
"""
