"""Reports on residuals: the values that a function saves for its backward pass, with the reasons."""
