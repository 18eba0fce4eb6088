"""Unsloth's way of calling attention, in the attention layers of transformers' models."""
