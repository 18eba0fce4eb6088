"""JAX's splash attention for TPUs as a backend."""
