"""``attention_fn`` for Flax's own layers, and the code that our linen and NNX layers share."""
