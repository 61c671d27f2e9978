"""Settings of every test: eight CPU devices, and no silent rank promotion."""

import jax

jax.config.update("jax_num_cpu_devices", 8)  # before any array is made: backends read it when they start
jax.config.update("jax_numpy_rank_promotion", "raise")
