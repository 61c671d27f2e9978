"""The error of everything that the user typed wrong."""


class BadInput(Exception):
    """The command line names something that does not exist or cannot be read: one line on stderr, exit status 2."""
