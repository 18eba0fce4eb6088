"""jax_xla: attention in XLA's own operations; needs no torch."""
