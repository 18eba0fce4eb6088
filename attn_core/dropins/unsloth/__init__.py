"""Unsloth's ``run_attention`` as plain data: its arguments, the request they make, and rows that share a prefix."""
