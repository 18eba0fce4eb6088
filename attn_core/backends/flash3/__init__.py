"""flash3: FlashAttention-3, and its forward on e4m3 inputs."""
