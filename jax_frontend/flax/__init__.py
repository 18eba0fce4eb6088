"""``attention_fn`` for Flax's own layers, and what our layers share."""
