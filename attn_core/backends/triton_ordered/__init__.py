"""triton_ordered: our Triton kernels that add in one order, for tensors that are not in pages, with gradients."""
