"""Attention and its derivatives in plain operations of torch or JAX."""
