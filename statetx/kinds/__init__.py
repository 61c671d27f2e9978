"""One module for each kind of state: `State` and its own, `jax.Ref`, and those of libraries, imported when a program imports one."""
