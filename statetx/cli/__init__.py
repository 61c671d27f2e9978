"""The command line, ``python -m statetx``: profiles, residuals, reports and plans of a function in a user's module."""
