"""What a training run needs beside transforms: optimizers with their memory in a state, values of states by path."""
