"""One module for each foreign library whose states are watched; imported when the program imports that library."""
