"""A part's kernels and their merge, on torch tensors."""
