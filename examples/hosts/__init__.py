"""Adapters of other JAX libraries to our attention: each file is self-contained, to be copied."""
