"""The command line, ``python -m statetx``: reports on a function in a user's module."""
