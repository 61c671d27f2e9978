"""The search: capture a program, compile what promises most, correct the model, until nothing is left that is worth a
compilation.
"""
