"""Samples from pages and scores the samples in packed training, with equal bits, in torch and in JAX."""
