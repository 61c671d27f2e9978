"""One module for each kind of state besides our own; those of a library are imported when the program imports it."""
