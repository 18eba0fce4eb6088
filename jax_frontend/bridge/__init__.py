"""JAX's way to torch's kernels: the only place where torch and JAX meet."""
