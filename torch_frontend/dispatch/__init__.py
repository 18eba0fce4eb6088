"""From tensors to a plan and a kernel."""
