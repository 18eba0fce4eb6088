"""math: every feature, in torch operations."""
