"""sdpa_cudnn: cuDNN's attention, through torch."""
