"""flex: FlexAttention, one file for CPUs and one for GPUs."""
