"""Unsloth's ``run_attention`` as plain data: its arguments, what they mean, and rows that share a prefix."""
