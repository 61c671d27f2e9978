"""`jit`: arguments, programs, created states, shardings, ahead-of-time stages."""
