"""`jit`: arguments, programs, created states, shardings, and ahead-of-time stages."""
