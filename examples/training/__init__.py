"""Trains a small Gemma-2-like model in torch and in Flax from the same weights. See docs/lab/training.md."""
