"""Plans a call from its arrays, and runs it under JAX's derivatives, vmap and sharding."""
