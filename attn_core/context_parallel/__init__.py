"""Context parallelism as plain data: who holds which positions, who computes which part, and what that costs."""
