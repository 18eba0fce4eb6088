"""Runs torch's kernels inside JAX programs. The only folder that imports both torch and JAX."""
