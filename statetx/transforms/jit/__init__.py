"""`jit`: arguments, programs, states made inside, placement, and what is known ahead of a call."""
