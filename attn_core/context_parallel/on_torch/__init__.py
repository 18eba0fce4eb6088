"""Runs a part's kernels on torch tensors and merges their results."""
