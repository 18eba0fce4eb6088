"""What backends in JAX have in common."""
