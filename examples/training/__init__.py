"""A small Gemma-2-like model trained in torch and in Flax from the same weights and batches. See docs/training.md."""
