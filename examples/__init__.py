"""Runnable examples of torch_frontend and jax_frontend; start them from the repository's root."""
