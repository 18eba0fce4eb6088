"""Runnable examples of torch_frontend and jax_frontend; run them from the root of the repository."""
