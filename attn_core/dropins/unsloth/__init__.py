"""Unsloth's ``run_attention`` as plain data: its arguments, their meaning, and rows that share a prefix."""
