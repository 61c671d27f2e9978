"""One module for each kind of state: `State`, `jax.Ref`, and brainstate's and nnx's, imported once the program has imported the library."""
